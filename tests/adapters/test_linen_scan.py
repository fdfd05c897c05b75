"""`remat.linen.remat_scan` compared with `flax.linen.remat_scan` and `nn.scan`."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat.linen
from remat.errors import BudgetError, ScheduleError

slow = pytest.mark.slow
KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 15).reshape(5, 3)


def assert_trees_equal(a, b, atol=0.0):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), (_, y) in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree_util.tree_leaves_with_path(b)
    ):
        assert x.shape == y.shape, path
        np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


class Block(nn.Module):
    """A block with parameters, also in a submodule, batch statistics, dropout and a sown value."""

    train: bool = False

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.normal(), (x.shape[-1],))
        h = nn.Dense(x.shape[-1])(jnp.tanh(x * (1 + scale)))
        h = nn.BatchNorm(use_running_average=not self.train, momentum=0.5)(h)
        self.sow("intermediates", "h", h)
        return x + nn.Dropout(0.5, deterministic=not self.train)(h)


class DrawsKeys(nn.Module):
    """A module that draws keys in its own scope, where the number of traces determines the keys."""

    @nn.compact
    def __call__(self, x):
        noise = jax.random.normal(self.make_rng("noise"), x.shape)
        return nn.Dense(x.shape[-1])(x + noise)


def stack(remat_scan, target=Block, lengths=(2, 3), name="stack", **options):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, **fields):
            return remat_scan(target, lengths=lengths, **options)(name=name, **fields)(x)

    return Model()


class BigModel(nn.Module):
    remat_scan: object

    @nn.compact
    def __call__(self, x):
        DenseStack = self.remat_scan(nn.Dense, lengths=(10, 10))
        return DenseStack(8, name="dense_stack")(x)


def test_documented_example_equals_flax():
    x = jnp.linspace(0, 1, 16).reshape(2, 8)
    ours, theirs = BigModel(remat.linen.remat_scan), BigModel(nn.remat_scan)
    variables = ours.init(KEY, x)
    assert_trees_equal(variables, theirs.init(KEY, x))
    assert_trees_equal(ours.apply(variables, x), theirs.apply(variables, x))

    def grad(model):
        return jax.jit(jax.grad(lambda v: model.apply(v, x).sum()))(variables)

    assert_trees_equal(grad(ours), grad(theirs), atol=1e-6)


@pytest.mark.parametrize("lengths", [(4,), (2, 3), pytest.param((2, 1, 3), marks=slow)])
@pytest.mark.parametrize("target", [Block, DrawsKeys, nn.Dense])
def test_initial_values_equal_flax(target, lengths):
    target = functools.partial(target, 3) if target is nn.Dense else target
    keys = {"params": KEY, "noise": jax.random.key(1)}
    ours = stack(remat.linen.remat_scan, target, lengths).init(keys, X)
    theirs = stack(nn.remat_scan, target, lengths).init(keys, X)
    assert_trees_equal(ours, theirs)


@pytest.mark.parametrize(
    ("lengths", "jit"),
    [
        pytest.param((4,), True, marks=slow),
        pytest.param((2, 3), False, marks=slow),
        ((2, 3), True),
        pytest.param((2, 1, 2), True, marks=slow),
    ],
)
def test_training_step_equals_flax(lengths, jit):
    theirs = stack(nn.remat_scan, lengths=lengths)
    variables = theirs.init(KEY, X)
    params = variables["params"]

    def step(model, params):
        def loss(params):
            out, mutated = model.apply(
                {**variables, "params": params},
                X,
                train=True,
                mutable=["batch_stats", "intermediates"],
                rngs={"dropout": jax.random.key(7)},
            )
            return (out**2).sum(), (out, mutated)

        return jax.value_and_grad(loss, has_aux=True)(params)

    ours = stack(remat.linen.remat_scan, lengths=lengths)
    run = jax.jit(step, static_argnums=0) if jit else step
    assert_trees_equal(run(ours, params), run(theirs, params), atol=2e-5)


def test_keys_drawn_by_the_body_equal_flax():
    rngs = {"noise": jax.random.key(3)}
    for lengths in [(4,), (2, 2)]:
        ours = stack(remat.linen.remat_scan, DrawsKeys, lengths)
        theirs = stack(nn.remat_scan, DrawsKeys, lengths)
        variables = theirs.init({"params": KEY, **rngs}, X)
        assert_trees_equal(
            ours.apply(variables, X, rngs=rngs), theirs.apply(variables, X, rngs=rngs)
        )


def test_second_order_gradients_equal_flax():
    theirs, ours = (stack(f, lengths=(2, 2)) for f in (nn.remat_scan, remat.linen.remat_scan))
    variables = theirs.init(KEY, X)

    def loss(model, x):
        return (model.apply(variables, x) ** 2).sum()

    def params_loss(model, params):
        return (model.apply({**variables, "params": params}, X) ** 2).sum()

    def hessian(model):
        return jax.jit(jax.hessian(functools.partial(loss, model)))(X[:1])

    assert_trees_equal(hessian(ours), hessian(theirs), atol=1e-5)

    def of_grad(model):
        def norm(params):
            grads = jax.grad(functools.partial(params_loss, model))(params)
            return sum((g**2).sum() for g in jax.tree.leaves(grads))

        return jax.jit(jax.grad(norm))(variables["params"])

    assert_trees_equal(of_grad(ours), of_grad(theirs), atol=1e-3)


@slow
def test_jvp_and_vmap_equal_flax():
    theirs, ours = (stack(f, lengths=(2, 2)) for f in (nn.remat_scan, remat.linen.remat_scan))
    variables = theirs.init(KEY, X)
    many = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), variables)

    def results(model):
        def loss(v):
            return (model.apply(v, X) ** 2).sum()

        return (
            jax.jvp(loss, (variables,), (variables,)),
            jax.vmap(jax.grad(loss))(many),
            jax.vmap(lambda x: model.apply(variables, x))(jnp.stack([X, -X])),
        )

    jitted = jax.jit(results, static_argnums=0)
    assert_trees_equal(jitted(ours), jitted(theirs), atol=1e-4)


@pytest.mark.parametrize("axis", [pytest.param(0, marks=slow), 1, -1])
def test_variable_axes_equal_flax(axis):
    options = {"variable_axes": {"params": axis}, "split_rngs": {"params": True}}
    target = functools.partial(nn.Dense, 3, use_bias=True)
    ours = stack(remat.linen.remat_scan, target, (2, 4), **options)
    theirs = stack(nn.remat_scan, target, (2, 4), **options)
    variables = ours.init(KEY, X)
    assert_trees_equal(variables, theirs.init(KEY, X))
    assert_trees_equal(ours.apply(variables, X), theirs.apply(variables, X), atol=1e-6)


@pytest.mark.parametrize("lengths", [(4,), (2, 2)])
def test_broadcast_parameters_equal_flax(lengths):
    options = {"variable_broadcast": "params", "variable_axes": {}, "split_rngs": {"params": False}}
    target = functools.partial(nn.Dense, 3)
    ours = stack(remat.linen.remat_scan, target, lengths, **options)
    theirs = stack(nn.remat_scan, target, lengths, **options)
    variables = ours.init(KEY, X)
    assert_trees_equal(variables, theirs.init(KEY, X))

    def grad(model):
        return jax.grad(lambda v: model.apply(v, X).sum())(variables)

    assert_trees_equal(grad(ours), grad(theirs), atol=1e-6)


class Shares(nn.Module):
    """A parameter that all layers share, one parameter per layer, and a counter that is carried."""

    @nn.compact
    def __call__(self, x):
        shared = self.variable(
            "shared", "w", lambda: nn.initializers.normal()(self.make_rng("shared"), (3,))
        )
        own = self.param("own", nn.initializers.normal(), (3,))
        count = self.variable("counters", "count", lambda: jnp.zeros((), jnp.int32))
        count.value += 1
        return x * shared.value + own * count.value


@pytest.mark.parametrize("lengths", [(4,), (2, 2), pytest.param((2, 2, 2), marks=slow)])
def test_broadcast_carry_and_own_variables_equal_flax(lengths):
    options = {
        "variable_broadcast": "shared",
        "variable_carry": "counters",
        "variable_axes": {"params": 0},
        "split_rngs": {"params": True, "shared": False},
    }
    keys = {"params": KEY, "shared": jax.random.key(5)}
    ours = stack(remat.linen.remat_scan, Shares, lengths, **options)
    theirs = stack(nn.remat_scan, Shares, lengths, **options)
    # Flax cannot create a carried variable in the loop, so it must exist before.
    start = {"counters": {"stack": {"count": jnp.zeros((), jnp.int32)}}}

    def made(model):
        return model.apply(start, X, rngs=keys, mutable=True)

    assert_trees_equal(made(ours), made(theirs))
    variables = made(ours)[1]

    def again(model):
        return model.apply(variables, X, mutable=["counters"])

    assert_trees_equal(again(ours), again(theirs))
    assert again(ours)[1]["counters"]["stack"]["count"] == 2 * np.prod(lengths)


def test_function_and_method_targets_equal_flax():
    def results(remat_scan):
        class ByFunction(nn.Module):
            @nn.compact
            def __call__(self, x):
                dense = nn.Dense(3, name="dense")
                return remat_scan(lambda m, x: m(x), lengths=(2, 2))(dense, x)

        class ByMethod(nn.Module):
            @functools.partial(remat_scan, lengths=(2, 2))
            @nn.compact
            def __call__(self, x):
                return nn.Dense(3)(x)

        out = []
        for model in (ByFunction(), ByMethod()):
            variables = model.init(KEY, X)
            out.append((variables, jax.grad(lambda v, m=model: m.apply(v, X).sum())(variables)))
        return out

    assert_trees_equal(results(remat.linen.remat_scan), results(nn.remat_scan), atol=1e-6)


def test_module_instance_is_a_target():
    lifted = remat.linen.remat_scan(nn.Dense(3), lengths=(2, 2))
    assert lifted.init(KEY, X)["params"]["kernel"].shape == (2, 2, 3, 3)


# --------------------------------------------------------------------------------------------------
# Features that Flax's own remat_scan lacks


def scanned(length, **options):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, **fields):
            Scan = nn.scan(
                ScanBlock,
                variable_axes={True: 0},
                split_rngs={True: True},
                in_axes=options.pop("in_axes", 0),
                length=length,
            )
            return Scan(name="stack", **fields)(x, None)[0]

    return Model()


class ScanBlock(Block):
    @nn.compact
    def __call__(self, x, _):
        return Block.__call__(self, x), None


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((2, 3), {"params_layout": "flat"}),
        pytest.param((6, 1), {"params_layout": "flat"}, marks=slow),
        pytest.param("auto", {"length": 6}, marks=slow),
        pytest.param("auto", {"length": 6, "levels": 2}, marks=slow),
        pytest.param("auto", {"length": 7}, marks=slow),
        ("auto", {"length": 11, "levels": 3}),
    ],
)
def test_flat_layout_is_that_of_scan_with_its_initial_values(lengths, options):
    length = options.get("length", 6)
    ours = stack(remat.linen.remat_scan, Block, lengths, **options)
    theirs = scanned(length)
    variables = theirs.init(KEY, X)
    assert_trees_equal(ours.init(KEY, X), variables)

    def step(model):
        def loss(params):
            out, mutated = model.apply(
                {**variables, "params": params},
                X,
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": jax.random.key(7)},
            )
            return (out**2).sum(), (out, mutated)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])

    assert_trees_equal(step(ours), step(theirs), atol=2e-5)


class TakesInputs(nn.Module):
    @nn.compact
    def __call__(self, x, bias, shared):
        y = nn.Dense(x.shape[-1])(x + bias) * shared
        return jnp.tanh(y), (y.sum(), shared)


@pytest.mark.parametrize("layout", ["nested", "flat"])
@pytest.mark.parametrize("lengths", [pytest.param((6,), marks=slow), (2, 3), "auto"])
def test_inputs_and_outputs_are_scanned_or_broadcast_as_in_scan(lengths, layout):
    if lengths == "auto" and layout == "nested":
        pytest.skip("auto lengths have no nested layout")
    in_axes, out_axes = (1, nn.broadcast), (0, nn.broadcast)
    bias = jnp.linspace(0, 1, 18).reshape(3, 6)

    class Ours(nn.Module):
        @nn.compact
        def __call__(self, x):
            Stack = remat.linen.remat_scan(
                TakesInputs,
                lengths,
                in_axes=in_axes,
                out_axes=out_axes,
                params_layout=layout,
            )
            return Stack(name="stack")(x, bias, jnp.float32(0.5))

    class Theirs(nn.Module):
        @nn.compact
        def __call__(self, x):
            Stack = nn.scan(
                TakesInputs,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=in_axes,
                out_axes=out_axes,
            )
            return Stack(name="stack")(x, bias, jnp.float32(0.5))

    variables = Theirs().init(KEY, X)
    if layout == "flat":
        assert_trees_equal(Ours().init(KEY, X), variables)
    shape = lengths if layout == "nested" else (6,)
    shaped = jax.tree.map(lambda p: p.reshape(*shape, *p.shape[1:]), variables)
    (x, (ys, shared)), (x_, (ys_, shared_)) = Ours().apply(shaped, X), Theirs().apply(variables, X)
    assert_trees_equal((x, ys, shared), (x_, ys_, shared_), atol=1e-6)

    def grad(model, variables):
        return jax.grad(lambda v: model.apply(v, X)[1][0].sum())(variables)

    flat = jax.tree.map(lambda p: p.reshape(6, *p.shape[len(shape) :]), grad(Ours(), shaped))
    assert_trees_equal(flat, grad(Theirs(), variables), atol=1e-5)


def test_partitioned_parameters_name_the_layer_axis():
    class Partitioned(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
            return nn.Dense(3, kernel_init=init)(x)

    model = stack(
        remat.linen.remat_scan,
        Partitioned,
        "auto",
        length=5,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )
    variables = model.init(KEY, X)
    specs = nn.get_partition_spec(variables)["params"]["stack"]["Dense_0"]
    assert tuple(specs["kernel"]) == ("layers", "in", "out")
    assert model.apply(variables, X).shape == X.shape


@pytest.mark.parametrize(
    ("lengths", "options", "says"),
    [
        ((), {}, "lengths is empty"),
        (None, {}, "lengths is empty"),
        ((2, 0), {}, "at least 1"),
        ("automatic", {}, '"auto"'),
        ((2, 2), {"budget": "1MiB"}, 'lengths="auto"'),
        ((2, 2), {"length": 5}, "length=5"),
        ("auto", {"length": 4, "params_layout": "nested"}, 'params_layout="flat"'),
        ("auto", {"length": 4, "params_layout": "stacked"}, "'stacked'"),
    ],
)
def test_impossible_lengths_are_errors(lengths, options, says):
    with pytest.raises(ScheduleError, match=says):
        remat.linen.remat_scan(nn.Dense, lengths, **options)


def test_wrong_number_of_layers_names_both_numbers():
    variables = stack(remat.linen.remat_scan, lengths=(2, 3)).init(KEY, X)
    with pytest.raises(ScheduleError, match=r"\(3, 2\).*\(2, 3\)"):
        stack(remat.linen.remat_scan, lengths=(3, 2)).apply(variables, X)


def test_budget_is_met_or_the_smallest_possible_is_named():
    class Wide(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(x.shape[-1])(jnp.tanh(nn.Dense(32)(x)))

    x = jnp.ones((512, 8))

    def temporaries(**options):
        model = stack(remat.linen.remat_scan, Wide, "auto", length=64, **options)
        variables = jax.eval_shape(model.init, KEY, x)
        step = jax.jit(jax.grad(lambda v: model.apply(v, x).sum()))
        return step.lower(variables).compile().memory_analysis().temp_size_in_bytes

    least = temporaries()
    for budget in (600_000, 4_000_000):
        assert least <= temporaries(budget=budget) <= budget
    with pytest.raises(BudgetError, match=r"1\.0 KiB.*the smallest"):
        temporaries(budget="1KiB")


def test_a_nesting_is_chosen_for_a_symbolic_batch():
    model = stack(remat.linen.remat_scan, Block, "auto", length=5)
    variables = model.init(KEY, X)
    gradient = jax.jit(jax.grad(lambda v, x: (model.apply(v, x) ** 2).sum()))
    (b,) = jax.export.symbolic_shape("b")
    types = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), variables)
    x = jax.ShapeDtypeStruct((b, *X.shape[1:]), X.dtype)
    exported = jax.export.export(gradient)(types, x)
    assert_trees_equal(exported.call(variables, X), gradient(variables, X), atol=2e-5)
