"""Helpers that several tests of the transform use."""

from __future__ import annotations

import contextlib
import functools

import jax
import numpy as np
from jax._src import config

# Whether this version of JAX has a second implementation of remat that is to replace the first. JAX 0.10 has
# the option, too, with an early version of the implementation.
HAS_REMAT3 = hasattr(config, "remat3") and jax.__version_info__ >= (0, 12)


def remat3(on):
    """Enable or disable JAX's second implementation of remat, whatever `JAX_REMAT3` is."""
    return config.remat3(on) if HAS_REMAT3 else contextlib.nullcontext()


def former_jax_checkpoint(f, **options):
    """Return `jax.checkpoint` without JAX's second implementation."""
    checkpointed = jax.checkpoint(f, **options)

    @functools.wraps(f)
    def call(*args, **kwargs):
        with remat3(False):
            return checkpointed(*args, **kwargs)

    return call


def assert_same(actual, expected, *, rtol=2e-5, atol=2e-6):
    """Check for equal pytrees, types and (up to rounding) values."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = _comparable(a), _comparable(e)
        assert a.shape == e.shape
        assert a.dtype == e.dtype
        if a.dtype == jax.dtypes.float0:
            continue
        if a.dtype.kind in "biu":
            np.testing.assert_array_equal(a, e)
        else:
            wide = np.complex128 if a.dtype.kind == "c" else np.float64
            loose = 2e-2 if a.dtype.itemsize == 2 else 0
            np.testing.assert_allclose(
                a.astype(wide), e.astype(wide), rtol=rtol + loose, atol=atol + loose
            )


def _comparable(x):
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def equations(jaxpr):
    """Yield every equation of a jaxpr, those of sub-jaxprs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def count(jaxpr, *primitives):
    return sum(eqn.primitive.name in primitives for eqn in equations(jaxpr.jaxpr))
