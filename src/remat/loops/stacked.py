"""Reading one layer of stacked parameters in nested loops, without copies of the other layers.

# The idea

`lax.scan` over stacked parameters `[n, ...]` passes a slice to each step and stacks the steps'
gradients. In nested loops, where a group of m layers is recomputed together, the outer loop passes a
copy of m slices to the group, and the group returns a stack of m gradients. Both are temporaries that
grow with m: nesting would trade activation memory for parameter memory.

So here all loops get the whole array and read one layer at an index. The gradient of such a read is
nonzero in that layer only, but JAX would sum gradients of the full size. To sum them in place, the
derivative takes a separate path: the loops carry a *handle* on the stack, whose value is never read and
whose tangent is the stack's tangent.

    adopt:  layer, handle, i  ->  handle, layer     the layer, whose tangent is handle's at i
    take:   dhandle, i        ->  dhandle, dlayer   linear; its transpose is put
    put:    ct, ct_layer, i   ->  ct                adds ct_layer to ct in place, at i

In reverse, the handle's cotangent is one buffer of the size of the parameters, carried through all
loops: the gradient itself. `adopt`'s derivative ignores the tangent of `layer`, which the handle's
tangent already contains. Its primal result is `layer`, so higher derivatives are those of a plain read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
from jax import lax

from remat import _jax
from remat.aliases import Array, Arrays, Aval, AxisData, Dim, IrValue, PyTree

_jax.exclude_from_tracebacks(__file__)


def adopt(layer: Array, handle: Array, index: Array) -> tuple[Array, Array]:
    """Return `handle`, and `layer` with the derivative of `handle[index]`."""
    handle, layer = adopt_p.bind(layer, handle, index, axis=0, n_lanes=0)
    return handle, layer


# --------------------------------------------------------------------------------------------------
# Evaluation


def _adopt(layer: Array, handle: Array, index: Array, *, axis: int) -> Arrays:
    del index, axis
    return [handle, layer]


def _take(stack: Array, index: Array, *, axis: int) -> Arrays:
    return [stack, lax.dynamic_index_in_dim(stack, index, axis, keepdims=False)]


def _put(stack: Array, layer: Array, index: Array, *, axis: int) -> Arrays:
    there = lax.dynamic_index_in_dim(stack, index, axis, keepdims=False)
    return [lax.dynamic_update_index_in_dim(stack, there + layer, index, axis)]


def _primitive(name: str, evaluate: Callable[..., Arrays]) -> _jax.Primitive:
    primitive = _jax.Primitive(name)
    primitive.multiple_results = True

    @primitive.def_impl
    def in_lanes(*args: Array, axis: int, n_lanes: int) -> Arrays:
        function: Callable[..., Arrays] = functools.partial(evaluate, axis=axis)
        for _ in range(n_lanes):
            function = jax.vmap(function)
        return function(*args)

    def jaxpr_of(avals: Sequence[Aval], params: dict[str, int]) -> _jax.Jaxpr:
        return _jax.open_jaxpr(jax.make_jaxpr(lambda *args: in_lanes(*args, **params))(*avals))

    @primitive.def_abstract_eval
    def _(*avals: Aval, **params: int) -> Arrays:
        return [v.aval for v in jaxpr_of(avals, params).outvars]

    def lower(ctx: _jax.LoweringContext, *args: Array, **params: int) -> Sequence[IrValue]:
        return _jax.lower_inline(ctx, jaxpr_of(ctx.avals_in, params), args)

    _jax.register_lowering(primitive, lower)
    return primitive


adopt_p = _primitive("remat_adopt", _adopt)
take_p = _primitive("remat_take", _take)
put_p = _primitive("remat_put", _put)


# --------------------------------------------------------------------------------------------------
# Derivatives


def _is_zero(x: Array) -> bool:
    return type(x) is _jax.Zero


def _array(x: Array) -> Array:
    return _jax.zeros(x.aval) if _is_zero(x) else x


def _zeros(outs: Sequence[Array]) -> Arrays:
    return [_jax.zero_tangent(out) for out in outs]


def _adopt_jvp(
    primals: Sequence[Array], tangents: Sequence[Array], **where: int
) -> tuple[PyTree, PyTree]:
    layer, handle, index = primals
    outs = [handle, layer]
    if _is_zero(tangents[1]):
        return outs, _zeros(outs)
    return outs, take_p.bind(tangents[1], index, **where)


def _take_jvp(
    primals: Sequence[Array], tangents: Sequence[Array], **where: int
) -> tuple[PyTree, PyTree]:
    outs = take_p.bind(*primals, **where)
    if _is_zero(tangents[0]):
        return outs, _zeros(outs)
    return outs, take_p.bind(tangents[0], primals[1], **where)


def _put_jvp(
    primals: Sequence[Array], tangents: Sequence[Array], **where: int
) -> tuple[PyTree, PyTree]:
    outs = put_p.bind(*primals, **where)
    stack, layer, _ = tangents
    if _is_zero(stack) and _is_zero(layer):
        return outs, _zeros(outs)
    return outs, put_p.bind(_array(stack), _array(layer), primals[2], **where)


def _take_transpose(cts: Sequence[Array], stack: Array, index: Array, **where: int) -> Arrays:
    ct_stack, ct_layer = cts
    if _is_zero(ct_layer):
        return [ct_stack, None]
    return [*put_p.bind(_array(ct_stack), ct_layer, index, **where), None]


def _put_transpose(
    cts: Sequence[Array], stack: Array, layer: Array, index: Array, **where: int
) -> Arrays:
    (ct,) = cts
    if _is_zero(ct):
        return [None, None, None]
    return [*take_p.bind(ct, index, **where), None]


_jax.register_linear_transpose(take_p, _take_transpose)
_jax.register_linear_transpose(put_p, _put_transpose)
_jax.register_jvp(adopt_p, _adopt_jvp)
_jax.register_jvp(take_p, _take_jvp)
_jax.register_jvp(put_p, _put_jvp)


# --------------------------------------------------------------------------------------------------
# Batching: all arrays get a leading batch axis
#
# Where the index is the same for the whole batch, the stack's axis moves back by one. Where it is not,
# the batch is `n_lanes` leading axes of all operands, and the axis is that of one lane's stack.


def _batch_in_front(primitive: _jax.Primitive) -> Callable:
    def rule(
        axis_data: AxisData, args: Sequence[Array], dims: Sequence[Dim], *, axis: int, n_lanes: int
    ) -> tuple[Arrays, list[Dim]]:
        if all(dim is None for dim in dims):
            outs = primitive.bind(*args, axis=axis, n_lanes=n_lanes)
            return outs, [None] * len(outs)
        has_lanes = n_lanes > 0 or dims[-1] is not None
        batched = [_jax.batched(x, d, axis_data) for x, d in zip(args, dims)]
        if has_lanes:
            outs = primitive.bind(*batched, axis=axis, n_lanes=n_lanes + 1)
        else:
            outs = primitive.bind(*batched[:-1], args[-1], axis=axis + 1, n_lanes=0)
        return outs, [0] * len(outs)

    return rule


for _p in (adopt_p, take_p, put_p):
    _jax.register_batching(_p, _batch_in_front(_p))
