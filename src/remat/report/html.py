"""An explanation as one self-contained, interactive HTML page.

The file contains everything: styles, scripts, uPlot (which draws the chart) and the data; its content
security policy forbids loading anything else. The headline, the findings, the comparison with the compiler
and the plans to choose from are written here and need no scripts. The timeline and the table are drawn by
the scripts in `static/`, whose README lists them, from the JSON that `payload` returns.

Texts that come from user code reach the page in two ways: escaped in HTML (`user_text`), or inside
JSON whose ``<``, ``>`` and ``&`` are escaped, from which the scripts make text nodes. No such text is ever
part of markup, of a script or of a style.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib import resources

from remat.printing import printable
from remat.report.fragment import breakable, code_block, user_text
from remat.report.groups import own_line
from remat.report.model import (
    ACTIONS,
    SEVERITIES,
    Decision,
    ExplanationData,
    Finding,
    ParetoPoint,
    Totals,
)
from remat.report.outline import (
    caution,
    decision_row,
    loops_in_words,
    memory_rows,
    option_row,
    peak_figures,
    peak_in_words,
    percent,
    place_of,
    plan_in_words,
    setting,
    signed_bytes,
)
from remat.report.payload import MOST_VALUES, payload
from remat.report.timeline import timeline
from remat.units import counted, format_bytes, format_flops, format_seconds

_SCRIPTS = ("data.js", "chart.js", "strip.js", "panel.js", "table.js", "main.js")
_SLOT = re.compile(r"<!--slot:([a-z]+)-->")


def to_page(explanation: ExplanationData) -> str:
    """Return an explanation as an interactive HTML page.

    >>> to_page(ExplanationData("step")).startswith("<!doctype html>")
    True
    """
    title = printable(explanation.title)
    scripts = "\n".join(_static(name) for name in _SCRIPTS)
    slots = {
        "title": escape(f"{title} · remat"),
        "css": _static("uPlot.min.css") + "\n" + _static("page.css"),
        "heading": user_text(title),
        "setting": user_text(setting(explanation)),
        "description": breakable(explanation.description),
        "tiles": _tiles(explanation),
        "first": _plan(explanation) or _findings(explanation),
        "second": _findings(explanation) if _plan(explanation) else "",
        "decisions": _decisions(explanation),
        "peak": _peak(explanation),
        "compiled": _compiled(explanation),
        "pareto": _pareto(explanation),
        "footer": _footer(explanation),
        "data": _embedded(payload(explanation)),
        "uplot": f"/*! {_static('uPlot.LICENSE.txt')}\n*/\n{_static('uPlot.iife.min.js')}",
        "js": f'(() => {{\n"use strict";\n{scripts}\n}})();',
    }
    # One pass over the template, so that text in a slot is never interpreted as a slot.
    return _SLOT.sub(lambda match: slots[match[1]], _static("page.html"))


def _static(name: str) -> str:
    return (resources.files("remat.report") / "static" / name).read_text(encoding="utf-8").strip()


def _embedded(content: object) -> str:
    """Return JSON that cannot end the script element around it."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _tiles(explanation: ExplanationData) -> str:
    totals = explanation.totals
    saved = _bytes_of(explanation, "saved")
    offloaded = _bytes_of(explanation, "offloaded")
    line = timeline(explanation.values, explanation.steps)
    where = ""
    if line.peak_step is not None:
        where = place_of(explanation, line.peak_step)
        own = own_line(explanation.steps[line.peak_step].source)
        where += f", at {own}" if own else ""
    if caution(totals):
        where += ". Where the compiler's own peak is, is not known"
    is_exact = totals.compiled is None or totals.compiled.peak_bytes == totals.predicted.peak_bytes
    tiles = [
        ("Peak, predicted" if totals.compiled is None else "Peak", *peak_figures(totals)),
        (
            "The peak is at" if is_exact else "The predicted peak is at",
            format_seconds(float(line.start_s[line.peak_step or 0])),
            where,
        ),
        (
            "Saved for the backward pass",
            format_bytes(saved),
            f"offloaded {format_bytes(offloaded)}" if offloaded else "",
        ),
        ("Recomputation", *_recomputation(totals)),
        (
            f"Step, predicted{', at most' if totals.at_most else ''}",
            format_seconds(totals.time_s),
            "; ".join(filter(None, (format_flops(totals.flops), totals.at_most))),
        ),
    ]
    return "".join(
        f'<div class="tile"><div class="label">{escape(label)}</div>'
        f'<div class="figure">{escape(figure)}</div><div class="more">{breakable(more)}</div></div>'
        for label, figure, more in tiles
    )


def _recomputation(totals: Totals) -> tuple[str, str]:
    """Return the costs of recomputation: its time, and further figures."""
    if not totals.recompute_flops and not totals.recompute_time_s:
        return "none", ""
    seconds, flops = format_seconds(totals.recompute_time_s), percent(totals.extra_flops_share)
    return f"+{percent(totals.extra_time_share)} time", f"{seconds}; +{flops} FLOPs"


def _bytes_of(explanation: ExplanationData, kind: str) -> int:
    return sum(value.n_bytes for value in explanation.values if value.kind == kind)


def _peak(explanation: ExplanationData) -> str:
    """Return the section on the peak: its place, the reason, and its parts."""
    line = timeline(explanation.values, explanation.steps)
    if line.peak_step is None:
        return ""
    said = peak_in_words(explanation, line).removesuffix(" The largest:")
    differs = caution(explanation.totals)
    return "".join(f'<p class="said">{breakable(text)}</p>' for text in (said, differs) if text)


def _findings(explanation: ExplanationData) -> str:
    if not explanation.findings:
        return ""
    items = []
    for finding in sorted(explanation.findings, key=lambda f: SEVERITIES.index(f.severity)):
        then = f'<p class="next">{breakable(finding.next_step)}</p>' if finding.next_step else ""
        items.append(
            f'<li class="{finding.severity}"><span class="severity">{finding.severity}</span>'
            f"<div>{breakable(finding.message)}{then}</div>{_options(finding)}</li>"
        )
    return (
        '<section aria-labelledby="findings-h"><h2 id="findings-h">Findings</h2>'
        f'<ul class="findings">{"".join(items)}</ul></section>'
    )


def _options(finding: Finding) -> str:
    """Return the ways to take a finding's next step: a table of costs, and the code of each."""
    if not finding.options:
        return ""
    rows = []
    for option in finding.options:
        label, peak, flops = option_row(option)
        code = code_block(option.code) if option.code else ""
        rows.append(
            f'<tr><th scope="row">{user_text(label)}</th><td class="n">{peak}</td><td class="n">{flops}</td>'
            f"<td>{code}</td></tr>"
        )
    return (
        '<div class="scroll"><table class="plain options"><thead><tr><th scope="col">Option</th>'
        '<th scope="col" class="n">Peak</th><th scope="col" class="n">More FLOPs</th>'
        f'<th scope="col">Code</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


_MOST_DECISIONS = 4  # rows of each kind that are visible; further ones are behind a disclosure


def _plan(explanation: ExplanationData) -> str:
    """Return the section on the effect of a plan and on its loops."""
    if not explanation.decisions and explanation.plan is None:
        return ""
    items = "".join(f"<li>{breakable(text)}</li>" for text in loops_in_words(explanation))
    list_ = f'<ul class="said">{items}</ul>' if items else ""
    return (
        '<section aria-labelledby="plan-h"><h2 id="plan-h">What the plan does</h2>'
        f'<p class="said">{user_text(plan_in_words(explanation))}</p>'
        f"{list_}</section>"
    )


def _decisions(explanation: ExplanationData) -> str:
    """Return the section on the values that a plan recomputes, offloads and keeps."""
    if not explanation.decisions:
        return ""
    first, rest = [], []
    for action in ACTIONS:
        found = [d for d in explanation.decisions if d.action == action]
        first += found[:_MOST_DECISIONS]
        rest += found[_MOST_DECISIONS:]
    more = ""
    if rest:
        n_bytes = format_bytes(sum(d.n_bytes for d in rest))
        n_values = counted(sum(d.count for d in rest), "smaller value")
        summary = f'<summary class="muted">{n_values}, {n_bytes}</summary>'
        more = f"<details>{summary}{_decision_rows(rest)}</details>"
    return (
        '<section aria-labelledby="decisions-h"><h2 id="decisions-h">What is recomputed and kept</h2>'
        f"{_decision_rows(first)}{more}{_notes_on_decisions(explanation)}</section>"
    )


def _notes_on_decisions(explanation: ExplanationData) -> str:
    if not explanation.totals.recompute_flops:
        return ""
    return (
        '<p class="hint">Most recomputed values stay inside of fused kernels; those that are written to '
        "memory again are listed below as recomputed.</p>"
    )


def _decision_rows(decisions: Sequence[Decision]) -> str:
    rows = []
    for decision in decisions:
        action, n_bytes, value, aval, source = decision_row(decision)
        kind = {"recompute": "recomputed", "offload": "offloaded", "keep": "saved"}[action]
        rows.append(
            f'<tr class="k-{kind}"><td><i class="swatch"></i>{action}</td><td class="n">{n_bytes}</td>'
            f'<th scope="row">{breakable(value)}</th><td class="code">{user_text(aval)}</td>'
            f"<td>{breakable(source)}</td></tr>"
        )
    return (
        '<div class="scroll"><table class="plain decisions"><thead><tr><th scope="col">Plan</th>'
        '<th scope="col" class="n">Bytes</th><th scope="col">Value</th><th scope="col">Type</th>'
        '<th scope="col">Source</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _compiled(explanation: ExplanationData) -> str:
    totals = explanation.totals
    predicted = memory_rows(totals.predicted)
    compiled = memory_rows(totals.compiled) if totals.compiled is not None else None
    most = max(1, *(n for _, n in predicted), *(n for _, n in compiled or predicted))
    rows = []
    for i, (name, n) in enumerate(predicted):
        bars = _bar("bar", n / most)
        figures, change = format_bytes(n), ""
        if compiled is not None:
            m = compiled[i][1]
            bars += _bar("bar compiled", m / most)
            figures += f"<br>{format_bytes(m)}"
            change = signed_bytes(m - n)
        rows.append(
            f'<div>{name}</div><div class="track">{bars}</div>'
            f'<div class="figures">{figures}</div><div class="change">{change}</div>'
        )
    legend = '<span><i class="swatch predicted"></i>predicted</span>' + (
        '<span><i class="swatch compiled"></i>compiled</span>' if compiled is not None else ""
    )
    reason = f'<p class="reason">{user_text(totals.difference)}</p>' if totals.difference else ""
    title, said = "Memory, predicted", ""
    if totals.compiled is not None:
        title = "Predicted against compiled"
        peaks = totals.predicted.peak_bytes, totals.compiled.peak_bytes
        said = f": {format_bytes(peaks[0])} and {format_bytes(peaks[1])}"
    return (
        f'<section aria-labelledby="compiled-h"><details><summary><h2 id="compiled-h">{title}</h2>'
        f'<span class="muted">{said}</span></summary>'
        f'<div class="legend">{legend}</div><div class="bars">{"".join(rows)}</div>{reason}</details>'
        "</section>"
    )


def _bar(classes: str, share: float) -> str:
    return (
        f'<div class="{classes}{"" if share else " none"}" style="width:{100 * share:.2f}%"></div>'
    )


# Plans to choose from: points placed in per cent, so that they need no scripts and fit any width.


def _pareto(explanation: ExplanationData) -> str:
    points = sorted(explanation.pareto, key=lambda p: (-p.peak_bytes, p.extra_time_s))
    if not points:
        return ""
    x_ticks = _ticks([p.peak_bytes for p in points], 1024)
    y_ticks = _ticks([p.extra_time_s for p in points], 1000)
    drawn = [
        f'<span class="tick x" style="left:{_place(x, x_ticks):.2f}%">{format_bytes(x)}</span>'
        for x in x_ticks
    ]
    drawn += [
        f'<span class="tick y" style="bottom:{_place(y, y_ticks):.2f}%">{format_seconds(y)}</span>'
        for y in y_ticks
    ]
    places = [(_place(p.peak_bytes, x_ticks), _place(p.extra_time_s, y_ticks)) for p in points]
    best = _frontier(points)
    crowded = _crowded(points, places)
    outline = " ".join(f"{x:.2f},{100 - y:.2f}" for p, (x, y) in zip(points, places) if p in best)
    drawn.append(
        '<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">'
        f'<polyline points="{outline}"/></svg>'
    )
    rows = []
    for number, (point, (x, y)) in enumerate(zip(points, places), 1):
        drawn.append(
            f'<span class="point{_classes(point)}{" small" if number - 1 in crowded else ""}" '
            f'style="left:{x:.2f}%;top:{100 - y:.2f}%" title="{escape(printable(point.label))}">'
            f"{'' if number - 1 in crowded else number}</span>"
        )
        verified = "compiled" if point.verified else "predicted"
        chosen = ' class="chosen"' if point.chosen else ""
        rows.append(
            f'<tr{chosen}><td class="n">{number}</td><th scope="row">{user_text(point.label)}</th>'
            f'<td class="n">{format_bytes(point.peak_bytes)}</td>'
            f'<td class="n">+{format_seconds(point.extra_time_s)}</td>'
            f'<td class="n">+{percent(point.extra_flops_share)}</td><td>{verified}</td></tr>'
        )
    said = ["Black: the step of this page." if any(p.chosen for p in points) else ""]
    if not all(p.verified for p in points):
        said.append("Filled: the peak is the compiler's own. Hollow: it is predicted.")
    said.append("The line joins those that no other beats in both.")
    chart = (
        '<div class="pareto" aria-hidden="true">'
        f'{"".join(drawn)}<span class="axis x">peak</span><span class="axis y">extra time</span></div>'
        f'<p class="hint plans">{" ".join(filter(None, said))}</p>'
    )
    if len(points) < 3:
        chart = (
            '<p class="hint plans">More plans to compare: <code>remat report MODULE:FUNCTION --budget 60% '
            "--budgets 75%,50%,35%</code>, or <code>remat.fit</code> with another budget.</p>"
        )
    return (
        '<section aria-labelledby="pareto-h"><div class="title"><h2 id="pareto-h">Plans to choose from'
        f"</h2></div>{chart}"
        '<div class="scroll"><table class="plain"><thead><tr><th class="n"></th><th scope="col">Plan</th>'
        '<th scope="col" class="n">Peak</th><th scope="col" class="n">Time</th>'
        '<th scope="col" class="n">FLOPs</th><th scope="col">Peak is</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _crowded(points: Sequence[ParetoPoint], places: Sequence[tuple[float, float]]) -> set[int]:
    """Return the points whose number would cover another's; the chosen one keeps its number."""
    order = sorted(range(len(points)), key=lambda i: (not points[i].chosen, i))
    shown: list[tuple[float, float]] = []
    crowded = set()
    for i in order:
        x, y = places[i]
        if any(abs(x - a) < 7 and abs(y - b) < 11 for a, b in shown):
            crowded.add(i)
        else:
            shown.append((x, y))
    return crowded


def _frontier(points: Sequence[ParetoPoint]) -> list[ParetoPoint]:
    """Return the points that no other beats in both peak and extra time."""
    found: list[ParetoPoint] = []
    for point in sorted(points, key=lambda p: (p.peak_bytes, p.extra_time_s)):
        if not found or point.extra_time_s < found[-1].extra_time_s:
            found.append(point)
    return found


def _classes(point: ParetoPoint) -> str:
    return (" verified" if point.verified else "") + (" chosen" if point.chosen else "")


def _ticks(numbers: list[int] | list[float], base: int) -> list[float]:
    """Return about five round numbers from 0 to above the largest, in units of a power of `base`."""
    most = max(numbers)
    if most <= 0:
        return [0, 1]
    unit = float(base) ** -6
    while unit * base <= most:
        unit *= base
    steps = (0.1, 0.2, 0.25, 0.5, 1, 2, 2.5, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000)
    step = next(unit * s for s in steps if unit * s * 5 >= most)
    n_steps = int(-(-most // step))
    return [i * step for i in range(n_steps + 1)]


def _place(number: float, ticks: list[float]) -> float:
    return 100 * number / ticks[-1]


def _footer(explanation: ExplanationData) -> str:
    said = "Bytes are those of one device. Times are predicted. "
    if len(explanation.values) > MOST_VALUES:
        said += (
            f"The table lists the {MOST_VALUES:,} largest of {len(explanation.values):,} values. "
        )
    return (
        f"<p>{said}A value that is recomputed has a lifetime for each time. Made by remat; "
        "the chart is drawn by uPlot (MIT licence, in this file's source). This file loads nothing "
        "from the network.</p>"
    )
