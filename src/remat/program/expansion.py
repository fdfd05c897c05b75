"""The memory of operations that XLA expands into several, besides their operands and results.

XLA for CPU has no instruction for some operations. What it writes in their place holds more arrays than the
operation has operands and results:

* The gradient of max pooling (`select_and_scatter_add`) writes an index array for each dimension, as large as
  what was pooled with its padding, and reduces windows of all of them together with the values.
* Random bits of Threefry keys come from a loop that carries two words for each number, and writes the next
  two beside them.
* A product with ragged groups becomes one with a batch of all groups: each operand whose rows are divided
  into groups is repeated for every group, with zeros in place of the rows of others, and the weights are
  transposed.

Known limit: on a GPU the same bytes are counted, where fewer are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax

from remat import _jax

_WORD = 4  # bytes of an index, and of a word of random bits


def expanded_bytes(eqn: _jax.JaxprEqn) -> int:
    """Return the bytes that one equation occupies while it runs, besides its operands and results.

    >>> import jax, jax.numpy as jnp
    >>> from jax import lax
    >>> def pooled(x):
    ...     return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").sum()
    >>> jaxpr = jax.make_jaxpr(jax.grad(pooled))(jnp.ones((1, 8, 8, 4)))
    >>> [expanded_bytes(eqn) for eqn in jaxpr.eqns if eqn.primitive.name == "select_and_scatter_add"]
    [5376]
    """
    formula = _FORMULAS.get(eqn.primitive.name)
    return 0 if formula is None else formula(eqn)


def _of_pooling(eqn: _jax.JaxprEqn) -> int:
    source, operand = (v.aval for v in eqn.invars)
    indices = _WORD * operand.ndim
    of_windows = indices + _jax.itemsize_bytes(operand)
    sizes = (n + low + high for n, (low, high) in zip(operand.shape, eqn.params["padding"]))
    padded = math.prod(sizes)
    copy = _jax.itemsize_bytes(operand) * padded if padded > operand.size else 0
    return int(indices * padded + copy + of_windows * source.size)


def _of_random_bits(eqn: _jax.JaxprEqn) -> int:
    keys, bits = eqn.invars[0].aval, eqn.outvars[0].aval
    if not _jax.is_threefry(keys):
        return 0
    carried = 4 if jax.config.jax_threefry_partitionable else 2
    return int(bits.size * (carried * _WORD - _jax.itemsize_bytes(bits)))


def _of_ragged_product(eqn: _jax.JaxprEqn) -> int:
    lhs, rhs, group_sizes = (v.aval for v in eqn.invars)
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), (batch, _) = numbers.dot_dimension_numbers
    n_groups = group_sizes.shape[-1]
    sizes = [x.size * _jax.itemsize_bytes(x) for x in (lhs, rhs)]
    ragged = set(numbers.lhs_ragged_dimensions)
    if not ragged.isdisjoint(batch):
        return 0
    if not ragged.isdisjoint(contracted):
        return int(n_groups * sum(sizes))
    return int(n_groups * sizes[0] + sizes[1])


_FORMULAS: dict[str, Callable[[_jax.JaxprEqn], int]] = {
    "select_and_scatter_add": _of_pooling,
    "random_bits": _of_random_bits,
    "ragged_dot_general": _of_ragged_product,
}
