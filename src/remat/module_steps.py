"""Steps that take modules, as functions of arrays that can be planned and compiled.

A training step may take more than arrays: an Equinox module holds activation functions beside its
weights, and a step on Flax NNX modules updates them in place. A `ModuleStep` is such a step as a
function of arrays. `arrays` turns the arguments of a call into pytrees of arrays, one for each argument,
so that the argument numbers in options of `jax.jit` stay valid. The step itself is called with these
pytrees while it is traced, and `Call.finish` converts what it returned into the caller's results.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

import jax

from remat import _jax, array_leaves
from remat.aliases import Key, Leaf, PyTree
from remat.errors import StaticArgumentTypeError, TargetError
from remat.printing import shown

_jax.exclude_from_tracebacks(__file__)


class Words(NamedTuple):
    """The names of functions for steps of a kind.

    Args:
      fit: the function that compiles a step within a budget.
      gradient: the function that returns a loss's value and gradient.
      donation: the option that donates arguments.
    """

    fit: str = "remat.fit"
    gradient: str = "jax.value_and_grad"
    donation: str = "donate_argnums"


_FILTER_JIT_DONATES = "donate"  # which `eqx.filter_jit` takes in place of donate_argnums


class Call(NamedTuple):
    """A call of a step as a function of arrays.

    Args:
      args, kwargs: the arguments as pytrees of arrays.
      finish: converts the step's results into the caller's, and writes updates to the caller's modules.
    """

    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    finish: Callable[[PyTree], PyTree]


class ModuleStep(ABC):
    """A step on modules as a function of arrays.

    Args:
      step: the user's step.
    """

    __name__ = "step"
    words = Words()

    def __init__(self, step: Callable) -> None:
        self.step = step
        functools.update_wrapper(self, step, updated=())

    @abstractmethod
    def arrays(self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> Call:
        """Return a call of the step as one of a function of arrays."""

    @abstractmethod
    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Call the step with what `arrays` returned; return what `Call.finish` takes."""


def of_arrays(
    step: Callable, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> tuple[Callable, tuple[PyTree, ...], dict[str, PyTree]]:
    """Return a step and its arguments as a function of arrays, for an analysis that does not run it.

    A step whose arguments JAX accepts as they are is returned unchanged.
    """
    fitted: Any = step
    if hasattr(
        step, "unplanned"
    ):  # made by `remat.fit`, which takes the arguments that `jax.jit` takes
        return step, args, dict(kwargs)
    if hasattr(fitted, "on_arrays"):  # made by an adapter's `fit`
        call = fitted.call(args, kwargs)
        return fitted.on_arrays, call.args, call.kwargs
    on_arrays: ModuleStep | None = None
    # Modules can only be among the arguments if the program has imported Flax.
    if "flax.nnx" in sys.modules:
        options = _jax.options_of_jit(getattr(step, "jitted_fn", None))  # of `nnx.jit`
        on_arrays = importlib.import_module("remat.nnx.steps").module_step(
            step, args, kwargs, options
        )
        if on_arrays is not None:
            call = on_arrays.arrays(args, kwargs)
            step = jax.jit(on_arrays, **options) if options else on_arrays
            args, kwargs = call.args, call.kwargs
    return with_fixed_leaves(step, args, kwargs)


def with_fixed_leaves(
    step: Callable, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> tuple[Callable, tuple[PyTree, ...], dict[str, PyTree]]:
    """Return a step and its arguments as a function of the leaves that JAX accepts."""
    leaves = jax.tree.leaves((args, dict(kwargs)))
    donated = _donated_by_filter_jit(step, len(args), kwargs)
    # A jitted function itself knows which arguments are static.
    if hasattr(step, "trace") or (not donated and all(map(_is_traceable, leaves))):
        return step, args, dict(kwargs)
    filtered = FilteredStep(step, _is_traceable)
    call = filtered.arrays(args, kwargs)
    return jax.jit(filtered, **donated) if donated else filtered, call.args, call.kwargs


def _donated_by_filter_jit(step: Callable, n_args: int, names: Iterable[str]) -> dict[str, Any]:
    """Return what `eqx.filter_jit(step, donate=...)` donates, as options of `jax.jit`.

    It can donate the first argument, the others, or all of them, and stores which in two attributes.
    """
    first = bool(getattr(step, "donate_first", False))
    rest = bool(getattr(step, "donate_rest", False))
    positions = tuple(i for i in range(n_args) if (rest if i else first))
    options: dict[str, Any] = {
        "donate_argnums": positions,
        "donate_argnames": tuple(names) if rest else (),
    }
    return {name: value for name, value in options.items() if value}


def check_takes_arrays(
    step: Callable, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree], error: TypeError
) -> None:
    """Raise for Equinox modules with leaves that are not arrays, which `jax.jit` has rejected."""
    if "equinox" not in sys.modules or isinstance(step, ModuleStep):
        return
    module = sys.modules["equinox"].Module
    for x in jax.tree.leaves((args, dict(kwargs)), is_leaf=lambda x: isinstance(x, module)):
        if isinstance(x, module):
            others = (leaf for leaf in jax.tree.leaves(x) if not _is_traceable(leaf))
            for leaf in others:
                raise TargetError(
                    f"remat.fit takes the arguments that jax.jit takes, arrays, and the "
                    f"{type(x).__name__} among them has other leaves, such as {shown(leaf)}. Write "
                    "remat.equinox.fit in place of remat.fit: it takes Equinox modules as they are."
                ) from error


def check_loses_no_updates(
    step: Callable, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> None:
    """Raise for a step that updates NNX modules among its arguments without returning them."""
    if "flax.nnx" in sys.modules and not isinstance(step, ModuleStep):
        importlib.import_module("remat.nnx.steps").check_loses_no_updates(step, args, kwargs)


def words_for(step: Callable) -> Words:
    """Return the names of functions for steps of this kind."""
    step = getattr(step, "unplanned", (step,))[0]
    for fun in (step, getattr(step, "__wrapped__", None)):
        if isinstance(fun, ModuleStep):
            return fun.words
    return Words(donation=_FILTER_JIT_DONATES) if hasattr(step, "donate_first") else Words()


def _is_traceable(leaf: Leaf) -> bool:
    """Return whether `jax.jit` accepts a leaf: an array, its type, a ref, or a number."""
    is_number = isinstance(leaf, (bool, int, float, complex))
    return is_array_like(leaf) or is_number or _jax.is_ref(leaf)


def is_array_like(leaf: Leaf) -> bool:
    """Return whether a leaf is an array, a tracer, or a `jax.ShapeDtypeStruct` in its place."""
    return array_leaves.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


# --------------------------------------------------------------------------------------------------
# Steps compiled for their leaves that are not arrays


class FilteredStep(ModuleStep):
    """A step whose arguments and results have arrays and other leaves.

    The other leaves of arguments are like static arguments: the step is compiled again for other values.
    """

    def __init__(self, step: Callable, is_traced: Callable[[Leaf], bool] = is_array_like) -> None:
        super().__init__(step)
        self.is_traced = is_traced
        if "equinox" in sys.modules:
            self.words = Words(
                "remat.equinox.fit", "eqx.filter_value_and_grad", _FILTER_JIT_DONATES
            )

    def arrays(self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> Call:
        """Return the call with each argument as a pytree of its arrays."""
        names = _parameter_names(self.step)
        of_args = tuple(
            self._filtered(x, names[i] if i < len(names) else f"argument {i}")
            for i, x in enumerate(args)
        )
        of_kwargs = {name: self._filtered(x, name) for name, x in kwargs.items()}
        return Call(of_args, of_kwargs, _joined)

    def __call__(self, *args: Filtered, **kwargs: Filtered) -> PyTree:
        """Call the step with its arguments joined again; return the result's arrays and the rest."""
        out = self.step(
            *(x.joined() for x in args), **{name: x.joined() for name, x in kwargs.items()}
        )
        arrays, rest = array_leaves.split(out, array_leaves.is_array)
        return arrays, array_leaves.Constant(rest)

    def _filtered(self, argument: PyTree, name: str) -> Filtered:
        found, structure = jax.tree_util.tree_flatten_with_path(argument)
        flags = tuple(self.is_traced(leaf) for _, leaf in found)
        for (path, leaf), is_traced in zip(found, flags):
            if not is_traced:
                _check_hashable(leaf, f"{name}{jax.tree_util.keystr(path)}")
        fixed = tuple(leaf for (_, leaf), is_traced in zip(found, flags) if not is_traced)
        paths = tuple(path for (path, _), is_traced in zip(found, flags) if is_traced)
        leaves = [leaf for (_, leaf), is_traced in zip(found, flags) if is_traced]
        try:
            return Filtered(Structure((structure, flags, fixed), paths), leaves)
        except TypeError as error:
            raise StaticArgumentTypeError(
                f"{name} has static fields that are not hashable ({error}): the step is compiled for "
                "their values. Make them hashable, such as a tuple in place of a list."
            ) from error


class Structure:
    """The static part of a pytree of arrays: the other leaves' values, and the paths of the arrays.

    Equal values of different types differ, as for `jax.jit`. The static values determine the paths, which
    therefore take no part in comparisons. With `may_be_unhashable`, values that cannot be hashed are only
    compared, as `jax.jit` does with static data of pytrees.
    """

    def __init__(
        self, fixed: PyTree, paths: tuple[tuple[Key, ...], ...], *, may_be_unhashable: bool = False
    ) -> None:
        self.fixed = fixed
        self.paths = paths
        try:
            self._hash = hash(fixed)
        except TypeError:
            if not may_be_unhashable:
                raise
            self._hash = hash(paths)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and (
            self is other
            or (self._hash == other._hash and bool(self.fixed == other.fixed) and self._same(other))
        )

    def _same(self, other: Structure) -> bool:
        return _types(self.fixed) == _types(other.fixed)


def _types(fixed: object) -> object:
    return tuple(map(_types, fixed)) if type(fixed) is tuple else type(fixed)


@dataclasses.dataclass(frozen=True, eq=False)
class LeavesWithPaths:
    """A pytree of leaves under their own paths; its subclasses are registered with JAX."""

    structure: Structure
    leaves: list[Leaf]

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Key, Leaf]], Structure]:
        """Return the leaves with their paths, and the structure."""
        return keyed(self.structure.paths, self.leaves), self.structure

    def tree_flatten(self) -> tuple[list[Leaf], Structure]:
        """Return the leaves and the structure."""
        return self.leaves, self.structure

    @classmethod
    def tree_unflatten(cls, structure: Structure, leaves: Iterable[Leaf]) -> Self:
        """Return the pytree with these leaves."""
        return cls(structure, list(leaves))


@jax.tree_util.register_pytree_with_keys_class
class Filtered(LeavesWithPaths):
    """An argument without its fixed leaves."""

    def joined(self) -> PyTree:
        """Return the argument as the step takes it."""
        tree, flags, fixed = self.structure.fixed
        return array_leaves.TracedParts(tree, flags, fixed).join(self.leaves)


@dataclasses.dataclass(frozen=True)
class Path:
    """Several keys of nested pytrees as one key."""

    keys: tuple[Key, ...]

    def __str__(self) -> str:
        return jax.tree_util.keystr(self.keys)


def keyed(paths: tuple[tuple[Key, ...], ...], leaves: list[Leaf]) -> list[tuple[Key, Leaf]]:
    """Return leaves with their paths as keys, in the form of JAX's `tree_flatten_with_keys`."""
    return [(Path(path), leaf) for path, leaf in zip(paths, leaves, strict=True)]


def _joined(results: PyTree) -> PyTree:
    arrays, rest = results
    return rest.value.join(arrays)


def _parameter_names(step: Callable) -> list[str]:
    try:
        return list(inspect.signature(step).parameters)
    except (TypeError, ValueError):
        return []


def _check_hashable(leaf: Leaf, name: str) -> None:
    try:
        hash(leaf)
    except TypeError as error:
        raise StaticArgumentTypeError(
            f"{name} is {shown(leaf)}, neither an array nor hashable: the step is compiled for the "
            "values of all leaves that are not arrays, so that these must be hashable. Make it an "
            "array, or a static field of a module."
        ) from error
