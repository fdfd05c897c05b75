"""`remat.nnx.remat`: the signature of `flax.nnx.remat`.

An NNX module is a graph of Python objects with Variables in them. The graphs among the arguments are
converted to pytrees before the region and back to graphs inside of it. Everything that the function
changes (Variables, counters of random streams, new attributes) is an additional result of the region,
and is written back to the caller's objects once. So the region is a function of pytrees. The
recomputation reads the same inputs, repeats no update and draws the same random numbers.

Flax has three modes, chosen by `graph` and `graph_updates`: graphs whose structure may change (the
default), graphs of fixed structure, and trees without shared Variables. The first is implemented here
with Flax's `flatten` and `unflatten`. Flax's own composition refuses keyword arguments, traces defaults
(so that `train: bool = True` could not be left out), and rebuilds every object of the caller, changed or
not. The other two modes are Flax's own function between two conversions.

Known limits: a Variable that belongs to another trace level (one that a function under `jax.jit`
closes over) cannot be changed, as in every transformation of Flax. It can be read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx, traceback_util
from flax.nnx import extract, graphlib
from flax.nnx.transforms.autodiff import SimpleRematFn
from flax.typing import MISSING, Missing

from remat import _jax, partition
from remat.aliases import Leaf, PolicyLike, PyTree
from remat.errors import OptionError, StaticArgumentError, TargetError
from remat.selection import Selection, has_method
from remat.transform.checkpoint import checkpoint
from remat.transform.statics import Statics

__all__ = ["remat"]

traceback_util.register_exclusion(__file__)


def __dir__() -> list[str]:
    return sorted(__all__)


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
        among them is traced all the same.
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
    _check_target(f)
    if graph and graph_updates:
        return _with_updates(f, options)
    return _without_updates(f, graph, options)


def _with_updates(f: Callable, options: dict[str, Any]) -> Callable:
    @functools.wraps(f)
    def inner(*args: PyTree, **kwargs: PyTree) -> PyTree:
        copies = graphlib.IndexMap()
        args, kwargs = _as_objects((args, kwargs), copies)
        objects = [copies[index] for index in range(len(copies))]
        before = [_contents(x) for x in objects]
        out = f(*args, **kwargs)
        is_kept = [_is_same(old, _contents(x)) for old, x in zip(before, objects)]
        return _changes(objects, is_kept, out)

    region_for = _regions(f, inner, options)

    @_jax.api_boundary
    @functools.wraps(f)
    def rematted(*args: PyTree, **kwargs: PyTree) -> PyTree:
        region = region_for(args, kwargs)
        index_of = graphlib.RefMap()
        arguments, named = _as_graphs((args, kwargs), index_of)
        results = region(*arguments, **named)
        return _write_back({index: x for x, index in index_of.items()}, *results)

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
            _check_may_change(variables[path])
        extract.apply_updates(variables, updates)
        return out

    return rematted


# --------------------------------------------------------------------------------------------------
# What a region changes
#
# Modules and Variables are numbered in the order in which they are first reached from the arguments.
# The region rebuilds them from arrays and, after the function has run, compares each with its previous
# contents. Only changed objects are returned and written back. So a call that changes nothing also works
# on objects that may not be changed, such as a model that a function under `jax.jit` closes over. All
# changes are checked before the first is made, so that an error changes nothing.


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["leaves"], meta_fields=["graphdef"]
)
@dataclasses.dataclass(frozen=True)
class _Graph:
    """A graph as a pytree: its structure, and its Variables and arrays in order."""

    graphdef: graphlib.GraphDef
    leaves: list[Leaf]


def _as_graphs(tree: PyTree, index_of: Any, outer_index_of: Any = None) -> PyTree:
    """Replace the graphs in a pytree; objects that `index_of` knows become references to them.

    Args:
      index_of: the numbers of objects, to which new objects are added.
      outer_index_of: the numbers that copies have outside.
    """

    def one(x: Leaf) -> Leaf:
        if not _is_graph(x):
            return x
        graphdef, state = graphlib.flatten(
            x, ref_index=index_of, ref_outer_index=outer_index_of, graph=True
        )
        return _Graph(graphdef, list(state.leaves))

    return jax.tree.map(one, tree, is_leaf=_is_graph)


def _as_objects(tree: PyTree, known: Any, outer: Any = None) -> PyTree:
    """Return a pytree with objects in place of graphs: undo `_as_graphs`.

    Args:
      known: the objects by number, to which new ones are added.
      outer: the objects by outer number that are changed in place.
    """

    def one(x: Leaf) -> Leaf:
        if not isinstance(x, _Graph):
            return x
        return graphlib.unflatten(
            x.graphdef, x.leaves, index_ref=known, outer_index_outer_ref=outer
        )

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, _Graph))


def _contents(x: Any) -> tuple[list[Any], Any]:
    """Return the parts of an object that are compared by identity, and those compared by equality."""
    if isinstance(x, nnx.Variable):
        return jax.tree.flatten(x)
    node = graphlib.get_node_impl(x)
    if node is None:  # a Ref, which the region itself writes to
        return [], None
    attributes, metadata = node.flatten(x)
    parts: list[Any] = []
    structure = []
    for name, value in attributes:
        if isinstance(value, graphlib.StaticElem):
            leaves, kind = [value.value], "static"
        else:
            data = value.value if isinstance(value, graphlib.DataElem) else value
            leaves, kind = jax.tree.flatten(data, is_leaf=_is_graph)
        parts += leaves
        structure.append((name, type(value), kind))
    return parts, (structure, metadata)


def _is_same(before: tuple[list[Any], Any], after: tuple[list[Any], Any]) -> bool:
    (old, old_structure), (new, new_structure) = before, after
    return (
        len(old) == len(new)
        and all(a is b for a, b in zip(old, new))
        and bool(old_structure == new_structure)
    )


def _changes(objects: list[Any], is_kept: list[bool], out: PyTree) -> PyTree:
    """Return the numbers of the unchanged objects, the changed ones, and the result."""
    kept = [n for n, same in enumerate(is_kept) if same]
    index_of, outer_index_of = graphlib.RefMap(), graphlib.RefMap()
    for index, n in enumerate(kept):
        index_of[objects[n]] = index
    for n, x in enumerate(objects):
        outer_index_of[x] = n
    changed = [x for x, same in zip(objects, is_kept) if not same]
    return partition.Constant(kept), *_as_graphs((changed, out), index_of, outer_index_of)


def _write_back(objects: dict[int, Any], kept: Any, changed: list[_Graph], out: PyTree) -> PyTree:
    for graph in changed:
        for node in graph.graphdef.nodes:
            if getattr(node, "outer_index", None) is not None:
                _check_may_change(objects[node.outer_index], node.type)
    known, outer = graphlib.IndexMap(), graphlib.IndexMap(objects)
    for index, n in enumerate(kept.value):
        known[index] = objects[n]
    _, out = _as_objects((changed, out), known, outer)
    return out


def _check_may_change(x: Any, cls: Any = None) -> None:
    """Refuse a change that Flax would refuse later, after other changes, or without `remat`."""
    if isinstance(x, nnx.Variable):
        x._check_can_update()
        return
    if isinstance(x, nnx.Pytree):
        x._check_valid_context(
            lambda: f"Cannot mutate '{type(x).__name__}' from different trace level"
        )
    if cls is not None and type(x) is not cls:
        raise TargetError(
            f"remat.nnx.remat: a {type(x).__name__} became a {cls.__name__} inside. Give the module "
            "its class before the call."
        )


def _regions(f: Any, inner: Callable, options: dict[str, Any]) -> Callable[[tuple, dict], Callable]:
    """Return a function that makes the region for a call; modules and Variables are never static.

    A static module is therefore traced, as by `nnx.remat`: it can change, and be differentiated.
    """
    statics = Statics.of(f, options["static_argnums"], ())

    # As many entries as combinations of static arguments; gone with the wrapped function.
    @functools.cache
    def region(argnums: tuple[int, ...], argnames: tuple[str, ...]) -> Callable:
        return checkpoint(inner, **dict(options, static_argnums=argnums, static_argnames=argnames))

    def region_for(args: tuple, kwargs: dict[str, Any]) -> Callable:
        argnums, argnames = statics.in_call(args, kwargs)
        is_static = functools.partial(_is_static, f, statics)
        return region(
            tuple(n for n in argnums if is_static(str(n), args[n])),
            tuple(name for name in argnames if is_static(repr(name), kwargs[name])),
        )

    return region_for


def _is_static(f: Any, statics: Statics, where: str, value: Any) -> bool:
    if _is_graph(value):
        return False
    found = [x for x in jax.tree.leaves(value, is_leaf=_is_graph) if _is_graph(x)]
    if found:
        raise StaticArgumentError(
            f"static_argnums={statics.argnums} of {getattr(f, '__qualname__', f)}: argument "
            f"{where} is a {type(value).__name__} that holds a {type(found[0]).__name__}, whose "
            "values would be fixed in the compiled region. Pass it as an argument of its own: "
            "modules and Variables are always traced."
        )
    return True


# --------------------------------------------------------------------------------------------------
# Targets


def _of_instance(module: Any, options: dict[str, Any]) -> Callable:
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
    selection: Selection,
    model: PyTree,
    *,
    policy: PolicyLike,
    prevent_cse: bool,
) -> Iterator[PyTree]:
    """Rematerialize the NNX modules at some paths of a model while the context lasts.

    See `remat.rematted`. A path is made of attribute names and positions in lists, `layers/0`; a
    module that is at several paths is known by the first. While the context lasts the modules are
    of a subclass of their class, with that class's name. So a model that is split in the context is
    rematerialized after `nnx.merge`, wherever that happens, and one that was split before is not.
    """
    modules = {"/".join(map(str, path)): m for path, m in nnx.iter_modules(model) if path}
    selection.check({path: type(module) for path, module in modules.items()})
    chosen: list[tuple[Any, Any]] = [
        (module, type(module))
        for path, module in modules.items()
        if selection.selects(path, type(module))
    ]
    try:
        for module, cls in chosen:
            _set_class(module, _rematted_class(cls, selection.methods, policy, prevent_cse))
        yield model
    finally:
        for module, cls in chosen:
            _set_class(module, cls)


def _set_class(module: Any, cls: Any) -> None:
    object.__setattr__(module, "__class__", cls)


# The latest 1024 classes. Equal arguments need the same class: pytrees of two classes differ.
@functools.lru_cache(maxsize=1024)
def _rematted_class(
    cls: Any, methods: tuple[str, ...], policy: PolicyLike, prevent_cse: bool
) -> type:
    """Return a subclass of the same name whose methods are regions; one class for equal arguments."""
    lift = functools.partial(remat, policy=policy, prevent_cse=prevent_cse)
    namespace: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    for name in methods:
        if has_method(cls, name):
            namespace[name] = _rematted_method(getattr(cls, name), lift)
    return type(cls)(cls.__name__, (cls,), namespace, pytree=cls._pytree__is_pytree)


def _rematted_method(method: Any, lift: Callable) -> Any:
    @_jax.api_boundary
    @functools.wraps(method)
    def rematted_method(self: Any, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return partition.call(lift, method, self, args, kwargs, _is_traced, _is_graph)

    return rematted_method


def _is_graph(x: Leaf) -> bool:
    return isinstance(x, nnx.Variable) or graphlib.is_graph_node(x)


def _is_traced(leaf: Leaf) -> bool:
    return _is_graph(leaf) or partition.is_array(leaf)
