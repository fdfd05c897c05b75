"""The values that a step writes to memory, when each is live, and what it is for.

The values are those that fusion leaves: what is computed on the way inside a kernel occupies nothing.
A step of the timeline is one kernel. A value lives from the kernel that writes it to the last that
reads it; arguments live throughout, and so do results on CPU and GPU, whose compilers reserve them
from the start. What becomes of a value is read off who writes it and who reads it:

    saved        written in the forward pass, read in the backward pass
    recomputed   written in a region's backward half from what was saved; its first life too
    offloaded    kept in the host's memory between the two
    gradient     written in the backward pass
    temporary    all else, also what loops and branches need while they run
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping

from remat import _jax
from remat.explain.phases import PhasedProgram, is_region, is_view, merged, parts
from remat.ir import jaxprs
from remat.ir.flops import flops_of
from remat.program.fusion import Fused, Price, fuse
from remat.program.program import Op, Program
from remat.report.model import Kind, Phase, Segment, Step, Value
from remat.solvers.simulate import no_remat


@dataclasses.dataclass(frozen=True)
class Account:
    """The values, timeline and segments of a step, and their sums.

    Args:
      alias_bytes: of results that take over a donated argument's memory.
      saved_bytes, saved_argument_bytes: what the backward pass reads of what the forward pass
        computed, and of the arguments, before anything is fused.
      undone_bytes: temporaries of the program that is left if nothing is recomputed.
    """

    values: tuple[Value, ...]
    steps: tuple[Step, ...]
    segments: tuple[Segment, ...]
    alias_bytes: int
    flops: float
    recompute_flops: float
    time_s: float
    recompute_time_s: float
    saved_bytes: int
    saved_argument_bytes: int
    undone_bytes: int


def account_of(
    sides: PhasedProgram,
    names: tuple[str, ...],
    donated: tuple[bool, ...],
    price: Price,
    *,
    results_from_start: bool,
    duplicates: bool,
) -> Account:
    """Return a step's values, timeline and sums.

    Args:
      results_from_start: whether the memory of results is there from the start.
      duplicates: whether kernels compute cheap values for themselves, as in `fusion.fuse`.
    """
    return _Accounting(sides, price, duplicates).account(names, donated, results_from_start)


def temporaries_bytes(program: Program, *, duplicates: bool) -> int:
    """Return the largest number of live bytes, arguments and results left out."""
    fused = fuse(program, lambda *_: 0.0, lambda _: True, duplicates=duplicates)
    return no_remat(fused.graph).peak_bytes


def source_of(op: Op) -> str:
    """Return an operation's source line, relative to the current directory where it is below it."""
    return op.source.removeprefix(os.path.join(os.getcwd(), ""))


def path_of(op: Op) -> str:
    """Return an operation's name scope, without JAX's own scopes."""
    names = op.path.split("/")
    return "/".join(n for n in names if n not in ("rematted_computation", "checkpoint"))


@dataclasses.dataclass
class _Use:
    """A written value: where it is computed and used."""

    born: int
    dies: int
    readers: list[int] = dataclasses.field(default_factory=list)  # operations that end kernels


class _Accounting:
    def __init__(self, sides: PhasedProgram, price: Price, duplicates: bool) -> None:
        self.before = sides  # as it was written, with what it computes twice
        self.sides = sides = merged(sides)
        self.program = sides.program
        self.duplicates = duplicates
        self.fused: Fused = fuse(self.program, price, lambda _: True, duplicates=duplicates)
        ops = self.program.ops
        self.producer = {v: i for i, op in enumerate(ops) for v in op.results}
        self.kernels = [node.id for node in self.fused.graph.nodes if node.id < len(ops)]
        self.step_of = {kernel: at for at, kernel in enumerate(self.kernels)}
        self.roots = self._roots()
        self.uses = self._uses()

    def _roots(self) -> list[int | None]:
        """Return the value written for each output of the program; None for an input."""
        found: list[int | None] = []
        for v in self.program.outputs:
            while (i := self.producer.get(v)) is not None and is_view(self.program.ops[i]):
                v = self.program.ops[i].operands[0]
            found.append(v if v in self.producer else None)
        return found

    def _uses(self) -> dict[int, _Use]:
        ops, holds = self.program.ops, self.fused.holds
        uses: dict[int, _Use] = {}
        for kernel in self.kernels:
            at = self.step_of[kernel]
            for v in ops[kernel].results:
                uses[v] = _Use(at, at)
            for i in self.fused.ops[kernel]:
                for v in ops[i].operands:
                    if v in uses and holds.get(v) != kernel:
                        uses[v].dies = at
                        uses[v].readers.append(kernel)
        return uses

    # Kinds and lifetimes of values

    def kind(self, v: int) -> Kind:
        phases = self.sides.phases
        phase = phases[self.producer[v]]
        if v in self.sides.host_bytes:
            return "offloaded"
        if phase == "backward":
            return "gradient"
        if phase == "recompute":
            return "recomputed"
        later = ("backward", "recompute")
        if phase == "forward" and any(phases[r] in later for r in self.uses[v].readers):
            return "saved"
        return "temporary"

    def account(
        self, names: tuple[str, ...], donated: tuple[bool, ...], results_from_start: bool
    ) -> Account:
        steps = self._steps()
        last = len(steps) - 1
        values = self._arguments(names, last)
        outputs, alias_bytes = self._outputs(donated, last, results_from_start)
        values += outputs
        values += self._written()
        values += self._workspaces()
        numbered = tuple(dataclasses.replace(v, id=i) for i, v in enumerate(values))
        share = self._recompute_share()
        again_s = sum(
            step.time_s if step.phase == "recompute" else step.time_s * share(kernel)
            for step, kernel in zip(steps, self.kernels)
        )
        saved, of_arguments = self._residual_bytes()
        return Account(
            values=numbered,
            steps=tuple(steps),
            segments=tuple(self._segments()),
            alias_bytes=alias_bytes,
            flops=self.before.program.flops,
            recompute_flops=self._recompute_flops(),
            time_s=sum(step.time_s for step in steps),
            recompute_time_s=again_s,
            saved_bytes=saved,
            saved_argument_bytes=of_arguments,
            undone_bytes=self._undone_bytes(),
        )

    def _undone_bytes(self) -> int:
        if not self.sides.same:
            return 0
        return temporaries_bytes(self.sides.undone(), duplicates=self.duplicates)

    # The timeline

    def _steps(self) -> list[Step]:
        ops = self.program.ops
        numbers = self._segment_of()
        made = [
            Step(
                label(ops[kernel]),
                self.sides.phases[kernel],
                self.fused.seconds[kernel],
                source_of(ops[kernel]),
                numbers.get(kernel, -1),
            )
            for kernel in self.kernels
        ]
        return [*made, Step("results", "update")]

    def _arguments(self, names: tuple[str, ...], last: int) -> list[Value]:
        read = {v for op in self.program.ops for v in op.operands} | set(self.program.outputs)
        readers: dict[int, Op] = {}
        for op in self.program.ops:
            for v in op.operands:
                readers.setdefault(v, op)
        found = []
        for v, name in zip(self.sides.inputs, names):
            if v in read:
                found.append(
                    self._value(
                        v, "argument", ((0, last),), path=name, consumer=_consumer(readers.get(v))
                    )
                )
        return found

    def _outputs(
        self, donated: tuple[bool, ...], last: int, results_from_start: bool
    ) -> tuple[list[Value], int]:
        given = [self.program.types[v] for v, d in zip(self.sides.inputs, donated) if d]
        found: list[Value] = []
        alias_bytes = 0
        for v, root in zip(self.program.outputs, self.roots):
            born = 0 if results_from_start or root is None else self.uses_of(root)
            lifetimes: tuple[tuple[int, int], ...] = ((born, last),)
            consumer = "the caller"
            if self.program.types[v] in given and self.program.bytes[v]:
                given.remove(self.program.types[v])
                alias_bytes += self.program.bytes[v]
                lifetimes, consumer = (), "the caller, in a donated argument's memory"
            made = self._value(root if root is not None else v, "output", lifetimes)
            found.append(dataclasses.replace(
                made, aval=self.program.types[v], n_bytes=self.program.bytes[v], consumer=consumer
            ))  # fmt: skip
        return found, alias_bytes

    def uses_of(self, v: int) -> int:
        """Return the timeline's step at which a value is written."""
        return self.uses[v].born if v in self.uses else 0

    def _written(self) -> list[Value]:
        outputs = {v for v in self.roots if v is not None}
        moved = self._moved()
        first_life: dict[int, int] = {}  # a value of the forward pass -> its place in what is found
        found: list[Value] = []
        for v, use in self.uses.items():
            if v in outputs or v in moved.values():
                continue
            kind = self.kind(v)
            lives: tuple[tuple[int, int], ...] = ((use.born, use.dies),)
            if kind == "offloaded":
                lives = ()
            elif v in moved:
                kind = "offloaded"
                back = self.uses.get(moved[v])
                if back is not None and back.born > use.dies:
                    lives = (*lives, (back.born, back.dies))
            elif kind == "recomputed":
                at = first_life.get(self.sides.same.get(v, -1))
                if at is not None and found[at].lifetimes[-1][1] < use.born:
                    lives = (*found[at].lifetimes, *lives)
                    found[at] = dataclasses.replace(found[at], kind="recomputed", lifetimes=lives)
                    continue
            if kind == "temporary":
                first_life[v] = len(found)
            reader = next(
                (r for r in use.readers if self.sides.phases[r] != "forward"),
                use.readers[0] if use.readers else None,
            )
            consumer = "" if reader is None else _consumer(self.program.ops[reader])
            found.append(self._value(v, kind, lives, consumer=consumer))
        return found

    def _moved(self) -> dict[int, int]:
        """Return the values that are offloaded: from the value to the fetched copy of it."""
        ops, host = self.program.ops, self.sides.host_bytes
        sent = {
            op.results[0]: op.operands[0]
            for op in ops
            if op.name == "device_put" and op.results[0] in host and op.operands[0] in self.uses
        }
        found = {}
        for op in ops:
            if op.name == "device_put" and op.operands[0] in sent:
                found[sent[op.operands[0]]] = op.results[0]
        return found

    def _workspaces(self) -> list[Value]:
        """Yield the workspace of loops and branches."""
        found = []
        for kernel in self.kernels:
            op = self.program.ops[kernel]
            if op.workspace_bytes:
                at = self.step_of[kernel]
                found.append(Value(
                    0, "temporary", "workspace", op.workspace_bytes, ((at, at),), op.name,
                    source_of(op), op.label, path_of(op), f"the body of {op.name}",
                ))  # fmt: skip
        return found

    def _value(
        self, v: int, kind: Kind, lives: tuple[tuple[int, int], ...], *, path: str = "",
        consumer: str = "",
    ) -> Value:  # fmt: skip
        i = self.producer.get(v)
        n_bytes = self.sides.host_bytes.get(v, self.program.bytes[v])
        common = (0, kind, self.program.types[v], n_bytes, lives)
        if i is None:
            return Value(*common, path=path, consumer=consumer)
        op = self.program.ops[i]
        inside = self.fused.ops.get(i, (i,))
        return Value(
            *common,
            primitive=op.name,
            source=source_of(op),
            name=op.label or self._names.get(v, ""),
            path=path or path_of(op),
            consumer=consumer,
            flops=float(sum(self.program.ops[x].flops for x in inside)),
            time_s=self.fused.seconds.get(i, 0.0),
        )

    @property
    def _names(self) -> dict[int, str]:
        """Return the checkpoint names of values, which belong to the copies `checkpoint_name` made."""
        found = self.__dict__.get("_named")
        if found is None:
            found = {}
            for op in self.program.ops:
                if op.label:
                    v = op.operands[0] if op.operands else -1
                    while (i := self.producer.get(v)) is not None:
                        found.setdefault(v, op.label)
                        if not _passes_on(self.program.ops[i]):
                            break
                        v = self.program.ops[i].operands[0]
            self.__dict__["_named"] = found
        return found

    # Segments

    def _segment_of(self) -> dict[int, int]:
        """Return the region that a kernel belongs to."""
        sides = self.sides
        found = {k: sides.regions[k] for k in self.kernels if sides.regions[k] != -1}
        for i, op in enumerate(self.program.ops):
            if sides.phases[i] == "recompute":
                for v in op.results:
                    again = sides.same.get(v)
                    j = self.producer.get(again) if again is not None else None
                    if j is not None and sides.phases[j] == "forward":
                        kernel = self.fused.holds.get(again) if again is not None else None
                        found.setdefault(kernel if kernel in self.step_of else j, sides.regions[i])
        known = {segment.number for segment in self._segments_from(found)}
        return {k: n for k, n in found.items() if k in self.step_of and n in known}

    def _segments(self) -> list[Segment]:
        return self._segments_from(self._segment_of())

    def _segments_from(self, kernels: dict[int, int]) -> list[Segment]:
        sides = self.sides
        made = []
        for number, region in enumerate(sides.all_regions):
            ours = [
                self.step_of[k]
                for k, n in kernels.items()
                if n == number and sides.phases[k] == "forward" and k in self.step_of
            ]
            if not ours:  # all of it was fused: where its operands are made
                ours = [
                    self.uses[v].born
                    for v in region.operands
                    if v in self.uses and sides.phases[self.producer[v]] == "forward"
                ][-1:]
            if ours:
                made.append(Segment(
                    number, region_label(region.path, number), min(ours), max(ours),
                    self.saved_by(number), self.again_by(number),
                ))  # fmt: skip
        return made + self._loops(len(sides.all_regions))

    def _loops(self, number: int) -> list[Segment]:
        """Yield loops whose backward body recomputes: each is a segment of one step."""
        made: list[Segment] = []
        for kernel in self.kernels:
            op, eqn = self.program.ops[kernel], self.sides.eqns[kernel]
            again = recomputed_inside(eqn) if self.sides.phases[kernel] == "backward" else 0
            read = [v for v in op.operands if self._is_loop_result(v)]
            if again and read:
                born = [self.uses[v].born for v in read if v in self.uses]
                saved = sum(self.program.bytes[v] for v in dict.fromkeys(read))
                if born:
                    made.append(Segment(
                        number + len(made), region_label(path_of(op), number + len(made)),
                        min(born), max(born), saved, float(again),
                    ))  # fmt: skip
        return made

    def _is_loop_result(self, v: int) -> bool:
        i = self.producer.get(v)
        return (
            i is not None
            and self.sides.phases[i] == "forward"
            and self.program.ops[i].name in ("scan", "while")
        )

    def saved_by(self, number: int) -> int:
        """Return the bytes of the forward pass that a region's backward half reads."""
        operands = dict.fromkeys(self.sides.all_regions[number].operands)
        roots = {_behind(v, self.program, self.producer) for v in operands}
        return sum(
            self.program.bytes[v]
            for v in roots
            if v in self.producer and self.sides.phases[self.producer[v]] == "forward"
        )

    def again_by(self, number: int) -> float:
        return float(
            sum(
                op.flops
                for op, phase, n in zip(
                    self.program.ops, self.sides.phases, self.sides.regions
                )
                if n == number and phase == "recompute"
            )
        )  # fmt: skip

    # Sums

    def _recompute_flops(self) -> float:
        sides, ops = self.before, self.before.program.ops
        outside = sum(op.flops for op, p in zip(ops, sides.phases) if p == "recompute")
        inside = sum(
            recomputed_inside(eqn) * (op.flops / max(flops_of(eqn), 1))
            for op, p, eqn in zip(ops, sides.phases, sides.eqns)
            if p != "recompute" and jaxprs.has_body(eqn)
        )
        return float(outside + inside)

    def _recompute_share(self) -> Callable[[int], float]:
        eqns = self.sides.eqns

        def share(kernel: int) -> float:
            eqn = eqns[kernel]
            whole = flops_of(eqn) if jaxprs.has_body(eqn) else 0
            return min(1.0, recomputed_inside(eqn) / whole) if whole else 0.0

        return share

    def _residual_bytes(self) -> tuple[int, int]:
        """Return the residuals: values of the forward pass that the backward pass reads, unfused."""
        program, phases = self.before.program, self.before.phases
        producer = {v: i for i, op in enumerate(program.ops) for v in op.results}
        later: tuple[Phase, ...] = ("backward", "recompute")
        read = {v for op, phase in zip(program.ops, phases) if phase in later for v in op.operands}
        roots = {_behind(v, program, producer) for v in read}
        saved = sum(
            program.bytes[v] for v in roots if v in producer and phases[producer[v]] == "forward"
        )
        inputs = set(self.before.inputs)
        return saved, sum(program.bytes[v] for v in roots if v in inputs)


def recomputed_inside(eqn: _jax.JaxprEqn) -> int:
    """Return the FLOPs that one equation recomputes, times its trip counts."""
    if is_region(eqn):
        return _recomputed_in_region(eqn)
    if not jaxprs.has_body(eqn):
        return 0
    bodies = [_jax.open_jaxpr(body) for body in jaxprs.bodies_of(eqn)]
    each = [sum(recomputed_inside(inner) for inner in body.eqns) for body in bodies]
    if eqn.primitive.name == "scan":
        return int(eqn.params["length"]) * sum(each)
    return max(each, default=0) if eqn.primitive.name == "cond" else sum(each)


def _recomputed_in_region(eqn: _jax.JaxprEqn) -> int:
    again, later = parts(eqn, _jax.open_jaxpr(eqn.params["jaxpr"]))
    return sum(map(flops_of, again)) + sum(map(recomputed_inside, later))


def _behind(v: int, program: Program, producer: Mapping[int, int]) -> int:
    """Return the value that another is a view or a copy of."""
    while (i := producer.get(v)) is not None and _passes_on(program.ops[i]):
        v = program.ops[i].operands[0]
    return v


def _passes_on(op: Op) -> bool:
    """Return whether an operation is a view, or rounds to the type its operand has."""
    return is_view(op) or op.name == "reduce_precision"


def label(op: Op) -> str:
    """Return an operation's name on the timeline."""
    path = path_of(op)
    what = op.label or op.name
    return f"{path}: {what}" if path else what


def region_label(path: str, number: int) -> str:
    names = [n for n in path.split("/") if n and n not in ("rematted_computation", "checkpoint")]
    return "/".join(names) or f"region {number}"


def _consumer(op: Op | None) -> str:
    if op is None:
        return ""
    return f"{label(op)} ({source_of(op)})" if op.source else label(op)
