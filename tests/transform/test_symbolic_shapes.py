"""Policies and cuts on values with symbolic dimensions, as `jax.export` traces them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat
from remat.transform.policies import everything_saveable, recompute, save

W = jnp.ones((3, 3)) / 3
X = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)


def computed(policy: Any, *constraints: str) -> list[str]:
    """Return the values that a region on a symbolic batch saves, and check its exported gradient."""

    @remat.checkpoint(policy=policy)
    def region(x: Any) -> Any:
        return jnp.sin(jnp.sin(x @ W)).sum()

    (b,) = jax.export.symbolic_shape("b", constraints=constraints)
    saved: list[str] = []

    def gradient(x: Any) -> Any:
        found = remat.residuals(region, x)
        saved.extend(str(r.primitive) for r in found if r.kind == "computed")
        assert str(found)
        return jax.grad(region)(x)

    exported = jax.export.export(jax.jit(gradient))(jax.ShapeDtypeStruct((b, 3), X.dtype))
    assert jnp.allclose(exported.call(X), jax.grad(region)(X), atol=1e-6)
    return saved


BOTH = ["cos", "cos"]


@pytest.mark.parametrize(
    ("policy", "constraints", "saved"),
    [
        (save(min_bytes=12), [], BOTH),
        (save(min_bytes=13), [], []),
        (save(min_bytes=13), ["b >= 2"], BOTH),
        (save(max_bytes=96), ["b <= 8"], BOTH),
        (save(max_bytes=95), ["b <= 8"], []),
        (recompute(min_bytes=13) >> everything_saveable, [], []),
        (recompute(max_bytes=13) >> everything_saveable, ["b >= 2"], BOTH),
        (save(min_flops_per_byte=1.5), [], ["dot_general"]),
        (save(min_flops_per_byte=1.6), [], []),
    ],
)
def test_bounds_on_symbolic_sizes_save_what_surely_meets_them(
    policy: Any, constraints: list[str], saved: list[str]
) -> None:
    assert computed(policy, *constraints) == saved


def test_flops_that_depend_on_symbols_are_recomputed() -> None:
    @remat.checkpoint(policy=save(min_flops_per_byte=0.5))
    def region(x: Any) -> Any:
        return jnp.sin(jnp.sort(x, axis=0)).sum()

    (b,) = jax.export.symbolic_shape("b")
    exported = jax.export.export(jax.jit(jax.grad(region)))(jax.ShapeDtypeStruct((b, 3), X.dtype))
    assert jnp.allclose(exported.call(X), jnp.cos(X), atol=1e-6)


def test_an_input_of_incomparable_size_does_not_replace_a_residual() -> None:
    @remat.checkpoint(policy=save(primitive="broadcast_in_dim"))
    def region(x: Any, y: Any) -> Any:
        rows = jnp.broadcast_to(y, x[1:].shape)  # no broadcast dimension if x has one
        return (jnp.sin(x[1:]) * rows).sum()

    (b,) = jax.export.symbolic_shape("b")
    y = jnp.arange(3, dtype=X.dtype)
    types = jax.ShapeDtypeStruct((b, 3), X.dtype), jax.ShapeDtypeStruct(y.shape, y.dtype)
    exported = jax.export.export(jax.jit(jax.grad(region)))(*types)
    for x in (X, X[:1]):
        assert jnp.allclose(exported.call(x, y), jax.grad(region)(x, y))
