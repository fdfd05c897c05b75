"""MODULE:FUNCTION and FILE.py:FUNCTION."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from remat.report import Explanation


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "training"], "MODULE:FUNCTION"),
        (["explain", "absent:problem"], "no module 'absent'"),
        (["explain", "absent.py:problem"], "no file"),
        (["explain", "training:problm"], "did you mean 'problem'"),
        (["explain", "training:number"], "is not a function but int 3"),
        (["explain", "training:needs"], "needs arguments (n)"),
        (["explain", "training:wrong"], "must return (step, args)"),
        (["explain", "not-a-name:problem"], "cannot be a module"),
        (["explain", ".training:problem"], "cannot be a module"),
        (["explain", "a\0b.py:problem"], "no file"),
        (["explain", "training:Odd.problem"], "there is no function 'problem'"),
        (["explain", "training:odd"], "not Odd \\x1b[2J"),
        (["explain", "training:worse"], "not Worse <Worse>"),
    ],
    ids=ascii,
)
def test_what_names_no_step_is_refused(refused, arguments, said):
    assert said in refused(*arguments)
