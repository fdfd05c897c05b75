"""Differentiation, transposition and batching of jaxprs, and registration of a primitive's rules.

From 0.12 on, rules for dead-code elimination, state discharge and transposition take or return one
more value. The `register_*` functions adapt one rule to both conventions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import (
    ad_util as _ad_util,
    checkify as _checkify,
    core as _core,
    effects as _effects,
)
from jax._src.interpreters import ad as _ad_src, batching as _batching_src, partial_eval as _pe_src
from jax._src.state import discharge as _discharge
from jax.experimental.key_reuse import _core as _key_reuse
from jax.extend import core as _excore, source_info_util as _source_info
from jax.interpreters import ad as _ad, batching as _batching, mlir as _mlir, partial_eval as _pe

from remat._jax.compat import (
    JAX_VERSION,
    AbstractRef,
    Jaxpr,
    JaxprEqn,
    Primitive,
    Tracer,
    Zero,
    close,
    detach_consts,
    eval_jaxpr,
    extend_name_stack,
    is_var,
    positional_effects,
    split_list,
    typeof,
)
from remat._jax.equations import has_lasting_effects
from remat._jax.tracing import trace
from remat.aliases import Array, Arrays, Aval, AxisData, Dim, Effect, TreeDef


def is_zero(tangent: Array) -> bool:
    return type(tangent) is Zero


def zero_tangent(primal: Array) -> Zero:
    return _ad_util.p2tz(primal)


def batched_type(aval: Aval, axis_data: AxisData) -> Aval:
    """Return the type of an array with the axis of a `vmap` in front."""
    return _core.unmapped_aval(axis_data.size, 0, aval, axis_data.explicit_mesh_axis)


def batched(x: Array, dim: int | None, axis_data: AxisData) -> Array:
    """Return an array with the axis of a `vmap` in front, sharded like the other arrays with that axis."""
    if dim is None:
        return _batching.broadcast(x, axis_data.size, 0, axis_data.explicit_mesh_axis)
    return jax.numpy.moveaxis(x, dim, 0)


def is_differentiated(x: object) -> bool:
    """Return whether a value is a tracer of a derivative that is being traced.

    A value that is not one may still be differentiated, from outside of a `jax.jit`.
    """
    if isinstance(x, _batching_src.BatchTracer):
        return is_differentiated(x.val)
    return isinstance(x, _ad_src.JVPTracer | _ad_src.LinearizeTracer)


def is_undefined(x: object) -> bool:
    """Return whether an operand of an equation that is being transposed is a linear one."""
    return _ad.is_undefined_primal(x)


def is_linear_input(x: object) -> bool:
    return isinstance(x, _ad_src.GradAccum)


def disallowed_effects(jaxpr: Jaxpr) -> set[Effect]:
    """Return the effects of a jaxpr that forbid recomputing it, as `jax.checkpoint` defines them."""
    return set(_effects.remat_allowed_effects.filter_not_in(jaxpr.effects))


def jvp_of_jaxpr(
    jaxpr: Jaxpr, nonzeros: Sequence[bool]
) -> tuple[Jaxpr, tuple[Array, ...], Sequence[bool]]:
    """Return the JVP of a jaxpr: from primals and nonzero tangents to primals and nonzero tangents.

    Also return its constants, and which results have a nonzero tangent.
    """
    closed, out_nonzeros = _ad_src.jvp_jaxpr(close(jaxpr), list(nonzeros), False)
    return (*detach_consts(closed), out_nonzeros)


def dce(
    jaxpr: Jaxpr, used: Sequence[bool], *, keep: Sequence[bool] | None = None
) -> tuple[Jaxpr, list[bool]]:
    """Return a jaxpr without the equations that the used results do not need.

    Also return which inputs remain: those that are needed, and those in `keep`.
    """
    return _pe.dce_jaxpr(jaxpr, list(used), False if keep is None else list(keep))


class Transposed(NamedTuple):
    """A transposed jaxpr and its constants.

    Attributes:
      jaxpr: from nonlinear inputs and nonzero cotangents to nonzero cotangents of the linear inputs.
      consts: its leading inputs.
      ins_zero: which linear inputs have a zero cotangent, left out of the results.
      out_tree: the tree of the results: a list of cotangents, and the logs of the backward pass.
    """

    jaxpr: Jaxpr
    consts: tuple[Array, ...]
    ins_zero: list[bool]
    out_tree: TreeDef


def transpose(
    jaxpr: Jaxpr,
    known: Jaxpr,
    staged: Jaxpr,
    linear: Sequence[bool],
    outs_zero: Sequence[bool],
    outs_unknown: Sequence[bool],
) -> Transposed:
    """Transpose a jaxpr that was split into a nonlinear and a linear half.

    Args:
      jaxpr: the whole program.
      known: the half that computes residuals from the nonlinear inputs. It is evaluated first.
      staged: the half from the residuals and all inputs to the results that depend on linear inputs.
      linear: which inputs of `jaxpr` are linear.
      outs_zero: which results have a zero cotangent. The transposed jaxpr takes no input for those.
      outs_unknown: which results depend on linear inputs.
    """
    nonlinear_avals = [v.aval for v, lin in zip(jaxpr.invars, linear) if not lin]
    ct_avals = [v.aval.to_ct_aval() for v, zero in zip(jaxpr.outvars, outs_zero) if not zero]
    seen: dict[str, Any] = {}

    def transposed(*args: Array) -> Arrays:
        nonlinear, cts_given = split_list(args, [len(nonlinear_avals)])
        with extend_name_stack("rematted_computation"):
            residuals = eval_jaxpr(known, (), *nonlinear)
        given, values = iter(cts_given), iter(nonlinear)
        cts = [
            Zero(v.aval.to_ct_aval()) if zero else next(given)
            for v, zero in zip(jaxpr.outvars, outs_zero)
        ]
        operands = [
            _ad.UndefinedPrimal(v.aval.to_ct_aval()) if lin else next(values)
            for v, lin in zip(jaxpr.invars, linear)
        ]
        in_cts, logs = _backward(
            staged, [*residuals, *operands], [ct for ct, u in zip(cts, outs_unknown) if u]
        )
        in_cts = [ct for ct, x in zip(in_cts[len(residuals) :], operands) if is_undefined(x)]
        seen["ins_zero"] = [type(ct) is Zero for ct in in_cts]
        leaves, seen["out_tree"] = jax.tree.flatten(
            ([ct for ct in in_cts if type(ct) is not Zero], logs)
        )
        return leaves

    debug = jaxpr.debug_info.with_unknown_names()
    args = (*nonlinear_avals, *ct_avals)
    result, consts, _ = trace(transposed, jax.tree.structure((args, {})), args, debug)
    return Transposed(result, consts, seen["ins_zero"], seen["out_tree"])


def _backward(jaxpr: Jaxpr, args: Sequence[Array], cts: Sequence[Array]) -> tuple[Arrays, dict]:
    # 0.11 added logs of the backward pass; delete the second half with 0.10.
    if JAX_VERSION >= (0, 11):
        return _ad_src.backward_pass(jaxpr, False, (), args, cts, return_logs=True)
    return _ad_src.backward_pass(jaxpr, False, (), args, cts), {}


def batch_jaxpr(
    jaxpr: Jaxpr, axis_data: AxisData, dims: Sequence[Dim]
) -> tuple[Jaxpr, tuple[Array, ...], list[int | None]]:
    """Return the jaxpr under `vmap`, its constants, and each result's batch axis: 0, or None."""
    closed, batched = _batching_src.batch_jaxpr_axes(
        close(jaxpr), axis_data, dims, [_batching_src.zero_if_mapped] * len(jaxpr.outvars)
    )
    return (*detach_consts(closed), [0 if b else None for b in batched])


def known_tracers(tracers: Sequence[Tracer]) -> list[bool]:
    return [t.is_known() for t in tracers]


def known_values(tracers: Sequence[Tracer]) -> Arrays:
    return [t.pval.get_known() for t in tracers if t.is_known()]


def stage_eqn(
    trace_: Any,
    primitive: Primitive,
    residuals: Sequence[Array],
    tracers: Sequence[Tracer],
    jaxpr: Jaxpr,
    params: dict,
) -> list[Tracer]:
    """Stage one equation on residuals and tracers into the linear program that is being built."""
    ins = [trace_.new_instantiated_const(r) for r in residuals]
    ins += [trace_.instantiate_const(t) for t in tracers]
    outs = [_pe.JaxprTracer(trace_, _pe.PartialVal.unknown(v.aval), None) for v in jaxpr.outvars]
    recipe = _pe_src.new_eqn_recipe(
        trace_, ins, outs, primitive, params, positional_effects(jaxpr), _source_info.current()
    )
    for out in outs:
        out.recipe = recipe
    return outs


# --------------------------------------------------------------------------------------------------
# Registering a primitive's rules


def register(
    primitive: Primitive,
    *,
    evaluate: Callable,
    abstract: Callable,
    jvp: Callable,
    transpose: Callable,
    batch: Callable,
) -> None:
    """Register all rules of a primitive with several results.

    The batching rule is called as `batch(axis_data, args, dims, **params)`. The primitive is lowered
    by tracing `evaluate`.
    """
    primitive.multiple_results = True
    primitive.def_impl(evaluate)
    primitive.def_effectful_abstract_eval(abstract)
    register_jvp(primitive, _on_arrays(jvp))
    _ad.primitive_transposes[primitive] = transpose
    register_batching(primitive, batch)
    _mlir.register_lowering(primitive, _mlir.lower_fun(evaluate, multiple_results=True))


def register_jvp(primitive: Primitive, rule: Callable) -> None:
    _ad.primitive_jvps[primitive] = rule


def _on_arrays(rule: Callable) -> Callable:
    """Return a derivative rule whose arguments are converted to arrays.

    JAX passes Python numbers unconverted as primals and tangents, as in `jax.jacfwd(jax.grad(f))(0.5)`.
    """

    def jvp(
        primals: Sequence[Array], tangents: Sequence[Array], **params: Any
    ) -> tuple[Arrays, Arrays]:
        return rule([*map(_as_array, primals)], [*map(_as_array, tangents)], **params)

    return jvp


def _as_array(x: Array) -> Array:
    return jax.numpy.asarray(x) if isinstance(x, bool | int | float | complex) else x


def register_linearization(primitive: Primitive, rule: Callable) -> None:
    """Register the rule that linearizes an equation, `rule(nonzero, primals, **params)`.

    `nonzero` says which primals have tangents. The rule runs the forward pass and returns the results,
    which of them have tangents, the residuals, and `apply(residuals, tangents)`, which maps the
    primals' nonzero tangents to those of the results.
    """

    def linearization(_: object, nonzero: Sequence[bool], *primals: Array, **params: Any) -> tuple:
        types = [typeof(x).to_tangent_aval() for x in primals]
        nonzero = [
            n and getattr(t, "dtype", None) != jax.dtypes.float0 for n, t in zip(nonzero, types)
        ]
        outs, outs_nonzero, residuals, apply = rule(nonzero, primals, **params)
        zeros = [_ad_util.p2tz(out) for out in outs]

        def linearized(residuals: Arrays, *tangents: Array) -> Arrays:
            tangents = tangents[-len(nonzero) :]
            found = iter(apply(residuals, [t for t, n in zip(tangents, nonzero) if n]))
            return [next(found) if n else zero for n, zero in zip(outs_nonzero, zeros)]

        # Later versions let a rule return more residuals, with a structure; delete with 0.10.
        more = (None,) if "structured_residuals" in _ad_src.LinearizeTrace.__annotations__ else ()
        return outs, outs_nonzero, residuals, *more, linearized

    _ad_src.primitive_linearizations[primitive] = linearization


def register_transpose(primitive: Primitive, rule: Callable) -> None:
    """Register `rule(cotangents, *args, **params)`, which adds to the accumulators among `args`.

    Linear arguments are accumulators (`is_linear_input`), the others are values.
    """
    _ad_src.fancy_transposes[primitive] = rule


def register_linear_transpose(primitive: Primitive, rule: Callable) -> None:
    _ad.deflinear2(primitive, rule)


def register_batching(primitive: Primitive, rule: Callable) -> None:
    """Register `rule(axis_data, args, dims, **params) -> results, result dims`."""
    _batching.fancy_primitive_batchers[primitive] = rule


def register_partial_eval(primitive: Primitive, rule: Callable) -> None:
    """Register `rule(trace, *tracers, **params)`, by which JAX itself evaluates an equation partially.

    JAX does so when it splits a program with a derivative in it, such as the body of its scans.
    """
    rules = getattr(_pe, "custom_partial_eval_rules", None)
    if rules is not None:  # JAX will remove the table together with the tracers that use it
        rules[primitive] = rule


def register_split(
    primitive: Primitive, rule: Callable[[JaxprEqn, Sequence[bool], Callable], Any]
) -> None:
    """Register the rule by which JAX splits an equation inside a region of `jax.checkpoint`.

    `rule(eqn, ins_unknown, policy)` returns the equations of the known and of the staged half (one
    or none each), and which results are unknown.
    """
    rules = getattr(_pe, "partial_eval_jaxpr_custom_rules", None)
    if rules is None:  # JAX will remove the table together with the `jax.checkpoint` that uses it
        return

    def custom_rule(
        saveable: Callable, unknown: Sequence[bool], staged: Sequence[bool], eqn: JaxprEqn
    ) -> tuple:
        known_eqns, staged_eqns, outs_unknown = rule(eqn, unknown, saveable)
        repeated = {v for e in staged_eqns for v in e.outvars}
        there = {v for v, s in zip(eqn.invars, staged) if s and is_var(v)}
        residuals = dict.fromkeys(
            v for e in staged_eqns for v in e.invars if is_var(v) and v not in there
        )
        return (
            next(iter(known_eqns), None),
            next(iter(staged_eqns), None),
            list(outs_unknown),
            [v in repeated for v in eqn.outvars],
            list(residuals),
        )

    rules[primitive] = custom_rule


def register_dce(
    primitive: Primitive,
    shrink: Callable[[JaxprEqn, list[bool], Jaxpr], dict],
    keeps_inputs: Callable[[JaxprEqn], bool] = lambda _: False,
) -> None:
    """Register dead-code elimination of a primitive whose parameter `jaxpr` is its body.

    `shrink(eqn, used_inputs, new_jaxpr)` returns the parameters of the equation that remains.
    `keeps_inputs(eqn)` returns whether unused inputs stay, too.
    """

    def rule(used_outs: list[bool], *args: Any) -> tuple[list[bool], JaxprEqn | None]:
        *live_ins, eqn = args  # 0.11 added live_ins
        if not any(used_outs) and not _pe_src.has_effects(eqn, *live_ins):
            return [False] * len(eqn.invars), None
        keywords = {"live_inputs": live_ins[0]} if live_ins else {}
        keywords["instantiate"] = keeps_inputs(eqn)
        body, used_ins = _pe.dce_jaxpr(eqn.params["jaxpr"], used_outs, **keywords)
        if not any(used_ins) and not any(used_outs) and not has_lasting_effects(body.effects):
            return used_ins, None
        invars = [v for v, used in zip(eqn.invars, used_ins) if used]
        outvars = [v for v, used in zip(eqn.outvars, used_outs) if used]
        new = _excore.new_jaxpr_eqn(
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


def register_discharge(primitive: Primitive, bind: Callable) -> None:
    """Register a rule that turns refs among an equation's arguments into values.

    `bind(args, new_jaxpr, n_consts, params)` binds the primitive again, with `n_consts` new leading
    arguments.
    """

    def rule(*args: Any, jaxpr: Jaxpr, **params: Any) -> tuple[Arrays, Arrays]:
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
    """Register a rule that passes checkify's errors through an equation.

    `bind(args, new_jaxpr, n_added, params)` binds the primitive again, with `n_added` new leading
    arguments.
    """

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
    """Register with the key-reuse checker, so that a recomputation does not count as a second use."""

    def signature(eqn: JaxprEqn) -> _key_reuse.KeyReuseSignature:
        if eqn.params["differentiated"]:
            return _key_reuse.KeyReuseSignature()
        return _key_reuse.jaxpr_type_signature(eqn.params["jaxpr"])

    _key_reuse.key_reuse_signatures[primitive] = _key_reuse.dynamic_key_reuse_signature(signature)


def register_hijax(primitive: Primitive, bind: Callable) -> None:
    """Register a rule that replaces operands of high-level types by the arrays that they consist of."""

    def is_high(*_: Aval, jaxpr: Jaxpr, **__: object) -> bool:
        return jaxpr.is_high

    def to_lojax(*args: Array, jaxpr: Jaxpr, **params: Any) -> Arrays:
        body, consts = detach_consts(_pe_src.lower_jaxpr2(close(jaxpr)))
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
