"""The command `remat`: what it prints and writes, its exit codes, its errors."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from remat.cli import main
from remat.planner.plan_file import Plan
from remat.report import Explanation

TRAIN = """
import jax, jax.numpy as jnp, remat

w, x = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((2048, 64), jnp.float32)

def loss(w, x):
    for _ in range(4):
        x = jnp.tanh(remat.checkpoint_name(jnp.sin(x @ w), "hidden"))
    return jnp.sum(x)

def problem():
    return loss, (w, x)

def keywords():
    return loss, (w,), {"x": x}

def step():
    return jax.jit(jax.value_and_grad(loss)), (w, x)

def marked():
    return jax.value_and_grad(remat.auto(loss)), (w, x)

def checkpointed():
    return remat.checkpoint(loss), [w, x]

def needs(n):
    return loss, (w, x)

def wrong():
    return 3

def broken():
    raise ValueError("no data\\nat all")

def noisy():
    print("loading the data")
    return jax.jit(lambda w, x: (print("tracing"), loss(w, x))[1]), (w, x)

def leaves():
    raise SystemExit("usage: train.py")

number = 3
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("training", "train"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    pathlib.Path("training.py").write_text(TRAIN)

    def invoke(*arguments):
        return CliRunner().invoke(main, list(arguments))

    return invoke


def test_explain_prints_what_is_saved(run):
    result = run("explain", "training:problem")
    assert result.exit_code == 0, result.output
    assert "training:problem" in result.stdout
    assert "saved" in result.stdout
    assert "no_regions" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("name", ["training:step", "training.py:problem", "training:keywords"])
def test_steps_files_and_keyword_arguments_are_taken(run, name):
    result = run("explain", name, "--no-compile", "--json")
    assert result.exit_code == 0, result.output
    assert "backward" in {s.phase for s in Explanation.from_json(result.stdout).steps}


def test_what_the_users_code_prints_is_not_in_the_output(run):
    result = run("explain", "training:noisy", "--no-compile", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["title"] == "training:noisy"
    assert "loading the data" in result.stderr
    assert "tracing" in result.stderr


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


def test_costs_are_those_that_were_asked_for(run):
    for asked in ("roofline", "measured"):
        result = run("plan", "training:problem", "--budget", "100%", "--costs", asked)
        assert result.exit_code == 0, result.output
        assert f"({asked}); any plan" in result.stdout
    assert run("plan", "training:problem", "--costs", "mesured").exit_code == 2
    assert "--costs" in run("report", "--help").stdout


def test_a_budget_that_cannot_be_met_is_1_and_one_line(run):
    result = run("plan", "training:problem", "--budget", "1KiB")
    assert result.exit_code == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith("remat: ")
    assert "1.0 KiB" in result.stderr


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "training"], "MODULE:FUNCTION"),
        (["explain", "absent:problem"], "no module 'absent'"),
        (["explain", "absent.py:problem"], "no file"),
        (["explain", "training:problm"], "did you mean 'problem'"),
        (["explain", "training:number"], "no function"),
        (["explain", "training:needs"], "needs arguments (n)"),
        (["explain", "training:wrong"], "must return (step, args)"),
        (["explain", "training:problem", "--policy", "dots_savable"], "did you mean"),
        (["explain", "training:step", "--policy", "dots_saveable"], "needs the loss"),
        (["explain", "training:problem", "--budget", "50%", "--plan", "x"], "give one of"),
        (["explain"], "Missing argument"),
        (["explan"], "No such command"),
        (["--nothing"], "No such option"),
        (["plan", "training:problem", "-o", "absent/plan.json"], "there is no folder 'absent'"),
    ],
)
def test_a_wrong_command_line_is_2(run, arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("remat: ")
    assert line.endswith("--help.")
    assert said in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "training:broken"], "ValueError: no data at all"),
        (["explain", "training:leaves"], "called sys.exit('usage: train.py')"),
        (["explain", "training:problem", "--target", "gpu:h1000"], "there is no GPU 'h1000'"),
        (["compare", "absent.json", "training:problem"], "absent.json: cannot be read"),
        (["plan", "training:problem", "--budget", "many"], "no number of bytes"),
    ],
)
def test_other_errors_are_1_in_one_line(run, arguments, said):
    result = run(*arguments)
    assert result.exit_code == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("remat: ")
    assert said in line


def test_debug_shows_the_error_itself(run):
    result = run("explain", "training:broken", "--debug")
    assert isinstance(result.exception, ValueError)
    assert isinstance(run("--debug", "explain", "training:broken").exception, ValueError)


def test_help_has_examples_and_exit_codes(run):
    text = run("--help").stdout
    assert "remat plan train:problem --budget 8GiB -o plan.json" in text
    assert "Exit codes" in text
    for command in main.commands:
        assert command in text
        assert f"remat {command}" in run(command, "--help").stdout


def test_it_runs_as_a_module_in_the_current_directory(run, tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    out = subprocess.run(
        [sys.executable, "-m", "remat", "explain", "training:problem", "--no-compile"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert out.returncode == 0, out.stderr
    assert "training:problem" in out.stdout
    assert out.stderr == ""


def test_demo_shows_a_plan(run):
    result = run("demo", "--budget", "60%")
    assert result.exit_code == 0, result.output
    assert "recompute" in result.stdout
