"""Why the predicted peak and the compiler's differ, in one sentence.

The text of the compiled program says which arrays are live at its peak (`explain.hlo`). They are compared
with the predicted ones by size, and the largest difference is named.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from remat.explain import hlo
from remat.explain.account import Account
from remat.explain.step import CLOSED_OVER
from remat.program.targets import Target
from remat.report.model import Memory, Value
from remat.report.timeline import live_at, timeline
from remat.units import format_bytes


def difference(
    account: Account,
    predicted: Memory,
    compiled: Memory | None,
    program: Any,
    on: Target,
) -> str:
    """Return the differences as text: empty if nothing was compiled."""
    if compiled is None:
        return ""
    by = compiled.peak_bytes - predicted.peak_bytes
    share = by / compiled.peak_bytes if compiled.peak_bytes else 0.0
    if abs(share) < 0.01:
        return "Prediction and compiler agree within 1 %."
    reasons: list[tuple[int, str]] = []
    for part in ("argument", "output"):
        d = getattr(compiled, f"{part}_bytes") - getattr(predicted, f"{part}_bytes")
        named = {"argument": "arguments", "output": "results"}[part]
        reasons.append((d, f"its {named} are {_amount(d)}{_why(part, d, account, on)}"))
    d = predicted.alias_bytes - compiled.alias_bytes
    reasons.append((d, f"its results share {_amount(-d)} of memory with donated arguments"))
    peak = hlo.peak_of(program.as_text() or "")
    if peak is not None:
        reasons += _held(account, compiled, peak)
    # The reason that explains most of the difference, with its sign.
    alike = [(abs(d), text) for d, text in reasons if d * by > 0 and abs(d) >= 0.2 * abs(by)]
    why = max(alike, default=(0, ""))[1]
    return (
        f"The compiler needs {_amount(by)} than predicted ({100 * abs(share):.0f} % of its peak)"
        f"{', mostly because ' + why if why else ''}."
    )


def _amount(by: int) -> str:
    return f"{format_bytes(abs(by))} {'more' if by > 0 else 'less'}"


def _why(part: str, by: int, account: Account, on: Target) -> str:
    constants = sum(v.n_bytes for v in account.values if v.path == CLOSED_OVER)
    if part == "argument" and by < 0 and constants:
        return f": {format_bytes(constants)} are closed over, and a part of the program itself"
    if part == "output" and on.n_devices > 1:
        return ": how they are sharded is its choice"
    if by > 0 and on.platform == "tpu":
        return ": its layouts pad arrays to whole tiles"
    return ""


def _held(account: Account, compiled: Memory, peak: hlo.Peak) -> list[tuple[int, str]]:
    """Return reasons from the arrays that both hold at their peaks: bytes, and the reason in words."""
    at = timeline(account.opaque_values, account.opaque_steps).peak_step or 0
    live = live_at(account.opaque_values, at)
    ours = [v for v in live if v.kind not in ("argument", "output")]
    inside = sum(h.n_bytes for h in peak.held if h.inside)
    workspace = sum(v.n_bytes for v in ours if v.aval == "workspace")
    reasons = [(
        inside - workspace,
        f"it holds {format_bytes(inside)} inside of loops, where {format_bytes(workspace)} were predicted",
    )]  # fmt: skip
    theirs = Counter(h.n_bytes for h in peak.held if not h.inside)
    mine = Counter(v.n_bytes for v in ours if v.aval != "workspace")
    for n in sorted({*theirs, *mine}):
        more = theirs[n] - mine[n]
        if more:
            reasons.append((n * more, f"it holds {_class(n, more, peak, ours, account.values)}"))
    rest = compiled.temp_bytes - peak.n_bytes
    reasons.append((rest, "of how it places arrays in memory"))
    return reasons


def _class(
    n_bytes: int, more: int, peak: hlo.Peak, ours: list[Value], values: Sequence[Value]
) -> str:
    """Return the difference in the number of arrays of one size, with the most common of them.

    Args:
      values: all of the step, from which the compiler's arrays have their source lines.
    """
    if more > 0:
        sources = {
            (v.path, v.primitive): v.source for v in values if v.n_bytes // v.count == n_bytes
        }
        common = Counter(
            array_in_words(h.type, h.op_name, sources)
            for h in peak.held
            if h.n_bytes == n_bytes and not h.inside
        )
    else:
        common = Counter(
            f"{v.aval} from {v.primitive}{_at(v.source)}" for v in ours if v.n_bytes == n_bytes
        )
    found = [f"{n} × {what}" if n > 1 else what for what, n in common.most_common(_MOST_NAMED)]
    others = sum(common.values()) - sum(n for _, n in common.most_common(_MOST_NAMED))
    found += [f"{others} others"] if others else []
    arrays = "array" if abs(more) == 1 else "arrays"
    count = f"{abs(more)} {'more' if more > 0 else 'fewer'} {arrays}"
    return f"{count} of {format_bytes(n_bytes)} (there: {', '.join(found)})"


_MOST_NAMED = 2  # kinds of arrays that are named; more make the sentence longer
# What JAX's calls and transformations add to the scopes of an operation: ``jit(step)/jvp(mlp)/mul``.
_CALL = re.compile(r"\bjit\([^()]*\)/")
_TRANSFORMED = re.compile(r"\w+\(|\)")


def array_in_words(type_: str, op_name: str, sources: Mapping[tuple[str, str], str]) -> str:
    """Return an array of the compiler's by type, primitive and, if it is known, source."""
    scopes, _, primitive = op_name.rpartition("/")
    path = _TRANSFORMED.sub("", _CALL.sub("", f"{scopes}/")).strip("/")
    source = sources.get((path, primitive), "")
    return f"{type_} from {primitive}{_at(source)}"


def _at(source: str) -> str:
    return f" at {source.partition(' (')[0]}" if source else ""
