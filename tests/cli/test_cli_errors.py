"""Errors of the command line: exit codes, and messages of one line."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

import remat


def test_a_budget_that_cannot_be_met_is_1_and_one_line(run):
    result = run("plan", "training:problem", "--budget", "1KiB")
    assert result.exit_code == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith("remat: ")
    assert "1.0 KiB" in result.stderr


def test_a_budget_that_is_not_met_speaks_of_the_option(run):
    said = run("plan", "training:problem", "--budget", "1KiB").stderr
    assert "Raise --budget to" in said and "budget=" not in said


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
    ],
    ids=ascii,
)
def test_other_errors_are_1_in_one_line(run, arguments, said):
    pathlib.Path("damaged.json").write_text("{\x1b")
    pathlib.Path("long.json").write_text('{"format": ' + "9" * 5000 + "}")
    result = run(*arguments)
    assert result.exit_code == 1
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("remat: ") and line.isprintable()
    assert said in line


@pytest.mark.parametrize("arguments", [["explain", "{}", "--debug"], ["--debug", "explain", "{}"]])
def test_debug_shows_the_traceback_and_no_control_characters(run, arguments):
    result = run(*[a.format("training:hostile") for a in arguments])
    assert result.exit_code == 1
    assert result.stderr.startswith("Traceback") and "in hostile" in result.stderr
    assert all(line.isprintable() for line in result.stderr.splitlines())
    assert not result.stderr.splitlines()[-1].startswith("remat: ")


def test_an_interrupt_is_1_and_leaves_no_traceback_and_no_file(run):
    result = run("explain", "training:interrupted", "--html", "page.html")
    assert result.exit_code == 1
    assert result.stderr.strip() == "Aborted!"
    assert not {name for name in os.listdir() if "page" in name or "partial" in name}


def test_an_interrupted_process_ends_with_1_whatever_the_interpreter_would_do_at_its_end(tmp_path):
    text = "import atexit, os\natexit.register(os.abort)\ndef problem():\n    raise KeyboardInterrupt\n"
    (tmp_path / "crashing.py").write_text(text)
    source = pathlib.Path(remat.__file__).parents[1]
    out = subprocess.run(
        [sys.executable, "-m", "remat", "explain", "crashing:problem"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(source)},
    )
    assert (out.returncode, out.stdout, out.stderr.strip()) == (1, "", "Aborted!")


_INTERRUPTS_ITSELF = """
import gc, os, signal, time
import jax, jax.numpy as jnp

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it

def interrupt(*_, **__):
    os.kill(os.getpid(), signal.SIGINT)

def in_the_garbage_collector():
    def once(*_):
        gc.callbacks.remove(once)
        interrupt()
    gc.callbacks.append(once)
    gc.collect()
    time.sleep(60)  # for the interrupt that is repeated

def while_compiling():
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: interrupt() if "backend_compile" in event else None
    )

def while_writing():
    os.fsync = interrupt

def loss(w, x):
    MOMENT()
    return jnp.tanh(x @ w).sum()

def problem():
    return loss, (jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((64, 8), "float32"))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to send")
@pytest.mark.parametrize(
    ("moment", "command"),
    [
        ("interrupt", "plan --budget 50% -o page.json"),  # while the step is traced
        ("in_the_garbage_collector", "explain --html page.html"),
        ("while_compiling", "report -o page.html"),
        ("while_writing", "plan --budget 100% -o page.json"),
        ("while_writing", "compare interrupted:problem --html page.html"),
    ],
)
def test_an_interrupt_of_a_process_leaves_no_traceback_and_no_partial_file(
    moment, command, tmp_path
):
    (tmp_path / "interrupted.py").write_text(_INTERRUPTS_ITSELF.replace("MOMENT", moment))
    (tmp_path / "page.html").write_text("before")
    name, *options = command.split()
    source = pathlib.Path(remat.__file__).parents[1]
    out = subprocess.run(
        [sys.executable, "-m", "remat", name, "interrupted:problem", *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(source)},
        timeout=120,
    )
    assert (out.returncode, out.stdout, out.stderr.strip()) == (1, "", "Aborted!")
    assert (tmp_path / "page.html").read_text() == "before"
    assert {p.name for p in tmp_path.iterdir()} - {"__pycache__"} == {"interrupted.py", "page.html"}


def test_an_error_of_the_users_module_comes_with_its_line(run):
    said = run("explain", "training:broken").stderr
    line = 1 + pathlib.Path("training.py").read_text().splitlines().index(
        '    raise ValueError("no data\\nat all")'
    )
    assert f"at training.py:{line}, in broken; --debug shows the traceback" in said


def test_an_error_without_a_line_of_the_users_names_the_option_for_its_traceback(run):
    result = run("explain", "training:frameless")
    assert result.exit_code == 1
    assert "TypeError" in result.stderr
    assert result.stderr.rstrip().endswith("(--debug shows the traceback)")
