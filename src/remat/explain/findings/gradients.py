"""The findings on functions without a gradient, and on losses that have one inside."""

from __future__ import annotations

from collections.abc import Iterator

from remat.explain.findings.facts import Facts
from remat.report.model import Finding

_MOST_CHARACTERS = 200  # of JAX's error message that are quoted


def no_gradient(facts: Facts) -> Finding:
    """Return the finding that nothing is differentiated."""
    if error := facts.step.not_differentiable:
        first = error.strip().splitlines()[0].rstrip(".")
        return Finding(
            "no_gradient",
            "info",
            "Only the forward pass is explained: JAX cannot differentiate the function, so nothing is kept "
            f"for a backward pass ({_shortened(first)}).",
            "If it is to be trained, make it differentiable: lax.scan, or a fori_loop with bounds that are "
            "known when it is traced, in place of a while loop; jax.custom_vjp around a callback.",
        )
    return Finding(
        "no_gradient",
        "info",
        "The step computes no gradient, so there is nothing between a forward and a backward "
        "pass to save or recompute.",
        "Give the loss, whose first argument is differentiated, or the training step.",
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"


def gradient_inside(facts: Facts) -> Iterator[Finding]:
    """Yield the finding on a function that is treated as a step although it may be a loss."""
    step, program = facts.step, facts.sides.program
    if step.undifferentiated is not None or facts.plan is not None:
        return
    types = [program.types[v] for v in program.outputs]
    if len(step.jaxpr.outvars) != 1 or types not in _ONE_NUMBER:
        return
    yield Finding(
        "gradient_inside",
        "info",
        "The function computes a gradient itself, so it is explained as it is, like a training step. Its "
        "only result is one number: if it is a loss, such as one with a gradient penalty, its own backward "
        "pass is not shown.",
        f"To see it, explain {step.words.gradient}(loss).",
    )


_ONE_NUMBER = (["f16[]"], ["bf16[]"], ["f32[]"], ["f64[]"])
