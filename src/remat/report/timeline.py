"""Live bytes over the step, from the lifetimes of the values.

A value adds its bytes at each step from its birth to its death. One pass over the lifetimes marks
where bytes come and go, and a running sum over the steps gives the rest, so that a hundred thousand
values take milliseconds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from remat.report.model import KINDS, Kind, Memory, Step, Value
from remat.units import format_bytes

# Share of the peak from which on a height counts as the same: a smaller one finds it more often.
_AS_HIGH = 0.995
_PLACE = {kind: i for i, kind in enumerate(KINDS)}


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """Bytes that are live at each step, by kind.

    Args:
      live_bytes: of shape [kinds, steps], kinds in the order of `KINDS`.
      start_s: the predicted time at which each step starts, and the end: of shape [steps + 1].
    """

    live_bytes: NDArray[np.int64]
    start_s: NDArray[np.float64]

    def __repr__(self) -> str:
        return f"Timeline({self.live_bytes.shape[1]} steps: peak {format_bytes(self.peak_bytes)})"

    @property
    def total_bytes(self) -> NDArray[np.int64]:
        """Return the live bytes at each step, all kinds together."""
        return self.live_bytes.sum(axis=0)

    def bytes_of(self, kind: Kind) -> NDArray[np.int64]:
        """Return the live bytes of one kind at each step."""
        return self.live_bytes[_PLACE[kind]]

    @property
    def peak_step(self) -> int | None:
        """Return the first step with the most live bytes; None without steps.

        If loops reserve memory, that is the one of these steps with the least memory only reserved.
        """
        if not self.live_bytes.shape[1]:
            return None
        highest = np.flatnonzero(self.total_bytes == self.peak_bytes)
        return int(highest[self.bytes_of("reserved")[highest].argmin()])

    @property
    def peak_bytes(self) -> int:
        """Return the live bytes at the peak."""
        return int(self.total_bytes.max(initial=0))

    @property
    def same_height(self) -> tuple[int, int, int]:
        """Return how many times the peak's height is reached, and the first and last step that reach it."""
        reached = np.flatnonzero(self.total_bytes >= _AS_HIGH * self.peak_bytes)
        if not len(reached):
            return 0, 0, 0
        return 1 + int((np.diff(reached) > 1).sum()), int(reached[0]), int(reached[-1])


def timeline(values: Sequence[Value], steps: Sequence[Step]) -> Timeline:
    """Count the live bytes of every step.

    >>> steps = [Step("a", "forward", 1.0), Step("b", "forward", 2.0), Step("c", "backward", 1.0)]
    >>> values = [Value(0, "argument", "f32[1]", 4, ((0, 2),)), Value(1, "saved", "f32[2]", 8, ((1, 2),))]
    >>> line = timeline(values, steps)
    >>> line.total_bytes.tolist(), line.peak_step, line.start_s.tolist()
    ([4, 12, 12], 1, [0.0, 1.0, 3.0, 4.0])
    """
    lives = [
        (_PLACE[kind], born, dies + 1, value.n_bytes)
        for value in values
        for kind, born, dies in value.held()
    ]
    change = np.zeros((len(KINDS), len(steps) + 1), np.int64)
    if lives:
        kind, born, after, n_bytes = np.array(lives, np.int64).T
        np.add.at(change, (kind, born), n_bytes)
        np.add.at(change, (kind, after), -n_bytes)
    start_s = np.zeros(len(steps) + 1)
    np.cumsum([step.time_s for step in steps], out=start_s[1:])
    return Timeline(np.cumsum(change, axis=1)[:, :-1], start_s)


def live_at(values: Sequence[Value], step: int) -> tuple[Value, ...]:
    """Return the values that are live at a step, the largest first.

    Of a value whose memory is only reserved at that step, the kind is "reserved"; of one that is recomputed
    later, its first kind.
    """
    live = []
    for value in values:
        kind = next((kind for kind, born, dies in value.held() if born <= step <= dies), None)
        if kind is not None:
            live.append(value if kind == value.kind else dataclasses.replace(value, kind=kind))
    return tuple(sorted(live, key=lambda v: (-v.n_bytes, v.id)))


def predicted_memory(
    values: Sequence[Value], steps: Sequence[Step], *, alias_bytes: int = 0
) -> Memory:
    """Return the predicted memory in the compiler's terms, with the timeline's peak.

    Temporaries are the largest number of live bytes of values that are neither arguments nor outputs.
    `alias_bytes` are the bytes of outputs that reuse an argument's memory.

    >>> steps = [Step("a", "forward"), Step("b", "forward")]
    >>> values = [Value(0, "argument", "f32[1]", 4, ((0, 1),)), Value(1, "saved", "f32[2]", 8, ((1, 1),))]
    >>> predicted_memory(values, steps)
    Memory(peak_bytes=12, argument_bytes=4, output_bytes=0, temp_bytes=8, alias_bytes=0)
    """
    live_bytes = timeline(values, steps)
    outside = [_PLACE["argument"], _PLACE["output"]]
    return Memory(
        peak_bytes=live_bytes.peak_bytes,
        argument_bytes=sum(v.n_bytes for v in values if v.kind == "argument"),
        output_bytes=sum(v.n_bytes for v in values if v.kind == "output"),
        temp_bytes=int(
            np.delete(live_bytes.live_bytes, outside, axis=0).sum(axis=0).max(initial=0)
        ),
        alias_bytes=alias_bytes,
    )


def thinned_samples(total_bytes: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return at most `most` step numbers with the same outline, the peak among them.

    The steps are divided into equal stretches, and the highest and the lowest of each are kept.

    >>> thinned_samples(np.array([1, 5, 2, 9, 3, 3, 0, 4]), 4).tolist()
    [0, 3, 6, 7]
    """
    n_steps = len(total_bytes)
    if n_steps <= most:
        return np.arange(n_steps)
    edges = np.linspace(0, n_steps, most // 2 + 1).astype(np.int64)
    kept = set()
    for first, after in itertools.pairwise(edges):
        stretch = total_bytes[first:after]
        kept |= {int(first + stretch.argmax()), int(first + stretch.argmin())}
    return np.array(sorted(kept), np.int64)
