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

No protection is needed in the body of a loop where the forward pass is in another loop's body, as
under `scan`: there is nothing to merge with. It is left out there (`alone_in_loop_body`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from remat import _jax

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
    cotangents: Sequence[bool],
    how: Protection,
    *,
    always: bool = False,
) -> Sequence[Any]:
    """Write the operations of a recomputation, kept apart from what stands before it.

    Args:
      ctx: where the operations go.
      jaxpr: the recomputation and the backward pass that it serves.
      args: the values of its inputs.
      fenced: for each input whether it may take part in the barrier. `prevent_cse=False` and the
        False leaves of a `prevent_cse` prefix leave inputs out.
      cotangents: for each input whether it is a cotangent, on which the recomputation does not depend.
      how: the platform's protection.
      always: whether to protect it in the body of a loop too, where nothing could be merged with it,
        but it could start too early.
    """
    inside = [arg for arg, fence in zip(args, fenced) if fence]
    repeated = [arg for arg, fence, late in zip(args, fenced, cotangents) if fence and not late]
    if not inside or how is Protection.NONE:
        return _jax.lower_inline(ctx, jaxpr, args)
    if not always and _jax.alone_in_loop_body(ctx, repeated):
        return _jax.lower_inline(ctx, jaxpr, args)
    avals = [aval for aval, fence in zip(ctx.avals_in, fenced) if fence]
    outside = [arg for arg, fence in zip(args, fenced) if not fence]
    args = _jax.merge_lists(list(fenced), outside, _jax.lower_barrier(ctx, avals, inside))
    if how is Protection.CALL:
        return _jax.lower_call(ctx, jaxpr, args, _CALL_ATTRIBUTES)
    return _jax.lower_inline(ctx, jaxpr, args)
