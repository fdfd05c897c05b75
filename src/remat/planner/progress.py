"""The status line that shows the progress of planning on a terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console


class Progress:
    """A status line on the terminal, or a function that receives its texts instead."""

    def __init__(self, wanted: bool | Callable[[str], None]) -> None:
        console = Console(stderr=True)
        is_shown = wanted is True and console.is_terminal
        self._status = console.status("remat") if is_shown else None
        self._tell = None if isinstance(wanted, bool) else wanted

    def __enter__(self) -> Callable[[str], None]:
        if self._status is not None:
            self._status.start()
        return self.show

    def show(self, what: str) -> None:
        if self._status is not None:
            self._status.update(f"remat: {what}")
        if self._tell is not None:
            self._tell(what)

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
