"""The command `remat`: what it prints and writes, its exit codes, its errors."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import stat
import subprocess
import sys

import pytest
from click.testing import CliRunner

import remat_command
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

def hostile():
    raise ValueError("\\x1b]0;owned\\x07 \\x9b2J \\u202e\\u200b")

class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no words")

def silent():
    raise Silent

class Odd:
    def __repr__(self):
        return "\\x1b[2J"

class Worse:
    def __repr__(self):
        raise ValueError("\\x1b[2J")

def odd():
    return Odd()

def worse():
    return Worse()

def skipped():
    raise BaseException("not here")

def pipe():
    raise BrokenPipeError("of a data loader")

def interrupted():
    raise KeyboardInterrupt

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
        (["explain", "training:number"], "is not a function but int 3"),
        (["explain", "training:needs"], "needs arguments (n)"),
        (["explain", "training:wrong"], "must return (step, args)"),
        (["explain", "training:problem", "--policy", "dots_savable"], "did you mean"),
        (["explain", "training:step", "--policy", "dots_saveable"], "needs the loss"),
        (
            ["explain", "training:problem", "--budget", "50%", "--plan", "training.py"],
            "give one of",
        ),
        (["explain"], "Missing argument"),
        (["explan"], "No such command"),
        (["--nothing"], "No such option"),
        (["plan", "training:problem", "-o", "absent/plan.json"], "there is no folder 'absent'"),
        (["plan", "training:problem", "-o", ""], "the path is empty"),
        (["explain", "training:problem", "--html", "."], "'--html': '.' cannot be written: it is"),
        (["explain", "training:problem", "--html", "a\0b"], "NUL"),
        (["explain", "training:problem", "--html", "\ud800"], "cannot be written"),
        (["explain", "training:problem", "--plan", "absent"], "'--plan': 'absent' cannot be read"),
        (["explain", "training:problem", "--plan", "a\0b"], "NUL"),
        (["explain", "training:problem", "--plan", ""], "the path is empty"),
        (["explain", "training:problem", "--policy", "names:hiden"], "did you mean 'hidden'"),
        (["explain", "training:problem", "--target", "gpu:h1000"], "unknown GPU 'h1000'"),
        (["explain", "training:problem", "--target", "tpu:v5e:2"], "is not a shape of a TPU"),
        (["compare", "absent.json", "training:problem"], "'BEFORE': 'absent.json' cannot be read"),
        (["plan", "training:problem"], "--budget is needed"),
        (["plan", "training:problem", "--budget", "8GG"], "'--budget': '8GG' is not a number"),
        (["plan", "training:problem", "--budget", "0"], "at least 1 byte"),
        (["plan", "training:problem", "--budget", "1e400"], "8 PiB"),
        (["demo", "--budget", "9" * 5000], "8 PiB"),
        (["report", "training:problem", "--budgets", "50%, many"], "'--budgets': 'many' is not"),
        (["explain", "not-a-name:problem"], "cannot be a module"),
        (["explain", ".training:problem"], "cannot be a module"),
        (["explain", "a\0b.py:problem"], "no file"),
        (["explain", "training:Odd.problem"], "there is no function 'problem'"),
        (["explain", "training:odd"], "not Odd \\x1b[2J"),
        (["explain", "training:worse"], "not Worse <Worse>"),
        (["\x1b[2J"], "No such command"),
    ],
    ids=ascii,
)
def test_a_wrong_command_line_is_2(run, arguments, said):
    result = run(*arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("remat: ")
    assert line.endswith("--help.") and line.isprintable()
    assert said in line
    assert set(os.listdir()) <= {"training.py", "__pycache__"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "training:broken"], "ValueError: no data at all"),
        (["explain", "training:leaves"], "called sys.exit('usage: train.py')"),
        (["explain", "training:hostile"], r"ValueError: \x1b]0;owned\x07 \x9b2J \u202e\u200b"),
        (["explain", "training:silent"], "Silent"),
        (["explain", "training:skipped"], "BaseException: not here"),
        (["explain", "training:pipe"], "BrokenPipeError: of a data loader"),
        (["compare", "damaged.json", "training:problem"], "damaged.json: this is not JSON"),
        (["compare", "long.json", "training:problem"], "long.json: this is not JSON"),
        (["explain", "training:problem", "--plan", "damaged.json"], "damaged.json, line 1"),
        (["explain", "training:problem", "--no-compile", "--html", "full"], "No space left"),
    ],
    ids=ascii,
)
def test_other_errors_are_1_in_one_line(run, arguments, said):
    pathlib.Path("damaged.json").write_text("{\x1b")
    pathlib.Path("long.json").write_text('{"format": ' + "9" * 5000 + "}")
    if "full" in arguments:
        make_full_device()
    result = run(*arguments)
    assert result.exit_code == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("remat: ") and line.isprintable()
    assert said in line


def make_full_device():
    """A device like /dev/full, which nothing else on the machine uses."""
    try:
        os.mknod("full", 0o666 | stat.S_IFCHR, os.makedev(1, 7))
        open("full", "wb").close()
    except OSError:
        pytest.skip("no device can be made here")


def test_a_device_or_link_as_output_stays_what_it_is(run):
    make_full_device()
    os.symlink("page.html", "link")
    pathlib.Path("page.html").write_text("old")
    os.chmod("page.html", 0o640)
    assert run("explain", "training:problem", "--no-compile", "--html", "full").exit_code == 1
    assert stat.S_ISCHR(os.stat("full").st_mode)
    assert run("explain", "training:problem", "--no-compile", "--html", "link").exit_code == 0
    assert os.path.islink("link") and stat.S_IMODE(os.stat("page.html").st_mode) == 0o640
    assert pathlib.Path("page.html").read_text().startswith("<!doctype html>")
    assert not list(pathlib.Path().glob(".*"))


@pytest.mark.parametrize("arguments", [["explain", "{}", "--debug"], ["--debug", "explain", "{}"]])
def test_debug_shows_the_traceback_and_no_control_characters(run, arguments):
    result = run(*[a.format("training:hostile") for a in arguments])
    assert result.exit_code == 1
    assert result.stderr.startswith("Traceback") and "in hostile" in result.stderr
    assert all(line.isprintable() for line in result.stderr.splitlines())
    assert not result.stderr.splitlines()[-1].startswith("remat: ")


def test_the_name_of_what_was_written_can_be_printed(run):
    name = "a\x1b[2J\u202e\udcff.html"
    for command in ("explain", "report"):
        result = run(command, "training:problem", *NO_COMPILE[command], "--html", name)
        assert result.exit_code == 0, result.output
        lines = (result.stdout + result.stderr).splitlines()
        assert r"wrote a\x1b[2J\u202e\udcff.html" in lines
        assert all(line.isprintable() for line in lines)


NO_COMPILE = {"explain": ["--no-compile"], "report": []}


def test_a_budget_that_is_not_met_speaks_of_the_option(run):
    said = run("plan", "training:problem", "--budget", "1KiB").stderr
    assert "Raise --budget to" in said and "budget=" not in said


def test_what_the_encoding_of_the_output_lacks_is_replaced(run, tmp_path):
    for command in (["explain", "training:problem", "--no-compile"], ["devices"]):
        result = CliRunner(charset="latin-1").invoke(main, command)
        assert result.exit_code == 0, result.output


def test_an_interrupt_is_1_and_leaves_no_traceback_and_no_file(run):
    result = run("explain", "training:interrupted", "--html", "page.html")
    assert result.exit_code == 1
    assert result.stderr.strip() == "Aborted!"
    assert not {name for name in os.listdir() if "page" in name or "partial" in name}


_INTERRUPTED = """
import importlib.abc, os, signal, sys, time
import remat_command

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "jax":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

sys.meta_path.insert(0, Finder())
remat_command.main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to send")
def test_an_interrupt_while_jax_loads_ends_the_process_without_a_traceback():
    source = pathlib.Path(remat_command.__file__).parents[1]
    out = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(source)},
    )
    assert (out.returncode, out.stdout, out.stderr) == (-signal.SIGINT, "", "")


def test_the_script_runs_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["remat", "--version"])
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        remat_command.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("remat, version ")
    assert signal.getsignal(signal.SIGINT) is before


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
