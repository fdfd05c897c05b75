"""A step's regions at one price of memory: what its loops do, and the problem that is left.

What a loop saves counts once for each step, so it is chosen by price (`bodies`), innermost loop
first; what is left around the loops is one graph with its own budget (`decide`). Each price is a
level; from level to level loops save less and recompute more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from remat import _jax
from remat.errors import BudgetError
from remat.planner.bodies import Body, LoopOption, at_price, loop_options, prices
from remat.planner.decide import Answer, Problem
from remat.planner.emit import RegionDecision, Segment
from remat.planner.fusion import Price
from remat.planner.program import without_dead
from remat.planner.regions import Record, Recording
from remat.planner.step import Step, Traced
from remat.planner.trace import program_of_record, program_of_step

_MOST_LEVELS = 12

Decisions = dict[str, dict[str, RegionDecision]]


@dataclasses.dataclass(frozen=True)
class Choice:
    """Decisions about all regions of a step, and what the model says they take.

    Args:
      decisions: by region and fingerprint.
      groups: loops that run in groups of steps.
      model_bytes: of temporaries.
      extra_seconds: of recomputation.
      lower_bound_seconds: no decisions within the same model budget recompute less, loops as here.
      records: what the decisions are about.
    """

    decisions: Decisions
    groups: dict[str, int]
    model_bytes: int
    extra_seconds: float
    lower_bound_seconds: float
    records: Mapping[tuple[str, str], Record] = dataclasses.field(default_factory=dict)


class Level:
    """The step with its loops decided."""

    def __init__(
        self,
        traced: Traced,
        recording: Recording,
        loops: Mapping[tuple[str, str], tuple[Record, LoopOption]],
        groups: Mapping[str, int],
        price: Price,
    ) -> None:
        self.traced = traced
        self.recording = recording
        self.records = {region: record for region, (record, _) in loops.items()}
        self.records.update(recording.records)
        self.groups = dict(groups)
        self.decided: Decisions = {k: dict(v) for k, v in recording.decided.items()}
        self.loop_seconds = sum(option.seconds for _, option in loops.values())
        self._price = price
        self.program = without_dead(
            program_of_step(traced.jaxpr, recording.records, traced.shards())
        )
        places = {op.place.region for op in self.program.ops if op.place is not None}
        self.regions = [r for r in recording.records if r in places and not _is_loop(r[0])]
        self.loose = [r for r in recording.records if r not in places and not _is_loop(r[0])]

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def problem(self, lending: bool) -> Problem:
        return Problem(self.program, self._price, self.regions, lending=lending)

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def loose_problem(self, region: tuple[str, str], lending: bool) -> Problem:
        program = without_dead(program_of_record(self.recording.records[region]))
        return Problem(program, self._price, [region], lending=lending)

    def peak_bytes(self, lending: bool) -> int:
        """Temporaries if nothing but the loops recomputes."""
        return self.problem(lending).peak_bytes

    def solve(self, lending: bool, budget: int) -> Choice:
        """Decisions within a budget for temporaries.

        Raises:
          BudgetError: the schedules that were found need more.
        """
        problem = self.problem(lending)
        answers: list[Answer] = [problem.solve(budget)] if self.regions else []
        share = budget / max(1, problem.peak_bytes)
        for region in self.loose:
            inner = self.loose_problem(region, lending)
            answers.append(inner.solve(int(inner.peak_bytes * min(1.0, share))))
        decisions: Decisions = {k: dict(v) for k, v in self.decided.items()}
        for answer in answers:
            for (key, fingerprint), d in answer.regions.items():
                decisions.setdefault(key, {})[fingerprint] = RegionDecision(
                    d.saved,
                    tuple(Segment(*segment) for segment in d.segments),
                    self.recording.records[key, fingerprint].mark,
                )
        peak = answers[0].peak_bytes if self.regions else problem.peak_bytes
        if not self.regions and not self.loose and peak > budget:
            raise BudgetError(f"the loops alone need {peak} bytes.")
        return Choice(
            decisions,
            self.groups,
            peak,
            self.loop_seconds + sum(a.extra_seconds for a in answers),
            self.loop_seconds + sum(a.lower_bound_seconds for a in answers),
            self.records,
        )


class Levels:
    """All levels of a step, made when they are asked for."""

    def __init__(self, step: Step, price: Price) -> None:
        self.step = step
        self._price = price
        self._options: dict[tuple[str, str], list[LoopOption]] = {}
        first = Recording()
        self.traced_plainly = step.trace(first)
        self.recording = first
        self.prices = self._prices()
        self._made: dict[int, Level] = {}

    @property
    def has_regions(self) -> bool:
        return bool(self.recording.records)

    def __len__(self) -> int:
        return len(self.prices)

    def level(self, i: int) -> Level:
        if i not in self._made:
            self._made[i] = self._make(self.prices[i])
        return self._made[i]

    def _prices(self) -> list[float]:
        """Prices at which some loop changes what it does, ascending, thinned out evenly."""
        found: set[float] = {0.0}
        for record in self.recording.records.values():
            if _is_loop(record.key):
                found.update(prices(self._options_of(record)))
        ordered = sorted(found)
        if len(ordered) <= _MOST_LEVELS:
            return ordered
        last = len(ordered) - 1
        places = {round(k * last / (_MOST_LEVELS - 1)) for k in range(_MOST_LEVELS)}
        return [ordered[k] for k in sorted(places)]

    def _options_of(self, record: Record) -> list[LoopOption]:
        if record.region_id not in self._options:
            self._options[record.region_id] = loop_options(self._body(record), self._price)
        return self._options[record.region_id]

    def _body(self, record: Record) -> Body:
        eqn = self.recording.scans[record.key]
        program = without_dead(program_of_record(record))
        return Body(program, record.region_id, eqn.params["length"], _carry(record, eqn))

    def _make(self, price: float) -> Level:
        if price == 0.0 or not any(_is_loop(key) for key, _ in self.recording.records):
            return Level(self.traced_plainly, self.recording, {}, {}, self._price)
        decided: Decisions = {}
        groups: dict[str, int] = {}
        chosen: dict[tuple[str, str], tuple[Record, LoopOption]] = {}
        recording, traced = self.recording, self.traced_plainly
        depths = sorted({key.count("/scan") for key, _ in recording.records}, reverse=True)
        for depth in depths:
            if depth == 0:
                continue
            for record in recording.records.values():
                if record.key.count("/scan") != depth or not _is_loop(record.key):
                    continue
                self.recording.scans.update(recording.scans)
                option = at_price(self._options_of(record), price)
                chosen[record.region_id] = record, option
                decided.setdefault(record.key, {})[record.region.fingerprint] = RegionDecision(
                    option.saved, (), record.mark
                )
                if option.group > 1:
                    groups[record.key] = option.group
            recording = Recording(decided, groups)
            traced = self.step.trace(recording)
        return Level(traced, recording, chosen, groups, self._price)


def _is_loop(key: str) -> bool:
    return "/scan" in key


def _carry(record: Record, eqn: Any) -> tuple[int, ...]:
    """The values of a body's program that are its carry, which it has from the step before.

    The program's first values are the body's inputs: what its derivative closes over, then the
    inputs of the loop's own body.
    """
    n_inputs = len(record.region.forward.invars)
    n_consts, n_carry = _jax.scan_arity(eqn)
    first = n_inputs - len(eqn.invars) + n_consts
    return tuple(range(first, first + n_carry))
