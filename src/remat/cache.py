"""Plans and measurements on disk: small JSON entries that many processes may read and write.

An entry has a kind ("plan", "times"), a key (any text) and data (a dict of plain JSON). Its file's
name is a hash of kind and key, so no key can name another path. The file is one header line, with the
format's version and a SHA-256 of the rest, and then JSON::

    remat-cache 1 2f7a...
    {"data": {...}, "key": "...", "kind": "plan"}

* Writing: to a temporary file in the same folder, `fsync`, then `os.replace`. A reader sees the old
  entry or the new one, and a writer that is killed leaves a file that the next writer removes.
* `update` reads, merges and writes under a lock on a file, which the system releases when a process
  ends, however it ends.
* Reading: whatever is not exactly an entry (damaged, truncated, of another version, larger than
  64 MiB, nested beyond reason, with NaN or doubled keys) is renamed to `*.damaged`, with a warning,
  and is as if it had never been there. Nothing is deleted, and loading runs no code.
* A folder that cannot be written to, or a full disk, costs the cache and no more: one warning, and
  from then on nothing is found and nothing is kept.

Known limit: the lock is advisory and local; over a network file system two hosts may lose each
other's updates (never damage an entry).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from remat.errors import PlanError
from remat.printing import printable

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_VERSION = 1
_HEADER = re.compile(rb"remat-cache ([0-9]{1,9}) ([0-9a-f]{64})\n")
_MOST_BYTES = 64 * 2**20
_LOCK_S = 10.0


class CacheWarning(UserWarning):
    """An entry of the cache was damaged and put aside, or the cache cannot be used."""


class Cache:
    """A folder of entries; with no folder, a cache that keeps nothing.

    >>> import tempfile
    >>> cache = Cache(tempfile.mkdtemp())
    >>> cache.put("times", "matmul of 8 x 8 on cpu", {"time_s": 1e-6})
    >>> cache.get("times", "matmul of 8 x 8 on cpu")
    {'time_s': 1e-06}
    >>> cache.get("times", "matmul of 9 x 9 on cpu")
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._gave_up = folder is None

    @classmethod
    def default(cls) -> Cache:
        """The cache in the user's cache directory (see `default_folder`)."""
        folder = default_folder(os.environ, sys.platform)
        if folder is None:
            _warn("there is no home directory, so plans and measurements are not kept.")
        return cls(folder)

    def __repr__(self) -> str:
        return f"Cache({None if self.folder is None else str(self.folder)!r})"

    def get(self, kind: str, key: str) -> dict[str, Any] | None:
        """The data of an entry; None if there is none, or none that can be trusted."""
        path = self._path(kind, key)
        if path is None:
            return None
        try:
            return _read(path, kind, key)
        except _Damaged:
            with self._lock() as locked:
                # Another process may have put it right in the meantime.
                return self._read_or_put_aside(path, kind, key) if locked else None
        except OSError as error:
            self._give_up(error)
            return None

    def put(self, kind: str, key: str, data: Mapping[str, Any]) -> None:
        """Keep the data of an entry, in place of what was there.

        Raises:
          PlanError: the data is no plain JSON (texts, finite numbers, lists, dicts with text keys).
        """
        text = _text(kind, key, data)
        path = self._path(kind, key)
        if path is not None:
            with self._lock() as locked:
                if locked:
                    self._write(path, text)

    def update(
        self, kind: str, key: str, merge: Callable[[dict[str, Any] | None], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Replace the data of an entry by what `merge` makes of it; no other process comes between.

        >>> import tempfile
        >>> cache = Cache(tempfile.mkdtemp())
        >>> for name in ("sin", "cos"):
        ...     merged = cache.update("times", "cpu", lambda old: {**(old or {}), name: 1.0})
        >>> merged
        {'sin': 1.0, 'cos': 1.0}

        Args:
          merge: takes the data, or None if there is none, and returns the new. It must not use the
            cache itself.

        Returns:
          What `merge` returned, also where nothing can be kept.

        Raises:
          PlanError: as for `put`.
        """
        path = self._path(kind, key)
        if path is None:
            return dict(merge(None))
        with self._lock() as locked:
            merged = dict(merge(self._read_or_put_aside(path, kind, key) if locked else None))
            text = _text(kind, key, merged)
            if locked:
                self._write(path, text)
            return merged

    # Files

    def _path(self, kind: str, key: str) -> Path | None:
        if self.folder is None or self._gave_up:
            return None
        return self.folder / f"{_hash(f'{_VERSION} {len(kind)} {kind} {key}'.encode())}.json"

    def _read_or_put_aside(self, path: Path, kind: str, key: str) -> dict[str, Any] | None:
        """Read an entry under the lock."""
        try:
            return _read(path, kind, key)
        except _Damaged as problem:
            try:
                aside = path.with_name(f"{path.name}.{time.time_ns()}.damaged")
                os.replace(path, aside)
            except OSError as error:
                self._give_up(error)
            else:
                _warn(f"{path} is no entry of remat's cache ({problem}); it is now {aside.name}.")
        except OSError as error:
            self._give_up(error)
        return None

    def _write(self, path: Path, text: bytes) -> None:
        partial = None
        try:
            # Under the lock nobody else is writing this entry: these are of writers that were killed.
            for left in path.parent.glob(f"{path.name}.*.partial"):
                left.unlink(missing_ok=True)
            handle, partial = tempfile.mkstemp(".partial", f"{path.name}.", path.parent)
            with open(handle, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except OSError as error:
            if partial is not None:
                with contextlib.suppress(OSError):
                    os.unlink(partial)
            self._give_up(error)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        """Hold the folder's lock; False where it cannot be had."""
        handle = self._locked_handle()
        try:
            yield handle is not None
        finally:
            if handle is not None:
                os.close(handle)  # which releases the lock

    def _locked_handle(self) -> int | None:
        assert self.folder is not None
        handle = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            deadline = time.monotonic() + _LOCK_S
            while not _try_lock(handle):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has held the lock for {_LOCK_S:.0f} s")
                time.sleep(0.005)
            return handle
        except OSError as error:
            if handle is not None:
                os.close(handle)
            self._give_up(error)
            return None

    def _give_up(self, error: OSError) -> None:
        if not self._gave_up:
            self._gave_up = True
            _warn(
                f"the cache in {self.folder} cannot be used ({error.strerror or error}), so plans and "
                "measurements are not kept. Pass a cache in a folder that can be written to."
            )


def default_folder(environment: Mapping[str, str], platform: str) -> Path | None:
    """Where the operating system wants a user's caches; None if the user has no home.

    >>> default_folder({"HOME": "/home/ada"}, "linux").as_posix()
    '/home/ada/.cache/remat'
    >>> default_folder({"HOME": "/home/ada", "XDG_CACHE_HOME": "/fast"}, "linux").as_posix()
    '/fast/remat'
    """
    xdg = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the specification says to ignore a relative one
        return Path(xdg) / "remat"
    if platform == "win32":
        local = environment.get("LOCALAPPDATA") or ""
        return Path(local) / "remat" / "Cache" if local else None
    home = environment.get("HOME") or ""
    if not home:
        return None
    return Path(home) / ("Library/Caches" if platform == "darwin" else ".cache") / "remat"


def _try_lock(handle: int) -> bool:
    try:
        if sys.platform == "win32":
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _warn(message: str) -> None:
    warnings.warn(printable(message), CacheWarning, stacklevel=4)


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


# The format


class _Damaged(Exception):
    """A file is no entry; the message says why."""


def _text(kind: str, key: str, data: Mapping[str, Any]) -> bytes:
    try:
        body = json.dumps(
            {"data": dict(data), "key": key, "kind": kind}, allow_nan=False, ensure_ascii=True
        ).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanError(
            f"data of kind {kind!r} for the cache is no plain JSON: {error}."
        ) from error
    return f"remat-cache {_VERSION} {_hash(body)}\n".encode() + body


def _read(path: Path, kind: str, key: str) -> dict[str, Any] | None:
    try:
        # Not to wait for the other end if someone put a pipe here.
        handle = os.open(
            path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        )
    except FileNotFoundError:
        return None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise _Damaged("not a regular file")
    with open(handle, "rb") as file:
        if status.st_size > _MOST_BYTES:
            raise _Damaged(f"{status.st_size} bytes, more than {_MOST_BYTES}")
        text = file.read(_MOST_BYTES + 1)
    header = _HEADER.match(text)
    if header is None:
        raise _Damaged("line 1: no header")
    if int(header[1]) != _VERSION:
        raise _Damaged(f"line 1: version {int(header[1])}, not {_VERSION}")
    body = text[header.end() :]
    if _hash(body) != header[2].decode():
        raise _Damaged("line 2: its checksum is another")
    try:
        entry = json.loads(body, parse_constant=_refuse, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise _Damaged(f"line 2: {error}") from error
    if not isinstance(entry, dict) or entry.keys() != {"data", "key", "kind"}:
        raise _Damaged("line 2: not an object of kind, key and data")
    if (entry["kind"], entry["key"]) != (kind, key) or not isinstance(entry["data"], dict):
        raise _Damaged("line 2: the entry of another key")
    return entry["data"]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key stands twice")
    return result
