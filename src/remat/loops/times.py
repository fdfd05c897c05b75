"""The time that a step of a loop is expected to take, run or reversed, from its FLOPs and bytes.

The unit of time is the time to move one byte. Times are used to compare schedules and choices of residuals;
nothing is measured, so a loop has the same schedule on every machine.
"""

from __future__ import annotations

from typing import NamedTuple

from remat import _jax
from remat.ir.flops import bytes_moved, flops_of_program, through_bodies
from remat.ir.operations import Fusion, operation
from remat.loops.halves import Halves
from remat.loops.sizes import n_bytes

# The FLOPs of a processor in the time of moving one byte, and the bytes that it moves in the time of starting
# a kernel. A larger first number makes steps cheaper, a larger second one small residuals more expensive.
_FLOPS_PER_BYTE = 5
_BYTES_PER_KERNEL = 3000


class StepTimes(NamedTuple):
    """Times of one step, in units of running it once.

    Attributes:
      from_residuals: running it with its residuals, and reversing it from these, without the time to
        write and read them.
      from_state: reversing it from its state.
    """

    from_residuals: float
    from_state: float


def time_to_keep(body: _jax.Jaxpr, n_residuals: int, residual_bytes: int) -> float:
    """Return the time to write and read the residuals of a step, in units of running it once.

    A step with side effects or symbolic shapes is assumed to take much longer than that.
    """
    if body.effects or has_symbolic_types(body):
        return 0.0
    return 2 * (residual_bytes + _BYTES_PER_KERNEL * n_residuals) / _time_of(body)


def times_of_step(body: _jax.Jaxpr, halves: Halves, n_carry: int) -> StepTimes:
    """Return the times of a step whose halves are given, and whose sizes are numbers.

    They include the recomputation by a policy while a step is reversed.
    """
    types = _jax.in_avals(body)
    n_consts = len(_jax.in_avals(halves.fixed)) - len(halves.added)
    marked = [t for t in _jax.out_avals(body) if _jax.has_tangent(t)]
    n_active = sum(map(_jax.has_tangent, _jax.out_avals(body)[:n_carry]))
    reversal, _, _ = _jax.trace_call(
        lambda fixed, consts, x, kept, cts: halves.reversal(fixed, consts, x, kept)(cts),
        _jax.out_avals(halves.fixed),
        types[:n_consts],
        types[n_consts + n_carry :],
        halves.kept,
        (marked[:n_active], marked[n_active:]),
    )
    outs = halves.forward.outvars
    residuals = _jax.rebuild(halves.forward, outvars=outs[len(outs) - len(halves.kept) :])
    back, forward, alone = map(_time_inside, (reversal, halves.forward, residuals))
    step = _time_of(body)
    return StepTimes((forward + back) / step, (alone + back) / step)


def has_symbolic_types(body: _jax.Jaxpr) -> bool:
    """Return whether a type of a step's inputs or results has symbolic dimensions."""
    avals = [*_jax.in_avals(body), *_jax.out_avals(body)]
    return any(_jax.is_symbolic(d) for aval in avals for d in getattr(aval, "shape", ()))


def _time_of(body: _jax.Jaxpr) -> float:
    """Return the time of a step, which reads its inputs and writes its results."""
    moved = sum(map(n_bytes, [*_jax.in_avals(body), *_jax.out_avals(body)]))
    return _time_inside(body) + moved + _BYTES_PER_KERNEL


def _time_inside(program: _jax.Jaxpr) -> float:
    """Return the time of a program in which everything except matrix products, loops and the like is fused.

    These read their operands and write their results. The program's own inputs and results do not count.
    """
    live, _ = _jax.dce(program, [True] * len(program.outvars))
    moved = sum(through_bodies(eqn, _moved_by) for eqn in live.eqns)
    return flops_of_program(live) / _FLOPS_PER_BYTE + moved


def _moved_by(eqn: _jax.JaxprEqn) -> float:
    row = operation(eqn.primitive.name)
    is_kernel = row is not None and row.fusion is Fusion.KERNEL
    return bytes_moved(eqn) + _BYTES_PER_KERNEL if is_kernel else 0
