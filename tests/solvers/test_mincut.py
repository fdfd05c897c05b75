"""Minimum cuts compared with all possible choices."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import scipy
from hypothesis import example, given, settings, strategies as st

from remat.errors import BudgetError
from remat.solvers.mincut import CutProblem, RecentNetworks, at_budget, between, hull, min_cut


@st.composite
def problems(draw: st.DrawFn) -> CutProblem:
    n = draw(st.integers(1, 7))
    deps = [
        tuple(sorted(draw(st.sets(st.integers(0, v - 1), max_size=3)))) if v else ()
        for v in range(n)
    ]
    return CutProblem(
        tuple(draw(st.lists(st.sampled_from((0, 1, 2, 5, 9)), min_size=n, max_size=n))),
        tuple(
            draw(st.lists(st.sampled_from((0.0, 1.0, 2.0, 7.0, math.inf)), min_size=n, max_size=n))
        ),
        tuple(deps),
        tuple(sorted(draw(st.sets(st.integers(0, n - 1), min_size=1)))),
        tuple(draw(st.lists(st.sampled_from((0.5, 2.0, math.inf)), min_size=n, max_size=n)))
        if draw(st.booleans())
        else (),
    )


def _all_choices(problem: CutProblem) -> list[tuple[int, float]]:
    """Yield (bytes, time) of every choice of saved and offloaded values."""
    n = len(problem)
    choices = set()
    for chosen in itertools.product(range(3 if problem.transfer else 2), repeat=n):
        wanted = set(problem.needed)
        n_bytes, time = 0, 0.0
        for v in reversed(range(n)):
            if v not in wanted:
                continue
            if chosen[v] == 1:
                n_bytes += problem.bytes[v]
            elif chosen[v] == 2:
                time += problem.transfer[v]
            else:
                time += problem.time[v]
                wanted |= set(problem.deps[v])
        if math.isfinite(time):
            choices.add((n_bytes, time))
    return sorted(choices)


@given(problems(), st.sampled_from((0.05, 0.3, 1.0, 2.5, 20.0)))
@example(CutProblem((0, 1, 0), (0.0, 1.0, 0.0), ((), (), (0, 1)), (2,)), 0.05)
def test_a_minimum_cut_is_the_cheapest_choice(problem: CutProblem, price: float) -> None:
    cut = min_cut(problem, price)
    least = min(time + price * n_bytes for n_bytes, time in _all_choices(problem))
    assert cut.time + price * cut.bytes == pytest.approx(least, abs=1e-6)
    assert cut.bytes == sum(problem.bytes[v] for v in cut.saved)
    transfers = [problem.transfer[v] for v in cut.offloaded]
    assert cut.time == sum([*(problem.time[v] for v in cut.recomputed), *transfers])
    for v in cut.recomputed:
        assert set(problem.deps[v]) <= {*cut.saved, *cut.recomputed, *cut.offloaded}


@given(problems(), st.sampled_from((0.05, 0.3, 1.0, 2.5, 20.0)))
def test_the_hull_holds_the_best_choice_for_every_price(problem: CutProblem, price: float) -> None:
    cuts = hull(problem).cuts
    least = min(time + price * n_bytes for n_bytes, time in _all_choices(problem))
    assert min(cut.time + price * cut.bytes for cut in cuts) == pytest.approx(least, abs=1e-6)
    assert [cut.bytes for cut in cuts] == sorted({cut.bytes for cut in cuts})
    assert [cut.time for cut in cuts] == sorted({cut.time for cut in cuts}, reverse=True)


@settings(deadline=None, max_examples=60)
@given(problems(), st.integers(0, 40))
@example(CutProblem((5, 1), (math.inf, 0.0), ((), ()), (0, 1)), 4)
def test_bounds_hold_and_choices_fit_their_budget(problem: CutProblem, budget: int) -> None:
    fitting = [time for n_bytes, time in _all_choices(problem) if n_bytes <= budget]
    all_cuts = hull(problem)
    if not fitting:
        assert all_cuts.lower_bound(budget) == math.inf
        for refuses in (at_budget, lambda p, b: all_cuts.within(b)):
            with pytest.raises(BudgetError, match="smallest found"):
                refuses(problem, budget)
        return
    least = min(fitting)
    near, bound = at_budget(problem, budget)
    assert max(near.bytes, all_cuts.within(budget).bytes) <= budget
    assert near.time == pytest.approx(all_cuts.within(budget).time)
    assert bound == pytest.approx(all_cuts.lower_bound(budget), abs=1e-5)
    assert all_cuts.lower_bound(budget) <= least + 1e-9
    assert bound <= least + 1e-9


def _long_chain() -> CutProblem:
    draw = random.Random(0)
    n = 120
    return CutProblem(
        tuple(draw.randint(1, 10**6) for _ in range(n)),
        tuple(draw.random() for _ in range(n)),
        tuple((v - 1,) if v else () for v in range(n)),
        tuple(range(n)),
    )


def test_recent_networks_change_the_work_but_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, recent = _long_chain(), RecentNetworks()
    budgets = [sum(problem.bytes) * tenths // 10 for tenths in (9, 3, 5, 3)]
    flows: list[float] = []
    solve = scipy.sparse.csgraph.maximum_flow

    def counted(network: Any, source: int, sink: int) -> Any:
        flows.append(float(network.data.sum()))
        return solve(network, source, sink)

    monkeypatch.setattr(scipy.sparse.csgraph, "maximum_flow", counted)
    alone = [at_budget(problem, budget) for budget in budgets]
    n_alone = len(flows)
    assert [at_budget(problem, budget, recent=recent) for budget in budgets] == alone
    n_shared = len(flows) - n_alone
    assert [at_budget(problem, budget, recent=recent) for budget in budgets] == alone
    assert n_shared < n_alone and len(flows) == n_alone + n_shared


def test_a_hull_that_is_cut_short_still_bounds() -> None:
    problem = _long_chain()
    whole, short = hull(problem), hull(problem, max_cuts=5)
    assert len(short.cuts) < len(whole.cuts)
    for tenth in range(11):
        budget = sum(problem.bytes) * tenth // 10
        assert short.lower_bound(budget) <= whole.lower_bound(budget) + 1e-6
        assert whole.lower_bound(budget) <= whole.within(budget).time + 1e-6


def test_a_value_that_cannot_be_recomputed_is_saved() -> None:
    problem = CutProblem((8, 8), (math.inf, 1.0), ((), (0,)), (0, 1))
    assert [(cut.saved, cut.recomputed) for cut in hull(problem).cuts] == [
        ((0,), (1,)),
        ((0, 1), ()),
    ]


def test_values_that_stay_live_are_saved_at_no_cost() -> None:
    problem = CutProblem((0, 8), (5.0, 1.0), ((), (0,)), (1,))
    assert hull(problem).cuts[0].saved == (0,)
    assert hull(problem).cuts[0].time == 1.0


@given(problems(), st.integers(1, 4))
def test_cuts_between_vertices_are_choices_between_them(problem, places):
    found = hull(problem)
    for few, many in itertools.pairwise(found.cuts):
        for cut in between(problem, few, many, places=places):
            assert few.bytes < cut.bytes < many.bytes
            assert cut.time < few.time
            assert cut.bytes == sum(problem.bytes[v] for v in cut.saved)
            transfers = [problem.transfer[v] for v in cut.offloaded]
            times = [problem.time[v] for v in cut.recomputed]
            assert cut.time == pytest.approx(sum([*times, *transfers]))
            have = {*cut.saved, *cut.recomputed, *cut.offloaded}
            assert set(problem.needed) <= have
            assert all(u in have for v in cut.recomputed for u in problem.deps[v])
            # The hull's line is a lower bound on it.
            assert cut.time >= found.lower_bound(cut.bytes) - 1e-9


def test_a_value_that_cannot_be_recomputed_is_offloaded_where_that_is_possible() -> None:
    problem = CutProblem((8, 8), (math.inf, 1.0), ((), (0,)), (0, 1), (0.5, math.inf))
    assert [(cut.saved, cut.recomputed, cut.offloaded) for cut in hull(problem).cuts] == [
        ((), (1,), (0,)),
        ((1,), (), (0,)),
        ((0, 1), (), ()),
    ]
