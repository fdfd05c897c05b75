"""Decisions about a whole step, and the program that follows them.

The step is one flat jaxpr. The decisions are applied in this order:

1. The user's own checkpoints in loops are inlined, or stay (`scan_pairs.opened`).
2. Loops and branches are rewritten: bodies that are scheduled by themselves (`bodies`), then what forward
   loops keep for backward ones (`scan_pairs`).
3. Equations outside of loops are recomputed (`rewrite`).
"""

from __future__ import annotations

import dataclasses

from remat import _jax
from remat.planner import scan_pairs
from remat.planner.bodies import with_bodies
from remat.planner.rewrite import Decisions, rewritten
from remat.transform.outlining import alone, needs_outlining
from remat.transform.primitive import region_equation


@dataclasses.dataclass(frozen=True)
class LoopDecisions:
    """What a step's loops keep.

    Args:
      opened: whether the checkpoints in loops are inlined first.
      choices: options by the ids of pairs of scans; other pairs stay as they are.
      bodies: decisions by the ids of bodies of loops and branches; other bodies stay as they are.
    """

    opened: bool = False
    choices: tuple[tuple[str, scan_pairs.ScanOption], ...] = ()
    bodies: tuple[tuple[str, Decisions], ...] = ()


@dataclasses.dataclass(frozen=True)
class StepDecisions:
    """Decisions about a whole step: about its loops, and then about the program outside of them."""

    loops: LoopDecisions
    outside: Decisions


def program_to_plan(flat: _jax.Jaxpr, opened: bool) -> _jax.Jaxpr:
    """Return the program that decisions about loops refer to: a flat step, its checkpoints opened or not."""
    return scan_pairs.opened(flat) if opened else flat


def with_loops(source: _jax.Jaxpr, loops: LoopDecisions) -> _jax.Jaxpr:
    """Return a step whose loops do as decided.

    Args:
      source: the program that the decisions refer to (`program_to_plan`).
      loops: the decisions.

    Raises:
      PlanError: the program has no such loops.
    """
    if loops.bodies:
        source = with_bodies(source, dict(loops.bodies))
    return scan_pairs.rewrite(source, dict(loops.choices)) if loops.choices else source


def applied(flat: _jax.Jaxpr, decisions: StepDecisions) -> _jax.Jaxpr:
    """Return a flat step that follows the decisions.

    Raises:
      PlanError: the program has no such loops.
    """
    source = program_to_plan(flat, decisions.loops.opened)
    new = rewritten(with_loops(source, decisions.loops), decisions.outside)
    return new if new is flat else _apart(new)


def _apart(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a step whose operations with index arrays are regions, which XLA for CPU does not mix."""

    def region(eqn: _jax.JaxprEqn) -> _jax.JaxprEqn:
        body = alone(eqn, jaxpr)
        options = {"like": eqn, "differentiated": True, "prevent_cse": False}
        return region_equation(body.invars, eqn.outvars, body, **options)

    eqns = [region(eqn) if needs_outlining(eqn) else eqn for eqn in jaxpr.eqns]
    return _jax.rebuild(jaxpr, eqns=eqns)
