"""`schedule()` compared with the least possible time, and with the published graphs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from solver_cases import GRAPHS, graphs, least_time, training_graph

import remat.solvers
from remat.errors import BudgetError, UnitsError
from remat.solvers import Graph, Node, no_remat, schedule, simulate, smallest_peak
from remat.solvers.simulate import floor_bytes


def _check(graph: Graph, found: remat.solvers.Schedule, budget: int) -> None:
    usage = simulate(graph, found.steps)
    assert (usage.peak_bytes, usage.time) == (found.peak_bytes, found.time)
    assert found.peak_bytes <= budget
    assert graph.time <= found.lower_bound <= found.time


@settings(deadline=None, max_examples=40)
@given(graphs(), st.floats(0.0, 1.0))
def test_small_schedules_are_optimal_and_bounds_hold(graph: Graph, share: float) -> None:
    floor, peak = floor_bytes(graph), no_remat(graph).peak_bytes
    budget = floor + int(share * (peak - floor))
    least = least_time(graph, budget)
    if least is None:
        with pytest.raises(BudgetError):
            schedule(graph, budget)
        return
    found = schedule(graph, budget)
    _check(graph, found, budget)
    assert found.lower_bound <= least
    assert found.time == least


# Optima in percent of extra time, proven by a mixed-integer program (Checkmate's formulation).
_PUBLISHED = [
    ("unet", 0.9, 1.13),
    ("unet", 0.8, 1.98),
    ("fcn8", 0.9, 0.03),
    ("fcn8", 0.8, 0.14),
    ("vgg16", 0.9, 1.97),
]


@pytest.mark.parametrize(
    ("name", "share", "optimum"),
    [*_PUBLISHED, pytest.param("unet", 0.5, 6.97, marks=pytest.mark.slow)],
)
def test_published_graphs_come_within_half_a_point(name: str, share: float, optimum: float) -> None:
    graph = Graph.load(GRAPHS / f"{name}.json")
    budget = int(share * no_remat(graph).peak_bytes)
    found = schedule(graph, budget)
    _check(graph, found, budget)
    extra = 100 * (found.time / graph.time - 1)
    bound = 100 * (found.lower_bound / graph.time - 1)
    assert bound - 0.01 <= optimum
    assert optimum - 0.01 <= extra <= optimum + 0.5


def test_an_impossible_budget_names_the_smallest_peak_found() -> None:
    graph = Graph.load(GRAPHS / "vgg16.json")
    budget = int(0.8 * no_remat(graph).peak_bytes)
    with pytest.raises(BudgetError) as refused:
        schedule(graph, budget)
    # The working set of one node, which a schedule reaches.
    assert str(floor_bytes(graph)) == "13153337344"
    assert "smallest peak that was found is 13153337344 bytes" in str(refused.value)
    assert "is proven" in str(refused.value)
    assert schedule(graph, 13153337344).peak_bytes == 13153337344


@settings(deadline=None, max_examples=30)
@given(graphs())
def test_the_smallest_peak_found_can_be_planned_for(graph: Graph) -> None:
    smallest = smallest_peak(graph)
    _check(graph, smallest, smallest.peak_bytes)
    assert floor_bytes(graph) <= smallest.peak_bytes <= no_remat(graph).peak_bytes
    assert least_time(graph, smallest.peak_bytes) is not None


def test_nothing_is_recomputed_when_all_fits() -> None:
    graph = training_graph(5)
    found = schedule(graph, "1GiB")
    assert found.time == found.lower_bound == graph.time
    assert found.is_optimal
    assert [step for step in found.steps if step[0] == "compute"] == [
        ("compute", node.id) for node in graph.nodes
    ]


def test_ids_need_not_be_places() -> None:
    graph = Graph(
        (Node(40, 1, 8), Node(30, 1, 8, (40,)), Node(20, 1, 8, (30,)), Node(10, 1, 8, (20, 40)))
    )
    found = schedule(graph, 24)
    assert found.time == found.lower_bound == 4
    _check(graph, found, 24)


def test_times_may_be_fractions() -> None:
    graph = Graph(tuple(Node(n.id, n.time / 7, n.bytes, n.deps) for n in training_graph(8).nodes))
    budget = int(0.6 * no_remat(graph).peak_bytes)
    _check(graph, schedule(graph, budget), budget)


def test_empty_and_single_graphs_have_schedules() -> None:
    assert schedule(Graph(()), 0).steps == ()
    assert schedule(Graph((Node(0, 1, 8),)), 8).steps == (("compute", 0), ("free", 0))
    with pytest.raises(BudgetError):
        schedule(Graph((Node(0, 1, 8),)), 7)


@pytest.mark.parametrize("budget", [-1, float("nan"), "much", None, True])
def test_a_budget_must_be_bytes(budget: object) -> None:
    with pytest.raises(UnitsError):
        schedule(training_graph(3), budget)  # type: ignore[arg-type]


def test_a_few_hundred_nodes_come_close_to_their_bound() -> None:
    graph = training_graph(150, skips=0.1)
    budget = int(0.5 * no_remat(graph).peak_bytes)
    found = schedule(graph, budget)
    _check(graph, found, budget)
    assert found.time - found.lower_bound <= 0.005 * graph.time


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.8, 0.5, 0.25, 0.1])
@pytest.mark.parametrize("skips", [0.0, 0.2])
def test_ten_thousand_nodes_come_close_to_their_bound(share: float, skips: float) -> None:
    graph = training_graph(5000, 1, skips)
    budget = int(share * no_remat(graph).peak_bytes)
    found = schedule(graph, budget)
    _check(graph, found, budget)
    assert found.time - found.lower_bound <= 0.01 * graph.time
