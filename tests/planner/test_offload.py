"""Plans that keep values in the host's memory: applied by hand on CPU, chosen ahead of time for TPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import pytest

import remat
from planner.region_cases import assert_same, normal
from remat.cache import Cache
from remat.errors import BudgetError, PlanError
from remat.planner.marked.after_edit import loop_results
from remat.planner.marked.decisions import RegionDecision
from remat.planner.marked.emit import save_everything
from remat.planner.marked.regions import Application, Recording, loop_depth
from remat.planner.plan_file import RegionPlan, SavedValue
from remat.planner.step import Step
from remat.program.from_jaxpr import n_bytes, type_text
from remat.program.targets import target

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="no libtpu")
ALONE = {"cache": False, "progress": False}


@remat.auto
def unrolled(weights, x):
    for w in weights:
        x = jnp.sin(jnp.sin(x @ w))
    return jnp.mean(x**2)


def saving_everything():
    """A step, its arguments, and a plan that nobody compiled."""
    args = [normal(16, 16, seed=i) for i in range(6)], normal(64, 16)
    step = jax.value_and_grad(unrolled)
    return step, args, plan_of(step, args)


def plan_of(step, args):
    recording = Recording()
    program = Step(step, args, {}, target(None), {}).trace(recording).program
    regions = []
    for record in recording.records.values():
        values = record.region.numbering.vars
        saved = tuple(
            SavedValue(n, type_text(values[n].aval), n_bytes(values[n].aval))
            for n in save_everything(record.region).saved
        )
        counts = len(values), len(record.backward.eqns)
        results = loop_results(record.region.numbering)
        regions.append(RegionPlan(*record.region_id, record.mark, *counts, saved, (), results))
    figures = 0, None, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0
    return remat.Plan(program, "cpu", (), *figures, tuple(regions), (), (), False)


def edited(plan, change):
    data = json.loads(plan.to_json())
    for region in data["regions"]:
        change(region)
    return remat.Plan.from_json(json.dumps(data))


def copies(fitted, args):
    """How many values a step copies to the host, and back."""
    jaxpr = str(fitted.trace(*args).jaxpr)
    return jaxpr.count("devices=(MemorySpace.Host,"), jaxpr.count("devices=(MemorySpace.Device,")


def test_values_marked_as_offloaded_by_hand_are_copied_to_the_host_and_back():
    step, args, plan = saving_everything()
    (region,) = plan.regions
    assert len(region.saved) > 1 and not region.offloaded_bytes

    def offload_first(region):
        region["saved"][0]["offloaded"] = True
        region["offloaded_inputs"] = [{**region["saved"][0], "number": len(args[0])}]

    by_hand = edited(plan, offload_first)
    assert remat.Plan.from_json(by_hand.to_json()) == by_hand
    fitted = remat.fit(step, plan=by_hand)
    to_host, to_device = copies(fitted, args)
    assert to_host == 2 <= to_device
    assert copies(remat.fit(step, plan=plan), args) == (0, 0)
    assert_same(fitted(*args), jax.jit(step)(*args))


def test_an_offloaded_value_is_explained_as_that():
    step, args, plan = saving_everything()

    def offload_all(region):
        for value in region["saved"]:
            value["offloaded"] = True

    explained = remat.explain(remat.fit(step, plan=edited(plan, offload_all)), *args)
    text = json.dumps(json.loads(explained.to_json()))
    assert "offloaded" in text
    assert "offloaded" in str(explained)


def test_inputs_and_values_that_a_region_does_not_have_cannot_be_offloaded():
    step, args, plan = saving_everything()
    (region,) = plan.regions
    beyond = dataclasses.replace(
        region, offloaded_inputs=(SavedValue(99, "f32", 4, offloaded=True),)
    )
    with pytest.raises(PlanError, match="the plan offloads input 99"):
        remat.fit(step, plan=dataclasses.replace(plan, regions=(beyond,)))(*args)


def test_random_keys_cannot_be_offloaded():
    @remat.auto
    def noisy(key, x):
        key = jax.random.fold_in(key, 1)
        return jnp.sum(jnp.sin(x * jax.random.normal(key, x.shape)) ** 2)

    step = jax.value_and_grad(noisy, 1)
    args = jax.random.key(0), normal(64, 64)
    plan = plan_of(step, args)
    (region,) = plan.regions
    key = SavedValue(0, "key<fry>[]", 8, offloaded=True)
    with_key = dataclasses.replace(region, offloaded_inputs=(key,))
    with pytest.raises(PlanError, match="cannot be kept in the host's memory"):
        remat.fit(step, plan=dataclasses.replace(plan, regions=(with_key,)))(*args)


def test_nothing_is_offloaded_where_the_host_memory_is_the_device_memory():
    @remat.auto
    def loss(weights, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    step, args = jax.value_and_grad(loss), (normal(6, 64, 64), normal(2048, 64))
    plan = remat.plan(step, *args, budget="75%", offload=True, **ALONE)
    assert plan.host_bytes == plan.transfer_seconds == 0
    assert not any(region.offloaded_bytes for region in plan.regions)


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


@needs_libtpu
def test_the_inputs_of_a_loop_s_steps_leave_the_device():
    length, width, rows = 8, 256, 2**14
    fun, args = of_tpu(length, width, rows)
    step = Step(fun, args, {}, target("tpu:v5e:1x1"), {})
    recording = Recording()
    step.trace(recording)
    (body,) = (r for r in recording.records.values() if loop_depth(r.key))
    carry = next(
        i for i, v in enumerate(body.region.forward.invars) if v.aval.shape == (rows, width)
    )

    def memory(offloaded_inputs):
        """Of the step in which the loop saves nothing but its steps' inputs."""
        decision = RegionDecision((), (), body.mark, offloaded_inputs=offloaded_inputs)
        decided = {body.key: {body.region.fingerprint: decision}}
        outer = Recording(decided)
        step.trace(outer)
        for record in outer.records.values():
            if not loop_depth(record.key):
                decided[record.key] = {record.region.fingerprint: save_everything(record.region)}
        return step.trace(Application(decided)).memory()

    on_device, on_host = memory(()), memory((carry,))
    carries = length * rows * width * 2
    assert (on_device.host_bytes, on_host.host_bytes) == (0, carries)
    assert on_host.peak_bytes < on_device.peak_bytes - 0.7 * carries


def unmarked(length=8, width=512, rows=2**15):
    """A step with nothing marked, for one v5e, and its options."""

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
    (loop,) = plan.whole_step.loops
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
    # The compiler puts on the host what the plan says.
    (steps,) = [loop.steps for loop in plan.loops] or [1]
    kept = [v for region in plan.regions for v in (*region.saved, *region.offloaded_inputs)]
    assert plan.host_bytes == sum(16 // steps * v.bytes for v in kept if v.offloaded) > 0
    assert remat.Plan.from_json(plan.to_json()) == plan
    # The cache knows the two apart.
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
