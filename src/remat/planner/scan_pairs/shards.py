"""Pairs of `shard_map`s: a forward and a backward one, whose bodies are joined for the scans inside.

If a function with a `shard_map` in it is differentiated, the forward scan is in one `shard_map` and the
backward scan in another, and the stacks are results of the first and operands of the second. The two bodies
are joined to one program, in which the scans form pairs. Afterwards all values that cross from the first
part to the second become results and operands, as residuals do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from remat import _jax
from remat.aliases import Atom
from remat.ir import jaxprs
from remat.ir.equations import fusion_of
from remat.ir.operations import Fusion
from remat.ir.repetitions import step_of, without_repetitions
from remat.ir.split import Crossing, crossing, shard_map_of
from remat.planner.scan_pairs.matching import Match, in_pairs, only_read_by, size_of

_jax.exclude_from_tracebacks(__file__)


def shard_matches(jaxpr: _jax.Jaxpr) -> list[Match]:
    """Return the pairs of `shard_map`s over the same axes of which the second reads the first's results."""

    def crossing_bytes(i: int, j: int) -> int:
        forward, backward = jaxpr.eqns[i], jaxpr.eqns[j]
        if not _is_same_map(forward, backward):
            return 0
        return sum(
            size_of(forward.outvars[k].aval)
            for k in only_read_by(jaxpr, i, j)
            if _enters_as_it_left(forward, backward, forward.outvars[k])
        )

    return in_pairs(jaxpr, _is_map, crossing_bytes)


def _is_map(eqn: _jax.JaxprEqn) -> bool:
    return eqn.primitive.name == "shard_map" and not _jax.open_jaxpr(eqn.params["jaxpr"]).constvars


def _is_same_map(one: _jax.JaxprEqn, other: _jax.JaxprEqn) -> bool:
    keys = ("mesh", "newly_manual_axes", "check_vma")
    return all(one.params[key] == other.params[key] for key in keys)


def _enters_as_it_left(forward: _jax.JaxprEqn, backward: _jax.JaxprEqn, v: _jax.Var) -> bool:
    spec = dict(zip(forward.outvars, forward.params["out_specs"]))[v]
    specs = zip(backward.invars, backward.params["in_specs"])
    return all(spec == own for operand, own in specs if operand is v)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Shards:
    """A pair of `shard_map`s as one program.

    Args:
      forward, backward: the equations.
      jaxpr: the program on one device: from both bodies' inputs to the results that remain.
      n_forward: the number of its equations that are the first body's; they come first.
      inputs: the first body's inputs.
      own: the second body's own inputs.
      outside: (operand, partition spec) of each input.
      remaining: the first equation's results that others read, with their variables inside.
      crossed: the other results that the second one alone reads, by the variable inside.
    """

    forward: _jax.JaxprEqn
    backward: _jax.JaxprEqn
    jaxpr: _jax.Jaxpr
    n_forward: int
    inputs: Sequence[_jax.Var]
    own: Sequence[_jax.Var]
    outside: Mapping[_jax.Var, tuple[Atom, Any]]
    remaining: Sequence[tuple[_jax.Var, Any]]
    crossed: Mapping[_jax.Var, _jax.Var]


def shards_of(jaxpr: _jax.Jaxpr, match: Match) -> Shards:
    """Return the joint program of a pair of `shard_map`s."""
    forward, backward = (jaxpr.eqns[i] for i in match)
    f, b = step_of(forward), step_of(backward)
    results = dict(zip(forward.outvars, f.outvars))
    operands = {
        (operand, spec): v
        for v, operand, spec in zip(f.invars, forward.invars, forward.params["in_specs"])
        if _jax.is_var(operand)
    }
    names: dict[_jax.Var, Atom] = {}
    outside = dict(zip(f.invars, zip(forward.invars, forward.params["in_specs"])))
    for v, operand, spec in zip(b.invars, backward.invars, backward.params["in_specs"]):
        if not _jax.is_var(operand):
            outside[v] = operand, spec
        elif operand in results and _enters_as_it_left(forward, backward, operand):
            names[v] = results[operand]
        elif (operand, spec) in operands:
            names[v] = operands[operand, spec]
        else:
            outside[v] = operand, spec
    f_eqns, own_eqns = without_repetitions(f.eqns, b.eqns, names, inputs=b.invars)
    removable = {
        k
        for k in only_read_by(jaxpr, *match)
        if _enters_as_it_left(forward, backward, forward.outvars[k])
    }
    remaining = [
        (outer, v)
        for k, (outer, v) in enumerate(zip(forward.outvars, f.outvars))
        if k not in removable and not _jax.is_dropped(outer)
    ]
    own = [v for v in b.invars if v not in names]
    program = _jax.jaxpr_of(
        [*f.invars, *own],
        [*(v for _, v in remaining), *(jaxprs.look(names, v) for v in b.outvars)],
        [*f_eqns, *own_eqns],
        f,
    )
    crossed = {
        v: forward.outvars[k]
        for k, v in enumerate(f.outvars)
        if k in removable and _jax.is_var(v) and v.aval.shape
    }
    n_forward = len(f_eqns)
    return Shards(forward, backward, program, n_forward, f.invars, own, outside, remaining, crossed)


def emit_shards(
    pair: Shards, new: Mapping[int, Sequence[_jax.JaxprEqn]]
) -> tuple[list[_jax.JaxprEqn], list[_jax.JaxprEqn]]:
    """Return both equations, with some equations of the joint program replaced."""
    parts = [list(new.get(i, (eqn,))) for i, eqn in enumerate(pair.jaxpr.eqns)]
    f_eqns = [eqn for part in parts[: pair.n_forward] for eqn in part]
    b_eqns = [eqn for part in parts[pair.n_forward :] for eqn in part]
    return emit_in_two(pair, f_eqns, b_eqns, pair.jaxpr.outvars)


def emit_in_two(
    pair: Shards,
    f_eqns: Sequence[_jax.JaxprEqn],
    b_eqns: Sequence[_jax.JaxprEqn],
    outvars: Sequence[Atom],
) -> tuple[list[_jax.JaxprEqn], list[_jax.JaxprEqn]]:
    """Return both equations, with these bodies.

    Args:
      pair: the pair.
      f_eqns: the first body's equations.
      b_eqns: the second body's equations, which may read what the first computes.
      outvars: the results of both, as those of the joint program.
    """
    forward, backward = pair.forward, pair.backward
    remaining = list(zip((outer for outer, _ in pair.remaining), outvars))
    results = outvars[len(remaining) :]
    b_eqns = _without_dead([*_views_of_inputs(pair, f_eqns), *b_eqns], results, pair.jaxpr)
    there = {*pair.own, *(v for eqn in b_eqns for v in eqn.outvars)}
    read = [v for v in (*(v for eqn in b_eqns for v in eqn.invars), *results) if _jax.is_var(v)]
    crossing_over = list(dict.fromkeys(v for v in read if v not in there))
    inputs = [v for v in crossing_over if v in pair.outside]
    crossings = {v: crossing(forward, v) for v in crossing_over if v not in pair.outside}
    outer = {v: pair.crossed.get(v) or _jax.new_var(c.type_outside) for v, c in crossings.items()}

    out_specs = dict(zip(forward.outvars, forward.params["out_specs"]))
    f_body = _jax.jaxpr_of(
        pair.inputs,
        [*(v for _, v in remaining), *(c.inside for c in crossings.values())],
        [*f_eqns, *_all(crossings, "leaving")],
        pair.jaxpr,
    )
    new_forward = shard_map_of(
        forward,
        f_body,
        forward.invars,
        [*(v for v, _ in remaining), *outer.values()],
        forward.params["in_specs"],
        [*(out_specs[v] for v, _ in remaining), *(c.spec for c in crossings.values())],
    )
    taken = [pair.outside[v] for v in (*inputs, *pair.own)]
    b_body = _jax.jaxpr_of(
        [*(c.inside for c in crossings.values()), *inputs, *pair.own],
        results,
        [*_all(crossings, "entering"), *b_eqns],
        pair.jaxpr,
    )
    new_backward = shard_map_of(
        backward,
        b_body,
        [*outer.values(), *(operand for operand, _ in taken)],
        backward.outvars,
        [*(c.spec for c in crossings.values()), *(spec for _, spec in taken)],
        backward.params["out_specs"],
    )
    return [new_forward], [new_backward]


def _views_of_inputs(pair: Shards, eqns: Sequence[_jax.JaxprEqn]) -> Iterator[_jax.JaxprEqn]:
    """Yield the equations that only view inputs, which the second body can do as well as the first."""
    known = set(pair.inputs)
    for eqn in eqns:
        if fusion_of(eqn) is Fusion.VIEW and known.issuperset(filter(_jax.is_var, eqn.invars)):
            known.update(eqn.outvars)
            yield eqn


def _without_dead(
    eqns: Sequence[_jax.JaxprEqn], results: Sequence[Atom], like: _jax.Jaxpr
) -> Sequence[_jax.JaxprEqn]:
    """Return the equations that have effects or on which results depend."""
    made = {v for eqn in eqns for v in eqn.outvars}
    read = [v for eqn in eqns for v in eqn.invars if _jax.is_var(v) and v not in made]
    program = _jax.jaxpr_of(list(dict.fromkeys(read)), results, eqns, like)
    live, _ = _jax.dce(program, [True] * len(results))
    return list(live.eqns)


def _all(crossings: Mapping[_jax.Var, Crossing], which: str) -> list[_jax.JaxprEqn]:
    return [eqn for c in crossings.values() for eqn in getattr(c, which)]
