"""The schedule over two memories against the binomial one and an interpreter."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from remat.loops.schedules import Binomial, TwoTier, replay


@given(n=st.integers(0, 200), memory=st.integers(0, 8), host=st.integers(0, 8))
@settings(max_examples=60, deadline=None)
def test_two_tiers_cost_no_more_steps_and_count_their_transfers(
    n: int, memory: int, host: int
) -> None:
    if memory + host == 0:
        return
    schedule = TwoTier(n, memory, host)
    actions = list(schedule.actions())
    found = replay(actions, n)
    assert found.forward_steps == Binomial(n, memory + host).forward_steps
    assert sum(found.writes[:host]) == schedule.host_writes
    assert sum(found.reads[:host]) == schedule.host_reads
    held = {slot for slot in range(host, len(found.writes)) if found.writes[slot]}
    assert len(held) == schedule.peak_slots


def test_two_tiers_keep_the_least_used_states_on_the_host() -> None:
    found = replay(Binomial(1000, 8).actions(), 1000)
    assert list(found.writes) == sorted(found.writes)
