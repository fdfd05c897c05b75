"""Cuts in the order search: orders stay legal and approach the budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from solver_cases import graphs, training_graph

from remat.solvers import Graph, simulate
from remat.solvers.effort import Effort
from remat.solvers.liveness import Arrays, liveness
from remat.solvers.order_search import CutParameters, refine, replay_order
from remat.solvers.simulate import no_remat, steps_of


@settings(deadline=None)
@given(graphs(), st.data(), st.sampled_from((1.0, 0.9, 0.5)), st.sampled_from((0.0, 0.5, 1.0)))
def test_cutting_keeps_an_order_legal(
    graph: Graph, data: st.DataObject, fill: float, height: float
) -> None:
    plain = liveness(Arrays.of(graph), np.arange(len(graph)))
    budget = data.draw(st.integers(0, plain.peak_bytes))
    found = refine(plain, budget, CutParameters(fill, height), Effort(1_000_000))
    usage = simulate(graph, steps_of(graph, found.order.tolist()))
    assert usage.peak_bytes == found.peak_bytes <= plain.peak_bytes
    assert usage.time - graph.time == found.extra_time


@pytest.mark.parametrize("share", [0.8, 0.5, 0.3])
def test_cuts_meet_a_budget_on_layers(share: float) -> None:
    graph = training_graph(60)
    plain = liveness(Arrays.of(graph), np.arange(len(graph)))
    budget = int(share * no_remat(graph).peak_bytes)
    assert refine(plain, budget, CutParameters(), Effort(10**7)).peak_bytes <= budget


def test_missing_values_are_computed_before_their_first_use_and_once() -> None:
    operands = ((), (0,), (1,), (2, 0))
    out: list[int] = []
    replay_order(operands, [3, 3], {0, 2, 1}, out)
    assert out == [0, 1, 2, 3, 3]
