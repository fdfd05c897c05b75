"""What a loop saves at each of its steps, by the price of a byte.

The body of a loop is a region whose values exist once for each step, so what it saves counts that
often, and what it computes in the backward pass only once at a time. What to save is a minimum cut
(`mincut`); each vertex of its hull is an option. A loop can also run in groups of steps, each
recomputed from its start: then the carry is kept at the start of each group only, and what the steps
save exists for one group at a time.

Of all options a price on bytes picks one: the one that is least in time + price x bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

from remat.planner.fusion import Price
from remat.planner.mincut import CutProblem, between, hull
from remat.planner.program import Kind, Program

# An option is worth having that saves this share of bytes against the next.
_LESS = 0.97
# Where neighbours on the hull differ by more than this share, options between them are looked for.
_FAR = 0.9
# Recomputation is not looked at more closely than this share of a step's forward pass.
_NOTHING = 0.002


@dataclasses.dataclass(frozen=True)
class Body:
    """A loop's body as a program: forward, then backward.

    Args:
      program: of one step.
      region: the region it is.
      length: steps.
      carry: values of the program that one step hands to the next. They are saved if needed.
      times: how often the whole loop runs.
    """

    program: Program
    region: tuple[str, str]
    length: int
    carry: tuple[int, ...]
    times: int = 1


@dataclasses.dataclass(frozen=True)
class LoopOption:
    """One way to run a loop.

    Args:
      saved: numbers of the values of the forward program that each step saves.
      group: steps that are recomputed together; 1: none are.
      bytes: that it keeps at most, over all its steps.
      seconds: of recomputation, over all its steps.
    """

    saved: tuple[int, ...]
    group: int
    bytes: int
    seconds: float


def loop_options(body: Body, price: Price) -> list[LoopOption]:
    """Options from the fewest bytes to the most, none of which is better in both than another.

    These are the vertices of the hull of (bytes, time), and options between vertices that lie far
    from each other.
    """
    problem, numbers, forward_s = _cut_problem(body, price)
    carry = sum(body.program.bytes[v] for v in body.carry)
    vertices = hull(problem).cuts
    cuts = list(vertices)
    for few, many in itertools.pairwise(vertices):
        if few.bytes < _FAR * many.bytes and few.time - many.time > _NOTHING * forward_s:
            cuts += between(problem, few, many)
    options = []
    for cut in cuts:
        saved = tuple(sorted(n for place in cut.saved for n in numbers[place]))
        per_step = max(cut.bytes, 1)
        options.append(LoopOption(saved, 1, body.length * cut.bytes, body.length * cut.time))
        for group in _groups(body.length, carry, per_step):
            n_bytes = -(-body.length // group) * carry + group * cut.bytes
            seconds = body.length * (forward_s + cut.time)
            options.append(LoopOption(saved, group, n_bytes, seconds))
    return _thinned(_undominated(options))


def _undominated(options: Iterable[LoopOption]) -> list[LoopOption]:
    kept: list[LoopOption] = []
    for option in sorted(options, key=lambda o: (o.bytes, o.seconds)):
        if not kept or option.seconds < kept[-1].seconds:
            kept.append(option)
    return kept


def _thinned(options: Sequence[LoopOption]) -> list[LoopOption]:
    """The options without those that hardly save anything against the next; the ends stay."""
    kept = [options[-1]]
    for option in reversed(options[1:-1]):
        if option.bytes < _LESS * kept[-1].bytes:
            kept.append(option)
    return [*options[:1], *reversed(kept)] if len(options) > 1 else kept


def at_price(options: Sequence[LoopOption], price: float) -> LoopOption:
    """The option that is least in seconds + price x bytes."""
    return min(options, key=lambda o: (o.seconds + price * o.bytes, o.bytes))


def prices(options: Sequence[LoopOption]) -> list[float]:
    """Prices between which the choice changes, one for each vertex of the hull, ascending."""
    slopes = [
        (few.seconds - many.seconds) / max(1, many.bytes - few.bytes)
        for few, many in itertools.pairwise(_lower_hull(options))
    ]
    ascending = sorted(slopes)
    between = [math.sqrt(a * b) if a > 0 else b / 2 for a, b in itertools.pairwise(ascending)]
    if not ascending:
        return [0.0]
    return [0.0, *between, 2 * ascending[-1] + 1e-30]


def _groups(length: int, carry: int, per_step: int) -> list[int]:
    """Sizes of groups that are worth a try: around the one that needs the least memory."""
    if length < 4 or not carry:
        return []
    best = math.sqrt(length * carry / per_step)
    found = {round(best * factor) for factor in (0.5, 1.0, 2.0)}
    # A size that divides the length leaves no rest to copy.
    divisors = [d for d in range(2, length) if length % d == 0]
    nearest = {min(divisors, key=lambda d: abs(math.log(d / max(g, 1)))) for g in found if divisors}
    close = {d for d in nearest if any(0.4 <= d / max(g, 1) <= 2.5 for g in found)}
    return sorted(g for g in (close or found) if 2 <= g < length)


def _lower_hull(options: Sequence[LoopOption]) -> list[LoopOption]:
    ordered = sorted(options, key=lambda o: (o.bytes, o.seconds))
    kept: list[LoopOption] = []
    for option in ordered:
        if kept and option.seconds >= kept[-1].seconds:
            continue
        while len(kept) > 1 and _is_above(kept[-2], kept[-1], option):
            kept.pop()
        kept.append(option)
    return kept


def _is_above(a: LoopOption, b: LoopOption, c: LoopOption) -> bool:
    return (b.seconds - a.seconds) * (c.bytes - a.bytes) >= (c.seconds - a.seconds) * (
        b.bytes - a.bytes
    )


def _cut_problem(body: Body, price: Price) -> tuple[CutProblem, list[list[int]], float]:
    """The values of the forward program that may be saved, and which the backward program needs."""
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
        numbers.append([])  # a carry is kept by the loop itself
    needed: set[int] = set()
    for op in program.ops:
        if op.place is None or op.place.is_backward:
            needed.update(place[v] for v in op.operands if v in place)
            continue
        here = len(n_bytes)
        size = sum(program.bytes[v] for v in op.results)
        moved = op.extra_bytes + size
        if op.kind in (Kind.OPAQUE, Kind.REDUCE):
            moved += sum(program.bytes[v] for v in op.operands)
        # Inside a kernel a cheap operation costs next to nothing, but not nothing: of two ways to
        # have a value the shorter one wins.
        seconds = price(op.flops, moved, op.dtype) * op.slowdown
        if op.kind in (Kind.CHEAP, Kind.VIEW):
            seconds *= 0.05
        n_bytes.append(size)
        times.append(seconds if op.repeatable else math.inf)
        deps.append(tuple(sorted({place[v] for v in op.operands if v in place})))
        numbers.append([op.place.number + k for k in range(len(op.results))])
        for v in op.results:
            place[v] = here
    forward_s = sum(t for t in times if t < math.inf)
    problem = CutProblem(tuple(n_bytes), tuple(times), tuple(deps), tuple(sorted(needed)))
    return problem, numbers, forward_s
