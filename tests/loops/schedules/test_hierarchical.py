"""The schedule over levels of storage, compared with H-Revolve's costs and an exhaustive search."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from loops.schedules.cheapest import least_cost_from
from remat.errors import ScheduleError
from remat.loops.schedules import Binomial, Hierarchical, Level, Mixed, replay
from remat.loops.schedules.hierarchical import MOST_SUMS


def least_cost(n: int, blocks: tuple[int, ...], levels: tuple[Level, ...]) -> float | None:
    """The least time of any sequence of actions.

    The fastest level holds `blocks[j] - 1` steps' residuals beside the states that leave j slots free.
    """
    slots = (len(blocks) - 1, *(level.slots for level in levels))
    costs = ((0.0, 0.0), *((level.write, level.read) for level in levels))

    def moves(at):
        left, hand, states, kept = at
        yield from ((0.0, (left, hand, states - {held}, kept)) for held in states)
        yield from ((costs[k][1], (left, i, states, kept)) for k, i in states if i != hand)
        filled = [sum(k == level for k, _ in states) for level in range(len(slots))]
        free = slots[0] - filled[0]
        if left - 1 in kept:
            yield 0, (left - 1, -1, states, kept - {left - 1})
        if hand == left - 1:
            yield 1, (left - 1, -1, states, kept)
        elif hand >= 0:
            yield 1, (left, hand + 1, states, kept)
            if len(kept) + 1 <= blocks[free] - 1:
                yield 1, (left, hand + 1, states, kept | {hand})
        for k, many in enumerate(slots):
            fits = filled[k] < many and (k or len(kept) <= blocks[free - 1] - 1)
            if hand >= 0 and fits and (k, hand) not in states:
                yield costs[k][0], (left, hand, states | {(k, hand)}, kept)

    start = (
        n,
        0,
        frozenset(),
        frozenset(),
    )  # steps left, current state, (level, state) pairs, residuals
    return least_cost_from(start, lambda at: not at[0], moves)


def check_actions(schedule: Hierarchical) -> None:
    """Execute the actions; `replay` refuses reads of values that are not there, and counts agree."""
    found = replay(schedule.actions(), schedule.n)
    assert found.forward_steps == schedule.forward_steps
    assert found.peak_slots == schedule.peak_slots
    for states, steps in found.held:
        assert states <= schedule.slots
        assert steps <= schedule.blocks[schedule.slots - states]
    counted = (*found.levels[1:], *[(0, 0, 0)] * len(schedule.levels))
    for k, level in enumerate(schedule.levels):
        peak, writes, reads = counted[k]
        assert peak == schedule.peak_slots_of_levels[k] <= level.slots
        assert (writes, reads) == (schedule.writes[k], schedule.reads[k])


@pytest.mark.parametrize(
    "n, slots, far, write, read, cost",
    [
        # get_hopt_table(n - 1, (slots, far), (0, write), (0, read), 1, 1) of checkpoint-schedules 1.0.4
        (3, 1, 1, 2, 2, 6.0),
        (8, 1, 3, 0.1, 0.1, 18.6),
        (12, 3, 1, 2, 2, 33.0),
        (20, 2, 2, 5, 1, 73.0),
        (31, 3, 5, 0.5, 8, 113.5),
        (50, 2, 20, 2, 2, 190.0),
        (50, 5, 10, 0.1, 0.1, 135.0),
        (80, 1, 3, 5, 1, 429.0),
        (80, 3, 5, 2, 2, 303.0),
        (80, 2, 20, 0.5, 8, 363.5),
    ],
)
def test_two_levels_have_the_cost_of_h_revolve(
    n: int, slots: int, far: int, write: float, read: float, cost: float
) -> None:
    schedule = Hierarchical.of_states(n, slots, [Level(far, write, read)])
    assert schedule.cost == pytest.approx(cost)
    check_actions(schedule)


@pytest.mark.slow
@pytest.mark.parametrize(
    "write, read, sums",
    [
        # The same table of checkpoint-schedules 1.0.4: for 1, 2, 3, 5 and 8 slots of the fastest level, the
        # sum over 2 to 60 steps and 1, 2, 3, 5, 10 and 20 slots of the other one.
        (0, 0, (39587.0, 34304.0, 31921.0, 29487.0, 27723.0)),
        (0.1, 0.1, (40417.1, 34934.1, 32449.0, 29915.3, 28092.0)),
        (2, 2, (52103.0, 42791.0, 38273.0, 33561.0, 29898.0)),
        (5, 1, (53174.0, 43966.0, 39667.0, 34666.0, 30061.0)),
        (0.5, 8, (63366.0, 47853.5, 41231.0, 35217.0, 30204.0)),
    ],
)
def test_two_levels_have_the_cost_of_h_revolve_in_thousands_of_loops(
    write: float, read: float, sums: tuple[float, ...]
) -> None:
    for slots, expected in zip((1, 2, 3, 5, 8), sums, strict=True):
        found = sum(
            Hierarchical.of_states(n, slots, [Level(far, write, read)]).cost
            for n, far in itertools.product(range(2, 61), (1, 2, 3, 5, 10, 20))
        )
        assert found == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize("blocks", [(1, 1), (1, 2), (1, 1, 1), (2, 3, 4)])
@pytest.mark.parametrize("write, read", [(0.5, 0.25), (1, 2), (3, 0)])
def test_no_sequence_of_actions_on_two_levels_takes_less_time(
    blocks: tuple[int, ...], write: float, read: float
) -> None:
    for n, far in itertools.product(range(1, 6), range(3)):
        levels = (Level(far, write, read),)
        assert Hierarchical(n, blocks, levels).cost == least_cost(n, blocks, levels), (n, far)


def test_three_levels_are_the_optimum_where_the_middle_one_is_written_to_for_free() -> None:
    for n, middle, far in itertools.product((3, 4, 5), (1, 2), (1,)):
        levels = (Level(middle, 0, 0.5), Level(far, 1, 1))
        assert Hierarchical(n, (1, 1), levels).cost == least_cost(n, (1, 1), levels)


def test_states_and_residuals_of_short_loops_are_available_and_fit() -> None:
    for n, slots, far in itertools.product(range(13), range(7), range(7)):
        if slots + far == 0 and n > 1:
            continue
        for residuals in (1, 2):
            blocks = tuple(1 + j // residuals for j in range(slots + 1))
            check_actions(Hierarchical(n, blocks, (Level(far, 0.5, 0.5),)))
            if n % 4 == 0:
                levels = (Level(far // 2, 0.25, 0.25), Level(far, 1, 1))
                if slots + far:
                    check_actions(Hierarchical(n, blocks, levels))


@given(
    n=st.integers(1, 300),
    slots=st.integers(1, 8),
    residuals=st.integers(1, 4),
    levels=st.lists(
        st.builds(Level, st.integers(0, 40), st.floats(0, 20), st.floats(0, 20)), max_size=3
    ),
    sums=st.sampled_from([10**4, 10**6]),
)
@settings(max_examples=60, deadline=None)
def test_states_and_residuals_are_available_and_fit(
    n: int, slots: int, residuals: int, levels: list[Level], sums: int
) -> None:
    blocks = tuple(1 + j // residuals for j in range(slots + 1))
    schedule = Hierarchical(n, blocks, tuple(levels), (sums, 1500, 30_000))
    check_actions(schedule)
    assert schedule.forward_steps <= schedule.cost <= Mixed(n, blocks).forward_steps


def test_free_transfers_make_all_levels_one() -> None:
    for n, slots, far in ((40, 3, 4), (100, 2, 6), (200, 5, 5)):
        schedule = Hierarchical.of_states(n, slots, [Level(far)])
        assert schedule.forward_steps == Binomial(n, slots + far).forward_steps


@pytest.mark.parametrize("far", [10, 250])
def test_long_loops_cost_little_more_than_short_ones_would(far: int) -> None:
    blocks, levels = (1, 2, 3, 4, 5, 6), (Level(far, 2, 2),)
    exact = Hierarchical(500, blocks, levels, (10**9, 1500, 30_000))
    assert exact.cost <= Hierarchical(500, blocks, levels, (10**5, 1500, 30_000)).cost
    assert Hierarchical(500, blocks, levels, (10**5, 1500, 30_000)).cost <= 1.05 * exact.cost


def test_a_long_loop_uses_all_slots_of_a_large_level() -> None:
    schedule = Hierarchical.of_states(10**5, 10, [Level(1000, 2, 2)])
    assert schedule.writes == (999,)
    assert schedule.peak_entries < 1100
    assert len(schedule.tree.steps) < 2000


@pytest.mark.parametrize("slots, far", [(1, 99), (20, 80), (100, 1000)])
def test_the_work_for_a_schedule_does_not_grow_with_the_loop(
    slots: int, far: int, numbers_computed: Callable
) -> None:
    def work(n: int) -> int:
        return numbers_computed(lambda: Hierarchical.of_states(n, slots, [Level(far, 2, 2)]).tree)

    # Sums of the dynamic program, which is solved in groups of steps.
    for n in (10**5, 10**6):
        assert 0 < work(n) < 1.5 * MOST_SUMS


@pytest.mark.parametrize(
    "make",
    [
        lambda: Hierarchical(3, (1,), (Level(0),)),
        lambda: Hierarchical.of_states(3, 1, [Level(-1)]),
        lambda: Hierarchical.of_states(3, 1, [Level(1, -1.0)]),
        lambda: Hierarchical(3, (2, 1), (Level(1),)),
    ],
)
def test_levels_that_cannot_reverse_a_loop_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ScheduleError):
        make()
