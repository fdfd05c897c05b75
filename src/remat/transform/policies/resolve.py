"""Which values of a region a policy saves or offloads. Each of them gets a mark in the jaxpr (`marks`).

A policy of `remat.policies` is asked here, about each value (`_decide`). A callable in JAX's form is
asked later, about each equation, when the region is cut (`ir.split.halves.decide`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from remat import _jax
from remat.aliases import Decision, PolicyLike
from remat.ir import jaxprs
from remat.transform import marks
from remat.transform.policies.algebra import Foreign, Policy, keep_rank
from remat.transform.policies.selector import RegionValue


def resolve(policy: PolicyLike, jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, Callable[..., Decision]]:
    """Return a region's jaxpr and a policy in JAX's form, from a policy in any form.

    The decisions of a policy of `remat.policies` become marks in the jaxpr, at every depth. A callable
    in JAX's form is returned as it is.
    """
    if isinstance(policy, Policy):
        return _marked(jaxpr, policy), marks.decide_by_marks
    if marks.has_marks(jaxpr):
        jaxpr = _unmarked(jaxpr)
    return jaxpr, _recompute_all if policy is None else Foreign(policy)


def _recompute_all(*_: object, **__: object) -> bool:
    return False


# Cached, since the caches of `cut` and JAX are keyed by jaxpr object.
@_jax.weakref_lru_cache
def _unmarked(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    return marks.without_marks(jaxpr)


# Cached, since the caches of `cut` and JAX are keyed by jaxpr object.
@_jax.weakref_lru_cache
def _marked(jaxpr: _jax.Jaxpr, policy: Policy) -> _jax.Jaxpr:
    # `rewrite` may return the jaxpr itself; a cached value must not keep its own key alive.
    marked = marks.rewrite(jaxpr, "", functools.partial(_decide, policy))
    return _jax.rebuild(jaxpr) if marked is jaxpr else marked


def _decide(policy: Policy, jaxpr: _jax.Jaxpr) -> Callable[..., dict[_jax.Var, marks.Mark]]:
    """Return a function that asks a policy about the results of an equation of one jaxpr."""
    named = names_of_values(jaxpr)

    def marks_of(eqn: _jax.JaxprEqn, path: str) -> dict[_jax.Var, marks.Mark]:
        found = {}
        for value, var in values_of(eqn, path, named):
            case = policy.opinion(value)
            if isinstance(case, _jax.Offloadable) and not _jax.is_in_memory(value.aval, case.src):
                continue  # a copy to another memory: copied again from the original if needed
            if keep_rank(case) > 0:
                like = named[var].eqn if var in named else eqn
                found[var] = marks.Mark(case, tuple(sorted(value.names)), like)
        return found

    return marks_of


class Named(NamedTuple):
    """The names that a value was given, and the first equation that gave one."""

    names: frozenset[str]
    eqn: _jax.JaxprEqn


def names_of_values(jaxpr: _jax.Jaxpr) -> dict[_jax.Var, Named]:
    """Return all names of each value that has been given one, including those of its named copies."""
    named: dict[_jax.Var, Named] = {}
    for eqn in reversed(jaxpr.eqns):
        name = _jax.checkpoint_name_of(eqn)
        if name is not None and not isinstance(eqn.invars[0], _jax.Literal):
            inner, outer = eqn.invars[0], eqn.outvars[0]
            names = frozenset({name})
            for v in (inner, outer):
                names |= named[v].names if v in named else frozenset()
            named[inner] = Named(names, eqn)
    # If an input is named, the input is available anyway, so the name belongs to the named copy, by which
    # an offloading policy replaces the input.
    for v in jaxpr.invars:
        named.pop(v, None)
    return named


def values_of(
    eqn: _jax.JaxprEqn, path: str, named: dict[_jax.Var, Named]
) -> Iterator[tuple[RegionValue, _jax.Var]]:
    """Yield the values that an equation computes, and their variables.

    `checkpoint_name` computes none, except on an input of the jaxpr. Refs are not values: their contents
    change, so they cannot be saved.
    """
    name = _jax.checkpoint_name_of(eqn)
    if name is not None and eqn.invars[0] in named:
        return
    own = frozenset() if name is None else frozenset({name})
    has_body = jaxprs.has_body(eqn)
    for var in eqn.outvars:
        if _jax.is_dropped(var) or not _jax.is_array(var.aval):
            continue
        names = named[var].names | own if var in named else own
        yield RegionValue(names, eqn.primitive.name, path, var.aval, eqn, has_body), var
