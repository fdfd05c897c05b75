"""The memory timeline as a matplotlib figure.

The only module that needs matplotlib (`pip install 'remat[report]'`): `Explanation.plot` loads it
when it is called. The figure belongs to no pyplot state; notebooks show it, `savefig` writes it.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from remat.printing import printable
from remat.report.fragment import COLORS, PHASE_COLORS
from remat.report.model import KINDS, ExplanationData
from remat.report.timeline import thinned_samples, timeline
from remat.units import format_bytes, format_seconds

_POINTS = 4000  # corners of the curves; more draw them more exactly and make an SVG larger


def figure(explanation: ExplanationData, *, width: float = 9.0, height: float = 4.0) -> Figure:
    """Draw live bytes by kind over predicted time, with the phases below and the peak marked.

    >>> figure(ExplanationData("step")).axes[0].get_ylabel()
    'live bytes per device'
    """
    line = timeline(explanation.values, explanation.steps)
    drawn = Figure(figsize=(width, height), layout="constrained")
    axes = drawn.add_subplot()
    axes.set_title(printable(explanation.title), loc="left", parse_math=False)
    axes.set_ylabel("live bytes per device")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda n_bytes, _: format_bytes(n_bytes)))
    axes.spines[["top", "right"]].set_visible(False)
    if line.peak_step is None:
        return drawn
    timed = bool(line.start_s[-1] > 0)
    edges = line.start_s if timed else np.arange(len(explanation.steps) + 1.0)
    axes.set_xlabel("predicted time" if timed else "operation")
    if timed:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda time_s, _: format_seconds(time_s)))
    at = thinned_samples(line.total_bytes, _POINTS)
    x = np.append(edges[at], edges[-1])
    sums = np.cumsum(line.live_bytes[:, at], axis=0)
    below = np.zeros(len(at), np.int64)
    for kind, above, own in zip(KINDS, sums, line.live_bytes):
        if own.any():
            low, high = (np.append(y, y[-1]).astype(float) for y in (below, above))
            axes.fill_between(
                x, low, high, step="post", color=COLORS[kind], label=kind, linewidth=0
            )
        below = above
    axes.set_xlim(edges[0], edges[-1])
    tick_bytes = 2 ** max(0, math.ceil(math.log2(max(line.peak_bytes, 1) / 8)))
    axes.set_yticks(range(0, line.peak_bytes + tick_bytes, tick_bytes))
    axes.set_ylim(-0.05 * max(line.peak_bytes, 1), 1.15 * max(line.peak_bytes, 1))
    first, phases = 0, dict[str, Artist]()
    for phase, run in itertools.groupby(explanation.steps, key=lambda step: step.phase):
        after = first + len(list(run))
        span = axes.axvspan(
            edges[first], edges[after], ymax=0.03, color=PHASE_COLORS[phase], linewidth=0
        )
        phases.setdefault(phase, span)
        first = after
    axes.plot(
        [edges[line.peak_step]], [line.peak_bytes], "o", color=axes.yaxis.label.get_color(), ms=4
    )
    axes.annotate(
        f"peak {format_bytes(line.peak_bytes)}",
        (edges[line.peak_step], line.peak_bytes),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
        fontsize="small",
    )
    kinds, labels = axes.get_legend_handles_labels()
    drawn.legend(
        [*reversed(kinds), *phases.values()],
        [*reversed(labels), *(f"{phase} (below)" for phase in phases)],
        loc="outside right upper",
        frameon=False,
        fontsize="small",
    )
    return drawn
