"""A Llama-style decoder: one scan over layers of grouped-query attention and SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from benchmarks.zoo.layers import attention, cross_entropy, dense, normal, normals, rms_norm, tokens
from benchmarks.zoo.model import Model


@dataclass(frozen=True)
class Config:
    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int
    batch: int
    length: int
    dtype: str = "float32"


SIZES = {
    "tiny": Config(2, 16, 4, 2, 32, 16, 2, 8),
    "cpu": Config(12, 128, 8, 2, 384, 512, 4, 256),
    "gpu": Config(16, 2048, 16, 8, 5632, 32000, 8, 1024, "bfloat16"),
    "real": Config(32, 4096, 32, 8, 14336, 128256, 1, 4096, "bfloat16"),  # Llama 3, 8 B
}


def rotary(x: jax.Array) -> jax.Array:
    """Rotate pairs of features by an angle proportional to the position. Su et al., 2021."""
    _, length, _, features = x.shape
    rates = 500_000.0 ** (-jnp.arange(0, features, 2) / features)
    angles = jnp.arange(length)[:, None, None] * rates
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def block(config: Config):
    def apply(x, params):
        batch, length, _ = x.shape
        h = rms_norm(x, params["scale_1"])
        q = dense(h, params["q"]).reshape(batch, length, config.heads, -1)
        k, v = (
            dense(h, params[name]).reshape(batch, length, config.key_heads, -1) for name in "kv"
        )
        x = x + dense(attention(rotary(q), rotary(k), v, causal=True), params["out"])
        h = rms_norm(x, params["scale_2"])
        h = jax.nn.silu(dense(h, params["gate"])) * dense(h, params["up"])
        return x + dense(h, params["down"]), None

    return apply


def model(size: str) -> Model:
    config = SIZES[size]
    width = config.width
    key_width = width // config.heads * config.key_heads

    def build(wrap):
        layer = wrap(block(config))

        def loss(params, batch):
            inputs, labels = batch[:, :-1], batch[:, 1:]
            x = params["tokens"][inputs].astype(config.dtype)
            x, _ = jax.lax.scan(layer, x, params["layers"])
            return cross_entropy(dense(rms_norm(x, params["scale"]), params["logits"]), labels)

        return loss

    def init_layer(key):
        shapes = {
            "q": (width, width),
            "k": (width, key_width),
            "v": (width, key_width),
            "out": (width, width),
            "gate": (width, config.hidden),
            "up": (width, config.hidden),
            "down": (config.hidden, width),
        }
        return normals(key, shapes) | {"scale_1": jnp.ones(width), "scale_2": jnp.ones(width)}

    def init(key):
        embedding, layers, logits = jax.random.split(key, 3)
        return {
            "tokens": normal(embedding, config.vocabulary, width, fan_in=width),
            "layers": jax.vmap(init_layer)(jax.random.split(layers, config.layers)),
            "scale": jnp.ones(width),
            "logits": normal(logits, width, config.vocabulary),
        }

    def batch(key):
        return tokens(key, (config.batch, config.length + 1), config.vocabulary)

    return Model(f"llama-{size}", build, init, batch)
