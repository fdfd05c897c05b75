"""The benchmark of training steps in loops, in small and on the CPU."""

import jax.numpy as jnp
import numpy as np

import remat
from benchmarks import steps_in_loops


def test_checkpoints_and_plans_are_measured_for_each_program(monkeypatch):
    monkeypatch.setattr(steps_in_loops, "BATCH", 512)
    monkeypatch.setattr(steps_in_loops, "WIDTH", 16)
    monkeypatch.setattr(steps_in_loops, "PERCENTS", (60,))
    rows = steps_in_loops.main(["--target", "cpu"])["programs"]
    assert [row["program"] for row in rows] == list(steps_in_loops.PROGRAMS)
    for row in rows:
        assert row["remat.checkpoint"] < 0.6 * row["without"]
        assert row["60%"]["peak_bytes"] <= row["60%"]["budget_bytes"]


def test_steps_in_a_loop_are_steps():
    weights = 0.3 * jnp.sin(jnp.arange(2 * 4 * 4.0).reshape(2, 4, 4))
    x = jnp.cos(jnp.arange(3 * 5 * 4.0).reshape(3, 5, 4))
    gradient = steps_in_loops.one_gradient(steps_in_loops.block)
    expected = weights
    for _ in range(steps_in_loops.STEPS):
        expected = expected - 1e-3 * gradient(expected, x)
    found, values = steps_in_loops.on_one_batch(steps_in_loops.block)(weights, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert values.shape == (steps_in_loops.STEPS,)
    found = steps_in_loops.on_batches(steps_in_loops.block)(weights, x)
    expected = weights
    for batch in x:
        expected = expected - 1e-3 * gradient(expected, batch[None])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def _not_there(name):
    raise remat.TargetError("not there")


def test_a_target_without_its_compiler_is_reported(monkeypatch, capsys):
    monkeypatch.setattr(steps_in_loops, "find_target", _not_there)
    assert steps_in_loops.main([]) == {"not_run": "not there"}
    assert "NOT RUN: not there" in capsys.readouterr().out
