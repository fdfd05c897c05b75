"""Schedules of computation within a memory budget, on plain graphs: no module here imports JAX.

In the order in which data flows:

    graph         the input: values with bytes, times and operands; chains of stages
    liveness      an order of computation, measured in NumPy
    simulate      the only memory accountant: executes steps, measures peak and time
    effort        an allowance of work, counted in steps
    solver        the interface of solvers: abstract types, schedules, refusals
    mincut        which values to keep across one moment: minimum cuts, their hull, their bounds
    order_search  orders of computation found by repeated minimum cuts at the peak
    relief        orders found by greedy insertion of recomputations, and improved
    evict         an order in a single pass: evict under pressure, recompute on demand
    chain         the dynamic program for chains of stages
    segments      orders found by that program for the segments of a training step
    frontier      the 0-1 program of which values cross which moments
    bounds        proven lower bounds on the time of recomputation
    grid          GridSearch(): monotone schedules within any budget
    schedule      schedule(graph, budget): one budget, searched longer, with a proven lower bound

SciPy's own submodules load on their first use (`scipy.optimize.milp`), so importing this package
costs NumPy alone.
"""

from remat.solvers.graph import (
    Graph as Graph,
    Node as Node,
)
from remat.solvers.grid import GridSearch as GridSearch
from remat.solvers.schedule import (
    schedule as schedule,
    smallest_peak as smallest_peak,
)
from remat.solvers.simulate import Usage as Usage, no_remat as no_remat, simulate as simulate
from remat.solvers.solver import Answers as Answers, Schedule as Schedule, Solver as Solver

__all__ = [
    "Answers",
    "Graph",
    "GridSearch",
    "Node",
    "Schedule",
    "Solver",
    "Usage",
    "no_remat",
    "schedule",
    "simulate",
    "smallest_peak",
]


def __dir__() -> list[str]:
    return sorted(__all__)
