"""Prices: by roofline, and measured on the device at hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from remat.planner import costs
from remat.planner.cache import Cache
from remat.planner.costs import Measured, Roofline, dtype_of
from remat.planner.devices import device

X = jnp.ones((16, 16))


def eqns_of(fun, *args):
    return jax.make_jaxpr(fun)(*args).eqns


@pytest.fixture
def measured(tmp_path):
    return Measured(cache=Cache(tmp_path), progress=False)


@pytest.fixture
def runs(monkeypatch):
    """The equations that were run."""
    ran, original = [], costs._alone
    monkeypatch.setattr(
        costs, "_alone", lambda eqn: ran.append(eqn.primitive.name) or original(eqn)
    )
    return ran


def test_the_roofline_is_the_slower_of_arithmetic_and_traffic():
    v5e = Roofline(device("v5e"))
    assert v5e.seconds(197e12, 0, "bfloat16") == pytest.approx(1, rel=1e-5)
    assert v5e.seconds(0, 819e9) == pytest.approx(1, rel=1e-5)
    assert v5e.seconds(197e12, 2 * 819e9, "bfloat16") == pytest.approx(2, rel=1e-5)
    assert v5e.seconds(1, 1) == pytest.approx(v5e.device.launch_s, rel=1e-3)
    assert v5e.seconds(0, 0) == 0
    assert v5e.transfer_seconds(16e9) == pytest.approx(1, rel=1e-5)
    assert v5e.transfer_seconds(0) == 0


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
    assert measured._seconds.keys() == measured.cache.get("times", measured._place).keys()


def test_what_cannot_be_run_alone_is_priced_by_the_roofline(measured, runs, monkeypatch):
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

    monkeypatch.setattr(costs, "_alone", fail)
    (eqn,) = eqns_of(jnp.cos, X)
    assert measured.seconds_of(eqn) == measured.roofline.seconds_of(eqn)
    assert measured.cache.get("times", measured._place) is None


def test_measuring_while_a_function_is_traced_is_no_part_of_it(measured):
    (eqn,) = eqns_of(jnp.cos, X)

    @jax.jit
    def f(x):
        assert measured.seconds_of(eqn) > 0
        return x + 1

    assert [e.primitive.name for e in f.trace(X).jaxpr.eqns] == ["add"]


def test_measurements_that_are_no_times_are_ignored(tmp_path):
    cache = Cache(tmp_path)
    place = Measured(cache=cache)._place
    cache.put("times", place, {"a": -1, "b": "1", "c": 1e9, "d": [1], "e": 0.5})
    assert Measured(cache=cache)._seconds == {"e": 0.5}


def test_nothing_is_written_where_stderr_is_no_terminal(tmp_path, capfd):
    Measured(cache=Cache(tmp_path), progress=True).measure(eqns_of(jnp.cos, X))
    assert capfd.readouterr() == ("", "")


def test_a_terminal_gets_a_progress_bar_that_goes_away(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    Measured(cache=Cache(tmp_path), progress=True).measure(eqns_of(jnp.cos, X))
    assert "measuring equations" in capsys.readouterr().err
