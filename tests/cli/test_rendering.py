"""Files that are written, and how names and texts are printed."""

from __future__ import annotations

import os
import pathlib
import stat

import pytest
from click.testing import CliRunner

from remat.cli import main
from remat.cli.rendering import with_points, worth_choosing
from remat.report import Explanation, Finding, ParetoPoint


def test_a_device_or_link_as_output_stays_what_it_is(run, full_device):
    os.symlink("page.html", "link")
    pathlib.Path("page.html").write_text("old")
    os.chmod("page.html", 0o640)
    assert run("explain", "training:problem", "--no-compile", "--html", full_device).exit_code == 1
    assert stat.S_ISCHR(os.stat(full_device).st_mode)
    assert run("explain", "training:problem", "--no-compile", "--html", "link").exit_code == 0
    assert os.path.islink("link") and stat.S_IMODE(os.stat("page.html").st_mode) == 0o640
    assert pathlib.Path("page.html").read_text().startswith("<!doctype html>")
    assert not list(pathlib.Path().glob(".*"))


def test_a_full_device_is_an_error(run, full_device):
    result = run("explain", "training:problem", "--no-compile", "--html", full_device)
    assert result.exit_code == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("remat: ") and "No space left" in line


@pytest.mark.parametrize(
    "command",
    [["explain", "training:problem", "--no-compile"], ["report", "training:problem"]],
    ids=["explain", "report"],
)
def test_the_name_of_what_was_written_can_be_printed(run, command):
    name = "a\x1b[2J\u202e\udcff.html"
    result = run(*command, "--html", name)
    assert result.exit_code == 0, result.output
    lines = (result.stdout + result.stderr).splitlines()
    assert r"wrote a\x1b[2J\u202e\udcff.html" in lines
    assert all(line.isprintable() for line in lines)


def test_what_the_encoding_of_the_output_lacks_is_replaced(run, tmp_path):
    for command in (["explain", "training:problem", "--no-compile"], ["devices"]):
        result = CliRunner(charset="latin-1").invoke(main, command)
        assert result.exit_code == 0, result.output


def test_the_next_step_after_a_plan_is_a_listed_plan_with_a_lower_peak():
    found = Finding("follows_plan", "info", "The step follows a plan.", "try budget=8MiB")
    other = Finding("arguments_dominate", "info", "Arguments dominate.", "donate")
    explanation = Explanation("step", findings=(found, other))
    chosen = ParetoPoint(2**30, 0.01, 1e-3, "plan for 1GiB", verified=True, chosen=True)
    lowest = ParetoPoint(2**28, 0.2, 5e-3, "plan for 25%", verified=True)
    lower = ParetoPoint(2**29, 0.05, 2e-3, "plan for 50%", verified=True)
    first, second = with_points(explanation, [chosen, lowest, lower]).findings
    assert "plan for 50% has 512.0 MiB less, for 5.0 % more FLOPs" in first.next_step
    assert second == other
    assert with_points(explanation, [chosen]).findings == explanation.findings


def test_plans_that_another_beats_are_not_worth_choosing():
    chosen = ParetoPoint(2**30, 0.01, 2e-3, "plan for 70%", verified=True, chosen=True)
    beaten = ParetoPoint(2**29, 0.02, 3e-3, "plan for 50%", verified=True)
    best = ParetoPoint(2**28, 0.02, 2e-3, "plan for 40%", verified=True)
    without = ParetoPoint(2**31, 0.0, 0.0, "nothing rematerialized", verified=True)
    points = [without, chosen, beaten, best]
    assert {p.label for p, better in worth_choosing(points).items() if better} == {"plan for 50%"}
    found = Finding("follows_plan", "info", "The step follows a plan.", "")
    explanation = Explanation("step", findings=(found,))
    said = with_points(explanation, points, {"plan for 40%": "40%"}).findings[0].next_step
    assert (
        said == 'The plan for 40% has 768.0 MiB less, at no more time. Take it with budget="40%".'
    )
