"""Plans as data, and their files: what a step keeps and recomputes, and at what cost.

A plan's file is readable JSON with one recomputation, loop or body per line. So users can compare two
plans, and edit one: remove a number from `again`, or change a loop's `group` (docs/plans.md, "Editing a
plan"). Types and ranges are checked here, when the file is read. Whether the program has the equations and
loops is checked when the plan is applied (`whole_step_file.decisions_of_plan`).

`verified` in the file is a checksum of all fields at the time when the compiler confirmed the peak. A
file that was edited afterwards loads as an unverified plan: `is_verified` is False and `peak_bytes` is
None. (The checksum detects edits, it does not prevent forgery.)

Loading a file runs no code. An invalid file raises a `PlanError` that names the file, the line, the
reason and the next step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from remat.aliases import Json
from remat.errors import PlanError, closest
from remat.files import read_text, write_text
from remat.json_lines import Reader
from remat.planner.checked import Checked, check_once, field_error, hints_of
from remat.planner.plan_decisions import BodyPlan, WholeStep, explained
from remat.printing import printable, shown
from remat.units import counted, format_bytes, format_flops, format_seconds

_FORMAT = "remat plan"
_VERSION = 3  # of the format; plans of other versions are refused
_MOST_FILE_BYTES = 64 * 2**20  # larger files are refused
_ADVICE = "Correct it there, or plan again."

#: How a plan's peak was confirmed: by the program that runs, or at the compiler's fast level.
AS_RUN, FAST = "as run", "fast"

# --------------------------------------------------------------------------------------------------
# The data


@dataclasses.dataclass(frozen=True, slots=True)
class MadeFor(Checked):
    """The conditions under which a plan's peak holds, besides the program and its arguments' shardings.

    Args:
      device: the kind of the devices, such as "v5e".
      n_devices: the number of devices that the step runs on.
      donated: the donated arguments, counted as leaves of all arguments that are not static.
      settings: names and values of the compiler's settings: flags and options of XLA, libtpu and JAX.
    """

    device: str
    n_devices: int
    donated: tuple[int, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.n_devices} x {self.device}"

    def __repr__(self) -> str:
        return printable(
            f"MadeFor({self}, {counted(len(self.donated), 'donated argument')}, "
            f"{counted(len(self.settings), 'setting')})"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Attempt(Checked):
    """A candidate that was compiled while planning: its predicted and its compiled peak.

    If the compiler failed, `failure` is the reason and `compiled_bytes` is 0.
    """

    predicted_bytes: int
    compiled_bytes: int
    extra_flops: float
    extra_seconds: float
    failure: str = ""

    def __repr__(self) -> str:
        compiled = "failed" if self.failure else f"compiled {format_bytes(self.compiled_bytes)}"
        more = format_flops(self.extra_flops)
        return f"Attempt(predicted {format_bytes(self.predicted_bytes)}, {compiled}, {more} more)"


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Checked):
    """What a training step saves and recomputes to fit its budget.

    >>> from remat.planner.plan_decisions import Recomputation
    >>> whole = WholeStep(9, (2, 5, 6, 8), (Recomputation(8, (5, 6)),))
    >>> plan = Plan(
    ...     program="p0", target="cpu", versions=(("jax", "0.10.2"),), budget_bytes=4096,
    ...     peak_bytes=4000, predicted_bytes=3900, peak_bytes_without_remat=8000, flops=1e6,
    ...     extra_flops=2e4, extra_seconds=1e-6, seconds=1e-4, lower_bound_seconds=1e-6,
    ...     attempts=(Attempt(3900, 4000, 2e4, 1e-6),), is_verified=True, whole_step=whole)
    >>> print(plan)
    Plan(cpu: peak 3.9 KiB of 4.0 KiB, 7.8 KiB without remat, 2.0 % more FLOPs)
    >>> Plan.from_json(plan.to_json()) == plan
    True

    An edited plan is not verified:

    >>> Plan.from_json(plan.to_json().replace("[5, 6]", "[5]")).is_verified
    False

    Args:
      program: the fingerprint of the step and, after a dash, that of its arguments' and results' shardings.
      target: the device that the step was compiled for.
      versions: the versions of `remat`, `jax` and `jaxlib` that made the plan.
      budget_bytes: the limit of the peak.
      peak_bytes: the compiler's peak of the step on one device; None if the plan is not verified.
      predicted_bytes: the peak according to the planner's model.
      peak_bytes_without_remat: the compiler's peak of the step without rematerialization; 0 if the
        compiler failed on it.
      flops, seconds: costs of the step without recomputation.
      extra_flops, extra_seconds: costs of recomputation.
      lower_bound_seconds: proven lower bound of `extra_seconds`, by the same cost model, for plans
        whose loops run as in this one and whose temporaries fit the model's budget. It includes the
        recomputation in these loops. It proves nothing about plans with other decisions about loops.
      attempts: the candidates that were compiled, in order.
      is_verified: whether the compiler confirmed `peak_bytes`.
      costs: the name of the cost model: "roofline", "measured", or a custom one's name.
      host_bytes: the compiler's bytes in host memory for one device.
      transfer_seconds: the part of `extra_seconds` for copies to the host and back.
      whole_step: the decisions; None if nothing is recomputed that is not in the step as written.
      made_for: the devices and the donated arguments that the peak holds for; None in files of
        earlier versions, where nothing is known about them.
      verified_level: how the program that confirmed `peak_bytes` was compiled: "as run", with the options
        with which it will run, or "fast", at a TPU compiler's fast level.
      marked: the names of the functions marked by `remat.auto`, if any: the plan recomputes only inside of
        these.
      host_arguments: the arguments that are optimizer state, in the host's memory both as arguments and as
        results; counted like `made_for.donated`.

    Raises:
      PlanError: a field has a wrong type or a number out of range, or fields contradict each other.
    """

    program: str
    target: str
    versions: tuple[tuple[str, str], ...]
    budget_bytes: int
    peak_bytes: int | None
    predicted_bytes: int
    peak_bytes_without_remat: int
    flops: float
    extra_flops: float
    extra_seconds: float
    seconds: float
    lower_bound_seconds: float
    attempts: tuple[Attempt, ...]
    is_verified: bool
    costs: str = "roofline"
    host_bytes: int = 0
    transfer_seconds: float = 0.0
    whole_step: WholeStep | None = None
    made_for: MadeFor | None = None
    verified_level: str = AS_RUN
    marked: tuple[str, ...] = ()
    host_arguments: tuple[int, ...] = ()

    def _check(self) -> None:
        names = [name for name, _ in self.versions]
        check_once(names, "versions", lambda name: f"the version of {name!r} is given twice")
        if self.verified_level not in (AS_RUN, FAST):
            why = f"verified_level must be {AS_RUN!r} or {FAST!r}."
            raise field_error(why, "verified_level")
        if self.is_verified != (self.peak_bytes is not None):
            raise field_error(
                "peak_bytes must be the compiler's peak for a verified plan, and None otherwise.",
                "peak_bytes",
            )

    @property
    def extra_flops_share(self) -> float:
        """Return the recomputed FLOPs as a share of the step's FLOPs without recomputation."""
        return self.extra_flops / self.flops if self.flops else 0.0

    @property
    def saved_bytes(self) -> int:
        """Return the bytes that the loops with decisions keep, on the device and in host memory."""
        loops = () if self.whole_step is None else self.whole_step.loops
        return sum(loop.bytes + loop.host_bytes for _, loop in loops)

    @property
    def n_recomputed(self) -> int:
        """Return the number of recomputed equations, each counted once for each recomputation."""
        whole = self.whole_step
        parts: list[WholeStep | BodyPlan] = [] if whole is None else [whole, *whole.bodies]
        return sum(len(r.again) for part in parts for r in part.recomputations)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, atomically.

        Raises:
          PlanError: the file cannot be written; an existing file is unchanged.
        """
        write_text(path, self.to_json(), PlanError)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from its file.

        Raises:
          PlanError: the file cannot be read, is invalid, or has a later format version; the message
            has the line and the reason.
        """
        text = read_text(path, PlanError, _MOST_FILE_BYTES)
        return cls.from_json(text, os.fsdecode(path))

    def to_json(self) -> str:
        """Return the text of the plan's file."""
        return _written(self)

    @classmethod
    def from_json(cls, text: str, origin: str = "the plan") -> Plan:
        """Read a plan from the text that `to_json` returned.

        Args:
          text: the file's text.
          origin: the name of its source in error messages.

        Raises:
          PlanError: as for `load`.
        """
        return _PlanReader(origin, text, PlanError, _ADVICE).plan()

    def explain(self) -> str:
        """Return a readable description of the plan's decisions and costs."""
        return "\n".join(_explained(self))

    def __repr__(self) -> str:
        if self.peak_bytes is None:
            peak = f"predicted peak {format_bytes(self.predicted_bytes)}, not verified,"
        else:
            peak = f"peak {format_bytes(self.peak_bytes)}"
        without = format_bytes(self.peak_bytes_without_remat)
        return (
            f"Plan({printable(self.target)}: {peak} of {format_bytes(self.budget_bytes)}, "
            f"{without if self.peak_bytes_without_remat else 'unknown'} without remat, "
            f"{_percent(self.extra_flops_share)} more FLOPs)"
        )


# --------------------------------------------------------------------------------------------------
# Writing


def _written(plan: Plan) -> str:
    fields = _plain(plan)
    verified = _checksum(fields) if fields.pop("is_verified") else None
    head = {"format": _FORMAT, "version": _VERSION, "verified": verified}
    lists = {
        "attempts": [_text(attempt) for attempt in fields.pop("attempts")],
    }
    whole = fields.pop("whole_step")
    if fields["made_for"] is None:
        del fields["made_for"]
    lines = [f" {_text(key)}: {_text(value)}" for key, value in (head | fields).items()]
    if whole is not None:
        lines.append(
            f" {_text('whole_step')}: {_text_with_lists(whole, ('recomputations', 'loops', 'bodies'))}"
        )
    lines += [f" {_text(key)}: {_list_text(items, ' ')}" for key, items in lists.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _text_with_lists(fields: dict[str, Json], keys: Iterable[str]) -> str:
    """Return a JSON object on one line, except that the lists at these keys have one item per line."""
    lists = {key: [_text(item) for item in fields.pop(key)] for key in keys}
    head = _text(fields).removesuffix("}")
    lines = [f"   {_text(key)}: {_list_text(items, '   ')}" for key, items in lists.items()]
    return ",\n".join([head, *lines]) + "}"


def _list_text(items: Sequence[str], indent: str) -> str:
    """Return a JSON list with one item per line."""
    between = f",\n{indent} "
    return f"[\n{indent} {between.join(items)}\n{indent}]" if items else "[]"


def _text(content: Json) -> str:
    return json.dumps(content, allow_nan=False)


def _plain(data: object) -> Json:
    if dataclasses.is_dataclass(data):
        fields = {f.name: _plain(getattr(data, f.name)) for f in dataclasses.fields(data)}
        return fields | {"versions": dict(fields["versions"])} if "versions" in fields else fields
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], str):
        id, item = data
        if dataclasses.is_dataclass(item):  # see `_identified`
            return {"id": id} | _plain(item)
    return [_plain(item) for item in data] if isinstance(data, tuple) else data


def _identified(kind: object) -> type | None:
    """Return the dataclass if an annotation says that each item is a pair of an id and a dataclass.

    In a file such a pair is one object, which has the id as its first field.
    """
    parts = typing.get_args(kind)
    is_pair = len(parts) == 2 and parts[0] is str and dataclasses.is_dataclass(parts[1])
    return parts[1] if is_pair else None


def _checksum(fields: dict[str, Json]) -> str:
    """Return the checksum of all fields but `is_verified`."""
    known = {key: value for key, value in fields.items() if key != "is_verified"}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


# --------------------------------------------------------------------------------------------------
# Reading


class _PlanReader(Reader):
    """Reads the plan's dataclasses by their annotations, and knows the position of each field."""

    def plan(self) -> Plan:
        start, places = self.places("the file must hold one JSON object")
        self.end("plan")
        if "format" not in places:
            self.fail(f"this is not a plan: it has no 'format': {_FORMAT!r}.", start)
        if (found := self.value_at(places["format"])) != _FORMAT:
            why = f"this is not a plan: format is {shown(found)}, not {_FORMAT!r}."
            self.fail(why, places["format"])
        version = self.value_at(places["version"]) if "version" in places else None
        if type(version) is not int or version != _VERSION:
            is_older = type(version) is int and version < _VERSION
            advice = "Plan again." if is_older else "Load it with the remat that wrote it."
            self.fail(
                f"this is a plan of version {shown(version)}, and this remat reads version "
                f"{_VERSION}. {advice}",
                places.get("version", start),
            )
        added = {"format", "version", "verified"}
        fields = [f for f in dataclasses.fields(Plan) if f.name != "is_verified"]
        names = [f.name for f in fields if f.name in places]
        needed = {f.name for f in fields if f.default is dataclasses.MISSING}
        self.judge_keys(places, {*(f.name for f in fields), *added}, needed | added, start)
        verified = self.value_at(places["verified"])
        if verified is not None and type(verified) is not str:
            self.fail(
                f"verified must be a string or null, not {shown(verified)}.", places["verified"]
            )
        plan = self.made(Plan, {name: places[name] for name in names if name in places}, start)
        is_verified = plan.is_verified and verified == _checksum(_plain(plan))
        return (
            plan if is_verified else dataclasses.replace(plan, peak_bytes=None, is_verified=False)
        )

    def made(self, cls: type, places: dict[str, int], start: int) -> Any:
        """Return the dataclass whose fields are at these positions."""
        found: dict[str, object] = {}
        items: dict[str, list[int]] = {}
        for name, place in places.items():
            self.at = place
            found[name], items[name] = self.field(hints_of(cls)[name], name)
        if cls is Plan:
            found["is_verified"] = found["peak_bytes"] is not None
        try:
            return cls(**found)
        except PlanError as error:
            at = places.get(error.field, start)
            if error.item is not None:
                at = items[error.field][error.item]
            why = str(error)
        self.fail(why, at)

    def field(self, hint: Any, name: str) -> tuple[object, list[int]]:
        """Return the value at the current position, and the positions of its items if it is a list."""
        if name == "versions":
            return self.versions()
        if isinstance(hint, types.UnionType):  # X | None is the only one
            self.skip_space()
            if self.text.startswith("null", self.at):
                return self.value(), []
            hint = typing.get_args(hint)[0]
            if dataclasses.is_dataclass(hint):
                return self.item(hint, name), []
        if typing.get_origin(hint) is not tuple:
            return self.value(), []
        kind = typing.get_args(hint)[0]
        found, places = [], []
        for _ in self.items(f"{name} must be a list"):
            places.append(self.at)
            is_item = dataclasses.is_dataclass(kind) or _identified(kind)
            found.append(self.item(kind, name) if is_item else self.value())
        return tuple(found), places

    def item(self, kind: Any, name: str) -> object:
        """Return the dataclass, or the pair of its id and a dataclass, at the current position."""
        start, places = self.places(f"each item of {name} must be an object")
        after = self.at
        identified = _identified(kind)
        added = {"id"} if identified else set()
        fields = dataclasses.fields(identified or kind)
        needed = {f.name for f in fields if f.default is dataclasses.MISSING}
        self.judge_keys(places, {f.name for f in fields} | added, needed | added, start)
        if identified:
            at = places.pop("id")
            if type(id := self.value_at(at)) is not str:
                self.fail(f"id must be a string, not {shown(id)}.", at)
            made = id, self.made(identified, places, start)
        else:
            made = self.made(kind, places, start)
        self.at = after
        return made

    def versions(self) -> tuple[tuple[tuple[str, Json], ...], list[int]]:
        found, places = [], []
        for key in self.members("versions must be an object"):
            places.append(self.at)
            found.append((key, self.value()))
        return tuple(found), places

    def places(self, rule: str) -> tuple[int, dict[str, int]]:
        """Return the position of the current object, and the positions of its values by key."""
        self.skip_space()
        start = self.at
        places: dict[str, int] = {}
        for key in self.members(rule):
            if key in places:
                self.fail(f"the key {shown(key)} appears a second time; remove one.")
            places[key] = self.at
            self.skip()
        return start, places

    def judge_keys(
        self, places: dict[str, int], known: set[str], needed: set[str], start: int
    ) -> None:
        for key, place in places.items():
            if key not in known:
                missing = known - places.keys()
                self.fail(f"unknown key {shown(key)}: {closest(key, missing or known)}", place)
        for key in sorted(needed - places.keys()):
            self.fail(f"the key {key!r} is missing.", start)

    def value_at(self, place: int) -> Json:
        self.at = place
        return self.value()


# --------------------------------------------------------------------------------------------------
# The readable description


def _on_all_devices(plan: Plan) -> str:
    n_devices = plan.made_for.n_devices if plan.made_for is not None else 1
    return f", on all {n_devices} devices" if n_devices > 1 else ""


def _explained(plan: Plan) -> Iterable[str]:
    yield f"Plan for {printable(plan.target)}, budget {format_bytes(plan.budget_bytes)}"
    if plan.peak_bytes is None:
        yield "  peak         not verified: edited, or never compiled; plan again to have it compiled"
    else:
        beyond = ", more than the budget" if plan.peak_bytes > plan.budget_bytes else ""
        yield f"  peak         {format_bytes(plan.peak_bytes)}, confirmed by the compiler{beyond}"
        if plan.verified_level == FAST:
            yield (
                "               at its fast level. At the level that runs, peaks up to 9 % higher have "
                "been measured"
            )
    yield f"  predicted    {format_bytes(plan.predicted_bytes)}"
    without = format_bytes(plan.peak_bytes_without_remat)
    yield f"  no remat     {without if plan.peak_bytes_without_remat else 'the compiler failed'}"
    yield (
        f"  extra FLOPs  {format_flops(plan.extra_flops)}, {_percent(plan.extra_flops_share)} of "
        f"{format_flops(plan.flops)}{_on_all_devices(plan)}"
    )
    yield (
        f"  extra time   {format_seconds(plan.extra_seconds)} of {format_seconds(plan.seconds)} "
        f"({printable(plan.costs)}); "
        f"lower bound with the same loops {format_seconds(plan.lower_bound_seconds)}"
    )
    if plan.host_bytes or plan.transfer_seconds:
        yield (
            f"  host memory  {format_bytes(plan.host_bytes)}; of the extra time "
            f"{format_seconds(plan.transfer_seconds)} for copies there and back"
        )
    if plan.marked:
        yield f"  recomputes   only inside of {printable(', '.join(plan.marked))} (remat.auto)"
    for number, attempt in enumerate(plan.attempts, 1):
        answer = format_bytes(attempt.compiled_bytes)
        if attempt.failure:
            answer = f"failed ({printable(attempt.failure)})"
        yield (
            f"  compiled {number}   predicted {format_bytes(attempt.predicted_bytes)}, "
            f"compiler {answer}, extra {format_flops(attempt.extra_flops)}"
        )
    if plan.whole_step is not None:
        yield ""
        yield from explained(plan.whole_step)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
