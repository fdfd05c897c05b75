"""The compiler's peak decides about a plan, whatever it is and however the compiler reports it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat
from planner.region_cases import assert_same, normal
from remat.cache import Cache
from remat.planner import fit as fitting, programs, step as planned_step
from remat.program.compiled import CompiledMemory, OutOfMemory
from remat.program.targets import Target, target

QUIET = {"cache": False, "progress": False}


def body(x: Any, w: Any) -> tuple[Any, None]:
    h = x @ w
    return jnp.sin(jnp.tanh(h)) * jnp.cos(x), None


def scanned(ws: Any, x: Any) -> Any:
    return jnp.mean(jax.lax.scan(body, x, ws)[0] ** 2)


def unrolled(ws: Any, x: Any) -> Any:
    for i in range(len(ws)):
        x, _ = body(x, ws[i])
    return jnp.mean(x**2)


STEPS: dict[str, Callable] = {
    "a whole step": jax.value_and_grad(unrolled, argnums=(0, 1)),
    "an unrolled region": jax.value_and_grad(remat.auto(unrolled), argnums=(0, 1)),
    "a scanned region": jax.value_and_grad(remat.auto(scanned), argnums=(0, 1)),
}


def arguments(n_layers: int = 5) -> tuple:
    return normal(n_layers, 32, 32), normal(512, 32)


def refusing_above(limit: int, monkeypatch: Any) -> list:
    """Make the compiler refuse larger programs, as a TPU's does; return the list of its answers."""
    real = planned_step.compile_for_analysis
    answers: list = []

    def compile(*args: Any, **options: Any) -> Any:
        memory = real(*args, **options)
        assert isinstance(memory, CompiledMemory)
        answers.append(memory if memory.peak_bytes <= limit else OutOfMemory(limit + 1, limit))
        return answers[-1]

    monkeypatch.setattr(planned_step, "compile_for_analysis", compile)
    return answers


def peak_without_remat(step: Callable) -> int:
    return remat.plan(step, *arguments(), budget="100%", **QUIET).peak_bytes


# Budgets


@pytest.mark.parametrize("name", STEPS)
def test_no_plan_exceeds_its_budget_where_the_step_as_written_is_refused(name, monkeypatch):
    step = STEPS[name]
    whole = peak_without_remat(step)
    refusing_above(int(0.95 * whole), monkeypatch)
    for share in (0.9, 0.8):
        budget = int(share * whole)
        made = remat.plan(step, *arguments(), budget=budget, **QUIET)
        assert made.is_verified and made.peak_bytes <= budget


def test_a_cached_plan_above_the_budget_is_not_returned(tmp_path):
    step = STEPS["an unrolled region"]
    above = remat.plan(step, *arguments(), budget="100%", **QUIET)

    class Wrong(Cache):
        def get(self, kind: str, key: str) -> Any:
            return {"plan": above.to_json()} if kind == "plan" else super().get(kind, key)

    options = {"cache": Wrong(tmp_path), "progress": False}
    made = remat.plan(step, *arguments(), budget=above.peak_bytes - 1, **options)
    assert made.peak_bytes < above.peak_bytes


@pytest.mark.parametrize("name", ["a whole step", "a scanned region"])
def test_a_refusal_of_the_step_as_written_says_how_far_off_the_model_is(name, monkeypatch):
    real = planned_step.compile_for_analysis
    peaks: list[int] = []

    def compile(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        peaks.append(found.peak_bytes + 19 * found.temp_bytes)
        limit = int(0.7 * peaks[0])
        fits = peaks[-1] <= limit
        answer = dataclasses.replace(found, peak_bytes=peaks[-1])
        return answer if fits else OutOfMemory(peaks[-1], limit)

    monkeypatch.setattr(planned_step, "compile_for_analysis", compile)
    made = remat.plan(STEPS[name], *arguments(), budget="70%", **QUIET)
    assert made.peak_bytes <= 0.7 * made.peak_bytes_without_remat == 0.7 * peaks[0]
    first = made.attempts[0]
    assert 0.5 < first.compiled_bytes / first.predicted_bytes < 2


# Failures of the compiler

INTERNAL = jax.errors.JaxRuntimeError("INTERNAL: Bad layout\nin %fusion.7")
HOST = jax.errors.JaxRuntimeError(
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space host. Used 146.08G of 128.00G host. More."
)


def failing(is_failing: Callable[[int, Any], bool], error: Exception, monkeypatch: Any) -> None:
    """Make the compiler fail on some programs: `is_failing(number of compilations, lowered)`."""
    real, count = planned_step.compile_for_analysis, itertools.count()

    def compile(lowered: Any, *args: Any, **options: Any) -> Any:
        if is_failing(next(count), lowered):
            raise error
        return real(lowered, *args, **options)

    monkeypatch.setattr(planned_step, "compile_for_analysis", compile)


@pytest.mark.parametrize("name", STEPS)
def test_planning_continues_after_a_failure_of_the_compiler(name, monkeypatch):
    budget = int(0.9 * peak_without_remat(STEPS[name]))
    failing(lambda n, _: n == 1, INTERNAL, monkeypatch)
    made = remat.plan(STEPS[name], *arguments(), budget=budget, **QUIET)
    assert made.peak_bytes <= budget
    first, *others = made.attempts
    assert (first.compiled_bytes, first.failure) == (0, "INTERNAL: Bad layout")
    assert others and not any(attempt.failure for attempt in others[-1:])
    assert "compiler failed (INTERNAL: Bad layout)" in made.explain()
    assert remat.Plan.from_json(made.to_json()) == made


def test_a_step_that_only_compiles_with_recomputation_is_planned(monkeypatch):
    step = STEPS["a whole step"]
    budget = int(0.9 * peak_without_remat(step))
    failing(lambda n, _: n == 0, INTERNAL, monkeypatch)
    with pytest.raises(remat.PlanError, match=r"INTERNAL: Bad layout.* pass budget= in bytes"):
        remat.plan(step, *arguments(), budget="90%", **QUIET)
    failing(lambda n, _: n == 0, INTERNAL, monkeypatch)
    made = remat.plan(step, *arguments(), budget=budget, **QUIET)
    assert made.peak_bytes <= budget and made.peak_bytes_without_remat == 0
    assert "unknown without remat" in repr(made)
    assert "no remat     the compiler failed" in made.explain()


@pytest.mark.parametrize("name", ["a whole step", "an unrolled region"])
def test_a_step_that_never_compiles_ends_planning_with_the_compilers_message(name, monkeypatch):
    compiled = []
    failing(lambda n, _: not compiled.append(n), INTERNAL, monkeypatch)
    with pytest.raises(remat.PlanError, match=r"fails on the step.*INTERNAL: Bad layout"):
        remat.plan(STEPS[name], *arguments(), budget=2**20, **QUIET)
    assert compiled == [0, 1]


def test_a_compiler_without_host_memory_for_offloading_gives_a_plan_without(
    monkeypatch, caplog, tmp_path
):
    step = STEPS["an unrolled region"]
    budget = int(0.9 * peak_without_remat(step))
    monkeypatch.setattr(Target, "can_offload", True)
    again = "planning again without offloading"
    failing(lambda n, _: n > 0 and again not in caplog.text, HOST, monkeypatch)
    options = {"budget": budget, "cache": Cache(tmp_path), "progress": False}
    made = remat.plan(step, *arguments(), **options)
    assert made.peak_bytes <= budget and not made.attempts[-1].failure
    reason = "out of host memory: Used 146.08G of 128.00G host"
    assert made.attempts[0].failure == reason
    assert again in caplog.text
    # Known peaks are not measured again.
    failing(lambda n, _: True, HOST, monkeypatch)
    assert remat.plan(step, *arguments(), **options) == made


@pytest.mark.parametrize("name", ["a whole step", "a scanned region"])
def test_host_memory_is_a_budget_of_its_own(name, monkeypatch):
    real = planned_step.compile_for_analysis

    def on_host(*args: Any, **options: Any) -> Any:
        return dataclasses.replace(real(*args, **options), host_bytes=3 * 2**20)

    monkeypatch.setattr(planned_step, "compile_for_analysis", on_host)
    step = STEPS[name]
    assert remat.plan(step, *arguments(), budget="100%", host_budget="3MiB", **QUIET).host_bytes
    with pytest.raises(remat.BudgetError, match=r"over host_budget=2097152: up to 3\.0 MiB"):
        remat.plan(step, *arguments(2), budget="100%", host_budget="2MiB", **QUIET)


# Verification with the settings of the run

CPU = target("cpu")
#: A target whose compiler has a fast level, as a TPU's does; its programs are compiled for the CPU.
TWO_LEVELS = dataclasses.replace(CPU, device=dataclasses.replace(CPU.device, platform="tpu"))


def needing_more_as_run(factor: float, monkeypatch: Any) -> list[bool]:
    """Make programs need more memory with the settings of the run; return which compilations use these."""
    real = planned_step.compile_for_analysis
    levels: list[bool] = []

    def compile(lowered: Any, at: Any, *, as_run: bool) -> Any:
        levels.append(as_run)
        found = real(lowered, CPU)
        return dataclasses.replace(
            found, peak_bytes=int(found.peak_bytes * (factor if as_run else 1))
        )

    monkeypatch.setattr(planned_step, "compile_for_analysis", compile)
    return levels


@pytest.mark.parametrize("name", ["a whole step", "a scanned region"])
def test_a_plan_is_within_its_budget_as_it_will_run(name, monkeypatch, tmp_path):
    levels = needing_more_as_run(1.1, monkeypatch)
    options = {"target": TWO_LEVELS, "budget": "90%", "progress": False, "cache": Cache(tmp_path)}
    fast = remat.plan(STEPS[name], *arguments(), verify="fast", **options)
    assert not any(levels) and fast.verified_level == "fast"
    assert "at its fast level" in fast.explain()
    made = remat.plan(STEPS[name], *arguments(), **options)
    assert made.verified_level == "as run" and "at its fast level" not in made.explain()
    assert levels[-1] and made.peak_bytes <= made.budget_bytes
    # A verified plan answers every request.
    known = len(levels)
    for verify in (None, "as run", "fast"):
        assert remat.plan(STEPS[name], *arguments(), verify=verify, **options) == made
    assert len(levels) == known


def test_slow_confirmations_are_left_out_unless_asked_for(monkeypatch, tmp_path):
    levels = needing_more_as_run(1.0, monkeypatch)
    monkeypatch.setattr(programs, "MAX_CONFIRMATION_S", -1.0)
    options = {"target": TWO_LEVELS, "budget": "100%", "progress": False, "cache": Cache(tmp_path)}
    step = STEPS["a whole step"]
    made = remat.plan(step, *arguments(), **options)
    assert made.verified_level == "fast" and levels == [False]
    assert remat.plan(step, *arguments(), **options) == made and levels == [False]
    assert remat.plan(step, *arguments(), verify="as run", **options).verified_level == "as run"
    with pytest.raises(remat.PlanError, match="verify='slow' must be 'as run', 'fast' or None"):
        remat.plan(step, *arguments(), verify="slow", **options)


def test_a_step_that_never_fits_as_it_will_run_is_refused(monkeypatch):
    needing_more_as_run(50.0, monkeypatch)
    with pytest.raises(remat.BudgetError, match="no plan fits"):
        remat.plan(STEPS["a whole step"], *arguments(2), target=TWO_LEVELS, budget="100%", **QUIET)


def test_a_fitted_step_is_within_its_budget_as_it_runs(monkeypatch):
    step = STEPS["a whole step"]
    real, peaks = fitting.compile_for_analysis, []
    factors: list[float] = []  # the memory of the program as it runs, in units of the plan's peak
    budget = 9 * remat.testing.peak_bytes(jax.jit(step).lower(*arguments()).compile()) // 10

    def compile(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        factors.append(factors[0] if factors else 1.03 * budget / found.peak_bytes)
        peaks.append(int(found.peak_bytes * factors[0]))
        return dataclasses.replace(found, peak_bytes=peaks[-1])

    monkeypatch.setattr(fitting, "compile_for_analysis", compile)
    fitted = remat.fit(step, budget=budget, **QUIET)
    assert_same(fitted(*arguments()), jax.jit(step)(*arguments()), within=1e-4)
    (made,) = fitted.plans
    assert len(peaks) > 1 and peaks[0] > made.budget_bytes >= peaks[-1] == made.peak_bytes


def test_a_given_plan_that_exceeds_its_budget_here_is_reported(monkeypatch, caplog):
    step = STEPS["a whole step"]
    made = remat.plan(step, *arguments(), budget="100%", **QUIET)
    small = dataclasses.replace(made, budget_bytes=made.peak_bytes - 1)
    remat.fit(step, plan=made)(*arguments())
    assert not caplog.text
    remat.fit(step, plan=small)(*arguments())
    assert "more than its plan's budget" in caplog.text


def test_a_fitted_step_compiles_once(tmp_path):
    compiled = []
    fitted = remat.fit(STEPS["a whole step"], budget="100%", cache=Cache(tmp_path), progress=False)
    fitted.plan(*arguments())
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **__: compiled.append(name) if "backend_compile" in name else None
    )
    args = arguments()
    compiled.clear()
    fitted(*args)
    assert len(compiled) == 1


# The compiler's settings


def test_a_plan_under_other_flags_is_not_taken_from_the_cache(monkeypatch, tmp_path):
    step, options = STEPS["a whole step"], {"cache": Cache(tmp_path), "progress": False}
    before = remat.plan(step, *arguments(2), budget="100%", **options)
    answers = refusing_above(2**40, monkeypatch)
    monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=fusion")
    made = remat.plan(step, *arguments(2), budget="100%", **options)
    assert len(answers) == 1
    assert made.made_for.settings == (("XLA_FLAGS", "--xla_disable_hlo_passes=fusion"),)
    assert before.made_for.settings == ()
    assert remat.Plan.from_json(made.to_json()) == made
    assert remat.plan(step, *arguments(2), budget="100%", **options) == made
    assert len(answers) == 1
