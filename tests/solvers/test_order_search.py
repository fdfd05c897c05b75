"""The search keeps what it promises: orders stay legal, within the budget, and only get better."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st
from solver_cases import graphs, training_graph

from remat.solvers import Graph, simulate
from remat.solvers.order_search import (
    Effort,
    Taste,
    descend,
    extra_time,
    improve,
    is_first,
    plain_tastes,
    refine,
    replay,
    tidy,
    trim,
)
from remat.solvers.simulate import Arrays, floor_bytes, no_remat, steps_of


@settings(deadline=None)
@given(graphs(), st.data())
def test_refining_and_trimming_keep_an_order_legal(graph: Graph, data: st.DataObject) -> None:
    arrays, operands = Arrays.of(graph), graph.operands()
    peak = no_remat(graph).peak_bytes
    budget = data.draw(st.integers(0, peak))
    taste = data.draw(st.sampled_from(plain_tastes(arrays)))
    effort = Effort(1_000_000)
    found = refine(arrays, operands, np.arange(len(graph)), budget, taste, effort)
    assert found.peak_bytes <= peak
    within = max(budget, found.peak_bytes)
    trimmed = trim(arrays, found, within, effort)
    usage = simulate(graph, steps_of(graph, trimmed.order.tolist()))
    assert usage.peak_bytes == trimmed.peak_bytes <= within
    assert extra_time(arrays, trimmed) <= extra_time(arrays, found)
    assert usage.time - graph.time == extra_time(arrays, trimmed)


def test_trimming_a_long_order_goes_by_a_glance_and_keeps_the_budget() -> None:
    graph = training_graph(1500)
    arrays, operands = Arrays.of(graph), graph.operands()
    budget = int(0.4 * no_remat(graph).peak_bytes)
    taste = Taste(arrays.time, room=0.7)
    effort = Effort(20_000_000)
    found = refine(arrays, operands, np.arange(len(graph)), budget, taste, effort)
    trimmed = trim(arrays, found, budget, effort)
    assert len(trimmed.order) < len(found.order)
    assert trimmed.peak_bytes <= budget


def test_needless_recomputations_are_dropped() -> None:
    graph = training_graph(5)
    arrays = Arrays.of(graph)
    order = [0, 1, 0, 2, 1, 3, 2, 4, 5, 6, 7, 8, 9, 10]
    measured = trim(arrays, tidy(arrays, order, Effort(10**6)), 10**12, Effort(10**6))
    assert measured.order.tolist() == list(range(11))


def test_large_neighbourhoods_are_searched_alike_every_time() -> None:
    graph = training_graph(20, skips=0.3)
    arrays, operands = Arrays.of(graph), graph.operands()
    budget = int(0.5 * no_remat(graph).peak_bytes)
    taste = Taste(arrays.time)
    once = np.arange(len(graph))
    start = refine(arrays, operands, once, budget, taste, Effort(10**6))
    found = [
        improve(
            arrays,
            operands,
            start,
            budget,
            good_enough=0.0,
            max_rounds=30,
            effort=Effort(10**7),
            seed=3,
        )
        for _ in range(2)
    ]
    assert found[0].order.tolist() == found[1].order.tolist()
    assert extra_time(arrays, found[0]) <= extra_time(arrays, start)


def test_missing_values_are_computed_before_their_first_use_and_once() -> None:
    operands = ((), (0,), (1,), (2, 0))
    out: list[int] = []
    replay(operands, [3, 3], {0, 2, 1}, out)
    assert out == [0, 1, 2, 3, 3]


def test_descending_reaches_below_one_third_where_recomputation_must_nest() -> None:
    graph = training_graph(30)
    arrays = Arrays.of(graph)
    found = descend(
        arrays, graph.operands(), np.arange(len(graph)), floor_bytes(graph), Effort(10**7)
    )
    assert found.peak_bytes < no_remat(graph).peak_bytes / 3
    assert is_first(found.order).sum() == len(graph)
