"""Loops without carried arrays that never change or that equal others."""

import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from remat import _jax
from remat.ir import jaxprs
from remat.ir.carries import without_redundant_carries

X = jnp.linspace(-1.0, 1.0, 6)
ACCEPT = jnp.array([True, False, True, True, False])


def carried(jaxpr):
    """Return the number of arrays that each loop of a program carries."""
    counts = []
    for eqn in jaxprs.equations(jaxpr, jaxprs.bodies_of):
        if eqn.primitive.name == "scan":
            n_consts, n_carry = _jax.scan_arity(eqn)
            avals = [v.aval for v in eqn.invars[n_consts : n_consts + n_carry]]
        elif eqn.primitive.name == "while":
            first = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
            avals = [v.aval for v in eqn.invars[first:]]
        else:
            continue
        counts.append(sum(aval.shape != () for aval in avals))
    return counts


def check(fun, *args):
    """Check that a program's results stay the same to the bit; return its arrays carried before and after."""
    closed = jax.make_jaxpr(fun)(*args)
    new = closed.replace(jaxpr=without_redundant_carries(closed.jaxpr))
    jax.extend.core.check_jaxpr(new.jaxpr)
    leaves = jax.tree.leaves(args)
    got = jax.jit(lambda *xs: jax.core.eval_jaxpr(new.jaxpr, new.consts, *xs))(*leaves)
    expected = jax.tree.leaves(jax.jit(fun)(*args))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
        assert a.sharding.is_equivalent_to(b.sharding, b.ndim)
    return carried(closed.jaxpr), carried(new.jaxpr)


def scanned(step, *first):
    """Return a function that scans `step(accept, x, *others)`."""

    def run(*first):
        return lax.scan(lambda carry, accept: (step(accept, *carry), carry[0]), first, ACCEPT)

    return functools.partial(run, *first)


def solver(choose):
    """Return a step that carries its last point, its linearization there twice, and zeros."""

    def step(accept, x, at, slope, best_slope, zeros):
        new = x - 0.1 * slope
        there = new, jnp.cos(new), jnp.cos(new), zeros * 0
        chosen = choose(accept, there, (at, slope, best_slope, zeros))
        return (new + chosen[-1], *chosen)

    return step


def by_select(accept, new, old):
    return tuple(jnp.where(accept, a, b) for a, b in zip(new, old))


def by_cond(accept, new, old):
    return lax.cond(accept, lambda new, old: new, lambda new, old: old, new, old)


def by_two_jits(accept, new, old):
    return jax.jit(lambda accept, new, old: jax.jit(by_cond)(accept, new, old))(accept, new, old)


def by_derivative_rule(accept, new, old):
    choose = jax.custom_jvp(by_select)
    choose.defjvp(lambda primals, tangents: (choose(*primals), tangents[1]))
    return choose(accept, new, old)


def by_barrier(accept, new, old):
    return lax.optimization_barrier(jax.tree.map(jnp.copy, by_select(accept, new, old)))


CHOICES = [by_select, by_cond, by_two_jits, by_derivative_rule, by_barrier]


@pytest.mark.parametrize("choose", CHOICES)
def test_equal_arrays_are_carried_once(choose):
    step = solver(choose)
    # The zeros are products here, about which nothing is known.
    assert check(scanned(step, X, X, X, X, 0 * X)) == ([5], [4])


def test_arrays_that_start_differently_are_carried_both():
    step = solver(by_select)
    assert check(scanned(step, X, X, X, 2 * X, 0 * X)) == ([5], [5])


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("first", [jnp.zeros_like, jnp.copy, lambda x: jnp.tanh(x)[::-1]])
def test_arrays_that_never_change_are_not_carried(choose, first):
    def run(x):
        unchanged = first(x)

        def step(carry, accept):
            x, same = carry
            (same,) = choose(
                accept, (first(unchanged) if first is jnp.zeros_like else unchanged,), (same,)
            )
            return (jnp.sin(x) + same, same), same[0]

        return lax.scan(step, (x, unchanged), ACCEPT)

    assert check(run, X) == ([2], [1])


def test_a_change_that_takes_several_steps_to_arrive_is_seen():
    def step(accept, x, a, b, c):
        return jnp.sin(x), b, c, jnp.where(accept, x, c)

    zeros = jnp.zeros_like(X)
    assert check(scanned(step, X, zeros, zeros, zeros)) == ([4], [4])


def test_arrays_that_change_places_are_equal():
    def step(accept, x, a, b, c):
        return jnp.sin(x) + a, b, c, jnp.where(accept, a, b)

    assert check(scanned(step, X, X, X, X)) == ([4], [1])


def test_numbers_are_carried_on():
    def run(x):
        def step(carry, accept):
            x, flag, count = carry
            return (x * count, jnp.where(accept, True, flag), count), flag

        return lax.scan(step, (x, True, 2.0), ACCEPT)

    closed = jax.make_jaxpr(run)(X)
    assert without_redundant_carries(closed.jaxpr) is closed.jaxpr


@pytest.mark.parametrize("fill", [True, False])
def test_conditions_of_while_loops_read_arrays_that_are_not_carried(fill):
    def run(x, limit):
        limit = jnp.full(x.shape, 3.0) if fill else limit

        def step(carry):
            i, x, y, same, _ = carry
            same = lax.cond(i > 1, lambda: limit, lambda: same)
            x, y = (jnp.where(i > 2, jnp.tanh(v) + same, v) for v in (x, y))
            return i + 1, x, y, same, same

        def goes_on(carry):
            i, _, y, same, again = carry
            return (i < 10) & jnp.all(y < same) & jnp.all(again == same)

        return lax.while_loop(goes_on, step, (0, x, x, limit, limit))

    assert check(run, X, X + 3) == ([4], [1])


def test_loops_in_loops_branches_and_mapped_functions():
    def inner(x):
        step = solver(by_cond)
        return scanned(step, x, x, x, x, jnp.zeros_like(x))()[0][1]

    def run(x):
        def step(i, carry):
            x, same = carry
            return lax.cond(i > 1, inner, jnp.cos, x) + same, jnp.where(
                i > 1, jnp.ones(x.shape), same
            )

        return lax.fori_loop(0, 3, step, (x, jnp.ones(x.shape)))[0]

    # The innermost loop still carries its zeros: the step multiplies them, so they may change.
    assert check(run, X) == ([2, 5], [1, 4])
    assert check(jax.vmap(inner), jnp.stack([X, X + 1])) == ([5], [4])


def test_results_that_nobody_reads():
    def run(x):
        def step(carry, accept):
            x, a, b = carry
            new = jnp.sin(x) + a * b
            return (new, *by_select(accept, (new, new), (a, b))), None

        return lax.scan(step, (x, x, x), ACCEPT)[0][
            2
        ]  # it equals the second result, which is dropped

    closed = jax.make_jaxpr(run)(X)
    jaxpr, _ = _jax.dce(closed.jaxpr, [True])
    new = without_redundant_carries(jaxpr)
    assert (carried(jaxpr), carried(new)) == ([3], [2])
    jax.extend.core.check_jaxpr(new)
    consts = dict(zip(closed.jaxpr.constvars, closed.consts))
    got = jax.jit(lambda x: jax.core.eval_jaxpr(new, [consts[v] for v in new.constvars], x))(X)
    np.testing.assert_array_equal(got[0], jax.jit(run)(X))


def test_results_of_branches_that_are_the_same_in_each():
    def run(i, x, y):
        # Only the second result depends on the branch, and the third equals it.
        branches = [lambda *xs: xs[1], lambda *xs: xs[0], jnp.multiply]
        branches = [lambda x, y, f=f: (x, *[f(x, y)] * 2) for f in branches]
        same, other, again = lax.switch(i, branches, x, y)
        return same, other + same, again

    closed = jax.make_jaxpr(run)(1, X, X + 1)
    new = without_redundant_carries(closed.jaxpr)
    (cond,) = (eqn for eqn in new.eqns if eqn.primitive.name == "cond")
    assert len(cond.outvars) == 1
    assert new.outvars[0] is new.invars[1]
    check(run, 1, X, X + 1)


def test_in_shard_map():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    def run(x):
        step = solver(by_select)
        varying = lax.pcast(jnp.zeros(x.shape), ("x",), to="varying")
        return scanned(step, x, x, x, x, varying)()[0]

    assert check(run, X) == ([5], [4])


def test_chains_longer_than_the_stack():
    def step(accept, x, a, b):
        for _ in range(2000):
            a = jnp.where(accept, a, x)
        return x, b, a

    check(scanned(step, X, X, X))


@pytest.mark.parametrize("seed", range(30))
def test_random_loops(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 7))
    kinds = [int(k) for k in rng.integers(0, 3, n)]
    plan = [
        [int(k) for k in rng.integers(0, 5, 1)] + [int(k) for k in rng.integers(0, n, 3)]
        for _ in range(n)
    ]

    def step(accept, *carry):
        def value(op, i, j, k):
            a, b, c = (carry[at] for at in (i, j, k))
            if op == 0:
                return a
            if op == 1:
                return jnp.where(accept, a, b)
            if op == 2:
                return lax.cond(accept, lambda a, b: b, lambda a, b: a, a, b)
            if op == 3:
                return jnp.where(accept, jnp.where(accept, a, c), jnp.zeros(a.shape))
            return jnp.sin(a) + b

        return tuple(value(*row) for row in plan)

    def run(x):
        firsts = [jnp.zeros(x.shape), x, x + 1]
        return scanned(step, *(firsts[k] for k in kinds))()

    check(run, X)


def test_the_compiler_then_needs_less_memory():
    big = jnp.linspace(0, 1, 1 << 18)

    def run(x):
        def step(carry):
            i, x, slope, again, zeros = carry
            new = (jnp.cos(x), jnp.cos(x), jnp.zeros(x.shape))
            slope, again, zeros = by_cond(jnp.sum(x) > i, new, (slope, again, zeros))
            return i + 1, x - 0.1 * (slope + again + zeros), slope, again, zeros

        zeros = jnp.zeros(x.shape)
        return lax.while_loop(lambda carry: carry[0] < 5, step, (0, x, zeros, zeros, zeros))[1]

    closed = jax.make_jaxpr(run)(big)
    new = without_redundant_carries(closed.jaxpr)

    def temporaries(fun):
        return jax.jit(fun).lower(big).compile().memory_analysis().temp_size_in_bytes

    rewritten = lambda x: jax.core.eval_jaxpr(new, closed.consts, x)  # noqa: E731
    assert temporaries(rewritten) <= temporaries(run) - big.nbytes


def test_stacks_of_numbers_that_equal_others_or_what_is_scanned_are_left_out():
    def step(c, x):
        y = jnp.sin(c.sum() * x)
        return c + y, (y, x, y, jnp.cos(y), x)

    def run(c, xs):
        c, (a, b, again, d, e) = lax.scan(step, c, xs, reverse=True)
        return c, a + again, b * e, d

    xs = jnp.arange(4.0)
    check(run, X, xs)
    new = without_redundant_carries(jax.make_jaxpr(run)(X, xs).jaxpr)
    (loop,) = (eqn for eqn in new.eqns if eqn.primitive.name == "scan")
    assert len(loop.outvars) == 1 + 2


def test_equal_stacks_of_arrays_stay_apart():
    """The backward loop may do without one of them, which is freed earlier then."""

    def run(c, xs):
        c, (a, again) = lax.scan(lambda c, x: (c + x, (c, c)), c, xs)
        return c, a, again

    new = without_redundant_carries(jax.make_jaxpr(run)(X, jnp.ones((4, 6))).jaxpr)
    _, a, again = new.outvars
    assert a is not again


def test_equal_stacks_of_numbers_are_one():
    """JAX's partial evaluation may stack the index of branches twice."""

    def step(c, x):
        index = x % 2
        return c + x, (index, index)

    def run(c, xs):
        c, (index, again) = lax.scan(step, c, xs)
        return c, index, again

    new = without_redundant_carries(jax.make_jaxpr(run)(jnp.int32(0), jnp.arange(5)).jaxpr)
    _, index, again = new.outvars
    assert index is again
    check(run, jnp.int32(0), jnp.arange(5))
