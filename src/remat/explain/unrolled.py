"""Loops that JAX unrolls completely, so that the compiled program has no loop there.

JAX does so for a `lax.scan` whose unroll factor reaches its length, and for one of a single iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from remat import _jax
from remat.aliases import Atom, Aval
from remat.ir import jaxprs

# The most equations of an unrolled loop; a larger loop is shown as a loop.
_MOST_EQUATIONS = 20_000


class Inlined(NamedTuple):
    """A jaxpr, and an equation with its operands and results."""

    eqn: _jax.JaxprEqn
    jaxpr: _jax.Jaxpr


def is_unrolled(eqn: _jax.JaxprEqn) -> bool:
    """Return whether an equation is a loop that is compiled as its body repeated."""
    body = _jax.scan_body(eqn)
    if body is None or body.constvars:
        return False
    length, unroll = eqn.params["length"], eqn.params.get("unroll", 1)
    if not isinstance(length, int) or not length <= max(1, int(unroll)):
        return False
    return length * sum(1 for _ in jaxprs.equations(body)) <= _MOST_EQUATIONS


class Unrolled:
    """A loop as its body repeated, with slices of its inputs and stacks of its results.

    Args:
      eqn: the loop.
    """

    def __init__(self, eqn: _jax.JaxprEqn) -> None:
        n_consts, n_carry = _jax.scan_arity(eqn)
        self.eqn = eqn
        self.body = _jax.open_jaxpr(eqn.params["jaxpr"])
        self.length: int = eqn.params["length"]
        self.sliced = eqn.invars[n_consts + n_carry :]
        self.stacked = eqn.outvars[n_carry:]
        self.elements: list[list[Atom]] = [[None] * self.length for _ in self.stacked]
        self._consts = eqn.invars[:n_consts]
        self._carry = list(eqn.invars[n_consts : n_consts + n_carry])
        self._final = eqn.outvars[:n_carry]

    def iterations(self) -> Iterator[tuple[int, list[_jax.Var], Inlined]]:
        """Yield for each iteration its place in the stacks, its slices, and the body that reads them."""
        order = range(self.length)
        for at in reversed(order) if self.eqn.params["reverse"] else order:
            n_before = len(self._consts) + len(self._carry)
            slices = [_jax.new_var(v.aval) for v in self.body.invars[n_before:]]
            results = [_jax.new_var(v.aval) for v in self.body.outvars]
            operands = [*self._consts, *self._carry, *slices]
            yield at, slices, Inlined(self._with(operands, results), self.body)
            self._carry = list(results[: len(self._carry)])
            for elements, v in zip(self.elements, results[len(self._carry) :]):
                elements[at] = v

    def slice_of(self, stack: Atom, at: int, result: _jax.Var) -> Inlined:
        """Return the slice of a stack that an iteration reads."""
        jaxpr = _traced(lambda xs: jax.lax.index_in_dim(xs, at, keepdims=False), [stack.aval])
        return Inlined(self._with([stack], [result]), jaxpr)

    def stack_of(self, number: int) -> Inlined:
        """Return the stack of a result of all iterations."""
        elements, result = self.elements[number], self.stacked[number]
        aval = result.aval
        stack = (
            (lambda *ys: jnp.stack(ys)) if elements else (lambda: jnp.empty(aval.shape, aval.dtype))
        )
        return Inlined(self._with(elements, [result]), _traced(stack, [v.aval for v in elements]))

    def final(self) -> Inlined:
        """Return the equation that copies the last carry to the loop's results."""
        copies = [_jax.new_var(v.aval) for v in self._final]
        like = _traced(lambda: (), [])
        same = _jax.jaxpr_of(copies, copies, [], like)
        return Inlined(self._with(self._carry, self._final), same)

    def _with(self, invars: Sequence[Atom], outvars: Sequence[Atom]) -> _jax.JaxprEqn:
        return self.eqn.replace(invars=list(invars), outvars=list(outvars))


def _traced(f: Callable, avals: Sequence[Aval]) -> _jax.Jaxpr:
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    jaxpr, _, _ = _jax.trace_call(f, *types)
    return jaxpr
