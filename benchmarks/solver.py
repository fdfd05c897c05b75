"""The general solver on the published graphs and on large ones: extra time, bound, seconds.

    python benchmarks/solver.py              # the published graphs and 10,000 nodes
    python benchmarks/solver.py --sizes 100 1000 10000

Extra time is relative to computing every node once. `optimum` is the proven one of FACTS.md.
Set OMP_NUM_THREADS=1 for figures of one core; seconds are those of the machine at hand.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

from remat.errors import BudgetError
from remat.planner import Graph, Node, no_remat, schedule

GRAPHS = Path(__file__).parent.parent / "tests" / "planner" / "graphs"
PUBLISHED: tuple[tuple[str, float, float | None], ...] = (
    ("unet", 0.9, 1.13),
    ("unet", 0.8, 1.98),
    ("unet", 0.5, 6.97),
    ("fcn8", 0.9, 0.03),
    ("fcn8", 0.8, 0.14),
    ("vgg16", 0.9, 1.97),
    ("vgg16", 0.8, None),
)


def layered(n_nodes: int, *, skips: float, seed: int = 0) -> Graph:
    """A training step of random layers: forward, loss, backward; some layers skip back."""
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


def row(graph: Graph, share: float, optimum: float | None) -> str:
    """One line of the table."""
    budget = int(share * no_remat(graph).peak_bytes)
    begin = time.perf_counter()
    try:
        found = schedule(graph, budget)
    except BudgetError as error:
        seconds = time.perf_counter() - begin
        return f"{graph.name:22} {share:6.2f} {'refused in':>27} {seconds:8.1f} s   {error}"
    seconds = time.perf_counter() - begin
    extra, bound = (100 * (t / graph.time - 1) for t in (found.time, found.lower_bound))
    shown = "" if optimum is None else f"{optimum:.2f}"
    return (
        f"{graph.name:22} {share:6.2f} {extra:9.3f} {bound:9.3f} {shown:>7} {seconds:8.1f} s"
        f"   {found.peak_bytes / budget:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_001])
    arguments = parser.parse_args()
    print(
        f"{'graph':22} {'budget':>6} {'extra %':>9} {'bound %':>9} {'optimum':>7} {'time':>10}"
        "   peak / budget"
    )
    for name, share, optimum in PUBLISHED:
        print(row(Graph.load(GRAPHS / f"{name}.json"), share, optimum), flush=True)
    for size in arguments.sizes:
        for skips in (0.0, 0.2):
            for share in (0.8, 0.5, 0.25, 0.1):
                print(row(layered(size, skips=skips, seed=1), share, None), flush=True)


if __name__ == "__main__":
    main()
