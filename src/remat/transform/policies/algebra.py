"""The base class of policies, their combinations, and `save`, `recompute` and `offload`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, Unpack

import jax

from remat import _jax
from remat.aliases import Aval, Decision, Params, PolicyLike
from remat.errors import PolicyError, closest
from remat.transform.policies.selector import RegionValue, Selector, Selectors, check_strings

_jax.exclude_from_tracebacks(__file__)


class Policy:
    """The base of the policies of `remat.policies`; `opinion` decides about a value.

    A policy is also a callable `(primitive, *avals, **params)`, the form that `jax.checkpoint` accepts.
    Called like that it sees only one equation, and raises `PolicyError` if it needs more to decide.
    """

    def opinion(self, value: RegionValue) -> Decision:
        """Return `Saveable`, `Recompute`, an `Offloadable`, or None if it does not decide about a value."""
        raise NotImplementedError

    def parts(self) -> Iterator[Policy]:
        """Yield the policies that this one consists of, itself first."""
        yield self

    def __setstate__(self, state: dict[str, object]) -> None:
        # JAX's decisions are compared by identity, so they must not be copied: only then do copied and
        # unpickled policies equal the original.
        singletons = {_jax.SaveableType: _jax.Saveable, _jax.RecomputeType: _jax.Recompute}
        self.__dict__.update({name: singletons.get(type(v), v) for name, v in state.items()})

    def __call__(self, primitive: _jax.Primitive, /, *avals: Aval, **params: Any) -> Decision:
        eqn = _OneEquation(primitive, avals, params)
        problem = _needs_more_than_one_equation(self)
        if problem is not None:
            raise PolicyError(
                f"{self!r} {problem}, which jax.checkpoint does not tell a policy. "
                "Use remat.checkpoint."
            )
        name = params.get("name") if primitive is _jax.name_p else None
        names = frozenset() if name is None else frozenset({name})
        value = RegionValue(names, primitive.name, "", avals[0] if avals else None, eqn, False)
        return _jax.Recompute if (case := self.opinion(value)) is None else case

    def __or__(self, other: PolicyLike) -> Policy:
        return Either.of(self, as_policy(other))

    def __ror__(self, other: PolicyLike) -> Policy:
        return Either.of(as_policy(other), self)

    def __and__(self, other: PolicyLike) -> Policy:
        return Both.of(self, as_policy(other))

    def __rand__(self, other: PolicyLike) -> Policy:
        return Both.of(as_policy(other), self)

    def __invert__(self) -> Policy:
        return Not(self)

    def __rshift__(self, other: PolicyLike) -> Policy:
        return First.of(self, as_policy(other))

    def __rrshift__(self, other: PolicyLike) -> Policy:
        return First.of(as_policy(other), self)


# Cached, since a policy is asked about many equations.
@functools.lru_cache(maxsize=256)
def _needs_more_than_one_equation(policy: Policy) -> str | None:
    """Return why a policy cannot be asked about single equations; None if it can.

    A name is a separate equation after the one that computes the value, so a single equation shows
    either the name or the other properties.
    """
    leaves = [p for p in policy.parts() if not isinstance(p, (Either, Both, Not, First))]
    selectors = [p.selector if isinstance(p, Select) else None for p in leaves]
    if any(s is not None and s.path is not None for s in selectors):
        return "selects by path"
    if any(s is not None and s.names and s.primitive for s in selectors):
        return "selects by name and primitive at once"
    by_name = [s is not None and bool(s.names) for s in selectors]
    together = any(isinstance(p, (Both, Not, First)) for p in policy.parts())
    if together and any(by_name) and (not all(by_name) or _negates(policy)):
        return "combines names with other properties of a value"
    return None


def _negates(policy: Policy) -> bool:
    return any(isinstance(p, Not) for p in policy.parts())


class _OneEquation(NamedTuple):
    """An equation as JAX describes it to a policy, with an equation's attributes."""

    primitive: _jax.Primitive
    avals: tuple[Aval, ...]
    params: Params

    @property
    def invars(self) -> list[_Typed]:
        return [_Typed(aval) for aval in self.avals]

    @property
    def outvars(self) -> list[_Typed]:
        # JAX does not pass the result's type; that of the largest operand is used for counting.
        return [_Typed(max(self.avals, key=lambda a: getattr(a, "size", 0)))] if self.avals else []


class _Typed(NamedTuple):
    aval: Aval


@dataclasses.dataclass(frozen=True)
class Select(Policy):
    """One decision for all values that are selected."""

    case: Decision
    selector: Selector

    def opinion(self, value: RegionValue) -> Decision:
        # If symbolic dimensions leave the condition undecided, the value is recomputed, which never needs
        # more memory than requested.
        undecided = isinstance(self.case, _jax.RecomputeType)
        return self.case if self.selector.selects(value, undecided) else None

    def __repr__(self) -> str:
        verb = {_jax.SaveableType: "save", _jax.RecomputeType: "recompute"}
        arguments = self.selector.arguments()
        if isinstance(self.case, _jax.Offloadable):
            arguments += [f"src={self.case.src!r}", f"dst={self.case.dst!r}"]
        return f"{verb.get(type(self.case), 'offload')}({', '.join(arguments)})"


@dataclasses.dataclass(frozen=True)
class Everything(Policy):
    def opinion(self, value: RegionValue) -> Decision:
        return None if value.is_result_of_body else _jax.Saveable

    def __repr__(self) -> str:
        return "everything_saveable"


@dataclasses.dataclass(frozen=True)
class Nothing(Policy):
    def opinion(self, value: RegionValue) -> Decision:
        return None

    def __repr__(self) -> str:
        return "nothing_saveable"


@dataclasses.dataclass(frozen=True)
class _Combined(Policy):
    """Several policies in one; `a | (b | c)` holds the same three as `(a | b) | c`."""

    policies: tuple[Policy, ...]
    operator = ""

    @classmethod
    def of(cls, *policies: Policy) -> Policy:
        inner = (p.policies if isinstance(p, cls) else (p,) for p in policies)
        return cls(tuple(itertools.chain.from_iterable(inner)))

    def opinions(self, value: RegionValue) -> Iterator[Decision]:
        return (p.opinion(value) for p in self.policies)

    def parts(self) -> Iterator[Policy]:
        yield self
        for policy in self.policies:
            yield from policy.parts()

    def __repr__(self) -> str:
        return "(" + f" {self.operator} ".join(map(repr, self.policies)) + ")"


class Either(_Combined):
    operator = "|"

    def opinion(self, value: RegionValue) -> Decision:
        given = [case for case in self.opinions(value) if case is not None]
        return max(given, key=keep_rank) if given else None


class Both(_Combined):
    operator = "&"

    def opinion(self, value: RegionValue) -> Decision:
        given = list(self.opinions(value))
        if None in given:
            # A policy that does not decide about a value does not save it, so not all do.
            return None if not any(case is not None for case in given) else _jax.Recompute
        return min(given, key=keep_rank)


class First(_Combined):
    operator = ">>"

    def opinion(self, value: RegionValue) -> Decision:
        return next((case for case in self.opinions(value) if case is not None), None)


@dataclasses.dataclass(frozen=True)
class Not(Policy):
    inner: Policy

    def opinion(self, value: RegionValue) -> Decision:
        if value.is_result_of_body and not value.names:
            return None
        return _jax.Recompute if keep_rank(self.inner.opinion(value)) > 0 else _jax.Saveable

    def parts(self) -> Iterator[Policy]:
        yield self
        yield from self.inner.parts()

    def __repr__(self) -> str:
        return f"~{self.inner!r}"


@dataclasses.dataclass(frozen=True)
class Foreign(Policy):
    """A callable in JAX's form. It decides about the values that it saves or offloads."""

    function: Callable[..., Decision]

    @functools.cached_property
    def _own_names(self) -> tuple[str, ...]:
        """Return the parameters of the function that its positional arguments are bound to, in order."""
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (ValueError, TypeError):
            return ()
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(p.name for p in parameters if p.kind in kinds)

    def __call__(self, primitive: _jax.Primitive, /, *avals: Aval, **params: Any) -> Decision:
        """Return the function's decision about one equation.

        The equation's parameters with the names of the function's own positional parameters (`prim`,
        say) are left out: Python does not accept a name twice.
        """
        for name in self._own_names[: 1 + len(avals)]:
            params.pop(name, None)
        try:
            case = self.function(primitive, *avals, **params)
        except TypeError as e:
            self._check_signature(e, primitive, avals, params)
            raise
        if isinstance(case, _jax.Offloadable) and not _jax.stays_in_memory(
            primitive, avals, case.src
        ):
            return _jax.Recompute  # a copy to another memory: copied again if needed
        return case

    def _check_signature(
        self,
        error: TypeError,
        primitive: _jax.Primitive,
        avals: tuple[Aval, ...],
        params: Params,
    ) -> None:
        try:
            inspect.signature(self.function).bind(primitive, *avals, **params)
        except ValueError:
            return
        except TypeError:
            raise PolicyError(
                f"{self!r} cannot be asked about an equation as policy(primitive, *avals, **params): "
                f"{error}. If it is a function that makes a policy, call it and pass its result; if "
                "it is a policy, let it take **params."
            ) from error

    def opinion(self, value: RegionValue) -> Decision:
        primitive, params = value.eqn.primitive, value.eqn.params
        avals = [v.aval for v in value.eqn.invars]
        case = _jax.as_case(self(primitive, *avals, **params))
        for name in sorted(value.names):
            if keep_rank(case) > 0:
                break
            case = _jax.as_case(self(_jax.name_p, value.aval, name=name))
        return case if keep_rank(case) > 0 else None

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


def keep_rank(case: Decision) -> int:
    """Return a rank of how much a decision keeps: 2 on the device, 1 in another memory, 0 for nothing."""
    if isinstance(case, _jax.Offloadable):
        return 1
    return 2 if isinstance(case, _jax.SaveableType) else 0


def as_policy(policy: object) -> Policy:
    """Convert anything that `jax.checkpoint` accepts as a policy to one that combines with others.

    Raises:
      PolicyError: for the name of a policy, a class, a function that makes policies, or an object that is
        not callable.
    """
    if isinstance(policy, Policy):
        return policy
    if policy is None:
        return NOTHING
    if isinstance(policy, str):
        raise PolicyError(f"a policy is a value and not its name {policy!r}: {_offer(policy)}")
    if isinstance(policy, type):
        raise PolicyError(f"a policy is an instance of a class, not the class {policy.__name__}.")
    if not callable(policy):
        raise PolicyError(f"a policy is one of remat.policies or a callable, not {policy!r}.")
    if (maker := _name_of_maker(policy)) is not None:
        raise PolicyError(f"{maker} is a function that makes a policy: write {maker}(...).")
    return Foreign(policy)


NOTHING: Policy = Nothing()
EVERYTHING: Policy = Everything()


# --------------------------------------------------------------------------------------------------
# The public names, which error messages offer

# Filled while `jax_names` is imported, and constant from then on.
_public: dict[str, Policy | Callable[..., Policy]] = {}


def public(name: str, policy: Policy) -> Policy:
    """Register a policy under a name of `remat.policies`."""
    _public[name] = policy
    return policy


def maker(function: Callable[..., Policy]) -> Callable[..., Policy]:
    """Register a function of `remat.policies` that returns policies."""
    _public[function.__name__] = function
    return function


def public_names() -> list[str]:
    """Return the names of `remat.policies`."""
    return list(_public)


def _offer(name: str) -> str:
    if name not in _public:
        return closest(name, _public)
    call = "" if isinstance(_public[name], Policy) else "(...)"
    return f"write remat.policies.{name}{call}."


def _name_of_maker(function: object) -> str | None:
    """Return the name of a function of this library or JAX that returns policies; None for others."""
    for name, ours in _public.items():
        if isinstance(ours, Policy):
            continue
        if function is ours:
            return f"remat.policies.{name}"
        if function is getattr(jax.checkpoint_policies, name, None):
            return f"jax.checkpoint_policies.{name}"
    return None


# --------------------------------------------------------------------------------------------------
# Policies for selected values

_Maker = TypeVar("_Maker", bound=Callable[..., Policy])


def _with_selectors(make: _Maker) -> _Maker:
    """Give a function a signature that lists the selectors one by one, for `help`."""
    names, *own, _ = inspect.signature(make).parameters.values()
    types = {name: ref.__forward_arg__ for name, ref in Selectors.__annotations__.items()}
    selectors = [
        inspect.Parameter(f.name, names.KEYWORD_ONLY, default=f.default, annotation=types[f.name])
        for f in dataclasses.fields(Selector)
        if f.name in types
    ]
    make.__signature__ = inspect.Signature([names, *selectors, *own], return_annotation="Policy")  # type: ignore[attr-defined]
    _public[make.__name__] = make
    return make


@_with_selectors
def save(*names: str, **selectors: Unpack[Selectors]) -> Policy:
    """Save the values that all given selectors select; without selectors, every value.

    >>> import jax, jax.numpy as jnp, remat
    >>> @remat.checkpoint(policy=remat.policies.save("hidden*"))
    ... def f(x):
    ...     return jnp.sin(remat.checkpoint_name(jnp.sin(x), "hidden_1"))
    >>> remat.print_saved_residuals(f, 1.0)  # doctest: +ELLIPSIS
    f32[] from the argument x
    f32[] named 'hidden_1' from ...

    Args:
      *names: names given by `checkpoint_name`; `*`, `?` and `[...]` as in file names.
      primitive: names of JAX primitives, such as `"dot_general"`.
      dtype: dtypes of the value; `float` and `int` as JAX understands them when the policy is made.
      path: where in the model it is computed, `"encoder/*/attention"`: see `remat.globs`.
      min_bytes, max_bytes: bounds on its size, such as `"1MiB"`.
      min_flops_per_byte: a bound on the operations that made it, per byte of it.
        A value for which symbolic dimensions (`jax.export`) leave a bound undecided is not saved;
        constraints in `jax.export.symbolic_shape` decide more.
      strict: whether it is an error if names or a path match nothing in the region, or if JAX has no
        primitive with a name.

    Returns:
      A frozen policy, which combines with others by `|`, `&`, `~` and `>>`.

    Raises:
      TypeError: for an unknown selector.
      PolicyError: for a selector of a wrong type, or bounds that no value can hold.
      UnitsError: for a size that is not a number of bytes.
    """
    return Select(_jax.Saveable, Selector.of(names, selectors))


@_with_selectors
def recompute(*names: str, **selectors: Unpack[Selectors]) -> Policy:
    """Recompute the values that all given selectors select (`save` explains them).

    Alone it has no effect, since values are recomputed anyway. It is the first part of a chain:

    >>> import remat
    >>> remat.policies.recompute(min_bytes="64MiB") >> remat.policies.dots_saveable
    (recompute(min_bytes=67108864) >> dots_saveable)
    """
    return Select(_jax.Recompute, Selector.of(names, selectors))


@_with_selectors
def offload(
    *names: str, src: str = "device", dst: str = "pinned_host", **selectors: Unpack[Selectors]
) -> Policy:
    """Keep the selected values in another memory until the backward pass (`save` has the selectors).

    Args:
      src, dst: the kinds of memory that a value is taken from and kept in.

    Raises:
      PolicyError: for a selector of a wrong type, or if `src` and `dst` are the same.
      MemoryKindError: when a function gets this policy and the backend has no such memory.
    """
    check_strings((src, dst), "kinds of memory")
    if src == dst:
        raise PolicyError(
            f"src and dst are both {src!r}, so nothing would be offloaded. Give another dst, such as "
            "'pinned_host'."
        )
    return Select(_jax.Offloadable(src, dst), Selector.of(names, selectors))
