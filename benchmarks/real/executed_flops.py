"""FLOPs of one call, with iterations of while loops and branches of conditionals counted as they run.

`zoo.flops` counts a jaxpr without running it, so a `while_loop` of unknown length counts once, and a `cond`
as its most expensive branch. Here the function is evaluated equation by equation, with a counter: loops of
unknown length and conditionals carry the counter, and every other equation adds its static count. The
arguments are arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.zoo import flops
from remat import _jax
from remat.ir import jaxprs
from remat.ir.equations import solve_operands

_SCALE = 1e6  # the counter is in MFLOP, so that single precision holds it
Counters = tuple[jax.Array, jax.Array]  # MFLOP of matrix products, and of all operations


def count(fun: Callable, *args: Any) -> flops.Flops:
    """Return the FLOPs of one call.

    >>> halve = lambda x: lax.while_loop(lambda x: x[0] > 1, lambda x: x / 2, x)
    >>> count(halve, jnp.full(1000, 8.0)).total
    3003
    """
    closed = jax.make_jaxpr(fun)(*args)
    jaxpr = _jax.open_jaxpr(closed)
    alive, used = _jax.dce(jaxpr, [True] * len(jaxpr.outvars))
    leaves = [x for x, use in zip(jax.tree.leaves(args), used) if use]

    @jax.jit
    def run(leaves: list[Any]) -> Counters:
        return _evaluate(alive, closed.consts, leaves, _zero())[1]

    matmul, total = (round(float(n) * _SCALE) for n in run(leaves))
    return flops.Flops(matmul, total)


def varies(fun: Callable, *args: Any) -> bool:
    """Return whether the FLOPs of a call depend on the values of its arguments."""
    jaxpr = _jax.open_jaxpr(jax.make_jaxpr(fun)(*args))
    return bool(flops.of_jaxpr(jaxpr).n_unknown_loops) or any(map(_has_branches, jaxpr.eqns))


def _has_branches(eqn: Any) -> bool:
    """Return whether an equation contains a `cond`."""
    bodies = (_jax.open_jaxpr(body) for body in _jax.jaxprs_of(eqn))
    return eqn.primitive.name == "cond" or any(_has_branches(e) for b in bodies for e in b.eqns)


def _zero() -> Counters:
    return jnp.float32(0), jnp.float32(0)


def _plus(counters: Counters, found: flops.Flops) -> Counters:
    return counters[0] + found.matmul / _SCALE, counters[1] + found.total / _SCALE


def _body(jaxpr: Any) -> Callable[[Sequence[Any], Counters], tuple[list[Any], Counters]]:
    """Return the function that evaluates a jaxpr in an equation's parameters."""
    return lambda values, n: _evaluate(
        _jax.open_jaxpr(jaxpr), getattr(jaxpr, "consts", ()), values, n
    )


def _evaluate(
    jaxpr: Any, consts: Sequence[Any], values: Sequence[Any], n: Counters
) -> tuple[list[Any], Counters]:
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values]))
    static = flops.Flops()
    for eqn in jaxpr.eqns:
        given = [v.val if isinstance(v, _jax.Literal) else env[v] for v in eqn.invars]
        found = flops.of_equation(eqn)
        if found.n_unknown_loops or _has_branches(eqn):
            outs, n = _counted(eqn, given, n)
        else:
            static += found
            outs = _bound(eqn, given)
        env.update(zip(eqn.outvars, outs))
    results = [v.val if isinstance(v, _jax.Literal) else env[v] for v in jaxpr.outvars]
    return results, _plus(n, static)


def _bound(eqn: Any, given: Sequence[Any]) -> list[Any]:
    found = eqn.primitive.get_bind_params(eqn.params)
    subfuns, params = found if isinstance(found, tuple) else ((), found)  # a tuple before JAX 0.12
    outs = eqn.primitive.bind(*subfuns, *given, **params)
    return outs if eqn.primitive.multiple_results else [outs]


def _counted(eqn: Any, given: Sequence[Any], n: Counters) -> tuple[list[Any], Counters]:
    """Evaluate an equation that contains a loop of unknown length or branches."""
    name, params = eqn.primitive.name, eqn.params
    if name == "while":
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        of_cond, of_body = given[:n_cond], given[n_cond : n_cond + n_body]
        cond, body = _body(params["cond_jaxpr"]), _body(params["body_jaxpr"])

        def advance(state: Any) -> Any:
            values, n = state
            _, n = cond([*of_cond, *values], n)
            return body([*of_body, *values], n)

        def goes_on(state: Any) -> Any:
            return cond([*of_cond, *state[0]], _zero())[0][0]

        return lax.while_loop(goes_on, advance, (given[n_cond + n_body :], n))
    if name == "scan":
        n_consts, n_carry = _jax.scan_arity(eqn)
        body = _body(params["jaxpr"])

        def step(state: Any, xs: Any) -> Any:
            carry, n = state
            outs, n = body([*given[:n_consts], *carry, *xs], n)
            return (outs[:n_carry], n), outs[n_carry:]

        init = given[n_consts : n_consts + n_carry], n
        xs = given[n_consts + n_carry :]
        options = {"length": params["length"], "reverse": params["reverse"]}
        (carry, n), ys = lax.scan(step, init, xs, **options)
        return [*carry, *ys], n
    if name == "cond":
        branches = [_body(branch) for branch in params["branches"]]
        return lax.switch(given[0], branches, given[1:], n)
    if jaxprs.is_linear_solve(eqn):
        return _body(params["jaxprs"].solve)(solve_operands(eqn, given), n)
    bodies = list(_jax.jaxprs_of(eqn))
    if not bodies or len(_jax.open_jaxpr(bodies[0]).invars) != len(given):
        raise NotImplementedError(f"a loop of unknown length or branches in {name}")
    return _body(bodies[0])(given, n)
