"""The compiler's memory for the gradient of a loop, and the choice of a schedule that fits a budget.

The bytes of states and residuals are known from their types. The memory of a step while it is run or
reversed is not: the scores of attention, the buffers of an FFT, copies that change a layout. So a loop with a
budget is compiled separately when it is traced, and the bytes that it takes beyond the budget are reserved.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

from remat import _jax
from remat.aliases import Array, Arrays, Aval, Sharding
from remat.loops.loop import Inputs, merge, select
from remat.loops.sizes import n_bytes

Way = TypeVar("Way")

# The most compilations of a loop. Each takes as long as compiling the loop; more use the budget better if the
# compiler's further bytes differ between schedules.
_MOST_COMPILES = 5

# The part of a budget that may stay unused. A smaller one recomputes less, and compiles more often.
_MAY_BE_UNUSED = 0.03

# Bytes that counters, tables and alignment may take beyond a budget, besides those of each state. A larger
# number accepts larger excesses.
_BOOKKEEPING_BYTES = 4096
_BOOKKEEPING_BYTES_OF_A_STATE = 16


def bookkeeping_bytes(slots: int) -> int:
    """Return the bytes that a loop may take beyond its budget, for the number of states that it keeps."""
    return _BOOKKEEPING_BYTES + _BOOKKEEPING_BYTES_OF_A_STATE * slots


def fitted(
    limit: int,
    most: int,
    unit: int,
    choose: Callable[[int], Way],
    excess_bytes: Callable[[Way], int],
) -> Way | None:
    """Return a way that fits a limit and leaves little of it unused; None if none was found.

    A way may take more or fewer bytes than counted. So bytes are reserved, or added, until it fits and
    either little is unused or more memory leads to the same way.

    >>> fitted(100, 90, 1, lambda reserved: 100 - reserved, lambda way: way + 7 - 100)
    93

    Args:
      limit: bytes.
      most: the most bytes with which there is a way to choose; it may be negative.
      unit: bytes by which ways differ. After the first time, reserved bytes grow by multiples of it.
      choose: returns the way that recomputes least within the limit, with this number of its bytes reserved.
      excess_bytes: the bytes that a way takes beyond the limit; negative if it takes less.
    """
    found: Way | None = None
    reserved = min(0, most)
    too_few: int | None = None  # reserved bytes with which the way did not fit
    enough: int | None = None  # reserved bytes with which `found` was chosen
    for _ in range(_MOST_COMPILES):
        way = choose(reserved)
        if way == found:
            return found
        excess = excess_bytes(way)
        if excess > 0:
            too_few, target = reserved, reserved + -(-excess // unit) * unit
        else:
            found, enough, target = way, reserved, reserved + excess
            if -excess <= _MAY_BE_UNUSED * limit:
                return found
        if too_few is not None and enough is not None and not too_few < target < enough:
            if enough - too_few <= unit:
                return found
            target = (too_few + enough) // 2
        target = min(target, most)
        if target in (too_few, enough):
            break
        reserved = target
    return found


def types_of(inputs: Inputs) -> Inputs:
    """Return the types of a loop's inputs in their places."""
    return Inputs(*(list(map(jax.typeof, part)) for part in inputs))


def may_be_differentiated(inputs: Inputs) -> list[bool]:
    """Return which consts of a loop may be differentiated, as far as this is known during tracing.

    Arrays are not. While a derivative of the loop is traced, tracers without a tangent are not, either; in a
    `jax.jit` that is differentiated as a whole, tracers cannot be distinguished.
    """
    known = any(map(_jax.is_differentiated, itertools.chain(*inputs)))
    return [
        _jax.is_differentiated(c) or (isinstance(c, jax.core.Tracer) and not known)
        for c in inputs.consts
    ]


def temporary_bytes(
    run: Callable[[Inputs], tuple[Arrays, Arrays]], types: Inputs, of_consts: Sequence[bool]
) -> int | None:
    """Return the temporaries of a loop's compiled gradient, on one device, without cotangents of its carry.

    These may be results or temporaries of the program around the loop; here they are temporaries, whose bytes
    are subtracted.

    Args:
      run: maps the inputs of the loop to its last carry and its ys. It is called with tracers of `types`.
      types: of the inputs. Those of the carry and the xs that can be are differentiated.
      of_consts: which of the consts are differentiated, too.

    Returns:
      Bytes, for the default backend; None if the loop cannot be compiled separately from its context: in a
      `shard_map`, with named axes of a `vmap`, or with types of symbolic or explicitly sharded shapes; and
      under `jax.disable_jit`, when nothing is compiled.
    """
    flat = [t for group in types for t in group]
    if jax.config.jax_disable_jit or any(map(_depends_on_context, flat)):
        return None
    mask = [_jax.has_tangent(t) for t in flat]
    mask[: len(of_consts)] = [a and b for a, b in zip(mask, of_consts)]
    if not any(mask):
        return None
    first, last = len(types.consts), len(types.consts) + len(types.carry)
    past_xs = last + len(types.xs)

    def inputs(values: Arrays) -> Inputs:
        return Inputs(values[:first], values[first:last], values[last:past_xs], values[past_xs:])

    def gradient(values: Arrays, cotangents: Sequence[Array]) -> tuple[Arrays, Arrays, Arrays]:
        def of_marked(marked: Arrays) -> tuple[Arrays, Arrays]:
            carry, ys = run(inputs(merge(values, mask, marked)))
            outs = [*carry, *ys]
            return [y for y in outs if _jax.has_tangent(y)], ys

        _, pull, ys = jax.vjp(of_marked, select(values, mask), has_aux=True)
        found = merge([None] * len(flat), mask, pull(cotangents)[0])
        of_carry = [ct.sum() for ct in found[first:last] if ct is not None]
        return ys, [*found[:first], *found[last:]], of_carry

    def outputs(values: Arrays) -> Arrays:
        carry, ys = run(inputs(values))
        return [y for y in (*carry, *ys) if _jax.has_tangent(y)]

    given = [_as_argument(t) for t in flat]
    # Rules and compilers raise errors of any type. Running the loop raises them again.
    try:
        lowered = jax.jit(gradient).lower(given, jax.eval_shape(outputs, given))
        found = _temporaries_of(lowered)
    except Exception:
        return None
    if found is None:
        return None
    marked_carry = select(flat[first:last], mask[first:last])
    return max(0, found - sum(map(n_bytes, marked_carry)))


# The temporaries of programs that were compiled here, by platform and digest of the program's text. The same
# loop is traced several times in nested transformations.
_temporaries: dict[tuple[str, bytes], int | None] = {}


def _temporaries_of(lowered: jax.stages.Lowered) -> int | None:
    platform = jax.default_backend()
    key = (platform, hashlib.sha256(lowered.as_text().encode()).digest())
    if key not in _temporaries:
        compiled = lowered.compile(compiler_options=_jax.FAST_COMPILATION.get(platform))
        analysis = compiled.memory_analysis()
        _temporaries[key] = None if analysis is None else analysis.temp_size_in_bytes
    return _temporaries[key]


def _depends_on_context(aval: Aval) -> bool:
    """Return whether values of a type exist only in a mesh, or have shapes that are not numbers."""
    sharding: Sharding = getattr(aval, "sharding", None)
    in_mesh = sharding is not None and not sharding.mesh.empty
    return in_mesh or _jax.is_symbolic(aval.size) or bool(_jax.varying_axes(aval))


def _as_argument(aval: Aval) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
