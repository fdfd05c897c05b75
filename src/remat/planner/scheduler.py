"""Schedules of one graph within several budgets, each in a moment.

A plan asks for many schedules of the same graph, while the compiler says which budget it really
meant. A `Scheduler` spends on each a counted allowance of work, never a time, so that its answers
depend on nothing but what it was asked before, and it remembers what it found:

* an order of computation for one budget is an answer for every larger one, and where the search
  for a smaller one starts. So answers never get worse when a larger budget is asked for;
* what was refused once is refused at once, for every smaller budget too;
* a bound for one budget holds for every smaller one.

The parts are those of `schedule`: cuts of several tastes, passes of eviction, trimming, and
large-neighbourhood search with what is left of the allowance.

Known limits: the bound is a minimum cut at single moments, which is weak where recomputation nests;
on small graphs the relaxed frontier program improves it, for the report only.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from remat.errors import BudgetError
from remat.planner import frontier, search
from remat.planner.graph import Graph
from remat.planner.schedule import Schedule, by_eviction, checked, cut_bound, refuse
from remat.planner.simulate import Arrays, Liveness, floor_bytes, liveness

_DISTANCE_POWERS = (1.0, 0.5, 0.25)  # tastes of eviction
_KEPT = 3  # orders that are trimmed to the end
_CLOSE = 1e-4  # share of the graph's time by which it is not worth to search on
_SMALL_VARIABLES = 4_000  # up to here the relaxed frontier program bounds as well
_BOUND_TIME_LIMIT_S = 0.05


def _units(n_nodes: int) -> int:
    """The allowance of one search: some tenths of a second for a thousand nodes."""
    return 200_000 + 500 * n_nodes


class Scheduler:
    """A graph, and the schedules that were found for it.

    >>> from remat.planner.graph import Graph, Node
    >>> chain = Graph((
    ...     Node(0, time=1, bytes=8), Node(1, time=1, bytes=8, deps=(0,)),
    ...     Node(2, time=1, bytes=8, deps=(1,)), Node(3, time=1, bytes=8, deps=(0, 2))))
    >>> found = Scheduler(chain).within(24)
    >>> found.time, found.peak_bytes
    (4, 24)

    Args:
      graph: the nodes, in the order of their first computation.
      once: ids of nodes that are not computed again.
    """

    def __init__(self, graph: Graph, once: Collection[int] = ()) -> None:
        self.graph = graph
        self.floor_bytes = floor_bytes(graph, once)
        self._arrays = Arrays.of(graph, once)
        self._operands = graph.operands()
        self._plain = liveness(self._arrays, np.arange(len(graph)))
        self._found: list[tuple[float, Liveness]] = [(0.0, self._plain)]
        self._bounds: dict[int, float] = {}  # by budget, of extra time
        self._searched: set[int] = set()
        self._missed = -1  # the largest budget for which nothing was found
        self._descended = False

    def within(self, budget: int) -> Schedule:
        """A schedule of little time within a budget.

        Raises:
          BudgetError: no schedule within the budget was found.
        """
        best = self._best(budget)
        if best is not self._plain and budget > max(self._missed, self.floor_bytes - 1):
            if budget not in self._searched and not self._is_close(best, budget):
                self._search(budget, best)
                best = self._best(budget)
            self._searched.add(budget)
        if best is None:
            smallest = self._smallest()
            if smallest.peak_bytes > budget:
                self._missed = max(self._missed, budget)
                refuse(budget, smallest.peak_bytes, self.floor_bytes)
            best = smallest
        return self._answer(best, budget)

    def smallest(self) -> Schedule:
        """The schedule of the smallest peak that is found."""
        smallest = self._smallest()
        return self._answer(smallest, smallest.peak_bytes)

    def _answer(self, found: Liveness, budget: int) -> Schedule:
        bound = self._bound(budget)
        n = len(self._arrays)
        if self._extra(found) > bound and frontier.n_variables(range(n)) <= _SMALL_VARIABLES:
            program = frontier.frontier(self._arrays, budget, range(n))
            relaxed = frontier.relax(program, time_limit_s=_BOUND_TIME_LIMIT_S)
            bound = max(bound, relaxed.extra_lower_bound)
        time = float(self.graph.time) + min(bound, self._extra(found))
        return checked(self.graph, found.order.tolist(), budget, time)

    # What is known

    def _extra(self, found: Liveness) -> float:
        return search.extra_time(self._arrays, found)

    def _best(self, budget: int) -> Liveness | None:
        """Of the orders that were found, the one of least time within the budget."""
        fitting = [(time, found) for time, found in self._found if found.peak_bytes <= budget]
        return min(fitting, key=lambda entry: entry[0])[1] if fitting else None

    def _keep(self, found: Liveness) -> None:
        """Remember an order if none is as good in both peak and time."""
        time, peak = self._extra(found), found.peak_bytes
        if any(t <= time and other.peak_bytes <= peak for t, other in self._found):
            return
        self._found = [
            (t, other) for t, other in self._found if t < time or other.peak_bytes < peak
        ]
        self._found.append((time, found))

    def _bound(self, budget: int) -> float:
        """What recomputation takes at least: what the peak of the plain order needs, by a cut."""
        if budget not in self._bounds:
            known = [bound for other, bound in self._bounds.items() if other >= budget]
            moment = int(np.argmax(self._plain.live_bytes))
            bound = 0.0
            if self._plain.peak_bytes > budget:
                try:
                    bound = cut_bound(self._arrays, self._operands, moment, budget)
                except BudgetError:
                    bound = 0.0
            self._bounds[budget] = max([0.0, bound, *known])
        return self._bounds[budget]

    def _is_close(self, found: Liveness | None, budget: int) -> bool:
        if found is None:
            return False
        return self._extra(found) <= self._bound(budget) + _CLOSE * float(self.graph.time)

    # The search

    def _search(self, budget: int, best: Liveness | None) -> None:
        arrays, operands, plain = self._arrays, self._operands, self._plain
        units = _units(len(arrays))
        tastes = search.plain_tastes(arrays)
        orders: list[Liveness] = [] if best is None else [best]
        # What nearly fits is a start as well.
        above = [found for _, found in self._found if found.peak_bytes > budget]
        near = min(above, key=lambda found: found.peak_bytes)
        starts = [(plain, taste) for taste in tastes]
        if near is not plain:
            starts += [(near, taste) for taste in tastes[:2]]
        for start, taste in starts:
            attempt = search.Effort(units // 2)
            found = search.refine(arrays, operands, start.order, budget, taste, attempt)
            if found.peak_bytes <= budget:
                orders.append(found)
        for power in _DISTANCE_POWERS:
            evicted = by_eviction(arrays, operands, budget, power)
            if evicted is not None and evicted.peak_bytes <= budget:
                orders.append(evicted)
        if not orders:
            return
        effort = search.Effort(units)
        glanced = [search.trim(arrays, o, budget, effort, at_a_glance=True) for o in orders]
        by_time = {self._extra(found): found for found in reversed(glanced)}
        for time in sorted(by_time)[:_KEPT]:
            self._keep(search.trim(arrays, by_time[time], budget, search.Effort(units // 2)))
        start = self._best(budget)
        assert start is not None
        self._keep(
            search.improve(
                arrays,
                operands,
                start,
                budget,
                good_enough=self._bound(budget) + _CLOSE * float(self.graph.time),
                max_rounds=100,
                effort=search.Effort(units),
                seed=0,
            )
        )

    def _smallest(self) -> Liveness:
        """The order of the smallest peak, for which budgets fall until nothing is found."""
        if not self._descended:
            self._descended = True
            arrays, operands, units = self._arrays, self._operands, _units(len(self._arrays))
            low = self._found_lowest()
            for start in (self._plain, low):
                lowest = search.descend(
                    arrays, operands, start.order, self.floor_bytes, search.Effort(units)
                )
                self._keep(lowest)
            missed = max(self._missed, self.floor_bytes - 1)
            for _ in range(6):
                peak = self._found_lowest().peak_bytes
                if peak <= missed + 1:
                    break
                target = (missed + peak) // 2
                evicted = by_eviction(arrays, operands, target, _DISTANCE_POWERS[1])
                if evicted is not None:
                    self._keep(evicted)
                if self._found_lowest().peak_bytes > target:
                    missed = target
            low = self._found_lowest()
            self._keep(search.trim(arrays, low, low.peak_bytes, search.Effort(units)))
        return self._found_lowest()

    def _found_lowest(self) -> Liveness:
        return min(self._found, key=lambda entry: (entry[1].peak_bytes, entry[0]))[1]
