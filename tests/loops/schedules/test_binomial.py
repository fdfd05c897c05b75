"""The binomial schedule compared with the literature, brute force and an interpreter."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given, settings, strategies as st

from remat.loops.schedules import (
    Binomial,
    beta,
    binomial_advances,
    binomial_rows,
    binomial_split,
    repetitions,
    replay,
)


@lru_cache(None)
def fewest_advances(n: int, slots: int) -> int:
    """Return the fewest advances by the recursion that the closed form solves (Griewank & Walther, eq. 2)."""
    if n <= 1:
        return 0
    if slots == 1:
        return n * (n - 1) // 2
    return min(
        m + fewest_advances(m, slots) + fewest_advances(n - m, slots - 1) for m in range(1, n)
    )


@pytest.mark.parametrize(
    "n, slots, steps", [(10, 3, 25), (100, 5, 416), (100, 10, 322), (1000, 10, 4636)]
)
def test_binomial_costs_are_the_published_ones(n: int, slots: int, steps: int) -> None:
    schedule = Binomial(n, slots)
    assert schedule.forward_steps == steps
    assert schedule.grad_forward_steps == steps + 1
    found = replay(schedule.actions(), n)
    assert found.forward_steps == steps
    assert found.peak_slots == schedule.peak_slots == slots


def test_binomial_is_optimal_by_brute_force() -> None:
    for n in range(61):
        for slots in range(1, 9):
            assert binomial_advances(n, slots) == fewest_advances(n, slots)


@given(n=st.integers(0, 300), slots=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_binomial_actions_have_the_cost_that_the_schedule_states(n: int, slots: int) -> None:
    schedule = Binomial(n, slots)
    found = replay(schedule.actions(), n)
    assert found.forward_steps == schedule.forward_steps
    assert found.peak_slots == schedule.peak_slots <= slots


@given(n=st.integers(2, 10**9), slots=st.integers(2, 200))
@settings(max_examples=200, deadline=None)
def test_splits_satisfy_the_optimality_conditions(n: int, slots: int) -> None:
    r, m = repetitions(n, slots), binomial_split(n, slots)
    assert beta(slots, r - 1) < n <= beta(slots, r)
    assert beta(slots, r - 2) <= m <= beta(slots, r - 1)
    assert beta(slots - 1, r - 1) <= n - m <= beta(slots - 1, r)


def test_rows_are_binomial_coefficients_clipped_to_32_bits() -> None:
    rows = binomial_rows(12, 10**6)
    for c, row in enumerate(rows):
        assert row == tuple(min(beta(c, r), 2**31 - 1) for r in range(len(row)))
    assert len(rows) == 14
    assert rows[12][-2] >= 10**6
