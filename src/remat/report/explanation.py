"""An explanation: the data, with all renderings as methods."""

from __future__ import annotations

import dataclasses
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from remat.errors import MissingExtraError, ReportError
from remat.files import read_text, write_text
from remat.printing import printable
from remat.report import codec
from remat.report.difference import Difference, difference
from remat.report.fragment import to_fragment
from remat.report.groups import Group, groups
from remat.report.html import to_page
from remat.report.markdown import to_markdown
from remat.report.model import ExplanationData, Value
from remat.report.outline import outline
from remat.report.perfetto import to_trace
from remat.report.text import renderable, to_text
from remat.report.timeline import Timeline, live_at, timeline
from remat.units import counted, format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = "remat.explanation"
_MOST_FILE_BYTES = 2**30  # larger files are refused


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(ExplanationData):
    """What a step saves, recomputes and holds, and when; printed, drawn, saved and compared.

    >>> from remat.report.model import Step, Value
    >>> steps = (Step("sin", "forward", 1e-6), Step("mul", "backward", 1e-6))
    >>> cos = Value(0, "saved", "f32[1024]", 4096, ((0, 1),), primitive="cos", path="net")
    >>> explanation = Explanation("sin", values=(cos,), steps=steps)
    >>> print(explanation.groups()[0])
    net: cos  f32[1024]  4.0 KiB
    >>> Explanation.from_json(explanation.to_json()) == explanation
    True
    """

    def timeline(self) -> Timeline:
        """Return the live bytes at every step, by kind."""
        return timeline(self.values, self.steps)

    def groups(self) -> tuple[Group, ...]:
        """Return groups of values that differ only in the numbers of their paths, the largest first."""
        return groups(self.values)

    def live_at(self, step: int) -> tuple[Value, ...]:
        """Return the values that are live at a step, the largest first."""
        return live_at(self.values, step)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return printable(
            f"Explanation({self.title!r} on {self.target or self.platform or 'no device'}: "
            f"{counted(len(self.values), 'value')}, "
            f"{format_bytes(self.totals.residual_bytes)} of residuals, "
            f"{counted(len(self.steps), 'step')}, {counted(len(self.findings), 'finding')})"
        )

    def __rich__(self) -> object:
        return renderable(outline(self))

    def to_text(
        self, *, width: int = 110, color: bool = False, most: int = 20, brief: bool = False
    ) -> str:
        """Return it as text for the terminal, with tables of at most `most` lines.

        A brief text has the findings and the peak, and fits on one screen.
        """
        return to_text(outline(self, most=most, brief=brief), width=width, color=color)

    def to_markdown(self, *, most: int = 20) -> str:
        """Return it as Markdown, for a pull request or a page of documentation."""
        return to_markdown(outline(self, most=most))

    def to_html(self) -> str:
        """Return it as one self-contained, interactive HTML page."""
        return to_page(self)

    def _repr_html_(self) -> str:
        return to_fragment(outline(self, most=8, picture_first=True))

    def to_trace(self) -> str:
        """Return the timeline as Chrome's trace JSON, for https://ui.perfetto.dev."""
        return to_trace(self)

    def to_json(self) -> str:
        """Return all of it as the JSON that `from_json` reads."""
        return codec.dumps(self, FORMAT)

    @classmethod
    def from_json(cls, text: str) -> Explanation:
        """Read what `to_json` wrote.

        Raises:
          ReportError: it is not an explanation, is of a later version, damaged, or contradicts itself.
        """
        return codec.loads(text, cls, FORMAT)

    def diff(self, other: ExplanationData) -> Difference:
        """Return the differences from this explanation to another."""
        return difference(self, other)

    def plot(self, *, width: float = 9.0, height: float = 4.0) -> Figure:
        """Return the timeline as a matplotlib figure, of that size in inches.

        Raises:
          MissingExtraError: matplotlib is not installed.
        """
        # Loaded here, so that only plotting needs matplotlib.
        try:
            drawing = importlib.import_module("remat.report.plot")
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                f"plot() needs {error.name}, which is not installed: pip install 'remat[report]'."
            ) from error
        made: Figure = drawing.figure(self, width=width, height=height)
        return made

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a file in the format of its name: .html, .json, .md, .txt or .trace.json.

        An existing file of that name is replaced, in one step; it keeps its mode.

        Raises:
          ReportError: the name ends in none of these, or the file cannot be written.
        """
        name = os.fsdecode(path)
        for suffix, render in _RENDERINGS.items():
            if name.lower().endswith(suffix):
                return write_text(path, render(self), ReportError)
        raise ReportError(f"{name!r}: name the file {', '.join('*' + s for s in _RENDERINGS)}.")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Explanation:
        """Read a .json file that `save` wrote.

        Raises:
          ReportError: it cannot be read or is not an explanation.
        """
        text = read_text(path, ReportError, _MOST_FILE_BYTES)
        try:
            return cls.from_json(text)
        except ReportError as error:
            raise ReportError(f"{path}: {error}") from error


# The longest suffix first: .trace.json files are not .json files.
_RENDERINGS = {
    ".trace.json": Explanation.to_trace,
    ".json": Explanation.to_json,
    ".html": Explanation.to_html,
    ".md": Explanation.to_markdown,
    ".txt": Explanation.to_text,
}
