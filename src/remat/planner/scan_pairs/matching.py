"""Which equations form pairs: a forward scan, and a backward scan that reads its stacked results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from remat import _jax
from remat.aliases import Atom, Aval


class Match(NamedTuple):
    """A forward and a backward scan, by their places among a jaxpr's equations."""

    forward: int
    backward: int


def matches(jaxpr: _jax.Jaxpr) -> list[Match]:
    """Return the pairs of scans of a jaxpr, each scan in at most one, in the order of the first.

    If a scan could form several pairs, the one in which the second reads the most bytes is taken.
    """

    def stacked_bytes(i: int, j: int) -> int:
        forward, backward = jaxpr.eqns[i], jaxpr.eqns[j]
        if forward.params["length"] != backward.params["length"]:
            return 0
        return sum(size_of(forward.outvars[k].aval) for k in only_read_by(jaxpr, i, j))

    return in_pairs(jaxpr, is_loop, stacked_bytes)


def in_pairs(
    jaxpr: _jax.Jaxpr,
    is_candidate: Callable[[_jax.JaxprEqn], bool],
    bytes_between: Callable[[int, int], int],
) -> list[Match]:
    """Return pairs of equations of which the second reads the first, each equation in at most one.

    Args:
      jaxpr: the program.
      is_candidate: whether an equation may be in a pair.
      bytes_between: the bytes of the first's results that the second reads; 0 if the two form no pair.
    """
    made_by = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    found: dict[Match, int] = {}
    for j, eqn in enumerate(jaxpr.eqns):
        if not is_candidate(eqn):
            continue
        for i in {made_by[v] for v in eqn.invars if _jax.is_var(v) and v in made_by}:
            size = bytes_between(i, j) if is_candidate(jaxpr.eqns[i]) else 0
            if size:
                found[Match(i, j)] = size
    chosen: list[Match] = []
    taken: set[int] = set()
    for match in sorted(found, key=lambda m: (-found[m], m)):
        if taken.isdisjoint(match):
            chosen.append(match)
            taken.update(match)
    return sorted(chosen)


def is_loop(eqn: _jax.JaxprEqn) -> bool:
    """Return whether an equation is a scan of a known number of steps."""
    # A symbolic length is not an int.
    return _jax.scan_body(eqn) is not None and isinstance(eqn.params["length"], int)


def slices(eqn: _jax.JaxprEqn) -> Sequence[Atom]:
    """Return the operands of a scan of which each step reads a slice."""
    return eqn.invars[sum(_jax.scan_arity(eqn)) :]


def only_read_by(jaxpr: _jax.Jaxpr, i: int, j: int) -> list[int]:
    """Return the results of equation i that only j reads; for scans, only stacks that j reads in slices."""
    forward, backward = jaxpr.eqns[i], jaxpr.eqns[j]
    readers = _readers(jaxpr)
    n_carry = n_whole = 0
    if forward.primitive.name == "scan":
        n_carry, n_whole = _jax.scan_arity(forward)[1], sum(_jax.scan_arity(backward))
    whole = {v for v in backward.invars[:n_whole] if _jax.is_var(v)}
    return [
        k
        for k, v in enumerate(forward.outvars)
        if k >= n_carry and readers.get(v) == {j} and v not in whole
    ]


@_jax.weakref_lru_cache
def _readers(jaxpr: _jax.Jaxpr) -> dict[_jax.Var, set[int]]:
    """Return the places of the equations that read each variable; that of the results is the last."""
    readers: dict[_jax.Var, set[int]] = {}
    reads = [*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars]
    for k, atoms in enumerate(reads):
        for v in atoms:
            if _jax.is_var(v):
                readers.setdefault(v, set()).add(k)
    return readers


def size_of(aval: Aval) -> int:
    """Return the bytes of a type, on all devices; 0 for types other than arrays."""
    return int(getattr(aval, "size", 0)) * _jax.itemsize_bytes(aval) if _jax.is_array(aval) else 0
