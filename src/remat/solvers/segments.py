"""Candidate orders from the dynamic program for chains, for graphs with a forward and a backward part.

The step that the most live ranges include divides the order of a training step into a forward and a
backward part. The forward part is cut into consecutive segments, at steps across which few bytes are live.
Taken as stages of a `Chain`, with the bytes that cross each cut and the bytes that the backward
part reads of each segment, they are planned by `chain`, which nests recomputation as deeply as the
budget requires. Segmentation is common practice for training (Chen et al., "Training deep nets with
sublinear memory cost", 2016); greedy insertion of single recomputations (`relief`) misses deeply
nested ones.

The chain is a model only: values that skip segments are counted in each cut that they cross, and
nodes of the backward part are assigned to the segment that they or later nodes read last. An order
is therefore measured in full, and `order` chooses the room of the chain whose order has a peak
close to the budget. `keep` then drops the recomputations that the model required and the graph
does not.

Known limits: graphs without one dominant turn (several losses in sequence, inner gradients) yield
orders that are no better than others.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from remat.solvers.chain import ChainTable
from remat.solvers.graph import Chain, Stage, StageOption
from remat.solvers.liveness import Bools, Ints, Liveness, liveness

_ROOM = 0.4  # share of the peak up to which the table reaches; above it other searches are better


@dataclasses.dataclass(frozen=True)
class TableSize:
    """The size of a dynamic program. Its time grows with the cube of the segments, and with the slots.

    Args:
      most_segments: of a long forward part.
      most_nodes: of a forward part whose nodes are segments each.
      slots: of memory; more round sizes up by less.
    """

    most_segments: int = 64
    most_nodes: int = 110
    slots: int = 400


class Segments:
    """The segments of one graph, and the orders that the dynamic program derives from them."""

    def __init__(self, plain: Liveness, size: TableSize | None = None) -> None:
        self.plain = plain
        self._size = size or TableSize()
        self._orders: dict[int, Liveness | None] = {}

    def near(self, budget: int) -> list[Liveness]:
        """Return the order with the largest peak within a budget, and the next one above it.

        Either may be missing. Peaks need not grow with the chain's room, so a bisection over the
        room finds neighbours, not the best pair.
        """
        low, high = 0, self._table.n_slots + 1
        while high - low > 1:
            middle = (low + high) // 2
            found = self._order(middle)
            if found is None or found.peak_bytes <= budget:
                low = middle
            else:
                high = middle
        pair = [self._order(low), self._order(high) if high <= self._table.n_slots else None]
        return [order for order in pair if order is not None]

    @functools.cached_property
    def _ends(self) -> Ints:
        """Return the last step of each segment; the last one is that of the peak."""
        arrays, n_steps = self.plain.arrays, self._turn + 1
        if n_steps <= self._size.most_nodes:
            return np.arange(n_steps)
        crossing = self._crossing_bytes()[:n_steps]
        kept = np.cumsum(np.where(self._read_backward[:n_steps], arrays.bytes[:n_steps], 0))
        # Windows of equal shares of what the backward part reads, and of steps.
        progress = kept / max(int(kept[-1]), 1) + np.arange(n_steps) / n_steps
        most = self._size.most_segments
        window = np.minimum((progress * most / 2).astype(np.int64), most - 1)
        in_turn = np.lexsort((-np.arange(n_steps), crossing, window))
        is_least = np.append(True, np.diff(window[in_turn]) != 0)
        return np.unique(np.append(in_turn[is_least], self._turn))

    @functools.cached_property
    def _turn(self) -> int:
        """Return the last step of the forward part: the one that the most live ranges include."""
        n_steps = len(self.plain.order)
        change = np.ones(n_steps + 1, np.int64)
        np.subtract.at(change, self.plain.last_use + 1, 1)
        n_live = np.cumsum(change[:n_steps])
        return int(np.argmax(n_live))

    @functools.cached_property
    def _read_backward(self) -> Bools:
        """Return which values of the forward part the backward part reads."""
        return self.plain.last_use > self._turn

    @functools.cached_property
    def _last_forward_use(self) -> Ints:
        """Return for each value the last step of the forward part that uses it (its own, if none does)."""
        last = np.arange(len(self.plain.arrays))
        is_forward = self.plain.user <= self._turn
        np.maximum.at(last, self.plain.server[is_forward], self.plain.user[is_forward])
        return last

    def _crossing_bytes(self) -> Ints:
        """Return for each step the bytes that the forward part has computed and still uses after it."""
        arrays = self.plain.arrays
        n_bytes = np.where(arrays.once, 0, arrays.bytes)
        change = n_bytes.copy()
        np.subtract.at(change, self._last_forward_use, n_bytes)
        return np.cumsum(change)

    @functools.cached_property
    def _table(self) -> ChainTable:
        arrays, ends = self.plain.arrays, self._ends
        segment = np.searchsorted(ends, np.arange(self._turn + 1))
        # A value that may not be computed again occupies its bytes in any case.
        n_bytes = np.where(arrays.once, 0, arrays.bytes)[: self._turn + 1]
        time = np.where(arrays.once, 0.0, arrays.time)[: self._turn + 1]
        crossing = self._crossing_bytes()[ends]
        crossing[-1] = 0
        ends_inside = self._last_forward_use[: self._turn + 1] <= ends[segment]
        is_read = self._read_backward[: self._turn + 1] & ends_inside
        read = np.bincount(segment, np.where(is_read, n_bytes, 0), len(ends)).astype(np.int64)
        times = np.bincount(segment, time, len(ends)).tolist()
        inputs = [0, *crossing.tolist()]
        chain = Chain(
            tuple(
                Stage(
                    inputs[k], times[k], (StageOption(inputs[k + 1] + int(read[k]), times[k], 0),)
                )
                for k in range(len(ends))
            )
        )
        return ChainTable(chain, int(_ROOM * self.plain.peak_bytes), self._size.slots)

    def _order(self, n_slots: int) -> Liveness | None:
        """Return the order that the table derives for some slots of memory."""
        if n_slots not in self._orders:
            steps = self._table.steps(n_slots)
            self._orders[n_slots] = None
            if steps is not None:
                nodes = [
                    part[k] for kind, k, _ in steps if (part := self._parts.get(kind)) is not None
                ]
                order = np.concatenate([*nodes, self._rest]) if nodes else self._rest
                self._orders[n_slots] = self._first_in_order(order)
        return self._orders[n_slots]

    @functools.cached_property
    def _parts(self) -> dict[str, list[Ints]]:
        """Return the places that a step of the chain computes, by kind and segment."""
        begin = np.append(0, self._ends[:-1] + 1)
        forward = [np.arange(a, b + 1) for a, b in zip(begin.tolist(), self._ends.tolist())]
        later = self._segment_of_later
        places = np.arange(self._turn + 1, len(self.plain.arrays))
        backward = [places[later == k] for k in range(len(self._ends))]
        return {"forward": forward, "save": forward, "backward": backward}

    @functools.cached_property
    def _segment_of_later(self) -> Ints:
        """Return for each node of the backward part the last segment that it or a later node reads."""
        reads = np.full(len(self.plain.arrays), -1, np.int64)
        is_forward = self.plain.server <= self._turn
        np.maximum.at(
            reads,
            self.plain.user[is_forward],
            np.searchsorted(self._ends, self.plain.server[is_forward]),
        )
        return np.maximum.accumulate(reads[self._turn + 1 :][::-1])[::-1]

    @functools.cached_property
    def _rest(self) -> Ints:
        places = np.arange(self._turn + 1, len(self.plain.arrays))
        return places[self._segment_of_later < 0]

    def _first_in_order(self, order: Ints) -> Liveness:
        """Measure an order, without repeating what must not be computed again."""
        arrays = self.plain.arrays
        is_first = np.zeros(len(order), np.bool_)
        is_first[np.unique(order, return_index=True)[1]] = True
        return liveness(arrays, order[is_first | ~arrays.once[order]]).tidy()
