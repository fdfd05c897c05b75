"""A plan's decisions, in terms of the values that the step saves without it.

A planned step recomputes most values inside of fused kernels, so that its own timeline does not list them.
The decisions follow from a comparison with the step without the plan: a value that is saved there and not in
the planned step is recomputed. Values are matched by path, name, primitive, dtype and shape.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from remat.explain.account import Account
from remat.report.groups import groups
from remat.report.model import Action, Decision, Value


def explained_decisions(without: Account, planned: Account) -> tuple[Decision, ...]:
    """Return the values that a plan recomputes, offloads and keeps: in this order, each largest first.

    Args:
      without, planned: the step without and with the plan.
    """
    kept = [v for v in planned.values if v.kind == "saved"]
    offloaded = [v for v in planned.values if v.kind == "offloaded"]
    saved = [v for v in without.values if v.kind == "saved"]
    # Lines are compared first: several values of a function may differ in nothing else.
    again, left = _without(saved, [*kept, *offloaded], _key_with_source)
    recomputed, _ = _without(again, left, _key)
    # Values that are recomputed although the step did not save them, such as an operand of others.
    more, _ = _without(
        [v for v in planned.values if v.kind == "recomputed" and v.first_kind], recomputed, _key
    )
    return (
        *_decisions("recompute", [*recomputed, *more]),
        *_decisions("offload", offloaded),
        *_decisions("keep", kept),
    )


def _without(
    values: Iterable[Value], others: Iterable[Value], key: Callable[[Value], tuple[str, ...]]
) -> tuple[list[Value], list[Value]]:
    """Return what is left of values and of others if as many arrays as possible are matched."""
    others = list(others)
    counts = Counter[tuple[str, ...]]()
    for other in others:
        counts[key(other)] += other.count
    left = []
    for value in values:
        n = min(value.count, counts[key(value)])
        counts[key(value)] -= n
        left += _part_of(value, value.count - n)
    left_of_others: list[Value] = []
    for other in others:
        n = min(other.count, counts[key(other)])
        counts[key(other)] -= n
        left_of_others += _part_of(other, n)
    return left, left_of_others


def _part_of(value: Value, count: int) -> list[Value]:
    """Return a value that stands for fewer arrays; nothing for none."""
    share = count / value.count
    if not count:
        return []
    return [
        dataclasses.replace(
            value,
            count=count,
            n_bytes=value.n_bytes * count // value.count,
            flops=value.flops * share,
            time_s=value.time_s * share,
        )
    ]


def _key(value: Value) -> tuple[str, ...]:
    return (value.path, value.name, value.primitive, value.aval)


def _key_with_source(value: Value) -> tuple[str, ...]:
    return (*_key(value), value.source)


def _decisions(action: Action, values: Iterable[Value]) -> Iterator[Decision]:
    for group in groups(tuple(values)):
        yield Decision(
            action, group.called, group.aval, group.source, group.count, group.n_bytes, group.flops
        )
