"""Segments of a training step: legal orders, near the budget, with nested recomputation."""

from __future__ import annotations

import numpy as np
import pytest
from chain_oracle import uniform_chain
from hypothesis import given, settings, strategies as st
from solver_cases import graphs, training_graph

from remat.solvers import Graph, simulate
from remat.solvers.liveness import Arrays, liveness
from remat.solvers.segments import Segments
from remat.solvers.simulate import steps_of


@settings(deadline=None, max_examples=60)
@given(graphs(), st.data())
def test_orders_of_segments_are_schedules(graph: Graph, data: st.DataObject) -> None:
    once = data.draw(st.sets(st.sampled_from([node.id for node in graph.nodes])))
    plain = liveness(Arrays.of(graph, once), np.arange(len(graph)))
    for found in Segments(plain).near(data.draw(st.integers(0, plain.peak_bytes))):
        usage = simulate(graph, steps_of(graph, found.order.tolist()))
        assert usage.peak_bytes == found.peak_bytes
        assert not found.arrays.once[found.order[~found.is_first]].any()


@pytest.mark.parametrize("percent", [30, 20, 10])
def test_chains_are_recomputed_within_a_small_budget(percent: int) -> None:
    graph = uniform_chain(60)
    plain = liveness(Arrays.of(graph, {0}), np.arange(len(graph)))
    budget = percent * plain.peak_bytes // 100
    assert min(found.peak_bytes for found in Segments(plain).near(budget)) <= budget


def test_a_long_forward_part_has_few_segments_and_still_fits() -> None:
    graph = training_graph(400, skips=0.1)
    plain = liveness(Arrays.of(graph), np.arange(len(graph)))
    budget = plain.peak_bytes // 4
    found = min(Segments(plain).near(budget), key=lambda order: order.peak_bytes)
    assert found.peak_bytes <= budget
    assert found.extra_time <= 0.5 * graph.time
