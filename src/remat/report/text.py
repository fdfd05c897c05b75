"""Blocks for the terminal, drawn by rich."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.constrain import Constrain
from rich.containers import Lines
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from remat.printing import printable
from remat.report import document as doc
from remat.report.document import Block, Chart, Document, columns_of_chart
from remat.units import format_bytes

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ROWS, _MOST_COLUMNS = 7, 72
_LABEL = 12  # columns left of the chart
_NARROW = 100  # columns of the console below which tables omit optional columns
_MOST_OF_A_LINE = 110  # columns of a paragraph; tables are as wide as the console
_ENDLESS = 10_000  # columns of a table whose lines are not broken
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
            return Constrain(Text(printable(text)), _MOST_OF_A_LINE)
        case doc.Note(severity, text, next_step):
            said = Text.assemble(
                (severity, _STYLES[severity]),
                "  ",
                printable(text),
            )
            if next_step:
                said.append(f"\n→ {printable(next_step)}")
            return Constrain(Padding(said, (0, 0, 0, 2)), _MOST_OF_A_LINE)
        case doc.Code(text):
            return Padding(Text(printable(text, keep="\n"), "bold"), (0, 0, 0, 4))
        case doc.Items(texts):
            items = [Padding(Text(printable(text)), (0, 0, 0, 2)) for text in texts]
            return Constrain(Group(*items), _MOST_OF_A_LINE)
        case doc.Table() | doc.Chart():
            return _Drawn(block)
        case doc.Curves():
            return Group()  # overlapping lines cannot be drawn with characters


def _table(table: doc.Table) -> RichTable:
    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, column in enumerate(table.columns):
        right = i in table.numbers
        drawn.add_column(
            column, justify="right" if right else "left", no_wrap=right, overflow="fold"
        )
    for row in table.rows:
        drawn.add_row(*(_Cell(printable(cell, keep="\n")) for cell in row))
    return drawn


class _Cell(Text):
    """A cell's text, whose long words are broken as `broken_at_slashes` does."""

    def wrap(self, console: Console, width: int, *args: Any, **options: Any) -> Lines:
        broken = "\n".join(broken_at_slashes(line, width) for line in self.plain.split("\n"))
        return Text(broken).wrap(console, width, *args, **options)


def broken_at_slashes(text: str, width: int) -> str:
    """Return a text with line breaks in words wider than `width`.

    They are after slashes, before line numbers, before keys and attributes if still too wide, and last
    after underscores.

    >>> broken_at_slashes("flax/linen/attention.py:146, from net.py:3", 20)
    'flax/linen/\\nattention.py:146, from net.py:3'
    >>> broken_at_slashes("params['LayerNorm_0']['scale']", 16)
    "params\\n['LayerNorm_0']\\n['scale']"
    """
    words = []
    for word in text.split(" "):
        lines = [""]
        parts = re.split(r"(?<=/)", word)
        if any(cell_len(part) > width for part in parts):
            parts = re.split(r"(?<=/)|(?=:\d)", word)
        if any(cell_len(part) > width for part in parts):
            parts = re.split(r"(?<=/)|(?=:\d)|(?=\[)|(?=\.[a-z_])", word)
        if any(cell_len(part) > width for part in parts):
            parts = re.split(r"(?<=/)|(?=:\d)|(?=\[)|(?=\.[a-z_])|(?<=_)", word)
        for part in parts:
            if part and lines[-1] and cell_len(lines[-1] + part) > width:
                lines.append("")
            lines[-1] += part
        words.append("\n".join(lines))
    return " ".join(words)


class _Drawn:
    """A chart or a table, drawn for the width of the console."""

    def __init__(self, block: Chart | doc.Table) -> None:
        self.block = block

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterable[RenderableType]:
        if isinstance(self.block, Chart):
            yield _chart(self.block, options.max_width)
            return
        table = self.block
        if options.max_width < _NARROW:
            table = _without(table, table.optional)
        drawn = _table(table)
        if table.below is not None:
            without_breaks = Measurement.get(console, options.update(max_width=_ENDLESS), drawn)
            if without_breaks.maximum > options.max_width:
                drawn = _table(_stacked(table, *table.below))
        yield drawn


def _without(table: doc.Table, columns: Sequence[int]) -> doc.Table:
    """Return a table without some columns."""
    left = [i for i in range(len(table.columns)) if i not in columns]
    below = table.below
    return doc.Table(
        tuple(table.columns[i] for i in left),
        tuple(tuple(row[i] for i in left) for row in table.rows),
        tuple(at for at, i in enumerate(left) if i in table.numbers),
        below=(left.index(below[0]), left.index(below[1]))
        if below and set(below) <= set(left)
        else None,
    )


def _stacked(table: doc.Table, lower: int, upper: int) -> doc.Table:
    """Return a table with the texts of one column below those of another."""

    def both(row: tuple[str, ...]) -> tuple[str, ...]:
        text = "\n".join(filter(None, (row[upper], row[lower])))
        return tuple(text if i == upper else cell for i, cell in enumerate(row))

    columns = tuple(
        f"{name}, {table.columns[lower]}" if i == upper else name
        for i, name in enumerate(table.columns)
    )
    rows = tuple(map(both, table.rows))
    return _without(doc.Table(columns, rows, table.numbers), (lower,))


def _chart(chart: Chart, width: int) -> RenderableType:
    columns = columns_of_chart(chart, min(_MOST_COLUMNS, width - _LABEL))
    top = max([n_bytes for n_bytes, _, _ in columns], default=0) or 1
    drawn = Text()
    # A loop may reserve as much in all of its iterations: the peak is the first of them, as in the text.
    peak = next((i for i, (n_bytes, _, _) in enumerate(columns) if n_bytes == top), None)
    for row in reversed(range(_ROWS)):
        label = format_bytes(top) if row == _ROWS - 1 else ("0 B" if row == 0 else "")
        drawn.append(f"{label:>10} ┤")
        for i, (n_bytes, used_bytes, _) in enumerate(columns):
            used, height = (round(n / top * _ROWS * 8) - 8 * row for n in (used_bytes, n_bytes))
            if used <= 0 < height:
                drawn.append("░", "dim")
            else:
                mark = _EIGHTHS[min(8, max(0, used))]
                drawn.append(mark, "bold red" if i == peak else "cyan")
        drawn.append("\n")
    drawn.append(" " * _LABEL)
    for _, _, step in columns:
        drawn.append(step.phase[0], _PHASE_STYLES[step.phase])
    phases = dict.fromkeys(step.phase for step in chart.steps)
    drawn.append("\n" + " " * _LABEL)
    said = [f"{phase[0]} {phase}" for phase in phases]
    if any(used_bytes < n_bytes for n_bytes, used_bytes, _ in columns):
        said.append("░ reserved by a loop")
    drawn.append(", ".join(said), "dim")
    return drawn
