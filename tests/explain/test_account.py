"""Figures of explanations compared with JAX's and the compiler's."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks.zoo import ZOO
from explain_cases import DEEP_ARGS, deep, f32, layer, struct, total
from jax._src.ad_checkpoint import saved_residuals

import remat
from remat.explain.account import account_of
from remat.explain.phases import phased_program
from remat.report import Explanation

POLICIES = {
    "none": None,
    "blocks": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
}


def agrees_or_says_why(explanation):
    totals = explanation.totals
    line = explanation.timeline()
    assert line.peak_bytes == totals.predicted.peak_bytes
    error = abs(totals.difference_bytes) / totals.compiled.peak_bytes
    if error > 0.05:
        assert f"{100 * error:.0f} % of its peak" in totals.difference
        # The numbers of arrays of each size, with their types.
        assert "holds" in totals.difference
        assert "iB" in totals.difference


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


@pytest.mark.parametrize("name", ["spiking", "lstm"])
def test_timeline_agrees_with_the_compiler_or_says_why(name):
    model = ZOO[name]("cpu")
    agrees_or_says_why(remat.explain(model.loss(), *model.arguments()))


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("name", ZOO)
def test_the_timeline_of_every_model_agrees_with_the_compiler_or_says_why(name, blocks):
    model = ZOO[name]("cpu")
    loss = model.blocks(remat.checkpoint) if blocks else model.loss()
    agrees_or_says_why(remat.explain(loss, *model.arguments()))


def test_arguments_and_results_are_those_of_the_compiler():
    explanation = remat.explain(deep(remat.checkpoint), *DEEP_ARGS)
    predicted, compiled = explanation.totals.predicted, explanation.totals.compiled
    assert predicted.argument_bytes == compiled.argument_bytes
    assert predicted.output_bytes == pytest.approx(compiled.output_bytes, abs=256)
    assert abs(predicted.peak_bytes - compiled.peak_bytes) < 0.05 * compiled.peak_bytes


def _wide_loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x * x)


def _descended(ws, x):
    value, gradient = jax.value_and_grad(_wide_loss)(ws, x)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradient)


@pytest.mark.parametrize(
    "step", [jax.value_and_grad(_wide_loss), _descended], ids=["gradient", "update"]
)
@pytest.mark.parametrize("rows", [16, 256])
def test_temporaries_are_in_the_buffers_of_results_that_are_not_donated(step, rows):
    explanation = remat.explain(jax.jit(step), [struct(512, 512)] * 8, struct(rows, 512))
    predicted, compiled = explanation.totals.predicted, explanation.totals.compiled
    assert predicted.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.01)


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


def test_what_is_written_twice_is_one_value():
    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w) @ jnp.cos(x @ w))

    explanation = remat.explain(loss, struct(64, 64), struct(64, 64), compile=False)
    labels = [s.label for s in explanation.steps if s.phase == "forward"]
    assert labels.count("loss: dot_general") == 2


def test_values_without_modules_are_named_by_the_functions_that_compute_them():
    def attend(x):
        return jax.nn.softmax(x @ x.T) @ x

    def loss(w, x):
        return jax.nn.gelu(jax.nn.silu(attend(x) @ w)).mean()

    explanation = remat.explain(loss, struct(64, 64), struct(64, 64), compile=False)
    called = {group.called for group in explanation.groups()}
    assert {"attend: div of softmax", "loss: logistic of silu", "loss: tanh of gelu"} <= called
    assert "loss: dot_general" in called  # an operator, which is named after its primitive


def test_gradients_and_results_are_named_by_the_arguments_they_belong_to():
    def loss(params, x):
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        return jnp.sum((x @ params["head"]) ** 2)

    def step(params, momentum, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, value

    params = {"layers": [struct(64, 64)] * 2, "head": struct(64, 8)}
    explanation = remat.explain(step, params, params, struct(256, 64), compile=False)
    paths = {
        kind: {v.path for v in explanation.values if v.kind == kind}
        for kind in ("gradient", "output")
    }
    assert "gradient of params['head']" in paths["gradient"]
    assert {"new params['layers'][0]", "new momentum['layers'][1]"} <= paths["output"]
    assert "result[2]" in paths["output"]  # the loss

    both = remat.explain(jax.value_and_grad(loss), params, struct(256, 64), compile=False)
    results = {v.path for v in both.values if v.kind == "output"}
    assert {"result[0]", "gradient of params['head']", "gradient of params['layers'][0]"} <= results

    of_loss = remat.explain(loss, params, struct(256, 64), compile=False)
    results = {v.path for v in of_loss.values if v.kind == "output"}
    assert {"result", "gradient of params['head']", "gradient of params['layers'][0]"} <= results


def test_modules_come_before_functions():
    def loss(w, x):
        with jax.named_scope("mlp"):
            return jax.nn.gelu(x @ w).mean()

    explanation = remat.explain(loss, struct(64, 64), struct(64, 64), compile=False)
    assert "mlp: tanh of gelu" in {group.called for group in explanation.groups()}


def test_closed_over_constants_explain_the_compilers_arguments():
    x = np.ones((2048, 64), np.float32)
    explanation = remat.explain(lambda w: jnp.tanh(x @ w).sum(), struct(64, 64))
    assert "512.0 KiB are closed over" in explanation.totals.difference


# Kinds of values: saved, recomputed, offloaded, temporary


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
    # Two of three products are recomputed.
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


def test_an_explanation_is_equal_after_json():
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


def test_types_of_sharded_values_name_the_number_of_devices():
    jaxpr = jax.make_jaxpr(jax.grad(lambda w, x: jnp.sin(jnp.sin(x @ w)).sum()))(
        struct(8, 8), struct(64, 8)
    ).jaxpr
    made = account_of(
        phased_program(jaxpr, [1, 4]), ("w", "x"), (False, False), lambda *_: 0.0,
        results_from_start=True, duplicates=False,
    )  # fmt: skip
    n_bytes = {value.aval: value.n_bytes for value in made.values if value.kind == "argument"}
    assert n_bytes == {"f32[8,8]": 256, "f32[64,8]/4": 64 * 8 * 4 // 4}


def test_a_value_that_a_view_gives_another_shape_is_named_by_what_computes_it():
    def loss(w, x):
        y = jnp.sin(jnp.sin(x @ w))[:, None]
        return (y @ w).sum()

    values = remat.explain(loss, struct(64, 64), struct(1000, 64), compile=False).values
    saved = {value.primitive for value in values if value.kind == "saved"}
    assert saved and "broadcast_in_dim" not in saved


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
    slices = one - layers  # of the weights, which are replicated
    x = jax.ShapeDtypeStruct((2048, 64), f32, sharding=jax.sharding.NamedSharding(mesh, rows))
    for explanation in (
        remat.explain(whole, DEEP_ARGS[0], x, compile=False),
        remat.explain(each, *DEEP_ARGS, compile=False),
    ):
        assert abs(explanation.totals.residual_bytes - layers // 4 - slices) <= 4  # a scalar


def _scanned_layers(ws, x):
    def layer(x, w):
        return x + jnp.sin(jnp.tanh(x @ w) @ w), None

    return jnp.mean(jax.lax.scan(layer, x, ws)[0] ** 2)


def test_a_saved_value_costs_what_lies_between_it_and_other_saved_values():
    explanation = remat.explain(_scanned_layers, struct(24, 64, 64), struct(512, 64), compile=False)
    product = 2 * 512 * 64 * 64
    flops = {group.called: group.flops for group in explanation.groups()}
    assert flops["layer: cos"] == pytest.approx(23 * product, rel=0.2)  # of x @ w, not saved
    assert flops["layer: tanh"] == pytest.approx(24 * product, rel=0.2)
    # The derivative of tanh, from tanh alone; newer versions of JAX have a primitive for it.
    square = flops.get("layer: sub", flops.get("layer: one_minus_square", product))
    assert square < product


def of_embedding(table, tokens):
    return jnp.sum(jnp.tanh(table[tokens]) ** 2)


def written_over(x, part):
    return jnp.sum(jnp.sin(jax.lax.dynamic_update_slice(x, jnp.tanh(part), (0, 0))))


def test_what_becomes_a_result_in_place_has_the_memory_of_the_result():
    x = struct(4096, 256)
    n_bytes = 4096 * 256 * 4
    explanation = remat.explain(of_embedding, x, struct(512, dtype=jnp.int32))
    predicted, compiled = explanation.totals.predicted, explanation.totals.compiled
    assert predicted.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.05)
    assert explanation.to_html()
    predicted = remat.explain(written_over, x, struct(64, 256), compile=False).totals.predicted
    assert predicted.temp_bytes < 1.1 * n_bytes
