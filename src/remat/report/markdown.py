"""Blocks as GitHub-flavoured Markdown."""

from __future__ import annotations

import re

from remat.printing import printable
from remat.report import document as doc
from remat.report.document import Block, Chart, Document, columns_of_chart

# Markdown ignores an underscore inside a word.
_SPECIAL = re.compile(r"([\\`*\[\]<>|~&$]|(?<!\w)_|_(?!\w))")
# Characters that begin a list, a heading or a rule at the start of a paragraph.
_AT_START = re.compile(r"^(\s*)([-+#=]|[0-9]+[.)](?=\s|$))")
_EIGHTHS = "▁▂▃▄▅▆▇█"
_SIGNS = {"error": "❌", "warning": "⚠️", "info": "ℹ️"}


def to_markdown(document: Document) -> str:
    """Return a document as Markdown.

    >>> table = doc.Table(("kind", "bytes"), (("saved", "1 KiB"),), numbers=(1,))
    >>> print(to_markdown([doc.Heading("loss_fn"), table]))
    ## loss_fn
    <BLANKLINE>
    | kind | bytes |
    | --- | ---: |
    | saved | 1 KiB |
    <BLANKLINE>
    """
    return "\n\n".join(filter(None, map(_drawn, document))) + "\n"


def escaped(text: str) -> str:
    r"""Return a text escaped so that Markdown shows it unchanged.

    >>> print(escaped("a*b | <c> train.py:12 (loss)"))
    a\*b \| \<c\> train.py:12 (loss)
    """
    return _SPECIAL.sub(r"\\\1", printable(text))


def _with_backslash(start: re.Match[str]) -> str:
    return f"{start[1]}{start[2][:-1]}\\{start[2][-1]}"


def _drawn(block: Block) -> str:
    match block:
        case doc.Heading(text, level):
            return f"{'#' * level} {escaped(text)}"
        case doc.Paragraph(text):
            return _AT_START.sub(_with_backslash, escaped(text))
        case doc.Note(severity, text, next_step):
            said = f"- {_SIGNS[severity]} **{severity}**: {escaped(text)}"
            return said + (f"<br>→ {escaped(next_step)}" if next_step else "")
        case doc.Code(text):
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            shown = printable(text, keep="\n")
            return f"{fence}python\n{shown}\n{fence}"
        case doc.Items(texts):
            return "\n".join(f"- {escaped(text)}" for text in texts)
        case doc.Table(columns, rows, numbers, _):
            rule = ["---:" if i in numbers else "---" for i in range(len(columns))]
            lines = [[escaped(c) for c in columns], rule, *([escaped(c) for c in r] for r in rows)]
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)
        case doc.Chart():
            return _chart(block)
        case doc.Curves():
            return ""


def _chart(chart: Chart) -> str:
    columns = columns_of_chart(chart, 64)
    top = max([n_bytes for n_bytes, _, _ in columns], default=0) or 1
    marks = "".join(_EIGHTHS[min(7, n_bytes * 8 // top)] for n_bytes, _, _ in columns)
    phases = "".join(step.phase[0] for _, _, step in columns)
    legend = ", ".join(f"{p[0]} {p}" for p in dict.fromkeys(step.phase for step in chart.steps))
    return f"```text\n{marks}\n{phases}\n{legend}\n```"
