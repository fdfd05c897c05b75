"""`remat.nnx.remat`: the signature of `flax.nnx.remat`.

An NNX module is a graph of Python objects with Variables in them. Around a region Flax turns the
graphs among the arguments into pytrees, and inside into graphs again; what the function changes
(Variables, counters of random streams, new attributes) comes out as a second result and is written
back to the caller's objects once. So a region here is a function of pytrees, and the recomputation,
which reads the same inputs, repeats no update and draws the same random numbers.

Flax has three modes, chosen by `graph` and `graph_updates`: graphs whose structure may change (the
default), graphs of fixed structure, and trees without shared Variables. The first is written here
on Flax's `to_tree` and `from_tree`, because its own composition refuses keyword arguments and
traces defaults, so that `train: bool = True` could not be left out. The others are Flax's own
function between the two conversions.

Known limits: a Variable that is closed over instead of being an argument cannot be changed inside,
as in every transformation of Flax.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flax import nnx
from flax.nnx import extract, graphlib
from flax.nnx.transforms.autodiff import SimpleRematFn
from flax.typing import MISSING, Missing

from remat import partition
from remat.errors import TargetError
from remat.globs import PathGlobs
from remat.transform.checkpoint import checkpoint
from remat.transform.policies import check_policy

_TAG = "remat"


def remat(
    f: Any = MISSING,
    *,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
    policy: Any = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Make a function of NNX modules recompute its linearization points when differentiated.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> import remat.nnx
    >>> class Block(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.linear = nnx.Linear(2, 2, rngs=rngs)
    ...         self.dropout = nnx.Dropout(0.5, rngs=rngs)
    ...     @remat.nnx.remat
    ...     def __call__(self, x):
    ...         return self.dropout(jnp.sin(self.linear(x)))
    >>> block = Block(nnx.Rngs(0))
    >>> grads = nnx.grad(lambda block: block(jnp.ones((1, 2))).sum())(block)
    >>> int(block.dropout.rngs.count[...])  # the recomputation draws no second mask
    1

    Args:
      f: a function, an unbound method (as a decorator in a class or as `Block.__call__`), or a
        module instance, which stands for its `__call__`. Left out, the result is a decorator.
      prevent_cse: whether to keep the compiler from merging recomputation with the forward pass.
      static_argnums: positions of arguments that are not traced; in a method, `self` is 0. They
        hold for arguments given by keyword or left at their defaults, too.
      policy: what may be saved, as in `remat.checkpoint`.
      graph: whether modules are graphs, which may share Variables, or trees; None is Flax's
        setting `nnx.set_graph_mode`.
      graph_updates: whether `f` may change the structure of the graphs, by new attributes for
        example; None is Flax's setting `nnx.set_graph_updates`.

    Returns:
      A function with the arguments, results and updates of `f`.

    Raises:
      TargetError: for a bound method or a class.
      StaticArgumentError, PolicyError, EffectError: as `remat.checkpoint` does.
    """
    if graph is None:
        graph = bool(graphlib.set_graph_mode.current_value())
    if graph_updates is None:
        graph_updates = bool(graphlib.set_graph_updates.current_value())
    options = {"prevent_cse": prevent_cse, "static_argnums": static_argnums, "policy": policy}
    if isinstance(f, Missing):
        return functools.partial(remat, graph=graph, graph_updates=graph_updates, **options)
    if isinstance(f, nnx.Module):
        return _of_instance(f, dict(options, graph=graph, graph_updates=graph_updates))
    _check_target(f)
    if graph and graph_updates:
        return _with_updates(f, options)
    return _without_updates(f, graph, options)


def _with_updates(f: Callable, options: dict[str, Any]) -> Callable:
    @functools.wraps(f)
    def inner(*trees: Any, **named_trees: Any) -> Any:
        args, kwargs = extract.from_tree((trees, named_trees), ctxtag=_TAG, is_inner=True)
        out = f(*args, **kwargs)
        changed = extract.clear_non_graph_nodes((args, kwargs))
        return extract.to_tree((changed, out), ctxtag=_TAG)

    region = checkpoint(inner, **options)

    @nnx.update_context(_TAG)
    @functools.wraps(f)
    def rematted(*args: Any, **kwargs: Any) -> Any:
        trees, named_trees = extract.to_tree((args, kwargs), ctxtag=_TAG)
        results = region(*trees, **named_trees)
        _, out = extract.from_tree(results, ctxtag=_TAG, is_inner=False)
        return out

    return rematted


def _without_updates(f: Callable, graph: bool, options: dict[str, Any]) -> Callable:
    region = checkpoint(SimpleRematFn(f, graph=graph), **options)

    @functools.wraps(f)
    def rematted(*args: Any, **kwargs: Any) -> Any:
        if graph:
            args, kwargs = extract.to_tree2((args, kwargs))
        variables = extract.check_no_aliases(_TAG, args=args, kwargs=kwargs)
        out, updates = region(*args, **kwargs)
        if graph:
            out = extract.from_tree2(out)
        extract.apply_updates(variables, updates)
        return out

    return rematted


# --------------------------------------------------------------------------------------------------
# Targets


def _of_instance(module: Any, options: dict[str, Any]) -> Callable:
    """A module's `__call__`, with the module as an argument, so that it may change."""
    method = type(module).__call__
    given = options["static_argnums"]
    numbers = (given,) if isinstance(given, int) else tuple(given)
    shifted = tuple(n + 1 if n >= 0 else n for n in numbers)
    region = remat(method, **dict(options, static_argnums=shifted))

    @functools.wraps(method)
    def rematted(*args: Any, **kwargs: Any) -> Any:
        return region(module, *args, **kwargs)

    return rematted


def _check_target(f: Any) -> None:
    target = f
    while isinstance(target, functools.partial):
        target = target.func
    if inspect.isclass(target):
        raise TargetError(
            f"remat.nnx.remat takes a function, not the class {target.__name__}: it would "
            f"rematerialize the construction of modules, not their calls. Decorate the method, or "
            f"call remat.nnx.remat({target.__name__}.__call__)(module, ...)."
        )
    if inspect.ismethod(target) and isinstance(target.__self__, nnx.Module):
        cls, name = type(target.__self__).__name__, target.__name__
        raise TargetError(
            f"remat.nnx.remat does not support bound methods, such as {cls}.{name} of an instance: "
            f"the module has to be an argument. Decorate the method, or call "
            f"remat.nnx.remat({cls}.{name})(module, ...)."
        )
    if not callable(f):
        raise TargetError(f"remat.nnx.remat takes a function, not {f!r}.")


# --------------------------------------------------------------------------------------------------
# By path


@contextlib.contextmanager
def rematted(
    path_globs: str | Iterable[str],
    model: Any,
    *,
    policy: Any = None,
    prevent_cse: bool = True,
    methods: Iterable[str] = ("__call__",),
    strict: bool = True,
) -> Iterator[Any]:
    """Rematerialize the NNX modules at some paths of a model while the context lasts.

    See `remat.rematted`. A path is made of attribute names and positions in lists, `layers/0`; a
    module that is at several paths is known by the first. While the context lasts the modules are
    of a subclass of their class, with that class's name. So a model that is split in the context is
    rematerialized after `nnx.merge`, wherever that happens, and one that was split before is not.
    """
    check_policy(policy)
    globs = PathGlobs.of(path_globs)
    modules = {"/".join(map(str, path)): m for path, m in nnx.iter_modules(model) if path}
    if strict:
        globs.check(modules)
    chosen: list[tuple[Any, Any]] = [
        (module, type(module)) for path, module in modules.items() if globs.matches(path)
    ]
    names = tuple(methods)
    try:
        for module, cls in chosen:
            _set_class(module, _rematted_class(cls, names, policy, prevent_cse))
        yield model
    finally:
        for module, cls in chosen:
            _set_class(module, cls)


def _set_class(module: Any, cls: Any) -> None:
    object.__setattr__(module, "__class__", cls)


@functools.lru_cache(maxsize=1024)
def _rematted_class(cls: Any, methods: tuple[str, ...], policy: Any, prevent_cse: bool) -> type:
    """A subclass with the same name whose methods are regions; equal arguments, the same class."""
    lift = functools.partial(remat, policy=policy, prevent_cse=prevent_cse)
    namespace: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    for name in methods:
        if hasattr(cls, name):
            namespace[name] = _rematted_method(getattr(cls, name), lift)
    if len(namespace) == 2:
        raise TargetError(f"rematted: {cls.__name__} has none of the methods {methods}.")
    return type(cls)(cls.__name__, (cls,), namespace, pytree=cls._pytree__is_pytree)


def _rematted_method(method: Any, lift: Callable) -> Any:
    @functools.wraps(method)
    def rematted_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return partition.call(lift, method, self, args, kwargs, _is_traced, _is_graph)

    return rematted_method


def _is_graph(x: Any) -> bool:
    return isinstance(x, nnx.Variable) or graphlib.is_graph_node(x)


def _is_traced(leaf: Any) -> bool:
    return _is_graph(leaf) or partition.is_array(leaf)
