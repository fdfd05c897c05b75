"""Random decisions about a flat program."""

from __future__ import annotations

import random

from remat.ir.equations import is_fusible, is_repeatable
from remat.planner.rewrite import Burst, Decisions


def random_decisions(jaxpr, seed):
    """Store values at random, and recompute at random those that may be recomputed.

    Every third seed gives an ordered program (if it recomputes anything), the next one a separated program.
    """
    rng = random.Random(seed)
    stored = {
        i
        for i, eqn in enumerate(jaxpr.eqns)
        if eqn.effects or not is_fusible(eqn) or rng.random() < 0.7
    }
    may = [i for i in sorted(stored) if is_repeatable(jaxpr.eqns[i])]
    bursts = []
    for before in sorted(rng.sample(range(len(jaxpr.eqns)), min(5, len(jaxpr.eqns)))):
        earlier = [i for i in may if i < before]
        if earlier:
            again = sorted(rng.sample(earlier, rng.randint(1, min(6, len(earlier)))))
            bursts.append(Burst(before, tuple(again)))
    sums = tuple(sorted(rng.sample(sorted(stored), len(stored) // 8)))
    ordered, separated = bool(bursts) and seed % 3 == 1, seed % 3 == 2
    return Decisions(frozenset(stored), tuple(bursts), ordered, sums, separated=separated)
