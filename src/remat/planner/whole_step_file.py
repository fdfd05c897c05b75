"""Converts decisions about a step to the `whole_step` of a plan file, and back.

A plan file numbers equations as they stand before loops are rewritten, so that removing a loop's line
does not change the numbers. Equations that a loop's groups add are numbered after those.

This module checks whether the numbers are of this program, and whether the equations may be recomputed.
`scan_pairs.rewriting` and `bodies` check what loops and bodies keep.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from remat import _jax
from remat.errors import PlanError
from remat.ir.equations import is_repeatable
from remat.planner.bodies import bodies_by_id
from remat.planner.decisions import (
    LoopDecisions,
    StepDecisions,
    equation_numbers,
    program_to_plan,
    with_loops,
)
from remat.planner.plan_decisions import BodyPlan, HostCopy, Recomputation, WholeStep
from remat.planner.rewrite import Burst, Decisions
from remat.program.from_jaxpr import joined, n_bytes, type_text


def whole_step_plan(flat: _jax.Jaxpr, decisions: StepDecisions) -> WholeStep:
    """Return decisions about a step's flat jaxpr in the form of a plan."""
    loops = decisions.loops
    source = program_to_plan(flat, loops.opened)
    found = bodies_by_id(source, [id for id, _ in loops.bodies], dict(loops.choices))
    new = with_loops(source, loops)
    numbers = equation_numbers(source, new)
    outside = decisions.outside
    return WholeStep(
        len(source.eqns),
        tuple(sorted(numbers[i] for i in outside.stored)),
        _recomputations(new, outside, numbers),
        loops.opened,
        loops.choices,
        tuple(_body_plan(id, of_body, *found[id]) for id, of_body in loops.bodies),
        outside.ordered,
        tuple(sorted(numbers[i] for i in outside.partial_sums)),
        _n_added(source, numbers),
        tuple(_for_readers(copy, source) for copy in loops.copies),
        outside.fences_arguments,
        outside.separated,
    )


def decisions_of_plan(whole: WholeStep, flat: _jax.Jaxpr) -> StepDecisions:
    """Return the decisions of a plan about a step with this flat jaxpr.

    Raises:
      PlanError: the plan is for another program, or computes an equation with effects again.
    """
    source = program_to_plan(flat, whole.opened)
    _check_count(whole.n_equations, source, "a step")
    found = bodies_by_id(source, [body.id for body in whole.bodies], dict(whole.loops))
    bodies = []
    for body in whole.bodies:
        numbers: Sequence[int] = range(body.n_equations)
        if body.id in found:  # otherwise `with_loops` raises
            as_written, with_pairs = found[body.id]
            _check_count(body.n_equations, as_written, f"the body {body.id}")
            numbers = equation_numbers(as_written, with_pairs)
            _check_added(body, numbers, _n_added(as_written, numbers))
            _check_repeatable(body, with_pairs, numbers)
        bodies.append((body.id, _decisions(body, {n: i for i, n in enumerate(numbers)})))
    loops = LoopDecisions(whole.opened, whole.loops, tuple(bodies), whole.copies)
    new = with_loops(source, loops)
    numbers = equation_numbers(source, new)
    _check_added(whole, numbers, _n_added(source, numbers))
    _check_repeatable(whole, new, numbers)
    return StepDecisions(loops, _decisions(whole, {n: i for i, n in enumerate(numbers)}))


def _body_plan(
    id: str, decided: Decisions, as_written: _jax.Jaxpr, with_pairs: _jax.Jaxpr
) -> BodyPlan:
    numbers = equation_numbers(as_written, with_pairs)
    return BodyPlan(
        id,
        len(as_written.eqns),
        tuple(sorted(numbers[i] for i in decided.stored)),
        _recomputations(with_pairs, decided, numbers),
        decided.ordered,
        tuple(sorted(numbers[i] for i in decided.partial_sums)),
        decided.fences_arguments,
        _n_added(as_written, numbers),
        decided.separated,
    )


def _n_added(source: _jax.Jaxpr, numbers: Sequence[int]) -> int:
    return sum(number >= len(source.eqns) for number in numbers)


def _recomputations(
    flat: _jax.Jaxpr, decisions: Decisions, numbers: Sequence[int]
) -> tuple[Recomputation, ...]:
    return tuple(
        Recomputation(
            numbers[burst.before],
            tuple(numbers[i] for i in burst.again),
            tuple(_described(flat.eqns[i]) for i in burst.again),
            _jax.source_line_of(flat.eqns[burst.before]),
        )
        for burst in decisions.bursts
    )


def _decisions(plan: WholeStep | BodyPlan, places: Mapping[int, int]) -> Decisions:
    """Return decisions about equations by place, from a plan's by number; `places` maps the numbers.

    Numbers without a place are those of equations that loops no longer add; they are ignored.
    """
    bursts = sorted(
        (Burst(places[r.before], tuple(places[n] for n in r.again)) for r in plan.recomputations),
        key=lambda burst: burst.before,
    )
    for burst in bursts:
        if max(burst.again) >= burst.before:
            numbers = {place: n for n, place in places.items()}
            raise PlanError(
                f"equation {numbers[max(burst.again)]} has not been computed before equation "
                f"{numbers[burst.before]}, so it cannot be recomputed there. Remove its number from "
                "the plan's recomputations."
            )
    stored = frozenset(places[n] for n in plan.stored if n in places)
    partial_sums = sorted(places[n] for n in plan.partial_sums if n in places)
    return Decisions(
        stored,
        tuple(bursts),
        plan.ordered,
        tuple(partial_sums),
        plan.fences_arguments,
        plan.separated,
    )


def _check_count(n_equations: int, jaxpr: _jax.Jaxpr, what: str) -> None:
    if n_equations != len(jaxpr.eqns):
        raise PlanError(
            f"the plan is of another program, {what} of {n_equations} equations; this one has "
            f"{len(jaxpr.eqns)}. Plan again."
        )


def _check_added(whole: WholeStep | BodyPlan, numbers: Sequence[int], n_added: int) -> None:
    """Raise for recomputations of or before equations that the plan's loops do not add any more."""
    left = set(numbers)
    if n_added != whole.n_added:
        left -= set(range(whole.n_equations, whole.n_equations + n_added))
    gone = {n for r in whole.recomputations for n in (r.before, *r.again)} - left
    if gone:
        raise PlanError(
            f"the plan recomputes equations, or before equations, that its loops do not add any more: "
            f"{', '.join(map(str, sorted(gone)))}. Remove these numbers from its recomputations, or undo "
            "the edit of its loops."
        )


def _check_repeatable(
    plan: WholeStep | BodyPlan, jaxpr: _jax.Jaxpr, numbers: Sequence[int]
) -> None:
    """Raise for recomputations of equations that must not be computed twice."""
    eqn_of = dict(zip(numbers, jaxpr.eqns))
    for recomputation in plan.recomputations:
        for n in recomputation.again:
            if n not in eqn_of or is_repeatable(eqn_of[n]):
                continue
            why = (
                "it is outside of the functions that are marked by remat.auto"
                if _jax.is_fixed(eqn_of[n])
                else "recomputing it has other effects or gives another result"
            )
            raise PlanError(
                f"the plan computes equation {n} again ({_described(eqn_of[n])}), but {why}. "
                "Remove its number from the plan's recomputations."
            )


def _for_readers(copy: HostCopy, source: _jax.Jaxpr) -> HostCopy:
    """Return a copy with the description of its value for display in a plan."""
    eqn = source.eqns[copy.equation]
    size = n_bytes(eqn.outvars[copy.result].aval)
    return dataclasses.replace(copy, bytes=size, value=_described(eqn))


def _described(eqn: _jax.JaxprEqn) -> str:
    """Return type, name scope and primitive of an equation, such as `f32[8] mlp/dot_general`."""
    types = ", ".join(type_text(v.aval) for v in eqn.outvars)
    return f"{types} {joined(_jax.name_stack_of(eqn), eqn.primitive.name)}"
