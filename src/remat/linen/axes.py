"""The axes at which the variables, inputs and outputs of repeated layers are stacked.

An entry of `in_axes` or `out_axes` is an axis, or `nn.broadcast` for arrays without an axis for the
layers. Within the loop the layers' axis is always the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import lift, meta

from remat.aliases import PyTree
from remat.errors import OptionError, ScheduleError, TargetError
from remat.loops.remat_scan import Division

Axes: TypeAlias = Any  # a pytree of ints and `nn.broadcast`, a prefix of the arrays' pytree


# --------------------------------------------------------------------------------------------------
# Checks


def as_axes(name: str, axes: Axes) -> Axes:
    """Return `in_axes` or `out_axes` with a tuple in place of its outermost list.

    Inputs are a tuple, too, and for `jax.tree.map` a list and a tuple are different structures.

    Raises:
      OptionError: if an entry is neither an axis nor `nn.broadcast`.
    """
    if axes is None:
        return None
    for axis in jax.tree.leaves(axes, is_leaf=_is_none):
        if axis is not nn.broadcast and not _is_axis(axis):
            raise OptionError(
                f"{name} has an axis or nn.broadcast for each array, or for a part of the arrays, "
                f"but {axis!r} is in {axes!r}."
            )
    return tuple(axes) if isinstance(axes, list) else axes


def check_mappings(
    variable_axes: Mapping[Any, Axes],
    split_rngs: Mapping[Any, bool],
    metadata_params: object,
) -> None:
    """Raise for options of `remat_scan` that are not mappings to axes, bools and metadata."""
    given = {
        "variable_axes": variable_axes,
        "split_rngs": split_rngs,
        "metadata_params": metadata_params,
    }
    for name, mapping in given.items():
        if not isinstance(mapping, Mapping):
            raise OptionError(f"{name} is a mapping, not {mapping!r}.")
    for collection, axis in variable_axes.items():
        if not _is_axis(axis_of(axis)):
            raise OptionError(
                f"variable_axes[{collection!r}] is an int, nn.In(axis) or nn.Out(axis), not {axis!r}."
            )
    for sequence, split in split_rngs.items():
        if not isinstance(split, (bool, np.bool_)):
            raise OptionError(f"split_rngs[{sequence!r}] is a bool, not {split!r}.")


def check_call(args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree], in_axes: Axes) -> None:
    """Raise for a call of repeated layers whose arguments do not match `in_axes`.

    Args:
      in_axes: None if the layers take only the carry.
    """
    help = (
        "in_axes= defines how further arguments are passed: nn.broadcast for arguments of all layers, an "
        "axis for stacked ones. The target then returns (carry, output)."
    )
    if kwargs:
        names = ", ".join(map(repr, kwargs))
        raise OptionError(
            f"remat_scan takes arguments by position, but {names} came by keyword. {help}"
        )
    if not args:
        raise OptionError("remat_scan: the first argument, the carry, is missing.")
    inputs = args[1:]
    if in_axes is None:
        if inputs:
            raise OptionError(
                "remat_scan: without in_axes= the layers take one argument, the carry, but the "
                f"call has {len(args)}. {help}"
            )
    elif isinstance(in_axes, tuple) and len(in_axes) != len(inputs):
        raise OptionError(
            f"in_axes={in_axes} has {len(in_axes)} entries, but the call has {len(inputs)} inputs "
            "beside the carry."
        )
    elif not _is_prefix(in_axes, inputs):
        raise OptionError(
            f"in_axes={in_axes} is not a prefix of the inputs besides the carry, which are "
            f"{jax.tree.structure(inputs)}."
        )


def n_layers(division: Division, stacked: PyTree, in_axes: Axes, inputs: tuple[PyTree, ...]) -> int:
    """Return the number of layers; raise for variables and inputs with another number."""
    sizes = {}
    for axis, keys, x in _stacked(in_axes, inputs):
        where, shape = f"inputs{keys}", jnp.shape(x)
        if not -len(shape) <= axis < len(shape):
            raise OptionError(
                f"in_axes: {where} has no axis {axis} for the layers, its shape is {shape}. "
                "nn.broadcast in its place gives all layers the same."
            )
        sizes[where] = axis, shape
    known = jax.tree.leaves(stacked)
    if not known and division.length is None:
        known = [jax.ShapeDtypeStruct(shape[axis:][:1], bool) for axis, shape in sizes.values()][:1]
    n_layers = division.total(known)
    for where, (axis, shape) in sizes.items():
        if shape[axis] != n_layers:
            raise ScheduleError(
                f"in_axes: {n_layers} layers need as many entries at axis {axis} of {where}, but "
                f"its shape is {shape}. nn.broadcast in its place gives all layers the same."
            )
    return n_layers


def as_pair(result: PyTree, out_axes: Axes) -> tuple[PyTree, PyTree]:
    """Return the carry and the output of a layer; raise for a result of another structure."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise TargetError(
            "with in_axes= or out_axes= the target of remat_scan returns (carry, output), but "
            f"returned {jax.tree.structure(result)}. If there is no output, return (carry, None)."
        )
    carry, output = result
    if not _is_prefix(out_axes, output):
        raise OptionError(
            f"out_axes={out_axes} is not a prefix of the output, which is "
            f"{jax.tree.structure(output)}."
        )
    for axis, _, x in _stacked(out_axes, output):
        _check_axis("out_axes", axis, jnp.shape(x))
    return carry, output


def _check_axis(option: str, axis: int, shape: tuple[int, ...]) -> None:
    """Raise for an axis at which arrays of a shape, one of each layer, cannot be stacked."""
    n = len(shape)
    if not -n - 1 <= axis <= n:
        raise OptionError(
            f"{option}: arrays of shape {shape}, one of each layer, are stacked at an axis from "
            f"{-n - 1} to {n}, not at {axis}."
        )


def _is_axis(x: object) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _is_none(x: object) -> bool:
    return x is None


def _is_prefix(axes: Axes, tree: PyTree) -> bool:
    try:
        jax.tree.map(lambda _, part: None, axes, tree)
    except ValueError:
        return False
    return True


# --------------------------------------------------------------------------------------------------
# Arrays with and without an axis


def axis_of(axis: int | lift.In | lift.Out) -> int:
    """Return the axis of an int, `nn.In(axis)` or `nn.Out(axis)`."""
    return axis.axis if isinstance(axis, (lift.In, lift.Out)) else axis


def map_axes(f: Callable[[int, jax.Array], jax.Array], axes: Axes, tree: PyTree) -> PyTree:
    """Return the tree of `f(axis, array)`, with `()` in place of broadcast arrays."""

    def one(axis: Axes, part: PyTree) -> PyTree:
        return () if axis is nn.broadcast else jax.tree.map(lambda x: f(axis, x), part)

    return jax.tree.map(one, axes, tree)


def choose(axes: Axes, fixed: PyTree, moving: PyTree) -> PyTree:
    """Return the leaves of `fixed` for broadcast arrays and those of `moving` for arrays with an axis."""
    return jax.tree.map(
        lambda axis, if_fixed, if_moving: if_fixed if axis is nn.broadcast else if_moving,
        axes,
        fixed,
        moving,
    )


def _stacked(axes: Axes, tree: PyTree) -> Iterator[tuple[int, str, jax.Array]]:
    """Yield the layers' axis, the path and the array for each array that has such an axis."""
    each = jax.tree.map(lambda axis, part: jax.tree.map(lambda _: axis, part), axes, tree)
    for axis, (keys, x) in zip(jax.tree.leaves(each), jax.tree_util.tree_leaves_with_path(tree)):
        if axis is not nn.broadcast:
            yield axis, jax.tree_util.keystr(keys), x


# --------------------------------------------------------------------------------------------------
# Variables


def unstack(
    group: PyTree,
    axis: int,
    given: tuple[int, ...] | None,
    metadata_params: Mapping[object, object],
) -> PyTree:
    """Return variables with the layers' axes merged into one, the first."""
    n_axes = len(given) if given else 1

    def one(x: jax.Array) -> jax.Array:
        _check_axis("variable_axes", axis, jnp.shape(x)[n_axes:])
        for level in range(n_axes):
            x = jnp.moveaxis(x, level + axis if axis >= 0 else axis, level)
        if given and x.shape[:n_axes] != given:
            raise ScheduleError(
                f"lengths={given} need variables with axes of these lengths at axis {axis}, but "
                f"one has {x.shape[:n_axes]} there."
            )
        return x.reshape(math.prod(x.shape[:n_axes]), *x.shape[n_axes:])

    for _ in range(n_axes):
        group = meta.remove_axis(group, axis, dict(metadata_params))
    return jax.tree.map(one, group)


def stack(
    group: PyTree,
    axis: int,
    given: tuple[int, ...] | None,
    metadata_params: Mapping[object, object],
) -> PyTree:
    """Return variables with the first axis split into the layers' axes: undo `unstack`."""
    n_axes = len(given) if given else 1

    def one(x: jax.Array) -> jax.Array:
        _check_axis("variable_axes", axis, x.shape[1:])
        x = x.reshape(*given, *x.shape[1:]) if given else x
        for level in reversed(range(n_axes)):
            x = jnp.moveaxis(x, level, level + axis if axis >= 0 else axis)
        return x

    group = jax.tree.map(one, group)
    for _ in range(n_axes):
        group = meta.add_axis(group, axis, dict(metadata_params))
    return group
