"""Where an equation comes from, as the user would say it.

The innermost frame is often in a library: ``flax/linen/attention.py:146 (dot_product_attention)``. It is
given relative to its package, with the first frame of the user's own code beside it.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig

from remat import _jax

_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in dict.fromkeys(
        sysconfig.get_paths().get(name, "") for name in ("purelib", "platlib", "stdlib")
    )
    if folder
)
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


def source_of(eqn: _jax.JaxprEqn) -> str:
    """Return where an equation was written: ``net.py:12 (mlp)``, or a library's line and the user's.

    For a library's line the first frame of the user's own code follows, as in
    ``flax/linen/attention.py:146 (softmax), from train.py:31 (loss)``.
    """
    return _text_of(_jax.source_frames_of(eqn))


# One entry for each distinct stack of frames; traces of equal layers share theirs.
@functools.lru_cache(maxsize=4096)
def _text_of(frames: tuple[tuple[str, int, str], ...]) -> str:
    if not frames:
        return ""
    own = next((frame for frame in frames if is_own(frame[0])), frames[0])
    said = _place(frames[0])
    return said if own == frames[0] else f"{said}, from {_place(own)}"


def _place(frame: tuple[str, int, str]) -> str:
    file, line, function = frame
    return f"{relative(file)}:{line} ({function.replace('<locals>.', '')})"


def is_own(file: str) -> bool:
    """Return whether a file is the user's own code: not installed, not of Python, not of this library."""
    if file.startswith("<"):
        return False
    parts = file.split(os.sep)
    is_installed = "site-packages" in parts or "dist-packages" in parts
    return not (is_installed or file.startswith((*_LIBRARIES, _OURS)))


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
