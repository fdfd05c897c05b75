"""Reading and atomic writing of whole files; every failure is one typed error that names the path.

Writing is atomic: the text goes to a temporary file in the same folder, which then replaces the old
one, so that a reader sees either the old text or the new one. The temporary file's name cannot be
predicted. It is created with ``O_EXCL``, which fails if the name exists and follows no link, and is
removed on every error; only a process that is killed leaves it behind.

Only a regular file is replaced, and its mode is kept. A symbolic link stays, and its target is
replaced, unless another user created the link in a folder that all users may write to, such as /tmp.
Anything else, such as a pipe or a device, is opened and written to, as a shell's ``>`` does.

Known limits: a file that is replaced loses its other hard links and its access control list, and its
owner unless the process may set it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

from remat.errors import RematError

# Opening a pipe must not wait for its other end (O_NONBLOCK), and a terminal must not become the process's
# controlling one (O_NOCTTY). Windows has neither flag, and needs O_BINARY.
_OPEN = sum(getattr(os, name, 0) for name in ("O_BINARY", "O_CLOEXEC", "O_NOCTTY", "O_NONBLOCK"))
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | _OPEN

#: The exceptions that `os` raises for a path; a `ValueError` is for an impossible name, such as one with NUL.
PROBLEMS = (OSError, ValueError, TypeError)


class NotRegularError(OSError):
    """A pipe, device or folder is there in place of a regular file."""


def read_text(
    path: str | os.PathLike[str], error: type[RematError], most_bytes: int | None = None
) -> str:
    """Return the text of a regular file in UTF-8.

    Args:
      path: the file.
      error: the type to raise if it cannot be read; the message names the line that is not UTF-8.
      most_bytes: a longer file is an error, and is not read to its end.
    """
    try:
        with open_regular(path) as file:
            content = file.read(-1 if most_bytes is None else most_bytes + 1)
    except PROBLEMS as problem:
        why = f"{_called(path)}: cannot be read ({reason(problem)}); check the path."
        raise error(why) from problem
    if most_bytes is not None and len(content) > most_bytes:
        raise error(f"{path}: longer than {most_bytes} bytes, as no such file is; check the path.")
    try:
        return content.decode("utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError as problem:
        line = problem.object[: problem.start].count(b"\n") + 1
        why = f"{path}, line {line}: not UTF-8 text ({problem.reason}); save it in that encoding."
        raise error(why) from problem


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; anything else, a pipe too, raises an `OSError` without blocking."""
    handle = os.open(checked(path), os.O_RDONLY | _OPEN)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotRegularError("not a regular file")
    return open(handle, "rb")


def write_text(path: str | os.PathLike[str], text: str, error: type[RematError]) -> Path:
    """Write a text in UTF-8, atomically, and return the path.

    Args:
      path: the file, see the module's docstring.
      text: what to write.
      error: the type to raise if it cannot be written; an existing file is then unchanged.
    """
    try:
        why = refusal(path)
        if why is None:
            _write(checked(path), text.encode("utf-8"))
    except PROBLEMS as problem:
        failed = f"{_called(path)}: cannot be written ({reason(problem)}); choose another path."
        raise error(failed) from problem
    if why is not None:
        raise error(f"{_called(path)}: cannot be written ({why}); choose another path.")
    return Path(os.fsdecode(path))


def refusal(path: str | os.PathLike[str]) -> str | None:
    """Return why a path cannot be written to, or None. Nothing is opened or changed.

    >>> refusal("")
    'the path is empty'
    """
    try:
        name = checked(path)
        try:
            mode = os.stat(name).st_mode
        except (FileNotFoundError, NotADirectoryError):
            if os.path.islink(name):
                return f"it is a link to {os.readlink(name)!r}, which is not there"
            return _folder_refusal(os.path.dirname(name) or ".")
        if stat.S_ISDIR(mode):
            return "it is a folder"
        if _is_planted(name):
            return "it is a link that another user left in a folder that all may write to"
        if not os.access(name, os.W_OK):
            return os.strerror(errno.EACCES)
        if stat.S_ISREG(mode):
            return _folder_refusal(os.path.dirname(os.path.realpath(name)))
    except PROBLEMS as problem:
        return reason(problem)
    return None


def replace(
    path: Path, content: bytes, *, mode: int = 0o666, like: os.stat_result | None = None
) -> None:
    """Replace the file or link at a path by a new file, atomically.

    Args:
      path: where; a link is itself replaced, not its target.
      content: of the new file.
      mode: of the new file, before the process's umask is applied.
      like: the status of a file whose mode and owner the new file gets instead.
    """
    partial = path.parent / f".remat-{secrets.token_hex(8)}.partial"
    try:
        handle = os.open(partial, _CREATE, mode if like is None else 0o600)
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            if like is not None and hasattr(os, "fchmod"):
                _make_like(handle, like)
            os.fsync(handle)  # otherwise a crash could leave an empty file under the new name
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):  # it still exists only if an error occurred
            partial.unlink()


def _make_like(handle: int, other: os.stat_result) -> None:
    """Give an open file the mode of another, and its owner if the process may set it."""
    for owner in ((-1, other.st_gid), (other.st_uid, -1)):
        with contextlib.suppress(OSError):
            os.fchown(handle, *owner)
    os.fchmod(handle, stat.S_IMODE(other.st_mode) & 0o777)


def _write(name: str, content: bytes) -> None:
    try:
        handle = os.open(name, os.O_WRONLY | _OPEN)  # nothing is created or truncated
    except FileNotFoundError:
        replace(Path(name), content)
        return
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode):
        os.close(handle)
        target = os.path.realpath(name)
        os.stat(target)  # a link in /proc/self/fd may lead to a file that was deleted
        replace(Path(target), content, like=status)
        return
    with open(handle, "wb") as file:
        if hasattr(os, "O_NONBLOCK"):
            os.set_blocking(handle, True)
        file.write(content)


def _is_planted(name: str) -> bool:
    """Return whether a name is a link of the kind that Linux's fs.protected_symlinks refuses."""
    status = os.lstat(name)
    if not stat.S_ISLNK(status.st_mode) or not hasattr(os, "geteuid"):
        return False
    folder = os.stat(os.path.dirname(name) or ".")
    is_shared = bool(folder.st_mode & stat.S_IWOTH)
    return is_shared and status.st_uid not in (os.geteuid(), folder.st_uid)


def _folder_refusal(folder: str) -> str | None:
    if not os.path.isdir(folder):
        return f"there is no folder {folder!r}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"no file can be made in the folder {folder!r}"
    return None


def checked(path: str | os.PathLike[str]) -> str:
    """Return a path as a string after checking that a file could have it.

    Raises:
      ValueError, TypeError: it is empty, holds a NUL or cannot be encoded; it is not a path.
    """
    name = os.fsdecode(path)
    if not name:
        raise ValueError("the path is empty")
    if b"\0" in os.fsencode(name):
        raise ValueError("the path holds a NUL character")
    return name


def _called(path: object) -> str:
    """Return a path for an error message, in quotes if it is blank or not printable."""
    text = str(path)
    return text if text.strip() and text.isprintable() else repr(path)


def reason(problem: Exception) -> str:
    """Return the operating system's message for an error, without its number and path."""
    if isinstance(problem, OSError) and problem.errno == errno.ENXIO:
        return "no process reads from it"
    return str(getattr(problem, "strerror", None) or problem)
