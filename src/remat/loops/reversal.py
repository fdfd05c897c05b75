"""The backward pass of a loop that keeps residuals: blocks of steps, reversed one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from jax import lax

from remat import _jax
from remat.aliases import Array, Arrays, PyTree
from remat.loops.buffers import Layout, layout
from remat.loops.halves import Halves
from remat.loops.loop import Inputs, Loop, Results, add_step, cotangents_of_y


def layout_of(loop: Loop, halves: Halves) -> Layout | None:
    """Return where states and residuals of a loop lie; None if their sizes are not known."""
    state = _jax.in_avals(loop.body)[loop.n_consts : loop.n_consts + loop.n_carry]
    if any(_jax.is_symbolic(size) for t in (*state, *halves.kept) for size in t.shape):
        return None
    return layout(state, halves.kept)


class Block(NamedTuple):
    """Steps whose residuals are kept.

    Attributes:
      base: the number of states below their residuals in the buffers.
      low, kept: the first step whose residuals are still kept, and one past the last.
    """

    base: Array
    low: Array
    kept: Array


class HasResiduals(Protocol):
    """How a loop that keeps residuals is reversed: its step in two halves, and where values are kept."""

    @property
    def halves(self) -> Halves: ...

    @property
    def layout(self) -> Layout: ...


# (kept values with their `buffers`, remaining steps) → (kept values, the next block).
NextBlock = Callable[[PyTree, Array], tuple[PyTree, Block]]


def reverse_blocks(
    loop: Loop,
    inputs: Inputs,
    reversal: HasResiduals,
    cotangents: Results,
    marked: Inputs,
    state: tuple[PyTree, Array, Block],
    sums: tuple[Arrays, Arrays, Arrays],
    next_block: NextBlock,
) -> tuple[PyTree, tuple[Arrays, Arrays, Arrays]]:
    """Reverse all steps; return the values kept at the end, and the cotangents of consts, carry and xs.

    Args:
      loop, inputs, cotangents, marked: see `loop.backward`.
      reversal: how the loop is reversed.
      state: the kept values with their `buffers`; the steps to reverse; the last block of them.
      sums: the cotangents before any step is reversed.
      next_block: runs the steps of the next block, and keeps their residuals.
    """
    carry_mask, y_mask = loop.spread(*map(tuple, marked[:3]))
    sizes = [sum(mask) for mask in (marked.consts, carry_mask)]
    halves, layout = reversal.halves, reversal.layout
    fixed = halves.fixed_residuals(inputs.consts)

    def reverse(state: tuple) -> tuple:
        buffers, left, block, ct_consts, ct_carry, ct_xs = state
        left, kept = left - 1, block.kept - 1
        residuals = layout.read_residuals(buffers, block.base, kept, halves.kept)
        x = loop.x_at(inputs, left)
        pull = halves.reversal(fixed, inputs.consts, x, residuals)
        found = pull((ct_carry, cotangents_of_y(loop, cotangents, y_mask, left)))
        d_consts, rest = list(found[: sizes[0]]), list(found[sizes[0] :])
        ct_carry, d_x = rest[: sizes[1]], rest[sizes[1] :]
        ct_consts, ct_xs = add_step(loop, left, ct_consts, ct_xs, d_consts, d_x)
        return buffers, left, block._replace(kept=kept), ct_consts, ct_carry, ct_xs

    def reverse_block(state: tuple) -> tuple:
        held, *rest = state
        # The buffers pass through the loop, which then does not copy them.
        buffers, left, _, *cts = lax.while_loop(
            lambda state: state[2].kept > state[2].low, reverse, (held.buffers, *rest)
        )
        held, block = next_block(held._replace(buffers=buffers), left)
        return held, left, block, *cts

    held, _, _, *cts = lax.while_loop(lambda state: state[1] > 0, reverse_block, (*state, *sums))
    return held, (cts[0], cts[1], cts[2])
