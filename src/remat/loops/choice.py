"""Which schedule a loop takes (`remat.scan.explain` prints it).

`choose` returns the schedule with the least recomputation for a number of checkpoints or a budget: one of
those that `scan.py` describes, or one for several levels of storage. A budget is compared with the memory
that the compiler reports for the gradient of the loop (`fitting.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from remat import _jax
from remat.errors import BudgetError, ScheduleError
from remat.loops.arguments import whole_number
from remat.loops.fitting import bookkeeping_bytes, fitted
from remat.loops.halves import Halves
from remat.loops.loop import StoredLevel
from remat.loops.mixed import reversal_with
from remat.loops.schedules import Level
from remat.loops.store import Storage, make_store
from remat.loops.times import has_symbolic_types, time_to_keep, times_of_step
from remat.loops.tracing import TracedBody, body_residual_bytes, differentiated
from remat.loops.ways import Choice, Scanned, Ways, listed, loop_of, sizes_of
from remat.units import format_bytes, parse_bytes

# States that a loop keeps if its number of steps is unknown and the user gives no number. With 64, up
# to 45,760 steps are recomputed at most three times each, and 4 million at most five times. A larger
# number keeps more and recomputes less.
DEFAULT_CHECKPOINTS = 64

# The most states that a loop of unknown length keeps within a budget, however large that is.
_MOST_SLOTS = 100_000

# (scanned, choice, of_consts) → the temporaries of the scan's gradient, in bytes; see `temporary_bytes`.
Measure: TypeAlias = Callable[[Scanned, Choice, bool], int | None]


def choose(
    scanned: Scanned,
    checkpoints: int | None,
    budget: str | int | None,
    storages: tuple[Storage, ...],
    measure: Measure,
) -> Choice:
    """Return the schedule with the least recomputation for a number of checkpoints or a budget.

    With several levels of storage, these are the capacity of the device, and the least time counts. With a
    budget and a policy, all residuals of a step are kept instead of the policy's if that takes less time.
    A budget is also compared with the result of `measure`.
    """
    checkpoints, budget, storages = _of_device(checkpoints, budget, storages)
    refuse_both(checkpoints, budget)
    n = scanned.length
    if _jax.is_symbolic(n):
        raise ScheduleError(
            f"the number of steps, {n}, is a symbolic dimension, and the schedule depends on its value. "
            "Pass a length that is a number."
        )
    halves = differentiated(scanned.traced)
    if storages:
        return _hierarchical(scanned, halves, checkpoints, budget, storages, measure)
    if checkpoints is not None:
        return _of_checkpoints(Ways(scanned, halves), checkpoints)
    if budget is None:
        return _by_default(Ways(scanned, halves))
    if halves is None or not _may_keep_all(scanned, halves):
        return _within(scanned, halves, budget, measure)
    everything = scanned.with_all_residuals()
    try:
        by_policy = _within(scanned, halves, budget, measure)
    except BudgetError:
        # The inputs that a policy keeps for recomputation may take more memory than the residuals.
        with contextlib.suppress(BudgetError):
            found = _within(everything, differentiated(everything.traced), budget, measure)
            return dataclasses.replace(found, all_residuals=True)
        raise
    return _faster_way(scanned, halves, by_policy, everything, budget, measure)


def _may_keep_all(scanned: Scanned, halves: Halves) -> bool:
    """Return whether a scan has a policy in place of which all residuals may be kept on the device."""
    if not scanned.has_policy or has_symbolic_types(scanned.traced.body):
        return False
    # A policy that offloads decides where values are kept, so it is followed.
    return all(_jax.is_in_memory(t, "device") for t in (*halves.kept, *halves.stacked))


def _faster_way(
    scanned: Scanned,
    halves: Halves,
    by_policy: Choice,
    everything: Scanned,
    budget: str | int,
    measure: Measure,
) -> Choice:
    """Return the choice by the policy, or the one that keeps all residuals if it takes less time."""
    all_halves = differentiated(everything.traced)
    if all_halves is None or body_residual_bytes(all_halves) == body_residual_bytes(halves):
        return by_policy
    try:
        with_all = _within(everything, all_halves, budget, measure)
    except BudgetError:
        return by_policy
    before = expected_steps(by_policy, scanned, halves)
    after = expected_steps(with_all, everything, all_halves)
    if after >= before:
        return by_policy
    why = (
        f"{with_all.why}; keeping all residuals of a step, instead of those of policy=, is expected to "
        f"take {after / before:.2f} of the time"
    )
    return dataclasses.replace(with_all, why=why, all_residuals=True)


def expected_steps(choice: Choice, scanned: Scanned, halves: Halves) -> float:
    """Return the time that a gradient is expected to take, in units of running a step once.

    It is the time of the steps that run again, and n times that of running and reversing a step.
    """
    body, n = scanned.traced.body, choice.n
    times = times_of_step(body, halves, len(scanned.traced.carry))
    again = choice.forward_steps - n
    if choice.kind == "binomial":
        return again + n * times.from_state
    kept = halves.kept if choice.kind == "mixed" else halves.stacked
    return again + n * (times.from_residuals + time_to_keep(body, len(kept), choice.residual_bytes))


def _of_checkpoints(ways: Ways, checkpoints: int) -> Choice:
    """Return the way with the least recomputation in the memory of `checkpoints` states."""
    checkpoints = whole_number(checkpoints, "checkpoints", 1)
    memory = f"checkpoints={checkpoints}"
    known = not _jax.is_symbolic(ways.state)
    if ways.n > 1 and known and ways.plain.kept_bytes <= checkpoints * ways.state:
        return dataclasses.replace(ways.plain, why=f"all fits the memory of {memory}")
    fewest = ways.checkpointed(checkpoints, 0, f"the fewest steps for {memory}")
    return fewest if checkpoints < ways.n else ways.or_all_states(fewest, memory)


def _by_default(ways: Ways) -> Choice:
    """Return the way of the least memory that costs at most one more sweep."""
    saves = _jax.typical(ways.nested.kept_bytes) < _jax.typical(ways.plain.kept_bytes)
    return ways.nested if saves else ways.plain


def _within(scanned: Scanned, halves: Halves | None, budget: str | int, measure: Measure) -> Choice:
    """Return the way with the least recomputation that fits a budget, by the compiler's figures.

    If none does, the way that keeps least is taken if it fits without the gradient of closed-over values,
    which may not be needed.
    """
    ways = Ways(scanned, halves, budget)
    limit = parse_bytes(budget, "budget=")

    def choose(reserved: int) -> Choice:
        found = ways.within(limit, reserved)
        assert found is not None
        return found

    # A budget that the states and residuals fit must not fail because of counters and tables.
    is_enough = limit >= ways.least_bytes

    def beyond(way: Choice, needed: int | None) -> int:
        if needed is None:
            return 0 if is_enough else ways.least_bytes - limit
        return needed - limit - (bookkeeping_bytes(way.slots) if is_enough else 0)

    def excess_bytes(way: Choice) -> int:
        return beyond(way, measure(scanned, way, True))

    most, unit = limit - ways.least_bytes, max(1, min(ways.state, limit // 16))
    found = [fitted(limit, most, unit, choose, excess_bytes)]
    if choose(min(0, most)).kind == "binomial":
        # This leaves memory for a step's residuals. The compiler may need little of it if it fuses them into
        # their readers; then there is memory for more states.

        def of_states(reserved: int) -> Choice:
            slots = max(1, (limit - reserved) // max(ways.state, 1))
            return ways.of_states_alone(slots, f"the fewest steps that fit {format_bytes(limit)}")

        most_reserved = max(0, limit - ways.state)
        found.append(fitted(limit, most_reserved, unit, of_states, excess_bytes))
    fits = [way for way in found if way is not None]
    if fits:
        return min(fits, key=lambda way: way.forward_steps)
    least = choose(most)
    needed = [measure(scanned, least, of_consts) for of_consts in (False, True)]
    smallest = min((n for n in needed if n is not None), default=None)
    if beyond(least, smallest) <= 0:
        return least
    counted = range(ways.least_bytes, ways.least_bytes + bookkeeping_bytes(least.slots) + 1)
    raise ways.refusal(limit, None if smallest in counted else smallest)


def _of_device(
    checkpoints: int | None, budget: str | int | None, storages: tuple[Storage, ...]
) -> tuple[int | None, str | int | None, tuple[Storage, ...]]:
    """Return the capacity of the device, and the slower levels of storage."""
    if any(storage.where == "device" for storage in storages[1:]):
        raise ScheduleError("the device is the fastest level of store=: list it first, and once.")
    if storages and storages[0].where == "device":
        if checkpoints is not None or budget is not None:
            raise ScheduleError(
                "store= has the capacity of the device: leave out checkpoints= and budget=."
            )
        return storages[0].checkpoints, storages[0].budget, storages[1:]
    return checkpoints, budget, storages


def _hierarchical(
    scanned: Scanned,
    halves: Halves | None,
    checkpoints: int | None,
    budget: str | int | None,
    storages: tuple[Storage, ...],
    measure: Measure,
) -> Choice:
    """Return the choice for several levels of storage, with this share of the device's memory."""
    ways = Ways(scanned, halves, budget)
    n, state, residual, stacked = ways.n, ways.state, ways.residual, ways.stacked
    if any(_jax.is_symbolic(size) for size in (state, stacked)):
        raise ScheduleError(
            "several levels of store= require arrays of known shapes, but the scan has symbolic "
            "dimensions. Pass store='host', or export with numbers."
        )
    levels = tuple(
        StoredLevel(
            Level(min(storage.slots(state), n), storage.write, storage.read),
            make_store(storage.where, storage.directory),
        )
        for storage in storages
    )
    if budget is None:
        memory = whole_number(0 if checkpoints is None else checkpoints, "checkpoints", 0) * state
    else:
        # The state at hand, its cotangent and the residuals in use are not part of the memory.
        aside = 2 * state + residual + _in_addition(ways, measure)
        memory = max(0, parse_bytes(budget, "budget=") - aside)
    if n * stacked <= memory or n <= 1:
        return dataclasses.replace(ways.plain, why="all fits the device")
    slots = min(memory // max(state, 1), n)
    spare = memory - slots * state
    loop = dataclasses.replace(loop_of(scanned, slots, memory=spare), levels=levels)
    reversal = None if halves is None else reversal_with(loop, halves)
    if reversal is None:
        raise ScheduleError(
            f"no schedule of {n} steps fits {format_bytes(memory)} of device memory and "
            f"{[stored.level.slots for stored in levels]} states in the other levels of store=, or the "
            "body has no derivative in reverse mode. Raise the capacities."
        )
    kept_bytes = reversal.layout.n_bytes(reversal.schedule)
    why = "the least time for steps and transfers"
    return Choice(
        "hierarchical", reversal.schedule, n, state, residual, kept_bytes, why, slots, spare, levels
    )


def _in_addition(ways: Ways, measure: Measure) -> int:
    """Return the bytes that a step takes beside the kept values, measured with the way that keeps least."""
    least = ways.within(ways.least_bytes)
    assert least is not None
    needed = measure(ways.scanned, least, True)
    counted = ways.least_bytes + bookkeeping_bytes(least.slots)
    return 0 if needed is None else max(0, needed - counted)


def refuse_both(checkpoints: int | None, budget: str | int | None) -> None:
    """Raise for a number of checkpoints together with a budget."""
    if checkpoints is not None and budget is not None:
        raise ScheduleError(
            f"checkpoints={checkpoints} and budget={budget!r} exclude each other. Pass one of them."
        )


def slots_of_unknown_length(
    traced: TracedBody,
    checkpoints: int | None,
    budget: str | int | None,
    default: int,
    measure: Callable[[int, bool], int | None] = lambda slots, of_consts: None,
) -> int:
    """Return how many states a loop keeps if its number of steps is unknown when it is traced.

    A budget is also compared with what `measure` returns for a number of states; see `Measure`.
    """
    refuse_both(checkpoints, budget)
    if budget is None:
        return default if checkpoints is None else whole_number(checkpoints, "checkpoints", 1)
    state, residual, _ = sizes_of(traced, differentiated(traced), budget)
    limit = parse_bytes(budget, "budget=")
    # Beside the states: the one at hand, its cotangent, and that of the last step or run.
    least = 4 * state + residual

    def slots_with(reserved: int) -> int:
        # With more slots, no loop that ends in practice would recompute less.
        return min((limit - reserved - least) // max(state, 1) + 1, _MOST_SLOTS)

    def beyond(slots: int, needed: int | None) -> int:
        if needed is None:
            return max(0, least - limit)
        return needed - limit - (bookkeeping_bytes(slots) if limit >= least else 0)

    def excess_bytes(slots: int) -> int:
        return 0 if slots == _MOST_SLOTS else beyond(slots, measure(slots, True))

    found = fitted(limit, limit - least, max(state, 1), slots_with, excess_bytes)
    if found is not None:
        return found
    needed = measure(1, False)
    if beyond(1, needed) <= 0:
        return 1
    kept = [
        f"four times a state of {format_bytes(state)} (the kept one, that of the last run, the one at hand "
        "and its cotangent)",
        f"one step's residuals of {format_bytes(residual)}",
    ]
    if needed is None or 0 <= needed - least <= bookkeeping_bytes(1):
        needed = least
    else:
        kept.append("the compiler's further temporaries")
    raise BudgetError(
        f"no schedule fits {format_bytes(limit)}; the smallest keeps {listed(kept)}: "
        f"{format_bytes(needed)} ({needed} bytes). Raise budget=, or save less in a step with policy=."
    )
