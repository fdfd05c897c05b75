"""What to rematerialize without a plan, and which modules save most."""

from __future__ import annotations

import re

from remat import _jax
from remat.explain.findings.budgets import cost_of_all, lowest_budget_bytes, peak_by_part
from remat.explain.findings.facts import Facts, at_line, saved_values
from remat.explain.findings.stacks import largest_loop
from remat.explain.labels import path_of
from remat.explain.recomputation import behind
from remat.explain.sources import user_source_of
from remat.printing import with_ranges, without_numbers
from remat.program.from_jaxpr import n_bytes as n_bytes_of
from remat.report.groups import own_function
from remat.report.model import Value
from remat.units import format_bytes

# Packages with layers → the function that rematerializes modules that call them.
_WRAPPERS = (
    ("flax/linen/", "remat.linen.remat"),
    ("flax/nnx/", "remat.nnx.remat"),
    ("equinox/", "remat.equinox.filter_checkpoint"),
    ("haiku/", "remat.haiku.remat"),
)


def by_hand(facts: Facts) -> str:
    """Return what to rematerialize without a plan (a loop, modules or layers), and its effect."""
    saved = saved_values(facts)
    most = sum(value.n_bytes for value in saved) / 2
    loop, n_bytes = largest_loop(facts.sides, at_least=most)
    if loop is not None:
        n, carry_bytes = loop.params["length"], _carry_bytes(loop)
        left = n * carry_bytes + n_bytes // n
        return (
            f"make the loop{at_line(loop)} a remat.scan, or wrap its body in remat.checkpoint, which keeps "
            f"only the carries{_effect(facts, facts.predicted.peak_bytes - n_bytes + left)}."
        )
    modules, of_modules = _numbered_modules(saved, at_least=most)
    if not modules:
        return f"wrap the layers in {_wrapper_of(facts, saved)}."
    parts = [
        [value for value in of_modules if f"{value.path}/".startswith(f"{module}/")]
        for module in modules
    ]
    effect = _effect(facts, peak_by_part(facts, parts) + _handed_on_bytes(facts, modules))
    return f"wrap {with_ranges(modules)} in {_wrapper_of(facts, of_modules)}{effect}."


def _effect(facts: Facts, predicted_bytes: int) -> str:
    """Return the peak and the FLOPs if loops or modules are recomputed, as the end of a sentence.

    Args:
      predicted_bytes: the predicted peak with them recomputed. The ratio of the compiler's peak to the
        predicted one is assumed to be that of the present step.
    """
    least = lowest_budget_bytes(facts)
    factor = facts.peak_bytes / max(1, facts.predicted.peak_bytes)
    peak_bytes = int(factor * max(least, predicted_bytes))
    if peak_bytes >= facts.peak_bytes:
        return ""
    return f": a peak of about {format_bytes(peak_bytes)}, for up to {cost_of_all(facts)}"


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


def _handed_on_bytes(facts: Facts, modules: list[str]) -> int:
    """Return the bytes that modules pass to each other: checkpoints around them save these inputs."""
    program = facts.sides.program
    producer = {v: i for i, op in enumerate(program.ops) for v in op.results}
    module_of = [
        next((m for m in modules if f"{path_of(op)}/".startswith(f"{m}/")), "")
        for op in program.ops
    ]
    found = set()
    for i, (op, phase) in enumerate(zip(program.ops, facts.sides.phases)):
        if phase == "forward" and module_of[i]:
            made = {behind(v, program, producer) for v in op.operands}
            found |= {
                v
                for v in made
                if v in producer and module_of[producer[v]] not in ("", module_of[i])
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
    """Return the user's line that saves at least half of these values' bytes, as the end of a phrase."""
    sizes: dict[str, int] = {}
    for value in values:
        line = value.source.rpartition(", from ")[2].partition(" (")[0]
        sizes[line] = sizes.get(line, 0) + value.n_bytes
    whole = sum(sizes.values())
    largest = max(sizes, key=lambda line: sizes[line])
    if not largest or 2 * sizes[largest] < whole:
        return ""
    return f" at {largest}" if sizes[largest] == whole else f", most of it at {largest}"


def _part_of(value: Value) -> str:
    """Return the module that computes a value, up to the first numbered one, or the user's function."""
    names = [name for name in value.path.split("/") if name and not name.startswith("eqx.")]
    numbered = _first_numbered(names)
    if names:
        return "/".join(names[: 1 if numbered is None else numbered + 1])
    return own_function(value.source)
