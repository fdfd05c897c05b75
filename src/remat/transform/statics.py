"""Static arguments: which arguments of a call are static, and functions with these filled in.

As in `jax.jit`, they are given by position or by name. If the signature is known, each implies the other,
also for arguments that a call passes by keyword or leaves at their defaults.
"""

from __future__ import annotations

import inspect
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from remat import _jax
from remat.errors import StaticArgumentError, StaticArgumentTypeError, closest

_jax.exclude_from_tracebacks(__file__)


class Statics:
    """The static arguments of a function, by position and by name."""

    def __init__(
        self,
        argnums: tuple[int, ...],
        argnames: tuple[str, ...],
        signature: inspect.Signature | None,
    ):
        self.argnums = argnums
        self.argnames = argnames
        self.parameters = list(signature.parameters.values()) if signature else []
        self.any = bool(argnums or argnames)

    @staticmethod
    def of(fun: Callable, argnums: object, argnames: object) -> Statics:
        nums, names = as_argnums(argnums), as_argnames(argnames)
        signature = None
        if nums or names:
            try:
                signature = inspect.signature(fun)
            except (ValueError, TypeError):
                signature = None
        statics = Statics(nums, names, signature)
        if signature is not None:
            statics._check_against_signature(fun)
        return statics

    def positional(self) -> list[inspect.Parameter]:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [p for p in self.parameters if p.kind in kinds]

    def _has(self, kind: object) -> bool:
        return any(p.kind is kind for p in self.parameters)

    def _check_against_signature(self, fun: Callable) -> None:
        what = getattr(fun, "__name__", repr(fun))
        positional = self.positional()
        if not self._has(inspect.Parameter.VAR_POSITIONAL):
            for n in self.argnums:
                if not -len(positional) <= n < len(positional):
                    raise StaticArgumentError(
                        f"static_argnums={self.argnums}: {what} takes {len(positional)} positional "
                        f"arguments, so a number must be at least {-len(positional)} and less than "
                        f"{len(positional)}, but {n} was given."
                    )
        if not self._has(inspect.Parameter.VAR_KEYWORD):
            known = [p.name for p in self.parameters if p.kind is not p.VAR_POSITIONAL]
            for name in self.argnames:
                if name not in known:
                    raise StaticArgumentError(
                        f"static_argnames={self.argnames}: {what} has no argument {name!r}; "
                        f"{closest(name, known)}"
                    )

    def in_call(self, args: tuple, kwargs: dict) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return the positions and the keywords of the arguments that are static in one call."""
        if not self.any:
            return (), ()
        positional = self.positional()
        n_declared = len(positional)
        open_ended = not self.parameters or self._has(inspect.Parameter.VAR_POSITIONAL)
        positions: set[int] = set()
        names: set[str] = set(self.argnames) & set(kwargs)
        for n in self.argnums:
            total = len(args) if open_ended else n_declared
            position = n + total if n < 0 else n
            if 0 <= position < len(args):
                positions.add(position)
            elif 0 <= position < n_declared:
                # Given by keyword, or left at its default, which is static anyway.
                names |= {positional[position].name} & set(kwargs)
            else:
                raise StaticArgumentError(
                    "the `static_argnums` argument to `remat.checkpoint` can only take integer "
                    "values greater than or equal to `-len(args)` and less than `len(args)`, but "
                    f"got {self.argnums}, while `len(args)` = {len(args)}"
                )
        for name in self.argnames:
            for position, parameter in enumerate(positional[: len(args)]):
                if parameter.name == name:
                    positions.add(position)
        return tuple(sorted(positions)), tuple(sorted(names))


def as_argnums(given: object) -> tuple[int, ...]:
    items = given if isinstance(given, (tuple, list, range, set, frozenset)) else (given,)
    numbers = []
    for item in items:
        if isinstance(item, (bool, str)):
            raise StaticArgumentTypeError(
                f"static_argnums is an int or a sequence of ints, but {item!r} is in {given!r}."
            )
        try:
            numbers.append(operator.index(item))
        except TypeError as e:
            raise StaticArgumentTypeError(
                f"static_argnums is an int or a sequence of ints, but {item!r} is in {given!r}."
            ) from e
    return tuple(numbers)


def as_argnames(given: object) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Iterable):
        raise StaticArgumentTypeError(
            f"static_argnames is a string or a sequence of strings, not {given!r}."
        )
    names = tuple(given)
    for name in names:
        if not isinstance(name, str):
            raise StaticArgumentTypeError(
                f"static_argnames is a string or a sequence of strings, but {name!r} is among them."
            )
    return names


def without_statics(
    fun: Callable,
    args: tuple,
    kwargs: dict,
    argnums: tuple[int, ...],
    argnames: tuple[str, ...],
) -> tuple[Callable, tuple, dict]:
    """Return the function with its static arguments filled in, and the other arguments."""
    if not argnums and not argnames:
        return fun, args, kwargs
    static = tuple((n, args[n]) for n in argnums) + tuple((name, kwargs[name]) for name in argnames)
    dynamic_args = tuple(x for n, x in enumerate(args) if n not in argnums)
    dynamic_kwargs = {name: x for name, x in kwargs.items() if name not in argnames}
    return _specialized(fun, static, len(args)), dynamic_args, dynamic_kwargs


class _Specialization(NamedTuple):
    """A function with static arguments filled in."""

    fun: Callable[[], Callable | None]  # a weak reference to the function
    filled: Callable


# The id of the function, the number of arguments, and each static argument with the key of its value.
_Key = tuple[int, int, tuple[tuple[int | str, object], ...]]

# Keyed by the function (referenced weakly) and by the static values, so that each is traced once. A
# specialization must not keep alive its function, nor objects that are equal only to themselves, so it has
# weak references to them; the call in progress keeps them valid. Several threads may use the cache at
# once: each access to a dictionary is a single operation (list(d), unlike a loop over d, is not
# interrupted by other threads or finalizers), and if two threads add the same key, the first entry is used.
_specializations: weakref.WeakKeyDictionary[Callable, dict[_Key, _Specialization]] = (
    weakref.WeakKeyDictionary()
)
_MAX_SPECIALIZATIONS = 256  # of one function; more keep more functions traced, and more memory


def _specialized(
    fun: Callable, static: tuple[tuple[int | str, object], ...], n_args: int
) -> Callable:
    values = {where: _hold(value) for where, value in static}
    try:
        # Equal functions (two bound methods) may have different lifetimes.
        key = (id(fun), n_args, tuple((where, _key(held)) for where, held in values.items()))
        hash(key)
        known = _specializations.setdefault(fun, {})
        fun_held = weakref.ref(fun)
    except TypeError:
        known = None
    if known is None or any(isinstance(value, _jax.Tracer) for _, value in static):
        return _fill_in(lambda: fun, {where: _Strong(value) for where, value in static}, n_args)
    found = known.get(key)
    if found is None or found.fun() is not fun:
        _make_room(known)
        new = _Specialization(fun_held, _fill_in(fun_held, values, n_args))
        found = known.setdefault(key, new)
        if found.fun() is not fun:  # the entry is of a deleted function whose id was reused
            found = known[key] = new
    return found.filled


def _make_room(known: dict[_Key, _Specialization]) -> None:
    """Remove specializations whose function or values were deleted, and the oldest if there are too many."""
    keys = list(known)
    for key in keys:
        entry = known.get(key)
        if entry is None or entry.fun() is None or any(_is_dead(part) for _, part in key[-1]):
            known.pop(key, None)
    for key in keys[: max(0, len(known) - _MAX_SPECIALIZATIONS + 1)]:
        known.pop(key, None)


class _Strong:
    """A strong reference with the interface of a weak one."""

    def __init__(self, value: object):
        self.value = value

    def __call__(self) -> object:
        return self.value


def _hold(value: object) -> _Strong | weakref.ref:
    """Return a reference to a static value: a weak one if only the value itself is equal to it."""
    if type(value).__eq__ is object.__eq__ and not isinstance(value, type):
        try:
            return weakref.ref(value)
        except TypeError:
            pass
    return _Strong(value)


def _key(held: _Strong | weakref.ref) -> object:
    return _typed(held.value) if isinstance(held, _Strong) else held


def _typed(value: object) -> object:
    """Return a key that differs for values that are equal but not the same: 1, 1.0 and True, 0.0 and -0.0."""
    if isinstance(value, float):
        return (type(value), value, math.copysign(1.0, value))
    if isinstance(value, (tuple, frozenset)):
        return (type(value), type(value) is tuple and tuple(_typed(v) for v in value), value)
    return (type(value), value)


def _is_dead(part: object) -> bool:
    return isinstance(part, weakref.ref) and part() is None


def _fill_in(
    get_fun: Callable[[], Any], static: Mapping[int | str, Callable[[], object]], n_args: int
) -> Callable:
    def filled(*dynamic: Any, **kwargs: Any) -> Any:
        rest = iter(dynamic)
        args = [static[n]() if n in static else next(rest) for n in range(n_args)]
        by_name = {where: held() for where, held in static.items() if isinstance(where, str)}
        return get_fun()(*args, **kwargs, **by_name)

    return filled
