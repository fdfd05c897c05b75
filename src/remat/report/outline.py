"""An explanation as sentences and tables, the most important first."""

from __future__ import annotations

import dataclasses
import re

from remat.report.document import Block, Chart, Code, Heading, Items, Note, Paragraph, Table
from remat.report.groups import groups, own_function
from remat.report.model import (
    ACTIONS,
    KINDS,
    SEVERITIES,
    Decision,
    ExplanationData,
    Finding,
    Kind,
    LoopPart,
    Memory,
    Option,
    PlannedLoop,
    Step,
    Totals,
    Value,
)
from remat.report.timeline import Timeline, live_at, timeline
from remat.units import counted, format_bytes, format_flops, format_seconds


def outline(
    explanation: ExplanationData,
    *,
    most: int = 20,
    brief: bool = False,
    picture_first: bool = False,
) -> list[Block]:
    """Return an explanation as blocks whose tables have at most `most` lines.

    A brief one has the findings and the peak, for one screen. With `picture_first` the chart stands
    before all tables.
    """
    line = timeline(explanation.values, explanation.steps)
    blocks: list[Block] = [Heading(explanation.title, 1)]
    blocks += [Paragraph(text) for text in (setting(explanation), explanation.description) if text]
    blocks.append(Paragraph(headline(explanation.totals, brief=brief)))
    if brief and caution(explanation.totals):
        blocks.append(Paragraph(caution(explanation.totals)))
    if explanation.decisions:
        blocks += [Heading("What the plan does"), Paragraph(plan_in_words(explanation))]
        if loops := loops_in_words(explanation):
            blocks.append(Items(loops))
        blocks.append(decisions_table(explanation, min(most, 4) if brief else most))
    if picture_first and line.peak_step is not None:
        blocks.append(Chart(line, explanation.steps))
    if not brief:
        blocks.append(memory_table(explanation.totals))
        if explanation.totals.difference:
            blocks.append(Paragraph(explanation.totals.difference))
    if explanation.findings:
        blocks += [Heading("Findings"), *notes(explanation.findings)]
    if line.peak_step is not None:
        live = live_at(explanation.values, line.peak_step)
        blocks += [
            Heading("Memory over the step"),
            *([] if picture_first else [Chart(line, explanation.steps)]),
            Paragraph(peak_in_words(explanation, line)),
            values_table(live, min(most, 5 if brief else 8)),
        ]
    if brief:
        return blocks
    if explanation.values:
        blocks += [Heading("Values"), values_table(explanation.values, most)]
    if explanation.segments:
        blocks += [Heading("Segments"), _segments_table(explanation, most)]
    if explanation.pareto:
        blocks += [Heading("Plans to choose from"), _pareto_table(explanation)]
    return blocks


def plan_in_words(explanation: ExplanationData) -> str:
    """Return sentences on a plan: its peak and budget, its costs, and what it recomputes and keeps."""
    n_bytes = {
        action: sum(d.n_bytes for d in explanation.decisions if d.action == action)
        for action in ACTIONS
    }
    totals = explanation.totals
    said = ["the plan recomputes nothing"]
    if n_bytes["recompute"]:
        said = [
            f"the plan recomputes {format_bytes(n_bytes['recompute'])} in the backward pass, for "
            f"{format_flops(totals.recompute_flops)} more "
            f"(+{percent(totals.extra_flops_share)}; +{percent(totals.extra_time_share)} time)"
        ]
    if n_bytes["offload"]:
        said.append(f"moves {format_bytes(n_bytes['offload'])} to the host's memory and back")
    said.append(f"keeps {format_bytes(n_bytes['keep'])} on the device")
    does = f"{', '.join(said[:-1])}{',' if len(said) > 2 else ''} and {said[-1]}."
    return f"{_effect_of_plan(explanation)}{does[0].upper()}{does[1:]}"


def _effect_of_plan(explanation: ExplanationData) -> str:
    """Return a sentence on the peaks without and with the plan, and on its budget."""
    plan, totals = explanation.plan, explanation.totals
    if plan is None:
        return ""
    before = plan.without_remat_bytes
    planned = plan.peak_bytes or totals.predicted.peak_bytes
    after = planned if totals.compiled is None else totals.compiled.peak_bytes
    less = f"{signed_bytes(after - before)}, {_signed_percent(after, before)}"
    spare = plan.budget_bytes - after
    budget = f"budget {format_bytes(plan.budget_bytes)} "
    budget += f"met, {format_bytes(spare)} to spare" if spare >= 0 else "not met"
    return f"Peak {format_bytes(before)} → {format_bytes(after)} ({less}); {budget}. "


def _signed_percent(after: int, before: int) -> str:
    return f"{round(100 * (after / before - 1)) if before else 0:+d} %"


def loops_in_words(explanation: ExplanationData) -> tuple[str, ...]:
    """Return for each loop that a plan changes a sentence on its iterations."""
    loops = explanation.plan.loops if explanation.plan is not None else ()
    places = [(loop.source, loop.label) for loop in loops]
    said = []
    for i, (loop, place) in enumerate(zip(loops, places)):
        n = places.count(place)
        which = f"{places[: i + 1].count(place)} of {n}" if n > 1 else ""
        said.append(_loop_in_words(loop, which))
    return tuple(said)


def _loop_in_words(loop: PlannedLoop, which: str) -> str:
    where = f" at {loop.source}" if loop.source else ""
    told = ", ".join(filter(None, (loop.label, which)))
    named = f" ({told})" if told else ""
    parts = "; ".join(_part_in_words(part, loop.length) for part in loop.parts)
    return f"The loop{where}{named}, {counted(loop.length, 'iteration')}: {parts}."


def _part_in_words(part: LoopPart, length: int) -> str:
    n = part.last - part.first + 1
    which = f"{part.first:,}–{part.last:,}" if n > 1 else f"{part.first:,}"
    said = "all" if n == length else which
    if part.group:
        groups = f"{counted(n // part.group, 'group')} of {part.group:,}"
        return (
            f"{said} are recomputed in {groups} from the carry at the start of each "
            f"({format_bytes(part.kept_bytes)} kept)"
        )
    if not part.kept:
        return f"{said} keep nothing"
    return f"{said} keep {format_bytes(part.kept_bytes)} (of each: {', '.join(part.kept)})"


def decisions_table(explanation: ExplanationData, most: int) -> Table:
    """Return the table of a plan's decisions: the largest groups of each kind."""
    rows: list[tuple[str, ...]] = []
    for action in ACTIONS:
        found = [d for d in explanation.decisions if d.action == action]
        rows += [decision_row(d) for d in found[:most]]
        if len(found) > most:
            rest = found[most:]
            n_bytes = format_bytes(sum(d.n_bytes for d in rest))
            rows.append(
                (action, n_bytes, counted(sum(d.count for d in rest), "more value"), "", "")
            )
    columns = ("plan", "bytes", "value", "type", "source")
    return Table(columns, tuple(rows), (1,), optional=(3,), below=(4, 2))


def decision_row(decision: Decision) -> tuple[str, ...]:
    """Return a decision as texts: action, bytes, value, type and source."""
    return (
        decision.action,
        format_bytes(decision.n_bytes),
        f"{decision.count:,} × {decision.value}" if decision.count > 1 else decision.value,
        decision.aval,
        places_of(decision.source, decision.value),
    )


def notes(findings: tuple[Finding, ...]) -> list[Block]:
    """Return findings as notes, the most severe first, each with the code of its options and their costs."""
    blocks: list[Block] = []
    for finding in sorted(findings, key=lambda f: SEVERITIES.index(f.severity)):
        blocks.append(Note(finding.severity, finding.message, finding.next_step))
        blocks += [Code(option.code) for option in finding.options if option.code]
        if finding.options:
            rows = tuple(map(option_row, finding.options))
            blocks.append(Table(("option", "peak", "more FLOPs"), rows, (1, 2)))
    return blocks


def option_row(option: Option) -> tuple[str, str, str]:
    """Return an option as texts: label, peak, and the FLOPs that it adds.

    >>> option_row(Option("remat.fit", "", 2**20, "at most", 0.003, 0.04))
    ('remat.fit', 'at most 1.0 MiB', '+0.3 to 4 %')
    >>> option_row(Option("by hand", "", 2**20, "about", 0.0, 0.35))
    ('by hand', 'about 1.0 MiB', 'up to +35 %')
    """
    peak = "not estimated"
    if option.peak_bytes is not None:
        exactly = option.precision == "exactly"
        peak = f"{'' if exactly else f'{option.precision} '}{format_bytes(option.peak_bytes)}"
    return option.label, peak, _extra_flops(option)


def _extra_flops(option: Option) -> str:
    low, high = option.extra_flops_share, option.most_extra_flops_share
    if low is None:
        return "not estimated"
    if not high:
        return f"+{percent(low)}" if low else ""
    if not low:
        return f"up to +{_rounded_percent(high)} %"
    return f"+{' to '.join(dict.fromkeys((_rounded_percent(low), _rounded_percent(high))))} %"


def _rounded_percent(share: float) -> str:
    return f"{100 * share:{'.0f' if share >= 0.01 else '.1g'}}"


def setting(explanation: ExplanationData) -> str:
    """Return the platform, the target and the versions that the figures are for."""
    versions = ", ".join(f"{name} {version}" for name, version in explanation.versions)
    # "cpu, bytes per device" names the platform, too.
    platform = "" if explanation.target.startswith(explanation.platform) else explanation.platform
    parts = (platform, explanation.target, versions)
    return " · ".join(text for text in parts if text)


def headline(totals: Totals, *, brief: bool = False) -> str:
    """Return one or two sentences on a step's peak and costs."""
    figure, prediction = peak_figures(totals)
    said = f"Peak {figure}"
    if totals.compiled is None:
        said += " predicted"
    else:
        said += f" compiled, {prediction}"
    bound = "at most " if totals.at_most else ""
    said += f". Step {bound}{format_seconds(totals.time_s)}, {format_flops(totals.flops)}"
    said += f" ({totals.at_most})" if totals.at_most else ""
    if totals.recompute_flops or totals.recompute_time_s:
        said += (
            f"; recomputation adds {percent(totals.extra_flops_share)} FLOPs "
            f"and {percent(totals.extra_time_share)} time"
        )
    said += "."
    if not brief and (totals.residual_bytes or totals.residual_argument_bytes):
        said += (
            f" Before fusion the backward pass reads {format_bytes(totals.residual_bytes)} that the "
            f"forward pass computes, and {format_bytes(totals.residual_argument_bytes)} of arguments."
        )
    return said


def peak_figures(totals: Totals) -> tuple[str, str]:
    """Return the peak as text, the compiler's if it is known, and the difference of the prediction.

    >>> peak_figures(Totals(Memory(115), Memory(100)))
    ('100 B', 'predicted 115 B, 15 % more')
    """
    predicted = totals.predicted.peak_bytes
    if totals.compiled is None:
        return format_bytes(predicted), "not compiled"
    compiled = totals.compiled.peak_bytes
    share = round(100 * (predicted / compiled - 1)) if compiled else 0
    differs = f", {abs(share)} % {'more' if share > 0 else 'less'}" if share else ""
    return format_bytes(compiled), f"predicted {format_bytes(predicted)}{differs}"


# Share of the compiler's peak; smaller differences of the prediction are not mentioned.
_CLOSE = 0.1


def caution(totals: Totals) -> str:
    """Return why the predicted timeline differs from the compiler's peak, if it does by a tenth or more."""
    if totals.compiled is None or not totals.difference:
        return ""
    differs = abs(totals.compiled.peak_bytes - totals.predicted.peak_bytes)
    if differs < _CLOSE * totals.compiled.peak_bytes:
        return ""
    return f"{totals.difference} The timeline and its values are the prediction."


def percent(share: float) -> str:
    """Return a share as a percentage.

    >>> percent(0.128), percent(0.0004)
    ('12.8 %', '0.04 %')
    """
    return f"{share * 100:.1f} %" if share == 0 or abs(share) >= 0.001 else f"{share * 100:.2g} %"


def signed_bytes(n_bytes: int) -> str:
    """Return a difference in bytes as text, with its sign.

    >>> signed_bytes(1024), signed_bytes(-2048), signed_bytes(0)
    ('+1.0 KiB', '-2.0 KiB', '0 B')
    """
    return ("+" if n_bytes > 0 else "") + format_bytes(n_bytes)


def memory_rows(memory: Memory) -> tuple[tuple[str, int], ...]:
    """Return the parts of memory by name, the peak first."""
    return tuple(
        (field.name.removesuffix("_bytes"), getattr(memory, field.name))
        for field in dataclasses.fields(memory)
    )


def memory_table(totals: Totals) -> Table:
    """Return the table of predicted and compiled memory."""
    predicted = memory_rows(totals.predicted)
    if totals.compiled is None:
        rows = tuple((name, format_bytes(n), "not compiled", "") for name, n in predicted)
    else:
        rows = tuple(
            (name, format_bytes(n), format_bytes(m), signed_bytes(m - n))
            for (name, n), (_, m) in zip(predicted, memory_rows(totals.compiled))
        )
    return Table(("bytes per device", "predicted", "compiled", "difference"), rows, (1, 2, 3))


def peak_in_words(explanation: ExplanationData, line: Timeline) -> str:
    """Return sentences about where in the step the peak is."""
    if line.peak_step is None:
        return "There is no timeline."
    step = explanation.steps[line.peak_step]
    place = f", at {step.source}" if step.source else ""
    kinds = _kinds_in_words(line)
    compiled = explanation.totals.compiled
    is_other = compiled and format_bytes(compiled.peak_bytes) != format_bytes(line.peak_bytes)
    live = f"{_why(explanation, line)} Live there: {kinds}. The largest:" if kinds else ""
    peak = f"{'predicted ' if is_other else ''}peak of {format_bytes(line.peak_bytes)}"
    return (
        f"The {peak} is in {place_of(explanation, line.peak_step)}"
        f"{place}: operation {line.peak_step + 1:,} of {len(explanation.steps):,}, "
        f"{format_seconds(float(line.start_s[line.peak_step]))} into the step.{live}"
    )


def _why(explanation: ExplanationData, line: Timeline) -> str:
    """Return why the peak is where it is, as a sentence after another; "" if that is not known."""
    step = line.peak_step or 0
    held = int(line.bytes_of("saved")[step])
    saved = sum(value.n_bytes for value in explanation.values if value.kind == "saved")
    fixed = int(line.bytes_of("argument")[step] + line.bytes_of("output")[step])
    again = _same_height(line)
    if 2 * fixed >= line.peak_bytes:
        return " More than half of it is arguments and results, which are there throughout."
    for kind, said in _OF_WHAT.items():
        if 2 * int(line.bytes_of(kind)[step]) >= line.peak_bytes:
            return f" More than half of it is {said}.{again}"
    if 4 * held < line.peak_bytes:
        return again
    share = f" {100 * held / saved:.0f} % of what the forward pass saves is"
    if explanation.steps[step].phase == "forward":
        return f"{share} held there, and the backward pass, which frees it, has not begun.{again}"
    if again and _stays_reserved(line):
        return (
            f"{share} still needed there. The loops' stacks stay allocated as a whole until the backward "
            f"loop has ended, also rows that are not needed any more.{again}"
        )
    return (
        f"{share} still held there: the backward pass frees it from here on, and needs memory for "
        f"gradients as well.{again}"
    )


_LATER = 0.05  # share of the step's time; a height that is reached only within it is one peak


def _same_height(line: Timeline) -> str:
    """Return how often and how long the height of the peak is reached, as a sentence after another."""
    n_times, first, last = line.same_height
    first_s, last_s = float(line.start_s[first]), float(line.start_s[last])
    if last_s - first_s <= _LATER * float(line.start_s[-1]):
        return ""
    times = f" {n_times:,} times" if n_times > 1 else ""
    between = f"from {format_seconds(first_s)} to {format_seconds(last_s)} into the step"
    return f" The same height is reached{times} {between}."


def _stays_reserved(line: Timeline) -> bool:
    """Return whether most of the last of several equal peaks is memory that loops only reserve."""
    return 2 * int(line.bytes_of("reserved")[line.same_height[2]]) >= line.peak_bytes


# Kinds of values → the reason why most of a peak may be of this kind.
_OF_WHAT: dict[Kind, str] = {
    "temporary": "temporaries, which operations there read or write",
    "gradient": "gradients, which are held until they are used",
    "recomputed": "values that the backward pass recomputes, all of them before it reads the first",
}


def _kinds_in_words(line: Timeline) -> str:
    """Return the bytes at the peak by kind, the largest first; kinds below 1 % are left out."""
    live = line.live_bytes[:, line.peak_step]
    found = sorted(zip(live.tolist(), KINDS), key=lambda pair: -pair[0])
    words = {"argument": "arguments", "gradient": "gradients", "output": "results"}
    words |= {
        "temporary": "temporaries",
        "reserved": "reserved by loops",
    }
    return ", ".join(
        f"{format_bytes(n)} {words.get(kind, kind)}"
        for n, kind in found
        if n and n >= line.peak_bytes / 100
    )


def place_of(explanation: ExplanationData, number: int) -> str:
    """Return the place of a step in the model: its module, its pass, its loop.

    >>> steps = (Step("mlp: dot", "forward"), Step("mlp: mul", "backward"), Step("mlp: add_any", "backward"))
    >>> place_of(ExplanationData("loss", steps=steps), 1)
    "the gradient of mlp, at the start of the step's backward pass"
    """
    step = explanation.steps[number]
    module = _module_of(step)
    named = f" of {module}" if module else ""
    match step.phase:
        case "forward":
            said = f"the forward pass{named}"
        case "recompute":
            said = f"the recomputation{named}"
        case "update":
            said = "the results of the step" if step.label == "results" else f"the update{named}"
        case "backward":
            said = f"the gradient{named}, {_part_of_pass(explanation.steps, number)}"
    together = ", drawn together" if "–" in step.iteration else ""
    return f"{said} ({step.iteration}{together})" if step.iteration else said


def _module_of(step: Step) -> str:
    """Return the module path of a step, or the function whose line it is."""
    path, separator, _ = step.label.rpartition(": ")
    own = own_function(step.source)
    if (
        path.startswith("eqx.") and own
    ):  # Equinox names its own layers only: the user's module says more
        return own
    if separator or "/" in step.label:
        return path or step.label
    return own


def _part_of_pass(steps: tuple[Step, ...], number: int) -> str:
    """Return the part of the whole step's backward pass, or of its module's, to which a step belongs."""
    backward = [i for i, step in enumerate(steps) if step.phase == "backward"]
    if number in (backward[0], backward[-1]) or len(backward) > 9:
        times = [max(0.0, steps[i].time_s) for i in backward]
        done = sum(t for i, t in zip(backward, times) if i < number)
        share = done / sum(times) if sum(times) else backward.index(number) / len(backward)
        if number == backward[0] or share < 0.1:
            return "at the start of the step's backward pass"
        if number == backward[-1] or share > 0.9:
            return "at the end of the step's backward pass"

    def key(i: int) -> tuple[str, str, str]:
        return steps[i].phase, _module_of(steps[i]), steps[i].iteration

    first = last = number
    while first and key(first - 1) == key(number):
        first -= 1
    while last + 1 < len(steps) and key(last + 1) == key(number):
        last += 1
    share = (number - first) / max(1, last - first)
    part = "at the start of" if share < 0.34 else "in" if share < 0.67 else "at the end of"
    return f"{part if last - first > 3 else 'in'} its backward pass"


def values_table(values: tuple[Value, ...], most: int) -> Table:
    """Return a table of values by group, the largest first; the last line sums up the groups after `most`."""
    found = groups(values)
    rows: list[tuple[str, ...]] = [
        (
            group.kind,
            format_bytes(group.n_bytes),
            group.what,
            group.aval,
            places_of(group.source, group.called),
            format_seconds(group.time_s) if group.time_s else "",
        )
        for group in found[:most]
    ]
    if len(found) > most:
        rest = found[most:]
        n_bytes = sum(group.n_bytes for group in rest)
        n_values = sum(group.count for group in rest)
        said = f"{counted(n_values, 'more value')} in {counted(len(rest), 'group')}"
        rows.append(("…", format_bytes(n_bytes), said, "", "", ""))
    columns = ("kind", "bytes", "value", "type", "source", "recompute")
    return Table(columns, tuple(rows), (1, 5), optional=(5,), below=(3, 2))


def places_of(source: str, value: str) -> str:
    """Return a source for a table, without functions if they would fill lines or the value names them.

    >>> places_of("net.py:12 (mlp)", "mlp: tanh"), places_of("net.py:12 (mlp)", "GPT/mlp: tanh")
    ('net.py:12', 'net.py:12 (mlp)')
    """
    is_named = value.startswith(f"{own_function(source)}: ")
    return re.sub(r" \([^()]*\)", "", source) if is_named or ", from " in source else source


def _segments_table(explanation: ExplanationData, most: int) -> Table:
    rows = [
        (
            f"{'  ' * segment.level}{segment.label}",
            f"{segment.first + 1}–{segment.last + 1}",
            format_bytes(segment.saved_bytes),
            format_flops(segment.recompute_flops),
        )
        for segment in explanation.segments[:most]
    ]
    if len(explanation.segments) > most:
        rest = explanation.segments[most:]
        saved = format_bytes(sum(segment.saved_bytes for segment in rest))
        flops = format_flops(sum(segment.recompute_flops for segment in rest))
        rows.append((f"{len(rest)} more", "", saved, flops))
    return Table(("segment", "forward operations", "saved", "recomputed"), tuple(rows), (1, 2, 3))


def _pareto_table(explanation: ExplanationData) -> Table:
    rows = tuple(
        (
            point.label + (" (this one)" if point.chosen else ""),
            format_bytes(point.peak_bytes),
            percent(point.extra_flops_share),
            format_seconds(point.extra_time_s),
            "compiled" if point.verified else "predicted",
        )
        for point in sorted(explanation.pareto, key=lambda p: -p.peak_bytes)
    )
    return Table(("plan", "peak", "extra FLOPs", "extra time", "peak is"), rows, (1, 2, 3))
