"""Explanations as data, and their renderings. Nothing here knows JAX.

In the order in which data flows:

    model        an explanation as dataclasses: values, steps, segments, findings, totals
    codec        explanations to JSON and back, with all types checked
    timeline     live bytes at each step, the peak
    groups       values that differ only in the numbers of their paths
    document     a report as headings, paragraphs, tables and a chart
    outline      an explanation as a document
    text, markdown, fragment     a document for the terminal, for Markdown, as HTML without scripts
    payload      the values and the timeline as JSON, the data of the page's scripts
    html         an explanation as one self-contained, interactive page, with this data and `static/`
    perfetto     its timeline as a trace for https://ui.perfetto.dev
    plot         its timeline as a matplotlib figure (`remat[report]`)
    difference   the differences of two explanations
    explanation  the data with all renderings as methods
"""

from remat.report.difference import Difference as Difference, difference as difference
from remat.report.explanation import Explanation as Explanation
from remat.report.groups import Group as Group, groups as groups
from remat.report.model import (
    KINDS as KINDS,
    PHASES as PHASES,
    Decision as Decision,
    ExplanationData as ExplanationData,
    Finding as Finding,
    LoopPart as LoopPart,
    Memory as Memory,
    Option as Option,
    ParetoPoint as ParetoPoint,
    PlannedLoop as PlannedLoop,
    PlanSummary as PlanSummary,
    Segment as Segment,
    Step as Step,
    Totals as Totals,
    Value as Value,
)
from remat.report.timeline import (
    Timeline as Timeline,
    live_at as live_at,
    predicted_memory as predicted_memory,
    timeline as timeline,
)

__all__ = [
    "KINDS",
    "PHASES",
    "Decision",
    "Difference",
    "Explanation",
    "ExplanationData",
    "Finding",
    "Group",
    "LoopPart",
    "Memory",
    "Option",
    "ParetoPoint",
    "PlanSummary",
    "PlannedLoop",
    "Segment",
    "Step",
    "Timeline",
    "Totals",
    "Value",
    "difference",
    "groups",
    "live_at",
    "predicted_memory",
    "timeline",
]


def __dir__() -> list[str]:
    return sorted(__all__)
