"""The actions of a schedule, in order, with their costs and their picture.

`replay` executes actions on step numbers instead of states. The tests use it to check the cost that every
schedule states.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from remat.errors import ScheduleError
from remat.loops.schedules.shared import Schedule, checkpoints_text

Kind = Literal["store", "free", "restore", "advance", "keep", "forget", "reverse"]


@dataclass(frozen=True)
class Action:
    """One action of a schedule.

    Attributes:
      kind: `store` and `restore` copy the state between hand and slot, `free` empties a slot,
        `advance` runs the steps `start..stop-1`, `keep` runs the step `start` and keeps its residuals,
        `forget` drops these, `reverse` reverses the step `start`: from its residuals where they are kept,
        else from its state.
      start: the step of the state, or the first step to run.
      stop: one past the last step to run; `start` if no step is run.
      slot: the slot, counted from 0, of a state or of residuals; -1 for none.
      level: the level of storage that a state's slot lies in; 0 is the fastest. Slots are counted
        separately in each.
    """

    kind: Kind
    start: int
    stop: int
    slot: int = -1
    level: int = 0


class ListedSchedule(Schedule):
    """A schedule that lists its actions."""

    @abstractmethod
    def actions(self) -> Iterator[Action]:
        """Return all actions, in order."""

    def picture(self, *, width: int = 72, rows: int = 40) -> str:
        """Return the schedule drawn as text; see `picture`."""
        return picture(self.actions(), self.n, width=width, rows=rows)


def block_actions(start: int, stop: int, first_slot: int = 0) -> Iterator[Action]:
    """Yield the actions that keep the residuals of all steps of a block, and then reverse them."""
    for step in range(start, stop):
        yield Action("keep", step, step + 1, first_slot + step - start)
    for step in reversed(range(start, stop)):
        yield Action("reverse", step, step, first_slot + step - start)


@dataclass(frozen=True)
class Replay:
    """The costs of a list of actions, found by executing it.

    Attributes:
      forward_steps: evaluations of the body, the one inside each reversed step included.
      peak_slots: the most slots of the fastest level that were filled at once.
      writes: how often each slot of the fastest level was stored to.
      reads: how often each slot of the fastest level was restored from.
      held: the numbers of states in the fastest level and of steps' residuals that were held together,
        each pair once. Only pairs of which no other has at least as many of both are listed.
      levels: of each level, the most slots that were filled at once, the writes and the reads.
    """

    forward_steps: int
    peak_slots: int
    writes: tuple[int, ...]
    reads: tuple[int, ...]
    held: tuple[tuple[int, int], ...] = ()
    levels: tuple[tuple[int, int, int], ...] = ()


def replay(actions: Iterable[Action], n: int) -> Replay:
    """Execute the actions on step numbers instead of states, and count.

    >>> from remat.loops.schedules import Binomial
    >>> replay(Binomial(10, 3).actions(), 10).forward_steps
    25

    Raises:
      ScheduleError: an action that needs a state that is not there, or a loop that is not
        reversed step by step from its last step to its first.
    """
    slots: dict[tuple[int, int], int] = {}
    hand: int | None = 0
    pending = n
    forward_steps = 0
    writes: Counter[tuple[int, int]] = Counter()
    reads: Counter[tuple[int, int]] = Counter()
    peaks: Counter[int] = Counter()
    residuals: dict[int, int] = {}
    held: set[tuple[int, int]] = set()
    for action in actions:
        fits, at = True, (action.level, action.slot)
        if action.kind == "advance":
            fits = hand == action.start < action.stop < pending
            hand = action.stop
            forward_steps += action.stop - action.start
        elif action.kind == "keep":
            fits = hand == action.start == action.stop - 1 < pending
            fits &= action.slot not in residuals
            residuals[action.slot] = action.start
            hand = action.stop
            forward_steps += 1
        elif action.kind == "store":
            fits = hand == action.start
            slots[at] = action.start
            writes[at] += 1
            filled = sum(level == action.level for level, _ in slots)
            peaks[action.level] = max(peaks[action.level], filled)
        elif action.kind == "restore":
            fits = slots.get(at) == action.start
            hand = action.start
            reads[at] += 1
        elif action.kind == "free":
            fits = slots.pop(at, None) == action.start
        elif action.kind == "forget":
            fits = residuals.pop(action.slot, None) == action.start
        elif action.slot >= 0:
            fits = residuals.pop(action.slot, None) == action.start == pending - 1
            pending, hand = action.start, None
        else:
            fits = hand == action.start == pending - 1
            pending, hand = action.start, None
            forward_steps += 1
        held.add((sum(level == 0 for level, _ in slots), len(residuals)))
        if not fits:
            raise ScheduleError(
                f"{action} cannot be done: {hand=}, slots {slots}, steps left to reverse {pending}."
            )
    if pending:
        raise ScheduleError(f"the actions end with {pending} of {n} steps not reversed.")
    count = max((slot for level, slot in {*writes, *reads} if level == 0), default=-1) + 1

    def total(counts: Counter[tuple[int, int]], level: int) -> int:
        return sum(many for (at, _), many in counts.items() if at == level)

    return Replay(
        forward_steps=forward_steps,
        peak_slots=peaks[0],
        writes=tuple(writes[0, slot] for slot in range(count)),
        reads=tuple(reads[0, slot] for slot in range(count)),
        held=tuple(sorted(p for p in held if not any(_exceeds(q, p) for q in held))),
        levels=tuple(
            (peaks[k], total(writes, k), total(reads, k)) for k in range(max(peaks, default=-1) + 1)
        ),
    )


def _exceeds(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a != b and a[0] >= b[0] and a[1] >= b[1]


def picture(actions: Iterable[Action], n: int, *, width: int = 72, rows: int = 40) -> str:
    """Draw time (downwards) against steps (to the right).

    Each line is one sweep and ends with the steps that are reversed then: `o` a state in a slot when the
    sweep begins or stored during it, `>` a step run forward, `<` a reversed step, `.` a step still to
    reverse. Several are reversed together if their residuals were kept. A long loop is drawn with
    several steps in each column and with its first `rows` sweeps.

    >>> from remat.loops.schedules import Binomial
    >>> print(picture(Binomial(6, 2).actions(), 6))
    o>>o><  2 checkpoints
    o..o<   2 checkpoints
    o..<    2 checkpoints
    oo<     2 checkpoints
    o<      2 checkpoints
    <       1 checkpoint
    """
    per_column = -(-n // width) if n else 1
    columns = -(-n // per_column)
    lines: list[str] = []
    slots: dict[tuple[int, int], int] = {}
    filled: set[int] = set()
    run: set[int] = set()
    reversed_: set[int] = set()
    pending = n

    def line() -> str:
        symbols = ["."] * (-(-pending // per_column))
        for symbol, steps in ((">", run), ("o", filled), ("<", reversed_)):
            for step in steps:
                symbols[step // per_column] = symbol
        return f"{''.join(symbols):{columns}}  {checkpoints_text(len(slots))}"

    for action in actions:
        if action.kind == "reverse":
            filled.update(slots.values())
            reversed_.add(action.start)
            continue
        if reversed_:
            if len(lines) == rows:
                break
            lines.append(line())
            pending = min(reversed_)
            filled, run, reversed_ = set(), set(), set()
        if action.kind == "store":
            slots[action.level, action.slot] = action.start
        elif action.kind == "free":
            del slots[action.level, action.slot]
            continue
        elif action.kind in ("advance", "keep"):
            run.update(range(action.start, action.stop))
        filled.update(slots.values())
    if reversed_:
        lines.append(line() if len(lines) < rows else f"… {pending} more steps to reverse")
    return "\n".join(lines)
