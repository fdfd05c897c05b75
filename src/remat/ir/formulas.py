"""FLOP counts of primitives whose work is not proportional to the size of their result.

Each function takes an equation and returns the operations of one execution, counted from types and
parameters alone. Linear algebra has the leading terms of LAPACK's operation counts (LAPACK Working
Note 41; Golub and Van Loan for eigenvalues and singular values).

This module imports no JAX: an equation is anything with `invars`, `outvars` and `params`.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterable

import numpy as np

from remat.aliases import Aval, Eqn, Size

#: Counts the operations of one equation.
Formula = Callable[[Eqn], int]

# FLOPs per element of an exponential, logarithm, sine and so on, on vector units. A larger number makes
# transcendental primitives costlier to recompute.
TRANSCENDENTAL = 10


@functools.lru_cache(4096)  # programs have few types, and many values
def size(aval: Aval) -> Size:
    """Return the number of elements of a type; 0 if it is not an array's.

    It is an expression if the type has symbolic dimensions.
    """
    n = getattr(aval, "size", None)
    return 0 if n is None else int(n) if isinstance(n, numbers.Integral) else n


def _operand(eqn: Eqn, i: int = 0) -> Aval:
    return eqn.invars[i].aval


# Products


def dot_general(eqn: Eqn) -> int:
    """Count 2 FLOPs per product of a matrix product."""
    (_, contracted), (_, batch) = eqn.params["dimension_numbers"]
    return _products(_operand(eqn, 0), _operand(eqn, 1), contracted, batch)


def _products(lhs: Aval, rhs: Aval, rhs_contracted: Iterable[int], rhs_batch: Iterable[int]) -> int:
    # Each element of the left side is multiplied for each index of the right that it does not share.
    shared = {*rhs_contracted, *rhs_batch}
    return 2 * lhs.size * math.prod(n for d, n in enumerate(rhs.shape) if d not in shared)


def ragged_dot(eqn: Eqn) -> int:
    """Count each row of a group against the matrix of its group only."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    groups = numbers.rhs_group_dimensions
    return _products(_operand(eqn, 0), _operand(eqn, 1), contracted, (*batch, *groups))


def attention(eqn: Eqn) -> int:
    """Count the two matrix products of an attention kernel, from query and key of rank 4."""
    query, key = _operand(eqn, 0), _operand(eqn, 1)
    if len(query.shape) != 4 or len(key.shape) != 4:
        return size(query)
    # The layouts BTNH and BNTH differ in which of the two middle dimensions is the length.
    length = max(key.shape[1], key.shape[2])
    return 4 * size(query) * length


def convolution(eqn: Eqn) -> int:
    """Count products of data with data, not with padding or with the holes of a dilation."""
    params, lhs, rhs = eqn.params, _operand(eqn, 0), _operand(eqn, 1)
    numbers = params["dimension_numbers"]
    taps = 1
    for i, (lhs_d, rhs_d) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:])):
        taps *= _taps(
            lhs.shape[lhs_d],
            rhs.shape[rhs_d],
            params["window_strides"][i],
            params["padding"][i],
            params["lhs_dilation"][i],
            params["rhs_dilation"][i],
        )
    batch = lhs.shape[numbers.lhs_spec[0]] // params["batch_group_count"]
    channels = rhs.shape[numbers.rhs_spec[0]] * rhs.shape[numbers.rhs_spec[1]]
    return 2 * batch * channels * taps


def _taps(
    n: int, k: int, stride: int, padding: tuple[int, int], dilation: int, k_dilation: int
) -> int:
    """Count how often, along one dimension, an element of the kernel meets one of the data."""
    dilated = (n - 1) * dilation + 1 if n else 0
    reach = (k - 1) * k_dilation + 1 if k else 0
    starts = np.arange(0, dilated + sum(padding) - reach + 1, stride) - padding[0]
    if n * k > 10**7:  # too slow to count; padding and holes are then a small part
        return max(len(starts), 0) * k // dilation
    positions = starts[:, None] + np.arange(k) * k_dilation
    return int(
        np.sum((positions >= 0) & (positions < dilated) & (positions % max(dilation, 1) == 0))
    )


# Reductions, orders, transforms


def reduction(eqn: Eqn) -> int:
    """Count one FLOP per element of the operand."""
    return size(_operand(eqn))


def window(eqn: Eqn) -> int:
    """Count one FLOP per element of each window."""
    return size(eqn.outvars[0].aval) * math.prod(eqn.params["window_dimensions"])


def scatter_window(eqn: Eqn) -> int:
    """Count one FLOP per element of each window that is scattered."""
    return size(_operand(eqn)) * math.prod(eqn.params["window_dimensions"])


def cumulative(eqn: Eqn) -> int:
    """Count a parallel scan, which combines each element twice: up the tree and down."""
    return 2 * size(_operand(eqn))


def cumulative_transcendental(eqn: Eqn) -> int:
    """Count a parallel scan of log-sum-exp."""
    return TRANSCENDENTAL * cumulative(eqn)


def _log2(n: int) -> int:
    return max(n - 1, 0).bit_length()


def sort(eqn: Eqn) -> int:
    """Count n log2 n comparisons."""
    aval = _operand(eqn)
    return size(aval) * _log2(aval.shape[eqn.params["dimension"]] if aval.shape else 1)


def top_k(eqn: Eqn) -> int:
    """Count n log2 k comparisons."""
    return size(_operand(eqn)) * max(_log2(eqn.params["k"] + 1), 1)


def fft(eqn: Eqn) -> int:
    """Count 5 n log2 n real operations of a complex transform; half if one side is real."""
    lengths = eqn.params["fft_lengths"]
    n = math.prod(lengths)
    larger = max(_operand(eqn), eqn.outvars[0].aval, key=size)
    batch = math.prod(larger.shape[: len(larger.shape) - len(lengths)])
    real = any(str(aval.dtype).startswith("float") for aval in (_operand(eqn), eqn.outvars[0].aval))
    return round(5 * batch * n * math.log2(max(n, 1)) / (2 if real else 1))


def scatter_updates(eqn: Eqn) -> int:
    """Count one FLOP per element that is combined into the operand."""
    return size(_operand(eqn, 2))


# Linear algebra: leading terms, on batches of matrices of m x n


def _matrix(cost: Callable[[int, int], float]) -> Formula:
    def flops(eqn: Eqn) -> int:
        *batch, m, n = _operand(eqn).shape
        return round(math.prod(batch) * cost(m, n))

    return flops


def _lu(m: int, n: int) -> float:
    k = min(m, n)
    return 2 * m * n * k - (m + n) * k**2 + 2 * k**3 / 3


def _svd(m: int, n: int) -> float:
    long, short = max(m, n), min(m, n)
    return 4 * long * short**2 + 8 * short**3


cholesky = _matrix(lambda m, n: n**3 / 3)
cholesky_update = _matrix(lambda m, n: 6 * n**2)
lu = _matrix(_lu)
qr = _matrix(lambda m, n: 2 * _lu(m, n))
svd = _matrix(_svd)
eigh = _matrix(lambda m, n: 9 * n**3)
eig = _matrix(lambda m, n: 25 * n**3)
hessenberg = _matrix(lambda m, n: 10 * n**3 / 3)
tridiagonal = _matrix(lambda m, n: 4 * n**3 / 3)
symmetric_product = _matrix(lambda m, n: m**2 * n)


def triangular_solve(eqn: Eqn) -> int:
    """Count n FLOPs per element of the right-hand side."""
    return size(_operand(eqn, 1)) * _operand(eqn).shape[-1]


def tridiagonal_solve(eqn: Eqn) -> int:
    """Count 8 FLOPs per element of the right-hand side (Thomas's algorithm)."""
    return 8 * size(_operand(eqn, 3))


# Random numbers


def _random(per_word: int) -> Formula:
    def flops(eqn: Eqn) -> int:
        avals = [v.aval for v in eqn.outvars if hasattr(v.aval, "dtype")]
        return sum(per_word * (size(aval) * _itemsize_bytes(aval) // 4) for aval in avals)

    return flops


def _itemsize_bytes(aval: Aval) -> int:
    return int(getattr(aval.dtype, "itemsize", 1))


# Threefry-2x32: 20 rounds of an addition, a rotation (3 operations) and an exclusive or, for 2 words.
_THREEFRY = 55  # FLOPs per 32-bit word
_DEVICE_BITS = 11  # FLOPs per 32-bit word of a device's own generator: a fifth of Threefry's

threefry = _random(_THREEFRY)
gamma = _random(10 * _THREEFRY)
device_bits = _random(_DEVICE_BITS)
