"""A step's program with copies of values in the host's memory, outside of loops.

A value that is used again much later is copied to the host's memory when it is computed, and copied back
before that use. Two things make this work in unrolled code (both measured on XLA for TPU):

* XLA's schedulers count a host buffer like one on the device, so a copy back seems to cost nothing and is
  scheduled as soon as its operands are available. Optimization barriers do not prevent that: they are
  removed before scheduling. Only data dependence does. So values of one type are rows of one stack, and the
  index of the row to read is a number *plus a zero that XLA cannot simplify*, which is computed from a value
  that must be available before the copy begins (`_zero`, `_wait`).
* The copy to the host is delayed for the same reason, until the value is read again. A barrier over the
  stack and a value that is used soon prevents that (`_hold`).

XLA for TPU postpones the gradients of weights, which read the copies, as far as its own limit of memory
allows. That limit is the device's memory; the compiler option
`xla_tpu_scheduler_percent_shared_memory_limit` lowers it.

A stack has at least two rows, since XLA would replace a slice of a single row by the stack itself.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from remat import _jax
from remat.aliases import Array, Atom, Aval
from remat.errors import PlanError
from remat.ir import jaxprs
from remat.ir.equations import fusion_of, has_effects, is_repeatable, transparent_call
from remat.ir.operations import Fusion
from remat.planner.plan_decisions import HostCopy as HostCopy
from remat.planner.traced_loops import new_stack

_jax.exclude_from_tracebacks(__file__)

_LEAST_ROWS = (
    2  # of a stack: in a stack of one row XLA knows the index and copies it back too early
)


def stack_rows(avals: Iterable[Aval]) -> dict[str, int]:
    """Return the number of rows of each stack that holds values of these types."""
    counts = collections.Counter(str(aval) for aval in avals)
    return {key: max(_LEAST_ROWS, n) for key, n in counts.items()}


def with_host_copies(
    jaxpr: _jax.Jaxpr, copies: Sequence[HostCopy], places: Mapping[int, int]
) -> _jax.Jaxpr:
    """Return a program that copies values to the host's memory and back.

    Args:
      jaxpr: flat, without dead equations.
      copies: the values to copy, and when.
      places: the place of each equation, by its number in `copies`.

    Raises:
      PlanError: the program has no such values or equations, or they are in another order.
    """
    placed = [_placed(copy, jaxpr, places) for copy in copies]
    return _Writer(jaxpr, placed).written()


def _placed(copy: HostCopy, jaxpr: _jax.Jaxpr, places: Mapping[int, int]) -> HostCopy:
    """Return a copy whose numbers are places in the program."""
    numbers = (copy.equation, copy.there, copy.after, copy.before, *copy.again)
    unknown = [n for n in numbers if n not in places]
    if unknown:
        raise PlanError(
            f"the plan copies a value of equation {copy.equation} to the host's memory, and names equation "
            f"{unknown[0]}, which the step does not have. Remove that copy, or plan again."
        )
    eqn = jaxpr.eqns[places[copy.equation]]
    named = f"the plan copies result {copy.result} of equation {copy.equation} to the host's memory, but"
    if copy.result >= len(eqn.outvars) or _jax.is_dropped(eqn.outvars[copy.result]):
        raise PlanError(f"{named} the equation has no such result. Remove that copy.")
    if not _jax.can_be_on_host(eqn.outvars[copy.result].aval):
        raise PlanError(f"{named} it is a random key, or no array on the device. Remove that copy.")
    first, there, after, before = (places[n] for n in numbers[:4])
    if not first <= there <= after < before:  # loops that are rewritten may move equations
        raise PlanError(
            f"{named} equations {copy.equation}, {copy.there} (there), {copy.after} (after) and "
            f"{copy.before} (before) must follow one another in the step. Remove that copy."
        )
    at = dataclasses.replace(
        copy,
        equation=places[copy.equation],
        there=places[copy.there],
        after=places[copy.after],
        before=places[copy.before],
        again=tuple(sorted(places[n] for n in copy.again)),
    )
    wrong = [n for n in copy.again if places[n] >= at.before]
    if wrong:
        raise PlanError(
            f"{named} equation {wrong[0]}, which is to be recomputed from the copy, is not before "
            f"equation {copy.before}. Remove that copy."
        )
    for n in copy.again:
        if not is_repeatable(jaxpr.eqns[places[n]]):
            raise PlanError(
                f"{named} equation {n} cannot be recomputed from the copy: it has other effects or "
                "gives another result. Remove that copy."
            )
    return at


class _Writer:
    """Writes a program's equations in order, with copies in between."""

    def __init__(self, jaxpr: _jax.Jaxpr, copies: Sequence[HostCopy]) -> None:
        self.jaxpr = jaxpr
        self.eqns: list[_jax.JaxprEqn] = []
        self.values = [jaxpr.eqns[c.equation].outvars[c.result] for c in copies]
        self.stored: dict[int, list[int]] = {}  # copies by the place of the value's equation
        self.there: dict[int, list[int]] = {}  # copies by the place whose result waits for them
        self.fetched: dict[int, list[int]] = {}  # copies by the place after which they are read
        self.read: dict[int, list[int]] = {}  # copies by the place from which they are read
        for k, copy in enumerate(copies):
            self.stored.setdefault(copy.equation, []).append(k)
            self.there.setdefault(copy.there, []).append(k)
            self.fetched.setdefault(copy.after, []).append(k)
            self.read.setdefault(copy.before, []).append(k)
        self.copies = copies
        self.leads_on = _leads_on(jaxpr)
        self.outvars = {v for v in jaxpr.outvars if _jax.is_var(v)}
        self.n_rows = stack_rows(v.aval for v in self.values)
        self.stacks: dict[str, _jax.Var] = {}  # the newest variable of each stack
        self.taken: collections.Counter[str] = collections.Counter()
        self.row: dict[int, int] = {}
        #: The variable that has each value's copy, once it is read.
        self.names: dict[_jax.Var, Atom] = {}
        self.copied: dict[int, Atom] = {}
        self.zero: Atom = None
        self.waited = 0  # the place up to which `zero` waits for everything

    def written(self) -> _jax.Jaxpr:
        for place, eqn in enumerate(self.jaxpr.eqns):
            self._read_copies(place)
            self.eqns.append(jaxprs.renamed(eqn, self.names))
            for k in self.stored.get(place, ()):
                self._store(k, eqn)
            if place in self.there:
                self._hold(eqn, {str(self.values[k].aval) for k in self.there[place]})
            if place in self.fetched:
                self._wait(place)
            for k in self.fetched.get(place, ()):
                self._fetch(k, eqn)
        new = _jax.jaxpr_of(self.jaxpr.invars, self.jaxpr.outvars, self.eqns, self.jaxpr)
        alive, _ = _jax.dce(new, [True] * len(new.outvars), keep=[True] * len(new.invars))
        return alive

    def _store(self, k: int, like: _jax.JaxprEqn) -> None:
        v = self.values[k]
        key = str(v.aval)
        if key not in self.stacks:
            on_host = v.aval.update(memory_space=jax.memory.Space.Host)
            (self.stacks[key],) = self._add(lambda: new_stack(on_host, self.n_rows[key]), (), like)
        row = self.row[k] = self.taken[key]
        self.taken[key] += 1
        (self.stacks[key],) = self._add(
            lambda stack, x: lax.dynamic_update_index_in_dim(
                stack, jax.device_put(x[None], jax.memory.Space.Host), row, 0
            ),
            (self.stacks[key], v),
            like,
        )

    def _hold(self, eqn: _jax.JaxprEqn, keys: set[str]) -> None:
        """Let the first result of an equation be used only after some stacks have been written."""
        v = eqn.outvars[0]
        if not _can_be_waited_for(v) or v in self.outvars:
            return
        held = sorted(keys)
        new = self._add(
            lambda *values: lax.optimization_barrier(values),
            (*(self.stacks[key] for key in held), jaxprs.look(self.names, v)),
            eqn,
        )
        self.stacks.update(zip(held, new))
        self.names[v] = new[-1]

    def _wait(self, place: int) -> None:
        """Make `zero` depend on the newest value on which later kernels depend."""
        newest: list[_jax.Var] = []
        like = self.jaxpr.eqns[place]
        for n in range(place, self.waited - 1, -1):
            eqn = self.jaxpr.eqns[n]
            if not has_effects(eqn) and fusion_of(eqn) in (Fusion.KERNEL, Fusion.REDUCE):
                newest = [v for v in eqn.outvars if v in self.leads_on and _can_be_waited_for(v)]
            if newest:
                break
        values = [jaxprs.look(self.names, v) for v in newest[:1]]
        earlier = [] if self.zero is None else [self.zero]
        if values or not earlier:
            (self.zero,) = self._add(
                lambda *xs: sum(map(_zero, xs), jnp.zeros((), jnp.int32)),
                [*values, *earlier],
                like,
            )
        self.waited = place + 1

    def _fetch(self, k: int, like: _jax.JaxprEqn) -> None:
        key, row = str(self.values[k].aval), self.row[k]
        (self.copied[k],) = self._add(
            lambda stack, zero: jax.device_put(
                lax.dynamic_index_in_dim(stack, row + zero, 0, keepdims=False),
                jax.memory.Space.Device,
            ),
            (self.stacks[key], self.zero),
            like,
        )

    def _read_copies(self, place: int) -> None:
        """Read the copies that are used from here on, and recompute from them what the plan says."""
        again: set[int] = set()
        for k in self.read.get(place, ()):
            self.names[self.values[k]] = self.copied[k]
            again.update(self.copies[k].again)
        for n in sorted(again):
            eqn = self.jaxpr.eqns[n]
            self.names.update((v, jaxprs.fresh(v)) for v in eqn.outvars if not _jax.is_dropped(v))
            self.eqns.append(jaxprs.renamed(eqn, self.names))

    def _add(self, fun: Callable, operands: Sequence[Atom], like: _jax.JaxprEqn) -> list[Atom]:
        """Append the equations of a function, marked as ones that must not be recomputed."""
        jaxpr, consts, _ = _jax.trace_call(fun, *(v.aval for v in operands))
        assert not consts
        jaxpr = jaxprs.inline_calls(jaxpr, transparent_call)
        eqns, results = jaxprs.inlined(jaxpr, operands, like)
        self.eqns += map(_jax.fixed, eqns)
        return results


def _can_be_waited_for(v: _jax.Var) -> bool:
    if _jax.is_dropped(v) or not _jax.can_be_on_host(v.aval):
        return False
    return v.aval.size > 0 and v.aval.dtype != jax.dtypes.float0


def _leads_on(jaxpr: _jax.Jaxpr) -> set[_jax.Var]:
    """Return the values that kernels read, also through what they compute inside."""
    found: set[_jax.Var] = set()
    for eqn in reversed(jaxpr.eqns):
        is_kernel = fusion_of(eqn) in (Fusion.KERNEL, Fusion.REDUCE)
        if is_kernel or not found.isdisjoint(eqn.outvars):
            found.update(v for v in eqn.invars if _jax.is_var(v))
    return found


def _zero(x: Array) -> Array:
    """Return zero, computed from the first element of an array in a way that XLA does not simplify."""
    first = lax.squeeze(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), range(x.ndim))
    if jnp.issubdtype(first.dtype, jnp.complexfloating):
        first = lax.real(first)
    if jnp.issubdtype(first.dtype, jnp.floating):
        bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[first.dtype.itemsize]
        first = lax.bitcast_convert_type(first, bits)
    last_bit = first.astype(jnp.uint32) & jnp.uint32(1)
    return (last_bit >> jnp.uint32(1)).astype(jnp.int32)
