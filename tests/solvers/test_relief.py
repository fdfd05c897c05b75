"""Insertions lower the peak, removals keep within the budget, and improvement never makes an order slower."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from solver_cases import graphs, orders, random_layers, training_graph

from remat.solvers import Graph, simulate
from remat.solvers.effort import Effort
from remat.solvers.liveness import Arrays, liveness
from remat.solvers.relief import Relief, improve, keep, relieve
from remat.solvers.simulate import steps_of


@settings(deadline=None)
@given(graphs(), st.data(), st.sampled_from((0.0, 0.5, 2.0)))
def test_insertions_keep_an_order_legal(graph: Graph, data: st.DataObject, power: float) -> None:
    once = data.draw(st.sets(st.sampled_from([node.id for node in graph.nodes])))
    arrays = Arrays.of(graph, once)
    start = liveness(arrays, np.arange(len(graph)))
    budget = data.draw(st.integers(0, start.peak_bytes))
    found = relieve(start, budget, Relief(power=power), Effort(10**6))
    usage = simulate(graph, steps_of(graph, found.order.tolist()))
    assert usage.peak_bytes == found.peak_bytes
    assert not arrays.once[found.order[~found.is_first]].any()


@settings(deadline=None)
@given(graphs(), st.data())
def test_removals_keep_within_the_budget(graph: Graph, data: st.DataObject) -> None:
    measured = liveness(Arrays.of(graph), data.draw(orders(graph))).tidy()
    budget = data.draw(st.integers(measured.peak_bytes, 2 * measured.peak_bytes + 1))
    kept = keep(measured, budget, Effort(10**6))
    assert kept.peak_bytes <= budget
    assert kept.extra_time <= measured.extra_time
    assert kept.order[kept.is_first].tolist() == list(range(len(graph)))


def test_nothing_is_recomputed_where_all_fits() -> None:
    graph = training_graph(5)
    order = [0, 1, 0, 2, 1, 3, 2, 4, 5, 6, 7, 8, 9, 10]
    measured = liveness(Arrays.of(graph), order).tidy()
    assert keep(measured, 10**12, Effort(10**6)).order.tolist() == list(range(11))


@pytest.mark.parametrize("n_layers", [30, 700])
def test_nothing_is_recomputed_that_could_be_kept(n_layers: int) -> None:
    arrays = Arrays.of(training_graph(n_layers))
    plain = liveness(arrays, np.arange(len(arrays)))
    smaller = relieve(plain, plain.peak_bytes // 3, Relief(), Effort(10**8))
    budget = plain.peak_bytes // 2
    kept = keep(smaller, budget, Effort(10**8))
    assert kept.peak_bytes <= budget
    repeated = np.flatnonzero(~kept.is_first)
    assert 0 < len(repeated) < (~smaller.is_first).sum()
    for step in repeated[:: max(1, len(repeated) // 40)]:
        assert liveness(arrays, np.delete(kept.order, step)).peak_bytes > budget


@pytest.mark.parametrize("order", ["random", "layers"])
def test_dense_random_layers_fit_in_four_fifths_of_their_peak(order: str) -> None:
    graph = random_layers(250, order=order)
    plain = liveness(Arrays.of(graph), np.arange(len(graph)))
    budget = int(0.8 * plain.peak_bytes)
    found = relieve(plain, budget, Relief(), Effort(10**7))
    assert found.peak_bytes <= budget
    assert keep(found, budget, Effort(10**6)).extra_time <= 0.08 * graph.time


def test_improvement_is_the_same_every_time_and_never_worse() -> None:
    graph = training_graph(20, skips=0.3)
    plain = liveness(Arrays.of(graph), np.arange(len(graph)))
    budget = int(0.5 * plain.peak_bytes)
    start = relieve(plain, budget, Relief(), Effort(10**6))
    found = [
        improve(start, budget, Effort(10**6), good_enough=0.0, max_idle=50, seed=3)
        for _ in range(2)
    ]
    assert found[0].order.tolist() == found[1].order.tolist()
    assert found[0].extra_time <= start.extra_time
    assert found[0].peak_bytes <= budget
