"""The rules that run when a jaxpr is differentiated or batched, which the jaxpr itself does not contain.

A call of a function with `custom_jvp`, `custom_vjp` or `custom_vmap` is one equation of a jaxpr. The
function's rules are Python functions, which JAX calls when the jaxpr is differentiated or batched, so names
that `checkpoint_name` gives inside a rule are not in the jaxpr. To find them, each such equation is
transformed as JAX would transform it, on abstract values: rules are traced, and nothing is computed.

A rule may call functions that have rules: that of `jax.nn.relu` calls `relu` again. So the rules in the
program to which a rule is traced are traced once, too, which covers second derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from remat import _jax
from remat.aliases import Array, PyTree

_jax.exclude_from_tracebacks(__file__)

# Depth to which rules within rules are traced; a larger number covers higher derivatives.
_DEPTH = 2

# The primitives whose rules run in forward mode, in reverse mode, in transposition, and in batching.
_FORWARD = frozenset({"custom_jvp_call"})
_REVERSE = frozenset({"call_hi_primitive", "custom_vjp_call", "custom_vjp_call_jaxpr"})
_LINEAR = frozenset({"custom_lin", "linear_call"})  # custom_lin: custom_vjp that was differentiated
_BATCHED = frozenset({"custom_vmap_call"})
_RULES = _FORWARD | _REVERSE | _LINEAR | _BATCHED
# Primitives that bind mesh axes, outside of which their bodies cannot be traced.
_BRINGS_AXES = frozenset({"shard_map"})


def revealed(jaxpr: _jax.Jaxpr) -> Iterator[_jax.Jaxpr | None]:
    """Yield the jaxprs of the rules in a jaxpr, and None for each rule that could not be traced alone."""
    return _revealed(jaxpr, _DEPTH)


def _revealed(jaxpr: _jax.Jaxpr, depth: int) -> Iterator[_jax.Jaxpr | None]:
    for eqn in _with_rules(jaxpr, set()):
        for trace in _traces(eqn):
            try:
                shown = trace()
            except Exception:  # the user's rule may raise anything
                yield None
                continue
            yield shown
            if depth > 1:
                yield from _revealed(shown, depth - 1)


def _with_rules(jaxpr: _jax.Jaxpr, seen: set[int]) -> Iterator[_jax.JaxprEqn]:
    """Yield each equation with rules, at any depth, once.

    For those in a `shard_map` it is the `shard_map`, since they can be traced within its mesh axes only.
    """
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    for eqn in jaxpr.eqns:
        inside = [e for b in _jax.jaxprs_of(eqn) for e in _with_rules(_jax.open_jaxpr(b), seen)]
        if eqn.primitive.name in _RULES or (inside and eqn.primitive.name in _BRINGS_AXES):
            yield eqn
        if eqn.primitive.name not in _BRINGS_AXES:
            yield from inside


def _traces(eqn: _jax.JaxprEqn) -> Iterator[Callable[[], _jax.Jaxpr]]:
    """Yield functions that trace an equation's rules, one for each way in which JAX may call them."""
    name = eqn.primitive.name
    jaxpr = _jax.jaxpr_of_equation(eqn)
    if name in _FORWARD:
        yield functools.partial(_forward, jaxpr)
    if name in _REVERSE | _BRINGS_AXES:
        yield functools.partial(_reverse, jaxpr)
    if name in _LINEAR:
        n_residuals = eqn.params["num_res"] + eqn.params.get("num_callee_consts", 0)
        fixed = eqn.invars[:n_residuals]
        yield functools.partial(_transposed, jaxpr, [v not in fixed for v in jaxpr.invars])
    if name in _BATCHED | _BRINGS_AXES:
        # A batching rule is told which operands are batched, and may depend on it.
        n = len(jaxpr.invars)
        yield functools.partial(_batched, jaxpr, [True] * n)
        for alone in range(n if n > 1 else 0):
            yield functools.partial(_batched, jaxpr, [i == alone for i in range(n)])
            yield functools.partial(_batched, jaxpr, [i != alone for i in range(n)])


def _forward(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return the derivative."""
    return _jax.jvp_of_jaxpr(jaxpr, [_jax.has_tangent(aval) for aval in _jax.in_avals(jaxpr)])[0]


def _reverse(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return the forward and the backward pass as one jaxpr."""

    def run(*args: Array) -> PyTree:
        outs, pullback = jax.vjp(lambda *args: _jax.call_jaxpr(jaxpr, args), *args)
        return outs, pullback([_ones(out) for out in outs])

    return _jax.trace_call(run, *_jax.in_avals(jaxpr))[0]


def _transposed(jaxpr: _jax.Jaxpr, linear: list[bool]) -> _jax.Jaxpr:
    """Return the transpose with respect to the inputs that the jaxpr is linear in."""

    def run(*args: Array) -> PyTree:
        fixed = [x for x, lin in zip(args, linear) if not lin]
        rest = [x for x, lin in zip(args, linear) if lin]
        apply = lambda *rest: _jax.call_jaxpr(jaxpr, _jax.merge_lists(linear, fixed, rest))  # noqa: E731
        return jax.linear_transpose(apply, *rest)([jnp.ones_like(v.aval) for v in jaxpr.outvars])

    return _jax.trace_call(run, *_jax.in_avals(jaxpr))[0]


def _ones(out: Array) -> Array:
    if _jax.has_tangent(out):
        return jnp.ones_like(out)
    return np.zeros(out.shape, jax.dtypes.float0)


def _batched(jaxpr: _jax.Jaxpr, which: list[bool]) -> _jax.Jaxpr:
    """Return the jaxpr batched over two examples, which differ in the given operands only."""
    examples = [
        jax.ShapeDtypeStruct((2, *aval.shape), aval.dtype) if batched else aval
        for aval, batched in zip(_jax.in_avals(jaxpr), which)
    ]
    one = jax.vmap(
        lambda *args: _jax.call_jaxpr(jaxpr, args),
        in_axes=[0 if batched else None for batched in which],
        axis_size=2,
    )
    return _jax.trace_call(one, *examples)[0]
