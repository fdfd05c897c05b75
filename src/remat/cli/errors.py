"""Errors of the command line: one line each, in the words of its options."""

from __future__ import annotations

import _thread
import contextlib
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import IO, Any

import click

from remat.errors import RematError
from remat.paths import is_own, relative
from remat.printing import printable

_ERROR = 1  # exit code of every error except an invalid command line, whose code is 2
# Seconds until a lost interrupt is repeated; less may interrupt the same callback again.
_AGAIN_S = 0.2


class OneLineError(click.ClickException):
    """An error that is shown as one line and ends the command with exit code 1."""

    exit_code = _ERROR

    def show(self, file: IO[str] | None = None) -> None:
        click.echo(as_line(self.message), file=file, err=file is None)


class _OneLineUsageError(OneLineError):
    """An invalid command line, with the command that shows its help."""

    exit_code = 2

    def __init__(self, error: click.UsageError) -> None:
        command = error.ctx.command_path if error.ctx is not None else "remat"
        message = error.format_message().rstrip(".")
        super().__init__(f"{message}{'' if message.endswith('?') else '.'} See {command} --help.")


def run(command: click.Command) -> None:
    """Run a command as the only task of a process.

    A process that is interrupted while XLA compiles can crash during the interpreter's shutdown, with an exit
    code other than 1. It therefore exits without the shutdown.
    """
    previous, sys.unraisablehook = sys.unraisablehook, _interrupt_again
    try:
        code = command.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort:
        with contextlib.suppress(OSError):
            click.echo("Aborted!", err=True)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(_ERROR)
    finally:
        sys.unraisablehook = previous
    sys.exit(code)


def _interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Interrupt the main thread again if Ctrl-C was lost in a callback that cannot raise.

    Python runs the signal handler at any point of the main thread, such as in JAX's callback of the garbage
    collector. There it only prints the traceback of `KeyboardInterrupt`, and the command would continue.
    """
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    # `threading.Thread.start` would wait for the thread, so that the interrupt would be lost here again.
    _thread.start_new_thread(_interrupt_soon, ())


def _interrupt_soon() -> None:
    time.sleep(_AGAIN_S)
    if hasattr(signal, "pthread_kill"):  # also ends a wait of the main thread
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:
        _thread.interrupt_main()


def as_line(message: str) -> str:
    """Return a message as one printable line that starts with the command's name."""
    return printable(f"remat: {' '.join(message.split())}")


class Commands(click.Group):
    """A group that shows its commands' errors as one line, or with --debug as a traceback."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            raise _in_one_line(error) from None

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise _in_one_line(error) from None
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (
            BrokenPipeError
        ):  # the reader of the output has exited, as in `| head`; click exits quietly
            raise
        except Exception as error:
            if ctx.meta.get("remat.debug"):
                text = "".join(traceback.format_exception(error))
                click.echo(printable(text, keep="\n"), err=True, nl=False)
                raise click.exceptions.Exit(_ERROR) from error
            raise OneLineError(message_of(error) + place_of(error)) from error


def _in_one_line(error: click.UsageError) -> click.ClickException:
    # A command without any arguments shows its help, which has many lines.
    return (
        error
        if isinstance(error, click.exceptions.NoArgsIsHelpError)
        else _OneLineUsageError(error)
    )


def _set_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta["remat.debug"] = value or ctx.meta.get("remat.debug", False)


debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_set_debug,
    help="Show the traceback of an error.",
)


# Patterns of Python options in the library's errors → the options of the command line.
_OPTIONS_BY_PATTERN: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"\b(budget|target|costs|policy|plan)=(?!\w|['\"])", r"--\1"),
    (r"\b(budget|target|costs)=", r"--\1 "),
    (r"\ballow offload=True\b", "leave out --no-offload"),
    (
        r"'activations' \(as True\), 'optimizer' and 'weights', and several of them joined as in "
        r"'activations\|optimizer'",
        "activations, optimizer and weights, and several of them as in activations,optimizer",
    ),
    (r"\boffload='([\w|, ]*)'", lambda match: f"--offload {match[1].replace('|', ',')}"),
    (r"A target is None \(the devices at hand\)", "A target is left out (the devices at hand)"),
    (r" Pass strict=False if it may be absent\.", ""),
)


def in_options(error: RematError) -> str:
    """Return the message of an error with Python's options replaced by those of the command line."""
    text = str(error)
    for python, option in _OPTIONS_BY_PATTERN:
        text = re.sub(python, option, text)
    return text


def place_of(error: BaseException) -> str:
    """Return where in the user's code an error was raised, and how to see the traceback.

    The text is empty for errors of the library.
    """
    if isinstance(error, RematError):
        return ""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if is_own(frame.filename) and frame.lineno
    ]
    if not frames:  # a step made by JAX, such as jax.shard_map(...), has no frame of user code
        return " (--debug shows the traceback)"
    at = frames[-1]
    return f" (at {relative(at.filename)}:{at.lineno}, in {at.name}; --debug shows the traceback)"


def message_of(error: BaseException) -> str:
    """Return the message of any error, including a user's whose `__str__` raises."""
    if isinstance(error, RematError):
        return in_options(error)
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
