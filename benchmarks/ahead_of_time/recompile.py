"""Compile a plan from its file: `python -m benchmarks.ahead_of_time.recompile NAME SIZE PLAN`.

Prints the peak as JSON. JAX compiles the step that follows the plan. The planner is not used, and the peak is
computed here from the compiler's figures.
"""

from __future__ import annotations

import json
import sys

import jax

import remat
from benchmarks.ahead_of_time import case_of


def main(name: str, size: str, path: str) -> None:
    case, target = case_of(name, size)
    fitted = remat.fit(case.step, plan=remat.Plan.load(path), target=target, **case.options)
    options: dict[str, object] = {"xla_disable_hlo_passes": "rematerialization"}
    if target.platform == "tpu":
        options["optimization_level"] = 9  # O0, at which plans are verified with verify="fast"
    analysis = jax.jit(fitted, **case.options).lower(*case.args).compile(options).memory_analysis()
    total = (
        analysis.argument_size_in_bytes
        + analysis.temp_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )
    peak = min(total, analysis.peak_memory_in_bytes) if target.platform == "tpu" else total
    print(json.dumps({"peak_bytes": peak, "host_bytes": analysis.host_temp_size_in_bytes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
