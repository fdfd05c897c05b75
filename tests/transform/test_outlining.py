"""On a CPU, operations with index arrays are separate functions, so that the arrays are live only there."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import remat
from remat.ir import operations
from remat.ir.jaxprs import equations

X = np.asarray(jax.random.normal(jax.random.key(0), (4, 16, 16, 8)))
LARGE_IOTA = re.compile(r"s32\[4,16,16,8\]\S* (?:iota\(|fusion\(\))")


def halve(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def loss(x):
    return jnp.sum(halve(jnp.sin(x) * x) ** 2)


def entry_of(fun, *args):
    text = jax.jit(fun).lower(*args).compile().as_text()
    return text[text.index("\nENTRY") :]


def test_index_arrays_of_max_pooling_are_inside_of_a_function_in_a_checkpoint():
    assert LARGE_IOTA.search(entry_of(jax.grad(loss), X))
    entry = entry_of(jax.grad(remat.checkpoint(loss)), X)
    assert not LARGE_IOTA.search(entry)
    assert 'inlineable="false"' in entry


@pytest.mark.parametrize("around", [lambda f: f, jax.vmap, jax.jit])
def test_gradients_are_identical(around):
    x = X[None] if around is jax.vmap else X
    wanted = jax.jit(around(jax.grad(loss)))(x)
    np.testing.assert_array_equal(jax.jit(around(jax.grad(remat.checkpoint(loss))))(x), wanted)


def test_second_derivatives_are_right():
    def second(f):
        return jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2)))(X)

    np.testing.assert_allclose(second(remat.checkpoint(loss)), second(loss), rtol=1e-4, atol=1e-5)


def test_programs_of_several_devices_have_no_such_function():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(X, NamedSharding(mesh, P("x")))
    gradient = jax.jit(jax.grad(remat.checkpoint(loss)))
    assert "remat_outline" not in gradient.lower(x).as_text()
    np.testing.assert_array_equal(gradient(x), jax.jit(jax.grad(loss))(X))


def test_a_planned_step_separates_what_it_does_not_compute_again():
    def step(weights, x):
        for w in weights:
            x = jnp.tanh(jnp.sin(x @ w) * x)
        return jnp.sum(halve(x))

    weights = [np.eye(8, dtype="float32")] * 8
    gradient = jax.value_and_grad(step)
    plan = remat.plan(gradient, weights, X, budget="75%", cache=False, progress=False)
    fitted = remat.fit(gradient, plan=plan)
    entry = fitted.lower(weights, X).compile().as_text()
    entry = entry[entry.index("\nENTRY") :]
    assert not LARGE_IOTA.search(entry)
    for mine, plain in zip(
        jax.tree.leaves(fitted(weights, X)), jax.tree.leaves(jax.jit(gradient)(weights, X))
    ):
        np.testing.assert_allclose(mine, plain, rtol=1e-4)


def test_only_operations_that_xla_expands_have_index_arrays():
    names = operations.names_where("has_index_arrays")
    assert {"select_and_scatter_add", "select_and_scatter"} <= names
    jaxpr = jax.make_jaxpr(jax.grad(loss))(X).jaxpr
    assert [e.primitive.name for e in equations(jaxpr) if e.primitive.name in names] == [
        "select_and_scatter_add"
    ]
