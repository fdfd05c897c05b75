"""A good order of computation in one pass: evict under pressure, recompute on demand.

The graph is computed in its order. When the next value does not fit beside what is live, the live
value with the highest

    bytes x (distance to its next use) / (time of getting it back)

is given up; when a value is needed that was given up, it is computed again, its own operands first.
That is the rule of dynamic tensor rematerialization (Kirisame et al., ICLR 2021) with a look into
the future, which an eager framework cannot have: the distance is to the *next* use rather than
from the last (Belady's rule for caches).

One pass over the graph, so it is fast at any size and indifferent to where the peaks are: it
serves where memory is short everywhere, while cuts (`search`) are better at few high peaks.

Known limits: getting a value back counts the operands that were gone when it was last looked at,
not what has become of theirs since; and a pass gives up (its order then exceeds the budget) where
the operands it holds for unfinished recomputations fill the memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from remat.solvers.simulate import Arrays, Ints


def evict(
    arrays: Arrays,
    operands: Sequence[tuple[int, ...]],
    budget: int,
    *,
    distance_power: float,
    max_steps: int,
) -> list[int] | None:
    """An order of computation that keeps to the budget wherever the rule can.

    Args:
      arrays: the graph.
      operands: the same, as tuples of places.
      budget: bytes.
      distance_power: how much the distance to the next use counts: 0 not at all, 1 fully.
      max_steps: give up (None) beyond that many computations.
    """
    state = _Memory(arrays, operands, budget, distance_power)
    for target in range(len(arrays)):
        state.target = target
        # (value, its operands still to look at): a recomputation may need others first.
        stack = [(target, iter(operands[target]))]
        while stack:
            value, rest = stack[-1]
            operand = next(rest, None)
            if operand is None:
                stack.pop()
                state.compute(value)
                if stack:
                    state.locks[value] += 1
                for u in operands[value]:
                    state.locks[u] -= 1
            elif state.is_live[operand]:
                state.locks[operand] += 1
            else:
                stack.append((operand, iter(operands[operand])))
            if len(state.order) > max_steps:
                return None
        state.advance(target)
    return state.order


class _Memory:
    """What is live during the pass, and what each value would cost to get back."""

    def __init__(
        self,
        arrays: Arrays,
        operands: Sequence[tuple[int, ...]],
        budget: int,
        distance_power: float,
    ) -> None:
        n = len(arrays)
        self.arrays = arrays
        self.operands = operands
        self.budget = budget
        self.distance_power = distance_power
        self.users: list[list[int]] = [[] for _ in range(n)]
        for v, us in enumerate(operands):
            for u in us:
                self.users[u].append(v)
        self.n_used = np.zeros(n, np.int64)
        #: First user that is not computed yet; 4 n when there is none.
        self.next_use: Ints = np.array([us[0] if us else 4 * n for us in self.users], np.int64)
        self.is_live = np.zeros(n, np.bool_)
        self.locks = np.zeros(n, np.int64)
        self.back_time: NDArray[np.float64] = arrays.time.copy()
        self.lost_time = np.zeros(n)
        self.total_time = float(arrays.time.sum())
        self.live_bytes = 0
        self.target = 0
        self.order: list[int] = []

    def compute(self, value: int) -> None:
        size = int(self.arrays.bytes[value])
        while self.live_bytes + size > self.budget and self.give_up_one():
            pass
        self.is_live[value] = True
        self.live_bytes += size
        self.order.append(value)
        if self.lost_time[value]:
            self.back_time[self.users[value]] -= self.lost_time[value]
            self.lost_time[value] = 0.0

    def give_up_one(self) -> bool:
        # What has no use left costs nothing to give up.
        may_go = ~self.arrays.once | (self.next_use >= 4 * len(self.arrays))
        candidates = np.flatnonzero(
            self.is_live & (self.locks == 0) & (self.arrays.bytes > 0) & may_go
        )
        if not len(candidates):
            return False
        distance = self.next_use[candidates] - self.target + 1.0
        time = np.maximum(self.back_time[candidates], 1e-9 * self.arrays.time.max() + 1e-300)
        is_over = self.next_use[candidates] >= 4 * len(self.arrays)
        score = self.arrays.bytes[candidates] * distance**self.distance_power / time
        score[is_over] = np.inf
        value = int(candidates[np.argmax(score)])
        self.is_live[value] = False
        self.live_bytes -= int(self.arrays.bytes[value])
        # The estimate counts shared operands once for each user and would grow without bound.
        self.lost_time[value] = min(self.back_time[value], self.total_time)
        self.back_time[self.users[value]] += self.lost_time[value]
        return True

    def advance(self, target: int) -> None:
        """The first computation of `target` is done: its operands' next use is a later one."""
        for u in self.operands[target]:
            self.n_used[u] += 1
            users, n_used = self.users[u], int(self.n_used[u])
            self.next_use[u] = users[n_used] if n_used < len(users) else 4 * len(self.arrays)
