"""Plans whose loops were edited by hand are followed as far as they say what is meant."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging

import jax
import jax.numpy as jnp
import pytest

import remat
from planner.region_cases import assert_same, normal
from remat import _jax
from remat.planner.fit import application
from remat.planner.marked.after_edit import loop_results
from remat.planner.marked.decisions import RegionDecision
from remat.planner.marked.regions import Application, LoopForm, Recording, loop_depth
from remat.planner.plan_file import LoopPlan, RegionPlan, SavedValue
from remat.planner.step import Step
from remat.program.targets import target

W, X = normal(8, 16, 16), normal(64, 16)


def stack(w, x):
    def layer(x, w):
        return jnp.tanh(x + jnp.sin(x @ w)), None

    return jax.lax.scan(layer, x, w)[0]


@remat.auto
def loss(w, x):
    for _ in range(2):
        x = jnp.sin(1.5 * jnp.cos(x))
    x = stack(w, x)
    for _ in range(2):
        x = jnp.sin(1.5 * jnp.cos(x))
    return jnp.mean(x**2)


@remat.auto
def two_stacks(w, x):
    x = jnp.sin(stack(w, x @ w[0]))
    return jnp.mean(stack(w, jnp.cos(x)) ** 2)


@remat.auto
def nested(w, x):
    def outer(x, w):
        return jnp.sin(stack(w, jnp.cos(x))), None

    return jnp.mean(jax.lax.scan(outer, x, w.reshape(2, 4, 16, 16))[0] ** 2)


@functools.cache
def planned(f, group=1):
    """A plan by which bodies of loops save nothing, and sines and results of loops are saved."""
    step, forms = Step(jax.value_and_grad(f), (W, X), {}, target(None), {}), {}
    recording, decided, regions = Recording(), {}, []
    program = step.trace(recording).program
    for depth in reversed(range(1 + max(loop_depth(key) for key, _ in recording.records))):
        for (key, mark), record in list(recording.records.items()):
            if loop_depth(key) != depth or key in decided:
                continue
            numbering = record.region.numbering
            saved = () if depth else [n for n, e in enumerate(numbering.equation) if kept(e)]
            decided[key] = {mark: RegionDecision(tuple(saved), (), record.mark)}
            if depth and group > 1:
                forms[key] = LoopForm(group)
            regions.append(
                RegionPlan(
                    key, mark, record.mark, len(numbering.vars), len(record.backward.eqns),
                    tuple(described(numbering, n) for n in saved), (), loop_results(numbering),
                )
            )  # fmt: skip
        recording = Recording(decided, forms)
        step.trace(recording)
    loops = tuple(LoopPlan(key, form.group) for key, form in forms.items())
    return remat.Plan(
        program, "cpu", (), 1, 1, 1, 1, 1.0, 0.0, 0.0, 1.0, 0.0, tuple(regions), loops, (), True
    )


def kept(eqn):
    return eqn.primitive.name in ("sin", "scan")


def described(numbering, n):
    v, eqn = numbering.vars[n], numbering.equation[n]
    size = v.aval.size * v.aval.dtype.itemsize
    source = _jax.source_line_of(eqn)
    return SavedValue(n, v.aval.str_short(short_dtypes=True), size, source, _jax.name_stack_of(eqn))


def edited(made, change):
    """What an editor of the file does: `change` takes its regions and loops."""
    data = json.loads(made.to_json())
    regions = {region["key"]: region for region in data["regions"]}
    loops = {loop["key"]: loop for loop in data["loops"]}
    change(regions, loops)
    data["regions"], data["loops"] = list(regions.values()), list(loops.values())
    return remat.Plan.from_json(json.dumps(data))


def bodies(regions):
    return [key for key in regions if "/scan" in key]


def saves_all(regions, loops):
    for key in bodies(regions):
        numbers = range(regions[key]["n_values"])
        regions[key]["saved"] = [{"number": n, "type": "f32[]", "bytes": 4} for n in numbers]


def whole(regions, loops):
    for key in {key.split(".")[0] for key in bodies(regions)}:
        loops.pop(key, None)


def in_form(**form):
    def change(regions, loops):
        whole(regions, loops)
        for key in {key.split(".")[0] for key in bodies(regions)}:
            loops[key] = {"key": key, "group": 1, "steps": 1, **form}

    return change


EDITS = {
    "saves all": saves_all,
    "whole": whole,
    "groups": in_form(group=2),
    "groups with a rest": in_form(group=3),
    "steps": in_form(steps=2),
}


def traced(f, plan):
    """A step under a plan: its program, and by key the last form of each region with its decision."""
    of_plan, met = application(plan), {}

    class Recorded(Application):
        def decision(self, key, region):
            made = super().decision(key, region)
            met[key] = region, made
            return made

    context = Recorded(
        of_plan.decisions, of_plan.loops, recomputes=of_plan.recomputes, edited=of_plan.edited
    )
    step = Step(jax.value_and_grad(f), (W, X), {}, target(None), {})
    return step.trace(context).jaxpr, met


@pytest.mark.parametrize(
    ("f", "group", "edit"),
    [
        (loss, 1, "saves all"),
        (loss, 1, "groups with a rest"),
        (loss, 1, "steps"),
        (two_stacks, 2, "groups with a rest"),
        (two_stacks, 2, "whole"),
        (nested, 1, "saves all"),
        pytest.param(loss, 3, "groups", marks=pytest.mark.slow),
        pytest.param(two_stacks, 1, "steps", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_an_edited_plan_are_those_of_the_step(f, group, edit):
    plan = edited(planned(f, group), EDITS[edit])
    assert not plan.is_verified
    fitted = remat.fit(jax.value_and_grad(f), plan=plan, cache=False)
    assert_same(fitted(W, X), jax.jit(jax.value_and_grad(f))(W, X), within=1e-5)


def test_what_a_body_saves_is_what_the_loop_hands_on():
    def handed_on(plan):
        jaxpr, _ = traced(loss, plan)
        forward = next(e for e in jaxpr.eqns if e.primitive.name == "scan")
        return [v.aval.str_short(short_dtypes=True) for v in forward.outvars]

    made = planned(loss)
    assert handed_on(made) == ["f32[64,16]", "f32[8,64,16]"]  # the carries alone
    assert handed_on(edited(made, saves_all)).count("f32[8,64,16]") > 1
    assert handed_on(edited(made, in_form(group=2))).count("f32[4,64,16]") == 1


@pytest.mark.parametrize("edit", ["saves all", "groups", "steps"])
def test_values_around_an_edited_loop_are_found_again(edit, caplog):
    made = planned(loss)
    (region,) = (r for r in made.regions if "/scan" not in r.key)
    ((first, count),) = region.loop_results
    outside = [v for v in region.saved if not first <= v.number < first + count]
    assert len(outside) == 6
    with caplog.at_level(logging.WARNING, "remat"):
        _, met = traced(loss, edited(made, EDITS[edit]))
    assert "in 2 of the 2 parts between loops the plan is followed, in 0 everything" in caplog.text
    now, decision = met[region.key]
    ((first, count),) = loop_results(now.numbering)
    equations = [
        now.numbering.equation[n] for n in decision.saved if not first <= n < first + count
    ]
    assert [_jax.source_line_of(eqn) for eqn in equations] == [v.source for v in outside]
    assert [eqn.primitive.name for eqn in equations] == ["sin"] * 6
    assert set(range(first, first + count)) <= set(decision.saved)


def test_where_values_are_not_found_again_all_that_are_needed_are_saved(caplog):
    def change(regions, loops):
        saves_all(regions, loops)
        for region in regions.values():
            region["loop_results"] = []

    plan = edited(planned(loss), change)
    with caplog.at_level(logging.WARNING, "remat"):
        _, met = traced(loss, plan)
    assert caplog.text.count("in 0 of the 2 parts") == 1
    ((region, decision),) = (met[key] for key in met if "/scan" not in key)
    number = region.numbering.number
    assert {number[v] for v in region.residuals if v in number} <= set(decision.saved)


def offloading(made):
    """The plan that keeps what it saves around loops, and the last input, in the host's memory."""
    regions = tuple(
        region
        if "/scan" in region.key
        else dataclasses.replace(
            region,
            saved=tuple(dataclasses.replace(v, offloaded=True) for v in region.saved),
            offloaded_inputs=(SavedValue(1, "f32[64,16]", X.nbytes, offloaded=True),),
        )
        for region in made.regions
    )
    return dataclasses.replace(made, regions=regions)


@pytest.mark.parametrize("edit", ["saves all", "groups"])
def test_what_is_offloaded_around_an_edited_loop_stays_offloaded(edit, caplog):
    made = offloading(planned(loss))
    (region,) = (r for r in made.regions if "/scan" not in r.key)
    plan = edited(made, EDITS[edit])
    with caplog.at_level(logging.WARNING, "remat"):
        _, met = traced(loss, plan)
    now, decision = met[region.key]
    assert decision.offloaded_inputs == (1,)
    assert set(decision.offloaded) <= set(decision.saved)
    equations = [now.numbering.equation[n] for n in decision.offloaded]
    names = [eqn.primitive.name for eqn in equations if eqn.primitive.name != "scan"]
    assert names == ["sin"] * 6
    # Of the loop's results those of the same type stay: groups hand on carries in another one.
    of_loop = [
        now.numbering.vars[n].aval.shape for n in decision.offloaded if n not in outside(now)
    ]
    assert of_loop == ([(64, 16), (8, 64, 16)] if edit == "saves all" else [(64, 16)])
    is_said = "1 values that it keeps in the host's memory are not found again" in caplog.text
    assert is_said == (edit == "groups")
    step = jax.value_and_grad(loss)
    assert_same(remat.fit(step, plan=plan)(W, X), jax.jit(step)(W, X), within=1e-5)


def outside(region):
    spans = (range(first, first + count) for first, count in loop_results(region.numbering))
    return set(range(len(region.numbering.vars))).difference(*spans)


def test_steps_of_one_iteration_do_what_the_loop_or_the_first_step_did():
    made = planned(loss)
    plan = edited(made, saves_all)
    (body,) = bodies({r.key: r for r in made.regions})
    _, met = traced(loss, edited(plan, in_form(steps=2)))
    several = [met[f"{body}.{j}"][1] for j in range(2)]
    assert [d.saved for d in several] == [tuple(range(6))] * 2
    assert [len(d.segments) for d in several] == [1, 1]

    def named_by_step(regions, loops):
        in_form(steps=2)(regions, loops)
        regions[f"{body}.0"] = {**regions.pop(body), "key": f"{body}.0"}
        regions[f"{body}.1"] = {**regions[f"{body}.0"], "key": f"{body}.1", "saved": []}

    apart = edited(plan, named_by_step)
    _, met = traced(loss, apart)
    assert [met[f"{body}.{j}"][1].saved for j in range(2)] == [tuple(range(6)), ()]
    _, met = traced(loss, edited(apart, whole))
    assert met[body][1].saved == tuple(range(6))


# Edits that cannot be followed


def line_of(text, part):
    return text[: text.index(part)].count("\n") + 1


def test_a_body_that_saves_what_there_is_not_is_refused_with_the_line():
    made = planned(nested)
    text = edited(made, saves_all).to_json().replace('{"number": 4', '{"number": 99', 1)
    line = line_of(text, '{"number": 99')
    with pytest.raises(remat.PlanError, match=f"line {line}: there is no value 99: n_values"):
        remat.Plan.from_json(text)

    def change(regions, loops):
        region = regions[bodies(regions)[-1]]
        region["n_values"] = 100
        region["saved"] = [{"number": 99, "type": "f32[]", "bytes": 4}]

    with pytest.raises(remat.PlanError, match="has values 0 to 5; the plan saves or recomputes 99"):
        traced(nested, edited(made, change))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"group": 8}, "has 8 steps; the plan runs it in groups of 8. A group has fewer"),
        ({"group": 3, "groups": 3}, "has 8 steps; the plan has 3 groups of 3"),
        ({"steps": 3}, "has 8 steps; the plan does 3 in each iteration. That must divide 8"),
        ({"steps": 8}, "has 8 steps; the plan does 8 in each iteration. That must divide 8"),
    ],
)
def test_a_loop_that_cannot_run_so_is_refused(form, message):
    plan = edited(planned(loss), in_form(**form))
    with pytest.raises(remat.PlanError, match=message):
        remat.fit(jax.value_and_grad(loss), plan=plan).lower(W, X)


def test_a_loop_or_region_that_the_program_does_not_have_is_refused():
    def loop(regions, loops):
        loops["x"] = {"key": "loss#00000000/scan7", "group": 2, "steps": 1}

    def region(regions, loops):
        regions["x"] = {**next(iter(regions.values())), "key": "lost#00000000"}

    for change, name in ((loop, "loss#00000000/scan7"), (region, "lost#00000000")):
        plan = edited(planned(loss), change)
        with pytest.raises(remat.PlanError, match=f"the plan decides about {name}, which the"):
            remat.fit(jax.value_and_grad(loss), plan=plan).lower(W, X)


def test_a_verified_plan_that_does_not_fit_is_never_adapted():
    made = planned(two_stacks, 2)
    loop_forms = dataclasses.replace(made, loops=())
    assert made.loops and loop_forms.is_verified
    with pytest.raises(
        remat.PlanError, match="differentiated in a way that the plan does not know"
    ):
        traced(two_stacks, loop_forms)
