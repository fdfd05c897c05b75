"""Candidates for the plan of a step: what its program would store and compute again within some bytes.

The step's program becomes a graph of the values that its kernels write to memory (`program.fusion`);
a solver schedules the graph; the schedule is read as decisions (`rewrite`).

What a compiler makes of the program cannot be predicted exactly, so there are two variants of the model:

* `separate`: the results of the step have memory of their own from the start.
* `reusing`: other values use the memory of the results until these are computed.

XLA lies between the two.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from remat import _jax
from remat.planner.rewrite import Decisions, decisions_of
from remat.planner.search import Proposal
from remat.program.from_jaxpr import ProgramWriter, Slowdown, no_slowdown
from remat.program.fusion import Fused, Price, fuse
from remat.program.program import Op, Program
from remat.solvers.grid import GridSearch
from remat.solvers.liveness import sizes_at_peak
from remat.solvers.solver import Answers, Schedule, Solver

SEPARATE, REUSING = "separate", "reusing"


def program_of_flat(
    jaxpr: _jax.Jaxpr, shards: Sequence[int] | None = None, slowdown: Slowdown = no_slowdown
) -> Program:
    """Return a flat jaxpr as a program with one operation for each equation, in their order."""
    writer = _FlatWriter(slowdown)
    writer.enter(jaxpr.invars, shards)
    writer.write(jaxpr, "")
    return writer.program(jaxpr.outvars)


class _FlatWriter(ProgramWriter):
    def body_of(self, eqn: _jax.JaxprEqn) -> None:
        return None


class StepModel:
    """The model of a flat step, which `search` asks for proposals. Their decisions are `Decisions`."""

    variants = (SEPARATE, REUSING)

    def __init__(self, program: Program, price: Price, solver: Solver | None = None) -> None:
        self.program = program
        self.price = price
        self.solver = solver or GridSearch()

    def within(self, variant: str, n_bytes: int) -> Proposal:
        fused, answers = self._solved(variant)
        return self._proposal(variant, answers.within(n_bytes + fused.reused_bytes))

    def smallest(self, variant: str) -> Proposal:
        _, answers = self._solved(variant)
        return self._proposal(variant, answers.smallest())

    def extra_flops(self, decisions: Decisions) -> float:
        """Return the FLOPs of recomputation, of operations whose results are stored."""
        ops = self.program.ops
        return sum(ops[i].flops for burst in decisions.bursts for i in burst.again)

    @property
    def seconds(self) -> float:
        """Return the time of the step without recomputation."""
        return float(sum(self._solved(SEPARATE)[0].seconds.values()))

    def _proposal(self, variant: str, found: Schedule) -> Proposal:
        fused, _ = self._solved(variant)
        time = fused.graph.time
        return Proposal(
            variant,
            int(found.peak_bytes - fused.reused_bytes),
            float(found.time - time),
            max(0.0, float(found.lower_bound - time)),
            decisions_of(self.program, fused, found.steps),
        )

    @functools.cached_property
    def _by_variant(self) -> dict[str, tuple[Fused, Answers]]:
        return {}

    def _solved(self, variant: str) -> tuple[Fused, Answers]:
        if variant not in self._by_variant:
            fused = self._fused(variant)
            self._by_variant[variant] = fused, self.solver.answers(fused.graph, fused.once)
        return self._by_variant[variant]

    def _fused(self, variant: str) -> Fused:
        fused = fuse(self.program, self.price, _any_op)
        if variant == SEPARATE:
            return fused
        # The memory of a result is of use to values that fit into it and fill it at least half.
        sizes = sizes_at_peak(fused.graph)
        return fuse(
            self.program, self.price, _any_op, lambda n: any(n <= 2 * s <= 2 * n for s in sizes)
        )


def _any_op(_: Op) -> bool:
    return True
