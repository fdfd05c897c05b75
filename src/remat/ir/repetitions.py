"""Which equations repeat others, of the same program or of one before it: common subexpressions.

An equation repeats another if it applies the same primitive to the same operands with the same
parameters. A loop that runs another one's steps and stacks more of their values repeats it, too: the two
become one loop, which stacks the values of both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from remat import _jax
from remat.aliases import Atom, Aval
from remat.ir import jaxprs
from remat.ir.equations import is_repeatable, plain_call

_jax.exclude_from_tracebacks(__file__)


class Around(NamedTuple):
    """The program around two bodies of loops.

    JAX's partial evaluation moves loop-invariant values out of a loop, but not those that a checkpoint in its
    body recomputes.

    Attributes:
      operands: the operand for each constant of a body, by the variable inside.
      eqns: the equations that compute the first body's constants.
      inside: the first body's constants, by operand.
    """

    operands: Mapping[_jax.Var, Atom]
    eqns: Sequence[_jax.JaxprEqn]
    inside: Mapping[_jax.Var, _jax.Var]


def without_repetitions(
    first: Sequence[_jax.JaxprEqn],
    second: Sequence[_jax.JaxprEqn],
    names: dict[_jax.Var, Atom],
    around: Around | None = None,
    inputs: Iterable[_jax.Var] = (),
) -> tuple[list[_jax.JaxprEqn], list[_jax.JaxprEqn]]:
    """Return two consecutive programs, the second without equations that repeat those of the first.

    Args:
      first: the equations of the first. A loop among them gets more results if one of the second runs the
        same steps.
      second: the equations of the second, on other variables than those of the first.
      names: for inputs of the second, the variables of the first that they equal. Results of the second that
        the first computes are added.
      around: the program around, if the two are bodies of loops.
      inputs: of the second. Those that equal no variable of the first do not exist where that runs, so loops
        that read them stay in the second.
    """
    around = around or Around({}, (), {})
    merged = list(first)
    made_at = {v: i for i, eqn in enumerate(first) for v in eqn.outvars}
    own = {v for eqn in second for v in eqn.outvars}.union(v for v in inputs if v not in names)
    outer_values = {v for eqn in around.eqns for v in eqn.outvars}
    shared = _Shared()
    for eqn in around.eqns:
        shared.add(eqn)
    for v, outer in around.operands.items():
        shared.alias(v, outer)
    for eqn in first:
        shared.add(eqn)
    left: list[_jax.JaxprEqn] = []
    for eqn in second:
        eqn = jaxprs.renamed(eqn, names)
        same = shared.find(eqn)
        results = None if same is None else [around.inside.get(v, v) for v in same.outvars]
        if results is not None and outer_values.isdisjoint(results):
            names.update(zip(eqn.outvars, results))
            continue
        for i, other in enumerate(merged if _is_loop(eqn) else ()):
            is_there = [
                not _jax.is_var(v) or (v not in own and made_at.get(v, -1) < i) for v in eqn.invars
            ]
            both = _merged(other, eqn, shared.canonical) if all(is_there) else None
            if both is not None:
                merged[i] = both.eqn
                made_at.update(dict.fromkeys(both.eqn.outvars, i))
                names.update(zip(eqn.outvars, both.results))
                break
        else:
            left.append(eqn)
            shared.add(eqn)
    return merged, left


def without_repeated(
    jaxpr: _jax.Jaxpr, equal: Mapping[_jax.Var, _jax.Var] | None = None
) -> _jax.Jaxpr:
    """Return a program that computes each common subexpression once; it may have dead equations.

    Args:
      jaxpr: the program.
      equal: inputs that equal others, with those.
    """
    names: dict[_jax.Var, Atom] = dict(equal or {})
    _, eqns = without_repetitions([], jaxpr.eqns, names)
    if not names:
        return jaxpr
    return _jax.rebuild(jaxpr, eqns=eqns, outvars=[jaxprs.look(names, v) for v in jaxpr.outvars])


def step_of(eqn: _jax.JaxprEqn) -> _jax.Jaxpr:
    """Return a scan's body with plain calls inlined, on variables of its own."""
    return on_own_variables(_jax.open_jaxpr(eqn.params["jaxpr"]))


def on_own_variables(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a program with plain calls inlined, on new variables."""
    body = jaxprs.inline_calls(jaxpr, plain_call)
    names: dict[_jax.Var, Atom] = {v: _jax.new_var(v.aval) for v in body.invars}
    eqns = []
    for inner in body.eqns:
        names.update((v, jaxprs.fresh(v)) for v in inner.outvars)
        eqns.append(jaxprs.renamed(inner, names))
    return _jax.rebuild(
        body,
        invars=[names[v] for v in body.invars],
        outvars=[jaxprs.look(names, v) for v in body.outvars],
        eqns=eqns,
    )


# --------------------------------------------------------------------------------------------------
# Equal equations


class _Shared:
    """Finds equations that compute the same."""

    def __init__(self) -> None:
        self._same_value: dict[_jax.Var, Atom] = {}
        self._equations: dict[Hashable, list[_jax.JaxprEqn]] = {}

    def add(self, eqn: _jax.JaxprEqn) -> None:
        if not is_repeatable(eqn):
            return
        if _keeps_value(eqn):
            self.alias(eqn.outvars[0], eqn.invars[0])
        key = self._key(eqn)
        same = self._find(eqn, key)
        if same is None:
            self._equations.setdefault(key, []).append(eqn)
            return
        for v, other in zip(eqn.outvars, same.outvars):
            self.alias(v, other)

    def find(self, eqn: _jax.JaxprEqn) -> _jax.JaxprEqn | None:
        """Return an equation that computes all results of another one, if there is one."""
        return self._find(eqn, self._key(eqn)) if is_repeatable(eqn) else None

    def _find(self, eqn: _jax.JaxprEqn, key: Hashable) -> _jax.JaxprEqn | None:
        if eqn.primitive.name == "optimization_barrier":
            return None
        for other in self._equations.get(key, ()):
            has_all = all(
                _jax.is_dropped(v) or not _jax.is_dropped(u)
                for v, u in zip(eqn.outvars, other.outvars)
            )
            if has_all and other.ctx == eqn.ctx and _same_params(eqn, other):
                return other
        return None

    def alias(self, v: _jax.Var, other: Atom) -> None:
        """Record that a variable has the value of another, or of a literal."""
        self._same_value[v] = self.canonical(other)

    def canonical(self, v: Atom) -> Atom:
        return self._same_value.get(v, v) if _jax.is_var(v) else _literal(v)

    def _key(self, eqn: _jax.JaxprEqn) -> Hashable:
        operands = tuple(self.canonical(v) for v in eqn.invars)
        return eqn.primitive, operands, tuple(v.aval for v in eqn.outvars), _numbers(eqn)


def _numbers(eqn: _jax.JaxprEqn) -> tuple[tuple[str, object], ...]:
    """Return the parameters that are numbers or tuples of numbers, such as where a slice starts."""
    return tuple(sorted((k, value) for k, value in eqn.params.items() if _is_number(value)))


def _is_number(value: object) -> bool:
    return type(value) is int or (type(value) is tuple and all(map(_is_number, value)))


def _literal(v: Atom) -> tuple[Aval, str, tuple[int, ...], bytes]:
    value = np.asarray(v.val)
    return v.aval, str(value.dtype), value.shape, value.tobytes()


def _keeps_value(eqn: _jax.JaxprEqn) -> bool:
    """Return whether an equation rounds a value to the precision that it has."""
    if eqn.primitive is not _jax.reduce_precision_p or not _jax.is_var(eqn.invars[0]):
        return False
    info = jnp.finfo(eqn.outvars[0].aval.dtype)
    bits = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
    return bits == (info.nexp, info.nmant)


def _same_params(a: _jax.JaxprEqn, b: _jax.JaxprEqn) -> bool:
    """Return whether two equations of one primitive have the same parameters.

    The name of a call is the name of a Python function, and is ignored; elsewhere names count.
    """
    is_call = jaxprs.has_body(a) and jaxprs.has_body(b)
    keys = [k for k in a.params if not (is_call and k == "name")]
    return a.params.keys() == b.params.keys() and all(
        same_parameters(a.params[k], b.params[k]) for k in keys
    )


def same_parameters(a: Any, b: Any) -> bool:
    """Return whether two parameters of equations are equal; jaxprs are if they are the same program."""
    if a is b:
        return True
    if _jax.is_jaxpr(a) and _jax.is_jaxpr(b):
        constants = getattr(a, "consts", None) or getattr(b, "consts", None)
        return not constants and _same_program(_jax.open_jaxpr(a), _jax.open_jaxpr(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same_parameters, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_parameters(a[k], b[k]) for k in a)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    try:
        return bool(a == b)
    except (TypeError, ValueError):  # arrays inside, or no comparison
        return False


def _same_program(a: _jax.Jaxpr, b: _jax.Jaxpr) -> bool:
    if len(a.eqns) != len(b.eqns) or len(a.invars) != len(b.invars) or a.constvars or b.constvars:
        return False
    of_b = dict(zip(a.invars, b.invars))

    def same(v: Atom, u: Atom) -> bool:
        if _jax.is_var(v) != _jax.is_var(u) or v.aval != u.aval:
            return False
        return of_b.get(v) is u if _jax.is_var(v) else _literal(v) == _literal(u)

    if not all(map(same, a.invars, b.invars)):
        return False
    for one, other in zip(a.eqns, b.eqns):
        if one.primitive is not other.primitive or len(one.outvars) != len(other.outvars):
            return False
        of_b.update(zip(one.outvars, other.outvars))
        if not (
            len(one.invars) == len(other.invars)
            and all(map(same, one.invars, other.invars))
            and all(v.aval == u.aval for v, u in zip(one.outvars, other.outvars))
            and one.ctx == other.ctx
            and _same_params(one, other)
        ):
            return False
    return len(a.outvars) == len(b.outvars) and all(map(same, a.outvars, b.outvars))


# --------------------------------------------------------------------------------------------------
# Loops over the same steps


class _Both(NamedTuple):
    """Two loops as one, and the results of the second."""

    eqn: _jax.JaxprEqn
    results: list[_jax.Var]


def _is_loop(eqn: _jax.JaxprEqn) -> bool:
    return _jax.scan_body(eqn) is not None and is_repeatable(eqn)


def _merged(
    first: _jax.JaxprEqn, second: _jax.JaxprEqn, canonical: Callable[[Atom], Atom]
) -> _Both | None:
    """Return one loop that computes the results of both, or None if their carries differ."""
    if not _is_loop(first):
        return None
    n_consts, n_carry = _jax.scan_arity(first)
    n_own, n_own_carry = _jax.scan_arity(second)
    if n_carry != n_own_carry or any(
        first.params[key] != second.params[key] for key in ("length", "reverse")
    ):
        return None
    inits = first.invars[n_consts : n_consts + n_carry]
    own_inits = second.invars[n_own : n_own + n_carry]
    if [canonical(v) for v in inits] != [canonical(v) for v in own_inits]:
        return None
    f, b = step_of(first), step_of(second)
    consts, carry, xs = _jax.split_list(f.invars, [n_consts, n_carry])
    own_consts, own_carry, own_xs = _jax.split_list(b.invars, [n_own, n_carry])
    names: dict[_jax.Var, Atom] = dict(zip(own_carry, carry))
    more_consts = _unify(consts, first.invars, own_consts, second.invars, canonical, names)
    more_xs = _unify(
        xs,
        first.invars[n_consts + n_carry :],
        own_xs,
        second.invars[n_own + n_carry :],
        canonical,
        names,
    )
    eqns, left = without_repetitions(f.eqns, b.eqns, names)
    after = [jaxprs.look(names, v) for v in b.outvars]
    if any(v is not u for v, u in zip(f.outvars[:n_carry], after)):
        return None
    outvars = [_jax.new_var(v.aval) if _jax.is_dropped(v) else v for v in first.outvars]
    stacks = [_jax.new_var(v.aval) for v in second.outvars[n_carry:]]
    step = _jax.jaxpr_of(
        [*consts, *(v for v, _ in more_consts), *carry, *xs, *(v for v, _ in more_xs)],
        [*f.outvars, *after[n_carry:]],
        [*eqns, *left],
        f,
    )
    invars = [
        *first.invars[:n_consts],
        *(outer for _, outer in more_consts),
        *first.invars[n_consts:],
        *(outer for _, outer in more_xs),
    ]
    n_all = n_consts + len(more_consts)
    eqn = jaxprs.scan_of_step(first, step, invars, [*outvars, *stacks], n_all, n_carry)
    return _Both(eqn, [*outvars[:n_carry], *stacks])


def _unify(
    inside: Sequence[_jax.Var],
    operands: Sequence[Atom],
    own: Sequence[_jax.Var],
    own_operands: Sequence[Atom],
    canonical: Callable[[Atom], Atom],
    names: dict[_jax.Var, Atom],
) -> list[tuple[_jax.Var, Atom]]:
    """Identify inputs with equal operands; return the second program's other inputs and operands."""
    of_operand = {canonical(operand): v for v, operand in zip(inside, operands)}
    more = []
    for v, operand in zip(own, own_operands):
        same = of_operand.get(canonical(operand))
        if same is None:
            more.append((v, operand))
        else:
            names[v] = same
    return more
