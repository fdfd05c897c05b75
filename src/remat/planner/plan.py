"""`remat.plan`: search for a plan of a step whose compiled peak is within a budget.

The search proposes, compiles and corrects: a model of the step's memory proposes decisions, the
compiler reports their peak, and the ratio of compiled to modelled bytes corrects the next proposal. A
few rounds are enough. Of all candidates within the budget, the plan is the one that takes the least extra
time; where no copies to the host differ, the one that recomputes the least. Only candidates whose peak
the compiler has reported are returned. A step that fits as it is needs no candidate, unless the user's own
checkpoints cost time that the budget makes unnecessary (`_with_fewer_checkpoints`).

These are the searches:

* `_search_whole_step`, for steps without marked functions: the loop is in `search`, its proposals come from
  `candidates`.
* `_search_levels`, for marked functions (regions) with loops: a bisection over prices per byte
  (`marked/levels`).
* `_search_models`, for regions without loops;
* `_search_below`, where one of the last two found no plan: it aims lower until a candidate fits.

Where the compiler fails, or only the host's memory is exceeded, all is repeated without offloading
(`_stop_offloading`). The searches of regions have two models of a region's memory: in one, an output buffer
is unused until the output is computed; in the other, other values reuse it until then (`reuses_outputs`).
XLA lies between the two. Each model has its own ratio. The cache keeps the ratios by target, and the first
proposal starts from them.

The whole step is compiled, for the memory analysis only (`program.compiled`):

* once without rematerialization (`_base`; its memory is cached);
* once for each candidate (`_compile`), like the first without XLA's own rematerialization and as quickly as
  the memory analysis allows: on TPU at level O0, on CPU without LLVM's optimization;
* once more for the best candidate, with the options with which it will run (`_confirmed`). If that peak
  exceeds the budget, the search is repeated with a lower limit, at most `_MAX_CONFIRMATIONS` times in all.
  On CPU this is not needed; elsewhere `verify=` decides, and by default the time that it would take.

`remat.fit` then compiles the planned step to run it. `costs="measured"` also compiles single equations
(`program.costs`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import jax
import jaxlib

from remat import _jax, units
from remat.cache import Cache, find_cache
from remat.errors import BudgetError, PlanError
from remat.ir.fingerprint import fingerprint
from remat.module_steps import of_arrays
from remat.planner.candidates import StepModel
from remat.planner.host_memory import Transfer
from remat.planner.marked.after_edit import loop_results
from remat.planner.marked.decisions import RegionDecision
from remat.planner.marked.levels import Choice, Levels
from remat.planner.marked.regions import Application, Record
from remat.planner.plan_file import (
    AS_RUN,
    FAST,
    Attempt,
    LoopPlan,
    Plan,
    RegionPlan,
    SavedValue,
)
from remat.planner.progress import Progress
from remat.planner.rewrite import flattened
from remat.planner.scan_pairs import ScanOption
from remat.planner.search import Compiled, Effort, Proposal, search
from remat.planner.step import Step, Traced, check_step, unfitted
from remat.planner.whole_step_file import whole_step_plan
from remat.printing import shown
from remat.program.compiled import CompilerFailure, Memory, OutOfMemory
from remat.program.costs import Costs, Roofline, find_costs, slowdowns
from remat.program.from_jaxpr import n_bytes, type_text
from remat.program.targets import Target, target as find_target

_log = logging.getLogger("remat")

_MAX_COMPILES = 8  # candidates to compile; more may find a plan that recomputes less
# Share of the budget. The search ends with a plan that is at least this full; a larger share makes
# the search longer.
_CLOSE_TO_BUDGET = 0.98
# Share of the time of the user's own checkpoints. A plan that recomputes less than this takes their place
# where the step as it is written fits, too.
_FEWER = 0.98
# Share of the step's FLOPs. The search ends with a plan that recomputes at most this much; a larger
# share ends it earlier.
_NEGLIGIBLE_FLOPS = 0.001
# Levels that the bisection skipped and that are compiled if it found no plan; more take longer.
_MAX_SKIPPED_LEVELS = 4
# Where nothing fits the budget: the next aim as a share of the smallest model budget so far. A larger
# share takes smaller steps.
_NEXT_AIM = 0.85
# Compiled bytes for one more byte in the model. A line through two compiled candidates is used if its
# slope is within these limits.
_MIN_SLOPE, _MAX_SLOPE = 0.3, 4.0
# Share of the step's time. Where copies to the host take more, a warning says so; a larger share warns later.
_SLOW_COPIES = 0.1
# Compilations of plans as they will run; the search is repeated with a lower limit in between.
_MAX_CONFIRMATIONS = 4
_MAX_CONFIRMATION_S = 180.0  # a compilation expected to take longer is left out unless asked for
_SLOWER_AS_RUN = 12.0  # a TPU's default level against its fast one: 6 to 14 times (measured)

# The packages that compile for platforms other than the CPU.
_COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda12-pjrt", "jax-cuda13-pjrt", "jax-rocm7-pjrt")}

_T = TypeVar("_T")


def plan(
    step: Callable,
    /,
    *args: Any,
    budget: units.Number | None = None,
    target: str | Target | None = None,
    offload: bool = True,
    host_budget: units.Number | None = None,
    kwargs: Mapping[str, Any] | None = None,
    cache: Cache | bool | str | os.PathLike[str] = True,
    costs: str | Costs = "roofline",
    verify: str | None = None,
    progress: bool | Callable[[str], None] = True,
    **jit_options: Any,
) -> Plan:
    """Choose what a step saves and recomputes so that the compiler's peak is within a budget.

    The step is compiled but not run. Arguments may be arrays or `jax.ShapeDtypeStruct`s (with
    shardings, where the step runs on several devices).

    >>> import jax, jax.numpy as jnp, remat
    >>> @remat.auto
    ... def loss(w, x):
    ...     for _ in range(8):
    ...         x = jnp.tanh(x @ w)
    ...     return x.sum()
    >>> w, x = jnp.eye(64), jnp.ones((1000, 64))
    >>> plan = remat.plan(jax.value_and_grad(loss), w, x, budget="60%")
    >>> plan.is_verified, plan.peak_bytes <= 0.6 * plan.peak_bytes_without_remat
    (True, True)

    Args:
      step: the training step. If functions in it are marked by `remat.auto`, only these recompute;
        otherwise any operation may be recomputed.
      args, kwargs: the arguments of the step.
      budget: the largest peak on one device that the compiler may report (arguments + temporaries +
        results - aliased): bytes, a text such as "8GiB", a share of the peak without
        rematerialization such as "60%", or None for all of the device's memory.
      target: None for the device at hand; "tpu:v5e:16x16", "gpu:h100" and the like for a device that
        is not attached (see `remat.program.targets`).
      offload: whether loops may keep values in host memory, if the target supports that. They do so
        where it takes less time than recomputing, or where no other plan fits. Nothing is offloaded
        on a CPU, whose memory is the host's, or on a GPU, where XLA has miscompiled scans with
        offloaded residuals. If the compiler fails on all plans with offloading, the step is planned
        without.
      host_budget: the most host memory per device that the compiler may report: bytes, or a text such
        as "48GiB". None for the share of a host's memory that a device of this kind has, where that is
        known (TPUs).
      cache: whether to use the plans in the user's cache directory and to add to them; or a cache or
        a folder to use instead.
      costs: the cost model of recomputation: "roofline", from the device's peak FLOP/s and bandwidth;
        "measured", by timing equations on the device at hand; or a `remat.program.costs.Costs`.
      verify: "as run" confirms the plan by compiling it with the options with which it will run, which
        takes minutes for large programs on TPUs; "fast" relies on the fast level at which the search
        compiles there. None confirms as run where that is expected to take less than three minutes. On
        CPUs both are the same. `Plan.verified_level` says what was done.
      progress: whether to show the progress on a terminal; or a function to call with each text that
        would be shown there.
      jit_options: options of `jax.jit`: donation, static arguments, shardings.

    Returns:
      The verified plan.

    Raises:
      BudgetError: no plan fits. The message has the smallest peak that was reached and its largest
        parts.
      PlanError: the step cannot be analysed on the target, or `costs` is invalid, or
        "measured" for a device that is not attached; or `verify` is invalid.
      UnitsError: the budget is neither a number of bytes nor a share.
    """
    check_step(step)
    step, args, kwargs = of_arrays(step, args, kwargs or {})
    step, jit_options = unfitted(step, jit_options)
    if verify not in (None, AS_RUN, FAST):
        raise PlanError(f"verify={shown(verify)} must be {AS_RUN!r}, {FAST!r} or None.")
    host_limit = None if host_budget is None else units.parse_bytes(host_budget)
    limit = None if budget is None else units.parse_budget(budget)
    at = find_target(target)
    if limit is None:
        limit = _all_memory(at)
    planned = Step(step, args, kwargs, at, jit_options)
    store = find_cache(cache)
    here = None if at.ahead_of_time else at.devices[0]
    priced = find_costs(costs, at.device, here, store)
    # Plans are for compiled programs; under jax.disable_jit the trace would have unrolled loops.
    with Progress(progress) as show, jax.disable_jit(False):
        return _Search(
            planned,
            limit,
            store,
            show,
            priced,
            offload=offload,
            host_limit=host_limit,
            verify=verify,
        ).run()


def _all_memory(target: Target) -> units.Budget:
    n_bytes = target.device.memory_bytes
    if not n_bytes:
        raise PlanError(f"the memory size of {target.name} is unknown; pass budget=.")
    return units.parse_budget(n_bytes)


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """Decisions that were compiled, and the memory that the compiler reported."""

    choice: Choice
    predicted_bytes: int
    memory: Memory | OutOfMemory | CompilerFailure
    extra_flops: float
    verified_level: str = FAST

    @property
    def compiled_bytes(self) -> int:
        """Return the compiler's peak, or its lower bound; 0 if the compiler failed."""
        return 0 if isinstance(self.memory, CompilerFailure) else self.memory.peak_bytes

    @property
    def failure(self) -> str:
        """Return why the compiler failed; "" if it did not."""
        return self.memory.reason if isinstance(self.memory, CompilerFailure) else ""


class _Search:
    def __init__(
        self,
        step: Step,
        budget: units.Budget,
        cache: Cache,
        show: Callable,
        costs: Costs,
        *,
        offload: bool,
        host_limit: int | None = None,
        verify: str | None = None,
    ) -> None:
        self.step = step
        self.verify = verify
        self.compile_s = 0.0  # of the slowest compilation so far
        self.offload = bool(offload) and step.target.can_offload
        known = step.target.device.host_memory_bytes or None
        #: Bytes of host memory per device; None for no limit.
        self.host_limit = known if host_limit is None else host_limit
        self.cache = cache
        self.show = show
        show("tracing")
        self.costs = costs
        self.levels = self._levels()
        self.plain: Traced = self.levels.traced_plainly
        # The step without planning: JAX differentiates regions like any other function.
        self.unplanned: Traced = step.trace(Application({}, recomputes=False))
        self.program = fingerprint(
            self.plain.jaxpr,
            self.plain.layout(),
            step.target.name,
            step.target.n_devices,
            step.jit_options,  # donation and the results' shardings change the peak
            self.plain.made_for().settings,
        )
        show("compiling without rematerialization")
        self.base = self._base()
        self.budget = budget.bytes_of(self._base_bytes(budget))
        #: The largest peak of a plan; `run` may lower it.
        self.limit = self.ceiling = self.budget
        self.fixed_bytes = self._fixed_bytes()
        self.candidates: list[_Candidate] = []
        #: Candidates of a search with offloading that was given up.
        self.earlier: list[_Candidate] = []
        self._begin()

    def _begin(self) -> None:
        """Forget what compiled candidates say about the models."""
        self.ratios: dict[bool, float] = {}
        self.level_ratios: dict[int, float] = {}
        self.samples: dict[bool, set[tuple[int, int]]] = {False: set(), True: set()}
        #: The models (by `reuses_outputs`) whose smallest schedule was compiled.
        self.smallest_compiled: set[bool] = set()

    # Before the search

    def _levels(self) -> Levels:
        return Levels(self.step, self.costs, self._transfer)

    @property
    def _transfer(self) -> Transfer | None:
        """Return the time of a copy to the host's memory or back; None if nothing may be offloaded."""
        # Transfers always cost what the roofline says: the link to the host is not measured.
        return Roofline(self.step.target.device).transfer_seconds if self.offload else None

    def _base_bytes(self, budget: units.Budget) -> int:
        """Return the peak without rematerialization, of which a budget may be a share."""
        if not isinstance(self.base, CompilerFailure):
            return self.base.peak_bytes
        if budget.is_share:
            raise PlanError(
                f"the compiler fails on the step without rematerialization ({self.base.reason}), so "
                "there is no peak of which the budget could be a share; pass budget= in bytes."
            )
        return 0

    def _base(self) -> Memory | OutOfMemory | CompilerFailure:
        known = self.cache.get("base", self._key())
        if known is not None and set(known) == {f.name for f in dataclasses.fields(Memory)}:
            return Memory(**known)
        base = self._timed(self.unplanned.memory)
        if isinstance(base, Memory):
            self.cache.put("base", self._key(), dataclasses.asdict(base))
        return base

    def _key(self) -> str:
        made_with = "|".join(f"{name} {version}" for name, version in self._versions())
        return f"{self.program}|{self.step.target.name}|{made_with}"

    def _versions(self) -> tuple[tuple[str, str], ...]:
        return versions(self.step.target.platform)

    def _fixed_bytes(self) -> int:
        """Return the bytes that every plan needs: arguments and results, less aliased ones."""
        if isinstance(self.base, Memory):
            return self.base.argument_bytes + self.base.output_bytes - self.base.alias_bytes
        shards = self.plain.shards()
        jaxpr = self.plain.jaxpr
        return sum(n_bytes(v.aval) // n for v, n in zip(jaxpr.invars, shards))

    def _timed(self, compile: Callable[[], _T]) -> _T:
        start = time.perf_counter()
        answer = compile()
        self.compile_s = max(self.compile_s, time.perf_counter() - start)
        return answer

    # The search

    def run(self) -> Plan:
        known = self._known()
        if known is not None:
            return known
        self.limit = self.ceiling = self._effective_budget()
        best = self._confirmed(self._best)
        if best is None and self.offload and any(map(self._fails_by_host, self.candidates)):
            _log.warning(
                "remat: no plan with values in host memory compiles within the budgets; planning "
                "again without offloading"
            )
            self._stop_offloading()
            best = self._confirmed(self._best)
        if best is None:
            self._refuse()
        assert self._fits(best)
        made = self._plan(best)
        if made.transfer_seconds > _SLOW_COPIES * made.seconds:
            _log.warning(
                "remat: copies to the host and back are predicted to make the step %.0f %% slower than "
                "without recomputation; of the plans compared, none that recomputes instead is "
                "predicted to be faster",
                100 * made.transfer_seconds / made.seconds,
            )
        self._remember(made)
        return made

    def _confirmed(self, find: Callable[[], _Candidate | None]) -> _Candidate | None:
        """Return the best candidate whose peak is within the budget as it will run, too.

        The search compiles at a fast level. Where the level that runs needs more, the search is
        repeated with a limit that is lower by as much.
        """
        for _ in range(_MAX_CONFIRMATIONS):
            best = find()
            if best is None or not self._is_to_be_confirmed():
                break
            self.show("compiling the plan as it will run")
            is_base = best.memory is self.base
            traced = self.unplanned if is_base else self._traced(best.choice)
            memory = traced.memory(as_run=True)
            needed = 0 if isinstance(memory, CompilerFailure) else memory.peak_bytes
            _log.debug("remat: %d bytes as it will run, %d before", needed, best.compiled_bytes)
            self.limit, lower = self.ceiling, self.limit
            if isinstance(memory, Memory) and self._is_within(memory):
                return dataclasses.replace(best, memory=memory, verified_level=AS_RUN)
            share = min(1.0, self.ceiling / max(needed, 1))
            self.limit = min(lower, int(0.995 * share * best.compiled_bytes))
        else:
            return None
        if best is not None and self.step.target.platform == "cpu":
            return dataclasses.replace(best, verified_level=AS_RUN)
        return best

    def _is_to_be_confirmed(self) -> bool:
        """Return whether a candidate is to be compiled again, with the options with which it will run."""
        platform = self.step.target.platform
        if platform == "cpu" or self.verify == FAST:
            return False  # CPU compilers have one level, and no rematerialization of their own
        slower = _SLOWER_AS_RUN if platform == "tpu" else 1.0
        return self.verify == AS_RUN or self.compile_s * slower <= _MAX_CONFIRMATION_S

    def _best(self) -> _Candidate | None:
        if isinstance(self.base, Memory) and self._is_within(self.base):
            return self._with_fewer_checkpoints() or self._without_recomputation(self.base)
        best = self._search() if self.room > 0 else None
        if best is None and self.levels.has_regions:
            best = self._search_below()
        return best

    def _with_fewer_checkpoints(self) -> _Candidate | None:
        """Return a plan that recomputes less than the user's own checkpoints do; None if there is none."""
        if self.levels.has_regions:
            return None
        seconds = self._step_model.seconds_of_checkpoints
        if seconds <= _NEGLIGIBLE_FLOPS * self.step_seconds:
            return None
        best = self._search_whole_step()
        is_better = best is not None and best.choice.extra_seconds < _FEWER * seconds
        return best if is_better else None

    def _fails_by_host(self, candidate: _Candidate) -> bool:
        """Return whether the compiler failed on a candidate, or it only takes too much host memory."""
        memory = candidate.memory
        if isinstance(memory, Memory):
            return memory.peak_bytes <= self.limit and not self._is_within(memory)
        return isinstance(memory, CompilerFailure)

    def _stop_offloading(self) -> None:
        self.offload = False
        self.earlier, self.candidates = self.candidates, []
        self.levels = self._levels()
        self.__dict__.pop("_step_model", None)
        self._begin()

    @property
    def room(self) -> int:
        """Return the bytes for temporaries. It only guides the search: `_fits` compares peaks."""
        return self.limit - self.fixed_bytes

    def _search(self) -> _Candidate | None:
        if not self.levels.has_regions:
            return self._search_whole_step()
        if len(self.levels) > 1:
            return self._search_levels()
        return self._search_models()

    def _search_whole_step(self) -> _Candidate | None:
        """Search for decisions about the flat program of a step without regions."""
        # The first compiled candidate may correct `fixed_bytes`. The search needs one origin throughout.
        fixed_bytes, room = self.fixed_bytes, self.room

        def compiled_bytes(proposal: Proposal, expected_bytes: int) -> int:
            choice = Choice(
                {},
                {},
                proposal.model_bytes,
                proposal.extra_seconds,
                proposal.lower_bound_seconds,
                transfer_seconds=sum(o.transfer_seconds for o in in_loops(proposal)),
                host_bytes=sum(o.host_bytes for o in in_loops(proposal)),
                whole_step=proposal.decisions,
            )
            found = self._compile(choice, fixed_bytes + expected_bytes)
            made.append(found)
            temporaries = max(0, found.compiled_bytes - fixed_bytes)
            # A refusal may name fewer bytes than the budget, and a failure names none.
            return temporaries if self._fits(found) else max(temporaries, room + 1)

        def in_loops(proposal: Proposal) -> list[ScanOption]:
            return [option for _, option in proposal.decisions.loops.choices]

        made: list[_Candidate] = []
        effort = Effort(negligible_seconds=_NEGLIGIBLE_FLOPS * self.step_seconds)
        as_written: list[Compiled] = []
        if isinstance(self.base, OutOfMemory | Memory):
            # A refusal by the compiler names the bytes that it needs.
            needed = max(0, self.base.peak_bytes - fixed_bytes)
            written = map(self._step_model.as_written, self._step_model.variants)
            as_written = [Compiled(w, w.model_bytes, needed) for w in written]
        # What the step needs as it is written corrects the model, above all where its bytes depend on
        # shardings.
        is_sharded = any(n > 1 for n in self.unplanned.shards())
        known = as_written if is_sharded or isinstance(self.base, OutOfMemory) else []
        best, attempts = search(self._step_model, compiled_bytes, room, effort, known, as_written)
        return None if best is None else made[attempts.index(best)]

    @functools.cached_property
    def _step_model(self) -> StepModel:
        shards = self.unplanned.shards()
        is_tpu = self.step.target.platform == "tpu"
        return StepModel(
            self._flat,
            self.costs.seconds,
            shards,
            slowdowns(self.costs),
            into_products=is_tpu,
            transfer=self._transfer,
            host_limit=self.host_limit,
            donated=self.unplanned.donated_bytes(),
        )

    @functools.cached_property
    def _flat(self) -> _jax.Jaxpr:
        return flattened(self.unplanned.jaxpr)

    def _search_levels(self) -> _Candidate | None:
        """Find, by bisection, the first level whose compiled peak fits. This is for steps with loops.

        At higher levels loops save less and recompute more. The code around the loops is solved at
        each level. The bisection predicts a level's peak as the model's peak times the ratio of the
        nearest level that was compiled.
        """
        best: _Candidate | None = None
        too_large, fitting = -1, len(self.levels)
        while fitting - too_large > 1 and len(self.candidates) < _MAX_COMPILES:
            i = self._first_level(too_large, fitting)
            predicted = self.levels.level(i).peak_bytes(False) * self._ratio_at(i)
            if best is not None and predicted > 1.1 * self.room:
                break
            candidate = self._attempt_level(i)
            if candidate is not None and self._fits(candidate):
                fitting = i
            else:
                too_large = i
            best = self._better(candidate, best)
        if best is None:
            return self._any_level()
        if not best.choice.recomputes_around_loops:
            return best
        # At the next levels loops need less memory, so that the code around them may recompute less:
        # the total may be lower.
        for i in (fitting, fitting + 1, fitting + 2):
            if i >= len(self.levels) or len(self.candidates) >= _MAX_COMPILES + 2:
                break
            best = self._better(self._attempt_level(i), best)
        return best

    def _any_level(self) -> _Candidate | None:
        """Try skipped levels, the highest first, since compiled peaks may not decrease with the level."""
        tried = set(self.level_ratios)
        for i in sorted(set(range(len(self.levels))) - tried, reverse=True)[:_MAX_SKIPPED_LEVELS]:
            best = self._better(self._attempt_level(i), None)
            if best is not None:
                return best
        return None

    def _first_level(self, too_large: int, fitting: int) -> int:
        """Return the first level between two others that is predicted to fit; the last if none is."""
        low, high = too_large + 1, fitting - 1
        while low < high:
            middle = (low + high) // 2
            if self.levels.level(middle).peak_bytes(False) * self._ratio_at(middle) <= self.room:
                high = middle
            else:
                low = middle + 1
        return low

    def _ratio_at(self, i: int) -> float:
        """Return the expected ratio of compiled to modelled bytes at a level."""
        if not self.level_ratios:
            return self._remembered_ratios()[False]
        nearest = min(self.level_ratios, key=lambda known: (abs(known - i), known))
        return self.level_ratios[nearest]

    def _attempt_level(self, i: int) -> _Candidate | None:
        level = self.levels.level(i)
        ratio = self._ratio_at(i)
        aim = int(self.room / ratio)
        for reuses_outputs in (False, True):
            try:
                choice = level.solve(reuses_outputs, aim)
            except BudgetError:
                continue
            return self._compiled_level(i, choice, reuses_outputs, ratio)
        if level.peak_bytes(False) > 2 * aim:
            return None  # far from what could fit
        try:
            choice = level.solve(False, level.peak_bytes(False))
        except BudgetError:
            return None
        return self._compiled_level(i, choice, False, ratio)

    def _compiled_level(
        self, i: int, choice: Choice, reuses_outputs: bool, ratio: float
    ) -> _Candidate:
        candidate = self._compiled(choice, reuses_outputs, ratio)
        self.level_ratios[i] = self.ratios.get(reuses_outputs, ratio)
        return candidate

    def _search_models(self) -> _Candidate | None:
        """Propose, compile and correct with both models in turn. This is for steps without loops.

        A model whose candidate is over the budget aims 1 % lower the next time.
        """
        best: _Candidate | None = None
        ratios = self._remembered_ratios()
        n_over_budget = {False: 0, True: 0}
        for turn in range(_MAX_COMPILES):
            for reuses_outputs in (False, True):
                if len(self.candidates) >= _MAX_COMPILES:
                    break
                ratio = self.ratios.get(reuses_outputs, ratios[reuses_outputs])
                margin = 0.995 - 0.01 * n_over_budget[reuses_outputs] if turn else 1.0
                n_compiled = len(self.candidates)
                candidate = self._attempt(
                    reuses_outputs, self._aim(reuses_outputs, int(self.room * margin), ratio), ratio
                )
                if candidate is None:
                    continue
                if not self._fits(candidate):
                    n_over_budget[reuses_outputs] += 1
                elif len(self.candidates) == n_compiled:
                    n_over_budget[reuses_outputs] -= 1  # a known candidate that fits: aim higher
                best = self._better(candidate, best)
            if best is None or not turn:
                continue
            close = best.compiled_bytes >= _CLOSE_TO_BUDGET * self.budget
            if close or best.extra_flops <= _NEGLIGIBLE_FLOPS * self.plain_flops:
                break
        return best

    def _line(
        self, reuses_outputs: bool, near: float, axis: int
    ) -> tuple[float, float, float] | None:
        """Return a line through two compiled candidates: modelled bytes, compiled bytes, slope.

        The two are those whose modelled (`axis=0`) or compiled (`axis=1`) bytes are nearest to `near`.
        The compiler needs some memory whatever is saved, so a ratio alone converges slowly.
        """
        samples = sorted(self.samples[reuses_outputs], key=lambda at: (abs(at[axis] - near), at))
        for other in samples[1:]:
            (m0, t0), (m1, t1) = samples[0], other
            slope = (t1 - t0) / (m1 - m0) if m1 != m0 else 0.0
            if _MIN_SLOPE <= slope <= _MAX_SLOPE:
                return m0, t0, slope
        return None

    def _aim(self, reuses_outputs: bool, room: int, ratio: float) -> int:
        """Return the model budget for which the compiler is expected to need `room` bytes."""
        line = self._line(reuses_outputs, room, 1)
        if line is None:
            return int(room / ratio)
        return max(1, int(line[0] + (room - line[1]) / line[2]))

    def _expected(self, reuses_outputs: bool, model_bytes: int, ratio: float) -> int:
        """Return the bytes that the compiler is expected to need for `model_bytes` of the model."""
        # Levels are different programs, so a line through candidates of two levels means nothing.
        line = self._line(reuses_outputs, model_bytes, 0) if len(self.levels) == 1 else None
        expected = int(line[1] + (model_bytes - line[0]) * line[2]) if line else 0
        return expected if expected > 0 else int(model_bytes * ratio)

    def _search_below(self) -> _Candidate | None:
        """Aim lower and lower below the budget until a candidate fits or none is smaller."""
        aims = dict.fromkeys((False, True), max(self.room, 1))
        for _ in range(5):
            for reuses_outputs in (False, True):
                tried = [model_bytes for model_bytes, _ in self.samples[reuses_outputs]]
                aims[reuses_outputs] = int(_NEXT_AIM * min([aims[reuses_outputs], *tried]))
                candidate = self._attempt(
                    reuses_outputs, aims[reuses_outputs], self.ratios.get(reuses_outputs, 1.0)
                )
                if candidate is not None and self._fits(candidate):
                    return candidate
        if not self.candidates:
            # For the error message: the smallest peak of the last level.
            last = self.levels.level(len(self.levels) - 1)
            with contextlib.suppress(BudgetError):
                candidate = self._compiled(last.smallest(), False, 1.0)
                if self._fits(candidate):
                    return candidate
        return None

    def _better(self, candidate: _Candidate | None, best: _Candidate | None) -> _Candidate | None:
        """Return the candidate if it fits and is better than the best so far, else the best so far."""
        if candidate is None or not self._fits(candidate):
            return best
        return candidate if best is None or self._is_better(candidate, best) else best

    def _is_better(self, a: _Candidate, b: _Candidate) -> bool:
        if a.choice.transfer_seconds or b.choice.transfer_seconds:
            return (self._cost_s(a), a.compiled_bytes) < (self._cost_s(b), b.compiled_bytes)
        return (a.extra_flops, a.compiled_bytes) < (b.extra_flops, b.compiled_bytes)

    def _cost_s(self, candidate: _Candidate) -> float:
        """Return the seconds of recomputation, at the step's mean FLOP/s, and of transfers."""
        rate = self.plain_flops / max(self.step_seconds, 1e-30)
        return candidate.extra_flops / max(rate, 1e-30) + candidate.choice.transfer_seconds

    @functools.cached_property
    def step_seconds(self) -> float:
        """Return the seconds of the step without recomputation, according to the cost model."""
        if not self.levels.has_regions:
            return self._step_model.seconds
        return float(sum(self.levels.level(0).problem(False).fused.seconds.values()))

    def _fits(self, candidate: _Candidate) -> bool:
        return isinstance(candidate.memory, Memory) and self._is_within(candidate.memory)

    def _is_within(self, memory: Memory) -> bool:
        """Return whether the compiler's figures are within the budgets; nothing else decides."""
        fits_host = self.host_limit is None or memory.host_bytes <= self.host_limit
        return memory.peak_bytes <= self.limit and fits_host

    def _attempt(self, reuses_outputs: bool, aim: int, ratio: float) -> _Candidate | None:
        self.show(f"planning for {units.format_bytes(self.fixed_bytes + aim)}")
        try:
            choice = self._solve(reuses_outputs, aim)
        except BudgetError:
            if reuses_outputs in self.smallest_compiled:
                return None
            self.smallest_compiled.add(reuses_outputs)
            # The model may overestimate: the compiled peak of its smallest schedule corrects it.
            try:
                choice = self.levels.level(len(self.levels) - 1).smallest(reuses_outputs)
            except BudgetError:
                return None
        return self._compiled(choice, reuses_outputs, ratio)

    def _compiled(self, choice: Choice, reuses_outputs: bool, ratio: float) -> _Candidate:
        """Return the candidate of a choice, compiled unless that was done before."""
        predicted = self.fixed_bytes + self._expected(reuses_outputs, choice.model_bytes, ratio)
        candidate = self._compile(choice, predicted)
        memory = candidate.memory
        if isinstance(memory, CompilerFailure):
            return candidate
        needed = memory.peak_bytes
        if isinstance(memory, OutOfMemory):
            # The refusal names the bytes that the program needs.
            needed = max(memory.needed_bytes, memory.limit_bytes)
        temporaries = needed - self.fixed_bytes
        self.samples[reuses_outputs].add((choice.model_bytes, temporaries))
        self.ratios[reuses_outputs] = max(0.05, temporaries / max(1, choice.model_bytes))
        return candidate

    def _solve(self, reuses_outputs: bool, aim: int) -> Choice:
        """Return the choice with the least recomputation within a model budget.

        Levels are ordered by price per byte, so a bisection finds the first at which the loops leave
        enough memory. That level and the one before are solved.
        """
        low, high = 0, len(self.levels) - 1
        while low < high:
            middle = (low + high) // 2
            if self.levels.level(middle).peak_bytes(reuses_outputs) <= aim:
                high = middle
            else:
                low = middle + 1
        found: list[Choice] = []
        problem: BudgetError | None = None
        for i in sorted({low, max(0, low - 1)}, reverse=True):
            try:
                found.append(self.levels.level(i).solve(reuses_outputs, aim))
            except BudgetError as error:
                problem = error
        if not found:
            assert problem is not None
            raise problem
        return min(found, key=lambda choice: choice.extra_seconds)

    def _traced(self, choice: Choice) -> Traced:
        if choice.whole_step is not None:
            return self.step.trace_following(choice.whole_step)
        return self.step.trace(Application(choice.decisions, choice.loops))

    def _compile(self, choice: Choice, predicted_bytes: int) -> _Candidate:
        for known in self.candidates:
            if _same(known.choice, choice):
                return known
        traced = self._traced(choice)
        self.show(f"compiling a plan predicted to need {units.format_bytes(predicted_bytes)}")
        memory = self._timed(traced.memory)
        is_first = not any(isinstance(c.memory, Memory) for c in self.candidates)
        if is_first and isinstance(self.base, OutOfMemory) and isinstance(memory, Memory):
            before = self.fixed_bytes
            self.fixed_bytes = memory.argument_bytes + memory.output_bytes - memory.alias_bytes
            for model, samples in self.samples.items():
                self.samples[model] = {(m, t + before - self.fixed_bytes) for m, t in samples}
        candidate = _Candidate(choice, predicted_bytes, memory, traced.flops() - self.plain_flops)
        self.candidates.append(candidate)
        _log.debug(
            "remat: predicted %d bytes, compiled %s, %.3g FLOPs recomputed",
            predicted_bytes,
            candidate.failure or candidate.compiled_bytes,
            candidate.extra_flops,
        )
        if isinstance(memory, CompilerFailure) and isinstance(self.base, CompilerFailure):
            raise PlanError(
                f"the compiler for {self.step.target.name} fails on the step, without rematerialization "
                f"({self.base.reason}) and with ({memory.reason}). Compile the step by itself first."
            )
        return candidate

    @functools.cached_property
    def plain_flops(self) -> float:
        return self.unplanned.flops()

    @property
    def _base_peak_bytes(self) -> int:
        """Return the peak without rematerialization; 0 if the compiler failed."""
        return 0 if isinstance(self.base, CompilerFailure) else self.base.peak_bytes

    def _refuse(self) -> NoReturn:
        tried = [*self.earlier, *self.candidates]
        base = self._base_peak_bytes
        reached = [p.compiled_bytes for p in tried if not p.failure]
        reached += [base] if isinstance(self.base, Memory) else []
        smallest = min(reached, default=base)
        shown = units.format_bytes
        without = (
            "that of the step without rematerialization"
            if smallest == base
            else f"{shown(base)} ({base} bytes) without rematerialization"
        )
        what = (
            f"arguments and results alone take {shown(self.fixed_bytes)}"
            if self.fixed_bytes >= self.budget
            else f"arguments and results take {shown(self.fixed_bytes)} of that, the largest "
            f"temporaries {self._largest()}"
        )
        if self.fixed_bytes >= self.budget and not tried:
            raise BudgetError(
                f"no plan fits {shown(self.budget)} ({self.budget} bytes): {what} ({self.fixed_bytes} "
                f"bytes), and the peak is {shown(base)} ({base} bytes) without rematerialization. Raise "
                "budget= to a size between the two, donate arguments (donate_argnums=), or use a smaller "
                "batch or more devices."
            )
        raise BudgetError(
            f"no plan fits {shown(self.budget)} ({self.budget} bytes); the smallest peak that was "
            f"reached is {shown(smallest)} ({smallest} bytes), {without}; {what}."
            f"{self._other_reasons(tried)} Raise budget= to at least {smallest} bytes, "
            f"{self._offload_advice()}donate arguments (donate_argnums=), or use a smaller batch or "
            "more devices."
        )

    def _other_reasons(self, tried: list[_Candidate]) -> str:
        """Return the part of an error message about plans that do not fail by the device's memory."""
        text = ""
        on_host = [p.memory.host_bytes for p in tried if isinstance(p.memory, Memory)]
        if self.host_limit is not None and max(on_host, default=0) > self.host_limit:
            text += (
                f" Plans were over host_budget={self.host_limit}: up to "
                f"{units.format_bytes(max(on_host))} in host memory."
            )
        failures = [p.failure for p in tried if p.failure]
        if failures:
            text += f" The compiler failed on {len(failures)} plans: {failures[0]}."
        return text

    def _offload_advice(self) -> str:
        is_possible = self.step.target.can_offload and not self.offload
        return "allow offload=True, " if is_possible else ""

    def _largest(self) -> str:
        program = (
            self.levels.level(len(self.levels) - 1).program
            if self.levels.has_regions
            else self._step_model.program
        )
        sizes: dict[str, int] = {}
        for op in program.ops:
            for v in op.results:
                sizes[program.types[v]] = max(sizes.get(program.types[v], 0), program.bytes[v])
        top = sorted(sizes.items(), key=lambda item: -item[1])[:3]
        return ", ".join(f"{name} ({units.format_bytes(size)})" for name, size in top)

    # Plans

    def _without_recomputation(self, base: Memory) -> _Candidate:
        return _Candidate(Choice({}, {}, 0, 0.0, 0.0), base.peak_bytes, base, 0.0)

    def _plan(self, best: _Candidate) -> Plan:
        assert isinstance(best.memory, Memory)
        choice, extra_flops = best.choice, best.extra_flops
        regions = []
        for (key, mark), record in sorted(choice.records.items()):
            decision = choice.decisions.get(key, {}).get(mark)
            if decision is None:
                continue
            numbering = record.region.numbering
            saved = tuple(_saved_value(record, n, decision) for n in decision.saved)
            carried = tuple(_input_value(record, i) for i in decision.offloaded_inputs)
            n_operations = len(record.backward.eqns)
            regions.append(
                RegionPlan(
                    key,
                    mark,
                    decision.backward,
                    len(numbering.vars),
                    n_operations,
                    saved,
                    decision.segments,
                    loop_results(numbering),
                    carried,
                )
            )
        return Plan(
            program=self.plain.program,
            target=self.step.target.name,
            versions=self._versions(),
            budget_bytes=self.budget,
            peak_bytes=best.memory.peak_bytes,
            predicted_bytes=best.predicted_bytes,
            peak_bytes_without_remat=self._base_peak_bytes,
            flops=self.plain_flops,
            extra_flops=max(0.0, extra_flops),
            extra_seconds=max(0.0, float(choice.extra_seconds)),
            seconds=self.step_seconds,
            lower_bound_seconds=max(0.0, float(choice.lower_bound_seconds)),
            regions=tuple(regions),
            loops=tuple(
                LoopPlan(key, f.group, f.steps, f.groups) for key, f in sorted(choice.loops.items())
            ),
            attempts=tuple(
                Attempt(
                    p.predicted_bytes,
                    p.compiled_bytes,
                    max(0.0, p.extra_flops),
                    max(0.0, float(p.choice.extra_seconds)),
                    p.failure,
                )
                for p in (*self.earlier, *self.candidates)
            ),
            is_verified=True,
            costs=self.costs.name,
            host_bytes=max(0, best.memory.host_bytes),
            transfer_seconds=max(0.0, float(choice.transfer_seconds)),
            whole_step=None
            if choice.whole_step is None
            else whole_step_plan(self._flat, choice.whole_step),
            made_for=self.plain.made_for(),
            verified_level=best.verified_level,
        )

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
            self.compile_s = float(data["compile_s"])
        except (PlanError, KeyError, TypeError, ValueError) as error:
            _log.warning("remat: ignoring an unusable plan in the cache, planning again: %s", error)
            return None
        is_within = (found.peak_bytes or self.budget + 1) <= self.budget
        if level == FAST and self._is_to_be_confirmed():
            return None
        return found if found.is_verified and is_within else None

    def _plan_key(self, level: str) -> str:
        return f"{self._issued_key()}|{self.costs.key}|{self.budget}|{level}"

    def _issued_key(self) -> str:
        return f"{self._key()}|offload={self.offload or bool(self.earlier)}|host={self.host_limit}"

    def _effective_budget(self) -> int:
        """Return the budget, or the least peak of a cached plan for a budget that was no smaller.

        So the plan of a smaller budget never has a larger peak.
        """
        if not self.levels.has_regions:
            return self.budget  # the search is monotone in the budget by itself
        issued = self.cache.get("issued", self._issued_key()) or {}
        peaks = [int(peak) for budget, peak in issued.items() if int(budget) >= self.budget]
        return min([self.budget, *peaks])

    def _remember(self, made: Plan) -> None:
        data = {"plan": made.to_json(), "compile_s": self.compile_s}
        self.cache.put("plan", self._plan_key(made.verified_level), data)
        self.cache.update(
            "issued",
            self._issued_key(),
            lambda old: {**(old or {}), str(self.budget): made.peak_bytes},
        )
        self.cache.update("ratios", self._ratio_key(), self._merged_ratios)

    def _ratio_key(self) -> str:
        return f"{self.step.target.name}|{jaxlib.__version__}|{self.step.target.n_devices > 1}"

    def _merged_ratios(self, old: Mapping[str, Any] | None) -> dict[str, Any]:
        merged = dict(old or {})
        for reuses_outputs, ratio in self.ratios.items():
            before = merged.get(str(reuses_outputs), ratio)
            merged[str(reuses_outputs)] = 0.7 * float(before) + 0.3 * ratio
        return merged

    def _remembered_ratios(self) -> dict[bool, float]:
        known = self.cache.get("ratios", self._ratio_key()) or {}
        start = {False: 0.9, True: 1.2}
        base, is_sharded = self.base, self.step.target.n_devices > 1
        if isinstance(base, OutOfMemory) or (isinstance(base, Memory) and is_sharded):
            # With several devices, the ratio depends on the shardings: the compiled step without
            # recomputation shows it. A refusal names the bytes that it needs.
            temporaries = base.peak_bytes - self.fixed_bytes
            for reuses_outputs in start:
                model = self.levels.level(0).peak_bytes(reuses_outputs)
                start[reuses_outputs] = max(0.05, temporaries / max(1, model))
            return start
        for reuses_outputs in start:
            value = known.get(str(reuses_outputs))
            if isinstance(value, float) and 0.05 <= value <= 20:
                start[reuses_outputs] = value
        return start


def _saved_value(record: Record, number: int, decision: RegionDecision) -> SavedValue:
    numbering = record.region.numbering
    v, eqn = numbering.vars[number], numbering.equation[number]
    return SavedValue(
        number,
        type_text(v.aval),
        n_bytes(v.aval),
        _jax.source_line_of(eqn),
        _jax.name_stack_of(eqn),
        _jax.checkpoint_name_of(eqn) or "",
        number in decision.offloaded,
    )


def _input_value(record: Record, place: int) -> SavedValue:
    v = record.region.forward.invars[place]
    return SavedValue(place, type_text(v.aval), n_bytes(v.aval), offloaded=True)


def _same(a: Choice, b: Choice) -> bool:
    return a.whole_step == b.whole_step and a.decisions == b.decisions and a.loops == b.loops


def versions(platform: str) -> tuple[tuple[str, str], ...]:
    """Return the versions of the libraries that determine a program and its peak on a platform."""
    found = [
        ("remat", importlib.metadata.version("remat")),
        ("jax", jax.__version__),
        ("jaxlib", jaxlib.__version__),
    ]
    for name in _COMPILERS.get(platform, ()):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append((name, importlib.metadata.version(name)))
    return tuple(found)
