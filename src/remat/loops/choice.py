"""Which schedule a loop takes, and what that costs (`Choice`, printed by `remat.scan.explain`).

`choose` takes the schedule with the least recomputation for a number of checkpoints or a budget: one of
those that `scan.py` describes, or one for several levels of storage.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from remat import _jax
from remat.aliases import Arrays, Size
from remat.errors import BudgetError, ScheduleError
from remat.ir import jaxprs
from remat.ir.equations import is_region
from remat.loops.arguments import whole_number
from remat.loops.halves import Halves
from remat.loops.loop import Loop, StoredLevel
from remat.loops.mixed import plan_with
from remat.loops.schedules import Binomial, Hierarchical, Level, Mixed, Multilevel
from remat.loops.sizes import n_bytes, worst_case
from remat.loops.store import DEVICE, Storage, Store, make_store
from remat.loops.times import has_symbolic_types, time_to_keep, times_of_step
from remat.loops.tracing import Traced, differentiated, residual_bytes, stacked_bytes
from remat.units import format_bytes, parse_bytes

# States that a loop keeps if its number of steps is unknown and the user gives no number. With 64, up
# to 45,760 steps are recomputed at most three times each, and 4 million at most five times. A larger
# number keeps more and recomputes less.
DEFAULT_CHECKPOINTS = 64


class Scanned(NamedTuple):
    """A traced scan: its body, the arrays that it scans over, and its options.

    With `has_policy`, the body is a region with a policy.
    """

    traced: Traced
    xs: Arrays
    length: Size
    reverse: bool
    unroll: int | bool
    has_policy: bool = False

    def with_all_residuals(self) -> Scanned:
        """Return the scan without its policy. Regions that the user's body makes stay."""
        body = self.traced.body
        bodies = {id(eqn): eqn.params["jaxpr"] for eqn in body.eqns if is_region(eqn)}
        written_out = jaxprs.inline_calls(body, lambda eqn: bodies.get(id(eqn)))
        return self._replace(traced=self.traced._replace(body=written_out), has_policy=False)


@dataclass(frozen=True)
class Choice:
    """The schedule by which a scan is reversed.

    Attributes:
      kind: "plain" keeps the residuals of all steps; for "nested" and "binomial" see the module.
      schedule: the schedule with its exact costs; None for "plain".
      n: the number of steps.
      state_bytes: bytes of one carry. All bytes are expressions where shapes are symbolic.
      residual_bytes: bytes of one step's residuals, without inputs of the scan.
      kept_bytes: bytes that are kept at the peak of the backward pass.
      why: the reason for the choice, in words.
      slots: of "mixed" and "binomial": how many states there is memory for.
      spare_bytes: the bytes that there are beside these; a mixed schedule uses them, too.
      levels: the slower levels of storage, of "hierarchical".
      all_residuals: whether all residuals of a step are kept, and not those of `policy=`, with which the
        budget would be met in more time.
    """

    kind: Literal["plain", "nested", "mixed", "binomial", "hierarchical"]
    schedule: Multilevel | Mixed | Binomial | Hierarchical | None
    n: int
    state_bytes: Size
    residual_bytes: Size
    kept_bytes: Size
    why: str
    slots: int = 0
    spare_bytes: int = 0
    levels: tuple[StoredLevel, ...] = ()
    all_residuals: bool = False

    @property
    def forward_steps(self) -> int:
        """Return how often a gradient evaluates the body, including once in each reversed step."""
        if self.schedule is None:
            return self.n
        # A file is filled in the backward pass, which runs the loop once more.
        again = self.n if any(stored.store.one_pass for stored in self.levels) else 0
        return self.schedule.grad_forward_steps + again

    def __repr__(self) -> str:
        return f"Choice({str(self).splitlines()[0]}, keeps {format_bytes(self.kept_bytes)})"

    def __str__(self) -> str:
        head = f"plain: {self.n} steps, nothing recomputed"
        kept = f"{self.n} steps' residuals of {format_bytes(self.residual_bytes)}"
        if isinstance(self.schedule, Multilevel):
            head = str(self.schedule)
            kept = (
                f"{self.schedule.peak_slots} states of {format_bytes(self.state_bytes)}, "
                f"{self.schedule.peak_residuals} steps' residuals of "
                f"{format_bytes(self.residual_bytes)}"
            )
        elif isinstance(self.schedule, Mixed | Hierarchical):
            head = str(self.schedule)
            kept = (
                f"states of {format_bytes(self.state_bytes)} and steps' residuals of "
                f"{format_bytes(self.residual_bytes)}"
            )
        elif isinstance(self.schedule, Binomial):
            head = str(self.schedule)
            kept = f"{self.schedule.slots + 1} states of {format_bytes(self.state_bytes)}"
        return (
            f"{head}\nkept for the backward pass: {format_bytes(self.kept_bytes)} = {kept}\n"
            f"why: {self.why}"
        )


# Choosing


def choose(
    scanned: Scanned,
    checkpoints: int | None,
    budget: str | int | None,
    storages: tuple[Storage, ...] = (),
) -> Choice:
    """Return the schedule with the least recomputation for a number of checkpoints or a budget.

    With several levels of storage, these are the capacity of the device, and the least time counts. With a
    budget and a policy, all residuals of a step are kept instead of the policy's if that takes less time.
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
    if halves is None or budget is None or storages or not _may_keep_all(scanned, halves):
        return _choose(scanned, halves, checkpoints, budget, storages)
    everything = scanned.with_all_residuals()
    try:
        by_policy = _choose(scanned, halves, None, budget, ())
    except BudgetError:
        # The inputs that a policy keeps for recomputation may be larger than the residuals.
        with contextlib.suppress(BudgetError):
            found = _choose(everything, differentiated(everything.traced), None, budget, ())
            return dataclasses.replace(found, all_residuals=True)
        raise
    return _faster_way(scanned, halves, by_policy, everything, budget)


def _may_keep_all(scanned: Scanned, halves: Halves) -> bool:
    """Return whether a scan has a policy in place of which all residuals may be kept on the device."""
    if not scanned.has_policy or has_symbolic_types(scanned.traced.body):
        return False
    # A policy that offloads says where values are to be.
    return all(_jax.is_in_memory(t, "device") for t in (*halves.kept, *halves.stacked))


def _faster_way(
    scanned: Scanned, halves: Halves, by_policy: Choice, everything: Scanned, budget: str | int
) -> Choice:
    """Return the choice by the policy, or the one that keeps all residuals if it takes less time."""
    all_halves = differentiated(everything.traced)
    if all_halves is None or residual_bytes(all_halves) == residual_bytes(halves):
        return by_policy
    try:
        with_all = _choose(everything, all_halves, None, budget, ())
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

    It is that of the steps that are run again, and n times that of running a step and reversing it.
    """
    body, n = scanned.traced.body, choice.n
    times = times_of_step(body, halves, len(scanned.traced.carry))
    again = choice.forward_steps - n
    if choice.kind == "binomial":
        return again + n * times.from_state
    kept = halves.kept if choice.kind == "mixed" else halves.stacked
    return again + n * (times.from_residuals + time_to_keep(body, len(kept), choice.residual_bytes))


def _choose(
    scanned: Scanned,
    halves: Halves | None,
    checkpoints: int | None,
    budget: str | int | None,
    storages: tuple[Storage, ...],
) -> Choice:
    """Return the schedule with the least recomputation of steps whose halves are given."""
    n = scanned.length
    state, residual, stacked = _sizes(scanned.traced, halves, budget)

    def choice(
        kind: Any, schedule: Any, kept_bytes: Size, why: str, slots: int = 0, spare: int = 0
    ) -> Choice:
        of_step = stacked if kind in ("plain", "nested") else residual
        return Choice(kind, schedule, n, state, of_step, kept_bytes, why, slots, spare)

    def checkpointed(slots: int, spare: int, why: str) -> Choice:
        """Return the choice in which states and residuals share `spare` bytes and those of `slots` states."""
        if slots > max(n, 1) and not _jax.is_symbolic(state):
            # A loop of n steps has no more states.
            slots, spare = max(n, 1), spare + (slots - max(n, 1)) * state
        loop = loop_of(scanned, slots, memory=spare)
        plan = None if halves is None else plan_with(loop, halves)
        if plan is not None:
            kept_bytes = plan.layout.n_bytes(plan.schedule)
            return choice("mixed", plan.schedule, kept_bytes, why, slots, spare)
        return choice("binomial", Binomial(n, slots), (slots + 1) * state, why, slots, spare)

    if storages:
        if any(_jax.is_symbolic(size) for size in (state, stacked)):
            raise ScheduleError(
                "several levels of store= require arrays of known shapes, but the scan has symbolic "
                "dimensions. Pass store='host', or export with numbers."
            )
        sizes = (state, residual, stacked)
        return _hierarchical(scanned, halves, sizes, checkpoints, budget, storages)

    def faster(found: Choice, where: str) -> Choice:
        """Return the choice, or the one that keeps all states and runs each step twice if that is faster."""
        traffic = 0.0
        if halves is not None:
            traffic = time_to_keep(scanned.traced.body, len(halves.kept), residual)
        steps = found.forward_steps
        if found.kind == "mixed" and (steps == n or steps + n * traffic <= 2 * n):
            return found
        why = f"{where} holds the states of all {n} steps"
        if found.kind == "mixed":
            why += f", and keeping a step's residuals takes the time of {traffic:.1f} steps"
        return choice("nested", Multilevel(n, (max(n, 1),)), n * state + residual, why)

    plain = choice("plain", None, n * stacked, "the loop is too short to save anything")
    if checkpoints is not None:
        checkpoints = whole_number(checkpoints, "checkpoints", 1)
        fits = not _jax.is_symbolic(state) and n * stacked <= checkpoints * state
        if n > 1 and fits:
            why = f"all fits the memory of checkpoints={checkpoints}"
            return choice("plain", None, plain.kept_bytes, why)
        fewest = checkpointed(checkpoints, 0, f"the fewest steps for checkpoints={checkpoints}")
        return fewest if checkpoints < n else faster(fewest, f"checkpoints={checkpoints}")
    two_levels = Multilevel.balanced(
        n,
        2,
        step_recomputed=False,
        state_bytes=_jax.typical(state),
        residual_bytes=_jax.typical(stacked),
    )
    nested_bytes = two_levels.peak_slots * state + two_levels.peak_residuals * stacked
    nested = choice("nested", two_levels, nested_bytes, "the least memory for one more sweep")
    if budget is None:
        saves = _jax.typical(nested_bytes) < _jax.typical(plain.kept_bytes)
        return nested if saves else plain
    limit = parse_bytes(budget, "budget=")
    # Several steps take the state at hand and its cotangent beside what is kept.
    aside = 2 * state if n > 1 else 0
    room = limit - aside
    if plain.kept_bytes <= room:
        return choice("plain", None, plain.kept_bytes, f"all fits the {format_bytes(limit)}")
    # The residuals in use are not part of the schedule's memory.
    memory = room - residual
    found: Choice | None = None
    if memory >= state:
        slots = min(memory // max(state, 1), max(n, 1))
        why = f"the fewest steps that fit {format_bytes(limit)}"
        found = checkpointed(slots, memory - slots * state, why)
        if (n + 2) * state + residual <= limit:
            found = faster(found, format_bytes(limit))
    if nested_bytes <= room and (found is None or nested.forward_steps <= found.forward_steps):
        # Larger blocks within the budget would not help: two levels cost one sweep for any block size.
        return choice("nested", two_levels, nested_bytes, f"fits the {format_bytes(limit)}")
    if found is None:
        ways = [
            (plain.kept_bytes, "all residuals"),
            (state + residual, f"one state and one step's residuals of {format_bytes(residual)}"),
            (nested_bytes, "two levels of loops"),
        ]
        least, what = min(ways)
        at_hand = (
            f"; the state at hand and its cotangent take {format_bytes(aside)} of it"
            if aside
            else ""
        )
        raise BudgetError(
            f"no schedule of {n} steps fits {format_bytes(limit)}; the smallest keeps {what}, "
            f"{format_bytes(aside + least)} ({aside + least} bytes){at_hand}. Raise budget=, or save less "
            f"in a step with policy=."
        )
    return found


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
    sizes: tuple[int, int, int],
    checkpoints: int | None,
    budget: str | int | None,
    storages: tuple[Storage, ...],
) -> Choice:
    """Return the choice for several levels of storage, with so much of the device."""
    n = scanned.length
    state, residual, stacked = sizes
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
        memory = max(0, parse_bytes(budget, "budget=") - 2 * state - residual)
    if n * stacked <= memory or n <= 1:
        return Choice("plain", None, n, state, stacked, n * stacked, "all fits the device")
    slots = min(memory // max(state, 1), n)
    spare = memory - slots * state
    loop = dataclasses.replace(loop_of(scanned, slots, memory=spare), levels=levels)
    plan = None if halves is None else plan_with(loop, halves)
    if plan is None:
        raise ScheduleError(
            f"no schedule of {n} steps fits {format_bytes(memory)} of device memory and "
            f"{[stored.level.slots for stored in levels]} states in the other levels of store=, or the "
            "body has no derivative in reverse mode. Raise the capacities."
        )
    kept_bytes = plan.layout.n_bytes(plan.schedule)
    why = "the least time for steps and transfers"
    return Choice(
        "hierarchical", plan.schedule, n, state, residual, kept_bytes, why, slots, spare, levels
    )


def refuse_both(checkpoints: int | None, budget: str | int | None) -> None:
    """Refuse a number of checkpoints together with a budget."""
    if checkpoints is not None and budget is not None:
        raise ScheduleError(
            f"checkpoints={checkpoints} and budget={budget!r} exclude each other. Pass one of them."
        )


def slots_of_unknown_length(
    traced: Traced, checkpoints: int | None, budget: str | int | None, default: int
) -> int:
    """Return how many states a loop keeps if its number of steps is unknown when it is traced."""
    refuse_both(checkpoints, budget)
    if budget is not None:
        state, residual, _ = _sizes(traced, differentiated(traced), budget)
        limit = parse_bytes(budget, "budget=")
        # Beside the states: the one at hand, its cotangent, and that of the last step or run.
        slots = (limit - residual) // max(state, 1) - 3
        if limit < 4 * state + residual:
            raise BudgetError(
                f"no schedule fits {format_bytes(limit)}; the smallest keeps "
                f"{format_bytes(4 * state + residual)}: four times a state of {format_bytes(state)} (the "
                f"kept one, that of the last run, the one at hand and its cotangent) and one step's "
                f"residuals of {format_bytes(residual)}. Raise budget=, or save less in a step with "
                f"policy=."
            )
        # With more slots, no loop that ends in practice would recompute less.
        return min(slots, 100_000)
    return default if checkpoints is None else whole_number(checkpoints, "checkpoints", 1)


def _sizes(
    traced: Traced, halves: Halves | None, budget: str | int | None
) -> tuple[Size, Size, Size]:
    """Return the bytes of a state, of a step's residuals, and of those that `lax.scan` keeps.

    With a budget, they are upper bounds.
    """
    state = sum(map(n_bytes, traced.carry))
    residual, stacked = residual_bytes(halves), stacked_bytes(halves)
    if budget is None:
        return state, residual, stacked
    return (
        worst_case("a state", state, budget, "checkpoints="),
        worst_case("one step's residuals", residual, budget, "checkpoints="),
        worst_case("one step's residuals", stacked, budget, "checkpoints="),
    )


def loop_of(scanned: Scanned, slots: int, store: Store = DEVICE, memory: int | None = None) -> Loop:
    """Return a scan as a loop that keeps so many states, and has so many bytes beside them for residuals."""
    traced, n = scanned.traced, scanned.length
    is_long = jax.config.jax_enable_x64 if _jax.is_symbolic(n) else n >= 2**31
    if is_long and not jax.config.jax_enable_x64:
        raise ScheduleError(f"{n} steps cannot be counted in 32 bits. Set jax_enable_x64.")
    return Loop(
        traced.body,
        len(traced.consts),
        len(traced.carry),
        slots,
        n,
        reverse=scanned.reverse,
        unroll=scanned.unroll,
        store=store,
        memory=memory,
        # Signed: XLA's CPU compiler before jaxlib 0.11.1 miscompiles slices of the scanned values
        # at an unsigned index in the backward pass.
        counter=np.int64 if is_long else np.int32,
    )
