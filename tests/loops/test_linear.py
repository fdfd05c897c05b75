"""Linear maps with transposes and derivatives of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat.loops.linear import LinearMap, linear_call

M = jnp.asarray(np.sin(np.arange(6.0)).reshape(2, 3), jnp.float32)
V = jnp.asarray([1.0, -2.0, 0.5], jnp.float32)


def matmul(calls: list[str]) -> LinearMap:
    """Return v ↦ m·v with the residual m."""

    def apply(residuals: Any, operands: Any) -> Any:
        calls.append("apply")
        return [residuals[0] @ operands[0]]

    def transposed(residuals: Any, cotangents: Any) -> Any:
        calls.append("transposed")
        return [residuals[0].T @ cotangents[0]]

    def jvp(residuals: Any, operands: Any, d_residuals: Any, d_operands: Any) -> Any:
        calls.append("jvp")
        terms = [] if d_residuals[0] is None else [d_residuals[0] @ operands[0]]
        terms += [] if d_operands[0] is None else [residuals[0] @ d_operands[0]]
        return [sum(terms)]

    def transposed_jvp(residuals: Any, cts: Any, d_residuals: Any, d_cts: Any) -> Any:
        calls.append("transposed_jvp")
        terms = [] if d_residuals[0] is None else [d_residuals[0].T @ cts[0]]
        terms += [] if d_cts[0] is None else [residuals[0].T @ d_cts[0]]
        return [sum(terms)]

    return LinearMap(apply, transposed, jvp, transposed_jvp)


def test_a_map_and_its_transpose_are_the_functions_that_are_given() -> None:
    calls: list[str] = []

    def f(v: Any) -> Any:
        return linear_call(matmul(calls), [M], [v])[0]

    np.testing.assert_allclose(f(V), M @ V)
    (back,) = jax.linear_transpose(f, V)(jnp.ones(2))
    np.testing.assert_allclose(back, M.T @ jnp.ones(2), rtol=1e-6)
    assert calls[-1] == "transposed" and "jvp" not in calls


def test_derivatives_to_second_order_are_those_of_the_product() -> None:
    def loss(call: Any) -> Any:
        return lambda m, v: jnp.sum(jnp.sin(call(jnp.cos(m), v * v)))

    calls: list[str] = []
    ours = loss(lambda m, v: linear_call(matmul(calls), [m], [v])[0])
    theirs = loss(lambda m, v: m @ v)
    # JAX itself transposes the products of `jvp`.
    for f in (
        lambda g: jax.grad(g, (0, 1)),
        lambda g: jax.hessian(g, 1),
        lambda g: jax.jacfwd(g, 0),
    ):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6),
            f(ours)(M, V),
            f(theirs)(M, V),
        )
    assert set(calls) == {"apply", "jvp"}


def test_the_transpose_is_differentiated_by_the_rule_that_is_given() -> None:
    calls: list[str] = []

    def back(m: Any, ct: Any) -> Any:
        f = lambda v: linear_call(matmul(calls), [m], [v])[0]  # noqa: E731
        return jax.linear_transpose(f, V)(ct)[0]

    ct = jnp.asarray([0.5, 2.0], jnp.float32)
    for argument in (0, 1):
        expected = jax.jacfwd(lambda m, ct: m.T @ ct, argument)(M, ct)
        np.testing.assert_allclose(jax.jacfwd(back, argument)(M, ct), expected, rtol=1e-6)
    assert "transposed_jvp" in calls and "jvp" not in calls


def test_a_map_is_batched_over_residuals_operands_or_both() -> None:
    def f(m: Any, v: Any) -> Any:
        return linear_call(matmul([]), [m], [v])[0]

    ms, vs = jnp.stack([M, 2 * M]), jnp.stack([V, -V], 1)
    for axes, args in (((0, None), (ms, V)), ((None, 1), (M, vs)), ((0, 1), (ms, vs))):
        expected = jax.vmap(jnp.matmul, axes)(*args)
        np.testing.assert_allclose(jax.vmap(f, axes)(*args), expected, rtol=1e-6)
