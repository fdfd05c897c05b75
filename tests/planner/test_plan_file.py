"""A plan's file: read back as it was, or refused with the line and why; never anything else."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from remat.errors import PlanError
from remat.planner.plan_file import (
    Attempt,
    LoopPlan,
    Plan,
    PlanSegment,
    RegionPlan,
    SavedValue,
    ScanPlan,
    WholeStep,
)

MOST = 2**53
_BODY = RegionPlan(
    "loss#1a2b/scan0",
    "f1",
    "b1",
    3,
    4,
    (SavedValue(0, "bf16[4]", 8),),
    (),
    offloaded_inputs=(SavedValue(2, "bf16[64]", 128, offloaded=True),),
)
_LOSS = RegionPlan(
    "loss#1a2b",
    "f0",
    "b0",
    9,
    20,
    (
        SavedValue(3, "float32[8,16]", 512, "model.py:12 (mlp)", "block_0/mlp", "hidden"),
        SavedValue(4, "bfloat16[8]", 16, path="block_1/attn", offloaded=True),
    ),
    (PlanSegment(0, (5, 6)), PlanSegment(7, ()), PlanSegment(7, (5, 8))),
)
PLAN = Plan(
    program="p0",
    target="tpu:v5e:16x16",
    versions=(("jax", "0.10.2"), ("jaxlib", "0.10.2")),
    budget_bytes=4096,
    peak_bytes=4000,
    predicted_bytes=3900,
    peak_bytes_without_remat=8000,
    flops=1e6,
    extra_flops=2e4,
    extra_seconds=1e-6,
    seconds=1e-4,
    lower_bound_seconds=0.5e-6,
    regions=(_BODY, _LOSS),
    loops=(LoopPlan("loss#1a2b/scan0", 4),),
    attempts=(Attempt(3800, 4200, 1e4, 0.5e-6), Attempt(3900, 4000, 2e4, 1e-6)),
    is_verified=True,
    host_bytes=144,
    transfer_seconds=2.5e-7,
)
TEXT = PLAN.to_json()
_ON_HOST = 'attn", "name": "", "offloaded": true'  # once in the file


def line_of(part: str, text: str = TEXT) -> int:
    assert text.count(part) == 1, f"{part!r} stands {text.count(part)} times in the file"
    return text[: text.index(part)].count("\n") + 1


def unverified(plan: Plan) -> Plan:
    return dataclasses.replace(plan, peak_bytes=None, is_verified=False)


# --------------------------------------------------------------------------------------------------
# Round trip

whole = st.integers(0, MOST)
number = st.floats(0, 1e30)
text = st.text(st.characters(), max_size=8) | st.just("\ud800\x1b[2J\n\"',{}")
saved_values = st.builds(
    SavedValue, st.integers(0, 20), text, whole, text, text, text, st.booleans()
)
segments = st.builds(
    PlanSegment, st.integers(0, 30), st.lists(st.integers(0, 20), unique=True).map(tuple)
)
regions = st.builds(
    RegionPlan,
    text,
    text,
    text,
    st.integers(21, 30),
    st.integers(30, 40),
    st.lists(saved_values, max_size=4, unique_by=lambda v: v.number).map(tuple),
    st.lists(segments, max_size=4).map(lambda s: tuple(sorted(s, key=lambda x: x.start))),
    st.sampled_from([(), ((0, 0), (3, 2), (5, 16))]),
    st.lists(
        st.builds(SavedValue, whole, text, whole, offloaded=st.just(True)),
        max_size=2,
        unique_by=lambda v: v.number,
    ).map(tuple),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    is_verified = draw(st.booleans())
    loops = st.builds(LoopPlan, text, st.integers(1, MOST))
    return Plan(
        draw(text),
        draw(text),
        tuple(draw(st.dictionaries(text, text, max_size=3)).items()),
        draw(whole),
        draw(whole) if is_verified else None,
        draw(whole),
        draw(whole),
        draw(number),
        draw(number),
        draw(number),
        draw(number),
        draw(number),
        tuple(draw(st.lists(regions, max_size=3, unique_by=lambda r: (r.key, r.fingerprint)))),
        tuple(draw(st.lists(loops, max_size=3, unique_by=lambda loop: loop.key))),
        tuple(draw(st.lists(st.builds(Attempt, whole, whole, number, number), max_size=3))),
        is_verified,
        draw(text),
        draw(whole),
        draw(number),
    )


@given(plans())
def test_a_saved_plan_loads_as_it_was(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded == plan
    assert hash(loaded) == hash(plan)
    assert loaded.to_json() == plan.to_json()
    assert list(path.parent.iterdir()) == [path]


@given(plans())
def test_what_is_shown_of_any_plan_can_be_printed(plan: Plan) -> None:
    lines = [str(plan), *plan.explain().splitlines()]
    assert all(line.isprintable() for line in lines)
    assert all(line.encode() for line in lines if line)


def test_the_file_holds_one_saved_value_and_one_segment_a_line() -> None:
    lines = [line.strip().rstrip(",") for line in TEXT.splitlines()]
    for region in PLAN.regions:
        for value in (*region.saved, *region.offloaded_inputs):
            assert json.dumps(dataclasses.asdict(value)) in lines
        for segment in region.segments:
            assert f'{{"start": {segment.start}, "recomputed": {[*segment.recomputed]}}}' in lines


def test_the_format_of_version_1_stays_readable() -> None:
    written = """{"format": "remat plan", "version": 1, "verified": null, "program": "p", "target": "cpu",
      "versions": {}, "budget_bytes": 9, "peak_bytes": null, "predicted_bytes": 8,
      "peak_bytes_without_remat": 20, "flops": 5, "extra_flops": 1, "extra_seconds": 0.5, "seconds": 2,
      "lower_bound_seconds": 0.25, "regions": [{"key": "f#1", "fingerprint": "a", "backward": "b",
      "n_values": 3, "n_operations": 2, "saved": [{"number": 1, "type": "float32[2]", "bytes": 8}],
      "segments": [{"start": 1, "recomputed": [0, 2]}]}], "loops": [{"key": "f#1/scan2", "group": 2}],
      "attempts": []}"""
    saved = (SavedValue(1, "float32[2]", 8),)
    region = RegionPlan("f#1", "a", "b", 3, 2, saved, (PlanSegment(1, (0, 2)),))
    loops = (LoopPlan("f#1/scan2", 2),)
    plan = Plan(
        "p", "cpu", (), 9, None, 8, 20, 5.0, 1.0, 0.5, 2.0, 0.25, (region,), loops, (), False
    )
    assert Plan.from_json(written) == plan
    # An object's keys may stand in any order, also `format` and `version`.
    shuffled = json.dumps(json.loads(written), sort_keys=True, indent=4)
    assert Plan.from_json(shuffled) == plan


def test_what_is_offloaded_is_said_and_counted() -> None:
    text = PLAN.explain()
    assert "host memory  144 B; of the extra time 250.0 ns for copies there and back" in text
    assert "saves 1 of 3 values (136 B, 128 B of them in the host's memory)" in text
    assert "1 x bf16[64]  128 B (host)" in text
    assert [region.offloaded_bytes for region in PLAN.regions] == [128, 16]
    assert (
        "host"
        not in dataclasses.replace(PLAN, regions=(), host_bytes=0, transfer_seconds=0).explain()
    )


def test_reformatting_the_file_keeps_it_verified() -> None:
    content = json.loads(TEXT)
    for other in (json.dumps(content), json.dumps(content, indent=3, sort_keys=True)):
        assert Plan.from_json(other) == PLAN
    assert Plan.from_json(TEXT.replace("\n", "\r\n")) == PLAN


def test_a_mark_at_the_beginning_of_the_file_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    assert Plan.load(path) == PLAN


# --------------------------------------------------------------------------------------------------
# Edited by hand

_EDITS = {
    "a value less": (',\n    {"number": 4, "type": "bfloat16[8]", ', None),
    "recomputed": ("[5, 6]", "[5]"),
    "start": ('{"start": 0,', '{"start": 1,'),
    "group": ('"group": 4', '"group": 2'),
    "fingerprint": ('"fingerprint": "f0"', '"fingerprint": "f9"'),
    "offloaded": (_ON_HOST, _ON_HOST.replace("true", "false")),
    "host": ('"host_bytes": 144', '"host_bytes": 0'),
    "peak": ('"peak_bytes": 4000', '"peak_bytes": 3000'),
    "no peak": ('"peak_bytes": 4000', '"peak_bytes": null'),
    "budget": ('"budget_bytes": 4096', '"budget_bytes": 2048'),
    "target": ("tpu:v5e:16x16", "tpu:v5e:4x4"),
    "program": ('"p0"', '"p1"'),
    "extra": ('"extra_flops": 20000.0,\n', '"extra_flops": 1.0,\n'),
}


@pytest.mark.parametrize("edit", _EDITS)
def test_an_edited_file_loads_as_a_plan_that_nobody_compiled(edit: str) -> None:
    old, new = _EDITS[edit]
    assert TEXT.count(old) == 1
    if new is None:
        at = TEXT.index(old)
        edited = TEXT[:at] + TEXT[TEXT.index("}", at) + 1 :]
    else:
        edited = TEXT.replace(old, new)
    plan = Plan.from_json(edited)
    assert not plan.is_verified
    assert plan.peak_bytes is None
    assert edit in ("peak", "no peak") or plan != unverified(PLAN)
    assert "not verified" in plan.explain()
    assert "not verified" in str(plan)
    # It does not become verified by being saved again.
    assert Plan.from_json(plan.to_json()) == plan


def test_loops_whose_last_steps_choose_otherwise_inside_are_read() -> None:
    branch = ScanPlan("7-9/2-3.0", (4,), 16, 1e-7, 10.0)
    loop = ScanPlan("7-9", (1, 5), 64, 1e-6, 100.0, 1, 3, (1,), (branch,), (branch,))
    plan = dataclasses.replace(PLAN, whole_step=WholeStep(20, (), (), False, (loop,)))
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert text.count('"rest": [1]') == 1
    with pytest.raises(PlanError, match="value 1 is listed twice"):
        Plan.from_json(text.replace('"rest": [1]', '"rest": [1, 1]'))


def test_an_edited_value_is_what_the_file_says() -> None:
    plan = Plan.from_json(TEXT.replace("[5, 6]", "[5, 6, 1]").replace('"group": 4', '"group": 8'))
    assert plan.regions[1].segments[0] == PlanSegment(0, (5, 6, 1))
    assert plan.loops == (LoopPlan("loss#1a2b/scan0", 8),)
    assert plan.n_recomputed == PLAN.n_recomputed + 1


def test_a_verified_mark_that_is_made_up_verifies_nothing() -> None:
    mark = json.loads(TEXT)["verified"]
    for other in ('"yes"', '""', "null"):
        assert Plan.from_json(TEXT.replace(f'"{mark}"', other)) == unverified(PLAN)


# --------------------------------------------------------------------------------------------------
# Damaged: (what in the file, what instead, which text is on the line that is named, why)

_SAVED = '{"number": 3, "type": "float32[8,16]", "bytes": 512'
_DAMAGED: dict[str, tuple[str, str, str, str]] = {
    "no format": (' "format": "remat plan",\n', "", "{", "no 'format'"),
    "syntax": ('"group": 4', '"group": 4,,', '"group": 4', "not JSON"),
    "no comma": ('scan0", "group"', 'scan0" "group"', '"group": 4', "not JSON"),
    "no comma outside": ('16x16",\n', '16x16"\n', '"versions"', "',' or '}' was expected"),
    "another format": ('"remat plan"', '"remat report"', "remat report", "this is not a plan"),
    "format no text": ('"remat plan"', "[]", '"format"', "this is not a plan"),
    "newer": ('"version": 1', '"version": 2', '"version": 2', "version 2, and this remat reads"),
    "version true": ('"version": 1', '"version": true', '"version": true', "version True"),
    "version text": ('"version": 1', '"version": "1"', '"version"', "version '1'"),
    "no version": (' "version": 1,\n', "", "{", "version None"),
    "verified": ('"verified": ', '"verified": 3, "x": ', '"verified"', "unknown key 'x'"),
    "misspelt": ('"group"', '"gruop"', '"gruop"', "did you mean 'group'?"),
    "misspelt outside": ('"budget_bytes"', '"buget_bytes"', "buget", "did you mean 'budget_bytes'?"),
    "misspelt optional": ('"name": "hidden"', '"nam": "hidden"', '"nam"', "mean 'name'?"),
    "unknown": ('"loops": [', '"lambda": 3,\n "loops": [', '"lambda"', "unknown key 'lambda'"),
    "missing": (' "budget_bytes": 4096,\n', "", "{", "'budget_bytes' is missing"),
    "missing inside": ('"number": 3, ', "", '"float32[8,16]"', "'number' is missing"),
    "key twice": ('"group": 4', '"group": 4, "group": 5', '"group": 4', "'group' stands here"),
    "key twice outside": (' "flops": ', ' "seconds": 1,\n "flops": ', ' "seconds": 0.0001', "second time"),
    "version twice": ('{"jax": ', '{"jax": "1",\n "jax": ', '"jax": "0.10.2"', "given twice"),
    "key no text": ('"group": 4', "group: 4", "group: 4", "not JSON"),
    "saved twice": ('"number": 4', '"number": 3', '"bfloat16[8]"', "value 3 is saved twice"),
    "recomputed twice": ("[5, 6]", "[5, 5]", "[5, 5]", "value 5 is recomputed twice"),
    "region twice": (
        '"loss#1a2b", "fingerprint": "f0"',
        '"loss#1a2b/scan0", "fingerprint": "f1"',
        '"backward": "b0"',
        "is listed twice",
    ),
    "loop twice": (
        '"group": 4, "steps": 1, "groups": 0}',
        '"group": 4, "steps": 1, "groups": 0},\n  {"key": "loss#1a2b/scan0", "group": 5}',
        '"group": 5',
        "is listed twice",
    ),
    "number too large": ('"number": 3', '"number": 9', '"number": 9', "no value 9"),
    "recomputed too large": ("[5, 6]", "[5, 9]", "[5, 9]", "no value 9"),
    "fewer values": ('"n_values": 9', '"n_values": 4', '"number": 4', "no value 4"),
    "start too large": ('7, "recomputed": []', '21, "recomputed": []', '"start": 21', "between 0 and 20"),
    "start too small": ('7, "recomputed": [5, 8]', '6, "recomputed": [5, 8]', "[5, 8]", "between 7"),
    "group 0": ('"group": 4', '"group": 0', '"group": 0', "at least 1"),
    "negative": ('"number": 3', '"number": -1', '"number": -1', "number must be"),
    "negative flops": ('"flops": 1000000.0', '"flops": -1.0', "-1.0", "flops must be"),
    "negative in a list": ("[5, 6]", "[5, -6]", "-6", "in recomputed must be"),
    "huge": ('"bytes": 512', '"bytes": 9007199254740993', "9007199254740993", "bytes must be"),
    "huger": ('"bytes": 512', f'"bytes": 1{"0" * 5000}', '"float32[8,16]"', "digits"),
    "huge time": ('"seconds": 0.0001', '"seconds": 1e31', "1e31", "seconds must be"),
    "infinite": ('"seconds": 0.0001', '"seconds": 1e999', "1e999", "seconds must be"),
    "huge whole time": ('"seconds": 0.0001', f'"seconds": {10**400}', "0" * 400, "seconds must be"),
    "NaN": ('"seconds": 0.0001', '"seconds": NaN', "NaN", "NaN is not a JSON number"),
    "NaN inside": ('"bytes": 512', '"bytes": -Infinity', "-Infinity", "-Infinity is not a JSON number"),
    "true": ('"group": 4', '"group": true', '"group": true', "group must be a whole number"),
    "true as time": ('"seconds": 0.0001', '"seconds": true', " true", "seconds must be a number"),
    "part": ('"group": 4', '"group": 4.0', '"group": 4.0', "group must be a whole number"),
    "1 as true": (_ON_HOST, _ON_HOST.replace("true", "1"), '"offloaded": 1', "true or false"),
    "an input on the device": (
        '"bytes": 128, "source": "", "path": "", "name": "", "offloaded": true',
        '"bytes": 128',
        '"number": 2',
        "an input that is not offloaded is not listed",
    ),
    "null": ('"group": 4', '"group": null', '"group": null', "group must be"),
    "no text": ('"type": "bfloat16[8]"', '"type": 8', '"type": 8', "type must be a string"),
    "peak no number": ('"peak_bytes": 4000', '"peak_bytes": "4KB"', "4KB", "peak_bytes must be"),
    "version no text": ('"jaxlib": "0.10.2"', '"jaxlib": 0.1', '"jaxlib"', "versions must be a string"),
    "versions no object": ('{"jax": "0.10.2", "jaxlib": "0.10.2"}', "[]", '"versions"', "an object"),
    "no list": ("[5, 6]", "5", '"recomputed": 5', "recomputed must be a list"),
    "list for a number": ('"group": 4', '"group": [4]', '"group": [4]', "group must be"),
    "no object": ('{"start": 0, "recomputed": [5, 6]}', "3", "    3,", "must be an object"),
    "deep": ("[5, 6]", "[" * 100_000, "[[", "nested too deeply"),
    "deep objects": ("[5, 6]", '{"a":' * 100_000, '{"a":{', "nested too deeply"),
    "deep and closed": ("[5, 6]", "[" * 100_000 + "]" * 100_000, "[[", "nested too deeply"),
}  # fmt: skip


@pytest.mark.parametrize("case", _DAMAGED)
def test_a_damaged_file_is_refused_with_its_line_and_why(tmp_path: Path, case: str) -> None:
    old, new, there, why = _DAMAGED[case]
    assert TEXT.count(old) == 1
    damaged = TEXT.replace(old, new)
    path = tmp_path / "damaged.json"
    path.write_text(damaged)
    with pytest.raises(PlanError) as refused:
        Plan.load(path)
    message = str(refused.value)
    line = damaged[: damaged.index(there)].count("\n") + 1
    assert message.startswith(f"{path}, line {line}: ")
    assert why in message
    assert message.endswith("Correct it there, or plan again.")
    assert len(message) < 600


_NO_PLANS = {
    "empty": (b"", 1),
    "space": (b"\n\n ", 3),
    "a list": (b"[1]", 1),
    "a number": (b"\n3", 2),
    "text after": (TEXT.encode() + b"\n{}", TEXT.count("\n") + 2),
    "a graph": (b'{"nodes": []}', 1),
    "nothing in it": (b"\n{}", 2),
    "zeros": (b"\0" * 100, 1),
    "deep": (b"[" * 1_000_000, 1),
    "deep object": (b'{"a":\n' * 100_000, 102),
    "pickle": (b"\x80\x04\x95\x1f\n.", 1),
    "not UTF-8": (TEXT.encode().replace(b"block_1", b"bl\xffck_1"), line_of("block_1")),
    "UTF-16": (TEXT.encode("utf-16"), 1),
}


@pytest.mark.parametrize("case", _NO_PLANS)
def test_what_is_no_plan_is_refused_with_its_line(tmp_path: Path, case: str) -> None:
    content, line = _NO_PLANS[case]
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=rf"other\.json, line {line}: "):
        Plan.load(path)


def test_a_file_that_is_cut_off_is_refused_wherever_it_ends() -> None:
    for end in range(len(TEXT) - 1):
        with pytest.raises(PlanError, match=r"line \d+: "):
            Plan.from_json(TEXT[:end])


def test_flipped_bytes_give_an_error_or_a_plan_that_is_not_verified(tmp_path: Path) -> None:
    draw = random.Random(0)
    path = tmp_path / "plan.json"
    for _ in range(3000):
        content = bytearray(TEXT.encode())
        for _ in range(draw.choice((1, 1, 2, 8))):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(content)
        try:
            plan = Plan.load(path)
        except PlanError as error:
            assert f"{path}, line " in str(error)
        else:
            assert plan == PLAN or not plan.is_verified


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.integers(0), anything)
def test_any_value_in_place_of_another_gives_an_error_or_a_plan_that_is_not_verified(
    which: int, value: Any
) -> None:
    content = json.loads(TEXT)
    places: list[tuple[Any, Any]] = []

    def walk(item: Any) -> None:
        keys = (
            item if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        )
        for key in keys:
            places.append((item, key))
            walk(item[key])

    walk(content)
    owner, key = places[which % len(places)]
    owner[key] = value
    try:
        plan = Plan.from_json(json.dumps(content, indent=1))
    except PlanError as error:
        assert "the plan, line " in str(error)
    else:
        assert plan == PLAN or not plan.is_verified


# --------------------------------------------------------------------------------------------------
# Hostile


def test_loading_runs_no_code_and_shows_no_control_characters(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    code = f"__import__('os').system('touch {marker}')\x1b]0;owned\x07\u202e"
    path = tmp_path / "plan.json"
    hostile = TEXT.replace('"block_1/attn"', json.dumps(code)).replace(
        '"tpu:v5e:16x16"', json.dumps("\x1b[2J")
    )
    path.write_text(hostile)
    plan = Plan.load(path)
    assert plan.regions[1].saved[1].path == code
    assert not {"\x1b", "\x07", "\u202e"} & {*plan.explain(), *str(plan)}
    assert not marker.exists()


def test_an_error_shows_no_control_characters_and_not_the_whole_file() -> None:
    key = json.dumps("\x1b[2J" + "x" * 10**6)
    for damaged in (TEXT.replace('"group"', key), TEXT.replace('"group": 4', f'"group": {key}')):
        with pytest.raises(PlanError) as refused:
            Plan.from_json(damaged)
        assert len(str(refused.value)) < 400
        assert str(refused.value).isprintable()


def test_a_file_longer_than_any_plan_is_not_read_on(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    os.truncate(tmp_path / "plan.json", 64 * 2**20 + 1)
    with pytest.raises(PlanError, match="longer than 67108864 bytes"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("path", ["none.json", ".", "none/plan.json", "nul\0.json", "x" * 5000])
def test_a_path_that_cannot_be_used_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        Plan.load(tmp_path / path)
    if path != "none.json":
        with pytest.raises(PlanError, match="cannot be written"):
            PLAN.save(tmp_path / path)
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------
# Saving


def test_a_save_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlanError, match="No space left"):
        unverified(PLAN).save(path)
    assert Plan.load(path) == PLAN
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_beside_writers_always_sees_a_whole_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    both = (PLAN, unverified(PLAN))
    PLAN.save(path)

    def write(plan: Plan) -> None:
        for _ in range(50):
            plan.save(path)

    writers = [threading.Thread(target=write, args=(plan,)) for plan in both]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert Plan.load(path) in both
    for writer in writers:
        writer.join()
    assert list(tmp_path.iterdir()) == [path]


# --------------------------------------------------------------------------------------------------
# Made by hand, and shown


def test_plans_made_by_hand_are_checked_too() -> None:
    wrong: list[tuple[Any, dict[str, Any]]] = [
        (PLAN, {"budget_bytes": True}),
        (PLAN, {"budget_bytes": 1.5}),
        (PLAN, {"flops": float("nan")}),
        (PLAN, {"flops": "1e6"}),
        (PLAN, {"lower_bound_seconds": -1e-9}),
        (PLAN, {"peak_bytes": None}),
        (unverified(PLAN), {"peak_bytes": 4000}),
        (PLAN, {"regions": (_LOSS, _LOSS)}),
        (PLAN, {"regions": ("loss",)}),
        (PLAN, {"versions": (("jax",),)}),
        (_LOSS, {"n_values": 8}),
        (_LOSS, {"n_operations": 6}),
        (_LOSS, {"segments": _LOSS.segments[::-1]}),
        (_LOSS, {"loop_results": ((0, 10),)}),
        (_LOSS, {"loop_results": ((3, 2), (4, 1))}),
        (_LOSS, {"loop_results": ((3,),)}),
        (_LOSS.saved[0], {"number": -1}),
        (PLAN.loops[0], {"group": 0}),
    ]
    for data, change in wrong:
        with pytest.raises(PlanError):
            dataclasses.replace(data, **change)


def test_lists_and_whole_numbers_become_what_the_annotations_say() -> None:
    made = dataclasses.replace(PLAN, regions=[*PLAN.regions], flops=10**6)  # type: ignore[arg-type]
    assert made == PLAN
    assert type(made.flops) is float
    assert hash(made) == hash(PLAN)


def test_totals_count_what_is_saved_and_recomputed() -> None:
    assert PLAN.saved_bytes == 8 + 128 + 512 + 16
    assert PLAN.n_recomputed == 4
    assert PLAN.extra_flops_share == pytest.approx(0.02)
    assert dataclasses.replace(PLAN, flops=0.0).extra_flops_share == 0


def test_an_explanation_groups_what_is_alike_and_stays_short() -> None:
    saved = tuple(
        SavedValue(i, "float32[1024]", 4096, path=f"block_{i}/mlp") for i in range(1000)
    ) + tuple(SavedValue(1000 + i, f"float32[{i}]", i, path="head") for i in range(50))
    cuts = tuple(PlanSegment(i, (i,)) for i in range(40))
    region = RegionPlan("loss", "f", "b", 2000, 50, saved, cuts)
    explanation = dataclasses.replace(PLAN, regions=(region,)).explain()
    assert "1000 x float32[1024]  3.9 MiB  block_0…999/mlp" in explanation
    assert "43 others" in explanation
    assert "in 40 places of its backward pass" in explanation
    assert len(explanation.splitlines()) < 35


def test_an_explanation_says_what_was_asked_and_reached() -> None:
    explanation = PLAN.explain()
    for part in (
        "tpu:v5e:16x16",
        "budget 4.0 KiB",
        "3.9 KiB, confirmed by the compiler",
        "predicted 3.7 KiB, compiler 4.1 KiB",
        "2.0 % of 1.00 MFLOP",
        "lower bound with the same loops 500.0 ns",
        "16 B (host)  block_1/attn",
        "Loop loss#1a2b/scan0: in groups of 4 steps",
    ):
        assert part in explanation
    several = dataclasses.replace(PLAN, loops=(LoopPlan("loss#1a2b/scan0", 1, 2),))
    assert "unrolled by 2" in several.explain()
    first = dataclasses.replace(PLAN, loops=(LoopPlan("loss#1a2b/scan0", 4, groups=2),))
    assert "2 groups of 4 steps" in first.explain()
    assert Plan.from_json(first.to_json()) == first
    beyond = dataclasses.replace(PLAN, budget_bytes=3999)
    assert "more than the budget" in beyond.explain()


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path, Path("/dev/null")):
        with pytest.raises(PlanError, match="not a regular file"):
            Plan.load(path)


def test_the_error_of_a_wrong_field_is_public_and_names_it() -> None:
    with pytest.raises(PlanError) as refused:
        dataclasses.replace(PLAN, budget_bytes=10**30)
    assert type(refused.value) is PlanError
    assert (refused.value.field, refused.value.item) == ("budget_bytes", None)
