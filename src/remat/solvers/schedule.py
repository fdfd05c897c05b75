"""Schedules on plain graphs: the least time within a memory budget, and how far from the least.

`schedule(graph, budget)` answers Checkmate's problem: nodes in a fixed order, each with a time
and bytes, any of them computed as often as it takes, the peak of live bytes within the budget.

How it is found, and what is proven:

1. `GridSearch` gives the order of computation: searches within budgets that the graph determines,
   so that a larger budget never gives a schedule of more time.
2. `bounds` proves a lower bound on the time of recomputation: by minimum cuts at the peak on any
   graph, by a 0-1 program over few chosen moments on graphs of some thousand nodes. On small graphs
   order and bound usually meet.
3. `simulate` executes the answer. Nothing is returned that it does not measure within the budget.

The first computations follow the graph's order, in the answer as in the bound: reordering the
graph itself is another problem (the simulator checks this rule too).

>>> from remat.solvers.graph import Graph, Node
>>> chain = Graph((
...     Node(0, time=1, bytes=8), Node(1, time=1, bytes=8, deps=(0,)),
...     Node(2, time=1, bytes=8, deps=(1,)), Node(3, time=1, bytes=8, deps=(0, 2))))
>>> found = schedule(chain, budget=24)
>>> found.time, found.lower_bound, found.peak_bytes
(4, 4, 24)
"""

from __future__ import annotations

from collections.abc import Collection

from remat.solvers.bounds import ProofEffort
from remat.solvers.graph import Graph
from remat.solvers.grid import GridSearch
from remat.solvers.solver import Schedule, Solver
from remat.units import parse_bytes

_PROVEN = GridSearch(effort=4.0, resolution=2**-14, improvement=40.0, proof=ProofEffort())
_QUICK = GridSearch()


def schedule(
    graph: Graph,
    budget: int | float | str,
    *,
    once: Collection[int] = (),
    solver: Solver = _PROVEN,
) -> Schedule:
    """Return steps of (nearly) least time whose peak is within the budget.

    The search is deterministic: its effort is counted in steps, not in seconds.

    Args:
      graph: the nodes, in the order of their first computation.
      budget: bytes, or a text such as "8GiB".
      once: ids of nodes that must not be computed again.
      solver: what searches; `GridSearch()` takes less time and proves less.

    Raises:
      BudgetError: no schedule within the budget was found; the message names the smallest peak
        that was, and whether the budget is proven to be impossible.
      UnitsError: the budget is not a number of bytes.
    """
    return solver(graph, parse_bytes(budget, "budget="), once=once)


def smallest_peak(graph: Graph, once: Collection[int] = (), *, solver: Solver = _QUICK) -> Schedule:
    """Return the schedule of the smallest peak that the solver finds, whatever its time."""
    return solver.answers(graph, once).smallest()
