"""Loops with stacks of their own: the same results, and constants that compilers cannot merge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from remat import _jax
from remat.ir.jaxprs import equations
from remat.planner.stacks import with_own_arrays
from transform.support import assert_same

LENGTH, ROWS, WIDTH = 16, 8, 32
WS = [
    np.linspace(-1, 1, WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH) / (i + 4)
    for i in range(4)
]
XS = np.linspace(0, 1, LENGTH * ROWS * WIDTH, dtype=np.float32).reshape(LENGTH, ROWS, WIDTH)


def layers(ws, xs, reverse=False):
    def layer(w, xs):
        def step(c, x):
            c = jnp.tanh(c @ w + x)
            return c, (c, c[0] > 0, x[:0])

        return lax.scan(step, jnp.zeros((ROWS, WIDTH)), xs, reverse=reverse)

    counts = jnp.zeros(WIDTH, jnp.int32)
    for w in ws:
        _, (xs, positive, _) = layer(w, jnp.sin(xs))
        counts += jnp.sum(positive, 0, dtype=jnp.int32)
    return jnp.sum(xs), counts


def opened(step, *args):
    jaxpr, consts, _ = _jax.trace_call(step, *args)
    return jaxpr, [*consts, *jax.tree.leaves(args)]


def compiled(jaxpr, args):
    return jax.jit(lambda *xs: _jax.eval_jaxpr(jaxpr, (), *xs)).lower(*args).compile()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("gradient", [False, True])
def test_results_stay(reverse, gradient):
    def step(ws, xs):
        return layers(ws, xs, reverse)

    of = jax.value_and_grad(step, has_aux=True) if gradient else step
    jaxpr, args = opened(of, WS, XS)
    new = with_own_arrays(jaxpr)
    _jax.check_jaxpr(new)
    assert new is not jaxpr
    expected = jax.jit(of)(WS, XS)
    assert_same(list(compiled(new, args)(*args)), jax.tree.leaves(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="measures the compiler for CPU")
@pytest.mark.skipif(_jax.JAXLIB_VERSION < (0, 11, 1), reason="this compiler removes barriers early")
def test_stacks_of_many_loops_take_the_memory_of_two():
    """A stack is read by one loop while the next stack is written; the compiler alone keeps five."""
    jaxpr, args = opened(layers, WS, XS)
    before = compiled(jaxpr, args).memory_analysis().temp_size_in_bytes
    after = compiled(with_own_arrays(jaxpr), args).memory_analysis().temp_size_in_bytes
    assert after < 2.5 * XS.nbytes < 3.5 * XS.nbytes < before


def test_explicit_shardings_stay():
    with jax.set_mesh(jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))):

        def step(ws, xs):
            for w in ws:
                first = jnp.zeros_like(xs[0])
                xs = lax.scan(lambda c, x, w=w: 2 * (jnp.tanh(c @ w + x),), first, jnp.sin(xs))[1]
            return xs

        xs = jax.device_put(XS, P(None, "x"))
        jaxpr, args = opened(step, WS, xs)
        new = with_own_arrays(jaxpr)
        assert new is not jaxpr
        _jax.check_jaxpr(new)
        assert new.outvars[0].aval.sharding == jaxpr.outvars[0].aval.sharding
        assert_same(list(compiled(new, args)(*args)), [jax.jit(step)(WS, xs)])


def test_a_single_loop_stays():
    jaxpr, _ = opened(layers, WS[:1], XS)
    assert with_own_arrays(jaxpr) is jaxpr


def test_loops_with_effects_stay():
    def step(xs):
        for _ in range(2):
            xs = lax.scan(lambda c, x: (jax.debug.print("{c}", c=c), (c + 1, x))[1], 0, xs)[1]
        return xs

    jaxpr, _ = opened(step, XS)
    new = with_own_arrays(jaxpr)
    assert not any(eqn.primitive.name == "optimization_barrier" for eqn in equations(new))
