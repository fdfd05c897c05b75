"""A plan's decisions, in terms of the values that the step saves without it.

A planned step recomputes most values inside of fused kernels, so that its own timeline does not list them.
The decisions follow from a comparison with the step without the plan: a value that is saved there and not in
the planned step is recomputed. Values are matched by path, name, primitive, dtype and shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

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
    left = Counter(map(_key, [*kept, *offloaded]))
    recomputed = []
    for value in without.values:
        if value.kind == "saved":
            if left[_key(value)]:
                left[_key(value)] -= 1
            else:
                recomputed.append(value)
    return (
        *_decisions("recompute", recomputed),
        *_decisions("offload", offloaded),
        *_decisions("keep", kept),
    )


def _key(value: Value) -> tuple[str, ...]:
    return (value.path, value.name, value.primitive, value.aval)


def _decisions(action: Action, values: Iterable[Value]) -> Iterator[Decision]:
    for group in groups(tuple(values)):
        yield Decision(
            action, group.called, group.aval, group.source, group.count, group.n_bytes, group.flops
        )
