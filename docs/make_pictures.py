"""The pictures of the documentation, drawn from what the library computes: `make pictures`.

    python docs/make_pictures.py [FOLDER]

Nothing in them is sketched by hand: timelines are schedules that the planner's accountant executed,
curves are answers of its solver, loops are the actions that `remat.loops.schedules` yields.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from remat import solvers
from remat.errors import BudgetError
from remat.loops.schedules import Binomial
from remat.report import Explanation, Step, Totals, Value, predicted_memory
from remat.solvers import Graph, Node
from remat.solvers.simulate import steps_of

FOLDER = pathlib.Path(__file__).parent / "pictures"
GRAPHS = pathlib.Path(__file__).parents[1] / "tests" / "solvers" / "graphs"
MIB = 2**20
BLUE, ORANGE, GREY = "#1f5fa8", "#d1662b", "#8a8a8a"


def chain(layers: int) -> Graph:
    """Training a stack of equal layers: each backward node needs its layer's input and output."""
    forward = [Node(i, 1e-3, 8 * MIB, (i - 1,) if i else ()) for i in range(layers)]
    backward = []
    for k in range(layers):
        layer, cotangent = layers - 1 - k, layers + k - 1
        needs = {layer, cotangent} | ({layer - 1} if layer else set())
        backward.append(Node(layers + k, 2e-3, 8 * MIB, tuple(sorted(needs))))
    return Graph((*forward, *backward))


def explained(
    graph: Graph, schedule: Iterable[tuple[str, Any]], layers: int, title: str
) -> Explanation:
    """A schedule as an explanation: every computation is a step, every value lives until it is freed."""
    steps: list[Step] = []
    born: dict[int, int] = {}
    lives: dict[int, list[tuple[int, int]]] = {}
    for action, node in schedule:
        if action == "free":
            lives.setdefault(node, []).append((born.pop(node), len(steps) - 1))
            continue
        seen = node in born or node in lives
        phase = "backward" if node >= layers else "recompute" if seen else "forward"
        born[node] = len(steps)
        steps.append(Step(str(node), phase, graph.nodes[node].time))
    for node, start in born.items():
        lives.setdefault(node, []).append((start, len(steps) - 1))
    values = []
    for node, spans in sorted(lives.items()):
        kind = "gradient" if node >= layers else "recomputed" if len(spans) > 1 else "saved"
        values.append(
            Value(node, kind, "f32[2048,1024]", 8 * MIB, tuple(spans), path=f"layer_{node}")
        )
    totals = Totals(
        predicted_memory(tuple(values), tuple(steps)), time_s=sum(step.time_s for step in steps)
    )
    return Explanation(title, values=tuple(values), steps=tuple(steps), totals=totals)


def timelines() -> dict[str, Figure]:
    layers = 16
    graph = chain(layers)
    plain = solvers.no_remat(graph)
    less = solvers.schedule(graph, plain.peak_bytes // 2)
    more = 100 * (less.time / plain.time - 1)
    all_saved = steps_of(graph, range(len(graph.nodes)))
    without = explained(graph, all_saved, layers, "16 layers, everything saved")
    half = explained(graph, less.steps, layers, f"half the memory, {more:.0f} % more time")
    return {
        "timeline-saved": without.plot(width=8, height=3),
        "timeline-half": half.plot(width=8, height=3),
    }


def budgets(percent_step: int) -> dict[str, Figure]:
    """Recomputation against the peak, with the proven bound."""
    drawn, axes = _axes("peak, share of the peak without rematerialization", "extra time")
    graphs = {"chain of 12 layers": chain(12), "fcn8": Graph.load(GRAPHS / "fcn8.json")}
    for (name, graph), color in zip(graphs.items(), (BLUE, ORANGE)):
        plain = solvers.no_remat(graph)
        found = []
        for percent in range(100, 34, -percent_step):
            try:
                found.append(solvers.schedule(graph, plain.peak_bytes * percent // 100))
            except BudgetError:
                break
        shares = [plan.peak_bytes / plain.peak_bytes for plan in found]
        axes.step(
            shares, [p.time / plain.time - 1 for p in found], where="pre", color=color, label=name
        )
        bound = [max(0.0, p.lower_bound / plain.time - 1) for p in found]
        axes.plot(shares, bound, ".", color=color, label=f"{name}: proven bound")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(frameon=False, fontsize="small")
    return {"budget-curve": drawn}


def schedules() -> dict[str, Figure]:
    """What a binomial schedule does with 10 steps and 3 states, and what states cost."""
    n, slots = 10, 3
    drawn, axes = _axes("step of the loop", "time", height=4.4)
    row, pending = 0.0, n
    stored: dict[int, tuple[int, float]] = {}  # of each slot: the step, and since when
    for action in Binomial(n, slots).actions():
        if action.kind == "advance":
            axes.annotate(
                "",
                (action.stop, row),
                (action.start, row),
                arrowprops={"arrowstyle": "->", "color": BLUE},
            )
        elif action.kind == "store":
            stored[action.slot] = (action.start, row)
        elif action.kind == "free":
            step, since = stored.pop(action.slot)
            axes.plot(
                [step, step],
                [since, row],
                color=GREY,
                linewidth=3,
                solid_capstyle="round",
                zorder=0,
            )
        elif action.kind == "reverse":
            pending = action.start
            axes.annotate(
                "",
                (pending, row),
                (pending + 1, row),
                arrowprops={"arrowstyle": "->", "color": ORANGE, "lw": 2},
            )
            row += 1
    for step, since in stored.values():
        axes.plot(
            [step, step], [since, row], color=GREY, linewidth=3, solid_capstyle="round", zorder=0
        )
    assert pending == 0
    axes.set_xlim(-0.3, n + 0.3)
    axes.set_ylim(row, -0.7)
    axes.set_title(
        f"{n} steps, {slots} states: {Binomial(n, slots).forward_steps} steps run (blue and, inside each "
        "reversal, orange)",
        loc="left",
        fontsize="medium",
    )
    axes.set_yticks([])
    axes.set_xticks(range(n + 1))
    costs, more = _axes("steps of the loop", "forward sweeps", height=3.2)
    lengths = [round(10 ** (i / 8)) for i in range(8, 49)]
    for s, color in ((5, GREY), (10, BLUE), (20, "#3b8f5a"), (50, ORANGE)):
        more.plot(
            lengths,
            [Binomial(m, s).forward_steps / m for m in lengths],
            color=color,
            label=f"{s} states",
        )
    more.set_xscale("log")
    more.legend(frameon=False, fontsize="small")
    return {"binomial": drawn, "sweeps": costs}


def _axes(x: str, y: str, *, height: float = 3.4) -> tuple[Figure, Axes]:
    drawn = Figure(figsize=(8, height), layout="constrained")
    axes = drawn.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    return drawn, axes


def draw(folder: pathlib.Path, *, percent_step: int = 5) -> list[pathlib.Path]:
    """Write every picture; the files are the same whenever the figures are."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    options = {"svg.hashsalt": "remat", "svg.fonttype": "path", "font.size": 10}
    with matplotlib.rc_context(options):
        for name, figure in (timelines() | budgets(percent_step) | schedules()).items():
            path = folder / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None, "Creator": None})
            written.append(path)
    return written


if __name__ == "__main__":
    for path in draw(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER):
        print(path)
