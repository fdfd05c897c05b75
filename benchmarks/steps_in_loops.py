"""Temporaries of training steps in a loop on a GPU that is not attached, with checkpoints and with plans.

    JAX_PLATFORMS=cpu python -m benchmarks steps_in_loops
    JAX_PLATFORMS=cpu python -m benchmarks steps_in_loops --target gpu:a100

The loss has eight unrolled blocks of three matrix products with the same weights; the loop updates the
weights once a step. GPU compilers compute gradients of weights as late as they can, and keep what these are
computed from. Plans are of the step with nothing marked. Nothing is executed. It requires JAX's CUDA plugin
(`pip install --no-deps jax-cuda12-plugin==VERSION jax-cuda12-pjrt==VERSION`, with JAX's version).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import remat
from benchmarks.stack import MIB, block
from remat.program.targets import place, target as find_target

BLOCKS, WIDTH, BATCH, STEPS = 8, 256, 16384, 3
PERCENTS = (60, 30)

WAYS: Mapping[str, Callable[[Callable], Callable]] = {
    "without": lambda f: f,
    "jax.checkpoint": jax.checkpoint,
    "remat.checkpoint": remat.checkpoint,
}


def loss_of(layer: Callable) -> Callable:
    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        for w in weights:
            x = layer((w, w, w), x)
        return jnp.sum(x * x)

    return loss


def one_gradient(layer: Callable) -> Callable:
    return lambda weights, x: jax.grad(loss_of(layer))(weights, x[0])


def on_one_batch(layer: Callable) -> Callable:
    """Return steps on the same batch, with the values of the loss."""

    def steps(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(weights: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            value, gradient = jax.value_and_grad(loss_of(layer))(weights, batch)
            return weights - 1e-3 * gradient, value

        batch = x[0]
        return jax.lax.scan(step, weights, None, length=STEPS)

    return steps


def on_batches(layer: Callable) -> Callable:
    def steps(weights: jax.Array, x: jax.Array) -> jax.Array:
        def step(weights: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return weights - 1e-3 * jax.grad(loss_of(layer))(weights, x), None

        return jax.lax.scan(step, weights, x)[0]

    return steps


PROGRAMS: Mapping[str, Callable[[Callable], Callable]] = {
    "one gradient": one_gradient,
    "steps on one batch": on_one_batch,
    "a batch for each step": on_batches,
}


def temporaries(step: Callable, args: tuple[Any, ...]) -> int:
    compiled = jax.jit(step).lower(*args).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def main(options: Sequence[str] = ()) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks steps_in_loops")
    parser.add_argument("--target", default="gpu:h100", help="the device: 'gpu:h100'")
    name = parser.parse_args(list(options)).target
    try:
        target = find_target(name)
    except remat.TargetError as error:
        print(f"NOT RUN: {error}")
        return {"not_run": str(error)}
    args = (
        jax.ShapeDtypeStruct((BLOCKS, WIDTH, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((STEPS, BATCH, WIDTH), jnp.float32),
    )
    rows = []
    for program, build in PROGRAMS.items():
        row: dict[str, Any] = {"program": program}
        for way, wrap in WAYS.items():
            row[way] = temporaries(build(wrap(block)), place(args, target))
        rows.append(row)
        ratios = ", ".join(f"{way} {row[way] / row['without']:.2f}" for way in WAYS)
        print(f"{program}: {row['without'] / MIB:.0f} MiB; {ratios}", flush=True)
        for percent in PERCENTS:
            row[f"{percent}%"] = planned(build(block), args, percent, name)
            print(f"  a budget of {percent} %: {row[f'{percent}%']}", flush=True)
    return {"target": name, "programs": rows}


def planned(step: Callable, args: tuple[Any, ...], percent: int, target: str) -> dict[str, Any]:
    try:
        plan = remat.plan(
            step, *args, budget=f"{percent}%", target=target, cache=False, progress=False
        )
    except remat.BudgetError as error:
        return {"refused": str(error)}
    return {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "extra_flops": plan.extra_flops / plan.flops,
    }
