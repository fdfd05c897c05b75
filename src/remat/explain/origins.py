"""Where the values that a step writes come from: their kind, operation and cost.

The kind follows from the phases in which a value is written and read (`account` lists the kinds). The cost of
a saved value is that of recomputing it: its kernel, and the kernels between it and other saved values.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from remat.explain.labels import path_of
from remat.explain.lifetimes import Lifetimes
from remat.explain.loops import DrawnBody, Origin
from remat.explain.phases import PhasedProgram
from remat.explain.recomputation import passes_on, value_behind
from remat.explain.sources import user_source_of
from remat.ir import jaxprs
from remat.program.fusion import Fused
from remat.report.model import Kind, Phase

# The most kernels whose costs are added for recomputing one saved value; more are left out.
_MOST_KERNELS = 500
# Primitives that only give an array another shape, if its size stays.
_RESHAPES = frozenset({"reshape", "broadcast_in_dim", "squeeze", "expand_dims"})


class Origins:
    """The kinds, origins and costs of the values of a program.

    Args:
      sides: the program, by phases.
      fused: its kernels.
      lives: when its values are live.
      bodies: the bodies of its loops and branches, by kernel.
      stacked: if this program is the body of a loop, the values that the loop stacks.
    """

    def __init__(
        self,
        sides: PhasedProgram,
        fused: Fused,
        lives: Lifetimes,
        bodies: Mapping[int, DrawnBody],
        stacked: frozenset[int],
    ) -> None:
        self._sides, self._program, self._fused = sides, sides.program, fused
        self._lives, self._bodies, self._stacked = lives, bodies, stacked

    def kind(self, v: int) -> Kind:
        """Return the kind of a value that a kernel writes: a result of the step is another."""
        phases = self._sides.phases
        phase = phases[self._lives.producer[v]]
        if v in self._sides.host_bytes:
            return "offloaded"
        if phase == "backward":
            return "gradient"
        if phase == "recompute":
            return "recomputed"
        later = ("backward", "recompute")
        if phase == "forward" and any(phases[r] in later for r in self._lives.uses[v].readers):
            return "saved"
        return "temporary"

    def origin(self, v: int) -> Origin:
        """Return the origin of a value, inside a loop or branch if one returns it."""
        i = self._lives.producer[v]
        op, body = self._program.ops[i], self._bodies.get(i)
        at = op.results.index(v)
        inner = body.results[at] if body is not None and at < len(body.results) else None
        if body is not None and inner is not None:
            if n := self._rows_of(v):
                return inner.times(n // inner.count)
            if at in body.row_bytes:
                return dataclasses.replace(inner, aval=self.type_of(v), count=1)
            return inner
        flops, time_s = self._cost_of(v)
        i = self._reshaped_from(i)
        op = self._program.ops[i]
        return Origin(
            op.name,
            user_source_of(self._sides.eqns[i]),
            op.label or self._names.get(v, ""),
            path_of(op),
            self.type_of(v),
            flops,
            time_s,
            function=self._sides.functions[i],
        )

    def _rows_of(self, v: int) -> int:
        """Return the number of values that loops stack in a value; 0 if it is not all rows of loops.

        Several loops may write rows of one array in turn.
        """
        n_rows = n_bytes = 0
        size = self._program.bytes[v]
        while (i := self._lives.producer.get(v)) is not None and i in self._bodies:
            body, op = self._bodies[i], self._program.ops[i]
            at = op.results.index(v)
            inner = body.results[at] if at < len(body.results) else None
            if inner is None:
                return 0
            n_rows += body.length * inner.count
            if at >= body.stacked_from:
                return n_rows
            if at not in body.row_bytes:
                return 0
            n_bytes += body.length * body.row_bytes[at]
            if n_bytes >= size:
                break
            v = next((before for before, after in op.in_place if after == v), -1)
            v = value_behind(v, self._program, self._lives.producer)
        return n_rows if n_bytes == size > 0 else 0

    def rows_inside(self, v: int) -> Origin | None:
        """Return the origin of the rows that a loop writes into a carry of the loop around it, if it does."""
        i = self._lives.producer[v]
        body, at = self._bodies.get(i), self._program.ops[i].results.index(v)
        inner = body.results[at] if body is not None and at in body.row_bytes else None
        return None if body is None or inner is None else inner.times(body.length)

    def _reshaped_from(self, i: int) -> int:
        """Return the operation in the same kernel whose result an operation only reshapes."""
        ops, sizes = self._program.ops, self._program.bytes
        while ops[i].name in _RESHAPES and len(ops[i].operands) == 1:
            v = ops[i].operands[0]
            before = self._lives.producer.get(v)
            if before is None or v in self._lives.uses or sizes[v] != sizes[ops[i].results[0]]:
                break
            if jaxprs.has_body(self._sides.eqns[before]):
                break
            i = before
        return i

    def before_reshape(self, v: int) -> int:
        """Return the value that has the elements of another in another shape, or is a copy of it."""
        producer, sizes = self._lives.producer, self._program.bytes
        while (i := producer.get(v)) is not None:
            op = self._program.ops[i]
            is_reshape = op.name in _RESHAPES and len(op.operands) == 1
            if not passes_on(op) and not (is_reshape and sizes[op.operands[0]] == sizes[v]):
                break
            v = op.operands[0]
        return v

    def type_of(self, v: int) -> str:
        """Return a value's type, with the number of devices that it is sharded over: ``f32[32,256]/8``."""
        shards = self._sides.shards[v]
        return f"{self._program.types[v]}/{shards}" if shards > 1 else self._program.types[v]

    def _cost_of(self, v: int) -> tuple[float, float]:
        """Return the FLOPs and seconds of computing a value: a saved one from other saved values.

        Unsaved values between saved ones must be recomputed as well. Every other value has the cost of its
        kernel.
        """
        kernels = {self._lives.producer[v]}
        if v in self._kept or self._is_forward_result(v):
            todo = [self._lives.producer[v]]
            while todo and len(kernels) < _MOST_KERNELS:
                for before in self._kernels_before.get(todo.pop(), ()):
                    if before not in self._kept_kernels and before not in kernels:
                        kernels.add(before)
                        todo.append(before)
        inside = {x for kernel in kernels for x in self._fused.ops.get(kernel, (kernel,))}
        return (
            float(sum(self._program.ops[x].flops for x in inside)),
            sum(self._fused.seconds.get(kernel, 0.0) for kernel in kernels),
        )

    def _is_forward_result(self, v: int) -> bool:
        """Return whether a value is a carry that an iteration of a loop in the forward pass returns."""
        return bool(self._stacked) and v in self._lives.roots and self._phase_of(v) == "forward"

    def _phase_of(self, v: int) -> Phase:
        return self._sides.phases[self._lives.producer[v]]

    @functools.cached_property
    def _kept(self) -> frozenset[int]:
        """Return the values of the forward pass that are saved, here or by the loop that runs this."""
        saved = {v for v in self._lives.uses if self.kind(v) == "saved"}
        return frozenset(saved | {v for v in self._stacked if self._phase_of(v) == "forward"})

    @functools.cached_property
    def _kept_kernels(self) -> frozenset[int]:
        return frozenset(self._lives.producer[v] for v in self._kept)

    @functools.cached_property
    def _kernels_before(self) -> dict[int, tuple[int, ...]]:
        return {
            node.id: tuple(before for before in node.deps if before in self._lives.step_of)
            for node in self._fused.graph.nodes
        }

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        """Return the checkpoint names of values, which belong to the copies `checkpoint_name` made."""
        found: dict[int, str] = {}
        for op in self._program.ops:
            if op.label:
                v = op.operands[0] if op.operands else -1
                while (i := self._lives.producer.get(v)) is not None:
                    found.setdefault(v, op.label)
                    if not passes_on(self._program.ops[i]):
                        break
                    v = self._program.ops[i].operands[0]
        return found
