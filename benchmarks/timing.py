"""Times of programs that take turns, so that the machine's load affects all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

K = TypeVar("K")


def seconds_in_turns(
    programs: Mapping[K, Callable], args: Sequence[Any], rounds: int
) -> dict[K, list[float]]:
    """Return the seconds of each call, by program, after one warm-up call of each.

    >>> [len(s) for s in seconds_in_turns({"a": sum, "b": max}, [(1, 2)], 3).values()]
    [3, 3]
    """
    for program in programs.values():
        jax.block_until_ready(program(*args))
    seconds: dict[K, list[float]] = {key: [] for key in programs}
    for _ in range(rounds):
        for key, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*args))
            seconds[key].append(time.perf_counter() - start)
    return seconds
