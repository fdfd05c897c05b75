"""Loops written by tracing a function that runs scans like one of the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from remat import _jax
from remat.aliases import Array, Atom, Aval
from remat.ir import jaxprs

_jax.exclude_from_tracebacks(__file__)


def bind_scan(
    like: _jax.JaxprEqn,
    step: _jax.Jaxpr,
    args: Sequence[Array],
    n_consts: int,
    n_carry: int,
    length: int,
) -> list[Array]:
    """Apply a scan like another, with another step and length."""
    body = _jax.with_equations(like.params["jaxpr"], step)
    params = _jax.with_scan_arity(dict(like.params, jaxpr=body), n_consts, n_carry)
    return list(like.primitive.bind(*args, **{**params, "length": length}))


def new_stack(aval: Aval, length: int) -> Array:
    """Return a stack of rows of a type, filled with zeros, in the memory of that type."""
    zeros = _jax.zeros(aval, (length,))
    return jax.device_put(zeros, jax.memory.Space.Host) if _jax.is_on_host(aval) else zeros


def with_rows(stacks: Sequence[Array], index: Array, rows: Sequence[Array]) -> list[Array]:
    """Return stacks in which the row at an index is replaced; the index is not negative."""
    return [
        lax.dynamic_update_index_in_dim(stack, row, index, 0, allow_negative_indices=False)
        for stack, row in zip(stacks, rows)
    ]


def equations_of(
    run: Callable[[Sequence[Array]], list[Array]],
    invars: Sequence[Atom],
    outvars: Sequence[_jax.Var],
    like: _jax.JaxprEqn,
) -> list[_jax.JaxprEqn]:
    """Return the equations of a function of these operands, with the source and names of `like`."""
    # JAX traces no function that takes a ref twice.
    keys = [v if _jax.is_ref(v) else i for i, v in enumerate(invars)]
    operands = dict(zip(keys, invars))

    def on_all(args: Sequence[Array]) -> list[Array]:
        given = dict(zip(operands, args))
        return run([given[key] for key in keys])

    types = [v.aval for v in operands.values()]
    with _jax.source_of(like):  # for equations inside of loops, too
        jaxpr, consts, _ = _jax.trace_call(on_all, types)
        if not jaxprs.makes_its_results(jaxpr):
            # A carry that no step changes is not computed by an equation.
            jaxpr, consts, _ = _jax.trace_call(
                lambda args: list(map(jnp.copy, on_all(args))), types
            )
    assert not consts, consts
    eqns = jaxprs.equations_on(jaxpr, list(operands.values()), outvars)
    return [eqn.replace(source_info=like.source_info) for eqn in eqns]
