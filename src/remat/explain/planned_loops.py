"""The loops of a step as a plan runs them: which iterations are recomputed in groups, and what others keep.

A plan may run a loop as several: a loop over groups of iterations, which keeps the carry at each group's
start, and one over the other iterations, which keeps values of each. These loops have the source line of the
original one and follow one another, so they are matched by line and number of iterations.

Known limit: loops inside of loops and branches are not described.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from remat import _jax
from remat.explain.account import Account
from remat.explain.calls import body_function, name_of_function
from remat.explain.sources import user_source_of
from remat.report.groups import groups, own_line
from remat.report.model import LoopPart, PlannedLoop, Value

_MOST_NAMES = 4  # names of kept values; more make the sentence longer


def planned_loops(without: Account, planned: Account) -> tuple[PlannedLoop, ...]:
    """Return the loops that a plan changes.

    Args:
      without, planned: the step without and with the plan.
    """
    kept = _saved_by_operation(planned)
    kept_before = _saved_by_operation(without)
    left = list(_forward_scans(planned))
    found = []
    for number, loop in _forward_scans(without):
        source, length = user_source_of(loop), loop.params["length"]
        while left and user_source_of(left[0][1]) != source:
            left.pop(0)
        matched, parts, done = 0, [], 0
        for i, scan in left:
            n = _iterations(scan, length)
            if user_source_of(scan) != source or done + n > length:
                break
            parts.append(_part(scan, done, n, kept.get(i, [])))
            matched, done = matched + 1, done + n
        if done != length:
            continue
        del left[:matched]
        before = sum(v.n_bytes for v in kept_before.get(number, []))
        if any(p.group for p in parts) or sum(p.kept_bytes for p in parts) != before:
            body = name_of_function(body_function(loop))
            found.append(PlannedLoop(body, own_line(source), length, tuple(parts)))
    return tuple(found)


def _saved_by_operation(account: Account) -> dict[int, list[Value]]:
    """Return the values that operations save for the backward pass."""
    found: dict[int, list[Value]] = {}
    for value, number in zip(account.values, account.producers):
        if value.kind in ("saved", "offloaded"):
            found.setdefault(number, []).append(value)
    return found


def _forward_scans(account: Account) -> Iterator[tuple[int, _jax.JaxprEqn]]:
    sides = account.sides
    for number, (eqn, phase) in enumerate(zip(sides.eqns, sides.phases)):
        if phase == "forward" and eqn.primitive.name == "scan":
            yield number, eqn


def _iterations(scan: _jax.JaxprEqn, length: int) -> int:
    """Return how many iterations of a loop of this length a scan runs, of which each may be a group."""
    n: int = scan.params["length"]
    group = _group_of(scan)
    return n * group if group and n * group <= length else n


def _group_of(scan: _jax.JaxprEqn) -> int:
    """Return the number of iterations in a group, if a scan is over groups; 0 if it is not."""
    body = _jax.open_jaxpr(scan.params["jaxpr"])
    source = user_source_of(scan)
    inner = [e for e in body.eqns if e.primitive.name == "scan" and user_source_of(e) == source]
    return int(inner[0].params["length"]) if len(inner) == 1 else 0


def _part(scan: _jax.JaxprEqn, done: int, n: int, kept: Sequence[Value]) -> LoopPart:
    group = _group_of(scan) if n > scan.params["length"] else 0
    rows: int = scan.params["length"]
    found = groups(tuple(kept))
    names = []
    for g in found:
        times = round(g.count / rows)
        names.append(f"{times} × {g.called}" if times > 1 else g.called)
    if len(names) > _MOST_NAMES:
        names[_MOST_NAMES - 1 :] = [f"{len(names) - _MOST_NAMES + 1} more"]
    n_bytes = sum(v.n_bytes for v in kept)
    return LoopPart(done + 1, done + n, group, tuple(names), n_bytes)
