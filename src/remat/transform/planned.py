"""Regions that somebody else decides about: what the primitive asks a planner, and nothing more.

A policy looks at one equation at a time. A planner looks at the whole region, and decides two things
when it is differentiated:

* in the forward pass, which known values are saved (a `Cut`, as for a policy);
* in the backward pass, in which *segments* the transposed program runs, and what each of them
  recomputes. This cannot be said before the region is transposed, because the operations that the
  segments are made of do not exist before.

So a planned region carries `Decisions` in place of a policy. Cutting it leaves one equation for the
backward pass whose body is: recompute everything that the linear part needs, then one equation with
the policy `LINEAR`. Whoever transposes it finds the linear part untouched in there, transposes it
alone, and asks for the backward program that interleaves the two.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

from remat import _jax
from remat.ir.operations import names_where
from remat.transform.cut import Cut


class _Planned(abc.ABC):  # noqa: B024
    def alike(self) -> contextlib.AbstractContextManager:
        """A context to derive in what is the same whatever is decided, for JAX's caches to know it."""
        return contextlib.nullcontext()


class Decisions(_Planned):
    """In place of a policy: decides about one region. Hashable; equal if it decides the same."""

    @abc.abstractmethod
    def cut(self, jaxpr: _jax.Jaxpr, ins_unknown: tuple[bool, ...]) -> tuple[Cut, Backward, Any]:
        """The two halves, and what goes in place of a policy on the equation of each.

        For the forward half that is a `Role`, or None where it needs no equation of its own. The
        last equation of the backward half applies the linear part and has the policy `LINEAR`.
        """


class Backward(_Planned):
    """In place of a policy, on the equation of a planned region's backward half."""

    @abc.abstractmethod
    def compose(
        self,
        known: Sequence[_jax.Var],
        consts: Sequence[_jax.Var],
        transposed: _jax.Jaxpr,
        nonlinear: Sequence[Any],
    ) -> tuple[_jax.Jaxpr | None, Any]:
        """The backward pass, and the `Role` of the equation that it becomes, or None.

        Args:
          known: the backward half's variables for residuals and inputs.
          consts: new variables for arrays that transposition brought in.
          transposed: the linear part, transposed: (nonlinear operands, cotangents) -> cotangents.
          nonlinear: which of these, or of the region's values, those operands are.

        Returns:
          A jaxpr from `known`, `consts` and the cotangents to `transposed`'s results, or None if
          these are not this planner's variables any more.
        """


class _Linear:
    def __repr__(self) -> str:
        return "LINEAR"


#: In place of a policy, on the equation of a linear part inside a backward half.
LINEAR = _Linear()


class _Fenced:
    def __repr__(self) -> str:
        return "FENCED"


#: In place of a policy, on a segment of a backward pass: it saves nothing, and its recomputation does
#: not start before its cotangents are there, also where nothing else would tell it from the rest of
#: a loop's body.
FENCED = _Fenced()


def alike(policy: Any) -> contextlib.AbstractContextManager:
    """The context of a planner's object; any other policy needs none."""
    return policy.alike() if isinstance(policy, _Planned) else contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Role:
    """In place of a policy, on an equation that is a plain call: what it is part of, for readers."""

    key: Any
    is_backward: bool


def is_call(policy: Any) -> bool:
    """Whether an equation with this in place of a policy is a plain call."""
    return policy is LINEAR or isinstance(policy, Role)


def after_change(policy: Any) -> Any:
    """What is left of a policy when the equation's body became another program.

    A backward half recomputes everything it needs; calls save everything if they are cut.
    """
    if isinstance(policy, Backward) or policy is FENCED:
        return None
    if isinstance(policy, Role) and not policy.is_backward:
        return save_compact
    return save_all if is_call(policy) else policy


def save_all(*_: Any, **__: Any) -> bool:
    """The policy that saves everything."""
    return True


_EXPANDING = names_where("is_expansion")


def save_compact(prim: _jax.Primitive, /, *_: Any, **__: Any) -> bool:
    """Saves what takes operations to compute, and nothing that is made large from little.

    JAX moves what does not change from step to step out of a loop, and cuts the body's forward half
    for that. Masks and constants of the size of activations would be there for the whole loop.
    """
    return prim.name not in _EXPANDING


def linear_equation(
    linear: _jax.Jaxpr, primitive: _jax.Primitive, like: _jax.JaxprEqn | None
) -> _jax.JaxprEqn:
    """The linear part as one equation on its own inputs."""
    outvars = [_jax.new_var(v.aval) for v in linear.outvars]
    params = {
        "jaxpr": linear,
        "policy": LINEAR,
        "prevent_cse": False,
        "differentiated": False,
        "names_pending": False,
        "cotangents": (),
    }
    return _jax.new_eqn(list(linear.invars), outvars, primitive, params, like)
