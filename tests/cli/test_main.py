"""The output and the files of each command."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from remat.cli import main
from remat.planner.plan_file import Plan
from remat.report import Explanation


def test_explain_prints_what_is_saved(run):
    result = run("explain", "training:problem")
    assert result.exit_code == 0, result.output
    assert "training:problem" in result.stdout
    assert "saved" in result.stdout
    assert "Nothing is rematerialized" in result.stdout
    assert result.stderr == ""


def test_policies_are_applied_by_name(run):
    explained = {
        policy: Explanation.from_json(
            run("explain", "training:problem", "--no-compile", "--json", "--policy", policy).stdout
        )
        for policy in ("nothing_saveable", "dots_saveable", "names:hidden")
    }
    saved = {policy: e.totals.residual_bytes for policy, e in explained.items()}
    assert saved["nothing_saveable"] == 0
    assert saved["dots_saveable"] == saved["names:hidden"] == 4 * 2048 * 64 * 4


def test_html_is_one_page(run):
    result = run("explain", "training:checkpointed", "--no-compile", "--html", "step.html")
    assert result.exit_code == 0
    assert pathlib.Path("step.html").read_text().startswith("<!doctype html>")
    assert "step.html" in result.stderr


@pytest.mark.parametrize("name", ["training:problem", "training:marked"])
def test_plan_meets_the_budget_and_is_written(run, name):
    result = run("plan", name, "--budget", "70%", "-o", "plan.json")
    assert result.exit_code == 0, result.output
    made = Plan.load("plan.json")
    assert made.peak_bytes <= 0.7 * made.peak_bytes_without_remat
    applied = run("explain", name, "--plan", "plan.json", "--json")
    assert Explanation.from_json(applied.stdout).totals.compiled.peak_bytes == made.peak_bytes


def test_kinds_of_offloaded_values_reach_the_planner(run):
    command = ("plan", "training:problem", "--budget", "100%", "--offload")
    assert run(*command, "activations").exit_code == 0
    result = run(*command, "activations,optimizer")  # a CPU has no other memory
    assert result.exit_code == 1
    assert "--offload optimizer needs memory of the host" in result.stderr


def test_costs_are_those_that_were_asked_for(run):
    for asked in ("roofline", "measured"):
        result = run("plan", "training:problem", "--budget", "100%", "--costs", asked)
        assert result.exit_code == 0, result.output
        assert f"({asked}); lower bound" in result.stdout
    assert run("plan", "training:problem", "--costs", "mesured").exit_code == 2
    assert "--costs" in run("report", "--help").stdout


def test_report_draws_the_choice_between_policies(run):
    result = run("report", "training:problem", "-o", "page.html")
    assert result.exit_code == 0, result.output
    assert "dots_with_no_batch_dims_saveable" in pathlib.Path("page.html").read_text()


def test_report_draws_the_curve_of_what_was_compiled(run):
    result = run(
        "report", "training:marked", "--budget", "70%", "--budgets", "85%, 1%", "-o", "page.html"
    )
    assert result.exit_code == 0, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("remat: no plan for 1%: no plan fits")
    page = pathlib.Path("page.html").read_text()
    rows = re.findall(r'<tr( class="chosen")?>.*?<th scope="row"><bdi>(.*?)</bdi>', page)
    labels = [label for _, label in rows]
    assert {"nothing rematerialized", "plan for 70%", "plan for 85%"} <= set(labels)
    assert [label for chosen, label in rows if chosen] == ["plan for 70%"]
    assert "whole loss" not in page


def test_compare_takes_steps_and_files(run):
    before = run("explain", "training:problem", "--no-compile", "--json").stdout
    pathlib.Path("before.json").write_text(before)
    result = run("compare", "before.json", "training:checkpointed", "--no-compile")
    assert result.exit_code == 0, result.output
    assert "saved" in result.stdout
    data = run("compare", "before.json", "training:checkpointed", "--no-compile", "--json")
    assert json.loads(data.stdout)["format"] == "remat.difference"


def test_devices_lists_figures(run):
    assert "tpu:v5e" in run("devices").stdout
    known = json.loads(run("devices", "--json").stdout)["known"]
    assert {"gpu:h100", "cpu"} <= {d["target"] for d in known}


def test_demo_shows_a_plan(run):
    result = run("demo", "--budget", "60%")
    assert result.exit_code == 0, result.output
    assert "recompute" in result.stdout


def test_help_has_examples_and_exit_codes(run):
    text = run("--help").stdout
    assert "remat plan train:problem --budget 8GiB -o plan.json" in text
    assert "Exit codes" in text
    for command in main.commands:
        assert command in text
        assert f"remat {command}" in run(command, "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "training:step", "--policy", "dots_saveable"], "needs the loss"),
        (
            ["explain", "training:problem", "--budget", "50%", "--plan", "training.py"],
            "give one of",
        ),
        (["explain"], "Missing argument"),
        (["explan"], "No such command"),
        (["--nothing"], "No such option"),
        (["explain", "training:problem", "--policy", "names:hiden"], "did you mean 'hidden'"),
        (["plan", "training:problem"], "--budget is needed"),
        (["\x1b[2J"], "No such command"),
    ],
    ids=ascii,
)
def test_a_command_line_that_makes_no_sense_is_refused(refused, arguments, said):
    assert said in refused(*arguments)


def test_explain_fits_80_columns_and_one_screen_unless_all_is_asked_for(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    brief = run("explain", "training:problem", "--no-compile").stdout
    assert all(len(line) <= 80 for line in brief.splitlines())
    assert len(brief.splitlines()) <= 45
    assert "--all" in brief
    full = run("explain", "training:problem", "--no-compile", "--all").stdout
    assert "Values" in full and "Values" not in brief
    assert len(full) > len(brief)


def test_rows_of_piped_tables_are_one_line_each(run, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    said = run("explain", "training:problem", "--no-compile", "--all").stdout
    rows = [line for line in said.partition("Values")[2].splitlines() if "f32[" in line]
    assert rows and all("iB " in row or " B " in row for row in rows)
    assert any(" loss: " in row and "training.py:8" in row for row in rows)


def test_plan_fits_the_columns_of_a_terminal(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    said = run("plan", "training:problem", "--budget", "70%").stdout
    assert "extra time" in said
    assert all(len(line) <= 70 for line in said.splitlines())


def test_plan_says_what_is_recomputed_in_the_words_of_the_model(run):
    said = run("plan", "training:problem", "--budget", "70%").stdout
    table = said.partition("What the plan does")[2]
    assert re.search(r"^recompute +\S+ [KM]iB +loss: .*training.py:8$", table, re.MULTILINE)
    assert re.search(r"^keep +\S+ [KM]iB ", table, re.MULTILINE)
    assert "operations" not in said and "equation" not in said


def test_plan_lists_equations_if_all_is_asked_for(run):
    said = run("plan", "training:problem", "--budget", "70%", "--all").stdout
    listed = said.partition("The same by equations, as in the file of the plan")[2]
    assert re.search(r"recomputes? \d+ of its \d+ operations|recomputes \S+ [kMG]?FLOP", listed)
    assert " more values" not in said


def test_demo_writes_a_page(run):
    result = run("demo", "--budget", "60%", "--html", "demo.html")
    assert result.exit_code == 0, result.output
    assert pathlib.Path("demo.html").read_text().startswith("<!doctype html>")
    assert "wrote demo.html" in result.stderr


def test_every_json_names_its_format_and_version(run):
    for arguments in (
        ["devices"],
        ["explain", "training:problem", "--no-compile"],
        ["compare", "training:problem", "training:checkpointed", "--no-compile"],
        ["plan", "training:problem", "--budget", "100%"],
    ):
        content = json.loads(run(*arguments, "--json").stdout)
        assert content["format"].startswith("remat")
        assert type(content["version"]) is int
