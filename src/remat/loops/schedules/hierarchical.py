"""The schedule over several levels of storage, with the least time for steps and transfers together.

The fastest level holds states and residuals by the mixed schedule, and its transfers are free: they are part
of a step's time. Each slower level holds a number of states, at a time for each write and each read, in
units of the time of a step. With T(l) the steps of a mixed schedule in the fastest level, c, w and r the
slots and times of level k, and the state before the part at hand,

    O_0(l) = T(l)
    P_k(l, m) = min( O_{k-1}(l), min over j of j + O_k(l−j, m−1) + r + P_k(j, m) )
    O_k(l, m) = min( O_{k-1}(l), w + P_k(l, m) )          O_k(l) = O_k(l, c),  O_k(l, 0) = O_{k-1}(l)

is the least time to reverse l steps with m slots of level k and all of the faster levels; for P_k, the state
lies in one of the m slots already. This is the dynamic program of H-Revolve (Herrmann & Pallez), with T in
place of Revolve's counts for the fastest level.

It is the optimum for two levels. With more of them it is the optimum among schedules in which states behind a
state lie in its level or in faster ones: moving the farther state to the slower level pays unless that takes
one more write, so the others can be better by writes of the middle levels.

The program takes time that grows as slots·n². For longer loops it is solved in groups of steps, between which
the states of slower levels then lie, and compared with schedules whose slowest level holds states at equal
distances, each of which is read once: with many slots, groups are too coarse, and these are nearly optimal.

Reference: Herrmann & Pallez, "H-Revolve: a framework for adjoint computation on synchronous hierarchical
platforms", ACM TOMS 46 (2020). For a single slower level without costs: Stumm & Walther, "Multistage
approaches for optimal offline checkpointing", SIAM J. Sci. Comput. 31 (2009).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from remat.errors import ScheduleError
from remat.loops.schedules.actions import Action, block_actions
from remat.loops.schedules.mixed import (
    EXACT_CELLS,
    EXACT_STEPS,
    ROOT,
    Tree,
    TreeSchedule,
    check_blocks,
    columns,
    least_steps,
    numbered,
    parts_of,
    splits_of,
    tree_cost,
)
from remat.loops.schedules.shared import check_counts, checkpoints_text, cost_text

# Limits of the dynamic program: the number of sums to compare, which take 0.3 s, and of groups of steps.
# Larger limits find better schedules for long loops, and take more time to trace a loop.
MOST_SUMS = 60_000_000
MOST_GROUPS = 1500
MOST_PARTS = 10_000  # the most parts of equal length; more make the tables of the program larger


@dataclass(frozen=True)
class Level:
    """A level of storage slower than the fastest one.

    Attributes:
      slots: the states that it holds.
      write, read: the time to write and to read a state, in units of the time of a step.
    """

    slots: int
    write: float = 0.0
    read: float = 0.0


class Moves(NamedTuple):
    """Where the states of a tree's parts lie. Level 0 is the fastest.

    Attributes:
      source: for each part, the level from which its first state is read if it is a first part.
      target: for each part that has parts, the level that holds its first state meanwhile. It is
        written there unless it was read from there.
    """

    source: np.ndarray
    target: np.ndarray


@dataclass(frozen=True)
class Hierarchical(TreeSchedule):
    """The schedule with the least time for steps and transfers, over several levels of storage.

    >>> schedule = Hierarchical.of_states(n=100, slots=3, levels=[Level(5, write=2, read=2)])
    >>> schedule.forward_steps, schedule.writes, schedule.reads, schedule.cost
    (355, (7,), (12,), 393)
    >>> print(schedule.picture(rows=1).splitlines()[0])
    o>>>>>>o>>>>>>o>>>>>>>>o>>>>>>>>o>>>>>>o>>>>o>>o><  8 checkpoints

    Attributes:
      n: steps of the loop.
      blocks: of the fastest level; see `Mixed`.
      levels: the other levels, from the fastest to the slowest.

    Raises:
      ScheduleError: for fewer than 0 steps, slots or costs, or levels that cannot reverse the loop.
    """

    n: int
    blocks: tuple[int, ...]
    levels: tuple[Level, ...]
    # Limits of the dynamic programs: see the module, and `Mixed`.
    _limits: tuple[int, int, int] = field(default=(MOST_SUMS, EXACT_STEPS, EXACT_CELLS), repr=False)

    def __post_init__(self) -> None:
        check_counts(self.n, max(1, len(self.blocks)))
        for level in self.levels:
            if min(level.slots, level.write, level.read) < 0:
                raise ScheduleError(f"slots and costs of a level cannot be negative: {level}.")
        check_blocks(self.blocks)
        if (
            self.n > self.blocks[-1]
            and len(self.blocks) == 1
            and not any(level.slots for level in self.levels)
        ):
            raise ScheduleError(
                f"no schedule of {self.n} steps fits levels that hold no state and residuals of "
                f"{self.blocks[0] - 1} steps. Keep a state or residuals of {self.n - 1} steps."
            )

    @classmethod
    def of_states(cls, n: int, slots: int, levels: list[Level] | tuple[Level, ...]) -> Hierarchical:
        """Return the schedule for a fastest level that holds `slots` states and no residuals."""
        return cls(n, (1,) * (slots + 1), tuple(levels))

    @cached_property
    def _grown(self) -> tuple[Tree, Moves]:
        return grow(self.n, self.blocks, self.levels, self._limits)

    @property
    def tree(self) -> Tree:
        """Return the parts into which the loop is split."""
        return self._grown[0]

    @property
    def moves(self) -> Moves:
        """Return where the states of the parts lie."""
        return self._grown[1]

    @property
    def writes(self) -> tuple[int, ...]:
        """Return how often each slower level is written to."""
        return self._traffic[0]

    @property
    def reads(self) -> tuple[int, ...]:
        """Return how often each slower level is read from."""
        return self._traffic[1]

    @cached_property
    def _traffic(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return _traffic(self.tree, self.moves, len(self.levels))

    @property
    def cost(self) -> float:
        """Return the time of steps and transfers, in units of the time of a step."""
        return _cost(self.tree, self.moves, self.levels)

    @cached_property
    def peak_slots_of_levels(self) -> tuple[int, ...]:
        """Return the largest number of states kept at a time in each slower level."""
        return tuple(self._peaks[1:])

    @property
    def peak_entries(self) -> int:
        """Return the largest number of states kept at a time, in all levels together."""
        return self._peaks[0]

    @cached_property
    def _peaks(self) -> list[int]:
        """Return the most states held below a part, at any level and at each slower one."""
        tree, (_, target) = self.tree, self.moves
        held = np.zeros((len(tree.steps), len(self.levels) + 1), np.int64)
        for part in range(ROOT, len(tree.steps)):
            if tree.first[part] < 0:
                continue
            inside = held[part].copy()
            inside[0] += 1
            if target[part]:
                inside[target[part]] += 1
            for after, below in ((tree.first[part], held[part]), (tree.second[part], inside)):
                held[after] = np.maximum(held[after], below)
        return [int(most) for most in held.max(0)]

    def actions(self) -> Iterator[Action]:
        """Return all actions, in order. Slots are counted separately in each level, and for residuals."""
        tree, target = self.tree, self.moves.target
        stack: list[tuple[int, int, int]] = []
        tops = [0] * (len(self.levels) + 1)
        start, part, at = 0, ROOT, -1  # `at`: the level whose top slot has the state at hand
        while True:
            while tree.first[part] >= 0:
                level = int(target[part])
                if at not in (-1, level):
                    yield Action("free", start, start, tops[at], at)
                if at != level:
                    yield Action("store", start, start, tops[level], level)
                tops[level] += 1
                stack.append((start, int(tree.first[part]), level))
                stop = start + int(tree.steps[part])
                yield Action("advance", start, stop)
                start, part, at = stop, int(tree.second[part]), -1
            if at >= 0:
                yield Action("free", start, start, tops[at], at)
            stop = start + int(tree.steps[part])
            yield from block_actions(start, stop)
            if not stack:
                return
            start, part, at = stack.pop()
            tops[at] -= 1
            yield Action("restore", start, start, tops[at], at)

    def __str__(self) -> str:
        slower = ", ".join(
            f"{checkpoints_text(level.slots)} in level {k}"
            for k, level in enumerate(self.levels, 1)
        )
        return (
            f"hierarchical: {self.n} steps, {checkpoints_text(self.slots)}, {slower}: "
            f"{cost_text(self.forward_steps, self.n)}, {sum(self.writes)} writes and "
            f"{sum(self.reads)} reads"
        )


def _traffic(tree: Tree, moves: Moves, n_levels: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how often each slower level is written to, and read from."""
    source, target = moves
    times = [0] * len(tree.steps)
    times[ROOT] = 1
    writes, reads = [0] * (n_levels + 1), [0] * (n_levels + 1)
    for part in range(ROOT, len(times)):
        reads[source[part]] += times[part]
        if tree.first[part] >= 0:
            times[tree.first[part]] += times[part]
            times[tree.second[part]] += times[part]
            if source[part] != target[part]:
                writes[target[part]] += times[part]
    return tuple(writes[1:]), tuple(reads[1:])


def _cost(tree: Tree, moves: Moves, levels: tuple[Level, ...]) -> float:
    traffic = zip(levels, *_traffic(tree, moves, len(levels)))
    return tree_cost(tree) + sum(
        level.write * written + level.read * read for level, written, read in traffic
    )


# The dynamic program


class _Table(NamedTuple):
    """The costs of a level: of l groups with m of its slots, and the groups to the second part.

    `split[m, l]` is 0 where the part is left to the faster levels.
    """

    fresh: np.ndarray
    held: np.ndarray
    split: np.ndarray


def _table(below: np.ndarray, slots: int, group: int, level: Level) -> _Table:
    """Return the costs of a level, given those of the faster ones for 0, 1, ... groups of steps."""
    n = len(below) - 1
    fresh = np.tile(below, (slots + 1, 1))
    held = fresh.copy()
    split = np.zeros((slots + 1, n + 1), np.int64)
    ahead = group * np.arange(n + 1) + level.read
    # The costs of a second part that begins l groups before the end, and of a first part of its length.
    first = held + ahead
    for length in range(2, n + 1):
        sums = fresh[:-1, length - 1 : 0 : -1] + first[1:, 1:length]
        best = np.argmin(sums, axis=1)
        found = np.take_along_axis(sums, best[:, None], 1)[:, 0]
        pays = found < below[length]
        held[1:, length] = np.where(pays, found, below[length])
        first[1:, length] = held[1:, length] + ahead[length]
        split[1:, length] = np.where(pays, best + 1, 0)
        fresh[1:, length] = np.minimum(below[length], level.write + held[1:, length])
    return _Table(fresh, held, split)


# (level of the decision, its free slots, groups, whether the last step is the loop's, the level in which
# the first state lies or -1)
_Key = tuple[int, int, int, bool, int]


@lru_cache(maxsize=64)
def grow(
    n: int, blocks: tuple[int, ...], levels: tuple[Level, ...], limits: tuple[int, int, int]
) -> tuple[Tree, Moves]:
    group = _group(n, levels, limits[0])
    if group == 1 or not levels:
        return _grouped(n, blocks, levels, limits, group)
    found = []
    with contextlib.suppress(ScheduleError):
        found.append(_grouped(n, blocks, levels, limits, group))
    shortest = -(-n // min(levels[-1].slots + 1, n, MOST_PARTS))
    lengths = {shortest, shortest + 1, 2 * shortest, 4 * shortest}
    if len(levels) == 1:
        tried = np.arange(shortest, min(n, 100 * shortest) + 1)
        steps = least_steps(tried, blocks, limits[1:])
        best = int(tried[np.argmin((steps + levels[0].write + levels[0].read) / tried)])
        lengths = {shortest, best, best + 1}
    if 8 * levels[-1].slots * group < n:
        # The slots are few: groups are fine enough.
        lengths.clear()
    for length in sorted(lengths):
        if length < n:
            with contextlib.suppress(ScheduleError):
                found.append(_even(n, length, blocks, levels, limits))
    if not found:
        return _grouped(n, blocks, levels, limits, group)
    return min(found, key=lambda grown: _cost(grown[0], grown[1], levels))


def _even(
    n: int,
    length: int,
    blocks: tuple[int, ...],
    levels: tuple[Level, ...],
    limits: tuple[int, int, int],
) -> tuple[Tree, Moves]:
    """Return the tree whose slowest level holds states at equal distances, each of which is read once."""
    parts = -(-n // length)
    rest = n - (parts - 1) * length
    inner = [grow(steps, blocks, levels[:-1], limits) for steps in (length, rest)]
    sizes = [len(tree.steps) - ROOT for tree, _ in inner]
    first = ROOT + parts - 1  # of the table's row for the part that is repeated
    last = first + sizes[0]
    slowest, top = len(levels), len(blocks) - 1
    rows: list[tuple[int, ...]] = [(0, -1, -1, top, 0, 0)]
    rows += [
        (length, first, part + 1 if part + 1 < first else last, top, 0, slowest)
        for part in range(ROOT, first)
    ]
    for (tree, moves), offset in zip(inner, (first - ROOT, last - ROOT)):
        for steps, one, two, *others in np.stack([*tree, *moves], 1)[ROOT:].tolist():
            rows.append((steps, *((one + offset, two + offset) if one >= 0 else (-1, -1)), *others))
    source = list(rows[first])
    source[4] = slowest
    rows[first] = tuple(source)
    table = columns(rows)
    return Tree(*table[:4]), Moves(*table[4:])


def _grouped(
    n: int,
    blocks: tuple[int, ...],
    levels: tuple[Level, ...],
    limits: tuple[int, int, int],
    group: int,
) -> tuple[Tree, Moves]:
    """Return the tree of the dynamic program, with states of slower levels between groups of steps."""
    groups = max(1, -(-n // group))
    missing = groups * group - n  # steps that the last group is shorter by
    inner = limits[1:]
    below = least_steps(group * np.arange(groups + 1), blocks, inner)
    tables: list[_Table] = []
    for level in levels:
        tables.append(_table(below, min(level.slots, groups - 1), group, level))
        below = tables[-1].fresh[-1]
    if not np.isfinite(below[-1]):
        raise ScheduleError(
            f"no schedule of {n} steps fits levels with {[level.slots for level in levels]} slots, in "
            f"which states lie {group} steps apart, and residuals of {blocks[0] - 1} steps. Keep a state "
            "in the fastest level."
        )

    def steps_of(key: _Key) -> int:
        return key[2] * group - (missing if key[3] else 0)

    def top_of(k: int) -> int:
        return len(tables[k - 1].fresh) - 1 if k else 0

    def resolved(key: _Key) -> _Key:
        """Return the level at which a part is split; 0 for the fastest."""
        k, m, length, is_last, at = key
        while k:
            table = tables[k - 1]
            stays = table.split[m, length] > 0
            if stays and at != k:
                stays = bool(levels[k - 1].write + table.held[m, length] < table.fresh[0, length])
            if stays:
                break
            k, m = k - 1, top_of(k - 1)
        return k, m, length, is_last, at

    root = resolved((len(levels), top_of(len(levels)), groups, True, -1))
    found: dict[_Key, tuple[int, _Key, _Key] | None] = {}
    waiting = [root]
    while waiting:
        key = waiting.pop()
        if key in found:
            continue
        k, m, length, is_last, _ = key
        found[key] = None
        if k:
            j = int(tables[k - 1].split[m, length])
            first = resolved((k, m, j, False, k))
            second = resolved((k, m - 1, length - j, is_last, -1))
            found[key] = (j * group, first, second)
            waiting += [first, second]
    # A part comes before its parts.
    order = sorted(found, key=lambda key: (-steps_of(key), key != root))
    slow = [key for key in order if key[0]]
    fast = [key for key in order if not key[0]]
    number = {key: ROOT + i for i, key in enumerate([*slow, *fast])}
    rows: list[tuple[int, ...]] = [(0, -1, -1, len(blocks) - 1, 0, 0)]
    for key in slow:
        steps, first, second = found[key] or (0, key, key)
        rows.append((steps, number[first], number[second], len(blocks) - 1, max(key[4], 0), key[0]))
    # The parts of the fastest level: those that appear above, and the parts of these.
    wanted = {(len(blocks) - 1, steps_of(key)) for key in fast}
    split, low = splits_of(max(steps for _, steps in wanted), blocks, inner)
    parts = parts_of(wanted, blocks, split, low)
    row_of = dict(zip(parts, numbered(parts, ROOT + len(found))))
    rows += [(*row_of[len(blocks) - 1, steps_of(key)], max(key[4], 0), 0) for key in fast]
    rows += [(*row, 0, 0) for row in row_of.values()]
    table = columns(rows)
    return Tree(*table[:4]), Moves(*table[4:])


def _group(n: int, levels: tuple[Level, ...], most_sums: int) -> int:
    """Return the steps of a group, so that the dynamic program makes at most `most_sums` sums."""
    if not levels:
        return max(n, 1)
    group = max(1, -(-n // MOST_GROUPS))
    while True:
        groups = -(-n // group)
        sums = sum(min(level.slots, groups) for level in levels) * groups**2 / 2
        if sums <= most_sums or groups <= 2:
            return group
        group += max(1, group // 4)
