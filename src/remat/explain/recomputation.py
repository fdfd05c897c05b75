"""The recomputed FLOPs of a step, and the values of the forward pass that its backward pass reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from remat import _jax
from remat.explain.phases import PhasedProgram, is_traced_region, is_view, parts
from remat.ir import jaxprs
from remat.ir.flops import flops_of, flops_of_program, through_bodies
from remat.program.program import Op, Program
from remat.report.model import Phase


def recompute_flops(sides: PhasedProgram) -> float:
    """Return the FLOPs that a step recomputes, in loops and branches, too."""
    ops = sides.program.ops
    outside = sum(op.flops for op, p in zip(ops, sides.phases) if p == "recompute")
    inside = sum(
        recomputed_inside(eqn) * (op.flops / max(flops_of(eqn), 1))
        for op, p, eqn in zip(ops, sides.phases, sides.eqns)
        if p != "recompute" and jaxprs.has_body(eqn)
    )
    return float(outside + inside)


def recompute_share(eqn: _jax.JaxprEqn) -> float:
    """Return the recomputed share of the FLOPs of a loop or conditional; 0 for other equations."""
    whole = flops_of(eqn) if jaxprs.has_body(eqn) else 0
    return min(1.0, recomputed_inside(eqn) / whole) if whole else 0.0


def residual_bytes(sides: PhasedProgram) -> tuple[int, int]:
    """Return the bytes of the forward pass's values, and of the inputs, that the backward pass reads.

    Fusion is not considered.
    """
    program, phases = sides.program, sides.phases
    producer = {v: i for i, op in enumerate(program.ops) for v in op.results}
    later: tuple[Phase, ...] = ("backward", "recompute")
    read = {v for op, phase in zip(program.ops, phases) if phase in later for v in op.operands}
    roots = {value_behind(v, program, producer) for v in read}
    saved = sum(
        program.bytes[v] for v in roots if v in producer and phases[producer[v]] == "forward"
    )
    inputs = set(sides.inputs)
    return saved, sum(program.bytes[v] for v in roots if v in inputs)


def recomputed_inside(eqn: _jax.JaxprEqn) -> int:
    """Return the FLOPs that one equation recomputes, times its trip counts."""
    if is_traced_region(eqn):
        return _recomputed_in_region(eqn)
    return int(
        through_bodies(eqn, lambda _: 0, lambda body: sum(map(recomputed_inside, body.eqns)))
    )


def _recomputed_in_region(eqn: _jax.JaxprEqn) -> int:
    again, later = parts(eqn, _jax.open_jaxpr(eqn.params["jaxpr"]))
    return sum(map(flops_of, again)) + sum(map(recomputed_inside, later))


# Share of a step's FLOPs that may not be computed at run time; a larger one mentions it less often.
_UNCERTAIN = 0.02


def counted_at_most(jaxpr: _jax.Jaxpr) -> str:
    """Return why a step may compute fewer FLOPs than are counted; "" if it computes all of them."""
    if not jaxprs.applies(jaxpr, "cond"):
        return ""
    whole = flops_of_program(jaxpr)
    live, _ = _jax.dce(jaxpr, [True] * len(jaxpr.outvars))
    least = sum(map(_least_flops, live.eqns))
    if least >= (1 - _UNCERTAIN) * whole:
        return ""
    if any(map(_is_loop_of_branches, jaxprs.equations(jaxpr))):
        return "every iteration is counted with its largest branch, also in loops that stop early at run time"
    return "the largest branch of each conditional is counted"


def _least_flops(eqn: _jax.JaxprEqn) -> float:
    """Return the FLOPs of an equation if all conditionals in it take their cheapest branch."""
    if eqn.primitive.name == "cond":
        return min(sum(map(_least_flops, _jax.open_jaxpr(b).eqns)) for b in jaxprs.bodies_of(eqn))
    return through_bodies(eqn, flops_of, lambda body: sum(map(_least_flops, body.eqns)))


def _inside(eqn: _jax.JaxprEqn) -> Iterator[_jax.JaxprEqn]:
    for body in jaxprs.bodies_of(eqn):
        yield from jaxprs.equations(_jax.open_jaxpr(body), jaxprs.bodies_of)


def _is_loop_of_branches(eqn: _jax.JaxprEqn) -> bool:
    return eqn.primitive.name == "scan" and any(e.primitive.name == "cond" for e in _inside(eqn))


def value_behind(v: int, program: Program, producer: Mapping[int, int]) -> int:
    """Return the value of which another is a view or a copy."""
    while (i := producer.get(v)) is not None and passes_on(program.ops[i]):
        v = program.ops[i].operands[0]
    return v


def passes_on(op: Op) -> bool:
    """Return whether an operation is a view, or rounds to the type its operand has."""
    return is_view(op) or op.name == "reduce_precision"
