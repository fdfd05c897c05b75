"""The findings on a step that follows a plan."""

from __future__ import annotations

from collections.abc import Iterator

from remat.explain.findings.budgets import budget_text, lowest_budget_bytes
from remat.explain.findings.facts import Facts, Followed
from remat.report.model import Finding
from remat.units import format_bytes


def follows_plan(facts: Facts, plan: Followed) -> Iterator[Finding]:
    """Yield the finding on the plan's figures and other budgets, or that no gradient is planned."""
    if facts.step.undifferentiated is not None:
        yield Finding(
            "fitted_without_gradient",
            "warning",
            "remat.fit was given a function that computes no gradient. By itself it saves nothing for a "
            "backward pass, so its plan has nothing to recompute.",
            "Fit the whole training step, or remat.fit(jax.value_and_grad(loss), ...).",
        )
        return
    peak = (
        "not confirmed by the compiler"
        if plan.peak_bytes is None
        else format_bytes(plan.peak_bytes)
    )
    share = plan.extra_flops / plan.flops if plan.flops else 0.0
    yield Finding(
        "follows_plan",
        "info",
        f"The step follows a plan: peak {peak}, budget {format_bytes(plan.budget_bytes)}, "
        f"{format_bytes(plan.without_remat_bytes)} without rematerialization, for {100 * share:.2g} % more "
        "FLOPs.",
        _after_plan(facts, plan, share),
    )


def _after_plan(facts: Facts, plan: Followed, share: float) -> str:
    """Return the next step for a step that follows a plan."""
    peak = plan.peak_bytes or facts.peak_bytes
    at_most = plan.without_remat_bytes
    if facts.refused is not None:  # whose finding has the budget
        return ""
    if 2 * facts.fixed_bytes >= peak:
        return (
            "A smaller budget gains little: most of the peak are arguments and results, see below."
        )
    if share > 0.01 and peak < 0.9 * at_most:
        between = (peak + at_most) // 2
        return (
            f"If there is room for {format_bytes(between)}, {facts.fit_call(budget_text(between))} "
            "recomputes less."
        )
    floor = lowest_budget_bytes(facts) / max(1, facts.predicted.peak_bytes)
    lower = max((3 * peak + facts.fixed_bytes) // 4, int(1.05 * floor * peak))
    if lower > 0.95 * peak:
        return "A smaller budget gains little: most of the peak is needed where it is computed."
    return (
        f"For a lower peak, {facts.fit_call(budget_text(lower))} recomputes more. If no plan fits, the "
        "error names the smallest budget that one fits."
    )
