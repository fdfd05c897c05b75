"""Steps with marked functions: whatever a planner decides, their values do not change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import remat

CASES: dict[str, Callable[[], tuple[Callable, tuple]]] = {}


def case(make: Callable) -> Callable:
    """Register a function that makes (step, arguments), by its name."""
    CASES[make.__name__] = make
    return make


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Any:
    x = np.random.default_rng(seed + sum(shape)).normal(size=shape) * 0.5
    return jnp.asarray(x.astype(np.float32)).astype(dtype)


def assert_same(found: Any, expected: Any, *, within: float = 2e-6) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        if not hasattr(b, "dtype"):
            assert a == b
            continue
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        scale = np.max(np.abs(b), initial=1e-3)
        np.testing.assert_allclose(a, b, rtol=50 * within, atol=within * scale)


# Programs


def _chain(w: Any, x: Any, n: int = 5) -> Any:
    for _ in range(n):
        x = jnp.tanh(x @ w)
    return x


def _loss(w: Any, x: Any) -> Any:
    return jnp.sum(_chain(w, x) ** 2)


W, X = (6, 6), (4, 6)


@case
def dense_chain():
    return jax.value_and_grad(remat.auto(_loss)), (normal(*W), normal(*X))


@case
def several_weights_and_arguments():
    @remat.auto
    def loss(params, x, y):
        for p in params:
            x = jax.nn.gelu(x @ p["w"] + p["b"]) + x
            x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-3)
        return jnp.mean(jnp.square(x - y))

    params = [{"w": normal(*W, seed=i), "b": normal(6, seed=i)} for i in range(3)]
    return jax.value_and_grad(loss, (0, 1, 2)), (params, normal(*X), normal(*X, seed=3))


@case
def scan():
    @remat.auto
    def loss(w, x):
        def body(h, wi):
            h = jnp.tanh(h @ wi) + h
            return h, jnp.sin(h).sum()

        h, ys = jax.lax.scan(body, x, w)
        return jnp.sum(h**2) + ys.sum()

    return jax.value_and_grad(loss, (0, 1)), (normal(5, *W), normal(*X))


@case
def reversed_scan():
    @remat.auto
    def loss(w, x):
        def body(h, wi):
            h = jnp.tanh(h @ wi) + h
            return h, h * 2

        h, ys = jax.lax.scan(body, x, w, reverse=True)
        return jnp.sum(h**2) + (ys * jnp.arange(7.0)[:, None, None]).sum()

    return jax.value_and_grad(loss, (0, 1)), (normal(7, *W), normal(*X))


@case
def nested_scans():
    @remat.auto
    def loss(w, x):
        def outer(h, wi):
            def inner(g, _):
                return jnp.tanh(g @ wi) + jnp.sin(g), None

            h, _ = jax.lax.scan(inner, h, length=3)
            return jnp.cos(h) * h, h.sum()

        h, ys = jax.lax.scan(outer, jnp.exp(x), w)
        for _ in range(2):
            h = jnp.tanh(h @ w[0])
        return jnp.sum(h) + ys.sum()

    return jax.value_and_grad(loss, (0, 1)), (normal(4, *W), normal(*X))


@case
def two_scans():
    @remat.auto
    def loss(w, x):
        def body(h, _):
            return jnp.tanh(h @ w), None

        x, _ = jax.lax.scan(body, x, length=4)
        x = jnp.sin(x) @ w
        x, _ = jax.lax.scan(body, x, length=4)
        return jnp.sum(x**2)

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X))


@case
def scan_with_integers_and_consts():
    @remat.auto
    def loss(w, x):
        def body(carry, i):
            h, k = carry
            return (jnp.tanh(h @ w) * jnp.where(k % 2 == 0, 1.0, 0.5), k + i), k

        (h, k), ks = jax.lax.scan(body, (x, 0), jnp.arange(5))
        return jnp.sum(h**2), (k, ks)

    return jax.value_and_grad(loss, (0, 1), has_aux=True), (normal(*W), normal(*X))


@case
def fori_and_while_in_forward():
    @remat.auto
    def loss(w, x):
        n = jax.lax.while_loop(lambda i: i < 3, lambda i: i + 1, 0)
        x = jax.lax.fori_loop(0, 3, lambda _, h: jnp.sin(h @ w), x)
        scale = jax.lax.stop_gradient(
            jax.lax.while_loop(lambda s: s.sum() < 50, lambda s: s * 2 + 1, jnp.abs(x))
        )
        return jnp.sum(jnp.tanh(x) * n * scale)

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X))


@case
def cond():
    @remat.auto
    def loss(w, x, flag):
        x = jnp.sin(x @ w)
        x = jax.lax.cond(flag, lambda h: jnp.tanh(h @ w), lambda h: jnp.cos(h), x)
        x = jax.lax.switch(flag.astype(int) + 1, [jnp.sin, jnp.exp, lambda h: h @ w], x)
        return jnp.sum(x**2)

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X), jnp.array(True))


@case
def cond_in_scan():
    @remat.auto
    def loss(w, x):
        def body(h, i):
            h = jax.lax.cond(i % 2 == 0, lambda h: jnp.tanh(h @ w), lambda h: jnp.sin(h), h)
            return h, None

        return jnp.sum(jax.lax.scan(body, x, jnp.arange(5))[0] ** 2)

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X))


@jax.custom_jvp
def _clipped(x):
    return jnp.clip(x, -0.5, 0.5)


_clipped.defjvp(lambda primals, tangents: (_clipped(*primals), tangents[0] * jnp.cos(primals[0])))


@jax.custom_vjp
def _halved(x, w):
    return jnp.sin(x @ w)


_halved.defvjp(
    lambda x, w: (jnp.sin(x @ w), (x, w, jnp.cos(x @ w))),
    lambda res, ct: (0.5 * (ct * res[2]) @ res[1].T, 0.5 * res[0].T @ (ct * res[2])),
)


@case
def custom_rules():
    @remat.auto
    def loss(w, x):
        for _ in range(3):
            x = _clipped(x @ w) + jnp.sin(x)
            x = _halved(x, w)
            x = jax.nn.relu(x) + jax.nn.softplus(x)
        return jnp.sum(x**2)

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X))


@case
def custom_rules_in_scan():
    @remat.auto
    def loss(w, x):
        def body(h, _):
            return _halved(_clipped(h), w) + jax.nn.silu(h), None

        return jnp.sum(jax.lax.scan(body, x, length=4)[0] ** 2)

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X))


@case
def embedding_and_integers():
    @remat.auto
    def loss(table, w, tokens):
        x = table[tokens]
        x = jnp.tanh(x @ w)
        top = jnp.argmax(x, -1)
        logits = x @ table.T
        gold = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], 1)
        return -gold.mean() + jnp.sum(jnp.where(top[:, None] > 2, x, 0.0)), top

    tokens = jnp.array([1, 3, 0, 2])
    return jax.value_and_grad(loss, (0, 1), has_aux=True), (normal(5, 6), normal(*W), tokens)


@case
def dropout_with_keys():
    @remat.auto
    def loss(w, x, key):
        for _ in range(3):
            key, now = jax.random.split(key)
            keep = jax.random.bernoulli(now, 0.8, x.shape)
            x = jnp.where(keep, jnp.tanh(x @ w) / 0.8, 0.0)
        return jnp.sum(x**2), key

    return jax.value_and_grad(loss, has_aux=True), (normal(*W), normal(*X), jax.random.key(3))


@case
def dropout_in_scan():
    @remat.auto
    def loss(w, x, key):
        def body(carry, _):
            h, key = carry
            key, now = jax.random.split(key)
            h = jnp.where(jax.random.bernoulli(now, 0.8, h.shape), jnp.tanh(h @ w), 0.0)
            return (h, key), None

        (x, key), _ = jax.lax.scan(body, (x, key), length=5)
        return jnp.sum(x**2), key

    return jax.value_and_grad(loss, has_aux=True), (normal(*W), normal(*X), jax.random.key(3))


@case
def raw_keys():
    @remat.auto
    def loss(w, x, key):
        x = x + jax.random.normal(key, x.shape)
        return jnp.sum(_chain(w, x) ** 2)

    return jax.value_and_grad(loss), (normal(*W), normal(*X), jax.random.PRNGKey(3))


@case
def bfloat16():
    def loss(w, x):
        return jnp.sum(_chain(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)).astype(jnp.float32))

    return jax.value_and_grad(remat.auto(loss), (0, 1)), (normal(*W), normal(*X))


@case
def nested_checkpoints():
    @remat.auto
    def loss(w, x):
        x = jax.checkpoint(lambda h: jnp.tanh(jnp.sin(h @ w)))(x)
        x = remat.checkpoint(lambda h: jnp.tanh(jnp.sin(h @ w)))(x)
        policy = jax.checkpoint_policies.dots_saveable
        x = jax.checkpoint(lambda h: jnp.tanh(jnp.sin(h @ w)), policy=policy)(x)

        def body(h, _):
            return jax.checkpoint(lambda h: jnp.tanh(jnp.sin(h @ w)))(h), None

        return jnp.sum(jax.lax.scan(body, x, length=3)[0] ** 2)

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X))


def _region_inside(checkpoint: Callable) -> Any:
    region = remat.auto(_chain)

    def loss(w, x):
        return jnp.sum(checkpoint(lambda w, x: jnp.sin(region(w, x)))(w, x) ** 2)

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X))


@case
def checkpoint_around():
    return _region_inside(jax.checkpoint)


@case
def remat_checkpoint_around():
    return _region_inside(remat.checkpoint)


@case
def jit_inside():
    @remat.auto
    def loss(w, x):
        layer = jax.jit(lambda h, w: jnp.tanh(h @ w))
        x = layer(layer(x, w), w)
        return jnp.sum(jax.jit(lambda h: layer(jnp.sin(h), w) ** 2)(x))

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X))


@case
def checkpoint_names():
    @remat.auto
    def loss(w, x):
        for i in range(3):
            x = remat.checkpoint_name(jnp.tanh(x @ w), f"layer_{i}")
        return jnp.sum(x**2)

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X))


@case
def auxiliary_outputs():
    @remat.auto
    def loss(w, x):
        h = _chain(w, x)
        return jnp.sum(h**2), {"h": h, "mean": h.mean(), "n": jnp.array(3), "text": "ab", "w": w}

    def step(w, x):
        (value, aux), grads = jax.value_and_grad(
            lambda w, x: (lambda v, a: (v, {**a, "text": len(a["text"])}))(*loss(w, x)),
            (0, 1),
            has_aux=True,
        )(w, x)
        return value, aux, grads

    return step, (normal(*W), normal(*X))


@case
def no_operation():
    region = remat.auto(lambda x: x)
    twice = remat.auto(lambda x, y: (x, x, y))

    def loss(w, x):
        a, b, c = twice(region(w), x)
        return jnp.sum(a * b) + jnp.sum(c)

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X))


@case
def outputs_that_are_inputs_or_constants():
    @remat.auto
    def region(w, x):
        h = jnp.tanh(x @ w)
        return h, x, w, jnp.ones(3), 2.0, h, None

    def loss(w, x):
        h, x1, w1, ones, two, again, _ = region(w, x)
        return jnp.sum(h * again) + jnp.sum(x1**2) + two * jnp.sum(w1) * ones.sum()

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X))


@case
def unused_inputs_and_outputs():
    @remat.auto
    def region(w, x, unused):
        return jnp.tanh(x @ w), jnp.sin(w), unused

    def loss(w, x):
        return jnp.sum(region(w, x, jnp.ones(3))[0])

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X))


@case
def values_only():
    return remat.auto(_loss), (normal(*W), normal(*X))


@case
def value_and_gradient_apart():
    loss = remat.auto(_loss)
    return lambda w, x: (loss(w, x), jax.grad(loss)(w, x)), (normal(*W), normal(*X))


@case
def jvp():
    loss = remat.auto(_loss)
    return lambda w, x: jax.jvp(loss, (w, x), (x.T @ x, x * 2)), (normal(*W), normal(*X))


@case
def linearize():
    loss = remat.auto(_chain)

    def step(w, x):
        out, linear = jax.linearize(loss, w, x)
        return out, linear(w, x), linear(2 * w, x)

    return step, (normal(*W), normal(*X))


@case
def vjp_called_twice():
    def step(w, x):
        out, pull = jax.vjp(remat.auto(_chain), w, x)
        return pull(out), pull(jnp.cos(out))

    return step, (normal(*W), normal(*X))


@case
def second_derivative():
    loss = remat.auto(lambda x: jnp.sum(jnp.tanh(jnp.sin(x) * x) ** 2))
    return lambda x: (jax.hessian(loss)(x), jax.jvp(jax.grad(loss), (x,), (x,))), (normal(4),)


@case
def gradient_of_scan_differentiated_twice():
    @remat.auto
    def loss(x):
        return jnp.sum(jax.lax.scan(lambda h, _: (jnp.sin(h) * h, None), x, length=3)[0])

    return jax.hessian(loss), (normal(3),)


@case
def jacobians():
    chain = remat.auto(functools.partial(_chain, n=2))
    return lambda w, x: (jax.jacrev(chain)(w, x), jax.jacfwd(chain)(w, x)), (
        normal(3, 3),
        normal(2, 3),
    )


@case
def vmap_of_grad():
    grad = jax.grad(remat.auto(_loss), (0, 1))
    return jax.vmap(grad, (None, 0)), (normal(*W), normal(3, *X))


@case
def grad_of_vmap():
    loss = remat.auto(_loss)
    return jax.grad(lambda w, x: jax.vmap(loss, (None, 0))(w, x).sum(), (0, 1)), (
        normal(*W),
        normal(3, *X),
    )


@case
def grad_of_vmap_of_scan():
    @remat.auto
    def loss(w, x):
        body = lambda h, _: (jnp.tanh(h @ w), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(body, x, length=5)[0] ** 2)

    return jax.grad(lambda w, x: jax.vmap(loss, (None, 0))(w, x).sum(), (0, 1)), (
        normal(*W),
        normal(3, *X),
    )


@case
def microbatches():
    grad = jax.value_and_grad(remat.auto(_loss))

    def step(w, xs):
        def body(total, x):
            value, g = grad(w, x)
            return total + g, value

        return jax.lax.scan(body, jnp.zeros_like(w), xs)

    return step, (normal(*W), normal(3, *X))


@case
def microbatches_of_a_scanned_model():
    @remat.auto
    def loss(w, x):
        body = lambda h, wi: (jnp.tanh(h @ wi), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(body, x, w)[0] ** 2)

    def step(w, xs):
        def body(total, x):
            value, g = jax.value_and_grad(loss)(w, x)
            return total + g, value

        return jax.lax.scan(body, jnp.zeros_like(w), xs)

    return step, (normal(4, *W), normal(3, *X))


@case
def grad_through_a_scan_of_regions():
    block = remat.auto(_chain)

    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda h, wi: (block(wi, h), None), x, w)[0] ** 2)

    return jax.value_and_grad(loss, (0, 1)), (normal(3, *W), normal(*X))


@case
def region_in_cond():
    block = remat.auto(_chain)

    def loss(w, x, flag):
        return jnp.sum(jax.lax.cond(flag, block, lambda w, x: x, w, x) ** 2)

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X), jnp.array(True))


@case
def region_in_jit():
    block = jax.jit(remat.auto(_chain))
    return jax.value_and_grad(lambda w, x: jnp.sum(block(w, x) ** 2), (0, 1)), (
        normal(*W),
        normal(*X),
    )


@case
def region_in_custom_vjp():
    block = remat.auto(_chain)

    @jax.custom_vjp
    def f(w, x):
        return block(w, x)

    f.defvjp(lambda w, x: jax.vjp(block, w, x), lambda pull, ct: pull(2 * ct))
    return jax.value_and_grad(lambda w, x: jnp.sum(f(w, x) ** 2), (0, 1)), (normal(*W), normal(*X))


@case
def two_regions():
    first, second = remat.auto(_chain), remat.auto(lambda w, x: jnp.sin(x @ w) * jnp.exp(-x))

    def loss(w, x):
        return jnp.sum(second(w, first(w, x)) ** 2)

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X))


@case
def called_twice():
    block = remat.auto(_chain)
    return jax.value_and_grad(lambda w, x: jnp.sum(block(w, block(w, x)) ** 2), (0, 1)), (
        normal(*W),
        normal(*X),
    )


@case
def called_with_other_shapes():
    block = remat.auto(_chain)

    def loss(w, x):
        return jnp.sum(block(w, x) ** 2) + jnp.sum(block(w, x[:2]) ** 2)

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X))


@case
def region_in_a_region():
    block = remat.auto(_chain)

    @remat.auto
    def loss(w, x):
        def body(h, _):
            return block(w, h), None

        h, _ = jax.lax.scan(body, x, length=4)
        return jnp.sum(jnp.sin(block(w, h)) ** 2)

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X))


@case
def keywords_and_static_arguments():
    @remat.auto
    def loss(w, *, x, act, n, flag=True, scale=2.0):
        for _ in range(n):
            x = getattr(jnp, act)(x @ w) * scale
        return jnp.sum(x) if flag else None

    return jax.grad(lambda w, x: loss(w, x=x, act="tanh", n=3)), (normal(*W), normal(*X))


@case
def closed_over_tracers():
    def loss(w, x):
        y = jnp.sin(w)
        return jnp.sum(remat.auto(lambda x: _chain(y, x))(x) ** 2)

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X))


@case
def closed_over_arrays():
    w = normal(*W)
    return jax.value_and_grad(remat.auto(lambda x: jnp.sum(_chain(w, x) ** 2))), (normal(*X),)


@case
def complex_numbers():
    @remat.auto
    def loss(x):
        z = jnp.fft.fft(x) * jnp.exp(1j * x)
        return jnp.sum(jnp.abs(jnp.fft.ifft(jnp.tanh(z))))

    return jax.value_and_grad(loss), (normal(*X) + 1,)


@case
def sort_and_cumulative():
    @remat.auto
    def loss(x):
        x = jnp.cumsum(jnp.sort(jnp.sin(x), -1), -1)
        x = jax.lax.associative_scan(jnp.multiply, jnp.cos(x), axis=1)
        return jnp.sum(jnp.max(x, -1)) + jax.nn.logsumexp(x)

    return jax.value_and_grad(loss), (normal(*X),)


@case
def convolution():
    @remat.auto
    def loss(w, x):
        for _ in range(3):
            x = jax.nn.relu(jax.lax.conv(x, w, (1, 1), "SAME"))
        return jnp.sum(x**2)

    return jax.value_and_grad(loss, (0, 1)), (normal(2, 2, 3, 3), normal(1, 2, 5, 5))


@case
def shard_map_around():
    block = remat.auto(_loss)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("i",))

    def local(w, x):
        value, grads = jax.value_and_grad(block)(w, x)
        return jax.lax.psum(value, "i"), jax.lax.psum(grads, "i")

    step = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("i")), out_specs=(P(), P()), check_vma=False
    )
    return step, (normal(*W), normal(16, 6))


@case
def shard_map_with_types_around():
    block = remat.auto(_loss)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("i",))

    def local(w, x):
        return jax.lax.psum(block(w, x), "i")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    return jax.value_and_grad(mapped, (0, 1)), (normal(*W), normal(16, 6))


@case
def shard_map_inside():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("i",))

    @remat.auto
    def loss(w, x):
        def local(w, x):
            return jax.lax.psum(jnp.tanh(x @ w).sum(0), "i")

        y = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())(w, jnp.sin(x))
        return jnp.sum(jnp.sin(y) ** 2)

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(16, 6))


@case
def named_axis():
    block = remat.auto(lambda w, x: jnp.sum(jnp.tanh(jax.lax.pmean(x @ w, "batch")) ** 2))
    step = jax.vmap(jax.value_and_grad(block, (0, 1)), (None, 0), axis_name="batch")
    return step, (normal(*W), normal(3, *X))


@case
def references():
    @remat.auto
    def loss(w, x):
        ref = jax.new_ref(jnp.zeros_like(x)) if hasattr(jax, "new_ref") else None
        if ref is None:
            return jnp.sum(_chain(w, x))
        ref[...] += jnp.sin(x)
        return jnp.sum(_chain(w, ref[...]))

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X))


@case
def empty_and_scalar_values():
    @remat.auto
    def loss(w, s):
        empty = jnp.sin(jnp.zeros((0, 3)) * s)
        return jnp.sum(jnp.tanh(w * s)) + empty.sum() + s**3

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), jnp.float32(1.5))


@case
def python_scalars():
    @remat.auto
    def loss(w, s):
        return jnp.sum(jnp.tanh(jnp.sin(w * s) * s))

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), 1.5)


@case
def scan_without_carry_or_of_length_one():
    @remat.auto
    def loss(w, x):
        _, ys = jax.lax.scan(lambda c, r: (None, jnp.sin(jnp.tanh(r @ w))), None, x)
        h, _ = jax.lax.scan(lambda h, _: (jnp.sin(h), None), ys, length=1)
        h, _ = jax.lax.scan(lambda h, _: (jnp.sin(h), None), h, length=0)
        return jnp.sum(h**2) + jnp.sum(jax.lax.map(jnp.cos, h))

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X))


@case
def unrolled_scan():
    @remat.auto
    def loss(w, x):
        body = lambda h, wi: (jnp.tanh(h @ wi), jnp.sum(h))  # noqa: E731
        h, ys = jax.lax.scan(body, x, w, unroll=2)
        return jnp.sum(h**2) + ys.sum()

    return jax.value_and_grad(loss, (0, 1)), (normal(5, *W), normal(*X))


@case
def loops_of_ours():
    @remat.auto
    def loss(w, x):
        body = lambda h, _: (jnp.tanh(h @ w), None)  # noqa: E731
        x, _ = remat.scan(body, x, None, 6, checkpoints=2)
        return jnp.sum(x**2)

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X))


@case
def matmul_with_preferred_types():
    @remat.auto
    def loss(w, x):
        y = jnp.dot(
            x.astype(jnp.float16), w.astype(jnp.float16), preferred_element_type=jnp.float32
        )
        return jnp.sum(jnp.tanh(y).astype(jnp.float16).astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss, (0, 1)), (normal(*W), normal(*X))


@case
def optimizer_step():
    @remat.auto
    def loss(params, x):
        return jnp.mean(_chain(params["w"], x) ** 2 + params["b"])

    def step(state, x):
        value, g = jax.value_and_grad(loss)(state["params"], x)
        m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], g)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], m)
        return {"params": params, "m": m}, value

    params = {"w": normal(*W), "b": normal(6)}
    return step, ({"params": params, "m": jax.tree.map(jnp.zeros_like, params)}, normal(*X))
