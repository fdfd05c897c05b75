"""The planner's solver: close to the optimum, monotone, at every budget."""

from __future__ import annotations

import itertools
import math

import pytest
from chain_oracle import least_extra_forwards, uniform_chain
from solver_cases import GRAPHS, random_layers, training_graph

from remat.errors import BudgetError
from remat.solvers import Graph, GridSearch, Schedule, no_remat
from remat.solvers.simulate import floor_bytes
from remat.solvers.solver import Answers


@pytest.mark.parametrize(("n", "percents"), [(50, (50, 20, 12)), (100, (15, 10))])
def test_deep_chains_come_close_to_the_dynamic_programs_optimum(
    n: int, percents: tuple[int, ...]
) -> None:
    # At 10 % of its peak a chain of 100 stages nests recomputation several times.
    graph = uniform_chain(n)
    answers = GridSearch().answers(graph, once={0})
    for percent in percents:
        budget = percent * no_remat(graph).peak_bytes // 100
        extra = answers.within(budget).time - graph.time
        assert extra <= 1.03 * least_extra_forwards(n, budget)


def test_recomputation_nests_on_a_chain_of_unequal_layers() -> None:
    graph = training_graph(100)
    found = GridSearch()(graph, no_remat(graph).peak_bytes * 15 // 100)
    forward = sum(node.time for node in graph.nodes[:100])
    assert found.time - graph.time <= 1.5 * forward


@pytest.mark.parametrize(
    ("name", "share", "percent"),
    [
        ("unet", 0.9, 1.13),
        ("unet", 0.8, 1.98),
        ("unet", 0.5, 6.97),
        ("fcn8", 0.8, 0.14),
        ("vgg16", 0.9, 1.97),
    ],
)
def test_published_graphs_come_close_to_the_optimum(
    name: str, share: float, percent: float
) -> None:
    graph = Graph.load(GRAPHS / f"{name}.json")
    found = GridSearch()(graph, int(share * no_remat(graph).peak_bytes))
    assert 100 * (found.time / graph.time - 1) <= percent + 0.1


def test_time_rises_steadily_where_less_than_one_layer_fits() -> None:
    # The gradient of a decoder of 6 layers: at a tenth of its peak, parts of layers are computed three times.
    graph = Graph.load(GRAPHS / "decoder6.json")
    answers, peak = GridSearch().answers(graph), no_remat(graph).peak_bytes
    for share, percent in ((0.15, 22.5), (0.12, 33), (0.11, 40)):
        found = answers.within(int(share * peak))
        assert 100 * (found.time / graph.time - 1) <= percent


def test_dense_random_layers_take_little_more_time() -> None:
    graph = random_layers(250)
    found = GridSearch()(graph, int(0.8 * no_remat(graph).peak_bytes))
    assert found.time <= 1.055 * graph.time


@pytest.mark.parametrize("graph", [training_graph(30, skips=0.2), random_layers(100)])
def test_answers_are_monotone_at_every_percent(graph: Graph) -> None:
    peak = no_remat(graph).peak_bytes
    answers = GridSearch(effort=0.3).answers(graph)
    found = [_within(answers, percent * peak // 100) for percent in range(100, 9, -1)]
    schedules = [schedule for schedule in found if schedule is not None]
    assert len(schedules) > 10
    assert found == schedules + [None] * (len(found) - len(schedules))
    for larger, smaller in itertools.pairwise(schedules):
        assert larger.time <= smaller.time
        assert larger.peak_bytes >= smaller.peak_bytes


@pytest.mark.parametrize("graph", [training_graph(40), random_layers(50)])
def test_schedules_recompute_at_most_what_the_solver_may(graph: Graph) -> None:
    answers, unlimited = GridSearch(most_extra=0.3).answers(graph), GridSearch().answers(graph)
    peak = no_remat(graph).peak_bytes
    assert unlimited.smallest().time > 1.3 * graph.time
    smallest = answers.smallest()
    assert smallest.time <= 1.3 * graph.time
    for percent in range(5, 101, 5):
        found = _within(answers, percent * peak // 100)
        assert (found is None) == (percent * peak // 100 < smallest.peak_bytes)
        assert found is None or found.time <= 1.3 * graph.time


@pytest.mark.parametrize("graph", [training_graph(40, skips=0.2), random_layers(50)])
def test_what_is_known_to_exceed_a_time_does(graph: Graph) -> None:
    answers, asked_before = GridSearch().answers(graph), GridSearch().answers(graph)
    peak = no_remat(graph).peak_bytes
    n_known = 0
    for percent in range(20, 100, 8):
        budget = percent * peak // 100
        is_known = {
            share: asked_before.costs_more(budget, share * graph.time)
            for share in (1.0, 1.02, 1.1, 1.5)
        }
        n_known += sum(is_known.values())
        found = _within(answers, budget)
        assert _within(asked_before, budget) == found
        for share, exceeds in is_known.items():
            assert not exceeds or found is None or found.time > share * graph.time
    assert n_known >= 10


@pytest.mark.parametrize("graph", [training_graph(40, skips=0.2), random_layers(80)])
def test_no_schedule_takes_less_than_the_lower_bound(graph: Graph) -> None:
    answers, peak = GridSearch().answers(graph), no_remat(graph).peak_bytes
    bounds = [answers.lower_bound(percent * peak // 100) for percent in range(30, 101, 10)]
    assert bounds == sorted(bounds, reverse=True) and bounds[0] > bounds[-1] == graph.time
    for percent, bound in zip(range(30, 101, 10), bounds):
        found = _within(answers, percent * peak // 100)
        assert found is None or bound <= found.time
    floor = floor_bytes(graph)
    assert answers.lower_bound(floor) < answers.lower_bound(floor - 1) == math.inf
    assert _within(answers, floor - 1) is None


def test_schedules_are_found_where_segments_are_not_tried() -> None:
    graph = uniform_chain(50)
    peak = no_remat(graph).peak_bytes
    plain, without = GridSearch(), GridSearch(segments_below=0.0)
    for percent in (80, 40):
        extra = [s(graph, percent * peak // 100).time - graph.time for s in (plain, without)]
        assert extra[0] <= extra[1] <= 1.3 * extra[0]


@pytest.mark.parametrize("graph", [training_graph(40, skips=0.2), random_layers(50)])
def test_nothing_is_searched_between_orders_within_the_tolerance(graph: Graph) -> None:
    close = GridSearch(tolerance=0.03).answers(graph)
    answers, peak = GridSearch().answers(graph), no_remat(graph).peak_bytes
    times: set[float] = set()
    finer: set[float] = set()
    for percent in range(40, 100, 2):
        found, best = (_within(a, percent * peak // 100) for a in (close, answers))
        if found is None or best is None:
            assert found is best
            continue
        times.add(found.time)
        finer.add(best.time)
        assert found.time <= best.time + 0.04 * graph.time
    assert 2 <= len(times) < len(finer)


def _within(answers: Answers, budget: int) -> Schedule | None:
    try:
        return answers.within(budget)
    except BudgetError:
        return None
