"""The finding on a step without any rematerialization."""

from __future__ import annotations

from remat.explain.findings.budgets import cost_of, little_to_gain, suggested_share
from remat.explain.findings.by_hand import by_hand, largest_parts
from remat.explain.findings.facts import Facts, saved_values
from remat.report.model import Finding
from remat.units import format_bytes


def no_regions(facts: Facts) -> Finding:
    """Return the finding that nothing is rematerialized, with a budget or what to wrap by hand."""
    saved = saved_values(facts)
    said = (
        f"{format_bytes(sum(value.n_bytes for value in saved))} of the forward pass are kept for the "
        f"backward pass{largest_parts(saved)}."
    )
    suggested = suggested_share(facts)
    if facts.refused is not None and saved:  # whose finding has the budget
        step = f"Without a plan, {by_hand(facts)}"
    elif not suggested:
        step = little_to_gain(facts)
    else:
        budget_bytes = int(suggested / 100 * facts.peak_bytes)
        call = facts.fit_call(f'"{suggested}%"')
        step = (
            f"{call} chooses what to recompute: a peak of at most {format_bytes(budget_bytes)}, for "
            f"{cost_of(facts, suggested / 100)}. Or {by_hand(facts)}"
        )
    if facts.step.marked:
        names = ", ".join(facts.step.marked).replace("<locals>.", "")
        return Finding(
            "no_regions",
            "info",
            f"Nothing is rematerialized yet: {names} is marked by remat.auto, which acts in a plan "
            f"only, and {said}",
            step,
        )
    return Finding(
        "no_regions",
        "info",
        f"Nothing is rematerialized: the step has no checkpointed region, and {said}",
        step,
    )
