"""Rewriting a program so that its pairs of scans and conditionals follow chosen options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from remat import _jax
from remat.errors import PlanError
from remat.ir.equations import has_effects
from remat.planner.plan_decisions import ScanOption
from remat.planner.scan_pairs.branches import branch_matches, branches_of, emit_branches
from remat.planner.scan_pairs.emission import Emitted, in_steps
from remat.planner.scan_pairs.groups import in_groups, in_two_loops
from remat.planner.scan_pairs.inside import (
    Replacements,
    inside_of,
    places_without,
    replaced,
    walk_inside,
)
from remat.planner.scan_pairs.joint import Joint, joint_of
from remat.planner.scan_pairs.matching import Match, matches
from remat.planner.scan_pairs.shards import emit_shards, shard_matches, shards_of

_jax.exclude_from_tracebacks(__file__)


Choices = Mapping[str, ScanOption]


def pair_id(prefix: str, match: Match) -> str:
    """Return the id of a pair: the places of its equations, after those of the equations around it."""
    return f"{prefix}{match.forward}-{match.backward}"


def branch_id(key: str, number: int) -> str:
    """Return the id of a branch of a pair of conditionals."""
    return f"{key}.{number}"


#: `change(backward step, id, steps)`: the backward step to use, or None for the same. The number of steps is
#: that of the pair and of the pairs around it.
ChangeOfStep = Callable[[_jax.Jaxpr, str, int], _jax.Jaxpr | None]


def step_id(key: str) -> str:
    """Return the id of the backward step of a pair that recomputes its steps one by one."""
    return f"{key}/"


def rewrite(
    jaxpr: _jax.Jaxpr, choices: Choices, prefix: str = "", change: ChangeOfStep | None = None
) -> _jax.Jaxpr:
    """Return the program with these options for pairs of scans; other pairs stay as they are written.

    Args:
      jaxpr: the program that `pairs` was called on, or a body in it.
      choices: options by the ids of their pairs.
      prefix: the beginning of ids in this program.
      change: is called on the backward steps of scans in which steps are recomputed one by one.

    Raises:
      PlanError: the program has no such pair, or the option is not of this pair.
    """
    return _with(jaxpr, _all_rewritten(jaxpr, choices, prefix, change))


def rewrite_in_two(
    jaxpr: _jax.Jaxpr, choices: Choices, prefix: str, n_first: int
) -> tuple[_jax.Jaxpr, int]:
    """Return what `rewrite` returns, and the number of the first equation of its second part.

    Args:
      jaxpr, choices, prefix: as of `rewrite`.
      n_first: the number of the first equation of the program's second part.
    """
    new = _all_rewritten(jaxpr, choices, prefix, None)
    if not new:
        return jaxpr, n_first
    first = replaced(_jax.rebuild(jaxpr, eqns=jaxpr.eqns[:n_first]), new)
    made_first = {v for eqn in first.eqns for v in eqn.outvars}
    live = _with(jaxpr, new)
    return live, sum(not made_first.isdisjoint(eqn.outvars) for eqn in live.eqns)


def _with(jaxpr: _jax.Jaxpr, new: Replacements) -> _jax.Jaxpr:
    """Return a program with these equations, without those that nothing reads then."""
    if not new:
        return jaxpr
    live, _ = _jax.dce(
        replaced(jaxpr, new), [True] * len(jaxpr.outvars), keep=[True] * len(jaxpr.invars)
    )
    return live


def _all_rewritten(
    jaxpr: _jax.Jaxpr, choices: Choices, prefix: str, change: ChangeOfStep | None
) -> Replacements:
    """Return the new equations for all choices.

    Raises:
      PlanError: the program has no such pair, or the option is not of this pair.
    """
    left = set(choices)
    new = _rewritten(jaxpr, choices, prefix, left, change)
    if left:
        raise PlanError(
            f"the program has no loop {', '.join(sorted(left))}. Remove its line from the plan's loops; "
            "if the program changed since the plan was made, plan again."
        )
    return new


def _rewritten(
    jaxpr: _jax.Jaxpr,
    choices: Choices,
    prefix: str,
    left: set[str] | None = None,
    change: ChangeOfStep | None = None,
) -> Replacements:
    """Return the new equations for those of a jaxpr; remove the ids that were found from `left`."""
    if not any(key.startswith(prefix) for key in choices):
        return {}
    new: Replacements = {}
    for match in matches(jaxpr):
        key = pair_id(prefix, match)
        if key in choices:
            new[match.forward], new[match.backward] = _emitted_scans(
                jaxpr, match, choices[key], key, change
            )
            (left if left is not None else set()).discard(key)
    for match in branch_matches(jaxpr):
        key = pair_id(prefix, match)
        if key in choices:
            new[match.forward], new[match.backward] = _emitted_branches(
                jaxpr, match, choices[key], key, change
            )
            (left if left is not None else set()).discard(key)
    for match in shard_matches(jaxpr):
        pair = shards_of(jaxpr, match)
        with inside_of(pair.forward):
            found = _rewritten(pair.jaxpr, choices, f"{pair_id(prefix, match)}/", left, change)
        if found:
            new[match.forward], new[match.backward] = emit_shards(pair, found)

    def within(inner: _jax.Jaxpr, inner_prefix: str) -> _jax.Jaxpr:
        found = _rewritten(inner, choices, inner_prefix, left, change)
        return replaced(inner, found) if found else inner

    others = places_without(jaxpr, choices, prefix)
    return new | walk_inside(jaxpr, {*new, *others}, within, prefix)


def with_inner(
    joint: Joint,
    inner: Sequence[tuple[str, ScanOption]],
    prefix: str,
    change: ChangeOfStep | None = None,
) -> Joint:
    """Return a pair with these choices for the pairs inside."""
    if not inner:
        return joint

    def inside(step: _jax.Jaxpr, id: str, steps: int) -> _jax.Jaxpr | None:
        assert change is not None
        return change(step, id, joint.length * steps)

    new = _rewritten(joint.jaxpr, dict(inner), prefix, None, inside if change else None)
    return joint.with_equations(new)


# --------------------------------------------------------------------------------------------------
# One pair


#: `emit(program, its pair, option, id of the pair, change)`: the equations of both.
_Emit = Callable[
    [_jax.Jaxpr, Match, ScanOption, str, ChangeOfStep | None],
    tuple[list[_jax.JaxprEqn], list[_jax.JaxprEqn]],
]


def _kept(emit: _Emit) -> _Emit:
    """Keep what is emitted if no step is changed.

    Most programs that a plan chooses from differ in few of their pairs. They share the others' loops then,
    and the costs of these are known.
    """
    known = _jax.weakref_lru_cache(emit)

    def emitted(
        jaxpr: _jax.Jaxpr, match: Match, option: ScanOption, key: str, change: ChangeOfStep | None
    ) -> tuple[list[_jax.JaxprEqn], list[_jax.JaxprEqn]]:
        return (known if change is None else emit)(jaxpr, match, option, key, change)

    return emitted


@_kept
def _emitted_scans(
    jaxpr: _jax.Jaxpr, match: Match, option: ScanOption, key: str, change: ChangeOfStep | None
) -> tuple[list[_jax.JaxprEqn], list[_jax.JaxprEqn]]:
    joint = joint_of(jaxpr, match, computes=option.computes_constants)
    return _emit(joint, option, key, change)


@_kept
def _emitted_branches(
    jaxpr: _jax.Jaxpr, match: Match, option: ScanOption, key: str, change: ChangeOfStep | None
) -> tuple[list[_jax.JaxprEqn], list[_jax.JaxprEqn]]:
    return _emit_branches(branches_of(jaxpr, match), option, key, change)


def _emit(
    joint: Joint, option: ScanOption, key: str, change: ChangeOfStep | None
) -> tuple[list[_jax.JaxprEqn], list[_jax.JaxprEqn]]:
    inside = with_inner(joint, option.inner, f"{key}/", change)
    first = _emitted(inside, option.saved, key, option.offloaded)
    if option.offloaded and option.group > 1:
        raise PlanError(
            f"loop {key} of the plan offloads values of groups, and only values of single steps can be "
            "kept in the host's memory. Make its group 1, or remove its offloaded values."
        )
    n_groups = option.groups or joint.length // option.group
    n_first = n_groups * option.group
    if n_first > joint.length or not 1 <= option.group < max(2, joint.length):
        raise PlanError(
            f"loop {key} has {joint.length} steps; the plan has {n_groups} groups of {option.group}. "
            "Choose groups of fewer steps, or fewer groups."
        )
    is_by_step = option.group == 1 and n_first == joint.length
    if change is not None and is_by_step and first.can_be_scheduled:
        scheduled = change(first.backward_program(), step_id(key), joint.length)
        first = dataclasses.replace(first, scheduled=scheduled)
    if n_first == joint.length:
        if option.group == 1:
            return in_steps(first)
        return in_groups(first, option.group, _lasting(inside, option.lasting, key))
    rest = first
    if option.rest is not None:
        inner = option.inner if option.rest_inner is None else option.rest_inner
        rest = _emitted(
            with_inner(joint, inner, f"{key}/"), option.rest, key, option.rest_offloaded
        )
    return in_two_loops(first, option.group, n_first, rest)


def _emit_branches(
    joints: Sequence[Joint], option: ScanOption, key: str, change: ChangeOfStep | None
) -> tuple[list[_jax.JaxprEqn], list[_jax.JaxprEqn]]:
    of_branch = dict(option.inner)
    ids = [branch_id(key, k) for k in range(len(joints))]
    if sorted(of_branch) != sorted(ids):
        raise PlanError(
            f"the conditional {key} has the branches {', '.join(ids)}; its inner loops in the plan are "
            f"about {', '.join(of_branch) or 'none'}. Give one for each branch."
        )
    return emit_branches(
        [
            _emitted(
                with_inner(joint, of_branch[id].inner, f"{id}/", change), of_branch[id].saved, id
            )
            for joint, id in zip(joints, ids)
        ]
    )


def _emitted(
    joint: Joint, saved: Sequence[int], key: str, offloaded: Sequence[int] = ()
) -> Emitted:
    if not set(offloaded) <= set(saved):
        raise PlanError(
            f"loop {key} of the plan offloads values that it does not save: add "
            f"{', '.join(map(str, sorted(set(offloaded) - set(saved))))} to its saved ones."
        )
    wrong = [n for n in saved if not 0 <= n < len(joint.variables)]
    if wrong:
        raise PlanError(
            f"loop {key} has the values 0 to {len(joint.variables) - 1}; the plan saves "
            f"{', '.join(map(str, wrong))}. Remove these from its saved values."
        )
    wrong = [n for n in offloaded if not _jax.can_be_on_host(joint.variables[n].aval)]
    if wrong:
        raise PlanError(
            f"loop {key} of the plan offloads {', '.join(map(str, wrong))}, which are random keys, or not "
            "on the device. Remove these from its offloaded values."
        )
    emitted = Emitted.of(joint, saved, offloaded)
    missing = emitted.missing_carry
    for eqn in emitted.recomputed:
        missing.update(eqn.outvars if not _may_move(eqn) else ())
    if missing:
        numbers = [n for n, v in enumerate(joint.variables) if v in missing]
        raise PlanError(
            f"loop {key} of the plan does not save {', '.join(map(str, numbers))}, which cannot be "
            "recomputed: they depend on earlier steps, or computing them has effects. Save them."
        )
    return emitted


def _lasting(joint: Joint, numbers: Sequence[int], key: str) -> list[_jax.Var]:
    """Return the values that all steps keep, without those that are there in any case."""
    wrong = [
        n
        for n in numbers
        if not (0 <= n < len(joint.variables) and joint.variables[n] in joint.computed)
    ]
    if wrong:
        raise PlanError(
            f"loop {key} of the plan keeps {', '.join(map(str, wrong))} for all steps, which its forward "
            "steps do not compute. Remove these from its lasting values."
        )
    return [joint.variables[n] for n in numbers if joint.variables[n] not in joint.stacked]


def _may_move(eqn: _jax.JaxprEqn) -> bool:
    return not has_effects(eqn)
