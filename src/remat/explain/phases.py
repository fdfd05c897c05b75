"""The phase of each operation of a step: forward, recomputed, backward or update.

The rule, for each operation:

* Inside a region's backward half (an equation of rematerialization with `differentiated` set): operations
  that depend on the cotangents are *backward*; others are *recomputed*.
* Outside: operations that JAX made by transposition are *backward* (their name stack shows it). Other
  operations that depend on backward ones come after the gradient: *update*. So do those that follow the
  first backward operation and that no backward operation needs. All others are *forward*.

A recomputed operation repeats one of the forward pass if it is the same primitive, at the same source line,
on the same operands (copies and rounded copies of saved values count as the values). `PhasedProgram.same`
maps each recomputed value to the repeated one. It connects the lifetimes of both, and gives the program that
remains if a compiler undoes rematerialization.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from remat import _jax
from remat.explain.unrolled import Unrolled, is_unrolled
from remat.ir import jaxprs
from remat.ir.operations import Fusion, names_where
from remat.program.from_jaxpr import Execution, ProgramWriter
from remat.program.partition import UNKNOWN, Partition
from remat.program.program import Op, Program, without_dead
from remat.report.model import Phase

_REGIONS = ("remat", "remat2", "checkpoint", "remat_linear")
# Scopes around the loops of `remat.scan` and the other loops of this library.
_LOOP_CALLS = ("remat_keep_rules", "remat_linear")
# Primitives whose result has the value of their operand.
_COPIES = names_where("is_copy")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Region:
    """A region's backward half, outside of all loops and other regions.

    Args:
      eqn: the equation that holds it.
      path: its name scope.
      operands: the values that it reads: residuals, inputs and cotangents.
    """

    eqn: _jax.JaxprEqn
    path: str
    operands: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PhasedProgram:
    """A program, and the phase of each of its operations.

    Args:
      program: without dead code.
      phases, regions, eqns, functions: for each operation its phase, the number of its region (-1: none),
        its equation, and the JAX function that it was traced in.
      all_regions: the regions, in the order in which their backward halves run.
      same: for each recomputed value, the value of the forward pass that it repeats.
      inputs: the program's numbers of the jaxpr's inputs.
      host_bytes: of values that are in the host's memory.
      shards: the shard count of each value.
      cotangents: the inputs of a body in the backward pass that depend on cotangents.
      partition: how equations are divided among devices.
    """

    program: Program
    phases: tuple[Phase, ...]
    regions: tuple[int, ...]
    eqns: tuple[_jax.JaxprEqn, ...]
    functions: tuple[str, ...]
    all_regions: tuple[Region, ...]
    same: dict[int, int]
    inputs: tuple[int, ...]
    host_bytes: dict[int, int]
    shards: tuple[int, ...]
    cotangents: frozenset[int] = frozenset()
    partition: Partition = UNKNOWN

    def undone(self) -> Program:
        """Return the program that remains if all recomputation is merged with the forward pass."""
        copies = self.same

        def first(v: int) -> int:
            while v in copies:
                v = copies[v]
            return v

        ops = [
            dataclasses.replace(op, operands=tuple(map(first, op.operands)))
            for op in self.program.ops
            if not op.results or not all(v in copies for v in op.results)
        ]
        outputs = tuple(map(first, self.program.outputs))
        return without_dead(dataclasses.replace(self.program, ops=tuple(ops), outputs=outputs))


def merged(sides: PhasedProgram) -> PhasedProgram:
    """Merge repeated operations outside of regions, as compilers do."""
    program = sides.program
    first: dict[Hashable, tuple[int, ...]] = {}
    of: dict[int, int] = {}
    kept: list[int] = []
    ops: list[Op] = []
    for i, (op, eqn) in enumerate(zip(program.ops, sides.eqns)):
        op = dataclasses.replace(op, operands=tuple(of.get(v, v) for v in op.operands))
        if sides.regions[i] == -1 and not eqn.effects and not any(_jax.jaxprs_of(eqn)):
            literals = tuple(str(v) for v in eqn.invars if not _jax.is_var(v))
            types = tuple(program.types[v] for v in op.results)
            params = str(sorted(eqn.params.items()))
            again = first.setdefault((op.name, op.operands, literals, params, types), op.results)
            if again is not op.results:
                of.update(zip(op.results, again))
                continue
        kept.append(i)
        ops.append(op)
    outputs = tuple(of.get(v, v) for v in program.outputs)
    return dataclasses.replace(
        sides,
        program=dataclasses.replace(program, ops=tuple(ops), outputs=outputs),
        phases=tuple(sides.phases[i] for i in kept),
        regions=tuple(sides.regions[i] for i in kept),
        eqns=tuple(sides.eqns[i] for i in kept),
        functions=tuple(sides.functions[i] for i in kept),
        same={v: of.get(w, w) for v, w in sides.same.items() if v not in of},
    )


def phased_program(
    jaxpr: _jax.Jaxpr,
    shards: Sequence[int],
    *,
    path: str = "",
    within: Phase = "forward",
    cotangents: Sequence[bool] = (),
    partition: Partition = UNKNOWN,
) -> PhasedProgram:
    """Return the program of a step, or of a loop's body in it, and the phases of its operations.

    Args:
      path: of the loop.
      within: the phase of the loop. In the backward pass, operations of its body are recomputed or backward;
        others have the phase of the loop.
      cotangents: for each input of a body in the backward pass, whether it depends on cotangents.
      partition: how equations are divided among devices.
    """
    # Dead code is removed; effects and inputs stay.
    live, used = _jax.dce(jaxpr, [True] * len(jaxpr.outvars))
    reader = _Reader(Execution(partition=partition))
    reader.enter(jaxpr.invars, shards)
    reader.enter(live.constvars, [1] * len(live.constvars))
    inputs = tuple(reader.ids[v] for v in jaxpr.invars)
    kept = [v for v, u in zip(jaxpr.invars, used) if u]
    for v, outer in zip(live.invars, kept):
        reader.ids[v] = reader.ids[outer]
    reader.write(live, path)
    program = without_dead(reader.program(live.outvars))
    notes = _with_repetitions(program, [reader.notes[op.results] for op in program.ops], reader)
    phases = _phases(program, notes)
    if within != "forward":
        phases = tuple(_within(p, n, within) for p, n in zip(phases, notes))
    dependent = {v for v, flag in zip(inputs, cotangents) if flag}
    if within == "backward" and cotangents:
        phases = _with_recomputation(program, phases, dependent)
    return PhasedProgram(
        program,
        phases,
        tuple(note.region for note in notes),
        tuple(note.eqn for note in notes),
        tuple(note.function for note in notes),
        tuple(reader.regions),
        _same(program, notes, reader.literals),
        inputs,
        reader.host_bytes,
        tuple(reader.shards),
        frozenset(dependent),
        partition,
    )


# Share of a body's FLOPs. If operations that do not depend on cotangents take less, they are not called
# recomputation: such as indices, which each backward loop computes.
_RECOMPUTES = 0.01


def _with_recomputation(
    program: Program, phases: tuple[Phase, ...], dependent: set[int]
) -> tuple[Phase, ...]:
    """Return the phases of a backward body, with operations that no cotangent reaches as recomputation.

    JAX computes such values in the forward pass and stacks them. A loop that recomputes them computes them in
    its backward body, from what it keeps.

    Args:
      dependent: the inputs that depend on cotangents.
    """
    reached = set(dependent)
    free = []
    for i, op in enumerate(program.ops):
        if reached.isdisjoint(op.operands):
            free.append(i)
        else:
            reached.update(op.results)
    flops = sum(program.ops[i].flops for i in free)
    if flops < _RECOMPUTES * sum(op.flops for op in program.ops) or not flops:
        return phases
    found = list(phases)
    for i in free:
        found[i] = "recompute"
    return tuple(found)


def _within(phase: Phase, note: _Note, outer: Phase) -> Phase:
    """Return the phase of an operation in a loop's body, from the loop's and the body's own."""
    again = phase == "recompute" or (note.region == -1 and _jax.is_recomputation(note.eqn))
    return "recompute" if again and outer == "backward" else outer


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Note:
    phase: Phase
    region: int
    eqn: _jax.JaxprEqn
    function: str


@dataclasses.dataclass(frozen=True)
class _Where:
    region: int = -1
    transposed: bool = False
    again: bool = False  # in the recomputed part of a region


class _Reader(ProgramWriter):
    """Writes a step as a program, and notes the phase and the region of each operation."""

    def __init__(self, execution: Execution) -> None:
        super().__init__(execution)
        self.notes: dict[tuple[int, ...], _Note] = {}
        self.regions: list[Region] = []
        self.host_bytes: dict[int, int] = {}
        self._where = _Where()
        self._callers: list[_jax.JaxprEqn] = []
        self._derived: set[int] = set()  # values that depend on cotangents
        self.literals: dict[int, str] = {}  # inputs of calls that are literals
        self._literal_of: dict[_jax.Var, str] = {}
        self._cotangents: tuple[_jax.Jaxpr, tuple[bool, ...]] | None = None
        self._elements: dict[int, list[int]] = {}  # of the stacks of unrolled loops

    def new_value(self, v: _jax.Var, shards: int) -> int:
        number = super().new_value(v, shards)
        if v in self._literal_of:
            self.literals[number] = self._literal_of[v]
        if _jax.is_on_host(v.aval):
            size = v.aval.size * _jax.itemsize_bytes(v.aval)
            self.host_bytes[number] = -(-int(size) // shards)
        return number

    def body_of(self, eqn: _jax.JaxprEqn) -> _jax.Jaxpr | None:
        body = super().body_of(eqn)
        if body is None and eqn.primitive.name in _LOOP_CALLS:
            inner = [_jax.open_jaxpr(jaxpr) for jaxpr in _jax.jaxprs_of(eqn)]
            arity = len(eqn.invars), len(eqn.outvars)
            if len(inner) == 1 and (len(inner[0].invars), len(inner[0].outvars)) == arity:
                return inner[0]
        return body

    def write(self, jaxpr: _jax.Jaxpr, path: str) -> None:
        if self._cotangents is not None and self._cotangents[0] is jaxpr:
            flags = self._cotangents[1]
            self._derived.update(self.ids[v] for v, flag in zip(jaxpr.invars, flags) if flag)
            self._cotangents = None
        super().write(jaxpr, path)

    def call(self, eqn: _jax.JaxprEqn, body: _jax.Jaxpr, path: str) -> None:
        outer = self._where
        self._where = self._at(eqn)
        if is_traced_region(eqn) and outer.region == -1:
            operands = tuple(self.ids[v] for v in eqn.invars if _jax.is_var(v))
            self.regions.append(Region(eqn, path, operands))
            transposed = outer.transposed or not _is_fence(eqn)
            self._where = _Where(region=len(self.regions) - 1, transposed=transposed)
            if eqn.params.get("cotangents"):
                self._cotangents = (body, eqn.params["cotangents"])
        given = {v: str(x) for v, x in zip(body.invars, eqn.invars) if not _jax.is_var(x)}
        self._literal_of.update(given)
        self._callers.append(eqn)
        super().call(eqn, body, path)
        self._callers.pop()
        for v in given:
            self._literal_of.pop(v, None)
        self._where = outer

    def _at(self, eqn: _jax.JaxprEqn) -> _Where:
        where = self._where
        return dataclasses.replace(
            where,
            transposed=where.transposed or _jax.is_transposed(eqn),
            again=where.again or (where.region != -1 and _jax.is_recomputation(eqn)),
        )

    def operation(self, eqn: _jax.JaxprEqn, path: str) -> None:
        if is_unrolled(eqn):
            self._unrolled(Unrolled(eqn), path)
        else:
            self._operation(eqn, path)

    def _unrolled(self, loop: Unrolled, path: str) -> None:
        """Write a loop as its body repeated."""
        for at, slices, body in loop.iterations():
            for stack, v in zip(loop.sliced, slices):
                elements = self._elements.get(self.ids[stack]) if _jax.is_var(stack) else None
                if elements is not None:
                    self.ids[v] = elements[at]
                else:
                    self.call(*loop.slice_of(stack, at, v), path)
            self.call(*body, path)
        for number, v in enumerate(loop.stacked):
            self.call(*loop.stack_of(number), path)
            self._elements[self.ids[v]] = [self.ids[x] for x in loop.elements[number]]
        self.call(*loop.final(), path)

    def _operation(self, eqn: _jax.JaxprEqn, path: str) -> None:
        super().operation(eqn, path)
        where, op = self._at(eqn), self.ops[-1]
        names = op.path.split("/")
        if where.region != -1 and names[: len(names) // 2] == names[len(names) // 2 :]:
            # The name stacks of a planned region's operations repeat the scopes around the region.
            op = self.ops[-1] = dataclasses.replace(op, path="/".join(names[len(names) // 2 :]))
        derived = any(v in self._derived for v in op.operands)
        around = self.regions[where.region].eqn if where.region != -1 else None
        phase: Phase
        if where.again:
            phase = "recompute"
        elif around is not None and not _is_fence(around):
            again = not derived if around.params.get("cotangents") else False
            phase = "recompute" if again else "backward"
        elif where.transposed:
            phase = "backward"
        else:
            phase = "update" if derived else "forward"
        if derived or phase == "backward":
            self._derived.update(op.results)
        function = _jax.function_called_at(eqn, self._callers)
        eqn = _jax.with_lines_of(eqn, self._callers)
        self.notes[op.results] = _Note(phase, where.region, eqn, function)


def _with_repetitions(program: Program, notes: Sequence[_Note], reader: _Reader) -> Sequence[_Note]:
    """Return the notes, with the operations that a plan repeats in the backward pass marked as recomputed."""
    first: set[tuple[str, str, tuple[str, ...]]] = set()
    fences = {i for i, region in enumerate(reader.regions) if _is_fence(region.eqn)}
    found = list(notes)
    is_backward = False
    for i, (op, note) in enumerate(zip(program.ops, notes)):
        is_backward |= note.phase == "backward"
        if note.phase == "forward":
            key = (op.name, op.source, tuple(program.types[v] for v in op.results))
            if is_backward and note.region in fences and key in first:
                found[i] = dataclasses.replace(note, phase="recompute")
            first.add(key)
    return found


def _phases(program: Program, notes: Sequence[_Note]) -> tuple[Phase, ...]:
    """Return the phases, with operations that only the update needs taken from the forward pass.

    A loop over microbatches with both passes in its body keeps its phase.
    """
    phases: list[Phase] = [note.phase for note in notes]
    gradients = [
        phase in ("backward", "recompute") or any(map(holds_gradient, _bodies(note.eqn)))
        for phase, note in zip(phases, notes)
    ]
    serves: set[int] = set()  # values that the gradient needs
    for i in reversed(range(len(phases))):
        op = program.ops[i]
        if gradients[i] or any(v in serves for v in op.results):
            serves.update(op.operands)
    began = gradients.index(True) if True in gradients else len(phases)
    for i in range(began, len(phases)):
        needed = gradients[i] or any(v in serves for v in program.ops[i].results)
        if phases[i] == "forward" and not needed:
            phases[i] = "update"
    return tuple(phases)


def _bodies(eqn: _jax.JaxprEqn) -> list[_jax.Jaxpr]:
    return [_jax.open_jaxpr(body) for body in jaxprs.run_by(eqn)]


def holds_gradient(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether a jaxpr holds a derivative: a transposed equation, or half of a cut region."""
    return any(
        _jax.is_transposed(eqn) or eqn.params.get("differentiated")
        for eqn in jaxprs.equations(jaxpr, jaxprs.run_by)
    )


def is_traced_region(eqn: _jax.JaxprEqn) -> bool:
    """Return whether an equation is the backward half of a rematerialized region."""
    return eqn.primitive.name in _REGIONS and bool(eqn.params.get("differentiated"))


def _is_fence(eqn: _jax.JaxprEqn) -> bool:
    """Return whether an equation only keeps a compiler from mixing its body with the code around it.

    Plans make such equations, of the forward pass, too. Unlike these, a backward half has cotangents.
    """
    flags = eqn.params.get("cotangents")
    return is_traced_region(eqn) and flags is not None and not any(flags)


def parts(eqn: _jax.JaxprEqn, body: _jax.Jaxpr) -> tuple[list[_jax.JaxprEqn], list[_jax.JaxprEqn]]:
    """Return the equations of a region's body: those that recompute, and those on cotangents."""
    if _is_fence(eqn):
        return [], list(body.eqns)
    flags = eqn.params.get("cotangents")
    derived = {v for v, flag in zip(body.invars, flags or ()) if flag}
    again: list[_jax.JaxprEqn] = []
    later: list[_jax.JaxprEqn] = []
    for inner in body.eqns:
        if flags:
            depends = any(_jax.is_var(v) and v in derived for v in inner.invars)
        else:
            depends = not _jax.is_recomputation(inner)
        if depends:
            derived.update(inner.outvars)
        (later if depends else again).append(inner)
    return again, later


def _same(program: Program, notes: Sequence[_Note], literals_of: dict[int, str]) -> dict[int, int]:
    copy_of: dict[int, int] = {}
    first: dict[Hashable, Op] = {}
    same: dict[int, int] = {}
    for op, note in zip(program.ops, notes):
        operands = tuple(copy_of.get(v, v) for v in op.operands)
        alike = tuple(literals_of.get(v, v) for v in operands)
        if op.name in _COPIES and len(operands) == len(op.results):
            copy_of.update(zip(op.results, operands))
            if note.phase == "recompute":
                same.update((r, v) for r, v in zip(op.results, operands))
            continue
        written = tuple(str(v) for v in note.eqn.invars if not _jax.is_var(v))
        types = tuple(program.types[v] for v in op.results)
        # Parameters distinguish operations of one name; calls and loops are distinguished by source line.
        params = "" if any(_jax.jaxprs_of(note.eqn)) else str(sorted(note.eqn.params.items()))
        key = (op.name, op.source, alike, written, types, params)
        if note.phase == "forward":
            # A value that the forward pass computes twice (a mask in each layer) is one value too.
            copy_of.update(zip(op.results, first.setdefault(key, op).results))
        elif note.phase == "recompute" and key in first:
            again = first[key].results
            same.update(zip(op.results, again))
            copy_of.update(zip(op.results, again))
    return same


def is_view(op: Op) -> bool:
    """Return whether an operation's result is a view of its operand."""
    return op.fusion is Fusion.VIEW and len(op.operands) == 1
