"""Random keys of the layers that `remat_scan` repeats, equal to those of Flax's nested scans."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, TypeAlias

import jax

from remat.aliases import PyTree

# The path of a counter: the names of the scopes above it, and its own.
Path: TypeAlias = tuple[Hashable, ...]


class Counters:
    """The counters of random keys, with the values that Flax's nested scans give them.

    A scope counts the keys that were drawn from it while its body is traced, and a key depends on
    the count. Flax traces the body of a scan twice, the first time to find loop-invariant values,
    so it traces the body of d nested scans t = 2^d times, and executes the last trace.
    The loops here trace the body a different number of times. So each trace starts from the counts
    with which Flax's last trace starts: δ₁ + (t - 2)·δ, if the first trace draws δ₁ keys and each
    later one δ.

    Args:
      n_traces: how often Flax would trace the body.
    """

    def __init__(self, n_traces: int):
        self.n_traces = n_traces
        self.n_earlier = 0  # how many traces Flax would have made before the current one
        self.is_learning = False
        self.at_start: list[Counter[Path]] | None = None
        self.drawn: list[list[Counter[Path]]] = []

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """Record how many keys the trace inside draws. Call it for the first and the second trace."""
        self.n_earlier, self.is_learning = len(self.drawn), True
        yield
        self.n_earlier, self.is_learning = 0, False

    @contextlib.contextmanager
    def looping(self) -> Iterator[None]:
        """Give each trace inside the counts of Flax's last one."""
        self.n_earlier = self.n_traces - 1
        yield

    @contextlib.contextmanager
    def of(self, scopes: PyTree) -> Iterator[None]:
        """Set the counters of these scopes for the trace of the body inside."""
        dicts = [scope.rng_counters for scope in jax.tree.leaves(scopes)]
        if self.at_start is None:
            self.at_start = [_counts_in(counters) for counters in dicts]
        start = [Counter(at_start) for at_start in self.at_start]
        for k in range(self.n_earlier):
            for counts, drawn in zip(start, self.drawn[min(k, 1)]):
                counts.update(drawn)
        for counters, counts in zip(dicts, start):
            _set_counts(counters, counts)
        yield
        if self.is_learning:
            self.drawn.append([_counts_in(c) - counts for c, counts in zip(dicts, start)])


def _counts_in(counters: Mapping[Hashable, Any], path: Path = ()) -> Counter[Path]:
    """Return the counters of a scope and of the scopes below it, by path."""
    counts: Counter[Path] = Counter()
    for name, value in counters.items():
        if isinstance(value, dict):
            counts.update(_counts_in(value, (*path, name)))
        else:
            counts[(*path, name)] = value
    return counts


def _set_counts(counters: dict[Hashable, Any], counts: Counter[Path], path: Path = ()) -> None:
    for name, value in counters.items():
        if isinstance(value, dict):
            _set_counts(value, counts, (*path, name))
        else:
            counters[name] = counts[(*path, name)]


def split_keys(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return one key per layer on one axis, split loop by loop as in Flax's nested scans."""
    keys = jax.random.split(jax.random.clone(key), shape[0])
    for n in shape[1:]:
        # Not by `vmap`: some generators split differently under it.
        split = jax.lax.map(lambda k, n=n: jax.random.split(k, n), keys)
        keys = split.reshape(-1, *keys.shape[1:])
    return keys
