"""A module to name on the command line, and a function that runs the command in its folder."""

from __future__ import annotations

import os
import pathlib
import stat
import sys

import pytest
from click.testing import CliRunner

from remat.cli import main

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

def flat():
    return loss, {"w": w}, x

def longer():
    return loss, w, x, 3

def frameless():
    return jax.jit(jnp.dot), (w, x)

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


@pytest.fixture
def refused(run):
    """Run an invalid command line and return its error, one line; nothing may have been written."""

    def invoke(*arguments):
        result = run(*arguments)
        assert result.exit_code == 2
        (line,) = result.stderr.strip().splitlines()
        assert line.startswith("remat: ")
        assert line.endswith("--help.") and line.isprintable()
        assert set(os.listdir()) <= {"training.py", "__pycache__"}
        return line

    return invoke


@pytest.fixture
def full_device(run):
    """Return a device in the current folder that behaves like /dev/full and that nothing else uses."""
    try:
        os.mknod("full", 0o666 | stat.S_IFCHR, os.makedev(1, 7))
        open("full", "wb").close()
    except OSError:
        pytest.skip("no device can be made here")
    return "full"
