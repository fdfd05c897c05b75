"""Decisions about a whole step as a plan holds them: to a plan's form, and back with checks."""

from __future__ import annotations

from collections.abc import Iterable

from remat import _jax
from remat.errors import PlanError
from remat.ir.equations import is_repeatable
from remat.planner.bodies import bodies_by_id
from remat.planner.decisions import LoopDecisions, StepDecisions, source_of, with_loops
from remat.planner.plan_file import BodyPlan, Recomputation, ScanPlan, WholeStep
from remat.planner.rewrite import Burst, Decisions
from remat.planner.scan_pairs import ScanOption
from remat.program.from_jaxpr import joined, type_text


def whole_step_plan(flat: _jax.Jaxpr, decisions: StepDecisions) -> WholeStep:
    """Return decisions about a step's flat jaxpr as a plan holds them."""
    loops = decisions.loops
    found = bodies_by_id(source_of(flat, loops.opened), [id for id, _ in loops.bodies])
    flat = with_loops(flat, loops)
    outside = decisions.outside
    return WholeStep(
        len(flat.eqns),
        tuple(sorted(outside.stored)),
        _recomputations(flat, outside),
        loops.opened,
        tuple(_loop_plan(*choice) for choice in loops.choices),
        tuple(
            BodyPlan(
                id,
                len(found[id].eqns),
                tuple(sorted(of_body.stored)),
                _recomputations(found[id], of_body),
                of_body.ordered,
                of_body.partial_sums,
            )
            for id, of_body in loops.bodies
        ),
        outside.ordered,
        outside.partial_sums,
    )


def decisions_of_plan(whole: WholeStep, flat: _jax.Jaxpr) -> StepDecisions:
    """Return the decisions that a plan holds about a step, whose flat jaxpr is this one.

    Raises:
      PlanError: the plan is for another program, or computes an equation with effects again.
    """
    found = bodies_by_id(source_of(flat, whole.opened), [body.id for body in whole.bodies])
    for body in whole.bodies:
        if body.id in found:
            _check_program(body, found[body.id], f"the body {body.id}")
    loops = LoopDecisions(
        whole.opened,
        tuple(_option(loop) for loop in whole.loops),
        tuple((body.id, _decisions(body)) for body in whole.bodies),
    )
    _check_program(whole, with_loops(flat, loops), "a step")
    return StepDecisions(loops, _decisions(whole))


def _recomputations(flat: _jax.Jaxpr, decisions: Decisions) -> tuple[Recomputation, ...]:
    return tuple(
        Recomputation(
            burst.before,
            burst.again,
            tuple(_described(flat.eqns[i]) for i in burst.again),
            _jax.source_line_of(flat.eqns[burst.before]),
        )
        for burst in decisions.bursts
    )


def _decisions(plan: WholeStep | BodyPlan) -> Decisions:
    bursts = tuple(Burst(r.before, r.again) for r in plan.recomputations)
    ordered = plan.ordered and bool(bursts)
    return Decisions(frozenset(plan.stored), bursts, ordered, tuple(sorted(plan.partial_sums)))


def _check_program(plan: WholeStep | BodyPlan, flat: _jax.Jaxpr, what: str) -> None:
    """Refuse decisions about another program, and recomputations of what must not be repeated."""
    if plan.n_equations != len(flat.eqns):
        raise PlanError(
            f"the plan is of another program, {what} of {plan.n_equations} equations; this one has "
            f"{len(flat.eqns)}. Plan again."
        )
    for recomputation in plan.recomputations:
        for i in recomputation.again:
            if not is_repeatable(flat.eqns[i]):
                raise PlanError(
                    f"the plan computes equation {i} again ({_described(flat.eqns[i])}), but "
                    "computing it again has other effects or gives another result. Remove its number "
                    "from the plan's recomputations."
                )


def _loop_plan(id: str, option: ScanOption) -> ScanPlan:
    return ScanPlan(
        id,
        option.saved,
        option.bytes,
        option.seconds,
        option.flops,
        option.group,
        option.groups,
        option.rest,
        _inner_plans(option.inner),
        None if option.rest_inner is None else _inner_plans(option.rest_inner),
        option.offloaded,
        option.rest_offloaded,
        option.host_bytes,
        option.transfer_seconds,
    )


def _inner_plans(inner: Iterable[tuple[str, ScanOption]]) -> tuple[ScanPlan, ...]:
    return tuple(_loop_plan(*choice) for choice in inner)


def _option(loop: ScanPlan) -> tuple[str, ScanOption]:
    return loop.id, ScanOption(
        loop.saved,
        loop.bytes,
        loop.seconds,
        loop.flops,
        loop.group,
        loop.groups,
        loop.rest,
        tuple(map(_option, loop.inner)),
        None if loop.rest_inner is None else tuple(map(_option, loop.rest_inner)),
        loop.offloaded,
        loop.rest_offloaded,
        loop.host_bytes,
        loop.transfer_seconds,
    )


def _described(eqn: _jax.JaxprEqn) -> str:
    """Return type, name scope and primitive of an equation, such as `f32[8] mlp/dot_general`."""
    types = ", ".join(type_text(v.aval) for v in eqn.outvars)
    return f"{types} {joined(_jax.name_stack_of(eqn), eqn.primitive.name)}"
