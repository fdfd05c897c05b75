"""What the model says of a step's regions, against the program that follows from it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import remat
from remat.planner.marked.levels import Levels
from remat.planner.marked.regions import Application
from remat.planner.step import Step
from remat.program.costs import Roofline
from remat.program.targets import target


def step_of(loss, *args):
    return Step(jax.value_and_grad(loss), args, {}, target(None), {})


@remat.auto
def with_skips(weights, x):
    """Activations that are calls to JAX (`custom_jvp`), used again by later layers."""
    kept = []
    for w in weights:
        x = jax.nn.relu(x @ w)
        kept.append(x)
    for w, skip in zip(weights, reversed(kept)):
        x = jax.nn.relu((x + skip) @ w)
    return jnp.mean(x**2)


@pytest.mark.parametrize("share", [0.8, 0.6, 0.5])
def test_a_program_recomputes_what_the_model_says(share):
    weights, x = [jnp.eye(64)] * 6, jnp.ones((1000, 64))
    step = step_of(with_skips, weights, x)
    levels = Levels(step, Roofline(target(None).device))
    level = levels.level(0)
    problem = level.problem(False)
    budget = int(share * problem.peak_bytes)
    answer, choice = problem.solve(budget), level.solve(False, budget)
    plain = step.trace(Application({}, recomputes=False)).flops()
    planned = step.trace(Application(choice.decisions, choice.loops)).flops()
    elementwise = 40 * x.size
    assert answer.extra_flops > 0
    assert planned - plain == pytest.approx(answer.extra_flops, rel=0.02, abs=elementwise)
