"""Costs of kernels: by roofline, and measured on the attached device."""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import remat
from remat import _jax
from remat.cache import Cache
from remat.ir.flops import bytes_moved, flops_of
from remat.planner.priced_step import PricedStep
from remat.planner.rewrite import flattened
from remat.planner.step import TargetStep
from remat.planner.step_model import StepModel
from remat.program import costs
from remat.program.costs import Measured, Roofline, dtype_of, find_costs, time_alone_s
from remat.program.devices import device
from remat.program.from_jaxpr import Execution, program_of_jaxpr
from remat.program.targets import target

X = jnp.ones((16, 16))


def eqns_of(fun, *args):
    return jax.make_jaxpr(fun)(*args).eqns


class Timer:
    """A timer that runs equations and records which."""

    def __init__(self):
        self.ran = []

    def __call__(self, eqn):
        if eqn is not None:
            self.ran.append(eqn.primitive.name)
        return time_alone_s(eqn)


@pytest.fixture
def timer():
    return Timer()


@pytest.fixture
def runs(timer):
    """Return the equations that were run."""
    return timer.ran


@pytest.fixture
def measured(tmp_path, timer):
    return Measured(cache=Cache(tmp_path), progress=False, time_alone=timer)


def test_the_roofline_is_the_slower_of_arithmetic_and_traffic():
    v5e = Roofline(device("v5e"))
    assert v5e.seconds(197e12, 0, "bfloat16") == pytest.approx(1, rel=1e-5)
    assert v5e.seconds(0, 819e9) == pytest.approx(1, rel=1e-5)
    assert v5e.seconds(197e12, 2 * 819e9, "bfloat16") == pytest.approx(2, rel=1e-5)
    assert v5e.seconds(1, 1) == pytest.approx(v5e.device.launch_s, rel=1e-3)
    assert v5e.seconds(0, 0) == 0
    assert v5e.transfer_seconds(16e9) == pytest.approx(1, rel=1e-5)
    assert v5e.transfer_seconds(0) == 0


def test_a_collective_takes_as_long_as_its_bytes_take_on_the_links():
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    at = Roofline(device("v5p"))

    def seconds(of, out):
        step = jax.shard_map(of, mesh=mesh, in_specs=P("x"), out_specs=out, check_vma=False)
        (eqn,) = eqns_of(step, jax.ShapeDtypeStruct((4 * 2**24,), jnp.float32))
        (inner,) = _jax.open_jaxpr(eqn.params["jaxpr"]).eqns
        priced = at.seconds(flops_of(inner), bytes_moved(inner))
        whole = at.seconds(flops_of(eqn), bytes_moved(eqn))
        assert costs.slowdowns(at)(eqn) == pytest.approx(at.slowdown(inner) * priced / whole)
        return at.slowdown(inner) * priced

    link = at.device.link_bytes_per_s
    gathered = seconds(lambda x: jax.lax.all_gather(x, "x", tiled=True), P())
    assert gathered == pytest.approx(4 * 2**26 / link, rel=1e-2)
    reduced = seconds(lambda x: jax.lax.psum(x, "x"), P())
    assert reduced == pytest.approx(2 * 2**26 / link, rel=1e-2)
    assert seconds(jnp.sin, P("x")) < reduced / 10


def test_the_roofline_of_an_equation_uses_the_rate_of_its_operands():
    h100 = Roofline(device("h100"))
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    (narrow,) = eqns_of(lambda x: x @ x, x)
    (wide,) = eqns_of(lambda x: x @ x, jax.ShapeDtypeStruct(x.shape, jnp.float32))
    assert dtype_of(narrow) == "bfloat16"
    assert h100.seconds_of(wide) == pytest.approx(2 * h100.seconds_of(narrow), rel=0.01)


def test_a_loop_costs_its_trips_times_its_body():
    roofline = Roofline(device("cpu"))
    (loop,) = eqns_of(lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=9)[0], X)
    (product,) = eqns_of(lambda x: x @ x, X)
    assert roofline.seconds_of(loop) == pytest.approx(9 * roofline.seconds_of(product))


def test_each_distinct_equation_is_run_once_and_kept(measured, runs):
    eqns = eqns_of(lambda x: jnp.sin(jnp.sin(x)) @ x @ x, X)
    assert all(measured.seconds_of(eqn) > 0 for eqn in eqns)
    assert runs == ["sin", "dot_general"]
    again = Measured(cache=measured.cache, progress=False)
    assert [again.seconds_of(e) for e in eqns] == [measured.seconds_of(e) for e in eqns]
    assert runs == ["sin", "dot_general"]


def test_types_parameters_and_literals_make_equations_distinct(measured, runs):
    def f(x):
        return x * 2.0, x * 3.0, x[:8] * 2.0, x.sum(0), x.sum(1)

    measured.measure(eqns_of(f, X))
    assert sorted(runs) == ["mul"] * 3 + ["reduce_sum"] * 2 + ["slice"]


def test_bodies_are_measured_not_the_loops_around_them(measured, runs):
    def f(x):
        x = jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=9)[0]
        return jax.nn.relu(jax.checkpoint(jnp.tanh)(x))

    eqns = eqns_of(f, X)
    measured.measure(eqns)
    assert runs == ["dot_general", "tanh", "max"]
    (product,) = eqns_of(lambda x: x @ x, X)
    assert measured.seconds_of(eqns[0]) == pytest.approx(9 * measured.seconds_of(product))


def test_keys_indices_and_linear_algebra_can_be_run(measured, runs):
    def f(key, x, i):
        return jax.random.bits(key, (8,)), x[i], jnp.linalg.cholesky(x), x.astype(bool)

    eqns = eqns_of(f, jax.random.key(0), X, jnp.arange(3))
    measured.measure(eqns)
    assert {"random_bits", "gather", "cholesky"} <= set(runs)
    assert measured.times_s.keys() == measured.cache.get("times", measured.machine).keys()


def test_what_cannot_be_run_alone_is_priced_by_the_roofline(measured, runs):
    mesh = Mesh(np.array(jax.devices()[:2]), ("i",))

    def collective(x):
        return jax.shard_map(
            lambda x: jax.lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()
        )(x)

    def callback(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def effect(x):
        jax.debug.print("{}", x)
        return x

    for fun in (collective, callback, effect):
        for eqn in eqns_of(fun, X):
            assert measured.seconds_of(eqn) == measured.roofline.seconds_of(eqn)
    huge = jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32)
    (eqn,) = eqns_of(lambda x: x + 1, huge)
    assert measured.seconds_of(eqn) == measured.roofline.seconds_of(eqn)
    assert runs == []

    def fail(eqn):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED")

    measured.time_alone = fail
    (eqn,) = eqns_of(jnp.cos, X)
    assert measured.seconds_of(eqn) == measured.roofline.seconds_of(eqn)
    assert measured.cache.get("times", measured.machine) is None


def test_measuring_while_a_function_is_traced_is_no_part_of_it(measured):
    (eqn,) = eqns_of(jnp.cos, X)

    @jax.jit
    def f(x):
        assert measured.seconds_of(eqn) > 0
        return x + 1

    assert [e.primitive.name for e in f.trace(X).jaxpr.eqns] == ["add"]


def test_measurements_that_are_no_times_are_ignored(tmp_path):
    cache = Cache(tmp_path)
    place = Measured(cache=cache).machine
    cache.put("times", place, {"a": -1, "b": "1", "c": 1e9, "d": [1], "e": 0.5})
    assert Measured(cache=cache).times_s == {"e": 0.5}


def test_nothing_is_written_where_stderr_is_no_terminal(tmp_path, capfd):
    Measured(cache=Cache(tmp_path), progress=True).measure(eqns_of(jnp.cos, X))
    assert capfd.readouterr() == ("", "")


def test_a_terminal_gets_a_progress_bar_that_goes_away(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    Measured(cache=Cache(tmp_path), progress=True).measure(eqns_of(jnp.cos, X))
    assert "measuring equations" in capsys.readouterr().err


# Costs as planners see them


@dataclasses.dataclass(frozen=True)
class OneIsDear:
    """Costs by which one primitive takes a hundred times its time."""

    primitive: str
    name = "one is dear"

    @property
    def key(self):
        return f"{self.primitive} is dear"

    def seconds(self, flops, bytes_moved, dtype="float32"):
        return Roofline(device("cpu")).seconds(flops, bytes_moved, dtype)

    def slowdown(self, eqn):
        return 100.0 if eqn.primitive.name == self.primitive else 1.0


@pytest.fixture
def clock(measured):
    """Fake times in seconds by primitive, 1 ms for other programs, and a list of the programs timed."""
    times, timed = {"empty": 0.0}, []

    def time_s(eqn):
        name = "empty" if eqn is None else eqn.primitive.name
        timed.append(name)
        return times.get(name, 1e-3)

    measured.time_alone = time_s
    return times, timed


def test_a_kernel_takes_as_long_as_it_was_measured(measured, clock):
    times, _ = clock
    times["dot_general"] = 0.5
    product, total = eqns_of(lambda x: (x @ x).sum(), X)
    for eqn, time_s in ((product, 0.5), (total, 1e-3)):
        expected = measured.seconds(flops_of(eqn), bytes_moved(eqn), dtype_of(eqn))
        assert measured.slowdown(eqn) * expected == pytest.approx(time_s)
    assert Roofline(device("cpu")).slowdown(product) == 1


def test_fusions_are_priced_by_rates_that_were_measured(measured, clock):
    times, timed = clock
    times["jit"] = 0.25  # for each of the two programs that measure the rates
    rates = measured.of_fusions.device
    assert rates.flops_per_s("float32") == costs.CHAIN_FLOPS / 0.25
    assert rates.flops_per_s("float64") == costs.CHAIN_FLOPS / 0.5
    assert rates.bandwidth_bytes_per_s == costs.SUMS_BYTES / 0.25
    assert rates.launch_s == measured.device.launch_s
    n = len(timed)
    again = Measured(cache=measured.cache, progress=False)
    assert again.of_fusions == measured.of_fusions and len(timed) == n
    (chain,) = eqns_of(jax.jit(costs.chain_of_tanh), jax.ShapeDtypeStruct((8,), jnp.float32))
    assert flops_of(chain) * costs.ELEMENTS == 8 * costs.CHAIN_FLOPS


def test_where_nothing_can_be_run_the_device_has_its_figures(measured):
    measured.device = dataclasses.replace(measured.device, memory_bytes=1)
    assert measured.of_fusions == measured.roofline
    (eqn,) = eqns_of(lambda x: x @ x, X)
    assert measured.slowdown(eqn) == pytest.approx(1)


def test_operations_and_loops_know_how_slow_they_are():
    def f(x):
        x = jnp.tanh(jnp.sort(x) @ x)
        return jax.lax.scan(lambda c, _: (jnp.sin(c @ c), None), x, None, length=9)[0]

    jaxpr = jax.make_jaxpr(f)(X)
    inner, _ = _jax.detach_consts(jaxpr)
    program = program_of_jaxpr(inner, [1], Execution(costs.slowdowns(OneIsDear("dot_general"))))
    slow = {op.name: op.slowdown for op in program.ops}
    assert slow["dot_general"] == 100 and slow["sort"] == slow["tanh"] == 1
    assert 10 < slow["scan"] < 100  # its product, and the sine as before
    as_it_is = program_of_jaxpr(inner, [1], Execution(costs.slowdowns(Roofline(device("cpu")))))
    assert {op.slowdown for op in as_it_is.ops} == {1.0}


W2, X2 = jnp.eye(16), jnp.ones((128, 16))


@remat.auto
def loss(w, x):
    for _ in range(3):
        x = jnp.sin(jnp.cumsum(jnp.sin(x @ w), axis=1))
    return jnp.sum(x**2)


def every(jaxpr):
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        yield eqn.primitive.name
        for inner in _jax.jaxprs_of(eqn):
            yield from every(inner)


def recomputed_by(given):
    """Return how often primitives are recomputed at 60 % of the bytes of the step's temporaries."""
    step = TargetStep(jax.value_and_grad(loss), (W2, X2), {}, target(None), {})
    flat = flattened(step.trace().jaxpr)
    model = StepModel(PricedStep(flat, given.seconds, execution=Execution(costs.slowdowns(given))))
    aim = int(0.6 * model.as_written(model.variants[0]).model_bytes)
    proposal = model.within(model.variants[0], aim)
    under = collections.Counter(every(step.trace_following(proposal.decisions, step.trace()).jaxpr))
    under.subtract(every(flat))
    return under


def test_what_takes_long_is_not_recomputed(measured, clock):
    times, _ = clock
    for dear, cheap in (("dot_general", "cumsum"), ("cumsum", "dot_general")):
        by_hand = recomputed_by(OneIsDear(dear))
        assert by_hand[dear] < by_hand[cheap]
        times.update({dear: 0.1, cheap: 1e-5})
        by_clock = recomputed_by(
            Measured(cache=Cache(None), progress=False, time_alone=measured.time_alone)
        )
        assert by_clock[dear] < by_clock[cheap]


def test_plans_by_other_costs_are_other_cache_entries(tmp_path):
    cache = Cache(tmp_path)
    for _ in range(2):
        for given, name in (("roofline", "roofline"), (OneIsDear("cumsum"), "one is dear")):
            made = remat.plan(
                jax.value_and_grad(loss),
                W2, X2, budget="100%", costs=given, cache=cache, progress=False,
            )  # fmt: skip
            assert made.costs == name
            assert f"({name}); lower bound" in made.explain()
            assert remat.Plan.from_json(made.to_json()) == made


def test_a_plan_by_measured_costs_says_so(clock):
    step = jax.value_and_grad(loss)
    made = remat.plan(step, W2, X2, budget="100%", costs="measured", cache=False, progress=False)
    assert made.costs == "measured"


def test_costs_that_there_are_not_are_refused():
    step = jax.value_and_grad(loss)
    with pytest.raises(remat.PlanError, match="unknown costs 'mesured'; did you mean 'measured'"):
        remat.plan(step, W2, X2, budget="90%", costs="mesured")
    with pytest.raises(remat.PlanError, match="unknown costs 'x'"):
        remat.fit(step, costs="x")
    with pytest.raises(
        remat.PlanError, match=r"costs= is .* not int, which has no name and no key"
    ):
        remat.plan(step, W2, X2, budget="90%", costs=3)
    with pytest.raises(remat.PlanError, match="h100 is not here; take costs='roofline'"):
        find_costs("measured", device("h100"), None, None)
    assert find_costs("roofline", device("h100"), None, None) == Roofline(device("h100"))
