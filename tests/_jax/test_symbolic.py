"""Sizes with symbolic dimensions: comparisons that hold for every value of the symbols."""

from __future__ import annotations

import jax

from remat import _jax

(B,) = jax.export.symbolic_shape("b")
(BOUNDED,) = jax.export.symbolic_shape("c", constraints=["c <= 64", "c >= 2"])


def test_a_size_is_symbolic_if_it_contains_a_symbol() -> None:
    assert _jax.is_symbolic(12 * B + 4)
    assert not _jax.is_symbolic(12)


def test_a_comparison_is_decided_where_it_holds_or_fails_for_all_values() -> None:
    assert _jax.decided(lambda: B >= 1) is True
    assert _jax.decided(lambda: B < 1) is False
    assert _jax.decided(lambda: B <= 64) is None


def test_the_largest_of_sizes_may_be_an_expression() -> None:
    assert _jax.largest() == 0
    assert _jax.largest(3, 5, 4) == 5
    assert _jax.largest(1.5, 0, 2.5) == 2.5
    assert _jax.largest(B, B + 2) == B + 2
    assert _jax.decided(lambda: _jax.largest(BOUNDED, 65) == 65) is True


def test_an_upper_bound_is_the_least_that_the_constraints_prove() -> None:
    assert _jax.upper_bound(7) == 7
    assert _jax.upper_bound(4 * BOUNDED + 1) == 257
    assert _jax.upper_bound(B) is None


def test_a_typical_size_has_the_same_number_for_each_symbol() -> None:
    assert _jax.typical(7) == 7
    assert _jax.typical(2 * B + 1) == 2 * _jax.typical(B) + 1 > 1
