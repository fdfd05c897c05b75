"""What is written, and how names and texts are printed."""

from __future__ import annotations

import os
import pathlib
import stat

import pytest
from click.testing import CliRunner

from remat.cli import main


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
