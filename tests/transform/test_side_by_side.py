"""Behaviour that `jax.checkpoint` and `remat.checkpoint` share: each test runs with both.

Since 0.12 JAX has a second implementation, `jax_remat3`, which is to replace the first. A section below tests
its differences, and what `remat.checkpoint` does. If only the first implementation agrees with
`remat.checkpoint`, tests compare with the first, also if `JAX_REMAT3=1` is set.
"""

import contextlib
import functools
import io
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import ad_checkpoint as jax_internal
from support import HAS_REMAT3, count, former_jax_checkpoint, remat3

import remat
from remat import checkpoint_name

P = jax.checkpoint_policies
BOTH = pytest.mark.parametrize("ck", [jax.checkpoint, remat.checkpoint], ids=["jax", "remat"])
BOTH_WITHOUT_REMAT3 = pytest.mark.parametrize(
    "ck", [former_jax_checkpoint, remat.checkpoint], ids=["jax", "remat"]
)


def save_sin(prim, *_, **__):
    return prim.name == "sin"


def save_cos(prim, *_, **__):
    return prim.name == "cos"


# --------------------------------------------------------------------------------------------------
# Programs


@jax.custom_jvp
def own_sin(x):
    return jnp.sin(x)


@own_sin.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return own_sin(x), jnp.cos(x) * t


@jax.custom_vjp
def own_vjp(x):
    return jnp.sin(x)


own_vjp.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda c, ct: (c * ct,))


@jax.custom_vjp
def named_vjp(x):
    return jnp.sin(x)


named_vjp.defvjp(lambda x: (jnp.sin(x), checkpoint_name(jnp.cos(x), "a")), lambda c, ct: (c * ct,))


def sin3(x):
    return jnp.sin(jnp.sin(jnp.sin(x)))


def named3(x):
    return jnp.sin(checkpoint_name(jnp.sin(checkpoint_name(jnp.sin(x), "a")), "b"))


def dots(x):
    m = jnp.ones((2, 2), x.dtype) * x
    for _ in range(3):
        m = jnp.sin(jnp.dot(m, m, precision=lax.Precision.HIGHEST))
    return jnp.sum(m)


def batched_dots(x):
    m = jnp.ones((2, 2, 2), x.dtype) * x
    for _ in range(2):
        m = jnp.sin(jnp.einsum("bij,bjk->bik", m, m))
    return jnp.sum(m)


def jitted(x):
    return jnp.sin(jax.jit(lambda x: jnp.sin(jnp.sin(x)))(x))


def scanned(x):
    return lax.scan(lambda c, _: (jnp.sin(jnp.sin(c)), None), x, None, length=3)[0]


def scanned_dots(x):
    def step(c, w):
        return jnp.sin(jnp.sin(c @ w)), None

    ws = jnp.ones((3, 2, 2), x.dtype)
    return jnp.sum(lax.scan(step, jnp.ones((2, 2), x.dtype) * x, ws)[0])


def scanned_names(x):
    def step(c, _):
        return jnp.sin(checkpoint_name(jnp.sin(c), "a")), None

    return lax.scan(step, x, None, length=3)[0]


def branched(x):
    return lax.cond(x > 0, lambda x: jnp.sin(jnp.sin(x)), lambda x: x * 2, x)


def switched(x):
    branches = [sin3, lambda x: jnp.sin(x), lambda x: x]
    return lax.switch(jnp.int32(x), branches, jnp.sin(x))


def fori(x):
    return lax.fori_loop(0, 3, lambda _, c: jnp.sin(jnp.sin(c)), x)


def own_jvp_rule(x):
    return own_sin(own_sin(x))


def own_vjp_rule(x):
    return own_vjp(own_vjp(x))


def named_vjp_rule(x):
    return named_vjp(named_vjp(jnp.sin(x)))


def scanned_own_vjp(x):
    return lax.scan(lambda c, _: (own_vjp(own_vjp(c)), None), x, None, length=3)[0]


def reciprocals(x):
    return jnp.exp(jnp.tanh(1 / jnp.sin(x))) * jnp.sqrt(jnp.sin(x))


def unused_work(x):
    jnp.sin(jnp.cos(jnp.sin(x)))
    return jnp.sin(x)


def linear(x):
    return x * 2 + 1


def nested(ck):
    return lambda x: jnp.sin(ck(lambda x: jnp.sin(jnp.sin(x)))(x))


def nested_save(ck):
    return lambda x: jnp.sin(ck(named3, policy=P.save_only_these_names("a"))(x))


PROGRAMS = [
    sin3, named3, dots, batched_dots, jitted, scanned, scanned_dots, scanned_names, branched,
    switched, fori, own_jvp_rule, own_vjp_rule, named_vjp_rule, scanned_own_vjp, reciprocals,
    unused_work, linear,
]  # fmt: skip
POLICIES = {
    "none": None,
    "nothing": P.nothing_saveable,
    "everything": P.everything_saveable,
    "dots": P.dots_saveable,
    "dots without batch": P.dots_with_no_batch_dims_saveable,
    "sin": save_sin,
    "cos": save_cos,
    "a": P.save_only_these_names("a"),
    "not a": P.save_any_names_but_these("a"),
    "a or dots": P.save_from_both_policies(P.save_only_these_names("a"), P.dots_saveable),
}
COUNTED = ("sin", "cos", "dot_general", "tanh", "exp")


def counts(jaxpr):
    return {name: count(jaxpr, name) for name in COUNTED}


def of_gradient(f, x):
    return counts(jax.make_jaxpr(jax.grad(f))(x))


def of_backward(f, x):
    _, pullback = jax.vjp(f, x)
    return counts(jax.make_jaxpr(pullback)(jnp.ones_like(x)))


def of_linearized(f, x):
    _, push = jax.linearize(f, x)
    return counts(jax.make_jaxpr(push)(x))


def of_compiled_gradient(f, x):
    return counts(jax.make_jaxpr(jax.jit(jax.grad(f)))(x))


def of_vmapped_gradient(f, x):
    return counts(jax.make_jaxpr(jax.vmap(jax.grad(f)))(jnp.stack([x, x])))


def of_hessian(f, x):
    return counts(jax.make_jaxpr(jax.grad(jax.grad(f)))(x))


NO_JVP = (own_vjp_rule, named_vjp_rule, scanned_own_vjp)


def views(f):
    yield of_gradient
    yield of_backward
    if f not in NO_JVP:
        yield of_linearized
    if f in (sin3, scanned_names, named_vjp_rule):
        yield from (of_compiled_gradient, of_vmapped_gradient, of_hessian)


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("policy", POLICIES)
def test_both_recompute_the_same_operations(f, policy):
    ours, theirs = (ck(f, policy=POLICIES[policy]) for ck in (remat.checkpoint, jax.checkpoint))
    for view in views(f):
        with remat3(False):
            expected = view(theirs, 0.7)
        assert view(ours, 0.7) == expected, view.__name__


@pytest.mark.parametrize("policy", ["none", "a", "sin", "everything"])
@pytest.mark.parametrize("make", [nested, nested_save], ids=["plain", "saving"])
@pytest.mark.parametrize("around", ["nothing", "checkpoint"])
def test_both_recompute_the_same_operations_when_nested(make, policy, around):
    def program(ck):
        f = make(ck)
        return ck(f, policy=POLICIES[policy]) if around == "checkpoint" else f

    for view in (of_gradient, of_backward, of_linearized, of_hessian):
        with remat3(False):
            expected = view(program(jax.checkpoint), 0.7)
        assert view(program(remat.checkpoint), 0.7) == expected


@BOTH_WITHOUT_REMAT3
@pytest.mark.parametrize(
    ("f", "policy", "sin", "cos"),
    [
        # The backward pass of three nested sines recomputes two sines and three cosines.
        (sin3, None, 2, 3),
        (sin3, P.everything_saveable, 0, 0),
        (sin3, save_sin, 0, 3),
        (sin3, save_cos, 0, 0),
        (named3, P.save_only_these_names("a"), 1, 3),
        (named3, P.save_only_these_names("a", "b"), 0, 3),
        (linear, None, 0, 0),
        (own_jvp_rule, None, 1, 2),
        (own_vjp_rule, None, 1, 2),
        (branched, None, 1, 2),
    ],
)
def test_the_backward_pass_recomputes(ck, f, policy, sin, cos):
    found = of_backward(ck(f, policy=policy), 0.7)
    assert (found["sin"], found["cos"]) == (sin, cos)


# --------------------------------------------------------------------------------------------------
# How often Python functions run, and the program


def _traces(ck, use):
    traces = []

    def f(x):
        traces.append(None)
        return jnp.sin(jnp.sin(x))

    use(ck(f))
    return len(traces)


USES = {
    "call": (lambda f: f(1.0), 1),
    "two calls": (lambda f: (f(1.0), f(2.0)), 1),
    "grad": (lambda f: jax.grad(f)(1.0), 1),
    "grad, twice": (lambda f: (jax.grad(f)(1.0), jax.grad(f)(2.0)), 1),
    "jit of grad": (lambda f: jax.jit(jax.grad(f))(1.0), 1),
    "hessian": (lambda f: jax.hessian(f)(1.0), 1),
    "vmap of grad": (lambda f: jax.vmap(jax.grad(f))(jnp.ones(2)), 1),
    "scan": (lambda f: lax.scan(lambda c, _: (f(c), None), 1.0, None, length=3), 1),
    "two dtypes": (lambda f: (f(1.0), f(jnp.float16(1.0))), 2),
    "two shapes": (lambda f: (f(jnp.ones(2)), f(jnp.ones(3))), 2),
    "weak and strong": (lambda f: (f(1.0), f(jnp.float32(1.0))), 2),
    "six blocks": (lambda f: jax.grad(lambda x: f(f(f(f(f(f(x)))))))(1.0), 1),
}


@BOTH
@pytest.mark.parametrize("name", USES)
def test_python_runs_once_for_each_signature(ck, name):
    use, expected = USES[name]
    assert _traces(ck, use) == expected


def _prints(capfd, ck, use):
    def f(x):
        jax.debug.print("seen {}", x)
        return jnp.sin(jnp.sin(x))

    capfd.readouterr()
    jax.block_until_ready(use(ck(f)))
    jax.effects_barrier()
    return capfd.readouterr().out.count("seen")


PRINTS = {
    "call": (lambda f: f(1.0), 1),
    "jit": (lambda f: jax.jit(f)(1.0), 1),
    "grad": (lambda f: jax.grad(f)(1.0), 2),
    "jit of grad": (lambda f: jax.jit(jax.grad(f))(1.0), 2),
    "vjp without pulling back": (lambda f: jax.vjp(f, 1.0)[0], 1),
    "jvp": (lambda f: jax.jvp(f, (1.0,), (1.0,)), 1),
    "vmap": (lambda f: jax.vmap(f)(jnp.ones(3)), 3),
    "vmap of grad": (lambda f: jax.vmap(jax.grad(f))(jnp.ones(3)), 6),
    "grad of scan": (
        lambda f: jax.grad(lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=3)[0])(
            1.0
        ),
        6,
    ),
}


@BOTH
@pytest.mark.parametrize("name", PRINTS)
def test_debug_print_prints_again_in_the_recomputation(capfd, ck, name):
    use, expected = PRINTS[name]
    assert _prints(capfd, ck, use) == expected


@BOTH
def test_an_unordered_callback_runs_again_in_the_recomputation(ck):
    seen = []

    def f(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return jnp.sin(jnp.sin(x))

    jax.block_until_ready(jax.grad(ck(f))(1.0))
    jax.effects_barrier()
    assert seen == [1.0, 1.0]


@BOTH
@pytest.mark.parametrize("policy", [None, P.everything_saveable], ids=["none", "everything"])
def test_a_pure_callback_runs_again_unless_its_result_is_saved(ck, policy):
    seen = []

    def host(x):
        seen.append(None)
        return np.sin(x)

    @functools.partial(ck, policy=policy)
    def f(x):
        y = jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), lax.stop_gradient(x))
        return jnp.sin(x * lax.stop_gradient(y))

    jax.block_until_ready(jax.jit(jax.value_and_grad(f))(jnp.float32(1.0)))
    assert len(seen) == (1 if policy else 2)


# --------------------------------------------------------------------------------------------------
# The lowered program


@BOTH_WITHOUT_REMAT3
@pytest.mark.parametrize("prevent_cse", [True, False])
def test_a_barrier_is_in_the_gradient_and_nowhere_else(ck, prevent_cse):
    f = ck(lambda x: jnp.sin(jnp.sin(x)), prevent_cse=prevent_cse)

    def has_barrier(g):
        return "optimization_barrier" in jax.jit(g).lower(1.0).as_text()

    assert not has_barrier(f)
    assert not has_barrier(jax.vmap(f, axis_size=2, in_axes=None, out_axes=None))
    assert not has_barrier(lambda x: jax.jvp(f, (x,), (x,)))
    assert has_barrier(jax.grad(f)) == prevent_cse
    assert has_barrier(jax.grad(jax.grad(f))) == prevent_cse
    assert has_barrier(lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, x]))) == prevent_cse


@BOTH
def test_name_scopes_are_kept(ck):
    @ck
    def f(x):
        with jax.named_scope("layer"):
            return jnp.sin(jnp.sin(x))

    text = jax.jit(jax.grad(f)).lower(1.0).as_text(debug_info=True)
    assert "checkpoint" in text
    assert "rematted_computation" in text
    assert "layer" in text


@BOTH
def test_memory_kinds_of_offloaded_names_are_in_the_program(ck):
    policy = P.save_and_offload_only_these_names(
        names_which_can_be_saved=["b"],
        names_which_can_be_offloaded=["a"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(x):
        return jnp.sum(ck(named3, policy=policy)(x))

    def loop(x):
        step = lambda c, _: (ck(named3, policy=policy)(c), None)  # noqa: E731
        return jnp.sum(lax.scan(step, x, None, length=3)[0])

    x = jnp.arange(4.0)
    for f, plain in ((loss, lambda x: jnp.sum(named3(x))), (loop, None)):
        g = jax.jit(jax.grad(f))
        text = str(jax.make_jaxpr(g)(x))
        assert "f32<host>" in text or "<host>" in text
        if plain is not None:
            np.testing.assert_allclose(g(x), jax.grad(plain)(x), rtol=1e-5)


@BOTH
@pytest.mark.parametrize("where", ["unrolled", "scan"])
def test_offloaded_residuals_give_the_same_gradient(ck, where):
    policy = P.offload_dot_with_no_batch_dims("device", "pinned_host")
    w = jnp.eye(3) * 0.5

    def block(x):
        return jnp.sin(jnp.sin(x @ w) @ w)

    def loss(f, x):
        if where == "unrolled":
            return jnp.sum(f(f(x)))
        return jnp.sum(lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0])

    x = jnp.arange(9.0).reshape(3, 3)
    actual = jax.jit(jax.grad(lambda x: loss(ck(block, policy=policy), x)))(x)
    np.testing.assert_allclose(actual, jax.grad(lambda x: loss(block, x))(x), rtol=1e-5)


# --------------------------------------------------------------------------------------------------
# Saved values


def _theirs(f, *args):
    return sorted(str(aval) for aval, _ in jax_internal.saved_residuals(f, *args))


def _ours(f, *args):
    return sorted(str(aval) for aval, _ in remat.saved_residuals(f, *args))


@pytest.mark.parametrize("policy", ["none", "everything", "sin", "cos", "a", "dots"])
@pytest.mark.parametrize(
    "f",
    [sin3, named3, dots, own_jvp_rule, own_vjp_rule, named_vjp_rule, unused_work, linear],
    ids=lambda f: f.__name__,
)
def test_both_save_the_same_residuals(f, policy):
    ours, theirs = (ck(f, policy=POLICIES[policy]) for ck in (remat.checkpoint, jax.checkpoint))
    with remat3(False):
        expected = _theirs(theirs, 0.7)
    assert _ours(ours, 0.7) == expected


def test_saved_residuals_reads_jax_checkpoint_as_jax_does():
    f = jax.checkpoint(named3, policy=P.save_only_these_names("a"))
    assert _ours(f, 0.7) == _theirs(f, 0.7)


def test_wording_is_that_of_jax():
    f = lambda ck: ck(named3, policy=P.save_only_these_names("a"))  # noqa: E731
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        remat.print_saved_residuals(f(remat.checkpoint), 0.7)
    theirs = [w for _, w in jax_internal.saved_residuals(f(jax.checkpoint), 0.7)]
    assert [line.split(" ", 1)[1] for line in out.getvalue().splitlines()] == theirs


@BOTH_WITHOUT_REMAT3
def test_what_is_saved_is_logged_when_asked(ck, caplog):
    f = ck(named3, policy=P.save_only_these_names("a"))
    jax.config.update("jax_log_checkpoint_residuals", True)
    try:
        with caplog.at_level(logging.WARNING):
            jax.grad(f)(0.7)
    finally:
        jax.config.update("jax_log_checkpoint_residuals", False)
    assert "float32[]" in caplog.text
    assert "remat-decorated function saving inputs with shapes" in caplog.text


# --------------------------------------------------------------------------------------------------
# Errors


@BOTH_WITHOUT_REMAT3
def test_branching_on_a_value_points_at_static_argnums(ck):
    with pytest.raises(jax.errors.ConcretizationTypeError, match="static_argnums"):
        ck(lambda x: x if x > 0 else -x)(1.0)


@BOTH
def test_an_error_in_the_function_comes_through(ck):
    def f(x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        jax.grad(ck(f))(1.0)


@BOTH
def test_a_result_that_is_no_array_is_a_type_error(ck):
    with pytest.raises(TypeError):
        ck(lambda x: "text")(1.0)


@BOTH
def test_an_argument_that_is_no_array_is_a_type_error(ck):
    with pytest.raises(TypeError):
        ck(lambda x: 1.0)("text")


@BOTH_WITHOUT_REMAT3
def test_static_argnums_out_of_range_is_a_value_error(ck):
    with pytest.raises(ValueError, match="static_argnums"):
        ck(lambda x: x, static_argnums=3)(1.0)


@pytest.mark.parametrize("prevent_cse", ["yes", 1.0, (), (True, "no"), (True,), (True, True, True)])
def test_prevent_cse_that_is_no_bool_and_no_prefix_is_a_type_error(prevent_cse):
    """JAX accepts some of these without an error."""
    with pytest.raises(TypeError, match="prevent_cse"):
        remat.checkpoint(lambda x, y: x, prevent_cse=prevent_cse)(1.0, 2.0)


@BOTH
def test_reverse_mode_through_while_is_refused_in_the_same_words(ck):
    f = ck(lambda x: lax.while_loop(lambda c: c < 9, lambda c: c * 2, x))
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(f)(1.0)


@BOTH
def test_io_callbacks_that_are_ordered_are_refused_when_differentiated(ck):
    from jax.experimental import io_callback

    def f(x):
        io_callback(lambda x: None, None, lax.stop_gradient(x), ordered=True)
        return jnp.sin(x)

    ck(f)(1.0)
    jax.effects_barrier()
    with pytest.raises(NotImplementedError, match="Effects not supported"):
        jax.grad(ck(f))(1.0)


# --------------------------------------------------------------------------------------------------
# JAX's second implementation of remat

WITH_REMAT3 = pytest.mark.skipif(not HAS_REMAT3, reason="this version of JAX has no jax_remat3")
# It asks a policy only about dot products, convolutions and names, and before differentiation. Like JAX's
# first implementation, `remat.checkpoint` asks about every operation after differentiation. So `sin` can be
# saved, and so can values that exist only in the derivative: `cos` here, or a name in the forward rule of a
# `jax.custom_vjp`.
ONLY_OURS_SAVES = ("sin", "cos")


@WITH_REMAT3
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_compute_what_they_do_in_jax_remat3_or_less(policy):
    for f in PROGRAMS:
        ours, theirs = (ck(f, policy=POLICIES[policy]) for ck in (remat.checkpoint, jax.checkpoint))
        # `remat.checkpoint` removes unused operations from the forward pass, too.
        is_same = policy not in ONLY_OURS_SAVES and f not in (unused_work, named_vjp_rule)
        for view in (of_gradient, of_backward):
            with remat3(True):
                found, expected = view(ours, 0.7), view(theirs, 0.7)
            if is_same:
                assert found == expected, f.__name__
            assert all(found[name] <= expected[name] for name in COUNTED), f.__name__


@WITH_REMAT3
@pytest.mark.parametrize("policy", ["none", "a", "sin", "everything"])
def test_the_option_jax_remat3_changes_nothing_in_ours(policy):
    for f in (named3, scanned_names, named_vjp_rule):
        ours = remat.checkpoint(f, policy=POLICIES[policy])
        for view in (of_gradient, of_backward, of_hessian):
            found = []
            for on in (True, False):
                with remat3(on):
                    found.append(view(ours, 0.7))
            assert found[0] == found[1]


@WITH_REMAT3
def test_second_derivatives_repeat_operations_that_compilers_merge():
    # The derivative of a region computes some cosines twice, for the recomputation and for its
    # derivative, without a barrier between them. JAX's second implementation has one there.
    found = {}
    for ck in (remat.checkpoint, jax.checkpoint):
        with remat3(True):
            g = jax.grad(jax.grad(ck(sin3)))
            compiled = jax.jit(g).lower(0.7).compile().as_text()
            found[ck] = counts(jax.make_jaxpr(g)(0.7))["cos"], compiled.count(" cosine(")
    (ours, ours_compiled), (theirs, theirs_compiled) = found.values()
    assert ours > theirs
    assert ours_compiled < theirs_compiled


@WITH_REMAT3
def test_prevent_cse_false_holds_in_second_derivatives_unlike_in_jax_remat3():
    def has_barrier(ck):
        f = ck(lambda x: jnp.sin(jnp.sin(x)), prevent_cse=False)
        with remat3(True):
            text = jax.jit(jax.grad(jax.grad(f))).lower(1.0).as_text()
        return "optimization_barrier" in text

    assert has_barrier(jax.checkpoint)
    assert not has_barrier(remat.checkpoint)
