"""The values that a step writes to memory, with their lifetimes and kinds.

The values are those that remain after fusion: intermediate values inside a kernel occupy no memory. A step
of the timeline is one kernel. A value lives from the kernel that writes it to the last that reads it;
arguments live throughout, and so do results on CPU and GPU, whose compilers allocate them at the start.
Loops and branches are replaced on the timeline by the operations that they run (`explain.loops`). The kind
of a value follows from where it is written and read:

    saved        written in the forward pass, read in the backward pass
    recomputed   written in a region's backward half from saved values; its lifetime in the forward pass, too
    offloaded    kept in the host's memory between the two
    gradient     written in the backward pass
    temporary    all others, also the workspace of loops and branches
    reserved     memory of a loop's stack before its slice is written or after its last use
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from remat import _jax
from remat.explain.labels import label, path_of
from remat.explain.lifetimes import Lifetimes
from remat.explain.loops import (
    MOST_EQUATIONS,
    DrawnBody,
    Origin,
    Read,
    Stack,
    iteration_blocks,
    laid_out,
)
from remat.explain.origins import Origins
from remat.explain.phases import PhasedProgram, merged
from remat.explain.recomputation import (
    recompute_flops,
    recompute_share,
    residual_bytes,
    value_behind,
)
from remat.explain.roles import gradients_of, results_called
from remat.explain.runs import Run, operands_of, program_of, run_of
from remat.explain.segments import RecomputedSegments
from remat.explain.sources import user_source_of
from remat.ir import jaxprs
from remat.ir.operations import written_rows
from remat.program.fusion import Fused, Price, fuse
from remat.program.program import Program
from remat.report.model import Kind, Segment, Step, Value
from remat.solvers.simulate import no_remat


@dataclasses.dataclass(frozen=True, repr=False)
class Account:
    """The values, timeline and segments of a step, and their sums.

    Args:
      opaque_values, opaque_steps: the same with each loop as one step and its workspace as one value.
      alias_bytes: of results that reuse a donated argument's buffer.
      saved_bytes, saved_argument_bytes: the bytes that the backward pass reads of values of the forward
        pass, and of the arguments, without fusion.
      undone_bytes: temporaries of the program in which nothing is recomputed.
      sides: the program of the kernels, with each operation once.
      producers: for each value the number of the operation of `sides` that computes it; -1 for arguments and
        values inside of loops.
    """

    values: tuple[Value, ...]
    steps: tuple[Step, ...]
    segments: tuple[Segment, ...]
    opaque_values: tuple[Value, ...]
    opaque_steps: tuple[Step, ...]
    alias_bytes: int
    flops: float
    recompute_flops: float
    time_s: float
    recompute_time_s: float
    saved_bytes: int
    saved_argument_bytes: int
    undone_bytes: int
    sides: PhasedProgram
    producers: tuple[int, ...]


def account_of(
    sides: PhasedProgram,
    names: tuple[str, ...],
    donated: tuple[bool, ...],
    price: Price,
    *,
    results: Sequence[str] = (),
    results_from_start: bool,
    duplicates: bool,
) -> Account:
    """Return a step's values, timeline and sums.

    Args:
      results: the names of the results that are known; "" for others.
      results_from_start: whether the memory of results is allocated at the start.
      duplicates: whether each kernel computes shared cheap values itself, as in `fusion.fuse`.
    """
    made = _Accounting(merged(sides), price, duplicates, MOST_EQUATIONS, before=sides)
    return made.account(names, donated, results, results_from_start)


def temporaries_bytes(program: Program, *, duplicates: bool) -> int:
    """Return the largest number of live bytes, arguments and results left out."""
    fused = fuse(program, lambda *_: 0.0, duplicates=duplicates)
    return no_remat(fused.graph).peak_bytes


class _Accounting:
    def __init__(
        self,
        sides: PhasedProgram,
        price: Price,
        duplicates: bool,
        most_equations: int,
        *,
        before: PhasedProgram | None = None,
        run: Run | None = None,
    ) -> None:
        self.before = before or sides  # as it was written, with repeated operations
        self.sides = sides
        self.price = price
        self.program = sides.program
        self.duplicates = duplicates
        self.fused: Fused = fuse(
            self.program,
            price,
            duplicates=duplicates,
            alone=lambda i: jaxprs.has_body(sides.eqns[i]),
        )
        self.lives = Lifetimes(self.program, self.fused)
        self.producer, self.kernels = self.lives.producer, self.lives.kernels
        self.step_of, self.roots, self.uses = (
            self.lives.step_of,
            self.lives.roots,
            self.lives.uses,
        )
        carried: Sequence[int] = ()
        stacked: frozenset[int] = frozenset()
        if run is not None:  # this is the step of a loop, or a branch
            carried = sides.inputs[run.first_carry : run.first_carry + run.n_carry]
            stacked = frozenset(v for v in self.roots[run.n_carry :] if v is not None)
        self.in_carry = self.lives.in_carry(carried)
        self.segments = RecomputedSegments(sides, self.fused, self.lives)
        self.bodies = self._bodies(most_equations)
        self.origins = Origins(sides, self.fused, self.lives, self.bodies, stacked)
        self._gradients: dict[int, str] = {}  # value → the argument of which it is the gradient
        self._places: dict[int, int] = {}  # value → its place in the result of `_written`

    def account(
        self,
        names: tuple[str, ...],
        donated: tuple[bool, ...],
        results: Sequence[str],
        results_from_start: bool,
    ) -> Account:
        self._gradients = {
            value_behind(v, self.program, self.producer): f"gradient of {name}"
            for v, name in gradients_of(self.sides, names).items()
        }
        steps = self._steps()
        last = len(steps) - 1
        values = self._arguments(names, last)
        result_names = results_called(self.sides, names, results)
        outputs, alias_bytes = self._outputs(result_names, donated, last, results_from_start)
        values += outputs
        first = len(values)
        # Donated memory belongs to an argument until a result is written into it.
        is_reserved = results_from_start and not any(donated)
        in_results = self.lives.in_results() if is_reserved else set()
        if results_from_start:
            in_results |= self.lives.in_buffers(outputs, in_results, self.sides.host_bytes)
        values += self._written(in_results)
        stacks = self._stacks(first)
        opaque = _numbered([*values, *self._workspaces(opaque=True)])
        values += self._workspaces()
        segments = self.segments.all()
        drawn, values_, segments_ = laid_out(
            steps, values, self._bodies_by_step(), stacks, segments
        )
        saved, of_arguments = residual_bytes(self.before)
        return Account(
            values=_numbered(values_),
            steps=drawn,
            segments=segments_,
            opaque_values=opaque,
            opaque_steps=tuple(steps),
            alias_bytes=alias_bytes,
            flops=self.before.program.flops,
            recompute_flops=max(recompute_flops(self.before), self._recomputed_in_bodies()),
            time_s=sum(step.time_s for step in steps),
            recompute_time_s=sum(step.time_s * step.recompute_share for step in drawn),
            saved_bytes=saved,
            saved_argument_bytes=of_arguments,
            undone_bytes=self._undone_bytes(),
            sides=self.sides,
            producers=tuple(value.id for value in values_),
        )

    def _recomputed_in_bodies(self) -> float:
        """Return the FLOPs that are recomputed, those inside of loops and branches by their operations."""
        inside = {
            kernel: body.length * body.recompute_flops for kernel, body in self.bodies.items()
        }
        return sum(
            op.flops if phase == "recompute" else inside.get(i, 0.0)
            for i, (op, phase) in enumerate(zip(self.program.ops, self.sides.phases))
        )

    def _undone_bytes(self) -> int:
        if not self.sides.same:
            return 0
        return temporaries_bytes(self.sides.undone(), duplicates=self.duplicates)

    # The timeline

    def _steps(self) -> list[Step]:
        numbers = self.segments.of_kernels()
        made = [self._step(kernel, numbers.get(kernel, -1)) for kernel in self.kernels]
        return [*made, Step("results", "update")]

    def _step(self, kernel: int, segment: int = -1) -> Step:
        return Step(
            self._label(kernel),
            self.sides.phases[kernel],
            self.fused.seconds[kernel],
            user_source_of(self.sides.eqns[kernel]),
            segment,
            recompute_share=1.0
            if self.sides.phases[kernel] == "recompute"
            else recompute_share(self.sides.eqns[kernel]),
        )

    def _label(self, i: int) -> str:
        """Return an operation's name on the timeline."""
        source = user_source_of(self.sides.eqns[i])
        return label(self.program.ops[i], source, self.sides.functions[i])

    def _arguments(self, names: tuple[str, ...], last: int) -> list[Value]:
        read = {v for op in self.program.ops for v in op.operands} | set(self.program.outputs)
        readers: dict[int, int] = {}
        for i, op in enumerate(self.program.ops):
            for v in op.operands:
                readers.setdefault(v, i)
        found = []
        for v, name in zip(self.sides.inputs, names):
            if v in read:
                found.append(
                    self._value(
                        v,
                        "argument",
                        ((0, last),),
                        path=name,
                        consumer=self._reader(v, readers.get(v)),
                    )
                )
        return found

    def _outputs(
        self,
        names: Sequence[str],
        donated: tuple[bool, ...],
        last: int,
        results_from_start: bool,
    ) -> tuple[list[Value], int]:
        given = [self.program.types[v] for v, d in zip(self.sides.inputs, donated) if d]
        found: list[Value] = []
        alias_bytes = 0
        for v, root, name in zip(self.program.outputs, self.roots, names):
            born = 0 if results_from_start or root is None else self.uses_of(root)
            lifetimes: tuple[tuple[int, int], ...] = ((born, last),)
            consumer, held_in = "the caller", ""
            if self.program.types[v] in given and self.program.bytes[v]:
                given.remove(self.program.types[v])
                alias_bytes += self.program.bytes[v]
                lifetimes, held_in = (), "in the memory of a donated argument"
            made = self._value(root if root is not None else v, "output", lifetimes, path=name)
            found.append(dataclasses.replace(
                made, aval=self.origins.type_of(v), n_bytes=self.program.bytes[v], consumer=consumer,
                count=1, held_in=held_in,
            ))  # fmt: skip
        return found, alias_bytes

    def uses_of(self, v: int) -> int:
        """Return the timeline's step at which a value is written."""
        return self.uses[v].born if v in self.uses else 0

    def _written(self, in_results: Collection[int] = ()) -> list[Value]:
        """Return the values that kernels write, results left out.

        Args:
          in_results: values that are in the memory of results, which is counted there.
        """
        outputs = {v for v in self.roots if v is not None}
        in_loops = self.lives.in_loop_results()
        moved = self._moved()
        # From values of the forward pass to their places in the list of values.
        first_life: dict[int, int] = {}
        found: list[Value] = []
        for v, use in self.uses.items():
            if v in outputs or v in self.in_carry or v in moved.values():
                continue
            kind = self.origins.kind(v)
            lives: tuple[tuple[int, int], ...] = ((use.born, use.dies),)
            held_in = ""
            if v in in_loops:
                lives, held_in = (), "in the memory of a loop's result"
            elif kind == "offloaded" or v in in_results:
                lives = ()
                held_in = (
                    "in the host's memory" if kind == "offloaded" else "in the memory of a result"
                )
            elif v in moved:
                kind = "offloaded"
                back = self.uses.get(moved[v])
                if back is not None and back.born > use.dies:
                    lives = (*lives, (back.born, back.dies))
            elif kind == "recomputed":
                at = first_life.get(self.sides.same.get(v, -1))
                if at is not None and found[at].lifetimes[-1][1] < use.born:
                    lives = (*found[at].lifetimes, *lives)
                    found[at] = dataclasses.replace(
                        found[at],
                        kind="recomputed",
                        lifetimes=lives,
                        first_kind="temporary",
                    )
                    continue
            if kind == "temporary" and lives:
                first_life[v] = len(found)
            self._places[v] = len(found)
            reader = next(
                (r for r in use.readers if self.sides.phases[r] != "forward"),
                use.readers[0] if use.readers else None,
            )
            consumer = self._reader(v, reader)
            made = self._value(v, kind, lives, consumer=consumer)
            found.append(dataclasses.replace(made, held_in=held_in))
        return found

    def _moved(self) -> dict[int, int]:
        """Return the offloaded values: a mapping from each value to the copy that is fetched back."""
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

    def _workspaces(self, *, opaque: bool = False) -> list[Value]:
        """Return the workspace of loops and branches: of all if `opaque`, else of those not laid out."""
        found = []
        for kernel in self.kernels:
            op = self.program.ops[kernel]
            if op.workspace_bytes and (opaque or kernel not in self.bodies):
                at = self.step_of[kernel]
                found.append(Value(
                    -1, "temporary", "workspace", op.workspace_bytes, ((at, at),), op.name,
                    user_source_of(self.sides.eqns[kernel]), op.label, path_of(op),
                    f"the body of {op.name}",
                ))  # fmt: skip
        return found

    def _value(
        self, v: int, kind: Kind, lives: tuple[tuple[int, int], ...], *, path: str = "",
        consumer: str = "",
    ) -> Value:  # fmt: skip
        i = self.producer.get(v)
        n_bytes = self.sides.host_bytes.get(v, self.program.bytes[v])
        if i is None:
            return Value(
                -1, kind, self.origins.type_of(v), n_bytes, lives, path=path, consumer=consumer
            )
        origin = self.origins.origin(v)
        # Until all values are numbered, the id is the number of the operation.
        return Value(
            i,
            kind,
            origin.aval if origin.count > 1 else self.origins.type_of(v),
            n_bytes,
            lives,
            primitive=origin.primitive,
            source=origin.source,
            name=origin.name,
            path=path or self._gradients.get(v, "") or origin.path,
            consumer=consumer,
            flops=origin.flops,
            time_s=origin.time_s,
            count=origin.count,
            function=origin.function,
        )

    def _reader(self, v: int, i: int | None) -> str:
        """Return the name of the operation that reads a value, inside a loop if that reads slices."""
        if i is None:
            return ""
        body = self.bodies.get(i)
        if body is not None:
            operands = self.program.ops[i].operands
            read = next((r for at, r in body.reads.items() if operands[at] == v), None)
            if read is not None:
                return read.consumer
        source = user_source_of(self.sides.eqns[i])
        return f"{self._label(i)}, {source}" if source else self._label(i)

    # Loops and branches

    def _bodies(self, most_equations: int) -> dict[int, DrawnBody]:
        """Return the programs that loops and branches run, by kernel."""
        ops, eqns = self.program.ops, self.sides.eqns
        of_kernels = {kernel: run_of(ops[kernel], eqns[kernel]) for kernel in self.kernels}
        runs = {kernel: run for kernel, run in of_kernels.items() if run is not None}
        n_equations = sum(sum(1 for _ in jaxprs.equations(run.jaxpr)) for run in runs.values())
        most_blocks = max(1, most_equations // max(1, n_equations))
        found = {}
        for kernel, run in runs.items():
            blocks = iteration_blocks(run.length, most_blocks)
            body = self._body(kernel, run, blocks, most_equations // len(blocks))
            if body.steps:
                found[kernel] = body
        return found

    def _body(
        self, kernel: int, run: Run, blocks: tuple[int, ...], most_equations: int
    ) -> DrawnBody:
        eqn = self.sides.eqns[kernel]
        at_operand = operands_of(run, eqn)
        sides = program_of(run, self.sides, kernel)
        inner = _Accounting(sides, self.price, True, most_equations, run=run)
        results, born = inner.results(run) if run.returns else ((), ())
        row_bytes = inner.row_bytes(run) if run.name == "iteration" else {}
        reads = {
            at_operand[at]: read
            for at, v in enumerate(sides.inputs)
            if at >= run.first_slice and at in at_operand
            for read in [inner.last_read(v)]
            if read is not None
        }
        steps = [inner._step(k) for k in inner.kernels]
        values = inner._written()
        stacks = inner._stacks(0)
        values += inner._workspaces()
        drawn, laid, _ = laid_out(steps, values, inner._bodies_by_step(), stacks)
        if inner.bodies:
            first = inner._first_steps()
            born = tuple(first[n] if n >= 0 else n for n in born)
            last = [n - 1 for n in [*first[1:], len(drawn)]]
            reads = {at: dataclasses.replace(r, step=last[r.step]) for at, r in reads.items()}
        return DrawnBody(
            run.name, run.length, blocks, run.reverse, drawn, laid, results, born,
            run.n_carry if run.name == "iteration" else len(results), reads, row_bytes,
            inner._recomputed_in_bodies(),
        )  # fmt: skip

    def results(self, run: Run) -> tuple[tuple[Origin | None, ...], tuple[int, ...]]:
        """Return for each result of a body where it comes from, and the step that computes it."""
        outputs = iter(zip(self.program.outputs, self.roots))
        ids = [next(outputs) if _jax.is_var(v) else (-1, None) for v in run.jaxpr.outvars]
        carried = {v: at - run.first_carry for at, v in enumerate(self.sides.inputs)}

        def computed(v: int) -> int | None:
            """Return the value that a kernel writes, of a carry that of the previous iteration."""
            if v in self.producer:
                return v
            at = carried.get(v, -1)
            return ids[at][1] if 0 <= at < run.n_carry else None

        origins: list[Origin | None] = []
        for v, root in ids:
            row = self._row_written(root)
            shown = row if row is not None else value_behind(v, self.program, self.producer)
            made = computed(shown) if root is None or row is not None else root
            inside = root is not None and root in self.in_carry
            origin = self.origins.rows_inside(root) if inside and root is not None else None
            if origin is None and made is not None:
                origin = self.origins.origin(made)
            if origin is not None and origin.count == 1:
                origin = dataclasses.replace(origin, aval=self.origins.type_of(shown))
            origins.append(origin)
        return tuple(origins), tuple(self.uses_of(r) if r is not None else 0 for _, r in ids)

    def _row_written(self, root: int | None) -> int | None:
        """Return the value that an operation writes into a carry; None if it writes no carry in place."""
        if root is None or root not in self.in_carry:
            return None
        op = self.program.ops[self.producer[root]]
        at = written_rows(op.name)
        return None if at is None else self.origins.before_reshape(op.operands[at])

    def row_bytes(self, run: Run) -> dict[int, int]:
        """Return for each carry into which an iteration writes rows, with loops inside, their bytes."""
        found = {}
        for at, root in enumerate(self._carry_roots(run)):
            row = self._row_written(root)
            if row is not None:
                found[at] = self.program.bytes[row]
            elif root is not None and root in self.in_carry:
                kernel = self.producer[root]
                body = self.bodies.get(kernel)
                inside = body.row_bytes if body is not None else {}
                n_bytes = inside.get(self.program.ops[kernel].results.index(root), 0)
                if body is not None and n_bytes:
                    found[at] = body.length * n_bytes
        return found

    def _carry_roots(self, run: Run) -> list[int | None]:
        """Return for each carry the value that a kernel of an iteration writes for it."""
        roots = iter(self.roots)
        found = [next(roots) if _jax.is_var(v) else None for v in run.jaxpr.outvars]
        return found[: run.n_carry]

    def last_read(self, v: int) -> Read | None:
        """Return the last read of an input; None if nothing reads it."""
        found = None
        for kernel in self.kernels:
            if any(v in self.program.ops[i].operands for i in self.fused.ops[kernel]):
                found = kernel
        return None if found is None else Read(self.step_of[found], self._reader(v, found))

    def _bodies_by_step(self) -> dict[int, DrawnBody]:
        return {self.step_of[kernel]: body for kernel, body in self.bodies.items()}

    def _first_steps(self) -> list[int]:
        """Return for each kernel its first step on the timeline with loops laid out."""
        found, n = [], 0
        for kernel in self.kernels:
            found.append(n)
            body = self.bodies.get(kernel)
            n += len(body.steps) * len(body.blocks) if body is not None else 1
        return found

    def _stacks(self, first: int) -> dict[int, Stack]:
        """Return the values of `_written` that loops stack, by their place after the first `first`."""
        found = {}
        for v, place in self._places.items():
            kernel = self.producer[v]
            body = self.bodies.get(kernel)
            if body is None:
                continue
            at = self.program.ops[kernel].results.index(v)
            if at >= len(body.results) or not body.stacks(at, self.program.bytes[v]):
                continue
            origin = body.results[at]
            if origin is None:
                op = self.program.ops[kernel]
                source = user_source_of(self.sides.eqns[kernel])
                origin = Origin("slice", source, "", path_of(op), self.origins.type_of(v))
            origin = dataclasses.replace(origin, path=self._gradients.get(v, "") or origin.path)
            stack = Stack(self.step_of[kernel], body.born[at], origin)
            found[first + place] = self._read_by_slices(v, body, stack)
        return found

    def _read_by_slices(self, v: int, writer: DrawnBody, stack: Stack) -> Stack:
        """Return a stack with the loop that reads it last, if that reads it slice by slice."""
        use = self.uses[v]
        kernel = self.kernels[use.dies]
        body = self.bodies.get(kernel)
        if body is None or body.blocks != writer.blocks or use.dies == use.born:
            return stack
        operands = self.program.ops[kernel].operands
        mine = [
            at for at, x in enumerate(operands) if value_behind(x, self.program, self.producer) == v
        ]
        reads = [body.reads[at] for at in mine if at in body.reads]
        if not mine or len(reads) < len(mine):
            return stack
        return dataclasses.replace(stack, read=use.dies, last=max(reads, key=lambda r: r.step))


def _numbered(values: Sequence[Value]) -> tuple[Value, ...]:
    return tuple(dataclasses.replace(value, id=i) for i, value in enumerate(values))
