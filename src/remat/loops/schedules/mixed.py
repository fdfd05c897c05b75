"""The schedule that keeps states and the residuals of steps in one memory, with the fewest steps run.

Reversing step i needs its residuals: what the transposed step reads. They come from an evaluation of the
step at state i. A schedule that keeps states only (`Binomial`) evaluates every step again when it is
reversed. A schedule that also keeps residuals does not evaluate those steps again, but residuals are as
a rule larger than a state.

With c units of memory for a state, r for the residuals of a step, and m of them free, a loop of n steps,
whose initial state is at hand, is reversed with

    T(m, n) = n                                       for n ≤ 1 + ⌊m/r⌋: keep all residuals; else
    T(m, n) = min over k of k + T(m−c, n−k) + T(m, k)

evaluations: keep the state at hand, advance k steps, reverse the rest, take the state and reverse the k
steps. The last step's residuals are used as they appear and need no memory of their own. (Maddison's
recurrence allows to keep a step's residuals before states, 1 + T(m−r, n−1). That is never better:
exchanging a step's residuals with the state behind them leaves the part between them more memory.)

So m matters only as the number of states that can still be kept, j = ⌊m/c⌋, with blocks[j], the steps
whose residuals fit the memory that is then free. The recurrence is a binary tree: its left child has one
repetition ℓ more, its right child one level j less, and its leaves are blocks. Replacing a leaf at (j, ℓ)
by two adds blocks[j−1] steps, run 2 + ℓ times, and delays δ = blocks[j] − blocks[j−1] steps by one
repetition. The least cost is reached by such replacements in order of their cost per added step: all of
repetition ℓ before those of ℓ+1, and within ℓ by δ/blocks[j−1]; a level whose successors are cheaper
than itself is taken together with them. The number of replacements is binomial, so a split takes
arithmetic on vectors of one number a level, whatever n.

Where no levels with δ > 0 are taken together and no δ is above 1, which includes all r that are multiples
of c, that order has the cost of the recurrence in every loop that was compared (the tests do a part).
Elsewhere loops with up to `EXACT_STEPS` steps and `EXACT_CELLS` steps times levels are solved by the
recurrence; longer ones follow the order, which came within 1 % of the optimum.

Reference: Maddison, Step-based checkpointing with high-level algorithmic differentiation, J. Comput. Sci.
82, 102405 (2024), for r = c. Griewank & Walther, Algorithm 799: revolve, ACM TOMS 26 (2000), for the tree.
"""

from __future__ import annotations

import heapq
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from remat.errors import ScheduleError
from remat.loops.schedules.actions import Action, ListedSchedule, block_actions
from remat.loops.schedules.shared import check_counts, checkpoints_text, cost_text

# Limits of the loops that are solved by the recurrence where the order is not known to be optimal; they
# take 0.2 s. Larger limits take more time to trace a loop.
EXACT_STEPS = 1500
EXACT_CELLS = 30_000

MOST_FREE = 1000  # the most states if they take no bytes; more hardly reduce the steps
_MANY = 1 << 40  # more steps than any loop has; numbers of tree nodes are limited to this


class Tree(NamedTuple):
    """The distinct parts into which a loop is split, as tables; parts of equal size and level are one.

    Attributes:
      steps: of a part with two parts, the steps to the second one; of a block, its length.
      first, second: the parts, or -1 for a block. The second is reversed first.
      level: how many states can be kept within a part.
    """

    steps: np.ndarray
    first: np.ndarray
    second: np.ndarray
    level: np.ndarray


# Part 0 is a block without steps, part 1 the loop.
EMPTY, ROOT = 0, 1


class TreeSchedule(ListedSchedule):
    """A schedule that splits a loop into parts, and keeps residuals in the fastest memory beside states.

    Attributes:
      blocks: for j = 0, 1, ... the steps that are reversed without recomputation where j states could be
        kept instead of residuals.
    """

    blocks: tuple[int, ...]

    @property
    @abstractmethod
    def tree(self) -> Tree:
        """Return the parts into which the loop is split."""

    @property
    def slots(self) -> int:
        """Return the largest number of states that the fastest memory holds."""
        return len(self.blocks) - 1

    @cached_property
    def forward_steps(self) -> int:
        """Return the evaluations of the body. Steps whose residuals are kept are not evaluated again."""
        return tree_cost(self.tree)

    @property
    def grad_forward_steps(self) -> int:
        """Return `forward_steps`: the first sweep runs the last step, too, and keeps its residuals."""
        return self.forward_steps

    @property
    def peak_slots(self) -> int:
        """Return the largest number of states kept at a time in the fastest memory."""
        return int(max(self.slots - self.tree.level[ROOT:]))

    @property
    def peak_residuals(self) -> int:
        """Return the length of the longest block, whose steps' residuals exist at the same time."""
        return int(max(self.tree.steps[self.tree.first < 0]))


def check_blocks(blocks: tuple[int, ...]) -> None:
    """Raise for numbers of steps of blocks that no memory can have."""
    rising = all(a <= b for a, b in itertools.pairwise(blocks))
    if not blocks or blocks[0] < 1 or not rising:
        raise ScheduleError(f"blocks must be positive and must not fall: {blocks}.")


@dataclass(frozen=True)
class Mixed(TreeSchedule):
    """The schedule with the fewest steps run where states and residuals share one memory.

    >>> schedule = Mixed.of(n=100, memory=10, state=1, residuals=1)
    >>> schedule.forward_steps, schedule.grad_forward_steps
    (237, 237)
    >>> schedule.positions
    (0, 30, 49, 64, 72, 79, 85, 90, 94, 97)
    >>> print(schedule)
    mixed: 100 steps, 10 checkpoints, or up to 11 steps' residuals: 237 forward steps (2.37 per step)

    Attributes:
      n: steps of the loop.
      blocks: for j = 0, 1, ... the steps that are reversed without recomputation where j states could be
        kept instead of residuals; they do not fall. The most states kept at a time are len(blocks) - 1.

    Raises:
      ScheduleError: the memory holds neither a state nor the residuals of all steps but one.
    """

    n: int
    blocks: tuple[int, ...]
    # Up to how many steps, and steps times levels, the recurrence is solved; see the module.
    _limits: tuple[int, int] = field(default=(EXACT_STEPS, EXACT_CELLS), repr=False)

    def __post_init__(self) -> None:
        check_counts(self.n, max(1, len(self.blocks)))
        check_blocks(self.blocks)
        if len(self.blocks) == 1 and self.blocks[0] < self.n:
            raise ScheduleError(
                f"no schedule of {self.n} steps fits a memory that holds no state and residuals of "
                f"{self.blocks[0] - 1} steps. Keep a state or residuals of {self.n - 1} steps."
            )

    @classmethod
    def of(cls, n: int, memory: int, state: int, residuals: int) -> Mixed:
        """Return the schedule for a memory, in the unit in which a state and residuals are given.

        The memory does not include the state at hand and the residuals in use.
        """
        if min(memory, state, residuals) < 0:
            raise ScheduleError(
                f"sizes cannot be negative: {memory=}, {state=}, {residuals=}. Pass sizes of 0 or more."
            )
        return cls(n, blocks_of(n, memory, state, residuals))

    @cached_property
    def tree(self) -> Tree:
        """Return the parts into which the loop is split."""
        return tree_of(self.n, self.blocks, self._limits)

    @property
    def positions(self) -> tuple[int, ...]:
        """Return the steps whose states the first sweep stores."""
        held, part, start = [], ROOT, 0
        while self.tree.first[part] >= 0:
            held.append(start)
            start += int(self.tree.steps[part])
            part = int(self.tree.second[part])
        return tuple(held)

    def actions(self) -> Iterator[Action]:
        """Return all actions, in order.

        `advance` runs steps and keeps nothing, `keep` runs one step and keeps its residuals. Slots of
        states and of residuals are counted separately.
        """
        stack: list[tuple[int, int]] = []
        start, part = 0, ROOT
        while True:
            while self.tree.first[part] >= 0:
                yield Action("store", start, start, len(stack))
                stack.append((start, int(self.tree.first[part])))
                stop = start + int(self.tree.steps[part])
                yield Action("advance", start, stop)
                start, part = stop, int(self.tree.second[part])
            stop = start + int(self.tree.steps[part])
            yield from block_actions(start, stop)
            if not stack:
                return
            start, part = stack.pop()
            yield Action("restore", start, start, len(stack))
            yield Action("free", start, start, len(stack))

    def __str__(self) -> str:
        return (
            f"mixed: {self.n} steps, {checkpoints_text(self.slots)}, or up to {self.peak_residuals} steps' "
            f"residuals: {cost_text(self.forward_steps, self.n)}"
        )


def blocks_of(n: int, memory: int, state: int, residuals: int) -> tuple[int, ...]:
    """Return `Mixed.blocks` for one memory that states and residuals share."""
    slots = min(MOST_FREE if state == 0 else memory // state, max(n, 1) - 1)
    longest = max(n, 1)
    if residuals == 0:
        return (longest,)
    rest = memory - slots * state
    return tuple(min(1 + (rest + j * state) // residuals, longest) for j in range(slots + 1))


def tree_cost(tree: Tree) -> int:
    """Return the evaluations of the body that the splits of a tree take."""
    costs = [0] * len(tree.steps)
    # The parts of a part come after it.
    for part in range(len(costs) - 1, -1, -1):
        costs[part] = int(tree.steps[part])
        if tree.first[part] >= 0:
            costs[part] += costs[tree.first[part]] + costs[tree.second[part]]
    return costs[ROOT]


# The tables of a tree have some hundred entries, with a single state one for each block.
@lru_cache(maxsize=64)
def tree_of(n: int, blocks: tuple[int, ...], limits: tuple[int, int]) -> Tree:
    split, low = splits_of(n, blocks, limits)
    rows = [
        (0, -1, -1, len(blocks) - 1),
        *numbered(parts_of({(len(blocks) - 1, n)}, blocks, split, low), ROOT),
    ]
    return Tree(*columns(rows))


# (level above the lowest one that is used, length) -> steps to the second part
Split = Callable[[int, int], int]
# A level and a length.
Part = tuple[int, int]


def splits_of(n: int, blocks: tuple[int, ...], limits: tuple[int, int]) -> tuple[Split, int]:
    """Return the steps by which parts of loops of at most `n` steps advance, and the lowest level used."""
    if n <= blocks[-1]:
        return _no_split, 0
    order = order_of(n, blocks)
    if order.is_optimal:
        return order.split, 0
    if n <= limits[0] and n * len(blocks) <= limits[1]:
        return solved(n, blocks)[0], 0
    # With residuals smaller than a state, the smallest blocks are not worth a state.
    orders = [order_of(n, blocks[low:]) for low in range(min(4, len(blocks) - 1))]
    lows = range(len(orders))
    low = min(lows, key=lambda low: tree_cost(_of_order(n, blocks, orders[low], low)))
    return orders[low].split, low


def _of_order(n: int, blocks: tuple[int, ...], order: Order | OneState, low: int) -> Tree:
    parts = parts_of({(len(blocks) - 1, n)}, blocks, order.split, low)
    return Tree(*columns([(0, -1, -1, 0), *numbered(parts, ROOT)]))


def least_steps(
    lengths: np.ndarray, blocks: tuple[int, ...], limits: tuple[int, int]
) -> np.ndarray:
    """Return the evaluations for loops of these lengths; infinity where no schedule exists.

    Beyond the limits, they are exact at whole replacements and interpolated between.
    """
    if len(blocks) == 1:
        return np.where(lengths <= blocks[0], lengths, np.inf)
    n = int(lengths.max())
    if n <= limits[0] and n * len(blocks) <= limits[1]:
        return solved(n, blocks)[1][lengths].astype(float)
    orders = [order_of(max(n, 2), blocks[low:]) for low in range(min(4, len(blocks) - 1))]
    return np.min([order.costs(lengths) for order in orders], axis=0)


def parts_of(
    wanted: Iterable[Part], blocks: tuple[int, ...], split: Split, low: int = 0
) -> dict[Part, tuple[int, Part | None, Part | None]]:
    """Return the distinct parts of some parts: steps and, where there are any, the two parts.

    A part comes before its parts.

    Args:
      wanted: the parts to split.
      blocks: see `Mixed`.
      split: how far a part advances.
      low: the lowest level that is used.
    """
    # Longer parts come first, so that a part comes before its parts.
    waiting: dict[int, set[int]] = {}
    lengths: list[int] = []

    def add(level: int, length: int) -> None:
        if length not in waiting:
            waiting[length] = set()
            heapq.heappush(lengths, -length)
        waiting[length].add(level)

    for part in wanted:
        add(*part)
    found: dict[Part, tuple[int, Part | None, Part | None]] = {}
    while lengths:
        length = -heapq.heappop(lengths)
        for level in sorted(waiting.pop(length)):
            if length <= blocks[level]:
                found[level, length] = (length, None, None)
                continue
            k = split(level - low, length)
            first, second = (level, k), (level - 1, length - k)
            found[level, length] = (k, first, second)
            add(*first)
            add(*second)
    return found


def numbered(
    parts: dict[Part, tuple[int, Part | None, Part | None]], start: int
) -> list[tuple[int, int, int, int]]:
    """Return the rows of a tree that parts have, where the first of them is row `start`."""
    number = {key: start + i for i, key in enumerate(parts)}
    return [
        (
            steps,
            *((-1, -1) if first is None or second is None else (number[first], number[second])),
            level,
        )
        for (level, _), (steps, first, second) in parts.items()
    ]


def columns(rows: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Return the columns of a table."""
    return [np.ascontiguousarray(column) for column in np.array(rows, np.int64).T]


def _no_split(level: int, length: int) -> int:
    raise AssertionError("a loop of one block is not split")


# The recurrence


def solved(n: int, blocks: tuple[int, ...]) -> tuple[Split, np.ndarray]:
    """Return the splits and the costs that the recurrence gives, for loops of at most `n` steps."""
    rising = np.arange(n + 1)
    # Twice _MANY is still a number.
    below = np.where(rising <= blocks[0], rising, _MANY)
    splits = []
    for block in blocks[1:]:
        costs = np.where(rising <= block, rising, _MANY)
        row = np.zeros(n + 1, np.int64)
        left = rising + costs
        for length in range(block + 1, n + 1):
            total = left[1:length] + below[length - 1 : 0 : -1]
            k = int(np.argmin(total))
            row[length], costs[length] = k + 1, total[k]
            left[length] = length + costs[length]
        splits.append(row)
        below = costs
    return lambda level, length: int(splits[level - 1][length]), below


# The order of replacements


def order_of(n: int, blocks: tuple[int, ...]) -> Order | OneState:
    """Return the order in which leaves are replaced in loops of at most `n` steps."""
    return OneState(blocks) if len(blocks) == 2 else Order(n, blocks)


class OneState:
    """The splits of a loop with a single state, where `Order` would take time and memory that grow as `n`.

    Beside the state, only a block fits. The steps that run are the sum of the distances from the state to the
    blocks, which is least if each block but the first is as long as fits.
    """

    is_optimal = True

    def __init__(self, blocks: tuple[int, ...]) -> None:
        self.short, self.long = blocks

    def split(self, level: int, length: int) -> int:
        """Return how far a part advances before the next block."""
        return length - self.short

    def costs(self, lengths: np.ndarray) -> np.ndarray:
        """Return the evaluations for loops of these lengths."""
        behind = np.maximum(-((self.long - lengths) // self.short), 0).astype(float)
        return lengths + behind * lengths - self.short * behind * (behind + 1) / 2


class Order:
    """The order in which leaves of the tree are replaced, for loops of at most `n` steps.

    A group is one level, or several that are taken together: its highest level, its lowest one, the steps
    that it adds, and the steps that it delays.
    """

    def __init__(self, n: int, blocks: tuple[int, ...]) -> None:
        self.blocks = np.array(blocks, np.int64)
        top = len(blocks) - 1
        added, delays = self.blocks[:-1], np.diff(self.blocks)
        # The groups of a chain of right children that starts at a level, the highest first.
        chain: list[tuple[int, int]] = []
        # For each group: steps added, steps delayed, the first and the last level whose chain has it.
        groups: list[list[int]] = []
        alive: list[int] = []
        for level in range(1, top + 1):
            own = (int(added[level - 1]), int(delays[level - 1]))
            while chain and chain[-1][1] * own[0] < own[1] * chain[-1][0]:
                own = (own[0] + chain[-1][0], own[1] + chain[-1][1])
                chain.pop()
                groups[alive.pop()][3] = level - 1
            chain.append(own)
            alive.append(len(groups))
            groups.append([*own, level, top])
        groups.sort(key=lambda group: (group[1] / group[0], -group[0]))
        table = np.array(groups, np.int64).reshape(-1, 4)
        self.sizes, self.charges, self.low, self.high = table.T
        #: Whether the order has the recurrence's cost: found by comparison, not proven; see the module.
        self.is_optimal = bool(np.all(self.charges <= 1))
        # paths[ℓ][d]: how often a tree has, d levels below its root, a node of repetition ℓ.
        self.paths = [np.ones(top + 1, np.int64)]
        capacity = np.concatenate([[0], np.cumsum(added)])
        # total[j, ℓ]: the steps that all replacements of repetitions below ℓ add to a root of level j.
        total = [np.zeros(top + 1, np.int64), capacity]
        while blocks[-1] + total[-1][top] < n:
            self.paths.append(np.minimum(np.cumsum(self.paths[-1]), _MANY))
            capacity = np.minimum(np.cumsum(capacity), _MANY)
            total.append(np.minimum(total[-1] + capacity, _MANY))
        self.total = np.ascontiguousarray(np.array(total).T)

    def split(self, level: int, length: int) -> int:
        """Return how far a part advances before the next state is kept."""
        block, smaller = int(self.blocks[level]), int(self.blocks[level - 1])
        # The left part in a tree where nothing is replaced but the root is `block - smaller`.
        left, rest = block - smaller, length - block
        repetition = int(np.searchsorted(self.total[level], rest)) - 1
        if repetition == 0:
            return left + min(rest, smaller)
        left += smaller + int(self.total[level, repetition - 1])
        rest -= int(self.total[level, repetition])
        in_left = self._chains(level, repetition - 1)
        in_right = self._chains(level - 1, repetition)
        ends = np.cumsum((in_left + in_right) * self.sizes)
        last = int(np.searchsorted(ends, rest))
        before = int(ends[last - 1]) if last else 0
        left += int(in_left[:last] @ self.sizes[:last])
        return left + max(0, rest - before - int(in_right[last] * self.sizes[last]))

    def costs(self, lengths: np.ndarray) -> np.ndarray:
        """Return the evaluations for loops of these lengths, interpolated within a replacement."""
        top = len(self.blocks) - 1
        block = int(self.blocks[-1])
        steps, costs = [np.array([0, block])], [np.array([0, block])]
        for repetition in range(len(self.paths)):
            counts = self._chains(top, repetition)
            steps.append(counts * self.sizes)
            costs.append(counts * (self.sizes * (2 + repetition) + self.charges))
        at, cost = (np.cumsum(np.concatenate(part), dtype=float) for part in (steps, costs))
        return np.interp(lengths, at, cost)

    def _chains(self, level: int, repetition: int) -> np.ndarray:
        """Return for each group how many chains of a repetition have it, below a root of `level`."""
        if repetition == 0:
            return ((self.low <= level) & (level <= self.high)).astype(np.int64)
        paths = self.paths[repetition]
        above = level - np.minimum(self.high, level) - 1
        counts = np.where(self.low <= level, paths[np.maximum(level - self.low, 0)], 0)
        return counts - np.where(above >= 0, paths[np.maximum(above, 0)], 0)
