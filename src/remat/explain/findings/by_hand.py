"""What to rematerialize without a plan, and which modules save most."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from remat import _jax
from remat.explain.calls import (
    Calls,
    body_function,
    common_function,
    definition_line,
    name_of_function,
    repeated_calls,
)
from remat.explain.findings.budgets import lowest_budget_bytes, peak_by_part
from remat.explain.findings.facts import Facts, at_line, saved_values
from remat.explain.findings.stacks import largest_loop
from remat.explain.labels import path_of
from remat.explain.phases import PhasedProgram
from remat.explain.recomputation import value_behind
from remat.explain.sources import Frame, user_frames_of, user_source_of
from remat.paths import is_own, relative
from remat.printing import with_ranges, without_numbers
from remat.program.from_jaxpr import n_bytes as n_bytes_of
from remat.report.groups import own_function, own_line
from remat.report.model import Value
from remat.units import format_bytes

# Packages with layers → the function that rematerializes modules that call them.
_WRAPPERS = (
    ("flax/linen/", "remat.linen.remat"),
    ("flax/nnx/", "remat.nnx.remat"),
    ("equinox/", "remat.equinox.filter_checkpoint"),
    ("haiku/", "remat.haiku.remat"),
)


class ByHand(NamedTuple):
    """What to rematerialize without a plan.

    Args:
      text: what to do, as the part of a sentence after "or".
      code: the lines to write.
      peak_bytes: the estimated peak; None if it is not lower or not known.
    """

    text: str
    code: str = ""
    peak_bytes: int | None = None


def by_hand(facts: Facts) -> ByHand:
    """Return what to rematerialize without a plan: the body of a loop, modules, or a function."""
    saved = saved_values(facts)
    most = sum(value.n_bytes for value in saved) / 2
    loop, n_bytes = largest_loop(facts.sides, at_least=most)
    if loop is not None:
        return _body_of(facts, loop, n_bytes)
    modules, of_modules = _numbered_modules(saved, at_least=most)
    if modules:
        return _modules(facts, modules, of_modules)
    return _function(facts, at_least=most) or ByHand(
        f"wrap the layers in {_wrapper_of(facts, saved)}."
    )


def _body_of(facts: Facts, loop: _jax.JaxprEqn, n_bytes: int) -> ByHand:
    """Return the advice to recompute the iterations of a loop that stacks so many bytes."""
    n, carry_bytes = loop.params["length"], _carry_bytes(loop)
    left = n * carry_bytes + n_bytes // n
    frame = body_function(loop)
    body = name_of_function(frame)
    named = body if body.isidentifier() else "body"
    if frame is not None and named == body and is_own(frame[0]):
        code = _decorated(frame)
    else:
        where = own_line(user_source_of(loop))
        code = f"{named} = remat.checkpoint({named})"
        code = f"# The loop at {where}:\n{code}" if where else code
    return ByHand(
        f"make the loop{at_line(loop)} a remat.scan, or wrap its body"
        f"{f' ({named})' if named == body else ''} in remat.checkpoint, which keeps only the carries.",
        code,
        _peak_with(facts, facts.predicted.peak_bytes - n_bytes + left),
    )


def _modules(facts: Facts, modules: list[str], saved: list[Value]) -> ByHand:
    """Return the advice to recompute modules that save these values."""
    parts = [
        [value for value in saved if f"{value.path}/".startswith(f"{module}/")]
        for module in modules
    ]
    numbers = _operations_of_modules(facts.sides, modules)
    handed_on = _handed_on_bytes(facts.sides, numbers)
    peak_bytes = _peak_with(facts, peak_by_part(facts, parts) + handed_on)
    eqns = [facts.sides.eqns[i] for i, part in enumerate(numbers) if part >= 0]
    wrapper, named = _wrapper_of_modules(eqns) or _wrapper_of(facts, saved), with_ranges(modules)
    # The method that computes the modules: the innermost in which all of their operations are traced.
    frame = common_function(eqns)
    names = frame[2].split(".") if frame is not None else []
    if frame is None or len(names) < 2 or names[-2] == "<locals>":
        return ByHand(f"wrap {named} in {wrapper}.", peak_bytes=peak_bytes)
    module, line = names[-2], f"{relative(frame[0])}:{frame[1]}"
    if is_own(frame[0]) or wrapper != "remat.linen.remat":
        text = f"wrap {module} ({line}), the modules {named}, in {wrapper}."
        return ByHand(text, f"# {line}\n{module} = {wrapper}({module})", peak_bytes)
    last = re.sub(r"\d+", "*", modules[0].rpartition("/")[2])
    text = (
        f"rematerialize {module} ({line}, the code of a library), the modules {named}, with remat.rematted "
        "around the call of the step."
    )
    code = f'with remat.rematted("{_glob_of(modules[0], last)}"):\n    ...  # call the step'
    return ByHand(text, code, peak_bytes)


def _glob_of(module: str, last: str) -> str:
    """Return a pattern for modules that differ in the number of the last name of their path."""
    above = module.rpartition("/")[0].rpartition("/")[2]
    return f"{above}/{last}" if last == "*" else last


def _wrapper_of_modules(eqns: Sequence[_jax.JaxprEqn]) -> str:
    """Return the function that rematerializes modules, by the package that most of them call; "" for none."""
    found: dict[str, int] = {}
    for eqn in eqns:
        files = {relative(file) for file, _, _ in user_frames_of(eqn)}
        for package, wrapper in _WRAPPERS:
            found[wrapper] = found.get(wrapper, 0) + any(f.startswith(package) for f in files)
    most = max(found, key=lambda wrapper: found[wrapper], default="")
    return most if found.get(most) else ""


def _operations_of_modules(sides: PhasedProgram, modules: list[str]) -> list[int]:
    """Return for each operation of the forward pass the number of its module; -1 for others."""
    paths = [f"{path_of(op)}/" for op in sides.program.ops]
    return [
        next((n for n, m in enumerate(modules) if path.startswith(f"{m}/")), -1)
        if phase == "forward"
        else -1
        for path, phase in zip(paths, sides.phases)
    ]


def _function(facts: Facts, *, at_least: float) -> ByHand | None:
    """Return the advice to recompute the function whose calls save so much that the peak is lowest.

    None if no function that is called several times saves `at_least` this many bytes, or the peak would stay.
    """
    account = facts.account
    best: tuple[int, Calls] | None = None
    for calls in repeated_calls(account.sides):
        call_of = {i: n for n, numbers in enumerate(calls.calls) for i in numbers}
        parts: list[list[Value]] = [[] for _ in calls.calls]
        for value, i in zip(account.values, account.producers):
            if value.kind == "saved" and i in call_of:
                parts[call_of[i]].append(value)
        if sum(value.n_bytes for part in parts for value in part) < at_least:
            continue
        of_ops = [call_of.get(i, -1) for i in range(len(account.sides.program.ops))]
        handed_on = _handed_on_bytes(account.sides, of_ops)
        peak_bytes = peak_by_part(facts, [part for part in parts if part]) + handed_on
        if best is None or peak_bytes < best[0]:
            best = peak_bytes, calls
    peak = _peak_with(facts, best[0]) if best is not None else None
    if best is None or peak is None:
        return None
    frame, n = best[1].frame, len(best[1].calls)
    eqns = [account.sides.eqns[i] for numbers in best[1].calls for i in numbers]
    what, code = _wrapped(frame, _wrapper_of_modules(eqns))
    where = f"({relative(frame[0])}:{definition_line(frame)}), which the step calls {n} times,"
    return ByHand(f"{what.format(where=where)}.", code, peak)


def _wrapped(frame: Frame, wrapper: str) -> tuple[str, str]:
    """Return what to wrap to rematerialize a function or method, with a slot for its line, and the code."""
    names, place = frame[2].split("."), f"# {relative(frame[0])}:{definition_line(frame)}"
    name = names[-1]
    if not name.isidentifier():
        return "wrap the function {where} in remat.checkpoint", ""
    if len(names) < 2 or names[-2] == "<locals>":
        return f"wrap {name} {{where}} in remat.checkpoint", _decorated(frame)
    module, wrapper = names[-2], wrapper or "remat.checkpoint"
    if wrapper == "remat.linen.remat":
        return f"wrap {module} {{where}} in {wrapper}", f"{place}\n{module} = {wrapper}({module})"
    if wrapper == "remat.equinox.filter_checkpoint":
        code = f"{place}\n{wrapper}(module)(...)  # for each {module} that is called"
        return f"call each {module} {{where}} through {wrapper}", code
    code = f"{place}\n@{wrapper}\ndef {name}(self, ...):"
    return f"decorate {module}.{name} {{where}} with {wrapper}", code


def _decorated(frame: Frame) -> str:
    place = f"{relative(frame[0])}:{definition_line(frame)}"
    return decorated(place, name_of_function(frame))


def decorated(place: str, name: str) -> str:
    """Return the code that rematerializes a function of the user, which is defined at a place."""
    return f"# {place}\n@remat.checkpoint\ndef {name}(...):"


def _peak_with(facts: Facts, predicted_bytes: int) -> int | None:
    """Return the peak if loops, modules or functions are recomputed; None if it is not lower.

    Args:
      predicted_bytes: the predicted peak with them recomputed. The ratio of the compiler's peak to the
        predicted one is assumed to be that of the present step.
    """
    least = lowest_budget_bytes(facts)
    factor = facts.peak_bytes / max(1, facts.predicted.peak_bytes)
    peak_bytes = int(factor * max(least, predicted_bytes))
    return peak_bytes if peak_bytes < facts.peak_bytes else None


def _carry_bytes(loop: _jax.JaxprEqn) -> int:
    n_carry = _jax.scan_arity(loop)[1]
    return sum(n_bytes_of(v.aval) for v in loop.outvars[:n_carry])


def _numbered_modules(saved: list[Value], *, at_least: float) -> tuple[list[str], list[Value]]:
    """Return modules that differ in a number and save `at_least` this many bytes, and their saved values."""
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
            return paths, [value for _, value in members]
    return [], []


def _handed_on_bytes(sides: PhasedProgram, part_of: Sequence[int]) -> int:
    """Return the bytes that parts pass to each other: checkpoints around them save these inputs.

    Args:
      part_of: for each operation the number of its part; -1 for none.
    """
    program = sides.program
    producer = {v: i for i, op in enumerate(program.ops) for v in op.results}
    found = set()
    for i, (op, phase) in enumerate(zip(program.ops, sides.phases)):
        if phase == "forward" and part_of[i] >= 0:
            made = {value_behind(v, program, producer) for v in op.operands}
            found |= {
                v for v in made if v in producer and part_of[producer[v]] not in (-1, part_of[i])
            }
    return sum(program.bytes[v] for v in found)


def _first_numbered(names: list[str]) -> int | None:
    return next((i for i, name in enumerate(names) if re.search(r"\d\]?$", name)), None)


def _wrapper_of(facts: Facts, saved: list[Value]) -> str:
    """Return the function that rematerializes the modules that compute most of these values.

    JAX leaves the frames of a framework's module calls out of tracebacks. So a method counts as a module's if
    it calls a layer of the framework; with Haiku plain functions count, too.
    """
    of_function: dict[str, str] = {}
    for eqn, phase in zip(facts.sides.eqns, facts.sides.phases):
        source = user_source_of(eqn) if phase == "forward" else ""
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


def largest_parts(saved: list[Value]) -> str:
    """Return the modules or functions that save most, with their bytes: at most two, of a quarter each.

    The text includes the line that saves at least half of a part's bytes.
    """
    parts: dict[str, list[Value]] = {}
    for value in saved:
        parts.setdefault(without_numbers(_part_of(value)), []).append(value)
    named = {
        with_ranges([_part_of(value) for value in values]): values
        for part, values in parts.items()
        if part
    }
    sizes = {part: sum(value.n_bytes for value in values) for part, values in named.items()}
    # Left out: the bytes of a module with submodules are only those of its own lines, which would mislead.
    sizes = {
        part: n for part, n in sizes.items() if not any(p.startswith(f"{part}/") for p in sizes)
    }
    most = sorted(sizes, key=lambda part: -sizes[part])[:2]
    whole = sum(value.n_bytes for value in saved)
    said = [
        f"{'all' if sizes[part] == whole else format_bytes(sizes[part])} in {part}{_main_line(named[part])}"
        for part in most
        if sizes[part] >= whole / 4
    ]
    return f", {' and '.join(said)}" if said else ""


def _main_line(values: list[Value]) -> str:
    """Return the user's line that saves more than half of these values' bytes, as the end of a phrase."""
    sizes: dict[str, int] = {}
    for value in values:
        line = own_line(value.source)
        sizes[line] = sizes.get(line, 0) + value.n_bytes
    whole = sum(sizes.values())
    largest = max(sizes, key=lambda line: sizes[line])
    if not largest or 2 * sizes[largest] <= whole:
        return ""
    return f" at {largest}" if sizes[largest] == whole else f", most of it at {largest}"


def _part_of(value: Value) -> str:
    """Return the module that computes a value, up to the first numbered one, or the user's function."""
    names = [name for name in value.path.split("/") if name and not name.startswith("eqx.")]
    numbered = _first_numbered(names)
    if names:
        return "/".join(names[: 1 if numbered is None else numbered + 1])
    return own_function(value.source)
