"""The targets of `remat.nnx`: functions, not classes or methods of instances."""

from __future__ import annotations

import functools
import inspect

from flax import nnx

from remat.errors import TargetError


def check_target(f: object, name_of_ours: str = "remat.nnx.remat") -> None:
    """Raise for classes, methods of module instances, and objects that are not callable."""
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
