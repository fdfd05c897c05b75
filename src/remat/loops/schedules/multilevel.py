"""Nested loops, each of which stores the states at which the next inner one begins.

Reference: Griewank & Walther, Evaluating Derivatives, 2nd ed., 2008, section 12.2 (multilevel
checkpointing).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from remat.errors import ScheduleError
from remat.loops.schedules.shared import Schedule, check_counts, checkpoints_text, cost_text


@dataclass(frozen=True)
class Multilevel(Schedule):
    """Nested loops, each level storing the states at which the level below it begins.

    A loop of `n` steps is cut into blocks of lengths[1]·…·lengths[-1] steps and a shorter last
    block, each block is cut again by the next level, and so on.

    With `step_recomputed` the body is recomputed step by step when it is reversed, as in the other
    schedules; without it the residuals of the innermost blocks are kept, and one sweep is saved.

    >>> schedule = Multilevel.balanced(n=100, depth=2)
    >>> schedule.lengths, schedule.forward_steps, schedule.peak_slots, schedule.peak_residuals
    ((10, 10), 300, 20, 1)
    >>> print(Multilevel.balanced(n=101, depth=2, step_recomputed=False))
    multilevel 8 × 13: 101 steps, 7 checkpoints and 13 steps' residuals: 192 forward steps (1.90 per step)

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
        check_counts(self.n, 1)
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
        """Return the schedule of least memory for a given depth, any `n`.

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
        """Return the number of nested loops."""
        return len(self.lengths)

    @property
    def forward_steps(self) -> int:
        """Return the evaluations of the body, with one inside each reversed step.

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
        """Return `forward_steps`, which include the loop's result."""
        return self.forward_steps

    @property
    def block(self) -> int:
        """Return the number of steps of one block of the outermost loop."""
        return math.prod(self.lengths[1:])

    def _inner(self, n: int) -> Multilevel:
        return Multilevel(n, self.lengths[1:], self.step_recomputed)

    @property
    def peak_slots(self) -> int:
        """Return the largest number of states kept at a time."""
        if self.depth == 1:
            return self.n if self.step_recomputed else 0
        blocks, rest = divmod(self.n, self.block)
        longest = self.block if blocks else rest
        return blocks + self._inner(longest).peak_slots

    @property
    def peak_residuals(self) -> int:
        """Return the largest number of steps whose residuals are kept at a time."""
        innermost = min(self.n, self.lengths[-1])
        return min(innermost, 1) if self.step_recomputed else innermost

    def __str__(self) -> str:
        kept = checkpoints_text(self.peak_slots)
        if not self.step_recomputed:
            kept += f" and {self.peak_residuals} steps' residuals"
        return (
            f"multilevel {' × '.join(map(str, self.lengths))}: {self.n} steps, {kept}: "
            f"{cost_text(self.forward_steps, self.n)}"
        )


def _balanced(n: int, depth: int, state: int, inner: int) -> tuple[int, ...]:
    """Return lengths with a product of at least n and the least state·Σ outer + inner·innermost."""
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
