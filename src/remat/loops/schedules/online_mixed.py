"""The schedule that keeps states and residuals of steps while a loop runs whose length is unknown.

Notation as in `schedules.mixed`: b(j) are the steps whose residuals fit where j states could be kept instead,
T(j, n) the least evaluations for n steps. Let N(j, 1) = b(j), N(0, ρ) = b(0), and
N(j, ρ) = N(j, ρ−1) + N(j−1, ρ): the steps that are reversed with at most ρ evaluations of each.

The schedule. A *run* at level j starts at a state, which it keeps, in phase 1: the residuals of its steps are
kept, until there are b(j). If another step follows, that block ends. Its run, and all those around it which
are as long as the phase of the run around them allows, are full; the innermost run that is not goes to its
next phase ρ. What it has run, N(j, ρ−1) steps, becomes its first part; the states within that part are
dropped, and a run at level j−1 starts. It writes over the oldest residuals of the last block first. When the
loop ends, the residuals that are still there are used, and each part is reversed as by `Mixed`, which runs
it once more.

The ratio. Let the outermost run be in phase ρ, with N = N(s, ρ−1) < n ≤ N(s, ρ), x = n − N, and let
blocks at most double from level to level, which holds if residuals are not smaller than a
state and share its memory.

- ρ = 1: no step is run twice.
- ρ = 2: at most ⌈c/r⌉ evaluations more than the optimum for c bytes of a state and r of residuals. If k runs
  enclose the last one, b(s) + … + b(s−k+1) < n. The optimum is 2n − b(s−k) or more: it runs all steps twice
  but those of its last block. Here at least b(s−k+1) − ⌈c/r⌉ steps are run once.
- ρ ≥ 3: at most N more than the optimum. With C(j, ρ) evaluations for N(j, ρ) steps, that is C(j, 1) = b(j),
  C(0, ρ) = b(0), C(j, ρ) = N(j, ρ−1) + C(j, ρ−1) + C(j−1, ρ), the schedule takes N to run the first part,
  C(s, ρ−1) to reverse it, and by induction at most ρ·x for the rest. The optimum is C(s, ρ−1) + ρ·x or more:
  T(j, n) ≥ σ·n − G(j, σ) for every σ, where G(j, 1) = 0, G(0, σ) = (σ−1)·b(0) and G(j, σ) =
  max((σ−1)·b(j), G(j, σ−1) + G(j−1, σ)), as the recurrence of T shows by induction: the first k steps have
  k + T(j, k) ≥ σ·k − G(j, σ−1). For σ ≥ 3 the second argument is the larger one, since G(j, σ−1) ≥
  (σ−2)·b(j) and G(j−1, σ) ≥ 2·b(j−1) ≥ b(j); so G(j, ρ) = ρ·N(j, ρ−1) − C(j, ρ−1).
  As C(s, ρ−1) ≥ 2N − b(0) and N ≥ (s+1)·b(0), the ratio to the optimum is at most
  1 + N / C(s, ρ−1) ≤ (3s+2) / (2s+1): 5/3 for s = 1, and near 3/2 for large s.

At n = N(s, ρ) it is the optimum itself. The memory is that of s states, of one more, and of the residuals in
use. The phases are those of Wang, Moin & Iaccarino, Minimal repetition dynamic checkpointing, SIAM J. Sci.
Comput. 31 (2009), who keep states alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from remat.errors import ScheduleError
from remat.loops.schedules.actions import Action, ListedSchedule, block_actions
from remat.loops.schedules.mixed import Part, check_blocks, parts_of
from remat.loops.schedules.shared import check_counts, checkpoints_text, cost_text

_MOST_PHASES = 4096  # columns of a table; with 2 levels, more are reached after 8 million steps


class Ended(NamedTuple):
    """The states and residuals that are kept when the loop ends.

    Attributes:
      starts: the first steps of the runs; their states are kept.
      left_over: the steps (first, past the last) before the last run whose residuals are still there.
    """

    starts: tuple[int, ...]
    left_over: tuple[int, int]


@dataclass(frozen=True)
class OnlineMixed(ListedSchedule):
    """The schedule for states and residuals of a loop whose number of steps is known only when it ends.

    >>> schedule = OnlineMixed(n=60, blocks=(1, 2, 3, 4, 5, 6))
    >>> schedule.forward_steps, schedule.ended.starts
    (217, (0, 56))
    >>> print(schedule)
    online: 60 steps, 6 checkpoints, or up to 6 steps' residuals: 217 forward steps (3.62 per step)

    Attributes:
      n: steps that the loop turns out to have.
      blocks: as of `Mixed`; the schedule holds one state more.
      state_steps: the number of steps whose residuals take the memory of a state; the left-over residuals
        depend on it.

    Raises:
      ScheduleError: for fewer than 0 steps or blocks that no memory gives.
    """

    n: int
    blocks: tuple[int, ...]
    state_steps: float = 1.0

    def __post_init__(self) -> None:
        check_counts(self.n, len(self.blocks))
        check_blocks(self.blocks)
        if len(self.blocks) == 1 and self.blocks[0] < self.n:
            raise ScheduleError(
                f"no schedule of {self.n} steps fits a memory that holds no state and residuals of "
                f"{self.blocks[0]} steps. Keep a state."
            )

    @property
    def slots(self) -> int:
        """Return the largest number of states kept at a time, the first one included."""
        return len(self.blocks)

    @cached_property
    def ended(self) -> Ended:
        """Return what is kept when the loop ends."""
        return list(self.sweep())[-1]

    def sweep(self) -> Iterator[Ended]:
        """Yield what is kept at the end of each block."""
        levels = len(self.blocks) - 1
        starts, phases = [0], [1]
        left_over, old, at = (0, 0), (0, 0, 0), 0
        while True:
            capacity = self.blocks[levels + 1 - len(starts)]
            ends = at + capacity >= self.n
            ran = min(capacity, self.n - at)
            base, first, stop = old
            taken = ran + math.ceil((len(starts) - base) * self.state_steps)
            left_over = (min(stop, first + max(0, taken)), stop)
            yield Ended(tuple(starts), left_over)
            if ends:
                return
            old, at = (len(starts), at, at + capacity), at + capacity
            k = len(starts) - 1
            while k and (phases[k] == phases[k - 1] or k == levels):
                k -= 1
            del starts[k + 1 :], phases[k + 1 :]
            phases[k] += 1
            starts.append(at)
            phases.append(1)

    @cached_property
    def _parts(self) -> list[tuple[int, Part]]:
        """Return the first step, level and length of the parts that are reversed by `Mixed`."""
        starts, (first, stop) = self.ended
        ends = [*starts[1:-1], first if stop > first else starts[-1]]
        levels = len(self.blocks) - 1
        found = zip(starts[:-1], ends)
        return [
            (start, (levels - k, end - start))
            for k, (start, end) in enumerate(found)
            if end > start
        ]

    @cached_property
    def forward_steps(self) -> int:
        """Return the evaluations of the body. Steps whose residuals are kept are not evaluated again."""
        costs: dict[Part, int] = {}
        parts = parts_of({part for _, part in self._parts}, self.blocks, self._split)
        for part, (steps, first, second) in reversed(parts.items()):
            costs[part] = steps
            if first is not None and second is not None:
                costs[part] += costs[first] + costs[second]
        return self.n + sum(costs[part] for _, part in self._parts)

    @property
    def grad_forward_steps(self) -> int:
        """Return `forward_steps`, which include the loop itself."""
        return self.forward_steps

    def _split(self, level: int, length: int) -> int:
        return split_of(lengths_of_phases(self.blocks, max(self.n, 1)), level, length)

    def actions(self) -> Iterator[Action]:
        """Return all actions, in order. The slot of a step's residuals is the step here."""
        if self.n == 0:
            return
        starts: tuple[int, ...] = ()
        kept: list[int] = []
        for ended in self.sweep():
            common = sum(a == b for a, b in zip(starts, ended.starts))
            for k in reversed(range(common, len(starts))):
                yield Action("free", starts[k], starts[k], k)
            starts, at = ended.starts, ended.starts[-1]
            first, stop = ended.left_over
            for step in [step for step in kept if not first <= step < stop]:
                yield Action("forget", step, step, step)
            yield Action("store", at, at, len(starts) - 1)
            stop_of_block = min(self.n, at + self.blocks[len(self.blocks) - len(starts)])
            for step in range(at, stop_of_block):
                yield Action("keep", step, step + 1, step)
            kept = [*range(first, stop), *range(at, stop_of_block)]
        yield Action("free", starts[-1], starts[-1], len(starts) - 1)
        for step in reversed(kept):
            yield Action("reverse", step, step, step)
        waiting = [(start, length) for start, (_, length) in self._parts]
        for k in range(len(waiting), len(starts) - 1):
            yield Action("free", starts[k], starts[k], k)
        while waiting:
            start, length = waiting.pop()
            yield Action("restore", start, start, len(waiting))
            yield Action("free", start, start, len(waiting))
            yield from self._reversal(start, length, waiting)

    def _reversal(
        self, start: int, length: int, waiting: list[tuple[int, int]]
    ) -> Iterator[Action]:
        """Run a part up to its last block, and reverse that."""
        levels = len(self.blocks) - 1
        while length > self.blocks[levels - len(waiting)]:
            k = self._split(levels - len(waiting), length)
            yield Action("store", start, start, len(waiting))
            yield Action("advance", start, start + k)
            waiting.append((start, k))
            start, length = start + k, length - k
        yield from block_actions(start, start + length, first_slot=start)

    def __str__(self) -> str:
        return (
            f"online: {self.n} steps, {checkpoints_text(self.slots)}, or up to {self.blocks[-1]} steps' "
            f"residuals: {cost_text(self.forward_steps, self.n)}"
        )


# Rows of at most _MOST_PHASES numbers, which depend on the arguments alone.
@lru_cache(maxsize=64)
def lengths_of_phases(blocks: tuple[int, ...], longest: int) -> np.ndarray:
    """Return N(j, ρ) for each level j (rows) and ρ = 1, 2, ... (columns), for loops of `longest` steps."""
    columns = [np.array(blocks, np.int64)]
    top = len(blocks) - 1
    while top > 1 and columns[-1][top] < longest and len(columns) < _MOST_PHASES:
        columns.append(np.minimum(np.cumsum([columns[0][0], *columns[-1][1:]]), np.int64(longest)))
    table = np.ascontiguousarray(np.array(columns).T)
    table.setflags(write=False)
    return table


def split_of(table: np.ndarray, level: int, length: int) -> int:
    """Return how far a part advances before the next state is kept, for more steps than a block has.

    Both of its parts then are of lengths for which the number of evaluations of a step does not grow.
    """
    if level == 1:
        return length - int(table[0, 0])
    phase = max(1, int(np.searchsorted(table[level], length)))
    split = min(int(table[level, phase - 1]), length - int(table[level - 1, phase - 1]))
    return min(max(split, 1), length - 1)
