"""Loops and branches, laid out on the timeline of the step around them.

A loop is one kernel of the program around it. On the timeline its body appears once for each iteration,
or, in a long loop, once for each block of consecutive iterations. Values that a body does not return live
within an iteration, in the same memory each time. A stacked value is one value for each block: a slice of a
stack that is allocated as a whole. A slice is live from the step that writes it to the step of the other loop
that reads it; before and after, its memory is reserved.

A block holds its slices from its first write on, so that the timeline is never below the true one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from remat.report.model import Segment, Step, Value

_MOST_BLOCKS = 48  # blocks of iterations of one loop; more draw a finer ramp
#: Equations that all loops of a step may have on its timeline, bodies times blocks.
MOST_EQUATIONS = 60_000


@dataclasses.dataclass(frozen=True)
class Origin:
    """The operation inside a loop or branch that computes a value which the loop or branch returns.

    Args:
      primitive, source, name, path, aval, function: of the value that is computed there.
      flops, time_s: of computing all of it once.
      count: the number of such values: one for each iteration that stacks one.
    """

    primitive: str
    source: str
    name: str
    path: str
    aval: str
    flops: float = 0.0
    time_s: float = 0.0
    count: int = 1
    function: str = ""

    def times(self, n: int) -> Origin:
        """Return the origin of a stack of `n` such values."""
        return dataclasses.replace(
            self, flops=self.flops * n, time_s=self.time_s * n, count=self.count * n
        )


@dataclasses.dataclass(frozen=True)
class Read:
    """The last read of a value in a body: the step, and the name of the reader."""

    step: int
    consumer: str


@dataclasses.dataclass(frozen=True, repr=False)
class DrawnBody:
    """One iteration of a loop, or one branch.

    Args:
      name: "iteration" for a loop of known length; otherwise the complete title.
      length: the number of iterations; 1 if it is unknown.
      blocks: the number of iterations in each block, in the order of the stacks.
      reverse: whether the loop runs from the last slice to the first.
      steps, values: of one iteration, with step numbers from 0.
      results: the origin of each result of the loop; None if it is an input of the body.
      born: for each result the step that computes it.
      stacked_from: the number of the first result that is stacked.
      reads: for each input that is a slice of a stack, its last read, by the number of the operand.
      row_bytes: for each carry into which an iteration writes rows, their bytes.
      recompute_flops: of the recomputation in one iteration.
    """

    name: str
    length: int
    blocks: tuple[int, ...]
    reverse: bool
    steps: tuple[Step, ...]
    values: tuple[Value, ...]
    results: tuple[Origin | None, ...]
    born: tuple[int, ...]
    stacked_from: int
    reads: Mapping[int, Read]
    row_bytes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    recompute_flops: float = 0.0

    def stacks(self, at: int, n_bytes: int) -> bool:
        """Return whether a result of this size is a stack of what the iterations compute.

        That is a result that the loop stacks, or a carry of which the iterations write all rows.
        """
        return at >= self.stacked_from or self.length * self.row_bytes.get(at, 0) == n_bytes > 0

    def position(self, block: int) -> int:
        """Return the position in time of a block of the stacks, from 0."""
        return len(self.blocks) - 1 - block if self.reverse else block

    def title(self, block: int) -> str:
        """Return the title of a block's steps: the iterations that they stand for."""
        if self.name != "iteration":
            return self.name
        first = sum(self.blocks[:block]) + 1
        last = first + self.blocks[block] - 1
        if first == last:
            return f"iteration {first:,}/{self.length:,}"
        return f"iterations {first:,}–{last:,}/{self.length:,}"


@dataclasses.dataclass(frozen=True)
class Stack:
    """A value that a loop stacks: the steps of the loops that write and last read it.

    Args:
      written: the step of the loop that writes it.
      born: the step in the body that computes a slice.
      read: the step of the loop that reads it last, slice by slice; -1 if another operation does.
      last: the last read in that loop's body.
      origin: of one slice.
    """

    written: int
    born: int
    origin: Origin
    read: int = -1
    last: Read | None = None


def iteration_blocks(length: int, most: int) -> tuple[int, ...]:
    """Return the lengths of at most `most` blocks of consecutive iterations; they differ by at most one.

    >>> iteration_blocks(3, 10), iteration_blocks(10, 4)
    ((1, 1, 1), (2, 3, 2, 3))
    """
    n = max(1, min(length, most, _MOST_BLOCKS))
    return tuple((i + 1) * length // n - i * length // n for i in range(n))


def laid_out(
    steps: Sequence[Step],
    values: Sequence[Value],
    bodies: Mapping[int, DrawnBody],
    stacks: Mapping[int, Stack],
    segments: Sequence[Segment] = (),
) -> tuple[tuple[Step, ...], tuple[Value, ...], tuple[Segment, ...]]:
    """Return a timeline in which loops and branches are replaced by the operations that they run.

    Args:
      steps, values, segments: with loops as single steps.
      bodies: by the number of the step.
      stacks: by the position of the value.
    """
    if not bodies:
        return tuple(steps), tuple(values), tuple(segments)
    drawn: list[Step] = []
    first: list[int] = []
    for number, step in enumerate(steps):
        first.append(len(drawn))
        body = bodies.get(number)
        drawn += [step] if body is None else _steps_of(step, body)
    last = [n - 1 for n in [*first[1:], len(drawn)]]

    made: list[Value] = []
    for number, value in enumerate(values):
        lives = tuple((first[born], last[dies]) for born, dies in value.lifetimes)
        stack = stacks.get(number)
        if stack is not None and len(lives) == 1:
            made += _slices(value, lives[0], stack, bodies, first)
        else:
            made.append(dataclasses.replace(value, lifetimes=lives))
    for number, body in bodies.items():
        made += [_in_each_iteration(value, body, first[number]) for value in body.values]
    moved = [
        dataclasses.replace(segment, first=first[segment.first], last=last[segment.last])
        for segment in segments
    ]
    return tuple(drawn), tuple(made), tuple(moved)


def _steps_of(step: Step, body: DrawnBody) -> list[Step]:
    once_s = sum(inner.time_s for inner in body.steps)
    # The loop's time is that of the planner's cost model; it is divided among the steps of its body.
    whole_s = body.length * once_s
    scale = step.time_s / whole_s if whole_s else 0.0
    drawn = []
    for position in range(len(body.blocks)):
        block = body.position(position)
        title = body.title(block)
        for inner in body.steps:
            drawn.append(
                dataclasses.replace(
                    inner,
                    time_s=inner.time_s * scale * body.blocks[block],
                    segment=step.segment,
                    iteration=_nested(title, inner.iteration),
                )
            )
    return drawn


def _nested(outer: str, inner: str) -> str:
    """Return where in nested loops a step is: ``iteration 3/4 > 5–7/7``.

    Branches are named outside of loops only: in a loop, each iteration may take another.
    """
    if outer == inner and "/" not in outer:  # such as bodies of shard_map
        return outer
    parts = inner.split(" > ")
    if outer.startswith("iteration"):
        parts = [re.sub("^iterations? ", "", p) for p in parts if not p.startswith("branch ")]
    return " > ".join(filter(None, (outer, *parts)))


def _in_each_iteration(value: Value, body: DrawnBody, first: int) -> Value:
    """Return a value of a body with a lifetime in each block: the memory is the same each time."""
    starts = [first + position * len(body.steps) for position in range(len(body.blocks))]
    return dataclasses.replace(
        value,
        id=-1,
        lifetimes=_shifted(value.lifetimes, starts),
        reserved=_shifted(value.reserved, starts),
    )


def _shifted(
    intervals: tuple[tuple[int, int], ...], starts: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    return tuple((start + born, start + dies) for start in starts for born, dies in intervals)


def _slices(
    value: Value,
    whole: tuple[int, int],
    stack: Stack,
    bodies: Mapping[int, DrawnBody],
    first: Sequence[int],
) -> list[Value]:
    writer, reader = bodies[stack.written], bodies.get(stack.read)
    made = []
    done = 0
    for block, n in enumerate(writer.blocks):
        n_bytes = (
            value.n_bytes * (done + n) // writer.length - value.n_bytes * done // writer.length
        )
        done += n
        at = first[stack.written] + writer.position(block) * len(writer.steps)
        born, dies, consumer = at + stack.born, whole[1], value.consumer
        if reader is not None and stack.last is not None:
            at = first[stack.read] + reader.position(block) * len(reader.steps)
            dies, consumer = at + stack.last.step, stack.last.consumer
        reserved = [(whole[0], born - 1)] if whole[0] < born else []
        reserved += [(dies + 1, whole[1])] if dies < whole[1] else []
        origin = stack.origin.times(n)
        made.append(
            dataclasses.replace(
                value,
                aval=origin.aval,
                n_bytes=n_bytes,
                lifetimes=((born, dies),),
                reserved=tuple(reserved),
                primitive=origin.primitive,
                source=origin.source,
                name=origin.name,
                path=origin.path,
                consumer=consumer,
                flops=origin.flops,
                time_s=origin.time_s,
                count=origin.count,
                function=origin.function,
            )
        )
    return made
