"""Candidates for the plan of a step: what its program would keep and compute again within some bytes.

The loops are decided first, and the bodies of loops and branches that are scheduled by themselves
(`inside`). From the program as it is written, or with the checkpoints in its loops opened, a sequence of
*levels* leads to loops that keep as little as they can: from level to level one of them takes the next of
its options, in the order of their prices per byte. The program outside of the loops becomes a graph of the
values that its kernels write to memory (`program.fusion`); a solver schedules it, and the schedule is read
as decisions (`rewrite`).

What a compiler makes of the program cannot be predicted exactly, so there are two variants of the model:

* `written`: a cheap value that several kernels need is written to memory once, unless the plan computes it
  again. XLA for CPU does so.
* `fused`: every kernel that needs such a value computes it for itself.

Compilers lie between the two.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

from remat import _jax
from remat.errors import BudgetError
from remat.ir.flops import flops_of_program
from remat.planner import scan_pairs
from remat.planner.inside import Body, BodyOption, bodies, program_of_flat
from remat.planner.rewrite import decisions_of
from remat.planner.search import Proposal
from remat.planner.tradeoffs import settings_of
from remat.planner.whole_step import LoopDecisions, StepDecisions, with_loops
from remat.program.from_jaxpr import Slowdown, no_slowdown
from remat.program.fusion import Fused, Price, fuse
from remat.program.program import Program
from remat.solvers.grid import GridSearch
from remat.solvers.simulate import no_remat
from remat.solvers.solver import Answers, Schedule, Solver

_Option: TypeAlias = scan_pairs.ScanOption | BodyOption

WRITTEN, FUSED = "written", "fused"

# Levels of the loops; more make the steps between them smaller and the search longer.
_MAX_LEVELS = 64
# Levels before the first at which the loops leave enough memory. At these the program outside of the loops
# recomputes to make room; more of them find more.
_LEVELS_BEFORE = 2


class StepModel:
    """The model of a flat step, which `search` asks for proposals. Their decisions are `StepDecisions`.

    Args:
      flat: the step.
      price: the time of a kernel.
      shards: the shard count of each argument; 1 if not given.
      slowdown: measured slowdown of kernels.
      solver: finds the schedules.
    """

    variants = (WRITTEN, FUSED)

    def __init__(
        self,
        flat: _jax.Jaxpr,
        price: Price,
        shards: Sequence[int] | None = None,
        slowdown: Slowdown = no_slowdown,
        solver: Solver | None = None,
    ) -> None:
        self.flat = flat
        self.price = price
        self.shards = shards
        self.slowdown = slowdown
        self.solver = solver or GridSearch()

    @functools.cached_property
    def levels(self) -> list[Level]:
        """Return the levels of the loops, the one that keeps most first."""
        found = _loop_levels(self.flat, self.price, self.shards, self.solver)
        return [Level(self, loops, seconds) for loops, seconds in found]

    @property
    def seconds(self) -> float:
        """Return the time of the step without recomputation."""
        return self.levels[0].seconds

    @property
    def program(self) -> Program:
        """Return the step as it is written."""
        return self.levels[0].program

    def within(self, variant: str, n_bytes: int) -> Proposal:
        """Return the proposal that recomputes least within these bytes of temporaries.

        Raises:
          BudgetError: no proposal within these bytes was found.
        """
        first = self._first_within(variant, n_bytes)
        found: list[Proposal] = []
        problem: BudgetError | None = None
        for level in self.levels[max(0, first - _LEVELS_BEFORE) : first + 1]:
            try:
                found.append(level.within(variant, n_bytes))
            except BudgetError as error:
                problem = error
        if not found:
            assert problem is not None
            raise problem
        return min(found, key=lambda p: (p.extra_seconds, p.model_bytes))

    def smallest(self, variant: str) -> Proposal:
        """Return the proposal with the fewest bytes at the last level."""
        return self.levels[-1].smallest(variant)

    def as_written(self, variant: str) -> Proposal:
        """Return the step as it is written as a proposal."""
        level = next(level for level in self.levels if level.loops == LoopDecisions())
        return Proposal(variant, level.peak_bytes(variant), 0.0, 0.0, None)

    def _first_within(self, variant: str, n_bytes: int) -> int:
        """Return the first level that fits without recomputation outside of loops; else the last."""
        low, high = 0, len(self.levels) - 1
        while low < high:
            middle = (low + high) // 2
            if self.levels[middle].peak_bytes(variant) <= n_bytes:
                high = middle
            else:
                low = middle + 1
        return low


class Level:
    """A step whose loops are decided.

    Args:
      model: of the step.
      loops: the decisions about the loops.
      loop_seconds: time of recomputation in the loops.
    """

    def __init__(self, model: StepModel, loops: LoopDecisions, loop_seconds: float) -> None:
        self.model = model
        self.loops = loops
        self.loop_seconds = loop_seconds
        self._by_variant: dict[str, tuple[Fused, Answers]] = {}

    @functools.cached_property
    def program(self) -> Program:
        flat = with_loops(self.model.flat, self.loops)
        return program_of_flat(flat, self.model.shards, self.model.slowdown)

    @property
    def seconds(self) -> float:
        """Return the time of the program without recomputation outside of loops."""
        return float(sum(self._solved(FUSED)[0].seconds.values()))

    def peak_bytes(self, variant: str) -> int:
        """Return the bytes of temporaries without recomputation outside of loops."""
        fused, _ = self._solved(variant)
        return int(no_remat(fused.graph).peak_bytes - fused.reused_bytes)

    def within(self, variant: str, n_bytes: int) -> Proposal:
        fused, answers = self._solved(variant)
        return self._proposal(variant, answers.within(n_bytes + fused.reused_bytes))

    def smallest(self, variant: str) -> Proposal:
        _, answers = self._solved(variant)
        return self._proposal(variant, answers.smallest())

    def _proposal(self, variant: str, found: Schedule) -> Proposal:
        fused, _ = self._solved(variant)
        time = fused.graph.time
        return Proposal(
            variant,
            int(found.peak_bytes - fused.reused_bytes),
            self.loop_seconds + float(found.time - time),
            self.loop_seconds + max(0.0, float(found.lower_bound - time)),
            StepDecisions(self.loops, decisions_of(self.program, fused, found.steps)),
        )

    def _solved(self, variant: str) -> tuple[Fused, Answers]:
        if variant not in self._by_variant:
            fused = self._fused(variant)
            solver = self.model.solver
            self._by_variant[variant] = fused, solver.answers(fused.graph, fused.once)
        return self._by_variant[variant]

    def _fused(self, variant: str) -> Fused:
        duplicates = variant == FUSED
        return fuse(self.program, self.model.price, lambda _: True, duplicates=duplicates)


# --------------------------------------------------------------------------------------------------
# Loops


def _loop_levels(
    flat: _jax.Jaxpr, price: Price, shards: Sequence[int] | None, solver: Solver
) -> list[tuple[LoopDecisions, float]]:
    """Return the decisions of all levels, and the seconds of recomputation in loops.

    The program as it is written is one of them. If the levels open its checkpoints, it stands before the
    first level that recomputes as much, else at the start.
    """
    source = scan_pairs.opened(flat)
    opened = source is not flat
    found = scan_pairs.pairs(source, price, shards=shards)
    peak = no_remat(fuse(program_of_flat(source, shards), price, lambda _: True).graph).peak_bytes
    inside = bodies(source, price, solver, peak)
    as_written = sum(pair.as_written.seconds for pair in found)
    if opened:
        # The options count from nothing recomputed on, so what the user's checkpoints recompute, too.
        extra_flops = flops_of_program(flat) - flops_of_program(source)
        as_written += price(max(0.0, extra_flops), 0, "float32") - price(0.0, 0, "float32")
    options: dict[str, Sequence[_Option]] = {pair.id: pair.options for pair in found}
    options.update((body.id, body.options) for body in inside)
    settings = list(settings_of(options))
    plain = {body.id: settings[0][body.id] for body in inside}
    plain.update((pair.id, pair.as_written) for pair in found)
    stride = max(1, -(-(len(settings) - 1) // _MAX_LEVELS))
    levels: list[tuple[LoopDecisions, float]] = []
    for n, chosen in enumerate(settings):
        is_as_written = not opened and chosen == plain
        if (n % stride == 0 or n == len(settings) - 1) and not is_as_written:
            seconds = sum(option.seconds for option in chosen.values())
            levels.append((_decided(opened, chosen, found, inside), seconds))
    at = bisect.bisect_left([s for _, s in levels], as_written) if opened else 0
    levels.insert(at, (LoopDecisions(), as_written))
    return levels


def _decided(
    opened: bool,
    chosen: dict[str, Any],
    pairs: Sequence[scan_pairs.ScanPair],
    inside: Sequence[Body],
) -> LoopDecisions:
    return LoopDecisions(
        opened,
        tuple(sorted((pair.id, chosen[pair.id]) for pair in pairs)),
        tuple(
            sorted(
                (body.id, chosen[body.id].decisions)
                for body in inside
                if chosen[body.id].decisions.bursts
            )
        ),
    )
