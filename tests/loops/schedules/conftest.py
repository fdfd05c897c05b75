"""Counts of the numbers that a search for a schedule computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from remat.loops.schedules import hierarchical, mixed


@pytest.fixture
def numbers_computed(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Return a function that calls another one and returns how many numbers its schedules compute."""
    counted = [0]

    def count(module: Any, name: str, numbers: Callable) -> None:
        original = getattr(module, name)

        def counting(*args: Any) -> Any:
            result = original(*args)
            counted[0] += numbers(*args)
            return result

        monkeypatch.setattr(module, name, counting)

    def of_order(order: Any, *_: Any) -> int:
        return int(order.total.size) + sum(path.size for path in order.paths)

    def of_table(below: np.ndarray, slots: int, *_: Any) -> int:
        return slots * len(below) ** 2 // 2

    count(mixed.Order, "__init__", of_order)
    count(mixed.Order, "_chains", lambda order, *_: len(order.sizes))
    count(mixed, "solved", lambda n, blocks: len(blocks) * n**2 // 2)
    count(hierarchical, "_table", of_table)

    def numbers(make: Callable) -> int:
        counted[0] = 0
        with monkeypatch.context() as patched:
            for module, name in ((mixed, "tree_of"), (hierarchical, "grow")):
                # Clear caches of earlier schedules, whose numbers would not be counted.
                uncached = getattr(module, name).__wrapped__
                patched.setattr(module, name, functools.lru_cache(uncached))
            make()
        return counted[0]

    return numbers
