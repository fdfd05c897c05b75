"""`remat.scan` compared with `jax.lax.scan`, the schedules' counts and the compiler's memory analysis."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax

import remat
from remat.errors import BudgetError, ScheduleError, UnitsError
from remat.loops.scan import explain, scan
from remat.loops.schedules import Binomial, Mixed

F32 = jnp.float32


def assert_close(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert jnp.allclose(x, y, rtol=2e-4, atol=2e-4), (x, y)


def rnn(scan: Callable, **options: Any) -> Callable:
    """Return a loss over a loop with integer and float carry, xs, ys and a closed-over matrix."""

    def loss(w: Any, h: Any, xs: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            h, k = carry
            h = jnp.tanh(w @ h + x["a"] * jnp.cos(x["b"]))
            return (h, k + 1), {"y": h.sum() * k.astype(F32), "k": k}

        (h, k), ys = scan(step, (h, jnp.int32(0)), xs, **options)
        return h.sum() + (ys["y"] ** 2).sum() * 0.1 + (ys["k"].sum() + k).astype(F32)

    return loss


def rnn_inputs(n: int, width: int = 3) -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    xs = {"a": jax.random.normal(keys[1], (n, width)), "b": jax.random.normal(keys[2], (n,))}
    return jax.random.normal(keys[0], (width, width)) * 0.5, jnp.ones(width), xs


# The nested schedule consists of JAX's own loops, so it is tested only with the hardest cases.
HARDEST = ("hessian", "grad of vmap of grad")

WAYS: list[dict[str, Any]] = [
    {"checkpoints": 1},
    {"checkpoints": 3},
    {"checkpoints": 100},
    {},
    {"checkpoints": 3, "reverse": True},
    {"reverse": True},
    {"checkpoints": 2, "policy": jax.checkpoint_policies.nothing_saveable},
    {"policy": jax.checkpoint_policies.dots_saveable, "unroll": 2},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: ",".join(way) or "default")
@pytest.mark.parametrize("n", [0, 13])
def test_values_and_gradients_are_those_of_lax_scan(way: dict[str, Any], n: int) -> None:
    reverse = {"reverse": True} if "reverse" in way else {}
    args = rnn_inputs(n)
    ours = jax.jit(jax.value_and_grad(rnn(scan, **way), (0, 1, 2)))(*args)
    assert_close(ours, jax.jit(jax.value_and_grad(rnn(lax.scan, **reverse), (0, 1, 2)))(*args))


def pushed(f: Callable) -> Callable:
    return lambda w, h, xs: jax.jvp(f, (w, h, xs), (jnp.cos(w), jnp.sin(h), xs))


def batched(f: Callable) -> Callable:
    return lambda w, h, xs: jax.vmap(f, (0, None, None))(jnp.stack([w, w.T]), h, xs)


TRANSFORMS: dict[str, Callable] = {
    "jvp": pushed,
    "vmap": batched,
    "vmap of grad": lambda f: batched(jax.grad(f, (0, 2))),
    "vmap of jvp": lambda f: batched(pushed(f)),
    "grad of vmap": lambda f: jax.grad(lambda *a: batched(f)(*a).sum(), (0, 1, 2)),
    "jacfwd": lambda f: jax.jacfwd(f, 1),
    "hessian": lambda f: jax.hessian(f, (0, 1)),
    "forward over reverse": lambda f: jax.jacfwd(jax.grad(f), 1),
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(f, (0, 2)), 1),
    "reverse over forward": lambda f: jax.grad(lambda *a: pushed(f)(*a)[1], (0, 1, 2)),
    "grad of vmap of grad": lambda f: jax.grad(
        lambda *a: (batched(jax.grad(f))(*a) ** 2).sum(), (0, 1, 2)
    ),
    "linearize": lambda f: lambda *a: jax.linearize(f, *a)[1](*a),
    "under jax.checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1, 2)),
}


@pytest.mark.parametrize(
    "name, way",
    [(name, {"checkpoints": 2}) for name in TRANSFORMS] + [(name, {}) for name in HARDEST],
    ids=str,
)
def test_every_transform_agrees_with_lax_scan(name: str, way: dict[str, Any]) -> None:
    transform, args = TRANSFORMS[name], rnn_inputs(7, 2)
    ours, theirs = transform(rnn(scan, **way)), transform(rnn(lax.scan))
    assert_close(jax.jit(ours)(*args), jax.jit(theirs)(*args))


@pytest.mark.slow
def test_third_derivatives_agree_with_lax_scan() -> None:
    w, h, xs = rnn_inputs(5, 2)

    def third(scan: Callable, **way: Any) -> Any:
        f = rnn(scan, **way)
        return jax.jit(jax.jacfwd(jax.jacrev(jax.grad(lambda h: f(w, h, xs)))))(h)

    assert_close(third(scan, checkpoints=2), third(lax.scan))


@pytest.mark.parametrize("way", [{"checkpoints": 2}, {}], ids=str)
def test_loops_nest(way: dict[str, Any]) -> None:
    def double(scan: Callable, **way: Any) -> Callable:
        def loss(x: Any) -> Any:
            def outer(c: Any, k: Any) -> Any:
                inner = lambda d, _: (jnp.sin(d * c) + x, d.sum())  # noqa: E731
                d, ys = scan(inner, c, None, 4, **way)
                return d * k, ys.sum()

            c, ys = scan(outer, x, jnp.arange(1.0, 6.0), **way)
            return c.sum() + ys.sum()

        return loss

    x = jnp.array([0.3, 0.7])
    ours, theirs = double(scan, **way), double(lax.scan)
    assert_close(jax.jit(jax.grad(ours))(x), jax.jit(jax.grad(theirs))(x))
    assert_close(jax.jit(jax.hessian(ours))(x), jax.jit(jax.hessian(theirs))(x))


@given(
    n=st.integers(0, 25),
    checkpoints=st.integers(1, 8),
    reverse=st.booleans(),
    ops=st.lists(st.sampled_from(["sin", "mul", "mix", "x", "w", "relu"]), min_size=1, max_size=5),
)
@settings(max_examples=6, deadline=None)
def test_random_bodies_have_the_gradients_of_lax_scan(
    n: int, checkpoints: int, reverse: bool, ops: list[str]
) -> None:
    def loss(scan: Callable, **way: Any) -> Callable:
        def run(w: Any, a: Any, b: Any, xs: Any) -> Any:
            def step(carry: Any, x: Any) -> Any:
                a, b = carry
                for op in ops:
                    a = {
                        "sin": lambda a=a: jnp.sin(a),
                        "mul": lambda a=a, b=b: a * jnp.tanh(b),
                        "mix": lambda a=a: a + jnp.flip(a) * 0.5,
                        "x": lambda a=a: a + x,
                        "w": lambda a=a: a * w,
                        "relu": lambda a=a: jnp.maximum(a, 0.1),
                    }[op]()
                return (a, 0.9 * b + a.mean()), (a, b)

            carry, ys = scan(step, (a, b), xs, **way)
            return sum(jnp.sum(y) for y in jax.tree.leaves((carry, ys)))

        return run

    keys = jax.random.split(jax.random.key(n), 3)
    args = (
        jax.random.normal(keys[0], (3,)),
        jax.random.normal(keys[1], (3,)),
        jnp.float32(0.3),
        jax.random.normal(keys[2], (n, 3)),
    )
    ours = jax.jit(jax.grad(loss(scan, checkpoints=checkpoints, reverse=reverse), (0, 1, 2, 3)))
    theirs = jax.jit(jax.grad(loss(lax.scan, reverse=reverse), (0, 1, 2, 3)))
    assert_close(ours(*args), theirs(*args))


@pytest.mark.parametrize("way", [{"checkpoints": 2}, {}], ids=str)
def test_random_keys_can_be_carried_and_recomputation_draws_the_same(way: dict[str, Any]) -> None:
    def loss(scan: Callable, **way: Any) -> Callable:
        def run(x: Any) -> Any:
            def step(carry: Any, _: None) -> Any:
                x, key = carry
                key, here = jax.random.split(key)
                return (jnp.sin(x) * jax.random.normal(here, x.shape), key), here

            (x, _), _ = scan(step, (x, jax.random.key(7)), None, 9, **way)
            return x.sum()

        return run

    x = jnp.ones(4)
    assert_close(jax.grad(loss(scan, **way))(x), jax.grad(loss(lax.scan))(x))


def test_python_numbers_take_the_type_of_the_body() -> None:
    body = lambda c, _: (c + jnp.float32(1.5), c)  # noqa: E731
    assert_close(scan(body, 0.0, None, 3, checkpoints=2), lax.scan(body, 0.0, None, 3))


@pytest.mark.parametrize("n, slots", [(10, 3), (100, 5), (100, 10), (1000, 10), (37, 1), (50, 49)])
def test_the_compiled_gradient_runs_exactly_the_optimal_number_of_steps(n: int, slots: int) -> None:
    ran, traced = [], []

    def loss(x: Any) -> Any:
        def step(c: Any, _: None) -> Any:
            traced.append(1)
            jax.debug.callback(lambda _: ran.append(1), c)
            return jnp.sin(c), None

        return scan(step, x, None, n, checkpoints=slots)[0]

    jax.jit(jax.grad(loss))(1.0).block_until_ready()
    jax.effects_barrier()
    # The residuals of a sine are as large as its argument.
    assert len(ran) == Mixed.of(n, slots, 1, 1).forward_steps
    assert len(ran) < Binomial(n, slots).grad_forward_steps
    assert len(traced) <= 2


def steps_of_gradient(n: int, state: int, residuals: int, **way: Any) -> int:
    """Return the steps that a gradient runs, given the number of arrays in state and residuals."""
    ran: list[int] = []

    def loss(x: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            jax.debug.callback(lambda _: ran.append(1), carry[0])
            for i in range(residuals):
                # Each sine keeps one array.
                carry = [jnp.sin(c) if i % state == k else c for k, c in enumerate(carry)]
            return carry, None

        return sum(scan(step, [x + k for k in range(state)], None, n, **way)[0])

    jax.block_until_ready(jax.jit(jax.grad(loss))(jnp.float32(1.0)))
    jax.effects_barrier()
    return len(ran)


@pytest.mark.parametrize(
    "n, state, residuals, checkpoints",
    [(60, 4, 10, 5), (90, 3, 2, 4), (40, 5, 1, 1), (30, 2, 9, 3)],
)
def test_the_compiled_gradient_runs_as_many_steps_as_the_bytes_of_its_residuals_say(
    n: int, state: int, residuals: int, checkpoints: int
) -> None:
    schedule = Mixed.of(n, checkpoints * state, state, residuals)
    if schedule.peak_residuals > 1:
        optimum = schedule.forward_steps
    else:
        optimum = Binomial(n, checkpoints).grad_forward_steps
    assert steps_of_gradient(n, state, residuals, checkpoints=checkpoints) == optimum


@pytest.mark.slow
def test_sixty_compiled_gradients_run_as_many_steps_as_the_schedule() -> None:
    draw = np.random.default_rng(0)
    for _ in range(60):
        n, state, residuals, checkpoints = (int(draw.integers(1, k)) for k in (80, 9, 30, 12))
        schedule = Mixed.of(n, checkpoints * state, state, residuals)
        found = steps_of_gradient(n, state, residuals, checkpoints=checkpoints)
        if schedule.peak_residuals > 1 or n == 1:
            assert found == schedule.forward_steps, (n, state, residuals, checkpoints)
        elif checkpoints < n:
            assert found == Binomial(n, checkpoints).grad_forward_steps
        else:
            assert found <= 2 * n


def test_the_default_runs_at_most_one_more_sweep() -> None:
    ran: list[int] = []

    def loss(x: Any) -> Any:
        def step(c: Any, _: None) -> Any:
            jax.debug.callback(lambda _: ran.append(1), c)
            return jnp.sin(c), None

        return scan(step, x, None, 103)[0]

    jax.jit(jax.grad(loss))(1.0).block_until_ready()
    jax.effects_barrier()
    choice = explain(lambda c, _: (jnp.sin(c), None), 1.0, None, 103)
    assert len(ran) == choice.forward_steps <= 2 * 103


def temp_bytes(loss: Callable, *args: Any) -> int:
    return jax.jit(jax.grad(loss)).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_peak_memory_depends_on_checkpoints_and_not_on_length() -> None:
    x = jnp.ones(50_000)
    state = 4 * x.size

    def peak(n: int, slots: int) -> int:
        step = lambda c, _: (jnp.sin(c) * jnp.cos(c), None)  # noqa: E731
        return temp_bytes(lambda x: scan(step, x, None, n, checkpoints=slots)[0].sum(), x)

    def program(n: int) -> str:
        step = lambda c, _: (jnp.sin(c) * jnp.cos(c), None)  # noqa: E731
        loss = lambda x: scan(step, x, None, n, checkpoints=10)[0].sum()  # noqa: E731
        return jax.jit(jax.grad(loss)).lower(x).as_text()

    # The program has the same length; only numbers and the tables of splits differ.
    assert abs(len(program(1_000)) - len(program(100_000))) <= 0.25 * len(program(1_000))
    few = [peak(n, 10) for n in (1_000, 10_000, 100_000)]
    assert max(few) <= 1.01 * min(few)
    # 10 states, one step's residuals, which are as large as four states, and the two states of one step.
    assert max(few) <= (10 + 4 + 2.1) * state
    assert 39 * state <= peak(1_000, 50) - few[0] <= 41 * state


@pytest.mark.parametrize(
    "sines", [1, 20, *(pytest.param(k, marks=pytest.mark.slow) for k in (3, 8))]
)
def test_temporaries_are_within_a_twentieth_of_the_budget(sines: int) -> None:
    x = jnp.ones(20_000)
    budget = 120 * x.nbytes

    def step(c: Any, _: None) -> Any:
        for _ in range(sines):
            c = jnp.sin(c)
        return c, None

    choice = explain(step, x, None, 500, budget=budget)
    assert choice.kind == "mixed"
    peaks = [
        temp_bytes(lambda x, n=n: scan(step, x, None, n, budget=budget)[0].sum(), x)
        for n in (500, 5_000)
    ]
    assert max(peaks) <= 1.05 * budget
    # The budget need not be a multiple of the residuals.
    assert min(peaks) >= budget - (sines + 4) * x.nbytes


@pytest.mark.parametrize("n", [2, 5, 10])
def test_temporaries_of_short_loops_are_within_the_budget(n: int) -> None:
    x = jnp.ones(20_000)
    step = lambda c, _: (jnp.sin(c), None)  # noqa: E731
    kinds = []
    for states in (3, 4, n + 1, n + 2):
        options = {"budget": states * x.nbytes}
        if states == 3:
            with pytest.raises(BudgetError, match=r"smallest keeps .* \(320000 bytes\)"):
                scan(step, x, None, n, **options)
            continue
        kinds.append(explain(step, x, None, n, **options).kind)
        peak = temp_bytes(lambda x, o=options: scan(step, x, None, n, **o)[0].sum(), x)
        assert peak <= 1.02 * states * x.nbytes
    # All residuals, the current state and its cotangent.
    assert kinds[-1] == "plain"
    assert n == 2 or "plain" not in kinds[:-1]


def test_the_default_needs_the_memory_of_about_the_square_root() -> None:
    x = jnp.ones(10_000)

    def loss(scan: Callable) -> Callable:
        step = lambda c, _: (jnp.sin(c) * jnp.cos(c), None)  # noqa: E731
        return lambda x: scan(step, x, None, 2_500)[0].sum()

    plain, ours = temp_bytes(loss(lax.scan), x), temp_bytes(loss(scan), x)
    assert ours <= plain / 15


def test_explain_reports_the_bytes_that_the_compiler_keeps() -> None:
    x = jnp.ones(30_000)
    step = lambda c, _: (jnp.sin(c) * jnp.cos(c), None)  # noqa: E731
    for way in ({"checkpoints": 20}, {}, {"budget": "6MiB"}):
        choice = explain(step, x, None, 900, **way)
        temp = temp_bytes(lambda x, way=way: scan(step, x, None, 900, **way)[0].sum(), x)
        # Within a few states, since the compiler's fusions inside of one step are not predicted.
        assert abs(temp - choice.kept_bytes) <= 6 * choice.state_bytes, choice


def test_the_choice_follows_the_budget() -> None:
    step = lambda c, _: (jnp.sin(c) * jnp.cos(c), None)  # noqa: E731
    x = jnp.ones(1000)
    kinds = [
        explain(step, x, None, 1000, budget=budget).kind for budget in ("1GiB", "600KiB", "23KB")
    ]
    assert kinds == ["plain", "mixed", "binomial"]
    tight = explain(step, x, None, 1000, budget="60KB")
    assert tight.kept_bytes <= 60_000
    assert "60KB" not in str(tight)
    assert "58.6 KiB" in str(tight)
    assert (
        explain(
            lambda c, _: (step(step(c, None)[0], None)[0], None), x, None, 5, checkpoints=7
        ).kind
        == "nested"
    )
    assert explain(step, x, None, 2, checkpoints=9).kind == "plain"


PRODUCT = lambda c: jnp.sin(c) * jnp.cos(c)  # noqa: E731


@pytest.mark.parametrize(
    "function, n", [(jnp.sin, 1), (PRODUCT, 1), (jnp.sin, 2), (PRODUCT, 5), (lambda c: 2 * c, 5)]
)
def test_the_smallest_budget_that_an_error_names_is_accepted(function: Callable, n: int) -> None:
    def run(budget: int) -> Any:
        return scan(lambda c, _: (function(c), None), jnp.ones(250), None, n, budget=budget)

    with pytest.raises(BudgetError) as refused:
        run(0)
    least = int(str(refused.value).partition(" bytes)")[0].rpartition("(")[2])
    run(least)
    with pytest.raises(BudgetError):
        run(least - 1)


def test_impossible_requests_are_refused_with_the_numbers() -> None:
    step = lambda c, _: (jnp.sin(c), None)  # noqa: E731
    x = jnp.ones(1000)
    with pytest.raises(BudgetError, match=r"smallest keeps one state and .*: 15\.6 KiB"):
        scan(step, x, None, 100, budget="8KiB")
    with pytest.raises(ScheduleError, match="checkpoints must be at least 1, not 0"):
        scan(step, x, None, 100, checkpoints=0)
    with pytest.raises(ScheduleError, match="exclude each other"):
        scan(step, x, None, 100, checkpoints=3, budget="1GiB")
    with pytest.raises(UnitsError):
        scan(step, x, None, 100, budget="lots")
    for name, bad in (("length", 2.5), ("length", -1), ("unroll", 0), ("unroll", 1.5)):
        with pytest.raises(ScheduleError, match=f"{name} must be"):
            scan(step, x, None, **{"length": 3, "checkpoints": 2, name: bad})
    with pytest.raises(ScheduleError, match="cannot be counted in 32 bits"):
        scan(step, x, None, 2**32, checkpoints=2)


def test_counts_may_be_integers_of_numpy_or_of_jax() -> None:
    step = lambda c, _: (jnp.sin(c), None)  # noqa: E731
    for three in (np.int64(3), jnp.int32(3)):
        found = scan(step, jnp.float32(0.4), None, three, checkpoints=three, unroll=three)[0]
        assert_close(found, lax.scan(step, jnp.float32(0.4), None, 3)[0])


@pytest.mark.parametrize(
    "call",
    [
        lambda scan: scan(lambda c, x: (c, x), 1.0),
        lambda scan: scan(lambda c, x: (c, x), 1.0, (jnp.ones(3), jnp.ones(4))),
        lambda scan: scan(lambda c, x: (c, x), 1.0, jnp.ones(3), 4),
        lambda scan: scan(lambda c, x: c, 1.0, jnp.ones(3)),
        lambda scan: scan(lambda c, x: ((c, c), x), 1.0, jnp.ones(3)),
        lambda scan: scan(lambda c, x: (c.astype(jnp.int32), x), jnp.ones(2), jnp.ones(3)),
        lambda scan: scan(lambda c, x: (c, x), 1.0, jnp.float32(3.0)),
    ],
)
def test_misuse_raises_what_lax_scan_raises(call: Callable) -> None:
    with pytest.raises((TypeError, ValueError, IndexError)) as theirs:
        call(lax.scan)
    with pytest.raises(theirs.type) as ours:
        call(scan)
    assert str(ours.value) == str(theirs.value)


def test_no_tracer_leaks() -> None:
    args = rnn_inputs(4, 2)
    with jax.checking_leaks():
        jax.jit(jax.grad(rnn(scan, checkpoints=2)))(*args)


def test_effects_of_the_body_happen_again_when_it_is_recomputed() -> None:
    seen: list[float] = []

    def loss(x: Any) -> Any:
        def step(c: Any, _: None) -> Any:
            jax.debug.callback(lambda c: seen.append(round(float(c), 3)), c)
            return c * c, None

        return scan(step, x, None, 3, checkpoints=1)[0]

    jax.grad(loss)(2.0)
    jax.effects_barrier()
    assert len(seen) == Mixed.of(3, 1, 1, 1).forward_steps
    assert set(seen) == {2.0, 4.0, 16.0}


def test_residuals_from_which_a_step_is_recomputed_are_not_kept_in_place_of_states() -> None:
    step = lambda c, _: (jnp.sin(jnp.cos(c) * jnp.exp(c)), None)  # noqa: E731
    nothing = {"policy": jax.checkpoint_policies.nothing_saveable}
    for f, way in ((step, nothing), (jax.checkpoint(step), {}), (remat.checkpoint(step), {})):
        assert explain(f, jnp.ones(3), None, 100, checkpoints=10, **way).kind == "binomial"
    square = lambda c, _: (c * c, None)  # noqa: E731
    assert explain(square, jnp.ones(3), None, 100, checkpoints=10).kind == "mixed"


def test_a_step_that_is_linear_in_the_differentiated_inputs_runs_once() -> None:
    ran: list[int] = []

    def loss(x: Any, w: Any) -> Any:
        def step(c: Any, _: None) -> Any:
            jax.debug.callback(lambda _: ran.append(1), c)
            return c * w, None

        return scan(step, x, None, 30, checkpoints=2)[0]

    gradient = jax.jit(jax.grad(loss))(jnp.float32(3.0), jnp.float32(0.9))
    jax.effects_barrier()
    assert len(ran) == 30
    assert jnp.allclose(gradient, 0.9**30)


@pytest.mark.parametrize(
    "inside", [jax.checkpoint, jax.jit, lambda f: f], ids=["checkpoint", "jit", "plain"]
)
def test_batched_loops_inside_of_another_loop_or_call_are_reversed(inside: Callable) -> None:
    """JAX batches the loop before it differentiates it."""

    def gradient(scan: Callable, **way: Any) -> Callable:
        def each(x: Any, w: Any) -> Any:
            def step(carry: Any, _: None) -> Any:
                h, g = carry  # g is the same in all examples
                return (jnp.sin(h) * g, jnp.sin(g)), (h, g)

            def inner(c: Any, _: None) -> Any:
                (h, g), (hs, gs) = scan(step, (c, w), None, 4, **way)
                return jnp.cumsum(g) * h + hs.sum(0) * gs.sum(0), None

            return lax.scan(inside(inner), x, None, 2)[0]

        return jax.grad(lambda x, w: jnp.sin(jax.vmap(each, (0, None))(x, w)).sum(), (0, 1))

    args = jnp.linspace(0.2, 1.4, 9).reshape(3, 3), jnp.array([0.3, 0.4, 0.9])
    assert_close(gradient(scan, checkpoints=2)(*args), gradient(lax.scan)(*args))


@pytest.mark.parametrize("way", [{"checkpoints": 2}, {}], ids=str)
def test_loops_run_inside_shard_map(way: dict[str, Any]) -> None:
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def gradient(scan: Callable, **way: Any) -> Callable:
        def local(w: Any, x: Any, ks: Any) -> Any:
            # The matrix is replicated over devices, the carry is not.
            step = lambda c, k: (jnp.sin(w @ c) * k, c.sum())  # noqa: E731
            c, ys = scan(step, x, ks, **way)
            return lax.psum(c.sum() + ys.sum(), "d")

        specs = (spec(), spec("d"), spec())
        return jax.grad(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spec()), (0, 1))

    args = jnp.eye(2) * 0.9, jnp.array([0.3, 0.4]), jnp.linspace(0.5, 1.5, 9)
    assert_close(jax.jit(gradient(scan, **way))(*args), jax.jit(gradient(lax.scan))(*args))


@pytest.mark.parametrize("transform", [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))[1]])
def test_integers_in_the_carry_may_vary_over_the_devices_of_shard_map(transform: Callable) -> None:
    spec = jax.sharding.PartitionSpec("d")

    def derivative(scan: Callable, **way: Any) -> Callable:
        def local(x: Any) -> Any:
            step = lambda c, _: ((jnp.sin(c[0]) * c[1].astype(F32), c[1] + 1), None)  # noqa: E731
            (x, _), _ = scan(step, (x, x.sum().astype(jnp.int32)), None, 3, **way)
            return x

        mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
        return jax.jit(transform(lambda x: mapped(x).sum()))

    x = jnp.array([0.3, 1.4])
    assert_close(derivative(scan, checkpoints=2)(x), derivative(lax.scan)(x))


def test_scans_of_length_0_keep_the_axes_that_their_rows_vary_over() -> None:
    spec = jax.sharding.PartitionSpec("d")
    step = lambda c, x: (0.5 * jnp.sin(c) + x, c)  # noqa: E731

    def gradient(scan: Callable, **way: Any) -> Callable:
        def local(x: Any) -> Any:
            c, ys = scan(step, x, x[None][:0], **way)
            return c * c + ys.sum(0)

        mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
        return jax.jit(jax.grad(lambda x: mapped(x).sum()))

    x = jnp.array([0.3, 1.4])
    assert_close(gradient(scan, checkpoints=2)(x), gradient(lax.scan)(x))


REAL_PEAK = """
import resource, sys
import jax, jax.numpy as jnp
from remat.loops.scan import scan
n, x = int(sys.argv[1]), jnp.ones(200_000)
step = lambda c, _: (c * 0.999, None)
loss = lambda x: scan(step, x, None, n, checkpoints=20)[0].sum()
program = jax.jit(jax.grad(loss)).lower(x).compile()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
jax.block_until_ready(program(x))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_the_real_peak_of_the_process_does_not_depend_on_length() -> None:
    def growth_kib(n: int) -> int:
        command = [sys.executable, "-c", REAL_PEAK, str(n)]
        return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)

    growths = [growth_kib(n) for n in (1_000, 10_000, 100_000)]
    assert max(growths) <= 1.1 * min(growths)
    # 20 states and some copies; jax.lax.scan would keep 1,000 to 100,000 of them.
    assert max(growths) <= 40 * 4 * 200_000 / 1024


def test_a_body_without_a_reverse_derivative_runs() -> None:
    def body(carry: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        return lax.nextafter(carry, jnp.float32(2.0)), carry

    ours = scan(body, jnp.float32(1.0), None, 6, checkpoints=2)
    theirs = lax.scan(body, jnp.float32(1.0), None, 6)
    np.testing.assert_array_equal(ours[1], theirs[1])
    assert ours[0] == theirs[0]


@pytest.mark.parametrize("wrap", [remat.checkpoint, jax.checkpoint])
def test_a_mapped_region_around_a_loop_differentiates(wrap: Callable) -> None:
    def of(loop: Callable, **options: Any) -> Callable:
        def f(x: Any, w: Any) -> Any:
            def step(state: Any, _: None) -> Any:
                h, key, v = state
                return (jnp.sin(h * w), jax.random.split(key)[0], v * w), (h, v)

            init = (x, jax.random.key(3), w)
            (h, _, _), (ys, vs) = loop(step, init, None, length=3, **options)
            return (h + ys.sum(0)).sum() * vs.sum()

        total = lambda x, w: jax.vmap(wrap(f), (0, None))(x, w).sum()  # noqa: E731
        return jax.jit(jax.grad(total, (0, 1)))

    args = jnp.array([[0.3, 0.5], [0.2, 0.9]]), jnp.float32(1.1)
    for found, expected in zip(of(scan, checkpoints=2)(*args), of(lax.scan)(*args)):
        assert jnp.allclose(found, expected, rtol=1e-5)


def test_a_cheap_step_whose_states_all_fit_is_run_twice_rather_than_kept() -> None:
    x = jnp.ones(10_000)
    cheap = lambda c, _: (jnp.sin(c) * jnp.cos(c), None)  # noqa: E731
    w = jnp.ones((2000, 10_000)) / 10_000
    costly = lambda c, _: (jnp.tanh(w.T @ (w @ jnp.sin(c))), None)  # noqa: E731

    def observed(c: Any, _: None) -> tuple[Any, None]:
        jax.debug.callback(lambda _: None, c[0])
        return cheap(c, None)

    by_body = {
        body: explain(body, x, length=50, checkpoints=50).kind for body in (cheap, costly, observed)
    }
    assert list(by_body.values()) == ["nested", "mixed", "mixed"]
    assert "keeping a step's residuals takes" in explain(cheap, x, length=50, checkpoints=50).why
    assert explain(cheap, x, length=50, checkpoints=49).kind == "mixed"
    assert explain(cheap, x, length=50, budget=56 * x.nbytes).kind == "nested"

    def temporaries(body: Callable, scan: Callable, **way: Any) -> int:
        loss = lambda x: scan(body, x, length=50, **way)[0].sum()  # noqa: E731
        return jax.jit(jax.grad(loss)).lower(x).compile().memory_analysis().temp_size_in_bytes

    by_hand = temporaries(jax.checkpoint(cheap, prevent_cse=False), jax.lax.scan)
    assert temporaries(cheap, scan, checkpoints=50) <= by_hand


def test_a_value_that_the_derivative_computes_again_is_kept_once() -> None:
    step = lambda c, _: (jnp.sin(c) * jnp.cos(c), None)  # noqa: E731
    x = jnp.linspace(0.1, 1.0, 1000)
    choice = explain(step, x, length=100, checkpoints=10)
    assert choice.residual_bytes == 2 * choice.state_bytes
    assert choice.forward_steps == Mixed.of(100, 10, 1, 2).forward_steps
    # `lax.scan` keeps sine and cosine twice.
    assert explain(step, x, length=100, budget="1GiB").kept_bytes == 400 * x.nbytes
    fits = explain(step, x, length=100, budget=250 * x.nbytes)
    assert (fits.kind, fits.forward_steps) == ("mixed", 100)
    ours, theirs = (
        jax.grad(lambda x, run=run, way=way: run(step, x, length=100, **way)[0].sum())(x)
        for run, way in ((scan, {"checkpoints": 10}), (lax.scan, {}))
    )
    assert_close(ours, theirs)
