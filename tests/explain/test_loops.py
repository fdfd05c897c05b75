"""Loops and branches on the timeline of an explanation, and the origins of their values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explain_cases import codes, struct

import remat
from remat.explain.loops import iteration_blocks
from remat.explain.sources import user_source_of
from remat.paths import relative

D, N = 32, 6
WEIGHTS, X = struct(N, D, D), struct(128, D)


def layer(x, w):
    with jax.named_scope("mlp"):
        hidden = jnp.tanh(x @ w)
        return hidden @ w + x, None


def scanned(w, x):
    return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)


@pytest.fixture(scope="module")
def explanation():
    return remat.explain(scanned, WEIGHTS, X)


def stacked(explanation, primitive):
    """Return the slices that a loop stacks of the results of a primitive."""
    return [v for v in explanation.values if v.kind == "saved" and v.primitive == primitive]


def test_what_a_scan_stacks_is_named_inside_its_body(explanation):
    saved = [g for g in explanation.groups() if g.kind == "saved"]
    largest = next(g for g in saved if g.primitive == "tanh")
    assert str(largest) == f"{N} × mlp: tanh  f32[128,{D}]  96.0 KiB"
    assert largest.source.startswith("tests/explain/test_loops.py:")
    assert largest.source.endswith("(layer)")
    assert largest.n_bytes == largest.count * 128 * D * 4


def test_slices_are_live_from_their_iteration_forward_to_the_same_iteration_backward(explanation):
    slices = stacked(explanation, "tanh")
    steps = explanation.steps
    for i, value in enumerate(slices):
        ((born, dies),) = value.lifetimes
        assert (steps[born].phase, steps[dies].phase) == ("forward", "backward")
        said = f"iteration {i + 1}/{N}"
        assert (steps[born].iteration, steps[dies].iteration) == (said, said)
    births = [value.lifetimes[0][0] for value in slices]
    deaths = [value.lifetimes[0][1] for value in slices]
    assert births == sorted(births)
    assert deaths == sorted(deaths, reverse=True)


def test_a_stack_is_held_as_a_whole_while_its_loops_run(explanation):
    slices = stacked(explanation, "tanh")
    held = np.zeros(len(explanation.steps), int)
    for value in slices:
        for born, dies in (*value.lifetimes, *value.reserved):
            held[born : dies + 1] += value.n_bytes
    assert set(held[held > 0]) == {N * 128 * D * 4}
    assert explanation.timeline().bytes_of("reserved").max() > 0


def test_the_predicted_peak_of_a_scan_is_the_compilers(explanation):
    totals = explanation.totals
    assert totals.predicted.peak_bytes == pytest.approx(totals.compiled.peak_bytes, rel=0.2)


def test_the_peak_is_placed_in_an_iteration_and_named_for_its_module(explanation):
    said = " ".join(explanation.to_text(brief=True).split())
    assert f"iteration {N}/{N}" in said
    assert "the gradient of mlp" in said
    assert "add_any" not in said.partition("The peak of")[2].partition("Live there")[0]


def test_times_of_a_loops_iterations_sum_up_to_those_of_the_loop(explanation):
    assert sum(s.time_s for s in explanation.steps) == pytest.approx(explanation.totals.time_s)


def test_recomputation_inside_a_loops_body_is_a_phase_of_its_steps():
    def loss(w, x):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, w)[0] ** 2)

    found = remat.explain(loss, WEIGHTS, X, compile=False)
    again = [s for s in found.steps if s.phase == "recompute"]
    assert {s.iteration for s in again} == {f"iteration {i + 1}/{N}" for i in range(N)}
    assert len([v for v in stacked(found, "add") if v.reserved]) >= N - 1
    assert not stacked(found, "tanh")


def test_nested_loops_name_the_innermost_value_and_count_all_of_them():
    def loss(w, x):
        outer = lambda x, w: (jax.lax.scan(layer, x, w)[0], None)  # noqa: E731
        return jnp.sum(jax.lax.scan(outer, x, w)[0] ** 2)

    found = remat.explain(loss, struct(3, N, D, D), X, compile=False)
    tanh = stacked(found, "tanh")
    assert {v.aval for v in tanh} == {f"f32[128,{D}]"}
    assert sum(v.count for v in tanh) == 3 * N
    assert sum(v.n_bytes for v in tanh) == 3 * N * 128 * D * 4
    assert any(s.iteration == f"iteration 3/3 > {N}/{N}" for s in found.steps)


def test_long_loops_are_drawn_in_blocks_of_iterations():
    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda x, _: layer(x, w), x, None, length=10_000)[0] ** 2)

    found = remat.explain(loss, struct(D, D), X, compile=False)
    assert len(found.steps) < 2000
    tanh = stacked(found, "tanh")
    assert sum(v.count for v in tanh) == 10_000
    assert sum(v.n_bytes for v in tanh) == 10_000 * 128 * D * 4
    assert "/10,000" in found.steps[1].iteration
    assert iteration_blocks(10, 4) == (2, 3, 2, 3)


def test_branches_and_while_loops_show_what_they_run():
    def loss(w, x):
        x = jax.lax.cond(x[0, 0] > 0, lambda x: layer(x, w)[0], lambda x: x, x)
        n = jax.lax.while_loop(lambda n: n < 3.0, lambda n: n + 1.0, jnp.float32(0))
        return jnp.sum(x) * n

    found = remat.explain(loss, struct(D, D), X, compile=False)
    iterations = {s.iteration for s in found.steps}
    assert {"branch 2/2", "an iteration of a while loop"} <= iterations
    tanh = next(v for v in found.values if v.kind == "saved" and "tanh" in v.primitive)
    assert tanh.source.endswith("(layer)")


def test_a_scan_of_training_steps_has_the_phases_of_its_body():
    def steps(w, xs):
        def step(w, x):
            return w - 0.1 * jax.grad(lambda w: jnp.sum(layer(x, w)[0]))(w), None

        return jax.lax.scan(step, w, xs)[0]

    found = remat.explain(steps, struct(D, D), struct(4, 128, D), compile=False)
    assert {"forward", "backward", "update"} <= {s.phase for s in found.steps}
    assert "no_gradient" not in codes(found)


def test_loops_with_checkpoints_are_laid_out_and_stay_near_the_compilers_peak():
    def loss(w, x):
        return jnp.sum(remat.scan(layer, x, w, checkpoints=2)[0])

    found = remat.explain(loss, WEIGHTS, X)
    assert any(s.source.endswith("(layer)") and s.phase == "backward" for s in found.steps)
    totals = found.totals
    assert totals.predicted.peak_bytes == pytest.approx(totals.compiled.peak_bytes, rel=0.25)


def test_lines_of_libraries_come_with_the_users_own():
    jaxpr = jax.make_jaxpr(lambda x: jax.nn.softmax(x))(jnp.ones(4))
    said = {user_source_of(eqn) for eqn in jaxpr.jaxpr.eqns}
    assert all("test_loops.py" in text and "*" not in text for text in said)
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(x)

    model, x = Model(), jnp.ones((2, 4))
    params = model.init(jax.random.key(0), x)
    eqns = jax.make_jaxpr(model.apply)(params, x).jaxpr.eqns
    dot = next(user_source_of(e) for e in eqns if e.primitive.name == "dot_general")
    assert dot.startswith("flax/linen/linear.py:")
    assert ", from tests/explain/test_loops.py:" in dot
    assert relative("/nowhere/net.py") == "/nowhere/net.py"


@pytest.mark.parametrize("length, unroll", [(8, 8), (5, True), (1, 1)])
def test_a_loop_that_jax_unrolls_completely_is_explained_without_a_loop(length, unroll):
    def loss(w, x):
        def step(x, _):
            return jnp.tanh(x @ w), None

        return jax.lax.scan(step, x, None, length=length, unroll=unroll)[0].sum()

    def by_hand(w, x):
        for _ in range(length):
            x = jnp.tanh(x @ w)
        return x.sum()

    args = struct(64, 64), struct(1024, 64)
    explanation = remat.explain(loss, *args, compile=False)
    assert not any(step.iteration for step in explanation.steps)
    predicted = remat.explain(by_hand, *args, compile=False).totals.predicted
    assert explanation.totals.predicted == predicted


def test_slices_and_stacks_of_an_unrolled_loop_are_those_of_the_compiler():
    def loss(w, x, **options):
        last, _ = jax.lax.scan(layer, x, w, **options)
        return jnp.sum(last**2)

    def with_stack(w, x):
        def step(x, w):
            return jnp.tanh(x @ w), x

        return jax.lax.scan(step, x, w, unroll=True, reverse=True)[1].sum()

    for f in (lambda w, x: loss(w, x, unroll=True), with_stack):
        explanation = remat.explain(f, WEIGHTS, struct(1024, D))
        predicted, compiled = explanation.totals.predicted, explanation.totals.compiled
        assert predicted.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.1)


def test_loops_without_iterations_are_explained():
    def of_length_0(w, x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), x), x @ w, None, length=0)[0].sum()

    def beside_work(w, x):
        x = jax.lax.fori_loop(0, 0, lambda _, x: jnp.tanh(x @ w), x @ w)
        nothing = jnp.zeros((0, *x.shape))
        return x.sum() + jax.lax.scan(lambda c, y: (c, y @ w), 0.0, nothing)[1].sum()

    def with_effect(w, x):
        def step(x, _):
            jax.debug.print("{}", x.sum())
            return jnp.tanh(x @ w), None

        return jax.lax.scan(step, x @ w, None, length=0)[0].sum()

    for f in (of_length_0, beside_work, with_effect):
        explanation = remat.explain(f, struct(D, D), X)
        assert not any("tanh" in step.label for step in explanation.steps)
        assert {step.phase for step in explanation.steps} == {"forward", "backward", "update"}


def accumulated(w, x):
    def add(g, batch):
        return g + jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w) ** 2))(w), None

    gradient, _ = jax.lax.scan(add, jnp.zeros_like(w), x.reshape(8, -1, D))
    return gradient


def phases_after_the_last_backward_step(f, *args):
    phases = [step.phase for step in remat.explain(f, *args, compile=False).steps]
    return set(phases[len(phases) - phases[::-1].index("backward") :])


def test_what_stands_behind_a_loop_over_microbatches_is_the_update():
    def step(w, x):
        return w - 0.1 * accumulated(w, x)

    def epochs(w, x):
        return jax.lax.scan(lambda w, _: (step(w, x), None), w, None, length=3)[0]

    assert phases_after_the_last_backward_step(step, struct(D, D), X) == {"update"}
    assert phases_after_the_last_backward_step(epochs, struct(D, D), X) == {"update"}


def test_two_loops_over_microbatches_both_have_a_forward_and_a_backward_pass():
    def step(w, x):
        first = w - 0.1 * accumulated(w, x)
        return first - 0.1 * accumulated(first, jnp.tanh(x))

    phases = [step.phase for step in remat.explain(step, struct(D, D), X, compile=False).steps]
    first = phases.index("backward")
    assert "forward" in phases[phases.index("update", first) :]


def in_remat_scan(w, x):
    def step(x, _):
        return jnp.tanh(x @ w), None

    return remat.scan(step, x, None, length=20, checkpoints=4)[0].sum()


def in_remat_while_loop(w, x):
    return remat.while_loop(lambda x: x.sum() < 3, lambda x: jnp.tanh(x @ w), x).sum()


@pytest.mark.parametrize("loss", [in_remat_scan, in_remat_while_loop])
def test_states_are_written_into_the_store_of_a_loop_in_place(loss):
    explanation = remat.explain(loss, struct(64, 64), struct(1024, 64))
    predicted, compiled = explanation.totals.predicted, explanation.totals.compiled
    assert predicted.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.1)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_carry_that_is_read_after_a_part_of_it_is_written_is_copied(keeps):
    def steps(n, x):
        def step(i, x):
            written = x.at[i].set(1.0)
            read = x if keeps else written
            return written.at[i + 1].set((read @ read)[0])

        return jax.lax.fori_loop(0, n, step, x)

    n = struct(dtype=jnp.int32)
    explanation = remat.explain(steps, n, struct(256, 256))
    predicted, compiled = explanation.totals.predicted, explanation.totals.compiled
    assert predicted.temp_bytes == pytest.approx(256 * 256 * 4 * (2 if keeps else 1), rel=0.05)
    assert predicted.temp_bytes == pytest.approx(compiled.temp_bytes, rel=0.05)


def test_what_is_written_into_a_carry_that_something_else_replaces_takes_memory():
    def steps(n, x):
        def step(i, x):
            written = x.at[i].set(1.0)
            return jnp.tanh(written @ written)

        return jax.lax.fori_loop(0, n, step, x)

    explanation = remat.explain(steps, struct(dtype=jnp.int32), struct(256, 256))
    predicted, compiled = explanation.totals.predicted, explanation.totals.compiled
    assert predicted.temp_bytes == pytest.approx(compiled.temp_bytes, rel=0.05)
