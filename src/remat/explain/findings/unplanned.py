"""The finding on a step without any rematerialization."""

from __future__ import annotations

from remat.explain.findings.budgets import (
    cost_of,
    forward_share,
    little_to_gain,
    plan_option,
    suggested_share,
)
from remat.explain.findings.by_hand import ByHand, by_hand, largest_parts
from remat.explain.findings.facts import Facts, saved_values
from remat.report.model import Finding, Option
from remat.units import format_bytes


def no_regions(facts: Facts) -> Finding:
    """Return the finding that nothing is rematerialized, with a budget or what to wrap by hand."""
    saved = saved_values(facts)
    said = (
        f"{format_bytes(sum(value.n_bytes for value in saved))} of the forward pass are kept for the "
        f"backward pass{largest_parts(saved)}."
    )
    suggested = suggested_share(facts)
    options: tuple[Option, ...] = ()
    if facts.refused is not None and saved:  # whose finding has the budget
        manual = by_hand(facts)
        step, options = f"Without a plan, {manual.text}", _options(facts, 0, manual)
    elif not suggested:
        step = little_to_gain(facts)
    else:
        manual = by_hand(facts)
        call = facts.fit_call(f'"{suggested}%"')
        step, options = (
            f"{call} chooses what to recompute. Or {manual.text}",
            _options(facts, suggested, manual),
        )
    if facts.step.marked:
        names = ", ".join(facts.step.marked).replace("<locals>.", "")
        return Finding(
            "no_regions",
            "info",
            f"Nothing is rematerialized yet: {names} is marked by remat.auto, which acts in a plan "
            f"only, and {said}",
            step,
            options,
        )
    return Finding(
        "no_regions",
        "info",
        f"Nothing is rematerialized: the step has no checkpointed region, and {said}",
        step,
        options,
    )


def _options(facts: Facts, share: int, manual: ByHand) -> tuple[Option, ...]:
    """Return the step as it is, with a plan for a budget in per cent (0: none), and changed by hand."""
    found = [Option("as written", peak_bytes=facts.peak_bytes, extra_flops_share=0.0)]
    if share:
        found.append(plan_option(facts, share, cost_of(facts, share / 100)))
    if manual.code or manual.peak_bytes is not None:
        found.append(
            Option(
                "by hand",
                manual.code,
                manual.peak_bytes,
                "about",
                0.0 if manual.peak_bytes is not None else None,
                forward_share(facts),
            )
        )
    return tuple(found)
