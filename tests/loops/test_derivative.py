"""How often derivatives of loops trace the body, and which part of it they differentiate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

import remat
from remat.loops.forward_mode import surely_has_forward_mode

X = jnp.linspace(0.1, 0.5, 3)

LOOPS: dict[str, Callable] = {
    "scan": lambda step, x: remat.scan(lambda c, _: (step(c), None), x, length=5, checkpoints=2)[0],
    "nested scan": lambda step, x: remat.scan(lambda c, _: (step(c), None), x, length=5)[0],
    "fori_loop": lambda step, x: remat.fori_loop(0, 5, lambda _, c: step(c), x, checkpoints=2),
    "while_loop": lambda step, x: remat.while_loop(
        lambda c: c[0] < 5, lambda c: (c[0] + 1, step(c[1])), (0, x), checkpoints=2
    )[1],
}
DERIVATIVES: dict[str, Callable] = {
    "value": lambda f: f,
    "grad": jax.grad,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "hessian": jax.hessian,
    "grad of grad": lambda f: jax.grad(lambda x: jax.grad(f)(x).sum()),
    "grad of jvp": lambda f: jax.grad(lambda x: jax.jvp(f, (x,), (x,))[1]),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_a_body_is_called_once_whatever_derivative_is_taken(loop: str, derivative: str) -> None:
    called = []

    def step(x: Any) -> Any:
        called.append(x)
        return jnp.sin(x) * x

    jax.make_jaxpr(DERIVATIVES[derivative](lambda x: LOOPS[loop](step, x).sum()))(X)
    assert len(called) == 1


_differentiated: list[int] = []
counted_p = Primitive("counted")
counted_p.def_abstract_eval(lambda x: x)
batching.defvectorized(counted_p)


def _counted_jvp(primals: Any, tangents: Any) -> Any:
    _differentiated.append(1)
    (x,), (t,) = primals, tangents
    return counted_p.bind(x), t if isinstance(t, ad.Zero) else t * jnp.cos(x)


ad.primitive_jvps[counted_p] = _counted_jvp


# How often JAX differentiates the jaxpr of a body, which calls only rules of the user's functions.
@pytest.mark.parametrize(
    ("derivative", "most"),
    [("grad", 3), ("jvp", 3), ("hessian", 18), ("grad of grad", 10), ("grad of jvp", 7)],
)
@pytest.mark.parametrize("loop", [name for name in LOOPS if name != "nested scan"])
def test_a_second_derivative_does_not_differentiate_the_body_only_to_look_at_it(
    loop: str, derivative: str, most: int
) -> None:
    _differentiated.clear()
    jax.make_jaxpr(DERIVATIVES[derivative](lambda x: LOOPS[loop](counted_p.bind, x).sum()))(X)
    assert 1 <= len(_differentiated) <= most


@jax.custom_vjp
def _reverse_only(x: Any) -> Any:
    return jnp.sin(x)


_reverse_only.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.cos(x) * ct,))


@pytest.mark.parametrize(
    ("body", "surely"),
    [
        (jnp.sin, True),
        (jax.nn.relu, True),  # has a jax.custom_jvp rule
        (_reverse_only, False),
        (lambda x: LOOPS["scan"](jnp.sin, x), True),
        (lambda x: LOOPS["scan"](_reverse_only, x), False),
        (jax.grad(lambda x: LOOPS["scan"](_reverse_only, x).sum()), False),
    ],
)
def test_a_body_surely_has_forward_mode_if_nothing_in_it_has_reverse_mode_only(
    body: Callable, surely: bool
) -> None:
    assert surely_has_forward_mode(jax.make_jaxpr(body)(X).jaxpr) == surely


def _step(x: Any) -> Any:
    return jnp.sin(x) * jnp.cos(x)


def _by_scan(x: Any, n: int, **way: Any) -> Any:
    return remat.scan(lambda c, _: (_step(c), None), x, None, n, **way)[0]


def _by_fori_loop(x: Any, n: int, **way: Any) -> Any:
    # The bound is traced, since it depends on a value.
    return remat.fori_loop(0, jnp.where(x[0] > 0, n, 3), lambda _, c: _step(c), x, **way)


def _by_while_loop(x: Any, n: int, **way: Any) -> Any:
    return remat.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, _step(c[1])), (0, x), **way)[1]


@pytest.mark.parametrize(
    "loop, way, states",
    [
        (_by_scan, {}, 2),
        (_by_scan, {"checkpoints": 10}, 2),
        (_by_fori_loop, {"checkpoints": 10}, 2),
        (_by_while_loop, {"checkpoints": 10, "store": "host"}, 2),
        # XLA does not remove unused buffers that pass through a nested loop with the carry.
        (_by_while_loop, {"checkpoints": 10}, 15),
    ],
)
def test_forward_mode_takes_the_same_memory_for_any_number_of_steps(
    loop: Callable, way: dict, states: int
) -> None:
    x = jnp.ones(10_000)

    def temp_bytes(n: int) -> int:
        f = jax.jit(lambda x, t: jax.jvp(lambda x: loop(x, n, **way), (x,), (t,)))
        return f.lower(x, x).compile().memory_analysis().temp_size_in_bytes

    few, many = temp_bytes(30), temp_bytes(10**5)
    assert max(few, many) <= (states + 0.1) * x.nbytes
    assert abs(few - many) <= 0.1 * x.nbytes


def _scalar_scan(x: Any) -> Any:
    return remat.scan(lambda c, _: (jnp.sin(c), None), x, None, 5, checkpoints=2)[0]


def _scalar_closure(x: Any) -> Any:
    return remat.scan(lambda c, _: (jnp.sin(c * x), None), 1.0, None, 5, checkpoints=2)[0]


def _scalar_while_loop(x: Any) -> Any:
    step = lambda c: (c[0] + 1, jnp.sin(c[1]))  # noqa: E731
    return remat.while_loop(lambda c: c[0] < 5, step, (0, x), checkpoints=2)[1]


@pytest.mark.parametrize("first", [jax.jacfwd, jax.grad], ids=["forward", "reverse"])
@pytest.mark.parametrize("second", [jax.jacfwd, jax.grad], ids=["forward", "reverse"])
@pytest.mark.parametrize("f", [_scalar_scan, _scalar_closure, _scalar_while_loop])
def test_second_derivatives_exist_at_a_number_of_python(
    f: Callable, first: Callable, second: Callable
) -> None:
    """JAX passes the Python number itself to the rules of a primitive, and a number has no dtype."""
    expected = second(first(f))(jnp.float32(0.3))
    assert abs(second(first(f))(0.3) - expected) <= 1e-5 * abs(expected)
