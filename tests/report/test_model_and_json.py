"""The data model: inconsistent data is refused, and JSON round-trips."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import samples
from hypothesis import given, settings
from strategies import explanations

from remat.errors import ReportError
from remat.report import Difference, Explanation, Finding, Segment, Step, Totals, Value

STEPS = (Step("a", "forward"), Step("b", "backward"))
VALUE = Value(0, "saved", "f32[2]", 8, ((0, 1),))


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"values": (VALUE, VALUE)}, "value 0 is there twice"),
        ({"values": (dataclasses.replace(VALUE, kind="save"),)}, "did you mean 'saved'"),
        ({"values": (dataclasses.replace(VALUE, n_bytes=-1),)}, "n_bytes must be an int"),
        ({"values": (dataclasses.replace(VALUE, n_bytes=np.int64(8)),)}, "n_bytes must be an int"),
        ({"values": (dataclasses.replace(VALUE, source=None),)}, "source must be a str, not None"),
        ({"steps": (*STEPS, Step("c", "update", np.float32(1)))}, "time_s must be an int or float"),
        (
            {"values": (dataclasses.replace(VALUE, flops=float("nan")),)},
            "flops must be an int or float, finite",
        ),
        ({"values": (dataclasses.replace(VALUE, lifetimes=((0, 2),)),)}, "within the 2 steps"),
        ({"values": (dataclasses.replace(VALUE, lifetimes=((1, 0),)),)}, "within the 2 steps"),
        ({"values": (dataclasses.replace(VALUE, lifetimes=((0, 1), (1, 1))),)}, "without overlap"),
        ({"segments": (Segment(0, "s", 0, 2),)}, "the timeline has 2 steps"),
        ({"segments": (Segment(0, "s", 0, 1), Segment(0, "t", 0, 1))}, "a number of its own"),
        ({"steps": (*STEPS, Step("c", "update", segment=3))}, "segment 3, which is not listed"),
        ({"steps": (*STEPS, Step("c", "upward"))}, "there is no phase 'upward'"),
        ({"findings": (Finding("c", "fatal", "m"),)}, "there is no severity 'fatal'"),
        ({"totals": Totals(flops=1.0, recompute_flops=2.0)}, "exceeds flops"),
    ],
)
def test_what_contradicts_itself_is_refused(fields, said):
    with pytest.raises(ReportError, match=said):
        Explanation("title", **{"steps": STEPS, **fields})


@given(explanations())
def test_json_gives_back_the_same_explanation(explanation):
    assert Explanation.from_json(explanation.to_json()) == explanation


@given(explanations(), explanations())
@settings(max_examples=25)
def test_json_gives_back_the_same_difference(a, b):
    assert Difference.from_json(a.diff(b).to_json()) == a.diff(b)


def test_json_has_a_line_for_each_value():
    explanation = samples.transformer(2)
    lines = explanation.to_json().splitlines()
    assert sum('"lifetimes"' in line for line in lines) == len(explanation.values)


def damaged(change) -> str:
    content = json.loads(samples.transformer(1).to_json())
    change(content)
    return json.dumps(content)


def test_a_file_of_version_2_has_the_defaults_of_later_fields():
    def earlier(c):
        c["version"] = 2
        for name in ("description", "plan"):
            del c[name]
        del c["totals"]["at_most"]
        later = {
            "values": ("first_kind", "held_in"),
            "steps": ("recompute_share",),
            "findings": ("options",),
        }
        for part, names in later.items():
            for item in c[part]:
                for name in names:
                    del item[name]

    expected = samples.transformer(1)
    assert Explanation.from_json(damaged(earlier)) == expected
    with pytest.raises(ReportError, match="unknown field 'description'"):
        Explanation.from_json(damaged(lambda c: c.update(version=2)))


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "not JSON"),
        ("[]", "have the format 'remat.explanation'"),
        ("{}", "have the format 'remat.explanation'"),
        ("[" * 100_000, "not JSON"),
        ('{"format": "remat.explanation", "format": 1}', "'format' is there twice"),
        (damaged(lambda c: c.update(version=4)), "version 4; this remat reads versions 2 to 3"),
        (damaged(lambda c: c.update(version=True)), "version True"),
        (damaged(lambda c: c.update(title=3)), "title: a text expected, not 3"),
        (damaged(lambda c: c.pop("pareto")), r"fields are missing: \['pareto'\]"),
        (damaged(lambda c: c.update(valuse=[])), "unknown field 'valuse'; did you mean 'values'"),
        (damaged(lambda c: c["values"][3].update(kind=[])), r"values\[3\].kind: one of argument"),
        (damaged(lambda c: c["values"][3].update(n_bytes=1.5)), r"values\[3\].n_bytes: a whole"),
        (damaged(lambda c: c["values"][3].update(n_bytes=-5)), "n_bytes must be an int"),
        (damaged(lambda c: c["values"][0].update(lifetimes=[[1]])), "a list of 2 expected"),
        (damaged(lambda c: c["steps"][0].update(time_s=float("nan"))), "NaN is not a JSON number"),
        (damaged(lambda c: c["steps"][0].update(time_s=True)), r"steps\[0\].time_s: a finite"),
        (damaged(lambda c: c["totals"].update(compiled=7)), "totals.compiled: an object expected"),
    ],
)
def test_a_damaged_text_is_refused_with_its_place(text, said):
    with pytest.raises(ReportError, match=said):
        Explanation.from_json(text)
