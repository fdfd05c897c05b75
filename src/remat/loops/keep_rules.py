"""Calls whose derivative rules survive JAX's partial evaluation.

The loops are `jax.custom_jvp` functions. When JAX 0.10 linearizes a `lax.scan`, it evaluates the body
partially to move loop-invariant code out of the loop, and inlines the rest without its rules. The next
reverse-mode derivative then finds a `lax.while_loop`, which has no transpose. Partial evaluation does not
look into the equation of a primitive, so the calls are wrapped in this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from remat import _jax
from remat.aliases import Array, Arrays, AxisData, Dim, PyTree
from remat.loops.loop import merge, select


def keep_rules(fun: Callable[[Arrays], PyTree]) -> Callable[[Arrays], PyTree]:
    """Return `fun`, from a list of arrays to a tree, as a call with the derivative rules inside it."""
    if not _jax.PARTIAL_EVALUATION_DROPS_RULES:
        return fun

    def called(values: Arrays) -> PyTree:
        if not any(isinstance(x, jax.core.Tracer) for x in values):
            return fun(values)
        with _jax.source_of_caller():
            jaxpr, consts, out = _jax.trace_call(fun, values)
        results = keep_rules_p.bind(*consts, *values, jaxpr=jaxpr)
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return called


# --------------------------------------------------------------------------------------------------
# Rules

keep_rules_p = _jax.Primitive("remat_keep_rules")


def _evaluate(*args: Array, jaxpr: _jax.Jaxpr) -> Arrays:
    return _jax.call_jaxpr(jaxpr, args)


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Array], *, jaxpr: _jax.Jaxpr
) -> tuple[Arrays, Arrays]:
    nonzero = [not _jax.is_zero(t) for t in tangents]
    derivative, consts, out_nonzero = _jax.jvp_of_jaxpr(jaxpr, nonzero)
    given = [t for t, n in zip(tangents, nonzero) if n]
    results = _jax.call_jaxpr(derivative, [*consts, *primals, *given])
    out, found = results[: len(out_nonzero)], iter(results[len(out_nonzero) :])
    return out, [next(found) if n else _jax.zero_tangent(x) for x, n in zip(out, out_nonzero)]


def _batch(
    axis: AxisData, args: Sequence[Array], dims: Sequence[Dim], *, jaxpr: _jax.Jaxpr
) -> tuple[Arrays, list[Dim]]:
    batched, consts, out_dims = _jax.batch_jaxpr(jaxpr, axis, list(dims))
    return keep_rules_p.bind(*consts, *args, jaxpr=batched), out_dims


def _transpose(cotangents: Sequence[Array], *args: Array, jaxpr: _jax.Jaxpr) -> Arrays:
    types = _jax.out_avals(jaxpr)
    linear = [_jax.is_undefined(x) for x in args]

    def of_linear(*marked: Array) -> Arrays:
        results = _jax.call_jaxpr(jaxpr, merge(args, linear, marked))
        return [x for x in results if _jax.has_tangent(x)]

    given = [
        _jax.zeros(t) if _jax.is_zero(ct) else ct
        for ct, t in zip(cotangents, types, strict=True)
        if _jax.has_tangent(t)
    ]
    transposed = jax.linear_transpose(of_linear, *(x.aval for x in select(args, linear)))(given)
    return merge([None] * len(args), linear, transposed)


_jax.register(
    keep_rules_p,
    evaluate=_evaluate,
    abstract=lambda *_, jaxpr: (_jax.out_avals(jaxpr), jaxpr.effects),
    jvp=_jvp,
    transpose=_transpose,
    batch=_batch,
)
_jax.register_dce(keep_rules_p, lambda eqn, used, body: {"jaxpr": body}, lambda eqn: False)
_jax.register_checkify(
    keep_rules_p, lambda args, jaxpr, added, params: keep_rules_p.bind(*args, jaxpr=jaxpr)
)
