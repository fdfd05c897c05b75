"""Sizes of arrays with symbolic dimensions, as in functions for `jax.export`.

A size is an int, or an expression such as `12*b + 4`. JAX raises an error when expressions are compared
and the result depends on the values of the symbols. The functions here return an answer instead.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax._src import core as _core

from remat.aliases import Size

_TYPICAL_DIMENSION = 256  # the value assumed for each symbol when sizes are compared
_MOST_BYTES = 2**63  # larger than any array


def is_symbolic(size: Size) -> bool:
    """Return whether a size or dimension is an expression in symbols."""
    return _core.is_symbolic_dim(size)


def decided(compare: Callable[[], object]) -> bool | None:
    """Return whether a comparison of sizes holds, or None where that depends on the symbols."""
    try:
        return bool(compare())
    except jax.errors.InconclusiveDimensionOperation:
        return None


def largest(*sizes: Size) -> Size:
    """Return the largest of several sizes or costs, which may be an expression itself; 0 of none."""
    if not any(map(is_symbolic, sizes)):
        return max(sizes, default=0)
    result, *others = sizes
    for size in others:
        result = _core.max_dim(result, size)
    return result


def typical(size: Size) -> int:
    """Return a size with `_TYPICAL_DIMENSION` in place of each symbol."""
    if not is_symbolic(size):
        return int(size)
    return int(size._evaluate(dict.fromkeys(size._get_vars(), _TYPICAL_DIMENSION)))


def upper_bound(size: Size) -> int | None:
    """Return the least provable upper bound of a size over all values of its symbols, or None.

    The constraints of `jax.export.symbolic_shape` are taken into account.
    """
    if not is_symbolic(size):
        return int(size)
    if not decided(lambda: size <= _MOST_BYTES):
        return None
    low, high = -1, _MOST_BYTES  # size <= high is proven, size <= low is not
    while high - low > 1:
        middle = (low + high) // 2
        if decided(lambda n=middle: size <= n):  # type: ignore[misc]
            high = middle
        else:
            low = middle
    return high
