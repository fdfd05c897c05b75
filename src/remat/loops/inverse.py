"""Reversing a loop whose step can be inverted: states are computed backwards, and not kept.

    sweep:     run the loop; keep its last state, and the state before every block but the first
    backward:  for each block, from the state behind it: invert a step; reverse it at the state found

An inverse in floating-point arithmetic does not find exactly the same state, and its error may grow from step
to step; in a dissipative system it grows exponentially. Each block begins at a state that was kept, so that
errors grow only over the steps of one block.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from remat import _jax
from remat.aliases import Array, Arrays
from remat.loops.loop import (
    Inputs,
    Loop,
    Results,
    add_step,
    advance,
    cotangents_of_inputs,
    cotangents_of_y,
    first_cotangents,
    merge,
    select,
)


class Kept(NamedTuple):
    """The state behind each block: those of all blocks but the last in rows, and the last one."""

    rows: Arrays
    last: Arrays


def sweep(loop: Loop, inputs: Inputs) -> tuple[Results, Kept]:
    """Run the loop, and keep the states behind its blocks."""
    ys = [_jax.zeros(y, (loop.length,)) for y in loop.y_avals]
    n, block = loop.count(loop.length), loop.count(_block(loop))

    def run(state: tuple) -> tuple:
        step, rows, carry, ys = state
        stop = jnp.minimum(step + block, n)
        carry, ys = advance(loop, inputs, step, stop, carry, ys)
        return stop, rows, carry, ys

    def keep(state: tuple) -> tuple:
        step, rows, carry, ys = run(state)
        return step, loop.store.write(rows, step // block - 1, carry), carry, ys

    rows = loop.store.create(max(loop.slots - 1, 1), inputs.carry, [])
    state = (loop.count(0), rows, inputs.carry, ys)
    state = lax.while_loop(lambda state: state[0] + block < n, keep, state)
    _, rows, carry, ys = run(state)
    return Results(carry, ys, []), Kept(rows, carry)


def backward(loop: Loop, inputs: Inputs, held: Kept, cotangents: Results, marked: Inputs) -> Inputs:
    """Return the cotangents of the marked inputs; None for the others. See `states.backward`."""
    carry_mask, y_mask = loop.spread(*map(tuple, marked[:3]))
    block = loop.count(_block(loop))
    first, last = loop.inverse_reads

    def reverse_step(state: tuple) -> tuple:
        left, carry, ct_consts, ct_carry, ct_xs = state
        step = left - 1
        x = loop.x_at(inputs, step)
        carry = _jax.call_jaxpr(loop.inverse, [*inputs.consts[first:last], *carry, *x])

        def active(c: Arrays, k: Arrays, x_: Arrays) -> tuple[Arrays, Arrays]:
            carry_out, y = loop.call(
                merge(inputs.consts, marked.consts, c),
                merge(carry, carry_mask, k),
                merge(x, marked.xs, x_),
            )
            return select(carry_out, carry_mask), select(y, y_mask)

        at = select(inputs.consts, marked.consts), select(carry, carry_mask), select(x, marked.xs)
        d_consts, ct_carry, d_x = jax.vjp(active, *at)[1](
            (ct_carry, cotangents_of_y(loop, cotangents, y_mask, step))
        )
        ct_consts, ct_xs = add_step(loop, step, ct_consts, ct_xs, d_consts, d_x)
        return step, carry, ct_consts, ct_carry, ct_xs

    def reverse_block(left: Array, carry: Arrays, cts: tuple) -> tuple:
        start = (left - 1) // block * block
        left, _, *cts = lax.while_loop(
            lambda state: state[0] > start, reverse_step, (left, carry, *cts)
        )
        return left, *cts

    def reverse(state: tuple) -> tuple:
        left, *cts = state
        _, carry = loop.store.read(held.rows, left // block - 1, inputs.carry)
        return reverse_block(left, carry, tuple(cts))

    cts = first_cotangents(inputs, cotangents, marked, carry_mask)
    state = reverse_block(loop.count(loop.length), held.last, cts)
    _, *found = lax.while_loop(lambda state: state[0] > 0, reverse, state)
    return cotangents_of_inputs(inputs, marked, carry_mask, *found)


def _block(loop: Loop) -> int:
    """Return the number of steps that are inverted from one kept state."""
    return -(-loop.length // loop.slots)
