"""Whatever is decided about a region, its values and gradients stay what they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st

import remat
from planner.region_cases import (
    CASES,
    assert_same,
    normal,
    random_application,
    run_in,
    traced_in,
)
from remat import _jax
from remat.planner.marked.emit import without_copies

#: Where 16 bits round, how far results may be apart, as a share of the largest.
ROUNDING = {"bfloat16": 2e-2, "matmul_with_preferred_types": 2e-3}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_random_decisions_change_no_value(name, seed):
    step, args = CASES[name]()
    expected = run_in(None, step, args)
    assert_same(
        run_in(random_application(step, args, seed), step, args),
        expected,
        within=ROUNDING.get(name, 2e-6),
    )


@pytest.mark.parametrize("name", CASES)
def test_random_decisions_that_offload_change_no_value(name):
    step, args = CASES[name]()
    expected = run_in(None, step, args)
    assert_same(
        run_in(random_application(step, args, 2, offload=True), step, args),
        expected,
        within=ROUNDING.get(name, 2e-6),
    )


@pytest.mark.parametrize("name", ["dense_chain", "nested_scans", "microbatches", "two_regions"])
def test_no_tracer_leaks(name):
    step, args = CASES[name]()
    application = random_application(step, args, 0)
    with jax.checking_leaks():
        traced_in(application, step, args)


UNARY = (jnp.sin, jnp.tanh, jnp.exp, lambda x: x.T, lambda x: jnp.flip(x, 0), jax.nn.relu)
BINARY = (jnp.add, jnp.multiply, jnp.matmul, jnp.subtract)


@st.composite
def programs(draw):
    """Operations on earlier values, by number; some results are returned."""
    n = draw(st.integers(1, 8))
    operations = []
    for i in range(n):
        which = draw(st.integers(0, len(UNARY) + len(BINARY)))
        operations.append((which, draw(st.integers(0, i + 1)), draw(st.integers(0, i + 1))))
    return tuple(operations), draw(st.sets(st.integers(0, n + 1), min_size=1))


def of_program(operations, returned):
    @remat.auto
    def region(w, x):
        values = [w, x]
        for which, a, b in operations:
            if which < len(UNARY):
                new = UNARY[which](values[a])
            elif which < len(UNARY) + len(BINARY):
                new = BINARY[which - len(UNARY)](values[a], values[b])
            else:
                other = values[b]
                new, _ = jax.lax.scan(
                    lambda h, _, other=other: (jnp.cos(h) * other, None), values[a], length=3
                )
            values.append(new / (1 + jnp.max(jnp.abs(new))))
        return [values[i] for i in sorted(returned)]

    def loss(w, x):
        return sum(jnp.sum(jnp.sin(v)) for v in region(jnp.cos(w), x))

    return jax.value_and_grad(loss, (0, 1))


@settings(max_examples=12)
@given(programs(), st.integers(0, 1000))
def test_random_decisions_about_random_programs_change_no_value(program, seed):
    step = of_program(*program)
    args = normal(3, 3), normal(3, 3, seed=1)
    expected = run_in(None, step, args)
    assert_same(run_in(random_application(step, args, seed), step, args), expected)


def test_what_loops_hand_through_is_taken_from_where_they_have_it():
    def f(start, xs):
        def body(carry, x):
            kept, total = carry
            return (kept, total + x), (x, 2 * x)

        return jax.lax.scan(body, (start, start), xs)

    closed = jax.make_jaxpr(f)(jnp.ones(3), jnp.ones((4, 3)))
    jaxpr = closed.jaxpr
    changed = without_copies(jaxpr)
    assert (changed.outvars[0], changed.outvars[2]) == tuple(jaxpr.invars)
    (loop,) = changed.eqns
    assert len(loop.outvars) == 2
    start, xs = jnp.arange(3.0), jnp.arange(12.0).reshape(4, 3)
    expected = jax.tree.leaves(f(start, xs))
    for a, b in zip(_jax.eval_jaxpr(changed, (), start, xs), expected):
        assert (a == b).all()
    assert without_copies(changed) is changed
