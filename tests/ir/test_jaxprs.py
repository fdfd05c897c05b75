"""Sub-jaxprs: walking, inlining, substitution and dependence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from remat import _jax
from remat.ir import jaxprs
from remat.ir.equations import transparent_call

X = jnp.array([0.3, -0.5, 0.7])


@jax.custom_jvp
def own_rule(x):
    return jnp.tanh(x)


own_rule.defjvp(lambda primals, tangents: (own_rule(*primals), tangents[0]))


def jaxpr_of(f, *args):
    jaxpr, consts, _ = _jax.trace_call(f, *args)
    assert not consts
    return jaxpr


def program(x):
    y = jax.jit(lambda y: lax.scan(lambda c, _: (jnp.sin(c), None), y, None, length=2)[0])(x)
    return own_rule(lax.cond(y[0] > 0, jnp.cos, jnp.exp, y))


def names(eqns):
    return [eqn.primitive.name for eqn in eqns]


def test_every_equation_comes_before_those_inside_it():
    found = names(jaxprs.equations(jaxpr_of(program, X)))
    inside = [("jit", "scan"), ("scan", "sin"), ("cond", "exp"), ("custom_jvp_call", "tanh")]
    for outer, inner in inside:
        assert found.index(outer) < found.index(inner)
    assert found.count("sin") == found.count("exp") == found.count("tanh") == 1


def test_walking_over_what_runs_leaves_out_functions_with_rules_of_their_own():
    found = names(jaxprs.equations(jaxpr_of(program, X), jaxprs.bodies_of))
    assert {"sin", "cos", "exp", "custom_jvp_call"} <= set(found)
    assert "tanh" not in found


def test_a_primitive_is_found_at_any_depth():
    assert jaxprs.applies(jaxpr_of(program, X), "tanh")
    assert not jaxprs.applies(jaxpr_of(program, X), "log")


@pytest.mark.parametrize("name", ["scan", "cond", "while", "jit"])
def test_what_an_equation_runs_is_its_bodies(name):
    def f(x):
        y = lax.while_loop(lambda x: x[0] < 1, lambda x: x * 2 + 1, x)
        return program(y)

    eqn = next(e for e in jaxprs.equations(jaxpr_of(f, X)) if e.primitive.name == name)
    assert jaxprs.has_body(eqn)
    assert len(list(jaxprs.bodies_of(eqn))) == (2 if name in ("cond", "while") else 1)


def test_a_replaced_body_runs_in_place_of_the_old_one():
    jaxpr = jaxpr_of(jax.jit(jnp.sin), X)
    (call,) = jaxpr.eqns
    (body,) = jaxprs.bodies_of(call)
    new = jaxprs.replace_body(call, body, jaxpr_of(jnp.cos, X))
    (result,) = _jax.call_jaxpr(_jax.rebuild(jaxpr, eqns=[new]), [X])
    np.testing.assert_allclose(result, jnp.cos(X), rtol=1e-6)


def calls(eqn):
    return _jax.open_jaxpr(eqn.params["jaxpr"]) if eqn.primitive.name == "jit" else None


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jax.jit(lambda x: jax.jit(jnp.sin)(x) * x)(x) + x,
        lambda x: jax.jit(lambda x, y: (y, x, 2.0, jnp.sin(x)))(x, x * 2),
        lambda x: [jax.jit(jnp.sin)(y) for y in (x, x + 1)],
        lambda x: jax.jit(lambda x: (jnp.sin(x),) * 2)(x),
    ],
    ids=["nested", "results passed through", "twice", "one value twice"],
)
def test_inlined_calls_compute_what_the_calls_do(f):
    jaxpr = jaxpr_of(f, X)
    inlined = jaxprs.inline_calls(jaxpr, calls)
    _jax.check_jaxpr(inlined)
    assert "jit" not in names(inlined.eqns)
    for a, b in zip(_jax.call_jaxpr(inlined, [X]), _jax.call_jaxpr(jaxpr, [X]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_calls_that_donate_are_inlined():
    """Only the outermost jitted function can donate its arguments."""
    donating = jax.jit(jnp.sin, donate_argnums=0)
    jaxpr = jaxpr_of(lambda x: donating(2 * x), X)
    assert any(any(eqn.params.get("donated_invars", ())) for eqn in jaxpr.eqns)
    assert names(jaxprs.inline_calls(jaxpr, transparent_call).eqns) == ["mul", "sin"]


def test_operations_of_inlined_calls_keep_the_scopes_of_the_call():
    def f(x):
        with jax.named_scope("outer"):
            return jax.jit(lambda x: jax.named_scope("inner")(jnp.sin)(x))(x)

    inlined = jaxprs.inline_calls(jaxpr_of(f, X), calls)
    (sine,) = (e for e in inlined.eqns if e.primitive.name == "sin")
    assert _jax.name_stack_of(sine) == "outer/inner"


def test_values_inlined_twice_have_variables_of_their_own():
    jaxpr = jaxpr_of(jax.jit(jnp.logaddexp), X, X)
    (call,) = jaxpr.eqns
    body = calls(call)
    made = [
        v for _ in range(2) for e in jaxprs.inlined(body, call.invars, call)[0] for v in e.outvars
    ]
    assert len(made) == len(set(made))
    wanted = _jax.new_var(body.outvars[0].aval)
    eqns, (result,) = jaxprs.inlined(body, call.invars, call, {body.outvars[0]: wanted})
    assert result is wanted
    assert wanted in {v for e in eqns for v in e.outvars}


def test_results_that_are_inputs_literals_or_repeated_are_made_by_no_equation():
    assert jaxprs.makes_its_results(jaxpr_of(lambda x: (jnp.sin(x), jnp.cos(x)), X))
    for f in (lambda x: x, lambda x: 1.0, lambda x: (jnp.sin(x),) * 2):
        assert not jaxprs.makes_its_results(jaxpr_of(f, X))


def test_derivatives_depend_on_inputs_through_numbers_alone():
    def f(x, y):
        n = jnp.int32(x[0])
        return jnp.sin(x), jnp.float32(n) * y, n

    jaxpr = jaxpr_of(f, X, X)
    assert jaxprs.dependents(jaxpr, [True, False]) == [True, False, False]
    assert jaxprs.dependents(jaxpr, [False, True]) == [False, True, False]


def test_effects_of_inlined_calls_name_the_refs_of_the_caller():
    @jax.jit
    def add(total, x):
        total[...] += x.sum()

    def fun(x):
        total = jax.new_ref(jnp.zeros(()))
        jax.jit(add)(total, x)
        lax.scan(lambda c, y: (c, add(total, y)), 0, x)
        return total[...]

    jaxpr = jaxpr_of(fun, X)
    assert {"jit", "pjit"}.isdisjoint(names(jaxprs.inline_calls(jaxpr, transparent_call).eqns))
    for program in (jaxpr, jaxprs.inline_calls(jaxpr, transparent_call)):
        _jax.check_jaxpr(program)
        np.testing.assert_array_equal(_jax.eval_jaxpr(program, (), X)[0], fun(X))
