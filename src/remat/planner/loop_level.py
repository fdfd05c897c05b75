"""The schedule of a step's program outside of its loops, once its loops are decided.

A `LoopLevel` rewrites the loops, converts the program around them to a graph (`priced_step`), which a solver
schedules within given bytes, and converts the schedule to a proposal (`rewrite.decisions_of`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from remat import _jax
from remat.errors import BudgetError
from remat.planner.bodies import scheduled, smallest_reasonable, takes_too_long
from remat.planner.copy_windows import Window, Windows
from remat.planner.decisions import LoopDecisions, StepDecisions, equation_numbers, with_loops
from remat.planner.host_copies import HostCopy, stack_rows
from remat.planner.priced_step import ORDERED, PricedStep, fusing
from remat.planner.rewrite import Decisions
from remat.planner.search import Proposal
from remat.program.fusion import Fused
from remat.program.program import Program
from remat.solvers.simulate import Step, no_remat
from remat.solvers.solver import Answers, Schedule

# If results' buffers hold temporaries, schedules within larger budgets fit, too: the number of larger budgets
# to try, and the share of the budget that may remain unused. More tries use more of the budget.
_MOST_LARGER, _LEFT = 4, 0.01


class LoopLevel:
    """A step whose loops are decided.

    Args:
      step: the step with its costs.
      loops: the decisions about the loops.
      loop_seconds: time of recomputation in the loops.
    """

    def __init__(self, step: PricedStep, loops: LoopDecisions, loop_seconds: float) -> None:
        self.step = step
        self.loops = loops
        self.loop_seconds = loop_seconds
        #: By variant, and whether nodes have the times of their kernels.
        self._graphs: dict[tuple[str, bool], Fused] = {}
        self._answers: list[tuple[Fused, Answers]] = []
        self._with_copies: dict[tuple[HostCopy, ...], LoopLevel] = {}
        self._peaks: dict[tuple[str, tuple[Step, ...]], int] = {}

    @functools.cached_property
    def program(self) -> Program:
        return self.step.program_of(self._flat)

    @property
    def _source(self) -> _jax.Jaxpr:
        return self.step.source_of(self.loops.opened)

    @functools.cached_property
    def _flat(self) -> _jax.Jaxpr:
        return with_loops(self._source, self.loops)

    def with_copies(self, variant: str, n_bytes: int) -> LoopLevel | None:
        """Return this level with values outside of loops in the host's memory; None if that gains nothing.

        Values are copied until these bytes suffice or the link's time is used up.
        """
        if not self.step.copies_outside or self.peak_bytes(variant) <= n_bytes:
            return None
        windows = self._windows.within(n_bytes, self._host_limit)
        copies = tuple(c for w in windows if (c := self._copy(w)) is not None)
        if not copies:
            return None
        if copies not in self._with_copies:
            price = self.step.price
            # A copy there reads the device's memory, and a copy back writes it.
            seconds = sum(2 * price(0, w.gap.bytes, "float32") for w in windows)
            loops = dataclasses.replace(self.loops, copies=copies)
            self._with_copies[copies] = LoopLevel(self.step, loops, self.loop_seconds + seconds)
        found = self._with_copies[copies]
        return found if found.peak_bytes(variant) < self.peak_bytes(variant) else None

    @functools.cached_property
    def _windows(self) -> Windows:
        avals = {
            number: v.aval
            for op, eqn in zip(self.program.ops, self._flat.eqns, strict=True)
            for number, v in zip(op.results, eqn.outvars, strict=True)
            if _jax.can_be_on_host(v.aval)
        }

        def host_bytes(values: Sequence[int]) -> int:
            rows = stack_rows(avals[v] for v in values)
            sizes = {str(avals[v]): self.program.bytes[v] for v in values}
            return sum(rows[key] * n_bytes for key, n_bytes in sizes.items())

        transfer = self.step.transfer
        assert transfer is not None
        fused = self._timed(self.step.fusions[0])
        return Windows(self.program, fused, transfer, lambda v: v in avals, host_bytes)

    @property
    def _host_limit(self) -> int | None:
        """Return the bytes of host memory that the loops leave free; None for no limit."""
        limit = self.step.host_limit
        taken = sum(option.host_bytes for _, option in self.loops.choices)
        return None if limit is None else limit - taken

    def _copy(self, window: Window) -> HostCopy | None:
        """Return a window as a copy of a value of the step as it stands before loops are rewritten."""
        gap, (numbers, own) = window.gap, self._numbers
        there = self._windows.last_operation(window.free - 1, own)
        after = self._windows.last_operation(window.after, own)
        named = (gap.operation, gap.before, *gap.again)
        if there is None or after is None or not set(own).issuperset(named):
            return None
        if not gap.operation <= there <= after < gap.before:
            return None
        return HostCopy(
            numbers[gap.operation],
            gap.result,
            numbers[there],
            numbers[after],
            numbers[gap.before],
            tuple(sorted(numbers[x] for x in gap.again)),
        )

    @functools.cached_property
    def _numbers(self) -> tuple[list[int], list[int]]:
        """Return the equations' numbers in plans, and the places of those not added by rewritten loops."""
        source = self._source
        numbers = equation_numbers(source, self._flat)
        return numbers, [at for at, n in enumerate(numbers) if n < len(source.eqns)]

    def peak_bytes(self, variant: str) -> int:
        """Return the bytes of temporaries without recomputation outside of loops."""
        fused = self._fused(variant)
        return self.step.peak_bytes(fused, range(len(fused.graph)))

    def within(self, variant: str, n_bytes: int) -> Proposal:
        found = self._once(variant)
        if self._peak_of(variant, found) > n_bytes:
            found = self._filling(variant, self._schedule_within(variant, n_bytes), n_bytes)
        return self._proposal(variant, found)

    def once(self, variant: str) -> Proposal:
        """Return the proposal that recomputes nothing outside of loops."""
        return self._proposal(variant, self._once(variant))

    def costs_more(self, variant: str, n_bytes: int, seconds: float) -> bool:
        """Return whether the proposal within these bytes is known to recompute for more than a time."""
        seconds -= self.loop_seconds
        if seconds < 0 or self.peak_bytes(variant) <= n_bytes:
            return seconds < 0
        fused, answers = self._solved(variant)
        n_bytes += self._most_in_buffers(fused)
        return answers.costs_more(n_bytes, float(fused.graph.time) + seconds)

    def least_seconds(self, variant: str, n_bytes: int) -> float:
        """Return a lower bound on the time of recomputation of proposals within these bytes."""
        if self.peak_bytes(variant) <= n_bytes:
            return self.loop_seconds
        fused, answers = self._solved(variant)
        bound = answers.lower_bound(n_bytes + self._most_in_buffers(fused))
        return self._with_loops(fused, bound)

    def _most_in_buffers(self, fused: Fused) -> int:
        """Return the bytes by which a graph overestimates at most: it does not count results' buffers."""
        return sum(map(sum, self.step.buffers(fused).values()))

    def least_price(self, variant: str, n_bytes: int) -> float:
        """Return the least price of a proposal within these bytes.

        Schedules are assumed to use results' buffers as much as that without recomputation does.
        """
        if self.peak_bytes(variant) <= n_bytes:
            return self.loop_seconds
        fused, answers = self._solved(variant)
        bound = answers.lower_bound(n_bytes + self._bytes_in_buffers(variant))
        return self._with_loops(fused, bound)

    def _with_loops(self, fused: Fused, time: float) -> float:
        """Return the price of recomputation in the loops and in a schedule that takes a time."""
        return self.loop_seconds + max(0.0, float(time - fused.graph.time))

    def _bytes_in_buffers(self, variant: str) -> int:
        """Return the bytes that results' buffers hold at the peak if everything is computed once."""
        once = self._once(variant)
        return once.peak_bytes - self._peak_of(variant, once)

    def _once(self, variant: str) -> Schedule:
        """Return the schedule that computes everything once."""
        fused, answers = self._solved(variant)
        return answers.within(int(no_remat(fused.graph).peak_bytes))

    def _schedule_within(self, variant: str, n_bytes: int) -> Schedule:
        """Return a schedule within these bytes.

        By the graph alone it may need more, since the graph does not count the reuse of results' buffers.

        Raises:
          BudgetError: none was found.
        """
        fused, answers = self._solved(variant)
        in_buffers = self._bytes_in_buffers(variant)
        ways = (
            lambda: answers.within(n_bytes + in_buffers),
            lambda: answers.within(n_bytes),
            lambda: smallest_reasonable(fused, answers),
        )
        problem: BudgetError | None = None
        for way in ways:
            try:
                found = way()
            except BudgetError as error:
                problem = error
                continue
            if self._peak_of(variant, found) <= n_bytes and not takes_too_long(fused, found):
                return found
        raise problem or BudgetError(f"no schedule within {n_bytes} bytes is offered.")

    def _filling(self, variant: str, found: Schedule, n_bytes: int) -> Schedule:
        """Return the schedule within a larger budget that fits because results' buffers hold temporaries."""
        _, answers = self._solved(variant)
        budget = max(n_bytes, found.peak_bytes)
        left = n_bytes - self._peak_of(variant, found)
        for _ in range(_MOST_LARGER):
            if left <= _LEFT * n_bytes or found.time <= found.lower_bound:
                break
            larger = answers.within(budget + left)
            left_then = n_bytes - self._peak_of(variant, larger)
            if left_then < 0:
                left //= 2
            else:
                found, budget, left = larger, budget + left, left_then
        return found

    def _peak_of(self, variant: str, found: Schedule) -> int:
        """Return the bytes of temporaries of a schedule."""
        variant = self.step.model_of(variant)
        if (variant, found.steps) not in self._peaks:
            fused = self._fused(variant)
            place = {node.id: at for at, node in enumerate(fused.graph.nodes)}
            order = [place[id] for kind, id in found.steps if kind == "compute"]
            self._peaks[variant, found.steps] = self.step.peak_bytes(fused, order)
        return self._peaks[variant, found.steps]

    def smallest(self, variant: str) -> Proposal:
        fused, answers = self._solved(variant)
        return self._proposal(variant, smallest_reasonable(fused, answers))

    def _proposal(self, variant: str, found: Schedule) -> Proposal:
        fused = self._fused(variant)
        return Proposal(
            variant,
            self._peak_of(variant, found),
            self.loop_seconds + self._extra_seconds(variant, found),
            self._with_loops(fused, found.lower_bound),
            price=self._with_loops(fused, found.time),
            decisions=StepDecisions(
                self._loops_of(variant),
                scheduled(
                    self._flat,
                    self.program,
                    fused,
                    found.steps,
                    fusing(self.step.model_of(variant)),
                    ordered=variant == ORDERED,
                    fences_arguments=self.step.is_sharded,
                ),
            ),
        )

    def _extra_seconds(self, variant: str, found: Schedule) -> float:
        """Return the larger of the time and the price of what a schedule recomputes."""
        timed = self._timed(variant).graph
        seconds = {node.id: float(node.time) for node in timed.nodes}
        time = sum(seconds[id] for kind, id in found.steps if kind == "compute") - timed.time
        return max(0.0, float(time), float(found.time - self._fused(variant).graph.time))

    def _loops_of(self, variant: str) -> LoopDecisions:
        def of_body(decided: Decisions) -> Decisions:
            return dataclasses.replace(
                decided,
                ordered=decided.ordered or (variant == ORDERED and bool(decided.bursts)),
                fences_arguments=self.step.is_sharded,
            )

        bodies = tuple((id, of_body(decided)) for id, decided in self.loops.bodies)
        return dataclasses.replace(self.loops, bodies=bodies)

    def _solved(self, variant: str) -> tuple[Fused, Answers]:
        """Return the graph of a variant and the solver's answers; variants with equal graphs share them."""
        fused = self._fused(variant)
        for graph, answers in self._answers:
            if graph.once == fused.once and graph.graph == fused.graph:
                return fused, answers
        answers = self.step.solver.answers(fused.graph, fused.once)
        self._answers.append((fused, answers))
        return fused, answers

    def _fused(self, variant: str) -> Fused:
        """Return the graph of a variant whose nodes have the prices of their recomputation."""
        return self._graph(variant, timed=False)

    def _timed(self, variant: str) -> Fused:
        """Return the graph of a variant whose nodes have the times of their kernels."""
        return self._graph(variant, timed=True)

    def _graph(self, variant: str, *, timed: bool) -> Fused:
        key = self.step.model_of(variant), timed
        if key not in self._graphs:
            self._graphs[key] = self.step.fused(self.program, key[0], timed=timed)
        return self._graphs[key]
