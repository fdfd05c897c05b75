"""JAX's harnesses of its primitives: each form of rematerialization returns what the function returns."""

from __future__ import annotations

import pytest

from sweeps import harness_cases

REPRESENTATIVES = harness_cases.representatives()
BATCHES = [REPRESENTATIVES[i : i + 16] for i in range(0, len(REPRESENTATIVES), 16)]


def assert_nothing_differs(numbers):
    outcomes = harness_cases.check(numbers)
    assert not {o.name: o.different for o in outcomes if o.different}


@pytest.mark.parametrize(
    "numbers", BATCHES, ids=lambda numbers: harness_cases.HARNESSES[numbers[0]].fullname
)
def test_a_case_of_each_group_is_unchanged(numbers):
    assert_nothing_differs(numbers)


@pytest.mark.slow
@pytest.mark.parametrize("group", harness_cases.GROUPS)
def test_every_case_of_a_group_is_unchanged(group):
    for numbers in harness_cases.batches([group]):
        assert_nothing_differs(numbers)
