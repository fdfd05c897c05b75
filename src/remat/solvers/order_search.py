"""Orders of computation found by repeated minimum cuts at the peak, on graphs of any size.

`refine` starts from any order. While its peak is above the budget, it looks at the step where the
peak is and asks what should cross that moment: a minimum cut (`mincut`) over the values that exist
there, in which those that are live anyway (the step's own value and operands) cost nothing. What
the cut saves stays; what it recomputes is computed again just before its first use after the
moment, and kept from there on. That lowers this peak to the budget and may raise later ones (a
long chain recomputed at once), which are cut in turn, so that recomputation nests as deeply as the
budget requires.

A cut sees one moment and everything that can be recomputed together, however long the chain;
`relief` sees all moments and one value at a time. Both are heuristics: they prove nothing, and
`simulate` checks what comes out. They are deterministic. The idea of advancing a schedule by
repeated cuts is related to Kumar et al., "Efficient rematerialization for deep networks" (NeurIPS
2019); the on-demand replay to Kirisame et al., "Dynamic tensor rematerialization" (ICLR 2021).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from remat.errors import BudgetError
from remat.solvers.effort import Effort
from remat.solvers.liveness import Bools, Floats, Ints, Liveness
from remat.solvers.mincut import CutProblem, RecentNetworks, at_budget

# Ancestors that a cut considers beside three per needed value; more find better cuts and take longer.
_REACH = 300
# Cuts in a row that do not lower the peak, after which a search ends; more rarely help.
_PATIENCE = 12


def replay_order(
    operands: Sequence[tuple[int, ...]], steps: Iterable[int], missing: set[int], out: list[int]
) -> None:
    """Append `steps` to `out`, computing each value of `missing` again before its first use.

    A value leaves `missing` when it is computed.
    """
    for step in steps:
        for operand in operands[step]:
            if operand in missing:
                _compute(operands, operand, missing, out)
        missing.discard(step)
        out.append(step)


def _compute(
    operands: Sequence[tuple[int, ...]], value: int, missing: set[int], out: list[int]
) -> None:
    """Append `value` after those of its operands that are missing (depth first, no recursion)."""
    stack = [(value, iter(operands[value]))]
    while stack:
        current, rest = stack[-1]
        operand = next((u for u in rest if u in missing), None)
        if operand is not None:
            stack.append((operand, iter(operands[operand])))
        else:
            stack.pop()
            if current in missing:
                missing.remove(current)
                out.append(current)


@dataclasses.dataclass(frozen=True)
class CutParameters:
    """How a search makes its cuts; different parameters lead to different orders.

    Args:
      fill: the fraction of the free bytes at the moment of a cut that it may fill; less leaves memory
        for later recomputations.
      height: a cut is made at the first moment whose live bytes are this fraction of the way from
        the budget to the peak. 1 is the peak itself; smaller values cut earlier moments first and
        nest more of the recomputation.
    """

    fill: float = 1.0
    height: float = 1.0


def refine(
    measured: Liveness,
    budget: int,
    parameters: CutParameters,
    effort: Effort,
    *,
    at_most_time: float = math.inf,
    recent: RecentNetworks | None = None,
) -> Liveness:
    """Cut the order at its peak until it fits or no cut helps; return the order of the lowest peak.

    An order of more extra time than `at_most_time` is not cut further. Searches that share `recent` and
    start from the same order share the work of their first cuts.
    """
    arrays = measured.arrays
    best = measured
    stale = 0
    seen: set[bytes] = set()  # orders since the best one; if one recurs, the cuts would cycle
    longest = 20 * len(arrays) + 1000
    while not effort.is_spent:
        if measured.peak_bytes <= budget or stale > _PATIENCE or len(measured.order) > longest:
            break
        if measured.extra_time > at_most_time:
            break
        high = budget + parameters.height * (measured.peak_bytes - budget)
        moment = int(np.argmax(measured.live_bytes >= high))
        after = _cut_at(measured, moment, budget, parameters.fill, effort, recent)
        if after is None:
            break
        effort.spend(4 * len(after))
        measured = effort.measure(arrays, after)
        stale += 1
        if measured.peak_bytes < best.peak_bytes:
            best, stale = measured, 0
            seen.clear()
        order = measured.order.tobytes()
        if order in seen:
            break
        seen.add(order)
    return best


def _cut_at(
    measured: Liveness,
    moment: int,
    budget: int,
    fill: float,
    effort: Effort,
    recent: RecentNetworks | None,
) -> list[int] | None:
    """Return the order after a minimum cut at one of its steps, or None if no cut fits the budget."""
    arrays, operands = measured.arrays, measured.arrays.operands
    order, live_bytes = measured.order, measured.live_bytes
    step = int(order[moment])
    held = list(operands[step])
    room = budget - int(arrays.bytes[step]) - int(arrays.bytes[held].sum())
    if room < 0:
        return None
    before = order[:moment]
    n_values = int(before.max(initial=-1)) + 1
    # The latest computation of each value so far, and how long it lives.
    latest = np.full(n_values, -1, np.int64)
    latest[before] = np.arange(moment)
    lives_until = measured.last_use[latest]
    is_needed = lives_until > moment
    # A dead value may be kept alive up to here if memory allows that at every step in between.
    peak_since = np.maximum.accumulate(live_bytes[:moment][::-1])[::-1]
    peak_since = np.append(peak_since, 0)
    fits = peak_since[np.minimum(lives_until + 1, moment)] + arrays.bytes[:n_values] <= budget
    n_bytes = arrays.bytes[:n_values].copy()
    n_bytes[~(fits | (lives_until >= moment))] = 4 * budget + 4
    n_bytes[held] = 0
    if step < n_values:
        is_needed[step] = False
        n_bytes[step] = 0
    needed = np.flatnonzero(is_needed).tolist()
    reach = 3 * len(needed) + _REACH
    while True:
        near = _ancestors(operands, needed, reach, arrays.once)
        # About four maximum flows: two milliseconds for a few values, mostly SciPy's overhead.
        effort.spend(60 * len(near) + 8_000)
        try:
            part = _part(operands, near, n_bytes, arrays.time, needed, arrays.once)
            cut, _ = at_budget(part, int(room * fill), recent=recent)
            break
        except BudgetError:
            if len(near) < reach:
                return None
            reach *= 8
    if not cut.recomputed:
        return None
    out = order[: moment + 1].tolist()
    replay_order(operands, order[moment + 1 :].tolist(), {near[v] for v in cut.recomputed}, out)
    return out


def _ancestors(
    operands: Sequence[tuple[int, ...]],
    values: Sequence[int],
    at_most: int,
    once: Bools,
) -> list[int]:
    """Return the values and `at_most` of their ancestors, the nearest ones, in order."""
    found = set(values)
    queue = [value for value in values if not once[value]]
    for value in queue:
        for operand in operands[value]:
            if operand not in found and len(found) < at_most:
                found.add(operand)
                if not once[operand]:
                    queue.append(operand)
    return sorted(found)


def _part(
    operands: Sequence[tuple[int, ...]],
    near: Sequence[int],
    n_bytes: Ints,
    time: Floats,
    needed: Sequence[int],
    once: Bools,
) -> CutProblem:
    """Return the cut problem of some values; those with an operand beyond them are not recomputed."""
    index = {value: v for v, value in enumerate(near)}
    deps = [() if once[value] else operands[value] for value in near]
    is_whole = [not once[v] and all(u in index for u in us) for v, us in zip(near, deps)]
    times = time[near].tolist()
    return CutProblem(
        tuple(n_bytes[near].tolist()),
        tuple(t if whole else math.inf for t, whole in zip(times, is_whole)),
        tuple(tuple(index[u] for u in us if u in index) for us in deps),
        tuple(index[value] for value in needed),
    )
