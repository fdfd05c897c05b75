"""Atomic writes of files: which are replaced, which are written in place, what is refused, what remains."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import stat
import subprocess
import sys
import threading

import pytest

from remat import files
from remat.errors import PlanError

HOSTILE_PATHS = ["", "a\0b", "\ud800", "x" * 300, "absent/a.txt", "file/a.txt", 3, None]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("here before")
    return tmp_path


def write(path, text="new"):
    return files.write_text(path, text, PlanError)


def names(folder):
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("path", HOSTILE_PATHS, ids=lambda path: ascii(path)[:20])
def test_a_path_that_cannot_be_is_one_typed_error_that_names_it(here, path):
    for act, said in ((write, "cannot be written"), (read, "cannot be read")):
        with pytest.raises(PlanError, match=said) as refused:
            act(path)
        assert str(refused.value).isprintable()
        assert str(refused.value).split(":")[0].strip("'")[:5] in ascii(path)
    assert files.refusal(path)
    assert names(here) == ["file"]


def read(path):
    return files.read_text(path, PlanError)


def test_a_folder_is_neither_written_nor_read(here):
    (here / "folder").mkdir()
    with pytest.raises(PlanError, match="it is a folder"):
        write("folder")
    with pytest.raises(PlanError, match="cannot be read"):
        read("folder")
    with pytest.raises(PlanError, match="there is no folder 'absent'"):
        write("absent/file")
    assert names(here) == ["file", "folder"]


@pytest.mark.parametrize("mode", [0o640, 0o600, 0o664, 0o755])
def test_an_existing_file_keeps_its_mode(here, mode):
    os.chmod("file", mode)
    write("file")
    assert stat.S_IMODE(os.stat("file").st_mode) == mode
    assert read("file") == "new"


def test_a_new_file_has_the_mode_that_the_umask_leaves(here):
    before = os.umask(0o027)
    try:
        write("new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat("new").st_mode) == 0o640


def is_root():
    return hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.mark.skipif(not is_root(), reason="only root gives files away")
def test_an_existing_file_keeps_its_owner(here):
    os.chown("file", 1234, 1235)
    write("file")
    status = os.stat("file")
    assert (status.st_uid, status.st_gid) == (1234, 1235)


@pytest.mark.skipif(is_root(), reason="root may write anywhere")
def test_a_file_or_folder_that_is_read_only_is_refused(here):
    os.chmod("file", 0o400)
    with pytest.raises(PlanError, match="Permission denied"):
        write("file")
    os.chmod("file", 0o600)
    os.chmod(here, 0o500)
    with pytest.raises(PlanError, match="no file can be made in the folder"):
        write("file")
    os.chmod(here, 0o700)
    assert read("file") == "here before"


def test_a_link_stays_and_the_file_that_it_leads_to_is_replaced(here):
    (here / "folder").mkdir()
    os.chmod("file", 0o640)
    os.symlink("../file", "folder/second")
    os.symlink("folder/second", "first")
    write("first")
    assert os.path.islink("first") and os.path.islink("folder/second")
    assert read("file") == "new" and stat.S_IMODE(os.stat("file").st_mode) == 0o640
    assert (names(here), names("folder")) == (["file", "first", "folder"], ["second"])


@pytest.mark.skipif(not is_root(), reason="only root gives links away")
def test_a_link_that_another_user_left_in_a_shared_folder_is_refused(here):
    os.symlink("file", "link")
    os.lchown("link", 1234, 1234)
    os.chmod(here, 0o1777)
    with pytest.raises(PlanError, match="a link that another user left"):
        write("link")
    assert read("file") == "here before" and os.path.islink("link")
    os.lchown("link", 0, 0)
    write("link")
    assert read("file") == "new"


def test_a_link_to_nothing_or_to_itself_is_refused(here):
    os.symlink("absent", "dangling")
    os.symlink("loop", "loop")
    with pytest.raises(PlanError, match="a link to 'absent', which is not there"):
        write("dangling")
    with pytest.raises(PlanError, match="cannot be written"):
        write("loop")
    assert names(here) == ["dangling", "file", "loop"]


def test_a_link_to_a_folder_or_a_device_never_becomes_a_file(here):
    os.symlink(".", "folder")
    os.symlink(os.devnull, "null")
    with pytest.raises(PlanError, match="it is a folder"):
        write("folder")
    write("null")
    assert os.path.islink("folder") and os.path.islink("null")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_pipe_is_written_to_and_stays_a_pipe(here):
    os.mkfifo("pipe")
    got = []
    text = "x" * 200_000  # more than a pipe buffers

    def reader():
        with open("pipe") as pipe:
            got.append(pipe.read())

    thread = threading.Thread(target=reader)
    thread.start()
    while not got:  # until the reader has opened the pipe
        with contextlib.suppress(PlanError):
            write("pipe", text)
            break
    thread.join()
    assert got == [text]
    assert stat.S_ISFIFO(os.stat("pipe").st_mode)
    assert names(here) == ["file", "pipe"]


def test_a_pipe_without_a_reader_is_refused_at_once(here):
    os.mkfifo("pipe")
    with pytest.raises(PlanError, match="no process reads from it"):
        write("pipe")
    with pytest.raises(PlanError, match="not a regular file"):
        read("pipe")


@pytest.fixture
def full(here):
    """Return a device like /dev/full that nothing else uses."""
    try:
        os.mknod("full", 0o666 | stat.S_IFCHR, os.makedev(1, 7))
        with open("full", "wb"):
            pass
    except OSError:
        pytest.skip("no device can be made here")
    return here


def test_a_device_is_written_to_and_stays_a_device(full):
    with pytest.raises(PlanError, match="No space left on device"):
        write("full")
    assert stat.S_ISCHR(os.stat("full").st_mode)
    assert names(full) == ["file", "full"]


@pytest.mark.parametrize("failing", ["fsync", "replace", "fchmod"])
@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_after_an_error(here, monkeypatch, failing, problem):
    def fail(*_):
        raise problem

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises((PlanError, KeyboardInterrupt)):
        write("file")
    assert names(here) == ["file"]
    assert read("file") == "here before"


def test_the_temporary_file_is_private_new_and_not_guessable(here, monkeypatch):
    os.chmod("file", 0o644)
    opened = []
    real_open = os.open

    def open_and_note(path, flags, mode=0o777):
        handle = real_open(path, flags, mode)
        if flags & os.O_CREAT:
            opened.append((os.path.basename(path), flags, stat.S_IMODE(os.fstat(handle).st_mode)))
        return handle

    monkeypatch.setattr(os, "open", open_and_note)
    write("file")
    write("file")
    assert len({name for name, _, _ in opened}) == 2
    for name, flags, mode in opened:
        assert re.fullmatch(r"\.remat-[0-9a-f]{16}\.partial", name)
        assert flags & os.O_EXCL and flags & os.O_NOFOLLOW
        assert mode == 0o600  # it gets the old file's mode only once it is complete


@pytest.mark.parametrize("path", [b"bytes", pathlib.Path("path"), "text", "\udcff"], ids=ascii)
def test_every_kind_of_path_is_taken(here, path):
    assert os.fsencode(write(path)) == os.fsencode(path)
    assert read(path) == "new"


def test_a_name_as_long_as_the_system_allows_is_written(here):
    write("x" * 255)
    assert read("x" * 255) == "new"


# The package's own `__init__` would import JAX, which takes seconds.
_WRITER = """
import os, sys, types
sys.modules["remat"] = types.ModuleType("remat")
sys.modules["remat"].__path__ = [sys.argv[1]]
from remat import files
from remat.errors import PlanError
os.replace = lambda *_: (print("complete", flush=True), sys.stdin.read())
files.write_text("file", "new", PlanError)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_writer_that_is_killed_leaves_the_old_file_and_nothing_in_the_way(here):
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, os.path.dirname(files.__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout.readline() == b"complete\n"
            process.send_signal(signal.SIGKILL)
        assert read("file") == "here before"
    left = [name for name in names(here) if name != "file"]
    assert len(left) == 2  # each with its own random name
    write("file")
    assert read("file") == "new" and set(left) < set(names(here))
