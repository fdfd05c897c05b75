"""The bytes of the values that a loop keeps, and their comparison with a budget."""

from __future__ import annotations

import math

from remat import _jax
from remat.aliases import Array, Aval, Sharding, Size
from remat.errors import BudgetError
from remat.units import Number, format_bytes


def n_bytes(x: Array | Aval) -> Size:
    """Return the bytes of an array or a type; an expression if it has symbolic dimensions.

    They are those of one device: in a `shard_map`, and where a type says how it is sharded. JAX says
    nothing of automatic sharding while it traces.
    """
    size = x.size if _jax.is_symbolic(x.size) else int(x.size)
    sharding: Sharding = getattr(getattr(x, "aval", x), "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is not None and not mesh.empty and not _jax.is_symbolic(size):
        parts = [(part,) if isinstance(part, str) else part or () for part in sharding.spec]
        size //= math.prod(mesh.shape[name] for names in parts for name in names)
    return size * x.dtype.itemsize


def worst_case(what: str, size: Size, budget: Number, instead: str) -> int:
    """Return the upper bound of a size, for comparison with a budget.

    Args:
      what: the name of the values, for the error.
      size: bytes. The constraints of symbolic dimensions bound it.
      budget: the user's `budget=`, for the error.
      instead: an option that needs no sizes, for the error.

    Raises:
      BudgetError: a symbolic size has no bound.
    """
    bound = _jax.upper_bound(size)
    if bound is None:
        raise BudgetError(
            f"budget={budget!r} cannot be compared with {format_bytes(size)} of {what}, whose symbolic "
            f"dimensions have no bound. Give one, as in jax.export.symbolic_shape('b', "
            f"constraints=['b <= 64']), or pass {instead} instead."
        )
    return bound
