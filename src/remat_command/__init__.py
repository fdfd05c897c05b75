"""The script `remat`, which loads the library.

It is a separate package, because importing anything of `remat` imports JAX, which takes
seconds. Ctrl-C in these seconds would give a traceback from JAX's modules, or be lost in one of its
extensions; here it ends the process immediately, as the shell expects.
"""

from __future__ import annotations

import importlib
import itertools
import signal
import sys


def main() -> None:
    """Run the command line."""
    end_quietly_on_interrupt()
    command = importlib.import_module("remat.cli").main
    run = importlib.import_module("remat.cli.errors").run
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run(command)


def end_quietly_on_interrupt() -> None:
    """Let Ctrl-C end the process without a traceback, unless its handler is not Python's default.

    A background job of a shell ignores Ctrl-C, and continues to.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def is_module_run() -> bool:
    """Return whether Python imports the package `remat` in order to run `python -m remat`."""
    return sys.argv[:1] == ["-m"] and any(
        flag.startswith("-") and flag.endswith("m") and module.partition(".")[0] == "remat"
        for flag, module in itertools.pairwise(sys.orig_argv)
    )
