"""Plans of chains of stages, executed: the reference that `ChainTable` is compared with."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable

from remat.errors import BudgetError, ScheduleError
from remat.solvers import Graph, Node, Usage
from remat.solvers.chain import ChainStep, ChainTable
from remat.solvers.graph import Chain, StageOption
from remat.units import format_bytes


@dataclasses.dataclass(frozen=True)
class ChainPlan:
    """Steps for `simulate_chain`, and their costs."""

    steps: tuple[ChainStep, ...]
    peak_bytes: int
    time: float


def plan_chain(chain: Chain, budget: int, *, n_slots: int = 500) -> ChainPlan:
    """Return the fastest plan of a chain within a budget.

    Args:
      chain: the stages.
      budget: bytes, for all values that are live at once.
      n_slots: the number of slots of memory into which the budget is divided.

    Raises:
      BudgetError: no plan fits.
    """
    if n_slots < 1:
        raise BudgetError(f"a budget is divided into at least one slot, not {n_slots}.")
    plan = _plan(ChainTable(chain, budget, n_slots)) or _smallest(chain, n_slots)
    if plan.peak_bytes > budget:
        smallest = plan.peak_bytes
        raise BudgetError(
            f"no plan of the {len(chain)} stages fits in {budget} bytes ({format_bytes(budget)}); "
            f"the smallest peak that was found is {smallest} bytes ({format_bytes(smallest)}). "
            "Raise the budget to that, or give the stages options that save less."
        )
    return plan


def _plan(table: ChainTable) -> ChainPlan | None:
    """Return the plan for the table's whole budget, if one fits."""
    steps = table.steps()
    if steps is None:
        return None
    usage = simulate_chain(table.chain, steps)
    return ChainPlan(steps, usage.peak_bytes, float(usage.time))


def _smallest(chain: Chain, n_slots: int) -> ChainPlan:
    """Return the plan for the smallest feasible budget, by bisection."""
    # Enough slots that rounding alone never makes a large budget infeasible.
    n_slots = max(n_slots, 500, 8 * (len(chain) + 2))
    low, high = 0, n_slots
    while not ChainTable(chain, high, n_slots).is_feasible:
        low, high = high, 2 * high
    while high - low > max(1, high // n_slots):
        middle = (low + high) // 2
        if ChainTable(chain, middle, n_slots).is_feasible:
            high = middle
        else:
            low = middle
    plan = _plan(ChainTable(chain, high, n_slots))
    assert plan is not None
    return plan


def simulate_chain(chain: Chain, steps: Iterable[ChainStep]) -> Usage:
    """Execute the steps of a chain and measure them.

    ("forward", k, 0) computes only the input of stage k + 1. ("free", k, 0) frees the input of stage k.
    ("save", k, o) runs stage k's forward pass as option o and keeps the values that this saves, among them
    the input of stage k + 1. ("backward", k, 0) computes the gradient of stage k's input from that of its
    output, and frees the values that the stage had saved.

    Raises:
      ScheduleError: a step lacks what it needs, repeats what is live, or backwards are missing.
    """
    n = len(chain)
    inputs = {0}
    saved: dict[int, StageOption] = {}
    gradient = n
    peak_bytes = peak_step = 0
    time: int | float = 0
    for number, (kind, k, o) in enumerate(steps):
        where = f"step {number} of the chain, {kind} of stage {k}"
        held = sum(chain.boundary_bytes(j) for j in inputs) + chain.boundary_bytes(gradient)
        held += sum(option.saved_bytes for option in saved.values())
        if kind == "free":
            if k not in inputs:
                raise ScheduleError(f"{where}: its input is not live.")
            inputs.remove(k)
            continue
        if not 0 <= k < n:
            raise ScheduleError(f"{where}: the chain has {n} stages.")
        if k not in inputs and k - 1 not in saved:
            raise ScheduleError(f"{where}: its input is not live.")
        stage = chain.stages[k]
        if kind == "forward":
            if k + 1 in inputs:
                raise ScheduleError(f"{where}: its output is still live.")
            inputs.add(k + 1)
            held += chain.boundary_bytes(k + 1) + stage.forward_temporary_bytes
            time += stage.forward_time
        elif kind == "save":
            if k in saved:
                raise ScheduleError(f"{where}: what it saves is still live.")
            saved[k] = stage.options[o]
            held += saved[k].saved_bytes + saved[k].forward_temporary_bytes
            time += saved[k].forward_time
        else:
            if gradient != k + 1 or k not in saved:
                raise ScheduleError(f"{where}: it lacks its gradient or what it saved.")
            option = saved.pop(k)
            gradient = k
            held += stage.input_bytes + option.backward_temporary_bytes
            time += option.backward_time
        if held > peak_bytes:
            peak_bytes, peak_step = held, number
    if gradient:
        raise ScheduleError(f"the steps end before the backward of stage {gradient - 1}.")
    return Usage(peak_bytes, peak_step, time)


def uniform_chain(n_stages: int) -> Graph:
    """Return a chain whose backward steps read the input, the output and the gradient of their stage.

    The input, node 0, is an argument and takes no time. The output, the loss, takes no bytes.
    """
    nodes = [Node(0, 0, 1)]
    nodes += [Node(k + 1, 1, int(k + 1 < n_stages), (k,)) for k in range(n_stages)]
    for k in reversed(range(n_stages)):
        gradient = (len(nodes) - 1,) if k + 1 < n_stages else ()
        nodes.append(Node(len(nodes), 1, 1, (k, k + 1, *gradient)))
    return Graph(tuple(nodes), "uniform-chain")


def least_extra_forwards(n_stages: int, budget: int) -> float:
    """Return the fewest repeated forwards of `uniform_chain`, if what is kept stays until its backward.

    Tries every choice of a stage whose input is kept, for all lengths and numbers of bytes.
    """

    @functools.cache
    def inner(n: int, n_bytes: int) -> float:
        # The input, the output and its gradient are live besides `n_bytes`.
        if n == 1:
            return 0 if n_bytes >= 1 else math.inf
        splits = (j for j in range(1, n) if n_bytes >= min(j, 2))
        return min(
            (j + inner(n - j, n_bytes - 1) + inner(j, n_bytes) for j in splits), default=math.inf
        )

    @functools.cache
    def first(n: int, n_bytes: int) -> float:
        # The first sweep over the last stages: only their input is live besides `n_bytes`.
        if n == 1:
            return 1 if n_bytes >= 1 else math.inf
        splits = (j for j in range(1, n) if n_bytes >= min(j, 2))
        return min(
            (j + first(n - j, n_bytes - 1) + inner(j, n_bytes - 2) for j in splits),
            default=math.inf,
        )

    return first(n_stages, budget - 1) - n_stages
