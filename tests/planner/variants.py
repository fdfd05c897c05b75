"""Variants of a model of a step that a search does not compute."""

from __future__ import annotations

from remat.planner.step_model import StepModel


def prices_of_skipped(model: StepModel, step_bytes: int) -> list[tuple[float, float]]:
    """Return the prices of proposals that `may_gain` rules out, and of those they were compared with.

    Args:
      model: the model of a step.
      step_bytes: the bytes from one budget to the next.
    """
    first, *others = model.variants
    least, most = model.smallest(first).model_bytes, model.as_written(first).model_bytes
    prices = []
    for n_bytes in range(least, most, step_bytes):
        than = model.within(first, n_bytes)
        for other in (*others, *model.smaller_variants):
            if than.price and not model.may_gain(other, n_bytes, than, is_full=True):
                prices.append((model.within(other, n_bytes).price, than.price))
    return prices
