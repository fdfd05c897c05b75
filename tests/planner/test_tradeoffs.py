"""Options of a loop as pairs of bytes and seconds: which are worth offering, and in which order."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from hypothesis import given, strategies as st

from remat.planner import tradeoffs


class Option(NamedTuple):
    bytes: int
    seconds: float


OPTIONS = st.lists(
    st.builds(Option, st.integers(1, 1000), st.integers(0, 1000).map(float)), min_size=1, max_size=8
)


@given(OPTIONS)
def test_an_option_is_dominated_or_kept(options):
    kept = tradeoffs.undominated(options)
    assert [o.bytes for o in kept] == sorted({o.bytes for o in kept})
    for option in options:
        assert any(o.bytes <= option.bytes and o.seconds <= option.seconds for o in kept)


@given(OPTIONS)
def test_every_vertex_of_the_hull_is_the_best_option_at_one_price(options):
    hull = tradeoffs.lower_hull(options)
    assert {tradeoffs.at_price(options, price) for price in tradeoffs.prices(options)} == set(hull)


@given(OPTIONS)
def test_thinning_keeps_the_ends_and_a_distance_between_options(options):
    ordered = tradeoffs.undominated(options)
    kept = tradeoffs.thinned(ordered)
    assert (kept[0], kept[-1]) == (ordered[0], ordered[-1])
    assert all(a.bytes < b.bytes for a, b in itertools.pairwise(kept))


@given(st.dictionaries(st.sampled_from("abc"), OPTIONS, min_size=1))
def test_settings_lead_from_the_fastest_to_the_smallest_options_one_change_at_a_time(options):
    options = {key: tradeoffs.undominated(of) for key, of in options.items()}
    settings = list(tradeoffs.settings_of(options))
    assert settings[0] == {key: tradeoffs.fastest(of) for key, of in options.items()}
    assert settings[-1] == {key: of[0] for key, of in options.items()}
    for before, after in itertools.pairwise(settings):
        (changed,) = [key for key in options if before[key] != after[key]]
        assert after[changed].bytes < before[changed].bytes


def test_group_sizes_lie_around_the_square_root_of_the_length():
    assert tradeoffs.group_sizes(100, 8, 8) == [5, 10, 20]
    assert tradeoffs.group_sizes(3, 8, 8) == tradeoffs.group_sizes(100, 0, 8) == []


def test_uniform_group_sizes_are_divisors_if_there_are_any_near():
    assert tradeoffs.uniform_group_sizes(64) == (2, 4, 8)
    assert tradeoffs.uniform_group_sizes(9) == (3, 3, 3)
    assert tradeoffs.uniform_group_sizes(13) == (2, 4, 4)


def test_partial_counts_leave_out_none_and_all_groups():
    assert tradeoffs.partial_group_counts(12) == [2, 4, 6, 8, 10]
    assert tradeoffs.partial_group_counts(2) == [1]
    assert tradeoffs.partial_group_counts(1) == []
