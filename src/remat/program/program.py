"""A program as planners see it: operations on values, with what compilers will make of each.

This is the plain-data form of a jaxpr, between `trace` (which knows JAX) and `fusion` (which knows
what compilers do). Nothing in here is a JAX object.
"""

from __future__ import annotations

import dataclasses

from remat.ir.operations import Fusion


@dataclasses.dataclass(frozen=True)
class Place:
    """Which operation of which region's program an operation is.

    Args:
      region: the region's key and fingerprint.
      is_backward: whether it is of the backward program.
      number: of its first result in the forward program, or its own in the backward program.
    """

    region: tuple[str, str]
    is_backward: bool
    number: int


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation.

    Args:
      name: the primitive's.
      fusion: what it means to a compiler that fuses loops.
      operands, results: numbers of values.
      flops: floating-point operations of one execution.
      dtype: in which most of them are done.
      extra_bytes: what it reads and writes besides its operands and results.
      workspace_bytes: what it occupies while it runs besides its operands and results.
      place: where in a region it is; None outside of all.
      source, path, label: source line, name stack, checkpoint name.
      repeatable: whether computing it again gives the same and costs what it says.
      slowdown: how many times longer it takes than by the price of its operations and bytes, where
        that was measured.
    """

    name: str
    fusion: Fusion
    operands: tuple[int, ...]
    results: tuple[int, ...]
    flops: float = 0.0
    dtype: str = "float32"
    extra_bytes: int = 0
    workspace_bytes: int = 0
    place: Place | None = None
    source: str = ""
    path: str = ""
    label: str = ""
    repeatable: bool = True
    slowdown: float = 1.0


@dataclasses.dataclass(frozen=True)
class Program:
    """Operations in order, on numbered values.

    Args:
      ops: the operations.
      bytes: of each value, on one device.
      types: of each value, as text.
      inputs: values that are there from the start and stay.
      outputs: values that are returned.
    """

    ops: tuple[Op, ...]
    bytes: tuple[int, ...]
    types: tuple[str, ...]
    inputs: frozenset[int]
    outputs: tuple[int, ...]

    @property
    def flops(self) -> float:
        return sum(op.flops for op in self.ops)


def without_dead(program: Program) -> Program:
    """Return a program without the operations that its outputs don't need."""
    live = set(program.outputs)
    kept = []
    for op in reversed(program.ops):
        if any(v in live for v in op.results):
            kept.append(op)
            live.update(op.operands)
    return dataclasses.replace(program, ops=tuple(reversed(kept)))
