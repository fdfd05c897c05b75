"""The ways to reverse a scan: the values that each keeps, and the number of steps that it repeats.

`Ways` has those of one scan; `choice.py` chooses one of them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import jax
import numpy as np

from remat import _jax
from remat.aliases import Arrays, Size
from remat.errors import BudgetError, ScheduleError
from remat.ir import jaxprs
from remat.ir.equations import is_region
from remat.loops.halves import Halves
from remat.loops.loop import Loop, StoredLevel
from remat.loops.mixed import reversal_with
from remat.loops.schedules import Binomial, Hierarchical, Mixed, Multilevel
from remat.loops.sizes import n_bytes, worst_case
from remat.loops.store import DEVICE, Store
from remat.loops.times import time_to_keep
from remat.loops.tracing import TracedBody, body_residual_bytes, stacked_bytes
from remat.units import format_bytes

Kind = Literal["plain", "nested", "mixed", "binomial", "hierarchical"]


class Scanned(NamedTuple):
    """A traced scan: its body, the arrays that it scans over, and its options.

    With `has_policy`, the body is a region with a policy.
    """

    traced: TracedBody
    xs: Arrays
    length: Size
    reverse: bool
    unroll: int | bool
    has_policy: bool = False

    def with_all_residuals(self) -> Scanned:
        """Return the scan without its policy. Regions that the user's body makes stay."""
        body = self.traced.body
        bodies = {id(eqn): eqn.params["jaxpr"] for eqn in body.eqns if is_region(eqn)}
        inlined = jaxprs.inline_calls(body, lambda eqn: bodies.get(id(eqn)))
        return self._replace(traced=self.traced._replace(body=inlined), has_policy=False)


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
      slots: of "mixed" and "binomial": the number of states that fit the memory.
      spare_bytes: the remaining bytes of the memory; a mixed schedule uses them, too. None if only
        states are kept.
      levels: the slower levels of storage, of "hierarchical".
      all_residuals: whether all residuals of a step are kept instead of those of `policy=`, which would take
        more time within the budget.
    """

    kind: Kind
    schedule: Multilevel | Mixed | Binomial | Hierarchical | None
    n: int
    state_bytes: Size
    residual_bytes: Size
    kept_bytes: Size
    why: str
    slots: int = 0
    spare_bytes: int | None = 0
    levels: tuple[StoredLevel, ...] = ()
    all_residuals: bool = False

    @property
    def forward_steps(self) -> int:
        """Return how often a gradient evaluates the body, including once in each reversed step."""
        if self.schedule is None:
            return self.n
        # A file is filled in the backward pass, which runs the loop again.
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


class Ways:
    """The ways to reverse a scan whose step has these halves.

    Attributes:
      state, residual, stacked: bytes of a carry, of a step's residuals, and of those that `lax.scan` keeps;
        upper bounds if `budget` is not None, and else expressions where shapes are symbolic.
    """

    def __init__(
        self, scanned: Scanned, halves: Halves | None, budget: str | int | None = None
    ) -> None:
        self.scanned = scanned
        self.halves = halves
        self.n = scanned.length
        self.state, self.residual, self.stacked = sizes_of(scanned.traced, halves, budget)

    @cached_property
    def plain(self) -> Choice:
        """Return the way that keeps the residuals of all steps."""
        why = "the loop is too short to save anything"
        return self._choice("plain", None, self.n * self.stacked, why)

    @cached_property
    def nested(self) -> Choice:
        """Return the way that keeps equidistant states, and residuals between two of them at a time."""
        schedule = Multilevel.balanced(
            self.n,
            2,
            step_recomputed=False,
            state_bytes=_jax.typical(self.state),
            residual_bytes=_jax.typical(self.stacked),
        )
        kept = schedule.peak_slots * self.state + schedule.peak_residuals * self.stacked
        return self._choice("nested", schedule, kept, "the least memory for one more sweep")

    def checkpointed(self, slots: int, spare: int, why: str) -> Choice:
        """Return the way in which states and residuals share `spare` bytes and those of `slots` states."""
        n, state = self.n, self.state
        if slots > max(n, 1) and not _jax.is_symbolic(state):
            # A loop of n steps has no more states.
            slots, spare = max(n, 1), spare + (slots - max(n, 1)) * state
        loop = loop_of(self.scanned, slots, memory=spare)
        reversal = None if self.halves is None else reversal_with(loop, self.halves)
        if reversal is not None:
            kept = reversal.layout.n_bytes(reversal.schedule)
            return self._choice("mixed", reversal.schedule, kept, why, slots, spare)
        return self._choice("binomial", Binomial(n, slots), (slots + 1) * state, why, slots, spare)

    def of_states_alone(self, slots: int, why: str) -> Choice:
        """Return the way that keeps `slots` states and no residuals."""
        slots = min(slots, max(self.n, 1))
        kept = (slots + 1) * self.state
        return self._choice("binomial", Binomial(self.n, slots), kept, why, slots, None)

    def or_all_states(self, found: Choice, where: str) -> Choice:
        """Return the choice, or the one that keeps all states and runs each step twice if that is faster."""
        n, traffic = self.n, 0.0
        if self.halves is not None:
            traffic = time_to_keep(self.scanned.traced.body, len(self.halves.kept), self.residual)
        steps = found.forward_steps
        if found.kind == "mixed" and (steps == n or steps + n * traffic <= 2 * n):
            return found
        why = f"{where} holds the states of all {n} steps"
        if found.kind == "mixed":
            why += f", and keeping a step's residuals takes the time of {traffic:.1f} steps"
        schedule = Multilevel(n, (max(n, 1),))
        return self._choice("nested", schedule, n * self.state + self.residual, why)

    # Within a budget

    @property
    def at_hand_bytes(self) -> int:
        """Return the bytes of the step that is being reversed: a state and its cotangent."""
        return 2 * self.state if self.n > 1 else 0

    def within(self, limit: int, reserved: int = 0) -> Choice | None:
        """Return the way that recomputes least within a limit, of which `reserved` bytes are not used."""
        n, room = self.n, limit - reserved - self.at_hand_bytes
        named = format_bytes(limit)
        if self.plain.kept_bytes <= room:
            return dataclasses.replace(self.plain, why=f"all fits the {named}")
        # The residuals in use are not part of the schedule's memory.
        memory = room - self.residual
        found: Choice | None = None
        if memory >= self.state:
            slots = min(memory // max(self.state, 1), max(n, 1))
            why = f"the fewest steps that fit {named}"
            found = self.checkpointed(slots, memory - slots * self.state, why)
            if (n + 2) * self.state + self.residual <= limit - reserved:
                found = self.or_all_states(found, named)
        nested = self.nested
        slower = found is None or nested.forward_steps <= found.forward_steps
        if nested.kept_bytes <= room and slower:
            # Larger blocks within the budget would not help: two levels cost one sweep for any block size.
            return dataclasses.replace(nested, why=f"fits the {named}")
        return found

    @cached_property
    def least_bytes(self) -> int:
        """Return the smallest limit within which there is a way."""
        return self.at_hand_bytes + min(self._least_kept)[0]

    def refusal(self, limit: int, as_compiled: int | None) -> BudgetError:
        """Return the error for a limit within which there is no way.

        Args:
          limit: the budget in bytes.
          as_compiled: the compiler's bytes for the way that keeps least, if they differ from those counted.
        """
        least = self.least_bytes if as_compiled is None else as_compiled
        parts = [f"the smallest keeps {min(self._least_kept)[1]}"]
        if self.at_hand_bytes:
            parts.append(f"{format_bytes(self.at_hand_bytes)} of a state at hand and its cotangent")
        if as_compiled is not None:
            parts.append("the compiler's further temporaries")
        return BudgetError(
            f"no schedule of {self.n} steps fits {format_bytes(limit)}; {listed(parts)}: "
            f"{format_bytes(least)} ({least} bytes). Raise budget=, or save less in a step with policy=."
        )

    @property
    def _least_kept(self) -> list[tuple[int, str]]:
        residuals = f"one state and one step's residuals of {format_bytes(self.residual)}"
        return [
            (self.plain.kept_bytes, "all residuals"),
            (self.state + self.residual, residuals),
            (self.nested.kept_bytes, "two levels of loops"),
        ]

    def _choice(
        self,
        kind: Kind,
        schedule: Multilevel | Mixed | Binomial | Hierarchical | None,
        kept_bytes: Size,
        why: str,
        slots: int = 0,
        spare: int | None = 0,
    ) -> Choice:
        of_step = self.stacked if kind in ("plain", "nested") else self.residual
        return Choice(kind, schedule, self.n, self.state, of_step, kept_bytes, why, slots, spare)


def listed(parts: list[str]) -> str:
    """Return phrases as one, such as "a, b and c"."""
    *others, last = parts
    return f"{', '.join(others)} and {last}" if others else last


def sizes_of(
    traced: TracedBody, halves: Halves | None, budget: str | int | None
) -> tuple[Size, Size, Size]:
    """Return the bytes of a state, of a step's residuals, and of those that `lax.scan` keeps.

    With a budget, they are upper bounds.
    """
    state = sum(map(n_bytes, traced.carry))
    residual, stacked = body_residual_bytes(halves), stacked_bytes(halves)
    if budget is None:
        return state, residual, stacked
    return (
        worst_case("a state", state, budget, "checkpoints="),
        worst_case("one step's residuals", residual, budget, "checkpoints="),
        worst_case("one step's residuals", stacked, budget, "checkpoints="),
    )


def loop_of(scanned: Scanned, slots: int, store: Store = DEVICE, memory: int | None = None) -> Loop:
    """Return a scan as a loop that keeps `slots` states and has `memory` bytes besides for residuals."""
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
