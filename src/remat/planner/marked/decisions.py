"""Decisions about regions: which values are saved, and what each segment recomputes.

`around_loops` finds decisions and `emit` writes them into a program. A plan's file has them, with a
description of each value for its readers.
"""

from __future__ import annotations

import dataclasses

from remat.planner.plan_file import PlanSegment, RegionPlan


@dataclasses.dataclass(frozen=True)
class RegionDecision:
    """What is decided about one region.

    Args:
      saved: numbers of saved values.
      segments: in order.
      backward: the fingerprint of the backward program that the segments divide.
      n_operations: the number of operations of that program, if the segments divide another backward
        program in proportion; 0 if they do not divide another one.
      offloaded: which of the saved values are kept in host memory.
      offloaded_inputs: the positions of the forward program's inputs that are kept there, too.
    """

    saved: tuple[int, ...]
    segments: tuple[PlanSegment, ...]
    backward: str
    n_operations: int = 0
    offloaded: tuple[int, ...] = ()
    offloaded_inputs: tuple[int, ...] = ()

    @classmethod
    def of(cls, plan: RegionPlan) -> RegionDecision:
        """Return the decision that a plan holds about a region."""
        return cls(
            tuple(value.number for value in plan.saved),
            plan.segments,
            plan.backward,
            offloaded=tuple(value.number for value in plan.saved if value.offloaded),
            offloaded_inputs=tuple(value.number for value in plan.offloaded_inputs),
        )

    def segments_of(self, backward: str, n_operations: int) -> tuple[PlanSegment, ...]:
        """Return the segments of the backward program with this fingerprint and so many operations."""
        if backward == self.backward:
            return self.segments
        if not self.n_operations:
            return ()
        return tuple(
            dataclasses.replace(
                s, start=min(n_operations, s.start * n_operations // self.n_operations)
            )
            for s in self.segments
        )
