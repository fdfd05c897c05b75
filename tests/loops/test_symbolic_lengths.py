"""Loops in functions that `jax.export` traces with symbolic dimensions."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import remat
from remat.errors import BudgetError, ScheduleError, StoreError

X = jnp.arange(12, dtype=jnp.float32).reshape(4, 3) / 7
WEIGHTS = jnp.ones((6, 3, 3)) / 3


def exported(f: Callable, *constraints: str) -> Callable:
    """Export the gradient of a function of one array whose leading dimension is symbolic."""
    (b,) = jax.export.symbolic_shape("b", constraints=constraints)
    export = jax.export.export(jax.jit(jax.grad(f)))
    return export(jax.ShapeDtypeStruct((b, 3), X.dtype)).call


def over_time(scan: Callable, **options: Any) -> Callable:
    """Return the sum of a scan of five steps over a batch."""
    body = lambda c, _: (jnp.sin(c) * c, c)  # noqa: E731
    return lambda x: scan(body, x, length=5, **options)[1].sum()


def over_rows(scan: Callable, **options: Any) -> Callable:
    """Return the sum of a scan over the rows of an array."""
    body = lambda c, row: (jnp.sin(c) * row + 1, c * row)  # noqa: E731
    return lambda x: scan(body, x[0], x, **options)[1].sum()


def layers(x: Any, **options: Any) -> Any:
    layer = lambda x, w: jnp.tanh(x @ w)  # noqa: E731
    return remat.remat_scan(layer, "auto", **options)(x, WEIGHTS).sum()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"checkpoints": 2},
    {"checkpoints": 9},
    {"checkpoints": 2, "store": "host"},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_scan_over_a_symbolic_batch_is_reversed(options: dict[str, Any]) -> None:
    found = exported(over_time(remat.scan, **options))(X)
    assert jnp.allclose(found, jax.grad(over_time(lax.scan))(X), atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"checkpoints": 2}, {"budget": "1KiB", "reverse": True}])
def test_a_scan_of_symbolic_length_is_reversed(options: dict[str, Any]) -> None:
    call = exported(over_rows(remat.scan, **options))
    plain = jax.grad(over_rows(lax.scan, reverse=options.get("reverse", False)))
    for x in (X, X[:1]):
        assert jnp.allclose(call(x), plain(x), atol=1e-6)


def test_a_symbolic_length_is_taken_without_scanned_arrays() -> None:
    def loss(x: Any) -> Any:
        steps = x.shape[0]
        return remat.scan(lambda c, _: (jnp.sin(c), c), x[0], length=steps, checkpoints=2)[1].sum()

    assert jnp.allclose(exported(loss)(X), jax.grad(loss)(X), atol=1e-6)


def test_a_nesting_is_chosen_for_layers_on_a_symbolic_batch() -> None:
    assert jnp.allclose(exported(layers)(X), jax.grad(layers)(X), atol=1e-6)


def test_a_budget_is_kept_for_all_values_that_the_constraints_allow() -> None:
    for f in (lambda x, n: over_time(remat.scan, budget=n)(x), lambda x, n: layers(x, budget=n)):
        found = exported(lambda x, f=f: f(x, "64KiB"), "b <= 8")(X)
        assert jnp.allclose(found, jax.grad(lambda x, f=f: f(x, "64KiB"))(X), atol=1e-6)
        with pytest.raises(BudgetError, match="fits 8 B"):
            exported(lambda x, f=f: f(x, 8), "b <= 8")


@pytest.mark.parametrize(
    "f",
    [
        over_time(remat.scan, budget="64KiB"),
        lambda x: layers(x, budget="64KiB"),
        lambda x: remat.while_loop(lambda c: c.sum() < 9, lambda c: 2 * c, x, budget=999).sum(),
    ],
)
def test_a_budget_for_a_symbolic_size_without_bound_is_refused(f: Callable) -> None:
    with pytest.raises(BudgetError, match=r"budget=.* cannot be compared with .*\*b B of"):
        exported(f)


def test_symbolic_sizes_raise_an_error_that_names_the_dimension(tmp_path: pathlib.Path) -> None:
    with pytest.raises(StoreError, match=r"shape \(b, 3\)"):
        exported(over_time(remat.scan, checkpoints=2, store="disk", directory=tmp_path))
    with pytest.raises(ScheduleError, match="the number of steps, b, is a symbolic dimension"):
        exported(lambda x: over_rows(remat.scan.explain)(x))
    with pytest.raises(ScheduleError, match="the number of layers, b, is a symbolic dimension"):
        exported(lambda x: remat.remat_scan(lambda c, w: c * w, "auto")(jnp.ones(3), x).sum())
