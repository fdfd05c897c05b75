"""Adapting a plan's decision about a region after a user has edited the loops of the plan.

A plan refers to values by number. The values that a loop's body saves are results of the loop in the
program around it, and a loop in groups has reshapes before and after it. So an edit of a loop shifts
the numbers of the values after it and changes the region's fingerprint.

A forward program consists of stretches with a loop between each two. An edit of a loop changes the
number of its results, and perhaps the ends of the adjacent stretches. So the values of a stretch are
identified by position, counted from its start or from its end, provided that the values which the plan
saves have the same types and names at the new positions. If neither count matches, everything in the
stretch that the backward pass needs is saved. The results of loops are saved, unless the plan
recomputes them. Values that the plan offloads stay offloaded where they are identified: a loop's result
by its position among the loop's results, an input by its position among the inputs.

Gradients never depend on the result, only memory and time do.

What an edited plan may contain is in docs/plans.md, "Editing a plan". `plan_file` checks it; so do `regions`
and, for `whole_step`, `whole_step_file`, when the plan meets the program.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from remat import _jax
from remat.planner.marked.decisions import RegionDecision
from remat.planner.marked.emit import Linearized, Numbering
from remat.planner.plan_file import PlanSegment, RegionPlan, SavedValue


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A decision that was adapted to an edited region.

    Args:
      decision: the adapted decision.
      n_stretches: the number of stretches of the forward program between its loops.
      n_lost: the number of stretches in which the plan's values could not be identified, so that
        everything is saved.
      n_not_offloaded: the number of values that the plan offloads and that could not be identified.
    """

    decision: RegionDecision
    n_stretches: int
    n_lost: int
    n_not_offloaded: int


def loop_results(numbering: Numbering) -> tuple[tuple[int, int], ...]:
    """Return for each loop in a program the number of its first result and how many results it has."""
    found = []
    for v, number in numbering.number.items():
        eqn = numbering.equation[number]
        if v is eqn.outvars[0] and _jax.scan_body(eqn) is not None:
            found.append((number, len(eqn.outvars)))
    return tuple(found)


def adapted(plans: Sequence[RegionPlan], region: Linearized) -> Adapted | None:
    """Return the decision of a region before the edit, adapted to the region; None if it has no loops.

    Of several plans, the one with the fewest lost stretches is taken.
    """
    loops = loop_results(region.numbering)
    if not loops or not plans:
        return None
    return min((_adapted(plan, region, loops) for plan in plans), key=lambda a: a.n_lost)


def _adapted(plan: RegionPlan, region: Linearized, loops: tuple[tuple[int, int], ...]) -> Adapted:
    numbering = region.numbering
    residuals = {n for v in region.residuals if (n := numbering.number.get(v)) is not None}
    old, new = _stretches(plan.loop_results, plan.n_values), _stretches(loops, len(numbering.vars))
    again = {n for segment in plan.segments for n in segment.recomputed}
    place: dict[int, tuple[int, ...]] = {}  # the new numbers of the plan's values
    alone: dict[int, int] = {}  # the same, but with a single number for a loop's result
    saved: set[int] = set()

    counterpart = _counterparts(len(old), len(new))
    n_lost = 0
    for j, stretch in enumerate(new):
        i = counterpart.get(j)
        shift = None if i is None else _shift(plan, numbering, (i, old), (j, new))
        if i is None or shift is None:
            n_lost += 1
            saved.update(residuals & set(stretch))
            continue
        for n in old[i]:
            if n + shift in stretch:
                place[n] = (n + shift,)
                alone[n] = n + shift

    for j, (first, count) in enumerate(loops):
        now = range(first, first + count)
        before = range(*_span(plan.loop_results[j])) if len(loops) == len(plan.loop_results) else ()
        if again.isdisjoint(before):
            saved.update(now)  # unused results are dropped later
        else:
            place |= dict.fromkeys(before, tuple(now))
        alone |= dict(zip(before, now))

    saved.update(x for value in plan.saved for x in place.get(value.number, ()))
    segments = tuple(
        PlanSegment(s.start, tuple(sorted({x for n in s.recomputed for x in place.get(n, ())})))
        for s in plan.segments
    )
    to_host = [value for value in plan.saved if value.offloaded]
    offloaded = {
        x
        for value in to_host
        if (x := alone.get(value.number)) is not None and _is_at(value, numbering, x)
    }
    inputs = region.forward.invars
    offloaded_inputs = tuple(
        value.number
        for value in plan.offloaded_inputs
        if value.number < len(inputs) and _type_of(inputs[value.number]) == value.type
    )
    decision = RegionDecision(
        tuple(sorted(saved)),
        segments,
        plan.backward,
        plan.n_operations,
        tuple(sorted(offloaded)),
        offloaded_inputs,
    )
    n_found = len(offloaded) + len(offloaded_inputs)
    n_not_offloaded = len(to_host) + len(plan.offloaded_inputs) - n_found
    return Adapted(decision, len(new), n_lost, n_not_offloaded)


def _type_of(v: _jax.Var) -> str:
    text: str = v.aval.str_short(short_dtypes=True)
    return text


def _span(loop: tuple[int, int]) -> tuple[int, int]:
    return loop[0], loop[0] + loop[1]


def _stretches(loops: Iterable[tuple[int, int]], n_values: int) -> list[range]:
    """Return the numbers of the values before, between and after loops."""
    ends = [0, *itertools.chain.from_iterable(map(_span, loops)), n_values]
    return [range(a, b) for a, b in zip(ends[::2], ends[1::2])]


def _counterparts(n_old: int, n_new: int) -> dict[int, int]:
    """Return the old stretch of each new one.

    A loop in groups may have become two loops. Then only the first and the last stretch correspond.
    """
    if n_old == n_new:
        return {j: j for j in range(n_new)}
    return {0: 0, n_new - 1: n_old - 1}


def _shift(
    plan: RegionPlan,
    numbering: Numbering,
    old: tuple[int, Sequence[range]],
    new: tuple[int, Sequence[range]],
) -> int | None:
    """Return the difference of new and old numbers in a stretch; None if it is ambiguous."""
    (i, before), (j, now) = old, new
    from_start = now[j].start - before[i].start
    from_end = now[j].stop - before[i].stop
    # The first stretch starts at the same number as before; the last one ends at the same distance
    # from the program's end.
    shifts = [from_start] if j == 0 else [from_end] if j == len(now) - 1 else [from_start, from_end]
    saved = [value for value in plan.saved if value.number in before[i]]
    agreeing = [
        s
        for s in dict.fromkeys(shifts)
        if all(v.number + s in now[j] and _is_at(v, numbering, v.number + s) for v in saved)
    ]
    if len(agreeing) > 1:
        sources = [s for s in agreeing if all(_is_from(v, numbering, v.number + s) for v in saved)]
        agreeing = sources if saved and sources else agreeing
    named = saved or any(n in before[i] for s in plan.segments for n in s.recomputed)
    return agreeing[0] if len(agreeing) == 1 or (agreeing and not named) else None


def _is_at(value: SavedValue, numbering: Numbering, number: int) -> bool:
    v, eqn = numbering.vars[number], numbering.equation[number]
    found = (
        _type_of(v),
        _jax.name_stack_of(eqn),
        _jax.checkpoint_name_of(eqn) or "",
    )
    return found == (value.type, value.path, value.name)


def _is_from(value: SavedValue, numbering: Numbering, number: int) -> bool:
    return _jax.source_line_of(numbering.equation[number]) == value.source
