"""Effects in regions: prints, callbacks, refs, errors; and unsupported ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback
from support import assert_same

import remat
from remat.errors import EffectError


def ordered_print(x):
    jax.debug.print("x={}", x, ordered=True)
    return jnp.sin(jnp.sin(x))


def test_ordered_prints_are_in_order_without_differentiation(capfd):
    f = remat.checkpoint(ordered_print)
    jax.block_until_ready(jax.jit(lambda x: f(f(x)))(0.0))
    jax.block_until_ready(f(1.0))
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["x=0.0", "x=0.0", "x=1.0"]


def ordered_callback(x):
    io_callback(lambda x: None, None, lax.stop_gradient(x), ordered=True)
    return jnp.sin(jnp.sin(x))


@pytest.mark.parametrize("transform", [jax.grad, jax.hessian, lambda f: lambda x: jax.vjp(f, x)])
def test_an_ordered_callback_is_refused_by_name_when_differentiated(transform):
    with pytest.raises(remat.EffectError, match=r"Effects not supported.*OrderedIO"):
        transform(remat.checkpoint(ordered_callback))(1.0)


def test_the_refusal_is_the_error_that_jax_raises():
    assert issubclass(remat.EffectError, NotImplementedError)
    with pytest.raises(NotImplementedError, match="Effects not supported"):
        jax.grad(jax.checkpoint(ordered_callback))(1.0)


def test_io_callback_is_refused_when_differentiated():
    seen = []

    def f(x):
        io_callback(lambda x: seen.append(float(x)), None, lax.stop_gradient(x))
        return jnp.sin(jnp.sin(x))

    jax.block_until_ready(remat.checkpoint(f)(1.0))
    jax.effects_barrier()
    assert seen == [1.0]
    with pytest.raises(NotImplementedError) as ours:
        jax.grad(remat.checkpoint(f))(1.0)
    with pytest.raises(NotImplementedError):
        jax.grad(jax.checkpoint(f))(1.0)
    assert isinstance(ours.value, remat.EffectError)


def test_a_callback_can_raise():
    def f(x):
        def host(x):
            raise ValueError("from the host")

        return jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), x)

    with pytest.raises(Exception, match="from the host"):
        jax.block_until_ready(jax.jit(remat.checkpoint(f))(jnp.float32(1.0)))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.grad, lambda f: jax.jit(jax.grad(f))])
def test_checkify_sees_what_happens_inside(wrap):
    def f(x):
        checkify.check(x > 0, "x is {}", x)
        return jnp.sin(jnp.log(x))

    checked = checkify.checkify(wrap(remat.checkpoint(f)), checkify.user_checks)
    error, _ = checked(1.0)
    assert error.get() is None
    error, _ = checked(-1.0)
    assert "x is -1.0" in error.get()


@pytest.mark.parametrize("errors", [checkify.nan_checks, checkify.float_checks])
def test_checkify_finds_nans_inside(errors):
    checked = checkify.checkify(jax.grad(remat.checkpoint(lambda x: jnp.sqrt(jnp.log(x)))), errors)
    assert checked(2.0)[0].get() is None
    assert "nan" in checked(0.5)[0].get()


def test_checkify_finds_index_errors_in_a_loop_in_a_region():
    @remat.checkpoint
    def f(x):
        step = lambda c, i: (jnp.sin(c) * x.at[i].get(mode="fill"), None)  # noqa: E731
        return lax.scan(step, 1.0, jnp.arange(5))[0]

    error, _ = checkify.checkify(f, checkify.index_checks)(jnp.ones(3))
    assert "out-of-bounds" in error.get()


def test_debug_nans_names_the_operation():
    f = remat.checkpoint(lambda x: jnp.log(jnp.sin(x) - 2.0))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        jax.grad(f)(1.0)


# --------------------------------------------------------------------------------------------------
# Refs


def test_a_ref_inside_is_differentiated():
    def f(x):
        ref = jax.new_ref(x)
        ref[...] += jnp.sin(ref[...])
        return ref[...] * x

    assert_same(jax.grad(remat.checkpoint(f))(1.0), jax.grad(f)(1.0))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_ref_argument_is_written(wrap):
    def f(ref, x):
        ref[...] += jnp.sin(x)
        return ref[...] * 2

    ref = jax.new_ref(jnp.float32(1.0))
    out = wrap(remat.checkpoint(f))(ref, jnp.float32(2.0))
    np.testing.assert_allclose(ref[...], 1 + np.sin(2.0), rtol=1e-6)
    np.testing.assert_allclose(out, 2 + 2 * np.sin(2.0), rtol=1e-6)


def test_a_ref_in_the_closure_is_written():
    ref = jax.new_ref(jnp.zeros(2))

    @jax.jit
    @remat.checkpoint
    def f(x):
        ref[0] = jnp.sin(x)
        return ref[...] + x

    f(jnp.float32(1.0))
    np.testing.assert_allclose(ref[...], [np.sin(1.0), 0.0], rtol=1e-6)


def test_a_loop_of_regions_may_write_to_refs():
    def run(wrap, xs):
        ref = jax.new_ref(jnp.zeros(()))

        def step(i, _):
            ref[...] += wrap(lambda x: jnp.sin(x) * x)(xs[i])
            return None

        lax.fori_loop(0, 3, step, None)
        return ref[...]

    xs = jnp.arange(3.0)
    assert_same(run(remat.checkpoint, xs), run(lambda f: f, xs))
    assert_same(jax.jit(lambda xs: run(remat.checkpoint, xs))(xs), run(lambda f: f, xs))


def _outcome(f):
    try:
        return jax.device_get(f())
    except Exception as e:
        return type(e)


@pytest.mark.parametrize("wrap", [jax.grad, jax.vmap, jax.jit, jax.hessian])
def test_differentiating_what_writes_a_ref_does_as_without_a_region(wrap):
    def run(ck):
        ref = jax.new_ref(jnp.zeros(()))

        def f(x):
            ref[...] = lax.stop_gradient(jnp.sum(x))
            return jnp.sin(jnp.sin(x))

        x = jnp.ones(2) if wrap is jax.vmap else 1.0
        return wrap(ck(f))(x), ref[...]

    ours, plain = _outcome(lambda: run(remat.checkpoint)), _outcome(lambda: run(lambda f: f))
    if isinstance(plain, type):
        assert ours is plain
        return
    assert_same(ours, plain)


def _through_refs(ck):
    """Use a ref made in the region, one that it only reads, and one that it reads and writes."""

    def f(x, w):
        read, written = jax.new_ref(w), jax.new_ref(jnp.ones(2))

        def body(x):
            own = jax.new_ref(jnp.zeros_like(x))
            own[0] = jnp.sin(x[1]) * read[...]
            own[1] = own[0] * x[0]
            written[0] += jnp.cos(own[1]) * written[1]
            return own[...] * written[0]

        x = ck(body)(ck(body)(x))
        return x.sum() + (written[...] ** 2).sum()

    return f


def _without_refs(x, w):
    written = jnp.ones(())
    for _ in range(2):
        first = jnp.sin(x[1]) * w
        own = jnp.stack([first, first * x[0]])
        written = written + jnp.cos(own[1])
        x = own * written
    return x.sum() + written**2 + 1


@pytest.mark.parametrize("policy", [None, "dots_saveable", "everything_saveable"])
def test_derivatives_flow_through_refs_that_a_region_writes(policy):
    x, w = jnp.array([0.3, 0.5]), jnp.float32(1.3)
    policy = policy and getattr(remat.policies, policy)
    f = _through_refs(lambda g: remat.checkpoint(g, policy=policy))
    for transform in (
        lambda f: jax.value_and_grad(f, (0, 1)),
        lambda f: lambda x, w: jax.jvp(f, (x, w), (jnp.cos(x), w)),
    ):
        assert_same(transform(f)(x, w), transform(_without_refs)(x, w))
        assert_same(jax.jit(transform(f))(x, w), transform(_without_refs)(x, w))


def test_derivatives_through_refs_agree_with_finite_differences():
    with jax.enable_x64(True):
        x, w, eps = np.array([0.3, 0.5]), np.float64(1.3), 1e-6
        f = _through_refs(remat.checkpoint)
        found = jax.grad(f, (0, 1))(x, w)
        for i, e in enumerate(np.eye(2) * eps):
            np.testing.assert_allclose(found[0][i], (f(x + e, w) - f(x - e, w)) / (2 * eps), 1e-6)
        np.testing.assert_allclose(found[1], (f(x, w + eps) - f(x, w - eps)) / (2 * eps), 1e-6)


def test_a_ref_is_written_once_when_a_region_is_recomputed():
    @jax.custom_vjp
    def counted(x):
        count[...] += 1
        return jnp.sin(x)

    def forward(x):
        count[...] += 1
        return jnp.sin(x), x

    counted.defvjp(forward, lambda x, ct: (jnp.cos(x) * ct,))
    for f in (counted, lambda x: counted(counted(x))):
        count = jax.new_ref(jnp.int32(0))
        jax.grad(f)(1.0)
        plain, count = count[...], jax.new_ref(jnp.int32(0))
        jax.grad(remat.checkpoint(f))(1.0)
        assert count[...] == plain


def test_refs_that_cannot_be_followed_are_refused_in_a_region():
    @jax.custom_vjp
    def stash(ref, x):
        return x

    stash.defvjp(lambda ref, x: (x, ref), _accumulate)
    ref = jax.new_ref(jnp.zeros(()))

    @remat.checkpoint
    def f(x):
        other = jax.new_ref(x)
        other[...] += jnp.sin(x)
        return stash(ref, jnp.sin(x)) * other[...]

    with pytest.raises(EffectError, match="derivative rules of its own"):
        jax.grad(f)(1.0)


def _accumulate(ref, ct):
    ref.addupdate(ct)
    return None, ct


def test_a_gradient_accumulates_into_a_ref():
    @jax.custom_vjp
    def stash(ref, x):
        return x

    stash.defvjp(lambda ref, x: (x, ref), _accumulate)

    def run(ck):
        ref = jax.new_ref(jnp.zeros(()))
        g = jax.grad(lambda x: ck(lambda ref, x: jnp.sin(stash(ref, jnp.sin(x))))(ref, x))(1.0)
        return g, ref[...]

    ours, plain = _outcome(lambda: run(remat.checkpoint)), _outcome(lambda: run(lambda f: f))
    if isinstance(plain, type):
        assert isinstance(ours, type)
        return
    assert_same(ours, plain)


def ref_inside(ck, x):
    def f(x):
        ref = jax.new_ref(jnp.sin(x))
        ref[...] *= jnp.cos(ref[...])
        return jnp.sum(jnp.sin(ref[...]) * x)

    return ck(f)(x)


def ref_passed_in(ck, x):
    def f(ref, x):
        x = _keep_cotangent(ref, jnp.sin(x))
        return jnp.sum(jnp.sin(x) * x)

    ref = jax.new_ref(jnp.zeros(2))
    return jax.grad(lambda x: ck(f)(ref, x))(x)[0] + ref[0]


@jax.custom_vjp
def _keep_cotangent(ref, x):
    return x


_keep_cotangent.defvjp(lambda ref, x: (x, ref), _accumulate)


@pytest.mark.parametrize("program", [ref_inside, ref_passed_in])
@pytest.mark.parametrize(
    "policy",
    [
        remat.policies.everything_saveable,
        ~remat.policies.save("absent", strict=False),
        remat.policies.save(dtype="float32"),
        remat.policies.save(max_bytes="1KiB"),
        remat.policies.offload(),
    ],
    ids=repr,
)
def test_policies_do_not_speak_of_refs(policy, program):
    x = jnp.array([0.3, 0.5])
    wrap = jax.value_and_grad if program is ref_inside else lambda f: f
    ours = wrap(lambda x: program(lambda f: remat.checkpoint(f, policy=policy), x))(x)
    assert_same(ours, wrap(lambda x: program(lambda f: f, x))(x))


@jax.custom_jvp
def _straight_through(x):
    return jnp.floor(x)


_straight_through.defjvp(lambda primals, tangents: (_straight_through(*primals), 7 * tangents[0]))


@jax.custom_vjp
def _scaled_back(x):
    return jnp.floor(x)


_scaled_back.defvjp(lambda x: (_scaled_back(x), None), lambda _, ct: (7 * ct,))


@pytest.mark.parametrize("rounded", [_straight_through, _scaled_back])
@pytest.mark.parametrize(
    "call",
    [
        lambda f, x: f(x),
        lambda f, x: jax.jit(f)(x),
        lambda f, x: lax.cond(x > 0, f, lambda x: x, x),
        lambda f, x: lax.scan(lambda c, _: (f(c), None), x, length=1)[0],
        lambda f, x: jax.jit(lambda x: lax.cond(x > 0, f, lambda x: x, x))(x),
    ],
    ids=["inline", "jit", "cond", "scan", "cond in jit"],
)
def test_derivative_rules_beside_refs_are_kept(call, rounded):
    def step(x):
        ref = jax.new_ref(x)
        ref[...] *= 2.0
        return rounded(ref[...]) + jax.jit(rounded)(x)

    gradient = jax.grad(remat.checkpoint(lambda x: call(step, x)))(2.25)
    assert gradient == 7 * 2 + 7
