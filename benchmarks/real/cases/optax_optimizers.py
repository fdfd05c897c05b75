"""optax: a step of L-BFGS with its line search, and an accumulated step of MultiSteps, on Flax models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.real.case import Case, Wrap, checkpoints, unchanged


class _Regression(nn.Module):
    """A residual multilayer perceptron."""

    wrap: Wrap = unchanged

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = nn.Sequential if self.wrap is unchanged else self.wrap(nn.Sequential)
        x = nn.Dense(64)(x)
        for i in range(6):
            x = x + block([nn.Dense(64), nn.gelu, nn.Dense(64), jnp.tanh], name=f"block_{i}")(x)
        return nn.Dense(1)(x)


def _losses() -> tuple[Callable, Any, dict[str, Callable]]:
    x = jax.random.normal(jax.random.key(0), (1024, 16))
    params = _Regression().init(jax.random.key(1), x)

    def loss_of(model: nn.Module, wrap: Wrap = unchanged) -> Callable:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            return jnp.mean((model.apply(params, x)[:, 0] - jnp.sin(x.sum(1))) ** 2)

        return wrap(loss)

    alternatives = {}
    for label, wrap in checkpoints():
        policy = wrap.keywords["policy"]
        block = lambda module, policy=policy: nn.remat(module, policy=policy)  # noqa: E731
        alternatives[f"each block, {label}"] = loss_of(_Regression(block))
        if label != "dots, no batch":
            alternatives[f"whole loss, {label}"] = loss_of(_Regression(), wrap)
    return loss_of(_Regression()), (params, x), alternatives


def lbfgs() -> Case:
    """One step of L-BFGS with the zoom line search, which evaluates the gradient in a loop."""
    optimizer = optax.lbfgs(memory_size=4)

    def step_of(loss: Callable) -> Callable:
        def step(params: Any, state: Any, x: jax.Array) -> Any:
            f = lambda params: loss(params, x)  # noqa: E731
            value, gradient = optax.value_and_grad_from_state(f)(params, state=state)
            updates, state = optimizer.update(
                gradient, state, params, value=value, grad=gradient, value_fn=f
            )
            return optax.apply_updates(params, updates), state, value

        return step

    loss, (params, x), alternatives = _losses()
    args = params, optimizer.init(params), x
    return Case(step_of(loss), args, {k: step_of(f) for k, f in alternatives.items()})


def multisteps() -> Case:
    """Four microbatches in a scan; the last one updates the parameters."""
    optimizer = optax.MultiSteps(optax.adamw(1e-3), every_k_schedule=4)

    def step_of(loss: Callable) -> Callable:
        def step(params: Any, state: Any, x: jax.Array) -> Any:
            def microbatch(carry: Any, x: jax.Array) -> Any:
                params, state = carry
                value, gradient = jax.value_and_grad(loss)(params, x)
                updates, state = optimizer.update(gradient, state, params)
                return (optax.apply_updates(params, updates), state), value

            return jax.lax.scan(microbatch, (params, state), x)

        return step

    loss, (params, x), alternatives = _losses()
    args = params, optimizer.init(params), jnp.stack([x, -x, 2 * x, x + 1])
    return Case(step_of(loss), args, {k: step_of(f) for k, f in alternatives.items()})
