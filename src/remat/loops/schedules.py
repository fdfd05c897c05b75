"""Checkpointing schedules for loops: which states to keep, which steps to run again.

A loop of `n` steps is reversed from its last step to its first, and reversing step `i` needs state
`i`, the value of the loop's carry before that step. `slots` states can be kept at a time; all
others are recomputed from the nearest kept state before them. A schedule says what is kept when.
It is a frozen value that knows its exact cost, lists its actions and prints itself as a picture.

Four of them, from the literature:

- `Binomial`: the fewest steps possible for a known `n` (Griewank & Walther, "Algorithm 799:
  revolve", ACM TOMS 26, 2000).
- `Online`: `n` is known only when the loop ends. As good as `Binomial` up to
  n = (s+1)(s+2)/2, and within a few percent beyond (the problem of Stumm & Walther, "New
  algorithms for optimal online checkpointing", SIAM J. Sci. Comput. 32, 2010).
- `TwoTier`: `Binomial` with its least-used states in a slower memory (Stumm & Walther, "Multistage
  approaches for optimal offline checkpointing", SIAM J. Sci. Comput. 31, 2009).
- `Multilevel`: nested loops; more steps than `Binomial` at equal slots, but made of plain scans.

Counting. `forward_steps` counts every evaluation of the loop's body, the one inside each reversed
step included: the convention of revolve's authors plus one evaluation for each reversed step.
There the first sweep ends at state n-1, which is all that reversing needs. Under `jax.grad` the
loop's result is needed too, and that is one step more: `grad_forward_steps`. `recomputed_steps`
is what exceeds one evaluation of each step. The state at hand (the one being advanced) is in no
slot; state 0 is in one.

This file is pure Python: the compiled loops read it only through `binomial_rows` and through
tests that hold them to it, action by action.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from remat.errors import ScheduleError

INT32_MAX = 2**31 - 1

# Actions

Kind = Literal["store", "free", "restore", "advance", "reverse"]
Tier = Literal["memory", "host"]


@dataclass(frozen=True)
class Action:
    """One thing that a schedule does.

    Attributes:
      kind: `store` and `restore` copy the state between hand and slot, `free` empties a slot,
        `advance` runs the steps `start..stop-1`, `reverse` reverses the step `start`.
      start: the step whose state is meant, or the first step to run.
      stop: one past the last step to run; `start` where no step is run.
      slot: the slot, counted from 0; -1 where none is meant.
      tier: the memory that the slot lies in.
    """

    kind: Kind
    start: int
    stop: int
    slot: int = -1
    tier: Tier = "memory"


@dataclass(frozen=True)
class Replay:
    """What a list of actions costs, found by carrying it out.

    Attributes:
      forward_steps: evaluations of the body, the one inside each reversed step included.
      peak_slots: the most slots that were filled at once.
      writes: how often each slot was stored to.
      reads: how often each slot was restored from.
    """

    forward_steps: int
    peak_slots: int
    writes: tuple[int, ...]
    reads: tuple[int, ...]


def replay(actions: Iterable[Action], n: int) -> Replay:
    """Carry out the actions on step numbers instead of states, and count.

    >>> replay(Binomial(10, 3).actions(), 10).forward_steps
    25

    Raises:
      ScheduleError: an action that needs a state that is not there, or a loop that is not
        reversed step by step from its last step to its first.
    """
    slots: dict[int, int] = {}
    hand: int | None = 0
    pending = n
    forward_steps = peak_slots = 0
    writes: dict[int, int] = {}
    reads: dict[int, int] = {}
    for action in actions:
        fits = True
        if action.kind == "advance":
            fits = hand == action.start < action.stop < pending
            hand = action.stop
            forward_steps += action.stop - action.start
        elif action.kind == "store":
            fits = hand == action.start
            slots[action.slot] = action.start
            writes[action.slot] = writes.get(action.slot, 0) + 1
            peak_slots = max(peak_slots, len(slots))
        elif action.kind == "restore":
            fits = slots.get(action.slot) == action.start
            hand = action.start
            reads[action.slot] = reads.get(action.slot, 0) + 1
        elif action.kind == "free":
            fits = slots.pop(action.slot, None) == action.start
        else:
            fits = hand == action.start == pending - 1
            pending, hand = action.start, None
            forward_steps += 1
        if not fits:
            raise ScheduleError(
                f"{action} cannot be done: {hand=}, slots {slots}, steps left to reverse {pending}."
            )
    if pending:
        raise ScheduleError(f"the actions end with {pending} of {n} steps not reversed.")
    count = max((*writes, *reads, -1)) + 1
    return Replay(
        forward_steps=forward_steps,
        peak_slots=peak_slots,
        writes=tuple(writes.get(slot, 0) for slot in range(count)),
        reads=tuple(reads.get(slot, 0) for slot in range(count)),
    )


def picture(actions: Iterable[Action], n: int, *, width: int = 72, rows: int = 40) -> str:
    """Draw time (downwards) against steps (to the right).

    Each line is one sweep and ends with one reversed step: `o` a state in a slot when the sweep
    begins or stored during it, `>` a step run forward, `<` the reversed step, `.` a step still to
    reverse. A long loop is drawn with several steps in each column and with its first `rows`
    sweeps.

    >>> print(picture(Binomial(6, 2).actions(), 6))
    o>>o><  2 slots
    o..o<   2 slots
    o..<    2 slots
    oo<     2 slots
    o<      2 slots
    <       1 slot
    """
    per_column = -(-n // width) if n else 1
    columns = -(-n // per_column)
    lines: list[str] = []
    slots: dict[int, int] = {}
    filled: set[int] = set()
    run: set[int] = set()
    pending = n
    for action in actions:
        if action.kind == "store":
            slots[action.slot] = action.start
        elif action.kind == "free":
            del slots[action.slot]
            continue
        elif action.kind == "advance":
            run.update(range(action.start, action.stop))
        filled.update(slots.values())
        if action.kind != "reverse":
            continue
        if len(lines) == rows:
            lines.append(f"… {pending} more sweeps")
            break
        line = ["."] * (-(-pending // per_column))
        for symbol, steps in ((">", run), ("o", filled), ("<", {action.start})):
            for step in steps:
                line[step // per_column] = symbol
        lines.append(f"{''.join(line):{columns}}  {_slots(len(slots))}")
        pending = action.start
        filled, run = set(), set()
    return "\n".join(lines)


# Binomial


def beta(slots: int, repetitions: int) -> int:
    """The longest loop that `slots` slots reverse with no step run more than `repetitions` times.

    Griewank & Walther's β(s, r) = C(s + r, s), not counting the run inside the reversal.
    """
    return math.comb(slots + repetitions, slots) if repetitions >= 0 else 0


@lru_cache(maxsize=4096)
def repetitions(n: int, slots: int) -> int:
    """The smallest r with β(slots, r) ≥ n."""
    if slots == 1:
        return max(n - 1, 0)
    low, high = -1, 1
    while beta(slots, high) < n:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if beta(slots, middle) >= n else (middle, high)
    return high


def binomial_advances(n: int, slots: int) -> int:
    """The fewest steps to run, beside those inside the reversals: r·n − β(s+1, r−1).

    Equivalently the maximum of that expression over all r, which is how the compiled online loop
    evaluates it: as a function of n it is convex and piecewise linear with slopes r.
    """
    r = repetitions(n, slots)
    return r * n - beta(slots + 1, r - 1)


def binomial_split(n: int, slots: int) -> int:
    """How far to advance from state 0 before the next state is stored, for `n` ≥ 2 steps.

    The part before the new state is reversed with all `slots` slots and r−1 repetitions, the part
    after it with one slot less and r. Every m with β(s, r−2) ≤ m ≤ β(s, r−1) and
    β(s−1, r−1) ≤ n−m ≤ β(s−1, r) is optimal (Griewank & Walther, Prop. 1); this is the largest.
    """
    if slots == 1:
        return n - 1
    r = repetitions(n, slots)
    return min(beta(slots, r - 1), n - beta(slots - 1, r - 1))


def binomial_rows(slots: int, longest: int) -> tuple[tuple[int, ...], ...]:
    """β(c, r) for c = 0..slots+1 (rows) and r = 0..R (columns), as 32-bit numbers.

    R is large enough for loops of `longest` steps, with one column to spare (an online schedule
    can be one repetition off), but never above 4096: with 2 slots that is 8 million steps, and
    beyond it a compiled loop is still right, only no longer optimal.
    """
    columns = min(repetitions(longest, max(slots, 2)) + 1, 4096) + 1
    row = [1] * columns
    rows = [tuple(row)]
    for _ in range(slots + 1):
        for r in range(1, columns):
            row[r] = min(row[r] + row[r - 1], INT32_MAX)
        rows.append(tuple(row))
    return tuple(rows)


def reverse_actions(slots: int, n: int, held: Iterable[int]) -> Iterator[Action]:
    """Reverse a loop of `n` steps optimally, given the states `held` and state n−1 at hand."""
    stack = list(held)
    hand = n - 1
    for step in reversed(range(n)):
        start = stack[-1]
        if hand != step:
            yield Action("restore", start, start, len(stack) - 1)
            hand = start
        while hand < step:
            stop = hand + binomial_split(step + 1 - hand, slots + 1 - len(stack))
            yield Action("advance", hand, stop)
            hand = stop
            if hand < step:
                yield Action("store", hand, hand, len(stack))
                stack.append(hand)
        yield Action("reverse", step, step)
        hand = -1
        if stack[-1] == step:
            yield Action("free", step, step, len(stack) - 1)
            stack.pop()


@dataclass(frozen=True)
class Binomial:
    """The schedule with the fewest recomputed steps for a known number of steps.

    >>> schedule = Binomial(n=10, slots=3)
    >>> schedule.forward_steps, schedule.grad_forward_steps, schedule.repetitions
    (25, 26, 2)
    >>> schedule.positions
    (0, 4, 7)
    >>> print(schedule)
    binomial: 10 steps, 3 slots: 25 forward steps (2.50 per step), repeated at most 2 times

    Attributes:
      n: steps of the loop.
      slots: states that are kept at a time, state 0 included.

    Raises:
      ScheduleError: for fewer than 0 steps or fewer than 1 slot.

    Reference: Griewank & Walther, Algorithm 799: revolve, ACM TOMS 26 (2000).
    """

    n: int
    slots: int

    def __post_init__(self) -> None:
        _check_counts(self.n, self.slots)

    @property
    def repetitions(self) -> int:
        """The most often that any one step is run outside its reversal."""
        return repetitions(self.n, self.slots) if self.n > 1 else 0

    @property
    def forward_steps(self) -> int:
        """Evaluations of the body, with one inside each reversed step."""
        return binomial_advances(self.n, self.slots) + self.n

    @property
    def grad_forward_steps(self) -> int:
        """The same under `jax.grad`, where the loop's result is computed as well."""
        return self.forward_steps + (self.n > 0)

    @property
    def recomputed_steps(self) -> int:
        """Evaluations of the body beyond one for each step."""
        return self.forward_steps - self.n

    @property
    def peak_slots(self) -> int:
        """Slots that are really used: a short loop does not need all of them."""
        return len(self.positions)

    @property
    def positions(self) -> tuple[int, ...]:
        """The steps whose states the first sweep stores."""
        if self.n == 0:
            return ()
        held = [0]
        while len(held) < self.slots and self.n - held[-1] > 1:
            start = held[-1]
            stop = start + binomial_split(self.n - start, self.slots + 1 - len(held))
            if stop == self.n - 1:
                # This state is at hand when the sweep ends; storing it would gain nothing.
                break
            held.append(stop)
        return tuple(held)

    def actions(self) -> Iterator[Action]:
        """All that is done, in order."""
        if self.n == 0:
            return
        yield from _first_sweep(self.positions, self.n)
        yield from reverse_actions(self.slots, self.n, self.positions)

    def picture(self, *, width: int = 72, rows: int = 40) -> str:
        """Time against steps; see `picture`."""
        return picture(self.actions(), self.n, width=width, rows=rows)

    def __str__(self) -> str:
        return (
            f"binomial: {self.n} steps, {_slots(self.slots)}: {_cost(self.forward_steps, self.n)}, "
            f"repeated at most {self.repetitions} times"
        )


# Two memories


@dataclass(frozen=True)
class TwoTier:
    """`Binomial` over two memories: as few steps, and the fewest transfers to the slower memory.

    The slots of a binomial schedule form a stack, and the deeper a slot lies the less often it is
    used. The deepest `host_slots` are kept in the slower memory.

    >>> schedule = TwoTier(n=100, memory_slots=3, host_slots=2)
    >>> schedule.forward_steps == Binomial(100, 5).forward_steps
    True
    >>> schedule.host_writes, schedule.host_reads
    (5, 14)

    Attributes:
      n: steps of the loop.
      memory_slots: states kept in the fast memory.
      host_slots: states kept in the slow memory.

    Raises:
      ScheduleError: for fewer than 0 steps or slots, or no slot at all.

    Reference: Stumm & Walther, Multistage approaches for optimal offline checkpointing, SIAM J.
    Sci. Comput. 31 (2009).
    """

    n: int
    memory_slots: int
    host_slots: int

    def __post_init__(self) -> None:
        if min(self.memory_slots, self.host_slots) < 0:
            raise ScheduleError(
                f"slots cannot be negative: memory_slots={self.memory_slots}, "
                f"host_slots={self.host_slots}."
            )
        _check_counts(self.n, self.slots)

    @property
    def slots(self) -> int:
        """States kept at a time, in both memories."""
        return self.memory_slots + self.host_slots

    @property
    def forward_steps(self) -> int:
        """Evaluations of the body, with one inside each reversed step."""
        return Binomial(self.n, self.slots).forward_steps

    @property
    def grad_forward_steps(self) -> int:
        """The same under `jax.grad`, where the loop's result is computed as well."""
        return Binomial(self.n, self.slots).grad_forward_steps

    @property
    def peak_slots(self) -> int:
        """Slots of the fast memory that are really used."""
        return max(0, Binomial(self.n, self.slots).peak_slots - self.host_slots)

    @property
    def host_writes(self) -> int:
        """States moved to the slow memory."""
        return sum(slot_traffic(self.n, self.slots)[0][: self.host_slots])

    @property
    def host_reads(self) -> int:
        """States moved back."""
        return sum(slot_traffic(self.n, self.slots)[1][: self.host_slots])

    def actions(self) -> Iterator[Action]:
        """All that is done, in order."""
        for action in Binomial(self.n, self.slots).actions():
            if 0 <= action.slot < self.host_slots:
                yield Action(action.kind, action.start, action.stop, action.slot, "host")
            else:
                yield action

    def picture(self, *, width: int = 72, rows: int = 40) -> str:
        """Time against steps; see `picture`."""
        return picture(self.actions(), self.n, width=width, rows=rows)

    def __str__(self) -> str:
        return (
            f"two tiers: {self.n} steps, {_slots(self.memory_slots)} in memory and "
            f"{self.host_slots} on the host: {_cost(self.forward_steps, self.n)}, "
            f"{self.host_writes} writes to and {self.host_reads} reads from the host"
        )


@lru_cache(maxsize=64)
def slot_traffic(n: int, slots: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How often `Binomial(n, slots)` writes and reads each slot, without listing its actions.

    The recursion follows the split: a loop reversed from slot k is a part reversed from slot k+1,
    one read of slot k, and a part reversed from slot k again. A part of one step needs no store.
    """
    if n == 0:
        return (), ()
    known: dict[tuple[int, int], tuple[list[int], list[int]]] = {}

    def traffic(length: int, free: int) -> tuple[list[int], list[int]]:
        """Writes and reads by depth, the base slot's own write excluded."""
        if length == 1:
            return [], []
        if free == 1:
            return [0], [length - 1]
        if (length, free) not in known:
            m = binomial_split(length, free)
            right = traffic(length - m, free - 1)
            left = traffic(m, free)
            stored = [1] if length - m > 1 else [0]
            writes = _add(left[0], [0, *_add(right[0], stored)])
            reads = _add(_add(left[1], [0, *right[1]]), [1])
            known[length, free] = writes, reads
        return known[length, free]

    writes, reads = traffic(n, slots)
    return tuple(_add(writes, [1])), tuple(_add(reads, [0]))


# Online


# The online choice looks at no more repetitions than this. A compiled loop makes the choice at
# every step, so it has to be short; with 3 slots it is enough for 45,000 steps, with 4 for 700,000.
ONLINE_COLUMNS = 64


@lru_cache(maxsize=256)
def online_rows(slots: int) -> tuple[tuple[int, ...], ...]:
    """The rows of `binomial_rows` by which an online loop weighs its choices.

    They are exact for 16 million steps; a longer loop is reversed as correctly, less optimally.
    """
    return tuple(row[:ONLINE_COLUMNS] for row in binomial_rows(slots, 2**24))


def online_cost(length: int, slots: int, rows: tuple[tuple[int, ...], ...]) -> int:
    """`binomial_advances`, as the maximum over the repetitions that `rows` has."""
    row = rows[slots + 1]
    return max(r * length - (row[r - 1] if r else 0) for r in range(len(row)))


def online_update(held: tuple[int, ...], reached: int, slots: int) -> tuple[int, ...]:
    """The states to hold when the loop is at state `reached` and will do at least one more step.

    The newcomer is state `reached - 1`, which by now is known not to be the last that reversing
    needs at hand. While slots are free it is stored. Else one of these is chosen, whichever would
    make the reversal cheapest if the loop ended after the next step, the first of equals:
    to drop the newcomer, or to drop held state 1, 2, ... in its favour. State 0 is always held.
    """
    newcomer = reached - 1
    if len(held) < slots:
        return (*held, newcomer)
    rows = online_rows(slots)
    n = reached + 1

    def cost(states: tuple[int, ...]) -> int:
        lengths = [stop - start for start, stop in zip(states, (*states[1:], n))]
        last = lengths.pop()
        # The last part has been run once already, up to state n-1.
        again = online_cost(last, 1, rows) - (last - 1)
        return again + sum(online_cost(part, slots - k, rows) for k, part in enumerate(lengths))

    # Dropping comes before keeping, so that equals go to the move that makes progress.
    choices = [(*held[:k], *held[k + 1 :], newcomer) for k in range(1, slots)]
    return min((*choices, held), key=cost)


@dataclass(frozen=True)
class Online:
    """The schedule for a loop whose number of steps is known only when it ends.

    While it runs, the states to hold are chosen so that the reversal would be cheapest if the loop
    ended now (`online_update`); when it has ended, the rest is binomial. Up to
    n = (s+1)(s+2)/2 that is optimal at every n, as Stumm & Walther's first algorithm is; beyond,
    where no online choice can be optimal at every n, it stays within a few percent (10 % with
    2 slots, 5 % with 3, 2 % with 8; measured in the tests).

    >>> Online(n=10, slots=3).forward_steps, Binomial(n=10, slots=3).forward_steps
    (25, 25)
    >>> Online(n=56, slots=3).forward_steps, Binomial(n=56, slots=3).forward_steps
    (267, 266)

    Attributes:
      n: steps that the loop turns out to have.
      slots: states that are kept at a time, state 0 included.

    Raises:
      ScheduleError: for fewer than 0 steps or fewer than 1 slot.
    """

    n: int
    slots: int

    def __post_init__(self) -> None:
        _check_counts(self.n, self.slots)

    @property
    def positions(self) -> tuple[int, ...]:
        """The steps whose states are held when the loop ends."""
        return _online_positions(self.n, self.slots)

    @property
    def forward_steps(self) -> int:
        """Evaluations of the body, with one inside each reversed step."""
        if self.n == 0:
            return 0
        held = self.positions
        lengths = [stop - start for start, stop in zip(held, (*held[1:], self.n))]
        total = self.n - 1 + self.n
        for k, length in enumerate(lengths):
            # What is run to reverse each part; the sweep has run the last part once already.
            total += binomial_advances(length, self.slots - k)
        return total - (lengths[-1] - 1)

    @property
    def grad_forward_steps(self) -> int:
        """The same under `jax.grad`, where the loop's result is computed as well."""
        return self.forward_steps + (self.n > 0)

    @property
    def recomputed_steps(self) -> int:
        """Evaluations of the body beyond one for each step."""
        return self.forward_steps - self.n

    @property
    def peak_slots(self) -> int:
        """Slots that are really used."""
        return min(self.n, self.slots)

    def actions(self) -> Iterator[Action]:
        """All that is done, in order; a state that is held is stored when it is reached."""
        if self.n == 0:
            return
        held: tuple[int, ...] = ()
        slot_of: dict[int, int] = {}
        for reached in range(1, self.n):
            update = (0,) if reached == 1 else online_update(held, reached, self.slots)
            dropped = [state for state in held if state not in update]
            for state in dropped:
                yield Action("free", state, state, slot_of.pop(state))
            if update != held:
                slot = min(set(range(self.slots)) - set(slot_of.values()))
                slot_of[update[-1]] = slot
                yield Action("store", reached - 1, reached - 1, slot)
            held = update
            yield Action("advance", reached - 1, reached)
        order = [slot_of[state] for state in held]
        order += sorted(set(range(self.slots)) - set(order))
        for action in reverse_actions(self.slots, self.n, held or (0,)):
            if action.slot >= 0 and held:
                yield Action(action.kind, action.start, action.stop, order[action.slot])
            elif action.slot < 0:
                yield action

    def picture(self, *, width: int = 72, rows: int = 40) -> str:
        """Time against steps; see `picture`."""
        return picture(self.actions(), self.n, width=width, rows=rows)

    def __str__(self) -> str:
        return f"online: {self.n} steps, {_slots(self.slots)}: {_cost(self.forward_steps, self.n)}"


@lru_cache(maxsize=64)
def _online_positions(n: int, slots: int) -> tuple[int, ...]:
    if n == 0:
        return ()
    held: tuple[int, ...] = (0,)
    for reached in range(2, n):
        held = online_update(held, reached, slots)
    return held


# Multilevel


@dataclass(frozen=True)
class Multilevel:
    """Nested loops, each level storing the states at which the level below it begins.

    A loop of `n` steps is cut into blocks of lengths[1]·…·lengths[-1] steps and a shorter last
    block, each block is cut again by the next level, and so on.

    With `step_recomputed` the body is recomputed step by step when it is reversed, as in the other
    schedules; without it the residuals of the innermost blocks are kept, and one sweep is saved.

    >>> schedule = Multilevel.balanced(n=100, depth=2)
    >>> schedule.lengths, schedule.forward_steps, schedule.peak_slots, schedule.peak_residuals
    ((10, 10), 300, 20, 1)
    >>> print(Multilevel.balanced(n=101, depth=2, step_recomputed=False))
    multilevel 8 × 13: 101 steps, 7 slots and 13 steps' residuals: 192 forward steps (1.90 per step)

    Attributes:
      n: steps of the loop.
      lengths: of the loops from the outermost to the innermost; their product is at least `n`.
      step_recomputed: whether the innermost loop stores states instead of residuals.

    Raises:
      ScheduleError: for lengths that are empty, not positive, or whose product is below `n`.
    """

    n: int
    lengths: tuple[int, ...]
    step_recomputed: bool = True

    def __post_init__(self) -> None:
        _check_counts(self.n, 1)
        if not self.lengths or min(self.lengths) < 1 or math.prod(self.lengths) < self.n:
            raise ScheduleError(
                f"lengths {self.lengths} cover {math.prod(self.lengths)} of {self.n} steps. "
                f"Give positive lengths with a product of at least {self.n}."
            )

    @classmethod
    def balanced(
        cls,
        n: int,
        depth: int,
        *,
        step_recomputed: bool = True,
        state_bytes: int = 1,
        residual_bytes: int = 1,
    ) -> Multilevel:
        """The lengths of least memory for a given depth, any `n`.

        All levels hold about the same memory; where the innermost holds residuals, they are
        weighed by `residual_bytes` a step against `state_bytes` a state.
        """
        if depth < 1:
            raise ScheduleError(f"a nested loop has at least 1 level, not depth={depth}.")
        inner_bytes = state_bytes if step_recomputed else residual_bytes
        return cls(
            n, _balanced(n, depth, max(state_bytes, 1), max(inner_bytes, 1)), step_recomputed
        )

    @property
    def depth(self) -> int:
        """Number of nested loops."""
        return len(self.lengths)

    @property
    def forward_steps(self) -> int:
        """Evaluations of the body, with one inside each reversed step.

        Every level runs all steps once more, but for the shorter last block, which is reversed
        right after it was run. The nested loops are derived from whole blocks, so the result of
        the loop is computed in any case: this is the count under `jax.grad` too.
        """
        if self.depth == 1:
            return self.n * (1 + self.step_recomputed)
        blocks, rest = divmod(self.n, self.block)
        inner = self._inner(self.block).forward_steps
        return blocks * (self.block + inner) + self._inner(rest).forward_steps

    @property
    def grad_forward_steps(self) -> int:
        """The same: see `forward_steps`."""
        return self.forward_steps

    @property
    def recomputed_steps(self) -> int:
        """Evaluations of the body beyond one for each step."""
        return self.forward_steps - self.n

    @property
    def block(self) -> int:
        """Steps of one block of the outermost loop."""
        return math.prod(self.lengths[1:])

    def _inner(self, n: int) -> Multilevel:
        return Multilevel(n, self.lengths[1:], self.step_recomputed)

    @property
    def peak_slots(self) -> int:
        """States kept at the worst moment."""
        if self.depth == 1:
            return self.n if self.step_recomputed else 0
        blocks, rest = divmod(self.n, self.block)
        longest = self.block if blocks else rest
        return blocks + self._inner(longest).peak_slots

    @property
    def peak_residuals(self) -> int:
        """Steps whose residuals are kept at the worst moment."""
        innermost = min(self.n, self.lengths[-1])
        return min(innermost, 1) if self.step_recomputed else innermost

    def __str__(self) -> str:
        kept = _slots(self.peak_slots)
        if not self.step_recomputed:
            kept += f" and {self.peak_residuals} steps' residuals"
        return (
            f"multilevel {' × '.join(map(str, self.lengths))}: {self.n} steps, {kept}: "
            f"{_cost(self.forward_steps, self.n)}"
        )


def _balanced(n: int, depth: int, state: int, inner: int) -> tuple[int, ...]:
    """Lengths with a product of at least n and the least state·Σ outer + inner·innermost."""
    if depth == 1:
        return (max(n, 1),)
    # At the real-valued optimum all terms are equal: x = (n·state^(d-1)·inner)^(1/d) bytes each.
    each = (max(n, 1) * state ** (depth - 1) * inner) ** (1 / depth)
    near = max(1, int(each / state))
    candidates = []
    for outer in range(max(1, near - 2), near + 4):
        rest = -(-n // outer)
        # Fewer blocks of the same size when the last would be empty.
        below = _balanced(rest, depth - 1, state, inner)
        first = max(1, -(-n // math.prod(below)))
        lengths = (first, *below)
        weight = state * sum(lengths[:-1]) + inner * lengths[-1]
        candidates.append((weight, lengths))
    return min(candidates)[1]


# Helpers


def _first_sweep(held: tuple[int, ...], n: int) -> Iterator[Action]:
    for slot, (start, stop) in enumerate(zip(held, (*held[1:], n - 1))):
        yield Action("store", start, start, slot)
        if stop > start:
            yield Action("advance", start, stop)


def _add(a: list[int], b: list[int]) -> list[int]:
    if len(a) < len(b):
        a, b = b, a
    return [x + y for x, y in zip(a, b)] + a[len(b) :]


def _slots(count: int) -> str:
    return f"{count} slot" if count == 1 else f"{count} slots"


def _cost(forward_steps: int, n: int) -> str:
    per_step = f" ({forward_steps / n:.2f} per step)" if n else ""
    return f"{forward_steps} forward steps{per_step}"


def _check_counts(n: int, slots: int) -> None:
    for name, value, least in (("steps", n, 0), ("slots", slots, 1)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ScheduleError(f"the number of {name} is an int, not {value!r}.")
        if value < least:
            raise ScheduleError(f"a schedule has at least {least} {name}, not {value}.")
