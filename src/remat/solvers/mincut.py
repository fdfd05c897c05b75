"""Which values to keep across one cut of time, and which to recompute: a minimum cut.

At one moment some values exist and some of them are *needed* later. Each needed value is either
*saved* (its bytes stay occupied) or *recomputed* later (its time is paid, and its operands must in
turn be saved or recomputed). This is the choice inside a segment (residuals between forward and
backward), and at any single moment of a longer schedule.

With a price λ on saved bytes it is a minimum cut, exactly: nodes v_in → v_out with capacity
λ·bytes(v); source → v_in with capacity time(v); u_out → v_in infinite for each operand u; v_out of
a needed value tied to the sink. A value whose v_out lies on the sink's side is available later; if
its v_in does too, it is recomputed, otherwise saved. A third choice needs no further edge: a value
that can also be kept elsewhere (in the host's memory) for a time h(v) is kept where that is cheaper,
so v_in → v_out has capacity min(λ·bytes(v), h(v)).

Sweeping λ yields the vertices of the lower convex hull of (bytes, time); the problem with a budget
b on saved bytes has no solution below max over λ of (minimum cut at λ) − λ·b, which is that
hull at b (the Lagrangian dual).

References: Picard, "Maximal closure of a graph" (1976); Eisner & Severance, "Mathematical
techniques for efficient record segmentation" (1976), for the sweep; Chen et al., "Training deep
nets with sublinear memory cost" (2016), for the problem. Capacities are whole numbers in
`scipy.sparse.csgraph.maximum_flow`, so costs are rounded *down* to 2⁻³⁰ of the largest cut: bounds
stay valid, and a cut is optimal up to that rounding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import scipy
from numpy.typing import NDArray

from remat.errors import BudgetError

_RESOLUTION = 2**30  # capacities and flows of `maximum_flow` are 32-bit
_MOST_REMEMBERED = 1_000_000  # values in the cuts that a network remembers: some 40 MB at most


@dataclasses.dataclass(frozen=True)
class CutProblem:
    """Values in order of computation, with their costs and which of them are needed later.

    Args:
      bytes: that saving each value occupies; 0 for values that stay live anyway (inputs, parameters).
      time: of recomputing each value; `math.inf` if it must not be recomputed.
      deps: for each value the places of its operands, all of them smaller than its own.
      needed: the places of the values that are needed later.
      transfer: time of offloading each value to the host, where it occupies no device memory;
        `math.inf` if it must not be offloaded. Empty means `math.inf` for all.
    """

    bytes: tuple[int, ...]
    time: tuple[float, ...]
    deps: tuple[tuple[int, ...], ...]
    needed: tuple[int, ...]
    transfer: tuple[float, ...] = ()

    def transfers(self) -> NDArray[np.float64]:
        """Return `transfer` with one entry for each value."""
        return np.array(self.transfer or (math.inf,) * len(self), np.float64)

    def __len__(self) -> int:
        return len(self.bytes)


@dataclasses.dataclass(frozen=True)
class MinimumCut:
    """A solution: the places saved, recomputed and offloaded, in order, its bytes and its time."""

    saved: tuple[int, ...]
    recomputed: tuple[int, ...]
    bytes: int
    time: float
    offloaded: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Hull:
    """Vertices of the lower convex hull of (bytes, time), from the fewest bytes to the most.

    `slack` is what rounding may have hidden: it is subtracted from every bound. No choice saves
    less than `floor_bytes`, which is the first vertex's bytes up to rounding.
    """

    cuts: tuple[MinimumCut, ...]
    slack: float = 0.0
    floor_bytes: int = 0

    def lower_bound(self, budget: int) -> float:
        """Return a lower bound on the time of any choice that saves at most `budget` bytes.

        It is infinite where no choice exists.
        """
        if budget < self.floor_bytes:
            return math.inf
        if budget < self.cuts[0].bytes:
            return max(0.0, self.cuts[0].time - self.slack)
        for few, many in zip(self.cuts, self.cuts[1:]):
            if few.bytes <= budget < many.bytes:
                share = (budget - few.bytes) / (many.bytes - few.bytes)
                return max(0.0, few.time + share * (many.time - few.time) - self.slack)
        return max(0.0, self.cuts[-1].time - self.slack)

    def within(self, budget: int) -> MinimumCut:
        """Return the vertex of least time whose saved values fit in `budget` bytes.

        Raises:
          BudgetError: even the fewest bytes are too many.
        """
        fitting = [cut for cut in self.cuts if cut.bytes <= budget]
        if not fitting:
            _refuse(budget, self.cuts[0].bytes)
        return fitting[-1]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Network:
    """The flow network of a `CutProblem`, built once and solved for many Lagrange multipliers.

    Node 2v is v_in, 2v + 1 is v_out, then the source and the sink.
    """

    problem: CutProblem
    #: Every edge and its reverse, so that flows have the same layout.
    graph: scipy.sparse.csr_array
    #: The entries of the graph that are edges; the costs are theirs.
    edges: NDArray[np.int64]
    cost_time: NDArray[np.float64]
    cost_bytes: NDArray[np.float64]
    #: Upper bound on an edge's cost: from there on offloading the value is cheaper.
    most_for_bytes: NDArray[np.float64]
    transfers: NDArray[np.float64]
    value_of_edge: NDArray[np.int64]
    bytes: NDArray[np.float64]
    needed: NDArray[np.int64]
    total_time: float
    _by_price: dict[float, tuple[MinimumCut, float]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, problem: CutProblem) -> Network:
        n = len(problem)
        source, sink = 2 * n, 2 * n + 1
        values = np.arange(n)
        operand_sets = [sorted(set(us)) for us in problem.deps]
        users = np.repeat(values, [len(us) for us in operand_sets])
        operands = np.array([u for us in operand_sets for u in us], np.int64)
        needed = np.array(sorted(set(problem.needed)), np.int64)
        tails = np.concatenate([np.full(n, source), 2 * values, 2 * operands + 1, 2 * needed + 1])
        heads = np.concatenate([2 * values, 2 * values + 1, 2 * users, np.full(len(needed), sink)])
        bound = len(users) + len(needed)
        time = np.concatenate([np.array(problem.time, np.float64), np.zeros(n + bound)])
        n_bytes = np.zeros(2 * n + bound)
        n_bytes[n : 2 * n] = problem.bytes
        time[2 * n :] = math.inf
        transfers = problem.transfers()
        most_for_bytes = np.full(2 * n + bound, math.inf)
        most_for_bytes[n : 2 * n] = transfers
        # The layout of a csr matrix: sorted by (tail, head). No edge repeats or is another's reverse.
        size, n_edges = 2 * n + 2, len(tails)
        by_place = np.argsort(np.concatenate([tails * size + heads, heads * size + tails]))
        indptr = np.zeros(size + 1, np.int32)
        np.cumsum(np.bincount(np.concatenate([tails, heads]), minlength=size), out=indptr[1:])
        indices = np.concatenate([heads, tails])[by_place].astype(np.int32)
        graph = scipy.sparse.csr_array(
            (np.zeros(2 * n_edges, np.int32), indices, indptr), shape=(size, size)
        )
        place = np.empty(2 * n_edges, np.int64)
        place[by_place] = np.arange(2 * n_edges)
        bytes_of = np.array(problem.bytes, np.float64)
        total_time = float(time[:n].sum())
        # An edge that does not stand for a value costs no bytes.
        value = np.minimum(tails // 2, n - 1)
        return cls(
            problem=problem,
            graph=graph,
            edges=place[:n_edges],
            cost_time=time,
            cost_bytes=n_bytes,
            most_for_bytes=most_for_bytes,
            transfers=transfers,
            value_of_edge=value,
            bytes=bytes_of,
            needed=needed,
            total_time=total_time,
        )

    def cheapest(self, price: float) -> tuple[MinimumCut, float]:
        """Return the cheapest cut at a price per saved byte, and a lower bound on its cost."""
        known = self._by_price.get(price)
        if known is not None:
            return known
        upper = price * float(self.bytes[self.needed].sum())
        found = self._least(np.full(len(self.problem), price), upper)
        if len(self.problem) * len(self._by_price) < _MOST_REMEMBERED:
            self._by_price[price] = found
        return found

    def cheapest_of(self, price: NDArray[np.float64]) -> MinimumCut:
        """Return the cheapest cut when each value has its own price per byte."""
        upper = float(price[self.needed] @ self.bytes[self.needed])
        return self._least(price, upper)[0]

    def _least(self, price: NDArray[np.float64], upper: float) -> tuple[MinimumCut, float]:
        to_save = price * self.bytes
        if self.problem.transfer:
            to_keep = np.minimum(to_save, self.transfers)
            upper = min(upper, float(to_keep[self.needed].sum()))
        upper = min(self.total_time, upper)
        scale = _RESOLUTION / upper if upper > 0 else 1.0
        to_save_edge = price[self.value_of_edge] * self.cost_bytes
        cost = self.cost_time + np.minimum(to_save_edge, self.most_for_bytes)
        # No cheapest cut contains an edge that alone costs more than the whole. Where the whole
        # costs nothing, none contains an edge that costs anything.
        beyond = _RESOLUTION + 1 if upper > 0 else 1
        whole = np.floor(np.minimum(cost * scale, beyond)) if upper > 0 else np.sign(cost)
        network = self.graph
        network.data[:] = 0
        network.data[self.edges] = np.minimum(whole, beyond)
        n = len(self.problem)
        flow = scipy.sparse.csgraph.maximum_flow(network, 2 * n, 2 * n + 1)
        is_open = network.data > flow.flow.data
        n_open = np.concatenate([[0], np.cumsum(is_open, dtype=np.int32)])
        residual = scipy.sparse.csr_array(
            (np.ones(n_open[-1]), network.indices[is_open], n_open[network.indptr]),
            shape=network.shape,
        )
        on_source_side = np.zeros(2 * n + 2, np.bool_)
        on_source_side[
            scipy.sparse.csgraph.breadth_first_order(
                residual, 2 * n, directed=True, return_predecessors=False
            )
        ] = True
        available = ~on_source_side[1 : 2 * n : 2]
        recomputed = available & ~on_source_side[0 : 2 * n : 2]
        cut = _cut(self.problem, recomputed, self.transfers < to_save)
        return cut, flow.flow_value / scale


def _cut(
    problem: CutProblem,
    recomputed: NDArray[np.bool_],
    offloaded: NDArray[np.bool_] | None = None,
) -> MinimumCut:
    """Return a cut without the values that a tie between minimum cuts left in it needlessly.

    Values that are not recomputed are saved, on the host if `offloaded` says so.
    """
    wanted = [False] * len(problem)
    for v in problem.needed:
        wanted[v] = True
    is_again = recomputed.tolist()
    is_elsewhere = [False] * len(problem) if offloaded is None else offloaded.tolist()
    saved: list[int] = []
    again: list[int] = []
    elsewhere: list[int] = []
    for v in range(len(problem) - 1, -1, -1):
        if not wanted[v]:
            continue
        if is_again[v]:
            again.append(v)
            for u in problem.deps[v]:
                wanted[u] = True
        elif is_elsewhere[v]:
            elsewhere.append(v)
        else:
            saved.append(v)
    return MinimumCut(
        tuple(reversed(saved)),
        tuple(reversed(again)),
        sum(problem.bytes[v] for v in saved),
        _time(problem, again, elsewhere),
        tuple(reversed(elsewhere)),
    )


def _time(problem: CutProblem, recomputed: Sequence[int], offloaded: Sequence[int]) -> float:
    again = sum(problem.time[v] for v in sorted(recomputed))
    return float(again + sum(problem.transfer[v] for v in sorted(offloaded)))


def min_cut(problem: CutProblem, price: float) -> MinimumCut:
    """Return the cheapest choice when each saved byte costs `price`.

    >>> chain = CutProblem(bytes=(8, 8), time=(3.0, 1.0), deps=((), (0,)), needed=(1,))
    >>> min_cut(chain, price=1.0).recomputed, min_cut(chain, price=0.25).saved
    ((0, 1), (1,))
    """
    return Network.of(problem).cheapest(price)[0]


def hull(problem: CutProblem, *, max_cuts: int = 10_000) -> Hull:
    """Return the lower convex hull of (bytes, time) over all choices.

    It takes two maximum flows for each vertex. After `max_cuts` flows the remaining vertices are left
    out, and `slack` grows so that the bounds still hold.

    >>> chain = CutProblem(bytes=(8, 8), time=(3.0, 1.0), deps=((), (0,)), needed=(1,))
    >>> [(cut.bytes, cut.time) for cut in hull(chain).cuts]
    [(0, 4.0), (8, 0.0)]
    """
    network = Network.of(problem)
    low, high, floor_bytes = _ends(network)
    cuts = {low.bytes: low, high.bytes: high}
    slack = 0.0
    open_intervals = [(low, high)] if low.bytes < high.bytes else []
    n_flows = 0
    while open_intervals:
        low, high = open_intervals.pop()
        cut, missed = _between(network, low, high)
        n_flows += 1
        if cut is None or n_flows >= max_cuts:
            slack = max(slack, missed)
            continue
        cuts[cut.bytes] = cut
        if cut.bytes > low.bytes:
            open_intervals.append((low, cut))
        open_intervals.append((cut, high))
    vertices: list[MinimumCut] = []
    for n_bytes in sorted(cuts):
        if not vertices or cuts[n_bytes].time < vertices[-1].time:
            vertices.append(cuts[n_bytes])
    return Hull(tuple(vertices), slack, floor_bytes)


def between(
    problem: CutProblem, few: MinimumCut, many: MinimumCut, *, places: int = 6
) -> list[MinimumCut]:
    """Return cuts between two neighbouring vertices of the hull, which no single price finds.

    The price per byte is low for the values before a place and high for those after it, or the
    other way round: on one side the minimum cut resembles `many`, on the other `few`. As the place
    moves, the cut goes from one vertex to the other.

    Args:
      few, many: the vertices, of fewer and of more bytes.
      places: at how many places to try.

    Returns:
      The cuts whose bytes lie strictly between those of the two, in no particular order.
    """
    differ = sorted(set(few.saved) ^ set(many.saved))
    if len(differ) < 2 or many.bytes <= few.bytes:
        return []
    network = Network.of(problem)
    slope = (few.time - many.time) / (many.bytes - few.bytes)
    chosen = {differ[-(-k * (len(differ) - 1) // (places + 1))] for k in range(1, places + 1)}
    found: dict[tuple[tuple[int, ...], ...], MinimumCut] = {}
    for place in sorted(chosen | {differ[-1]}):
        for factor in (1.05, 3.0):
            price = np.full(len(problem), slope * factor)
            price[:place] = slope / factor
            for prices in (price, slope**2 / price if slope else price):
                cut = network.cheapest_of(prices)
                if few.bytes < cut.bytes < many.bytes and cut.time < few.time:
                    found[cut.saved, cut.offloaded] = cut
    return list(found.values())


class RecentNetworks:
    """Networks of the problems that were solved last, so that solving them again takes fewer flows."""

    def __init__(self) -> None:
        self.of = functools.lru_cache(maxsize=16)(Network.of)


def at_budget(
    problem: CutProblem,
    budget: int,
    *,
    max_flows: int = 60,
    recent: RecentNetworks | None = None,
) -> tuple[MinimumCut, float]:
    """Return the vertex of the hull that fits a budget, and a lower bound on the time of any choice.

    It takes a few maximum flows; fewer if `recent` remembers some for the same problem.

    Raises:
      BudgetError: even the fewest bytes are too many.
    """
    high = _cut(problem, np.zeros(len(problem), np.bool_))
    if high.bytes <= budget:
        return high, 0.0
    network = Network.of(problem) if recent is None else recent.of(problem)
    # Usually the fewest bytes fit: recompute everything that can be, which needs no flow.
    low = _cut(problem, np.isfinite(problem.time))
    if low.bytes > budget:
        low, high, _ = _ends(network)
    if low.bytes > budget:
        _refuse(budget, low.bytes)
    bound = 0.0
    for _ in range(max_flows):
        price = (low.time - high.time) / (high.bytes - low.bytes)
        line = low.time + price * low.bytes
        cut, cost = network.cheapest(price)
        # The dual at this price is a bound whether or not the sweep ends here.
        bound = max(bound, min(cost, line) - price * budget)
        if cut.time + price * cut.bytes >= line * (1 - 1e-12):
            break
        if cut.bytes <= budget:
            low = cut
        elif cut.bytes < high.bytes:
            high = cut
        else:
            break
    return low, bound


def _between(
    network: Network, low: MinimumCut, high: MinimumCut
) -> tuple[MinimumCut | None, float]:
    """Return the cut farthest below the line through two others, and how far below any cut can be.

    The price at which both cost the same makes the line a contour of the Lagrangian.
    """
    price = (low.time - high.time) / (high.bytes - low.bytes)
    line = low.time + price * low.bytes
    cut, bound = network.cheapest(price)
    is_below = cut.time + price * cut.bytes < line * (1 - 1e-12)
    # A cut is new only if it is a vertex in between, or saves as little as `low` in less time.
    is_new = is_below and low.bytes <= cut.bytes < high.bytes
    return (cut if is_new else None), max(0.0, line - bound)


def _ends(network: Network) -> tuple[MinimumCut, MinimumCut, int]:
    """Return a cut of the fewest bytes, the cut of no time, and a proven lower bound on the bytes."""
    problem = network.problem
    n = len(problem)
    saving_all = _cut(problem, np.zeros(n, np.bool_))

    def free(times: Sequence[float]) -> tuple[float, ...]:
        return tuple(0.0 if math.isfinite(t) else math.inf for t in times)

    only_bytes = dataclasses.replace(
        problem, time=free(problem.time), transfer=free(problem.transfer)
    )
    fewest, floor = Network.of(only_bytes).cheapest(1.0)
    fewest = dataclasses.replace(fewest, time=_time(problem, fewest.recomputed, fewest.offloaded))
    # Rounding only lowers the bound, and bytes are whole.
    return fewest, saving_all, math.ceil(floor * (1 - 1e-12))


def _refuse(budget: int, fewest: int) -> NoReturn:
    raise BudgetError(
        f"no choice of saved values fits in {budget} bytes; the smallest found takes {fewest}. "
        "Raise the budget to that."
    )
