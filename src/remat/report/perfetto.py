"""The memory timeline as a trace for https://ui.perfetto.dev or chrome://tracing.

Chrome's JSON trace format (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU):
counters of live bytes by kind over predicted time, a slice for each step, and the lifetimes of the
largest values as asynchronous slices. Times are predicted; a step without one is drawn as 1 µs.
"""

from __future__ import annotations

import json

import numpy as np

from remat.aliases import Json
from remat.printing import printable
from remat.report.model import KINDS, PHASES, ExplanationData, Value
from remat.report.timeline import timeline

_LARGEST = 200  # values whose lifetimes are shown; more make the trace larger


def to_trace(explanation: ExplanationData, *, largest: int = _LARGEST) -> str:
    """Return the trace as JSON text, with the lifetimes of that many values.

    >>> events = json.loads(to_trace(ExplanationData("step")))["traceEvents"]
    >>> events[0]["args"]
    {'name': 'step'}
    """
    line = timeline(explanation.values, explanation.steps)
    lasting_us = [step.time_s * 1e6 or 1.0 for step in explanation.steps]
    at_us = np.concatenate([[0.0], np.cumsum(lasting_us)]).round(3).tolist()
    events = _names(explanation.title)
    for i, step in enumerate(explanation.steps):
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": 1 + PHASES.index(step.phase),
                "name": printable(step.label),
                "cat": step.phase,
                "ts": at_us[i],
                "dur": round(at_us[i + 1] - at_us[i], 3),
                "args": {
                    "source": printable(step.source),
                    "operation": i + 1,
                    "segment": step.segment,
                    "iteration": printable(step.iteration),
                },
            }
        )
    shown = [kind for kind, live in zip(KINDS, line.live_bytes) if live.any()]
    live_bytes = line.live_bytes[[KINDS.index(kind) for kind in shown]]
    for i, live in enumerate(live_bytes.T.tolist()):
        if i == 0 or (live_bytes[:, i] != live_bytes[:, i - 1]).any():
            events.append(_counter(at_us[i], dict(zip(shown, live))))
    if explanation.steps:
        events.append(_counter(at_us[-1], dict.fromkeys(shown, 0)))
    for value in sorted(explanation.values, key=lambda v: -v.n_bytes)[:largest]:
        events += _lifetimes(value, at_us)
    content = {"traceEvents": events, "displayTimeUnit": "ms"}
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def _names(title: str) -> list[dict[str, Json]]:
    named = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": printable(title)}}]
    for i, phase in enumerate(PHASES):
        common = {"ph": "M", "pid": 1, "tid": 1 + i}
        named.append({**common, "name": "thread_name", "args": {"name": phase}})
        named.append({**common, "name": "thread_sort_index", "args": {"sort_index": i}})
    return named


def _counter(at_us: float, live_bytes: dict[str, int]) -> dict[str, Json]:
    return {"ph": "C", "pid": 1, "name": "live bytes", "ts": at_us, "args": live_bytes}


def _lifetimes(value: Value, at_us: list[float]) -> list[dict[str, Json]]:
    name = printable(value.path or value.name or value.primitive or f"value {value.id}")
    common = {"pid": 1, "cat": f"values: {value.kind}", "name": name, "id": value.id}
    about = {
        "bytes": value.n_bytes,
        "type": printable(value.aval),
        "source": printable(value.source),
        "consumer": printable(value.consumer),
    }
    events: list[dict[str, Json]] = []
    for born, dies in value.lifetimes:
        events.append({"ph": "b", "ts": at_us[born], **common, "args": about})
        events.append({"ph": "e", "ts": at_us[dies + 1], **common})
    return events
