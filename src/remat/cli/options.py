"""The types of arguments, and the options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

from remat import files, units
from remat.cli.errors import in_options
from remat.cli.rendering import target_of
from remat.errors import PlanError, PolicyError, UnitsError, closest
from remat.planner.host_state import parse_offload
from remat.program.devices import DEVICES
from remat.program.targets import check_name
from remat.transform import policies

POLICIES = {
    "everything_saveable": policies.everything_saveable,
    "nothing_saveable": policies.nothing_saveable,
    "dots_saveable": policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": policies.dots_with_no_batch_dims_saveable,
}


# --------------------------------------------------------------------------------------------------
# Types of arguments


class OutputFile(click.ParamType):
    """A file to write. If it cannot be written, this is an error before any work is done."""

    name = "file"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        why = files.refusal(value)
        if why is not None:
            self.fail(f"{value!r} cannot be written: {why}.", param, ctx)
        return value


class InputFile(click.ParamType):
    """A file to read."""

    name = "file"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            files.open_regular(value).close()
        except files.PROBLEMS as error:
            self.fail(f"{value!r} cannot be read: {files.reason(error)}.", param, ctx)
        return value


class Explained(InputFile):
    """An explanation's file, or MODULE:FUNCTION."""

    name = "explained"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(value, param, ctx) if value.endswith(".json") else value


class BudgetText(click.ParamType):
    """A valid budget, as the user's text."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            units.parse_budget(value, "")
        except UnitsError as error:
            self.fail(in_options(error), param, ctx)
        return value


class BudgetList(BudgetText):
    """Budgets separated by commas."""

    name = "list"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        names = value if isinstance(value, tuple) else value.split(",")
        given = [name for n in names if (name := n.strip())]
        return tuple(super(BudgetList, self).convert(name, param, ctx) for name in given)


class TargetName(click.ParamType):
    """A target's name. Whether its compiler is available is checked after the user's module is loaded."""

    name = "target"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value:
            try:
                check_name(value)
            except PlanError as error:
                self.fail(in_options(error), param, ctx)
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        others = (target_of(d) for d in DEVICES.values() if d.platform != "cpu")
        return _completions(["cpu", *others], incomplete)


class OffloadedKinds(click.ParamType):
    """Kinds of values that may be kept in the host's memory, separated by commas or bars."""

    name = "kinds"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        kinds = value.replace(",", "|")
        try:
            parse_offload(kinds)
        except PlanError as error:
            self.fail(in_options(error), param, ctx)
        return kinds


class PolicyName(click.ParamType):
    """A policy by its name, or `names:A,B` for one that saves the values with these names."""

    name = "policy"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> policies.Policy:
        if isinstance(value, policies.Policy):
            return value
        if value in POLICIES:
            return POLICIES[value]
        if value.startswith("names:"):
            try:
                return policies.save_only_these_names(*value[6:].split(","))
            except PolicyError as error:
                self.fail(in_options(error), param, ctx)
        known = closest(value, [*POLICIES, "names:A,B"])
        self.fail(f"there is no policy {value!r}; {known}", param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        return _completions(POLICIES, incomplete)


def _completions(
    names: Iterable[str], incomplete: str
) -> list[click.shell_completion.CompletionItem]:
    return [click.shell_completion.CompletionItem(n) for n in names if n.startswith(incomplete)]


# --------------------------------------------------------------------------------------------------
# Options


spec_argument = click.argument("spec", metavar="MODULE:FUNCTION")
target_option = click.option(
    "--target",
    type=TargetName(),
    metavar="TARGET",
    help="The device: at hand, or ahead of time such as gpu:h100 or tpu:v5e:2x2.",
)
policy_option = click.option(
    "--policy",
    type=PolicyName(),
    metavar="POLICY",
    help="Put the loss into one region under this policy: nothing_saveable, dots_saveable, "
    "dots_with_no_batch_dims_saveable, everything_saveable, or names:A,B.",
)
costs_option = click.option(
    "--costs",
    type=click.Choice(["roofline", "measured"]),
    default="roofline",
    show_default=True,
    help="The cost model of recomputation: the device's figures, or timings on the device at hand.",
)
offload_option = click.option(
    "--offload",
    type=OffloadedKinds(),
    metavar="KINDS",
    help="What may be kept in the host's memory, if the target has one: activations (by default), "
    "optimizer, weights, or several of them, separated by commas.",
)
no_offload_option = click.option(
    "--no-offload", is_flag=True, help="Keep nothing in the host's memory."
)
budget_option = click.option(
    "--budget",
    type=BudgetText(),
    metavar="BYTES",
    help="Plan for this peak first, such as 8GiB or 60%.",
)
plan_option = click.option(
    "--plan", "plan_file", type=InputFile(), metavar="FILE", help="Apply this plan first."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
html_option = click.option("--html", type=OutputFile(), metavar="FILE", help="Write one HTML page.")
no_compile_option = click.option(
    "--no-compile", is_flag=True, help="Do not ask the compiler for its figures."
)
all_option = click.option(
    "--all",
    "show_all",
    is_flag=True,
    help="Show all tables, with every value; not one screen of them.",
)


def explanation_options(command: Callable) -> Callable:
    """Add the options of commands that explain steps: where, and how the result is shown."""
    options = (target_option, no_compile_option, json_option, html_option, all_option)
    for option in reversed(options):  # a decorator's option is listed before those below it
        command = option(command)
    return command
