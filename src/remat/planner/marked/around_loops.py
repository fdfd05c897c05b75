"""Deciding a program's regions within a budget, by scheduling its graph.

The program is fused to a graph, and a solver finds a schedule of it. The schedule is then read as
decisions. A value of a region's forward program is saved if it is live when the backward pass begins
and used from then on. Each run of consecutive recomputations begins a segment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from remat.planner.marked.decisions import RegionDecision
from remat.planner.plan_file import PlanSegment
from remat.program.fusion import Fused, Price, fuse, fuse_reusing_outputs
from remat.program.program import Op, Program
from remat.solvers.grid import GridSearch
from remat.solvers.simulate import Step, no_remat
from remat.solvers.solver import Schedule

RegionId = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Answer:
    """Decisions for all regions of a program, and their predicted costs.

    Args:
      regions: the decisions; the fingerprints of backward programs are not known here.
      peak_bytes: the peak of live values, without arguments and results.
      extra_seconds, extra_flops: the costs of recomputation.
      lower_bound_seconds: proven lower bound of `extra_seconds` within the budget, in this model.
    """

    regions: dict[RegionId, RegionDecision]
    peak_bytes: int
    extra_seconds: float
    extra_flops: float
    lower_bound_seconds: float


class Problem:
    """A program's graph, to be scheduled within several budgets.

    With `reuses_outputs`, output buffers hold other values until the outputs are computed. How much of
    that the compiler achieves cannot be predicted, so the planner tries both models.
    """

    def __init__(
        self,
        program: Program,
        price: Price,
        regions: Iterable[RegionId],
        *,
        reuses_outputs: bool = False,
    ) -> None:
        self.program = program
        self.regions = tuple(regions)
        make = fuse_reusing_outputs if reuses_outputs else fuse
        self.fused: Fused = make(program, price, self._may_repeat)
        self._schedules = GridSearch().answers(self.fused.graph, self.fused.once)
        self.peak_bytes = no_remat(self.fused.graph).peak_bytes - self.fused.reused_bytes

    def _may_repeat(self, op: Op) -> bool:
        place = op.place
        return place is not None and not place.is_backward and place.region in self.regions

    def solve(self, budget: int) -> Answer:
        """Return decisions for which the graph's peak is within the budget.

        Raises:
          BudgetError: no schedule within the budget was found.
        """
        return self.read(self._schedules.within(budget + self.fused.reused_bytes))

    def smallest_bytes(self) -> int:
        """Return the smallest peak for which the solver finds a schedule."""
        return self._schedules.smallest().peak_bytes - self.fused.reused_bytes

    def read(self, found: Schedule) -> Answer:
        """Return the decisions that a schedule implies, and its costs."""
        base = self.fused.graph.time
        extra = [i for i, again in _computed(found.steps) if again]
        return Answer(
            regions={region: self._region_decision(region, found.steps) for region in self.regions},
            peak_bytes=found.peak_bytes - self.fused.reused_bytes,
            extra_seconds=float(found.time - base),
            extra_flops=sum(self._flops(i) for i in extra),
            lower_bound_seconds=float(found.lower_bound - base),
        )

    def _flops(self, node: int) -> float:
        return sum(self.program.ops[x].flops for x in self.fused.ops.get(node, ()))

    def _region_decision(self, region: RegionId, steps: Iterable[Step]) -> RegionDecision:
        ops = self.program.ops
        deps = {node.id: node.deps for node in self.fused.graph.nodes}
        saved: dict[int, None] = {}
        segments: list[PlanSegment] = []
        redone: set[int] = set()  # nodes whose latest value was computed in the backward pass
        burst: list[int] = []
        next_start = 0
        began = False
        for node, again in _computed(steps):
            if node >= len(ops):
                continue
            place = ops[node].place
            ours = place is not None and place.region == region
            forward = ours and place is not None and not place.is_backward
            if again and forward:
                if began:
                    burst.append(node)
                continue
            if not ours or place is None:
                continue
            if not place.is_backward:
                continue
            began = True
            if burst:
                again_set = set(burst)
                for x in burst:
                    self._save(deps[x], again_set, redone, region, saved)
                numbers = {n for x in burst for n in self._numbers(x)}
                segments.append(PlanSegment(next_start, tuple(sorted(numbers))))
                redone |= again_set
                burst = []
            self._save(deps[node], set(), redone, region, saved)
            next_start = place.number + 1
        return RegionDecision(tuple(sorted(saved)), tuple(segments), "")

    def _save(
        self,
        deps: Iterable[int],
        here: set[int],
        redone: set[int],
        region: RegionId,
        saved: dict[int, None],
    ) -> None:
        for d in deps:
            if d >= len(self.program.ops) or d in here or d in redone:
                continue
            place = self.program.ops[d].place
            if place is not None and not place.is_backward and place.region == region:
                saved.update(dict.fromkeys(self._numbers(d)))

    def _numbers(self, node: int) -> list[int]:
        """Return the numbers, in its region, of the values that a node writes."""
        op = self.program.ops[node]
        assert op.place is not None
        return [op.place.number + k for k in range(len(op.results))]


def _computed(steps: Iterable[Step]) -> Iterable[tuple[int, bool]]:
    """Yield the node of each computation in order, and whether it was computed before."""
    seen: set[int] = set()
    for kind, node in steps:
        if kind == "compute":
            yield node, node in seen
            seen.add(node)
