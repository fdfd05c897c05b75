"""Chains of stages: which stage inputs to keep and which option each stage runs as, optimally.

A long network is a chain of stages (blocks). Within one, `mincut` offers several options: what to
save between its forward and its backward, and the time and memory of the backward then. Between stages,
the dynamic program of *rotor* decides (Beaumont et al., "Optimal checkpointing for heterogeneous
chains: how to train deep neural networks with limited memory", 2019; several options per stage as
in Zhao et al., "Rockmate", ICML 2023). Let C(m, s, t) be the least time of the forwards and
backwards of stages s..t within m bytes, not counting the input of s, which stays live. Either s
runs once, as some option o, and what it saves stays::

    forward_o + backward_o + C(m - saved_o, s + 1, t)

or forwards run up to some stage j without saving, whose input is kept while j..t are done, and
s..j-1 begin anew::

    sum of forward_k for s <= k < j  +  C(m - x_j, j, t)  +  C(m, s, j - 1)

each if its own moments fit in m: a forward of k holds the gradient at t's output, x_k, x_{k+1}
and its temporaries; a backward of s holds what was saved, both gradients and its temporaries.
O(L³M) for L stages and M memory slots, vectorised over slots and splits.

Known limits: optimal among *persistent* plans (what is kept stays until its backward), as the
papers show it to be for the recursion; sizes are rounded up to slots of budget / `n_slots` bytes,
so with few slots a plan can be missed by that rounding, never exceed the budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from remat.solvers.graph import Chain
from remat.solvers.liveness import Floats, Ints

ChainStep = tuple[Literal["forward", "free", "save", "backward"], int, int]


class ChainTable:
    """C(m, s, t) for all m, s, t of a chain.

    Args:
      chain: the stages.
      budget: bytes; the table answers for smaller ones as well.
      n_slots: the number of slots of memory into which the budget is divided; more round sizes up by less.
    """

    def __init__(self, chain: Chain, budget: int, n_slots: int) -> None:
        n = len(chain)
        self.chain = chain
        self.slot_bytes = max(1, -(-max(budget, 0) // max(n_slots, 1)))
        x = np.array([chain.boundary_bytes(k) for k in range(n + 1)], np.int64)
        # The input of stage 0 is live throughout.
        available = budget - int(x[0])
        #: The slots of the whole budget; smaller budgets have fewer.
        self.n_slots = max(available, 0) // self.slot_bytes
        self._x = x
        self._forward = np.cumsum([0.0, *(stage.forward_time for stage in chain.stages)])
        temporary = np.array([s.forward_temporary_bytes for s in chain.stages], np.int64)
        # What the forwards from s to j - 1 hold at most, beside the gradient: _held[s][j - s - 1].
        own = x[1:] + temporary
        self._held = [np.maximum.accumulate(own[s:] + np.append(0, x[s + 1 : n])) for s in range(n)]
        shape = (n + 1, n + 1, self.n_slots + 1)
        #: `time[s, e, m]` is C of the stages s..e-1 (e is exclusive).
        self.time: Floats = np.full(shape, np.inf)
        # `_shifted[e, j]` is time[j, e] with the slots of the kept input of stage j added.
        self._shifted: Floats = np.full(shape, np.inf)
        if available >= 0:
            self._fill()

    @property
    def is_feasible(self) -> bool:
        return len(self.chain) == 0 or bool(np.isfinite(self.time[0, len(self.chain), -1]))

    def _slots(self, n_bytes: int) -> int:
        return -(-n_bytes // self.slot_bytes)

    def _fill(self) -> None:
        n = len(self.chain)
        everywhere = np.arange(self.n_slots + 1)
        for length in range(1, n + 1):
            for s in range(n - length + 1):
                e = s + length
                time = self.time[s, e]
                for saved in self._saved_times(s, e, everywhere):
                    np.minimum(time, saved, out=time)
                if length > 1:
                    split = self._split_times(s, e, everywhere)
                    np.minimum(time, np.minimum.reduce(split, axis=0), out=time)
                kept = self._slots(int(self._x[s]))
                if kept <= self.n_slots:
                    self._shifted[e, s, kept:] = time[: self.n_slots + 1 - kept]

    def _split_times(self, s: int, e: int, slots: Ints) -> Floats:
        """Return for each j with s < j < e the times if the forwards run to j and its input is kept."""
        times = self.time[s, s + 1 : e, slots[0] : slots[-1] + 1]
        times = times + self._shifted[e, s + 1 : e, slots[0] : slots[-1] + 1]
        times += (self._forward[s + 1 : e] - self._forward[s])[:, None]
        least = -(-(self._held[s][: e - s - 1] + self._x[e]) // self.slot_bytes)
        return np.where(slots < least[:, None], np.inf, times)

    def _saved_times(self, s: int, e: int, slots: Ints) -> Iterator[Floats]:
        """Return for each option of stage s the times if it runs once and what it saves is kept."""
        x = self._x
        for option in self.chain.stages[s].options:
            held = option.saved_bytes + max(
                int(x[e]) + option.forward_temporary_bytes,
                int(x[s + 1] + x[s]) + option.backward_temporary_bytes,
            )
            times = np.full(len(slots), np.inf)
            # The inner stages have `kept` fewer slots.
            kept = self._slots(option.saved_bytes) if e > s + 1 else 0
            fits = slots >= max(self._slots(held), kept)
            times[fits] = option.forward_time + option.backward_time
            if e > s + 1:
                times[fits] += self.time[s + 1, e, slots[fits] - kept]
            yield times

    def steps(self, n_slots: int | None = None) -> tuple[ChainStep, ...] | None:
        """Return the steps of the fastest plan within some slots (all, if None), if one fits."""
        n_slots = self.n_slots if n_slots is None else n_slots
        if len(self.chain) and not np.isfinite(self.time[0, len(self.chain), n_slots]):
            return None
        steps: list[ChainStep] = []
        todo: list[tuple[int, int, int] | ChainStep] = [(0, len(self.chain), n_slots)]
        while todo:
            item = todo.pop()
            if isinstance(item[0], str):
                steps.append(item)
                continue
            s, e, m = item
            if s == e:
                continue
            slots = np.array([m])
            saved = [float(times[0]) for times in self._saved_times(s, e, slots)]
            split = self._split_times(s, e, slots)[:, 0]
            if min(saved) <= split.min(initial=np.inf):
                o = saved.index(min(saved))
                steps.append(("save", s, o))
                todo.append(("backward", s, 0))
                if e > s + 1:
                    saved_bytes = self.chain.stages[s].options[o].saved_bytes
                    todo.append((s + 1, e, m - self._slots(saved_bytes)))
                continue
            j = s + 1 + int(split.argmin())
            for k in range(s, j):
                steps.append(("forward", k, 0))
                if k > s:
                    steps.append(("free", k, 0))
            todo.append((s, j, m))
            todo.append(("free", j, 0))
            todo.append((j, e, m - self._slots(int(self._x[j]))))
        return tuple(steps)
