"""The binomial schedule over two memories, and how often it uses each slot.

Reference: Stumm & Walther, "Multistage approaches for optimal offline checkpointing", SIAM J. Sci.
Comput. 31 (2009).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from remat.errors import ScheduleError
from remat.loops.schedules.actions import Action, ListedSchedule
from remat.loops.schedules.binomial import Binomial, binomial_split
from remat.loops.schedules.shared import check_counts, cost_text, slots_text


@dataclass(frozen=True)
class TwoTier(ListedSchedule):
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
        check_counts(self.n, self.slots)

    @property
    def slots(self) -> int:
        """States kept at a time, in both memories."""
        return self.memory_slots + self.host_slots

    @property
    def forward_steps(self) -> int:
        """Evaluations of the body, with one inside each reversed step."""
        return Binomial(self.n, self.slots).forward_steps

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

    def __str__(self) -> str:
        return (
            f"two tiers: {self.n} steps, {slots_text(self.memory_slots)} in memory and "
            f"{self.host_slots} on the host: {cost_text(self.forward_steps, self.n)}, "
            f"{self.host_writes} writes to and {self.host_reads} reads from the host"
        )


# At most 2 · `slots` numbers each, which depend on the arguments alone.
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


def _add(a: list[int], b: list[int]) -> list[int]:
    if len(a) < len(b):
        a, b = b, a
    return [x + y for x, y in zip(a, b)] + a[len(b) :]
