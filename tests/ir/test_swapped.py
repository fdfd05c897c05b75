"""Products that are transposed, as products with swapped operands."""

import re

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from remat.ir import jaxprs
from remat.ir.swapped import with_swapped_products

KEY = jax.random.key(0)
W = jax.random.normal(KEY, (8, 6))
X = jax.random.normal(KEY, (4, 8))


def swapped(fun, *args):
    """Return a function's jaxpr with swapped products, closed."""
    closed = jax.make_jaxpr(fun)(*args)
    return closed.replace(jaxpr=with_swapped_products(closed.jaxpr))


def count(closed, primitive):
    return sum(eqn.primitive.name == primitive for eqn in jaxprs.equations(closed.jaxpr))


def check(fun, *args):
    """Check that a program without transpositions has the same results, and return its jaxpr."""
    closed = swapped(fun, *args)
    got = jax.tree.leaves(
        jax.jit(lambda *xs: jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *xs))(
            *jax.tree.leaves(args)
        )
    )
    for a, b in zip(got, jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-5, atol=1e-6)
        assert a.sharding.is_equivalent_to(b.sharding, b.ndim)
    jax.extend.core.check_jaxpr(closed.jaxpr)
    return closed


def loss(w, x):
    return jnp.tanh(x @ w).sum()


def test_gradients_of_weights_are_not_transposed():
    assert count(check(jax.grad(loss), W, X), "transpose") == 0


def operands_of_products(fun, *args):
    """Return the shapes of the operands of the last product of a compiled program."""
    text = jax.jit(fun).lower(*args).compile().as_text()
    shapes = dict(re.findall(r"%?([\w.\-]+) = \w+\[([0-9,]*)\]", text))
    *_, operands = re.findall(r" (?:dot|custom-call)\(([^)]*)\)", text)
    return [shapes[name.strip().lstrip("%")] for name in operands.split(",")]


@pytest.mark.parametrize("rows", [(64,), (4, 16)])
def test_operands_have_the_order_that_compilers_give_them(rows):
    x = jax.random.normal(KEY, (*rows, 32))
    w = jax.random.normal(KEY, (32, 48))
    closed = swapped(jax.grad(loss), w, x)

    def run(w, x):
        return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, w, x)

    assert count(closed, "transpose") == len(rows) - 1
    assert operands_of_products(run, w, x) == operands_of_products(jax.grad(loss), w, x)


def test_operands_of_different_types_keep_their_precision():
    def product(a, b):
        precision = (jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT)
        out = jax.lax.dot_general(
            a, b, (((0,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
        )
        return out.T

    closed = check(product, X.astype(jnp.bfloat16), X[:, :3].astype(jnp.bfloat16))
    (eqn,) = closed.jaxpr.eqns
    assert eqn.params["precision"] == (jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST)
    assert eqn.outvars[0].aval.shape == (3, 8)


def test_bodies_of_loops_and_branches_are_changed_too():
    def step(w, x):
        def body(w, x):
            return jax.lax.cond(
                x.sum() > 0, lambda w: w - jax.grad(loss)(w, x), lambda w: w, w
            ), None

        return jax.lax.scan(body, w, jnp.stack([x, x + 1]))[0]

    assert count(jax.make_jaxpr(step)(W, X), "transpose") == 1
    assert count(check(step, W, X), "transpose") == 0


@pytest.mark.parametrize(
    "fun",
    [
        lambda w, x: (lambda product: (product.T, jnp.sin(product)))(x @ w),  # read twice
        lambda w, x: jnp.swapaxes(jnp.matmul(x[None], w[None]), 1, 2),  # of a batch
        lambda w, x: jnp.transpose(jnp.tensordot(x, w[:, None], 1), (1, 0, 2)),  # not of a matrix
        lambda w, x: w.T,  # not of a product
    ],
)
def test_other_transpositions_stay(fun):
    fun = jax.jit(fun)
    before = jax.make_jaxpr(fun)(W, X)
    assert count(swapped(fun, W, X), "transpose") == count(before, "transpose") > 0
    check(fun, W, X)


def test_a_product_that_is_a_result_as_well_stays():
    def both(w, x):
        product = x @ w
        return product, product.T

    assert count(check(both, W, X), "transpose") == 1


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_products_keep_their_shardings(kind):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind, kind))
    w = jax.device_put(jax.random.normal(KEY, (8, 16)), NamedSharding(mesh, P(None, "tensor")))
    x = jax.device_put(X, NamedSharding(mesh, P("data", None)))
    with jax.set_mesh(mesh):
        closed = check(jax.grad(loss), w, x)
    assert count(closed, "transpose") == 0


def test_products_in_shard_maps_are_changed_too():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def local(w, x):
        return jax.lax.psum(jax.grad(loss)(w, x), "data")

    step = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    assert count(check(step, W, X), "transpose") == 0
