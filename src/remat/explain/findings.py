"""Findings: what the reader of an explanation should know, each with the next step to take.

Most are reasons why rematerialization had less effect than was hoped for. Each is found from what the
step does, not from how it is written:

    no_gradient                  nothing is differentiated
    no_regions                   nothing is rematerialized
    follows_plan                 the step follows a plan of `remat.fit`
    fitted_without_gradient      `remat.fit` was given a function that is not differentiated
    checkpointed_loop            a loop is rematerialized, so often as only running it says
    undone_by_compiler           compiled, the step needs what it needs with its regions written out
    policy_matched_nothing       no value is what a policy wants to save
    policy_name_unknown          some of a policy's names are given to nothing, others are
    does_not_fit                 the compiler refuses the step for the device
    arguments_dominate           most of the peak are arguments and results
    scan_recomputed_at_once      a region recomputes all steps of a loop before it uses the first
    region_recomputed_at_once    a region recomputes so much at once that the peak stays
    saves_as_much                what regions save is as much as what they recompute
    inner_policy_overridden      an outer region computes again what an inner policy saves
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator

from remat import _jax
from remat.errors import closest
from remat.explain import regions
from remat.explain.account import Account
from remat.explain.phases import PhasedProgram, is_view
from remat.explain.sources import source_of
from remat.explain.step import TracedStep
from remat.ir import jaxprs
from remat.ir.equations import inline_body
from remat.printing import with_ranges, without_numbers
from remat.program import compiled as compiling
from remat.program.from_jaxpr import n_bytes
from remat.report.groups import groups
from remat.report.model import Finding, Memory, Value
from remat.report.outline import own_function
from remat.report.timeline import live_at, timeline
from remat.transform import policies
from remat.units import format_bytes

# The packages whose layers modules call, and what rematerializes such a module.
_WRAPPERS = (
    ("flax/linen/", "remat.linen.remat"),
    ("flax/nnx/", "remat.nnx.remat"),
    ("equinox/", "remat.equinox.filter_checkpoint"),
    ("haiku/", "remat.haiku.remat"),
)


@dataclasses.dataclass(frozen=True)
class Followed:
    """The plan that a step follows: bytes of one device, costs by the planner's model."""

    budget_bytes: int
    peak_bytes: int | None
    without_remat_bytes: int
    flops: float
    extra_flops: float
    seconds: float
    extra_seconds: float


@dataclasses.dataclass(frozen=True, eq=False)
class Facts:
    """The facts that findings are derived from.

    Args:
      compiled: the compiler's figures, if it was asked.
      compiled_inlined: asks it for the temporaries of the step with some of its regions written out.
      plan: the plan that the step follows, if it does.
      refused: what the compiler said, if the step does not fit the device.
    """

    step: TracedStep
    sides: PhasedProgram
    account: Account
    predicted: Memory
    compiled: Memory | None
    compiled_inlined: Callable[[Callable[[_jax.JaxprEqn], bool]], int | None]
    plan: Followed | None = None
    refused: compiling.OutOfMemory | None = None

    @property
    def peak_bytes(self) -> int:
        """Return the compiler's peak, or the predicted one if it was not asked."""
        return (self.compiled or self.predicted).peak_bytes

    @property
    def fixed_bytes(self) -> int:
        """Return the bytes of arguments and results, which no plan makes smaller."""
        memory = self.compiled or self.predicted
        return memory.argument_bytes + memory.output_bytes - memory.alias_bytes


def findings_of(facts: Facts) -> tuple[Finding, ...]:
    """Return all findings about a step: of each kind at most one per policy or loop."""
    first = () if facts.refused is None else (_does_not_fit(facts, facts.refused),)
    return (*first, *_findings_of(facts))


def _findings_of(facts: Facts) -> tuple[Finding, ...]:
    if not any(step.phase == "backward" for step in facts.account.steps):
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
    loops = list(regions.checkpointed_loops(facts.step.jaxpr))
    made = [*_checkpointed_loops(loops)] if loops else []
    if facts.plan is not None:
        made += _planned(facts, facts.plan)
    elif not loops and not found:
        made += [_no_regions(facts)]
    made += [*_undone(facts, found), *_matched_nothing(facts, found)]
    if facts.plan is None:  # which regions a plan makes, and of what, is not the user's choice
        made += _at_once(facts, found)
    made += [*_overridden(found), *_arguments(facts, found)]
    return tuple(dict.fromkeys(made))


def _does_not_fit(facts: Facts, refused: compiling.OutOfMemory) -> Finding:
    fit, limit = facts.step.words.fit, refused.limit_bytes
    if facts.fixed_bytes >= limit:
        step = (
            f"No plan makes it fit: arguments and results alone are {format_bytes(facts.fixed_bytes)}. "
            f"{_smaller_arguments(facts)}"
        )
    elif not _saved(facts):
        step = f"A plan has nothing to recompute here. {_smaller_arguments(facts)}"
    elif facts.plan is not None:
        step = f"Plan it again, with a budget below {budget_text(limit)}."
    else:
        words = facts.step.words
        fitted = "step" if facts.step.undifferentiated is None else f"{words.gradient}(loss)"
        step = f"Plan it for the device: {fit}({fitted}, budget={budget_text(limit)})."
    return Finding(
        "does_not_fit",
        "error",
        f"The compiler refuses the step: it needs {format_bytes(refused.needed_bytes)} at least, and "
        f"the device has {format_bytes(limit)}. The model predicts a peak of "
        f"{format_bytes(facts.predicted.peak_bytes)}; where it is, is shown below.",
        step,
    )


def _no_regions(facts: Facts) -> Finding:
    saved = _saved(facts)
    said = (
        f"{format_bytes(sum(value.n_bytes for value in saved))} of the forward pass are kept for the "
        f"backward pass{_largest_parts(saved)}."
    )
    suggested = _suggested_share(facts)
    if facts.refused is not None and saved:  # whose finding has the budget
        step = f"Without a plan, {_by_hand(facts)}"
    elif not suggested:
        step = _little_to_gain(facts)
    else:
        of_peak = format_bytes(int(suggested / 100 * facts.peak_bytes))
        words = facts.step.words
        fitted = "step" if facts.step.undifferentiated is None else f"{words.gradient}(loss)"
        step = (
            f'{words.fit}({fitted}, budget="{suggested}%") chooses what to recompute: the peak becomes '
            f"about {of_peak}, for {_cost_of_all(facts)}. Or {_by_hand(facts)}"
        )
    if facts.step.marked:
        names = ", ".join(facts.step.marked).replace("<locals>.", "")
        return Finding(
            "no_regions",
            "info",
            f"Nothing is rematerialized yet: {names} is marked by remat.auto, which acts in a plan "
            f"only, and {said}",
            step,
        )
    return Finding(
        "no_regions",
        "info",
        f"Nothing is rematerialized: the step has no checkpointed region, and {said}",
        step,
    )


def _saved(facts: Facts) -> list[Value]:
    return [value for value in facts.account.values if value.kind == "saved"]


def _largest_parts(saved: list[Value]) -> str:
    """Return which modules or functions save most, with their bytes: at most two, of a quarter each."""
    parts: dict[str, list[Value]] = {}
    for value in saved:
        parts.setdefault(without_numbers(_part_of(value)), []).append(value)
    sizes = {
        with_ranges([_part_of(value) for value in values]): sum(value.n_bytes for value in values)
        for part, values in parts.items()
        if part
    }
    # The bytes of a module are those of its own lines, which would be taken for those of all in it.
    sizes = {
        part: n for part, n in sizes.items() if not any(p.startswith(f"{part}/") for p in sizes)
    }
    most = sorted(sizes, key=lambda part: -sizes[part])[:2]
    whole = sum(value.n_bytes for value in saved)
    said = [
        f"{'all' if sizes[part] == whole else format_bytes(sizes[part])} in {part}"
        for part in most
        if sizes[part] >= whole / 4
    ]
    return f", {' and '.join(said)}" if said else ""


def _part_of(value: Value) -> str:
    """Return the module that computes a value, up to the first numbered one, or the user's function."""
    names = [name for name in value.path.split("/") if name and not name.startswith("eqx.")]
    numbered = _first_numbered(names)
    if names:
        return "/".join(names[: 1 if numbered is None else numbered + 1])
    return own_function(value.source)


def _first_numbered(names: list[str]) -> int | None:
    return next((i for i, name in enumerate(names) if re.search(r"\d\]?$", name)), None)


def _by_hand(facts: Facts) -> str:
    """Return what to rematerialize without a plan: a loop, modules with a number, or layers."""
    saved = _saved(facts)
    most = sum(value.n_bytes for value in saved) / 2
    loop = _largest_loop(facts.sides, at_least=most)
    if loop is not None:
        return f"make the loop{_at(loop)} a remat.scan, or wrap its body in remat.checkpoint."
    modules, of_modules = _numbered_modules(saved, at_least=most)
    return f"wrap {modules or 'the layers'} in {_wrapper_of(facts, of_modules or saved)}."


def _largest_loop(sides: PhasedProgram, *, at_least: float) -> _jax.JaxprEqn | None:
    """Return the loop that stacks most bytes for the backward pass, if they are `at_least` so many."""
    read = _read_backward(sides)
    stacked: dict[_jax.JaxprEqn, int] = {}
    for op, phase, eqn in zip(sides.program.ops, sides.phases, sides.eqns):
        if phase == "forward":
            kept = {v for v, number in zip(eqn.outvars, op.results) if number in read}
            for loop, n in _stacked_bytes(eqn, kept):
                stacked[loop] = stacked.get(loop, 0) + n
    largest = max(stacked, key=lambda eqn: stacked[eqn], default=None)
    return largest if largest is not None and stacked[largest] >= at_least > 0 else None


def _read_backward(sides: PhasedProgram) -> set[int]:
    """Return the values that the backward pass reads, or recomputation in it, directly or as a view."""
    read: set[int] = set()
    for op, phase in zip(reversed(sides.program.ops), reversed(sides.phases)):
        later = phase in ("backward", "recompute")
        if later or (is_view(op) and not read.isdisjoint(op.results)):
            read.update(op.operands)
    return read


def _stacked_bytes(eqn: _jax.JaxprEqn, kept: set[_jax.Var]) -> Iterator[tuple[_jax.JaxprEqn, int]]:
    """Yield the loops that an equation runs, with the bytes that they stack of its results `kept`."""
    if eqn.primitive.name == "scan":
        stacks = eqn.outvars[_jax.scan_arity(eqn)[1] :]
        yield eqn, sum(n_bytes(v.aval) for v in stacks if v in kept)
    elif eqn.primitive.name in ("shard_map", "cond"):
        for closed in _jax.jaxprs_of(eqn):
            body = jaxprs.inline_calls(_jax.open_jaxpr(closed), inline_body)
            inner = {v for v, out in zip(body.outvars, eqn.outvars) if out in kept}
            for each in body.eqns:
                yield from _stacked_bytes(each, {v for v in inner if v in each.outvars})


def _numbered_modules(saved: list[Value], *, at_least: float) -> tuple[str, list[Value]]:
    """Return the modules that differ in a number and save `at_least` so many bytes, and what they save."""
    found: dict[str, list[tuple[str, Value]]] = {}
    for value in saved:
        names = value.path.split("/")
        numbered = _first_numbered(names)
        if numbered is not None:
            path = "/".join(names[: numbered + 1])
            found.setdefault(without_numbers(path), []).append((path, value))
    for members in found.values():
        paths = list(dict.fromkeys(path for path, _ in members))
        if len(paths) > 1 and sum(value.n_bytes for _, value in members) >= at_least:
            return with_ranges(paths), [value for _, value in members]
    return "", []


def _wrapper_of(facts: Facts, saved: list[Value]) -> str:
    """Return what rematerializes the modules that compute most of these values.

    JAX leaves the frames of a framework's module calls out of tracebacks. So a method is a module's if a
    layer of the framework is called in it; with Haiku plain functions are, too.
    """
    of_function: dict[str, str] = {}
    for eqn, phase in zip(facts.sides.eqns, facts.sides.phases):
        source = source_of(eqn) if phase == "forward" else ""
        for package, wrapper in _WRAPPERS:
            if source.startswith(package) and (package == "haiku/" or _is_method(source)):
                of_function[own_function(source)] = wrapper
    sizes: dict[str, int] = {}
    for value in saved:
        wrapper = of_function.get(own_function(value.source), "remat.checkpoint")
        sizes[wrapper] = sizes.get(wrapper, 0) + value.n_bytes
    return max(sizes, key=lambda wrapper: sizes[wrapper], default="remat.checkpoint")


def _is_method(source: str) -> bool:
    """Return whether the user's function in a source is a method, by the case of its class's name."""
    return any(name[:1].isupper() for name in source.rpartition("(")[2].split("."))


def _suggested_share(facts: Facts) -> int:
    """Return a budget in per cent of the peak that leaves half of the temporaries; 0 if none helps."""
    peak, fixed = facts.peak_bytes, facts.fixed_bytes
    if not peak:
        return 0
    aim = max((fixed + (peak - fixed) // 2) / peak, _floor_bytes(facts) / _peak_of(facts))
    share = max(50, -(-math.ceil(100 * aim) // 5) * 5)
    return share if share <= 90 else 0


def _floor_bytes(facts: Facts) -> int:
    """Return the predicted peak if saved values were live only where they are written and read last.

    What a loop in a branch stacks is written and read slice by slice, so it doesn't count at all.
    """
    sides = facts.sides
    stacks = {
        sides.program.types[number]
        for op, eqn in zip(sides.program.ops, sides.eqns)
        for number, v in zip(op.results, eqn.outvars)
        if any(n for _, n in _stacked_bytes(eqn, {v}))
    }
    needed = []
    for value in facts.account.values:
        if value.kind == "saved":
            ends = [] if value.aval in stacks else [{*lives} for lives in value.lifetimes]
            lifetimes = tuple((at, at) for steps in ends for at in sorted(steps))
            value = dataclasses.replace(value, lifetimes=lifetimes, reserved=())
        needed.append(value)
    return timeline(needed, facts.account.steps).peak_bytes


def _peak_of(facts: Facts) -> int:
    return max(1, facts.predicted.peak_bytes)


def _little_to_gain(facts: Facts) -> str:
    """Return why a plan has little to gain: what is live at the peak besides values that are saved."""
    values, steps = facts.account.values, facts.account.steps
    at = timeline(values, steps).peak_step or 0
    live = [v for v in live_at(values, at) if v.kind not in ("saved", "argument", "output")]
    if 2 * facts.fixed_bytes >= facts.peak_bytes or not live:
        return (
            "A plan has little to gain: what is live at the peak are mostly arguments and results."
        )
    n = sum(value.n_bytes for value in live)
    largest = max(groups(live), key=lambda group: group.n_bytes)
    where = f" at {largest.source}" if largest.source else ""
    return (
        f"A plan has little to gain: {format_bytes(n)} of the peak are gradients and temporaries, which "
        f"are needed there, the largest {largest.aval} ({format_bytes(largest.n_bytes)}){where}. Compute "
        "that part for a slice of the batch at a time, such as with jax.lax.map over a checkpointed "
        "function, or take a smaller batch."
    )


def _cost_of_all(facts: Facts) -> str:
    """Return the FLOPs that recomputing the whole forward pass once would add, as an upper limit."""
    sides = facts.sides
    forward = sum(op.flops for op, p in zip(sides.program.ops, sides.phases) if p == "forward")
    share = forward / facts.account.flops if facts.account.flops else 0.0
    if share > 0.9:  # the forward and the backward pass are in one loop
        return "more FLOPs"
    return f"at most {100 * share:.0f} % more FLOPs (those of the forward pass)"


def _planned(facts: Facts, plan: Followed) -> Iterator[Finding]:
    if facts.step.undifferentiated is not None:
        yield Finding(
            "fitted_without_gradient",
            "warning",
            "remat.fit was given a function that computes no gradient. By itself it saves nothing for a "
            "backward pass, so its plan has nothing to recompute.",
            "Fit the whole training step, or remat.fit(jax.value_and_grad(loss), ...).",
        )
        return
    peak = (
        "not confirmed by the compiler"
        if plan.peak_bytes is None
        else format_bytes(plan.peak_bytes)
    )
    share = plan.extra_flops / plan.flops if plan.flops else 0.0
    yield Finding(
        "follows_plan",
        "info",
        f"The step follows a plan: peak {peak}, budget {format_bytes(plan.budget_bytes)}, "
        f"{format_bytes(plan.without_remat_bytes)} without rematerialization, for {100 * share:.2g} % more "
        "FLOPs.",
        _after_plan(facts, plan, share),
    )


def _after_plan(facts: Facts, plan: Followed, share: float) -> str:
    """Return what can be done next about a step that follows a plan."""
    peak = plan.peak_bytes or facts.peak_bytes
    at_most = plan.without_remat_bytes
    if facts.refused is not None:  # whose finding has the budget
        return ""
    if 2 * facts.fixed_bytes >= peak:
        return (
            "A smaller budget gains little: most of the peak are arguments and results, see below."
        )
    if share > 0.01 and peak < 0.9 * at_most:
        between = (peak + at_most) // 2
        return (
            f"If there is room for {format_bytes(between)}, {facts.step.words.fit}(step, "
            f"budget={budget_text(between)}) recomputes less."
        )
    lower = (peak + facts.fixed_bytes) // 2
    return f"For a lower peak try {facts.step.words.fit}(step, budget={budget_text(lower)})."


def budget_text(n_bytes: int) -> str:
    """Return bytes as the text of a `budget=` of this size.

    >>> budget_text(53 * 2**20 + 1), budget_text(3 * 2**29)
    ('"53MiB"', '"1536MiB"')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= 10 * size:
            return f'"{n_bytes // size}{unit}"'
    mib, kib = n_bytes // 2**20, n_bytes // 2**10
    return f'"{mib}MiB"' if mib else f'"{kib}KiB"' if kib else f'"{n_bytes}"'


def _checkpointed_loops(loops: list[_jax.JaxprEqn]) -> Iterator[Finding]:
    for eqn in loops:
        yield Finding(
            "checkpointed_loop",
            "info",
            f"A loop{_at(eqn)} keeps some of its states and runs the steps between once more in the "
            "backward pass. How often is not in its type: FLOPs and seconds here count the body once.",
            "Set checkpoints= of the loop: more of them take more memory and repeat fewer steps.",
        )


def _at(eqn: _jax.JaxprEqn) -> str:
    line = source_of(eqn)
    return f" at {line}" if line else ""


def _undone(facts: Facts, found: list[regions.Found]) -> Iterator[Finding]:
    compiled, before = facts.compiled, facts.account.undone_bytes
    predicted = facts.predicted.temp_bytes
    if compiled is None or before <= 1.05 * predicted:
        return
    if compiled.temp_bytes < 1.15 * predicted:
        return
    # The prediction is not exact enough to tell, so the step is compiled with those regions inlined that
    # the compiler may merge; other regions stay, so that they do not hide the difference.
    outside = [f.eqn for f in found if not f.in_loop]
    exposed = [eqn for eqn in outside if _is_exposed(eqn)]
    inlined = facts.compiled_inlined(_is_exposed if exposed else lambda _: True)
    # Compilers schedule inlined code slightly differently, so a small difference proves nothing.
    if inlined is None or compiled.temp_bytes < (0.9 if exposed else 0.97) * inlined:
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
        f"temporaries, and {format_bytes(inlined)} with {which} written out; about "
        f"{format_bytes(predicted)} were expected.",
        step,
    )


def _is_exposed(eqn: _jax.JaxprEqn) -> bool:
    """Return whether a compiler may merge a region with the forward pass."""
    return eqn.primitive.name != "remat" or not _prevents(eqn)


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
        if any(map(regions.hides_names, looked_at)):
            # The forward rule of a custom derivative is traced only when it is differentiated.
            looked_at.append(facts.step.jaxpr)
        if any(True for body in looked_at for _ in regions.matches(policy, body)):
            yield from _names_unknown(facts, policy)
            continue
        known = regions.names_in(facts.step.jaxpr)
        known.update(regions.names_in(given) if given is not None else {})
        yield _nothing_like(policy, known, theirs)


def _names_unknown(facts: Facts, policy: object) -> Iterator[Finding]:
    """Return the finding on names that a JAX policy saves and the step does not have.

    Our own policies refuse unknown names unless `strict=False`.
    """
    if isinstance(policy, policies.Policy):
        return
    known = regions.names_in(facts.step.jaxpr)
    if facts.step.undifferentiated is not None:
        known.update(regions.names_in(facts.step.undifferentiated))
    wanted = regions.names_wanted(policy)
    absent = [name for name in wanted if name not in known]
    if known and absent and len(absent) < len(wanted):
        yield Finding(
            "policy_name_unknown",
            "info",
            f"The policy {_called(policy)} names {', '.join(map(repr, absent))}, but no value of the step "
            "has such a name.",
            f"If it is a slip, {closest(absent[0], known)}",
        )


def _called(policy: object) -> str:
    called = getattr(policy, "__qualname__", "") or repr(policy)
    return called.split(".<locals>")[0]


def _nothing_like(policy: object, known: dict[str, str], theirs: bool) -> Finding:
    called, wanted = _called(policy), regions.names_wanted(policy)
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
        f"Write a name that checkpoint_name gives: {closest(wanted[0], known)}"
        if known
        else f"Name what is to be saved: x = remat.checkpoint_name(x, {wanted[0]!r}).",
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
                    f"The checkpoint is around a whole scan of {n} steps{_at(eqn)}: "
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
    """Return why the peak is no lower although values are recomputed, from what is live there."""
    at = timeline(facts.account.values, facts.account.steps).peak_step or 0
    live = live_at(facts.account.values, at)
    saved, again = (sum(v.n_bytes for v in live if v.kind == k) for k in ("saved", "recomputed"))
    costs = (
        f"{format_bytes(facts.predicted.temp_bytes)} of temporaries, and "
        f"{format_bytes(facts.account.undone_bytes)} without rematerialization, for {percent:.2g} % of "
        "the step's FLOPs."
    )
    if again >= saved:
        return Finding(
            "region_recomputed_at_once",
            "warning",
            f"What is recomputed is live all at once: {costs}",
            "Checkpoint smaller parts, each layer by itself, or mark the loss with remat.auto, which "
            "recomputes it piece by piece.",
        )
    if any(regions.chooses(one.policy) for one in found):
        step = "Save less: choose a policy that saves fewer values, or none; or mark the loss with "
    else:
        step = "Put more into each region, whose inputs are saved; or mark the loss with "
    return Finding(
        "saves_as_much",
        "warning",
        f"What the regions save, {format_bytes(saved)} at the peak, is as much as what they recompute: "
        f"{costs}",
        f"{step}remat.auto, which chooses what to save.",
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
            size = sum(m.n_bytes for m in dropped)
            yield Finding(
                "inner_policy_overridden",
                "warning",
                f"An outer checkpoint{_at(outer.eqn)} recomputes what the policy of a checkpoint inside it "
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
    before = facts.account.undone_bytes  # 0 if unknown: regions in the bodies of loops
    effect = max(0, before - memory.temp_bytes)
    values = [v for v in facts.account.values if v.kind in ("argument", "output")]
    most = sorted(groups(values), key=lambda group: -group.n_bytes)[:2]
    unimpressive = bool(found) and before > 0 and effect < 0.1 * memory.peak_bytes
    yield Finding(
        "arguments_dominate",
        "warning" if unimpressive else "info",
        f"Arguments and results are {format_bytes(fixed)} of the peak of "
        f"{format_bytes(memory.peak_bytes)} ({100 * fixed / memory.peak_bytes:.0f} %), which "
        f"rematerialization cannot make smaller; temporaries are {format_bytes(memory.temp_bytes)}. "
        f"The largest: {'; '.join(f'{group.kind} {group}' for group in most)}.",
        _smaller_arguments(facts),
    )


def _smaller_arguments(facts: Facts) -> str:
    """Return how arguments and results take less memory, with the bytes that each way frees."""
    step, program = facts.step, facts.sides.program
    ways = []
    if step.undifferentiated is None:
        free = [program.types[v] for v in program.outputs]
        donatable: dict[str, int] = {}
        for v, name, donated in zip(facts.sides.inputs, step.names, step.donated):
            kind = program.types[v]
            if kind in free:
                free.remove(kind)
                if not donated:
                    root = re.split(r"[\[.]", name)[0]
                    donatable[root] = donatable.get(root, 0) + program.bytes[v]
        if sum(donatable.values()):
            names = ", ".join(name for name, n in donatable.items() if n)
            ways.append(
                f"Donate {names} (donate_argnums), which the step replaces: "
                f"{format_bytes(sum(donatable.values()))} less."
            )
    else:
        ways.append("In the training step donate what it replaces (donate_argnums).")
    ways.append(
        f"Shard parameters, optimizer state or the batch: over 2 devices up to "
        f"{format_bytes(facts.fixed_bytes // 2)} less on each. Or keep them in a smaller dtype."
    )
    return " ".join(ways)
