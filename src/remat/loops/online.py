"""Running a loop of unknown length with states and residuals in one memory (`schedules.online_mixed`).

    sweep: until the test fails, keep the state at hand, and the residuals of a block of steps behind it
    repeat until no step is left:
        reverse the steps whose residuals are kept: of the last block, then what is left of the one before it
        take the newest state; run to the last block before the steps that are reversed, keeping states

Runs and their levels are defined in `schedules.online_mixed`: a *run* at level j starts at a state that it
keeps, and may keep j more. Entry k of the stack of states is the state at which the run at level `slots - k`
starts; above it lies block k, the residuals of the run's steps. The first split of each part is found at run
time from the lengths of the schedule's phases.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from remat import _jax
from remat.aliases import Array, Arrays
from remat.loops.buffers import Layout
from remat.loops.halves import Halves
from remat.loops.loop import (
    Inputs,
    Loop,
    Results,
    advance,
    check_varying,
    cotangents_of_inputs,
    entry,
    first_cotangents,
    unless_uncounted,
)
from remat.loops.reversal import Block, layout_of, reverse_blocks
from remat.loops.schedules import INT32_MAX, Binomial, OnlineMixed
from remat.loops.schedules.online_mixed import lengths_of_phases

_MOST_SLOTS = 1000  # the most states that are kept; more hardly reduce the steps
_TRIED = 16  # numbers of states that are tried; more find a schedule closer to the best one
# Lengths, in steps, of the loops by which schedules are compared; more of them take longer to trace.
_LONGEST_TRIED = 5000


class Reversal(NamedTuple):
    """How a loop of unknown length is reversed: its blocks, its step in two halves, and where values lie."""

    blocks: tuple[int, ...]
    halves: Halves
    layout: Layout

    @property
    def slots(self) -> int:
        """Return how many states are kept beside that of the last run."""
        return len(self.blocks) - 1

    @property
    def sizes(self) -> list[int]:
        """Return how many rows of each type are needed."""
        return self.layout.rows_of([(k + 1, b) for k, b in enumerate(reversed(self.blocks))])


class Held(NamedTuple):
    """The values that are kept when the loop ends.

    Attributes:
      buffers: of the reversal's layout.
      starts: the first step of each state.
      top: how many states are kept.
      block: the block of the last run.
      left_over: the remaining steps of the block before it.
      count: the number of steps.
    """

    buffers: Arrays
    starts: Array
    top: Array
    block: Block
    left_over: Block
    count: Array


def reversal_with(loop: Loop, halves: Halves) -> Reversal | None:
    """Return how a loop whose step has these halves is reversed; None if only states are kept."""
    if loop.memory is None or halves.recomputes(loop.body):
        return None
    where = layout_of(loop, halves)
    if where is None:
        return None
    longest = INT32_MAX if loop.max_steps is None else min(max(loop.max_steps, 1), INT32_MAX)
    if not where.residual_bytes:
        # Rows are counted in 32 bits. An empty residual also takes a row.
        reversal = Reversal((min(int(loop.most_steps), INT32_MAX),), halves, where)
        return reversal if max(reversal.sizes, default=0) <= INT32_MAX else None
    memory = max(0, loop.slots * where.state_bytes + loop.memory)
    most = min(memory // where.state_bytes if where.state_bytes else _MOST_SLOTS, _MOST_SLOTS)
    typical = min(longest, _LONGEST_TRIED, (most + 1) * (most + 2))
    lengths = sorted({max(1, typical * i // 4) for i in range(1, 5)})

    def steps(blocks: tuple[int, ...]) -> int:
        if len(blocks) == 1 and blocks[0] < longest:
            return INT32_MAX * len(lengths)
        return sum(OnlineMixed(n, blocks).forward_steps for n in lengths)

    tried = sorted({round(most * i / _TRIED) for i in range(_TRIED + 1)})
    candidates = [where.blocks(longest, memory, slots) for slots in tried]
    blocks = min(candidates, key=steps) if len(where.rows) > 1 else candidates[-1]
    states_alone = sum(Binomial(n, loop.slots).grad_forward_steps for n in lengths)
    reversal = Reversal(blocks, halves, where)
    if steps(blocks) >= states_alone or max(reversal.sizes) > INT32_MAX:
        return None
    return reversal


def sweep(loop: Loop, inputs: Inputs, reversal: Reversal) -> tuple[Results, Held]:
    """Run the loop, and keep what `backward` needs."""
    slots = reversal.slots
    entries = np.arange(slots + 1, dtype=np.int32)
    zero, none = loop.count(0), _jax.in_mesh(jnp.int32(0))

    def block(state: tuple) -> tuple:
        """Keep the current state as the first of a new run, and run its block."""
        _, step, buffers, starts, phases, top, last, _, carry = state
        around = jnp.roll(phases, 1)
        grows = ((phases < around) & (entries < slots) | (entries == 0)) & (entries < top)
        # The innermost run that is not full, -1 before the first block.
        parent = jnp.max(jnp.where(grows, entries, -1))
        phases = jnp.where(entries == parent + 1, 1, phases + (entries == parent).astype(jnp.int32))
        starts = jnp.where(entries == parent + 1, step, starts)
        buffers = reversal.layout.write_state(buffers, parent + 1, carry)
        capacity = entry(_table(loop, reversal.blocks[::-1]), parent + 1)
        top = parent + 2

        def run(state: tuple) -> tuple:
            _, step, kept, buffers, carry = state
            out = reversal.halves.run(inputs.consts, carry, [])
            carry, residuals = out[: len(carry)], out[len(carry) :]
            at = kept.astype(jnp.int32)
            buffers = reversal.layout.write_residuals(buffers, top, at, residuals)
            step = loop.after(step)
            return loop.goes_on(inputs.consts, carry, step), step, kept + 1, buffers, carry

        more, step, kept, buffers, carry = lax.while_loop(
            lambda state: state[0] & (state[2] < capacity),
            run,
            (state[0], step, zero, buffers, carry),
        )
        now = Block(top, none, kept.astype(jnp.int32))
        return more, step, buffers, starts, phases, top, now, last, carry

    empty = Block(none, none, none)
    more = loop.goes_on(inputs.consts, inputs.carry, zero)
    buffers = reversal.layout.buffers(reversal.sizes)
    starts = _jax.in_mesh(jnp.zeros(slots + 1, loop.counter))
    phases = _jax.in_mesh(jnp.ones(slots + 1, jnp.int32))
    state = (more, zero, buffers, starts, phases, none, empty, empty, inputs.carry)
    found = lax.while_loop(lambda state: state[0], block, state)
    _, step, buffers, starts, _, top, last, old, carry = found
    # Residuals of the old block that the last one, and the state below it, wrote over.
    low = none
    for rows in reversal.layout.rows:
        if rows.residuals:
            taken = last.kept - (-(last.base - old.base) * rows.state) // rows.residuals
            low = jnp.maximum(low, jnp.clip(taken, 0, old.kept))
    left_over = old._replace(low=low)
    return Results(carry, [], [step]), Held(buffers, starts, top, last, left_over, step)


def backward(
    loop: Loop, inputs: Inputs, reversal: Reversal, held: Held, cotangents: Results, marked: Inputs
) -> Inputs:
    """Return the cotangents of the marked inputs; None for the others. See `loop.backward`."""
    check_varying(loop, inputs, marked)
    carry_mask, _ = loop.spread(*map(tuple, marked[:3]))
    none = _jax.in_mesh(jnp.int32(0))

    def next_block(stack: Held, left: Array) -> tuple[Held, Block]:
        left_over = stack.left_over
        used = left_over.kept > left_over.low
        stack = stack._replace(left_over=left_over._replace(kept=left_over.low))
        is_next = (left > 0) & ~used
        stack = stack._replace(top=stack.top - is_next.astype(jnp.int32))
        start = entry(stack.starts, jnp.maximum(stack.top, 0))
        # A lane of a batch that is done has no steps to run.
        length = jnp.where(is_next & (left > start), left - start, jnp.zeros_like(left))
        carry = reversal.layout.read_state(stack.buffers, stack.top, inputs.carry)
        stack, kept = _descend(loop, inputs, reversal, stack, start, length, carry)
        block = Block(stack.top, none, kept)
        return stack, Block(*(jnp.where(used, a, b) for a, b in zip(left_over, block)))

    ct_consts, ct_carry, ct_xs = first_cotangents(inputs, cotangents, marked, carry_mask)
    ct_carry = unless_uncounted(loop, held.count, ct_carry)
    # The state of the last run would have been useful only if the loop had continued.
    held = held._replace(top=jnp.maximum(held.top - 1, 0))
    _, cts = reverse_blocks(
        loop,
        inputs,
        reversal,
        cotangents,
        marked,
        (held, held.count, held.block),
        (ct_consts, ct_carry, ct_xs),
        next_block,
    )
    return cotangents_of_inputs(inputs, marked, carry_mask, *cts)


def _descend(
    loop: Loop,
    inputs: Inputs,
    reversal: Reversal,
    stack: Held,
    start: Array,
    length: Array,
    carry: Arrays,
) -> tuple[Held, Array]:
    """Run a part to its end: keep states up to its last block, and the residuals of that block.

    Returns the stack, and the number of steps of the block.
    """
    capacities = _table(loop, reversal.blocks[::-1])

    def split(state: tuple) -> tuple:
        stack, start, length, carry = state
        buffers = reversal.layout.write_state(stack.buffers, stack.top, carry)
        starts = stack.starts.at[stack.top].set(start)
        k = _split(loop, reversal, reversal.slots - stack.top, length)
        carry, _ = advance(loop, inputs, start, start + k, carry, [])
        stack = stack._replace(buffers=buffers, starts=starts, top=stack.top + 1)
        return stack, start + k, length - k, carry

    if reversal.slots:
        stack, start, length, carry = lax.while_loop(
            lambda state: state[2] > entry(capacities, state[0].top),
            split,
            (stack, start, length, carry),
        )
    base = stack.top

    def keep(state: tuple) -> tuple:
        kept, buffers, carry = state
        out = reversal.halves.run(inputs.consts, carry, [])
        buffers = reversal.layout.write_residuals(buffers, base, kept, out[len(carry) :])
        return kept + 1, buffers, out[: len(carry)]

    steps = length.astype(jnp.int32)
    kept, buffers, _ = lax.while_loop(
        lambda state: state[0] < steps, keep, (jnp.zeros_like(steps), stack.buffers, carry)
    )
    return stack._replace(buffers=buffers), kept


def _split(loop: Loop, reversal: Reversal, level: Array, length: Array) -> Array:
    """Return `schedules.online_mixed.split_of` at run time."""
    longest = INT32_MAX if loop.max_steps is None else loop.max_steps
    lengths = lengths_of_phases(reversal.blocks, max(longest, 1))
    table = _jax.in_mesh(jnp.asarray(np.minimum(lengths, loop.most_steps).astype(loop.counter)))
    # It is also computed for lanes of a batch that have no steps to run; the result must be small there.
    length = jnp.maximum(length, 2)
    row, below = entry(table, level), entry(table, jnp.maximum(level - 1, 0))
    phase = jnp.maximum(jnp.sum(row < length, dtype=jnp.int32), 1)
    split = jnp.minimum(entry(row, phase - 1), length - entry(below, phase - 1))
    split = jnp.where(level == 1, length - below[0], split)
    return jnp.clip(split, jnp.ones_like(length), length - 1)


def _table(loop: Loop, blocks: tuple[int, ...]) -> Array:
    most = int(loop.most_steps)
    return _jax.in_mesh(jnp.asarray(np.array([min(b, most) for b in blocks], loop.counter)))
