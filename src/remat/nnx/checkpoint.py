"""`remat.nnx.remat`: checkpointed functions of NNX modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from flax.nnx import extract, graphlib
from flax.nnx.transforms.autodiff import SimpleRematFn
from flax.typing import MISSING, Missing

from remat import _jax
from remat.aliases import PolicyLike, PyTree
from remat.errors import OptionError, StaticArgumentError
from remat.nnx.graphs import (
    as_graphs,
    as_objects,
    check_may_change,
    is_graph,
    run_on_copies,
    write_back,
)
from remat.nnx.targets import check_target
from remat.transform.checkpoint import checkpoint
from remat.transform.statics import Statics


def remat(
    f: Any = MISSING,
    *,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
    policy: PolicyLike = None,
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
        hold for arguments given by keyword or left at their defaults, too. A module or Variable
        among them is nevertheless traced.
      policy: what may be saved, as in `remat.checkpoint`.
      graph: whether modules are graphs, which may share Variables, or trees; None is Flax's
        setting `nnx.set_graph_mode`.
      graph_updates: whether `f` may change the structure of the graphs, by new attributes for
        example; None is Flax's setting `nnx.set_graph_updates`.

    Returns:
      A function with the arguments, results and updates of `f`.

    Raises:
      TargetError: for a bound method or a class.
      StaticArgumentError, PolicyError, EffectError: as for `remat.checkpoint`.
    """
    for name, value in (("graph", graph), ("graph_updates", graph_updates)):
        if not isinstance(value, (bool, type(None))):
            raise OptionError(f"{name} is a bool or None, not {value!r}.")
    if graph is None:
        graph = bool(graphlib.set_graph_mode.current_value())
    if graph_updates is None:
        graph_updates = bool(graphlib.set_graph_updates.current_value())
    options: dict[str, Any] = {
        "prevent_cse": prevent_cse,
        "static_argnums": static_argnums,
        "policy": policy,
    }
    if isinstance(f, Missing):
        return functools.partial(remat, graph=graph, graph_updates=graph_updates, **options)
    if isinstance(f, nnx.Module):
        return _of_instance(f, dict(options, graph=graph, graph_updates=graph_updates))
    check_target(f)
    if graph and graph_updates:
        return _with_updates(f, options)
    return _without_updates(f, graph, options)


def _with_updates(f: Callable, options: dict[str, Any]) -> Callable:
    @functools.wraps(f)
    def inner(*args: PyTree, **kwargs: PyTree) -> PyTree:
        copies = graphlib.IndexMap()
        args, kwargs = as_objects((args, kwargs), copies)
        objects = [copies[index] for index in range(len(copies))]
        return run_on_copies(f, args, kwargs, objects, frozenset())

    region_for = _regions(f, inner, options)

    @_jax.api_boundary
    @functools.wraps(f)
    def rematted(*args: PyTree, **kwargs: PyTree) -> PyTree:
        region = region_for(args, kwargs)
        index_of = graphlib.RefMap()
        arguments, named = as_graphs((args, kwargs), index_of)
        results = region(*arguments, **named)
        return write_back({index: x for x, index in index_of.items()}, *results)

    return rematted


def _without_updates(f: Callable, graph: bool, options: dict[str, Any]) -> Callable:
    region_for = _regions(f, SimpleRematFn(f, graph=graph), options)

    @_jax.api_boundary
    @functools.wraps(f)
    def rematted(*args: PyTree, **kwargs: PyTree) -> PyTree:
        region = region_for(args, kwargs)
        if graph:
            args, kwargs = extract.to_tree2((args, kwargs))
        variables = extract.check_no_aliases("remat", args=args, kwargs=kwargs)
        out, updates = region(*args, **kwargs)
        if graph:
            out = extract.from_tree2(out)
        for path in (path for part in updates for path, _ in part):
            check_may_change(variables[path])
        extract.apply_updates(variables, updates)
        return out

    return rematted


def _regions(
    f: Callable, inner: Callable, options: dict[str, Any]
) -> Callable[[tuple, dict], Callable]:
    """Return a function that makes the region for a call; modules and Variables are never static.

    A static module is therefore traced, as by `nnx.remat`: it can change, and be differentiated.
    """
    statics = Statics.of(f, options["static_argnums"], ())

    # One entry for each combination of static arguments; deleted with the wrapped function.
    @functools.cache
    def region(argnums: tuple[int, ...], argnames: tuple[str, ...]) -> Callable:
        return checkpoint(inner, **dict(options, static_argnums=argnums, static_argnames=argnames))

    def region_for(args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Callable:
        argnums, argnames = statics.in_call(args, kwargs)
        is_static = functools.partial(_is_static, f, statics)
        return region(
            tuple(n for n in argnums if is_static(str(n), args[n])),
            tuple(name for name in argnames if is_static(repr(name), kwargs[name])),
        )

    return region_for


def _is_static(f: object, statics: Statics, where: str, value: object) -> bool:
    if is_graph(value):
        return False
    found = [x for x in jax.tree.leaves(value, is_leaf=is_graph) if is_graph(x)]
    if found:
        raise StaticArgumentError(
            f"static_argnums={statics.argnums} of {getattr(f, '__qualname__', f)}: argument "
            f"{where} is a {type(value).__name__} that holds a {type(found[0]).__name__}, whose "
            "values would be fixed in the compiled region. Pass it as an argument of its own: "
            "modules and Variables are always traced."
        )
    return True


def _of_instance(module: nnx.Module, options: dict[str, Any]) -> Callable:
    """Return a module's `__call__` with the module as an argument, so that it may change."""
    method = type(module).__call__
    given = options["static_argnums"]
    numbers = (given,) if isinstance(given, int) else tuple(given)
    shifted = tuple(n + 1 if n >= 0 else n for n in numbers)
    region = remat(method, **dict(options, static_argnums=shifted))

    @functools.wraps(method)
    def rematted(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return region(module, *args, **kwargs)

    return rematted
