"""Temporaries in the buffers of results, which are allocated when a step starts.

On CPU and GPU a result that takes over no donated argument has a buffer from the start on. Until it is
written, XLA puts temporaries into it. Its buffer assignment goes through all of them, the largest first,
and gives each the first buffer that is large enough and whose other contents are live at other times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


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
    contents: list[tuple[Buffer, list[Temporary]]] = [
        (buffer, []) for buffer in sorted(buffers, key=lambda b: -b.n_bytes)
    ]
    found = set()
    for value in sorted(temporaries, key=lambda t: (-t.n_bytes, t.id)):
        for buffer, others in contents:
            if buffer.n_bytes < value.n_bytes:
                break
            if _is_free(buffer, others, value):
                others.append(value)
                found.add(value.id)
                break
    return frozenset(found)


def _is_free(buffer: Buffer, others: list[Temporary], value: Temporary) -> bool:
    may_overwrite = buffer.in_place and buffer.n_bytes == value.n_bytes
    last = buffer.written if may_overwrite else buffer.written - 1
    return value.dies <= last and all(
        value.dies < other.born or other.dies < value.born for other in others
    )
