"""Graphs for the planner's tests, and slow exact answers that the solvers' are compared with."""

from __future__ import annotations

import heapq
from pathlib import Path

from benchmarks.solver import layered, random_layers as random_layers
from hypothesis import strategies as st

from remat.solvers import Graph, Node

GRAPHS = Path(__file__).parent / "graphs"


@st.composite
def graphs(draw: st.DrawFn, max_nodes: int = 8) -> Graph:
    """Draw random DAGs: with any operands, or a chain forward and backward as in training."""
    n = draw(st.integers(1, max_nodes))
    is_training = draw(st.booleans())
    nodes = []
    for v in range(n):
        if is_training:
            deps = {v - 1} if v else set()
            if v >= n // 2 and 0 <= n - 1 - v < n // 2:
                deps.add(n - 1 - v)
        else:
            deps = set(draw(st.lists(st.integers(0, v - 1), max_size=3))) if v else set()
        time = draw(st.sampled_from((0, 1, 1, 2, 3, 10)))
        n_bytes = draw(st.sampled_from((0, 1, 1, 2, 3, 8)))
        nodes.append(Node(v, time, n_bytes, tuple(sorted(deps))))
    return Graph(tuple(nodes))


@st.composite
def orders(draw: st.DrawFn, graph: Graph) -> list[int]:
    """Draw an order of first computations with any repeats in between."""
    order: list[int] = []
    for v in range(len(graph)):
        order += [*draw(st.lists(st.integers(0, v - 1), max_size=2) if v else st.just([])), v]
    return order


def training_graph(n_layers: int, seed: int = 0, skips: float = 0.0) -> Graph:
    """Return layers, a loss, and backward nodes that each read a layer's input, output and gradient."""
    return layered(2 * n_layers + 1, skips=skips, seed=seed)


def least_time(graph: Graph, budget: int) -> int | float | None:
    """Return the least time of any schedule within the budget, by Dijkstra over all states of memory."""
    n = len(graph)
    operands = [sum(1 << u for u in us) for us in graph.operands()]

    def size(live: int) -> int:
        return sum(node.bytes for i, node in enumerate(graph.nodes) if live >> i & 1)

    best = {(0, 0): 0}
    queue = [(0, 0, 0)]
    while queue:
        time, live, n_first = heapq.heappop(queue)
        if best[live, n_first] < time:
            continue
        if n_first == n:
            return time
        following = [(time, live & ~(1 << i), n_first) for i in range(n) if live >> i & 1]
        for i in range(n_first + 1):
            more = live | 1 << i
            if more != live and not operands[i] & ~live and size(more) <= budget:
                following.append((time + graph.nodes[i].time, more, max(n_first, i + 1)))
        for state in following:
            if state[0] < best.get(state[1:], float("inf")):
                best[state[1:]] = state[0]
                heapq.heappush(queue, state)
    return None
