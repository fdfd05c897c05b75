"""A step's regions at one price of memory: what its loops do, and the problem that is left.

What a loop saves counts once for each step, so it is chosen by price (`bodies`), innermost loop
first; what is left around the loops is one graph with its own budget (`decide`). Each price is a
level; from level to level loops save less and recompute more.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from remat import _jax
from remat.errors import BudgetError
from remat.planner.bodies import Body, LoopOption, Transfer, at_price, loop_options, prices
from remat.planner.decide import Answer, Problem
from remat.planner.decisions import RegionDecision
from remat.planner.emit import save_everything
from remat.planner.plan_file import PlanSegment
from remat.planner.regions import LoopForm, Record, Recording, loop_depth
from remat.planner.step import Step, Traced
from remat.planner.trace import (
    program_of_record,
    program_of_step,
    shards_in_bodies,
)
from remat.program.costs import Costs, slowdowns
from remat.program.from_jaxpr import n_bytes
from remat.program.program import Program, without_dead

_MOST_LEVELS = 32
_MOST_BETWEEN = 12
# Steps of a loop mix two options where one keeps less than this share of what the other does.
_FAR = 0.75

Decisions = dict[str, dict[str, RegionDecision]]


@dataclasses.dataclass(frozen=True)
class Choice:
    """Decisions about all regions of a step, and what the model says they take.

    Args:
      decisions: by region and fingerprint.
      loops: those that run in another way than they are written.
      model_bytes: of temporaries.
      extra_seconds: of recomputation.
      lower_bound_seconds: no decisions within the same model budget recompute less, loops as here.
      records: what the decisions are about.
      recomputes_around_loops: whether anything is recomputed besides steps of loops.
      transfer_seconds: the part of `extra_seconds` that transfers to the host and back take.
      host_bytes: what loops keep in the host's memory, according to the model.
    """

    decisions: Decisions
    loops: dict[str, LoopForm]
    model_bytes: int
    extra_seconds: float
    lower_bound_seconds: float
    records: Mapping[tuple[str, str], Record] = dataclasses.field(default_factory=dict)
    recomputes_around_loops: bool = False
    transfer_seconds: float = 0.0
    host_bytes: int = 0


class Level:
    """The step with its loops decided."""

    def __init__(
        self,
        traced: Traced,
        recording: Recording,
        making: _Making,
        costs: Costs,
    ) -> None:
        self.traced = traced
        self.recording = recording
        self.making = making
        self.records = {**making.records, **recording.records}
        self.loops = dict(recording.loops)
        self.decided: Decisions = {k: dict(v) for k, v in recording.decided.items()}
        for (key, mark), record in recording.not_transposed.items():
            self.records[key, mark] = record
            self.decided.setdefault(key, {})[mark] = save_everything(record.region)
        self._costs = costs
        self._price = costs.seconds
        self.program = without_dead(
            program_of_step(traced.jaxpr, recording.records, traced.shards(), slowdowns(costs))
        )
        places = {op.place.region for op in self.program.ops if op.place is not None}
        self.regions = [r for r in recording.records if r in places and not loop_depth(r[0])]
        self.loose = [r for r in recording.records if r not in places and not loop_depth(r[0])]

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def problem(self, lending: bool) -> Problem:
        return Problem(self.program, self._price, self.regions, lending=lending)

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def loose_problem(self, region: tuple[str, str], lending: bool) -> Problem:
        record = self.recording.records[region]
        program = without_dead(program_of_record(record, None, slowdowns(self._costs)))
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
                mark = self.recording.records[key, fingerprint].mark
                decisions.setdefault(key, {})[fingerprint] = dataclasses.replace(d, backward=mark)
        peak = answers[0].peak_bytes if self.regions else problem.peak_bytes
        if not self.regions and not self.loose and peak > budget:
            raise BudgetError(f"the loops alone need {peak} bytes.")
        return Choice(
            decisions,
            self.loops,
            peak,
            self.making.seconds + sum(a.extra_seconds for a in answers),
            self.making.seconds + sum(a.lower_bound_seconds for a in answers),
            self.records,
            any(a.extra_seconds > 0 for a in answers),
            self.making.transfer_seconds,
            self.making.host_bytes,
        )

    def smallest(self, lending: bool = False) -> Choice:
        """The decisions of the smallest peak that is found, whatever they recompute.

        Raises:
          BudgetError: none is smaller than without recomputation.
        """
        return self.solve(lending, self.problem(lending).smallest_bytes())


@dataclasses.dataclass(frozen=True)
class _Rung:
    """A level's place: loops went from what is best at `price` so many moves to that at `next_price`.

    They move one after the other, so that a budget can be met between loops that are alike.
    """

    price: float
    next_price: float
    moves: int


class Levels:
    """All levels of a step, made when they are asked for.

    With `transfer`, the price of a copy to the host or back, loops may keep values there.
    """

    def __init__(self, step: Step, costs: Costs, transfer: Transfer | None = None) -> None:
        self.step = step
        self._costs = costs
        self._bodies: dict[tuple[str, str], Body] = {}
        self._transfer = transfer
        self._options: dict[tuple[str, str], list[LoopOption]] = {}
        self._made: dict[int, Level] = {}
        self._body_shards: Mapping[Any, int] | None = None
        self.recording = Recording()
        self.traced_plainly = step.trace(self.recording)
        self._loops = [r for r in self.recording.records.values() if loop_depth(r.key)]
        self._rungs = self._all_rungs()

    @property
    def has_regions(self) -> bool:
        return bool(self.recording.records)

    def __len__(self) -> int:
        return len(self._rungs)

    def level(self, i: int) -> Level:
        """The level at a rung: the further up, the less loops save, and the more they recompute."""
        if i not in self._made:
            self._made[i] = self._make(self._rungs[i])
        return self._made[i]

    def _all_rungs(self) -> list[_Rung]:
        """Prices at which loops change what they do, thinned out evenly, and what lies between."""
        found: set[float] = {0.0}
        for record in self._loops:
            found.update(prices(self._options_of(record)))
        ordered = sorted(found)
        if len(ordered) > _MOST_LEVELS:
            last = len(ordered) - 1
            places = {round(k * last / (_MOST_LEVELS - 1)) for k in range(_MOST_LEVELS)}
            ordered = [ordered[k] for k in sorted(places)]
        rungs = []
        for low, high in itertools.pairwise(ordered):
            n = sum(len(self._path(record, low, high)) - 1 for record in self._loops)
            stride = max(1, -(-n // _MOST_BETWEEN))
            rungs += [_Rung(low, high, k) for k in range(0, max(n, 1), stride)]
        return [*rungs, _Rung(ordered[-1], ordered[-1], 0)]

    def _moves_before(self, key: str, rung: _Rung) -> int:
        """How many moves the loops before this one can make."""
        n = 0
        for record in self._loops:
            if record.key == key:
                break
            n += len(self._path(record, rung.price, rung.next_price)) - 1
        return n

    def _length(self, key: str) -> int:
        return int(self.recording.scans[key].params["length"])

    def _options_of(self, record: Record) -> list[LoopOption]:
        if record.region_id not in self._options:
            self._options[record.region_id] = loop_options(
                self._body_of(record), self._costs.seconds, self._transfer
            )
        return self._options[record.region_id]

    def _body_of(self, record: Record) -> Body:
        if record.region_id not in self._bodies:
            eqn = self.recording.scans[record.key]
            shards = self._shards_in_bodies()
            program = without_dead(program_of_record(record, shards, slowdowns(self._costs)))
            carry = _carry(record, eqn)
            self._bodies[record.region_id] = Body(
                program,
                record.region_id,
                eqn.params["length"],
                tuple(carry),
                movable=_movable(record, program, carry),
            )
        return self._bodies[record.region_id]

    def _path(self, record: Record, price: float, next_price: float) -> list[_Form]:
        """The ways from what is best at one price to what is best at the next, in small steps.

        Where two options are far apart, steps of the loop mix them. An iteration then holds inputs
        and gradients of several steps, so it is not done for less.
        """
        options = self._options_of(record)
        steps = _steps_at_once(self._length(record.key))
        first = options.index(at_price(options, price))
        last = options.index(at_price(options, next_price))
        path = [_Form(options[first], options[first])]
        needed = 2 * steps * self._input_bytes(record)
        for a, b in itertools.pairwise(options[first : last - 1 if last else None : -1]):
            is_far = b.bytes < _FAR * a.bytes and (a.bytes - b.bytes) / steps > needed
            if is_far and a.group == b.group == 1:
                path += [_Form(a, b, n) for n in range(1, steps)]
            path.append(_Form(b, b))
        return path

    def _input_bytes(self, record: Record) -> int:
        """Of what one step of a loop is given besides its carry; compilers gather what is divided."""
        carry = _carry(record, self.recording.scans[record.key])
        return sum(n_bytes(v.aval) for v in record.region.forward.invars[carry.stop :])

    def _shards_in_bodies(self) -> Mapping[Any, int]:
        """How values of loops' bodies are divided over devices, as far as the step around them says."""
        if self._body_shards is None:
            self._body_shards = shards_in_bodies(
                self.traced_plainly.jaxpr, self.recording.records, self.traced_plainly.shards()
            )
        return self._body_shards

    def _make(self, rung: _Rung) -> Level:
        if not self._loops or (rung.price == 0.0 and not rung.moves):
            return Level(self.traced_plainly, self.recording, _Making(), self._costs)
        making = _Making()
        recording, traced = self.recording, self.traced_plainly
        for depth in sorted({loop_depth(record.key) for record in self._loops}, reverse=True):
            for record in list(recording.records.values()):
                # A step of several is decided with its loop.
                if loop_depth(record.key) == depth and record.key in self.recording.scans:
                    self._decide(record, rung, making)
            recording = Recording(making.decided, making.forms)
            traced = self.step.trace(recording)
        return Level(traced, recording, making, self._costs)

    def _decide(self, record: Record, rung: _Rung, making: _Making) -> None:
        """What one loop does."""
        steps = _steps_at_once(self._length(record.key))
        path = self._path(record, rung.price, rung.next_price)
        form = path[min(max(0, rung.moves - self._moves_before(record.key, rung)), len(path) - 1)]
        share = form.n_second / steps
        making.count(form.first, 1 - share)
        making.count(form.second, share)
        if not form.n_second:
            making.add(record.key, record, form.first)
            if form.first.group > 1:
                making.forms[record.key] = LoopForm(form.first.group, groups=form.first.groups)
            return
        making.forms[record.key] = LoopForm(steps=steps)
        for j in range(steps):
            option = form.second if j < form.n_second else form.first
            making.add(f"{record.key}.{j}", record, option, _ONE_SEGMENT)


@dataclasses.dataclass(frozen=True)
class _Form:
    """How a loop runs: by one option, or of several steps in an iteration `n_second` by another."""

    first: LoopOption
    second: LoopOption
    n_second: int = 0


# Steps of one iteration must not all recompute at once.
_ONE_SEGMENT = (PlanSegment(0, ()),)


@dataclasses.dataclass
class _Making:
    """Decisions about loops, while they are made."""

    decided: Decisions = dataclasses.field(default_factory=dict)
    forms: dict[str, LoopForm] = dataclasses.field(default_factory=dict)
    records: dict[tuple[str, str], Record] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    transfer_seconds: float = 0.0
    host_bytes: int = 0

    def add(
        self,
        key: str,
        record: Record,
        option: LoopOption,
        segments: tuple[PlanSegment, ...] = (),
    ) -> None:
        decision = RegionDecision(
            option.saved,
            segments,
            record.mark,
            offloaded=option.offloaded,
            offloaded_inputs=option.offloaded_carry,
        )
        self.decided.setdefault(key, {})[record.region.fingerprint] = decision
        self.records[key, record.region.fingerprint] = record

    def count(self, option: LoopOption, share: float) -> None:
        """Add what a share of a loop's steps takes."""
        self.seconds += share * option.seconds
        self.transfer_seconds += share * option.transfer_seconds
        self.host_bytes += round(share * option.host_bytes)


def _steps_at_once(length: int) -> int:
    """How many steps an iteration can have if the loop is to mix options."""
    return next((n for n in (4, 3, 2) if length % n == 0 and length > n), 1)


def _movable(record: Record, program: Program, carry: Sequence[int]) -> frozenset[int]:
    """The values of a body's program that the host's memory could hold."""
    values, inputs = record.region.numbering.vars, record.region.forward.invars
    found = {v for v in carry if _jax.can_be_on_host(inputs[v].aval)}
    for op in program.ops:
        if op.place is None or op.place.is_backward:
            continue
        for k, v in enumerate(op.results):
            if _jax.can_be_on_host(values[op.place.number + k].aval):
                found.add(v)
    return frozenset(found)


def _carry(record: Record, eqn: Any) -> range:
    """The values of a body's program that are its carry, which it has from the step before.

    The program's first values are the body's inputs: what its derivative closes over, then the
    inputs of the loop's own body, the carry among them before what differs from step to step.
    """
    n_inputs = len(record.region.forward.invars)
    n_consts, n_carry = _jax.scan_arity(eqn)
    first = n_inputs - len(eqn.invars) + n_consts
    return range(first, first + n_carry)
