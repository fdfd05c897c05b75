"""What to rematerialize without a plan, and which modules save most."""

from __future__ import annotations

import re

from remat import _jax
from remat.explain.findings.budgets import cost_of_all
from remat.explain.findings.facts import Facts, at_line, saved_values
from remat.explain.findings.stacks import largest_loop
from remat.explain.sources import user_source_of
from remat.printing import with_ranges, without_numbers
from remat.program.from_jaxpr import n_bytes as n_bytes_of
from remat.report.groups import own_function
from remat.report.model import Value
from remat.units import format_bytes

# The packages whose layers modules call, and what rematerializes such a module.
_WRAPPERS = (
    ("flax/linen/", "remat.linen.remat"),
    ("flax/nnx/", "remat.nnx.remat"),
    ("equinox/", "remat.equinox.filter_checkpoint"),
    ("haiku/", "remat.haiku.remat"),
)


def by_hand(facts: Facts) -> str:
    """Return what to rematerialize without a plan, a loop, modules or layers, and what that does."""
    saved = saved_values(facts)
    most = sum(value.n_bytes for value in saved) / 2
    loop, n_bytes = largest_loop(facts.sides, at_least=most)
    if loop is not None:
        n, carry_bytes = loop.params["length"], _carry_bytes(loop)
        left = n * carry_bytes + n_bytes // n
        return (
            f"make the loop{at_line(loop)} a remat.scan, or wrap its body in remat.checkpoint, which keeps "
            f"only what iterations hand on{_effect(facts, n_bytes - left)}."
        )
    modules, of_modules = _numbered_modules(saved, at_least=most)
    if not modules:
        return f"wrap the layers in {_wrapper_of(facts, saved)}."
    n_bytes = sum(value.n_bytes for value in of_modules)
    effect = _effect(facts, n_bytes - n_bytes // len(modules))
    return f"wrap {with_ranges(modules)} in {_wrapper_of(facts, of_modules)}{effect}."


def _effect(facts: Facts, n_bytes: int) -> str:
    """Return what recomputing all in loops or modules frees and adds, as the end of a sentence."""
    if n_bytes <= 0:
        return ""
    return f": up to {format_bytes(n_bytes)} less, for up to {cost_of_all(facts)}"


def _carry_bytes(loop: _jax.JaxprEqn) -> int:
    n_carry = _jax.scan_arity(loop)[1]
    return sum(n_bytes_of(v.aval) for v in loop.outvars[:n_carry])


def _numbered_modules(saved: list[Value], *, at_least: float) -> tuple[list[str], list[Value]]:
    """Return the modules that differ in a number and save `at_least` this many bytes, and what they save."""
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


def _first_numbered(names: list[str]) -> int | None:
    return next((i for i, name in enumerate(names) if re.search(r"\d\]?$", name)), None)


def _wrapper_of(facts: Facts, saved: list[Value]) -> str:
    """Return what rematerializes the modules that compute most of these values.

    JAX leaves the frames of a framework's module calls out of tracebacks. So a method is a module's if a
    layer of the framework is called in it; with Haiku plain functions are, too.
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
