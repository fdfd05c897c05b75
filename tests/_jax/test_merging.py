"""Values that are one value once the compiler has merged equal operations."""

import jax
import jax.numpy as jnp
import pytest

from remat._jax import merging


def _returned(f, *args):
    """Return the IR values that a function returns, as JAX lowers it."""
    functions = jax.jit(f).lower(*args).compiler_ir().body.operations
    (main,) = (op for op in functions if str(op.attributes["sym_name"]) == '"main"')
    return list(list(main.regions[0].blocks[0])[-1].operands)


def _n_values(f, *args):
    return len(set(merging.merged(_returned(f, *args))))


def _rounded(x):
    return jax.lax.reduce_precision(jnp.sin(x), exponent_bits=8, mantissa_bits=23)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (jnp.sin(x), jnp.sin(x)),
        lambda x: (x + jnp.sin(x), x + jnp.sin(x)),
        lambda x: (jnp.sin(x), jnp.sin(x).reshape(2, 2)),
        lambda x: (x, x.reshape(4, 1).reshape(2, 2)),
        lambda x: (jnp.sin(x), _rounded(x)),
        lambda x: (jnp.cos(jnp.sin(x)), jnp.cos(_rounded(x))),
        lambda x: (jax.lax.top_k(jnp.sin(x), 2)[0], jax.lax.top_k(jnp.sin(x), 2)[0]),
    ],
)
def test_what_the_compiler_merges_is_one_value(f):
    assert _n_values(f, jnp.ones(4)) == 1


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (jnp.sin(x), jnp.cos(x)),
        lambda x: (jnp.sin(x), jnp.sin(x + 1)),
        lambda x: (x[:2], x[2:]),
        lambda x: tuple(jnp.zeros((4, 4)) + x.reshape(shape) for shape in ((1, 4), (4, 1))),
        lambda x: tuple(
            jax.lax.broadcast_in_dim(x.reshape(shape), (4, 4), (0, 1)) for shape in ((1, 4), (4, 1))
        ),
        lambda x: (x - jnp.sin(x), jnp.sin(x) - x),
        lambda x: (x, jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)),
        lambda x: (jnp.sum(x), jnp.max(x)),
        lambda x: jax.lax.top_k(x, 4),
        lambda x: (jax.lax.optimization_barrier(x), jax.lax.optimization_barrier(x)),
        lambda x: tuple(
            jax.pure_callback(jnp.sin, jax.ShapeDtypeStruct((4,), jnp.float32), x) for _ in range(2)
        ),
    ],
)
def test_what_differs_is_two_values(f):
    assert _n_values(f, jnp.ones(4)) == 2


def test_arguments_are_different_values():
    assert _n_values(lambda x, y: (x, y, x), jnp.ones(4), jnp.ones(4)) == 2


def test_long_chains_are_compared_in_part():
    def chain(x):
        for _ in range(2000):
            x = jnp.sin(x)
        return x

    assert _n_values(lambda x: (chain(x), chain(x)), jnp.ones(4)) == 2
    assert _n_values(lambda x: (jnp.sin(x), chain(jnp.sin(x))), jnp.ones(4)) == 2
