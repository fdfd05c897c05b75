"""The numbers that a program states, and of which a compiler need not know the values.

Where a compiler knows a number that arrays are combined with, it may simplify the operation, and so round
differently: it divides by 3 as it multiplies by 1/3, and adds 1 and then 2 as it adds 3. Some operations it
cannot change, and for these a number may as well be computed when the program runs.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from remat import _jax

_COMPARISONS = frozenset(("max", "min", "eq", "ne", "lt", "le", "gt", "ge"))
_SUMS = frozenset(("add", "sub"))
_OPERATIONS = _COMPARISONS | _SUMS | {"mul", "div"}


def unsimplified_numbers(jaxpr: _jax.Jaxpr) -> dict[int, list[int]]:
    """Return the places of numbers that round the same if they are unknown, by the number of the equation.

    These are numbers that are compared with an array, powers of two as factors or divisors, and numbers that
    are added to or subtracted from an array. In a chain of additions of numbers none is included.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x: jax.numpy.maximum(x * 2.0, 0.5) / 3.0)(jax.numpy.ones(4))
    >>> unsimplified_numbers(jaxpr.jaxpr)
    {0: [1], 1: [1]}
    """
    sums = {n for n, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name in _SUMS and _numbers(eqn)}
    results = {v for n in sums for v in jaxpr.eqns[n].outvars}
    chained = {v for n in sums for v in jaxpr.eqns[n].invars if _jax.is_var(v) and v in results}
    found = {}
    for n, eqn in enumerate(jaxpr.eqns):
        read = filter(_jax.is_var, eqn.invars)
        if n in sums and not chained.isdisjoint((*read, *eqn.outvars)):
            continue
        places = [at for at in _numbers(eqn) if n in sums or _is_unsimplified(eqn, at)]
        if places:
            found[n] = places
    return found


def _numbers(eqn: _jax.JaxprEqn) -> list[int]:
    """Return the places of the numbers that an equation combines an array with."""
    if eqn.primitive.name not in _OPERATIONS or not eqn.outvars[0].aval.ndim:
        return []
    return [at for at, v in enumerate(eqn.invars) if not _jax.is_var(v) and not v.aval.ndim]


def _is_unsimplified(eqn: _jax.JaxprEqn, at: int) -> bool:
    name = eqn.primitive.name
    if name == "mul":
        return _is_power_of_two(eqn.invars[at].val)
    if name == "div":
        return at == 1 and reciprocal(eqn.invars[at]) is not None
    return name in _COMPARISONS


def reciprocal(divisor: _jax.Literal) -> _jax.Literal | None:
    """Return the number to multiply by instead of dividing by one, or None if that would round differently.

    It exists for powers of two whose reciprocals are normal numbers.
    """
    number = np.asarray(divisor.val)
    if not _is_power_of_two(number):
        return None
    inverse = np.asarray(1 / float(number), number.dtype)
    is_normal = abs(float(inverse)) >= float(jnp.finfo(number.dtype).tiny)
    return _jax.Literal(inverse, divisor.aval) if is_normal else None


def _is_power_of_two(number: object) -> bool:
    value = np.asarray(number)
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    return bool(is_float) and abs(math.frexp(float(value))[0]) == 0.5
