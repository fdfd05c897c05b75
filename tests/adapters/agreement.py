"""Comparisons of pytrees of results: equal structure, shapes and dtypes, values equal up to rounding."""

import jax
import numpy as np


def plain(x):
    if hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def assert_same(ours, theirs, rtol=1e-5, atol=1e-5):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        a, b = plain(a), plain(b)
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def temporaries(step, *args):
    return jax.jit(step).lower(*args).compile().memory_analysis().temp_size_in_bytes


def regions(fun, *args):
    """Return the number of regions of this library in the jaxpr of a function, at any depth."""
    text = str(jax.make_jaxpr(fun)(*args))
    return text.count("remat[")
