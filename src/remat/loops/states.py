"""A loop that keeps states only, a fixed number of them: running it forward, and reversing it.

    sweep:     inputs -> results, Checkpoints          `slots` states and state n-1 kept
    backward:  inputs, Checkpoints, cotangents of the results -> cotangents of the inputs

The schedule is interpreted while the program runs, so the body appears once in `sweep` and twice
in `backward` (run forward, and reversed) whatever the number of steps and slots:

    for step in n-1 .. 0:
        take the newest state that is held
        while it is not state `step`: advance by the schedule's split; keep where that ends
        reverse `step`

The nested `while` loops (instead of one loop with a `cond` for each kind of action) matter: XLA
updates a buffer in place that a `while` passes through, but may copy it around a `cond`. All states
lie in one buffer of slots + 1 rows for each leaf of the carry. The additional row holds state n-1,
from which reversing begins, and later takes the writes of states that need not be kept, so that
every write is unconditional.

Rows are reached through `order`: entry k of the stack of held states lies in row order[k]. The
online sweep, which drops states from the middle of the stack, permutes the order and moves no data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from remat import _jax
from remat.aliases import Array, Arrays, PyTree, Size
from remat.loops import schedules
from remat.loops.loop import (
    Inputs,
    Loop,
    Results,
    add_step,
    advance,
    check_varying,
    cotangents_of_inputs,
    cotangents_of_y,
    entry,
    first_cotangents,
    merge,
    plain,
    run_steps,
    select,
    unless_uncounted,
)


class Checkpoints(NamedTuple):
    """The states held when the forward pass ends.

    Attributes:
      rows: slots + 1 states, in the form of the loop's store; None where it keeps none.
      order: (slots + 1,) int32, the row of each entry of the stack.
      starts: (slots + 1,) counters, the step of each entry of the stack; they rise.
      top: int32, the last entry in use, which is state n-1; -1 if no step was run.
      count: a counter, the number of steps n.
    """

    rows: PyTree
    order: Array
    starts: Array
    top: Array
    count: Array


# Forward


def sweep(loop: Loop, inputs: Inputs) -> tuple[Results, Checkpoints]:
    """Run the loop and keep the states from which it can be reversed."""
    if loop.store.one_pass:
        return plain(loop, inputs), Checkpoints(None, None, None, None, None)
    return _sweep(loop, inputs, [], with_ys=True)


def _sweep(
    loop: Loop, inputs: Inputs, witnesses: Arrays, *, with_ys: bool
) -> tuple[Results, Checkpoints]:
    rows = loop.store.create(loop.slots + 1, inputs.carry, witnesses)
    if loop.test is not None:
        return _online_sweep(loop, inputs, rows)
    return _offline_sweep(loop, inputs, rows, with_ys)


def _offline_sweep(
    loop: Loop, inputs: Inputs, rows: PyTree, with_ys: bool
) -> tuple[Results, Checkpoints]:
    # What is counted varies over the axes of a mesh as the number of steps does.
    count = _steps(loop, inputs)
    counters = [_before_first_entry(), loop.count(0), _no_starts(loop)]
    top, start, starts = (_jax.varying_as(x, count) for x in counters)
    ys = [_jax.zeros(y, (loop.length,)) for y in loop.y_avals if with_ys]

    def segment(state: tuple) -> tuple:
        """Keep the current state and run to the next one that is kept, or from n-1 to the end."""
        top, start, starts, rows, carry, ys = state
        top = top + 1
        rows = loop.store.write(rows, top, carry)
        starts = starts.at[top].set(start)
        split = _split(loop, count - start, loop.slots - top)
        stop = jnp.where(start == count - 1, count, start + split)
        carry, ys = advance(loop, inputs, start, stop, carry, ys)
        return top, stop, starts, rows, carry, ys

    top, _, starts, rows, carry, ys = lax.while_loop(
        lambda state: state[1] < count,
        segment,
        (top, start, starts, rows, inputs.carry, ys),
    )
    order = jnp.arange(loop.slots + 1, dtype=jnp.int32)
    return Results(carry, ys, []), Checkpoints(rows, order, starts, top, count)


def _online_sweep(loop: Loop, inputs: Inputs, rows: PyTree) -> tuple[Results, Checkpoints]:
    """Run the loop while its test holds, and keep states.

    Entry `top` of the stack is the state before the last step.
    """

    def run(state: tuple) -> tuple:
        step, top, order, starts, rows, carry = state
        # The test holds, so `top`, the state before the one at hand, can become a held state:
        # one more step follows it, and that one will be the entry to begin reversing from.
        order, starts, top = _online_update(loop, step, top, order, starts)
        rows = loop.store.write(rows, entry(order, top), carry)
        starts = starts.at[top].set(step)
        carry, _ = loop.call(inputs.consts, carry, [])
        return loop.after(step), top, order, starts, rows, carry

    order = jnp.arange(loop.slots + 1, dtype=jnp.int32)
    step, top, order, starts, rows, carry = lax.while_loop(
        lambda state: loop.goes_on(inputs.consts, state[-1], state[0]),
        run,
        (
            loop.count(0),
            _before_first_entry(),
            order,
            _no_starts(loop),
            rows,
            inputs.carry,
        ),
    )
    return Results(carry, [], [step]), Checkpoints(rows, order, starts, top, step)


def _online_update(loop: Loop, step: Array, top: Array, order: Array, starts: Array) -> tuple:
    """Apply `schedules.online_update` to the stack, and make room for one more entry on top."""
    slots = loop.slots
    if slots == 1:
        return order, starts, jnp.minimum(top + 1, 1)
    # The choice depends only on the step. For the first steps it is looked up in a table, since computing it
    # takes longer than a small body does; for later steps it is computed once the stack is full.
    known = np.array(_online_choices(slots, ONLINE_STEPS_KNOWN), np.int32)

    def weigh(step: Array, starts: Array) -> Array:
        return online_choice(jnp, starts.astype(jnp.int32), step.astype(jnp.int32), slots)

    # JAX cannot batch a branch over an explicit axis of a mesh with constants that have no mesh.
    weighing, consts, _ = _jax.trace_call(weigh, step, starts)
    choice = lax.cond(
        (step < len(known)) | (top < slots),
        lambda known, consts, step, starts: entry(known, jnp.minimum(step, len(known) - 1)),
        lambda known, consts, *args: _jax.call_jaxpr(weighing, [*consts, *args])[0],
        _jax.in_mesh(jnp.asarray(known)),
        [_jax.in_mesh(jnp.asarray(c)) for c in consts],
        step,
        starts,
    )
    # While there is room, nothing moves.
    choice = jnp.where(top == slots, choice, slots)
    source = _without(jnp, slots, choice)
    return order[source], starts[source], jnp.minimum(top + 1, slots)


# The number of choices computed when a loop is traced, in some ten milliseconds of NumPy; more make the
# choice free for more steps.
ONLINE_STEPS_KNOWN = 1024


# Cached: at most ONLINE_STEPS_KNOWN numbers each.
@lru_cache(maxsize=64)
def _online_choices(slots: int, steps: int) -> tuple[int, ...]:
    """Return a table of `online_choice` at the steps 0, 1, ..., and `slots` while the stack has room."""
    starts = np.zeros(slots + 1, np.int32)
    choices = []
    for step in range(steps):
        choice = slots
        if step > slots:
            choice = int(online_choice(np, starts, np.int32(step), slots))
            starts = starts[_without(np, slots, np.int32(choice))]
        starts[min(step, slots)] = step
        choices.append(choice)
    return tuple(choices)


def _without(np_: ModuleType, slots: int, choice: Array) -> Array:
    """Return the entries with entry `choice` moved to the end, where the next state overwrites it."""
    entries = np.arange(slots + 1, dtype=np.int32)
    source = np_.where(entries < choice, entries, np.minimum(entries + 1, slots))
    return np_.where(entries == slots, choice, source)


def online_choice(np_: ModuleType, starts: Array, step: Array, slots: int) -> Array:
    """Return the entry, 1..slots, to drop from a full stack so that reversal is cheapest.

    Entry `slots` is the new state. `np_` is `numpy` or `jax.numpy`; in a compiled loop this runs at every
    step, so it consists of few operations on short vectors.
    """
    savings, slopes = _online_tables(slots)
    # The parts between states 0..slots-1 and the newcomer, which is entry `slots`, and three lists
    # of parts to reverse: if nothing is dropped, those joined if entry k = 1..slots-1 is dropped,
    # and those behind it, which then gain a slot each. The loop would end after `step`.
    parts = np_.diff(starts)
    last = step + 1 - starts[slots - 1 : slots]
    lengths = np_.concatenate([last, parts[:-1], parts[:-1] + parts[1:], parts[2:]])
    costs = np_.max(lengths[:, None] * slopes - savings, axis=1)
    kept, joined, shifted = costs[:slots], costs[slots : 2 * slots - 1], costs[2 * slots - 1 :]
    before = _sums_before(np_, kept[1:])
    shifted = np_.concatenate([shifted, np_.zeros(1, np.int32)])
    behind = shifted + _sums_before(np_, shifted[::-1])[::-1]
    keep_all = np_.sum(kept, dtype=np.int32, keepdims=True)
    return np_.argmin(np_.concatenate([before + joined + behind, keep_all])).astype(np.int32) + 1


# Cached; the tables are never written to.
@lru_cache(maxsize=64)
def _online_tables(slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tables of savings and slopes, for the costs of the parts that `_online_update` weighs.

    The cost of a part is the maximum over r of slope·length - saving.

    With c slots the slope is r and the saving β(c+1, r-1); see `schedules.binomial_advances`. The
    last part has been run once already, up to state n-1, which takes length - 1 off.
    """
    beta = np.array(schedules.online_rows(slots), np.int64)
    of_slots = np.concatenate([np.zeros((slots + 1, 1), np.int64), beta[1:, :-1]], axis=1)
    down = [np.arange(slots, 1, -1), np.arange(slots, 1, -1), np.arange(slots - 1, 1, -1)]
    savings = of_slots[np.concatenate([[1], *down])]
    slopes = np.broadcast_to(np.arange(beta.shape[1]), savings.shape).copy()
    slopes[0] -= 1
    savings[0] -= 1
    return savings.astype(np.int32), slopes.astype(np.int32)


def _sums_before(np_: ModuleType, values: Array) -> Array:
    """Return for each value the sum of the values before it."""
    n = values.shape[0]
    if n <= 64:
        # One fused operation, where a scan would be several.
        earlier = (np.arange(n)[None, :] < np.arange(n)[:, None]).astype(np.int32)
        return np_.sum(earlier * values[None, :], axis=1, dtype=np.int32)
    return np_.cumsum(values, dtype=np.int32) - values


# Backward


# (consts, carry, x of one step, cotangents of the marked carry, of the marked ys)
# -> cotangents of the marked consts, carry and x
Pullback: TypeAlias = Callable[
    [Arrays, Arrays, Arrays, Arrays, Arrays], tuple[Arrays, Arrays, Arrays]
]


def backward(
    loop: Loop,
    inputs: Inputs,
    held: Checkpoints,
    cotangents: Results,
    marked: Inputs,
    pullback: Pullback | None = None,
) -> Inputs:
    """Return the cotangents of the marked inputs; None for the others.

    Args:
      loop: the loop.
      inputs: its inputs.
      held: the states that `sweep` kept.
      cotangents: of the results; None where zero.
      marked: which inputs are differentiated, as lists of bools.
      pullback: a replacement for the transposed derivative of a step, if any.
    """
    consts = inputs.consts
    check_varying(loop, inputs, marked)
    if loop.store.one_pass:
        witnesses = [x for x in [*_leaves(inputs), *_leaves(cotangents)] if x is not None]
        held = _sweep(loop, inputs, witnesses, with_ys=False)[1]
    carry_mask, y_mask = loop.spread(*map(tuple, marked[:3]))

    def reverse_step(step: Array, carry: Arrays, ct_carry: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        x = loop.x_at(inputs, step)
        ct_y = cotangents_of_y(loop, cotangents, y_mask, step)
        if pullback is not None:
            return pullback(consts, carry, x, ct_carry, ct_y)

        def active(c: Arrays, k: Arrays, x_: Arrays) -> tuple[Arrays, Arrays]:
            carry_out, y = loop.call(
                merge(consts, marked.consts, c),
                merge(carry, carry_mask, k),
                merge(x, marked.xs, x_),
            )
            return select(carry_out, carry_mask), select(y, y_mask)

        _, pull = jax.vjp(
            active, select(consts, marked.consts), select(carry, carry_mask), select(x, marked.xs)
        )
        return pull((ct_carry, ct_y))

    def reverse(state: tuple) -> tuple:
        done, top, starts, rows, ct_consts, ct_carry, ct_xs = state
        # Under `vmap`, lanes without remaining steps run along with the others. Their unsigned counter must
        # not wrap around: the descent below would take billions of steps.
        step = jnp.maximum(held.count - done, 1) - 1
        top_start = starts[top]
        rows, carry = loop.store.read(rows, entry(held.order, top), inputs.carry)

        def descend(state: tuple) -> tuple:
            start, top, starts, rows, carry = state
            split = _split(loop, jnp.maximum(step, start) + 1 - start, loop.slots - top)
            carry = run_steps(loop, inputs, start, start + split, carry)
            start = start + split
            # The state of `step` itself is written, too, to the unused row above the stack.
            rows = loop.store.write(rows, entry(held.order, top + 1), carry)
            starts = starts.at[top + 1].set(start)
            return start, top + (start < step).astype(jnp.int32), starts, rows, carry

        _, top, starts, rows, carry = lax.while_loop(
            lambda state: state[0] < step, descend, (top_start, top, starts, rows, carry)
        )
        d_consts, ct_carry, d_x = reverse_step(step, carry, ct_carry)
        ct_consts, ct_xs = add_step(loop, step, ct_consts, ct_xs, d_consts, d_x)
        top = top - (starts[top] == step).astype(jnp.int32)
        return done + 1, top, starts, rows, ct_consts, ct_carry, ct_xs

    ct_consts, ct_carry, ct_xs = first_cotangents(inputs, cotangents, marked, carry_mask)
    if loop.test is not None:
        ct_carry = unless_uncounted(loop, held.count, ct_carry)
    # It counts up: the CPU compiler of jaxlib 0.10 runs too few iterations, or aborts, if an unsigned
    # counter counts down from a constant.
    *_, rows, ct_consts, ct_carry, ct_xs = lax.while_loop(
        lambda state: state[0] < held.count,
        reverse,
        (
            loop.count(0),
            held.top,
            held.starts,
            held.rows,
            ct_consts,
            ct_carry,
            ct_xs,
        ),
    )
    loop.store.close(rows)
    return cotangents_of_inputs(inputs, marked, carry_mask, ct_consts, ct_carry, ct_xs)


# Helpers


def _leaves(parts: Inputs | Results) -> Arrays:
    return [value for part in parts for value in part]


def _steps(loop: Loop, inputs: Inputs) -> Array:
    return inputs.steps[0] if loop.length is None else loop.count(loop.length)


def _split(loop: Loop, length: Size, free: Array) -> Array:
    """Return `schedules.binomial_split` at run time: `length` ≥ 2 steps from a state with `free` slots.

    Outside that domain, and where the table is too narrow, the result only has to be a small number of
    steps that makes progress: it is also computed for lanes of a `vmap` that are done.
    """
    length = jnp.maximum(length, 2)
    if loop.slots == 1:
        return length - 1
    table = jnp.asarray(loop.rows_of_splits)
    row = entry(table, free)
    r = jnp.sum(row < length, dtype=jnp.int32)
    below = jnp.maximum(r - 1, 0)
    split = jnp.minimum(entry(row, below), length - entry(entry(table, free - 1), below))
    return jnp.where(free == 1, length - 1, jnp.clip(split, 1, jnp.maximum(length - 1, 1)))


def _before_first_entry() -> Array:
    """Return the top of an empty stack of checkpoints."""
    return _jax.in_mesh(jnp.int32(-1))


def _no_starts(loop: Loop) -> Array:
    return jnp.zeros(loop.slots + 1, loop.counter)
