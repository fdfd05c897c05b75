"""Pairs of conditionals: a forward and a backward one on the same index, joined branch by branch.

Differentiation turns a conditional into two. The forward one returns the residuals of all branches, and the
backward one reads them. Each branch of the forward one, joined with the same branch of the backward one, is
a program like that of a pair of scans with one step and no carry: a cut of it says which residuals are kept,
and the backward branch recomputes the others from the operands of the forward conditional. Pairs inside the
branches are pairs of that program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from remat import _jax
from remat.aliases import Atom
from remat.ir import jaxprs
from remat.ir.equations import has_effects, is_repeatable
from remat.ir.repetitions import on_own_variables, without_repetitions
from remat.ir.split.branches import branch_again, empty_value, shared_slots
from remat.planner.scan_pairs.emission import Emitted
from remat.planner.scan_pairs.joint import Joint, by_operand
from remat.planner.scan_pairs.matching import Match, in_pairs, only_read_by, size_of

_jax.exclude_from_tracebacks(__file__)


def branch_matches(jaxpr: _jax.Jaxpr) -> list[Match]:
    """Return the pairs of conditionals on the same index of which the second reads the first's results."""

    def residual_bytes(i: int, j: int) -> int:
        forward, backward = jaxpr.eqns[i], jaxpr.eqns[j]
        if forward.invars[0] is not backward.invars[0] or not is_repeatable(forward):
            return 0
        if len(forward.params["branches"]) != len(backward.params["branches"]):
            return 0
        return sum(size_of(forward.outvars[k].aval) for k in only_read_by(jaxpr, i, j))

    return in_pairs(jaxpr, _is_conditional, residual_bytes)


def _is_conditional(eqn: _jax.JaxprEqn) -> bool:
    return (
        eqn.primitive.name == "cond"
        and _jax.is_var(eqn.invars[0])
        and not has_effects(eqn)
        and not any(
            getattr(branch, "consts", None) or _jax.open_jaxpr(branch).constvars
            for branch in eqn.params["branches"]
        )
    )


# Kept because the program is rewritten for many options, and each starts from it.
@_jax.weakref_lru_cache
def branches_of(jaxpr: _jax.Jaxpr, match: Match) -> list[Joint]:
    """Return the joint program of each branch of a pair of conditionals."""
    forward, backward = (jaxpr.eqns[i] for i in match)
    removable = set(only_read_by(jaxpr, *match))
    lasting = {v for v in (*backward.invars, *jaxpr.outvars) if _jax.is_var(v)}
    return [
        _joint_of_branch(forward, backward, k, removable, lasting)
        for k in range(len(forward.params["branches"]))
    ]


def _joint_of_branch(
    forward: _jax.JaxprEqn,
    backward: _jax.JaxprEqn,
    number: int,
    removable: set[int],
    lasting: set[_jax.Var],
) -> Joint:
    f, b = (
        on_own_variables(_jax.open_jaxpr(eqn.params["branches"][number]))
        for eqn in (forward, backward)
    )
    operands, own_operands = forward.invars[1:], backward.invars[1:]
    inside = dict(zip(forward.outvars, f.outvars))
    of_operand = by_operand(f.invars, operands)
    names: dict[_jax.Var, Atom] = {}
    for v, operand in zip(b.invars, own_operands):
        source = inside.get(operand, of_operand.get(operand)) if _jax.is_var(operand) else None
        if source is not None:
            names[v] = source
    f_eqns, own_eqns = without_repetitions(f.eqns, b.eqns, names, inputs=b.invars)
    kept = [
        (k, v)
        for k, (v, outer) in enumerate(zip(f.outvars, forward.outvars))
        if k not in removable and not _jax.is_dropped(outer)
    ]
    own = [(v, operand) for v, operand in zip(b.invars, own_operands) if v not in names]
    program = _jax.jaxpr_of(
        [*f.invars, *(v for v, _ in own)],
        [*(v for _, v in kept), *(jaxprs.look(names, v) for v in b.outvars)],
        [*f_eqns, *own_eqns],
        f,
    )
    return Joint(
        forward=forward,
        backward=backward,
        jaxpr=program,
        n_forward=len(f_eqns),
        outside={**dict(zip(f.invars, operands)), **dict(own)},
        consts=f.invars,
        carry=(),
        xs=(),
        backward_consts=[v for v, _ in own],
        backward_carry=(),
        backward_xs=(),
        n_results=len(kept),
        kept=kept,
        linked=[(f.outvars[k], forward.outvars[k]) for k in sorted(removable)],
        stacked={
            v: forward.outvars[k]
            for k, v in kept
            if _jax.is_var(v) and forward.outvars[k] in lasting
        },
    )


def emit_branches(
    branches: Sequence[Emitted],
) -> tuple[list[_jax.JaxprEqn], list[_jax.JaxprEqn]]:
    """Return both conditionals. The residuals of different branches share results of the same type."""
    joint = branches[0].joint
    forward, backward = joint.forward, joint.backward
    slots = shared_slots([emitted.kept for emitted in branches])
    passed = [_jax.new_var(aval) for aval in slots.avals]
    read = [_read_outside(emitted) for emitted in branches]
    operands: dict[Atom, Atom] = {}
    for emitted, places in zip(branches, read):
        operands.update((key, _outside(emitted.joint, v)) for key, v in places.items())

    forwards, backwards = [], []
    for emitted, inside, slot_of in zip(branches, read, slots.places, strict=True):
        remaining = [v for _, v in emitted.joint.kept]
        own = dict(zip(slot_of, emitted.kept))
        step = emitted.forward_step([*remaining, *emitted.kept])
        eqns, given = list(step.eqns), []
        for i, aval in enumerate(slots.avals):
            making, value = ([], own[i]) if i in own else empty_value(aval, forward)
            eqns += making
            given.append(value)
        forwards.append(_jax.rebuild(step, eqns=eqns, outvars=[*remaining, *given]))
        invars = [
            *(own.get(i) or _jax.new_var(aval) for i, aval in enumerate(slots.avals)),
            *(inside.get(key) or _jax.new_var(outer.aval) for key, outer in operands.items()),
            *emitted.joint.backward_consts,
        ]
        late = [*emitted.recomputed, *emitted.joint.late]
        backwards.append(
            _jax.jaxpr_of(invars, emitted.joint.backward_results, late, emitted.joint.jaxpr)
        )
    new_forward = branch_again(
        forward,
        _wrapped(forward, forwards),
        forward.invars,
        [*(forward.outvars[k] for k, _ in joint.kept), *passed],
    )
    own_operands = [joint.outside[v] for v in joint.backward_consts]
    new_backward = branch_again(
        backward,
        _wrapped(backward, backwards),
        [backward.invars[0], *passed, *operands.values(), *own_operands],
        backward.outvars,
    )
    return [new_forward], [new_backward]


def _read_outside(emitted: Emitted) -> Mapping[Atom, _jax.Var]:
    """Return the forward conditional's operands and kept results that a backward branch reads."""
    joint = emitted.joint
    found: dict[Atom, _jax.Var] = {}
    for v in dict.fromkeys((*joint.stacked, *joint.consts)):
        if v in emitted.read:
            result = joint.stacked.get(v)
            found[list(joint.consts).index(v) if result is None else result] = v
    return found


def _outside(joint: Joint, v: _jax.Var) -> Atom:
    return joint.stacked.get(v) or joint.outside[v]


def _wrapped(eqn: _jax.JaxprEqn, branches: Sequence[_jax.Jaxpr]) -> list[Atom]:
    """Return branches in the form in which an equation holds them."""
    return [_jax.with_equations(old, new) for old, new in zip(eqn.params["branches"], branches)]
