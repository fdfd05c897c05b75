"""`remat.largest`: the largest of several sizes whose plan fits."""

from __future__ import annotations

import dataclasses
import math
import random

import jax
import jax.numpy as jnp
import pytest
from benchmarks.largest import counting_compiles

import remat
from planner.test_plan_file import PLAN
from remat.planner import largest as searching
from remat.planner.planning import Estimate
from remat.units import parse_budget


class FakePlanning:
    """A planning without a compiler: a step is its bytes, which the model multiplies by an error.

    Args:
      n_bytes: of the step.
      limit: the largest that fits.
      error: model bytes / true bytes.
      run_limit: the largest that fits as it will run.
    """

    def __init__(self, n_bytes, limit, error=1.0, run_limit=None, given=None):
        self.n_bytes, self.budget, self.error = n_bytes, limit, error
        self.run_limit = limit if run_limit is None else run_limit
        self.given_budget = parse_budget(limit if given is None else given)

    def smallest_by_model(self):
        return Estimate(0, int(self.n_bytes * self.error))

    def corrected(self, estimate):
        return Estimate(0, int(estimate.temporary_bytes / self.error))

    def first_fitting(self):
        return self._within(self.budget, extra_seconds=9.0)

    def run(self):
        return self._within(self.run_limit, extra_seconds=1.0)

    def _within(self, limit, extra_seconds):
        if self.n_bytes > limit:
            raise remat.BudgetError(f"no plan fits {self.n_bytes}")
        return dataclasses.replace(PLAN, seconds=float(self.n_bytes), extra_seconds=extra_seconds)


def fitting_up_to(limit, monkeypatch, **facts):
    """Replace plannings by fake ones. Return what was asked for."""
    asked = []

    def planning_of(step, args, **options):
        asked.append((step, args, options))
        return FakePlanning(step, limit, **facts)

    monkeypatch.setattr(searching, "planning_of", planning_of)
    return asked


def of_size(size):
    return size, ()


@pytest.mark.parametrize("given", [None, "50%"])
@pytest.mark.parametrize("error", [0.01, 0.4, 1.0, 2.5, 100.0])
@pytest.mark.parametrize("n_sizes", [1, 2, 3, 7, 8, 20])
def test_the_last_size_that_fits_is_found_with_few_tries(n_sizes, error, given, monkeypatch):
    sizes = [3**i * 1000 for i in range(n_sizes)]
    for limit in range(n_sizes):
        fitting_up_to(sizes[limit], monkeypatch, error=error, given=given)
        found = remat.largest(of_size, sizes, budget="1GiB")
        assert found.size == sizes[limit]
        assert len(found.tried) <= math.ceil(math.log2(n_sizes + 1)) + 2
        assert dict(found.tried)[found.size] == found.plan and found.plan.extra_seconds == 1.0
        assert {size for size, plan in found.tried if isinstance(plan, str)} <= set(
            sizes[limit + 1 :]
        )


def test_misleading_predictions_cost_at_most_two_tries(monkeypatch):
    sizes = [1000 * (i + 1) for i in range(50)]
    errors = random.Random(0)

    def planning_of(step, args, **options):
        return FakePlanning(step, 31_000, error=errors.choice([0.01, 0.5, 2.0, 100.0]))

    monkeypatch.setattr(searching, "planning_of", planning_of)
    for _ in range(20):
        found = remat.largest(of_size, sizes)
        assert found.size == 31_000 and len(found.tried) <= 8


@pytest.mark.parametrize("error", [0.5, 1.0, 2.0])
def test_a_model_that_is_right_up_to_a_factor_needs_few_tries(error, monkeypatch):
    sizes = [1000 * (i + 1) for i in range(30)]
    fitting_up_to(16_500, monkeypatch, error=error)
    found = remat.largest(of_size, sizes)
    # One may correct the model, and two are the last that fits and the next. A bisection has 5.
    assert found.size == 16_000 and len(found.tried) <= 3


def test_a_size_that_does_not_fit_as_it_will_run_is_replaced_by_a_smaller_one(monkeypatch):
    sizes = [1000 * (i + 1) for i in range(20)]
    fitting_up_to(12_500, monkeypatch, run_limit=10_000)
    found = remat.largest(of_size, sizes)
    assert found.size == 10_000 and found.plan.extra_seconds == 1.0
    assert {12_000, 11_000} <= {size for size, plan in found.tried if isinstance(plan, str)}


def of_rows(rows):
    def loss(w, x):
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return x.sum()

    return jax.value_and_grad(loss), (jnp.eye(64), jax.ShapeDtypeStruct((rows, 64), "float32"))


def test_the_plan_is_that_of_the_step_alone_and_nothing_is_compiled_twice():
    sizes = [300, 400, 500, 600, 700, 800, 900]
    with counting_compiles() as compiles:
        found = remat.largest(of_rows, sizes, budget="800KiB", cache=False)
    step, args = of_rows(found.size)
    with counting_compiles() as alone:
        plan = remat.plan(step, *args, budget="800KiB", cache=False)
    assert found.plan == plan and found.plan.to_json() == plan.to_json()
    next_size = sizes[sizes.index(found.size) + 1]
    with pytest.raises(remat.BudgetError), counting_compiles() as of_next:
        remat.plan(*of_rows(next_size)[:1], *of_rows(next_size)[1], budget="800KiB", cache=False)
    others = 2 * (len(found.tried) - 2)  # the step as written, and one plan
    assert len(compiles) <= len(alone) + len(of_next) + others


def test_throughput_is_the_model_s(monkeypatch):
    fitting_up_to(8, monkeypatch)
    found = remat.largest(of_size, [4, 8, 16])
    assert found.step_seconds == 9.0 and found.sizes_per_second == 8 / 9
    assert repr(found).startswith("Largest(8: 9.0 s per step by the model, Plan(")
    named = dataclasses.replace(found, size="tpu:v5e:2x2")
    with pytest.raises(remat.PlanError, match="no size per second"):
        _ = named.sizes_per_second


def test_sizes_may_be_targets(monkeypatch):
    asked = fitting_up_to(4, monkeypatch)
    chips = {"tpu:v5e:4x4": 2, "tpu:v5e:2x2": 4, "tpu:v5e:1x1": 16}
    found = remat.largest(
        lambda at: (chips[at], ("x",), {"target": at}), list(chips), budget="1GiB", offload=False
    )
    assert found.size == "tpu:v5e:2x2"
    options = {"budget": "1GiB", "offload": False, "target": "tpu:v5e:2x2"}
    assert (4, ("x",), options) in asked


def test_no_size_that_fits_is_a_budget_error_with_the_reason(monkeypatch):
    fitting_up_to(0.5, monkeypatch, given="1KiB")
    with pytest.raises(remat.BudgetError, match="not even the first, 1: no plan fits 1"):
        remat.largest(of_size, [1, 2, 3])


@pytest.mark.parametrize("made", [None, (1,), (1, [2]), (1, (), []), [1, ()]])
def test_the_result_of_make_step_is_checked(made):
    with pytest.raises(remat.PlanError, match=r"make_step\(3\) must return a step"):
        remat.largest(lambda _: made, [3])


def test_no_sizes_are_refused():
    with pytest.raises(remat.PlanError, match="at least one"):
        remat.largest(of_size, [])
