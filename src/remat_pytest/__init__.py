"""The pytest plugin of `remat`: fixtures for assertions on memory.

It is a separate package, because pytest imports every plugin when it starts and importing `remat`
imports JAX. This package imports JAX only when a test requests a fixture.

    def test_fits(assert_peak_below):
        assert_peak_below(step, *args, limit="2GiB")

    def test_saves_the_attention_alone(assert_saves_only):
        assert_saves_only(loss, *args, names=["attn_*"])

    def test_memory(remat_snapshot):
        remat_snapshot(loss, *args)

A snapshot is a file in `__snapshots__` beside the test; `pytest --remat-update` rewrites it.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_UPDATE = "--remat-update"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes snapshots."""
    group = parser.getgroup("remat")
    group.addoption(_UPDATE, action="store_true", help="Rewrite the snapshots of remat_snapshot.")


@pytest.fixture(scope="session")
def assert_peak_below() -> Callable[..., None]:
    """Return `remat.testing.assert_peak_below(step, *args, limit="2GiB")`."""
    asserting: Callable[..., None] = importlib.import_module("remat.testing").assert_peak_below
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
    name = re.sub(r"[^A-Za-z0-9_.,=-]+", "_", request.node.name).strip("_")
    return Snapshot(request.path.parent / "__snapshots__" / request.path.stem / name, update)


class Snapshot:
    """The snapshots of one test. The fixture `remat_snapshot` returns it."""

    def __init__(self, place: Path, update: bool) -> None:
        self._place = place
        self._update = update
        self._n_taken = 0

    def __call__(self, f: Any, *args: Any, **kwargs: Any) -> None:
        """Compare what a function saves, or an explanation, with the snapshot.

        Args:
          f: a function or step as for `remat.explain`, or an explanation.
          *args, **kwargs: its arguments, which may be shapes. Nothing is compiled or run.
        """
        self._n_taken += 1
        suffix = "" if self._n_taken == 1 else f"-{self._n_taken}"
        path = self._place.with_name(f"{self._place.name}{suffix}.txt")
        if not hasattr(f, "totals"):
            explain = importlib.import_module("remat").explain
            f = explain(f, *args, compile=False, **kwargs)
        now = snapshot_text(f)
        before = path.read_text(encoding="utf-8") if path.exists() else None
        if self._update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(now, encoding="utf-8")
        elif before is None:
            pytest.fail(f"there is no snapshot {path}; write it with {_UPDATE}.", pytrace=False)
        elif before != now:
            pytest.fail(_changed(before, now, path), pytrace=False)


def snapshot_text(explanation: Any) -> str:
    """Return the text of the values that are saved, offloaded or recomputed, without source lines."""
    lines = [
        f"saved in all: {_sum(explanation, 'saved')} bytes",
        f"offloaded in all: {_sum(explanation, 'offloaded')} bytes",
        f"recomputed in all: {_sum(explanation, 'recomputed')} bytes",
        "",
    ]
    described = [
        (
            group.kind,
            -group.n_bytes,
            f"{', '.join(group.names)}: {group}" if group.names else str(group),
        )
        for group in explanation.groups()
        if group.kind in ("saved", "offloaded", "recomputed")
    ]
    lines += [f"{kind:<10}  {text}" for kind, _, text in sorted(described)]
    printable: Callable[[str], str] = importlib.import_module("remat.printing").printable
    return "\n".join(map(printable, lines)).rstrip() + "\n"


def _sum(explanation: Any, kind: str) -> int:
    return sum(value.n_bytes for value in explanation.values if value.kind == kind)


def _changed(before: str, now: str, path: Path) -> str:
    old, new = _saved(before), _saved(now)
    what = (
        "something else"
        if old == new
        else f"{abs(new - old)} bytes {'more' if new > old else 'less'}"
    )
    diff = "\n".join(
        difflib.unified_diff(
            before.splitlines(), now.splitlines(), "snapshot", "now", lineterm="", n=1
        )
    )
    return (
        f"this saves {what} for the backward pass than its snapshot {path}:\n\n{diff}\n\n"
        f"If the change is intended, rewrite the snapshot with {_UPDATE}."
    )


def _saved(text: str) -> int:
    match = re.match(r"saved in all: (\d+) bytes", text)
    return int(match[1]) if match else 0
