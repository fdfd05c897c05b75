"""Splitting branches: residuals of different branches share slots, as far as types agree."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

import jax

from remat import _jax
from remat.aliases import Atom, Aval, JaxprLike
from remat.ir import jaxprs
from remat.ir.split.halves import (
    Flags,
    Operands,
    Parts,
    Policy,
    Split,
    known_only,
    only,
    parts_of,
    register,
    results_and_residuals,
    split,
    staged_part,
    without_unused,
)


def _cond(eqn: _jax.JaxprEqn, operands: Operands, policy: Policy) -> Parts:
    if operands.unknown[0]:
        return staged_part(eqn)
    index, *ins = eqn.invars
    branches = [_jax.open_jaxpr(b) for b in eqn.params["branches"]]
    halves = _split_branches(branches, operands, policy)
    one = halves[0]
    # With shared slots, dead-code elimination can no longer tell which branch needs which residual.
    halves = [without_unused(half, repeated=True) for half in halves]
    slots = shared_slots([results_and_residuals(half)[1] for half in halves])
    copies = _copies(halves, slots, eqn)
    passed = [
        copies[i].fetch.outvars[0] if i in copies else _jax.new_var(aval)
        for i, aval in enumerate(slots.avals)
    ]
    knowns, stageds = [], []
    for half, places, body in zip(halves, slots.places, eqn.params["branches"]):
        known, staged = _with_slots(half, places, [v.aval for v in passed], copies, eqn)
        knowns.append(_jax.with_equations(body, known))
        stageds.append(_jax.with_equations(body, staged))
    known_eqn = branch_again(
        eqn,
        knowns,
        [index, *known_only(ins, one.ins_unknown)],
        [*known_only(eqn.outvars, one.outs_unknown), *passed],
    )
    staged_eqn = branch_again(
        eqn, stageds, [index, *passed, *ins], only(eqn.outvars, one.outs_staged)
    )
    parts = parts_of(one, [known_eqn, *(copy.store for copy in copies.values())], staged_eqn)
    fetches = [copy.fetch for copy in copies.values() if parts.staged]
    return parts._replace(staged=[*fetches, *parts.staged])


def _split_branches(
    branches: Sequence[_jax.Jaxpr], operands: Operands, policy: Policy
) -> list[Split]:
    """Split branches so that a result that is unknown, or repeated, in one of them is so in all."""
    outs_unknown: Flags = (False,) * len(branches[0].outvars)
    outs_staged = outs_unknown
    while True:
        halves = [
            split(
                branch,
                operands.unknown[1:],
                policy,
                outs_unknown=outs_unknown,
                outs_staged=outs_staged,
            )
            for branch in branches
        ]
        before = outs_unknown, outs_staged
        outs_unknown = _any(half.outs_unknown for half in halves)
        outs_staged = _any(half.outs_staged for half in halves)
        if before == (outs_unknown, outs_staged):
            return halves


def _any(flags: Iterable[Flags]) -> Flags:
    return tuple(any(column) for column in zip(*flags))


class Slots(NamedTuple):
    avals: list[Aval]
    places: list[list[int]]  # of each branch's residuals


def shared_slots(residuals: Sequence[Sequence[_jax.Var]]) -> Slots:
    """Return the fewest slots that hold the residuals of any one branch, and each residual's slot."""
    slots: dict[tuple[Aval, int], int] = {}
    places = []
    for branch in residuals:
        seen: dict[Aval, int] = {}
        place = []
        for v in branch:
            count = seen[v.aval] = seen.get(v.aval, -1) + 1
            place.append(slots.setdefault((v.aval, count), len(slots)))
        places.append(place)
    return Slots([aval for aval, _ in slots], places)


def _copies(halves: Sequence[Split], slots: Slots, eqn: _jax.JaxprEqn) -> dict[int, _jax.HostCopy]:
    """Return the copies to the host's memory that are made outside of the branches, by their slots.

    Under `vmap` branches become a selection of their results, and in reverse mode the cotangents of their
    operands are summed. Both require results and operands in the device's memory.
    """
    kept = set()
    for half, places in zip(halves, slots.places):
        offloaded = _offloaded(half)
        residuals = results_and_residuals(half)[1]
        kept |= {i for i, v in zip(places, residuals) if v not in offloaded}
    copies = {}
    for i, aval in enumerate(slots.avals):
        if i not in kept and _jax.is_on_host(aval):
            value = _jax.new_var(aval.update(memory_space=jax.memory.Space.Device))
            copies[i] = _jax.host_copy(value, eqn)
    return copies


def _offloaded(half: Split) -> dict[_jax.Var, _jax.Var]:
    """Return the values whose copies one half brings to the host's memory and the other one back."""
    stored = {e.outvars[0]: e.invars[0] for e in half.known.eqns if _jax.is_copy(e)}
    fetched = {e.invars[0]: e.outvars[0] for e in half.staged.eqns if _jax.is_copy(e)}
    inputs = set(half.staged.invars)
    return {copy: v for copy, v in stored.items() if fetched.get(copy) is v and v not in inputs}


def _with_slots(
    half: Split,
    places: Sequence[int],
    avals: Sequence[Aval],
    copied: Container[int],
    eqn: _jax.JaxprEqn,
) -> tuple[_jax.Jaxpr, _jax.Jaxpr]:
    """Return the two halves of a branch: one returns all slots, the other takes them as inputs."""
    results, residuals = results_and_residuals(half)
    value_of = _offloaded(half)
    outside = {v for i, v in zip(places, residuals) if i in copied}
    half = half._replace(
        known=_without(half.known, lambda e: e.outvars[0] in outside),
        staged=_without(half.staged, lambda e: e.invars[0] in outside),
    )
    residuals = [value_of[v] if v in outside else v for v in residuals]
    own = dict(zip(places, residuals))
    eqns, given, taken = list(half.known.eqns), [], []
    for i, aval in enumerate(avals):
        if i in own:
            given.append(own[i])
            taken.append(own[i])
            continue
        making, value = empty_value(aval, eqn)
        eqns.extend(making)
        given.append(value)
        taken.append(_jax.new_var(aval))
    known = _jax.rebuild(half.known, outvars=[*results, *given], eqns=eqns)
    inputs = half.staged.invars[half.n_residuals :]
    return known, _jax.rebuild(half.staged, invars=[*taken, *inputs])


def _without(jaxpr: _jax.Jaxpr, is_dropped: Callable[[_jax.JaxprEqn], bool]) -> _jax.Jaxpr:
    """Return a jaxpr without some of its copies from one memory to another."""
    eqns = [e for e in jaxpr.eqns if not (_jax.is_copy(e) and is_dropped(e))]
    return _jax.rebuild(jaxpr, eqns=eqns)


def empty_value(aval: Aval, eqn: _jax.JaxprEqn) -> tuple[list[_jax.JaxprEqn], Atom]:
    """Return equations that compute a value for a slot that the branch does not use, and the value."""
    jaxpr, consts, _ = _jax.trace_call(lambda: _jax.empty(aval))
    assert not consts
    eqns, (value,) = jaxprs.inlined(jaxpr, [], eqn)
    return eqns, value


def branch_again(
    eqn: _jax.JaxprEqn,
    branches: Sequence[JaxprLike],
    invars: Sequence[Atom],
    outvars: Sequence[_jax.Var],
) -> _jax.JaxprEqn:
    params = dict(eqn.params, branches=tuple(branches))
    return _jax.new_body_eqn(eqn, invars, outvars, params, [(b, invars[1:]) for b in branches])


register("cond", _cond)
