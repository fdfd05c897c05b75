"""Full runs of the sweeps: resumable, in one process, with one JSON line per case in a file of results.

    PYTHONPATH=src:tests python -m sweeps.run harnesses OUT.jsonl [--again]
    PYTHONPATH=src:tests python -m sweeps.run fuzz OUT.jsonl --seeds 0:5000 [--again]
    PYTHONPATH=src:tests python -m sweeps.run minimize SEED

`--again` repeats the cases that differed; other cases in the file are not run again. `minimize` prints the
smallest program that differs in the same way as the program of a seed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import json
import os
import pathlib
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Results are compared within tolerances that do not depend on XLA's optimizations: single operations are
# compiled without any, as whole programs are.
_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ.setdefault("XLA_FLAGS", " ".join(_FLAGS))
# The threads that call the host do not see the setting that `jax.enable_x64` makes in another thread.
os.environ.setdefault("JAX_ENABLE_X64", "1")

import jax  # noqa: E402 (the flags come first)

#: Seconds of CPU time between two clearings of JAX's caches, which keep every program otherwise; a larger
#: value takes more memory. The second is for random programs, most of which share their compiled operations.
_CLEAR_EVERY_S = 30
_CLEAR_RANDOM_EVERY_S = 300

#: Seconds of CPU time between two garbage collections, which Python would run far more often.
_COLLECT_EVERY_S = 10


def sweep(
    batches: Iterable[Sequence[int]],
    check: Callable[[Sequence[int]], Sequence[Any]],
    path: pathlib.Path,
    *,
    again: bool,
    clear_every_s: float = _CLEAR_EVERY_S,
) -> None:
    """Check every case that has no line in the file yet, and append a line for each."""
    known = rows(path) if path.exists() else {}
    done = {n for n, row in known.items() if not (again and row["different"])}
    started = cleared = collected = time.process_time()
    n_run = 0
    gc.freeze()
    gc.disable()
    with path.open("a") as file:
        for batch in batches:
            numbers = [n for n in batch if n not in done]
            if not numbers:
                continue
            before = time.process_time()
            outcomes = check(numbers)
            now = time.process_time()
            for number, outcome in zip(numbers, map(dataclasses.asdict, outcomes)):
                row = {"number": number, **outcome, "seconds": (now - before) / len(numbers)}
                print(json.dumps(row), file=file, flush=True)
                if outcome["different"]:
                    print(number, outcome["name"], outcome["different"], flush=True)
            n_run += len(numbers)
            is_full = now - cleared > clear_every_s
            if is_full:
                cleared = now
                jax.clear_caches()
            if is_full or now - collected > _COLLECT_EVERY_S:
                collected = now
                gc.collect()
            if is_full:
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
                print(f"{n_run} cases, {now - started:.0f} s of CPU, {peak} MiB", flush=True)


def rows(path: pathlib.Path) -> dict[int, dict[str, Any]]:
    """Return the last line of each case in a file of results."""
    return {row["number"]: row for row in map(json.loads, path.read_text().splitlines())}


def summary(path: pathlib.Path) -> str:
    """Return the counts in a file of results; the last line of each case counts."""
    counts: collections.Counter[str] = collections.Counter()
    for row in rows(path).values():
        counts["cases"] += 1
        counts["seconds of CPU"] += row["seconds"]
        for key in ("checked", "forms"):
            for what in row.get(key, ()):
                counts[f"{key}: {what}"] += 1
        for what in ("lacking", "refused"):
            if isinstance(row.get(what), str):
                counts[what] += bool(row[what])
        counts["nothing to check"] += not row.get("checked", True)
        counts["plans that recompute"] += row.get("recomputed", False)
        counts["not telling"] += not row.get("is_telling", True)
        counts["explained"] += bool(row.get("explained"))
        counts["rounded"] += bool(row.get("rounded"))
        counts["different"] += bool(row["different"])
    return "\n".join(f"{name}: {round(n)}" for name, n in counts.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", choices=["harnesses", "fuzz", "minimize", "summary"])
    parser.add_argument("path", metavar="FILE or SEED")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--seeds", metavar="FIRST:END", default="0:5000")
    options = parser.parse_args()
    path = pathlib.Path(options.path)
    if options.which == "minimize":
        from sweeps import random_programs

        case = random_programs.draw_case(int(options.path))
        print(random_programs.check(case))
        case = random_programs.minimized_difference(case)
        print(case, random_programs.check(case), sep="\n")
        return
    if options.which == "harnesses":
        from sweeps import harness_cases

        sweep(harness_cases.batches(), harness_cases.check, path, again=options.again)
    elif options.which == "fuzz":
        from sweeps import random_programs

        sweep(
            ([seed] for seed in range(*map(int, options.seeds.split(":")))),
            random_programs.check_seeds,
            path,
            again=options.again,
            clear_every_s=_CLEAR_RANDOM_EVERY_S,
        )
    print(summary(path))


if __name__ == "__main__":
    main()
