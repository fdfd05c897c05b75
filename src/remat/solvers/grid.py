"""The solver that plans are made with: a search on a grid of budgets that the graph determines.

A planner asks for schedules of one graph within many budgets and compares them. So the answers must
not depend on which budgets were asked for before, and they must be monotone: as the budget falls,
the time never falls and the peak never rises. A heuristic that searches within the budget at hand
guarantees neither. `GridSearch` therefore searches only within budgets that are fixed by the graph:

* A geometric grid runs from the peak without recomputation down to the floor. The search at each
  grid budget starts from the order of the next larger one and from the graph's own order. The order
  *of* a grid budget is the fastest that was found for it and for smaller grid budgets, down to the first
  whose proven lower bound exceeds the time of the order at hand, or whose order takes a tenth longer: no
  faster one was ever found beyond that.
* Intervals of the grid are bisected down to a share of the peak, the `resolution`. The search at the middle
  starts from the orders of both ends. Its order replaces that of the lower end only if its time and
  peak lie between those of the two ends.

The answer for a budget is the order of the largest of these budgets that does not exceed it. Each
part is computed when it is first needed and depends on the graph alone. The work of each search is
counted in steps, never in seconds.

The searches: greedy insertion (`relief`), minimum cuts (`order_search`), and, where these stay above the
lower bound, both in small steps from the order of a larger budget, eviction (`evict`), and segments of a
chain (`segments`); the best order is improved by ruin and recreate until the lower bound or the allowance
of work is reached. A search that is not `thorough` leaves out what rarely finds a faster order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Iterator

import numpy as np

from remat.solvers import frontier
from remat.solvers.bounds import ProofEffort, peak_bound, prove, rounded
from remat.solvers.effort import Effort
from remat.solvers.evict import evict
from remat.solvers.graph import Graph
from remat.solvers.liveness import Arrays, Liveness, liveness
from remat.solvers.mincut import RecentNetworks
from remat.solvers.order_search import CutParameters, refine
from remat.solvers.relief import Relief, improve, keep, relieve
from remat.solvers.segments import Segments, TableSize
from remat.solvers.simulate import floor_bytes
from remat.solvers.solver import Answers, Schedule, Solver, checked, refusal

_RATIO = 0.7  # between neighbouring grid budgets; a larger one makes a finer grid and more searches
_RELIEF = Relief()
_CUTS = CutParameters(fill=1.0, height=1.0)
_CUTS_WITH_ROOM = CutParameters(fill=0.9, height=1.0)
# Share of the lower bound; costly searches run only for orders farther above it than this.
_GAP = 0.03
# Ratio of successive peaks in a descent of a thorough search, and of others; larger makes smaller steps and
# takes longer.
_DESCENT, _QUICK_DESCENT = 0.95, 0.9
_DESCENT_EFFORT = 20  # allowance of a descent, as a multiple of that of one budget
# Exponent in `evict`; larger prefers to evict values whose next use is far away.
_DISTANCE_POWER = 0.5
# Of a search that is not thorough. On 90 graphs it found orders as fast as those of larger tables.
_SMALL_TABLE = TableSize(most_segments=32, most_nodes=32, slots=128)
_MOST_REPEATS = 6  # computations per node after which a pass of eviction ends without an order
# Share of the lower bound. Orders farther above it are improved for longer, which finds more than the costly
# searches do.
_WIDE_GAP = 0.25
# Share of the peak. Orders for budgets in narrower intervals are not improved for longer: those of the
# interval's ends were.
_WIDE_INTERVAL = 1 / 64
# Share of the peak. Orders for budgets in wider intervals, far from the budget at hand, are improved for
# `_WIDEST` of the time of others. The others start from linear relaxations as well.
_WIDEST_INTERVAL, _WIDEST = 1 / 12, 0.25
# Allowance to repair a rounded relaxation, as a multiple of that of one budget; a larger one repairs more.
_MENDING_EFFORT = 20
# Nodes of the graphs whose orders are improved for longer. Proofs solve smaller ones, and on larger ones a
# round of improvement takes so long that more of them do not pay.
_IMPROVED = range(200, 4_001)
# Ratio of the extra time at a smaller budget to that at a larger one from which on no still smaller budget is
# searched for a faster order. On 300 graphs none was found beyond a ratio of 1; a larger one searches more.
_SLOWER = 1.1
_UNFINISHED = 1.5  # multiple of the most extra time at which an unfinished order is abandoned
# Of the 0-1 program (some 40 nodes); each search solves programs up to this size.
_SMALL_VARIABLES = 2_000


@dataclasses.dataclass(frozen=True)
class GridSearch(Solver):
    """Finds monotone schedules on a grid of budgets.

    >>> from remat.solvers.graph import Graph, Node
    >>> chain = Graph((
    ...     Node(0, time=1, bytes=8), Node(1, time=1, bytes=8, deps=(0,)),
    ...     Node(2, time=1, bytes=8, deps=(1,)), Node(3, time=1, bytes=8, deps=(0, 2))))
    >>> found = GridSearch().answers(chain).within(24)
    >>> found.time, found.peak_bytes
    (4, 24)

    Args:
      effort: the work spent on each budget, as a multiple of the standard allowance, which is some
        tenths of a second for a thousand nodes.
      resolution: share of the peak; budgets that differ by less may have one answer.
      segments_below: share of the peak. The program for chains is not tried for larger budgets, where other
        searches mostly find as good an order; on graphs of some tens of nodes it takes longest.
      most_extra: the most extra time of an order, as a share of the graph's time. Budgets that require more
        are refused without a long search.
      improvement: the work spent on ruin and recreate, as a multiple of the allowance of a budget,
        between two budgets whose orders are known and far above the lower bound. It then replaces
        the costly searches, on graphs of 200 to 4,000 nodes; 1 keeps these and adds nothing.
      patience: rounds of ruin and recreate without success after which a search ends, at effort 1.
      close: share of the graph's time; a search ends when its order is this close to the lower bound.
      tolerance: share of the graph's time. Nothing is searched between two budgets whose orders differ by
        less; the order of the smaller one answers.
      thorough: whether searches do all they can. If not, descents take larger steps, which are neither cut
        to the brim nor improved, and between two budgets whose orders are known, descents are the only costly
        searches. On 90 graphs of training steps that took two thirds of the time, and orders were as fast in
        the mean: single ones by up to a half slower, and others faster.
      proof: the work spent on lower bounds and, on graphs of some 40 nodes, on exact solutions; if
        None, lower bounds are those of minimum cuts.
    """

    effort: float = 1.0
    resolution: float = 1 / 512
    segments_below: float = 1.0
    most_extra: float = math.inf
    improvement: float = 1.0
    patience: int = 60
    close: float = 1e-4
    tolerance: float = 1e-5
    thorough: bool = True
    proof: ProofEffort | None = None

    def __repr__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.name in ("effort", "resolution") or getattr(self, field.name) != field.default
        ]
        return f"GridSearch({', '.join(changed)})"

    def answers(self, graph: Graph, once: Collection[int] = ()) -> Answers:
        return _GridAnswers(self, graph, once)


class _GridAnswers(Answers):
    """The parts of the search that were needed so far; each depends on the graph alone."""

    def __init__(self, solver: GridSearch, graph: Graph, once: Collection[int]) -> None:
        self.graph = graph
        self.resolution = solver.resolution
        self._segments_below = solver.segments_below
        self._is_thorough = solver.thorough
        self.proof = solver.proof
        self.floor_bytes = floor_bytes(graph, once)
        self._arrays = Arrays.of(graph, once)
        self._most_idle = int(solver.effort * solver.patience)
        self._improvement = solver.improvement if len(graph) in _IMPROVED else 1.0
        self._units = int(solver.effort * (200_000 + 100 * len(graph)))
        self._recent = RecentNetworks()
        self._at_peak = RecentNetworks()
        self._plain = liveness(self._arrays, np.arange(len(graph)))
        self._segments = Segments(self._plain, None if solver.thorough else _SMALL_TABLE)
        self._is_small = frontier.n_variables(range(len(graph))) <= _SMALL_VARIABLES
        self._close = solver.close * self._arrays.total_time
        self._tolerance = solver.tolerance * self._arrays.total_time
        self._most_extra = solver.most_extra * max(self._arrays.total_time, math.ulp(0.0))
        self._most_unfinished = _UNFINISHED * self._most_extra
        self._grid = self._grid_budgets()
        self._searched: list[Liveness | None] = [self._plain]  # by index in the grid
        self._bounds: dict[int, float] = {}  # on extra time, by budget
        self._fastest: dict[int, Liveness | None] = {}  # by index in the grid
        self._middles: dict[tuple[int, int], Liveness | None] = {}
        #: By the order at which a descent starts: its orders, and the effort that remained at each.
        self._descents: dict[bytes, list[tuple[Liveness, int]]] = {}
        whole = [node.time for node in graph.nodes if isinstance(node.time, int)]
        #: All times are multiples of it; 0 if some are not whole numbers.
        self._unit = math.gcd(*whole) if len(whole) == len(graph) else 0

    def __repr__(self) -> str:
        return f"<answers of GridSearch on a graph of {len(self.graph)} nodes>"

    def within(self, budget: int) -> Schedule:
        found = self._order_within(budget)
        if found is None:
            smallest = self._smallest
            if smallest.peak_bytes > budget:
                raise refusal(budget, smallest.peak_bytes, self.floor_bytes)
            found = smallest
        return checked(self.graph, found.order.tolist(), budget, self._lower_bound(found, budget))

    def costs_more(self, budget: int, time: float) -> bool:
        # Double precision may have added a rounding error to either.
        extra = time - self.graph.time + 1e-9 * self._arrays.total_time
        if self._bound(budget) > extra:
            return True
        # As the budget falls, the time never falls.
        for index in range(1, len(self._grid)):
            if self._grid[index] < budget:
                return False
            found = self._order_at(index)
            if found is None or found.extra_time > extra:
                return found is not None
        return False

    def lower_bound(self, budget: int) -> float:
        if budget < self.floor_bytes:
            return math.inf
        return self.graph.time + self._bound(budget)

    def smallest(self) -> Schedule:
        found = self._smallest
        return checked(self.graph, found.order.tolist(), found.peak_bytes, self.graph.time)

    # Lower bounds

    def _lower_bound(self, found: Liveness, budget: int) -> int | float:
        """Return a lower bound on the time of any schedule within a budget."""
        bound = self._bound(budget)
        if self.proof is not None and bound < found.extra_time:
            proof = prove(
                self._plain,
                budget,
                found,
                bound,
                self.proof,
                Effort(self._units),
                close=0.1 * self._close,
            )
            bound = self._rounded_up(proof.extra_lower_bound)
        return self.graph.time + bound

    def _bound(self, budget: int) -> int | float:
        if budget not in self._bounds:
            self._bounds[budget] = self._rounded_up(peak_bound(self._plain, budget, self._at_peak))
        return self._bounds[budget]

    def _rounded_up(self, extra: float) -> int | float:
        """Return a bound on extra time, rounded up to a multiple of the unit if all times are integers."""
        # Double precision may have added a rounding error to the bound.
        extra = max(0.0, extra - 1e-9 * self._arrays.total_time)
        return math.ceil(extra / self._unit) * self._unit if self._unit else extra

    # The grid

    def _grid_budgets(self) -> list[int]:
        budgets = [self._plain.peak_bytes]
        while budgets[-1] > self.floor_bytes:
            budgets.append(max(self.floor_bytes, int(_RATIO * budgets[-1])))
        return budgets

    def _found_at(self, index: int) -> Liveness | None:
        """Return what the search at a grid budget found; None from the first that found nothing."""
        while len(self._searched) <= index:
            above = self._searched[-1]
            found = None if above is None else self._search(above, self._grid[len(self._searched)])
            self._searched.append(found)
        return self._searched[index]

    def _order_at(self, index: int) -> Liveness | None:
        """Return the fastest order that was found for a grid budget and smaller ones."""
        if index not in self._fastest:
            self._fastest[index] = self._fastest_from(index)
        return self._fastest[index]

    def _fastest_from(self, index: int) -> Liveness | None:
        best = self._found_at(index)
        while best is not None and index + 1 < len(self._grid):
            index += 1
            if self._bound(self._grid[index]) >= best.extra_time:
                break
            smaller = self._found_at(index)
            if smaller is None or smaller.extra_time > _SLOWER * best.extra_time + self._tolerance:
                break
            best = min(best, smaller, key=_time_and_peak)
        return best

    # Between two grid budgets

    def _order_within(self, budget: int) -> Liveness | None:
        """Return the order of the largest searched budget that does not exceed this one."""
        if budget >= self._plain.peak_bytes:
            return self._plain
        index = 1
        while index < len(self._grid) and self._grid[index] > budget:
            index += 1
        high_order = self._order_at(index - 1)
        if high_order is None or high_order.peak_bytes <= budget:
            return high_order
        if index == len(self._grid):
            return None
        high, low = self._grid[index - 1], self._grid[index]
        low_order = self._order_at(index)
        while high - low > self._least_interval:
            if low_order is not None and self._is_close(low_order, high_order):
                break
            middle = (low + high) // 2
            order = self._order_between(low, high, low_order, high_order)
            if budget >= middle:
                low, low_order = middle, order
            elif order is None:
                return None
            else:
                high, high_order = middle, order
            if high_order.peak_bytes <= budget:
                return high_order
        return low_order

    @property
    def _least_interval(self) -> int:
        return max(1, int(self.resolution * self._plain.peak_bytes))

    def _is_close(self, low_order: Liveness, high_order: Liveness) -> bool:
        return low_order.extra_time - high_order.extra_time <= self._tolerance

    def _order_between(
        self, low: int, high: int, low_order: Liveness | None, high_order: Liveness
    ) -> Liveness | None:
        """Return the order for the middle of an interval: `low_order`, or a better one if it is monotone."""
        if (low, high) not in self._middles:
            middle = (low + high) // 2
            if high_order.peak_bytes <= middle:
                found: Liveness | None = high_order
            else:
                found = self._search(high_order, middle, low_order, width=high - low)
            if low_order is not None and not (
                found is not None
                and high_order.extra_time <= found.extra_time < low_order.extra_time
                and low_order.peak_bytes < found.peak_bytes
            ):
                found = low_order
            self._middles[low, high] = found
        return self._middles[low, high]

    @functools.cached_property
    def _smallest(self) -> Liveness:
        """Return the order of the smallest budget for which one is found."""
        index = 0
        while index + 1 < len(self._grid) and self._found_at(index + 1) is not None:
            index += 1
        order = self._order_at(index)
        assert order is not None
        if index + 1 == len(self._grid):
            return order
        low, high = self._grid[index + 1], self._grid[index]
        while high - low > self._least_interval:
            found = self._order_between(low, high, None, order)
            middle = (low + high) // 2
            if found is None:
                low = middle
            else:
                high, order = middle, found
        return order

    # The search within one budget

    def _search(
        self, above: Liveness, budget: int, below: Liveness | None = None, *, width: int = 0
    ) -> Liveness | None:
        """Return the fastest order within a budget that the searches find, if any does.

        Args:
          above: the order of a larger budget.
          budget: bytes.
          below: the order of a smaller budget, if one is known.
          width: bytes between the budgets of the two orders.
        """
        bound = float(self._bound(budget))
        if bound > self._most_extra:
            return None
        good_enough = bound + self._close
        best: Liveness | None = None
        units = self._units if below is None else self._units // 2
        for ways, gap in ((self._cheap, 0.0), (self._costly, _GAP * bound)):
            if best is not None and best.extra_time <= good_enough + gap:
                break
            if best is not None and below is not None and self._improves_long(best, good_enough):
                share = width / self._plain.peak_bytes
                if share >= _WIDEST_INTERVAL:
                    units = int(_WIDEST * self._improvement * self._units)
                elif share >= _WIDE_INTERVAL:
                    units = int(self._improvement * self._units)
                    best = self._rounded(best, budget)
                break
            for found in ways(above, budget, below):
                if found.peak_bytes > budget:
                    continue
                kept = keep(found, budget, Effort(self._units))
                if best is None or _time_and_peak(kept) < _time_and_peak(best):
                    best = kept
                if best.extra_time <= good_enough:
                    return best
        if best is None:
            best = next(
                (
                    keep(found, budget, Effort(self._units))
                    for found in self._last_resorts(above, budget)
                    if found.peak_bytes <= budget
                ),
                None,
            )
        if best is not None:
            best = improve(
                best,
                budget,
                Effort(units),
                good_enough=good_enough,
                max_idle=self._most_idle,
                seed=0,
            )
        if self.proof is not None and self._is_small:
            proof = prove(
                self._plain,
                budget,
                best,
                self._bound(budget),
                self.proof,
                Effort(self._units),
                close=0.1 * self._close,
            )
            best = proof.best
        return best if best is not None and best.extra_time <= self._most_extra else None

    def _improves_long(self, best: Liveness, good_enough: float) -> bool:
        """Return whether an order is so far from the bound that it is improved for longer."""
        return self._improvement > 1 and best.extra_time > (1 + _WIDE_GAP) * good_enough

    def _rounded(self, best: Liveness, budget: int) -> Liveness:
        """Return an order near the solution of a linear relaxation if it is faster, or the best one."""
        if self.proof is None:
            return best
        effort = Effort(_MENDING_EFFORT * self._units)
        found = rounded(self._plain, budget, best, self.proof.max_variables, effort)
        if found is None:
            return best
        return min(best, keep(found, budget, Effort(self._units)), key=_time_and_peak)

    def _cheap(self, above: Liveness, budget: int, below: Liveness | None) -> Iterator[Liveness]:
        """Yield orders that may fit a budget, those that take the least work first."""
        if below is not None:
            yield below
        yield self._relieved(above, budget, self._construction())
        if below is not None and not self._is_thorough:
            return
        effort = self._construction() if below is None else Effort(self._units)
        cut = self._refined(self._plain, budget, _CUTS, effort)
        yield cut
        if below is not None and cut.peak_bytes > budget:
            yield self._refined(above, budget, _CUTS, effort)

    def _costly(self, above: Liveness, budget: int, below: Liveness | None) -> Iterator[Liveness]:
        """Yield further orders, for budgets at which recomputation nests."""
        yield self._descended(above, budget)
        if below is not None and not self._is_thorough:
            return
        yield self._refined(self._plain, budget, _CUTS_WITH_ROOM, self._construction())
        if below is None:
            yield from self._evicted(budget)
        if budget <= self._segments_below * self._plain.peak_bytes:
            for found in self._segments.near(budget):
                yield self._relieved(found, budget, self._construction())

    def _descended(self, above: Liveness, budget: int) -> Liveness:
        """Return the order reached by small steps from the order of a larger budget; it may not fit yet.

        Cuts far below the peak of an order recompute long chains several times. Between small steps,
        needless recomputations are dropped before the next cut builds on them.
        """
        key = above.order.tobytes()
        if key not in self._descents:
            self._descents[key] = [(above, _DESCENT_EFFORT * self._units)]
        # Descents to different budgets share their steps, except for the last ones.
        steps = self._descents[key]
        ratio = _DESCENT if self._is_thorough else _QUICK_DESCENT
        at = 0
        while True:
            above, units = steps[at]
            step = int(ratio * above.peak_bytes)
            effort = Effort(units)
            if above.extra_time > self._most_unfinished:
                return above
            if step <= budget or effort.is_spent:
                break
            at += 1
            if at == len(steps):
                below = self._step_down(above, step, effort)
                steps.append((below, effort.units) if below is not None else (above, 0))
        if above.peak_bytes <= budget or effort.is_spent:
            return above
        return self._step_down(above, budget, effort) or above

    def _step_down(self, above: Liveness, budget: int, effort: Effort) -> Liveness | None:
        """Return the fastest order found within a budget just below the peak of another order."""
        fitting = [
            keep(found, budget, Effort(self._units))
            for found in self._next_below(above, budget, effort)
            if found.peak_bytes <= budget
        ]
        if not fitting:
            return None
        fastest = min(fitting, key=_time_and_peak)
        if not self._is_thorough:
            return fastest
        return improve(
            fastest,
            budget,
            Effort(self._units // 10),
            good_enough=float(self._bound(budget)) + self._close,
            max_idle=self._most_idle // 4,
            seed=0,
        )

    def _next_below(self, above: Liveness, budget: int, effort: Effort) -> Iterator[Liveness]:
        yield self._relieved(above, budget, effort)
        if self._is_thorough:
            yield self._relieved(self._refined(above, budget, _CUTS, effort), budget, effort)
        yield self._refined(above, budget, _CUTS_WITH_ROOM, effort)

    def _last_resorts(self, above: Liveness, budget: int) -> Iterator[Liveness]:
        yield self._relieved(self._plain, budget, self._construction(), Relief(power=2.0))
        # On dense graphs cuts and insertions together reach lower peaks than either.
        cut = self._refined(above, budget, _CUTS, self._construction())
        yield cut
        yield self._relieved(cut, budget, self._construction())

    def _relieved(
        self, start: Liveness, budget: int, effort: Effort, relief: Relief = _RELIEF
    ) -> Liveness:
        return relieve(start, budget, relief, effort, at_most_time=self._most_unfinished)

    def _refined(
        self, start: Liveness, budget: int, parameters: CutParameters, effort: Effort
    ) -> Liveness:
        return refine(
            start,
            budget,
            parameters,
            effort,
            at_most_time=self._most_unfinished,
            recent=self._recent,
        )

    def _evicted(self, budget: int) -> Iterable[Liveness]:
        order = evict(
            self._arrays,
            budget,
            distance_power=_DISTANCE_POWER,
            max_steps=_MOST_REPEATS * len(self._arrays),
        )
        return [] if order is None else [liveness(self._arrays, order).tidy()]

    def _construction(self) -> Effort:
        """Return the allowance for one order: more than that of improving one."""
        return Effort(5 * self._units)


def _time_and_peak(found: Liveness) -> tuple[float, int]:
    return found.extra_time, found.peak_bytes
