"""Operations that XLA for CPU expands or writes to memory: the model counts what the compiler does."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat.program.expansion import expanded_bytes
from remat.program.from_jaxpr import program_of_jaxpr
from remat.program.fusion import fuse
from remat.solvers import no_remat

IMAGES = jnp.ones((4, 32, 32, 8))
KERNEL = jnp.ones((3, 3, 8, 8))
MATRIX = jnp.ones((256, 256))


def squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(x))


def pooled(x: jax.Array, size: int, stride: int) -> jax.Array:
    window, strides = (1, size, size, 1), (1, stride, stride, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, "SAME")


def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def gradient_of_pooling(x: jax.Array) -> jax.Array:
    return jax.grad(lambda x: squares(pooled(jnp.tanh(x), 2, 2)))(x)


def gradient_of_overlapping_pooling(x: jax.Array) -> jax.Array:
    return jax.grad(lambda x: squares(pooled(jnp.tanh(x), 3, 1)))(x)


def gradient_of_kernel(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.grad(lambda k: squares(convolved(jnp.tanh(x), k)))(kernel)


def dropped_out(x: jax.Array, key: jax.Array) -> jax.Array:
    return squares(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.tanh(x), 0.0))


def rolled(x: jax.Array) -> jax.Array:
    return squares(jnp.roll(jnp.tanh(x), 3, 1))


GROUPS = jnp.full(8, 64)
ROWS = jnp.ones((512, 64))
WEIGHTS = jnp.ones((8, 64, 128))


def of_groups(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot(x, weights, sizes)


def gradient_of_rows(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    _, pullback = jax.vjp(lambda x: of_groups(x, weights, sizes), x)
    return pullback(jnp.sin(x @ weights[0]))[0]


def gradient_of_weights(
    x: jax.Array, weights: jax.Array, sizes: jax.Array, cotangent: jax.Array
) -> jax.Array:
    _, pullback = jax.vjp(lambda w: of_groups(x, w, sizes), weights)
    return pullback(cotangent)[0]


def joined(x: jax.Array) -> jax.Array:
    return squares(jnp.concatenate([jnp.tanh(x), 2 * x], 1))


@pytest.mark.parametrize(
    ("step", "args"),
    [
        (gradient_of_pooling, [IMAGES]),
        (gradient_of_overlapping_pooling, [IMAGES]),
        (gradient_of_kernel, [IMAGES, KERNEL]),
        (dropped_out, [MATRIX, jax.random.key(0)]),
        (rolled, [MATRIX]),
        (joined, [MATRIX]),
        (of_groups, [ROWS, WEIGHTS, GROUPS]),
        (gradient_of_rows, [ROWS, WEIGHTS, GROUPS]),
        (gradient_of_weights, [ROWS, WEIGHTS, GROUPS, ROWS @ WEIGHTS[0]]),
    ],
)
def test_the_model_counts_what_the_compiler_writes(step: Callable, args: list[jax.Array]) -> None:
    compiled = jax.jit(step).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert modelled_bytes(step, args) == pytest.approx(compiled, rel=0.05)


def modelled_bytes(step: Callable, args: list[jax.Array]) -> int:
    program = program_of_jaxpr(jax.make_jaxpr(step)(*args).jaxpr)
    fused = fuse(program, lambda flops, n_bytes, dtype: 1.0, apart=True)
    return int(no_remat(fused.graph).peak_bytes)


@pytest.mark.parametrize(
    ("impl", "shape", "per_number"), [("threefry2x32", (64,), 12), ("rbg", (64,), 0)]
)
def test_only_bits_of_threefry_keys_come_from_a_loop(
    impl: str, shape: tuple[int, ...], per_number: int
) -> None:
    jaxpr = jax.make_jaxpr(lambda key: jax.random.bits(key, shape))(jax.random.key(0, impl=impl))
    (bits,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "random_bits")
    assert expanded_bytes(bits) == 64 * per_number
