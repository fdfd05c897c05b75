"""Facts about policies and regions, read from jaxprs.

After differentiation only the backward half of a region remains: its recomputation, and the part that
depends on the cotangents. It does not contain the values that the policy saved. So whether a policy matched
anything is read from the forward pass, and whether an inner policy was overridden from the values that the
outer region's backward half recomputes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from remat import _jax
from remat.aliases import PolicyLike
from remat.explain.phases import is_traced_region, parts
from remat.explain.unrolled import is_unrolled
from remat.ir import jaxprs
from remat.ir.equations import inline_body
from remat.transform import policies
from remat.transform.cut import save_compact


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Found:
    """A region's backward half, at any depth.

    Args:
      eqn: the equation.
      times: how often the step runs it.
      outer: the backward half of the region around it, if any.
      in_loop: whether it is in the body of a loop, where a compiler does not merge its two halves.
    """

    eqn: _jax.JaxprEqn
    times: int
    outer: Found | None
    in_loop: bool

    @property
    def policy(self) -> PolicyLike:
        return self.eqn.params.get("policy")


def all_regions(
    jaxpr: _jax.Jaxpr, times: int = 1, outer: Found | None = None, *, in_loop: bool = False
) -> Iterator[Found]:
    """Yield the backward halves of regions at any depth, outer ones first."""
    for eqn in jaxpr.eqns:
        inner = outer
        if is_traced_region(eqn):
            inner = Found(eqn, times, outer, in_loop)
            yield inner
        is_loop = eqn.primitive.name in ("scan", "while") and not is_unrolled(eqn)
        loops = in_loop or is_loop
        more = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        for body in _jax.jaxprs_of(eqn):
            yield from all_regions(_jax.open_jaxpr(body), more, inner, in_loop=loops)


def checkpointed_loops(jaxpr: _jax.Jaxpr) -> Iterator[_jax.JaxprEqn]:
    """Yield the backward halves of loops that keep some states and recompute the steps between."""
    for eqn in jaxprs.equations(jaxpr):
        if eqn.primitive.name == "remat_linear" and _jax.is_transposed(eqn):
            yield eqn


def is_meant_to_save(policy: PolicyLike) -> bool:
    """Return whether a policy is the user's own and meant to save something."""
    if policy is None or policy is save_compact or policy is policies.nothing_saveable:
        return False
    return getattr(policy, "__name__", "") != "nothing_saveable" and callable(policy)


@dataclasses.dataclass(frozen=True)
class RegionMatch:
    """A value that a policy saves: total bytes, type and source line."""

    n_bytes: int
    type: str
    source: str


def region_matches(
    policy: PolicyLike, jaxpr: _jax.Jaxpr, *, times: int = 1
) -> Iterator[RegionMatch]:
    """Return the values of a jaxpr that a policy saves, at any depth, backward halves left out."""
    opinion = policies.as_policy(policy).opinion
    named = policies.names_of_values(jaxpr)
    for eqn in jaxpr.eqns:
        if is_traced_region(eqn):
            continue
        for value, _ in policies.values_of(eqn, _jax.name_stack_of(eqn), named):
            case = opinion(value)
            if case is not None and case is not _jax.Recompute:
                yield RegionMatch(
                    times * value.n_bytes,
                    value.aval.str_short(short_dtypes=True),
                    _jax.source_line_of(eqn),
                )
        more = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        for body in jaxprs.bodies_of(eqn):
            yield from region_matches(policy, _jax.open_jaxpr(body), times=more)


def regions_with(policy: PolicyLike, jaxpr: _jax.Jaxpr) -> Iterator[_jax.JaxprEqn]:
    """Return the regions with this policy of a function that was not differentiated."""
    for eqn in jaxprs.equations(jaxpr):
        if "prevent_cse" in eqn.params and eqn.params.get("policy") is policy:
            yield eqn


def live_body(eqn: _jax.JaxprEqn) -> _jax.Jaxpr:
    """Return a region's body without dead code."""
    body = _jax.open_jaxpr(eqn.params["jaxpr"])
    return _jax.dce(body, [True] * len(body.outvars))[0]


def names_in(jaxpr: _jax.Jaxpr) -> dict[str, str]:
    """Return the checkpoint names at any depth, with the source line that first gives each."""
    found: dict[str, str] = {}
    for eqn in jaxprs.equations(jaxpr):
        name = _jax.checkpoint_name_of(eqn)
        if name is not None:
            found.setdefault(name, _jax.source_line_of(eqn))
    return found


def hides_names(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether a jaxpr calls a custom derivative, whose values are not in the jaxpr."""
    return any(map(_jax.has_hidden_rules, jaxprs.equations(jaxpr)))


_ANY_NAME = "any other name"  # a name that no program uses


def names_wanted(policy: PolicyLike) -> tuple[str, ...]:
    """Return the names that a policy mentions and saves, if it exposes them."""
    if isinstance(policy, policies.Policy):
        parts = [getattr(part, "names", ()) for part in policy.parts()]
        return tuple(dict.fromkeys(name for names in parts for name in names))
    return tuple(text for text in dict.fromkeys(_texts(policy)) if _saves_name(policy, text))


def names_excluded(policy: PolicyLike) -> tuple[str, ...]:
    """Return the names that a policy does not save, if it saves all others."""
    if isinstance(policy, policies.Policy) or not _saves_name(policy, _ANY_NAME):
        return ()
    return tuple(text for text in dict.fromkeys(_texts(policy)) if not _saves_name(policy, text))


def _saves_name(policy: Any, name: str) -> bool:
    """Return whether a policy in JAX's form saves or offloads values of a name, or cannot be asked."""
    try:
        case = policy(_jax.name_p, _jax.abstractify(1.0), name=name)
    except Exception:  # it reads further properties of an equation
        return True
    return case is not None and case is not False and case is not _jax.Recompute


def _texts(policy: PolicyLike) -> Iterator[str]:
    """Yield the strings that a policy holds: names, but also kinds of memory, for example."""
    # JAX's policy functions hold them in their closure, its newer policies as attributes.
    held = [cell.cell_contents for cell in getattr(policy, "__closure__", None) or ()]
    held += list(vars(policy).values()) if hasattr(policy, "__dict__") else []
    for item in held:
        if isinstance(item, str):
            yield item
        elif isinstance(item, (set, frozenset, tuple, list)):
            yield from sorted(x for x in item if isinstance(x, str))
        elif callable(item) and item is not policy:
            yield from _texts(item)


def split_regions(eqn: _jax.JaxprEqn) -> tuple[list[_jax.JaxprEqn], list[_jax.JaxprEqn]]:
    """Return a backward half's inlined equations: those that recompute, and those on cotangents."""
    return parts(eqn, jaxprs.inline_calls(_jax.open_jaxpr(eqn.params["jaxpr"]), _call))


def _call(eqn: _jax.JaxprEqn) -> _jax.Jaxpr | None:
    return None if is_traced_region(eqn) else inline_body(eqn)


def inlined(jaxpr: _jax.Jaxpr, chosen: Callable[[_jax.JaxprEqn], bool]) -> _jax.Jaxpr:
    """Return a step with some of its regions inlined, so that compilers can merge them."""

    def region(eqn: _jax.JaxprEqn) -> _jax.Jaxpr | None:
        is_one = eqn.primitive.name in ("remat", "remat2", "checkpoint") and chosen(eqn)
        return _jax.open_jaxpr(eqn.params["jaxpr"]) if is_one else None

    return jaxprs.inline_calls(jaxpr, region)
