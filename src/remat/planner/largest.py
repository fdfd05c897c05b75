"""`remat.largest`: the largest size of a training step whose plan fits a budget.

Sizes are ordered by memory need: growing batches, sequence lengths or numbers of layers, or targets with a
falling number of devices. So a bisection finds the last one that fits. Where the budget is a number of bytes,
the bisection starts at the last size that fits according to the model of the step's memory, which compiles
nothing. What was compiled for one size corrects the predictions for others.

For a size to count as fitting, one plan within the budget suffices (`Planning.first_fitting`). Only for the
last one is the best plan searched, with what was compiled already. It is cached as usual, so that a second
search, or the run itself, does not compile it again.

Known limit: the bisection assumes that a size fits if a larger one does.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat.errors import BudgetError, PlanError
from remat.planner.plan import planning_of
from remat.planner.plan_file import Plan
from remat.planner.planning import Estimate, Planning
from remat.printing import shown
from remat.units import Number, format_seconds

_log = logging.getLogger("remat")

# Number of sizes that may be tried beyond those that a bisection needs, so that predictions may be followed.
# If they are right, two or three sizes are tried; a larger number follows misleading ones longer.
_MORE_TRIES = 2


@dataclasses.dataclass(frozen=True)
class Largest:
    """The largest size that fits, and the sizes that were tried.

    Args:
      size: the size, as in `sizes`.
      plan: its plan.
      tried: the sizes that were tried, in the order of `sizes`, each with a plan within the budget or the
        reason why there is none. Plans of smaller sizes may recompute more than necessary.
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
    search = _Search(make_step, sizes, {"budget": budget, **options})
    at = search.last_fitting()
    while at is not None and not search.improve(at):
        at = search.last_fitting()
    if at is None:
        problem = search.problems[0]
        raise BudgetError(
            f"no size fits, not even the first, {shown(sizes[0])}: {problem}"
        ) from problem
    tried = search.fitting | {i: str(problem) for i, problem in search.problems.items()}
    plans = tuple((sizes[i], tried[i]) for i in sorted(tried))
    return Largest(sizes[at], search.fitting[at], plans)


class _Search:
    """The search for the last size that fits.

    Args:
      make_step: as for `largest`.
      sizes: the sizes.
      options: of `remat.plan`, for all sizes.

    Attributes:
      fitting: plans within the budget, by the numbers of their sizes.
      problems: why others do not fit.
    """

    def __init__(self, make_step: Callable, sizes: Sequence[Any], options: Mapping) -> None:
        self.make_step = make_step
        self.sizes = sizes
        self.options = options
        self.fitting: dict[int, Plan] = {}
        self.problems: dict[int, BudgetError] = {}
        self._plannings: dict[int, Planning] = {}
        self._estimates: dict[int, Estimate] = {}

    @property
    def _open(self) -> range:
        """Return the numbers of the sizes of which it is not known whether they fit."""
        return range(max(self.fitting, default=-1) + 1, min(self.problems, default=len(self.sizes)))

    def last_fitting(self) -> int | None:
        """Return the number of the last size that fits; None if not even the first fits."""
        n_tries = len(self._open).bit_length() + _MORE_TRIES
        while self._open:
            n_tries -= 1
            most = 2**n_tries - 1  # among so many sizes the tries that are left find the last one
            start, stop = self._open.start, self._open.stop
            self._try(min(max(self._guess(), stop - 1 - most), start + most))
        return self._open.start - 1 if self._open.start else None

    def improve(self, at: int) -> bool:
        """Search the best plan of a size; return whether it also fits when compiled as it will run."""
        try:
            self.fitting[at] = self._planning(at).run()
        except BudgetError as error:
            del self.fitting[at]
            self.problems[at] = error
        return at in self.fitting

    def _try(self, at: int) -> None:
        try:
            self.fitting[at] = self._planning(at).first_fitting()
        except BudgetError as error:
            self.problems[at] = error
        # Arguments may be large, so plannings that are not needed again are dropped.
        needed = range(self._open.start - 1, self._open.stop + 1)
        self._plannings = {i: made for i, made in self._plannings.items() if i in needed}
        _log.info(
            "remat.largest: %s %s", self.sizes[at], "fits" if at in self.fitting else "does not fit"
        )

    def _guess(self) -> int:
        """Return the number of the last of the open sizes that is predicted to fit, or of the first."""
        sizes = self._open
        middle = sizes[(len(sizes) - 1) // 2]
        if self._planning(middle).given_budget.is_share:
            return middle
        n_fitting = bisect.bisect_left(sizes, True, key=self._is_too_large)
        return sizes[max(0, n_fitting - 1)]

    def _is_too_large(self, at: int) -> bool:
        """Return whether a size is predicted not to fit."""
        planning = self._planning(at)
        if at not in self._estimates:
            self._estimates[at] = planning.smallest_by_model()
        estimate = self._estimates[at]
        nearest = max(self.fitting, default=min(self.problems, default=None))
        if nearest is not None:
            estimate = self._planning(nearest).corrected(estimate)
        return sum(estimate) > planning.budget

    def _planning(self, at: int) -> Planning:
        if at not in self._plannings:
            size = self.sizes[at]
            step, args, more = _parts(self.make_step(size), size)
            self._plannings[at] = planning_of(step, args, **{**self.options, **more})
        return self._plannings[at]


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
