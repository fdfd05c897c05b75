"""The primitive behind `remat.checkpoint`, with all its rules.

# The idea

A *region* is one equation that holds the jaxpr of a function:

    outs = remat[jaxpr, policy, prevent_cse, differentiated] args

Before differentiation, the equation is a plain call. Differentiation takes three steps, each of which
handles the equation:

1. *JVP*: the body becomes its own derivative, (primals, tangents) -> (primals, tangents).
2. *The cut*, primals known and tangents not: the body is cut in two (see `cut.py`). The
   forward part is inlined, so the forward pass is not a region anymore; it returns the residuals
   that the policy saves. The rest of the body, which computes everything else that the tangents need,
   becomes a new equation on residuals, inputs and tangents. It is linear in the tangents:
   `differentiated=True`.
3. *Transposition*: the new equation's body becomes: recompute the known values from residuals and
   inputs, then run the linear part backwards on the cotangents. It is one equation again, on
   residuals, inputs and cotangents.

So the recomputation and the equations that use it are in one equation until lowering, when
`barrier.py` keeps them from being merged with the forward pass. Higher derivatives need no further rules:
the result of each rule uses the primitive again.

`policy` decides what to save (see `cut_region` and `policies.resolve`). `prevent_cse` is a bool, or one
bool for each of the equation's inputs. `names_pending` is true if the policy selects names that were not
found yet: the user's derivative or batching rules, which run in step 1 or when the region is batched, may
introduce them. `cotangents` says which inputs are cotangents (empty if that is no longer known): the
recomputation depends only on the other inputs. `is_alone` is true if the region is in the body of a loop
that is not inlined, where no other operations could be merged with it or be moved out.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from remat import _jax
from remat.aliases import Array, Atom, Aval, AxisData, Dim, Effect, IrValue, Params, PolicyLike
from remat.errors import EffectError, LinearizationError
from remat.ir import jaxprs
from remat.ir.split import (
    SAVE,
    Mode,
    Operands,
    Parts,
    Policy,
    register,
    results_and_residuals,
    split as split_program,
    split_call,
    without_unused,
)
from remat.transform import barrier, policies, residuals
from remat.transform.cut import Cut, cut, save_compact
from remat.transform.outlining import outlined
from remat.transform.refs import with_values

_jax.exclude_from_tracebacks(__file__)

PreventCse = bool | tuple[bool, ...]

remat_p = _jax.Primitive("remat")
remat_p.multiple_results = True


def parameters(
    jaxpr: _jax.Jaxpr,
    *,
    policy: PolicyLike = None,
    prevent_cse: PreventCse = False,
    differentiated: bool = False,
    names_pending: bool = False,
    cotangents: tuple[bool, ...] = (),
    is_alone: bool = False,
) -> Params:
    """Return the parameters of a region's equation; the module's docstring explains them."""
    return {
        "jaxpr": jaxpr,
        "policy": policy,
        "prevent_cse": prevent_cse,
        "differentiated": differentiated,
        "names_pending": names_pending,
        "cotangents": cotangents,
        "is_alone": is_alone,
    }


def bind(args: Sequence[Array], jaxpr: _jax.Jaxpr, **options: Any) -> list[Array]:
    """Apply a region's jaxpr to its arguments, as one equation with these `parameters`."""
    params = parameters(jaxpr, **options)
    prevent_cse = params["prevent_cse"]
    assert isinstance(prevent_cse, bool) or len(prevent_cse) == len(args)
    return remat_p.bind(*args, **params)


def region_equation(
    invars: Sequence[Atom],
    outvars: Sequence[_jax.Var],
    jaxpr: _jax.Jaxpr,
    *,
    like: _jax.JaxprEqn | None = None,
    **options: Any,
) -> _jax.JaxprEqn:
    """Return a region's equation with these `parameters`, and with source and context of `like`."""
    return _jax.new_eqn(invars, outvars, remat_p, parameters(jaxpr, **options), like)


def _rebind(
    args: Sequence[Array], jaxpr: _jax.Jaxpr, added: int | None, params: dict
) -> list[Array]:
    """Bind the primitive again after a transformation changed a region's inputs.

    `added` is the number of new inputs before the old ones; None if the inputs do not correspond.
    """
    prevent_cse = params["prevent_cse"]
    if isinstance(prevent_cse, tuple):
        if added is None:
            prevent_cse = any(prevent_cse)
        else:
            prevent_cse = (False,) * added + prevent_cse
    cotangents = params["cotangents"]
    if cotangents:
        cotangents = () if added is None else (False,) * added + cotangents
    return bind(args, jaxpr, **dict(params, prevent_cse=prevent_cse, cotangents=cotangents))


def fenced_inputs(prevent_cse: PreventCse, n_inputs: int) -> tuple[bool, ...]:
    """Return for each input of a region whether its barrier includes it."""
    return (prevent_cse,) * n_inputs if isinstance(prevent_cse, bool) else prevent_cse


def _select(prevent_cse: PreventCse, chosen: Sequence[bool]) -> PreventCse:
    if isinstance(prevent_cse, bool):
        return prevent_cse
    return tuple(p for p, c in zip(prevent_cse, chosen) if c)


def _prepend(n: int, prevent_cse: PreventCse) -> PreventCse:
    return prevent_cse if isinstance(prevent_cse, bool) else (False,) * n + prevent_cse


def _append(prevent_cse: PreventCse, n: int) -> PreventCse:
    return prevent_cse if isinstance(prevent_cse, bool) else prevent_cse + (True,) * n


# --------------------------------------------------------------------------------------------------
# Evaluation and types


@remat_p.def_impl
def _impl(*args: Array, jaxpr: _jax.Jaxpr, **_: object) -> list[Array]:
    return _jax.eval_jaxpr(jaxpr, (), *args)


@remat_p.def_effectful_abstract_eval
def _abstract_eval(*_: Aval, jaxpr: _jax.Jaxpr, **__: object) -> tuple[list[Aval], set[Effect]]:
    return [v.aval for v in jaxpr.outvars], _jax.positional_effects(jaxpr)


# --------------------------------------------------------------------------------------------------
# Step 1: the derivative


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Array], *, jaxpr: _jax.Jaxpr, **params: Any
) -> tuple[list[Array], list[Array]]:
    nonzero = [type(t) is not _jax.Zero for t in tangents]
    derived = _derive(jaxpr, nonzero, params)
    given = [t for t in tangents if type(t) is not _jax.Zero]

    def apply(body: _jax.Jaxpr, args: Sequence[Array], added: int) -> list[Array]:
        flags = _prepend(added, derived.params["prevent_cse"])
        return bind(args, body, **{**derived.params, "prevent_cse": flags})

    # The user's derivative rules are inlined by now, and may use refs.
    outs = with_values(derived.jaxpr, (*derived.consts, *primals, *given), apply)
    out_primals, nonzero_outs = _jax.split_list(outs, [len(jaxpr.outvars)])
    remaining = iter(nonzero_outs)
    out_tangents = [
        next(remaining) if nz else _jax.zero_tangent(p)
        for p, nz in zip(out_primals, derived.outs_nonzero)
    ]
    return out_primals, out_tangents


class _Derived(NamedTuple):
    """The derivative of a region: (constants, primals, nonzero tangents) -> (primals, tangents)."""

    jaxpr: _jax.Jaxpr
    consts: tuple[Array, ...]
    outs_nonzero: Sequence[bool]
    params: Params  # of its equation, all but the jaxpr


def _derive(jaxpr: _jax.Jaxpr, nonzero: Sequence[bool], params: Mapping[str, Any]) -> _Derived:
    names_pending = params["names_pending"]
    body, consts, outs_nonzero = _jax.jvp_of_jaxpr(jaxpr, nonzero)
    if names_pending:
        names_pending = policies.check_names(params["policy"], body)
    changed = {
        "prevent_cse": _append(_prepend(len(consts), params["prevent_cse"]), sum(nonzero)),
        "names_pending": names_pending,
        "cotangents": (),  # the derivative has other inputs
    }
    return _Derived(body, consts, outs_nonzero, {**params, **changed})


_jax.register_jvp(remat_p, _jvp)


# --------------------------------------------------------------------------------------------------
# Step 2: the cut


def _linearize(
    nonzero: Sequence[bool],
    primals: Sequence[Array],
    *,
    jaxpr: _jax.Jaxpr,
    **params: Any,
) -> tuple[list[Array], list[bool], list[Array], Callable[..., list[Array]]]:
    """Take steps 1 and 2 at once: return the results, and the linear program on the tangents."""
    derived = _derive(jaxpr, nonzero, params)
    values, n_tangents = [*derived.consts, *primals], sum(nonzero)
    runs: list[tuple[_Forward, list[Array]]] = []

    def run(body: _jax.Jaxpr, args: Sequence[Array], added: int) -> list[Array]:
        known = args[: len(args) - n_tangents]
        unknown = (False,) * len(known) + (True,) * n_tangents
        flags = _prepend(added, derived.params["prevent_cse"])
        forward = _run_forward(body, unknown, known, {**derived.params, "prevent_cse": flags})
        if any(forward.cut.outs_unknown[: len(jaxpr.outvars)]):
            raise LinearizationError(_why_unknown(body, unknown, len(jaxpr.outvars)))
        if any(forward.cut.outs_unknown[len(derived.jaxpr.outvars) :]):
            raise EffectError(
                "a derivative rule in a checkpointed function writes a tangent to a ref. Let the "
                "rule return it instead."
            )
        used = forward.cut.backward_inputs
        runs.append((forward, [*forward.saved, *(v for v, u in zip(known, used) if u)]))
        later = [None] * sum(forward.cut.outs_unknown)
        return _jax.merge_lists(forward.cut.outs_unknown, forward.outs, later)

    outs = with_values(derived.jaxpr, [*values, *(None,) * n_tangents], run)
    ((forward, residuals),) = runs
    used = forward.cut.backward_inputs[len(forward.cut.backward_inputs) - n_tangents :]
    is_unknown = iter(forward.cut.outs_unknown[len(jaxpr.outvars) :])
    outs_nonzero = [nz and next(is_unknown) for nz in derived.outs_nonzero]

    def apply(residuals: Sequence[Array], tangents: Sequence[Array]) -> list[Array]:
        later = [t for t, u in zip(tangents, used) if u]
        return remat_p.bind(*residuals, *later, **forward.backward)

    return outs[: len(jaxpr.outvars)], outs_nonzero, residuals, apply


def _why_unknown(jaxpr: _jax.Jaxpr, unknown: Sequence[bool], n_outs: int) -> str:
    """Return which equation makes a result of a region depend on tangents, as an error message."""
    later = {v for v, u in zip(jaxpr.invars, unknown) if u}
    of_tangents: list[_jax.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if any(_jax.is_var(v) and v in later for v in eqn.invars):
            later.update(eqn.outvars)
            of_tangents.append(eqn)
    wanted = {v for v in jaxpr.outvars[:n_outs] if _jax.is_var(v)}
    on_the_way: list[_jax.JaxprEqn] = []
    for eqn in reversed(of_tangents):
        if any(v in wanted for v in eqn.outvars):
            wanted.update(v for v in eqn.invars if _jax.is_var(v))
            on_the_way.append(eqn)
    # An equation that mixes values and tangents returns both; an operation on tangents returns one value.
    mixing = [eqn for eqn in on_the_way if len(eqn.outvars) > 1] or on_the_way
    made_by = "".join(f": `{e.primitive}` at {_jax.source_line_of(e)}" for e in mixing[-1:])
    return (
        "a result of a checkpointed function is computed from tangents, so it is not known in the "
        f"forward pass{made_by} mixes values and tangents. Move this operation out of the "
        "checkpointed function, or give it a derivative of its own with jax.custom_vjp."
    )


_jax.register_linearization(remat_p, _linearize)


class _Forward(NamedTuple):
    """The results of a region's forward pass, and its equation for the backward pass."""

    cut: Cut
    outs: list[Array]  # the known results
    saved: list[Array]  # the residuals
    backward: Params  # the parameters of the remaining equation


def _run_forward(
    jaxpr: _jax.Jaxpr,
    unknown: tuple[bool, ...],
    values: Sequence[Array],
    params: Mapping[str, Any],
) -> _Forward:
    """Cut a region and run its forward half on the known inputs' values."""
    _check_effects(jaxpr)
    c = cut_region(jaxpr, unknown, params["policy"])
    inputs = [v for v, used in zip(values, c.forward_inputs) if used]
    outs = _jax.eval_jaxpr(c.forward, (), *inputs)
    known_outs, saved = _jax.split_list(outs, [len(outs) - c.n_residuals])
    _log_residuals(c, [not u for u in unknown])
    flags = _later_flags(params["prevent_cse"], c)
    backward = parameters(
        c.backward, policy=params["policy"], prevent_cse=flags, differentiated=True
    )
    return _Forward(c, known_outs, saved, backward)


def _partial_eval(
    trace: Any, *tracers: _jax.Tracer, jaxpr: _jax.Jaxpr, **params: Any
) -> list[Array]:
    """Take step 2 alone, for equations that JAX differentiates by partial evaluation."""
    unknown = tuple(not k for k in _jax.known_tracers(tracers))
    values = _jax.known_values(tracers)
    c, known_outs, saved, params = _run_forward(jaxpr, unknown, values, params)
    later = [t for t, used in zip(tracers, c.backward_inputs) if used]
    unknown_outs = _jax.stage_eqn(trace, remat_p, saved, later, c.backward, params)
    return _jax.merge_lists(c.outs_unknown, known_outs, unknown_outs)


_jax.register_partial_eval(remat_p, _partial_eval)


def cut_region(jaxpr: _jax.Jaxpr, ins_unknown: tuple[bool, ...], policy: PolicyLike) -> Cut:
    """Cut a region's jaxpr as its policy decides (None: nothing is saved)."""
    marked, decide = policies.resolve(policy, jaxpr)
    return cut(marked, ins_unknown, decide)


def _later_flags(prevent_cse: PreventCse, c: Cut) -> PreventCse:
    """Return `prevent_cse` for the backward half of a cut."""
    kept = _select(prevent_cse, c.backward_inputs)
    return (True,) * c.n_residuals + kept if isinstance(kept, tuple) else kept


def _check_effects(jaxpr: _jax.Jaxpr) -> None:
    refused = _jax.disallowed_effects(jaxpr)
    if refused:
        names = ", ".join(sorted(str(effect) for effect in refused))
        raise EffectError(
            f"{_jax.EFFECTS_NOT_SUPPORTED}: {names}. A recomputation would repeat the effect. Move "
            "what causes it out of the checkpointed function, or use a variant without it "
            "(for callbacks: jax.pure_callback, or ordered=False)."
        )
    if _jax.uses_refs(jaxpr):
        raise EffectError(
            "a checkpointed function cannot be differentiated that reads or writes a ref if a "
            "function with derivative rules of its own (jax.custom_vjp, jax.custom_jvp) in it takes "
            "or makes a ref, or if a ref is not in the default memory. Read the ref before the "
            "checkpointed function and write it after."
        )


def _log_residuals(c: Cut, known: Sequence[bool]) -> None:
    level = logging.WARNING if _jax.logs_residuals() else logging.DEBUG
    if not _jax.residuals_logger.isEnabledFor(level):
        return
    flags = [k for k, used in zip(known, c.backward_inputs) if used]
    inputs = [v for v, k in zip(c.backward.invars[c.n_residuals :], flags) if k]
    unnamed = [""] * len(c.forward.invars)
    computed = list(residuals.describe(c.forward, c.n_residuals, unnamed))
    lines = []
    if inputs:
        lines += ["saving inputs with shapes:", *(f"  {v.aval.str_short()}" for v in inputs)]
    if computed:
        conjunction = "and " if inputs else ""
        lines.append(f"{conjunction}saving these intermediates:")
        lines += [f"  {r.aval.str_short()} from {r.origin}" for r in computed]
    _jax.residuals_logger.log(
        level, "remat-decorated function %s", "\n".join(lines) or "saving nothing"
    )


def _split_region(eqn: _jax.JaxprEqn, operands: Operands, policy: Policy) -> Parts:
    """Split a region inside of a program that is being split.

    The policy of the program decides. If there is none (`Mode`), the region's own policy does.
    `jax.checkpoint`'s regions are split in the same way.
    """
    if isinstance(policy, Mode):
        return _split_by_own_policy(eqn, operands.unknown)
    parts = split_call(eqn, operands, policy)
    changed: Params = {}
    if eqn.primitive is remat_p:
        changed = {"names_pending": False, "cotangents": ()}
    return parts._replace(
        known=[_with_params(e, **changed) for e in parts.known],
        staged=[_with_params(e, **changed, differentiated=True) for e in parts.staged],
    )


def _with_params(eqn: _jax.JaxprEqn, **changed: Any) -> _jax.JaxprEqn:
    return eqn.replace(params={**eqn.params, **changed})


def _split_by_own_policy(eqn: _jax.JaxprEqn, unknown: tuple[bool, ...]) -> Parts:
    params = eqn.params
    _check_effects(params["jaxpr"])
    c = cut_region(params["jaxpr"], unknown, params["policy"])
    residuals = [_jax.new_var(v.aval) for v in c.backward.invars[: c.n_residuals]]
    known = [v for v, u in zip(eqn.invars, unknown) if not u]
    known = [v for v, used in zip(known, c.forward_inputs) if used]
    results = [v for v, u in zip(eqn.outvars, c.outs_unknown) if not u]
    made = [*results, *residuals]
    if jaxprs.makes_its_results(c.forward):
        # As in `_run_forward`, the forward pass is no longer a region.
        called = {v: r for v, r in zip(c.forward.outvars, made) if not _jax.is_dropped(r)}
        forward, _ = jaxprs.inlined(c.forward, known, eqn, called)
    else:
        forward = [region_equation(known, made, c.forward, like=eqn, policy=save_compact)]
    later = [v for v, used in zip(eqn.invars, c.backward_inputs) if used]
    unknown_results = [v for v, u in zip(eqn.outvars, c.outs_unknown) if u]
    changed: Params = {"jaxpr": c.backward, "differentiated": True}
    changed["prevent_cse"] = _later_flags(params["prevent_cse"], c)
    if eqn.primitive is remat_p:
        changed |= {"names_pending": False, "cotangents": ()}
    operands = [*residuals, *later]
    backward = _jax.new_body_eqn(
        eqn, operands, unknown_results, {**params, **changed}, [(c.backward, operands)]
    )
    return Parts(forward, [backward], c.outs_unknown)


def _split_in_jax_region(
    eqn: _jax.JaxprEqn, unknown: Sequence[bool], policy: Policy
) -> tuple[Sequence[_jax.JaxprEqn], Sequence[_jax.JaxprEqn], Sequence[bool]]:
    """Split a region inside one of `jax.checkpoint`."""
    none = (False,) * len(eqn.invars)
    parts = _split_region(eqn, Operands(tuple(unknown), none), policy)
    return parts.known, parts.staged, parts.unknown


for _name in ("remat", "remat2"):
    register(_name, _split_region)
_jax.register_split(remat_p, _split_in_jax_region)


# --------------------------------------------------------------------------------------------------
# Step 3: transposition


def _transpose(
    cts: Sequence[Array],
    *args: Array,
    jaxpr: _jax.Jaxpr,
    prevent_cse: PreventCse,
    **params: Any,
) -> Any:
    linear = tuple(_jax.is_linear_input(x) for x in args)
    outs_zero = tuple(type(ct) is _jax.Zero for ct in cts)
    body, consts, ins_zero, out_tree = _transposed(jaxpr, linear, outs_zero)
    values = [x for x, lin in zip(args, linear) if not lin]
    given = [ct for ct in cts if type(ct) is not _jax.Zero]
    flags = _append(_select(prevent_cse, [not lin for lin in linear]), len(given))
    if isinstance(flags, tuple):
        flags = (False,) * len(consts) + flags
    params["cotangents"] = (False,) * (len(consts) + len(values)) + (True,) * len(given)
    leaves = bind((*consts, *values, *given), body, prevent_cse=flags, **params)
    nonzero_cts, logs = _jax.unflatten(out_tree, leaves)
    _accumulate([x for x, lin in zip(args, linear) if lin], ins_zero, nonzero_cts)
    return logs or None


# Cached, since JAX traces and lowers each jaxpr object once.
@_jax.weakref_lru_cache
def _transposed(
    jaxpr: _jax.Jaxpr, linear: tuple[bool, ...], outs_zero: tuple[bool, ...]
) -> _jax.Transposed:
    """Return the jaxpr from nonlinear inputs and nonzero cotangents to the linear inputs' cotangents.

    The nonlinear part is evaluated first: these equations are the recomputation.
    """
    halves = without_unused(split_program(jaxpr, linear, SAVE))
    _, residuals = results_and_residuals(halves)
    known = _jax.rebuild(halves.known, outvars=residuals)
    return _jax.transpose(jaxpr, known, halves.staged, linear, outs_zero, halves.outs_unknown)


def _accumulate(
    targets: Sequence[Any], zeros: Sequence[bool], nonzero_cts: Sequence[Array]
) -> None:
    remaining = iter(nonzero_cts)
    for target, zero in zip(targets, zeros):
        if not zero:
            target.accum(next(remaining))


_jax.register_transpose(remat_p, _transpose)


# --------------------------------------------------------------------------------------------------
# Batching


def _batch(
    axis_data: AxisData,
    args: Sequence[Array],
    dims: Sequence[Dim],
    *,
    jaxpr: _jax.Jaxpr,
    **params: Any,
) -> tuple[list[Array], list[Dim]]:
    body, consts, out_dims = _jax.batch_jaxpr(jaxpr, axis_data, dims)
    if params["names_pending"]:
        params["names_pending"] = policies.check_names(params["policy"], body)
    return _rebind((*consts, *args), body, len(consts), params), out_dims


_jax.register_batching(remat_p, _batch)


# --------------------------------------------------------------------------------------------------
# Dead code, refs, errors, high-level types


def _shrink(eqn: _jax.JaxprEqn, used_inputs: list[bool], jaxpr: _jax.Jaxpr) -> dict:
    prevent_cse = _select(eqn.params["prevent_cse"], used_inputs)
    cotangents = tuple(c for c, used in zip(eqn.params["cotangents"], used_inputs) if used)
    changed = {"jaxpr": jaxpr, "prevent_cse": prevent_cse, "names_pending": False}
    return dict(eqn.params, **changed, cotangents=cotangents)


_jax.register_dce(remat_p, _shrink)
_jax.register_discharge(remat_p, _rebind)
_jax.register_checkify(remat_p, _rebind)
_jax.register_key_reuse(remat_p)
_jax.register_hijax(remat_p, _rebind)


# --------------------------------------------------------------------------------------------------
# Lowering


def _lower(
    how: barrier.Protection,
    ctx: _jax.LoweringContext,
    *args: IrValue,
    jaxpr: _jax.Jaxpr,
    prevent_cse: PreventCse,
    differentiated: bool,
    is_alone: bool,
    **_: object,
) -> Sequence[IrValue]:
    jaxpr = outlined(jaxpr)
    if not differentiated:
        return _jax.lower_inline(ctx, jaxpr, args)
    fenced = fenced_inputs(prevent_cse, len(args))
    return barrier.lower_protected(ctx, jaxpr, args, fenced, how, is_alone=is_alone)


_default = barrier.Protection.BARRIER
_by_platform = {
    platform: functools.partial(_lower, how)
    for platform in ("cpu", *barrier.GPUS)
    if (how := barrier.protection(platform, _jax.JAXLIB_VERSION)) is not _default
}
_jax.register_lowering(remat_p, functools.partial(_lower, _default), **_by_platform)
