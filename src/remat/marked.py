"""Records which functions marked by `remat.auto` are called during a trace.

Outside of planning, a mark adds nothing to the traced program, so that the call itself is recorded.
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
