"""The only file that touches JAX's internals: what `remat` needs of them, under stable names.

Everything else in the package imports from here, so that a change in JAX is met in one place. Where
JAX 0.10 and 0.12 differ there is one short function, and it says from which version on the older
half can be deleted. Two differences recur:

* From 0.12 on a `Jaxpr` carries its constants (`ClosedJaxpr` is the same class); before, a
  `ClosedJaxpr` wraps an open `Jaxpr`. Everywhere in `remat` a region is a jaxpr *without* constants:
  `detach_consts` turns them into leading inputs.
* From 0.12 on rules for dead-code elimination, state discharge and transposition take or return one
  thing more; the `register_*` functions adapt one rule to both.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax._src import (
    ad_checkpoint as _ad_checkpoint,
    ad_util as _ad_util,
    api_util as _api_util,
    checkify as _checkify,
    config as _config,
    core as _core,
    dtypes as _dtypes,
    effects as _effects,
    pjit as _pjit,
    source_info_util as _source_info,
    traceback_util as _traceback_util,
    tree_util as _tree_util,
    util as _util,
)
from jax._src.dispatch import (
    ArrayCopySemantics as _ArrayCopySemantics,
    device_put_p as _device_put_p,
)
from jax._src.interpreters import (
    ad as _ad,
    batching as _batching,
    mlir as _mlir,
    partial_eval as _pe,
)
from jax._src.lax import convolution as _convolution, lax as _lax
from jax._src.lax.control_flow import loops as _loops
from jax._src.lib.mlir import ir as _ir
from jax._src.lib.mlir.dialects import hlo as _hlo
from jax._src.sharding_impls import UNSPECIFIED as _unspecified
from jax._src.state import discharge as _discharge
from jax._src.state.types import AbstractRef as AbstractRef
from jax.experimental.key_reuse import _core as _key_reuse

try:
    from jax._src.flattree import treedef_args_to_ft as _flat_tree
except ImportError:  # delete with JAX 0.10, where FlatTree is in tree_util

    def _flat_tree(in_tree: Any, avals: Sequence[Any]) -> Any:
        return _tree_util.FlatTree(tuple(avals), in_tree, False)


def version_tuple(version: str) -> tuple[int, ...]:
    """The leading integers of a version.

    >>> version_tuple("0.12.0.1"), version_tuple("0.11.1.dev2026")
    ((0, 12, 0, 1), (0, 11, 1))
    """
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


JAX_VERSION = version_tuple(jax.__version__)
JAXLIB_VERSION = version_tuple(jaxlib.__version__)
# Delete what depends on this when JAX < 0.12 is no longer supported.
_JAXPRS_CARRY_CONSTS = not hasattr(_core, "ClosedJaxpr") or _core.ClosedJaxpr is _core.Jaxpr

# --------------------------------------------------------------------------------------------------
# Names that are the same in every supported version

Jaxpr: TypeAlias = _core.Jaxpr
JaxprEqn: TypeAlias = _core.JaxprEqn
Var: TypeAlias = _core.Var
Literal: TypeAlias = _core.Literal
Primitive: TypeAlias = _core.Primitive
ShapedArray: TypeAlias = _core.ShapedArray
Tracer: TypeAlias = _core.Tracer
Zero: TypeAlias = _ad_util.Zero
Offloadable: TypeAlias = _pe.Offloadable
Saveable = _pe.Saveable
Recompute = _pe.Recompute
RecomputeType: TypeAlias = _pe.RecomputeType
SaveableType: TypeAlias = _pe.SaveableType
ConcretizationTypeError: TypeAlias = _core.ConcretizationTypeError
as_case = _pe.ensure_enum

typeof = _core.typeof
eval_jaxpr = _core.eval_jaxpr
check_jaxpr = _core.check_jaxpr
positional_effects = _core.positional_effects
weakref_lru_cache = _util.weakref_lru_cache
merge_lists = _util.merge_lists
split_list = _util.split_list
wraps = _util.wraps
api_boundary = _traceback_util.api_boundary
broadcast_prefix = _tree_util.broadcast_prefix
extend_name_stack = _source_info.extend_name_stack
unflatten = jax.tree.unflatten

name_p = _ad_checkpoint.name_p
dot_general_p = _lax.dot_general_p
conv_general_dilated_p = _convolution.conv_general_dilated_p
reduce_precision_p = _lax.reduce_precision_p

# How JAX of this version words its refusal; code that matches on the text keeps working.
EFFECTS_NOT_SUPPORTED = (
    "Effects not supported in AD of `checkpoint`/`remat`"
    if JAX_VERSION >= (0, 11)
    else "Effects not supported in partial-eval of `checkpoint`/`remat`"
)


def exclude_from_tracebacks(filename: str) -> None:
    """Keep a file of ours out of user tracebacks and out of the source lines of equations."""
    _source_info.register_exclusion(filename)
    _traceback_util.register_exclusion(filename)


exclude_from_tracebacks(__file__)


def checks_enabled() -> bool:
    return bool(_config.enable_checks.value)


def logs_residuals() -> bool:
    """Whether the user asked JAX to log what checkpointed functions save."""
    return bool(_config.log_checkpoint_residuals.value)


# --------------------------------------------------------------------------------------------------
# Tracing


def flatten_arguments(tree: Any) -> tuple[list[Any], Any]:
    """Flatten a call's `(args, kwargs)` as JAX's own transformations do."""
    return _tree_util.tracing_registry.flatten(tree)


def debug_info(
    fun: Callable, args: Sequence, kwargs: dict, argnums: Sequence[int], argnames: Sequence[str]
) -> Any:
    """Where a function comes from and how its arguments are called, for error messages."""
    return _api_util.debug_info(
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
    """What the leaves of a call's arguments are called, `params['w']` say; static ones left out."""
    names = debug_info(fun, args, kwargs, argnums, argnames).arg_names
    if names is None or len(names) != n_leaves:
        return tuple(f"at flattened index {i}" for i in range(n_leaves))
    return tuple(name or f"at flattened index {i}" for i, name in enumerate(names))


def static_arguments(fun: Callable) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Numbers and names of the arguments that a jitted function takes as static."""
    info = getattr(fun, "_jit_info", None)
    return (
        (tuple(info.static_argnums), tuple(info.static_argnames)) if info is not None else ((), ())
    )


def abstractify(x: Any) -> Any:
    return _core.shaped_abstractify(x)


def check_ref_arguments(debug: Any, avals: Sequence[Any], leaves: Sequence[Any]) -> None:
    """Refuse refs that are passed twice or belong to a transformation under way."""
    _api_util.check_no_transformed_refs_args(lambda: debug, leaves)
    # 0.11: only then can a jaxpr check it; delete the condition with 0.10.
    if JAX_VERSION >= (0, 11) and _config.mutable_array_checks.value:
        _api_util.check_no_aliased_ref_args(lambda: debug, avals, leaves)


def check_captured_refs(debug: Any, consts: Sequence[Any], leaves: Sequence[Any]) -> None:
    """Refuse a ref that is both an argument and closed over."""
    if JAX_VERSION >= (0, 11) and _config.mutable_array_checks.value:
        _api_util._check_no_aliased_closed_over_refs(debug, consts, leaves)


def trace(
    fun: Callable, in_tree: Any, avals: Sequence[Any], debug: Any
) -> tuple[Jaxpr, tuple[Any, ...], Any]:
    """Trace `fun` to a jaxpr whose closed-over values are its leading inputs.

    Returns the jaxpr, the closed-over values, and the tree of the result.
    """
    closed, out = _pe.trace_to_jaxpr(fun, _flat_tree(in_tree, list(avals)), debug)
    jaxpr, consts = detach_consts(closed)
    return jaxpr, consts, out.tree


def detach_consts(closed: Any) -> tuple[Jaxpr, tuple[Any, ...]]:
    """A jaxpr with its constants as leading inputs, and the constants."""
    inner = closed if _JAXPRS_CARRY_CONSTS else closed.jaxpr
    return _pe.convert_constvars_jaxpr(inner), tuple(closed.consts)


def close(jaxpr: Jaxpr) -> Any:
    """The same jaxpr as one that is closed over nothing."""
    return _pe.close_jaxpr(jaxpr)


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """The equations of a jaxpr that may be closed."""
    return jaxpr if isinstance(jaxpr, _core.Jaxpr) else jaxpr.jaxpr


def jaxprs_of(eqn: JaxprEqn) -> Iterator[Any]:
    """The jaxprs in an equation's parameters, whatever they are for."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if is_jaxpr(item):
                yield item


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter is a jaxpr, closed or not."""
    return isinstance(value, _core.Jaxpr) or (hasattr(value, "jaxpr") and hasattr(value, "consts"))


def has_body(eqn: JaxprEqn) -> bool:
    """Whether the equation runs jaxprs of its own (a loop, branches, a call) that are cut with it.

    The update function of a scatter, say, belongs to its primitive.
    """
    return eqn.primitive in _pe.partial_eval_jaxpr_custom_rules and any(jaxprs_of(eqn))


def bodies_of(eqn: JaxprEqn) -> Iterator[Any]:
    """The jaxprs that an equation runs."""
    return jaxprs_of(eqn) if has_body(eqn) else iter(())


def new_eqn(
    invars: Sequence[Any],
    outvars: Sequence[Var],
    primitive: Primitive,
    params: dict,
    like: JaxprEqn | None,
) -> JaxprEqn:
    """An effect-free equation that takes source and context from another, if there is one."""
    context = () if like is None else (like.source_info, like.ctx)
    return _pe.new_jaxpr_eqn(list(invars), list(outvars), primitive, params, set(), *context)


def new_call(
    invars: Sequence[Any],
    outvars: Sequence[Var],
    primitive: Primitive,
    params: dict,
    like: JaxprEqn | None,
) -> JaxprEqn:
    """An equation with the effects of its parameter `jaxpr`; source and context are another's."""
    effects = _core.eqn_effects(params["jaxpr"], list(invars))
    context = () if like is None else (like.source_info, like.ctx)
    return _pe.new_jaxpr_eqn(list(invars), list(outvars), primitive, params, effects, *context)


def jaxpr_of_equation(eqn: JaxprEqn) -> Jaxpr:
    """A jaxpr of one equation alone, which takes the equation's operands."""
    invars = list(dict.fromkeys(v for v in eqn.invars if is_var(v)))
    outvars = [v for v in eqn.outvars if type(v).__name__ != "DropVar"]
    debug = _api_util.debug_info("equation", lambda: None, (), {})
    return _core.Jaxpr([], invars, outvars, [eqn], eqn.effects, debug.with_unknown_names())


def new_var(aval: Any) -> Var:
    return _core.Var(aval)


class HostCopy(NamedTuple):
    """A value's copy in the host's memory, and the equations that make it and bring it back."""

    var: Var
    store: JaxprEqn
    fetch: JaxprEqn


def host_copy(v: Var, like: JaxprEqn | None) -> HostCopy:
    """A copy of an array in the host's pinned memory; source and context of `like` if given."""
    space = _core.MemorySpace
    copy = new_var(v.aval.update(memory_space=space.Host))
    store = new_eqn([v], [copy], _device_put_p, _copy_params(space.Host), like)
    fetch = new_eqn([copy], [v], _device_put_p, _copy_params(space.Device), like)
    return HostCopy(copy, store, fetch)


def _copy_params(space: Any) -> dict[str, Any]:
    semantics = (_ArrayCopySemantics.ALWAYS_COPY,)
    return {"devices": (space,), "srcs": (None,), "copy_semantics": semantics}


def can_be_on_host(aval: Any) -> bool:
    """Whether values of this type can be copied to the host's memory and back: arrays on a device."""
    if getattr(aval, "memory_space", None) is not _core.MemorySpace.Device:
        return False
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def replace_body(eqn: JaxprEqn, old: Any, new_equations: Jaxpr) -> JaxprEqn:
    """The equation with one of its jaxprs replaced by another of the same type."""
    replacement = (
        new_equations if isinstance(old, _core.Jaxpr) else old.replace(jaxpr=new_equations)
    )

    def swap(value: Any) -> Any:
        if value is old:
            return replacement
        if type(value) in (tuple, list):
            return type(value)(swap(item) for item in value)
        return value

    return eqn.replace(params={name: swap(value) for name, value in eqn.params.items()})


def checkpoint_name_of(eqn: JaxprEqn) -> str | None:
    """The name that `checkpoint_name` gave to an equation's result, if that is what it is."""
    if eqn.primitive is name_p:
        return eqn.params["name"]
    # Under `jax_remat3` a name is an object, not an equation parameter.
    inner = eqn.params.get("_prim")
    if inner is not None and type(inner).__name__ in ("CheckpointName", "CheckpointNameFwd"):
        return inner.name
    return None


def name_stack_of(eqn: JaxprEqn) -> str:
    """The names of the scopes and modules an equation stands in, without JAX's transformations.

    `jvp(encoder)/layer_0` is `encoder/layer_0`: who differentiates does not change where a value is.
    """
    names = [
        entry.name
        for entry in eqn.source_info.name_stack.stack
        if type(entry).__name__ == "Scope" and entry.name
    ]
    return "/".join(names)


def is_transposed(eqn: JaxprEqn) -> bool:
    """Whether JAX made the equation by transposing a linear one: it computes with cotangents."""
    return any(
        type(entry).__name__ == "Transform" and entry.name == "transpose"
        for entry in eqn.source_info.name_stack.stack
    )


def is_recomputation(eqn: JaxprEqn) -> bool:
    """Whether JAX's partial evaluation put the equation into a region to compute it once more."""
    return any(
        type(entry).__name__ == "Scope" and entry.name == "rematted_computation"
        for entry in eqn.source_info.name_stack.stack
    )


def source_line_of(eqn: JaxprEqn) -> str:
    """`file:line:column (function)` of the user's code that made an equation."""
    return _source_info.summarize(eqn.source_info)


def has_hidden_rules(eqn: JaxprEqn) -> bool:
    """Whether differentiating the equation runs user code that its jaxpr does not show."""
    return eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def inline_calls(jaxpr: Jaxpr, is_call: Callable[[JaxprEqn], Any]) -> Jaxpr:
    """Write calls out, at the top level and inside each other.

    `is_call(eqn)` is the jaxpr to write in place of an equation, or None. Operations keep the names
    of the scopes that their calls stand in.
    """
    eqns: list[JaxprEqn] = []

    def write(body: Jaxpr, names: dict[Var, Any], wanted: dict[Var, Var], stack: Any) -> None:
        def look(v: Any) -> Any:
            return names.get(v, v) if is_var(v) else v

        def result(v: Var) -> Var:
            if v in wanted or body is jaxpr or is_dropped(v):
                return wanted.get(v, v)
            return new_var(v.aval)  # a body may be written more than once

        for eqn in body.eqns:
            invars = [look(v) for v in eqn.invars]
            outvars = [result(v) for v in eqn.outvars]
            inner = is_call(eqn)
            if inner is None:
                names.update(zip(eqn.outvars, outvars))
                new = eqn.replace(invars=invars, outvars=outvars)
                if stack is not None:
                    info = eqn.source_info.replace(name_stack=_joined(stack, eqn))
                    new = new.replace(source_info=info)
                eqns.append(new)
                continue
            inner_names = dict(zip(inner.invars, invars))
            made = {v for e in inner.eqns for v in e.outvars}
            inner_wanted: dict[Var, Var] = {}
            for v, final in zip(inner.outvars, outvars):
                if is_var(v) and v in made and not is_dropped(final):
                    inner_wanted.setdefault(v, final)
            write(inner, inner_names, inner_wanted, _joined(stack, eqn))
            for outer, v in zip(eqn.outvars, inner.outvars):
                names[outer] = inner_names.get(v, v) if is_var(v) else v

    names: dict[Var, Any] = {}
    write(jaxpr, names, {}, None)
    outvars = [names.get(v, v) if is_var(v) else v for v in jaxpr.outvars]
    return jaxpr_of(jaxpr.invars, outvars, eqns, jaxpr)


def scan_arity(eqn: JaxprEqn) -> tuple[int, int]:
    """How many constants and how many carries a `scan` equation has."""
    if "ft_in" in eqn.params:  # 0.12; delete the other half with 0.11
        n_consts, n_carry, _ = (len(part) for part in eqn.params["ft_in"].unpack())
        return n_consts, n_carry
    return eqn.params["num_consts"], eqn.params["num_carry"]


def written_out(jaxpr: Jaxpr, invars: Sequence[Any], outvars: Sequence[Var]) -> list[JaxprEqn]:
    """The equations of a jaxpr on other operands, with results under other names."""
    names: dict[Var, Any] = dict(zip(jaxpr.invars, invars))
    made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    taken: set[Var] = set()
    for inner, outer in zip(jaxpr.outvars, outvars):
        assert is_var(inner) and inner in made and inner not in taken, "a result passed through"
        taken.add(inner)
        names[inner] = outer
    eqns = []
    for eqn in jaxpr.eqns:
        ins = [names.get(v, v) if is_var(v) else v for v in eqn.invars]
        eqns.append(eqn.replace(invars=ins, outvars=[names.get(v, v) for v in eqn.outvars]))
    return eqns


def _joined(stack: Any, eqn: JaxprEqn) -> Any:
    own = eqn.source_info.name_stack
    return own if stack is None else stack + own


def is_dropped(v: Any) -> bool:
    """Whether a result of an equation is thrown away."""
    return isinstance(v, _core.DropVar)


def is_plain_jit(eqn: JaxprEqn) -> bool:
    """Whether the equation is a call of a jitted function that asks for nothing of its own."""
    if eqn.primitive is not _pjit.jit_p:
        return False
    params = eqn.params
    unspecified = all(
        s is _unspecified for s in (*params["in_shardings"], *params["out_shardings"])
    )
    layouts = all(
        x is None for x in (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    )
    return unspecified and layouts and not any(params.get("donated_invars", ()))


def scan_body(eqn: JaxprEqn) -> Jaxpr | None:
    """The body of a `scan` equation that closes over nothing."""
    if eqn.primitive.name != "scan":
        return None
    body = eqn.params["jaxpr"]
    return None if getattr(body, "consts", None) else open_jaxpr(body)


# --------------------------------------------------------------------------------------------------
# Tracing with values at hand


def concrete_value(x: Any) -> Any:
    """The value behind an argument, through differentiation, or None where there is none yet."""
    return _core.to_concrete_value(x)


class _ConcreteTracer(_pe.DynamicJaxprTracer):
    """A tracer that Python may ask for its value (`if x > 0`, `int(n)`, `np.asarray(x)`)."""

    __slots__ = ()

    def to_concrete_value(self) -> Any:
        return self._trace.value_of(self)

    def _number(self) -> Any:
        """The value as a NumPy array of the traced type, or None."""
        value = self.to_concrete_value()
        if value is None or jnp.issubdtype(self.aval.dtype, jax.dtypes.extended):
            return None
        return np.asarray(value, dtype=self.aval.dtype)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        number = self._number()
        if number is None:
            return super().__array__(*args, **kwargs)
        return number.__array__(*args, **kwargs)

    def __float__(self) -> float:
        number = self._number()
        return super().__float__() if number is None else float(number)

    def __complex__(self) -> complex:
        number = self._number()
        return super().__complex__() if number is None else complex(number)

    def __format__(self, spec: str) -> str:
        number = self._number() if spec and self.aval.shape == () else None
        return super().__format__(spec) if number is None else format(number[()], spec)

    def item(self, *args: Any) -> Any:
        number = self._number()
        return self.aval._item(self) if number is None else number.item(*args)

    def tolist(self) -> Any:
        number = self._number()
        return self.aval.tolist(self) if number is None else number.tolist()


_core.pytype_aval_mappings[_ConcreteTracer] = lambda tracer: tracer.aval


class _Unavailable(Exception):
    """A value depends on an argument that has no value yet."""


class _ConcreteTrace(_pe.DynamicJaxprTrace):
    """Stages a function out to a jaxpr, and evaluates those of its values that Python asks for.

    A tracer knows the equation that makes it, so its value is found by evaluating that equation's
    ancestors; each is evaluated at most once, and none that no decision depends on.
    """

    __slots__ = ("_values",)

    def __init__(self, debug: Any, parent_trace: Any):
        super().__init__(debug, parent_trace=parent_trace)
        self._values: dict[Var, Any] = {}

    def var_to_tracer(self, var: Any, source_info: Any, parent: Any = None) -> Any:
        plain = super().var_to_tracer(var, source_info, parent)
        return self._concrete(plain)

    def new_arg(self, aval: Any, source_info: Any) -> Any:
        return self._concrete(super().new_arg(aval, source_info))

    def _concrete(self, plain: Any) -> Any:
        if getattr(plain, "mutable_qdd", None) is not None:
            return plain
        return _ConcreteTracer(self, plain.aval, plain.val, plain._line_info, plain.parent)

    def argument(self, aval: Any, value: Any, source_info: Any) -> Any:
        tracer = self.new_arg(aval, source_info)
        if value is not None:
            self._values[tracer.val] = value
        return tracer

    def value_of(self, tracer: Any) -> Any:
        try:
            with _core.eval_context():
                return self._evaluate(tracer)
        except _Unavailable:
            return None

    def _evaluate(self, tracer: Any) -> Any:
        # An explicit stack: a chain of equations may be longer than Python's recursion limit.
        todo = [tracer]
        while todo:
            t = todo[-1]
            if self._known(t) is not None:
                todo.pop()
                continue
            eqn = t.parent
            if eqn is None or eqn.effects:
                raise _Unavailable
            missing = [u for u in eqn.in_tracers if self._known(u) is None]
            if missing:
                todo.extend(missing)
                continue
            params = eqn.primitive.get_bind_params(eqn.params)
            with eqn.ctx.manager:
                out = eqn.primitive.bind(*map(self._known, eqn.in_tracers), **params)
            outs = out if eqn.primitive.multiple_results else [out]
            self._values.update(zip(eqn.outvars, outs))
        return self._known(tracer)

    def _known(self, tracer: Any) -> Any:
        atom = tracer.val
        if isinstance(atom, _core.Literal):
            return atom.val
        if atom in self._values:
            return self._values[atom]
        const = self.frame.constvar_to_val.get(atom)
        return None if const is None else concrete_value(const)


def trace_concretely(
    fun: Callable, in_tree: Any, avals: Sequence[Any], values: Sequence[Any], debug: Any
) -> tuple[Jaxpr, tuple[Any, ...], Any]:
    """Like `trace`, with the values of the arguments (None: not known) open to Python control flow.

    The jaxpr holds the branch that these values take.
    """
    parent = _core.trace_ctx.trace
    trace_ = _ConcreteTrace(debug, parent)
    with _core.ensure_no_leaks(trace_), _source_info.reset_name_stack():
        source = _source_info.current()
        tracers = [trace_.argument(aval, value, source) for aval, value in zip(avals, values)]
        with _core.set_current_trace(trace_):
            args, kwargs = jax.tree.unflatten(in_tree, tracers)
            answer = fun(*args, **kwargs)
            debug = debug.set_result_paths(answer)
            leaves, out_tree = flatten_arguments(answer)
            del answer, args, kwargs
        _pe._check_returned_jaxtypes(debug, leaves)
        leaves = [_dtypes.canonicalize_value(leaf) for leaf in leaves]
        outs = [trace_.to_jaxpr_tracer(leaf, source) for leaf in leaves]
        _pe._check_no_returned_refs(debug, outs)
        opened, consts = trace_.frame.to_jaxpr(trace_, outs, debug, source)
        trace_._values.clear()
        trace_.invalidate()
        del trace_, tracers, outs, leaves
    return _pe.convert_constvars_jaxpr(opened), tuple(consts), out_tree


# --------------------------------------------------------------------------------------------------
# Differentiation


def jvp_of_jaxpr(
    jaxpr: Jaxpr, nonzeros: Sequence[bool]
) -> tuple[Jaxpr, tuple[Any, ...], Sequence[bool]]:
    """The jaxpr of the derivative: primals and nonzero tangents in, primals and tangents out."""
    closed, out_nonzeros = _ad.jvp_jaxpr(close(jaxpr), list(nonzeros), False)
    return (*detach_consts(closed), out_nonzeros)


def zero_tangent(primal: Any) -> Zero:
    return _ad_util.p2tz(primal)


class PartialEval(NamedTuple):
    """A jaxpr cut in two. `known` returns its results and the residuals that `staged` takes."""

    known: Jaxpr
    staged: Jaxpr
    outs_unknown: list[bool]
    outs_staged: list[bool]
    n_residuals: int


def partial_eval(jaxpr: Jaxpr, ins_unknown: Sequence[bool], policy: Callable) -> PartialEval:
    """Cut a jaxpr by what is unknown; every input is available on the far side of the cut."""
    return PartialEval(
        *_pe.partial_eval_jaxpr_custom(
            jaxpr, list(ins_unknown), [True] * len(ins_unknown), False, False, policy
        )
    )


def dce(jaxpr: Jaxpr, used: Sequence[bool]) -> tuple[Jaxpr, list[bool]]:
    """Drop what the used results do not need. Returns also which inputs remain."""
    return _pe.dce_jaxpr(jaxpr, list(used))


def rebuild(
    jaxpr: Jaxpr,
    *,
    invars: Sequence[Var] | None = None,
    outvars: Sequence[Any] | None = None,
    eqns: Sequence[JaxprEqn] | None = None,
) -> Jaxpr:
    """The jaxpr with some of its parts replaced; argument and result names are dropped if those are."""
    parts: dict[str, Any] = {}
    if invars is not None or outvars is not None:
        parts["debug_info"] = jaxpr.debug_info.with_unknown_names()
    if invars is not None:
        parts["invars"] = list(invars)
    if outvars is not None:
        parts["outvars"] = list(outvars)
    if eqns is not None:
        parts["eqns"] = list(eqns)
    return jaxpr.replace(**parts)


def jaxpr_of(
    invars: Sequence[Var], outvars: Sequence[Any], eqns: Sequence[JaxprEqn], like: Jaxpr
) -> Jaxpr:
    """A jaxpr of these equations; what it is called in messages is taken from another."""
    effects = _pe.make_jaxpr_effects((), invars, outvars, eqns)
    return like.replace(
        invars=list(invars),
        outvars=list(outvars),
        eqns=list(eqns),
        effects=effects,
        debug_info=like.debug_info.with_unknown_names(),
    )


class _Transposed(NamedTuple):
    jaxpr: Jaxpr
    consts: tuple[Any, ...]
    ins_zero: list[bool]
    out_tree: Any


@weakref_lru_cache
def transpose(jaxpr: Jaxpr, linear: tuple[bool, ...], outs_zero: tuple[bool, ...]) -> _Transposed:
    """The jaxpr from nonlinear inputs and nonzero cotangents to the linear inputs' cotangents.

    The nonlinear part is evaluated first: this is where recomputation is written down.
    """
    closed = close(jaxpr)
    nonlinear_avals = [v.aval for v, lin in zip(jaxpr.invars, linear) if not lin]
    ct_avals = [v.aval.to_ct_aval() for v, zero in zip(jaxpr.outvars, outs_zero) if not zero]
    seen: dict[str, Any] = {}

    def transposed(*args: Any) -> Any:
        nonlinear, cts_given = split_list(args, [len(nonlinear_avals)])
        with _mutable_array_checks_off():
            known, lin, _, _, forwarded = _pe.partial_eval_jaxpr_nounits_fwd(
                closed, list(linear), False
            )
        with extend_name_stack("rematted_computation"):
            fresh = _core.jaxpr_as_fun(known)(*nonlinear)
        residuals = _util.subs_list(forwarded, nonlinear, fresh)
        given = iter(cts_given)
        cts = [
            Zero(v.aval.to_ct_aval()) if zero else next(given)
            for v, zero in zip(jaxpr.outvars, outs_zero)
        ]
        linear_avals = lin.in_avals[len(residuals) :]
        targets = [_ad.UndefinedPrimal(aval.to_ct_aval()) for aval in linear_avals]
        in_cts, logs = _backward(lin, [*residuals, *targets], cts)
        in_cts = in_cts[len(residuals) :]
        seen["ins_zero"] = [type(ct) is Zero for ct in in_cts]
        leaves, seen["out_tree"] = jax.tree.flatten(
            ([ct for ct in in_cts if type(ct) is not Zero], logs)
        )
        return leaves

    debug = jaxpr.debug_info.with_unknown_names()
    args = (*nonlinear_avals, *ct_avals)
    result, consts, _ = trace(transposed, jax.tree.structure((args, {})), args, debug)
    return _Transposed(result, consts, seen["ins_zero"], seen["out_tree"])


def _mutable_array_checks_off() -> Any:
    # 0.11 no longer refuses refs here; delete with 0.10.
    return (
        contextlib.nullcontext() if JAX_VERSION >= (0, 11) else _config.mutable_array_checks(False)
    )


def _backward(lin: Any, args: Sequence[Any], cts: Sequence[Any]) -> tuple[list[Any], dict]:
    # 0.11 added logs of the backward pass; delete the second half with 0.10.
    if JAX_VERSION >= (0, 11):
        return _ad.backward_pass(lin, False, lin.consts, args, cts, return_logs=True)
    return _ad.backward_pass(lin.jaxpr, False, lin.consts, args, cts), {}


def is_linear_input(x: Any) -> bool:
    return isinstance(x, _ad.GradAccum)


# --------------------------------------------------------------------------------------------------
# Registering a primitive's rules


def register_jvp(primitive: Primitive, rule: Callable) -> None:
    _ad.primitive_jvps[primitive] = rule


def register_transpose(primitive: Primitive, rule: Callable) -> None:
    """`rule(cotangents, *args, **params)`: linear arguments are accumulators."""
    _ad.fancy_transposes[primitive] = rule


def register_linear_transpose(primitive: Primitive, rule: Callable) -> None:
    _ad.deflinear2(primitive, rule)


def register_batching(primitive: Primitive, rule: Callable) -> None:
    """`rule(axis_data, args, dims, **params) -> results, result dims`."""
    _batching.fancy_primitive_batchers[primitive] = rule


def batch_jaxpr(
    jaxpr: Jaxpr, axis_data: Any, dims: Sequence[Any]
) -> tuple[Jaxpr, tuple[Any, ...], list[int | None]]:
    """The jaxpr over one more axis, in front of every result that has it."""
    closed, batched = _batching.batch_jaxpr_axes(
        close(jaxpr), axis_data, dims, [_batching.zero_if_mapped] * len(jaxpr.outvars)
    )
    return (*detach_consts(closed), [0 if b else None for b in batched])


def register_partial_eval(primitive: Primitive, rule: Callable) -> None:
    """`rule(trace, *tracers, **params)`, when a function is linearized."""
    _pe.custom_partial_eval_rules[primitive] = rule


def register_nested_partial_eval(
    primitive: Primitive, update_params: Callable, halves: Callable[[JaxprEqn, Sequence[bool]], Any]
) -> None:
    """What becomes of the equation when the jaxpr it stands in is cut by somebody's policy.

    `update_params(ins_unknown, ins_staged, params_known, params_staged)`, unless `halves(eqn,
    ins_unknown)` gives a cut of its own, with the parameters of the equations of its two halves.
    """

    def updater(unknown: Any, staged: Any, *args: Any) -> tuple[dict, dict]:
        *_, params_known, params_staged = args
        return update_params(unknown, staged, params_known, params_staged)

    def rule(saveable: Any, unknown: Any, staged: Any, eqn: JaxprEqn) -> Any:
        own = halves(eqn, unknown)
        if own is None:
            return _pe.call_partial_eval_custom_rule(
                "jaxpr", updater, saveable, unknown, staged, eqn
            )
        return _equations_of_halves(primitive, unknown, staged, eqn, *own)

    _pe.partial_eval_jaxpr_custom_rules[primitive] = rule


def _equations_of_halves(
    primitive: Primitive,
    unknown: Sequence[bool],
    staged: Sequence[bool],
    eqn: JaxprEqn,
    cut: Any,
    params_known: dict,
    params_staged: dict,
) -> Any:
    residuals = [new_var(v.aval) for v in cut.backward.invars[: cut.n_residuals]]
    known = [v for v, u in zip(eqn.invars, unknown) if not u]
    known = [v for v, used in zip(known, cut.forward_inputs) if used]
    results = [v for v, u in zip(eqn.outvars, cut.outs_unknown) if not u]
    later = [v for v, used in zip(eqn.invars, cut.backward_inputs) if used]
    unknown_results = [v for v, u in zip(eqn.outvars, cut.outs_unknown) if u]

    forward = new_call(known, [*results, *residuals], primitive, params_known, eqn)
    backward = new_call([*residuals, *later], unknown_results, primitive, params_staged, eqn)
    # Inputs that the backward half takes must be kept by whoever holds the jaxpr.
    kept = [v for v, s, used in zip(eqn.invars, staged, cut.backward_inputs) if used and not s]
    kept = [v for v in kept if is_var(v)]
    unknown_outs = list(cut.outs_unknown)
    return forward, backward, unknown_outs, unknown_outs, [*kept, *residuals]


def known_tracers(tracers: Sequence[Any]) -> list[bool]:
    return [t.is_known() for t in tracers]


def known_values(tracers: Sequence[Any]) -> list[Any]:
    return [t.pval.get_known() for t in tracers if t.is_known()]


def stage_eqn(
    trace_: Any,
    primitive: Primitive,
    residuals: Sequence[Any],
    tracers: Sequence[Any],
    jaxpr: Jaxpr,
    params: dict,
) -> list[Any]:
    """Put one equation on residuals and tracers into the linear program that is being built."""
    ins = [trace_.new_instantiated_const(r) for r in residuals]
    ins += [trace_.instantiate_const(t) for t in tracers]
    outs = [_pe.JaxprTracer(trace_, _pe.PartialVal.unknown(v.aval), None) for v in jaxpr.outvars]
    recipe = _pe.new_eqn_recipe(
        trace_, ins, outs, primitive, params, positional_effects(jaxpr), _source_info.current()
    )
    for out in outs:
        out.recipe = recipe
    return outs


def disallowed_effects(jaxpr: Jaxpr) -> set[Any]:
    """The effects that must not happen twice."""
    return set(_effects.remat_allowed_effects.filter_not_in(jaxpr.effects))


def register_dce(
    primitive: Primitive,
    shrink: Callable[[JaxprEqn, list[bool], Jaxpr], dict],
    keeps_inputs: Callable[[JaxprEqn], bool],
) -> None:
    """Dead-code elimination for an equation whose parameter `jaxpr` is its body.

    `shrink(eqn, used_inputs, new_jaxpr)` gives the parameters of what remains; `keeps_inputs(eqn)`
    says that inputs stay, used or not.
    """

    def rule(used_outs: list[bool], *args: Any) -> tuple[list[bool], JaxprEqn | None]:
        *live_ins, eqn = args  # 0.11 added live_ins
        if not any(used_outs) and not _pe.has_effects(eqn, *live_ins):
            return [False] * len(eqn.invars), None
        keywords = {"live_inputs": live_ins[0]} if live_ins else {}
        keywords["instantiate"] = keeps_inputs(eqn)
        body, used_ins = _pe.dce_jaxpr(eqn.params["jaxpr"], used_outs, **keywords)
        if not any(used_ins) and not any(used_outs) and not _lasting_effects(body):
            return used_ins, None
        invars = [v for v, used in zip(eqn.invars, used_ins) if used]
        outvars = [v for v, used in zip(eqn.outvars, used_outs) if used]
        new = _pe.new_jaxpr_eqn(
            invars,
            outvars,
            primitive,
            shrink(eqn, used_ins, body),
            _core.eqn_effects(body, invars),
            eqn.source_info,
            eqn.ctx,
        )
        return used_ins, new

    _pe.dce_rules[primitive] = rule


def _lasting_effects(jaxpr: Jaxpr) -> bool:
    passing = (_core.NamedAxisEffect, _core.InternalMutableArrayEffect)
    return any(not isinstance(effect, passing) for effect in jaxpr.effects)


def register_discharge(primitive: Primitive, bind: Callable) -> None:
    """Turn refs among an equation's arguments into values; `bind(args, new_jaxpr, params)` rebinds."""

    def rule(*args: Any, jaxpr: Jaxpr, **params: Any) -> tuple[list[Any], list[Any]]:
        # 0.11 passes a context in place of the two tuples of avals; delete the latter with 0.10.
        if hasattr(args[0], "in_avals"):
            context, *values = args
            in_avals = context.in_avals
            discharged = _discharge.discharge_state(
                jaxpr, strip_memory_space=context.strip_memory_space
            )
        else:
            in_avals, _, *values = args
            discharged = _discharge.discharge_state(close(jaxpr))
        body, consts = detach_consts(discharged)
        results = bind((*consts, *values), body, len(consts), params)
        outs, refs = split_list(results, [len(jaxpr.outvars)])
        written = iter(refs)
        new_values = [next(written) if isinstance(a, AbstractRef) else None for a in in_avals]
        assert next(written, None) is None
        return new_values, outs

    _discharge.register_discharge_rule(primitive)(rule)


def register_checkify(primitive: Primitive, bind: Callable) -> None:
    """Thread checkify's errors through an equation; `bind(args, new_jaxpr, n_added, params)`."""

    # 0.12 passes a context in front; delete the other half with 0.11.
    n_contexts = 1 if hasattr(_checkify, "CheckifyContext") else 0

    def rule(*inputs: Any, jaxpr: Jaxpr, **params: Any) -> Any:
        context, (error, enabled, *values) = inputs[:n_contexts], inputs[n_contexts:]
        leaves, tree = jax.tree.flatten(error)
        args = (*leaves, *values)
        avals = tuple(typeof(x) for x in args)
        closed, out_tree, _ = _checkify.jaxpr_to_checkify_jaxpr(
            *context, close(jaxpr), enabled, tree, *avals
        )
        body, consts = detach_consts(closed)
        added = len(consts) + len(leaves)
        return jax.tree.unflatten(out_tree, bind((*consts, *args), body, added, params))

    _checkify.error_checks[primitive] = rule


def register_key_reuse(primitive: Primitive) -> None:
    """Let the key-reuse checker know: what a recomputation does with keys, the forward pass did."""

    def signature(eqn: JaxprEqn) -> Any:
        if eqn.params["differentiated"]:
            return _key_reuse.KeyReuseSignature()
        return _key_reuse.jaxpr_type_signature(eqn.params["jaxpr"])

    _key_reuse.key_reuse_signatures[primitive] = _key_reuse.dynamic_key_reuse_signature(signature)


def register_hijax(primitive: Primitive, bind: Callable) -> None:
    """Lower an equation on types that stand for several arrays to one on those arrays."""

    def is_high(*_: Any, jaxpr: Jaxpr, **__: Any) -> bool:
        return jaxpr.is_high

    def to_lojax(*args: Any, jaxpr: Jaxpr, **params: Any) -> Any:
        body, consts = detach_consts(_pe.lower_jaxpr2(close(jaxpr)))
        # 0.11 did away with mutable high types; delete the first half with 0.10.
        if JAX_VERSION >= (0, 11):
            flat = [lo for aval, x in zip(jaxpr.in_avals, args) for lo in aval.lower_val(x)]
        else:
            flat = [
                lo
                for aval, x in zip(jaxpr.in_aval_qdds, args)
                for lo in (aval.read_loval(x) if aval.has_qdd else aval.lower_val(x))
            ]
        return bind((*consts, *flat), body, None, params)

    primitive.is_high = is_high
    primitive.to_lojax = to_lojax


# --------------------------------------------------------------------------------------------------
# For loops: jaxprs of bodies, and primitives that are linear in some operands


def trace_call(fun: Callable, *args: Any) -> tuple[Jaxpr, list[Any], Any]:
    """`fun` as a jaxpr whose closed-over values are its leading inputs, those, and its result.

    `args` are pytrees of arrays or of their types; the result is a tree of types.
    """
    # A new function object each time, so that no cache hands out values closed over earlier.
    closed, out = jax.make_jaxpr(lambda *a: fun(*a), return_shape=True)(*args)
    jaxpr, consts = detach_consts(closed)
    return jaxpr, list(consts), out


def call_jaxpr(jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
    return eval_jaxpr(jaxpr, (), *args)


def argument_shardings(traced: Any) -> list[Any]:
    """How each argument of a traced step (`jax.jit(f).trace(...)`) is divided; None if nobody said.

    What `in_shardings` says comes before what the argument itself has. Static arguments are not
    among them.
    """
    asked = traced._params["in_shardings"]
    own = (m.aval.sharding if m.sharding is None else m.sharding for m in traced._meta_tys_flat)
    return [b if a is _unspecified else a for a, b in zip(asked, own, strict=True)]


def in_avals(jaxpr: Jaxpr) -> list[Any]:
    return [v.aval for v in jaxpr.invars]


def out_avals(jaxpr: Jaxpr) -> list[Any]:
    return [v.aval for v in jaxpr.outvars]


def slice_types(xs: Sequence[Any]) -> list[Any]:
    """The types of what a step reads of these arrays, with their sharding and varying axes."""
    if any(x.shape[0] == 0 for x in xs):
        return [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in xs]
    jaxpr, _, _ = trace_call(
        lambda xs: [jax.lax.dynamic_index_in_dim(x, 0, 0, False) for x in xs], list(xs)
    )
    return out_avals(jaxpr)


def zeros(aval: Any, leading: Sequence[int | None] = ()) -> Any:
    """Zeros of a type, with more leading axes; varying over the same axes of a `shard_map`."""
    made = jnp.zeros((*leading, *aval.shape), aval.dtype)
    varying: frozenset = getattr(getattr(aval, "mat", None), "varying", frozenset())
    return jax.lax.pcast(made, tuple(varying), to="varying") if varying else made


def dependents(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Which results of a jaxpr can have a derivative with respect to these inputs."""
    reached = {v for v, active in zip(jaxpr.invars, inputs) if active}
    for eqn in jaxpr.eqns:
        if any(is_var(v) and v in reached for v in eqn.invars):
            reached.update(v for v in eqn.outvars if has_tangent(v.aval))
    return [is_var(v) and v in reached for v in jaxpr.outvars]


def has_tangent(aval: Any) -> bool:
    """Whether values of this type can have a derivative: real and complex numbers."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def is_var(v: Any) -> bool:
    """Whether an operand or a result of a jaxpr is a variable and no literal."""
    return not isinstance(v, _core.Literal)


def is_zero(tangent: Any) -> bool:
    return type(tangent) is Zero


def is_undefined(x: Any) -> bool:
    """Whether an operand of an equation under transposition is one that it is linear in."""
    return _ad.is_undefined_primal(x)


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
    register_jvp(primitive, jvp)
    _ad.primitive_transposes[primitive] = transpose
    register_batching(primitive, batch)
    _mlir.register_lowering(primitive, _mlir.lower_fun(evaluate, multiple_results=True))


# --------------------------------------------------------------------------------------------------
# Lowering


LoweringContext: TypeAlias = _mlir.LoweringRuleContext


def register_lowering(primitive: Primitive, rule: Callable, **by_platform: Callable) -> None:
    """`rule(ctx, *args, **params)`, and others for some platforms."""

    def choose(ctx: LoweringContext, *args: Any, **params: Any) -> Any:
        if not by_platform:
            return rule(ctx, *args, **params)
        # JAX 0.10 fails to put per-platform rules of a primitive that is not cacheable into a module
        # for several platforms, over a tuple; so they are chosen between here.
        listed = ctx.replace(avals_out=list(ctx.avals_out))
        body = params["jaxpr"]
        outs = _mlir.lower_per_platform(
            listed, primitive.name, by_platform, rule, body.effects, *args, **params
        )
        if body.effects and listed.tokens_out is not None:
            ctx.set_tokens_out(listed.tokens_out)
        return outs

    # A rule that looks at what surrounds an equation must see each of its occurrences.
    _mlir.register_lowering(primitive, choose, cacheable=False)


def lower_inline(ctx: LoweringContext, jaxpr: Jaxpr, args: Sequence[Any]) -> Sequence[Any]:
    """Write a jaxpr's operations here, under the name scope `checkpoint`.

    They are written once for each jaxpr and then copied: JAX caches how it lowers an equation.
    """
    return _write(ctx, _as_equation(jaxpr), args, ctx.name_stack)


def _write(
    ctx: LoweringContext, jaxpr: Jaxpr, args: Sequence[Any], name_stack: Any
) -> Sequence[Any]:
    outs, tokens = _mlir.jaxpr_subcomp(
        ctx.module_context,
        jaxpr,
        name_stack,
        ctx.tokens_in,
        (),
        *args,
        dim_var_values=ctx.dim_var_values,
        const_lowering=ctx.const_lowering,
        outer_traceback=ctx.traceback,
    )
    ctx.set_tokens_out(tokens)
    return list(outs)


_body_p = _core.Primitive("remat_body")
_body_p.multiple_results = True


@weakref_lru_cache
def _as_equation(jaxpr: Jaxpr) -> Jaxpr:
    invars = [_core.Var(v.aval) for v in jaxpr.invars]
    outvars = [_core.Var(v.aval) for v in jaxpr.outvars]
    body = jaxpr.replace()  # a cached value must not keep its own key alive
    effects = _core.eqn_effects(body, invars)
    eqn = _core.new_jaxpr_eqn(invars, outvars, _body_p, {"jaxpr": body}, effects)
    return jaxpr.replace(
        invars=invars,
        outvars=outvars,
        eqns=[eqn],
        effects=effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def _lower_body(ctx: LoweringContext, *args: Any, jaxpr: Jaxpr) -> Sequence[Any]:
    return _write(ctx, jaxpr, args, ctx.name_stack.extend("checkpoint"))


_mlir.register_lowering(_body_p, _lower_body)


def lower_call(
    ctx: LoweringContext, jaxpr: Jaxpr, args: Sequence[Any], attributes: dict[str, str]
) -> Sequence[Any]:
    """Write a jaxpr as a function of its own and call it; the call carries frontend attributes."""
    effects = list(_effects.ordered_effects.filter_in(jaxpr.effects))
    outs, tokens = _mlir.call_lowering(
        "checkpoint",
        close(jaxpr),
        None,
        ctx.module_context,
        ctx.avals_in,
        ctx.avals_out,
        ctx.tokens_in.subset(effects),
        *args,
        dim_var_values=ctx.dim_var_values,
        const_lowering=ctx.const_lowering,
        attributes={key: _ir.StringAttr.get(value) for key, value in attributes.items()},
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(tokens))
    return list(outs)


def lower_barrier(ctx: LoweringContext, avals: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """An optimization barrier over values: none of the results exists before all of the inputs."""
    flat, _ = _mlir.ir_tree_registry.flatten(list(args))
    if not flat:
        return list(args)
    barrier = _hlo.OptimizationBarrierOp(flat)
    types = [_mlir._aval_to_ir_types(ctx.module_context, aval) for aval in avals]
    _, tree = _mlir.ir_tree_registry.flatten(types)
    flat_avals = [
        aval for aval, ir in zip(avals, types) for _ in _mlir.ir_tree_registry.flatten(ir)[0]
    ]
    results = [
        _mlir.lower_with_sharding_in_types(ctx, result, aval)
        for result, aval in zip(barrier.results, flat_avals)
    ]
    return tree.unflatten(results)


def alone_in_loop_body(ctx: LoweringContext, args: Sequence[Any]) -> bool:
    """Whether what is being written stands in a loop's body, on arguments of the body that nothing
    before it there has computed with.

    Then the body does not hold the forward operations that a recomputation from these values
    repeats (they are in another loop's body), and there is nothing to merge it with.
    """
    block = _ir.InsertionPoint.current.block
    if not _is_loop_body(block.owner) or not _lowers_a_loop():
        return False
    flat, _ = _mlir.ir_tree_registry.flatten(list(args))
    roots = [_picked_from(value, block) for value in flat]
    return all(root is not None and _only_picked(root) for root in roots)


def _is_loop_body(owner: Any) -> bool:
    if owner.operation.name == "stablehlo.while":
        return True
    # The body of a scan is written as a function of its own, which the loop calls: `closed_call` in
    # JAX 0.10, `eval_jaxpr` later.
    name = owner.attributes["sym_name"].value if "sym_name" in owner.attributes else ""
    return name.startswith(("closed_call", "eval_jaxpr"))


def _lowers_a_loop() -> bool:
    """Whether JAX is lowering a while loop right now. A scan that is unrolled fully has none.

    A function's operations are written before its caller's, so nothing but the Python stack tells
    who will call it.
    """
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code is _LOWERS_WHILE:
            return True
        frame = frame.f_back
    return False


_LOWERS_WHILE = getattr(getattr(_loops, "_while_lowering", None), "__code__", None)


# Operations that choose or re-arrange elements without computing with them.
_PICKS = frozenset(
    f"stablehlo.{name}"
    for name in (
        "dynamic_slice",
        "slice",
        "reshape",
        "transpose",
        "convert",
        "optimization_barrier",
    )
)


def _picked_from(value: Any, block: Any) -> Any:
    """The value of the loop's state that this one was picked out of, if it was."""
    while not isinstance(value.owner, _ir.Block):
        if value.owner.name not in _PICKS:
            return None
        value = value.owner.operands[0]
    return value if value.owner == block else None


def _only_picked(value: Any) -> bool:
    uses = (use.owner for use in value.uses)
    return all(
        owner.name in _PICKS and all(_only_picked(result) for result in owner.results)
        for owner in uses
    )


# --------------------------------------------------------------------------------------------------
# Facts about devices and dtypes


def memory_kinds() -> tuple[str, ...]:
    """The kinds of memory that the default backend's devices reach."""
    return tuple(sorted(memory.kind for memory in jax.devices()[0].addressable_memories()))


def is_on_host(aval: Any) -> bool:
    """Whether a value's type says that it lives in host memory."""
    return getattr(aval, "memory_space", None) is _core.MemorySpace.Host


def zero_keys(aval: Any) -> Any:
    """Random keys of a type, whatever their implementation, made of zeros."""
    impl = aval.dtype._impl
    words = jnp.zeros((*aval.shape, *impl.key_shape), jnp.uint32)
    return jax.random.wrap_key_data(words, impl=impl)


def itemsize_bytes(aval: Any) -> int:
    """Bytes of one element, for PRNG keys and 4-bit types too (rounded up)."""
    dtype = aval.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return 4 * math.prod(dtype._impl.key_shape)
    if dtype == jax.dtypes.float0:
        return 0
    return int(getattr(dtype, "itemsize", 1))
