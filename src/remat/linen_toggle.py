"""`rematted` for Flax Linen: the context in which modules at some paths are rematerialized.

Linen lets a context intercept every call of a module's method. The interceptor here knows the path
of the module at hand and, where it is wanted, runs the same method of the same module as a region,
by `remat.linen.remat` on a function of the module. The module keeps its scope, so that parameters
and random keys are those of the model without it.

An interceptor is not part of the key under which `jax.jit` finds a compiled function again. A user
context of JAX is, so one is set along with it: a function that was compiled outside is traced again
inside, and the other way round.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from flax import linen as nn, traceback_util
from flax.linen.module import (
    InterceptorContext,
    _context as _linen_context,
    _global_interceptor_stack,
)

from remat import linen, partition
from remat.globs import PathGlobs
from remat.transform.policies import check_policy

traceback_util.register_exclusion(__file__)

_active = jax.make_user_context(())


@contextlib.contextmanager
def rematted(
    path_globs: str | Iterable[str],
    model: Any = None,
    *,
    policy: Any = None,
    prevent_cse: bool = True,
    methods: Iterable[str] = ("__call__",),
    strict: bool = True,
) -> Iterator[Any]:
    """Rematerialize the Linen modules at some paths while the context lasts.

    See `remat.rematted`. The patterns are checked when the context ends; a context in which no
    module ran, because all that ran was compiled before in an equal context, has nothing to check.
    """
    check_policy(policy)
    globs, names = PathGlobs.of(path_globs), tuple(methods)
    lift = functools.partial(linen.remat, policy=policy, prevent_cse=prevent_cse)
    seen: set[str] = set()

    def intercept(next_fun: Any, args: Any, kwargs: Any, context: InterceptorContext) -> Any:
        module = context.module
        if context.method_name not in names or module.scope is None or not module.path:
            return next_fun(*args, **kwargs)
        path = "/".join(module.path)
        seen.add(path)
        if not globs.matches(path):
            return next_fun(*args, **kwargs)
        method = _on_another_instance(intercept, context)
        return partition.call(lambda f: lift(_as_wrapped(f)), method, module, args, kwargs)

    setting = (globs, policy, prevent_cse, names)
    with _active((*_active.value, setting)), nn.intercept_methods(intercept):
        yield model
    if strict and seen:
        globs.check(seen)


def _on_another_instance(intercept: Any, context: InterceptorContext) -> Any:
    """The intercepted method, and the interceptors that come after ours, for the lifted instance.

    Linen's wrapper around methods is not run a second time: it notes intermediate values and calls.
    What it sets up besides, the module that new submodules belong to, is set up here.
    """
    method = context.orig_method.func
    later = list(itertools.takewhile(lambda i: i is not intercept, _global_interceptor_stack))

    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
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


def _apply_interceptor(interceptor: Any, fun: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
    return interceptor(fun, args, kwargs, context)


def _as_wrapped(fun: Any) -> Any:
    """Tell Linen that a function needs no wrapper of its own."""
    fun.method_handler_wrapped = True
    return fun
