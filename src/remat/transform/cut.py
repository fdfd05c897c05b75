"""The cut of a differentiated region: which values the forward pass saves and which are recomputed.

After differentiation a region is a known part K (primal values and the coefficients of the linear
part) and a linear part on tangents that needs some values of K. Saving is choosing a cut of K: the
values on the cut are the residuals; the other values that the linear part needs are recomputed from them
and from the region's inputs, which are always available. A policy is one way to choose the cut.

Three things make a cut smaller than what a policy alone would choose:

* a value that the linear part does not need is not saved;
* a value that follows from a saved one, or from an input, by rearranging or casting it
  (`convert_element_type`, `reshape`, `broadcast_in_dim`, `transpose`, ...) is not saved again;
* the forward part computes only what its results and the residuals need.

Residuals of a floating-point type that the forward part uses as well pass through `reduce_precision`:
compilers may carry intermediate results in higher precision than their type has, and the backward
pass must see the numbers that the forward pass saw. Types for whose values `reduce_precision` is not
the identity are excluded (see `ROUNDED_TYPES`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from remat import _jax
from remat.aliases import Aval, Decision, Size
from remat.ir.operations import names_where
from remat.ir.split import split

_REARRANGEMENTS = names_where("is_rearrangement")

# The types for which `reduce_precision` with their own numbers of bits returns every value unchanged.
# It assumes an IEEE format, which has infinities, so it turns the largest values of e4m3fn and the fnuz
# types into infinity or NaN. It also flushes subnormal numbers of types whose arithmetic the compiler does
# in a type with more exponent bits: those of e4m3 and e3m4 would be lost.
ROUNDED_TYPES = frozenset({"float8_e5m2", "float16", "bfloat16", "float32", "float64"})


class Cut(NamedTuple):
    """A region's jaxpr in two parts. Both are on subsets of the region's inputs.

    `forward` returns the region's known results, then the residuals. `backward` takes the residuals,
    then inputs, and returns the region's unknown results; its equations on known values are the
    recomputation.
    """

    forward: _jax.Jaxpr
    forward_inputs: list[bool]
    backward: _jax.Jaxpr
    backward_inputs: list[bool]
    outs_unknown: list[bool]
    n_residuals: int


# Cached: JAX lowers each jaxpr object once, and a policy is asked only once.
@_jax.weakref_lru_cache
def cut(jaxpr: _jax.Jaxpr, ins_unknown: tuple[bool, ...], policy: Callable[..., Decision]) -> Cut:
    """Cut a region as `policy(primitive, *avals, **params)` decides.

    Args:
      jaxpr: the region after differentiation.
      ins_unknown: which inputs are not known in the forward pass. They are all available later.
      policy: in JAX's form. It is asked about each known operation: save, offload, or recompute. A policy of
        `remat.policies` was evaluated before, by `policies.resolve`; this is then a callable that only reads
        the marks in the jaxpr.
    """
    parts = split(jaxpr, ins_unknown, policy)
    wanted = [u for u, staged in zip(parts.outs_unknown, parts.outs_staged) if staged]
    backward, used = _jax.dce(parts.staged, wanted)
    used_residuals = used[: parts.n_residuals]
    forward = parts.known
    n_known_outs = len(forward.outvars) - parts.n_residuals
    residuals = [v for v, u in zip(forward.outvars[n_known_outs:], used_residuals) if u]

    inputs = [v for v, unknown in zip(jaxpr.invars, ins_unknown) if not unknown]
    kept, derivations = _drop_derivable(forward, residuals, inputs, set(backward.invars))
    staged_inputs = parts.staged.invars[parts.n_residuals :]
    # Values that the backward part repeats anyway have the same variables there.
    derived = {v for eqn in derivations for v in eqn.outvars}
    others = [eqn for eqn in backward.eqns if derived.isdisjoint(eqn.outvars)]
    backward = _jax.rebuild(backward, invars=[*kept, *staged_inputs], eqns=[*derivations, *others])
    backward, used = _jax.dce(backward, [True] * len(backward.outvars))
    assert all(used[: len(kept)]), "a residual that nothing needs"

    forward = _jax.rebuild(forward, outvars=[*forward.outvars[:n_known_outs], *kept])
    forward, forward_inputs = _jax.dce(forward, [True] * len(forward.outvars))
    forward = round_residuals(forward, len(kept))
    if _jax.checks_enabled():
        _jax.check_jaxpr(forward)
        _jax.check_jaxpr(backward)
    return Cut(
        forward, forward_inputs, backward, used[len(kept) :], list(parts.outs_unknown), len(kept)
    )


# --------------------------------------------------------------------------------------------------
# The primitive's own policies, for equations that have no policy of the user's


_EXPANDING = names_where("is_expansion")


def save_compact(prim: _jax.Primitive, /, *_: object, **__: object) -> bool:
    """Return False for operations that make a large value from a small one, and True for others.

    JAX moves loop-invariant values out of a loop, and splits the forward half of the body for that. Masks and
    constants as large as activations would then be live during the whole loop.
    """
    return prim.name not in _EXPANDING


# --------------------------------------------------------------------------------------------------


def _drop_derivable(
    forward: _jax.Jaxpr,
    residuals: Sequence[_jax.Var],
    inputs: Sequence[_jax.Var],
    used_later: set[_jax.Var],
) -> tuple[list[_jax.Var], list[_jax.JaxprEqn]]:
    """Return the residuals that must be saved, and the equations that compute the others from them."""
    producer = {v: eqn for eqn in forward.eqns for v in eqn.outvars}
    saved = dict.fromkeys(residuals)
    available = set(inputs)
    needed: dict[int, _jax.JaxprEqn] = {}
    for v in residuals:
        chain: list[_jax.JaxprEqn] = []
        source = v
        while (eqn := producer.get(source)) is not None and _rearranges(eqn):
            chain.append(eqn)
            source = eqn.invars[0]
            if source in saved or source in available:
                break
        if not chain or source is v:
            continue
        # An input that the backward part does not use otherwise is worth keeping alive only if it is no
        # larger than the residual that it replaces.
        free = source in saved or source in used_later
        if free or (source in available and _is_no_larger(source.aval, v.aval)):
            del saved[v]
            needed.update((id(eqn), eqn) for eqn in chain)
    return list(saved), [eqn for eqn in forward.eqns if id(eqn) in needed]


def _rearranges(eqn: _jax.JaxprEqn) -> bool:
    return (
        eqn.primitive.name in _REARRANGEMENTS
        and not eqn.effects
        and len(eqn.invars) == len(eqn.outvars) == 1
        and not isinstance(eqn.invars[0], _jax.Literal)
    )


def _is_no_larger(a: Size, b: Size) -> bool:
    return _jax.decided(lambda: _n_bytes(a) <= _n_bytes(b)) is True


def _n_bytes(aval: Aval) -> Size:
    return aval.size * _jax.itemsize_bytes(aval)


def round_residuals(
    forward: _jax.Jaxpr, n_residuals: int, *, most_bytes: int | None = None
) -> _jax.Jaxpr:
    """Return the forward part in which all readers of a residual get it rounded to its type.

    With `most_bytes`, residuals of larger types (bytes per element) stay unchanged.
    """
    used = {v for eqn in forward.eqns for v in eqn.invars if not isinstance(v, _jax.Literal)}
    n_known = len(forward.outvars) - n_residuals
    exact: dict[_jax.Var, _jax.Var] = {}
    for v in forward.outvars[n_known:]:
        if v in used and _is_rounded_type(v.aval, most_bytes):
            exact.setdefault(v, _jax.new_var(v.aval))
    if not exact:
        return forward
    # A residual keeps its variable, which now holds the rounded value; its producer gets a new one.
    # Every residual has a producer: inputs are available without being saved.
    eqns: list[_jax.JaxprEqn] = []
    for eqn in forward.eqns:
        rounded = [v for v in eqn.outvars if v in exact]
        if rounded and eqn.primitive is not _jax.reduce_precision_p:
            eqns.append(eqn.replace(outvars=[exact.get(v, v) for v in eqn.outvars]))
            eqns.extend(_round(eqn, exact[v], v) for v in rounded)
        else:
            eqns.append(eqn)
    return _jax.rebuild(forward, eqns=eqns)


def _is_rounded_type(aval: Aval, most_bytes: int | None) -> bool:
    if not isinstance(aval, _jax.ShapedArray) or str(aval.dtype) not in ROUNDED_TYPES:
        return False
    return most_bytes is None or aval.dtype.itemsize <= most_bytes


def _round(like: _jax.JaxprEqn, exact: _jax.Var, rounded: _jax.Var) -> _jax.JaxprEqn:
    info = jnp.finfo(rounded.aval.dtype)
    params = {"exponent_bits": info.nexp, "mantissa_bits": info.nmant}
    return _jax.new_eqn([exact], [rounded], _jax.reduce_precision_p, params, like)
