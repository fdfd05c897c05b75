"""Errors about invalid policies, and about selected names that a region does not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from remat import _jax
from remat.aliases import PolicyLike
from remat.errors import MemoryKindError, PolicyError, UnknownNameError, closest
from remat.globs import any_name_matches, path_matches
from remat.transform import derivative_rules, marks
from remat.transform.policies.algebra import Policy, Select, as_policy

_jax.exclude_from_tracebacks(__file__)


def check_policy(policy: object) -> None:
    """Raise for a value that is not a policy, before anything is traced.

    Raises:
      PolicyError: if it is not callable or not hashable.
      MemoryKindError: if it offloads from or to a memory that the default backend does not have.
    """
    as_policy(policy)
    try:
        hash(policy)
    except TypeError as e:
        raise PolicyError(
            f"the policy {policy!r} is not hashable, so nothing traced with it could be found again. "
            "Give its class a __hash__ or combine remat.policies."
        ) from e
    kinds = [k for case in _offloads(policy) for k in (case.src, case.dst)]
    if kinds:
        available = _jax.memory_kinds()
        for kind in kinds:
            if kind not in available:
                raise MemoryKindError(
                    f"{policy!r} offloads between memories of which the backend does not have "
                    f"{kind!r}: {closest(str(kind), available)}"
                )


def _offloads(policy: object) -> Iterator[_jax.Offloadable]:
    for part in policy.parts() if isinstance(policy, Policy) else ():
        case = getattr(part, "case", None)
        if isinstance(case, _jax.Offloadable):
            yield case


class Contents(NamedTuple):
    """The names, paths and primitives in a jaxpr, at any depth, that a policy can select."""

    names: frozenset[str]  # given by checkpoint_name
    paths: frozenset[str]
    primitives: frozenset[str]

    def __or__(self, other: Contents) -> Contents:
        return Contents(*(mine | theirs for mine, theirs in zip(self, other)))


class _Absent(NamedTuple):
    """Something that a policy selects and a region does not have."""

    part: Select
    what: str  # "name", "path" or "primitive"
    wanted: str


def check_names(policy: PolicyLike, jaxpr: _jax.Jaxpr) -> bool:
    """Raise for a policy that selects names or a path that no value of the region has.

    Values in the user's derivative and batching rules count, too: rules are traced if something is not found
    without them. Primitives need not be in the region, but must be known to JAX.

    Returns:
      Whether something was not found and there are rules that cannot be traced alone. The check must then
      be repeated when the region is differentiated or batched.

    Raises:
      UnknownNameError: the message lists the existing names or paths.
    """
    if not isinstance(policy, Policy):
        return False
    strict = tuple(p for p in policy.parts() if isinstance(p, Select) and p.selector.strict)
    selectors = [part.selector for part in strict]
    if not any(s.names or s.path is not None or s.primitive for s in selectors):
        return False
    if _absent(strict, _contents(jaxpr)) is None:
        return False
    contents, untraced = _contents_with_rules(jaxpr, strict)
    absent = _absent(strict, contents)
    if absent is None or untraced:
        return absent is not None
    raise UnknownNameError(
        f"{absent.part!r}: {_ABSENT[absent.what].format(absent.wanted)}; "
        f"{_offer(absent, contents)} Pass strict=False if it may be absent."
    )


_ABSENT = {
    "name": "no value in the checkpointed function is named {!r} by checkpoint_name",
    "path": "nothing in the checkpointed function is at {!r}",
    "primitive": "no primitive is called {!r}",
}


def _offer(absent: _Absent, contents: Contents) -> str:
    if absent.what != "primitive":
        return closest(absent.wanted, contents.names if absent.what == "name" else contents.paths)
    known = (contents.primitives, _jax.primitive_names())
    near = [n for names in known for n in difflib.get_close_matches(absent.wanted, sorted(names))]
    suggestion = f"did you mean {near[0]!r}? " if near else ""
    listing = ", ".join(repr(name) for name in sorted(contents.primitives))
    return f"{suggestion}The function has: {listing}."


def _absent(parts: Iterable[Select], contents: Contents) -> _Absent | None:
    """Return the first name, path or primitive that the parts of a policy select and that is absent."""
    for part in parts:
        for pattern in part.selector.names:
            if not any_name_matches(pattern, contents.names):
                return _Absent(part, "name", pattern)
        path = part.selector.path
        if path is not None and not any(path_matches(path, there) for there in contents.paths):
            return _Absent(part, "path", path)
        for name in part.selector.primitive:
            if name not in contents.primitives and name not in _jax.primitive_names():
                return _Absent(part, "primitive", name)
    return None


# Cached, since every region that calls the same function asks for its names.
@_jax.weakref_lru_cache
def _contents(jaxpr: _jax.Jaxpr) -> Contents:
    names: set[str] = set()
    paths: set[str] = set()
    primitives: set[str] = set()
    todo = [(jaxpr, "")]
    while todo:
        current, path = todo.pop()
        for eqn in current.eqns:
            here = marks.join(path, _jax.name_stack_of(eqn))
            paths.add(here)
            name = _jax.checkpoint_name_of(eqn)
            if name is not None:
                names.add(name)
            primitives.add(eqn.primitive.name)
            todo.extend((_jax.open_jaxpr(body), here) for body in _jax.jaxprs_of(eqn))
    return Contents(frozenset(names), frozenset(paths - {""}), frozenset(primitives))


# Cached, since tracing derivative rules is slow.
@_jax.weakref_lru_cache
def _contents_with_rules(jaxpr: _jax.Jaxpr, wanted: tuple[Select, ...]) -> tuple[Contents, bool]:
    """Return the contents of a jaxpr and of its rules, which are traced until all that is wanted is found.

    Also return whether a rule could not be traced.
    """
    contents = _contents(jaxpr)
    untraced = False
    for shown in derivative_rules.revealed(jaxpr):
        if shown is None:
            untraced = True
            continue
        contents = contents | _contents(shown)
        if _absent(wanted, contents) is None:
            break
    return contents, untraced
