"""A report as a sequence of blocks, which separate content from format.

`outline` turns an explanation into blocks, `difference` does the same for a comparison, and `text`,
`markdown` and `fragment` render the blocks, so that all formats have the same content.

Texts in blocks may come from user code and contain any characters. Each renderer passes them through
`remat.printing.printable` and escapes the special characters of its format.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from remat.report.model import Severity, Step
from remat.report.timeline import Timeline


@dataclasses.dataclass(frozen=True)
class Heading:
    """A title of the document (level 1) or of a part of it (level 2)."""

    text: str
    level: int = 2


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """A few sentences."""

    text: str


@dataclasses.dataclass(frozen=True)
class Note:
    """A finding: its severity, the message, and the next step."""

    severity: Severity
    text: str
    next_step: str


@dataclasses.dataclass(frozen=True)
class Code:
    """Lines of Python to copy."""

    text: str


@dataclasses.dataclass(frozen=True)
class Items:
    """A list of sentences."""

    texts: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of texts; `numbers` are the columns that are aligned to the right.

    If the table is too wide, `optional` columns are left out, and texts of the column `below[0]` are put
    under those of the column `below[1]`.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...] = ()
    optional: tuple[int, ...] = ()
    below: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Chart:
    """The bytes that are live over the steps."""

    timeline: Timeline
    steps: tuple[Step, ...]


@dataclasses.dataclass(frozen=True)
class Curves:
    """The live bytes of several steps over their time: for each its name, and pairs of seconds and bytes."""

    names: tuple[str, ...]
    curves: tuple[tuple[tuple[float, int], ...], ...]


Block = Heading | Paragraph | Note | Code | Items | Table | Chart | Curves
Document = Sequence[Block]


def columns_of_chart(chart: Chart, n_columns: int) -> list[tuple[int, int, Step]]:
    """Return a chart of few columns: the most bytes of each, how many of them are not only reserved,
    and the step that has them."""
    total_bytes = chart.timeline.total_bytes
    used_bytes = total_bytes - chart.timeline.bytes_of("reserved")
    n_steps = len(chart.steps)
    columns = []
    for i in range(min(n_columns, n_steps)):
        first = i * n_steps // min(n_columns, n_steps)
        after = (i + 1) * n_steps // min(n_columns, n_steps)
        at = first + int(total_bytes[first:after].argmax())
        columns.append((int(total_bytes[at]), int(used_bytes[at]), chart.steps[at]))
    return columns
