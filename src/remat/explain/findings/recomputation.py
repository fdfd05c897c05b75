"""The findings on recomputation that does not reduce the peak."""

from __future__ import annotations

from collections.abc import Iterator

from remat import _jax
from remat.explain import regions
from remat.explain.findings.budgets import share_for_recomputed
from remat.explain.findings.facts import Facts, at_line
from remat.report.model import Finding
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
            if eqn.primitive.name != "scan" or eqn.params["length"] < 2:
                continue
            stacked = eqn.outvars[_jax.scan_arity(eqn)[1] :]
            size = sum(v.aval.size * _jax.itemsize_bytes(v.aval) for v in stacked if v in read)
            if size >= 0.1 * predicted and size:
                by_loops = True
                n = eqn.params["length"]
                yield Finding(
                    "scan_recomputed_at_once",
                    "warning",
                    f"The checkpoint is around a whole scan of {n} iterations{at_line(eqn)}: "
                    f"its backward pass recomputes all of them at once and holds {format_bytes(size)}, "
                    "as much as was not saved before.",
                    "Checkpoint the body of the scan in its place (remat.checkpoint(body)), or use "
                    "remat.scan with checkpoints=.",
                )
    before = facts.account.undone_bytes
    share = facts.account.recompute_flops / max(facts.account.flops, 1.0)
    if before and not by_loops and share and predicted >= 0.9 * before:
        yield _no_gain(facts, found, 100 * share)


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
    if any(regions.chooses(one.policy) for one in found):
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
        if outer is None or not regions.chooses(policy) or policy is outer.policy:
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
