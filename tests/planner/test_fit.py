"""`remat.fit` behaves like `jax.jit` with a budget, and follows the plans of `remat.plan`."""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import functools
import inspect
import logging
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat
from planner.region_cases import assert_same, normal
from remat.cache import Cache
from remat.planner.plan_file import MadeFor
from remat.planner.step import TracedStep
from remat.program import compiled as compiler
from remat.program.targets import target as find_target

W, X = normal(32, 32), normal(256, 32)


@remat.auto
def loss(w, x):
    for _ in range(12):
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


@remat.auto
def scanned_loss(w, x):
    def body(h, _):
        return jnp.tanh(jnp.sin(h @ w)), None

    return jnp.sum(jax.lax.scan(body, x, length=16)[0] ** 2)


step = jax.value_and_grad(loss)
plan = functools.partial(remat.plan, cache=False, progress=False)
fit = functools.partial(remat.fit, cache=False, progress=False)


@functools.cache
def plan_at(budget):
    return plan(step, W, X, budget=budget)


def peak_of(compiled):
    return compiler.memory_of(compiled, remat.program.targets.target(None)).peak_bytes


# Plans


def test_plan_is_verified_and_within_its_budget():
    made = plan_at("60%")
    assert made.is_verified
    assert made.peak_bytes <= made.budget_bytes == int(0.6 * made.peak_bytes_without_remat)
    assert made.extra_flops > 0
    assert made.lower_bound_seconds <= made.extra_seconds


def test_plans_are_deterministic():
    again = plan(step, W, X, budget="60%")
    assert again == plan_at("60%")
    assert again.to_json() == plan_at("60%").to_json()


@pytest.mark.parametrize("f", [loss, scanned_loss], ids=["unrolled", "scanned"])
def test_compiled_peak_never_rises_as_the_budget_falls(f, tmp_path):
    g, cache = jax.value_and_grad(f), Cache(tmp_path)
    expected = jax.jit(g)(W, X)
    peaks = []
    for budget in ("100%", "80%", "60%", "55%"):
        fitted = remat.fit(g, budget=budget, cache=cache, progress=False)
        try:
            compiled = fitted.lower(W, X).compile()
        except remat.BudgetError:
            break
        assert_same(compiled(W, X), expected, within=1e-5)
        peaks.append(peak_of(compiled))
        (made,) = fitted.plans
        assert peaks[-1] == made.peak_bytes <= made.budget_bytes
    assert len(peaks) > 2
    assert peaks == sorted(peaks, reverse=True)


def test_budgets_are_bytes_texts_shares_or_the_device():
    base = plan_at("60%").peak_bytes_without_remat
    assert plan_at("1MiB").budget_bytes == 2**20
    assert plan_at("1MiB").whole_step is None
    assert plan_at(int(0.6 * base)).whole_step == plan_at("60%").whole_step
    with pytest.raises(remat.PlanError, match="is unknown; pass budget="):
        plan(step, W, X)
    assert plan_at(np.int64(0.6 * base)).whole_step == plan_at("60%").whole_step


@pytest.mark.parametrize("bad", ["lots", "-5%", "0%", "1e400", "1_0%", 10**30, 0, 0.5, True])
def test_a_wrong_budget_is_refused_before_anything_is_traced(bad):
    def never(w, x):
        raise AssertionError("traced")

    with pytest.raises(remat.UnitsError, match="budget="):
        plan(never, W, X, budget=bad)
    with pytest.raises(remat.UnitsError, match="budget="):
        fit(never, budget=bad)


def test_impossible_budget_says_what_was_reached_and_what_is_in_the_way():
    made = plan_at("60%")
    with pytest.raises(remat.BudgetError) as caught:
        plan(step, W, X, budget=1000)
    text = str(caught.value)
    fixed = 2 * W.nbytes + X.nbytes + 4
    assert "no plan fits 1000 B (1000 bytes)" in text or "(1000 bytes)" in text
    assert f"{made.peak_bytes_without_remat} bytes" in text
    assert f"arguments and results alone take {remat.units.format_bytes(fixed)}" in text
    with pytest.raises(remat.BudgetError, match="the largest temporaries f32"):
        plan(step, W, X, budget=fixed + 1000)


def test_refusals_name_the_largest_values_inside_of_loops():
    def pairs_of(x):
        def near(total, i):
            close = jnp.exp(-((x[:, None] - x[None]) ** 2).sum(-1) * i)
            return total + jnp.linalg.solve(close + jnp.eye(len(x)), x).sum(), None

        return jax.lax.scan(near, 0.0, jnp.arange(3.0))[0]

    with pytest.raises(remat.BudgetError) as caught:
        plan(pairs_of, jnp.arange(768.0).reshape(96, 8), budget="30%")
    text = str(caught.value)
    # Kernels never write the differences, which have eight times as many elements.
    assert "the largest temporaries f32[96,96]" in text and "f32[96,96,8]" not in text


def test_second_plan_comes_from_the_cache_without_a_compilation(tmp_path, monkeypatch):
    cache = Cache(tmp_path)
    first = remat.plan(step, W, X, budget="60%", cache=cache, progress=False)

    def refuse(*_, **__):
        raise AssertionError("compiled again")

    monkeypatch.setattr(TracedStep, "memory", refuse)
    assert remat.plan(step, W, X, budget="60%", cache=cache, progress=False) == first
    with pytest.raises(AssertionError, match="compiled again"):
        remat.plan(step, W, X[:128], budget="60%", cache=cache, progress=False)


def test_arguments_may_be_types():
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (W, X)]
    assert plan(step, *types, budget="60%") == plan_at("60%")


def test_a_step_that_is_not_callable_is_an_error():
    for call in (remat.plan, remat.fit):
        with pytest.raises(remat.PlanError, match="a function, not 3"):
            call(3, budget="60%")


def test_marked_function_that_is_only_linearized():
    def both(w, x):
        _, linear = jax.linearize(lambda w: loss(jnp.sin(w), x[:32]), w)
        return step(w, x), linear(w)

    made = plan(both, W, X, budget="90%")
    assert_same(fit(both, plan=made)(W, X), jax.jit(both)(W, X), within=1e-5)


# Behaviour of jax.jit


def test_fitted_step_returns_what_the_step_returns():
    fitted = fit(step, budget="60%")
    assert_same(fitted(W, X), jax.jit(step)(W, X), within=1e-5)
    assert fitted.plans == (plan_at("60%"),)
    assert fitted.plan(W, X) == plan_at("60%")
    assert fitted.__name__ == step.__name__
    assert repr(fitted).startswith("<remat.fit of ")


def test_one_plan_and_one_trace_for_each_signature(caplog):
    traced = []

    def counted(w, x):
        traced.append(x.shape)
        return step(w, x)

    fitted = fit(counted, budget="60%")
    with caplog.at_level(logging.INFO, "remat"):
        fitted(W, X)
        n = len(traced)
        fitted(W + 1, X)
        assert len(traced) == n
        assert len(fitted.plans) == 1
        assert "planned, peak" in caplog.text
        assert "new signature" not in caplog.text
        fitted(W, X[:128])
        assert len(fitted.plans) == 2
        assert "is called with a new signature and planned again (plan 2)" in caplog.text
        n = len(traced)
        fitted(W, X)
        fitted(W, X[:128])
    assert len(traced) == n


def test_calls_in_threads_plan_for_their_own_arguments():
    fitted = fit(step, budget="60%")
    xs = [X, X[:128], X, X[:128]]
    with concurrent.futures.ThreadPoolExecutor(len(xs)) as threads:
        found = list(threads.map(lambda x: fitted(W, x), xs))
    for x, outs in zip(xs, found):
        assert_same(outs, jax.jit(step)(W, x), within=1e-5)
    assert {plan.program for plan in fitted.plans} == {fitted.plan(W, x).program for x in xs}


def test_given_plan_is_followed_without_planning():
    traced = []

    def counted(w, x):
        traced.append(1)
        return step(w, x)

    fitted = fit(counted, plan=plan_at("60%"))
    assert_same(fitted(W, X), jax.jit(step)(W, X), within=1e-5)
    fitted(W, X)
    # The trace that is compared with the plan's program is the one that follows it.
    assert len(traced) == 1
    assert fitted.plan(W, X) is plan_at("60%")
    assert peak_of(fitted.lower(W, X).compile()) == plan_at("60%").peak_bytes


def test_donated_arguments_are_deleted_and_the_budget_is_kept():
    def update(w, x):
        value, g = step(w, x)
        return w - 0.01 * g, value

    fitted = fit(update, budget="60%", donate_argnums=0)
    w = W + 0
    new, _ = fitted(w, X)
    assert w.is_deleted()
    assert_same(new, jax.jit(update)(W, X)[0], within=1e-5)
    fitted(new, X)
    assert len(fitted.plans) == 1
    analysis = fitted.lower(W, X).compile().memory_analysis()
    assert analysis.alias_size_in_bytes == W.nbytes


def test_static_arguments_may_be_given_by_number_and_name():
    @remat.auto
    def deep(w, x, n, *, act):
        for _ in range(n):
            x = getattr(jnp, act)(x @ w)
        return jnp.sum(x**2)

    def of(w, n, x, *, act="tanh", scale=1.0):
        return jax.value_and_grad(deep)(w, x * scale, n, act=act)

    options = {"static_argnums": 1, "static_argnames": "act"}
    plain = jax.jit(of, **options)
    fitted = fit(of, budget="70%", **options)
    assert_same(fitted(W, 9, X), plain(W, 9, X), within=1e-5)
    assert_same(fitted(W, 9, X), plain(W, 9, X), within=1e-5)
    assert len(fitted.plans) == 1
    assert_same(fitted(W, 9, x=X, act="sin", scale=0.5), plain(W, 9, X, act="sin", scale=0.5))
    assert len(fitted.plans) == 2
    assert fitted.eval_shape(W, 9, X, act="sin")[1].shape == W.shape
    assert len(fitted.plans) == 2


def test_trace_lower_and_compile():
    fitted = fit(step, plan=plan_at("60%"))
    assert fitted.trace(W, X).jaxpr.out_avals[1].shape == W.shape
    lowered = fitted.lower(W, X)
    assert "stablehlo" in lowered.as_text()
    assert_same(lowered.compile()(W, X), jax.jit(step)(W, X), within=1e-5)
    fitted.clear_cache()
    fitted(W, X)


def test_shardings_are_those_of_jit():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    fitted = fit(step, budget="75%", in_shardings=(whole, rows), out_shardings=(whole, whole))
    value, g = fitted(np.asarray(W), np.asarray(X))
    assert g.sharding == whole
    assert_same((value, g), jax.jit(step)(W, X), within=1e-5)
    assert peak_of(fitted.lower(W, X).compile()) <= fitted.plans[0].budget_bytes


def plain_jit(f, **options):
    return jax.jit(f, **options)


def jit_of_method(f, **options):
    class Trainer:
        @functools.partial(jax.jit, static_argnums=0)
        def update(self, w, x):
            return f(w, x)

    return Trainer().update


MESH = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
ROWS = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec("data"))
WHOLE = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec())


@pytest.mark.parametrize(
    "jitted, options",
    [
        (plain_jit, {}),
        (plain_jit, {"donate_argnums": 0}),
        (plain_jit, {"in_shardings": (WHOLE, ROWS), "out_shardings": (None, WHOLE)}),
        pytest.param(
            plain_jit,
            {"compiler_options": {"xla_cpu_enable_fast_math": False}},
            marks=pytest.mark.slow,
        ),
        pytest.param(plain_jit, {"keep_unused": True}, marks=pytest.mark.slow),
        (jit_of_method, {}),
    ],
)
def test_a_jitted_step_has_the_plan_of_the_step_with_its_options(jitted, options):
    of_jitted = plan(jitted(update, **options), W, X, budget="70%")
    of_step = plan(update, W, X, budget="70%", **options)
    assert of_jitted.whole_step is not None
    assert of_jitted.to_json() == of_step.to_json()
    expected = jax.jit(update)(W, X)
    for given in (update, jitted(update, **options)):
        fitted = fit(given, plan=of_jitted, **options)
        assert_same(fitted(jnp.array(W), X), expected, within=1e-5)


def test_options_of_a_jitted_step_are_replaced_by_those_that_are_given():
    jitted = jax.jit(update, donate_argnums=0, in_shardings=(WHOLE, ROWS))
    fitted = fit(jitted, budget="70%", donate_argnums=(), in_shardings=(WHOLE, WHOLE))
    assert fitted.unplanned == (update, {"donate_argnums": (), "in_shardings": (WHOLE, WHOLE)})


def test_fit_decorates_a_method():
    class Model:
        scale = 2.0

        @functools.partial(remat.fit, budget="70%", progress=False, static_argnums=0)
        def step(self, w, x):
            return jax.value_and_grad(loss)(w * self.scale, x)

    model = Model()
    expected = jax.jit(step)(2.0 * W, X)
    assert_same(model.step(W, X), expected, within=1e-5)


def test_a_fitted_step_runs_in_jit_and_scan():
    fitted = fit(step, plan=plan_at("60%"))
    assert_same(jax.jit(lambda w, x: fitted(w, x))(W, X), jax.jit(step)(W, X), within=1e-5)
    with jax.checking_leaks():
        jax.jit(lambda w, x: fit(step, plan=plan_at("60%"))(w, x)).lower(W, X)
    inner = fit(step, budget="60%")
    total, _ = jax.lax.scan(lambda t, x: (t + inner(W, x)[0], None), 0.0, X[None])
    assert_same(total, jax.jit(step)(W, X)[0], within=1e-5)


@jax.jit
def add_up(total, x):
    total[...] += jnp.mean(x)


def step_with_ref(total, w, x):
    """Return a gradient, and add up the mean activations of the layers in a ref."""

    def loss(w):
        def body(h, _):
            h = jnp.tanh(jnp.sin(h @ w))
            add_up(total, jax.lax.stop_gradient(h))
            return h, None

        h = jax.lax.scan(body, x, length=8)[0]
        add_up(total, jax.lax.stop_gradient(h))
        return jnp.sum(h**2)

    return jax.grad(loss)(w)


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("given", ["budget", "plan"])
def test_a_step_may_take_a_ref_and_call_jitted_functions_that_update_it(given, jitted):
    expected, total = jax.new_ref(jnp.zeros(())), jax.new_ref(jnp.zeros(()))
    gradient = jax.jit(step_with_ref)(expected, W, X)
    made = plan(step_with_ref, total, W, X, budget="60%")
    assert float(total[...]) == 0.0 and made.peak_bytes <= made.budget_bytes
    options = {"budget": {"budget": made.budget_bytes}, "plan": {"plan": made}}[given]
    fitted = fit(step_with_ref, **options)
    for _ in range(2):
        total[...] = 0.0
        found = (jax.jit(fitted) if jitted else fitted)(total, W, X)
        assert_same((found, total[...]), (gradient, expected[...]))


# Copies and other tracing contexts


def test_cache_size_is_that_of_jit():
    fitted = fit(step, budget="100%")
    assert fitted._cache_size() == 0
    fitted(W, X)
    fitted(W + 1, X)
    assert fitted._cache_size() == 1
    fitted.clear_cache()
    assert fitted._cache_size() == 0


class Scaled:
    """A step with an attribute that it reads."""

    def __init__(self):
        self.scale = [2.0]

    def __call__(self, w, x):
        return step(w * self.scale[0], x)


def test_a_copy_is_a_fitted_step_of_its_own():
    scaled = Scaled()
    fitted = fit(scaled, budget="100%", donate_argnums=())
    fitted(W, X)
    shallow, deep = copy.copy(fitted), copy.deepcopy(fitted)
    scaled.scale[0] = 1.0
    expected = jax.jit(step)(W, X), jax.jit(step)(2.0 * W, X)
    assert_same(shallow(W, X), expected[0], within=1e-5)
    assert_same(deep(W, X), expected[1], within=1e-5)
    assert [len(f.plans) for f in (fitted, shallow, deep)] == [1, 1, 1]
    assert copy.deepcopy(fit(step, plan=plan_at("60%"))).plan(W, X) is plan_at("60%")


def test_a_copy_of_a_step_that_was_fitted_for_a_target_has_it(tmp_path):
    at = find_target("cpu")
    fitted = remat.fit(scaled_step, budget="100%", target=at, cache=tmp_path, progress=False)
    for other in (copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted))):
        assert_same(other(W, X), jax.jit(scaled_step)(W, X), within=1e-5)
        assert other.plans[0].target == at.name


def scaled_step(w, x):
    return step(2.0 * w, x)


@functools.partial(remat.fit, budget="100%", cache=False, progress=False)
def decorated(w, x):
    return step(w, x)


def test_pickle_is_by_name_for_a_decorated_function_and_by_value_for_others():
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    other = pickle.loads(pickle.dumps(fit(scaled_step, budget="100%", donate_argnums=0)))
    w = W + 0
    assert_same(other(w, X), jax.jit(scaled_step)(W, X), within=1e-5)
    assert w.is_deleted()
    with pytest.raises((pickle.PicklingError, AttributeError), match=r"<lambda>|local object"):
        pickle.dumps(fit(lambda w, x: step(w, x), budget="100%"))


def test_without_jit_the_step_runs_as_it_is_and_nothing_is_planned():
    scanned = jax.value_and_grad(scanned_loss)
    made = plan(scanned, W, X, budget="60%")
    expected = jax.jit(scanned)(W, X)
    seen = []

    def noted(w, x):
        seen.append(isinstance(x, jax.core.Tracer))
        return scanned(w, x)

    with jax.disable_jit():
        for fitted in (fit(noted, plan=made), fit(noted, budget="60%")):
            assert_same(fitted(W, X), expected, within=1e-5)
            assert fitted.plans == ()
        assert seen == [False, False]
        # Lowering or planning from inside of a trace uses a compiled program, too.
        lowered = fit(scanned, plan=made).lower(W, X)
        assert plan(scanned, W, X, budget="100%").program == made.program
    assert_same(lowered.compile()(W, X), expected, within=1e-5)


def test_a_fitted_step_inside_another_is_planned_with_it():
    made = plan_at("60%")
    expected = jax.jit(step)(W, X)
    for inner in (fit(step, budget="100%"), fit(step, plan=made)):

        def outer(w, x, inner=inner):
            return inner(w, x)

        fitted = fit(outer, plan=made)
        assert_same(fitted(W, X), expected, within=1e-5)
        assert peak_of(fitted.lower(W, X).compile()) == made.peak_bytes
        assert inner.plans == ()
        assert_same(inner(W, X), expected, within=1e-5)
    assert plan(outer, W, X, budget="60%").peak_bytes == made.peak_bytes


# Plans that do not fit the program


def test_plan_of_another_program_is_refused():
    made = plan_at("60%")

    @remat.auto
    def other(w, x):
        return jnp.sum(jnp.tanh(jnp.sin(x @ w)) ** 2)

    for f in (other, inspect.unwrap(loss)):
        with pytest.raises(remat.PlanError, match="another program"):
            fit(jax.value_and_grad(f), plan=made)(W, X)
    with pytest.raises(remat.PlanError, match=r"(?i)plan again"):
        fit(step, plan=made)(W, X[:128])
    with pytest.raises(remat.PlanError, match="another program"):
        fit(jax.value_and_grad(loss, (0, 1)), plan=made)(W, X)


def update(w, x, *, rate=0.1, momentum=False):
    value, g = step(w, x)
    return w - rate * g - (w if momentum else 0), value


@pytest.mark.parametrize("budget", ["60%", "100%"])
def test_plan_of_a_step_that_differs_outside_of_its_regions_is_refused(budget):
    made = plan(update, W, X, budget=budget)
    assert (made.whole_step is not None) == (budget == "60%")
    assert_same(fit(update, plan=made)(W, X), jax.jit(update)(W, X), within=1e-5)
    fit(update, plan=made, donate_argnums=0).lower(W, X)
    fit(functools.partial(update, rate=0.2), plan=made).lower(
        W, X
    )  # another number is not another program
    for other in (functools.partial(update, momentum=True), step):
        with pytest.raises(remat.PlanError, match=r"(?i)of another program.* plan again"):
            fit(other, plan=made).lower(W, X)
    with pytest.raises(remat.PlanError, match="plan again"):
        fit(update, plan=made).lower(W, X[:128])
    old = dataclasses.replace(made, program="0-0", versions=(("jax", "0.1"), ("jaxlib", "0.1")))
    with pytest.raises(
        remat.PlanError,
        match=r"was made with jax 0\.1 \(here .*\), jaxlib 0\.1 \(here .*Plan again",
    ):
        fit(update, plan=old).lower(W, X)


def test_plan_with_static_arguments_is_of_those():
    def of(w, n, x, *, act="tanh"):
        @remat.auto
        def deep(w, x):
            for _ in range(n):
                x = getattr(jnp, act)(x @ w)
            return jnp.sum(x**2)

        return jax.value_and_grad(deep)(w, x)

    options = {"static_argnums": 1, "static_argnames": "act"}
    made = plan(of, W, 3, X, kwargs={"act": "sin"}, budget="100%", **options)
    assert made.whole_step is None
    fitted = fit(of, plan=made, **options)
    assert_same(fitted(W, 3, x=X, act="sin"), jax.jit(of, **options)(W, 3, X, act="sin"))
    for n, act in ((4, "sin"), (3, "cos")):
        with pytest.raises(remat.PlanError, match="of another program"):
            fitted(W, n, X, act=act)


def test_plan_of_a_sharded_step_is_of_its_shardings():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    w, x = jax.device_put(W, whole), jax.device_put(X, rows)
    made = plan(step, jax.ShapeDtypeStruct(W.shape, W.dtype), x, budget="100%")
    fitted = fit(step, plan=made)
    assert_same(fitted(w, x), jax.jit(step)(W, X), within=1e-5)
    jax.jit(lambda w, x: fitted(w, x)).lower(w, x)  # where the shardings are unknown
    columns = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
    for other in ((w, jax.device_put(X, whole)), (jax.device_put(W, columns), x)):
        with pytest.raises(remat.PlanError, match="sharded in another way"):
            fit(step, plan=made)(*other)
    with pytest.raises(remat.PlanError, match=r"is for 4 x cpu, and this step runs on 1 x cpu"):
        fit(step, plan=made)(W, X)


def test_plan_is_of_the_dimension_that_is_sharded():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    rows, again, columns = (
        jax.device_put(X, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))
        for axes in (("data",), ("data", None), (None, "data"))
    )
    made = plan(step, W, rows, budget="100%")
    fit(step, plan=made).lower(W, again)
    with pytest.raises(remat.PlanError, match="sharded in another way"):
        fit(step, plan=made).lower(W, columns)
    renamed = jax.sharding.Mesh(mesh.devices, ("batch",))
    rows = jax.sharding.NamedSharding(renamed, jax.sharding.PartitionSpec("batch"))
    fit(step, plan=made).lower(W, jax.device_put(X, rows))


def test_a_plan_is_for_one_kind_of_device_and_one_set_of_donated_arguments(tmp_path):
    made = plan(update, W, X, budget="100%", donate_argnums=0)
    assert made.made_for == MadeFor("cpu", 1, (0,))
    path = tmp_path / "plan.json"
    made.save(path)
    assert remat.Plan.load(path) == made
    fit(update, plan=made, donate_argnums=0).lower(W, X)
    with pytest.raises(
        remat.PlanError, match=r"1 donated arguments \(leaves \[0\]\).*donate_argnums="
    ):
        fit(update, plan=made).lower(W, X)
    elsewhere = dataclasses.replace(made, made_for=MadeFor("v5e", 1, (0,)))
    with pytest.raises(remat.PlanError, match=r"is for 1 x v5e and .* compiled for cpu.* target="):
        fit(update, plan=elsewhere, donate_argnums=0).lower(W, X)
    unknown = dataclasses.replace(made, made_for=None)
    unknown.save(path)
    assert remat.Plan.load(path) == unknown
    fit(update, plan=remat.Plan.load(path)).lower(W, X)


def test_donation_and_result_shardings_are_part_of_the_cache_key(tmp_path):
    cache = Cache(tmp_path)
    peaks = [
        remat.plan(update, W, X, budget="100%", cache=cache, progress=False, **options).peak_bytes
        for options in ({}, {"donate_argnums": 0}, {})
    ]
    assert peaks[0] - peaks[1] == W.nbytes and peaks[2] == peaks[0]


def test_budget_and_plan_exclude_each_other():
    with pytest.raises(remat.PlanError, match="not both"):
        fit(step, plan=plan_at("60%"), budget="60%")
    with pytest.raises(remat.PlanError, match=r"a remat.Plan, not str; .* remat.Plan.load"):
        fit(step, plan="plan.json")


# Edited plans


def test_edited_plan_is_applied_and_not_verified(tmp_path):
    made = plan_at("60%")
    whole = made.whole_step
    last = whole.recomputations[-1]
    for left in (whole.recomputations[:-1], (*whole.recomputations[:-1], last)[1:], ()):
        edited = dataclasses.replace(
            made,
            whole_step=dataclasses.replace(whole, recomputations=left),
            is_verified=False,
            peak_bytes=None,
        )
        path = tmp_path / "plan.json"
        edited.save(path)
        loaded = remat.Plan.load(path)
        assert not loaded.is_verified
        assert "not verified" in str(loaded)
        fitted = fit(step, plan=loaded)
        assert_same(fitted(W, X), jax.jit(step)(W, X), within=1e-5)
    flops = fitted.lower(W, X).compile().cost_analysis()["flops"]
    assert flops <= 1.01 * jax.jit(step).lower(W, X).compile().cost_analysis()["flops"]


def test_plan_file_round_trip_follows_the_same_decisions(tmp_path):
    made = plan_at("60%")
    made.save(tmp_path / "plan.json")
    loaded = remat.Plan.load(tmp_path / "plan.json")
    assert loaded == made
    assert peak_of(fit(step, plan=loaded).lower(W, X).compile()) == made.peak_bytes


@pytest.mark.parametrize("step", [lambda x: (), lambda x: x, lambda x: x[:0]])
def test_steps_that_compute_nothing_are_planned(step):
    fitted = remat.fit(step, budget="100%", cache=False)
    x = jnp.ones((4, 4))
    jax.tree.map(np.testing.assert_array_equal, fitted(x), step(x))
    assert fitted.plans[0].extra_seconds == 0
