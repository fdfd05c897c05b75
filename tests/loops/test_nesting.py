"""The lengths of nested loops: the bytes that they hold, and the best ones for a number of layers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

from loops.factorizations import factorizations
from remat.errors import BudgetError
from remat.loops.nesting import LayerBytes, Nest, best_nest, peak_bytes


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 200),
    carry=st.integers(1, 50),
    residuals=st.integers(0, 500),
    params=st.integers(0, 100),
    levels=st.none() | st.integers(1, 4),
)
def test_auto_holds_no_more_than_any_factorization(n, carry, residuals, params, levels):
    costs = LayerBytes(carry, residuals, params)
    nest = best_nest(n, costs, levels=levels)
    assert nest.n_layers == n
    held = (
        peak_bytes(Nest(lengths), costs)
        for lengths in factorizations(n, 8)
        if levels is None or len(lengths) == levels
    )
    best = min(held, default=math.inf)
    assert peak_bytes(nest, costs) <= 1.02 * best


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 200), residuals=st.integers(0, 100), budget=st.integers(1, 5000))
def test_budget_is_kept_with_the_fewest_levels(n, residuals, budget):
    costs = LayerBytes(carry_bytes=10, residual_bytes=residuals)
    least = min(peak_bytes(best_nest(n, costs, levels=d), costs) for d in range(1, 10))
    if budget < least:
        with pytest.raises(BudgetError, match=f"{n} layers"):
            best_nest(n, costs, budget_bytes=budget)
        return
    nest = best_nest(n, costs, budget_bytes=budget)
    assert peak_bytes(nest, costs) <= budget
    for fewer in range(1, len(nest.lengths)):
        assert peak_bytes(best_nest(n, costs, levels=fewer), costs) > budget


def test_two_levels_hold_the_square_root_and_three_the_cube_root():
    for levels in (2, 3):
        held = [
            peak_bytes(best_nest(n, LayerBytes(1000, 1000), levels=levels), LayerBytes(1000, 1000))
            for n in (64, 4096)
        ]
        assert math.log(held[1] / held[0], 64) == pytest.approx(1 / levels, abs=0.08)
