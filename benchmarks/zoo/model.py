"""Models of the zoo: a loss with its natural blocks, and its arguments.

A model has one training loss in two forms, which compute the same. `loss(region)` wraps the whole loss.
`blocks(wrap)` wraps each block (a layer, a residual block, the body of a scan), as is common with
`jax.checkpoint` by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

Loss: TypeAlias = Callable[[Any, Any], jax.Array]  # of parameters and a batch
Transformation: TypeAlias = Callable[[Callable], Callable]

SIZES = ("tiny", "cpu", "real")


def unchanged(fun: Callable) -> Callable:
    """Return the function unchanged."""
    return fun


@dataclass(frozen=True)
class Model:
    """A training problem.

    Attributes:
      name: the name of the architecture, and its size.
      build: returns the loss for a transformation of blocks.
      init: returns the parameters for a random key.
      batch: returns the arrays of one batch for a random key.
    """

    name: str
    build: Callable[[Transformation], Loss]
    init: Callable[[jax.Array], Any]
    batch: Callable[[jax.Array], Any]

    def loss(self, region: Transformation = unchanged) -> Loss:
        """Return the training loss, wrapped as a whole by `region`."""
        return region(self.build(unchanged))

    def blocks(self, wrap: Transformation) -> Loss:
        """Return the same loss with every block wrapped by `wrap`."""
        return self.build(wrap)

    def arguments(self) -> tuple[Any, Any]:
        """Return the types of the parameters and of a batch; nothing is allocated."""
        key = jax.eval_shape(lambda: _key(0))
        return jax.eval_shape(self.init, key), jax.eval_shape(self.batch, key)

    def example(self, seed: int = 0) -> tuple[Any, Any]:
        """Return parameters and a batch as arrays."""
        params, batch = jax.random.split(_key(seed))
        return jax.jit(self.init)(params), jax.jit(self.batch)(batch)


def _key(seed: int) -> jax.Array:
    """Return a key of the generator that is one operation and compiles fast with many weights."""
    return jax.random.key(seed, impl="rbg")


def step(loss: Loss) -> Callable[[Any, Any], tuple[jax.Array, Any]]:
    """Return the part of a training step in which activations are live: the loss and its gradient."""
    return jax.value_and_grad(loss)


def train_step(loss: Loss, *, rate: float = 1e-3) -> Callable:
    """Return a training step with Adam: from (parameters, moments, step number, batch) to the new ones.

    `moments` is a pair of pytrees like the parameters (`jax.tree.map(jnp.zeros_like, params)`). Donate the
    first two arguments to update them in place. Kingma & Ba, 2015, algorithm 1.
    """
    decay, decay_squares, epsilon = 0.9, 0.999, 1e-8

    def update(params, moments, n, batch):
        value, gradient = jax.value_and_grad(loss)(params, batch)
        mean, squares = moments
        mean = jax.tree.map(lambda m, g: decay * m + (1 - decay) * g, mean, gradient)
        squares = jax.tree.map(
            lambda s, g: decay_squares * s + (1 - decay_squares) * g * g, squares, gradient
        )
        n = n + 1
        unbias, unbias_squares = (1 - beta ** n.astype(float) for beta in (decay, decay_squares))

        def moved(p, m, s):
            return (p - rate * (m / unbias) / (jnp.sqrt(s / unbias_squares) + epsilon)).astype(
                p.dtype
            )

        return jax.tree.map(moved, params, mean, squares), (mean, squares), n, value

    return update
