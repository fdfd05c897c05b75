"""Programs as operations on numbered values."""

from __future__ import annotations

from remat.ir.operations import Fusion
from remat.program.program import Op, Program, without_dead


def test_dead_operations_are_left_out():
    ops = (
        Op("dot", Fusion.KERNEL, (0,), (1,), flops=1),
        Op("dot", Fusion.KERNEL, (0,), (2,), flops=2),
        Op("neg", Fusion.CHEAP, (2,), (3,), flops=4),
    )
    program = Program(ops, (8,) * 4, ("f32[2]",) * 4, frozenset({0}), (1,))
    live = without_dead(program)
    assert [op.results for op in live.ops] == [(1,)]
    assert (program.flops, live.flops) == (7, 1)
