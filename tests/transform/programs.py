"""Operations and transformations for random programs on vectors."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import remat
from remat import checkpoint_name, policies

N = 3

# --------------------------------------------------------------------------------------------------
# Functions with derivative rules of their own


@jax.custom_jvp
def bent(x):
    return jnp.sin(x) * x


@bent.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return bent(x), (checkpoint_name(jnp.cos(x), "a") * x + jnp.sin(x)) * t


@jax.custom_vjp
def scaled(x, w):
    return jnp.sin(x @ w)


def _scaled_fwd(x, w):
    z = checkpoint_name(x @ w, "b")
    return jnp.sin(z), (checkpoint_name(jnp.cos(z), "c"), x, w)


def _scaled_bwd(res, ct):
    slope, x, w = res
    return (slope * ct) @ w.T, jnp.outer(x, slope * ct)


scaled.defvjp(_scaled_fwd, _scaled_bwd)

# --------------------------------------------------------------------------------------------------
# Operations

UNARY = {
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "bent": bent,
    "bump": lambda a: jnp.exp(-a * a),
    "stop": lambda a: jnp.sin(a) + lax.stop_gradient(a),
    "cumsum": jnp.cumsum,
    "sort": jnp.sort,
    "reverse": lambda a: a[::-1],
    "center": lambda a: a - jnp.mean(a),
    "normalize": lambda a: a / jnp.sqrt(1.0 + jnp.sum(a * a)),
    "largest": lambda a: a - jnp.max(a),
    "softmax": jax.nn.softmax,
    "gather": lambda a: a[jnp.array([2, 0, 2])] * a,
    "by_order": lambda a: a[jnp.argsort(a)] * jnp.cos(a),
    "half": lambda a: a.astype(jnp.float32).astype(a.dtype),
    "integer": lambda a: a * jnp.floor(3 * a).astype(jnp.int32).astype(a.dtype),
    "unused": lambda a: (jnp.tan(a), jnp.sin(a))[1],
    "constant": lambda a: jnp.cos(jnp.arange(float(N), dtype=a.dtype)) + 0 * a,
}
BINARY = {
    "add": jnp.add,
    "mul": jnp.multiply,
    "max": jnp.maximum,
    "where": lambda a, b: jnp.where(a > 0, jnp.sin(b), a),
    "scatter": lambda a, b: a.at[jnp.array([1, 1, 0])].add(jnp.sin(b)),
    "set": lambda a, b: a.at[1:].set(b[:2]),
    "outer": lambda a, b: jnp.tanh(jnp.outer(a, b)) @ a,
    "dot": lambda a, b: a * jnp.dot(a, b),
    "slice": lambda a, b: jnp.concatenate(
        [lax.dynamic_slice(a, (jnp.argmax(b),), (1,)), jnp.sin(b[1:])]
    ),
    "divide": lambda a, b: a / (2.0 + jnp.sin(b)),
}
WITH_WEIGHTS = {
    "matmul": lambda a, w: a @ w,
    "matmul_sin": lambda a, w: jnp.sin(w) @ a,
    "layer": lambda a, w: jnp.tanh(a @ w + jnp.sum(w)),
    "batched": lambda a, w: jnp.einsum("ij,ij->i", w * a[None], jnp.cos(w)),
    "scaled": scaled,
}


@functools.lru_cache
def chance(seed):
    """Return a policy of JAX's kind that depends only on the name of the primitive."""

    def policy(primitive, *_, **params):
        text = f"{seed}{primitive.name}{params.get('name', '')}"
        return sum(map(ord, text)) % 3 == 0

    return policy


# --------------------------------------------------------------------------------------------------
# Transformations

X = np.array([0.3, -0.7, 1.1])
W = np.array([[0.5, -0.2, 0.1], [0.3, 0.8, -0.6], [-0.4, 0.2, 0.7]])
XS = np.stack([X, -X])


def _scanned(f):
    def g(x, w):
        def advance(c, z):
            y, u = f(c, w)
            return 0.5 * y + z, u

        return lax.scan(advance, x, jnp.asarray(XS, x.dtype))

    return g


def around(checkpoint, of_jax=jax.checkpoint):
    """Return transformations by name, with these in place of `remat.checkpoint` and JAX's."""
    names, dots = policies.save("a", "c", strict=False), policies.dots_saveable
    return {
        "nothing": lambda f: f,
        "jit": jax.jit,
        "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(jnp.stack([x, jnp.sin(x)]), w),
        "vmap over the weights": lambda f: (
            lambda x, w: jax.vmap(f, (None, 2), 1)(x, jnp.stack([w, jnp.sin(w)], 2))
        ),
        "scan": _scanned,
        "cond": lambda f: lambda x, w: lax.cond(x[0] > 0, f, lambda x, w: (jnp.sin(x), x), x, w),
        "twice": lambda f: lambda x, w: f(f(x, w)[0], w),
        "checkpoint": checkpoint,
        "checkpoint that saves names": lambda f: checkpoint(f, policy=names),
        "jax.checkpoint": of_jax,
        "scan of checkpoint": lambda f: _scanned(checkpoint(f)),
        "checkpoint of scan": lambda f: checkpoint(_scanned(f), policy=dots),
    }


AROUND = around(remat.checkpoint)
