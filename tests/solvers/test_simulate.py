"""The simulator compared with an independent interpreter, and its refusals."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from solver_cases import graphs

from remat.errors import ScheduleError
from remat.solvers import Graph, Node, simulate
from remat.solvers.simulate import floor_bytes, no_remat


def _interpret(graph: Graph, steps: list[tuple[str, int]]) -> tuple[int, int | float] | None:
    """Return (peak bytes, time), or None if a rule is violated, by the text of the rules one by one."""
    nodes = {node.id: node for node in graph.nodes}
    order = [node.id for node in graph.nodes]
    computed: list[int] = []
    held: dict[int, int] = {}
    sums = [0]
    time: int | float = 0
    for kind, key in steps:
        if kind == "free":
            if key not in held:
                return None
            del held[key]
            continue
        if key in held or any(dep not in held for dep in nodes[key].deps):
            return None
        if key not in computed:
            computed.append(key)
        held[key] = nodes[key].bytes
        sums.append(sum(held.values()))
        time = time + nodes[key].time
    used = {dep for node in graph.nodes for dep in node.deps}
    if computed != order[: len(computed)] or any(k not in computed for k in order if k not in used):
        return None
    return max(sums), time


@given(graphs(5), st.data())
def test_simulation_agrees_with_a_plain_interpreter(graph: Graph, data: st.DataObject) -> None:
    # Most steps are legal, so that both outcomes are common.
    steps: list[tuple[str, int]] = []
    live: set[int] = set()
    for _ in range(data.draw(st.integers(0, 14))):
        ready = [n.id for n in graph.nodes if n.id not in live and set(n.deps) <= live]
        legal = [("compute", key) for key in ready] + [("free", key) for key in sorted(live)]
        wild = st.tuples(st.sampled_from(("compute", "free")), st.integers(0, len(graph) - 1))
        choice = st.sampled_from(legal) if data.draw(st.integers(0, 30)) else wild
        step = data.draw(choice)
        steps.append(step)
        (live.add if step[0] == "compute" else live.discard)(step[1])
    expected = _interpret(graph, steps)
    try:
        usage = simulate(graph, steps)  # type: ignore[arg-type]
    except ScheduleError:
        assert expected is None
    else:
        assert (usage.peak_bytes, usage.time) == expected


@given(graphs())
def test_no_schedule_is_below_the_floor(graph: Graph) -> None:
    assert floor_bytes(graph) <= no_remat(graph).peak_bytes


_PAIR = Graph((Node(4, 1, 8), Node(2, 1, 8, (4,))))


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([("compute", 2)], "operand 4 is not live"),
        ([("compute", 4), ("compute", 4)], "still live"),
        ([("free", 4)], "while it is not live"),
        ([("compute", 4)], "ends before node 2"),
        ([("compute", 3)], "no node 3"),
        ([("keep", 4)], "not an action"),
        ([4], "not a pair"),
        ([("compute", 4, 0)], "not a pair"),
        ([("compute", [])], "not a pair"),
    ],
)
def test_a_broken_rule_is_named(steps: list[tuple[str, int]], why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        simulate(_PAIR, steps)  # type: ignore[arg-type]


def test_first_computations_follow_the_graphs_order() -> None:
    graph = Graph((Node(0, 1, 8), Node(1, 1, 8)))
    with pytest.raises(ScheduleError, match="before node 0"):
        simulate(graph, [("compute", 1), ("compute", 0)])
