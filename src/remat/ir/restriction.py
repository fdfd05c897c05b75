"""Restricting recomputation to equations of marked functions (`remat.auto`).

The equations of a marked function have a special name scope (`_jax.marked_scope`), and so have the equations
that JAX derives from them: derivatives, transposes, batched forms. The program inside a marked equation, such
as the body of a loop, is marked with it.

`restricted` derives the complement. In a program with marks it gives all other equations a scope that makes
them *fixed*: `is_repeatable` is False for them, so they are treated like those with effects. The residuals of
a scan outside of marks, and a checkpoint outside, do not change. A program without marks stays the same.

Four kinds of equations outside are not fixed:

* Views, and equations on constants alone, which cost nothing.
* Sums of cotangents, which JAX adds without a scope, if one of their terms is from a marked function.
* Calls that contain marked equations. They are inlined, and their equations would inherit the scope.
* Equations that contain only marked equations, such as a checkpoint around a marked function.
"""

from __future__ import annotations

import hashlib

from remat import _jax
from remat.ir import jaxprs
from remat.ir.equations import fusion_of, plain_call, programs_of
from remat.ir.operations import Fusion
from remat.ir.rewriting import Rewriting


def has_marks(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether a program has marked equations, at any depth."""
    return _Marks().inside(jaxpr)


def restricted(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a program in which all equations outside of marked functions are fixed, if any is marked."""
    marks = _Marks()
    return _Fixing(marks).program(jaxpr) if marks.inside(jaxpr) else jaxpr


def marks_of(jaxpr: _jax.Jaxpr) -> str:
    """Return a text that identifies the marked equations; "" if there are none."""
    marks = _Marks()
    return marks.text(jaxpr) if marks.inside(jaxpr) else ""


def without_marks(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a program without the scopes of this module."""
    return _Unmarking().program(jaxpr)


class _Marks:
    """Finds programs with marks. Jaxprs that several equations run are read once."""

    def __init__(self) -> None:
        # Jaxprs are stored with their ids, so that these stay valid.
        self._inside: dict[int, tuple[_jax.Jaxpr, bool]] = {}

    def inside(self, jaxpr: _jax.Jaxpr) -> bool:
        if id(jaxpr) not in self._inside:
            found = any(_jax.is_marked(eqn) or self.inside_of(eqn) for eqn in jaxpr.eqns)
            self._inside[id(jaxpr)] = jaxpr, found
        return self._inside[id(jaxpr)][1]

    def inside_of(self, eqn: _jax.JaxprEqn) -> bool:
        return any(self.inside(_jax.open_jaxpr(body)) for body in programs_of(eqn))

    def text(self, jaxpr: _jax.Jaxpr) -> str:
        digest = hashlib.sha256()
        for eqn in jaxpr.eqns:
            if _jax.is_marked(eqn):
                digest.update(b"1")
            elif self.inside_of(eqn):
                inner = (self.text(_jax.open_jaxpr(body)) for body in programs_of(eqn))
                digest.update(f"({','.join(inner)})".encode())
            else:
                digest.update(b"0")
        return digest.hexdigest()[:20]


class _Fixing(Rewriting):
    def __init__(self, marks: _Marks) -> None:
        super().__init__()
        self.marks = marks

    def equations(self, jaxpr: _jax.Jaxpr) -> list[_jax.JaxprEqn]:
        found = []
        marked: set[_jax.Var] = set()
        for eqn in jaxpr.eqns:
            is_sum = eqn.primitive.name == "add_any"
            if _jax.is_marked(eqn) or (is_sum and not marked.isdisjoint(_variables(eqn))):
                marked.update(eqn.outvars)
                found.append(eqn)
            else:
                found.append(self._fixed(eqn))
        return found

    def _fixed(self, eqn: _jax.JaxprEqn) -> _jax.JaxprEqn:
        is_inlined = plain_call(eqn) is not None or eqn.primitive.name in ("jit", "pjit")
        is_free = not _variables(eqn) or fusion_of(eqn) is Fusion.VIEW
        if is_free and not jaxprs.has_body(eqn):
            return eqn
        new = self.within(eqn)
        holds_nothing_fixed = new is eqn
        is_open = self.marks.inside_of(eqn) and (is_inlined or holds_nothing_fixed)
        return new if is_open else _jax.fixed(new)


class _Unmarking(Rewriting):
    def equations(self, jaxpr: _jax.Jaxpr) -> list[_jax.JaxprEqn]:
        return [_jax.without_marks(self.within(eqn)) for eqn in jaxpr.eqns]


def _variables(eqn: _jax.JaxprEqn) -> list[_jax.Var]:
    return [v for v in eqn.invars if _jax.is_var(v)]
