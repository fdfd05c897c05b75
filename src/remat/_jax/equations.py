"""Equations and jaxprs as data: building them, reading them, and the jaxprs inside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.api_util
from jax._src import (
    ad_util as _ad_util,
    config as _config,
    core as _core,
    shard_map as _shard_map,
    source_info_util as _source_frames,
)
from jax._src.dispatch import (
    ArrayCopySemantics as _ArrayCopySemantics,
)
from jax._src.interpreters import partial_eval as _pe_src
from jax._src.sharding_impls import UNSPECIFIED as _unspecified
from jax.extend import core as _excore, source_info_util as _source_info
from jax.extend.core import primitives as _primitives
from jax.interpreters import partial_eval as _pe

from remat._jax.compat import (
    Jaxpr,
    JaxprEqn,
    Offloadable,
    Primitive,
    Var,
    close,
    detach_consts,
    is_var,
    name_p,
    open_jaxpr,
    typeof,
)
from remat.aliases import Array, Atom, Aval, Effect, JaxprLike, MemorySpace, Params

try:
    from jax._src import flattree as _flattree
except ImportError:  # delete with JAX 0.10, where parameters of a scan have other names
    _flattree = None


# --------------------------------------------------------------------------------------------------
# Building equations and jaxprs


def new_var(aval: Aval) -> Var:
    return _excore.Var(aval)


def new_eqn(
    invars: Sequence[Atom],
    outvars: Sequence[Var],
    primitive: Primitive,
    params: dict,
    like: JaxprEqn | None,
) -> JaxprEqn:
    """Return an equation with the source and context of `like` if it is given.

    Its effects are those of its parameter `jaxpr`, if it has one.
    """
    effects = _core.eqn_effects(params["jaxpr"], list(invars)) if "jaxpr" in params else set()
    context = () if like is None else (like.source_info, like.ctx)
    return _excore.new_jaxpr_eqn(list(invars), list(outvars), primitive, params, effects, *context)


def with_variables(
    eqn: JaxprEqn, invars: Sequence[Atom], outvars: Sequence[Var] | None = None, **others: Any
) -> JaxprEqn:
    """Return an equation on other operands, which its effects on refs then name; with other results, too.

    Args:
      eqn: the equation.
      invars: its new operands, as many as it has.
      outvars: its new results; None for the same.
      others: other parts of the equation to replace, such as `source_info`.
    """
    if eqn.effects:
        names = {v: new for v, new in zip(eqn.invars, invars, strict=True) if is_var(v)}
        others["effects"] = _core.subst_input_effects(eqn.effects, names)
    if outvars is not None:
        others["outvars"] = list(outvars)
    return eqn.replace(invars=list(invars), **others)


def new_body_eqn(
    like: JaxprEqn,
    invars: Sequence[Atom],
    outvars: Sequence[Var],
    params: dict,
    runs: Sequence[tuple[JaxprLike, Sequence[Atom]]],
) -> JaxprEqn:
    """Return an equation like another, but of other jaxprs and with their effects.

    Args:
      like: the equation that gives the primitive, source and context.
      invars, outvars: operands and results.
      params: the parameters.
      runs: each jaxpr that the equation runs, with the operands that this jaxpr takes.
    """
    effects: set[Effect] = set()
    for body, operands in runs:
        effects |= _core.eqn_effects(body, list(operands))
    if "mesh" in params:  # a shard_map binds the names of its mesh
        effects = _core.filter_named_axis_effects(effects, params["mesh"].axis_names)
    return _excore.new_jaxpr_eqn(
        list(invars), list(outvars), like.primitive, params, effects, like.source_info, like.ctx
    )


def with_equations(body: JaxprLike, opened: Jaxpr) -> JaxprLike:
    """Return `opened` with the constants of `body`, if that is a closed jaxpr."""
    return opened if isinstance(body, _excore.Jaxpr) else body.replace(jaxpr=opened)


def jaxpr_of_equation(eqn: JaxprEqn) -> Jaxpr:
    """Return a jaxpr of one equation, which takes the equation's operands."""
    invars = list(dict.fromkeys(v for v in eqn.invars if is_var(v)))
    outvars = [v for v in eqn.outvars if type(v).__name__ != "DropVar"]
    debug = jax.api_util.debug_info("equation", lambda: None, (), {})
    return _excore.Jaxpr([], invars, outvars, [eqn], eqn.effects, debug.with_unknown_names())


def rebuild(
    jaxpr: Jaxpr,
    *,
    invars: Sequence[Var] | None = None,
    outvars: Sequence[Atom] | None = None,
    eqns: Sequence[JaxprEqn] | None = None,
) -> Jaxpr:
    """Return the jaxpr with some of its parts replaced.

    New inputs or results drop the argument and result names of the debug information.
    """
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
    invars: Sequence[Var], outvars: Sequence[Atom], eqns: Sequence[JaxprEqn], like: Jaxpr
) -> Jaxpr:
    """Return a jaxpr of these equations, with the function name of `like` in its debug information."""
    effects = _pe_src.make_jaxpr_effects((), invars, outvars, eqns)
    return like.replace(
        invars=list(invars),
        outvars=list(outvars),
        eqns=list(eqns),
        effects=effects,
        debug_info=like.debug_info.with_unknown_names(),
    )


class HostCopy(NamedTuple):
    """The variable of a value's copy in host memory, and the equations that copy there and back."""

    var: Var
    store: JaxprEqn
    fetch: JaxprEqn


def host_copy(v: Var, like: JaxprEqn | None) -> HostCopy:
    """Return a copy of an array in pinned host memory, with the source and context of `like`."""
    return _copy_elsewhere(v, jax.memory.Space.Host, jax.memory.Space.Device, like)


def offloaded_copy(v: Var, case: Offloadable, like: JaxprEqn) -> HostCopy | None:
    """Return the copy of an array that a policy's `Offloadable` requests; None if it is not in `case.src`."""
    source, target = (_core.mem_kind_to_space(kind) for kind in (case.src, case.dst))
    if getattr(v.aval, "memory_space", None) is not source:
        return None
    return _copy_elsewhere(v, target, source, like)


def _copy_elsewhere(
    v: Var, target: MemorySpace, source: MemorySpace, like: JaxprEqn | None
) -> HostCopy:
    copy = new_var(v.aval.update(memory_space=target))
    store = new_eqn([v], [copy], _primitives.device_put_p, _copy_params(source, target), like)
    fetch = new_eqn([copy], [v], _primitives.device_put_p, _copy_params(target, source), like)
    return HostCopy(copy, store, fetch)


def _copy_params(source: MemorySpace, target: MemorySpace) -> Params:
    # `device_put`'s transpose rule copies the cotangent to `srcs`.
    semantics = (_ArrayCopySemantics.ALWAYS_COPY,)
    return {"devices": (target,), "srcs": (source,), "copy_semantics": semantics}


def is_copy(eqn: JaxprEqn) -> bool:
    """Return whether an equation copies one array to another memory."""
    return (
        eqn.primitive is _primitives.device_put_p and len(eqn.invars) == 1 and is_var(eqn.invars[0])
    )


# --------------------------------------------------------------------------------------------------
# Reading equations


def checkpoint_name_of(eqn: JaxprEqn) -> str | None:
    """Return the name that an equation gives to a value by `checkpoint_name`; None for any other."""
    if eqn.primitive is name_p:
        return eqn.params["name"]
    # Under `jax_remat3` a name is an object, not an equation parameter.
    inner = eqn.params.get("_prim")
    if inner is not None and type(inner).__name__ in ("CheckpointName", "CheckpointNameFwd"):
        return inner.name
    return None


def name_stack_of(eqn: JaxprEqn) -> str:
    """Return the name scopes and modules of an equation, without names of JAX's transformations.

    `jvp(encoder)/layer_0` becomes `encoder/layer_0`: differentiation does not rename a value.
    """
    return "/".join(name for name in _scopes(eqn) if name and not _is_mark(name))


def _scopes(eqn: JaxprEqn) -> list[str]:
    stack = eqn.source_info.name_stack.stack
    return [entry.name for entry in stack if type(entry).__name__ == "Scope"]


# Name scopes that tell the planner where it may recompute. Equations that JAX derives from an equation (its
# derivative, its transpose, its batched form) stay in the equation's scopes. Users never see them.
_MARKED, _FIXED = "<remat.auto ", "<remat.fixed>"
_RECOMPUTATION = "rematted_computation"  # JAX's scope of a checkpoint's recomputation


def _is_mark(scope: str) -> bool:
    return scope == _FIXED or scope.startswith(_MARKED)


def marked_scope(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a context in which equations are marked as those of a function with this name."""
    return jax.named_scope(f"{_MARKED}{name}>")


def is_marked(eqn: JaxprEqn) -> bool:
    """Return whether an equation itself is marked; the programs inside it are then marked, too."""
    return any(name.startswith(_MARKED) for name in _scopes(eqn))


def is_fixed(eqn: JaxprEqn) -> bool:
    """Return whether an equation must stay the only computation of its results."""
    return _FIXED in _scopes(eqn)


def fixed(eqn: JaxprEqn) -> JaxprEqn:
    """Return the equation as one that must stay the only computation of its results."""
    return in_scope(eqn, _FIXED)


def in_scope(eqn: JaxprEqn, scope: str) -> JaxprEqn:
    """Return the equation in a name scope inside of its own."""
    stack = eqn.source_info.name_stack.extend(scope)
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def traceback_of(eqn: JaxprEqn) -> object:
    """Return where the equation was traced: equal objects for the same calls of the same lines."""
    return eqn.source_info.traceback


def without_traceback(eqn: JaxprEqn) -> JaxprEqn:
    """Return the equation as if JAX did not know where it was traced."""
    return eqn.replace(source_info=eqn.source_info.replace(traceback=None))


def without_marks(eqn: JaxprEqn) -> JaxprEqn:
    """Return the equation without the scopes that only the planner uses."""
    stack = eqn.source_info.name_stack
    kept = tuple(entry for entry in stack.stack if not _is_mark(entry.name))
    if len(kept) == len(stack.stack):
        return eqn
    stack = type(stack)(kept)
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def without_scopes(eqn: JaxprEqn) -> JaxprEqn:
    """Return the equation without the scopes and modules that name it; transformations and marks stay.

    A new equation with the context of this one may contain equations with complete scopes of their own, which
    would otherwise be nested in these.
    """
    stack = eqn.source_info.name_stack
    kept = tuple(
        entry
        for entry in stack.stack
        if type(entry).__name__ != "Scope" or _is_mark(entry.name) or entry.name == _RECOMPUTATION
    )
    stack = type(stack)(kept)
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def is_transposed(eqn: JaxprEqn) -> bool:
    """Return whether the equation computes cotangents: JAX made it by transposing a linear equation."""
    return any(
        type(entry).__name__ == "Transform" and entry.name == "transpose"
        for entry in eqn.source_info.name_stack.stack
    )


def is_recomputation(eqn: JaxprEqn) -> bool:
    """Return whether the equation is a recomputation by JAX's partial evaluation of a checkpoint."""
    return any(
        type(entry).__name__ == "Scope" and entry.name == _RECOMPUTATION
        for entry in eqn.source_info.name_stack.stack
    )


def source_of_caller() -> contextlib.AbstractContextManager[object]:
    """Return a context in which equations have the source line of this call, wherever they are traced.

    In nested traces JAX records only the innermost frames, which may all be the library's.
    """
    return _source_info.user_context(_source_info.current().traceback)


def source_of(eqn: JaxprEqn) -> contextlib.AbstractContextManager[object]:
    """Return a context in which equations have the source line of another, also in nested traces."""
    return _source_info.user_context(eqn.source_info.traceback)


def source_line_of(eqn: JaxprEqn) -> str:
    """Return `file:line:column (function)` of the user's code that an equation was traced from."""
    return _source_info.summarize(eqn.source_info)


def source_frames_of(eqn: JaxprEqn) -> tuple[tuple[str, int, str], ...]:
    """Return file, line and function of the frames that an equation was traced from, innermost first.

    JAX's own frames are left out.
    """
    frames = _source_frames.user_frames(eqn.source_info.traceback)
    return tuple((frame.file_name, frame.start_line, frame.function_name) for frame in frames)


def with_lines_of(eqn: JaxprEqn, callers: Sequence[JaxprEqn]) -> JaxprEqn:
    """Return an equation with the source lines of the innermost of its callers that has any.

    Only an equation without lines gets them: JAX does not record where a function that it jits itself, such
    as `jnp.var`, was called.
    """
    if source_frames_of(eqn):
        return eqn
    for caller in reversed(callers):
        if source_frames_of(caller):
            info = eqn.source_info.replace(traceback=caller.source_info.traceback)
            return eqn.replace(source_info=info)
    return eqn


def has_hidden_rules(eqn: JaxprEqn) -> bool:
    """Return whether differentiating the equation runs user code that is not in its jaxpr."""
    return eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def scan_arity(eqn: JaxprEqn) -> tuple[int, int]:
    """Return how many constants and how many carries a `scan` equation has."""
    if "ft_in" in eqn.params:  # 0.12; delete the other half with 0.11
        n_consts, n_carry, _ = (len(part) for part in eqn.params["ft_in"].unpack())
        return n_consts, n_carry
    return eqn.params["num_consts"], eqn.params["num_carry"]


def scan_body(eqn: JaxprEqn) -> Jaxpr | None:
    """Return the body of a `scan` equation; None for other equations and for bodies with constants."""
    if eqn.primitive.name != "scan":
        return None
    body = eqn.params["jaxpr"]
    return None if getattr(body, "consts", None) else open_jaxpr(body)


def with_scan_arity(params: dict, n_consts: int, n_carry: int) -> dict:
    """Return a `scan` equation's parameters for a `jaxpr` with these numbers of constants and carries."""
    if "ft_in" not in params:  # 0.10; delete with it
        return dict(params, num_consts=n_consts, num_carry=n_carry)
    body = params["jaxpr"]
    n_xs, n_ys = len(body.invars) - n_consts - n_carry, len(body.outvars) - n_carry
    nones = _flattree.nones
    return dict(
        params,
        ft_in=_flattree.pack((nones(n_consts), nones(n_carry), nones(n_xs))),
        ft_out=_flattree.pack((nones(n_carry), nones(n_ys))),
    )


def stacked(length: int, aval: Aval) -> Aval:
    """Return the type of `length` values of a type, stacked along a new first axis."""
    return _core.unmapped_leading_aval(length, aval)


def row_type(aval: Aval) -> Aval:
    """Return the type of one of the values that are stacked along the first axis of a type."""
    return _core.mapped_aval(aval.shape[0], 0, aval)


def empty(aval: Aval) -> Array:
    """Return an array of a type with arbitrary contents."""
    return _ad_util.empty_like_aval(aval)


def is_plain_jit(eqn: JaxprEqn) -> bool:
    """Return whether the equation is a `jit` without shardings or layouts of its own.

    JAX ignores the donation of arguments by a jitted function in another one.
    """
    if eqn.primitive is not _primitives.jit_p:
        return False
    params = eqn.params
    unspecified = all(
        s is _unspecified for s in (*params["in_shardings"], *params["out_shardings"])
    )
    layouts = all(
        x is None for x in (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    )
    return unspecified and layouts


def hoist_constants(jaxpr: Jaxpr) -> tuple[Jaxpr, list[Array]]:
    """Move the constants of jaxprs in equations to the front of the inputs.

    JAX leaves constants in plain `jit` equations, and in transposed loops and conditionals those that the
    backward rules of `jax.custom_vjp` functions close over.

    Returns the jaxpr, in which plain `jit` equations, loops, conditionals, checkpoints and `shard_map`s have
    no constants, also inside each other, and the values of the new inputs.
    """
    invars: list[Atom] = []
    values: list[Array] = []
    eqns = []
    for eqn in jaxpr.eqns:
        hoisted = _with_constants_outside(eqn)
        if hoisted is None:
            eqns.append(eqn)
            continue
        changed, new, constants = hoisted
        invars += new
        values += constants
        eqns.append(changed)
    if not values:
        return jaxpr, []
    return jaxpr_of([*invars, *jaxpr.invars], jaxpr.outvars, eqns, jaxpr), values


def _with_constants_outside(eqn: JaxprEqn) -> tuple[JaxprEqn, list[Var], list[Array]] | None:
    """Return an equation that has the constants of its jaxprs as operands, these operands and their values.

    The result is None for jaxprs without constants and for equations of other primitives.
    """
    name = eqn.primitive.name
    if name == "cond":
        return _conditional_with_constants_outside(eqn)
    if name == "while":
        return _while_with_constants_outside(eqn)
    is_open = name in ("remat2", "shard_map")
    if not (is_open or name == "scan" or is_plain_jit(eqn)):
        return None
    body, constants = _without_constants(eqn.params["jaxpr"])
    if not constants:
        return None
    new = [new_var(typeof(value)) for value in constants]
    params = dict(eqn.params, jaxpr=body if is_open else close(body))
    if name == "scan":
        n_consts, n_carry = scan_arity(eqn)
        params = with_scan_arity(params, len(new) + n_consts, n_carry)
    elif name == "shard_map":
        whole = jax.sharding.PartitionSpec()
        params["in_specs"] = (*(whole for _ in new), *params["in_specs"])
    for key, default in ADDED_OPERAND.items():
        if isinstance(params.get(key), tuple):
            params[key] = (default,) * len(new) + params[key]
    return eqn.replace(invars=[*new, *eqn.invars], params=params), new, constants


def _conditional_with_constants_outside(
    eqn: JaxprEqn,
) -> tuple[JaxprEqn, list[Var], list[Array]] | None:
    """Return the same for a conditional, of which all branches take the constants of all."""
    bodies, of_branches = zip(*map(_without_constants, eqn.params["branches"]))
    constants = [value for of_branch in of_branches for value in of_branch]
    if not constants:
        return None
    types = [v.aval for body, of in zip(bodies, of_branches) for v in body.invars[: len(of)]]
    branches, begin = [], 0
    for body, of_branch in zip(bodies, of_branches):
        n_own = len(of_branch)
        inputs = list(map(new_var, types))
        inputs[begin : begin + n_own] = body.invars[:n_own]
        branches.append(close(rebuild(body, invars=[*inputs, *body.invars[n_own:]])))
        begin += n_own
    new = [new_var(typeof(value)) for value in constants]
    index, *operands = eqn.invars
    params = dict(eqn.params, branches=tuple(branches))
    return eqn.replace(invars=[index, *new, *operands], params=params), new, constants


def _while_with_constants_outside(
    eqn: JaxprEqn,
) -> tuple[JaxprEqn, list[Var], list[Array]] | None:
    """Return the same for a `while` loop, whose condition and body take constants of their own."""
    test, of_test = _without_constants(eqn.params["cond_jaxpr"])
    body, of_body = _without_constants(eqn.params["body_jaxpr"])
    if not of_test and not of_body:
        return None
    new = [new_var(typeof(value)) for value in (*of_test, *of_body)]
    first, n_old = len(of_test), eqn.params["cond_nconsts"]
    params = dict(
        eqn.params,
        cond_jaxpr=close(test),
        cond_nconsts=first + n_old,
        body_jaxpr=close(body),
        body_nconsts=len(of_body) + eqn.params["body_nconsts"],
    )
    invars = [*new[:first], *eqn.invars[:n_old], *new[first:], *eqn.invars[n_old:]]
    return eqn.replace(invars=invars, params=params), new, [*of_test, *of_body]


def _without_constants(body: JaxprLike) -> tuple[Jaxpr, list[Array]]:
    """Return a jaxpr with its constants, and those of jaxprs in it, as its first inputs, and their values."""
    has_own = bool(getattr(body, "consts", ()))
    opened, constants = detach_consts(body) if has_own else (open_jaxpr(body), ())
    opened, more = hoist_constants(opened)
    return opened, [*more, *constants]


# --------------------------------------------------------------------------------------------------
# Jaxprs inside equations


def jaxprs_of(eqn: JaxprEqn) -> Iterator[JaxprLike]:
    """Yield all jaxprs in an equation's parameters."""
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if is_jaxpr(item):
                yield item


def is_jaxpr(value: object) -> bool:
    """Return whether a parameter is a jaxpr, open or closed."""
    return isinstance(value, _excore.Jaxpr) or (
        hasattr(value, "jaxpr") and hasattr(value, "consts")
    )


def is_call(eqn: JaxprEqn) -> bool:
    """Return whether the equation's primitive is a call primitive of another library.

    Such primitives come from `jax.extend.core.create_call_primitive` (JAX 0.12 and later).
    """
    rules = _pe.dce_rules
    return "call_jaxpr" in eqn.params and rules.get(eqn.primitive) is _CALL_DCE_RULE


_CALL_DCE_RULE = _pe.dce_jaxpr_closed_call_rule


def is_high_primitive(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a high-level primitive of JAX, with its rules in a parameter."""
    return eqn.primitive.name == "call_hi_primitive"


def is_high_checkpoint(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a `jax.checkpoint` as it is with `JAX_REMAT3=1`."""
    return is_high_primitive(eqn) and type(eqn.params.get("_prim")).__name__ == "RematTraced"


def has_lasting_effects(effects: Iterable[Effect]) -> bool:
    """Return whether some of these effects are visible outside of the program that has them."""
    passing = (_core.NamedAxisEffect, _core.InternalMutableArrayEffect)
    return any(not isinstance(effect, passing) for effect in effects)


def only_names_axes(effects: Iterable[Effect]) -> bool:
    """Return whether these effects only name the axes over which collectives communicate."""
    return all(isinstance(effect, _core.NamedAxisEffect) for effect in effects)


# Parameters of a call with one entry per operand or result → the entry for an added operand or result.
ADDED_OPERAND = {
    "in_shardings": _unspecified,
    "in_layouts": None,
    "donated_invars": False,
    "exclude_mask": False,
    "prevent_cse": True,
}
ADDED_RESULT = {
    "out_shardings": _unspecified,
    "out_layouts": None,
    "out_memory_spaces": jax.memory.Space.Device,
}


# --------------------------------------------------------------------------------------------------
# The manual axes of a shard_map


@contextlib.contextmanager
def inside_shard_map(eqn: JaxprEqn) -> Iterator[None]:
    """Enter the tracing context of a `shard_map`'s body."""
    mesh, manual = eqn.params["mesh"], eqn.params["newly_manual_axes"]
    with (
        _shard_map._extend_axis_env(mesh, manual),
        jax.sharding.use_abstract_mesh(_shard_map._as_manual_mesh(mesh, manual)),
        _config._check_vma(eqn.params["check_vma"]),
    ):
        yield


def shard_map_residual(eqn: JaxprEqn, aval: Aval) -> tuple[Aval, jax.sharding.PartitionSpec]:
    """Return the type that a value of a `shard_map`'s body has outside, and its partition spec.

    Outside, the devices' values are concatenated along the first axis.
    """
    mesh, check_vma = eqn.params["mesh"], eqn.params["check_vma"]
    names = _shard_map._all_newly_manual_mesh_names(mesh, eqn.params["newly_manual_axes"])
    spec = aval.nospec(mesh, check_vma, names)
    return _core.unshard_aval(mesh, check_vma, spec, aval), spec


def without_axis_effects(jaxpr: Jaxpr, eqn: JaxprEqn) -> Jaxpr:
    """Return the body of a `shard_map` without the effects of its named axes."""
    return _core.remove_named_axis_effects(jaxpr, eqn.params["mesh"].axis_names)
