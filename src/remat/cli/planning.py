"""A subject's plan and its explanation."""

from __future__ import annotations

import dataclasses

import click

from remat.cli.errors import in_options
from remat.cli.rendering import working
from remat.cli.subject import Subject, user_code
from remat.errors import UnknownNameError
from remat.explain import explain as explain_step
from remat.planner.fit import fit
from remat.planner.plan import plan as plan_step
from remat.planner.plan_file import Plan
from remat.program.targets import target as find_target
from remat.report.explanation import Explanation
from remat.transform import policies


def plan_subject(
    subject: Subject,
    budget: str | None,
    target: str | None,
    costs: str = "roofline",
    *,
    offload: bool | str = True,
) -> Plan:
    """Return a plan of a subject for a budget, or for the device's memory if there is none.

    Args:
      offload: as of `remat.plan`.
    """
    at = find_target(target)
    if budget is None and not at.device.memory_bytes:
        raise click.UsageError(
            f"--budget is needed: how much memory {at.name} has is not known to remat."
        )
    if costs == "measured" and at.ahead_of_time:
        raise click.UsageError(
            f"--costs measured times equations on the device, and {at.name} is not at hand."
        )
    step = subject.to_plan()
    with user_code():
        return plan_step(
            step,
            *subject.args,
            kwargs=subject.kwargs,
            budget=budget,
            target=at,
            offload=offload,
            costs=costs,
            cache=False,
        )


def explain_subject(
    subject: Subject,
    *,
    plan: Plan | None = None,
    policy: policies.Policy | None = None,
    target: str | None = None,
    compile: bool = True,
    status: str = "",
) -> Explanation:
    """Return the explanation of a subject as it is, under a plan, or under a policy.

    Args:
      status: the status line while it runs; empty for the subject's name.
    """
    step = subject.under(policy)
    if plan is not None:
        step = fit(subject.to_plan(), plan=plan, target=target)
    with user_code(), working(status or f"explaining {subject.name}"):
        try:
            made = explain_step(
                step, *subject.args, target=target, compile=compile, **subject.kwargs
            )
        except UnknownNameError as error:
            if policy is None:
                raise
            raise click.UsageError(f"--policy {in_options(error)}") from error
    return dataclasses.replace(made, title=subject.name)
