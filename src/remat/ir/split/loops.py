"""Splitting loops.

A `scan` becomes two. Of the values that the policy saves in the body, those that the second loop needs are
stacked by the first one; `_hoist` moves those that are equal in all steps in front of it, so that they are
not stacked. `_split_step` finds which carries are unknown. A `while` loop has no stacked residuals: it is
recomputed as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from remat import _jax
from remat.aliases import Atom
from remat.ir import jaxprs
from remat.ir.split.halves import (
    HOIST,
    SAVE,
    Flags,
    Mode,
    Operands,
    Parts,
    Policy,
    Split,
    both_parts,
    decide,
    known_only,
    known_part,
    leave,
    only,
    parts_of,
    register,
    results_and_residuals,
    split,
    staged_part,
)


def _scan(eqn: _jax.JaxprEqn, operands: Operands, policy: Policy) -> Parts:
    """Split a scan into a known one, which stacks the residuals, and a staged one, which reads them."""
    n_consts, n_carry = _jax.scan_arity(eqn)
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    halves = _split_step(_jax.open_jaxpr(body), operands, policy, n_consts, n_carry)
    results, residuals = results_and_residuals(halves)
    known_ins = known_only(eqn.invars, halves.ins_unknown)
    known_outs = known_only(eqn.outvars, halves.outs_unknown)
    n_known_consts = halves.ins_unknown[:n_consts].count(False)
    n_known_carry = halves.outs_unknown[:n_carry].count(False)

    loop = _hoist(eqn, halves.known, known_ins, n_known_consts, halves.n_residuals)
    stacked = [v for v in residuals if v not in loop.constant]
    leaving = leave(
        stacked,
        list(zip(results, known_outs))[n_known_carry:],
        lambda v: _jax.stacked(length, v.aval),
    )
    known = jaxprs.scan_of_step(
        eqn,
        _jax.rebuild(loop.step, outvars=[*results, *leaving.added]),
        [*loop.consts, *known_ins[n_known_consts:]],
        [*known_outs, *leaving.added_outside],
        len(loop.consts),
        n_known_carry,
    )

    constant = [v for v in residuals if v in loop.constant]
    order = _staged_operands(halves.ins_unknown, policy, n_consts, n_carry)
    step = _jax.open_jaxpr(body)
    staged = jaxprs.scan_of_step(
        eqn,
        _jax.rebuild(halves.staged, invars=[*constant, *(step.invars[i] for i in order), *stacked]),
        [*(loop.constant[v] for v in constant), *(eqn.invars[i] for i in order), *leaving.outside],
        only(eqn.outvars, halves.outs_staged),
        len(constant) + n_consts,
        halves.outs_staged[:n_carry].count(True),
    )
    return parts_of(halves, [*loop.before, known], staged)


def _split_step(
    step: _jax.Jaxpr, operands: Operands, policy: Policy, n_consts: int, n_carry: int
) -> Split:
    """Split a loop's step; a carry that is unknown after a step is unknown before the next one."""
    unknown = operands.unknown
    carry = unknown[n_consts : n_consts + n_carry]
    n_ys, repeats = len(step.outvars) - n_carry, not isinstance(policy, Mode)
    while True:
        halves = split(
            step,
            unknown,
            policy,
            ins_staged=[
                repeats or u or not n_consts <= i < n_consts + n_carry
                for i, u in enumerate(unknown)
            ],
            outs_unknown=(*carry, *(False,) * n_ys),
            outs_staged=(repeats,) * n_carry + (False,) * n_ys,
        )
        if halves.outs_unknown[:n_carry] == carry:
            return halves
        carry = halves.outs_unknown[:n_carry]
        unknown = (*unknown[:n_consts], *carry, *unknown[n_consts + n_carry :])


def _staged_operands(unknown: Flags, policy: Policy, n_consts: int, n_carry: int) -> Sequence[int]:
    """Return which operands of a loop its staged half takes, in order.

    If nothing is recomputed, the staged half has no known carry. Its linear operands then follow the
    other constants and precede the other slices, as JAX's transpose rule of `scan` requires.
    """
    places = range(len(unknown))
    if not isinstance(policy, Mode):
        return places
    carry = [i for i in places[n_consts : n_consts + n_carry] if unknown[i]]
    consts = sorted(places[:n_consts], key=lambda i: unknown[i])
    return [*consts, *carry, *sorted(places[n_consts + n_carry :], key=lambda i: not unknown[i])]


class _Loop(NamedTuple):
    """The known half of a loop, without its loop-invariant equations."""

    before: list[_jax.JaxprEqn]  # the loop-invariant equations
    step: _jax.Jaxpr
    consts: list[Atom]  # the step's leading operands
    constant: dict[_jax.Var, Atom]  # residuals that are the same in each step; their values outside


def _hoist(
    eqn: _jax.JaxprEqn, step: _jax.Jaxpr, operands: list[Atom], n_consts: int, n_residuals: int
) -> _Loop:
    """Move loop-invariant equations out of the known half of a loop."""
    consts, n_results = operands[:n_consts], len(step.outvars) - n_residuals
    varies = [i >= n_consts for i in range(len(step.invars))]
    if not n_residuals or step.constvars:
        return _Loop([], step, consts, {})
    halves = split(step, varies, HOIST, outs_unknown=(True,) * n_results + (False,) * n_residuals)
    if not halves.known.eqns:
        return _Loop([], step, consts, {})
    before, values = jaxprs.inlined(halves.known, consts, eqn)
    constant = known_only(step.outvars, halves.outs_unknown)
    rest = _jax.rebuild(halves.staged, outvars=only(step.outvars, halves.outs_unknown))
    n_leading = halves.n_residuals + n_consts
    kept = [i >= n_leading for i in range(len(rest.invars))]
    rest, used = _jax.dce(rest, [True] * len(rest.outvars), keep=kept)
    leading = only([*values[len(constant) :], *consts], used[:n_leading])
    return _Loop(before, rest, leading, dict(zip(constant, values)))


def _while(eqn: _jax.JaxprEqn, operands: Operands, policy: Policy) -> Parts:
    if not any(operands.unknown):
        assert not isinstance(policy, Mode), "without a policy, known operations are not split"
        saves = isinstance(decide(policy, eqn), _jax.SaveableType)
        return known_part(eqn) if saves else both_parts(eqn)
    test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    n_test, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    step = _split_while_step(_jax.open_jaxpr(body), operands.unknown[n_test:], n_body)
    unknown = operands.unknown[:n_test] + step.ins_unknown
    asked = split(_jax.open_jaxpr(test), unknown[:n_test] + step.outs_unknown, SAVE)
    if all(step.outs_unknown) or any(asked.outs_unknown):
        return staged_part(eqn)
    test, body = (
        _jax.with_equations(old, _jax.rebuild(half.known, outvars=results_and_residuals(half)[0]))
        for old, half in ((test, asked), (body, step))
    )
    invars = known_only(eqn.invars, unknown)
    n_test, n_body = unknown[:n_test].count(False), unknown[n_test:][:n_body].count(False)
    params = {
        "cond_jaxpr": test,
        "body_jaxpr": body,
        "cond_nconsts": n_test,
        "body_nconsts": n_body,
    }
    known = _jax.new_body_eqn(
        eqn,
        invars,
        known_only(eqn.outvars, step.outs_unknown),
        dict(eqn.params, **params),
        [(test, invars[:n_test] + invars[n_test + n_body :]), (body, invars[n_test:])],
    )
    # There are no stacked residuals, so the staged half recomputes the whole loop.
    saved = isinstance(policy, Mode)
    outs = [
        _jax.new_var(v.aval) if saved and not u else v
        for v, u in zip(eqn.outvars, step.outs_unknown)
    ]
    return Parts([known], [eqn.replace(outvars=outs)], step.outs_unknown)


def _split_while_step(body: _jax.Jaxpr, unknown: Flags, n_consts: int) -> Split:
    while True:
        step = split(body, unknown, SAVE, outs_unknown=unknown[n_consts:])
        if step.outs_unknown == unknown[n_consts:]:
            return step
        unknown = unknown[:n_consts] + step.outs_unknown


register("scan", _scan)
register("while", _while)
