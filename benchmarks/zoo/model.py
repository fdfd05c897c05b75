"""What a model of the zoo is: a loss with its natural blocks, and what it is called with.

A model gives one training loss in two forms. `loss(region)` puts all of it into one region, which
is how a planner is used; `blocks(wrap)` wraps each block (a layer, a residual block, the body of a
scan), which is how people place `jax.checkpoint` by hand. Both compute the same.
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
    """The transformation that does nothing."""
    return fun


@dataclass(frozen=True)
class Model:
    """A training problem.

    Attributes:
      name: of the architecture, and its size.
      build: from a transformation of blocks to the loss.
      init: from a random key to the parameters.
      batch: from a random key to the arrays of one batch.
    """

    name: str
    build: Callable[[Transformation], Loss]
    init: Callable[[jax.Array], Any]
    batch: Callable[[jax.Array], Any]

    def loss(self, region: Transformation = unchanged) -> Loss:
        """The training loss, all of it inside one `region`."""
        return region(self.build(unchanged))

    def blocks(self, wrap: Transformation) -> Loss:
        """The same loss with every block inside `wrap`."""
        return self.build(wrap)

    def arguments(self) -> tuple[Any, Any]:
        """Shapes and types of the parameters and of a batch; nothing is allocated."""
        key = jax.eval_shape(lambda: _key(0))
        return jax.eval_shape(self.init, key), jax.eval_shape(self.batch, key)

    def example(self, seed: int = 0) -> tuple[Any, Any]:
        """Parameters and a batch as arrays."""
        params, batch = jax.random.split(_key(seed))
        return jax.jit(self.init)(params), jax.jit(self.batch)(batch)


def _key(seed: int) -> jax.Array:
    """A key of the generator that is one operation, and compiles fast where there are many weights."""
    return jax.random.key(seed, impl="rbg")


def step(loss: Loss) -> Callable[[Any, Any], tuple[jax.Array, Any]]:
    """The part of a training step in which activations live: the loss and its gradient."""
    return jax.value_and_grad(loss)


def train_step(loss: Loss, *, rate: float = 1e-3) -> Callable:
    """A whole step with Adam: (parameters, moments, number of the step, batch) to the new ones.

    `moments` is a pair of trees like the parameters (`jax.tree.map(jnp.zeros_like, params)`). Donate
    the first two arguments to update them in place. Kingma & Ba, 2015, algorithm 1.
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
