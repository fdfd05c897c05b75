"""Programs to explain, and queries about their explanations."""

from __future__ import annotations

import jax
import jax.numpy as jnp

f32 = jnp.float32


def struct(*shape, dtype=f32):
    return jax.ShapeDtypeStruct(shape, dtype)


def layer(w, x):
    return jnp.tanh(jnp.tanh(x @ w) @ w) @ w


def deep(wrap, n=8):
    """Return the loss of a stack of unrolled layers."""
    body = wrap(layer)

    def loss(w, x):
        for i in range(n):
            x = body(w[i], x)
        return jnp.sum(x)

    return loss


DEEP_ARGS = (struct(8, 64, 64), struct(2048, 64))


def codes(explanation):
    return {finding.code for finding in explanation.findings}


def finding(explanation, code):
    return next(f for f in explanation.findings if f.code == code)


def total(explanation, kind):
    return sum(v.n_bytes for v in explanation.values if v.kind == kind)
