"""Checkpointing schedules for loops: which states to keep, which steps to run again.

A loop of `n` steps is reversed from its last step to its first, and reversing step `i` needs state
`i`, the value of the loop's carry before that step. `slots` states can be kept at a time; all
others are recomputed from the nearest kept state before them. A schedule determines what is kept when.
It is a frozen value that knows its exact cost, lists its actions and prints itself as a picture.

There are six, most from the literature:

- `Mixed`: the fewest steps possible for a known `n`, where the memory also holds residuals of steps,
  which are then not run again (Maddison, "Step-based checkpointing with high-level algorithmic
  differentiation", J. Comput. Sci. 82, 102405, 2024).
- `Binomial`: the fewest steps possible for a known `n` if only states are kept (Griewank & Walther,
  "Algorithm 799: revolve", ACM TOMS 26, 2000).
- `Online`: `n` is known only when the loop ends. As good as `Binomial` up to
  n = (s+1)(s+2)/2, and within a few percent beyond (the problem of Stumm & Walther, "New
  algorithms for optimal online checkpointing", SIAM J. Sci. Comput. 32, 2010).
- `OnlineMixed`: the same with residuals in the memory; proven to run at most 5/3 times the fewest steps if
  residuals are not smaller than a state.
- `Hierarchical`: `Mixed` in the fastest of several levels of storage, and states in the others, with the
  least time for steps and transfers (Herrmann & Pallez, "H-Revolve: a framework for adjoint computation on
  synchronous hierarchical platforms", ACM TOMS 46, 2020).
- `Multilevel`: nested loops; more steps than `Binomial` at equal slots, but made of plain scans.

Counting. `forward_steps` counts every evaluation of the loop's body, the one inside each reversed
step included: the convention of revolve's authors plus one evaluation for each reversed step.
There the first sweep ends at state n-1, which is all that reversing needs. Under `jax.grad` the
loop's result is needed too, which takes one further step: `grad_forward_steps`. `recomputed_steps`
are the evaluations beyond one for each step. The state at hand (the one being advanced) is in no
slot; state 0 is in one. A mixed schedule evaluates a step whose residuals are kept when it keeps them, not
when it reverses the step; its first sweep runs the last step, so `jax.grad` adds no step.

These files do not import JAX. The compiled loops read tables from them: `binomial_rows`, `online_rows`,
the `tree` of `Mixed` and of `Hierarchical`, and the lengths of the phases of `OnlineMixed`. Decisions that
depend on values at run time, such as `online_update`, are JAX operations in the loops. Tests compare the
loops with the schedules, action by action. Each schedule has a file (`binomial`, `mixed`, `hierarchical`,
`multilevel`, `online`, `online_mixed`); `actions` defines actions, `shared` the common base class.
"""

from __future__ import annotations

from remat.loops.schedules.actions import (
    Action as Action,
    Kind as Kind,
    Replay as Replay,
    picture as picture,
    replay as replay,
)
from remat.loops.schedules.binomial import (
    INT32_MAX as INT32_MAX,
    Binomial as Binomial,
    beta as beta,
    binomial_advances as binomial_advances,
    binomial_rows as binomial_rows,
    binomial_split as binomial_split,
    repetitions as repetitions,
    reverse_actions as reverse_actions,
)
from remat.loops.schedules.hierarchical import (
    Hierarchical as Hierarchical,
    Level as Level,
)
from remat.loops.schedules.mixed import Mixed as Mixed
from remat.loops.schedules.multilevel import Multilevel as Multilevel
from remat.loops.schedules.online import (
    ONLINE_COLUMNS as ONLINE_COLUMNS,
    Online as Online,
    online_cost as online_cost,
    online_rows as online_rows,
    online_update as online_update,
)
from remat.loops.schedules.online_mixed import OnlineMixed as OnlineMixed

__all__ = [
    "INT32_MAX",
    "ONLINE_COLUMNS",
    "Action",
    "Binomial",
    "Hierarchical",
    "Kind",
    "Level",
    "Mixed",
    "Multilevel",
    "Online",
    "OnlineMixed",
    "Replay",
    "beta",
    "binomial_advances",
    "binomial_rows",
    "binomial_split",
    "online_cost",
    "online_rows",
    "online_update",
    "picture",
    "repetitions",
    "replay",
    "reverse_actions",
]


def __dir__() -> list[str]:
    return sorted(__all__)
