"""Plans and measurements on disk: small JSON entries that many processes may read and write.

An entry has a kind ("plan", "times"), a key (any text) and data (a dict of plain JSON). Its file's
name is a hash of kind and key, so no key can name another path. The file is one header line, with the
format's version and a SHA-256 of the rest, and then JSON::

    remat-cache 1 2f7a...
    {"data": {...}, "key": "...", "kind": "plan"}

* Writing is atomic (`remat.files.replace`). The next writer removes temporary files of a writer that was
  killed.
* `update` reads, merges and writes under a file lock (`filelock`), which the operating system releases
  even if the process is killed.
* A file that is not a valid entry (damaged, truncated, of another version, larger than 64 MiB, nested too
  deeply, with NaN or repeated keys) is renamed to `*.damaged`, with a warning, and counts as missing.
  Nothing is deleted, and loading runs no code.
* If the folder cannot be written to, or the disk is full, the cache warns once, and from then on finds and
  keeps nothing.

Known limit: the lock is advisory and local; over a network file system two hosts may lose each
other's updates (never damage an entry).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import filelock
import platformdirs

from remat import files
from remat.aliases import Json
from remat.errors import PlanError
from remat.printing import printable, shown

_VERSION = 1  # of the format; entries of another version are put aside
_HEADER = re.compile(rb"remat-cache ([0-9]{1,9}) ([0-9a-f]{64})\n")
_MOST_BYTES = 64 * 2**20  # larger files are damaged; a plan of a large step has a few MiB


class CacheWarning(UserWarning):
    """An entry of the cache was damaged and renamed, or the cache cannot be used."""


class Cache:
    """A folder of entries; with no folder, a cache that keeps nothing.

    >>> import tempfile
    >>> cache = Cache(tempfile.mkdtemp())
    >>> cache.put("times", "matmul of 8 x 8 on cpu", {"time_s": 1e-6})
    >>> cache.get("times", "matmul of 8 x 8 on cpu")
    {'time_s': 1e-06}
    >>> cache.get("times", "matmul of 9 x 9 on cpu")

    Args:
      folder: created when first written to.
      lock_timeout_s: seconds to wait for another process that writes; after that the cache is not used.

    Raises:
      PlanError: `folder` cannot be a path.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None, *, lock_timeout_s: float = 10.0
    ) -> None:
        try:
            self.folder = None if folder is None else Path(files.checked(folder))
        except files.PROBLEMS as error:
            raise PlanError(f"{shown(folder)} is not a folder for a cache: {error}.") from error
        self.lock_timeout_s = lock_timeout_s
        self._gave_up = folder is None

    @classmethod
    def default(cls) -> Cache:
        """Return the cache in the user's cache directory (see `default_folder`)."""
        folder = default_folder()
        if folder is None:
            _warn("there is no home directory, so plans and measurements are not kept.")
        return cls(folder)

    def __repr__(self) -> str:
        return f"Cache({None if self.folder is None else str(self.folder)!r})"

    def get(self, kind: str, key: str) -> dict[str, Json] | None:
        """Return the data of an entry; None if there is none, or it is damaged."""
        path = self._path(kind, key)
        if path is None:
            return None
        try:
            return _read(path, kind, key)
        except _Damaged:
            with self._lock() as locked:
                # Another process may have repaired it in the meantime.
                return self._read_or_put_aside(path, kind, key) if locked else None
        except OSError as error:
            self._give_up(error)
            return None

    def put(self, kind: str, key: str, data: Mapping[str, Json]) -> None:
        """Write the data of an entry, replacing the previous data.

        Raises:
          PlanError: the data is not plain JSON (strings, finite numbers, lists, dicts with string keys).
        """
        text = _text(kind, key, data)
        path = self._path(kind, key)
        if path is not None:
            with self._lock() as locked:
                if locked:
                    self._write(path, text)

    def update(
        self, kind: str, key: str, merge: Callable[[dict[str, Json] | None], Mapping[str, Json]]
    ) -> dict[str, Json]:
        """Replace the data of an entry by what `merge` makes of it, atomically among processes.

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
          What `merge` returned, even if it cannot be stored.

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

    def _read_or_put_aside(self, path: Path, kind: str, key: str) -> dict[str, Json] | None:
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
                _warn(
                    f"{path} is not an entry of remat's cache ({problem}); renamed to {aside.name}."
                )
        except OSError as error:
            self._give_up(error)
        return None

    def _write(self, path: Path, text: bytes) -> None:
        try:
            # Under the lock no other process writes here, so these files are left from killed writers.
            for left in path.parent.glob("*.partial"):
                left.unlink(missing_ok=True)
            files.replace(path, text, mode=0o600)
        except OSError as error:
            self._give_up(error)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        """Hold the folder's lock; yield False if it cannot be acquired."""
        assert self.folder is not None
        lock = filelock.FileLock(self.folder / "lock", self.lock_timeout_s, mode=0o600)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock.acquire(poll_interval=0.005)
        except filelock.Timeout:
            self._give_up(
                TimeoutError(f"another process has held the lock for {self.lock_timeout_s:.0f} s")
            )
        except (
            OSError,
            NotImplementedError,
        ) as error:  # the latter if the system cannot lock files
            self._give_up(error)
        try:
            yield lock.is_locked
        finally:
            with contextlib.suppress(OSError):
                lock.release()

    def _give_up(self, error: Exception) -> None:
        if not self._gave_up:
            self._gave_up = True
            _warn(
                f"the cache in {self.folder} cannot be used ({files.reason(error)}), so plans and "
                "measurements are not kept. Pass a cache in a folder that can be written to."
            )


def find_cache(cache: Cache | bool | str | os.PathLike[str]) -> Cache:
    """Return the cache that the option `cache=` stands for.

    Args:
      cache: whether to use the one in the user's cache directory; a cache, or its folder.

    Raises:
      PlanError: the option is neither a cache, a folder, nor a bool.
    """
    if isinstance(cache, Cache):
        return cache
    if isinstance(cache, bool):
        return Cache.default() if cache else Cache(None)
    if isinstance(cache, str | os.PathLike):
        return Cache(cache)
    raise PlanError(
        f"cache={shown(cache)} is not a cache: it is True or False, a folder, or a "
        "remat.planner.cache.Cache."
    )


def default_folder() -> Path | None:
    """Return the platform's cache folder of this user; None if the user has no home directory."""
    try:
        folder = platformdirs.user_cache_path("remat", appauthor=False)
    except RuntimeError:
        return None
    return (
        folder if folder.is_absolute() else None
    )  # older versions of platformdirs return an unexpanded "~"


def _warn(message: str) -> None:
    warnings.warn(printable(message), CacheWarning, stacklevel=4)


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


# The format


class _Damaged(Exception):
    """A file is not a valid entry; the message says why."""


def _text(kind: str, key: str, data: Mapping[str, Json]) -> bytes:
    try:
        body = json.dumps(
            {"data": dict(data), "key": key, "kind": kind}, allow_nan=False, ensure_ascii=True
        ).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanError(
            f"data of kind {kind!r} for the cache is not plain JSON: {error}."
        ) from error
    return f"remat-cache {_VERSION} {_hash(body)}\n".encode() + body


def _read(path: Path, kind: str, key: str) -> dict[str, Json] | None:
    try:
        with files.open_regular(path) as file:
            n_bytes = os.fstat(file.fileno()).st_size
            if n_bytes > _MOST_BYTES:
                raise _Damaged(f"{n_bytes} bytes, more than {_MOST_BYTES}")
            text = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except files.NotRegularError as error:
        raise _Damaged(str(error)) from error
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
    raise ValueError(f"{constant} is not a number")


def _without_repeats(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key stands twice")
    return result
