"""A language model of stacked LSTM layers, each a scan over time.

The block is one time step. Hochreiter & Schmidhuber, 1997, with forget gates.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from benchmarks.zoo.layers import cross_entropy, dense, normal, tokens
from benchmarks.zoo.model import Model


@dataclass(frozen=True)
class Config:
    layers: int
    width: int
    vocabulary: int
    batch: int
    length: int
    dtype: str = "float32"


SIZES = {
    "tiny": Config(2, 8, 16, 2, 8),
    "cpu": Config(2, 128, 64, 32, 512),
    "real": Config(4, 2048, 32768, 128, 1024, "bfloat16"),
}


def cell(weights, state, x):
    """Take one step: from (weights, (hidden, memory), input) to the new state and the output."""
    hidden, memory = state
    gates = dense(jnp.concatenate([x, hidden], -1), weights["kernel"])
    gates = gates + weights["bias"].astype(x.dtype)
    take, forget, show, new = jnp.split(gates, 4, -1)
    memory = jax.nn.sigmoid(forget + 1) * memory + jax.nn.sigmoid(take) * jnp.tanh(new)
    hidden = jax.nn.sigmoid(show) * jnp.tanh(memory)
    return (hidden, memory), hidden


def model(size: str) -> Model:
    config = SIZES[size]
    width = config.width

    def build(wrap):
        step = wrap(cell)

        def loss(params, batch):
            inputs, labels = batch[:-1], batch[1:]  # time first
            x = params["tokens"][inputs].astype(config.dtype)
            rest = jnp.zeros((config.batch, width), config.dtype)
            for weights in params["layers"]:
                _, x = jax.lax.scan(
                    lambda state, x, weights=weights: step(weights, state, x), (rest, rest), x
                )
            return cross_entropy(dense(x, params["logits"]), labels)

        return loss

    def init_layer(key):
        return {"kernel": normal(key, 2 * width, 4 * width), "bias": jnp.zeros(4 * width)}

    def init(key):
        embedding, layers, logits = jax.random.split(key, 3)
        return {
            "tokens": normal(embedding, config.vocabulary, width, fan_in=width),
            "layers": [init_layer(k) for k in jax.random.split(layers, config.layers)],
            "logits": normal(logits, width, config.vocabulary),
        }

    def batch(key):
        return tokens(key, (config.length + 1, config.batch), config.vocabulary)

    return Model(f"lstm-{size}", build, init, batch)
