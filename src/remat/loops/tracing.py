"""A user's loop body as a jaxpr, with the checks and conversions of `jax.lax.scan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from remat import _jax
from remat.aliases import Arrays, PolicyLike, PyTree, Size, TreeDef
from remat.errors import EffectError
from remat.loops.halves import Halves, Masks, split_step
from remat.loops.sizes import n_bytes
from remat.transform.checkpoint import checkpoint

REFS_NOT_SUPPORTED = (
    "a remat loop does not support a ref that is not in the default memory, or that a function with "
    "custom derivative rules (jax.custom_vjp, jax.custom_jvp) in its body takes or creates. Carry the "
    "value of the ref through the loop instead."
)


class TracedBody(NamedTuple):
    """A body as a jaxpr (see `Loop.body`), the values that it closes over, and its initial carry.

    The values of refs that the body writes follow the user's carry in the carry.
    """

    body: _jax.Jaxpr
    consts: Arrays
    carry: Arrays
    carry_tree: TreeDef
    y_tree: TreeDef
    refs: Arrays

    def finish(self, carry: Arrays) -> PyTree:
        """Write the final values of the refs, and return the user's part of a final carry."""
        n_carry = len(carry) - len(self.refs)
        for ref, value in zip(self.refs, carry[n_carry:], strict=True):
            ref[...] = value
        return jax.tree.unflatten(self.carry_tree, carry[:n_carry])


def trace_body(
    f: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    init: PyTree,
    x: PyTree,
    policy: PolicyLike,
) -> TracedBody | None:
    """Trace `f(carry, x) -> (carry, y)`; return None if the carry changes its structure or type.

    `x` is a pytree of types. With a policy, a step saves the values that the policy selects.
    """
    body = f if policy is None else checkpointed(f, policy)
    carry, carry_tree = jax.tree.flatten(init)
    carry = as_arrays(carry)
    # A weakly typed initial carry (a Python number) takes the type of the next carry: trace again.
    for _ in range(3):
        jaxpr, consts, out = _jax.trace_call(body, jax.tree.unflatten(carry_tree, carry), x)
        if not isinstance(out, tuple) or len(out) != 2 or jax.tree.structure(out[0]) != carry_tree:
            return None
        types = jax.tree.leaves(out[0])
        if all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(carry, types)):
            traced = TracedBody(jaxpr, consts, carry, carry_tree, jax.tree.structure(out[1]), [])
            return _with_values(traced)
        carry = [
            a.astype(t.dtype) if jax.typeof(a).weak_type and a.shape == t.shape else a
            for a, t in zip(carry, types)
        ]
    return None


def _with_values(traced: TracedBody) -> TracedBody:
    """Add the values of refs that the body writes to the carry, and of refs it only reads to the consts."""
    pure, consts = values_of_refs(traced.body, traced.consts)
    if pure is None:
        return traced
    inputs, outs = list(pure.jaxpr.invars), list(pure.jaxpr.outvars)
    n_added, n_carry = len(pure.constants), len(traced.carry)
    n_consts = n_added + len(traced.consts)
    written = [False] * n_added + list(pure.is_written[: len(traced.consts)])
    moved = [v for v, w in zip(inputs, written) if w]
    fixed = [v for v, w in zip(inputs, written) if not w]
    invars = [*fixed, *inputs[n_consts : n_consts + n_carry], *moved, *inputs[n_consts + n_carry :]]
    n_outs = len(outs) - len(moved)
    outvars = [*outs[:n_carry], *outs[n_outs:], *outs[n_carry:n_outs]]
    return traced._replace(
        body=_jax.rebuild(pure.jaxpr, invars=invars, outvars=outvars),
        consts=[c for c, w in zip(consts, written) if not w],
        carry=[*traced.carry, *(c for c, w in zip(consts, written) if w)],
        refs=[c for c, w in zip(traced.consts, written[n_added:]) if w],
    )


def after_unused(traced: TracedBody, unused: Arrays) -> _jax.Jaxpr:
    """Return the body with additional leading inputs that it does not read."""
    types, inner = [jax.typeof(x) for x in unused], _jax.in_avals(traced.body)
    jaxpr, _, _ = _jax.trace_call(
        lambda _, values: _jax.call_jaxpr(traced.body, values), types, inner
    )
    return jaxpr


def values_of_refs(jaxpr: _jax.Jaxpr, consts: Arrays) -> tuple[_jax.WithoutRefs | None, Arrays]:
    """Rewrite a jaxpr on the values of the refs among its consts; return it and the new consts.

    The rewritten jaxpr is None if there are no refs.

    Raises:
      EffectError: the rewriting is unsupported.
    """
    refs = [_jax.is_ref(c) for c in consts]
    if not any(refs) and not _jax.uses_refs(jaxpr):
        return None, consts
    pure = _jax.without_refs(jaxpr)
    if pure is None:
        raise EffectError(REFS_NOT_SUPPORTED)
    return pure, [*pure.constants, *(c[...] if ref else c for c, ref in zip(consts, refs))]


def checkpointed(f: Callable, policy: PolicyLike) -> Callable:
    """Return `f` checkpointed without barriers: XLA does not merge computations of different loops."""
    return checkpoint(f, policy=policy, prevent_cse=False)


def as_arrays(leaves: Arrays) -> Arrays:
    """Return numbers and NumPy arrays as JAX arrays; weak types are kept.

    Numbers also come from JAX's own rules, as subclasses of Python's types with a dtype.
    """
    numbers = (int, float, complex)
    if any(map(_jax.is_ref, leaves)):
        raise EffectError(
            "a remat loop cannot carry a ref or scan over one. Let the body close over the ref, or pass "
            "its value, ref[...]."
        )
    return [
        x if isinstance(x, jax.Array) and not isinstance(x, numbers) else jnp.asarray(x)
        for x in leaves
    ]


def differentiated(traced: TracedBody) -> Halves | None:
    """Return a step in two halves, for derivatives with respect to all inputs; None if it has none."""
    marks = [_jax.has_tangent(t) for t in _jax.in_avals(traced.body)]
    out_marks = [_jax.has_tangent(t) for t in _jax.out_avals(traced.body)]
    first, n_carry = len(traced.consts), len(traced.carry)
    parts = (marks[:first], marks[first : first + n_carry], marks[first + n_carry :])
    try:
        return split_step(traced.body, Masks(*map(tuple, (*parts, out_marks[n_carry:]))))
    except Exception:  # differentiation rules raise errors of any type
        return None


def body_residual_bytes(halves: Halves | None) -> Size:
    """Return the bytes of one step's residuals, without values shared by all steps and its slice of the xs.

    A body without reverse-mode derivative has 0 bytes: such a loop can still be run.
    """
    return 0 if halves is None else sum(map(n_bytes, halves.kept))


def stacked_bytes(halves: Halves | None) -> Size:
    """Return the bytes of one step's residuals that `lax.scan` keeps; see `body_residual_bytes`."""
    return 0 if halves is None else sum(map(n_bytes, halves.stacked))
