"""Writes the two scans of a pair that keeps some values and recomputes the others.

The forward scan stacks only the kept values. The step of the backward scan recomputes the other values that
it needs, from the forward scan's constants, that step's slices, and the kept values. The recomputation and
the late equations that use it become one equation of the primitive, so that `transform.barrier` keeps
compilers from undoing it where they could: a loop of one step is inlined beside the forward pass, an
unrolled loop could start all recomputations before the first cotangent, and loop-invariant code is moved
out of a loop.

A kept value may be *offloaded*: then the forward step copies it to the host's memory, where it is stacked,
and the backward step copies its slice back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from remat import _jax
from remat.aliases import Atom
from remat.ir import jaxprs
from remat.ir.equations import has_effects, is_fusible
from remat.planner.scan_pairs.joint import Joint
from remat.transform.primitive import region_equation

_jax.exclude_from_tracebacks(__file__)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Emitted:
    """The steps of a pair that keeps some values.

    Args:
      kept: the values that are stacked for B, in order.
      recomputed: the equations that a step of B repeats, or computes instead of F.
      read: the values of F that B's step reads: kept values, stacks that exist anyway, constants, slices.
      copies: of the kept values that are offloaded.
      scheduled: B's step, if it recomputes in an order of its own; see `backward_program`.
    """

    joint: Joint
    kept: tuple[_jax.Var, ...]
    recomputed: tuple[_jax.JaxprEqn, ...]
    read: frozenset[_jax.Var]
    copies: Mapping[_jax.Var, _jax.HostCopy] = dataclasses.field(default_factory=dict)
    scheduled: _jax.Jaxpr | None = None

    @classmethod
    def of(cls, joint: Joint, saved: Sequence[int], offloaded: Sequence[int] = ()) -> Emitted:
        wanted = [joint.variables[n] for n in saved]
        recomputed, read = joint.closure(joint.needed, joint.at_hand | frozenset(wanted))
        kept = tuple(v for v in dict.fromkeys(wanted) if v in set(read) - joint.at_hand)
        to_host = {joint.variables[n] for n in offloaded}
        copies = {v: _jax.host_copy(v, joint.forward) for v in kept if v in to_host}
        return cls(joint, kept, tuple(recomputed), frozenset(read), copies)

    @property
    def passed(self) -> list[_jax.Var]:
        """Return the values that are stacked for B: the kept values, or their copies in host memory."""
        return [self.copies[v].var if v in self.copies else v for v in self.kept]

    @property
    def missing_carry(self) -> set[_jax.Var]:
        """Return the values of F's carry that B's step reads and that are not kept."""
        return set(self.joint.carry) & self.read - set(self.kept) - self.joint.at_hand

    def forward_step(self, results: Sequence[Atom]) -> _jax.Jaxpr:
        """Return F's step with other results after its carry."""
        joint = self.joint
        invars = joint.jaxpr.invars[: len(joint.consts) + len(joint.carry) + len(joint.xs)]
        outvars = [*joint.carry_results, *results]
        # Equations of B that compute kept values come with F's; the others are dead here.
        given = set(invars)
        of_inputs = [c.store for v, c in self.copies.items() if v in given]
        of_others = [c.store for v, c in self.copies.items() if v not in given]
        # An input whose copy is passed is not needed any longer.
        eqns = [*of_inputs, *joint.known, *of_others]
        whole = _jax.jaxpr_of(invars, outvars, eqns, joint.jaxpr)
        return _jax.dce(whole, [True] * len(outvars), keep=[True] * len(invars))[0]

    def again(self, lasting: Iterable[_jax.Var] = ()) -> tuple[list[_jax.JaxprEqn], list[_jax.Var]]:
        """Return the equations that F's run over a group of steps repeats, and the values that they read.

        Args:
          lasting: the values that all steps keep. B can read stacks that exist anyway, too, if there are any.
        """
        joint, given = self.joint, frozenset(lasting)
        known = given | joint.stacked.keys() - {*joint.carry} if given else given
        wanted = [v for v in self.kept if v not in given]
        return joint.closure([*joint.carry_results_again, *wanted], known)

    def step_again(self, lasting: Sequence[_jax.Var] = ()) -> tuple[_jax.Jaxpr, list[_jax.Var]]:
        """Return F's step that computes the carry and the kept values again, and what it is given for that.

        Args:
          lasting: the values that all steps keep.

        Returns:
          The step, from the constants, the carry, the slices and what it is given to the carry and the kept
          values that are not lasting; and what it is given: lasting values, and stacks that exist anyway.
        """
        joint = self.joint
        eqns, read = self.again(lasting)
        first = [*joint.consts, *joint.carry, *joint.xs]
        given = [v for v in read if v in joint.computed]
        left = set(given)
        # Of an equation with several results, some may be given.
        eqns = [
            eqn.replace(outvars=[jaxprs.fresh(v) if v in left else v for v in eqn.outvars])
            for eqn in eqns
        ]
        lasts = set(lasting)
        own = [v for v in self.kept if v not in lasts]
        return _jax.jaxpr_of(
            [*first, *given], [*joint.carry_results_again, *own], eqns, joint.jaxpr
        ), given

    @property
    def consts(self) -> list[_jax.Var]:
        """Return the constants of B's step."""
        joint = self.joint
        return [*(v for v in joint.consts if v in self.read), *joint.backward_consts]

    @property
    def xs(self) -> list[_jax.Var]:
        """Return the slices of B's step that are not kept values."""
        joint = self.joint
        slices = (*joint.stacked, *joint.xs)
        return [*dict.fromkeys(v for v in slices if v in self.read), *joint.backward_xs]

    def backward_program(self) -> _jax.Jaxpr:
        """Return B's step without protection: (constants, carry, kept values and slices) to B's results."""
        joint = self.joint
        invars = [*self.consts, *joint.backward_carry, *self.kept, *self.xs]
        eqns = [*self.recomputed, *joint.late]
        return _jax.jaxpr_of(invars, joint.backward_results, eqns, joint.jaxpr)

    @property
    def can_be_scheduled(self) -> bool:
        """Return whether B's step may recompute in another order: it has no effects and is not inlined."""
        return bool(self.recomputed) and not self._is_inlined and not self._has_effects

    def backward_step(self, n_steps: int) -> _jax.Jaxpr:
        """Return B's step: (constants, carry, kept values and slices) to B's results.

        Args:
          n_steps: the number of steps of the loop that runs it; compilers inline a loop of one.
        """
        joint, step = self.joint, self.scheduled or self.backward_program()
        if self.scheduled is None and self._needs_protection():
            step = _protected(step.invars, step.outvars, step.eqns, joint, self._is_alone(n_steps))
        if not self.copies:
            return step
        passed = [*self.consts, *joint.backward_carry, *self.passed, *self.xs]
        fetched = [c.fetch for c in self.copies.values()]
        return _jax.jaxpr_of(passed, step.outvars, [*fetched, *step.eqns], joint.jaxpr)

    @property
    def _is_inlined(self) -> bool:
        return self.joint.length == 1 or self.joint.backward.params.get("unroll", 1) != 1

    @property
    def _has_effects(self) -> bool:
        return any(map(has_effects, self.joint.late))

    def _is_alone(self, n_steps: int) -> bool:
        """Return whether compilers can neither merge a recomputed equation with another nor move it out."""
        if n_steps == 1 or self._is_inlined or self.joint.computes_constants:
            return False
        same = set(self.joint.consts)
        for eqn in self.recomputed:
            if same.issuperset(filter(_jax.is_var, eqn.invars)):
                if not is_fusible(eqn):
                    return False
                same.update(eqn.outvars)
        return True

    def _needs_protection(self) -> bool:
        if not self.recomputed or self._has_effects:
            return False
        # Fusible equations are computed inside of the kernels that use them; a barrier would prevent that.
        # Constants that the steps compute would be moved out of the loop.
        keeps_inside = self._is_inlined or self.joint.computes_constants
        return keeps_inside or not all(map(is_fusible, self.recomputed))


def _protected(
    invars: Sequence[_jax.Var],
    results: Sequence[Atom],
    eqns: Sequence[_jax.JaxprEqn],
    joint: Joint,
    is_alone: bool,
) -> _jax.Jaxpr:
    """Return a step whose equations are one equation of the primitive."""
    read = {v for eqn in eqns for v in eqn.invars if _jax.is_var(v)}
    made = {v for eqn in eqns for v in eqn.outvars}
    operands = [v for v in invars if v in read]
    inside = list(dict.fromkeys(v for v in results if _jax.is_var(v) and v in made))
    body = _jax.jaxpr_of(operands, inside, eqns, joint.jaxpr)
    names: dict[_jax.Var, Atom] = {v: _jax.new_var(v.aval) for v in inside}
    of_backward = {*joint.backward_consts, *joint.backward_carry, *joint.backward_xs}
    region = region_equation(
        operands,
        list(names.values()),
        body,
        prevent_cse=True,
        differentiated=True,
        cotangents=tuple(v in of_backward for v in operands),
        is_alone=is_alone,
        like=_jax.without_scopes(joint.late[0] if joint.late else eqns[0]),
    )
    return _jax.jaxpr_of(invars, [jaxprs.look(names, v) for v in results], [region], joint.jaxpr)


def in_steps(emitted: Emitted) -> tuple[list[_jax.JaxprEqn], list[_jax.JaxprEqn]]:
    """Return both scans, of the same length as before."""
    joint = emitted.joint
    forward, backward = joint.forward, joint.backward
    n_carry = len(joint.carry)
    at = {v: outer for v, outer in joint.linked if _jax.is_var(v)}
    stacks = {v: at.get(v) or stack_of(joint, v) for v in emitted.passed}
    remaining = [forward.outvars[k] for k, _ in joint.kept]
    step = emitted.forward_step([*(v for _, v in joint.kept), *emitted.passed])
    new_forward = jaxprs.scan_of_step(
        forward,
        step,
        [*(joint.outside[v] for v in joint.consts), *init_of(joint), *slices_of(joint)],
        [*forward.outvars[:n_carry], *remaining, *stacks.values()],
        len(joint.consts),
        n_carry,
    )
    n_consts, n_own_carry = _jax.scan_arity(backward)
    new_backward = jaxprs.scan_of_step(
        backward,
        emitted.backward_step(joint.length),
        [
            *outside(emitted, emitted.consts),
            *backward.invars[n_consts : n_consts + n_own_carry],
            *stacks.values(),
            *outside(emitted, emitted.xs),
        ],
        backward.outvars,
        len(emitted.consts),
        n_own_carry,
    )
    return [new_forward], [new_backward]


def init_of(joint: Joint) -> Sequence[Atom]:
    """Return the operands that are F's carry before its first step."""
    n_consts, n_carry = _jax.scan_arity(joint.forward)
    return joint.forward.invars[n_consts : n_consts + n_carry]


def slices_of(joint: Joint) -> list[Atom]:
    """Return the operands of which F's steps read slices."""
    return [joint.outside[v] for v in joint.xs]


def stack_of(joint: Joint, v: _jax.Var) -> _jax.Var:
    """Return a new variable for the stack of a value of F's steps."""
    return _jax.new_var(_jax.stacked(joint.length, v.aval))


def outside(emitted: Emitted, inside: Sequence[_jax.Var]) -> list[Atom]:
    joint = emitted.joint
    return [joint.stacked.get(v) or joint.outside[v] for v in inside]
