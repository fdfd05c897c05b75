"""Opening the checkpoints in the bodies of pairs of scans, so that cuts decide what they recompute.

After differentiation a checkpoint in the body of a loop is one equation of the backward scan's body,
which recomputes the forward scan's values and runs the backward pass. Opened, its equations stand in the
body. Those that repeat equations of the forward scan are recognized when the pair is joined.
"""

from __future__ import annotations

from remat import _jax
from remat.ir import jaxprs
from remat.ir.equations import called_body
from remat.planner.scan_pairs.joint import Replacements, matches, replaced, walk_inside
from remat.planner.scan_pairs.shards import shard_matches


def opened(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return the program with the checkpoints in the bodies of pairs of scans written out.

    Nothing protects the recomputation there until `rewrite` chooses an option of the pair.
    """
    new = _opened_in(jaxpr)
    return replaced(jaxpr, new) if new else jaxpr


def _opened_in(jaxpr: _jax.Jaxpr) -> Replacements:
    new: Replacements = {}
    paired = [i for match in (*matches(jaxpr), *shard_matches(jaxpr)) for i in match]
    for i in paired:
        eqn = jaxpr.eqns[i]
        body = _jax.open_jaxpr(eqn.params["jaxpr"])
        inner = written_out(body)
        if inner is not body:
            new[i] = [jaxprs.replace_body(eqn, eqn.params["jaxpr"], inner)]

    def change(inner: _jax.Jaxpr, _: str) -> _jax.Jaxpr:
        return opened(inner)

    return new | walk_inside(jaxpr, paired, change, "")


def written_out(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a program with all its checkpoints written out, those in bodies of loops included."""
    changed = jaxpr
    if any(called_body(eqn) is not None for eqn in jaxpr.eqns):
        changed = jaxprs.inline_calls(jaxpr, called_body)
    new = walk_inside(changed, (), lambda inner, _: written_out(inner), "")
    return replaced(changed, new) if new else changed
