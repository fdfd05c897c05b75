"""`remat.nnx.remat` compared with `flax.nnx.remat`, and its additions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

import flax  # noqa: E402
from agreement import assert_same, temporaries  # noqa: E402

import remat  # noqa: E402
import remat.nnx  # noqa: E402

FLAX, OURS = nnx.remat, remat.nnx.remat
both = pytest.mark.parametrize("lift", [FLAX, OURS], ids=["flax", "ours"])
MODES = {"updates": (True, True), "graph": (True, False), "tree": (False, False)}
X = jax.random.normal(jax.random.key(9), (4, 6))


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 6, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


class ResNetBlock(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 1, (3,), rngs=rngs)
        self.norm = nnx.BatchNorm(1, rngs=rngs)

    def __call__(self, x):
        h = self.norm(self.conv(x[..., None]))
        return x + jax.nn.relu(h)[..., 0]


class TransformerBlock(nnx.Module):
    def __init__(self, rngs, dropout=0.5):
        self.attention = nnx.MultiHeadAttention(2, 6, decode=False, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.mlp = MLP(rngs)

    def __call__(self, x):
        x = x[None]
        x = x + self.dropout(self.attention(x))
        return (x + self.mlp(x))[0]


class Shared(nnx.Module):
    """Two layers with one kernel: its gradient is the sum of both."""

    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(6, 6, rngs=rngs), nnx.Linear(6, 6, rngs=rngs)
        self.second.kernel = self.first.kernel

    def __call__(self, x):
        return self.second(jnp.sin(self.first(x)))


class Counting(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.calls = nnx.Linear(6, 6, rngs=rngs), nnx.BatchStat(jnp.array(0.0))

    def __call__(self, x):
        self.calls[...] += 1
        return jnp.sin(self.linear(x))


MODELS = [MLP, ResNetBlock, TransformerBlock, Shared, Counting]


def train(cls, lift, mode, jit, order=1):
    """Return value, gradients and the whole state after two calls."""
    graph, updates = MODES[mode]
    options = {"graph": graph, "graph_updates": updates}
    model = cls(nnx.Rngs(0))
    call = lift(cls.__call__, **options) if lift else cls.__call__

    def loss(model, x):
        return (call(model, call(model, x)) ** 2).mean()

    if order == 2:
        first = nnx.grad(loss, **options)

        def loss(model, x):
            return sum((g**2).sum() for g in jax.tree.leaves(first(model, x)))

    step = nnx.value_and_grad(loss, **options)
    if jit:
        step = nnx.jit(step, **options)
    value, grads = step(model, X)
    return value, jax.tree.leaves(grads), jax.tree.leaves(nnx.state(model))


@pytest.mark.parametrize(
    ("cls", "jit"),
    [*((cls, True) for cls in MODELS), (MLP, False), (Shared, False), (Counting, False)],
)
def test_values_gradients_and_state_are_flaxs(cls, jit):
    ours = train(cls, OURS, "updates", jit)
    assert_same(ours, train(cls, None, "updates", jit))
    if not jit:
        assert_same(ours, train(cls, FLAX, "updates", jit))


@pytest.mark.parametrize("cls", [MLP, Shared], ids=lambda cls: cls.__name__)
def test_second_derivatives_are_those_without_remat(cls):
    ours, without = (train(cls, lift, "updates", True, order=2) for lift in (OURS, None))
    assert_same(ours, without, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["graph", "tree"])
@pytest.mark.parametrize("cls", [MLP, Counting], ids=lambda cls: cls.__name__)
def test_modes_without_structure_updates_agree_with_flax(cls, mode):
    assert_same(train(cls, OURS, mode, False), train(cls, FLAX, mode, False))


@both
def test_shared_variables_are_refused_in_tree_mode(lift):
    f = lift(lambda a, b, x: x * a * b, graph=False, graph_updates=False)
    w = nnx.Param(jnp.ones(()))
    with pytest.raises(ValueError, match="Duplicate"):
        f(w, w, 1.0)


@pytest.mark.parametrize("mode", MODES)
def test_the_mode_defaults_to_flaxs_settings(mode):
    graph, updates = MODES[mode]
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(updates):
        f = OURS(lambda model, x: model(x))
    model = Counting(nnx.Rngs(0))
    f(model, X)
    assert model.calls[...] == 1


def test_random_streams_advance_once_and_masks_agree():
    model = TransformerBlock(nnx.Rngs(0))
    before = int(model.dropout.rngs.count[...])
    loss = lambda call, m: (call(m, X) ** 2).sum()  # noqa: E731
    step = nnx.jit(nnx.grad(functools.partial(loss, OURS(TransformerBlock.__call__))))
    grads = step(model)
    assert int(model.dropout.rngs.count[...]) == before + 1
    without = nnx.jit(nnx.grad(functools.partial(loss, TransformerBlock.__call__)))
    assert_same(jax.tree.leaves(grads), jax.tree.leaves(without(TransformerBlock(nnx.Rngs(0)))))


def test_a_decode_cache_is_filled_once_a_call():
    def run(lift):
        attention = nnx.MultiHeadAttention(2, 6, decode=True, rngs=nnx.Rngs(0))
        attention.init_cache((1, 3, 6))
        call = lift(lambda m, x: m(x)) if lift else (lambda m, x: m(x))
        outs = [call(attention, X[None, n : n + 1]) for n in range(3)]
        assert int(attention.cache_index[...]) == 3
        return outs, jax.tree.leaves(nnx.state(attention))

    assert_same(run(OURS), run(None))


@both
def test_attributes_made_inside_come_out(lift):
    class Sowing(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(6, 6, rngs=rngs)

        def __call__(self, x):
            x = self.linear(x)
            self.seen = nnx.Intermediate(x)
            return x

    model = Sowing(nnx.Rngs(0))
    y = lift(Sowing.__call__)(model, X)
    assert_same(nnx.pop(model, nnx.Intermediate)["seen"].get_value(), y)


@both
def test_an_lstm_cell_under_scan_has_the_same_gradients(lift):
    cell = nnx.LSTMCell(6, 5, rngs=nnx.Rngs(0))
    carry = cell.initialize_carry((2, 6), nnx.Rngs(1))

    def loss(cell, xs):
        @nnx.scan(in_axes=(None, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        @lift
        def step(cell, carry, x):
            return cell(carry, x)

        return (step(cell, carry, xs)[1] ** 2).sum()

    def unrolled(cell, xs):
        c, total = carry, 0.0
        for x in xs:
            c, y = cell(c, x)
            total += (y**2).sum()
        return total

    xs = jax.random.normal(jax.random.key(1), (3, 2, 6))
    assert_same(
        jax.tree.leaves(nnx.grad(loss)(cell, xs)), jax.tree.leaves(nnx.grad(unrolled)(cell, xs))
    )


def test_a_decorator_on_methods_takes_keywords_and_defaults():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(6, 6, rngs=rngs)

        @functools.partial(OURS, static_argnums=(2, 3))
        def __call__(self, x, train: bool = True, name="a"):
            assert train is True and isinstance(name, str)
            return self.linear(x)

    block = Block(nnx.Rngs(0))
    expected = block.linear(X)
    assert_same(
        [block(X), block(x=X), block(X, True, name="b"), block(X, train=True)], [expected] * 4
    )


@both
def test_a_second_call_applies_the_updates_again(lift):
    model = Counting(nnx.Rngs(0))
    f = lift(Counting.__call__)
    for _ in range(3):
        f(model, X)
    assert model.calls[...] == 3


def test_a_module_instance_stands_for_its_call_and_may_change():
    model = Counting(nnx.Rngs(0))
    rematted = OURS(model)
    assert_same(rematted(X), Counting(nnx.Rngs(0))(X))
    assert model.calls[...] == 1


@pytest.mark.parametrize("target", ["method", "partial", "class", "nothing"])
def test_what_cannot_be_wrapped_is_refused_with_the_way_out(target):
    model = MLP(nnx.Rngs(0))
    targets = {
        "method": (model.up.__call__, "bound methods.*Linear.__call__"),
        "partial": (functools.partial(model.up.__call__, X), "bound methods"),
        "class": (MLP, r"class MLP.*MLP.__call__"),
        "nothing": (3, "takes a function, not 3"),
    }
    f, message = targets[target]
    with pytest.raises(remat.errors.TargetError, match=message):
        OURS(f)
    assert issubclass(remat.errors.TargetError, (ValueError, remat.RematError))


# --------------------------------------------------------------------------------------------------
# Models that are closed over, and errors


TRANSFORMS = {
    "jit": lambda f: jax.jit(f)(X),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(X),
    "vmap": lambda f: jax.vmap(f)(X[None]),
    "scan": lambda f: jax.lax.scan(lambda x, _: (f(x), None), X, None, length=2)[0],
    "nnx.jit": lambda f: nnx.jit(f)(X),
    "nnx.vmap": lambda f: nnx.vmap(f)(X[None]),
}


class Renaming(MLP):
    mode = "train"

    def __call__(self, x):
        self.mode = "eval"
        return super().__call__(x)


class Labelling(MLP):
    def __call__(self, x):
        self.up.kernel.set_metadata("label", "seen")
        return super().__call__(x)


def everything_in(model):
    """Return the objects of a model, its attributes and Variables, for comparisons by identity."""
    return [
        (path, x, list(vars(x).items()) if isinstance(x, nnx.Module) else None)
        for path, x in nnx.iter_graph(model)
    ], jax.tree.flatten(nnx.state(model))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_model_that_is_closed_over_works_where_nothing_changes(transform):
    model, f = Shared(nnx.Rngs(0)), OURS(Shared.__call__)
    before = everything_in(model)
    assert_same(
        TRANSFORMS[transform](lambda x: f(model, x)), TRANSFORMS[transform](lambda x: model(x))
    )
    assert everything_in(model)[0] == before[0]
    assert_same(f(model, X), model(X))  # the trace made inside is reused outside


@pytest.mark.parametrize("cls", [Counting, TransformerBlock, ResNetBlock, Renaming, Labelling])
def test_a_change_of_a_closed_over_model_is_refused_as_without_remat_and_made_nowhere(cls):
    model = cls(nnx.Rngs(0))
    structure, (leaves, tree) = everything_in(model)
    for call in (cls.__call__, OURS(cls.__call__)):
        with pytest.raises(flax.errors.TraceContextError, match="Cannot mutate"):
            jax.jit(lambda x, call=call: call(model, x))(X)
    after, (leaves_after, tree_after) = everything_in(model)
    assert after == structure and tree_after == tree
    assert all(a is b for a, b in zip(leaves, leaves_after, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_of_several_changes_none_is_made_if_one_is_refused(mode):
    graph, updates = MODES[mode]
    outside = nnx.Param(jnp.ones(()))
    seen = []

    def double(first, second, x):
        first[...], second[...] = first[...] * 2, second[...] * 2
        return x

    def f(x):
        inside = nnx.Param(x)
        with pytest.raises(flax.errors.TraceContextError):
            OURS(double, graph=graph, graph_updates=updates)(inside, outside, x)
        seen.append(inside[...] is x)
        return x

    jax.jit(f)(1.0)
    assert seen == [True] and outside[...] == 1.0


def test_what_is_made_inside_may_change_beside_what_is_closed_over():
    model = MLP(nnx.Rngs(0))

    def f(x):
        local = Counting(nnx.Rngs(1))

        def both(model, local, x):
            local.seen = nnx.Intermediate(x)
            return local(model(x))

        y = OURS(both)(model, local, x)
        return y + local.calls[...] + local.seen[...]

    expected = Counting(nnx.Rngs(1))(model(X)) + 1.0 + X
    assert_same(jax.jit(f)(X), expected)


def test_changes_of_structure_come_out():
    class Pair(nnx.Module):
        def __init__(self):
            self.a, self.b = MLP(nnx.Rngs(0)), MLP(nnx.Rngs(1))
            self.layers = nnx.List([MLP(nnx.Rngs(2))])
            self.dict = nnx.data({"a": MLP(nnx.Rngs(3))})

    def f(pair, x):
        pair.a, pair.b = pair.b, pair.a
        pair.a.parent = pair
        pair.layers.append(pair.a)
        pair.dict["b"] = MLP(nnx.Rngs(4))
        del pair.a.up
        pair.b.down.bias.set_metadata("label", "seen")
        return x, pair, pair.layers[0], pair.b.up.kernel

    pair = Pair()
    a, b, first, in_dict = pair.a, pair.b, pair.layers[0], pair.dict["a"]
    _, *results = OURS(f)(pair, X)
    expected = [pair, first, a.up.kernel]
    assert all(x is y for x, y in zip(results, expected, strict=True))
    assert pair.a is b and pair.b is a and b.parent is pair and pair.layers[1] is b
    assert pair.dict["a"] is in_dict and pair.dict["b"].up.kernel.shape == (6, 8)
    assert not hasattr(b, "up") and a.down.bias.label == "seen"


def test_a_constant_in_a_variable_comes_out_as_an_array():
    def reset(calls, x):
        calls[...] = jnp.zeros(())
        return x

    calls = nnx.BatchStat(jnp.ones(()))
    OURS(reset)(calls, X)
    assert isinstance(calls.get_raw_value(), jax.Array)


def test_variables_that_hold_refs_are_written_once_a_call():
    class Cell(nnx.Module):
        def __init__(self):
            self.calls = nnx.BatchStat(jnp.zeros(()), ref=True)

        def __call__(self, x):
            self.calls[...] += 1
            return jnp.sin(x)

    cell, f = Cell(), OURS(Cell.__call__)
    f(cell, X), nnx.jit(f)(cell, X), jax.jit(lambda x: f(cell, x))(X)
    assert cell.calls[...] == 3.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("remat_of", [OURS, nnx.remat], ids=["ours", "flax"])
def test_a_static_module_is_traced_and_differentiated(mode, remat_of):
    graph, updates = MODES[mode]
    options = {"graph": graph, "graph_updates": updates}
    model = MLP(nnx.Rngs(0))

    def loss(call):
        return nnx.grad(lambda model: call(model).sum())(model)

    rematted = remat_of(MLP.__call__, static_argnums=0, **options)
    expected, got = loss(lambda model: model(X)), loss(lambda model: rematted(model, X))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, expected)
    np.testing.assert_allclose(
        remat_of(lambda x, w: x * w[0], static_argnums=1, **options)(X, model.up.bias),
        X * model.up.bias[0],
    )


def test_a_variable_by_keyword_is_traced_though_static():
    model = MLP(nnx.Rngs(0))
    f = OURS(lambda x, w: x * w[0], static_argnums=1)
    np.testing.assert_allclose(f(X, w=model.up.bias), X * model.up.bias[0])


@pytest.mark.parametrize("mode", MODES)
def test_a_static_container_holds_no_module(mode):
    graph, updates = MODES[mode]
    f = OURS(lambda x, ms: x, static_argnums=1, graph=graph, graph_updates=updates)
    with pytest.raises(remat.StaticArgumentError, match="modules and Variables are always traced"):
        f(X, (MLP(nnx.Rngs(0)), 3))


@pytest.mark.parametrize("option", ["graph", "graph_updates"])
def test_modes_are_bools(option):
    for f in (MLP.__call__, MLP(nnx.Rngs(0))):
        with pytest.raises(remat.errors.OptionError, match=f"{option} is a bool or None, not 3"):
            OURS(f, **{option: 3})


# --------------------------------------------------------------------------------------------------


def test_a_policy_saves_what_it_names():
    def block(m, x):
        return jnp.sin(remat.checkpoint_name(m(x), "hidden"))

    model = MLP(nnx.Rngs(0))
    graph, state = nnx.split(model)

    def recomputed_dots(policy):
        f = OURS(block, policy=policy)
        text = str(
            jax.make_jaxpr(jax.grad(lambda s: f(nnx.merge(graph, s, copy=True), X).sum()))(state)
        )
        return text.count("dot_general[")

    assert recomputed_dots(remat.policies.save_only_these_names("hidden")) < recomputed_dots(None)


def test_temporaries_of_unrolled_layers_shrink():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

        def __call__(self, x):
            return x + self.down(jnp.sin(jnp.tanh(self.up(x))))

    layers = nnx.List([Layer(nnx.Rngs(n)) for n in range(24)])
    graph, state = nnx.split(layers)
    x = jnp.ones((256, 16))

    def loss(lift, state):
        y = x
        for layer in nnx.merge(graph, state, copy=True):
            y = lift(Layer.__call__)(layer, y)
        return y.sum()

    ours, without = (
        temporaries(jax.grad(functools.partial(loss, lift)), state) for lift in (OURS, lambda f: f)
    )
    assert ours <= 0.35 * without


def test_metadata_that_cannot_be_hashed_is_compared_only():
    """`jax.jit` takes such states, too, since it compares the structures of pytrees."""

    class Tagged(nnx.Variable):
        pass

    class Chain(nnx.Module):
        def __init__(self, tag):
            self.w = Tagged(jnp.full((64, 64), 0.1), tag=tag)

    def step(state, x):
        def loss(state):
            seen.append(1)
            h = x
            for _ in range(8):
                h = jnp.tanh(h @ nnx.merge(graph, state).w[...])
            return jnp.sum(h**2)

        return jax.value_and_grad(loss)(state)

    seen = []
    graph, state = nnx.split(Chain({"units": "mm"}))
    x = jnp.ones((500, 64))
    fitted = remat.fit(step, budget="90%", cache=False, progress=False)
    np.testing.assert_array_equal(fitted(state, x)[0], jax.jit(step)(state, x)[0])
    traced = len(seen)
    fitted(nnx.split(Chain({"units": "mm"}))[1], x)
    assert len(seen) == traced
    fitted(nnx.split(Chain({"units": "kg"}))[1], x)
    assert len(seen) > traced
