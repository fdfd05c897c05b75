"""The findings on arguments and results, and on steps that do not fit the device."""

from __future__ import annotations

from collections.abc import Iterator

from remat.explain import regions
from remat.explain.findings.budgets import budget_text
from remat.explain.findings.donation import donating_option, donation
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
            f"{smaller_arguments(facts, facts.fixed_bytes)}"
        )
    elif not saved_values(facts):
        step = (
            f"A plan has nothing to recompute here. {smaller_arguments(facts, facts.fixed_bytes)}"
        )
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


# Smaller peaks get no finding about arguments; more suppresses more findings.
_SMALL_BYTES = 64 * 2**10


def arguments_of(facts: Facts, found: list[regions.Found]) -> Iterator[Finding]:
    """Yield the finding that arguments dominate, or that replaced arguments are not donated."""
    memory = facts.predicted
    if memory.peak_bytes < _SMALL_BYTES:
        return
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
        smaller_arguments(facts, fixed),
    )


_LARGE = 0.02  # share of the peak; donations that free less are not reported by themselves


def _not_donated(facts: Facts) -> Iterator[Finding]:
    advice = donation(facts)
    if advice.n_bytes and advice.n_bytes >= _LARGE * facts.peak_bytes:
        yield Finding("arguments_not_donated", "info", advice.reason, advice.step)


def smaller_arguments(facts: Facts, fixed_bytes: int) -> str:
    """Return the ways to reduce the memory of arguments and results of this size, with the bytes of each."""
    ways = []
    if facts.step.undifferentiated is not None:
        ways.append(f"In the training step donate what it replaces ({donating_option(facts)}).")
    elif advice := donation(facts).step:
        ways.append(advice)
    ways.append(
        f"Shard parameters, optimizer state or the batch: over 2 devices up to "
        f"{format_bytes(fixed_bytes // 2)} less on each. Or keep them in a smaller dtype."
    )
    return " ".join(ways)
