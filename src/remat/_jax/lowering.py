"""Lowering: how equations become operations of a module, and what surrounds them there."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jax._src import core as _core, effects as _effects
from jax._src.interpreters import ad as _ad, mlir as _mlir
from jax._src.lax.control_flow import loops as _loops
from jax._src.lib.mlir import ir as _ir
from jax._src.lib.mlir.dialects import hlo as _hlo

from remat._jax.compat import Jaxpr, Primitive, close, weakref_lru_cache

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
# The primitives that there are


def primitive_names() -> frozenset[str]:
    """Return the names of all primitives that can be compiled or differentiated."""
    return _primitive_names(sum(map(len, _rules_of_primitives())))


@functools.lru_cache(maxsize=1)
def _primitive_names(_: int) -> frozenset[str]:
    # Anew whenever somebody registers a rule.
    return frozenset(p.name for rules in _rules_of_primitives() for p in list(rules))


def _rules_of_primitives() -> list[dict[Primitive, Any]]:
    by_platform = list(_mlir._platform_specific_lowerings.values())
    return [_mlir._lowerings, _ad.primitive_jvps, *by_platform]
