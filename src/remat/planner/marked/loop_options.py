"""The options of a loop: what each step saves, recomputes or offloads, and in which groups it runs.

A loop's body is a region. What it saves exists once for each step; what it recomputes in the backward
pass exists for one step at a time. The sets worth saving are minimum cuts (`mincut`): each vertex of
the hull of (bytes, time) is an option. A loop can also run in groups of steps, each recomputed from its
start. Then the carry is kept at the start of each group only, and what the steps save exists for one
group at a time.

A step can also keep values in host memory (`host_memory`).

Given a price per byte, a loop takes the option with the least seconds + price x bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from remat.planner.host_memory import MIN_OFFLOAD_BYTES, Copies, Transfer, cuts_with_copies
from remat.planner.tradeoffs import (
    group_sizes,
    partial_group_counts,
    seconds_of,
    thinned,
    undominated,
)
from remat.program.fusion import Price
from remat.program.program import Program
from remat.solvers.mincut import Cut, CutProblem, between, hull

# Ratio of bytes of neighbours on the hull. With a ratio below, options are looked for between them; a
# larger limit finds more.
_GAP_RATIO = 0.9
# Steps. A shorter loop has either all of its steps in groups or none: a loop in two parts copies its
# inputs and results. A larger bound leaves fewer options.
_MIN_SPLIT_LENGTH = 16
# Share of a step's forward time. Neighbours on the hull that differ by less in recomputation have no
# options between them; a larger share leaves fewer options.
_NEGLIGIBLE = 0.002


@dataclasses.dataclass(frozen=True)
class Body:
    """A loop's body as a program: its forward pass, then its backward pass.

    Args:
      program: one step's operations.
      region: the key and fingerprint of the body's region.
      length: the number of steps.
      carry: the values of the program that are the loop's carry. They are saved if they are needed.
      times: how often the whole loop runs.
      movable: the values that can be kept in host memory.
    """

    program: Program
    region: tuple[str, str]
    length: int
    carry: tuple[int, ...]
    times: int = 1
    movable: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class LoopOption:
    """One way to run a loop.

    Args:
      saved: the numbers of the forward program's values that each step saves.
      group: steps that are recomputed together; 1 if the steps are not grouped.
      groups: the number of groups; the steps after them are in no group. 0: as many groups as fit.
      bytes: the most bytes that the loop keeps on the device, all steps together.
      seconds: time of recomputation and of transfers, all steps together.
      offloaded: the saved values that are kept in host memory.
      offloaded_carry: the carry's values, by number in the program, that are kept there.
      host_bytes: bytes in host memory, all steps together.
      transfer_seconds: the part of `seconds` for transfers.
    """

    saved: tuple[int, ...]
    group: int
    bytes: int
    seconds: float
    offloaded: tuple[int, ...] = ()
    offloaded_carry: tuple[int, ...] = ()
    host_bytes: int = 0
    transfer_seconds: float = 0.0
    groups: int = 0


def loop_options(body: Body, price: Price, transfer: Transfer | None = None) -> list[LoopOption]:
    """Return a loop's Pareto-optimal options in bytes and seconds, by ascending bytes.

    These are the vertices of the hull of (bytes, seconds), and options between vertices that are far
    apart. With `transfer`, the time of a copy to the host or back, values may be offloaded.
    """
    problem, numbers, forward_s, backward_s = _cut_problem(body, price)
    carry = sum(body.program.bytes[v] for v in body.carry)
    vertices = hull(problem).cuts
    cuts = list(vertices)
    for few, many in itertools.pairwise(vertices):
        if few.bytes < _GAP_RATIO * many.bytes and few.time - many.time > _NEGLIGIBLE * forward_s:
            cuts += between(problem, few, many)
    options = []
    for cut in cuts:
        saved = tuple(sorted(n for place in cut.saved for n in numbers[place]))
        per_step = max(cut.bytes, 1)
        options.append(LoopOption(saved, 1, body.length * cut.bytes, body.length * cut.time))
        for group in group_sizes(body.length, carry, per_step):
            n_bytes = -(-body.length // group) * carry + group * cut.bytes
            seconds = body.length * (forward_s + cut.time)
            options.append(LoopOption(saved, group, n_bytes, seconds))
            for groups in (
                partial_group_counts(body.length // group)
                if body.length >= _MIN_SPLIT_LENGTH
                else ()
            ):
                rest = body.length - groups * group
                n_bytes = groups * carry + max(rest, group) * cut.bytes
                seconds = groups * group * forward_s + body.length * cut.time
                options.append(LoopOption(saved, group, n_bytes, seconds, groups=groups))
    if transfer is not None:
        copies = Copies(price, transfer, forward_s, backward_s)
        options += _Offloading(body, copies, problem, numbers).options()
    return thinned(undominated(options))


class _Offloading:
    """The options of a loop that keep values in host memory."""

    def __init__(
        self, body: Body, copies: Copies, problem: CutProblem, numbers: Sequence[Sequence[int]]
    ) -> None:
        self.body = body
        self.copies = copies
        self.problem = problem
        self.numbers = numbers

    def _movable(self) -> list[bool]:
        """Return which values of the cut problem can be offloaded: single arrays of sufficient size."""
        body = self.body
        of_ops = (
            op.results
            for op in body.program.ops
            if op.place is not None and not op.place.is_backward
        )
        values = [*((v,) for v in body.carry), *of_ops]
        return [
            len(results) == 1 and results[0] in body.movable and n_bytes >= MIN_OFFLOAD_BYTES
            for results, n_bytes in zip(values, self.problem.bytes)
        ]

    def options(self) -> list[LoopOption]:
        return list(map(self._option, cuts_with_copies(self.problem, self._movable(), self.copies)))

    def _option(self, cut: Cut) -> LoopOption:
        length, sizes = self.body.length, [self.problem.bytes[v] for v in cut.offloaded]
        again_s = sum(self.problem.time[v] for v in cut.recomputed)
        transfer_s = self.copies.seconds(sizes)
        n_carry = len(self.body.carry)
        offloaded = tuple(sorted(n for v in cut.offloaded for n in self.numbers[v]))
        saved = tuple(n for v in cut.saved for n in self.numbers[v])
        return LoopOption(
            saved=tuple(sorted((*saved, *offloaded))),
            group=1,
            bytes=length * cut.bytes,
            seconds=length * (again_s + transfer_s),
            offloaded=offloaded,
            offloaded_carry=tuple(self.body.carry[v] for v in cut.offloaded if v < n_carry),
            host_bytes=length * sum(sizes),
            transfer_seconds=length * transfer_s,
        )


def _cut_problem(body: Body, price: Price) -> tuple[CutProblem, list[list[int]], float, float]:
    """Return the cut problem of a body: what may be saved, and what the backward program needs.

    Also the numbers of the values at each place of the problem, and the seconds of a step's forward
    and backward program without recomputation.
    """
    program = body.program
    place: dict[int, int] = {}
    n_bytes: list[int] = []
    times: list[float] = []
    deps: list[tuple[int, ...]] = []
    numbers: list[list[int]] = []
    for v in body.carry:
        place[v] = len(n_bytes)
        n_bytes.append(program.bytes[v])
        times.append(math.inf)
        deps.append(())
        numbers.append([])  # the loop itself keeps its carry
    needed: set[int] = set()
    backward_s = 0.0
    for op in program.ops:
        seconds = seconds_of(program, op, price)
        if op.place is None or op.place.is_backward:
            needed.update(place[v] for v in op.operands if v in place)
            backward_s += seconds
            continue
        here = len(n_bytes)
        size = sum(program.bytes[v] for v in op.results)
        n_bytes.append(size)
        times.append(seconds if op.repeatable else math.inf)
        deps.append(tuple(sorted({place[v] for v in op.operands if v in place})))
        numbers.append([op.place.number + k for k in range(len(op.results))])
        for v in op.results:
            place[v] = here
    forward_s = sum(t for t in times if t < math.inf)
    problem = CutProblem(tuple(n_bytes), tuple(times), tuple(deps), tuple(sorted(needed)))
    return problem, numbers, forward_s, backward_s
