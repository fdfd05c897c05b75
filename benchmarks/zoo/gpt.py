"""GPT-2: unrolled pre-norm transformer layers between a token embedding and tied logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from benchmarks.zoo.layers import attention, cross_entropy, dense, layer_norm, normal, tokens
from benchmarks.zoo.model import Model


@dataclass(frozen=True)
class Config:
    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int
    dtype: str = "float32"


SIZES = {
    "tiny": Config(2, 8, 2, 16, 2, 8),
    "cpu": Config(12, 128, 4, 512, 8, 128),
    "gpu": Config(12, 1024, 16, 50304, 16, 1024, "bfloat16"),
    "real": Config(48, 1600, 25, 50304, 8, 1024, "bfloat16"),  # GPT-2 XL
}


def block(config: Config):
    def apply(params, x):
        batch, length, _ = x.shape
        h = layer_norm(x, params["scale_1"], params["shift_1"])
        qkv = dense(h, params["qkv"]) + params["bias_qkv"].astype(x.dtype)
        q, k, v = jnp.unstack(qkv.reshape(batch, length, 3, config.heads, -1), axis=2)
        x = x + dense(attention(q, k, v, causal=True), params["out"])
        h = layer_norm(x, params["scale_2"], params["shift_2"])
        h = jax.nn.gelu(dense(h, params["up"]) + params["bias_up"].astype(x.dtype))
        return x + dense(h, params["down"]) + params["bias_down"].astype(x.dtype)

    return apply


def model(size: str, layers: int | None = None) -> Model:
    config = replace(SIZES[size], layers=layers or SIZES[size].layers)
    width = config.width

    def build(wrap):
        layer = wrap(block(config))

        def loss(params, batch):
            inputs, labels = batch[:, :-1], batch[:, 1:]
            x = (params["tokens"][inputs] + params["positions"]).astype(config.dtype)
            for weights in params["layers"]:
                x = layer(weights, x)
            x = layer_norm(x, params["scale"], params["shift"])
            return cross_entropy(dense(x, params["tokens"].T), labels)

        return loss

    def init_layer(key):
        qkv, out, up, down = jax.random.split(key, 4)
        return {
            "qkv": normal(qkv, width, 3 * width),
            "bias_qkv": jnp.zeros(3 * width),
            "out": normal(out, width, width),
            "up": normal(up, width, 4 * width),
            "bias_up": jnp.zeros(4 * width),
            "down": normal(down, 4 * width, width),
            "bias_down": jnp.zeros(width),
            "scale_1": jnp.ones(width),
            "shift_1": jnp.zeros(width),
            "scale_2": jnp.ones(width),
            "shift_2": jnp.zeros(width),
        }

    def init(key):
        embedding, positions, layers = jax.random.split(key, 3)
        return {
            "tokens": normal(embedding, config.vocabulary, width, fan_in=width),
            "positions": normal(positions, config.length, width, fan_in=width),
            "layers": [init_layer(k) for k in jax.random.split(layers, config.layers)],
            "scale": jnp.ones(width),
            "shift": jnp.zeros(width),
        }

    def batch(key):
        return tokens(key, (config.batch, config.length + 1), config.vocabulary)

    return Model(f"gpt-{size}", build, init, batch)
