"""`remat.checkpoint`: the public transform, from a function's arguments to one equation.

A call goes through four steps: static arguments are taken out, the function is traced to a jaxpr
(once for each function, signature and static values; the cache holds the function weakly), the
policy is checked against what was traced, and the primitive is bound.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax

from remat import _jax
from remat.errors import (
    PreventCseError,
    StaticArgumentError,
    StaticArgumentTypeError,
    closest,
)
from remat.transform import policies, primitive

_jax.exclude_from_tracebacks(__file__)

P = ParamSpec("P")
R = TypeVar("R")


@overload
def checkpoint(
    fun: Callable[P, R],
    /,
    *,
    concrete: bool = ...,
    prevent_cse: Any = ...,
    policy: Any = ...,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Iterable[str] = ...,
) -> Callable[P, R]: ...


@overload
def checkpoint(
    fun: None = None,
    /,
    *,
    concrete: bool = ...,
    prevent_cse: Any = ...,
    policy: Any = ...,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Iterable[str] = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


@_jax.api_boundary
def checkpoint(
    fun: Callable | None = None,
    /,
    *,
    concrete: bool = False,
    prevent_cse: Any = True,
    policy: Any = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Callable:
    """Make a function recompute its linearization points when it is differentiated.

    Differentiation in reverse needs the points at which the function's operations were linearized.
    Without `checkpoint` they are stored from the forward pass on; with it the function's inputs are
    stored, and what else is needed is recomputed when the cotangents arrive. Values and gradients are
    the same. The compiler's own figures show the difference:

    >>> import jax, jax.numpy as jnp, remat
    >>> def block(x):
    ...     for _ in range(8):
    ...         x = jnp.sin(jnp.cos(x))
    ...     return x
    >>> def loss(block, x):
    ...     for _ in range(8):
    ...         x = block(x)
    ...     return x.sum()
    >>> x = jnp.ones(10_000)
    >>> def temporaries(block):
    ...     step = jax.jit(jax.grad(lambda x: loss(block, x)))
    ...     return step.lower(x).compile().memory_analysis().temp_size_in_bytes
    >>> temporaries(remat.checkpoint(block)) < 0.5 * temporaries(block)
    True

    It is also a decorator, `@remat.checkpoint`, and with options a maker of decorators,
    `@remat.checkpoint(policy=...)`.

    Args:
      fun: the function. Its array arguments and results may be in any pytree.
      concrete: whether `fun` may branch in Python on the values of its arguments (`if x > 0`). It
        works wherever the values are known: outside `jit`, also under `grad`, `vjp`, `jvp` and
        `linearize`. What a branch depends on is evaluated twice, and `fun` is traced on every call.
      prevent_cse: whether to keep the compiler from merging recomputation with the forward pass,
        which would undo the effect. It costs nothing where it is not needed (in bodies of `scan`).
        A pytree prefix of the (non-static) arguments with bool leaves says it for each argument.
      policy: what may be saved: one of `remat.policies` or of `jax.checkpoint_policies`, or a
        callable `(primitive, *avals, **params)` that returns a bool, `Saveable`, `Recompute` or
        `Offloadable`. None saves nothing but the inputs. It reaches into loops, branches and
        jitted functions inside `fun`.
      static_argnums: positions of arguments that are not traced but specialize the function, as in
        `jax.jit`; negative ones count from the end. They apply to arguments given by keyword or
        left at their defaults, too. Values need not be hashable; those that are not, `fun` is traced
        for anew in every call.
      static_argnames: the same by name. Each of the two implies the other where `fun`'s signature
        tells the names.

    Returns:
      A function with the same signature and results as `fun`.

    Raises:
      StaticArgumentError: for static arguments that `fun` or a call does not have.
      PolicyError: for a policy that cannot mean what it says, such as one that selects a name that
        no value has.
      PreventCseError: for a `prevent_cse` that is no prefix of the arguments.
      EffectError: when it is differentiated and has an effect that must not happen twice.
    """
    if fun is None:
        return functools.partial(
            checkpoint,
            concrete=concrete,
            prevent_cse=prevent_cse,
            policy=policy,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )
    if not callable(fun):
        raise TypeError(f"remat.checkpoint takes a function, not {fun!r}.")
    if not isinstance(concrete, bool):
        raise TypeError(f"concrete is a bool, not {concrete!r}.")
    policies.check_policy(policy)
    cse = _normalize_prevent_cse(prevent_cse)
    statics = _Statics.of(fun, static_argnums, static_argnames)

    @_jax.wraps(fun)
    @_jax.api_boundary
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        argnums, argnames = statics.in_call(args, kwargs)
        debug = _jax.debug_info(fun, args, kwargs, argnums, argnames)
        traced, args, kwargs = _without_statics(fun, args, kwargs, argnums, argnames)
        leaves, in_tree = _jax.flatten_arguments((args, kwargs))
        avals = tuple(_jax.abstractify(x) for x in leaves)
        _jax.check_ref_arguments(debug, avals, leaves)
        jaxpr, consts, out_tree = _trace(traced, in_tree, avals, leaves, debug, concrete)
        _jax.check_captured_refs(debug, consts, leaves)
        outs = primitive.bind(
            (*consts, *leaves),
            jaxpr,
            policy=policy,
            prevent_cse=_flat_prevent_cse(cse, args, kwargs, len(consts)),
            names_pending=policies.check_names(policy, jaxpr),
        )
        return jax.tree.unflatten(out_tree, outs)

    return checkpointed


# --------------------------------------------------------------------------------------------------
# Tracing


def _trace(
    fun: Callable,
    in_tree: Any,
    avals: tuple[Any, ...],
    leaves: Sequence[Any],
    debug: Any,
    concrete: bool,
) -> tuple[_jax.Jaxpr, tuple[Any, ...], Any]:
    try:
        if concrete:
            values = [_jax.concrete_value(leaf) for leaf in leaves]
            return _jax.trace_concretely(fun, in_tree, avals, values, debug)
        return _cached_trace(fun, in_tree, avals, debug)
    except _jax.ConcretizationTypeError as e:
        (message,) = e.args
        if "for checkpoint" in message:
            e.args = (message + _CONCRETIZATION_HELP[concrete],)
        raise


_cached_trace = _jax.weakref_lru_cache(_jax.trace)

_STATIC_HELP = (
    "\n\nIn a function under remat.checkpoint, declare an argument that decides Python control flow "
    "in `static_argnums` or `static_argnames`; "
)
_CONCRETIZATION_HELP = {
    False: _STATIC_HELP
    + "outside jit, `concrete=True` makes the values of all arguments available.\n",
    True: _STATIC_HELP
    + "`concrete=True` is set, but here (under jit, vmap or a loop) the argument has no value yet.\n",
}


# --------------------------------------------------------------------------------------------------
# Static arguments


class _Statics:
    """Which arguments of a function are static, by position and by name."""

    def __init__(self, argnums: tuple[int, ...], argnames: tuple[str, ...], signature: Any):
        self.argnums = argnums
        self.argnames = argnames
        self.parameters = list(signature.parameters.values()) if signature else []
        self.any = bool(argnums or argnames)

    @staticmethod
    def of(fun: Callable, argnums: Any, argnames: Any) -> _Statics:
        nums, names = _as_argnums(argnums), _as_argnames(argnames)
        signature = None
        if nums or names:
            try:
                signature = inspect.signature(fun)
            except (ValueError, TypeError):
                signature = None
        statics = _Statics(nums, names, signature)
        if signature is not None:
            statics._check_against_signature(fun)
        return statics

    def _positional(self) -> list[inspect.Parameter]:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [p for p in self.parameters if p.kind in kinds]

    def _has(self, kind: Any) -> bool:
        return any(p.kind is kind for p in self.parameters)

    def _check_against_signature(self, fun: Callable) -> None:
        what = getattr(fun, "__name__", repr(fun))
        positional = self._positional()
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
        """The positions and keywords that are static in one call, given in whichever way."""
        if not self.any:
            return (), ()
        positional = self._positional()
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
                # Given by keyword, or left at its default, which is static as it is.
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


def _as_argnums(given: Any) -> tuple[int, ...]:
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


def _as_argnames(given: Any) -> tuple[str, ...]:
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


def _without_statics(
    fun: Callable,
    args: tuple,
    kwargs: dict,
    argnums: tuple[int, ...],
    argnames: tuple[str, ...],
) -> tuple[Callable, tuple, dict]:
    """The function with its static arguments filled in, and the arguments that remain."""
    if not argnums and not argnames:
        return fun, args, kwargs
    static = tuple((n, args[n]) for n in argnums) + tuple((name, kwargs[name]) for name in argnames)
    dynamic_args = tuple(x for n, x in enumerate(args) if n not in argnums)
    dynamic_kwargs = {name: x for name, x in kwargs.items() if name not in argnames}
    return _specialized(fun, static, len(args)), dynamic_args, dynamic_kwargs


# Functions with static arguments filled in. Each is found again by its function, held weakly, and
# by the static values, so that it is traced once. It must not keep its function alive either, nor
# objects that are equal to nothing but themselves, so it has weak references to them; the call in
# progress keeps them valid.
_specializations: weakref.WeakKeyDictionary[Callable, dict[Any, Callable]] = (
    weakref.WeakKeyDictionary()
)
_MAX_SPECIALIZATIONS = 256


def _specialized(fun: Callable, static: tuple[tuple[Any, Any], ...], n_args: int) -> Callable:
    values = {where: _hold(value) for where, value in static}
    try:
        key = (n_args, tuple((where, _key(held)) for where, held in values.items()))
        hash(key)
        known = _specializations.setdefault(fun, {})
        fun_held: Any = weakref.ref(fun)
    except TypeError:
        known = None
    if known is None or any(isinstance(value, _jax.Tracer) for _, value in static):
        return _fill_in(lambda: fun, {where: _Strong(value) for where, value in static}, n_args)
    found = known.get(key)
    if found is None:
        for dead in [k for k in known if any(_is_dead(part) for _, part in k[1])]:
            del known[dead]
        if len(known) >= _MAX_SPECIALIZATIONS:
            del known[next(iter(known))]
        found = known[key] = _fill_in(fun_held, values, n_args)
    return found


class _Strong:
    """A value in the place of a weak reference to it."""

    def __init__(self, value: Any):
        self.value = value

    def __call__(self) -> Any:
        return self.value


def _hold(value: Any) -> Any:
    """A reference to a static value: weak if only the value itself is equal to it."""
    if type(value).__eq__ is object.__eq__ and not isinstance(value, type):
        try:
            return weakref.ref(value)
        except TypeError:
            pass
    return _Strong(value)


def _key(held: Any) -> Any:
    return _typed(held.value) if isinstance(held, _Strong) else held


def _typed(value: Any) -> Any:
    """A key that tells apart what is equal and not the same: 1, 1.0 and True, 0.0 and -0.0."""
    if isinstance(value, float):
        return (type(value), value, math.copysign(1.0, value))
    if isinstance(value, (tuple, frozenset)):
        return (type(value), type(value) is tuple and tuple(_typed(v) for v in value), value)
    return (type(value), value)


def _is_dead(part: Any) -> bool:
    return isinstance(part, weakref.ref) and part() is None


def _fill_in(get_fun: Callable[[], Any], static: dict[Any, Any], n_args: int) -> Callable:
    def filled(*dynamic: Any, **kwargs: Any) -> Any:
        rest = iter(dynamic)
        args = [static[n]() if n in static else next(rest) for n in range(n_args)]
        by_name = {where: held() for where, held in static.items() if isinstance(where, str)}
        return get_fun()(*args, **kwargs, **by_name)

    return filled


# --------------------------------------------------------------------------------------------------
# prevent_cse


def _normalize_prevent_cse(given: Any) -> Any:
    if isinstance(given, bool):
        return given
    leaves = jax.tree.leaves(given)
    if not leaves or not all(isinstance(leaf, bool) for leaf in leaves):
        raise PreventCseError(
            "prevent_cse must be a bool or tuple of bools (or another pytree prefix of the arguments "
            f"with bool leaves), got {given!r} of {type(given)}"
        )
    return tuple(given) if isinstance(given, list) else given


def _flat_prevent_cse(given: Any, args: tuple, kwargs: dict, n_consts: int) -> Any:
    if isinstance(given, bool):
        return given
    arguments = (tuple(args), kwargs) if kwargs else tuple(args)
    try:
        flags = _jax.broadcast_prefix(given, arguments)
    except ValueError as e:
        raise PreventCseError(
            f"prevent_cse={given!r} is no pytree prefix of the arguments {jax.tree.structure(arguments)}"
            " (static ones left out; with keyword arguments the pair (args, kwargs)). Give a bool, or "
            "one bool for each argument."
        ) from e
    return (False,) * n_consts + tuple(flags)
