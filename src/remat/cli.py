"""The command `remat`: explain, plan, report, compare, demo, devices.

What is looked at is named MODULE:FUNCTION or FILE.py:FUNCTION: a function without required arguments
that returns ``(step, args)`` or ``(step, args, kwargs)``, where `step` is a loss (its first argument is
differentiated) or a whole training step, and the arguments are arrays or `jax.ShapeDtypeStruct`s.
Nothing is run but that function.

Exit codes: 0 done, 1 the budget is not met, there is another error of the step or the library, or it
was interrupted, 2 the command line is wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import json
import operator
import os
import pkgutil
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat import files, units
from remat.errors import (
    BudgetError,
    PlanError,
    PolicyError,
    RematError,
    ReportError,
    UnitsError,
    UnknownNameError,
    closest,
)
from remat.explain import explain as make_explanation
from remat.explain.step import has_gradient, value_and_gradient
from remat.planner.fit import fit
from remat.planner.plan import plan as make_plan
from remat.planner.plan_file import Plan
from remat.planner.regions import auto
from remat.printing import printable, shown
from remat.program.devices import DEVICES
from remat.program.targets import check_name, target as find_target
from remat.report.explanation import Explanation
from remat.report.model import ParetoPoint
from remat.transform import policies
from remat.transform.checkpoint import checkpoint

_ERROR = 1


# --------------------------------------------------------------------------------------------------
# Errors in one line


class _OneLine(click.ClickException):
    exit_code = _ERROR

    def show(self, file: Any = None) -> None:
        click.echo(_line(self.message), file=file, err=file is None)


def _line(message: str) -> str:
    return printable(f"remat: {' '.join(message.split())}")


class _OneLineUsage(_OneLine):
    """A wrong command line, with where to read about it."""

    exit_code = 2

    def __init__(self, error: click.UsageError) -> None:
        command = error.ctx.command_path if error.ctx is not None else "remat"
        message = error.format_message().rstrip(".")
        super().__init__(f"{message}{'' if message.endswith('?') else '.'} See {command} --help.")


def _in_one_line(error: click.UsageError) -> click.ClickException:
    # Without any arguments the message is the help.
    return error if isinstance(error, click.exceptions.NoArgsIsHelpError) else _OneLineUsage(error)


class _Commands(click.Group):
    """A group whose commands' errors are one line, unless --debug asks for the traceback."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            raise _in_one_line(error) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise _in_one_line(error) from None
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:  # nobody reads on, as with `| head`: click ends quietly
            raise
        except Exception as error:
            if ctx.meta.get("remat.debug"):
                text = "".join(traceback.format_exception(error))
                click.echo(printable(text, keep="\n"), err=True, nl=False)
                raise click.exceptions.Exit(_ERROR) from error
            raise _OneLine(_said(error)) from error


# What the library's errors say of Python's options, and what the command line says.
_IN_OPTIONS = (
    (r"\b(budget|target|costs|policy|plan)=(?!\w|['\"])", r"--\1"),
    (r"\b(budget|target|costs)=", r"--\1 "),
    (r"\ballow offload=True\b", "leave out --no-offload"),
    (r"A target is None \(the devices at hand\)", "A target is left out (the devices at hand)"),
    (r" Pass strict=False if it may be absent\.", ""),
)


def _in_options(error: RematError) -> str:
    """Return what an error says, in the words of the command line."""
    text = str(error)
    for python, option in _IN_OPTIONS:
        text = re.sub(python, option, text)
    return text


def _said(error: BaseException) -> str:
    """Return what any error says, also a user's that fails to say it."""
    if isinstance(error, RematError):
        return _in_options(error)
    try:
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta["remat.debug"] = value or ctx.meta.get("remat.debug", False)


_debugging = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    callback=_debug,
    help="Show the traceback of an error.",
)


# --------------------------------------------------------------------------------------------------
# What is looked at


@contextlib.contextmanager
def _user_code() -> Iterator[None]:
    """What the user's code prints is not our output, and that it wants to exit is an error."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:
        raise _OneLine(f"the module or function called sys.exit({shown(error.code)}).") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Not an Exception is pytest's Skipped, for one; a broken pipe of the user's is not our output's.
        if isinstance(error, Exception) and not isinstance(error, BrokenPipeError):
            raise
        raise _OneLine(_said(error)) from error


@dataclasses.dataclass(frozen=True)
class _Subject:
    """A loss or training step and what it is called with."""

    name: str
    step: Callable
    args: tuple
    kwargs: dict[str, Any]

    @functools.cached_property
    def is_step(self) -> bool:
        """Whether it holds its gradient already."""
        with _user_code():
            return has_gradient(self.step, self.args, self.kwargs)

    def planned(self) -> Callable:
        """The step to plan: of a loss, one whose loss is one region."""
        return self.step if self.is_step else value_and_gradient(auto(self.step))

    def under(self, policy: policies.Policy | None) -> Callable:
        """The loss in one region under a policy; with None as it is."""
        if policy is None:
            return self.step
        if self.is_step:
            raise click.UsageError(
                f"--policy needs the loss, and {self.name} returns a step that holds its gradient."
            )
        return checkpoint(self.step, policy=policy)


def _subject(spec: str) -> _Subject:
    module, colon, name = spec.rpartition(":")
    if not colon or not module or not name:
        raise click.UsageError(
            f"{spec!r} is not MODULE:FUNCTION or FILE.py:FUNCTION, such as train:step."
        )
    with _user_code():
        function = _found(_loaded(module, spec), name, spec)
        _check_callable_bare(function, spec)
        made = function()
    if not isinstance(made, (tuple, list)) or len(made) not in (2, 3) or not callable(made[0]):
        raise click.UsageError(
            f"{spec} must return (step, args) or (step, args, kwargs) with a function as its step, "
            f"not {_shortly(made)}."
        )
    step, args, kwargs = (*made, {})[:3]
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        raise click.UsageError(
            f"{spec} must return a tuple of arguments after the step, and then a dict if any, "
            f"not {_shortly(args)}."
        )
    return _Subject(spec, step, tuple(args), kwargs)


def _loaded(module: str, spec: str) -> Any:
    # The current directory is where the user's code is, as for `python -m`.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if module.endswith(".py"):
        return _loaded_file(module)
    if not all(part.isidentifier() for part in module.split(".")):
        raise click.UsageError(f"{spec!r}: {module!r} cannot be a module; write FILE.py:FUNCTION.")
    try:
        return pkgutil.resolve_name(f"{module}:")
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise click.UsageError(
                f"there is no module {module!r} here ({os.getcwd()}) or installed."
            ) from error
        raise


def _loaded_file(name: str) -> Any:
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


def _found(module: Any, name: str, spec: str) -> Callable:
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
    checked: Callable = found
    return checked


def _check_callable_bare(function: Callable, spec: str) -> None:
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


def _shortly(value: Any) -> str:
    return f"{type(value).__name__} {shown(value)}"


# Policies by name


_POLICIES = {
    "everything_saveable": policies.everything_saveable,
    "nothing_saveable": policies.nothing_saveable,
    "dots_saveable": policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": policies.dots_with_no_batch_dims_saveable,
}


class _OutputFile(click.ParamType):
    """A file to write: that it cannot be written is said before the work is done."""

    name = "file"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        why = files.refusal(value)
        if why is not None:
            self.fail(f"{value!r} cannot be written: {why}.", param, ctx)
        return value


class _InputFile(click.ParamType):
    """A file to read."""

    name = "file"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            files.open_regular(value).close()
        except files.PROBLEMS as error:
            self.fail(f"{value!r} cannot be read: {files.reason(error)}.", param, ctx)
        return value


class _Explained(_InputFile):
    """An explanation's file, or MODULE:FUNCTION."""

    name = "explained"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return super().convert(value, param, ctx) if value.endswith(".json") else value


class _BudgetText(click.ParamType):
    """A budget, which stays as it was written."""

    name = "bytes"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            units.parse_budget(value, "")
        except UnitsError as error:
            self.fail(_in_options(error), param, ctx)
        return value


class _BudgetList(_BudgetText):
    """Budgets with commas between them."""

    name = "list"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        names = value if isinstance(value, tuple) else value.split(",")
        given = [name for n in names if (name := n.strip())]
        return tuple(super(_BudgetList, self).convert(name, param, ctx) for name in given)


class _TargetName(click.ParamType):
    """A target's name; whether it can be compiled for is seen once the user's module is loaded."""

    name = "target"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value:
            try:
                check_name(value)
            except PlanError as error:
                self.fail(_in_options(error), param, ctx)
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        names = [
            "cpu",
            *(f"{d.platform}:{d.name}" for d in DEVICES.values() if d.platform != "cpu"),
        ]
        return _completed(names, incomplete)


class _PolicyName(click.ParamType):
    name = "policy"

    def convert(self, value: Any, param: Any, ctx: Any) -> policies.Policy:
        if isinstance(value, policies.Policy):
            return value
        if value in _POLICIES:
            return _POLICIES[value]
        if value.startswith("names:"):
            try:
                return policies.save_only_these_names(*value[6:].split(","))
            except PolicyError as error:
                self.fail(_in_options(error), param, ctx)
        known = closest(value, [*_POLICIES, "names:A,B"])
        self.fail(f"there is no policy {value!r}; {known}", param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        return _completed(_POLICIES, incomplete)


def _completed(
    names: Iterable[str], incomplete: str
) -> list[click.shell_completion.CompletionItem]:
    return [click.shell_completion.CompletionItem(n) for n in names if n.startswith(incomplete)]


# Options that several commands have


_spec = click.argument("spec", metavar="MODULE:FUNCTION")
_target = click.option(
    "--target",
    type=_TargetName(),
    metavar="TARGET",
    help="The device: at hand, or ahead of time such as gpu:h100 or tpu:v5e:2x2.",
)
_policy = click.option(
    "--policy",
    type=_PolicyName(),
    metavar="POLICY",
    help="Put the loss into one region under this policy: nothing_saveable, dots_saveable, "
    "dots_with_no_batch_dims_saveable, everything_saveable, or names:A,B.",
)
_costs = click.option(
    "--costs",
    type=click.Choice(["roofline", "measured"]),
    default="roofline",
    show_default=True,
    help="What recomputing takes: by the device's figures, or timed on the device at hand.",
)
_budget = click.option(
    "--budget",
    type=_BudgetText(),
    metavar="BYTES",
    help="Plan for this peak first, such as 8GiB or 60%.",
)
_plan = click.option(
    "--plan", "plan_file", type=_InputFile(), metavar="FILE", help="Apply this plan first."
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_html = click.option("--html", type=_OutputFile(), metavar="FILE", help="Write one HTML page.")
_no_compile = click.option(
    "--no-compile", is_flag=True, help="Do not ask the compiler for its figures."
)


@contextlib.contextmanager
def _working(on: str) -> Iterator[None]:
    """Say what takes time, on a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(Text(printable(on))):
        yield


def _say(text: str) -> None:
    """Print to standard output, with "?" for what its encoding does not have."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    click.echo(text.rstrip("\n").encode(encoding, "replace").decode(encoding))


def _write_page(path: str, page: str) -> None:
    files.write_text(path, page, ReportError)
    _say_written(path)


def _say_written(path: str) -> None:
    click.echo(printable(f"wrote {path}"), err=True)


def _width() -> int:
    return max(60, shutil.get_terminal_size((110, 40)).columns)


def _color() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


# --------------------------------------------------------------------------------------------------
# Commands


@click.group("remat", cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(importlib.metadata.version("remat"), prog_name="remat")
@_debugging
def main() -> None:
    """Rematerialization for JAX: see what a training step keeps in memory, and plan it.

    MODULE:FUNCTION (or FILE.py:FUNCTION) names a function without required arguments that returns
    (step, args): a loss or a whole training step, and arguments to call it with. Shapes will do:

    \b
        # train.py
        def problem():
            params = jax.eval_shape(init, key)
            return loss, (params, jax.ShapeDtypeStruct((8, 128), jnp.int32))

    Examples:

    \b
        remat demo
        remat explain train:problem
        remat explain train:problem --policy dots_saveable --html step.html
        remat plan train:problem --budget 8GiB -o plan.json
        remat plan train:problem --budget 12GiB --target tpu:v5e:2x2
        remat report train:problem -o report.html
        remat compare before.json after.json

    Exit codes: 0 done; 1 the budget is not met, another error, or interrupted; 2 wrong command line.

    Completion: eval "$(_REMAT_COMPLETE=bash_source remat)"  (or zsh_source, fish_source)
    """


@main.command()
@_spec
@_budget
@_plan
@_policy
@_target
@_no_compile
@_json
@_html
@_debugging
def explain(
    spec: str,
    budget: str | None,
    plan_file: str | None,
    policy: policies.Policy | None,
    target: str | None,
    no_compile: bool,
    as_json: bool,
    html: str | None,
) -> None:
    """Say what a step saves, recomputes and holds, and why remat has no effect, if it hasn't.

    \b
        remat explain train:problem
        remat explain train:problem --budget 60%
        remat explain train:problem --json > step.json
    """
    if (budget is not None) + (plan_file is not None) + (policy is not None) > 1:
        raise click.UsageError("give one of --budget, --plan and --policy.")
    subject = _subject(spec)
    given = Plan.load(plan_file) if plan_file is not None else None
    if budget is not None:
        given = _planned(subject, budget, target)
    made = _explained(subject, given, policy, target, not no_compile)
    if html is not None:
        _write_page(html, made.to_html())
    if as_json:
        _say(made.to_json())
    elif html is None:
        _say(made.to_text(width=_width(), color=_color()))


@main.command()
@_spec
@click.option("--budget", type=_BudgetText(), metavar="BYTES",
              help="The peak on one device, such as 8GiB or 60%.")  # fmt: skip
@_target
@_costs
@click.option("-o", "--output", type=_OutputFile(), metavar="FILE", help="Write the plan here.")
@click.option("--html", type=_OutputFile(), metavar="FILE",
              help="Write a page on the step under the plan.")  # fmt: skip
@click.option("--offload/--no-offload", default=True, show_default=True,
              help="Let loops keep values in the host's memory, if the target has one.")  # fmt: skip
@_json
@_debugging
def plan(
    spec: str,
    budget: str | None,
    target: str | None,
    costs: str,
    output: str | None,
    html: str | None,
    offload: bool,
    as_json: bool,
) -> None:
    """Choose what to save and recompute so that the compiler's peak is within a budget.

    A loss is planned as one region; a whole training step marks its own with remat.auto. Without
    --budget the device's memory is the budget.

    \b
        remat plan train:problem --budget 8GiB -o plan.json
        remat plan train:problem --budget 60% --target gpu:h100
    """
    subject = _subject(spec)
    made = _planned(subject, budget, target, costs, offload=offload)
    if output is not None:
        made.save(output)
        _say_written(output)
    if html is not None:
        page = _explained(subject, made, None, target, True)
        page = dataclasses.replace(page, pareto=_points_of(made, "the plan"))
        _write_page(html, page.to_html())
    _say(made.to_json() if as_json else made.explain())


@main.command()
@_spec
@_budget
@click.option(
    "--budgets", type=_BudgetList(), default=(), metavar="LIST", multiple=True,
    help="Plan for these as well, for the curve of peak against time: 75%,50%,35%.",
)  # fmt: skip
@_target
@_costs
@click.option(
    "-o", "--html", "html", type=_OutputFile(), default="report.html",
    show_default=True, metavar="FILE", help="The page.",
)  # fmt: skip
@_debugging
def report(
    spec: str,
    budget: str | None,
    budgets: tuple[tuple[str, ...], ...],
    target: str | None,
    costs: str,
    html: str,
) -> None:
    """Write a page on a step, with the plans and standard policies to choose from.

    With --budget the page is on the step under that plan, and shows all that was compiled for it.

    \b
        remat report train:problem
        remat report train:problem --budget 8GiB -o step.html
        remat report train:problem --budget 50% --budgets 75%,35%,25%
    """
    subject = _subject(spec)
    given = None if budget is None else _planned(subject, budget, target, costs)
    made = _explained(subject, given, None, target, True)
    points = [_point(made, "as it is", chosen=True)]
    if given is not None:
        points = [*_points_of(given, f"plan for {budget}")]
    others = dict.fromkeys(name for names in budgets for name in names)
    for other in [name for name in others if name != budget]:
        try:
            found = _points_of(_planned(subject, other, target, costs), f"plan for {other}")[-1]
            points.append(dataclasses.replace(found, chosen=False))
        except BudgetError as error:
            click.echo(_line(f"no plan for {other}: {_said(error)}"), err=True)
    if not subject.is_step:
        for name, policy in _POLICIES.items():
            if name != "everything_saveable":
                under = _explained(subject, None, policy, target, True, f"compiling with {name}")
                points.append(_point(under, f"whole loss {name}"))
    files.write_text(html, dataclasses.replace(made, pareto=tuple(points)).to_html(), ReportError)
    _say(printable(f"wrote {html}"))


@main.command()
@click.argument("before", type=_Explained())
@click.argument("after", type=_Explained())
@_target
@_no_compile
@_json
@_html
@_debugging
def compare(
    before: str, after: str, target: str | None, no_compile: bool, as_json: bool, html: str | None
) -> None:
    """Say what changes from one step to another.

    BEFORE and AFTER are MODULE:FUNCTION, or files that `remat explain --json` wrote.

    \b
        remat compare train:before train:after
        remat compare before.json train:problem
    """
    first, second = (
        Explanation.load(what)
        if what.endswith(".json")
        else _explained(_subject(what), None, None, target, not no_compile)
        for what in (before, after)
    )
    found = first.diff(second)
    if html is not None:
        _write_page(html, found.to_html())
    if as_json:
        _say(found.to_json())
    elif html is None:
        _say(found.to_text(width=_width(), color=_color()))


@main.command()
@click.option("--budget", type=_BudgetText(), metavar="BYTES", default="50%", show_default=True,
              help="What the plan may take.")  # fmt: skip
@_target
@_debugging
def demo(budget: str, target: str | None) -> None:
    """Plan a small network that is built in, and show the step before and after.

    \b
        remat demo
        remat demo --budget 30% --target tpu:v5e
    """
    subject = _Subject("demo", _demo_loss, _demo_arguments(), {})
    before = _explained(subject, None, None, target, True)
    after = _explained(subject, _planned(subject, budget, target), None, target, True)
    _say(before.to_text(width=_width(), color=_color(), most=4))
    _say("")
    _say(before.diff(after).to_text(width=_width(), color=_color(), most=4))


@main.command()
@_json
@_debugging
def devices(as_json: bool) -> None:
    """List the devices whose figures are known, and those at hand.

    \b
        remat devices
    """
    here = [str(d.device_kind) for d in jax.devices()]
    known = list(DEVICES.values())
    if as_json:
        rows = [
            {
                "target": d.name if d.platform == "cpu" else f"{d.platform}:{d.name}",
                "memory_bytes": d.memory_bytes,
                "bandwidth_bytes_per_s": d.bandwidth_bytes_per_s,
                "flops_per_s": dict(d.flops),
            }
            for d in known
        ]
        _say(json.dumps({"at_hand": here, "known": rows}, indent=1))
        return
    at_hand = printable(f"at hand: {', '.join(sorted(set(here)))} × {len(here)}")
    table = Table(title=Text(at_hand), box=None)
    for column in ("target", "memory", "bandwidth", "bfloat16", "float32"):
        table.add_column(column, justify="left" if column == "target" else "right")
    for d in known:
        table.add_row(
            d.name if d.platform == "cpu" else f"{d.platform}:{d.name}",
            units.format_bytes(d.memory_bytes) if d.memory_bytes else "the host's",
            f"{d.bandwidth_bytes_per_s / 1e9:.0f} GB/s",
            f"{d.flops_per_s('bfloat16') / 1e12:.1f} TFLOP/s",
            f"{d.flops_per_s('float32') / 1e12:.1f} TFLOP/s",
        )
    console = Console(width=_width(), file=io.StringIO(), force_terminal=_color())
    with console.capture() as captured:
        console.print(table)
    _say(captured.get())


# --------------------------------------------------------------------------------------------------


def _planned(
    subject: _Subject,
    budget: str | None,
    target: str | None,
    costs: str = "roofline",
    *,
    offload: bool = True,
) -> Plan:
    """A plan for a budget, which says on a terminal what goes on."""
    at = find_target(target)
    if budget is None and not at.device.memory_bytes:
        raise click.UsageError(
            f"--budget is needed: how much memory {at.name} has is not known to remat."
        )
    if costs == "measured" and at.ahead_of_time:
        raise click.UsageError(
            f"--costs measured times equations on the device, and {at.name} is not at hand."
        )
    step = subject.planned()
    with _user_code():
        return make_plan(
            step,
            *subject.args,
            kwargs=subject.kwargs,
            budget=budget,
            target=at,
            offload=offload,
            costs=costs,
            cache=False,
        )


def _explained(
    subject: _Subject,
    given: Plan | None,
    policy: policies.Policy | None,
    target: str | None,
    compile: bool,
    working: str = "",
) -> Explanation:
    """The step as it is, under a plan or under a policy."""
    step = subject.under(policy)
    if given is not None:
        step = fit(subject.planned(), plan=given, target=target)
    with _user_code(), _working(working or f"explaining {subject.name}"):
        try:
            made = make_explanation(
                step, *subject.args, target=target, compile=compile, **subject.kwargs
            )
        except UnknownNameError as error:
            if policy is None:
                raise
            raise click.UsageError(f"--policy {_in_options(error)}") from error
    return dataclasses.replace(made, title=subject.name)


def _points_of(given: Plan, label: str) -> tuple[ParetoPoint, ...]:
    """What a plan's search compiled: without rematerialization, its attempts, and last itself."""

    def point(peak_bytes: int, flops: float, seconds: float, what: str) -> ParetoPoint:
        share = flops / given.flops if given.flops else 0.0
        return ParetoPoint(peak_bytes, share, seconds, what, verified=True)

    peak_bytes = given.predicted_bytes if given.peak_bytes is None else given.peak_bytes
    final = dataclasses.replace(
        point(peak_bytes, given.extra_flops, given.extra_seconds, label),
        verified=given.is_verified,
        chosen=True,
    )
    attempts = [
        point(a.compiled_bytes, a.extra_flops, a.extra_seconds, f"attempt {number}")
        for number, a in enumerate(given.attempts, 1)
    ]
    points = [point(given.peak_bytes_without_remat, 0.0, 0.0, "nothing rematerialized"), *attempts]
    return (*(p for p in points if p.peak_bytes != peak_bytes), final)


def _point(explanation: Explanation, label: str, *, chosen: bool = False) -> ParetoPoint:
    totals = explanation.totals
    memory = totals.compiled or totals.predicted
    return ParetoPoint(
        memory.peak_bytes,
        totals.extra_flops_share,
        totals.recompute_time_s,
        label,
        verified=totals.compiled is not None,
        chosen=chosen,
    )


def _demo_loss(weights: Any, x: Any) -> Any:
    for w in weights:
        with jax.named_scope("layer"):
            x = x + jnp.tanh(jnp.tanh(x @ w) @ w)
    return jnp.mean(x * x)


def _demo_arguments() -> tuple:
    weights = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 12
    return weights, jax.ShapeDtypeStruct((4096, 128), jnp.float32)
