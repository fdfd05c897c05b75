"""Decisions about a whole step, and the program that follows them.

The step is one flat jaxpr. The decisions are applied in this order:

1. The user's own checkpoints in loops are inlined, and loops convert the weights that they read in slices; or
   both stay as they are (`program_to_plan`).
2. Loops and branches are rewritten: bodies that are scheduled by themselves (`bodies`), with what forward
   loops in them keep for backward ones (`scan_pairs`), and then what others keep.
3. Values outside of loops are copied to the host's memory and back (`host_copies`).
4. Equations outside of loops are recomputed (`rewrite`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

from remat import _jax, garbage
from remat.errors import PlanError
from remat.ir.restriction import without_marks
from remat.planner import scan_pairs
from remat.planner.bodies import with_bodies
from remat.planner.host_copies import with_host_copies
from remat.planner.plan_decisions import HostCopy, ScanOption
from remat.planner.rewrite import Decisions, rewritten
from remat.planner.stacks import with_own_arrays
from remat.transform.outlining import alone, needs_outlining
from remat.transform.primitive import region_equation
from remat.units import counted


@dataclasses.dataclass(frozen=True)
class LoopDecisions:
    """Decisions about a step's loops, and about values outside of them that are kept in host memory.

    Args:
      opened: whether the checkpoints in loops are inlined first, and conversions of weights done in loops.
      choices: options by the ids of pairs of scans; other pairs stay as they are.
      bodies: decisions by the ids of bodies of loops and branches, and of backward steps of pairs; other
        bodies stay as they are.
      copies: values outside of loops that are copied to the host's memory. Equations are numbered as they
        stand before loops are rewritten (`equation_numbers`).
    """

    opened: bool = False
    choices: tuple[tuple[str, ScanOption], ...] = ()
    bodies: tuple[tuple[str, Decisions], ...] = ()
    copies: tuple[HostCopy, ...] = ()

    def __repr__(self) -> str:
        counts = (
            counted(len(self.choices), "pair"),
            counted(len(self.bodies), "body", "bodies"),
            counted(len(self.copies), "copy", "copies"),
        )
        return f"LoopDecisions({', '.join(counts)}{', opened' if self.opened else ''})"


@dataclasses.dataclass(frozen=True)
class StepDecisions:
    """Decisions about a whole step: about its loops, and then about the program outside of them."""

    loops: LoopDecisions
    outside: Decisions


def program_to_plan(flat: _jax.Jaxpr, opened: bool) -> _jax.Jaxpr:
    """Return the program that decisions about loops refer to.

    It is the flat step, or that step with its checkpoints opened and conversions of weights in the loops that
    read them.
    """
    return scan_pairs.sunk(scan_pairs.opened(flat)) if opened else flat


def with_loops(source: _jax.Jaxpr, loops: LoopDecisions) -> _jax.Jaxpr:
    """Return a step whose loops follow the decisions, with the copies to the host's memory.

    Args:
      source: the program that the decisions refer to (`program_to_plan`).
      loops: the decisions.

    Raises:
      PlanError: the program has no such loops, or no such values to copy.
    """
    choices = dict(loops.choices)
    steps = {
        id: decided
        for id, decided in loops.bodies
        if any(id.startswith(scan_pairs.step_id(key)) for key in choices)
    }
    bodies = tuple((id, decided) for id, decided in loops.bodies if id not in steps)
    new = source
    if bodies:
        ids = tuple(id for id, _ in bodies)
        inside = {key: option for key, option in choices.items() if key.startswith(ids)}
        new = _with_bodies(source, bodies, tuple(inside.items()))
        choices = {key: option for key, option in choices.items() if key not in inside}
    left = set(steps)

    def scheduled(step: _jax.Jaxpr, id: str, _: int) -> _jax.Jaxpr | None:
        left.discard(id)
        return rewritten(step, steps[id]) if id in steps else None

    if choices:
        new = scan_pairs.rewrite(new, choices, change=scheduled if steps else None)
    if left:
        raise PlanError(
            f"the plan schedules steps that no loop recomputes one by one: {', '.join(sorted(left))}. Remove "
            "their lines from the plan's bodies, or make the group of these loops 1."
        )
    if loops.copies:
        numbers = equation_numbers(source, new)
        new = with_host_copies(new, loops.copies, {n: at for at, n in enumerate(numbers)})
    return new


# Kept because many proposals differ in their pairs of loops alone. They share the rewritten bodies, of which
# costs are known then.
@_jax.weakref_lru_cache
def _with_bodies(
    source: _jax.Jaxpr,
    decided: tuple[tuple[str, Decisions], ...],
    choices: tuple[tuple[str, ScanOption], ...],
) -> _jax.Jaxpr:
    return with_bodies(source, dict(decided), dict(choices))


def equation_numbers(source: _jax.Jaxpr, flat: _jax.Jaxpr) -> list[int]:
    """Return the number of each equation of a step whose loops were rewritten, as a plan counts them.

    An equation that computes a result of an equation of `source` has that equation's number. Others are
    numbered after those.
    """
    of_result = {v: i for i, eqn in enumerate(source.eqns) for v in eqn.outvars}
    of_equation = {id(eqn): i for i, eqn in enumerate(source.eqns)}
    added = itertools.count(len(source.eqns))
    taken: set[int] = set()
    numbers = []
    for eqn in flat.eqns:
        known = {of_result[v] for v in eqn.outvars if v in of_result} - taken
        number = of_equation.get(id(eqn), min(known, default=None))
        numbers.append(next(added) if number is None else number)
        taken.add(numbers[-1])
    return numbers


@garbage.paused()
def applied(flat: _jax.Jaxpr, decisions: StepDecisions) -> _jax.Jaxpr:
    """Return a flat step that follows the decisions.

    Raises:
      PlanError: the program has no such loops.
    """
    new = applied_to(program_to_plan(flat, decisions.loops.opened), decisions)
    return new if new is flat else with_own_arrays(_index_arrays_apart(new))


def applied_to(source: _jax.Jaxpr, decisions: StepDecisions) -> _jax.Jaxpr:
    """Return a program that follows the decisions, without what only its compilation needs.

    Args:
      source: the program that the decisions refer to (`program_to_plan`).
      decisions: the decisions.

    Raises:
      PlanError: the program has no such loops.
    """
    if decisions.outside.changes_nothing:
        return _finished(with_loops(source, decisions.loops), decisions)
    return _changed(source, decisions)


# Kept because the FLOPs of a proposal are counted on its program, which is then compiled. Few are kept, since
# those of large steps are large.
@functools.partial(_jax.weakref_lru_cache, maxsize=4)
def _changed(source: _jax.Jaxpr, decisions: StepDecisions) -> _jax.Jaxpr:
    return _finished(rewritten(with_loops(source, decisions.loops), decisions.outside), decisions)


def _finished(new: _jax.Jaxpr, decisions: StepDecisions) -> _jax.Jaxpr:
    # Equations that copy to the host have scopes.
    return without_marks(new) if decisions.loops.copies else new


def _index_arrays_apart(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a step whose operations with index arrays are regions, which XLA for CPU does not fuse."""

    def region(eqn: _jax.JaxprEqn) -> _jax.JaxprEqn:
        body = alone(eqn, jaxpr)
        options = {"like": eqn, "differentiated": True, "prevent_cse": False}
        return region_equation(body.invars, eqn.outvars, body, **options)

    eqns = [region(eqn) if needs_outlining(eqn) else eqn for eqn in jaxpr.eqns]
    return _jax.rebuild(jaxpr, eqns=eqns)
