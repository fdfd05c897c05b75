"""Derivatives of a loop's body in a direction, where a function in it has only a reverse rule.

A function with a `jax.custom_vjp` has a rule for Jᵀ·w and none for J·v. A loop needs J·v in two places:

- In forward mode, which JAX does not define either. `refused` is a placeholder for its result: it raises when
  the value is computed, which a derivative in reverse mode never requires.
- In the second derivatives of reverse mode, which the loop finds as the gradient of ⟨w, J·v⟩ (see
  `derivative.py`). The rule for Jᵀ·w is usually linear in w, so its transpose is J.

A rule that is not linear in w (one that clips its cotangent, or adds to it) has no transpose. JAX
transposes some of these silently, so `push` looks at the equations first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
import numpy as np

from remat import _jax
from remat.aliases import Array, Arrays, Atom, Aval, AxisData, Dim, Eqn, JaxprLike, PyTree
from remat.errors import ForwardModeError
from remat.ir import jaxprs
from remat.ir.operations import names_where, operation
from remat.loops.linear import align_p

_NOT_DEFINED = (
    "the body of a loop of remat calls a function with a jax.custom_vjp, and forward mode (jax.jvp, "
    "jax.jacfwd, what jax.linearize returns) is not defined for those. Use reverse mode first, as "
    "jax.grad and jax.hessian do, or give the function a jax.custom_jvp."
)
_NOT_LINEAR = (
    "the body of a loop of remat calls a function with a jax.custom_vjp whose backward rule is not "
    "linear in its cotangent ({reason}), and a second derivative in reverse mode needs its transpose. "
    "Use jax.lax.scan, remat.scan without checkpoints=, or jax.custom_jvp."
)


def push(fun: Callable, primals: Sequence[Arrays], tangents: Sequence[Arrays]) -> PyTree:
    """Return the results of `fun` and their tangents, as `jax.jvp`, from the rules of reverse mode.

    Raises:
      ForwardModeError: if these are not linear.
    """
    out, pull = jax.vjp(fun, *primals)
    leaves, tree = jax.tree.flatten(out)
    # Integers have no tangents, which JAX writes as zeros of type float0.
    mask = [_jax.has_tangent(x) for x in leaves]
    none = [np.zeros(x.shape, jax.dtypes.float0) for x, m in zip(leaves, mask) if not m]

    def flat(*cotangents: Array) -> PyTree:
        return pull(jax.tree.unflatten(tree, _jax.merge_lists(mask, none, list(cotangents))))

    inexact = [x for x, m in zip(leaves, mask) if m]
    jaxpr, consts, _ = _jax.trace_call(flat, *inexact)
    _check_linear(jaxpr, len(consts))
    transpose = jax.linear_transpose(lambda *cts: _jax.call_jaxpr(jaxpr, [*consts, *cts]), *inexact)
    moved = transpose(jax.tree.leaves(tangents))
    return out, jax.tree.unflatten(tree, _jax.merge_lists(mask, none, list(moved)))


# --------------------------------------------------------------------------------------------------
# The placeholder for an undefined tangent

refused_p = _jax.Primitive("remat_no_forward_mode")


def refused(operands: Arrays, types: Sequence[Aval]) -> Arrays:
    """Return values of these types that raise when they are computed."""
    return refused_p.bind(*operands, types=tuple(types))


def has_forward_mode(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether a derivative can be run: it has no placeholders for undefined tangents."""
    # custom_lin: a custom_vjp that JAX differentiated forward.
    return not any(jaxprs.applies(jaxpr, name) for name in ("custom_lin", refused_p.name))


def surely_has_forward_mode(body: _jax.Jaxpr) -> bool:
    """Return whether the derivative of a body has forward mode; False if only tracing it can decide.

    An undefined tangent comes from a `jax.custom_vjp`, from an undefined tangent, or from the linear map
    of a loop, whose own derivative is not in the jaxpr. A loop that is not differentiated shows its body.
    """
    undecided = ("custom_lin", refused_p.name, "remat_linear")
    return not uses_custom_vjp(body) and not any(jaxprs.applies(body, name) for name in undecided)


def uses_custom_vjp(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether a jaxpr calls a function with a `jax.custom_vjp`, however deep."""
    return any(e.primitive.name.startswith("custom_vjp_call") for e in jaxprs.equations(jaxpr))


def uses_custom_jvp(jaxpr: JaxprLike) -> bool:
    """Return whether a jaxpr calls a function with a `jax.custom_jvp`, loops of this library aside."""
    found = (e for e in jaxprs.equations(jaxpr) if e.primitive.name == "custom_jvp_call")
    bodies = (_jax.open_jaxpr(body) for e in found for body in _jax.jaxprs_of(e))
    return any(all(e.primitive is not align_p for e in body.eqns) for body in bodies)


def _refuse(*_: object, **__: object) -> NoReturn:
    raise ForwardModeError(_NOT_DEFINED)


def _batch(
    axis: AxisData, args: Sequence[Array], dims: Sequence[Dim], *, types: tuple
) -> tuple[Arrays, list[int]]:
    batched = tuple(_jax.batched_type(t, axis) for t in types)
    return refused_p.bind(*args, types=batched), [0] * len(types)


_jax.register(
    refused_p,
    evaluate=_refuse,
    abstract=lambda *_, types: (list(types), set()),
    jvp=_refuse,
    transpose=_refuse,
    batch=_batch,
)


# --------------------------------------------------------------------------------------------------
# Linearity

# The kind of a value as a function of the cotangents.
_ZERO, _CONSTANT, _LINEAR = "zero", "constant", "linear"

_BILINEAR = names_where("is_bilinear")
_CALLS = frozenset(
    """
    jit pjit closed_call custom_jvp_call custom_vjp_call remat checkpoint remat_keep_rules
    """.split()  # noqa: SIM905
)


class _NotLinear(Exception):
    pass


def _check_linear(jaxpr: _jax.Jaxpr, n_consts: int) -> None:
    kinds = [_CONSTANT] * n_consts + [_LINEAR] * (len(jaxpr.invars) - n_consts)
    try:
        if _CONSTANT in _kinds_of_results(jaxpr, kinds):
            raise _NotLinear("it adds to it")
    except _NotLinear as error:
        raise ForwardModeError(_NOT_LINEAR.format(reason=error)) from None


def _kinds_of_results(jaxpr: JaxprLike, kinds: Sequence[str]) -> list[str]:
    """Return the kinds of a jaxpr's results, given those of its inputs."""
    jaxpr = _jax.open_jaxpr(jaxpr)
    kind = dict.fromkeys(jaxpr.constvars, _CONSTANT) | dict(zip(jaxpr.invars, kinds, strict=True))

    def of(v: Atom) -> str:
        if _jax.is_var(v):
            return kind[v]
        return _ZERO if not np.any(v.val) else _CONSTANT

    for eqn in jaxpr.eqns:
        found = _kinds_of_equation(eqn, [of(v) for v in eqn.invars])
        for v, k in zip(eqn.outvars, found, strict=True):
            if k == _LINEAR and not _jax.has_tangent(v.aval):
                raise _NotLinear(f"it computes {v.aval.dtype} numbers from it with {eqn.primitive}")
            kind[v] = k
    return [of(v) for v in jaxpr.outvars]


def _kinds_of_equation(eqn: Eqn, kinds: list[str]) -> list[str]:
    name, n_results = eqn.primitive.name, len(eqn.outvars)
    bodies = list(_jax.jaxprs_of(eqn))
    if name == "scan":
        return _kinds_of_scan(eqn, kinds)
    if name == "remat_linear":  # of a loop in the body
        n_nonlinear = eqn.params["n_consts"] + eqn.params["n_residuals"]
        if _LINEAR in kinds[:n_nonlinear]:
            raise _NotLinear("it runs a loop on it")
        return [_LINEAR if _LINEAR in kinds else _CONSTANT] * n_results
    if name in _CALLS:
        return _kinds_of_results(bodies[0], kinds)
    if name == "cond" and kinds[0] != _LINEAR:
        branches = [_kinds_of_results(body, kinds[1:]) for body in bodies]
        return [_joined(each) for each in zip(*branches)]
    if _LINEAR not in kinds:
        return [_ZERO if _is_zero(name, kinds) else _CONSTANT] * n_results
    if name in _BILINEAR:
        if kinds.count(_LINEAR) > 1:
            raise _NotLinear(f"it multiplies it with itself, {name}")
        return [_ZERO if _ZERO in kinds else _LINEAR] * n_results
    together = range(1, len(kinds)) if name == "select_n" else _linear_in(name, len(kinds))
    if any((k == _CONSTANT) if i in together else (k == _LINEAR) for i, k in enumerate(kinds)):
        mixed = name != "select_n" and bool(together) and _CONSTANT in kinds
        raise _NotLinear(f"it adds to it with {name}" if mixed else f"it computes {name} of it")
    return [_LINEAR] * n_results


def _is_zero(name: str, kinds: list[str]) -> bool:
    """Return whether an equation on values that do not depend on the cotangents gives zero."""
    if name in _BILINEAR:
        return _ZERO in kinds
    if name == "select_n":
        return set(kinds[1:]) == {_ZERO}
    together = _linear_in(name, len(kinds))
    return bool(together) and all(kinds[i] == _ZERO for i in together)


def _linear_in(name: str, n_operands: int) -> Sequence[int]:
    """Return the operands in which, taken together, a primitive is linear; the others must be constant."""
    row = operation(name)
    if row is None:
        return ()
    return range(n_operands) if row.linear_in is None else row.linear_in


def _kinds_of_scan(eqn: Eqn, kinds: list[str]) -> list[str]:
    first, n_carry = _jax.scan_arity(eqn)
    body = _jax.scan_body(eqn)
    while True:
        found = _kinds_of_results(body, kinds)
        carry = [_joined(pair) for pair in zip(kinds[first : first + n_carry], found)]
        if carry == kinds[first : first + n_carry]:
            return found
        kinds = [*kinds[:first], *carry, *kinds[first + n_carry :]]


def _joined(kinds: Sequence[str]) -> str:
    """Return the kind of a value that is one of several values, such as a result of branches."""
    different = set(kinds) - {_ZERO}
    if len(different) > 1:
        raise _NotLinear("it returns it in some cases only")
    return different.pop() if different else _ZERO
