"""`remat.brainstate` compared with `brainstate.transform`."""

import jax
import jax.numpy as jnp
import pytest

brainstate = pytest.importorskip("brainstate")

from agreement import assert_same, regions  # noqa: E402

import remat  # noqa: E402
from remat.brainstate import checkpoint as OURS, remat as alias  # noqa: E402
from remat.errors import StaticArgumentError, TargetError  # noqa: E402

THEIRS = brainstate.transform.checkpoint
both = pytest.mark.parametrize("lift", [THEIRS, OURS], ids=["brainstate", "ours"])
X = jax.random.normal(jax.random.key(9), (4, 6))


def none(fun, **_):
    return fun


class Spiking(brainstate.nn.Module):
    """A leaky integrate-and-fire cell with a surrogate gradient."""

    def __init__(self):
        super().__init__()
        self.weight = brainstate.ParamState(jax.random.normal(jax.random.key(0), (6, 5)))
        self.voltage = brainstate.HiddenState(jnp.zeros(5))
        self.spikes = brainstate.State(jnp.zeros(()))

    def __call__(self, x):
        v = 0.9 * self.voltage.value + x @ self.weight.value
        hard = (v > 1.0).astype(v.dtype)
        soft = jax.nn.sigmoid(4.0 * (v - 1.0))
        spike = soft + jax.lax.stop_gradient(hard - soft)
        self.voltage.value = v * (1.0 - spike)
        self.spikes.value = self.spikes.value + spike.sum()
        return spike


def train_cell(lift, jit, order=1):
    cell = Spiking()
    step = lift(cell)

    def loss():
        cell.voltage.value, cell.spikes.value = jnp.zeros(5), jnp.zeros(())
        return (brainstate.transform.for_loop(step, X) ** 2).mean() + cell.voltage.value.sum()

    weights = {"w": cell.weight}
    f = brainstate.transform.grad(loss, weights, return_value=True)
    if order == 2:
        first = brainstate.transform.grad(loss, weights)
        f = brainstate.transform.grad(lambda: (first()["w"] ** 2).sum(), weights, return_value=True)
    if jit:
        f = brainstate.transform.jit(f)
    return f(), cell.voltage.value, cell.spikes.value


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("order", [1, 2])
def test_a_spiking_cell_under_for_loop_has_the_same_gradients(jit, order):
    ours = train_cell(OURS, jit, order)
    assert_same(ours, train_cell(THEIRS, jit, order))
    assert_same(ours, train_cell(none, jit, order))


def mlp():
    return brainstate.nn.Sequential(
        brainstate.nn.Linear(6, 8), brainstate.nn.Tanh(), brainstate.nn.Linear(8, 6)
    )


def batch_norm():
    class Block(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = brainstate.nn.BatchNorm0d((6,))

        def __call__(self, x):
            return x + jnp.tanh(self.norm(x))

    return Block()


def dropout():
    return brainstate.nn.Sequential(brainstate.nn.Linear(6, 6), brainstate.nn.Dropout(0.5))


@pytest.mark.parametrize("make", [mlp, batch_norm, dropout], ids=lambda make: make.__name__)
def test_modules_agree_with_brainstates(make):
    def train(lift):
        brainstate.random.seed(0)
        model = make()
        call = lift(model)
        params = model.states(brainstate.ParamState)
        with brainstate.environ.context(fit=True):
            value = brainstate.transform.grad(
                lambda x: (call(call(x)) ** 2).mean(), params, return_value=True
            )(X)
        return value, [s.value for s in model.states().values()], brainstate.random.rand(2)

    ours = train(OURS)
    assert_same(ours, train(THEIRS))
    assert_same(ours, train(none))


def test_remat_is_checkpoint():
    assert alias is OURS and remat.brainstate.remat is OURS


@both
def test_a_module_keeps_its_shape(lift):
    assert lift(brainstate.nn.Linear(2, 3))(jnp.ones((1, 2))).shape == (1, 3)


@both
def test_it_works_inside_scan(lift):
    linear = brainstate.nn.Linear(3, 3)

    @lift
    def step(x, _):
        return linear(x), None

    y, _ = brainstate.transform.scan(step, jnp.ones((10, 3)), None, length=10)
    assert y.shape == (10, 3)


@both
def test_left_out_the_function_makes_a_decorator(lift):
    @lift(prevent_cse=False, policy=jax.checkpoint_policies.everything_saveable)
    def f(x):
        return jnp.sin(x)

    assert_same(jax.value_and_grad(f)(2.0), jax.value_and_grad(jnp.sin)(2.0))
    assert f.__name__ == "f"


@both
def test_arguments_may_be_positional_or_keywords(lift):
    f = lift(lambda x, y=2.0, *, z: {"out": x * y + z["a"]})
    assert_same(f(X, z={"a": 1.0}), {"out": X * 2.0 + 1.0})
    assert_same(f(x=X, y=X, z={"a": X}), {"out": X * X + X})


@both
def test_static_arguments_choose_a_branch_as_documented(lift):
    @lift(static_argnums=(1,))
    def foo(x, is_training):
        if is_training:
            return jnp.sin(x)
        return x

    assert_same(jax.grad(foo)(1.0, True), jnp.cos(1.0))
    assert_same(jax.jit(foo, static_argnums=1)(1.0, False), jnp.float32(1.0))


@both
def test_a_static_argument_may_be_compared_at_compile_time_as_documented(lift):
    @lift(static_argnums=(1,))
    def foo_with_eval(x, y):
        with jax.ensure_compile_time_eval():
            y_pos = y > 0
        if y_pos:
            return jnp.sin(x)
        return x * y

    assert_same(jax.jit(jax.grad(lambda x: foo_with_eval(x, 3)))(1.0), jnp.cos(1.0))
    assert_same(jax.grad(foo_with_eval)(1.0, -2), jnp.float32(-2.0))


@both
def test_states_change_once_a_call(lift):
    count = brainstate.State(jnp.zeros(()))

    @lift
    def f(x):
        count.value = count.value + 1.0
        return jnp.sin(x) * count.value

    for n in range(1, 4):
        assert_same(f(1.0), jnp.sin(1.0) * n)
    brainstate.transform.grad(f)(1.0)
    assert count.value == 4.0


@both
def test_a_state_that_changes_its_shape_is_traced_again(lift):
    state = brainstate.State(jnp.ones(2))
    f = lift(lambda x: (x * state.value).sum())
    assert f(2.0) == 4.0
    state.value = jnp.ones(3)
    assert f(2.0) == 6.0


# --------------------------------------------------------------------------------------------------
# Values that a function reads besides its arguments


def test_a_later_environment_decides_what_dropout_does():
    call = OURS(brainstate.nn.Dropout(0.5))
    brainstate.random.seed(0)
    with brainstate.environ.context(fit=False):
        assert_same(call(X), X)
    with brainstate.environ.context(fit=True):
        assert (call(X) == 0).any()
    with brainstate.environ.context(fit=False):
        assert_same(call(X), X)


def test_a_later_precision_decides_the_dtype():
    zero = OURS(lambda: jnp.zeros((), brainstate.environ.dftype()))
    for precision, dtype in ((32, jnp.float32), (16, jnp.float16), (32, jnp.float32)):
        with brainstate.environ.context(precision=precision):
            assert zero().dtype == dtype


def test_environments_may_hold_traced_values():
    scaled = OURS(lambda x: x * brainstate.environ.get("dt"))

    def step(dt):
        with brainstate.environ.context(dt=dt):
            return scaled(2.0)

    for _ in range(2):
        assert_same(brainstate.transform.for_loop(step, jnp.arange(3.0)), 2 * jnp.arange(3.0))


def test_closures_and_attributes_are_read_in_each_call():
    class Scaled(brainstate.nn.Module):
        scale = 1.0

        def __call__(self, x):
            return self.scale * x * i

    module = Scaled()
    call, total = OURS(module), 0.0
    for factor in (1, 2, 3):
        i = factor
        total += call(1.0)
    module.scale = 10.0
    assert total == 6.0 and call(1.0) == 30.0


# --------------------------------------------------------------------------------------------------
# Arguments and targets


def test_static_arguments_may_come_by_keyword_or_default():
    @OURS(static_argnums=(1, 2))
    def f(x, flag=True, table=()):
        return x * len(table) if flag else x

    assert f(3.0) == 0.0 and f(3.0, flag=False) == 3.0 and f(x=3.0, table=[1, 2]) == 6.0
    assert_same(jax.grad(lambda x: f(x, table=[1, 2]))(1.0), jnp.float32(2.0))


def test_static_arguments_that_a_function_does_not_have_are_errors():
    with pytest.raises(remat.StaticArgumentError, match="takes 1 positional"):
        OURS(lambda x: x, static_argnums=1)


def test_a_decorator_on_methods_takes_the_module_as_it_is():
    class Cell(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = brainstate.ParamState(jnp.ones(6))
            self.calls = brainstate.State(jnp.zeros(()))

        @OURS
        def update(self, x, mode="sin"):
            self.calls.value = self.calls.value + 1.0
            return getattr(jnp, mode)(x * self.weight.value)

        @OURS(static_argnums=(2,))
        def doubled(self, x, train=True):
            return x * 2 if train else x

    cell, other = Cell(), Cell()
    assert_same(cell.update(X, mode="cos"), jnp.cos(X))
    gradient = brainstate.transform.grad(lambda: cell.update(X).sum(), cell.weight)()
    assert_same(gradient, (X * jnp.cos(X)).sum(0))
    assert cell.calls.value == 2.0 and other.calls.value == 0.0
    assert_same((cell.doubled(X), cell.doubled(X, train=False)), (2 * X, X))
    assert Cell.update.__name__ == "update"


@pytest.mark.parametrize("target", [3, None, "sin"])
def test_what_cannot_be_called_is_refused(target):
    with pytest.raises(remat.errors.TargetError, match=f"not {target!r}"):
        OURS(target)


def test_negative_static_argnums_are_refused():
    for lift, error in ((THEIRS, ValueError), (OURS, remat.StaticArgumentError)):
        with pytest.raises(error, match="negative"):
            lift(lambda x, n: x * n, static_argnums=(1, -1))
    with pytest.raises(remat.errors.StaticArgumentTypeError, match="'a'"):
        OURS(jnp.sin, static_argnums="a")


def test_a_policy_and_the_region_are_in_the_jaxpr():
    linear = brainstate.nn.Linear(6, 6)
    f = OURS(linear, policy=remat.policies.dots_saveable)
    assert regions(f, X) == 1
    assert "dots_saveable" in str(jax.make_jaxpr(f)(X))


# --------------------------------------------------------------------------------------------------
# Steps within a budget


class Training:
    """A model, a counter, and a step that changes both."""

    def __init__(self):
        layers = [brainstate.nn.Linear(16, 16) for _ in range(4)]
        for i, layer in enumerate(layers):
            layer.weight.value = jax.tree.map(
                lambda a, i=i: jnp.sin(i + jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape),
                layer.weight.value,
            )
        self.model = brainstate.nn.Sequential(*layers)
        self.weights = self.model.states(brainstate.ParamState)
        self.steps = brainstate.State(0)

    def step(self, x, power=2, *, scale=1.0):
        def loss():
            return scale * jnp.mean(jnp.tanh(self.model(x)) ** power)

        grads, value = brainstate.transform.grad(loss, self.weights, return_value=True)()
        for path, weight in self.weights.items():
            weight.value = jax.tree.map(lambda a, g: a - 0.1 * g, weight.value, grads[path])
        self.steps.value += 1
        return value

    def values(self):
        return [weight.value for weight in self.weights.values()], self.steps.value


BATCH = jnp.linspace(-1, 1, 512 * 16).reshape(512, 16)


def test_a_fitted_step_changes_states_as_a_jitted_one_does():
    ours, theirs = Training(), Training()
    fitted = remat.brainstate.fit(
        ours.step, budget="90%", static_argnums=(1,), cache=False, progress=False
    )
    jitted = brainstate.transform.jit(theirs.step, static_argnums=(1,))
    for _ in range(2):
        assert_same(fitted(BATCH, 2, scale=2.0), jitted(BATCH, 2, scale=2.0))
    assert_same(ours.values(), theirs.values())
    assert int(ours.steps.value) == 2
    (plan,) = fitted.plans
    assert plan.is_verified and plan.peak_bytes <= plan.budget_bytes < plan.peak_bytes_without_remat


def test_planning_and_explaining_a_step_change_no_state():
    training = Training()
    before = training.values()
    fitted = remat.brainstate.fit(training.step, budget="90%", cache=False, progress=False)
    assert fitted.plan(BATCH).is_verified
    explanation = remat.explain(fitted, BATCH, compile=False)
    assert any("remat.brainstate.fit(" in finding.next_step for finding in explanation.findings)
    assert_same(before, training.values())


def test_a_step_that_raises_changes_no_state():
    training = Training()

    def step(x):
        training.step(x)
        raise RuntimeError("no")

    before = training.values()
    with pytest.raises(RuntimeError, match="no"):
        remat.brainstate.fit(step, budget="90%", cache=False, progress=False)(BATCH)
    assert_same(before, training.values())


def test_what_is_no_step_and_positions_from_the_end_are_refused_by_fit():
    with pytest.raises(TargetError, match="takes a training step"):
        remat.brainstate.fit(3, budget="90%")
    with pytest.raises(StaticArgumentError, match="negative donate_argnums"):
        remat.brainstate.fit(Training().step, budget="90%", donate_argnums=-1)
