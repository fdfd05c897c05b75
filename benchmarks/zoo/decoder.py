"""A decoder of 16 layers, with which PyTorch's memory budgets and JAX's policies were measured.

The blocks are unrolled and pre-norm, with explicit causal attention and an MLP of width 4 D. There is nothing
but blocks: normalization has no weights, the batch is the embedded input, and the loss is a mean of squares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from benchmarks.zoo.layers import attention, normals, standardize
from benchmarks.zoo.model import Model


@dataclass(frozen=True)
class Config:
    layers: int
    width: int
    heads: int
    batch: int
    length: int


SIZES = {
    "tiny": Config(2, 8, 2, 2, 8),
    "cpu": Config(16, 256, 4, 4, 256),
    "real": Config(32, 4096, 32, 8, 2048),
}


def block(config: Config):
    def apply(params, x):
        batch, length, width = x.shape
        heads = (batch, length, config.heads, width // config.heads)
        h = standardize(x)
        q, k, v = (jnp.reshape(h @ params[name], heads) for name in "qkv")
        x = x + attention(q, k, v, causal=True) @ params["out"]
        return x + jax.nn.gelu(standardize(x) @ params["up"]) @ params["down"]

    return apply


def model(size: str, layers: int | None = None) -> Model:
    config = replace(SIZES[size], layers=layers or SIZES[size].layers)
    width = config.width

    def build(wrap):
        layer = wrap(block(config))

        def loss(params, x):
            for weights in params:
                x = layer(weights, x)
            return jnp.mean(x * x)

        return loss

    def init_layer(key):
        shapes = dict.fromkeys(("q", "k", "v", "out"), (width, width))
        shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
        return normals(key, shapes)

    def init(key):
        return [init_layer(k) for k in jax.random.split(key, config.layers)]

    def batch(key):
        return jax.random.normal(key, (config.batch, config.length, width))

    return Model(f"decoder-{size}", build, init, batch)
