"""The dynamic program compared with every plan that its recursion can express."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chain_oracle import plan_chain, simulate_chain
from hypothesis import given, settings, strategies as st

from remat.errors import BudgetError, GraphError, ScheduleError
from remat.solvers.chain import ChainStep
from remat.solvers.graph import Chain, Stage, StageOption


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    n = draw(st.integers(1, 4))
    small = st.integers(0, 5)
    sizes = draw(st.lists(small, min_size=n + 1, max_size=n + 1))

    def option(k: int) -> StageOption:
        numbers = draw(st.tuples(small, small, small, small, small))
        return StageOption(sizes[k + 1] + numbers[0], *numbers[1:])

    stages = []
    for k in range(n):
        options = tuple(option(k) for _ in range(draw(st.integers(1, 2))))
        stages.append(Stage(sizes[k], draw(small), options, draw(small)))
    return Chain(tuple(stages), sizes[n])


def _all_plans(chain: Chain, s: int, e: int) -> Iterator[tuple[ChainStep, ...]]:
    if s == e:
        yield ()
        return
    for o in range(len(chain.stages[s].options)):
        for rest in _all_plans(chain, s + 1, e):
            yield (("save", s, o), *rest, ("backward", s, 0))
    for j in range(s + 1, e):
        sweep: list[ChainStep] = []
        for k in range(s, j):
            sweep.append(("forward", k, 0))
            if k > s:
                sweep.append(("free", k, 0))
        for right in _all_plans(chain, j, e):
            for left in _all_plans(chain, s, j):
                yield (*sweep, *right, ("free", j, 0), *left)


@settings(deadline=None, max_examples=60)
@given(chains(), st.integers(1, 60))
def test_a_chains_plan_is_the_fastest_of_all(chain: Chain, budget: int) -> None:
    plans = [simulate_chain(chain, steps) for steps in _all_plans(chain, 0, len(chain))]
    fitting = [usage.time for usage in plans if usage.peak_bytes <= budget]
    if fitting:
        plan = plan_chain(chain, budget, n_slots=budget)
        assert plan.time == min(fitting)
        assert plan.peak_bytes <= budget
        assert simulate_chain(chain, plan.steps).peak_bytes == plan.peak_bytes
    else:
        smallest = min(usage.peak_bytes for usage in plans)
        with pytest.raises(BudgetError, match="smallest peak") as refused:
            plan_chain(chain, budget, n_slots=2000)
        assert f"found is {smallest} bytes" in str(refused.value)


@settings(deadline=None, max_examples=40)
@given(chains(), st.integers(1, 200), st.integers(1, 40))
def test_coarse_slots_never_exceed_the_budget(chain: Chain, budget: int, n_slots: int) -> None:
    try:
        plan = plan_chain(chain, budget, n_slots=n_slots)
    except BudgetError:
        return
    assert plan.peak_bytes <= budget


@pytest.mark.parametrize(("n", "s", "forwards"), [(10, 3, 25), (30, 3, 115), (30, 5, 92)])
def test_uniform_stages_take_what_the_binomial_schedule_takes(
    n: int, s: int, forwards: int
) -> None:
    # Griewank & Walther's revolve: s checkpoints, the initial state among them. The forward pass before a
    # backward one saves so much that it runs for one stage at a time. The number of forwards is
    # r n - C(s + r, s + 1) + n with the smallest r for which C(s + r, s) >= n.
    saved = 1000
    stage = Stage(1, 1.0, (StageOption(saved, 1.0, 0.0),))
    budget = s + 1 + saved + 2  # checkpoints, the current state, the saved values, both gradients
    plan = plan_chain(Chain((stage,) * n, output_bytes=1), budget, n_slots=budget)
    assert plan.time == forwards


def test_no_plan_takes_longer_for_more_memory() -> None:
    stage = Stage(8, 1.0, (StageOption(20, 1.0, 2.0), StageOption(12, 1.0, 2.5)))
    chain = Chain((stage,) * 12, output_bytes=8)
    times = [plan_chain(chain, budget, n_slots=budget).time for budget in range(60, 300, 20)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == 12 * 3.0


def test_a_budget_that_only_rounding_forbids_is_still_met() -> None:
    stage = Stage(5, 1.0, (StageOption(7, 1.0, 2.0),))
    chain = Chain((stage,) * 3, output_bytes=3)
    fine = plan_chain(chain, 30, n_slots=30)
    assert plan_chain(chain, fine.peak_bytes, n_slots=1).peak_bytes <= fine.peak_bytes


def test_impossible_chains_are_refused() -> None:
    with pytest.raises(GraphError, match="no option"):
        Chain((Stage(1, 1.0, ()),))
    with pytest.raises(GraphError, match="includes the output"):
        Chain((Stage(1, 1.0, (StageOption(0, 1.0, 1.0),)),), output_bytes=4)
    with pytest.raises(GraphError, match="negative"):
        Chain((Stage(1, -1.0, (StageOption(0, 1.0, 1.0),)),))


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([("forward", 1, 0)], "input is not live"),
        ([("save", 0, 0), ("save", 0, 0)], "still live"),
        ([("forward", 0, 0), ("forward", 0, 0)], "still live"),
        ([("backward", 0, 0)], "lacks"),
        ([("free", 1, 0)], "not live"),
        ([("forward", 7, 0)], "2 stages"),
        ([("save", 0, 0)], "before the backward of stage 1"),
    ],
)
def test_a_chains_broken_rule_is_named(steps: list[ChainStep], why: str) -> None:
    stage = Stage(1, 1.0, (StageOption(1, 1.0, 1.0),))
    with pytest.raises(ScheduleError, match=why):
        simulate_chain(Chain((stage, stage), 1), steps)
