"""Loops whose body calls a function with a `jax.custom_vjp` rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import remat
from remat.errors import ForwardModeError

X = jnp.array([0.3, 0.5])


def with_rule(rule: Callable[[Any, Any], Any]) -> Callable:
    """Return sin(x) · Σx with `rule(x, cotangent)` as its backward rule."""
    plain = lambda x: jnp.sin(x) * x.sum()  # noqa: E731
    f = jax.custom_vjp(plain)
    f.defvjp(lambda x: (plain(x), x), lambda x, ct: (rule(x, ct),))
    return f


# Linear, and not the derivative, so that a result shows which rule was used.
linear = with_rule(lambda x, ct: 1.5 * ct * jnp.cos(x) + jnp.where(x > 0, ct, 0)[::-1] / 2)
clipping = with_rule(lambda x, ct: jnp.clip(ct, -0.5, 0.5) * jnp.cos(x))
adding = with_rule(lambda x, ct: ct * jnp.cos(x) + 0.1 * x)
of_sign = with_rule(lambda x, ct: (ct > 0).astype(x.dtype) * jnp.cos(x))


def scanning(scan: Callable, f: Callable, **options: Any) -> Callable:
    def run(x: Any) -> Any:
        carry, ys = scan(lambda c, _: (f(c) + c / 2, jnp.cos(c)), x, None, length=3, **options)
        return (carry + ys.sum(0)).sum()

    return run


def in_while(f: Callable, steps: int, **options: Any) -> Callable:
    def run(x: Any) -> Any:
        last = jnp.where(x[0] < 9, steps, 0)  # known only at run time
        step = lambda s: (s[0] + 1, f(s[1]) + s[1] / 2)  # noqa: E731
        state = (jnp.int32(0), x)
        return remat.while_loop(lambda s: s[0] < last, step, state, **options)[1].sum()

    return run


def mapped(f: Callable) -> Callable:
    return jax.jit(jax.grad(lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])).sum()))


@pytest.mark.parametrize("f", [linear, clipping])
def test_gradients_of_mapped_loops_follow_the_rule(f: Callable) -> None:
    expected = mapped(scanning(lax.scan, f))(X)
    assert jnp.allclose(mapped(scanning(remat.scan, f, checkpoints=2))(X), expected, rtol=1e-5)


@pytest.mark.parametrize("options", [{"max_steps": 5}, {"checkpoints": 2}])
@pytest.mark.parametrize("steps", [0, 3])
def test_gradients_of_mapped_while_loops_follow_the_rule(
    options: dict[str, Any], steps: int
) -> None:
    def plain(x: Any) -> Any:
        return lax.scan(lambda c, _: (clipping(c) + c / 2, None), x, None, steps)[0].sum()

    found = mapped(in_while(clipping, steps, **options))(X)
    assert jnp.allclose(found, mapped(plain)(X), rtol=1e-5)


def test_reverse_over_reverse_follows_linear_rules() -> None:
    def hessian(scan: Callable, **options: Any) -> Any:
        run = scanning(scan, linear, **options)
        # The value's derivative is that of the forward rule.
        both = lambda x: jax.value_and_grad(run)(x)[1] + jax.value_and_grad(run)(x)[0]  # noqa: E731
        return jax.jit(jax.jacrev(both))(X)

    expected = hessian(lax.scan)
    assert not jnp.allclose(expected, expected.T)
    assert jnp.allclose(hessian(remat.scan, checkpoints=2), expected, rtol=1e-4)


@pytest.mark.parametrize("steps", [0, 3])
def test_reverse_over_reverse_of_while_loops_follows_linear_rules(steps: int) -> None:
    def plain(x: Any) -> Any:
        return lax.scan(lambda c, _: (linear(c) + c / 2, None), x, None, steps)[0].sum()

    hessian = lambda f: jax.jit(jax.jacrev(jax.grad(f)))(X)  # noqa: E731
    found = hessian(in_while(linear, steps, checkpoints=2))
    np.testing.assert_allclose(found, hessian(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("f", "reason"), [(clipping, "computes max"), (adding, "adds"), (of_sign, "computes gt")]
)
def test_a_rule_without_transpose_is_refused_in_second_derivatives(f: Any, reason: str) -> None:
    run = scanning(remat.scan, f, checkpoints=2)
    with pytest.raises(ForwardModeError, match=f"not linear in its cotangent .it {reason}"):
        jax.jacrev(jax.grad(run))(X)


def test_forward_mode_is_refused_as_in_jax() -> None:
    run = scanning(remat.scan, linear, checkpoints=2)
    for derivative in (jax.jacfwd(run), jax.jit(jax.jacfwd(run))):
        with pytest.raises(ForwardModeError, match=r"custom_vjp.*not defined.*jax\.hessian"):
            derivative(X)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jacfwd(scanning(lax.scan, linear))(X)


@pytest.mark.parametrize("f", [linear, clipping, adding])
def test_forward_over_reverse_differentiates_the_rule(f: Callable) -> None:
    weights = jnp.array([[0.7, -0.2], [0.1, 0.4]])

    def hessian(scan: Callable, **options: Any) -> Any:
        def run(x: Any, w: Any, rows: Any) -> Any:
            def step(carry: Any, row: Any) -> Any:
                c, n = carry
                return (f(w @ c) + row, n + 1), jnp.cos(c) * w[0]

            (last, _), ys = scan(step, (x, 0), rows, length=5, **options)
            return (last * ys.sum(0)).sum()

        def total(x: Any, w: Any) -> Any:
            return run(x, w, jnp.outer(jnp.arange(5.0) / 7, x * w[1]))

        return jax.jit(jax.hessian(total, (0, 1)))(X, weights)

    expected, found = hessian(lax.scan), hessian(remat.scan, checkpoints=2)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected
    )


@pytest.mark.parametrize("steps", [0, 3])
def test_forward_over_reverse_of_while_loops_differentiates_the_rule(steps: int) -> None:
    def plain(x: Any) -> Any:
        return lax.scan(lambda c, _: (clipping(c) + c / 2, None), x, None, steps)[0].sum()

    found = jax.jit(jax.hessian(in_while(clipping, steps, max_steps=5)))(X)
    np.testing.assert_allclose(found, jax.jit(jax.hessian(plain))(X), rtol=1e-4, atol=1e-6)
