"""Splitting a `shard_map`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jax.sharding import PartitionSpec

from remat import _jax
from remat.aliases import Array, Atom, Aval
from remat.ir import jaxprs
from remat.ir.split.halves import (
    Operands,
    Parts,
    Policy,
    known_only,
    leave,
    only,
    parts_of,
    register,
    results_and_residuals,
    split,
)


def _shard_map(eqn: _jax.JaxprEqn, operands: Operands, policy: Policy) -> Parts:
    params = eqn.params
    with _jax.inside_shard_map(eqn):
        halves = split(_jax.open_jaxpr(params["jaxpr"]), operands.unknown, policy)
    results, residuals = results_and_residuals(halves)
    crossings = {v: crossing(eqn, v) for v in residuals}
    known_outs = known_only(eqn.outvars, halves.outs_unknown)
    leaving = leave(residuals, zip(results, known_outs), lambda v: crossings[v].type_outside)
    added = [crossings[v] for v in leaving.added]
    specs = dict(zip(leaving.added_outside, (c.spec for c in added)))
    specs.update(zip(eqn.outvars, params["out_specs"]))

    inside = {v: c.inside for v, c in zip(leaving.added, added)}
    half = _jax.rebuild(
        halves.known,
        outvars=[*results, *inside.values()],
        eqns=[*halves.known.eqns, *(e for c in added for e in c.leaving)],
    )
    known = shard_map_of(
        eqn,
        half,
        known_only(eqn.invars, halves.ins_unknown),
        [*known_outs, *leaving.added_outside],
        known_only(params["in_specs"], halves.ins_unknown),
        [specs[v] for v in (*known_outs, *leaving.added_outside)],
    )
    half = _jax.rebuild(
        halves.staged,
        invars=[inside.get(v, v) for v in halves.staged.invars],
        eqns=[*(e for c in added for e in c.entering), *halves.staged.eqns],
    )
    staged = shard_map_of(
        eqn,
        half,
        [*leaving.outside, *eqn.invars],
        only(eqn.outvars, halves.outs_staged),
        [*(specs[v] for v in leaving.outside), *params["in_specs"]],
        only(params["out_specs"], halves.outs_staged),
    )
    return parts_of(halves, [known], staged)


class Crossing(NamedTuple):
    """A value that is returned from one `shard_map` and passed to another one, over the same axes.

    Attributes:
      inside: the variable that the first returns and the second takes.
      type_outside, spec: its type between the two, and its partition spec.
      leaving, entering: equations that compute it from the value, and the value from it.
    """

    inside: _jax.Var
    type_outside: Aval
    spec: PartitionSpec
    leaving: Sequence[_jax.JaxprEqn]
    entering: Sequence[_jax.JaxprEqn]


def crossing(eqn: _jax.JaxprEqn, v: _jax.Var) -> Crossing:
    """Return how a value of a `shard_map`'s body can be returned from it and passed to another one."""
    if v.aval.shape:
        return Crossing(v, *_jax.shard_map_residual(eqn, v.aval), (), ())
    # The devices' values are concatenated along their first axis, so a scalar gets one.
    with _jax.inside_shard_map(eqn):
        column = _jax.trace_call(_column, v.aval)[0]
        scalar = _jax.trace_call(_scalar, column.outvars[0].aval)[0]
    inside = _jax.new_var(column.outvars[0].aval)
    return Crossing(
        inside,
        *_jax.shard_map_residual(eqn, inside.aval),
        jaxprs.equations_on(column, [v], [inside]),
        jaxprs.equations_on(scalar, [inside], [v]),
    )


def shard_map_of(
    eqn: _jax.JaxprEqn,
    body: _jax.Jaxpr,
    invars: Sequence[Atom],
    outvars: Sequence[_jax.Var],
    in_specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec],
) -> _jax.JaxprEqn:
    """Return a `shard_map` over the same axes as another, of another body, operands and results."""
    body = _jax.without_axis_effects(body, eqn)
    specs = {"in_specs": tuple(in_specs), "out_specs": tuple(out_specs)}
    return _jax.new_body_eqn(
        eqn, invars, outvars, dict(eqn.params, jaxpr=body, **specs), [(body, invars)]
    )


def _column(scalar: Array) -> Array:
    return scalar.reshape(1)


def _scalar(column: Array) -> Array:
    return column.reshape(())


register("shard_map", _shard_map)
