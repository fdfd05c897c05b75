"""The solvers import NumPy, SciPy and five small modules, and are fast to import."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import remat.solvers

_MODULES = sorted(Path(remat.solvers.__file__).parent.glob("*.py"))
_BELOW = ("remat.errors", "remat.units", "remat.files", "remat.printing", "remat.json_lines")


@pytest.mark.parametrize("path", _MODULES, ids=lambda path: path.stem)
def test_a_solver_imports_nothing_above_the_solvers(path: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module))
    ours = {name for name in imported if name.split(".")[0] == "remat"}
    assert all(name.startswith("remat.solvers") for name in ours - set(_BELOW))
    assert not {name for name in imported if name.split(".")[0] in ("jax", "jaxlib")}


def test_importing_remat_loads_no_large_part_of_scipy() -> None:
    code = "import sys, remat; print([m for m in sys.modules if m in ('scipy.optimize', 'scipy.sparse')])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"
