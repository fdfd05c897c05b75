"""Protection of recomputations from XLA's optimizations, which is lowered here and depends on the platform.

`transform/primitive.py` calls it for every region that is to be protected: those of `remat.checkpoint`, and
the ones that a plan writes (`region_equation`). Which inputs a barrier includes is decided where the region
is made: for plans in `planner/rewrite.py` (units) and `planner/scan_pairs/emission.py` (bodies of loops,
which need no protection if only fusible operations are recomputed).

A recomputation repeats operations of the forward pass on the same operands, which is what a
compiler's common-subexpression elimination (CSE) looks for. If it merges the two, the forward values
live until the backward pass and no memory is saved. So CSE must not see that the operations are
repeated. They also must not start before the cotangents are computed, or their results would live as long
as saved values.

`BARRIER`
    An `optimization_barrier` over the saved values *and* the cotangents ensures both if the compiler
    keeps it until its last CSE pass: on TPU, and on CPU from jaxlib 0.11.1 on.
`BARRIERS`
    GPU compilers keep barriers, too. But they compute what only the end of the program needs, such as the
    gradients of weights, as late as they can, and keep the recomputed values till then. So a second barrier
    over the results has all of them computed with the recomputation. The scan of training steps of
    `benchmarks/steps_in_loops.py` needs 0.22 times the temporaries of the scan without rematerialization,
    0.77 times with the first barrier alone (jaxlib 0.12, H100).
    Before jaxlib 0.12, GPU compilers also wrote the result of a fused kernel over an operand that it reads in
    the order of the result, without checking that the kernel reads the same buffer in another order as well,
    under the name of another result of the barrier (two saved values that CSE has merged, a value and its
    reshape) or of the value before the barrier. So equal values pass through the barrier once,
    and no kernel reads values from inside and from outside of the two barriers.
`CALL`
    Older CPU compilers expand the barrier before CSE runs. There the recomputation and its backward
    pass become a function, and the call of it has the attribute `inlineable="false"`. CSE does not
    look into the function, and its arguments include the cotangents, so it cannot start early. Among the
    protections that work in those versions without a compiler option, it costs the least.
    The stack of `benchmarks/stack.py` needs 224 MiB with it, 968 MiB with the barrier alone and
    976 MiB without rematerialization. The barrier stays, for other compilers of the same module.
    Those compilers also reuse the buffer of an input for a result of the function without checking
    that no other input in the same buffer is still read (two saved values that CSE has merged, a
    value and its reshape, a residual that is the cotangent). So the function returns such inputs,
    which keeps them alive to its end (`_overwritten`).

XLA's partitioner sees only the signature of a function. In a `shard_map` over some of the mesh's axes,
a signature cannot say which values are unreduced or depend on the device's index. There only the
barrier is used (`_can_be_function`), and CPU compilers before 0.11.1 undo the recomputation.

In the body of a loop the forward pass is usually in another loop's body, so that nothing can be merged. The
protection stays, for three reasons: a loop of one step is inlined beside the forward pass; an unrolled
loop could start all recomputations of an iteration before the first cotangent; loop-invariant
recomputations would be moved out of the loop. `prevent_cse=False` removes it. In loops that a plan writes it
is known whether one of these applies. Where none does, a barrier replaces a function, whose inputs would live
longer than necessary (`is_alone`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from remat import _jax
from remat.aliases import IrValue
from remat.ir import jaxprs
from remat.ir.operations import FUSIBLE, Fusion, operation
from remat.transform.outlining import NOT_INLINED

#: JAX's names of platforms with GPUs.
GPUS = ("cuda", "rocm")

# The first jaxlib whose CPU compiler expands barriers after its last CSE pass.
_CPU_KEEPS_BARRIERS = (0, 11, 1)


class Protection(enum.Enum):
    """How a recomputation is kept apart from the forward pass."""

    NONE = "none"
    BARRIER = "barrier"
    BARRIERS = "barriers"
    CALL = "call"


def protection(platform: str, jaxlib_version: tuple[int, ...]) -> Protection:
    """Return the protection of recomputations on a platform.

    >>> protection("cpu", (0, 10, 2)), protection("cpu", (0, 11, 1)), protection("tpu", (0, 10, 2))
    (<Protection.CALL: 'call'>, <Protection.BARRIER: 'barrier'>, <Protection.BARRIER: 'barrier'>)
    >>> protection("cuda", (0, 12, 0))
    <Protection.BARRIERS: 'barriers'>
    """
    if platform in GPUS:
        return Protection.BARRIERS
    if platform == "cpu" and jaxlib_version < _CPU_KEEPS_BARRIERS:
        return Protection.CALL
    return Protection.BARRIER


def lower_protected(
    ctx: _jax.LoweringContext,
    jaxpr: _jax.Jaxpr,
    args: Sequence[IrValue],
    fenced: Sequence[bool],
    how: Protection,
    *,
    is_alone: bool = False,
) -> Sequence[IrValue]:
    """Lower a recomputation so that XLA does not merge it with the operations before it.

    Args:
      ctx: the context of the lowering.
      jaxpr: the recomputation and the backward pass that uses it.
      args: the values of its inputs.
      fenced: for each input, whether the barrier includes it. `prevent_cse=False` and the
        False leaves of a `prevent_cse` prefix leave inputs out.
      how: the platform's protection.
      is_alone: whether nothing could be merged with it or be moved out, so that it need not be a function.
    """
    if how is Protection.NONE or not any(fenced):
        return _jax.lower_inline(ctx, jaxpr, args)
    both = how is Protection.BARRIERS
    behind = _jax.lower_barrier(ctx, ctx.avals_in, args, fenced, merge=both)
    if how is Protection.CALL and not is_alone and _can_be_function(ctx, jaxpr):
        returned = _overwritten(jaxpr)
        return _jax.lower_call(ctx, jaxpr, behind, NOT_INLINED, returned)
    outs = _jax.lower_inline(ctx, jaxpr, behind)
    if not both:
        return outs
    # An input that is a result as well needs no barrier; through two of them it would have three names.
    given = dict(zip(jaxpr.invars, args))
    outs = [
        out if isinstance(v, _jax.Literal) else given.get(v, out)
        for v, out in zip(jaxpr.outvars, outs)
    ]
    computed = [not isinstance(v, _jax.Literal) and v not in given for v in jaxpr.outvars]
    return _jax.lower_barrier(ctx, ctx.avals_out, outs, computed, merge=True)


def _can_be_function(ctx: _jax.LoweringContext, jaxpr: _jax.Jaxpr) -> bool:
    """Return whether XLA's partitioner handles a jaxpr in a separate function as it does inline.

    In a `shard_map` over some axes of a mesh, the partitioner does not know which axes are manual in a
    function, so the function cannot express a device's index, or over which devices a value is unreduced.
    """
    if not _jax.is_partly_manual(ctx):
        return True
    return not (jaxprs.applies(jaxpr, "axis_index") or _jax.has_unreduced(jaxpr))


def _overwritten(jaxpr: _jax.Jaxpr) -> tuple[int, ...]:
    """Return the positions of inputs that a CPU compiler before 0.11.1 may write over while it reads them.

    Only inputs of the same size in bytes can share a buffer; those of one size are a group. A fused kernel
    that reads element i of an input to write element i of its result may write over it. That is harmless,
    unless the kernel reads another input in the same buffer in another order. So the inputs that are read
    in another order are returned: then nothing is written to their buffers before the end.

    If these are all inputs of a group, say (w, x, g), one of them need not be returned: of any two that share
    a buffer, at least one is. The last one, g, is left out, since cotangents come last and are dead early. If
    the group has an input y that is read in order, g and y may share a buffer, and g is returned, too.
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


# Kernels that never overwrite an operand, and loops, for whose values XLA inserts copies.
_APART = frozenset({"dot_general", "conv_general_dilated", "scan", "while"})


def _read_in_another_order(jaxpr: _jax.Jaxpr) -> set[_jax.Var]:
    """Return the variables from which a fused kernel may read other elements than the one it writes."""
    reordered: set[_jax.Var] = set()
    for eqn in reversed(jaxpr.eqns):
        name = eqn.primitive.name
        row = operation(name)
        # A view, or elementwise; data movement computes nothing.
        in_order = (
            row is not None and row.fusion in FUSIBLE and (row.fusion is Fusion.VIEW or row.flops)
        )
        if name in _APART or (in_order and reordered.isdisjoint(eqn.outvars)):
            continue
        reordered |= {v for v in eqn.invars if not isinstance(v, _jax.Literal)}
    return reordered
