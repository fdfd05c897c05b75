"""The fast measurement of an order, compared with executing its steps."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st
from solver_cases import graphs, orders

from remat.solvers import Graph, simulate
from remat.solvers.liveness import Arrays, liveness
from remat.solvers.simulate import steps_of


@given(graphs(), st.data())
def test_fast_liveness_equals_simulated_steps(graph: Graph, data: st.DataObject) -> None:
    order = data.draw(orders(graph))
    # Repeating a value that is still live would not be a step, so liveness ends it before.
    measured = liveness(Arrays.of(graph), order)
    usage = simulate(graph, steps_of(graph, order))
    assert measured.peak_bytes == usage.peak_bytes
    assert usage.time == sum(graph.nodes[v].time for v in order)
    assert measured.extra_time == usage.time - graph.time
    # Nothing is live at the end, and every value that is computed is freed once.
    kinds = [kind for kind, _ in steps_of(graph, order)]
    assert kinds.count("free") == kinds.count("compute") == len(order)


@given(graphs(), st.data())
def test_liveness_counts_each_moment(graph: Graph, data: st.DataObject) -> None:
    order = data.draw(orders(graph))
    live: dict[int, int] = {}
    sums = []
    for kind, key in steps_of(graph, order):
        if kind == "compute":
            live[key] = graph.nodes[key].bytes
            sums.append(sum(live.values()))
        else:
            del live[key]
    np.testing.assert_array_equal(liveness(Arrays.of(graph), order).live_bytes, sums)


@given(graphs(), st.data())
def test_each_use_is_served_by_the_latest_computation_before(
    graph: Graph, data: st.DataObject
) -> None:
    order = data.draw(orders(graph))
    measured = liveness(Arrays.of(graph), order)
    expected = [
        (step, max(k for k in range(step) if order[k] == operand))
        for step, value in enumerate(order)
        for operand in graph.operands()[value]
    ]
    assert list(zip(measured.user.tolist(), measured.server.tolist())) == expected
    values = np.array([order[server] for _, server in expected], np.int64)
    np.testing.assert_array_equal(measured.latest(values, measured.user), measured.server)


@given(graphs(), st.data())
def test_a_tidy_order_computes_only_what_is_used(graph: Graph, data: st.DataObject) -> None:
    order = data.draw(orders(graph))
    tidy = liveness(Arrays.of(graph), order).tidy()
    assert (tidy.used | tidy.is_first).all()
    assert tidy.order[tidy.is_first].tolist() == list(range(len(graph)))
    assert tidy.peak_bytes <= liveness(Arrays.of(graph), order).peak_bytes
