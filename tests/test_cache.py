"""The cache: concurrent processes, killed writers, damage, and folders that cannot be used."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings

import filelock
import pytest
from hypothesis import given, settings, strategies as st

from remat.cache import Cache, CacheWarning, default_folder, find_cache
from remat.errors import PlanError

DATA = {"bytes": [1, 2, 3], "time_s": 0.1, "name": "Größe\n", "nested": {"a": None, "b": True}}


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def entry(cache):
    (path,) = cache.folder.glob("*.json")
    return path


def damaged(cache):
    return list(cache.folder.glob("*.damaged"))


def with_header(body):
    return f"remat-cache 1 {hashlib.sha256(body).hexdigest()}\n".encode() + body


def test_what_was_put_is_found_under_its_kind_and_key_only(cache):
    assert cache.get("plan", "a") is None
    cache.put("plan", "a", DATA)
    assert cache.get("plan", "a") == DATA == Cache(cache.folder).get("plan", "a")
    assert cache.get("plan", "b") is None and cache.get("pla", "na") is None
    cache.put("plan", "a", {})
    assert cache.get("plan", "a") == {}


@pytest.mark.parametrize("key", ["../../etc/passwd", "/etc/passwd", "a\0b", "k" * 10**5, "", "\n"])
def test_a_key_cannot_leave_the_folder(cache, tmp_path, key):
    cache.put("../kind", key, DATA)
    assert cache.get("../kind", key) == DATA
    assert [p.name for p in tmp_path.iterdir()] == ["cache"]
    assert len(entry(cache).stem) == 64


@pytest.mark.parametrize("data", [{"x": float("nan")}, {"x": object()}, {"x": {1, 2}}])
def test_data_that_is_no_json_is_refused(cache, data):
    with pytest.raises(PlanError, match="not plain JSON"):
        cache.put("plan", "a", data)
    with pytest.raises(PlanError, match="not plain JSON"):
        cache.update("plan", "a", lambda old: data)


# Damage


HOSTILE = {
    "empty": b"",
    "no header": b'{"data": {}, "key": "a", "kind": "plan"}',
    "another version": with_header(b"{}").replace(b"cache 1", b"cache 2"),
    "wrong checksum": b"remat-cache 1 " + b"0" * 64 + b"\n{}",
    "not JSON": with_header(b"{'data': 1}"),
    "not UTF-8": with_header(b'{"data": "\xff"}'),
    "deep nesting": with_header(b'{"data": ' + b"[" * 10**6),
    "a huge int": with_header(
        b'{"data": {"x": ' + b"9" * 10**5 + b'}, "key": "a", "kind": "plan"}'
    ),
    "NaN": with_header(b'{"data": {"x": NaN}, "key": "a", "kind": "plan"}'),
    "doubled keys": with_header(b'{"data": {}, "data": {"x": 1}, "key": "a", "kind": "plan"}'),
    "another key": with_header(b'{"data": {}, "key": "b", "kind": "plan"}'),
    "a list": with_header(b'{"data": [], "key": "a", "kind": "plan"}'),
    "more text": with_header(b'{"data": {}, "key": "a", "kind": "plan"} {}'),
    "pickle": b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93.",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_entry_is_put_aside_with_a_warning_and_replaced(cache, text):
    cache.put("plan", "a", DATA)
    path = entry(cache)
    path.write_bytes(text)
    with pytest.warns(CacheWarning, match="is not an entry of remat's cache"):
        assert cache.get("plan", "a") is None
    (aside,) = damaged(cache)
    assert aside.read_bytes() == text and not path.exists()
    cache.put("plan", "a", DATA)
    assert cache.get("plan", "a") == DATA and damaged(cache) == [aside]


def test_updating_a_damaged_entry_starts_anew(cache):
    cache.put("plan", "a", DATA)
    entry(cache).write_bytes(b"?")
    with pytest.warns(CacheWarning):
        assert cache.update("plan", "a", lambda old: {"old": old}) == {"old": None}
    assert cache.get("plan", "a") == {"old": None}


def test_a_pipe_or_a_folder_in_the_place_of_an_entry_does_not_hang(cache):
    cache.put("plan", "a", DATA)
    path = entry(cache)
    path.unlink()
    os.mkfifo(path)
    with pytest.warns(CacheWarning, match="not a regular file"):
        assert cache.get("plan", "a") is None
    path.mkdir()
    with pytest.warns(CacheWarning, match="not a regular file"):
        assert cache.get("plan", "a") is None


def test_too_large_a_file_is_not_read(cache):
    cache.put("plan", "a", DATA)
    with open(entry(cache), "wb") as file:
        file.truncate(2**33)
    with pytest.warns(CacheWarning, match="8589934592 bytes, more than"):
        assert cache.get("plan", "a") is None


@settings(max_examples=150)
@given(data=st.data())
def test_every_flipped_byte_and_every_truncation_is_detected(tmp_path_factory, data):
    cache = Cache(tmp_path_factory.getbasetemp() / "flips")
    cache.put("plan", "a", DATA)
    path = next(cache.folder.glob("*.json"))
    text = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(text) - 1))
    if data.draw(st.booleans()):
        text[at] ^= data.draw(st.integers(1, 255))
    else:
        del text[at:]
    path.write_bytes(text)
    with pytest.warns(CacheWarning):
        assert cache.get("plan", "a") is None


# Processes

_HAMMER = """
import sys, json
from remat.cache import Cache
cache, name = Cache(sys.argv[1]), sys.argv[2]
for i in range(25):
    cache.update("times", "shared", lambda old: {**(old or {}), f"{name} {i}": i})
    cache.put("times", "contested", {"name": name, "filler": name * 1000})
    seen = cache.get("times", "contested")
    assert seen["filler"] == seen["name"] * 1000
"""


def test_no_update_of_four_processes_is_lost(cache):
    names = "abcd"
    command = [sys.executable, "-W", "error", "-c", _HAMMER, str(cache.folder)]
    processes = [subprocess.Popen([*command, name]) for name in names]
    assert [process.wait() for process in processes] == [0] * 4
    found = cache.get("times", "shared")
    assert found == {f"{name} {i}": i for name in names for i in range(25)}
    assert not damaged(cache) and not list(cache.folder.glob("*.partial"))


_ENDLESS = """
import sys
from remat.cache import Cache
cache = Cache(sys.argv[1])
print("started", flush=True)
while True:
    cache.update("times", "shared", lambda old: {"n": (old or {"n": 0})["n"] + 1, "x": ["y"] * 10**5})
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_writer_that_is_killed_leaves_a_whole_entry_and_no_lock(cache):
    command = [sys.executable, "-c", _ENDLESS, str(cache.folder)]
    for delay in (0.05, 0.081, 0.123):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
        found = cache.get("times", "shared")
        assert found is None or found["x"] == ["y"] * 10**5
        n = cache.update("times", "shared", lambda old: {"n": 1, "x": ["y"] * 10**5})
        assert n["n"] == 1 and not list(cache.folder.glob("*.partial"))
    assert not damaged(cache)


def test_a_temporary_file_of_a_killed_writer_is_removed_by_the_next(cache):
    cache.put("plan", "a", DATA)
    left = entry(cache).with_name(entry(cache).name + ".x.partial")
    left.write_bytes(b"half")
    cache.put("plan", "a", {})
    assert not left.exists() and cache.get("plan", "a") == {}


# Folders that cannot be used


def works_without_a_cache(cache):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache.put("plan", "a", DATA)
        assert cache.get("plan", "a") is None
        assert cache.update("plan", "a", lambda old: {"old": old}) == {"old": None}
        cache.put("plan", "b", DATA)
    return [str(w.message) for w in caught]


def test_a_folder_that_cannot_be_made_costs_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    (message,) = works_without_a_cache(Cache(tmp_path / "file" / "cache"))
    assert "cannot be used" in message


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write")
def test_a_folder_that_is_read_only_costs_one_warning(tmp_path):
    tmp_path.chmod(0o500)
    (message,) = works_without_a_cache(Cache(tmp_path))
    assert "cannot be used" in message


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_costs_one_warning_and_leaves_nothing_half_written(cache, monkeypatch, failing):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, fail)
    (message,) = works_without_a_cache(cache)
    assert "No space left on device" in message
    assert [p.name for p in cache.folder.iterdir()] == ["lock"]


def test_a_lock_that_is_never_released_costs_one_warning(cache):
    cache.put("plan", "a", DATA)
    with filelock.FileLock(cache.folder / "lock"):
        (message,) = works_without_a_cache(Cache(cache.folder, lock_timeout_s=0.02))
    assert "held the lock" in message


@pytest.fixture
def no_home(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA", "USERPROFILE"):
        monkeypatch.delenv(name, raising=False)

    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", nobody)


def test_no_home_costs_one_warning_and_makes_no_folder(no_home, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.warns(CacheWarning, match="no home directory"):
        without = Cache.default()
    assert works_without_a_cache(without) == []
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other folders")
@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HOME": "/h"}, "/h/.cache/remat"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/remat"),
        ({"HOME": "/h", "XDG_CACHE_HOME": ""}, "/h/.cache/remat"),
    ],
)
def test_the_default_folder_is_where_the_system_wants_caches(monkeypatch, environment, folder):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert default_folder().as_posix() == folder


def test_a_relative_folder_in_the_environment_is_never_made(no_home, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert default_folder() is None


@pytest.mark.parametrize("folder", ["", "a\0b", "\ud800", 3, b""])
def test_what_is_no_folder_is_refused(folder):
    with pytest.raises(PlanError, match="not a folder for a cache"):
        Cache(folder)


def test_the_option_cache_is_a_flag_a_cache_or_a_folder(cache, tmp_path):
    assert find_cache(cache) is cache
    assert find_cache(str(tmp_path)).folder == find_cache(tmp_path).folder == tmp_path
    assert find_cache(False).folder is None
    assert find_cache(True).folder == default_folder()
    for wrong in (None, 1, "a\0b", b"cache"):
        with pytest.raises(PlanError):
            find_cache(wrong)


@pytest.mark.parametrize("kind", ["folder", "link to nothing", "link to a file", "pipe"])
def test_a_hostile_lock_file_costs_at_most_one_warning_and_changes_nothing_else(
    cache, tmp_path, kind
):
    cache.folder.mkdir()
    lock, other = cache.folder / "lock", tmp_path / "other"
    other.write_text("precious")
    if kind == "folder":
        lock.mkdir()
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.symlink_to(other if kind == "link to a file" else tmp_path / "absent")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache.put("plan", "a", DATA)
        cache.put("plan", "b", DATA)
    assert len(caught) <= 1
    assert other.read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["cache", "other"]


def test_an_entry_is_written_for_its_owner_alone_and_through_no_link(cache, tmp_path):
    cache.put("plan", "a", DATA)
    path, other = entry(cache), tmp_path / "other"
    other.write_text("precious")
    path.unlink()
    path.symlink_to(other)
    cache.put("plan", "a", DATA)
    assert not path.is_symlink() and other.read_text() == "precious"
    assert path.stat().st_mode & 0o777 == 0o600
    assert cache.folder.stat().st_mode & 0o777 == 0o700


def test_an_entry_is_one_header_and_readable_json(cache):
    cache.put("plan", "a", {"x": 1})
    header, body = entry(cache).read_text().split("\n")
    assert header.startswith("remat-cache 1 ")
    assert json.loads(body) == {"kind": "plan", "key": "a", "data": {"x": 1}}
