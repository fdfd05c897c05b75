"""Temporaries in the buffers of results, which are allocated when a step starts.

On CPU and GPU a result that reuses no donated argument has a buffer from the beginning of the step. Until it
is written, XLA puts temporaries into it: its buffer assignment visits all temporaries, largest first, and
assigns to each a buffer that is large enough and whose other contents are live at other times. So a step that
returns gradients needs less memory for temporaries while few gradients have been computed: at the end of its
forward pass, when there are many temporaries.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from remat.solvers.graph import Graph
from remat.solvers.liveness import Arrays, liveness

# Share of the peak; `peak_bytes` ignores smaller values and buffers. A larger share is faster and less exact.
_SMALL = 1e-3
# The most values that `peak_bytes` assigns, largest first; more are more exact and take longer.
_MOST_VALUES = 4_000


@dataclasses.dataclass(frozen=True)
class Buffer:
    """The memory of one result.

    Args:
      n_bytes: its size.
      written: the step that writes the result.
      in_place: whether that step is elementwise, so that it may overwrite an operand of the same size.
    """

    n_bytes: int
    written: int
    in_place: bool = False


@dataclasses.dataclass(frozen=True)
class Temporary:
    """A value that is not a result, with its first and last step."""

    id: int
    n_bytes: int
    born: int
    dies: int


def in_buffers(temporaries: Iterable[Temporary], buffers: Iterable[Buffer]) -> frozenset[int]:
    """Return the ids of the temporaries that are in buffers of results.

    >>> buffer = Buffer(8, written=5)
    >>> sorted(in_buffers([Temporary(0, 8, 1, 2), Temporary(1, 8, 2, 3), Temporary(2, 4, 3, 4)], [buffer]))
    [0, 2]
    """
    contents = [_Contents(buffer) for buffer in sorted(buffers, key=lambda b: b.n_bytes)]
    sizes = [one.buffer.n_bytes for one in contents]
    found = set()
    for value in sorted(temporaries, key=lambda t: (-t.n_bytes, t.id)):
        if any(one.take(value) for one in contents[bisect.bisect_left(sizes, value.n_bytes) :]):
            found.add(value.id)
    return frozenset(found)


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
    small = _SMALL * measured.peak_bytes
    place = {node.id: at for at, node in enumerate(graph.nodes)}
    first = {int(v): at for at, v in enumerate(measured.order) if measured.is_first[at]}
    free = [
        Buffer(size, first[place[id]])
        for id, sizes in buffers.items()
        for size in sizes
        if size > small
    ]
    if not free:
        return measured.peak_bytes
    sizes = measured.arrays.bytes[measured.order]
    large = np.flatnonzero(sizes > small)
    large = large[np.argsort(-sizes[large], kind="stable")][:_MOST_VALUES]
    values = (
        Temporary(at, int(sizes[at]), at, int(measured.last_use[at])) for at in large.tolist()
    )
    change = np.zeros(len(sizes) + 1, np.int64)
    for at in in_buffers(values, free):
        change[at] += sizes[at]
        change[int(measured.last_use[at]) + 1] -= sizes[at]
    return int((measured.live_bytes - np.cumsum(change[:-1])).max(initial=0))


class _Contents:
    """The temporaries in a result's buffer before the result is written."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self._born: list[int] = []
        self._dies: list[int] = []

    def take(self, value: Temporary) -> bool:
        """Add a value if the buffer is free during its life; return whether it was."""
        may_overwrite = self.buffer.in_place and self.buffer.n_bytes == value.n_bytes
        if value.dies > self.buffer.written - (0 if may_overwrite else 1):
            return False
        at = bisect.bisect_left(self._born, value.born)
        if at > 0 and self._dies[at - 1] >= value.born:
            return False
        if at < len(self._born) and self._born[at] <= value.dies:
            return False
        self._born.insert(at, value.born)
        self._dies.insert(at, value.dies)
        return True
