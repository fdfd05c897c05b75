"""The examples on loops, at a small size."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def strict_types() -> None:
    """Allow JAX's usual conversions, since the examples are written for users."""


def example(name: str) -> Callable:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_the_adjoint_of_the_wave_equation_is_exact() -> None:
    found = example("wave_equation")(["--grid", "48", "--steps", "200", "--checkpoints", "9"])
    assert found["slope"] == pytest.approx(found["expected"], rel=1e-3)
    assert found["temporaries"] < 25 * 2 * 4 * 48**2


@pytest.mark.slow
def test_the_source_of_waves_is_found() -> None:
    options = ["--grid", "48", "--steps", "250", "--checkpoints", "9", "--iterations", "15"]
    found = example("wave_equation")(options)
    assert found["last"] < 1e-4 * found["first"]
    assert found["error"] < 0.05


@pytest.mark.slow
def test_a_recurrent_network_remembers() -> None:
    found = example("long_rnn")(["--steps", "300", "--width", "32", "--iterations", "20"])
    assert found["history"][-1] < 0.2 * found["history"][0]
    temporaries = found["temporaries"]
    assert temporaries["remat.scan"] < temporaries["jax.lax.scan"] / 8
    assert temporaries["remat.scan, checkpoints=50"] < temporaries["remat.scan"]


def test_the_rates_of_an_equation_are_found() -> None:
    found = example("ode")(["--steps", "300", "--iterations", "4"])
    assert jnp.allclose(found["rates"], found["truth"], rtol=1e-3)
    assert found["history"][-1] < 1e-5 * found["history"][0]
