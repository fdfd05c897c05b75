"""With a budget and a policy, a loop keeps the policy's residuals or all of them, whichever is faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import remat
from remat.errors import BudgetError
from remat.ir.flops import flops_of_program
from remat.loops.scan import explain, scan
from remat.loops.ways import Choice
from remat.loops.while_loop import fori_loop

NOTHING = remat.policies.nothing_saveable
W = jnp.asarray(np.random.default_rng(0).normal(size=(128, 128)) / 12, jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(256, 128)) / 4, jnp.float32)
N = 60


def layers(count: int, w: Any = W) -> Callable:
    """Return a step of matrix products, whose time dominates. Each product keeps one array."""

    def step(x: Any, _: None) -> Any:
        for _ in range(count):
            x = jnp.tanh(x @ w)
        return x, None

    return step


def by_hand(step: Callable, policy: Any) -> Callable:
    """Return the step as a user checkpoints it, which is the body of the loop and not an option."""
    return remat.checkpoint(step, policy=policy, prevent_cse=False)


def choice_of(step: Callable, budget: int, **way: Any) -> Choice | None:
    try:
        return explain(step, X, length=N, budget=budget, **way)
    except BudgetError:
        return None


def steps_to_reverse(step: Callable) -> float:
    """Return the FLOPs of running and reversing a step, in units of those of running it."""

    def reversed_(x: Any, w: Any) -> Any:
        out, pull = jax.vjp(lambda x: step(x, None)[0], x)
        return out, pull(w)

    of_both, of_step = (
        flops_of_program(jax.make_jaxpr(f)(X, X).jaxpr)
        for f in (reversed_, lambda x, _: step(x, None))
    )
    return of_both / of_step


def time_of(found: Choice, step: Callable, follows_policy: bool) -> float:
    """Return the time of the steps that run again, and of n steps that run and are reversed."""
    # A step that is reversed from its state, and recomputed there, does not run before.
    once = 1 if found.kind == "binomial" and follows_policy else 0
    return found.forward_steps - N + N * (steps_to_reverse(step) - once)


@pytest.mark.parametrize("count", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 6))])
def test_the_way_with_less_time_is_taken(count: int) -> None:
    step = layers(count)
    seen = set()
    for states in (5, 8, 16, 30, 70, 170, 400):
        budget = states * X.nbytes
        wanted = by_hand(step, NOTHING)
        ways = {False: choice_of(wanted, budget), True: choice_of(step, budget)}
        found = choice_of(step, budget, policy=NOTHING)
        times = {
            kept: time_of(way, step if kept else wanted, not kept)
            for kept, way in ways.items()
            if way is not None
        }
        assert (found is None) == (not times)
        if found is None:
            continue
        seen.add(found.all_residuals)
        assert found.forward_steps == ways[found.all_residuals].forward_steps  # type: ignore[union-attr]
        # The time of elementwise operations and traffic is less than this.
        assert times[found.all_residuals] <= 1.15 * min(times.values()), states
    assert seen == {True, False}


def observed(step: Callable, ran: list[int]) -> Callable:
    def run(x: Any, _: None) -> Any:
        jax.debug.callback(lambda _: ran.append(1), x[0, 0])
        return step(x, _)

    return run


@pytest.mark.parametrize("states", [6, 30, 110, 900])
def test_as_many_steps_run_as_the_choice_says(states: int) -> None:
    ran: list[int] = []
    options = {"budget": states * X.nbytes, "policy": NOTHING}

    explained: list[Choice] = []

    def loss(x: Any, w: Any) -> Any:
        step = observed(layers(4, w), ran)
        explained.append(
            explain(step, x, length=N, **options)
        )  # here the weights are differentiated
        return scan(step, x, length=N, **options)[0].sum()

    jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1)))(X, W))
    jax.effects_barrier()
    (found,) = explained
    # A policy that keeps nothing runs each step again when it is reversed.
    again = 0 if found.all_residuals else N
    assert len(ran) == found.forward_steps + again
    assert found.all_residuals == (states > 6)
    assert (len(ran) == N) == (states == 900)


@pytest.mark.parametrize("policy", [NOTHING, remat.policies.dots_saveable], ids=repr)
@pytest.mark.parametrize("states", [8, 30, 110, 400])
def test_gradients_are_the_same_and_the_budget_is_kept(states: int, policy: Any) -> None:
    step, budget = layers(3), states * X.nbytes
    loss = lambda x: (scan(step, x, length=N, budget=budget, policy=policy)[0] ** 2).sum()  # noqa: E731
    compiled = jax.jit(jax.grad(loss)).lower(X).compile()
    expected = jax.grad(lambda x: (lax.scan(step, x, length=N)[0] ** 2).sum())(X)
    np.testing.assert_allclose(compiled(X), expected, rtol=2e-3, atol=1e-5)
    if explain(step, X, length=N, budget=budget, policy=policy).all_residuals:
        # The products in the reversed step are not in the budget (docs/loops.md, Limits).
        aside = 2 * X.nbytes
        assert compiled.memory_analysis().temp_size_in_bytes <= 1.05 * budget + aside


def test_loops_with_known_bounds_choose_too() -> None:
    loss = lambda x, **way: fori_loop(0, N, lambda _, x: layers(3)(x, None)[0], x, **way).sum()  # noqa: E731
    gradient = jax.grad(lambda x: loss(x, budget="1GiB", policy=NOTHING))
    text = str(jax.make_jaxpr(gradient)(X))
    assert "remat" not in text
    assert "remat" in str(jax.make_jaxpr(jax.grad(lambda x: loss(x, policy=NOTHING)))(X))


def test_a_body_with_a_ref_keeps_its_writes() -> None:
    def gradient(run: Callable, **way: Any) -> Any:
        def loss(x: Any) -> Any:
            total = jax.new_ref(jnp.zeros(()))

            def step(x: Any, _: None) -> Any:
                x = layers(2)(x, None)[0]
                total[...] += (x**2).sum()
                return x, None

            run(step, x, None, 20, **way)
            return total[...]

        return jax.grad(loss)(X)

    found = gradient(scan, budget="1GiB", policy=NOTHING)
    np.testing.assert_allclose(found, gradient(lax.scan), rtol=2e-3, atol=1e-5)


def test_a_policy_is_followed_where_the_user_says_where_values_are_or_gives_no_bytes() -> None:
    step = layers(4)
    offload = remat.policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    assert not explain(step, X, length=N, budget="1GiB", policy=offload).all_residuals
    for way in ({"checkpoints": 1000}, {"checkpoints": 10}, {}):
        found = explain(step, X, length=N, policy=NOTHING, **way)
        assert not found.all_residuals
        assert found.residual_bytes == found.state_bytes
    everything = explain(
        step, X, length=N, budget="1GiB", policy=remat.policies.everything_saveable
    )
    assert not everything.all_residuals
    # The same in a checkpoint of the user's own, which no option removes.
    own = explain(by_hand(step, NOTHING), X, length=N, budget="1GiB", policy=NOTHING)
    assert own.residual_bytes == own.state_bytes


def test_the_explanation_says_which_way_is_taken() -> None:
    text = str(explain(layers(4), X, length=N, budget="1GiB", policy=NOTHING))
    assert (
        "keeping all residuals of a step, instead of those of policy=, is expected to take 0."
        in text
    )


def test_residuals_fit_where_the_state_that_a_policy_keeps_does_not() -> None:
    step = lambda x, _: (x.at[0, 0].set(jnp.sin(x[0, 0])), None)  # noqa: E731
    budget = 2 * X.nbytes + 4 * N
    found = explain(step, X, length=N, budget=budget, policy=NOTHING)
    assert (found.all_residuals, found.forward_steps) == (True, N)
    assert choice_of(by_hand(step, NOTHING), budget) is None
