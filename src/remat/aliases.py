"""Names for the types in signatures that a type checker cannot check.

To a type checker `PyTree`, `Leaf` and `Aval` are `Any`, since JAX accepts every registered class there;
to a reader they say which of the many things that are `Any` is meant. jaxtyping is not used: the public
functions take pytrees and functions of any shapes, so it could say no more than these names, and it
would be one more package to install and import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

PyTree: TypeAlias = Any  # nested dicts, lists, tuples and other registered containers of leaves
Leaf: TypeAlias = Any  # what is in a pytree: an array, or anything else
Aval: TypeAlias = Any  # an abstract value of JAX, with a shape, a dtype and a sharding
PolicyLike: TypeAlias = (
    Callable[..., Any] | None
)  # a policy of `remat.policies`, or one of JAX's kind
