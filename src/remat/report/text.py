"""Blocks for the terminal, drawn by rich."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from remat.printing import printable
from remat.report import document as doc
from remat.report.document import Block, Chart, Document, columns_of_chart
from remat.units import format_bytes

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ROWS, _COLUMNS = 7, 72
_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}
_PHASE_STYLES = {"forward": "blue", "backward": "magenta", "recompute": "yellow", "update": "green"}


def to_text(document: Document, *, width: int = 110, color: bool = False) -> str:
    """Return a document as plain text, or with terminal colours.

    >>> print(to_text([doc.Heading("A title"), doc.Paragraph("A sentence.")]).strip())
    A title
    A sentence.
    """
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        color_system="truecolor" if color else None,
        legacy_windows=False,
        _environ={},
    )
    with console.capture() as captured:
        console.print(renderable(document), markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def renderable(document: Document) -> RenderableType:
    """Return a document for a rich console, as `rich.print(explanation)` shows it."""
    return Group(*(_drawn(block) for block in document))


def _drawn(block: Block) -> RenderableType:
    match block:
        case doc.Heading(text, level):
            style = "bold underline" if level == 1 else "bold"
            return Padding(Text(printable(text), style), (0 if level == 1 else 1, 0, 0, 0))
        case doc.Paragraph(text):
            return Text(printable(text))
        case doc.Note(severity, code, text, next_step):
            said = Text.assemble(
                (severity, _STYLES[severity]),
                "  ",
                printable(text),
                ("  [" + printable(code) + "]", "dim"),
            )
            if next_step:
                said.append(f"\n→ {printable(next_step)}")
            return Padding(said, (0, 0, 0, 2))
        case doc.Table(columns, rows, numbers):
            return _table(columns, rows, numbers)
        case doc.Chart():
            return _chart(block)


def _table(
    columns: tuple[str, ...], rows: tuple[tuple[str, ...], ...], numbers: tuple[int, ...]
) -> RichTable:
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, column in enumerate(columns):
        right = i in numbers
        table.add_column(
            column, justify="right" if right else "left", no_wrap=right, overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _chart(chart: Chart) -> RenderableType:
    columns = columns_of_chart(chart, _COLUMNS)
    top = max([n_bytes for n_bytes, _ in columns], default=0) or 1
    heights = [round(n_bytes / top * _ROWS * 8) for n_bytes, _ in columns]
    drawn = Text()
    for row in reversed(range(_ROWS)):
        label = format_bytes(top) if row == _ROWS - 1 else ("0 B" if row == 0 else "")
        drawn.append(f"{label:>10} ┤")
        for height, (n_bytes, _) in zip(heights, columns):
            mark = _EIGHTHS[min(8, max(0, height - 8 * row))]
            drawn.append(mark, "bold red" if n_bytes == top else "cyan")
        drawn.append("\n")
    drawn.append(" " * 12)
    for _, step in columns:
        drawn.append(step.phase[0], _PHASE_STYLES[step.phase])
    phases = dict.fromkeys(step.phase for step in chart.steps)
    drawn.append("\n" + " " * 12)
    drawn.append(", ".join(f"{phase[0]} {phase}" for phase in phases), "dim")
    return drawn
