"""The decisions of a plan, in terms of the step without it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from explain_cases import DEEP_ARGS, codes, deep, layer, total

import remat
from remat.units import format_bytes, format_flops


def scanned(weights, x):
    return jnp.mean(jax.lax.scan(lambda c, w: (layer(w, c), None), x, weights)[0] ** 2)


@pytest.fixture(scope="module", params=["unrolled", "scanned", "a marked loss"])
def planned(request):
    """Return a step without and with a plan."""
    loss = deep(lambda f: f) if request.param == "unrolled" else scanned
    if request.param == "a marked loss":
        loss = remat.auto(loss)
    step = jax.value_and_grad(loss)
    fitted = remat.fit(step, budget="60%", cache=False)
    return (
        remat.explain(step, *DEEP_ARGS, compile=False),
        remat.explain(fitted, *DEEP_ARGS, compile=False),
        fitted.plans[0],
    )


def bytes_of(explanation, action):
    return sum(d.n_bytes for d in explanation.decisions if d.action == action)


def test_what_a_plan_recomputes_and_keeps_is_what_the_step_saves_without_it(planned):
    before, after, _ = planned
    assert not before.decisions
    assert bytes_of(after, "keep") == total(after, "saved") > 0
    assert 0 < bytes_of(after, "recompute") <= total(before, "saved")
    assert bytes_of(after, "recompute") >= total(before, "saved") - total(after, "saved")
    for action in ("recompute", "keep"):
        largest = next(d for d in after.decisions if d.action == action)
        assert "test_decisions.py:" in largest.source or "explain_cases.py:" in largest.source


def test_every_rendering_says_what_the_plan_does(planned):
    _, after, plan = planned
    said = f"recomputes {format_bytes(bytes_of(after, 'recompute'))} in the backward pass"
    for text in (after.to_text(), after.to_text(brief=True), after.to_markdown(), after.to_html()):
        text = " ".join(text.split())
        assert "What the plan does" in text and said in text
        assert format_flops(plan.extra_flops) in text
        largest = after.decisions[0]
        assert largest.source.partition(" ")[0] in text
    page = after.to_html()
    assert page.index("What the plan does") < page.index("Memory over the step")


def test_a_planned_loop_has_the_phase_of_its_pass(planned):
    before, after, _ = planned
    forward = [s for s in before.steps if s.phase == "forward" and s.iteration]
    assert len([s for s in after.steps if s.phase == "forward" and s.iteration]) >= len(forward) / 2


def test_a_plan_is_not_blamed_for_its_regions(planned):
    assert not codes(planned[1]) & {"saves_as_much", "region_recomputed_at_once"}


def test_what_a_plan_repeats_between_fences_is_recomputation():
    def loss(w, x):
        for i in range(4):
            x = jax.nn.softmax(x @ w[i]) @ w[i]
        return jnp.sum(x)

    fitted = remat.fit(jax.value_and_grad(loss), budget="60%", cache=False)
    explanation = remat.explain(fitted, *DEEP_ARGS, compile=False)
    began = next(i for i, s in enumerate(explanation.steps) if s.phase == "backward")
    assert not any(s.phase == "forward" for s in explanation.steps[began:])


def test_flops_of_a_planned_step_are_those_of_one_device():
    mesh = jax.sharding.Mesh(jax.devices()[:8], ("data",))
    rows, whole = (jax.sharding.NamedSharding(mesh, jax.P(*axes)) for axes in (["data"], []))
    weights, x = (
        jax.ShapeDtypeStruct(arg.shape, arg.dtype, sharding=sharding)
        for arg, sharding in zip(DEEP_ARGS, (whole, rows))
    )
    step = jax.value_and_grad(deep(lambda f: f))
    before = remat.explain(step, weights, x, compile=False)
    fitted = remat.fit(step, budget="70%", cache=False)
    after = remat.explain(fitted, weights, x, compile=False)
    (plan,) = fitted.plans
    assert plan.extra_flops > 0
    assert after.totals.extra_flops_share == pytest.approx(plan.extra_flops_share)
    without = after.totals.flops - after.totals.recompute_flops
    assert without == pytest.approx(before.totals.flops, rel=0.02)
    assert "on all 8 devices" in plan.explain()


def test_the_path_of_a_recomputed_value_names_each_module_once():
    def scoped(weights, x):
        for i, w in enumerate(weights):
            with jax.named_scope(f"net/block_{i}"):
                x = layer(w, x)
        return jnp.mean(x**2)

    def looped(weights, x):
        def body(x, w):
            with jax.named_scope("net/first"):
                x = layer(w, x)
            with jax.named_scope("net/second"):
                return layer(w, x), None

        return jnp.mean(jax.lax.scan(body, x, weights)[0] ** 2)

    for loss in (scoped, looped):
        fitted = remat.fit(jax.value_and_grad(loss), budget="60%", cache=False)
        found = remat.explain(fitted, *DEEP_ARGS, compile=False)
        assert any(value.kind == "recomputed" for value in found.values)
        for value in found.values:
            assert value.path.count("net/") <= 1, value.path
