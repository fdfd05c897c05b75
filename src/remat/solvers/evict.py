"""An order of computation found in one pass: evict under memory pressure, recompute on demand.

The graph is computed in its order. When the next value does not fit beside what is live, the live
value with the highest

    bytes x (distance to its next use) / (time of recomputing it)

is evicted; when an evicted value is needed, it is computed again, its own operands first. That is
the rule of dynamic tensor rematerialization (Kirisame et al., ICLR 2021) with a look into the
future, which an eager framework cannot have: the distance is to the *next* use rather than from
the last (Belady's rule for caches).

One pass over the graph, so it is fast at any size and indifferent to where the peaks are: it
serves where memory is short everywhere.

Known limits: the time of recomputing a value counts the operands that were evicted when it was last
looked at, not what has become of theirs since; and a pass exceeds the budget where the operands it
holds for unfinished recomputations fill the memory.
"""

from __future__ import annotations

import numpy as np

from remat.solvers.liveness import Arrays, Floats, Ints


def evict(
    arrays: Arrays, budget: int, *, distance_power: float, max_steps: int
) -> list[int] | None:
    """Return an order of computation that stays within the budget wherever the rule can achieve it.

    A value that must not be computed again would be evicted after its last use in the graph, but a later
    recomputation may need it. Then it stays live, and the order may exceed the budget.

    Args:
      arrays: the graph.
      budget: bytes.
      distance_power: exponent of the distance to the next use; 0 ignores it.
      max_steps: computations beyond which the pass ends without an order (None).
    """
    operands = arrays.operands
    state = _Memory(arrays, budget, distance_power)
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
    kept: set[int] = set()
    order = []
    for value in state.order:
        if value not in kept:
            order.append(value)
            if arrays.once[value]:
                kept.add(value)
    return order


class _Memory:
    """The live values during the pass, and the time of recomputing each value."""

    def __init__(self, arrays: Arrays, budget: int, distance_power: float) -> None:
        n = len(arrays)
        self.arrays = arrays
        self.operands = arrays.operands
        self.budget = budget
        self.distance_power = distance_power
        self.users: list[list[int]] = [[] for _ in range(n)]
        for v, us in enumerate(self.operands):
            for u in us:
                self.users[u].append(v)
        self.n_used = np.zeros(n, np.int64)
        #: First user that is not computed yet; 4 n when there is none.
        self.next_use: Ints = np.array([us[0] if us else 4 * n for us in self.users], np.int64)
        self.is_live = np.zeros(n, np.bool_)
        self.locks = np.zeros(n, np.int64)
        self.recompute_time: Floats = arrays.time.copy()
        self.evicted_time = np.zeros(n)
        self.total_time = arrays.total_time
        self.live_bytes = 0
        self.target = 0
        self.order: list[int] = []

    def compute(self, value: int) -> None:
        size = int(self.arrays.bytes[value])
        while self.live_bytes + size > self.budget and self.evict_one():
            pass
        self.is_live[value] = True
        self.live_bytes += size
        self.order.append(value)
        if self.evicted_time[value]:
            self.recompute_time[self.users[value]] -= self.evicted_time[value]
            self.evicted_time[value] = 0.0

    def evict_one(self) -> bool:
        # Evicting a value without remaining uses costs nothing.
        is_over = self.next_use >= 4 * len(self.arrays)
        may_go = ~self.arrays.once | is_over
        candidates = np.flatnonzero(
            self.is_live & (self.locks == 0) & (self.arrays.bytes > 0) & may_go
        )
        if not len(candidates):
            return False
        distance = self.next_use[candidates] - self.target + 1.0
        time = np.maximum(self.recompute_time[candidates], 1e-9 * self.arrays.time.max() + 1e-300)
        score = self.arrays.bytes[candidates] * distance**self.distance_power / time
        score[is_over[candidates]] = np.inf
        value = int(candidates[np.argmax(score)])
        self.is_live[value] = False
        self.live_bytes -= int(self.arrays.bytes[value])
        # The estimate counts shared operands once for each user and would grow without bound.
        self.evicted_time[value] = min(self.recompute_time[value], self.total_time)
        self.recompute_time[self.users[value]] += self.evicted_time[value]
        return True

    def advance(self, target: int) -> None:
        """Advance the next use of the operands of `target`, which has been computed first."""
        for u in self.operands[target]:
            self.n_used[u] += 1
            users, n_used = self.users[u], int(self.n_used[u])
            self.next_use[u] = users[n_used] if n_used < len(users) else 4 * len(self.arrays)
