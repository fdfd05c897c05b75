"""A U-Net for segmentation: the expanding path reads the activations of the contracting path.

The graph is not a chain: values of skip connections stay live across all levels in between. Ronneberger et
al., 2015, with group normalization and SAME padding. The block is a pair of convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from benchmarks.zoo.layers import convolution, cross_entropy, group_norm, normal
from benchmarks.zoo.model import Model


@dataclass(frozen=True)
class Config:
    channels: tuple[int, ...]  # of each level, from the top
    classes: int
    batch: int
    image: int
    groups: int = 8
    dtype: str = "float32"


SIZES = {
    "tiny": Config((8, 16), 4, 2, 8),
    "cpu": Config((16, 32, 64, 128), 8, 4, 128),
    "gpu": Config((64, 128, 256, 512), 21, 8, 512, dtype="bfloat16"),
    "real": Config((64, 128, 256, 512, 1024), 21, 16, 512, dtype="bfloat16"),
}


def pair(config: Config):
    """Apply convolution, normalization and ReLU twice."""

    def apply(params, x):
        for kernel, scale, shift in params:
            x = jax.nn.relu(group_norm(convolution(x, kernel), scale, shift, config.groups))
        return x

    return apply


def halve(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def double(x, kernel):
    """Repeat each pixel in both directions, then mix channels."""
    return convolution(jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), kernel)


def model(size: str) -> Model:
    config = SIZES[size]

    def build(wrap):
        block = wrap(pair(config))

        def loss(params, batch):
            x = batch["image"].astype(config.dtype)
            skips = []
            for weights in params["down"]:
                x = block(weights, x)
                skips.append(x)
                x = halve(x)
            x = block(params["bottom"], x)
            for weights in params["up"]:
                x = double(x, weights["mix"])
                x = block(weights["pair"], jnp.concatenate([skips.pop(), x], -1))
            return cross_entropy(convolution(x, params["logits"]), batch["labels"])

        return loss

    def init_convolution(key, size, before, after):
        return normal(key, size, size, before, after, fan_in=size * size * before)

    def init_pair(key, before, after):
        return [
            (init_convolution(k, 3, n, after), jnp.ones(after), jnp.zeros(after))
            for k, n in zip(jax.random.split(key), (before, after))
        ]

    def init(key):
        *levels, bottom = config.channels
        down_key, bottom_key, up_key, mix_key, logits_key = jax.random.split(key, 5)
        widths = list(zip([3, *levels], levels))
        rising = list(zip(config.channels[:0:-1], levels[::-1]))
        up_keys = zip(jax.random.split(up_key, len(levels)), jax.random.split(mix_key, len(levels)))
        return {
            "down": [
                init_pair(k, *w) for k, w in zip(jax.random.split(down_key, len(levels)), widths)
            ],
            "bottom": init_pair(bottom_key, levels[-1], bottom),
            "up": [
                {"mix": init_convolution(m, 1, below, own), "pair": init_pair(k, 2 * own, own)}
                for (k, m), (below, own) in zip(up_keys, rising)
            ],
            "logits": init_convolution(logits_key, 1, levels[0], config.classes),
        }

    def batch(key):
        image, labels = jax.random.split(key)
        shape = (config.batch, config.image, config.image)
        return {
            "image": jax.random.normal(image, (*shape, 3)),
            "labels": jax.random.randint(labels, shape, 0, config.classes),
        }

    return Model(f"unet-{size}", build, init, batch)
