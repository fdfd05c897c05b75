"""Two scans as one program: a forward scan, and a backward scan that reads its stacked results.

In a differentiated step the forward scan F stacks values for the backward scan B. At the same index of
the stacks, a step of B reads what a step of F computed, in whichever order the two scans run. So the
two bodies can be joined: B's slice of a stack *is* F's value. In the joint program

* *known* values are those that do not depend on B's own inputs (its carry, its other slices and constants).
  F computes them, or could: a step of B may recompute each of them from F's constants and slices, and
  from F's carry at that step.
* All other equations of B are *late*. They need some known values.

B may compute known values, too: derivatives of elementwise functions, and everything that a checkpoint in
the body recomputes. If such an equation repeats one of F (the same primitive on the same operands with
the same parameters), the joint program has it once.

A constant that is a broadcast of a smaller value is computed inside the steps (`inside`). On request other
constants are, too, that are cheap functions of much smaller values.

Loops inside the bodies form pairs in the joint program: it is a program like the one around it.

Terms, most of them attributes of `Joint`:

    known        the equations that may run in either scan, those of F included, and their values
    late         the equations that only B can run: they read its own inputs, or must not be repeated
    needed       the known values that late equations and B's results read
    constant     the known equations that compute the same in every step and are fused into their readers
    kept         F's stacks that stay under any option, since not only B reads them
    linked       F's stacks that only B reads: an option replaces them by stacks of other values
    stacked      the values of kept stacks that B can read at no cost
    at_hand      the known values that a step of B can read under any option
    backward_*   B's inputs and results that do not come from F
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from remat import _jax
from remat.aliases import Atom
from remat.ir import jaxprs
from remat.ir.equations import is_fusible, is_repeatable
from remat.ir.repetitions import (
    Around,
    step_of,
    without_repetitions,
)
from remat.planner.scan_pairs.inside import SunkConstants, is_computable
from remat.planner.scan_pairs.matching import Match, only_read_by, slices

_jax.exclude_from_tracebacks(__file__)

# Number of equations before a loop that are searched for ones that the backward scan repeats; more find
# longer chains.
_MAX_ANCESTORS = 200


# --------------------------------------------------------------------------------------------------
# The joint program


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Joint:
    """A pair of scans as one program.

    Args:
      forward, backward: the scans' equations.
      jaxpr: the joint program: from F's inputs and B's own to F's results, without stacks that B alone
        reads, and B's results.
      n_forward: the number of its equations that are F's; they come first.
      n_inputs: the number of its inputs that are F's.
      outside: the operand for each constant and slice, by the variable inside.
      consts, carry, xs: F's inputs.
      backward_consts, backward_carry, backward_xs: B's own inputs.
      n_results: the number of its results that are F's.
      kept: F's stacks that stay under any option: (place among F's results, variable inside).
      linked: F's stacks that only B reads: (variable inside, variable outside).
      stacked: by the variable inside, the stack outside of each value whose stack is kept and read by B or
        returned by the program, so that B can read it at no cost.
      computes_constants: whether the steps compute constants that take several equations.
    """

    forward: _jax.JaxprEqn
    backward: _jax.JaxprEqn
    jaxpr: _jax.Jaxpr
    n_forward: int
    outside: Mapping[_jax.Var, Atom]
    consts: Sequence[_jax.Var]
    carry: Sequence[_jax.Var]
    xs: Sequence[_jax.Var]
    backward_consts: Sequence[_jax.Var]
    backward_carry: Sequence[_jax.Var]
    backward_xs: Sequence[_jax.Var]
    n_results: int
    kept: Sequence[tuple[int, Atom]]
    linked: Sequence[tuple[Atom, _jax.Var]]
    stacked: Mapping[_jax.Var, _jax.Var]
    computes_constants: bool = False

    @property
    def length(self) -> int:
        """Return the number of steps; a branch of a conditional runs once."""
        return int(self.forward.params.get("length", 1))

    @property
    def carry_results(self) -> Sequence[Atom]:
        """Return F's carry after a step."""
        return self.jaxpr.outvars[: len(self.carry)]

    @property
    def results(self) -> Sequence[Atom]:
        """Return F's results that remain under any option."""
        return self.jaxpr.outvars[: self.n_results]

    @property
    def backward_results(self) -> Sequence[Atom]:
        """Return B's results."""
        return self.jaxpr.outvars[self.n_results :]

    @functools.cached_property
    def variables(self) -> list[_jax.Var]:
        """Return the program's variables in order; options refer to them by their places here."""
        return [*self.jaxpr.invars, *(v for eqn in self.jaxpr.eqns for v in eqn.outvars)]

    @functools.cached_property
    def number(self) -> dict[_jax.Var, int]:
        """Return the place of each variable in `variables`."""
        return {v: i for i, v in enumerate(self.variables)}

    @functools.cached_property
    def late(self) -> list[_jax.JaxprEqn]:
        """Return the equations that depend on B's own inputs, or must be computed where B computes them."""
        of_backward = {*self.backward_consts, *self.backward_carry, *self.backward_xs}
        found = []
        for eqn in self.jaxpr.eqns[self.n_forward :]:
            if not is_repeatable(eqn) or any(
                _jax.is_var(v) and v in of_backward for v in eqn.invars
            ):
                of_backward.update(eqn.outvars)
                found.append(eqn)
        return found

    @functools.cached_property
    def known(self) -> list[_jax.JaxprEqn]:
        """Return the equations that are not late, in order."""
        late = set(map(id, self.late))
        return [eqn for eqn in self.jaxpr.eqns if id(eqn) not in late]

    @functools.cached_property
    def needed(self) -> list[_jax.Var]:
        """Return the known values that late equations and B's results need, constants and slices too."""
        own = {*self.backward_consts, *self.backward_carry, *self.backward_xs}
        own.update(v for eqn in self.late for v in eqn.outvars)
        uses = (*(v for eqn in self.late for v in eqn.invars), *self.backward_results)
        return list(dict.fromkeys(v for v in uses if _jax.is_var(v) and v not in own))

    @functools.cached_property
    def constant(self) -> list[_jax.JaxprEqn]:
        """Return the known, fusible equations whose results are the same in every step."""
        varies = {*self.carry, *self.xs}
        found = []
        for eqn in self.known:
            if is_fusible(eqn) and not any(_jax.is_var(v) and v in varies for v in eqn.invars):
                found.append(eqn)
            else:
                varies.update(eqn.outvars)
        return found

    @functools.cached_property
    def at_hand(self) -> frozenset[_jax.Var]:
        """Return the known values that a step of B can read under any option."""
        return frozenset((*self.consts, *self.xs, *self.stacked))

    @functools.cached_property
    def carry_results_again(self) -> list[Atom]:
        """Return F's carry after a step that runs again: that before it for what no later step is needed for.

        A loss that the steps add up is such a carry: B needs none of the sums.
        """
        live: set[_jax.Var] = set()
        wanted: list[Atom] = list(self.needed)
        while True:
            _, read = self.closure(wanted, frozenset())
            more = {v for v in self.carry if v in read} - live
            if not more:
                break
            live |= more
            wanted += [r for v, r in zip(self.carry, self.carry_results, strict=True) if v in more]
        return [r if v in live else v for v, r in zip(self.carry, self.carry_results, strict=True)]

    def closure(
        self, wanted: Iterable[Atom], available: frozenset[_jax.Var]
    ) -> tuple[list[_jax.JaxprEqn], list[_jax.Var]]:
        """Return the known equations that compute values from available ones, and the available ones read.

        F's inputs count as available.
        """
        stack = [v for v in wanted if _jax.is_var(v)]
        seen: set[_jax.Var] = set()
        places: set[int] = set()
        read: list[_jax.Var] = []
        while stack:
            v = stack.pop()
            if v in seen:
                continue
            seen.add(v)
            place = None if v in available else self._made_by.get(v)
            if place is None:
                read.append(v)
            elif place not in places:
                places.add(place)
                stack += [u for u in self.known[place].invars if _jax.is_var(u)]
        return [self.known[i] for i in sorted(places)], sorted(read, key=self.number.__getitem__)

    @functools.cached_property
    def computed(self) -> frozenset[_jax.Var]:
        """Return the results of the known equations."""
        return frozenset(self._made_by)

    @functools.cached_property
    def _made_by(self) -> dict[_jax.Var, int]:
        return {v: i for i, eqn in enumerate(self.known) for v in eqn.outvars}

    def with_equations(self, new: Mapping[int, Sequence[_jax.JaxprEqn]]) -> Joint:
        """Return the same pair with some equations of the joint program replaced."""
        if not new:
            return self
        parts = [list(new.get(i, (eqn,))) for i, eqn in enumerate(self.jaxpr.eqns)]
        eqns = [eqn for part in parts for eqn in part]
        n_forward = sum(map(len, parts[: self.n_forward]))
        return dataclasses.replace(
            self, jaxpr=_jax.rebuild(self.jaxpr, eqns=eqns), n_forward=n_forward
        )


# Kept because the program is rewritten for many options, and each starts from it.
@_jax.weakref_lru_cache
def joint_of(jaxpr: _jax.Jaxpr, match: Match, *, computes: bool = False) -> Joint:
    """Return the joint program of a pair of a jaxpr's scans.

    Args:
      jaxpr: the program around the scans.
      match: their places.
      computes: whether both compute in each step what are constants and cheap functions of much smaller
        values.
    """
    forward, backward = (jaxpr.eqns[i] for i in match)
    f, b = step_of(forward), step_of(backward)
    consts, carry, xs = _jax.split_list(f.invars, _jax.scan_arity(forward))
    backward_consts, backward_carry, backward_xs = _jax.split_list(
        b.invars, _jax.scan_arity(backward)
    )
    names: dict[_jax.Var, Atom] = {}
    sunk = SunkConstants(jaxpr, dict(zip(consts, forward.invars)), computes=computes)
    if computes:
        given = _made_before(jaxpr, match.forward)
        for operand in backward.invars[: len(backward_consts)]:
            if _jax.is_var(operand):
                sunk.compute(operand, given)
    f_eqns = [*sunk.eqns, *f.eqns]

    n_carry, n_own = len(carry), len(backward_consts) + len(backward_carry)
    inside = dict(zip(forward.outvars[n_carry:], f.outvars[n_carry:]))
    of_array = by_operand(xs, slices(forward))
    for v, operand in zip(backward_xs, backward.invars[n_own:]):
        source = None if not _jax.is_var(operand) else inside.get(operand, of_array.get(operand))
        if source is not None:
            names[v] = source
    of_constant = {**by_operand(consts, forward.invars), **sunk.inside}
    for v, operand in zip(backward_consts, backward.invars):
        if _jax.is_var(operand) and operand in of_constant:
            names[v] = of_constant[operand]

    around = Around(
        {
            **sunk.outside,
            **{v: x for v, x in zip(backward_consts, backward.invars) if v not in names},
        },
        _ancestors(jaxpr, match.forward, sunk.inside),
        sunk.inside,
    )
    f_eqns, own_eqns = without_repetitions(f_eqns, b.eqns, names, around, b.invars)

    removable = set(only_read_by(jaxpr, *match))
    kept = [
        (k, v)
        for k, (v, outer) in enumerate(zip(f.outvars, forward.outvars))
        if k >= n_carry and k not in removable and not _jax.is_dropped(outer)
    ]
    read = set(_slices_of_vars(backward)) | {v for v in jaxpr.outvars if _jax.is_var(v)}
    stacked = {
        v: forward.outvars[k] for k, v in kept if _jax.is_var(v) and forward.outvars[k] in read
    }
    backward_consts = [v for v in backward_consts if v not in names]
    own_outside = dict(zip(b.invars, backward.invars))
    backward_xs = [v for v in backward_xs if v not in names]
    outside = {
        **sunk.outside,
        **dict(zip(xs, slices(forward))),
        **{v: own_outside[v] for v in (*backward_consts, *backward_xs)},
    }
    results = [*f.outvars[:n_carry], *(v for _, v in kept)]
    consts = list(sunk.outside)
    program = _jax.jaxpr_of(
        [*consts, *carry, *xs, *backward_consts, *backward_carry, *backward_xs],
        [*results, *(jaxprs.look(names, v) for v in b.outvars)],
        [*f_eqns, *own_eqns],
        f,
    )
    linked = [(f.outvars[k], forward.outvars[k]) for k in sorted(removable)]
    return Joint(
        forward,
        backward,
        program,
        len(f_eqns),
        outside,
        consts,
        carry,
        xs,
        backward_consts,
        backward_carry,
        backward_xs,
        len(results),
        kept,
        linked,
        stacked,
        computes,
    )


def can_compute_constants(jaxpr: _jax.Jaxpr, match: Match) -> bool:
    """Return whether the steps of a pair can compute constants of the backward scan; see `joint_of`."""
    backward = jaxpr.eqns[match.backward]
    n_consts, _ = _jax.scan_arity(backward)
    return any(_jax.is_var(v) and is_computable(jaxpr, v) for v in backward.invars[:n_consts])


def _made_before(jaxpr: _jax.Jaxpr, end: int) -> set[_jax.Var]:
    """Return the inputs of a program, and what the equations before one compute."""
    computed = (v for eqn in jaxpr.eqns[:end] for v in eqn.outvars)
    return {*jaxpr.invars, *jaxpr.constvars, *computed}


def _ancestors(jaxpr: _jax.Jaxpr, end: int, values: Iterable[_jax.Var]) -> list[_jax.JaxprEqn]:
    """Return the equations before one that some values depend on, the nearest ones."""
    wanted = set(values)
    found: list[_jax.JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns[:end]):
        if len(found) < _MAX_ANCESTORS and not wanted.isdisjoint(eqn.outvars):
            found.append(eqn)
            wanted.update(v for v in eqn.invars if _jax.is_var(v))
    return found[::-1]


def _slices_of_vars(eqn: _jax.JaxprEqn) -> Iterator[_jax.Var]:
    return (v for v in slices(eqn) if _jax.is_var(v))


def by_operand(inside: Sequence[_jax.Var], operands: Sequence[Atom]) -> dict[_jax.Var, _jax.Var]:
    return {operand: v for v, operand in zip(inside, operands) if _jax.is_var(operand)}
