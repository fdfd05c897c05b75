"""From a traced step to the `Program` that is planned on: the only module that reads jaxprs for that.

A step is traced while a `Recording` is under way, so that its jaxpr holds each region's forward and
backward program as one marked equation. Calls, regions and the bodies of `shard_map` are written
out; loops and branches stay operations of their own, with the memory that their bodies need as
workspace.

Bytes are of one device: inside `shard_map` types are local already, elsewhere `Shards` divides by
what the value's sharding says, which is propagated from the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat import _jax
from remat.ir.equations import fusion_of, inline_body, is_collective, is_fusible, is_repeatable
from remat.ir.flops import bytes_moved, flops_of, through_bodies
from remat.ir.operations import Fusion
from remat.planner.regions import Record
from remat.program.costs import Costs, Roofline, dtype_of
from remat.program.fusion import fuse
from remat.program.program import Op, Place, Program, without_dead
from remat.program.targets import n_shards
from remat.solvers.simulate import no_remat
from remat.transform import planned

_MOST_BYTES_OF_A_NUMBER = 16

#: How many times longer an equation takes than by the price of its operations and bytes.
Slowdown = Callable[[_jax.JaxprEqn], float]


def _none(_: _jax.JaxprEqn) -> float:
    return 1.0


def slowdowns(costs: Costs) -> Slowdown:
    """Of equations that are kernels of their own, and of loops of such."""
    if isinstance(costs, Roofline):
        return _none

    def expected_s(eqn: _jax.JaxprEqn) -> float:
        return costs.seconds(flops_of(eqn), bytes_moved(eqn), dtype_of(eqn))

    def taken_s(eqn: _jax.JaxprEqn) -> float:
        is_kernel = fusion_of(eqn) in (Fusion.KERNEL, Fusion.REDUCE)
        return expected_s(eqn) * (costs.slowdown(eqn) if is_kernel else 1.0)

    def of(eqn: _jax.JaxprEqn) -> float:
        expected = through_bodies(eqn, expected_s)
        return float(through_bodies(eqn, taken_s) / expected) if expected else 1.0

    return of


def program_of_step(
    jaxpr: _jax.Jaxpr,
    records: Mapping[tuple[str, str], Record],
    shards: Sequence[int],
    slowdown: Slowdown = _none,
) -> Program:
    """A whole step, with the regions' programs written out in it.

    Args:
      jaxpr: of the step, traced under a `Recording`.
      records: what that took down.
      shards: for each argument over how many devices it is divided.
      slowdown: of equations that are kernels of their own; what is fused has none.
    """
    builder = Builder(records, slowdown)
    builder.enter(jaxpr.invars, shards)
    builder.enter(jaxpr.constvars, [1] * len(jaxpr.constvars))
    builder.write(jaxpr, None, "")
    return builder.program(jaxpr.outvars)


def shards_in_bodies(
    jaxpr: _jax.Jaxpr, records: Mapping[tuple[str, str], Record], shards: Sequence[int]
) -> dict[_jax.Var | str, int]:
    """For inputs of regions in loops over how many devices they are divided; arguments as above.

    A loop's forward body is not always the region's program itself; there values are known by type.
    """
    builder = Builder(records)
    builder.enter(jaxpr.invars, shards)
    builder.enter(jaxpr.constvars, [1] * len(jaxpr.constvars))
    builder.write(jaxpr, None, "")
    return builder.body_shards


def program_of_record(
    record: Record,
    shards: Mapping[_jax.Var | str, int] | None = None,
    slowdown: Slowdown = _none,
) -> Program:
    """One region by itself: its forward program, then its backward program.

    Inputs of the region count as there anyway. `shards` says how they are divided.
    """
    shards = shards or {}

    def divided(v: _jax.Var) -> int:
        return shards.get(v) or shards.get(type_text(v.aval), 1)

    builder = Builder({record.region_id: record}, slowdown)
    forward, backward = record.region.forward, record.backward
    builder.enter(forward.invars, [divided(v) for v in forward.invars])
    linear = record.region.linear
    builder.enter(linear.invars, [divided(v) for v in linear.invars])
    builder.write(forward, (record, False), "")
    residuals = set(record.region.residuals)
    # Cotangents are divided as the largest of the values are.
    most = max(shards.values(), default=1)
    late = [v for v in backward.invars if v not in residuals]
    builder.enter(late, [most if n_bytes(v.aval) >= most else 1 for v in late])
    builder.write(backward, (record, True), "")
    n_known = len(forward.outvars) - len(record.region.residuals)
    return builder.program([*forward.outvars[:n_known], *backward.outvars])


class Builder:
    """Writes jaxprs out as operations on numbered values."""

    def __init__(
        self, records: Mapping[tuple[str, str], Record], slowdown: Slowdown = _none
    ) -> None:
        self.records = records
        self.slowdown = slowdown
        self.ops: list[Op] = []
        self.bytes: list[int] = []
        self.types: list[str] = []
        self.shards: list[int] = []
        self.inputs: set[int] = set()
        self.ids: dict[_jax.Var, int] = {}
        self.body_shards: dict[_jax.Var | str, int] = {}
        self.most_shards = 1

    def enter(self, variables: Sequence[_jax.Var], shards: Sequence[int] | None) -> None:
        self.most_shards = max([self.most_shards, *(shards or ())])
        for v, n in zip(variables, shards or [1] * len(variables)):
            if v not in self.ids:
                self.inputs.add(self._new(v, n))

    def program(self, outvars: Sequence[Any]) -> Program:
        outs = tuple(self.ids[v] for v in outvars if _jax.is_var(v))
        inputs = frozenset(self.inputs)
        return Program(tuple(self.ops), tuple(self.bytes), tuple(self.types), inputs, outs)

    def _new(self, v: _jax.Var, shards: int) -> int:
        number = len(self.bytes)
        self.ids[v] = number
        self.bytes.append(-(-n_bytes(v.aval) // shards))
        self.types.append(type_text(v.aval))
        self.shards.append(shards)
        return number

    def write(self, jaxpr: _jax.Jaxpr, side: tuple[Record, bool] | None, path: str) -> None:
        for index, eqn in enumerate(jaxpr.eqns):
            here = _joined(path, _jax.name_stack_of(eqn))
            policy = eqn.params.get("policy")
            if isinstance(policy, planned.Role) and policy.key in self.records:
                record = self.records[policy.key]
                self._call(eqn, eqn.params["jaxpr"], (record, policy.is_backward), here)
                continue
            body = inline_body(eqn)
            # What a region saves and recomputes are values of its own program: a call in it is one
            # operation.
            if body is not None and (side is None or eqn.primitive.name == "remat"):
                self._call(eqn, body, side, here)
                continue
            self._op(eqn, side, index, here)

    def _call(
        self, eqn: _jax.JaxprEqn, body: _jax.Jaxpr, side: tuple[Record, bool] | None, path: str
    ) -> None:
        saved = {v: self.ids.get(v) for v in body.invars}
        operands = [self.ids.get(v) if _jax.is_var(v) else None for v in eqn.invars]
        is_local = eqn.primitive.name == "shard_map"
        around = self.most_shards
        if is_local:
            self.most_shards = 1
        for v, operand in zip(body.invars, operands):
            if operand is None:
                self.inputs.add(self._new(v, 1))
            elif is_local:
                # Types in a shard_map are of one device.
                self.ids[v] = operand
                self.bytes[operand] = n_bytes(v.aval)
                self.shards[operand] = 1
            else:
                self.ids[v] = operand
        for v in body.constvars:
            self.inputs.add(self._new(v, 1))
        self.write(body, side, path)
        self.most_shards = around
        for outer, v in zip(eqn.outvars, body.outvars):
            if _jax.is_var(v):
                self.ids[outer] = self.ids[v]
            else:
                self.inputs.add(self._new(outer, 1))
        for v, number in saved.items():
            if number is not None:
                self.ids[v] = number

    def _op(
        self, eqn: _jax.JaxprEqn, side: tuple[Record, bool] | None, index: int, path: str
    ) -> None:
        operands = tuple(self.ids[v] for v in eqn.invars if _jax.is_var(v))
        # What is made from nothing or from a number is divided as other values are.
        arrays = [v for v in operands if self.bytes[v] > _MOST_BYTES_OF_A_NUMBER]
        shards = max((self.shards[v] for v in arrays), default=self.most_shards)
        shards = _shards_said(eqn) or shards
        results = tuple(self._new(v, self._result_shards(v, shards)) for v in eqn.outvars)
        body = _jax.scan_body(eqn)
        if body is not None:
            self._note_shards(body, [self._shards_of(v) for v in eqn.invars])
        fusion = fusion_of(eqn)
        place = _place(side, eqn, index)
        self.ops.append(
            Op(
                name=eqn.primitive.name,
                fusion=fusion,
                operands=operands,
                results=results,
                flops=flops_of(eqn) / shards,
                dtype=_dtype(eqn),
                extra_bytes=_extra_bytes(eqn),
                workspace_bytes=workspace_bytes(eqn) // shards,
                place=place,
                source=_jax.source_line_of(eqn),
                path=path,
                label=_jax.checkpoint_name_of(eqn) or "",
                repeatable=is_repeatable(eqn) and not is_collective(eqn),
                slowdown=self.slowdown(eqn) if fusion in (Fusion.KERNEL, Fusion.REDUCE) else 1.0,
            )
        )

    def _shards_of(self, v: Any) -> int:
        return self.shards[self.ids[v]] if _jax.is_var(v) else 1

    def _note_shards(self, body: _jax.Jaxpr, shards: Sequence[int]) -> None:
        """Follow the division of a loop's operands to the regions in its body."""
        known = dict(zip(body.invars, shards))
        for v, n in known.items():
            text = type_text(v.aval)
            self.body_shards[text] = max(n, self.body_shards.get(text, 1))
        for eqn in body.eqns:
            operands = [known.get(v, 1) if _jax.is_var(v) else 1 for v in eqn.invars]
            for v in eqn.outvars:
                most = max(operands, default=1)
                known[v] = most if n_bytes(v.aval) >= most else 1
            policy = eqn.params.get("policy")
            inner = _jax.scan_body(eqn)
            if isinstance(policy, planned.Role):
                self.body_shards.update(zip(eqn.params["jaxpr"].invars, operands))
                self._note_shards(eqn.params["jaxpr"], operands)
            elif inner is not None:
                self._note_shards(inner, operands)

    def _result_shards(self, v: _jax.Var, shards: int) -> int:
        return shards if n_bytes(v.aval) >= shards else 1


def _shards_said(eqn: _jax.JaxprEqn) -> int:
    """Over how many devices the program itself says that a value is divided; 0 if it does not."""
    sharding = eqn.params.get("sharding") if eqn.primitive.name == "sharding_constraint" else None
    if sharding is None:
        return 0
    try:
        return n_shards(eqn.outvars[0].aval.shape, sharding)
    except ValueError:  # dimensions that the mesh does not divide, or a mesh of other axes
        return 0


def _place(side: tuple[Record, bool] | None, eqn: _jax.JaxprEqn, index: int) -> Place | None:
    if side is None:
        return None
    record, is_backward = side
    if is_backward:
        number = record.backward_numbers.get(eqn.outvars[0]) if eqn.outvars else None
    else:
        number = next(
            (n for v in eqn.outvars if (n := record.region.numbering.number.get(v)) is not None),
            None,
        )
    return None if number is None else Place(record.region_id, is_backward, number)


def workspace_bytes(eqn: _jax.JaxprEqn) -> int:
    """What the bodies of a loop or of branches occupy while they run."""
    body = inline_body(eqn)
    if body is not None:
        return 0 if is_fusible(eqn) else _body_peak(body)
    if not _jax.has_body(eqn):
        return 0
    return max((_body_peak(_jax.open_jaxpr(b)) for b in _jax.bodies_of(eqn)), default=0)


@_jax.weakref_lru_cache
def _body_peak(jaxpr: _jax.Jaxpr) -> int:
    builder = Builder({})
    builder.enter((*jaxpr.invars, *jaxpr.constvars), None)
    builder.write(jaxpr, None, "")
    program = without_dead(builder.program(jaxpr.outvars))
    return no_remat(fuse(program, lambda *_: 0.0, lambda _: False).graph).peak_bytes


def _dtype(eqn: _jax.JaxprEqn) -> str:
    for v in (*eqn.invars, *eqn.outvars):
        dtype = getattr(v.aval, "dtype", None)
        if dtype is not None and str(dtype).startswith(("float", "bfloat", "complex")):
            return str(dtype)
    return "float32"


def _extra_bytes(eqn: _jax.JaxprEqn) -> int:
    """What a loop moves besides its operands and results: its carry, at every step."""
    if eqn.primitive.name != "scan":
        return 0
    carry = eqn.outvars[: _jax.scan_arity(eqn)[1]]
    return 2 * eqn.params["length"] * sum(n_bytes(v.aval) for v in carry)


def n_bytes(aval: Any) -> int:
    size = getattr(aval, "size", None)
    if size is None or _jax.is_on_host(aval):
        return 0
    return int(size) * _jax.itemsize_bytes(aval)


def type_text(aval: Any) -> str:
    """`f32[8,1024]`."""
    return aval.str_short(short_dtypes=True)


def _joined(path: str, more: str) -> str:
    return f"{path}/{more}" if path and more else path or more
