"""Subjects of explanations: losses, steps, wrapped and fitted functions, other targets."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from benchmarks.zoo.model import train_step
from explain_cases import DEEP_ARGS, codes, deep, finding, layer, struct, total

import remat

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="no libtpu")


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


def test_compiled_programs_are_refused_with_what_to_give():
    lowered = jax.jit(deep(lambda f: f, 1)).lower(*DEEP_ARGS)
    for program in (lowered, lowered.compile()):
        with pytest.raises(TypeError, match="takes the function itself"):
            remat.explain(program, *DEEP_ARGS)


def test_fitted_steps_are_explained_as_they_run():
    loss = remat.auto(deep(lambda f: f, 3))
    fitted = remat.fit(jax.value_and_grad(loss), budget="85%", cache=False, progress=False)
    explanation = remat.explain(fitted, *DEEP_ARGS)
    assert explanation.totals.recompute_flops > 0
    assert explanation.totals.compiled.peak_bytes == fitted.plan(*DEEP_ARGS).peak_bytes
    assert "no_regions" not in codes(explanation)


def test_a_step_that_is_not_callable_is_an_error():
    with pytest.raises(TypeError, match=r"remat\.explain takes a function"):
        remat.explain(3)


@needs_libtpu
def test_a_step_that_does_not_fit_says_what_it_needs_and_what_there_is():
    x = struct(2**20, 512)
    explanation = remat.explain(deep(lambda f: f), struct(8, 512, 512), x, target="tpu:v5e:1x1")
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


def test_values_of_functions_that_jax_has_jitted_have_the_line_of_the_call():
    def loss(w, x):
        return jnp.sum(jnp.var(jnp.tanh(x @ w), axis=1))  # this line

    made = remat.explain(loss, jnp.eye(16), jnp.ones((64, 16)), compile=False)
    assert all(v.source for v in made.values if v.kind in ("saved", "temporary", "gradient"))


def test_a_linear_solve_is_no_gradient():
    def loss(w, x):
        return jnp.linalg.solve(w, jnp.tanh(x)).sum()

    args = struct(64, 64), struct(64, 64)
    given = remat.explain(loss, *args, compile=False)
    step = remat.explain(jax.value_and_grad(loss), *args, compile=False)
    assert "no_gradient" not in codes(given)
    assert given.totals.predicted == step.totals.predicted


def test_a_linear_solve_in_a_loop_is_no_gradient():
    def loss(w, x):
        def step(x, _):
            return jnp.linalg.solve(w, jnp.tanh(x)), None

        return jax.lax.scan(step, x, None, length=3)[0].sum()

    args = struct(64, 64), struct(64, 64)
    assert "no_gradient" not in codes(remat.explain(loss, *args, compile=False))


class Model:
    """A model whose loss and step are methods that are jitted in the class body."""

    depth = 3

    @functools.partial(jax.jit, static_argnums=0)
    def loss(self, w, x):
        for _ in range(self.depth):
            x = jnp.tanh(x @ w)
        return x.sum()

    @functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=1)
    def step(self, w, x, rate):
        return w - rate * jax.grad(self.loss)(w, x)

    @functools.partial(jax.jit, static_argnames=("self", "rate"), donate_argnames="w")
    def step_by_name(self, w, x, rate):
        return w - rate * jax.grad(self.loss)(w, x)


METHOD_ARGS = struct(64, 64), struct(512, 64)


def test_bound_methods_that_are_jitted_are_explained():
    explanation = remat.explain(Model().loss, *METHOD_ARGS, compile=False)
    assert [v.path for v in explanation.values if v.kind == "argument"] == ["w", "x"]
    plain = remat.explain(lambda w, x: Model().loss(w, x), *METHOD_ARGS, compile=False)
    assert explanation.totals.predicted == plain.totals.predicted


def test_options_of_a_bound_method_count_its_arguments_without_self():
    model = Model()
    for explanation in (
        remat.explain(model.step, *METHOD_ARGS, 0.1, compile=False),
        remat.explain(model.step_by_name, *METHOD_ARGS, rate=0.1, compile=False),
    ):
        assert [v.path for v in explanation.values if v.kind == "argument"] == ["w", "x"]
        assert explanation.totals.predicted.alias_bytes == 64 * 64 * 4
    plan = remat.plan(model.step, *METHOD_ARGS, 0.1, budget="95%", cache=False)
    assert plan.is_verified
    fitted = remat.fit(model.step_by_name, budget="95%", cache=False)
    w, x = (jnp.ones(s.shape) for s in METHOD_ARGS)
    assert jnp.allclose(fitted(w.copy(), x, rate=0.1), model.step(w.copy(), x, 0.1), rtol=1e-5)


def test_the_first_argument_that_is_not_static_is_differentiated():
    @functools.partial(jax.jit, static_argnums=0)
    def loss(kind, w, x):
        return layer(w, x).sum()

    assert "no_gradient" not in codes(remat.explain(loss, "kind", *METHOD_ARGS, compile=False))


def test_callables_that_cannot_be_hashed_are_explained():
    @dataclasses.dataclass
    class Loss:
        w: jax.Array

        def __call__(self, x):
            return layer(self.w, x).sum()

    explanation = remat.explain(Loss(jnp.ones((64, 64))), struct(512, 64), compile=False)
    assert "x" in [v.path for v in explanation.values if v.kind == "argument"]


def test_results_of_the_forward_pass_are_no_new_values_of_what_is_added_to_them():
    def predicted(b, w, x):
        return jnp.tanh(x @ w) + b

    explanation = remat.explain(predicted, struct(64), struct(32, 64), struct(32), compile=False)
    assert {"result", "gradient of b"} == {v.path for v in explanation.values if v.kind == "output"}


def of_while_loop(x):
    return jax.lax.while_loop(lambda x: x.sum() < 3, jnp.sin, x)


def of_callback(x):
    return jax.pure_callback(lambda x: x, struct(64, 64), x).sum()


def without_rule(x):
    return jax.lax.linalg.schur(x)[0]


@pytest.mark.parametrize("f", [of_while_loop, of_callback, without_rule])
def test_what_jax_cannot_differentiate_is_explained_forward(f):
    explanation = remat.explain(f, struct(64, 64), compile=False)
    assert {step.phase for step in explanation.steps} <= {"forward", "update"}
    assert "JAX cannot differentiate the function" in finding(explanation, "no_gradient").message


def test_errors_of_a_derivative_that_are_the_users_are_raised():
    @jax.custom_vjp
    def f(x):
        return x.sum()

    def backward(_, g):
        raise ValueError("a mistake")

    f.defvjp(lambda x: (x.sum(), None), backward)
    with pytest.raises(ValueError, match="a mistake"):
        remat.explain(f, struct(64), compile=False)


def test_a_loss_with_a_gradient_inside_is_said_to_be_explained_as_it_is():
    def penalized(w, x):
        return layer(w, x).sum() + jnp.sum(jax.grad(lambda x: layer(w, x).sum())(x) ** 2)

    args = struct(64, 64), struct(512, 64)
    found = finding(remat.explain(penalized, *args, compile=False), "gradient_inside")
    assert found.next_step == "To see it, explain jax.value_and_grad(loss)."
    step = jax.value_and_grad(penalized)
    assert "gradient_inside" not in codes(remat.explain(step, *args, compile=False))
    assert "gradient_inside" not in codes(remat.explain(lambda w, x: layer(w, x).sum(), *args))
