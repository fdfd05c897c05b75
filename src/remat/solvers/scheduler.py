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

from collections.abc import Collection, Sequence

import numpy as np

from remat.errors import BudgetError
from remat.solvers import frontier, order_search
from remat.solvers.graph import Graph
from remat.solvers.schedule import Schedule, by_eviction, checked, cut_bound, refuse
from remat.solvers.simulate import Arrays, Liveness, floor_bytes, liveness

# Tastes of cuts: the room that they fill, and how high the moment is at which they are made. Low ones
# make nested recomputation, high ones few cuts; the first serve where an order is taken further.
_CUTS = ((1.0, 0.0), (1.0, 1.0), (1.0, 0.5), (1.0, 0.1), (0.8, 0.0), (0.8, 1.0), (0.8, 0.5), (0.6, 0.0),
         (0.6, 1.0))  # fmt: skip
_FIRST_CUTS = 2
_DISTANCE_POWERS = (0.5, 0.1)  # tastes of eviction
_STEP = 0.5  # each budget on the way down, of the one before
_NEAR = 0.1  # share of a budget within which another one is close by
_STARTS = 3  # orders that nearly fit, from which a search starts
_KEPT = 3  # orders that are trimmed to the end
_CLOSE = 1e-4  # share of the graph's time by which it is not worth to search on
_SMALL_VARIABLES = 4_000  # up to here the relaxed frontier program bounds as well
_BOUND_TIME_LIMIT_S = 0.05


def _units(n_nodes: int) -> int:
    """The allowance of one search: some tenths of a second for a thousand nodes."""
    return 300_000 + 600 * n_nodes


class Scheduler:
    """A graph, and the schedules that were found for it.

    >>> from remat.solvers.graph import Graph, Node
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
        self._tastes = tuple(order_search.Taste(self._arrays.time, *cut) for cut in _CUTS)
        self._plain = liveness(self._arrays, np.arange(len(graph)))
        self._found: list[tuple[float, Liveness]] = [(0.0, self._plain)]
        self._bounds: dict[int, float] = {}  # by budget, of extra time
        self._searched: set[int] = set()
        self._steps: set[int] = set()
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
                self._search(budget)
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
        return order_search.extra_time(self._arrays, found)

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

    def _search(self, budget: int) -> None:
        """Try all that may give an order within the budget, and improve on the best."""
        # Where a budget close by was searched, what was found then is most of the answer.
        is_known = any(abs(other - budget) <= _NEAR * budget for other in self._searched)
        units = _units(len(self._arrays)) // (3 if is_known else 1)
        if is_known:
            orders = self._tried(budget, self._tastes[:_FIRST_CUTS], ())
        else:
            self._step_down_to(budget)
            orders = self._tried(budget, self._tastes, _DISTANCE_POWERS)
        best = self._best(budget)
        orders += [] if best is None else [best]
        effort = order_search.Effort(units)
        arrays = self._arrays
        glanced = [order_search.trim(arrays, o, budget, effort, at_a_glance=True) for o in orders]
        by_time = {self._extra(found): found for found in reversed(glanced)}
        for time in sorted(by_time)[:_KEPT]:
            self._keep(
                order_search.trim(arrays, by_time[time], budget, order_search.Effort(units // 2))
            )
        best = self._best(budget)
        if best is not None:
            improved = order_search.improve(
                arrays,
                self._operands,
                best,
                budget,
                good_enough=self._bound(budget) + _CLOSE * float(self.graph.time),
                max_rounds=100,
                effort=order_search.Effort(units),
                seed=0,
            )
            self._keep(improved)

    def _step_down_to(self, budget: int) -> None:
        """Orders for larger budgets, in steps: where recomputation nests, one starts from another."""
        step = int(_STEP * self._plain.peak_bytes)
        while step > budget and step > self.floor_bytes:
            if step not in self._steps:
                self._steps.add(step)
                tastes = self._tastes[:_FIRST_CUTS]
                for found in self._tried(step, tastes, ()):
                    effort = order_search.Effort(_units(len(self._arrays)))
                    self._keep(
                        order_search.trim(self._arrays, found, step, effort, at_a_glance=True)
                    )
            step = int(_STEP * step)

    def _tried(
        self, budget: int, tastes: Sequence[order_search.Taste], powers: Sequence[float]
    ) -> list[Liveness]:
        """Orders within the budget, by cuts of the plain order and of what nearly fits, and evicted."""
        arrays, operands, orders = self._arrays, self._operands, []
        above = [found for _, found in self._found if found.peak_bytes > budget]
        above.sort(key=lambda found: found.peak_bytes)
        near = [found for found in above[:_STARTS] if found is not self._plain]
        starts = [(self._plain, taste) for taste in tastes[:_FIRST_CUTS]]
        starts += [(found, taste) for found in near for taste in tastes[:_FIRST_CUTS]]
        starts += [(self._plain, taste) for taste in tastes[_FIRST_CUTS:]]
        # Where the plain order is hard to cut one taste may need most of it.
        units = _units(len(arrays))
        pool = 4 * units
        for start, taste in starts:
            allowance = min(pool, 2 * units if taste is tastes[0] else units // 3)
            effort = order_search.Effort(allowance)
            found = order_search.refine(arrays, operands, start.order, budget, taste, effort)
            pool -= allowance - effort.units
            if found.peak_bytes <= budget:
                orders.append(found)
            if pool <= 0:
                break
        for power in powers:
            evicted = by_eviction(arrays, operands, budget, power)
            if evicted is not None and evicted.peak_bytes <= budget:
                orders.append(evicted)
        return orders

    def _smallest(self) -> Liveness:
        """The order of the smallest peak, for which budgets fall until nothing is found."""
        if not self._descended:
            self._descended = True
            arrays, operands, units = self._arrays, self._operands, _units(len(self._arrays))
            low = self._found_lowest()
            for start in (self._plain, low):
                lowest = order_search.descend(
                    arrays, operands, start.order, self.floor_bytes, order_search.Effort(units)
                )
                self._keep(lowest)
            missed = max(self._missed, self.floor_bytes - 1)
            for _ in range(6):
                peak = self._found_lowest().peak_bytes
                if peak <= missed + 1:
                    break
                target = (missed + peak) // 2
                evicted = by_eviction(arrays, operands, target, _DISTANCE_POWERS[0])
                if evicted is not None:
                    self._keep(evicted)
                if self._found_lowest().peak_bytes > target:
                    missed = target
            low = self._found_lowest()
            self._keep(order_search.trim(arrays, low, low.peak_bytes, order_search.Effort(units)))
        return self._found_lowest()

    def _found_lowest(self) -> Liveness:
        return min(self._found, key=lambda entry: (entry[1].peak_bytes, entry[0]))[1]
