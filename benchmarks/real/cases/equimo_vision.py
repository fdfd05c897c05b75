"""equimo: a vision transformer of Equinox modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import optax
from equimo.vision.models.vit import VisionTransformer

from benchmarks.real.case import Case, Wrap, layers, unchanged, whole


def vit() -> Case:
    """A classifier of images, with dropout off."""
    model = VisionTransformer(
        img_size=32,
        in_channels=3,
        dim=96,
        patch_size=4,
        num_heads=4,
        depths=[4],
        num_classes=10,
        key=jax.random.key(0),
    )
    weights, static = eqx.partition(model, eqx.is_inexact_array)
    images = jax.random.normal(jax.random.key(1), (16, 3, 32, 32))
    labels = jax.random.randint(jax.random.key(2), (16,), 0, 10)

    def loss(weights: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        model = eqx.combine(weights, static)
        key = jax.random.key(0)
        logits = jax.vmap(lambda image: model(image, key=key, inference=True))(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def make(wrap: Wrap) -> Callable:
        return jax.value_and_grad(wrap(loss))

    step = make(unchanged)
    block = type(model.blocks[0].blocks[0])
    return Case(step, (weights, images, labels), layers(step, block) | whole(make))
