"""`remat.nnx.fit` and `remat.equinox.fit`: steps on modules that follow a plan."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import assert_same

import remat
from remat.errors import (
    BudgetError,
    OptionError,
    StaticArgumentError,
    StaticArgumentTypeError,
    TargetError,
)

nnx = pytest.importorskip("flax.nnx")
eqx = pytest.importorskip("equinox")
optax = pytest.importorskip("optax")

import remat.equinox  # noqa: E402
import remat.nnx  # noqa: E402

X = jax.random.normal(jax.random.key(1), (512, 16))
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)
nnx_fit = functools.partial(remat.nnx.fit, cache=False, progress=False)
eqx_fit = functools.partial(remat.equinox.fit, cache=False, progress=False)


# --------------------------------------------------------------------------------------------------
# Flax NNX


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(4)])
        self.layers[3].kernel = self.layers[0].kernel  # one Variable in two places
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.scale = nnx.Cache(jnp.ones(16))  # only read

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.dropout(x) * self.scale[...]


def nnx_step(model, optimizer, x, *, power=2):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** power))(model)
    optimizer.update(model, grads)
    return loss


def nnx_state():
    model = Net()
    return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)


def arrays_of(*graphs):
    leaves = jax.tree.leaves([nnx.state(graph) for graph in graphs])
    keys = [jnp.issubdtype(a.dtype, jax.dtypes.prng_key) for a in leaves]
    return [np.asarray(jax.random.key_data(a) if is_key else a) for a, is_key in zip(leaves, keys)]


class Marked(Net):
    """A model all of whose layers but the first are marked for recomputation."""

    def __call__(self, x):
        x = jnp.sin(self.layers[0](x))
        for layer in self.layers[1:]:
            x = remat.auto(lambda x, layer=layer: jnp.tanh(jnp.tanh(jnp.tanh(layer(x)))))(x)
        return x


def test_a_marked_part_of_an_nnx_module_is_what_a_plan_recomputes():
    def state():
        model = Marked()
        return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    as_written, planned = state(), state()
    step = nnx_fit(nnx_step, budget="90%")
    for _ in range(2):
        expected = nnx.jit(nnx_step)(*as_written, X)
        assert_same(step(*planned, X), expected)
    assert_same(arrays_of(*planned), arrays_of(*as_written))
    (plan,) = step.plans
    again = [v for r in plan.whole_step.recomputations for v in r.values]
    assert len(plan.marked) == 1 and again and not any("sin" in value for value in again)


@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_nnx_step_updates_modules_as_under_nnx_jit(donated):
    expected, ours = nnx_state(), nnx_state()
    train = nnx_fit(nnx_step, budget="80%", donate_argnums=donated)
    reference = nnx.jit(nnx_step)
    for _ in range(2):
        assert_same(train(*ours, X), reference(*expected, X))
    for a, b in zip(arrays_of(*ours), arrays_of(*expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    (plan,) = train.plans
    assert plan.is_verified and plan.peak_bytes < plan.peak_bytes_without_remat
    assert plan.made_for.donated if donated else not plan.made_for.donated
    assert ours[0].layers[3].kernel is ours[0].layers[0].kernel


def test_a_donated_module_that_the_step_only_reads_stays_usable():
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    kernel = np.asarray(model.kernel[...])
    train = nnx_fit(lambda m, x: jnp.sum(m(x)), budget="100%", donate_argnums=0)
    first = train(model, X)
    assert_same(first, train(model, X))
    np.testing.assert_array_equal(model.kernel[...], kernel)


def test_whatever_raises_leaves_donated_modules_as_they_were():
    model, optimizer = nnx_state()
    before = arrays_of(model, optimizer)

    def raises(model, optimizer, x):
        nnx_step(model, optimizer, x)
        model.layers[0].kernel[...] = jnp.zeros((16, 16))
        raise RuntimeError("in the step")

    class Other(Net):
        pass

    def changes_class(model, optimizer, x):
        object.__setattr__(model, "__class__", Other)
        return nnx_step(model, optimizer, x)

    for step, budget, error in [
        (raises, "80%", RuntimeError),
        (nnx_step, 1000, BudgetError),
        (changes_class, "80%", TargetError),
    ]:
        with pytest.raises(error):
            nnx_fit(step, budget=budget, donate_argnums=(0, 1))(model, optimizer, X)
        for a, b in zip(arrays_of(model, optimizer), before, strict=True):
            np.testing.assert_array_equal(a, b)
    assert type(model) is Net


def test_a_plan_of_a_step_on_the_state_of_nnx_modules_is_followed_by_fit():
    """The Variables in a State are data, as in `jax.jit`: those that do not change are results, too."""
    graphdef, state = nnx.split(nnx_state())

    def step(state, x):
        model, optimizer = nnx.merge(graphdef, state)
        value = nnx_step(model, optimizer, x)
        return nnx.state((model, optimizer)), value

    plan = remat.plan(step, state, X, budget="80%", cache=False, progress=False)
    assert_same(remat.fit(step, plan=plan)(state, X), jax.jit(step)(state, X))


def test_static_arguments_of_an_nnx_step_are_those_of_jit():
    state = nnx_state()
    train = nnx_fit(nnx_step, budget="100%", static_argnames="power")
    assert float(train(*state, X, power=2)) >= 0
    with pytest.raises(StaticArgumentError, match="static argument 0 of nnx_step holds a module"):
        nnx_fit(nnx_step, static_argnums=0)(*state, X)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: nnx_fit(Net()), TargetError, r"remat.nnx.fit\(Net.__call__\)"),
        (lambda: nnx_fit(Net().__call__), TargetError, "bound methods"),
        (lambda: nnx_fit(Net), TargetError, "not the class Net"),
        (lambda: nnx_fit(nnx_step, graph=True), OptionError, "no graph="),
        (lambda: nnx_fit(3), TargetError, "remat.nnx.fit takes a function"),
    ],
)
def test_wrong_nnx_steps_are_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_remat_fit_refuses_to_lose_updates_and_says_what_to_write():
    state = nnx_state()
    with pytest.raises(TargetError, match=r"\(.*Param.*Write remat.nnx.fit in place of remat.fit"):
        remat.fit(nnx_step, budget="80%", cache=False)(*state, X)

    def returns_model(model, x):
        model.bias[...] += x.sum(0)
        return model

    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    changed = remat.fit(returns_model, budget="100%", cache=False)(model, X)
    assert_same((changed.bias[...], model.bias[...]), (X.sum(0), jnp.zeros(16)))


def test_a_plan_of_an_nnx_step_is_that_of_the_fitted_step():
    state = nnx_state()
    plan = remat.plan(nnx_step, *state, X, budget="80%", cache=False, progress=False)
    followed = remat.nnx.fit(nnx_step, plan=plan)
    assert float(followed(*state, X)) >= 0  # the plan is not refused as that of another program
    assert int(state[1].step[...]) == 1


def test_an_nnx_step_is_explained_with_its_updates_and_the_names_of_its_parameters():
    for step in (nnx_step, nnx.jit(nnx_step, donate_argnums=(0, 1))):
        made = remat.explain(step, *nnx_state(), X, compile=False)
        assert {"forward", "backward", "update"} <= {step.phase for step in made.steps}
        assert any(v.path.startswith("model.layers[0].kernel") for v in made.values)
        assert "remat.nnx.fit(step, budget=" in made.findings[0].next_step


def test_fitted_modules_are_copied_and_pickled_and_run_without_jit():
    train = nnx_fit(nnx_step, budget="100%")
    for other in (copy.copy(train), pickle.loads(pickle.dumps(train))):
        assert other.plans == () and repr(other) == repr(train) == "<remat.fit of nnx_step>"
    state = nnx_state()
    with jax.disable_jit():
        train(*state, X)
    assert train.plans == () and int(state[1].step[...]) == 1


# --------------------------------------------------------------------------------------------------
# Equinox


def eqx_loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def eqx_step(model, state, x, note="none"):
    loss, grads = eqx.filter_value_and_grad(eqx_loss)(model, x)
    updates, state = OPTIMIZER.update(grads, state)
    return eqx.apply_updates(model, updates), state, loss, note


def eqx_state():
    model = eqx.nn.MLP(16, 16, 16, depth=4, key=jax.random.key(0))
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))


@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_equinox_step_is_that_of_filter_jit(donated):
    expected, ours = eqx_state(), eqx_state()
    train = eqx_fit(eqx_step, budget="80%", donate_argnums=donated)
    reference = eqx.filter_jit(eqx_step)
    for _ in range(2):
        *expected, loss, _ = reference(*expected, X)
        *ours, our_loss, note = train(*ours, X, "a note")
        assert_same(our_loss, loss)
        assert note == "a note"
    arrays = [jax.tree.leaves(eqx.filter(tree, eqx.is_array)) for tree in (ours, expected)]
    for a, b in zip(*arrays, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    (plan,) = train.plans
    assert plan.is_verified and plan.peak_bytes < plan.peak_bytes_without_remat
    assert plan.made_for.donated if donated else not plan.made_for.donated


def test_an_equinox_step_is_planned_again_for_other_leaves():
    train = eqx_fit(lambda x, scale: jnp.sum(x * scale), budget="100%")
    assert float(train(jnp.ones(4), 2)) == 8.0
    assert float(train(jnp.ones(4), 3)) == 12.0
    assert float(train(jnp.ones(4), 3)) == 12.0
    train(jnp.ones(4), 3.0)
    assert len(train.plans) == 3


def test_state_of_equinox_layers_passes_through_a_fitted_step():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="batch")

    def step(norm, state, x):
        y, state = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            x, state
        )
        return y, state

    fitted, _ = eqx_fit(step, budget="100%")(norm, state, jnp.ones((8, 4)))
    expected, _ = eqx.filter_jit(step)(norm, state, jnp.ones((8, 4)))
    assert_same(fitted, expected)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: eqx_fit(eqx_state()[0]), TargetError, r"remat.equinox.fit\(MLP.__call__\)"),
        (lambda: eqx_fit(eqx_step, donate="all"), OptionError, "donate_argnums="),
        (lambda: eqx_fit(eqx_step, static_argnums=3), OptionError, "no static_argnums="),
        (lambda: eqx_fit(3), TargetError, "a training step, a function, not 3"),
        (
            lambda: eqx_fit(lambda options, x: x)({"sizes": {1, 2}}, X),
            StaticArgumentTypeError,
            r"options\['sizes'\] is \{1, 2\}",
        ),
        (
            lambda: remat.fit(eqx_step, budget="80%", cache=False)(*eqx_state(), X),
            TargetError,
            "Write remat.equinox.fit in place of remat.fit",
        ),
    ],
)
def test_wrong_equinox_steps_are_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_an_equinox_step_is_planned_and_explained_as_it_is():
    fitted = eqx_fit(eqx_step, budget="80%")
    assert fitted.plan(*eqx_state(), X).is_verified
    made = remat.explain(eqx_step, *eqx_state(), X, compile=False)
    assert any(v.path == "model.layers[0].weight" for v in made.values)
    assert "remat.equinox.fit(step, budget=" in made.findings[0].next_step
    loss = remat.explain(eqx_loss, eqx_state()[0], X, compile=False)
    assert "remat.equinox.fit(eqx.filter_value_and_grad(loss)" in loss.findings[0].next_step


@pytest.mark.parametrize(
    ("donate", "n_donated"),
    [("none", 0), ("all-except-first", 1), ("warn-except-first", 1), ("warn", 2)],
)
def test_what_filter_jit_donates_is_donated_where_a_step_is_explained(donate, n_donated):
    @functools.partial(eqx.filter_jit, donate=donate)
    def step(weights, moments, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(weights)
        return weights - gradient, moments + gradient

    weights = jnp.ones((64, 64))
    memory = remat.explain(step, weights, weights, jnp.ones((16, 64)), compile=False).totals
    assert memory.predicted.alias_bytes == n_donated * weights.nbytes
    named = remat.explain(step, weights, x=jnp.ones((16, 64)), moments=weights, compile=False)
    assert named.totals.predicted.alias_bytes == n_donated * weights.nbytes
