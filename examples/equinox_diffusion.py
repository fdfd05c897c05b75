"""Train a small diffusion model in Equinox within a memory budget.

The data are points on a spiral; the model learns to predict the noise that was added to them.
`remat.equinox.fit` replaces `eqx.filter_jit` around the training step.

    python examples/equinox_diffusion.py
    remat explain examples/equinox_diffusion.py:problem
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import remat.equinox
from remat.units import format_bytes

BATCH = 2048


class Denoiser(eqx.Module):
    """A residual network of a point and a time."""

    enter: eqx.nn.Linear
    layers: list[eqx.nn.MLP]
    leave: eqx.nn.Linear

    def __init__(self, depth: int, width: int, key: jax.Array) -> None:
        first, last, *keys = jax.random.split(key, depth + 2)
        self.enter = eqx.nn.Linear(3, width, key=first)
        self.layers = [eqx.nn.MLP(width, width, width, 1, jax.nn.silu, key=k) for k in keys]
        self.leave = eqx.nn.Linear(width, 2, key=last)

    def __call__(self, point: jax.Array, time: jax.Array) -> jax.Array:
        x = self.enter(jnp.append(point, time))
        for layer in self.layers:
            x = x + layer(x)
        return self.leave(x)


def spiral(key: jax.Array, n: int) -> jax.Array:
    """Return points on a spiral."""
    angle = 3 * jnp.pi * jnp.sqrt(jax.random.uniform(key, (n,)))
    return jnp.stack([angle * jnp.cos(angle), angle * jnp.sin(angle)], axis=1) / 9


OPTIMIZER = optax.adam(1e-3)


def make(depth: int = 8, width: int = 128) -> tuple[Denoiser, Any]:
    """Return the model and the optimizer's state."""
    model = Denoiser(depth, width, jax.random.key(0))
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))


def loss(model: Denoiser, key: jax.Array) -> jax.Array:
    k_points, k_noise, k_time = jax.random.split(key, 3)
    points = spiral(k_points, BATCH)
    noise = jax.random.normal(k_noise, points.shape)
    time = jax.random.uniform(k_time, (BATCH,))
    mixed = jnp.sqrt(1 - time)[:, None] * points + jnp.sqrt(time)[:, None] * noise
    return jnp.mean((jax.vmap(model)(mixed, time) - noise) ** 2)


def step(model: Denoiser, state: Any, key: jax.Array) -> tuple[Denoiser, Any, jax.Array]:
    value, gradient = eqx.filter_value_and_grad(loss)(model, key)
    updates, state = OPTIMIZER.update(gradient, state)
    return eqx.apply_updates(model, updates), state, value


def problem() -> tuple[Callable, tuple[Any, ...]]:
    """Return the step and its arguments, for the command line."""
    return step, (*make(), jax.random.key(0))


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--budget", default="60%")
    options = parser.parse_args(arguments)
    model, state = make()
    train = remat.equinox.fit(step, budget=options.budget, donate_argnums=(0, 1))
    losses = []
    for number in range(options.steps):
        model, state, value = train(model, state, jax.random.key(number))
        losses.append(float(value))
        if number % 50 == 0:
            print(f"step {number:>4}  loss {losses[-1]:.3f}")
    (plan,) = train.plans
    print(f"peak {format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)}")
    return {"losses": losses, "plan": plan}


if __name__ == "__main__":
    main()
