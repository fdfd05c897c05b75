"""How a partitioner divides a lowered program among devices, found without compiling the program.

Shardy, XLA's partitioner, chooses the sharding of each value and writes the communication between them as
operations of its own. These are passes on the lowered program, which need no device and no compiler of one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax._src.lib.mlir import ir as _ir, passmanager as _passmanager

_PASSES = (
    "builtin.module(symbol-dce,sdy-propagation-pipeline,"
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true}))"
)
_SUM, _REDISTRIBUTION = "sdy.all_reduce", "sdy.reshard"
_SHARD_MAP = "sdy.manual_computation"  # its equation says how its results are divided

# For each dimension, the axes that divide it, and into how many parts.
_Sharding: TypeAlias = list[list[tuple[str, int]]]


class NotPartitionedError(Exception):
    """The partitioner's passes cannot read a program."""


class Divided(NamedTuple):
    """An operation of a partitioned program.

    Attributes:
      name: the operation's name; "" if the partitioner added it.
      location: the name scopes of the operation.
      shapes: of its results, on all devices together.
      parts: into how many parts each result is divided.
      is_redistribution: whether the partitioner added the operation to give a value another sharding.
      sent_bytes: how many bytes each device sends, if the partitioner added the operation.
      n_devices: among how many devices the sum is divided, if the operation adds partial sums; else 0.
    """

    name: str
    location: str
    shapes: tuple[tuple[int, ...], ...]
    parts: tuple[int, ...]
    is_redistribution: bool = False
    sent_bytes: int = 0
    n_devices: int = 0


def partitioned(lowered: jax.stages.Lowered) -> list[Divided]:
    """Return the operations of a program whose results are arrays, in the program's order.

    As in `ir.flops.link_bytes`, a sum over devices sends the bytes of its result on one device twice.

    Returns:
      The operations; none if the program has no mesh, or another partitioner divides it.

    Raises:
      NotPartitionedError: the passes cannot read the program.
    """
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        # The passes change the program, so they get a copy.
        copy = _ir.Module.parse(module.operation.get_asm(enable_debug_info=True))
        _inline_calls(copy)
        try:
            _passmanager.PassManager.parse(_PASSES).run(copy.operation)
        except (_ir.MLIRError, ValueError) as error:
            raise NotPartitionedError(str(error)) from error
        sizes: dict[str, int] = {}
        found: list[Any] = []

        def visit(op: Any) -> Any:
            if op.name == "sdy.mesh":
                # Axes with the same name have the same size in all meshes of a program.
                axes = re.findall(r'"([^"]+)"=([0-9]+)', str(op.attributes["mesh"]))
                sizes.update((name, int(size)) for name, size in axes)
            elif op.name != _SHARD_MAP and len(op.results) and all(map(_is_array, op.results)):
                found.append(op)
            return _ir.WalkResult.ADVANCE

        copy.operation.walk(visit)
        return [_divided(op, sizes) for op in found] if sizes else []


def _inline_calls(module: Any) -> None:
    """Replace calls by the operations of their functions: in each call, these have shardings of their own."""
    functions = {
        _ir.StringAttr(op.attributes["sym_name"]).value: op.operation
        for op in module.body.operations
        if op.operation.name == "func.func"
    }
    # The operations of a function may be calls, too.
    while calls := _calls(functions["main"], functions):
        for call, body in calls:
            _inline(call, body)


def _calls(top: Any, functions: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the calls in a function, and the bodies of the functions that they call."""
    found: list[tuple[Any, Any]] = []

    def visit(op: Any) -> Any:
        if op.name == "func.call":
            called = functions[_ir.FlatSymbolRefAttr(op.attributes["callee"]).value]
            # A function may declare how its arguments are divided.
            if "sdy.sharding" not in str(called.attributes):
                found.append((op, called.regions[0].blocks[0]))
        return _ir.WalkResult.ADVANCE

    top.walk(visit)
    return found


def _inline(call: Any, body: Any) -> None:
    values = dict(zip(body.arguments, call.operands))

    def rename(op: Any) -> Any:
        for i, operand in enumerate(op.operands):
            if operand in values:
                op.operands[i] = values[operand]
        return _ir.WalkResult.ADVANCE

    *operations, end = body.operations
    for op in operations:
        copy = op.operation.clone(ip=_ir.InsertionPoint(call))
        # Those inside refer to each other, which the copies do by themselves.
        copy.walk(rename)
        values.update(zip(op.operation.results, copy.results))
    for old, new in zip(call.results, end.operation.operands):
        old.replace_all_uses_with(values.get(new, new))
    call.erase()


def _divided(op: Any, sizes: Mapping[str, int]) -> Divided:
    location = str(op.location)
    name = "" if op.name in (_SUM, _REDISTRIBUTION) else str(op.name)
    shapes = tuple(tuple(_ir.RankedTensorType(v.type).shape) for v in op.results)
    sharded = [_sharding_of_result(op, number, sizes) for number in range(len(op.results))]
    parts = tuple(map(_n_parts, sharded))
    if op.name == _SUM:
        sent = 2 * _n_bytes(op.results[0]) // parts[0]
        over = _n_parts([_axes(str(op.attributes["reduction_axes"]), sizes)])
        return Divided(name, location, shapes, parts, sent_bytes=sent, n_devices=over * parts[0])
    if op.name == _REDISTRIBUTION:
        sent = _sent_for(op.operands[0], sharded[0], sizes)
        return Divided(name, location, shapes, parts, is_redistribution=True, sent_bytes=sent)
    return Divided(name, location, shapes, parts)


def _sent_for(value: Any, after: _Sharding, sizes: Mapping[str, int]) -> int:
    """Return the bytes that are sent for another sharding; 0 if each device has its new part already."""
    before = _sharding_of(value, sizes)
    if before == after and isinstance(value, _ir.OpResult) and value.owner.name == _REDISTRIBUTION:
        # The value got this sharding before, for the equation that asks for it.
        value = value.owner.operands[0]
        before = _sharding_of(value, sizes)
    if before is None or all(new[: len(old)] == old for old, new in zip(before, after)):
        return 0
    return _n_bytes(value) // min(_n_parts(before), _n_parts(after))


def _sharding_of(value: Any, sizes: Mapping[str, int]) -> _Sharding | None:
    """Return the sharding of a value; None for inputs of `shard_map`s."""
    if isinstance(value, _ir.OpResult):
        return _sharding_of_result(value.owner, value.result_number, sizes)
    argument = _ir.BlockArgument(value)
    op, number = argument.owner.owner.operation, argument.arg_number
    if op.name == "stablehlo.while":  # whose inputs are divided as its results are
        return _sharding_of_result(op, number, sizes)
    if op.name != "func.func":
        return None
    given = op.attributes["arg_attrs"][number] if "arg_attrs" in op.attributes else {}
    return (
        _dimensions(str(given["sdy.sharding"]), sizes) if "sdy.sharding" in given else _whole(value)
    )


def _sharding_of_result(op: Any, number: int, sizes: Mapping[str, int]) -> _Sharding:
    for name in ("sharding", "out_sharding"):
        if op.name.startswith("sdy.") and name in op.attributes:
            return _dimensions(str(op.attributes[name]), sizes)
    if "sdy.sharding" not in op.attributes:
        return _whole(op.results[number])
    of_results = str(op.attributes["sdy.sharding"]).split("<@")[1:]
    return _dimensions(of_results[number], sizes)


def _whole(value: Any) -> _Sharding:
    return [[] for _ in _ir.RankedTensorType(value.type).shape]


def _dimensions(sharding: str, sizes: Mapping[str, int]) -> _Sharding:
    inside = re.search(r"\[(.*?)\]", sharding)
    of_dimensions = re.findall(r"\{([^}]*)\}", inside[1]) if inside else []
    return [_axes(text, sizes) for text in of_dimensions]


def _axes(text: str, sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return axes as the partitioner writes them: `"x"`, or `"x":(2)4` for a part of an axis."""
    return [
        (name + where, int(size) if size else sizes.get(name, 1))
        for name, where, size in re.findall(r'"([^"]+)"(?::\(([0-9]+)\)([0-9]+))?', text)
    ]


def _n_parts(dimensions: Iterable[Sequence[tuple[str, int]]]) -> int:
    return math.prod(size for axes in dimensions for _, size in axes)


def _is_array(value: Any) -> bool:
    try:
        return bool(_ir.RankedTensorType(value.type).has_static_shape)
    except (TypeError, ValueError):  # a token, or a tuple
        return False


def _n_bytes(value: Any) -> int:
    """Return the bytes of an array, of all devices together."""
    of_array = _ir.RankedTensorType(value.type)
    try:
        bits = of_array.element_type.width
    except AttributeError:
        bits = 2 * _ir.ComplexType(of_array.element_type).element_type.width
    return math.prod(of_array.shape) * bits // 8
