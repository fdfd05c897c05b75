"""Splitting a program in two by what is known when: a forward and a backward half.

# The idea

Some inputs of a jaxpr are *known* in the forward pass, the others (tangents) are not, and what depends
on an unknown value is unknown. The program is split into

    known:   known inputs          -> known results, residuals
    staged:  residuals, all inputs -> unknown results

Each unknown operation goes to the staged half alone. Each known one goes to the known half, and a
*policy* says what the staged half does if it needs the result: take it as a residual, bring it back from
another memory, or repeat the operation. Whatever the staged half reads and does not compute is a
residual. Neither half is minimal, because what is needed shows only at the end: dead-code elimination
makes them so.

Loops, branches and calls are split along with the program that they stand in, into two loops, branches
or calls. An operation of a primitive that has no rule below is one operation, whatever it runs inside.

* A **loop**'s residuals are stacked. A carry is unknown if it ever becomes so. What is the same in each
  step is computed once, before the loop, and is not stacked.
* **Branches** give their residuals the same slots, as far as types agree; a branch leaves the slots of
  the others empty.
* A **while loop** cannot stack anything, because its length is not known: it is repeated as a whole.
* A **region** (`remat`, `jax.checkpoint`) becomes two regions, cut where the policy around it says. In
  `SAVE` and `HOIST` there is none, and the region's own policy decides.
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
