"""Rewriting of jaxprs that read or write refs as jaxprs on the values that the refs hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax._src import core as _core
from jax._src.state import discharge as _discharge
from jax._src.state.types import (
    AccumEffect as _AccumEffect,
    RefEffect as _RefEffect,
    WriteEffect as _WriteEffect,
)
from jax.extend import core as _excore

from remat._jax.compat import (
    AbstractRef,
    Jaxpr,
    JaxprEqn,
    close,
    detach_consts,
    open_jaxpr,
    weakref_lru_cache,
)
from remat._jax.equations import (
    has_hidden_rules,
    is_high_primitive,
    is_jaxpr,
    jaxprs_of,
    rebuild,
    with_equations,
)
from remat.aliases import Array


class WithoutRefs(NamedTuple):
    """A jaxpr that takes the values of refs, and returns the new values of those that it writes.

    Attributes:
      jaxpr: takes the constants, then the inputs, with values in place of refs. Its results are
        followed by the new values, in the order of the inputs.
      constants: values that the rewriting introduced.
      is_ref: which inputs were refs.
      is_written: which inputs were refs that are written.
    """

    jaxpr: Jaxpr
    constants: tuple[Array, ...]
    is_ref: tuple[bool, ...]
    is_written: tuple[bool, ...]


# Cached, since JAX's own caches are keyed by jaxpr object.
@weakref_lru_cache
def without_refs(jaxpr: Jaxpr) -> WithoutRefs | None:
    """Rewrite a jaxpr that reads or writes refs as one on their values; None if that is unsupported.

    Refs in other memory spaces are unsupported, and so are refs that are passed to a function with
    custom derivative rules (`jax.custom_vjp`): JAX's rewriting would drop those rules.
    """
    if not uses_refs(jaxpr):
        return None
    is_ref = [isinstance(v.aval, AbstractRef) for v in jaxpr.invars]
    if not all(_is_plain_ref(v.aval) for v, r in zip(jaxpr.invars, is_ref) if r):
        return None
    hidden = _with_eqns_hidden(jaxpr)
    if _passes_refs_to_own_rules(hidden):
        return None
    try:
        discharged = _discharge.discharge_state(close(hidden), lower=False)
    except NotImplementedError:  # a primitive without a discharge rule
        return None
    body, constants = detach_consts(discharged)
    n_outs = len(jaxpr.outvars)
    changed = {e.input for e in jaxpr.effects if isinstance(e, (_WriteEffect, _AccumEffect))}
    refs = (v for v, r in zip(jaxpr.invars, is_ref) if r)
    new_values = [v for v, ref in zip(body.outvars[n_outs:], refs, strict=True) if ref in changed]
    body = rebuild(_with_eqns_shown(body), outvars=[*body.outvars[:n_outs], *new_values])
    is_written = tuple(v in changed for v in jaxpr.invars)
    return WithoutRefs(body, constants, tuple(is_ref), is_written)


# A property of an immutable jaxpr; kept for the recursion over nested jaxprs.
@weakref_lru_cache
def uses_refs(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr reads or writes refs outside of functions with custom derivative rules."""
    if not has_ref_effects(jaxpr):
        return False
    for eqn in jaxpr.eqns:
        if not _has_own_rules(eqn) and has_ref_effects(eqn):
            inner = [open_jaxpr(j) for j in jaxprs_of(eqn)]
            if not inner or any(map(uses_refs, inner)):
                return True
    return False


def has_ref_effects(x: Jaxpr | JaxprEqn) -> bool:
    """Return whether a jaxpr or an equation reads or writes refs, including those that it creates."""
    return any(isinstance(e, (_RefEffect, _core.InternalMutableArrayEffect)) for e in x.effects)


def is_ref(x: object) -> bool:
    """Return whether a value, traced or not, is a ref, or a type that of one."""
    return isinstance(getattr(x, "aval", x), AbstractRef)


def _is_plain_ref(aval: AbstractRef) -> bool:
    is_array = isinstance(aval.inner_aval, jax.core.ShapedArray)
    return is_array and aval.memory_space is None and aval.kind is None


def _has_own_rules(eqn: JaxprEqn) -> bool:
    return has_hidden_rules(eqn) or eqn.primitive.name in ("custom_lin", "custom_vmap_call")


def _passes_refs_to_own_rules(jaxpr: Jaxpr) -> bool:
    """Return whether the rewriting would involve equations with derivative rules."""
    return any(
        _has_own_rules(eqn) or any(_passes_refs_to_own_rules(open_jaxpr(j)) for j in jaxprs_of(eqn))
        for eqn in jaxpr.eqns
    )


# --------------------------------------------------------------------------------------------------
# Equations without refs
#
# JAX rewrites the jaxprs of loops, branches and calls by tracing them with everything lowered, which
# inlines functions with derivative rules and drops the rules. So an equation that uses no refs is replaced
# by an opaque one until the rewriting is done.

_hidden_p = _excore.Primitive("remat_hidden")
_hidden_p.multiple_results = True
_hidden_p.def_effectful_abstract_eval(
    lambda *_, eqn: ([v.aval for v in eqn.outvars], set(eqn.effects))
)


def _with_eqns_hidden(jaxpr: Jaxpr) -> Jaxpr:
    return rebuild(jaxpr, eqns=[_hidden(eqn) for eqn in jaxpr.eqns])


def _hidden(eqn: JaxprEqn) -> JaxprEqn:
    takes_refs = any(isinstance(v.aval, AbstractRef) for v in (*eqn.invars, *eqn.outvars))
    if _has_own_rules(eqn) and not takes_refs:
        # Refs that such a function creates itself stay in it.
        eqn = eqn.replace(effects=eqn.effects - {_core.internal_mutable_array_effect})
    if takes_refs or has_ref_effects(eqn):
        return _with_bodies(eqn, _with_eqns_hidden)
    has_more = is_high_primitive(eqn) or _has_own_rules(eqn) or any(jaxprs_of(eqn))
    return eqn.replace(primitive=_hidden_p, params={"eqn": eqn}) if has_more else eqn


def _with_eqns_shown(jaxpr: Jaxpr) -> Jaxpr:
    return rebuild(jaxpr, eqns=[_shown(eqn) for eqn in jaxpr.eqns])


def _shown(eqn: JaxprEqn) -> JaxprEqn:
    if eqn.primitive is not _hidden_p:
        return _with_bodies(eqn, _with_eqns_shown)
    return eqn.params["eqn"].replace(
        invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info
    )


def _with_bodies(eqn: JaxprEqn, change: Callable[[Jaxpr], Jaxpr]) -> JaxprEqn:
    """Return the equation with all its jaxprs changed."""

    def changed(value: Any) -> Any:
        if is_jaxpr(value):
            return with_equations(value, change(open_jaxpr(value)))
        if type(value) in (tuple, list):
            return type(value)(map(changed, value))
        return value

    return eqn.replace(params={name: changed(value) for name, value in eqn.params.items()})
