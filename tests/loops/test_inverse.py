"""Scans whose steps are inverted in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat.errors import ScheduleError
from remat.loops.scan import scan

STEP = 0.01


def leapfrog(stiffness: Any, state: Any, push: Any) -> tuple[Any, Any]:
    """Take a step of a driven pendulum; return its angle."""
    q, p, k = state
    p = p - STEP * (stiffness * jnp.sin(q) - push)
    q = q + STEP * p
    return (q, p, k + 1), q


def leapfrog_back(stiffness: Any, state: Any, push: Any) -> Any:
    q, p, k = state
    q = q - STEP * p
    return q, p + STEP * (stiffness * jnp.sin(q) - push), k - 1


def loss(scan: Callable, inverse: bool = False, **way: Any) -> Callable:
    def run(stiffness: Any, q: Any, pushes: Any) -> Any:
        if inverse:
            way["inverse"] = lambda state, push: leapfrog_back(stiffness, state, push)
        start = (q, jnp.zeros_like(q), jnp.int32(0))
        (q, p, _), ys = scan(lambda *at: leapfrog(stiffness, *at), start, pushes, **way)
        return (q * q + p).sum() + 0.1 * (ys**2).sum()

    return run


def arguments(n: int, width: int = 3) -> tuple[Any, Any, Any]:
    return (
        jnp.float32(1.5),
        jnp.linspace(0.1, 1.0, width),
        jnp.cos(jnp.arange(n, dtype=jnp.float32) / 9.0),
    )


def assert_close(ours: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert jnp.allclose(a, b, rtol=2e-4, atol=2e-4), (a, b)


@pytest.mark.parametrize("way", [{}, {"checkpoints": 3}, {"checkpoints": 400}, {"reverse": True}])
@pytest.mark.parametrize("n", [0, 1, 300])
def test_a_reversible_step_has_the_gradients_of_lax_scan(n: int, way: dict[str, Any]) -> None:
    reverse = {"reverse": True} if "reverse" in way else {}
    args = arguments(n)
    ours = jax.jit(jax.value_and_grad(loss(scan, inverse=True, **way), (0, 1, 2)))(*args)
    assert_close(ours, jax.jit(jax.value_and_grad(loss(lax.scan, **reverse), (0, 1, 2)))(*args))


TRANSFORMS: dict[str, Callable] = {
    "hessian": lambda f: jax.hessian(f, 1),
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(f, 0), 1),
    "jvp": lambda f: lambda *at: jax.jvp(f, at, at)[1],
    "vmap of grad": lambda f: (
        lambda k, q, x: jax.vmap(jax.grad(f, 1), (0, None, None))(jnp.stack([k, k + k]), q, x)
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_of_a_reversible_scan_agrees_with_lax_scan(name: str) -> None:
    args, transform = arguments(20, 2), TRANSFORMS[name]
    ours = jax.jit(transform(loss(scan, inverse=True, checkpoints=2)))(*args)
    assert_close(ours, jax.jit(transform(loss(lax.scan)))(*args))


def test_the_memory_of_a_reversible_scan_depends_on_checkpoints_and_not_on_length() -> None:
    def peak(n: int, **way: Any) -> int:
        def run(q: Any) -> Any:
            step = lambda s, x: (leapfrog(1.5, s, x)[0], None)  # noqa: E731
            back = lambda s, x: leapfrog_back(1.5, s, x)  # noqa: E731
            start = (q, jnp.zeros_like(q), jnp.int32(0))
            return scan(step, start, jnp.ones(n), inverse=back, **way)[0][0].sum()

        compiled = jax.jit(jax.grad(run)).lower(jnp.ones(20_000)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    state = 2 * 4 * 20_000
    few = [peak(n) for n in (100, 10_000)]
    assert max(few) <= 5 * state
    assert max(few) <= 1.1 * min(few)
    assert 8 * state <= peak(1000, checkpoints=10) - few[0] <= 10 * state


def test_each_step_of_a_reversible_scan_runs_twice() -> None:
    ran: list[int] = []

    def run(x: Any) -> Any:
        def step(c: Any, _: None) -> Any:
            jax.debug.callback(lambda _: ran.append(1), c)
            return c + jnp.float32(0.1) * jnp.sin(x), None

        back = lambda c, _: c - jnp.float32(0.1) * jnp.sin(x)  # noqa: E731
        return scan(step, x, None, 50, inverse=back)[0] ** 2

    jax.jit(jax.grad(run))(jnp.float32(0.3)).block_until_ready()
    jax.effects_barrier()
    assert len(ran) == 100


def test_states_that_are_kept_limit_the_drift_of_an_inverse() -> None:
    """Inverting damping amplifies rounding errors by a constant factor in every step."""

    def gradient(scan: Callable, **way: Any) -> Any:
        def run(x: Any) -> Any:
            step = lambda c, _: (0.8 * c + 0.2 * jnp.cos(c), None)  # noqa: E731
            c, _ = scan(step, x, None, 60, **way)
            return jnp.sum(c * 1e4)

        return jax.jit(jax.grad(run))(jnp.linspace(0.5, 2.0, 5))

    def back(c: Any, _: None) -> Any:
        """Find the state before a step by Newton's iteration."""
        x = c
        for _ in range(6):
            x = x - (0.8 * x + 0.2 * jnp.cos(x) - c) / (0.8 - 0.2 * jnp.sin(x))
        return x

    exact = gradient(lax.scan)

    def error(**way: Any) -> float:
        return float(jnp.max(jnp.abs(gradient(scan, inverse=back, **way) - exact) / jnp.abs(exact)))

    drifted, kept = error(), error(checkpoints=20)
    assert kept < 1e-4 < drifted


def test_inverses_that_cannot_be_used_are_refused() -> None:
    step = lambda c, _: (c + 1.0, None)  # noqa: E731
    with pytest.raises(ScheduleError, match="Leave out budget="):
        scan(step, jnp.ones(2), None, 5, inverse=lambda c, _: c - 1.0, budget="1MiB")
    with pytest.raises(ScheduleError, match="must return a carry with the structure"):
        scan(step, jnp.ones(2), None, 5, inverse=lambda c, _: (c - 1.0, c))
    with pytest.raises(ScheduleError, match="checkpoints must be at least 1"):
        scan(step, jnp.ones(2), None, 5, inverse=lambda c, _: c - 1.0, checkpoints=0)
