"""Loops with reverse-mode memory that the user chooses.

Public functions:

    scan         `remat.scan`
    while_loop   `remat.while_loop`, and `remat.fori_loop`
    remat_scan   `remat.remat_scan`: n equal layers in nested, rematerialized loops

Schedules and divisions, without JAX:

    schedules/   which states and residuals are kept when, one file a schedule
    nesting      the division of n layers into nested loops and a rest, for `remat_scan`, by the bytes of
                 carries, residuals and parameters. (`schedules/multilevel`, for `remat.scan`, is a
                 schedule of nested scans, which counts steps and states as the other schedules do.)

A loop that follows a schedule:

    tracing      the user's body as a jaxpr
    halves       one step in two halves: forward with its residuals, and reversed
    choice       the choice of a schedule, by checkpoints, a budget or levels of storage
    fitting      the compiler's memory for the gradient of a loop, and the choice that fits a budget
    loop         a loop as data, and code shared by all ways to reverse it
    states       a loop that keeps states only: running it, and reversing it
    mixed        a loop of known length that keeps states and residuals
    online       the same for unknown length
    inverse      a loop whose step can be inverted, which keeps nothing
    reversal     the backward pass of a loop that keeps residuals, in blocks of steps
    derivative   derivatives of a loop, of any order and in any mode
    forward_mode forward derivatives of a body with functions that have reverse rules only
    linear       a linear map with its own transpose and derivative
    keep_rules   calls whose derivative rules outlive JAX's partial evaluation

Memory:

    store        where states are kept: device, host or disk
    buffers      buffers that states and residuals share
    rows         rows of arrays in host memory, also under `jax.vmap`
    stacked      one layer of stacked parameters, read without copies of the others
    times        estimates of the time to run and to reverse a step
    sizes        the bytes that a loop keeps, compared with a budget
    arguments    checks of the integers that users pass
"""

import os

from remat import _jax

# For the whole folder, so that the source lines of a loop's operations are the user's.
_jax.exclude_from_tracebacks(os.path.dirname(__file__))
