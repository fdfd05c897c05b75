"""Numbers that round the same whether or not the compiler knows them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from remat import _jax
from remat.ir.numbers import reciprocal, unsimplified_numbers

X = jax.random.normal(jax.random.key(0), (64,))
OPERATIONS = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "max": jnp.maximum,
    "min": jnp.minimum,
}


def places(fun):
    return unsimplified_numbers(_jax.open_jaxpr(jax.make_jaxpr(fun)(X)))


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (lambda x: x * 2.0, {0: [1]}),
        (lambda x: -0.25 * x, {0: [0]}),
        (lambda x: x / 4.0, {0: [1]}),
        (lambda x: jnp.maximum(x, 0.3), {0: [1]}),
        (lambda x: x > 0.3, {0: [1]}),
        (lambda x: x + 0.3, {0: [1]}),
        (lambda x: x * 0.3, {}),  # is a factor of another product
        (lambda x: x / 3.0, {}),  # a product with 1/3
        (lambda x: 2.0 / x, {}),
        (lambda x: (x + 0.1) + 0.7, {}),  # one sum with 0.8
        (lambda x: 0.7 - (x + 0.1), {}),
        (lambda x: (x + 0.1) * (x + 0.7), {0: [1], 1: [1]}),
        (lambda x: x.sum() * 2.0, {}),  # no array
        (lambda x: jnp.round(x).astype(int) * 2, {}),
    ],
)
def test_places_of_numbers(fun, expected):
    assert places(fun) == expected


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(OPERATIONS)),
            st.sampled_from((0.3, 2.0, -0.5, 3.0, 0.7)),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_unknown_numbers_change_no_bit(operations):
    def chain(x):
        for name, number, is_first in operations:
            x = OPERATIONS[name](*((number, x) if is_first else (x, number)))
        return x

    jaxpr = _jax.open_jaxpr(jax.make_jaxpr(chain)(X))
    found = unsimplified_numbers(jaxpr)

    def unknown(x, numbers):
        values = {jaxpr.invars[0]: x}
        for n, eqn in enumerate(jaxpr.eqns):
            operands = [values[v] if _jax.is_var(v) else v.val for v in eqn.invars]
            for at in found.get(n, ()):
                operands[at] = numbers[n, at]
            values[eqn.outvars[0]] = eqn.primitive.bind(*operands, **eqn.params)
        return values[jaxpr.outvars[0]]

    numbers = {(n, at): jnp.float32(jaxpr.eqns[n].invars[at].val) for n in found for at in found[n]}
    np.testing.assert_array_equal(jax.jit(unknown)(X, numbers), jax.jit(chain)(X))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("divisor", [2.0, -0.25, 128.0, 2.0**-14, 2.0**14, 2.0**15, 2.0**16, 3.0])
def test_products_with_reciprocals_equal_quotients(dtype, divisor):
    """Powers of two whose reciprocals are normal numbers have one, and it changes no bit."""
    info = jnp.finfo(dtype)
    x = jnp.array([1.0, 1.7, -3.0, info.max, info.tiny, float(info.tiny) * 1.5], dtype)
    with np.errstate(over="ignore"):
        number = np.asarray(divisor, dtype)
    jaxpr = jax.make_jaxpr(lambda x: x / number)(x).jaxpr
    (eqn,) = jaxpr.eqns
    found = reciprocal(eqn.invars[1])
    is_normal = abs(1 / divisor) >= float(info.tiny) and np.isfinite(float(number))
    assert (found is not None) == (divisor != 3.0 and is_normal)
    if found is not None:
        exact = np.asarray(x, np.float64) / divisor
        with np.errstate(over="ignore"):
            expected, product = exact.astype(dtype), np.asarray(x) * found.val
        np.testing.assert_array_equal(product, expected)
