"""Candidates for the plan of a step: what to keep and what to recompute.

The loops are decided first, and the bodies of loops and branches that are scheduled by themselves
(`bodies`). From the program as it is written, or with the checkpoints in its loops opened, a sequence of
*levels* leads to loops that keep as little as they can: from level to level one of them takes the next of
its options, in the order of their prices per byte. The program outside of the loops becomes a graph of the
values that its kernels write to memory (`program.fusion`); a solver schedules it, and the schedule is
converted to decisions (`rewrite`).

How a compiler fuses the program cannot be predicted exactly, so there are two models of fusion:

* `written`: a cheap value that several kernels need is written to memory once, unless the plan recomputes
  it. XLA for CPU does so.
* `fused`: every kernel that needs such a value computes it itself.

Compilers lie between the two. Those for TPUs also compute elementwise values inside the matrix products
that read them, so for TPUs the first variant is

* `inlined`: as `fused`, and a matrix product computes the elementwise values that it needs.

Compilers also choose the order of operations. A third variant, `ordered`, follows the first model and leaves
the compiler less freedom. On CPU the memory of most programs then agrees with the model, so it is tried
first; elsewhere it is tried if the compiler needs far more than the model predicts. Compilers also compute a
sum of many values in one kernel, which keeps all of them; if that takes much memory, partial sums are
written (`bodies.with_partial_sums`).
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from remat import _jax
from remat.errors import BudgetError
from remat.ir.flops import flops_of_program
from remat.planner import scan_pairs
from remat.planner.bodies import (
    MOST_AGAIN,
    Body,
    BodyOption,
    Fusing,
    bodies,
    program_of_flat,
    smallest_reasonable,
    takes_too_long,
    with_partial_sums,
    without_partial_sums,
)
from remat.planner.copy_windows import Window, Windows
from remat.planner.decisions import (
    LoopDecisions,
    StepDecisions,
    applied,
    equation_numbers,
    with_loops,
)
from remat.planner.host_copies import HostCopy, stack_rows
from remat.planner.host_memory import Transfer
from remat.planner.rewrite import Decisions, decisions_of
from remat.planner.search import Proposal
from remat.planner.tradeoffs import settings_of, undominated
from remat.program import result_buffers
from remat.program.from_jaxpr import Slowdown, no_slowdown
from remat.program.fusion import Fused, Price, fuse
from remat.program.program import Program
from remat.solvers.graph import Graph
from remat.solvers.grid import GridSearch
from remat.solvers.liveness import Arrays, liveness
from remat.solvers.simulate import Step, no_remat
from remat.solvers.solver import Answers, Schedule, Solver

WRITTEN, FUSED, INLINED, ORDERED = "written", "fused", "inlined", "ordered"

# Number of levels of the loops; more make the steps between them smaller and the search longer.
_MAX_LEVELS = 256
# Number of levels to try before the first one at which the loops leave enough memory. At these the program
# outside of the loops must recompute; more find better plans and take longer.
_LEVELS_BEFORE = 2
# Number of levels to try, spread over all, if the program outside of the loops must recompute at every
# level; more find better plans and take longer.
_SPREAD = 6
# Number of corrections of the bytes that bodies are scheduled for, by the peak of the program around them.
# More come closer to the budget, and each prices a program.
_MOST_CORRECTIONS = 4
# Weight of time in the cost of proposals that are compared by FLOPs. A larger one saves more time of cheap
# kernels, and costs FLOPs.
_SHARE_OF_TIME = 0.01
# If results' buffers hold temporaries, schedules within larger budgets fit, too: the number of larger budgets
# to try, and the share of the budget that may remain unused. More tries use more of the budget.
_MOST_LARGER, _LEFT = 4, 0.01


class StepModel:
    """The model of a flat step, which `search` asks for proposals. Their decisions are `StepDecisions`.

    Args:
      flat: the step.
      price: the time of a kernel.
      shards: the shard count of each argument; 1 if not given.
      slowdown: measured slowdown of kernels.
      solver: finds the schedules.
      into_products: whether matrix products compute the elementwise values that they read.
      by_flops: whether proposals of different variants are compared nearly by FLOPs alone. Models of fusion
        disagree about the time of cheap kernels, which a compiler may compute again in any case.
      transfer: the time of a copy to the host's memory or back; None if nothing may be offloaded.
      host_limit: bytes that may be kept there; None for no limit.
      copies: whether values outside of loops may be kept there, too.
      donated: the bytes of each donated argument; results reuse their buffers.
    """

    def __init__(
        self,
        flat: _jax.Jaxpr,
        price: Price,
        shards: Sequence[int] | None = None,
        slowdown: Slowdown = no_slowdown,
        solver: Solver | None = None,
        *,
        into_products: bool = False,
        by_flops: bool = False,
        transfer: Transfer | None = None,
        host_limit: int | None = None,
        copies: bool = False,
        donated: Sequence[int] = (),
    ) -> None:
        self.copies = copies and transfer is not None
        self.donated = donated
        self.transfer = transfer
        self.host_limit = host_limit
        self.flat = flat
        self.into_products = into_products
        self.by_flops = by_flops
        #: The variants that are models of fusion, the most accurate first.
        self.fusions = (INLINED, FUSED) if into_products else (WRITTEN, FUSED)
        self.variants = (ORDERED, *self.fusions) if by_flops else self.fusions
        self.exact_variants = () if by_flops else (ORDERED,)
        self.price = price
        self.shards = shards
        self.slowdown = slowdown
        self.solver = solver or GridSearch(most_extra=MOST_AGAIN)
        self._levels: dict[tuple[LoopDecisions, tuple[BodyOption, ...]], LoopLevel] = {}
        #: FLOPs of the programs that follow decisions.
        self._flops: dict[StepDecisions, float] = {}

    @property
    def seconds(self) -> float:
        """Return the time of the step without recomputation."""
        return self._as_written.seconds

    @property
    def program(self) -> Program:
        """Return the step as it is written."""
        return self._as_written.program

    def within(self, variant: str, n_bytes: int) -> Proposal:
        """Return the proposal that recomputes least within these bytes of temporaries.

        Raises:
          BudgetError: no proposal within these bytes was found.
        """
        found: list[Proposal] = []
        problem: BudgetError | None = None
        for options in self._body_choices(variant, n_bytes):
            for level in self._levels_within(variant, n_bytes, options):
                for one in (level, level.with_copies(variant, n_bytes)):
                    try:
                        found += [] if one is None else [one.within(variant, n_bytes)]
                    except BudgetError as error:
                        problem = error
        if not found:
            assert problem is not None
            raise problem
        return self._fastest(found)

    def exceeds(self, variant: str, n_bytes: int, cost: float) -> bool:
        """Return whether the proposal within these bytes is known to cost more.

        Only bounds on times are known, which say nothing if proposals are compared by FLOPs.
        """
        return not (self.copies or self.by_flops) and all(
            level.exceeds(variant, n_bytes, cost)
            for options in self._body_choices(variant, n_bytes)
            for level in self._levels_within(variant, n_bytes, options)
        )

    def smallest(self, variant: str) -> Proposal:
        """Return the proposal with the fewest bytes at the level at which all loops keep least."""
        options = self._body_options(variant, [0] * len(self._loops.bodies))
        return self._with_flops(self._level(-1, options).smallest(variant))

    def _fastest(self, found: Sequence[Proposal]) -> Proposal:
        """Return the proposal of the least cost, with the FLOPs of its program counted.

        Counting takes long, so it ends once all other proposals take longer by their schedules alone.
        """
        ordered = sorted(found, key=lambda p: (p.extra_seconds, p.model_bytes))
        best = self._with_flops(ordered[0])
        for proposal in ordered[1:]:
            if proposal.extra_seconds >= best.extra_seconds:
                break
            best = min(best, self._with_flops(proposal), key=lambda p: p.extra_seconds)
        return best

    def _with_flops(self, proposal: Proposal) -> Proposal:
        """Return a proposal whose `extra_seconds` and `cost` count the FLOPs of its program.

        A value that is not stored is computed in every unit of the program that uses it. Kernels would
        compute it more than once in any case, so the schedule's time does not count this.
        """
        decisions = proposal.decisions
        if decisions.outside.change_nothing and not decisions.loops.bodies and not self.by_flops:
            return proposal
        if decisions not in self._flops:
            self._flops[decisions] = flops_of_program(applied(self.flat, decisions))
        as_written = self._flops_as_written
        of_flops = (self._flops[decisions] / as_written - 1) * self.seconds if as_written else 0.0
        seconds = max(proposal.extra_seconds, of_flops)
        cost = seconds
        if self.by_flops and as_written:
            cost = (1 - _SHARE_OF_TIME) * max(0.0, of_flops) + _SHARE_OF_TIME * seconds
        return dataclasses.replace(proposal, extra_seconds=seconds, cost=cost)

    @functools.cached_property
    def _flops_as_written(self) -> float:
        return flops_of_program(self.flat)

    @property
    def seconds_per_flop(self) -> float:
        """Return the time of the step over its FLOPs, without recomputation; 0 if it has none."""
        return self.seconds / self._flops_as_written if self._flops_as_written else 0.0

    def as_written(self, variant: str) -> Proposal:
        """Return the step as it is written as a proposal."""
        unchanged = StepDecisions(LoopDecisions(), Decisions(frozenset(), ()))
        fused = without_partial_sums(self.program, self.price, _fusing(self.model_of(variant)))
        n_bytes = self.peak_bytes(fused, range(len(fused.graph)))
        return Proposal(variant, n_bytes, 0.0, 0.0, decisions=unchanged)

    def peak_bytes(self, fused: Fused, order: Sequence[int]) -> int:
        """Return the bytes of temporaries if the places of a graph are computed in this order."""
        return result_buffers.peak_bytes(fused.graph, order, self.buffers(fused))

    def buffers(self, fused: Fused) -> dict[int, list[int]]:
        """Return the bytes of results' buffers that may hold temporaries, by the nodes that write them."""
        if self.into_products:
            return {}  # compilers for TPUs assign buffers differently
        donated = collections.Counter(self.donated)
        free: dict[int, list[int]] = {}
        for id, sizes in fused.output_buffers.items():
            for size in sizes:
                if donated[size]:
                    donated[size] -= 1
                else:
                    free.setdefault(id, []).append(size)
        return free

    @property
    def seconds_of_checkpoints(self) -> float:
        """Return the time of recomputation in the user's own checkpoints, which a plan may remove."""
        if not self._is_opened:
            return 0.0
        return next(seconds for loops, seconds in self._loops.levels if not loops.opened)

    def program_of(self, flat: _jax.Jaxpr) -> Program:
        """Return a flat program with the costs of this model."""
        return program_of_flat(flat, self.shards, self.slowdown, into_products=self.into_products)

    @functools.cached_property
    def source(self) -> _jax.Jaxpr:
        """Return the program that the levels start from: the user's checkpoints are opened."""
        return scan_pairs.opened(self.flat)

    @functools.cached_property
    def price_of_recomputation(self) -> Price:
        """Return the price of kernels in schedules outside of loops: the mean of time and scaled FLOPs.

        The time of a kernel is known roughly, its FLOPs exactly. By time alone, schedules would recompute
        matrix products to avoid cheap kernels that move about as many bytes. FLOPs are scaled so that both
        have the same sum over the step. The mean is at most the larger of the two, which proposals state, so
        lower bounds on it are lower bounds on that.
        """
        per_flop = self.seconds_per_flop

        def price(flops: float, moved: int, dtype: str) -> float:
            return 0.5 * (self.price(flops, moved, dtype) + per_flop * flops)

        return price

    @property
    def _is_opened(self) -> bool:
        return self.source is not self.flat

    @functools.cached_property
    def _as_written(self) -> LoopLevel:
        return LoopLevel(self, LoopDecisions(), 0.0)

    @functools.cached_property
    def _loops(self) -> _Loops:
        return _loops(self, self.source)

    def _level(self, at: int, options: tuple[BodyOption, ...]) -> LoopLevel:
        """Return a level of the pairs of loops with these options of the bodies."""
        at %= len(self._loops.levels)
        return self._level_of(self._loops.levels[at], options)

    def _level_of(
        self, decided: tuple[LoopDecisions, float], options: tuple[BodyOption, ...]
    ) -> LoopLevel:
        key = decided[0], options
        if key not in self._levels:
            loops, seconds = decided
            chosen = tuple(
                (body.id, option.decisions)
                for body, option in zip(self._loops.bodies, options)
                if not option.decisions.change_nothing
            )
            # This level is the program as it is written.
            if chosen and loops.opened == self._is_opened:
                loops = dataclasses.replace(loops, bodies=tuple(sorted(chosen, key=lambda c: c[0])))
                seconds += sum(option.seconds for option in options)
            self._levels[key] = LoopLevel(self, loops, seconds)
        return self._levels[key]

    def _body_choices(self, variant: str, n_bytes: int) -> list[tuple[BodyOption, ...]]:
        """Return the options of the bodies to try, one for each body, without repetitions."""
        if not self._loops.bodies:
            return [()]
        beside = [n_bytes - around for around in self._loops.around]
        alone = [n_bytes] * len(beside)
        choices = (
            self._body_options(variant, beside),
            self._corrected_options(variant, n_bytes),
            self._body_options(variant, alone),
        )
        return list(dict.fromkeys(choices))

    def _corrected_options(self, variant: str, n_bytes: int) -> tuple[BodyOption, ...]:
        """Return the options with which the program takes these bytes without recomputation around bodies.

        What is live around a body in the program as it is written may depend on the body's option: both
        halves of a `shard_map` are one body, and the residuals between them are around it.
        """
        n_bodies = len(self._loops.bodies)
        lower = 0
        options = self._body_options(variant, [n_bytes] * n_bodies)
        for _ in range(_MOST_CORRECTIONS):
            over = self._level(-1, options).peak_bytes(variant) - n_bytes
            if over <= 0:
                break
            lower += over
            options = self._body_options(variant, [n_bytes - lower] * n_bodies)
        return options

    def _body_options(self, variant: str, room: Sequence[int]) -> tuple[BodyOption, ...]:
        """Return the fastest option of each body within its bytes.

        Bodies do not run at the same time, so each may fill what is left of the budget.
        """
        at = self.fusions.index(self.model_of(variant))
        bodies = zip(self._loops.bodies, room, strict=True)
        return tuple(body.options[at].within(n_bytes) for body, n_bytes in bodies)

    def model_of(self, variant: str) -> str:
        """Return the variant whose model of fusion a variant uses."""
        return self.fusions[0] if variant == ORDERED else variant

    def _levels_within(
        self, variant: str, n_bytes: int, options: tuple[BodyOption, ...]
    ) -> Iterator[LoopLevel]:
        """Yield the levels among which the one that recomputes least within these bytes is expected."""
        n_levels = len(self._loops.levels)
        first = bisect.bisect_left(
            range(n_levels - 1),
            True,
            key=lambda at: self._level(at, options).peak_bytes(variant) <= n_bytes,
        )
        tried = set(range(max(0, first - _LEVELS_BEFORE), first + 1))
        if self._level(first, options).peak_bytes(variant) > n_bytes:
            tried.update(round(k * (n_levels - 1) / _SPREAD) for k in range(_SPREAD))
        for at in sorted(tried):
            yield self._level(at, options)
        if self._loops.by_step is not None:
            by_step = self._level_of(self._loops.by_step, options)
            if by_step.peak_bytes(variant) <= n_bytes:
                yield by_step


def _fusing(variant: str) -> Fusing:
    return Fusing(duplicates=variant != WRITTEN, into_products=variant == INLINED)


class LoopLevel:
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
        self._by_variant: dict[str, Fused] = {}
        self._timed_by_variant: dict[str, Fused] = {}
        self._answers: list[tuple[Fused, Answers]] = []
        self._with_copies: dict[tuple[HostCopy, ...], LoopLevel] = {}
        self._peaks: dict[tuple[str, tuple[Step, ...]], int] = {}

    @functools.cached_property
    def program(self) -> Program:
        return self.model.program_of(self._flat)

    @property
    def _source(self) -> _jax.Jaxpr:
        return self.model.source if self.loops.opened else self.model.flat

    @functools.cached_property
    def _flat(self) -> _jax.Jaxpr:
        return with_loops(self._source, self.loops)

    @property
    def seconds(self) -> float:
        """Return the time of the program without recomputation outside of loops."""
        return float(sum(self._timed(FUSED).seconds.values()))

    def with_copies(self, variant: str, n_bytes: int) -> LoopLevel | None:
        """Return this level with values outside of loops in the host's memory; None if that gains nothing.

        Values are copied until these bytes suffice or the link's time is used up.
        """
        if not self.model.copies or self.peak_bytes(variant) <= n_bytes:
            return None
        windows = self._windows.within(n_bytes, self._host_limit)
        copies = tuple(c for w in windows if (c := self._copy(w)) is not None)
        if not copies:
            return None
        if copies not in self._with_copies:
            price = self.model.price
            # A copy there reads the device's memory, and a copy back writes it.
            seconds = sum(2 * price(0, w.gap.bytes, "float32") for w in windows)
            loops = dataclasses.replace(self.loops, copies=copies)
            self._with_copies[copies] = LoopLevel(self.model, loops, self.loop_seconds + seconds)
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

        transfer = self.model.transfer
        assert transfer is not None
        fused = self._timed(self.model.fusions[0])
        return Windows(self.program, fused, transfer, lambda v: v in avals, host_bytes)

    @property
    def _host_limit(self) -> int | None:
        """Return the bytes of host memory that the loops leave free; None for no limit."""
        limit = self.model.host_limit
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
        return self.model.peak_bytes(fused, range(len(fused.graph)))

    def within(self, variant: str, n_bytes: int) -> Proposal:
        found = self._once(variant)
        if self._peak_of(variant, found) > n_bytes:
            found = self._filling(variant, self._schedule_within(variant, n_bytes), n_bytes)
        return self._proposal(variant, found)

    def exceeds(self, variant: str, n_bytes: int, seconds: float) -> bool:
        """Return whether the proposal within these bytes is known to recompute for more than a time."""
        seconds -= self.loop_seconds
        if seconds < 0 or self.peak_bytes(variant) <= n_bytes:
            return seconds < 0
        fused, answers = self._solved(variant)
        # The graph does not count the reuse of results' buffers, so it overestimates by at most their bytes.
        in_buffers = sum(map(sum, self.model.buffers(fused).values()))
        return answers.exceeds(n_bytes + in_buffers, float(fused.graph.time) + seconds)

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
        once = self._once(variant)
        in_buffers = once.peak_bytes - self._peak_of(variant, once)
        ways = (
            lambda: answers.within(n_bytes),
            lambda: answers.within(n_bytes + in_buffers),
            lambda: smallest_reasonable(fused, answers),
        )
        problem: BudgetError | None = None
        for way in ways:
            try:
                found = way()
            except BudgetError as error:
                problem = problem or error
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
        variant = self.model.model_of(variant)
        if (variant, found.steps) not in self._peaks:
            fused = self._fused(variant)
            place = {node.id: at for at, node in enumerate(fused.graph.nodes)}
            order = [place[id] for kind, id in found.steps if kind == "compute"]
            self._peaks[variant, found.steps] = self.model.peak_bytes(fused, order)
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
            self.loop_seconds + max(0.0, float(found.lower_bound - fused.graph.time)),
            decisions=StepDecisions(
                self._loops_of(variant),
                decisions_of(self.program, fused, found.steps, ordered=variant == ORDERED),
            ),
        )

    def _extra_seconds(self, variant: str, found: Schedule) -> float:
        """Return the larger of the time and the price of what a schedule recomputes."""
        timed = self._timed(variant).graph
        seconds = {node.id: float(node.time) for node in timed.nodes}
        time = sum(seconds[id] for kind, id in found.steps if kind == "compute") - timed.time
        return max(0.0, float(time), float(found.time - self._fused(variant).graph.time))

    def _loops_of(self, variant: str) -> LoopDecisions:
        if variant != ORDERED:
            return self.loops
        bodies = (
            (id, dataclasses.replace(d, ordered=bool(d.bursts))) for id, d in self.loops.bodies
        )
        return dataclasses.replace(self.loops, bodies=tuple(bodies))

    def _solved(self, variant: str) -> tuple[Fused, Answers]:
        """Return the graph of a variant and the solver's answers; variants with equal graphs share them."""
        fused = self._fused(variant)
        for graph, answers in self._answers:
            if graph.once == fused.once and graph.graph == fused.graph:
                return fused, answers
        answers = self.model.solver.answers(fused.graph, fused.once)
        self._answers.append((fused, answers))
        return fused, answers

    def _fused(self, variant: str) -> Fused:
        """Return the graph of a variant whose nodes have the prices of their recomputation."""
        return self._graph(variant, self._by_variant, self.model.price_of_recomputation)

    def _timed(self, variant: str) -> Fused:
        """Return the graph of a variant whose nodes have the times of their kernels."""
        return self._graph(variant, self._timed_by_variant, self.model.price)

    def _graph(self, variant: str, known: dict[str, Fused], price: Price) -> Fused:
        variant = self.model.model_of(variant)
        if variant not in known:
            known[variant] = with_partial_sums(self.program, price, _fusing(variant))
        return known[variant]


# --------------------------------------------------------------------------------------------------
# Loops


@dataclasses.dataclass(frozen=True)
class _Loops:
    """The choices about a step's loops.

    Args:
      levels: the decisions about pairs of loops and the seconds of recomputation in them, the level that
        keeps most first.
      by_step: the same of the level at which all pairs recompute their steps one by one; None without
        pairs.
      bodies: those that are scheduled by themselves.
      around: for each body the bytes that are live while its loop runs in the program as it is written.
    """

    levels: tuple[tuple[LoopDecisions, float], ...]
    by_step: tuple[LoopDecisions, float] | None
    bodies: tuple[Body, ...]
    around: tuple[int, ...]


def _loops(model: StepModel, source: _jax.Jaxpr) -> _Loops:
    """Return the choices about a step's loops.

    The program as it is written is one of the levels. It is the first, unless checkpoints are opened in the
    others: then its time of recomputation decides its place, before the first level that takes as long.
    """
    flat, price = model.flat, model.price
    opened = source is not flat
    found = scan_pairs.pairs(
        source,
        price,
        shards=model.shards,
        slowdown=model.slowdown,
        transfer=model.transfer,
        seconds_per_flop=model.seconds_per_flop,
    )
    options_of = _within_host_memory(found, model.host_limit)
    program = model.program_of(source)
    graph = fuse(program, price, apart=True).graph
    peak = no_remat(graph).peak_bytes
    fusing = [_fusing(variant) for variant in model.fusions]
    inside = bodies(source, price, model.solver, peak, model.slowdown, fusing)
    around = _around(program, graph, inside) if inside else ()
    as_written = sum(pair.as_written.seconds for pair in found)
    if opened:
        # An option's seconds are those of all recomputation, that of the user's own checkpoints included.
        extra_flops = flops_of_program(flat) - flops_of_program(source)
        as_written += price(max(0.0, extra_flops), 0, "float32") - price(0.0, 0, "float32")
    settings = list(settings_of(options_of))
    plain = {pair.id: pair.as_written for pair in found}
    stride = max(1, -(-(len(settings) - 1) // _MAX_LEVELS))
    levels: list[tuple[LoopDecisions, float]] = []
    for n, chosen in enumerate(settings):
        is_as_written = not opened and chosen == plain
        if (n % stride == 0 or n == len(settings) - 1) and not is_as_written:
            seconds = sum(option.seconds for option in chosen.values())
            levels.append((LoopDecisions(opened, tuple(sorted(chosen.items()))), seconds))
    at = bisect.bisect_left([s for _, s in levels], as_written) if opened else 0
    levels.insert(at, (LoopDecisions(), as_written))
    by_step = None
    if found:
        each = LoopDecisions(opened, tuple(sorted((pair.id, pair.by_step) for pair in found)))
        by_step = each, sum(pair.by_step.seconds for pair in found)
    return _Loops(tuple(levels), by_step, inside, tuple(around))


def _within_host_memory(
    pairs: Sequence[scan_pairs.ScanPair], limit: int | None
) -> dict[str, Sequence[scan_pairs.ScanOption]]:
    """Return the options of each pair by its id, without those that exceed the pair's share of a limit.

    Shares are in proportion to the most host memory that an option of each pair takes.
    """
    most = {pair.id: max(option.host_bytes for option in pair.options) for pair in pairs}
    scale = 1.0 if limit is None else min(1.0, limit / max(1, sum(most.values())))
    return {
        pair.id: undominated(o for o in pair.options if o.host_bytes <= scale * most[pair.id])
        for pair in pairs
    }


def _around(program: Program, graph: Graph, inside: Sequence[Body]) -> Iterator[int]:
    """Yield the bytes that are live while the operation around each body runs, without its workspace."""
    measured = liveness(Arrays.of(graph), np.arange(len(graph)))
    place = {node.id: at for at, node in enumerate(graph.nodes)}
    for body in inside:
        live = int(measured.live_bytes[place[body.place]])
        yield max(0, live - program.ops[body.place].workspace_bytes)
