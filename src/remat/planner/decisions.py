"""Decisions about regions: which values are saved, and what each segment recomputes.

`decide` finds decisions, `emit` writes them into a program, and a plan's file holds them together with
what a reader wants to know of each value.
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
      backward: the fingerprint of the backward program that the segments divide. Another one is not
        divided, unless
      n_operations: the segments divide a program of so many operations, and any other in proportion.
      offloaded: which of the saved values are kept in the host's memory.
      offloaded_inputs: places of the forward program's inputs that are kept there as well.
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
