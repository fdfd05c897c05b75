"""A Flax model's training step for the command line: `remat explain examples/flax_training.py:problem`.

The command line takes a function without arguments that returns a step and the step's arguments. The model is
an ordinary one, without annotations for rematerialization.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class Encoder(nn.Module):
    """Twelve layers of a small transformer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(12):
            h = nn.SelfAttention(num_heads=4)(nn.LayerNorm()(x))
            x = x + h
            h = nn.Dense(512)(nn.LayerNorm()(x))
            x = x + nn.Dense(128)(nn.gelu(h))
        return nn.Dense(10)(x.mean(1))


def problem() -> tuple[Callable, tuple[Any, ...]]:
    """Return the gradient step and the types of its arguments."""
    model = Encoder()

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        logits = model.apply(params, x)
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels])

    x = jax.ShapeDtypeStruct((8, 256, 128), jnp.float32)
    labels = jax.ShapeDtypeStruct((8,), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    return jax.value_and_grad(loss), (params, x, labels)
