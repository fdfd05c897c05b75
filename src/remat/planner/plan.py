"""`remat.plan`: from a step and a budget to a plan that the compiler has confirmed.

The loop that DESIGN.md draws: a model of the step's memory proposes decisions, the compiler says what
they really need, the model is corrected by the ratio of the two, and again, a handful of times. Of all
that fit the budget the one with the fewest recomputed operations is the plan. Nothing that the
compiler did not confirm is returned.

Two models propose: one in which the memory of results lies idle until they are computed, and one in
which other values use it. XLA does something between. Both are corrected separately; the ratios that
a target showed last are remembered for it, and the first proposal starts from them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.metadata
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
import jaxlib
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console

from remat import _jax, units
from remat.cache import Cache, find_cache
from remat.errors import BudgetError, PlanError
from remat.ir.fingerprint import fingerprint
from remat.planner.decisions import RegionDecision
from remat.planner.edits import loop_results
from remat.planner.levels import Choice, Levels
from remat.planner.plan_file import (
    Attempt,
    LoopPlan,
    Plan,
    RegionPlan,
    SavedValue,
)
from remat.planner.regions import Application, Record
from remat.planner.step import Step, Traced, check_step
from remat.program.compiled import Memory, OutOfMemory
from remat.program.costs import Costs, Roofline, find_costs
from remat.program.from_jaxpr import n_bytes, type_text
from remat.program.targets import Target, target as find_target

_log = logging.getLogger("remat")

_MOST_COMPILES = 8
# A plan whose peak is this close below the budget is not worth another compilation.
_CLOSE = 0.98
# So many levels are tried that the search by the model passed over, if it found none that fits.
_MOST_OTHERS = 4
# Where nothing fits, each proposal is for so much of the smallest one before.
_SQUEEZED = 0.85
# What a byte more in the model may mean for the compiler, where that is taken from two points.
_LEAST_SLOPE, _MOST_SLOPE = 0.3, 4.0
# Nor is one that recomputes less than this share of the step's operations.
_NOTHING_LEFT = 0.001


def plan(
    step: Callable,
    /,
    *args: Any,
    budget: units.Number | None = None,
    target: str | Target | None = None,
    offload: bool = True,
    kwargs: Mapping[str, Any] | None = None,
    cache: Cache | bool | str | os.PathLike[str] = True,
    costs: str | Costs = "roofline",
    progress: bool = True,
    **jit_options: Any,
) -> Plan:
    """Choose what a step saves and recomputes so that the compiler's peak is within a budget.

    Nothing is run: arguments may be arrays or `jax.ShapeDtypeStruct`s (with shardings, where the step
    runs on several devices).

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
      step: the training step. What it may recompute is marked in it with `remat.auto`.
      args, kwargs: what it is called with.
      budget: the peak on one device that the compiler may report (arguments + temporaries + results
        - aliased): bytes, a text such as "8GiB", a share of the peak without rematerialization such
        as "60%", or None for all the memory that the device has.
      target: None for the device at hand; "tpu:v5e:16x16", "gpu:h100" and the like plan for a device
        that is not here (see `remat.program.targets`).
      offload: whether loops may keep values in the host's memory, where the target has one: they do
        where that takes less time than recomputing, or where nothing else fits. On a CPU the host's
        memory is the device's, and nothing is offloaded; nor on a GPU, where XLA has miscompiled
        scans with offloaded residuals.
      cache: whether plans are looked up and kept in the user's cache directory, or in which cache or
        folder.
      costs: what recomputing takes: "roofline", by the device's figures; "measured", by timing the
        equations on the device at hand; or a `remat.program.costs.Costs`.
      progress: whether to show on a terminal what is going on.
      jit_options: as `jax.jit` takes them: donation, static arguments, shardings.

    Returns:
      The plan, verified.

    Raises:
      BudgetError: no plan fits; the message has the smallest peak that was reached and what
        dominates it.
      PlanError: the step has no region, it cannot be analysed on the target, or `costs` is none of
        the above, or "measured" for a device that is not here.
      UnitsError: the budget is neither a number of bytes nor a share.
    """
    check_step(step)
    limit = None if budget is None else units.parse_budget(budget)
    at = find_target(target)
    if limit is None:
        limit = _all_memory(at)
    planned = Step(step, args, kwargs or {}, at, jit_options)
    store = find_cache(cache)
    here = None if at.ahead_of_time else at.devices[0]
    priced = find_costs(costs, at.device, here, store)
    # A program is planned as it is compiled: under jax.disable_jit its loops would be written out.
    with _Progress(progress) as show, jax.disable_jit(False):
        return _Search(planned, limit, store, show, priced, offload=offload).run()


def _all_memory(target: Target) -> units.Budget:
    n_bytes = target.device.memory_bytes
    if not n_bytes:
        raise PlanError(f"how much memory {target.name} has is not known: give budget=.")
    return units.parse_budget(n_bytes)


@dataclasses.dataclass(frozen=True)
class _Point:
    """Decisions that were compiled."""

    choice: Choice
    predicted_bytes: int
    memory: Memory | OutOfMemory
    extra_flops: float


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
    ) -> None:
        self.step = step
        self.offload = bool(offload) and step.target.can_offload
        self.cache = cache
        self.show = show
        show("tracing")
        self.costs = costs
        # Of the link there are no costs but the device's figures.
        transfer = Roofline(step.target.device).transfer_seconds if self.offload else None
        self.levels = Levels(step, costs, transfer)
        if not self.levels.has_regions:
            raise PlanError(
                "the step differentiates no region, so there is nothing to plan. Mark the loss with "
                "remat.auto before it is differentiated: jax.value_and_grad(remat.auto(loss))."
            )
        self.plain: Traced = self.levels.traced_plainly
        # As it is without us, where JAX differentiates regions as any other function.
        self.unplanned: Traced = step.trace(Application({}, recomputes=False))
        self.program = fingerprint(
            self.plain.jaxpr,
            self.plain.shards(),
            step.target.name,
            step.target.n_devices,
            step.jit_options,  # donation and the results' shardings change the peak
        )
        show("compiling without rematerialization")
        self.base = self._base()
        self.budget = budget.bytes_of(self.base.peak_bytes)
        self.fixed_bytes = self._fixed_bytes()
        self.points: list[_Point] = []
        self.ratios: dict[bool, float] = {}
        self.level_ratios: dict[int, float] = {}
        self.samples: dict[bool, set[tuple[int, int]]] = {False: set(), True: set()}
        #: Models whose smallest schedule was compiled.
        self.bottomed: set[bool] = set()

    # What is known before

    def _base(self) -> Memory | OutOfMemory:
        known = self.cache.get("base", self._key())
        if known is not None and set(known) == {f.name for f in dataclasses.fields(Memory)}:
            return Memory(**known)
        base = self.unplanned.memory()
        if isinstance(base, Memory):
            self.cache.put("base", self._key(), dataclasses.asdict(base))
        return base

    def _key(self) -> str:
        made_with = "|".join(f"{name} {version}" for name, version in versions())
        return f"{self.program}|{self.step.target.name}|{made_with}"

    def _fixed_bytes(self) -> int:
        """Arguments and results, less what is aliased: there whatever the plan."""
        if isinstance(self.base, Memory):
            return self.base.argument_bytes + self.base.output_bytes - self.base.alias_bytes
        shards = self.plain.shards()
        jaxpr = self.plain.jaxpr
        return sum(n_bytes(v.aval) // n for v, n in zip(jaxpr.invars, shards))

    # The search

    def run(self) -> Plan:
        if self.base.peak_bytes <= self.budget and isinstance(self.base, Memory):
            return self._without_recomputation()
        known = self._known()
        if known is not None:
            return known
        room = self._effective_budget() - self.fixed_bytes
        best = self._search(room) if room > 0 else None
        if best is None:
            best = self._squeeze(room)
        if best is None:
            self._refuse()
        made = self._plan(best)
        self._remember(made)
        return made

    def _search(self, room: int) -> _Point | None:
        if len(self.levels) > 1:
            return self._search_levels(room)
        return self._search_models(room)

    def _search_levels(self, room: int) -> _Point | None:
        """Where loops decide: the first level that fits, by the compiler's word.

        Further up loops save less and recompute more; what is around them is decided at each level.
        The model says where to look: its levels' peaks, corrected by what the compiler said of the
        nearest level.
        """
        best: _Point | None = None
        too_large, fitting = -1, len(self.levels)
        while fitting - too_large > 1 and len(self.points) < _MOST_COMPILES:
            i = self._first_level(too_large, fitting, room)
            predicted = self.levels.level(i).peak_bytes(False) * self._ratio_at(i)
            if best is not None and predicted > 1.1 * room:
                break
            point = self._attempt_level(i, room)
            if point is not None and self._fits(point, room):
                fitting = i
            else:
                too_large = i
            best = self._better(point, best, room)
        if best is None:
            return self._any_level(room)
        if not best.choice.recomputes_around_loops:
            return best
        # The next levels leave the rest of the program more room: it may recompute less in all.
        for i in (fitting, fitting + 1, fitting + 2):
            if i >= len(self.levels) or len(self.points) >= _MOST_COMPILES + 2:
                break
            best = self._better(self._attempt_level(i, room), best, room)
        return best

    def _any_level(self, room: int) -> _Point | None:
        """Where the levels' order is not the compiler's: those that were passed over, in turn."""
        tried = set(self.level_ratios)
        for i in sorted(set(range(len(self.levels))) - tried, reverse=True)[:_MOST_OTHERS]:
            best = self._better(self._attempt_level(i, room), None, room)
            if best is not None:
                return best
        return None

    def _first_level(self, too_large: int, fitting: int, room: int) -> int:
        """The first level between two others that is predicted to fit; the last if none is."""
        low, high = too_large + 1, fitting - 1
        while low < high:
            middle = (low + high) // 2
            if self.levels.level(middle).peak_bytes(False) * self._ratio_at(middle) <= room:
                high = middle
            else:
                low = middle + 1
        return low

    def _ratio_at(self, i: int) -> float:
        """What the compiler needs of a level for each byte of the model."""
        if not self.level_ratios:
            return self._remembered_ratios()[False]
        nearest = min(self.level_ratios, key=lambda known: (abs(known - i), known))
        return self.level_ratios[nearest]

    def _attempt_level(self, i: int, room: int) -> _Point | None:
        level = self.levels.level(i)
        ratio = self._ratio_at(i)
        aim = int(room / ratio)
        for lending in (False, True):
            try:
                choice = level.solve(lending, aim)
            except BudgetError:
                continue
            return self._compiled_level(i, choice, lending, ratio)
        if level.peak_bytes(False) > 2 * aim:
            return None  # far from what could fit
        try:
            choice = level.solve(False, level.peak_bytes(False))
        except BudgetError:
            return None
        return self._compiled_level(i, choice, False, ratio)

    def _compiled_level(self, i: int, choice: Choice, lending: bool, ratio: float) -> _Point:
        point = self._compiled(choice, lending, ratio)
        self.level_ratios[i] = self.ratios[lending]
        return point

    def _search_models(self, room: int) -> _Point | None:
        """Propose, compile, correct. Each model that missed the budget aims a little lower."""
        best: _Point | None = None
        ratios = self._remembered_ratios()
        misses = {False: 0, True: 0}
        for turn in range(_MOST_COMPILES):
            for lending in (False, True):
                if len(self.points) >= _MOST_COMPILES:
                    break
                ratio = self.ratios.get(lending, ratios[lending])
                margin = 0.995 - 0.01 * misses[lending] if turn else 1.0
                n_compiled = len(self.points)
                point = self._attempt(lending, self._aim(lending, int(room * margin), ratio), ratio)
                if point is None:
                    continue
                if not self._fits(point, room):
                    misses[lending] += 1
                elif len(self.points) == n_compiled:
                    misses[lending] -= 1  # the same again, and it fits: aim higher
                best = self._better(point, best, room)
            if best is None or not turn:
                continue
            close = best.memory.peak_bytes >= _CLOSE * self.budget
            if close or best.extra_flops <= _NOTHING_LEFT * self.plain_flops:
                break
        return best

    def _line(self, lending: bool, near: float, axis: int) -> tuple[float, float, float] | None:
        """Through the two compiled points nearest to a place: bytes of the model, compiled, slope.

        Compilers need memory of their own, whatever is saved, so a ratio alone leads there slowly.
        """
        samples = sorted(self.samples[lending], key=lambda at: (abs(at[axis] - near), at))
        for other in samples[1:]:
            (m0, t0), (m1, t1) = samples[0], other
            slope = (t1 - t0) / (m1 - m0) if m1 != m0 else 0.0
            if _LEAST_SLOPE <= slope <= _MOST_SLOPE:
                return m0, t0, slope
        return None

    def _aim(self, lending: bool, room: int, ratio: float) -> int:
        """The bytes of the model for which the compiler is expected to need so many."""
        line = self._line(lending, room, 1)
        if line is None:
            return int(room / ratio)
        return max(1, int(line[0] + (room - line[1]) / line[2]))

    def _expected(self, lending: bool, model_bytes: int, ratio: float) -> int:
        """The bytes that the compiler is expected to need for so many of the model."""
        # Levels are different programs: no line goes through two of them.
        line = self._line(lending, model_bytes, 0) if len(self.levels) == 1 else None
        expected = int(line[1] + (model_bytes - line[0]) * line[2]) if line else 0
        return expected if expected > 0 else int(model_bytes * ratio)

    def _squeeze(self, room: int) -> _Point | None:
        """Go below the budget until something fits, or nothing smaller is found."""
        aims = dict.fromkeys((False, True), max(room, 1))
        for _ in range(5):
            for lending in (False, True):
                tried = [model_bytes for model_bytes, _ in self.samples[lending]]
                aims[lending] = int(_SQUEEZED * min([aims[lending], *tried]))
                point = self._attempt(lending, aims[lending], self.ratios.get(lending, 1.0))
                if point is not None and self._fits(point, room):
                    return point
        if not self.points:
            # For the message: what the last level needs at least.
            last = self.levels.level(len(self.levels) - 1)
            with contextlib.suppress(BudgetError):
                point = self._compiled(last.smallest(), False, 1.0)
                if self._fits(point, room):
                    return point
        return None

    def _better(self, point: _Point | None, best: _Point | None, room: int) -> _Point | None:
        """The point if it fits and nothing better is known."""
        if point is None or not self._fits(point, room):
            return best
        return point if best is None or self._is_better(point, best) else best

    def _is_better(self, a: _Point, b: _Point) -> bool:
        if a.choice.transfer_seconds or b.choice.transfer_seconds:
            return (self._cost_s(a), a.memory.peak_bytes) < (self._cost_s(b), b.memory.peak_bytes)
        return (a.extra_flops, a.memory.peak_bytes) < (b.extra_flops, b.memory.peak_bytes)

    def _cost_s(self, point: _Point) -> float:
        """Recomputation at the rate of the step's other operations, and transfers."""
        rate = self.plain_flops / max(self.step_seconds, 1e-30)
        return point.extra_flops / max(rate, 1e-30) + point.choice.transfer_seconds

    @functools.cached_property
    def step_seconds(self) -> float:
        """What the step takes without recomputation, by the model."""
        return float(sum(self.levels.level(0).problem(False).fused.seconds.values()))

    def _fits(self, point: _Point, room: int) -> bool:
        return point.memory.fits and point.memory.peak_bytes <= room + self.fixed_bytes

    def _attempt(self, lending: bool, aim: int, ratio: float) -> _Point | None:
        self.show(f"planning for {units.format_bytes(self.fixed_bytes + aim)}")
        try:
            choice = self._solve(lending, aim)
        except BudgetError:
            if lending in self.bottomed:
                return None
            self.bottomed.add(lending)
            # The model may be wrong by more than it refuses: the compiler says by how much.
            try:
                choice = self.levels.level(len(self.levels) - 1).smallest(lending)
            except BudgetError:
                return None
        return self._compiled(choice, lending, ratio)

    def _compiled(self, choice: Choice, lending: bool, ratio: float) -> _Point:
        """What the compiler says of a choice; nothing is compiled twice."""
        same = [p for p in self.points if _same(p.choice, choice)]
        predicted = self.fixed_bytes + self._expected(lending, choice.model_bytes, ratio)
        point = same[0] if same else self._compile(choice, predicted)
        if isinstance(point.memory, Memory):
            temporaries = point.memory.peak_bytes - self.fixed_bytes
            self.samples[lending].add((choice.model_bytes, temporaries))
            self.ratios[lending] = max(0.05, temporaries / max(1, choice.model_bytes))
        else:
            # What the compiler says it needs is more than the peak would be; that is over the limit.
            least = (point.memory.limit_bytes - self.fixed_bytes) / max(1, choice.model_bytes)
            self.ratios[lending] = 1.05 * max(self.ratios.get(lending, ratio), least)
        return point

    def _solve(self, lending: bool, aim: int) -> Choice:
        """The least recomputation within a model budget: the first level that fits, or one before.

        Levels are ordered by price, so a search by halves finds the first whose loops leave enough.
        """
        low, high = 0, len(self.levels) - 1
        while low < high:
            middle = (low + high) // 2
            if self.levels.level(middle).peak_bytes(lending) <= aim:
                high = middle
            else:
                low = middle + 1
        found: list[Choice] = []
        problem: BudgetError | None = None
        for i in sorted({low, max(0, low - 1)}, reverse=True):
            try:
                found.append(self.levels.level(i).solve(lending, aim))
            except BudgetError as error:
                problem = error
        if not found:
            assert problem is not None
            raise problem
        return min(found, key=lambda choice: choice.extra_seconds)

    def _compile(self, choice: Choice, predicted_bytes: int) -> _Point:
        traced = self.step.trace(Application(choice.decisions, choice.loops))
        self.show(f"compiling a plan predicted to need {units.format_bytes(predicted_bytes)}")
        memory = traced.memory()
        if self.points == [] and isinstance(self.base, OutOfMemory) and isinstance(memory, Memory):
            self.fixed_bytes = memory.argument_bytes + memory.output_bytes - memory.alias_bytes
        point = _Point(choice, predicted_bytes, memory, traced.flops() - self.plain_flops)
        self.points.append(point)
        _log.debug(
            "remat: predicted %d bytes, compiled %d, %.3g FLOPs recomputed",
            predicted_bytes,
            memory.peak_bytes,
            point.extra_flops,
        )
        return point

    @functools.cached_property
    def plain_flops(self) -> float:
        return self.unplanned.flops()

    def _refuse(self) -> NoReturn:
        smallest = min((p.memory.peak_bytes for p in self.points), default=self.base.peak_bytes)
        shown = units.format_bytes
        what = (
            f"arguments and results alone take {shown(self.fixed_bytes)}"
            if self.fixed_bytes >= self.budget
            else f"{shown(self.fixed_bytes)} of that are arguments and results, the largest "
            f"temporaries {self._largest()}"
        )
        raise BudgetError(
            f"no plan fits {shown(self.budget)} ({self.budget} bytes); the smallest peak that was "
            f"reached is {shown(smallest)} ({smallest} bytes), {shown(self.base.peak_bytes)} "
            f"({self.base.peak_bytes} bytes) without rematerialization; {what}. Raise budget= to at "
            f"least the former, {self._offload_advice()}donate arguments (donate_argnums=), or divide "
            "the step (a smaller batch, more devices)."
        )

    def _offload_advice(self) -> str:
        is_possible = self.step.target.can_offload and not self.offload
        return "allow offload=True, " if is_possible else ""

    def _largest(self) -> str:
        program = self.levels.level(len(self.levels) - 1).program
        sizes: dict[str, int] = {}
        for op in program.ops:
            for v in op.results:
                sizes[program.types[v]] = max(sizes.get(program.types[v], 0), program.bytes[v])
        top = sorted(sizes.items(), key=lambda item: -item[1])[:3]
        return ", ".join(f"{name} ({units.format_bytes(size)})" for name, size in top)

    # Plans

    def _without_recomputation(self) -> Plan:
        assert isinstance(self.base, Memory)
        peak = self.base.peak_bytes
        return self._made(Choice({}, {}, 0, 0.0, 0.0), peak, peak, 0.0, self.base.host_bytes)

    def _plan(self, best: _Point) -> Plan:
        assert isinstance(best.memory, Memory)
        peak, on_host = best.memory.peak_bytes, best.memory.host_bytes
        return self._made(best.choice, best.predicted_bytes, peak, best.extra_flops, on_host)

    def _made(
        self, choice: Choice, predicted: int, peak: int, extra_flops: float, host_bytes: int
    ) -> Plan:
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
            versions=versions(),
            budget_bytes=self.budget,
            peak_bytes=peak,
            predicted_bytes=predicted,
            peak_bytes_without_remat=self.base.peak_bytes,
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
                    p.memory.peak_bytes,
                    max(0.0, p.extra_flops),
                    max(0.0, float(p.choice.extra_seconds)),
                )
                for p in self.points
            ),
            is_verified=True,
            costs=self.costs.name,
            host_bytes=max(0, host_bytes),
            transfer_seconds=max(0.0, float(choice.transfer_seconds)),
        )

    # What is remembered

    def _known(self) -> Plan | None:
        data = self.cache.get("plan", self._plan_key())
        if data is None:
            return None
        try:
            found = Plan.from_json(data["plan"], origin="a cached plan")
        except (PlanError, KeyError, TypeError) as error:
            _log.warning("remat: a cached plan is not usable and is made anew: %s", error)
            return None
        return found if found.is_verified else None

    def _plan_key(self) -> str:
        return f"{self._issued_key()}|{self.costs.key}|{self.budget}"

    def _issued_key(self) -> str:
        return f"{self._key()}|offload={self.offload}"

    def _effective_budget(self) -> int:
        """No more than plans for larger budgets needed: a smaller budget never gets a larger peak."""
        issued = self.cache.get("issued", self._issued_key()) or {}
        peaks = [int(peak) for budget, peak in issued.items() if int(budget) >= self.budget]
        return min([self.budget, *peaks])

    def _remember(self, made: Plan) -> None:
        self.cache.put("plan", self._plan_key(), {"plan": made.to_json()})
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
        for lending, ratio in self.ratios.items():
            before = merged.get(str(lending), ratio)
            merged[str(lending)] = 0.7 * float(before) + 0.3 * ratio
        return merged

    def _remembered_ratios(self) -> dict[bool, float]:
        known = self.cache.get("ratios", self._ratio_key()) or {}
        start = {False: 0.9, True: 1.2}
        if isinstance(self.base, Memory) and self.step.target.n_devices > 1:
            # Where shardings decide, the step without recomputation says how far they divide.
            temporaries = self.base.peak_bytes - self.fixed_bytes
            for lending in start:
                model = self.levels.level(0).peak_bytes(lending)
                start[lending] = max(0.05, temporaries / max(1, model))
            return start
        for lending in start:
            value = known.get(str(lending))
            if isinstance(value, float) and 0.05 <= value <= 20:
                start[lending] = value
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
    return a.decisions == b.decisions and a.loops == b.loops


def versions() -> tuple[tuple[str, str], ...]:
    """The libraries that decide what a program is and what it needs."""
    return (
        ("remat", importlib.metadata.version("remat")),
        ("jax", jax.__version__),
        ("jaxlib", jaxlib.__version__),
    )


class _Progress:
    """A line on a terminal that says what is going on."""

    def __init__(self, wanted: bool) -> None:
        console = Console(stderr=True)
        self._status = console.status("remat") if wanted and console.is_terminal else None

    def __enter__(self) -> Callable[[str], None]:
        if self._status is not None:
            self._status.start()
        return self._show

    def _show(self, what: str) -> None:
        if self._status is not None:
            self._status.update(f"remat: {what}")

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()


def receive_plan(make: Callable[[], Plan]) -> Plan:
    """The plan that all processes of a run follow: process 0 makes it, the others receive it.

    Compilers may differ from host to host, and programs that differ do not meet in collectives.
    """
    if jax.process_count() == 1:
        return make()
    problem: Exception | None = None
    text = b""
    if jax.process_index() == 0:
        try:
            text = make().to_json().encode()
        except Exception as error:
            problem = error
    size = int(_from_first(np.array(len(text), np.int64)))
    if size == 0:
        raise problem or PlanError("process 0 could not make a plan; its own error says why.")
    sent = np.zeros(size, np.uint8)
    sent[: len(text)] = np.frombuffer(text, np.uint8)
    return Plan.from_json(bytes(_from_first(sent)).decode(), origin="the plan of process 0")


def _from_first(value: np.ndarray) -> np.ndarray:
    # In a thread of its own: this thread traces, and a collective has to run now.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        sent = thread.submit(multihost_utils.broadcast_one_to_all, value)
        return np.asarray(sent.result())
