"""Options of a loop as pairs of bytes and seconds: which are worth offering, and which to take.

The functions here know an option by its `bytes` and `seconds` alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from remat.ir.operations import FUSIBLE, Fusion
from remat.program.fusion import Price, seconds_of_kernels
from remat.program.program import Op, Program

# Ratio of an option's bytes to those of the next larger option. Options with a higher ratio are dropped; a
# larger limit keeps more options.
MAX_BYTES_RATIO = 0.97
# Number of fractions k/n of a loop's groups that are tried for recomputation; a larger n tries more of them.
_N_SPLITS = 6


class HasCost(Protocol):
    """Anything with bytes and seconds."""

    @property
    def bytes(self) -> int: ...

    @property
    def seconds(self) -> float: ...


T = TypeVar("T", bound=HasCost)


def at_price(options: Sequence[T], price: float) -> T:
    """Return the option with the least seconds + price x bytes; `price` is in seconds per byte."""
    return min(options, key=lambda o: (o.seconds + price * o.bytes, o.bytes))


def prices(options: Sequence[HasCost]) -> list[float]:
    """Return one price per byte for each vertex of the hull, ascending, at which it is the best option."""
    slopes = [
        (few.seconds - many.seconds) / max(1, many.bytes - few.bytes)
        for few, many in itertools.pairwise(lower_hull(options))
    ]
    ascending = sorted(slopes)
    between = [math.sqrt(a * b) if a > 0 else b / 2 for a, b in itertools.pairwise(ascending)]
    if not ascending:
        return [0.0]
    return [0.0, *between, 2 * ascending[-1] + 1e-30]


def undominated(options: Iterable[T]) -> list[T]:
    """Return the Pareto-optimal options, by ascending bytes."""
    kept: list[T] = []
    for option in sorted(options, key=lambda o: (o.bytes, o.seconds)):
        if not kept or option.seconds < kept[-1].seconds:
            kept.append(option)
    return kept


def thinned(options: Sequence[T], ratio: float = MAX_BYTES_RATIO) -> list[T]:
    """Return the options without those that take hardly fewer bytes than the next; the ends stay.

    Args:
      options: by ascending bytes.
      ratio: of an option's bytes to those of the next, above which it is left out.
    """
    kept = [options[-1]]
    for option in reversed(options[1:-1]):
        if option.bytes < ratio * kept[-1].bytes:
            kept.append(option)
    return [*options[:1], *reversed(kept)] if len(options) > 1 else kept


def fastest(options: Iterable[T]) -> T:
    """Return the option that takes the least time; among equal ones the smallest."""
    return min(options, key=lambda o: (o.seconds, o.bytes))


def settings_of(options: Mapping[str, Sequence[T]]) -> Iterator[dict[str, T]]:
    """Yield choices of one option for each key, from all the fastest to all the smallest.

    From each choice to the next, one key changes to its next option, in the order of prices per byte.
    """
    chosen = {id: fastest(of) for id, of in options.items()}
    changes = sorted(
        (
            (slope, i, k, id, option)
            for i, (id, of) in enumerate(options.items())
            for k, (slope, option) in enumerate(_changes(of))
        ),
        key=lambda change: change[:3],
    )
    yield dict(chosen)
    for *_, id, option in changes:
        chosen[id] = option
        yield dict(chosen)


def _changes(options: Sequence[T]) -> Iterator[tuple[float, T]]:
    """Yield the options smaller than the fastest one, by falling bytes, each with a price per byte.

    Options between two vertices of the hull have the price of that edge, so that prices never fall.
    """
    hull = lower_hull(options)[::-1]
    for many, few in itertools.pairwise(hull):
        slope = (few.seconds - many.seconds) / max(1, many.bytes - few.bytes)
        between = [
            o
            for o in options
            if few.bytes <= o.bytes < many.bytes and many.seconds <= o.seconds <= few.seconds
        ]
        for option in sorted(between, key=lambda o: (-o.bytes, o.seconds)):
            yield slope, option


def group_sizes(length: int, carry_bytes: int, step_bytes: int) -> list[int]:
    """Return the numbers of steps in a group to try: around the one that needs the least memory.

    Args:
      length: the number of steps.
      carry_bytes: bytes of the carry, which is kept at each group's start.
      step_bytes: bytes that each step of the group being reversed keeps.
    """
    if length < 4 or not carry_bytes:
        return []
    best = math.sqrt(length * carry_bytes / step_bytes)
    found = {round(best * factor) for factor in (0.5, 1.0, 2.0)}
    nearest = {_nearest_divisor(length, g) for g in found}
    close = {d for d in nearest if d and any(_is_near(d, g) for g in found)}
    return sorted(g for g in (close or found) if 2 <= g < length)


def uniform_group_sizes(length: int) -> tuple[int, int, int]:
    """Return the numbers of steps in a group that people use: two, four, and the root of the length.

    Each is replaced by a divisor of the length that is nearly as large, if there is one.

    >>> uniform_group_sizes(48), uniform_group_sizes(7)
    ((2, 4, 8), (2, 4, 3))
    """

    def of(size: int) -> int:
        divisor = _nearest_divisor(length, size)
        return divisor if divisor and _is_near(divisor, size) else size

    return of(2), of(4), of(max(2, round(math.sqrt(length))))


def _nearest_divisor(length: int, size: int) -> int | None:
    """Return the divisor of a length that is nearest to a size; None if the length has none but 1 and itself.

    It leaves no remaining steps, whose arrays would have to be copied.
    """
    divisors = [d for d in range(2, length) if length % d == 0]
    return min(divisors, key=lambda d: abs(math.log(d / max(size, 1))), default=None)


def _is_near(divisor: int, size: int) -> bool:
    return 0.4 <= divisor / max(size, 1) <= 2.5


def partial_group_counts(groups: int, n_splits: int = _N_SPLITS) -> list[int]:
    """Return about `n_splits` numbers of groups to recompute, besides all of them."""
    return sorted({round(groups * k / n_splits) for k in range(1, n_splits)} - {0, groups})


def seconds_of(program: Program, op: Op, price: Price) -> float:
    """Return the seconds of recomputing one operation, beside others in fused kernels."""
    moved = op.extra_bytes + sum(program.bytes[v] for v in op.results)
    if op.fusion in (Fusion.KERNEL, Fusion.REDUCE):
        moved += sum(program.bytes[v] for v in op.operands)
    seconds = seconds_of_kernels(op, op.flops, moved, price)
    # An operation inside a fused kernel has no launch cost, and a cheap one costs almost nothing. Its cost
    # must be positive, so that the shorter of two ways to compute a value is chosen.
    if op.fusion in FUSIBLE:
        seconds -= min(price(0.0, 1, op.dtype), 0.95 * seconds)
    share = 0.05 if op.fusion in (Fusion.CHEAP, Fusion.VIEW) else 1.0
    return seconds * share


def lower_hull(options: Sequence[T]) -> list[T]:
    """Return the options on the lower hull of (bytes, seconds), by ascending bytes."""
    ordered = sorted(options, key=lambda o: (o.bytes, o.seconds))
    kept: list[T] = []
    for option in ordered:
        if kept and option.seconds >= kept[-1].seconds:
            continue
        while len(kept) > 1 and _is_above(kept[-2], kept[-1], option):
            kept.pop()
        kept.append(option)
    return kept


def _is_above(a: HasCost, b: HasCost, c: HasCost) -> bool:
    return (b.seconds - a.seconds) * (c.bytes - a.bytes) >= (c.seconds - a.seconds) * (
        b.bytes - a.bytes
    )
