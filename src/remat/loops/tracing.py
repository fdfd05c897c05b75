"""A user's loop body as a jaxpr, with the checks and conversions of `jax.lax.scan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from remat import _jax
from remat.transform.checkpoint import checkpoint


class Traced(NamedTuple):
    """A body as a jaxpr (see `Loop.body`), the values it is closed over, and its first carry."""

    body: Any
    consts: list[Any]
    carry: list[Any]
    carry_tree: Any
    y_tree: Any


def trace_body(
    f: Callable[[Any, Any], tuple[Any, Any]], init: Any, x: Any, policy: Callable | None
) -> Traced | None:
    """Trace `f(carry, x) -> (carry, y)`; None if the carry changes its structure or type.

    `x` is a pytree of types. With a policy, what a step keeps while it is reversed
    is what the policy saves.
    """
    body = f if policy is None else checkpointed(f, policy)
    carry, carry_tree = jax.tree.flatten(init)
    carry = as_arrays(carry)
    # A carry that starts as a Python number takes the type of what follows it: trace again.
    for _ in range(3):
        jaxpr, consts, out = _jax.trace_call(body, jax.tree.unflatten(carry_tree, carry), x)
        if not isinstance(out, tuple) or len(out) != 2 or jax.tree.structure(out[0]) != carry_tree:
            return None
        types = jax.tree.leaves(out[0])
        if all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(carry, types)):
            return Traced(jaxpr, consts, carry, carry_tree, jax.tree.structure(out[1]))
        carry = [
            a.astype(t.dtype) if jax.typeof(a).weak_type and a.shape == t.shape else a
            for a, t in zip(carry, types)
        ]
    return None


def checkpointed(f: Callable, policy: Callable | None) -> Callable:
    """`f` recomputed when it is reversed; in the body of a loop nothing can undo that."""
    return checkpoint(f, policy=policy, prevent_cse=False)


def as_arrays(leaves: list[Any]) -> list[Any]:
    """Numbers and NumPy arrays as arrays of JAX; weak types stay.

    Rules of JAX hand out numbers, too, as subclasses of Python's that have a dtype.
    """
    numbers = (int, float, complex)
    return [
        x if isinstance(x, jax.Array) and not isinstance(x, numbers) else jnp.asarray(x)
        for x in leaves
    ]


def residual_bytes(traced: Traced) -> int:
    """Of what one step keeps to be reversed, without the consts and its slice of the xs."""
    types = _jax.in_avals(traced.body)
    inexact = [_jax.has_tangent(t) for t in types]

    def residuals(*values: Any) -> Any:
        def step(*marked: Any) -> list[Any]:
            replacement = iter(marked)
            out = _jax.call_jaxpr(
                traced.body, [next(replacement) if m else v for v, m in zip(values, inexact)]
            )
            return [y for y in out if _jax.has_tangent(y)]

        _, pull = jax.vjp(step, *(v for v, m in zip(values, inexact) if m))
        return jax.tree.leaves(pull)

    jaxpr, consts, _ = _jax.trace_call(residuals, *types)
    n_fixed, n_carry = len(traced.consts), len(traced.carry)
    inputs = jaxpr.invars[len(consts) :]
    fixed = {*jaxpr.invars[: len(consts)], *inputs[:n_fixed], *inputs[n_fixed + n_carry :]}
    return sum(n_bytes(v.aval) for v in {*filter(_jax.is_var, jaxpr.outvars)} - fixed)


def n_bytes(x: Any) -> int:
    """Of an array or of the type of one."""
    return int(x.size) * x.dtype.itemsize
