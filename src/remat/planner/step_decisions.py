"""Decisions about a whole step as a plan holds them: to a plan's form, and back with checks."""

from __future__ import annotations

from remat import _jax
from remat.errors import PlanError
from remat.ir.equations import is_repeatable
from remat.planner.plan_file import Recomputation, ScanPlan, WholeStep
from remat.planner.rewrite import Burst, Decisions
from remat.planner.scan_pairs import ScanOption
from remat.planner.whole_step import LoopDecisions, StepDecisions, with_loops
from remat.program.from_jaxpr import joined, type_text


def whole_step_plan(flat: _jax.Jaxpr, decisions: StepDecisions) -> WholeStep:
    """Return decisions about a step's flat jaxpr as a plan holds them."""
    flat = with_loops(flat, decisions.loops)
    outside = decisions.outside
    return WholeStep(
        len(flat.eqns),
        tuple(sorted(outside.stored)),
        tuple(
            Recomputation(
                burst.before,
                burst.again,
                tuple(_described(flat.eqns[i]) for i in burst.again),
                _jax.source_line_of(flat.eqns[burst.before]),
            )
            for burst in outside.bursts
        ),
        decisions.loops.opened,
        tuple(_loop_plan(*choice) for choice in decisions.loops.choices),
    )


def decisions_of_plan(whole: WholeStep, flat: _jax.Jaxpr) -> StepDecisions:
    """Return the decisions that a plan holds about a step, whose flat jaxpr is this one.

    Raises:
      PlanError: the plan is for another program, or computes an equation with effects again.
    """
    loops = LoopDecisions(whole.opened, tuple(_option(loop) for loop in whole.loops))
    flat = with_loops(flat, loops)
    if whole.n_equations != len(flat.eqns):
        raise PlanError(
            f"the plan is of another program, a step of {whole.n_equations} equations; this one has "
            f"{len(flat.eqns)}. Plan again."
        )
    for recomputation in whole.recomputations:
        for i in recomputation.again:
            if not is_repeatable(flat.eqns[i]):
                raise PlanError(
                    f"the plan computes equation {i} again ({_described(flat.eqns[i])}), but "
                    "computing it again has other effects or gives another result. Remove its number "
                    "from the plan's recomputations."
                )
    bursts = tuple(Burst(r.before, r.again) for r in whole.recomputations)
    return StepDecisions(loops, Decisions(frozenset(whole.stored), bursts))


def _loop_plan(id: str, option: ScanOption) -> ScanPlan:
    return ScanPlan(
        id,
        option.saved,
        option.bytes,
        option.seconds,
        option.flops,
        option.group,
        option.groups,
        tuple(_loop_plan(*inner) for inner in option.inner),
    )


def _option(loop: ScanPlan) -> tuple[str, ScanOption]:
    return loop.id, ScanOption(
        loop.saved,
        loop.bytes,
        loop.seconds,
        loop.flops,
        loop.group,
        loop.groups,
        tuple(_option(inner) for inner in loop.inner),
    )


def _described(eqn: _jax.JaxprEqn) -> str:
    """Return type, name scope and primitive of an equation, such as `f32[8] mlp/dot_general`."""
    types = ", ".join(type_text(v.aval) for v in eqn.outvars)
    return f"{types} {joined(_jax.name_stack_of(eqn), eqn.primitive.name)}"
