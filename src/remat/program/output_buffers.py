"""Temporaries that occupy the buffers of results until these are written.

XLA allocates a result's buffer for the whole program. Until the result is written, the buffer may hold other
values, one after the other, if each is no larger than the buffer and dead by then. So a step that returns
gradients needs less memory for temporaries while few gradients have been computed: at the end of its forward
pass, where they are many. The buffer of a result that takes a donated argument's place holds the argument.

XLA assigns the largest values first, each to a buffer that is free for as long as the value lives.
`peak_bytes` does the same for one order of computation.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

import numpy as np

from remat.solvers.graph import Graph
from remat.solvers.liveness import Arrays, liveness

# Share of the peak; smaller values and buffers are left out, which takes less time.
_SMALL = 1e-3
# Values that are assigned, the largest first; more take longer.
_MOST_VALUES = 4_000


def peak_bytes(graph: Graph, order: Sequence[int], buffers: Mapping[int, Sequence[int]]) -> int:
    """Return the peak of the values of an order that are outside of results' buffers.

    >>> from remat.solvers.graph import Graph, Node
    >>> chain = Graph((Node(0, 1, 8), Node(1, 1, 8, (0,)), Node(2, 1, 0, (1,)), Node(3, 1, 0, (2,))))
    >>> peak_bytes(chain, [0, 1, 2, 3], {}), peak_bytes(chain, [0, 1, 2, 3], {2: [8]})
    (16, 8)

    Args:
      graph: nodes count the bytes that they write outside of results' buffers.
      order: the places of the graph that are computed, in turn.
      buffers: for ids of nodes, the bytes of the results' buffers that they write.
    """
    measured = liveness(Arrays.of(graph), order)
    peak = measured.peak_bytes
    small = _SMALL * peak
    place = {node.id: at for at, node in enumerate(graph.nodes)}
    first = {int(v): at for at, v in enumerate(measured.order) if measured.is_first[at]}
    free = sorted(
        (size, first[place[id]]) for id, sizes in buffers.items() for size in sizes if size > small
    )
    if not free:
        return peak
    sizes = measured.arrays.bytes[measured.order]
    large = np.flatnonzero(sizes > small)
    large = large[np.argsort(-sizes[large], kind="stable")][:_MOST_VALUES]
    bins = [_Buffer(written_at) for _, written_at in free]
    change = np.zeros(len(sizes) + 1, np.int64)
    for at in large.tolist():
        size, end = int(sizes[at]), int(measured.last_use[at])
        fitting = bins[bisect.bisect_left(free, (size, 0)) :]
        if any(one.take(at, end) for one in fitting):
            change[at] += size
            change[end + 1] -= size
    return int((measured.live_bytes - np.cumsum(change[:-1])).max(initial=0))


class _Buffer:
    """A result's buffer, and when it holds other values."""

    def __init__(self, written_at: int) -> None:
        self.written_at = written_at
        self._begins: list[int] = []
        self._ends: list[int] = []

    def take(self, begin: int, end: int) -> bool:
        """Hold a value from one step to another, if nothing else is there in the meantime."""
        if end >= self.written_at:
            return False
        at = bisect.bisect_left(self._begins, begin)
        if at > 0 and self._ends[at - 1] >= begin:
            return False
        if at < len(self._begins) and self._begins[at] <= end:
            return False
        self._begins.insert(at, begin)
        self._ends.insert(at, end)
        return True
