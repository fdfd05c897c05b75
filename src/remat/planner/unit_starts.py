"""Where the units of a program begin, so that a compiler keeps the order or the memory of its schedule.

A unit is a group of equations behind one optimization barrier (`rewrite`). Compilers may reorder the
equations of a unit, and those between units. So a unit of an *ordered* program has few equations, and it ends
before any order of its equations could exceed the peak of the schedule: at the peak, a product that frees a
large value stays before one that allocates another.

Compilers also compute a value once for several kernels of a unit, and store it, though the schedule does not.
Units of a *separated* program end only where that would happen. They are as large as checkpoints that people
place by hand, and let the compiler compute several sums of the same terms in one kernel.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Callable, Container, Mapping

import numpy as np

from remat import _jax
from remat.aliases import Atom
from remat.ir.equations import fills_array, fusion_of, is_fusible
from remat.ir.operations import Fusion
from remat.program.from_jaxpr import n_bytes
from remat.program.products import transposed_operands
from remat.solvers.liveness import Arrays, Ints, Liveness, liveness

# Number of stored equations in one unit of an ordered program. A larger one lets the compiler fuse more, and
# deviate more from the schedule.
_UNIT_SIZE = 4
# Share of the schedule's peak by which a unit may exceed it in the worst order. A larger one makes larger
# units near the peak.
_SLACK = 0.02
# Share of the schedule's peak. Values that take less may be stored though the schedule does not store them. A
# larger one separates fewer kernels.
_NEGLIGIBLE = 0.001

Bursts = Mapping[int, tuple[int, ...]]


def unit_starts(
    jaxpr: _jax.Jaxpr, stored: frozenset[int], bursts: Bursts
) -> dict[int, list[tuple[int, ...]]]:
    """Return where the units of an ordered program begin, and what each of them recomputes.

    Args:
      jaxpr: flat, without dead equations.
      stored: the numbers of the equations whose results are stored.
      bursts: the equations that are recomputed, by the number of the equation that is computed next.

    Returns:
      By the number of an equation, what is recomputed by each of the units that begin before it. The last
      of these units computes the equation, too.
    """
    must_begin = {*bursts, *_first_computed_again(jaxpr, stored)}
    first = min(must_begin, default=len(jaxpr.eqns))
    must_begin.update(number for number in _early(jaxpr, stored) if number < first)
    numbers = sorted(stored)
    order = [(computed, n) for n in numbers for computed in (*bursts.get(n, ()), n)]
    arrays = _stored_arrays(jaxpr, numbers)
    place = {number: at for at, number in enumerate(numbers)}
    measured = liveness(arrays, [place[computed] for computed, _ in order])
    is_elementwise = np.array([is_fusible(jaxpr.eqns[computed]) for computed, _ in order])
    live = measured.live_bytes - np.where(is_elementwise, _reused(measured), 0)
    producer = {v: number for number, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
    workspace = np.array([
        workspace_bytes(jaxpr.eqns[computed], producer, stored) for computed, _ in order
    ])  # fmt: skip
    results = arrays.bytes[measured.order]
    sizes = results + workspace
    most = (1 + _SLACK) * (live + workspace).max()
    found: dict[int, list[tuple[int, ...]]] = {}
    # Of the present unit: the number of new equations, and the bytes that it needs if it frees nothing.
    size, needed = 0, 0
    for step, (computed, number) in enumerate(order):
        is_new = computed == number
        is_full = is_new and number >= first and size == _UNIT_SIZE
        begins = number in must_begin and number not in found
        if begins or is_full or needed + sizes[step] > most:
            found.setdefault(number, []).append(())
            size, needed = 0, int(measured.live_bytes[step] - results[step])
        size, needed = size + is_new, needed + int(sizes[step])
        if not is_new:
            found[number][-1] += (computed,)
    return found


def separated_starts(
    jaxpr: _jax.Jaxpr, stored: frozenset[int], bursts: Bursts
) -> dict[int, list[tuple[int, ...]]]:
    """Return where the units of a separated program begin, and what each of them recomputes.

    A unit begins at a burst, and wherever an equation computes a value that is not stored, which an equation
    of the present unit computed before, on whose result this one depends. No kernel computes both, so without
    a barrier between them the compiler would store the value.

    Args:
      jaxpr, stored, bursts: as of `unit_starts`.

    Returns:
      As `unit_starts`. It is empty if there is nothing to separate.
    """
    numbers = sorted(stored)
    # What is recomputed, by the number of the next equation whose results are stored.
    again: dict[int, tuple[int, ...]] = {}
    for number, of_burst in sorted(bursts.items()):
        at = bisect.bisect_left(numbers, number)
        if at < len(numbers):
            again[numbers[at]] = again.get(numbers[at], ()) + of_burst
    order = [(computed, n) for n in numbers for computed in (*again.get(n, ()), n)]
    if not order:
        return {}
    arrays = _stored_arrays(jaxpr, numbers)
    place = {number: at for at, number in enumerate(numbers)}
    measured = liveness(arrays, [place[computed] for computed, _ in order])
    least = _NEGLIGIBLE * int(measured.live_bytes.max())

    def counts(eqn: _jax.JaxprEqn) -> bool:
        is_free = fusion_of(eqn) is Fusion.VIEW or fills_array(eqn)
        return not is_free and sum(n_bytes(v.aval) for v in eqn.outvars) >= least

    inside = _computed_inside(jaxpr, stored, counts)
    # Values that one equation alone computes are never computed again, unless that is recomputed.
    times = collections.Counter(v for computed, _ in order for v in inside[computed])
    shared = {n: [v for v in values if times[v] > 1] for n, values in inside.items()}
    found: dict[int, list[tuple[int, ...]]] = {}
    # Of the present unit: for each equation those that it depends on and that compute shared values, and
    # the equations that compute each value.
    before: dict[int, set[int]] = {}
    computing: dict[int, set[int]] = {}
    for computed, number in order:
        at = place[computed]
        operands = arrays.dep[arrays.start[at] : arrays.start[at + 1]].tolist()
        own = {numbers[k] for k in operands}.intersection(before)
        needed = {n for n in own if shared[n]}.union(*(before[n] for n in own))
        begins = number in again and number not in found
        values = shared[computed]
        if begins or any(not needed.isdisjoint(computing.get(v, ())) for v in values):
            found.setdefault(number, []).append(())
            before, computing, needed = {}, {}, set()
        before[computed] = needed
        for v in values:
            computing.setdefault(v, set()).add(computed)
        if computed != number:
            found[number][-1] += (computed,)
    return found


def _computed_inside(
    jaxpr: _jax.Jaxpr, stored: frozenset[int], counts: Callable[[_jax.JaxprEqn], bool]
) -> dict[int, frozenset[int]]:
    """Return for each stored equation, by number, the equations that count and that its kernel computes.

    Those that compute from the result of another one that counts are left out: whatever kernel computes them
    computes that one, so kernels that share them share that one.

    Args:
      jaxpr, stored: as of `unit_starts`.
      counts: which of the equations count whose results are not stored.
    """
    found: dict[int, frozenset[int]] = {}
    derived: dict[Atom, frozenset[int]] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        read = (derived[v] for v in eqn.invars if _jax.is_var(v) and v in derived)
        these = frozenset[int]().union(*read)
        if number in stored:
            found[number] = these
            continue
        if not these and counts(eqn):
            these = frozenset((number,))
        derived.update(dict.fromkeys(eqn.outvars, these))
    return found


def workspace_bytes(
    eqn: _jax.JaxprEqn, producer: Mapping[Atom, int], stored: Container[int]
) -> int:
    """Return the bytes that a kernel takes for operands that are not stored or that it transposes.

    Args:
      eqn: the kernel, or an elementwise equation, which takes none.
      producer: the number of the equation that computes a value; inputs have none.
      stored: the numbers of the equations whose results are stored.
    """
    if is_fusible(eqn):
        return 0
    needed = [eqn.invars[at] for at in transposed_operands(eqn)]
    computed = (v for v in eqn.invars if _jax.is_var(v) and v in producer)
    needed += [v for v in computed if producer[v] not in stored]
    return sum(n_bytes(v.aval) for v in needed)


def _first_computed_again(jaxpr: _jax.Jaxpr, stored: frozenset[int]) -> list[int]:
    """Return the first stored equation that needs a costly value which another one computed, if there is one.

    Compilers would store this value for both, if the second one were not in a unit.
    """
    seen: set[int] = set()
    inside = _computed_inside(jaxpr, stored, lambda eqn: fusion_of(eqn) is Fusion.COSTLY)
    for number, values in inside.items():
        if not seen.isdisjoint(values):
            return [number]
        seen |= values
    return []


def _reused(measured: Liveness) -> Ints:
    """Return for each step the bytes of its result if it can replace an operand that is not read again."""
    sizes = measured.arrays.bytes[measured.order]
    found = np.zeros_like(sizes)
    is_last = measured.last_use[measured.server] == measured.user
    user, server = measured.user[is_last], measured.server[is_last]
    np.maximum.at(found, user, np.where(sizes[server] >= sizes[user], sizes[user], 0))
    return found


def _stored_arrays(jaxpr: _jax.Jaxpr, numbers: list[int]) -> Arrays:
    """Return the graph of stored equations. Values that are not stored are computed by their users."""
    place = {number: at for at, number in enumerate(numbers)}
    read_through: dict[Atom, frozenset[int]] = {}  # the stored equations that a value needs
    operands: list[list[int]] = []
    sizes: list[int] = []
    for number, eqn in enumerate(jaxpr.eqns):
        read = [read_through[v] for v in eqn.invars if _jax.is_var(v) and v in read_through]
        these = frozenset[int]().union(*read)
        if number in place:
            operands.append(sorted(these))
            sizes.append(sum(n_bytes(v.aval) for v in eqn.outvars))
            these = frozenset((place[number],))
        read_through.update(dict.fromkeys(eqn.outvars, these))
    return Arrays(
        bytes=np.array(sizes, np.int64),
        time=np.zeros(len(sizes)),
        start=np.cumsum([0, *map(len, operands)]),
        dep=np.array([*itertools.chain.from_iterable(operands)], np.int64),
        once=np.zeros(len(sizes), np.bool_),
    )


def _early(jaxpr: _jax.Jaxpr, stored: frozenset[int]) -> list[int]:
    """Return the stored equations that depend on none of the `_UNIT_SIZE` stored equations before them."""
    found: list[int] = []
    place = {number: at for at, number in enumerate(sorted(stored))}
    latest: dict[Atom, int] = {}  # the place of the latest stored equation that a value depends on
    for number, eqn in enumerate(jaxpr.eqns):
        last = max((latest.get(v, -1) for v in eqn.invars if _jax.is_var(v)), default=-1)
        if number in stored:
            if place[number] - last > _UNIT_SIZE:
                found.append(number)
            last = place[number]
        latest.update(dict.fromkeys(eqn.outvars, last))
    return found
