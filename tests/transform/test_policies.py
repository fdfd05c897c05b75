"""Which values policies select, how policies combine, and which arguments are refused."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad
from support import former_jax_checkpoint

import remat
from remat import _jax, policies
from remat.transform.policies.selector import Selector

X = jnp.ones((4, 4))


def f(w, x):
    """Compute a dot (named 'product'), sin and cos (named 'wave'), in a scope, a jit and a scan."""
    h = remat.checkpoint_name(x @ w, "product")
    with jax.named_scope("encoder"), jax.named_scope("layer_0"):
        h = jnp.sin(h)
        with jax.named_scope("attention"):
            h = remat.checkpoint_name(jnp.cos(h), "wave")

    @jax.jit
    def inner(h):
        return jnp.tanh(remat.checkpoint_name(jnp.exp(-h), "inner"))

    def body(h, _):
        return jnp.sin(remat.checkpoint_name(h @ w, "step")), None

    h, _ = jax.lax.scan(body, inner(h), None, length=3)
    return jnp.sum(h**2)


def saved(policy, fun=f):
    """Return (primitive, names) of the values that are computed and saved."""
    found = remat.residuals(remat.checkpoint(fun, policy=policy), X, X)
    return sorted((r.primitive, r.names) for r in found if r.kind == "computed")


PRODUCT = ("dot_general", ("product",))
WAVE = ("cos", ("wave",))
INNER = ("exp", ("inner",))
STEP = ("dot_general", ("step",))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, []),
        (policies.nothing_saveable, []),
        (policies.save("product"), [PRODUCT]),
        (policies.save("product", "step"), [PRODUCT, STEP]),
        (policies.save("[pw]*"), [WAVE, PRODUCT]),
        (policies.save("inner"), [INNER]),
        (policies.save(primitive="dot_general"), [PRODUCT, STEP]),
        (policies.save(primitive=("cos",), path="encoder/*/attention"), [WAVE]),
        (policies.save(path="encoder/layer_0/attention", primitive="cos"), [WAVE]),
        (policies.save("product", dtype="bfloat16"), []),
        (policies.save("product", dtype=jnp.float32), [PRODUCT]),
        (policies.save("*", max_bytes=63), []),
        (policies.save("product", min_bytes="64B"), [PRODUCT]),
        (policies.save(min_flops_per_byte=1.0), [PRODUCT, STEP]),
        (policies.save_only_these_names("wave"), [WAVE]),
        (policies.save_any_names_but_these("wave", "inner"), [PRODUCT, STEP]),
        (policies.dots_saveable, [PRODUCT, STEP]),
        (policies.checkpoint_dots_with_no_batch_dims, [PRODUCT, STEP]),
        (policies.save("wave") | policies.save("product"), [WAVE, PRODUCT]),
        (policies.dots_saveable & policies.save("product"), [PRODUCT]),
        (policies.recompute("product") >> policies.dots_saveable, [STEP]),
        (policies.save_from_both_policies(policies.save("wave"), policies.save("step")), [WAVE, STEP]),
        # The derivative of exp is its value, so if that is saved, its operand is not needed.
        (policies.save("wave") | policies.save("inner"), [INNER]),
        (jax.checkpoint_policies.dots_saveable | policies.save("wave"), [WAVE, PRODUCT, STEP]),
        (policies.save("wave") | jax.checkpoint_policies.dots_saveable, [WAVE, PRODUCT, STEP]),
        (policies.recompute("step") >> jax.checkpoint_policies.dots_saveable, [PRODUCT]),
        (jax.checkpoint_policies.save_only_these_names("product") & policies.dots_saveable, [PRODUCT]),
        (policies.save("absent", strict=False), []),
    ],
    ids=repr,
)  # fmt: skip
def test_policies_save_what_they_say(policy, expected):
    assert saved(policy) == sorted(expected)
    remat.testing.assert_same_gradients(f, remat.checkpoint(f, policy=policy), X, X)


def test_save_anything_except_these_names_does_not_save_these_names():
    everything = saved(policies.everything_saveable)
    without = saved(policies.save_anything_except_these_names("inner", "step"))
    assert INNER in everything and INNER not in without
    assert len(without) > 3
    # The negation of a policy by name is equivalent.
    assert saved(~policies.save("inner", "step")) == without


def test_double_negation_saves_the_same():
    assert saved(~~policies.save("product")) == saved(policies.save("product"))


def test_names_speak_of_values_however_many_they_have():
    def g(w, x):
        h = remat.checkpoint_name(remat.checkpoint_name(jnp.sin(x @ w), "a"), "b")
        return jnp.sum(jnp.cos(h))

    assert saved(policies.save("a"), g) == saved(policies.save("b"), g) == [("sin", ("a", "b"))]
    assert ("sin", ("a", "b")) not in saved(
        policies.recompute("b") >> policies.everything_saveable, g
    )


@pytest.mark.parametrize(
    "policy", [policies.everything_saveable, jax.checkpoint_policies.everything_saveable]
)
def test_rearranged_and_cast_copies_are_not_saved_again(policy):
    def g(w, x):
        h = jnp.sin(x @ w)
        wide = jnp.broadcast_to(h[None], (5, 4, 4)).reshape(20, 4).T
        return (
            jnp.sum(jnp.cos(wide) * wide * h[0, 0] ** 2)
            + jnp.sum(h * jnp.cos(h))
            + jnp.sum(jnp.cos(h.astype(jnp.float16)).astype(jnp.float32))
        )

    kept = [p for p, _ in saved(policy, g)]
    assert not {"reshape", "transpose", "broadcast_in_dim", "convert_element_type"} & set(kept)
    remat.testing.assert_same_gradients(g, remat.checkpoint(g, policy=policy), X, X, rtol=1e-3)


def test_policies_are_equal_by_value_and_hashable():
    a = policies.save("x") | policies.recompute(min_bytes="1KiB") >> ~policies.dots_saveable
    b = policies.save("x") | policies.recompute(min_bytes=1024) >> ~policies.dots_saveable
    assert a == b and hash(a) == hash(b) and a is not b
    assert a != policies.save("y") | policies.recompute(min_bytes=1024) >> ~policies.dots_saveable


EVERY_POLICY = [
    *(p for p in vars(policies).values() if isinstance(p, policies.Policy)),
    policies.save("a*", primitive="sin", dtype=float, path="b", min_bytes=1, min_flops_per_byte=2),
    policies.recompute("a"),
    policies.offload("a"),
    policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    policies.save_anything_except_these_names("a"),
    policies.save_any_names_but_these("a"),
    policies.save_only_these_names("a"),
    policies.save_from_both_policies(policies.save("a"), jax.checkpoint_policies.dots_saveable),
    policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["a"], names_which_can_be_offloaded=["b"],
        offload_src="device", offload_dst="pinned_host",
    ),
    (policies.save("a") | policies.offload("b")) & ~policies.recompute("c") >> policies.save("d"),
]  # fmt: skip


@pytest.mark.parametrize("policy", EVERY_POLICY, ids=repr)
def test_a_copied_or_unpickled_policy_equals_the_original(policy):
    pickled = [pickle.loads(pickle.dumps(policy, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)]
    for again in (copy.copy(policy), copy.deepcopy(policy), *pickled):
        assert again == policy and hash(again) == hash(policy) and repr(again) == repr(policy)
    makers = remat.checkpoint(policy=policy)
    for again in (copy.deepcopy(makers), pickle.loads(pickle.dumps(makers))):
        assert again.keywords["policy"] == policy


def test_a_copied_policy_saves_the_same_and_does_not_trace_again():
    traces = []

    def g(x):
        traces.append(1)
        return jnp.sin(remat.checkpoint_name(jnp.sin(x), "x"))

    policy = policies.save("x")
    for p in (policy, copy.deepcopy(policy), pickle.loads(pickle.dumps(policy))):
        jax.grad(copy.deepcopy(remat.checkpoint(g, policy=p)))(jnp.float32(1.0))
        found = remat.residuals(remat.checkpoint(g, policy=p), jnp.float32(1.0))
        assert ("x",) in [r.names for r in found]
    assert len(traces) == 1


def test_equal_policies_do_not_trace_again():
    traces = []

    def g(x):
        traces.append(1)
        return jnp.sin(remat.checkpoint_name(x * 2, "x"))

    for _ in range(3):
        jax.grad(remat.checkpoint(g, policy=policies.save("x")))(1.0)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (policies.save("product"), {"product"}),
        (policies.save("product") | policies.save("step"), {"product", "step"}),
        (policies.save_any_names_but_these("step", "inner"), {"product", "wave"}),
        (policies.dots_saveable, {"product", "step"}),
        (policies.everything_saveable, {"product", "step"}),
        (policies.recompute(max_bytes=0) >> policies.dots_saveable, {"product", "step"}),
    ],
    ids=lambda p: repr(p) if not isinstance(p, set) else "",
)  # fmt: skip
def test_jax_checkpoint_takes_our_policies(policy, kept):
    g = jax.checkpoint(f, policy=policy)
    remat.testing.assert_same_gradients(f, g, X, X)
    computed = [r for r in remat.residuals(g, X, X) if r.kind == "computed"]
    assert computed
    assert {name for r in computed for name in r.names} <= kept | {"wave", "inner"}


@pytest.mark.parametrize(
    "policy",
    [policies.save(path="encoder"), policies.dots_saveable & policies.save("product"),
     policies.recompute("step") >> policies.dots_saveable, ~policies.save("product"),
     policies.save("product", primitive="dot_general"),
     policies.save_anything_except_these_names("product")],
    ids=repr,
)  # fmt: skip
def test_what_jax_checkpoint_cannot_tell_a_policy_is_an_error_there(policy):
    with pytest.raises(remat.PolicyError, match=r"Use remat\.checkpoint"):
        jax.grad(jax.checkpoint(f, policy=policy))(X, X)


@pytest.mark.parametrize("remade", [remat.checkpoint, former_jax_checkpoint])
@pytest.mark.parametrize(
    "policy",
    [
        lambda prim, *_, **__: prim.name in ("dot_general", "sin"),
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.save_only_these_names("product", "step"),
        jax.checkpoint_policies.everything_saveable,
    ],
)
def test_foreign_policies_mean_what_they_mean_to_jax(remade, policy):
    theirs = remat.saved_residuals(former_jax_checkpoint(f, policy=policy), X, X)
    ours = remat.saved_residuals(remade(f, policy=policy), X, X)
    assert list(map(_of_scan, ours)) == list(map(_of_scan, theirs))


def _of_scan(residual):
    """Return the residual of a scan. JAX splits a scan into a call and hoists operations out of the loop."""
    aval, origin = residual
    return aval, re.sub("closed_call|eval_jaxpr", "scan", origin)


def scaled_sin():
    """Return a primitive whose parameters have the names of those of policies."""
    primitive = Primitive("scaled_sin")
    primitive.def_impl(lambda x, /, **_: jnp.sin(x))
    primitive.def_abstract_eval(lambda x, /, **_: x)
    ad.primitive_jvps[primitive] = lambda primals, tangents, **params: (
        primitive.bind(*primals, **params),
        tangents[0] * jnp.cos(primals[0]),
    )
    names = ("prim", "eqn", "case", "name", "names", "function", "policy", "policy_1", "value")
    return lambda x: primitive.bind(x, **dict.fromkeys((*names, "args", "avals", "params", "p"), 1))


@pytest.mark.parametrize(
    "policy",
    [
        *(getattr(p, name)
          for p in (policies, jax.checkpoint_policies)
          for name in ("everything_saveable", "nothing_saveable", "dots_saveable",
                       "dots_with_no_batch_dims_saveable")),
        jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
        jax.checkpoint_policies.save_only_these_names("named"),
        jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_saveable, lambda prim, *_, **__: prim.name == "scaled_sin"
        ),
        jax.checkpoint_policies.dots_saveable | policies.save("named"),
        policies.save(primitive="scaled_sin"),
        lambda p, *avals, **params: p.name == "scaled_sin" and params["prim"] == 1,
        lambda prim, *args, case=None, **params: case == 1,
    ],
)  # fmt: skip
def test_a_primitive_may_call_its_parameters_as_a_policy_does(policy):
    sin = scaled_sin()

    def g(w, x):
        return jnp.sum(remat.checkpoint_name(sin(x @ w), "named") * (sin(sin(w)) @ x))

    assert jnp.allclose(jax.grad(remat.checkpoint(g, policy=policy))(X, X), jax.grad(g)(X, X))


@pytest.mark.parametrize("make", [policies.save, policies.recompute, policies.save_only_these_names,
                                  policies.save_anything_except_these_names])  # fmt: skip
def test_a_name_that_matches_nothing_is_an_error_with_the_names_there_are(make):
    with pytest.raises(remat.UnknownNameError, match=r"did you mean 'product'.*'inner'.*'wave'"):
        remat.checkpoint(f, policy=make("prodct"))(X, X)
    remat.checkpoint(f, policy=make("prodct", strict=False))(X, X)


def test_a_path_that_matches_nothing_is_an_error_with_the_paths_there_are():
    with pytest.raises(remat.UnknownNameError, match="encoder/layer_0/attention"):
        remat.checkpoint(f, policy=policies.save(path="decoder"))(X, X)


@jax.custom_jvp
def jvp_rule(x):
    return jnp.sin(x)


@jvp_rule.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return jvp_rule(x), t * remat.checkpoint_name(jnp.cos(x), "slope")


@jax.custom_vjp
def vjp_rules(x):
    return jnp.sin(x)


vjp_rules.defvjp(
    lambda x: (jnp.sin(x), remat.checkpoint_name(jnp.cos(x), "slope")),
    lambda slope, ct: (ct * remat.checkpoint_name(jvp_rule(slope), "backward"),),
)


@jax.custom_batching.custom_vmap
def vmap_rule(x, y):
    return jnp.sin(x) * y


@vmap_rule.def_vmap
def _(axis_size, in_batched, x, y):
    name = "both" if all(in_batched) else "first" if in_batched[0] else "second"
    x, y = (a if batched else jnp.stack([a] * axis_size) for a, batched in zip((x, y), in_batched))
    return remat.checkpoint_name(jnp.sin(x), name) * y, True


def transpose_rule(x):
    scale = lambda slope, x: slope * x  # noqa: E731
    back = lambda slope, ct: remat.checkpoint_name(slope * ct, "slope")  # noqa: E731
    return jax.custom_derivatives.linear_call(scale, back, jnp.float32(2.0), x)


def sharded(x):
    mesh = jax.make_mesh((1,), ("i",))
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(jvp_rule, mesh=mesh, in_specs=spec, out_specs=spec)(x)


RULES = [
    pytest.param(jvp_rule, "slope", id="custom_jvp"),
    pytest.param(vjp_rules, "slope", id="custom_vjp, forward"),
    pytest.param(vjp_rules, "backward", id="custom_vjp, backward"),
    pytest.param(vjp_rules, "slope", id="rule in a rule"),
    pytest.param(lambda x: vmap_rule(x, x + 1), "both", id="custom_vmap"),
    pytest.param(lambda x: vmap_rule(x, x + 1), "second", id="custom_vmap, some operands"),
    pytest.param(transpose_rule, "slope", id="linear_call"),
    pytest.param(lambda x: jax.jit(jvp_rule)(x), "slope", id="jit"),
    pytest.param(lambda x: jax.lax.map(jvp_rule, x[None])[0], "slope", id="scan"),
    pytest.param(sharded, "slope", id="shard_map"),
]


@pytest.mark.parametrize(("fun", "name"), RULES)
def test_names_in_rules_count_as_names_of_the_function(fun, name):
    def f(x):
        return jnp.sum(jnp.sin(fun(x)))

    x = jnp.array([0.3, 0.5])
    remat.checkpoint(f, policy=policies.save(name))(x)
    with pytest.raises(remat.UnknownNameError, match=f"did you mean '{name}'"):
        remat.checkpoint(f, policy=policies.save(name + "s"))(x)
    if fun is transpose_rule and getattr(jax.config, "jax_remat3", False):
        with pytest.raises(NotImplementedError, match="linear_call"):
            jax.grad(f)(
                x
            )  # names are high-level primitives there, which JAX's linear_call does not support
    elif name == "slope":  # JAX differentiates custom_vmap in reverse only if it is batched
        jax.grad(remat.checkpoint(f, policy=policies.save(name)))(x)


def test_names_in_derivative_rules_are_saved():
    def f(w, x):
        return jnp.sum(vjp_rules(x @ w))

    assert saved(policies.save("slope"), f) == [("cos", ("slope",))]


def test_names_in_batching_rules_are_saved():
    g = jax.vmap(remat.checkpoint(lambda x: vmap_rule(x, x + 1), policy=policies.save("both")))
    found = remat.residuals(lambda x: jnp.sum(jnp.sin(g(x))), jnp.arange(3.0))
    assert ("sin", ("both",)) in [(r.primitive, r.names) for r in found]


def test_a_rule_that_cannot_be_traced_alone_is_awaited():
    @jax.custom_batching.custom_vmap
    def f(x):
        return jnp.sin(x)

    @f.def_vmap
    def rule(axis_size, in_batched, x):
        if axis_size != 3:
            raise NotImplementedError
        return remat.checkpoint_name(jnp.sin(x), "three"), True

    checkpointed = remat.checkpoint(lambda x: f(x) * 2, policy=policies.save("tree"))
    checkpointed(1.0)  # the name is not known yet
    with pytest.raises(remat.UnknownNameError, match="did you mean 'three'"):
        jax.vmap(checkpointed)(jnp.arange(3.0))


@pytest.mark.parametrize(
    "activation", [jax.nn.relu, jax.nn.relu6, lambda x: jnp.logaddexp(x, 0 * x)]
)
def test_a_rule_that_calls_its_function_again_hides_no_misspelt_name(activation):
    def f(x):
        return remat.checkpoint_name(activation(jnp.sin(x)), "hidden")

    with pytest.raises(remat.UnknownNameError, match="did you mean 'hidden'"):
        jax.grad(remat.checkpoint(f, policy=policies.save("hiden")))(0.5)
    with pytest.raises(remat.UnknownNameError, match=r"nothing .* is at 'attention'"):
        jax.grad(remat.checkpoint(f, policy=policies.save(path="attention")))(0.5)


def test_a_primitive_that_does_not_exist_is_an_error_with_the_closest_one():
    for name in ("sinn", "pjit"):
        with pytest.raises(
            remat.UnknownNameError, match=r"did you mean 'sin|jit'\?.*'dot_general'"
        ):
            remat.checkpoint(f, policy=policies.save(primitive=(name, "cos")))(X, X)
    remat.checkpoint(f, policy=policies.save(primitive="sinn", strict=False))(X, X)
    remat.checkpoint(f, policy=policies.save(primitive="cholesky"))(X, X)  # exists, but not in f


def test_offloaded_values_wait_in_host_memory():
    policy = policies.offload("product") | policies.save("step")
    found = {r.names: r for r in remat.residuals(remat.checkpoint(f, policy=policy), X, X)}
    assert found["product",].offloaded and not found["step",].offloaded
    whole = remat.residuals(remat.checkpoint(f, policy=policy), X, X)
    assert (whole.offloaded_bytes, whole.saved_bytes) == (64, 192)
    remat.testing.assert_same_gradients(f, remat.checkpoint(f, policy=policy), X, X)
    jax.jit(jax.grad(remat.checkpoint(f, policy=policy)))(X, X)


def test_a_named_input_is_offloaded_in_its_place():
    def g(w, x):
        x = remat.checkpoint_name(x, "input")
        return jnp.sum(jnp.sin(jnp.sin(x @ w)))

    def two(w, x):
        return remat.checkpoint(g, policy=policies.offload("input"))(w, jnp.cos(x))

    computed = [r for r in remat.residuals(two, X, X) if r.kind == "computed" and r.names]
    assert [(r.names, r.offloaded) for r in computed] == [(("input",), True)]


@pytest.mark.parametrize(
    "policy",
    [policies.offload("x", dst="pined_host"), policies.offload("x", src="hbm"),
     policies.save("a") | policies.offload("x", dst="nowhere"),
     policies.offload_dot_with_no_batch_dims("device", "nowhere")],
    ids=repr,
)  # fmt: skip
def test_a_memory_that_the_backend_does_not_have_is_an_error_with_those_it_has(policy):
    with pytest.raises(remat.MemoryKindError, match=r"'device'.*'pinned_host'"):
        remat.checkpoint(f, policy=policy)


def twice_sin(x):
    return jnp.sum(jnp.sin(remat.checkpoint_name(jnp.sin(x), "inner")) * x)


def looped(x):
    step = lambda c, y: (jnp.sin(c * y), remat.checkpoint_name(jnp.cos(c), "inner"))  # noqa: E731
    c, ys = jax.lax.scan(step, x[0], jnp.sin(x))
    return c * jnp.sum(jnp.sin(ys))


def offload_all_results(prim, *_, **__):
    return _jax.Offloadable("device", "pinned_host") if prim.name != "name" else False


OFFLOADING = [
    policies.offload(),
    offload_all_results,
    jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["inner"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
]


@pytest.mark.parametrize("fun", [twice_sin, looped])
@pytest.mark.parametrize("policy", OFFLOADING, ids=["ours", "callable", "jax"])
def test_offloaded_values_are_differentiated_twice_in_reverse(policy, fun):
    x = jnp.array([0.3, 0.5])
    ours = jax.jit(jax.jacrev(jax.grad(remat.checkpoint(fun, policy=policy))))(x)
    assert jnp.allclose(ours, jax.hessian(fun)(x), rtol=1e-4)


@pytest.mark.parametrize("order", ["vmap of grad", "grad of grad"])
def test_branches_offload_values(order):
    def by_case(case, x):
        one = lambda x: jnp.sin(remat.checkpoint_name(jnp.sin(x), "inner"))  # noqa: E731
        inner = lambda x: lax.cond(x.sum() > 0.5, one, jnp.cos, jnp.tanh(one(x)))  # noqa: E731
        return jnp.sum(jnp.sin(lax.switch(case, [one, inner, jnp.cos], x)))

    def derivative(f):
        if order == "vmap of grad":
            return jax.vmap(jax.grad(f, 1))(jnp.arange(3), xs)
        return jnp.stack(
            [jax.grad(lambda x, i=i: jax.grad(f, 1)(i, x).sum())(xs[i]) for i in range(3)]
        )

    xs = jnp.array([[0.3, 0.5], [0.2, 0.4], [0.1, 0.6]])
    offloading = remat.checkpoint(by_case, policy=policies.offload("inner"))
    assert any(r.offloaded for r in remat.residuals(offloading, 1, xs[1]))
    assert jnp.allclose(jax.jit(lambda: derivative(offloading))(), derivative(by_case), rtol=1e-4)


@pytest.mark.parametrize("policy", OFFLOADING, ids=["ours", "callable", "jax"])
def test_copies_that_a_policy_made_are_not_offloaded_again(policy):
    third = lambda f: jax.grad(jax.grad(jax.grad(f)))  # noqa: E731
    assert jnp.allclose(
        third(remat.checkpoint(twice_sin, policy=policy))(0.3), third(twice_sin)(0.3)
    )


def test_results_of_one_equation_are_offloaded_together_and_differentiated_twice():
    def f(x):
        a, b = jnp.split(jnp.sin(x), 2)
        return jnp.sum(jnp.sin(a) * jnp.sin(b) * a * b)

    def policy(prim, *_, **__):
        return prim.name == "split" and _jax.Offloadable("device", "pinned_host")

    x = jnp.arange(4.0)
    found = remat.residuals(remat.checkpoint(f, policy=policy), x)
    assert sum(r.offloaded for r in found) == 2
    ours = jax.jit(jax.jacrev(jax.grad(remat.checkpoint(f, policy=policy))))(x)
    assert jnp.allclose(ours, jax.jit(jax.hessian(f))(x), rtol=1e-4)


def test_saving_and_offloading_one_name_is_refused():
    with pytest.raises(remat.PolicyError, match=r"intersection is \['b'\]"):
        policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["a", "b"], names_which_can_be_offloaded=["b"],
            offload_src="device", offload_dst="pinned_host",
        )  # fmt: skip


@pytest.mark.parametrize("bad", [1, True, ["dots_saveable"], object(), policies])
def test_what_is_no_policy_is_refused(bad):
    with pytest.raises(remat.PolicyError, match="callable"):
        remat.checkpoint(f, policy=bad)
    with pytest.raises(remat.PolicyError):
        _ = policies.save("a") | bad


def save_product(*names):
    return jax.checkpoint_policies.save_only_these_names("product", *names)


class Callable:
    def __call__(self, *_, **__):
        return True


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (policies.save, r"write remat\.policies\.save\(\.\.\.\)"),
        (policies.save_only_these_names, r"remat\.policies\.save_only_these_names is a function"),
        (jax.checkpoint_policies.save_only_these_names, r"jax\.checkpoint_policies\.save_only"),
        (jax.checkpoint_policies.save_from_both_policies, r"jax\.checkpoint_policies\.save_from"),
        (Callable, "an instance of a class, not the class Callable"),
        ("dots_saveable", r"write remat\.policies\.dots_saveable\."),
        ("save_only_these_names", r"write remat\.policies\.save_only_these_names\(\.\.\.\)"),
        ("dots_savable", "did you mean 'dots_saveable'"),
    ],
)
def test_what_almost_is_a_policy_is_refused_with_what_to_write(bad, message):
    with pytest.raises(remat.PolicyError, match=message):
        remat.checkpoint(f, policy=bad)
    with pytest.raises(remat.PolicyError, match=message):
        _ = policies.dots_saveable | bad


@pytest.mark.parametrize("bad", [save_product, lambda prim, *_: prim.name == "sin"])
def test_a_callable_that_cannot_be_asked_about_an_equation_is_refused(bad):
    with pytest.raises(remat.PolicyError, match="call it and pass its result"):
        jax.grad(remat.checkpoint(f, policy=bad))(X, X)


def test_a_policy_may_raise_what_it_wants():
    def policy(prim, *_, **__):
        return prim.name + 1

    with pytest.raises(TypeError, match="concatenate"):
        jax.grad(remat.checkpoint(f, policy=policy))(X, X)


def test_a_misspelt_policy_is_an_error_with_the_closest_one():
    with pytest.raises(AttributeError, match=r"'remat\.policies'.*did you mean 'dots_saveable'"):
        _ = policies.dots_savable
    assert not hasattr(policies, "__wrapped__")


def test_a_policy_that_is_not_hashable_is_refused():
    class Unhashable:
        __hash__ = None

        def __call__(self, *_, **__):
            return True

    with pytest.raises(remat.PolicyError, match="hashable"):
        remat.checkpoint(f, policy=Unhashable())


@pytest.mark.parametrize("bad", [3, "", None, b"x", ["a", "b"]])
def test_names_in_policies_are_strings(bad):
    with pytest.raises(remat.PolicyError, match="non-empty strings"):
        policies.save(bad)


@pytest.mark.parametrize(
    "selectors",
    [
        *({"min_flops_per_byte": x} for x in ("x", True, -1, np.nan, np.inf, np.True_, 2j, [1.0])),
        *({"min_bytes": x} for x in (True, -1, np.nan, np.inf, "x", [1])),
        {"min_bytes": "1KiB", "max_bytes": 3},
        *({"dtype": x} for x in ("flot32", str, object, 3, jnp.floating, [jnp.float32, "x"])),
        *({"primitive": x} for x in (3, "", jax.lax.sin_p, ["sin", None])),
        *({"path": x} for x in (3, "", ["a"])),
        *({"strict": x} for x in (None, 1, "yes")),
    ],
    ids=repr,
)
def test_selectors_that_select_nothing_by_mistake_are_refused(selectors):
    for make in (policies.save, policies.recompute, policies.offload):
        with pytest.raises((remat.PolicyError, remat.UnitsError)):
            make(**selectors)


def test_memories_in_policies_are_different_kinds():
    for kinds in ({"src": 3}, {"dst": None}, {"dst": ""}, {"dst": "device"}):
        with pytest.raises(remat.PolicyError):
            policies.offload("a", **kinds)
    with pytest.raises(remat.PolicyError):
        policies.offload_dot_with_no_batch_dims("device", None)


def test_selectors_may_be_given_in_every_form():
    assert policies.save(primitive=iter(["sin", "cos"])) == policies.save(primitive=("sin", "cos"))
    assert policies.save(primitive={"sin", "cos"}) == policies.save(primitive={"cos", "sin"})
    assert policies.save(primitive=None, dtype=None) == policies.save()
    assert policies.save(dtype=float) == policies.save(dtype=jnp.float32)
    assert policies.save(dtype=np.dtype("int8")) == policies.save(dtype=["int8"])
    assert policies.save(min_flops_per_byte=np.int64(2)) == policies.save(min_flops_per_byte=2.0)


def test_a_list_of_names_is_not_one_string():
    with pytest.raises(remat.PolicyError, match=r"write \['ab'\]"):
        policies.save_and_offload_only_these_names(
            names_which_can_be_saved="ab", names_which_can_be_offloaded=[],
            offload_src="device", offload_dst="pinned_host",
        )  # fmt: skip


def test_a_policy_selects_random_keys_by_their_type():
    def g(x, key):
        return jnp.sum(jnp.sin(x) * jax.random.normal(jax.random.split(key)[0], x.shape))

    key = jax.random.key(0)
    policy = policies.save(dtype=key.dtype)
    found = remat.residuals(remat.checkpoint(g, policy=policy), jnp.ones(2), key)
    assert {str(key.dtype)} == {r.dtype for r in found if r.kind == "computed"}


@pytest.mark.parametrize("make", [policies.save, policies.recompute, policies.offload])
def test_help_shows_every_selector(make):
    shown = inspect.signature(make).parameters
    selectors = [field.name for field in dataclasses.fields(Selector)]
    assert [name for name in shown if name in selectors] == selectors
    assert set(shown) - set(selectors) == ({"src", "dst"} if make is policies.offload else set())
    for name in selectors[1:]:
        make(**{name: shown[name].default})


@pytest.mark.parametrize("make", [policies.save, policies.recompute, policies.offload])
def test_a_misspelt_selector_is_refused_with_the_closest(make):
    with pytest.raises(TypeError, match="did you mean 'min_bytes'"):
        make(min_byte=3)
