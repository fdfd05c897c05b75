"""FLOPs of a function, counted on its jaxpr.

The compiler's own count (`cost_analysis`) includes the body of a loop once, however often it runs, and is
missing on some backends. Here a body counts as often as it runs, and the jaxpr of a rematerialized region
counts wherever the region's equation is, so the difference to the count without rematerialization is the
recomputation. Dead code is removed first, as a compiler does.

Matrix products and convolutions are counted separately, at two operations per multiply-add. Moving data costs
nothing, a reduction one operation per element read, and any other operation one per element written. Fourier
transforms, sorting and factorizations of matrices have the usual counts (Golub & Van Loan, 2013). Random bits
take the operations of Threefry-2x32, JAX's default generator.

Limits: a while loop counts `n` times only if it counts up to a constant `n`; other while loops count once,
and `n_unknown_loops` is their number. A `cond` counts as its most expensive branch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from remat import _jax
from remat.ir import formulas


@dataclass(frozen=True)
class Flops:
    """FLOPs of matrix products and convolutions, and of all operations."""

    matmul: int = 0
    total: int = 0
    n_unknown_loops: int = 0

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.matmul + other.matmul,
            self.total + other.total,
            self.n_unknown_loops + other.n_unknown_loops,
        )

    def times(self, n: int) -> Flops:
        return Flops(self.matmul * n, self.total * n, self.n_unknown_loops)


def count(fun: Callable, *args: Any) -> Flops:
    """Return the FLOPs of one call; the arguments may be `jax.ShapeDtypeStruct`s.

    >>> a = jax.ShapeDtypeStruct((8, 4), "float32")
    >>> count(lambda a: jax.numpy.tanh(a @ a.T), a)
    Flops(matmul=512, total=576, n_unknown_loops=0)
    """
    jaxpr = _jax.open_jaxpr(jax.make_jaxpr(fun)(*args))
    alive, _ = _jax.dce(jaxpr, [True] * len(jaxpr.outvars))
    return of_jaxpr(alive)


def of_jaxpr(jaxpr: Any) -> Flops:
    """Return the FLOPs of a jaxpr, its dead code included."""
    return sum((of_equation(eqn) for eqn in _jax.open_jaxpr(jaxpr).eqns), Flops())


# Primitives whose jaxpr combines two scalars and is applied to many elements.
_COMBINERS = ("scatter", "reduce", "sort", "select_and_scatter")
_MOVING_DATA = """
bitcast_convert_type broadcast_in_dim concatenate convert_element_type copy copy_p
dynamic_slice dynamic_update_slice expand_dims gather iota name optimization_barrier pad pvary
random_unwrap random_wrap real reduce_precision reshape rev scatter sharding_constraint slice split
squeeze stop_gradient transpose
"""
_FREE = frozenset(_MOVING_DATA.split())


def of_equation(eqn: Any) -> Flops:
    """Return the FLOPs of one equation, those of its jaxprs included."""
    name = eqn.primitive.name
    if name == "dot_general":
        return _of_dot(eqn)
    if name == "conv_general_dilated":
        return _of_convolution(eqn)
    if name == "scan":
        return of_jaxpr(eqn.params["jaxpr"]).times(eqn.params["length"])
    if name == "while":
        return _of_while(eqn)
    if name == "cond":
        branches = [of_jaxpr(branch) for branch in eqn.params["branches"]]
        return max(branches, key=lambda flops: flops.total)
    if not name.startswith(_COMBINERS) and any(_jax.jaxprs_of(eqn)):
        return sum((of_jaxpr(body) for body in _jax.jaxprs_of(eqn)), Flops())
    if name in _FREE:
        return Flops()
    if name.startswith(("reduce", "arg", "cum")):
        return Flops(0, eqn.invars[0].aval.size)
    if name.startswith("scatter"):
        return Flops(0, eqn.invars[2].aval.size)  # operand, indices, updates
    if name in ("fft", "sort"):
        return _of_transform(eqn)
    if name == "random_bits":
        return Flops(0, formulas.threefry(eqn))
    if name in _FACTORIZATIONS:
        *batch, m, n = eqn.invars[0].aval.shape
        return Flops(0, int(math.prod(batch) * _FACTORIZATIONS[name] * max(m, n) * min(m, n) ** 2))
    if name == "triangular_solve":
        return Flops(0, eqn.invars[0].aval.shape[-1] * eqn.outvars[0].aval.size)
    return Flops(0, max((v.aval.size for v in eqn.outvars), default=0))


# Operations of a factorization of an m x n matrix, as a multiple of max(m, n) min(m, n)^2.
_FACTORIZATIONS = {
    "cholesky": 1 / 3,
    "lu": 2 / 3,
    "qr": 4 / 3,
    "geqrf": 4 / 3,
    "householder_product": 4 / 3,
    "eigh": 9,
    "svd": 14,
}


def _of_transform(eqn: Any) -> Flops:
    """Return the FLOPs of a Fourier transform, 5 n log2(n), or of sorting, n log2(n)."""
    operand = max((v.aval for v in (*eqn.invars, *eqn.outvars)), key=lambda aval: aval.size)
    if eqn.primitive.name == "sort":
        n, factor = operand.shape[eqn.params["dimension"]], 1
    else:
        n, factor = math.prod(eqn.params["fft_lengths"]), 5
    return Flops(0, int(factor * operand.size * math.log2(max(n, 2))))


def _of_dot(eqn: Any) -> Flops:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    flops = 2 * eqn.outvars[0].aval.size * math.prod(shape[d] for d in contracted)
    return Flops(flops, flops)


def _of_convolution(eqn: Any) -> Flops:
    """Return the FLOPs of a convolution, without products with zeros that dilate the input.

    Products with zeros of the padding are counted, so small images are slightly overestimated.
    """
    kernel, out = eqn.invars[1].aval, eqn.outvars[0].aval
    out_features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
    flops = 2 * out.size * (kernel.size // out_features)
    flops //= math.prod(eqn.params["lhs_dilation"]) if eqn.params["lhs_dilation"] else 1
    return Flops(flops, flops)


def _of_while(eqn: Any) -> Flops:
    trips = _trips(eqn)
    body = of_jaxpr(eqn.params["body_jaxpr"]) + of_jaxpr(eqn.params["cond_jaxpr"])
    return body + Flops(n_unknown_loops=1) if trips is None else body.times(trips)


def _trips(eqn: Any) -> int | None:
    """Return the trip count of a loop that increments a carried value by one up to a constant."""
    cond = _jax.open_jaxpr(eqn.params["cond_jaxpr"])
    body = _jax.open_jaxpr(eqn.params["body_jaxpr"])
    if len(cond.eqns) != 1 or cond.eqns[0].primitive.name != "lt":
        return None
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    given = dict(zip(cond.invars, [*eqn.invars[:n_cond], *eqn.invars[n_cond + n_body :]]))
    counter, limit = cond.eqns[0].invars
    start, end = given.get(counter), limit if _is_literal(limit) else given.get(limit)
    if not (_is_literal(start) and _is_literal(end)):
        return None
    index = cond.invars.index(counter) - n_cond
    if index < 0:
        return None
    before, after = body.invars[n_body + index], body.outvars[index]
    adds = [e for e in body.eqns if e.outvars[0] is after and e.primitive.name == "add"]
    if not adds or not any(v is before for v in adds[0].invars):
        return None
    step = [v for v in adds[0].invars if v is not before]
    if len(step) != 1 or not _is_literal(step[0]) or int(step[0].val) != 1:
        return None
    return max(int(end.val) - int(start.val), 0)


def _is_literal(v: Any) -> bool:
    return isinstance(v, _jax.Literal)
