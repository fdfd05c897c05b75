"""A vision transformer in Flax Linen with dropout, so that regions contain random numbers.

Every block is a module with parameters of its own, applied as a function, so any transformation of functions
can wrap it. Dosovitskiy et al., 2021, with mean pooling in place of a class token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.zoo.layers import cross_entropy
from benchmarks.zoo.model import Model


@dataclass(frozen=True)
class Config:
    layers: int
    width: int
    heads: int
    patch: int
    classes: int
    batch: int
    image: int
    dtype: str = "float32"


SIZES = {
    "tiny": Config(2, 8, 2, 4, 4, 2, 8),
    "cpu": Config(12, 128, 4, 8, 64, 32, 64),
    "real": Config(32, 1280, 16, 14, 1000, 256, 224, "bfloat16"),  # ViT-H/14
}


class Stem(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, image):
        c = self.config
        x = nn.Conv(c.width, (c.patch, c.patch), (c.patch, c.patch), dtype=c.dtype)(image)
        x = x.reshape(c.batch, -1, c.width)
        positions = self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        return x + positions.astype(x.dtype)


class Block(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        c = self.config
        h = nn.LayerNorm(dtype=c.dtype)(x)
        h = nn.MultiHeadDotProductAttention(c.heads, dtype=c.dtype)(h)
        x = x + nn.Dropout(0.1, deterministic=False)(h)
        h = nn.gelu(nn.Dense(4 * c.width, dtype=c.dtype)(nn.LayerNorm(dtype=c.dtype)(x)))
        h = nn.Dense(c.width, dtype=c.dtype)(h)
        return x + nn.Dropout(0.1, deterministic=False)(h)


class Head(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(dtype=self.config.dtype)(x)
        return nn.Dense(self.config.classes, dtype=self.config.dtype)(jnp.mean(x, 1))


def model(size: str, layers: int | None = None) -> Model:
    config = replace(SIZES[size], layers=layers or SIZES[size].layers)
    stem, block, head = Stem(config), Block(config), Head(config)
    image_shape = (config.batch, config.image, config.image, 3)

    def build(wrap):
        @wrap
        def layer(params, x, key):
            return block.apply({"params": params}, x, rngs={"dropout": key})

        def loss(params, batch):
            x = stem.apply({"params": params["stem"]}, batch["image"])
            keys = jax.random.split(
                jax.random.wrap_key_data(batch["noise"], impl="rbg"), config.layers
            )
            for weights, key in zip(params["layers"], keys):
                x = layer(weights, x, key)
            return cross_entropy(head.apply({"params": params["head"]}, x), batch["labels"])

        return loss

    def init(key):
        first, last, dropout, *layers = jax.random.split(key, config.layers + 3)
        x, stem_variables = stem.init_with_output(first, jnp.zeros(image_shape))

        def init_layer(key):
            return block.init({"params": key, "dropout": dropout}, x)["params"]

        return {
            "stem": stem_variables["params"],
            "layers": [init_layer(k) for k in layers],
            "head": head.init(last, x)["params"],
        }

    def batch(key):
        image, labels, noise = jax.random.split(key, 3)
        return {
            "image": jax.random.normal(image, image_shape),
            "labels": jax.random.randint(labels, (config.batch,), 0, config.classes),
            "noise": jax.random.bits(noise, (4,), "uint32"),
        }

    return Model(f"vit-{size}", build, init, batch)
