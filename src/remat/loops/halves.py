"""One step of a loop in two halves: forward, with the residuals for its reversal, and the reversal.

The residuals of a step are the leaves of the function that `jax.vjp` returns. Those that are inputs of the
whole loop (constants, scanned values), or that depend on the constants alone, are the same at every
evaluation; only the others are kept for a step. A value that the derivative recomputes, such as the
cosine of the derivative of a sine, is kept once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax

from remat import _jax
from remat.aliases import Array, Arrays, Atom, Aval, TreeDef
from remat.ir import jaxprs
from remat.ir.equations import is_region
from remat.ir.repetitions import without_repeated

Mask = tuple[bool, ...]
Source = Literal["literal", "const", "x", "fixed", "kept"]


class Masks(NamedTuple):
    """Which values of a step are differentiated: its inputs, and its results that depend on them."""

    consts: Mask
    carry: Mask
    xs: Mask
    ys: Mask


class Halves(NamedTuple):
    """A step, differentiated.

    Attributes:
      forward: (*added, *consts, *carry, *x) -> (*carry, *y, *kept)
      added: the values that tracing the derivative closed over.
      fixed: (*added, *consts) -> residuals that are the same in every step.
      leaves: where each leaf of the reversal comes from.
      tree: the structure of the reversal, a function of the cotangents of the marked (carry, ys).
      kept: the types of the residuals that are kept for a step.
      stacked: the types of those that `lax.scan` keeps, some possibly twice.
      keeps_state: whether these are values of its carry alone.
    """

    forward: _jax.Jaxpr
    added: Arrays
    fixed: _jax.Jaxpr
    leaves: tuple[tuple[Source, int | Array], ...]
    tree: TreeDef
    kept: list[Aval]
    stacked: list[Aval]
    keeps_state: bool

    def recomputes(self, body: _jax.Jaxpr) -> bool:
        """Return whether the reversal recomputes the step from its state, so that residuals save nothing."""
        return self.keeps_state and any(
            is_region(eqn) or _jax.is_high_checkpoint(eqn) for eqn in jaxprs.equations(body)
        )

    def run(self, consts: Arrays, carry: Arrays, x: Arrays) -> Arrays:
        """Run a step; return its next carry, its ys and its residuals, in one list."""
        return _jax.call_jaxpr(self.forward, [*self.added, *consts, *carry, *x])

    def fixed_residuals(self, consts: Arrays) -> Arrays:
        """Return the residuals that are the same in every step."""
        return _jax.call_jaxpr(self.fixed, [*self.added, *consts])

    def reversal(self, fixed: Arrays, consts: Arrays, x: Arrays, kept: Arrays) -> Callable:
        """Return the transposed derivative of the step with these residuals."""
        values = {"const": [*self.added, *consts], "x": x, "fixed": fixed, "kept": kept}
        leaves = [at if source == "literal" else values[source][at] for source, at in self.leaves]
        return jax.tree.unflatten(self.tree, leaves)


def split_step(body: _jax.Jaxpr, masks: Masks) -> Halves:
    """Return the halves of a step. Errors of derivative rules are raised as they are."""
    types = _jax.in_avals(body)
    n_consts, n_carry = len(masks.consts), len(masks.carry)
    marks = (*masks.consts, *masks.carry, *masks.xs)
    out_marks = (*masks.carry, *masks.ys)

    def forward(*values: Array) -> tuple[Arrays, TreeDef]:
        def step(*marked: Array) -> tuple[tuple[Arrays, Arrays], Arrays]:
            replacements = iter(marked)
            given = [next(replacements) if m else v for v, m in zip(values, marks)]
            out = _jax.call_jaxpr(body, given)
            active = [y for y, m in zip(out, out_marks) if m]
            n_active = sum(masks.carry)
            return (active[:n_active], active[n_active:]), out

        marked = [v for v, m in zip(values, marks) if m]
        _, pull, out = jax.vjp(step, *marked, has_aux=True)
        return out, pull

    jaxpr, added, out_tree = _jax.trace_call(forward, *types)
    n_out = len(out_marks)
    n_fixed = len(added) + n_consts
    raw = jaxpr
    jaxpr = without_repeated(raw)
    tree = jax.tree.structure(out_tree[1])
    inputs = jaxpr.invars
    first_carry = n_fixed
    first_x = first_carry + n_carry
    sources: dict[Atom, tuple[Source, int]] = {
        v: ("const", i) for i, v in enumerate(inputs[:first_carry])
    }
    sources |= {v: ("x", i) for i, v in enumerate(inputs[first_x:])}
    fixed_eqns = _fixed(jaxpr, inputs[:first_carry])
    is_fixed = {v for eqn in fixed_eqns for v in eqn.outvars}
    kept: list[Atom] = []
    fixed: list[Atom] = []
    leaves: list[tuple[Source, int | Array]] = []
    for v in jaxpr.outvars[n_out:]:
        if not _jax.is_var(v):
            leaves.append(("literal", v.val))
            continue
        if v not in sources:
            where: Source = "fixed" if v in is_fixed else "kept"
            listed = fixed if where == "fixed" else kept
            sources[v] = (where, len(listed))
            listed.append(v)
        leaves.append(sources[v])
    return Halves(
        _jax.rebuild(jaxpr, outvars=[*jaxpr.outvars[:n_out], *kept]),
        added,
        _jax.dce(
            _jax.rebuild(jaxpr, invars=inputs[:first_carry], outvars=fixed, eqns=fixed_eqns),
            [True] * len(fixed),
            keep=[True] * first_carry,
        )[0],
        tuple(leaves),
        tree,
        [v.aval for v in kept],
        _stacked(raw, raw.outvars[n_out:], n_fixed, n_fixed + n_carry),
        all(v in inputs[first_carry:first_x] for v in kept),
    )


def _stacked(
    jaxpr: _jax.Jaxpr, residuals: Sequence[Atom], first_carry: int, first_x: int
) -> list[Aval]:
    """Return the types of the residuals that differ from step to step."""
    fixed = _fixed(jaxpr, jaxpr.invars[:first_carry])
    known = {*jaxpr.invars[:first_carry], *jaxpr.invars[first_x:]}
    known |= {v for eqn in fixed for v in eqn.outvars}
    return [v.aval for v in dict.fromkeys(filter(_jax.is_var, residuals)) if v not in known]


def _fixed(jaxpr: _jax.Jaxpr, inputs: Sequence[Atom]) -> list[_jax.JaxprEqn]:
    """Return the equations without effects that compute something from these inputs alone."""
    known = set(inputs) | set(jaxpr.constvars)
    found = []
    for eqn in jaxpr.eqns:
        if not eqn.effects and all(v in known for v in eqn.invars if _jax.is_var(v)):
            known.update(eqn.outvars)
            found.append(eqn)
    return found
