"""Measurements that need an accelerator: allocator peaks, step times, transfer rates, gradients.

    python -m benchmarks device                     # on a machine with a GPU or a TPU; writes JSON
    python -m benchmarks device --on-cpu --size tiny    # checks that the scripts run, on a CPU

* `plans`: for each model and budget, the compiler's peak and the allocator's, the time of a step as a ratio
  to the step without rematerialization, the ratio that the plan predicts, and whether the gradients agree.
* `transfers`: rates of copies between the device's memory and the host's, and the figures of
  `remat.program.devices`.
* `offload`: gradients and time of a scan whose policy offloads residuals to the host, compared with the scan
  that keeps them on the device (XLA for GPUs has miscompiled such scans: openxla/xla#46231).

Each measurement runs in a process of its own, since allocators report the peak of a process. NO RESULTS OF
THESE SCRIPTS ARE IN THE REPOSITORY: they have run on CPUs only, where allocators report nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

MODELS = ("llama", "gpt", "moe", "unet")
PERCENTS = (75, 50, 35)
NOT_RUN = "NOT RUN: this machine has no accelerator (jax.devices() are CPUs)"


def main(options: Sequence[str] = ()) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks device")
    parser.add_argument("--on-cpu", action="store_true", help="run without an accelerator")
    parser.add_argument("--size", default="cpu", choices=("tiny", "cpu"), help="of the models")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    asked = parser.parse_args(list(options))
    device = _child("device")
    print(json.dumps(device))
    if device.get("platform") == "cpu" and not asked.on_cpu:
        print(NOT_RUN)
        return {"not_run": NOT_RUN}
    results: dict[str, Any] = {"device": device, "plans": []}
    for model in asked.model:
        for percent in (100, *PERCENTS):
            row = _child("plans", model, asked.size, str(percent))
            print(json.dumps(row), flush=True)
            results["plans"].append(row)
    for part in ("transfers", "offload"):
        results[part] = _child(part, asked.size)
        print(json.dumps(results[part]), flush=True)
    return results


def _child(*arguments: str) -> dict[str, Any]:
    """Run one measurement in a process of its own; return its results, or the error that ended it."""
    command = [sys.executable, "-m", "benchmarks.device.measure", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"arguments": arguments, "died": done.returncode, "stderr": done.stderr[-2000:]}
    return dict(json.loads(lines[-1]))
