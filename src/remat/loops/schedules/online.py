"""The schedule for a loop whose number of steps is known only when it ends.

The problem is that of Stumm & Walther, "New algorithms for optimal online checkpointing", SIAM J. Sci.
Comput. 32 (2010).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from remat.loops.schedules.actions import Action, ListedSchedule
from remat.loops.schedules.binomial import binomial_advances, binomial_rows, reverse_actions
from remat.loops.schedules.shared import check_counts, checkpoints_text, cost_text

# The most repetitions that the online choice considers. A compiled loop makes the choice at every step, so it
# has to be short; with 3 slots this is enough for 45,000 steps, with 4 for 700,000.
ONLINE_COLUMNS = 64


# Cached: a table of `slots` rows of at most 64 numbers.
@lru_cache(maxsize=256)
def online_rows(slots: int) -> tuple[tuple[int, ...], ...]:
    """Return the rows of `binomial_rows` by which an online loop weighs its choices.

    They are exact for 16 million steps; a longer loop is reversed as correctly, less optimally.
    """
    return tuple(row[:ONLINE_COLUMNS] for row in binomial_rows(slots, 2**24))


def online_cost(length: int, slots: int, rows: tuple[tuple[int, ...], ...]) -> int:
    """Return `binomial_advances`, as the maximum over the repetitions that `rows` has."""
    row = rows[slots + 1]
    return max(r * length - (row[r - 1] if r else 0) for r in range(len(row)))


def online_update(held: tuple[int, ...], reached: int, slots: int) -> tuple[int, ...]:
    """Return the states to hold when the loop is at state `reached` and will do at least one more step.

    The new state is state `reached - 1`, which is now known not to be the last one, from which reversing
    begins. While slots are free it is stored. Otherwise either the new state is dropped, or held state 1, 2,
    ... is replaced by it: whichever makes the reversal cheapest if the loop ends after the next step (the
    first among equals). State 0 is always held.
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

    # Dropping comes before keeping, so that among equals the choice that makes progress is taken.
    choices = [(*held[:k], *held[k + 1 :], newcomer) for k in range(1, slots)]
    return min((*choices, held), key=cost)


@dataclass(frozen=True)
class Online(ListedSchedule):
    """The schedule for a loop whose number of steps is known only when it ends.

    While it runs, the states to hold are chosen so that the reversal would be cheapest if the loop
    ended now (`online_update`); when it has ended, the rest is binomial. Up to
    n = (s+1)(s+2)/2 that is optimal at every n, as Stumm & Walther's first algorithm is; beyond,
    where no online choice can be optimal at every n, it stays within a few percent (10 % with
    2 slots, 5 % with 3, 2 % with 8; measured in the tests).

    >>> from remat.loops.schedules import Binomial
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
        check_counts(self.n, self.slots)

    @property
    def positions(self) -> tuple[int, ...]:
        """Return the steps whose states are held when the loop ends."""
        return _online_positions(self.n, self.slots)

    @property
    def forward_steps(self) -> int:
        """Return the evaluations of the body, with one inside each reversed step."""
        if self.n == 0:
            return 0
        held = self.positions
        lengths = [stop - start for start, stop in zip(held, (*held[1:], self.n))]
        total = self.n - 1 + self.n
        for k, length in enumerate(lengths):
            # The steps run to reverse each part; the sweep has run the last part once already.
            total += binomial_advances(length, self.slots - k)
        return total - (lengths[-1] - 1)

    @property
    def peak_slots(self) -> int:
        """Return the slots that are used."""
        return min(self.n, self.slots)

    def actions(self) -> Iterator[Action]:
        """Return all actions, in order; a state that is held is stored when it is reached."""
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

    def __str__(self) -> str:
        kept = checkpoints_text(self.slots)
        return f"online: {self.n} steps, {kept}: {cost_text(self.forward_steps, self.n)}"


# Cached: at most `slots` numbers each.
@lru_cache(maxsize=64)
def _online_positions(n: int, slots: int) -> tuple[int, ...]:
    if n == 0:
        return ()
    held: tuple[int, ...] = (0,)
    for reached in range(2, n):
        held = online_update(held, reached, slots)
    return held
