"""Regions on sharded values: gradients are those of the plain function under every kind of mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import remat

X = np.linspace(0.1, 1.6, 16, dtype=np.float32).reshape(8, 2)


def mesh(*kinds):
    names = ("x", "y")[: len(kinds)]
    return jax.make_mesh((2,) * len(kinds), names, axis_types=kinds)


def total(f):
    return lambda x: jnp.sum(f(x) * f(x))


def region(x):
    return jnp.sin(x) * jnp.cos(jnp.sin(x))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")], ids=str)
def test_gradients_on_sharded_arguments_are_those_of_the_plain_function(kind, spec):
    m = mesh(kind)
    with jax.set_mesh(m):
        x = jax.device_put(X, NamedSharding(m, spec))
        plain, ours = (
            jax.jit(jax.grad(total(wrap(region))))(x) for wrap in (lambda f: f, remat.checkpoint)
        )
        np.testing.assert_allclose(jax.device_get(ours), jax.device_get(plain), rtol=1e-6)
        assert jax.typeof(ours) == jax.typeof(plain)


@pytest.mark.parametrize("ways", [1, 2], ids=["one region", "a region in a region"])
def test_gradients_of_reduced_arguments_are_counted_once(ways):
    """The cotangent of a reduced value is a partial sum on each device."""
    with jax.set_mesh(mesh(AxisType.Explicit)):
        x = jax.device_put(np.arange(8.0, dtype=np.float32), P(reduced={"x"}))

        def loss(wrap, x):
            f = wrap(jnp.sin)
            for _ in range(ways - 1):
                f = wrap(lambda x, inner=f: inner(x) + 1.0)
            return f(x).sum()

        found = []
        for wrap in (lambda f: f, remat.checkpoint):
            g = jax.jit(jax.grad(lambda x, wrap=wrap: loss(wrap, x)))(x)
            found.append((jax.typeof(g), jax.jit(lambda g: jax.sharding.reshard(g, P()))(g)))
        (plain_type, plain), (our_type, ours) = found
        np.testing.assert_allclose(jax.device_get(ours), np.cos(np.arange(8.0)), rtol=1e-5)
        np.testing.assert_allclose(jax.device_get(ours), jax.device_get(plain), rtol=1e-6)
        assert our_type == plain_type


def _own_index(x):
    return jnp.sin(x) * (1.0 + lax.axis_index("x").astype(jnp.float32))


def _sum_over_devices(x):
    return jnp.sin(lax.psum(jnp.sin(x), "x")) + x


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("f", [region, _own_index, _sum_over_devices])
@pytest.mark.parametrize("axes", [{"x"}, {"x", "y"}], ids=["one axis of two", "all axes"])
def test_gradients_inside_shard_map_are_those_of_the_plain_function(f, axes, check_vma):
    m = mesh(AxisType.Auto, AxisType.Auto)
    spec = P("x")
    out = []
    for wrap in (lambda f: f, remat.checkpoint):
        mapped = jax.shard_map(
            wrap(f), mesh=m, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=check_vma
        )
        out.append(jax.jit(jax.grad(lambda x, g=mapped: jnp.sum(g(x) * g(x))))(X))
    np.testing.assert_allclose(jax.device_get(out[1]), jax.device_get(out[0]), rtol=1e-5)
