"""The pytest plugin, in test runs of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib.metadata import entry_points

import pytest

# A run inside of this process drops the modules that it imports, and JAX cannot be imported twice.
import remat.explain
import remat.testing  # noqa: F401

pytest_plugins = ["pytester"]

MODEL = """
    import jax, jax.numpy as jnp, remat

    x = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def loss(w, x):
        h = remat.checkpoint_name(jnp.tanh(x @ w), "hidden")
        return jnp.sum(jnp.sin(h @ w))

    saving = remat.checkpoint(loss, policy=remat.policies.save("hidden"))
"""


# An installed plugin is loaded by its entry point; that of a plain checkout is not.
INSTALLED = any(e.value == "remat_pytest" for e in entry_points(group="pytest11"))
LOADED = () if INSTALLED else ("-p", "remat_pytest")


@pytest.fixture
def run(pytester):
    def with_test(body, *options):
        pytester.makepyfile(test_memory=textwrap.dedent(MODEL) + body)
        return pytester.runpytest_inprocess(*LOADED, "-p", "no:cacheprovider", *options)

    return with_test


def test_assertions_are_fixtures(run):
    result = run(
        "def test_peak(assert_peak_below):\n"
        "    assert_peak_below(loss, w, x, limit='4MiB')\n"
        "def test_names(assert_saves_only):\n"
        "    assert_saves_only(saving, w, x, names=['hid*'])\n"
        "def test_limit(assert_saves_only):\n"
        "    assert_saves_only(saving, w, x, limit='64KiB')\n"
    )
    result.assert_outcomes(passed=3)


def test_saving_more_than_the_names_fails_with_the_saved_values(run):
    result = run(
        "def test_names(assert_saves_only):\n    assert_saves_only(loss, w, x, names=['hidden'])\n"
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*SavedValuesError: * are saved for the backward pass besides*"])
    result.stdout.fnmatch_lines(["*64.0 KiB  f32[[]256,64[]] output of *"])


def test_a_snapshot_fails_with_a_diff_when_more_is_saved(run, pytester):
    test = "def test_it(remat_snapshot):\n    remat_snapshot({}, w, x)\n"
    result = run(test.format("saving"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*there is no snapshot *test_it.txt; write it with --remat-update."]
    )
    run(test.format("saving"), "--remat-update").assert_outcomes(passed=1)
    kept = (pytester.path / "__snapshots__" / "test_memory" / "test_it.txt").read_text()
    assert kept.startswith("saved in all: 64.0 KiB (65536 bytes)\n")
    assert "hidden" in kept
    run(test.format("saving")).assert_outcomes(passed=1)
    result = run(test.format("loss"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["this saves 64.0 KiB more for the backward pass *"])
    result.stdout.fnmatch_lines(["+saved*f32[[]256,64[]]*  at test_memory.py:*(loss)"])


def test_several_snapshots_of_one_test_and_parameters_have_files_of_their_own(run, pytester):
    test = (
        "import pytest\n"
        "@pytest.mark.parametrize('f', [loss, saving], ids=['a/b', 'c'])\n"
        "def test_it(f, remat_snapshot):\n"
        "    remat_snapshot(f, w, x)\n"
        "    remat_snapshot(remat.explain(loss, w, x, compile=False))\n"
    )
    run(test, "--remat-update").assert_outcomes(passed=2)
    files = sorted(p.name for p in (pytester.path / "__snapshots__" / "test_memory").iterdir())
    peaks = [name for name in files if name.endswith(".peak")]
    files = [name for name in files if name not in peaks]
    assert files == ["test_it_a_b-2.txt", "test_it_a_b.txt", "test_it_c-2.txt", "test_it_c.txt"]
    assert peaks == ["test_it_a_b.peak", "test_it_c.peak"]
    run(test).assert_outcomes(passed=2)


def test_importing_the_plugin_imports_no_jax():
    code = "import sys, remat_pytest; print('jax' in sys.modules, 'remat' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.split() == ["False", "False"]


def test_failures_show_the_test_and_not_the_library(run):
    result = run(
        "def test_peak(assert_peak_below):\n"
        "    assert_peak_below(loss, w, x, limit='1KiB')\n"
        "def test_names(assert_saves_only):\n"
        "    assert_saves_only(loss, w, x)\n"
    )
    result.assert_outcomes(failed=2)
    result.stdout.no_fnmatch_line("*remat/testing.py*")
    result.stdout.no_fnmatch_line("*remat_pytest*")


def test_saved_values_with_one_description_are_one_line(run):
    result = run(
        "def deep(ws, x):\n"
        "    for w in ws:\n"
        "        x = jnp.sin(x @ w)\n"
        "    return jnp.sum(x)\n"
        "def test_names(assert_saves_only):\n"
        "    assert_saves_only(deep, [w] * 3, x)\n"
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["* 3 × f32[[]256,64[]]*"])


def test_a_run_ends_with_the_peaks_of_its_tests_and_their_changes(run):
    tests = (
        "def test_large(assert_peak_below):\n"
        "    assert_peak_below(jax.grad(loss), w, x, limit='4MiB')\n"
        "def test_small(remat_snapshot):\n"
        "    remat_snapshot({}, w, {})\n"
        "def test_other():\n"
        "    pass\n"
    )
    run(tests.format("saving", "x"), "--remat-update").assert_outcomes(passed=3)
    result = run(tests.format("saving", "x"), "--remat-peaks")
    result.stdout.fnmatch_lines_random(
        ["*remat: peaks, the largest first*", "* unchanged *test_large", "* unchanged *test_small"]
    )
    result.stdout.no_fnmatch_line("*KiB*test_other*")
    half = "jax.ShapeDtypeStruct((128, 64), jnp.float32)"
    result = run(tests.format("saving", half), "--remat-peaks")
    result.stdout.fnmatch_lines(["* KiB  -*(-*%)*test_small"])
