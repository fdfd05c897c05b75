"""The search over named values with which `remat.largest` is compared, on a compiler of one line."""

from __future__ import annotations

import doctest
import itertools
from types import SimpleNamespace

import pytest

from benchmarks import largest

EVERY = largest.policies()


class Compiler:
    """Each row takes a byte for the layer and one for each value that is kept."""

    budget = 100

    def __init__(self) -> None:
        self.batches = list(range(4, 64, 4))
        self.asked: set[tuple[largest.Policy, int]] = set()

    def measured(self, policy: largest.Policy, batch: int) -> SimpleNamespace:
        self.asked.add((policy, batch))
        return SimpleNamespace(peak_bytes=batch * (1 + len(policy.kept)))


def test_the_examples_run() -> None:
    results = doctest.testmod(largest)
    assert results.attempted and not results.failed


def test_each_policy_has_the_largest_batch_that_fits() -> None:
    compiler = Compiler()
    found = dict(largest.named_search(compiler))
    for policy in EVERY:
        fitting = [b for b in compiler.batches if b * (1 + len(policy.kept)) <= compiler.budget]
        assert compiler.batches[found[policy]] == fitting[-1]
    # Far fewer than all pairs are compiled.
    assert len(compiler.asked) < 0.3 * len(EVERY) * len(compiler.batches)


def test_policies_give_up_one_value_after_the_other() -> None:
    assert EVERY[0].kept == largest.NAMES and EVERY[-1] == largest.Policy((), ())
    for before, after in itertools.pairwise(EVERY):
        assert len(before.kept) - len(after.kept) + len(before.on_host) - len(after.on_host) in (
            0,
            1,
        )
        assert set(after.kept) <= set(before.kept)


@pytest.mark.parametrize("policy", [EVERY[0], EVERY[3], EVERY[-1]])
def test_a_policy_says_where_each_value_is(policy: largest.Policy) -> None:
    assert sorted(str(policy).replace(":", "").replace(";", "").split()) == sorted(
        [*largest.NAMES, *(w for w in ("kept", "host", "recomputed") if w in str(policy))]
    )
