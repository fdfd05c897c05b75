"""Buffers that states and residuals of a loop share.

The states that are held at a moment, and above them the residuals, form one stack. A buffer has rows of one
type; each value of that type in a state or in a step's residuals is one row. So a row that holds part of a
state now can hold a residual later. Values of different shapes cannot share such rows, but on a single
device their elements can: then a buffer has rows of one element. (A sharded array keeps its shape, by
which the compiler shards rows.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from remat import _jax
from remat.aliases import Array, Arrays, Aval
from remat.errors import ScheduleError
from remat.loops.schedules import Hierarchical, Level
from remat.loops.schedules.mixed import EMPTY, MOST_FREE, Mixed, blocks_of
from remat.loops.sizes import n_bytes

# How many numbers of states are tried if states and residuals share only part of their rows. More find a
# schedule closer to the best one, and take longer to trace a loop.
_TRIED = 16
_TRIED_WITH_LEVELS = 2  # the same with slower levels, for which finding a schedule takes longer
_MOST_PARTS = 10_000  # parts of a loop with a single state; more take seconds to trace


@dataclass(frozen=True)
class Rows:
    """The rows of one type.

    Attributes:
      row: the type of a row: a value, or one element of it.
      state, residuals: the numbers of rows of a state and of a step's residuals.
    """

    row: Aval
    state: int
    residuals: int

    @property
    def row_bytes(self) -> int:
        return n_bytes(self.row)


@dataclass(frozen=True)
class Layout:
    """Where the values of states and of residuals lie.

    Attributes:
      rows: the buffers' rows.
      state, residuals: for each value, its buffer, and its first row within a state or residuals.
    """

    rows: tuple[Rows, ...]
    state: tuple[tuple[int, int], ...]
    residuals: tuple[tuple[int, int], ...]

    @property
    def state_bytes(self) -> int:
        return sum(rows.state * rows.row_bytes for rows in self.rows)

    @property
    def residual_bytes(self) -> int:
        return sum(rows.residuals * rows.row_bytes for rows in self.rows)

    def schedule(self, n: int, memory: int) -> Mixed | None:
        """Return the schedule with the fewest steps in a memory of this size; None if none fits.

        The memory does not include the state at hand and the residuals in use.
        """
        candidates = [blocks for blocks in self.candidates(n, memory) if _is_practical(n, blocks)]
        if len(candidates) > 1:
            best = min(candidates, key=lambda blocks: Mixed(n, blocks, (0, 0)).forward_steps)
            candidates = [best]
        return Mixed(n, candidates[0]) if candidates else None

    def schedule_of_levels(
        self, n: int, memory: int, levels: tuple[Level, ...]
    ) -> Hierarchical | None:
        """Return the schedule with the least time whose fastest level has this many bytes."""
        found = []
        for blocks in self.candidates(n, memory, _TRIED_WITH_LEVELS):
            with contextlib.suppress(ScheduleError):
                schedule = Hierarchical(n, blocks, levels)
                found.append((schedule.cost, len(blocks), schedule))
        return min(found)[-1] if found else None

    def candidates(self, n: int, memory: int, tried: int = _TRIED) -> list[tuple[int, ...]]:
        """Return `Mixed.blocks` for numbers of states that the memory holds."""
        if len(self.rows) == 1:
            return [blocks_of(n, memory, self.state_bytes, self.residual_bytes)]
        most = min(memory // self.state_bytes if self.state_bytes else MOST_FREE, n - 1)
        slots = sorted({round(most * i / tried) for i in range(tried + 1)})
        return [self.blocks(n, memory, many) for many in slots]

    def blocks(self, n: int, memory: int, slots: int) -> tuple[int, ...]:
        """Return `Mixed.blocks` if at most `slots` states are kept."""

        def sizes(residuals: int) -> list[int]:
            return [max(residuals * rows.residuals, slots * rows.state) for rows in self.rows]

        def fits(residuals: int) -> bool:
            found = sum(s * rows.row_bytes for s, rows in zip(sizes(residuals), self.rows))
            return found <= memory

        low, high = 0, n
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        limits = [(s, rows) for s, rows in zip(sizes(low), self.rows) if rows.residuals]
        if not limits:
            return (n,)
        return tuple(
            min(n, 1 + min((s - (slots - j) * rows.state) // rows.residuals for s, rows in limits))
            for j in range(slots + 1)
        )

    def sizes(self, schedule: Mixed | Hierarchical) -> list[int]:
        """Return how many rows of each type the schedule needs, the residuals in use included."""
        tree = schedule.tree
        blocks = [part for part in range(len(tree.steps)) if tree.first[part] < 0 and part != EMPTY]
        held = [(schedule.slots - int(tree.level[b]), int(tree.steps[b])) for b in blocks]
        # Reading a state must be possible even if none is held.
        return self.rows_of([(min(schedule.peak_slots, 1), 0), *held])

    def rows_of(self, held: Sequence[tuple[int, int]]) -> list[int]:
        """Return how many rows of each type hold these states and the residuals of these steps."""
        return [max(j * rows.state + k * rows.residuals for j, k in held) for rows in self.rows]

    def n_bytes(self, schedule: Mixed | Hierarchical) -> int:
        """Return the bytes of the buffers for a schedule."""
        return sum(s * rows.row_bytes for s, rows in zip(self.sizes(schedule), self.rows))

    def create(self, schedule: Mixed | Hierarchical) -> Arrays:
        """Return buffers for a schedule."""
        return self.buffers(self.sizes(schedule))

    def buffers(self, sizes: Sequence[int]) -> Arrays:
        """Return buffers with these numbers of rows; if rows are empty arrays, one represents all."""
        return [
            _jax.zeros(r.row, (min(s, 1) if 0 in r.row.shape else s,))
            for s, r in zip(sizes, self.rows)
        ]

    def write_state(self, buffers: Arrays, below: Array, state: Arrays) -> Arrays:
        """Return the buffers with a state on top of `below` states."""
        return self._write(buffers, self.state, self._bases(below, 0), state)

    def write_residuals(
        self, buffers: Arrays, states: Array, below: Array, residuals: Arrays
    ) -> Arrays:
        """Return the buffers with residuals on top of these states and the residuals of `below` steps."""
        return self._write(buffers, self.residuals, self._bases(states, below), residuals)

    def read_state(self, buffers: Arrays, below: Array, like: Sequence[Aval]) -> Arrays:
        """Return the state on top of `below` states."""
        return self._read(buffers, self.state, self._bases(below, 0), like)

    def read_residuals(
        self, buffers: Arrays, states: Array, below: Array, like: Sequence[Aval]
    ) -> Arrays:
        """Return the residuals on top of these states and the residuals of `below` steps."""
        return self._read(buffers, self.residuals, self._bases(states, below), like)

    def _bases(self, states: Array, steps: Array) -> Arrays:
        return [states * rows.state + steps * rows.residuals for rows in self.rows]

    def _write(
        self, buffers: Arrays, places: Sequence[tuple[int, int]], bases: Arrays, values: Arrays
    ) -> Arrays:
        buffers = list(buffers)
        for (where, offset), x in zip(places, values, strict=True):
            buffer, at = buffers[where], bases[where] + offset
            if self.rows[where].row.shape == x.shape:
                buffers[where] = lax.dynamic_update_index_in_dim(buffer, x, at, 0)
            else:
                buffers[where] = lax.dynamic_update_slice(buffer, jnp.reshape(x, -1), (at,))
        return buffers

    def _read(
        self,
        buffers: Arrays,
        places: Sequence[tuple[int, int]],
        bases: Arrays,
        like: Sequence[Aval],
    ) -> Arrays:
        found = []
        for (where, offset), x in zip(places, like, strict=True):
            buffer, at = buffers[where], bases[where] + offset
            if self.rows[where].row.shape == x.shape:
                found.append(lax.dynamic_index_in_dim(buffer, at, 0, False))
                continue
            found.append(jnp.reshape(lax.dynamic_slice(buffer, (at,), (x.size,)), x.shape))
        return found


def _is_practical(n: int, blocks: tuple[int, ...]) -> bool:
    """Return whether a schedule exists, and its tables are small enough for a program.

    With a single state, the loop is split into as many different parts as it has blocks.
    """
    if len(blocks) == 1:
        return blocks[0] >= n
    return len(blocks) > 2 or n <= _MOST_PARTS * blocks[0]


def layout(state: Sequence[Aval], residuals: Sequence[Aval]) -> Layout:
    """Return where values of these types lie in shared buffers."""
    by_type = _layout(state, residuals, [_type_of(t) for t in (*state, *residuals)])
    if len(by_type.rows) == 1 or jax.device_count() > 1:
        return by_type
    return _layout(state, residuals, [_element_of(t) for t in (*state, *residuals)])


def _layout(state: Sequence[Aval], residuals: Sequence[Aval], keys: Sequence[Aval]) -> Layout:
    """Return a layout; a key is the type of the rows of a value, one element or all of it."""
    places: list[tuple[int, int]] = []
    counts: dict[tuple[Aval, int], list[int]] = {}
    for i, (t, key) in enumerate(zip((*state, *residuals), keys)):
        is_alone = _may_be_index(t)
        shared = (key, i if is_alone else -1)
        count = counts.setdefault(shared, [0, 0])
        part = 0 if i < len(state) else 1
        places.append((list(counts).index(shared), count[part]))
        count[part] += 1 if key.shape == t.shape else t.size
    rows = tuple(Rows(key, *count) for (key, _), count in counts.items())
    return Layout(rows, tuple(places[: len(state)]), tuple(places[len(state) :]))


def _may_be_index(t: Aval) -> bool:
    """Return whether a value gets a buffer of its own, which `jax.vmap` batches only if it must.

    A value that shares a buffer with batched values is batched. A batched number of steps makes a loop run
    all lanes until the last one ends, and a batched index turns a slice into a gather. JAX cannot even batch
    reading a constant table at a batched index if the batch is on an explicit axis of the mesh.
    """
    is_index = not jnp.issubdtype(t.dtype, jnp.inexact)
    return is_index and (not t.shape or _jax.has_explicit_axes())


def _type_of(t: Aval) -> Aval:
    return t.update(weak_type=False)


def _element_of(t: Aval) -> Aval:
    """Return the type of a row of one element if elements of different arrays can be mixed, else the type."""
    extended = jnp.issubdtype(t.dtype, jax.dtypes.extended)
    if extended or not t.sharding.mesh.empty or _jax.varying_axes(t):
        return _type_of(t)
    return jax.core.ShapedArray((), t.dtype)
