"""Pauses of Python's garbage collector during computations on programs.

Planning makes millions of small objects that last until it ends. The collector runs after every few hundred
of them, looks at all of them again and again, and frees next to nothing, since programs have no reference
cycles: that is a quarter to a half of the time of such a computation. So it is paused (`paused`), except
while the user's code is traced and while a compiler runs (`resumed`), which leave cycles behind.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


class _State(threading.local):
    """Whether this thread pauses the collector."""

    pauses = False


_state = _State()
_lock = threading.Lock()
_n_pausing = 0  # threads
_was_enabled = False  # before the first of them paused it


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pause the garbage collector, also as a decorator. The collector belongs to all threads.

    It is enabled again when no thread pauses it any more, unless it was disabled before.
    """
    with _set(True):
        yield


@contextlib.contextmanager
def resumed() -> Iterator[None]:
    """End this thread's pause of the garbage collector for a while, also as a decorator."""
    with _set(False):
        yield


@contextlib.contextmanager
def _set(pauses: bool) -> Iterator[None]:
    before = _state.pauses
    _switch(pauses)
    try:
        yield
    finally:
        _switch(before)


def _switch(pauses: bool) -> None:
    global _n_pausing, _was_enabled
    if pauses == _state.pauses:
        return
    with _lock:
        _state.pauses = pauses
        _n_pausing += 1 if pauses else -1
        if pauses and _n_pausing == 1:
            _was_enabled = gc.isenabled()
            gc.disable()
        elif _n_pausing == 0 and _was_enabled:
            gc.enable()
