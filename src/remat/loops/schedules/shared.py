"""The base class of all schedules, checks of their arguments, and the text of their counts."""

from __future__ import annotations

from abc import ABC, abstractmethod

from remat.errors import ScheduleError


class Schedule(ABC):
    """A schedule that reverses `n` steps of a loop; see `remat.loops.schedules` for how it counts."""

    n: int

    @property
    @abstractmethod
    def forward_steps(self) -> int:
        """Return the evaluations of the body, with one inside each reversed step."""

    @property
    def grad_forward_steps(self) -> int:
        """Return `forward_steps` under `jax.grad`, where the loop's result is computed as well."""
        return self.forward_steps + (self.n > 0)

    @property
    def recomputed_steps(self) -> int:
        """Return the evaluations of the body beyond one for each step."""
        return self.forward_steps - self.n


def check_counts(n: int, slots: int) -> None:
    """Raise for numbers of steps and slots that no schedule can have."""
    for name, value, least in (("steps", n, 0), ("slots", slots, 1)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ScheduleError(f"the number of {name} is an int, not {value!r}.")
        if value < least:
            raise ScheduleError(f"a schedule has at least {least} {name}, not {value}.")


def checkpoints_text(count: int) -> str:
    """Return a number of checkpoints as text."""
    return f"{count} checkpoint" if count == 1 else f"{count} checkpoints"


def cost_text(forward_steps: int, n: int) -> str:
    """Return the cost of reversing `n` steps as text."""
    per_step = f" ({forward_steps / n:.2f} per step)" if n else ""
    return f"{forward_steps} forward steps{per_step}"
