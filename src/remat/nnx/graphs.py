"""Graphs of NNX modules as pytrees, and a function's changes of them.

Modules and Variables are numbered in the order in which they are first reached from the arguments. A
region rebuilds them from arrays and, after the function has run, compares each with its previous
contents. Only changed objects are returned and written back. So a call without changes also works on
objects that must not be changed, such as a model that a function under `jax.jit` closes over. All changes
are checked before the first is made, so that an error leaves everything unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import jax
from flax import nnx
from flax.nnx import graphlib

from remat import array_leaves
from remat.aliases import Key, Leaf, PyTree
from remat.errors import TargetError
from remat.module_steps import LeavesWithPaths, Structure


def is_graph(x: Leaf) -> bool:
    """Return whether a leaf is a module, a Variable or another object of Flax's graphs."""
    return isinstance(x, nnx.Variable) or graphlib.is_graph_node(x)


@jax.tree_util.register_pytree_with_keys_class
class ModuleGraph(LeavesWithPaths):
    """A graph as a pytree: its structure, and its Variables and arrays in order, under their paths."""

    @property
    def graphdef(self) -> graphlib.GraphDef:
        graphdef: graphlib.GraphDef = self.structure.fixed
        return graphdef


def as_graphs(
    tree: PyTree, index_of: graphlib.RefMap, outer_index_of: graphlib.RefMap | None = None
) -> PyTree:
    """Replace the graphs in a pytree; objects that `index_of` knows become references to them.

    Args:
      index_of: the numbers of objects, to which new objects are added.
      outer_index_of: the numbers that copies have outside.
    """

    def one(x: Leaf) -> Leaf:
        if not is_graph(x):
            return x
        graphdef, state = graphlib.flatten(
            x, ref_index=index_of, ref_outer_index=outer_index_of, graph=True
        )
        paths = tuple(tuple(map(_key_of, path)) for path in state.paths)
        structure = Structure(graphdef, paths, may_be_unhashable=True)
        return ModuleGraph(structure, list(state.leaves))

    return jax.tree.map(one, tree, is_leaf=is_graph)


def _key_of(name: Hashable) -> Key:
    if isinstance(name, int):
        return jax.tree_util.SequenceKey(name)
    is_attribute = isinstance(name, str) and name.isidentifier()
    return jax.tree_util.GetAttrKey(name) if is_attribute else jax.tree_util.DictKey(name)


def as_objects(
    tree: PyTree, known: graphlib.IndexMap, outer: graphlib.IndexMap | None = None
) -> PyTree:
    """Return a pytree with objects in place of graphs: undo `as_graphs`.

    Args:
      known: the objects by number, to which new ones are added.
      outer: the objects by outer number that are changed in place.
    """

    def one(x: Leaf) -> Leaf:
        if not isinstance(x, ModuleGraph):
            return x
        return graphlib.unflatten(
            x.graphdef, x.leaves, index_ref=known, outer_index_outer_ref=outer
        )

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, ModuleGraph))


def contents(x: object) -> tuple[list[Leaf], object]:
    """Return the parts of an object that are compared by identity, and those compared by equality."""
    if isinstance(x, nnx.Variable):
        return jax.tree.flatten(x)
    node = graphlib.get_node_impl(x)
    if node is None:  # a Ref, which the region itself writes to
        return [], None
    attributes, metadata = node.flatten(x)
    parts: list[Leaf] = []
    structure = []
    for name, value in attributes:
        if isinstance(value, graphlib.StaticElem):
            leaves, kind = [value.value], "static"
        else:
            data = value.value if isinstance(value, graphlib.DataElem) else value
            leaves, kind = jax.tree.flatten(data, is_leaf=is_graph)
        parts += leaves
        structure.append((name, type(value), kind))
    return parts, (structure, metadata)


def is_same(before: tuple[list[Leaf], object], after: tuple[list[Leaf], object]) -> bool:
    """Return whether two results of `contents` are those of an unchanged object."""
    (old, old_structure), (new, new_structure) = before, after
    return (
        len(old) == len(new)
        and all(a is b for a, b in zip(old, new))
        and bool(old_structure == new_structure)
    )


def changes(objects: list[Leaf], is_kept: list[bool], out: PyTree) -> PyTree:
    """Return the numbers of the unchanged objects, the changed ones, and the result."""
    kept = [n for n, same in enumerate(is_kept) if same]
    index_of, outer_index_of = graphlib.RefMap(), graphlib.RefMap()
    for index, n in enumerate(kept):
        index_of[objects[n]] = index
    for n, x in enumerate(objects):
        outer_index_of[x] = n
    changed = [x for x, same in zip(objects, is_kept) if not same]
    return array_leaves.Constant(kept), *as_graphs((changed, out), index_of, outer_index_of)


def write_back(
    objects: dict[int, Leaf], kept: array_leaves.Constant, changed: list[ModuleGraph], out: PyTree
) -> PyTree:
    """Write what `changes` returned to the caller's objects, and return the result."""
    for graph in changed:
        for node in graph.graphdef.nodes:
            if getattr(node, "outer_index", None) is not None:
                check_may_change(objects[node.outer_index], node.type)
    known, outer = graphlib.IndexMap(), graphlib.IndexMap(objects)
    for index, n in enumerate(kept.value):
        known[index] = objects[n]
    _, out = as_objects((changed, out), known, outer)
    return out


def check_may_change(x: object, cls: type | None = None) -> None:
    """Raise for a change for which Flax would raise later, after other changes, or without `remat`."""
    if isinstance(x, nnx.Variable):
        x._check_can_update()
        return
    if isinstance(x, nnx.Pytree):
        x._check_valid_context(
            lambda: f"Cannot mutate '{type(x).__name__}' from different trace level"
        )
    if cls is not None:
        check_same_class(cls, type(x))


def check_same_class(inside: type, before: type) -> None:
    """Raise for an object whose class the function changed."""
    if inside is not before:
        raise TargetError(
            f"remat.nnx: a {before.__name__} became a {inside.__name__} inside. Give the module "
            "its class before the call."
        )


def run_on_copies(
    f: Callable,
    args: tuple,
    kwargs: dict[str, PyTree],
    objects: list[Leaf],
    returned: frozenset[int],
) -> PyTree:
    """Call a function with copies of the caller's objects; return its changes of them and its result.

    Args:
      objects: the copies by number.
      returned: the numbers of those that are returned, changed or not.
    """
    before = [contents(x) for x in objects]
    classes = [type(x) for x in objects]
    out = f(*args, **kwargs)
    for x, cls in zip(objects, classes):
        check_same_class(type(x), cls)
    is_kept = [
        n not in returned and is_same(old, contents(x))
        for n, (old, x) in enumerate(zip(before, objects))
    ]
    return changes(objects, is_kept, out)
