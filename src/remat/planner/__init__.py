"""From a memory budget to a plan of what to save, recompute or offload.

The modules in the order in which data flows; none of these imports JAX:

    json_lines files that people edit: every mistake with its line, written all or nothing
    graph      what is planned on: values with bytes, times and operands; chains of stages
    simulate   the only memory accountant: executes steps, measures peak and time
    mincut     which values to keep across one moment: minimum cuts, their hull, their bounds
    chain      which stages of a chain to recompute: the rotor dynamic program
    frontier   which values cross every moment: a 0-1 program, for bounds and small graphs
    search     orders of computation found by repeated cuts, on graphs of any size
    evict      one in a single pass: give up under pressure, compute again on demand
    schedule   all of it for a plain graph: schedule(graph, budget)
    scheduler  schedules of one graph within several budgets, in a moment each
    plan_file  a plan as data, and its file
"""

from remat.planner.chain import ChainPlan as ChainPlan, plan_chain as plan_chain
from remat.planner.graph import (
    Chain as Chain,
    Graph as Graph,
    Node as Node,
    Stage as Stage,
    StageOption as StageOption,
)
from remat.planner.schedule import (
    Schedule as Schedule,
    schedule as schedule,
    smallest_peak as smallest_peak,
)
from remat.planner.simulate import Usage as Usage, no_remat as no_remat, simulate as simulate

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
