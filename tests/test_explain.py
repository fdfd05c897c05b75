"""`remat.explain`: its figures against JAX's and the compiler's, and each finding for its cause."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from benchmarks.zoo import ZOO
from benchmarks.zoo.model import train_step
from jax._src.ad_checkpoint import saved_residuals

import remat
from remat.explain import hlo
from remat.explain.phases import phased_program
from remat.report import Explanation

f32 = jnp.float32
BARRIER_HOLDS = tuple(int(x) for x in jaxlib.__version__.split(".")[:3]) >= (0, 11, 1)

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="no libtpu")


def struct(*shape, dtype=f32):
    return jax.ShapeDtypeStruct(shape, dtype)


def layer(w, x):
    return jnp.tanh(jnp.tanh(x @ w) @ w) @ w


def deep(wrap, n=8):
    """A stack of layers, written out."""
    body = wrap(layer)

    def loss(w, x):
        for i in range(n):
            x = body(w[i], x)
        return jnp.sum(x)

    return loss


DEEP_ARGS = (struct(8, 64, 64), struct(2048, 64))


def codes(explanation):
    return {finding.code for finding in explanation.findings}


def finding(explanation, code):
    return next(f for f in explanation.findings if f.code == code)


def total(explanation, kind):
    return sum(v.n_bytes for v in explanation.values if v.kind == kind)


# Figures


POLICIES = {
    "none": None,
    "blocks": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ZOO)
def test_residual_totals_are_those_of_jax(name, policy):
    model = ZOO[name]("tiny")
    wrapped = functools.partial(jax.checkpoint, policy=POLICIES[policy])
    loss = model.loss() if policy == "none" else model.blocks(wrapped)
    args = model.arguments()
    totals = remat.explain(loss, *args, compile=False).totals
    theirs = {"argument": 0, "computed": 0}
    for aval, origin in saved_residuals(loss, *args):
        if not origin.startswith(("from a constant", "from a literal")):
            kind = "argument" if origin.startswith("from the argument") else "computed"
            theirs[kind] += aval.size * aval.dtype.itemsize
    assert totals.residual_argument_bytes == theirs["argument"]
    assert totals.residual_bytes == theirs["computed"]


def agrees_or_says_why(explanation):
    totals = explanation.totals
    line = explanation.timeline()
    assert line.peak_bytes == totals.predicted.peak_bytes
    error = abs(totals.difference_bytes) / totals.compiled.peak_bytes
    if error > 0.05:
        assert f"{100 * error:.0f} % of its peak" in totals.difference
        # Which arrays: so many of this size, with their types.
        assert "holds" in totals.difference
        assert "iB" in totals.difference


@pytest.mark.parametrize("name", ["spiking", "lstm"])
def test_timeline_agrees_with_the_compiler_or_says_why(name):
    model = ZOO[name]("cpu")
    agrees_or_says_why(remat.explain(model.loss(), *model.arguments()))


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_timeline_of_every_model(name, blocks):
    model = ZOO[name]("cpu")
    loss = model.blocks(remat.checkpoint) if blocks else model.loss()
    agrees_or_says_why(remat.explain(loss, *model.arguments()))


def test_the_compilers_text_accounts_for_its_temporaries():
    compiled = jax.jit(jax.value_and_grad(deep(lambda f: f))).lower(*DEEP_ARGS).compile()
    peak = hlo.peak_of(compiled.as_text())
    temp = compiled.memory_analysis().temp_size_in_bytes
    assert abs(peak.n_bytes - temp) < 0.05 * temp
    assert {h.type for h in peak.held} >= {"f32[2048,64]"}


def test_arguments_and_results_are_those_of_the_compiler():
    explanation = remat.explain(deep(remat.checkpoint), *DEEP_ARGS)
    predicted, compiled = explanation.totals.predicted, explanation.totals.compiled
    assert predicted.argument_bytes == compiled.argument_bytes
    assert predicted.output_bytes == pytest.approx(compiled.output_bytes, abs=256)
    assert abs(predicted.peak_bytes - compiled.peak_bytes) < 0.05 * compiled.peak_bytes


def test_whole_training_steps_with_donation_are_explained_as_they_are():
    params, batch = DEEP_ARGS
    step = jax.jit(train_step(deep(remat.checkpoint, 2)), donate_argnums=(0, 1))
    explanation = remat.explain(step, params, (params, params), struct(dtype=jnp.int32), batch)
    assert {s.phase for s in explanation.steps} == {"forward", "recompute", "backward", "update"}
    predicted, compiled = explanation.totals.predicted, explanation.totals.compiled
    assert predicted.alias_bytes == compiled.alias_bytes > 0
    assert explanation.title == "update"
    phases = [s.phase for s in explanation.steps]
    assert phases.index("recompute") > phases.index("forward")
    assert all(p != "forward" for p in phases[phases.index("recompute") :])


def test_functions_are_explained_with_the_gradient_of_their_first_argument():
    loss = deep(lambda f: f)
    given = remat.explain(loss, *DEEP_ARGS, compile=False)
    step = remat.explain(jax.jit(jax.value_and_grad(loss)), *DEEP_ARGS, compile=False)
    assert given.totals.predicted == step.totals.predicted
    assert given.totals.flops == step.totals.flops


def test_functions_whose_result_is_no_number_are_explained():
    explanation = remat.explain(layer, struct(64, 64), struct(256, 64), compile=False)
    assert total(explanation, "saved") > 0
    assert "backward" in {s.phase for s in explanation.steps}


def test_static_arguments_and_keywords_are_taken_as_jit_takes_them():
    @functools.partial(jax.jit, static_argnums=1, static_argnames="scale")
    def f(x, n, *, scale):
        for _ in range(n):
            x = jnp.tanh(x)
        return x.sum() * scale

    def grad(x, n, *, scale):
        return jax.grad(lambda y: f(y, n, scale=scale))(x)

    step = jax.jit(grad, static_argnums=1, static_argnames="scale")
    explanation = remat.explain(step, struct(100), 3, scale=2.0)
    assert len([v for v in explanation.values if v.kind == "argument"]) == 1


def test_static_arguments_of_a_jitted_loss_are_no_inputs():
    @functools.partial(jax.jit, static_argnums=1, static_argnames="scale")
    def loss(w, n, x, *, scale):
        return deep(remat.checkpoint, n)(w, x) * scale

    explanation = remat.explain(loss, DEEP_ARGS[0], 3, DEEP_ARGS[1], scale=2, compile=False)
    assert [v.path for v in explanation.values if v.kind == "argument"] == ["w", "x"]
    plain = remat.explain(deep(remat.checkpoint, 3), *DEEP_ARGS, compile=False)
    assert explanation.totals.residual_bytes == plain.totals.residual_bytes > 0


def test_models_whose_leaves_are_no_arrays_are_explained():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Model:
        w: object
        activation: object

    model = Model(struct(64, 64), jnp.tanh)

    def loss(model, x):
        return jnp.sum(model.activation(x @ model.w) @ model.w)

    explanation = remat.explain(loss, model, struct(512, 64), compile=False)
    names = [v.path for v in explanation.values if v.kind == "argument"]
    assert names == ["model.w", "x"]
    assert total(explanation, "saved") == 512 * 64 * 4


def test_what_a_wrapped_jit_does_not_show_is_traced_anew():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    step = nnx.jit(lambda m, x: nnx.value_and_grad(lambda m: jnp.sum(jnp.tanh(m(x))))(m))
    explanation = remat.explain(step, model, jnp.ones((512, 64)), compile=False)
    assert "backward" in {s.phase for s in explanation.steps}


def test_a_power_and_its_derivative_are_not_the_same_value():
    def loss(w, x):
        return jnp.sum(jnp.tanh((x @ w) ** 3) @ w)

    step = jax.make_jaxpr(jax.value_and_grad(remat.checkpoint(loss)))(*[struct(64, 64)] * 2)
    sides = phased_program(step.jaxpr, [1, 1])
    exponents = {
        v: eqn.params["y"]
        for op, eqn in zip(sides.program.ops, sides.eqns)
        for v in op.results
        if op.name == "integer_pow"
    }
    assert set(exponents.values()) == {2, 3}
    assert all(exponents[v] == exponents[sides.same[v]] for v in exponents if v in sides.same)


def test_compiled_programs_are_refused_with_what_to_give():
    lowered = jax.jit(deep(lambda f: f, 1)).lower(*DEEP_ARGS)
    for program in (lowered, lowered.compile()):
        with pytest.raises(TypeError, match="takes the function itself"):
            remat.explain(program, *DEEP_ARGS)


def test_what_is_written_twice_is_one_value():
    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w) @ jnp.cos(x @ w))

    explanation = remat.explain(loss, struct(64, 64), struct(64, 64), compile=False)
    assert [s.label for s in explanation.steps if s.phase == "forward"].count("dot_general") == 2


def test_closed_over_constants_explain_the_compilers_arguments():
    x = np.ones((2048, 64), np.float32)
    explanation = remat.explain(lambda w: jnp.tanh(x @ w).sum(), struct(64, 64))
    assert "512.0 KiB are closed over" in explanation.totals.difference


def test_fitted_steps_are_explained_as_they_run():
    loss = remat.auto(deep(lambda f: f, 3))
    fitted = remat.fit(jax.value_and_grad(loss), budget="85%", cache=False, progress=False)
    explanation = remat.explain(fitted, *DEEP_ARGS)
    assert explanation.totals.recompute_flops > 0
    assert explanation.totals.compiled.peak_bytes == fitted.plan(*DEEP_ARGS).peak_bytes
    assert "no_regions" not in codes(explanation)


# What becomes of values


def test_saved_recomputed_and_offloaded_values_are_told_apart():
    x, w = struct(512, 64), struct(64, 64)

    def f(w, x):
        h = remat.checkpoint_name(x @ w, "h")
        return jnp.sum(jnp.tanh(h) @ w)

    plain = remat.explain(f, w, x, compile=False)
    assert total(plain, "recomputed") == 0
    saved = remat.explain(remat.checkpoint(f, policy=remat.policies.save("h")), w, x, compile=False)
    assert [v.name for v in saved.values if v.kind == "saved"] == ["h"]
    assert total(saved, "recomputed") > 0
    offload = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    moved = remat.explain(jax.checkpoint(f, policy=offload), w, x, compile=False)
    assert total(moved, "offloaded") == 512 * 64 * 4
    assert total(moved, "saved") == 0


def test_recomputed_values_have_a_life_in_each_pass():
    explanation = remat.explain(deep(remat.checkpoint, 2), *DEEP_ARGS, compile=False)
    lives = [len(v.lifetimes) for v in explanation.values if v.kind == "recomputed"]
    assert max(lives) == 2
    for value in explanation.values:
        if len(value.lifetimes) == 2:
            phases = [explanation.steps[born].phase for born, _ in value.lifetimes]
            assert phases == ["forward", "recompute"]


def test_segments_are_the_regions_in_the_forward_pass():
    explanation = remat.explain(deep(remat.checkpoint, 4), *DEEP_ARGS, compile=False)
    assert len(explanation.segments) == 4
    spans = sorted((s.first, s.last) for s in explanation.segments)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(spans))
    # Two of three products are computed again.
    assert all(s.recompute_flops >= 2 * 2 * 2048 * 64 * 64 for s in explanation.segments)


def test_recomputation_in_loops_is_counted():
    def loss(wrap):
        body = wrap(lambda x, w: (layer(w, x), None))
        return lambda w, x: jax.lax.scan(body, x, w)[0].sum()

    plain = remat.explain(loss(lambda f: f), *DEEP_ARGS, compile=False).totals
    again = remat.explain(loss(remat.checkpoint), *DEEP_ARGS, compile=False).totals
    theirs = remat.explain(loss(jax.checkpoint), *DEEP_ARGS, compile=False).totals
    assert plain.recompute_flops == 0
    assert again.recompute_flops == pytest.approx(theirs.recompute_flops, rel=0.01)
    assert again.recompute_flops == pytest.approx(again.flops - plain.flops, rel=0.05)


def test_a_difference_says_what_is_saved_more():
    before = remat.explain(deep(remat.checkpoint), *DEEP_ARGS, compile=False)
    dots = functools.partial(remat.checkpoint, policy=remat.policies.dots_saveable)
    after = remat.explain(deep(dots), *DEEP_ARGS, compile=False)
    assert before.diff(after).saved_bytes > 0


def test_it_survives_json():
    explanation = remat.explain(deep(remat.checkpoint), *DEEP_ARGS, compile=False)
    assert Explanation.from_json(explanation.to_json()) == explanation


def test_sharded_arguments_count_by_device():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    w = jax.ShapeDtypeStruct((8, 64, 64), f32, sharding=everywhere)
    x = jax.ShapeDtypeStruct((2048, 64), f32, sharding=rows)
    explanation = remat.explain(deep(lambda f: f), w, x)
    assert explanation.totals.predicted.argument_bytes == 8 * 64 * 64 * 4 + 2048 * 64 * 4 // 4
    assert explanation.totals.compiled.argument_bytes == 8 * 64 * 64 * 4 + 2048 * 64 * 4 // 4


def test_residuals_of_sharded_steps_are_those_of_one_device():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    rows, all_of_it = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    whole = deep(remat.checkpoint)
    each = jax.shard_map(
        lambda w, x: jax.lax.psum(whole(w, x), "data"),
        mesh=mesh,
        in_specs=(all_of_it, rows),
        out_specs=all_of_it,
    )
    one = remat.explain(whole, *DEEP_ARGS, compile=False).totals.residual_bytes
    layers = 7 * 2048 * 64 * 4
    slices = one - layers  # of the weights: they are on each device
    x = jax.ShapeDtypeStruct((2048, 64), f32, sharding=jax.sharding.NamedSharding(mesh, rows))
    for explanation in (
        remat.explain(whole, DEEP_ARGS[0], x, compile=False),
        remat.explain(each, *DEEP_ARGS, compile=False),
    ):
        assert abs(explanation.totals.residual_bytes - layers // 4 - slices) <= 4  # a number


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match=r"remat\.explain takes a function"):
        remat.explain(3)


# Why rematerialization had no effect


@needs_libtpu
def test_a_step_that_does_not_fit_says_what_it_needs_and_what_there_is():
    x = struct(2**26, 512)
    explanation = remat.explain(deep(lambda f: f, 2), struct(8, 512, 512), x, target="tpu:v5e:1x1")
    found = explanation.findings[0]
    assert (found.code, found.severity) == ("does_not_fit", "error")
    assert "the device has 15.8 GiB" in found.message
    assert "remat.fit" in found.next_step
    assert explanation.totals.compiled is None
    assert "not compiled" in explanation.to_text()
    assert "does_not_fit" in explanation.to_html()


@needs_libtpu
def test_steps_are_explained_ahead_of_time_for_a_tpu():
    bf16 = functools.partial(struct, dtype=jnp.bfloat16)
    explanation = remat.explain(
        deep(remat.checkpoint, 4), bf16(8, 128, 128), bf16(4096, 128), target="tpu:v5e:1x1"
    )
    totals = explanation.totals
    assert explanation.platform == "v5e, ahead of time"
    assert totals.compiled.peak_bytes > totals.compiled.argument_bytes > 0
    assert abs(totals.difference_bytes) < 0.25 * totals.compiled.peak_bytes
    assert totals.difference


def test_checkpointed_loops_are_named_as_what_they_are():
    def loss(w, x):
        return remat.scan(lambda c, v: (layer(v, c), None), x, w, checkpoints=3)[0].sum()

    explanation = remat.explain(loss, *DEEP_ARGS, compile=False)
    found = finding(explanation, "checkpointed_loop")
    assert "test_explain.py" in found.message
    assert "no_regions" not in codes(explanation)
    assert not any("remat/loops/" in step.source for step in explanation.steps)


def test_a_policy_that_saves_as_much_as_it_spares_is_named():
    for wrap in (jax.checkpoint, remat.checkpoint):
        dots = functools.partial(wrap, policy=jax.checkpoint_policies.dots_saveable)
        explanation = remat.explain(deep(dots), *DEEP_ARGS, compile=False)
        assert "Save less" in finding(explanation, "saves_as_much").next_step
        assert "region_recomputed_at_once" not in codes(explanation)


def test_no_gradient_and_no_regions_are_said():
    assert codes(remat.explain(lambda n: n + 1, struct(dtype=jnp.int32))) == {"no_gradient"}
    explanation = remat.explain(deep(lambda f: f), *DEEP_ARGS, compile=False)
    assert codes(explanation) == {"no_regions"}
    assert "remat.auto" in finding(explanation, "no_regions").next_step


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
    assert "4 of its 8 regions written out" in found.message
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
    assert "did you mean 'hidden'" in found.next_step
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
    assert "did you mean 'inner'" in found("iner")["policy_matched_nothing"].next_step


def test_one_name_of_several_that_nothing_has_is_named():
    policy = jax.checkpoint_policies.save_only_these_names("hidden", "hiden")

    def named(w, x):
        return jnp.tanh(remat.checkpoint_name(jnp.sin(x @ w), "hidden") @ w)

    loss = deep(lambda _: jax.checkpoint(named, policy=policy), 2)
    found = finding(remat.explain(loss, *DEEP_ARGS, compile=False), "policy_name_unknown")
    assert found.severity == "info"
    assert "speaks of 'hiden'," in found.message
    assert "did you mean 'hidden'" in found.next_step


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
    assert "test_explain.py" in found.message


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
    assert "argument 8 × w[*]  f32[512,512]  8.0 MiB" in found.message
    few = remat.explain(deep(lambda f: f), *DEEP_ARGS, compile=False)
    assert "arguments_dominate" not in codes(few)


@pytest.mark.parametrize("wrap", [jax.checkpoint, remat.checkpoint])
def test_a_checkpoint_around_a_whole_scan_is_named(wrap):
    def loss(around, body):
        step = body(lambda x, w: (layer(w, x), None))
        return around(lambda w, x: jax.lax.scan(step, x, w)[0].sum())

    whole = remat.explain(loss(wrap, lambda f: f), *DEEP_ARGS, compile=False)
    found = finding(whole, "scan_recomputed_at_once")
    assert "scan of 8 steps" in found.message
    assert "body" in found.next_step
    each = remat.explain(loss(lambda f: f, wrap), *DEEP_ARGS, compile=False)
    assert codes(each) == set()


def test_a_region_that_recomputes_everything_at_once_is_named():
    explanation = remat.explain(remat.checkpoint(deep(lambda f: f)), *DEEP_ARGS, compile=False)
    assert "region_recomputed_at_once" in codes(explanation)
    layers = remat.explain(deep(remat.checkpoint), *DEEP_ARGS, compile=False)
    assert codes(layers) == set()


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
