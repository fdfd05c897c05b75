"""The script `remat`, which loads the library."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

import remat_command

_INTERRUPT_AT_JAX = """
import importlib.abc, os, signal, sys, time

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "jax":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
"""

_INTERRUPTED = f"""
import remat_command
{_INTERRUPT_AT_JAX}
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


_INTERRUPTED_MODULE = f"""
import runpy
{_INTERRUPT_AT_JAX}
sys.argv, sys.orig_argv = ["-m"], [sys.executable, "-m", "remat"]  # as Python sets them for `python -m remat`
runpy.run_module("remat", run_name="__main__")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to send")
def test_an_interrupt_while_the_module_loads_ends_the_process_without_a_traceback():
    source = pathlib.Path(remat_command.__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(source)}
    out = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_MODULE], capture_output=True, text=True, env=env
    )
    assert (out.returncode, out.stdout, out.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(
    ("argv", "orig_argv", "expected"),
    [
        (["-m"], ["python", "-m", "remat", "plan"], True),
        (["-m"], ["python", "-Im", "remat.cli", "plan"], True),
        (["-m"], ["python", "-m", "training", "remat"], False),
        (["-c"], ["python", "-c", "import remat"], False),
        (["remat"], ["python", "remat", "-m", "remat"], False),
    ],
)
def test_only_python_m_remat_is_a_run_of_the_module(monkeypatch, argv, orig_argv, expected):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert remat_command.is_module_run() is expected


def test_the_script_runs_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["remat", "--version"])
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        remat_command.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("remat, version ")
    assert signal.getsignal(signal.SIGINT) is before
