"""Graphs, accountant and solvers stay free of JAX: they run on hand-made graphs alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import remat.planner

_FOLDER = Path(remat.planner.__file__).parent
_ALLOWED = {
    "json_lines": {"remat.errors"},
    "plan_file": {"remat.errors", "remat.units", "remat.planner.json_lines"},
    "graph": {"remat.errors", "remat.planner.json_lines"},
    "simulate": {"remat.errors", "remat.planner.graph"},
    "mincut": {"remat.errors"},
    "chain": {"remat.errors", "remat.units", "remat.planner.graph", "remat.planner.simulate"},
    "frontier": {"remat.planner.simulate"},
    "search": {"remat.errors", "remat.planner.mincut", "remat.planner.simulate"},
    "evict": {"remat.planner.simulate"},
    "schedule": {
        "remat.errors",
        "remat.units",
        "remat.planner",
        "remat.planner.evict",
        "remat.planner.graph",
        "remat.planner.mincut",
        "remat.planner.simulate",
    },
}


@pytest.mark.parametrize("module", _ALLOWED)
def test_a_solver_imports_numpy_scipy_and_earlier_stages_only(module: str) -> None:
    imported = set()
    for node in ast.walk(ast.parse((_FOLDER / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module))
    ours = {name for name in imported if name.split(".")[0] == "remat"}
    assert ours <= _ALLOWED[module]
    assert not {name for name in imported if name.split(".")[0] in ("jax", "jaxlib")}
