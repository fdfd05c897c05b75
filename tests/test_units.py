"""Reading and printing bytes, FLOPs and seconds."""

from __future__ import annotations

from fractions import Fraction

import jax.numpy as jnp
import numpy as np
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
def test_an_invalid_number_of_bytes_is_an_error(bad):
    with pytest.raises(UnitsError):
        units.parse_bytes(bad)


@pytest.mark.parametrize(
    ("value", "n_bytes"),
    [(np.int64(5), 5), (np.uint8(5), 5), (np.float64(5.9), 5), (np.float32(2**20), 2**20),
     (np.array(5), 5), (jnp.int32(5), 5), (Fraction(11, 2), 5), ("0.5KiB", 512),
     ("9007199254740993", 2**53 + 1), (2**63 - 1, 2**63 - 1), ("1e-999999", 0)],
)  # fmt: skip
def test_numbers_of_numpy_and_long_texts_are_exact(value, n_bytes):
    assert units.parse_bytes(value) == n_bytes


# Invalid sizes, as text and as numbers.
NO_SIZES = ["1e400", "1e999999", "9" * 5000, "1__0", "1_0", "_1", "1_0KiB", "+5", "\u0661", "\u0661KiB",
            "8\u212aiB", "8GG", "8\xa0GiB", "1e", "1e1e1", "nan", "inf", "\x1b[2J8", 10**30, 10**400,
            -(10**400), np.float64("nan"), np.float32("inf"), np.bool_(True), np.array(True),
            np.array([5, 6]), 1 + 0j, object()]  # fmt: skip


@pytest.mark.parametrize("parse", [units.parse_bytes, units.parse_budget])
@pytest.mark.parametrize(
    "bad", [*NO_SIZES, "", True, None, float("nan"), -1], ids=lambda bad: ascii(bad)[:20]
)
def test_an_invalid_size_is_one_short_typed_error_that_names_the_option(parse, bad):
    with pytest.raises(UnitsError) as refused:
        parse(bad, "--budget ")
    assert str(refused.value).startswith("--budget ")
    assert len(str(refused.value)) < 300 and str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("budget", "n_bytes"),
    [("60%", 600), (" 60 % ", 600), ("0.1%", 1), ("1e1%", 100), ("1000%", 10000), ("8KiB", 8192),
     ("0.5KiB", 512), (1, 1), ("1", 1), (np.int64(7), 7), (np.float64(7.9), 7), (2**53, 2**53)],
)  # fmt: skip
def test_a_budget_is_bytes_or_a_share(budget, n_bytes):
    assert units.parse_budget(budget).bytes_of(1000) == n_bytes


def test_a_share_is_exact_however_large_the_peak():
    assert units.parse_budget("70%").bytes_of(10**18 + 10) == 7 * 10**17 + 7


@pytest.mark.parametrize(
    ("bad", "said"),
    [("1_0%", "not a share"), ("nan%", "not a share"), ("-5%", "not a share"), ("+5%", "not a share"),
     ("\u0665%", "not a share"), ("%", "not a share"), ("0%", "above 0%"), ("1001%", "at most 1000%"),
     (0, "at least 1 byte"), ("0", "at least 1 byte"), ("0GiB", "at least 1 byte"),
     ("0.0001KiB", "at least 1 byte"), (2**53 + 1, "8 PiB"), ("9000TiB", "8 PiB"), (-1, "negative")],
)  # fmt: skip
def test_an_invalid_budget_is_an_error(bad, said):
    with pytest.raises(UnitsError, match=said):
        units.parse_budget(bad)


@pytest.mark.parametrize(
    ("budget", "meant"),
    [(0.5, "50%"), ("0.5", "50%"), (np.float32(0.25), "25%"), (1.0, "100%"), ("1.0", "100%"),
     ("1e-5", "0.001%")],
)  # fmt: skip
def test_a_budget_that_looks_like_a_share_is_asked_about(budget, meant):
    with pytest.raises(UnitsError, match=f"did you mean '{meant}'"):
        units.parse_budget(budget)


def test_a_share_is_no_number_of_bytes():
    with pytest.raises(UnitsError, match="limit='50%' is a share; a number of bytes is needed"):
        units.parse_bytes("50%", "limit=")


@given(st.text(max_size=12) | st.floats() | st.integers())
def test_any_value_is_a_size_or_a_typed_error(value):
    for parse in (units.parse_bytes, units.parse_budget):
        try:
            parsed = parse(value)
        except UnitsError:
            continue
        assert parsed if parse is units.parse_budget else parsed >= 0


@given(st.integers(0, 2**60))
def test_printed_bytes_are_read_back_within_their_digits(n_bytes):
    printed = units.format_bytes(n_bytes)
    assert units.parse_bytes(printed) == pytest.approx(n_bytes, rel=0.06, abs=0.5)


def test_other_units_are_printed():
    assert units.format_flops(0) == "0 FLOP"
    assert units.format_flops(3.5e15) == "3.50 PFLOP"
    assert units.format_seconds(0) == "0 s"
    assert units.format_seconds(2e-9) == "2.0 ns"
    assert units.format_bytes(5 * 2**40) == "5.0 TiB"


def test_the_closest_known_name_is_offered_first():
    assert closest("q_proj", ["k_proj", "qproj"]).startswith("did you mean 'qproj'?")
    assert closest("zzz", ["a"]) == "Known: 'a'."


def test_numbers_that_are_compared_have_one_unit():
    assert units.in_one_unit((0.8113, 1.004), units.format_seconds) == ("811.3 ms", "1,004.0 ms")
    assert units.in_one_unit((0, 3 * 2**20), units.format_bytes) == ("0.0 MiB", "3.0 MiB")
    assert units.in_one_unit((0, 0), units.format_bytes) == ("0 B", "0 B")
    assert units.in_one_unit((1, 2**40), units.format_bytes) == (
        "1 B",
        "1.0 TiB",
    )  # would be too long
