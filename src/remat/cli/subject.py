"""The subject of a command: the loss or step that MODULE:FUNCTION returns, and its arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import operator
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import click

from remat.aliases import PyTree
from remat.cli.errors import OneLineError, message_of, place_of
from remat.errors import closest
from remat.explain.step import has_gradient, value_and_gradient
from remat.module_steps import of_arrays
from remat.printing import shown
from remat.transform import policies
from remat.transform.checkpoint import checkpoint


@dataclasses.dataclass(frozen=True)
class Subject:
    """A loss or training step and the arguments to call it with."""

    name: str
    step: Callable[..., PyTree]
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]

    @functools.cached_property
    def is_step(self) -> bool:
        """Return whether it computes its gradient itself, as a training step does and a loss does not."""
        with user_code():
            return has_gradient(self.step, self.args, self.kwargs)

    def to_plan(self) -> Callable[..., PyTree]:
        """Return the step to plan; for a loss, the function that computes its value and gradient."""
        return self.step if self.is_step else value_and_gradient(self.step)

    def under(self, policy: policies.Policy | None) -> Callable[..., PyTree]:
        """Return the loss as one region under a policy, or the step unchanged if it is None."""
        if policy is None:
            return self.step
        if self.is_step:
            raise click.UsageError(
                f"--policy needs the loss, and {self.name} returns a step that holds its gradient."
            )
        return checkpoint(self.step, policy=policy)


@contextlib.contextmanager
def user_code() -> Iterator[None]:
    """Redirect output of the user's code to standard error, and turn its `sys.exit` into an error."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:
        raise OneLineError(
            f"the module or function called sys.exit({shown(error.code)})."
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Some errors, such as pytest's Skipped, are not Exceptions. A broken pipe in the user's code is an
        # error, but that of our own output is not.
        if isinstance(error, Exception) and not isinstance(error, BrokenPipeError):
            raise
        raise OneLineError(message_of(error) + place_of(error)) from error


def load_subject(spec: str) -> Subject:
    """Call the function that MODULE:FUNCTION or FILE.py:FUNCTION names, and return its step and arguments.

    Raises:
      click.UsageError: if there is no such function, or it does not return a step with its arguments.
    """
    module, colon, name = spec.rpartition(":")
    if not colon or not module or not name:
        raise click.UsageError(
            f"{spec!r} is not MODULE:FUNCTION or FILE.py:FUNCTION, such as train:step."
        )
    with user_code():
        function = _function_named(name, _load_module(module, spec), spec)
        _check_needs_no_arguments(function, spec)
        made = function()
    if not isinstance(made, (tuple, list)) or len(made) not in (2, 3) or not callable(made[0]):
        raise click.UsageError(
            f"{spec} must return (step, args) or (step, args, kwargs) with a function as its step, "
            f"such as `return step, (params, batch)`, not {_made(made)}."
        )
    step, args, kwargs = (*made, {})[:3]
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        raise click.UsageError(
            f"{spec} must return the step's arguments as one tuple, and keywords, if any, as a dict "
            f"after it, such as `return step, (params, batch)`, not {_made(made)}."
        )
    with user_code():
        step, args, kwargs = of_arrays(step, tuple(args), kwargs)
    return Subject(spec, step, args, kwargs)


def _load_module(module: str, spec: str) -> ModuleType:
    # User code in the current directory can be imported, as with `python -m`.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if module.endswith(".py"):
        return _load_file(module)
    if not all(part.isidentifier() for part in module.split(".")):
        raise click.UsageError(f"{spec!r}: {module!r} cannot be a module; write FILE.py:FUNCTION.")
    try:
        loaded: ModuleType = pkgutil.resolve_name(f"{module}:")
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise click.UsageError(
                f"there is no module {module!r} here ({os.getcwd()}) or installed."
            ) from error
        raise
    return loaded


def _load_file(name: str) -> ModuleType:
    path = Path(name)
    if not path.is_file():
        raise click.UsageError(f"there is no file {name!r}.")
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def _function_named(name: str, module: ModuleType, spec: str) -> Callable[..., PyTree]:
    try:
        found = operator.attrgetter(name)(module)
    except AttributeError as error:
        owner = vars(error.obj) if hasattr(error.obj, "__dict__") else {}
        known = [n for n, v in owner.items() if callable(v) and not n.startswith("_")]
        missing = error.name or name
        raise click.UsageError(
            f"{spec}: there is no function {missing!r}; {closest(missing, known)}"
        ) from error
    if not callable(found):
        raise click.UsageError(f"{spec} is not a function but {_shortly(found)}.")
    checked: Callable[..., PyTree] = found
    return checked


def _check_needs_no_arguments(function: Callable[..., PyTree], spec: str) -> None:
    empty = inspect.Parameter.empty
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is empty and p.kind not in variadic
    ]
    if needed:
        raise click.UsageError(
            f"{spec} needs arguments ({', '.join(needed)}): name a function without, which returns "
            "(step, args)."
        )


def _made(value: object) -> str:
    """Return a description of an invalid return value; for a tuple, the types of its items."""
    if not isinstance(value, (tuple, list)) or not value:
        return _shortly(value)
    few = ", ".join(type(item).__name__ for item in value[:5])
    return f"({few}{', ...' if len(value) > 5 else ''})"


def _shortly(value: object) -> str:
    return f"{type(value).__name__} {shown(value)}"
