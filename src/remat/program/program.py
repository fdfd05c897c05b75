"""Programs as plain data: operations on numbered values, and how compilers treat each operation.

This is the form of a jaxpr between `from_jaxpr`, which knows JAX, and `fusion`, which knows compilers.
It contains no JAX objects.
"""

from __future__ import annotations

import dataclasses

from remat.ir.operations import Fusion
from remat.units import counted, format_flops


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation.

    Args:
      name: the name of the primitive.
      fusion: how a compiler that fuses loops treats it.
      operands, results: numbers of values.
      flops: floating-point operations of one execution.
      dtype: the type in which most of them are done.
      extra_bytes: bytes that it reads and writes besides its operands and results.
      workspace_bytes: bytes that it occupies while it runs, besides its operands and results.
      transposed: operands that a compiler for CPUs copies into another order of dimensions.
      kernels: how many kernels it starts; a loop or a branch starts those of its body.
      in_place: (operand, result) of a loop's carry, which is updated in the operand's memory.
      source, path, label: source line, name stack, checkpoint name.
      repeatable: whether it may be recomputed: it gives the same result at the stated cost.
      slowdown: the ratio of its measured time to the cost of its FLOPs and bytes; 1 if not measured.
    """

    name: str
    fusion: Fusion
    operands: tuple[int, ...]
    results: tuple[int, ...]
    flops: float = 0.0
    dtype: str = "float32"
    extra_bytes: int = 0
    workspace_bytes: int = 0
    transposed: tuple[int, ...] = ()
    kernels: int = 1
    in_place: tuple[tuple[int, int], ...] = ()
    source: str = ""
    path: str = ""
    label: str = ""
    repeatable: bool = True
    slowdown: float = 1.0

    def __repr__(self) -> str:
        return f"Op({self.name!r}, {format_flops(self.flops)}, results {list(self.results)})"


@dataclasses.dataclass(frozen=True)
class Program:
    """Operations in order, on numbered values.

    Args:
      ops: the operations.
      bytes: the bytes of each value, on one device.
      types: the type of each value, as text.
      inputs: values that are live throughout the program.
      outputs: values that are returned.
    """

    ops: tuple[Op, ...]
    bytes: tuple[int, ...]
    types: tuple[str, ...]
    inputs: frozenset[int]
    outputs: tuple[int, ...]

    def __repr__(self) -> str:
        return (
            f"Program({counted(len(self.ops), 'operation')}, {counted(len(self.bytes), 'value')})"
        )

    @property
    def flops(self) -> float:
        return sum(op.flops for op in self.ops)


def without_dead(program: Program) -> Program:
    """Return the program without operations that its outputs do not depend on."""
    live = set(program.outputs)
    kept = []
    for op in reversed(program.ops):
        if any(v in live for v in op.results):
            kept.append(op)
            live.update(op.operands)
    return dataclasses.replace(program, ops=tuple(reversed(kept)))
