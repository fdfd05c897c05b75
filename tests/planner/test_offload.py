"""Plans that keep values in the host's memory, chosen ahead of time for TPU."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import pytest

import remat
from planner.region_cases import normal
from remat.cache import Cache
from remat.errors import BudgetError

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="no libtpu")
ALONE = {"cache": False, "progress": False}


def test_nothing_is_offloaded_where_the_host_memory_is_the_device_memory():
    @remat.auto
    def loss(weights, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    step, args = jax.value_and_grad(loss), (normal(6, 64, 64), normal(2048, 64))
    plan = remat.plan(step, *args, budget="75%", offload=True, **ALONE)
    assert plan.host_bytes == plan.transfer_seconds == 0
    assert not any(loop.offloaded for _, loop in plan.whole_step.loops)


# TPU, ahead of time


@remat.auto
def scanned(weights, x):
    def layer(x, ws):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x, None

    return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32))


def of_tpu(length, width, rows):
    def struct(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    weights = tuple(struct(length, width, width) for _ in range(4))
    return jax.value_and_grad(scanned), (weights, struct(rows, width))


def unmarked(length=8, width=512, rows=2**15):
    """Return a step with nothing marked, for one v5e, and its options."""

    def loss(weights, x):
        def layer(x, w):
            return jnp.tanh(jnp.sin(x @ w) @ w) @ w, None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32))

    args = tuple(
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((length, width, width), (rows, width))
    )
    return jax.value_and_grad(loss), args, {"target": "tpu:v5e:1x1", "verify": "fast", **ALONE}


@needs_libtpu
def test_a_step_with_nothing_marked_keeps_on_the_host_what_its_plan_says(caplog):
    step, args, options = unmarked()
    plan = remat.plan(step, *args, budget="20%", **options)
    assert plan.transfer_seconds > 0.1 * plan.seconds
    assert "copies to the host and back are predicted to make the step" in caplog.text
    assert plan.is_verified and plan.peak_bytes <= plan.budget_bytes
    ((_, loop),) = plan.whole_step.loops
    assert plan.host_bytes == loop.host_bytes > 0
    assert plan.transfer_seconds == loop.transfer_seconds > 0
    assert "in the host's memory" in plan.explain()
    assert remat.Plan.from_json(plan.to_json()) == plan
    with pytest.raises(BudgetError, match="allow offload=True"):
        remat.plan(step, *args, budget="20%", offload=False, **options)


@needs_libtpu
def test_a_step_with_nothing_marked_keeps_to_its_host_budget():
    step, args, options = unmarked()
    limit = 3 * args[1].size * 2
    plan = remat.plan(step, *args, budget="30%", host_budget=limit, **options)
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.host_bytes <= limit


@needs_libtpu
@pytest.mark.slow
def test_offloading_meets_a_budget_with_fewer_operations(tmp_path):
    step, args = of_tpu(length=16, width=4096, rows=2**15)
    options = {"target": "tpu:v5p:1x1x1", "cache": Cache(tmp_path), "progress": False}
    budget = 11 * 2**30
    plan = remat.plan(step, *args, budget=budget, **options)
    assert plan.is_verified and plan.peak_bytes <= budget
    # The compiler allocates on the host what the plan offloads.
    assert plan.host_bytes == sum(loop.host_bytes for _, loop in plan.whole_step.loops) > 0
    assert remat.Plan.from_json(plan.to_json()) == plan
    # The cache distinguishes the two.
    without = remat.plan(step, *args, budget=budget, offload=False, **options)
    assert without.host_bytes == 0
    assert without.extra_flops > 1.3 * plan.extra_flops
    assert remat.plan(step, *args, budget=budget, **options) == plan


@needs_libtpu
@pytest.mark.slow
def test_a_budget_that_only_offloading_meets_is_refused_without_it_with_that_advice():
    step, args = of_tpu(length=16, width=4096, rows=2**15)
    options = {"target": "tpu:v5p:1x1x1", **ALONE}
    assert remat.plan(step, *args, budget="8.8GiB", **options).host_bytes
    with pytest.raises(BudgetError, match="allow offload=True"):
        remat.plan(step, *args, budget="8.8GiB", offload=False, **options)
