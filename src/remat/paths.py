"""Paths of source files as users know them: relative to a package; and whether a file is the user's own."""

from __future__ import annotations

import os
import sys
import sysconfig

_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in dict.fromkeys(
        sysconfig.get_paths().get(name, "") for name in ("purelib", "platlib", "stdlib")
    )
    if folder
)
_OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


def is_own(file: str) -> bool:
    """Return whether a file is the user's code: not installed, not part of Python or of this library."""
    if file.startswith("<"):
        return False
    parts = file.split(os.sep)
    is_installed = "site-packages" in parts or "dist-packages" in parts
    return not (is_installed or file.startswith((*_LIBRARIES, _OURS)))


def is_of_remat(file: str) -> bool:
    """Return whether a file is a part of this library."""
    return file.startswith(_OURS)


def relative(file: str) -> str:
    """Return a file's path relative to the current directory or to where it is imported from.

    >>> import os
    >>> relative(os.path.join(os.getcwd(), "model", "net.py")) == os.path.join("model", "net.py")
    True
    """
    folders = [os.path.join(entry, "") for entry in sys.path if os.path.isabs(entry)]
    here = os.path.join(os.getcwd(), "")
    for folder in [here, *sorted(folders, key=len, reverse=True)]:
        inside = file.removeprefix(folder)
        # A virtual environment in the current directory is not part of the user's code.
        if inside != file and "site-packages" not in inside.split(os.sep):
            return inside
    return file
