"""Equations that repeat others, and loops over the same steps."""

import jax
import jax.numpy as jnp
import pytest

from remat import _jax
from remat.ir.repetitions import without_repetitions

ROWS = jax.ShapeDtypeStruct((4, 8), jnp.float32)
NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


def _forward(rows):
    return jax.lax.map(lambda row: jax.nn.softplus(row).sum(), rows)


def _backward(rows, cotangent):
    return jax.lax.map(lambda row: cotangent * jax.nn.sigmoid(row), rows)


@pytest.mark.parametrize("is_later", [False, True])
def test_loops_that_read_later_values_are_not_merged_into_earlier_ones(is_later):
    first = _jax.open_jaxpr(jax.make_jaxpr(_forward)(ROWS))
    second = _jax.open_jaxpr(jax.make_jaxpr(_backward)(ROWS, NUMBER))
    rows, cotangent = second.invars
    names = {rows: first.invars[0]}
    inputs = second.invars if is_later else []
    merged, left = without_repetitions(first.eqns, second.eqns, names, inputs=inputs)

    def loops(eqns):
        return [eqn for eqn in eqns if eqn.primitive.name == "scan"]

    (loop,) = loops(merged)
    assert (cotangent in loop.invars) is not is_later
    assert len(loops(left)) == is_later
    assert all(cotangent not in eqn.invars for eqn in merged) or not is_later
