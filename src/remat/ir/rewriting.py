"""Changing the equations of a program at any depth."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from remat import _jax
from remat.ir import jaxprs
from remat.ir.equations import programs_of


class Rewriting:
    """Changes equations of programs at any depth; jaxprs that several equations run stay shared."""

    def __init__(self) -> None:
        self._programs: dict[int, tuple[_jax.Jaxpr, _jax.Jaxpr]] = {}

    def program(self, jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
        if id(jaxpr) not in self._programs:
            self._programs[id(jaxpr)] = jaxpr, self.changed(jaxpr)
        return self._programs[id(jaxpr)][1]

    def changed(self, jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
        """Return a program with other equations, or the same program if they are the same."""
        return with_equations(jaxpr, self.equations(jaxpr))

    def equations(self, jaxpr: _jax.Jaxpr) -> Sequence[_jax.JaxprEqn]:
        raise NotImplementedError

    def within(self, eqn: _jax.JaxprEqn) -> _jax.JaxprEqn:
        """Return an equation whose bodies are changed."""
        for body in programs_of(eqn):
            inner = _jax.open_jaxpr(body)
            new = self.program(inner)
            if new is not inner:
                eqn = jaxprs.replace_body(eqn, body, new)
        return eqn


def with_equations(jaxpr: _jax.Jaxpr, eqns: Sequence[_jax.JaxprEqn]) -> _jax.Jaxpr:
    """Return a program with other equations, or the same program if they are the same."""
    is_same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
    return jaxpr if is_same else _jax.rebuild(jaxpr, eqns=list(eqns))
