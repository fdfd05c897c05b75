"""The script `remat`, which loads the library."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest

import remat_command

_INTERRUPTED = """
import importlib.abc, os, signal, sys, time
import remat_command

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "jax":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
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
