"""The data inside the HTML page: columns of numbers and one list of distinct texts.

`html` writes it into the page as JSON, where `static/data.js` reads it. A program of equal layers repeats
its texts thousands of times. As columns of positions in one list, run-length encoded, 5,000 values take a
few hundred kilobytes. The chart has at most `MOST_POINTS` points, the peak among them. The page lists the
`MOST_VALUES` largest values; sums are over all values.
"""

from __future__ import annotations

import itertools

from remat.aliases import Json
from remat.printing import printable
from remat.report.groups import called, groups
from remat.report.model import KINDS, PHASES, ExplanationData, Value
from remat.report.timeline import thinned_samples, timeline

MOST_POINTS = (
    2400  # corners of the chart's curves; more draw it more exactly and make the page larger
)
MOST_VALUES = 100_000  # values in the table, the largest first; more make the page larger


class _Texts:
    """Distinct texts in order of appearance, and their positions."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.places.setdefault(printable(text), len(self.places))


def payload(explanation: ExplanationData) -> dict[str, Json]:
    """Return the data that the page's scripts read.

    >>> payload(ExplanationData("step"))["chart"]["at"]
    []
    """
    line = timeline(explanation.values, explanation.steps)
    at = thinned_samples(line.total_bytes, MOST_POINTS)
    texts = _Texts()
    compiled = explanation.totals.compiled
    content = {
        "kinds": KINDS,
        "phases": PHASES,
        "peak": line.peak_step,
        "peakBytes": line.peak_bytes,
        "sameHeight": line.same_height[1:],
        "compiledPeak": compiled.peak_bytes if compiled is not None else None,
        "steps": _steps(explanation, texts),
        "chart": {"at": at.tolist(), "live": line.live_bytes[:, at].tolist()},
        "segments": [
            {
                "number": segment.number,
                "label": texts(segment.label),
                "first": segment.first,
                "last": segment.last,
                "saved": segment.saved_bytes,
                "flops": _rounded(segment.recompute_flops),
                "level": segment.level,
            }
            for segment in explanation.segments
        ],
        **_values(explanation, texts),
    }
    return {**content, "strings": list(texts.places)}


def _steps(explanation: ExplanationData, texts: _Texts) -> dict[str, Json]:
    steps = explanation.steps
    columns: dict[str, list[Json]] = {
        "label": [texts(step.label) for step in steps],
        "phase": [PHASES.index(step.phase) for step in steps],
        "source": [texts(step.source) for step in steps],
        # More digits, since the times are added up.
        "time": [float(f"{step.time_s:.8g}") for step in steps],
        "segment": [step.segment for step in steps],
        "iteration": [texts(step.iteration) for step in steps],
    }
    return _packed(columns)


def _values(explanation: ExplanationData, texts: _Texts) -> dict[str, Json]:
    """Return columns of the groups, of the values by group, and of the values' lifetimes."""
    largest = sorted(explanation.values, key=lambda v: -v.n_bytes)[:MOST_VALUES]
    listed = {value.id for value in largest}
    groups_ = _columns("kind aval pattern source primitive count shown hidden bytes flops time")
    values = _columns("group what name consumer held count bytes flops time")
    lives = _columns("value born dies kind")
    for number, group in enumerate(groups(explanation.values)):
        shown = [value for value in group.values if value.id in listed]
        _append(
            groups_,
            kind=KINDS.index(group.kind),
            aval=texts(group.aval),
            pattern=texts(group.called),
            source=texts(group.source),
            primitive=texts(group.primitive),
            count=group.count,
            hidden=len(group.values) - len(shown),
            shown=len(shown),
            bytes=group.n_bytes,
            flops=_rounded(group.flops),
            time=_rounded(group.time_s),
        )
        for value in shown:
            for kind, born, dies in value.held():
                number_of = len(values["group"])
                _append(lives, value=number_of, born=born, dies=dies, kind=KINDS.index(kind))
            _append(
                values,
                group=number,
                what=texts(_name_of(value)),
                name=texts(value.name),
                consumer=texts(value.consumer),
                held=texts(value.held_in),
                count=value.count,
                bytes=value.n_bytes,
                flops=_rounded(value.flops),
                time=_rounded(value.time_s),
            )
    return {"groups": _packed(groups_), "values": _packed(values), "lives": _packed(lives)}


def _name_of(value: Value) -> str:
    names = (value.name,) if value.name else ()
    return called(value.path, value.source, names, value.primitive, value.function)


def _columns(names: str) -> dict[str, list[Json]]:
    return {name: [] for name in names.split()}


def _append(columns: dict[str, list[Json]], **row: Json) -> None:
    for key, content in row.items():
        columns[key].append(content)


def _packed(columns: dict[str, list[Json]]) -> dict[str, Json]:
    """Return columns, with a run-length encoding of those that repeat values."""
    packed: dict[str, Json] = {}
    for key, column in columns.items():
        runs = [part for x, run in itertools.groupby(column) for part in (x, len(list(run)))]
        packed[key] = {"runs": runs} if len(runs) < len(column) else column
    return packed


def _rounded(number: float) -> float | int:
    """Return a number rounded to four digits, which is more than the precision of a prediction."""
    return 0 if number == 0 else float(f"{number:.4g}")
