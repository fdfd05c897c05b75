"""Chains of stages: which stage inputs to keep and which option each stage runs as, optimally.

A long network is a chain of stages (blocks). Within one, `mincut` offers several options: what to
save between its forward and its backward, and what the backward then takes. Between them, the
dynamic program of *rotor* decides (Beaumont et al., "Optimal checkpointing for heterogeneous
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
O(L³M) for L stages and M memory slots, vectorised over slots.

Known limits: optimal among *persistent* plans (what is kept stays until its backward), as the
papers show it to be for the recursion; sizes are rounded up to slots of budget / `n_slots` bytes,
so with few slots a plan can be missed by that rounding, never exceed the budget.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from remat.errors import BudgetError
from remat.solvers.graph import Chain
from remat.solvers.simulate import ChainStep, simulate_chain
from remat.units import format_bytes


@dataclasses.dataclass(frozen=True)
class ChainPlan:
    """Steps for `simulate_chain`, and what they take."""

    steps: tuple[ChainStep, ...]
    peak_bytes: int
    time: float


def plan_chain(chain: Chain, budget: int, *, n_slots: int = 500) -> ChainPlan:
    """The fastest plan of a chain within a budget.

    >>> from remat.solvers.graph import Chain, Stage, StageOption
    >>> stage = Stage(8, forward_time=1.0, options=(StageOption(16, 1.0, 2.0),))
    >>> plan_chain(Chain((stage,) * 3, output_bytes=8), budget=100).time
    9.0
    >>> plan_chain(Chain((stage,) * 3, output_bytes=8), budget=56).time
    11.0

    Args:
      chain: the stages.
      budget: bytes, everything that is live at once included.
      n_slots: into how many slots of memory the budget is divided.

    Raises:
      BudgetError: no plan fits.
    """
    if n_slots < 1:
        raise BudgetError(f"a budget is divided into at least one slot, not {n_slots}.")
    table = _Table(chain, budget, n_slots)
    plan = table.plan() if table.is_feasible else _smallest(chain, n_slots)
    if plan.peak_bytes > budget:
        smallest = plan.peak_bytes
        raise BudgetError(
            f"no plan of the {len(chain)} stages fits in {budget} bytes ({format_bytes(budget)}); "
            f"the smallest peak that was found is {smallest} bytes ({format_bytes(smallest)}). "
            "Raise the budget to that, or give the stages options that save less."
        )
    return plan


def _smallest(chain: Chain, n_slots: int) -> ChainPlan:
    """The plan of the smallest feasible budget, by bisection."""
    # So many slots that rounding alone never makes a large budget infeasible.
    n_slots = max(n_slots, 500, 8 * (len(chain) + 2))
    low, high = 0, n_slots
    while not _Table(chain, high, n_slots).is_feasible:
        low, high = high, 2 * high
    while high - low > max(1, high // n_slots):
        middle = (low + high) // 2
        if _Table(chain, middle, n_slots).is_feasible:
            high = middle
        else:
            low = middle
    return _Table(chain, high, n_slots).plan()


class _Table:
    """C(m, s, t) for all m, s, t, and the choices behind it.

    `time[s, e, m]` is C of the stages s..e-1 (e is exclusive). A choice below the number of stages
    is j + 1 - s of the split (at least 2); one of -1 - o runs stage s as option o.
    """

    def __init__(self, chain: Chain, budget: int, n_slots: int) -> None:
        n = len(chain)
        self.chain = chain
        self.slot_bytes = max(1, -(-max(budget, 0) // max(n_slots, 1)))
        # The input of stage 0 is live throughout and not the program's to spend.
        room = budget - (chain.boundary_bytes(0) if n else 0)
        self.n_slots = max(room, 0) // self.slot_bytes
        shape = (n + 1, n + 1, self.n_slots + 1)
        self.time: NDArray[np.float64] = np.full(shape, np.inf)
        self.choice: NDArray[np.int32] = np.zeros(shape, np.int32)
        if room >= 0:
            self.fill()

    @property
    def is_feasible(self) -> bool:
        return len(self.chain) == 0 or bool(np.isfinite(self.time[0, len(self.chain), -1]))

    def plan(self) -> ChainPlan:
        steps = self.steps()
        usage = simulate_chain(self.chain, steps)
        return ChainPlan(steps, usage.peak_bytes, float(usage.time))

    def slots(self, n_bytes: int) -> int:
        return -(-n_bytes // self.slot_bytes)

    def fill(self) -> None:
        chain, n = self.chain, len(self.chain)
        x = [chain.boundary_bytes(k) for k in range(n + 1)]
        forward = np.concatenate([[0.0], np.cumsum([s.forward_time for s in chain.stages])])
        for length in range(1, n + 1):
            for s in range(n - length + 1):
                e = s + length
                self.run_once(s, e, x)
                # What the forwards from s hold, at most, when the last of them is that of j - 1.
                held = 0
                for j in range(s + 1, e):
                    k = j - 1
                    own = x[j] + chain.stages[k].forward_temporary_bytes + (x[k] if k > s else 0)
                    held = max(held, x[e] + own)
                    self.offer(
                        s,
                        e,
                        float(forward[j] - forward[s]),
                        self.slots(held),
                        self.slots(x[j]),
                        self.time[j, e],
                        j + 1 - s,
                        self.time[s, j],
                    )

    def run_once(self, s: int, e: int, x: list[int]) -> None:
        for o, option in enumerate(self.chain.stages[s].options):
            held = max(
                x[e] + option.saved_bytes + option.forward_temporary_bytes,
                x[s + 1] + option.saved_bytes + x[s] + option.backward_temporary_bytes,
            )
            rest = self.time[s + 1, e] if e > s + 1 else np.zeros(self.n_slots + 1)
            self.offer(
                s,
                e,
                option.forward_time + option.backward_time,
                self.slots(held),
                self.slots(option.saved_bytes) if e > s + 1 else 0,
                rest,
                -1 - o,
            )

    def offer(
        self,
        s: int,
        e: int,
        time: float,
        held: int,
        kept: int,
        inner: NDArray[np.float64],
        choice: int,
        outer: NDArray[np.float64] | None = None,
    ) -> None:
        """Take a choice for the memory sizes at which it is faster than what is known."""
        # Below `held` slots it does not fit; the inner stages have `kept` slots less.
        first = max(held, kept)
        if first > self.n_slots:
            return
        total = time + inner[first - kept : self.n_slots + 1 - kept]
        if outer is not None:
            total = total + outer[first:]
        known = self.time[s, e, first:]
        is_better = total < known
        known[is_better] = total[is_better]
        self.choice[s, e, first:][is_better] = choice

    def steps(self) -> tuple[ChainStep, ...]:
        """Follow the choices from the whole chain at the whole budget."""
        steps: list[ChainStep] = []
        todo: list[tuple[int, int, int] | ChainStep] = [(0, len(self.chain), self.n_slots)]
        while todo:
            item = todo.pop()
            if isinstance(item[0], str):
                steps.append(item)
                continue
            s, e, m = item
            if s == e:
                continue
            choice = int(self.choice[s, e, m])
            if choice < 0:
                option = self.chain.stages[s].options[-1 - choice]
                steps.append(("save", s, -1 - choice))
                todo.append(("backward", s, 0))
                if e > s + 1:
                    todo.append((s + 1, e, m - self.slots(option.saved_bytes)))
                continue
            j = s + choice - 1
            for k in range(s, j):
                steps.append(("forward", k, 0))
                if k > s:
                    steps.append(("free", k, 0))
            todo.append((s, j, m))
            todo.append(("free", j, 0))
            todo.append((j, e, m - self.slots(self.chain.boundary_bytes(j))))
        return tuple(steps)
