"""Blocks as a piece of HTML without scripts, for notebooks and for comparisons.

Notebook viewers strip scripts and have themes of their own, so colours are inherited if possible and the
chart is an SVG. The interactive page is `html`.
"""

from __future__ import annotations

import itertools
import re
from html import escape

import numpy as np

from remat.printing import printable
from remat.report import document as doc
from remat.report.document import Block, Chart, Document
from remat.report.model import KINDS, Kind, Phase
from remat.report.timeline import thinned_samples
from remat.units import format_bytes, format_seconds

# The colours of Okabe and Ito, which can be distinguished with red-green colour blindness.
COLORS: dict[Kind, str] = {
    "argument": "#9aa3ad",
    "saved": "#0072b2",
    "offloaded": "#56b4e9",
    "recomputed": "#e69f00",
    "gradient": "#cc79a7",
    "output": "#009e73",
    "temporary": "#d55e00",
    "reserved": "#8a96a34d",
}
PHASE_COLORS: dict[Phase, str] = {
    "forward": "#8fb8de",
    "backward": "#8d7fc0",
    "recompute": "#e6a700",
    "update": "#79b598",
}
_CURVE_COLORS = ("#8a96a3", "#0a7bd6")
_SEVERITY_COLORS = {"error": "#d1242f", "warning": "#bf8700", "info": "#0969da"}
_WIDTH, _HEIGHT, _POINTS = 680, 150, 360
_LEFT = 104  # room for the texts of the axis of bytes, which are larger on a phone

_STYLE = """<style>
.remat{font:14px/1.45 system-ui,sans-serif;max-width:72em}
.remat h1{font-size:1.3em;margin:.2em 0}.remat h2{font-size:1.05em;margin:1em 0 .3em}
.remat table{font:inherit;border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.4em 0}
.remat th,.remat td{padding:.15em .8em .15em 0;text-align:left;vertical-align:top}
.remat th,.remat td{border-bottom:1px solid #8884}
.remat td.n,.remat th.n{text-align:right;white-space:nowrap}
.remat ul{margin:.3em 0;padding-left:1.3em}
.remat pre{margin:.4em 0;padding:.4em .7em;background:#8881;border-radius:5px;overflow-x:auto}
.remat p{margin:.3em 0}.remat .note{border-left:3px solid;padding-left:.7em;margin:.5em 0}
.remat .scroll{overflow-x:auto}.remat bdi{overflow-wrap:break-word}
.remat .legend span{display:inline-block;white-space:nowrap;margin-right:1em}
.remat svg{font-size:12px}
@media(max-width:600px){.remat th,.remat td{font-size:.85em;padding-right:.5em}
.remat .wide thead{display:none}.remat .wide tr{display:block;padding:.35em 0;border-bottom:1px solid #8884}
.remat .wide td{display:inline;border:0;padding-right:.6em}.remat .wide td:nth-child(3){font-weight:600}
.remat svg{font-size:19px}}
.remat i.c{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.35em}
</style>"""


def to_fragment(document: Document) -> str:
    """Return a document as one HTML element.

    >>> to_fragment([doc.Paragraph("a < b")]).endswith("<p><bdi>a &lt; b</bdi></p>\\n</div>")
    True
    """
    drawn = "\n".join(_drawn(block) for block in document)
    return f'<div class="remat">{_STYLE}\n{drawn}\n</div>'


def to_page(document: Document, *, title: str) -> str:
    """Return a document as an HTML page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        f"<title>{escape(printable(title))}</title>"
        "<style>:root{color-scheme:light dark}body{margin:1rem auto;padding:0 1rem;max-width:72em}</style>"
        f"</head><body>\n{to_fragment(document)}\n</body></html>\n"
    )


def user_text(text: str) -> str:
    """Return a text escaped, printable, and isolated so that it cannot reorder the text around it.

    >>> user_text("<b>")
    '<bdi>&lt;b&gt;</bdi>'
    """
    return f"<bdi>{escape(printable(text))}</bdi>"


def breakable(text: str) -> str:
    """Return a text like `user_text`, whose long paths may be broken after slashes.

    >>> breakable("net/mlp")
    '<bdi>net/<wbr>mlp</bdi>'
    """
    return f"<bdi>{re.sub(r'/(?=[^0-9])', '/<wbr>', escape(printable(text)))}</bdi>"


def code_block(text: str) -> str:
    """Return lines of Python as an element whose text can be selected and copied as it is."""
    return f'<pre class="code"><code>{escape(printable(text, keep=chr(10)))}</code></pre>'


def _drawn(block: Block) -> str:
    match block:
        case doc.Heading(text, level):
            return f"<h{level}>{user_text(text)}</h{level}>"
        case doc.Paragraph(text):
            return f"<p>{user_text(text)}</p>"
        case doc.Note(severity, text, next_step):
            said = f"<b>{severity}</b> {user_text(text)}"
            said += f"<br>→ {user_text(next_step)}" if next_step else ""
            return (
                f'<div class="note" style="border-color:{_SEVERITY_COLORS[severity]}">{said}</div>'
            )
        case doc.Code(text):
            return code_block(text)
        case doc.Items(texts):
            return f"<ul>{''.join(f'<li>{user_text(text)}</li>' for text in texts)}</ul>"
        case doc.Table(columns, rows, numbers, _):
            head = _cells("th", columns, numbers)
            body = "\n".join(f"<tr>{_cells('td', row, numbers)}</tr>" for row in rows)
            # Rows of many columns become paragraphs on narrow screens.
            classes = ' class="wide"' if len(columns) > 4 else ""
            return (
                f'<div class="scroll"><table{classes}><thead><tr>{head}</tr></thead>\n'
                f"<tbody>{body}</tbody></table></div>"
            )
        case doc.Chart():
            return _chart(block)
        case doc.Curves():
            return _curves(block)


def _cells(tag: str, texts: tuple[str, ...], numbers: tuple[int, ...]) -> str:
    right = [' class="n"' if i in numbers else "" for i in range(len(texts))]
    return "".join(f"<{tag}{c}>{user_text(text)}</{tag}>" for c, text in zip(right, texts))


# The charts: a plot of `_WIDTH` by `_HEIGHT` with room for the axes' texts around it


def _chart(chart: Chart) -> str:
    """Draw the stacked areas as paths, the highest sum first, so that each covers the rest."""
    line = chart.timeline
    if line.peak_step is None:
        return ""
    at = thinned_samples(line.total_bytes, _POINTS)
    sums = np.cumsum(line.live_bytes[:, at], axis=0)
    top = max(line.peak_bytes, 1)
    is_timed = bool(line.start_s[-1] > 0)
    edges = line.start_s if is_timed else np.arange(len(chart.steps) + 1.0)
    x = np.append(edges[at], edges[-1]) / edges[-1] * _WIDTH
    drawn: list[str] = []
    legend: list[str] = []
    for kind, heights, own in reversed(list(zip(KINDS, sums, line.live_bytes))):
        if own.any():
            y = _HEIGHT * (1 - heights / top)
            corners = "".join(
                f"V{y[i]:.1f}H{x[i + 1]:.1f}" if i == 0 or y[i] != y[i - 1] else f"H{x[i + 1]:.1f}"
                for i in range(len(at))
            )
            drawn.append(f'<path fill="{COLORS[kind]}" d="M0 {_HEIGHT}{corners}V{_HEIGHT}Z"/>')
            swatch = f'<i class="c" style="background:{COLORS[kind]}"></i>'
            name = "reserved by loops" if kind == "reserved" else kind
            legend.insert(0, f"<span>{swatch}{name} {format_bytes(int(own.max()))}</span>")
    first = 0
    for phase, run in itertools.groupby(step.phase for step in chart.steps):
        after = first + len(list(run))
        left, right = (edges[i] / edges[-1] * _WIDTH for i in (first, after))
        drawn.append(
            f'<rect x="{left:.1f}" y="{_HEIGHT + 3}" width="{max(right - left, 0.3):.1f}" height="7" '
            f'fill="{PHASE_COLORS[phase]}"><title>{phase}</title></rect>'
        )
        first = after
    peak_x = edges[line.peak_step] / edges[-1] * _WIDTH
    first_x, last_x = (edges[i] / edges[-1] * _WIDTH for i in line.same_height[1:])
    if last_x - first_x > 20:  # the height is reached several times
        bracket = f"M{first_x:.1f} -4v8m0 -4H{last_x:.1f}m0 -4v8"
        drawn.append(f'<path d="{bracket}" fill="none" stroke="currentColor"/>')
    anchor = "start" if peak_x < _WIDTH / 2 else "end"
    drawn.append(
        f'<circle cx="{peak_x:.1f}" cy="0" r="3.5" fill="currentColor"/>'
        f'<text x="{peak_x + (7 if anchor == "start" else -7):.1f}" y="-6" text-anchor="{anchor}">'
        f"peak {format_bytes(line.peak_bytes)}</text>"
    )
    end = (
        f"{format_seconds(float(edges[-1]))} (predicted)"
        if is_timed
        else f"operation {len(chart.steps)}"
    )
    said = f"live bytes over {len(chart.steps)} operations, at most {format_bytes(line.peak_bytes)}"
    legend += [
        f'<span><i class="c" style="background:{PHASE_COLORS[phase]}"></i>{phase}</span>'
        for phase in dict.fromkeys(step.phase for step in chart.steps)
    ]
    return (
        _plot("".join(drawn), top, "0 s" if is_timed else "operation 1", end, said)
        + f'<div class="legend">{" ".join(legend)} (bytes: the most of each kind)</div>'
    )


def _curves(curves: doc.Curves) -> str:
    """Draw the live bytes of several steps as lines over a common axis."""
    top = max([n_bytes for curve in curves.curves for _, n_bytes in curve], default=0) or 1
    end_s = max([at for curve in curves.curves for at, _ in curve], default=0.0) or 1.0
    drawn, legend = [], []
    for name, curve, color in zip(curves.names, curves.curves, _CURVE_COLORS):
        points = "".join(
            f"{'L' if i else 'M'}{at / end_s * _WIDTH:.1f} {_HEIGHT * (1 - n / top):.1f}"
            for i, (at, n) in enumerate(curve)
        )
        drawn.append(f'<path d="{points}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        peak_s, peak_bytes = max(curve, key=lambda corner: corner[1], default=(0.0, 0))
        x, y = peak_s / end_s * _WIDTH, _HEIGHT * (1 - peak_bytes / top)
        drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>')
        swatch = f'<i class="c" style="background:{color}"></i>'
        said = f"{user_text(name)}, peak {format_bytes(peak_bytes)}"
        legend.append(f"<span>{swatch}{said}</span>")
    end = f"{format_seconds(end_s)} (predicted)"
    plot = _plot("".join(drawn), top, "0 s", end, "live bytes over the steps, one line for each")
    said = "(predicted live bytes; dots mark the peaks; what loops reserve is included)"
    return f'{plot}<div class="legend">{" ".join(legend)} {said}</div>'


def _plot(drawn: str, top: int, start: str, end: str, said: str) -> str:
    """Return a drawing with its axes: bytes to the left, time below."""
    ticks = "".join(
        f'<path d="M0 {y}H{_WIDTH}" stroke="currentColor" stroke-opacity=".15"/>'
        f'<text x="-8" y="{y + 4}" text-anchor="end">{format_bytes(round(top * (1 - y / _HEIGHT)))}</text>'
        for y in (0, _HEIGHT // 2, _HEIGHT)
    )
    return (
        f'<div class="scroll"><svg viewBox="{-_LEFT} -22 {_WIDTH + _LEFT + 12} {_HEIGHT + 52}" '
        f'style="width:100%;max-width:{_WIDTH + _LEFT + 12}px" role="img" aria-label="{said}" '
        f'fill="currentColor">{ticks}{drawn}'
        f'<text x="0" y="{_HEIGHT + 25}">{start}</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT + 25}" text-anchor="end">{end}</text></svg></div>'
    )
