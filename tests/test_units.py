"""Reading and printing bytes, FLOPs and seconds."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from remat import units
from remat.errors import UnitsError, closest


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("8GiB", 8 * 2**30), ("8 gib", 8 * 2**30), ("1.5MB", 1_500_000), ("12", 12), ("7 B", 7),
     ("1_000KiB", 1_024_000), (5, 5), (5.9, 5), ("2e3", 2000), (0, 0)],
)  # fmt: skip
def test_bytes_are_read(text, n_bytes):
    assert units.parse_bytes(text) == n_bytes


@pytest.mark.parametrize("bad", ["", "GiB", "8 GiBi", "-1", -1, float("nan"), float("inf"), None,
                                 True, "1 2", "0x10", [8], "8 bananas"])  # fmt: skip
def test_what_is_no_number_of_bytes_is_refused(bad):
    with pytest.raises(UnitsError):
        units.parse_bytes(bad)


@given(st.integers(0, 2**60))
def test_printed_bytes_are_read_back_within_their_digits(n_bytes):
    printed = units.format_bytes(n_bytes)
    assert units.parse_bytes(printed) == pytest.approx(n_bytes, rel=0.06, abs=0.5)


def test_other_units_are_printed():
    assert units.format_flops(0) == "0 FLOP"
    assert units.format_flops(3.5e15) == "3.50 PFLOP"
    assert units.format_seconds(0) == "0.0 s"
    assert units.format_seconds(2e-9) == "2.0 ns"
    assert units.format_bytes(5 * 2**40) == "5.0 TiB"


def test_the_closest_known_name_is_offered_first():
    assert closest("q_proj", ["k_proj", "qproj"]).startswith("did you mean 'qproj'?")
    assert closest("zzz", ["a"]) == "Known: 'a'."
