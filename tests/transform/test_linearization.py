"""Linearization of regions: which operations depend on values alone, and which cannot be separated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad

import remat


def doubled():
    """Return a primitive whose derivative computes value and tangent in one operation."""
    pair = Primitive("pair")
    pair.multiple_results = True
    pair.def_impl(lambda x, t: (2 * x, 2 * t))
    pair.def_abstract_eval(lambda x, t: (x, t))
    primitive = Primitive("doubled")
    primitive.def_impl(lambda x: 2 * x)
    primitive.def_abstract_eval(lambda x: x)
    ad.primitive_jvps[primitive] = lambda primals, tangents: tuple(pair.bind(*primals, *tangents))
    return primitive.bind


def test_an_operation_that_mixes_values_and_tangents_is_named():
    double = doubled()
    f = remat.checkpoint(lambda x: jnp.sum(jnp.sin(double(jnp.cos(x)))))
    with pytest.raises(remat.LinearizationError, match=r"`pair` at .*test_linearization") as caught:
        jax.grad(f)(jnp.ones(2))
    assert isinstance(caught.value, ValueError)  # as in JAX


def test_tangents_of_integers_and_constants_are_zero():
    f = remat.checkpoint(lambda x, n: (jnp.sin(x), n + 1, 2.0))
    (_, n, c), push = jax.linearize(lambda x: f(x, 3), 0.5)
    assert (n, c) == (4, 2.0)
    slope, of_n, of_c = push(1.0)
    assert jnp.allclose(slope, jnp.cos(0.5))
    assert of_n.dtype == jax.dtypes.float0
    assert of_c == 0
