"""Bodies of loops, branches and `shard_map`s that are scheduled by themselves.

Some loops are not half of a pair of scans: gradient accumulation runs a whole forward and backward pass in
each step, and an optimizer's line search evaluates a gradient in a `while_loop`. The peak of such a body is
the loop's workspace. So its jaxpr is scheduled like a step's, and written back by `rewrite`.

The body of a `shard_map` is scheduled, too, with the bytes of one device. If a `shard_map` was
differentiated, its forward and its backward half are scheduled as one program, and written back as two.

A body is scheduled if it contains no pair of scans and no other body of nearly its own size, since
separate decisions are made about these.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from remat import _jax
from remat.aliases import Atom
from remat.errors import BudgetError, PlanError
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
from remat.planner.scan_pairs.rewriting import pair_id
from remat.planner.scan_pairs.shards import Shards, emit_in_two, shard_matches, shards_of
from remat.program.from_jaxpr import PLAIN, Execution, FlatWriter
from remat.program.fusion import Fused, Price, fuse
from remat.program.program import Program
from remat.solvers.simulate import no_remat
from remat.solvers.solver import Answers, Schedule, Solver

# Ratio of the budgets that bodies are scheduled for. A larger one leaves less of the memory unused, and lets
# fewer proposals share their schedules.
_RATIO = 0.97
# Shares of the peak of the program around a body. A body that needs less than the first is not scheduled.
# If it needs more than the second, the body around it is not scheduled.
_SMALL, _LARGE = 0.1, 0.5
# Share of a program's peak. Partial sums are written only if their terms take more: larger writes fewer.
_SMALL_SUM = 0.05
# Ratio of the time of recomputation to the program's time without it. Schedules near the lower bound of
# memory may compute values hundreds of times; those above this ratio are not offered.
MOST_AGAIN = 2
# Ratio of budgets: if a schedule takes too long, one within a budget larger by this ratio is tried.
_STEP_UP = 1.1


class Fusing(NamedTuple):
    """A model of fusion: arguments of `fusion.fuse`."""

    duplicates: bool = False
    into_products: bool = False
    costly_inside: bool = False


@dataclasses.dataclass(frozen=True)
class BodyOption:
    """One way to run a body.

    Args:
      bytes: the body's peak.
      seconds: time of recomputation, all runs together.
      decisions: about the body's equations.
    """

    bytes: int
    seconds: float
    decisions: Decisions


class BodyOptions:
    """The options of a body in one model of fusion. Each is scheduled when it is first asked for.

    Args:
      program: the body.
      n_bytes: what the body needs at its peak as it is written.
      fused: its graph.
      answers: the schedules of that graph.
      times: runs of the body.
      recomputes_costly: as in `rewrite.decisions_of`.
    """

    def __init__(
        self,
        program: Program,
        n_bytes: int,
        fused: Fused,
        answers: Answers,
        times: int,
        recomputes_costly: bool = False,
    ) -> None:
        self.program = program
        self.fused = fused
        self.answers = answers
        self.times = times
        self.recomputes_costly = recomputes_costly
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
        try:
            schedule = self.answers.within(budget)
        except BudgetError:
            return self.smallest
        return self.smallest if takes_too_long(self.fused, schedule) else self._option(schedule)

    @functools.cached_property
    def smallest(self) -> BodyOption:
        """Return the option of the fewest bytes that does not take too long."""
        found = self._option(smallest_reasonable(self.fused, self.answers))
        return min(found, self.as_written, key=lambda option: option.bytes)

    @property
    def is_smaller(self) -> bool:
        """Return whether there is an option that needs less than the body as it is written."""
        return self.within(self.as_written.bytes - 1).bytes < self.as_written.bytes

    def _option(self, found: Schedule) -> BodyOption:
        seconds = self.times * float(found.time - self.fused.graph.time)
        decisions = decisions_of(
            self.program, self.fused, found.steps, recomputes_costly=self.recomputes_costly
        )
        return BodyOption(int(found.peak_bytes), seconds, decisions)


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
) -> tuple[Body, ...]:
    """Return the bodies in a program that can be scheduled, with their options.

    Args:
      jaxpr: the program, with plain calls inlined.
      price: the time of a kernel.
      solver: finds the schedules.
      n_bytes: the program's peak; bodies that need much less are left out.
      execution: how equations run on a device.
      fusing: the models of fusion.
    """
    costing = _Costing(price, execution, tuple(fusing), solver)
    return tuple(_found(jaxpr, costing, int(_SMALL * n_bytes), "", 1))


@dataclasses.dataclass(frozen=True)
class _Costing:
    """The parameters that price and schedule bodies; see `bodies`."""

    price: Price
    execution: Execution
    fusing: tuple[Fusing, ...]
    solver: Solver


def with_bodies(jaxpr: _jax.Jaxpr, decisions: Mapping[str, Decisions]) -> _jax.Jaxpr:
    """Return a program with some bodies scheduled.

    Args:
      jaxpr: the program that `bodies` was called on.
      decisions: by the ids of bodies.

    Raises:
      PlanError: the program has no such body.
    """
    left = set(decisions)

    def changed(body: _jax.Jaxpr, id: str, n_first: int | None) -> _Parts:
        left.discard(id)
        if n_first is not None:
            return rewritten_in_two(body, decisions[id], n_first)
        new = rewritten(body, decisions[id])
        return new.eqns, [], new.outvars

    found = _changed(jaxpr, decisions, changed, "")
    if left:
        raise PlanError(
            f"the program has no loop or branch with a body {', '.join(sorted(left))}. It changed since "
            "the plan was made: plan again."
        )
    return found


def bodies_by_id(jaxpr: _jax.Jaxpr, ids: Sequence[str]) -> dict[str, _jax.Jaxpr]:
    """Return the bodies of a program that have these ids; others are left out."""
    found: dict[str, _jax.Jaxpr] = {}

    def seen(body: _jax.Jaxpr, id: str, n_first: int | None) -> None:
        found[id] = body

    _changed(jaxpr, dict.fromkeys(ids), seen, "")
    return found


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


def _found(
    jaxpr: _jax.Jaxpr, costing: _Costing, least: int, prefix: str, times: int
) -> Iterator[Body]:
    in_pairs = {i for match in _pairs_of(jaxpr) for i in match}
    for match in shard_matches(jaxpr):
        joined = shards_of(jaxpr, match)
        id = f"{pair_id(prefix, match)}/"
        yield from _of_body(joined.jaxpr, costing, least, id, times)
    for i, eqn in enumerate(jaxpr.eqns):
        if i in in_pairs:
            continue
        for k, (body, runs) in enumerate(inner_programs(prepared(jaxpr, eqn))):
            inner = _jax.open_jaxpr(body)
            yield from _of_body(inner, costing, least, f"{prefix}{i}.{k}/", times * runs)


def _pairs_of(jaxpr: _jax.Jaxpr) -> list[Match]:
    return [*matches(jaxpr), *branch_matches(jaxpr), *shard_matches(jaxpr)]


def _of_body(
    jaxpr: _jax.Jaxpr, costing: _Costing, least: int, id: str, times: int
) -> Iterator[Body]:
    if not jaxpr.eqns:
        return
    into_products = any(f.into_products for f in costing.fusing)
    program = program_of_flat(jaxpr, execution=costing.execution, into_products=into_products)
    graphs = (
        without_partial_sums(program, costing.price, fusing._replace(costly_inside=False)).graph
        for fusing in costing.fusing
    )
    peaks = [int(no_remat(graph).peak_bytes) for graph in graphs]
    if max(peaks) < least:
        return
    inside = list(_found(jaxpr, costing, max(least, int(_LARGE * max(peaks))), id, times))
    if inside or _pairs_of(jaxpr):
        yield from inside
        return
    options = []
    for fusing, peak in zip(costing.fusing, peaks):
        fused = with_partial_sums(program, costing.price, fusing)
        answers = costing.solver.answers(fused.graph, fused.once)
        options.append(BodyOptions(program, peak, fused, answers, times, fusing.costly_inside))
    if any(of_one.is_smaller for of_one in options):
        yield Body(id, tuple(options))


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
        apart=True,
        partial_sums=partial_sums,
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
