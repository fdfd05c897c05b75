"""A loop as data, how it runs, and code shared by all ways to reverse it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from remat import _jax
from remat.aliases import Array, Arrays, Size
from remat.errors import EffectError
from remat.ir import jaxprs
from remat.loops import schedules
from remat.loops.store import DEVICE, Store

Mask = tuple[bool, ...]


class Inputs(NamedTuple):
    """The inputs of a loop: values used by every step, the initial carry, the scanned values.

    `steps` is their number where that is known only at run time: an empty list or one counter.
    """

    consts: Arrays
    carry: Arrays
    xs: Arrays
    steps: Arrays


class Results(NamedTuple):
    """The results of a loop: the final carry, the stacked ys, and [number of steps] if it has a test."""

    carry: Arrays
    ys: Arrays
    steps: Arrays


class StoredLevel(NamedTuple):
    """A level of storage, and the store that has it."""

    level: schedules.Level
    store: Store


@dataclass(frozen=True, eq=False)
class Loop:
    """A loop whose body is a jaxpr, and how much may be kept to reverse it.

    Attributes:
      body: a jaxpr without constants: (*consts, *carry, *x) -> (*carry, *y).
      n_consts: the number of inputs of the body that are the same in every step.
      n_carry: the number of inputs of the body that are its carry.
      slots: the states to keep, state 0 included.
      length: the number of steps, or None where it is known only at run time; an expression where
        it is a symbolic dimension.
      test: a jaxpr without constants, (*consts, *carry) -> bool, for a loop that runs while it
        holds.
      test_reads: the consts (first, past the last) and how many of the carry `test` reads.
      max_steps: the most steps that a loop with a test runs, or None.
      reverse: whether the scanned values are read and written from their end.
      unroll: see `jax.lax.scan`.
      store: where the states are kept.
      memory: for a loop that may keep residuals in place of states (`mixed.py`), the bytes available in
        addition to those of `slots` states, which may be negative; None if only states are kept.
      levels: for such a loop, slower levels of storage that hold states, too.
      inverse: a jaxpr without constants, (*consts, *carry, *x) -> carry, from the carry behind a step to
        the one before it; None if there is none. `slots` is the number of blocks of `inverse.py` then.
      inverse_reads: the consts (first, past the last) that `inverse` reads.
      counter: the type that steps are counted in. Where the bounds are integers known at run time it
        is unsigned: the number of steps between two integers fits the unsigned type of their width,
        not always the signed one.
    """

    body: _jax.Jaxpr
    n_consts: int
    n_carry: int
    slots: int
    length: Size = None
    test: _jax.Jaxpr | None = None
    test_reads: tuple[int, int, int] = (0, 0, 0)
    max_steps: int | None = None
    reverse: bool = False
    unroll: int | bool = 1
    store: Store = DEVICE
    memory: int | None = None
    levels: tuple[StoredLevel, ...] = ()
    inverse: _jax.Jaxpr | None = None
    inverse_reads: tuple[int, int] = (0, 0)
    counter: DTypeLike = np.int32

    def call(self, consts: Arrays, carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        """Run one step."""
        out = _jax.call_jaxpr(self.body, [*consts, *carry, *x])
        return out[: self.n_carry], out[self.n_carry :]

    def goes_on(self, consts: Arrays, carry: Arrays, step: Array) -> Array:
        """Return whether a loop with a test runs `step`."""
        first, last, n_carry = self.test_reads
        (verdict,) = _jax.call_jaxpr(self.test, [*consts[first:last], *carry[:n_carry]])
        return verdict if self.max_steps is None else verdict & (step < self.count(self.max_steps))

    def index(self, step: Array) -> Array:
        """Return the index at which a step reads and writes scanned values."""
        if not self.reverse or self.length is None:
            return step
        return self.count(self.length) - 1 - step

    def x_at(self, inputs: Inputs, step: Array) -> Arrays:
        """Return the slice of the scanned values that a step reads."""
        return [lax.dynamic_index_in_dim(x, self.index(step), 0, False) for x in inputs.xs]

    @property
    def is_symbolic(self) -> bool:
        """Return whether the number of steps is an expression in symbolic dimensions."""
        return _jax.is_symbolic(self.length)

    @property
    def one_pass_store(self) -> Store | None:
        """Return the store that must be filled and read in one pass, if the loop has one."""
        stores = [self.store, *(stored.store for stored in self.levels)]
        return next((store for store in stores if store.one_pass), None)

    @cached_property
    def y_avals(self) -> Arrays:
        """Return the types of one step's ys."""
        return _jax.out_avals(self.body)[self.n_carry :]

    @cached_property
    def reversals(self) -> dict[Any, Any]:
        """Return what `mixed.reversal_of` found for this loop, by the inputs that are differentiated."""
        return {}

    @cached_property
    def rows_of_splits(self) -> np.ndarray:
        """Return β(c, r), by which splits are found at run time; see `schedules.binomial_rows`."""
        longest = self.max_steps if self.length is None or self.is_symbolic else self.length
        longest = schedules.INT32_MAX if longest is None else longest
        rows = np.array(schedules.binomial_rows(self.slots, max(longest, 2)), np.int64)
        most = min(int(self.most_steps), schedules.INT32_MAX)
        return np.minimum(rows, most).astype(self.counter)

    @property
    def most_steps(self) -> np.ndarray:
        """Return the largest number of steps that the counter can hold."""
        return np.array(np.iinfo(self.counter).max, self.counter)

    def count(self, steps: int) -> Array:
        """Return a number of steps in the type that this loop counts in."""
        return _jax.in_mesh(jnp.asarray(steps, self.counter))

    def after(self, step: Array) -> Array:
        """Return the number of steps after one more, which stays at the largest that there is."""
        return step + (step < self.most_steps).astype(self.counter)

    def spread(self, consts: Mask, carry: Mask, xs: Mask) -> tuple[Mask, Mask]:
        """Return which values of the carry and of the ys depend on the marked inputs."""
        while True:
            out = jaxprs.dependents(self.body, [*consts, *carry, *xs])
            reached = tuple(a or b for a, b in zip(carry, out))
            if reached == carry:
                return carry, tuple(out[self.n_carry :])
            carry = reached


def split_inputs(loop: Loop, flat: Sequence[Array]) -> Inputs:
    """Return the inputs of a loop from their concatenation."""
    flat = list(flat)
    first, second = loop.n_consts, loop.n_consts + loop.n_carry
    third = len(flat) if loop.length is not None or loop.test is not None else len(flat) - 1
    return Inputs(flat[:first], flat[first:second], flat[second:third], flat[third:])


# Running it


def plain(loop: Loop, inputs: Inputs) -> Results:
    """Run the loop without keeping states."""
    consts, carry, xs, steps = inputs
    if loop.length is not None:
        length, scanned = loop.length, xs
        if loop.is_symbolic:
            # `lax.scan` takes a symbolic length from arrays only.
            length, scanned = None, [*xs, jnp.zeros((loop.length, 0), bool)]
        carry, ys = lax.scan(
            lambda carry, x: loop.call(consts, carry, x[: len(xs)]),
            carry,
            scanned,
            length,
            reverse=loop.reverse,
            unroll=loop.unroll,
        )
        return Results(carry, ys, [])
    if loop.test is None:
        return Results(run_steps(loop, inputs, loop.count(0), steps[0], carry), [], [])

    def run(state: tuple) -> tuple:
        step, carry = state
        return loop.after(step), loop.call(consts, carry, [])[0]

    step, carry = lax.while_loop(
        lambda state: loop.goes_on(consts, state[1], state[0]), run, (loop.count(0), carry)
    )
    return Results(carry, [], [step])


# Reversing it


def cotangents_of_y(loop: Loop, cotangents: Results, y_mask: Mask, step: Array) -> Arrays:
    """Return the cotangents of the marked ys of a step."""
    return [
        _jax.zeros(y) if ct is None else lax.dynamic_index_in_dim(ct, loop.index(step), 0, False)
        for ct, y in zip(select(cotangents.ys, y_mask), select(loop.y_avals, y_mask))
    ]


def first_cotangents(
    inputs: Inputs, cotangents: Results, marked: Inputs, carry_mask: Mask
) -> tuple[Arrays, Arrays, Arrays]:
    """Return the cotangents of the consts, the carry and the xs before any step is reversed."""
    ct_carry = [
        jnp.zeros_like(x) if ct is None else ct
        for x, ct in zip(select(inputs.carry, carry_mask), select(cotangents.carry, carry_mask))
    ]
    return (
        [jnp.zeros_like(c) for c in select(inputs.consts, marked.consts)],
        ct_carry,
        [jnp.zeros_like(x) for x in select(inputs.xs, marked.xs)],
    )


def unless_uncounted(loop: Loop, count: Array, ct_carry: Arrays) -> Arrays:
    """Return the cotangents, or NaN if a loop ran for more steps than its counter can hold."""
    uncounted = count == loop.most_steps
    return [jnp.where(uncounted, jnp.full_like(ct, jnp.nan), ct) for ct in ct_carry]


def add_step(
    loop: Loop, step: Array, ct_consts: Arrays, ct_xs: Arrays, d_consts: Arrays, d_x: Arrays
) -> tuple[Arrays, Arrays]:
    """Return the cotangents of the consts and the xs with those of a step added."""
    at = loop.index(step)
    return (
        [a + b for a, b in zip(ct_consts, d_consts)],
        [lax.dynamic_update_index_in_dim(ct, d, at, 0) for ct, d in zip(ct_xs, d_x)],
    )


def cotangents_of_inputs(
    inputs: Inputs,
    marked: Inputs,
    carry_mask: Mask,
    ct_consts: Arrays,
    ct_carry: Arrays,
    ct_xs: Arrays,
) -> Inputs:
    """Return the cotangents of the marked inputs, at their places; None for the others."""
    nothing: Callable = lambda values: [None] * len(values)  # noqa: E731
    ct_all_carry = merge(nothing(inputs.carry), carry_mask, ct_carry)
    return Inputs(
        merge(nothing(inputs.consts), marked.consts, ct_consts),
        [ct if mark else None for ct, mark in zip(ct_all_carry, marked.carry)],
        merge(nothing(inputs.xs), marked.xs, ct_xs),
        nothing(inputs.steps),
    )


# Helpers


def select(values: Sequence[Array], mask: Sequence[bool]) -> Arrays:
    """Return the marked values."""
    return [value for value, mark in zip(values, mask, strict=True) if mark]


def merge(values: Sequence[Array], mask: Sequence[bool], marked: Sequence[Array]) -> Arrays:
    """Return `values` with the marked ones replaced by `marked`, in order."""
    replacements = iter(marked)
    return [next(replacements) if mark else value for value, mark in zip(values, mask, strict=True)]


def check_varying(loop: Loop, inputs: Inputs, marked: Inputs) -> None:
    """Raise if gradients would be summed over devices in each step while devices run different numbers."""
    decides = inputs.steps if loop.test is None else [_jax.out_avals(loop.test)[0]]
    axes = _jax.varying_axes(*decides) if loop.length is None else frozenset()
    reversed_ = [*select(inputs.consts, marked.consts), *select(inputs.carry, marked.carry)]
    # For a loop whose number of steps is known when it starts, the varying axes of its states decide.
    states = inputs.carry if loop.test is None else []
    fixed = next((x for x in [*reversed_, *states] if axes - _jax.varying_axes(x)), None)
    if fixed is not None:
        missing = tuple(sorted(axes - _jax.varying_axes(fixed)))
        raise EffectError(
            f"the number of steps of a loop varies over the axes {missing} of a shard_map, but a value "
            f"of type {jax.typeof(fixed)} that the loop carries, or that its body is closed over, does "
            f"not, and its gradient would be summed over the devices in each step. Pass "
            f"jax.lax.pcast(value, {missing}, to='varying') to the loop."
        )


def run_steps(loop: Loop, inputs: Inputs, start: Array, stop: Array, carry: Arrays) -> Arrays:
    """Return the carry of step `stop` from that of step `start`."""

    def run(state: tuple) -> tuple:
        step, carry = state
        return step + 1, loop.call(inputs.consts, carry, loop.x_at(inputs, step))[0]

    return lax.while_loop(lambda state: state[0] < stop, run, (start, carry))[1]


def advance(
    loop: Loop, inputs: Inputs, start: Array, stop: Array, carry: Arrays, ys: Arrays
) -> tuple[Arrays, Arrays]:
    """Return the carry of step `stop` from that of step `start`, and the ys with these steps written."""

    def run(state: tuple) -> tuple:
        step, carry, ys = state
        carry, y = loop.call(inputs.consts, carry, loop.x_at(inputs, step))
        at = loop.index(step)
        return (
            step + 1,
            carry,
            [lax.dynamic_update_index_in_dim(a, b, at, 0) for a, b in zip(ys, y)],
        )

    return lax.while_loop(lambda state: state[0] < stop, run, (start, carry, ys))[1:]


def entry(table: Array, index: Array) -> Array:
    """Return an entry of a table along its first axis."""
    if not _jax.has_explicit_axes():
        return table[index]
    # JAX cannot batch reading a constant table over an explicit axis of the mesh.
    is_wanted = jnp.arange(len(table), dtype=index.dtype) == index
    wanted = jnp.where(jnp.expand_dims(is_wanted, range(1, table.ndim)), table, 0)
    return jnp.sum(wanted, 0, dtype=table.dtype)
