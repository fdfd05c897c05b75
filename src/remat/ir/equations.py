"""What one equation of a jaxpr does: the rows of `ir.operations`, applied to equations.

An equation whose primitive has no row (a new version of JAX, a primitive of somebody's own) is
elementwise if all of its operands have the shape of its one result or none; otherwise it is a kernel
of its own.
"""

from __future__ import annotations

from remat import _jax
from remat.ir import jaxprs
from remat.ir.operations import FUSIBLE, Fusion, operation

_CALLS = frozenset(
    (
        *("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "shard_map"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
        *("remat", "checkpoint", "remat2"),
    )
)
_BODY_PARAMETERS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def inline_body(eqn: _jax.JaxprEqn) -> _jax.Jaxpr | None:
    """Return the body of an equation that is a call, as if it stood in the program around it."""
    if eqn.primitive.name in _CALLS:
        for key in _BODY_PARAMETERS:
            if _jax.is_jaxpr(eqn.params.get(key)):
                return _jax.open_jaxpr(eqn.params[key])
    return None


def fusion_of(eqn: _jax.JaxprEqn) -> Fusion:
    """Return what an equation means to a compiler that fuses loops.

    A call of one result is what the costliest operation of its body is, if all of them fuse.
    Loops, branches, and calls that do not fuse as a whole are kernels of their own.
    """
    body = inline_body(eqn)
    if body is not None:
        return _fusion_of_call(body) if len(eqn.outvars) == 1 else Fusion.KERNEL
    row = operation(eqn.primitive.name)
    if row is not None and row.fusion is not Fusion.CALL:
        return row.fusion
    if row is not None or jaxprs.has_body(eqn) or eqn.effects or len(eqn.outvars) != 1:
        return Fusion.KERNEL
    shape = getattr(eqn.outvars[0].aval, "shape", None)
    is_elementwise = all(getattr(v.aval, "shape", None) in (shape, ()) for v in eqn.invars)
    return Fusion.CHEAP if is_elementwise and eqn.invars else Fusion.KERNEL


def _fusion_of_call(body: _jax.Jaxpr) -> Fusion:
    found = {fusion_of(eqn) for eqn in body.eqns}
    if not found <= FUSIBLE:
        return Fusion.KERNEL
    return next((f for f in (Fusion.COSTLY, Fusion.CHEAP) if f in found), Fusion.VIEW)


def is_fusible(eqn: _jax.JaxprEqn) -> bool:
    """Return whether compilers compute an equation inside the kernel that uses its result."""
    return fusion_of(eqn) in FUSIBLE


def is_collective(eqn: _jax.JaxprEqn) -> bool:
    """Return whether an equation communicates between devices."""
    row = operation(eqn.primitive.name)
    return row is not None and row.is_collective


def is_repeatable(eqn: _jax.JaxprEqn) -> bool:
    """Return whether computing an equation again gives the same result and has no other effect.

    Looks into the bodies that the equation runs.
    """
    row = operation(eqn.primitive.name)
    if eqn.effects or (row is not None and not row.is_repeatable):
        return False
    return all(
        is_repeatable(inner)
        for body in jaxprs.bodies_of(eqn)
        for inner in _jax.open_jaxpr(body).eqns
    )
