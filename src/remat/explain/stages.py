"""The stages of `remat.explain`, in order: trace, find phases, account, compile, derive findings.

The step is traced as `jax.jit` would trace it; nothing is run. Each operation gets a phase (forward,
recomputed, backward, update; the rule is in `explain.phases`), fusion is modelled, and the remaining values
get lifetimes. The compiler is asked for its own figures, and if they differ from the prediction, the text of
the compiled program shows which arrays it holds (`explain.difference`).

Known limits: shardings are those of the arguments, propagated from operands to results; only the largest
branch of a conditional is shown, and one iteration of a while loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jaxlib

from remat import _jax
from remat.aliases import PyTree
from remat.explain.account import Account, account_of
from remat.explain.decisions import explained_decisions
from remat.explain.description import description
from remat.explain.difference import difference
from remat.explain.findings import Facts, Followed, findings_of
from remat.explain.phases import PhasedProgram, phased_program
from remat.explain.planned_loops import planned_loops
from remat.explain.recomputation import counted_at_most
from remat.explain.regions import inlined
from remat.explain.roles import argument_of
from remat.explain.step import ExplainedStep, traced_step, unplanned_step
from remat.ir.equations import transparent_call
from remat.ir.jaxprs import applies, inline_calls
from remat.ir.updates import with_early_updates
from remat.program import compiled as compiling, targets
from remat.program.costs import Roofline
from remat.report.explanation import Explanation
from remat.report.model import Decision, Memory, PlanSummary, Step, Totals
from remat.report.timeline import predicted_memory
from remat.versions import own_version

_jax.exclude_from_tracebacks(__file__)


def explanation_of(
    f: Callable[..., PyTree],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
    target: str | targets.Target | None,
    compile: bool,
) -> Explanation:
    """Return the explanation of a step; the arguments are those of `remat.explain`."""
    on = targets.target(target)
    step = traced_step(f, tuple(args), dict(kwargs), on)
    plan = _plan_followed_by(f, args, kwargs)
    sides = phased_program(step.jaxpr, step.shards, partition=step.partition)
    account = _account(step, sides, on)
    predicted = predicted_memory(account.values, account.steps, alias_bytes=account.alias_bytes)
    program = compiling.compile_plainly(step.lower(), on) if compile else None
    refused = program if isinstance(program, compiling.OutOfMemory) else None
    memory = None
    if program is not None and refused is None:
        memory = _memory(compiling.memory_of(program, on))
    decisions: tuple[Decision, ...] = ()
    summary: PlanSummary | None = None
    before: Facts | None = None
    if plan is not None:
        account = _with_costs_of(plan, account, on_all_devices=any(n > 1 for n in step.shards))
        without = unplanned_step(f, tuple(args), dict(kwargs), on)
        sides_before = phased_program(without.jaxpr, without.shards, partition=without.partition)
        before = _facts(without, sides_before, on)
        decisions = explained_decisions(before.account, account)
        summary = PlanSummary(
            plan.budget_bytes,
            plan.peak_bytes,
            plan.without_remat_bytes,
            planned_loops(before.account, account),
        )
    facts = dataclasses.replace(
        _facts(step, sides, on, account),
        predicted=predicted,
        compiled=memory,
        plan=plan,
        refused=refused,
        without_plan=before,
    )
    findings = findings_of(facts)
    # JAX reports the bytes of all devices together.
    is_sharded = any(n > 1 for n in step.shards) or applies(step.jaxpr, "shard_map")
    kept = None if is_sharded else step.residuals
    return Explanation(
        title=step.title,
        platform=f"{on.device.name}{', ahead of time' if on.ahead_of_time else ''}",
        target=f"{on.name}, bytes per device" if on.n_devices > 1 else on.name,
        versions=_versions(),
        values=account.values,
        steps=account.steps,
        segments=account.segments,
        findings=findings,
        decisions=decisions,
        description=_description(facts if before is None else before),
        plan=summary,
        totals=Totals(
            predicted=predicted,
            compiled=memory,
            difference=difference(account, predicted, memory, program, on),
            residual_bytes=account.saved_bytes if kept is None else kept.saved_bytes,
            residual_argument_bytes=(
                account.saved_argument_bytes if kept is None else kept.argument_bytes
            ),
            flops=account.flops,
            recompute_flops=min(account.recompute_flops, account.flops),
            time_s=account.time_s,
            recompute_time_s=min(account.recompute_time_s, account.time_s),
            at_most=counted_at_most(step.jaxpr),
        ),
    )


def _description(facts: Facts) -> str:
    return description(facts.step, facts.sides, facts.account.values)


def _facts(
    step: ExplainedStep, sides: PhasedProgram, on: targets.Target, account: Account | None = None
) -> Facts:
    """Return the facts about a step that is not compiled."""
    account = _account(step, sides, on) if account is None else account
    return Facts(
        step,
        sides,
        account,
        predicted_memory(account.values, account.steps, alias_bytes=account.alias_bytes),
        None,
        lambda chosen: _inlined(step, on, chosen),
        functools.cache(lambda names: _predicted_donating(step, on, names)),
    )


def _account(step: ExplainedStep, sides: PhasedProgram, on: targets.Target) -> Account:
    return account_of(
        sides,
        step.names,
        step.donated,
        Roofline(on.device).seconds,
        results=step.results,
        results_from_start=on.platform != "tpu",
        duplicates=on.platform != "cpu",
    )


def _predicted_donating(step: ExplainedStep, on: targets.Target, names: frozenset[str]) -> int:
    """Return the predicted peak of a step that donates the arguments with these names, too.

    A new value in the memory of an argument frees its gradient, and compilers compute it early.
    """
    donated = tuple(
        given or argument_of(name) in names for given, name in zip(step.donated, step.names)
    )
    flat = inline_calls(step.jaxpr, transparent_call)
    alive, _ = _jax.dce(flat, [True] * len(flat.outvars), keep=[True] * len(flat.invars))
    early = with_early_updates(alive, donated)
    sides = phased_program(early, step.shards, partition=step.partition)
    account = _account(dataclasses.replace(step, donated=donated), sides, on)
    return predicted_memory(account.values, account.steps).peak_bytes


def _plan_followed_by(
    f: Callable[..., PyTree], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> Followed | None:
    """Return the plan of a step fitted by `remat.fit`; None for other functions."""
    made = getattr(f, "plans", None)
    if not isinstance(made, tuple) or not hasattr(f, "plan") or len(made) > 1:
        return None
    plan = made[0] if made else f.plan(*args, **kwargs)
    return Followed(
        plan.budget_bytes,
        plan.peak_bytes,
        plan.peak_bytes_without_remat,
        plan.flops,
        plan.extra_flops,
        plan.seconds,
        plan.extra_seconds,
    )


def _with_costs_of(plan: Followed, account: Account, *, on_all_devices: bool) -> Account:
    """Return the account with the costs that the plan states, so that both agree.

    Args:
      on_all_devices: whether the plan's FLOPs are those of several devices; an account's are of one.
    """
    whole = plan.flops + plan.extra_flops
    share = account.flops / whole if on_all_devices and whole else 1.0
    whole_s = plan.seconds + plan.extra_seconds
    # A plan without marked functions recomputes in many places, few of which are segments.
    listed = sum(segment.recompute_flops for segment in account.segments if not segment.level)
    if listed < plan.extra_flops / 2:
        steps = tuple(dataclasses.replace(step, segment=-1) for step in account.steps)
        account = dataclasses.replace(account, segments=(), steps=steps)
    return dataclasses.replace(
        account,
        flops=share * whole,
        recompute_flops=share * plan.extra_flops,
        time_s=whole_s,
        recompute_time_s=plan.extra_seconds,
        steps=_scaled(account.steps, whole_s, plan.extra_seconds),
    )


def _scaled(steps: Sequence[Step], whole_s: float, again_s: float) -> tuple[Step, ...]:
    """Return steps with other times in all and for recomputation, in the same proportions otherwise."""
    present_s = sum(step.time_s for step in steps)
    of_again = sum(step.time_s * step.recompute_share for step in steps)
    of_others = present_s - of_again
    if not of_again or not of_others:
        scale = whole_s / present_s if present_s else 0.0
        return tuple(dataclasses.replace(s, time_s=s.time_s * scale) for s in steps)
    again, others = again_s / of_again, (whole_s - again_s) / of_others
    made = []
    for step in steps:
        own_s = step.time_s * step.recompute_share
        time_s = again * own_s + others * (step.time_s - own_s)
        share = again * own_s / time_s if time_s else 0.0
        made.append(dataclasses.replace(step, time_s=time_s, recompute_share=share))
    return tuple(made)


def _versions() -> tuple[tuple[str, str], ...]:
    return (
        ("jax", jax.__version__),
        ("jaxlib", jaxlib.__version__),
        ("remat", own_version()),
    )


def _memory(memory: compiling.CompiledMemory) -> Memory:
    return Memory(
        memory.peak_bytes,
        memory.argument_bytes,
        memory.output_bytes,
        memory.temp_bytes,
        memory.alias_bytes,
    )


def _inlined(
    step: ExplainedStep, on: targets.Target, chosen: Callable[[_jax.JaxprEqn], bool]
) -> int | None:
    """Return the compiled temporary bytes with some regions inlined; None if that does not compile."""
    plain = inlined(step.jaxpr, chosen)
    lowered = jax.jit(lambda *xs: _jax.call_jaxpr(plain, xs)).lower(*step.inputs)
    memory = compiling.compile_for_analysis(lowered, on)
    return None if isinstance(memory, compiling.OutOfMemory) else memory.temp_bytes
