"""Marks: a decision about one value, written into the jaxpr that computes it.

A policy in JAX's form is asked about an equation, and gets the primitive, the operands' types and the
parameters. Those of `remat.policies` need more (all names of a value, its size, its place in the model),
and decide about values, not equations. So such a policy is evaluated on the whole jaxpr, with the bodies of
loops and called functions, and each value to save or offload gets an identity operation after it that holds
the decision:

    y = dot_general a b              y' = dot_general a b
                            ==>      y  = remat_mark[case=Saveable] y'

One fixed policy in JAX's form then suffices: follow the marks, and recompute all other values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from remat import _jax
from remat.aliases import Array, Atom, Aval, AxisData, Decision, Dim
from remat.ir import jaxprs

_jax.exclude_from_tracebacks(__file__)

mark_p = _jax.Primitive("remat_mark")
mark_p.def_impl(lambda x, **_: x)
mark_p.def_abstract_eval(lambda aval, **_: aval)


def _jvp(primals: Sequence[Array], tangents: Sequence[Array], **params: Any) -> tuple[Array, Array]:
    (x,), (t,) = primals, tangents
    return mark_p.bind(x, **params), t


def _batch(
    _: AxisData, args: Sequence[Array], dims: Sequence[Dim], **params: Any
) -> tuple[Array, Dim]:
    return mark_p.bind(args[0], **params), dims[0]


_jax.register_jvp(mark_p, _jvp)
_jax.register_batching(mark_p, _batch)
_jax.register_linear_transpose(mark_p, lambda ct, _, **__: [ct])
_jax.register_lowering(mark_p, lambda _, x, **__: [x])


def decide_by_marks(primitive: _jax.Primitive, /, *_: Aval, **params: Any) -> Decision:
    """Return the decision of a mark; recompute all other values. This is a policy in JAX's form."""
    return params["case"] if primitive is mark_p else _jax.Recompute


def without_marks(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a jaxpr without the marks that an earlier policy left in it."""
    return rewrite(jaxpr, "", lambda _: lambda eqn, path: {})


class Mark(NamedTuple):
    """The decision about a value, its names, and an equation with its place in the source."""

    case: Decision  # Saveable or an Offloadable
    names: tuple[str, ...]
    like: _jax.JaxprEqn


Decide = Callable[[_jax.Jaxpr], Callable[[_jax.JaxprEqn, str], dict[_jax.Var, Mark]]]


def rewrite(jaxpr: _jax.Jaxpr, path: str, decide: Decide) -> _jax.Jaxpr:
    """Replace all marks in a jaxpr, at every depth.

    Args:
      jaxpr: the jaxpr to rewrite; the same object is returned if nothing changes.
      path: the name stack that its equations' own stacks continue.
      decide: `decide(jaxpr)` is a function of an equation and its path, which gives the marks for
        its results.
    """
    marks_of = decide(jaxpr)
    eqns: list[_jax.JaxprEqn] = []
    same: dict[_jax.Var, Atom] = {}  # results of dropped marks
    changed = False

    def look(v: Atom) -> Atom:
        return same.get(v, v) if not isinstance(v, _jax.Literal) else v

    for eqn in jaxpr.eqns:
        if eqn.primitive is mark_p:
            same[eqn.outvars[0]] = look(eqn.invars[0])
            changed = True
            continue
        new = eqn
        if same:
            invars = [look(v) for v in eqn.invars]
            if any(a is not b for a, b in zip(invars, eqn.invars)):
                new = _jax.with_variables(eqn, invars)
        here = join(path, _jax.name_stack_of(eqn))
        for body in jaxprs.bodies_of(eqn):
            opened = _jax.open_jaxpr(body)
            rewritten = rewrite(opened, here, decide)
            if rewritten is not opened:
                new = jaxprs.replace_body(new, body, rewritten)
        marked = marks_of(eqn, here)
        if marked:
            fresh = [_jax.new_var(v.aval) if v in marked else v for v in eqn.outvars]
            eqns.append(new.replace(outvars=fresh))
            for v, unmarked in zip(eqn.outvars, fresh):
                if v in marked:
                    params = {"case": marked[v].case, "names": marked[v].names}
                    eqns.append(_jax.new_eqn([unmarked], [v], mark_p, params, marked[v].like))
        else:
            eqns.append(new)
        changed = changed or new is not eqn or bool(marked)
    if not changed:
        return jaxpr
    return _jax.rebuild(jaxpr, outvars=[look(v) for v in jaxpr.outvars], eqns=eqns)


def has_marks(jaxpr: _jax.Jaxpr) -> bool:
    return any(eqn.primitive is mark_p for eqn in jaxprs.equations(jaxpr, jaxprs.bodies_of))


def join(path: str, more: str) -> str:
    return f"{path}/{more}" if path and more else path or more
