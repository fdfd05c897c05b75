"""`concrete=True`: Python control flow on the values of arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import assert_same

import remat

concretely = functools.partial(remat.checkpoint, concrete=True)


def branch(x):
    return jnp.sin(x) * x if x > 0 else jnp.cos(x)


def newton(x):
    y = x
    while abs(y * y - x) > 1e-3:
        y = 0.5 * (y + x / y)
    return y


def loops(x):
    for _ in range(int(x) + 2):
        x = jnp.sin(x) if x > 0.5 else x * 1.25
    return x


def nested(x):
    return concretely(branch)(2 * x) * concretely(lambda: branch(x))() if x > 0 else newton(-x)


def relu(x):
    return jax.nn.relu(x) * jax.nn.silu(x) if jax.nn.relu(x) > 0 else x * x


def scanned(x):
    carry, _ = lax.scan(lambda c, _: (2 * c, None), x, None, length=3)
    return jnp.sin(x) if lax.cond(carry > 0, jnp.abs, jnp.negative, carry) > 1 else x


def referenced(x):
    ref = jax.new_ref(x)
    ref[...] = jnp.sin(ref[...])
    return ref[...] * x if x > 0 else x


PROGRAMS = [branch, newton, loops, nested, relu, scanned, referenced]
TRANSFORMS = {
    "call": lambda f: lambda x: jnp.asarray(f(x)),
    "grad": jax.grad,
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](1.0),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (2.0,)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](2.0),
    "second order": lambda f: jax.grad(jax.grad(f)),
    "hessian": jax.hessian,
    "as an argument of another": lambda f: jax.grad(
        lambda x: remat.checkpoint(lambda y: jnp.sin(y) * y)(f(x))
    ),
}


@pytest.mark.parametrize("x", [1.5, -1.5])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("f", PROGRAMS)
def test_either_branch_is_differentiated(f, name, x):
    if f is newton:
        x = abs(x)
    transform = TRANSFORMS[name]
    try:
        expected = transform(f)(x)
    except Exception as e:
        if f is not referenced:
            raise
        pytest.skip(f"plain JAX of this version fails as well: {type(e).__name__}")
    assert_same(transform(concretely(f))(x), expected)


@pytest.mark.parametrize("w", [1.0, -1.0])
def test_closed_over_tracers_have_values(w):
    def h(ck, w):
        return ck(lambda x: jnp.sin(x) * w if w > 0 else jnp.cos(x))(w * 2)

    for transform in (jax.grad, jax.hessian):
        actual = transform(lambda w: h(concretely, w))(w)
        assert_same(actual, transform(lambda w: h(lambda f: f, w))(w))


@pytest.mark.parametrize(
    "convert",
    [
        bool, int, float, complex, np.asarray, np.sin, "{:.2f}".format,
        lambda x: jnp.asarray(x).item(), lambda x: jnp.asarray(x).tolist(),
    ],
    ids=lambda f: getattr(f, "__qualname__", str(f)),
)  # fmt: skip
@pytest.mark.parametrize("x", [1.5, jnp.float32(1.5)], ids=["python", "array"])
def test_python_can_have_the_value_as(convert, x):
    seen = []

    @concretely
    def f(x):
        seen.append(convert(x))
        return jnp.sin(x)

    np.testing.assert_allclose(jax.grad(f)(x), np.cos(1.5), rtol=1e-6)
    if convert is np.sin:  # of a value with the traced type, float32
        assert str(seen[0]) == str(np.sin(np.float32(1.5)))
    else:
        assert str(seen[0]) == str(convert(x))


@pytest.mark.parametrize("n", [0, 1, 3])
def test_integers_are_ranges_shapes_and_indices(n):
    def f(x, n):
        y = jnp.arange(n, dtype=jnp.float32) * x
        for _ in range(n):
            y = jnp.sin(y)
        return y.reshape((n, 1)).sum() * [1.0, 2.0, 3.0, 4.0][n]

    assert_same(jax.grad(concretely(f))(1.0, n), jax.grad(f)(1.0, n))


def test_no_tracers_leak():
    with jax.checking_leaks():
        jax.grad(concretely(branch))(1.0)


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: jax.vmap(f, axis_size=1, in_axes=None)])
def test_without_a_value_the_error_names_static_arguments(wrap):
    if wrap is not jax.jit:
        wrap, argument = jax.vmap, jnp.ones(2)
    else:
        argument = 1.0
    with pytest.raises(
        jax.errors.ConcretizationTypeError, match=r"static_argnums.*static_argnames"
    ):
        wrap(concretely(branch))(argument)


def test_without_concrete_the_error_names_the_remedies():
    with pytest.raises(
        jax.errors.ConcretizationTypeError, match=r"(?s)static_argnums.*concrete=True"
    ):
        remat.checkpoint(branch)(1.0)
