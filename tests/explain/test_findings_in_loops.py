"""Findings on steps with nested loops, on donation, and on suggested budgets."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from explain_cases import DEEP_ARGS, codes, deep, finding, layer, struct
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

import remat


def scanned(weights, x):
    return jax.lax.scan(lambda c, w: (layer(w, c), None), x, weights)[0].sum()  # the loop


def line_of_the_loop():
    return scanned.__code__.co_firstlineno + 1


def accumulated(weights, batches):
    def micro(sums, x):
        return jax.tree.map(jnp.add, sums, jax.grad(scanned)(weights, x)), None

    return jax.lax.scan(micro, jnp.zeros_like(weights), batches)[0]


def until(weights, x):
    def descend(state):
        i, w = state
        return i + 1, w - 0.1 * jax.grad(scanned)(w, x)

    return jax.lax.while_loop(lambda state: state[0] < 5, descend, (0, weights))[1]


def in_branch(weights, x):
    return jax.lax.cond(x[0, 0] > 0, lambda: jax.grad(scanned)(weights, x), lambda: weights)


def in_shards(weights, x):
    def each(w, x):
        return jax.lax.psum(jax.grad(scanned)(w, x), "i")

    mesh = AbstractMesh((1,), ("i",), axis_types=(AxisType.Auto,))
    shards = jax.shard_map(each, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check_vma=False)
    return shards(weights, x)


@pytest.mark.parametrize("step", [accumulated, until, in_branch, in_shards])
def test_a_loop_inside_of_another_one_is_named(step):
    weights, x = DEEP_ARGS
    args = (weights, struct(4, *x.shape)) if step is accumulated else DEEP_ARGS
    explanation = remat.explain(step, *args, compile=False)
    found = finding(explanation, "no_regions")
    assert f"{__name__}.py:{line_of_the_loop()} (scanned)" in found.next_step
    assert "a remat.scan, or wrap its body" in found.next_step


def test_the_costs_of_a_loop_with_both_passes_in_it_are_those_of_its_forward_pass():
    batches = struct(4, *DEEP_ARGS[1].shape)
    explanation = remat.explain(accumulated, DEEP_ARGS[0], batches, compile=False)
    by_hand = finding(explanation, "no_regions").options[-1]
    assert by_hand.label == "by hand"
    assert 0.2 <= by_hand.most_extra_flops_share <= 0.5


def test_arguments_that_are_replaced_and_not_donated_are_named_though_they_do_not_dominate():
    def step(params, average, x):
        gradients = jax.grad(deep(lambda f: f))(params, x)
        average = jax.tree.map(lambda m, g: 0.9 * m + g, average, gradients)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, average), average

    layers = [struct(256, 256)] * 8
    args = (layers, layers, struct(2048, 256))
    found = finding(remat.explain(step, *args, compile=False), "arguments_not_donated")
    assert "4.0 MiB are there twice" in found.message
    assert "Donate params, average (donate_argnums)" in found.next_step
    donated = remat.explain(jax.jit(step, donate_argnums=(0, 1)), *args, compile=False)
    assert "arguments_not_donated" not in codes(donated)


def test_gradients_and_sums_of_them_do_not_replace_the_parameters():
    args = (struct(8, 256, 256), struct(2048, 256))
    gradient = jax.value_and_grad(deep(lambda f: f))
    assert "arguments_not_donated" not in codes(remat.explain(gradient, *args, compile=False))
    batches = struct(4, 2048, 256)
    sums = remat.explain(accumulated, args[0], batches, compile=False)
    assert "arguments_not_donated" not in codes(sums)
    descended = remat.explain(until, *args, compile=False)
    assert "Donate weights" in finding(descended, "arguments_not_donated").next_step


def test_the_budget_suggested_after_a_plan_is_one_that_a_plan_fits():
    def loss(weights, x):
        for i in range(8):
            x = jnp.sin(jnp.sin(x @ weights[i]))
        return x.sum()

    args = (struct(8, 256, 256), struct(2048, 256))
    step = jax.value_and_grad(loss)
    fitted = remat.fit(step, budget="90%", cache=False)
    found = finding(remat.explain(fitted, *args, compile=False), "follows_plan")
    assert "For a lower peak" in found.next_step
    budget = re.search(r'budget="([^"]+)"', found.next_step)[1]
    plan = remat.plan(step, *args, budget=budget, cache=False)
    assert plan.peak_bytes < fitted.plans[0].peak_bytes


def test_a_backward_loop_is_on_the_timeline_though_the_update_writes_in_its_place():
    def step(weights, x):
        return weights - 0.1 * jax.grad(scanned)(weights, x)

    explanation = remat.explain(step, struct(8, 256, 256), struct(2048, 256))
    assert any(s.phase == "backward" and s.iteration for s in explanation.steps)
    assert "no_gradient" not in codes(explanation)
    totals = explanation.totals
    assert totals.predicted.peak_bytes == pytest.approx(totals.compiled.peak_bytes, rel=0.05)
