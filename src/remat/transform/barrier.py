"""What keeps XLA from undoing rematerialization, per backend and version: the one place that chooses.

A recomputation repeats operations of the forward pass on the same operands, which is what a
compiler's common-subexpression elimination (CSE) looks for. Merged back, the forward values live
until the backward pass again and nothing was gained. Two things must hold for the repeated
operations: nobody may see that they are repetitions, and they must not start before the cotangents
have arrived, or their results live as long as the saved values would have.

`BARRIER`
    An `optimization_barrier` over the saved values *and* the cotangents gives both, where the
    compiler keeps it until its last CSE pass: on TPU, on GPU, and on CPU from jaxlib 0.11.1 on.
`CALL`
    Older CPU compilers expand the barrier before CSE runs. There the recomputation and its backward
    pass become a function of their own whose call carries `inlineable="false"`. CSE does not look
    into it, and its arguments include the cotangents, so that it cannot start early. Of what
    survives on those versions this is the cheapest that needs nothing from the caller: 224 MiB
    against 968 MiB (and 976 without rematerialization) at 1.17 times the step on FACTS.md's stack
    of 24 blocks. The barrier stays in place as well, so that the module means the same elsewhere.
    Those compilers also write a result of a function over an input that dies there, without asking
    whether another input is the same buffer and still read (two saved values that CSE has merged,
    a value and its reshape, a residual that is the cotangent). So the function returns such inputs,
    which keeps them alive to its end (`_overwritten`).

XLA's partitioner sees a call from outside: what is unreduced, or depends on the device's index in a
`shard_map` over some of the mesh's axes, has to be declared in its signature or cannot be declared at
all. Where it cannot, only the barrier is left (`_can_be_function`), and CPU compilers before 0.11.1
undo the recomputation.

In the body of a loop the forward pass is in another loop's body, as a rule, and there is nothing to
merge with. The protection stays all the same: a loop of one step is inlined beside the forward pass,
an unrolled one could start all recomputations of an iteration before the first cotangent, and what
depends on nothing that changes is moved out of the loop. `prevent_cse=False` takes it away.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from remat import _jax
from remat.ir import jaxprs
from remat.ir.operations import FUSIBLE, Fusion, operation

_CALL_ATTRIBUTES = {"inlineable": "false"}
# The first jaxlib whose CPU compiler expands barriers after its last CSE pass.
_CPU_KEEPS_BARRIERS = (0, 11, 1)


class Protection(enum.Enum):
    """How a recomputation is kept apart from the forward pass."""

    NONE = "none"
    BARRIER = "barrier"
    CALL = "call"


def protection(platform: str, jaxlib_version: tuple[int, ...]) -> Protection:
    """What protects a recomputation on a platform.

    >>> protection("cpu", (0, 10, 2)), protection("cpu", (0, 11, 1)), protection("tpu", (0, 10, 2))
    (<Protection.CALL: 'call'>, <Protection.BARRIER: 'barrier'>, <Protection.BARRIER: 'barrier'>)
    """
    if platform == "cpu" and jaxlib_version < _CPU_KEEPS_BARRIERS:
        return Protection.CALL
    return Protection.BARRIER


def lower_protected(
    ctx: _jax.LoweringContext,
    jaxpr: _jax.Jaxpr,
    args: Sequence[Any],
    fenced: Sequence[bool],
    how: Protection,
) -> Sequence[Any]:
    """Write the operations of a recomputation, kept apart from what stands before it.

    Args:
      ctx: where the operations go.
      jaxpr: the recomputation and the backward pass that it serves.
      args: the values of its inputs.
      fenced: for each input whether it may take part in the barrier. `prevent_cse=False` and the
        False leaves of a `prevent_cse` prefix leave inputs out.
      how: the platform's protection.
    """
    inside = [arg for arg, fence in zip(args, fenced) if fence]
    if not inside or how is Protection.NONE:
        return _jax.lower_inline(ctx, jaxpr, args)
    avals = [aval for aval, fence in zip(ctx.avals_in, fenced) if fence]
    outside = [arg for arg, fence in zip(args, fenced) if not fence]
    args = _jax.merge_lists(list(fenced), outside, _jax.lower_barrier(ctx, avals, inside))
    if how is Protection.CALL and _can_be_function(ctx, jaxpr):
        returned = _overwritten(jaxpr)
        return _jax.lower_call(ctx, jaxpr, args, _CALL_ATTRIBUTES, returned)
    return _jax.lower_inline(ctx, jaxpr, args)


def _can_be_function(ctx: _jax.LoweringContext, jaxpr: _jax.Jaxpr) -> bool:
    """Return whether a jaxpr means the same to XLA's partitioner as a function of its own.

    In a `shard_map` over some axes of a mesh it does not know in a function which axes are manual:
    a function cannot say there what a device's index is, or over which devices a value is unreduced.
    """
    if not _jax.is_partly_manual(ctx):
        return True
    return not (jaxprs.applies(jaxpr, "axis_index") or _jax.has_unreduced(jaxpr))


def _overwritten(jaxpr: _jax.Jaxpr) -> tuple[int, ...]:
    """Return the positions of inputs that a CPU compiler before 0.11.1 may write over while it reads them.

    Only inputs of the same size in bytes can be one buffer. A fused kernel that reads an element of one
    of them for each element that it writes is harmless, unless it reads another of them in another
    order. Among those read so, the last of a group is free if all others live to the end: cotangents
    come last, and die early.
    """
    groups: dict[int, list[int]] = {}
    for i, v in enumerate(jaxpr.invars):
        if isinstance(v.aval, _jax.ShapedArray):
            groups.setdefault(v.aval.size * v.aval.dtype.itemsize, []).append(i)
    reordered = _read_in_another_order(jaxpr)
    found: list[int] = []
    for group in groups.values():
        kept = [i for i in group if jaxpr.invars[i] in reordered]
        found += kept[:-1] if kept == group else kept
    return tuple(sorted(found))


# Kernels that write no result over an operand, and loops, for whose values XLA inserts copies.
_APART = frozenset({"dot_general", "conv_general_dilated", "scan", "while"})


def _read_in_another_order(jaxpr: _jax.Jaxpr) -> set[_jax.Var]:
    """Return the variables of which a fused kernel may read other elements than the one it writes."""
    reordered: set[_jax.Var] = set()
    for eqn in reversed(jaxpr.eqns):
        name = eqn.primitive.name
        row = operation(name)
        # A view, or elementwise; what moves elements computes nothing.
        in_order = (
            row is not None and row.fusion in FUSIBLE and (row.fusion is Fusion.VIEW or row.flops)
        )
        if name in _APART or (in_order and reordered.isdisjoint(eqn.outvars)):
            continue
        reordered |= {v for v in eqn.invars if not isinstance(v, _jax.Literal)}
    return reordered
