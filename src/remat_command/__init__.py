"""The script `remat`, which loads the library.

It is a separate package, because importing anything of `remat` imports JAX, which takes
seconds. Ctrl-C in these seconds would end in a traceback out of JAX's modules, or be lost in one of its
extensions; here it ends the process at once, as the shell expects.
"""

from __future__ import annotations

import importlib
import signal


def main() -> None:
    """Run the command line."""
    previous = signal.getsignal(signal.SIGINT)
    if (
        previous is signal.default_int_handler
    ):  # a shell's background job ignores it, and goes on to
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = importlib.import_module("remat.cli").main
    run = importlib.import_module("remat.cli.errors").run
    signal.signal(signal.SIGINT, previous)
    run(command)
