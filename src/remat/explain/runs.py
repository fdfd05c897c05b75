"""The programs that loops, branches and other operations with a body run."""

from __future__ import annotations

import dataclasses

from remat import _jax
from remat.explain.phases import PhasedProgram, phased_program
from remat.ir import jaxprs
from remat.ir.flops import flops_of
from remat.program.from_jaxpr import body_peak_bytes
from remat.program.program import Op


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Run:
    """The program that a loop or branch runs.

    Args:
      name, length, reverse: as in `Body`.
      jaxpr: of one iteration.
      first_carry, n_carry: which of its inputs are carries from the previous iteration.
      first_slice: the first of its inputs that is a slice of a stack.
      skipped: the number of operands of the equation before those of the jaxpr.
      returns: whether its results are those of the equation.
    """

    name: str
    jaxpr: _jax.Jaxpr
    length: int = 1
    reverse: bool = False
    first_carry: int = 0
    n_carry: int = 0
    first_slice: int = 10**9
    skipped: int = 0
    returns: bool = True


def run_of(op: Op, eqn: _jax.JaxprEqn) -> Run | None:
    """Return the program that an operation runs; None if it has no body."""
    if eqn.primitive.name == "scan":
        n_consts, n_carry = _jax.scan_arity(eqn)
        return Run(
            "iteration", _jax.open_jaxpr(eqn.params["jaxpr"]), eqn.params["length"],
            bool(eqn.params["reverse"]), n_consts, n_carry, n_consts + n_carry,
        )  # fmt: skip
    if eqn.primitive.name == "while":
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        return Run(
            "an iteration of a while loop", _jax.open_jaxpr(eqn.params["body_jaxpr"]),
            first_carry=n_body, n_carry=len(eqn.outvars), skipped=n_cond,
        )  # fmt: skip
    if eqn.primitive.name == "cond":
        branches = [_jax.open_jaxpr(branch) for branch in eqn.params["branches"]]
        sizes = [(body_peak_bytes(b), sum(map(flops_of, b.eqns))) for b in branches]
        largest = sizes.index(max(sizes))
        name = f"branch {largest + 1}/{len(branches)}"
        return Run(name, branches[largest], skipped=1)
    if op.workspace_bytes and jaxprs.has_body(eqn):
        bodies = [_jax.open_jaxpr(body) for body in jaxprs.bodies_of(eqn)]
        largest_body = max(bodies, key=body_peak_bytes)
        return Run(f"the body of {eqn.primitive.name}", largest_body, returns=False)
    return None


def operands_of(run: Run, eqn: _jax.JaxprEqn) -> dict[int, int]:
    """Return for inputs of a body the operands of the operation: their places in `Op.operands`."""
    found = {}
    operand = 0
    for number, v in enumerate(eqn.invars):
        at = number - run.skipped
        if _jax.is_var(v):
            if 0 <= at < len(run.jaxpr.invars):
                found[at] = operand
            operand += 1
    return found


def program_of(run: Run, sides: PhasedProgram, number: int) -> PhasedProgram:
    """Return the program of a body, with its phases, of the operation with this number in `sides`."""
    op, eqn = sides.program.ops[number], sides.eqns[number]
    shards = [1] * len(run.jaxpr.invars)
    for at, operand in operands_of(run, eqn).items():
        shards[at] = sides.shards[op.operands[operand]]
    within = sides.phases[number]
    return phased_program(
        run.jaxpr,
        shards,
        path=op.path,
        within=within,
        cotangents=_cotangents(run, sides, number) if within == "backward" else (),
        partition=sides.partition,
    )


def _cotangents(run: Run, sides: PhasedProgram, number: int) -> list[bool]:
    """Return for each input of a body in the backward pass whether it depends on cotangents.

    Carries do: those of a backward loop are cotangents and sums of them. Indices do not.
    """
    dependent = {
        v
        for op, phase in zip(sides.program.ops, sides.phases)
        if phase == "backward"
        for v in op.results
    } | sides.cotangents
    found = [False] * len(run.jaxpr.invars)
    for at, operand in operands_of(run, sides.eqns[number]).items():
        found[at] = sides.program.ops[number].operands[operand] in dependent
    for at in range(run.first_carry, run.first_carry + run.n_carry):
        found[at] = _jax.has_tangent(run.jaxpr.invars[at].aval)
    return found
