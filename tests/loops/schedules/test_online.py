"""The online schedule compared with the binomial schedule and an interpreter."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from remat.loops.schedules import Binomial, Online, beta, replay


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 5, 7, 10])
def test_online_equals_offline_up_to_its_bound(slots: int) -> None:
    for n in range((slots + 1) * (slots + 2) // 2 + 1):
        assert Online(n, slots).forward_steps == Binomial(n, slots).forward_steps, n


@pytest.mark.parametrize("slots, most", [(2, 1.101), (3, 1.044), (5, 1.036), (8, 1.021)])
def test_online_stays_near_the_optimum_beyond_its_bound(slots: int, most: float) -> None:
    ratios = [
        Online(n, slots).forward_steps / Binomial(n, slots).forward_steps
        for n in range(1, min(beta(slots, 4), 150))
    ]
    assert max(ratios) <= most


@given(n=st.integers(0, 120), slots=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_online_actions_have_the_cost_that_the_schedule_states(n: int, slots: int) -> None:
    schedule = Online(n, slots)
    found = replay(schedule.actions(), n)
    assert found.forward_steps == schedule.forward_steps
    assert found.peak_slots <= slots
