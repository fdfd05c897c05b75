"""Properties of every solver, including a toy solver defined here."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection

import pytest
from hypothesis import given, settings, strategies as st
from solver_cases import graphs, least_time, training_graph

from remat.errors import BudgetError
from remat.solvers import Answers, Graph, GridSearch, Schedule, Solver, no_remat, simulate
from remat.solvers.bounds import ProofEffort
from remat.solvers.evict import evict
from remat.solvers.liveness import Arrays
from remat.solvers.simulate import floor_bytes
from remat.solvers.solver import checked, refusal


@dataclasses.dataclass(frozen=True)
class Toy(Solver):
    """A solver that evicts, for each of a few fixed budgets, and returns the best schedule that fits."""

    n_budgets: int = 8

    def answers(self, graph: Graph, once: Collection[int] = ()) -> Answers:
        return _ToyAnswers(self, graph, once)


class _ToyAnswers(Answers):
    def __init__(self, solver: Toy, graph: Graph, once: Collection[int]) -> None:
        self.graph = graph
        self.floor_bytes = floor_bytes(graph, once)
        peak = no_remat(graph).peak_bytes
        plain = checked(graph, range(len(graph)), peak, graph.time)
        self.found = [plain]
        for k in range(solver.n_budgets):
            budget = self.floor_bytes + k * (peak - self.floor_bytes) // solver.n_budgets
            order = evict(Arrays.of(graph, once), budget, distance_power=1.0, max_steps=10_000)
            if order is not None:
                self.found.append(checked(graph, order, 2**53, graph.time))

    def within(self, budget: int) -> Schedule:
        fitting = [found for found in self.found if found.peak_bytes <= budget]
        if not fitting:
            raise refusal(budget, self.smallest().peak_bytes, self.floor_bytes)
        return min(fitting, key=lambda found: (found.time, found.peak_bytes))

    def smallest(self) -> Schedule:
        return min(self.found, key=lambda found: (found.peak_bytes, found.time))


SOLVERS = [
    Toy(),
    GridSearch(),
    GridSearch(effort=0.1, resolution=0.1),
    GridSearch(patience=10, close=0.01, tolerance=0.03, thorough=False),
    GridSearch(effort=0.5, proof=ProofEffort()),
]
_each_solver = pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: type(solver).__name__)


def _check(graph: Graph, found: Schedule, budget: int) -> None:
    usage = simulate(graph, found.steps)
    assert (usage.peak_bytes, usage.time) == (found.peak_bytes, found.time)
    assert found.peak_bytes <= budget
    assert graph.time <= found.lower_bound <= found.time


def _within(answers: Answers, budget: int) -> Schedule | None:
    try:
        return answers.within(budget)
    except BudgetError:
        return None


def test_solvers_are_values() -> None:
    assert GridSearch(2.0) == GridSearch(2.0) != GridSearch()
    assert len({*SOLVERS, Toy(), GridSearch(), GridSearch(0.5, proof=ProofEffort())}) == len(
        SOLVERS
    )
    assert dataclasses.replace(SOLVERS[-1], proof=ProofEffort(max_nodes=1)) != SOLVERS[-1]


@_each_solver
@settings(deadline=None, max_examples=25)
@given(graph=graphs(7), data=st.data())
def test_answers_are_schedules_and_bounds_hold(
    solver: Solver, graph: Graph, data: st.DataObject
) -> None:
    floor, peak = floor_bytes(graph), no_remat(graph).peak_bytes
    budget = data.draw(st.integers(floor, max(floor, peak)))
    least = least_time(graph, budget)
    try:
        found = solver(graph, budget)
    except BudgetError:
        return
    _check(graph, found, budget)
    assert least is not None
    assert found.lower_bound <= least <= found.time + 1e-9


@_each_solver
@settings(deadline=None, max_examples=25)
@given(graph=graphs(), data=st.data())
def test_values_marked_once_are_not_recomputed(
    solver: Solver, graph: Graph, data: st.DataObject
) -> None:
    once = data.draw(st.sets(st.sampled_from([node.id for node in graph.nodes])))
    smallest = solver.answers(graph, once).smallest()
    computed = [node for kind, node in smallest.steps if kind == "compute"]
    assert all(computed.count(node) == 1 for node in once)
    assert smallest.peak_bytes >= floor_bytes(graph, once)


@_each_solver
@settings(deadline=None, max_examples=25)
@given(graph=graphs())
def test_the_smallest_peak_can_be_planned_for_and_none_below_it(
    solver: Solver, graph: Graph
) -> None:
    answers = solver.answers(graph)
    smallest = answers.smallest()
    _check(graph, smallest, smallest.peak_bytes)
    assert answers.within(smallest.peak_bytes).peak_bytes <= smallest.peak_bytes
    with pytest.raises(BudgetError):
        answers.within(floor_bytes(graph) - 1)


@_each_solver
@settings(deadline=None, max_examples=25)
@given(graph=graphs(), data=st.data())
def test_time_never_falls_and_the_peak_never_rises_as_the_budget_falls(
    solver: Solver, graph: Graph, data: st.DataObject
) -> None:
    peak = no_remat(graph).peak_bytes
    budgets = data.draw(st.lists(st.integers(0, peak), max_size=6))
    answers = solver.answers(graph)
    found = [_within(answers, budget) for budget in sorted(budgets, reverse=True)]
    schedules = [schedule for schedule in found if schedule is not None]
    assert found == schedules + [None] * (len(found) - len(schedules))
    times = [schedule.time for schedule in schedules]
    peaks = [schedule.peak_bytes for schedule in schedules]
    assert times == sorted(times)
    assert peaks == sorted(peaks, reverse=True)


@_each_solver
def test_an_answer_does_not_depend_on_earlier_questions(solver: Solver) -> None:
    graph = training_graph(12, skips=0.2)
    peak = no_remat(graph).peak_bytes
    budgets = [percent * peak // 100 for percent in (92, 68, 50, 84, 31, 76)]
    alone = [_within(solver.answers(graph), budget) for budget in budgets]
    answers = solver.answers(graph)
    answers.smallest()
    assert [_within(answers, budget) for budget in budgets] == alone
    assert [_within(answers, budget) for budget in reversed(budgets)] == alone[::-1]


@_each_solver
def test_answers_do_not_depend_on_the_clock(
    solver: Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = training_graph(12, skips=0.2)
    budgets = [int(share * no_remat(graph).peak_bytes) for share in (0.7, 0.4)]
    found = [_within(solver.answers(graph), budget) for budget in budgets]
    # A clock by which an hour passes between any two reads.
    now = iter(range(0, 10**9, 3600))
    for clock in ("monotonic", "perf_counter", "process_time", "time"):
        monkeypatch.setattr(time, clock, lambda: float(next(now)))
    assert [_within(solver.answers(graph), budget) for budget in budgets] == found


@_each_solver
def test_a_budget_below_the_floor_is_proven_impossible(solver: Solver) -> None:
    graph = training_graph(20)
    once = {node.id for node in graph.nodes}
    peak = no_remat(graph).peak_bytes
    answers = solver.answers(graph, once)
    with pytest.raises(BudgetError, match=f"found is {peak} bytes.*is proven"):
        answers.within(peak - 1)
    assert answers.within(peak).time == graph.time
