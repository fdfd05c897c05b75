"""The recomputed parts of a step: regions, and loops whose backward body recomputes."""

from __future__ import annotations

from remat.explain.labels import path_of, region_label
from remat.explain.lifetimes import Lifetimes
from remat.explain.phases import PhasedProgram
from remat.explain.recomputation import recomputed_inside, value_behind
from remat.explain.sources import user_source_of
from remat.program.fusion import Fused
from remat.report.groups import own_function
from remat.report.model import Segment


class RecomputedSegments:
    """The segments of a step whose values live as `lives` says."""

    def __init__(self, sides: PhasedProgram, fused: Fused, lives: Lifetimes) -> None:
        self.sides = sides
        self.fused = fused
        self.lives = lives

    def of_kernels(self) -> dict[int, int]:
        """Return the region that a kernel belongs to."""
        sides = self.sides
        found = {k: sides.regions[k] for k in self.lives.kernels if sides.regions[k] != -1}
        for i, op in enumerate(self.sides.program.ops):
            if sides.phases[i] == "recompute":
                for v in op.results:
                    again = sides.same.get(v)
                    j = self.lives.producer.get(again) if again is not None else None
                    if j is not None and sides.phases[j] == "forward":
                        kernel = self.fused.holds.get(again) if again is not None else None
                        found.setdefault(
                            kernel if kernel in self.lives.step_of else j, sides.regions[i]
                        )
        known = {segment.number for segment in self._segments_from(found)}
        return {k: n for k, n in found.items() if k in self.lives.step_of and n in known}

    def all(self) -> list[Segment]:
        """Return the segments of a step: its regions, and loops whose backward body recomputes."""
        return self._segments_from(self.of_kernels())

    def _segments_from(self, kernels: dict[int, int]) -> list[Segment]:
        sides = self.sides
        made = []
        again = {n for n, p in zip(sides.regions, sides.phases) if p == "recompute"}
        for number, region in enumerate(sides.all_regions):
            if number not in again:  # recomputes nothing
                continue
            ours = [
                self.lives.step_of[k]
                for k, n in kernels.items()
                if n == number and sides.phases[k] == "forward" and k in self.lives.step_of
            ]
            if not ours:  # all of it was fused: use the kernels that compute its operands
                ours = [
                    self.lives.uses[v].born
                    for v in region.operands
                    if v in self.lives.uses and sides.phases[self.lives.producer[v]] == "forward"
                ][-1:]
            if ours:
                again_at = next(
                    eqn for eqn, n, p in zip(sides.eqns, sides.regions, sides.phases)
                    if n == number and p == "recompute"
                )  # fmt: skip
                name = region_label(region.path, own_function(user_source_of(again_at)), number)
                made.append(Segment(
                    number, name, min(ours), max(ours),
                    self._saved_by(number), self._again_by(number),
                ))  # fmt: skip
        return made + self._loops(len(sides.all_regions))

    def _loops(self, number: int) -> list[Segment]:
        """Yield loops whose backward body recomputes: each is a segment of one step."""
        made: list[Segment] = []
        for kernel in self.lives.kernels:
            op, eqn = self.sides.program.ops[kernel], self.sides.eqns[kernel]
            again = recomputed_inside(eqn) if self.sides.phases[kernel] == "backward" else 0
            read = [v for v in op.operands if self._is_loop_result(v)]
            if again and read:
                born = [self.lives.uses[v].born for v in read if v in self.lives.uses]
                saved = sum(self.sides.program.bytes[v] for v in dict.fromkeys(read))
                if born:
                    name = region_label(
                        path_of(op), own_function(user_source_of(eqn)), number + len(made)
                    )
                    made.append(Segment(
                        number + len(made), name, min(born), max(born), saved, float(again),
                    ))  # fmt: skip
        return made

    def _is_loop_result(self, v: int) -> bool:
        i = self.lives.producer.get(v)
        return (
            i is not None
            and self.sides.phases[i] == "forward"
            and self.sides.program.ops[i].name in ("scan", "while")
        )

    def _saved_by(self, number: int) -> int:
        """Return the bytes of the forward pass that a region's backward half reads."""
        operands = dict.fromkeys(self.sides.all_regions[number].operands)
        roots = {value_behind(v, self.sides.program, self.lives.producer) for v in operands}
        return sum(
            self.sides.program.bytes[v]
            for v in roots
            if v in self.lives.producer and self.sides.phases[self.lives.producer[v]] == "forward"
        )

    def _again_by(self, number: int) -> float:
        return float(
            sum(
                op.flops
                for op, phase, n in zip(
                    self.sides.program.ops, self.sides.phases, self.sides.regions
                )
                if n == number and phase == "recompute"
            )
        )  # fmt: skip
