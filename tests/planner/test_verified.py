"""What the compiler says is the last word about a plan, whatever it says and however it says it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat
from planner.region_cases import normal
from remat.cache import Cache
from remat.planner import step as planned_step
from remat.program.compiled import Memory, OutOfMemory

QUIET = {"cache": False, "progress": False}


def body(x: Any, w: Any) -> tuple[Any, None]:
    h = x @ w
    return jnp.sin(jnp.tanh(h)) * jnp.cos(x), None


def scanned(ws: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.scan(body, x, ws)[0] ** 2)


def unrolled(ws: Any, x: Any) -> Any:
    for i in range(len(ws)):
        x, _ = body(x, ws[i])
    return jnp.mean(x**2)


STEPS: dict[str, Callable] = {
    "a whole step": jax.value_and_grad(unrolled, argnums=(0, 1)),
    "an unrolled region": jax.value_and_grad(remat.auto(unrolled), argnums=(0, 1)),
    "a scanned region": jax.value_and_grad(remat.auto(scanned), argnums=(0, 1)),
}


def arguments(n_layers: int = 5) -> tuple:
    return normal(n_layers, 32, 32), normal(512, 32)


def refusing_above(limit: int, monkeypatch: Any) -> list:
    """Have the compiler refuse what needs more, as a TPU's does; return the list of its answers."""
    real = planned_step.compile_for_analysis
    answers: list = []

    def compile(*args: Any, **options: Any) -> Any:
        memory = real(*args, **options)
        assert isinstance(memory, Memory)
        answers.append(memory if memory.peak_bytes <= limit else OutOfMemory(limit + 1, limit))
        return answers[-1]

    monkeypatch.setattr(planned_step, "compile_for_analysis", compile)
    return answers


def peak_without_remat(step: Callable) -> int:
    return remat.plan(step, *arguments(), budget="100%", **QUIET).peak_bytes


# Budgets


@pytest.mark.parametrize("name", STEPS)
def test_no_plan_exceeds_its_budget_where_the_step_as_written_is_refused(name, monkeypatch):
    step = STEPS[name]
    whole = peak_without_remat(step)
    refusing_above(int(0.95 * whole), monkeypatch)
    for share in (0.9, 0.8):
        budget = int(share * whole)
        made = remat.plan(step, *arguments(), budget=budget, **QUIET)
        assert made.is_verified and made.peak_bytes <= budget


def test_a_cached_plan_above_the_budget_is_not_returned(tmp_path):
    step = STEPS["an unrolled region"]
    above = remat.plan(step, *arguments(), budget="100%", **QUIET)

    class Wrong(Cache):
        def get(self, kind: str, key: str) -> Any:
            return {"plan": above.to_json()} if kind == "plan" else super().get(kind, key)

    options = {"cache": Wrong(tmp_path), "progress": False}
    made = remat.plan(step, *arguments(), budget=above.peak_bytes - 1, **options)
    assert made.peak_bytes < above.peak_bytes
