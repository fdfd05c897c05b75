"""Measurements that need an accelerator: allocator peaks, step times, transfer rates, gradients.

    python -m benchmarks device --size gpu          # on a machine with a GPU or a TPU; writes JSON
    python -m benchmarks device --on-cpu --size tiny    # checks that the scripts run, on a CPU

* `plans`: for each model the step as written, with each block checkpointed by hand, and by a plan for each
  budget: the compiler's peak and the allocator's, the time of a step, the times that the model of the device
  predicts, and whether the gradients agree.
* `transfers`: rates of copies between the device's memory and the host's, and the figures of
  `remat.program.devices`.
* `offload`: gradients and time of a scan whose policy offloads residuals to the host, compared with the scan
  that keeps them on the device (XLA for GPUs has miscompiled such scans: openxla/xla#46231).

Each measurement runs in a process of its own, since allocators report the peak of a process. Plans are made
by several processes at once (`--jobs`), before anything is timed. `benchmarks/results/device-*.json` says on
which device results were measured.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODELS = ("llama", "gpt", "moe", "unet")
PERCENTS = (75, 50, 35)
BY_HAND = ("written", "nothing saved", "dots saved")
NOT_RUN = "NOT RUN: this machine has no accelerator (jax.devices() are CPUs)"


def main(options: Sequence[str] = ()) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks device")
    parser.add_argument("--on-cpu", action="store_true", help="run without an accelerator")
    parser.add_argument(
        "--size", default="gpu", choices=("tiny", "cpu", "gpu"), help="of the models"
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--budgets", nargs="+", type=int, default=list(PERCENTS), metavar="PERCENT")
    parser.add_argument("--by-hand", nargs="*", choices=BY_HAND, default=list(BY_HAND))
    parser.add_argument("--jobs", type=int, default=4, help="processes that plan at once")
    parser.add_argument(
        "--json", type=Path, help="write the results that there are after each row, too"
    )
    asked = parser.parse_args(list(options))
    device = _child("device")
    print(json.dumps(device))
    if device.get("platform") == "cpu" and not asked.on_cpu:
        print(NOT_RUN)
        return {"not_run": NOT_RUN}
    results: dict[str, Any] = {"device": device, "size": asked.size, "plans": []}

    def add(part: str, row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        if part == "plans":
            results["plans"].append(row)
        else:
            results[part] = row
        if asked.json is not None:
            asked.json.write_text(json.dumps(results, indent=2) + "\n")

    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(asked.jobs) as planners,
    ):

        def plan(model: str, percent: int) -> dict[str, Any]:
            path = f"{folder}/{model}-{percent}.json"
            # Memory is allocated as needed, so that processes can share the device.
            return _child(
                "plan", model, asked.size, str(percent), path, XLA_PYTHON_CLIENT_PREALLOCATE="false"
            )

        keys = [(model, percent) for model in asked.model for percent in asked.budgets]
        planned = list(planners.map(plan, *zip(*keys)))
        for (model, percent), row in zip(keys, planned):
            if "planned_peak_bytes" in row:
                row |= _child("planned", model, asked.size, f"{folder}/{model}-{percent}.json")
            add("plans", row)
    for model in asked.model:
        for alternative in asked.by_hand:
            add("plans", _child("by_hand", model, asked.size, alternative))
    for part in ("transfers", "offload"):
        add(part, _child(part, asked.size))
    return results


def _child(*arguments: str, **environment: str) -> dict[str, Any]:
    """Run one measurement in a process of its own; return its results, or the error that ended it."""
    command = [sys.executable, "-m", "benchmarks.device.measure", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=os.environ | environment
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"arguments": arguments, "died": done.returncode, "stderr": done.stderr[-2000:]}
    return dict(json.loads(lines[-1]))
