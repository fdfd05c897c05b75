"""Loops whose stacks and first carries are arrays of their own.

A `scan` writes the values that it stacks into an array of zeros, and a loop that adds up gradients starts
from zeros, too. Compilers merge such constant arrays of one type: the array is made at the beginning of the
program, copied for each loop, often at once, and kept until the last of the loops starts. In a program with
a loop in every layer that is one more stack of each type all the time, or one for each loop.

Here a loop carries its stacks, and each of its constant arrays is made of a number that passes a barrier
together with an operand of the loop. So compilers can neither merge the arrays of two loops nor make them
before this operand.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
from jax import lax

from remat import _jax
from remat.aliases import Array, Aval
from remat.ir import jaxprs
from remat.ir.equations import fills_array, is_region
from remat.ir.rewriting import Rewriting, with_equations
from remat.planner.traced_loops import bind_scan, equations_of, with_rows
from remat.transform.primitive import fenced_inputs

# Primitives whose jaxprs are computations of their own, in which arrays are made.
_WITH_COMPUTATIONS = ("scan", "while", "cond")

# What compilers merge constant arrays by.
Type = tuple[tuple[int, ...], str]


def with_own_arrays(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a jaxpr in which no two loops share the constant arrays that they start from.

    Loops that a region recomputes, behind its barrier, share theirs with none at all: a compiler would make
    them at the beginning of the program.
    """
    return _OwnArrays().program(jaxpr)


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A scan, and the constants of its jaxpr: the numbers that fill arrays, by the arrays' variables."""

    eqn: _jax.JaxprEqn
    constants: Mapping[_jax.Var, Array]

    @property
    def stacks(self) -> list[_jax.Var]:
        _, n_carry = _jax.scan_arity(self.eqn)
        return list(self.eqn.outvars[n_carry:])

    @property
    def carry(self) -> list[_jax.Var]:
        """Return the constant arrays that the loop's carry starts from."""
        n_consts, n_carry = _jax.scan_arity(self.eqn)
        carry = self.eqn.invars[n_consts : n_consts + n_carry]
        return [v for v in carry if _jax.is_var(v) and v in self.constants]

    @property
    def types(self) -> list[Type]:
        """Return the types of the constant arrays that the loop starts from."""
        return [_type(v.aval) for v in (*self.stacks, *self.carry) if _is_array(v.aval)]

    @property
    def operands(self) -> list[_jax.Var]:
        """Return the arrays beside which constants may pass a barrier."""
        return [
            v
            for v in self.eqn.invars
            if _jax.is_var(v) and v not in self.constants and _is_array(v.aval)
        ]


def _type(aval: Aval) -> Type:
    return aval.shape, str(aval.dtype)


def _is_array(aval: Aval) -> bool:
    """Return whether a type is that of an array on the device that any array of numbers can replace."""
    return (
        isinstance(aval, _jax.ShapedArray)
        and (jnp.issubdtype(aval.dtype, jnp.number) or aval.dtype == jnp.bool_)
        and not _jax.is_on_host(aval)
        and not _jax.varying_axes(aval)
    )


def _constants(jaxpr: _jax.Jaxpr) -> dict[_jax.Var, Array]:
    """Return the numbers that fill constant arrays, by the arrays' variables."""
    return {
        eqn.outvars[0]: eqn.invars[0].val
        for eqn in jaxpr.eqns
        if fills_array(eqn) and _is_array(eqn.outvars[0].aval)
    }


def _loops(jaxpr: _jax.Jaxpr) -> Iterator[_Loop]:
    """Yield the loops that run in the same computation."""
    constants = _constants(jaxpr)
    for eqn in jaxpr.eqns:
        if _jax.scan_body(eqn) is not None:
            yield _Loop(eqn, constants)
        elif is_region(eqn):
            for body in jaxprs.bodies_of(eqn):
                yield from _loops(_jax.open_jaxpr(body))


def _has_loops(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether there is a scan at any depth."""
    return any(_jax.scan_body(eqn) is not None for eqn in jaxprs.equations(jaxpr, jaxprs.bodies_of))


class _OwnArrays(Rewriting):
    def equations(self, jaxpr: _jax.Jaxpr) -> Sequence[_jax.JaxprEqn]:
        if not _has_loops(jaxpr):
            return jaxpr.eqns
        counts = collections.Counter(t for loop in _loops(jaxpr) for t in loop.types)
        return self._written(jaxpr, {t for t, n in counts.items() if n > 1}, {})

    def _written(
        self, jaxpr: _jax.Jaxpr, shared: set[Type], inputs: Mapping[_jax.Var, int]
    ) -> list[_jax.JaxprEqn]:
        depth, constants = _depths(jaxpr, inputs), _constants(jaxpr)
        eqns: list[_jax.JaxprEqn] = []
        for eqn in jaxpr.eqns:
            if is_region(eqn):
                eqns.append(self._region(eqn, shared, depth))
                continue
            if eqn.primitive.name in _WITH_COMPUTATIONS:
                eqn = self.within(eqn)
            loop = None if _jax.scan_body(eqn) is None else _Loop(eqn, constants)
            if loop is None or eqn.effects or shared.isdisjoint(loop.types) or not loop.operands:
                eqns.append(eqn)
            else:
                eqns += _carrying(loop, shared, depth)
        return eqns

    def _region(
        self, eqn: _jax.JaxprEqn, shared: set[Type], depth: Mapping[_jax.Var, int]
    ) -> _jax.JaxprEqn:
        (body,) = jaxprs.bodies_of(eqn)
        opened = _jax.open_jaxpr(body)
        if not _has_loops(opened):
            return eqn
        inputs = _depths_inside(eqn, opened, depth)
        own = {t for loop in _loops(opened) for t in loop.types} if any(inputs.values()) else set()
        new = with_equations(opened, self._written(opened, shared | own, inputs))
        return eqn if new is opened else jaxprs.replace_body(eqn, body, new)


def _depths(jaxpr: _jax.Jaxpr, inputs: Mapping[_jax.Var, int]) -> dict[_jax.Var, int]:
    """Return how many equations, one after the other, lead to each value; `inputs` have the given numbers."""
    depth = dict(inputs)
    for eqn in jaxpr.eqns:
        before = max((depth.get(v, 0) for v in eqn.invars if _jax.is_var(v)), default=0)
        depth.update(dict.fromkeys(eqn.outvars, before + 1))
    return depth


def _depths_inside(
    eqn: _jax.JaxprEqn, body: _jax.Jaxpr, depth: Mapping[_jax.Var, int]
) -> dict[_jax.Var, int]:
    """Return the depths of a region's inputs. Those that pass its barrier are as late as the last of them."""
    fenced = fenced_inputs(eqn.params["prevent_cse"], len(eqn.invars))
    outside = [depth.get(v, 0) if _jax.is_var(v) else 0 for v in eqn.invars]
    last = 1 + max((d for d, passes in zip(outside, fenced) if passes), default=0)
    depths = (last if passes else d for d, passes in zip(outside, fenced))
    return dict(zip(body.invars, depths, strict=True))


def _carrying(loop: _Loop, shared: set[Type], depth: Mapping[_jax.Var, int]) -> list[_jax.JaxprEqn]:
    """Return equations in place of a loop, which carries its stacks of the shared types."""
    eqn = loop.eqn
    n_consts, n_carry = _jax.scan_arity(eqn)
    moves = [_is_array(v.aval) and _type(v.aval) in shared for v in loop.stacks]
    moved = [v for v, is_moved in zip(loop.stacks, moves) if is_moved]
    others = [v for v, is_moved in zip(loop.stacks, moves) if not is_moved]
    carry = [v for v in dict.fromkeys(loop.carry) if _type(v.aval) in shared]
    step = _carrying_step(eqn, moves)
    latest = max(loop.operands, key=lambda v: depth.get(v, 0))
    invars = list(dict.fromkeys(v for v in eqn.invars if _jax.is_var(v)))
    numbers = [*(0 for _ in moved), *(loop.constants[v] for v in carry)]

    def run(args: Sequence[Array]) -> list[Array]:
        known = dict(zip(invars, args))
        types = [v.aval for v in (*moved, *carry)]
        scalars = [jnp.asarray(x, t.dtype) for x, t in zip(numbers, types)]
        scalars, known[latest] = lax.optimization_barrier((scalars, known[latest]))
        arrays = [_jax.filled(t, x) for x, t in zip(scalars, types)]
        known.update(zip(carry, arrays[len(moved) :]))
        given = [known[v] if _jax.is_var(v) else v.val for v in eqn.invars]
        length = eqn.params["length"]
        first = jnp.int32(length - 1 if eqn.params["reverse"] else 0)
        args = [*given[:n_consts], first, *arrays[: len(moved)], *given[n_consts:]]
        return bind_scan(eqn, step, args, n_consts, 1 + len(moved) + n_carry, length)[1:]

    return equations_of(run, invars, [*moved, *eqn.outvars[:n_carry], *others], eqn)


def _carrying_step(eqn: _jax.JaxprEqn, moves: Sequence[bool]) -> _jax.Jaxpr:
    """Return the step of a loop that takes and returns, before its carry, a row and the moved stacks."""
    body = _jax.scan_body(eqn)
    assert body is not None
    n_consts, n_carry = _jax.scan_arity(eqn)
    next_row = -1 if eqn.params["reverse"] else 1
    stacks = [v.aval for v, is_moved in zip(eqn.outvars[n_carry:], moves) if is_moved]
    ys = body.outvars[n_carry:]
    moved = [y for y, is_moved in zip(ys, moves) if is_moved]
    others = [y for y, is_moved in zip(ys, moves) if not is_moved]

    def written(args: Sequence[Array]) -> list[Array]:
        row, before, values = args[0], args[1 : 1 + len(stacks)], args[1 + len(stacks) :]
        return [row + next_row, *with_rows(before, row, values)]

    row = _jax.ShapedArray((), jnp.dtype("int32"))
    taken = [_jax.new_var(aval) for aval in (row, *stacks)]
    given = [_jax.new_var(aval) for aval in (row, *stacks)]
    writes = equations_of(written, [*taken, *moved], given, eqn)
    return _jax.jaxpr_of(
        [*body.invars[:n_consts], *taken, *body.invars[n_consts:]],
        [*given, *body.outvars[:n_carry], *others],
        [*body.eqns, *writes],
        body,
    )
