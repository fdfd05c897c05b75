"""A plan's file is read back unchanged, or refused with the line and the reason."""

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
from remat.planner.plan_decisions import BodyPlan, Recomputation, ScanOption, WholeStep
from remat.planner.plan_file import Attempt, Plan

MOST = 2**53
WHOLE = WholeStep(
    20,
    (3, 4, 5, 6, 9),
    (
        Recomputation(
            9, (5, 6), ("f32[8,16] block_0/mlp/dot_general", "f32[8] sin"), "model.py:12"
        ),
        Recomputation(12, (3,)),
    ),
    True,
    (("7-11", ScanOption((1, 5), 64, 1e-6, 100.0, 4, 3, (1,), offloaded=(5,), host_bytes=144)),),
    (BodyPlan("13.0/", 8, (2,), (Recomputation(5, (2,)),), partial_sums=(2,)),),
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
    attempts=(Attempt(3800, 4200, 1e4, 0.5e-6), Attempt(3900, 4000, 2e4, 1e-6)),
    is_verified=True,
    host_bytes=144,
    transfer_seconds=2.5e-7,
    whole_step=WHOLE,
    marked=("loss",),
)
TEXT = PLAN.to_json()


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
numbers = st.lists(st.integers(0, 20), unique=True).map(tuple)
scans = st.recursive(
    st.builds(ScanOption, numbers, whole, number, number, st.integers(1, MOST)),
    lambda inner: st.builds(
        ScanOption,
        numbers,
        whole,
        number,
        number,
        inner=st.lists(st.tuples(text, inner), max_size=2).map(tuple),
    ),
    max_leaves=4,
)


@st.composite
def recomputations(draw: st.DrawFn) -> tuple[Recomputation, ...]:
    places = draw(st.lists(st.integers(21, 29), max_size=3, unique=True))
    again = st.lists(st.integers(0, 20), min_size=1, max_size=4).map(tuple)
    values = st.lists(text, max_size=2).map(tuple)
    return tuple(Recomputation(at, draw(again), draw(values), draw(text)) for at in places)


@st.composite
def whole_steps(draw: st.DrawFn) -> WholeStep:
    bodies = st.builds(BodyPlan, text, st.just(30), st.just((*range(21),)), recomputations())
    kind = draw(st.sampled_from(("", "ordered", "separated")))
    return WholeStep(
        30,
        (*range(21),),
        draw(recomputations()),
        draw(st.booleans()),
        tuple(draw(st.lists(st.tuples(text, scans), max_size=2))),
        tuple(draw(st.lists(bodies, max_size=2))),
        kind == "ordered",
        draw(numbers),
        separated=kind == "separated",
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    is_verified = draw(st.booleans())
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
        tuple(draw(st.lists(st.builds(Attempt, whole, whole, number, number), max_size=3))),
        is_verified,
        draw(text),
        draw(whole),
        draw(number),
        draw(st.none() | whole_steps()),
        marked=tuple(draw(st.lists(text, max_size=2))),
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
def test_any_plan_prints_as_printable_text(plan: Plan) -> None:
    lines = [str(plan), *plan.explain().splitlines()]
    assert all(line.isprintable() for line in lines)
    assert all(line.encode() for line in lines if line)


def test_the_file_holds_one_recomputation_loop_and_body_a_line() -> None:
    lines = TEXT.splitlines()
    for part in ('"before": 9', '"before": 12', '"id": "7-11"', '"id": "13.0/"'):
        assert sum(part in line for line in lines) == 1
    assert not any('"before": 9' in line and '"before": 12' in line for line in lines)


def test_plans_of_an_earlier_version_are_refused_with_the_advice_to_plan_again() -> None:
    old = TEXT.replace('"version": 3', '"version": 2')
    with pytest.raises(PlanError, match=r"a plan of version 2, .* reads version 3\. Plan again\."):
        Plan.from_json(old)
    newer = TEXT.replace('"version": 3', '"version": 4')
    with pytest.raises(PlanError, match="Load it with the remat that wrote it"):
        Plan.from_json(newer)


def test_offloaded_values_are_named_and_counted() -> None:
    text = PLAN.explain()
    assert "host memory  144 B; of the extra time 250.0 ns for copies there and back" in text
    assert "64 B in all and 144 B in the host's memory" in text


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
    "recomputed": ("[5, 6]", "[5]"),
    "before": ('"before": 9', '"before": 8'),
    "group": ('"group": 4', '"group": 2'),
    "kept": ('"saved": [1, 5]', '"saved": [1]'),
    "offloaded": ('"offloaded": [5]', '"offloaded": []'),
    "marked": ('["loss"]', "[]"),
    "host": ('"host_bytes": 144,\n', '"host_bytes": 0,\n'),
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
    edited = TEXT.replace(old, new)
    plan = Plan.from_json(edited)
    assert not plan.is_verified
    assert plan.peak_bytes is None
    assert edit in ("peak", "no peak") or plan != unverified(PLAN)
    assert "not verified" in plan.explain()
    assert "not verified" in str(plan)
    # Saving it again does not make it verified.
    assert Plan.from_json(plan.to_json()) == plan


def test_loops_whose_last_steps_choose_otherwise_inside_are_read() -> None:
    branch = ("7-9/2-3.0", ScanOption((4,), 16, 1e-7, 10.0))
    loop = ("7-9", ScanOption((1, 5), 64, 1e-6, 100.0, 1, 3, (1,), (branch,), (branch,)))
    plan = dataclasses.replace(PLAN, whole_step=WholeStep(20, (), (), False, (loop,)))
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert text.count('"rest": [1]') == 1
    with pytest.raises(PlanError, match="value 1 is listed twice"):
        Plan.from_json(text.replace('"rest": [1]', '"rest": [1, 1]'))


def test_an_edited_file_loads_with_the_edited_value() -> None:
    plan = Plan.from_json(TEXT.replace("[5, 6]", "[5, 6, 4]").replace('"group": 4', '"group": 8'))
    assert plan.whole_step is not None
    assert plan.whole_step.recomputations[0].again == (5, 6, 4)
    assert plan.whole_step.loops[0][1].group == 8
    assert plan.n_recomputed == PLAN.n_recomputed + 1


def test_a_verified_mark_that_is_made_up_verifies_nothing() -> None:
    mark = json.loads(TEXT)["verified"]
    for other in ('"yes"', '""', "null"):
        assert Plan.from_json(TEXT.replace(f'"{mark}"', other)) == unverified(PLAN)


# --------------------------------------------------------------------------------------------------
# Damaged files: (text in the file, its replacement, text on the line that is named, reason)

_SAVED = '{"number": 3, "type": "float32[8,16]", "bytes": 512'
_DAMAGED: dict[str, tuple[str, str, str, str]] = {
    "no format": (' "format": "remat plan",\n', "", "{", "no 'format'"),
    "no comma outside": ('16x16",\n', '16x16"\n', '"versions"', "',' or '}' was expected"),
    "another format": ('"remat plan"', '"remat report"', "remat report", "this is not a plan"),
    "format no text": ('"remat plan"', "[]", '"format"', "this is not a plan"),
    "newer": ('"version": 3', '"version": 4', '"version": 4', "version 4, and this remat reads"),
    "version true": ('"version": 3', '"version": true', '"version": true', "version True"),
    "version text": ('"version": 3', '"version": "1"', '"version"', "version '1'"),
    "no version": (' "version": 3,\n', "", "{", "version None"),
    "verified": ('"verified": ', '"verified": 3, "x": ', '"verified"', "unknown key 'x'"),
    "misspelt": ('"group"', '"gruop"', '"gruop"', "did you mean 'group'?"),
    "misspelt outside": ('"budget_bytes"', '"buget_bytes"', "buget", "did you mean 'budget_bytes'?"),
    "missing": (' "budget_bytes": 4096,\n', "", "{", "'budget_bytes' is missing"),
    "key twice outside": (
        "\n \"flops\": ",
        "\n \"seconds\": 1,\n \"flops\": ",
        " \"seconds\": 0.0001",
        "second time",
    ),
    "version twice": ('{"jax": ', '{"jax": "1",\n "jax": ', '"jax": "0.10.2"', "given twice"),
    "key no text": ('"group": 4', "group: 4", "group: 4", "not JSON"),
    "group 0": ('"group": 4', '"group": 0', '"group": 0', "at least 1"),
    "negative flops": ('"flops": 1000000.0', '"flops": -1.0', "-1.0", "flops must be"),
    "huge time": ('"seconds": 0.0001', '"seconds": 1e31', "1e31", "seconds must be"),
    "infinite": ('"seconds": 0.0001', '"seconds": 1e999', "1e999", "seconds must be"),
    "huge whole time": ('"seconds": 0.0001', f'"seconds": {10**400}', "0" * 400, "seconds must be"),
    "NaN": ('"seconds": 0.0001', '"seconds": NaN', "NaN", "NaN is not a JSON number"),
    "true": ('"group": 4', '"group": true', '"group": true', "group must be a whole number"),
    "true as time": ('"seconds": 0.0001', '"seconds": true', " true", "seconds must be a number"),
    "part": ('"group": 4', '"group": 4.0', '"group": 4.0', "group must be a whole number"),
    "null": ('"group": 4', '"group": null', '"group": null', "group must be"),
    "peak no number": ('"peak_bytes": 4000', '"peak_bytes": "4KB"', "4KB", "peak_bytes must be"),
    "version no text": ('"jaxlib": "0.10.2"', '"jaxlib": 0.1', '"jaxlib"', "versions must be a string"),
    "versions no object": ('{"jax": "0.10.2", "jaxlib": "0.10.2"}', "[]", '"versions"', "an object"),
    "list for a number": ('"group": 4', '"group": [4]', '"group": [4]', "group must be"),
    "deep": ("[5, 6]", "[" * 100_000, "[[", "nested too deeply"),
    "deep objects": ("[5, 6]", '{"a":' * 100_000, '{"a":{', "nested too deeply"),
    "deep and closed": ("[5, 6]", "[" * 100_000 + "]" * 100_000, "[[", "nested too deeply"),
    "syntax": ('"group": 4', '"group": 4,,', '"group": 4', "not JSON"),
    "unknown": ('"attempts": [', '"lambda": 3,\n "attempts": [', '"lambda"', "unknown key 'lambda'"),
    "missing inside": ('"before": 9, ', "", "[5, 6]", "'before' is missing"),
    "stored twice": ("[3, 4, 5,", "[3, 3, 5,", "[3, 3", "equation 3 is listed twice"),
    "not stored": ("[5, 6]", "[5, 7]", "[5, 7]", "equation 7 is recomputed but not among"),
    "too late": ('"before": 9', '"before": 6', '"before": 6', "has not been computed before"),
    "beyond": ('"before": 12', '"before": 20', '"before": 20', "has no equation 20"),
    "two before": ('"before": 12', '"before": 9', '"again": [3]', "two recomputations are before"),
    "nothing again": ('"again": [3]', '"again": []', '"again": []', "no equation to recompute"),
    "negative": ("[5, 6]", "[5, -6]", "-6", "in again must be"),
    "no list": ("[5, 6]", "5", '"again": 5', "again must be a list"),
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
    "not UTF-8": (TEXT.encode().replace(b"block_0", b"bl\xffck_0"), line_of("block_0")),
    "UTF-16": (TEXT.encode("utf-16"), 1),
}


@pytest.mark.parametrize("case", _NO_PLANS)
def test_an_invalid_plan_is_an_error_that_names_the_line(tmp_path: Path, case: str) -> None:
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
    hostile = TEXT.replace('"f32[8] sin"', json.dumps(code)).replace(
        '"tpu:v5e:16x16"', json.dumps("\x1b[2J")
    )
    path.write_text(hostile)
    plan = Plan.load(path)
    assert plan.whole_step is not None
    assert plan.whole_step.recomputations[0].values[1] == code
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
        (PLAN, {"marked": (3,)}),
        (PLAN, {"versions": (("jax",),)}),
        (WHOLE, {"n_equations": 5}),
        (WHOLE, {"stored": (3, 4)}),
        (WHOLE.recomputations[0], {"again": ()}),
        (WHOLE.loops[0][1], {"group": 0}),
    ]
    for data, change in wrong:
        with pytest.raises(PlanError):
            dataclasses.replace(data, **change)


def test_lists_and_whole_numbers_are_converted_to_their_annotations() -> None:
    made = dataclasses.replace(PLAN, attempts=[*PLAN.attempts], flops=10**6)  # type: ignore[arg-type]
    assert made == PLAN
    assert type(made.flops) is float
    assert hash(made) == hash(PLAN)


def test_totals_count_saved_and_recomputed_values() -> None:
    assert PLAN.saved_bytes == 64 + 144
    assert PLAN.n_recomputed == 4
    assert PLAN.extra_flops_share == pytest.approx(0.02)
    assert dataclasses.replace(PLAN, flops=0.0).extra_flops_share == 0


def test_an_explanation_of_many_places_stays_short() -> None:
    again = tuple(Recomputation(100 + i, (i,), (f"f32[{i}] sin",)) for i in range(50))
    many = WholeStep(200, (*range(50),), again)
    explanation = dataclasses.replace(PLAN, whole_step=many).explain()
    assert "recomputes 50 of its 200 operations, in 50 places" in explanation
    assert "and 42 more places" in explanation
    assert len(explanation.splitlines()) < 35


def test_an_explanation_says_what_is_computed_wherever_it_is_read() -> None:
    for kind in ("ordered", "separated"):
        whole = WholeStep(200, (*range(50),), (), **{kind: True})
        explanation = dataclasses.replace(PLAN, whole_step=whole).explain()
        assert "150 operations whose results are not kept in memory" in explanation
    assert "wherever" not in dataclasses.replace(PLAN, whole_step=WholeStep(9, (), ())).explain()


def test_an_explanation_says_what_was_asked_and_reached() -> None:
    explanation = PLAN.explain()
    for part in (
        "tpu:v5e:16x16",
        "budget 4.0 KiB",
        "3.9 KiB, confirmed by the compiler",
        "predicted 3.7 KiB, compiler 4.1 KiB",
        "2.0 % of 1.00 MFLOP",
        "lower bound with the same loops 500.0 ns",
        "only inside of loss (remat.auto)",
        "the loop 7-11 keeps 2 values of each step, in groups of 4 steps",
    ):
        assert part in explanation
    beyond = dataclasses.replace(PLAN, budget_bytes=3999)
    assert "more than the budget" in beyond.explain()


def test_a_file_that_is_not_regular_is_an_error_without_waiting(tmp_path: Path) -> None:
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
