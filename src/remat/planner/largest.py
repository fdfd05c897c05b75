"""`remat.largest`: the largest size of a training step whose plan fits a budget.

Sizes are ordered by memory need: growing batches, sequence lengths or numbers of layers, or targets with a
falling number of devices. A larger size needs more memory, so a bisection finds the last one that fits with
at most log2(n + 1) plans, rounded up. Plans are cached as usual, so that a second search, or the run itself,
does not compile again.

Known limit: the bisection assumes that a size fits if a larger one does.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat.errors import BudgetError, PlanError
from remat.planner.plan import plan as make_plan
from remat.planner.plan_file import Plan
from remat.printing import shown
from remat.units import Number, format_seconds

_log = logging.getLogger("remat")


@dataclasses.dataclass(frozen=True)
class Largest:
    """The largest size that fits, and the sizes that were tried.

    Args:
      size: the size, as in `sizes`.
      plan: its plan.
      tried: the sizes that were planned, in the order of `sizes`, each with its plan or the reason why it
        does not fit.
    """

    size: Any
    plan: Plan
    tried: tuple[tuple[Any, Plan | str], ...]

    @property
    def step_seconds(self) -> float:
        """Return the time of a step with this plan, according to the cost model."""
        return self.plan.seconds + self.plan.extra_seconds

    @property
    def sizes_per_second(self) -> float:
        """Return the size per second of a step, such as rows per second where sizes are batches.

        Raises:
          PlanError: the sizes are not numbers.
        """
        if not isinstance(self.size, int | float):
            raise PlanError(f"{shown(self.size)} is not a number, so there is no size per second.")
        return self.size / self.step_seconds if self.step_seconds else 0.0

    def __repr__(self) -> str:
        seconds = format_seconds(self.step_seconds)
        return f"Largest({self.size!r}: {seconds} per step by the model, {self.plan!r})"


def largest(
    make_step: Callable[[Any], tuple[Any, ...]],
    sizes: Sequence[Any],
    /,
    *,
    budget: Number | None = None,
    **options: Any,
) -> Largest:
    """Find the largest size of a step whose plan fits a budget.

    >>> import jax, jax.numpy as jnp, remat
    >>> def make_step(rows):
    ...     def loss(w, x):
    ...         for _ in range(4):
    ...             x = jnp.tanh(x @ w)
    ...         return x.sum()
    ...     return jax.value_and_grad(loss), (jnp.eye(64), jax.ShapeDtypeStruct((rows, 64), "float32"))
    >>> found = remat.largest(make_step, [256, 512, 1024, 2048], budget="700KiB", cache=False)
    >>> found.size, len(found.tried), found.plan.is_verified
    (512, 2, True)

    Args:
      make_step: returns, for a size, the step and its arguments as a tuple. A third item, a dictionary,
        has options of `remat.plan` for this size, such as `{"target": size}` where sizes are targets.
      sizes: in the order of growing need of memory per device: batches that grow, or topologies that
        shrink.
      budget: as for `remat.plan`; a share is taken of each size's own peak.
      options: of `remat.plan`, and of `jax.jit`.

    Returns:
      The size and its plan. Its plan is verified like any other.

    Raises:
      BudgetError: no size fits.
      PlanError: there are no sizes, or `make_step` returns something else.
    """
    sizes = list(sizes)
    if not sizes:
        raise PlanError("there are no sizes to choose from; pass at least one.")
    tried: dict[int, Plan | str] = {}
    problem: BudgetError | None = None
    fitting, too_large = -1, len(sizes)
    while too_large - fitting > 1:
        i = (fitting + too_large) // 2
        try:
            step, args, more = _parts(make_step(sizes[i]), sizes[i])
            tried[i] = make_plan(step, *args, **{"budget": budget, **options, **more})
            fitting = i
        except BudgetError as error:
            tried[i], problem = str(error), error
            too_large = i
        _log.info("remat.largest: %s %s", sizes[i], "fits" if fitting == i else "does not fit")
    if fitting < 0:
        raise BudgetError(
            f"no size fits, not even the first, {shown(sizes[0])}: {problem}"
        ) from problem
    found = tried[fitting]
    assert isinstance(found, Plan)
    return Largest(sizes[fitting], found, tuple((sizes[i], tried[i]) for i in sorted(tried)))


def _parts(made: Any, size: object) -> tuple[Callable, tuple, Mapping[str, Any]]:
    if isinstance(made, tuple) and len(made) == 2:
        made = (*made, {})
    is_valid = isinstance(made, tuple) and len(made) == 3
    if not is_valid or not isinstance(made[1], tuple) or not isinstance(made[2], Mapping):
        raise PlanError(
            f"make_step({shown(size)}) must return a step, a tuple of its arguments and, if need be, a "
            f"dictionary of options, not {shown(made)}."
        )
    return made
