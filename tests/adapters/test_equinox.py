"""`remat.equinox.filter_checkpoint` compared with `equinox.filter_checkpoint`, and its additions."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

eqx = pytest.importorskip("equinox")

from agreement import assert_same, regions, temporaries  # noqa: E402

import remat  # noqa: E402
import remat.equinox  # noqa: E402

THEIRS, OURS = eqx.filter_checkpoint, remat.equinox.filter_checkpoint
both = pytest.mark.parametrize("lift", [THEIRS, OURS], ids=["equinox", "ours"])
KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(9), (6,))


class Block(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    act: object

    def __init__(self, key, act=jnp.tanh):
        self.linear, self.dropout, self.act = eqx.nn.Linear(6, 6, key=key), eqx.nn.Dropout(0.5), act

    def __call__(self, x, key=None):
        return x + self.dropout(self.act(self.linear(x)), key=key, inference=key is None)

    def twice(self, x):
        return self(self(x))


class Attention(eqx.Module):
    attention: eqx.nn.MultiheadAttention

    def __init__(self, key):
        self.attention = eqx.nn.MultiheadAttention(2, 6, key=key)

    def __call__(self, x):
        x = x[None]
        return self.attention(x, x, x)[0]


def shared(key):
    block = Block(key)
    return eqx.nn.Sequential([eqx.nn.Lambda(block), eqx.nn.Lambda(block)])


MODELS = {
    "mlp": lambda key: eqx.nn.MLP(6, 6, 8, 2, key=key),
    "attention": Attention,
    "block": Block,
    "shared": shared,
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_equinoxs(name, jit):
    model = MODELS[name](KEY)

    def step(lift, model, x):
        return eqx.filter_value_and_grad(lambda m, x: (lift(m)(lift(m)(x)) ** 2).sum())(model, x)

    run = eqx.filter_jit(step) if jit else step
    ours = run(OURS, model, X)
    assert_same(ours, run(THEIRS, model, X))
    assert_same(ours, run(lambda m: m, model, X))


@pytest.mark.parametrize("name", MODELS)
def test_second_derivatives_are_those_without_remat(name):
    params, rest = eqx.partition(MODELS[name](KEY), eqx.is_inexact_array)

    @functools.partial(jax.jit, static_argnums=0)
    def second(lift, params):
        def loss(params):
            return (lift(eqx.combine(params, rest))(X) ** 2).sum()

        return jax.jvp(jax.grad(loss), (params,), (params,))[1]

    assert_same(second(OURS, params), second(lambda m: m, params), rtol=1e-4)


def test_dropout_masks_agree_in_the_recomputation():
    def gradient(lift):
        return eqx.filter_grad(lambda m: (lift(m)(X, key=jax.random.key(3)) ** 2).sum())(Block(KEY))

    assert_same(gradient(OURS), gradient(lambda m: m))


def test_batch_norm_state_comes_out():
    def train(lift):
        model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
        x = jax.random.normal(KEY, (5, 3))

        def loss(model, state):
            run = jax.vmap(lift(model), axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            y, state = run(x, state)
            return (y**2).mean(), state

        (value, state), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model, state)
        return value, jax.tree.leaves(state), jax.tree.leaves(grads)

    assert_same(train(OURS), train(lambda m: m))


def test_an_lstm_cell_under_scan_has_the_same_gradients():
    cell, xs = eqx.nn.LSTMCell(6, 5, key=KEY), jax.random.normal(KEY, (4, 6))

    def loss(lift, cell):
        step = lift(lambda carry, x: ((new := cell(x, carry)), new[0]))
        return (jax.lax.scan(step, (jnp.zeros(5), jnp.zeros(5)), xs)[1] ** 2).sum()

    ours, theirs, without = (
        eqx.filter_grad(functools.partial(loss, lift))(cell) for lift in (OURS, THEIRS, lambda f: f)
    )
    assert_same(ours, theirs)
    assert_same(ours, without)


@both
def test_other_things_than_arrays_pass_through(lift):
    def f(x, flag, *, name, table):
        assert flag is True and isinstance(table, frozenset)
        return {"y": x * 2, "name": name, "f": jnp.tanh, "none": None}

    out = lift(f)(X, True, name="n", table=frozenset((1, 2)))
    assert out["name"] == "n" and out["f"] is jnp.tanh and out["none"] is None
    assert_same(out["y"], X * 2)


@both
def test_a_decorated_method_keeps_its_attributes(lift):
    class Model(eqx.Module):
        w: jax.Array

        @lift
        def __call__(self, x):
            """Doc."""
            return jnp.sin(self.w * x)

        @functools.partial(lift, prevent_cse=False)
        def other(self, x):
            return self(x)

    model = Model(X)
    assert_same(model(X), jnp.sin(X * X))
    assert_same(eqx.filter_grad(lambda m: m.other(X).sum())(model).w, jnp.cos(X * X) * X)
    assert Model.__call__.__doc__ == "Doc." and Model.other.__name__ == "other"


def test_the_wrapper_is_a_module_with_the_arrays_of_what_it_wraps():
    block = Block(KEY)
    wrapped = OURS(block)
    assert isinstance(wrapped, eqx.Module) and eqx.tree_equal(wrapped.__wrapped__, block)
    assert_same(
        jax.tree.leaves(eqx.filter(wrapped, eqx.is_array)),
        jax.tree.leaves(eqx.filter(block, eqx.is_array)),
    )


# --------------------------------------------------------------------------------------------------
# Values that a function reads besides its arguments: it reads all of them in each call, as with Equinox's

SCALE = 1.0


class Scaling:
    """A callable that is not a module."""

    factor = 1.0

    def __call__(self, y):
        return y * self.factor

    def method(self, y):
        return self(y)


class ReadsGlobal(eqx.Module):
    config: Scaling = eqx.field(static=True)

    def __call__(self, y):
        return y * SCALE * self.config.factor


# Each returns a function of y that multiplies by a value that it reads, and a function that changes the
# value.


def closure():
    def change(new):
        nonlocal i
        i = new

    i = 0.0
    return (lambda y: y * i), change


def nested_closure():
    inner, change = closure()
    return (lambda y: inner(y) * 1.0), change


def global_variable():
    return (lambda y: y * SCALE), functools.partial(globals().__setitem__, "SCALE")


def contents_of_a_list():
    held = [0.0]
    return (lambda y: y * held[0]), functools.partial(held.__setitem__, 0)


def default():
    def f(y, factor=0.0):
        return y * factor

    return f, lambda new: setattr(f, "__defaults__", (new,))


def attribute():
    scaling = Scaling()
    return scaling, functools.partial(setattr, scaling, "factor")


def bound_method():
    scaling, change = attribute()
    return scaling.method, change


def static_field():
    scaling, change = attribute()
    return ReadsGlobal(scaling), change


def partial():
    inner, change = closure()
    return functools.partial(lambda f, y: f(y), inner), change


READS = [
    closure,
    nested_closure,
    global_variable,
    contents_of_a_list,
    default,
    attribute,
    bound_method,
    static_field,
    partial,
]


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("make", READS, ids=lambda make: make.__name__)
@both
def test_a_change_of_what_a_function_reads_is_seen_in_the_next_call(lift, make, transform):
    @transform
    def total(y):
        """Return the sum of f(y) while the value that f reads becomes 1, 2 and 3."""
        f, change = make()
        lifted, values = lift(f), []
        for i in (1.0, 2.0, 3.0):
            change(i)
            values.append(lifted(y))
        return sum(values)

    try:
        assert_same(total(jnp.ones(())), jnp.float32(6.0))
    finally:
        globals()["SCALE"] = 1.0


def test_closures_are_not_kept_alive():
    held = eqx.nn.Linear(6, 6, key=KEY)
    seen = weakref.ref(held.weight)

    def around(held):
        return lambda x: held(x)

    OURS(around(held))(X)
    del held
    gc.collect()
    assert seen() is None


def test_closures_over_tracers_do_not_leak():
    with jax.checking_leaks():
        model = Block(KEY)
        for _ in range(2):
            eqx.filter_jit(eqx.filter_grad(lambda m, x: OURS(lambda x: m(x))(x).sum()))(model, X)
    assert_same(
        eqx.filter_grad(lambda m: OURS(lambda x: m(x))(X).sum())(model),
        eqx.filter_grad(lambda m: m(X).sum())(model),
    )


def test_fixed_values_may_be_unhashable():
    def f(x, table):
        return x * len(table)

    for table in ({1}, {1, 2}):
        assert_same(OURS(f)(X, table), X * len(table))


# --------------------------------------------------------------------------------------------------


def test_a_policy_saves_what_it_names():
    mlp = eqx.nn.MLP(6, 6, 8, 2, key=KEY)
    params, rest = eqx.partition(mlp, eqx.is_array)

    def dots(policy):
        def loss(params):
            return OURS(eqx.combine(params, rest), policy=policy)(X).sum()

        return str(jax.make_jaxpr(jax.grad(loss))(params)).count("dot_general[")

    assert dots(remat.policies.dots_saveable) < dots(None)
    assert regions(jax.grad(lambda p: OURS(eqx.combine(p, rest))(X).sum()), params) == 1


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="not 3"):
        OURS(3)
    with pytest.raises(remat.PolicyError, match="policy"):
        OURS(lambda x: x, policy=3)(X)


def test_temporaries_of_unrolled_layers_shrink():
    class Layer(eqx.Module):
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __call__(self, x):
            h = jnp.sin(jnp.tanh(jax.vmap(self.up)(x)))
            return x + jax.vmap(self.down)(h)

    layers = [
        Layer(eqx.nn.Linear(16, 64, key=k), eqx.nn.Linear(64, 16, key=k))
        for k in jax.random.split(KEY, 24)
    ]
    x = jnp.ones((256, 16))

    def loss(lift, layers):
        y = x
        for layer in layers:
            y = lift(layer)(y)
        return y.sum()

    ours, without = (
        temporaries(jax.grad(functools.partial(loss, lift)), layers) for lift in (OURS, lambda f: f)
    )
    assert ours <= 0.35 * without
