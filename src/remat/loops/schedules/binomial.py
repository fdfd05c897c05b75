"""The schedule with the fewest recomputed steps for a known number of steps.

Reference: Griewank & Walther, "Algorithm 799: revolve", ACM TOMS 26 (2000).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from remat.loops.schedules.actions import Action, ListedSchedule
from remat.loops.schedules.shared import check_counts, checkpoints_text, cost_text

INT32_MAX = 2**31 - 1  # the largest step number of a loop whose schedule is computed at run time


def beta(slots: int, repetitions: int) -> int:
    """Return the length of the longest loop that `slots` slots reverse in `repetitions` runs of each step.

    Griewank & Walther's β(s, r) = C(s + r, s), not counting the run inside the reversal.
    """
    return math.comb(slots + repetitions, slots) if repetitions >= 0 else 0


# Cached, since schedules ask for the same values many times.
@lru_cache(maxsize=4096)
def repetitions(n: int, slots: int) -> int:
    """Return the smallest r with β(slots, r) ≥ n."""
    if slots == 1:
        return max(n - 1, 0)
    low, high = -1, 1
    while beta(slots, high) < n:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if beta(slots, middle) >= n else (middle, high)
    return high


def binomial_advances(n: int, slots: int) -> int:
    """Return the fewest steps to run besides those inside the reversals: r·n − β(s+1, r−1).

    Equivalently the maximum of that expression over all r, which is how the compiled online loop
    evaluates it: as a function of n it is convex and piecewise linear with slopes r.
    """
    r = repetitions(n, slots)
    return r * n - beta(slots + 1, r - 1)


def binomial_split(n: int, slots: int) -> int:
    """Return the number of steps from state 0 to the next stored state, for `n` ≥ 2 steps.

    The part before the new state is reversed with all `slots` slots and r−1 repetitions, the part
    after it with one slot less and r. Every m with β(s, r−2) ≤ m ≤ β(s, r−1) and
    β(s−1, r−1) ≤ n−m ≤ β(s−1, r) is optimal (Griewank & Walther, Prop. 1); this is the largest.
    """
    if slots == 1:
        return n - 1
    r = repetitions(n, slots)
    return min(beta(slots, r - 1), n - beta(slots - 1, r - 1))


def binomial_rows(slots: int, longest: int) -> tuple[tuple[int, ...], ...]:
    """Return β(c, r) for c = 0..slots+1 (rows) and r = 0..R (columns), as 32-bit numbers.

    R is large enough for loops of `longest` steps, with one column to spare (an online schedule
    can be one repetition off), but never above 4096: with 2 slots that is 8 million steps, and
    beyond it a compiled loop is still right, only no longer optimal.
    """
    columns = min(repetitions(longest, max(slots, 2)) + 1, 4096) + 1
    row = [1] * columns
    rows = [tuple(row)]
    for _ in range(slots + 1):
        for r in range(1, columns):
            row[r] = min(row[r] + row[r - 1], INT32_MAX)
        rows.append(tuple(row))
    return tuple(rows)


def reverse_actions(slots: int, n: int, held: Iterable[int]) -> Iterator[Action]:
    """Reverse a loop of `n` steps optimally, given the states `held` and state n−1 at hand."""
    stack = list(held)
    hand = n - 1
    for step in reversed(range(n)):
        start = stack[-1]
        if hand != step:
            yield Action("restore", start, start, len(stack) - 1)
            hand = start
        while hand < step:
            stop = hand + binomial_split(step + 1 - hand, slots + 1 - len(stack))
            yield Action("advance", hand, stop)
            hand = stop
            if hand < step:
                yield Action("store", hand, hand, len(stack))
                stack.append(hand)
        yield Action("reverse", step, step)
        hand = -1
        if stack[-1] == step:
            yield Action("free", step, step, len(stack) - 1)
            stack.pop()


@dataclass(frozen=True)
class Binomial(ListedSchedule):
    """The schedule with the fewest recomputed steps for a known number of steps.

    >>> schedule = Binomial(n=10, slots=3)
    >>> schedule.forward_steps, schedule.grad_forward_steps, schedule.repetitions
    (25, 26, 2)
    >>> schedule.positions
    (0, 4, 7)
    >>> print(schedule)
    binomial: 10 steps, 3 checkpoints: 25 forward steps (2.50 per step), repeated at most 2 times

    Attributes:
      n: steps of the loop.
      slots: states that are kept at a time, state 0 included.

    Raises:
      ScheduleError: for fewer than 0 steps or fewer than 1 slot.

    Reference: Griewank & Walther, Algorithm 799: revolve, ACM TOMS 26 (2000).
    """

    n: int
    slots: int

    def __post_init__(self) -> None:
        check_counts(self.n, self.slots)

    @property
    def repetitions(self) -> int:
        """Return the largest number of runs of any one step outside its reversal."""
        return repetitions(self.n, self.slots) if self.n > 1 else 0

    @property
    def forward_steps(self) -> int:
        """Return the evaluations of the body, with one inside each reversed step."""
        return binomial_advances(self.n, self.slots) + self.n

    @property
    def peak_slots(self) -> int:
        """Return the slots that are used: a short loop does not need all of them."""
        return len(self.positions)

    @property
    def positions(self) -> tuple[int, ...]:
        """Return the steps whose states the first sweep stores."""
        if self.n == 0:
            return ()
        held = [0]
        while len(held) < self.slots and self.n - held[-1] > 1:
            start = held[-1]
            stop = start + binomial_split(self.n - start, self.slots + 1 - len(held))
            if stop == self.n - 1:
                # This state is at hand when the sweep ends; storing it would gain nothing.
                break
            held.append(stop)
        return tuple(held)

    def actions(self) -> Iterator[Action]:
        """Return all actions, in order."""
        if self.n == 0:
            return
        yield from _first_sweep(self.positions, self.n)
        yield from reverse_actions(self.slots, self.n, self.positions)

    def __str__(self) -> str:
        return (
            f"binomial: {self.n} steps, {checkpoints_text(self.slots)}: "
            f"{cost_text(self.forward_steps, self.n)}, repeated at most {self.repetitions} times"
        )


def _first_sweep(held: tuple[int, ...], n: int) -> Iterator[Action]:
    for slot, (start, stop) in enumerate(zip(held, (*held[1:], n - 1))):
        yield Action("store", start, start, slot)
        if stop > start:
            yield Action("advance", start, stop)
