"""The frontier program excludes no schedule: its bounds are at most the least time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st
from solver_cases import GRAPHS, graphs, least_time, random_layers

from remat.solvers import Graph
from remat.solvers.frontier import frontier, relax, solve
from remat.solvers.liveness import Arrays
from remat.solvers.simulate import no_remat


@settings(deadline=None, max_examples=120)
@given(graphs(7), st.data())
def test_bounds_are_below_the_least_time(graph: Graph, data: st.DataObject) -> None:
    n = len(graph)
    budget = data.draw(st.integers(0, no_remat(graph).peak_bytes))
    chosen = data.draw(st.sets(st.integers(0, n - 1)))
    boundaries = sorted({*chosen, n - 1})
    starts = [-1, *boundaries[:-1]]
    # Any set of recomputations may be singled out: its rows hold for all schedules.
    possible = [(k, v) for k, start in enumerate(starts) for v in range(start + 1)]
    moments = data.draw(st.lists(st.sampled_from(possible), max_size=6)) if possible else []
    program = frontier(Arrays.of(graph), budget, boundaries, moments)
    least = least_time(graph, budget)
    whole = solve(program, max_nodes=1000)
    if least is None:
        return
    extra = least - graph.time
    assert not whole.is_infeasible
    assert whole.extra_lower_bound <= extra + 1e-9
    plain = relax(program)
    with_windows = frontier(Arrays.of(graph), budget, boundaries, moments, windows=True)
    tight = relax(with_windows)
    assert not plain.is_infeasible and not tight.is_infeasible
    margin = 1e-5 * graph.time
    assert plain.extra_lower_bound - margin <= tight.extra_lower_bound <= extra + 1e-9
    assert solve(with_windows, max_nodes=1000).extra_lower_bound <= extra + 1e-9


def test_windows_tighten_the_relaxation_of_random_layers() -> None:
    graph = random_layers(250)
    budget = int(0.8 * no_remat(graph).peak_bytes)
    boundaries = [140, 160, 180, 192, 205, 249]
    loose, tight = (
        relax(frontier(Arrays.of(graph), budget, boundaries, windows=windows)).extra_lower_bound
        for windows in (False, True)
    )
    assert tight > 1.2 * loose > 0


@settings(deadline=None, max_examples=60)
@given(graphs(7), st.data())
def test_a_known_schedule_does_not_cut_off_itself(graph: Graph, data: st.DataObject) -> None:
    budget = data.draw(st.integers(0, no_remat(graph).peak_bytes))
    least = least_time(graph, budget)
    if least is None:
        return
    extra = float(least - graph.time)
    program = frontier(Arrays.of(graph), budget, range(len(graph)), at_most=extra)
    answer = solve(program, max_nodes=1000)
    assert not answer.is_infeasible
    assert answer.extra_lower_bound <= extra + 1e-9


@pytest.mark.parametrize(
    ("name", "share", "percent"),
    [("unet", 0.9, 1.13), ("unet", 0.8, 1.98), ("fcn8", 0.8, 0.14), ("vgg16", 0.9, 1.97)],
)
def test_the_program_alone_proves_published_optima(name: str, share: float, percent: float) -> None:
    graph = Graph.load(GRAPHS / f"{name}.json")
    budget = int(share * no_remat(graph).peak_bytes)
    program = frontier(Arrays.of(graph), budget, range(len(graph)))
    answer = solve(program, max_nodes=1000)
    assert 100 * answer.extra_lower_bound / graph.time == pytest.approx(percent, abs=0.006)
