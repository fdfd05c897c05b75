"""Findings: conclusions for the user of an explanation, each with the next step to take.

Most are reasons why rematerialization had less effect than expected. Each is derived from the traced step,
not from its source code. The modules have one subject each:

    facts           the facts that findings are derived from
    stacks          values that loops stack for the backward pass
    budgets         which budgets to suggest, and how much a plan can gain
    by_hand         what to rematerialize without a plan
    unplanned       steps without rematerialization
    planned         steps that follow a plan
    donation        which arguments to donate
    gradients       functions without a gradient, and losses with one inside
    arguments       arguments and results, and steps that do not fit
    policies        policies that save nothing
    recomputation   recomputation that does not reduce the peak

The codes, which are for programs:

    no_gradient                  nothing is differentiated
    gradient_inside              a function with one number as its result computes a gradient itself
    no_regions                   nothing is rematerialized
    follows_plan                 the step follows a plan of `remat.fit`
    fitted_without_gradient      `remat.fit` was given a function that is not differentiated
    checkpointed_loop            a loop repeats steps; their number is known only at run time
    undone_by_compiler           the compiled step needs as much memory as without its regions
    policy_matched_nothing       a policy selects no value of its region
    policy_name_unknown          no value has some of the names in a policy
    does_not_fit                 the step does not fit the device, according to the compiler
    arguments_dominate           most of the peak are arguments and results
    arguments_not_donated        arguments that the step replaces, or may replace, are not donated
    scan_recomputed_at_once      a region recomputes all steps of a loop before it uses the first
    region_recomputed_at_once    a region recomputes so much at once that the peak stays
    saves_as_much                regions save as many bytes as they recompute
    has_regions                  the step rematerializes: what its peak consists of, if no other finding does
    inner_policy_overridden      an outer region recomputes values that an inner policy saves
"""

from __future__ import annotations

from remat.explain import regions
from remat.explain.findings.arguments import arguments_of, does_not_fit
from remat.explain.findings.facts import Facts as Facts, Followed as Followed
from remat.explain.findings.gradients import gradient_inside, no_gradient
from remat.explain.findings.planned import follows_plan
from remat.explain.findings.policies import matched_nothing
from remat.explain.findings.recomputation import (
    at_once,
    checkpointed_loops,
    has_regions,
    overridden,
    undone,
)
from remat.explain.findings.unplanned import no_regions
from remat.report.model import Finding


def findings_of(facts: Facts) -> tuple[Finding, ...]:
    """Return all findings about a step: of each kind at most one per policy or loop."""
    first = () if facts.refused is None else (does_not_fit(facts, facts.refused),)
    return (*first, *_findings_of(facts))


def _findings_of(facts: Facts) -> tuple[Finding, ...]:
    if not any(step.phase == "backward" for step in facts.account.steps):
        return (no_gradient(facts),)
    found = list(regions.all_regions(facts.step.jaxpr))
    loops = list(regions.checkpointed_loops(facts.step.jaxpr))
    made = [*gradient_inside(facts)]
    made += checkpointed_loops(loops)
    if facts.plan is not None:
        made += follows_plan(facts, facts.plan)
    elif not loops and not found:
        made += [no_regions(facts)]
    made += [*undone(facts, found), *matched_nothing(facts, found)]
    if facts.plan is None:  # the regions that a plan makes are not the user's choice
        made += at_once(facts, found)
        if (found or loops) and facts.refused is None and not any(map(_is_advice, made)):
            made += [has_regions(facts)]
    made += [*overridden(found), *arguments_of(facts, found)]
    return tuple(dict.fromkeys(made))


def _is_advice(finding: Finding) -> bool:
    """Return whether a finding says how to lower the peak; one on a loop's own options is not enough."""
    return bool(finding.next_step) and finding.code != "checkpointed_loop"
