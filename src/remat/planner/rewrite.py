"""Rewriting a step's jaxpr so that it recomputes where a schedule does.

A step is one flat jaxpr, already differentiated: calls are inlined, loops and branches are single
equations. Its equations are numbered in order. A schedule computes each of them in this order, and
recomputes some of them, in bursts. `Decisions` says before which equation each burst stands and which
equations it recomputes.

A burst and the equations that it serves become one *unit*: an equation of the library's primitive,
which `transform/barrier.py` protects from being merged with the first computation or started early.
A unit takes the values that it reads from memory and returns those that are used after it. Values that
a compiler computes inside the kernels that use them (all that `Decisions.stored` does not list) are
computed again in each unit.

A unit's barrier leaves out an argument of the program if everything that reads it also reads a value that
passes the barrier, and so waits anyway. A compiler would copy arguments in the barrier that are updated in
place, such as a loop's carry. If arguments are sharded, the barrier includes them all: the partitioner may
gather one, which is an operation on it that a compiler could start early (`Decisions.fences_arguments`).

A unit also takes the scalars that fill its constant arrays, and those that it combines arrays with, where
that changes no bit (`ir.numbers`). Otherwise a compiler could make such an array when the program starts, or
share one between units, and keep it in memory throughout: XLA for CPU does so from jaxlib 0.12 on if sums in
two units read it.

A unit must not start before the schedule reaches it. Usually it takes a value that was computed just
before, such as a cotangent. If it takes none, a value that was computed recently, its *trigger*, is passed
through it: later equations read the unit's result in place of the value, so that the unit must have begun.

Compilers may reorder the equations of a unit, and those between units, and may keep more values alive than
the schedule does: for example matrix products of the inputs of all time steps, which could all run at once.
If `Decisions.ordered` is set, further units begin (`unit_starts`). If `Decisions.separated` is set, further
units begin only where a compiler would store a value for several kernels that the schedule does not store.
Compilers also compute a sum of many values in one kernel, which keeps all these values until the last one is
computed; a new unit after each of `Decisions.partial_sums` frees them earlier.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat import _jax, garbage
from remat.aliases import Array, Arrays, Atom, PyTree, TreeDef
from remat.ir import jaxprs
from remat.ir.carries import without_redundant_carries
from remat.ir.equations import divides_by_number, fills_array, has_effects, transparent_call
from remat.ir.numbers import reciprocal, unsimplified_numbers
from remat.ir.repetitions import without_repeated
from remat.ir.restriction import has_marks, restricted, without_marks
from remat.ir.swapped import with_swapped_products
from remat.ir.updates import with_early_updates
from remat.planner.traced_loops import equations_of
from remat.planner.unit_starts import separated_starts, unit_starts, workspace_bytes
from remat.program.from_jaxpr import n_bytes
from remat.program.fusion import Fused
from remat.program.products import transposed_operands
from remat.program.program import Program
from remat.solvers.simulate import Step
from remat.transform.primitive import region_equation
from remat.units import counted

_jax.exclude_from_tracebacks(__file__)


@dataclasses.dataclass(frozen=True)
class Burst:
    """Consecutive recomputations.

    Args:
      before: the number of the equation that is computed next for the first time.
      again: the numbers of the equations that are recomputed, in order.
    """

    before: int
    again: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Decisions:
    """What a flat program recomputes, and when.

    Args:
      stored: the numbers of the equations whose results are stored in memory. The results of other
        equations are computed inside of the kernels that use them.
      bursts: recomputations, in the order of the program.
      ordered: whether further units keep the schedule's order: one begins every few stored equations, and one
        wherever another order could exceed the peak (`unit_starts`). Before the first recomputation, units
        begin only at the latter places and at equations that depend on nothing recent.
      partial_sums: the numbers of stored equations after which a unit begins, so that their terms are
        not kept until the whole sum is computed in one kernel.
      fences_arguments: whether the barriers of units include all arguments of the program. If arguments are
        sharded, the partitioner may gather them, and only a barrier delays that.
      separated: whether further units begin where a value that is not stored is computed again for an
        equation that depends on the former one (`unit_starts.separated_starts`), and all units extend to the
        next one or to an equation with effects. A program is not both ordered and separated.
    """

    stored: frozenset[int]
    bursts: tuple[Burst, ...]
    ordered: bool = False
    partial_sums: tuple[int, ...] = ()
    fences_arguments: bool = False
    separated: bool = False

    def __repr__(self) -> str:
        stored, bursts = (
            counted(len(self.stored), "stored result"),
            counted(len(self.bursts), "burst"),
        )
        kind = ", ordered" if self.ordered else ", separated" if self.separated else ""
        return f"Decisions({stored}, {bursts}{kind})"

    @property
    def changes_nothing(self) -> bool:
        """Return whether the program stays as it is."""
        return not (self.bursts or self.partial_sums or self.ordered or self.separated)

    @property
    def by_start(self) -> dict[int, tuple[int, ...]]:
        """Return what each unit recomputes, by the number of its first new equation."""
        after_sums = {i + 1: () for i in self.partial_sums}
        return after_sums | {burst.before: burst.again for burst in self.bursts}


def decisions_of(
    program: Program,
    fused: Fused,
    steps: Iterable[Step],
    *,
    ordered: bool = False,
    recomputes_costly: bool = False,
    fences_arguments: bool = False,
    separated: bool = False,
) -> Decisions:
    """Return the decisions of a schedule of a fused program.

    Args:
      program, fused: the program and its graph.
      steps: the schedule.
      ordered, fences_arguments, separated: as in `Decisions`.
      recomputes_costly: whether costly values, such as exponentials, are among those that are not stored.
        Compilers would store these for kernels far from each other, so the program is ordered even without
        bursts.
    """
    producer = {v: i for i, op in enumerate(program.ops) for v in op.results}
    members: dict[int, set[int]] = {}
    for value, node in fused.holds.items():
        members.setdefault(node, set()).add(producer[value])
    seen: set[int] = set()
    bursts: list[Burst] = []
    burst: list[int] = []
    begun: set[int] = set()  # operations that have run for one of their nodes; some have several
    now: dict[int, int] = {}  # for each operation of the burst the node for which it runs
    for kind, node in steps:
        if kind != "compute" or (node >= len(program.ops) and node not in members):
            continue
        here = sorted(members.get(node, {node}))
        if node in seen:
            # An operation computes all of its results when it runs for one of them.
            burst += [i for i in here if now.setdefault(i, node) == node]
            continue
        seen.add(node)
        is_begun = not begun.isdisjoint(here)
        begun.update(here)
        if burst and not is_begun:
            now = {}
            bursts.append(Burst(here[0], tuple(burst)))
            burst = []
    if not (bursts or fused.partial_sums or recomputes_costly or separated):
        return Decisions(frozenset(), ())
    stored = {i for group in members.values() for i in group}
    # A value that must not be recomputed is not computed inside the kernels that use it, either.
    stored.update(i for i, op in enumerate(program.ops) if not op.repeatable)
    return Decisions(
        frozenset(stored),
        tuple(bursts),
        (ordered and bool(bursts)) or recomputes_costly,
        tuple(sorted(fused.partial_sums)),
        fences_arguments,
        separated,
    )


@garbage.paused()
def flattened(jaxpr: _jax.Jaxpr, donated: Iterable[int] = ()) -> _jax.Jaxpr:
    """Return a step's jaxpr with plain calls inlined, without dead or repeated equations; its inputs stay.

    Calls with shardings or layouts of their own, checkpoints and functions with derivative
    rules stay single equations. Repeated equations are merged, as compilers would, unless such equations
    or barriers separate them. Products that are transposed have swapped operands (`ir.swapped`). Loops carry
    no array that never changes or that equals another one (`ir.carries`). Donated arguments are updated as
    soon as possible (`ir.updates`). If functions are marked, all equations outside of them are fixed
    (`ir.restriction`) and keep their order.

    Args:
      jaxpr: the step.
      donated: the places of the inputs that are donated.
    """
    flat = without_repeated(jaxprs.inline_calls(jaxpr, transparent_call))
    flat = without_redundant_carries(flat)
    alive, _ = _jax.dce(flat, [True] * len(flat.outvars), keep=[True] * len(flat.invars))
    alive = with_swapped_products(alive)
    if has_marks(alive):
        return restricted(alive)
    places = set(donated)
    return with_early_updates(alive, [at in places for at in range(len(alive.invars))])


def following(
    step: Callable,
    change: Callable[[_jax.Jaxpr], _jax.Jaxpr],
    donated: Iterable[int] = (),
) -> Callable:
    """Return a function that runs the step's flat jaxpr after `change` was applied to it.

    Call it under `jax.jit` only: arguments that are not traced there are static.

    Args:
      step: the step.
      change: maps the flat jaxpr to one that computes the same.
      donated: the donated arguments, counted as leaves of all arguments that are not static.
    """

    @_jax.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        return traced_flat(step, args, kwargs, donated).changed(change)

    return run


@dataclasses.dataclass(frozen=True, repr=False)
class TracedCall:
    """A call of a step under `jax.jit`, traced as a flat jaxpr.

    Args:
      jaxpr: takes `consts`, then `arrays`.
      consts: the values that the step closes over.
      arrays: the arguments that are traced.
      out_tree: the structure of the step's result.
    """

    jaxpr: _jax.Jaxpr
    consts: Sequence[Array]
    arrays: Sequence[Array]
    out_tree: TreeDef

    def changed(self, change: Callable[[_jax.Jaxpr], _jax.Jaxpr]) -> PyTree:
        """Return the step's result, computed by its jaxpr after `change` was applied to it."""
        new = change(self.jaxpr)
        return self.called(without_marks(new) if has_marks(self.jaxpr) else new)

    def called(self, jaxpr: _jax.Jaxpr) -> PyTree:
        """Return the step's result, computed by another jaxpr with the same inputs."""
        outs = _jax.eval_jaxpr(jaxpr, (), *self.consts, *self.arrays)
        return jax.tree.unflatten(self.out_tree, outs)


def traced_flat(
    step: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    donated: Iterable[int],
    on_device: Collection[int] = (),
) -> TracedCall:
    """Trace a step for the arguments of a call under `jax.jit`.

    Args:
      step: the step.
      args, kwargs: the call's arguments. Those that are not traced are static.
      donated: as for `following`.
      on_device: arguments in the host's memory that are traced as arrays on the device, counted as `donated`.
    """
    leaves, tree = jax.tree.flatten((args, dict(kwargs)))
    traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _jax.Tracer)]

    def of_traced(*arrays: Array) -> Arrays:
        full = list(leaves)
        for i, array in zip(traced, arrays):
            full[i] = array
        args, kwargs = jax.tree.unflatten(tree, full)
        return step(*args, **kwargs)

    arrays = [leaves[i] for i in traced]
    types = [
        array.aval.update(memory_space=jax.memory.Space.Device) if i in on_device else array
        for i, array in enumerate(arrays)
    ]
    jaxpr, consts, out = _jax.trace_call(of_traced, *types)
    jaxpr, more = _jax.hoist_constants(jaxpr)
    consts = [*more, *consts]
    flat = flattened(jaxpr, [len(consts) + leaf for leaf in donated])
    return TracedCall(flat, consts, arrays, jax.tree.structure(out))


def rewritten(jaxpr: _jax.Jaxpr, decisions: Decisions) -> _jax.Jaxpr:
    """Return the jaxpr of a step that computes the same and follows the decisions.

    Args:
      jaxpr: flat, without dead equations and without constants.
      decisions: about the jaxpr's equations, by number.
    """
    if decisions.changes_nothing:
        return jaxpr
    return _Writer(jaxpr, decisions).written()


def rewritten_in_two(
    jaxpr: _jax.Jaxpr, decisions: Decisions, n_first: int
) -> tuple[list[_jax.JaxprEqn], list[_jax.JaxprEqn], list[Atom]]:
    """Return the equations of a program that follows the decisions, in two parts, and its results.

    The second part begins with the given equation, and with what is recomputed before it. Values that
    are not stored do not pass from the first part to the second.

    Args:
      jaxpr: flat, without dead equations and without constants.
      decisions: about the jaxpr's equations, by number.
      n_first: the number of the first equation of the second part.
    """
    writer = _Writer(jaxpr, decisions, n_first)
    outvars = writer.write()
    return writer.eqns[: writer.n_before], writer.eqns[writer.n_before :], outvars


class _Writer:
    """Writes a program's equations in order, with units in between."""

    def __init__(self, jaxpr: _jax.Jaxpr, decisions: Decisions, n_first: int | None = None) -> None:
        self.jaxpr = jaxpr
        self.n_first = len(jaxpr.eqns) if n_first is None else n_first
        self.n_before = 0  # new equations before those of the second part
        self.is_second = False  # whether the second part has begun
        self.stored = decisions.stored
        #: Whether all units extend to the next one.
        self.extends = decisions.ordered or decisions.separated
        bursts = decisions.by_start
        #: By the number of an equation: the units that begin before it, each as the equations it recomputes.
        self.units = {number: [again] for number, again in bursts.items()}
        if decisions.ordered:
            self.units = unit_starts(jaxpr, decisions.stored, bursts)
        elif decisions.separated:
            self.units = separated_starts(jaxpr, decisions.stored, bursts)
        #: The arguments that barriers may leave out.
        self.arguments = frozenset(() if decisions.fences_arguments else jaxpr.invars)
        self.computed_once = self._computed_once({n for again in bursts.values() for n in again})
        self.producer = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self.last_use = self._last_uses()
        self.results = self._results_through_views()
        self.inner_before = self._inner_before()
        self.eqns: list[_jax.JaxprEqn] = []
        #: The variable that has the latest computation of each stored value.
        self.current: dict[_jax.Var, _jax.Var] = {}
        #: The stored values by the variable that has them. Several have one: the results of a view.
        self.held: dict[_jax.Var, list[_jax.Var]] = {}
        #: The equations whose results may serve as triggers, in order; dead ones are removed as met.
        self.triggers: list[int] = []
        #: The results of the first part, once it ends.
        self.first_results: dict[_jax.Var, _jax.Var] = {}
        #: Equations outside of units, by their number and operands.
        self.outside: dict[tuple[Any, ...], Sequence[_jax.Var]] = {}
        #: The variables of values outside of units that are not stored, until a unit changes their operands.
        self.derived: dict[_jax.Var, _jax.Var] = {}
        #: The variables that have the values of literals, by the literals' types and bytes.
        self.numbers: dict[tuple[Any, bytes], _jax.Var] = {}
        #: By the number of an equation, the places of the literals that pass the barriers of units.
        self.passed_numbers = unsimplified_numbers(jaxpr)
        #: For each variable of the new program, the number of the latest equation it depends on.
        self.latest: dict[_jax.Var, int] = {}

    def written(self) -> _jax.Jaxpr:
        outvars = self.write()
        new = _jax.jaxpr_of(self.jaxpr.invars, outvars, self.eqns, self.jaxpr)
        alive, _ = _jax.dce(new, [True] * len(outvars), keep=[True] * len(new.invars))
        return alive

    def write(self) -> list[Atom]:
        """Write all equations; return the results."""
        n_eqns = len(self.jaxpr.eqns)
        starts = sorted({*self.units, self.n_first})
        after = dict(itertools.pairwise([*starts, n_eqns]))
        at = 0
        while at < n_eqns:
            # `_unit` may end at once, before an equation with effects; then this equation is visited again.
            if at >= self.n_first and not self.is_second:
                self._begin_second()
            if at in self.units:
                at = self._unit(at, after[at])
                continue
            if at in self.stored or has_effects(self.jaxpr.eqns[at]):
                self._compute(at)
            at += 1
        if not self.is_second:
            self._begin_second()
        return [
            self.first_results.get(v) or self._outside(v) if _jax.is_var(v) else v
            for v in self.jaxpr.outvars
        ]

    def _begin_second(self) -> None:
        # The first part returns its own results: what the second computes again is not there yet.
        self.first_results = {
            v: self._outside(v)
            for v in self.jaxpr.outvars
            if _jax.is_var(v) and self.producer.get(v, self.n_first) < self.n_first
        }
        self.is_second = True
        self.n_before = len(self.eqns)
        self.outside.clear()
        self.derived.clear()
        self.numbers.clear()

    # Outside of units

    def _compute(self, number: int) -> None:
        """Compute an equation for the first time, outside of units."""
        eqn = self.jaxpr.eqns[number]
        outs = self._emit(number, [self._outside(v) for v in eqn.invars])
        self._hold(zip(eqn.outvars, outs))

    def _hold(self, computed: Iterable[tuple[_jax.Var, _jax.Var]]) -> None:
        """Note the variables that have the latest computations of stored values."""
        for v, variable in computed:
            self.current[v] = variable
            self.held.setdefault(variable, []).append(v)
            at = bisect.bisect_left(self.triggers, self.producer[v])
            if self.triggers[at : at + 1] != [self.producer[v]]:
                self.triggers.insert(at, self.producer[v])

    def number(self, literal: Atom, like: _jax.JaxprEqn) -> _jax.Var:
        """Return a variable that has the value of a literal, which a unit can take."""
        key = literal.aval, np.asarray(literal.val).tobytes()
        if key not in self.numbers:
            v = _jax.new_var(literal.aval)
            self.eqns += equations_of(lambda args: [jnp.copy(args[0])], [literal], [v], like)
            self.numbers[key] = v
        return self.numbers[key]

    def _emit(self, number: int, operands: Sequence[Atom]) -> Sequence[_jax.Var]:
        eqn, outs = _copy(self.jaxpr.eqns[number], operands)
        self.eqns.append(eqn)
        latest = max([number, *(self.latest.get(v, -1) for v in operands if _jax.is_var(v))])
        self.latest.update((v, latest) for v in outs)
        return outs

    def _outside(self, v: Atom) -> Atom:
        """Return the variable that has a value outside of units; compute it if it is not stored."""
        number = self.producer.get(v) if _jax.is_var(v) else None
        if number is None:
            return v
        if v in self.current:
            return self.current[v]
        if v in self.derived:
            return self.derived[v]
        eqn = self.jaxpr.eqns[number]
        operands = [self._outside(x) for x in eqn.invars]
        key = (number, *(x if _jax.is_var(x) else id(x) for x in operands))
        if key not in self.outside:
            self.outside[key] = self._emit(number, operands)
        self.derived.update(zip(eqn.outvars, self.outside[key]))
        return self.derived[v]

    # Units

    def _unit(self, start: int, end: int) -> int:
        """Write the unit of the burst before an equation; return the first equation after the unit.

        The unit ends before `end`, where the next burst stands, and before the first equation with
        effects. Unless the program is ordered or separated, the last unit ends with the last equation that
        reads a value of its burst.
        """
        *before, again = self.units.pop(start)
        for numbers in before:
            self._append(self._recomputing(numbers), start)
        unit = self._recomputing(again)
        fresh = {v for number in again for v in self.jaxpr.eqns[number].outvars}
        stop = start
        for number in range(start, end):
            eqn = self.jaxpr.eqns[number]
            if has_effects(eqn):
                break
            if number in self.stored and (
                self.extends or end in self.units or self._reads(eqn, fresh)
            ):
                stop = number + 1
        for number in range(start, stop):
            if number in self.stored:
                unit.compute(number)
        if unit.eqns:
            self._append(unit, start)
        return stop

    def _recomputing(self, numbers: Iterable[int]) -> _Unit:
        unit = _Unit(self)
        for number in numbers:
            unit.compute(number)
        return unit

    def _reads(self, eqn: _jax.JaxprEqn, values: set[_jax.Var]) -> bool:
        """Return whether an equation reads one of these values, also through values not stored."""
        stack = [v for v in eqn.invars if _jax.is_var(v)]
        seen: set[_jax.Var] = set()
        while stack:
            v = stack.pop()
            if v in values:
                return True
            number = self.producer.get(v)
            if number is not None and number not in self.stored and v not in seen:
                seen.add(v)
                stack += [x for x in self.jaxpr.eqns[number].invars if _jax.is_var(x)]
        return False

    def _append(self, unit: _Unit, start: int) -> None:
        """Append a unit's equation, with a value passed through it if it could start too early."""
        passed = self._trigger(start, unit.inputs)
        if passed is not None:
            unit.take(passed)
        operands = list(unit.inputs)
        results = [*unit.local.values(), *([] if passed is None else [passed])]
        outvars = [_jax.new_var(v.aval) for v in results]
        body = _jax.jaxpr_of(operands, results, unit.eqns, self.jaxpr)
        like = _jax.without_scopes(self.jaxpr.eqns[start])
        fenced = self._fenced(unit, passed)
        self.eqns.append(
            region_equation(
                operands,
                outvars,
                body,
                like=like,
                differentiated=True,
                prevent_cse=all(fenced) or fenced,
            )
        )
        latest = max([unit.last, *(self.latest.get(v, -1) for v in operands)])
        self.latest.update((v, latest) for v in outvars)
        self._hold(zip(unit.local, outvars))
        self.derived.clear()
        if passed is not None:
            held = [v for v in self.held.pop(passed) if self.current[v] is passed]
            self._hold((v, outvars[-1]) for v in held)

    def _fenced(self, unit: _Unit, passed: _jax.Var | None) -> tuple[bool, ...]:
        """Return which inputs of a unit the barrier includes.

        It leaves out the program's own inputs if all their readers also read values that pass it: a loop or a
        step updates its carry or a donated argument in place, and a barrier over these costs copies.
        """
        late = {v for v in unit.inputs if v not in self.arguments or v is passed}
        included = set(late)
        # For each value that could be computed before the barrier: the inputs that it depends on.
        early = {v: {v} for v in unit.inputs if v not in late}
        for number, eqn in zip(unit.numbers, unit.eqns):
            read = [v for v in eqn.invars if _jax.is_var(v)]
            sources = set[_jax.Var]().union(*(early.get(v, ()) for v in read))
            is_early = late.isdisjoint(read)
            if is_early and (number in self.computed_once or not read):
                early.update(dict.fromkeys(eqn.outvars, sources))
                continue
            if is_early:
                included |= sources
            copied = [eqn.invars[at] for at in transposed_operands(eqn)]  # maybe early
            included.update(*(early.get(v, ()) for v in copied if _jax.is_var(v)))
            late.update(eqn.outvars)
        return tuple(v in included for v in unit.inputs)

    def _computed_once(self, again: Collection[int]) -> set[int]:
        """Return the equations whose results are computed inside of exactly one kernel.

        A compiler has no second computation of these to merge with.

        Args:
          again: the equations that bursts compute again.
        """
        readers: dict[_jax.Var, list[int]] = {}
        for number, eqn in enumerate(self.jaxpr.eqns):
            for v in filter(_jax.is_var, eqn.invars):
                readers.setdefault(v, []).append(number)
        results = set(filter(_jax.is_var, self.jaxpr.outvars))
        found: set[int] = set()
        for number, eqn in reversed(list(enumerate(self.jaxpr.eqns))):
            of_eqn = {reader for v in eqn.outvars for reader in readers.get(v, ())}
            if number in self.stored or len(of_eqn) != 1 or not results.isdisjoint(eqn.outvars):
                continue
            (reader,) = of_eqn
            if reader in found or (reader in self.stored and reader not in again):
                found.add(number)
        return found

    def _trigger(self, start: int, inputs: Iterable[_jax.Var]) -> _jax.Var | None:
        """Return the value to pass through a unit; None if the unit cannot start too early.

        If a unit depends on a value, the compiler may run the unit at any time after that value is computed:
        before the equations in between, whose results are then live together with the unit's, and before
        they free their operands. The cost of a value is these bytes, and those of a copy if it is a result
        of the step or a part of one. The value of the least cost is chosen.
        """
        begun = max((self.latest.get(v, -1) for v in inputs), default=-1)
        best, least = None, math.inf
        at = bisect.bisect_left(self.triggers, start)
        # From the newest on: the bytes between an equation and the unit never fall.
        while at and self.triggers[at - 1] > begun:
            at -= 1
            number = self.triggers[at]
            inner = self._inner_bytes(number, start)
            if inner >= least:
                break
            alive = [v for v in self.jaxpr.eqns[number].outvars if self._can_trigger(v, start)]
            if not alive:
                del self.triggers[at]
            for v in alive:
                cost = inner + (n_bytes(v.aval) if v in self.results else 0)
                if cost < least:
                    best, least = v, cost
        if best in self.results and least >= self._inner_bytes(begun, start):
            return None
        return None if best is None else self.current[best]

    def _can_trigger(self, v: _jax.Var, start: int) -> bool:
        """Return whether a value is computed, on the device, and read by an equation from `start` on."""
        return (
            v in self.current
            and self.last_use.get(v, -1) >= start
            and not _jax.is_dropped(v)
            and not isinstance(v.aval, _jax.AbstractRef)
            and not _jax.is_on_host(v.aval)
        )

    def _inner_bytes(self, after: int, end: int) -> int:
        """Return the bytes that the equations between two need or free; the step's results do not count."""
        return self.inner_before[end] - self.inner_before[after + 1]

    def _inner_before(self) -> list[int]:
        """Return for each equation the bytes that those before it need or free, without the step's results.

        An equation stores its results, and its kernel takes memory for operands that are not stored or
        that it transposes. It frees the values that no later one reads.
        """
        found = list(map(self._needed_by, range(len(self.jaxpr.eqns))))
        for v, last in self.last_use.items():
            is_freed = self.producer.get(v) in self.stored and last < len(found)
            if is_freed and v not in self.results:
                found[last] += n_bytes(v.aval)
        return [0, *itertools.accumulate(found)]

    def _needed_by(self, number: int) -> int:
        eqn = self.jaxpr.eqns[number]
        if number not in self.stored:
            return 0
        made = sum(n_bytes(v.aval) for v in eqn.outvars if v not in self.results)
        return made + workspace_bytes(eqn, self.producer, self.stored)

    def _last_uses(self) -> dict[_jax.Var, int]:
        """Return the number of the last equation that reads each value, also through values not stored."""
        found = jaxprs.last_uses(self.jaxpr)
        for number in reversed(range(len(self.jaxpr.eqns))):
            eqn = self.jaxpr.eqns[number]
            if number not in self.stored:
                last = max((found.get(v, -1) for v in eqn.outvars), default=-1)
                found.update((v, max(found[v], last)) for v in eqn.invars if _jax.is_var(v))
        return found

    def _results_through_views(self) -> set[_jax.Var]:
        """Return the step's results, and the values of which they are views.

        A barrier over any of them may cost a copy.
        """
        found: set[_jax.Var] = set()
        stack = [v for v in self.jaxpr.outvars if _jax.is_var(v)]
        while stack:
            v = stack.pop()
            number = self.producer.get(v)
            if number is None or v in found:
                continue
            found.add(v)
            if number not in self.stored:
                stack += [x for x in self.jaxpr.eqns[number].invars if _jax.is_var(x)]
        return found


class _Unit:
    """The equations of a burst and those that use its values.

    Attributes:
      numbers: of its equations, in the program.
      inputs: the variables that the unit takes.
      local: the variables that have the values computed in the unit.
      last: the number of the last equation of the unit.
    """

    def __init__(self, writer: _Writer) -> None:
        self.writer = writer
        self.eqns: list[_jax.JaxprEqn] = []
        self.numbers: list[int] = []
        self.inputs: dict[_jax.Var, None] = {}
        self.local: dict[_jax.Var, _jax.Var] = {}
        self.inside: dict[_jax.Var, _jax.Var] = {}  # values that are not stored
        #: The values of `inside` by each value that they are derived from.
        self.derived_from: dict[_jax.Var, list[_jax.Var]] = {}
        self.last = -1

    def compute(self, number: int) -> None:
        eqn = self.writer.jaxpr.eqns[number]
        operands = [self.value(v) for v in eqn.invars]
        if fills_array(eqn) and eqn.outvars[0].aval.ndim:
            # The number passes the barrier, so the array is not made before it, nor merged with equal ones.
            operands = [self.take(self.writer.number(operands[0], eqn))]
        outs = self._emit(number, operands)
        self.local.update((v, out) for v, out in zip(eqn.outvars, outs) if not _jax.is_dropped(v))
        self._forget(eqn.outvars)
        self.last = max(self.last, number)

    def value(self, v: Atom) -> Atom:
        if not _jax.is_var(v):
            return v
        if v in self.local:
            return self.local[v]
        if v in self.inside:
            return self.inside[v]
        number = self.writer.producer.get(v)
        if number is None:
            return self.take(v)
        if number in self.writer.stored:
            return self.take(self.writer.current[v])
        eqn = self.writer.jaxpr.eqns[number]
        outs = self._emit(number, [self.value(x) for x in eqn.invars])
        self.inside.update(zip(eqn.outvars, outs))
        for x in filter(_jax.is_var, eqn.invars):
            self.derived_from.setdefault(x, []).extend(eqn.outvars)
        return self.inside[v]

    def _forget(self, values: Iterable[_jax.Var]) -> None:
        """Drop what was derived from earlier computations of these values, so that it is derived again."""
        stack = list(values)
        while stack:
            for v in self.derived_from.pop(stack.pop(), ()):
                self.inside.pop(v, None)
                stack.append(v)

    def _emit(self, number: int, operands: Sequence[Atom]) -> Sequence[_jax.Var]:
        eqn, operands = self.writer.jaxpr.eqns[number], list(operands)
        for at in self.writer.passed_numbers.get(number, ()):
            literal = eqn.invars[at]
            if divides_by_number(eqn):
                # A compiler that does not know the divisor divides, and stores what several kernels need.
                literal, eqn = reciprocal(literal), eqn.replace(primitive=jax.lax.mul_p)
            operands[at] = self.take(self.writer.number(literal, eqn))
        new, outs = _copy(eqn, operands)
        self.eqns.append(new)
        self.numbers.append(number)
        return outs

    def take(self, v: _jax.Var) -> _jax.Var:
        self.inputs[v] = None
        return v


def _copy(eqn: _jax.JaxprEqn, operands: Sequence[Atom]) -> tuple[_jax.JaxprEqn, list[_jax.Var]]:
    outs = [jaxprs.fresh(v) for v in eqn.outvars]
    return _jax.with_variables(eqn, operands, outs), outs
