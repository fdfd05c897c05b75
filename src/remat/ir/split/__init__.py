"""Splitting a program into a forward half and a backward half.

# The idea

Some inputs of a jaxpr are *known* in the forward pass, the others (tangents) are unknown. A value that
depends on an unknown value is unknown. The program is split into

    known:   known inputs          -> known results, residuals
    staged:  residuals, all inputs -> unknown results

Each unknown operation goes to the staged half only. Each known operation goes to the known half. If the
staged half needs its result, a *policy* decides whether the staged half takes it as a residual, copies
it back from another memory, or recomputes it. Values that the staged half reads and does not compute are
residuals. Which operations are needed is known only at the end, so dead-code elimination then removes
unused ones from both halves.

Loops, branches and calls inside the program are split, too: each into two loops, branches or calls. An
equation whose primitive has no rule below is treated as one operation.

* A **loop**'s residuals are stacked. A carry is unknown if it is unknown after any step. Values that are
  equal in all steps are computed once, before the loop, and are not stacked.
* **Branches** share slots for their residuals, as far as types agree. A branch leaves the slots that it
  does not use empty.
* A **while loop** cannot stack residuals, because its length is unknown: it is recomputed as a whole.
* A **region** (`remat`, `jax.checkpoint`) becomes two regions, cut by the policy of the program around
  it. In the modes `SAVE` and `HOIST` there is no such policy, and the region's own policy decides.

# The modules

    halves    the halves while they are built; single operations
    calls     calls and regions
    loops     scans and while loops
    branches  conditionals
    shards    `shard_map`s
"""

from __future__ import annotations

# Importing the rules registers them.
from remat.ir.split import branches as branches, loops as loops, shards as shards
from remat.ir.split.calls import split_call as split_call
from remat.ir.split.halves import (
    HOIST as HOIST,
    SAVE as SAVE,
    Mode as Mode,
    Operands as Operands,
    Parts as Parts,
    Policy as Policy,
    Split as Split,
    register as register,
    results_and_residuals as results_and_residuals,
    split as split,
    without_unused as without_unused,
)
from remat.ir.split.shards import (
    Crossing as Crossing,
    crossing as crossing,
    shard_map_of as shard_map_of,
)
