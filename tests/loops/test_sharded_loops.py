"""Loops on explicitly sharded values."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import remat

XS = np.arange(24, dtype=np.float32).reshape(3, 8) / 8


def scanning(scan: Callable, **options: Any) -> Callable:
    def run(x: Any, xs: Any) -> Any:
        carry, ys = scan(lambda c, v: (jnp.sin(c) * v, jnp.cos(c) + v), x, xs, **options)
        return (carry + ys.sum(0)).sum()

    return run


def jvp(f: Callable) -> Callable:
    return lambda x, xs: jax.jvp(f, (x, xs), (x, xs))[1]


def reverse_over_reverse(f: Callable) -> Callable:
    return jax.grad(lambda x, xs: sum(g.sum() for g in jax.grad(f, (0, 1))(x, xs)))


OPTIONS: list[dict[str, Any]] = [{"store": "device"}, {"store": "host"}, {"store": "disk"}]


@pytest.mark.parametrize("transform", [jax.grad, jvp, reverse_over_reverse])
@pytest.mark.parametrize("options", OPTIONS)
def test_loops_keep_the_explicit_sharding_of_what_they_carry(
    options: dict[str, Any], transform: Callable, tmp_path: pathlib.Path
) -> None:
    if options["store"] == "disk":
        options = {**options, "directory": tmp_path}
    with jax.set_mesh(jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))):
        args = jax.device_put(XS[0], P("x")), jax.device_put(XS, P(None, "x"))
        ours = jax.jit(transform(scanning(remat.scan, checkpoints=2, **options)))(*args)
        plain = jax.jit(transform(scanning(lax.scan)))(*args)
        assert jax.typeof(ours) == jax.typeof(plain)
        np.testing.assert_allclose(jax.device_get(ours), jax.device_get(plain), rtol=1e-5)


def test_stacked_results_keep_the_explicit_sharding_without_a_mesh_in_use() -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(XS[0], jax.NamedSharding(mesh, P("x")))

    def total(scan: Callable, **options: Any) -> Callable:
        def run(x: Any) -> Any:
            carry, ys = scan(lambda c, _: (jnp.sin(c), c.sum()), x, None, length=3, **options)
            return carry.sum() * ys.sum()

        return jax.jit(jax.grad(run))

    ours, plain = total(remat.scan, checkpoints=2)(x), total(lax.scan)(x)
    np.testing.assert_allclose(jax.device_get(ours), jax.device_get(plain), rtol=1e-5)
