"""The findings on a step that follows a plan."""

from __future__ import annotations

from collections.abc import Iterator

from remat.explain.findings.budgets import (
    budget_text,
    cost_of,
    forward_share,
    lowest_budget_bytes,
)
from remat.explain.findings.facts import Facts, Followed
from remat.report.model import Finding, Option
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
        _options(facts, plan, share),
    )


_MARGIN = 0.04  # share of the peak by which other budgets differ at least; more shows fewer of them


def _options(facts: Facts, plan: Followed, share: float) -> tuple[Option, ...]:
    """Return the plan among other budgets, the largest first, with estimated costs and the lowest peak."""
    before = facts.without_plan
    peak = plan.peak_bytes or facts.peak_bytes
    if before is None or facts.refused is not None:
        return ()
    whole = plan.without_remat_bytes
    lowest = lowest_budget_bytes(before) / max(1, before.predicted.peak_bytes)
    found = [Option("without a plan", peak_bytes=whole, extra_flops_share=0.0)]
    between = (whole + peak) // 2
    lower = max(int(0.8 * peak), int(1.05 * lowest * whole))
    for n_bytes in (between, peak, lower):
        if n_bytes == peak:
            found.append(Option("this plan", peak_bytes=peak, extra_flops_share=max(0.0, share)))
        elif min(abs(n_bytes - peak), whole - n_bytes) >= _MARGIN * peak:
            low, high = cost_of(before, n_bytes / whole)
            # A smaller budget costs at least as much as the plan, a larger one at most.
            if n_bytes > peak:
                low, high = min(low, share), min(high, share)
            else:
                low, high = max(low, share), max(high, share)
            code = f"step = {facts.fit_call(budget_text(n_bytes))}"
            label = "larger budget" if n_bytes > peak else "smaller budget"
            found.append(Option(label, code, n_bytes, "at most", low, high))
    floor = int(lowest * whole)
    if floor < peak:
        found.append(
            Option(
                "lowest peak that the model predicts",
                "",
                floor,
                "about",
                0.0,
                forward_share(before),
            )
        )
    return tuple(found)


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
