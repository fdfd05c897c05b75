"""An explanation as data: values, the steps of the timeline, segments, findings, totals.

`remat.explain` creates instances of these classes; everything else in `remat.report` reads them. Nothing
here uses JAX, so a report can be made, saved, compared and drawn from a file alone.

A *step* of the timeline is one operation of the program in the order in which it runs: forward,
backward, recomputed or part of the update. A `Value` is held in memory during the steps of its
`lifetimes`, the step that computes it and its last one included; a recomputed value has one lifetime for each
computation. Bytes are per device. For an offloaded value the lifetimes are those on the device.

A loop's stack for values of its iterations is allocated as a whole. Each slice of a stack is a separate
value; the steps in which its memory is held although its content is not needed are `reserved`, which is also
the kind of such memory on the timeline.

Memory has the parts of the compilers' analyses: arguments, outputs, temporaries (all other values), and alias
bytes, those of outputs that reuse an argument's buffer. Their peak is at most
``argument_bytes + output_bytes + temp_bytes - alias_bytes``, and exactly that if all outputs are
allocated at the start, as on CPU and GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from remat.errors import ReportError, closest
from remat.printing import printable, shown
from remat.units import format_bytes, format_flops

Kind = Literal[
    "argument", "saved", "offloaded", "recomputed", "gradient", "output", "temporary", "reserved"
]  # in the order in which they are stacked, from below
Phase = Literal["forward", "backward", "recompute", "update"]
Severity = Literal["error", "warning", "info"]
Action = Literal["recompute", "offload", "keep"]
Precision = Literal["exactly", "about", "at most"]

KINDS: tuple[Kind, ...] = get_args(Kind)
PHASES: tuple[Phase, ...] = get_args(Phase)
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
ACTIONS: tuple[Action, ...] = get_args(Action)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


# The metadata of a field that files of version 2 of the format lack: it has its default then.
_SINCE_3 = {"since": 3}


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """One array of the program.

    Args:
      id: a whole number, unique in its explanation.
      kind: one of `KINDS`.
      aval: dtype and shape, "bf16[8,1024,4096]"; "bf16[8,1024,4096]/8" is sharded over 8 devices.
      n_bytes: on one device.
      lifetimes: pairs (born, dies) of step numbers, both included, in order and without overlap.
      primitive: the primitive that computes it.
      source: "model.py:12 (attention)".
      name: given by `checkpoint_name`.
      path: of the module or name stack, "encoder/block_3/mlp".
      consumer: a description of the operation that reads it.
      flops: of recomputing it; a saved value from the arguments and other saved values.
      time_s: the same in predicted seconds.
      count: the number of arrays that it stands for: slices that iterations of a loop stack.
      reserved: pairs of step numbers like `lifetimes`, in which only its memory is held.
      function: the JAX function that computes it, such as "gelu", if known.
      first_kind: the kind during the first lifetime if it is another: a value of the forward pass that is
        recomputed in the backward pass is temporary before.
      held_in: where the value is if it has no lifetime of its own: "in a result's memory".
    """

    id: int
    kind: Kind
    aval: str
    n_bytes: int
    lifetimes: tuple[tuple[int, int], ...] = ()
    primitive: str = ""
    source: str = ""
    name: str = ""
    path: str = ""
    consumer: str = ""
    flops: float = 0.0
    time_s: float = 0.0
    count: int = 1
    reserved: tuple[tuple[int, int], ...] = ()
    function: str = ""
    first_kind: Kind | None = dataclasses.field(default=None, metadata=_SINCE_3)
    held_in: str = dataclasses.field(default="", metadata=_SINCE_3)

    def held(self) -> Iterator[tuple[Kind, int, int]]:
        """Yield the kind and the first and last step of each interval in which its memory is held."""
        for i, (born, dies) in enumerate(self.lifetimes):
            yield (self.first_kind or self.kind) if i == 0 else self.kind, born, dies
        for born, dies in self.reserved:
            yield "reserved", born, dies

    def __repr__(self) -> str:
        times = f"{self.count} x " if self.count > 1 else ""
        return printable(
            f"Value({self.id}: {times}{self.kind} {self.aval}, {format_bytes(self.n_bytes)})"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One operation of the timeline.

    Args:
      label: for display.
      phase: the pass that it belongs to.
      time_s: predicted; of all iterations that it stands for.
      source: "model.py:12 (attention)".
      segment: the number of its segment, -1 for none.
      iteration: of the loops that it is in, the outermost first: "iteration 3/24".
      recompute_share: the share of its time that is recomputation.
    """

    label: str
    phase: Phase
    time_s: float = 0.0
    source: str = ""
    segment: int = -1
    iteration: str = ""
    recompute_share: float = dataclasses.field(default=0.0, metadata=_SINCE_3)

    def __repr__(self) -> str:
        return f"Step({shown(self.label)}, {self.phase})"


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """A consecutive part of the forward pass that is recomputed as one.

    Args:
      number: unique in its explanation; steps refer to it.
      label: for display.
      first, last: its first and last step of the forward pass.
      saved_bytes: the bytes that it keeps from forward to backward.
      recompute_flops: of recomputing the rest.
      level: 0, or how deeply it is nested in other segments.
    """

    number: int
    label: str
    first: int
    last: int
    saved_bytes: int = 0
    recompute_flops: float = 0.0
    level: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One way to run the step, among those that a finding compares.

    Args:
      label: "as written", "remat.fit", "by hand".
      code: what to write for it, as lines of Python; "" for the step as it is.
      peak_bytes: on one device; None if it is not known.
      precision: of the peak.
      extra_flops_share: recomputation as a share of the present step's FLOPs; None if it is not known.
      most_extra_flops_share: the upper end, if the costs are a range; otherwise 0.
    """

    label: str
    code: str = ""
    peak_bytes: int | None = None
    precision: Precision = "exactly"
    extra_flops_share: float | None = None
    most_extra_flops_share: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A conclusion about the step, with the next step for the user.

    `code` is for programs, lower case with underscores: "policy_matched_nothing". `options` are the ways to
    take the next step, with their costs.
    """

    code: str
    severity: Severity
    message: str
    next_step: str = ""
    options: tuple[Option, ...] = dataclasses.field(default=(), metadata=_SINCE_3)

    def __repr__(self) -> str:
        return printable(f"Finding({self.code!r}, {self.severity})")


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device, divided as the compilers' memory analyses divide them."""

    peak_bytes: int = 0
    argument_bytes: int = 0
    output_bytes: int = 0
    temp_bytes: int = 0
    alias_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
    """The step in a few numbers.

    Args:
      predicted: memory from the lifetimes of the values (`timeline.predicted_memory`).
      compiled: memory from the compiler's own analysis, if the step was compiled.
      difference: the reasons why the two differ, as text.
      flops: of the whole step, recomputation included.
      recompute_flops: of recomputation alone.
      time_s: predicted seconds of the whole step, recomputation included.
      recompute_time_s: of recomputation alone.
      residual_bytes: the bytes of the forward pass's values on the device that the backward pass reads,
        without fusion (`remat.residuals`).
      residual_argument_bytes: the bytes of the arguments that it reads.
      at_most: why the step may take fewer FLOPs and less time than stated here; "" if they are exact.
    """

    predicted: Memory = Memory()
    compiled: Memory | None = None
    difference: str = ""
    flops: float = 0.0
    recompute_flops: float = 0.0
    time_s: float = 0.0
    recompute_time_s: float = 0.0
    residual_bytes: int = 0
    residual_argument_bytes: int = 0
    at_most: str = dataclasses.field(default="", metadata=_SINCE_3)

    def __repr__(self) -> str:
        peak = format_bytes(self.predicted.peak_bytes)
        compiled = (
            "" if self.compiled is None else f", compiled {format_bytes(self.compiled.peak_bytes)}"
        )
        return f"Totals(predicted peak {peak}{compiled}, {format_flops(self.flops)})"

    @property
    def difference_bytes(self) -> int | None:
        """Return the compiled peak minus the predicted one; None if it was not compiled."""
        if self.compiled is None:
            return None
        return self.compiled.peak_bytes - self.predicted.peak_bytes

    @property
    def extra_flops_share(self) -> float:
        """Return the FLOPs of recomputation as a share of the FLOPs without it.

        >>> Totals(flops=122.0, recompute_flops=22.0).extra_flops_share
        0.22
        """
        return _extra(self.recompute_flops, self.flops)

    @property
    def extra_time_share(self) -> float:
        """Return the predicted time of recomputation as a share of the time without it."""
        return _extra(self.recompute_time_s, self.time_s)


def _extra(extra: float, whole: float) -> float:
    return extra / (whole - extra) if whole > extra else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """The decision of a plan about a group of values that are needed in the backward pass.

    Args:
      action: to recompute them there, to offload them, or to keep them on the device.
      value: the name of the values.
      aval: dtype and shape of each.
      source: the line that computes them.
      count: the number of values.
      n_bytes: of all of them: the bytes that recomputation avoids, or that are kept.
      flops: of computing each of them once in the step without the plan; a plan that keeps an operand
        takes less.
    """

    action: Action
    value: str
    aval: str = ""
    source: str = ""
    count: int = 1
    n_bytes: int = 0
    flops: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class LoopPart:
    """Consecutive iterations of a loop that a plan treats alike.

    Args:
      first, last: the iterations, from 1.
      group: the iterations of a group, if they are recomputed in groups from the carry at each group's start;
        0 if they are not.
      kept: the names of the values that each iteration keeps for the backward pass.
      kept_bytes: of these values, all iterations together.
    """

    first: int
    last: int
    group: int = 0
    kept: tuple[str, ...] = ()
    kept_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedLoop:
    """A loop of the step as a plan runs it.

    Args:
      label: what its iterations run.
      source: the line of the loop.
      length: the number of its iterations.
      parts: of the iterations, in order.
    """

    label: str
    source: str
    length: int
    parts: tuple[LoopPart, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class PlanSummary:
    """The plan that a step follows.

    Args:
      budget_bytes: the plan's budget.
      peak_bytes: confirmed by the compiler when the step was planned; None if it was not.
      without_remat_bytes: the peak without the plan.
      loops: those that the plan changes.
    """

    budget_bytes: int
    peak_bytes: int | None
    without_remat_bytes: int
    loops: tuple[PlannedLoop, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ParetoPoint:
    """One plan among those to choose from.

    Args:
      peak_bytes: of the whole step, on one device.
      extra_flops_share: recomputation as a share of the step without it.
      extra_time_s: predicted seconds that recomputation adds.
      label: of the plan.
      verified: whether the peak is the compiler's own.
      chosen: whether it is the plan that this explanation is about.
    """

    peak_bytes: int
    extra_flops_share: float
    extra_time_s: float
    label: str = ""
    verified: bool = False
    chosen: bool = False


_PARTS = ("values", "steps", "segments", "findings", "pareto", "decisions")


@dataclasses.dataclass(frozen=True)
class ExplanationData:
    """All that an explanation holds; `remat.report.Explanation` adds the renderings.

    `description` says in a sentence what the step computes; `plan` is the plan that it follows.

    Raises:
      ReportError: what it says contradicts itself: a lifetime outside of the timeline, two values
        of one id, a step of an unknown segment, a kind that does not exist, a negative number.
    """

    title: str
    platform: str = ""
    target: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    values: tuple[Value, ...] = ()
    steps: tuple[Step, ...] = ()
    segments: tuple[Segment, ...] = ()
    findings: tuple[Finding, ...] = ()
    totals: Totals = Totals()
    pareto: tuple[ParetoPoint, ...] = ()
    decisions: tuple[Decision, ...] = ()
    description: str = dataclasses.field(default="", metadata=_SINCE_3)
    plan: PlanSummary | None = dataclasses.field(default=None, metadata=_SINCE_3)

    def __post_init__(self) -> None:
        for field in (*_PARTS, "versions"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        _check_totals(self.totals)  # first, since the messages below contain the totals
        for part in (self, *(part for field in _PARTS for part in getattr(self, field))):
            _check_texts(part)
        _check_values(self.values, len(self.steps))
        _check_segments(self.segments, self.steps)
        for i, step in enumerate(self.steps):
            _check_number(step.time_s, f"step {i} ({step.label!r})", "time_s")
            _check_word(step.phase, PHASES, f"step {i} ({step.label!r})", "phase")
            _check_number(step.recompute_share, f"step {i} ({step.label!r})", "recompute_share")
        for finding in self.findings:
            _check_word(finding.severity, SEVERITIES, f"finding {finding.code!r}", "severity")
            _check_options(finding)
        for point in self.pareto:
            where = f"Pareto point {point.label!r}"
            _check_whole(point.peak_bytes, where, "peak_bytes")
            _check_number(point.extra_flops_share, where, "extra_flops_share")
            _check_number(point.extra_time_s, where, "extra_time_s")
        for decision in self.decisions:
            where = f"decision on {decision.value!r}"
            _check_word(decision.action, ACTIONS, where, "action")
            _check_whole(decision.count, where, "count")
            _check_whole(decision.n_bytes, where, "n_bytes")
            _check_number(decision.flops, where, "flops")
        if self.plan is not None:
            _check_plan(self.plan)


# Checks for contradictions


def _check_values(values: tuple[Value, ...], n_steps: int) -> None:
    seen: set[int] = set()
    for value in values:
        where = f"value {value.id}"
        if value.id in seen:
            raise ReportError(f"{where} is there twice; give each value an id of its own.")
        seen.add(value.id)
        _check_word(value.kind, KINDS, where, "kind")
        if value.first_kind is not None:
            _check_word(value.first_kind, KINDS, where, "first_kind")
        _check_whole(value.n_bytes, where, "n_bytes")
        _check_number(value.flops, where, "flops")
        _check_number(value.time_s, where, "time_s")
        _check_whole(value.count, where, "count")
        for intervals in (
            value.lifetimes,
            value.reserved,
            sorted(value.lifetimes + value.reserved),
        ):
            _check_intervals(intervals, where, n_steps)


def _check_intervals(intervals: Sequence[tuple[int, int]], where: str, n_steps: int) -> None:
    earliest = 0
    for born, dies in intervals:
        _check_whole(born, where, "birth")
        _check_whole(dies, where, "death")
        if not earliest <= born <= dies < n_steps:
            raise ReportError(
                f"{where} is said to live during steps {born} to {dies}; lifetimes stand in "
                f"order, without overlap, within the {n_steps} steps of the timeline."
            )
        earliest = dies + 1


def _check_options(finding: Finding) -> None:
    for option in finding.options:
        where = f"option {option.label!r} of finding {finding.code!r}"
        _check_texts(option)
        _check_word(option.precision, PRECISIONS, where, "precision")
        if option.peak_bytes is not None:
            _check_whole(option.peak_bytes, where, "peak_bytes")
        _check_number(option.extra_flops_share or 0, where, "extra_flops_share")
        _check_number(option.most_extra_flops_share, where, "most_extra_flops_share")


def _check_plan(plan: PlanSummary) -> None:
    _check_whole(plan.budget_bytes, "the plan", "budget_bytes")
    _check_whole(plan.without_remat_bytes, "the plan", "without_remat_bytes")
    if plan.peak_bytes is not None:
        _check_whole(plan.peak_bytes, "the plan", "peak_bytes")
    for loop in plan.loops:
        where = f"loop {loop.label!r} of the plan"
        _check_texts(loop)
        _check_whole(loop.length, where, "length")
        done = 0
        for part in loop.parts:
            _check_whole(part.group, where, "group")
            _check_whole(part.kept_bytes, where, "kept_bytes")
            if not done < part.first <= part.last <= loop.length:
                raise ReportError(
                    f"{where}: iterations {part.first} to {part.last} of {loop.length}; parts are in order, "
                    "without overlap."
                )
            done = part.last


def _check_segments(segments: tuple[Segment, ...], steps: tuple[Step, ...]) -> None:
    known: set[int] = set()
    for segment in segments:
        where = f"segment {segment.number}"
        if segment.number < 0 or segment.number in known:
            raise ReportError(f"{where}: give each segment a number of its own, 0 or more.")
        known.add(segment.number)
        if not 0 <= segment.first <= segment.last < len(steps):
            raise ReportError(
                f"{where} is said to span steps {segment.first} to {segment.last}; the timeline "
                f"has {len(steps)} steps."
            )
        _check_whole(segment.saved_bytes, where, "saved_bytes")
        _check_whole(segment.level, where, "level")
        _check_number(segment.recompute_flops, where, "recompute_flops")
    for i, step in enumerate(steps):
        if step.segment != -1 and step.segment not in known:
            raise ReportError(
                f"step {i} ({step.label!r}) is of segment {step.segment}, which is not listed."
            )


def _check_totals(totals: Totals) -> None:
    for number in ("flops", "recompute_flops", "time_s", "recompute_time_s"):
        _check_number(getattr(totals, number), "the totals", number)
    for part, whole in (("recompute_flops", "flops"), ("recompute_time_s", "time_s")):
        if getattr(totals, part) > getattr(totals, whole):
            raise ReportError(f"the totals' {part} exceeds {whole}, of which it is a part.")
    _check_whole(totals.residual_bytes, "the totals", "residual_bytes")
    _check_whole(totals.residual_argument_bytes, "the totals", "residual_argument_bytes")
    for which, memory in (("predicted", totals.predicted), ("compiled", totals.compiled)):
        if memory is not None:
            for field in dataclasses.fields(memory):
                _check_whole(getattr(memory, field.name), f"the {which} memory", field.name)


def _check_number(number: float, where: str, field: str) -> None:
    # A numpy integer is neither, and JSON cannot hold it.
    real = isinstance(number, (int, float))
    if not (real and number >= 0 and (isinstance(number, int) or math.isfinite(number))):
        raise ReportError(
            f"{where}: {field} must be an int or float, finite and at least 0, not {number!r}."
        )


def _check_whole(number: int, where: str, field: str) -> None:
    if type(number) is not int or number < 0:
        raise ReportError(f"{where}: {field} must be an int of at least 0, not {number!r}.")


# One entry for each dataclass of this module.
@functools.cache
def _names_of_texts(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls) if field.type == "str")


def _check_texts(part: object) -> None:
    cls: type = type(part)
    for name in _names_of_texts(cls):
        if not isinstance(getattr(part, name), str):
            raise ReportError(
                f"{name} must be a str, not {getattr(part, name)!r}, in {part!r:.200}."
            )


def _check_word(word: str, known: tuple[str, ...], where: str, field: str) -> None:
    if word not in known:
        raise ReportError(f"{where}: there is no {field} {word!r}; {closest(word, known)}")
