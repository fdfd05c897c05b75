"""The findings on recomputation that does not reduce the peak."""

from __future__ import annotations

from collections.abc import Iterator

from remat import _jax
from remat.explain import regions
from remat.explain.findings.budgets import (
    cost_of,
    little_to_gain,
    plan_option,
    share_for_recomputed,
)
from remat.explain.findings.by_hand import decorated, largest_parts
from remat.explain.findings.facts import Facts, at_line
from remat.explain.findings.stacks import stacks_of
from remat.explain.sources import user_frames_of
from remat.paths import is_own
from remat.report.groups import groups
from remat.report.model import Finding, Option
from remat.report.timeline import live_at, timeline
from remat.units import format_bytes


def checkpointed_loops(loops: list[_jax.JaxprEqn]) -> Iterator[Finding]:
    for eqn in loops:
        yield Finding(
            "checkpointed_loop",
            "info",
            f"A loop{at_line(eqn)} keeps some of its states and repeats the iterations between them in the "
            "backward pass. How many is known only at run time: FLOPs and seconds here count the body once.",
            "Set checkpoints= of the loop: more of them take more memory and repeat fewer iterations.",
        )


def undone(facts: Facts, found: list[regions.Found]) -> Iterator[Finding]:
    compiled, before = facts.compiled, facts.account.undone_bytes
    predicted = facts.predicted.temp_bytes
    if compiled is None or before <= 1.05 * predicted:
        return
    # On CPU the memory of the host is that of the device.
    on_host = sum(v.n_bytes for v in facts.account.values if v.kind == "offloaded")
    if compiled.temp_bytes < 1.15 * (predicted + on_host):
        return
    # The prediction is not exact enough to decide, so the step is compiled with those regions inlined that
    # the compiler may merge; other regions stay, so that they do not hide the difference.
    outside = [f.eqn for f in found if not f.in_loop]
    exposed = [eqn for eqn in outside if _is_exposed(eqn)]
    inlined = facts.compiled_inlined(_is_exposed if exposed else lambda _: True)
    # Compilers schedule inlined code slightly differently, so a small difference proves nothing.
    if inlined is None or compiled.temp_bytes < (0.9 if exposed else 0.97) * inlined:
        return
    # If the step needs more than without regions, the reason is another, such as copies to the host.
    if compiled.temp_bytes > 1.15 * inlined:
        return
    if any(not _prevents(eqn) for eqn in outside):
        step = "Leave out prevent_cse=False: it is for regions in the body of a loop."
    elif exposed:
        step = (
            "Use remat.checkpoint in place of jax.checkpoint, or jaxlib 0.11.1 or later: CPU "
            "compilers before it merge what jax.checkpoint recomputes with the forward pass."
        )
    else:
        step = "Report it with the versions above, please: remat.checkpoint should survive here."
    some = f"{len(exposed)} of its {len(outside)} regions" if exposed else "its regions"
    which = "its regions" if len(exposed) == len(outside) else some
    yield Finding(
        "undone_by_compiler",
        "error",
        f"The compiler undoes rematerialization: the step needs {format_bytes(compiled.temp_bytes)} of "
        f"temporaries, and {format_bytes(inlined)} with {which} inlined; about "
        f"{format_bytes(predicted)} were expected.",
        step,
    )


def _is_exposed(eqn: _jax.JaxprEqn) -> bool:
    """Return whether a compiler may merge a region with the forward pass."""
    return eqn.primitive.name != "remat" or not _prevents(eqn)


def _prevents(eqn: _jax.JaxprEqn) -> bool:
    prevents = eqn.params.get("prevent_cse", True)
    return any(prevents) if isinstance(prevents, tuple) else bool(prevents)


def at_once(facts: Facts, found: list[regions.Found]) -> Iterator[Finding]:
    predicted = facts.predicted.temp_bytes
    by_loops = False
    for one in found:
        again, later = regions.split_regions(one.eqn)
        read = {v for eqn in later for v in eqn.invars if _jax.is_var(v)}
        for eqn in again:
            stacks = [s for s in stacks_of(eqn) if s.result in read and s.loop.params["length"] > 1]
            size = sum(stack.n_bytes for stack in stacks)
            if size >= 0.1 * predicted and size:
                by_loops = True
                yield _scan_at_once(facts, max(stacks, key=lambda s: s.n_bytes).loop, size)
    before = facts.account.undone_bytes
    share = facts.account.recompute_flops / max(facts.account.flops, 1.0)
    if before and not by_loops and share and predicted >= 0.9 * before:
        yield _no_gain(facts, found, 100 * share)


def _scan_at_once(facts: Facts, loop: _jax.JaxprEqn, n_bytes: int) -> Finding:
    """Return the finding that a region recomputes all iterations of a loop at once."""
    said = (
        f"The checkpoint is around a whole scan of {loop.params['length']} iterations{at_line(loop)}: "
        f"its backward pass recomputes all of them at once and holds {format_bytes(n_bytes)}, "
        f"as much as was not saved before.{_largest_recomputed(facts)}"
    )
    frames = user_frames_of(loop)
    if not frames or is_own(frames[0][0]):
        step = (
            "Checkpoint the body of the scan in its place (remat.checkpoint(body)), or use "
            "remat.scan with checkpoints=."
        )
        return Finding("scan_recomputed_at_once", "warning", said, step)
    # A loop of a library: its body cannot be changed, but what it calls can.
    step, options = _around_library(facts)
    return Finding("scan_recomputed_at_once", "warning", said, step, options)


def _largest_recomputed(facts: Facts) -> str:
    """Return the largest recomputed values at the peak, as a sentence after another; "" if there are none."""
    at = timeline(facts.account.values, facts.account.steps).peak_step or 0
    live = [v for v in live_at(facts.account.values, at) if v.kind == "recomputed"]
    return f" The largest at the peak: {groups(live)[0]}." if live else ""


def _around_library(facts: Facts) -> tuple[str, tuple[Option, ...]]:
    """Return what to do about values that a library's loops recompute: checkpoint what they call, or plan."""
    options = [Option("as written", peak_bytes=facts.peak_bytes, extra_flops_share=0.0)]
    steps = []
    share = share_for_recomputed(facts)
    if share:
        call = facts.fit_call(f'"{share}%"')
        steps.append(f"{call} chooses what to recompute")
        options.append(plan_option(facts, share, None))
    name, line, n_bytes = _called_most(facts)
    if name:
        steps.append(f"wrap {name} ({line}), which the loop calls, in remat.checkpoint")
        factor = facts.peak_bytes / max(1, facts.predicted.peak_bytes)
        peak_bytes = int(factor * (facts.predicted.peak_bytes - n_bytes))
        code = decorated(line.rpartition(":")[0], name)
        options.append(Option("by hand", code, peak_bytes, "about"))
    steps.append("use the option of the library that keeps fewer states, if it has one")
    text = "; or ".join(steps)
    return f"{text[0].upper() if not share else text[0]}{text[1:]}.", tuple(options)


def _called_most(facts: Facts) -> tuple[str, str, int]:
    """Return the user's function that computes most recomputed bytes at the peak, its line, and the bytes."""
    at = timeline(facts.account.values, facts.account.steps).peak_step or 0
    sizes: dict[str, int] = {}
    for value in live_at(facts.account.values, at):
        own = value.source.rpartition(", from ")[2]
        if value.kind == "recomputed" and own:
            sizes[own] = sizes.get(own, 0) + value.n_bytes
    if not sizes:
        return "", "", 0
    most = max(sizes, key=lambda own: sizes[own])
    line, _, function = most.partition(" (")
    name = function.rstrip(")").rpartition(".")[2]
    if not name.isidentifier() or 4 * sizes[most] < facts.predicted.peak_bytes:
        return "", "", 0
    return name, line, sizes[most]


def has_regions(facts: Facts) -> Finding:
    """Return the finding on a step that rematerializes: what its peak consists of, and what helps."""
    values, steps = facts.account.values, facts.account.steps
    line = timeline(values, steps)
    at = line.peak_step or 0
    live = live_at(values, at)
    sizes = {kind: sum(v.n_bytes for v in live if v.kind == kind) for kind in _CAUSES}
    cause = max(sizes, key=lambda kind: sizes[kind])
    parts = largest_parts([v for v in live if v.kind == cause])
    said = (
        "The step rematerializes already. At its peak "
        f"{format_bytes(sizes[cause])} of {format_bytes(line.peak_bytes)} are {_CAUSES[cause]}{parts}."
    )
    if 2 * facts.fixed_bytes >= facts.peak_bytes or sizes[cause] < _LITTLE * line.peak_bytes:
        return Finding("has_regions", "info", said, little_to_gain(facts))
    if cause == "recomputed":
        step, options = _around_library(facts)
        return Finding("has_regions", "info", said, step, options)
    share = share_for_recomputed(facts)
    if not share or cause != "saved":
        return Finding("has_regions", "info", said, little_to_gain(facts))
    call = facts.fit_call(f'"{share}%"')
    return Finding(
        "has_regions",
        "info",
        said,
        f"{call} chooses what to recompute in place of the step's own checkpoints.",
        (
            Option("as written", peak_bytes=facts.peak_bytes, extra_flops_share=0.0),
            plan_option(facts, share, cost_of(facts, share / 100)),
        ),
    )


_LITTLE = 0.25  # share of the peak; recomputing a cause below it would gain little
# Kinds of values that may dominate a peak, in words.
_CAUSES = {
    "recomputed": "recomputed values",
    "saved": "values saved for the backward pass",
    "gradient": "gradients",
    "temporary": "temporaries",
}


def _no_gain(facts: Facts, found: list[regions.Found], percent: float) -> Finding:
    """Return the reason why recomputation does not lower the peak, from the values live there."""
    at = timeline(facts.account.values, facts.account.steps).peak_step or 0
    live = live_at(facts.account.values, at)
    saved, again = (sum(v.n_bytes for v in live if v.kind == k) for k in ("saved", "recomputed"))
    costs = (
        f"{format_bytes(facts.predicted.temp_bytes)} of temporaries, and "
        f"{format_bytes(facts.account.undone_bytes)} without rematerialization, for {percent:.2g} % of "
        "the step's FLOPs."
    )
    if again >= saved:
        plan = _or_plan(facts, "recomputes it piece by piece")
        return Finding(
            "region_recomputed_at_once",
            "warning",
            f"All recomputed values are live at once: {costs}",
            f"Checkpoint smaller parts, such as each layer{plan}.",
        )
    if any(regions.is_meant_to_save(one.policy) for one in found):
        step = "Save less: choose a policy that saves fewer values, or none"
    else:
        step = "Put more into each region, whose inputs are saved"
    return Finding(
        "saves_as_much",
        "warning",
        f"The regions save as many bytes as they recompute, {format_bytes(saved)} at the peak: {costs}",
        f"{step}{_or_plan(facts, 'chooses what to save')}.",
    )


def _or_plan(facts: Facts, does: str) -> str:
    """Return the suggestion to plan, as the end of a sentence; "" if no budget is likely to help."""
    share = share_for_recomputed(facts)
    call = facts.fit_call(f'"{share}%"')
    return f"; or {call} {does}" if share else ""


def overridden(found: list[regions.Found]) -> Iterator[Finding]:
    for one in found:
        outer, policy = one.outer, one.policy
        if outer is None or not regions.is_meant_to_save(policy) or policy is outer.policy:
            continue
        while outer.outer is not None:
            outer = outer.outer
        again, _ = regions.split_regions(outer.eqn)
        dropped = list(
            regions.region_matches(policy, _equations(again, outer.eqn), times=outer.times)
        )
        if dropped:
            size = sum(m.n_bytes for m in dropped)
            yield Finding(
                "inner_policy_overridden",
                "warning",
                f"An outer checkpoint{at_line(outer.eqn)} recomputes what the policy of a checkpoint inside "
                f"it saves: {format_bytes(size)}, {dropped[0].type} from {dropped[0].source} among it.",
                "Give the outer checkpoint that policy (remat.checkpoint passes it on to loops and "
                "calls inside), or remove one of the two.",
            )


def _equations(eqns: list[_jax.JaxprEqn], like: _jax.JaxprEqn) -> _jax.Jaxpr:
    body = _jax.open_jaxpr(like.params["jaxpr"])
    return _jax.rebuild(body, eqns=eqns, outvars=())
