"""Which budgets to suggest, and how much a plan can gain."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from remat.explain.findings.facts import Facts, saved_values
from remat.explain.findings.stacks import (
    differentiated_body,
    loops_lose_their_carry,
    stacks_of,
)
from remat.explain.phases import PhasedProgram
from remat.report.groups import groups
from remat.report.model import Option, Value
from remat.report.timeline import live_at, timeline
from remat.units import format_bytes


def budget_text(n_bytes: int) -> str:
    """Return bytes as the text of a `budget=` of this size.

    >>> budget_text(53 * 2**20 + 1), budget_text(3 * 2**29)
    ('"53MiB"', '"1536MiB"')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= 10 * size:
            return f'"{n_bytes // size}{unit}"'
    mib, kib = n_bytes // 2**20, n_bytes // 2**10
    return f'"{mib}MiB"' if mib else f'"{kib}KiB"' if kib else f'"{n_bytes}"'


def suggested_share(facts: Facts) -> int:
    """Return a budget in per cent of the peak that leaves half of the temporaries; 0 if none helps.

    None helps if almost the whole forward pass would have to be recomputed, and the values live meanwhile
    leave too little memory.
    """
    share = _share_of(facts, lowest_budget_bytes(facts) / max(1, facts.predicted.peak_bytes))
    low, high = _estimated_ends(facts, share / 100)
    needs_all = low is None or low.flops_share >= _ALMOST_ALL * forward_share(facts)
    return 0 if high is None and needs_all else share


def share_for_recomputed(facts: Facts) -> int:
    """Return such a budget for a step whose recomputed values take the memory, which a plan also handles."""
    return _share_of(facts, 0.0)


def _share_of(facts: Facts, lowest: float) -> int:
    peak, fixed = facts.peak_bytes, facts.fixed_bytes
    if not peak:
        return 0
    aim = max((fixed + (peak - fixed) // 2) / peak, lowest)
    share = max(50, -(-math.ceil(100 * aim) // 5) * 5)
    return share if share <= 90 else 0


def lowest_budget_bytes(facts: Facts) -> int:
    """Return the predicted peak if saved values were live only when they are written and last read."""
    return _peak_without(facts, {value.id for value in saved_values(facts)}, _stacked(facts))


def peak_by_part(facts: Facts, parts: Sequence[Sequence[Value]]) -> int:
    """Return the predicted peak if each part's saved values were recomputed together before their reads."""
    lives: dict[int, tuple[tuple[int, int], ...]] = {}
    for values in parts:
        first = min(value.lifetimes[-1][1] for value in values if value.lifetimes)
        for value in values:
            if value.lifetimes:
                born, dies = value.lifetimes[0][0], value.lifetimes[-1][1]
                again = max(first, born + 1)
                lives[value.id] = (
                    ((born, born), (again, dies)) if again <= dies else ((born, dies),)
                )
    values = [
        dataclasses.replace(value, lifetimes=lives[value.id], reserved=())
        if value.id in lives
        else value
        for value in facts.account.values
    ]
    return timeline(values, facts.account.steps).peak_bytes


def _peak_without(facts: Facts, recomputed: set[int], stacked: set[int]) -> int:
    """Return the predicted peak if these saved values were live only when they are written and last read.

    The stacks of a loop in a branch are written and read slice by slice, so they do not count at all.
    """
    needed = []
    for value in facts.account.values:
        if value.id in recomputed:
            ends = [] if value.id in stacked else [{*lives} for lives in value.lifetimes]
            lifetimes = tuple((at, at) for steps in ends for at in sorted(steps))
            value = dataclasses.replace(value, lifetimes=lifetimes, reserved=())
        needed.append(value)
    return timeline(needed, facts.account.steps).peak_bytes


def _stacked(facts: Facts) -> set[int]:
    """Return the values that loops in branches stack: the ids of those that are shown as a whole."""
    sides = facts.account.sides
    sizes: dict[int, set[int]] = {}
    for number, (op, eqn) in enumerate(zip(sides.program.ops, sides.eqns)):
        result = dict(zip(eqn.outvars, op.results))
        for stack in stacks_of(eqn):
            if stack.result in result:
                n_bytes = sides.program.bytes[result[stack.result]]
                sizes.setdefault(number, set()).add(n_bytes)
    return {
        value.id
        for value, number in zip(facts.account.values, facts.account.producers)
        if value.n_bytes in sizes.get(number, ())
    }


def little_to_gain(facts: Facts) -> str:
    """Return why a plan can gain little: the values live at the peak that are not saved ones."""
    values, steps = facts.account.values, facts.account.steps
    at = timeline(values, steps).peak_step or 0
    live = [v for v in live_at(values, at) if v.kind not in ("saved", "argument", "output")]
    if 2 * facts.fixed_bytes >= facts.peak_bytes or not live:
        return "A plan can gain little: most of the peak is arguments and results."
    n = sum(value.n_bytes for value in live)
    largest = max(groups(live), key=lambda group: group.n_bytes)
    where = f" at {largest.source}" if largest.source else ""
    return (
        f"A plan can gain little: {format_bytes(n)} of the peak are gradients and temporaries that are "
        f"needed there, the largest {largest.aval} ({format_bytes(largest.n_bytes)}){where}. Compute "
        "that part for a slice of the batch at a time, such as with jax.lax.map over a checkpointed "
        "function, or take a smaller batch."
    )


# Share of the peak that recomputation itself may need, which the estimate leaves out. A larger share widens
# the range of the estimate.
_WHILE_RECOMPUTING = 0.1
# Plans weigh time, too, and recompute some operations between the cheapest ones. The upper end is this many
# times the FLOPs of the cheapest (an LSTM's plan takes 1.3 times as many), and at least this share of the
# step's (a U-Net's plan takes 1.0 %, the cheapest are 0.2 %).
_OVER_CHEAPEST, _LEAST_HIGH = 1.5, 0.02
_ALMOST_ALL = 0.9  # share of the forward pass's FLOPs


def cost_of(facts: Facts, share: float) -> tuple[float, float]:
    """Return an estimate of the FLOPs that a plan for a share of the peak adds: both ends, as shares.

    The lower end recomputes the saved values that take the fewest FLOPs per byte, each once per lifetime,
    until the rest fits. It ignores the memory of recomputation itself, so the upper end is the same estimate
    for a smaller share. If loops keep none of their carries, an iteration can only be recomputed after those
    before it: the upper end is then the forward pass's FLOPs, times the share of the saved bytes that is
    recomputed. At most the forward pass is recomputed once; only this is known if the lower end is above.
    """
    most = forward_share(facts)
    low, high = _estimated_ends(facts, share)
    if low is None or low.flops_share > most:
        return 0.0, most
    highest = most
    if high is not None:
        chained = most * high.bytes_share if loops_lose_their_carry(facts.sides) else 0.0
        highest = min(max(_OVER_CHEAPEST * high.flops_share, chained, _LEAST_HIGH), most)
    return low.flops_share, highest


def plan_option(facts: Facts, share: int, cost: tuple[float, float] | None) -> Option:
    """Return the option of a plan for a budget in per cent of the peak.

    Args:
      cost: as from `cost_of`; None if it is not estimated.
    """
    low, high = (None, 0.0) if cost is None else cost
    call = facts.fit_call(f'"{share}%"')
    return Option(
        "remat.fit",
        f"step = {call}",
        int(share / 100 * facts.peak_bytes),
        "at most",
        low,
        high,
    )


class _Recomputed(NamedTuple):
    """The recomputation of a plan, as shares of the step's FLOPs and of the saved bytes."""

    flops_share: float
    bytes_share: float


def _estimated_ends(facts: Facts, share: float) -> tuple[_Recomputed | None, _Recomputed | None]:
    """Return the estimates without and with memory for the recomputation itself."""
    return _estimate(facts, share), _estimate(facts, max(0.0, share - _WHILE_RECOMPUTING))


def _estimate(facts: Facts, share: float) -> _Recomputed | None:
    """Return the cost of recomputing the cheapest values so that the rest fits.

    None if it does not fit with all of them recomputed.
    """
    most = share * facts.predicted.peak_bytes
    saved = sorted(saved_values(facts), key=lambda value: value.flops / max(1, value.n_bytes))
    stacked = _stacked(facts)

    def fits(n: int) -> bool:
        return _peak_without(facts, {value.id for value in saved[:n]}, stacked) <= most

    n = bisect.bisect_left(range(len(saved) + 1), True, key=fits)
    if n > len(saved):
        return None
    flops = sum(value.flops * max(1, len(value.lifetimes)) for value in saved[:n])
    n_bytes = sum(value.n_bytes for value in saved)
    return _Recomputed(
        flops / max(1.0, facts.account.flops),
        sum(value.n_bytes for value in saved[:n]) / max(1, n_bytes),
    )


def forward_share(facts: Facts) -> float:
    """Return the FLOPs of the forward pass as a share of the step's: what recomputing all of it once adds."""
    return _forward_flops(facts.sides) / max(1.0, facts.sides.program.flops)


def _forward_flops(sides: PhasedProgram) -> float:
    """Return the FLOPs of the forward pass, of loops with both passes those of the forward pass in them."""
    found = 0.0
    for i, (op, phase) in enumerate(zip(sides.program.ops, sides.phases)):
        if phase == "forward":
            inner = differentiated_body(sides, i)
            share = _forward_flops(inner) / max(1.0, inner.program.flops) if inner else 1.0
            found += share * op.flops
    return found
