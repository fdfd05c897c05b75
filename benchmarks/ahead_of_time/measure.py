"""Measure one case: `python -m benchmarks.ahead_of_time.measure NAME SIZE offload|device [BUDGET ...]`.

Prints one line of JSON for the step as written, each alternative by hand and each plan. Every plan is
compiled again in another process, from its file.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import remat
from benchmarks.ahead_of_time import case_of
from benchmarks.ahead_of_time.case import Case
from benchmarks.zoo import flops
from remat import units
from remat.program.compiled import compile_for_analysis
from remat.program.targets import Target


def say(kind: str, **what: Any) -> None:
    print(json.dumps({"kind": kind, **what}), flush=True)


def compiled(case: Case, step: Callable, target: Target, base_flops: int) -> dict[str, Any]:
    """Return peak, extra FLOPs and time to compile of a step without planning."""
    begin = time.perf_counter()
    lowered = jax.jit(step, **case.options).lower(*case.args)
    memory = compile_for_analysis(lowered, target)
    return {
        "peak_bytes": memory.peak_bytes,
        "fits": memory.fits,
        "extra_flops": counted(step, case) / base_flops - 1 if base_flops else 0.0,
        "compile_s": time.perf_counter() - begin,
    }


def counted(step: Callable, case: Case) -> int:
    return flops.count(step, *case.args).matmul


def recompiled(name: str, size: str, plan: remat.Plan) -> dict[str, Any]:
    """Compile a plan in another process; return the results of that process."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "plan.json"
        plan.save(path)
        command = [
            sys.executable,
            "-m",
            "benchmarks.ahead_of_time.recompile",
            name,
            size,
            str(path),
        ]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"error": done.stderr[-2000:]}
    return dict(json.loads(lines[-1]))


def planned(
    name: str,
    size: str,
    case: Case,
    target: Target,
    budget: str,
    base: Mapping[str, Any],
    *,
    offload: bool,
) -> None:
    begin = time.perf_counter()
    n_bytes = units.parse_budget(budget).bytes_of(base["peak_bytes"])
    row: dict[str, Any] = {"budget": budget, "budget_bytes": n_bytes}
    try:
        plan = remat.plan(
            case.step,
            *case.args,
            budget=budget,
            target=target,
            cache=False,
            progress=False,
            verify="fast",
            offload=offload,
            **case.options,
        )
    except remat.BudgetError as error:
        row["refusal"] = str(error)
    except Exception:
        row["crash"] = traceback.format_exc()
    else:
        fitted = remat.fit(case.step, plan=plan, target=target, **case.options)
        row |= {
            "peak_bytes": plan.peak_bytes,
            "predicted_bytes": plan.predicted_bytes,
            "host_bytes": plan.host_bytes,
            "extra_flops": counted(fitted, case) / base["flops"] - 1,
            "extra_s": plan.extra_seconds / plan.seconds,
            "compiles": len(plan.attempts),
            "recompiled": recompiled(name, size, plan),
        }
    row["planning_s"] = time.perf_counter() - begin
    say("plan", **row)


def main(name: str, size: str, may: str, budgets: Sequence[str]) -> None:
    case, target = case_of(name, size)
    base = compiled(case, case.step, target, 0)
    base["flops"] = counted(case.step, case)
    say("base", **base)
    for label, step in case.alternatives.items():
        try:
            found = compiled(case, step, target, base["flops"])
        except Exception as error:
            say("failed alternative", label=label, error=str(error)[:2000])
        else:
            say("alternative", label=label, **found)
    for budget in budgets or case.budgets:
        planned(name, size, case, target, budget, base, offload=may == "offload")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
