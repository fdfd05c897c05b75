"""The lengths of nested loops with a given number of steps."""

from __future__ import annotations


def factorizations(n, depth):
    """Yield products of at most `depth` lengths, of which only the last may be 1."""
    yield (n,)
    if depth > 1:
        for first in range(2, n + 1):
            if n % first == 0:
                yield from ((first, *rest) for rest in factorizations(n // first, depth - 1))
