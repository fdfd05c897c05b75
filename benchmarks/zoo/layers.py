"""The layers that several models share, as functions of arrays."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def normal(key: jax.Array, *shape: int, fan_in: int | None = None) -> jax.Array:
    """Return float32 weights with variance 1 / fan-in; the default fan-in is the second-to-last size."""
    return jax.random.normal(key, shape, jnp.float32) * (fan_in or shape[-2]) ** -0.5


def normals(key: jax.Array, shapes: dict[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    """Return such weights by name, each with a key of its own."""
    keys = jax.random.split(key, len(shapes))
    return {name: normal(k, *shape) for k, (name, shape) in zip(keys, shapes.items())}


def dense(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Multiply by weights, which are cast to the activations' dtype."""
    return x @ weights.astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    h = x.astype(jnp.float32)
    h = h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
    return (h * scale).astype(x.dtype)


def standardize(x: jax.Array, axes: int | Sequence[int] = -1) -> jax.Array:
    """Normalize to mean 0 and variance 1 along axes, in float32."""
    h = x.astype(jnp.float32)
    mean, variance = jnp.mean(h, axes, keepdims=True), jnp.var(h, axes, keepdims=True)
    return (h - mean) * jax.lax.rsqrt(variance + 1e-6)


def layer_norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    return (standardize(x) * scale + shift).astype(x.dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
    """Compute explicit softmax attention of (batch, length, heads, features), with scores in float32.

    `k` and `v` may have fewer heads than `q`: each serves a group of its heads.
    """
    batch, length, heads, features = q.shape
    grouped = q.reshape(batch, length, k.shape[2], heads // k.shape[2], features)
    scores = jnp.einsum("bqhgf,bkhf->bhgqk", grouped, k, preferred_element_type=jnp.float32)
    scores = scores * features**-0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
    weights = jax.nn.softmax(scores).astype(v.dtype)
    return jnp.einsum("bhgqk,bkhf->bqhgf", weights, v).reshape(batch, length, heads * features)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean over all positions of the negative log-likelihood."""
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(scores, labels[..., None], -1))


def convolution(x: jax.Array, kernel: jax.Array, *, stride: int = 1) -> jax.Array:
    """Convolve images (batch, height, width, channels) in two dimensions, with SAME padding."""
    return jax.lax.conv_general_dilated(
        x,
        kernel.astype(x.dtype),
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def group_norm(x: jax.Array, scale: jax.Array, shift: jax.Array, groups: int) -> jax.Array:
    """Normalize each group of channels of an image."""
    batch, height, width, channels = x.shape
    h = standardize(x.reshape(batch, height, width, groups, channels // groups), (1, 2, 4))
    return (h.reshape(x.shape) * scale + shift).astype(x.dtype)


def tokens(key: jax.Array, shape: Sequence[int], vocabulary: int) -> jax.Array:
    return jax.random.randint(key, shape, 0, vocabulary)
