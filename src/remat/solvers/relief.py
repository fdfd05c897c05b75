"""Recomputations inserted where they relieve the most bytes per second, in any order of computation.

Between two uses of a value lies a *gap* in which it is only held. Dropping the value there and
computing it again before the second use relieves its bytes at every step of the gap, costs its
time, and may hold its operands for longer: each operand that is freed before the recomputation is
held until then, or recomputed as well, whichever is cheaper. A step's bytes have a price where the
order exceeds the budget at that step, so the worth of a recomputation is what it relieves minus
what it holds, at those prices, per second.

`relieve` inserts the recomputations of the highest worth, several at once where they concern
different values, measures the order anew, and goes on until it fits or nothing helps. `keep` undoes
recomputations whose value fits into its gap after all. `improve` alternates both on parts of an
order (ruin and recreate: Schrimpf et al., "Record breaking optimization results using the ruin and
recreate principle", J. Comput. Phys. 2000).

The rule resembles the eviction heuristic of dynamic tensor rematerialization (Kirisame et al., ICLR
2021), applied to the whole schedule at once instead of at the moment where memory runs out: it sees
every excess, before and after the gap, and which operands are at hand.

Known limits: prices are those of single bytes at single steps, so where only long chains recomputed
together help (deep chains at small budgets), the cuts of `order_search` find better orders.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from remat.solvers.effort import Effort
from remat.solvers.liveness import Bools, Floats, Ints, Liveness


@dataclasses.dataclass(frozen=True)
class Relief:
    """Parameters of `relieve`; different ones lead to different orders.

    Args:
      power: the price of a byte grows with this power of the excess at its step: 0 prices all steps
        above the budget alike, more concentrates on the peak.
      portion: the share of the total excess that one round of insertions may relieve; less follows
        the changing prices more closely and takes longer.
      width: how many gaps of the highest worth a round examines.
      noise: standard deviation of the random factors (their logarithms) on each worth.
    """

    power: float = 0.5
    portion: float = 0.25
    width: int = 256
    noise: float = 0.0


# Share of the best worth; candidates below it wait for a later round with new prices.
_NEAR_BEST = 0.5
_USEFUL = 0.6  # share of a relief that must still be needed when others of its round are inserted
_SMALL_TIME = 1e-3  # share of the mean time, added to all times so that each worth is finite
_OPERAND_RATE = 0.3  # share of the best worth at which recomputing an operand as well pays
_MOST_ROUNDS = 2000  # rounds of insertions, after which a search ends
# Lengths, in steps: of blocks whose maxima are known, and of slices for which these are read first. Longer
# blocks tell less about slices and take less time.
_BLOCK, _LONG = 64, 1024
_LONGEST = 20  # computations per node; a search ends at an order that is longer


def relieve(
    measured: Liveness,
    budget: int,
    relief: Relief,
    effort: Effort,
    *,
    random: np.random.Generator | None = None,
    at_most_time: float = math.inf,
) -> Liveness:
    """Insert recomputations until the order fits the budget; return the order that was reached.

    Args:
      measured: where to start.
      budget: bytes.
      relief: how to choose.
      effort: ends the search when it is spent.
      random: source of noise; needed if `relief` has some.
      at_most_time: extra time above which the order is not developed further.
    """
    barred = np.zeros(len(measured.arrays), np.bool_)
    excess = _excess(measured, budget, relief.power)
    one_at_a_time = False
    for _ in range(_MOST_ROUNDS):
        if measured.peak_bytes <= budget or effort.is_spent:
            break
        if measured.extra_time > at_most_time:
            break
        if len(measured.order) > _LONGEST * len(measured.arrays):
            break
        chosen = _round(measured, budget, relief, barred, random, one_at_a_time)
        effort.spend(4 * len(measured.order) + 8 * relief.width)
        if chosen is None:
            break
        order, values = chosen
        after = effort.measure(measured.arrays, order)
        after_excess = _excess(after, budget, relief.power)
        if after_excess < excess * (1 - 1e-9):
            measured, excess, one_at_a_time = after, after_excess, False
        elif one_at_a_time:
            barred[values] = True
        else:
            one_at_a_time = True
    return measured


def _excess(measured: Liveness, budget: int, power: float) -> float:
    """Return the excess over the budget, summed over the steps, each weighted by its price."""
    over = np.maximum(measured.live_bytes - budget, 0) / max(budget, 1)
    return float((over ** (1.0 + power)).sum())


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Gaps:
    """Stretches in which a computed value is only held, one row each.

    Args:
      computation: the step that computed the value.
      after: the last step before the gap that uses it (or computes it).
      before: the step after the gap that uses it.
      value: its place in the graph.
      time: of computing it again; 0 for a repeated computation that would only be postponed.
      is_postponed: whether the value is a repeated computation that nothing uses before the gap.
    """

    computation: Ints
    after: Ints
    before: Ints
    value: Ints
    time: Floats
    is_postponed: Bools

    def take(self, rows: Ints) -> _Gaps:
        return _Gaps(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))


def _gaps(measured: Liveness, barred: Bools) -> _Gaps:
    arrays, n_steps = measured.arrays, len(measured.order)
    computation = np.append(np.arange(n_steps), measured.server)
    step = np.append(np.arange(n_steps), measured.user)
    in_turn = np.argsort(computation, kind="stable")
    computation, step = computation[in_turn], step[in_turn]
    value = measured.order[computation[:-1]]
    is_gap = (computation[1:] == computation[:-1]) & (step[1:] > step[:-1] + 1)
    is_gap &= ~(arrays.once | barred)[value] & (arrays.bytes[value] > 0)
    computation, after, before = computation[:-1][is_gap], step[:-1][is_gap], step[1:][is_gap]
    value = value[is_gap]
    is_postponed = ~measured.is_first[computation] & (after == computation)
    time = np.where(is_postponed, 0.0, arrays.time[value])
    return _Gaps(computation, after, before, value, time, is_postponed)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Candidates:
    """Recomputations that may be inserted, one row each.

    Args:
      gap: the row of the gap.
      step: the step before which the value is computed again.
      net: bytes relieved minus bytes held, at the prices of their steps.
      time: of the recomputation, that of its operands included.
      operands: for some rows the operands that are recomputed as well.
    """

    gap: Ints
    step: Ints
    net: Floats
    time: Floats
    operands: dict[int, list[int]]


def _round(
    measured: Liveness,
    budget: int,
    relief: Relief,
    barred: Bools,
    random: np.random.Generator | None,
    one_at_a_time: bool,
) -> tuple[Ints, list[int]] | None:
    """Return an order with one round of insertions and the recomputed values; None if none helps."""
    arrays = measured.arrays
    over = np.maximum(measured.live_bytes - budget, 0).astype(np.float64)
    price = (over / over.max()) ** relief.power if relief.power else np.sign(over)
    total_price = np.append(0.0, np.cumsum(price))
    small = _SMALL_TIME * arrays.total_time / max(len(arrays), 1) + 1e-300
    gaps = _gaps(measured, barred)
    relieved = arrays.bytes[gaps.value] * (total_price[gaps.before] - total_price[gaps.after + 1])
    worth = relieved / (gaps.time + small)
    rows = np.flatnonzero(relieved > 0)
    if not len(rows):
        return None
    if len(rows) > relief.width:
        disturbed = _disturbed(worth[rows], relief, random)
        rows = rows[np.sort(np.argpartition(-disturbed, relief.width)[: relief.width])]
    gaps = gaps.take(rows)
    candidates = _candidates(measured, gaps, total_price, small)
    worth = _disturbed(candidates.net / (candidates.time + small), relief, random)
    return _insert(
        measured, gaps, candidates, worth, over, price, 0.0 if one_at_a_time else relief.portion
    )


def _disturbed(worth: Floats, relief: Relief, random: np.random.Generator | None) -> Floats:
    if not relief.noise:
        return worth
    assert random is not None
    return worth * np.exp(random.normal(0.0, relief.noise, len(worth)))


def _candidates(measured: Liveness, gaps: _Gaps, total_price: Floats, small: float) -> _Candidates:
    """Return for each gap the recomputation of the highest worth, and the latest one.

    A recomputation waits for the end of its gap, or only until an operand would be freed.
    """
    arrays = measured.arrays
    n_gaps = len(gaps.value)
    row, operand = arrays.uses(gaps.value)
    server = measured.latest(operand, gaps.before[row])
    freed = measured.last_use[server] + 1
    # From this step on all operands have been computed.
    earliest = gaps.after + 1
    np.maximum.at(earliest, row, server + 1)
    step = np.append(np.minimum(freed, gaps.before[row]), gaps.before)
    option = np.append(row, np.arange(n_gaps))
    step = np.maximum(step, earliest[option])
    in_turn = np.lexsort((step, option))
    option, step = option[in_turn], step[in_turn]
    # What holding the operands until then costs: all pairs of an option and an operand.
    first_pair = np.append(0, np.cumsum(np.bincount(row, minlength=n_gaps)))
    n_pairs = first_pair[option + 1] - first_pair[option]
    pair_option = np.repeat(np.arange(len(option)), n_pairs)
    pair = np.arange(len(pair_option)) + np.repeat(
        first_pair[option] - np.cumsum(n_pairs) + n_pairs, n_pairs
    )
    held = arrays.bytes[operand[pair]] * np.maximum(
        total_price[step[pair_option]] - total_price[freed[pair]], 0.0
    )
    net = arrays.bytes[gaps.value[option]] * (
        total_price[step] - total_price[gaps.after[option] + 1]
    ) - np.bincount(pair_option, weights=held, minlength=len(option))
    worth = net / (gaps.time[option] + small)
    # The rows of `option` are grouped by gap; the last of each waits for the end of the gap.
    begin = np.flatnonzero(np.append(True, option[1:] != option[:-1]))
    best = begin + _first_maxima(worth, begin)
    latest = np.append(begin[1:], len(option)) - 1
    is_chosen = np.zeros(len(option), np.bool_)
    is_chosen[best] = is_chosen[latest] = True
    chosen = np.flatnonzero(is_chosen)
    new_row = np.cumsum(is_chosen) - 1
    of_chosen = is_chosen[pair_option]
    net, time = net[chosen], gaps.time[option[chosen]].copy()
    operands = _recompute_operands(
        measured,
        new_row[pair_option[of_chosen]],
        operand[pair[of_chosen]],
        held[of_chosen],
        step[chosen],
        net,
        time,
        total_price,
        small,
    )
    return _Candidates(option[chosen], step[chosen], net, time, operands)


def _first_maxima(numbers: Floats, begin: Ints) -> Ints:
    """Return for each group of consecutive numbers the distance of its first maximum from its start."""
    size = np.diff(np.append(begin, len(numbers)))
    is_most = numbers == np.repeat(np.maximum.reduceat(numbers, begin), size)
    places = np.where(is_most, np.arange(len(numbers)), len(numbers))
    return np.minimum.reduceat(places, begin) - begin


def _recompute_operands(
    measured: Liveness,
    row: Ints,
    operand: Ints,
    held: Floats,
    step: Ints,
    net: Floats,
    time: Floats,
    total_price: Floats,
    small: float,
) -> dict[int, list[int]]:
    """Recompute operands instead of holding them, where that pays; changes `net` and `time`.

    Their own operands are held.
    """
    arrays = measured.arrays
    is_costly = (held > 0) & ~arrays.once[operand]
    row, operand, held = row[is_costly], operand[is_costly], held[is_costly]
    if not len(row):
        return {}
    index, inner = arrays.uses(operand)
    at = step[row][index]
    freed = measured.last_use[measured.latest(inner, at)] + 1
    inner_held = arrays.bytes[inner] * np.maximum(total_price[at] - total_price[freed], 0.0)
    saved = held - np.bincount(index, weights=inner_held, minlength=len(row))
    worth = np.maximum(net, 0.0) / (time + small)
    rate = np.maximum(worth[row], _OPERAND_RATE * worth.max(initial=0.0))
    pays = saved > rate * arrays.time[operand]
    np.add.at(net, row[pays], saved[pays])
    np.add.at(time, row[pays], arrays.time[operand[pays]])
    found: dict[int, list[int]] = {}
    for which, value in zip(row[pays].tolist(), operand[pays].tolist()):
        found.setdefault(which, []).append(value)
    return found


def _insert(
    measured: Liveness,
    gaps: _Gaps,
    candidates: _Candidates,
    worth: Floats,
    over: Floats,
    price: Floats,
    portion: float,
) -> tuple[Ints, list[int]] | None:
    """Insert the candidates of the highest worth; no two of a round share values or operands."""
    arrays = measured.arrays
    operands_of = arrays.operands
    remaining = over.copy()
    total = left = float(remaining @ price)
    taken: set[int] = set()
    values: list[int] = []
    inserted: list[tuple[int, int]] = []
    postponed: list[int] = []
    best = -math.inf
    for row in np.argsort(-worth, kind="stable").tolist():
        if candidates.net[row] <= 0:
            continue
        best = max(best, float(worth[row]))
        if worth[row] < _NEAR_BEST * best:
            break
        gap, step = int(candidates.gap[row]), int(candidates.step[row])
        value, after = int(gaps.value[gap]), int(gaps.after[gap])
        also = candidates.operands.get(row, [])
        concerned = {value, *also, *operands_of[value]}
        for operand in also:
            concerned.update(operands_of[operand])
        if not taken.isdisjoint(concerned):
            continue
        stretch = remaining[after + 1 : step]
        useful = np.minimum(stretch, arrays.bytes[value])
        gained = float(useful @ price[after + 1 : step])
        whole = float(arrays.bytes[value] * price[after + 1 : step].sum())
        if inserted and gained < _USEFUL * min(whole, left):
            continue
        stretch -= useful
        left -= gained
        taken |= concerned
        values.append(value)
        inserted += [(step, operand) for operand in sorted(also)]
        inserted.append((step, value))
        if gaps.is_postponed[gap]:
            postponed.append(int(gaps.computation[gap]))
        if left <= (1 - portion) * total:
            break
    if not inserted:
        return None
    inserted.sort(key=lambda entry: entry[0])  # stable: operands stay before the value
    steps = np.array([step for step, _ in inserted])
    order = np.insert(measured.order, steps, [value for _, value in inserted])
    if postponed:
        order = np.delete(order, postponed + np.searchsorted(steps, postponed, side="right"))
    return order, values


# Undoing


def keep(measured: Liveness, budget: int, effort: Effort) -> Liveness:
    """Drop recomputations whose value can be kept within the budget, those of most time first.

    Keeping a value occupies its bytes from its last use before to the recomputation, and relieves
    those of the operands that are held for the recomputation only.
    """
    while True:
        dropped = _droppable(measured, budget)
        effort.spend(len(measured.order) + 40 * int((~measured.is_first).sum()))
        if not dropped:
            return measured
        after = effort.measure(measured.arrays, np.delete(measured.order, dropped))
        assert after.peak_bytes <= max(budget, measured.peak_bytes)
        measured = after


def _droppable(measured: Liveness, budget: int) -> list[int]:
    """Return repeated computations to drop together; no two of them share values or operands."""
    arrays = measured.arrays
    repeated = np.flatnonzero(~measured.is_first)
    if not len(repeated):
        return []
    rank = np.empty(len(measured.order), np.int64)
    rank[measured.by_value] = np.arange(len(measured.order))
    previous = measured.by_value[rank[repeated] - 1]
    begin = (measured.last_use[previous] + 1).tolist()
    live_bytes = measured.live_bytes.copy()
    # The operands that are freed right after the recomputation, and where they were used before.
    recomputed = measured.order[repeated]
    index, operand = arrays.uses(recomputed)
    server = measured.latest(operand, repeated[index])
    ends_here = measured.last_use[server] == repeated[index]
    index, operand, server = index[ends_here], operand[ends_here], server[ends_here]
    used_before = _used_before(measured, server, repeated[index]).tolist()
    freed_bytes = arrays.bytes[operand]
    total = np.bincount(index, weights=freed_bytes, minlength=len(repeated)).astype(np.int64)
    all_freed, freed = total.tolist(), freed_bytes.tolist()
    first_freed = np.append(0, np.cumsum(np.bincount(index, minlength=len(repeated)))).tolist()
    ends, values = repeated.tolist(), recomputed.tolist()
    sizes = arrays.bytes[recomputed].tolist()
    most = _BlockMaxima(live_bytes) if len(live_bytes) > _LONG else None
    taken: set[int] = set()
    dropped: list[int] = []
    for row in np.argsort(-arrays.time[recomputed], kind="stable").tolist():
        at, since, value = ends[row], begin[row], values[row]
        if value in taken or not taken.isdisjoint(arrays.operands[value]):
            continue
        # As much may be live in between at most, even if all bytes are freed at its beginning.
        room = budget - sizes[row] + all_freed[row]
        if most is not None and at - since > _LONG and most.inside(since, at) > room:
            continue
        between = live_bytes[since:at]
        if between.max(initial=0) > room:
            continue
        after = between + sizes[row]
        for use in range(first_freed[row], first_freed[row + 1]):
            after[max(used_before[use] + 1 - since, 0) :] -= freed[use]
        if after.max(initial=0) > budget:
            continue
        live_bytes[since:at] = after
        if most is not None:
            most.update(since, at)
        taken |= {value, *arrays.operands[value]}
        dropped.append(at)
    return dropped


class _BlockMaxima:
    """The maxima of blocks of an array, from which lower bounds of slices' maxima are read quickly.

    Args:
      numbers: the array, none of them negative. After a change of a slice, `update` must be called.
    """

    def __init__(self, numbers: Ints) -> None:
        self._numbers = numbers
        self._maxima = np.zeros(-(-len(numbers) // _BLOCK), numbers.dtype)
        self.update(0, len(numbers))

    def update(self, begin: int, end: int) -> None:
        """Read a slice of the array again."""
        first, last = begin // _BLOCK, -(-end // _BLOCK)
        starts = np.arange(0, min(last * _BLOCK, len(self._numbers)) - first * _BLOCK, _BLOCK)
        if len(starts):
            changed = self._numbers[first * _BLOCK : last * _BLOCK]
            self._maxima[first:last] = np.maximum.reduceat(changed, starts)

    def inside(self, begin: int, end: int) -> int:
        """Return the largest number in those blocks that lie within a slice; 0 if none does."""
        return int(self._maxima[-(-begin // _BLOCK) : end // _BLOCK].max(initial=0))


def _used_before(measured: Liveness, server: Ints, step: Ints) -> Ints:
    """Return for computations and steps that use them the previous use, or the computation itself."""
    n_steps = len(measured.order)
    key = np.sort(
        np.append(
            np.arange(n_steps) * (n_steps + 1) + np.arange(n_steps),
            measured.server * (n_steps + 1) + measured.user,
        )
    )
    found = key[np.searchsorted(key, server * (n_steps + 1) + step) - 1]
    return found - server * (n_steps + 1)


# Ruin and recreate


_POWERS = (0.0, 0.5, 1.0, 2.0)
_NOISES = (0.1, 0.3, 0.6)
# Share of the extra time; the search continues from orders that are worse by less.
_TOLERANCE = 0.002
_OVERSHOOT = 0.02  # share of the graph's time by which an unfinished order may exceed the best


def improve(
    found: Liveness,
    budget: int,
    effort: Effort,
    *,
    good_enough: float,
    max_idle: int,
    seed: int,
) -> Liveness:
    """Remove some recomputations, insert others, keep what is better; return the best order found.

    Args:
      found: an order within the budget.
      budget: bytes.
      effort: ends the search when it is spent.
      good_enough: extra time at which the search ends: a proven bound.
      max_idle: rounds in a row without a better order after which the search ends.
      seed: of the random choices.
    """
    arrays = found.arrays
    random = np.random.default_rng(seed)
    best = current = found
    idle = 0
    while best.extra_time > good_enough and idle < max_idle and not effort.is_spent:
        idle += 1
        repeated = np.flatnonzero(~current.is_first)
        if not len(repeated):
            break
        removed = _some(random, repeated)
        start = effort.measure(arrays, np.delete(current.order, removed))
        relief = Relief(
            power=float(random.choice(_POWERS)),
            portion=0.3,
            width=64,
            noise=float(random.choice(_NOISES)),
        )
        limit = current.extra_time * (1 + _TOLERANCE)
        most = limit + _OVERSHOOT * arrays.total_time
        again = relieve(start, budget, relief, effort, random=random, at_most_time=most)
        if again.peak_bytes > budget:
            continue
        again = keep(again, budget, effort)
        if again.extra_time < best.extra_time * (1 - 1e-12):
            best, idle = again, 0
        if again.extra_time <= limit:
            current = again
    return best


def _some(random: np.random.Generator, repeated: Ints) -> Ints:
    """Return some of the recomputations, mostly few and neighbours in time."""
    size = min(len(repeated), int(random.geometric(1 / min(6, len(repeated)))))
    if random.random() < 0.7:
        centre = repeated[random.integers(len(repeated))]
        return repeated[np.argsort(np.abs(repeated - centre), kind="stable")[:size]]
    return random.choice(repeated, size, replace=False)
