"""The programs inside equations: walking them, and preparing their bodies for decisions.

Before decisions about a body are made, plain calls in it are inlined, and a constant that is a broadcast of a
smaller value is computed inside the step. (JAX's partial evaluation moves loop-invariant values out of a
loop, whatever their size.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from remat import _jax
from remat.aliases import Atom, JaxprLike
from remat.ir import jaxprs
from remat.ir.equations import is_fusible, is_repeatable, plain_call, programs_of
from remat.ir.flops import flops_of
from remat.planner.scan_pairs.matching import size_of

_jax.exclude_from_tracebacks(__file__)

Replacements = dict[int, list[_jax.JaxprEqn]]

# A constant is computed inside of a step from values that take its bytes divided by this, in this number of
# equations at most. A smaller ratio and more equations find more such constants.
_SMALLER, _MOST_EQUATIONS = 4, 16


def inner_programs(eqn: _jax.JaxprEqn) -> list[tuple[JaxprLike, int]]:
    """Return the jaxprs without constants that an equation runs, and how often it runs each.

    They include those of functions with derivative rules and of linear solves; the rules stay unchanged.
    """
    length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    times = length if isinstance(length, int) else 1
    return [
        (body, times)
        for body in programs_of(eqn)
        if not getattr(body, "consts", None) and not _jax.open_jaxpr(body).constvars
    ]


def inside_of(eqn: _jax.JaxprEqn) -> contextlib.AbstractContextManager[None]:
    """Return the tracing context of an equation's bodies."""
    is_map = eqn.primitive.name == "shard_map"
    return _jax.inside_shard_map(eqn) if is_map else contextlib.nullcontext()


def replaced(jaxpr: _jax.Jaxpr, new: Mapping[int, Sequence[_jax.JaxprEqn]]) -> _jax.Jaxpr:
    """Return a jaxpr with other equations in place of some."""
    eqns = [e for i, eqn in enumerate(jaxpr.eqns) for e in new.get(i, (eqn,))]
    return _jax.rebuild(jaxpr, eqns=eqns)


def places_without(jaxpr: _jax.Jaxpr, ids: Iterable[str], prefix: str) -> list[int]:
    """Return the places of the equations that contain no pair or body with one of these ids.

    Args:
      jaxpr: the program.
      ids: of pairs of scans, or of bodies; each starts with the places of the equations around it.
      prefix: the beginning of ids in this program.
    """
    wanted = {id[len(prefix) :].partition(".")[0] for id in ids if id.startswith(prefix)}
    return [i for i in range(len(jaxpr.eqns)) if str(i) not in wanted]


def walk_inside(
    jaxpr: _jax.Jaxpr,
    skipped: Iterable[int],
    change: Callable[[_jax.Jaxpr, str], _jax.Jaxpr],
    prefix: str,
) -> Replacements:
    """Return the equations of a jaxpr whose inner programs `change(program, prefix)` changes.

    Args:
      jaxpr: the program.
      skipped: the places of equations that stay unchanged.
      change: returns the same object if it changes nothing.
      prefix: the beginning of ids in this program; those of inner programs start with it.
    """
    left = set(skipped)
    new: Replacements = {}
    for i, eqn in enumerate(jaxpr.eqns):
        if i in left:
            continue
        changed = whole = prepared(jaxpr, eqn)
        for k, (body, _) in enumerate(inner_programs(whole)):
            opened = _jax.open_jaxpr(body)
            with inside_of(eqn):
                inner = change(opened, f"{prefix}{i}.{k}/")
            if inner is not opened:
                changed = jaxprs.replace_body(changed, body, inner)
        if changed is not whole:
            new[i] = [changed]
    return new


# --------------------------------------------------------------------------------------------------
# Preparing an equation


def prepared(jaxpr: _jax.Jaxpr, eqn: _jax.JaxprEqn) -> _jax.JaxprEqn:
    """Return an equation of a jaxpr with plain calls in its bodies inlined, if it has bodies.

    A scan computes the broadcasts among its constants in its steps.
    """
    for body, _ in inner_programs(eqn):
        opened = _jax.open_jaxpr(body)
        if any(plain_call(inner) is not None for inner in opened.eqns):
            eqn = jaxprs.replace_body(eqn, body, jaxprs.inline_calls(opened, plain_call))
    return _with_broadcasts_inside(jaxpr, eqn)


def _with_broadcasts_inside(jaxpr: _jax.Jaxpr, eqn: _jax.JaxprEqn) -> _jax.JaxprEqn:
    body = _jax.scan_body(eqn)
    if body is None:
        return eqn
    n_consts, n_carry = _jax.scan_arity(eqn)
    sunk = SunkConstants(jaxpr, dict(zip(body.invars[:n_consts], eqn.invars)))
    if not sunk.eqns:
        return eqn
    invars = [*sunk.outside, *body.invars[n_consts:]]
    step = _jax.jaxpr_of(invars, body.outvars, [*sunk.eqns, *body.eqns], body)
    operands = [*sunk.outside.values(), *eqn.invars[n_consts:]]
    return jaxprs.scan_of_step(eqn, step, operands, eqn.outvars, len(sunk.outside), n_carry)


class SunkConstants:
    """The constants of a step that are computed inside of it: broadcasts, and others on request.

    Args:
      jaxpr: the program around.
      constants: the operand for each constant.
      computes: whether constants that are cheap functions of much smaller values are computed inside, too, in
        several equations.

    Attributes:
      outside: the operand for each constant that is left, by the variable inside.
      inside: the variables inside, by operand.
      eqns: the equations that compute the other constants.
    """

    def __init__(
        self, jaxpr: _jax.Jaxpr, constants: Mapping[_jax.Var, Atom], *, computes: bool = False
    ) -> None:
        self._made_by = _makers(jaxpr)
        self._computes = computes
        self.outside: dict[_jax.Var, Atom] = {}
        self.inside: dict[_jax.Var, _jax.Var] = {}
        self.eqns: list[_jax.JaxprEqn] = []
        for v, operand in constants.items():
            self._add(v, operand)

    def compute(self, operand: _jax.Var, given: Container[_jax.Var]) -> None:
        """Compute another constant inside, if that takes only values that are given."""
        smaller = _smaller_values(operand, self._made_by)
        if smaller is not None and all(v in given for v in smaller) and operand not in self.inside:
            self._add(_jax.new_var(operand.aval), operand)

    def _add(self, v: _jax.Var, operand: Atom, ends: Container[_jax.Var] = ()) -> None:
        """Compute a constant inside, or read it from outside.

        Args:
          v: the variable inside.
          operand: the operand.
          ends: what the constant that this one is computed for is computed from. If there is nothing, whether
            to compute this one is a question of its own.
        """
        eqn = smaller = None
        if _jax.is_var(operand):
            self.inside.setdefault(operand, v)
            eqn = None if operand in ends else self._made_by.get(operand)
        if eqn is not None and self._computes and not ends:
            smaller = _smaller_values(operand, self._made_by)
        if eqn is None or not (ends or smaller is not None or _broadcasts(eqn)):
            self.outside[v] = operand
            return
        below = ends or smaller or ()
        invars = [self._variable(u, below) if _jax.is_var(u) else u for u in eqn.invars]
        self.eqns.append(_jax.with_variables(eqn, invars, [v]))

    def _variable(self, operand: _jax.Var, ends: Container[_jax.Var]) -> _jax.Var:
        if operand not in self.inside:
            self._add(_jax.new_var(operand.aval), operand, ends)
        return self.inside[operand]


def is_computable(jaxpr: _jax.Jaxpr, v: _jax.Var) -> bool:
    """Return whether a value is a cheap function of much smaller values of its program."""
    return _smaller_values(v, _makers(jaxpr)) is not None


@_jax.weakref_lru_cache
def _makers(jaxpr: _jax.Jaxpr) -> dict[_jax.Var, _jax.JaxprEqn]:
    """Return the equation that computes each variable."""
    return {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}


def _broadcasts(eqn: _jax.JaxprEqn) -> bool:
    """Return whether compilers fuse an equation into its readers, and its operands take fewer bytes."""
    n_bytes = sum(size_of(v.aval) for v in eqn.invars)
    return _is_fused(eqn) and 2 * n_bytes < size_of(eqn.outvars[0].aval)


def _is_fused(eqn: _jax.JaxprEqn) -> bool:
    return len(eqn.outvars) == 1 and is_fusible(eqn) and is_repeatable(eqn)


def _smaller_values(
    v: _jax.Var, made_by: Mapping[_jax.Var, _jax.JaxprEqn]
) -> frozenset[_jax.Var] | None:
    """Return much smaller values from which few fused equations compute a value.

    Returns None if there are none, or if they are only moved, which compilers do inside of loops in any case.
    """
    is_moved = True
    most = size_of(v.aval) // _SMALLER
    found: set[_jax.Var] = set()
    seen: set[_jax.Var] = set()
    left = [v]
    while left:
        of = left.pop()
        eqn = made_by.get(of)
        if of in seen:
            continue
        if size_of(of.aval) <= most:
            found.add(of)
        elif eqn is None or not _is_fused(eqn) or len(seen) == _MOST_EQUATIONS:
            return None
        else:
            seen.add(of)
            is_moved &= not flops_of(eqn)
            left += [u for u in eqn.invars if _jax.is_var(u)]
    is_small = sum(size_of(u.aval) for u in found) <= most
    return frozenset(found) if is_small and not is_moved else None
