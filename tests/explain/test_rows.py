"""Arrays into which loops write rows: their memory, their names, and the plans that use them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from explain_cases import finding, struct

import remat

N, D = 24, 32
WEIGHTS, XS = struct(D, D), struct(N, 64, D)


def cell(w, h, x):
    return jnp.tanh(jnp.sin(h @ w) + x)  # the cell


def recurrent(w, xs):
    def step(h, x):
        h = cell(w, h, x)
        return h, h

    zero = jnp.zeros_like(xs[0])
    return jnp.mean(jax.lax.scan(step, zero, jax.lax.scan(step, zero, xs)[1])[1] ** 2)


NUMBERS = struct(N, 64, D, dtype=jnp.int32)  # not differentiated


def filled(xs):
    """Write the rows of an array with two loops in turn."""

    def write(i, ys):
        return ys.at[i].set(jnp.sin(xs[i].astype(jnp.float32)))

    ys = jax.lax.fori_loop(0, N // 2, write, jnp.zeros((N, 64, D)))
    return jnp.sort(jax.lax.fori_loop(N // 2, N, write, ys), 0)


def test_an_array_that_loops_fill_in_turn_is_in_memory_once():
    explanation = remat.explain(filled, NUMBERS)
    array = N * 64 * D * 4
    memory = explanation.totals.predicted
    assert array <= memory.temp_bytes < 1.5 * array
    assert explanation.totals.compiled.temp_bytes < 1.5 * array


def test_rows_that_loops_write_are_named_for_what_they_are():
    explanation = remat.explain(filled, NUMBERS, compile=False)
    written = [v for v in explanation.values if v.primitive == "sin" and v.count > 1]
    assert sum(v.count for v in written) == N
    assert {v.aval for v in written} == {f"f32[64,{D}]"}
    assert not any(v.primitive in ("scatter", "dynamic_update_slice") for v in explanation.values)


@pytest.fixture(scope="module")
def fitted():
    step = remat.fit(jax.value_and_grad(recurrent), budget="55%", cache=False)
    return remat.explain(step, WEIGHTS, XS)


def test_the_loops_of_a_plan_are_described_with_all_of_their_iterations(fitted):
    assert len(fitted.plan.loops) >= 1
    for loop in fitted.plan.loops:
        assert (loop.label, loop.length) == ("step", N)
        assert loop.source.endswith(f"test_rows.py:{recurrent.__code__.co_firstlineno + 6}")
        assert [p.first for p in loop.parts] == [1, *(p.last + 1 for p in loop.parts[:-1])]
        assert loop.parts[-1].last == N
    assert any(p.group for loop in fitted.plan.loops for p in loop.parts) or fitted.decisions


def test_decisions_count_arrays_and_not_blocks_of_iterations(fitted):
    without = remat.explain(jax.value_and_grad(recurrent), WEIGHTS, XS, compile=False)

    def arrays(values, primitive):
        return sum(v.count for v in values if v.kind == "saved" and v.primitive == primitive)

    for primitive in ("tanh", "cos"):
        kept = arrays(fitted.values, primitive)
        again = sum(
            d.count
            for d in fitted.decisions
            if d.action == "recompute" and d.value.endswith(primitive)
        )
        assert again == arrays(without.values, primitive) - kept


def test_no_source_of_a_plan_is_a_file_of_the_library(fitted):
    for item in (*fitted.values, *fitted.steps, *fitted.decisions):
        assert "remat/planner" not in item.source


def test_recomputation_in_backward_loops_is_a_phase_and_its_time_that_of_the_totals(fitted):
    again = [s.time_s * s.recompute_share for s in fitted.steps]
    assert sum(again) == pytest.approx(fitted.totals.recompute_time_s)
    backward = {s.phase for s in fitted.steps if s.iteration}
    assert "recompute" in backward
    plain = remat.explain(recurrent, WEIGHTS, XS, compile=False)
    assert not any(s.phase == "recompute" for s in plain.steps)


def test_a_plan_is_compared_with_other_budgets(fitted):
    labels = [option.label for option in finding(fitted, "follows_plan").options]
    assert labels[0] == "without a plan" and "this plan" in labels
    peaks = [option.peak_bytes for option in finding(fitted, "follows_plan").options]
    assert peaks == sorted(peaks, reverse=True)


def test_jitted_functions_of_jax_keep_their_lines_in_a_planned_step():
    def loss(w, x):
        for _ in range(6):
            x = jnp.tanh(jnp.sin(x @ w))
        return -jax.nn.log_softmax(x)[:, 0].mean()  # the line

    step = remat.fit(jax.value_and_grad(loss), budget="70%", cache=False)
    explanation = remat.explain(step, WEIGHTS, struct(4096, D), compile=False)
    line = f"test_rows.py:{loss.__code__.co_firstlineno + 3} "
    found = [s for s in explanation.steps if s.label.rpartition(": ")[2] == "exp"]
    assert found and all(line in s.source for s in found)


def test_constants_that_a_loop_fills_are_in_its_result_and_not_values_of_their_own():
    explanation = remat.explain(filled, NUMBERS, compile=False)
    (zeros,) = [v for v in explanation.values if v.primitive == "broadcast_in_dim"]
    assert (zeros.lifetimes, zeros.held_in) == ((), "in the memory of a loop's result")
