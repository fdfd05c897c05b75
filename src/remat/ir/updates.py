"""Updates of donated arguments, moved from the end of a step to where their operands are ready.

An optimizer is written after the gradient of the whole step, so a step computes all updates at its end and
keeps all gradients until then. The update of a donated argument reuses that argument's buffer: computed as
soon as its gradient is ready, it takes no memory, and the gradient can be freed.

The operations that move are *updates*: operations that are fused into loops, reductions and random numbers,
if they lead only to results in the buffers of donated arguments, or to values of a few bytes, such as norms
and metrics. Updates that share values that are not small move together, to the place after which

* all values that they read have been computed,
* only updates read the values and the donated arguments that they read.

Equations before that place stay. Small values that updates need, such as a learning rate that depends on the
number of the step, are computed as soon as possible. The equations that do not move keep their order.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence

from remat import _jax
from remat.ir.equations import fusion_of, has_effects
from remat.ir.operations import FUSIBLE, Fusion, operation

# Bytes up to which keeping a value costs nothing: a number, a key, a flag. With a larger limit, updates that
# share only a small array move independently.
_SMALL_BYTES = 64


def with_early_updates(jaxpr: _jax.Jaxpr, donated: Sequence[bool]) -> _jax.Jaxpr:
    """Return a program that updates its donated arguments as soon as possible.

    Args:
      jaxpr: flat, without dead equations.
      donated: for each of its inputs, whether a result may reuse its buffer.
    """
    given = [v for v, is_so in zip(jaxpr.invars, donated, strict=True) if is_so]
    in_place = _in_place(jaxpr, given)
    if not in_place:
        return jaxpr
    order = _Moving(jaxpr, set(given), in_place).order()
    if order == list(range(len(order))):
        return jaxpr
    return _jax.rebuild(jaxpr, eqns=[jaxpr.eqns[number] for number in order])


def _in_place(jaxpr: _jax.Jaxpr, given: Iterable[_jax.Var]) -> set[_jax.Var]:
    """Return the results that reuse a donated argument's buffer: the first ones of its type."""
    free = collections.Counter(_type_of(v) for v in given)
    found = set()
    for v in jaxpr.outvars:
        if _jax.is_var(v) and free[_type_of(v)]:
            free[_type_of(v)] -= 1
            found.add(v)
    return found.difference(jaxpr.invars)


def _type_of(v: _jax.Var) -> tuple[object, object]:
    return getattr(v.aval, "shape", None), getattr(v.aval, "dtype", v.aval)


class _Moving:
    """Computes where the equations of a program move.

    Args:
      jaxpr: the program.
      donated: its inputs whose memory may be written.
      in_place: the results that are written there.
    """

    def __init__(self, jaxpr: _jax.Jaxpr, donated: set[_jax.Var], in_place: set[_jax.Var]) -> None:
        self.eqns = jaxpr.eqns
        self.donated = donated
        self.producer = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.readers: dict[_jax.Var, list[int]] = {}
        for number, eqn in enumerate(self.eqns):
            for v in _operands(eqn):
                self.readers.setdefault(v, []).append(number)
        self.is_update = self._updates(in_place, set(filter(_jax.is_var, jaxpr.outvars)))
        self.group = self._groups()

    def order(self) -> list[int]:
        """Return the numbers of the equations in their new order."""
        earliest = self._earliest()

        def place(number: int) -> int:
            return min(number, earliest[self.group[number]]) if self.is_update[number] else number

        # Operands of an update that moves have lower places, or the same one and lower numbers.
        return sorted(range(len(self.eqns)), key=lambda number: (place(number), number))

    def _updates(self, in_place: set[_jax.Var], results: set[_jax.Var]) -> list[bool]:
        found = [False] * len(self.eqns)

        def is_read_by_updates(v: _jax.Var) -> bool:
            return v not in results and all(found[reader] for reader in self.readers.get(v, ()))

        for number in reversed(range(len(self.eqns))):
            eqn = self.eqns[number]
            if has_effects(eqn):
                continue
            if _is_simple(eqn):
                found[number] = all(
                    _is_small(v) or v in in_place or is_read_by_updates(v) for v in eqn.outvars
                )
            elif all(map(_is_small, (*_operands(eqn), *eqn.outvars))):
                found[number] = any(
                    found[reader] for v in eqn.outvars for reader in self.readers.get(v, ())
                )
        return found

    def _groups(self) -> list[int]:
        """Return for each equation the number of an equation with which it moves."""
        parent = list(range(len(self.eqns)))

        def root(number: int) -> int:
            while parent[number] != number:
                parent[number] = parent[parent[number]]
                number = parent[number]
            return number

        for v, readers in self.readers.items():
            if _is_small(v):
                continue
            together = [reader for reader in readers if self.is_update[reader]]
            made = self.producer.get(v)
            if made is None:
                together = together if v in self.donated else []
            elif not self.is_update[made] or _is_spread(self.eqns[made]):
                together = []
            else:
                together.append(made)
            for number in together[1:]:
                parent[root(number)] = root(together[0])
        return [root(number) for number in parent]

    def _earliest(self) -> dict[int, int]:
        """Return for each group of updates the number of the equation after which it may be computed."""
        updates = [number for number, is_so in enumerate(self.is_update) if is_so]
        found = {self.group[number]: -1 for number in updates}
        for number in updates:
            for v in _operands(self.eqns[number]):
                found[self.group[number]] = max(found[self.group[number]], self._last_read(v))
        is_final = False
        while not is_final:
            is_final = True
            for number in updates:
                own = self.group[number]
                for v in _operands(self.eqns[number]):
                    made = self.producer.get(v, -1)
                    if made >= 0 and self.is_update[made]:
                        made = min(made, found[self.group[made]])
                    if made > found[own]:
                        found[own] = made
                        is_final = False
        return found

    def _last_read(self, v: _jax.Var) -> int:
        """Return the last equation other than updates that reads a value that updates free or overwrite."""
        made = self.producer.get(v)
        stays = v not in self.donated if made is None else self.is_update[made]
        if stays or _is_small(v):
            return -1
        return max((r for r in self.readers.get(v, ()) if not self.is_update[r]), default=-1)


def _operands(eqn: _jax.JaxprEqn) -> list[_jax.Var]:
    return [v for v in eqn.invars if _jax.is_var(v)]


def _is_simple(eqn: _jax.JaxprEqn) -> bool:
    """Return whether an equation may be a part of an update."""
    if eqn.primitive.name == "optimization_barrier":
        return False
    row = operation(eqn.primitive.name)
    fusion = fusion_of(eqn)
    return fusion in FUSIBLE or fusion is Fusion.REDUCE or (row is not None and row.is_random)


def _is_spread(eqn: _jax.JaxprEqn) -> bool:
    """Return whether an equation makes an array from small values, as each kernel does for itself."""
    return fusion_of(eqn) in FUSIBLE and all(map(_is_small, _operands(eqn)))


def _is_small(v: _jax.Var) -> bool:
    if _jax.is_dropped(v):
        return True
    shape, dtype = getattr(v.aval, "shape", None), getattr(v.aval, "dtype", None)
    if shape is None or dtype is None:
        return False
    return math.prod(shape) * getattr(dtype, "itemsize", 8) <= _SMALL_BYTES
