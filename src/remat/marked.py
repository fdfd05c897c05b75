"""Which functions marked by `remat.auto` a trace runs, for those who only want to know.

A mark outside of a plan changes nothing in the traced program, so it is noted where it is passed.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_names: contextvars.ContextVar[dict[str, None] | None] = contextvars.ContextVar(
    "names", default=None
)


@contextlib.contextmanager
def names_of_marked() -> Iterator[dict[str, None]]:
    """Collect the names of the marked functions that are called inside of the context."""
    found: dict[str, None] = {}
    token = _names.set(found)
    try:
        yield found
    finally:
        _names.reset(token)


def note(name: str) -> None:
    """Record a call of a marked function where `names_of_marked` collects them."""
    found = _names.get()
    if found is not None:
        found[name] = None
