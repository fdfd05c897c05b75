"""Lowering rules: from equations to operations of a StableHLO module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax._src import core as _core, effects as _effects
from jax._src.interpreters import mlir as _mlir_src
from jax._src.lib.mlir import ir as _ir
from jax._src.lib.mlir.dialects import hlo as _hlo
from jax.extend import core as _excore
from jax.interpreters import ad as _ad, mlir as _mlir

from remat._jax.compat import (
    Jaxpr,
    Primitive,
    close,
    weakref_lru_cache,
)
from remat._jax.equations import rebuild
from remat._jax.merging import merged
from remat.aliases import Aval, IrValue, NameStack

LoweringContext: TypeAlias = _mlir.LoweringRuleContext

#: Compiler options with which a program is compiled for its memory analysis alone, by platform.
FAST_COMPILATION: dict[str, dict[str, int | bool]] = {
    # O0 of XLA's effort levels. JAX 0.12 takes its name too, 0.10 only the number.
    "tpu": {"optimization_level": 9},
    # Buffers are assigned before LLVM compiles the kernels, so LLVM's optimizations do not change the memory.
    "cpu": {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
    # No kernels are tried out on the device. Trials take the memory of their operands beside that of the
    # arguments, so that the compiler fails on steps that fill the device, and they may choose differently
    # each time. What the chosen kernels need is confirmed with the options with which the step will run.
    "gpu": {"xla_gpu_autotune_level": 0},
}


def register_lowering(primitive: Primitive, rule: Callable, **by_platform: Callable) -> None:
    """Register the lowering `rule(ctx, *args, **params)`; keywords name rules of single platforms."""

    def choose(ctx: LoweringContext, *args: IrValue, **params: Any) -> Sequence[IrValue]:
        if not by_platform:
            return rule(ctx, *args, **params)
        # JAX 0.10 raises an error for platform-specific rules of a non-cacheable primitive in a
        # module for several platforms (it expects a list, not a tuple). So the choice is made here.
        listed = ctx.replace(avals_out=list(ctx.avals_out))
        body = params["jaxpr"]
        outs = _mlir_src.lower_per_platform(
            listed, primitive.name, by_platform, rule, body.effects, *args, **params
        )
        if body.effects and listed.tokens_out is not None:
            ctx.set_tokens_out(listed.tokens_out)
        return outs

    # Not cacheable: the rules depend on the program around the equation, so they run for each occurrence.
    _mlir.register_lowering(primitive, choose, cacheable=False)


def lower_inline(ctx: LoweringContext, jaxpr: Jaxpr, args: Sequence[IrValue]) -> Sequence[IrValue]:
    """Emit a jaxpr's operations in place, under the name scope `checkpoint`.

    A jaxpr is lowered once, as one equation of a cacheable primitive; JAX copies it afterwards.
    """
    return _write(ctx, _as_equation(jaxpr), args, ctx.name_stack)


def _write(
    ctx: LoweringContext, jaxpr: Jaxpr, args: Sequence[IrValue], name_stack: NameStack
) -> Sequence[IrValue]:
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


_body_p = _excore.Primitive("remat_body")


_body_p.multiple_results = True


# The same body each time, since JAX lowers each jaxpr object once.
@weakref_lru_cache
def _as_equation(jaxpr: Jaxpr) -> Jaxpr:
    invars = [_excore.Var(v.aval) for v in jaxpr.invars]
    outvars = [_excore.Var(v.aval) for v in jaxpr.outvars]
    body = jaxpr.replace()  # a cached value must not keep its own key alive
    effects = _core.eqn_effects(body, invars)
    eqn = _excore.new_jaxpr_eqn(invars, outvars, _body_p, {"jaxpr": body}, effects)
    return jaxpr.replace(
        invars=invars,
        outvars=outvars,
        eqns=[eqn],
        effects=effects,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def _lower_body(ctx: LoweringContext, *args: IrValue, jaxpr: Jaxpr) -> Sequence[IrValue]:
    return _write(ctx, jaxpr, args, ctx.name_stack.extend("checkpoint"))


_mlir.register_lowering(_body_p, _lower_body)


def lower_call(
    ctx: LoweringContext,
    jaxpr: Jaxpr,
    args: Sequence[IrValue],
    attributes: dict[str, str],
    returned: tuple[int, ...] = (),
) -> Sequence[IrValue]:
    """Emit a jaxpr as a separate function and a call of it with these frontend attributes.

    The function also returns its inputs at the positions `returned`; those results are dropped.
    """
    avals_out = [*ctx.avals_out, *(ctx.avals_in[i] for i in returned)]
    if returned:
        jaxpr = _returning_inputs(jaxpr, returned)
    effects = list(_effects.ordered_effects.filter_in(jaxpr.effects))
    outs, tokens = _mlir_src.call_lowering(
        "checkpoint",
        close(jaxpr),
        None,
        ctx.module_context,
        ctx.avals_in,
        avals_out,
        ctx.tokens_in.subset(effects),
        *args,
        dim_var_values=ctx.dim_var_values,
        const_lowering=ctx.const_lowering,
        attributes={key: _ir.StringAttr.get(value) for key, value in attributes.items()},
    )
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(tokens))
    results, _ = _mlir.ir_tree_registry.flatten(list(outs))
    if results and has_unreduced(jaxpr):
        callee = _ir.FlatSymbolRefAttr(results[0].owner.attributes["callee"]).value
        _declare_shardings(ctx, ctx.module_context.symbol_table[callee], avals_out)
    return list(outs)[: len(ctx.avals_out)]


# The same jaxpr each time, since JAX lowers each jaxpr object once.
@weakref_lru_cache
def _returning_inputs(jaxpr: Jaxpr, positions: tuple[int, ...]) -> Jaxpr:
    return rebuild(jaxpr, outvars=[*jaxpr.outvars, *(jaxpr.invars[i] for i in positions)])


def has_unreduced(jaxpr: Jaxpr) -> bool:
    """Return whether an input or a result of a jaxpr is unreduced (a pending sum over devices)."""
    return any(_is_unreduced(v.aval) for v in (*jaxpr.invars, *jaxpr.outvars))


def _is_unreduced(aval: Aval) -> bool:
    return isinstance(aval, jax.core.ShapedArray) and bool(aval.sharding.spec.unreduced)


def _declare_shardings(ctx: LoweringContext, function: IrValue, avals_out: Sequence[Aval]) -> None:
    """Declare in a function's signature which arguments and results are unreduced, and over which axes.

    The partitioner assumes that an argument without such a declaration is reduced: it would sum the argument
    before the call, and the caller, which treats the result as unreduced, would sum again.
    """
    sides = (
        ("arg_attrs", function.type.inputs, ctx.avals_in),
        ("res_attrs", function.type.results, avals_out),
    )
    for key, types, avals in sides:
        attributes = [_ir.DictAttr.get({})] * len(types)
        if key in function.attributes:
            attributes = [_ir.DictAttr(a) for a in _ir.ArrayAttr(function.attributes[key])]
        # Dimension variables and tokens come first.
        for i, aval in enumerate(avals, len(types) - len(avals)):
            if _is_unreduced(aval):
                sharding = aval.sharding._to_sdy_sharding(aval.ndim, modify_wrt_axis_types=True)
                declared = _mlir_src.get_sharding_attr(ctx.module_context, sharding)
                given = {a.name: a.attr for a in attributes[i]}
                attributes[i] = _ir.DictAttr.get({**given, "sdy.sharding": declared})
        function.attributes[key] = _ir.ArrayAttr.get(attributes)


def is_partly_manual(ctx: LoweringContext) -> bool:
    """Return whether the lowered program is the body of a `shard_map` over only some mesh axes."""
    axes = ctx.module_context.axis_context
    manual: frozenset = getattr(axes, "manual_axes", frozenset())
    return bool(manual) and len(manual) < len(axes.mesh.axis_names)


def n_devices(ctx: LoweringContext) -> int:
    """Return on how many devices the lowered program runs."""
    axes = ctx.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    return int(axes.num_devices if mesh is None else mesh.size)


def lower_barrier(
    ctx: LoweringContext,
    avals: Sequence[Aval],
    args: Sequence[IrValue],
    inside: Sequence[bool],
    *,
    merge: bool,
) -> list[IrValue]:
    """Emit an optimization barrier: no result is available before all inputs are computed.

    Args:
      ctx: the context of the lowering.
      avals: the abstract values of `args`.
      args: the values; the results replace them.
      inside: for each value, whether it passes through the barrier. The others are returned as they are.
      merge: whether what the compiler will find to be one value (`merged`) passes through the barrier
        once. Also replaces values that are not inside, but that are the same as one that is.
    """
    types = [_mlir_src._aval_to_ir_types(ctx.module_context, aval) for aval in avals]
    flat, _ = _mlir.ir_tree_registry.flatten(list(args))
    flat_types, tree = _mlir.ir_tree_registry.flatten(types)
    parts = [len(_mlir.ir_tree_registry.flatten(ir)[0]) for ir in types]
    flat_avals = [aval for aval, n in zip(avals, parts) for _ in range(n)]
    through = [x for x, n in zip(inside, parts) for _ in range(n)]
    sources = merged(flat) if merge else range(len(flat))
    positions: dict[Any, int] = {}
    operands: list[IrValue] = []
    for source, value, passes in zip(sources, flat, through):
        if passes and source not in positions:
            positions[source] = len(operands)
            operands.append(value)
    if not operands:
        return list(args)
    barrier = _hlo.OptimizationBarrierOp(operands)
    results = []
    for source, value, aval, ir_type in zip(sources, flat, flat_avals, flat_types):
        if source not in positions:
            results.append(value)
            continue
        result = barrier.results[positions[source]]
        if result.type != ir_type:
            result = _hlo.reshape(ir_type, result)
        results.append(_mlir_src.lower_with_sharding_in_types(ctx, result, aval))
    return tree.unflatten(results)


# --------------------------------------------------------------------------------------------------
# Which primitives exist


def primitive_names() -> frozenset[str]:
    """Return the names of all primitives that can be compiled or differentiated."""
    return _primitive_names(sum(map(len, _rules_of_primitives())))


@functools.lru_cache(maxsize=1)
def _primitive_names(_: int) -> frozenset[str]:
    # The argument is the number of rules, so that names are collected again after a registration.
    return frozenset(p.name for rules in _rules_of_primitives() for p in list(rules))


def _rules_of_primitives() -> list[dict[Primitive, Callable]]:
    by_platform = list(_mlir._platform_specific_lowerings.values())
    return [_mlir._lowerings, _ad.primitive_jvps, *by_platform]
