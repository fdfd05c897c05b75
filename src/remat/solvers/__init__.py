"""Schedules of computation within a budget of memory, on plain graphs: no module here imports JAX.

In the order in which data flows:

    graph         what is planned on: values with bytes, times and operands; chains of stages
    simulate      the only memory accountant: executes steps, measures peak and time
    mincut        which values to keep across one moment: minimum cuts, their hull, their bounds
    chain         which stages of a chain to recompute: the rotor dynamic program
    frontier      which values cross every moment: a 0-1 program, for bounds and small graphs
    order_search  orders of computation found by repeated cuts, on graphs of any size
    evict         one in a single pass: evict under pressure, recompute on demand
    schedule      all of it for a plain graph: schedule(graph, budget)
    scheduler     schedules of one graph within several budgets, in a moment each

SciPy's own submodules load on their first use (`scipy.optimize.milp`), so importing this package
costs NumPy alone.
"""

from remat.solvers.chain import ChainPlan as ChainPlan, plan_chain as plan_chain
from remat.solvers.graph import (
    Chain as Chain,
    Graph as Graph,
    Node as Node,
    Stage as Stage,
    StageOption as StageOption,
)
from remat.solvers.schedule import (
    Schedule as Schedule,
    schedule as schedule,
    smallest_peak as smallest_peak,
)
from remat.solvers.simulate import Usage as Usage, no_remat as no_remat, simulate as simulate

__all__ = [
    "Chain",
    "ChainPlan",
    "Graph",
    "Node",
    "Schedule",
    "Stage",
    "StageOption",
    "Usage",
    "no_remat",
    "plan_chain",
    "schedule",
    "simulate",
    "smallest_peak",
]
