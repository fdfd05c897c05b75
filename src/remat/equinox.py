"""`remat.equinox`: `filter_checkpoint` with the signature of Equinox's, and `fit` for steps on modules.

Equinox applies functions to pytrees with leaves of any type, and *filters* them: arrays are traced, and
other leaves are fixed. So the function (a pytree if it is a module or a module's bound method) and its
arguments are split: arrays become the inputs of a region, and the other leaves are put back inside.

Like Equinox's own, this traces the function in each call, since values that it closes over, and other
Python state that it reads, may have changed.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import equinox as eqx
import jax

from remat import _jax, array_leaves
from remat.aliases import PolicyLike, PyTree
from remat.errors import OptionError, TargetError
from remat.module_steps import FilteredStep
from remat.planner.fit_modules import FittedModules
from remat.planner.plan_file import Plan
from remat.selection import Selection, has_method
from remat.transform.checkpoint import checkpoint
from remat.transform.policies import check_policy
from remat.units import Number

__all__ = ["filter_checkpoint", "fit", "with_remat", "without_remat"]

_jax.exclude_from_tracebacks(__file__)


def __dir__() -> list[str]:
    return sorted(__all__)


def filter_checkpoint(
    fun: Callable | None = None, *, prevent_cse: bool = True, policy: PolicyLike = None
) -> Callable:
    """Make a function on pytrees recompute its linearization points when it is differentiated.

    >>> import equinox as eqx, jax, jax.numpy as jnp
    >>> from remat.equinox import filter_checkpoint
    >>> mlp = eqx.nn.MLP(2, 1, 8, depth=3, key=jax.random.key(0))
    >>> @eqx.filter_grad
    ... def gradient(mlp, x):
    ...     return filter_checkpoint(mlp)(x).sum()
    >>> gradient(mlp, jnp.ones(2)).layers[0].weight.shape
    (8, 2)

    Without `fun` it is a decorator, also of methods.

    Args:
      fun: a function, module, or method of a module. Arrays in it and in its arguments are traced;
        other leaves are fixed, and may be unhashable.
      prevent_cse: whether to keep the compiler from merging recomputation with the forward pass.
      policy: what may be saved, as in `remat.checkpoint`.

    Returns:
      A module that calls `fun`; its arrays are `fun`'s.

    Raises:
      TargetError: `fun` is not callable.
      PolicyError, EffectError: as for `remat.checkpoint`.
    """
    if fun is None:
        return functools.partial(filter_checkpoint, prevent_cse=prevent_cse, policy=policy)
    if not callable(fun):
        raise TargetError(f"filter_checkpoint takes a function or a callable module, not {fun!r}.")
    return eqx.module_update_wrapper(_Checkpointed(fun, prevent_cse, policy))


class _Checkpointed(eqx.Module):
    _fun: Callable
    _prevent_cse: bool = eqx.field(static=True)
    _policy: PolicyLike = eqx.field(static=True)

    @property
    def __wrapped__(self) -> Callable:
        return self._fun

    @_jax.api_boundary
    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        call = (_as_pytree(self._fun), args, kwargs)
        arrays, parts = array_leaves.split(call, eqx.is_array)

        def region(arrays: list[jax.Array]) -> PyTree:
            fun, args, kwargs = parts.join(arrays)
            arrays_out, rest = array_leaves.split(fun(*args, **kwargs), eqx.is_array)
            return arrays_out, array_leaves.Constant(rest)

        region.__name__ = getattr(self._fun, "__name__", type(self._fun).__name__)
        lifted = checkpoint(region, prevent_cse=self._prevent_cse, policy=self._policy)
        arrays_out, rest = lifted(arrays)
        return rest.value.join(arrays_out)

    def __get__(self, instance: eqx.Module | None, owner: type | None) -> Callable:
        return self if instance is None else eqx.Partial(self, instance)


def _as_pytree(fun: Callable) -> PyTree:
    """Return a bound method (`linear.__call__`) as a pytree with the arrays of its module."""
    if isinstance(fun, types.MethodType) and isinstance(fun.__self__, eqx.Module):
        return eqx.Partial(fun.__func__, fun.__self__)
    return fun


# --------------------------------------------------------------------------------------------------
# Steps with a budget or a plan


def fit(
    step: Callable, /, *, budget: Number | None = None, plan: Plan | None = None, **options: Any
) -> FittedModules:
    """Compile a training step on Equinox modules so that it fits a memory budget.

    It replaces `equinox.filter_jit`: arrays in the arguments are traced, and the step is compiled for
    the other leaves. Otherwise it behaves like `remat.fit`.

    >>> import equinox as eqx, jax, jax.numpy as jnp
    >>> import remat.equinox
    >>> def step(model, x):
    ...     loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
    ...     return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss
    >>> train = remat.equinox.fit(step, budget="90%", donate_argnums=0)
    >>> model = eqx.nn.MLP(16, 16, 16, depth=6, key=jax.random.key(0))
    >>> model, loss = train(model, jnp.ones((512, 16)))
    >>> train.plans[0].is_verified
    True

    Args:
      step: the training step, a function of modules.
      budget, plan: see `remat.fit`.
      options: those of `remat.fit` and `jax.jit`. `donate_argnums` donates the arrays of arguments.

    Returns:
      A callable with the arguments and results of the step, and the methods of a `remat.Fitted`.

    Raises:
      TargetError: the step is a module with arrays, or a method of one.
      OptionError: an option of `equinox.filter_jit`, or static arguments.
      StaticArgumentTypeError: when called: a leaf is neither an array nor hashable.
      PlanError, BudgetError, UnitsError: as for `remat.fit`.
    """
    owner = getattr(step, "__self__", step)
    # Transformed functions, such as those of `eqx.filter_grad`, are modules without arrays.
    if isinstance(owner, eqx.Module) and any(map(eqx.is_array, jax.tree.leaves(owner))):
        cls = type(owner).__name__
        method = "__call__" if owner is step else step.__name__
        raise TargetError(
            f"remat.equinox.fit takes a function of modules, and {cls}.{method} of an instance has its "
            f"arrays fixed. Pass the module as an argument: remat.equinox.fit({cls}.{method})(module, "
            "...), or a function that calls it."
        )
    if not callable(step):
        raise TargetError(f"remat.equinox.fit takes a training step, a function, not {step!r}.")
    if "donate" in options:
        raise OptionError(
            "remat.equinox.fit has donate_argnums= (and donate_argnames=) in place of donate=: "
            "donate_argnums=(0, 1) donates the arrays of the first two arguments."
        )
    for name in ("static_argnums", "static_argnames"):
        if name in options:
            raise OptionError(
                f"remat.equinox.fit has no {name}=: all that is not an array is static already."
            )
    return FittedModules(FilteredStep(step), dict(options, budget=budget, plan=plan))


# --------------------------------------------------------------------------------------------------
# Submodules selected by path


def with_remat(
    path_globs: str | Iterable[str],
    model: PyTree,
    *,
    policy: PolicyLike = None,
    prevent_cse: bool = True,
    methods: str | Iterable[str] = ("__call__",),
    strict: bool = True,
) -> PyTree:
    """Return a copy of a model with the modules at some paths rematerialized.

    The modules become instances of a subclass of their class, with that class's name and fields. So
    the leaves of the model and their paths stay the same, and `without_remat` restores the classes, also
    of a model that was trained in between.

    >>> import equinox as eqx, jax
    >>> import remat.equinox
    >>> mlp = eqx.nn.MLP(2, 1, 8, depth=3, key=jax.random.key(0))
    >>> rematted = remat.equinox.with_remat("layers/*", mlp)
    >>> rematted.layers[0].weight is mlp.layers[0].weight
    True
    >>> type(remat.equinox.without_remat(rematted).layers[0]) is eqx.nn.Linear
    True

    Args:
      path_globs: a pattern or several, as in `remat.rematted`. A path is made of field names and
        positions in containers, `layers/0`.
      model: an Equinox module, or a pytree with modules in it.
      policy, prevent_cse: as in `filter_checkpoint`.
      methods: a method name or several; those that a module has are rematerialized.
      strict: whether a pattern that matches nothing is an error.

    Raises:
      UnknownNameError: a pattern matches no module; the message lists the paths.
      TargetError: a pattern matches only modules without such a method.
      MethodError: `methods` has an item that is not a method name.
    """
    check_policy(policy)
    selection = Selection.of(path_globs, methods, strict=strict)
    return _with_remat(selection, model, policy, prevent_cse)


def _with_remat(
    selection: Selection, model: PyTree, policy: PolicyLike, prevent_cse: bool
) -> PyTree:
    classes: dict[str, type] = {}

    def change(path: str, module: eqx.Module) -> eqx.Module:
        classes[path] = cls = _plain(module)
        if not selection.selects(path, cls):
            return module
        changed = _rematted_class(cls, selection.methods, policy, prevent_cse)
        return _as_instance_of(changed, module)

    changed = _map_modules(change, model, "")
    selection.check(classes)
    return changed


def without_remat(model: PyTree) -> PyTree:
    """Return a model in which each module changed by `with_remat` or `rematted` has its original class."""
    return _map_modules(lambda _, module: _as_instance_of(_plain(module), module), model, "")


@contextlib.contextmanager
def rematted(
    selection: Selection,
    model: PyTree,
    *,
    policy: PolicyLike,
    prevent_cse: bool,
) -> Iterator[PyTree]:
    """Yield a changed copy of a model, for `remat.rematted`.

    Equinox modules are immutable, so nothing has to be undone at the end; `without_remat` restores the
    original classes of the copy, or of a model trained from it.
    """
    yield _with_remat(selection, model, policy, prevent_cse)


def _map_modules(
    change: Callable[[str, eqx.Module], eqx.Module], tree: PyTree, path: str
) -> PyTree:
    """Replace each module below the root, innermost first, by `change(path, module)`."""

    def is_inner(x: PyTree) -> bool:
        return x is not tree and isinstance(x, eqx.Module)

    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_inner)
    leaves = []
    for keys, leaf in found:
        if is_inner(leaf):
            name = jax.tree_util.keystr(keys, simple=True, separator="/")
            here = f"{path}/{name}" if path else name
            leaf = change(here, _map_modules(change, leaf, here))
        leaves.append(leaf)
    return jax.tree.unflatten(structure, leaves)


class _Rematted:
    """Base class of the subclasses made here; `_plain_class` is the original class."""

    _plain_class: type


def _plain(module: eqx.Module) -> type:
    cls = type(module)
    return cls._plain_class if issubclass(cls, _Rematted) else cls


def _as_instance_of(cls: type, module: eqx.Module) -> eqx.Module:
    """Return a module with the same values of another class with the same fields."""
    if type(module) is cls:
        return module
    copy: eqx.Module = object.__new__(cls)
    vars(copy).update(vars(module))
    return copy


# Cached (1024 classes), since equal arguments must give the same class: pytrees of two classes differ.
@functools.lru_cache(maxsize=1024)
def _rematted_class(
    cls: type, methods: tuple[str, ...], policy: PolicyLike, prevent_cse: bool
) -> type:
    """Return a subclass whose methods are regions; one class for equal arguments."""
    lift = functools.partial(filter_checkpoint, policy=policy, prevent_cse=prevent_cse)
    namespace: dict[str, object] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    wanted = {name: _rematted_method(cls, name, lift) for name in methods if has_method(cls, name)}
    made = type(cls)(cls.__name__, (cls, _Rematted), namespace | wanted)
    made._plain_class = cls  # type: ignore[attr-defined]
    return made


def _rematted_method(cls: type, name: str, lift: Callable) -> Callable:
    @_jax.api_boundary
    @functools.wraps(getattr(cls, name))
    def rematted_method(self: eqx.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return lift(getattr(_as_instance_of(cls, self), name))(*args, **kwargs)

    return rematted_method
