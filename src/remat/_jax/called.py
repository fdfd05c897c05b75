"""Which of JAX's own functions the user's code called to compute an equation: ``gelu`` of a ``mul``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from jax._src import source_info_util as _source_frames

from remat._jax.compat import JaxprEqn
from remat._jax.equations import source_frames_of

# Files of JAX whose functions users know by name. Operators, and functions with the name of their primitive,
# are left out: they add nothing to the primitive.
_KNOWN_FILES = tuple(
    os.path.join("jax", "_src", *where)
    for where in (
        ("nn", ""),
        ("image", ""),
        ("scipy", ""),
        ("ops", "special.py"),
        ("numpy", "linalg.py"),
        ("numpy", "reductions.py"),
        ("random.py",),
    )
)


def function_called_at(eqn: JaxprEqn, callers: Sequence[JaxprEqn] = ()) -> str:
    """Return the JAX function that the user called to compute an equation, such as ``gelu``; or "".

    Args:
      eqn: the equation.
      callers: the calls around it, outermost first. They include functions that JAX itself jits, whose
        equations have no source line of the user's.
    """
    primitive = eqn.primitive.name
    for called in (eqn, *reversed(callers)):
        name = _function_in(called.source_info.traceback)
        is_at_line = bool(source_frames_of(called))
        if not name and is_at_line and called is not eqn:
            name = str(called.params.get("name", "")).lstrip("_")
        if name and is_at_line:
            return "" if name in primitive.split("_") else name
        if is_at_line:
            return ""
    return ""


def _function_in(traceback: Any) -> str:
    """Return the outermost function of a known file that was called by the innermost line of user code."""
    found = ""
    for frame in traceback.frames if traceback is not None else ():
        if _source_frames.is_user_filename(frame.file_name):
            break
        name = frame.function_name.split(".")[0]
        if not name.startswith("_") and any(where in frame.file_name for where in _KNOWN_FILES):
            found = name
    return found
