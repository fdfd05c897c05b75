"""Outlining of operations that XLA for CPU expands into index arrays into separate functions.

XLA for CPU has no kernel for the backward pass of max-pooling. It compares arrays of indices, four of them as
large as the pooled array. They depend on no operand, so they may be computed at any time. In a program with
barriers XLA computes them at the start, and they live until the backward pass: 28 MiB of 76 MiB in a U-Net.

The operations of a function run when it is called, so each such operation becomes a function. The call has
the attribute `inlineable="false"`, which keeps XLA from inlining it before it schedules operations.

On other platforms, and in programs for several devices, whose partitioner sees only the signature of a
function, such operations stay inline.
"""

from __future__ import annotations

from collections.abc import Sequence

from remat import _jax
from remat.aliases import IrValue
from remat.ir import jaxprs
from remat.ir.operations import names_where

NOT_INLINED = {"inlineable": "false"}

_NAMES = names_where("has_index_arrays")

outline_p = _jax.Primitive("remat_outline")
outline_p.multiple_results = True


def needs_outlining(eqn: _jax.JaxprEqn) -> bool:
    """Return whether XLA for CPU expands an equation into arrays that depend on no operand."""
    return eqn.primitive.name in _NAMES and not eqn.effects


@_jax.weakref_lru_cache
def outlined(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a jaxpr, ready for lowering, whose equations of this kind become functions on CPUs."""
    if not any(map(needs_outlining, jaxpr.eqns)):
        return jaxpr
    eqns = [_as_function(eqn, jaxpr) if needs_outlining(eqn) else eqn for eqn in jaxpr.eqns]
    return _jax.rebuild(jaxpr, eqns=eqns)


def alone(eqn: _jax.JaxprEqn, jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a jaxpr of a single equation of another jaxpr, whose inputs are the equation's operands."""
    operands = list(dict.fromkeys(v for v in eqn.invars if _jax.is_var(v)))
    results = [jaxprs.fresh(v) for v in eqn.outvars]
    return _jax.jaxpr_of(operands, results, [eqn.replace(outvars=results)], jaxpr)


def _as_function(eqn: _jax.JaxprEqn, jaxpr: _jax.Jaxpr) -> _jax.JaxprEqn:
    body = alone(eqn, jaxpr)
    return _jax.new_eqn(body.invars, eqn.outvars, outline_p, {"jaxpr": body}, eqn)


def _lower_inline(
    ctx: _jax.LoweringContext, *args: IrValue, jaxpr: _jax.Jaxpr
) -> Sequence[IrValue]:
    return _jax.lower_inline(ctx, jaxpr, args)


def _lower_on_cpu(
    ctx: _jax.LoweringContext, *args: IrValue, jaxpr: _jax.Jaxpr
) -> Sequence[IrValue]:
    if _jax.n_devices(ctx) > 1:
        return _jax.lower_inline(ctx, jaxpr, args)
    return _jax.lower_call(ctx, jaxpr, args, NOT_INLINED)


_jax.register_lowering(outline_p, _lower_inline, cpu=_lower_on_cpu)
