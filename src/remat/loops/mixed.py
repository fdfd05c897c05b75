"""Running a loop by the mixed schedule: some steps are reversed from a state, some from their residuals.

The schedule's tree (`schedules.mixed`) is a table of the program, and a part of it a number:

    part = the loop
    while the part has parts: keep the state at hand; advance; the part is now its second part
    run the steps of the block, and keep their residuals                        (here the sweep ends)
    repeat until no step is left:
        reverse the steps whose residuals are kept
        take the newest state; descend from its part as above

So the body appears twice in the sweep (with its residuals, and without) and three times in the backward
pass (the same, and reversed). Under `jax.grad` the sweep runs every step once; it ends with the residuals of
the last block, so that the backward pass begins without running a step again.

The tree is chosen when the loop is differentiated: only then is it known which inputs are, and so which
residuals the steps have.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from remat import _jax
from remat.aliases import Array, Arrays, PyTree
from remat.ir import jaxprs
from remat.ir.equations import is_region
from remat.loops import inverse, loop as loops
from remat.loops.buffers import Layout, layout
from remat.loops.halves import Halves, Masks, split_step
from remat.loops.loop import (
    Inputs,
    Loop,
    Results,
    add_step,
    advance,
    cotangents_of_inputs,
    cotangents_of_y,
    entry,
    first_cotangents,
)
from remat.loops.schedules.mixed import EMPTY, ROOT, Mixed

_INT32_MAX = 2**31 - 1  # the largest row of a buffer


class Plan(NamedTuple):
    """How a loop is reversed: its schedule, its step in two halves, and where both keep values."""

    schedule: Mixed
    halves: Halves
    layout: Layout

    @property
    def is_binomial(self) -> bool:
        """Return whether no residuals are kept: then states alone are kept, by the binomial schedule."""
        return self.schedule.peak_residuals <= 1 < self.schedule.n

    @property
    def first_block(self) -> int:
        """Return the number of steps of the block with which the sweep ends."""
        part, tree = ROOT, self.schedule.tree
        while tree.first[part] >= 0:
            part = int(tree.second[part])
        return int(tree.steps[part])


class Kept(NamedTuple):
    """What is kept when the forward pass ends.

    Attributes:
      buffers: of the plan's layout: states, and above them the residuals of the last block.
      starts, parts: the first step and the part of each state, from entry 1; entry 0 is the end.
      top: how many states are kept.
    """

    buffers: Arrays
    starts: Array
    parts: Array
    top: Array


def plan_of(loop: Loop, marked: Inputs) -> Plan | None:
    """Return the plan by which a loop is reversed for the marked inputs; None for states alone."""
    if loop.memory is None:
        return None
    consts, carry, xs = map(tuple, marked[:3])
    if (consts, carry, xs) in loop.plans:
        return loop.plans[consts, carry, xs]
    carry_mask, y_mask = loop.spread(consts, carry, xs)
    if not any((*carry_mask, *y_mask)):
        return None
    try:
        halves = split_step(loop.body, Masks(consts, carry_mask, xs, y_mask))
    except Exception:  # the backward pass raises it, with its context
        return None
    plan = plan_with(loop, halves)
    if not halves.added:
        # Values that are closed over may belong to the trace at hand.
        loop.plans[consts, carry, xs] = plan
    return plan


def plan_with(loop: Loop, halves: Halves) -> Plan | None:
    """Return the plan by which a loop is reversed whose step is split so; None for states alone."""
    n, memory = loop.length, loop.memory
    if memory is None or n is None or loop.is_symbolic or not 0 < n < 2**31:
        return None
    if halves.keeps_state and any(map(is_region, jaxprs.equations(loop.body))):
        # The reversal recomputes the step from its state: its residuals save nothing.
        return None
    state = _jax.in_avals(loop.body)[loop.n_consts : loop.n_consts + loop.n_carry]
    if any(_jax.is_symbolic(size) for t in (*state, *halves.kept) for size in t.shape):
        return None
    where = layout(state, halves.kept)
    schedule = where.schedule(n, max(0, loop.slots * where.state_bytes + memory))
    if schedule is None or max(where.sizes(schedule)) > _INT32_MAX:
        return None
    plan = Plan(schedule, halves, where)
    return None if plan.is_binomial else plan


def sweep(loop: Loop, inputs: Inputs, marked: Inputs) -> tuple[Results, PyTree]:
    """Run the loop, and keep what `backward` with the same marked inputs needs."""
    if loop.inverse is not None:
        return inverse.sweep(loop, inputs)
    plan = plan_of(loop, marked)
    if plan is None:
        return loops.sweep(loop, inputs)
    n_entries = plan.schedule.slots + 1
    stack = Kept(
        plan.layout.create(plan.schedule),
        jnp.zeros(n_entries, loop.counter),
        jnp.full(n_entries, EMPTY, jnp.int32),
        jnp.int32(0),
    )
    ys = [_jax.zeros(y, (loop.length,)) for y in loop.y_avals]
    start, part = loop.count(0), jnp.int32(ROOT)
    held, _, carry, ys = _descend(loop, inputs, plan, stack, start, part, inputs.carry, ys)
    return Results(carry, ys, []), held


def backward(
    loop: Loop, inputs: Inputs, held: PyTree, cotangents: Results, marked: Inputs
) -> Inputs:
    """Return the cotangents of the marked inputs; None for the others. See `loop.backward`."""
    if loop.inverse is not None:
        return inverse.backward(loop, inputs, held, cotangents, marked)
    plan = plan_of(loop, marked)
    if plan is None:
        return loops.backward(loop, inputs, held, cotangents, marked)
    carry_mask, y_mask = loop.spread(*map(tuple, marked[:3]))
    sizes = [sum(mask) for mask in (marked.consts, carry_mask)]
    fixed = plan.halves.fixed_residuals(inputs.consts)

    def reverse(state: tuple) -> tuple:
        """Reverse one step. Only here the buffers are read: a loop that reads them would copy them."""
        stack, left, kept, ct_consts, ct_carry, ct_xs = state
        if plan.schedule.peak_slots:
            is_next = kept == 0
            start = entry(stack.starts, stack.top)
            part = jnp.where(is_next, entry(stack.parts, stack.top), EMPTY)
            top = stack.top - is_next.astype(jnp.int32)
            carry = plan.layout.read_state(stack.buffers, top, inputs.carry)
            stack = stack._replace(top=top)
            stack, run, _, _ = _descend(loop, inputs, plan, stack, start, part, carry, [])
            kept = kept + run
        left, kept = left - 1, kept - 1
        residuals = plan.layout.read_residuals(stack.buffers, stack.top, kept, plan.halves.kept)
        x = loop.x_at(inputs, left)
        pull = plan.halves.reversal(fixed, inputs.consts, x, residuals)
        found = pull((ct_carry, cotangents_of_y(loop, cotangents, y_mask, left)))
        d_consts, rest = list(found[: sizes[0]]), list(found[sizes[0] :])
        ct_carry, d_x = rest[: sizes[1]], rest[sizes[1] :]
        ct_consts, ct_xs = add_step(loop, left, ct_consts, ct_xs, d_consts, d_x)
        return stack, left, kept, ct_consts, ct_carry, ct_xs

    # The first block has been run in the sweep.
    first = (held, loop.count(plan.schedule.n), jnp.int32(plan.first_block))
    *_, ct_consts, ct_carry, ct_xs = lax.while_loop(
        lambda state: state[1] > 0,
        reverse,
        (*first, *first_cotangents(inputs, cotangents, marked, carry_mask)),
    )
    return cotangents_of_inputs(inputs, marked, carry_mask, ct_consts, ct_carry, ct_xs)


def _descend(
    loop: Loop,
    inputs: Inputs,
    plan: Plan,
    stack: Kept,
    start: Array,
    part: Array,
    carry: Arrays,
    ys: Arrays,
) -> tuple[Kept, Array, Arrays, Arrays]:
    """Run a part to its end: keep states up to its last block, and the residuals of that.

    Returns the stack, the number of steps of the block, the state behind it, and the ys.
    """
    tree = plan.schedule.tree
    steps, first, second = (
        _jax.in_mesh(jnp.asarray(table.astype(dtype)))
        for table, dtype in (
            (tree.steps, loop.counter),
            (tree.first, np.int32),
            (tree.second, np.int32),
        )
    )

    def split(state: tuple) -> tuple:
        stack, start, part, carry, ys = state
        buffers = plan.layout.write_state(stack.buffers, stack.top, carry)
        top = stack.top + 1
        starts = stack.starts.at[top].set(start)
        parts = stack.parts.at[top].set(entry(first, part))
        stop = start + entry(steps, part)
        carry, ys = advance(loop, inputs, start, stop, carry, ys)
        return Kept(buffers, starts, parts, top), stop, entry(second, part), carry, ys

    if plan.schedule.peak_slots:
        stack, start, part, carry, ys = lax.while_loop(
            lambda state: entry(first, state[2]) >= 0, split, (stack, start, part, carry, ys)
        )

    def keep(state: tuple) -> tuple:
        kept, buffers, carry, ys = state
        step = start + kept.astype(loop.counter)
        out = plan.halves.run(inputs.consts, carry, loop.x_at(inputs, step))
        carry, y, residuals = (
            out[: len(carry)],
            out[len(carry) :],
            out[len(carry) + len(loop.y_avals) :],
        )
        buffers = plan.layout.write_residuals(buffers, stack.top, kept, residuals)
        at = loop.index(step)
        ys = [lax.dynamic_update_index_in_dim(a, b, at, 0) for a, b in zip(ys, y)]
        return kept + 1, buffers, carry, ys

    length = entry(steps, part).astype(jnp.int32)
    kept, buffers, carry, ys = lax.while_loop(
        lambda state: state[0] < length, keep, (jnp.int32(0), stack.buffers, carry, ys)
    )
    return stack._replace(buffers=buffers), kept, carry, ys
