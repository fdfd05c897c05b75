"""The targets of a lifted transform of Linen: a module class, a module, a method or a function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from flax import linen as nn
from flax.ids import uuid as new_module_id

Filter: TypeAlias = Any  # which collections or sequences of keys: a bool, a name, names, a DenyList


def is_module_class(target: object) -> bool:
    """Return whether a target is a module class, or a `functools.partial` of one."""
    cls = class_of(target)
    return inspect.isclass(cls) and issubclass(cls, nn.Module)


def class_of(target: object) -> Any:
    """Return the class of a target that is one, or a partial of one."""
    return target.func if isinstance(target, functools.partial) else target


def is_bound_method(target: object) -> bool:
    """Return whether a target is the method of a module."""
    return inspect.ismethod(target) and isinstance(target.__self__, nn.Module)


def lift_instance(module: nn.Module, lift_class: Callable[[type], type]) -> nn.Module:
    """Return a module with the same fields, parent, name and scope, of the lifted class.

    A copy made by the constructor would get a second name from its parent, so the state is copied and only
    the class changes.
    """
    lifted: nn.Module = object.__new__(lift_class(type(module)))
    vars(lifted).update(vars(module))
    object.__setattr__(lifted, "_id", new_module_id())
    return lifted
