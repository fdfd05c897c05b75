"""ResNet-50 in Flax Linen: convolutions of many shapes, and batch normalization.

The training loss does not depend on the running averages, so they are not returned here. The block is a
bottleneck with its shortcut. He et al., 2016, with the stride on the 3 × 3 convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.zoo.layers import cross_entropy
from benchmarks.zoo.model import Model


@dataclass(frozen=True)
class Config:
    stages: tuple[int, ...]  # blocks in each
    width: int
    classes: int
    batch: int
    image: int
    dtype: str = "float32"


SIZES = {
    "tiny": Config((1, 1), 4, 4, 2, 16),
    "cpu": Config((3, 4, 6, 3), 16, 64, 16, 112),
    "real": Config((3, 4, 6, 3), 64, 1000, 256, 224, "bfloat16"),
}


class Normalized(nn.Module):
    """A convolution followed by batch normalization."""

    features: int
    size: int
    stride: int
    dtype: str

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(
            self.features,
            (self.size, self.size),
            (self.stride, self.stride),
            use_bias=False,
            dtype=self.dtype,
        )(x)
        return nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x)


class Stem(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, image):
        x = nn.relu(Normalized(self.config.width, 7, 2, self.config.dtype)(image))
        return nn.max_pool(x, (3, 3), (2, 2), "SAME")


class Bottleneck(nn.Module):
    width: int
    stride: int
    dtype: str

    @nn.compact
    def __call__(self, x):
        h = nn.relu(Normalized(self.width, 1, 1, self.dtype)(x))
        h = nn.relu(Normalized(self.width, 3, self.stride, self.dtype)(h))
        h = Normalized(4 * self.width, 1, 1, self.dtype)(h)
        if x.shape != h.shape:
            x = Normalized(4 * self.width, 1, self.stride, self.dtype)(x)
        return nn.relu(x + h)


def applied(module: nn.Module):
    """Return a module as a function of its parameters and an input."""

    def apply(params, x):
        y, _ = module.apply({"params": params}, x, mutable=["batch_stats"])
        return y

    return apply


def model(size: str) -> Model:
    config = SIZES[size]
    stem, head = Stem(config), nn.Dense(config.classes)
    blocks = [
        Bottleneck(config.width << stage, 2 if stage and not i else 1, config.dtype)
        for stage, depth in enumerate(config.stages)
        for i in range(depth)
    ]
    image_shape = (config.batch, config.image, config.image, 3)

    def build(wrap):
        layers = [wrap(applied(block)) for block in blocks]

        def loss(params, batch):
            x = applied(stem)(params["stem"], batch["image"].astype(config.dtype))
            for layer, weights in zip(layers, params["blocks"]):
                x = layer(weights, x)
            logits = applied(head)(params["head"], jnp.mean(x.astype("float32"), (1, 2)))
            return cross_entropy(logits, batch["labels"])

        return loss

    def init(key):
        first, last, *keys = jax.random.split(key, len(blocks) + 2)
        x, variables = stem.init_with_output(first, jnp.zeros(image_shape, config.dtype))
        params = {"stem": variables["params"], "blocks": []}
        for block, k in zip(blocks, keys):
            x, variables = block.init_with_output(k, x)
            params["blocks"].append(variables["params"])
        return params | {"head": head.init(last, jnp.mean(x, (1, 2)))["params"]}

    def batch(key):
        image, labels = jax.random.split(key)
        return {
            "image": jax.random.normal(image, image_shape),
            "labels": jax.random.randint(labels, (config.batch,), 0, config.classes),
        }

    return Model(f"resnet-{size}", build, init, batch)
