"""Whatever is decided about a region, its values and gradients stay what they are."""

from __future__ import annotations

import pytest

from planner.region_cases import CASES, assert_same, random_application, run_in

#: Where 16 bits round, how far results may be apart, as a share of the largest.
ROUNDING = {"bfloat16": 2e-2, "matmul_with_preferred_types": 2e-3}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CASES)
def test_random_decisions_change_no_value(name, seed):
    step, args = CASES[name]()
    expected = run_in(None, step, args)
    assert_same(
        run_in(random_application(step, args, seed), step, args),
        expected,
        within=ROUNDING.get(name, 2e-6),
    )
