"""Gradients and new values: the argument to which a value of a step belongs.

A jaxpr does not contain this. A gradient is an array of the backward pass that the update combines,
elementwise, with an argument of the same type: a parameter. `explain.replaced` finds the arguments whose new
values are results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from remat.explain.phases import PhasedProgram
from remat.explain.replaced import ELEMENTWISE, MOST_VALUES, is_forward, nearest_arguments
from remat.explain.step import CLOSED_OVER
from remat.ir.operations import names_where
from remat.program.program import Op

_REARRANGEMENTS = names_where("is_rearrangement")


def gradients_of(sides: PhasedProgram, names: Sequence[str]) -> dict[int, str]:
    """Return the gradients that the update reads, each with its leaf of the first argument."""
    roots = {name: argument_of(name) for name in names}
    of_input = {
        v: name for v, name in zip(sides.inputs, names) if names and roots[name] == roots[names[0]]
    }
    made = {v: i for i, op in enumerate(sides.program.ops) for v in op.results}
    readers: dict[int, list[int]] = {}
    for i, op in enumerate(sides.program.ops):
        if sides.phases[i] == "update" and op.fusion in ELEMENTWISE:
            for v in op.operands:
                readers.setdefault(v, []).append(i)
    found = {}
    for v in [v for v in readers if v in made and sides.phases[made[v]] == "backward"]:
        reached = _reached(v, sides, readers)
        together = dict.fromkeys(x for op in reached for x in op.operands if x in of_input)
        same = [x for x in together if sides.program.types[x] == sides.program.types[v]]
        if len(same) == 1:
            for x in _rearranged(v, sides.program.ops, made):
                found[x] = of_input[same[0]]
    return found


def _rearranged(v: int, ops: Sequence[Op], made: Mapping[int, int]) -> list[int]:
    """Return a value and the values of which it is a transpose or conversion."""
    found = [v]
    while (i := made.get(found[-1])) is not None and ops[i].name in _REARRANGEMENTS:
        found.append(ops[i].operands[0])
    return found


def _reached(v: int, sides: PhasedProgram, readers: Mapping[int, Sequence[int]]) -> list[Op]:
    """Return the elementwise operations of the update that depend on a value, of its type."""
    program = sides.program
    waiting, seen = [v], dict[int, None]()
    while waiting and len(seen) < MOST_VALUES:
        for i in readers.get(waiting.pop(0), ()):
            if i not in seen and program.types[program.ops[i].results[0]] == program.types[v]:
                seen[i] = None
                waiting += program.ops[i].results
    return [program.ops[i] for i in seen]


def results_called(
    sides: PhasedProgram, names: Sequence[str], results: Sequence[str]
) -> tuple[str, ...]:
    """Return the name of each result: the new value of an argument, a gradient, or its place.

    A gradient has the place among the results that its argument has among the arguments: ``result[1]['w']``.

    Args:
      results: the places, such as ``result[0]``, or names that are known; one for each result, or none.
    """
    program = sides.program
    name_of = {v: name for v, name in zip(sides.inputs, names) if name != CLOSED_OVER}
    made = {v: i for i, op in enumerate(program.ops) for v in op.results}
    given = [name for name in names if name != CLOSED_OVER]
    first = [name for name in given if argument_of(name) == argument_of(given[0])]
    found = []
    for at, v in enumerate(program.outputs):
        place = results[at] if len(results) == len(program.outputs) else ""
        is_place = place.startswith("result")
        ends = [name for name in first if is_place and place.endswith(_leaf(name))]
        new = _replaced(v, sides, name_of, made) if is_place or not place else ""
        if is_place and v in made and is_forward(made[v], sides):  # `x + f(x)` need not be a new x
            new = new if _leaf(new) and place.endswith(_leaf(new)) else ""
        if ends and v in made and sides.phases[made[v]] == "backward":
            found.append(f"gradient of {max(ends, key=len)}")
        else:
            found.append(f"new {new}" if new else place)
    return tuple(found)


def _leaf(name: str) -> str:
    """Return a leaf's place in its argument: ``['w']`` of ``params['w']``."""
    return name.removeprefix(argument_of(name))


def _replaced(
    result: int, sides: PhasedProgram, name_of: Mapping[int, str], made: Mapping[int, int]
) -> str:
    """Return the argument whose new value a result is; "" for none or several."""
    nearest = nearest_arguments(result, sides, made)
    return name_of.get(nearest[0], "") if len(nearest) == 1 else ""


def argument_of(name: str) -> str:
    """Return the argument that a leaf's name begins with: ``params`` of ``params['w']``."""
    return name.partition("[")[0].partition(".")[0]
