"""What `jax.checkpoint` and `remat.checkpoint` do alike: each test runs with both."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support import count

import remat
from remat import checkpoint_name

P = jax.checkpoint_policies
BOTH = pytest.mark.parametrize("ck", [jax.checkpoint, remat.checkpoint], ids=["jax", "remat"])


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


VIEWS = [of_gradient, of_backward, of_compiled_gradient, of_vmapped_gradient, of_hessian]
FORWARD_VIEWS = [of_linearized]
NO_JVP = (own_vjp_rule, named_vjp_rule, scanned_own_vjp)
NO_REVERSE = ()


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("policy", POLICIES)
def test_both_recompute_the_same_operations(f, policy):
    ours, theirs = (ck(f, policy=POLICIES[policy]) for ck in (remat.checkpoint, jax.checkpoint))
    for view in VIEWS + FORWARD_VIEWS:
        if view is of_linearized and f in NO_JVP:
            continue
        assert view(ours, 0.7) == view(theirs, 0.7), view.__name__
