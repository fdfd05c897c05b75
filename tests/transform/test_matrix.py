"""One matrix: every transformation of JAX, every policy, compared with no rematerialization.

`OUTSIDE` lists transformations *of* a checkpointed function, `INSIDE` operations *in* one.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support import assert_same

import remat
from remat import checkpoint_name
from transform.evaluator import interpreted

N = 3
POLICIES = {
    "none": None,
    "nothing": remat.policies.nothing_saveable,
    "everything": remat.policies.everything_saveable,
    "dots": remat.policies.dots_saveable,
    "named": remat.policies.save("hidden", strict=False),
    "all-but-named": remat.policies.save_anything_except_these_names("hidden", strict=False),
    "sin-or-small": remat.policies.save(primitive="sin") | remat.policies.save(max_bytes=4),
    "jax-dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "jax-named": jax.checkpoint_policies.save_only_these_names("hidden"),
    "callable": lambda prim, *_, **__: prim.name in ("tanh", "mul"),
}


def block(x, w):
    """Return two results, of which some transformations use only one."""
    h = checkpoint_name(jnp.tanh(x @ w), "hidden")
    y = jnp.sin(h) * jnp.cos(x) + jnp.sum(w * w)
    return y, jnp.exp(-x) * h


X = jnp.asarray(np.linspace(-0.9, 1.1, N), jnp.float32)
W = jnp.asarray(np.cos(np.arange(N * N)).reshape(N, N), jnp.float32)
X2 = jnp.asarray(np.sin(np.arange(4 * N)).reshape(4, N), jnp.float32)


def loss(f):
    return lambda x, w: sum(jnp.sum(y * y) for y in jax.tree.leaves(f(x, w)))


def _scan(f):
    def run(x, w):
        def step(c, z):
            y, u = f(c, w)
            return 0.5 * y + z, u

        return lax.scan(step, x, X2)

    return run


def _fori(f):
    return lambda x, w: lax.fori_loop(0, 3, lambda i, c: 0.5 * f(c, w)[0], x)


def _while(f):
    def run(x, w):
        cond = lambda c: c[0] < 3  # noqa: E731
        return lax.while_loop(cond, lambda c: (c[0] + 1, 0.5 * f(c[1], w)[0]), (0, x))[1]

    return run


def _while_in_condition(f):
    def run(x, w):
        cond = lambda c: jnp.sum(f(c, w)[1]) > -1e3  # noqa: E731
        return lax.while_loop(cond, lambda c: 1.5 * c - 5.0, x)

    return run


def _cond(f):
    return lambda x, w: lax.cond(x[0] < 0, lambda x: f(x, w)[0], lambda x: x * 2, x)


def _switch(f):
    branches = [lambda x, w: x, lambda x, w: f(x, w)[0], lambda x, w: f(x + x, w)[1]]
    return lambda x, w: lax.switch(1, branches, x, w), lambda x, w: lax.switch(2, branches, x, w)


def _custom_jvp_around(f):
    @jax.custom_jvp
    def g(x, w):
        return f(x, w)[0]

    @g.defjvp
    def _(primals, tangents):
        return jax.jvp(lambda x, w: f(x, w)[0], primals, tangents)

    return g


def _custom_vjp_around(f):
    @jax.custom_vjp
    def g(x, w):
        return f(x, w)[0]

    def fwd(x, w):
        return jax.vjp(lambda x, w: f(x, w)[0], x, w)

    g.defvjp(fwd, lambda res, ct: res(ct))
    return g


def _eval_jaxpr(f):
    def run(x, w):
        closed = jax.make_jaxpr(f)(x, w)
        return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, x, w)

    return run


def _ref(f):
    def run(x, w):
        ref = jax.new_ref(x)
        ref[...] = f(ref[...], w)[0]
        ref[...] += f(ref[...], w)[1]
        return ref[...]

    return run


def _checkify(f):
    from jax.experimental import checkify

    def run(x, w):
        error, out = checkify.checkify(f, errors=checkify.float_checks)(x, w)
        error.throw()
        return out

    return run


def _grad(f):
    return jax.grad(loss(f), (0, 1))


def _disabled_jit(f):
    def run(x, w):
        with jax.disable_jit():
            return _grad(f)(x, w)

    return run


def _debug_nans(f):
    def run(x, w):
        with jax.debug_nans(True):
            return _grad(f)(x, w)

    return run


def _vjp(f):
    def run(x, w):
        out, pullback = jax.vjp(f, x, w)
        return out, pullback(out), pullback(jax.tree.map(jnp.ones_like, out))

    return run


def _linearize(f):
    def run(x, w):
        out, push = jax.linearize(f, x, w)
        return out, push(x, w), push(x * x, w + 1)

    return run


def _transposed(f):
    def run(x, w):
        _, push = jax.linearize(f, x, w)
        return jax.linear_transpose(push, x, w)(f(x, w))

    return run


def _with_aux(f):
    def run(x, w):
        return jax.value_and_grad(lambda x: (loss(f)(x, w), f(x, w)), has_aux=True)(x)

    return run


def _sharded(f, kind):
    axis_types = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,) * 2

    def run(x, w):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=axis_types)
        xs = jnp.concatenate([X2 + x[None], X2])
        xs = jax.device_put(xs, NamedSharding(mesh, PartitionSpec("data", None)))
        w = jax.device_put(w, NamedSharding(mesh, PartitionSpec()))

        def total(xs, w):
            return jnp.sum(jnp.square(jax.vmap(f, (0, None))(xs, w)[0]))

        with jax.set_mesh(mesh):
            return jax.device_get(jax.jit(jax.value_and_grad(total, (0, 1)))(xs, w))

    return run


def _shard_map(f, inside_grad, check_vma=True):
    def run(x, w):
        mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
        per_row = PartitionSpec("i")

        def body(xs, w):
            if inside_grad:
                return jax.grad(lambda xs: loss(f)(xs[0], w))(xs)
            return f(xs[0], w)[0][None] * lax.psum(jnp.sum(xs), "i")

        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(per_row, PartitionSpec()),
            out_specs=per_row,
            check_vma=check_vma,
        )
        xs = X2 + x[None]
        if inside_grad:
            return jax.device_get(jax.jit(mapped)(xs, w))
        total = lambda xs, w: jnp.sum(mapped(xs, w) ** 2)  # noqa: E731
        return jax.device_get(jax.jit(jax.grad(total, (0, 1)))(xs, w))

    return run


def _exported(f):
    def run(x, w):
        pytest.importorskip("flatbuffers")
        exported = jax.export.export(jax.jit(_grad(f)))(x, w)
        loaded = jax.export.deserialize(exported.serialize(vjp_order=1))
        return loaded.call(x, w), jax.grad(lambda x: jnp.sum(loaded.call(x, w)[0]))(x)

    return run


def _exported_for_platforms(f):
    def run(x, w):
        export = jax.export.export(jax.jit(_grad(f)), platforms=["cpu", "tpu", "cuda"])
        return export(x, w).call(x, w)

    return run


def _exported_symbolically(f):
    def run(x, w):
        (n,) = jax.export.symbolic_shape("n")
        shapes = jax.ShapeDtypeStruct((n,), x.dtype), jax.ShapeDtypeStruct((n, n), w.dtype)
        exported = jax.export.export(jax.jit(_grad(f)))(*shapes)
        return exported.call(x, w)

    return run


def _axis_collective(f):
    def total(x, w):
        return lax.pmean(loss(f)(x, w), "rows")

    return lambda x, w: jax.vmap(jax.grad(total), (0, None), axis_name="rows")(X2 + x[None], w)


OUTSIDE = {
    "call": lambda f: f,
    "jit": jax.jit,
    "grad": _grad,
    "value_and_grad": lambda f: jax.value_and_grad(loss(f), (0, 1)),
    "grad, second argument only": lambda f: jax.grad(loss(f), 1),
    "has_aux": _with_aux,
    "vjp, pulled back twice": _vjp,
    "linearize": _linearize,
    "linear_transpose": _transposed,
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (x * x, w + 1)),
    "jvp in one argument": lambda f: lambda x, w: jax.jvp(lambda x: f(x, w), (x,), (x * x,)),
    "jacfwd": lambda f: jax.jacfwd(f, (0, 1)),
    "jacrev": lambda f: jax.jacrev(f, (0, 1)),
    "hessian": lambda f: jax.hessian(loss(f), (0, 1)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(loss(f))),
    "reverse over reverse": lambda f: jax.jacrev(jax.grad(loss(f))),
    "third order": lambda f: lambda x, w: jax.jacfwd(jax.jacrev(jax.grad(loss(f))))(x, w),
    "jit of grad": lambda f: jax.jit(_grad(f)),
    "grad of jit": lambda f: _grad(jax.jit(f)),
    "jit of grad of jit": lambda f: jax.jit(_grad(jax.jit(f))),
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(X2, w),
    "vmap of grad": lambda f: lambda x, w: jax.vmap(_grad(f), (0, None))(X2, w),
    "grad of vmap": lambda f: lambda x, w: _grad(jax.vmap(f, (0, None)))(X2, w),
    "vmap over the last axis": lambda f: lambda x, w: jax.vmap(f, (1, None), (1, 0))(X2.T, w),
    "vmap of the other argument": lambda f: (
        lambda x, w: jax.vmap(_grad(f), (None, 2))(x, jnp.stack([w, w + 1], 2))
    ),
    "vmap of vmap of grad": lambda f: (
        lambda x, w: jax.vmap(jax.vmap(_grad(f), (0, None)), (None, 0))(X2, jnp.stack([w, 2 * w]))
    ),
    "vmap with axis_name": _axis_collective,
    "vmap of hessian": lambda f: lambda x, w: jax.vmap(jax.hessian(loss(f)), (0, None))(X2, w),
    "scan": _scan,
    "grad of scan": lambda f: _grad(_scan(f)),
    "jit of grad of scan": lambda f: jax.jit(_grad(_scan(f))),
    "hessian of scan": lambda f: jax.hessian(loss(_scan(f))),
    "vmap of grad of scan": lambda f: lambda x, w: jax.vmap(_grad(_scan(f)), (0, None))(X2, w),
    "map": lambda f: _grad(lambda x, w: lax.map(lambda z: f(z * x, w), X2)),
    "map in batches": lambda f: _grad(
        lambda x, w: lax.map(lambda z: f(z * x, w), X2, batch_size=3)
    ),
    "fori": lambda f: _grad(_fori(f)),
    "while": _while,
    "jvp of while": lambda f: lambda x, w: jax.jvp(_while(f), (x, w), (x, w)),
    "condition of while": _while_in_condition,
    "cond": lambda f: jax.value_and_grad(loss(_cond(f)), (0, 1)),
    "vmap of cond": lambda f: lambda x, w: jax.vmap(_grad(_cond(f)), (0, None))(X2, w),
    "switch": lambda f: lambda x, w: [_grad(g)(x, w) for g in _switch(f)],
    "vmap of switch": lambda f: (
        lambda x, w: jax.vmap(
            lambda i: jax.grad(
                lambda x: jnp.sum(lax.switch(i, [lambda x: x, lambda x: f(x, w)[0]], x))
            )(x)
        )(jnp.arange(2))
    ),
    "custom_jvp around": lambda f: _grad(_custom_jvp_around(f)),
    "custom_vjp around": lambda f: _grad(_custom_vjp_around(f)),
    "eval_jaxpr": _eval_jaxpr,
    "grad of eval_jaxpr": lambda f: _grad(_eval_jaxpr(f)),
    "eval_jaxpr of grad": lambda f: _eval_jaxpr(_grad(f)),
    "ref": _ref,
    "jit of ref": lambda f: jax.jit(_ref(f)),
    "grad of ref": lambda f: _grad(_ref(f)),
    "checkify": _checkify,
    "checkify of grad": lambda f: _checkify(_grad(f)),
    "disable_jit": _disabled_jit,
    "debug_nans": _debug_nans,
    "jax.checkpoint around": lambda f: _grad(jax.checkpoint(f)),
    "jax.checkpoint with a policy around": lambda f: _grad(
        jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)
    ),
    "remat.checkpoint around": lambda f: _grad(remat.checkpoint(f)),
    "remat.checkpoint of scan around": lambda f: _grad(
        remat.checkpoint(_scan(f), policy=remat.policies.dots_saveable)
    ),
    "hessian of remat.checkpoint around": lambda f: jax.hessian(
        loss(remat.checkpoint(f, policy=remat.policies.save("hidden")))
    ),
    "sharded jit": functools.partial(_sharded, kind="auto"),
    "explicitly sharded jit": functools.partial(_sharded, kind="explicit"),
    "grad of shard_map": functools.partial(_shard_map, inside_grad=False),
    "grad in shard_map": functools.partial(_shard_map, inside_grad=True),
    "grad of unchecked shard_map": functools.partial(
        _shard_map, inside_grad=False, check_vma=False
    ),
    "grad in unchecked shard_map": functools.partial(_shard_map, inside_grad=True, check_vma=False),
    "export": _exported,
    "export for several platforms": _exported_for_platforms,
    "export with symbolic shapes": _exported_symbolically,
    "twice": lambda f: _grad(lambda x, w: f(f(x, w)[0], w)),
    "one result": lambda f: _grad(lambda x, w: f(x, w)[1]),
}


@functools.cache
def _expected_outside(name):
    return OUTSIDE[name](block)(X, W)


# Every transformation under two policies; the most common ones under every policy.
_UNDER = [(name, policy) for name in OUTSIDE for policy in ("none", "named")]
_UNDER += [
    (name, policy)
    for name in ("grad", "jit of grad of scan", "hessian")
    for policy in POLICIES
    if (name, policy) not in _UNDER
]
_PROTECTED = (
    "call", "grad", "vjp, pulled back twice", "hessian", "jit of grad", "vmap of grad",
    "jit of grad of scan", "cond", "checkify of grad", "jit of ref", "grad of shard_map",
    "sharded jit", "jax.checkpoint around", "remat.checkpoint around", "one result",
)  # fmt: skip


@pytest.mark.parametrize(("name", "policy"), _UNDER)
def test_results_are_unchanged_under(name, policy):
    f = remat.checkpoint(block, policy=POLICIES[policy])
    assert_same(OUTSIDE[name](f)(X, W), _expected_outside(name))


@pytest.mark.parametrize("prevent_cse", [False, (True, False)])
@pytest.mark.parametrize("name", _PROTECTED)
def test_results_are_unchanged_with_prevent_cse_under(name, prevent_cse):
    f = remat.checkpoint(block, prevent_cse=prevent_cse)
    assert_same(OUTSIDE[name](f)(X, W), _expected_outside(name))


# What may stand inside ----------------------------------------------------------------------------


@jax.custom_jvp
def _cubed(x):
    return x**3


@_cubed.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return _cubed(x), 3 * checkpoint_name(x * x, "hidden") * t


@jax.custom_vjp
def _scaled(x, w):
    return jnp.sin(x @ w)


def _scaled_fwd(x, w):
    z = checkpoint_name(x @ w, "hidden")
    return jnp.sin(z), (checkpoint_name(jnp.cos(z), "slope"), x, w)


_scaled.defvjp(
    _scaled_fwd,
    lambda res, ct: ((res[0] * ct) @ res[2].T, jnp.outer(res[1], res[0] * ct)),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _applied(g, x):
    return g(x)


_applied.defvjp(lambda g, x: (g(x), x), lambda g, x, ct: (2 * ct * jnp.cos(x),))


def _in_while(x, w):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, block(c[1], w)[0]), (0, x))[1]


def _in_ref(x, w):
    ref = jax.new_ref(x)
    ref[...] = block(ref[...], w)[0]
    ref[0] += 1.0
    return ref[...] * x


def _in_scan_over_ref(x, w):
    ref = jax.new_ref(x)

    def step(c, z):
        ref[...] = jnp.sin(ref[...]) + z
        return c * ref[...], c

    return lax.scan(step, x, X2)


def _ragged(x, w):
    i = jnp.argsort(x)
    y = w.at[i].add(jnp.sin(x)[:, None] * jnp.ones_like(w))
    return y[i, i[::-1]] * jnp.sort(x), lax.dynamic_slice(y, (0, 1), (2, 2))


INSIDE = {
    "jit": lambda x, w: jax.jit(block)(x, w),
    "inlined jit": lambda x, w: jax.jit(block, inline=True)(x, w),
    "scan": lambda x, w: _scan(block)(x, w),
    "scan of jit": lambda x, w: _scan(jax.jit(block))(x, w),
    "scan of scan": lambda x, w: _scan(lambda x, w: (_scan(block)(x, w)[0], x))(x, w),
    "reversed unrolled scan": lambda x, w: lax.scan(
        lambda c, z: (block(c, w)[0], z * c), x, X2, reverse=True, unroll=2
    ),
    "map": lambda x, w: lax.map(lambda z: block(z * x, w), X2),
    "associative_scan": lambda x, w: lax.associative_scan(jnp.multiply, jnp.sin(x)[None] + X2),
    "fori": lambda x, w: _fori(block)(x, w),
    "cond": lambda x, w: _cond(block)(x, w),
    "switch": lambda x, w: _switch(block)[1](x, w),
    "custom_jvp": lambda x, w: jnp.sin(_cubed(jnp.sin(x))) @ w,
    "custom_vjp": lambda x, w: jnp.sin(_scaled(jnp.sin(x), w)),
    "custom_vjp in scan": lambda x, w: lax.scan(lambda c, z: (_scaled(c + z, w), c), x, X2),
    "custom_vjp with nondiff_argnums": lambda x, w: _applied(jnp.sin, jnp.sin(x)) @ w,
    "relu and softmax": lambda x, w: jax.nn.softmax(jax.nn.relu(x @ w)) * jax.nn.silu(x),
    "vmap": lambda x, w: jax.vmap(block, (0, None))(x[None] * X2, w),
    "grad": lambda x, w: jnp.sin(_grad(block)(x, w)[0]),
    "jvp": lambda x, w: jax.jvp(block, (x, w), (x, w)),
    "hessian": lambda x, w: jax.hessian(loss(block))(x, w),
    "remat.checkpoint": lambda x, w: remat.checkpoint(block)(jnp.sin(x), w),
    "remat.checkpoint with another policy": lambda x, w: remat.checkpoint(
        block, policy=remat.policies.save("hidden")
    )(jnp.sin(x), w),
    "remat.checkpoint thrice": lambda x, w: remat.checkpoint(
        remat.checkpoint(remat.checkpoint(block), policy=remat.policies.dots_saveable)
    )(jnp.sin(x), w),
    "jax.checkpoint": lambda x, w: jax.checkpoint(block)(jnp.sin(x), w),
    "jax.checkpoint with a policy": lambda x, w: jax.checkpoint(
        block, policy=jax.checkpoint_policies.save_only_these_names("hidden")
    )(jnp.sin(x), w),
    "scan of remat.checkpoint": lambda x, w: _scan(remat.checkpoint(block))(x, w),
    "scan of jax.checkpoint": lambda x, w: _scan(jax.checkpoint(block))(x, w),
    "ref": _in_ref,
    "ref in scan": _in_scan_over_ref,
    "gather, scatter, sort": _ragged,
    "stop_gradient": lambda x, w: jnp.sin(x) * lax.stop_gradient(jnp.cos(x @ w)),
    "linalg": lambda x, w: jnp.linalg.solve(jnp.eye(N) * 4 + w, x) * jnp.linalg.det(w),
    "cumsum": lambda x, w: jnp.cumsum(jnp.sin(x)) * jnp.cumprod(w, 1)[0],
    "random": lambda x, w: x * jax.random.normal(jax.random.key(0), (N,)),
    "named scope": lambda x, w: jax.named_call(block, name="inner")(x, w),
    "unused work": lambda x, w: (jnp.cos(w @ jnp.sin(w)), x)[1],
    "pure_callback": lambda x, w: (
        jnp.sin(x)
        * lax.stop_gradient(
            jax.pure_callback(
                np.sin,
                jax.ShapeDtypeStruct((N,), jnp.float32),
                lax.stop_gradient(x),
                vmap_method="expand_dims",
            )
        )
    ),
    "linear solve": lambda x, w: lax.custom_linear_solve(
        lambda v: jnp.sin(w) @ v + 4 * v,
        x,
        lambda _, b: jnp.linalg.solve(jnp.sin(w) + 4 * jnp.eye(N), b),
        lambda _, b: jnp.linalg.solve(jnp.sin(w).T + 4 * jnp.eye(N), b),
    ),
    "while": _in_while,
}
FORWARD_ONLY = {"while"}
REVERSE_ONLY = {"custom_vjp", "custom_vjp in scan", "custom_vjp with nondiff_argnums"}
AROUND = {
    "jit of grad": lambda f: jax.jit(_grad(f)),
    "vmap of grad": lambda f: lambda x, w: jax.vmap(_grad(f), (0, None))(X2, w),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (x * x, w + 1)),
    "reverse over reverse": lambda f: jax.grad(
        lambda x, w: jnp.sum(jax.grad(loss(f))(x, w) ** 2), (0, 1)
    ),
    "linearize": _linearize,
}
_FORWARD = {"jvp"}
_NO_JVP = {"jit of grad", "vmap of grad", "reverse over reverse"}
_WITH_REFS = ("ref", "ref in scan")
CASES = [
    (inside, around, policy)
    for inside in INSIDE
    for around in AROUND
    for policy in (("none", "named") if around == "jit of grad" else ("none",))
    if not (inside in FORWARD_ONLY and around not in _FORWARD)
    and not (inside in REVERSE_ONLY and around not in _NO_JVP)
]


# Run eagerly, each of these would compile every operation by itself, which took most of this file's time. The
# cases of `OUTSIDE` run eagerly, and "jit of grad" compiles those of `INSIDE`.
_INTERPRETED = ("vmap of grad", "jvp", "reverse over reverse")


def _around(around, f):
    g = AROUND[around](f)
    return interpreted(g) if around in _INTERPRETED else g


@functools.cache
def _expected_inside(inside, around):
    return _around(around, INSIDE[inside])(X, W)


@pytest.mark.parametrize(("inside", "around", "policy"), CASES)
def test_results_are_unchanged_with(inside, around, policy):
    f = remat.checkpoint(INSIDE[inside], policy=POLICIES[policy])
    try:
        expected = _expected_inside(inside, around)
    except Exception as e:
        if inside not in _WITH_REFS:
            raise
        pytest.skip(f"plain JAX of this version fails as well: {type(e).__name__}")
    try:
        actual = _around(around, f)(X, W)
    except NotImplementedError as e:
        if inside not in _WITH_REFS:
            raise
        with pytest.raises(NotImplementedError):
            _around(around, jax.checkpoint(INSIDE[inside]))(X, W)
        pytest.skip(f"jax.checkpoint of this version refuses as well: {type(e).__name__}")
    assert_same(actual, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("axis", ["rows", ("rows", "columns")])
def test_collectives_inside_see_the_axes_outside(axis):
    def f(x):
        return jnp.sin(x) * lax.psum(jnp.sum(jnp.cos(x)), axis) + lax.axis_index("rows").astype(
            x.dtype
        )

    def run(f):
        g = jax.grad(lambda x: jnp.sum(f(x) ** 2))
        g = jax.vmap(g, axis_name="rows")
        return jax.vmap(g, axis_name="columns")(jnp.stack([X2, X2 + 1]))

    assert_same(run(remat.checkpoint(f)), run(f))
    assert_same(run(jax.jit(remat.checkpoint(f))), run(f))


def test_spmd_axis_name_reaches_sharding_constraints_inside():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def f(x):
        y = lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, PartitionSpec("b")))
        return jnp.sum(jnp.sin(y) ** 2)

    xs = jnp.asarray(np.sin(np.arange(32.0)).reshape(4, 8), jnp.float32)

    def run(f):
        return jax.jit(jax.vmap(jax.grad(f), spmd_axis_name="a"))

    text = run(remat.checkpoint(f)).lower(xs).as_text()
    assert text.count('"a"') > 0
    assert_same(run(remat.checkpoint(f))(xs), run(f)(xs))


def test_results_do_not_depend_on_the_device_the_arguments_are_on():
    x = jax.device_put(X, jax.devices()[3])
    w = jax.device_put(W, jax.devices()[3])
    out = _grad(remat.checkpoint(block))(x, w)
    assert_same(out, _expected_outside("grad"))
    assert {d for leaf in out for d in leaf.devices()} == {jax.devices()[3]}
