"""Why the predicted peak and the compiler's differ, in words.

The text of the compiled program says which arrays are live when most is (`explain.hlo`); compared by
size with the predicted ones, the largest differences are listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from remat.explain import hlo
from remat.explain.account import Account
from remat.explain.step import CLOSED_OVER
from remat.program.targets import Target
from remat.report.model import Memory, Value
from remat.report.timeline import live_at, timeline
from remat.units import format_bytes

_MOST_LISTED = 4  # sizes of arrays that are named; more make a longer text


def difference(
    account: Account, predicted: Memory, compiled: Memory | None, program: Any, on: Target
) -> str:
    """Return the differences as text: empty if nothing was compiled."""
    if compiled is None:
        return ""
    by = compiled.peak_bytes - predicted.peak_bytes
    share = by / compiled.peak_bytes if compiled.peak_bytes else 0.0
    if abs(share) < 0.01:
        return "Prediction and compiler agree within 1 %."
    said = [
        f"The compiler needs {format_bytes(abs(by))} {'more' if by > 0 else 'less'} than predicted "
        f"({100 * abs(share):.0f} % of its peak)."
    ]
    for part in ("argument", "output", "alias"):
        d = getattr(compiled, f"{part}_bytes") - getattr(predicted, f"{part}_bytes")
        if abs(d) >= 0.01 * compiled.peak_bytes:
            said.append(
                f"Its {part}s are {format_bytes(abs(d))} {'more' if d > 0 else 'less'}"
                f"{_why(part, d, account, on)}."
            )
    peak = hlo.peak_of(program.as_text() or "")
    if peak is not None:
        said += _held(account, compiled, peak)
    return " ".join(said)


def _why(part: str, by: int, account: Account, on: Target) -> str:
    constants = sum(v.n_bytes for v in account.values if v.path == CLOSED_OVER)
    if part == "argument" and by < 0 and constants:
        return f": {format_bytes(constants)} are closed over, and a part of the program itself"
    if part == "output" and on.n_devices > 1:
        return ": how they are sharded is its choice"
    if by > 0 and on.platform == "tpu":
        return ": its layouts pad arrays to whole tiles"
    return ""


def _held(account: Account, compiled: Memory, peak: hlo.Peak) -> Iterable[str]:
    at = timeline(account.values, account.steps).peak_step or 0
    ours = [v for v in live_at(account.values, at) if v.kind not in ("argument", "output")]
    inside = sum(h.n_bytes for h in peak.held if h.inside)
    workspace = sum(v.n_bytes for v in ours if v.aval == "workspace")
    smallest = 0.002 * compiled.peak_bytes
    if abs(inside - workspace) >= 5 * smallest:
        yield (
            f"When most is live, it holds {format_bytes(inside)} inside of loops, where "
            f"{format_bytes(workspace)} were predicted."
        )
    theirs = Counter(h.n_bytes for h in peak.held if not h.inside)
    mine = Counter(v.n_bytes for v in ours if v.aval != "workspace")
    sizes = [n for n in {*theirs, *mine} if n * abs(theirs[n] - mine[n]) >= smallest]
    sizes.sort(key=lambda n: (-n * abs(theirs[n] - mine[n]), n))
    listed = [_class(n, theirs[n] - mine[n], peak, ours) for n in sizes[:_MOST_LISTED]]
    if listed:
        where = "Outside of loops it" if inside or workspace else "When most is live, it"
        yield f"{where} holds {'; '.join(listed)}."
    rest = compiled.temp_bytes - peak.n_bytes
    if abs(rest) >= 5 * smallest:
        yield (
            f"{format_bytes(abs(rest))} {'more' if rest > 0 else 'less'} than the arrays in its text "
            "are due to how it places them in memory."
        )


def _class(n_bytes: int, more: int, peak: hlo.Peak, ours: list[Value]) -> str:
    """Return how many arrays of one size there are more or fewer, with the most common of them."""
    if more > 0:
        common = Counter(
            f"{h.type} from {h.op_name.rpartition('/')[2]}"
            for h in peak.held
            if h.n_bytes == n_bytes and not h.inside
        )
    else:
        common = Counter(f"{v.aval} from {v.primitive}" for v in ours if v.n_bytes == n_bytes)
    kinds = ", ".join(f"{n} × {what}" for what, n in common.most_common(3))
    whose = "it has" if more > 0 else "predicted"
    how = f"{abs(more)} {'more' if more > 0 else 'fewer'} of {format_bytes(n_bytes)}"
    return f"{how} ({whose} {kinds})"
