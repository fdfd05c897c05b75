"""The general solver on published graphs and on large ones: extra time, lower bound, solution time.

    python -m benchmarks solver              # published graphs, 10,000 nodes, random layers
    python -m benchmarks solver --sizes 100 1000 10000 --random 500

Extra time is relative to computing every node once. A mixed-integer program (Checkmate's formulation) proved
`optimum`. Set OMP_NUM_THREADS=1 for figures of one core. Seconds depend on the machine.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remat.errors import BudgetError
from remat.solvers import Graph, Node, no_remat, schedule

GRAPHS = Path(__file__).parent.parent / "tests" / "solvers" / "graphs"
PUBLISHED: tuple[tuple[str, float, float | None], ...] = (
    ("unet", 0.9, 1.13),
    ("unet", 0.8, 1.98),
    ("unet", 0.5, 6.97),
    ("fcn8", 0.9, 0.03),
    ("fcn8", 0.8, 0.14),
    ("vgg16", 0.9, 1.97),
    ("vgg16", 0.8, None),
)

# Mean and standard deviation of the sizes of values, in tens of bytes.
_SIZES = ((50, 40), (200, 100), (350, 150), (500, 100))


def layered(n_nodes: int, *, skips: float, seed: int = 0) -> Graph:
    """Return a training step of random layers: forward, loss, backward; some layers have skip connections."""
    draw = random.Random(seed)
    n = (n_nodes - 1) // 2
    sizes = [draw.choice((1, 2, 4, 8)) * 2**20 for _ in range(n)]
    times = [draw.randint(50, 500) for _ in range(n)]
    operands = [{i - 1} if i else set() for i in range(n)]
    users: list[list[int]] = [[] for _ in range(n)]
    for i in range(6, n):
        if draw.random() < skips:
            j = draw.randint(max(0, i - 40), i - 2)
            operands[i].add(j)
            users[j].append(i)
    nodes = [Node(i, times[i], sizes[i], tuple(sorted(operands[i]))) for i in range(n)]
    nodes.append(Node(n, 300, 1024, (n - 1,)))
    for i in reversed(range(n)):
        place = len(nodes)
        deps = {place - 1, i} | operands[i] | {2 * n - user for user in users[i]}
        nodes.append(Node(place, int(1.2 * times[i]), sizes[i], tuple(sorted(deps)), backward=True))
    return Graph(tuple(nodes), f"layers-{len(nodes)}{'-skips' if skips else ''}")


def random_layers(n_nodes: int, *, order: str = "random", seed: int = 0) -> Graph:
    """Return a graph of layers of random width; most uses are in the next layer, one in seven is later.

    The shape is that of the random layered graphs of Gagrani et al., "Neural topological ordering for
    computation graphs" (NeurIPS 2022), on which MOCCASIN was measured: the width of a layer is about a third
    of the number of layers, and sizes and times are independent. `order` is a random topological order, or
    layer by layer.
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


def measure(graph: Graph, share: float, optimum: float | None) -> dict[str, Any]:
    """Return one line of the table."""
    budget = int(share * no_remat(graph).peak_bytes)
    found: dict[str, Any] = {"graph": graph.name, "share": share, "optimum_percent": optimum}
    begin = time.perf_counter()
    try:
        made = schedule(graph, budget)
    except BudgetError as error:
        return {**found, "seconds": time.perf_counter() - begin, "refused": str(error)}
    found["seconds"] = time.perf_counter() - begin
    found["extra_percent"] = 100 * (made.time / graph.time - 1)
    found["bound_percent"] = 100 * (made.lower_bound / graph.time - 1)
    found["peak_of_budget"] = made.peak_bytes / budget
    return found


def text(row: dict[str, Any]) -> str:
    head = f"{row['graph']:22} {row['share']:6.2f}"
    if "refused" in row:
        return f"{head} {'refused in':>27} {row['seconds']:8.1f} s   {row['refused']}"
    optimum = "" if row["optimum_percent"] is None else f"{row['optimum_percent']:.2f}"
    return (
        f"{head} {row['extra_percent']:9.3f} {row['bound_percent']:9.3f} {optimum:>7}"
        f" {row['seconds']:8.1f} s   {row['peak_of_budget']:.4f}"
    )


def main(options: Sequence[str] = ()) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="solver", description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_001])
    parser.add_argument("--random", type=int, nargs="*", default=[100, 250, 1_000])
    parsed = parser.parse_args(list(options))
    sizes = parsed.sizes
    print(
        f"{'graph':22} {'budget':>6} {'extra %':>9} {'bound %':>9} {'optimum':>7} {'time':>10}"
        "   peak / budget"
    )
    cases = [
        (Graph.load(GRAPHS / f"{name}.json"), share, optimum) for name, share, optimum in PUBLISHED
    ]
    for size in sizes:
        for skips in (0.0, 0.2):
            graph = layered(size, skips=skips, seed=1)
            cases += [(graph, share, None) for share in (0.8, 0.5, 0.25, 0.1)]
    for size in parsed.random:
        for order, seed in itertools.product(("random", "layers"), (0, 1)):
            graph = random_layers(size, order=order, seed=seed)
            named = Graph(graph.nodes, f"{graph.name}-{order}-{seed}")
            cases.append((named, 0.8, None))
    rows = []
    for case in cases:
        rows.append(measure(*case))
        print(text(rows[-1]), flush=True)
    return {"rows": rows}
