"""Values of a StableHLO module that are one value once the compiler has merged equal operations.

XLA merges operations of the same kind on the same operands, and a reshape shares the memory of its operand.
So two operands of a barrier may be one buffer, though they are two values when the barrier is lowered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src.lib.mlir import ir as _ir

from remat.aliases import IrValue

# To what depth operations are summarized before they are compared, and how many pairs of operations one
# comparison looks at; beyond that, values count as different.
_DEPTH = 4
_PAIRS = 256

# Operations that the compiler does not merge, or whose parameters are not among their attributes.
_NEVER_MERGED = frozenset(
    {"stablehlo.custom_call", "stablehlo.optimization_barrier", "stablehlo.rng"}
)


def merged(values: Sequence[IrValue]) -> list[IrValue]:
    """Return for each value the first of `values` that is the same, without reshapes around it.

    Values that are equal for another reason, such as two arguments of a nested `jit` for which its caller
    passes the same array, count as different.
    """
    representatives: dict[Any, list[IrValue]] = {}
    known: dict[tuple[IrValue, int], Any] = {}
    found = []
    for value in map(_without_reshapes, values):
        alike = representatives.setdefault(_summary(value, _DEPTH, known), [])
        same = next((other for other in alike if _are_same(value, other, [_PAIRS])), None)
        if same is None:
            alike.append(same := value)
        found.append(same)
    return found


def _without_reshapes(value: IrValue) -> IrValue:
    """Return the value of which `value` is a reshape, or a rounding to its own type, or several of these."""
    while True:
        op = _operation(value)
        if op is None or not _leaves_as_is(op):
            return value
        (value,) = op.operands


def _leaves_as_is(op: Any) -> bool:
    if op.name == "stablehlo.reduce_precision":
        kept = _FORMATS.get(str(_ir.ShapedType(op.results[0].type).element_type))
        attributes = op.attributes
        found = tuple(
            _ir.IntegerAttr(attributes[name]).value for name in ("exponent_bits", "mantissa_bits")
        )
        return found == kept
    return bool(op.name == "stablehlo.reshape")


# Bits of the exponent and the mantissa of element types, for `reduce_precision` to the type itself.
_FORMATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}


def _operation(value: IrValue) -> Any:
    """Return the operation that computes a value; None for an argument."""
    owner = value.owner
    return None if isinstance(owner, _ir.Block) else owner.operation


def _summary(value: IrValue, depth: int, known: dict[tuple[IrValue, int], Any]) -> Any:
    """Return what is equal for equal values, from the operations of the last `depth` levels."""
    value = _without_reshapes(value)
    if (value, depth) not in known:
        op = _operation(value)
        if op is None:
            known[value, depth] = value
        else:
            operands = [_summary(x, depth - 1, known) for x in op.operands] if depth else []
            known[value, depth] = (op.name, len(op.operands), *operands)
    return known[value, depth]


def _are_same(a: IrValue, b: IrValue, pairs: list[int]) -> bool:
    a, b = _without_reshapes(a), _without_reshapes(b)
    if a == b:
        return True
    one, other = _operation(a), _operation(b)
    pairs[0] -= 1
    if one is None or other is None or pairs[0] < 0 or not _may_merge(one, other):
        return False
    if _ir.OpResult(a).result_number != _ir.OpResult(b).result_number:
        return False
    return all(_are_same(x, y, pairs) for x, y in zip(one.operands, other.operands))


def _may_merge(one: Any, other: Any) -> bool:
    return bool(
        one.name == other.name
        and one.name.startswith(("stablehlo.", "chlo."))
        and one.name not in _NEVER_MERGED
        and not len(one.regions)
        and not len(other.regions)
        and [x.type for x in one.results] == [x.type for x in other.results]
        # Of one value there may be reshapes to different shapes, such as a row and a column.
        and [x.type for x in one.operands] == [x.type for x in other.operands]
        and dict(one.attributes.items()) == dict(other.attributes.items())
    )
