"""`remat.haiku.remat` compared with `haiku.remat`."""

import jax
import jax.numpy as jnp
import pytest

hk = pytest.importorskip("haiku")

from agreement import assert_same, regions  # noqa: E402

import remat  # noqa: E402
import remat.haiku  # noqa: E402

THEIRS, OURS = hk.remat, remat.haiku.remat
both = pytest.mark.parametrize("lift", [THEIRS, OURS], ids=["haiku", "ours"])
KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(9), (4, 6))


def mlp(lift, x):
    return lift(hk.nets.MLP([8, 6], activation=jnp.tanh))(x)


def resnet(lift, x):
    def block(x):
        h = hk.Conv1D(1, 3)(x[..., None])
        h = hk.BatchNorm(True, True, 0.9)(h, is_training=True)
        return x + jax.nn.relu(h)[..., 0]

    return lift(block)(x)


def transformer(lift, x):
    def block(x):
        h = hk.MultiHeadAttention(2, 3, w_init=hk.initializers.VarianceScaling(), model_size=6)(
            x, x, x
        )
        return x + hk.dropout(hk.next_rng_key(), 0.5, h)

    return lift(block)(x)


def shared(lift, x):
    layer = hk.Linear(6)
    call = lift(lambda x: jnp.sin(layer(x)))
    return call(call(x))


def counting(lift, x):
    def f(x):
        n = hk.get_state("calls", [], init=jnp.zeros)
        hk.set_state("calls", n + 1)
        return hk.Linear(6)(x) * (n + 1)

    return lift(f)(lift(f)(x))


MODELS = [mlp, resnet, transformer, shared, counting]


def train(model, lift, jit):
    f = hk.transform_with_state(lambda x: model(lift, x))
    init, apply = (jax.jit(f.init), jax.jit(f.apply)) if jit else (f.init, f.apply)
    params, state = init(KEY, X)

    def loss(params, state):
        y, state = apply(params, state, jax.random.key(1), X)
        return (y**2).mean(), state

    return params, state, jax.value_and_grad(loss, has_aux=True)(params, state)


# The large models are not run eagerly: their compilation takes long, and they test nothing new.
@pytest.mark.parametrize(
    ("model", "jit"), [*((m, True) for m in MODELS), (shared, False), (counting, False)]
)
def test_parameters_state_values_and_gradients_are_haikus(model, jit):
    ours = train(model, OURS, jit)
    assert_same(ours, train(model, THEIRS, jit))
    if not jit:
        assert_same(ours, train(model, lambda f: f, jit))


@pytest.mark.parametrize("model", [mlp, shared], ids=lambda m: m.__name__)
def test_second_derivatives_are_those_without_remat(model):
    def second(lift):
        f = hk.without_apply_rng(hk.transform(lambda x: (model(lift, x) ** 2).mean()))
        params = f.init(KEY, X)
        return jax.jit(lambda p: jax.jvp(jax.grad(lambda p: f.apply(p, X)), (p,), (p,))[1])(params)

    assert_same(second(OURS), second(lambda f: f), rtol=1e-4)


@both
def test_random_keys_advance_once(lift):
    @hk.transform
    def f(x):
        y = lift(lambda x: x * jax.random.uniform(hk.next_rng_key()))(x)
        return y, jax.random.uniform(hk.next_rng_key())

    @hk.transform
    def plain(x):
        y = x * jax.random.uniform(hk.next_rng_key())
        return y, jax.random.uniform(hk.next_rng_key())

    assert_same(f.apply({}, KEY, 2.0), plain.apply({}, KEY, 2.0))


@both
def test_modules_made_inside_and_outside_have_haikus_names(lift):
    @hk.transform
    def f(x):
        outside = hk.Linear(6)

        def block(x):
            return hk.Linear(6, name="inside")(outside(x))

        return lift(block)(lift(block)(x))

    assert sorted(f.init(KEY, X)) == ["inside", "inside_1", "linear"]


def test_an_lstm_cell_under_scan_has_the_same_gradients():
    def gradient(lift):
        def f(xs):
            cell = hk.LSTM(5)
            state = cell.initial_state(4)
            ys, _ = hk.dynamic_unroll(lift(cell) if lift else cell, xs, state)
            return (ys**2).sum()

        f = hk.without_apply_rng(hk.transform(f))
        xs = jax.random.normal(KEY, (3, 4, 6))
        params = jax.jit(f.init)(KEY, xs)
        return jax.jit(jax.grad(f.apply))(params, xs)

    assert_same(gradient(OURS), gradient(None))


def test_outside_a_transform_it_is_refused():
    with pytest.raises(ValueError, match=r"hk\.remat\(\) should not be used outside"):
        OURS(jnp.sin)(1.0)


@pytest.mark.parametrize("make", [lambda: hk.Linear(2), lambda: hk.nets.MLP([2])])
def test_static_arguments_that_do_not_fit_name_the_module(make):
    f = hk.transform(lambda x: OURS(make(), static_argnums=5)(x))
    with pytest.raises(remat.StaticArgumentError, match=r": (Linear|MLP) takes \d positional"):
        f.init(KEY, X)


@pytest.mark.parametrize("target", [3, None, "sin"])
def test_what_cannot_be_called_is_refused(target):
    with pytest.raises(remat.errors.TargetError, match=f"not {target!r}"):
        OURS(target)
    with pytest.raises(remat.errors.TargetError, match=f"not {target!r}"):
        hk.transform(lambda x: OURS(target)(x)).init(KEY, X)


@both
def test_static_arguments_are_not_traced(lift):
    @hk.transform
    def f(x):
        return lift(lambda x, flag: hk.Linear(2)(x) if flag else x, static_argnums=1)(x, True)

    params = f.init(KEY, X)
    assert f.apply(params, None, X).shape == (4, 2)


def test_static_names_and_policies_reach_the_transform():
    policy = remat.policies.dots_saveable

    @hk.transform
    def f(x):
        g = OURS(lambda x, *, flag: hk.Linear(2)(x).sum() if flag else x, static_argnames="flag")
        return g(x, flag=True) + OURS(lambda x: x.sum(), policy=policy)(x)

    params = f.init(KEY, X)
    assert regions(lambda p: f.apply(p, None, X), params) == 2
    text = str(jax.make_jaxpr(lambda p: f.apply(p, None, X))(params))
    assert "policy=dots_saveable" in text and "policy=None" in text
