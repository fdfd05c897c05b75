"""How much work an equation is: operations and bytes, counted from its types alone.

The one counter of the library: policies select by it, the planner prices by it. Counts are of one
device's share (under `shard_map` the types inside are already), in these conventions:

* a multiplication and an addition are 2; elementwise primitives are 1 per element of the result, the
  transcendental ones `TRANSCENDENTAL`; a copy or another view of data is 0;
* a convolution counts the products of data with data, not with padding or with the holes that a
  dilation makes, as XLA does;
* a scan is its length times its body, a conditional its dearest branch; a while loop's number of trips
  is not in its type, so it is counted as `WHILE_TRIPS` of them;
* linear algebra has the leading terms of LAPACK's operation counts (LAPACK Working Note 41; Golub and
  Van Loan for eigenvalues and singular values);
* a Pallas kernel is what its `cost_estimate` says, else its body times its grid;
* what runs out of JAX's sight (custom calls, callbacks) is 1 per element of its largest operand.

Bytes are those of operands read and results written, each once: what the equation moves if nothing is
fused with it. Looking into an array, or updating it in place, moves only the part that is touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from remat import _jax

# About what an exponential is in multiplications and additions on vector units.
TRANSCENDENTAL = 10
# A while loop is counted as one trip, for want of anything better.
WHILE_TRIPS = 1


def flops_of(eqn: _jax.JaxprEqn, *, transcendental: int = TRANSCENDENTAL) -> int:
    """Operations of one equation, with all that it runs inside.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.ones((4, 8))
    >>> [flops_of(eqn) for eqn in jax.make_jaxpr(lambda x: jnp.exp(x @ x.T))(x).eqns]
    [0, 256, 160]

    Args:
      eqn: an equation of a jaxpr.
      transcendental: what an element of an exponential, logarithm, sine... counts.
    """

    def own(eqn: _jax.JaxprEqn) -> int:
        name = eqn.primitive.name
        if name in _FLOPS:
            return int(_FLOPS[name](eqn))
        if name in _MOVES:
            return 0
        size = max((_size(v.aval) for v in (*eqn.outvars, *eqn.invars)), default=0)
        return size * (transcendental if name in _TRANSCENDENTAL else 1)

    return through_bodies(eqn, own)


def bytes_moved(eqn: _jax.JaxprEqn) -> int:
    """Bytes that one equation reads and writes, with all that it runs inside, nothing fused.

    >>> import jax, jax.numpy as jnp
    >>> [bytes_moved(eqn) for eqn in jax.make_jaxpr(lambda x: x + 1)(jnp.ones(8)).eqns]
    [64]
    """
    return through_bodies(eqn, _bytes_of_one)


def through_bodies(eqn: _jax.JaxprEqn, own: Callable[[_jax.JaxprEqn], Any]) -> Any:
    """Add up a cost over all equations that one equation runs, as often as it runs them.

    Args:
      eqn: an equation of a jaxpr.
      own: the cost of an equation that runs no others.
    """

    def of_jaxpr(jaxpr: Any) -> Any:
        return sum(through_bodies(inner, own) for inner in _jax.open_jaxpr(jaxpr).eqns)

    name, params = eqn.primitive.name, eqn.params
    if name in _ONE_KERNEL:
        return own(eqn)
    if name == "scan":
        return params["length"] * of_jaxpr(params["jaxpr"])
    if name == "while":
        return WHILE_TRIPS * (of_jaxpr(params["cond_jaxpr"]) + of_jaxpr(params["body_jaxpr"]))
    if name == "cond":
        return max(of_jaxpr(branch) for branch in params["branches"])
    if name == "custom_linear_solve":
        return of_jaxpr(params["jaxprs"].solve)
    # The rules of a custom derivative are no part of what the call itself runs.
    call = params.get("call_jaxpr")
    if call is not None:
        return of_jaxpr(call)
    if _jax.has_body(eqn):
        return sum(of_jaxpr(body) for body in _jax.jaxprs_of(eqn))
    return own(eqn)


def _size(aval: Any) -> int:
    return int(getattr(aval, "size", 0) or 0)


def _n_bytes(aval: Any) -> int:
    return _size(aval) * _jax.itemsize_bytes(aval) if hasattr(aval, "dtype") else 0


def _in(eqn: Any, i: int = 0) -> Any:
    return eqn.invars[i].aval


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Products


def _dot_general(eqn: Any) -> int:
    (_, contracted), (_, batch) = eqn.params["dimension_numbers"]
    return _products(_in(eqn, 0), _in(eqn, 1), contracted, batch)


def _products(lhs: Any, rhs: Any, rhs_contracted: Any, rhs_batch: Any) -> int:
    # Each element of the left side meets each index of the right that they do not share.
    shared = {*rhs_contracted, *rhs_batch}
    return 2 * lhs.size * math.prod(n for d, n in enumerate(rhs.shape) if d not in shared)


def _ragged_dot(eqn: Any) -> int:
    # Each row of a group meets the matrix of its group only, so the groups do not count.
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    groups = numbers.rhs_group_dimensions
    return _products(_in(eqn, 0), _in(eqn, 1), contracted, (*batch, *groups))


def _conv(eqn: Any) -> int:
    params, lhs, rhs = eqn.params, _in(eqn, 0), _in(eqn, 1)
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
    """How often, along one dimension, an element of the kernel meets one of the data."""
    dilated = (n - 1) * dilation + 1 if n else 0
    reach = (k - 1) * k_dilation + 1 if k else 0
    starts = np.arange(0, dilated + sum(padding) - reach + 1, stride) - padding[0]
    if n * k > 10**7:  # not worth the time; padding and holes are then a small part
        return max(len(starts), 0) * k // dilation
    positions = starts[:, None] + np.arange(k) * k_dilation
    return int(
        np.sum((positions >= 0) & (positions < dilated) & (positions % max(dilation, 1) == 0))
    )


# Reductions, orders, transforms


def _of_operand(eqn: Any) -> int:
    return _size(_in(eqn))


def _window(eqn: Any) -> int:
    return _size(eqn.outvars[0].aval) * math.prod(eqn.params["window_dimensions"])


def _scatter_window(eqn: Any) -> int:
    return _size(_in(eqn)) * math.prod(eqn.params["window_dimensions"])


def _cumulative(eqn: Any) -> int:
    # A parallel scan combines each element twice: up the tree and down.
    return 2 * _size(_in(eqn))


def _log2(n: int) -> int:
    return max(n - 1, 0).bit_length()


def _sort(eqn: Any) -> int:
    aval = _in(eqn)
    return _size(aval) * _log2(aval.shape[eqn.params["dimension"]] if aval.shape else 1)


def _top_k(eqn: Any) -> int:
    return _size(_in(eqn)) * max(_log2(eqn.params["k"] + 1), 1)


def _fft(eqn: Any) -> int:
    # 5 n log2 n real operations of a complex transform; half of it if one side is real.
    lengths = eqn.params["fft_lengths"]
    n = math.prod(lengths)
    larger = max(_in(eqn), eqn.outvars[0].aval, key=_size)
    batch = math.prod(larger.shape[: len(larger.shape) - len(lengths)])
    real = any(str(aval.dtype).startswith("float") for aval in (_in(eqn), eqn.outvars[0].aval))
    return round(5 * batch * n * math.log2(max(n, 1)) / (2 if real else 1))


def _scatter_updates(eqn: Any) -> int:
    return _size(_in(eqn, 2))


# Linear algebra: leading terms, on batches of matrices of m x n


def _matrix(cost: Callable[[int, int], float]) -> Callable[[Any], int]:
    def flops(eqn: Any) -> int:
        *batch, m, n = _in(eqn).shape
        return round(math.prod(batch) * cost(m, n))

    return flops


def _triangular_solve(eqn: Any) -> int:
    n = _in(eqn).shape[-1]
    return _size(_in(eqn, 1)) * n


def _lu(m: int, n: int) -> float:
    k = min(m, n)
    return 2 * m * n * k - (m + n) * k**2 + 2 * k**3 / 3


def _qr(m: int, n: int) -> float:
    return 2 * _lu(m, n)


def _svd(m: int, n: int) -> float:
    long, short = max(m, n), min(m, n)
    return 4 * long * short**2 + 8 * short**3


# Kernels and calls


def _pallas_call(eqn: Any) -> int:
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
        return int(estimate.flops + TRANSCENDENTAL * estimate.transcendentals)
    body = sum(flops_of(inner) for inner in _jax.open_jaxpr(eqn.params["jaxpr"]).eqns)
    grid = [n for n in eqn.params["grid_mapping"].grid if isinstance(n, int)]
    return math.prod(grid) * body


def _random(per_element: int) -> Callable[[Any], int]:
    def flops(eqn: Any) -> int:
        return per_element * sum(
            _n_bytes(v.aval) // 4 for v in eqn.outvars if hasattr(v.aval, "dtype")
        )

    return flops


# Threefry: 20 rounds of an addition, a rotation of three operations and an exclusive or, for two
# words. What a device draws by itself is not less work than a fifth of it.
_THREEFRY, _DEVICE_BITS = 55, 11

_FLOPS: dict[str, Callable[[Any], int]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _conv,
    "sort": _sort,
    "top_k": _top_k,
    "fft": _fft,
    "reduce_window": _window,
    "reduce_window_sum": _window,
    "reduce_window_max": _window,
    "reduce_window_min": _window,
    "select_and_gather_add": _window,
    "select_and_scatter_add": _scatter_window,
    "scatter": lambda eqn: 0,
    "scatter-add": _scatter_updates,
    "scatter_add": _scatter_updates,
    "scatter-sub": _scatter_updates,
    "scatter-mul": _scatter_updates,
    "scatter_mul": _scatter_updates,
    "scatter-min": _scatter_updates,
    "scatter_min": _scatter_updates,
    "scatter-max": _scatter_updates,
    "scatter_max": _scatter_updates,
    "cumsum": _cumulative,
    "cumprod": _cumulative,
    "cummax": _cumulative,
    "cummin": _cumulative,
    "cumlogsumexp": lambda eqn: TRANSCENDENTAL * _cumulative(eqn),
    "cholesky": _matrix(lambda m, n: n**3 / 3),
    "lu": _matrix(_lu),
    "qr": _matrix(_qr),
    "geqrf": _matrix(_qr),
    "geqp3": _matrix(_qr),
    "householder_product": _matrix(_qr),
    "svd": _matrix(_svd),
    "eigh": _matrix(lambda m, n: 9 * n**3),
    "eig": _matrix(lambda m, n: 25 * n**3),
    "schur": _matrix(lambda m, n: 25 * n**3),
    "hessenberg": _matrix(lambda m, n: 10 * n**3 / 3),
    "tridiagonal": _matrix(lambda m, n: 4 * n**3 / 3),
    "triangular_solve": _triangular_solve,
    "tridiagonal_solve": lambda eqn: 8 * _size(_in(eqn, 3)),
    "pallas_call": _pallas_call,
    "threefry2x32": _random(_THREEFRY),
    "random_bits": _random(_THREEFRY),
    "random_split": _random(_THREEFRY),
    "random_fold_in": _random(_THREEFRY),
    "random_gamma": _random(10 * _THREEFRY),
    "rng_bit_generator": _random(_DEVICE_BITS),
    "rng_uniform": _random(_DEVICE_BITS),
}
_FLOPS |= dict.fromkeys(
    _names(
        "reduce reduce_sum reduce_prod reduce_max reduce_min reduce_and reduce_or reduce_xor argmax "
        "argmin approx_top_k"
    ),
    _of_operand,
)

_TRANSCENDENTAL = _names(
    "exp exp2 expm1 log log1p logistic sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh "
    "atanh erf erfc erf_inv lgamma digamma polygamma igamma igammac igamma_grad_a "
    "regularized_incomplete_beta bessel_i0e bessel_i1e zeta pow cbrt rsqrt sqrt random_gamma_grad"
)
# Other views of the same bytes: nothing is computed, and XLA moves nothing.
_VIEWS = _names(
    "reshape squeeze expand_dims stop_gradient name optimization_barrier sharding_constraint "
    "layout_constraint bitcast_convert_type random_wrap random_unwrap pvary create_token "
    "mesh_cast reshard"
)
# Copies: bytes move, nothing is computed.
_MOVES = _VIEWS | _names(
    "broadcast_in_dim transpose slice dynamic_slice dynamic_update_slice concatenate pad rev gather "
    "iota copy copy_p device_put split get swap"
)
# They run jaxprs that are no program of equations on arrays.
_ONE_KERNEL = frozenset(
    ("pallas_call", "reduce", "reduce_window", "scatter", "scatter-add", "scatter_add")
)

_UPDATES = {"dynamic_update_slice": 1} | {name: 2 for name in _FLOPS if name.startswith("scatter")}


def _bytes_of_one(eqn: _jax.JaxprEqn) -> int:
    name = eqn.primitive.name
    if name in _VIEWS:
        return 0
    written = sum(_n_bytes(v.aval) for v in eqn.outvars)
    if name in ("slice", "dynamic_slice", "gather", "split"):
        # The part that is looked up is read, and written; indices are read.
        return 2 * written + sum(_n_bytes(v.aval) for v in eqn.invars[1:])
    if name in _UPDATES:
        # In place: what is updated is read where it is combined, and written.
        at = _UPDATES[name]
        indices = _n_bytes(_in(eqn, 1)) if at == 2 else 0
        combines = name not in ("scatter", "dynamic_update_slice")
        return (3 if combines else 2) * _n_bytes(_in(eqn, at)) + indices
    if name == "pallas_call" and eqn.params.get("cost_estimate") is not None:
        return int(eqn.params["cost_estimate"].bytes_accessed)
    read = {id(v): _n_bytes(v.aval) for v in eqn.invars if _jax.is_var(v)}
    return written + sum(read.values())
