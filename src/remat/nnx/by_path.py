"""`remat.rematted` for NNX: modules selected by their paths in a model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx

from remat import _jax, array_leaves
from remat.aliases import Leaf, PolicyLike, PyTree
from remat.nnx.checkpoint import remat
from remat.nnx.graphs import is_graph
from remat.selection import Selection, has_method


@contextlib.contextmanager
def rematted(
    selection: Selection,
    model: PyTree,
    *,
    policy: PolicyLike,
    prevent_cse: bool,
) -> Iterator[PyTree]:
    """Rematerialize the NNX modules at some paths of a model while the context lasts.

    See `remat.rematted`. A path is made of attribute names and positions in lists, `layers/0`; for a
    module at several paths the first one counts. During the context the modules are instances of a subclass
    with the name of their class. So a model that is split in the context is rematerialized after `nnx.merge`,
    wherever that happens, and one that was split before is not.
    """
    modules = {"/".join(map(str, path)): m for path, m in nnx.iter_modules(model) if path}
    selection.check({path: type(module) for path, module in modules.items()})
    chosen: list[tuple[nnx.Module, type]] = [
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


def _set_class(module: nnx.Module, cls: type) -> None:
    object.__setattr__(module, "__class__", cls)


# Cached (1024 classes), since equal arguments must give the same class: pytrees of two classes differ.
@functools.lru_cache(maxsize=1024)
def _rematted_class(
    cls: Any, methods: tuple[str, ...], policy: PolicyLike, prevent_cse: bool
) -> type:
    """Return a subclass of the same name whose methods are regions; one class for equal arguments."""
    lift = functools.partial(remat, policy=policy, prevent_cse=prevent_cse)
    namespace: dict[str, object] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    for name in methods:
        if has_method(cls, name):
            namespace[name] = _rematted_method(getattr(cls, name), lift)
    return type(cls)(cls.__name__, (cls,), namespace, pytree=cls._pytree__is_pytree)


def _rematted_method(method: Callable, lift: Callable) -> Callable:
    @_jax.api_boundary
    @functools.wraps(method)
    def rematted_method(self: nnx.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return array_leaves.call(lift, method, self, args, kwargs, _is_traced, is_graph)

    return rematted_method


def _is_traced(leaf: Leaf) -> bool:
    return is_graph(leaf) or array_leaves.is_array(leaf)
