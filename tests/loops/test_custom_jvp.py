"""Loops whose body calls a function with a `jax.custom_jvp` rule that is not its derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import remat

X, DIRECTION = jnp.array([0.3, 0.5]), jnp.array([0.2, -0.4])


@jax.custom_jvp
def halved_back(x: Any) -> Any:
    return jnp.sin(x)


@halved_back.defjvp
def _(primals: tuple, tangents: tuple) -> tuple:
    return jnp.sin(*primals), jnp.cos(*primals) / 2 * tangents[0]


def scanning(scan: Callable, **options: Any) -> Callable:
    def run(x: Any) -> Any:
        def step(c: Any, z: Any) -> tuple[Any, Any]:
            y = halved_back(c) * c[::-1] * z + halved_back(c)
            return y, c * y

        carry, ys = scan(step, x, jnp.arange(1.0, 4.0), **options)
        return (carry * carry).sum() + jnp.sin(ys).sum()

    return run


def while_scan(step: Callable, x: Any, zs: Any, **options: Any) -> Any:
    """Run a scan without stacked results as a while loop."""
    advance = lambda s: (s[0] + 1, step(s[1], zs[s[0]])[0])  # noqa: E731
    state = (jnp.int32(0), x)
    return remat.while_loop(lambda s: s[0] < len(zs), advance, state, **options)[1], jnp.zeros(2)


def plain_scan(step: Callable, x: Any, zs: Any) -> Any:
    return lax.scan(step, x, zs)[0], jnp.zeros(2)


DERIVATIVES: dict[str, Callable[[Callable], Callable]] = {
    "gradient": jax.grad,
    "forward over reverse": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (DIRECTION,))[1],
    "reverse over reverse": lambda f: jax.grad(lambda x: jnp.sin(jax.grad(f)(x)).sum()),
    "reverse over forward": lambda f: jax.grad(lambda x: jax.jvp(f, (x,), (DIRECTION,))[1]),
    "linearized gradient, transposed": lambda f: (
        lambda x: jax.linear_transpose(jax.linearize(jax.grad(f), x)[1], x)(DIRECTION)[0]
    ),
    "vmap of hessian": lambda f: lambda x: jax.vmap(jax.hessian(f))(jnp.stack([x, -x])),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=list(DERIVATIVES))
@pytest.mark.parametrize("ours, plain", [(remat.scan, lax.scan), (while_scan, plain_scan)])
def test_derivatives_follow_the_rule_as_in_jax(
    ours: Callable, plain: Callable, derivative: Callable
) -> None:
    found = jax.jit(derivative(scanning(ours, checkpoints=2)))(X)
    assert jnp.allclose(found, jax.jit(derivative(scanning(plain)))(X), rtol=1e-5)


@jax.custom_jvp
def sin_on_host(x: Any) -> Any:
    return jax.pure_callback(np.sin, x, x, vmap_method="expand_dims")


@jax.custom_jvp
def cos_on_host(x: Any) -> Any:
    return jax.pure_callback(np.cos, x, x, vmap_method="expand_dims")


sin_on_host.defjvp(lambda x, t: (sin_on_host(*x), cos_on_host(*x) * t[0]))
cos_on_host.defjvp(lambda x, t: (cos_on_host(*x), -sin_on_host(*x) * t[0]))


def test_loops_around_a_scan_that_calls_the_host_have_second_derivatives() -> None:
    def step(x: Any) -> Any:
        return lax.scan(lambda c, z: (sin_on_host(c) * z, None), x, jnp.arange(1.0, 3.0))[0]

    def run(scan: Callable, **options: Any) -> Callable:
        loss = lambda x: scan(lambda c, _: (step(c), None), x, length=2, **options)[0].sum()  # noqa: E731
        return DERIVATIVES["reverse over forward"](loss)

    assert jnp.allclose(run(remat.scan, checkpoints=1)(X), run(lax.scan)(X), rtol=1e-5)
