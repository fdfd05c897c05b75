"""The planning of one step: from its trace to a verified plan within a budget.

The search proposes, compiles and corrects: a model of the step's memory proposes decisions (`step_model`),
the compiler reports their peak (`programs`), and its reports correct the next proposal (`search`). Of all
candidates within the budget, the plan is the one of the least cost: extra time, or on CPUs nearly FLOPs
alone (`step_model`). Only candidates whose peak the compiler has reported are returned. A step that fits as
it is written needs no candidate, unless the user's own checkpoints recompute more than the budget requires
(`_with_fewer_checkpoints`).

If the compiler fails, or only the host's memory is exceeded, the search is repeated without offloading
(`_stop_offloading`).

The whole step is compiled:

* once without rematerialization; its memory is cached;
* once for each candidate. `search.CompileLimits` has the numbers: at most four, and four more while each is
  expected to recompute much less than the best. If none of the first four fits, up to five smaller ones are
  compiled, then the smallest of each variant and the one by hand, and a few that are larger. If the best one
  leaves much of the budget unused, up to two more are. One to three are usual;
* once more for the best candidate, with the options with which it will run (`_confirmed`). If that peak
  exceeds the budget, the search is repeated with a lower limit, at most `_MAX_CONFIRMATIONS` times in all.
  On CPU this is not needed; elsewhere `verify=` decides, and by default the time that it would take.

`remat.fit` passes `verify="fast"`: it compiles the planned step to run it in any case, compares the peak of
that program with the budget, and plans again if it is above (`Fitted._confirmed_as_run`).
`costs="measured"` also compiles single equations (`program.costs`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jaxlib

from remat import _jax, garbage, units
from remat.cache import Cache
from remat.errors import PlanError
from remat.ir.fingerprint import fingerprint
from remat.ir.restriction import marks_of
from remat.planner.host_memory import Transfer
from remat.planner.host_state import (
    HostState,
)
from remat.planner.plan_file import AS_RUN, FAST, Attempt, Plan
from remat.planner.priced_step import QUICK_SOLVER, SOLVER, PricedStep
from remat.planner.programs import Candidate, Programs
from remat.planner.progress import Progress
from remat.planner.refusal import Refused, refusal
from remat.planner.search import CompiledProposal, CompileLimits, Proposal, search
from remat.planner.step import TargetStep, TracedStep
from remat.planner.step_model import StepModel
from remat.planner.whole_step_file import whole_step_plan
from remat.program.compiled import CompiledMemory, CompilerFailure, OutOfMemory
from remat.program.costs import Costs, Roofline, slowdowns
from remat.program.from_jaxpr import Execution
from remat.versions import own_version, version_of

_log = logging.getLogger("remat")

# Share of the recomputation time of the user's own checkpoints. If the step fits as it is written, a plan
# replaces them only if it recomputes less than this; a larger share replaces them more often.
_FEWER = 0.98
# Share of the step's FLOPs. The search ends with a plan that recomputes at most this much; a larger
# share ends it earlier.
_NEGLIGIBLE_FLOPS = 0.001
# Share of the step's FLOPs. If a plan recomputes more, the variants of the model that need least memory are
# tried, too; a larger share tries them less often.
_MANY_FLOPS = 0.03
# Share of the step's time above which copies to the host cause a warning; a larger share warns less often.
_SLOW_COPIES = 0.1
# The most compilations of plans as they will run; between them the search is repeated with a lower limit.
_MAX_CONFIRMATIONS = 4

# The packages that compile for platforms other than the CPU.
_COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda12-pjrt", "jax-cuda13-pjrt", "jax-rocm7-pjrt")}


class Estimate(NamedTuple):
    """A peak by the model, on one device, without results that have buffers of their own."""

    argument_bytes: int
    temporary_bytes: int


class Planning:
    """The planning of a step for a target and a budget.

    It remembers what it has traced and what the compiler has said.

    Args:
      step: the step.
      budget: the largest peak on one device; a share is taken of the peak without rematerialization.
      cache: keeps plans, and the compiler's answers for steps as they are written.
      progress: shows what is being done.
      costs: the cost model of recomputation.
      offload: whether activations may be kept in the host's memory.
      state: the optimizer's state and weights that are kept there; None for none.
      host_limit: bytes of host memory per device; None for those that devices of this kind have.
      verify: as for `remat.plan`.
    """

    def __init__(
        self,
        step: TargetStep,
        budget: units.Budget,
        cache: Cache,
        progress: Progress,
        costs: Costs,
        *,
        offload: bool,
        state: HostState | None = None,
        host_limit: int | None = None,
        verify: str | None = None,
    ) -> None:
        self.step = step
        self.given_budget = budget
        self.progress = progress
        self.verify = verify
        self._may_offload = offload and step.target.can_offload
        #: Whether activations may be kept in the host's memory now; `_stop_offloading` changes it.
        self.offload = self._may_offload
        self.state = state
        known = step.target.device.host_memory_bytes or None
        #: Bytes of host memory per device; None for no limit.
        self.host_limit = known if host_limit is None else host_limit
        self.cache = cache
        self.costs = costs
        #: Candidates of an abandoned search with offloading.
        self.earlier: list[Candidate] = []
        #: A limit below the budget, while `_confirmed` repeats the search.
        self._lower_limit: int | None = None

    def run(self) -> Plan:
        """Return the plan.

        Raises:
          BudgetError: no plan fits.
        """
        with self._at_work():
            known = self._known()
            if known is not None:
                return known
            best = self._within_budget(self._confirmed)
            made = self._plan(best)
            self._warn_of_slow_copies(best.transfer_seconds)
            self._remember(made)
            return made

    def first_fitting(self) -> Plan:
        """Return the first plan that is found, which may recompute more than necessary.

        It is not confirmed as it will run. A later `run` does not compile again what was compiled for it,
        and its answer is the same as without.

        Raises:
          BudgetError: no plan fits.
        """
        with self._at_work():
            return self._known() or self._plan(self._within_budget(self._first))

    def smallest_by_model(self) -> Estimate:
        """Return the smallest peak according to the model alone; nothing is compiled."""
        with self._at_work():
            smallest = self._model.smallest(self._model.variants[0])
            return Estimate(self.unplanned.argument_bytes(), smallest.model_bytes)

    def corrected(self, estimate: Estimate) -> Estimate:
        """Return another size's estimate, corrected by what was compiled for this one."""
        programs = self.programs
        made = [c for c in programs.candidates if c.proposal is not None and not c.failure]
        if not made:
            return estimate
        least = min(made, key=lambda c: c.compiled_bytes)
        assert least.proposal is not None
        ratio = (least.compiled_bytes - programs.fixed_bytes) / max(1, least.proposal.model_bytes)
        results = programs.fixed_bytes - self.unplanned.argument_bytes()
        return Estimate(estimate.argument_bytes + results, int(ratio * estimate.temporary_bytes))

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        # Plans are for compiled programs; under jax.disable_jit the trace would have unrolled loops.
        with self.progress, jax.disable_jit(False), garbage.paused():
            yield

    def _restart(self) -> None:
        """Begin as if nothing had been planned before, apart from what the compiler has said."""
        self._remember_base()
        self._offload_now(self._may_offload)
        self.earlier, self._lower_limit = [], None
        self.programs.restart()
        self._model.restart()

    # Before the search

    @functools.cached_property
    def unplanned(self) -> TracedStep:
        self.progress.show("tracing")
        return self.step.trace()

    @functools.cached_property
    def programs(self) -> Programs:
        return Programs(self.step, self.unplanned, self.progress.show, self._known_base())

    @functools.cached_property
    def budget(self) -> int:
        share = self.given_budget.is_share
        return self.given_budget.bytes_of(self._base_bytes() if share else 0)

    @property
    def limit(self) -> int:
        """Return the largest peak of a plan."""
        return self.budget if self._lower_limit is None else self._lower_limit

    @property
    def base(self) -> CompiledMemory | OutOfMemory | CompilerFailure:
        return self.programs.base

    @property
    def _transfer(self) -> Transfer | None:
        """Return the time of a copy to the host's memory or back; None if nothing may be offloaded."""
        # Transfers always have the roofline's cost: the link to the host is not measured.
        return Roofline(self.step.target.device).transfer_seconds if self.offload else None

    def _base_bytes(self) -> int:
        """Return the peak without rematerialization, of which the budget is a share."""
        if isinstance(self.base, CompilerFailure):
            raise PlanError(
                f"the compiler fails on the step without rematerialization ({self.base.reason}), so "
                "there is no peak of which the budget could be a share; pass budget= in bytes."
            )
        return self.programs.base_peak_bytes

    def _known_base(self) -> CompiledMemory | None:
        known = self.cache.get("base", self._key())
        is_usable = known is not None and set(known) == {
            f.name for f in dataclasses.fields(CompiledMemory)
        }
        return CompiledMemory(**known) if known is not None and is_usable else None

    def _remember_base(self) -> None:
        if isinstance(self.base, CompiledMemory) and self.programs.known_base is None:
            self.cache.put("base", self._key(), dataclasses.asdict(self.base))

    @functools.cached_property
    def program(self) -> str:
        return fingerprint(
            self.unplanned.jaxpr,
            self.unplanned.layout(),
            self.step.target.name,
            self.step.target.n_devices,
            self.step.jit_options,  # donation and the results' shardings change the peak
            self.unplanned.made_for().settings,
            marks_of(self.unplanned.jaxpr),
        )

    def _key(self) -> str:
        made_with = "|".join(f"{name} {version}" for name, version in self._versions())
        return f"{self.program}|{self.step.target.name}|{made_with}"

    def _versions(self) -> tuple[tuple[str, str], ...]:
        return versions(self.step.target.platform)

    # The search

    def _within_budget(self, find: Callable[[], Candidate | None]) -> Candidate:
        """Return what is found, or what is found without offloading if the host is the obstacle.

        Raises:
          BudgetError: nothing is found.
        """
        self._restart()
        best = find()
        if best is None and self.offload and any(map(self._fails_by_host, self._candidates)):
            _log.warning(
                "remat: no plan with values in host memory compiles within the budgets; planning "
                "again without offloading"
            )
            self._stop_offloading()
            best = find()
        if best is None:
            raise refusal(self._refused())
        assert isinstance(best.memory, CompiledMemory) and self._is_within(best.memory, self.budget)
        return best

    def _warn_of_slow_copies(self, transfer_seconds: float) -> None:
        step_s = self._model.step.seconds
        if not step_s:
            return  # the step computes nothing
        of_activations, of_state = (
            100 * s / step_s for s in (transfer_seconds, self._state_seconds())
        )
        if of_activations > 100 * _SLOW_COPIES:
            _log.warning(
                "remat: copies to the host and back are predicted to make the step %.0f %% slower than "
                "without recomputation; of the plans compared, none that recomputes instead is "
                "predicted to be faster",
                of_activations,
            )
        if of_state > 100 * _SLOW_COPIES:
            _log.warning(
                "remat: copies of the optimizer's state to the device and back are predicted to make the "
                "step %.0f %% slower; a larger batch, or accumulating gradients, makes that share smaller",
                of_state,
            )

    def _confirmed(self) -> Candidate | None:
        """Return the best candidate whose peak is within the budget also when compiled as it will run.

        The search compiles at a fast level. If the candidate needs more at the level that runs, the search
        is repeated with a limit that is lower by the difference.
        """
        for _ in range(_MAX_CONFIRMATIONS):
            best = self._best()
            if best is None or not self.programs.is_to_be_confirmed(self.verify):
                break
            memory = self.programs.as_run(best)
            needed = 0 if isinstance(memory, CompilerFailure) else memory.peak_bytes
            if isinstance(memory, CompiledMemory) and self._is_within(memory, self.budget):
                return dataclasses.replace(best, memory=memory, verified_level=AS_RUN)
            share = min(1.0, self.budget / max(needed, 1))
            self._lower_limit = min(self.limit, int(0.995 * share * best.compiled_bytes))
        else:
            return None
        if best is not None and self.step.target.platform == "cpu":
            return dataclasses.replace(best, verified_level=AS_RUN)
        return best

    def _best(self) -> Candidate | None:
        if isinstance(self.base, CompiledMemory) and self._is_within(self.base, self.limit):
            return self._with_fewer_checkpoints() or self.programs.as_written()
        return self._search() if self._room > 0 else None

    def _first(self) -> Candidate | None:
        """Return the first candidate that is found whose peak is within the budget."""
        if isinstance(self.base, CompiledMemory) and self._is_within(self.base, self.limit):
            return self.programs.as_written()
        return self._search(enough_seconds=math.inf) if self._room > 0 else None

    def _with_fewer_checkpoints(self) -> Candidate | None:
        """Return a plan that recomputes less than the user's own checkpoints do; None if there is none."""
        seconds = self._model.seconds_of_checkpoints
        if seconds <= _NEGLIGIBLE_FLOPS * self._model.step.computing_seconds:
            return None
        best = self._search()
        return best if best is not None and best.extra_seconds < _FEWER * seconds else None

    def _fails_by_host(self, candidate: Candidate) -> bool:
        """Return whether the compiler failed on a candidate, or it exceeds only the host's memory."""
        memory = candidate.memory
        if isinstance(memory, CompiledMemory):
            return memory.peak_bytes <= self.limit and not self._is_within(memory, self.limit)
        return isinstance(memory, CompilerFailure)

    def _stop_offloading(self) -> None:
        self._offload_now(False)
        self.earlier, self.programs.candidates = self._candidates, []
        self._lower_limit = None

    def _offload_now(self, offload: bool) -> None:
        if offload != self.offload:
            self.offload = offload
            self.__dict__.pop("_model", None)

    @property
    def _candidates(self) -> list[Candidate]:
        return self.programs.candidates

    @property
    def _room(self) -> int:
        """Return the bytes for temporaries. It only guides the search: `_fits` compares peaks."""
        return self.limit - self.programs.fixed_bytes

    def _search(self, enough_seconds: float = 0.0) -> Candidate | None:
        """Return the best candidate within the limit.

        Args:
          enough_seconds: the search ends with a candidate that recomputes for at most this long.
        """
        # The first compiled candidate may correct `fixed_bytes`. The search needs one origin throughout.
        fixed_bytes, room = self.programs.fixed_bytes, self._room

        def compiled_bytes(proposal: Proposal, expected_bytes: int) -> int:
            found = self.programs.candidate(proposal, fixed_bytes + expected_bytes)
            made.append(found)
            temporaries = max(0, found.compiled_bytes - fixed_bytes)
            # An out-of-memory error may name fewer bytes than the budget, and other failures name none.
            return temporaries if self._fits(found) else max(temporaries, room + 1)

        made: list[Candidate] = []
        seconds = self._model.step.computing_seconds
        limits = CompileLimits(
            negligible_seconds=max(enough_seconds, _NEGLIGIBLE_FLOPS * seconds),
            much_seconds=_MANY_FLOPS * seconds,
        )
        as_written: list[CompiledProposal] = []
        if isinstance(self.base, OutOfMemory | CompiledMemory):
            # The compiler's out-of-memory error names the bytes that the program needs.
            needed = max(0, self.base.peak_bytes - fixed_bytes)
            written = map(self._model.as_written, self._model.variants)
            as_written = [CompiledProposal(w, w.model_bytes, needed) for w in written]
        # The compiled bytes of the step as it is written correct the model, above all if they depend on
        # shardings.
        is_sharded = self._model.step.is_sharded
        known = as_written if is_sharded or isinstance(self.base, OutOfMemory) else []
        best, attempts = search(self._model, compiled_bytes, room, limits, known, as_written)
        return None if best is None else made[attempts.index(best)]

    @functools.cached_property
    def _model(self) -> StepModel:
        is_cpu = self.step.target.platform == "cpu"
        partition = self.step.partition(self.unplanned)
        step = PricedStep(
            self._flat,
            self.costs.seconds,
            self.unplanned.shards(),
            Execution(
                slowdowns(self.costs, self.step.target.device, partition),
                partition,
                slowdowns(self.costs) if partition.is_known else None,
            ),
            QUICK_SOLVER if is_cpu else SOLVER,
            into_products=self.step.target.platform == "tpu",
            by_flops=is_cpu,
            transfer=self._transfer,
            host_limit=self.host_limit,
            copies=self.unplanned.made_for().n_devices == 1,
            donated=self.unplanned.donated_bytes(),
        )
        return StepModel(step)

    @property
    def _flat(self) -> _jax.Jaxpr:
        return self.unplanned.flat

    def _fits(self, candidate: Candidate) -> bool:
        memory = candidate.memory
        return isinstance(memory, CompiledMemory) and self._is_within(memory, self.limit)

    def _is_within(self, memory: CompiledMemory, limit: int) -> bool:
        """Return whether the compiler's figures are within the budgets; nothing else decides."""
        fits_host = self.host_limit is None or memory.host_bytes <= self.host_limit
        return memory.peak_bytes <= limit and fits_host

    def _refused(self) -> Refused:
        return Refused(
            self.budget,
            self.host_limit,
            (*self.earlier, *self._candidates),
            self.base,
            self.programs.fixed_bytes,
            self._model.step.program,
            None if self._model.step.is_sharded else self._model.step.flat,
            self.unplanned.marked,
            could_offload=self.step.target.can_offload and not self.offload,
        )

    # Plans

    def _plan(self, best: Candidate) -> Plan:
        assert isinstance(best.memory, CompiledMemory)
        decisions = best.decisions
        state_s = self._state_seconds()
        return Plan(
            program=self.unplanned.program,
            target=self.step.target.name,
            versions=self._versions(),
            budget_bytes=self.budget,
            peak_bytes=best.memory.peak_bytes,
            predicted_bytes=best.predicted_bytes,
            peak_bytes_without_remat=self.programs.base_peak_bytes,
            flops=self.programs.flops,
            extra_flops=max(0.0, best.extra_flops),
            extra_seconds=best.extra_seconds + state_s,
            seconds=self._model.step.seconds,
            lower_bound_seconds=best.lower_bound_seconds + state_s,
            attempts=tuple(
                Attempt(
                    p.predicted_bytes,
                    p.compiled_bytes,
                    max(0.0, p.extra_flops),
                    p.extra_seconds,
                    p.failure,
                )
                for p in (*self.earlier, *self._candidates)
            ),
            is_verified=True,
            costs=self.costs.name,
            host_bytes=max(0, best.memory.host_bytes),
            transfer_seconds=best.transfer_seconds + state_s,
            whole_step=None if decisions is None else whole_step_plan(self._flat, decisions),
            made_for=self.unplanned.made_for(),
            verified_level=best.verified_level,
            marked=self.unplanned.marked,
            host_arguments=() if self.state is None else self.state.leaves,
        )

    def _state_seconds(self) -> float:
        """Return the time in which state in the host's memory is copied to the device and back."""
        if self.state is None:
            return 0.0
        return Roofline(self.step.target.device).transfer_seconds(self.state.copied_bytes)

    # The cache

    def _known(self) -> Plan | None:
        for level in (AS_RUN, FAST):
            found = self._known_at(level)
            if found is not None:
                return found
        return None

    def _known_at(self, level: str) -> Plan | None:
        data = self.cache.get("plan", self._plan_key(level))
        if data is None:
            return None
        try:
            found = Plan.from_json(data["plan"], origin="a cached plan")
            self.programs.compile_s = float(data["compile_s"])
        except (PlanError, KeyError, TypeError, ValueError) as error:
            _log.warning("remat: ignoring an unusable plan in the cache, planning again: %s", error)
            return None
        is_within = (found.peak_bytes or self.budget + 1) <= self.budget
        if level == FAST and self.programs.is_to_be_confirmed(self.verify):
            return None
        return found if found.is_verified and is_within else None

    def _plan_key(self, level: str) -> str:
        names = ",".join(self.unplanned.marked)
        question = (
            f"{self._key()}|offload={self._may_offload}|host={self.host_limit}|marked={names}"
        )
        return f"{question}|{self.costs.key}|{self.budget}|{level}"

    def _remember(self, made: Plan) -> None:
        data = {"plan": made.to_json(), "compile_s": self.programs.compile_s}
        self.cache.put("plan", self._plan_key(made.verified_level), data)


def versions(platform: str) -> tuple[tuple[str, str], ...]:
    """Return the versions of the libraries that determine a program and its peak on a platform."""
    found = [
        ("remat", own_version()),
        ("jax", jax.__version__),
        ("jaxlib", jaxlib.__version__),
    ]
    for name in _COMPILERS.get(platform, ()):
        version = version_of(name)
        if version is not None:
            found.append((name, version))
    return tuple(found)
