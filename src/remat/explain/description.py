"""A sentence on what a step computes: its passes, its loops, its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from remat import _jax
from remat.explain.phases import PhasedProgram, is_view
from remat.explain.roles import argument_of
from remat.explain.sources import user_source_of
from remat.explain.step import ExplainedStep
from remat.report.groups import own_line
from remat.report.model import Value
from remat.units import counted, format_bytes

_MOST_LOOPS = 3  # loops that are named; more make the sentence longer
_MOST_ARGUMENTS = 4  # arguments that are named; more make the sentence longer


def description(step: ExplainedStep, sides: PhasedProgram, values: Sequence[Value]) -> str:
    """Return what a step computes, in one line.

    Args:
      sides: the program.
      values: those of the explanation.
    """
    loops = list(_loops(sides))
    n_others = sum(
        phase == "forward" and not is_view(op) and not _is_loop(eqn)
        for op, phase, eqn in zip(sides.program.ops, sides.phases, sides.eqns)
    )
    others = counted(n_others, "other operation" if loops else "operation") + _products(sides)
    parts = [*loops[:_MOST_LOOPS]]
    if len(loops) > _MOST_LOOPS:
        parts.append(counted(len(loops) - _MOST_LOOPS, "more loop"))
    forward = f"{', '.join(parts)} and {others}" if parts else others
    return f"{_kind(step, sides, values)}; forward {forward}. {_arguments(step, values)}"


# Primitives that take most of the time of a step, in words.
_PRODUCTS = {"dot_general": "matrix product", "conv_general_dilated": "convolution"}


def _products(sides: PhasedProgram) -> str:
    """Return how many products are among the operations of the forward pass, in parentheses."""
    names = [op.name for op, p in zip(sides.program.ops, sides.phases) if p == "forward"]
    found = [counted(names.count(name), said) for name, said in _PRODUCTS.items() if name in names]
    return f" ({', '.join(found)})" if found else ""


def _kind(step: ExplainedStep, sides: PhasedProgram, values: Sequence[Value]) -> str:
    if "backward" not in sides.phases:
        return "A function without a gradient"
    if step.undifferentiated is not None:
        return f"A loss with its gradient ({step.words.gradient}), without an optimizer"
    new = [v.path.removeprefix("new ") for v in values if v.kind == "output" and _is_new(v)]
    roots = list(dict.fromkeys(map(argument_of, new)))
    if roots:
        return f"A training step that updates {', '.join(roots)}"
    return "The gradient of a loss, without an optimizer"


def _is_new(value: Value) -> bool:
    return value.path.startswith("new ")


def _is_loop(eqn: _jax.JaxprEqn) -> bool:
    return eqn.primitive.name in ("scan", "while")


def _loops(sides: PhasedProgram) -> Iterator[str]:
    """Yield the loops of the forward pass in words, equal ones of one line together."""
    found: dict[tuple[str, str], int] = {}
    for eqn, phase in zip(sides.eqns, sides.phases):
        if phase == "forward" and _is_loop(eqn):
            is_scan = eqn.primitive.name == "scan"
            said = f"of {counted(eqn.params['length'], 'iteration')}" if is_scan else ""
            place = own_line(user_source_of(eqn))
            found[said, place] = found.get((said, place), 0) + 1
    for (said, place), n in found.items():
        what = "a loop" if n == 1 else f"{n} loops"
        kind = said or "of unknown length"
        yield f"{what} {kind}{f' ({place})' if place else ''}"


def _arguments(step: ExplainedStep, values: Sequence[Value]) -> str:
    sizes: dict[str, int] = {}
    arrays = [v for v in values if v.kind == "argument"]
    for value in arrays:
        root = argument_of(value.path)
        sizes[root] = sizes.get(root, 0) + value.n_bytes
    if not arrays:
        return "It reads no arguments."
    n_bytes = format_bytes(sum(sizes.values()))
    largest = sorted(sizes, key=lambda root: -sizes[root])[:_MOST_ARGUMENTS]
    named = ", ".join(f"{root} {format_bytes(sizes[root])}" for root in largest)
    more = f" and {len(sizes) - len(largest)} more" if len(sizes) > len(largest) else ""
    of = f" ({named}{more})" if len(sizes) > 1 else f" ({largest[0]})"
    return f"Arguments: {n_bytes} in {counted(len(arrays), 'array')}{of}."
