"""How a sharded step is divided among devices: the shardings of its values, and what devices send each other.

Where an equation sums along a sharded dimension, such as the second matrix product of a tensor-parallel
layer, the partitioner adds a sum over devices. Where a sharding constraint requires it, the partitioner
redistributes a value. Recomputing the equation communicates again.

The partitioner is run on a copy of the step whose equations are numbered (`_jax.partitioned`). The
planner prices other programs, made from the equations of the step: an equation is recognized by where it
was traced, its primitive, and its types. Equations that are equal in this have the mean of their
communication, and the fewest parts of their results.

Known limits: values that are gathered for one equation, such as sharded weights, are not counted. If the
equation is recomputed, its derivative needs the gathered values anyway.
"""

from __future__ import annotations

import collections
import itertools
import logging
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import jax

from remat import _jax
from remat.aliases import Leaf
from remat.ir.rewriting import Rewriting
from remat.printing import printable

_log = logging.getLogger("remat")

_SCOPE = "remat_equation_"
_NUMBER = re.compile(rf"{_SCOPE}([0-9]+)")
# Equations that ask for another sharding of a value.
_REDISTRIBUTING = ("sharding_constraint", "reshard")


class Sent(NamedTuple):
    """What each device sends for an equation, and among how many devices the equation's work is divided."""

    n_bytes: float
    n_devices: int


class Partition:
    """How equations are divided among devices.

    Args:
      sent: by kind of equation, what is sent for it.
      parts: by kind of equation, into how many parts each result is divided.
    """

    def __init__(
        self,
        sent: Mapping[Hashable, Sent] | None = None,
        parts: Mapping[Hashable, tuple[int, ...]] | None = None,
    ) -> None:
        self._sent, self._parts = sent or {}, parts or {}

    def __repr__(self) -> str:
        return f"Partition({len(self._parts)} kinds of equations, {len(self._sent)} communicate)"

    @property
    def is_known(self) -> bool:
        """Return whether anything is known about equations."""
        return bool(self._parts)

    def sent(self, eqn: _jax.JaxprEqn) -> Sent | None:
        """Return what the devices send each other for an equation; None for nothing."""
        return self._sent.get(_kind(eqn)) if self._sent else None

    def parts(self, eqn: _jax.JaxprEqn) -> tuple[int, ...] | None:
        """Return into how many parts each result of an equation is divided; None if that is unknown."""
        return self._parts.get(_kind(eqn)) if self._parts else None


#: Of a step on one device, and of one whose partition is unknown.
UNKNOWN = Partition()


class _Numbering(Rewriting):
    """Gives each equation a scope with its number."""

    def __init__(self) -> None:
        super().__init__()
        self.numbered: list[_jax.JaxprEqn] = []

    def equations(self, jaxpr: _jax.Jaxpr) -> list[_jax.JaxprEqn]:
        found = []
        for eqn in jaxpr.eqns:
            scope = f"{_SCOPE}{len(self.numbered)}"
            self.numbered.append(eqn)
            found.append(_jax.in_scope(_jax.without_traceback(self.within(eqn)), scope))
        return found


def numbered(jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, list[_jax.JaxprEqn]]:
    """Return a program whose equations, at any depth, have their numbers as scopes, and these equations."""
    numbering = _Numbering()
    return numbering.program(jaxpr), numbering.numbered


def partition_of(lowered: jax.stages.Lowered, eqns: Sequence[_jax.JaxprEqn]) -> Partition:
    """Return how the partitioner divides a step; `UNKNOWN` if it cannot read the program.

    Args:
      lowered: the numbered program.
      eqns: its equations, by number.
    """
    try:
        divided = _jax.partitioned(lowered)
    except _jax.NotPartitionedError as error:
        _log.debug("the partition is not known: %s", printable(str(error)))
        return UNKNOWN
    operations: dict[int, list[_jax.Divided]] = {}
    for one in divided:
        number = _number_of(one.location)
        if number is not None:
            operations.setdefault(number, []).append(one)
    by_kind: dict[Hashable, list[tuple[_jax.JaxprEqn, list[_jax.Divided]]]] = {}
    for number, of_number in operations.items():
        by_kind.setdefault(_kind(eqns[number]), []).append((eqns[number], of_number))
    sent, parts = {}, {}
    for kind, of_kind in by_kind.items():
        all_sent = list(itertools.starmap(_sent_by, of_kind))
        if any(one.n_bytes for one in all_sent):
            mean = sum(one.n_bytes for one in all_sent) / len(all_sent)
            sent[kind] = Sent(mean, max(one.n_devices for one in all_sent))
        known = [found for found in itertools.starmap(_parts_by, of_kind) if found is not None]
        if known:
            parts[kind] = tuple(map(min, zip(*known)))
    return Partition(sent, parts)


def partition_of_program(jaxpr: _jax.Jaxpr, inputs: Sequence[Leaf]) -> Partition:
    """Return how the partitioner divides a program whose results it may divide as it likes.

    Args:
      jaxpr: the program.
      inputs: arrays, or their types, with shardings.
    """
    program, eqns = numbered(jaxpr)
    lowered = jax.jit(lambda *xs: _jax.call_jaxpr(program, xs)).lower(*inputs)
    return partition_of(lowered, eqns)


def _number_of(location: str) -> int | None:
    """Return the number of the innermost equation at an operation's location; None if that names none."""
    own, _, _ = location.partition(" at ")
    found = _NUMBER.findall(own)
    return int(found[-1]) if found else None


def _sent_by(eqn: _jax.JaxprEqn, operations: Sequence[_jax.Divided]) -> Sent:
    if eqn.primitive.name in _REDISTRIBUTING:
        # Further redistributions are for equations that read the value.
        (first, *_) = operations
        return Sent(first.sent_bytes, max(first.parts))
    sums = [one for one in operations if one.n_devices]
    n_devices = max((one.n_devices for one in sums), default=1)
    # The equation of a function that is called several times has the operations of all calls.
    kinds = collections.Counter((one.name, one.shapes) for one in operations if one.name)
    n_calls = min(kinds.values(), default=1)
    return Sent(sum(one.sent_bytes for one in sums) / n_calls, n_devices)


def _parts_by(eqn: _jax.JaxprEqn, operations: Sequence[_jax.Divided]) -> tuple[int, ...] | None:
    """Return the parts of an equation's results, from the last operation that makes such arrays.

    A loop has further results before those of its equation. A redistribution is for the equation that reads
    the value, unless it scatters a sum over devices.
    """
    shapes = tuple(getattr(v.aval, "shape", None) for v in eqn.outvars)
    n_results = len(shapes)
    fitting = [one for one in operations if one.shapes[-n_results:] == shapes]
    if eqn.primitive.name in _REDISTRIBUTING:
        return fitting[0].parts if fitting else None
    found: tuple[int, ...] | None = None
    is_sum = False
    for one in fitting:
        parts = one.parts[-n_results:]
        if not one.is_redistribution:
            found = parts
        elif is_sum and found is not None:
            found = max(found, parts)
        is_sum = is_sum or one.n_devices > 0
    return found


def _kind(eqn: _jax.JaxprEqn) -> Hashable:
    """Return what equations of one kind have in common, also after programs are made from them."""
    types = tuple(
        (getattr(v.aval, "shape", ()), str(getattr(v.aval, "dtype", "")))
        for v in (*eqn.invars, *eqn.outvars)
    )
    dimensions = str(eqn.params.get("dimension_numbers", eqn.params.get("axes", "")))
    return _jax.traceback_of(eqn), eqn.primitive.name, types, dimensions
