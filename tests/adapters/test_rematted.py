"""Rematerialization by path: equal parameters, values and gradients, and regions at the paths."""

import contextlib
import sys

import jax
import jax.numpy as jnp
import pytest
from agreement import assert_same, regions

import remat
from remat.toggle import rematted

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(9), (4, 6))


# --------------------------------------------------------------------------------------------------
# Models


def test_an_unknown_model_is_refused():
    with pytest.raises(remat.errors.TargetError, match=r"not a builtins\.int"):
        rematted("a", 3)


def test_the_dispatcher_imports_no_framework():
    import subprocess

    code = (
        "import sys, remat, remat.toggle\n"
        "print([m for m in ('flax', 'equinox', 'haiku', 'brainstate') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# --------------------------------------------------------------------------------------------------
# Linen


@pytest.fixture
def linen():
    nn = pytest.importorskip("flax.linen")
    pytest.importorskip("remat.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, train=True, *, mode="plain"):
            assert mode in ("plain", "other")
            h = nn.BatchNorm(use_running_average=not train)(nn.Dense(6)(x))
            h = nn.Dropout(0.5, deterministic=not train)(jnp.tanh(h))
            self.sow("intermediates", "h", h)
            return x + nn.Dense(6)(h)

    class Encoder(nn.Module):
        def setup(self):
            self.layers = [Block() for _ in range(3)]

        def __call__(self, x, train=True):
            for layer in self.layers:
                x = layer(x, train, mode="other")
            return x

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train=True):
            encoder = Encoder(name="encoder")
            x = encoder(encoder(x, train), train)
            return Block()(x, train=train)

    return Model()


def run_linen(model, context):
    rngs = {"params": KEY, "dropout": jax.random.key(2)}
    with context:
        variables = jax.jit(model.init)(rngs, X)

        def loss(params):
            y, updated = model.apply(
                {**variables, "params": params},
                X,
                rngs={"dropout": jax.random.key(5)},
                mutable=["batch_stats", "intermediates"],
                capture_intermediates=True,
            )
            return (y**2).mean(), updated

        return variables, jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])


def test_linen_parameters_streams_collections_and_gradients_stay_the_same(linen):
    ours = run_linen(linen, rematted(["encoder/layers_*", "Block_0"]))
    assert_same(ours, run_linen(linen, contextlib.nullcontext()))


def test_linen_regions_are_at_the_paths(linen):
    variables = linen.init({"params": KEY, "dropout": KEY}, X)

    def count(globs):
        with rematted(globs):
            return regions(lambda v: linen.apply(v, X, train=False), variables)

    assert count("encoder/layers_*") == 6  # three layers; the encoder is called twice
    assert count(["encoder/layers_0", "Block_0"]) == 3
    assert count("encoder") == 2
    assert count("**/Dense_*") == 2 * 7


def test_linen_compiled_functions_follow_the_context(linen):
    variables = linen.init({"params": KEY, "dropout": KEY}, X)
    traces = []

    @jax.jit
    def step(variables):
        traces.append(None)
        return linen.apply(variables, X, train=False)

    step(variables)
    assert regions(step, variables) == 0
    for _ in range(3):  # an equal context reuses the compiled function
        with rematted("Block_0", policy=remat.policies.dots_saveable):
            step(variables)
            assert regions(step, variables) == 1
    step(variables)
    assert regions(step, variables) == 0
    assert len(traces) == 2


def test_linen_contexts_nest_and_other_interceptors_run_once(linen):
    import flax.linen as nn

    calls = []

    def note(next_fun, args, kwargs, context):
        if context.method_name == "__call__":
            calls.append("/".join(context.module.path))
        return next_fun(*args, **kwargs)

    variables = linen.init({"params": KEY, "dropout": KEY}, X)
    linen_apply = lambda: linen.apply(variables, X, train=False)  # noqa: E731
    with nn.intercept_methods(note):
        expected = linen_apply()
    plain, calls[:] = list(calls), []
    with nn.intercept_methods(note), rematted("encoder"), rematted("encoder/layers_*"):
        assert_same(linen_apply(), expected)
    assert calls == plain
    calls[:] = []
    with rematted("encoder"), rematted("encoder/layers_*"), nn.intercept_methods(note):
        assert_same(linen_apply(), expected)
    assert calls == plain


def test_linen_a_pattern_without_a_match_is_an_error_at_the_end(linen):
    variables = linen.init({"params": KEY, "dropout": KEY}, X)
    with (
        pytest.raises(remat.UnknownNameError, match=r"'encoder/layer_\*'; did you mean"),
        rematted("encoder/layer_*"),
    ):
        linen.apply(variables, X, train=False)
    with rematted("nothing", strict=False):
        linen.apply(variables, X, train=False)


def count_in(model, variables):
    return regions(lambda v: model.apply(v, X, train=False), variables)


def test_linen_the_context_acts_on_the_given_model_alone(linen):
    import flax.linen as nn

    class Outer(nn.Module):
        first: nn.Module
        second: nn.Module

        def __call__(self, x, train=False):
            return self.first(x, train) + self.second(x, train)

    other = type(linen)()
    assert other == linen
    variables = linen.init({"params": KEY, "dropout": KEY}, X)
    apply = jax.jit(lambda model, v: model.apply(v, X, train=False), static_argnums=0)
    n_regions = lambda model: regions(lambda v: apply(model, v), variables)  # noqa: E731
    for _ in range(2):
        with rematted("encoder/layers_*", linen):
            assert (n_regions(linen), n_regions(other)) == (6, 0)
            bound = linen.bind(variables)
        with rematted("Block_0", other):
            assert (n_regions(linen), n_regions(other)) == (0, 1)
    assert type(linen) is type(other) is type(bound) and n_regions(linen) == 0

    outer = Outer(linen, other)
    variables = outer.init({"params": KEY, "dropout": KEY}, X)
    with rematted("encoder", linen):
        assert count_in(outer, variables) == 2
    with rematted("second/Block_0", outer), rematted("Block_0", linen):
        assert count_in(outer, variables) == 2


@pytest.mark.parametrize("lift", ["jit", "remat"])
def test_linen_a_lifted_model_may_be_given(linen, lift):
    import flax.linen as nn

    class Small(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return nn.Dense(6, name="a")(x)

    model, other = getattr(nn, lift)(Small)(), Small()
    variables = model.init(KEY, X)
    with rematted("a", model):
        assert regions(lambda v: model.apply(v, X), variables) == 1
        assert regions(lambda v: linen.init_with_output(KEY, X, train=False)[0], variables) == 0
    with rematted("a", other):
        assert regions(lambda v: model.apply(v, X), variables) == 0


def test_linen_a_model_that_another_applies_by_itself_is_another(linen):
    import flax.linen as nn

    class Small(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(6, name="a")(x)

    class Teaching(nn.Module):
        @nn.compact
        def __call__(self, x, variables):
            return nn.Dense(6, name="a")(x) + Small().apply(variables, x)

    model, variables = Teaching(), Small().init(KEY, X)
    own = model.init(KEY, X, variables)
    with rematted("a", model):
        assert regions(lambda v: model.apply(v, X, variables), own) == 1


@pytest.mark.parametrize("given", [None, "model"])
def test_linen_methods_that_no_module_has_are_an_error_at_the_end(linen, given):
    variables = linen.init({"params": KEY, "dropout": KEY}, X)
    model = given and linen
    with (
        pytest.raises(remat.errors.TargetError, match=r"Block has none of .*'call'.*'__call__'"),
        rematted("encoder/layers_*", model, methods=("call",)),
    ):
        linen.apply(variables, X, train=False)
    with rematted("encoder/layers_*", model, methods="__call__"):
        assert count_in(linen, variables) == 6


@pytest.mark.parametrize("methods", [(), [3], 3, None, ("",)])
@pytest.mark.parametrize("make", [lambda: None, lambda: nnx_model()[1], lambda: equinox_mlp()])
def test_methods_that_are_no_names_are_refused(make, methods):
    pytest.importorskip("flax")
    with pytest.raises(remat.errors.MethodError, match="methods"):
        rematted("**", make(), methods=methods).__enter__()


@pytest.mark.parametrize("make", [lambda: nnx_model()[1], lambda: equinox_mlp()])
def test_one_method_may_be_given_by_its_name(make):
    with rematted("**", make(), methods="__call__"):
        pass
    with (
        pytest.raises(remat.errors.TargetError, match=r"none of .*'decode'.*'__call__'"),
        rematted("**", make(), methods="decode"),
    ):
        pass


@pytest.mark.parametrize(
    ("make", "path", "cls"),
    [(lambda: nnx_model()[1], "head", "Block"), (lambda: equinox_mlp(), "layers/*", "Linear")],
    ids=["nnx", "equinox"],
)
def test_wrong_paths_methods_and_policies_are_errors(make, path, cls):
    model = make()
    with (
        pytest.raises(remat.UnknownNameError, match=r"did you mean 'layers/[0-2]'"),
        rematted("layer/*", model),
    ):
        pass
    with (
        pytest.raises(remat.errors.TargetError, match=rf"{cls} has none of .*'decode'"),
        rematted(path, model, methods=["decode"]),
    ):
        pass
    with pytest.raises(remat.PolicyError), rematted(path, model, policy=3):
        pass


def test_modules_without_a_method_are_not_taken_for_callable():
    nnx, model = nnx_model()
    with (
        pytest.raises(remat.errors.TargetError, match=r"List has none of .* at 'layers'"),
        rematted("layers", model),
    ):
        pass
    block = type(model.head)
    with rematted("**", model):
        assert type(model.layers) is nnx.List and type(model.head) is not block


def test_linen_an_error_inside_is_not_replaced(linen):
    with pytest.raises(ZeroDivisionError), rematted("nothing"):
        linen.init({"params": KEY, "dropout": KEY}, X)
        raise ZeroDivisionError


# --------------------------------------------------------------------------------------------------
# NNX


def nnx_model():
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.dropout = nnx.Linear(6, 6, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
            self.calls = nnx.BatchStat(jnp.array(0.0))

        def __call__(self, x, deterministic=False, *, mode="plain"):
            assert mode == "other" and isinstance(deterministic, bool)
            self.calls[...] += 1
            return x + self.dropout(jnp.tanh(self.linear(x)), deterministic=deterministic), mode

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Block(rngs) for _ in range(3)])
            self.head = Block(rngs)

        def __call__(self, x):
            for layer in self.layers:
                x, mode = layer(x, False, mode="other")
                assert mode == "other"
            return self.head(x, deterministic=True, mode="other")[0]

    return nnx, Model(nnx.Rngs(0))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_nnx_state_streams_and_gradients_stay_the_same(jit):
    def run(toggle):
        nnx, model = nnx_model()
        step = nnx.value_and_grad(lambda model: (model(X) ** 2).mean())
        step = nnx.jit(step) if jit else step
        with rematted("layers/*", model) if toggle else contextlib.nullcontext():
            return step(model), nnx.state(model)

    assert_same(run(True), run(False))


def test_nnx_regions_are_at_the_paths_while_the_context_lasts():
    nnx, model = nnx_model()

    def count():
        graph, state = nnx.split(model)
        return regions(lambda state: nnx.merge(graph, state, copy=True)(X), state)

    classes = [type(m) for _, m in nnx.iter_modules(model)]
    with rematted("layers/*", model) as same:
        assert same is model and count() == 3
        with rematted("head", model):
            assert count() == 4
    assert count() == 0 and classes == [type(m) for _, m in nnx.iter_modules(model)]


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap], ids=lambda f: f.__name__)
def test_nnx_a_model_that_is_closed_over_works(transform):
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Sequential(nnx.Linear(6, 6, rngs=nnx.Rngs(0)), nnx.Linear(6, 6, rngs=nnx.Rngs(1)))
    expected = model(X)
    with rematted("layers/*", model):
        assert_same(transform(lambda x: model(x))(X), expected)
    assert_same(model(X), expected)


def test_nnx_the_context_ends_after_an_error_too():
    _, model = nnx_model()
    cls = type(model.head)
    with pytest.raises(ZeroDivisionError), rematted("head", model):
        assert type(model.head) is not cls and type(model.head).__name__ == cls.__name__
        raise ZeroDivisionError
    assert type(model.head) is cls


# --------------------------------------------------------------------------------------------------
# Equinox


@pytest.fixture
def eqx():
    return pytest.importorskip("equinox")


def equinox_mlp():
    return pytest.importorskip("equinox").nn.MLP(6, 6, 8, 2, key=KEY)


def equinox_model(eqx):
    k = jax.random.split(KEY, 3)
    mlp = eqx.nn.MLP(6, 6, 8, 2, key=k[0])
    return {"encoder": mlp, "heads": [eqx.nn.Linear(6, 6, key=key) for key in k[1:]]}


def equinox_loss(model, x):
    h = model["encoder"](x)
    return sum((head(h) ** 2).sum() for head in model["heads"])


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_equinox_leaves_paths_and_gradients_stay_the_same(eqx, jit):
    import remat.equinox

    model = eqx.nn.MLP(6, 6, 8, 2, key=KEY)
    step = eqx.filter_value_and_grad(lambda model: (model(X[0]) ** 2).sum())
    step = eqx.filter_jit(step) if jit else step
    with rematted("layers/*", model) as changed:
        value, grads = step(changed)
    paths = lambda tree: [p for p, _ in jax.tree_util.tree_leaves_with_path(tree)]  # noqa: E731
    assert paths(changed) == paths(model)
    assert paths(grads) == paths(eqx.filter(model, eqx.is_inexact_array))
    expected = step(model)
    assert_same((value, remat.equinox.without_remat(grads)), expected)
    assert_same(jax.tree.leaves(grads), jax.tree.leaves(expected[1]))
    assert isinstance(changed.layers[0], eqx.nn.Linear) and changed.layers[0].in_features == 6


def test_equinox_regions_are_at_the_paths(eqx):
    from remat.equinox import with_remat, without_remat

    model = equinox_model(eqx)

    def count(model):
        params, rest = eqx.partition(model, eqx.is_array)
        return regions(lambda p: equinox_loss(eqx.combine(p, rest), X[0]), params)

    assert count(with_remat("encoder/layers/*", model)) == 3
    assert count(with_remat(["encoder", "heads/1"], model)) == 2
    both = with_remat("heads/0", with_remat("encoder", model, policy=remat.policies.dots_saveable))
    assert count(both) == 2
    assert count(without_remat(both)) == count(model) == 0


def test_equinox_equal_options_give_equal_structures(eqx):
    from remat.equinox import with_remat

    model = eqx.nn.MLP(6, 6, 8, 2, key=KEY)
    traces = []

    @eqx.filter_jit
    def step(model):
        traces.append(None)
        return model(X[0])

    for policy in (None, None, remat.policies.save("a", strict=False)):
        step(with_remat("layers/*", model, policy=policy))
        step(with_remat("layers/*", model, policy=policy))
    assert len(traces) == 2
