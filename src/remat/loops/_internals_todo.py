"""What the loops need of JAX beyond its public API; to be moved into `remat/_jax.py`.

Everything here is reached through `jax.interpreters` and `jax.extend`, except `convert_constvars`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import core as _core
from jax._src.interpreters import partial_eval as _pe
from jax.extend.core import Primitive as Primitive
from jax.interpreters import ad as _ad, batching as _batching, mlir as _mlir

# Delete when JAX < 0.12 is no longer supported: from then on a jaxpr carries its constants.
_JAXPRS_CARRY_CONSTS = not hasattr(_core, "ClosedJaxpr") or _core.ClosedJaxpr is _core.Jaxpr


def trace(fun: Callable, *args: Any) -> tuple[Any, list[Any], Any]:
    """`fun` as a jaxpr whose closed-over values are its leading inputs, those, and its result.

    `args` are pytrees of arrays or of their types; the result is a tree of types.
    """
    # A new function object each time, so that no cache hands out values closed over earlier.
    closed, out = jax.make_jaxpr(lambda *a: fun(*a), return_shape=True)(*args)
    inner = closed if _JAXPRS_CARRY_CONSTS else closed.jaxpr
    return _pe.convert_constvars_jaxpr(inner), list(closed.consts), out


def eval_jaxpr(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    return _core.eval_jaxpr(jaxpr, (), *args)


def in_avals(jaxpr: Any) -> list[Any]:
    return [v.aval for v in jaxpr.invars]


def out_avals(jaxpr: Any) -> list[Any]:
    return [v.aval for v in jaxpr.outvars]


def slice_types(xs: Sequence[Any]) -> list[Any]:
    """The types of what a step reads of these arrays, with their sharding and varying axes."""
    if any(x.shape[0] == 0 for x in xs):
        return [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in xs]
    jaxpr, _, _ = trace(
        lambda xs: [jax.lax.dynamic_index_in_dim(x, 0, 0, False) for x in xs], list(xs)
    )
    return out_avals(jaxpr)


def zeros(aval: Any, leading: Sequence[int | None] = ()) -> Any:
    """Zeros of a type, with more leading axes; varying over the same axes of a `shard_map`."""
    made = jax.numpy.zeros((*leading, *aval.shape), aval.dtype)
    varying: frozenset = getattr(getattr(aval, "mat", None), "varying", frozenset())
    return jax.lax.pcast(made, tuple(varying), to="varying") if varying else made


def dependents(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Which results of a jaxpr can have a derivative with respect to these inputs."""
    reached = {v for v, active in zip(jaxpr.invars, inputs) if active}
    for eqn in jaxpr.eqns:
        if any(not isinstance(v, _core.Literal) and v in reached for v in eqn.invars):
            reached.update(v for v in eqn.outvars if has_tangent(v.aval))
    return [not isinstance(v, _core.Literal) and v in reached for v in jaxpr.outvars]


def has_tangent(aval: Any) -> bool:
    """Whether values of this type can have a derivative: real and complex numbers."""
    return jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact)


# Registering a primitive's rules


def is_zero(tangent: Any) -> bool:
    return type(tangent) is _ad.Zero


def is_linear_input(x: Any) -> bool:
    return _ad.is_undefined_primal(x)


def zero(aval: Any) -> Any:
    return _ad.Zero(aval)


def register(
    primitive: Primitive,
    *,
    evaluate: Callable,
    abstract: Callable,
    jvp: Callable,
    transpose: Callable,
    batch: Callable,
) -> None:
    """All rules of a primitive with several results, `batch(axis_data, args, dims, **params)`."""
    primitive.multiple_results = True
    primitive.def_impl(evaluate)
    primitive.def_effectful_abstract_eval(abstract)
    _ad.primitive_jvps[primitive] = jvp
    _ad.primitive_transposes[primitive] = transpose
    _batching.fancy_primitive_batchers[primitive] = batch
    _mlir.register_lowering(primitive, _mlir.lower_fun(evaluate, multiple_results=True))


def is_var(v: Any) -> bool:
    """Whether an operand or a result of a jaxpr is a variable and no literal."""
    return not isinstance(v, _core.Literal)
