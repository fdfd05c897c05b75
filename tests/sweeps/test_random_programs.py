"""Random programs with regions, loops, refs, callbacks and shards return what the plain ones return."""

from __future__ import annotations

import pytest

from sweeps.random_programs import Case, check, check_seeds

#: The smallest forms of programs that once differed.
KEPT = {
    "an integer in the carry varies over devices": Case(
        program=(("shard_map", 2, (("while", 1, (("where", 4, 5),), 1, 1, 0),), "ppermute"),),
        derivative="gradient",
        compiled=True,
    ),
    "rows of a scan of length 0 vary over devices": Case(
        program=(
            (
                "shard_map",
                0,
                (("scan", 1, (("name", 0, "c", True),), 0, True, 1, "", ("remat", 1, 43)),),
                "none",
            ),
        ),
        derivative="gradient",
        compiled=True,
    ),
    "a batched scan in a scan": Case(
        program=(
            (
                "scan",
                4,
                (("scan", 3, (("matmul_sin", 0),), 4, False, 1, "pair", ("remat", 1, 15)),),
                1,
                False,
                2,
                "",
                ("lax",),
            ),
        ),
        around="vmap over the weights",
        derivative="gradient",
    ),
    "a batched while loop in a scan": Case(
        program=(
            (
                "scan",
                5,
                (("while", 0, (("region", 2, (("dot", 1, 0),), 5, True, True),), 4, None, 0),),
                0,
                False,
                1,
                "",
                ("remat", 2, 0),
            ),
        ),
        around="vmap over the weights",
        derivative="gradient",
    ),
    "nested loops over layers in a batched while loop": Case(
        program=(
            (
                "while",
                2,
                (("scan", 0, (("count", 0),), 4, False, 2, "integer", ("remat_scan", 52)),),
                0,
                1,
                0,
            ),
        ),
        around="vmap",
        derivative="gradient",
    ),
    "a loop around one that calls the host": Case(
        program=(
            (
                "while",
                3,
                (("scan", 5, (("hosted", 4),), 0, False, 2, "key", ("lax",)),),
                4,
                None,
                0,
            ),
        ),
        derivative="reverse over forward",
    ),
}


@pytest.mark.parametrize("case", KEPT.values(), ids=list(KEPT))
def test_programs_that_differed_once_are_unchanged(case: Case) -> None:
    assert not check(case).different


def assert_unchanged(first: int, n: int) -> None:
    outcomes = check_seeds(range(first, first + n))
    assert not {o.name: o.different for o in outcomes if o.different}
    assert any(o.is_telling and not o.lacking for o in outcomes)


@pytest.mark.parametrize("first", [119, 129])
def test_random_programs_with_loops_are_unchanged(first: int) -> None:
    assert_unchanged(first, 10)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 10_000, 100))
def test_more_random_programs_with_loops_are_unchanged(first: int) -> None:
    assert_unchanged(first, 100)
