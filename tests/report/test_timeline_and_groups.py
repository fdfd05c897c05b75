"""Live bytes compared with a count at each step, the peak after downsampling, and grouping."""

from __future__ import annotations

import numpy as np
import samples
from hypothesis import given, strategies as st
from strategies import explanations

from remat.report import (
    KINDS,
    ExplanationData,
    Value,
    difference,
    groups,
    live_at,
    predicted_memory,
    timeline,
)
from remat.report.timeline import thinned_samples


@given(explanations())
def test_live_bytes_are_those_of_the_values_alive_at_each_step(explanation):
    line = explanation.timeline()
    for step in range(len(explanation.steps)):
        live = live_at(explanation.values, step)
        assert line.total_bytes[step] == sum(v.n_bytes for v in live)
        for k, kind in enumerate(KINDS):
            assert line.live_bytes[k, step] == sum(v.n_bytes for v in live if v.kind == kind)
        assert live == tuple(sorted(live, key=lambda v: -v.n_bytes))
    if explanation.steps:
        assert line.peak_bytes == line.total_bytes[line.peak_step]


@given(explanations())
def test_predicted_memory_adds_up(explanation):
    memory = predicted_memory(explanation.values, explanation.steps)
    line = explanation.timeline()
    assert memory.peak_bytes == line.peak_bytes
    assert memory.peak_bytes <= memory.argument_bytes + memory.output_bytes + memory.temp_bytes
    assert memory.temp_bytes <= memory.peak_bytes


@given(explanations())
def test_groups_hold_every_value_once_and_add_up(explanation):
    found = groups(explanation.values)
    ids = [value.id for group in found for value in group.values]
    assert sorted(ids) == sorted(value.id for value in explanation.values)
    assert sum(g.n_bytes for g in found) == sum(v.n_bytes for v in explanation.values)
    assert [g.n_bytes for g in found] == sorted((g.n_bytes for g in found), reverse=True)


def test_a_group_reads_as_one_line():
    values = [
        Value(i, "saved", "bf16[8,1024,4096]", 2**26, path=f"encoder/{i}/mlp/gelu")
        for i in range(48)
    ]
    assert str(groups(values)[0]) == "48 × encoder/0…47/mlp/gelu  bf16[8,1024,4096]  3.0 GiB"


def test_numbers_that_differ_are_shown_from_first_to_last():
    paths = ["net2/block_1/conv2d/Dense_0", "net2/block_2/conv2d/Dense_0"]
    values = [Value(i, "saved", "f32[1]", 4, path=path) for i, path in enumerate(paths)]
    assert [group.pattern for group in groups(values)] == ["net2/block_1…2/conv2d/Dense_0"]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=300), st.integers(2, 40))
def test_thinning_keeps_the_peak_and_the_limit(total_bytes, most):
    at = thinned_samples(np.array(total_bytes), most)
    assert len(at) <= max(most, 2)
    assert np.argmax(total_bytes) in at
    assert (np.diff(at) > 0).all()


def test_a_hundred_thousand_values_have_a_timeline():
    explanation = samples.of_size(100_000)
    assert len(explanation.values) >= 100_000
    assert timeline(explanation.values, explanation.steps).peak_bytes > 0


def test_a_value_that_each_iteration_recomputes_is_what_became_of_all_saved_ones():
    def value(id, kind):
        return Value(id, kind, "f32[8]", 32, path="mlp", primitive="sin")

    saved = ExplanationData("saved", values=tuple(value(i, "saved") for i in range(24)))
    again = ExplanationData("again", values=(value(0, "recomputed"),))
    found = difference(saved, again)
    assert len(found.changed) == 24 and not found.vanished and not found.appeared
    assert found.saved_bytes == -24 * 32 and difference(again, saved).saved_bytes == 24 * 32
    assert "saved → recomputed   768 B   24 × mlp: sin" in found.to_text()
