"""`remat.nnx`: `remat` with the signature of `flax.nnx.remat`, and `fit` in place of `nnx.jit`.

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
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx, traceback_util
from flax.nnx import extract, graphlib
from flax.nnx.transforms.autodiff import SimpleRematFn
from flax.typing import MISSING, Missing

from remat import _jax, array_leaves
from remat.aliases import Leaf, PolicyLike, PyTree
from remat.errors import OptionError, StaticArgumentError, TargetError
from remat.module_steps import Call, ModuleStep, Structure, Words, keyed, with_fixed_leaves
from remat.planner.fit_modules import FittedModules
from remat.planner.plan_file import Plan
from remat.selection import Selection, has_method
from remat.transform.checkpoint import checkpoint
from remat.transform.statics import Statics
from remat.units import Number

__all__ = ["fit", "remat"]

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
        return _run(f, args, kwargs, objects, frozenset())

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


def _run(
    f: Callable, args: tuple, kwargs: dict[str, Any], objects: list[Any], returned: frozenset[int]
) -> PyTree:
    """Call a function with copies of the caller's objects; return its changes of them and its result.

    Args:
      objects: the copies by number.
      returned: the numbers of those that are returned, changed or not.
    """
    before = [_contents(x) for x in objects]
    classes = [type(x) for x in objects]
    out = f(*args, **kwargs)
    for x, cls in zip(objects, classes):
        _check_same_class(type(x), cls)
    is_kept = [
        n not in returned and _is_same(old, _contents(x))
        for n, (old, x) in enumerate(zip(before, objects))
    ]
    return _changes(objects, is_kept, out)


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


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class _Graph:
    """A graph as a pytree: its structure, and its Variables and arrays in order, under their paths."""

    structure: Structure
    leaves: list[Leaf]

    @property
    def graphdef(self) -> graphlib.GraphDef:
        graphdef: graphlib.GraphDef = self.structure.fixed
        return graphdef

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Leaf]], Structure]:
        return keyed(self.structure.paths, self.leaves), self.structure

    def tree_flatten(self) -> tuple[list[Leaf], Structure]:
        return self.leaves, self.structure

    @classmethod
    def tree_unflatten(cls, structure: Structure, leaves: Any) -> _Graph:
        return cls(structure, list(leaves))


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
        paths = tuple(tuple(map(_key_of, path)) for path in state.paths)
        structure = Structure(graphdef, paths, may_be_unhashable=True)
        return _Graph(structure, list(state.leaves))

    return jax.tree.map(one, tree, is_leaf=_is_graph)


def _key_of(name: Any) -> Any:
    if isinstance(name, int):
        return jax.tree_util.SequenceKey(name)
    is_attribute = isinstance(name, str) and name.isidentifier()
    return jax.tree_util.GetAttrKey(name) if is_attribute else jax.tree_util.DictKey(name)


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
    return array_leaves.Constant(kept), *_as_graphs((changed, out), index_of, outer_index_of)


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
    if cls is not None:
        _check_same_class(cls, type(x))


def _check_same_class(inside: Any, before: Any) -> None:
    if inside is not before:
        raise TargetError(
            f"remat.nnx: a {before.__name__} became a {inside.__name__} inside. Give the module "
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


def _check_target(f: Any, name_of_ours: str = "remat.nnx.remat") -> None:
    target = f
    while isinstance(target, functools.partial):
        target = target.func
    if inspect.isclass(target):
        raise TargetError(
            f"{name_of_ours} takes a function, not the class {target.__name__}: it would "
            f"rematerialize the construction of modules, not their calls. Decorate the method, or "
            f"call {name_of_ours}({target.__name__}.__call__)(module, ...)."
        )
    if inspect.ismethod(target) and isinstance(target.__self__, nnx.Module):
        cls, name = type(target.__self__).__name__, target.__name__
        raise TargetError(
            f"{name_of_ours} does not support bound methods, such as {cls}.{name} of an instance: "
            f"the module has to be an argument. Decorate the method, or call "
            f"{name_of_ours}({cls}.{name})(module, ...)."
        )
    if not callable(f):
        raise TargetError(f"{name_of_ours} takes a function, not {f!r}.")


# --------------------------------------------------------------------------------------------------
# With a plan


def fit(
    step: Callable, /, *, budget: Number | None = None, plan: Plan | None = None, **options: Any
) -> FittedModules:
    """Compile a training step on NNX modules so that it fits a memory budget.

    It takes the place of `nnx.jit`: what the step changes in its modules, optimizers, metrics and
    random streams is changed in the caller's. In all else it is `remat.fit`.

    >>> import jax.numpy as jnp, optax
    >>> from flax import nnx
    >>> import remat.nnx
    >>> model = nnx.Sequential(*[nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(6)])
    >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    >>> def step(model, optimizer, x):
    ...     loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    ...     optimizer.update(model, grads)
    ...     return loss
    >>> train = remat.nnx.fit(step, budget="90%", donate_argnums=(0, 1))
    >>> loss = train(model, optimizer, jnp.ones((512, 16)))
    >>> int(optimizer.step[...]), train.plans[0].is_verified
    (1, True)

    Args:
      step: the training step. Modules are among its arguments. If it raises, nothing is changed.
      budget, plan: see `remat.fit`.
      options: those of `remat.fit` and `jax.jit`. What is donated is returned, changed or not, so that
        a donated module stays usable.

    Returns:
      A callable with the arguments, results and updates of the step, and the methods of a
      `remat.Fitted`.

    Raises:
      TargetError: for a bound method, a module or a class.
      OptionError: an option of `nnx.jit` that `jax.jit` has not.
      StaticArgumentError: when called: a static argument holds a module.
      PlanError, BudgetError, UnitsError: as for `remat.fit`.
    """
    _check_target(step, "remat.nnx.fit")
    if isinstance(step, nnx.Module):
        cls = type(step).__name__
        raise TargetError(
            f"remat.nnx.fit takes a training step, not a {cls}: pass the module as an argument, "
            f"remat.nnx.fit({cls}.__call__)(module, ...)."
        )
    for name in ("graph", "graph_updates"):
        if name in options:
            raise OptionError(
                f"remat.nnx.fit has no {name}=: modules are always graphs that may change. Leave it out."
            )
    return FittedModules(
        _Step(step, **_argument_options(options)), options | {"budget": budget, "plan": plan}
    )


def module_step(
    step: Callable, args: tuple, kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> ModuleStep | None:
    """Return a step as a function of arrays if modules are among its arguments, else None.

    Args:
      options: which arguments are donated or static, as in `jax.jit`.
    """
    # What `arrays` made is not looked into: it holds Variables.
    is_leaf = lambda x: _is_graph(x) or isinstance(x, _Graph)  # noqa: E731
    leaves = jax.tree.leaves((args, dict(kwargs)), is_leaf=is_leaf)
    return _Step(step, **options) if any(map(_is_graph, leaves)) else None


def check_loses_no_updates(step: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
    """Refuse a step whose updates of modules would be lost, since it does not return the modules.

    `jax.jit` takes modules as pytrees, so that a function changes copies of them.
    """
    on_arrays = module_step(step, args, kwargs, {})
    if not isinstance(on_arrays, _Step):
        return
    lost: list[str] = []

    def watched(*args: PyTree, **kwargs: PyTree) -> PyTree:
        copies = graphlib.IndexMap()
        of_args, of_kwargs = _as_objects((args, kwargs), copies)
        before = {index: _contents(x) for index, x in copies.items()}
        out = step(*of_args, **of_kwargs)
        found = graphlib.RefMap()
        _as_graphs(out, found)
        lost.extend(
            type(x).__name__
            for index, x in copies.items()
            if x not in found and not _is_same(before[index], _contents(x))
        )
        return None

    call = on_arrays.arrays(args, kwargs)
    watch, of_args, of_kwargs = with_fixed_leaves(watched, call.args, call.kwargs)
    jax.eval_shape(watch, *of_args, **of_kwargs)
    if lost:
        kinds = ", ".join(dict.fromkeys(lost))
        raise TargetError(
            f"remat.fit compiles like jax.jit, which would lose the step's updates of NNX modules "
            f"({kinds}). Write remat.nnx.fit in place of remat.fit, or return the modules from the step."
        )


def _argument_options(options: dict[str, Any]) -> dict[str, Any]:
    names = ("donate_argnums", "donate_argnames", "static_argnums", "static_argnames")
    return {name: options[name] for name in names if options.get(name) is not None}


class _Step(ModuleStep):
    """A step on modules as a function of their arrays; it returns what it changes in them."""

    words = Words("remat.nnx.fit", "nnx.value_and_grad")

    def __init__(
        self,
        step: Callable,
        donate_argnums: Any = (),
        donate_argnames: Any = (),
        static_argnums: Any = (),
        static_argnames: Any = (),
    ) -> None:
        super().__init__(step)
        self._donated = Statics.of(step, donate_argnums, donate_argnames)
        self._static = Statics.of(step, static_argnums, static_argnames)

    def arrays(self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> Call:
        kwargs = dict(kwargs)
        for where in _chosen(self._static, args, kwargs):
            value = args[where] if isinstance(where, int) else kwargs[where]
            if any(map(_is_graph, jax.tree.leaves(value, is_leaf=_is_graph))):
                raise StaticArgumentError(
                    f"remat.nnx.fit: the static argument {where} of {self.__name__} holds a module, "
                    "whose values would be fixed in the compiled step. Modules are always traced: "
                    "take it out of static_argnums or static_argnames."
                )
        index_of = graphlib.RefMap()
        of_args, of_kwargs = _as_graphs((args, kwargs), index_of)
        objects = {index: x for x, index in index_of.items()}
        for n in self._returned(of_args, of_kwargs):
            _check_may_change(objects[n])
        return Call(of_args, of_kwargs, functools.partial(_finish, objects))

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        returned = self._returned(args, kwargs)
        copies = graphlib.IndexMap()
        of_args, of_kwargs = _as_objects((args, kwargs), copies)
        objects = [copies[index] for index in range(len(copies))]
        return _run(self.step, of_args, of_kwargs, objects, returned)

    def _returned(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> frozenset[int]:
        """Return the numbers of the objects whose arrays are donated."""
        found: set[int | None] = set()
        for where in _chosen(self._donated, args, kwargs):
            value = args[where] if isinstance(where, int) else kwargs[where]
            for x in jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, _Graph)):
                if isinstance(x, _Graph):
                    defined = (n for n in x.graphdef.nodes if not isinstance(n, graphlib.NodeRef))
                    found |= {getattr(node, "index", None) for node in defined}
        return frozenset(n for n in found if n is not None)


def _chosen(which: Statics, args: tuple, kwargs: dict[str, Any]) -> tuple[int | str, ...]:
    positions, names = which.in_call(args, kwargs)
    return (*positions, *names)


def _finish(objects: dict[int, Any], results: PyTree) -> PyTree:
    return _write_back(objects, *results)


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
        return array_leaves.call(lift, method, self, args, kwargs, _is_traced, _is_graph)

    return rematted_method


def _is_graph(x: Leaf) -> bool:
    return isinstance(x, nnx.Variable) or graphlib.is_graph_node(x)


def _is_traced(leaf: Leaf) -> bool:
    return _is_graph(leaf) or array_leaves.is_array(leaf)
