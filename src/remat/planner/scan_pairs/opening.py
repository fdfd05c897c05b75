"""Opening the user's checkpoints, so that the plan decides what they recompute.

After differentiation a checkpoint is one equation of the backward pass, which recomputes values of the
forward pass and runs its own backward pass. Opening inlines its equations into the program around it. In a
pair of scans, those that repeat equations of the forward scan are recognized when the pair is joined;
elsewhere they are removed immediately.
"""

from __future__ import annotations

from remat import _jax
from remat.ir import jaxprs
from remat.ir.equations import called_body, is_region, transparent_call
from remat.ir.repetitions import without_repeated
from remat.planner.scan_pairs.inside import Replacements, replaced, walk_inside
from remat.planner.scan_pairs.matching import matches
from remat.planner.scan_pairs.shards import shard_matches


def opened(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return the program with its checkpoints inlined.

    In pairs of scans nothing protects the recomputation until `rewrite` chooses an option of the pair.
    Elsewhere nothing is recomputed until a schedule says so.
    """
    jaxpr = _without_checkpoints(jaxpr)
    new = _opened_in(jaxpr)
    return replaced(jaxpr, new) if new else jaxpr


def _opened_in(jaxpr: _jax.Jaxpr) -> Replacements:
    new: Replacements = {}
    paired = [i for match in (*matches(jaxpr), *shard_matches(jaxpr)) for i in match]
    for i in paired:
        eqn = jaxpr.eqns[i]
        body = _jax.open_jaxpr(eqn.params["jaxpr"])
        inner = inline_checkpoints(body)
        if inner is not body:
            new[i] = [jaxprs.replace_body(eqn, eqn.params["jaxpr"], inner)]

    def change(inner: _jax.Jaxpr, _: str) -> _jax.Jaxpr:
        return opened(inner)

    return new | walk_inside(jaxpr, paired, change, "")


def _without_checkpoints(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return the program without the checkpoints outside of loops, and without their recomputation."""
    if not any(map(_may_be_opened, jaxpr.eqns)):
        return jaxpr

    def body(eqn: _jax.JaxprEqn) -> _jax.Jaxpr | None:
        return called_body(eqn) if _may_be_opened(eqn) else transparent_call(eqn)

    new = without_repeated(jaxprs.inline_calls(jaxpr, body))
    alive, _ = _jax.dce(new, [True] * len(new.outvars), keep=[True] * len(new.invars))
    return alive


def _may_be_opened(eqn: _jax.JaxprEqn) -> bool:
    """Return whether an equation is a checkpoint that keeps nothing in host memory and is not fixed."""
    body = called_body(eqn) if is_region(eqn) else None
    if body is None or _jax.is_fixed(eqn):
        return False
    values = (v for inner in body.eqns for v in (*inner.invars, *inner.outvars))
    return not any(_jax.is_on_host(v.aval) for v in values)


def _opened_body(eqn: _jax.JaxprEqn) -> _jax.Jaxpr | None:
    is_kept = is_region(eqn) and _jax.is_fixed(eqn)
    return None if is_kept else called_body(eqn)


def inline_checkpoints(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a program with its checkpoints inlined, those in bodies of loops included."""
    changed = jaxpr
    if any(_opened_body(eqn) is not None for eqn in jaxpr.eqns):
        changed = jaxprs.inline_calls(jaxpr, _opened_body)
    new = walk_inside(changed, (), lambda inner, _: inline_checkpoints(inner), "")
    return replaced(changed, new) if new else changed
