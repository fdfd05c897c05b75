"""The report of the planner's benchmark, with hand-made plans."""

from __future__ import annotations

import doctest
from types import SimpleNamespace

import jax
import pytest
from benchmarks.zoo import ZOO, baselines, flops
from benchmarks.zoo.baselines import Point
from benchmarks.zoo.model import step

import remat
from benchmarks import planner

MODEL = ZOO["decoder"]("tiny")


@pytest.fixture
def _plans(monkeypatch):
    """Replace planning by full rematerialization of each block, predicted 10 % too high."""
    rematerialized = jax.jit(step(MODEL.loss(remat.checkpoint)))
    monkeypatch.setattr(remat, "fit", lambda step, plan: rematerialized)

    def plan(step, *args, budget, cache):
        peak = remat.testing.peak_bytes(rematerialized, *args)
        return SimpleNamespace(predicted_bytes=peak * 11 // 10)

    monkeypatch.setattr(remat, "plan", plan)


@pytest.mark.usefixtures("_plans")
def test_a_row_compares_the_plan_with_the_best_baseline_at_its_peak() -> None:
    base = flops.count(step(MODEL.loss()), *MODEL.arguments())
    far_above = 10**9
    points = [
        Point("without", far_above, 0, base.matmul, base.total),
        Point("blocks nothing_saveable", 100, 0, base.matmul, 2 * base.total),
    ]
    row = planner.row(MODEL, 50, points)
    assert row.budget_bytes == far_above // 2
    assert 0.2 < row.extra_matmul_flops < 0.4
    assert (row.baseline, row.baseline_extra_flops) == ("blocks nothing_saveable", 1.0)
    assert row.ratio == row.extra_flops
    assert row.prediction_error == pytest.approx(0.1, abs=1e-3)
    assert planner.prediction([row])["pairs"] == 1
    assert len(planner.cells(row)) == len(planner.HEADER)


def test_a_refused_budget_is_reported(monkeypatch) -> None:
    def plan(*args, **options):
        raise remat.BudgetError("no plan fits")

    monkeypatch.setattr(remat, "plan", plan)
    row = planner.row(MODEL, 25, [Point("without", 1000, 0, 10, 10)])
    assert (row.refusal, row.peak_bytes, row.ratio) == ("no plan fits", None, None)
    assert len(planner.cells(row)) == len(planner.HEADER)
    assert planner.prediction([row]) == {"pairs": 0}


@pytest.mark.parametrize("module", [planner, baselines, flops])
def test_the_examples_of_the_benchmarks_run(module) -> None:
    results = doctest.testmod(module)
    assert results.attempted
    assert not results.failed
