"""Which arguments a step replaces, so that results can reuse their memory if they are donated.

A result is the new value of the arguments nearest to it in elementwise operations on its shape: the
new `p` is `p - lr * m`, and the new `m` does not depend on `p`. The last carry of a loop is the new value of
its first one. Equal shapes alone prove nothing: predictions may have the shape of the batch.

Donated arguments are matched with results first. The other matches are certain if one argument is nearest to
a result, or if as many results as arguments remain. A result of the forward pass may or may not be a new
value: running averages are, `x + f(x)` need not be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from remat import _jax
from remat.explain.phases import PhasedProgram, holds_gradient
from remat.ir import jaxprs
from remat.ir.operations import Fusion, writes_into_operand

ELEMENTWISE = (Fusion.CHEAP, Fusion.COSTLY, Fusion.VIEW)
#: The most values of an update's arithmetic on one parameter that are examined; more follow longer updates.
MOST_VALUES = 64


@dataclasses.dataclass(frozen=True)
class Replaced:
    """Arguments whose new values are results, as numbers of values of the program.

    Args:
      surely: those that the step replaces.
      perhaps: those that it may replace, each with its share of a result that it may replace.
      unchanged: those that it returns as they are.
    """

    surely: tuple[int, ...]
    perhaps: Mapping[int, float]
    unchanged: tuple[int, ...]


def replaced_arguments(sides: PhasedProgram, donated: Sequence[bool]) -> Replaced:
    """Return the arguments that a step replaces and that are not donated."""
    program, inputs = sides.program, set(sides.inputs)
    matching = _Matching(sides, [v for v, d in zip(sides.inputs, donated) if d])
    matching.claim_donated()
    matching.claim_nearest()
    return Replaced(
        tuple(v for v in sides.inputs if v in matching.surely),
        {v: matching.perhaps[v] for v in sides.inputs if v in matching.perhaps},
        tuple(v for v in dict.fromkeys(program.outputs) if v in inputs),
    )


class _Matching:
    """A matching of results with arguments."""

    def __init__(self, sides: PhasedProgram, donated: Sequence[int]) -> None:
        producer = {v: i for i, op in enumerate(sides.program.ops) for v in op.results}
        self.donated = list(donated)
        self.surely: dict[int, None] = {}
        self.perhaps: dict[int, float] = {}
        self._types = sides.program.types
        self._results = [v for v in sides.program.outputs if v in producer]
        self._near = {
            at: nearest_arguments(v, sides, producer) for at, v in enumerate(self._results)
        }
        self._in_forward = {
            at for at, v in enumerate(self._results) if is_forward(producer[v], sides)
        }
        self._matched: set[int] = set()  # arguments

    def claim_donated(self) -> None:
        """Give each donated argument a result of its type, its own new value if there is one."""
        of_type: dict[str, list[int]] = {}
        for at, v in enumerate(self._results):
            of_type.setdefault(self._types[v], []).append(at)
        for fits in (self._is_only, self._is_near, self._is_nobodys, lambda at, x: True):
            for x in self.donated:
                free = of_type.get(self._types[x], [])
                found = next((at for at in free if fits(at, x)), None)
                if found is not None and x not in self._matched:
                    free.remove(found)
                    self._match(found, x)

    def _is_only(self, at: int, x: int) -> bool:
        return self._left(at) == (x,)

    def _is_near(self, at: int, x: int) -> bool:
        return x in self._near[at]

    def _is_nobodys(self, at: int, _: int) -> bool:
        return not self._left(at)

    def _left(self, at: int) -> tuple[int, ...]:
        """Return the arguments nearest to a result that are not matched with another."""
        return tuple(x for x in self._near[at] if x not in self._matched)

    def _match(self, at: int, x: int) -> None:
        del self._near[at]
        self._matched.add(x)

    def claim_nearest(self) -> None:
        """Match the other arguments with the results that they are nearest to."""
        while only := [(at, *self._left(at)) for at in self._near if len(self._left(at)) == 1]:
            for at, x in only:
                if x in self._matched:
                    continue
                if at in self._in_forward:
                    self.perhaps[x] = 1.0
                else:
                    self.surely[x] = None
                self._match(at, x)
        groups: dict[frozenset[int], list[int]] = {}
        for at in self._near:
            groups.setdefault(frozenset(self._left(at)), []).append(at)
        for among, results in groups.items():
            if len(results) >= len(among):
                self.surely.update(dict.fromkeys(among))
            else:
                self.perhaps.update(dict.fromkeys(among, len(results) / len(among)))


def is_forward(i: int, sides: PhasedProgram) -> bool:
    """Return whether an operation belongs only to the forward pass."""
    bodies = map(_jax.open_jaxpr, jaxprs.run_by(sides.eqns[i]))
    return sides.phases[i] == "forward" and not any(map(holds_gradient, bodies))


def nearest_arguments(
    result: int, sides: PhasedProgram, producer: Mapping[int, int]
) -> tuple[int, ...]:
    """Return the arguments of a result's type that are nearest to it in elementwise operations.

    Scalars are new values only if the update computes them: a loss is not the new learning rate.

    Args:
      producer: the operation that computes each value.
    """
    types = sides.program.types
    phases = ("update",) if _shape(types[result]) == "[]" else ("forward", "update")
    level, seen = [result], {result}
    while level and len(seen) < MOST_VALUES:
        made = [(v, producer[v]) for v in level if v in producer]
        before = [
            x for v, i in made if sides.phases[i] in phases for x in _predecessors(v, i, sides)
        ]
        level = [
            x
            for x in dict.fromkeys(before)
            if _shape(types[x]) == _shape(types[result]) and x not in seen
        ]
        reached = [x for x in level if x not in producer and x in sides.inputs]
        if reached:
            return tuple(x for x in reached if types[x] == types[result])
        seen.update(level)
    return ()


def _predecessors(v: int, i: int, sides: PhasedProgram) -> Sequence[int]:
    """Return the values of which an operation's result may be the next value."""
    op = sides.program.ops[i]
    if op.fusion in ELEMENTWISE:
        return op.operands
    if carried := [first for first, last in op.in_place if last == v]:
        return carried
    if writes_into_operand(op.name):
        return op.operands[:1]
    # Branches, and an update that is computed layer by layer.
    if op.name == "cond" or (op.name == "scan" and sides.phases[i] == "update"):
        return [x for x in op.operands if sides.program.types[x] == sides.program.types[v]]
    return ()


def _shape(kind: str) -> str:
    """Return the shape in a type's text: ``[8,16]`` of ``f32[8,16]``."""
    return kind[kind.find("[") :]
