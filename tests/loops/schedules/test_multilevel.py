"""Nested loops: lengths, memory, and comparison with the binomial schedule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from remat.loops.schedules import Binomial, Multilevel


@given(n=st.integers(0, 100_000), depth=st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_balanced_levels_cover_any_length_with_little_memory(n: int, depth: int) -> None:
    schedule = Multilevel.balanced(n, depth)
    assert 2 * n <= schedule.forward_steps <= n * (depth + 1)
    assert schedule.peak_slots <= depth * (n ** (1 / depth)) + depth
    assert schedule.peak_residuals == min(n, 1)


def test_residuals_weigh_against_states_when_levels_are_balanced() -> None:
    light = Multilevel.balanced(10_000, 2, step_recomputed=False, state_bytes=1, residual_bytes=1)
    heavy = Multilevel.balanced(10_000, 2, step_recomputed=False, state_bytes=1, residual_bytes=100)
    assert light.lengths == (100, 100)
    assert heavy.lengths == (1000, 10)
    assert heavy.forward_steps == 20_000


def test_nested_and_binomial_compare_as_published() -> None:
    # n = 10,000: 2.77 sweeps instead of 3 with 66 slots, 3.40 instead of 6 with 30 slots.
    assert Binomial(10_000, 66).recomputed_steps / 10_000 == pytest.approx(2.77, abs=0.01)
    assert Multilevel(10_000, (22, 22, 21)).recomputed_steps == pytest.approx(30_000, rel=0.05)
    assert Multilevel(10_000, (22, 22, 21)).peak_slots <= 66
    assert Binomial(10_000, 30).recomputed_steps / 10_000 == pytest.approx(3.40, abs=0.01)
