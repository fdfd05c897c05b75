"""The programs that a search compiles: the step as it is written, and candidates for a plan.

All are compiled for the memory analysis only (`program.compiled`), without XLA's own rematerialization and
as quickly as the analysis allows: on TPU at level O0, on CPU without LLVM's optimization. If the options with
which a plan will run can give another peak, it is confirmed by compiling with those.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from remat import units
from remat.errors import PlanError
from remat.planner.decisions import StepDecisions
from remat.planner.plan_decisions import ScanOption
from remat.planner.plan_file import AS_RUN, FAST
from remat.planner.search import Proposal
from remat.planner.step import TargetStep, TracedStep
from remat.program.compiled import CompiledMemory, CompilerFailure, OutOfMemory

_log = logging.getLogger("remat")

# Seconds. A confirmation expected to take longer is skipped unless `verify="as run"`; more skips fewer.
MAX_CONFIRMATION_S = 180.0
# Ratio of compile times of a TPU's default level and its fast one: 6 to 14 were measured.
_SLOWER_AS_RUN = 12.0

_T = TypeVar("_T")

#: The compiler's answer.
Answer: TypeAlias = CompiledMemory | OutOfMemory | CompilerFailure


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A program that was compiled, and the memory that the compiler reported.

    `proposal` is None for the step as it is written.
    """

    proposal: Proposal | None
    predicted_bytes: int
    memory: Answer
    extra_flops: float
    verified_level: str = FAST

    def __repr__(self) -> str:
        variant = "as written" if self.proposal is None else self.proposal.variant
        predicted = units.format_bytes(self.predicted_bytes)
        compiled = "failed" if self.failure else units.format_bytes(self.compiled_bytes)
        return f"Candidate({variant}: predicted {predicted}, compiled {compiled})"

    @property
    def decisions(self) -> StepDecisions | None:
        """Return the decisions that the program follows; None for the step as it is written."""
        return None if self.proposal is None else self.proposal.decisions

    @property
    def extra_seconds(self) -> float:
        """Return the time of recomputation, according to the model."""
        return 0.0 if self.proposal is None else max(0.0, float(self.proposal.extra_seconds))

    @property
    def lower_bound_seconds(self) -> float:
        """Return a proven lower bound on the time of recomputation."""
        return 0.0 if self.proposal is None else max(0.0, float(self.proposal.lower_bound_seconds))

    @property
    def transfer_seconds(self) -> float:
        """Return the part of `extra_seconds` for copies to the host's memory and back."""
        return max(0.0, float(sum(option.transfer_seconds for option in self._options())))

    def _options(self) -> list[ScanOption]:
        if self.decisions is None:
            return []
        return [option for _, option in self.decisions.loops.choices]

    @property
    def compiled_bytes(self) -> int:
        """Return the compiler's peak, or its lower bound; 0 if the compiler failed."""
        return 0 if isinstance(self.memory, CompilerFailure) else self.memory.peak_bytes

    @property
    def failure(self) -> str:
        """Return why the compiler failed; "" if it did not."""
        return self.memory.reason if isinstance(self.memory, CompilerFailure) else ""


class Programs:
    """The step and its candidates, each compiled once.

    Args:
      step: the step.
      unplanned: its trace without a plan.
      show: receives texts about the progress.
      known_base: the compiler's answer for the step as it is written; None to compile it.

    Attributes:
      candidates: those compiled since the last `restart`, in order.
      compile_s: the time of the slowest compilation so far.
    """

    def __init__(
        self,
        step: TargetStep,
        unplanned: TracedStep,
        show: Callable[[str], None],
        known_base: CompiledMemory | None,
    ) -> None:
        self.step = step
        self.unplanned = unplanned
        self.show = show
        self.compile_s = 0.0
        self.known_base = known_base
        self.candidates: list[Candidate] = []
        #: All on which the compiler did not fail, by their decisions.
        self._compiled: dict[StepDecisions, Candidate] = {}
        #: The first of the candidates that the compiler did not fail on.
        self._first: CompiledMemory | None = None

    def restart(self) -> None:
        """Forget the candidates, but not the bytes that the compiler reported for them."""
        self.candidates, self._first = [], None

    @functools.cached_property
    def base(self) -> Answer:
        """Return the compiler's answer for the step as it is written."""
        if self.known_base is not None:
            return self.known_base
        self.show("compiling without rematerialization")
        return self._timed(self.unplanned.memory)

    @property
    def fixed_bytes(self) -> int:
        """Return the bytes that every plan needs: arguments and results, less aliased ones.

        If the step as it is written runs out of memory, the first candidate that compiles says it.
        """
        memory = self._first if isinstance(self.base, OutOfMemory) else self.base
        if isinstance(memory, CompiledMemory):
            return memory.argument_bytes + memory.output_bytes - memory.alias_bytes
        return self.unplanned.argument_bytes()

    @property
    def base_peak_bytes(self) -> int:
        """Return the peak without rematerialization; 0 if the compiler failed."""
        return 0 if isinstance(self.base, CompilerFailure) else self.base.peak_bytes

    @functools.cached_property
    def flops(self) -> float:
        """Return the FLOPs of the step without rematerialization."""
        return self.unplanned.flops()

    def as_written(self) -> Candidate:
        """Return the step as it is written as a candidate."""
        return Candidate(None, self.base_peak_bytes, self.base, 0.0)

    def candidate(self, proposal: Proposal, predicted_bytes: int) -> Candidate:
        """Return the candidate of a proposal, compiled unless that was done before."""
        for known in self.candidates:
            if known.decisions == proposal.decisions:
                return known
        found = self._compiled.get(proposal.decisions)
        if found is None:
            found = self._compile(proposal, predicted_bytes)
        if not isinstance(found.memory, CompilerFailure):
            self._compiled[proposal.decisions] = found
        self.candidates.append(found)
        if self._first is None and isinstance(found.memory, CompiledMemory):
            self._first = found.memory
        if isinstance(found.memory, CompilerFailure) and isinstance(self.base, CompilerFailure):
            raise PlanError(
                f"the compiler for {self.step.target.name} fails on the step, without rematerialization "
                f"({self.base.reason}) and with ({found.memory.reason}). Compile the step by itself first."
            )
        return found

    def _compile(self, proposal: Proposal, predicted_bytes: int) -> Candidate:
        traced = self._following(proposal.decisions)
        self.show(f"compiling a plan predicted to need {units.format_bytes(predicted_bytes)}")
        memory = self._timed(traced.memory)
        found = Candidate(proposal, predicted_bytes, memory, traced.flops() - self.flops)
        _log.debug(
            "remat: predicted %d bytes, compiled %s, %.3g FLOPs recomputed",
            predicted_bytes,
            found.failure or found.compiled_bytes,
            found.extra_flops,
        )
        return found

    def is_to_be_confirmed(self, verify: str | None) -> bool:
        """Return whether a candidate must be compiled again, with the options with which it will run."""
        platform = self.step.target.platform
        if platform == "cpu" or verify == FAST:
            return False  # CPU compilers have one level, and no rematerialization of their own
        slower = _SLOWER_AS_RUN if platform == "tpu" else 1.0
        return verify == AS_RUN or self.compile_s * slower <= MAX_CONFIRMATION_S

    def _following(self, decisions: StepDecisions) -> TracedStep:
        return self.step.trace_following(decisions, self.unplanned)

    def as_run(self, candidate: Candidate) -> Answer:
        """Return the compiler's answer for a candidate, with the options with which it will run."""
        self.show("compiling the plan as it will run")
        decisions = candidate.decisions
        traced = self.unplanned if decisions is None else self._following(decisions)
        memory = traced.memory(as_run=True)
        needed = 0 if isinstance(memory, CompilerFailure) else memory.peak_bytes
        _log.debug("remat: %d bytes as it will run, %d before", needed, candidate.compiled_bytes)
        return memory

    def _timed(self, compile: Callable[[], _T]) -> _T:
        start = time.perf_counter()
        answer = compile()
        self.compile_s = max(self.compile_s, time.perf_counter() - start)
        return answer
