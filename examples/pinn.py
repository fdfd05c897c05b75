"""Solve the heat equation with a physics-informed network, recomputing the values of nested derivatives.

The loss contains the second derivative of the network with respect to its input, so its gradient is a third
derivative, which keeps the values of all passes of the inner derivatives. One `remat.checkpoint` around the
residual of the equation makes the gradient recompute them. It may be inside or outside of `jax.jacfwd`,
`jax.hessian` and `jax.vmap`.

    python examples/pinn.py
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax

import remat
from remat.testing import peak_bytes
from remat.units import format_bytes

WIDTH, DEPTH = 64, 4


def network(params: Any, t: jax.Array, x: jax.Array) -> jax.Array:
    """Return u(t, x), which vanishes at x = 0 and x = 1."""
    h = jnp.stack([t, x])
    for w, b in params[:-1]:
        h = jnp.tanh(h @ w + b)
    w, b = params[-1]
    return (h @ w + b)[0] * x * (1 - x)


def residual(params: Any, t: jax.Array, x: jax.Array) -> jax.Array:
    """Return u_t - u_xx / 10."""
    u_t = jax.grad(network, argnums=1)(params, t, x)
    u_xx = jax.hessian(network, argnums=2)(params, t, x)
    return u_t - 0.1 * u_xx


def loss(residual: Any, params: Any, points: jax.Array) -> jax.Array:
    """Return the sum of the mean squares of the residual and of the error at time 0."""
    inside = jax.vmap(lambda p: residual(params, p[0], p[1]))(points)
    start = jax.vmap(lambda x: network(params, 0.0 * x, x) - jnp.sin(jnp.pi * x))(points[:, 1])
    return jnp.mean(inside**2) + 10 * jnp.mean(start**2)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--points", type=int, default=2048)
    options = parser.parse_args(arguments)
    keys = jax.random.split(jax.random.key(0), DEPTH + 1)
    sizes = [2, *[WIDTH] * DEPTH, 1]
    params = [
        (jax.random.normal(k, (m, n)) / m**0.5, jnp.zeros(n))
        for k, m, n in zip(keys, sizes, sizes[1:])
    ]
    optimizer = optax.adam(2e-3)

    def step_with(residual: Any) -> Any:
        def step(params: Any, state: Any, points: jax.Array) -> tuple[Any, Any, jax.Array]:
            of = lambda params, points: loss(residual, params, points)  # noqa: E731
            value, gradient = jax.value_and_grad(of)(params, points)
            updates, state = optimizer.update(gradient, state)
            return optax.apply_updates(params, updates), state, value

        return jax.jit(step)

    state = optimizer.init(params)
    points = jax.random.uniform(jax.random.key(1), (options.points, 2))
    plain = peak_bytes(step_with(residual), params, state, points)
    step = step_with(remat.checkpoint(residual))
    peak = peak_bytes(step, params, state, points)
    print(f"peak {format_bytes(peak)}, {format_bytes(plain)} without rematerialization")
    losses = []
    for number in range(options.steps):
        points = jax.random.uniform(jax.random.key(number), (options.points, 2))
        params, state, value = step(params, state, points)
        losses.append(float(value))
    exact = jnp.exp(-0.1 * jnp.pi**2 * 0.5)
    found = network(params, jnp.float32(0.5), jnp.float32(0.5))
    print(f"u(0.5, 0.5) = {found:.3f}; exactly {exact:.3f}")
    return {"losses": losses, "peak": peak, "plain": plain}


if __name__ == "__main__":
    main()
