"""Splits as slices: the same results, one equation for each part, at any depth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from remat import _jax
from remat.ir.jaxprs import equations
from remat.ir.slices import with_slices

X = np.linspace(-1, 1, 4 * 12, dtype=np.float32).reshape(4, 12)


def gates(x):
    a, b, c = jnp.split(x, [3, 8], axis=1)
    return jnp.concatenate([jnp.tanh(c), a * jnp.sum(b)], axis=1)


def looped(x):
    def step(c, row):
        a, b = jnp.split(c + row, 2)
        return jnp.concatenate([b, jnp.sin(a)]), jnp.split(c, 3)[1]

    return lax.scan(step, x[0], x)


def branched(x):
    def one(x):
        return jnp.split(x, 2)[1]

    return lax.cond(x[0, 0] > 0, one, lambda x: x[:2], x)


PROGRAMS = {
    "gates": gates,
    "gradient": jax.grad(lambda x: jnp.sum(gates(x) ** 2)),
    "loop": looped,
    "branches": branched,
    "called": jax.jit(gates),
    "checkpointed": jax.grad(jax.checkpoint(lambda x: jnp.sum(gates(x) ** 2))),
    "mapped": jax.vmap(lambda row: jnp.split(row, 4)[2]),
    "last axis": lambda x: jnp.split(x, [0, 12], axis=-1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_stay_and_no_split_remains(name):
    jaxpr, consts, _ = _jax.trace_call(PROGRAMS[name], X)
    new = with_slices(jaxpr)
    _jax.check_jaxpr(new)
    assert not any(eqn.primitive.name == "split" for eqn in equations(new))
    for a, b in zip(
        _jax.eval_jaxpr(new, (), *consts, X), _jax.eval_jaxpr(jaxpr, (), *consts, X), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_parts_that_nothing_reads_are_not_computed():
    jaxpr, _, _ = _jax.trace_call(lambda x: jnp.split(x, 4)[2], X)
    alive, _ = _jax.dce(with_slices(jaxpr), [True], keep=[True])
    assert [eqn.primitive.name for eqn in alive.eqns] == ["slice"]


def test_slices_keep_the_source_and_scope_of_the_split():
    def step(x):
        with jax.named_scope("parts"):
            return jnp.split(x, 2)

    jaxpr, _, _ = _jax.trace_call(step, X)
    (split,) = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "split")
    for eqn in equations(with_slices(jaxpr)):
        assert _jax.source_line_of(eqn) == _jax.source_line_of(split)
        assert _jax.name_stack_of(eqn) == _jax.name_stack_of(split)


def test_programs_without_splits_and_shared_bodies_stay_the_same_objects():
    jaxpr, _, _ = _jax.trace_call(jnp.sin, X)
    assert with_slices(jaxpr) is jaxpr
    step = jax.jit(lambda x: jnp.concatenate(jnp.split(x, 2)[::-1]))
    jaxpr, _, _ = _jax.trace_call(lambda x: step(step(x)), X)
    bodies = {
        id(_jax.open_jaxpr(eqn.params["jaxpr"]))
        for eqn in with_slices(jaxpr).eqns
        if "jaxpr" in eqn.params
    }
    assert len(bodies) == 1
