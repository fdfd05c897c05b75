"""Schedules on plain graphs: the least time within a memory budget, and how far from the least.

`schedule(graph, budget)` answers Checkmate's problem: nodes in a fixed order, each with a time
and bytes, any of them computed as often as it takes, the peak of live bytes within the budget.

How it is found, and what is proven:

1. `search` cuts the order at its peak until it fits, from a few tastes; `evict` makes one pass
   that gives up values under pressure; large-neighbourhood search improves the best. On the
   published graphs this alone finds the optimum, or nearly, in seconds.
2. `frontier` bounds the time of *any* schedule from below by a linear program over which values
   cross which moments. On small graphs the 0-1 program closes the gap, and its own solution is
   taken if it is better and survives the accounting of every moment.
3. `simulate` executes the answer. Nothing is returned that it does not measure within the budget.

The first computations follow the graph's order, in the answer as in the bound: reordering the
graph itself is another problem (the simulator checks this rule too).

>>> from remat.solvers.graph import Graph, Node
>>> chain = Graph((
...     Node(0, time=1, bytes=8), Node(1, time=1, bytes=8, deps=(0,)),
...     Node(2, time=1, bytes=8, deps=(1,)), Node(3, time=1, bytes=8, deps=(0, 2))))
>>> found = schedule(chain, budget=24)
>>> found.time, found.lower_bound, found.peak_bytes
(4, 4, 24)
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Collection, Sequence

import numpy as np

from remat.errors import BudgetError
from remat.solvers import frontier, order_search
from remat.solvers.evict import evict
from remat.solvers.graph import Graph
from remat.solvers.mincut import CutProblem, at_budget
from remat.solvers.simulate import (
    Arrays,
    Ints,
    Liveness,
    Step,
    floor_bytes,
    liveness,
    no_remat,
    simulate,
    steps_of,
)
from remat.units import format_bytes, parse_bytes

_EXACT_VARIABLES = 16_000  # up to here (some 125 nodes) the 0-1 program is solved
_LINEAR_VARIABLES = 60_000  # and up to here its relaxation, with as many boundaries as fit
_MOST_BOUNDARIES = 160
_DISTANCE_POWERS = (1.0, 0.5)  # tastes of eviction
_MOST_REPEATS = 6  # computations per node after which a pass of eviction gives up
_CLOSE = 1e-5  # share of the graph's time by which it is not worth to search on


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Steps that compute a graph within a budget.

    Args:
      steps: ("compute", id) and ("free", id), in turn.
      peak_bytes: the most bytes that are live at once, as `simulate` measured them.
      time: the sum over all computations, in the graph's unit.
      lower_bound: no schedule within the budget, in the graph's order, takes less time.
    """

    steps: tuple[Step, ...]
    peak_bytes: int
    time: int | float
    lower_bound: int | float

    @property
    def is_optimal(self) -> bool:
        """Whether the time is proven to be the least."""
        return self.time <= self.lower_bound


def schedule(
    graph: Graph,
    budget: int | float | str,
    *,
    once: Collection[int] = (),
    proof_time_limit_s: float = 20.0,
) -> Schedule:
    """Find steps of (nearly) least time whose peak is within the budget.

    The search is deterministic: its effort is counted in steps, not in seconds. Only the proof
    (and, on small graphs, the chance that it finds a better schedule itself) depends on the
    machine, and only where `proof_time_limit_s` stops it before it is complete.

    Args:
      graph: the nodes, in the order of their first computation.
      budget: bytes, or a text such as "8GiB".
      once: ids of nodes that are not computed again.
      proof_time_limit_s: when to stop solving the bounding programs, in seconds.

    Raises:
      BudgetError: no schedule within the budget was found; the message names the smallest peak
        that was, and whether the budget is proven to be impossible.
      UnitsError: the budget is no number of bytes.
    """
    budget = parse_bytes(budget, "budget=")
    unconstrained = no_remat(graph)
    if unconstrained.peak_bytes <= budget:
        return checked(graph, range(len(graph)), budget, graph.time)
    floor = floor_bytes(graph, once)
    if budget < floor:
        refuse(budget, smallest_peak(graph, once).peak_bytes, floor)
    problem = _Problem(graph, budget, once)
    bound = _linear_bound(problem, proof_time_limit_s / 2)
    if bound.is_infeasible:
        refuse(budget, smallest_peak(graph, once).peak_bytes, budget + 1)
    proven = problem.rounded_up(bound.extra_lower_bound)
    best = _first(problem)
    if problem.is_small:
        best = _improved(problem, best, proven, max_rounds=60, seed=0)
        best, proven = _exact(problem, best, proven, proof_time_limit_s)
    best = _improved(problem, best, proven, max_rounds=300, seed=1)
    if best is None:
        smallest = smallest_peak(graph, once)
        if smallest.peak_bytes > budget:
            refuse(budget, smallest.peak_bytes, floor)
        return dataclasses.replace(smallest, lower_bound=graph.time + proven)
    return checked(graph, best.order.tolist(), budget, graph.time + proven)


def smallest_peak(graph: Graph, once: Collection[int] = ()) -> Schedule:
    """The schedule of the smallest peak that the search finds, whatever its time.

    Its lower bound is the trivial one: computing every node once.
    """
    arrays, operands, floor = Arrays.of(graph, once), graph.operands(), floor_bytes(graph, once)
    best = order_search.descend(
        arrays,
        operands,
        np.arange(len(graph)),
        floor,
        order_search.Effort(_effort_units(len(graph))),
    )
    missed = floor
    for _ in range(6):
        if best.peak_bytes <= missed:
            break
        target = (missed + best.peak_bytes) // 2
        evicted = by_eviction(arrays, operands, target, _DISTANCE_POWERS[-1])
        if evicted is not None and evicted.peak_bytes < best.peak_bytes:
            best = evicted
        if best.peak_bytes > target:
            missed = target + 1
    best = order_search.trim(
        arrays, best, best.peak_bytes, order_search.Effort(_effort_units(len(graph)) // 8)
    )
    return checked(graph, best.order.tolist(), best.peak_bytes, graph.time)


# The problem, and what its parts have found


class _Problem:
    """A graph and a budget, with what all parts look up."""

    def __init__(self, graph: Graph, budget: int, once: Collection[int]) -> None:
        self.graph = graph
        self.budget = budget
        self.arrays = Arrays.of(graph, once)
        self.operands = graph.operands()
        self.once = liveness(self.arrays, np.arange(len(graph)))
        self.is_small = frontier.n_variables(range(len(graph))) <= _EXACT_VARIABLES
        whole = [node.time for node in graph.nodes if isinstance(node.time, int)]
        #: What all times are whole multiples of; 0 if some are not whole.
        self.unit = math.gcd(*whole) if len(whole) == len(graph) else 0

    def rounded_up(self, extra: float) -> int | float:
        """A bound on extra time in the graph's numbers: whole times add up to whole multiples."""
        # What double precision may have put on top of the bound.
        extra = max(0.0, extra - 1e-9 * float(self.graph.time))
        return math.ceil(extra / self.unit) * self.unit if self.unit else extra


def _effort_units(n_nodes: int) -> int:
    """Work for one search: up to some ten seconds on a present-day core."""
    return min(25_000_000, 4_000_000 + 400_000 * n_nodes)


def _first(problem: _Problem) -> Liveness | None:
    """The best order that cutting finds, if any fits."""
    arrays, operands, budget = problem.arrays, problem.operands, problem.budget
    once = problem.once.order
    units = _effort_units(len(arrays))
    orders = []
    for taste in order_search.plain_tastes(arrays):
        effort = order_search.Effort(units // 8)
        found = order_search.refine(arrays, operands, once, budget, taste, effort)
        if found.peak_bytes <= budget:
            orders.append(order_search.trim(arrays, found, budget, effort))
    for power in _DISTANCE_POWERS:
        evicted = by_eviction(arrays, operands, budget, power)
        if evicted is not None and evicted.peak_bytes <= budget:
            orders.append(
                order_search.trim(arrays, evicted, budget, order_search.Effort(units // 8))
            )
    if not orders:
        found = order_search.descend(arrays, operands, once, budget, order_search.Effort(units))
        if found.peak_bytes <= budget:
            orders.append(order_search.trim(arrays, found, budget, order_search.Effort(units // 8)))
    return min(orders, key=lambda found: order_search.extra_time(arrays, found), default=None)


def by_eviction(
    arrays: Arrays, operands: tuple[tuple[int, ...], ...], budget: int, power: float
) -> Liveness | None:
    order = evict(
        arrays, operands, budget, distance_power=power, max_steps=_MOST_REPEATS * len(arrays)
    )
    return None if order is None else order_search.tidy(arrays, order, order_search.Effort(0))


def _improved(
    problem: _Problem, best: Liveness | None, proven: int | float, *, max_rounds: int, seed: int
) -> Liveness | None:
    """What large-neighbourhood search makes of an order, until that is proven optimal."""
    if best is None:
        return None
    return order_search.improve(
        problem.arrays,
        problem.operands,
        best,
        problem.budget,
        good_enough=float(proven) + _CLOSE * float(problem.graph.time),
        max_rounds=max_rounds,
        effort=order_search.Effort(_effort_units(len(problem.arrays))),
        seed=seed,
    )


def _boundaries(problem: _Problem, most_variables: int) -> tuple[int, ...]:
    """All nodes where the program stays small; otherwise the peak and moments spread around it.

    Only a boundary at which the order without recomputation is over the budget can bind.
    """
    n = len(problem.arrays)
    if frontier.n_variables(range(n)) <= most_variables:
        return tuple(range(n))
    over = np.flatnonzero(problem.once.live_bytes > problem.budget)
    n_chosen = max(1, min(_MOST_BOUNDARIES, most_variables // (2 * n)))
    spread = over[np.linspace(0, len(over) - 1, n_chosen + 2).astype(np.int64)[1:-1]]
    peak = int(np.argmax(problem.once.live_bytes))
    return tuple(sorted({*spread.tolist(), peak, n - 1}))


def _linear_bound(problem: _Problem, time_limit_s: float) -> frontier.FrontierAnswer:
    """The better of two bounds: the relaxed frontier program's, and minimum cuts at the peak.

    A cut bounds one moment alone, but is fast at any size.
    """
    boundaries = _boundaries(problem, _LINEAR_VARIABLES)
    program = frontier.frontier(problem.arrays, problem.budget, boundaries)
    answer = frontier.relax(program, time_limit_s=time_limit_s)
    if answer.extra_lower_bound or answer.is_infeasible:
        return answer
    peak = int(np.argmax(problem.once.live_bytes))
    try:
        bound = cut_bound(problem.arrays, problem.operands, peak, problem.budget)
    except BudgetError:
        return frontier.FrontierAnswer(0.0)  # up to rounding, which is no proof
    return frontier.FrontierAnswer(max(0.0, bound))


def cut_bound(
    arrays: Arrays, operands: Sequence[tuple[int, ...]], moment: int, budget: int
) -> float:
    """A bound on extra time from what can cross the first computation of one node.

    Raises:
      BudgetError: nothing within the budget can.
    """
    held = [moment, *operands[moment]]
    n_bytes = arrays.bytes[:moment].copy()
    n_bytes[held[1:]] = 0
    needed = np.zeros(moment, np.bool_)
    later = arrays.dep[arrays.start[moment + 1] :]
    needed[later[later < moment]] = True
    needed[held[1:]] = False
    once = arrays.once[:moment]
    cut_problem = CutProblem(
        tuple(n_bytes.tolist()),
        tuple(np.where(once, math.inf, arrays.time[:moment]).tolist()),
        tuple(() if fixed else us for fixed, us in zip(once.tolist(), operands)),
        tuple(np.flatnonzero(needed).tolist()),
    )
    return at_budget(cut_problem, budget - int(arrays.bytes[held].sum()))[1]


def _exact(
    problem: _Problem, best: Liveness | None, proven: int | float, time_limit_s: float
) -> tuple[Liveness | None, int | float]:
    """Solve the 0-1 program; the better order, and the better bound on extra time.

    Its solution may break the budget inside a stage; then those moments join the program.
    """
    arrays, budget = problem.arrays, problem.budget
    boundaries = tuple(range(len(arrays)))
    close = _CLOSE * float(problem.graph.time)
    moments: set[tuple[int, int]] = set()
    deadline = time.monotonic() + time_limit_s
    for _ in range(4):
        if best is not None and order_search.extra_time(arrays, best) <= proven + close:
            break
        at_most = math.inf if best is None else order_search.extra_time(arrays, best)
        program = frontier.frontier(arrays, budget, boundaries, sorted(moments), at_most=at_most)
        rest_s = max(0.0, deadline - time.monotonic())
        answer = frontier.solve(program, max_nodes=5000, time_limit_s=rest_s)
        if answer.is_infeasible:
            # Nothing is as good as the best found (or anything at all, had none been found).
            return best, problem.rounded_up(min(at_most, float(arrays.time.sum())))
        proven = max(proven, problem.rounded_up(answer.extra_lower_bound))
        if answer.recomputed is None:
            break
        order = [
            place for end, again in zip(boundaries, answer.recomputed) for place in (*again, end)
        ]
        effort = order_search.Effort(_effort_units(len(arrays)) // 8)
        found = order_search.tidy(arrays, order, effort)
        if found.peak_bytes > budget:
            new = _moments_over(found, budget) - moments
            taste = order_search.Taste(arrays.time)
            found = order_search.refine(
                arrays, problem.operands, found.order, budget, taste, effort
            )
        else:
            new = set()
        if found.peak_bytes <= budget:
            found = order_search.trim(arrays, found, budget, effort)
            if best is None or order_search.extra_time(arrays, found) < order_search.extra_time(
                arrays, best
            ):
                best = found
        if not new:
            break
        moments |= new
    return best, proven


def _moments_over(measured: Liveness, budget: int) -> set[tuple[int, int]]:
    """(stage, place) of each recomputation at which the order is over the budget."""
    first = order_search.is_first(measured.order)
    stage: Ints = np.cumsum(first) - first
    over = np.flatnonzero((measured.live_bytes > budget) & ~first)
    return {(int(stage[at]), int(measured.order[at])) for at in over}


# Answers


def checked(graph: Graph, order: Sequence[int], budget: int, lower_bound: int | float) -> Schedule:
    """The schedule of an order, after the simulator has executed it."""
    steps = steps_of(graph, order)
    usage = simulate(graph, steps)
    assert usage.peak_bytes <= budget, (usage, budget)
    return Schedule(steps, usage.peak_bytes, usage.time, min(lower_bound, usage.time))


def refuse(budget: int, smallest: int, floor: int) -> None:
    def shown(n_bytes: int) -> str:
        return f"{n_bytes} bytes ({format_bytes(n_bytes)})"

    proof = (
        "that no schedule fits is proven"
        if budget < floor
        else f"a schedule may exist, but none below {shown(floor)}"
    )
    raise BudgetError(
        f"no schedule was found within {shown(budget)}; the smallest peak that was found is "
        f"{shown(smallest)} ({proof}). Raise the budget to at least that."
    )
