"""Tracing of functions to jaxprs, and the types of their values."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.api_util
from jax._src import (
    ad_util as _ad_util,
    api_util as _api_util,
    config as _config,
    core as _core,
    tree_util as _tree_util,
)
from jax._src.interpreters import partial_eval as _pe_src
from jax._src.sharding_impls import UNSPECIFIED as _unspecified

from remat._jax.compat import (
    JAX_VERSION,
    Jaxpr,
    detach_consts,
    eval_jaxpr,
)
from remat.aliases import Array, Arrays, Aval, DebugInfo, Leaf, PyTree, Sharding, Size, TreeDef

try:
    from jax._src.flattree import treedef_args_to_ft as _flat_tree
except ImportError:  # delete with JAX 0.10, where FlatTree is in tree_util

    def _flat_tree(in_tree: TreeDef, avals: Sequence[Aval]) -> PyTree:
        return _tree_util.FlatTree(tuple(avals), in_tree, False)


_JITTED = type(jax.jit(lambda: None))


def flatten_arguments(tree: PyTree) -> tuple[list[Leaf], TreeDef]:
    """Flatten a call's `(args, kwargs)` as JAX's own transformations do."""
    return _tree_util.tracing_registry.flatten(tree)


def debug_info(
    fun: Callable, args: Sequence, kwargs: dict, argnums: Sequence[int], argnames: Sequence[str]
) -> DebugInfo:
    """Return JAX's debug information of a call: the function's source and its arguments' names."""
    return jax.api_util.debug_info(
        "checkpoint / remat",
        fun,
        args,
        kwargs,
        static_argnums=tuple(argnums),
        static_argnames=tuple(argnames),
    )


def argument_names(
    fun: Callable,
    args: Sequence,
    kwargs: dict,
    n_leaves: int,
    argnums: Sequence[int] = (),
    argnames: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the names of a call's argument leaves, such as `params['w']`, without static arguments."""
    names = debug_info(fun, args, kwargs, argnums, argnames).arg_names
    if names is None or len(names) != n_leaves:
        return tuple(f"at flattened index {i}" for i in range(n_leaves))
    return tuple(name or f"at flattened index {i}" for i, name in enumerate(names))


def static_arguments(fun: Callable) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the positions and the names of a jitted function's static arguments."""
    options = options_of_jit(fun)
    return options.get("static_argnums", ()), options.get("static_argnames", ())


def options_of_jit(fun: Any) -> dict[str, Any]:
    """Return which arguments of a jitted function are donated or static; {} for other functions.

    The arguments of a bound method are counted without `self`.
    """
    info = getattr(fun, "_jit_info", None)
    if info is None:
        return {}
    options = {
        "donate_argnums": tuple(info.donate_argnums),
        "donate_argnames": tuple(info.donate_argnames),
        "static_argnums": tuple(info.static_argnums),
        "static_argnames": tuple(info.static_argnames),
    }
    if inspect.ismethod(fun):
        itself = next(iter(inspect.signature(fun.__func__).parameters), "")
        for kind in ("donate", "static"):
            numbers, names = f"{kind}_argnums", f"{kind}_argnames"
            options[numbers] = tuple(n - (n > 0) for n in options[numbers] if n)
            options[names] = tuple(name for name in options[names] if name != itself)
    return {name: value for name, value in options.items() if value}


def unjitted(fun: Any) -> tuple[Callable, dict[str, Any]]:
    """Return the function in a jitted function, and the options with which it was jitted.

    Other functions are returned unchanged, with the options that they carry from a jitted one, if any. So are
    jitted functions with layouts, and jitted methods with shardings, whose entry for `self` is unknown.
    """
    info, is_method = getattr(fun, "_jit_info", None), inspect.ismethod(fun)
    itself = fun.__func__ if is_method else fun
    options = options_of_jit(fun)
    if info is None or not isinstance(itself, _JITTED):
        return fun, options
    shardings = {
        "in_shardings": (info.in_shardings_treedef, info.in_shardings_leaves),
        "out_shardings": (info.out_shardings_treedef, info.out_shardings_leaves),
    }
    given = {
        name: jax.tree.unflatten(*flat)
        for name, flat in shardings.items()
        if any(s is not _unspecified for s in flat[1])
    }
    layouts = (*info.in_layouts_leaves, *info.out_layouts_leaves)
    if any(layout is not None for layout in layouts) or (is_method and given):
        return fun, options
    others = {
        "compiler_options": dict(info.compiler_options_kvs),
        "keep_unused": info.keep_unused,
        "device": info.device,
        "backend": info.backend,
    }
    options |= given | {name: value for name, value in others.items() if value}
    inner = itself.__wrapped__
    return types.MethodType(inner, fun.__self__) if is_method else inner, options


def abstractify(x: Array) -> Aval:
    return jax.api_util.shaped_abstractify(x)


def check_ref_arguments(debug: DebugInfo, avals: Sequence[Aval], leaves: Sequence[Leaf]) -> None:
    """Raise for refs that are passed twice or belong to an active transformation."""
    _api_util.check_no_transformed_refs_args(lambda: debug, leaves)
    # 0.11: only then can a jaxpr check it; delete the condition with 0.10.
    if JAX_VERSION >= (0, 11) and _config.mutable_array_checks.value:
        _api_util.check_no_aliased_ref_args(lambda: debug, avals, leaves)


def check_captured_refs(debug: DebugInfo, consts: Sequence[Array], leaves: Sequence[Leaf]) -> None:
    """Raise for a ref that is both an argument and closed over."""
    if JAX_VERSION >= (0, 11) and _config.mutable_array_checks.value:
        _api_util._check_no_aliased_closed_over_refs(debug, consts, leaves)


def trace(
    fun: Callable, in_tree: TreeDef, avals: Sequence[Aval], debug: DebugInfo
) -> tuple[Jaxpr, tuple[Array, ...], TreeDef]:
    """Trace `fun` to a jaxpr whose closed-over values are its leading inputs.

    Returns the jaxpr, the closed-over values, and the tree of the result.
    """
    closed, out = _pe_src.trace_to_jaxpr(fun, _flat_tree(in_tree, list(avals)), debug)
    jaxpr, consts = detach_consts(closed)
    return jaxpr, consts, out.tree


def trace_call(fun: Callable, *args: PyTree) -> tuple[Jaxpr, Arrays, TreeDef]:
    """Return `fun` as a jaxpr, the values that it closes over, and the types of its result as a pytree.

    The jaxpr takes the closed-over values as leading inputs. `args` are pytrees of arrays or types.
    """
    # A new function object each time, so that no cache returns values that were closed over earlier.
    closed, out = jax.make_jaxpr(lambda *a: fun(*a), return_shape=True)(*args)
    jaxpr, consts = detach_consts(closed)
    return jaxpr, list(consts), out


def call_jaxpr(jaxpr: Jaxpr, args: Sequence[Array]) -> Arrays:
    return eval_jaxpr(jaxpr, (), *args)


def argument_shardings(traced: jax.stages.Traced) -> list[Sharding]:
    """Return the sharding of each argument of `jax.jit(f).trace(...)`; None if it is unspecified.

    `in_shardings` takes precedence over the argument's own sharding. Static arguments are left out.
    """
    asked = traced._params["in_shardings"]
    own = (m.aval.sharding if m.sharding is None else m.sharding for m in traced._meta_tys_flat)
    return [b if a is _unspecified else a for a, b in zip(asked, own, strict=True)]


def result_shardings(traced: jax.stages.Traced) -> list[Sharding]:
    """Return the `out_shardings` of each result of `jax.jit(f).trace(...)`; None if unspecified."""
    return [None if s is _unspecified else s for s in traced._params["out_shardings"]]


def donated_arguments(traced: jax.stages.Traced) -> tuple[bool, ...]:
    """Return for each argument of `jax.jit(f).trace(...)` that is not static whether it is donated."""
    donated: tuple[bool, ...] = traced._params["donated_invars"]
    return donated


def device_count(traced: jax.stages.Traced) -> int:
    """Return the number of devices that `jax.jit(f).trace(...)` names by shardings or a mesh."""
    sizes = [_n_devices(s) for s in (*argument_shardings(traced), *result_shardings(traced))]
    return max([1, traced._params["ctx_mesh"].size, *sizes])


def _n_devices(sharding: Sharding) -> int:
    mesh = getattr(sharding, "mesh", None)
    return len(getattr(sharding, "device_set", ())) if mesh is None else int(mesh.size)


def sharding_text(sharding: Sharding, ndim: int) -> str:
    """Return an array's sharding over the devices in order, as HLO writes it; "" if it is not sharded.

    Equal texts mean equal layouts, whatever the names of the mesh axes.
    """
    if sharding is None or not hasattr(sharding, "_to_xla_hlo_sharding"):
        return ""
    of_hlo = sharding._to_xla_hlo_sharding(ndim)
    on_host = " on the host" if sharding.memory_kind == "pinned_host" else ""
    return ("" if of_hlo.is_replicated() else str(of_hlo)) + on_host


def in_avals(jaxpr: Jaxpr) -> list[Aval]:
    return [v.aval for v in jaxpr.invars]


def out_avals(jaxpr: Jaxpr) -> list[Aval]:
    return [v.aval for v in jaxpr.outvars]


def slice_types(xs: Sequence[Array]) -> list[Aval]:
    """Return the types of these arrays' slices along their first axis, with their shardings.

    These are the types that a loop's step reads, with their varying axes of a `shard_map`.
    """
    if any(x.shape[0] == 0 for x in xs):
        return [_core.mapped_aval(x.shape[0], 0, jax.typeof(x)) for x in xs]
    jaxpr, _, _ = trace_call(
        lambda xs: [jax.lax.dynamic_index_in_dim(x, 0, 0, False) for x in xs], list(xs)
    )
    return out_avals(jaxpr)


def zeros(aval: Aval, leading: Sequence[Size] = ()) -> Array:
    """Return zeros of a type, with its sharding and varying axes, and these further leading axes."""
    for size in reversed(leading):
        aval = _core.unmapped_aval(size, 0, aval)
    if jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended):
        return jax.lax.full(aval.shape, 0, aval.dtype)
    with _mesh_of(aval):
        return _ad_util.zeros_like_aval(aval.update(weak_type=False))


def filled(aval: Aval, number: Array) -> Array:
    """Return an array of a type, with its sharding, that a number fills."""
    is_sharded = not aval.sharding.mesh.empty
    with _mesh_of(aval):
        return jax.lax.broadcast(
            number, aval.shape, out_sharding=aval.sharding if is_sharded else None
        )


def _mesh_of(aval: Aval) -> contextlib.AbstractContextManager[object]:
    """Use the mesh of a type: JAX 0.12 drops a sharding whose mesh is not the one in use."""
    mesh = aval.sharding.mesh
    return contextlib.nullcontext() if mesh.empty else jax.sharding.use_abstract_mesh(mesh)


def has_explicit_axes() -> bool:
    """Return whether the mesh in use has axes of type `jax.sharding.AxisType.Explicit`."""
    return bool(jax.sharding.get_abstract_mesh().explicit_axes)


def in_mesh(x: Array) -> Array:
    """Return a constant whose type has the mesh in use, which JAX does not add to constants.

    Without it, JAX cannot batch loops and branches over an explicit axis of the mesh.
    """
    if not has_explicit_axes() or not jax.typeof(x).sharding.mesh.empty:
        return x
    return x ^ False if x.dtype == bool else x + jax.numpy.zeros_like(x)


def varying_axes(*values: Array) -> frozenset[str]:
    """Return the axes of a `shard_map` that any of the values (or types) varies over."""
    types = (x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x) for x in values)
    return frozenset().union(*(t.mat.varying for t in types if hasattr(t, "mat")))


def varying_as(x: Array, *others: Array) -> Array:
    """Return an array whose type also varies over the axes that the others vary over."""
    axes = varying_axes(*others) - varying_axes(x)
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x
