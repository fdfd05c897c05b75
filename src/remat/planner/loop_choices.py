"""The loops of a step: a sequence of decisions, from those that keep most to those that keep least.

From the program as it is written, or with the checkpoints in its loops opened, a sequence of *levels* leads
to loops that keep as little as they can: from level to level one of them takes the next of its options
(`scan_pairs`), in the order of their prices per byte. Bodies of loops and branches that are scheduled by
themselves (`bodies`) are decided separately.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from remat.ir.equations import programs_of
from remat.ir.flops import flops_of_program
from remat.planner import scan_pairs
from remat.planner.bodies import Body, bodies, step_bodies
from remat.planner.decisions import LoopDecisions, with_loops
from remat.planner.priced_step import PricedStep, fusing
from remat.planner.tradeoffs import settings_of, undominated
from remat.program.fusion import fuse
from remat.program.program import Program
from remat.solvers.graph import Graph
from remat.solvers.liveness import Arrays, liveness
from remat.solvers.simulate import no_remat
from remat.units import counted

# Number of levels of the loops; more make the steps between them smaller and the search longer.
_MAX_LEVELS = 256
#: Share of the step's time. Of choices that take as long up to this share, only the one that keeps least is
#: offered. A larger share loses plans that recompute less by that much, and prices fewer programs.
AS_LONG = 0.0005


@dataclasses.dataclass(frozen=True)
class LoopChoices:
    """The choices about a step's loops.

    Args:
      levels: the decisions about pairs of loops and the seconds of recomputation in them, the level that
        keeps most first.
      by_hand: the same of levels at which all pairs recompute their steps one by one: all of them,
        without matrix products that have no batch dimensions, without any, and in groups of steps; empty
        without pairs.
      bodies: those that are scheduled by themselves.
      around: for each body the bytes that are live while its loop runs in the program as it is written.
      times: how often each pair runs, by id.
      between: for each level, further ones between the level before and it.
    """

    levels: tuple[tuple[LoopDecisions, float], ...]
    by_hand: tuple[tuple[LoopDecisions, float], ...]
    bodies: tuple[Body, ...]
    around: tuple[int, ...]
    times: Mapping[str, int] = dataclasses.field(default_factory=dict)
    between: tuple[tuple[tuple[LoopDecisions, float], ...], ...] = ((),)

    def __repr__(self) -> str:
        bodies = counted(len(self.bodies), "body", "bodies")
        return f"LoopChoices({counted(len(self.levels), 'level')}, {bodies})"


def loop_choices(step: PricedStep) -> LoopChoices:
    """Return the choices about a step's loops.

    The program as it is written is one of the levels. It is the first, unless checkpoints are opened in the
    others: then its time of recomputation decides its place, before the first level that takes as long.
    """
    flat, source, price, opened = step.flat, step.source, step.price, step.is_opened
    if not opened and not any(map(programs_of, source.eqns)):  # no loops and branches
        return LoopChoices(((LoopDecisions(), 0.0),), (), (), ())
    found = scan_pairs.pairs(
        source,
        price,
        shards=step.shards,
        execution=step.execution,
        transfer=step.transfer,
        seconds_per_flop=step.seconds_per_flop,
    )
    program = step.program_of(source)
    graph = fuse(program, price, apart=True).graph
    peak = no_remat(graph).peak_bytes
    models = [fusing(variant) for variant in step.fusions]
    inside = bodies(source, price, step.solver, peak, step.execution, models, found)
    # The options of a body that is scheduled choose for the pairs in it.
    apart = [pair for pair in found if not any(pair.id.startswith(body.id) for body in inside)]
    options_of = _within_host_memory(apart, step.host_limit)
    around = _around(program, graph, inside) if inside else ()
    as_written = sum(pair.as_written.seconds for pair in apart)
    if opened:
        # An option's seconds are those of all recomputation, that of the user's own checkpoints included.
        extra_flops = flops_of_program(flat) - flops_of_program(source)
        as_written += price(max(0.0, extra_flops), 0, "float32") - price(0.0, 0, "float32")
    more = step.seconds_of_conversions
    settings = list(settings_of(options_of))
    plain = {pair.id: pair.as_written for pair in apart}
    stride = max(1, -(-(len(settings) - 1) // _MAX_LEVELS))
    levels: list[tuple[LoopDecisions, float]] = []
    between: list[tuple[tuple[LoopDecisions, float], ...]] = []
    closer = {pair.id: pair.between for pair in apart}

    def level_of(chosen: Mapping[str, scan_pairs.ScanOption]) -> tuple[LoopDecisions, float]:
        seconds = more + sum(option.seconds for option in chosen.values())
        return LoopDecisions(opened, tuple(sorted(chosen.items()))), seconds

    offered = [n for n in range(len(settings)) if n % stride == 0 or n == len(settings) - 1]
    every = [level_of(settings[n]) for n in offered]
    for k in _of_different_times([s for _, s in every], AS_LONG * step.computing_seconds):
        n, chosen = offered[k], settings[offered[k]]
        if opened or chosen != plain:
            levels.append(every[k])
            before = _between(settings[n - 1], chosen, closer) if n else ()
            between.append(tuple(level_of(other) for other in before))
    at = bisect.bisect_left([s for _, s in levels], as_written) if opened else 0
    levels.insert(at, (LoopDecisions(), as_written))
    between.insert(at, ())
    ids = [pair.id for pair in found]
    by_hand = (dict(zip(ids, of)) for of in zip(*(pair.by_hand for pair in found), strict=True))
    times = {pair.id: pair.times for pair in found}
    return LoopChoices(
        tuple(levels),
        tuple(dict.fromkeys(map(level_of, by_hand))),
        inside,
        tuple(around),
        times,
        tuple(between),
    )


def _of_different_times(seconds: Sequence[float], least: float) -> list[int]:
    """Return the places of times that are at least so far from the next one; the ends are among them.

    >>> _of_different_times([0.0, 0.6, 0.9, 1.0, 3.0, 3.1], 0.5)
    [0, 3, 5]

    Args:
      seconds: times that never fall.
      least: the difference.
    """
    found = [len(seconds) - 1]
    for k in range(len(seconds) - 2, 0, -1):
        if seconds[k] <= seconds[found[-1]] - least:
            found.append(k)
    return sorted({0, *found})


def _between(
    before: Mapping[str, scan_pairs.ScanOption],
    after: Mapping[str, scan_pairs.ScanOption],
    closer: Mapping[str, Sequence[scan_pairs.ScanOption]],
) -> Iterator[dict[str, scan_pairs.ScanOption]]:
    """Yield the choices between two that differ in one pair, those that keep most first.

    Args:
      before, after: the choices, by the pairs' ids.
      closer: further options of each pair.
    """
    for id in after:
        many, few = before[id], after[id]
        options = [
            option
            for option in closer[id]
            if few.bytes < option.bytes < many.bytes and many.seconds < option.seconds < few.seconds
        ]
        for option in sorted(options, key=lambda o: -o.bytes):
            yield {**after, id: option}


@dataclasses.dataclass(frozen=True)
class ScheduledSteps:
    """The backward steps of pairs that recompute their steps one by one, which are scheduled by themselves.

    Args:
      loops: the decisions about pairs of which these are the steps.
      seconds: of recomputation in the pairs.
      bodies: the steps.
    """

    loops: LoopDecisions
    seconds: float
    bodies: tuple[Body, ...]


def scheduled_steps(step: PricedStep, choices: LoopChoices) -> ScheduledSteps:
    """Return the steps to schedule where all pairs keep least, and the step of one of them needs much."""
    least, _ = choices.levels[-1]
    by_step = choices.by_hand[0][0] if choices.by_hand else None
    if by_step is None or least.opened != by_step.opened:
        return ScheduledSteps(least, 0.0, ())
    of_step = dict(by_step.choices)
    chosen = {key: option if option.group == 1 else of_step[key] for key, option in least.choices}
    loops = dataclasses.replace(least, choices=tuple(chosen.items()))
    seconds = step.seconds_of_conversions + sum(option.seconds for option in chosen.values())
    source = step.source_of(loops.opened)
    program = step.program_of(with_loops(source, loops))
    peak = int(no_remat(fuse(program, step.price, apart=True).graph).peak_bytes)
    found = step_bodies(
        source,
        chosen,
        step.price,
        step.solver,
        peak,
        step.execution,
        [fusing(variant) for variant in step.fusions],
        times=choices.times,
    )
    return ScheduledSteps(loops, seconds, found)


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
