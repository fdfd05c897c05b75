"""Common behaviour of all schedules: refusals, and the printed cost."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from remat.errors import ScheduleError
from remat.loops import schedules
from remat.loops.schedules import Binomial, Hierarchical, Level, Multilevel, Online


@pytest.mark.parametrize(
    "path", sorted(Path(schedules.__file__).parent.glob("*.py")), ids=lambda path: path.stem
)
def test_schedules_import_no_jax(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imports for alias in node.names]
    names += [node.module or "" for node in froms]
    assert not [name for name in names if name.split(".")[0] in ("jax", "jaxlib")]
    ours = [name for name in names if name.startswith("remat")]
    assert all(name.startswith(("remat.errors", "remat.loops.schedules.")) for name in ours)


def test_schedules_print_their_cost() -> None:
    assert "25 forward steps (2.50 per step)" in str(Binomial(10, 3))
    assert "online: 10 steps, 3 checkpoints: 25 forward steps" in str(Online(10, 3))
    by_levels = str(Hierarchical.of_states(100, 3, [Level(5, 2, 2)]))
    assert "3 checkpoints, 5 checkpoints in level 1: " in by_levels and "7 writes" in by_levels
    assert str(Binomial(0, 1)).startswith("binomial: 0 steps, 1 checkpoint: 0 forward steps,")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Binomial(-1, 3),
        lambda: Binomial(3, 0),
        lambda: Online(3, 0),
        lambda: Multilevel(10, (3, 3)),
        lambda: Multilevel(10, ()),
        lambda: Multilevel.balanced(10, 0),
        lambda: Binomial(2.5, 3),  # type: ignore[arg-type]
    ],
)
def test_impossible_schedules_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ScheduleError):
        make()
