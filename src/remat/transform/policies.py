"""Policies: which values of a region are saved, recomputed or offloaded.

A policy is a frozen value: two that say the same are equal, so nothing is traced again. The blocks
are `save`, `recompute` and `offload`, each with selectors (a value is selected if all given ones
hold), and they combine:

    a | b      saved if either saves it
    a & b      saved if both do
    ~a         saved if `a` does not, and recomputed if it does
    a >> b     what `a` says of the values it speaks of, and what `b` says of the others

What no part of a policy speaks of is recomputed. All that `jax.checkpoint` takes as a policy is
taken here and combines with these, and what is made here can be given to `jax.checkpoint`, unless it
speaks of more than one equation shows (paths; names together with other properties): it says so.

A policy speaks of *values*. A value has the names that `checkpoint_name` gave it, all of them, and
the primitive that made it: `recompute("scores") >> everything_saveable` recomputes the value named
`scores`, although an unnamed `dot_general` made it.

Below the blocks stands every name of `jax.checkpoint_policies`, with that meaning, except where JAX's
own does not do what its name says (`save_anything_except_these_names` saves everything there,
`save_from_both_policies` refuses offloading ones). Names that no value of the region has are an
error here, also beside derivative and batching rules (see `hidden`); `strict=False` allows them.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import inspect
import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from remat import _jax, units
from remat.errors import MemoryKindError, PolicyError, UnknownNameError, closest
from remat.ir import flops
from remat.transform import hidden, marks

_jax.exclude_from_tracebacks(__file__)


# --------------------------------------------------------------------------------------------------
# What a policy decides on


class Value(NamedTuple):
    """One value of a region, as a policy sees it."""

    names: frozenset[str]  # given by checkpoint_name
    primitive: str
    path: str  # the name stack: "encoder/layer_0/attention"
    aval: Any
    eqn: Any  # the equation that makes it
    is_result_of_body: bool  # made by a loop, branch or called function, whose body has it too

    @property
    def n_bytes(self) -> int:
        return self.aval.size * _jax.itemsize_bytes(self.aval)

    @property
    def flops(self) -> int:
        # Of a loop or a call none of its own: the same work is met again inside.
        return 0 if self.is_result_of_body else flops.flops_of(self.eqn, transcendental=1)


# --------------------------------------------------------------------------------------------------
# Policies


class Policy:
    """Base of all policies made here: something that has an opinion on some values.

    A policy is also a callable `(primitive, *avals, **params)` as `jax.checkpoint` takes one. Called
    so it sees one equation alone, and refuses if what it says is not about one equation.
    """

    def opinion(self, value: Value) -> Any:
        """`Saveable`, `Recompute`, an `Offloadable`, or None: it does not speak of this value."""
        raise NotImplementedError

    def parts(self) -> Iterator[Policy]:
        """The policies that this one is made of, itself first."""
        yield self

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Copied and unpickled policies equal the original: JAX's decisions are objects without a value
        # of their own, of which there must be no copies.
        singletons = {_jax.SaveableType: _jax.Saveable, _jax.RecomputeType: _jax.Recompute}
        self.__dict__.update({name: singletons.get(type(v), v) for name, v in state.items()})

    def __call__(self, primitive: Any, /, *avals: Any, **params: Any) -> Any:
        eqn = _OneEquation(primitive, avals, params)
        problem = _needs_more_than_one_equation(self)
        if problem is not None:
            raise PolicyError(
                f"{self!r} {problem}, which jax.checkpoint does not tell a policy. "
                "Use remat.checkpoint."
            )
        name = params.get("name") if primitive is _jax.name_p else None
        names = frozenset() if name is None else frozenset({name})
        value = Value(names, primitive.name, "", avals[0] if avals else None, eqn, False)
        return _jax.Recompute if (case := self.opinion(value)) is None else case

    def __or__(self, other: Any) -> Policy:
        return _Either.of(self, as_policy(other))

    def __ror__(self, other: Any) -> Policy:
        return _Either.of(as_policy(other), self)

    def __and__(self, other: Any) -> Policy:
        return _Both.of(self, as_policy(other))

    def __rand__(self, other: Any) -> Policy:
        return _Both.of(as_policy(other), self)

    def __invert__(self) -> Policy:
        return _Not(self)

    def __rshift__(self, other: Any) -> Policy:
        return _First.of(self, as_policy(other))

    def __rrshift__(self, other: Any) -> Policy:
        return _First.of(as_policy(other), self)


@functools.lru_cache(maxsize=256)
def _needs_more_than_one_equation(policy: Policy) -> str | None:
    """Why a policy cannot be asked about equations one by one, if it cannot.

    A name is an equation of its own behind the one that makes the value, so the two meet in one
    decision only where all of a value is seen.
    """
    leaves = [p for p in policy.parts() if not isinstance(p, (_Either, _Both, _Not, _First))]
    if any(isinstance(p, _Select) and p.path is not None for p in leaves):
        return "selects by path"
    if any(isinstance(p, _Select) and p.names and p.primitive for p in leaves):
        return "selects by name and primitive at once"
    by_name = [isinstance(p, _Select) and bool(p.names) for p in leaves]
    together = any(isinstance(p, (_Both, _Not, _First)) for p in policy.parts())
    if together and any(by_name) and (not all(by_name) or _negates(policy)):
        return "combines names with other properties of a value"
    return None


def _negates(policy: Policy) -> bool:
    return any(isinstance(p, _Not) for p in policy.parts())


class _OneEquation(NamedTuple):
    """What a policy of JAX's kind is told, in the shape of an equation."""

    primitive: Any
    avals: tuple[Any, ...]
    params: dict[str, Any]

    @property
    def invars(self) -> list[_Typed]:
        return [_Typed(aval) for aval in self.avals]

    @property
    def outvars(self) -> list[_Typed]:
        # The result's type is not told; for what is counted here the largest operand stands for it.
        return [_Typed(max(self.avals, key=lambda a: getattr(a, "size", 0)))] if self.avals else []


class _Typed(NamedTuple):
    aval: Any


@dataclasses.dataclass(frozen=True)
class _Select(Policy):
    """One decision for all values that every given selector selects."""

    case: Any
    names: tuple[str, ...] = ()
    primitive: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    path: str | None = None
    min_bytes: int | None = None
    max_bytes: int | None = None
    min_flops_per_byte: float | None = None
    strict: bool = True

    def opinion(self, value: Value) -> Any:
        return self.case if self.selects(value) else None

    def selects(self, value: Value) -> bool:
        # The results of loops and calls are selected by what is only theirs: the same values are
        # met again, with their own properties, inside the body.
        if value.is_result_of_body and not self.names and value.primitive not in self.primitive:
            return False
        return (
            (not self.names or any(_name_matches(p, value.names) for p in self.names))
            and (not self.primitive or value.primitive in self.primitive)
            and (not self.dtype or str(getattr(value.aval, "dtype", None)) in self.dtype)
            and (self.path is None or path_matches(self.path, value.path))
            and (self.min_bytes is None or value.n_bytes >= self.min_bytes)
            and (self.max_bytes is None or value.n_bytes <= self.max_bytes)
            and (
                self.min_flops_per_byte is None
                or value.flops >= self.min_flops_per_byte * max(value.n_bytes, 1)
            )
        )

    def __repr__(self) -> str:
        verb = {_jax.SaveableType: "save", _jax.RecomputeType: "recompute"}
        arguments = [repr(name) for name in self.names]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("case", "names") and value != field.default:
                arguments.append(f"{field.name}={value!r}")
        if isinstance(self.case, _jax.Offloadable):
            arguments += [f"src={self.case.src!r}", f"dst={self.case.dst!r}"]
        return f"{verb.get(type(self.case), 'offload')}({', '.join(arguments)})"


@dataclasses.dataclass(frozen=True)
class _Combined(Policy):
    """Several policies in one; `a | (b | c)` holds the same three as `(a | b) | c`."""

    policies: tuple[Policy, ...]
    operator = ""

    @classmethod
    def of(cls, *policies: Policy) -> Policy:
        inner = (p.policies if isinstance(p, cls) else (p,) for p in policies)
        return cls(tuple(itertools.chain.from_iterable(inner)))

    def opinions(self, value: Value) -> Iterator[Any]:
        return (p.opinion(value) for p in self.policies)

    def parts(self) -> Iterator[Policy]:
        yield self
        for policy in self.policies:
            yield from policy.parts()

    def __repr__(self) -> str:
        return "(" + f" {self.operator} ".join(map(repr, self.policies)) + ")"


class _Either(_Combined):
    operator = "|"

    def opinion(self, value: Value) -> Any:
        given = [case for case in self.opinions(value) if case is not None]
        return max(given, key=_keeps_most) if given else None


class _Both(_Combined):
    operator = "&"

    def opinion(self, value: Value) -> Any:
        given = list(self.opinions(value))
        if None in given:
            # One that does not speak of a value does not save it, so not all do.
            return None if not any(case is not None for case in given) else _jax.Recompute
        return min(given, key=_keeps_most)


class _First(_Combined):
    operator = ">>"

    def opinion(self, value: Value) -> Any:
        return next((case for case in self.opinions(value) if case is not None), None)


@dataclasses.dataclass(frozen=True)
class _Not(Policy):
    inner: Policy

    def opinion(self, value: Value) -> Any:
        if value.is_result_of_body and not value.names:
            return None
        return _jax.Recompute if _keeps_most(self.inner.opinion(value)) else _jax.Saveable

    def parts(self) -> Iterator[Policy]:
        yield self
        yield from self.inner.parts()

    def __repr__(self) -> str:
        return f"~{self.inner!r}"


@dataclasses.dataclass(frozen=True)
class _Foreign(Policy):
    """A callable of JAX's kind. It speaks of what it saves or offloads."""

    function: Callable[..., Any]

    @functools.cached_property
    def _own_names(self) -> tuple[str, ...]:
        """The parameters of the function that its positional arguments are bound to, in order."""
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (ValueError, TypeError):
            return ()
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(p.name for p in parameters if p.kind in kinds)

    def __call__(self, primitive: Any, /, *avals: Any, **params: Any) -> Any:
        """What the function says of one equation.

        It is not shown those of the equation's parameters that are called like its own first
        parameters (`prim`, say): no function that is called so could be given both.
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
            return _jax.Recompute  # a copy in another memory, made anew from what it is a copy of
        return case

    def _check_signature(
        self, error: TypeError, primitive: Any, avals: tuple[Any, ...], params: dict[str, Any]
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

    def opinion(self, value: Value) -> Any:
        primitive, params = value.eqn.primitive, value.eqn.params
        avals = [v.aval for v in value.eqn.invars]
        case = _jax.as_case(self(primitive, *avals, **params))
        for name in sorted(value.names):
            if _keeps_most(case):
                break
            case = _jax.as_case(self(_jax.name_p, value.aval, name=name))
        return case if _keeps_most(case) else None

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


@dataclasses.dataclass(frozen=True)
class _Dots(Policy):
    """Matrix products and convolutions, which are dear to recompute."""

    batched: bool  # those with batch dimensions as well
    case: Any

    def opinion(self, value: Value) -> Any:
        eqn = value.eqn
        if value.primitive == "dot_general":
            _, (batch, _) = eqn.params["dimension_numbers"]
            return self.case if self.batched or not batch else None
        if value.primitive == "conv_general_dilated":
            return self.case if self.batched else None
        if value.primitive == "scaled_matmul_wrapper":  # cuDNN's, with a leading batch dimension
            return self.case if self.batched or eqn.invars[0].aval.shape[0] == 1 else None
        return None

    def __repr__(self) -> str:
        if isinstance(self.case, _jax.Offloadable):
            return f"offload_dot_with_no_batch_dims({self.case.src!r}, {self.case.dst!r})"
        return "dots_saveable" if self.batched else "dots_with_no_batch_dims_saveable"


@dataclasses.dataclass(frozen=True)
class _Everything(Policy):
    def opinion(self, value: Value) -> Any:
        return None if value.is_result_of_body else _jax.Saveable

    def __repr__(self) -> str:
        return "everything_saveable"


@dataclasses.dataclass(frozen=True)
class _Nothing(Policy):
    def opinion(self, value: Value) -> Any:
        return None

    def __repr__(self) -> str:
        return "nothing_saveable"


def _keeps_most(case: Any) -> int:
    """How much a decision keeps: 2 on the device, 1 in another memory, 0 nothing."""
    if isinstance(case, _jax.Offloadable):
        return 1
    return 2 if isinstance(case, _jax.SaveableType) else 0


def _name_matches(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def path_matches(pattern: str, path: str) -> bool:
    """Whether a value's name stack is at or below what a pattern describes.

    `*` and `?` stand for part of one name, `**` for any number of names. A pattern may begin
    anywhere in the stack, unless it starts with `/`.

    >>> path_matches("encoder/*/attention", "model/encoder/layer_3/attention/softmax")
    True
    >>> path_matches("/encoder", "model/encoder"), path_matches("enc", "encoder")
    (False, False)
    """
    wanted = [part for part in pattern.split("/") if part]
    if not pattern.startswith("/"):
        wanted = ["**", *wanted]
    return _match_parts(tuple(wanted), tuple(part for part in path.split("/") if part))


def _match_parts(wanted: tuple[str, ...], names: tuple[str, ...]) -> bool:
    # Row by row: after each pattern part, the set of positions in the path that it may end at.
    ends = {0}
    for part in wanted:
        if part == "**":
            ends = set(range(min(ends), len(names) + 1)) if ends else ends
        else:
            ends = {i + 1 for i in ends if i < len(names) and fnmatch.fnmatchcase(names[i], part)}
    return bool(ends)


# --------------------------------------------------------------------------------------------------
# Making policies


def save(
    *names: str,
    primitive: str | Iterable[str] = (),
    dtype: Any = (),
    path: str | None = None,
    min_bytes: int | str | None = None,
    max_bytes: int | str | None = None,
    min_flops_per_byte: float | None = None,
    strict: bool = True,
) -> Policy:
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
      path: where in the model it is computed, `"encoder/*/attention"`: see `path_matches`.
      min_bytes, max_bytes: bounds on its size, such as `"1MiB"`.
      min_flops_per_byte: a bound on the operations that made it, per byte of it.
      strict: whether it is an error that names or a path match nothing in the region, or that JAX has
        no primitive of a name.

    Returns:
      A frozen policy, which combines with others by `|`, `&`, `~` and `>>`.

    Raises:
      PolicyError: for a selector of a wrong type, or bounds that no value can hold.
      UnitsError: for a size that is no number of bytes.
    """
    return _select(
        _jax.Saveable,
        names,
        primitive,
        dtype,
        path,
        min_bytes,
        max_bytes,
        min_flops_per_byte,
        strict,
    )


def recompute(
    *names: str,
    primitive: str | Iterable[str] = (),
    dtype: Any = (),
    path: str | None = None,
    min_bytes: int | str | None = None,
    max_bytes: int | str | None = None,
    min_flops_per_byte: float | None = None,
    strict: bool = True,
) -> Policy:
    """Recompute the values that all given selectors select (`save` explains them).

    Alone it says nothing that is not so anyway; it is the first part of a chain:

    >>> import remat
    >>> remat.policies.recompute(min_bytes="64MiB") >> remat.policies.dots_saveable
    (recompute(min_bytes=67108864) >> dots_saveable)
    """
    return _select(
        _jax.Recompute,
        names,
        primitive,
        dtype,
        path,
        min_bytes,
        max_bytes,
        min_flops_per_byte,
        strict,
    )


def offload(
    *names: str,
    primitive: str | Iterable[str] = (),
    dtype: Any = (),
    path: str | None = None,
    min_bytes: int | str | None = None,
    max_bytes: int | str | None = None,
    min_flops_per_byte: float | None = None,
    strict: bool = True,
    src: str = "device",
    dst: str = "pinned_host",
) -> Policy:
    """Keep the selected values in another memory until the backward pass (`save` has the selectors).

    Args:
      src, dst: the kinds of memory that a value is taken from and kept in.

    Raises:
      PolicyError: for a selector of a wrong type, or if `src` and `dst` are the same.
      MemoryKindError: when a function gets this policy and the backend has no such memory.
    """
    _check_strings((src, dst), "kinds of memory")
    if src == dst:
        raise PolicyError(
            f"src and dst are both {src!r}, so nothing would be offloaded. Give another dst, such as "
            "'pinned_host'."
        )
    return _select(
        _jax.Offloadable(src, dst),
        names,
        primitive,
        dtype,
        path,
        min_bytes,
        max_bytes,
        min_flops_per_byte,
        strict,
    )


def _select(
    case: Any,
    names: tuple[str, ...],
    primitive: str | Iterable[str],
    dtype: Any,
    path: str | None,
    min_bytes: int | str | None,
    max_bytes: int | str | None,
    min_flops_per_byte: float | None,
    strict: bool,
) -> Policy:
    _check_strings(names, "checkpoint names")
    primitives = _as_items(primitive)
    _check_strings(primitives, "names of primitives")
    if path is not None:
        _check_strings((path,), "paths")
    fewest, most = (
        None if n is None else units.parse_bytes(n, f"{name}=")
        for name, n in (("min_bytes", min_bytes), ("max_bytes", max_bytes))
    )
    if fewest is not None and most is not None and fewest > most:
        raise PolicyError(
            f"min_bytes={min_bytes!r} is more than max_bytes={max_bytes!r}: no value has such a size. "
            "Exchange them, or leave one out."
        )
    if not isinstance(strict, bool):
        raise PolicyError(f"strict is a bool, not {strict!r}.")
    return _Select(
        case,
        names,
        primitives,
        tuple(_dtype_name(d) for d in _as_items(dtype)),
        path,
        fewest,
        most,
        None if min_flops_per_byte is None else _as_ratio(min_flops_per_byte),
        strict,
    )


def _as_items(given: Any) -> tuple[Any, ...]:
    """One selected thing or several of them; None for no selection."""
    if given is None:
        return ()
    if isinstance(given, (set, frozenset)):
        return tuple(sorted(given, key=str))  # equal sets make equal policies
    several = isinstance(given, Iterable) and not isinstance(given, str)
    return tuple(given) if several else (given,)


def _check_strings(given: Iterable[Any], what: str) -> None:
    for item in given:
        if isinstance(item, str) and item:
            continue
        hint = ""
        if isinstance(item, (list, tuple, set, frozenset)):
            hint = " Give them one by one, as in save(*names)."
        elif isinstance(item, _jax.Primitive):
            hint = f" Write {item.name!r}."
        raise PolicyError(f"{what} in a policy are non-empty strings, not {item!r}.{hint}")


def _dtype_name(given: Any) -> str:
    if given in (bool, int, float, complex):  # of the size that JAX gives such values now
        return str(jax.dtypes.canonicalize_dtype(given))
    try:
        if not isinstance(given, str) and jnp.issubdtype(given, jax.dtypes.extended):
            return str(given)
        dtype = jnp.dtype(given)
    except TypeError as e:
        offer = f"; {closest(given, _dtypes_of_jax())}" if isinstance(given, str) else "."
        raise PolicyError(f"dtype={given!r} in a policy is no dtype{offer}") from e
    if str(dtype) not in _dtypes_of_jax():
        raise PolicyError(f"dtype={given!r} in a policy: JAX has no arrays of type {dtype.name}.")
    return str(dtype)


def _dtypes_of_jax() -> list[str]:
    scalars = (v for v in vars(jnp).values() if isinstance(v, type(jnp.float32)))
    return sorted({str(jnp.dtype(scalar)) for scalar in scalars})


def _as_ratio(given: Any) -> float:
    number = isinstance(given, numbers.Real) and not isinstance(given, bool)
    if not number or not math.isfinite(given) or given < 0:
        raise PolicyError(
            "min_flops_per_byte is a number of operations per byte, finite and at least 0, "
            f"not {given!r}."
        )
    return float(given)


def as_policy(policy: Any) -> Policy:
    """Anything that `jax.checkpoint` takes as a policy, as one that combines with others."""
    if isinstance(policy, Policy):
        return policy
    if policy is None:
        return nothing_saveable
    if isinstance(policy, str):
        value = globals().get(policy)
        if isinstance(value, Policy):
            offer = f"write remat.policies.{policy}."
        elif policy in _public_names():
            offer = f"write remat.policies.{policy}(...)."
        else:
            offer = closest(policy, _public_names())
        raise PolicyError(f"a policy is a value and not its name {policy!r}: {offer}")
    if isinstance(policy, type):
        raise PolicyError(f"a policy is an instance of a class, not the class {policy.__name__}.")
    if not callable(policy):
        raise PolicyError(f"a policy is one of remat.policies or a callable, not {policy!r}.")
    if (maker := _name_of_maker(policy)) is not None:
        raise PolicyError(f"{maker} is a function that makes a policy: write {maker}(...).")
    return _Foreign(policy)


def _name_of_maker(function: Any) -> str | None:
    """The name of a function of ours or JAX's that makes policies and is none itself."""
    if getattr(function, "__module__", None) == __name__:
        return f"remat.policies.{function.__name__}"
    for name in _MAKERS_OF_JAX:
        if function is getattr(jax.checkpoint_policies, name, None):
            return f"jax.checkpoint_policies.{name}"
    return None


# --------------------------------------------------------------------------------------------------
# The names of jax.checkpoint_policies

_MAKERS_OF_JAX = (
    "offload_dot_with_no_batch_dims",
    "save_anything_except_these_names",
    "save_any_names_but_these",
    "save_only_these_names",
    "save_from_both_policies",
    "save_and_offload_only_these_names",
)

everything_saveable: Policy = _Everything()
nothing_saveable: Policy = _Nothing()
dots_saveable: Policy = _Dots(batched=True, case=_jax.Saveable)
checkpoint_dots = dots_saveable
dots_with_no_batch_dims_saveable: Policy = _Dots(batched=False, case=_jax.Saveable)
checkpoint_dots_with_no_batch_dims = dots_with_no_batch_dims_saveable


def offload_dot_with_no_batch_dims(offload_src: str, offload_dst: str) -> Policy:
    """Offload what `dots_with_no_batch_dims_saveable` saves of matrix products."""
    _check_strings((offload_src, offload_dst), "kinds of memory")
    return _Dots(batched=False, case=_jax.Offloadable(offload_src, offload_dst))


def save_anything_except_these_names(*names_not_to_save: str, strict: bool = True) -> Policy:
    """Save every value, named or not, other than those with one of these names."""
    if not names_not_to_save:
        return everything_saveable
    return recompute(*names_not_to_save, strict=strict) >> everything_saveable


def save_any_names_but_these(*names_not_to_save: str, strict: bool = True) -> Policy:
    """Save the values that have a name, other than those with one of these names."""
    if not names_not_to_save:
        return save("*", strict=False)
    return recompute(*names_not_to_save, strict=strict) >> save("*", strict=False)


def save_only_these_names(*names_which_can_be_saved: str, strict: bool = True) -> Policy:
    """Save the values with one of these names."""
    if not names_which_can_be_saved:
        return nothing_saveable
    return save(*names_which_can_be_saved, strict=strict)


def save_from_both_policies(policy_1: Any, policy_2: Any) -> Policy:
    """Save what either policy saves; offload what one offloads and the other does not save."""
    return as_policy(policy_1) | as_policy(policy_2)


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Iterable[str],
    names_which_can_be_offloaded: Iterable[str],
    offload_src: str,
    offload_dst: str,
    strict: bool = True,
) -> Policy:
    """Save the values with some names, offload those with others.

    Raises:
      PolicyError: if a name is in both.
    """
    for names in (names_which_can_be_saved, names_which_can_be_offloaded):
        if isinstance(names, str):
            raise PolicyError(f"the names to be saved or offloaded are a list: write [{names!r}].")
    saved, offloaded = tuple(names_which_can_be_saved), tuple(names_which_can_be_offloaded)
    both = sorted(set(saved) & set(offloaded))
    if both:
        raise PolicyError(
            "The names should be exclusive and should not intersect in `names_which_can_be_saved` "
            f"and `names_which_can_be_offloaded`. Got {saved} and {offloaded}, "
            f"whose intersection is {both}. Leave each name in one of them."
        )
    policy = save_only_these_names(*saved, strict=strict)
    if offloaded:
        policy = policy | offload(*offloaded, strict=strict, src=offload_src, dst=offload_dst)
    return policy


def _public_names() -> list[str]:
    policies = [name for name, value in globals().items() if isinstance(value, Policy)]
    return [*policies, "save", "recompute", "offload", *_MAKERS_OF_JAX]


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"module 'remat.policies' has no attribute {name!r}: {closest(name, _public_names())}"
    )


# --------------------------------------------------------------------------------------------------
# Applying a policy to a region


def resolve(policy: Any, jaxpr: _jax.Jaxpr) -> tuple[_jax.Jaxpr, Callable[..., Any]]:
    """A region and a policy of any kind, as a jaxpr and a callable of JAX's kind.

    A policy made here becomes marks in the jaxpr, at every depth; a foreign one stays what it is.
    """
    if isinstance(policy, Policy):
        return _marked(jaxpr, policy), marks.decide_by_marks
    if marks.has_marks(jaxpr):
        jaxpr = _unmarked(jaxpr)
    return jaxpr, _recompute_all if policy is None else _Foreign(policy)


def _recompute_all(*_: Any, **__: Any) -> bool:
    return False


@_jax.weakref_lru_cache
def _unmarked(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    return marks.without_marks(jaxpr)


@_jax.weakref_lru_cache
def _marked(jaxpr: _jax.Jaxpr, policy: Policy) -> _jax.Jaxpr:
    # `rewrite` may return the jaxpr itself; a cached value must not keep its own key alive.
    marked = marks.rewrite(jaxpr, "", functools.partial(_decide, policy))
    return _jax.rebuild(jaxpr) if marked is jaxpr else marked


def _decide(policy: Policy, jaxpr: _jax.Jaxpr) -> Callable[..., dict[_jax.Var, marks.Mark]]:
    """Asks a policy about the results of the equations of one jaxpr."""
    named = names_of_values(jaxpr)

    def marks_of(eqn: _jax.JaxprEqn, path: str) -> dict[_jax.Var, marks.Mark]:
        found = {}
        for value, var in values_of(eqn, path, named):
            case = policy.opinion(value)
            if isinstance(case, _jax.Offloadable) and not _jax.is_in_memory(value.aval, case.src):
                continue  # a copy in another memory, made anew from the value that it is a copy of
            if _keeps_most(case):
                like = named[var].eqn if var in named else eqn
                found[var] = marks.Mark(case, tuple(sorted(value.names)), like)
        return found

    return marks_of


class Named(NamedTuple):
    """The names that a value was given, and the first equation that gave one."""

    names: frozenset[str]
    eqn: _jax.JaxprEqn


def names_of_values(jaxpr: _jax.Jaxpr) -> dict[_jax.Var, Named]:
    """For each value that `checkpoint_name` was given, all its names, also those of its copies."""
    named: dict[_jax.Var, Named] = {}
    for eqn in reversed(jaxpr.eqns):
        name = _jax.checkpoint_name_of(eqn)
        if name is not None and not isinstance(eqn.invars[0], _jax.Literal):
            inner, outer = eqn.invars[0], eqn.outvars[0]
            names = frozenset({name})
            for v in (inner, outer):
                names |= named[v].names if v in named else frozenset()
            named[inner] = Named(names, eqn)
    # Naming an input: the input is available anyway, so the name belongs to the named copy, which
    # an offloading policy puts in the input's place.
    for v in jaxpr.invars:
        named.pop(v, None)
    return named


def values_of(
    eqn: _jax.JaxprEqn, path: str, named: dict[_jax.Var, Named]
) -> Iterator[tuple[Value, _jax.Var]]:
    """The values that an equation makes. A name makes none, except on an input of the jaxpr.

    Refs are no values: what they hold changes, so there is nothing to save.
    """
    name = _jax.checkpoint_name_of(eqn)
    if name is not None and eqn.invars[0] in named:
        return
    own = frozenset() if name is None else frozenset({name})
    has_body = _jax.has_body(eqn)
    for var in eqn.outvars:
        if _jax.is_dropped(var) or not _jax.is_array(var.aval):
            continue
        names = named[var].names | own if var in named else own
        yield Value(names, eqn.primitive.name, path, var.aval, eqn, has_body), var


# --------------------------------------------------------------------------------------------------
# Checking a policy against a region


def check_policy(policy: Any) -> None:
    """Refuse what is no policy, before anything is traced.

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


def _offloads(policy: Any) -> Iterator[Any]:
    for part in policy.parts() if isinstance(policy, Policy) else ():
        case = getattr(part, "case", None)
        if isinstance(case, _jax.Offloadable):
            yield case


class Contents(NamedTuple):
    """What there is in a jaxpr, at any depth, for a policy to select."""

    names: frozenset[str]  # given by checkpoint_name
    paths: frozenset[str]
    primitives: frozenset[str]

    def __or__(self, other: Contents) -> Contents:
        return Contents(*(mine | theirs for mine, theirs in zip(self, other)))


class _Absent(NamedTuple):
    """Something that a policy selects and a region does not have."""

    part: _Select
    what: str  # "name", "path" or "primitive"
    wanted: str


def check_names(policy: Any, jaxpr: _jax.Jaxpr) -> bool:
    """Refuse a policy that selects names or a path that no value of the region has.

    Values that only derivative and batching rules of the user's bring in count as well: such rules are
    traced if something is not found without them. Primitives need not be in the region, but must be
    known to JAX.

    Returns:
      Whether something was not found and there are rules that cannot be traced alone. Then the check is
      to be made again when the region is differentiated or batched.

    Raises:
      UnknownNameError: with the names or paths that there are.
    """
    if not isinstance(policy, Policy):
        return False
    strict = tuple(p for p in policy.parts() if isinstance(p, _Select) and p.strict)
    if not any(p.names or p.path is not None or p.primitive for p in strict):
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


def _absent(parts: Iterable[_Select], contents: Contents) -> _Absent | None:
    """The first thing that the parts of a policy select and that is not there."""
    for part in parts:
        for pattern in part.names:
            if not _name_matches(pattern, contents.names):
                return _Absent(part, "name", pattern)
        path = part.path
        if path is not None and not any(path_matches(path, there) for there in contents.paths):
            return _Absent(part, "path", path)
        for name in part.primitive:
            if name not in contents.primitives and name not in _jax.primitive_names():
                return _Absent(part, "primitive", name)
    return None


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


@_jax.weakref_lru_cache
def _contents_with_rules(jaxpr: _jax.Jaxpr, wanted: tuple[_Select, ...]) -> tuple[Contents, bool]:
    """What there is once rules are traced, until all that is wanted is found.

    Returns also whether a rule could not be traced.
    """
    contents = _contents(jaxpr)
    untraced = False
    for shown in hidden.revealed(jaxpr):
        if shown is None:
            untraced = True
            continue
        contents = contents | _contents(shown)
        if _absent(wanted, contents) is None:
            break
    return contents, untraced
