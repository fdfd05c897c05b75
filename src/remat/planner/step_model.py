"""The model of a step, which proposes what to keep and what to recompute.

The step with its costs (`priced_step`) offers choices about its loops (`loop_choices`), which are decided
first, and then a schedule of the program outside of them (`loop_level`). A budget may be met by several
combinations of the two; those that are likely to recompute least become proposals for the search.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from remat.errors import BudgetError
from remat.ir.flops import flops_of_program
from remat.planner.auto import WITH_MARKS, tracing
from remat.planner.bodies import Body, BodyOption, without_partial_sums
from remat.planner.decisions import LoopDecisions, StepDecisions, applied_to
from remat.planner.loop_choices import (
    AS_LONG,
    LoopChoices,
    ScheduledSteps,
    loop_choices,
    scheduled_steps,
)
from remat.planner.loop_level import LoopLevel
from remat.planner.priced_step import ORDERED, PricedStep, fusing
from remat.planner.rewrite import Decisions
from remat.planner.search import Proposal

# Number of levels to try before the first one at which the loops leave enough memory. At these the program
# outside of the loops must recompute; more find better plans and take longer.
_LEVELS_BEFORE = 2
# Number of further levels before that one of which every second is tried if it leaves enough memory as well:
# the peak need not fall from level to level. More find more of them, and each prices a program.
_LEVELS_CHECKED = 6
# Number of levels at the end of which the one that needs least is taken for the smallest: groups of steps
# may need more than the loop keeps less. More find smaller ones, and each prices a program.
_LAST = 3
# Number of levels to try, spread over all: recomputation outside of the loops may cost less than in them.
# More find better plans and take longer. Where compiling takes only seconds, fewer are tried.
_SPREAD, _QUICK_SPREAD = 6, 3
# Share by which the lower bound of another variant's price must be below that of a proposal that fills the
# budget, since schedules of one step are about as far above their bounds in every variant, or below the price
# of one that does not. A larger share tries fewer variants.
_MUCH = 0.1
# Share of the lower bound of a proposal that fills the budget above which that of another variant's says that
# the two cost about the same. A larger one tries more variants.
_SIMILAR = 0.95
# Share of a proposal's price below which its lower bound says little. A smaller one tries fewer variants.
_INFORMATIVE = 0.75
# Share of a proposal's price below which its lower bound says nothing.
_HARDLY_INFORMATIVE = 0.5
# Number of corrections of the bytes that bodies are scheduled for, by the peak of the program around them.
# More come closer to the budget, and each prices a program.
_MOST_CORRECTIONS = 4
# If these do not suffice, the shares of the bytes by which further ones lower them at least. Bodies have few
# options, so smaller shares may give the same ones again; larger ones leave more unused.
_LARGE_CORRECTIONS = 0.02, 0.04, 0.08
# The program may take fewer bytes if its bodies may take more. So if none of these tries fits, this number
# of others is tried for the most accurate variant, each with this share of the bytes of the one before. More
# find more plans near the smallest.
_MOST_BETWEEN, _SHARE_BETWEEN = 7, 0.95
# Weight of time in the cost of proposals that are compared by FLOPs. A larger one saves more time of cheap
# kernels, and costs FLOPs.
_SHARE_OF_TIME = 0.01

_T = TypeVar("_T")


class StepModel:
    """The model of a flat step, which `search` asks for proposals. Their decisions are `StepDecisions`.

    Args:
      step: the step with its costs.
    """

    def __init__(self, step: PricedStep) -> None:
        self.step = step
        self.smaller_variants = step.smaller_fusions
        fusions = tuple(fusion for fusion in step.fusions if fusion not in self.smaller_variants)
        self.variants = (ORDERED, *fusions) if step.by_flops else fusions
        self.exact_variants = () if step.by_flops else (ORDERED,)
        self._levels: dict[tuple[LoopDecisions, tuple[BodyOption, ...]], LoopLevel] = {}
        #: FLOPs of the programs that follow decisions.
        self._flops: dict[StepDecisions, float] = {}
        #: The number of the level at which a search for one starts; 0 for none.
        self._found_before = 0

    def restart(self) -> None:
        """Answer from now on as if nothing had been asked before."""
        self._found_before = 0

    def within(self, variant: str, n_bytes: int) -> Proposal:
        """Return the proposal that recomputes least within these bytes of temporaries.

        Raises:
          BudgetError: no proposal within these bytes was found.
        """
        found: list[Proposal] = []
        problem: BudgetError | None = None
        for least, level in self._in_turn(variant, n_bytes):
            if math.isinf(least) and not self.step.copies_outside:
                problem = problem or BudgetError(f"nothing takes at most {n_bytes} bytes.")
                continue
            copied = level.with_copies(variant, n_bytes)
            if found and copied is None and self._is_slower(least, found):
                if self.step.copies_outside:
                    continue
                break
            for one in (level, copied):
                try:
                    found += [] if one is None else [one.within(variant, n_bytes)]
                except BudgetError as error:
                    problem = error
        if not found:
            assert problem is not None
            raise problem
        return self._fastest(found)

    def _in_turn(self, variant: str, n_bytes: int) -> Iterator[tuple[float, LoopLevel]]:
        """Yield the levels to try with lower bounds on their times, the least first.

        A level is priced once none that was not yielded has loops that take less.
        """
        levels = list(dict.fromkeys(self._levels_to_try(variant, n_bytes)))
        bounds = [(level.loop_seconds, n, False) for n, level in enumerate(levels)]
        heapq.heapify(bounds)
        while bounds:
            least, n, is_priced = heapq.heappop(bounds)
            if is_priced:
                yield least, levels[n]
            else:
                bound = max(least, levels[n].least_seconds(variant, n_bytes))
                heapq.heappush(bounds, (bound, n, True))

    def _is_slower(self, seconds: float, found: Sequence[Proposal]) -> bool:
        """Return whether a time is longer than that of the fastest proposal that was found."""
        if seconds <= min(proposal.extra_seconds for proposal in found):
            return False
        return seconds > self._fastest(found).extra_seconds

    def costs_more(self, variant: str, n_bytes: int, cost: float) -> bool:
        """Return whether the proposal within these bytes is known to cost more.

        Only bounds on times are known, which say nothing if proposals are compared by FLOPs.
        """
        return not (self.step.copies_outside or self.step.by_flops) and all(
            level.costs_more(variant, n_bytes, cost)
            for level in self._levels_to_try(variant, n_bytes)
        )

    def may_gain(self, variant: str, n_bytes: int, than: Proposal, *, is_full: bool) -> bool:
        """Return whether the proposal within these bytes may have a much lower price than another one.

        Where compiling takes long, other variants are worth computing in any case.
        """
        if not self.step.by_flops or self.step.copies_outside:
            return True
        compared, most = than.price, math.inf
        if is_full:
            compared = max(than.lower_bound_seconds, _INFORMATIVE * than.price)
            if than.lower_bound_seconds > _HARDLY_INFORMATIVE * than.price:
                most = _SIMILAR * than.lower_bound_seconds
        if variant in self.smaller_variants:
            # The cost of the other one may be that of values that are computed wherever they are read. Prices
            # do not count it.
            compared = max(compared, than.cost)
        least = min((1 - _MUCH) * compared, most)
        return self._least_in_bodies(variant, n_bytes) < least and any(
            level.loop_seconds < least and level.least_price(variant, n_bytes) < least
            for level in self._levels_to_try(variant, n_bytes)
        )

    def _least_in_bodies(self, variant: str, n_bytes: int) -> float:
        """Return the time that bodies recompute for if each may take all of these bytes.

        It is 0 if a level recomputes nothing in them. Correcting their bytes by the program around them takes
        much longer.
        """
        if any(loops.opened != self.step.is_opened for loops, _ in self._loops.levels):
            return 0.0
        room = [n_bytes] * len(self._loops.bodies)
        return sum(option.seconds for option in self._body_options(variant, room))

    def smallest(self, variant: str) -> Proposal:
        """Return the proposal with the fewest bytes at the levels at which loops keep least."""
        options = self._body_options(variant, [0] * len(self._loops.bodies))
        last = [self._level(-1 - k, options) for k in range(min(_LAST, len(self._loops.levels)))]
        levels = [min(last, key=lambda level: level.peak_bytes(variant))]
        if self._steps.bodies:
            levels.append(self._level_with_steps(variant, 0, options))
        found = [level.smallest(variant) for level in levels]
        return self._with_flops(min(found, key=lambda proposal: proposal.model_bytes))

    @functools.cached_property
    def by_hand(self) -> list[Proposal]:
        """Return the step with all loops recomputed as people do, and nothing recomputed outside of them.

        They are recomputed step by step, without what matrix products compute or with it, or in groups of
        steps. The one that needs least comes first.
        """
        variant = self.step.fusions[0]
        options = tuple(body.options[0].as_written for body in self._loops.bodies)
        levels = (self._level_of(decided, options) for decided in self._loops.by_hand)
        found = (self._with_flops(level.once(variant)) for level in levels)
        return sorted(found, key=lambda proposal: proposal.model_bytes)

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
        if (
            decisions.outside.changes_nothing
            and not decisions.loops.bodies
            and not self.step.by_flops
        ):
            return proposal
        if decisions not in self._flops:
            source = self.step.source_of(decisions.loops.opened)
            with tracing(WITH_MARKS):  # as when it is compiled, so that the program is made once
                self._flops[decisions] = flops_of_program(applied_to(source, decisions))
        as_written = self.step.flops
        more = self._flops[decisions] / as_written - 1 if as_written else 0.0
        of_flops = more * self.step.computing_seconds
        seconds = max(proposal.extra_seconds, of_flops)
        cost = seconds
        if self.step.by_flops and as_written:
            cost = (1 - _SHARE_OF_TIME) * max(0.0, of_flops) + _SHARE_OF_TIME * seconds
        return dataclasses.replace(proposal, extra_seconds=seconds, cost=cost)

    def as_written(self, variant: str) -> Proposal:
        """Return the step as it is written as a proposal."""
        unchanged = StepDecisions(LoopDecisions(), Decisions(frozenset(), ()))
        step, model = self.step, self.step.model_of(variant)
        fused = step.fused(step.program, model)
        if fused.partial_sums:
            fused = without_partial_sums(step.program, step.price, fusing(model))
        n_bytes = self.step.peak_bytes(fused, range(len(fused.graph)))
        return Proposal(variant, n_bytes, 0.0, 0.0, decisions=unchanged)

    @property
    def seconds_of_checkpoints(self) -> float:
        """Return the time of recomputation in the user's own checkpoints, which a plan may remove."""
        if not self.step.is_opened:
            return 0.0
        return next(seconds for loops, seconds in self._loops.levels if not loops.opened)

    @functools.cached_property
    def _loops(self) -> LoopChoices:
        return loop_choices(self.step)

    @functools.cached_property
    def _steps(self) -> ScheduledSteps:
        return scheduled_steps(self.step, self._loops)

    def _level_with_steps(
        self, variant: str, n_bytes: int, options: tuple[BodyOption, ...]
    ) -> LoopLevel:
        """Return the level at which loops keep least, and their steps are scheduled within these bytes."""
        steps = self._steps
        found = self._options_of(steps.bodies, variant, [n_bytes] * len(steps.bodies))
        bodies = tuple(
            (body.id, option.decisions)
            for body, option in zip(steps.bodies, found)
            if not option.changes_nothing
        )
        seconds = steps.seconds + sum(option.seconds for option in found)
        return self._level_of((dataclasses.replace(steps.loops, bodies=bodies), seconds), options)

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
            taken = [
                (body.id, option)
                for body, option in zip(self._loops.bodies, options)
                if not option.changes_nothing
            ]
            # The other level is the program as it is written.
            if taken and loops.opened == self.step.is_opened:
                ids = tuple(id for id, _ in taken)
                outside = [choice for choice in loops.choices if not choice[0].startswith(ids)]
                inside = [choice for _, option in taken for choice in option.choices]
                bodies = [
                    (id, option.decisions)
                    for id, option in taken
                    if not option.decisions.changes_nothing
                ]
                loops = dataclasses.replace(
                    loops,
                    choices=tuple(sorted((*outside, *inside), key=lambda choice: choice[0])),
                    bodies=tuple(sorted((*loops.bodies, *bodies), key=lambda body: body[0])),
                )
                seconds += sum(option.seconds for _, option in taken)
            self._levels[key] = LoopLevel(self.step, loops, seconds)
        return self._levels[key]

    def _body_choices(self, variant: str, n_bytes: int) -> list[tuple[BodyOption, ...]]:
        """Return the options of the bodies to try, one for each body. All take different times."""
        if not self._loops.bodies:
            return [()]
        beside = [n_bytes - around for around in self._loops.around]
        alone = [n_bytes] * len(beside)
        choices = (
            self._body_options(variant, beside),
            self._corrected_options(variant, n_bytes),
            self._body_options(variant, alone),
        )
        found: list[tuple[BodyOption, ...]] = []
        least = math.inf
        for options in sorted(choices, key=lambda options: sum(o.bytes for o in options)):
            seconds = sum(option.seconds for option in options)
            if seconds < least:
                found.append(options)
                least = seconds - AS_LONG * self.step.computing_seconds
        return found

    def _corrected_options(self, variant: str, n_bytes: int) -> tuple[BodyOption, ...]:
        """Return the options with which the program takes these bytes without recomputation around bodies.

        What is live around a body in the program as it is written may depend on the body's option: both
        halves of a `shard_map` are one body, and the residuals between them are around it.
        """
        bodies = self._loops.bodies
        return lowered(
            n_bytes,
            self._most_room(bodies, variant, n_bytes),
            lambda room: self._body_options(variant, [room] * len(bodies)),
            lambda options: self._level(-1, options).peak_bytes(variant) - n_bytes,
        )

    def _body_options(self, variant: str, room: Sequence[int]) -> tuple[BodyOption, ...]:
        """Return the fastest option of each body within its bytes.

        Bodies do not run at the same time, so each may fill what is left of the budget.
        """
        return self._options_of(self._loops.bodies, variant, room)

    def _options_of(
        self, bodies: Sequence[Body], variant: str, room: Sequence[int]
    ) -> tuple[BodyOption, ...]:
        """Return the fastest option of each body within its bytes."""
        at = self._model_number(variant)
        return tuple(
            body.options[at].within(n_bytes) for body, n_bytes in zip(bodies, room, strict=True)
        )

    def _most_room(self, bodies: Sequence[Body], variant: str, n_bytes: int) -> int:
        """Return the bytes below which the first body changes, or `n_bytes` if that is less."""
        at = self._model_number(variant)
        return min(n_bytes, max(body.options[at].as_written.bytes for body in bodies))

    def _model_number(self, variant: str) -> int:
        return self.step.fusions.index(self.step.model_of(variant))

    def _levels_to_try(self, variant: str, n_bytes: int) -> Iterator[LoopLevel]:
        """Yield the levels to try within these bytes, with all options of the bodies to try."""
        for options in self._body_choices(variant, n_bytes):
            yield from self._levels_within(variant, n_bytes, options)

    def _levels_within(
        self, variant: str, n_bytes: int, options: tuple[BodyOption, ...]
    ) -> Iterator[LoopLevel]:
        """Yield the levels among which the one that recomputes least within these bytes is expected."""
        n_levels = len(self._loops.levels)
        n_spread = _QUICK_SPREAD if self.step.by_flops else _SPREAD
        first = self._first_within(variant, n_bytes, options)
        nearest = max(0, first - _LEVELS_BEFORE)
        tried = set(range(nearest, first + 1))
        tried.update(
            at
            for at in range(nearest - 1, max(0, nearest - _LEVELS_CHECKED) - 1, -2)
            if self._level(at, options).peak_bytes(variant) <= n_bytes
        )
        tried.update(round(k * (n_levels - 1) / n_spread) for k in range(n_spread))
        for at in sorted(tried):
            yield self._level(at, options)
        yield from self._just_before(first, variant, n_bytes, options)
        by_hand = self._loops.by_hand
        is_too_small = self._level(-1, options).peak_bytes(variant) > n_bytes
        for decided in by_hand if is_too_small else by_hand[:1]:
            level = self._level_of(decided, options)
            if level.peak_bytes(variant) <= n_bytes:
                yield level
        if is_too_small and self._steps.bodies:
            yield lowered(
                n_bytes,
                self._most_room(self._steps.bodies, variant, n_bytes),
                lambda room: self._level_with_steps(variant, room, options),
                lambda level: level.peak_bytes(variant) - n_bytes,
                n_between=_MOST_BETWEEN if variant == self.variants[0] else 0,
            )

    def _just_before(
        self, at: int, variant: str, n_bytes: int, options: tuple[BodyOption, ...]
    ) -> Iterator[LoopLevel]:
        """Yield the level between one and the level before it that keeps most within these bytes, if any."""
        levels = [self._level_of(decided, options) for decided in self._loops.between[at]]
        first = bisect.bisect_left(
            levels, True, key=lambda level: level.peak_bytes(variant) <= n_bytes
        )
        yield from levels[first : first + 1]

    def _first_within(self, variant: str, n_bytes: int, options: tuple[BodyOption, ...]) -> int:
        """Return the number of the first level that takes these bytes without more recomputation.

        It is the last level if none does. Each level's program takes long to price, so the ends are tried
        first: often all levels take the same bytes, because the peak is elsewhere. Then the search starts at
        the level that it found before, since other options of the bodies and other budgets move it little.
        """

        def fits(at: int) -> bool:
            return self._level(at, options).peak_bytes(variant) <= n_bytes

        does_not, does = 0, len(self._loops.levels) - 1
        if not fits(does):
            return does
        if fits(does_not):
            return does_not
        at, distance = self._found_before, 1
        while does_not < at < does:
            if fits(at):
                does, at = at, at - distance
            else:
                does_not, at = at, at + distance
            distance *= 2
        self._found_before = bisect.bisect_left(range(does), True, does_not + 1, does, key=fits)
        return self._found_before


def lowered(
    n_bytes: int,
    room: int,
    options_within: Callable[[int], _T],
    excess_of: Callable[[_T], int],
    *,
    n_between: int = 0,
) -> _T:
    """Return options of bodies with which the program around them fits, or the last that were tried.

    Args:
      n_bytes: what the program may take.
      room: what the bodies may take at first.
      options_within: the options of bodies that take at most these bytes.
      excess_of: the bytes by which the program with some options is too large; not positive if it fits.
      n_between: if no options fit, the number of others to try, for which bodies may take more again.
    """
    most = room
    options = options_within(room)
    for least in (0.0,) * _MOST_CORRECTIONS + _LARGE_CORRECTIONS:
        excess = excess_of(options)
        if excess <= 0:
            return options
        room -= max(excess, int(least * n_bytes))
        options = options_within(room)
    if n_between and excess_of(options) > 0:
        rooms = (int(most * _SHARE_BETWEEN**k) for k in range(1, n_between + 1))
        others = (options_within(between) for between in rooms)
        return next((found for found in others if excess_of(found) <= 0), options)
    return options
