"""Plans for TPUs and GPUs that are not attached, compared with checkpoints placed by hand.

    python -m benchmarks ahead_of_time                       # every case, in small shapes
    python -m benchmarks ahead_of_time --size full           # the true sizes: hours
    python -m benchmarks ahead_of_time --case gpipe mamba --budgets 50% 30%
    python -m benchmarks ahead_of_time --offload             # loops may keep values on the host

Training steps of several structures with nothing marked, compiled for the target by its own compiler
(libtpu; for `gpu:` targets JAX's CUDA plugin): no device is needed, nothing runs. Peaks are of one device,
at the compiler's fast level, without XLA's own rematerialization. FLOPs are those of matrix products,
counted on the jaxpr. Every case runs in a process of its own, and every plan is compiled again in
another process, from its file. Runs with options print only, or write the file of `--json`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import remat
from remat.program.targets import Target, target as find_target
from remat.units import format_bytes

if TYPE_CHECKING:
    from benchmarks.ahead_of_time.case import Case

#: By name: the function that builds the case, and the targets of small and full shapes.
CASES: Mapping[str, tuple[str, str, str]] = {
    "llama-8b": ("decoder:llama_8b", "tpu:v5e:4x4", "tpu:v5e:16x16"),
    "mixtral": ("others:mixtral", "tpu:v5p:2x2x2", "tpu:v5p:4x4x4"),
    "llama-13b": ("decoder:llama_13b", "tpu:v5p:2x2x1", "tpu:v5p:4x4x4"),
    "llama-70b": ("decoder:llama_70b", "tpu:v5p:2x2x2", "tpu:v5p:8x8x8"),
    "gpipe": ("others:gpipe", "tpu:v5p:2x2x2", "tpu:v5p:4x4x4"),
    "gpipe-unrolled": ("others:unrolled_gpipe", "tpu:v5p:2x2x2", "tpu:v5p:4x4x4"),
    "1f1b": ("others:one_forward_one_backward", "tpu:v5p:2x2x2", "tpu:v5p:4x4x4"),
    "1f1b-unrolled": ("others:unrolled_1f1b", "tpu:v5p:2x2x2", "tpu:v5p:4x4x4"),
    "pipeline-vmap": ("others:pipeline_by_vmap", "tpu:v5p:2x2x2", "tpu:v5p:4x4x4"),
    "mamba": ("others:mamba", "tpu:v6e:2x2", "tpu:v6e:4x4"),
    "blockwise": ("others:blockwise", "tpu:v5p:2x2x1", "tpu:v5p:4x4x4"),
    "mlp-2d": ("others:mlp_2d", "tpu:v5p:2x2x2", "tpu:v5p:2x2x2"),
    "fsdp-shard-map": ("others:fsdp_by_hand", "tpu:v5p:2x2x1", "tpu:v5p:4x4x4"),
    "chain": ("others:chain", "tpu:v5e:1x1", "tpu:v5e:1x1"),
    "llama-7b-gpu": ("decoder:llama_7b_gpu", "gpu:h100:1x1x4", "gpu:h100:1x1x4"),
}
SIZES = ("small", "full")
TIMEOUT_S = {"small": 900, "full": 4 * 3600}


def case_of(name: str, size: str) -> tuple[Case, Target]:
    """Return a case and its target."""
    place, *targets = CASES[name]
    module, function = place.split(":")
    target = find_target(targets[SIZES.index(size)])
    build = getattr(importlib.import_module(f"benchmarks.ahead_of_time.{module}"), function)
    return build(target, size), target


def run(name: str, size: str, budgets: Sequence[str], *, offload: bool) -> dict[str, Any]:
    """Measure a case in a process of its own; if it dies, the results that it printed before are kept."""
    may = "offload" if offload else "device"
    command = [sys.executable, "-m", "benchmarks.ahead_of_time.measure", name, size, may, *budgets]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    found: dict[str, Any] = {"alternatives": [], "failed_alternatives": [], "plans": []}
    begin = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
    )
    try:
        out, errors = process.communicate(timeout=TIMEOUT_S[size])
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        found["timeout_s"] = TIMEOUT_S[size]
    for line in out.splitlines():
        if line.startswith('{"kind": '):
            said = json.loads(line)
            kind = said.pop("kind")
            if kind == "base":
                found["base"] = said
            else:
                found[f"{kind}s".replace(" ", "_")].append(said)
    if process.returncode:
        found["died"] = {"code": process.returncode, "stderr": errors[-3000:]}
    found["wall_s"] = time.perf_counter() - begin
    for plan in found["plans"]:
        compare(plan, found["alternatives"])
    return found


def compare(plan: dict[str, Any], alternatives: Sequence[Mapping[str, Any]]) -> None:
    """Add to a plan its failures, and the best alternative by hand within its budget.

    >>> by_hand = [{"label": "full", "fits": True, "peak_bytes": 80, "extra_flops": 0.3}]
    >>> plan = {"budget_bytes": 100, "peak_bytes": 120, "extra_flops": 0.4,
    ...         "recompiled": {"peak_bytes": 120}}
    >>> compare(plan, by_hand); plan["wrong"]
    ['budget exceeded', 'worse than by hand']
    """
    limit = plan["budget_bytes"]
    fitting = [a for a in alternatives if a["fits"] and a["peak_bytes"] <= limit]
    best = min(fitting, key=lambda a: a["extra_flops"], default=None)
    plan["by_hand"] = best and best["label"]
    plan["by_hand_extra_flops"] = best and best["extra_flops"]
    plan["wrong"] = list(_wrong(plan, best))


def _wrong(plan: Mapping[str, Any], best: Mapping[str, Any] | None) -> Any:
    if "crash" in plan:
        yield "crash"
    elif "refusal" in plan:
        if best:
            yield "refused though by hand fits"
    else:
        again = plan["recompiled"]
        if "error" in again:
            yield "does not compile again"
        elif max(again["peak_bytes"], plan["peak_bytes"]) > plan["budget_bytes"]:
            yield "budget exceeded"
        elif again["peak_bytes"] != plan["peak_bytes"]:
            yield "peak differs"
        if best and plan["extra_flops"] > best["extra_flops"] + 1e-4:
            yield "worse than by hand"


def show(name: str, found: Mapping[str, Any]) -> None:
    """Print the table of a case."""
    base = found.get("base")
    if base:
        print(
            f"\n{name}: {_peak(base)} without rematerialization, compiles in {base['compile_s']:.1f} s"
        )
    for row in found["alternatives"]:
        print(f"  by hand, {row['label']:24} {_peak(row):>26} {row['extra_flops']:8.1%}")
    for row in found["failed_alternatives"]:
        print(f"  by hand, {row['label']:24} failed: {row['error'].splitlines()[-1][:150]}")
    for row in found["plans"]:
        wrong = f"  <- {', '.join(row['wrong'])}" if row["wrong"] else ""
        if "peak_bytes" not in row:
            problem = row.get("refusal") or row["crash"].strip().splitlines()[-1]
            print(f"  plan, {row['budget']:27} refused: {problem[:250]}{wrong}")
            continue
        host = f" {format_bytes(row['host_bytes'])} on the host" if row["host_bytes"] else ""
        best = "" if row["by_hand"] is None else f", by hand {row['by_hand_extra_flops']:.1%}"
        print(
            f"  plan, {row['budget']:27} {_peak(row):>26} {row['extra_flops']:8.1%}{best}, predicted "
            f"{format_bytes(row['predicted_bytes'])}, {row['compiles']} compiles, "
            f"{row['planning_s']:.0f} s{host}{wrong}"
        )
    if "died" in found:
        print(f"{name} died: {found['died']['stderr'][-1500:]}")
    if "timeout_s" in found:
        print(f"{name}: stopped after {found['timeout_s']} s")
    sys.stdout.flush()


def _peak(row: Mapping[str, Any]) -> str:
    share = f" of {format_bytes(row['budget_bytes'])}" if "budget_bytes" in row else ""
    return f"{format_bytes(row['peak_bytes'])}{share}" + ("" if row.get("fits", True) else " (no)")


def main(options: Sequence[str] = ()) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks ahead_of_time")
    parser.add_argument("--case", nargs="+", choices=list(CASES), metavar="NAME", default=[])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--budgets", nargs="+", metavar="BUDGET", default=[])
    parser.add_argument("--offload", action="store_true", help="allow values in host memory")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results to it")
    asked = parser.parse_args(list(options))
    cases: dict[str, Any] = {}
    for name in asked.case or CASES:
        try:
            find_target(CASES[name][1 + SIZES.index(asked.size)])
        except remat.PlanError as error:
            print(f"{name} skipped: {error}", flush=True)
            continue
        cases[name] = run(name, asked.size, asked.budgets, offload=asked.offload)
        show(name, cases[name])
        if asked.json:
            asked.json.write_text(json.dumps({"size": asked.size, "cases": cases}, indent=1) + "\n")
    return {"size": asked.size, "cases": cases}
