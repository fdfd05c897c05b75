"""JAX's version, names that every supported version has, and properties of types.

From 0.12 on a `Jaxpr` carries its constants (`ClosedJaxpr` is the same class); before, a `ClosedJaxpr`
wraps an open `Jaxpr`. Everywhere in `remat` a region is a jaxpr *without* constants: `detach_consts`
turns them into leading inputs.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import jaxlib
from jax import ad_checkpoint as _ad_checkpoint
from jax._src import (
    core as _core,
    traceback_util as _traceback_util,
    tree_util as _tree_util,
    util as _util,
)
from jax._src.interpreters import partial_eval as _pe_src
from jax._src.state.types import AbstractRef as AbstractRef
from jax.extend import core as _excore, source_info_util as _source_info
from jax.extend.core import primitives as _primitives
from jax.interpreters import ad as _ad
from jax.typing import DTypeLike

from remat.aliases import Array, Atom, Aval, JaxprLike


def version_tuple(version: str) -> tuple[int, ...]:
    """Return the leading integers of a version.

    >>> version_tuple("0.12.0.1"), version_tuple("0.11.1.dev2026")
    ((0, 12, 0, 1), (0, 11, 1))
    """
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


JAX_VERSION = version_tuple(jax.__version__)
JAXLIB_VERSION = version_tuple(jaxlib.__version__)
# Always true from 0.12 on: delete this and the branches for False together with JAX < 0.12.
_JAXPRS_CARRY_CONSTS = not hasattr(_core, "ClosedJaxpr") or _core.ClosedJaxpr is _excore.Jaxpr

# Whether JAX's partial evaluation drops the rules of `jax.custom_jvp`. Delete with JAX 0.11.
PARTIAL_EVALUATION_DROPS_RULES = JAX_VERSION < (0, 12)

# --------------------------------------------------------------------------------------------------
# Names that are the same in every supported version

Jaxpr: TypeAlias = _excore.Jaxpr
JaxprEqn: TypeAlias = _excore.JaxprEqn
Var: TypeAlias = _excore.Var
Literal: TypeAlias = _excore.Literal
Primitive: TypeAlias = _excore.Primitive
ShapedArray: TypeAlias = jax.core.ShapedArray
Tracer: TypeAlias = jax.core.Tracer
Zero: TypeAlias = _ad.Zero
Offloadable: TypeAlias = _ad_checkpoint.Offloadable
Saveable = _ad_checkpoint.Saveable
Recompute = _ad_checkpoint.Recompute
RecomputeType = type(_ad_checkpoint.Recompute)
SaveableType = type(_ad_checkpoint.Saveable)
ConcretizationTypeError: TypeAlias = jax.errors.ConcretizationTypeError
as_case = _pe_src.ensure_enum

typeof = jax.typeof
eval_jaxpr = jax.core.eval_jaxpr
check_jaxpr = _excore.check_jaxpr
positional_effects = _core.positional_effects
# A cache of a pure function of a jaxpr or a function, with a weak reference to it. An entry is dropped with
# it, or after 2048 newer ones. JAX's tracing context is part of the key. A value must not refer to its key.
weakref_lru_cache = _util.weakref_lru_cache
merge_lists = _util.merge_lists
split_list = _util.split_list
wraps = _util.wraps
api_boundary = _traceback_util.api_boundary
broadcast_prefix = _tree_util.broadcast_prefix
extend_name_stack = _source_info.extend_name_stack
unflatten = jax.tree.unflatten

name_p = _primitives.name_p
dot_general_p = _primitives.dot_general_p
conv_general_dilated_p = _primitives.conv_general_dilated_p
reduce_precision_p = _primitives.reduce_precision_p

# The text of this JAX version's own error, so that code that matches it keeps working.
EFFECTS_NOT_SUPPORTED = (
    "Effects not supported in AD of `checkpoint`/`remat`"
    if JAX_VERSION >= (0, 11)
    else "Effects not supported in partial-eval of `checkpoint`/`remat`"
)


def exclude_from_tracebacks(filename: str) -> None:
    """Exclude a file of the library from user tracebacks and from the source lines of equations."""
    _source_info.register_exclusion(filename)
    _traceback_util.register_exclusion(filename)


def checks_enabled() -> bool:
    return bool(jax.config.jax_enable_checks)


def logs_residuals() -> bool:
    """Return whether the user asked JAX to log what checkpointed functions save."""
    return bool(jax.config.jax_log_checkpoint_residuals)


#: The logger of JAX's own messages for that option, with the user's settings for it.
residuals_logger = logging.getLogger("jax._src.ad_checkpoint")


# --------------------------------------------------------------------------------------------------
# Jaxprs with and without constants


def detach_consts(closed: JaxprLike) -> tuple[Jaxpr, tuple[Array, ...]]:
    """Return a jaxpr with its constants as leading inputs, and the constants."""
    inner = closed if _JAXPRS_CARRY_CONSTS else closed.jaxpr
    return _pe_src.convert_constvars_jaxpr(inner), tuple(closed.consts)


def close(jaxpr: Jaxpr) -> JaxprLike:
    """Return the jaxpr as a closed jaxpr without constants."""
    return _pe_src.close_jaxpr(jaxpr)


def open_jaxpr(jaxpr: JaxprLike) -> Jaxpr:
    """Return the open jaxpr of one that may be closed."""
    return jaxpr if isinstance(jaxpr, _excore.Jaxpr) else jaxpr.jaxpr


# --------------------------------------------------------------------------------------------------
# Properties of devices, dtypes and types


def memory_kinds() -> tuple[str, ...]:
    """Return the memory kinds that devices of the default backend can address."""
    return tuple(sorted(memory.kind for memory in jax.devices()[0].addressable_memories()))


def is_on_host(aval: Aval) -> bool:
    """Return whether a value's type says that it lives in host memory."""
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def is_array(aval: Aval) -> bool:
    """Return whether values of this type are arrays (or random keys), rather than refs or tokens."""
    return isinstance(aval, jax.core.ShapedArray)


def is_in_memory(aval: Aval, kind: str) -> bool:
    """Return whether a type says that its values are in memory of this kind."""
    return getattr(aval, "memory_space", None) is _core.mem_kind_to_space(kind)


def stays_in_memory(primitive: Primitive, operands: Sequence[Aval], kind: str) -> bool:
    """Return whether all operands of an equation are in memory of this kind, and it is not a copy."""
    return primitive is not _primitives.device_put_p and all(
        is_in_memory(aval, kind) for aval in operands if is_array(aval)
    )


def can_be_on_host(aval: Aval) -> bool:
    """Return whether values of this type are arrays on a device, which can be copied to the host and back."""
    if getattr(aval, "memory_space", None) is not jax.memory.Space.Device:
        return False
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def is_threefry(aval: Aval) -> bool:
    """Return whether values of this type are keys of JAX's default random generator."""
    impl = getattr(aval.dtype, "_impl", None)
    return getattr(impl, "name", None) == "threefry2x32"


def zero_keys(aval: Aval) -> Array:
    """Return random keys of a type whose data are zeros, for any key implementation."""
    impl = aval.dtype._impl
    words = jnp.zeros((*aval.shape, *impl.key_shape), jnp.uint32)
    return jax.random.wrap_key_data(words, impl=impl)


def itemsize_bytes(aval: Aval) -> int:
    """Return the bytes of one element, also of PRNG keys and of 4-bit types (rounded up to one)."""
    return _itemsize_bytes(aval.dtype)


@functools.cache  # few types exist, and each is asked for often
def _itemsize_bytes(dtype: DTypeLike) -> int:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return 4 * math.prod(dtype._impl.key_shape)
    if dtype == jax.dtypes.float0:
        return 0
    return int(getattr(dtype, "itemsize", 1))


def has_tangent(aval: Aval) -> bool:
    """Return whether values of this type can have a derivative: real and complex numbers."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def is_var(v: Atom) -> bool:
    """Return whether an operand or a result of a jaxpr is a variable rather than a literal."""
    return not isinstance(v, _excore.Literal)


def is_dropped(v: Atom) -> bool:
    """Return whether a result of an equation is dropped (`_` in a printed jaxpr)."""
    return isinstance(v, _excore.DropVar)
