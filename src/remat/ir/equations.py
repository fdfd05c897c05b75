"""The properties of single equations, from the rows of `ir.operations`.

An equation whose primitive has no row (of a newer JAX, or of another library) counts as elementwise if
it has one result and each operand has the result's shape or is a scalar. Otherwise it counts as a
separate kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from remat import _jax
from remat.aliases import Eqn, JaxprLike
from remat.ir import jaxprs
from remat.ir.operations import FUSIBLE, Fusion, operation

T = TypeVar("T")

_CALLS = frozenset(
    (
        *("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "shard_map"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
        *("remat", "checkpoint", "remat2"),
    )
)
_BODY_PARAMETERS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def inline_body(eqn: _jax.JaxprEqn) -> _jax.Jaxpr | None:
    """Return the body of a call whose equations count as part of the program around it, else None."""
    if eqn.primitive.name in _CALLS:
        for key in _BODY_PARAMETERS:
            if _jax.is_jaxpr(eqn.params.get(key)):
                return _jax.open_jaxpr(eqn.params[key])
    return None


_TRANSPARENT_CALLS = frozenset(("closed_call", "core_call", "core_closed_call", "eval_jaxpr"))
_CALLS_WITH_RULES = frozenset(("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"))
_REGIONS = frozenset(("remat", "checkpoint", "remat2"))


def is_region(eqn: _jax.JaxprEqn) -> bool:
    """Return whether an equation is a checkpointed function, before or after differentiation."""
    return eqn.primitive.name in _REGIONS and _jax.is_jaxpr(eqn.params.get("jaxpr"))


def has_derivative_rule(eqn: _jax.JaxprEqn) -> bool:
    """Return whether an equation is a call of a function with a derivative rule of its own."""
    return eqn.primitive.name in _CALLS_WITH_RULES and _jax.is_jaxpr(eqn.params.get("call_jaxpr"))


def programs_of(eqn: _jax.JaxprEqn) -> list[JaxprLike]:
    """Return the jaxprs that an equation runs, each once.

    They include the body of a function with a derivative rule, and of a linear solve the program that solves.
    Jaxprs that only derivatives run are left out.
    """
    bodies = list(jaxprs.bodies_of(eqn))
    if has_derivative_rule(eqn):
        bodies.append(eqn.params["call_jaxpr"])
    if jaxprs.is_linear_solve(eqn):
        bodies.append(eqn.params["jaxprs"].solve)
    return list({id(body): body for body in bodies}.values())  # branches can share one


def solve_operands(eqn: _jax.JaxprEqn, operands: Sequence[T]) -> list[T]:
    """Return the items for the operands of the solving program, from those for a linear solve's operands.

    These are the constants of the product, of the transposed product, of the solve and of the transposed
    solve, and then the right-hand side.
    """
    lengths = eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    constants = operands[first : first + lengths.solve]
    return [*constants, *operands[first + lengths.solve + lengths.transpose_solve :]]


def transparent_call(eqn: _jax.JaxprEqn) -> _jax.Jaxpr | None:
    """Return the body of a call that is equivalent to its equations, else None.

    Calls with shardings, layouts or derivative rules of their own are not.
    """
    is_transparent = _jax.is_plain_jit(eqn) or eqn.primitive.name in _TRANSPARENT_CALLS
    return _without_constants(eqn) if is_transparent else None


def undifferentiated_call(eqn: _jax.JaxprEqn) -> _jax.Jaxpr | None:
    """Return the body of a transparent call or of a checkpoint before differentiation, else None."""
    is_checkpoint = is_region(eqn) and not eqn.params["differentiated"]
    return _without_constants(eqn) if is_checkpoint else transparent_call(eqn)


def plain_call(eqn: _jax.JaxprEqn) -> _jax.Jaxpr | None:
    """Return the body of a call that can be inlined, else None.

    In programs that are not differentiated again, these are the calls that mean the same to the compiler as
    their equations. A checkpointed function is such a call until it is differentiated.
    """
    has_rules = eqn.primitive.name in _CALLS_WITH_RULES
    return _without_constants(eqn) if has_rules else undifferentiated_call(eqn)


def called_body(eqn: _jax.JaxprEqn) -> _jax.Jaxpr | None:
    """Return the body of a plain call or of a differentiated checkpoint, else None."""
    return _without_constants(eqn) if is_region(eqn) else plain_call(eqn)


def _without_constants(eqn: _jax.JaxprEqn) -> _jax.Jaxpr | None:
    for key in _BODY_PARAMETERS:
        body = eqn.params.get(key)
        if _jax.is_jaxpr(body):
            opened = _jax.open_jaxpr(body)
            has_constants = getattr(body, "consts", None) or opened.constvars
            return None if has_constants else opened
    return None


def fusion_of(eqn: _jax.JaxprEqn) -> Fusion:
    """Return how a compiler that fuses loops treats an equation.

    A call with one result counts as the costliest operation of its body, if all of them fuse. Loops,
    branches and other calls count as separate kernels.
    """
    body = inline_body(eqn)
    if body is not None:
        return _fusion_of_call(body) if len(eqn.outvars) == 1 else Fusion.KERNEL
    if _is_outer_product(eqn):
        return Fusion.CHEAP
    row = operation(eqn.primitive.name)
    if row is not None and row.fusion is not Fusion.CALL:
        return Fusion.CHEAP if divides_by_number(eqn) else row.fusion
    if row is not None or jaxprs.has_body(eqn) or eqn.effects or len(eqn.outvars) != 1:
        return Fusion.KERNEL
    shape = getattr(eqn.outvars[0].aval, "shape", None)
    is_elementwise = all(getattr(v.aval, "shape", None) in (shape, ()) for v in eqn.invars)
    return Fusion.CHEAP if is_elementwise and eqn.invars else Fusion.KERNEL


def divides_by_number(eqn: _jax.JaxprEqn) -> bool:
    """Return whether an equation divides by a number that the program states.

    XLA multiplies by its reciprocal instead.
    """
    return eqn.primitive.name == "div" and not _jax.is_var(eqn.invars[1])


def _is_outer_product(eqn: _jax.JaxprEqn) -> bool:
    """Return whether an equation is a matrix product that sums over one term, or none.

    XLA computes it as an elementwise multiplication. A gradient of weights for a single example is one.
    """
    if eqn.primitive.name != "dot_general":
        return False
    (contracted, _), _ = eqn.params["dimension_numbers"]
    shape = eqn.invars[0].aval.shape
    return all(shape[d] == 1 for d in contracted)


def _fusion_of_call(body: _jax.Jaxpr) -> Fusion:
    found = {fusion_of(eqn) for eqn in body.eqns}
    if not found <= FUSIBLE:
        return Fusion.KERNEL
    return next((f for f in (Fusion.COSTLY, Fusion.CHEAP) if f in found), Fusion.VIEW)


def is_fusible(eqn: _jax.JaxprEqn) -> bool:
    """Return whether compilers compute an equation inside the kernel that uses its result."""
    return fusion_of(eqn) in FUSIBLE


def is_product(eqn: Eqn, *, batched: bool) -> bool:
    """Return whether an equation is a matrix product.

    Products with batch dimensions, and convolutions, are only if `batched`.
    """
    name = eqn.primitive.name
    if name == "dot_general":
        _, (batch, _) = eqn.params["dimension_numbers"]
        return batched or not batch
    if name == "scaled_matmul_wrapper":  # cuDNN's, with a leading batch dimension
        return batched or eqn.invars[0].aval.shape[0] == 1
    return batched and name == "conv_general_dilated"


def is_elementwise(eqn: _jax.JaxprEqn) -> bool:
    """Return whether each element of the result depends only on the same element of each operand.

    Operands are scalars or have the result's shape. Data movement is not elementwise, even within a shape.
    """
    if len(eqn.outvars) != 1 or has_effects(eqn) or jaxprs.has_body(eqn) or not eqn.invars:
        return False
    name = eqn.primitive.name
    row = operation(name)
    if row is None:
        return False
    computes = row.fusion in (Fusion.CHEAP, Fusion.COSTLY) and row.flops != 0
    shape = getattr(eqn.outvars[0].aval, "shape", None)
    return (computes or (row.is_copy and name != "optimization_barrier")) and all(
        getattr(v.aval, "shape", None) in (shape, ()) for v in eqn.invars
    )


def fills_array(eqn: _jax.JaxprEqn) -> bool:
    """Return whether an equation fills an array with a number that the program states."""
    return (
        eqn.primitive.name == "broadcast_in_dim"
        and len(eqn.invars) == 1
        and not _jax.is_var(eqn.invars[0])
    )


def is_collective(eqn: _jax.JaxprEqn) -> bool:
    """Return whether an equation communicates between devices."""
    row = operation(eqn.primitive.name)
    return row is not None and row.is_collective


def has_effects(eqn: _jax.JaxprEqn) -> bool:
    """Return whether an equation does more than compute its results, or must keep its place.

    The effect of a collective, which only names its axes, does not count.
    """
    return bool(eqn.effects) and not _jax.only_names_axes(eqn.effects)


def is_repeatable(eqn: _jax.JaxprEqn) -> bool:
    """Return whether recomputing an equation gives the same result and has no other effect.

    Looks into the bodies that the equation runs. An equation may also be kept from being recomputed
    (`ir.restriction`).
    """
    row = operation(eqn.primitive.name)
    if has_effects(eqn) or (row is not None and not row.is_repeatable) or _jax.is_fixed(eqn):
        return False
    return all(_is_body_repeatable(_jax.open_jaxpr(body)) for body in jaxprs.bodies_of(eqn))


# Cached, since loops and calls are asked often, and the answer depends on the immutable jaxpr alone.
@_jax.weakref_lru_cache
def _is_body_repeatable(jaxpr: _jax.Jaxpr) -> bool:
    return all(map(is_repeatable, jaxpr.eqns))
