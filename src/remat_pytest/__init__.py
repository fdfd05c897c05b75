"""The pytest plugin of `remat`: fixtures for assertions on memory.

It is a separate package, because pytest imports every plugin when it starts and importing `remat`
imports JAX. This package imports JAX only when a test requests a fixture.

    def test_fits(assert_peak_below):
        assert_peak_below(step, *args, limit="2GiB")

    def test_saves_only_the_attention(assert_saves_only):
        assert_saves_only(loss, *args, names=["attn_*"])

    def test_memory(remat_snapshot):
        remat_snapshot(loss, *args)

A snapshot is a file in `__snapshots__` beside the test; `pytest --remat-update` rewrites it.
`pytest --remat-peaks` ends the run with a table of the peaks that the tests asserted or took snapshots of.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from remat.report import Explanation, Group

_UPDATE = "--remat-update"
_PEAKS = "--remat-peaks"
_PEAK, _BEFORE = "remat_peak_bytes", "remat_peak_bytes_before"  # properties of a test's report


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that write snapshots and show peaks."""
    group = parser.getgroup("remat")
    group.addoption(_UPDATE, action="store_true", help="Rewrite the snapshots of remat_snapshot.")
    group.addoption(
        _PEAKS, action="store_true", help="Show the peaks of the tests, the largest first."
    )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Show the peaks of tests, the largest first, and their differences from the snapshots."""
    if not config.getoption(_PEAKS):
        return
    peaks = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            properties = dict(getattr(report, "user_properties", ()))
            if getattr(report, "when", "") == "call" and _PEAK in properties:
                peaks.append((properties[_PEAK], properties.get(_BEFORE), report.nodeid))
    terminalreporter.section("remat: peaks, the largest first")
    if not peaks:
        terminalreporter.line("No test used assert_peak_below or remat_snapshot.")
    format_bytes = importlib.import_module("remat.units").format_bytes if peaks else str
    for peak, before, test in sorted(peaks, key=lambda row: (-row[0], row[2])):
        change = "" if before is None else "unchanged"
        if before is not None and before != peak:
            sign = "+" if peak > before else "-"
            share = f" ({100 * (peak / before - 1):+.1f} %)" if before else ""
            change = f"{sign}{format_bytes(abs(peak - before))}{share}"
        terminalreporter.line(f"{format_bytes(peak):>12}  {change:<22}  {test}")


@pytest.fixture
def assert_peak_below(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return `remat.testing.assert_peak_below(step, *args, limit="2GiB")`."""

    def asserting(step: Any, *args: Any, limit: str | int, real: bool = False) -> None:
        __tracebackhide__ = True
        testing = importlib.import_module("remat.testing")
        peak = testing.peak_bytes(step, *args, real=real)
        _note_peak(request, peak)
        testing.check_peak(peak, limit)

    return asserting


@pytest.fixture(scope="session")
def assert_saves_only() -> Callable[..., None]:
    """Return `remat.testing.assert_saves_only(f, *args, names=["attn_*"], limit="1MiB")`."""
    asserting: Callable[..., None] = importlib.import_module("remat.testing").assert_saves_only
    return asserting


@pytest.fixture
def remat_snapshot(request: pytest.FixtureRequest) -> Snapshot:
    """Return a callable that compares what a function or step saves with the test's snapshot."""
    update = bool(request.config.getoption(_UPDATE))
    return Snapshot(_place(request), update, lambda peak: _note_peak(request, peak))


def _place(request: pytest.FixtureRequest) -> Path:
    """Return the path of a test's snapshots, without a suffix."""
    name = re.sub(r"[^A-Za-z0-9_.,=-]+", "_", request.node.name).strip("_")
    return request.path.parent / "__snapshots__" / request.path.stem / name


def _note_peak(request: pytest.FixtureRequest, peak: int) -> None:
    """Record the largest peak of a test in its report, with that of the last --remat-update."""
    properties = dict(request.node.user_properties)
    peak = max(peak, properties.get(_PEAK, 0))
    path = _place(request)
    path = path.with_name(f"{path.name}.peak")
    if request.config.getoption(_UPDATE):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{peak} bytes\n", encoding="utf-8")
    noted = {**properties, _PEAK: peak}
    if path.exists():
        written = re.match(r"(\d+) bytes", path.read_text(encoding="utf-8"))
        noted |= {_BEFORE: int(written[1])} if written else {}
    request.node.user_properties[:] = noted.items()


class Snapshot:
    """The snapshots of one test. The fixture `remat_snapshot` returns it."""

    def __init__(self, place: Path, update: bool, note_peak: Callable[[int], None]) -> None:
        self._place = place
        self._update = update
        self._note_peak = note_peak
        self._n_taken = 0

    def __call__(self, f: Any, *args: Any, **kwargs: Any) -> None:
        """Compare the saved values of a function, or an explanation, with the snapshot.

        Args:
          f: a function or step as for `remat.explain`, or an explanation.
          *args, **kwargs: its arguments, which may be shapes. Nothing is compiled or run.
        """
        __tracebackhide__ = True
        self._n_taken += 1
        suffix = "" if self._n_taken == 1 else f"-{self._n_taken}"
        path = self._place.with_name(f"{self._place.name}{suffix}.txt")
        if not hasattr(f, "totals"):
            explain = importlib.import_module("remat").explain
            f = explain(f, *args, compile=False, **kwargs)
        self._note_peak(f.totals.predicted.peak_bytes)
        now = snapshot_text(f)
        before = path.read_text(encoding="utf-8") if path.exists() else None
        if self._update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(now, encoding="utf-8")
        elif before is None:
            pytest.fail(f"there is no snapshot {path}; write it with {_UPDATE}.", pytrace=False)
        elif before != now:
            pytest.fail(_changed(before, now, path, _sources(f)), pytrace=False)


_KINDS = ("saved", "offloaded", "recomputed")


def snapshot_text(explanation: Explanation) -> str:
    """Return the text of the values that are saved, offloaded or recomputed, without source lines."""
    lines = [_total(explanation, kind) for kind in _KINDS]
    described = sorted(
        (group.kind, -group.n_bytes, _line(group))
        for group in explanation.groups()
        if group.kind in _KINDS
    )
    return "\n".join([*lines, "", *(line for _, _, line in described)]).rstrip() + "\n"


def _line(group: Group) -> str:
    """Return the line of a snapshot for a group of values: "saved  3 × mlp: tanh  f32[8]  96 B"."""
    printable: Callable[[str], str] = importlib.import_module("remat.printing").printable
    return printable(f"{group.kind:<10}  {group}")


def _total(explanation: Explanation, kind: str) -> str:
    n_bytes = _sum(explanation, kind)
    shown = importlib.import_module("remat.units").format_bytes(n_bytes)
    return f"{kind} in all: {shown}" + ("" if n_bytes < 1024 else f" ({n_bytes} bytes)")


def _sources(explanation: Explanation) -> dict[str, str]:
    """Return for each line of a snapshot's text where its values are computed."""
    return {_line(group): group.source for group in explanation.groups()}


def _sum(explanation: Explanation, kind: str) -> int:
    return sum(value.n_bytes for value in explanation.values if value.kind == kind)


def _changed(before: str, now: str, path: Path, sources: dict[str, str]) -> str:
    old, new = _saved(before), _saved(now)
    shown = importlib.import_module("remat.units").format_bytes
    what = (
        "something else"
        if old == new
        else f"{shown(abs(new - old))} {'more' if new > old else 'less'}"
    )
    lines = difflib.unified_diff(
        before.splitlines(), now.splitlines(), "snapshot", "now", lineterm="", n=1
    )
    diff = "\n".join(line + _at(line, sources) for line in lines)
    return (
        f"this saves {what} for the backward pass than its snapshot {path}:\n\n{diff}\n\n"
        f"If the change is intended, rewrite the snapshot with {_UPDATE}."
    )


def _at(line: str, sources: dict[str, str]) -> str:
    """Return where the values of an added line of a diff are computed."""
    source = sources.get(line[1:], "") if line.startswith("+") else ""
    printable: Callable[[str], str] = importlib.import_module("remat.printing").printable
    return f"  at {printable(source)}" if source else ""


def _saved(text: str) -> int:
    match = re.match(r"saved in all: .*?(\d+) (?:bytes|B)\b", text)
    return int(match[1]) if match else 0
