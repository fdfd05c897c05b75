"""Finding a good order of computation on graphs of any size: cuts at the peak, then trimming.

`refine` starts from any order. While its peak is above the budget, it looks at the step where the
peak is and asks what should cross that moment: a minimum cut (`mincut`) over the values that exist
there, in which those that are live anyway (the step's own value and operands) cost nothing. What
the cut saves stays; what it recomputes is computed again just before its first use after the
moment, and kept from there on. That lowers this peak to the budget and may raise later ones (a
long chain recomputed at once), which are cut in turn: recomputation nests as deeply as the budget
asks.

`trim` then undoes what turned out needless: it drops each recomputation, the dearest first, whose
value can be kept instead within the budget.

Both are heuristics: they prove nothing, and `simulate` checks what comes out. They are
deterministic. The idea of advancing a schedule by repeated cuts is related to Kumar et al.,
"Efficient rematerialization for deep networks" (NeurIPS 2019); the on-demand replay to Kirisame et
al., "Dynamic tensor rematerialization" (ICLR 2021).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from remat.planner.mincut import CutProblem, at_budget
from remat.planner.simulate import Arrays, Ints, Liveness, liveness


def tidy(arrays: Arrays, order: Sequence[int] | Ints) -> Liveness:
    """The order without repeated computations that nothing uses."""
    measured = liveness(arrays, order)
    while True:
        keep = measured.used | is_first(measured.order)
        if keep.all():
            return measured
        measured = liveness(arrays, measured.order[keep])


def is_first(order: Ints) -> NDArray[np.bool_]:
    """Which computations of an order are the first of their value."""
    first = np.zeros(len(order), np.bool_)
    first[np.unique(order, return_index=True)[1]] = True
    return first


def replay(
    operands: Sequence[Sequence[int]], steps: Iterable[int], missing: set[int], out: list[int]
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
    operands: Sequence[Sequence[int]], value: int, missing: set[int], out: list[int]
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


@dataclasses.dataclass(frozen=True, eq=False)
class Taste:
    """How a search weighs its cuts: other tastes lead to other orders.

    Args:
      time: the time of recomputing each value, as the cuts see it.
      room: the share of the free bytes at the peak that a cut may fill; less leaves room for what
        is computed again later.
    """

    time: NDArray[np.float64]
    room: float = 1.0


def refine(
    arrays: Arrays,
    operands: Sequence[Sequence[int]],
    order: Sequence[int] | Ints,
    budget: int,
    taste: Taste,
    *,
    max_rounds: int,
) -> Liveness:
    """Cut the order at its peak until it fits or no cut helps; the order of lowest peak seen."""
    measured = best = tidy(arrays, order)
    stale = 0
    longest = 20 * len(arrays) + 1000
    for _ in range(max_rounds):
        if measured.peak_bytes <= budget or stale > 30 or len(measured.order) > longest:
            break
        moment = int(np.argmax(measured.live_bytes))
        after = _cut_at(arrays, operands, measured, moment, budget, taste)
        if after is None:
            break
        measured = tidy(arrays, after)
        stale += 1
        if measured.peak_bytes < best.peak_bytes:
            best, stale = measured, 0
    return best


def _cut_at(
    arrays: Arrays,
    operands: Sequence[Sequence[int]],
    measured: Liveness,
    moment: int,
    budget: int,
    taste: Taste,
) -> list[int] | None:
    """The order after a minimum cut at one of its steps, or None where even that is too much."""
    order, live_bytes = measured.order, measured.live_bytes
    before = order[:moment]
    n_values = int(before.max(initial=-1)) + 1
    step = int(order[moment])
    # The latest computation of each value so far, and how long it lives.
    latest = np.full(n_values, -1, np.int64)
    latest[before] = np.arange(moment)
    lives_until = measured.last_use[latest]
    needed = lives_until > moment
    if step < n_values:
        needed[step] = False
    is_live = lives_until >= moment
    held = list(operands[step])
    room = budget - int(arrays.bytes[step]) - int(arrays.bytes[held].sum())
    # A dead value may be kept alive up to here where memory allows that on the whole way.
    peak_since = np.maximum.accumulate(live_bytes[:moment][::-1])[::-1]
    peak_since = np.append(peak_since, 0)
    fits = peak_since[np.minimum(lives_until + 1, moment)] + arrays.bytes[:n_values] <= budget
    n_bytes = arrays.bytes[:n_values].copy()
    n_bytes[~(is_live | fits)] = 4 * budget + 4
    n_bytes[held] = 0
    if step < n_values:
        n_bytes[step] = 0
    problem = CutProblem(
        tuple(n_bytes.tolist()),
        tuple(taste.time[:n_values].tolist()),
        tuple(operands[:n_values]),
        tuple(np.flatnonzero(needed).tolist()),
    )
    if room < 0:
        return None
    cut, _ = at_budget(problem, int(room * taste.room))
    if not cut.recomputed:
        return None
    out = order[: moment + 1].tolist()
    replay(operands, order[moment + 1 :].tolist(), set(cut.recomputed), out)
    return out


def trim(arrays: Arrays, measured: Liveness, budget: int, *, max_steps: int) -> Liveness:
    """Drop recomputations, the dearest first, as long as the order stays within the budget.

    `max_steps` bounds the work: the sum of the lengths of the orders that are measured.
    """
    work = 0
    dropped_any = True
    while dropped_any:
        dropped_any = False
        repeated = np.flatnonzero(~is_first(measured.order))
        by_time = np.argsort(-arrays.time[measured.order[repeated]], kind="stable")
        # Places in the order shift with each drop; the label of a computation stays.
        label = np.arange(len(measured.order))
        for wanted in repeated[by_time].tolist():
            at = int(np.searchsorted(label, wanted))
            if at == len(label) or label[at] != wanted:
                continue
            is_sure = _fits_without(arrays, measured, at, budget)
            if not is_sure and work > max_steps:
                continue
            work += len(label)
            without, label_without = _without(arrays, measured, label, at)
            if is_sure or without.peak_bytes <= budget:
                measured, label, dropped_any = without, label_without, True
    return measured


def _fits_without(arrays: Arrays, measured: Liveness, at: int, budget: int) -> bool:
    """Whether keeping the value from its last use before, instead, fits for sure.

    What its operands no longer occupy is not counted, so that the answer is fast and may be
    a needless no.
    """
    value = measured.order[at]
    earlier = int(np.flatnonzero(measured.order[:at] == value)[-1])
    idle = measured.live_bytes[int(measured.last_use[earlier]) + 1 : at]
    return int(idle.max(initial=0)) + int(arrays.bytes[value]) <= budget


def _without(arrays: Arrays, measured: Liveness, label: Ints, at: int) -> tuple[Liveness, Ints]:
    """The order without one computation, tidied, and the labels of what remains."""
    label = np.delete(label, at)
    measured = liveness(arrays, np.delete(measured.order, at))
    while True:
        keep = measured.used | is_first(measured.order)
        if keep.all():
            return measured, label
        label = label[keep]
        measured = liveness(arrays, measured.order[keep])


# Searching on from a found order


def extra_time(arrays: Arrays, measured: Liveness) -> float:
    """The time spent on recomputation."""
    return float(arrays.time[measured.order[~is_first(measured.order)]].sum())


def improve(
    arrays: Arrays,
    operands: Sequence[Sequence[int]],
    found: Liveness,
    budget: int,
    *,
    good_enough: float,
    n_rounds: int,
    max_steps: int,
) -> Liveness:
    """Large-neighbourhood search: forget some recomputations, cut again with another taste.

    It ends when the extra time is `good_enough` (a proven bound) or after `n_rounds`.
    """
    random = np.random.default_rng(0)
    best = found
    best_time = extra_time(arrays, best)
    for _ in range(n_rounds):
        if best_time <= good_enough:
            break
        repeated = np.flatnonzero(~is_first(best.order))
        if not len(repeated):
            break
        forget = _some(random, repeated)
        taste = Taste(
            arrays.time * np.exp(random.normal(0.0, random.choice([0.05, 0.2, 0.5]), len(arrays))),
            float(random.choice([1.0, 0.95, 0.85, 0.7])),
        )
        again = refine(
            arrays, operands, np.delete(best.order, forget), budget, taste, max_rounds=60
        )
        if again.peak_bytes > budget:
            continue
        again = trim(arrays, again, budget, max_steps=max_steps)
        time = extra_time(arrays, again)
        if time <= best_time:
            best, best_time = again, time
    return best


def _some(random: np.random.Generator, repeated: Ints) -> Ints:
    """Some of the recomputations: scattered, or neighbours in time."""
    size = int(random.integers(1, max(2, len(repeated) // 2 + 1) + 1))
    size = min(size, len(repeated))
    if random.random() < 0.5:
        begin = int(random.integers(0, len(repeated) - size + 1))
        return repeated[begin : begin + size]
    return np.sort(random.choice(repeated, size, replace=False))
