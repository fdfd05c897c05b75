"""The CPU time of `import remat`, as a ratio to `import jax`.

Each time is the median over processes that take turns. Python's bytecode is cached, as in an installed
package.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from typing import Any

RUNS = 15  # processes for each module; more give a steadier ratio


def cpu_seconds(code: str, cache: str) -> float:
    """Return the CPU time of a Python process that runs the code."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**environment, "PYTHONPYCACHEPREFIX": cache}
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> dict[str, Any]:
    codes = ["import jax", "import remat"]
    times: dict[str, list[float]] = {code: [] for code in codes}
    with tempfile.TemporaryDirectory() as cache:
        for code in codes:
            cpu_seconds(code, cache)  # writes the bytecode
        for i in range(RUNS):
            for code in codes if i % 2 else codes[::-1]:
                times[code].append(cpu_seconds(code, cache))
    jax_s, remat_s = (statistics.median(times[code]) for code in codes)
    print(f"import remat / import jax: {remat_s / jax_s:.3f} ({remat_s:.3f} s, {jax_s:.3f} s)")
    return {"jax_s": jax_s, "remat_s": remat_s, "ratio": remat_s / jax_s}
