"""The memory of loop bodies: slices of stacks and carries take what the compiler says."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat.program.from_jaxpr import program_of_jaxpr
from remat.program.fusion import fuse
from remat.solvers import no_remat

D, LENGTH = 64, 6
X = jnp.ones((D, D))
XS = jnp.ones((LENGTH, D, D))
NESTED = jnp.ones((LENGTH, 4, D, D))


def over(step, xs, x):
    return lax.scan(step, x, xs)[0]


def multiplied(c, w):
    return jnp.tanh(c @ w), None


def scaled(c, w):
    return jnp.tanh(c * w), None


def rnn(c, w):
    z = jnp.tanh(c @ w)
    return z, z


def residual(c, w):
    return c + jnp.tanh(c @ w) @ w.T, None


def momentum(state, w):
    x, m = state
    m = 0.9 * m + jnp.sin(x) * w
    return (x - 0.1 * m, m), None


def written(state, w):
    x, rows, i = state
    x = jnp.tanh(x @ w)
    return (x, lax.dynamic_update_index_in_dim(rows, x, i, 0), i + 1), None


def gradient_of(step, xs):
    return jax.grad(lambda xs, x: jnp.sum(jnp.sin(over(step, xs, x))))(xs, X)


STEPS = {
    "a product reads a slice": lambda xs: over(multiplied, xs, X),
    "an elementwise operation reads a slice": lambda xs: over(scaled, xs, X),
    "products of two slices": lambda xs: over(
        lambda c, w: (jnp.tanh(c @ w[0]) @ w[1], None), (xs, 2 * xs), X
    ),
    "a carry that is stacked, too": lambda xs: lax.scan(rnn, X, xs),
    "a residual": lambda xs: over(residual, xs, X),
    "two carries, updated in place": lambda xs: over(momentum, xs, (X, X)),
    "rows of a carry are written": lambda xs: over(written, xs, (X, jnp.zeros_like(xs), 0)),
    "two carries, multiplied": lambda xs: over(
        lambda s, w: ((s[0] @ s[1], s[1] @ s[0]), None), xs, (X, X)
    ),
    "a branch reads a slice": lambda xs: over(
        lambda c, w: (lax.cond(c[0, 0] > 0, lambda c, w: rnn(c, w)[0], lambda c, w: c, c, w), None),
        xs,
        X,
    ),
    "a loop reads a slice": lambda xs: over(
        lambda c, w: (lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c * w), c), None), xs, X
    ),
    "gradient": lambda xs: gradient_of(multiplied, xs),
    "gradient of a residual": lambda xs: gradient_of(residual, xs),
}
NESTED_STEPS = {
    "a loop over slices of slices": lambda xs: over(
        lambda c, w: (over(multiplied, w, c), None), xs, X
    ),
    "elementwise": lambda xs: over(lambda c, w: (over(scaled, w, c), None), xs, X),
    "gradient": lambda xs: gradient_of(lambda c, w: (over(multiplied, w, c), None), xs),
}


@pytest.mark.parametrize(
    ("step", "xs"),
    [
        *(pytest.param(step, XS, id=name) for name, step in STEPS.items()),
        *(pytest.param(step, NESTED, id=f"nested: {name}") for name, step in NESTED_STEPS.items()),
    ],
)
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="compilers for devices fuse slices")
def test_the_model_agrees_with_the_compiler(step, xs):
    compiled = jax.jit(step).lower(xs).compile().memory_analysis().temp_size_in_bytes
    program = program_of_jaxpr(jax.make_jaxpr(step)(xs).jaxpr)
    modelled = no_remat(
        fuse(program, lambda *_: 1.0, duplicates=False, apart=True).graph
    ).peak_bytes
    assert abs(modelled - compiled) <= 0.08 * compiled + X.nbytes // 8
