"""One graph within several budgets: counted effort, answers that only get better."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings, strategies as st
from solver_cases import GRAPHS, graphs, least_time, training_graph

from remat.errors import BudgetError
from remat.solvers import Graph, Schedule, no_remat, simulate
from remat.solvers.scheduler import Scheduler
from remat.solvers.simulate import floor_bytes


def _check(graph: Graph, found: Schedule, budget: int) -> None:
    usage = simulate(graph, found.steps)
    assert (usage.peak_bytes, usage.time) == (found.peak_bytes, found.time)
    assert found.peak_bytes <= budget
    assert graph.time <= found.lower_bound <= found.time


def _computed(found: Schedule) -> list[int]:
    return [node for kind, node in found.steps if kind == "compute"]


@settings(deadline=None, max_examples=40)
@given(graphs(7), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3))
def test_answers_are_schedules_and_bounds_hold(graph: Graph, shares: list[float]) -> None:
    floor, peak = floor_bytes(graph), no_remat(graph).peak_bytes
    scheduler = Scheduler(graph)
    for share in shares:
        budget = floor + int(share * (peak - floor))
        least = least_time(graph, budget)
        try:
            found = scheduler.within(budget)
        except BudgetError:
            continue
        _check(graph, found, budget)
        assert least is not None
        assert found.lower_bound <= least + 1e-9


@settings(deadline=None, max_examples=40)
@given(graphs(), st.data())
def test_what_is_computed_once_is_not_computed_again(graph: Graph, data: st.DataObject) -> None:
    once = data.draw(st.sets(st.sampled_from([node.id for node in graph.nodes])))
    smallest = Scheduler(graph, once).smallest()
    computed = _computed(smallest)
    assert all(computed.count(node) == 1 for node in once)
    assert smallest.peak_bytes >= floor_bytes(graph, once)


@pytest.mark.parametrize("skips", [0.0, 0.2])
def test_a_larger_budget_never_takes_more_time(skips: float) -> None:
    graph = training_graph(40, skips=skips)
    peak = no_remat(graph).peak_bytes
    scheduler = Scheduler(graph)
    times = []
    for percent in range(15, 101, 5):
        try:
            found = scheduler.within(percent * peak // 100)
        except BudgetError:
            assert not times
            continue
        _check(graph, found, percent * peak // 100)
        times.append(found.time)
    assert len(times) > 10
    assert times == sorted(times, reverse=True)
    # What was found stays found.
    assert scheduler.within(peak // 2).time <= times[-11]


def test_answers_do_not_depend_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = training_graph(30, skips=0.2)
    budgets = [int(share * no_remat(graph).peak_bytes) for share in (0.7, 0.4, 0.55)]
    steps = [found.steps for found in map(Scheduler(graph).within, budgets)]
    # A machine on which every look at the clock says that an hour went by.
    now = iter(range(0, 10**9, 3600))
    for clock in ("monotonic", "perf_counter", "process_time", "time"):
        monkeypatch.setattr(time, clock, lambda: float(next(now)))
    monkeypatch.setattr("remat.solvers.scheduler._BOUND_TIME_LIMIT_S", 0.0)
    assert [found.steps for found in map(Scheduler(graph).within, budgets)] == steps


def test_a_refusal_is_remembered_for_smaller_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = training_graph(20)
    scheduler = Scheduler(graph)
    budget = scheduler.smallest().peak_bytes - 1
    with pytest.raises(BudgetError, match=f"is {budget + 1} bytes"):
        scheduler.within(budget)
    monkeypatch.setattr(Scheduler, "_search", None)
    with pytest.raises(BudgetError, match=f"is {budget + 1} bytes"):
        scheduler.within(budget // 2)


def test_a_budget_below_the_floor_is_proven_impossible() -> None:
    graph = training_graph(20)
    once = {node.id for node in graph.nodes}
    peak = no_remat(graph).peak_bytes
    scheduler = Scheduler(graph, once)
    assert scheduler.floor_bytes == peak
    with pytest.raises(BudgetError, match="is proven"):
        scheduler.within(peak - 1)
    assert scheduler.within(peak).time == graph.time


def test_recomputation_nests_on_a_long_chain() -> None:
    # At 15 % of its peak one level of segments is not enough.
    graph = training_graph(100)
    peak = no_remat(graph).peak_bytes
    found = Scheduler(graph).within(peak * 15 // 100)
    forward = sum(node.time for node in graph.nodes[:100])
    assert found.time - graph.time <= 2 * forward


@pytest.mark.parametrize(("name", "share", "percent"), [("unet", 0.9, 1.13), ("vgg16", 0.9, 1.97)])
def test_published_graphs_come_close_without_the_exact_program(
    name: str, share: float, percent: float
) -> None:
    graph = Graph.load(GRAPHS / f"{name}.json")
    found = Scheduler(graph).within(int(share * no_remat(graph).peak_bytes))
    assert 100 * (found.time / graph.time - 1) <= percent + 0.5
