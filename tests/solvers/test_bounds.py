"""Proofs end where they make no progress, and rounded relaxations are schedules."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from solver_cases import graphs, least_time, random_layers

from remat.solvers import GridSearch, frontier
from remat.solvers.bounds import ProofEffort, prove, rounded
from remat.solvers.effort import Effort
from remat.solvers.graph import Graph
from remat.solvers.liveness import Arrays, Liveness, liveness
from remat.solvers.simulate import no_remat, simulate, steps_of

MUCH = 10**8


def plain_order(graph: Graph) -> Liveness:
    arrays = Arrays.of(graph)
    return liveness(arrays, np.arange(len(arrays)))


def order_within(graph: Graph, budget: int) -> Liveness:
    found = GridSearch().answers(graph).within(budget)
    place = graph.positions()
    order = [place[id] for kind, id in found.steps if kind == "compute"]
    return liveness(Arrays.of(graph), order)


@settings(deadline=None, max_examples=60)
@given(graphs(7), st.data())
def test_rounded_relaxations_are_schedules(graph: Graph, data: st.DataObject) -> None:
    budget = data.draw(st.integers(0, no_remat(graph).peak_bytes))
    plain = plain_order(graph)
    found = rounded(plain, budget, plain, 10_000, Effort(MUCH))
    if found is None or found.peak_bytes > budget:
        return
    usage = simulate(graph, steps_of(graph, found.order.tolist()))
    assert usage.peak_bytes == found.peak_bytes
    assert usage.time - graph.time == pytest.approx(found.extra_time)
    least = least_time(graph, budget)
    assert least is not None
    assert usage.time >= least - 1e-9


def test_a_rounded_relaxation_of_random_layers_is_faster_than_insertions() -> None:
    graph = random_layers(250)
    budget = int(0.8 * no_remat(graph).peak_bytes)
    quick = order_within(graph, budget)
    found = rounded(plain_order(graph), budget, quick, 12_000, Effort(MUCH))
    assert found is not None
    assert found.peak_bytes <= budget
    assert found.extra_time < quick.extra_time


def test_a_relaxation_that_would_be_too_large_is_left_out() -> None:
    graph = random_layers(100)
    plain = plain_order(graph)
    assert rounded(plain, plain.peak_bytes // 2, plain, 10, Effort(MUCH)) is None


def test_a_proof_ends_once_relaxations_raise_its_bound_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = random_layers(150)
    budget = int(0.85 * no_remat(graph).peak_bytes)
    best = order_within(graph, budget)
    with_windows: list[frontier.Frontier] = []
    proven: list[float] = []
    program_of, relax = frontier.frontier, frontier.relax

    def noted(*args: Any, windows: bool = False, **options: Any) -> frontier.Frontier:
        program = program_of(*args, windows=windows, **options)
        with_windows.extend([program] if windows else [])
        return program

    def counted(program: frontier.Frontier) -> frontier.FrontierAnswer:
        answer = relax(program)
        proven.extend([answer.extra_lower_bound] if program in with_windows else [])
        return answer

    monkeypatch.setattr(frontier, "frontier", noted)
    monkeypatch.setattr(frontier, "relax", counted)
    # Otherwise branch and bound solves the first programs of so small a graph.
    effort = ProofEffort(max_variables=100_000, exact_variables=100)
    proof = prove(plain_order(graph), budget, best, 0.0, effort, Effort(MUCH), close=0.0)
    assert 0 < proof.extra_lower_bound <= best.extra_time
    assert len(proven) >= 2
    highest = list(itertools.accumulate(proven, max))
    raises = [
        (after - before) / (best.extra_time - before)
        for before, after in itertools.pairwise(highest)
    ]
    assert all(raised > 0.1 for raised in raises[:-1])
    assert raises[-1] <= 0.1
