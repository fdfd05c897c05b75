"""The benchmark of other packages' models: its registry, alternatives by hand, and comparison."""

from __future__ import annotations

import ast
import doctest
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks.real import case, executed_flops, measure
from benchmarks.zoo import flops

from benchmarks import real

FOLDER = pathlib.Path(real.__file__).parent


@pytest.mark.parametrize("module", [real, executed_flops])
def test_the_examples_run(module) -> None:
    results = doctest.testmod(module)
    assert results.attempted
    assert not results.failed


def test_every_case_names_a_function_of_its_module() -> None:
    for place in real.CASES.values():
        module, function = place.split(":")
        tree = ast.parse((FOLDER / "cases" / f"{module}.py").read_text())
        assert function in {f.name for f in tree.body if isinstance(f, ast.FunctionDef)}


def test_every_package_is_pinned() -> None:
    lines = (FOLDER / "requirements.txt").read_text().splitlines()
    assert all("==" in line for line in lines if not line.startswith("#"))


def test_all_cases_run_only_where_their_packages_are(monkeypatch) -> None:
    monkeypatch.setattr(real, "is_installed", lambda name: name != "keras")
    assert real.missing_packages() == ["keras"]
    with pytest.raises(ImportError, match=r"1 of the packages are missing, among them keras"):
        real.main()


# --------------------------------------------------------------------------------------------------
# Alternatives by hand


def _scanned(x, ws):
    return jnp.sum(jax.lax.scan(lambda c, w: (jnp.sin(jnp.tanh(c @ w) @ w), None), x, ws)[0])


ARGS = jnp.linspace(0, 1, 24).reshape(4, 6), jnp.linspace(-1, 1, 8 * 36).reshape(8, 6, 6)


def test_scan_bodies_are_checkpointed_while_a_step_is_traced() -> None:
    step = jax.value_and_grad(_scanned)
    plain, expected = flops.count(step, *ARGS), step(*ARGS)
    steps = case.scan_bodies(step, group=4)
    assert len(steps) == 4
    for label, alternative in steps.items():
        jax.clear_caches()
        counted = flops.count(alternative, *ARGS)
        assert counted.matmul >= plain.matmul
        assert (counted.matmul > plain.matmul) == (", dots" not in label)
        value, gradient = alternative(*ARGS)
        np.testing.assert_allclose(gradient, expected[1], rtol=1e-3, atol=1e-6)
        assert np.isclose(value, expected[0], rtol=1e-4)
    jax.clear_caches()
    assert flops.count(step, *ARGS) == plain


class _Layer:
    def __call__(self, x, ws, *, scale=None, flag=True):
        return (_scanned(x, ws), "label") if flag else None


def test_only_the_arrays_of_a_layer_are_checkpointed() -> None:
    layer = _Layer()
    step = jax.value_and_grad(lambda x, ws: layer(x, ws, scale=None, flag=True)[0])
    expected = step(*ARGS)
    for alternative in case.layers(step, _Layer).values():
        jax.clear_caches()
        np.testing.assert_allclose(alternative(*ARGS)[1], expected[1], rtol=1e-3, atol=1e-6)
    nothing = case.layers(step, _Layer)["each _Layer, nothing"]
    assert flops.count(nothing, *ARGS).total > flops.count(step, *ARGS).total


# --------------------------------------------------------------------------------------------------
# Counting and comparing


def test_loops_of_unknown_length_and_branches_are_counted_as_they_run() -> None:
    def count_down(n, x):
        def body(state):
            n, x = state
            return n - 1, jax.lax.cond(n > 2, lambda x: x @ x, lambda x: jnp.sin(x), x)

        return jax.lax.while_loop(lambda state: state[0] > 0, body, (n, x))[1]

    def scanned(n, x):
        return jax.lax.scan(lambda x, _: (jax.jit(count_down)(n, x), None), x, length=3)[0]

    one = executed_flops.count(scanned, 1, jnp.ones((4, 4)))
    five = executed_flops.count(scanned, 5, jnp.ones((4, 4)))
    assert (one.matmul, five.matmul) == (0, 3 * 3 * 128)  # only the first branch has the product
    static = flops.count(scanned, 1, jnp.ones((4, 4)))
    assert static.n_unknown_loops


def test_only_the_solver_of_a_linear_solve_is_counted() -> None:
    def solve(n, a, b):
        def iterated(matvec, b):
            advance = lambda x: b - matvec(x) + x  # noqa: E731
            return jax.lax.fori_loop(0, n, lambda _, x: advance(x), jnp.zeros_like(b))

        return jax.lax.custom_linear_solve(lambda x: a @ x, b, iterated, symmetric=True)

    def gradient(n, a, b):
        return jax.grad(lambda a: solve(n, a, b).sum())(a)

    a, b = 0.9 * jnp.eye(4), jnp.ones(4)
    for n in (1, 5):
        # A solver of n products, which the derivative runs again on the transposed matrix.
        product = 2 * 4 * 4
        assert executed_flops.varies(solve, n, a, b)
        assert executed_flops.count(solve, n, a, b).matmul == n * product
        assert executed_flops.count(gradient, n, a, b).matmul >= 2 * n * product


def test_differences_are_counted_in_units_in_the_last_place() -> None:
    a = {"x": jnp.ones(3), "n": jnp.arange(3), "nan": jnp.array([jnp.nan, 1.0])}
    assert measure.difference(a, a) == (0.0, 0)
    close = a | {"x": a["x"].at[0].add(2 * jnp.finfo(jnp.float32).eps)}
    assert measure.difference(close, a) == (2.0, 1)
    assert measure.difference(a | {"nan": jnp.ones(2)}, a) == (math.inf, 1)
    assert measure.difference(a | {"n": a["n"] + 1}, a) == (math.inf, 1)
    assert measure.difference([a], a) == (math.inf, -1)


def test_a_leaf_that_is_zero_but_for_rounding_has_no_digits_to_compare() -> None:
    one, rounding = jnp.ones(2), jnp.array([1e-12, 3e-12])
    assert measure.difference([one, rounding], [one, -rounding])[0] < 1e3
    assert measure.difference([one, 1e6 * rounding], [one, -1e6 * rounding])[0] > 1e6


BASE = {"peak_bytes": 100, "fixed_bytes": 5, "cpu_s": 1.0, "step_s": 1e-3}


def _alternative(label: str, peak: int, extra: float, ulps: float = 0.0) -> dict:
    return {"label": label, "peak_bytes": peak, "extra_flops": extra, "ulps": ulps}


def test_a_plan_is_compared_with_the_cheapest_alternative_that_fits() -> None:
    alternatives = [
        _alternative("dear", 40, 0.4),
        _alternative("cheap", 50, 0.2),
        _alternative("large", 90, 0.0),
        _alternative("wrong", 10, 0.0, ulps=math.inf),
    ]
    plan = {"percent": 70, "budget_bytes": 70, "refusal": "no plan fits"}
    real.compare(plan, BASE, alternatives)
    assert (plan["by_hand"], plan["by_hand_extra_flops"]) == ("cheap", 0.2)
    assert plan["hull_extra_flops"] == pytest.approx(0.1)
    assert plan["refused_what_fits"]
    assert len(real.cells(plan, BASE)) == len(real.HEADER)
    tight = {"percent": 20, "budget_bytes": 20, "refusal": "no plan fits"}
    real.compare(tight, BASE, alternatives)
    assert (tight["by_hand"], tight["refused_what_fits"]) == (None, False)


def test_the_summary_counts_what_went_wrong() -> None:
    plan = {
        "percent": 50,
        "budget_bytes": 50,
        "plain_compiles": 3.0,
        "predicted_bytes": 44,
        "peak_bytes": 40,
        "held": True,
        "extra_flops": 0.5,
        "ulps": 3.0,
        "unequal_leaves": 1,
        "step_ratio": 1.2,
    }
    crash = {"percent": 25, "budget_bytes": 25, "crash": "Error: no"}
    for row in (plan, crash):
        real.compare(row, BASE, [_alternative("cheap", 50, 0.2)])
        assert len(real.cells(row, BASE)) == len(real.HEADER)
    found = real.summary({"case": {"plans": [plan, crash]}})
    assert (found["accepted"], found["held"], found["equal"], found["identical"]) == (1, 1, 1, 0)
    assert (found["worse_than_by_hand"], found["above_hull"], found["crashed"]) == (1, 1, 1)
    assert found["median_ratio_to_by_hand"] == pytest.approx(2.5)
    assert found["median_prediction_error"] == pytest.approx(0.1)
