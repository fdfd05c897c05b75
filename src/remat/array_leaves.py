"""Splitting pytrees into traced arrays and untraced leaves.

A call of a module mixes arrays with other values: flags, strings, activation functions, None. Only the
arrays are inputs and outputs of a region. `split` splits a pytree, `Parts.join` joins it with new traced
leaves, and `Constant` passes an untraced value through a region.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from remat import _jax
from remat.aliases import Leaf, PyTree

_jax.exclude_from_tracebacks(__file__)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """An untraced value as a pytree without leaves."""

    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class TracedParts:
    """A pytree without its traced leaves."""

    tree: PyTree
    is_traced: tuple[bool, ...]
    untraced: tuple[Leaf, ...]  # the other leaves, in order

    def join(self, traced: Sequence[Leaf]) -> PyTree:
        """Return the pytree with these traced leaves."""
        ours, theirs = iter(traced), iter(self.untraced)
        leaves = [next(ours) if flag else next(theirs) for flag in self.is_traced]
        return jax.tree.unflatten(self.tree, leaves)


def is_array(leaf: Leaf) -> bool:
    """Return whether a leaf is an array of JAX or NumPy, or a tracer."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic)) and not _is_text(leaf)


def _is_text(leaf: Leaf) -> bool:
    return isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "OSUV"


def split(
    tree: PyTree,
    is_traced: Callable[[Leaf], bool] = is_array,
    is_leaf: Callable[[Leaf], bool] | None = None,
) -> tuple[list[Leaf], TracedParts]:
    """Split a pytree into its traced leaves and the rest.

    >>> import jax.numpy as jnp
    >>> traced, parts = split((jnp.ones(2), "same", None))
    >>> len(traced), parts.untraced
    (1, ('same',))
    >>> parts.join(["here"])
    ('here', 'same', None)
    """
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
    flags = tuple(is_traced(leaf) for leaf in leaves)
    traced = [leaf for leaf, flag in zip(leaves, flags) if flag]
    untraced = tuple(leaf for leaf, flag in zip(leaves, flags) if not flag)
    return traced, TracedParts(structure, flags, untraced)


def call(
    lift: Callable[[Callable], Callable],
    method: Callable,
    module: PyTree,
    args: tuple,
    kwargs: dict[str, PyTree],
    is_traced: Callable[[Leaf], bool] = is_array,
    is_leaf: Callable[[Leaf], bool] | None = None,
) -> PyTree:
    """Call `method(module, *args, **kwargs)` under `lift`; values that are not arrays stay untraced.

    Args:
      lift: a transformation of functions of a module and arrays.
      is_traced, is_leaf: as in `split`, for arguments and results.
    """
    traced, parts = split((args, kwargs), is_traced, is_leaf)

    def on_arrays(module: PyTree, *traced: Leaf) -> PyTree:
        args, kwargs = parts.join(traced)
        traced_out, rest = split(method(module, *args, **kwargs), is_traced, is_leaf)
        return traced_out, Constant(rest)

    on_arrays.__name__ = getattr(method, "__name__", type(module).__name__)
    traced_out, rest = lift(on_arrays)(module, *traced)
    return rest.value.join(traced_out)
