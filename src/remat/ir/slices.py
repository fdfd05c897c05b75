"""Splits of arrays as one slice for each part.

Compilers lower `split` to slices, and compute each of them where it is used. With one equation for each part,
a program can keep, recompute or fuse one part without the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TypeAlias

from jax import lax

from remat import _jax
from remat.ir import jaxprs

# By the ids of jaxprs: the jaxprs themselves, so that their ids stay valid, and what replaces them.
_Known: TypeAlias = dict[int, tuple[_jax.Jaxpr, _jax.Jaxpr]]


def with_slices(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a jaxpr that slices arrays instead of splitting them, in its loops, branches and calls, too.

    >>> import jax, jax.numpy as jnp
    >>> jaxpr = jax.make_jaxpr(lambda x: jnp.split(x, 2))(jnp.ones(4)).jaxpr
    >>> [eqn.primitive.name for eqn in with_slices(jaxpr).eqns]
    ['slice', 'slice']
    """
    return _sliced(jaxpr, {})


def _sliced(jaxpr: _jax.Jaxpr, known: _Known) -> _jax.Jaxpr:
    if id(jaxpr) not in known:
        eqns = [new for eqn in jaxpr.eqns for new in _equations(_with_bodies(eqn, known))]
        is_same = len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns))
        known[id(jaxpr)] = jaxpr, jaxpr if is_same else _jax.rebuild(jaxpr, eqns=eqns)
    return known[id(jaxpr)][1]


def _with_bodies(eqn: _jax.JaxprEqn, known: _Known) -> _jax.JaxprEqn:
    for body in jaxprs.bodies_of(eqn):
        opened = _jax.open_jaxpr(body)
        new = _sliced(opened, known)
        if new is not opened:
            eqn = jaxprs.replace_body(eqn, body, new)
    return eqn


def _equations(eqn: _jax.JaxprEqn) -> Iterator[_jax.JaxprEqn]:
    if eqn.primitive.name != "split":
        yield eqn
        return
    axis, shape = eqn.params["axis"], eqn.invars[0].aval.shape
    ends = itertools.accumulate(eqn.params["sizes"])
    for part, size, end in zip(eqn.outvars, eqn.params["sizes"], ends):
        if _jax.is_dropped(part):
            continue
        start, limit = [0] * len(shape), list(shape)
        start[axis], limit[axis] = end - size, end
        params = {
            "start_indices": tuple(start),
            "limit_indices": tuple(limit),
            "strides": None,
        }
        yield _jax.new_eqn(eqn.invars, [part], lax.slice_p, params, eqn)
