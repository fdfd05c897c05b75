"""The values that loops stack for the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from remat import _jax
from remat.explain.phases import PhasedProgram, holds_gradient, is_view
from remat.explain.runs import program_of, run_of
from remat.ir import jaxprs
from remat.ir.equations import inline_body
from remat.program.from_jaxpr import n_bytes


class LargeStack(NamedTuple):
    """A stack of a loop, as a result of the loop's equation or of the equation around it."""

    loop: _jax.JaxprEqn
    result: _jax.Var
    n_bytes: int


def stacks_of(eqn: _jax.JaxprEqn) -> Iterator[LargeStack]:
    """Yield the stacks that the loops in an equation return."""
    if eqn.primitive.name == "scan":
        for v in eqn.outvars[_jax.scan_arity(eqn)[1] :]:
            yield LargeStack(eqn, v, n_bytes(v.aval))
    elif eqn.primitive.name in ("shard_map", "cond"):
        for closed in _jax.jaxprs_of(eqn):
            body = jaxprs.inline_calls(_jax.open_jaxpr(closed), inline_body)
            returned = dict(zip(body.outvars, eqn.outvars))
            for inner in body.eqns:
                for stack in stacks_of(inner):
                    if stack.result in returned:
                        yield stack._replace(result=returned[stack.result])


def largest_loop(sides: PhasedProgram, *, at_least: float) -> tuple[_jax.JaxprEqn | None, int]:
    """Return the loop that stacks the most bytes for the backward pass, None below a limit, and the bytes."""
    stacked: dict[_jax.JaxprEqn, int] = {}
    for stack in _kept(sides):
        stacked[stack.loop] = stacked.get(stack.loop, 0) + stack.n_bytes
    largest = max(stacked, key=lambda eqn: stacked[eqn], default=None)
    if largest is None or not stacked[largest] >= at_least > 0:
        return None, 0
    return largest, stacked[largest]


def loops_lose_their_carry(sides: PhasedProgram) -> bool:
    """Return whether most of the stacked bytes belong to loops that keep no carry."""
    lost = kept = 0
    for stack in _kept(sides):
        if _keeps_a_carry(stack.loop):
            kept += stack.n_bytes
        else:
            lost += stack.n_bytes
    return lost > kept


def _keeps_a_carry(loop: _jax.JaxprEqn) -> bool:
    """Return whether a `scan` stacks a carry, or has none, so that iterations are independent."""
    body = _jax.open_jaxpr(loop.params["jaxpr"])
    n_consts, n_carry = _jax.scan_arity(loop)
    made = {v for eqn in body.eqns for v in eqn.outvars}
    read = {v for eqn in body.eqns for v in eqn.invars if _jax.is_var(v)}
    carries = [
        (v, new)
        for v, new in zip(body.invars[n_consts : n_consts + n_carry], body.outvars)
        if v in read and new in made
    ]
    stacked = {v for v in body.outvars[n_carry:] if _jax.is_var(v)}
    return not carries or any(not stacked.isdisjoint(pair) for pair in carries)


def _kept(sides: PhasedProgram) -> Iterator[LargeStack]:
    """Yield the stacks of loops for the backward pass, also of loops in the body of another loop."""
    read = _read_backward(sides)
    for i, (op, phase, eqn) in enumerate(zip(sides.program.ops, sides.phases, sides.eqns)):
        if phase == "forward":
            kept = {v for v, number in zip(eqn.outvars, op.results) if number in read}
            yield from (stack for stack in stacks_of(eqn) if stack.result in kept)
            inner = differentiated_body(sides, i)
            yield from _kept(inner) if inner is not None else ()


def differentiated_body(sides: PhasedProgram, number: int) -> PhasedProgram | None:
    """Return the body of an operation, such as a loop over microbatches, that has both passes in it."""
    run = run_of(sides.program.ops[number], sides.eqns[number])
    if run is None or not holds_gradient(run.jaxpr):
        return None
    return program_of(run, sides, number)


def _read_backward(sides: PhasedProgram) -> set[int]:
    """Return the values that the backward pass reads, or recomputation in it, directly or as a view."""
    read: set[int] = set()
    for op, phase in zip(reversed(sides.program.ops), reversed(sides.phases)):
        later = phase in ("backward", "recompute")
        if later or (is_view(op) and not read.isdisjoint(op.results)):
            read.update(op.operands)
    return read
