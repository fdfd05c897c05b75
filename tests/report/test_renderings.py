"""Text, Markdown, HTML, traces and figures: their content, and that no text can break them."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import pathlib
import re
import sys

import pytest
import rich.console
import samples
from hypothesis import given, settings
from strategies import HOSTILE, explanations

import remat.report
from remat import units
from remat.errors import MissingExtraError, ReportError
from remat.printing import printable
from remat.report import (
    Decision,
    Explanation,
    Finding,
    LoopPart,
    Memory,
    Option,
    ParetoPoint,
    PlannedLoop,
    PlanSummary,
    Step,
    Totals,
    Value,
)  # fmt: skip
from remat.report.document import Chart, Paragraph, Table
from remat.report.markdown import to_markdown
from remat.report.outline import decisions_table
from remat.report.text import renderable, to_text
from remat.report.timeline import timeline
from remat.units import format_bytes

EXPLANATION = samples.transformer(4)
VOID = {"meta", "link", "br", "input", "img", "wbr"}


class Page(html.parser.HTMLParser):
    """Parse the elements, attributes and texts of a page, and check that each opened element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.is_broken = False
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.is_broken = tag == "wbr"  # a place where a line may be broken, in one text
        if self.is_broken:
            return
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        parts = self.texts.setdefault(self.open[-1] if self.open else "", [])
        if self.is_broken and parts:
            parts[-1] += data
        else:
            parts.append(data)
        self.is_broken = False


def visible(page: Page) -> str:
    return " ".join(
        t for tag, parts in page.texts.items() if tag not in ("script", "style") for t in parts
    )


def shape(page: Page) -> list[str]:
    return [tag for tag, _ in page.elements]


def harmless(explanation: Explanation) -> Explanation:
    """Return the explanation with every text replaced by letters."""

    def clean(item):
        if isinstance(item, str):
            return "x" if item else item
        if isinstance(item, tuple):
            return tuple(clean(part) for part in item)
        if dataclasses.is_dataclass(item):
            words = {"kind", "first_kind", "phase", "severity", "action", "precision"}
            changes = {
                f.name: clean(getattr(item, f.name))
                for f in dataclasses.fields(item)
                if f.name not in words
            }
            return dataclasses.replace(item, **changes)
        return item

    return clean(explanation)


@given(explanations())
@settings(max_examples=40)
def test_no_text_becomes_markup_in_the_page(explanation):
    page = Page(explanation.to_html())
    assert shape(page) == shape(Page(harmless(explanation).to_html()))
    data = json.loads(page.texts["script"][0])
    texts = set(data["strings"])
    for value in explanation.values:
        assert printable(value.source) in texts
        assert printable(value.aval) in texts
    for finding in explanation.findings:
        assert printable(finding.message) in visible(page) or not finding.message


@given(explanations())
@settings(max_examples=40)
def test_no_text_becomes_markup_in_a_notebook(explanation):
    fragment = explanation._repr_html_()
    page = Page(fragment)
    assert "script" not in shape(page)
    assert {tag for tag, _ in page.elements} <= {
        "div", "style", "h1", "h2", "p", "bdi", "b", "br", "small", "code", "table", "thead", "tbody",
        "tr", "th", "td", "pre", "ul", "li", "svg", "path", "span", "i", "rect", "title", "circle", "text",
    }  # fmt: skip
    assert not [
        name for _, attributes in page.elements for name in attributes if name.startswith("on")
    ]


@given(explanations(), explanations())
@settings(max_examples=25)
def test_no_text_becomes_markup_in_a_difference(a, b):
    page = Page(a.diff(b).to_html())
    assert "script" not in shape(page)
    a.diff(b).to_markdown()
    str(a.diff(b))


@given(explanations())
@settings(max_examples=40)
def test_texts_hold_no_control_characters_and_can_be_written(explanation):
    for text in (
        str(explanation),
        explanation.to_markdown(),
        explanation.to_html(),
        explanation.to_trace(),
    ):
        text.encode("utf-8")
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


@pytest.mark.parametrize("text", HOSTILE)
def test_terminal_markup_is_shown_as_it_is(text):
    said = to_text([Paragraph(text)], width=1000)
    assert said.strip() == printable(text).strip()


def test_the_page_refers_to_nothing_outside():
    page = Page(EXPLANATION.to_html())
    for tag, attributes in page.elements:
        assert attributes.get("src") is None
        if "href" in attributes:
            assert attributes["href"].startswith(("#", "data:")), (tag, attributes)
    assert "url(" not in "".join(page.texts["style"])
    policy = [
        a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy and policy[0].startswith("default-src 'none'")


def test_the_page_of_5000_values_stays_below_2_mib():
    explanation = samples.of_size(5000)
    assert len(explanation.values) >= 5000
    assert len(explanation.to_html().encode()) < 2 * 2**20


def test_the_page_keeps_the_peak_of_a_thinned_chart():
    explanation = samples.of_size(20_000)
    data = json.loads(Page(explanation.to_html()).texts["script"][0])
    assert len(data["chart"]["at"]) < len(explanation.steps)
    assert data["peak"] in data["chart"]["at"]
    sums = [sum(column) for column in zip(*data["chart"]["live"])]
    assert max(sums) == explanation.totals.predicted.peak_bytes


def test_the_table_counts_what_the_page_leaves_out(monkeypatch):
    monkeypatch.setattr("remat.report.payload.MOST_VALUES", 10)
    monkeypatch.setattr("remat.report.html.MOST_VALUES", 10)
    page = Page(EXPLANATION.to_html())
    data = json.loads(page.texts["script"][0])
    assert unpacked(data["groups"]["count"], sum) == len(EXPLANATION.values)
    assert unpacked(data["groups"]["shown"], sum) == 10
    assert "lists the 10 largest" in visible(page)


def unpacked(column, then):
    if isinstance(column, dict):
        runs = column["runs"]
        column = [x for x, n in zip(runs[::2], runs[1::2]) for _ in range(n)]
    return then(column)


def test_text_says_the_headline_findings_peak_and_groups():
    said = " ".join(EXPLANATION.to_text(width=200).split())
    for part in (
        "Peak ", " compiled, predicted ", "→ Write 'attn_out'",
        "4 × decoder/block_0…3/mlp/gelu", "The peak of ", "block_3", "this plan (this one)",
    ):  # fmt: skip
        assert part in said, part


def test_rich_prints_it_with_colours_at_the_terminals_width():
    console = rich.console.Console(
        width=70, force_terminal=True, color_system="standard", _environ={}
    )
    with console.capture() as captured:
        console.print(EXPLANATION)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", captured.get())
    assert "\x1b[" in captured.get()
    assert max(map(len, plain.splitlines())) <= 70


def test_the_chart_marks_one_column_where_a_loop_reserves_the_same_in_all_of_its_steps():
    values = [
        Value(0, "argument", "f32[256]", 1024, ((0, 9),)),
        Value(1, "saved", "f32[256]", 1024, ((2, 2),), reserved=((0, 1), (3, 9))),
    ]
    steps = [Step(str(i), "backward", 1.0) for i in range(10)]
    console = rich.console.Console(
        width=70, force_terminal=True, color_system="standard", _environ={}
    )
    with console.capture() as captured:
        console.print(renderable([Chart(timeline(values, steps), tuple(steps))]))
    rows = [row for row in captured.get().splitlines() if "┤" in row]
    assert [row.count("\x1b[1;31m") for row in rows][-1] == 1


def test_markdown_tables_have_as_many_cells_in_every_row():
    for explanation in (EXPLANATION, samples.hostile()):
        blocks = explanation.to_markdown().split("\n\n")
        tables = [block.strip().splitlines() for block in blocks if block.startswith("| ")]
        assert len(tables) >= 4
        for table in tables:
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1


@pytest.mark.parametrize(
    "text, said",
    [
        ("- no list", r"\- no list"), ("12. no list", r"12\. no list"), ("# no heading", r"\# no heading"),
        ("3.5 GiB of snake_case", "3.5 GiB of snake_case"), ("_x_ <b> a|b", r"\_x\_ \<b\> a\|b"),
    ],
)  # fmt: skip
def test_markdown_escapes_what_would_be_markup_and_nothing_else(text, said):
    assert to_markdown([Paragraph(text)]) == said + "\n"


def test_the_trace_has_steps_counters_and_lifetimes():
    events = json.loads(EXPLANATION.to_trace())["traceEvents"]
    by_phase = {ph: [e for e in events if e["ph"] == ph] for ph in "MXCbe"}
    assert len(by_phase["X"]) == len(EXPLANATION.steps)
    assert len(by_phase["b"]) == len(by_phase["e"]) > 200
    peak = max(sum(event["args"].values()) for event in by_phase["C"])
    assert peak == EXPLANATION.totals.predicted.peak_bytes
    assert by_phase["X"][0]["ts"] == 0
    for event, after in zip(by_phase["X"], by_phase["X"][1:]):
        assert after["ts"] == pytest.approx(event["ts"] + event["dur"], abs=0.01)


def test_difference_names_what_has_another_fate():
    after = samples.transformer(4, save_attention=False)
    change = EXPLANATION.diff(after)
    assert {(old.kind, new.kind) for old, new in change.changed} == {("saved", "recomputed")}
    assert len(change.changed) == 4 and not change.appeared and not change.vanished
    assert change.saved_bytes == -4 * 8 * 1024 * 1024 * 2
    assert "saved → recomputed" in str(change) and "attn/out" in change.to_markdown()
    assert not EXPLANATION.diff(EXPLANATION)
    assert "Nothing differs." in str(EXPLANATION.diff(EXPLANATION))


def test_difference_pairs_every_value_once():
    a, b = samples.transformer(3), samples.transformer(5, save_attention=False)
    change = a.diff(b)
    assert len(a.values) - len(change.vanished) == len(b.values) - len(change.appeared)
    assert len(b.diff(a).appeared) == len(change.vanished)
    assert b.diff(a).saved_bytes == -change.saved_bytes


def test_an_explanation_without_timeline_has_every_rendering():
    bare = Explanation("bare", values=EXPLANATION.values[:0])
    for text in (
        str(bare),
        bare.to_markdown(),
        bare.to_html(),
        bare.to_trace(),
        bare._repr_html_(),
    ):
        assert "bare" in text


def test_plot_is_a_figure_with_every_kind():
    pytest.importorskip("matplotlib")
    for explanation in (EXPLANATION, samples.hostile(), Explanation("bare")):
        figure = explanation.plot()
        figure.canvas.draw()
    labels = [text.get_text() for text in EXPLANATION.plot().legends[0].get_texts()]
    assert {"argument", "saved", "recomputed", "gradient"} <= set(labels)
    phases = [label for label in labels if label.endswith(" (below)")]
    assert phases[0] == "forward (below)" and labels[-len(phases) :] == phases


def test_plot_without_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "remat.report.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'remat\[report\]'"):
        EXPLANATION.plot()


@pytest.mark.parametrize(
    "name, start",
    [
        ("a.html", "<!doctype html>"), ("a.json", '{"format": "remat.explanation"'), ("a.md", "# train"),
        ("a.txt", "train_step"), ("a.trace.json", '{"traceEvents"'), ("A.HTML", "<!doctype html>"),
    ],
)  # fmt: skip
def test_save_chooses_by_the_name(tmp_path, name, start):
    path = tmp_path / name
    path.write_text("old")
    assert EXPLANATION.save(path) == path
    assert path.read_text(encoding="utf-8").startswith(start)
    assert list(tmp_path.iterdir()) == [path]


def test_load_reads_what_save_wrote(tmp_path):
    explanation = samples.hostile()
    assert Explanation.load(explanation.save(tmp_path / "a.json")) == explanation
    for name, content in (("b.json", b"\xff"), ("c.json", b"{}")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ReportError, match=name):
            Explanation.load(tmp_path / name)
    with pytest.raises(ReportError, match="cannot be read"):
        Explanation.load(tmp_path / "missing.json")


def test_save_refuses_other_names_and_leaves_an_old_file_alone(tmp_path, monkeypatch):
    with pytest.raises(ReportError, match=r"\*\.trace\.json"):
        EXPLANATION.save(tmp_path / "a.pdf")
    with pytest.raises(ReportError, match="cannot be written"):
        EXPLANATION.save(tmp_path / "missing" / "a.md")
    old = tmp_path / "a.md"
    old.write_text("old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(ReportError, match="No space left"):
        EXPLANATION.save(old)
    assert old.read_text() == "old" and list(tmp_path.iterdir()) == [old]


def test_the_page_names_the_version_of_what_is_not_ours():
    static = pathlib.Path(remat.report.__file__).parent / "static"
    version = re.search(r"uPlot \(v([0-9.]+)\)", (static / "uPlot.iife.min.js").read_text())[1]
    assert f"uPlot {version}, MIT" in (static / "README.md").read_text()
    assert "Permission is hereby granted" in EXPLANATION.to_html()


def test_a_notebook_shows_the_picture_before_the_tables_with_axes_phases_and_the_peak():
    fragment = EXPLANATION._repr_html_()
    picture, table = fragment.index("<svg"), fragment.index("<table")
    assert picture < table
    drawn = fragment[picture : fragment.index("</svg>")]
    line = EXPLANATION.timeline()
    assert f"peak {format_bytes(line.peak_bytes)}" in drawn
    assert f">{format_bytes(line.peak_bytes)}</text>" in drawn  # the axis
    assert "(predicted)</text>" in drawn
    assert {"forward", "backward"} <= set(re.findall(r"<title>(\w+)</title>", drawn))


def recomputing() -> Explanation:
    """Return the sample with all saved values recomputed."""
    values = tuple(
        dataclasses.replace(v, kind="recomputed") if v.kind == "saved" else v
        for v in EXPLANATION.values
    )
    return dataclasses.replace(EXPLANATION, title="other", values=values)


def test_a_comparison_draws_both_steps_and_sorts_changes_by_bytes():
    change = EXPLANATION.diff(recomputing())
    page = change.to_html()
    assert page.count('fill="none" stroke=') == 2
    legend = page.partition("</svg>")[2]
    assert f"before: {EXPLANATION.title}" in legend and "after: other" in legend
    assert max(n for _, n in change.curve_before) == EXPLANATION.timeline().peak_bytes
    first = change.to_text(width=200).partition("What changed")[2].partition("Before:")[0]
    rows = [row for row in first.splitlines() if "saved → recomputed" in row]
    shown = [
        units.parse_bytes(row.partition("recomputed")[2].split("  ")[1].strip(" -")) for row in rows
    ]
    assert shown and shown == sorted(shown, reverse=True)


def test_a_comparison_names_what_changed_before_its_picture():
    largest = max((v for v in EXPLANATION.values if v.kind == "saved"), key=lambda v: v.n_bytes)
    page = EXPLANATION.diff(recomputing()).to_html()
    before = page.partition("<svg")[0]
    assert "What changed" in before and "saved → recomputed" in before
    assert largest.source in before and largest.aval in before
    assert "The largest change:" in before and "are saved for the backward pass" in before


def test_values_of_another_size_are_said_to_grow_or_shrink():
    half = tuple(
        dataclasses.replace(v, n_bytes=v.n_bytes // 2, aval=f"half of {v.aval}")
        for v in EXPLANATION.values
    )
    smaller = dataclasses.replace(EXPLANATION, values=half)
    for change, word in (
        (EXPLANATION.diff(smaller), "shrank"),
        (smaller.diff(EXPLANATION), "grew"),
    ):
        said = change.to_text(width=240).partition("What changed")[2].partition("Before:")[0]
        assert re.search(rf"^\w+, {word} ", said, re.MULTILINE)
        assert "gone" not in said and "new" not in said
        assert "half of " in said and " → " in said


def test_codes_of_findings_are_for_programs():
    (finding, *_) = EXPLANATION.findings
    for text in (EXPLANATION.to_text(), EXPLANATION.to_markdown(), EXPLANATION._repr_html_()):
        assert finding.code not in text
    assert finding.code not in EXPLANATION.to_html().partition('id="data"')[0]
    assert finding.code in EXPLANATION.to_json()


def test_a_comparison_says_where_the_peaks_are_and_what_can_be_done_about_the_second():
    found = Finding("code", "warning", "what is so", "what to do")
    other = dataclasses.replace(EXPLANATION, findings=(found,), values=EXPLANATION.values[:-1])
    text = " ".join(EXPLANATION.diff(other).to_text(width=200).split())
    assert "Before: The peak of" in text and "After: The peak of" in text
    assert "what is so" in text and "what to do" in text
    assert other.diff(EXPLANATION).findings == EXPLANATION.findings


def test_points_too_close_for_their_numbers_are_drawn_small_and_the_chosen_one_is_not():
    points = tuple(ParetoPoint(1000 + i, 0.0, 1e-3, f"plan {i}", chosen=i == 2) for i in range(3))
    page = dataclasses.replace(EXPLANATION, pareto=points).to_html()
    drawn = re.findall(r'<span class="point([^"]*)"[^>]*>(\d*)</span>', page)
    assert [bool(number) for _, number in drawn].count(True) == 1
    assert all("small" not in classes for classes, number in drawn if number)
    assert all("chosen" in classes for classes, number in drawn if number)


def test_a_table_leaves_out_what_is_optional_where_there_is_no_room():
    wide, narrow = EXPLANATION.to_text(width=200), EXPLANATION.to_text(width=80)
    assert "source  recompute" in re.sub(" {2,}", "  ", wide)
    assert "source  recompute" not in re.sub(" {2,}", "  ", narrow)
    assert all(len(line) <= 80 for line in narrow.splitlines())


def test_a_long_path_in_a_table_is_broken_at_its_slashes():
    rows = (("saved", "flax/linen/normalization.py:205, from net.py:3"),)
    text = to_text([Table(("kind", "source"), rows, ())], width=30)
    assert [line.split()[-1] for line in text.splitlines()[2:]] == [
        "flax/linen/", "normalization.py:205,", "net.py:3",
    ]  # fmt: skip
    assert ":205," in to_text([Table(("kind", "source"), rows, ())], width=24).split()


def test_a_type_stands_below_its_value_where_a_row_does_not_fit_in_a_line():
    rows = (("saved", "block: exp of dot_product_attention", "f32[32,8,256,256]/8", "net.py:31"),)
    table = Table(("kind", "value", "type", "source"), rows, below=(2, 1))
    wide, narrow = to_text([table], width=100), to_text([table], width=50)
    assert wide.splitlines()[0].split() == ["kind", "value", "type", "source"]
    assert wide.splitlines()[2].endswith("f32[32,8,256,256]/8   net.py:31")
    assert "value, type" in narrow
    lines = [line.strip() for line in narrow.splitlines()]
    assert lines[-1] == "f32[32,8,256,256]/8"
    assert "dot_product_attention" in narrow


def test_long_module_paths_of_a_plan_are_not_broken_within_a_word_at_80_columns():
    path, source = "ViT/block_0…5/MultiHeadDotProductAttention_0", "flax/linen/normalization.py:223"
    value, from_ = f"{path}: div of softmax", f"{source}, from vit.py:7"
    decision = Decision("recompute", value, "f32[8,4,144,144]", from_, 6, 2**20)
    table = decisions_table(dataclasses.replace(EXPLANATION, decisions=(decision,)), 6)
    lines = to_text([table], width=80).splitlines()
    for name in ("MultiHeadDotProductAttention_0", source):
        assert any(name in line for line in lines)


def test_a_prediction_that_is_off_by_a_tenth_is_said_to_be():
    step = Step("a: dot", "forward", 1.0)
    values = (Value(0, "saved", "f32[25]", 100, ((0, 0),)),)

    def brief(compiled_bytes):
        totals = Totals(Memory(100), Memory(compiled_bytes), "The compiler holds 7 more arrays.")
        made = Explanation("step", values=values, steps=(step,), totals=totals)
        said = "The timeline and its values are the prediction."
        assert (said in made.to_html()) == (said in " ".join(made.to_text(brief=True).split()))
        return made.to_text(brief=True)

    assert "7 more arrays" in brief(150) and "7 more arrays" in brief(80)
    assert "7 more arrays" not in brief(105)


def test_counts_have_separators_of_thousands():
    values = tuple(Value(i, "saved", "f32[2]", 8, ((0, 0),), path="rhs") for i in range(1000))
    assert str(Explanation("step", values=values, steps=(Step("a", "forward"),)).groups()[0]) == (
        "1,000 × rhs  f32[2]  7.8 KiB"
    )


def test_a_peak_in_the_forward_pass_has_its_reason():
    steps = tuple(Step(f"mlp_{i}: dot", "forward", 1.0) for i in range(4))
    steps += (Step("mlp_3: dot", "backward", 1.0),)

    def said(*values):
        return " ".join(Explanation("step", values=values, steps=steps).to_text().split())

    saved = Value(0, "saved", "f32[3]", 12, ((0, 4),))
    small, large = (
        Value(1, "temporary", f"f32[{n}]", 4 * n, ((3, 3),)) for n in (1, 10)
    )  # of a kernel near the end of the backward pass
    held = (
        "100 % of what the forward pass saves is held there, and the backward pass, which frees it"
    )
    assert held in said(saved, small)
    assert "More than half of it is temporaries" in said(saved, large)


def test_the_platform_is_not_said_twice():
    text = Explanation("step", platform="cpu", target="cpu, bytes per device").to_text()
    assert "cpu, bytes per device" in text and "cpu · cpu" not in text


def test_a_step_in_a_layer_of_equinox_is_placed_in_the_users_module():
    source = "equinox/nn/_conv.py:238 (Conv.__call__), from net.py:24 (ResBlock.__call__)"
    steps = (Step("eqx.nn.Conv: conv", "forward", 1.0, source),)
    made = Explanation("step", values=(Value(0, "saved", "f32[3]", 12, ((0, 0),)),), steps=steps)
    assert "in the forward pass of ResBlock" in " ".join(made.to_text().split())


def test_the_peak_is_placed_in_the_backward_pass_of_the_step_and_not_of_one_line():
    steps = [Step("a: dot", "forward", 1.0)] * 4
    steps += [Step(f"block_{i}: dot", "backward", 1.0) for i in range(20)]
    values = [
        Value(0, "saved", "f32[2]", 8, ((0, 5),)),
        Value(1, "gradient", "f32[1]", 4, ((5, 5),)),
    ]
    text = Explanation("step", values=tuple(values), steps=tuple(steps)).to_text()
    said = " ".join(text.split())
    assert "the gradient of block_1, at the start of the step's backward pass" in said
    assert "Live there: 8 B saved, 4 B gradients. The largest:" in said


def test_a_plan_is_said_by_its_peaks_its_budget_and_its_loops():
    loops = (
        PlannedLoop(
            "cell", "net.py:57", 512,
            (LoopPart(1, 96, 32, ("cell: mul",), 2**20), LoopPart(97, 512, 0, ("cell: tanh",), 2**24)),
        ),
    )  # fmt: skip
    explanation = Explanation(
        "step",
        decisions=(Decision("recompute", "cell: mul", n_bytes=2**25, flops=3.0),),
        totals=Totals(Memory(2**27), Memory(2**26), flops=100.0, recompute_flops=2.0),
        plan=PlanSummary(2**26 + 2**20, 2**26, 2**28, loops),
    )
    for said in (explanation.to_text(), explanation.to_markdown(), _text_of_page(explanation)):
        said = " ".join(said.replace("\\", "").split())
        assert "Peak 256.0 MiB → 64.0 MiB (-192.0 MiB, -75 %)" in said
        assert "budget 65.0 MiB met, 1.0 MiB to spare" in said
        assert "1–96 are recomputed in 3 groups of 32" in said
        assert "97–512 keep 16.0 MiB (of each: cell: tanh)" in said
        assert "extra FLOPs" not in said


def _text_of_page(explanation):
    return "".join("".join(texts) for texts in Page(explanation.to_html()).texts.values())


def test_the_options_of_a_finding_are_code_to_copy_and_a_table_in_80_columns():
    options = (
        Option("as written", "", 2**28, extra_flops_share=0.0),
        Option("remat.fit", 'step = remat.fit(step, budget="55%")', 2**27, "at most", 0.003, 0.04),
        Option("by hand", "# net.py:3\nblock = remat.checkpoint(block)", 2**26, "about", 0.0, 0.35),
    )
    found = Finding("no_regions", "info", "Nothing is rematerialized.", "Fit it.", options)
    explanation = Explanation("step", findings=(found,))
    text = explanation.to_text(width=80)
    assert max(map(len, text.splitlines())) <= 80
    for line in (
        '    step = remat.fit(step, budget="55%")',
        "    block = remat.checkpoint(block)",
    ):
        assert line in text.splitlines()
    assert re.search(r"remat\.fit +at most 128\.0 MiB +\+0\.3 to 4 %", text)
    assert re.search(r"by hand +about 64\.0 MiB +up to \+35 %", text)
    assert '```python\nstep = remat.fit(step, budget="55%")\n```' in explanation.to_markdown()
    for page in (explanation.to_html(), explanation._repr_html_()):
        assert "step = remat.fit(step, budget=&quot;55%&quot;)</code></pre>" in page
    assert Explanation.from_json(explanation.to_json()) == explanation


def test_a_height_that_is_reached_again_is_said_and_drawn():
    steps = [Step("loss: dot", "forward", 1.0)]
    steps += [Step("mlp: dot", "backward", 1.0, "", -1, f"iteration {i + 1}/9") for i in range(9)]
    values = [
        Value(i, "saved", "f32[1]", 64, ((0, 9 - i),), reserved=((10 - i, 9),) if i else ())
        for i in range(9)
    ]
    values += [
        Value(9 + i, "gradient", "f32[1]", 8, ((i, i),)) for i in (1, 3, 5, 7, 9)
    ]  # fmt: skip
    explanation = Explanation("step", values=tuple(values), steps=tuple(steps))
    said = " ".join(explanation.to_text().split())
    assert "The same height is reached 5 times from 1.0 s to 9.0 s into the step." in said
    assert "little by little" not in said
    assert "stay allocated as a whole until the backward loop has ended" in said
    data = json.loads(Page(explanation.to_html()).texts["script"][0])
    assert (data["peak"], data["sameHeight"]) == (1, [1, 9])


def test_an_upper_bound_is_said_to_be_one():
    totals = Totals(
        flops=1e9, time_s=1.0, at_most="the largest branch of each conditional is counted"
    )
    explanation = Explanation("step", totals=totals)
    said = " ".join(explanation.to_text().split())
    assert (
        "Step at most 1.0 s, 1.00 GFLOP (the largest branch" in said or "Step at most 1.0 s" in said
    )
    assert "Step, predicted, at most" in explanation.to_html()


def test_a_recomputed_value_is_temporary_before():
    steps = tuple(Step(str(i), phase, 1.0) for i, phase in enumerate(("forward", "recompute")))
    value = Value(0, "recomputed", "f32[2]", 8, ((0, 0), (1, 1)), first_kind="temporary")
    line = timeline([value], steps)
    assert line.bytes_of("temporary").tolist() == [8, 0]
    assert line.bytes_of("recomputed").tolist() == [0, 8]
    explanation = Explanation("step", values=(value,), steps=steps)
    assert [v.kind for step in (0, 1) for v in explanation.live_at(step)] == [
        "temporary",
        "recomputed",
    ]


def test_a_peak_says_why_it_is_there():
    steps = (Step("a", "forward"), Step("a", "backward"), Step("b", "backward"))
    saved = Value(0, "saved", "f32[8]", 32, ((0, 1),))
    gradient = Value(1, "gradient", "f32[2]", 8, ((1, 2),))
    argument = Value(2, "argument", "f32[99]", 396, ((0, 2),))
    said = Explanation("step", values=(saved, gradient), steps=steps).to_text(width=300)
    assert "100 % of what the forward pass saves is still held there" in said
    said = Explanation("step", values=(saved, gradient, argument), steps=steps).to_text(width=300)
    assert "More than half of it is arguments and results" in said


def test_two_plans_are_a_table_and_three_a_chart():
    points = [ParetoPoint(2**20 * i, 0.1, 1.0 / i, f"plan {i}", verified=True) for i in (1, 2, 3)]
    chart = '<div class="pareto"'
    assert chart not in Explanation("step", pareto=tuple(points[:2])).to_html()
    assert chart in Explanation("step", pareto=tuple(points)).to_html()


def test_a_comparison_says_that_less_is_donated():
    def step(alias_bytes):
        memory = Memory(300 - alias_bytes, 100, 100, 100, alias_bytes)
        return Explanation("step", totals=Totals(memory))

    said = " ".join(step(80).diff(step(0)).to_text().split())
    assert "rises from 220 B to 300 B (+80 B, predicted)." in said
    assert "80 B less of the results are in the memory of donated arguments." in said
    assert "donated" not in step(80).diff(step(80)).to_text()


def test_a_comparison_signs_its_bytes_and_marks_both_peaks():
    steps = (Step("a", "forward", 1.0), Step("b", "backward", 1.0))
    saved = Value(0, "saved", "f32[1024]", 4096, ((0, 1),), primitive="tanh", path="mlp")
    before = Explanation("before", values=(saved,), steps=steps)
    again = dataclasses.replace(saved, kind="recomputed", lifetimes=((0, 0), (1, 1)))
    change = before.diff(Explanation("after", values=(again,), steps=steps))
    assert re.search(r"saved → recomputed +-4.0 KiB", change.to_text(width=120))
    assert change.to_html().count("<circle") == 2
