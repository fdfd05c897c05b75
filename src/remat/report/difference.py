"""The differences of two explanations: values that appeared, vanished, or changed their kind.

Ids and line numbers change whenever a program is edited, so values are matched by path, name,
primitive, dtype and shape; among equals one of the same kind is preferred, then the order of the program
decides. A value that a loop recomputes in each iteration is one value, which matches all the values that the
iterations saved before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from remat.printing import printable
from remat.report import codec
from remat.report.document import Block, Curves, Heading, Paragraph, Table
from remat.report.fragment import to_fragment, to_page
from remat.report.groups import Group, groups
from remat.report.markdown import to_markdown
from remat.report.model import ExplanationData, Finding, Totals, Value
from remat.report.outline import (
    memory_rows,
    notes,
    peak_in_words,
    percent,
    places_of,
    signed_bytes,
    values_table,
)
from remat.report.text import renderable, to_text
from remat.report.timeline import thinned_samples, timeline
from remat.units import counted, format_bytes, format_flops, format_seconds, in_one_unit

FORMAT = "remat.difference"
_TOTALS = {
    "flops": "FLOPs",
    "recompute_flops": "recomputed FLOPs",
    "time_s": "time, predicted",
    "recompute_time_s": "recomputation time",
}
_FIRST_CHANGES = 12  # rows of the table of changes above the picture; the full table is below
_MOST_POINTS = 300  # corners of each curve; more draw it more exactly


@dataclasses.dataclass(frozen=True, repr=False)
class Difference:
    """From one explanation to another.

    Args:
      before, after: titles.
      changed: pairs of a value before and after.
      curve_before, curve_after: seconds into the step, and the live bytes from there on.
      peak_before, peak_after: where the peaks are, in sentences.
      findings: those about the step after the change.
    """

    before: str
    after: str
    appeared: tuple[Value, ...]
    vanished: tuple[Value, ...]
    changed: tuple[tuple[Value, Value], ...]
    totals_before: Totals
    totals_after: Totals
    curve_before: tuple[tuple[float, int], ...] = ()
    curve_after: tuple[tuple[float, int], ...] = ()
    peak_before: str = ""
    peak_after: str = ""
    findings: tuple[Finding, ...] = ()

    @property
    def saved_bytes(self) -> int:
        """Return the change of the bytes saved on the device."""
        after = [*self.appeared, *{new.id: new for _, new in self.changed}.values()]
        before = [*self.vanished, *{old.id: old for old, _ in self.changed}.values()]
        return _saved_bytes(after) - _saved_bytes(before)

    def __bool__(self) -> bool:
        """Return whether anything differs."""
        values = self.appeared or self.vanished or self.changed
        return bool(values) or self.totals_before != self.totals_after

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return printable(
            f"Difference({self.before!r} to {self.after!r}: {counted(len(self.appeared), 'value')} appeared, "
            f"{len(self.vanished)} vanished, {len(self.changed)} changed)"
        )

    def __rich__(self) -> object:
        return renderable(_blocks(self, 20))

    def to_text(
        self, *, width: int = 110, color: bool = False, most: int = 20, brief: bool = False
    ) -> str:
        """Return it as text for the terminal; a brief one has the totals and the largest changes."""
        return to_text(_blocks(self, most, brief=brief), width=width, color=color)

    def to_markdown(self, *, most: int = 20) -> str:
        """Return it as Markdown, for a pull request."""
        return to_markdown(_blocks(self, most))

    def to_html(self, *, most: int = 200) -> str:
        """Return it as an HTML page without scripts."""
        return to_page(_blocks(self, most), title=f"{self.before} → {self.after}")

    def _repr_html_(self) -> str:
        return to_fragment(_blocks(self, 20))

    def to_json(self) -> str:
        """Return all of it as the JSON that `from_json` reads."""
        return codec.dumps(self, FORMAT)

    @classmethod
    def from_json(cls, text: str) -> Difference:
        """Read what `to_json` wrote; a `ReportError` says what is wrong with other texts."""
        return codec.loads(text, cls, FORMAT)


def difference(before: ExplanationData, after: ExplanationData) -> Difference:
    """Compare two explanations.

    >>> a = ExplanationData("a", values=(Value(0, "saved", "f32[8]", 32, path="mlp"),))
    >>> b = ExplanationData("b", values=(Value(7, "recomputed", "f32[8]", 32, path="mlp"),))
    >>> [(old.kind, new.kind) for old, new in difference(a, b).changed]
    [('saved', 'recomputed')]
    >>> difference(a, b).saved_bytes
    -32
    """
    left_before, left_after = list(before.values), list(after.values)
    _, left_before, left_after = _matched(left_before, left_after, lambda v: (*_key(v), v.kind))
    changed, left_before, left_after = _matched(left_before, left_after, _key)
    last = {_key(old): (old, new) for old, new in changed}
    changed += [(old, last[_key(old)][1]) for old in left_before if _key(old) in last]
    changed += [(last[_key(new)][0], new) for new in left_after if _key(new) in last]
    left_before = [value for value in left_before if _key(value) not in last]
    left_after = [value for value in left_after if _key(value) not in last]
    return Difference(
        before=before.title,
        after=after.title,
        appeared=tuple(left_after),
        vanished=tuple(left_before),
        changed=tuple(changed),
        totals_before=before.totals,
        totals_after=after.totals,
        curve_before=_curve(before),
        curve_after=_curve(after),
        peak_before=_peak(before),
        peak_after=_peak(after),
        findings=after.findings,
    )


def _peak(explanation: ExplanationData) -> str:
    line = timeline(explanation.values, explanation.steps)
    if line.peak_step is None:
        return ""
    return peak_in_words(explanation, line).removesuffix(" The largest:")


def _curve(explanation: ExplanationData) -> tuple[tuple[float, int], ...]:
    """Return corners of the outline of live bytes over time; without times, over the steps."""
    line = timeline(explanation.values, explanation.steps)
    total = line.total_bytes
    starts = line.start_s if line.start_s[-1] > 0 else np.arange(len(total) + 1.0)
    found: list[tuple[float, int]] = []
    for i in thinned_samples(total, _MOST_POINTS):
        found += [(float(starts[i]), found[-1][1])] if found else []
        found.append((float(starts[i]), int(total[i])))
    return (*found, (float(starts[-1]), found[-1][1])) if found else ()


def _key(value: Value) -> tuple[str, ...]:
    return (value.path, value.name, value.primitive, value.aval)


def _matched(
    before: list[Value], after: list[Value], key: Callable[[Value], tuple[str, ...]]
) -> tuple[list[tuple[Value, Value]], list[Value], list[Value]]:
    """Return pairs of items with equal keys, in order, and the unpaired items of either side."""
    waiting: dict[tuple[str, ...], list[Value]] = {}
    for value in reversed(after):
        waiting.setdefault(key(value), []).append(value)
    pairs, left = [], []
    for value in before:
        others = waiting.get(key(value))
        if others:
            pairs.append((value, others.pop()))
        else:
            left.append(value)
    rest = {id(value) for values in waiting.values() for value in values}
    return pairs, left, [value for value in after if id(value) in rest]


def _saved_bytes(values: Iterable[Value]) -> int:
    return sum(value.n_bytes for value in values if value.kind == "saved")


def _blocks(d: Difference, most: int, *, brief: bool = False) -> list[Block]:
    blocks: list[Block] = [Heading(f"{d.before} → {d.after}", 1)]
    if not d:
        return [*blocks, Paragraph("Nothing differs.")]
    changes = _changes(d)
    blocks += [Paragraph(_in_words(d, changes))]
    if changes:
        blocks += [Heading("What changed"), _changes_table(changes, min(most, _FIRST_CHANGES))]
    if d.curve_before and d.curve_after:
        names = f"before: {d.before}", f"after: {d.after}"
        blocks.append(Curves(names, (d.curve_before, d.curve_after)))
    if not brief:
        peaks = (("Before", d.peak_before), ("After", d.peak_after))
        blocks += [Paragraph(f"{name}: {said}") for name, said in peaks if said]
        blocks += [Heading("Findings on the step after"), *notes(d.findings)] if d.findings else []
    blocks += [Heading("Totals"), _totals_table(d.totals_before, d.totals_after, brief=brief)]
    if brief:
        return blocks
    parts = [
        ("Changed kind", [old for old, _ in d.changed], _changed_table(d, most)),
        ("New", d.appeared, values_table(d.appeared, most)),
        ("Gone", d.vanished, values_table(d.vanished, most)),
    ]
    for title, values, table in sorted(parts, key=lambda part: -sum(v.n_bytes for v in part[1])):
        if values:
            blocks += [Heading(f"{title}: {counted(len(values), 'value')}"), table]
    return blocks


@dataclasses.dataclass(frozen=True)
class _Change:
    """The change of a group of values: as text, in bytes, and the group."""

    what: str
    n_bytes: int
    group: Group
    aval: str


def _changes(d: Difference) -> list[_Change]:
    """Return the changes by groups, the most bytes first."""
    by_kinds: dict[tuple[str, str], list[Value]] = {}
    for old, new in d.changed:
        by_kinds.setdefault((old.kind, new.kind), []).append(old)
    found = [
        _Change(f"{old} → {new}", _sign(old, new) * group.n_bytes, group, group.aval)
        for (old, new), values in by_kinds.items()
        for group in groups(values)
    ]
    gone: dict[tuple[str, ...], list[Group]] = {}
    for group in groups(d.vanished):
        gone.setdefault((group.kind, group.called, group.source), []).append(group)
    for group in groups(d.appeared):
        before = gone.get((group.kind, group.called, group.source))
        if before:  # the same value in another size
            old_group = before.pop(0)
            by = group.n_bytes - old_group.n_bytes
            what = f"{group.kind}, {'grew' if by > 0 else 'shrank' if by < 0 else 'another shape'}"
            aval = f"{old_group.aval} → {group.aval}"
            found.append(_Change(what, by, group, aval))
        else:
            found.append(_Change(f"new: {group.kind}", group.n_bytes, group, group.aval))
    for left in gone.values():
        found += [_Change(f"gone: {g.kind}", -g.n_bytes, g, g.aval) for g in left]
    return sorted(found, key=lambda change: -abs(change.n_bytes))


def _sign(old: str, new: str) -> int:
    """Return whether a change of kind keeps fewer (-1) or more (1) bytes between the passes."""
    return -1 if old == "saved" else 1


def _in_words(d: Difference, changes: list[_Change]) -> str:
    """Return sentences on the change of the peak and of the saved bytes, and on the largest change."""
    before, after = d.totals_before, d.totals_after
    both = before.compiled is not None and after.compiled is not None
    old = before.compiled if both and before.compiled else before.predicted
    new = after.compiled if both and after.compiled else after.predicted
    by = new.peak_bytes - old.peak_bytes
    verb = "rises" if by > 0 else "falls"
    said = (
        f"The peak {verb} from {format_bytes(old.peak_bytes)} to {format_bytes(new.peak_bytes)} "
        f"({signed_bytes(by)}, {'compiled' if both else 'predicted'})"
        if by
        else f"The peak stays at {format_bytes(old.peak_bytes)}"
    )
    if d.saved_bytes:
        less = "more" if d.saved_bytes > 0 else "less"
        said += f"; {format_bytes(abs(d.saved_bytes))} {less} are saved for the backward pass"
    said += "."
    donated = new.alias_bytes - old.alias_bytes
    if abs(donated) > max(old.peak_bytes, new.peak_bytes) / 100:
        said += (
            f" {format_bytes(abs(donated))} {'more' if donated > 0 else 'less'} of the results are in the "
            "memory of donated arguments."
        )
    if changes:
        first = changes[0]
        where = f", {first.group.source}" if first.group.source else ""
        said += (
            f" The largest change: {first.group.what}{where}, {first.what} "
            f"({format_bytes(abs(first.n_bytes))})."
        )
    return said


def _changes_table(changes: list[_Change], most: int) -> Table:
    rows: list[tuple[str, ...]] = []
    for change in changes[:most]:
        # Values that are saved neither before nor after are as large as before; only their kind changed.
        is_kind = "→" in change.what and "saved" not in change.what
        n_bytes = format_bytes(change.n_bytes) if is_kind else signed_bytes(change.n_bytes)
        source = places_of(change.group.source, change.group.called)
        rows.append((change.what, n_bytes, change.group.what, change.aval, source))
    if len(changes) > most:
        rows.append(("…", "", f"{len(changes) - most} smaller changes", "", ""))
    return Table(("change", "bytes", "value", "type", "source"), tuple(rows), (1,))


def _totals_table(before: Totals, after: Totals, *, brief: bool = False) -> Table:
    rows: list[tuple[str, ...]] = []
    for which in ("predicted", "compiled"):
        old, new = getattr(before, which), getattr(after, which)
        if old is not None and new is not None:
            for (name, n), (_, m) in zip(memory_rows(old), memory_rows(new)):
                if name != "peak" and (n == m or brief):
                    continue
                figures = in_one_unit((n, m), format_bytes)
                change = signed_bytes(m - n)
                if abs(m - n) > 0.01 * max(n, m):
                    change = in_one_unit((n, m, m - n), format_bytes, signed=True)[2]
                rows.append((f"{name}, {which}", *figures, change))
    for field in _TOTALS:
        old, new = getattr(before, field), getattr(after, field)
        show = format_flops if field.endswith("flops") else format_seconds
        change = ("+" if new > old else "") + percent(new / old - 1) if old else ""
        rows.append((_TOTALS[field], *in_one_unit((old, new), show), change))
    return Table(("total", "before", "after", "change"), tuple(rows), (1, 2, 3))


def _changed_table(d: Difference, most: int) -> Table:
    by_kinds: dict[tuple[str, str], list[Value]] = {}
    for old, new in d.changed:
        by_kinds.setdefault((old.kind, new.kind), []).append(old)
    n_bytes_of = {
        (
            f"{old} → {new}",
            format_bytes(group.n_bytes),
            group.what,
            group.aval,
            places_of(group.source, group.called),
        ): group.n_bytes
        for (old, new), values in by_kinds.items()
        for group in groups(values)
    }
    rows = [*n_bytes_of]
    rows.sort(key=lambda row: -n_bytes_of[row])
    if len(rows) > most:
        rows = [*rows[:most], ("…", "", f"{len(rows) - most} more groups", "", "")]
    return Table(("change", "bytes", "value", "type", "source"), tuple(rows), (1,))
