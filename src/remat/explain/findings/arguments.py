"""The findings on arguments and results, and on steps that do not fit the device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from remat.explain import regions
from remat.explain.findings.budgets import budget_text
from remat.explain.findings.facts import Facts, saved_values
from remat.program import compiled as compiling
from remat.report.groups import groups
from remat.report.model import Finding
from remat.units import format_bytes


def does_not_fit(facts: Facts, refused: compiling.OutOfMemory) -> Finding:
    """Return the finding that the compiler refuses the step, with a budget that fits if there is one."""
    limit = refused.limit_bytes
    if facts.fixed_bytes >= limit:
        step = (
            f"No plan makes it fit: arguments and results alone are {format_bytes(facts.fixed_bytes)}. "
            f"{smaller_arguments(facts)}"
        )
    elif not saved_values(facts):
        step = f"A plan has nothing to recompute here. {smaller_arguments(facts)}"
    elif facts.plan is not None:
        step = f"Plan it again, with a budget below {budget_text(limit)}."
    else:
        step = f"Plan it for the device: {facts.fit_call(budget_text(limit))}."
    return Finding(
        "does_not_fit",
        "error",
        f"The compiler refuses the step: it needs {format_bytes(refused.needed_bytes)} at least, and "
        f"the device has {format_bytes(limit)}. The model predicts a peak of "
        f"{format_bytes(facts.predicted.peak_bytes)}; where it is, is shown below.",
        step,
    )


def arguments_of(facts: Facts, found: list[regions.Found]) -> Iterator[Finding]:
    """Yield the finding that arguments dominate, or the one that none of those replaced is donated."""
    memory = facts.predicted
    fixed = memory.argument_bytes + memory.output_bytes - memory.alias_bytes
    if 2 * fixed < memory.peak_bytes or not memory.peak_bytes:
        yield from _not_donated(facts)
        return
    before = facts.account.undone_bytes  # 0 if unknown: regions in the bodies of loops
    effect = max(0, before - memory.temp_bytes)
    values = [v for v in facts.account.values if v.kind in ("argument", "output")]
    most = sorted(groups(values), key=lambda group: -group.n_bytes)[:2]
    unimpressive = bool(found) and before > 0 and effect < 0.1 * memory.peak_bytes
    yield Finding(
        "arguments_dominate",
        "warning" if unimpressive else "info",
        f"Arguments and results are {format_bytes(fixed)} of the peak of "
        f"{format_bytes(memory.peak_bytes)} ({100 * fixed / memory.peak_bytes:.0f} %), which "
        f"rematerialization cannot make smaller; temporaries are {format_bytes(memory.temp_bytes)}. "
        f"The largest: {'; '.join(f'{group.kind} {group}' for group in most)}.",
        smaller_arguments(facts),
    )


_LARGE = 0.02  # share of the peak; what frees less is no finding of its own


def _not_donated(facts: Facts) -> Iterator[Finding]:
    donatable = _donatable(facts)
    n_bytes = sum(donatable.values())
    if n_bytes >= _LARGE * facts.peak_bytes:
        yield Finding(
            "arguments_not_donated",
            "info",
            f"The step returns new values of {_listed(donatable)}, with the same shapes, and keeps the old "
            f"ones: {format_bytes(n_bytes)} are there twice, also at the peak.",
            _donate(donatable),
        )


def _donate(donatable: dict[str, int]) -> str:
    return (
        f"Donate {_listed(donatable)} (donate_argnums), which the step replaces: "
        f"{format_bytes(sum(donatable.values()))} less."
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _donatable(facts: Facts) -> dict[str, int]:
    """Return the arguments that the step replaces and that are not donated, with their bytes.

    Gradients have the shapes of parameters too, but do not replace them, and a sum over the iterations of
    a loop is no new value of an argument.
    """
    if facts.step.undifferentiated is not None:
        return {}
    sides = facts.sides
    program = sides.program
    made = {v: i for i, op in enumerate(program.ops) for v in op.results}

    def is_new(v: int) -> bool:
        i = made.get(v)
        if i is None:
            return True
        if sides.phases[i] in ("backward", "recompute"):
            return False
        begins = program.ops[i].operands
        return program.ops[i].name not in ("scan", "while") or any(
            program.types[x] == program.types[v] for x in begins if x in sides.inputs
        )

    free = [program.types[v] for v in program.outputs if is_new(v)]
    found: dict[str, int] = {}
    for v, name, donated in zip(sides.inputs, facts.step.names, facts.step.donated):
        kind = program.types[v]
        if kind in free:
            free.remove(kind)
            if not donated:
                root = re.split(r"[\[.]", name)[0]
                found[root] = found.get(root, 0) + program.bytes[v]
    return {name: n for name, n in found.items() if n}


def smaller_arguments(facts: Facts) -> str:
    """Return how arguments and results take less memory, with the bytes that each way frees."""
    ways = []
    if facts.step.undifferentiated is not None:
        ways.append("In the training step donate what it replaces (donate_argnums).")
    elif donatable := _donatable(facts):
        ways.append(_donate(donatable))
    ways.append(
        f"Shard parameters, optimizer state or the batch: over 2 devices up to "
        f"{format_bytes(facts.fixed_bytes // 2)} less on each. Or keep them in a smaller dtype."
    )
    return " ".join(ways)
