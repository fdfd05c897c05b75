"""The online schedule with residuals compared with the optimum for a known length, and an interpreter."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from remat.errors import ScheduleError
from remat.loops.schedules import Mixed, OnlineMixed, replay
from remat.loops.schedules.mixed import blocks_of
from remat.loops.schedules.online_mixed import lengths_of_phases

SIZES = [(1, 1), (1, 2), (2, 3), (1, 4), (3, 20), (2, 1), (4, 1)]


def optimum(n: int, blocks: tuple[int, ...]) -> np.ndarray:
    """Return the fewest evaluations of all loops of up to `n` steps, by the recurrence."""
    lengths = np.arange(n + 1)
    below = np.where(lengths <= blocks[0], lengths, 1 << 40)
    for block in blocks[1:]:
        counts = lengths.copy()
        for length in range(block + 1, n + 1):
            k = np.arange(1, length)
            counts[length] = np.min(k + counts[k] + below[length - k])
        below = counts
    return below


@pytest.mark.parametrize("state, residuals", SIZES)
def test_steps_are_within_the_proven_ratio_of_the_optimum(state: int, residuals: int) -> None:
    for slots in range(1, 7):
        blocks = blocks_of(10**6, slots * state, state, residuals)
        n = 90
        best = optimum(n, blocks)
        found = [OnlineMixed(i, blocks, state / residuals).forward_steps for i in range(n + 1)]
        ends = [int(end) for end in _phases(blocks, n)]
        for i in range(1, n + 1):
            phase = next(p for p, end in enumerate(ends, 1) if i <= end)
            more = found[i] - int(best[i])
            if phase == 1:
                assert more == 0, (slots, i)
            elif phase == 2:
                assert more <= -(-state // residuals), (slots, i)
            elif all(a <= 2 * b for b, a in itertools.pairwise(blocks)):
                assert more <= ends[phase - 2], (slots, i)
                assert Fraction(found[i], int(best[i])) <= Fraction(3 * slots + 2, 2 * slots + 1)
            if i in ends and all(a <= 2 * b for b, a in itertools.pairwise(blocks)):
                assert more == 0, (slots, i)


def _phases(blocks: tuple[int, ...], n: int) -> list[int]:
    """Return N(s, 1), N(s, 2), ... until they exceed n."""
    rows = [blocks]
    while rows[-1][-1] <= n:
        rows.append(tuple(itertools.accumulate((blocks[0], *rows[-1][1:]))))
    return [row[-1] for row in rows]


@pytest.mark.parametrize("state, residuals", SIZES)
def test_states_and_residuals_of_short_loops_are_available_and_fit(
    state: int, residuals: int
) -> None:
    for n, slots in itertools.product(range(13), range(1, 7)):
        _check(n, slots * state, state, residuals)


@given(
    n=st.integers(0, 150),
    memory=st.integers(1, 40),
    state=st.integers(1, 6),
    residuals=st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_states_and_residuals_are_available_and_fit(
    n: int, memory: int, state: int, residuals: int
) -> None:
    _check(n, max(memory, state), state, residuals)


def _check(n: int, memory: int, state: int, residuals: int) -> None:
    schedule = OnlineMixed(n, blocks_of(10**6, memory, state, residuals), state / residuals)
    found = replay(schedule.actions(), n)
    assert found.forward_steps == schedule.forward_steps
    for states, steps in found.held:
        assert states * state + max(0, steps - 1) * residuals <= memory + state


def test_kept_states_do_not_depend_on_later_steps() -> None:
    blocks = (1, 2, 3, 4)
    short, long = (list(OnlineMixed(n, blocks).sweep()) for n in (40, 80))
    assert short[:-1] == long[: len(short) - 1]
    assert short[-1].starts == long[len(short) - 1].starts


def test_long_loops_with_a_few_slots_have_a_schedule() -> None:
    for slots in (1, 2, 30):
        schedule = OnlineMixed(20_000, tuple(range(1, slots + 2)))
        assert schedule.forward_steps >= schedule.n
    assert lengths_of_phases((1, 2, 3), 2**31 - 1).shape == (3, 4096)


def test_the_schedule_prints_its_cost() -> None:
    assert str(OnlineMixed(7, (1, 2, 3))) == (
        "online: 7 steps, 3 checkpoints, or up to 3 steps' residuals: 15 forward steps (2.14 per step)"
    )
    assert OnlineMixed(7, (1, 2, 3)).picture().splitlines()[-1].startswith("<")
    assert Mixed.of(7, 2, 1, 1).forward_steps == 15


@pytest.mark.parametrize("n, blocks", [(-1, (1, 2)), (3, ()), (3, (2, 1)), (3, (2,))])
def test_impossible_schedules_are_refused(n: int, blocks: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError):
        OnlineMixed(n, blocks)
