"""The halves of a program while they are being built, and the rules for single operations."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from remat import _jax
from remat.aliases import Atom, Aval, Decision
from remat.ir import jaxprs


class Mode(enum.Enum):
    """How to split without a policy, outside of regions."""

    SAVE = "save"
    """Save all residuals; nothing is recomputed."""
    HOIST = "hoist"
    """Save all residuals, and stage operations with effects even if they are known."""


SAVE, HOIST = Mode.SAVE, Mode.HOIST

# A policy in JAX's form: `policy(primitive, *operand_types, **params)`.
T = TypeVar("T")
Policy = Callable[..., Decision] | Mode
Flags = tuple[bool, ...]


class Split(NamedTuple):
    """A program in two halves.

    Attributes:
      known: from the known inputs to the known results and the residuals.
      staged: from the residuals and all inputs to the results in `outs_staged`.
      ins_unknown: which inputs are unknown.
      outs_unknown: which results are unknown.
      outs_staged: which results `staged` returns: the unknown ones, and those that it repeats.
      n_residuals: the number of residuals.
    """

    known: _jax.Jaxpr
    staged: _jax.Jaxpr
    ins_unknown: Flags
    outs_unknown: Flags
    outs_staged: Flags
    n_residuals: int


def split(
    jaxpr: _jax.Jaxpr,
    ins_unknown: Sequence[bool],
    policy: Policy,
    *,
    ins_staged: Sequence[bool] = (),
    outs_unknown: Sequence[bool] = (),
    outs_staged: Sequence[bool] = (),
) -> Split:
    """Split a jaxpr by which of its inputs are unknown.

    Args:
      jaxpr: the program.
      ins_unknown: for each input, whether it is unknown.
      policy: which known operations the staged half repeats.
      ins_staged: inputs of the staged half, by default all. Others become residuals if needed.
      outs_unknown: results to treat as unknown even if they are known.
      outs_staged: results that the staged half returns even if it does not compute them.
    """
    n_ins, n_outs = len(jaxpr.invars), len(jaxpr.outvars)
    return _split(
        jaxpr,
        tuple(ins_unknown),
        policy,
        tuple(ins_staged) or (True,) * n_ins,
        tuple(outs_unknown) or (False,) * n_outs,
        tuple(outs_staged) or (False,) * n_outs,
    )


# Cached: JAX lowers each jaxpr object once, and a policy is asked only once.
@_jax.weakref_lru_cache
def _split(
    jaxpr: _jax.Jaxpr,
    ins_unknown: Flags,
    policy: Policy,
    ins_staged: Flags,
    outs_unknown: Flags,
    outs_staged: Flags,
) -> Split:
    halves = _Halves(jaxpr, ins_unknown, ins_staged)
    for eqn in jaxpr.eqns:
        halves.add(eqn, policy)
    return halves.close(outs_unknown, outs_staged, repeats=not isinstance(policy, Mode))


def without_unused(halves: Split, *, repeated: bool = False) -> Split:
    """Return the halves with only the residuals that the staged half needs.

    The staged half returns only the unknown results, with `repeated` also those that it repeats. Inputs stay.
    """
    n = halves.n_residuals
    flags = zip(halves.outs_staged, halves.outs_unknown)
    wanted = [unknown or repeated for staged, unknown in flags if staged]
    keep = [i >= n for i in range(len(halves.staged.invars))]
    staged, used = _jax.dce(halves.staged, wanted, keep=keep)
    results, residuals = results_and_residuals(halves)
    residuals = only(residuals, used[:n])
    known = _jax.rebuild(halves.known, outvars=[*results, *residuals])
    known, _ = _jax.dce(known, [True] * len(known.outvars), keep=[True] * len(known.invars))
    outs_staged = halves.outs_staged if repeated else halves.outs_unknown
    return halves._replace(
        known=known, staged=staged, outs_staged=outs_staged, n_residuals=len(residuals)
    )


def results_and_residuals(halves: Split) -> tuple[list[Atom], list[_jax.Var]]:
    """Return the two kinds of results of the known half: the program's known results, and the residuals."""
    return _jax.split_list(halves.known.outvars, [len(halves.known.outvars) - halves.n_residuals])


class Operands(NamedTuple):
    """Properties of an equation's operands, one flag for each operand."""

    unknown: Flags
    available: Flags  # in the staged half, without being a residual


class Parts(NamedTuple):
    """The split of one equation: the equations of either half, and which results are unknown.

    Results that the staged equations compute under the same variables are repeated; others become residuals
    if they are needed.
    """

    known: Sequence[_jax.JaxprEqn]
    staged: Sequence[_jax.JaxprEqn]
    unknown: Sequence[bool]


Rule = Callable[[_jax.JaxprEqn, Operands, Policy], Parts]


class _Halves:
    """The two halves while they are being built."""

    def __init__(self, jaxpr: _jax.Jaxpr, ins_unknown: Flags, ins_staged: Flags):
        self.jaxpr = jaxpr
        self._known: list[_jax.JaxprEqn] = []
        self._staged: list[_jax.JaxprEqn] = []
        self._residuals: dict[_jax.Var, None] = {}
        self._unknown = set(only(jaxpr.invars, ins_unknown))
        self._inputs = only(jaxpr.invars, ins_staged)
        self._available = {*self._inputs, *jaxpr.constvars}

    def add(self, eqn: _jax.JaxprEqn, policy: Policy) -> None:
        """Add the parts of an equation to the halves."""
        unknown = tuple(_jax.is_var(v) and v in self._unknown for v in eqn.invars)
        available = tuple(not _jax.is_var(v) or v in self._available for v in eqn.invars)
        is_whole = isinstance(policy, Mode) and not any(unknown)
        rule = operation if is_whole else _rule_for(eqn)
        parts = rule(eqn, Operands(unknown, available), policy)
        self._known.extend(parts.known)
        for staged in parts.staged:
            self._staged.append(staged)
            self._need(staged.invars)
            self._available.update(staged.outvars)
        self._unknown.update(only(eqn.outvars, parts.unknown))

    def _need(self, atoms: Iterable[Atom]) -> None:
        for v in atoms:
            if _jax.is_var(v) and v not in self._available:
                self._residuals[v] = None

    def close(self, outs_unknown: Flags, outs_staged: Flags, repeats: bool) -> Split:
        jaxpr, outvars = self.jaxpr, self.jaxpr.outvars
        unknown = tuple(
            forced or (_jax.is_var(v) and v in self._unknown)
            for v, forced in zip(outvars, outs_unknown)
        )
        saved = tuple(_jax.is_var(v) and v not in self._available for v in outvars)
        staged = tuple(
            u or forced or (repeats and not s) for u, forced, s in zip(unknown, outs_staged, saved)
        )
        self._need(v for v, s in zip(outvars, staged) if s)
        residuals = list(self._residuals)
        known_ins = [v for v in jaxpr.invars if v not in self._unknown]
        known_outs = [v for v, u in zip(outvars, unknown) if not u]
        return Split(
            _jax.jaxpr_of(known_ins, [*known_outs, *residuals], self._known, jaxpr),
            _jax.jaxpr_of([*residuals, *self._inputs], only(outvars, staged), self._staged, jaxpr),
            tuple(v in self._unknown for v in jaxpr.invars),
            unknown,
            staged,
            len(residuals),
        )


# --------------------------------------------------------------------------------------------------
# Rules

_RULES: dict[str, Rule] = {}
# The key, in place of a primitive's name, for the rule of all equations that run one jaxpr once, on their
# operands.
ANY_CALL = "any call"


def register(primitive: str, rule: Rule) -> None:
    """Register the rule that splits the equations of a primitive."""
    _RULES[primitive] = rule


def _rule_for(eqn: _jax.JaxprEqn) -> Rule:
    otherwise = _RULES[ANY_CALL] if jaxprs.has_body(eqn) else operation
    return _RULES.get(eqn.primitive.name, otherwise)


# --------------------------------------------------------------------------------------------------
# Operations


def operation(eqn: _jax.JaxprEqn, operands: Operands, policy: Policy) -> Parts:
    """Split an equation that is one operation."""
    if any(operands.unknown):
        return staged_part(eqn)
    if eqn.effects and _jax.has_lasting_effects(eqn.effects):
        return staged_part(eqn) if policy is HOIST else known_part(eqn)
    if isinstance(policy, Mode):
        return known_part(eqn)
    case = decide(policy, eqn)
    if isinstance(case, _jax.Offloadable):
        return _offloaded(eqn, case)
    return both_parts(eqn) if isinstance(case, _jax.RecomputeType) else known_part(eqn)


def decide(policy: Callable[..., Decision], eqn: _jax.JaxprEqn) -> Decision:
    """Return a policy's answer about an equation, in the form that all JAX versions' policies expect."""
    avals = [v.aval for v in eqn.invars]
    name = _jax.checkpoint_name_of(eqn)
    if name is not None:
        return _jax.as_case(policy(_jax.name_p, *avals, name=name))
    return _jax.as_case(policy(eqn.primitive, *avals, **eqn.params))


def known_part(eqn: _jax.JaxprEqn) -> Parts:
    return Parts([eqn], [], [False] * len(eqn.outvars))


def staged_part(eqn: _jax.JaxprEqn) -> Parts:
    return Parts([], [eqn], [True] * len(eqn.outvars))


def both_parts(eqn: _jax.JaxprEqn) -> Parts:
    return Parts([eqn], [eqn], [False] * len(eqn.outvars))


def _offloaded(eqn: _jax.JaxprEqn, case: _jax.Offloadable) -> Parts:
    copies = [_jax.offloaded_copy(v, case, eqn) for v in eqn.outvars]
    made = [copy for copy in copies if copy is not None]
    return Parts(
        [eqn, *(copy.store for copy in made)],
        [copy.fetch for copy in made],
        [False] * len(eqn.outvars),
    )


def _debug(eqn: _jax.JaxprEqn, operands: Operands, policy: Policy) -> Parts:
    """Split a debugging callback: it shows values of both halves, but none is saved for it."""
    if any(operands.unknown):
        return staged_part(eqn)
    return both_parts(eqn) if all(operands.available) else known_part(eqn)


# --------------------------------------------------------------------------------------------------
# Helpers of rules for bodies


class Leaving(NamedTuple):
    """How residuals become results of the known half of a body; those that are results already do so once."""

    outside: list[_jax.Var]  # the variable of each residual outside
    added: list[_jax.Var]  # residuals that are additional results
    added_outside: list[_jax.Var]  # and their variables outside


def leave(
    residuals: Sequence[_jax.Var],
    results: Iterable[tuple[Atom, _jax.Var]],
    type_outside: Callable[[_jax.Var], Aval] = lambda v: v.aval,
) -> Leaving:
    """Return how residuals become results of a body whose known results are these (inside, outside)."""
    place = {
        inner: outer
        for inner, outer in results
        if _jax.is_var(inner) and not _jax.is_dropped(outer)
    }
    added = [v for v in residuals if v not in place]
    added_outside = [_jax.new_var(type_outside(v)) for v in added]
    place.update(zip(added, added_outside))
    return Leaving([place[v] for v in residuals], added, added_outside)


def only(values: Sequence[T], flags: Sequence[bool]) -> list[T]:
    return [v for v, flag in zip(values, flags, strict=True) if flag]


def known_only(values: Sequence[T], unknown: Sequence[bool]) -> list[T]:
    return [v for v, u in zip(values, unknown, strict=True) if not u]


def parts_of(halves: Split, known: Sequence[_jax.JaxprEqn], staged: _jax.JaxprEqn) -> Parts:
    """Return the parts of an equation whose body was split; halves that compute nothing are left out."""
    return Parts(_working(known), _working([staged]), halves.outs_unknown)


def _working(eqns: Sequence[_jax.JaxprEqn]) -> list[_jax.JaxprEqn]:
    return [eqn for eqn in eqns if eqn.outvars or eqn.effects]


for _name in ("debug_callback", "debug_print"):
    register(_name, _debug)
