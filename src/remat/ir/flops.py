"""FLOPs and bytes of equations, counted from their types.

Policies and the planner use the same counts. Under `shard_map` they are per device, since the types
there are those of one device. The conventions are (`ir.operations` has the numbers of each primitive):

* a multiplication and an addition count 2; elementwise primitives count 1 per element of the result,
  transcendental ones `TRANSCENDENTAL`; copies and views count 0;
* a scan counts its length times its body, a conditional its costliest branch, and a while loop, whose
  trip count is unknown, `WHILE_TRIPS` trips;
* a Pallas kernel counts its `cost_estimate`, or else its body times its grid;
* operations that are opaque to JAX (custom calls, callbacks) count 1 per element of the largest operand.

With symbolic dimensions, counts are expressions.

Bytes are those of operands read and results written, each once: the traffic of the equation if nothing
is fused with it. Reading or updating a part of an array moves only that part.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax

from remat import _jax
from remat.aliases import Aval, Eqn, JaxprLike, Size
from remat.ir import jaxprs
from remat.ir.formulas import TRANSCENDENTAL as TRANSCENDENTAL, size
from remat.ir.operations import Traffic, operation

WHILE_TRIPS = 1  # assumed trips of a while loop; a larger number makes loops costlier

# Primitives whose jaxpr parameters are not programs on arrays.
_ONE_KERNEL = frozenset(
    ("pallas_call", "reduce", "reduce_window", "scatter", "scatter-add", "scatter_add")
)


def flops_of(eqn: _jax.JaxprEqn, *, transcendental: int = TRANSCENDENTAL) -> int:
    """Return the FLOPs of one equation, with all that it runs inside.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.ones((4, 8))
    >>> [flops_of(eqn) for eqn in jax.make_jaxpr(lambda x: jnp.exp(x @ x.T))(x).eqns]
    [0, 256, 160]

    Args:
      eqn: an equation of a jaxpr.
      transcendental: FLOPs per element of an exponential, logarithm, sine, ...
    """

    def own(eqn: _jax.JaxprEqn) -> int:
        if eqn.primitive.name == "pallas_call":
            return _of_pallas_call(eqn)
        row = operation(eqn.primitive.name)
        per_element = 1 if row is None else row.flops
        if not isinstance(per_element, int):
            return _of_formula(per_element, eqn)
        if per_element == TRANSCENDENTAL:
            per_element = transcendental
        sizes = (size(v.aval) for v in (*eqn.outvars, *eqn.invars))
        return per_element * _jax.largest(*sizes)

    is_default = transcendental == TRANSCENDENTAL
    return through_bodies(eqn, own, _flops_of_body if is_default else None)


# Cached, since several equations may run the same body, and the count depends on the immutable jaxpr alone.
@_jax.weakref_lru_cache
def _flops_of_body(jaxpr: _jax.Jaxpr) -> Size:
    return sum(map(flops_of, jaxpr.eqns))


def flops_of_program(jaxpr: _jax.Jaxpr) -> float:
    """Return the FLOPs of one execution of a program, without its dead code."""
    live, _ = _jax.dce(jaxpr, [True] * len(jaxpr.outvars))
    return float(sum(flops_of(eqn) for eqn in live.eqns))


def bytes_moved(eqn: _jax.JaxprEqn) -> int:
    """Return the bytes that one equation reads and writes, with all that it runs, nothing fused.

    >>> import jax, jax.numpy as jnp
    >>> [bytes_moved(eqn) for eqn in jax.make_jaxpr(lambda x: x + 1)(jnp.ones(8)).eqns]
    [64]
    """
    return through_bodies(eqn, _bytes_of_one)


def through_bodies(
    eqn: _jax.JaxprEqn,
    own: Callable[[_jax.JaxprEqn], Size],
    of_body: Callable[[_jax.Jaxpr], Size] | None = None,
) -> Size:
    """Return a cost summed over all equations that one equation runs, as often as it runs them.

    Args:
      eqn: an equation of a jaxpr.
      own: the cost of an equation that runs no others.
      of_body: the cost of a program inside, if it is computed in another way.
    """

    def of_jaxpr(jaxpr: JaxprLike) -> Size:
        if of_body is not None:
            return of_body(_jax.open_jaxpr(jaxpr))
        return sum(through_bodies(inner, own) for inner in _jax.open_jaxpr(jaxpr).eqns)

    name, params = eqn.primitive.name, eqn.params
    if name in _ONE_KERNEL:
        return own(eqn)
    if name == "scan":
        return params["length"] * of_jaxpr(params["jaxpr"])
    if name == "while":
        return WHILE_TRIPS * (of_jaxpr(params["cond_jaxpr"]) + of_jaxpr(params["body_jaxpr"]))
    if name == "cond":
        return _jax.largest(*(of_jaxpr(branch) for branch in params["branches"]))
    if jaxprs.is_linear_solve(eqn):
        return of_jaxpr(params["jaxprs"].solve)
    # A call runs its function, not the rules of its custom derivative.
    call = params.get("call_jaxpr")
    if call is not None:
        return of_jaxpr(call)
    if jaxprs.has_body(eqn):
        return sum(of_jaxpr(body) for body in _jax.jaxprs_of(eqn))
    return own(eqn)


def _of_formula(formula: Callable[[Eqn], Size], eqn: _jax.JaxprEqn) -> Size:
    try:
        return formula(eqn)
    except (AttributeError, NotImplementedError) as error:
        # Some formulas use operations that are undefined for symbolic sizes.
        shapes = [getattr(v.aval, "shape", ()) for v in eqn.invars]
        if not any(_jax.is_symbolic(n) for shape in shapes for n in shape):
            raise
        raise jax.errors.InconclusiveDimensionOperation(
            f"the FLOPs of {eqn.primitive.name} depend on symbolic dimensions"
        ) from error


def _of_pallas_call(eqn: _jax.JaxprEqn) -> int:
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
        return int(estimate.flops + TRANSCENDENTAL * estimate.transcendentals)
    body = sum(flops_of(inner) for inner in _jax.open_jaxpr(eqn.params["jaxpr"]).eqns)
    grid = [n for n in eqn.params["grid_mapping"].grid if isinstance(n, int)]
    return math.prod(grid) * body


def link_bytes(eqn: _jax.JaxprEqn) -> int:
    """Return the bytes that each device sends in one collective; 0 for other equations.

    A ring of n devices sends (n - 1) / n of what is gathered or scattered, and twice as much for a
    reduction to all of them (Thakur, Rabenseifner & Gropp, IJHPCA 19(1), 2005); the share counts as 1.
    """
    name = eqn.primitive.name
    row = operation(name)
    if row is None or not row.is_collective or name.endswith("_done"):
        return 0
    read, written = (sum(n_bytes(v.aval) for v in vs) for vs in (eqn.invars, eqn.outvars))
    is_all_reduce = name.startswith(_ALL_REDUCES) and not name.startswith("psum_scatter")
    return 2 * written if is_all_reduce else max(read, written)


_ALL_REDUCES = ("psum", "pmax", "pmin", "unreduced_p")


def n_bytes(aval: Aval) -> int:
    """Return the bytes of a type; 0 for types other than arrays."""
    return size(aval) * _jax.itemsize_bytes(aval) if hasattr(aval, "dtype") else 0


def _bytes_of_one(eqn: _jax.JaxprEqn) -> int:
    if eqn.primitive.name == "pallas_call" and eqn.params.get("cost_estimate") is not None:
        return int(eqn.params["cost_estimate"].bytes_accessed)
    row = operation(eqn.primitive.name)
    traffic = Traffic.ALL if row is None else row.traffic
    of_operand = [n_bytes(v.aval) for v in eqn.invars]
    written = sum(n_bytes(v.aval) for v in eqn.outvars)
    if traffic is Traffic.NONE:
        return 0
    if traffic is Traffic.PART:
        # The part is read and written; the indices are read.
        return 2 * written + sum(of_operand[1:])
    if traffic is Traffic.REPLACE_1:
        return 2 * of_operand[1]
    if traffic is Traffic.REPLACE_2:
        return 2 * of_operand[2] + of_operand[1]
    if traffic is Traffic.COMBINE_2:
        # The update is read, and the part that it is combined with is read and written.
        return 3 * of_operand[2] + of_operand[1]
    read = {id(v): n_bytes(v.aval) for v in eqn.invars if _jax.is_var(v)}
    return written + sum(read.values())
