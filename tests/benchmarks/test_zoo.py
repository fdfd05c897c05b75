"""The models of the zoo have the structure that benchmarks assume, and FLOPs are counted correctly."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks.zoo import ZOO, flops
from benchmarks.zoo.baselines import Point, best_baseline, losses
from benchmarks.zoo.model import step, train_step

import remat


def shape(*dimensions: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dimensions, jnp.float32)


# --------------------------------------------------------------------------------------------------
# Models


@pytest.mark.parametrize("size", ["tiny", "cpu", "real"])
@pytest.mark.parametrize("name", ZOO)
def test_a_loss_is_a_scalar_at_every_size(name: str, size: str) -> None:
    model = ZOO[name](size)
    value = jax.eval_shape(model.loss(), *model.arguments())
    assert (value.shape, value.dtype) == ((), jnp.float32)


@pytest.mark.parametrize("name", ["lstm", "unet"])
def test_a_tiny_loss_is_finite_and_the_same_in_both_forms(name: str) -> None:
    model = ZOO[name]("tiny")
    args = model.example()
    value = jax.jit(model.loss())(*args)
    assert np.isfinite(value)
    blocks = jax.jit(model.blocks(remat.checkpoint))(*args)
    np.testing.assert_allclose(value, blocks, rtol=1e-5)


@pytest.mark.parametrize("name", ZOO)
def test_the_blocks_are_wrapped(name: str) -> None:
    model = ZOO[name]("tiny")
    wrapped = []

    def wrap(fun):
        wrapped.append(fun)
        return fun

    jax.eval_shape(model.blocks(wrap), *model.arguments())
    assert wrapped
    plain = flops.count(step(model.loss()), *model.arguments())
    blocks = flops.count(step(model.blocks(jax.checkpoint)), *model.arguments())
    assert blocks.total > plain.total


def test_arguments_are_the_shapes_of_the_example() -> None:
    model = ZOO["lstm"]("tiny")
    given, made = jax.tree.leaves(model.arguments()), jax.tree.leaves(model.example())
    assert [(x.shape, x.dtype) for x in given] == [(x.shape, x.dtype) for x in made]


def test_adam_lowers_the_loss() -> None:
    model = ZOO["lstm"]("tiny")
    params, batch = model.example()
    moments = jax.tree.map(jnp.zeros_like, (params, params))
    update, n = jax.jit(train_step(model.loss(), rate=1e-2)), jnp.zeros((), int)
    values = []
    for _ in range(20):
        params, moments, n, value = update(params, moments, n, batch)
        values.append(float(value))
    assert values[-1] < values[0] - 0.1


# --------------------------------------------------------------------------------------------------
# Baselines


def test_the_opponents_are_every_policy_at_both_places() -> None:
    labels = list(losses(ZOO["decoder"]("tiny")))
    assert len(labels) == 6
    assert "blocks dots_saveable" in labels
    assert "whole nothing_saveable" in labels


def test_the_best_baseline_has_the_fewest_flops_within_the_peak() -> None:
    points = [Point("a", 10, 0, 0, 100), Point("b", 5, 0, 0, 140), Point("c", 4, 0, 0, 130)]
    assert best_baseline(points, 10) is points[0]
    assert best_baseline(points, 5) is points[2]
    assert best_baseline(points, 3) is None


# --------------------------------------------------------------------------------------------------
# FLOPs


def test_a_product_counts_two_operations_per_multiply_add() -> None:
    counted = flops.count(
        lambda a, b: jnp.einsum("bij,bjk->bik", a, b), shape(5, 2, 3), shape(5, 3, 4)
    )
    assert counted == flops.Flops(2 * 5 * 2 * 3 * 4, 2 * 5 * 2 * 3 * 4)


def test_a_convolution_counts_its_kernel_once_per_output() -> None:
    def convolve(x, k, stride):
        return jax.lax.conv_general_dilated(
            x, k, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    x, k = shape(2, 8, 8, 3), shape(3, 3, 3, 5)
    for stride, outputs in ((1, 64), (2, 16)):
        forward = 2 * (2 * outputs * 5) * (3 * 3 * 3)
        assert flops.count(lambda x, k, s=stride: convolve(x, k, s), x, k).matmul == forward
        # The gradients of input and kernel take equal FLOPs.
        both = flops.count(
            lambda x, k, y, s=stride: jax.vjp(lambda x, k: convolve(x, k, s), x, k)[1](y),
            x,
            k,
            jax.eval_shape(lambda x, k, s=stride: convolve(x, k, s), x, k),
        )
        assert both.matmul == 2 * forward


def test_grouped_convolutions_count_the_channels_they_read() -> None:
    counted = flops.count(
        lambda x, k: jax.lax.conv_general_dilated(
            x,
            k,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=4,
        ),
        shape(1, 4, 4, 8),
        shape(3, 3, 2, 8),
    )
    assert counted.matmul == 2 * (16 * 8) * (3 * 3 * 2)


def test_a_loop_counts_its_body_as_often_as_it_runs() -> None:
    def scanned(a):
        return jax.lax.scan(lambda x, _: (x @ a, None), a, length=7)[0]

    def counted_up(a):
        return jax.lax.while_loop(lambda c: c[0] < 7, lambda c: (c[0] + 1, c[1] @ a), (0, a))[1]

    assert flops.count(scanned, shape(4, 4)).matmul == 7 * 128
    counted = flops.count(counted_up, shape(4, 4))
    assert (counted.matmul, counted.n_unknown_loops) == (7 * 128, 0)


def test_a_loop_of_unknown_length_counts_once_and_is_reported() -> None:
    counted = flops.count(
        lambda a, n: jax.lax.fori_loop(0, n, lambda _, x: x @ a, a), shape(4, 4), 3
    )
    assert (counted.matmul, counted.n_unknown_loops) == (128, 1)


def test_the_dearest_branch_counts() -> None:
    counted = flops.count(
        lambda p, a: jax.lax.cond(p, lambda a: a @ a, lambda a: a, a), True, shape(4, 4)
    )
    assert counted.matmul == 128


def test_dead_code_is_not_counted() -> None:
    assert flops.count(lambda a: (a @ a, a)[1], shape(4, 4)) == flops.Flops()


@pytest.mark.parametrize("checkpoint", [jax.checkpoint, remat.checkpoint])
def test_recomputation_is_counted(checkpoint) -> None:
    def layer(a, x):
        return jnp.tanh(jnp.tanh(x @ a) @ a)

    def gradient(layer):
        return jax.value_and_grad(lambda a, x: layer(a, x).sum())

    args = shape(4, 4), shape(4, 4)
    plain = flops.count(gradient(layer), *args)
    again = flops.count(gradient(checkpoint(layer)), *args)
    # The forward pass, both gradients of the second product, and the gradient of the first one by `a`; then
    # both products again, for the derivative of tanh.
    assert (plain.matmul, again.matmul) == (5 * 128, 7 * 128)


def test_cheap_operations_count_in_the_total_only() -> None:
    counted = flops.count(lambda x: jnp.sum(jnp.sin(x.T.reshape(-1)) * 2.0), shape(3, 5))
    assert counted == flops.Flops(0, 15 + 15 + 15)


def test_random_bits_count_as_operations_of_their_generator() -> None:
    def bits(key, dtype=jnp.uint32):
        return jax.random.bits(key, (1000,), dtype)

    # For two words: 20 rounds of an addition, a rotation (two shifts and an or) and an exclusive or, and ten
    # additions of the key.
    assert flops.count(bits, jax.random.key(0)) == flops.Flops(0, 55 * 1000)
    assert flops.count(lambda key: bits(key, jnp.uint8), jax.random.key(0)).total == 55 * 250
