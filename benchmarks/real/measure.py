"""Measure one case of the corpus in this process, and print a line of JSON for each result.

    python -m benchmarks.real.measure NAME PERCENT ...

Each case has a process of its own because importing a package may change global settings (netket enables
double precision), and because a case may crash.
"""

from __future__ import annotations

import importlib
import json
import math
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import remat
from benchmarks.real import CASES, executed_flops
from benchmarks.real.case import Case
from benchmarks.zoo import flops

ROUNDS = 3


def load(name: str) -> Case:
    """Import the packages of a case and build it."""
    module, function = CASES[name].split(":")
    return getattr(importlib.import_module(f"benchmarks.real.cases.{module}"), function)()


def compiled_point(step: Callable, args: Sequence[Any]) -> tuple[dict[str, Any], Any]:
    """Return the figures of a step by its compiler and its jaxpr, and the compiled step."""
    jax.clear_caches()
    begin = time.process_time()
    compiled = (step if hasattr(step, "lower") else jax.jit(step)).lower(*args).compile()
    cpu_s = time.process_time() - begin
    counted = count(step, args)
    memory = compiled.memory_analysis()
    point = {
        "peak_bytes": remat.testing.peak_bytes(compiled),
        "fixed_bytes": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        "flops": counted.total,
        "matmul_flops": counted.matmul,
        "cpu_s": cpu_s,
    }
    return point, compiled


def count(step: Callable, args: Sequence[Any]) -> flops.Flops:
    """Return the FLOPs of a call; loops of unknown length and branches are counted as they run."""
    jax.clear_caches()
    counted = executed_flops if executed_flops.varies(step, *args) else flops
    return counted.count(step, *args)


def step_s(compiled: Callable, args: Sequence[Any]) -> float:
    """Return the median time of a few calls, after a warm-up call."""
    times = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def difference(ours: Any, theirs: Any) -> tuple[float, int]:
    """Return the largest difference of two results in units in the last place, and the unequal leaves.

    Leaves are compared one by one, in units in the last place of their largest value. A leaf that is zero up
    to rounding, such as the gradient of a bias that a softmax ignores, has no correct digits. Therefore
    values below the precision of the largest value of all leaves are compared in units of that precision. A
    difference in structure, in integers, or in which values are finite counts as infinite.
    """
    if jax.tree.structure(ours) != jax.tree.structure(theirs):
        return math.inf, -1
    pairs = [(_array(a), _array(b)) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs))]
    if any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return math.inf, -1
    largest = max((_largest(b) for _, b in pairs if _inexact(b)), default=0.0)
    worst, unequal = 0.0, 0
    for a, b in pairs:
        if np.array_equal(a, b, equal_nan=_inexact(a)):
            continue
        unequal += 1
        if not _inexact(a) or not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return math.inf, unequal
        precision = float(jnp.finfo(a.dtype).eps)
        finite = np.isfinite(a)
        unit = precision * max(_largest(b), precision * largest)
        worst = max(worst, _largest(a[finite] - b[finite]) / unit if unit else math.inf)
    return worst, unequal


def _array(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _inexact(x: np.ndarray) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _largest(x: np.ndarray) -> float:
    """Return the largest finite magnitude."""
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def plan_row(case: Case, percent: int, base: dict[str, Any], expected: Any) -> dict[str, Any]:
    """Plan for a share of the peak, and compare the planned step with the step as written."""
    row: dict[str, Any] = {"percent": percent, "budget_bytes": base["peak_bytes"] * percent // 100}
    jax.clear_caches()
    begin = time.process_time()
    try:
        plan = remat.plan(case.step, *case.args, budget=f"{percent}%", cache=False, progress=False)
    except remat.BudgetError as error:
        plans = (time.process_time() - begin) / base["cpu_s"]
        return row | {"refusal": str(error), "plain_compiles": plans}
    except Exception:
        return row | {"crash": traceback.format_exc()[-3000:]}
    row["plain_compiles"] = (time.process_time() - begin) / base["cpu_s"]
    try:
        point, compiled = compiled_point(remat.fit(case.step, plan=plan), case.args)
        row |= {
            "predicted_bytes": plan.predicted_bytes,
            "peak_bytes": point["peak_bytes"],
            "held": point["peak_bytes"] <= row["budget_bytes"],
            "extra_flops": point["flops"] / base["flops"] - 1,
            "compile_ratio": point["cpu_s"] / base["cpu_s"],
        }
        row["ulps"], row["unequal_leaves"] = difference(compiled(*case.args), expected)
        row["step_ratio"] = step_s(compiled, case.args) / base["step_s"]
    except Exception:
        row["crash"] = traceback.format_exc()[-3000:]
    return row


def main(name: str, percents: Sequence[int]) -> None:
    warnings.simplefilter("ignore")  # of the packages
    case = load(name)
    base, compiled = compiled_point(case.step, case.args)
    expected = compiled(*case.args)
    base["step_s"] = step_s(compiled, case.args)
    say("base", base)
    seen = set()
    for label, step in case.alternatives.items():
        try:
            # Without matrix products, all policies about them are equivalent.
            key = (label.split(",")[0], count(step, case.args))
            if key in seen:
                continue
            seen.add(key)
            point, compiled = compiled_point(step, case.args)
            point["ulps"], point["unequal_leaves"] = difference(compiled(*case.args), expected)
            point["step_ratio"] = step_s(compiled, case.args) / base["step_s"]
        except Exception:
            say("failed alternative", {"label": label, "error": traceback.format_exc()[-1500:]})
            continue
        point["extra_flops"] = point["flops"] / base["flops"] - 1
        say("alternative", {"label": label} | point)
    for percent in percents:
        say("plan", plan_row(case, percent, base, expected))


def say(kind: str, found: dict[str, Any]) -> None:
    print(json.dumps({"kind": kind} | found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], [int(text) for text in sys.argv[2:]])
