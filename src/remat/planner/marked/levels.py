"""Levels: a step with its loops decided at one price per byte, and the graph around the loops.

The price is a Lagrange multiplier: each loop takes the option with the least seconds + price x bytes
(`loop_options`), innermost loops first, since what a loop's step saves exists once for each step. The code
around the loops is one graph, which is scheduled within the budget (`around_loops`). From level to level the
price rises, so loops save less and recompute more.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from remat import _jax
from remat.errors import BudgetError
from remat.planner.decisions import StepDecisions
from remat.planner.host_memory import Transfer
from remat.planner.marked.around_loops import Answer, Problem
from remat.planner.marked.decisions import RegionDecision
from remat.planner.marked.emit import save_everything
from remat.planner.marked.loop_options import Body, LoopOption, loop_options
from remat.planner.marked.regions import LoopForm, Record, Recording, loop_depth
from remat.planner.marked.trace import (
    program_of_record,
    program_of_step,
    shards_in_bodies,
)
from remat.planner.plan_file import PlanSegment
from remat.planner.step import Step, Traced
from remat.planner.tradeoffs import at_price, prices
from remat.program.costs import Costs, slowdowns
from remat.program.from_jaxpr import n_bytes
from remat.program.program import Program, without_dead

_MAX_LEVELS = 32  # prices; more make the levels finer and the search longer
_MAX_BETWEEN = 12  # levels between two prices; more make the levels finer
# A ratio of bytes. Steps of a loop mix two neighbouring options if one saves less than this share of
# what the other saves; with a larger share, more options are mixed.
_MIX_RATIO = 0.75

Decisions = dict[str, dict[str, RegionDecision]]


@dataclasses.dataclass(frozen=True)
class Choice:
    """Decisions about all regions of a step, and their costs according to the model.

    Args:
      decisions: by region and fingerprint.
      loops: the loops that run in groups or unrolled.
      model_bytes: temporaries in the model.
      extra_seconds: time of recomputation and of transfers.
      lower_bound_seconds: the least time that is possible within the same model budget if the loops
        run as here.
      records: the regions that the decisions are about.
      recomputes_around_loops: whether code outside of the loops is recomputed, too.
      transfer_seconds: the part of `extra_seconds` for transfers to the host and back.
      host_bytes: bytes that loops keep in host memory.
      whole_step: decisions about the flat program of a step without regions.
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
    whole_step: StepDecisions | None = None


class Level:
    """The step with its loops decided.

    Attributes:
      program: the operations of the step.
      regions: regions outside of loops whose operations are in `program`.
      inner_regions: regions outside of loops whose operations are not, since they are inside one
        operation such as a branch. Each is solved separately.
    """

    def __init__(
        self,
        traced: Traced,
        recording: Recording,
        loop_decisions: _LoopDecisions,
        costs: Costs,
    ) -> None:
        self.traced = traced
        self.recording = recording
        self.loop_decisions = loop_decisions
        self.records = {**loop_decisions.records, **recording.records}
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
        self.inner_regions = [
            r for r in recording.records if r not in places and not loop_depth(r[0])
        ]

    # Problems are large: those of the latest levels are kept, the last ones until a later step is planned.
    # A level does not change, so neither do its problems.
    @functools.lru_cache(maxsize=4)  # noqa: B019
    def problem(self, reuses_outputs: bool) -> Problem:
        return Problem(self.program, self._price, self.regions, reuses_outputs=reuses_outputs)

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def inner_problem(self, region: tuple[str, str], reuses_outputs: bool) -> Problem:
        record = self.recording.records[region]
        program = without_dead(program_of_record(record, None, slowdowns(self._costs)))
        return Problem(program, self._price, [region], reuses_outputs=reuses_outputs)

    def peak_bytes(self, reuses_outputs: bool) -> int:
        """Return the bytes of temporaries if only the loops recompute."""
        return self.problem(reuses_outputs).peak_bytes

    def solve(self, reuses_outputs: bool, budget: int) -> Choice:
        """Return decisions within a budget for temporaries.

        Raises:
          BudgetError: no schedule within the budget was found.
        """
        problem = self.problem(reuses_outputs)
        answers: list[Answer] = [problem.solve(budget)] if self.regions else []
        share = budget / max(1, problem.peak_bytes)
        for region in self.inner_regions:
            inner = self.inner_problem(region, reuses_outputs)
            answers.append(inner.solve(int(inner.peak_bytes * min(1.0, share))))
        decisions: Decisions = {k: dict(v) for k, v in self.decided.items()}
        for answer in answers:
            for (key, fingerprint), d in answer.regions.items():
                mark = self.recording.records[key, fingerprint].mark
                decisions.setdefault(key, {})[fingerprint] = dataclasses.replace(d, backward=mark)
        peak = answers[0].peak_bytes if self.regions else problem.peak_bytes
        if not self.regions and not self.inner_regions and peak > budget:
            raise BudgetError(f"the loops alone need {peak} bytes, the budget is {budget}.")
        return Choice(
            decisions,
            self.loops,
            peak,
            self.loop_decisions.seconds + sum(a.extra_seconds for a in answers),
            self.loop_decisions.seconds + sum(a.lower_bound_seconds for a in answers),
            self.records,
            any(a.extra_seconds > 0 for a in answers),
            self.loop_decisions.transfer_seconds,
            self.loop_decisions.host_bytes,
        )

    def smallest(self, reuses_outputs: bool = False) -> Choice:
        """Return the decisions with the smallest peak that the search finds.

        Raises:
          BudgetError: no peak is smaller than the one without recomputation.
        """
        return self.solve(reuses_outputs, self.problem(reuses_outputs).smallest_bytes())


@dataclasses.dataclass(frozen=True)
class _Setting:
    """The parameters of a level: a price per byte, and changes towards the next price.

    Between two prices the loops change one after the other, each in the small steps of `_mixes`. So
    there are levels at which only some of several equal loops have changed. At this level, the first
    `n_changes` of these changes are made.
    """

    price: float
    next_price: float
    n_changes: int


class Levels:
    """All levels of a step, built on demand.

    With `transfer`, the time of a copy to the host or back, loops may keep values in host memory.
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
        self._settings = self._all_settings()

    @property
    def has_regions(self) -> bool:
        return bool(self.recording.records)

    def __len__(self) -> int:
        return len(self._settings)

    def level(self, i: int) -> Level:
        """Return level `i`; the higher it is, the less loops save and the more they recompute."""
        if i not in self._made:
            self._made[i] = self._make(self._settings[i])
        return self._made[i]

    def _all_settings(self) -> list[_Setting]:
        """Return the settings of all levels: prices at which loops change, and steps between them."""
        found: set[float] = {0.0}
        for record in self._loops:
            found.update(prices(self._options_of(record)))
        ordered = sorted(found)
        if len(ordered) > _MAX_LEVELS:
            last = len(ordered) - 1
            places = {round(k * last / (_MAX_LEVELS - 1)) for k in range(_MAX_LEVELS)}
            ordered = [ordered[k] for k in sorted(places)]
        settings = []
        for low, high in itertools.pairwise(ordered):
            n = sum(len(self._mixes(record, low, high)) - 1 for record in self._loops)
            stride = max(1, -(-n // _MAX_BETWEEN))
            settings += [_Setting(low, high, k) for k in range(0, max(n, 1), stride)]
        return [*settings, _Setting(ordered[-1], ordered[-1], 0)]

    def _changes_before(self, key: str, setting: _Setting) -> int:
        """Return how many changes the loops before this one can make."""
        n = 0
        for record in self._loops:
            if record.key == key:
                break
            n += len(self._mixes(record, setting.price, setting.next_price)) - 1
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

    def _mixes(self, record: Record, price: float, next_price: float) -> list[_Mix]:
        """Return the changes of a loop from its best option at one price to that at the next.

        Where two neighbouring options differ much in bytes, the loop is unrolled and its steps mix
        the two. An iteration of the unrolled loop holds the inputs and gradients of several steps, so
        the difference must exceed these.
        """
        options = self._options_of(record)
        unroll = _unroll_factor(self._length(record.key))
        first = options.index(at_price(options, price))
        last = options.index(at_price(options, next_price))
        mixes = [_Mix(options[first], options[first])]
        needed = 2 * unroll * self._input_bytes(record)
        for a, b in itertools.pairwise(options[first : last - 1 if last else None : -1]):
            is_far = b.bytes < _MIX_RATIO * a.bytes and (a.bytes - b.bytes) / unroll > needed
            if is_far and a.group == b.group == 1:
                mixes += [_Mix(a, b, n) for n in range(1, unroll)]
            mixes.append(_Mix(b, b))
        return mixes

    def _input_bytes(self, record: Record) -> int:
        """Return the bytes of a step's inputs besides the carry, unsharded: compilers gather them."""
        carry = _carry(record, self.recording.scans[record.key])
        return sum(n_bytes(v.aval) for v in record.region.forward.invars[carry.stop :])

    def _shards_in_bodies(self) -> Mapping[Any, int]:
        """Return the shard counts of values in loops' bodies, as the step around them implies."""
        if self._body_shards is None:
            self._body_shards = shards_in_bodies(
                self.traced_plainly.jaxpr, self.recording.records, self.traced_plainly.shards()
            )
        return self._body_shards

    def _make(self, setting: _Setting) -> Level:
        if not self._loops or (setting.price == 0.0 and not setting.n_changes):
            return Level(self.traced_plainly, self.recording, _LoopDecisions(), self._costs)
        loop_decisions = _LoopDecisions()
        recording, traced = self.recording, self.traced_plainly
        for depth in sorted({loop_depth(record.key) for record in self._loops}, reverse=True):
            for record in list(recording.records.values()):
                # The steps of an unrolled loop are decided with their loop.
                if loop_depth(record.key) == depth and record.key in self.recording.scans:
                    self._decide(record, setting, loop_decisions)
            recording = Recording(loop_decisions.decided, loop_decisions.forms)
            traced = self.step.trace(recording)
        return Level(traced, recording, loop_decisions, self._costs)

    def _decide(self, record: Record, setting: _Setting, loop_decisions: _LoopDecisions) -> None:
        """Decide one loop."""
        unroll = _unroll_factor(self._length(record.key))
        mixes = self._mixes(record, setting.price, setting.next_price)
        mix = mixes[
            min(
                max(0, setting.n_changes - self._changes_before(record.key, setting)),
                len(mixes) - 1,
            )
        ]
        share = mix.n_second / unroll
        loop_decisions.count(mix.first, 1 - share)
        loop_decisions.count(mix.second, share)
        if not mix.n_second:
            loop_decisions.add(record.key, record, mix.first)
            if mix.first.group > 1:
                loop_decisions.forms[record.key] = LoopForm(
                    mix.first.group, groups=mix.first.groups
                )
            return
        loop_decisions.forms[record.key] = LoopForm(steps=unroll)
        for j in range(unroll):
            option = mix.second if j < mix.n_second else mix.first
            loop_decisions.add(f"{record.key}.{j}", record, option, _ONE_SEGMENT)


@dataclasses.dataclass(frozen=True)
class _Mix:
    """The options that a loop's steps follow: `n_second` of each unrolled iteration the second one."""

    first: LoopOption
    second: LoopOption
    n_second: int = 0


# A segment at the start of a step's backward program: it keeps the steps of an unrolled iteration from
# recomputing all at once.
_ONE_SEGMENT = (PlanSegment(0, ()),)


@dataclasses.dataclass
class _LoopDecisions:
    """The decisions about loops so far, and their costs."""

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
        """Add the costs of a share of a loop's steps."""
        self.seconds += share * option.seconds
        self.transfer_seconds += share * option.transfer_seconds
        self.host_bytes += round(share * option.host_bytes)


def _unroll_factor(length: int) -> int:
    """Return the unroll factor for mixing options in a loop; 1 if the length has no small divisor."""
    return next((n for n in (4, 3, 2) if length % n == 0 and length > n), 1)


def _movable(record: Record, program: Program, carry: Sequence[int]) -> frozenset[int]:
    """Return the values of a body's program that can be kept in host memory."""
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
    """Return the values of a body's program that are the carry.

    The program's first values are the body's inputs: values that its derivative closes over, then the
    inputs of the loop's own body (constants, carry, slices of the scanned arrays).
    """
    n_inputs = len(record.region.forward.invars)
    n_consts, n_carry = _jax.scan_arity(eqn)
    first = n_inputs - len(eqn.invars) + n_consts
    return range(first, first + n_carry)
