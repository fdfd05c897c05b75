"""The programs in `examples/`, at a small size. Those on loops are in `tests/loops/test_examples.py`."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import jax
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def strict_types() -> None:
    """Allow JAX's usual conversions, since the examples are written for users."""


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up annotations there
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        pytest.skip(f"needs {error.name}")
    return module


def test_a_flax_language_model_trains_within_its_budget_and_resumes(tmp_path):
    main = example("flax_lm").main
    options = [
        "--steps",
        "3",
        "--layers",
        "1",
        "--budget",
        "90%",
        "--save",
        str(tmp_path / "s.npz"),
    ]
    first, second = main(options), main(options)
    assert first["plan"].peak_bytes <= first["plan"].budget_bytes
    assert second["losses"][-1] < first["losses"][0]


def test_an_equinox_diffusion_model_trains_within_its_budget():
    found = example("equinox_diffusion").main(["--steps", "8", "--budget", "80%"])
    assert found["plan"].peak_bytes <= found["plan"].budget_bytes
    assert found["losses"][-1] < found["losses"][0]


def test_a_physics_informed_network_needs_less_memory_with_its_residual_checkpointed():
    found = example("pinn").main(["--steps", "20", "--points", "256"])
    assert found["peak"] < found["plain"]
    assert found["losses"][-1] < found["losses"][0]


def test_data_parallel_training_keeps_a_budget_for_each_device():
    found = example("data_parallel").main(["--steps", "2", "--batch", "1024", "--budget", "85%"])
    assert found["devices"] == len(jax.devices())
    assert found["plan"].peak_bytes <= found["plan"].budget_bytes
    assert found["losses"][-1] < found["losses"][0]


def test_the_cells_of_the_notebook_run_in_order():
    notebook = json.loads((EXAMPLES / "explain.ipynb").read_text(encoding="utf-8"))
    names: dict = {}
    shown = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            *statements, last = ast.parse("".join(cell["source"])).body
            is_value = isinstance(last, ast.Expr)
            body = statements if is_value else [*statements, last]
            exec(compile(ast.Module(body, []), "explain.ipynb", "exec"), names)
            if is_value:
                shown.append(eval(ast.unparse(last), names))
    assert any("<svg" in value._repr_html_() for value in shown if hasattr(value, "_repr_html_"))
    assert names["planned"].totals.predicted.peak_bytes > 0
    before, after = names["explanation"].totals, names["planned"].totals
    assert after.compiled.peak_bytes <= 0.6 * before.compiled.peak_bytes
