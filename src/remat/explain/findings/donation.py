"""Which arguments to donate, in words: those that the step replaces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from remat.explain.findings.facts import Facts
from remat.explain.replaced import replaced_arguments
from remat.explain.roles import argument_of
from remat.explain.step import CLOSED_OVER
from remat.units import format_bytes


class Donation(NamedTuple):
    """The arguments to donate: by how much the peak falls, the reason, and how; 0 and "" for none."""

    n_bytes: int = 0
    reason: str = ""
    step: str = ""


def donation(facts: Facts) -> Donation:
    """Return the arguments to donate: those that the step replaces, and those that it may replace.

    Results whose memory is there from the start hold temporaries until they are written, above all their
    gradients. So the peak falls by less than the results' bytes, and the model says by how much; arguments
    whose donation leaves it are not named.
    """
    if facts.step.undifferentiated is not None:
        return Donation()
    surely, perhaps = donatable(facts)
    reasons, steps = [], []
    peak_bytes = facts.predicted.peak_bytes
    less = _less(facts, surely, peak_bytes, surely)
    if less:
        peak_bytes -= less
        reasons.append(
            f"The step returns new values of {', '.join(surely)}, with the same shapes, and keeps the old "
            f"ones: {_total(surely)} are there twice."
        )
        steps.append(
            f"Donate {', '.join(surely)} ({_how(facts, surely)}), which the step replaces: up to "
            f"{format_bytes(less)} less at the peak."
        )
    less_of_others = _less(facts, [*surely, *perhaps], peak_bytes, perhaps)
    if less_of_others:
        reasons.append(
            f"The step returns arrays that could reuse the memory of {', '.join(perhaps)}: "
            f"{_total(perhaps)}."
        )
        which = f"whichever of {', '.join(perhaps)}" if len(perhaps) > 1 else next(iter(perhaps))
        steps.append(
            f"Donate {which} {'you' if len(perhaps) > 1 else 'if you'} do not need "
            f"{'' if len(perhaps) > 1 else 'it '}again ({_how(facts, perhaps)}): up to "
            f"{format_bytes(less_of_others)} less at the peak."
        )
    return Donation(less + less_of_others, " ".join(reasons), " ".join(steps))


def _less(
    facts: Facts, donated: Iterable[str], peak_bytes: int, replaced: Mapping[str, int]
) -> int:
    """Return by how many bytes a predicted peak falls if arguments are donated, some of them replaced."""
    if not replaced:
        return 0
    less = peak_bytes - facts.predicted_donating(frozenset(donated))
    return max(0, min(less, sum(replaced.values())))


def donatable(facts: Facts) -> tuple[dict[str, int], dict[str, int]]:
    """Return the arguments that the step replaces, and those that it may replace, with bytes.

    An argument of several arrays is replaced if all its arrays are, scalars excepted. If parameters are
    replaced, running averages of the forward pass are assumed to be, too.
    """
    program, inputs = facts.sides.program, facts.sides.inputs
    found = replaced_arguments(facts.sides, facts.step.donated)
    new = dict.fromkeys(found.surely, 1.0) | dict(found.perhaps)
    kept: set[str] = set()
    replaced: set[str] = set()
    n_bytes: dict[str, int] = {}
    for v, name, donated in zip(inputs, facts.step.names, facts.step.donated):
        root = argument_of(name)
        if donated or name == CLOSED_OVER:
            continue
        if v in new:
            n_bytes[root] = n_bytes.get(root, 0) + int(new[v] * program.bytes[v])
        if v in found.surely:
            replaced.add(root)
        if new.get(v, 0) < 1 and v not in found.unchanged and not program.types[v].endswith("[]"):
            kept.add(root)
    n_bytes = {name: n for name, n in n_bytes.items() if n}
    surely = {name: n for name, n in n_bytes.items() if name in replaced - kept}
    return surely, {name: n for name, n in n_bytes.items() if name not in surely}


def donating_option(facts: Facts) -> str:
    """Return the option that donates arguments of steps like this one."""
    option = facts.step.words.donation
    return 'donate="all"' if option == "donate" else option


def _total(n_bytes: Mapping[str, int]) -> str:
    return format_bytes(sum(n_bytes.values()))


def _how(facts: Facts, donated: Iterable[str]) -> str:
    """Return the option that donates arguments; that of `eqx.filter_jit` donates others with them."""
    option = donating_option(facts)
    if facts.step.words.donation != "donate":
        return option
    roots = [
        (argument_of(name), is_donated)
        for name, is_donated in zip(facts.step.names, facts.step.donated)
        if name != CLOSED_OVER
    ]
    spared = set(donated)
    if roots[0][0] not in spared:
        option = 'donate="all-except-first"'
        spared.add(roots[0][0])
    others = dict.fromkeys(
        root for root, is_donated in roots if not is_donated and root not in spared
    )
    return option + (f", which also donates {', '.join(others)}" if others else "")
