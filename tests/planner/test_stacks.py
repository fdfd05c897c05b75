"""Loops with stacks of their own: the same results, and constants that compilers cannot merge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import remat
from remat import _jax
from remat.ir.flops import flops_of_program
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


@pytest.mark.parametrize("reverse", [False, True])
def test_writing_a_row_takes_one_addition(reverse):
    jaxpr, _ = opened(lambda ws, xs: layers(ws, xs, reverse), WS, XS)
    more = flops_of_program(with_own_arrays(jaxpr)) - flops_of_program(jaxpr)
    assert 0 < more <= LENGTH * len(WS)


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


def recomputed(w, x):
    """Return the gradient through two loops of unlike lengths, the first of which is recomputed."""

    def loop(length, x):
        return lax.scan(lambda c, _: (jnp.tanh(jnp.sin(c @ w) + c), None), x, length=length)[0]

    def loss(x):
        return jnp.sum(loop(7, remat.checkpoint(lambda x: loop(5, x))(x)))

    return jax.grad(loss)(x)


def tanh_layer(w, h):
    return jnp.tanh(jnp.sin(h @ w) + h)


def quantized_layer(w, h):
    """A layer with rounded operands, which is differentiated as if they were not rounded."""

    def rounded(x):
        scale = jnp.max(jnp.abs(x)) / 127
        near = jnp.round(x / scale).astype(jnp.int8).astype(x.dtype) * scale
        return x + lax.stop_gradient(near - x)

    return tanh_layer(rounded(w), rounded(h))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="measures the compiler for CPU")
@pytest.mark.skipif(_jax.JAXLIB_VERSION < (0, 11, 1), reason="this compiler removes barriers early")
@pytest.mark.parametrize(("layer", "percent"), [(tanh_layer, 64), (quantized_layer, 48)])
def test_arrays_of_recomputed_loops_wait_for_what_passes_the_barrier(layer, percent):
    """Some steps of the loop are recomputed from arguments, which exist from the beginning."""

    def loss(ws, x):
        return jnp.mean(lax.scan(lambda h, w: (layer(w, h), None), x, ws)[0] ** 2)

    args = np.ones((8, 64, 64), np.float32) / 8, np.ones((512, 64), np.float32)
    plan = remat.plan(jax.value_and_grad(loss), *args, budget=f"{percent}%", cache=False)
    assert plan.attempts and all(a.compiled_bytes < 1.1 * a.predicted_bytes for a in plan.attempts)


def test_loops_in_loops_have_arrays_of_their_own():
    w, xs = WS[0], np.ones((3, 400, WIDTH), np.float32)

    def step(w, xs):
        return lax.map(lambda x: recomputed(w, x), xs)

    jaxpr, args = opened(step, w, xs)
    new = with_own_arrays(jaxpr)
    _jax.check_jaxpr(new)
    assert_same(list(compiled(new, args)(*args)), [jax.jit(step)(w, xs)], rtol=1e-5)
    inside = [eqn.primitive.name for eqn in equations(new)]
    assert "optimization_barrier" in inside
    assert "optimization_barrier" not in [eqn.primitive.name for eqn in equations(jaxpr)]
