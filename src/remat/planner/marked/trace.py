"""Conversion of a step that was traced with regions to the `Program` that is planned.

The step is traced in the tracing context of a `Recording`, so its jaxpr has each region's forward and
backward program as one marked equation. `program.from_jaxpr` writes the operations. This module adds
the region that each belongs to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from remat import _jax
from remat.ir.equations import inline_body
from remat.planner.marked.regions import Record, RegionHalf
from remat.program.from_jaxpr import (
    ProgramWriter,
    Slowdown,
    n_bytes,
    no_slowdown,
    type_text,
)
from remat.program.program import Place, Program


def program_of_step(
    jaxpr: _jax.Jaxpr,
    records: Mapping[tuple[str, str], Record],
    shards: Sequence[int],
    slowdown: Slowdown = no_slowdown,
) -> Program:
    """Return the program of a whole step, with the regions' programs inlined.

    Args:
      jaxpr: the step, traced under a `Recording`.
      records: the regions that were recorded.
      shards: the shard count of each argument.
      slowdown: measured slowdown of equations that are separate kernels; fused ones have none.
    """
    return _written(jaxpr, records, shards, slowdown).program(jaxpr.outvars)


def shards_in_bodies(
    jaxpr: _jax.Jaxpr, records: Mapping[tuple[str, str], Record], shards: Sequence[int]
) -> dict[_jax.Var | str, int]:
    """Return the shard counts of the inputs of regions in loops.

    They are keyed by variable, and also by type, since a loop's forward body may be another jaxpr
    than the region's. The arguments are those of `program_of_step`.
    """
    return _written(jaxpr, records, shards, no_slowdown).body_shards


def _written(
    jaxpr: _jax.Jaxpr,
    records: Mapping[tuple[str, str], Record],
    shards: Sequence[int],
    slowdown: Slowdown,
) -> _RegionWriter:
    writer = _RegionWriter(records, slowdown)
    writer.enter(jaxpr.invars, shards)
    writer.enter(jaxpr.constvars, None)
    writer.write(jaxpr, "")
    return writer


def program_of_record(
    record: Record,
    shards: Mapping[_jax.Var | str, int] | None = None,
    slowdown: Slowdown = no_slowdown,
) -> Program:
    """Return the program of a single region: its forward program, then its backward program.

    Inputs of the region do not count as allocated by it. `shards` holds their shard counts.
    """
    shards = shards or {}

    def count(v: _jax.Var) -> int:
        return shards.get(v) or shards.get(type_text(v.aval), 1)

    writer = _RegionWriter({record.region_id: record}, slowdown)
    forward, backward = record.region.forward, record.backward
    writer.enter(forward.invars, [count(v) for v in forward.invars])
    linear = record.region.linear
    writer.enter(linear.invars, [count(v) for v in linear.invars])
    writer.write_side(forward, (record, False), "")
    residuals = set(record.region.residuals)
    # Cotangents are sharded as the value with the most shards is.
    most = max(shards.values(), default=1)
    late = [v for v in backward.invars if v not in residuals]
    writer.enter(late, [most if n_bytes(v.aval) >= most else 1 for v in late])
    writer.write_side(backward, (record, True), "")
    n_known = len(forward.outvars) - len(record.region.residuals)
    return writer.program([*forward.outvars[:n_known], *backward.outvars])


class _RegionWriter(ProgramWriter):
    """Writes a step's jaxpr as operations with the region and the number of each."""

    def __init__(self, records: Mapping[tuple[str, str], Record], slowdown: Slowdown) -> None:
        super().__init__(slowdown)
        self.records = records
        self.body_shards: dict[_jax.Var | str, int] = {}
        self._side: tuple[Record, bool] | None = None

    def write_side(self, jaxpr: _jax.Jaxpr, side: tuple[Record, bool], path: str) -> None:
        """Write a region's forward or backward program."""
        before, self._side = self._side, side
        self.write(jaxpr, path)
        self._side = before

    def _half(self, eqn: _jax.JaxprEqn) -> RegionHalf | None:
        half = eqn.params.get("split")
        return half if isinstance(half, RegionHalf) and half.key in self.records else None

    def body_of(self, eqn: _jax.JaxprEqn) -> _jax.Jaxpr | None:
        if self._half(eqn) is not None:
            return eqn.params["jaxpr"]
        # A region saves and recomputes values of its own program, so a call in it is one operation.
        if self._side is not None and eqn.primitive.name != "remat":
            return None
        return inline_body(eqn)

    def call(self, eqn: _jax.JaxprEqn, body: _jax.Jaxpr, path: str) -> None:
        before, half = self._side, self._half(eqn)
        if half is not None:
            self._side = (self.records[half.key], half.is_backward)
        super().call(eqn, body, path)
        self._side = before

    def operation(self, eqn: _jax.JaxprEqn, path: str) -> None:
        super().operation(eqn, path)
        place = None if self._side is None else _place(*self._side, eqn)
        if place is not None:
            self.ops[-1] = dataclasses.replace(self.ops[-1], place=place)
        body = _jax.scan_body(eqn)
        if body is not None:
            self._note_shards(body, [self._shards_of(v) for v in eqn.invars])

    def _shards_of(self, v: Any) -> int:
        return self.shards[self.ids[v]] if _jax.is_var(v) else 1

    def _note_shards(self, body: _jax.Jaxpr, shards: Sequence[int]) -> None:
        """Propagate the shard counts of a loop's operands to the regions in its body."""
        known = dict(zip(body.invars, shards))
        for v, n in known.items():
            text = type_text(v.aval)
            self.body_shards[text] = max(n, self.body_shards.get(text, 1))
        for eqn in body.eqns:
            operands = [known.get(v, 1) if _jax.is_var(v) else 1 for v in eqn.invars]
            for v in eqn.outvars:
                most = max(operands, default=1)
                known[v] = most if n_bytes(v.aval) >= most else 1
            inner = _jax.scan_body(eqn)
            if isinstance(eqn.params.get("split"), RegionHalf):
                self.body_shards.update(zip(eqn.params["jaxpr"].invars, operands))
                self._note_shards(eqn.params["jaxpr"], operands)
            elif inner is not None:
                self._note_shards(inner, operands)


def _place(record: Record, is_backward: bool, eqn: _jax.JaxprEqn) -> Place | None:
    if is_backward:
        number = record.backward_numbers.get(eqn.outvars[0]) if eqn.outvars else None
    else:
        number = next(
            (n for v in eqn.outvars if (n := record.region.numbering.number.get(v)) is not None),
            None,
        )
    return None if number is None else Place(record.region_id, is_backward, number)
