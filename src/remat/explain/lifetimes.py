"""The lifetimes of the values that kernels write, and which values reuse the memory of others.

A value lives from the kernel that writes it to the last that reads it. Updates of a part of an array, and
the carries of loops, may reuse the memory of the value that they replace; temporaries may be in the buffers
of results that are not written yet. An array that is filled with a constant and that only a loop reads, which
writes its rows, is in the memory of the loop's result, also if several loops write it in turn.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from remat.explain.phases import is_view
from remat.explain.recomputation import value_behind
from remat.ir.operations import FUSIBLE, writes_into_operand
from remat.program.fusion import Fused, fills
from remat.program.program import Program
from remat.program.result_buffers import Buffer, Temporary, in_buffers
from remat.report.model import Value


@dataclasses.dataclass
class Use:
    """The steps of the timeline between which a written value is live, and its readers."""

    born: int
    dies: int
    readers: list[int] = dataclasses.field(default_factory=list)  # operations that end kernels


class Lifetimes:
    """The lives of the values of a fused program; a step of the timeline is a kernel.

    Attributes:
      kernels: the operations that end kernels, in order.
      step_of: the place of each in this order.
      producer: the operation that computes each value.
      roots: the value written for each output of the program; None for an input.
      uses: the lives of the values that kernels write.
    """

    def __init__(self, program: Program, fused: Fused) -> None:
        self.program = program
        self.fused = fused
        ops = program.ops
        self.producer = {v: i for i, op in enumerate(ops) for v in op.results}
        self.kernels = [node.id for node in fused.graph.nodes if node.id < len(ops)]
        self.step_of = {kernel: at for at, kernel in enumerate(self.kernels)}
        self.roots = self._roots()
        self._filled = self._filled_values()
        self.uses = self._uses()

    def _roots(self) -> list[int | None]:
        """Return the value written for each output of the program; None for an input."""
        found: list[int | None] = []
        for v in self.program.outputs:
            while (i := self.producer.get(v)) is not None and is_view(self.program.ops[i]):
                v = self.program.ops[i].operands[0]
            found.append(v if v in self.producer else None)
        return found

    def _uses(self) -> dict[int, Use]:
        ops, holds = self.program.ops, self.fused.holds
        uses: dict[int, Use] = {}
        updated: dict[int, int] = {}
        for kernel in self.kernels:
            at = self.step_of[kernel]
            for v in ops[kernel].results:
                uses[v] = Use(at, at)
            for i in self.fused.ops[kernel]:
                for v in ops[i].operands:
                    if v in uses and holds.get(v) != kernel:
                        uses[v].dies = at
                        uses[v].readers.append(kernel)
            for v, _ in self._updated_in_place(kernel):
                if v in uses and uses[v].dies == at:
                    uses[v].dies = max(uses[v].born, at - 1)
                    updated.setdefault(v, at)
        for v, at in updated.items():
            # If the value is read later, the compiler updates a copy of it.
            if uses[v].readers[-1] != self.kernels[at]:
                uses[v].dies = max(uses[v].dies, at)
        return uses

    def _filled_values(self) -> frozenset[int]:
        """Return the arrays that are filled with a constant, also if operations have written rows since then.

        Only those count whose memory no other operation reads: `fusion` has the same rule.
        """
        ops, outputs = self.program.ops, set(self.program.outputs)
        n_uses = Counter(v for op in ops for v in op.operands)
        found: set[int] = set()
        for i, op in enumerate(ops):
            found.update(op.results if fills(op, self.program.bytes) else ())
            for v, result in self._pairs_in_place(i):
                before = value_behind(v, self.program, self.producer)
                if before in found and n_uses[v] == 1 and v not in outputs:
                    found.add(result)
        return frozenset(found)

    def _pairs_in_place(self, i: int) -> tuple[tuple[int, int], ...]:
        """Return pairs of an operand and a result of an operation that may be in the same memory."""
        op = self.program.ops[i]
        if writes_into_operand(op.name):
            return ((op.operands[0], op.results[0]),)
        return op.in_place

    def _updated_in_place(self, kernel: int) -> list[tuple[int, int]]:
        """Return pairs of a value and a result that reuses its memory if nothing else reads the value.

        The values are arrays of which a part is written, the initial values of a while loop, and the initial
        values of other loops that are filled with a constant.
        """
        op = self.program.ops[kernel]
        found = []
        for v, after in self._pairs_in_place(kernel):
            before = value_behind(v, self.program, self.producer)
            is_reused = op.name == "while" or writes_into_operand(op.name) or before in self._filled
            if is_reused and op.operands.count(v) == 1:
                found.append((before, after))
        return found

    def in_carry(self, carried: Sequence[int]) -> set[int]:
        """Return the values that are written into the carry of the loop that runs this program.

        A carry is updated in place if its next value is what was last written into it.

        Args:
          carried: the inputs that are the carry.
        """
        last: dict[int, int] = {}
        for kernel in self.kernels:
            for i in self.fused.ops[kernel]:
                last.update(dict.fromkeys(self.program.ops[i].operands, kernel))
        carry_of = {v: v for v in carried if v not in self.program.outputs}
        for kernel in self.kernels:
            operands = self.program.ops[kernel].operands
            for v, after in self._pairs_in_place(kernel):
                before = value_behind(v, self.program, self.producer)
                if before in carry_of and last[before] == kernel and operands.count(v) == 1:
                    carry_of[after] = carry_of[before]
        updated = {carry_of[v] for v in self.roots if v in carry_of}
        return {v for v, carry in carry_of.items() if carry in updated}

    def in_loop_results(self) -> set[int]:
        """Return the arrays filled with a constant that are in the memory of the result of the next loop."""
        ops = self.program.ops
        found = set()
        for kernel in self.kernels:
            if ops[kernel].name not in ("scan", "while"):
                continue
            for before, _ in self._updated_in_place(kernel):
                if before not in self._filled or before not in self.uses:
                    continue
                is_fill = ops[self.producer[before]].fusion in FUSIBLE
                if is_fill and self.uses[before].dies < self.step_of[kernel]:
                    found.add(before)
        return found

    def in_results(self) -> set[int]:
        """Return the values that become results in their own memory."""
        roots = {v for v in self.roots if v is not None}
        found = set(roots)
        for kernel in reversed(self.kernels):
            for before, after in self._updated_in_place(kernel):
                use = self.uses.get(before)
                if after in found and use is not None and use.dies < self.step_of[kernel]:
                    found.add(before)
        return found - roots

    def in_buffers(
        self, outputs: Sequence[Value], updated: set[int], host_bytes: Mapping[int, int]
    ) -> frozenset[int]:
        """Return the values in the buffers of results that are allocated from the start.

        Args:
          outputs: the results.
          updated: values that become results in their own memory. XLA initializes it early.
          host_bytes: the values in the host's memory, with their bytes.
        """
        roots = [v for v in self.roots if v is not None]
        in_use = {
            after
            for kernel in self.kernels
            for before, after in self._updated_in_place(kernel)
            if before in updated
        }
        buffers = [
            Buffer(made.n_bytes, self.uses[v].born, self._is_elementwise(v))
            for v, made in zip(self.roots, outputs)
            if v is not None and made.lifetimes and v not in in_use and roots.count(v) == 1
        ]
        temporaries = [
            Temporary(v, self.program.bytes[v], use.born, use.dies)
            for v, use in self.uses.items()
            if v not in roots and v not in updated and v not in host_bytes
            if self.program.bytes[v]
        ]
        return in_buffers(temporaries, buffers)

    def _is_elementwise(self, v: int) -> bool:
        """Return whether an elementwise kernel writes a value."""
        return self.program.ops[self.producer[v]].fusion in FUSIBLE
