"""The budget of a loop is compared with the memory that the compiler reports for the loop's gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from remat import remat_scan
from remat.errors import BudgetError
from remat.loops.fitting import fitted, temporary_bytes
from remat.loops.loop import Inputs
from remat.loops.scan import explain, scan
from remat.loops.while_loop import fori_loop, while_loop

X = jnp.linspace(0.0, 1.0, 128 * 128).reshape(128, 128)
W = jnp.eye(128) * 0.9


# The search, without a compiler


@given(
    limit=st.integers(100, 10_000),
    least=st.integers(1, 60),
    workspace=st.integers(-40, 40),
    unit=st.integers(1, 20),
)
def test_the_chosen_way_fits_and_leaves_little_unused(
    limit: int, least: int, workspace: int, unit: int
) -> None:
    """A choice takes its counted bytes, in whole units, and a workspace."""
    compiled = []

    def choose(reserved: int) -> int:
        assert limit - reserved >= least
        return least + (limit - reserved - least) // unit * unit

    def excess_bytes(way: int) -> int:
        compiled.append(way)
        return way + workspace - limit

    found = fitted(limit, limit - least, unit, choose, excess_bytes)
    assert found is not None
    assert found + workspace <= limit
    assert found + workspace >= min(0.97 * limit, limit - 2 * unit)
    assert len(compiled) <= 4


def test_a_jump_in_compiled_bytes_is_searched_by_bisection() -> None:
    """Choices of more than 500 bytes take twice as much."""

    def excess_bytes(way: int) -> int:
        return (2 * way if way > 500 else way) - 900

    assert fitted(900, 890, 1, lambda reserved: 900 - reserved, excess_bytes) in range(400, 501)


def test_nothing_is_found_where_the_smallest_does_not_fit() -> None:
    ways = []

    def choose(reserved: int) -> int:
        ways.append(100 - reserved)
        return ways[-1]

    assert fitted(100, 60, 1, choose, lambda way: way + 70 - 100) is None
    assert ways == [100, 40]


def test_a_way_that_more_memory_does_not_change_is_compiled_once() -> None:
    compiled = []
    found = fitted(100, 90, 1, lambda reserved: "all", lambda way: compiled.append(way) or -80)
    assert (found, compiled) == ("all", ["all"])


# Loops


def attention(c: Any, w: Any) -> Any:
    return jnp.tanh(jax.nn.softmax(c @ c.T / 4) @ c)


def transform(c: Any, w: Any) -> Any:
    return jnp.fft.ifft(jnp.fft.fft(c) * 1j).real * jnp.cos(c)


def products(c: Any, w: Any) -> Any:
    return jnp.tanh(c @ w) @ w + c


def gated(c: Any, w: Any) -> Any:
    gate, reset = jax.nn.sigmoid(c @ w), jax.nn.sigmoid(c @ w.T)
    return (1 - gate) * c + gate * jnp.tanh((reset * c) @ w)


def stencil(c: Any, w: Any) -> Any:
    near = sum(jnp.roll(c, shift, axis) for shift in (1, -1) for axis in (0, 1))
    return c + 0.1 * (near - 4 * c) - 0.01 * c**3


def linear_solve(c: Any, w: Any) -> Any:
    return jnp.linalg.solve(3 * jnp.eye(len(c)) + 0.01 * jnp.sin(c), c)


def inner_loop(c: Any, w: Any) -> Any:
    return lax.scan(lambda c, _: (jnp.sin(c) * 1.1, None), c, None, length=8)[0]


def inner_remat_scan(c: Any, w: Any) -> Any:
    return scan(lambda c, _: (jnp.sin(c) * 1.1, None), c, None, 20, checkpoints=3)[0]


def branches(c: Any, w: Any) -> Any:
    return lax.cond(c[0, 0] > 0, lambda c: jnp.sin(jnp.cos(c)), lambda c: c * 2, c)


def half_precision(c: Any, w: Any) -> Any:
    half = c.astype(jnp.bfloat16)
    return jnp.sin(half @ half).astype(jnp.float32)


def long_chain(c: Any, w: Any) -> Any:
    for _ in range(20):
        c = jnp.sin(c)
    return c


BODIES = [
    attention,
    transform,
    products,
    gated,
    stencil,
    linear_solve,
    inner_loop,
    inner_remat_scan,
    branches,
    half_precision,
    long_chain,
]
by_name = pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)


def differentiated(body: Callable) -> tuple[Any, ...]:
    """Return the `argnums` to test: also those of the weights if the body uses them."""
    return (0, (0, 1), 1) if body in (products, gated, attention) else (0,)


def loss_of(body: Callable, loop: Callable) -> Callable:
    """Return a function of the initial carry and of the values that the body closes over."""
    return lambda x, w: loop(lambda c: body(c, w), x).sum()


def temporaries(loss: Callable, argnums: Any, *args: Any) -> int:
    gradient = jax.jit(jax.grad(loss, argnums))
    return gradient.lower(*args).compile().memory_analysis().temp_size_in_bytes


@by_name
@pytest.mark.parametrize("n", [64, pytest.param(1_000, marks=pytest.mark.slow)])
def test_the_temporaries_of_a_scan_fill_its_budget(body: Callable, n: int) -> None:
    budget = 30 * X.nbytes

    def loop(f: Callable, x: Any) -> Any:
        return scan(lambda c, _: (f(c), None), x, None, n, budget=budget)[0]

    loss = loss_of(body, loop)
    peaks = [temporaries(loss, argnums, X, W) for argnums in differentiated(body)]
    assert max(peaks) <= 1.05 * budget
    choice = explain(lambda c, _: (body(c, W), None), X, None, n, budget=budget)
    # Keeping all states and running each step twice may be faster than a choice that needs more memory.
    assert choice.kind == "nested" or max(peaks) >= 0.75 * budget


@by_name
@pytest.mark.parametrize("loop", ["while", pytest.param("fori", marks=pytest.mark.slow)])
def test_the_temporaries_of_a_loop_of_unknown_length_fit_its_budget(
    body: Callable, loop: str
) -> None:
    budget = 30 * X.nbytes

    def loss(x: Any, w: Any, n: Any) -> Any:
        if loop == "fori":
            return fori_loop(0, n, lambda _, c: body(c, w), x, budget=budget).sum()
        step = lambda state: (state[0] + 1, body(state[1], w))  # noqa: E731
        unfinished = lambda state: state[0] < n  # noqa: E731
        return while_loop(unfinished, step, (jnp.int32(0), x), budget=budget)[1].sum()

    for argnums in differentiated(body):
        assert temporaries(loss, argnums, X, W, 7) <= 1.05 * budget


@pytest.mark.parametrize("closed_over", ["an array", "an argument"])
def test_weights_that_are_not_differentiated_take_nothing_of_the_budget(closed_over: str) -> None:
    """A gradient of the weights would need the contributions of all products of a step."""
    budget, weights = 60 * X.nbytes, W

    def loss(x: Any, w: Any) -> Any:
        w = weights if closed_over == "an array" else w
        body = lambda c: functools.reduce(lambda c, _: jnp.tanh(c @ w), range(8), c)  # noqa: E731
        return scan(lambda c, _: (body(c), None), x, None, 400, budget=budget)[0].sum()

    assert 0.95 * budget <= temporaries(loss, 0, X, W) <= 1.05 * budget


def layer(x: Any, params: Any) -> Any:
    """Return a layer whose scores are four times as large as its carry."""
    scores = jax.nn.softmax((x @ params["q"]) @ (x @ params["k"]).T)
    return x + jnp.tanh(scores @ x @ params["w"]) @ params["o"]


def test_the_budget_of_remat_scan_is_that_of_the_compiled_loops() -> None:
    params = {name: jnp.ones((96, 32, 32)) / 32 for name in "qkwo"}
    x = jnp.ones((128, 32))

    def loss(params: Any, x: Any, budget: int) -> Any:
        return remat_scan(layer, "auto", budget=budget)(x, params).sum()

    with pytest.raises(BudgetError, match="the smallest, ") as refused:
        loss(params, x, 1)
    least = int(str(refused.value).partition(" bytes")[0].rpartition("(")[2])
    for budget in (least, 2 * least):
        peak = temporaries(lambda p, x, b=budget: loss(p, x, b), 0, params, x)
        assert peak <= 1.05 * budget


@pytest.mark.parametrize("body", [attention, linear_solve, gated], ids=lambda body: body.__name__)
def test_the_smallest_budget_that_an_error_names_is_kept(body: Callable) -> None:
    def loss(x: Any, budget: int) -> Any:
        return scan(lambda c, _: (body(c, W), None), x, None, 50, budget=budget)[0].sum()

    with pytest.raises(BudgetError) as refused:
        loss(X, 0)
    least = int(str(refused.value).partition(" bytes)")[0].rpartition("(")[2])
    assert temporaries(lambda x: loss(x, least), 0, X) <= 1.01 * least
    with pytest.raises(BudgetError):
        loss(X, int(0.98 * least))


def test_a_small_budget_is_kept_without_the_gradient_of_closed_over_values() -> None:
    """Weights are 16 times as large as a state, and are not differentiated."""
    weights, x = jnp.ones((256, 256)) / 256, jnp.ones((16, 256))
    budget = 8 * x.nbytes

    def loss(x: Any, w: Any) -> Any:
        return scan(lambda c, _: (jnp.sin(c @ w), None), x, None, 50, budget=budget)[0].sum()

    assert temporaries(loss, 0, x, weights) <= 1.05 * budget


# Loops that are not compiled by themselves


def test_budgets_keep_gradients_in_every_transformation() -> None:
    """Gradients are those of `lax.scan`, whether or not the loop can be compiled by itself."""
    x, n = jnp.linspace(0.0, 1.0, 64).reshape(8, 8), 20

    def loss(loop: Callable, **options: Any) -> Callable:
        def of(x: Any) -> Any:
            body = lambda c, _: (jnp.sin(c) - lax.pmean(c, "i") / 9, c[0])  # noqa: E731
            c, ys = loop(body, x, None, n, **options)
            return (c**2).sum() + ys.sum()

        return of

    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def mapped(f: Callable) -> Callable:
        return jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"))

    for wrap in (lambda f: jax.vmap(f, axis_name="i"), mapped):
        ours, theirs = (wrap(jax.grad(f)) for f in (loss(scan, budget=20_000), loss(lax.scan)))
        np.testing.assert_array_equal(jax.jit(ours)(x), jax.jit(theirs)(x))


def test_tracing_a_budget_leaks_no_tracers() -> None:
    def loss(x: Any, w: Any) -> Any:
        return scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, 9, budget=12 * X.nbytes)[0].sum()

    with jax.checking_leaks():
        jax.block_until_ready(jax.jit(jax.grad(loss, 1))(X, W))


def test_nothing_is_compiled_without_jit() -> None:
    step = lambda c, _: (jnp.sin(c), None)  # noqa: E731
    loss = lambda x: scan(step, x, None, 5, budget=5 * X.nbytes)[0].sum()  # noqa: E731
    with jax.disable_jit():
        found = jax.grad(loss)(X)
    np.testing.assert_allclose(found, jax.grad(loss)(X), rtol=1e-6)


def test_the_temporaries_are_unknown_without_a_derivative() -> None:
    carry = [jax.typeof(jnp.arange(3))]
    types = Inputs([], carry, [], [])
    assert temporary_bytes(lambda inputs: (inputs.carry, []), types, []) is None
