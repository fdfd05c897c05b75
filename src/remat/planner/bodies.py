"""What a loop saves at each of its steps, by the price of a byte.

The body of a loop is a region whose values exist once for each step, so what it saves counts that
often, and what it computes in the backward pass only once at a time. What to save is a minimum cut
(`mincut`); each vertex of its hull is an option. A loop can also run in groups of steps, each
recomputed from its start: then the carry is kept at the start of each group only, and what the steps
save exists for one group at a time.

Where the device has a host with memory, a step can also keep values there, the carry too (which the
loop itself would keep otherwise). That takes

* 2 x bytes of the device's own memory traffic, and
* what of each direction's transfer is not hidden: compilers copy while they compute. Up to half of
  the time that the forward half of a step computes counts as hiding its copies to the host, and half
  of the backward half's time hides the copies back. Beyond that the link's time counts in full.

So the first values that are offloaded cost little, and further ones much. To find out which are worth
it, cuts are made at several prices of the link's time, and each is then charged what it really takes,
as it is and with no more offloaded than is hidden. (At one price of the link, all values cost the same
per byte. Where the device's bytes are dearer than that, the cut offloads instead of saving, so a few
prices of bytes beyond it are enough.) Small values are left alone: many small copies take longer than
their bytes say.

Of all options a price on bytes picks one: the one that is least in time + price x bytes.

Known limit: how much of a transfer is hidden is an assumption, not a measurement.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from remat.ir.operations import FUSIBLE, Fusion
from remat.program.fusion import Price
from remat.program.program import Op, Program
from remat.solvers.mincut import Cut, CutProblem, Network, between, hull

#: `seconds(bytes)` of a copy between the device's memory and the host's, in one direction.
Transfer = Callable[[float], float]

# The share of a step's computation that copies hide behind.
_HIDING = 0.5
# Values of fewer bytes at each step stay on the device: copying these takes tens of microseconds.
_LEAST_BYTES = 2**18
# The shares of the link's time at which cuts are made.
_SHARES = (0.0, *(2.0**-k for k in range(8, -1, -1)))
# And at how many times that price the device's bytes are.
_DEARER = (1.01, 10.0, 1000.0)

# An option is worth having that saves this share of bytes against the next.
_LESS = 0.97
# Where neighbours on the hull differ by more than this share, options between them are looked for.
_FAR = 0.9
# A loop that runs in two parts copies what it is given and what it makes: not worth it in short ones.
_LONG = 16
# In so many parts of a loop at most groups of steps may be recomputed or not.
_PARTS = 6
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
      movable: values that could be kept in the host's memory.
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
      saved: numbers of the values of the forward program that each step saves.
      group: steps that are recomputed together; 1: none are.
      groups: how many groups there are, before steps that are in none; 0: as many as fit.
      bytes: that it keeps at most on the device, over all its steps.
      seconds: of recomputation and of transfers, over all its steps.
      offloaded: which of the saved values are kept in the host's memory.
      offloaded_carry: which values of the carry, by number in the program, are kept there too.
      host_bytes: of all that, over all its steps.
      transfer_seconds: the part of `seconds` that transfers take.
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
    """Options from the fewest bytes to the most, none of which is better in both than another.

    These are the vertices of the hull of (bytes, time), and options between vertices that lie far
    from each other. With `transfer`, the price of a copy to the host or back, values may be offloaded.
    """
    problem, numbers, forward_s, backward_s = _cut_problem(body, price)
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
            for groups in _fewer(body.length // group) if body.length >= _LONG else ():
                rest = body.length - groups * group
                n_bytes = groups * carry + max(rest, group) * cut.bytes
                seconds = groups * group * forward_s + body.length * cut.time
                options.append(LoopOption(saved, group, n_bytes, seconds, groups=groups))
    if transfer is not None:
        options += _Offloading(
            body, price, transfer, problem, numbers, (forward_s, backward_s)
        ).options()
    return _thinned(_undominated(options))


def _fewer(groups: int) -> list[int]:
    """Numbers of groups, less than all, that are worth a try."""
    return sorted({round(groups * k / _PARTS) for k in range(1, _PARTS)} - {0, groups})


def _undominated(options: Iterable[LoopOption]) -> list[LoopOption]:
    kept: list[LoopOption] = []
    for option in sorted(options, key=lambda o: (o.bytes, o.seconds)):
        if not kept or option.seconds < kept[-1].seconds:
            kept.append(option)
    return kept


class _Offloading:
    """The options of a loop that keep something in the host's memory."""

    def __init__(
        self,
        body: Body,
        price: Price,
        transfer: Transfer,
        problem: CutProblem,
        numbers: Sequence[Sequence[int]],
        halves_s: tuple[float, float],
    ) -> None:
        self.body = body
        self.price = price
        self.transfer = transfer
        self.problem = problem
        self.numbers = numbers
        self.halves_s = halves_s
        self.movable = self._movable()

    def _movable(self) -> list[bool]:
        """Which places of the problem can be offloaded: those of one large value."""
        body = self.body
        of_ops = (
            op.results
            for op in body.program.ops
            if op.place is not None and not op.place.is_backward
        )
        values = [*((v,) for v in body.carry), *of_ops]
        return [
            len(results) == 1 and results[0] in body.movable and n_bytes >= _LEAST_BYTES
            for results, n_bytes in zip(values, self.problem.bytes)
        ]

    def options(self) -> list[LoopOption]:
        found: dict[tuple[tuple[int, ...], ...], LoopOption] = {}
        for share in _SHARES if any(self.movable) else ():
            prices = tuple(
                self._traffic_s(n) + share * 2 * self.transfer(n) if movable else math.inf
                for n, movable in zip(self.problem.bytes, self.movable)
            )
            network = Network.of(dataclasses.replace(self.problem, transfer=prices))
            per_byte = max(p / n for p, n, m in zip(prices, self.problem.bytes, self.movable) if m)
            for factor in _DEARER:
                cut, _ = network.cheapest(factor * per_byte)
                for one in (cut, self._hidden(cut)):
                    at = one.saved, one.offloaded
                    if one.offloaded and at not in found:
                        found[at] = self._option(one)
        return list(found.values())

    def _traffic_s(self, n_bytes: int) -> float:
        return self.price(0, 2 * n_bytes, "float32")

    def _exposed_s(self, sizes: Sequence[int]) -> float:
        """What of the transfers is not hidden behind a step's computation."""
        copies_s = sum(self.transfer(n) for n in sizes)
        return sum(max(0.0, copies_s - _HIDING * half_s) for half_s in self.halves_s)

    def _hidden(self, cut: Cut) -> Cut:
        """The cut with only as much offloaded as is hidden, the largest first; the rest is saved."""
        sizes = self.problem.bytes
        kept: list[int] = []
        for v in sorted(cut.offloaded, key=lambda v: (-sizes[v], v)):
            if not self._exposed_s([sizes[x] for x in (*kept, v)]):
                kept.append(v)
        back = [v for v in cut.offloaded if v not in kept]
        return dataclasses.replace(
            cut,
            saved=tuple(sorted((*cut.saved, *back))),
            offloaded=tuple(sorted(kept)),
            bytes=cut.bytes + sum(sizes[v] for v in back),
        )

    def _option(self, cut: Cut) -> LoopOption:
        length, sizes = self.body.length, [self.problem.bytes[v] for v in cut.offloaded]
        again_s = sum(self.problem.time[v] for v in cut.recomputed)
        transfer_s = sum(self._traffic_s(n) for n in sizes) + self._exposed_s(sizes)
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


def _cut_problem(body: Body, price: Price) -> tuple[CutProblem, list[list[int]], float, float]:
    """The values of the forward program that may be saved, and which the backward program needs.

    Also the seconds that one step takes forward, and backward without recomputation.
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
        numbers.append([])  # a carry is kept by the loop itself
    needed: set[int] = set()
    backward_s = 0.0
    for op in program.ops:
        seconds = _seconds(program, op, price)
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


def _seconds(program: Program, op: Op, price: Price) -> float:
    moved = op.extra_bytes + sum(program.bytes[v] for v in op.results)
    if op.fusion in (Fusion.KERNEL, Fusion.REDUCE):
        moved += sum(program.bytes[v] for v in op.operands)
    seconds = price(op.flops, moved, op.dtype)
    # Inside a kernel an operation starts nothing of its own, and a cheap one costs next to nothing,
    # but not nothing: of two ways to have a value the shorter one wins.
    if op.fusion in FUSIBLE:
        seconds -= min(price(0.0, 1, op.dtype), 0.95 * seconds)
    share = 0.05 if op.fusion in (Fusion.CHEAP, Fusion.VIEW) else 1.0
    return seconds * op.slowdown * share
