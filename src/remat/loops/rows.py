"""Reading and writing one row of an array in the host's memory, also under `jax.vmap`.

JAX batches `lax.dynamic_slice` as a gather and `lax.dynamic_update_slice` as a scatter. Those need all
operands in one memory, so neither accepts rows on the host and an index on the device. The slices
themselves do, and a slice of a batch at one index is again a slice. So these two primitives are batched as
slices; if each lane of a batch has its own index, they loop over the lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import jax.numpy as jnp
from jax import lax

from remat import _jax
from remat.aliases import Array, Arrays, Aval, AxisData, Dim, Effect

Axes = tuple[int, ...]


def read_row(rows: Array, row: Array) -> Array:
    """Return `rows[row]`."""
    return read_p.bind(rows, row, axes=(0,))[0]


def write_row(rows: Array, state: Array, row: Array) -> Array:
    """Return the rows with `rows[row]` replaced."""
    return write_p.bind(rows, state, row, axes=(0,))[0]


# --------------------------------------------------------------------------------------------------
# Rules. The operands after the arrays are indices, one for each of the leading axes.

read_p = _jax.Primitive("remat_read_row")
write_p = _jax.Primitive("remat_write_row")


def _starts(rows: Array, indices: Sequence[Array], axes: Axes) -> Arrays:
    given = dict(zip(axes, indices, strict=True))
    return [given.get(axis, jnp.zeros_like(indices[0])) for axis in range(rows.ndim)]


def _read(rows: Array, *indices: Array, axes: Axes) -> Arrays:
    sizes = [1 if axis in axes else size for axis, size in enumerate(rows.shape)]
    return [lax.squeeze(lax.dynamic_slice(rows, _starts(rows, indices, axes), sizes), axes)]


def _write(rows: Array, state: Array, *indices: Array, axes: Axes) -> Arrays:
    update = lax.expand_dims(state, axes)
    return [lax.dynamic_update_slice(rows, update, _starts(rows, indices, axes))]


def _batch_read(
    axis: AxisData, args: Sequence[Array], dims: Sequence[Dim], *, axes: Axes
) -> tuple[Arrays, list[int]]:
    rows, *indices = args
    in_lane = tuple(a + 1 for a in axes)
    if all(dim is None for dim in dims[1:]):
        return read_p.bind(_jax.batched(rows, dims[0], axis), *indices, axes=in_lane), [0]
    indices = [_jax.batched(i, dim, axis) for i, dim in zip(indices, dims[1:])]
    if dims[0] is not None:
        rows, axes = jnp.moveaxis(rows, dims[0], 0), (0, *in_lane)
        indices = [jnp.arange(axis.size, dtype=indices[0].dtype), *indices]
    return [lax.map(lambda own: read_p.bind(rows, *own, axes=axes)[0], indices)], [0]


def _batch_write(
    axis: AxisData, args: Sequence[Array], dims: Sequence[Dim], *, axes: Axes
) -> tuple[Arrays, list[int]]:
    rows, state = (_jax.batched(x, dim, axis) for x, dim in zip(args[:2], dims[:2]))
    in_lane = tuple(a + 1 for a in axes)
    if all(dim is None for dim in dims[2:]):
        return write_p.bind(rows, state, *args[2:], axes=in_lane), [0]
    indices = [_jax.batched(i, dim, axis) for i, dim in zip(args[2:], dims[2:])]

    def lane(i: Array, rows: Array) -> Array:
        (of_lane,) = read_p.bind(state, i, axes=(0,))
        own = [lax.dynamic_index_in_dim(index, i, 0, False) for index in indices]
        return write_p.bind(rows, of_lane, i, *own, axes=(0, *in_lane))[0]

    return [lax.fori_loop(jnp.int32(0), jnp.int32(axis.size), lane, rows)], [0]


def _no_derivative(*_: object, **__: object) -> NoReturn:
    raise AssertionError("checkpoints have no derivative")


def _register(primitive: _jax.Primitive, evaluate: Callable, batch: Callable) -> None:
    def abstract(*types: Aval, axes: Axes) -> tuple[list[Aval], set[Effect]]:
        jaxpr, _, _ = _jax.trace_call(lambda *args: evaluate(*args, axes=axes), *types)
        return _jax.out_avals(jaxpr), set()

    _jax.register(
        primitive,
        evaluate=evaluate,
        abstract=abstract,
        jvp=_no_derivative,
        transpose=_no_derivative,
        batch=batch,
    )


_register(read_p, _read, _batch_read)
_register(write_p, _write, _batch_write)
