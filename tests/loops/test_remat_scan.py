"""`remat.remat_scan`, its factorization of the number of layers, and its memory."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loops.factorizations import factorizations
from remat.errors import ScheduleError
from remat.loops.nesting import Nest
from remat.loops.remat_scan import measure_layer, nested_scan, remat_scan
from remat.loops.stacked import adopt

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


def make_params(n, width=3):
    w = jax.random.normal(jax.random.key(0), (n, width, width)) / width
    return {"w": w, "b": jnp.linspace(0, 1, n * width).reshape(n, width)}


def layer(x, params):
    b = jnp.broadcast_to(params["b"], x.shape)
    return x + jnp.tanh(jnp.sin(x @ params["w"]) + b)


def reference(x, params):
    return jax.lax.scan(lambda x, p: (layer(x, p), None), x, params)[0]


def assert_close(a, b, atol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol), a, b)


# --------------------------------------------------------------------------------------------------
# Values and derivatives


@pytest.mark.parametrize(
    ("n", "lengths"),
    [(6, (6,)), (6, (2, 3)), (6, (6, 1)), (6, (1, 6)), (8, (2, 2, 2)), (7, "auto"), (1, "auto")],
)
def test_values_and_gradients_are_those_of_a_scan(n, lengths):
    params = make_params(n)

    def results(f):
        return jax.value_and_grad(lambda x, p: (f(x, p) ** 2).sum(), argnums=(0, 1))(X, params)

    assert_close(results(remat_scan(layer, lengths)), results(reference))


def test_ragged_nests_agree_with_a_scan():
    params = make_params(11)
    nest = Nest((2, 2, 2), rest=Nest((3, 1)))
    body = lambda x, p: (layer(x, p), x.sum())  # noqa: E731

    def results(f):
        return jax.jit(jax.grad(lambda p: sum(jnp.sum(out**2) for out in f(p))))(params)

    assert_close(
        results(lambda p: nested_scan(body, nest, X, p)),
        results(lambda p: jax.lax.scan(body, X, p)),
    )


def test_layers_may_branch_on_values_that_vary_over_the_devices_of_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")

    def gradient(scan):
        def local(x):
            ways = lambda c, z: (lambda: jnp.sin(x) * z, lambda: c)  # noqa: E731
            return scan(lambda c, z: jax.lax.cond(z > 1, *ways(c, z)), x, jnp.arange(4.0))

        whole = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
        return jax.jit(jax.grad(lambda x: whole(x).sum()))(jnp.ones(3))

    plain = lambda f, x, zs: jax.lax.scan(lambda c, z: (f(c, z), None), x, zs)[0]  # noqa: E731
    assert_close(gradient(lambda f, x, zs: remat_scan(f, "auto")(x, zs)), gradient(plain))


@pytest.mark.parametrize("lengths", [(2, 2), pytest.param((4,), marks=pytest.mark.slow)])
def test_higher_derivatives_are_those_of_a_scan(lengths):
    params, x = make_params(4, 2), jnp.ones((1, 2))
    f = remat_scan(layer, lengths)

    def results(f):
        def loss(p):
            return (f(x, p) ** 2).sum()

        tangent = jax.tree.map(jnp.ones_like, params)
        return (
            jax.jvp(jax.grad(loss), (params,), (tangent,)),
            jax.grad(lambda p: sum((g**2).sum() for g in jax.tree.leaves(jax.grad(loss)(p))))(
                params
            ),
            jax.jvp(lambda p: jax.jvp(loss, (p,), (tangent,))[1], (params,), (tangent,)),
        )

    assert_close(
        jax.jit(results, static_argnums=0)(f), jax.jit(results, static_argnums=0)(reference)
    )


def test_transformations_compose():
    params = make_params(4)
    many = jax.tree.map(lambda p: jnp.stack([p, -p]), params)

    def results(f):
        loss = lambda x, p: (f(x, p) ** 2).sum()  # noqa: E731
        return (
            jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(None, 0))(X, many),
            jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(0, None))(jnp.stack([X, -X]), params),
            jax.hessian(loss)(X, params),
            jax.linearize(lambda p: loss(X, p), params)[1](params),
        )

    jitted = jax.jit(results, static_argnums=0)
    assert_close(jitted(remat_scan(layer, (2, 2))), jitted(reference), atol=1e-4)


def test_outputs_integers_and_keys_are_stacked_layers_too():
    n = 6
    xs = (make_params(n), jnp.arange(n), jax.random.split(jax.random.key(1), n))

    def body(carry, x):
        params, index, key = x
        x, count = carry
        x = layer(x, params) + jax.random.normal(key, x.shape) * index.astype(x.dtype)
        return (x, count + index), (x.sum(), index)

    def results(scan):
        def loss(params):
            (x, count), ys = scan((X, 0), (params, *xs[1:]))
            return (x**2).sum() + ys[0].sum(), (count, ys)

        return jax.value_and_grad(loss, has_aux=True)(xs[0])

    expected = results(lambda carry, xs: jax.lax.scan(body, carry, xs))
    for lengths in ((2, 3), "auto"):
        assert_close(results(remat_scan(body, lengths)), expected, atol=1e-4)


def test_parameters_may_have_an_axis_for_each_loop():
    params = make_params(6)
    nested = jax.tree.map(lambda p: p.reshape(2, 3, *p.shape[1:]), params)
    f = remat_scan(layer, (2, 3))
    assert_close(f(X, nested), f(X, params))
    with_ys = remat_scan(lambda x, p: (layer(x, p), x), (2, 3))
    assert with_ys(X, nested)[1].shape == (2, 3, *X.shape)
    assert with_ys(X, params)[1].shape == (6, *X.shape)


def test_a_length_replaces_parameters():
    halved = remat_scan(lambda x, _: x / 2, "auto", length=5)(X)
    assert_close(halved, X / 32)


def test_body_is_traced_once_for_five_calls():
    traces = []

    def body(x, p):
        traces.append(1)
        return layer(x, p)

    f, params = remat_scan(body, (2, 2)), make_params(4)
    f(X, params)
    once = len(traces)
    for _ in range(4):
        f(X, params)
    assert len(traces) == once


def test_traces_do_not_grow_with_depth():
    def traces(n, lengths):
        seen = []

        def body(x, p):
            seen.append(1)
            return layer(x, p)

        jax.make_jaxpr(jax.grad(lambda p: remat_scan(body, lengths)(X, p).sum()))(make_params(n))
        return len(seen)

    assert traces(16, (4, 4)) == traces(400, (20, 20))


def test_policy_saves_what_it_names():
    from jax.ad_checkpoint import checkpoint_name

    import remat

    def named(x, p):
        return layer(x, p) + checkpoint_name(jnp.cos(x), "cos")

    params = make_params(4)
    policy = remat.policies.save("cos")
    grads = jax.grad(lambda p: remat_scan(named, (2, 2), policy=policy)(X, p).sum())(params)
    assert_close(grads, jax.grad(lambda p: remat_scan(named, (4,))(X, p).sum())(params))
    with pytest.raises(remat.UnknownNameError):
        remat_scan(named, (2, 2), policy=remat.policies.save("sin"))(X, params)


def test_adopt_accumulates_the_gradient_of_repeated_reads():
    w = make_params(3)["w"]

    def loss(w, read):
        return sum((read(w, i) ** 2).sum() for i in (0, 2, 2))

    ours = jax.grad(lambda w: _adopting(w))(w)
    assert_close(ours, jax.grad(functools.partial(loss, read=lambda w, i: w[i]))(w))


@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (0, None)])
def test_each_lane_may_adopt_a_layer_of_its_own(axes):
    # All examples are batched twice: over an index that they share, and over one of their own.
    ws = (
        jnp.stack([make_params(3)["w"], make_params(3)["w"] + 1])
        if axes[0] == 0
        else make_params(3)["w"]
    )
    indices = jnp.array([2, 0]) if axes[1] == 0 else jnp.int32(1)

    def derivatives(read):
        def loss(w, i, k):
            w, one = read(w, i)
            _, other = read(w, k)
            return jnp.sin(one * other).sum()

        def directional(w, i, k):
            return jax.jvp(jax.grad(lambda w: loss(w, i, k)), (w,), (jnp.cos(w),))

        lanes = jax.vmap(jax.vmap(directional, (None, None, 0)), (*axes, None))
        return lanes(ws, indices, jnp.array([0, 1]))

    ours = derivatives(lambda w, i: adopt(w[i], w, i))
    assert_close(ours, derivatives(lambda w, i: (w, w[i])))


def _adopting(w):
    handle, total = w, 0.0
    for i in (0, 2, 2):
        handle, one = adopt(w[i], handle, i)
        total += (one**2).sum()
    return total


# --------------------------------------------------------------------------------------------------
# The number of layers


def test_measured_bytes_are_those_of_the_carry_the_residuals_and_the_parameters():
    def sine(x, p):
        return jnp.sin(x) * p, None

    measured = measure_layer(sine, jnp.zeros(100), jnp.zeros(100))
    assert measured.carry_bytes == measured.params_bytes == 400
    assert measured.residual_bytes == 800  # cos(x) and sin(x)


@pytest.mark.parametrize(
    ("lengths", "options", "says"),
    [
        ((), {}, "lengths is empty"),
        ((2.5,), {}, "must be an int"),
        (3, {}, "a sequence of ints"),
        ((3, -1), {}, "at least 1"),
        ("auto", {"levels": 0}, "levels must be at least 1"),
        ("auto", {"length": 0}, "length must be at least 1"),
        ((2, 2), {"levels": 2}, 'lengths="auto"'),
    ],
)
def test_impossible_divisions_are_errors(lengths, options, says):
    with pytest.raises(ScheduleError, match=says):
        remat_scan(layer, lengths, **options)


def test_parameters_that_do_not_fit_are_errors():
    with pytest.raises(ScheduleError, match="axis of length 6"):
        remat_scan(layer, (2, 3))(X, make_params(7))
    with pytest.raises(ScheduleError, match="5 layers"):
        remat_scan(layer, "auto", length=5)(X, make_params(7))
    with pytest.raises(ScheduleError, match="pass length="):
        remat_scan(lambda x, _: x, "auto")(X)
    with pytest.raises(ScheduleError, match="must return a carry"):
        remat_scan(lambda x, p: (x, x, x), (2,))(X, make_params(2))


# --------------------------------------------------------------------------------------------------
# Memory, by the compiler's analysis


def temporaries(n, lengths, batch=512, width=8, **options):
    x = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    params = jax.eval_shape(lambda: make_params(n, width))
    step = jax.jit(jax.grad(lambda p, x: remat_scan(layer, lengths, **options)(x, p).sum()))
    return step.lower(params, x).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(("levels", "sizes"), [(2, (8, 32)), (3, (4, 10))])
def test_temporaries_grow_as_the_root_of_the_depth(levels, sizes):
    small, large = (temporaries(s**levels, (s,) * levels) for s in sizes)
    exponent = math.log(large / small) / math.log((sizes[1] / sizes[0]) ** levels)
    assert exponent == pytest.approx(1 / levels, abs=0.06)


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "width"), [(512, 8), (32, 32), (8, 64)])
@pytest.mark.parametrize("n", [36, 64, 97, 101])
def test_auto_is_within_five_percent_of_the_best_factorization(n, batch, width):
    auto = temporaries(n, "auto", batch, width)
    best = min(temporaries(n, lengths, batch, width) for lengths in factorizations(n, 4))
    assert auto <= 1.05 * best


@pytest.mark.parametrize("n", [97, pytest.param(101, marks=pytest.mark.slow)])
def test_auto_divides_primes(n):
    best = min(temporaries(n, lengths) for lengths in ((n,), (n, 1), (1, n)))
    assert temporaries(n, "auto") < 0.5 * best


def test_parameters_are_not_copied_with_their_groups():
    # Parameters are 16 times as large as a carry. In nested scans, a group's slices and gradients are copies:
    # 2 * 16 layers of them here.
    width = 64
    layer_bytes = 4 * (width * width + width)
    assert temporaries(64, (4, 4, 4), batch=4, width=width) < 12 * layer_bytes
