"""Every dtype of JAX passes into and out of a region, differentiated or not."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from support import assert_same, count

import remat
from remat.transform import cut

P = remat.policies
POLICIES = [None, P.everything_saveable, P.save(dtype="float32"), P.save(min_bytes=8)]
POLICY = pytest.mark.parametrize("policy", POLICIES, ids=str)
FLOATS = ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"]


def check(f, *args, policy=None, wrap=lambda f: jax.value_and_grad(f, allow_int=True)):
    assert_same(wrap(remat.checkpoint(f, policy=policy))(*args), wrap(f)(*args))


@POLICY
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_of_every_float_type_are_those_without(dtype, policy):
    def f(x):
        y = jnp.sin(x.astype(jnp.float32) * 2).astype(x.dtype)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    x = jnp.array([0.5, -1.0, 0.25], jnp.float32).astype(dtype)
    check(f, x, policy=policy)
    check(f, x, policy=policy, wrap=lambda f: jax.jit(jax.grad(f)))


@POLICY
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_residuals_of_narrow_types_round_as_they_do_without(dtype, policy):
    def f(x):
        return jnp.sum(jnp.sin(jnp.sin(x) * x) * x)

    x = jnp.linspace(0.1, 1.3, 7).astype(dtype)
    check(f, x, policy=policy)


NARROW = ["float16", *(n for n in sorted(dir(ml_dtypes)) if n.startswith(("bfloat", "float")))]


def finite_values(dtype):
    """Return all finite values of a floating-point type of at most 16 bits, as float32."""
    words = np.arange(1 << jnp.finfo(dtype).bits, dtype=f"uint{8 * dtype.itemsize}")
    with np.errstate(invalid="ignore"):  # ml_dtypes warns when it converts NaN
        values = words.view(dtype).astype(np.float32)
    return values[np.isfinite(values)]


@pytest.mark.parametrize("name", NARROW)
def test_a_residual_keeps_every_finite_value_of_its_type(name):
    dtype = np.dtype(name if name == "float16" else getattr(ml_dtypes, name))

    def f(x):
        y = remat.checkpoint_name(x.astype(dtype), "narrow").astype(jnp.float32)
        return jnp.sum(y * y), y  # the forward pass uses the residual as well

    remade = remat.checkpoint(f, policy=P.save("narrow"))
    x = finite_values(dtype)
    try:
        plain = jax.jit(jax.value_and_grad(f, has_aux=True))(x)
    except jax.errors.JaxRuntimeError as e:
        pytest.skip(f"this backend has no {name}: {e!s:.60}")
    ours = jax.jit(jax.value_and_grad(remade, has_aux=True))(x)
    assert {r.dtype for r in remat.residuals(remade, x) if r.kind == "computed"} == {name}
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(a, b)


def test_residuals_are_rounded_only_where_rounding_changes_no_value():
    assert set(NARROW) & cut.ROUNDED_TYPES == {"float8_e5m2", "float16", "bfloat16"}
    for name in set(NARROW) & cut.ROUNDED_TYPES:
        values = finite_values(jnp.dtype(name)).astype(name)
        info = jnp.finfo(name)
        rounded = lax.reduce_precision(jnp.asarray(values), info.nexp, info.nmant)
        np.testing.assert_array_equal(np.asarray(rounded), values)


@POLICY
def test_gradients_of_complex_numbers_are_those_without(policy):
    def f(z):
        return jnp.sum(jnp.abs(jnp.sin(z) * jnp.exp(z)) ** 2)

    z = jnp.array([0.1 + 0.2j, -0.3j, 1.0], jnp.complex64)
    check(f, z, policy=policy)
    holomorphic = lambda z: jnp.sum(jnp.sin(jnp.sin(z)))  # noqa: E731
    check(holomorphic, z, policy=policy, wrap=lambda f: jax.grad(f, holomorphic=True))


@POLICY
@pytest.mark.parametrize("dtype", ["int8", "uint32", "int32", "bool", "int4", "uint4"])
def test_integers_and_bools_have_float0_cotangents(dtype, policy):
    def f(x, n):
        return jnp.sum(jnp.sin(x) * n.astype(jnp.float32)), n

    n = jnp.array([1, 0, 1]).astype(dtype)
    x = jnp.array([0.5, 1.0, 2.0])

    def gradients(f):
        return lambda x, n: jax.grad(lambda x, n: f(x, n)[0], (0, 1), allow_int=True)(x, n)

    actual = gradients(remat.checkpoint(f, policy=policy))(x, n)
    assert actual[1].dtype == jax.dtypes.float0
    assert_same(actual[0], gradients(f)(x, n)[0])
    out, pullback = jax.vjp(remat.checkpoint(f, policy=policy), x, n)
    assert out[1].dtype == n.dtype
    assert pullback((1.0, np.zeros(3, jax.dtypes.float0)))[1].dtype == jax.dtypes.float0


@POLICY
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_random_keys_can_be_arguments_results_and_batched(policy, impl):
    def f(x, key):
        key, sub = jax.random.split(key)
        y = jnp.sin(x * jax.random.normal(sub, x.shape))
        return jnp.sum(y * jax.random.uniform(key, x.shape)), key

    key = jax.random.key(3, impl=impl)
    x = jnp.arange(3.0)
    for wrap in (lambda f: jax.value_and_grad(f, has_aux=True), jax.jit):
        check(f, x, key, policy=policy, wrap=wrap)
    check(
        lambda x, key: f(x, key)[0],
        jnp.stack([x, x + 1]),
        jax.random.split(key),
        policy=policy,
        wrap=lambda f: jax.vmap(jax.grad(f)),
    )


def test_old_style_keys_keep_gradients():
    f = lambda x, key: jnp.sum(jnp.sin(x * jax.random.normal(key, x.shape)))  # noqa: E731
    check(f, jnp.arange(3.0), jax.random.PRNGKey(0))


@POLICY
def test_a_key_may_be_a_residual_between_regions(policy):
    def f(x, key):
        for _ in range(3):
            key, sub = jax.random.split(key)
            x = jnp.sin(x + jax.random.normal(sub, x.shape))
        return x, key

    def loss(f):
        def run(x, key):
            x, key = f(x, key)
            return jnp.sum(f(x, key)[0])

        return jax.grad(run)

    check(f, jnp.arange(3.0), jax.random.key(0), policy=policy, wrap=loss)


@POLICY
def test_gradients_with_64_bits_are_those_without(policy):
    with jax.enable_x64(True):
        x = jnp.array([0.1, 0.2], jnp.float64)
        check(lambda x: jnp.sum(jnp.sin(jnp.sin(x))), x, policy=policy)
        mixed = lambda x: jnp.sum(jnp.sin(jnp.sin(x).astype(jnp.float32)).astype(jnp.float64))  # noqa: E731
        check(mixed, x, policy=policy)


def test_switching_64_bits_on_traces_again():
    f = remat.checkpoint(lambda x: jnp.sin(x) * jnp.ones(2))
    assert f(1.0).dtype == jnp.float32
    with jax.enable_x64(True):
        assert f(1.0).dtype == jnp.float64
    assert f(1.0).dtype == jnp.float32


@pytest.mark.parametrize("x", [1.0, jnp.float32(1.0), np.float32(1.0), True, 3, 2j])
def test_weak_types_are_kept(x):
    f = lambda x: (x, x + 1, jnp.sin(x))  # noqa: E731
    with jax.numpy_dtype_promotion("standard"):
        plain, ours = jax.eval_shape(f, x), jax.eval_shape(remat.checkpoint(f), x)
    assert [(a.dtype, a.weak_type) for a in plain] == [(a.dtype, a.weak_type) for a in ours]


@pytest.mark.parametrize("x", [1.0, jnp.float32(1.0)], ids=["weak", "strong"])
def test_gradients_have_the_type_of_their_argument(x):
    f = lambda x: jnp.sin(jnp.sin(x))  # noqa: E731
    plain = jax.eval_shape(jax.grad(f), x)
    ours = jax.eval_shape(jax.grad(remat.checkpoint(f)), x)
    assert (plain.dtype, plain.weak_type) == (ours.dtype, ours.weak_type)


@POLICY
def test_updates_and_solvers_have_bodies_that_are_no_regions(policy):
    """The bodies of scatter, reduce and custom_linear_solve parametrize the operation and are not regions."""

    def scattered(x):
        i = jnp.array([0, 2, 2])
        y = jnp.ones(3).at[i].add(jnp.sin(x))
        y = y.at[jnp.array([1, 0, 2])].multiply(jnp.cos(x), unique_indices=True)
        return jnp.sum(jnp.sin(y).at[0].max(x[1]) ** 2)

    def solved(x):
        return jnp.sum(jnp.linalg.solve(jnp.eye(3) * 4 + jnp.outer(x, x), jnp.sin(x)))

    def reduced(x):
        y = lax.reduce_window(jnp.sin(x), 0.0, lax.add, (2,), (1,), "SAME")
        return jnp.sum(y * jnp.cumsum(jnp.sin(y)) * jnp.max(y))

    x = jnp.array([0.3, -0.5, 1.1])
    for f in (scattered, solved, reduced):
        check(f, x, policy=policy)
        check(f, x, policy=policy, wrap=jax.hessian)


@pytest.mark.parametrize(
    "policy",
    [P.everything_saveable, P.save(primitive="scatter-add"), P.save(min_bytes=12)],
    ids=str,
)
def test_the_result_of_a_scatter_is_saved_like_any_other(policy):
    def f(x):
        return jnp.sum(jnp.sin(jnp.zeros(3).at[jnp.array([0, 0, 1])].add(jnp.sin(x))))

    _, pullback = jax.vjp(remat.checkpoint(f, policy=policy), jnp.arange(3.0))
    assert count(jax.make_jaxpr(pullback)(1.0), "scatter-add") == 0
