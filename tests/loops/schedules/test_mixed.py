"""The mixed schedule compared with the recurrence, an exhaustive search and an independent package."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from loops.schedules.cheapest import least_cost_from
from remat.errors import ScheduleError
from remat.loops.schedules import Binomial, Mixed, Online, replay
from remat.loops.schedules.mixed import blocks_of, least_steps, solved

_MANY = 1 << 40


def counts_by_recurrence(n: int, memory: int, state: int, residuals: int) -> np.ndarray:
    """Return T(m, n) for m up to `memory` and lengths up to `n`, by Maddison's recurrence for r = c."""
    counts = np.full((memory + 1, n + 1), _MANY, np.int64)
    counts[:, 1] = 1
    for m, length in itertools.product(range(memory + 1), range(2, n + 1)):
        best = _MANY
        if m >= state:
            k = np.arange(1, length)
            best = int(np.min(k + counts[m - state, length - k] + counts[m, k]))
        if m >= residuals:
            best = min(best, 1 + int(counts[m - residuals, length - 1]))
        counts[m, length] = min(best, _MANY)
    return counts


def fewest_steps(n: int, memory: int, state: int, residuals: int) -> float | None:
    """Return the fewest evaluations of any sequence of actions."""

    def moves(at):
        left, hand, states, kept = at
        yield from ((0, (left, hand, states - {i}, kept)) for i in states)
        yield from ((0, (left, i, states, kept)) for i in states)
        used = len(states) * state + len(kept) * residuals
        if left - 1 in kept:
            yield 0, (left - 1, -1, states, kept - {left - 1})
        if hand == left - 1:
            yield 1, (left - 1, -1, states, kept)
        elif hand >= 0:
            yield 1, (left, hand + 1, states, kept)
            if used + residuals <= memory:
                yield 1, (left, hand + 1, states, kept | {hand})
        if hand >= 0 and used + state <= memory:
            yield 0, (left, hand, states | {hand}, kept)

    start = (n, 0, frozenset(), frozenset())  # steps left, the current state, states, residuals
    return least_cost_from(start, lambda at: not at[0], moves)


def check_actions(schedule: Mixed, memory: int, state: int, residuals: int) -> None:
    """Execute the actions; at each one, memory suffices besides the residuals in use."""
    found = replay(schedule.actions(), schedule.n)
    assert found.forward_steps == schedule.forward_steps
    assert found.peak_slots == schedule.peak_slots <= schedule.slots
    for states, steps in found.held:
        assert states * state + max(0, steps - 1) * residuals <= memory


@pytest.mark.parametrize("state, residuals", [(1, 1), (1, 2), (2, 1), (2, 3), (3, 2), (1, 0)])
def test_no_sequence_of_actions_runs_fewer_steps(state: int, residuals: int) -> None:
    for n, memory in itertools.product(range(1, 6), range(5)):
        fewest = fewest_steps(n, memory, state, residuals)
        if fewest is None:
            with pytest.raises(ScheduleError, match="no schedule of"):
                Mixed.of(n, memory, state, residuals)
        else:
            assert Mixed.of(n, memory, state, residuals).forward_steps == fewest, (n, memory)


@pytest.mark.parametrize(
    "n, s, steps",
    [
        # optimal_steps_mixed(n, s) of the package checkpoint-schedules 1.0.4
        (10, 3, 19),
        (50, 4, 164),
        (100, 5, 352),
        (137, 1, 9452),
        (200, 20, 392),
        (300, 2, 4876),
        (300, 7, 1126),
        (300, 20, 672),
    ],
)
def test_counts_are_those_of_the_package_checkpoint_schedules(n: int, s: int, steps: int) -> None:
    assert Mixed.of(n, s, 1, 1).forward_steps == steps


@pytest.mark.parametrize(
    "n, s, counts",
    [(100, 10, (237, 270, 288)), (1000, 10, (3921, 4366, 4580)), (1000, 50, (1974, 2323, 2651))],
)
def test_larger_residuals_cost_more_steps_up_to_those_of_states_alone(
    n: int, s: int, counts: tuple[int, ...]
) -> None:
    assert tuple(Mixed.of(n, s, 1, r).forward_steps for r in (1, 2, 4)) == counts
    assert Mixed.of(n, s, 1, s + 1).forward_steps == Binomial(n, s).forward_steps > counts[-1]


# The sums of optimal_steps_mixed(n, s) of checkpoint-schedules 1.0.4 over n = 1 to 300, for s = 1 to 20.
SUMS = (
    4544801,
    586064,
    320051,
    235129,
    193089,
    168044,
    150996,
    139558,
    129682,
    122084,
    117537,
    113757,
    110174,
    106719,
    103388,
    100202,
    97195,
    94409,
    91893,
    89704,
)


def test_every_count_up_to_300_steps_and_20_slots_is_that_of_the_recurrence() -> None:
    counts = counts_by_recurrence(300, 20, 1, 1)
    for s, expected in enumerate(SUMS, 1):
        found = [Mixed.of(n, s, 1, 1).forward_steps for n in range(1, 301)]
        assert found == counts[s, 1:].tolist(), s
        assert sum(found) == expected


def check_random_counts(pairs: int, each: int) -> None:
    draw = random.Random(0)
    for _ in range(pairs):
        state, residuals = draw.randint(1, 12), draw.randint(1, 30)
        memory = draw.randint(state, 40)
        counts = counts_by_recurrence(60, memory, state, residuals)
        for _ in range(each):
            m, n = draw.randint(state, memory), draw.randint(1, 60)
            assert Mixed.of(n, m, state, residuals).forward_steps == counts[m, n], (
                n,
                m,
                state,
                residuals,
            )


def test_random_sizes_have_the_counts_of_the_recurrence() -> None:
    check_random_counts(10, 40)


@pytest.mark.slow
def test_ten_thousand_random_sizes_have_the_counts_of_the_recurrence() -> None:
    check_random_counts(400, 25)


def test_memory_suffices_at_every_action_of_all_short_loops() -> None:
    for n, memory, state, residuals in itertools.product(
        range(13), range(1, 7), range(1, 4), range(1, 4)
    ):
        if memory >= state or n <= 1 + memory // residuals:
            check_actions(Mixed.of(n, memory, state, residuals), memory, state, residuals)


@given(
    n=st.integers(0, 400),
    memory=st.integers(1, 10**4),
    state=st.integers(0, 200),
    residuals=st.integers(0, 400),
)
@settings(max_examples=60, deadline=None)
def test_memory_suffices_at_every_action_of_a_loop(
    n: int, memory: int, state: int, residuals: int
) -> None:
    if memory >= state:
        check_actions(Mixed.of(n, memory, state, residuals), memory, state, residuals)


@lru_cache
def _order_and_recurrence(n: int, memory: int, state: int, residuals: int) -> tuple[int, int]:
    blocks = blocks_of(n, memory, state, residuals)
    return Mixed(n, blocks, (0, 0)).forward_steps, Mixed(n, blocks).forward_steps


@pytest.mark.parametrize(
    "state, residuals", [(1, 1), (1, 3), (2, 3), (5, 7), (4, 5), (3, 2), (3, 1)]
)
def test_long_loops_are_reversed_within_a_hundredth_of_the_optimum(
    state: int, residuals: int
) -> None:
    for slots in (3, 9):
        by_order, optimum = _order_and_recurrence(800, slots * state + 1, state, residuals)
        assert optimum <= by_order <= 1.01 * optimum
        if residuals % state == 0:
            assert by_order == optimum


LONG = [(1, 1), (1, 4), (1, 20), (3, 5), (7, 5), (3, 1), (20, 1)]


@pytest.mark.parametrize("state, residuals", LONG)
def test_a_long_loop_with_many_levels_has_few_distinct_parts(state: int, residuals: int) -> None:
    for n in (10**5, 10**6):
        schedule = Mixed.of(n, 100 * state, state, residuals)
        # The parts of the split are a table in the compiled program.
        assert len(schedule.tree.steps) < 700
        assert schedule.forward_steps < Binomial(n, 100).forward_steps


@pytest.mark.parametrize("state, residuals", LONG)
def test_the_work_for_a_schedule_is_bounded_for_any_loop(
    state: int, residuals: int, numbers_computed: Callable
) -> None:
    for n in (10**5, 10**6):
        work = numbers_computed(lambda n=n: Mixed.of(n, 100 * state, state, residuals).tree)
        # A few numbers for each level and part; the recurrence itself would take 10¹² sums.
        assert 0 < work < 300_000


def test_a_single_state_has_the_counts_of_the_recurrence(numbers_computed: Callable) -> None:
    lengths = np.arange(121)
    for short, delay in itertools.product((1, 2, 5, 9), (0, 1, 2, 7, 20)):
        blocks = (short, short + delay)
        counts = solved(120, blocks)[1]
        assert np.array_equal(least_steps(lengths, blocks, (0, 0)), counts)
        for n in (1, 30, 77, 120):
            assert Mixed(n, blocks, (0, 0)).forward_steps == counts[n], (n, blocks)
    # No order of actions, which would have as many repetitions as blocks.
    assert numbers_computed(lambda: least_steps(np.array([10**6]), (1, 2), (0, 0))) == 0


def test_a_loop_that_fits_runs_no_step_twice() -> None:
    assert Mixed.of(10, 9, 1, 1).forward_steps == 10
    assert Mixed.of(10**6, 0, 5, 0).forward_steps == 10**6
    assert Mixed.of(0, 3, 1, 1).forward_steps == 0
    assert Mixed.of(10, 9, 1, 1).positions == ()


def test_a_picture_shows_steps_that_are_reversed_together() -> None:
    assert Mixed.of(12, 3, 1, 1).picture().splitlines() == [
        "o>>>>>o>>o><  3 checkpoints",
        "o.....o..<<   2 checkpoints",
        "o.....<<<     1 checkpoint",
        "o>><<<        1 checkpoint",
        "<<<           0 checkpoints",
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mixed(3, ()),
        lambda: Mixed(9, (2, 1)),
        lambda: Mixed(9, (0, 1)),
        lambda: Mixed.of(3, -1, 1, 1),
    ],
)
def test_impossible_schedules_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ScheduleError):
        make()


def test_residuals_save_at_most_one_run_of_each_step() -> None:
    """Any kept residual can be replaced by its step's state, from which the step is run again."""
    for n, slots, residuals in itertools.product((1, 2, 7, 20, 55, 120), (1, 2, 5, 9), (1, 2, 3)):
        fewest = Mixed.of(n, 2 * slots, 2, 2 * residuals).forward_steps
        assert fewest <= Binomial(n, slots).forward_steps <= fewest + n - 1
        if n <= (slots + 1) * (slots + 2) // 2:
            assert Online(n, slots).forward_steps <= fewest + n - 1
