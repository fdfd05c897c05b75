"""The interface of solvers: abstract types, and the checks that every schedule passes.

A solver is a frozen value: it is compared by its fields and passed as an argument. `answers` returns
an object for one graph, which returns schedules for budgets and may reuse its intermediate results.
Answers keep two promises, which the shared tests of `tests/solvers/test_solver.py` check:

* The same question has the same answer, whatever was asked before.
* As the budget falls, the time never falls and the peak never rises.

Another solver is two small classes::

    @dataclasses.dataclass(frozen=True)
    class Mine(Solver):
        def answers(self, graph, once=()): return _MyAnswers(graph, once)

    class _MyAnswers(Answers):
        def within(self, budget): ...
        def smallest(self): ...

Every schedule is made by `checked`, which executes it in the simulator.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Sequence

from remat.errors import BudgetError
from remat.solvers.graph import Graph
from remat.solvers.simulate import Step, simulate, steps_of
from remat.units import format_bytes


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Steps that compute a graph within a budget.

    Args:
      steps: ("compute", id) and ("free", id), in turn.
      peak_bytes: the most bytes that are live at once, as `simulate` measured them.
      time: the sum over all computations, in the graph's unit.
      lower_bound: no schedule within the budget, in the graph's order, takes less time.
    """

    steps: tuple[Step, ...]
    peak_bytes: int
    time: int | float
    lower_bound: int | float

    def __repr__(self) -> str:
        return (
            f"Schedule({len(self.steps)} steps: peak {format_bytes(self.peak_bytes)}, time {self.time:g}, "
            f"lower bound {self.lower_bound:g})"
        )

    @property
    def is_optimal(self) -> bool:
        """Return whether the time is proven to be the least."""
        return self.time <= self.lower_bound


class Answers(abc.ABC):
    """The schedules of one graph, as one solver finds them."""

    @abc.abstractmethod
    def within(self, budget: int) -> Schedule:
        """Return a schedule of little time whose peak is within a budget, in bytes.

        Raises:
          BudgetError: no schedule within the budget was found; the message names the smallest peak
            that was, and whether the budget is proven to be impossible.
        """

    def costs_more(self, budget: int, time: float) -> bool:
        """Return whether the schedule within a budget, if any, is known to take more than a time.

        By default, False: it is not known before the schedule is.
        """
        return False

    def lower_bound(self, budget: int) -> float:
        """Return a lower bound on the time of any schedule within a budget; infinity if none exists.

        It takes less work than a schedule. By default, 0: no bound is known.
        """
        return 0.0

    @abc.abstractmethod
    def smallest(self) -> Schedule:
        """Return the schedule of the smallest peak that is found, whatever its time."""


class Solver(abc.ABC):
    """A way to find schedules of graphs; subclasses are frozen dataclasses."""

    @abc.abstractmethod
    def answers(self, graph: Graph, once: Collection[int] = ()) -> Answers:
        """Return the schedules of a graph, by budget.

        Args:
          graph: the nodes, in the order of their first computation.
          once: ids of nodes that must not be computed again.
        """

    def __call__(self, graph: Graph, budget: int, *, once: Collection[int] = ()) -> Schedule:
        """Return a schedule of a graph within a budget; see `answers` and `Answers.within`."""
        return self.answers(graph, once).within(budget)


def checked(graph: Graph, order: Sequence[int], budget: int, lower_bound: int | float) -> Schedule:
    """Return the schedule of an order of computation, after the simulator has executed it."""
    steps = steps_of(graph, order)
    usage = simulate(graph, steps)
    assert usage.peak_bytes <= budget, (usage, budget)
    return Schedule(steps, usage.peak_bytes, usage.time, min(lower_bound, usage.time))


def refusal(budget: int, smallest_bytes: int, floor_bytes: int) -> BudgetError:
    """Return the error for a budget within which no schedule was found.

    Args:
      budget: bytes.
      smallest_bytes: the smallest peak that was found.
      floor_bytes: below this no schedule exists (proven).
    """

    def shown(n_bytes: int) -> str:
        return f"{n_bytes} bytes ({format_bytes(n_bytes)})"

    proof = (
        "that no schedule fits is proven"
        if budget < floor_bytes
        else f"a schedule may exist, but none below {shown(floor_bytes)}"
    )
    return BudgetError(
        f"no schedule was found within {shown(budget)}; the smallest peak that was found is "
        f"{shown(smallest_bytes)} ({proof}). Raise the budget to at least that."
    )
