"""A linear map with its own transpose and its own derivative.

The derivative of a loop is a linear map of the tangents: run the differentiated loop forward. Its
transpose must not be found by transposing that program, which would keep the residuals of every step,
but must be the checkpointed backward loop. `jax.custom_vjp` can define this but forbids forward mode;
`jax.custom_derivatives.linear_call` allows both but cannot be differentiated with respect to its
residuals or be batched, so it supports neither second derivatives nor `vmap`. This primitive is
`linear_call` with those two rules.

A map reads *residuals*, on which it may depend in any way, and *operands*, in which it is linear.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from remat import _jax
from remat.aliases import Array, Arrays, Aval, AxisData, Dim, Effect


@dataclass(frozen=True, eq=False)
class LinearMap:
    """Four functions on lists of arrays.

    Attributes:
      apply: (residuals, operands) -> results.
      transposed: (residuals, cotangents of the results) -> cotangents of the operands.
      jvp: (residuals, operands, their tangents, their tangents) -> tangents of the results; a
        tangent is None where it is zero.
      transposed_jvp: the same for `transposed`.
      errors: a context in which the map is computed outside `jax.jit`, which raises errors of
        callbacks as what they are; None if the map has none.
    """

    apply: Callable[[Arrays, Arrays], Arrays]
    transposed: Callable[[Arrays, Arrays], Arrays]
    jvp: Callable[[Arrays, Arrays, Arrays, Arrays], Arrays]
    transposed_jvp: Callable[[Arrays, Arrays, Arrays, Arrays], Arrays]
    errors: Callable[[], contextlib.AbstractContextManager] | None = None

    @property
    def T(self) -> LinearMap:
        """Return the transpose, whose transpose is this map."""
        return LinearMap(self.transposed, self.apply, self.transposed_jvp, self.jvp, self.errors)


def linear_call(
    linear_map: LinearMap, residuals: Sequence[Array], operands: Sequence[Array]
) -> Arrays:
    """Apply a linear map so that JAX transposes and differentiates it as the map says."""
    with contextlib.nullcontext() if linear_map.errors is None else linear_map.errors():
        jaxpr, consts, _ = _jax.trace_call(linear_map.apply, list(residuals), list(operands))
        results = _bind(linear_map, jaxpr, consts, residuals, operands)
        if linear_map.errors is not None and not any(
            isinstance(x, jax.core.Tracer) for x in results
        ):
            jax.block_until_ready(results)
    return results


def _bind(
    linear_map: LinearMap,
    jaxpr: _jax.Jaxpr,
    consts: Sequence[Array],
    residuals: Sequence[Array],
    operands: Sequence[Array],
) -> Arrays:
    return linear_p.bind(
        *consts,
        *residuals,
        *operands,
        jaxpr=jaxpr,
        linear_map=linear_map,
        n_consts=len(consts),
        n_residuals=len(residuals),
    )


# Rules

linear_p = _jax.Primitive("remat_linear")


def _split(args: Sequence[Array], n_consts: int, n_residuals: int) -> tuple[Arrays, Arrays]:
    args = args[n_consts:]
    return list(args[:n_residuals]), list(args[n_residuals:])


def _evaluate(*args: Array, jaxpr: _jax.Jaxpr, **_: object) -> Arrays:
    return _jax.call_jaxpr(jaxpr, args)


def _abstract(*_: Aval, jaxpr: _jax.Jaxpr, **__: object) -> tuple[list[Aval], set[Effect]]:
    return _jax.out_avals(jaxpr), jaxpr.effects


def _jvp(
    primals: Sequence[Array],
    tangents: Sequence[Array],
    *,
    linear_map: LinearMap,
    n_consts: int,
    n_residuals: int,
    **params: Any,
) -> tuple[Arrays, Arrays]:
    # The constants come from tracing (index tables); they are not values of the program.
    sizes = {"n_consts": n_consts, "n_residuals": n_residuals}
    out = linear_p.bind(*primals, linear_map=linear_map, **sizes, **params)
    residuals, operands = _split(primals, **sizes)
    d_residuals, d_operands = _split([None if _jax.is_zero(t) else t for t in tangents], **sizes)
    return out, linear_map.jvp(residuals, operands, d_residuals, d_operands)


def _transpose(
    cotangents: Sequence[Array],
    *args: Array,
    jaxpr: _jax.Jaxpr,
    linear_map: LinearMap,
    n_consts: int,
    n_residuals: int,
) -> Arrays:
    residuals, operands = _split(args, n_consts, n_residuals)
    cotangents = [
        _jax.zeros(aval) if _jax.is_zero(ct) else ct
        for ct, aval in zip(cotangents, _jax.out_avals(jaxpr), strict=True)
    ]
    results = linear_call(linear_map.T, residuals, cotangents)
    # An operand that is known here is an instantiated zero, which needs no cotangent.
    return [None] * (n_consts + n_residuals) + [
        ct if _jax.is_undefined(operand) else None
        for ct, operand in zip(results, operands, strict=True)
    ]


def _batch(
    axis: AxisData,
    args: Sequence[Array],
    dims: Sequence[Dim],
    *,
    linear_map: LinearMap,
    n_consts: int,
    n_residuals: int,
    **params: Any,
) -> tuple[Arrays, Sequence[Dim]]:
    if all(dim is None for dim in dims):
        sizes = {"n_consts": n_consts, "n_residuals": n_residuals}
        results = linear_p.bind(*args, linear_map=linear_map, **sizes, **params)
        return results, [None] * len(results)
    residuals, operands = _split(args, n_consts, n_residuals)
    residual_dims, operand_dims = _split(dims, n_consts, n_residuals)
    # All operands and results are batched, so that the transpose has the same form.
    operands = [_jax.batched(x, dim, axis) for x, dim in zip(operands, operand_dims, strict=True)]
    names = {"axis_size": axis.size, "axis_name": axis.name, "spmd_axis_name": axis.spmd_name}

    def mapped(fun: Callable) -> Callable:
        return lambda residuals, linear: jax.vmap(fun, (residual_dims, 0), 0, **names)(
            residuals, linear
        )

    def mapped_jvp(fun: Callable) -> Callable:
        # A tangent is batched as its value is; None, for zero, has no leaves to batch.
        return lambda residuals, linear, d_residuals, d_linear: jax.vmap(
            fun,
            (
                residual_dims,
                0,
                [None if d is None else dim for d, dim in zip(d_residuals, residual_dims)],
                0,
            ),
            0,
            **names,
        )(residuals, linear, d_residuals, d_linear)

    batched = LinearMap(
        mapped(linear_map.apply),
        mapped(linear_map.transposed),
        mapped_jvp(linear_map.jvp),
        mapped_jvp(linear_map.transposed_jvp),
        linear_map.errors,
    )
    results = linear_call(batched, residuals, operands)
    return results, [0] * len(results)


_jax.register(
    linear_p, evaluate=_evaluate, abstract=_abstract, jvp=_jvp, transpose=_transpose, batch=_batch
)


# --------------------------------------------------------------------------------------------------
# Batch axes
#
# JAX batches a `jax.custom_jvp` and its rule separately, and if both are in a jaxpr it assumes the batch axes
# of one for the other. A loop and its rule run different programs, whose results need not have the same batch
# axes, or any.

align_p = _jax.Primitive("remat_align")


def align(results: Sequence[Array], arguments: Sequence[Array]) -> Arrays:
    """Return the results; under `vmap` with the batch in front, if any of the arguments has one."""
    return align_p.bind(*results, *arguments, n_results=len(results)) if results else []


def _align_batch(
    axis: AxisData, args: Sequence[Array], dims: Sequence[Dim], *, n_results: int
) -> tuple[Arrays, Arrays]:
    found: Arrays = []
    for x, dim in zip(args[:n_results], dims):
        if dim is not None or (_jax.has_tangent(x) and any(d is not None for d in dims)):
            found.append((_jax.batched(x, dim, axis), 0))
        else:
            found.append((x, None))
    results, new_dims = zip(*found)
    # An outer `vmap` has to see what the arguments depend on.
    return align_p.bind(*results, *args[n_results:], n_results=n_results), list(new_dims)


def _align_jvp(
    primals: Sequence[Array], tangents: Sequence[Array], *, n_results: int
) -> tuple[Arrays, Arrays]:
    return align_p.bind(*primals, n_results=n_results), list(tangents[:n_results])


_jax.register(
    align_p,
    evaluate=lambda *args, n_results: list(args[:n_results]),
    abstract=lambda *args, n_results: (list(args[:n_results]), set()),
    jvp=_align_jvp,
    transpose=lambda cts, *args, n_results: [*cts, *[None] * (len(args) - n_results)],
    batch=_align_batch,
)
