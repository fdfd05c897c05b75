"""Arguments that explanations suggest donating."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from explain_cases import codes, f32, struct

import remat
from remat.units import parse_bytes

# The batch is small, so the peak is where the new values and the old ones are live.
W, X = struct(256, 256), struct(16, 256)
PAIR = {"a": W, "b": W}


def of_pair(params, x):
    return jnp.mean(jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) ** 2)


def descended(params, gradients):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def averaged(old, new):
    return jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, old, new)


def advice(step, *args, **options):
    """Return an explanation's advice on donation."""
    explanation = remat.explain(jax.jit(step, **options), *args, compile=False)
    steps = " ".join(finding.next_step for finding in explanation.findings)
    return " ".join(re.findall(r"Donate [^:]*: up to [^:]*? less at the peak\.", steps))


def replaced(step, *args, **options):
    """Return the arguments that the step replaces, according to its explanation."""
    found = re.search(
        r"Donate ([^(]*) \(.*\), which the step replaces", advice(step, *args, **options)
    )
    return found[1] if found else ""


def distilled(teacher, student, x):
    def loss(student):
        return (of_pair(student, x) - of_pair(teacher, x)) ** 2

    return descended(student, jax.grad(loss)(student))


def test_frozen_parameters_of_the_shapes_of_trained_ones_are_not_to_be_donated():
    assert replaced(distilled, PAIR, PAIR, X) == "student"
    assert advice(distilled, PAIR, PAIR, X, donate_argnums=1) == ""


def test_a_batch_of_the_shape_of_the_predictions_is_not_to_be_donated():
    def step(params, x):
        def predicted(params):
            y = jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"])
            return jnp.mean(y**2), y

        (_, y), gradient = jax.value_and_grad(predicted, has_aux=True)(params)
        return descended(params, gradient), y

    assert replaced(step, PAIR, X) == "params"
    assert "Donate x" not in advice(step, PAIR, X)


def test_an_argument_added_to_its_prediction_is_to_be_donated_if_it_is_not_needed_again():
    def step(params, x):
        def denoised(params):
            y = x + jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"])
            return jnp.mean(y**2), y

        (_, y), gradient = jax.value_and_grad(denoised, has_aux=True)(params)
        return descended(params, gradient), y

    large = struct(4096, 256)
    assert replaced(step, PAIR, X) == "params"
    assert "Donate x if you do not need it again" in advice(step, PAIR, large)


def test_where_one_of_two_arguments_is_replaced_either_may_be_donated():
    def step(params, target, x):
        return averaged(target, jax.tree.map(lambda p: p, params)), of_gradient(params, x)

    def of_gradient(params, x):
        return jnp.sum(jax.grad(of_pair)(params, x)["a"])

    said = advice(step, PAIR, PAIR, X)
    assert "Donate whichever of params, target you do not need again" in said
    assert "up to 512.0 KiB" in said


def test_parameters_of_which_some_are_not_returned_may_be_needed_again():
    def only_head(params, x):
        return params["b"] - 0.1 * jax.grad(of_pair)(params, x)["b"]

    def all_of_them(params, x):
        return {"a": params["a"], "b": only_head(params, x)}

    assert "Donate params if you do not need it again" in advice(only_head, PAIR, X)
    assert replaced(all_of_them, PAIR, X) == "params"


def test_running_averages_beside_parameters_are_replaced_with_them():
    def step(model, x):
        def with_mean(w):
            y = jnp.tanh(x @ w)
            return jnp.mean(y**2), 0.9 * model["mean"] + 0.1 * y.mean(axis=0)

        gradient, mean = jax.grad(with_mean, has_aux=True)(model["w"])
        return {"w": model["w"] - 0.1 * gradient, "mean": mean}

    assert replaced(step, {"w": W, "mean": struct(256)}, X) == "model"


def test_scaled_gradients_replace_nothing():
    def step(params, x):
        return jax.tree.map(lambda g: g / 8, jax.grad(of_pair)(params, x))

    assert advice(step, PAIR, X) == ""


def with_average(params, average, x):
    params = descended(params, jax.grad(of_pair)(params, x))
    return params, averaged(average, params)


def in_branches(params, average, x):
    gradients = jax.grad(of_pair)(params, x)

    def update(params, average):
        new = descended(params, gradients)
        return new, averaged(average, new)

    is_finite = jnp.isfinite(gradients["a"]).all()
    return jax.lax.cond(is_finite, update, lambda *old: old, params, average)


def in_a_loop(params, average, x):
    return jax.lax.fori_loop(0, 3, lambda _, old: with_average(*old, x), (params, average))


def in_mixed_precision(params, average, x):
    gradients = jax.grad(of_pair)(params, x.astype(jnp.bfloat16))
    average = jax.tree.map(lambda m, g: 0.9 * m + g.astype(f32), average, gradients)
    new = jax.tree.map(lambda p, m: p.astype(f32) - 0.1 * m, params, average)
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16), new), average


@pytest.mark.parametrize("step", [with_average, in_branches, in_a_loop, in_mixed_precision])
def test_parameters_and_their_averages_are_both_replaced(step):
    params = PAIR
    if step is in_mixed_precision:
        params = jax.tree.map(lambda s: struct(*s.shape, dtype=jnp.bfloat16), PAIR)
    assert replaced(step, params, PAIR, X) == "params, average"


def test_an_update_layer_by_layer_replaces_stacked_parameters():
    def step(params, momentum, x):
        def of_stack(params):
            return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0].sum()

        def update(_, layer):
            w, m, g = layer
            m = 0.9 * m + g
            return None, (w - 0.1 * m, m)

        return jax.lax.scan(update, None, (params, momentum, jax.grad(of_stack)(params)))[1]

    assert replaced(step, struct(4, 256, 256), struct(4, 256, 256), X) == "params, momentum"


def test_steps_of_filter_jit_are_told_of_its_own_option():
    eqx = pytest.importorskip("equinox")

    def said(step, *shapes, **options):
        args = jax.tree.map(lambda shape: jnp.ones(shape.shape), shapes)
        explanation = remat.explain(eqx.filter_jit(step, **options), *args, compile=False)
        return " ".join(finding.next_step for finding in explanation.findings)

    first = said(lambda w, x: descended(w, jax.grad(of_pair)(w, x)), PAIR, X)
    assert 'Donate w (donate="all", which also donates x), which the step replaces' in first
    assert 'Donate student (donate="all-except-first"' in said(distilled, PAIR, PAIR, X)
    assert "Donate" not in said(distilled, PAIR, PAIR, X, donate="all-except-first")

    def step(w, m, x):
        m = averaged(m, jax.grad(of_pair)(w, x))
        return descended(w, m), m

    assert 'Donate w (donate="all"), which' in said(step, PAIR, PAIR, X, donate="all-except-first")
    assert "donate_argnums" not in said(of_pair, PAIR, X)


LAYERS = [struct(512, 512)] * 8


def trained(params, x):
    def loss(params):
        y = x
        for w in params:
            y = jnp.tanh(jnp.sin(y @ w))
        return jnp.mean(y**2)

    return descended(params, jax.grad(loss)(params))


def trained_with_average(params, average, x):
    params = trained(params, x)
    return params, averaged(average, params)


@pytest.mark.parametrize(
    "step, args",
    [
        (trained, (LAYERS, struct(16, 512))),
        (trained_with_average, (LAYERS, LAYERS, struct(16, 512))),
    ],
)
def test_donation_frees_at_the_peak_what_is_said(step, args):
    n = len(args) - 1
    said = re.search("up to ([^ ]* [^ ]*) less at the peak", advice(step, *args))
    peak, donating = (
        remat.testing.peak_bytes(jax.jit(step, donate_argnums=donated), *args)
        for donated in ((), tuple(range(n)))
    )
    assert said and parse_bytes(said[1]) == pytest.approx(peak - donating, rel=0.15)


def test_donation_is_not_advised_where_gradients_take_the_memory_of_results():
    # At the first gradient all values of the forward pass are live; later gradients replace them.
    args = LAYERS, struct(512, 512)
    peaks = [
        remat.testing.peak_bytes(jax.jit(trained, donate_argnums=donated), *args)
        for donated in ((), (0,))
    ]
    assert peaks[0] == peaks[1]
    assert advice(trained, *args) == ""


def test_the_arguments_of_steps_on_numbers_are_no_finding():
    assert codes(remat.explain(lambda x: x * 2, struct())) == {"no_regions"}
