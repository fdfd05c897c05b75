"""One pass of eviction: orders are legal and within the budget, unless operands alone exceed it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from solver_cases import graphs, training_graph

from remat.solvers import Graph, simulate
from remat.solvers.evict import evict
from remat.solvers.liveness import Arrays, liveness
from remat.solvers.simulate import no_remat, steps_of


@settings(deadline=None)
@given(graphs(), st.integers(0, 40), st.sampled_from((0.0, 0.5, 1.0)))
def test_an_evicted_order_is_a_schedule(graph: Graph, budget: int, power: float) -> None:
    order = evict(Arrays.of(graph), budget, distance_power=power, max_steps=10_000)
    if order is not None:
        simulate(graph, steps_of(graph, order))
        assert liveness(Arrays.of(graph), order).is_first.sum() == len(graph)


@settings(deadline=None)
@given(graphs(), st.integers(0, 40), st.sets(st.integers(0, 7)))
def test_an_evicted_order_computes_again_only_what_may_be(
    graph: Graph, budget: int, once: set[int]
) -> None:
    order = evict(Arrays.of(graph, once), budget, distance_power=0.5, max_steps=10_000)
    if order is not None:
        simulate(graph, steps_of(graph, order))
        assert all(order.count(value) == 1 for value in once if value < len(graph))


@pytest.mark.parametrize("share", [0.8, 0.5, 0.3])
def test_eviction_keeps_to_a_budget_with_room_for_operands(share: float) -> None:
    graph = training_graph(60, skips=0.1)
    budget = int(share * no_remat(graph).peak_bytes)
    order = evict(Arrays.of(graph), budget, distance_power=0.5, max_steps=2_000)
    assert order is not None
    usage = simulate(graph, steps_of(graph, order))
    assert usage.peak_bytes <= budget
    assert usage.time > graph.time


def test_nothing_is_evicted_when_all_fits() -> None:
    graph = training_graph(10)
    peak = no_remat(graph).peak_bytes
    order = evict(Arrays.of(graph), peak, distance_power=1.0, max_steps=100)
    assert order == list(range(len(graph)))


def test_a_hopeless_pass_ends_without_an_order() -> None:
    graph = training_graph(40, skips=0.3)
    order = evict(Arrays.of(graph), 1, distance_power=1.0, max_steps=200)
    assert order is None


def test_estimates_stay_finite_however_often_values_come_back() -> None:
    graph = training_graph(300, skips=0.5)
    budget = int(0.1 * no_remat(graph).peak_bytes)
    with np.errstate(all="raise"):
        evict(Arrays.of(graph), budget, distance_power=1.0, max_steps=12_000)
