"""The decisions of a plan as data: the values to store and to recompute, in a step, its loops and bodies.

They are a part of the plan's file (`plan_file.py`). Plans and the planner share the dataclasses for what
loops keep (`ScanOption`) and for copies to the host (`HostCopy`). Decisions about single equations have two
forms: a plan numbers equations as they stand before loops are rewritten, the planner by their place
afterwards. `whole_step_file.py` converts the numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from remat.paths import relative
from remat.planner.checked import Checked, check_once, field_error
from remat.printing import printable
from remat.units import counted, format_bytes, format_flops

_MOST_GROUPS = 8  # lines of loops, of bodies, and of values in one place; more make the text longer
_MOST_PLACES = 8  # places of recomputation; more make the text longer


@dataclasses.dataclass(frozen=True, slots=True)
class Recomputation(Checked):
    """Equations of a step that are recomputed before another equation.

    Args:
      before: the number of the equation that is computed next for the first time.
      again: the numbers of the equations that are recomputed, in order.
      values: the values that these compute, for display: type, scope and primitive.
      source: the source line of the equation that is computed next, for display.
    """

    before: int
    again: tuple[int, ...]
    values: tuple[str, ...] = ()
    source: str = ""

    def _check(self) -> None:
        if not self.again:
            raise field_error("there is no equation to recompute; remove the line.", "again")


@dataclasses.dataclass(frozen=True, slots=True)
class ScanOption(Checked):
    """One way to run a forward scan and the backward scan that reads its results, or two conditionals.

    Plans and the planner pair each option with an id, which consists of the places of the two equations
    in the program and of the equations around them.

    Args:
      saved: the values that each step keeps for the backward scan: their places among the variables of
        the joint program of both bodies, after `inner` was applied. Empty for a pair of conditionals.
      bytes: the most bytes that are kept at once, for all steps, with those of inner pairs.
      seconds, flops: the costs of recomputation, all steps together.
      group: steps that are recomputed together; 1 if they are not grouped.
      groups: the number of groups at the beginning of the forward scan, or of steps if they are not
        grouped; 0 for as many as the loop's length allows.
      rest: which values the steps after these keep; None for `saved`.
      inner: the options of pairs inside the two bodies, with their ids; for a pair of conditionals, one
        option for each branch.
      rest_inner: the same for the steps after the first ones; None for `inner`.
      offloaded, rest_offloaded: which of the values in `saved` and in `rest` are kept in the host's memory.
      host_bytes: the bytes kept there, for all steps.
      transfer_seconds: the part of `seconds` for copies to the host and back.
      lasting: the values that all steps keep although steps are in groups, as in `saved`: a group that runs
        again reads them instead of computing them.
      computes_constants: whether each step of both scans computes what are constants of theirs and cheap
        functions of much smaller values, which takes their bytes only during a step.
    """

    saved: tuple[int, ...]
    bytes: int
    seconds: float
    flops: float
    group: int = 1
    groups: int = 0
    rest: tuple[int, ...] | None = None
    inner: tuple[tuple[str, ScanOption], ...] = ()
    rest_inner: tuple[tuple[str, ScanOption], ...] | None = None
    offloaded: tuple[int, ...] = ()
    rest_offloaded: tuple[int, ...] = ()
    host_bytes: int = 0
    transfer_seconds: float = 0.0
    computes_constants: bool = False
    lasting: tuple[int, ...] = ()

    def __repr__(self) -> str:
        kept = f"{counted(len(self.saved), 'saved value')}, {format_bytes(self.bytes)}"
        groups = f", {self.groups} x {self.group} steps" if self.groups else ""
        return f"ScanOption({kept}, {format_flops(self.flops)} recomputed{groups})"

    def _check(self) -> None:
        check_once(self.saved, "saved", lambda n: f"value {n} is listed twice")
        if self.rest is not None:
            check_once(self.rest, "rest", lambda n: f"value {n} is listed twice")
            if not self.groups:
                raise field_error("rest must be null if groups is 0: no steps are left.", "rest")
        elif self.rest_inner is not None:
            raise field_error("rest_inner must be null if rest is null.", "rest_inner")
        elif self.rest_offloaded:
            raise field_error("rest_offloaded must be empty if rest is null.", "rest_offloaded")
        if self.group < 1:
            raise field_error("group must be at least 1 step.", "group")
        check_once(self.lasting, "lasting", lambda n: f"value {n} is listed twice")
        if self.lasting and (self.group == 1 or self.groups):
            raise field_error(
                "lasting must be empty unless all steps are in groups (group above 1, groups 0).",
                "lasting",
            )


def _counts(plan: WholeStep | BodyPlan) -> str:
    """Return the sizes of decisions about a program, for their reprs."""
    equations = counted(plan.n_equations, "equation")
    return f"{equations}: {len(plan.stored):,} stored, {counted(len(plan.recomputations), 'recomputation')}"


def _check_decisions(plan: WholeStep | BodyPlan) -> None:
    n_equations = plan.n_equations + plan.n_added
    stored, recomputations = plan.stored, plan.recomputations
    known = set(stored)
    if plan.ordered and plan.separated:
        why = "a step is either ordered or separated, not both. Set one of them to false."
        raise field_error(why, "separated")
    check_once(plan.partial_sums, "partial_sums", lambda n: f"equation {n} is listed twice")
    for i, number in enumerate(plan.partial_sums):
        if number not in known:
            why = f"equation {number} is not among the stored ones."
            raise field_error(why, "partial_sums", i)
    check_once(stored, "stored", lambda n: f"equation {n} is listed twice")
    for i, number in enumerate(stored):
        if number >= n_equations:
            raise field_error(
                f"there is no equation {number}: the step has {n_equations}, and numbers "
                "count from 0.",
                "stored",
                i,
            )
    places = [recomputation.before for recomputation in recomputations]
    check_once(places, "recomputations", lambda n: f"two recomputations are before equation {n}")
    for i, recomputation in enumerate(recomputations):
        missing = [n for n in recomputation.again if n not in known]
        if missing:
            why = f"equation {missing[0]} is recomputed but not among the stored ones."
            raise field_error(why, "recomputations", i)
        late = [n for n in recomputation.again if recomputation.before <= n < plan.n_equations]
        if late:
            raise field_error(
                f"equation {late[0]} has not been computed before equation {recomputation.before}, so it "
                "cannot be recomputed there.",
                "recomputations",
                i,
            )
        if recomputation.before >= n_equations:
            raise field_error(
                f"the step has no equation {recomputation.before}, before which to recompute: it has "
                f"{n_equations}, numbered from 0.",
                "recomputations",
                i,
            )


@dataclasses.dataclass(frozen=True, slots=True)
class BodyPlan(Checked):
    """Decisions about the body of a loop or branch, such as a scan whose step computes a gradient.

    Args:
      id: the places of the equations around the body, each with the number of its body: "7.0/"; "3-9/" for
        the backward step of the loop "3-9".
      n_equations, stored, recomputations, ordered, partial_sums, fences_arguments, n_added, separated: as of
        a whole step.
    """

    id: str
    n_equations: int
    stored: tuple[int, ...]
    recomputations: tuple[Recomputation, ...]
    ordered: bool = False
    partial_sums: tuple[int, ...] = ()
    fences_arguments: bool = False
    n_added: int = 0
    separated: bool = False

    def __repr__(self) -> str:
        return f"BodyPlan({self.id!r}, {_counts(self)})"

    def _check(self) -> None:
        _check_decisions(self)


@dataclasses.dataclass(frozen=True, slots=True)
class HostCopy(Checked):
    """A value outside of loops that is in the host's memory between two of its uses.

    Args:
      equation, result: the value: the number of the equation that computes it, and of its result.
      there: the number of an equation whose first result may be used only after the copy to the host.
      after: the number of the equation after which the copy back begins.
      before: the number of the first equation that reads the copy. All later ones read it, too.
      again: the numbers of equations before that one, which are recomputed from the copy: views and
        elementwise operations that compilers compute inside of the kernels that use them.
      bytes: of the value on one device; 0 until the copy is written into a plan.
      value: its type, scope and primitive; "" until then. Both are for display, and copies that differ
        only in them are equal.
    """

    equation: int
    result: int
    there: int
    after: int
    before: int
    again: tuple[int, ...] = ()
    bytes: int = dataclasses.field(default=0, compare=False)
    value: str = dataclasses.field(default="", compare=False)

    def _check(self) -> None:
        check_once(self.again, "again", lambda n: f"equation {n} is listed twice")
        if not self.equation <= self.there <= self.after < self.before:
            raise field_error(
                f"equations {self.equation}, {self.there} (there), {self.after} (after) and {self.before} "
                "(before) must follow one another in the step.",
                "after",
            )


@dataclasses.dataclass(frozen=True, slots=True)
class WholeStep(Checked):
    """Decisions about a step.

    Args:
      n_equations: the number of equations of the step, with calls inlined (and checkpoints in loops, if
        `opened`), numbered from 0.
      stored: the equations whose results are stored in memory. Results of other equations are
        computed inside of the kernels that use them.
      recomputations: in the order of the program.
      ordered: whether every few stored equations wait for those before them, so that the compiler cannot
        reorder them. Before the first recomputation only those wait that could be computed much earlier.
      opened: whether the checkpoints in loops are inlined, so that the plan decides about them, and weights
        that loops read slice by slice are converted in these loops.
      loops: the options of pairs of scans or conditionals, with their ids; others stay as they are.
      bodies: the decisions about bodies of other loops and of branches; others stay as they are.
      partial_sums: stored equations whose results are computed before the equations after them begin, so
        that their terms are not kept until the whole sum is computed.
      n_added: the number of equations that `loops` add around loops, such as reshapes into groups, and
        `copies` to copy. Their numbers follow those of the step.
      copies: the values outside of loops that are kept in the host's memory between two uses.
      fences_arguments: whether recomputations wait together with all arguments that they read, because
        compilers may gather these from other devices.
      separated: whether an equation that computes a value again which is not stored waits for those that it
        depends on and that computed the value before, so that the compiler cannot store it for both.
    """

    n_equations: int
    stored: tuple[int, ...]
    recomputations: tuple[Recomputation, ...]
    opened: bool = False
    loops: tuple[tuple[str, ScanOption], ...] = ()
    bodies: tuple[BodyPlan, ...] = ()
    ordered: bool = False
    partial_sums: tuple[int, ...] = ()
    n_added: int = 0
    copies: tuple[HostCopy, ...] = ()
    fences_arguments: bool = False
    separated: bool = False

    def __repr__(self) -> str:
        copies = counted(len(self.copies), "copy", "copies")
        loops = f"{counted(len(self.loops), 'loop')}, {counted(len(self.bodies), 'body', 'bodies')}"
        return f"WholeStep({_counts(self)}, {loops}, {copies})"

    def _check(self) -> None:
        _check_decisions(self)
        values = [(copy.equation, copy.result) for copy in self.copies]
        check_once(values, "copies", lambda v: f"result {v[1]} of equation {v[0]} is copied twice")


# The description of decisions as text


def explained(whole: WholeStep) -> Iterable[str]:
    n_again = sum(len(recomputation.again) for recomputation in whole.recomputations)
    if n_again:
        yield (
            f"Outside of loops the step recomputes {n_again} of its {whole.n_equations} operations, in "
            f"{len(whole.recomputations)} places"
        )
    else:
        what = "the bodies below" if whole.bodies else "loops"
        yield f"Outside of {what} nothing is recomputed"
    if (whole.ordered or whole.separated) and (n_inside := whole.n_equations - len(whole.stored)):
        yield (
            f"  {counted(n_inside, 'operation')} whose results are not kept in memory are computed wherever "
            "these are read: the extra FLOPs include that"
        )
    if whole.partial_sums:
        yield (
            f"  {len(whole.partial_sums)} partial sums are computed as soon as their terms are, which frees "
            "the terms"
        )
    if whole.copies:
        n_bytes = sum(copy.bytes for copy in whole.copies)
        yield (
            f"  {len(whole.copies)} values outside of loops ({format_bytes(n_bytes)}) are in the host's "
            "memory between two uses"
        )
    for id, loop in whole.loops[:_MOST_GROUPS]:
        groups_text = f", in groups of {loop.group} steps" if loop.group > 1 else ""
        if loop.groups:
            what = "values" if loop.rest is None else f"{len(loop.rest)} values"
            groups_text += f", {what} of each step after the first {loop.groups * loop.group}"
        if loop.lasting:
            groups_text += f", and {counted(len(loop.lasting), 'value')} of all steps"
        yield (
            f"  the loop {printable(id)} keeps {len(loop.saved)} values of each step{groups_text}"
        )
        yield (
            f"    ({format_bytes(loop.bytes)} in all{_on_host(loop)}) and recomputes "
            f"{format_flops(loop.flops)}"
        )
    for body in whole.bodies[:_MOST_GROUPS]:
        n_again = sum(len(recomputation.again) for recomputation in body.recomputations)
        is_step = any(body.id.startswith(f"{id}/") for id, _ in whole.loops)
        what = "a loop's backward pass" if is_step else "a call, loop or branch"
        yield (
            f"  the body {printable(body.id)} of {what} recomputes {n_again} of its "
            f"{body.n_equations} operations, "
            f"in {len(body.recomputations)} places"
        )
    for recomputation in whole.recomputations[:_MOST_PLACES]:
        yield (
            f"  before {printable(relative(recomputation.source))}, equation {recomputation.before}: "
            f"{len(recomputation.again)} recomputed"
        )
        groups: dict[str, int] = {}
        for value in recomputation.values:
            groups[value] = groups.get(value, 0) + 1
        for value, count in list(groups.items())[:_MOST_GROUPS]:
            yield f"  {count:>4} x {printable(value)}"
        if len(groups) > _MOST_GROUPS:
            yield f"       and {len(groups) - _MOST_GROUPS} other kinds"
    if len(whole.recomputations) > _MOST_PLACES:
        yield f"  and {len(whole.recomputations) - _MOST_PLACES} more places"


def _on_host(loop: ScanOption) -> str:
    return f" and {format_bytes(loop.host_bytes)} in the host's memory" if loop.host_bytes else ""
