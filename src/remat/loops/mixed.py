"""Running a loop by the mixed schedule: some steps are reversed from a state, some from their residuals.

The schedule's tree (`schedules.mixed`) is a table of the program, and a part of it a number:

    part = the loop
    while the part has parts: keep the state at hand; advance; the part is now its second part
    run the steps of the block, and keep their residuals                        (here the sweep ends)
    repeat until no step is left:
        reverse the steps whose residuals are kept
        take the newest state; descend from its part as above

With slower levels of storage (`schedules.hierarchical`), the state at hand is kept in the level of its part.
Operations of only some parts, such as writing to a slower level, are a loop of one iteration or none: XLA
updates buffers that pass through a loop in place, and may copy them around a branch.

So the body appears twice in the sweep (with its residuals, and without) and three times in the backward
pass (the same, and reversed). Under `jax.grad` the sweep runs every step once; it ends with the residuals of
the last block, so that the backward pass begins without running a step again.

The tree is chosen when the loop is differentiated: only then are the differentiated inputs known, and so the
residuals of the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from remat import _jax
from remat.aliases import Array, Arrays, PyTree
from remat.loops import inverse, online, states
from remat.loops.buffers import Layout
from remat.loops.halves import Halves, Masks, split_step
from remat.loops.loop import (
    Inputs,
    Loop,
    Results,
    advance,
    cotangents_of_inputs,
    entry,
    first_cotangents,
    plain,
)
from remat.loops.reversal import Block, layout_of, reverse_blocks
from remat.loops.schedules.binomial import INT32_MAX
from remat.loops.schedules.hierarchical import Hierarchical
from remat.loops.schedules.mixed import EMPTY, ROOT, Mixed
from remat.loops.store import Store


class Reversal(NamedTuple):
    """How a loop is reversed: its schedule, its step in two halves, and where both keep values."""

    schedule: Mixed | Hierarchical
    halves: Halves
    layout: Layout
    stores: tuple[Store, ...] = ()

    @property
    def is_binomial(self) -> bool:
        """Return whether no residuals are kept: then states alone are kept, by the binomial schedule."""
        return not self.stores and self.schedule.peak_residuals <= 1 < self.schedule.n

    @property
    def first_block(self) -> int:
        """Return the number of steps of the block with which the sweep ends."""
        part, tree = ROOT, self.schedule.tree
        while tree.first[part] >= 0:
            part = int(tree.second[part])
        return int(tree.steps[part])


class Kept(NamedTuple):
    """The values that are kept when the forward pass ends.

    Attributes:
      buffers: of the reversal's layout: states, and above them the residuals of the last block.
      starts, parts: the first step and the part of each state, from entry 1; entry 0 is the end.
      top: the number of states that are kept.
      slower: the rows of the slower levels.
      tops: the number of states in each of these.
    """

    buffers: Arrays
    starts: Array
    parts: Array
    top: Array
    slower: list[PyTree]
    tops: Array

    @property
    def base(self) -> Array:
        """Return how many states are kept in the fastest level."""
        return self.top - jnp.sum(self.tops, dtype=jnp.int32) if self.slower else self.top


def reversal_of(loop: Loop, marked: Inputs) -> Reversal | online.Reversal | None:
    """Return how a loop is reversed for the marked inputs; None if only states are kept."""
    if loop.memory is None:
        return None
    consts, carry, xs = map(tuple, marked[:3])
    if (consts, carry, xs) in loop.reversals:
        return loop.reversals[consts, carry, xs]
    carry_mask, y_mask = loop.spread(consts, carry, xs)
    if not any((*carry_mask, *y_mask)):
        return None
    try:
        halves = split_step(loop.body, Masks(consts, carry_mask, xs, y_mask))
    except Exception:  # the backward pass raises it, with its context
        return None
    reversal = (
        reversal_with(loop, halves) if loop.test is None else online.reversal_with(loop, halves)
    )
    if not halves.added:
        # Closed-over values may belong to the current trace.
        loop.reversals[consts, carry, xs] = reversal
    return reversal


def reversal_with(loop: Loop, halves: Halves) -> Reversal | None:
    """Return how a loop whose step has these halves is reversed; None if only states are kept."""
    n, memory = loop.length, loop.memory
    if memory is None or n is None or loop.is_symbolic or not 0 < n < 2**31:
        return None
    if halves.recomputes(loop.body) and not loop.levels:
        return None
    where = layout_of(loop, halves)
    if where is None:
        return None
    room = max(0, loop.slots * where.state_bytes + memory)
    schedule: Mixed | Hierarchical | None
    if loop.levels:
        schedule = where.schedule_of_levels(n, room, tuple(stored.level for stored in loop.levels))
    else:
        schedule = where.schedule(n, room)
    if schedule is None or max(where.sizes(schedule)) > INT32_MAX:
        return None
    reversal = Reversal(schedule, halves, where, tuple(stored.store for stored in loop.levels))
    return None if reversal.is_binomial else reversal


def sweep(loop: Loop, inputs: Inputs, marked: Inputs) -> tuple[Results, PyTree]:
    """Run the loop, and keep the values that `backward` with the same marked inputs needs."""
    if loop.inverse is not None:
        return inverse.sweep(loop, inputs)
    reversal = reversal_of(loop, marked)
    if reversal is None:
        return states.sweep(loop, inputs)
    if isinstance(reversal, online.Reversal):
        return online.sweep(loop, inputs, reversal)
    if any(store.one_pass for store in reversal.stores):
        return plain(loop, inputs), None
    return _sweep(loop, inputs, reversal, [], with_ys=True)


def _sweep(
    loop: Loop, inputs: Inputs, reversal: Reversal, witnesses: Arrays, *, with_ys: bool
) -> tuple[Results, Kept]:
    slower: list[PyTree] = []
    n_entries = reversal.schedule.peak_slots + 1
    if isinstance(reversal.schedule, Hierarchical):
        n_entries = reversal.schedule.peak_entries + 1
        slower = [
            store.create(max(slots, 1), inputs.carry, witnesses)
            for store, slots in zip(reversal.stores, reversal.schedule.peak_slots_of_levels)
        ]
    stack = Kept(
        reversal.layout.create(reversal.schedule),
        jnp.zeros(n_entries, loop.counter),
        jnp.full(n_entries, EMPTY, jnp.int32),
        jnp.int32(0),
        slower,
        jnp.zeros(len(slower), jnp.int32),
    )
    ys = [_jax.zeros(y, (loop.length,)) for y in loop.y_avals if with_ys]
    start, part = loop.count(0), jnp.int32(ROOT)
    fresh = jnp.bool_(True)
    held, _, carry, ys = _descend(
        loop, inputs, reversal, stack, start, part, fresh, inputs.carry, ys
    )
    return Results(carry, ys, []), held


def backward(
    loop: Loop, inputs: Inputs, held: PyTree, cotangents: Results, marked: Inputs
) -> Inputs:
    """Return the cotangents of the marked inputs; None for the others. See `states.backward`."""
    if loop.inverse is not None:
        return inverse.backward(loop, inputs, held, cotangents, marked)
    reversal = reversal_of(loop, marked)
    if reversal is None:
        return states.backward(loop, inputs, held, cotangents, marked)
    if isinstance(reversal, online.Reversal):
        return online.backward(loop, inputs, reversal, held, cotangents, marked)
    if any(store.one_pass for store in reversal.stores):
        witnesses = [x for part in (*inputs, *cotangents) for x in part if x is not None]
        held = _sweep(loop, inputs, reversal, witnesses, with_ys=False)[1]
    carry_mask, _ = loop.spread(*map(tuple, marked[:3]))
    zero = jnp.int32(0)

    def next_block(stack: Kept, left: Array) -> tuple[Kept, Block]:
        kept = zero
        if stack.starts.shape[0] > 1:
            stack, start, part, fresh, carry = _pop(loop, inputs, reversal, stack, left > 0)
            stack, kept, _, _ = _descend(
                loop, inputs, reversal, stack, start, part, fresh, carry, []
            )
        return stack, Block(stack.base, zero, kept)

    # The first block has been run in the sweep.
    block = Block(held.base, zero, jnp.int32(reversal.first_block))
    held, cts = reverse_blocks(
        loop,
        inputs,
        reversal,
        cotangents,
        marked,
        (held, loop.count(reversal.schedule.n), block),
        first_cotangents(inputs, cotangents, marked, carry_mask),
        next_block,
    )
    for store, rows in zip(reversal.stores, held.slower):
        store.close(rows)
    return cotangents_of_inputs(inputs, marked, carry_mask, *cts)


def _pop(
    loop: Loop, inputs: Inputs, reversal: Reversal, stack: Kept, is_next: Array
) -> tuple[Kept, Array, Array, Array, Arrays]:
    """Take the newest state off the stack if there is one.

    Returns the stack, the state's step, its part, whether the part has yet to write the state to its level
    (`fresh`), and the state.
    """
    start, part = entry(stack.starts, stack.top), entry(stack.parts, stack.top)
    part = jnp.where(is_next, part, EMPTY)
    top = stack.top - is_next.astype(jnp.int32)
    if not isinstance(reversal.schedule, Hierarchical):
        carry = reversal.layout.read_state(stack.buffers, top, inputs.carry)
        return stack._replace(top=top), start, part, jnp.bool_(True), carry
    source, target = (_table(column, np.int32) for column in reversal.schedule.moves)
    level = jnp.where(is_next, entry(source, part), 0)
    tops = stack.tops - _one_at(level, len(reversal.stores))
    stack = stack._replace(top=top, tops=tops)
    carry = inputs.carry
    if reversal.schedule.peak_slots:
        carry = reversal.layout.read_state(stack.buffers, stack.base, inputs.carry)
    slower = list(stack.slower)
    for k, store in enumerate(reversal.stores):

        def read(held: PyTree, store: Store = store, row: Array = tops[k]) -> PyTree:
            return store.read(held[0], row, inputs.carry)

        slower[k], carry = _changed_if(is_next & (level == k + 1), read, (slower[k], carry))
    fresh = entry(source, part) != entry(target, part)
    return stack._replace(slower=slower), start, part, fresh, carry


def _changed_if(condition: Array, change: Callable[[PyTree], PyTree], value: PyTree) -> PyTree:
    """Return the value, changed if the condition holds."""
    return lax.while_loop(
        lambda state: state[0],
        lambda state: (jnp.zeros_like(state[0]), change(state[1])),
        (condition, value),
    )[1]


def _one_at(level: Array, n_levels: int) -> Array:
    """Return 1 for a slower level, 0 for the others."""
    return (jnp.arange(1, n_levels + 1, dtype=jnp.int32) == level).astype(jnp.int32)


def _table(column: np.ndarray, dtype: DTypeLike) -> Array:
    return _jax.in_mesh(jnp.asarray(column.astype(dtype)))


def _push(reversal: Reversal, stack: Kept, part: Array, fresh: Array, carry: Arrays) -> Kept:
    """Keep the first state of a part in the level where the part has it."""
    buffers = stack.buffers
    if reversal.schedule.peak_slots:
        # Where the state belongs to a slower level, the fastest one has no use for its row.
        buffers = reversal.layout.write_state(buffers, stack.base, carry)
    stack = stack._replace(buffers=buffers, top=stack.top + 1)
    if not isinstance(reversal.schedule, Hierarchical):
        return stack
    level = entry(_table(reversal.schedule.moves.target, np.int32), part)
    slower = list(stack.slower)
    for k, store in enumerate(reversal.stores):

        def write(rows: PyTree, store: Store = store, row: Array = stack.tops[k]) -> PyTree:
            return store.write(rows, row, carry)

        slower[k] = _changed_if(fresh & (level == k + 1), write, slower[k])
    tops = stack.tops + _one_at(level, len(reversal.stores))
    return stack._replace(slower=slower, tops=tops)


def _descend(
    loop: Loop,
    inputs: Inputs,
    reversal: Reversal,
    stack: Kept,
    start: Array,
    part: Array,
    fresh: Array,
    carry: Arrays,
    ys: Arrays,
) -> tuple[Kept, Array, Arrays, Arrays]:
    """Run a part to its end: keep states up to its last block, and the residuals of that block.

    The first state is written to a slower level only if it is `fresh`: not there already.

    Returns the stack, the number of steps of the block, the state behind it, and the ys.
    """
    tree = reversal.schedule.tree
    steps = _table(tree.steps, loop.counter)
    first, second = _table(tree.first, np.int32), _table(tree.second, np.int32)

    def split(state: tuple) -> tuple:
        stack, start, part, fresh, carry, ys = state
        stack = _push(reversal, stack, part, fresh, carry)
        stack = stack._replace(
            starts=stack.starts.at[stack.top].set(start),
            parts=stack.parts.at[stack.top].set(entry(first, part)),
        )
        stop = start + entry(steps, part)
        carry, ys = advance(loop, inputs, start, stop, carry, ys)
        return stack, stop, entry(second, part), jnp.ones_like(fresh), carry, ys

    if stack.starts.shape[0] > 1:
        stack, start, part, _, carry, ys = lax.while_loop(
            lambda state: entry(first, state[2]) >= 0,
            split,
            (stack, start, part, fresh, carry, ys),
        )
    base = stack.base

    def keep(state: tuple) -> tuple:
        kept, buffers, carry, ys = state
        step = start + kept.astype(loop.counter)
        out = reversal.halves.run(inputs.consts, carry, loop.x_at(inputs, step))
        carry, y, residuals = (
            out[: len(carry)],
            out[len(carry) :],
            out[len(carry) + len(loop.y_avals) :],
        )
        buffers = reversal.layout.write_residuals(buffers, base, kept, residuals)
        at = loop.index(step)
        ys = [lax.dynamic_update_index_in_dim(a, b, at, 0) for a, b in zip(ys, y)]
        return kept + 1, buffers, carry, ys

    length = entry(steps, part).astype(jnp.int32)
    kept, buffers, carry, ys = lax.while_loop(
        lambda state: state[0] < length, keep, (jnp.int32(0), stack.buffers, carry, ys)
    )
    return stack._replace(buffers=buffers), kept, carry, ys
