"""Splitting calls and regions: equations that run one jaxpr, once and on their operands."""

from __future__ import annotations

from collections.abc import Sequence

from remat import _jax
from remat.aliases import JaxprLike
from remat.ir import jaxprs
from remat.ir.split.halves import (
    ANY_CALL,
    Flags,
    Operands,
    Parts,
    Policy,
    known_only,
    leave,
    only,
    parts_of,
    register,
    results_and_residuals,
    split,
)


def split_call(eqn: _jax.JaxprEqn, operands: Operands, policy: Policy) -> Parts:
    """Split an equation that runs one jaxpr once, on its operands, into two equations of its kind."""
    (key,) = jaxprs.body_keys(eqn)
    body = eqn.params[key]
    halves = split(_jax.open_jaxpr(body), operands.unknown, policy)
    results, residuals = results_and_residuals(halves)
    leaving = leave(residuals, zip(results, known_only(eqn.outvars, halves.outs_unknown)))
    added = tuple(v in leaving.added for v in residuals)
    known = _call_again(
        eqn,
        key,
        _half(body, halves.known if all(added) else _returning(halves.known, len(results), added)),
        known_only(range(len(eqn.invars)), halves.ins_unknown),
        known_only(range(len(eqn.outvars)), halves.outs_unknown),
        added_outs=leaving.added_outside,
    )
    staged = _call_again(
        eqn,
        key,
        _half(body, halves.staged),
        range(len(eqn.invars)),
        only(range(len(eqn.outvars)), halves.outs_staged),
        added_ins=leaving.outside,
    )
    return parts_of(halves, [known], staged)


def _call_again(
    eqn: _jax.JaxprEqn,
    key: str,
    body: JaxprLike,
    ins: Sequence[int],
    outs: Sequence[int],
    *,
    added_ins: Sequence[_jax.Var] = (),
    added_outs: Sequence[_jax.Var] = (),
) -> _jax.JaxprEqn:
    """Return the call with another body, some of its operands and results, and additional ones.

    Additional operands come first, additional results last.
    """
    params = dict(eqn.params)
    params[key] = body
    for name, default in _jax.ADDED_OPERAND.items():
        if isinstance(params.get(name), tuple):
            params[name] = (default,) * len(added_ins) + tuple(params[name][i] for i in ins)
    for name, default in _jax.ADDED_RESULT.items():
        if isinstance(params.get(name), tuple):
            params[name] = tuple(params[name][i] for i in outs) + (default,) * len(added_outs)
    invars = [*added_ins, *(eqn.invars[i] for i in ins)]
    outvars = [*(eqn.outvars[i] for i in outs), *added_outs]
    return _jax.new_body_eqn(eqn, invars, outvars, params, [(body, invars)])


# Cached, so that calls of the same body get the same halves: JAX lowers each jaxpr object once.
@_jax.weakref_lru_cache
def _returning(jaxpr: _jax.Jaxpr, n_results: int, added: Flags) -> _jax.Jaxpr:
    residuals = only(jaxpr.outvars[n_results:], added)
    return _jax.rebuild(jaxpr, outvars=[*jaxpr.outvars[:n_results], *residuals])


# The same, for the body with its constants.
@_jax.weakref_lru_cache
def _half(body: JaxprLike, half: _jax.Jaxpr) -> JaxprLike:
    return _jax.with_equations(body, half)


register(ANY_CALL, split_call)
