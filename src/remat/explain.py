"""`remat.explain`: what a step saves, recomputes and holds, and why.

The step is traced as `jax.jit` would trace it; nothing is run. Its parts are told apart (forward,
recomputed, backward, update; the rule is in `explaining.sides`), fusion is modelled, and what is left
are values with lifetimes. The compiler is asked for its own figures, and where they differ its text
says which arrays it holds that the prediction has not.

Known limits: sharding is known of arguments that carry it, and is passed on from operands to results;
loops are one step of the timeline, with what their bodies need as workspace.
"""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jaxlib

from remat import _jax
from remat.explaining import hlo
from remat.explaining.account import Account, account_of
from remat.explaining.findings import Facts, findings_of
from remat.explaining.regions import inlined, runs
from remat.explaining.sides import sides_of_step
from remat.explaining.step import CLOSED_OVER, TracedStep, traced_step
from remat.program import compiled as compiling, targets
from remat.program.costs import Roofline
from remat.report.explanation import Explanation
from remat.report.model import Finding, Memory, Totals, Value
from remat.report.timeline import live_at, predicted_memory, timeline
from remat.units import format_bytes

_jax.exclude_from_tracebacks(__file__)


def explain(
    f: Callable[..., Any],
    *args: Any,
    target: str | targets.Target | None = None,
    compile: bool = True,
    **kwargs: Any,
) -> Explanation:
    """What a function or training step saves, recomputes and holds, when, and why.

    >>> import jax, jax.numpy as jnp, remat
    >>> def loss(w, x):
    ...     for _ in range(4):
    ...         x = jnp.tanh(x @ w)
    ...     return x.sum()
    >>> w, x = jnp.eye(64), jnp.ones((1000, 64))
    >>> explanation = remat.explain(loss, w, x)
    >>> [str(group) for group in explanation.groups() if group.kind == "saved"]
    ['4 × tanh  f32[1000,64]  1000.0 KiB']
    >>> explanation.findings[0].code
    'no_regions'
    >>> less = remat.explain(remat.checkpoint(loss), w, x)
    >>> less.totals.residual_bytes, explanation.totals.residual_bytes > 0
    (0, True)

    Args:
      f: a training step, or a function to be differentiated with respect to its first argument: it is
        explained as `jax.value_and_grad(f)` is run (with a cotangent of ones, if its result is not
        one number). Jitted or not; also what `remat.fit` returns.
      *args, **kwargs: its arguments, or `jax.ShapeDtypeStruct`s in their place.
      target: the device to explain it for, at hand or ahead of time: `"gpu:h100"`, `"tpu:v5e:2x2"`.
      compile: also ask the compiler for its figures.

    Returns:
      An explanation: print it, or `.to_html()`, `.to_json()`, `.save(path)`, `.diff(other)`.

    Raises:
      PlanError: the target is not known.
      TypeError: as JAX does, for arguments that do not fit.
    """
    on = targets.target(target)
    step = traced_step(f, args, kwargs, on)
    sides = sides_of_step(step.jaxpr, step.shards)
    account = account_of(
        sides,
        step.names,
        step.donated,
        Roofline(on.device).seconds,
        results_from_start=on.platform != "tpu",
        duplicates=on.platform != "cpu",
    )
    predicted = predicted_memory(account.values, account.steps, alias_bytes=account.alias_bytes)
    program = compiling.compile_plainly(step.lower(), on) if compile else None
    refused = program if isinstance(program, compiling.OutOfMemory) else None
    memory = None
    if program is not None and refused is None:
        memory = _memory(compiling.memory_of(program, on))
    facts = Facts(
        step, sides, account, predicted, memory, lambda chosen: _inlined(step, on, chosen)
    )
    findings = findings_of(facts)
    if refused is not None:
        findings = (_does_not_fit(refused), *findings)
    # What JAX says is of all devices together.
    divided = any(n > 1 for n in step.shards) or runs(step.jaxpr, "shard_map")
    kept = None if divided else step.residuals
    return Explanation(
        title=step.title,
        platform=f"{on.device.name}{', ahead of time' if on.ahead_of_time else ''}",
        target=f"{on.name}, bytes of one device" if on.n_devices > 1 else on.name,
        versions=_versions(),
        values=account.values,
        steps=account.steps,
        segments=account.segments,
        findings=findings,
        totals=Totals(
            predicted=predicted,
            compiled=memory,
            difference=_difference(account, predicted, memory, program, on),
            residual_bytes=account.saved_bytes if kept is None else kept.saved_bytes,
            residual_argument_bytes=(
                account.saved_argument_bytes if kept is None else kept.argument_bytes
            ),
            flops=account.flops,
            recompute_flops=min(account.recompute_flops, account.flops),
            time_s=account.time_s,
            recompute_time_s=min(account.recompute_time_s, account.time_s),
        ),
    )


def _versions() -> tuple[tuple[str, str], ...]:
    return (
        ("jax", jax.__version__),
        ("jaxlib", jaxlib.__version__),
        ("remat", importlib.metadata.version("remat")),
    )


def _memory(memory: compiling.Memory) -> Memory:
    return Memory(
        memory.peak_bytes,
        memory.argument_bytes,
        memory.output_bytes,
        memory.temp_bytes,
        memory.alias_bytes,
    )


def _inlined(
    step: TracedStep, on: targets.Target, chosen: Callable[[_jax.JaxprEqn], bool]
) -> int | None:
    """The compiler's temporaries with some regions written out; None if it refuses that."""
    plain = inlined(step.jaxpr, chosen)
    lowered = jax.jit(lambda *xs: _jax.call_jaxpr(plain, xs)).lower(*step.inputs)
    memory = compiling.compile_for_analysis(lowered, on)
    return None if isinstance(memory, compiling.OutOfMemory) else memory.temp_bytes


def _does_not_fit(refused: compiling.OutOfMemory) -> Finding:
    return Finding(
        "does_not_fit",
        "error",
        f"The compiler refuses the step: it needs {format_bytes(refused.needed_bytes)} at least, and "
        f"the device has {format_bytes(refused.limit_bytes)}.",
        'Plan it with remat.fit(step, budget="...") on regions marked with remat.auto.',
    )


# Why the prediction and the compiler differ

_MOST_LISTED = 4


def _difference(
    account: Account, predicted: Memory, compiled: Memory | None, program: Any, on: targets.Target
) -> str:
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


def _why(part: str, by: int, account: Account, on: targets.Target) -> str:
    constants = sum(v.n_bytes for v in account.values if v.path == CLOSED_OVER)
    if part == "argument" and by < 0 and constants:
        return f": {format_bytes(constants)} are closed over, and a part of the program itself"
    if part == "output" and on.n_devices > 1:
        return ": how they are divided over devices is its choice"
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
    """So many arrays of a size more or less than predicted, with the commonest of them."""
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
