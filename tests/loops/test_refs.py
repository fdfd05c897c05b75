"""Refs in the bodies of loops: values and derivatives equal those of the program without refs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat import policies
from remat.errors import EffectError
from remat.loops.remat_scan import remat_scan
from remat.loops.scan import scan
from remat.loops.while_loop import fori_loop, while_loop

N = 4
X, W = jnp.array([0.3, 0.5]), jnp.float32(1.3)


def counting(step: Callable, x: Any) -> Any:
    first = (jnp.int32(0), x)
    return while_loop(lambda s: s[0] < N, lambda s: (s[0] + 1, step(s[1])), first, checkpoints=2)[1]


LOOPS: dict[str, Callable] = {
    "scan": lambda step, x: scan(lambda c, _: (step(c), None), x, None, N)[0],
    "scan, 2 checkpoints": lambda step, x: scan(
        lambda c, _: (step(c), None), x, None, N, checkpoints=2
    )[0],
    "scan, policy": lambda step, x: scan(
        lambda c, _: (step(c), None), x, None, N, checkpoints=2, policy=policies.dots_saveable
    )[0],
    "fori_loop": lambda step, x: fori_loop(
        0, N + (0 * x[0]).astype(jnp.int32), lambda _, c: step(c), x, checkpoints=2
    ),
    "while_loop": counting,
    "remat_scan": lambda step, x: remat_scan(lambda c, _: step(c), (2, 2))(x, jnp.zeros(N)),
    "remat_scan of one loop": lambda step, x: remat_scan(lambda c, _: step(c), (N,))(
        x, jnp.zeros(N)
    ),
}


def with_refs(loop: Callable) -> Callable:
    """Use a ref that each step creates, one that it only reads, and one that it reads and writes."""

    def f(x: Any, w: Any) -> Any:
        read, written = jax.new_ref(w), jax.new_ref(jnp.float32(0.7))

        def step(c: Any) -> Any:
            own = jax.new_ref(jnp.zeros_like(c))
            own[0] = jnp.sin(c[1]) * read[...]
            own[1] = own[0] * c[0]
            written[...] = 0.5 * written[...] + jnp.cos(own[1])
            return own[...] + 0.1 * written[...]

        return loop(step, x).sum() + written[...] ** 2

    return f


def without_refs(x: Any, w: Any) -> Any:
    written = jnp.float32(0.7)
    for _ in range(N):
        first = jnp.sin(x[1]) * w
        own = jnp.stack([first, first * x[0]])
        written = 0.5 * written + jnp.cos(own[1])
        x = own + 0.1 * written
    return x.sum() + written**2


TRANSFORMS: dict[str, Callable] = {
    "gradient": lambda f: jax.value_and_grad(f, (0, 1)),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (jnp.cos(x), w)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("loop", LOOPS)
def test_derivatives_flow_through_refs(loop: str, transform: str) -> None:
    ours = TRANSFORMS[transform](with_refs(LOOPS[loop]))
    found, expected = jax.jit(ours)(X, W), jax.jit(TRANSFORMS[transform](without_refs))(X, W)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5), (a, b)


def test_refs_are_written_once_outside_of_jit_under_differentiation() -> None:
    count = jax.new_ref(jnp.int32(0))

    def step(c: Any, _: None) -> Any:
        count[...] += 1
        return jnp.sin(c), None

    jax.grad(lambda x: scan(step, x, None, N, checkpoints=2)[0].sum())(X)
    assert count[...] == N


def test_a_condition_may_read_the_ref_that_the_body_writes() -> None:
    def f(x: Any, n: Any) -> Any:
        count = jax.new_ref(jnp.int32(0))
        limit = jax.new_ref(n)

        def step(c: Any) -> Any:
            count[...] += 1
            return jnp.sin(c)

        return while_loop(lambda c: count[...] < limit[...], step, x, checkpoints=2)

    found = jax.jit(jax.value_and_grad(f))(jnp.float32(0.3), 3)
    expected = jax.value_and_grad(lambda x: jnp.sin(jnp.sin(jnp.sin(x))))(jnp.float32(0.3))
    assert jnp.allclose(jnp.array(found), jnp.array(expected))


@jax.custom_vjp
def stash(ref: Any, x: Any) -> Any:
    return x


def _accumulate(ref: Any, ct: Any) -> Any:
    ref.addupdate(ct)
    return None, ct


stash.defvjp(lambda ref, x: (x, ref), _accumulate)


@jax.custom_vjp
def doubled(x: Any) -> Any:
    ref = jax.new_ref(x)
    ref[...] *= 2
    return ref[...]


doubled.defvjp(lambda x: (doubled(x), None), lambda _, ct: (2 * ct,))


@pytest.mark.parametrize("loop", ["scan, 2 checkpoints", "fori_loop", "while_loop"])
def test_refs_that_cannot_be_followed_are_refused(loop: str) -> None:
    ref = jax.new_ref(jnp.zeros(2))
    for step in (lambda c: stash(ref, c), lambda c: doubled(jnp.sin(c))):
        with pytest.raises(EffectError, match="custom derivative rules"):
            jax.grad(lambda x, step=step: LOOPS[loop](step, x).sum())(X)


def test_refs_among_the_arguments_of_a_loop_are_refused() -> None:
    ref = jax.new_ref(jnp.zeros(2))
    with pytest.raises(EffectError, match="cannot carry a ref"):
        scan(lambda c, _: (c, None), ref, None, 3)
    with pytest.raises(EffectError, match="cannot carry a ref"):
        scan(lambda c, x: (c, x), 0.0, ref)
    with pytest.raises(EffectError, match=r"cond of remat\.while_loop writes a ref"):

        def unfinished(c: Any) -> Any:
            ref[...] += 1.0
            return c[0] < 3

        while_loop(unfinished, lambda c: c + 1, X)


def test_a_function_with_rules_of_its_own_may_make_refs_where_lax_scan_runs_the_loop() -> None:
    f = lambda x, loop: loop(lambda c, _: (doubled(jnp.sin(c)), None), x, None, N)[0].sum()  # noqa: E731
    found = jax.jit(jax.grad(f), static_argnums=1)(X, scan)
    assert jnp.allclose(found, jax.grad(f)(X, lax.scan))


@pytest.mark.parametrize("loop", LOOPS.values(), ids=list(LOOPS))
def test_derivative_rules_beside_refs_in_branches_are_kept(loop: Callable) -> None:
    @jax.custom_jvp
    def tripled_back(x: Any) -> Any:
        return jnp.sin(x)

    @tripled_back.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple:
        return jnp.sin(*primals), 3 * jnp.cos(*primals) * tangents[0]

    def gradient(run: Callable, with_ref: bool) -> Any:
        def branch(c: Any) -> Any:
            if with_ref:
                ref = jax.new_ref(c)
                ref[...] *= 2.0
                c = ref[...] / 2
            return tripled_back(c)

        def step(c: Any) -> Any:
            return lax.cond(c[0] > 0, branch, jnp.cos, c)

        return jax.grad(lambda x: run(step, x).sum())(X)

    expected = gradient(lambda step, x: step(step(step(step(x)))), False)
    assert jnp.allclose(gradient(loop, True), expected, rtol=1e-5)
