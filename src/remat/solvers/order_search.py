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
import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from remat.errors import BudgetError
from remat.solvers.mincut import CutProblem, at_budget
from remat.solvers.simulate import Arrays, Ints, Liveness, liveness

_REACH = 300  # ancestors that a cut considers beside three times as many as it needs
_PATIENCE = 30  # cuts in a row that do not lower the peak any further
_LONG = 4000  # steps from which `trim` makes only the drops that a quick look can judge


def tidy(arrays: Arrays, order: Sequence[int] | Ints, effort: Effort) -> Liveness:
    """The order without repeated computations that nothing uses."""
    measured = effort.measure(arrays, order)
    return _tidy_labelled(arrays, measured, measured.order, effort)[0]


def _tidy_labelled(
    arrays: Arrays, measured: Liveness, label: Ints, effort: Effort
) -> tuple[Liveness, Ints]:
    while True:
        keep = measured.used | is_first(measured.order)
        if keep.all():
            return measured, label
        label = label[keep]
        measured = effort.measure(arrays, measured.order[keep])


def is_first(order: Ints) -> NDArray[np.bool_]:
    """Which computations of an order are the first of their value."""
    first = np.zeros(len(order), np.bool_)
    first[np.unique(order, return_index=True)[1]] = True
    return first


def replay(
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


class Effort:
    """An allowance of work, the same on every machine, that searches share.

    A unit is one step of an order measured once, about a quarter of a microsecond.
    """

    def __init__(self, units: int) -> None:
        self.units = units

    @property
    def is_spent(self) -> bool:
        return self.units <= 0

    def measure(self, arrays: Arrays, order: Sequence[int] | Ints) -> Liveness:
        self.units -= len(order) + 100
        return liveness(arrays, order)

    def cut(self, n_values: int) -> None:
        # Some four maximum flows; on a few values two milliseconds, most of it scipy's overhead.
        self.units -= 60 * n_values + 8_000


@dataclasses.dataclass(frozen=True, eq=False)
class Taste:
    """How a search weighs its cuts: other tastes lead to other orders.

    Args:
      time: the time of recomputing each value, as the cuts see it.
      room: the share of the free bytes at the moment of a cut that it may fill; less leaves room
        for what is computed again later.
      height: the moment of a cut is the first that is this share of the way from the budget to
        the peak; 1 is the peak itself, less goes through the order more in its own direction.
    """

    time: NDArray[np.float64]
    room: float = 1.0
    height: float = 1.0


def plain_tastes(arrays: Arrays) -> tuple[Taste, ...]:
    """The tastes that every search begins with."""
    return tuple(
        Taste(arrays.time, room, height) for room in (1.0, 0.9, 0.75, 0.5) for height in (1.0, 0.5)
    )


def refine(
    arrays: Arrays,
    operands: Sequence[tuple[int, ...]],
    order: Sequence[int] | Ints,
    budget: int,
    taste: Taste,
    effort: Effort,
) -> Liveness:
    """Cut the order at its peak until it fits or no cut helps; the order of lowest peak seen."""
    measured = best = tidy(arrays, order, effort)
    stale = 0
    longest = 20 * len(arrays) + 1000
    while not effort.is_spent:
        if measured.peak_bytes <= budget or stale > _PATIENCE or len(measured.order) > longest:
            break
        high = budget + taste.height * (measured.peak_bytes - budget)
        moment = int(np.argmax(measured.live_bytes >= high))
        after = _cut_at(arrays, operands, measured, moment, budget, taste, effort)
        if after is None:
            break
        effort.units -= 4 * len(after)
        measured = tidy(arrays, after, effort)
        stale += 1
        if measured.peak_bytes < best.peak_bytes:
            best, stale = measured, 0
    return best


def descend(
    arrays: Arrays,
    operands: Sequence[tuple[int, ...]],
    order: Sequence[int] | Ints,
    budget: int,
    effort: Effort,
) -> Liveness:
    """Approach a budget that `refine` may miss in one go; the order of lowest peak seen.

    Targets fall towards the budget, each by half of the way (in ratio) from the lowest peak to
    the highest target that was missed, and each is tried from the start and from the best order.
    """
    best = tidy(arrays, order, effort)
    missed, target = 0, budget
    tastes = plain_tastes(arrays)
    for _ in range(24):
        allowance = effort.units // (12 * len(tastes))
        for taste in tastes:
            for begin in (np.asarray(order, np.int64), best.order):
                if best.peak_bytes <= target:
                    break
                attempt = Effort(allowance)
                found = refine(arrays, operands, begin, target, taste, attempt)
                effort.units -= allowance - attempt.units
                if found.peak_bytes < best.peak_bytes:
                    best = found
        if best.peak_bytes <= budget or effort.is_spent:
            break
        if best.peak_bytes > target:
            missed = target
        if best.peak_bytes - missed <= best.peak_bytes // 500:
            break
        target = max(budget, round(math.sqrt(max(missed, budget, 1)) * math.sqrt(best.peak_bytes)))
    return best


def _cut_at(
    arrays: Arrays,
    operands: Sequence[tuple[int, ...]],
    measured: Liveness,
    moment: int,
    budget: int,
    taste: Taste,
    effort: Effort,
) -> list[int] | None:
    """The order after a minimum cut at one of its steps, or None where even that is too much."""
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
    # A dead value may be kept alive up to here where memory allows that on the whole way.
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
        effort.cut(len(near))
        try:
            part = _part(operands, near, n_bytes, taste.time, needed, arrays.once)
            cut, _ = at_budget(part, int(room * taste.room))
            break
        except BudgetError:
            if len(near) < reach:
                return None
            reach *= 8
    if not cut.recomputed:
        return None
    out = order[: moment + 1].tolist()
    replay(operands, order[moment + 1 :].tolist(), {near[v] for v in cut.recomputed}, out)
    return out


def _ancestors(
    operands: Sequence[tuple[int, ...]],
    values: Sequence[int],
    at_most: int,
    once: NDArray[np.bool_],
) -> list[int]:
    """The values and what they can be computed from, the nearest first found, in order."""
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
    time: NDArray[np.float64],
    needed: Sequence[int],
    once: NDArray[np.bool_],
) -> CutProblem:
    """The cut problem of some values; one with an operand beyond them cannot be recomputed."""
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


def trim(
    arrays: Arrays, measured: Liveness, budget: int, effort: Effort, *, at_a_glance: bool = False
) -> Liveness:
    """Drop recomputations, the dearest first, as long as the order stays within the budget."""
    measured = _trim_at_a_glance(arrays, measured, budget, effort)
    dropped_any = len(measured.order) <= _LONG and not at_a_glance
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
            if effort.is_spent:
                return measured
            without, label_without = _tidy_labelled(
                arrays,
                effort.measure(arrays, np.delete(measured.order, at)),
                np.delete(label, at),
                effort,
            )
            if without.peak_bytes <= budget:
                measured, label, dropped_any = without, label_without, True
    return measured


def _trim_at_a_glance(arrays: Arrays, measured: Liveness, budget: int, effort: Effort) -> Liveness:
    """Drop what can be kept instead for sure.

    Keeping a value from its last use before adds its bytes to the idle time in between. What its
    operands no longer occupy after the drop is not counted until the end, so that each look is
    short.
    """
    order = measured.order
    live_bytes, last_use = measured.live_bytes.copy(), measured.last_use.copy()
    repeated = np.flatnonzero(~is_first(order))
    by_value = np.lexsort((np.arange(len(order)), order))
    earlier = np.full(len(order), -1, np.int64)
    later = np.full(len(order), -1, np.int64)
    same = order[by_value[1:]] == order[by_value[:-1]]
    earlier[by_value[1:][same]] = by_value[:-1][same]
    later[by_value[:-1][same]] = by_value[1:][same]
    kept = np.ones(len(order), np.bool_)
    for at in repeated[np.argsort(-arrays.time[order[repeated]], kind="stable")].tolist():
        before, after = int(earlier[at]), int(later[at])
        idle = slice(int(last_use[before]) + 1, at)
        size = int(arrays.bytes[order[at]])
        if int(live_bytes[idle].max(initial=0)) + size > budget:
            continue
        live_bytes[idle] += size
        last_use[before] = last_use[at]
        kept[at] = False
        later[before] = after
        if after >= 0:
            earlier[after] = before
    effort.units -= 40 * len(repeated)
    return measured if kept.all() else tidy(arrays, order[kept], effort)


# Searching on from a found order


def extra_time(arrays: Arrays, measured: Liveness) -> float:
    """The time spent on recomputation."""
    return float(arrays.time[measured.order[~is_first(measured.order)]].sum())


def improve(
    arrays: Arrays,
    operands: Sequence[tuple[int, ...]],
    found: Liveness,
    budget: int,
    *,
    good_enough: float,
    max_rounds: int,
    effort: Effort,
    seed: int,
) -> Liveness:
    """Large-neighbourhood search: forget some recomputations, cut again with another taste.

    It ends when the extra time is `good_enough` (a proven bound), after `max_rounds` in a row that
    found nothing better, or when the effort is spent.
    """
    random = np.random.default_rng(seed)
    best = found
    best_time = extra_time(arrays, best)
    idle_rounds = 0
    while best_time > good_enough and idle_rounds < max_rounds and not effort.is_spent:
        idle_rounds += 1
        repeated = np.flatnonzero(~is_first(best.order))
        taste = Taste(
            arrays.time * np.exp(random.normal(0.0, random.choice([0.05, 0.2, 0.5]), len(arrays))),
            float(random.choice([1.0, 0.95, 0.85, 0.7])),
            float(random.choice([1.0, 1.0, 0.9, 0.5])),
        )
        remaining = np.delete(best.order, _some(random, repeated))
        again = refine(arrays, operands, remaining, budget, taste, effort)
        if again.peak_bytes > budget:
            continue
        again = trim(arrays, again, budget, effort)
        time = extra_time(arrays, again)
        if time < best_time:
            idle_rounds = 0
        if time <= best_time:
            best, best_time = again, time
    return best


def _some(random: np.random.Generator, repeated: Ints) -> Ints:
    """Some of the recomputations: scattered, or neighbours in time."""
    most = max(2, len(repeated) // 2 + 1)
    size = min(int(most ** random.random() + random.random()), len(repeated))
    if random.random() < 0.5:
        begin = int(random.integers(0, len(repeated) - size + 1))
        return repeated[begin : begin + size]
    return np.sort(random.choice(repeated, size, replace=False))
