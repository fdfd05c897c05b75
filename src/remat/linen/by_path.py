"""`rematted` for Flax Linen: a context in which modules at some paths are rematerialized.

Linen lets a context intercept every call of a module's method. The interceptor here computes the
path of the module and, if a pattern selects it, runs the method as a region, by `remat.linen.remat`
on a function of the module. The module keeps its scope, so parameters and random keys are those of
the model without the context.

Linen executes clones of a model, not the user's object. To tell them from the clones of other
models, the context gives the model a subclass of its class, which its clones inherit.

`jax.jit`'s cache key does not include interceptors, but it does include JAX's user contexts. So a user
context is set together with the interceptor: a function that was compiled outside of the context is traced
again inside, and vice versa.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import linen as nn
from flax.linen.module import (
    InterceptorContext,
    _context as _linen_context,
    _global_interceptor_stack,
)

from remat import array_leaves
from remat.aliases import PolicyLike, PyTree
from remat.linen.checkpoint import remat
from remat.selection import Selection

_active = jax.make_user_context(())


@contextlib.contextmanager
def rematted(
    selection: Selection,
    model: nn.Module | None,
    *,
    policy: PolicyLike,
    prevent_cse: bool,
) -> Iterator[PyTree]:
    """Rematerialize the Linen modules at some paths while the context lasts.

    See `remat.rematted`. With a model, paths start at it, also where it is a submodule of another.
    The patterns are checked when the context ends. They are not checked if no module was called, because
    all functions had been compiled in an equal context before.
    """
    lift = functools.partial(remat, policy=policy, prevent_cse=prevent_cse)
    seen: dict[str, type] = {}

    def intercept(
        next_fun: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        context: InterceptorContext,
    ) -> PyTree:
        module = context.module
        if module.scope is None:
            return next_fun(*args, **kwargs)
        below = module.path if model is None else _path_below(is_of_model, module)
        if not below:
            return next_fun(*args, **kwargs)
        path = "/".join(below)
        seen[path] = type(module)
        if context.method_name not in selection.methods or not selection.matches(path):
            return next_fun(*args, **kwargs)
        method = _on_another_instance(intercept, context)
        return array_leaves.call(lambda f: lift(_as_wrapped(f)), method, module, args, kwargs)

    is_of_model: Callable[[object], bool]
    setting = (selection, policy, prevent_cse, None if model is None else _Only(model))
    with contextlib.ExitStack() as stack:
        if model is not None:
            is_of_model = stack.enter_context(_told_apart(model))
        stack.enter_context(_active((*_active.value, setting)))
        stack.enter_context(nn.intercept_methods(intercept))
        yield model
    if seen:
        selection.check(seen)


# --------------------------------------------------------------------------------------------------
# Recognizing the model


class _Only:
    """A model compared by identity. Linen's own modules are equal if their fields are."""

    def __init__(self, model: nn.Module):
        self.model, self.id = weakref.ref(model), id(model)

    def __hash__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, _Only) and self.model() is not None and self.model() is other.model()
        )


@contextlib.contextmanager
def _told_apart(model: nn.Module) -> Iterator[Callable[[object], bool]]:
    """Give the clones of a model a marked class, and yield the predicate that recognizes them.

    The module inside a lifted class (`nn.jit(Model)`) is a new object of the class that was lifted,
    without a reference to the model, so it is recognized by its class alone.
    """
    plain: Any = type(model)
    inside = [base for base in plain.__mro__[1:] if _is_lifted_from(plain, base)]
    members: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary(
        {id(model): model}
    )

    def new(cls: type, *_: object, **__: object) -> nn.Module:
        made = plain.__new__(cls)
        members[id(made)] = made
        return made

    namespace = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
    cls = type(plain)(plain.__name__, (plain,), {**namespace, "__new__": new})
    object.__setattr__(model, "__class__", cls)
    try:
        yield lambda module: isinstance(module, cls) or type(module) in inside
    finally:
        for member in list(members.values()):
            if type(member) is cls:
                object.__setattr__(member, "__class__", plain)


def _is_lifted_from(cls: type, base: type) -> bool:
    """Return whether a method of a class is a lifted transform of the one that it overrides."""
    return any(
        hasattr(fun, "__wrapped__") and fun.__wrapped__ is vars(base).get(name)
        for lifted in cls.__mro__[: cls.__mro__.index(base)]
        for name, fun in vars(lifted).items()
    )


def _path_below(is_model: Callable[[object], bool], module: nn.Module) -> tuple[str, ...] | None:
    """Return the path from a model to a module that is called in it, or None in another model.

    The enclosing modules are the parents and, where a lifted transform has removed those, the
    modules whose methods are being called. The outermost has an empty path: any module beyond it
    belongs to another model, whose code applies this one.
    """
    running = (m for m in reversed(_linen_context.module_stack) if m is not None)
    for start in itertools.chain([module], running):
        above: Any = start
        while isinstance(above, nn.Module) and above.scope is not None:
            if is_model(above):
                return module.path[len(above.path) :]
            if not above.path:
                return None
            above = above.parent
    return None


def _on_another_instance(intercept: Callable, context: InterceptorContext) -> Callable:
    """Return the intercepted method, with the interceptors after ours, for the lifted instance.

    Linen's wrapper around methods is not called a second time, since it records intermediate values and
    calls. Its other effect, making the module the parent of new submodules, is done here.
    """
    method = context.orig_method.func
    later = list(itertools.takewhile(lambda i: i is not intercept, _global_interceptor_stack))

    def run(module: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        fun = functools.partial(method, module)
        own = InterceptorContext(module, context.method_name, fun)
        for interceptor in later:
            fun = functools.partial(_apply_interceptor, interceptor, fun, own)
        _linen_context.module_stack.append(module)
        try:
            return fun(*args, **kwargs)
        finally:
            _linen_context.module_stack.pop()

    run.__name__ = context.method_name
    return run


def _apply_interceptor(
    interceptor: Callable,
    fun: Callable,
    context: InterceptorContext,
    *args: PyTree,
    **kwargs: PyTree,
) -> PyTree:
    return interceptor(fun, args, kwargs, context)


def _as_wrapped(fun: Any) -> Any:
    """Mark a function so that Linen does not wrap it again, and return it."""
    fun.method_handler_wrapped = True
    return fun
