"""Graphs for the planner's tests, and the slow truths that its answers are compared with."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from pathlib import Path

from benchmarks.solver import layered
from hypothesis import strategies as st

from remat.solvers import Graph, Node

# Mean and standard deviation of the sizes of values, in tens of bytes.
_SIZES = ((50, 40), (200, 100), (350, 150), (500, 100))

GRAPHS = Path(__file__).parent / "graphs"


@st.composite
def graphs(draw: st.DrawFn, max_nodes: int = 8) -> Graph:
    """Random DAGs: any operands, or a chain forward and back as training has it."""
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
    """First computations in order, any repeats in between."""
    order: list[int] = []
    for v in range(len(graph)):
        order += [*draw(st.lists(st.integers(0, v - 1), max_size=2) if v else st.just([])), v]
    return order


def training_graph(n_layers: int, seed: int = 0, skips: float = 0.0) -> Graph:
    """Layers, a loss, and the layers back, each using its own input, output and gradient."""
    return layered(2 * n_layers + 1, skips=skips, seed=seed)


def random_layers(n_nodes: int, *, order: str = "random", seed: int = 0) -> Graph:
    """Layers of random width, each node used by some of the next layer, and one use in seven later.

    The shape is that of the random layered graphs of Gagrani et al., "Neural topological ordering for
    computation graphs" (NeurIPS 2022), on which MOCCASIN was measured: each layer is about a third as
    wide as there are layers, and sizes and times are independent. `order` is a random topological
    one, or layer by layer.
    """
    draw = random.Random(seed)
    n_layers = round(math.sqrt((n_nodes - 2) / 0.31))
    width = (n_nodes - 2) / n_layers
    widths = [max(1, round(draw.uniform(0.25 * width, 1.75 * width))) for _ in range(n_layers)]
    while (missing := n_nodes - 2 - sum(widths)) != 0:
        layer = draw.randrange(n_layers)
        widths[layer] = max(1, widths[layer] + (1 if missing > 0 else -1))
    ends = list(itertools.accumulate(widths, initial=1))
    layers = [range(1), *itertools.starmap(range, itertools.pairwise(ends))]
    layers.append(range(n_nodes - 1, n_nodes))
    operands: list[set[int]] = [set() for _ in range(n_nodes)]
    for before, after in itertools.pairwise(layers):
        n_users = min(len(after), 1 + round(0.2 * len(after)))
        for i, u in enumerate(before):
            centre = (i + 0.5) / len(before) * len(after) - n_users / 2
            first = max(0, min(len(after) - n_users, round(centre)))
            for v in after[first : first + n_users]:
                operands[v].add(u)
        for j, v in enumerate(after):
            if operands[v].isdisjoint(before):
                operands[v].add(before[int((j + 0.5) / len(after) * len(before))])
    for _ in range(round(sum(map(len, operands)) * 0.14 / 0.86)):
        layer = draw.randrange(1, n_layers - 1)
        later = draw.randrange(layer + 2, n_layers + 2)
        operands[draw.choice(layers[later])].add(draw.choice(layers[layer]))
    sizes = [10 * max(3, int(abs(draw.gauss(*draw.choice(_SIZES))))) for _ in range(n_nodes)]
    times = [0, *(draw.randint(0, 1000) for _ in range(n_nodes - 2)), 0]
    users: list[list[int]] = [[] for _ in operands]
    for v, us in enumerate(operands):
        for u in sorted(us):
            users[u].append(v)
    n_missing = [len(us) for us in operands]
    place: dict[int, int] = {}
    ready = [0]
    while ready:
        v = ready.pop(draw.randrange(len(ready)) if order == "random" else ready.index(min(ready)))
        place[v] = len(place)
        for user in users[v]:
            n_missing[user] -= 1
            if not n_missing[user]:
                ready.append(user)
    nodes = [
        Node(k, times[v], sizes[v], tuple(sorted(place[u] for u in operands[v])))
        for v, k in place.items()
    ]
    return Graph(tuple(nodes), f"random-layers-{n_nodes}")


def least_time(graph: Graph, budget: int) -> int | float | None:
    """The least time of any schedule within the budget, by Dijkstra over all states of memory."""
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
