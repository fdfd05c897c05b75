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


OPTIONS: list[dict[str, Any]] = [
    {"store": "device"},
    {"store": "host"},
    {"store": "disk"},
    {"store": [remat.Storage("host", checkpoints=2)], "checkpoints": 0},
]


@pytest.mark.parametrize("transform", [jax.grad, jvp, reverse_over_reverse])
@pytest.mark.parametrize("options", OPTIONS)
def test_loops_keep_the_explicit_sharding_of_their_carry(
    options: dict[str, Any], transform: Callable, tmp_path: pathlib.Path
) -> None:
    if options["store"] == "disk":
        options = {**options, "directory": tmp_path}
    with jax.set_mesh(jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))):
        args = jax.device_put(XS[0], P("x")), jax.device_put(XS, P(None, "x"))
        ours = jax.jit(transform(scanning(remat.scan, **{"checkpoints": 2, **options})))(*args)
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


def _while(x: Any, **options: Any) -> Any:
    body = lambda s: (s[0] + jnp.sum(s[1] * s[1]) / 8, jnp.sin(s[1]) + s[1][0] / 2)  # noqa: E731
    return remat.while_loop(lambda s: s[0] < 2, body, (jnp.sum(0 * x), x), **options)[1]


def _fori(x: Any, **options: Any) -> Any:
    last = jnp.int32(2) + (jnp.sum(x) > 1).astype(jnp.int32)
    return remat.fori_loop(0, last, lambda i, c: jnp.sin(c) + c[0] * (i + 1) / 4, x, **options)


def _scan(x: Any, **options: Any) -> Any:
    rows = jnp.stack([x, x * x, jnp.cos(x)])
    carry, ys = remat.scan(lambda c, z: (jnp.sin(c) * z, c.sum()), x, rows, **options)
    return carry + ys.sum()


def _step(i: Any, c: Any) -> Any:
    return jnp.sin(c) + i / 4


EXAMPLES = {
    "while_loop": lambda x: _while(x, checkpoints=2),
    "while_loop, one checkpoint": lambda x: _while(x, checkpoints=1),
    "while_loop with a limit": lambda x: _while(x, max_steps=40),
    "fori_loop": lambda x: _fori(x, checkpoints=2),
    "scan": lambda x: _scan(x, checkpoints=1),
    "counted loop beside an uncounted one in a scan": lambda x: remat.scan(
        lambda c, _: (_while(c) + remat.fori_loop(0, 2, _step, c, checkpoints=1), None),
        x,
        length=1,
        checkpoints=1,
    )[0],
    "scan of unmapped values": lambda x: x * _scan(jnp.ones(3), checkpoints=2),
    "remat_scan": lambda x: remat.remat_scan(lambda c, z: jnp.sin(c) * z, (2, 2))(
        x, jnp.arange(4.0)
    ),
}


@pytest.mark.parametrize("order", ["value", "gradient", "second derivative"])
@pytest.mark.parametrize("example", EXAMPLES.values(), ids=list(EXAMPLES))
def test_loops_are_batched_over_an_explicit_axis(example: Callable, order: str) -> None:
    def run(rows: Any) -> Any:
        loss = lambda rows: jax.vmap(example)(rows).sum()  # noqa: E731
        if order == "value":
            return jax.vmap(example)(rows)
        if order == "gradient":
            return jax.grad(loss)(rows)
        return jax.grad(lambda rows: jnp.sin(jax.grad(loss)(rows)).sum())(rows)

    rows = np.stack([XS[0, 2:5], XS[1, :3]])
    expected = jax.jit(run)(rows)
    with jax.set_mesh(jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))):
        found = jax.jit(run)(jax.device_put(rows, P("x")))
        assert jax.typeof(found).sharding.spec[0] == "x"
    np.testing.assert_allclose(jax.device_get(found), expected, rtol=1e-5, atol=1e-6)


def test_a_budget_is_that_of_one_device_where_types_are_sharded() -> None:
    step = lambda c, _: (jnp.sin(c), None)  # noqa: E731
    options = {"length": 100, "budget": 12 * 4000}
    whole = remat.scan.explain(step, jnp.ones(1000), **options)
    assert whole.state_bytes == whole.residual_bytes == 4000
    with jax.set_mesh(jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))):
        x = jax.device_put(jnp.ones(1000), P("x"))
        half = remat.scan.explain(step, x, **options)
        assert half.state_bytes == half.residual_bytes == 2000
        assert half.forward_steps < whole.forward_steps
        loss = lambda x: remat.scan(step, x, **options)[0].sum()  # noqa: E731
        memory = jax.jit(jax.grad(loss)).lower(x).compile().memory_analysis()
        assert 0.95 * 48_000 <= memory.temp_size_in_bytes <= 1.05 * 48_000
