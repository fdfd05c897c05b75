"""FLOPs and bytes of equations, compared with numbers counted by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from remat.ir.flops import TRANSCENDENTAL, bytes_moved, flops_of

X = jnp.ones((4, 8), jnp.float32)
SQUARE = jnp.ones((6, 6), jnp.float32)


def total(count, fun, *args):
    return sum(count(eqn) for eqn in jax.make_jaxpr(fun)(*args).eqns)


def double(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


def kernel(cost_estimate=None):
    shape = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    block = pl.BlockSpec((1, 8), lambda i: (i, 0))
    return pl.pallas_call(
        double,
        out_shape=shape,
        grid=(4,),
        in_specs=[block],
        out_specs=block,
        cost_estimate=cost_estimate,
    )


def conv(lhs, rhs, **kw):
    kw = {"window_strides": (1,), "padding": "VALID"} | kw
    return lambda x: lax.conv_general_dilated(jnp.ones(lhs), jnp.ones(rhs), **kw)


COUNTS = {
    "elementwise": (lambda x: x + x, 32),
    "a scalar operand": (lambda x: x * 2, 32),
    "transcendental": (jnp.tanh, 32 * TRANSCENDENTAL),
    "a product": (lambda x: lax.dot(x, jnp.ones((8, 3))), 2 * 4 * 8 * 3),
    "a batched product": (
        lambda x: lax.batch_matmul(jnp.ones((5, 4, 8)), jnp.ones((5, 8, 3))),
        2 * 5 * 4 * 8 * 3,
    ),
    "an outer product": (lambda x: lax.dot_general(x, x, (((), ()), ((), ()))), 2 * 32 * 32),
    "a ragged product": (
        lambda x: lax.ragged_dot(jnp.ones((6, 3)), jnp.ones((2, 3, 5)), jnp.array([2, 4])),
        2 * 6 * 3 * 5,
    ),
    # 5 inputs and 3 taps: 3 positions with 3 products each; padded by 1 on both sides: 2 + 3 + 3 + 3 + 2.
    "a convolution": (conv((1, 2, 5), (7, 2, 3)), 2 * 2 * 7 * 9),
    "a padded convolution": (conv((1, 2, 5), (7, 2, 3), padding="SAME"), 2 * 2 * 7 * 13),
    "a strided convolution": (conv((1, 1, 5), (1, 1, 3), window_strides=(2,)), 2 * 6),
    # x 0 x 0 x with 3 taps: 2 + 1 + 2 products with data.
    "a transposed convolution": (
        conv((1, 1, 3), (1, 1, 3), lhs_dilation=(2,), padding=((0, 0),)),
        2 * 5,
    ),
    "a dilated convolution": (conv((1, 1, 5), (1, 1, 3), rhs_dilation=(2,)), 2 * 3),
    "a grouped convolution": (
        conv((1, 4, 5), (4, 1, 3), feature_group_count=4),
        2 * 4 * 9,
    ),
    "a batch-grouped convolution": (
        conv((4, 1, 5), (4, 1, 3), batch_group_count=4),
        2 * 4 * 9,
    ),
    "a sum": (lambda x: lax.reduce_sum(x, (0,)), 32),
    "an argmax": (lambda x: lax.argmax(x, 1, jnp.int32), 32),
    "a cumulative sum": (lambda x: lax.cumsum(x, 1), 64),
    "a window": (lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 1), "VALID"), 21 * 4),
    "a sort": (lambda x: lax.sort(x, dimension=1), 32 * 3),
    "a top-k": (lambda x: lax.top_k(x, 3), 32 * 2),
    "a complex FFT": (lambda x: lax.fft(x + 0j, "FFT", (8,)), 32 + 32 + 4 * 5 * 8 * 3),
    "a real FFT": (lambda x: lax.fft(x, "RFFT", (8,)), 4 * 5 * 8 * 3 // 2),
    "a view": (lambda x: lax.reshape(x, (32,)), 0),
    "a transpose": (lambda x: x.T, 0),
    "a cast": (lambda x: x.astype(jnp.bfloat16), 32),
    "a cholesky": (lambda x: lax.linalg.cholesky(SQUARE, symmetrize_input=False), 72),
    "an LU": (lambda x: lax.linalg.lu(SQUARE), 144),
    "a QR": (lambda x: lax.linalg.qr(SQUARE), 288),
    "a triangular solve": (lambda x: lax.linalg.triangular_solve(SQUARE, SQUARE), 216),
    "a scan": (lambda x: lax.scan(lambda c, _: (c * 2, None), x, None, length=7)[0], 7 * 32),
    "nested scans": (
        lambda x: lax.scan(
            lambda c, _: (lax.scan(lambda c, _: (c * 2, None), c, None, length=3)[0], None),
            x,
            None,
            length=5,
        )[0],
        15 * 32,
    ),
    "a cond": (lambda x: lax.cond(True, lambda x: x * 2 * 2, lambda x: x + 1, x), 64),
    "a while": (lambda x: lax.while_loop(lambda c: True, lambda c: c * 2, x), 32),
    "a jitted function": (jax.jit(lambda x: x * 2), 32),
    "a custom derivative": (jax.nn.relu, 32),
    "a checkpointed function": (jax.checkpoint(lambda x: x * 2 * 2), 64),
    "a kernel": (kernel(), 4 * 8),
    "a kernel with an estimate": (
        kernel(pl.CostEstimate(flops=7, transcendentals=3, bytes_accessed=9)),
        7 + 3 * TRANSCENDENTAL,
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_operations_are_those_counted_by_hand(name):
    fun, expected = COUNTS[name]
    kinds = ("dot_general", "ragged_dot_general", "conv_general_dilated", "cholesky")
    eqns = jax.make_jaxpr(fun)(X).eqns
    # Constructing the operands and masking a triangle are separate equations.
    of_interest = [eqn for eqn in eqns if eqn.primitive.name in kinds] or eqns
    assert sum(map(flops_of, of_interest)) == expected


@pytest.mark.parametrize(("argument", "expected"), [(0, 2 * 6 * 3 * 5), (1, 2 * 6 * 3 * 5)])
def test_both_gradients_of_a_ragged_product_cost_as_much_as_the_product(argument, expected):
    def loss(lhs, rhs):
        return lax.ragged_dot(lhs, rhs, jnp.array([2, 4])).sum()

    args = (jnp.ones((6, 3)), jnp.ones((2, 3, 5)))
    eqns = jax.make_jaxpr(jax.grad(loss, argument))(*args).eqns
    dots = [flops_of(e) for e in eqns if e.primitive.name == "ragged_dot_general"]
    assert dots[-1] == expected


def test_a_convolution_and_its_gradients_agree_with_xla():
    x, w = jnp.ones((2, 9, 9, 3)), jnp.ones((3, 3, 3, 4))

    def loss(x, w):
        return lax.conv_general_dilated(
            x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ).sum()

    eqns = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w).eqns
    convs = [flops_of(e) for e in eqns if e.primitive.name == "conv_general_dilated"]
    assert len(convs) == 3 and len(set(convs)) == 1


def test_counting_a_large_convolution_takes_no_large_array():
    x = jax.ShapeDtypeStruct((1, 1, 10**6), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda x: lax.conv_general_dilated(x, x[..., :1000], (1,), "VALID"))(x)
    assert flops_of(jaxpr.eqns[-1]) == 2 * (10**6 - 999) * 1000


BYTES = {
    "elementwise": (lambda x: x + 1, 256),
    "an operand twice": (lambda x: x + x, 256),
    "a product": (lambda x: lax.dot(x, x.T), 256 + 128 + 128 + 64),
    "a view": (lambda x: lax.reshape(x, (32,)), 0),
    "a cast": (lambda x: x.astype(jnp.bfloat16), 128 + 64),
    "a slice": (lambda x: lax.slice(x, (0, 0), (1, 8)), 64),
    "a scan": (lambda x: lax.scan(lambda c, _: (c * 2, None), x, None, length=7)[0], 7 * 256),
    "a kernel with an estimate": (
        kernel(pl.CostEstimate(flops=7, transcendentals=3, bytes_accessed=9)),
        9,
    ),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_those_counted_by_hand(name):
    fun, expected = BYTES[name]
    assert total(bytes_moved, fun, X) == expected


def test_looking_up_and_updating_move_the_part_that_is_touched():
    table, rows = jnp.ones((1000, 8)), jnp.ones((2, 8))
    index = np.array([[1], [5]], np.int32)
    dimensions = lax.GatherDimensionNumbers((1,), (0,), (0,))
    look_up = total(bytes_moved, lambda t: lax.gather(t, index, dimensions, (1, 8)), table)
    assert look_up == 2 * 64 + 8
    dimensions = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    add = total(bytes_moved, lambda t: lax.scatter_add(t, index, rows, dimensions), table)
    assert add == 3 * 64 + 8
    update = total(bytes_moved, lambda t: lax.dynamic_update_slice(t, rows, (0, 0)), table)
    assert update == 2 * 64
