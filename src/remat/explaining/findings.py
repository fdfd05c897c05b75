"""What the reader of an explanation should know, each with the next step to take.

Most are reasons why rematerialization had less effect than was hoped for. Each is found from what the
step does, not from how it is written:

    no_gradient                  nothing is differentiated
    no_regions                   nothing is rematerialized
    undone_by_compiler           compiled, the step needs what it needs with its regions written out
    policy_matched_nothing       no value is what a policy wants to save
    arguments_dominate           most of the peak are arguments and results
    scan_recomputed_at_once      a region recomputes all steps of a loop before it uses the first
    region_recomputed_at_once    a region recomputes so much at once that the peak stays
    inner_policy_overridden      an outer region computes again what an inner policy saves
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from remat import _jax
from remat.errors import closest
from remat.explaining import regions
from remat.explaining.account import Account
from remat.explaining.sides import Sides
from remat.explaining.step import TracedStep
from remat.report.model import Finding, Memory
from remat.units import format_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Facts:
    """What findings are made from.

    Args:
      compiled: the compiler's figures, if it was asked.
      compiled_inlined: asks it for the temporaries of the step with its regions written out.
    """

    step: TracedStep
    sides: Sides
    account: Account
    predicted: Memory
    compiled: Memory | None
    compiled_inlined: Callable[[], int | None]


def findings_of(facts: Facts) -> tuple[Finding, ...]:
    """All findings about a step, of each kind at most one for each policy or loop."""
    if "backward" not in facts.sides.phases:
        return (
            Finding(
                "no_gradient",
                "info",
                "The step computes no gradient, so there is nothing between a forward and a backward "
                "pass to save or recompute.",
                "Give the loss, whose first argument is differentiated, or the training step.",
            ),
        )
    found = list(regions.all_regions(facts.step.jaxpr))
    made = [*_no_regions(facts, found), *_undone(facts, found), *_matched_nothing(facts, found)]
    made += [*_at_once(facts, found), *_overridden(found), *_arguments(facts, found)]
    return tuple(dict.fromkeys(made))


def _no_regions(facts: Facts, found: list[regions.Found]) -> Iterator[Finding]:
    if not found:
        saved = facts.account.saved_bytes
        yield Finding(
            "no_regions",
            "info",
            "Nothing is rematerialized: the step has no checkpointed region, and the backward pass "
            f"reads {format_bytes(saved)} that the forward pass computes.",
            "Wrap the layers in remat.checkpoint, or mark the loss with remat.auto and let "
            'remat.fit(step, budget="8GiB") choose.',
        )


def _undone(facts: Facts, found: list[regions.Found]) -> Iterator[Finding]:
    compiled, before = facts.compiled, facts.account.undone_bytes
    predicted = facts.predicted.temp_bytes
    if compiled is None or before <= 1.05 * predicted:
        return
    if 2 * compiled.temp_bytes < predicted + before:
        return
    # The prediction is not exact enough to say so; the compiler is.
    inlined = facts.compiled_inlined()
    if inlined is None or compiled.temp_bytes < 0.97 * inlined:
        return
    theirs = [f for f in found if f.eqn.primitive.name != "remat"]
    free = [f for f in found if not _prevents(f.eqn)]
    if free:
        step = "Leave out prevent_cse=False: it is for regions in the body of a loop."
    elif theirs:
        step = (
            "Use remat.checkpoint in place of jax.checkpoint, or jaxlib 0.11.1 or later: CPU "
            "compilers before it merge what jax.checkpoint recomputes with the forward pass."
        )
    else:
        step = "Report it with the versions above, please: remat.checkpoint should survive here."
    yield Finding(
        "undone_by_compiler",
        "error",
        f"The compiler undoes rematerialization: the step needs {format_bytes(compiled.temp_bytes)} of "
        f"temporaries, and {format_bytes(inlined)} with its regions written out; about "
        f"{format_bytes(predicted)} were expected.",
        step,
    )


def _prevents(eqn: _jax.JaxprEqn) -> bool:
    prevents = eqn.params.get("prevent_cse", True)
    return any(prevents) if isinstance(prevents, tuple) else bool(prevents)


def _matched_nothing(facts: Facts, found: list[regions.Found]) -> Iterator[Finding]:
    seen: list[object] = []
    for one in found:
        policy = one.policy
        if not regions.chooses(policy) or any(policy is p for p in seen):
            continue
        seen.append(policy)
        given = facts.step.undifferentiated
        bodies = list(regions.regions_with(policy, given)) if given is not None else []
        theirs = one.eqn.primitive.name != "remat"
        if bodies:
            looked_at = [
                regions.live_body(eqn) if theirs else _jax.open_jaxpr(eqn.params["jaxpr"])
                for eqn in bodies
            ]
        else:
            looked_at = [facts.step.jaxpr]
        if any(True for body in looked_at for _ in regions.matches(policy, body)):
            continue
        yield _nothing_like(policy, given if given is not None else facts.step.jaxpr, theirs)


def _nothing_like(policy: object, jaxpr: _jax.Jaxpr, theirs: bool) -> Finding:
    called = getattr(policy, "__qualname__", "") or repr(policy)
    called = called.split(".<locals>")[0]
    wanted, known = regions.names_wanted(policy), regions.names_in(jaxpr)
    discarded = [name for name in wanted if name in known]
    if not wanted:
        return Finding(
            "policy_matched_nothing",
            "error",
            f"The policy {called} saves no value of the region that it is given to: everything is "
            "recomputed.",
            "remat.print_saved_residuals shows what is saved; under vmap, matrix products have batch "
            "dimensions.",
        )
    names = ", ".join(map(repr, wanted))
    if discarded and theirs:
        where = ", ".join(f"{name!r} at {known[name]}" for name in discarded)
        return Finding(
            "policy_matched_nothing",
            "error",
            f"The policy {called} saves {names}, but the result of checkpoint_name is not used "
            f"({where}): it names a copy that nobody reads, so nothing is saved by it.",
            "Write x = checkpoint_name(x, name) and go on with that x; remat.checkpoint names x itself.",
        )
    return Finding(
        "policy_matched_nothing",
        "error",
        f"The policy {called} saves {names}, which no value of the region has: nothing is saved by it.",
        f"Write a name that checkpoint_name gives: {closest(wanted[0], known)}",
    )


def _at_once(facts: Facts, found: list[regions.Found]) -> Iterator[Finding]:
    predicted = facts.predicted.temp_bytes
    by_loops = False
    for one in found:
        again, later = regions.split(one.eqn)
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
                    f"The checkpoint is around a whole scan of {n} steps ({_jax.source_line_of(eqn)}): "
                    f"its backward pass recomputes all of them at once and holds {format_bytes(size)}, "
                    "as much as was not saved before.",
                    "Checkpoint the body of the scan in its place (remat.checkpoint(body)), or use "
                    "remat.scan with checkpoints=.",
                )
    before = facts.account.undone_bytes
    share = facts.account.recompute_flops / max(facts.account.flops, 1.0)
    if before and not by_loops and share and predicted >= 0.9 * before:
        yield Finding(
            "region_recomputed_at_once",
            "warning",
            f"What is recomputed is live all at once: {format_bytes(predicted)} of temporaries, and "
            f"{format_bytes(before)} without rematerialization, for {100 * share:.0f} % of the step's "
            "FLOPs.",
            "Checkpoint smaller parts, each layer by itself, or mark the loss with remat.auto, which "
            "recomputes it piece by piece.",
        )


def _overridden(found: list[regions.Found]) -> Iterator[Finding]:
    for one in found:
        outer, policy = one.outer, one.policy
        if outer is None or not regions.chooses(policy) or policy is outer.policy:
            continue
        while outer.outer is not None:
            outer = outer.outer
        again, _ = regions.split(outer.eqn)
        dropped = list(regions.matches(policy, _equations(again, outer.eqn), times=outer.times))
        if dropped:
            size, line = sum(m.n_bytes for m in dropped), _jax.source_line_of(outer.eqn)
            yield Finding(
                "inner_policy_overridden",
                "warning",
                f"An outer checkpoint ({line}) recomputes what the policy of a checkpoint inside it "
                f"saves: {format_bytes(size)}, {dropped[0].type} from {dropped[0].source} among it.",
                "Give the outer checkpoint that policy (remat.checkpoint passes it on to loops and "
                "calls inside), or remove one of the two.",
            )


def _equations(eqns: list[_jax.JaxprEqn], like: _jax.JaxprEqn) -> _jax.Jaxpr:
    body = _jax.open_jaxpr(like.params["jaxpr"])
    return _jax.rebuild(body, eqns=eqns, outvars=())


def _arguments(facts: Facts, found: list[regions.Found]) -> Iterator[Finding]:
    memory = facts.predicted
    fixed = memory.argument_bytes + memory.output_bytes - memory.alias_bytes
    if 2 * fixed < memory.peak_bytes or not memory.peak_bytes:
        return
    effect = max(0, facts.account.undone_bytes - memory.temp_bytes)
    unimpressive = bool(found) and effect < 0.1 * memory.peak_bytes
    yield Finding(
        "arguments_dominate",
        "warning" if unimpressive else "info",
        f"Arguments and results are {format_bytes(fixed)} of the peak of "
        f"{format_bytes(memory.peak_bytes)} ({100 * fixed / memory.peak_bytes:.0f} %), which "
        f"rematerialization cannot make smaller; temporaries are {format_bytes(memory.temp_bytes)}.",
        "Donate what the step replaces (donate_argnums), shard parameters and optimizer state over "
        "devices, or keep them in a smaller dtype.",
    )
