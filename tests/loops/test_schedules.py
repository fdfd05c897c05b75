"""The schedules' costs against the literature, brute force and a step-by-step interpreter."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from remat.errors import ScheduleError
from remat.loops import schedules
from remat.loops.schedules import (
    Action,
    Binomial,
    Multilevel,
    Online,
    TwoTier,
    beta,
    binomial_advances,
    binomial_rows,
    binomial_split,
    picture,
    repetitions,
    replay,
)


@lru_cache(None)
def fewest_advances(n: int, slots: int) -> int:
    """The recursion that the closed form solves (Griewank & Walther, eq. 2)."""
    if n <= 1:
        return 0
    if slots == 1:
        return n * (n - 1) // 2
    return min(
        m + fewest_advances(m, slots) + fewest_advances(n - m, slots - 1) for m in range(1, n)
    )


def test_schedules_import_no_jax() -> None:
    source = Path(schedules.__file__).read_text()
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import)]
    froms = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imports for alias in node.names]
    names += [node.module or "" for node in froms]
    assert not [name for name in names if name.split(".")[0] in ("jax", "jaxlib", "numpy")]
    assert [name for name in names if name.startswith("remat")] == ["remat.errors"]


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
def test_binomial_actions_cost_what_the_schedule_says(n: int, slots: int) -> None:
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
def test_online_actions_cost_what_the_schedule_says(n: int, slots: int) -> None:
    schedule = Online(n, slots)
    found = replay(schedule.actions(), n)
    assert found.forward_steps == schedule.forward_steps
    assert found.peak_slots <= slots


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
    # FACTS.md: n = 10,000 with 66 slots: 2.77 sweeps against 3; with 30 slots 3.40 against 6.
    assert Binomial(10_000, 66).recomputed_steps / 10_000 == pytest.approx(2.77, abs=0.01)
    assert Multilevel(10_000, (22, 22, 21)).recomputed_steps == pytest.approx(30_000, rel=0.05)
    assert Multilevel(10_000, (22, 22, 21)).peak_slots <= 66
    assert Binomial(10_000, 30).recomputed_steps / 10_000 == pytest.approx(3.40, abs=0.01)


def test_pictures_show_every_sweep_or_say_how_many_are_missing() -> None:
    assert len(Binomial(10, 3).picture().splitlines()) == 10
    long = Binomial(1000, 10).picture(width=60, rows=5).splitlines()
    assert len(long) == 6
    assert long[-1] == "… 995 more sweeps"
    assert max(map(len, long)) <= 72
    assert picture([], 0) == ""
    assert TwoTier(6, 1, 1).picture() == Binomial(6, 2).picture() == Binomial(6, 2).picture(rows=6)
    assert Online(7, 2).picture().splitlines()[0].startswith("o")


def test_schedules_print_their_cost() -> None:
    assert "25 forward steps (2.50 per step)" in str(Binomial(10, 3))
    assert "online: 10 steps, 3 slots: 25 forward steps" in str(Online(10, 3))
    assert "host" in str(TwoTier(100, 3, 2))
    assert str(Binomial(0, 1)).startswith("binomial: 0 steps, 1 slot: 0 forward steps,")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Binomial(-1, 3),
        lambda: Binomial(3, 0),
        lambda: Online(3, 0),
        lambda: TwoTier(3, 0, 0),
        lambda: TwoTier(3, -1, 2),
        lambda: Multilevel(10, (3, 3)),
        lambda: Multilevel(10, ()),
        lambda: Multilevel.balanced(10, 0),
        lambda: Binomial(2.5, 3),  # type: ignore[arg-type]
    ],
)
def test_impossible_schedules_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ScheduleError):
        make()


def test_replay_refuses_actions_that_cannot_be_done() -> None:
    with pytest.raises(ScheduleError, match="cannot be done"):
        replay([Action("reverse", 0, 0)], 2)
    with pytest.raises(ScheduleError, match="not reversed"):
        replay([], 1)
    with pytest.raises(ScheduleError, match="cannot be done"):
        replay([Action("restore", 0, 0, 0)], 1)
