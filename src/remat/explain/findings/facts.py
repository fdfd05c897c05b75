"""The facts that findings are derived from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from remat import _jax
from remat.explain.account import Account
from remat.explain.phases import PhasedProgram
from remat.explain.sources import user_source_of
from remat.explain.step import ExplainedStep
from remat.program import compiled as compiling
from remat.report.model import Memory, Value


@dataclasses.dataclass(frozen=True)
class Followed:
    """The plan that a step follows: bytes of one device, costs by the planner's model."""

    budget_bytes: int
    peak_bytes: int | None
    without_remat_bytes: int
    flops: float
    extra_flops: float
    seconds: float
    extra_seconds: float


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Facts:
    """The facts that findings are derived from.

    Args:
      compiled: the compiler's figures, if it was asked.
      compiled_inlined: asks it for the temporaries of the step with some of its regions inlined.
      predicted_donating: predicts the peak of the step if it donates these arguments, too.
      plan: the plan that the step follows, if any.
      refused: the compiler's error, if the step does not fit the device.
      without_plan: of the step without the plan that it follows.
    """

    step: ExplainedStep
    sides: PhasedProgram
    account: Account
    predicted: Memory
    compiled: Memory | None
    compiled_inlined: Callable[[Callable[[_jax.JaxprEqn], bool]], int | None]
    predicted_donating: Callable[[frozenset[str]], int]
    plan: Followed | None = None
    refused: compiling.OutOfMemory | None = None
    without_plan: Facts | None = None

    @property
    def peak_bytes(self) -> int:
        """Return the compiler's peak, or the predicted one if it was not asked."""
        return (self.compiled or self.predicted).peak_bytes

    @property
    def fixed_bytes(self) -> int:
        """Return the bytes of arguments and results, which no plan makes smaller."""
        memory = self.compiled or self.predicted
        return memory.argument_bytes + memory.output_bytes - memory.alias_bytes

    def fit_call(self, budget: str) -> str:
        """Return the call that fits the step to a budget: a loss is fitted with its gradient."""
        words = self.step.words
        is_loss = self.step.undifferentiated is not None
        return f"{words.fit}({f'{words.gradient}(loss)' if is_loss else 'step'}, budget={budget})"


def saved_values(facts: Facts) -> list[Value]:
    """Return the values that are kept from the forward to the backward pass."""
    return [value for value in facts.account.values if value.kind == "saved"]


def at_line(eqn: _jax.JaxprEqn) -> str:
    """Return the source of an equation as the end of a phrase: `` at net.py:12 (mlp)``."""
    line = user_source_of(eqn)
    return f" at {line}" if line else ""
