"""Loops without carried arrays that never change, or that equal others, and without equal stacks of numbers.

A solver that carries the linearization at its last point carries the zeros in it, too: each step takes them
from the new point or from the carry, and both are the same. It may carry this linearization twice, once for
its search and once for its result. Compilers do not see that if the step chooses by a `select` or by
branches, and keep buffers for all. Likewise, a result of branches that is the same array in each of them is
that array.

JAX's partial evaluation may have a scan stack the same number twice, or one that it reads. If that is the
index of branches, the forward and the backward ones seem to follow different indices. Equal stacks of arrays
stay apart: one may be freed before another one is read.

Numbers are carried on: without them, nothing would be saved.

A scan of no steps is its first carry and empty stacks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from remat import _jax
from remat.aliases import Atom, JaxprLike
from remat.ir import jaxprs
from remat.ir.equations import called_body, fills_array
from remat.ir.repetitions import without_repeated
from remat.ir.rewriting import Rewriting
from remat.ir.split.branches import empty_value

_jax.exclude_from_tracebacks(__file__)


def without_redundant_carries(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a program whose loops, at any depth, carry only arrays that may change, each once, and numbers.

    >>> import jax, jax.numpy as jnp
    >>> def step(carry, accept):
    ...     x, last, again, zeros = carry
    ...     last, again = jnp.where(accept, x, last), jnp.where(accept, x, again)
    ...     return (x + again, last, again, jnp.where(accept, jnp.zeros(3), zeros)), None
    >>> run = lambda x, accept: jax.lax.scan(step, (x, x, x, jnp.zeros(3)), accept)[0]
    >>> jaxpr = jax.make_jaxpr(run)(jnp.ones(4), jnp.array([True, False])).jaxpr
    >>> carried = lambda jaxpr: " ".join(v.aval.str_short() for v in jaxpr.eqns[-1].outvars)
    >>> carried(jaxpr), carried(without_redundant_carries(jaxpr))
    ('float32[4] float32[4] float32[4] float32[3]', 'float32[4] float32[4]')
    """
    return _Removing().program(jaxpr)


class _Removing(Rewriting):
    def changed(self, jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
        scope = _Scope([], {}, {})
        names: dict[_jax.Var, Atom] = {}
        eqns = []
        for old in jaxpr.eqns:
            eqn = self.within(jaxprs.renamed(old, names) if names else old)
            if eqn.primitive.name == "scan" and eqn.params["length"] == 0:
                eqns += _of_no_steps(eqn, names)
                continue
            loop = _Loop.of(eqn)
            redundant = {} if loop is None else loop.redundant(scope)
            if loop is not None and redundant:
                # Then more results of branches can be the same.
                eqn = self.within(loop.without(redundant, scope, names))
            scope.add(eqn)
            if eqn.primitive.name == "cond":
                names.update(_equal_results(eqn, scope))
            names.update(_equal_stacks(eqn))
            eqns.append(eqn)
        if not names and all(new is old for new, old in zip(eqns, jaxpr.eqns)):
            return jaxpr
        outvars = [jaxprs.look(names, v) for v in jaxpr.outvars]
        new = _jax.rebuild(jaxpr, eqns=eqns, outvars=outvars)
        return _jax.dce(new, [True] * len(outvars), keep=[True] * len(new.invars))[0]


def _of_no_steps(eqn: _jax.JaxprEqn, names: dict[_jax.Var, Atom]) -> list[_jax.JaxprEqn]:
    """Return equations for the stacks of a scan of no steps; its results mean these and its first carry."""
    n_consts, n_carry = _jax.scan_arity(eqn)
    names.update(zip(eqn.outvars[:n_carry], eqn.invars[n_consts : n_consts + n_carry]))
    eqns = []
    for v in eqn.outvars[n_carry:]:
        making, names[v] = empty_value(v.aval, eqn)
        eqns += making
    return eqns


# --------------------------------------------------------------------------------------------------
# Loops and branches


@dataclasses.dataclass(frozen=True, repr=False)
class _Loop:
    """A `scan` or a `while_loop`.

    Attributes:
      eqn: its equation.
      body: a step's program. It takes `consts`, the carries and, in a scan, slices of the scanned arrays.
      consts: the operands that each step takes.
      carries: the operands that the first step takes as carries.
    """

    eqn: _jax.JaxprEqn
    body: _jax.Jaxpr
    consts: Sequence[Atom]
    carries: Sequence[Atom]

    @classmethod
    def of(cls, eqn: _jax.JaxprEqn) -> _Loop | None:
        body = _jax.scan_body(eqn)
        if body is not None:
            n_consts, n_carry = _jax.scan_arity(eqn)
            last = n_consts + n_carry
            return cls(eqn, body, eqn.invars[:n_consts], eqn.invars[n_consts:last])
        if eqn.primitive.name != "while" or any(
            getattr(program, "consts", None) for program in jaxprs.bodies_of(eqn)
        ):
            return None
        first = eqn.params["cond_nconsts"]
        last = first + eqn.params["body_nconsts"]
        body = _jax.open_jaxpr(eqn.params["body_jaxpr"])
        return cls(eqn, body, eqn.invars[first:last], eqn.invars[last:])

    def redundant(self, scope: _Scope) -> dict[int, int | None]:
        """Return the carries that are arrays and equal another one in all steps, with that one.

        None stands for the first step's value: such a carry never changes.
        """
        first = {at: scope.value(v) for at, v in enumerate(self.carries) if _is_array(v)}
        if not first:
            return {}
        consts = {v: scope.value(x) for v, x in zip(self.body.invars, self.consts)}
        carried = self.body.invars[len(self.consts) :]
        # Suppose that all carries with the same first value are equal, and never change. What a step makes
        # of them refutes some of that, until it refutes nothing.
        constant = set(first)
        classes: dict[int, object] = {
            at: (value, _type_of(self.carries[at])) for at, value in first.items()
        }
        while True:
            equal = _first_of_each(classes)
            body = without_repeated(
                self.body, {carried[at]: carried[to] for at, to in equal.items()}
            )
            inputs = {
                carried[at]: value if at in constant else ("carried", classes[at])
                for at, value in first.items()
            }
            step = _Scope(body.eqns, consts | inputs, scope.choices)
            after = {at: step.value(body.outvars[at]) for at in first}
            still = {at for at in constant if after[at] == first[at]}
            tokens: dict[object, object] = {}
            finer = {
                at: tokens.setdefault((classes[at], at in still, after[at]), object())
                for at in first
            }
            is_done = still == constant and len(tokens) == len(set(classes.values()))
            constant, classes = still, finer
            if is_done or not (constant or len(tokens) < len(first)):
                break
        return dict.fromkeys(sorted(constant)) | {
            at: to for at, to in _first_of_each(classes).items() if at not in constant
        }

    def without(
        self, redundant: Mapping[int, int | None], scope: _Scope, names: dict[_jax.Var, Atom]
    ) -> _jax.JaxprEqn:
        """Return the loop's equation without these carries, and add what its results are instead to `names`.

        The programs fill arrays of one number themselves, and take other constants as operands.
        """
        results = list(self.eqn.outvars)
        for at, same in redundant.items():
            if same is not None and _jax.is_dropped(results[same]):
                results[same], results[at] = results[at], results[same]
        for at, same in redundant.items():
            names[results[at]] = self.carries[at] if same is None else results[same]
        constant = [at for at, same in redundant.items() if same is None]
        fills = {at: scope.fill(self.carries[at]) for at in constant}
        taken = [at for at in constant if fills[at] is None]
        left = [at for at in range(len(self.carries)) if at not in redundant]
        carries = [self.carries[at] for at in left]

        def freed(
            program: _jax.Jaxpr, consts: Sequence[Atom], outvars: Sequence[Atom]
        ) -> tuple[_jax.Jaxpr, list[Atom]]:
            """Return a program without these carries, and the constants that it takes."""
            n_consts, last = len(consts), len(consts) + len(self.carries)
            carried, rest = program.invars[n_consts:last], program.invars[last:]
            equal = {
                carried[at]: carried[same] for at, same in redundant.items() if same is not None
            }
            made = [fill.replace(outvars=[carried[at]]) for at, fill in fills.items() if fill]
            new = _jax.rebuild(
                program,
                invars=[
                    *program.invars[:n_consts],
                    *(carried[at] for at in (*taken, *left)),
                    *rest,
                ],
                outvars=[jaxprs.look(equal, v) for v in outvars],
                eqns=[*made, *(jaxprs.renamed(eqn, equal) for eqn in program.eqns)],
            )
            keep = [True] * n_consts + [False] * len(taken) + [True] * (len(left) + len(rest))
            new, needed = _jax.dce(without_repeated(new), [True] * len(outvars), keep=keep)
            more = [
                self.carries[at] for at, is_needed in zip(taken, needed[n_consts:]) if is_needed
            ]
            return new, [*consts, *more]

        places = [at for at in range(len(results)) if at not in redundant]
        body, consts = freed(self.body, self.consts, [self.body.outvars[at] for at in places])
        outvars = [results[at] for at in places]
        if self.eqn.primitive.name == "scan":
            scanned = self.eqn.invars[len(self.consts) + len(self.carries) :]
            operands = [*consts, *carries, *scanned]
            return jaxprs.scan_of_step(self.eqn, body, operands, outvars, len(consts), len(left))
        condition = self.eqn.params["cond_jaxpr"]
        opened = _jax.open_jaxpr(condition)
        asked, asks = freed(
            opened, self.eqn.invars[: self.eqn.params["cond_nconsts"]], opened.outvars
        )
        params = dict(
            self.eqn.params,
            cond_jaxpr=_jax.with_equations(condition, asked),
            cond_nconsts=len(asks),
            body_jaxpr=_jax.with_equations(self.eqn.params["body_jaxpr"], body),
            body_nconsts=len(consts),
        )
        runs = [
            (params["cond_jaxpr"], [*asks, *carries]),
            (params["body_jaxpr"], [*consts, *carries]),
        ]
        return _jax.new_body_eqn(self.eqn, [*asks, *consts, *carries], outvars, params, runs)


def _first_of_each(classes: Mapping[int, object]) -> dict[int, int]:
    """Return the first carry of the same class, for all others."""
    first: dict[object, int] = {}
    found = {at: first.setdefault(c, at) for at, c in classes.items()}
    return {at: to for at, to in found.items() if at != to}


def _equal_results(eqn: _jax.JaxprEqn, scope: _Scope) -> Iterator[tuple[_jax.Var, Atom]]:
    """Yield arrays that branches return and that equal an operand or another result, with that."""
    equal = {scope.value(x): x for x in eqn.invars[:0:-1] if _is_array(x)}
    for v in eqn.outvars:
        if not _jax.is_dropped(v) and _is_array(v):
            same = equal.setdefault(scope.value(v), v)
            if same is not v and _type_of(same) == _type_of(v):
                yield v, same


def _equal_stacks(eqn: _jax.JaxprEqn) -> Iterator[tuple[_jax.Var, Atom]]:
    """Yield stacks of numbers that equal an array that the scan reads or another stack, with that."""
    body = _jax.scan_body(eqn)
    if body is None:
        return
    n_consts, n_carry = _jax.scan_arity(eqn)
    first = n_consts + n_carry
    equal: dict[Atom, Atom] = dict(zip(body.invars[first:], eqn.invars[first:]))
    for inside, v in zip(body.outvars[n_carry:], eqn.outvars[n_carry:]):
        is_number = _jax.is_var(inside) and inside.aval.shape == ()
        if is_number and not _jax.is_dropped(v):
            same = equal.setdefault(inside, v)
            if same is not v and _type_of(same) == _type_of(v):
                yield v, same


def _is_array(v: Atom) -> bool:
    return _jax.is_array(v.aval) and v.aval.shape != ()


def _type_of(v: Atom) -> object:
    return v.aval.strip_weak_type()


# --------------------------------------------------------------------------------------------------
# Values


@dataclasses.dataclass(frozen=True)
class _Fill:
    """An array that is filled with one number, which is given by its bytes."""

    number: bytes
    dtype: np.dtype
    shape: tuple[int, ...]


# Equal values are the same arrays or numbers. Any object stands for one of which nothing else is known.
_Value: TypeAlias = object
# Primitives whose results are their operands. (The first operand of a choice says which of the others.)
_COPIES = frozenset(
    ("copy", "copy_p", "name", "optimization_barrier", "pcast", "pvary", "stop_gradient")
)
_CHOICES = frozenset(("select_n", "select_if_vmap"))  # the latter is Equinox's
_DEEPEST = 100  # so many equations are followed from a value to those that it is made of


class _Scope:
    """The values in a program, as far as equations that choose between values, or copy them, tell.

    Args:
      eqns: the program's equations; `add` adds others.
      inputs: the values of inputs.
      choices: the results of choices, by what is chosen; shared by programs inside each other.
    """

    def __init__(
        self,
        eqns: Iterable[_jax.JaxprEqn],
        inputs: Mapping[_jax.Var, _Value],
        choices: dict[tuple[_Value, ...], _Value],
    ) -> None:
        self.choices = choices
        self._values = dict(inputs)
        self._made: dict[_jax.Var, tuple[_jax.JaxprEqn, int]] = {}
        self._called: dict[tuple[int, int], _Scope] = {}
        for eqn in eqns:
            self.add(eqn)

    def add(self, eqn: _jax.JaxprEqn) -> None:
        self._made.update((v, (eqn, at)) for at, v in enumerate(eqn.outvars))

    def fill(self, v: Atom) -> _jax.JaxprEqn | None:
        """Return the equation that fills this array with a number, or the one that it is a copy of."""
        while _jax.is_var(v) and v in self._made:
            eqn, at = self._made[v]
            if fills_array(eqn):
                return eqn
            if eqn.primitive.name not in _COPIES or _type_of(eqn.invars[at]) != _type_of(v):
                break
            v = eqn.invars[at]
        return None

    def value(self, v: Atom, depth: int = 0) -> _Value:
        if not _jax.is_var(v):
            return _number(v)
        if v not in self._values:
            eqn, at = self._made.get(v, (None, 0))
            is_followed = eqn is not None and depth < _DEEPEST
            found = self._computed(eqn, at, depth + 1) if is_followed else None
            self._values[v] = object() if found is None else found
        return self._values[v]

    def _computed(self, eqn: _jax.JaxprEqn, at: int, depth: int) -> _Value | None:
        """Return the value of a result of an equation; None if nothing is known of it."""
        name = eqn.primitive.name
        if name in _COPIES:
            return self.value(eqn.invars[at], depth)
        if name in ("broadcast_in_dim", "reshape"):
            operand = self.value(eqn.invars[0], depth)
            shape = eqn.outvars[0].aval.shape
            return dataclasses.replace(operand, shape=shape) if isinstance(operand, _Fill) else None
        if name in _CHOICES:
            return self._chosen([self.value(x, depth) for x in eqn.invars])
        if name == "cond":
            branches = eqn.params["branches"]
            results = [self._result(eqn, body, at, depth) for body in branches]
            return self._chosen([self.value(eqn.invars[0], depth), *results])
        called = called_body(eqn)
        return None if called is None else self._result(eqn, called, at, depth)

    def _chosen(self, values: Sequence[_Value]) -> _Value:
        """Return the value of a choice between all but the first of these values, by the first one."""
        _, *cases = values
        if all(case == cases[0] for case in cases):
            return cases[0]
        return self.choices.setdefault(tuple(values), object())

    def _result(self, eqn: _jax.JaxprEqn, program: JaxprLike, at: int, depth: int) -> _Value:
        """Return the value of a result of a program that an equation runs on its last operands."""
        opened = _jax.open_jaxpr(program)
        key = id(eqn), id(opened)
        if key not in self._called:
            operands = eqn.invars[len(eqn.invars) - len(opened.invars) :]
            inputs = {v: self.value(x, depth) for v, x in zip(opened.invars, operands)}
            self._called[key] = _Scope(opened.eqns, inputs, self.choices)
        return self._called[key].value(opened.outvars[at], depth)


def _number(literal: _jax.Literal) -> _Value:
    dtype = literal.aval.dtype
    if literal.aval.shape != () or not isinstance(dtype, np.dtype):
        return object()
    return _Fill(np.asarray(literal.val, dtype).tobytes(), dtype, ())
