"""Names for the types in signatures that a type checker cannot check.

To a type checker nearly all are `Any`, since JAX accepts many classes there, or does not export the
classes; to a reader they say what is meant. jaxtyping is not used: the public functions take pytrees
and functions of any shapes, so it could say no more than these names, and it would be one more package to
install and import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

PyTree: TypeAlias = Any  # nested dicts, lists, tuples and other registered containers of leaves
Leaf: TypeAlias = Any  # a leaf of a pytree: an array or any other object
Array: TypeAlias = Any  # an array or a number, or a tracer of one
Arrays: TypeAlias = list[Any]  # the leaves of a pytree of arrays; None where there is no cotangent
Aval: TypeAlias = Any  # an abstract value of JAX, with a shape, a dtype and a sharding
Size: TypeAlias = Any  # a number of steps, elements, bytes or FLOPs, or an expression in symbols
TreeDef: TypeAlias = Any  # the structure of a pytree
Key: TypeAlias = Any  # a key of a pytree's path, such as `jax.tree_util.DictKey`
MemorySpace: TypeAlias = Any  # a device's memory or its host's, of `jax.memory.Space`
Sharding: TypeAlias = Any  # a sharding of JAX, or what JAX has where none is given

Atom: TypeAlias = Any  # an operand or a result of an equation: a variable or a literal
Eqn: TypeAlias = Any  # an equation: it has `invars`, `outvars` and `params`
Params: TypeAlias = dict[str, Any]  # the parameters of an equation, by name
Effect: TypeAlias = Any  # an effect of an equation, such as a write to a ref
JaxprLike: TypeAlias = Any  # a jaxpr, open or closed
DebugInfo: TypeAlias = Any  # names of a traced function's arguments and results, for error messages
SourceInfo: TypeAlias = Any  # the traceback and name stack of an equation
NameStack: TypeAlias = Any  # the scopes and transformations that an equation is in
IrValue: TypeAlias = Any  # a value of MLIR, or several of them
AxisData: TypeAlias = Any  # the axis that a batching rule adds: its size and names
Dim: TypeAlias = int | None  # which axis of a value is batched, None for none

# About a value: JAX's `Saveable` or `Recompute`, an `Offloadable`, a bool, or None.
Decision: TypeAlias = Any
# A policy of `remat.policies`, or a callable in JAX's form.
PolicyLike: TypeAlias = Callable[..., Decision] | None

Json: TypeAlias = Any  # a value of JSON: None, a bool, a number, a string, a list or a dict
