"""Marked functions: a plan recomputes only inside of them, wherever they are called."""

from __future__ import annotations

import collections
import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import remat
from planner.region_cases import assert_same, normal
from remat import _jax
from remat.cache import Cache
from remat.ir import jaxprs
from remat.ir.equations import is_repeatable
from remat.ir.restriction import has_marks
from remat.planner.rewrite import flattened
from remat.planner.step import TargetStep
from remat.program.targets import target

ALONE = {"cache": False, "progress": False}
WIDTH, ROWS, DEPTH = 64, 512, 4


def inner(w, x):
    return x + jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])


def outer(w, x):
    return x + jnp.sin(jnp.sin(x @ w[2]) @ w[3])


def arguments(rows=ROWS):
    return 0.1 * normal(DEPTH, 4, WIDTH, WIDTH), normal(rows, WIDTH)


def unrolled(of_inner, ws, x):
    for w in ws:
        x = outer(w, of_inner(w, x))
    return jnp.mean(x**2)


def scanned(of_inner, ws, x):
    def layer(x, w):
        return outer(w, of_inner(w, x)), None

    return jnp.mean(jax.lax.scan(layer, x, ws)[0] ** 2)


def mapped_by_vmap(of_inner, ws, x):
    return jax.vmap(lambda x: unrolled(of_inner, ws, x[None]))(x).mean()


def jitted_inside(of_inner, ws, x):
    return unrolled(jax.jit(of_inner), ws, x)


def sharded(of_inner, ws, x):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    def of_shard(ws, x):
        return jax.lax.pmean(unrolled(of_inner, ws, x), "data")

    return jax.shard_map(of_shard, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(ws, x)


def branched(of_inner, ws, x):
    return unrolled(lambda w, x: jax.lax.cond(x[0, 0] > 9, lambda _, x: x, of_inner, w, x), ws, x)


def checkpointed(of_inner, ws, x):
    """Return a step with the user's own checkpoints around functions that are not marked."""
    for w in ws:
        x = jax.checkpoint(outer)(w, of_inner(w, x))
    return jnp.mean(x**2)


MODELS = {
    f.__name__: f
    for f in (unrolled, scanned, mapped_by_vmap, jitted_inside, sharded, branched, checkpointed)
}


def flat(step, *args):
    return flattened(TargetStep(step, args, {}, target(None), {}).trace().jaxpr)


def counts(jaxpr):
    """Return how often a program computes each primitive."""
    found = collections.Counter()
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        found[eqn.primitive.name] += 1
        for body in jaxprs.bodies_of(eqn):
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            found.update({name: times * n for name, n in counts(body).items()})
    return found


def within_reach(step, args):
    """Return the plan within the smallest of a few budgets for which there is one."""
    found = None
    for share in (80, 65):
        try:
            made = remat.plan(step, *args, budget=f"{share}%", **ALONE)
        except remat.BudgetError:
            break
        found = made if made.whole_step is not None else found
    return found


@pytest.mark.parametrize("name", MODELS)
def test_only_marked_functions_are_recomputed(name):
    args = arguments()
    step = jax.value_and_grad(lambda ws, x: MODELS[name](remat.auto(inner), ws, x), (0, 1))
    marked = flat(step, *args)
    whole = flat(jax.value_and_grad(lambda *a: MODELS[name](inner, *a)), *args)
    assert has_marks(marked) and not has_marks(whole)
    names = {"tanh": True, "sin": False, "cos": False}
    for eqn in jaxprs.equations(marked):
        assert names.get(eqn.primitive.name, is_repeatable(eqn)) == is_repeatable(eqn)
    assert all(is_repeatable(e) for e in jaxprs.equations(whole) if e.primitive.name in names)


@pytest.mark.parametrize(
    "name",
    [
        "unrolled",
        "scanned",
        pytest.param("jitted_inside", marks=pytest.mark.slow),
        pytest.param("mapped_by_vmap", marks=pytest.mark.slow),
    ],
)
def test_plans_recompute_nothing_outside_of_marked_functions(name):
    args = arguments()
    step = jax.value_and_grad(lambda ws, x: MODELS[name](remat.auto(inner), ws, x), (0, 1))
    plain = jax.jit(step)
    made = within_reach(step, args)
    assert made is not None and made.extra_flops > 0
    fitted = remat.fit(step, plan=made, **ALONE)
    assert_same(fitted(*args), plain(*args))
    before, after = counts(plain.trace(*args).jaxpr), counts(fitted.trace(*args).jaxpr)
    assert after["tanh"] > before["tanh"]
    assert after["sin"] == before["sin"] and after["cos"] == before["cos"]


def test_a_step_that_is_marked_whole_has_the_plan_of_the_unmarked_one():
    args = arguments()
    for model in (unrolled, scanned):
        loss = lambda ws, x, model=model: model(inner, ws, x)  # noqa: E731
        for budget in ("60%",):
            free, marked = (
                remat.plan(jax.value_and_grad(f), *args, budget=budget, **ALONE)
                for f in (loss, remat.auto(loss))
            )
            assert marked.whole_step.loops == free.whole_step.loops
            assert marked.extra_flops <= 1.02 * free.extra_flops
            assert marked.marked and not free.marked


def test_marks_are_seen_through_second_derivatives_and_rules():
    @jax.custom_vjp
    def scaled(x):
        return 2 * jnp.tanh(x)

    scaled.defvjp(lambda x: (scaled(x), x), lambda x, g: (2 * g / jnp.cosh(x) ** 2,))
    loss = lambda w, x: jnp.sum(jnp.sin(remat.auto(scaled)(x @ w)))  # noqa: E731
    step = jax.grad(lambda w, x: jnp.sum(jax.grad(loss, 1)(w, x) ** 2))
    of_inner = jax.grad(lambda w, x: jnp.sum(remat.auto(inner)(w, x)), 1)
    ws, x = arguments()
    twice = flat(jax.grad(lambda w, x: jnp.sum(of_inner(w, x) ** 2)), ws[0], x)
    for jaxpr in (flat(jax.value_and_grad(loss), normal(8, 8), normal(16, 8)), twice):
        inside = [e for e in jaxprs.equations(jaxpr) if e.primitive.name in ("tanh", "cosh")]
        assert inside and all(map(is_repeatable, inside))
    small = normal(8, 8), normal(16, 8)
    assert_same(jax.jit(step)(*small), step(*small), within=1e-4)


def test_checkpoints_and_loops_outside_of_marks_stay_as_they_are():
    def loss(ws, x):
        def layer(x, w):
            return jax.checkpoint(outer)(w, x), None

        x = jax.lax.scan(layer, x, ws)[0]
        return jnp.mean(remat.auto(inner)(ws[0], x) ** 2)

    args = arguments()
    step = jax.value_and_grad(loss)
    made = remat.plan(step, *args, budget="100%", **ALONE)
    assert made.whole_step is None and made.marked
    with pytest.raises(remat.BudgetError, match=r"Only what is inside of inner \(remat\.auto\)"):
        remat.plan(step, *args, budget="40%", **ALONE)


def test_checkpoints_that_contain_only_a_marked_function_are_left_to_the_planner():
    def loss(of_inner, ws, x):
        for w in ws:
            x = jax.checkpoint(of_inner)(w, x)
        return jnp.mean(x**2)

    args = arguments()
    step = jax.value_and_grad(lambda ws, x: loss(remat.auto(inner), ws, x))
    fitted = remat.fit(step, budget="1GiB", **ALONE)
    written, planned = counts(jax.jit(step).trace(*args).jaxpr), counts(fitted.trace(*args).jaxpr)
    assert planned["tanh"] < written["tanh"]
    assert_same(fitted(*args), jax.jit(step)(*args))


def test_marks_change_no_names_and_nothing_outside_of_planning(caplog):
    ws, x = arguments()
    loss = lambda ws, x: unrolled(remat.auto(inner, name="mine"), ws, x)  # noqa: E731
    plain = lambda ws, x: unrolled(inner, ws, x)  # noqa: E731
    texts = [str(jax.make_jaxpr(jax.grad(f))(ws, x)) for f in (loss, plain)]
    assert texts[0] == texts[1]
    step = jax.value_and_grad(loss)
    made = within_reach(step, (ws, x))
    assert made.marked == ("mine",)
    assert "only inside of mine (remat.auto)" in made.explain()
    with caplog.at_level(logging.DEBUG, "remat"):
        lowered = remat.fit(step, plan=made, **ALONE).lower(ws, x)
    text = lowered.as_text(debug_info=True) + made.to_json() + caplog.text
    assert "<remat." not in text
    assert "<remat." not in str(remat.explain(step, ws, x))
    for eqn in jaxprs.equations(flat(step, ws, x)):
        assert "remat" not in _jax.name_stack_of(eqn)


def test_plans_do_not_depend_on_what_was_planned_before(tmp_path):
    args = arguments()
    step = jax.value_and_grad(lambda ws, x: unrolled(remat.auto(inner), ws, x))
    alone = {b: remat.plan(step, *args, budget=b, **ALONE).to_json() for b in ("90%", "80%")}
    for i, order in enumerate((("90%", "80%"), ("80%", "90%"))):
        cache = Cache(tmp_path / str(i))
        for budget in (*order, *order):
            found = remat.plan(step, *args, budget=budget, cache=cache, progress=False)
            assert found.to_json() == alone[budget]


def test_moving_a_mark_is_another_question(tmp_path):
    args, cache = arguments(), Cache(tmp_path)
    first, second = (
        jax.value_and_grad(lambda ws, x, f=f: jnp.mean(f(ws, x)))
        for f in (
            lambda ws, x: outer(ws[1], remat.auto(inner)(ws[0], x)),
            lambda ws, x: remat.auto(outer)(ws[1], inner(ws[0], x)),
        )
    )
    made = [
        remat.plan(f, *args, budget="100%", cache=cache, progress=False) for f in (first, second)
    ]
    assert made[0].program != made[1].program
    with pytest.raises(remat.PlanError, match=r"what is marked by remat\.auto has changed"):
        remat.fit(second, plan=made[0], **ALONE).lower(*args)


def test_edits_that_recompute_outside_of_marks_are_refused():
    args = arguments()
    step = jax.value_and_grad(lambda ws, x: unrolled(remat.auto(inner), ws, x))
    made = within_reach(step, args)
    jaxpr = flat(step, *args)
    number = next(i for i, e in enumerate(jaxpr.eqns) if e.primitive.name == "sin")
    last = made.whole_step.recomputations[-1]
    wrong = dataclasses.replace(last, again=(number, *last.again))
    whole = dataclasses.replace(
        made.whole_step,
        recomputations=(*made.whole_step.recomputations[:-1], wrong),
        stored=tuple(sorted({*made.whole_step.stored, number})),
    )
    edited = dataclasses.replace(made, whole_step=whole, peak_bytes=None, is_verified=False)
    with pytest.raises(remat.PlanError, match=r"equation \d+ .*sin.*outside of the functions"):
        remat.fit(step, plan=edited, **ALONE).lower(*args)
