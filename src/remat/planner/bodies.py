"""Bodies of loops, branches and `shard_map`s that are scheduled by themselves.

Some loops are not half of a pair of scans: gradient accumulation runs a whole forward and backward pass in
each step, and an optimizer's line search evaluates a gradient in a `while_loop`. The peak of such a body is
the loop's workspace. So its jaxpr is scheduled like a step's, and written back by `rewrite`.

The body of a `shard_map` is scheduled, too, with the bytes of one device. If a `shard_map` was
differentiated, its forward and its backward half are scheduled as one program, and written back as two.

A body is scheduled if it contains no other body of nearly its own size, about which separate decisions are
made. If it contains pairs of scans or conditionals (`scan_pairs`), they are decided first, and the body
around them is scheduled then, for several choices of how much the pairs keep. If most of the body's memory is
that of pairs, the body stays as it is, and separate decisions are made about the pairs.

Where a pair of scans keeps only what its steps start from, its backward step is a whole pass, too. If the
program does not fit otherwise, these steps are scheduled (`step_bodies`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from remat import _jax
from remat.aliases import Atom
from remat.errors import BudgetError, PlanError
from remat.planner.plan_decisions import ScanOption
from remat.planner.rewrite import Decisions, decisions_of, rewritten, rewritten_in_two
from remat.planner.scan_pairs.branches import branch_matches
from remat.planner.scan_pairs.inside import (
    Replacements,
    inner_programs,
    inside_of,
    places_without,
    prepared,
    replaced,
    walk_inside,
)
from remat.planner.scan_pairs.matching import Match, matches
from remat.planner.scan_pairs.pair_options import ScanPair
from remat.planner.scan_pairs.rewriting import pair_id, rewrite, rewrite_in_two, step_id
from remat.planner.scan_pairs.shards import Shards, emit_in_two, shard_matches, shards_of
from remat.planner.tradeoffs import settings_of, undominated
from remat.planner.unit_starts import separated_starts
from remat.program.from_jaxpr import PLAIN, Execution, FlatWriter
from remat.program.fusion import Fused, Price, fuse
from remat.program.program import Program
from remat.solvers.simulate import Step, no_remat
from remat.solvers.solver import Answers, Schedule, Solver

# Ratio of the budgets that bodies are scheduled for. A larger one leaves less of the memory unused, and lets
# fewer proposals share their schedules.
_RATIO = 0.97
# Shares of the peak of the program around a body. A body that needs less than the first is not scheduled.
# If it needs more than the second, the body around it is not scheduled.
_SMALL, _LARGE = 0.1, 0.5
# Shares of a body's peak. If its pairs can save more than the first, the body around them is not scheduled.
# If one choice for them saves less than the second beyond another one, it is not tried.
_MOST_BY_PAIRS, _LEAST_BY_PAIRS = 0.5, 0.1
# Number of choices for the pairs in a body, one after the other, that give no faster schedule, after which no
# others are tried. More find better schedules and take longer.
_MOST_IN_VAIN = 4
# Share of a program's peak. Backward steps that need less are not scheduled.
_LARGE_STEP = 0.25
# Share of a program's peak. Partial sums are written only if their terms take more: larger writes fewer.
_SMALL_SUM = 0.05
# Ratio of the time of recomputation to the program's time without it. Schedules near the lower bound of
# memory may compute values hundreds of times; those above this ratio are not offered.
MOST_AGAIN = 2
# Ratio of budgets: if a schedule takes too long, one within a budget larger by this ratio is tried.
_STEP_UP = 1.1


PairChoices: TypeAlias = tuple[tuple[str, ScanOption], ...]


class Fusing(NamedTuple):
    """A model of fusion: arguments of `fusion.fuse`.

    Attributes:
      duplicates, into_products, costly_inside: as of `fusion.fuse`.
      separated: whether barriers keep kernels apart that depend on each other (`Decisions.separated`), which
        means `joins_sums` for `fusion.fuse`.
    """

    duplicates: bool = False
    into_products: bool = False
    costly_inside: bool = False
    separated: bool = False

    @property
    def without_barriers(self) -> Fusing:
        """Return the model of a program without barriers, in which compilers store costly values."""
        return Fusing() if self.separated else self._replace(costly_inside=False)


@dataclasses.dataclass(frozen=True)
class BodyOption:
    """One way to run a body.

    Args:
      bytes: the body's peak.
      seconds: time of recomputation, all runs together.
      decisions: about the body's equations, after its pairs were rewritten.
      choices: options of pairs in it, by id; other pairs stay as they are.
    """

    bytes: int
    seconds: float
    decisions: Decisions
    choices: PairChoices = ()

    @property
    def changes_nothing(self) -> bool:
        return self.decisions.changes_nothing and not self.choices


class BodyLevel:
    """A body whose pairs are decided.

    Args:
      jaxpr: the body with its pairs rewritten.
      costing: how it is priced.
      choices: options of pairs, by id; other pairs stay as they are.
      seconds: time of recomputation in the pairs beyond that as they are written, all runs together.
    """

    def __init__(
        self,
        jaxpr: _jax.Jaxpr,
        costing: _Costing,
        choices: PairChoices = (),
        seconds: float = 0.0,
    ) -> None:
        self.jaxpr = jaxpr
        self.choices = choices
        self.seconds = seconds
        self._costing = costing
        self._solved: dict[Fusing, tuple[Fused, Answers]] = {}

    @functools.cached_property
    def program(self) -> Program:
        into_products = any(fusing.into_products for fusing in self._costing.fusing)
        execution = self._costing.execution
        return program_of_flat(self.jaxpr, execution=execution, into_products=into_products)

    def peak_bytes(self, fusing: Fusing) -> int:
        """Return what the body needs in a model of fusion without recomputation around its pairs."""
        price = self._costing.price
        fused = without_partial_sums(self.program, price, fusing.without_barriers)
        return int(no_remat(fused.graph).peak_bytes)

    def solved(self, fusing: Fusing) -> tuple[Fused, Answers]:
        """Return the graph in a model of fusion, and its schedules."""
        if fusing not in self._solved:
            fused = with_partial_sums(self.program, self._costing.price, fusing)
            answers = self._costing.solver.answers(fused.graph, fused.once)
            self._solved[fusing] = fused, answers
        return self._solved[fusing]


class BodyOptions:
    """The options of a body in one model of fusion. Each is scheduled when it is first asked for.

    Args:
      levels: the body with its pairs decided, the choices that take least time first. The first is the body
        as it is written.
      n_bytes: what the body needs at its peak as it is written.
      fusing: the model of fusion.
      times: runs of the body.
    """

    def __init__(
        self, levels: Sequence[BodyLevel], n_bytes: int, fusing: Fusing, times: int
    ) -> None:
        self.levels = levels
        self.fusing = fusing
        self.times = times
        self.as_written = BodyOption(n_bytes, 0.0, Decisions(frozenset(), ()))
        self._within: dict[int, BodyOption] = {}

    def within(self, n_bytes: int) -> BodyOption:
        """Return the option that recomputes least of those within these bytes; the smallest if none is."""
        if self.as_written.bytes <= n_bytes:
            return self.as_written
        budget = self.as_written.bytes
        while budget > max(n_bytes, 1):
            budget = int(_RATIO * budget)
        if budget not in self._within:
            self._within[budget] = self._scheduled(budget)
        return self._within[budget]

    def _scheduled(self, budget: int) -> BodyOption:
        best: BodyOption | None = None
        n_in_vain = 0
        for least, level in self._most_promising(budget):
            if n_in_vain == _MOST_IN_VAIN or (best is not None and least >= best.seconds):
                break
            n_in_vain += 1
            fused, answers = level.solved(self.fusing)
            try:
                schedule = answers.within(budget)
            except BudgetError:
                continue
            if takes_too_long(fused, schedule):
                continue
            option = self._option(level, schedule)
            if best is None or option.seconds < best.seconds:
                best, n_in_vain = option, 0
        return best or self.smallest

    def _most_promising(self, budget: int) -> list[tuple[float, BodyLevel]]:
        """Return levels with lower bounds on their times within these bytes, the most promising first.

        That is the first one with which nothing more is recomputed, and those after it take longer. If there
        is none, it is the one that keeps least. The others follow by their lower bounds. Pairs in a body may
        be many, of which few are live at once, so there may be far more levels than can be scheduled.
        """
        bounds: list[tuple[float, BodyLevel]] = []
        for level in self.levels:
            fused, answers = level.solved(self.fusing)
            more = self.times * max(0.0, answers.lower_bound(budget) - float(fused.graph.time))
            bounds.append((level.seconds + more, level))
            if not more:
                break
        first = bounds.pop()
        in_turn = [first, *sorted(bounds, key=lambda bound: bound[0])]
        return [(least, level) for least, level in in_turn if math.isfinite(least)]

    @functools.cached_property
    def smallest(self) -> BodyOption:
        """Return the option of the fewest bytes that does not take too long."""
        level = self.levels[-1]
        found = self._option(level, smallest_reasonable(*level.solved(self.fusing)))
        return min(found, self.as_written, key=lambda option: option.bytes)

    @property
    def is_smaller(self) -> bool:
        """Return whether there is an option that needs less than the body as it is written."""
        return self.within(self.as_written.bytes - 1).bytes < self.as_written.bytes

    def _option(self, level: BodyLevel, found: Schedule) -> BodyOption:
        fused, _ = level.solved(self.fusing)
        seconds = self.times * float(found.time - fused.graph.time)
        decisions = scheduled(level.jaxpr, level.program, fused, found.steps, self.fusing)
        return BodyOption(int(found.peak_bytes), level.seconds + seconds, decisions, level.choices)


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """A body with its options.

    Args:
      id: the path to the body: for each equation around it its place and the number of its body.
        "7.0/12.1/" is body 1 of equation 12 in body 0 of equation 7. Users see it in plans (`whole_step`).
      options: for each model of fusion.
    """

    id: str
    options: tuple[BodyOptions, ...]

    @property
    def place(self) -> int:
        """Return the place in the program of the outermost equation around it, or of the first of a pair."""
        return int(re.split(r"\D", self.id)[0])


def bodies(
    jaxpr: _jax.Jaxpr,
    price: Price,
    solver: Solver,
    n_bytes: int,
    execution: Execution = PLAIN,
    fusing: Sequence[Fusing] = (Fusing(),),
    pairs: Sequence[ScanPair] = (),
) -> tuple[Body, ...]:
    """Return the bodies in a program that can be scheduled, with their options.

    Args:
      jaxpr: the program, with plain calls inlined.
      price: the time of a kernel.
      solver: finds the schedules.
      n_bytes: the program's peak; bodies that need much less are left out.
      execution: how equations run on a device.
      fusing: the models of fusion.
      pairs: the pairs of scans in the program, with their options.
    """
    costing = _Costing(price, execution, tuple(fusing), solver, tuple(pairs))
    return tuple(_found(jaxpr, costing, int(_SMALL * n_bytes), "", 1))


def step_bodies(
    jaxpr: _jax.Jaxpr,
    choices: Mapping[str, ScanOption],
    price: Price,
    solver: Solver,
    n_bytes: int,
    execution: Execution = PLAIN,
    fusing: Sequence[Fusing] = (Fusing(),),
    *,
    times: Mapping[str, int],
) -> tuple[Body, ...]:
    """Return the backward steps of scans that recompute in them, with their options.

    Args:
      jaxpr, price, solver, execution, fusing: as of `bodies`.
      choices: the options of the pairs, by id.
      n_bytes: the peak of the program with these options; steps that need much less are left out.
      times: how often each pair runs, by id.
    """
    costing = _Costing(price, execution, tuple(fusing), solver, ())
    found: list[Body] = []
    for id, (step, n_steps) in backward_steps(jaxpr, choices).items():
        (of_pair,) = (n for key, n in times.items() if id.startswith(step_id(key)))
        level = BodyLevel(step, costing)
        peaks = [level.peak_bytes(model) for model in costing.fusing]
        if max(peaks) >= _LARGE_STEP * n_bytes:
            found += _body(id, [level], peaks, costing, of_pair * n_steps)
    return tuple(found)


def backward_steps(
    jaxpr: _jax.Jaxpr, choices: Mapping[str, ScanOption]
) -> dict[str, tuple[_jax.Jaxpr, int]]:
    """Return the backward steps of pairs that recompute their steps one by one, by id.

    Each comes with how often it runs each time that the outermost pair around it runs.
    """
    found: dict[str, tuple[_jax.Jaxpr, int]] = {}

    def seen(step: _jax.Jaxpr, id: str, steps: int) -> None:
        found[id] = step, steps

    rewrite(jaxpr, choices, change=seen)
    return found


@dataclasses.dataclass(frozen=True)
class _Costing:
    """The parameters that price and schedule bodies; see `bodies`."""

    price: Price
    execution: Execution
    fusing: tuple[Fusing, ...]
    solver: Solver
    pairs: tuple[ScanPair, ...]


def with_bodies(
    jaxpr: _jax.Jaxpr,
    decisions: Mapping[str, Decisions],
    choices: Mapping[str, ScanOption] | None = None,
) -> _jax.Jaxpr:
    """Return a program with some bodies scheduled.

    Args:
      jaxpr: the program that `bodies` was called on.
      decisions: by the ids of bodies.
      choices: options of pairs in these bodies, by id; other pairs stay as they are.

    Raises:
      PlanError: the program has no such body.
    """
    left = set(decisions)

    def changed(body: _jax.Jaxpr, id: str, n_first: int | None) -> _Parts:
        left.discard(id)
        inside = _inside(id, choices or {})
        if n_first is not None:
            body, n_first = rewrite_in_two(body, inside, id, n_first)
            return rewritten_in_two(body, decisions[id], n_first)
        new = rewritten(rewrite(body, inside, id), decisions[id])
        return new.eqns, [], new.outvars

    found = _changed(jaxpr, decisions, changed, "")
    if left:
        raise PlanError(
            f"the program has no loop or branch with a body {', '.join(sorted(left))}. It changed since "
            "the plan was made: plan again."
        )
    return found


def bodies_by_id(
    jaxpr: _jax.Jaxpr, ids: Sequence[str], choices: Mapping[str, ScanOption]
) -> dict[str, tuple[_jax.Jaxpr, _jax.Jaxpr]]:
    """Return the bodies of a program that have these ids, as written and with choices for the pairs in them.

    Ids without a body are omitted.
    """
    found: dict[str, tuple[_jax.Jaxpr, _jax.Jaxpr]] = {}

    def seen(body: _jax.Jaxpr, id: str, n_first: int | None) -> None:
        found[id] = body, rewrite(body, _inside(id, choices), id)

    _changed(jaxpr, dict.fromkeys(ids), seen, "")
    of_pairs = {
        key: option
        for key, option in choices.items()
        if any(id.startswith(step_id(key)) for id in ids)
    }
    steps = backward_steps(jaxpr, of_pairs)
    return found | {id: (step, step) for id, (step, _) in steps.items() if id in ids}


def _inside(id: str, choices: Mapping[str, ScanOption]) -> dict[str, ScanOption]:
    """Return those of these choices that are about pairs in a body."""
    return {key: option for key, option in choices.items() if key.startswith(id)}


#: The equations of a body, those of its second half if it has two, and its results.
_Parts: TypeAlias = tuple[Sequence[_jax.JaxprEqn], Sequence[_jax.JaxprEqn], Sequence[Atom]]
#: `change(body, its id, the number of the second half's first equation)`: None for no change.
_Change: TypeAlias = Callable[[_jax.Jaxpr, str, int | None], _Parts | None]


def _changed(
    jaxpr: _jax.Jaxpr, ids: Mapping[str, object], change: _Change, prefix: str
) -> _jax.Jaxpr:
    def inner(body: _jax.Jaxpr, id: str) -> _jax.Jaxpr:
        if id not in ids:
            return _changed(body, ids, change, id) if any(k.startswith(id) for k in ids) else body
        parts = change(body, id, None)
        if parts is None:
            return body
        eqns, _, outvars = parts
        return _jax.rebuild(body, eqns=eqns, outvars=outvars)

    def both(pair: Shards, id: str) -> _Parts | None:
        if id in ids:
            return change(pair.jaxpr, id, pair.n_forward)
        new = _changed(pair.jaxpr, ids, change, id)
        n = pair.n_forward
        return None if new is pair.jaxpr else (new.eqns[:n], new.eqns[n:], new.outvars)

    new: Replacements = {}
    for match in shard_matches(jaxpr):
        id = f"{pair_id(prefix, match)}/"
        if any(k.startswith(id) for k in ids):
            pair = shards_of(jaxpr, match)
            with inside_of(pair.forward):
                parts = both(pair, id)
            if parts is not None:
                new[match.forward], new[match.backward] = emit_in_two(pair, *parts)
    skipped = {*places_without(jaxpr, ids, prefix), *new}
    new |= walk_inside(jaxpr, skipped, inner, prefix)
    return replaced(jaxpr, new) if new else jaxpr


def _found(jaxpr: _jax.Jaxpr, costing: _Costing, least: int, prefix: str, times: int) -> list[Body]:
    found: list[Body] = []
    in_pairs = {i for match in _pairs_of(jaxpr) for i in match}
    for match in shard_matches(jaxpr):
        joined = shards_of(jaxpr, match)
        id = f"{pair_id(prefix, match)}/"
        with inside_of(joined.forward):
            found += _of_body(joined.jaxpr, costing, least, id, times)
    for i, eqn in enumerate(jaxpr.eqns):
        if i in in_pairs:
            continue
        for k, (body, runs) in enumerate(inner_programs(prepared(jaxpr, eqn))):
            inner = _jax.open_jaxpr(body)
            with inside_of(eqn):
                found += _of_body(inner, costing, least, f"{prefix}{i}.{k}/", times * runs)
    return found


def _pairs_of(jaxpr: _jax.Jaxpr) -> list[Match]:
    return [*matches(jaxpr), *branch_matches(jaxpr), *shard_matches(jaxpr)]


def _of_body(jaxpr: _jax.Jaxpr, costing: _Costing, least: int, id: str, times: int) -> list[Body]:
    if not jaxpr.eqns:
        return []
    as_written = BodyLevel(jaxpr, costing)
    peaks = [as_written.peak_bytes(fusing) for fusing in costing.fusing]
    if max(peaks) < least:
        return []
    inside = _found(jaxpr, costing, max(least, int(_LARGE * max(peaks))), id, times)
    if inside:
        return inside
    levels = [as_written]
    pairs = [pair for pair in costing.pairs if pair.id.startswith(id)]
    if pairs:
        levels += _pair_levels(jaxpr, costing, pairs, id, max(peaks))
        smallest = max(levels[-1].peak_bytes(fusing) for fusing in costing.fusing)
        if smallest < (1 - _MOST_BY_PAIRS) * max(peaks):
            return []
    return _body(id, levels, peaks, costing, times)


def _body(
    id: str, levels: Sequence[BodyLevel], peaks: Sequence[int], costing: _Costing, times: int
) -> list[Body]:
    """Return the body with these levels and peaks, or none if no option is smaller than it is as written."""
    options = tuple(
        BodyOptions(levels, peak, fusing, times) for fusing, peak in zip(costing.fusing, peaks)
    )
    return [Body(id, options)] if any(of_one.is_smaller for of_one in options) else []


def _pair_levels(
    jaxpr: _jax.Jaxpr, costing: _Costing, pairs: Sequence[ScanPair], id: str, peak: int
) -> list[BodyLevel]:
    """Return a body with choices for the pairs in it, from those that take least time to the smallest.

    Each saves a share of the body's peak beyond the one before it.
    """
    on_device = {
        pair.id: undominated(o for o in pair.options if not o.host_bytes) for pair in pairs
    }
    as_written = {pair.id: pair.as_written for pair in pairs}
    levels = []
    n_bytes, least = _bytes_of(as_written), int(_LEAST_BY_PAIRS * peak)
    *others, smallest = settings_of(on_device)
    for chosen in (*others, smallest):
        saved = n_bytes - _bytes_of(chosen)
        if saved < least or (
            chosen is not smallest and n_bytes - saved - _bytes_of(smallest) < least
        ):
            continue
        n_bytes -= saved
        choices = tuple(sorted(chosen.items()))
        more = sum(option.seconds - as_written[key].seconds for key, option in choices)
        levels.append(BodyLevel(rewrite(jaxpr, chosen, id), costing, choices, more))
    return levels


def _bytes_of(chosen: Mapping[str, ScanOption]) -> int:
    return sum(option.bytes for option in chosen.values())


def with_partial_sums(program: Program, price: Price, fusing: Fusing) -> Fused:
    """Return the graph of a program in which large partial sums are written."""
    with_all = _graph(program, price, fusing, partial_sums=0)
    if not with_all.partial_sums:
        return with_all
    as_written = without_partial_sums(program, price, fusing)
    peak = no_remat(as_written.graph).peak_bytes
    with_large = _graph(program, price, fusing, partial_sums=int(_SMALL_SUM * peak))
    # If all terms are computed before the first addition, partial sums free nothing.
    return with_large if no_remat(with_large.graph).peak_bytes <= peak else as_written


def without_partial_sums(program: Program, price: Price, fusing: Fusing) -> Fused:
    """Return the graph of a program as it is written."""
    return _graph(program, price, fusing)


def _graph(
    program: Program, price: Price, fusing: Fusing, partial_sums: int | None = None
) -> Fused:
    return fuse(
        program,
        price,
        duplicates=fusing.duplicates,
        into_products=fusing.into_products,
        costly_inside=fusing.costly_inside,
        joins_sums=fusing.separated,
        apart=True,
        partial_sums=partial_sums,
    )


def scheduled(
    jaxpr: _jax.Jaxpr,
    program: Program,
    fused: Fused,
    steps: Sequence[Step],
    fusing: Fusing,
    *,
    ordered: bool = False,
    fences_arguments: bool = False,
) -> Decisions:
    """Return the decisions of a schedule in a model of fusion.

    Args:
      jaxpr, program: the program.
      fused, steps: its graph in this model, and the schedule.
      fusing: the model.
      ordered, fences_arguments: as in `Decisions`.
    """
    if fusing.separated:
        found = decisions_of(
            program, fused, steps, separated=True, fences_arguments=fences_arguments
        )
        if separated_starts(jaxpr, found.stored, found.by_start):
            return found
    return decisions_of(
        program,
        fused,
        steps,
        ordered=ordered,
        recomputes_costly=fusing.costly_inside and not fusing.separated,
        fences_arguments=fences_arguments,
    )


def takes_too_long(fused: Fused, found: Schedule) -> bool:
    """Return whether a schedule recomputes so much that it is not offered.

    A kernel with several results is several nodes, each with the kernel's time, since recomputing one result
    takes as long as recomputing all.
    """
    return bool(found.time - fused.graph.time > MOST_AGAIN * sum(fused.seconds.values()))


def smallest_reasonable(fused: Fused, answers: Answers) -> Schedule:
    """Return the smallest schedule that does not take too long."""
    found = answers.smallest()
    n_bytes = found.peak_bytes
    while takes_too_long(fused, found):
        n_bytes = int(_STEP_UP * n_bytes) + 1
        found = answers.within(n_bytes)
    return found


def program_of_flat(
    jaxpr: _jax.Jaxpr,
    shards: Sequence[int] | None = None,
    execution: Execution = PLAIN,
    *,
    into_products: bool = False,
) -> Program:
    """Return a flat jaxpr as a program with one operation for each equation, in their order."""
    writer = FlatWriter(execution, into_products=into_products)
    writer.enter(jaxpr.invars, shards)
    writer.write(jaxpr, "")
    return writer.program(jaxpr.outvars)
