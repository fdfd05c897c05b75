"""Writing to the terminal and to files."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat import files, units
from remat.errors import ReportError
from remat.planner.plan_file import Plan
from remat.printing import printable
from remat.program.devices import Device
from remat.report.document import Block, Heading, Items, Paragraph
from remat.report.explanation import Explanation
from remat.report.model import ParetoPoint
from remat.report.outline import decisions_table, loops_in_words, percent, plan_in_words
from remat.report.text import to_text

_FEW_LINES = 6  # rows of each table in output for one screen; more no longer fit it
_MOST_LINES = 10_000  # rows of each table with --all
_PIPED_COLUMNS = 220  # columns if the output is not a terminal; fewer would break long rows


class _Rendered(Protocol):
    """An explanation, or the difference of two."""

    def to_json(self) -> str: ...
    def to_html(self) -> str: ...
    def to_text(self, *, width: int, color: bool, most: int, brief: bool) -> str: ...


def say(text: str) -> None:
    """Print to standard output, with "?" for characters that its encoding lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    click.echo(text.rstrip("\n").encode(encoding, "replace").decode(encoding))


def wrapped(text: str, width: int) -> str:
    """Return a text with longer lines broken; continuation lines are indented by four more columns.

    >>> print(wrapped("  one two three", 9))
      one two
          three
    """
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line,
            width,
            subsequent_indent=indent + 4 * " ",
            break_long_words=False,
            break_on_hyphens=False,
        ) or [line]
    return "\n".join(lines)


def say_written(path: str) -> None:
    """Print the name of a written file to standard error; standard output has only the result."""
    click.echo(printable(f"wrote {path}"), err=True)


def write_page(path: str, page: str) -> None:
    """Write an HTML page and name it on standard error."""
    files.write_text(path, page, ReportError)
    say_written(path)


def show(found: _Rendered, *, as_json: bool, html: str | None, all: bool) -> None:
    """Show a result in the form that the options request: text, JSON, or only a page in a file.

    Without `all` the text fits one screen.
    """
    if html is not None:
        write_page(html, found.to_html())
    if as_json:
        say(found.to_json())
    elif html is None:
        most = _MOST_LINES if all else _FEW_LINES
        say(found.to_text(width=width(), color=color(), most=most, brief=not all))
        if not all:
            say("\n--all shows every value; --html FILE writes an interactive page.")


@contextlib.contextmanager
def working(on: str) -> Iterator[None]:
    """Show a status line while something slow runs, if standard error is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(Text(printable(on))):
        yield


def width() -> int:
    """Return the number of columns to write, at least 60.

    Piped output is wide, so that each row of a table is one line.
    """
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return _PIPED_COLUMNS
    return max(60, shutil.get_terminal_size((110, 40)).columns)


def color() -> bool:
    """Return whether to write colors: on a terminal, unless NO_COLOR is set."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def decisions_as_text(explanation: Explanation, *, all: bool) -> str:
    """Return a table of the values that a plan recomputes, offloads and keeps: all groups or the largest."""
    if not explanation.decisions:
        return ""
    blocks: list[Block] = [
        Heading("What the plan does"),
        Paragraph(plan_in_words(explanation)),
        Items(loops_in_words(explanation)),
        decisions_table(explanation, _MOST_LINES if all else _FEW_LINES),
    ]
    return to_text(blocks, width=width(), color=color())


# --------------------------------------------------------------------------------------------------
# Points of peak against time


def points_of_plan(plan: Plan, label: str) -> tuple[ParetoPoint, ...]:
    """Return two points to compare: the step without rematerialization, and the plan."""

    def point(peak_bytes: int, flops: float, seconds: float, what: str) -> ParetoPoint:
        share = flops / plan.flops if plan.flops else 0.0
        return ParetoPoint(peak_bytes, share, seconds, what, verified=True)

    peak_bytes = plan.predicted_bytes if plan.peak_bytes is None else plan.peak_bytes
    final = dataclasses.replace(
        point(peak_bytes, plan.extra_flops, plan.extra_seconds, label),
        verified=plan.is_verified,
        chosen=True,
    )
    without = point(plan.peak_bytes_without_remat, 0.0, 0.0, "nothing rematerialized")
    return (final,) if without.peak_bytes == peak_bytes else (without, final)


def point_of_explanation(
    explanation: Explanation, label: str, *, chosen: bool = False
) -> ParetoPoint:
    """Return the point of a step with its compiled peak, or the predicted one if it was not compiled."""
    totals = explanation.totals
    memory = totals.compiled or totals.predicted
    return ParetoPoint(
        memory.peak_bytes,
        totals.extra_flops_share,
        totals.recompute_time_s,
        label,
        verified=totals.compiled is not None,
        chosen=chosen,
    )


_SAME_TIME = 1.01  # ratio of extra times up to which the lower peak decides; more hides more plans


def is_better(one: ParetoPoint, other: ParetoPoint) -> bool:
    """Return whether one plan has a lower peak than another and takes no more time."""
    return one.verified and one.peak_bytes < other.peak_bytes and _takes_no_longer(one, other)


def _takes_no_longer(one: ParetoPoint, other: ParetoPoint) -> bool:
    return one.extra_time_s <= _SAME_TIME * other.extra_time_s


def worth_choosing(points: Sequence[ParetoPoint]) -> dict[ParetoPoint, ParetoPoint | None]:
    """Return for each point a better one to choose instead; None if it is worth choosing itself.

    The chosen point, and points that are not plans (without extra time), always stay.
    """
    found: dict[ParetoPoint, ParetoPoint | None] = {}
    for i, point in enumerate(points):
        same = [
            p for p in points[:i] if p.peak_bytes == point.peak_bytes and _takes_no_longer(p, point)
        ]
        better = [p for p in points if is_better(p, point)]
        stays = point.chosen or not point.extra_time_s
        found[point] = None if stays else next(iter([*better, *same]), None)
    return found


def with_points(
    explanation: Explanation,
    points: Sequence[ParetoPoint],
    budgets: Mapping[str, str] | None = None,
) -> Explanation:
    """Return an explanation with the plans to choose from.

    If one of them has a lower peak than the plan that the step follows, it is suggested as the next step.

    Args:
      budgets: of the plans among the points, by label.
    """
    chosen = next(point for point in points if point.chosen)
    lower = [p for p in points if p.verified and p.peak_bytes < chosen.peak_bytes]
    findings = explanation.findings
    if lower:
        best = max(lower, key=lambda p: (is_better(p, chosen), p.peak_bytes))
        frees = units.format_bytes(chosen.peak_bytes - best.peak_bytes)
        costs = (
            "at no more time"
            if is_better(best, chosen)
            else f"for {percent(best.extra_flops_share)} more FLOPs than without rematerialization"
        )
        how = (
            f' Take it with budget="{budgets[best.label]}".'
            if budgets and best.label in budgets
            else ""
        )
        step = f"The {best.label} has {frees} less, {costs}.{how}"
        findings = tuple(
            dataclasses.replace(f, next_step=step) if f.code == "follows_plan" else f
            for f in findings
        )
    return dataclasses.replace(explanation, pareto=tuple(points), findings=findings)


# --------------------------------------------------------------------------------------------------
# Devices


def target_of(device: Device) -> str:
    """Return the text for a device as the value of `--target`."""
    return device.name if device.platform == "cpu" else f"{device.platform}:{device.name}"


def devices_as_json(known: Sequence[Device], here: Sequence[str]) -> str:
    """Return the figures of devices, and the kinds of the devices at hand, as JSON."""
    rows = [
        {
            "target": target_of(d),
            "memory_bytes": d.memory_bytes,
            "bandwidth_bytes_per_s": d.bandwidth_bytes_per_s,
            "flops_per_s": dict(d.flops),
        }
        for d in known
    ]
    content = {"format": "remat.devices", "version": 1, "at_hand": list(here), "known": rows}
    return json.dumps(content, indent=1)


def devices_as_text(known: Sequence[Device], here: Sequence[str]) -> str:
    """Return the figures of devices, and the kinds of the devices at hand, as a table."""
    at_hand = printable(f"at hand: {', '.join(sorted(set(here)))} × {len(here)}")
    table = Table(title=Text(at_hand), box=None)
    for column in ("target", "memory", "bandwidth", "bfloat16", "float32"):
        table.add_column(column, justify="left" if column == "target" else "right")
    for d in known:
        table.add_row(
            target_of(d),
            units.format_bytes(d.memory_bytes) if d.memory_bytes else "the host's",
            f"{d.bandwidth_bytes_per_s / 1e9:.0f} GB/s",
            f"{d.flops_per_s('bfloat16') / 1e12:.1f} TFLOP/s",
            f"{d.flops_per_s('float32') / 1e12:.1f} TFLOP/s",
        )
    console = Console(width=width(), file=io.StringIO(), force_terminal=color())
    with console.capture() as captured:
        console.print(table)
    return captured.get()
