"""`remat.linen.remat`: the cases that Flax's tests of `nn.remat` cover, and further ones."""

from __future__ import annotations

import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat.linen
from remat.errors import MethodError, PreventCseError, StaticArgumentError, TargetError

slow = pytest.mark.slow
KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)
both = pytest.mark.parametrize("remat_fn", [nn.remat, remat.linen.remat], ids=["flax", "ours"])


def assert_trees_equal(a, b, atol=0.0):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        np.testing.assert_allclose(x, y, rtol=0, atol=atol)


# --------------------------------------------------------------------------------------------------
# Models: each is a function of the remat to use


def mlp(remat_fn):
    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x):
            Dense = remat_fn(nn.Dense)
            return Dense(2)(jnp.tanh(Dense(5)(x)))

    return MLP(), (X,), {}


def resnet(remat_fn):
    class ResBlock(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.BatchNorm(use_running_average=False, momentum=0.5)(nn.Conv(2, (3,))(x))
            return x + nn.relu(h)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = remat_fn(ResBlock)()(x)
            return x

    return ResNet(), (X.reshape(2, 3, 2),), {"mutable": ["batch_stats"]}


def transformer(remat_fn):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            h = nn.MultiHeadDotProductAttention(2, qkv_features=4, decode=not train)(
                nn.LayerNorm()(x)
            )
            return x + nn.Dropout(0.5, deterministic=not train)(h)

    class Transformer(nn.Module):
        train: bool

        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = remat_fn(Block, static_argnums=(2,))()(x, self.train)
            return x

    return Transformer, (X.reshape(1, 3, 4),), {"rngs": {"dropout": jax.random.key(1)}}


def lstm(remat_fn):
    class LSTM(nn.Module):
        @nn.compact
        def __call__(self, xs):
            Scan = nn.scan(
                remat_fn(nn.LSTMCell, prevent_cse=False),
                variable_broadcast="params",
                split_rngs={"params": False},
                in_axes=1,
                out_axes=1,
            )
            carry = (jnp.zeros((2, 4)), jnp.zeros((2, 4)))
            return Scan(4, name="cell")(carry, xs)[1]

    return LSTM(), (jnp.linspace(-1, 1, 24).reshape(2, 3, 4),), {}


def shared(remat_fn):
    class Uses(nn.Module):
        layer: nn.Module

        @nn.compact
        def __call__(self, x):
            return jnp.tanh(self.layer(x)) + nn.Dense(4)(x)

    class Model(nn.Module):
        def setup(self):
            self.dense = nn.Dense(4)
            self.first = remat_fn(Uses)(self.dense)
            self.second = remat_fn(Uses)(self.dense)

        def __call__(self, x):
            return self.second(self.first(x)) + self.dense(x)

    return Model(), (X,), {}


MODELS = [mlp, resnet, transformer, lstm, shared]


def trained(make, remat_fn):
    model, args, options = make(remat_fn)
    if make is transformer:
        model = model(train=True)
    return model, args, options


@pytest.mark.parametrize(
    ("make", "order"),
    [(make, 1) for make in MODELS]
    + [
        (make, 2) if make in (mlp, shared) else pytest.param(make, 2, marks=slow) for make in MODELS
    ],
)
def test_models_equal_flax_at_first_and_second_order(make, order):
    (theirs, args, options), (ours, _, _) = (
        trained(make, nn.remat),
        trained(make, remat.linen.remat),
    )
    variables = theirs.init({"params": KEY, "dropout": KEY}, *args)
    assert_trees_equal(ours.init({"params": KEY, "dropout": KEY}, *args), variables)

    def results(model, variables):
        def loss(params):
            out = model.apply({**variables, "params": params}, *args, **options)
            out, mutated = out if "mutable" in options else (out, {})
            return (out**2).sum(), (out, mutated)

        def norm(params):
            grads = jax.grad(loss, has_aux=True)(params)[0]
            return sum((g**2).sum() for g in jax.tree.leaves(grads))

        derivative = jax.value_and_grad(loss, has_aux=True) if order == 1 else jax.grad(norm)
        return derivative(variables["params"])

    jitted = jax.jit(results, static_argnums=0)
    expected = jitted(theirs, variables)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
    assert_trees_equal(jitted(ours, variables), expected, atol=1e-5 * 10 ** (order - 1) * scale)


@pytest.mark.parametrize("make", [mlp, pytest.param(resnet, marks=pytest.mark.slow)])
def test_models_equal_flax_in_eager(make):
    def results(remat_fn):
        model, args, options = trained(make, remat_fn)
        variables = model.init(KEY, *args)

        def loss(params):
            out = model.apply({**variables, "params": params}, *args, **options)
            out, mutated = out if "mutable" in options else (out, {})
            return (out**2).sum(), (out, mutated)

        return variables, jax.value_and_grad(loss, has_aux=True)(variables["params"])

    assert_trees_equal(results(remat.linen.remat), results(nn.remat), atol=1e-5)


def test_decode_cache_equals_flax():
    def results(remat_fn):
        model, (x,), _ = transformer(remat_fn)
        model = model(train=False)
        variables = model.init(KEY, x)
        state, outs = variables, []
        for t in range(3):
            out, mutated = model.apply(state, x[:, t : t + 1], mutable=["cache"])
            state = {**state, **mutated}
            outs.append(out)
        return variables, state, outs

    assert_trees_equal(results(remat.linen.remat), results(nn.remat), atol=1e-6)


# --------------------------------------------------------------------------------------------------
# Targets, names and methods


@both
def test_class_target_is_named_after_the_transform(remat_fn):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return remat_fn(nn.Dense)(3)(remat_fn(nn.Dense)(3, name="named")(x))

    assert set(Model().init(KEY, X)["params"]) == {"CheckpointDense_0", "named"}
    assert remat_fn(nn.Dense).__name__ == "CheckpointDense"
    assert issubclass(remat_fn(nn.Dense), nn.Dense)


def test_keep_names_gives_the_parameters_of_the_model_without_remat():
    def model(dense):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                for _ in range(2):
                    x = dense(4)(x)
                return nn.Dense(2)(x)

        return Model()

    plain = model(nn.Dense)
    lifted = model(remat.linen.remat(nn.Dense, keep_names=True))
    variables = plain.init(KEY, X)
    assert_trees_equal(lifted.init(KEY, X), variables)
    assert_trees_equal(lifted.apply(variables, X), plain.apply(variables, X))
    assert "remat" in str(jax.make_jaxpr(lifted.apply)(variables, X))
    partial = remat.linen.remat(functools.partial(nn.Dense, 4), keep_names=True)
    assert partial().__class__.__name__ == "Dense"


@both
def test_partial_class_is_a_target(remat_fn):
    lifted = remat_fn(functools.partial(nn.Dense, 3))
    assert lifted(use_bias=False).init(KEY, X)["params"]["kernel"].shape == (4, 3)


# Flax does not look for `nn.compact` inside its own wrapper.
@pytest.mark.parametrize(
    ("remat_fn", "over"), [(nn.remat, True), (remat.linen.remat, True), (remat.linen.remat, False)]
)
def test_the_decorator_works_over_and_under_compact(remat_fn, over):
    class Model(nn.Module):
        def hidden(self, x):
            return nn.Dense(3)(jnp.sin(x))

        hidden = remat_fn(nn.compact(hidden)) if over else nn.compact(remat_fn(hidden))

        def __call__(self, x):
            return self.hidden(x)

    model = Model()
    variables = model.init(KEY, X)
    assert set(variables["params"]) == {"Dense_0"}
    text = str(jax.make_jaxpr(jax.grad(lambda v: model.apply(v, X).sum()))(variables))
    assert "remat" in text or "checkpoint" in text


@both
def test_a_function_of_a_module_is_a_target(remat_fn):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return remat_fn(lambda mdl, x: mdl(jnp.sin(x)))(nn.Dense(3), x)

    variables = Model().init(KEY, X)
    assert set(variables["params"]) == {"Dense_0"}
    assert Model().apply(variables, X).shape == (3, 3)


def test_module_target_keeps_its_name_and_parameters():
    class Model(nn.Module):
        lift: Any

        def setup(self):
            self.in_setup = self.lift(nn.Dense(4))

        @nn.compact
        def __call__(self, x):
            return self.lift(nn.Dense(3))(self.in_setup(x))

    lifted, plain = Model(remat.linen.remat), Model(lambda module: module)
    variables = plain.init(KEY, X)
    assert_trees_equal(lifted.init(KEY, X), variables)
    assert "remat" in str(jax.make_jaxpr(lifted.apply)(variables, X))
    alone = remat.linen.remat(nn.Dense(3))
    assert isinstance(alone, nn.Dense)
    assert_trees_equal(alone.init(KEY, X), nn.Dense(3).init(KEY, X))


def test_bound_method_is_a_target():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return remat.linen.remat(nn.Dense(3, name="dense").__call__)(x)

    variables = Model().init(KEY, X)
    assert set(variables["params"]) == {"dense"}
    assert "remat" in str(jax.make_jaxpr(Model().apply)(variables, X))


class Coder(nn.Module):
    def setup(self):
        self.encoder, self.decoder = nn.Dense(3), nn.Dense(4)

    def __call__(self, x):
        return self.decode(self.encode(x))

    def encode(self, x, double=False):
        return self.encoder(x) * (2 if double else 1)

    def decode(self, z, *, halve=False):
        return self.decoder(z) / (2 if halve else 1)


@both
def test_methods_are_lifted(remat_fn):
    lifted = remat_fn(Coder, methods=["encode", "decode"])()
    variables = Coder().init(KEY, X)
    assert_trees_equal(lifted.init(KEY, X), variables)
    z = lifted.apply(variables, X, method="encode")
    assert_trees_equal(z, Coder().apply(variables, X, method="encode"))
    text = str(jax.make_jaxpr(lambda v: lifted.apply(v, X))(variables))
    assert text.count("prevent_cse") == 2


def test_methods_mapping_has_options_for_each():
    lifted = remat.linen.remat(
        Coder,
        methods={"encode": {"static_argnums": 2}, "decode": {"static_argnames": "halve"}},
    )()
    variables = Coder().init(KEY, X)
    z = lifted.apply(variables, X, double=True, method="encode")
    assert_trees_equal(z, Coder().apply(variables, X, double=True, method="encode"))
    x = lifted.apply(variables, z, halve=True, method="decode")
    assert_trees_equal(x, Coder().apply(variables, z, halve=True, method="decode"))


def test_unknown_methods_and_options_name_the_closest():
    with pytest.raises(MethodError, match="did you mean 'encode'"):
        remat.linen.remat(Coder, methods=["encod"])
    with pytest.raises(MethodError, match="did you mean 'policy'"):
        remat.linen.remat(Coder, methods={"encode": {"polcy": None}})
    with pytest.raises(MethodError, match="list or tuple"):
        remat.linen.remat(Coder, methods="encode")


class NoCall(nn.Module):
    act: object = nn.relu

    def encode(self, x):
        return x


@pytest.mark.parametrize(
    ("target", "methods", "says"),
    [
        (NoCall, None, "NoCall has no method '__call__' to lift; Known: 'encode'"),
        (NoCall(), None, "NoCall has no method '__call__'"),
        (functools.partial(NoCall, nn.tanh), None, "NoCall has no method '__call__'"),
        (NoCall, ("encode", "act"), "NoCall has no method 'act'"),
        (NoCall, ("mro",), "NoCall has no method 'mro'"),
        (NoCall, (), "methods is empty"),
        (NoCall, {}, "methods is empty"),
    ],
)
def test_methods_that_a_class_does_not_have_are_errors(target, methods, says):
    with pytest.raises(MethodError, match=re.escape(says)):
        remat.linen.remat(target, methods=methods)


def test_other_targets_are_refused():
    for target in (3, "Dense", None):
        with pytest.raises(TargetError, match="Module class"):
            remat.linen.remat(target)


# --------------------------------------------------------------------------------------------------
# Static arguments and concrete values


class Switches(nn.Module):
    static: bool = True

    @nn.compact
    def __call__(self, x, train: bool = False):
        assert isinstance(train, bool) == self.static
        return nn.Dense(3, use_bias=False)(x)


@both
def test_static_argnums_count_self_as_zero(remat_fn):
    lifted = remat_fn(Switches, static_argnums=(2,))()
    variables = lifted.init(KEY, X, True)
    lifted.apply(variables, X, False)
    remat_fn(Switches, static_argnums=())(static=False).apply(variables, X, False)


@both
def test_a_decorator_takes_static_argnums(remat_fn):
    class Model(nn.Module):
        @functools.partial(remat_fn, static_argnums=(2,))
        @nn.compact
        def __call__(self, x, train):
            assert isinstance(train, bool)
            return nn.Dense(3)(x)

    Model().apply(Model().init(KEY, X, True), X, False)


@pytest.mark.parametrize(
    "statics", [{"static_argnums": 2}, {"static_argnums": -1}, {"static_argnames": "train"}]
)
def test_static_argument_may_come_by_keyword_or_default(statics):
    lifted = remat.linen.remat(Switches, **statics)()
    variables = lifted.init(KEY, X)
    for args, kwargs in (((True,), {}), ((), {"train": True}), ((), {})):
        jax.jit(lambda v, a=args, k=kwargs: lifted.apply(v, X, *a, **k))(variables)


def test_static_arguments_that_do_not_fit_are_errors():
    with pytest.raises(StaticArgumentError, match="0 is the module itself"):
        remat.linen.remat(Switches, static_argnums=0)
    with pytest.raises(StaticArgumentError, match="less than 3"):
        remat.linen.remat(Switches, static_argnums=3)
    with pytest.raises(StaticArgumentError, match="did you mean 'train'"):
        remat.linen.remat(Switches, static_argnames="trian")
    with pytest.raises(StaticArgumentError, match="did you mean 'halve'"):
        remat.linen.remat(Coder, methods=["encode", "decode"], static_argnames="halv")
    with pytest.raises(PreventCseError, match="is a bool"):
        remat.linen.remat(Switches, prevent_cse=(True, False))


def test_static_argnames_go_to_the_methods_that_have_them():
    lifted = remat.linen.remat(
        Coder, methods=["encode", "decode"], static_argnames=["halve", "double"]
    )()
    variables = Coder().init(KEY, X)
    z = lifted.apply(variables, X, double=True, method="encode")
    assert lifted.apply(variables, z, halve=True, method="decode").shape == (3, 4)


def test_concrete_allows_branches_on_values_outside_jit():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x if x.sum() > 0 else -x)

    lifted = remat.linen.remat(Model, concrete=True)()
    variables = lifted.init(KEY, X)
    grads = jax.grad(lambda v: lifted.apply(v, X + 1).sum())(variables)
    assert_trees_equal(
        grads, jax.grad(lambda v: Model().apply(v, X + 1).sum())(variables), atol=1e-6
    )


# --------------------------------------------------------------------------------------------------
# Collections and keys


@both
def test_sown_values_come_out_once(remat_fn):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("intermediates", "h", x.sum())
            return nn.Dense(3)(x)

    lifted = remat_fn(Model)()
    variables = lifted.init(KEY, X)

    def loss(params):
        y, mutated = lifted.apply({"params": params}, X, mutable=["intermediates"])
        return y.sum(), mutated

    _, mutated = jax.grad(loss, has_aux=True)(variables["params"])
    assert len(mutated["intermediates"]["h"]) == 1


@both
def test_collections_that_are_not_lifted_do_not_exist_inside(remat_fn):
    class Counts(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x), self.has_variable("extra", "x")

    variables = Counts().init(KEY, X)
    extra = {**variables, "extra": {"x": jnp.ones(())}}
    for lifted, expected in ((True, True), ("params", False), (nn.DenyList("extra"), False)):
        seen = remat_fn(Counts, variables=lifted)().apply(extra, X)[1]
        assert bool(seen) == expected


@both
def test_keys_that_are_not_lifted_do_not_exist_inside(remat_fn):
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x * (2 if self.has_rng("noise") else 1)

    rngs = {"noise": KEY}
    assert_trees_equal(remat_fn(Noisy)().apply({}, X, rngs=rngs), 2 * X)
    assert_trees_equal(remat_fn(Noisy, rngs="params")().apply({}, X, rngs=rngs), X)


@both
def test_dropout_masks_agree_in_the_recomputation(remat_fn):
    class Drop(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.sin(nn.Dropout(0.5, deterministic=False)(x))

    def grad(cls):
        model = cls()
        return jax.jit(jax.grad(lambda x: model.apply({}, x, rngs={"dropout": KEY}).sum()))(X)

    grads = grad(remat_fn(Drop))
    value = remat_fn(Drop)().apply({}, X, rngs={"dropout": KEY})
    assert_trees_equal(
        grads, jnp.where(value == 0, 0, 2 * jnp.cos(2 * X)) * (value != 0), atol=1e-5
    )


def test_policy_with_names_saves_them():
    class Named(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(jax.ad_checkpoint.checkpoint_name(jnp.sin(nn.Dense(4)(x)), "h"))

    import remat as package

    lifted = remat.linen.remat(Named, policy=package.policies.save("h"))()
    variables = lifted.init(KEY, X)
    grads = jax.grad(lambda v: lifted.apply(v, X).sum())(variables)
    assert_trees_equal(grads, jax.grad(lambda v: Named().apply(v, X).sum())(variables), atol=1e-6)
    misspelt = remat.linen.remat(Named, policy=package.policies.save("hh"))()
    with pytest.raises(package.UnknownNameError):
        misspelt.apply(variables, X)


# --------------------------------------------------------------------------------------------------
# With the other lifted transforms


def transforms(remat_fn):
    Lifted = remat_fn(Coder)
    scan = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}

    class Step(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return remat_fn(Coder)(name="coder")(x), None

    class OfScan(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.scan(Step, **scan)(name="scan")(x, None)[0]

    class OfVmap(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return nn.vmap(Lifted, in_axes=0, **axes)(name="vmap")(x)

    class OfCond(nn.Module):
        @nn.compact
        def __call__(self, x):
            coder = Lifted(name="coder")
            coder(x)
            return nn.cond(x.sum() > 0, lambda m, x: m(x), lambda m, x: -m(x), coder, x)

    class OfWhile(nn.Module):
        @nn.compact
        def __call__(self, x):
            coder = Lifted(name="coder")
            coder(x)

            def body(m, c):
                return c[0] + 1, m(c[1])

            return nn.while_loop(lambda m, c: c[0] < 2, body, coder, (0, x))[1]

    class OfJit(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.jit(Lifted)(name="jit")(x)

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            return remat_fn(remat_fn(Coder))(name="coder")(x)

    return {
        "scan of remat": OfScan(),
        "remat of scan": remat_fn(OfScan)(),
        "vmap": OfVmap(),
        "cond": OfCond(),
        "while_loop": OfWhile(),
        "jit": OfJit(),
        "remat of jit": remat_fn(OfJit)(),
        "nested": Twice(),
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=slow) if name in ("remat of jit", "remat of scan") else name
        for name in transforms(nn.remat)
    ],
)
def test_other_transforms_work_with_it(name):
    ours, theirs = transforms(remat.linen.remat)[name], transforms(nn.remat)[name]
    variables = ours.init(KEY, X)
    assert_trees_equal(variables, theirs.init(KEY, X))

    def result(model):
        if name == "while_loop":  # has no reverse-mode derivative
            return jax.jit(lambda v: model.apply(v, X))(variables)
        return jax.jit(jax.value_and_grad(lambda v: (model.apply(v, X) ** 2).sum()))(variables)

    assert_trees_equal(result(ours), result(theirs), atol=1e-5)


@both
def test_share_scope_and_nowrap_keep_their_effect(remat_fn):
    class Inner(nn.Module):
        @nn.nowrap
        def scale(self):
            return 2.0

        @nn.compact
        def __call__(self, x):
            return self.scale() * nn.Dense(3, name="dense")(x)

    class Outer(nn.Module):
        def setup(self):
            self.inner = remat_fn(Inner)()
            nn.share_scope(self, self.inner)

        def __call__(self, x):
            return self.inner(x)

    variables = Outer().init(KEY, X)
    assert set(variables["params"]) == {"dense"}
    assert Outer().apply(variables, X).shape == (3, 3)


@both
def test_partitioned_metadata_passes(remat_fn):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.ones, ("in", "out"))
            return nn.Dense(3, kernel_init=init)(x)

    variables = remat_fn(Model)().init(KEY, X)
    assert variables["params"]["Dense_0"]["kernel"].names == ("in", "out")
    grads = jax.grad(lambda v: remat_fn(Model)().apply(v, X).sum())(variables)
    assert grads["params"]["Dense_0"]["kernel"].names == ("in", "out")


@both
def test_submodules_may_be_in_containers_and_arguments_may_be_pytrees(remat_fn):
    class Model(nn.Module):
        layers: tuple[nn.Module, ...]

        @nn.compact
        def __call__(self, x, *, options):
            for layer in self.layers:
                x = layer(x) * options["scale"]
            return x

    model = remat_fn(Model)((nn.Dense(4), nn.Dense(3)))
    variables = model.init(KEY, X, options={"scale": 2.0})
    assert set(variables["params"]) == {"layers_0", "layers_1"}
    assert model.apply(variables, X, options={"scale": 2.0}).shape == (3, 3)


@both
def test_rematted_submodules_of_setup_keep_their_names(remat_fn):
    class Model(nn.Module):
        def setup(self):
            self.layers = [remat_fn(nn.Dense)(4) for _ in range(2)]
            self.head = remat_fn(nn.Dense)(2)

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return self.head(x)

    assert set(Model().init(KEY, X)["params"]) == {"layers_0", "layers_1", "head"}


def test_temporaries_of_an_unrolled_model_shrink():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(16)(jnp.sin(nn.Dense(64)(x)))

    class Model(nn.Module):
        block: Any

        @nn.compact
        def __call__(self, x):
            for _ in range(12):
                x = self.block()(x)
            return x.sum()

    x = jnp.ones((512, 16))

    def temporaries(block):
        model = Model(block)
        variables = jax.eval_shape(model.init, KEY, x)
        step = jax.jit(jax.grad(lambda v: model.apply(v, x)))
        return step.lower(variables).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(remat.linen.remat(Block)) < 0.35 * temporaries(Block)
