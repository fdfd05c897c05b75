"""Which values of unrolled code are kept in the host's memory, and when their copies run.

Between two uses of a value that are far apart, the value can be in the host's memory. Its copy there starts
when it is computed and its copy back in time for the next use. The link makes one copy at a time in each
direction, so each copy waits for the one before it:

    there   in the order in which the values are computed, each as early as the link allows
    back    in the opposite order of their uses, each as late as the link allows

In between, the *window*, the value takes no memory on the device. Copies are assumed to hide behind a
share of concurrent computation, `HIDDEN_SHARE`, so windows are computed with copies longer by its inverse.

Values are chosen one after another: among the values whose windows cover the peak, the one whose window
covers the most places above the target, as long as the link has time for it. If no window covers the peak
any more, recomputation reduces it further.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from remat.planner.host_memory import HIDDEN_SHARE, MIN_OFFLOAD_BYTES, Transfer
from remat.program.fusion import Fused
from remat.program.program import Program
from remat.solvers.liveness import Arrays, liveness


@dataclasses.dataclass(frozen=True)
class Gap:
    """The time between two uses of a value; places are those of nodes in the graph.

    Args:
      value: the number of the value.
      bytes: of the value.
      made: the node that computes it.
      last: the last node that reads it before the gap; `made` if none does.
      next: the first node that reads it after the gap.
      operation, result: the operation that computes it, and the number of the result.
      before: the operation of `next`.
      again: operations before `before` that kernels after the gap compute from the value.
    """

    value: int
    bytes: int
    made: int
    last: int
    next: int
    operation: int
    result: int
    before: int
    again: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Window:
    """A gap in which the value is in the host's memory.

    Args:
      gap: the gap.
      free: the node from which on the value takes no memory on the device.
      after: the last node before the copy back begins.
    """

    gap: Gap
    free: int
    after: int


class Windows:
    """Windows whose copies the link to the host has time for.

    Args:
      program: flat, with one operation for each equation.
      fused: its graph.
      transfer: the time of a copy in one direction.
      movable: which values, by number, can be in the host's memory.
      host_bytes: of the stacks of values, which a limit may apply to.
    """

    def __init__(
        self,
        program: Program,
        fused: Fused,
        transfer: Transfer,
        movable: Callable[[int], bool],
        host_bytes: Callable[[Sequence[int]], int],
    ) -> None:
        self.program, self.fused = program, fused
        self.transfer = transfer
        self.host_bytes = host_bytes
        graph = fused.graph
        self.ids = [node.id for node in graph.nodes]
        self.place = {id: at for at, id in enumerate(self.ids)}
        self.end = np.cumsum([float(node.time) for node in graph.nodes])
        self.begin = self.end - np.array([float(node.time) for node in graph.nodes])
        self.live = liveness(Arrays.of(graph), np.arange(len(graph))).live_bytes
        self.gaps = [gap for gap in self._gaps(movable) if self._windows_of([gap])]

    def within(self, n_bytes: int, host_limit: int | None = None) -> tuple[Window, ...]:
        """Return windows with which these bytes suffice, or until no window covers the peak."""
        chosen: list[Gap] = []
        windows: list[Window] = []
        left = {gap.value: gap for gap in self.gaps}
        live = self.live.copy()
        while left and live.max() > n_bytes:
            peak = int(live.argmax())
            excess = np.concatenate(([0], np.cumsum(live > n_bytes)))
            covering = [
                (int(excess[w.after + 1] - excess[w.free]), gap.bytes, -gap.value, gap)
                for gap in left.values()
                if gap.last < peak < gap.next
                for w in self._windows_of([gap])
                if w.free <= peak <= w.after
            ]
            added = False
            for *_, gap in sorted(covering, reverse=True):
                trial = self._windows_of([*chosen, gap])
                values = [w.gap.value for w in trial]
                is_within = host_limit is None or self.host_bytes(values) <= host_limit
                covers = any(w.gap is gap and w.free <= peak <= w.after for w in trial)
                del left[gap.value]
                if covers and is_within and len(trial) == len(chosen) + 1:
                    chosen.append(gap)
                    windows = trial
                    added = True
                    break
            if not added:
                break
            live = self.live.copy()
            for w in windows:
                live[w.free : w.after + 1] -= w.gap.bytes
        return tuple(sorted(windows, key=lambda w: w.gap.operation))

    def _windows_of(self, gaps: Sequence[Gap]) -> list[Window]:
        """Return the windows of gaps that share the link, without those that have none."""
        there: dict[int, float] = {}
        clock = 0.0
        for gap in sorted(gaps, key=lambda g: (g.made, g.value)):
            clock = max(clock, float(self.end[gap.made])) + self._seconds(gap)
            there[gap.value] = clock
        back: dict[int, float] = {}
        clock = float("inf")
        for gap in sorted(gaps, key=lambda g: (-g.next, g.value)):
            clock = min(clock, float(self.begin[gap.next])) - self._seconds(gap)
            back[gap.value] = clock
        found = []
        for gap in gaps:
            free = max(gap.last + 1, int(np.searchsorted(self.begin, there[gap.value])))
            after = int(np.searchsorted(self.end, back[gap.value], side="right")) - 1
            # Nodes for workspace stand before those that need it.
            while after >= free and self.ids[after] >= len(self.program.ops):
                after -= 1
            if after >= free:
                found.append(Window(gap, free, after))
        return found

    def _seconds(self, gap: Gap) -> float:
        return self.transfer(gap.bytes) / HIDDEN_SHARE

    def _gaps(self, movable: Callable[[int], bool]) -> Iterator[Gap]:
        """Yield the longest gap of each value that kernels write and that may be moved."""
        ops, sizes = self.program.ops, self.program.bytes
        producer = {v: i for i, op in enumerate(ops) for v in op.results}
        readers: dict[int, set[int]] = {}  # places of the nodes whose operations read a value
        for id, members in self.fused.ops.items():
            for member in members:
                for v in ops[member].operands:
                    readers.setdefault(v, set()).add(self.place[id])
        outputs = self._outputs()
        for v, id in self.fused.holds.items():
            if sizes[v] < MIN_OFFLOAD_BYTES or v in outputs or not movable(v):
                continue
            i = producer[v]
            if i not in self.place:
                continue
            made = self.place[i]
            uses = sorted({made, *readers.get(v, ())} - set(range(made)))
            if len(uses) < 2 or id not in self.place:
                continue
            at = max(
                range(len(uses) - 1), key=lambda k: self.begin[uses[k + 1]] - self.end[uses[k]]
            )
            last, next = uses[at], uses[at + 1]
            before = self.ids[next]
            again = self._recomputed_from(v, uses[at + 1 :], before)
            if again is not None and before < len(ops):
                result = ops[i].results.index(v)
                yield Gap(v, sizes[v], made, last, next, i, result, before, again)

    def _recomputed_from(
        self, v: int, places: Sequence[int], before: int
    ) -> tuple[int, ...] | None:
        """Return the earlier operations that kernels recompute from a value; None if they must not."""
        ops = self.program.ops
        members = sorted({x for at in places for x in self.fused.ops[self.ids[at]] if x < before})
        derived, again = {v}, []
        for x in members:
            if not derived.isdisjoint(ops[x].operands):
                if not ops[x].repeatable or v in ops[x].results:
                    return None
                derived.update(ops[x].results)
                again.append(x)
        return tuple(again)

    def _outputs(self) -> set[int]:
        """Return the values that are results, also through operations that are not written."""
        found = set(self.program.outputs)
        for op in reversed(self.program.ops):
            if not found.isdisjoint(op.results) and not any(
                v in self.fused.holds for v in op.results
            ):
                found.update(op.operands)
        return found

    def last_operation(self, place: int, allowed: Sequence[int]) -> int | None:
        """Return the last of these operations (in order) that nodes up to a place compute."""
        while place >= 0 and self.ids[place] >= len(self.program.ops):
            place -= 1  # a node for workspace, or for other results of an operation
        at = bisect.bisect_right(allowed, self.ids[place]) - 1 if place >= 0 else -1
        return allowed[at] if at >= 0 else None
