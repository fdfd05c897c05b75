"""Findings, each on a program with its cause."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import jaxlib
import pytest
from explain_cases import DEEP_ARGS, codes, deep, finding, layer, struct

import remat
from remat.program.compiled import OutOfMemory
from remat.units import format_bytes

BARRIER_HOLDS = tuple(int(x) for x in jaxlib.__version__.split(".")[:3]) >= (0, 11, 1)


def test_checkpointed_loops_are_named_as_what_they_are():
    def loss(w, x):
        return remat.scan(lambda c, v: (layer(v, c), None), x, w, checkpoints=3)[0].sum()

    explanation = remat.explain(loss, *DEEP_ARGS, compile=False)
    found = finding(explanation, "checkpointed_loop")
    assert "test_findings.py" in found.message
    assert "no_regions" not in codes(explanation)
    assert not any("remat/loops/" in step.source for step in explanation.steps)


def test_a_policy_that_saves_as_much_as_it_spares_is_named():
    for wrap in (jax.checkpoint, remat.checkpoint):
        dots = functools.partial(wrap, policy=jax.checkpoint_policies.dots_saveable)
        explanation = remat.explain(deep(dots), *DEEP_ARGS, compile=False)
        step = finding(explanation, "saves_as_much").next_step
        assert "Save less" in step and "remat.auto" not in step
        assert "region_recomputed_at_once" not in codes(explanation)


def test_no_gradient_and_no_regions_are_said():
    assert codes(remat.explain(lambda n: n + 1, struct(dtype=jnp.int32))) == {"no_gradient"}
    explanation = remat.explain(deep(lambda f: f), *DEEP_ARGS, compile=False)
    assert codes(explanation) == {"no_regions"}
    found = finding(explanation, "no_regions")
    peak = explanation.totals.predicted.peak_bytes
    share = int(re.search(r'budget="(\d+)%"', found.next_step)[1])
    assert 50 <= share <= 90
    as_written, fitted, by_hand = found.options
    assert (as_written.peak_bytes, as_written.code) == (peak, "")
    assert (fitted.peak_bytes, fitted.precision) == (share * peak // 100, "at most")
    assert fitted.code == f'step = remat.fit(jax.value_and_grad(loss), budget="{share}%")'
    assert by_hand.peak_bytes < fitted.peak_bytes
    assert fitted.most_extra_flops_share < by_hand.most_extra_flops_share


def test_a_marked_loss_is_not_told_to_be_marked():
    marked = remat.auto(deep(lambda f: f), name="marked_loss")
    for step in (marked, jax.value_and_grad(marked)):
        found = finding(remat.explain(step, *DEEP_ARGS, compile=False), "no_regions")
        assert "marked_loss is marked by remat.auto" in found.message
        assert "mark" not in found.next_step


def test_a_fitted_step_is_explained_with_the_costs_of_its_plan_and_what_can_be_done_next():
    step = remat.fit(jax.value_and_grad(deep(lambda f: f, 4)), budget="70%", cache=False)
    explanation = remat.explain(step, *DEEP_ARGS, compile=False)
    plan = step.plans[0]
    found = finding(explanation, "follows_plan")
    assert format_bytes(plan.peak_bytes) in found.message
    assert found.next_step
    assert "no_regions" not in codes(explanation)
    totals = explanation.totals
    assert (totals.recompute_flops, totals.recompute_time_s) == (
        plan.extra_flops,
        plan.extra_seconds,
    )
    assert totals.flops == plan.flops + plan.extra_flops
    assert totals.time_s == pytest.approx(sum(s.time_s for s in explanation.steps))


def test_a_fitted_loss_is_said_to_compute_no_gradient():
    loss = remat.fit(deep(lambda f: f, 2), budget="1GiB", cache=False)
    found = finding(remat.explain(loss, *DEEP_ARGS, compile=False), "fitted_without_gradient")
    assert "value_and_grad" in found.next_step


def test_arguments_that_may_be_donated_are_named_with_their_bytes():
    def step(params, x):
        gradient = jax.grad(deep(remat.checkpoint))(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    args = ([struct(512, 512)] * 8, struct(16, 512))
    moments = [struct(512, 512)] * 8

    def with_moments(params, moments, x):
        new = step(params, x)
        return new, jax.tree.map(lambda m, p: 0.9 * m + p, moments, new)

    with_args = args[0], moments, args[1]
    found = finding(remat.explain(with_moments, *with_args, compile=False), "arguments_dominate")
    assert "Donate params, moments" in found.next_step
    assert "16.0 MiB less" in found.next_step
    jitted = jax.jit(with_moments, donate_argnums=(0, 1))
    donated = remat.explain(jitted, *with_args, compile=False)
    assert not any("Donate" in f.next_step for f in donated.findings)


def test_a_checkpointed_scan_is_not_blamed_for_large_arguments():
    def loss(weights, x):
        return jax.lax.scan(remat.checkpoint(lambda c, w: (layer(w, c), None)), x, weights)[0].sum()

    def severity(n_rows):
        args = struct(8, 512, 512), struct(n_rows, 512)
        explanation = remat.explain(jax.value_and_grad(loss), *args, compile=False)
        return finding(explanation, "arguments_dominate").severity

    assert severity(64) == "info"


def test_what_the_compiler_undoes_is_named():
    if BARRIER_HOLDS:
        wrap, step = functools.partial(jax.checkpoint, prevent_cse=False), "prevent_cse=False"
    else:
        wrap, step = jax.checkpoint, "remat.checkpoint"
    explanation = remat.explain(deep(wrap), *DEEP_ARGS)
    found = finding(explanation, "undone_by_compiler")
    assert found.severity == "error"
    assert step in found.next_step
    assert "undone_by_compiler" not in codes(remat.explain(deep(remat.checkpoint), *DEEP_ARGS))

    def in_part(w, x):
        half = x * deep(wrap, 4)(w, x)
        return deep(remat.checkpoint, 4)(w, half)

    found = finding(remat.explain(in_part, *DEEP_ARGS), "undone_by_compiler")
    assert "4 of its 8 regions inlined" in found.message
    assert step in found.next_step

    def mlp(w, x):
        return x + jax.nn.gelu(x @ w) @ w.T

    several = deep(lambda _: wrap(mlp), 4)
    assert "undone_by_compiler" in codes(remat.explain(several, *DEEP_ARGS))


@pytest.mark.parametrize("wrap", [jax.checkpoint, remat.checkpoint])
@pytest.mark.parametrize("whole_step", [False, True])
def test_a_policy_that_matches_nothing_is_named(wrap, whole_step):
    def f(w, x):
        h = remat.checkpoint_name(x @ w, "hidden")
        return jnp.sum(jnp.tanh(jnp.tanh(h) @ w))

    def explained(name):
        policy = jax.checkpoint_policies.save_only_these_names(name)
        g = wrap(f, policy=policy)
        step = jax.value_and_grad(g) if whole_step else g
        return remat.explain(step, struct(64, 64), struct(512, 64), compile=False)

    found = finding(explained("hiden"), "policy_matched_nothing")
    assert "'hiden'" in found.message
    assert "Did you mean 'hidden'" in found.next_step
    assert "policy_matched_nothing" not in codes(explained("hidden"))


@pytest.mark.parametrize("wrap", [jax.checkpoint, remat.checkpoint])
@pytest.mark.parametrize("whole_step", [False, True])
def test_names_in_the_rules_of_custom_derivatives_are_found(wrap, whole_step):
    @jax.custom_vjp
    def f(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    def forward(w, x):
        h = remat.checkpoint_name(x @ w, "inner")
        return jnp.sum(jnp.tanh(h)), (w, x, h)

    def backward(kept, g):
        w, x, h = kept
        d = g * (1 - jnp.tanh(h) ** 2)
        return x.T @ d, d @ w.T

    f.defvjp(forward, backward)

    def found(name):
        policy = jax.checkpoint_policies.save_only_these_names(name)
        loss = wrap(f, policy=policy)
        step = jax.value_and_grad(loss) if whole_step else loss
        explanation = remat.explain(step, struct(64, 64), struct(512, 64), compile=False)
        return {f.code: f for f in explanation.findings}

    assert "policy_matched_nothing" not in found("inner")
    assert "Did you mean 'inner'" in found("iner")["policy_matched_nothing"].next_step


def test_one_name_of_several_that_nothing_has_is_named():
    policy = jax.checkpoint_policies.save_only_these_names("hidden", "hiden")

    def named(w, x):
        return jnp.tanh(remat.checkpoint_name(jnp.sin(x @ w), "hidden") @ w)

    loss = deep(lambda _: jax.checkpoint(named, policy=policy), 2)
    found = finding(remat.explain(loss, *DEEP_ARGS, compile=False), "policy_name_unknown")
    assert found.severity == "info"
    assert "names 'hiden'," in found.message
    assert "Did you mean 'hidden'" in found.next_step


def test_a_policy_where_nothing_is_named_says_how_to_name():
    policy = jax.checkpoint_policies.save_only_these_names("h")
    loss = deep(functools.partial(jax.checkpoint, policy=policy), 2)
    found = finding(remat.explain(loss, *DEEP_ARGS, compile=False), "policy_matched_nothing")
    assert "x = remat.checkpoint_name(x, 'h')" in found.next_step


def test_a_discarded_name_is_named():
    def f(w, x):
        h = x @ w
        remat.checkpoint_name(h, "hidden")
        return jnp.sum(jnp.tanh(jnp.tanh(h) @ w))

    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    explanation = remat.explain(
        jax.checkpoint(f, policy=policy), struct(64, 64), struct(512, 64), compile=False
    )
    found = finding(explanation, "policy_matched_nothing")
    assert "is not used" in found.message
    assert "test_findings.py" in found.message


def of_named(policy, *, used=True, compile=False):
    """Return the explanation of a named function under a policy of JAX's."""

    def f(w, x):
        h = jnp.tanh(x @ w)
        named = remat.checkpoint_name(h, "hidden")
        return jnp.sin((named if used else h) @ w)

    def loss(w, x):
        once = jax.checkpoint(f, policy=policy)
        return once(w, once(w, x)).sum()

    return remat.explain(loss, struct(64, 64), struct(2048, 64), compile=compile)


def test_excluded_names_are_not_taken_for_those_that_a_policy_saves():
    policies = jax.checkpoint_policies
    but_hidden = policies.save_any_names_but_these("hidden")
    found = finding(of_named(but_hidden), "policy_matched_nothing")
    assert "save_any_names_but_these saves values of all names but 'hidden'" in found.message
    both = policies.save_from_both_policies(but_hidden, policies.save_only_these_names("absent"))
    assert "all names but 'hidden'" in finding(of_named(both), "policy_matched_nothing").message
    but_other = policies.save_any_names_but_these("other")
    assert "policy_matched_nothing" not in codes(of_named(but_other))
    assert (
        "is not used" in finding(of_named(but_other, used=False), "policy_matched_nothing").message
    )


def test_kinds_of_memory_in_a_policy_are_no_names():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["absent"],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    found = finding(of_named(policy), "policy_name_unknown")
    assert "names 'absent', but" in found.message
    assert found.next_step == "Correct the name or leave it out. Known: 'hidden'."
    assert "undone_by_compiler" not in codes(of_named(policy, compile=True))


def test_names_in_policies_of_ours_that_match_nothing_are_named():
    policy = remat.policies.save("absent", strict=False)
    explanation = remat.explain(
        deep(functools.partial(remat.checkpoint, policy=policy)), *DEEP_ARGS, compile=False
    )
    assert "'absent'" in finding(explanation, "policy_matched_nothing").message


def test_domination_by_arguments_is_named():
    args = ([struct(512, 512)] * 8, struct(16, 512))
    explanation = remat.explain(deep(remat.checkpoint), *args, compile=False)
    found = finding(explanation, "arguments_dominate")
    assert found.severity == "warning"
    assert "donate_argnums" in found.next_step
    assert "argument 8 × w[0…7]  f32[512,512]  8.0 MiB" in found.message
    few = remat.explain(deep(lambda f: f), *DEEP_ARGS, compile=False)
    assert "arguments_dominate" not in codes(few)


@pytest.mark.parametrize("wrap", [jax.checkpoint, remat.checkpoint])
def test_a_checkpoint_around_a_whole_scan_is_named(wrap):
    def loss(around, body):
        step = body(lambda x, w: (layer(w, x), None))
        return around(lambda w, x: jax.lax.scan(step, x, w)[0].sum())

    whole = remat.explain(loss(wrap, lambda f: f), *DEEP_ARGS, compile=False)
    found = finding(whole, "scan_recomputed_at_once")
    assert "scan of 8 iterations" in found.message
    assert "body" in found.next_step
    each = remat.explain(loss(lambda f: f, wrap), *DEEP_ARGS, compile=False)
    assert codes(each) == {"has_regions"}


def test_a_region_that_recomputes_everything_at_once_is_named():
    explanation = remat.explain(remat.checkpoint(deep(lambda f: f)), *DEEP_ARGS, compile=False)
    step = finding(explanation, "region_recomputed_at_once").next_step
    assert re.search(
        r'; or remat\.fit\(jax\.value_and_grad\(loss\), budget="\d+%"\) recomputes', step
    )
    layers = remat.explain(deep(remat.checkpoint), *DEEP_ARGS, compile=False)
    assert codes(layers) == {"has_regions"}


@pytest.mark.parametrize("wrap", [jax.checkpoint, remat.checkpoint])
def test_an_inner_policy_that_is_overridden_is_named(wrap):
    inner = functools.partial(wrap, policy=jax.checkpoint_policies.dots_saveable)
    explanation = remat.explain(wrap(deep(inner)), *DEEP_ARGS, compile=False)
    found = finding(explanation, "inner_policy_overridden")
    assert "recomputes what the policy of a checkpoint inside it saves" in found.message
    kept = remat.explain(deep(inner), *DEEP_ARGS, compile=False)
    assert "inner_policy_overridden" not in codes(kept)
    outer = functools.partial(wrap, policy=jax.checkpoint_policies.dots_saveable)
    scanned = wrap(lambda w, x: jax.lax.scan(lambda c, v: (inner(layer)(v, c), None), x, w)[0])
    found = finding(remat.explain(scanned, *DEEP_ARGS, compile=False), "inner_policy_overridden")
    assert "_jax" not in found.message
    assert "()" not in found.message
    same = remat.explain(outer(deep(inner)), *DEEP_ARGS, compile=False)
    assert "inner_policy_overridden" not in codes(same)


def test_the_step_by_hand_names_what_repeats():
    def scanned(weights, x):
        return jax.lax.scan(lambda c, w: (layer(w, c), None), x, weights)[0].sum()

    def modules(wrap=lambda f: f):
        def loss(weights, x):
            for i in range(3):
                with jax.named_scope(f"net/block_{i}"):
                    x = layer(weights[i], layer(weights[i], x))
            return x.sum()

        return loss

    def next_step(loss):
        explanation = remat.explain(loss, *DEEP_ARGS, compile=False)
        found = finding(explanation, "no_regions")
        saved = sum(value.n_bytes for value in explanation.values if value.kind == "saved")
        assert format_bytes(saved) in found.message
        return found.next_step

    assert re.search(
        r"make the loop at \S+test_findings.py:\d+ \(.*\) a remat.scan", next_step(scanned)
    )
    assert next_step(modules()).endswith("Or wrap net/block_0…2 in remat.checkpoint.")
    line = layer.__code__.co_firstlineno
    assert next_step(deep(lambda f: f)).endswith(
        f"explain_cases.py:{line}), which the step calls 8 times, in remat.checkpoint."
    )


@pytest.mark.parametrize("kind", ["loop", "modules"])
def test_the_peak_that_recomputing_by_hand_leaves_is_about_that_of_the_compiler(kind):
    n = 24 if kind == "loop" else 8
    weights, x = struct(n, 64, 64), struct(4096, 64)

    def step(wrap):
        block = wrap(lambda x, w: layer(w, layer(w, x)))

        def loss(weights, x):
            if kind == "loop":
                return jax.lax.scan(lambda x, w: (block(x, w), None), x, weights)[0].sum()
            for i in range(n):
                with jax.named_scope(f"block_{i}"):
                    x = block(x, weights[i])
            return x.sum()

        return loss

    found = finding(remat.explain(step(lambda f: f), weights, x), "no_regions")
    said = next(option for option in found.options if option.label == "by hand")
    assert said.precision == "about"
    assert 0.25 < said.most_extra_flops_share < 0.5
    by_hand = jax.value_and_grad(step(remat.checkpoint))
    compiled = remat.testing.peak_bytes(by_hand, weights, x)
    assert said.peak_bytes == pytest.approx(compiled, rel=0.25)


def test_the_line_that_saves_most_of_a_part_is_named():
    def heavy(w, x):
        return jnp.tanh(x @ w) @ w

    def loss(weights, x):
        for w in weights:
            x = heavy(w, x)
        return x.sum()

    line = heavy.__code__.co_firstlineno + 1
    weights = [struct(64, 64)] * 4
    found = finding(remat.explain(loss, weights, struct(1000, 64), compile=False), "no_regions")
    assert re.search(rf"in heavy at \S*test_findings.py:{line}\.", found.message)


def test_the_loop_named_is_one_that_stacks_values_for_the_backward_pass():
    def prepared(weights, x):
        # Stacks 8 times the bytes of `x`, and none of it is differentiated.
        _, stacked = jax.lax.scan(lambda c, _: (c + 1, c), jax.lax.stop_gradient(x), length=8)
        return deep(lambda f: f)(weights, x * stacked.mean(0))

    def next_step(loss):
        return finding(remat.explain(loss, *DEEP_ARGS, compile=False), "no_regions").next_step

    assert "loop" not in next_step(prepared)
    assert "Or wrap layer " in next_step(prepared)

    def branch(weights, x):
        def scanned():
            return jax.lax.scan(lambda c, w: (layer(w, c), None), x, weights)[0]

        return jax.lax.cond(x[0, 0] > 0, scanned, lambda: x).sum()

    assert re.search(r"make the loop at \S+test_findings.py:\d+", next_step(branch))


def test_the_wrapper_is_that_of_the_modules_that_compute_most_of_what_is_saved():
    linen = pytest.importorskip("flax.linen")

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            return jnp.tanh(linen.Dense(64, use_bias=False)(x))  # saved by the user's line

    def next_step(n_layers, n_blocks):
        def loss(weights, x):
            for w in weights[:n_layers]:
                x = layer(w, x)
            for _ in range(n_blocks):
                x = Block().apply({"params": {"Dense_0": {"kernel": weights[0]}}}, x)
            return x.sum()

        weights = [struct(64, 64)] * 8
        explanation = remat.explain(loss, weights, DEEP_ARGS[1], compile=False)
        return finding(explanation, "no_regions").next_step

    assert next_step(8, 1).endswith("Or wrap the layers in remat.checkpoint.")
    assert next_step(1, 8).endswith("Or wrap the layers in remat.linen.remat.")


def test_no_budget_is_suggested_where_gradients_are_the_peak():
    def loss(w, x):
        return -jax.nn.log_softmax(x @ w)[
            :, 0
        ].mean()  # one large layer, whose gradient is the peak

    explanation = remat.explain(loss, struct(16, 8192), struct(2048, 16), compile=False)
    found = finding(explanation, "no_regions")
    assert "A plan can gain little" in found.next_step
    assert "f32[2048,8192]" in found.next_step
    assert "test_findings.py" in found.next_step
    assert "budget=" not in found.next_step


def test_a_step_that_does_not_fit_has_one_budget_with_the_number(monkeypatch):
    def explained(limit_bytes):
        refused = OutOfMemory(needed_bytes=2**34, limit_bytes=limit_bytes)
        monkeypatch.setattr("remat.program.compiled.compile_plainly", lambda *_: refused)
        return remat.explain(deep(lambda f: f), *DEEP_ARGS)

    explanation = explained(15 * 2**30)
    assert explanation.to_text().count("budget=") == 1
    assert 'budget="15GiB"' in finding(explanation, "does_not_fit").next_step
    assert finding(explanation, "no_regions").next_step.startswith("Without a plan, wrap")
    assert "No plan makes it fit" in finding(explained(2**10), "does_not_fit").next_step


def mlps(weights, x):
    for up, down in weights:
        x = x + jax.nn.gelu(x @ up) @ down
    return x.sum()


def lstm(w, x):
    def cell(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ w, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros_like(x[0])
    return jnp.mean(jax.lax.scan(cell, (zero, zero), x)[1] ** 2)


def wave(velocity):
    """Return the loss of nested loops, linear in their carries, which the backward pass does not read."""

    def one(carry, t):
        now, before = carry
        laplacian = jnp.roll(now, 1, 0) + jnp.roll(now, -1, 0) - 2 * now
        new = 2 * now - before + velocity**2 * laplacian * 0.1
        new = new.at[3].add(jnp.exp(-((t - 5.0) ** 2)))
        return (new, now), new[:, 10]

    zero = jnp.zeros((64, 256))
    times = jnp.arange(160.0).reshape(8, 20)
    _, seen = jax.lax.scan(lambda c, ts: jax.lax.scan(one, c, ts), (zero, zero), times)
    return jnp.mean(seen**2)


@pytest.mark.parametrize(
    ("loss", "args"),
    [
        (mlps, ([(struct(128, 512), struct(512, 128))] * 4, struct(2048, 128))),
        (lstm, (struct(512, 1024), struct(128, 64, 256))),
        (wave, (struct(64, 256),)),
    ],
)
def test_the_cost_of_a_plan_is_near_the_estimated_range(loss, args):
    options = finding(remat.explain(loss, *args), "no_regions").options
    said = next(option for option in options if option.label == "remat.fit")
    budget = re.search(r'budget="(\d+%)"', said.code)[1]
    low, high = said.extra_flops_share, said.most_extra_flops_share
    plan = remat.plan(jax.value_and_grad(loss), *args, budget=budget, cache=False)
    assert low * plan.flops / 3 < plan.extra_flops < high * plan.flops * 1.1


def test_no_budget_is_suggested_that_all_recomputation_together_would_hardly_reach():
    def loss(w, x):
        return jnp.mean(jax.nn.relu(jnp.tanh(x @ w[0]) @ w[1]) ** 2)

    args = [struct(256, 256)] * 2, struct(4096, 256)
    said = finding(remat.explain(loss, *args), "no_regions").next_step
    budget = re.search(r'budget="(\d+%)"', said)
    if budget is None:
        assert "A plan can gain little" in said
    else:
        assert remat.plan(jax.value_and_grad(loss), *args, budget=budget[1], cache=False)
