"""The commands: their arguments, help texts and actions."""

from __future__ import annotations

import dataclasses
import importlib.metadata

import click
import jax
import jax.numpy as jnp

from remat import files
from remat.cli.errors import Commands, as_line, debug_option, message_of
from remat.cli.options import (
    POLICIES,
    BudgetList,
    BudgetText,
    Explained,
    OutputFile,
    all_option,
    budget_option,
    costs_option,
    explanation_options,
    html_option,
    json_option,
    no_offload_option,
    offload_option,
    plan_option,
    policy_option,
    spec_argument,
    target_option,
)
from remat.cli.planning import explain_subject, plan_subject
from remat.cli.rendering import (
    color,
    decisions_as_text,
    devices_as_json,
    devices_as_text,
    point_of_explanation,
    points_of_plan,
    say,
    say_written,
    show,
    width,
    with_points,
    worth_choosing,
    wrapped,
    write_page,
)
from remat.cli.subject import Subject, load_subject
from remat.errors import BudgetError, ReportError
from remat.planner.plan_file import Plan
from remat.printing import printable
from remat.program.devices import DEVICES
from remat.report.explanation import Explanation
from remat.transform import policies


@click.group("remat", cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(importlib.metadata.version("remat"), prog_name="remat")
@debug_option
def main() -> None:
    """Rematerialization for JAX: see what a training step keeps in memory, and plan it.

    MODULE:FUNCTION (or FILE.py:FUNCTION) names a function without required arguments that returns
    (step, args): a loss or a whole training step, and arguments to call it with. Shapes are sufficient:

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

    Exit codes: 0 done; 1 the budget is not met, another error, or interrupted; 2 invalid command line.

    Completion: eval "$(_REMAT_COMPLETE=bash_source remat)"  (or zsh_source, fish_source)
    """


@main.command()
@spec_argument
@budget_option
@plan_option
@policy_option
@explanation_options
@debug_option
def explain(
    spec: str,
    budget: str | None,
    plan_file: str | None,
    policy: policies.Policy | None,
    target: str | None,
    no_compile: bool,
    as_json: bool,
    html: str | None,
    show_all: bool,
) -> None:
    """Show what a step saves, recomputes and holds, and why remat has no effect.

    \b
        remat explain train:problem
        remat explain train:problem --budget 60%
        remat explain train:problem --json > step.json
    """
    if (budget is not None) + (plan_file is not None) + (policy is not None) > 1:
        raise click.UsageError("give one of --budget, --plan and --policy.")
    subject = load_subject(spec)
    given = Plan.load(plan_file) if plan_file is not None else None
    if budget is not None:
        given = plan_subject(subject, budget, target)
    made = explain_subject(
        subject, plan=given, policy=policy, target=target, compile=not no_compile
    )
    show(made, as_json=as_json, html=html, all=show_all)


@main.command()
@spec_argument
@click.option("--budget", type=BudgetText(), metavar="BYTES",
              help="The peak on one device, such as 8GiB or 60%.")  # fmt: skip
@target_option
@costs_option
@click.option("-o", "--output", type=OutputFile(), metavar="FILE", help="Write the plan here.")
@click.option("--html", type=OutputFile(), metavar="FILE",
              help="Write a page on the step under the plan.")  # fmt: skip
@offload_option
@no_offload_option
@all_option
@json_option
@debug_option
def plan(
    spec: str,
    budget: str | None,
    target: str | None,
    costs: str,
    output: str | None,
    html: str | None,
    offload: str | None,
    no_offload: bool,
    show_all: bool,
    as_json: bool,
) -> None:
    """Choose what to save and recompute so that the compiler's peak is within a budget.

    A loss is planned together with its gradient. Any operation may be recomputed; if functions are marked
    by remat.auto, only theirs. Without --budget the device's memory is the budget.

    \b
        remat plan train:problem --budget 8GiB -o plan.json
        remat plan train:problem --budget 60% --target gpu:h100
    """
    if offload is not None and no_offload:
        raise click.UsageError("--offload and --no-offload exclude each other.")
    subject = load_subject(spec)
    made = plan_subject(subject, budget, target, costs, offload=offload or not no_offload)
    if output is not None:
        made.save(output)
        say_written(output)
    if html is not None:
        page = explain_subject(subject, plan=made, target=target)
        page = dataclasses.replace(page, pareto=points_of_plan(made, "the plan"))
        write_page(html, page.to_html())
    if as_json:
        say(made.to_json())
        return
    figures, _, equations = made.explain().partition("\n\n")
    say(wrapped(figures, width()))
    status = "listing what the plan saves and recomputes"
    under = explain_subject(subject, plan=made, target=target, compile=False, status=status)
    say(decisions_as_text(under, all=show_all))
    if show_all:
        say(wrapped(f"\nThe same by equations, as in the file of the plan\n{equations}", width()))
    else:
        say("\n--all shows every value; --html FILE writes an interactive page.")


@main.command()
@spec_argument
@budget_option
@click.option(
    "--budgets", type=BudgetList(), default=(), metavar="LIST", multiple=True,
    help="Plan for these as well, for the curve of peak against time: 75%,50%,35%.",
)  # fmt: skip
@target_option
@costs_option
@click.option(
    "-o", "--html", "html", type=OutputFile(), default="report.html",
    show_default=True, metavar="FILE", help="The page.",
)  # fmt: skip
@debug_option
def report(
    spec: str,
    budget: str | None,
    budgets: tuple[tuple[str, ...], ...],
    target: str | None,
    costs: str,
    html: str,
) -> None:
    """Write a page on a step, with the plans and standard policies to choose from.

    With --budget the page is about the step under that plan, and shows all programs compiled for it.

    \b
        remat report train:problem
        remat report train:problem --budget 8GiB -o step.html
        remat report train:problem --budget 50% --budgets 75%,35%,25%
    """
    subject = load_subject(spec)
    given = None if budget is None else plan_subject(subject, budget, target, costs)
    made = explain_subject(subject, plan=given, target=target)
    points = [point_of_explanation(made, "as it is", chosen=True)]
    if given is not None:
        points = [*points_of_plan(given, f"plan for {budget}")]
    of_plans: dict[str, str] = {}
    others = dict.fromkeys(name for names in budgets for name in names)
    for other in [name for name in others if name != budget]:
        try:
            planned = points_of_plan(
                plan_subject(subject, other, target, costs), f"plan for {other}"
            )
            points.append(dataclasses.replace(planned[-1], chosen=False))
            of_plans[f"plan for {other}"] = other
        except BudgetError as error:
            click.echo(as_line(f"no plan for {other}: {message_of(error)}"), err=True)
    replaced_by = worth_choosing(points)
    for point, better in replaced_by.items():
        if better is not None:
            said = (
                f"The {point.label} is left out: the {better.label} needs no more memory or time."
            )
            click.echo(printable(said), err=True)
    points = [point for point in points if replaced_by[point] is None]
    if not subject.is_step:
        for name, policy in POLICIES.items():
            if name != "everything_saveable":
                under = explain_subject(
                    subject, policy=policy, target=target, status=f"compiling with {name}"
                )
                points.append(point_of_explanation(under, f"whole loss {name}"))
    files.write_text(html, with_points(made, points, of_plans).to_html(), ReportError)
    say(printable(f"wrote {html}"))


@main.command()
@click.argument("before", type=Explained())
@click.argument("after", type=Explained())
@explanation_options
@debug_option
def compare(
    before: str,
    after: str,
    target: str | None,
    no_compile: bool,
    as_json: bool,
    html: str | None,
    show_all: bool,
) -> None:
    """Show the differences between two steps.

    BEFORE and AFTER are MODULE:FUNCTION, or files that `remat explain --json` wrote.

    \b
        remat compare train:before train:after
        remat compare before.json train:problem
    """
    first, second = (
        Explanation.load(what)
        if what.endswith(".json")
        else explain_subject(load_subject(what), target=target, compile=not no_compile)
        for what in (before, after)
    )
    show(first.diff(second), as_json=as_json, html=html, all=show_all)


@main.command()
@click.option("--budget", type=BudgetText(), metavar="BYTES", default="50%", show_default=True,
              help="What the plan may take.")  # fmt: skip
@target_option
@html_option
@debug_option
def demo(budget: str, target: str | None, html: str | None) -> None:
    """Plan a small network that is built in, and show the step before and after.

    \b
        remat demo
        remat demo --budget 30% --target tpu:v5e
    """
    subject = Subject("demo", _demo_loss, _demo_arguments(), {})
    before = explain_subject(subject, target=target)
    after = explain_subject(subject, plan=plan_subject(subject, budget, target), target=target)
    say(before.to_text(width=width(), color=color(), most=4, brief=True))
    say("")
    say(before.diff(after).to_text(width=width(), color=color(), most=4, brief=True))
    if html is not None:
        write_page(html, after.to_html())


@main.command()
@json_option
@debug_option
def devices(as_json: bool) -> None:
    """List the devices with known figures, and the devices at hand.

    \b
        remat devices
    """
    here = [str(d.device_kind) for d in jax.devices()]
    render = devices_as_json if as_json else devices_as_text
    say(render(list(DEVICES.values()), here))


# --------------------------------------------------------------------------------------------------
# The built-in step of `remat demo`


def _demo_loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in weights:
        with jax.named_scope("layer"):
            x = x + jnp.tanh(jnp.tanh(x @ w) @ w)
    return jnp.mean(x * x)


def _demo_arguments() -> tuple[list[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    weights = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 12
    return weights, jax.ShapeDtypeStruct((4096, 128), jnp.float32)
