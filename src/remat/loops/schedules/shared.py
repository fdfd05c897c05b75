"""What all schedules share: checks of their arguments, and how they print counts."""

from __future__ import annotations

from remat.errors import ScheduleError


def check_counts(n: int, slots: int) -> None:
    """Refuse numbers of steps and slots that no schedule has."""
    for name, value, least in (("steps", n, 0), ("slots", slots, 1)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ScheduleError(f"the number of {name} is an int, not {value!r}.")
        if value < least:
            raise ScheduleError(f"a schedule has at least {least} {name}, not {value}.")


def slots_text(count: int) -> str:
    """Return a number of slots as text."""
    return f"{count} slot" if count == 1 else f"{count} slots"


def cost_text(forward_steps: int, n: int) -> str:
    """Return the cost of reversing `n` steps as text."""
    per_step = f" ({forward_steps / n:.2f} per step)" if n else ""
    return f"{forward_steps} forward steps{per_step}"
