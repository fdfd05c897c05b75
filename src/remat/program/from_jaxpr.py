"""From a jaxpr to a `Program`: the operations of a step, on numbered values, with their bytes.

Calls and the bodies of `shard_map` are inlined. Loops and branches stay operations of their own, with
the memory that their bodies need as workspace.

Bytes are per device. Inside `shard_map` types are local already; elsewhere a value's bytes are
divided by its shard count, which the partitioner says (`program.partition`). Where it does not, the count is
propagated from the arguments: a result is sharded as the operand with the most shards is, unless a sharding
constraint says otherwise. The results of loops that plans make are sharded as those of their bodies.

`ProgramWriter` is the one reader of jaxprs. A subclass extends its methods to learn more about operations
than `Op` holds, such as their pass or region.

Known limits: layouts and padding are not modelled; what XLA for CPU writes to memory, as `concatenate`,
counts as written on a GPU as well.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from remat import _jax
from remat.aliases import Aval
from remat.ir import jaxprs
from remat.ir.equations import (
    fusion_of,
    inline_body,
    is_fusible,
    is_repeatable,
    programs_of,
    solve_operands,
)
from remat.ir.flops import WHILE_TRIPS, flops_of
from remat.ir.operations import FUSIBLE, Fusion, operation, writes_into_operand
from remat.program.expansion import expanded_bytes
from remat.program.fusion import fuse
from remat.program.partition import UNKNOWN, Partition
from remat.program.products import transposed_operands
from remat.program.program import Op, Program, without_dead
from remat.program.targets import n_shards
from remat.solvers.simulate import no_remat

# Bytes up to which a value counts as a number rather than an array: numbers are not sharded, and arrays
# computed from numbers alone are sharded like the arrays around them.
_MOST_BYTES_OF_A_NUMBER = 16

# The name of operations that copy a new carry into the memory of the previous one.
_COPY_OF_CARRY = "copy of a carry"


def _no_slowdown(_: _jax.JaxprEqn) -> float:
    return 1.0


@dataclasses.dataclass(frozen=True)
class Execution:
    """How equations run on a device, beyond what their types say.

    Args:
      slowdown: the ratio of an equation's time to the price of its FLOPs and bytes.
      partition: how equations are divided among devices.
      computing: the slowdown without the communication that the partition adds; the same if None.
    """

    slowdown: Callable[[_jax.JaxprEqn], float] = _no_slowdown
    partition: Partition = UNKNOWN
    computing: Callable[[_jax.JaxprEqn], float] | None = None


#: Equations take exactly the price of their FLOPs and bytes.
PLAIN = Execution()


def program_of_jaxpr(
    jaxpr: _jax.Jaxpr, shards: Sequence[int] | None = None, execution: Execution = PLAIN
) -> Program:
    """Return a jaxpr as a program.

    >>> import jax, jax.numpy as jnp
    >>> jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x) @ x)(jnp.ones((4, 4))).jaxpr
    >>> [(op.name, op.operands, op.results) for op in program_of_jaxpr(jaxpr).ops]
    [('sin', (0,), (1,)), ('dot_general', (1, 0), (2,))]

    Args:
      jaxpr: the step; its constants are inputs, like its arguments.
      shards: the shard count of each argument; 1 if not given.
      execution: how equations run.
    """
    writer = ProgramWriter(execution)
    writer.enter(jaxpr.invars, shards)
    writer.enter(jaxpr.constvars, None)
    writer.write(jaxpr, "")
    return writer.program(jaxpr.outvars)


class ProgramWriter:
    """Writes jaxprs as operations on numbered values.

    `enter` the inputs, `write` one jaxpr or several, then take the `program`. Subclasses extend
    `new_value`, `body_of`, `work_of_bodies`, `fusion_of`, `call` and `operation`.
    """

    #: Whether operations have source lines, which only explanations show.
    has_sources = True

    def __init__(self, execution: Execution = PLAIN, *, into_products: bool = False) -> None:
        self.execution = execution
        self.into_products = into_products
        self.ops: list[Op] = []
        self.bytes: list[int] = []
        self.types: list[str] = []
        self.shards: list[int] = []
        self.inputs: set[int] = set()
        self.ids: dict[_jax.Var, int] = {}
        self.most_shards = 1

    def enter(self, variables: Sequence[_jax.Var], shards: Sequence[int] | None) -> None:
        """Make variables inputs of the program, with these shard counts."""
        self.most_shards = max([self.most_shards, *(shards or ())])
        for v, n in zip(variables, shards or [1] * len(variables)):
            if v not in self.ids:
                self.inputs.add(self.new_value(v, n))

    def program(self, outvars: Sequence[_jax.Var | _jax.Literal]) -> Program:
        """Return the program that computes these variables."""
        outs = tuple(self.ids[v] for v in outvars if _jax.is_var(v))
        inputs = frozenset(self.inputs)
        return Program(tuple(self.ops), tuple(self.bytes), tuple(self.types), inputs, outs)

    def new_value(self, v: _jax.Var, shards: int) -> int:
        """Number a variable."""
        number = len(self.bytes)
        self.ids[v] = number
        self.bytes.append(-(-n_bytes(v.aval) // shards))
        self.types.append(type_text(v.aval))
        self.shards.append(shards)
        return number

    def body_of(self, eqn: _jax.JaxprEqn) -> _jax.Jaxpr | None:
        """Return the jaxpr to write in place of an equation, or None if it is an operation."""
        return inline_body(eqn)

    def write(self, jaxpr: _jax.Jaxpr, path: str) -> None:
        """Write the equations of a jaxpr, which stands in the name scope `path`."""
        for eqn in jaxpr.eqns:
            here = joined(path, _jax.name_stack_of(eqn))
            body = self.body_of(eqn)
            if body is None:
                self.operation(eqn, here)
            else:
                self.call(eqn, body, here)

    def work_of_bodies(self, eqn: _jax.JaxprEqn) -> Work:
        """Return what an equation's bodies take on one device."""
        return work_of_bodies(
            eqn,
            self._operand_shards(eqn),
            into_products=self.into_products,
            partition=self.execution.partition,
        )

    def _operand_shards(self, eqn: _jax.JaxprEqn) -> list[int]:
        return [self.shards[self.ids[v]] if _jax.is_var(v) else 1 for v in eqn.invars]

    def fusion_of(self, eqn: _jax.JaxprEqn) -> Fusion:
        is_written = _is_written_on_cpu(eqn.primitive.name) and not self.into_products
        return Fusion.KERNEL if is_written else fusion_of(eqn)

    def _own_workspace_bytes(self, eqn: _jax.JaxprEqn) -> int:
        # Compilers for TPUs have instructions for what others expand.
        return 0 if self.into_products else expanded_bytes(eqn)

    def call(self, eqn: _jax.JaxprEqn, body: _jax.Jaxpr, path: str) -> None:
        """Write an equation's body in its place."""
        # A body can be written several times (JAX shares jaxprs between calls), so the previous values
        # of its variables are restored.
        before = {v: self.ids.get(v) for v in body.invars}
        operands = [self.ids.get(v) if _jax.is_var(v) else None for v in eqn.invars]
        is_local = eqn.primitive.name == "shard_map"
        around = self.most_shards
        if is_local:
            self.most_shards = automatic_shards(eqn, around)
        for v, operand in zip(body.invars, operands):
            if operand is None:
                self.inputs.add(self.new_value(v, 1))
            elif is_local:
                # Types in a shard_map are already those of one shard along the manual axes.
                shards = automatic_shards(eqn, self.shards[operand])
                self.ids[v] = operand
                self.bytes[operand] = -(-n_bytes(v.aval) // shards)
                self.shards[operand] = shards
            else:
                self.ids[v] = operand
        for v in body.constvars:
            self.inputs.add(self.new_value(v, 1))
        self.write(body, path)
        self.most_shards = around
        for outer, v in zip(eqn.outvars, body.outvars):
            if _jax.is_var(v):
                self.ids[outer] = self.ids[v]
            else:
                self.inputs.add(self.new_value(outer, 1))
        for v, number in before.items():
            if number is not None:
                self.ids[v] = number

    def operation(self, eqn: _jax.JaxprEqn, path: str) -> None:
        """Write an equation as one operation."""
        operands = tuple(self.ids[v] for v in eqn.invars if _jax.is_var(v))
        arrays = [v for v in operands if self.bytes[v] > _MOST_BYTES_OF_A_NUMBER]
        shards = max((self.shards[v] for v in arrays), default=self.most_shards)
        shards = _constrained_shards(eqn) or shards
        known = self._known_shards(eqn)
        if known is not None:
            sent = self.execution.partition.sent(eqn)
            shards = max(known, default=1) if sent is None else sent.n_devices
            of_results = list(known)
        elif eqn.primitive.name == "shard_map":
            shards = automatic_shards(eqn, shards)
            of_results = [shards * n for n in _manual_shards_of_results(eqn)]
        else:
            of_results = [result_shards(v, shards) for v in eqn.outvars]
        results = tuple(map(self.new_value, eqn.outvars, of_results))
        fusion = self.fusion_of(eqn)
        is_kernel = fusion in (Fusion.KERNEL, Fusion.REDUCE)
        may_be_slow = is_kernel or self.execution.partition.is_known
        slowdown = self.execution.slowdown(eqn) if may_be_slow else 1.0
        if not is_kernel and slowdown > 1:
            fusion = Fusion.KERNEL  # devices communicate for it
        work = self.work_of_bodies(eqn)
        self.ops.append(
            Op(
                name=eqn.primitive.name,
                fusion=fusion,
                operands=operands,
                results=results,
                flops=flops_of(eqn) / shards,
                dtype=_dtype(eqn),
                extra_bytes=_extra_bytes(eqn),
                workspace_bytes=work.peak_bytes + self._own_workspace_bytes(eqn) // shards,
                transposed=tuple(
                    self.ids[v]
                    for v in (eqn.invars[k] for k in transposed_operands(eqn))
                    if _jax.is_var(v)
                ),
                kernels=work.kernels,
                in_place=tuple(
                    (self.ids[v], self.ids[eqn.outvars[k]])
                    for k, v in enumerate(_inits(eqn))
                    if _jax.is_var(v)
                ),
                source=_jax.source_line_of(eqn) if self.has_sources else "",
                path=path,
                label=_jax.checkpoint_name_of(eqn) or "",
                repeatable=is_repeatable(eqn),
                slowdown=slowdown,
            )
        )

    def _known_shards(self, eqn: _jax.JaxprEqn) -> Sequence[int] | None:
        """Return the shard count of each result, if the partitioner says it of the equation or its body."""
        partition = self.execution.partition
        if not partition.is_known:
            return None
        known = partition.parts(eqn)
        if known is not None or eqn.primitive.name == "shard_map" or not jaxprs.has_body(eqn):
            return known
        body = _jax.open_jaxpr(list(jaxprs.bodies_of(eqn))[-1])
        of_inputs = self._operand_shards(eqn)[len(eqn.invars) - len(body.invars) :]
        of_body = _result_shards_of_body(body, tuple(of_inputs), partition)
        return of_body if len(of_body) == len(eqn.outvars) else None

    def take_slices(self, variables: Iterable[_jax.Var]) -> None:
        """Take the values of these inputs from larger arrays, in the kernels that use them if possible."""
        for variable in variables:
            whole = self.ids[variable]
            self.bytes[whole], of_slice = 0, self.bytes[whole]
            part = self.new_value(variable, self.shards[whole])
            self.bytes[part] = of_slice
            self.ops.append(Op("dynamic_slice", Fusion.CHEAP, (whole,), (part,)))

    def copy_products(self, variables: Iterable[_jax.Var | _jax.Literal]) -> None:
        """Copy the values of those of these variables that are elementwise of a kernel's result.

        The memory of a loop's carry holds the previous step's values until this kernel has run, so its result
        takes memory of its own.
        """
        made_by = {v: op for op in self.ops for v in op.results}
        for variable in dict.fromkeys(filter(_jax.is_var, variables)):
            v = self.ids[variable]
            if self._is_of_kernel(v, made_by):
                self._copy(variable, _COPY_OF_CARRY, Fusion.KERNEL)

    def _is_of_kernel(self, value: int, made_by: Mapping[int, Op]) -> bool:
        """Return whether a value is elementwise of a kernel's result of at least half its size."""
        least, stack, seen = self.bytes[value] / 2, [value], set[int]()
        while stack:
            v = stack.pop()
            op = made_by.get(v)
            if op is None or v in seen or self.bytes[v] < least:
                continue
            seen.add(v)
            if writes_into_operand(op.name):  # in place, if that is the carry
                stack.append(op.operands[0])
                continue
            if op.fusion is Fusion.KERNEL and not _is_written_on_cpu(op.name):
                return op.name not in ("scan", "while")  # these update their carries in place
            if op.fusion in FUSIBLE and (op.flops or op.fusion is not Fusion.CHEAP):
                stack += op.operands
        return False

    def copy_stacks(self, variables: Iterable[_jax.Var | _jax.Literal]) -> None:
        """Copy the values of those of these variables that loops made; the variables mean the copies then."""
        made_by_loops = {v for op in self.ops if op.name in ("scan", "while") for v in op.results}
        for variable in filter(_jax.is_var, variables):
            v = self.ids[variable]
            if v in made_by_loops:
                self._copy(variable, "copy", Fusion.CHEAP)

    def _copy(self, variable: _jax.Var, name: str, fusion: Fusion) -> None:
        """Copy a variable's value; the variable means the copy then."""
        v = self.ids[variable]
        copy = self.new_value(variable, self.shards[v])
        self.ops.append(Op(name, fusion, (v,), (copy,)))


class FlatWriter(ProgramWriter):
    """Writes each equation as one operation, calls too."""

    has_sources = False

    def body_of(self, eqn: _jax.JaxprEqn) -> None:
        return None


def _is_written_on_cpu(name: str) -> bool:
    row = operation(name)
    return row is not None and row.is_written_on_cpu


def result_shards(v: _jax.Var, shards: int) -> int:
    """Return the shard count of a result; values of fewer bytes than shards are replicated."""
    return shards if n_bytes(v.aval) >= shards else 1


def automatic_shards(eqn: _jax.JaxprEqn, shards: int) -> int:
    """Return the shard count inside of a `shard_map` over its automatic axes alone.

    Args:
      eqn: the `shard_map`.
      shards: the shard count outside.
    """
    sizes = dict(eqn.params["mesh"].shape)
    manual = math.prod(sizes[axis] for axis in eqn.params["newly_manual_axes"])
    return max(1, shards // manual)


def _manual_shards_of_results(eqn: _jax.JaxprEqn) -> list[int]:
    """Return the shard count of each result of a `shard_map` over its manual axes."""
    sizes = dict(eqn.params["mesh"].shape)
    return [
        math.prod(
            sizes.get(axis, 1)
            for axes in spec
            for axis in (axes if isinstance(axes, tuple) else (axes,))
        )
        for spec in eqn.params["out_specs"]
    ]


def _constrained_shards(eqn: _jax.JaxprEqn) -> int:
    """Return the shard count that a sharding constraint asks for; 0 for other equations."""
    sharding = eqn.params.get("sharding") if eqn.primitive.name == "sharding_constraint" else None
    if sharding is None:
        return 0
    try:
        return n_shards(eqn.outvars[0].aval.shape, sharding)
    except ValueError:  # dimensions that the mesh does not divide, or a mesh of other axes
        return 0


class Work(NamedTuple):
    """What a body takes, or all bodies of an equation.

    Args:
      peak_bytes: the bytes that the largest body occupies while it runs, on one device.
      kernels: how many kernels are launched, by a loop in all its steps; 1 for an equation without bodies.
    """

    peak_bytes: int = 0
    kernels: int = 1


def work_of_bodies(
    eqn: _jax.JaxprEqn,
    shards: Sequence[int] | None = None,
    *,
    into_products: bool = False,
    partition: Partition = UNKNOWN,
) -> Work:
    """Return what the bodies of a loop, of branches or of a call take.

    Args:
      eqn: any equation.
      shards: the shard count of each operand; 1 if not given. The bytes are those of one device.
      into_products: as in `fusion.fuse`.
      partition: how equations are divided among devices.
    """
    body = inline_body(eqn)
    if body is not None and is_fusible(eqn):
        return Work()
    bodies = [body] if body is not None else list(map(_jax.open_jaxpr, programs_of(eqn)))
    if not bodies:
        return Work()
    if shards is not None and jaxprs.is_linear_solve(eqn):
        shards = solve_operands(eqn, shards)
    if shards is not None and eqn.primitive.name == "shard_map":
        shards = [automatic_shards(eqn, n) for n in shards]
    n_carry, n_slices = _carry_and_slices(eqn)
    of_bodies = [
        _body_work(
            b,
            into_products,
            _known(tuple(shards or ())[-len(b.invars) :]),
            n_carry,
            n_slices,
            partition,
        )
        for b in bodies
    ]
    kernels = _kernels(eqn, [work.kernels for work in of_bodies])
    return Work(max(work.peak_bytes for work in of_bodies), kernels)


def _carry_and_slices(eqn: _jax.JaxprEqn) -> tuple[int, int]:
    """Return how many first results of a loop's body are its carry, and how many last inputs are slices."""
    if eqn.primitive.name == "while":
        return len(eqn.outvars), 0
    if eqn.primitive.name != "scan":
        return 0, 0
    n_consts, n_carry = _jax.scan_arity(eqn)
    return n_carry, len(eqn.invars) - n_consts - n_carry


def _kernels(eqn: _jax.JaxprEqn, of_bodies: Sequence[int]) -> int:
    """Return how many kernels an equation launches, from those that each of its bodies launches."""
    name = eqn.primitive.name
    if name == "cond":
        return max(1, *of_bodies)
    if name not in ("scan", "while"):
        return 1
    length = eqn.params["length"] if name == "scan" else WHILE_TRIPS
    return max(1, length * sum(of_bodies)) if isinstance(length, int) else 1


def _inits(eqn: _jax.JaxprEqn) -> Sequence[_jax.Var | _jax.Literal]:
    """Return the operands that are a loop's first carry; its results start with the carry."""
    if eqn.primitive.name == "scan":
        n_consts, n_carry = _jax.scan_arity(eqn)
        return eqn.invars[n_consts : n_consts + n_carry]
    if eqn.primitive.name == "while":
        return eqn.invars[eqn.params["cond_nconsts"] + eqn.params["body_nconsts"] :]
    return ()


@_jax.weakref_lru_cache
def _result_shards_of_body(
    jaxpr: _jax.Jaxpr, shards: tuple[int, ...], partition: Partition
) -> tuple[int, ...]:
    """Return the shard count of each result of a body.

    Args:
      jaxpr: the body.
      shards: the shard count of each input.
      partition: how equations are divided among devices.
    """
    writer = FlatWriter(Execution(partition=partition))
    writer.enter(jaxpr.invars, shards if len(shards) == len(jaxpr.invars) else None)
    writer.enter(jaxpr.constvars, None)
    writer.write(jaxpr, "")
    return tuple(writer.shards[writer.ids[v]] if _jax.is_var(v) else 1 for v in jaxpr.outvars)


def body_peak_bytes(jaxpr: _jax.Jaxpr) -> int:
    """Return the bytes that one run of a body occupies besides its inputs and results, unsharded."""
    return _body_work(jaxpr).peak_bytes


def _known(shards: tuple[int, ...]) -> tuple[int, ...]:
    """Return shard counts; none if nothing is sharded, so that cached figures are found again."""
    return shards if any(n > 1 for n in shards) else ()


# Cached, since several equations may run the same body, and the numbers depend on the immutable jaxpr alone.
@_jax.weakref_lru_cache
def _body_work(
    jaxpr: _jax.Jaxpr,
    into_products: bool = False,
    shards: tuple[int, ...] = (),
    n_carry: int = 0,
    n_slices: int = 0,
    partition: Partition = UNKNOWN,
) -> Work:
    """Return what one run of a body takes besides its inputs and results.

    Args:
      jaxpr: the body.
      into_products: as in `fusion.fuse`.
      shards: the shard count of each input; 1 if not given.
      n_carry: the number of first results that are a loop's carry; the loop stacks the others. A stack that
        a loop inside makes takes memory of its own before it is copied into the outer one.
      n_slices: the number of last inputs that are slices of stacks.
      partition: how equations are divided among devices.
    """
    writer = ProgramWriter(Execution(partition=partition), into_products=into_products)
    writer.has_sources = False
    # The condition of a while loop takes other operands than the last ones.
    writer.enter(jaxpr.invars, shards if len(shards) == len(jaxpr.invars) else None)
    writer.enter(jaxpr.constvars, None)
    writer.take_slices(jaxpr.invars[len(jaxpr.invars) - n_slices :])
    writer.write(jaxpr, "")
    if n_carry or n_slices:
        writer.copy_stacks(jaxpr.outvars[n_carry:])
        writer.copy_products(jaxpr.outvars[:n_carry])
    program = without_dead(writer.program(jaxpr.outvars))
    # Times are irrelevant here: each kernel takes one second.
    fused = fuse(program, lambda *_: 1.0, into_products=into_products, apart=True)
    copies = {i for i, op in enumerate(program.ops) if op.name == _COPY_OF_CARRY}
    kernels = sum(seconds for i, seconds in fused.seconds.items() if i not in copies)
    return Work(int(no_remat(fused.graph).peak_bytes), int(kernels))


def _dtype(eqn: _jax.JaxprEqn) -> str:
    for v in (*eqn.invars, *eqn.outvars):
        name = _inexact_name(getattr(v.aval, "dtype", None))
        if name:
            return name
    return "float32"


@functools.cache  # texts of types take long, and few types exist
def _inexact_name(dtype: object) -> str:
    """Return the name of a type of real or complex numbers; "" for others."""
    name = str(dtype)
    return name if name.startswith(("float", "bfloat", "complex")) else ""


def _extra_bytes(eqn: _jax.JaxprEqn) -> int:
    """Return the bytes that a loop moves besides its operands and results: its carry, at every step."""
    if eqn.primitive.name != "scan":
        return 0
    carry = eqn.outvars[: _jax.scan_arity(eqn)[1]]
    return 2 * eqn.params["length"] * sum(n_bytes(v.aval) for v in carry)


@functools.lru_cache(4096)  # programs have few types, and many values
def n_bytes(aval: Aval) -> int:
    """Return the bytes of a type in device memory; 0 on the host and for types other than arrays."""
    size = getattr(aval, "size", None)
    if size is None or _jax.is_on_host(aval):
        return 0
    return int(size) * _jax.itemsize_bytes(aval)


@functools.lru_cache(4096)
def type_text(aval: Aval) -> str:
    """Return a type as text, such as `f32[8,1024]`."""
    return aval.str_short(short_dtypes=True)


def joined(path: str, more: str) -> str:
    """Return two name scopes as one path."""
    return f"{path}/{more}" if path and more else path or more
