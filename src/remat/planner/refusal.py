"""The error that says why no plan fits a budget, with the numbers and what to do next."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from remat import _jax
from remat.errors import BudgetError
from remat.ir.equations import programs_of
from remat.ir.jaxprs import equations
from remat.planner.programs import Answer, Candidate
from remat.printing import printable
from remat.program.compiled import CompiledMemory, CompilerFailure
from remat.program.from_jaxpr import n_bytes, type_text
from remat.program.program import Program
from remat.units import format_bytes


@dataclasses.dataclass(frozen=True, repr=False)
class Refused:
    """The facts for the error message when no plan fits.

    Args:
      budget: the largest peak.
      host_limit: bytes of host memory per device; None for no limit.
      tried: the candidates that were compiled.
      base: the compiler's answer for the step as it is written.
      fixed_bytes: the bytes that every plan needs: arguments and results, less aliased ones.
      program: the step as it is written.
      flat: its jaxpr if it runs on one device; what loops and branches compute inside is named then, too.
      marked: the names of functions marked by `remat.auto`.
      could_offload: whether values could be kept in the host's memory, but were not allowed to.
    """

    budget: int
    host_limit: int | None
    tried: Sequence[Candidate]
    base: Answer
    fixed_bytes: int
    program: Program
    flat: _jax.Jaxpr | None
    marked: Sequence[str]
    could_offload: bool


def refusal(refused: Refused) -> BudgetError:
    """Return the error for a budget that no plan fits."""
    budget, fixed = refused.budget, refused.fixed_bytes
    base = 0 if isinstance(refused.base, CompilerFailure) else refused.base.peak_bytes
    if fixed >= budget and not refused.tried:
        return BudgetError(
            f"no plan fits {format_bytes(budget)} ({budget} bytes): arguments and results alone take "
            f"{format_bytes(fixed)} ({fixed} bytes), and the peak is {format_bytes(base)} ({base} bytes) "
            "without rematerialization. Raise budget= to a size between the two, donate arguments "
            "(donate_argnums=), or use a smaller batch or more devices."
        )
    reached = [p.compiled_bytes for p in refused.tried if not p.failure]
    reached += [base] if isinstance(refused.base, CompiledMemory) else []
    smallest = min(reached, default=base)
    without = (
        "that of the step without rematerialization"
        if smallest == base
        else f"{format_bytes(base)} ({base} bytes) without rematerialization"
    )
    what = (
        f"arguments and results alone take {format_bytes(fixed)}"
        if fixed >= budget
        else f"arguments and results take {format_bytes(fixed)} of that, the largest temporaries "
        f"{_largest(refused, smallest)}"
    )
    offload = "allow offload=True, " if refused.could_offload else ""
    return BudgetError(
        f"no plan fits {format_bytes(budget)} ({budget} bytes); the smallest peak that was "
        f"reached is {format_bytes(smallest)} ({smallest} bytes), {without}; {what}."
        f"{_about_marks(refused)}{_other_reasons(refused)} Raise budget= to at least {smallest} bytes, "
        f"{_mark_more(refused)}{offload}donate arguments (donate_argnums=), or use a smaller batch or "
        "more devices."
    )


def _about_marks(refused: Refused) -> str:
    if not refused.marked:
        return ""
    names = printable(", ".join(refused.marked))
    nothing = "" if refused.tried else ", and nothing there can be"
    return f" Only what is inside of {names} (remat.auto) may be recomputed{nothing}."


def _mark_more(refused: Refused) -> str:
    return "mark the whole loss or nothing, " if refused.marked else ""


def _other_reasons(refused: Refused) -> str:
    """Return the part of the message about plans that failed for reasons other than the device's memory."""
    text, limit = "", refused.host_limit
    on_host = [p.memory.host_bytes for p in refused.tried if isinstance(p.memory, CompiledMemory)]
    if limit is not None and max(on_host, default=0) > limit:
        most = format_bytes(max(on_host))
        text += f" Plans were over host_budget={limit}: up to {most} in host memory."
    failures = [p.failure for p in refused.tried if p.failure]
    if failures:
        text += f" The compiler failed on {len(failures)} plans: {failures[0]}."
    return text


def _largest(refused: Refused, peak: int) -> str:
    """Return the largest values that the smallest peak has room for: kernels never write larger ones."""
    program = refused.program
    found = [(program.types[v], program.bytes[v]) for op in program.ops for v in op.results]
    if refused.flat is not None:
        inside = equations(refused.flat, programs_of)
        found += [(type_text(v.aval), n_bytes(v.aval)) for eqn in inside for v in eqn.outvars]
    sizes: dict[str, int] = {}
    for name, size in found:
        sizes[name] = max(sizes.get(name, 0), size)
    fitting = sorted((item for item in sizes.items() if item[1] <= peak), key=lambda item: -item[1])
    return ", ".join(f"{name} ({format_bytes(size)})" for name, size in fitting[:3])
