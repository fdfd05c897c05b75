"""Plans of unmodified models of other packages, compared with checkpoints that users would place by hand.

    make corpus-env                                              # packages, pinned, into .venv-real
    .venv-real/bin/python -m benchmarks real                     # every case at 75, 50, 35 and 25 %
    .venv-real/bin/python -m benchmarks real --case gpt2 --budgets 50 25

A budget is a share of the compiled peak of the step as written. Every case runs in a process of its own. The
results for each budget are: whether the peak is within the budget when the plan is compiled independently,
whether a run returns the results of the step as written, the extra FLOPs, the cheapest alternative by hand
within the same budget, and the CPU time of planning as a multiple of one trace and compile of the step as
written. Runs with options print only, or add to the file of `--json`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from remat.units import format_bytes

PERCENTS = (75, 50, 35, 25)
TIMEOUT_S = 1500

#: By name of the case: the module in `benchmarks/real/cases` and the function that builds it.
CASES: Mapping[str, str] = {
    "gpt2": "transformers_flax:gpt2",
    "keras-cnn": "keras_jax:cnn",
    "diffrax-direct": "diffrax_solvers:direct",
    "diffrax-recursive": "diffrax_solvers:recursive",
    "diffrax-backsolve": "diffrax_solvers:backsolve",
    "jax-cfd": "jax_cfd_flow:decaying_turbulence",
    "haiku-lstm": "haiku_nets:lstm",
    "bert": "transformers_flax:bert",
    "equimo-vit": "equimo_vision:vit",
    "optax-lbfgs": "optax_optimizers:lbfgs",
    "optax-multisteps": "optax_optimizers:multisteps",
    "distrax-coupling": "flows:distrax_coupling",
    "flowjax-autoregressive": "flows:flowjax_autoregressive",
    "dynamax-kalman": "state_space:dynamax_kalman",
    "numpyro-svi": "state_space:numpyro_svi",
    "gpjax-likelihood": "state_space:gpjax_likelihood",
    "jaxley-cell": "science:jaxley_cell",
    "brax-ppo": "science:brax_ppo",
    "e3nn-points": "science:e3nn_points",
    "netket-autoregressive": "science:netket_autoregressive",
    "optimistix-fit": "science:optimistix_fit",
    "jraph-network": "science:jraph_network",
}

# Largest accepted difference of results, in units in the last place of a leaf's largest value; a larger limit
# accepts larger differences. Results differ by rounding if the compiler fuses operations differently.
TOLERANCE_ULPS = 2000


def run(name: str, percents: Sequence[int]) -> dict[str, Any]:
    """Measure a case in a process of its own; if it dies, the results that it printed before are kept."""
    command = [sys.executable, "-m", "benchmarks.real.measure", name, *map(str, percents)]
    found: dict[str, Any] = {"alternatives": [], "failed_alternatives": [], "plans": []}
    begin = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        out, errors = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        found["timeout_s"] = TIMEOUT_S
    for line in out.splitlines():
        if not line.startswith('{"kind": '):
            continue
        said = json.loads(line)
        kind = said.pop("kind")
        if kind == "base":
            found["base"] = said
        else:
            found[{"plan": "plans"}.get(kind, kind.replace(" ", "_") + "s")].append(said)
    if process.returncode:
        found["died"] = {"code": process.returncode, "stderr": errors[-3000:]}
    found["wall_s"] = time.perf_counter() - begin
    for plan in found["plans"]:
        compare(plan, found["base"], found["alternatives"])
    return found


def missing_packages() -> list[str]:
    """Return the pinned packages that are not installed in any version."""
    pinned = (pathlib.Path(__file__).parent / "requirements.txt").read_text().splitlines()
    names = [line.split("==")[0] for line in pinned if not line.startswith("#")]
    return [name for name in names if not is_installed(name)]


def is_installed(name: str) -> bool:
    """Return whether a package is installed, by its name in requirements."""
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def compare(plan: dict[str, Any], base: dict[str, Any], alternatives: Sequence[dict]) -> None:
    """Add to a plan the best alternative within its budget, and the hull of all alternatives at it."""
    budget = plan["budget_bytes"]
    same = [a for a in alternatives if a["ulps"] <= TOLERANCE_ULPS]
    fitting = [a for a in same if a["peak_bytes"] <= budget]
    best = min(fitting, key=lambda a: a["extra_flops"], default=None)
    plan["by_hand"] = best and best["label"]
    plan["by_hand_extra_flops"] = best and best["extra_flops"]
    points = [(base["peak_bytes"], 0.0)] + [(a["peak_bytes"], a["extra_flops"]) for a in same]
    plan["hull_extra_flops"] = on_hull(points, budget) if best else None
    plan["refused_what_fits"] = bool("refusal" in plan and best)


def on_hull(points: Sequence[tuple[int, float]], peak_bytes: int) -> float:
    """Return the least extra FLOPs that a mixture of two points has at this peak.

    >>> on_hull([(100, 0.0), (50, 0.2), (20, 0.5)], 75)
    0.1
    >>> on_hull([(100, 0.0), (80, 0.5), (50, 0.2)], 50)
    0.2
    """
    below = [p for p in points if p[0] <= peak_bytes]
    above = [p for p in points if p[0] > peak_bytes]
    mixtures = [
        y0 + (y1 - y0) * (peak_bytes - x0) / (x1 - x0) for x0, y0 in below for x1, y1 in above
    ]
    return min([y for _, y in below] + mixtures, default=math.inf)


HEADER = (
    "budget",
    "peak",
    "extra FLOPs",
    "by hand",
    "hull",
    "which",
    "results",
    "planning",
    "step",
)


def cells(plan: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    """Return the row of a plan in the table."""

    def percent(x: float | None) -> str:
        return "none fits" if x is None else f"{x:.1%}"

    by_hand = [
        percent(plan["by_hand_extra_flops"]),
        "" if plan["hull_extra_flops"] is None else percent(plan["hull_extra_flops"]),
        plan["by_hand"] or "",
    ]
    budget = f"{plan['percent']} %"
    planning = f"{plan['plain_compiles']:.1f} c" if "plain_compiles" in plan else ""
    if "refusal" in plan:
        return [budget, "refused", "", *by_hand, "", planning, ""]
    if "crash" in plan:
        return [budget, "CRASH", "", *by_hand, "", planning, ""]
    results = "identical"
    if plan["unequal_leaves"]:
        results = f"{plan['ulps']:.0f} ulps" if plan["ulps"] < math.inf else "DIFFERENT"
        results += " DIFFERENT" if TOLERANCE_ULPS < plan["ulps"] < math.inf else ""
    return [
        budget,
        f"{plan['peak_bytes'] / base['peak_bytes']:.1%}" + ("" if plan["held"] else " OVER"),
        percent(plan["extra_flops"]),
        *by_hand,
        results,
        planning,
        f"{plan['step_ratio']:.2f}×",
    ]


def show(name: str, found: Mapping[str, Any]) -> None:
    """Print the table of a case and its failures."""
    from benchmarks.planner import markdown

    base = found.get("base")
    if base:
        print(
            f"\n{name}: peak {format_bytes(base['peak_bytes'])}, arguments and results "
            f"{base['fixed_bytes'] / base['peak_bytes']:.0%}, compiles in {base['cpu_s']:.1f} CPU-s, "
            f"step {base['step_s'] * 1e3:.0f} ms"
        )
        points = sorted(found["alternatives"], key=lambda a: -a["peak_bytes"])
        print(
            "  by hand: "
            + "; ".join(
                f"{a['label']} {a['peak_bytes'] / base['peak_bytes']:.0%}:{a['extra_flops']:.1%}"
                + ("" if a["ulps"] <= TOLERANCE_ULPS else " (other results)")
                for a in points
            )
        )
    for failed in found["failed_alternatives"]:
        print(f"  failed by hand: {failed['label']}: {failed['error'].splitlines()[-1][:200]}")
    if found["plans"]:
        print(markdown(HEADER, [cells(plan, base) for plan in found["plans"]]), flush=True)
    for plan in found["plans"]:
        if "crash" in plan:
            print(f"  {plan['percent']} %: {plan['crash'].splitlines()[-1][:300]}")
        if "refusal" in plan:
            print(f"  {plan['percent']} %: {plan['refusal'][:300]}")
    if "died" in found:
        print(f"{name} died: {found['died']['stderr'][-1500:]}")
    if "timeout_s" in found:
        print(f"{name}: stopped after {found['timeout_s']} s", flush=True)


def summary(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return counts and medians over all plans of all cases."""
    plans = [plan for found in cases.values() for plan in found["plans"]]
    made = [plan for plan in plans if "held" in plan and "crash" not in plan]
    ratios = [p["extra_flops"] / p["by_hand_extra_flops"] for p in made if p["by_hand_extra_flops"]]
    errors = [abs(p["predicted_bytes"] / p["peak_bytes"] - 1) for p in made]
    return {
        "cases": len(cases),
        "plans": len(plans),
        "accepted": len(made),
        "held": sum(p["held"] for p in made),
        "equal": sum(p["ulps"] <= TOLERANCE_ULPS for p in made),
        "identical": sum(not p["unequal_leaves"] for p in made),
        "refused": sum("refusal" in p for p in plans),
        "refused_what_fits": sum(p["refused_what_fits"] for p in plans),
        "crashed": sum("crash" in p for p in plans),
        "above_hull": sum(
            p["hull_extra_flops"] is not None and p["extra_flops"] > p["hull_extra_flops"] + 1e-4
            for p in made
        ),
        "worse_than_by_hand": sum(
            p["by_hand"] is not None and p["extra_flops"] > p["by_hand_extra_flops"] + 1e-4
            for p in made
        ),
        "median_ratio_to_by_hand": statistics.median(ratios) if ratios else None,
        "median_plain_compiles": statistics.median(p["plain_compiles"] for p in made)
        if made
        else None,
        "median_prediction_error": statistics.median(errors) if errors else None,
        "worst_prediction_error": max(errors, default=None),
    }


def main(options: Sequence[str] = ()) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks real")
    parser.add_argument("--case", nargs="+", choices=list(CASES), metavar="NAME", default=[])
    parser.add_argument("--budgets", nargs="+", type=int, metavar="PERCENT", default=PERCENTS)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="add the results to it")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    asked = parser.parse_args(list(options))
    if asked.list:
        print("\n".join(CASES))
        return {}
    cases: dict[str, Any] = {}
    if asked.json and asked.json.exists():
        cases = json.loads(asked.json.read_text())["cases"]
    missing = missing_packages()
    if missing and not asked.case:
        raise ImportError(
            f"{len(missing)} of the packages are missing, among them {missing[0]}; install them with "
            "`make corpus-env` and run .venv-real/bin/python"
        )
    for name in asked.case or CASES:
        found = run(name, asked.budgets)
        show(name, found)
        cases[name] = found
        if asked.json:
            asked.json.write_text(json.dumps(with_environment(cases), indent=1) + "\n")
    print(json.dumps(summary(cases), indent=1))
    return _stored(cases)


def with_environment(cases: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results as a run without options stores them."""
    from benchmarks.__main__ import environment

    return {"environment": environment(), **_stored(cases)}


def _stored(cases: Mapping[str, Any]) -> dict[str, Any]:
    return {"summary": summary(cases), "cases": dict(sorted(cases.items()))}
