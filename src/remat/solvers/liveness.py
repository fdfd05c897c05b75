"""An order of computation measured in NumPy: its live bytes at each step and the uses of values.

Searches measure thousands of orders; this takes a millisecond for a thousand nodes where executing
the steps (`simulate`) takes twenty. An order is an array of places in the graph, repeats allowed.
Each use of a value is served by the latest computation of it before the use, and a value is freed
right after the last use of that computation, which is optimal for the order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from remat.solvers.graph import Graph
from remat.units import counted, format_bytes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """A graph as arrays: `dep[start[v]:start[v + 1]]` are the places of v's operands.

    `once` marks the values that must not be computed again.
    """

    bytes: Ints
    time: Floats
    start: Ints
    dep: Ints
    once: Bools

    @classmethod
    def of(cls, graph: Graph, once: Collection[int] = ()) -> Arrays:
        operands = graph.operands()
        sizes = np.fromiter((len(us) for us in operands), np.int64, len(operands))
        start = np.zeros(len(operands) + 1, np.int64)
        np.cumsum(sizes, out=start[1:])
        return cls(
            bytes=np.array([node.bytes for node in graph.nodes], np.int64),
            time=np.array([float(node.time) for node in graph.nodes], np.float64),
            start=start,
            dep=np.fromiter((u for us in operands for u in us), np.int64, int(start[-1])),
            once=np.fromiter((node.id in once for node in graph.nodes), np.bool_, len(graph)),
        )

    def __len__(self) -> int:
        return len(self.bytes)

    def __repr__(self) -> str:
        return f"Arrays({counted(len(self), 'node')})"

    @functools.cached_property
    def total_time(self) -> float:
        """Return the time of computing every node once."""
        return float(self.time.sum())

    @functools.cached_property
    def operands(self) -> tuple[tuple[int, ...], ...]:
        """Return for each node the places of its operands."""
        dep, start = self.dep.tolist(), self.start.tolist()
        return tuple(tuple(dep[a:b]) for a, b in itertools.pairwise(start))

    def uses(self, values: Ints) -> tuple[Ints, Ints]:
        """Return for each operand of each value the value's index in `values`, and the operand."""
        sizes = self.start[values + 1] - self.start[values]
        index = np.repeat(np.arange(len(values)), sizes)
        before = np.cumsum(sizes) - sizes
        return index, self.dep[
            np.arange(len(index)) + np.repeat(self.start[values] - before, sizes)
        ]


@dataclasses.dataclass(frozen=True, eq=False)
class Liveness:
    """An order of computation, measured.

    Args:
      arrays: the graph.
      order: the places of the graph that are computed, in turn.
      is_first: which computations are the first of their value.
      used: which computations are used at all.
      last_use: for each computation the step of its last use (its own step, if never).
      live_bytes: the bytes that are live at each computation, the computed value included.
      user, server: for each use, in the order of the steps that use: that step, and the step of the
        computation that serves it.
      by_value: the steps sorted by value, those of one value in turn.
    """

    arrays: Arrays
    order: Ints
    is_first: Bools
    used: Bools
    last_use: Ints
    live_bytes: Ints
    user: Ints
    server: Ints
    by_value: Ints
    _key: Ints

    def __repr__(self) -> str:
        n_steps = counted(len(self.order), "computation")
        return f"Liveness({n_steps}, peak {format_bytes(self.peak_bytes)})"

    @functools.cached_property
    def peak_bytes(self) -> int:
        return int(self.live_bytes.max(initial=0))

    @functools.cached_property
    def extra_time(self) -> float:
        """Return the time spent on recomputation."""
        return float(self.arrays.time[self.order[~self.is_first]].sum())

    def latest(self, values: Ints, steps: Ints) -> Ints:
        """Return for each value the step of its latest computation before the step given for it."""
        size = len(self.order) + 1
        return self.by_value[np.searchsorted(self._key, values * size + steps) - 1]

    def tidy(self) -> Liveness:
        """Measure the order without repeated computations that nothing uses."""
        measured = self
        while not (keep := measured.used | measured.is_first).all():
            measured = liveness(self.arrays, measured.order[keep])
        return measured


def liveness(arrays: Arrays, order: Sequence[int] | Ints) -> Liveness:
    """Measure an order of computation."""
    computed = np.asarray(order, np.int64)
    n_steps = len(computed)
    at = np.arange(n_steps, dtype=np.int64)
    user, operand = arrays.uses(computed)
    # (value, step) pairs in one sorted key: the latest computation of u before step p is the last
    # key below (u, p).
    by_value = np.argsort(computed, kind="stable")
    in_turn = computed[by_value]
    key = in_turn * (n_steps + 1) + by_value
    server = by_value[np.searchsorted(key, operand * (n_steps + 1) + user) - 1]
    is_first = np.zeros(n_steps, np.bool_)
    is_first[by_value[np.append(True, in_turn[1:] != in_turn[:-1])[:n_steps]]] = True
    last_use = at.copy()
    np.maximum.at(last_use, server, user)
    used = np.zeros(n_steps, np.bool_)
    used[server] = True
    # Bytes enter at the computation and leave after the last use.
    n_bytes = arrays.bytes[computed]
    change = np.zeros(n_steps + 1, np.int64)
    change[:-1] = n_bytes
    np.subtract.at(change, last_use + 1, n_bytes)
    live_bytes = np.cumsum(change[:-1])
    return Liveness(
        arrays, computed, is_first, used, last_use, live_bytes, user, server, by_value, key
    )
