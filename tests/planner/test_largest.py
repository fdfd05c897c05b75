"""`remat.largest`: the largest of several sizes whose plan fits."""

from __future__ import annotations

import dataclasses
import math

import pytest

import remat
from planner.test_plan_file import PLAN
from remat.planner import largest as searching


def fitting_up_to(limit, monkeypatch):
    """Replace planning by a rule without compiling: a step is its size, and takes as many seconds."""
    asked = []

    def make_plan(step, *args, budget, **options):
        asked.append((step, args, budget, options))
        if step > limit:
            raise remat.BudgetError(f"no plan fits {step}")
        return dataclasses.replace(PLAN, seconds=float(step), extra_seconds=1.0)

    monkeypatch.setattr(searching, "make_plan", make_plan)
    return asked


def of_size(size):
    return size, ()


@pytest.mark.parametrize("n_sizes", [1, 2, 3, 7, 8, 20])
def test_the_last_size_that_fits_is_found_with_log2_plans(n_sizes, monkeypatch):
    sizes = [2**i for i in range(n_sizes)]
    for limit in range(n_sizes):
        asked = fitting_up_to(2**limit, monkeypatch)
        found = remat.largest(of_size, sizes, budget="1GiB")
        assert found.size == 2**limit
        assert len(asked) == len(found.tried) <= math.ceil(math.log2(n_sizes + 1))
        assert dict(found.tried)[found.size] == found.plan
        assert {size for size, plan in found.tried if isinstance(plan, str)} <= set(
            sizes[limit + 1 :]
        )


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
    assert asked[0] == (4, ("x",), "1GiB", {"offload": False, "target": "tpu:v5e:2x2"})


def test_no_size_that_fits_is_a_budget_error_with_the_reason(monkeypatch):
    fitting_up_to(0, monkeypatch)
    with pytest.raises(remat.BudgetError, match="not even the first, 1: no plan fits 1"):
        remat.largest(of_size, [1, 2, 3])


@pytest.mark.parametrize("made", [None, (1,), (1, [2]), (1, (), []), [1, ()]])
def test_the_result_of_make_step_is_checked(made):
    with pytest.raises(remat.PlanError, match=r"make_step\(3\) must return a step"):
        remat.largest(lambda _: made, [3])


def test_no_sizes_are_refused():
    with pytest.raises(remat.PlanError, match="at least one"):
        remat.largest(of_size, [])
