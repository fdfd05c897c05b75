"""Splitting a `shard_map`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from remat import _jax
from remat.aliases import Array, Atom
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
        # Residuals are sharded along their first axis, so a scalar gets one.
        columns = {v: _jax.trace_call(_column, v.aval)[0] for v in residuals if not v.aval.shape}
        scalars = {v: _jax.trace_call(_scalar, j.outvars[0].aval)[0] for v, j in columns.items()}
    known_outs = known_only(eqn.outvars, halves.outs_unknown)
    types = {
        v: _jax.shard_map_residual(eqn, columns[v].outvars[0].aval if v in columns else v.aval)
        for v in residuals
    }
    leaving = leave(residuals, zip(results, known_outs), lambda v: types[v][0])
    specs = dict(zip(leaving.added_outside, (types[v][1] for v in leaving.added)))
    specs.update(zip(eqn.outvars, params["out_specs"]))

    inside = {v: _jax.new_var(columns[v].outvars[0].aval) for v in leaving.added if v in columns}
    shaped = [e for v, c in inside.items() for e in jaxprs.written_out(columns[v], [v], [c])]
    back = [e for v, c in inside.items() for e in jaxprs.written_out(scalars[v], [c], [v])]
    half = _jax.rebuild(
        halves.known,
        outvars=[*results, *(inside.get(v, v) for v in leaving.added)],
        eqns=[*halves.known.eqns, *shaped],
    )
    known = _shard_map_again(
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
        eqns=[*back, *halves.staged.eqns],
    )
    staged = _shard_map_again(
        eqn,
        half,
        [*leaving.outside, *eqn.invars],
        only(eqn.outvars, halves.outs_staged),
        [*(specs[v] for v in leaving.outside), *params["in_specs"]],
        only(params["out_specs"], halves.outs_staged),
    )
    return parts_of(halves, [known], staged)


def _shard_map_again(
    eqn: _jax.JaxprEqn,
    body: _jax.Jaxpr,
    invars: Sequence[Atom],
    outvars: Sequence[_jax.Var],
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
) -> _jax.JaxprEqn:
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
