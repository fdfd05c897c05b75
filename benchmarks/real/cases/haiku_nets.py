"""dm-haiku: recurrent and convolutional networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import optax

from benchmarks.real.case import Case, Wrap, scan_bodies, unchanged, whole


def lstm() -> Case:
    """A language model of two LSTM layers, unrolled over a sequence, with one step of Adam."""
    vocabulary, width, length, batch = 128, 128, 64, 32

    def logits(ids: jax.Array) -> jax.Array:
        core = hk.DeepRNN([hk.LSTM(width), jax.nn.relu, hk.LSTM(width)])
        embedded = hk.Embed(vocabulary, width)(ids)
        out, _ = hk.dynamic_unroll(core, embedded, core.initial_state(batch))
        return hk.BatchApply(hk.Linear(vocabulary))(out)

    model = hk.without_apply_rng(hk.transform(logits))
    optimizer = optax.adam(1e-3)
    ids = jax.random.randint(jax.random.key(1), (length, batch), 0, vocabulary)
    params = jax.jit(model.init)(jax.random.key(0), ids)

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        predicted = model.apply(params, ids)[:-1]
        return optax.softmax_cross_entropy_with_integer_labels(predicted, ids[1:]).mean()

    def make(wrap: Wrap) -> Callable:
        def step(params: Any, state: Any, ids: jax.Array) -> Any:
            value, gradient = jax.value_and_grad(wrap(loss))(params, ids)
            updates, state = optimizer.update(gradient, state)
            return optax.apply_updates(params, updates), state, value

        return step

    step = make(unchanged)
    args = params, optimizer.init(params), ids
    return Case(step, args, scan_bodies(step, group=8) | whole(make))
