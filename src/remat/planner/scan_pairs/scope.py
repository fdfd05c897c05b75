"""Programs with the bytes of their values and the seconds of their equations, for pairs of scans."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from remat import _jax
from remat.aliases import Atom
from remat.ir import jaxprs
from remat.ir.equations import fusion_of
from remat.ir.flops import WHILE_TRIPS
from remat.ir.operations import Fusion
from remat.planner.host_memory import Transfer
from remat.planner.scan_pairs.inside import inner_programs
from remat.planner.scan_pairs.joint import Joint
from remat.planner.scan_pairs.shards import Shards
from remat.planner.tradeoffs import seconds_of
from remat.program.from_jaxpr import (
    PLAIN,
    Execution,
    FlatWriter,
    ProgramWriter,
    Work,
    automatic_shards,
)
from remat.program.fusion import Price


class _Writer(FlatWriter):
    """Writes each loop or conditional as if it were one kernel; `Scope` prices the equations inside."""

    def work_of_bodies(self, eqn: _jax.JaxprEqn) -> Work:
        return Work()

    def fusion_of(self, eqn: _jax.JaxprEqn) -> Fusion:
        # What XLA for CPU writes is priced as if it were fused: as kernels of their own, rolled arrays would
        # seem worth keeping in place of the products that they are made from (measured on jax-cfd).
        return fusion_of(eqn)


@dataclasses.dataclass(frozen=True)
class Costing:
    """The time of kernels, how equations run on a device, and the time of copies to the host.

    Recomputation costs at least `seconds_per_flop`.
    """

    price: Price
    execution: Execution = PLAIN
    transfer: Transfer | None = None
    seconds_per_flop: float = 0.0

    @property
    def on_device(self) -> Costing:
        """Return these costs without copies to the host."""
        return dataclasses.replace(self, transfer=None)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Scope:
    """A program with the bytes of its values and the cost of its equations.

    Args:
      jaxpr: the program.
      costing: the costs of kernels.
      writer: the writer that has written the program.
      free: inputs that live throughout the program.
      known: the seconds of programs inside, by their ids and shard counts; shared by all scopes.
      runs: for the inputs that several runs of the program share, how many: the steps of the loops around it
        for which the input is a constant. If it lives longer, its bytes count once for all of these.
      is_step: whether the program runs in each step of a pair of loops, at the peak of the step around them.
    """

    jaxpr: _jax.Jaxpr
    costing: Costing
    writer: ProgramWriter
    free: frozenset[_jax.Var]
    known: dict[Any, tuple[_jax.Jaxpr, float]]
    runs: Mapping[_jax.Var, int] = dataclasses.field(default_factory=dict)
    is_step: bool = False

    @classmethod
    def of(
        cls,
        jaxpr: _jax.Jaxpr,
        costing: Costing,
        shards: Sequence[int] | None,
        free: Iterable[_jax.Var] | None = None,
        known: dict[Any, tuple[_jax.Jaxpr, float]] | None = None,
        runs: Mapping[_jax.Var, int] | None = None,
        *,
        is_step: bool = False,
    ) -> Scope:
        writer = _Writer(costing.execution)
        writer.enter(jaxpr.invars, shards)
        writer.enter(jaxpr.constvars, None)
        writer.write(jaxpr, "")
        given = (*jaxpr.invars, *jaxpr.constvars) if free is None else free
        seconds = {} if known is None else known
        return cls(jaxpr, costing, writer, frozenset(given), seconds, runs or {}, is_step)

    def bytes_of(self, v: _jax.Var) -> int:
        return self.writer.bytes[self.writer.ids[v]]

    def shards_of(self, v: object) -> int:
        return self.writer.shards[self.writer.ids[v]] if _jax.is_var(v) else 1

    @functools.cached_property
    def seconds(self) -> list[float]:
        """Return the seconds of each equation, the programs inside it included."""
        program = self.writer.program(())
        return [
            self._seconds_inside(eqn) or seconds_of(program, op, self.costing.price)
            for eqn, op in zip(self.jaxpr.eqns, self.writer.ops, strict=True)
        ]

    def _seconds_inside(self, eqn: _jax.JaxprEqn) -> float:
        of_bodies = [
            times * self._seconds_of_body(eqn, _jax.open_jaxpr(body))
            for body, times in inner_programs(eqn)
        ]
        if eqn.primitive.name == "cond":
            return max(of_bodies, default=0.0)
        return sum(of_bodies) * (WHILE_TRIPS if eqn.primitive.name == "while" else 1)

    def _seconds_of_body(self, eqn: _jax.JaxprEqn, body: _jax.Jaxpr) -> float:
        key = id(body), tuple(self._shards_inside(eqn, body) or ())
        if key not in self.known:
            # The program is stored too, so that its id stays valid.
            self.known[key] = body, sum(self.inside(eqn, body).seconds)
        return self.known[key][1]

    def inside(self, eqn: _jax.JaxprEqn, body: _jax.Jaxpr) -> Scope:
        """Return the scope of a program that an equation runs."""
        # Copies in branches and in shard_maps have not been tested, so they are not offered.
        is_loop = eqn.primitive.name in ("scan", "while")
        costing = self.costing if is_loop else self.costing.on_device
        shards = self._shards_inside(eqn, body)
        return Scope.of(body, costing, shards, known=self.known, is_step=self.is_step)

    def _shards_inside(self, eqn: _jax.JaxprEqn, body: _jax.Jaxpr) -> list[int] | None:
        operands = eqn.invars[len(eqn.invars) - len(body.invars) :]
        sharded = [self.shards_of(v) for v in operands]
        if eqn.primitive.name == "shard_map":
            sharded = [automatic_shards(eqn, n) for n in sharded]
        # The condition of a while loop takes other operands than the last ones; it has no pairs.
        return sharded if len(sharded) == len(body.invars) else None

    def last_use(self, v: _jax.Var) -> int:
        return self._last_uses.get(v, -1)

    @functools.cached_property
    def _last_uses(self) -> dict[_jax.Var, int]:
        return jaxprs.last_uses(self.jaxpr)


def joint_scope(scope: Scope, joint: Joint, place: int) -> Scope:
    """Return the scope of a joint program; its constants and slices are free if they are outside.

    Nothing is offloaded in it: the stack of an inner pair is a value of one outer step, so it would have to
    be stacked again over the outer steps.
    """
    free = {
        v for v in joint.jaxpr.invars if v in set(joint.backward_xs) | set(joint.backward_consts)
    }
    free.update(joint.backward_carry)
    free.update(v for v in (*joint.consts, *joint.xs) if _is_free(scope, joint, v, place))
    shards = [scope.shards_of(_operand(joint, v)) for v in joint.jaxpr.invars]
    runs = {
        v: (joint.length if v in joint.consts else 1) * scope.runs.get(joint.outside[v], 1)
        for v in (*joint.consts, *joint.xs)
        if _jax.is_var(joint.outside[v])
    }
    costing = scope.costing.on_device
    return Scope.of(joint.jaxpr, costing, shards, free, scope.known, runs, is_step=True)


def _operand(joint: Joint, v: _jax.Var) -> object:
    """Return the operand outside that an input of the joint program is (for a carry, initially)."""
    if v in joint.outside:
        return joint.outside[v]
    for eqn, carry in ((joint.forward, joint.carry), (joint.backward, joint.backward_carry)):
        if v in carry:
            return eqn.invars[_jax.scan_arity(eqn)[0] + list(carry).index(v)]
    raise AssertionError(v)


def _is_free(scope: Scope, joint: Joint, v: _jax.Var, place: int) -> bool:
    """Return whether a constant or slice of F lives until B runs, under any option."""
    return _lives_until(scope, joint.outside[v], place)


def _lives_until(scope: Scope, v: Atom, place: int) -> bool:
    return not _jax.is_var(v) or v in scope.free or scope.last_use(v) >= place


def free_shards(scope: Scope, shards: Shards, place: int) -> list[_jax.Var]:
    """Return the inputs of two joined `shard_map`s that live until the second runs."""
    lent = (v for v in shards.inputs if _lives_until(scope, shards.outside[v][0], place))
    return [*shards.own, *lent]
