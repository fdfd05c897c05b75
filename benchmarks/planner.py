"""Plans of the model zoo: compiled peaks, recomputation compared with JAX's policies, prediction errors.

    python -m benchmarks planner                    # every model at 75, 50, 35 and 25 %
    python -m benchmarks planner --model gpt unet --quick
    python -m benchmarks planner --baselines        # only JAX's policies, without a planner
    python -m benchmarks planner --targets          # only the 16-layer decoder, with step times
    python -m benchmarks planner --layers 16 96     # CPU times of planning and compiling, by number of layers

A budget is a share of the compiled peak without rematerialization. Extra FLOPs are relative to the step
without rematerialization, counted on the jaxpr. The baseline is the cheapest of JAX's standard policies, on
each block or around the whole loss, that needs no more memory than the plan. Only `--targets` executes
anything. Nothing in the steps is marked. Runs with options print only.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

import remat
from benchmarks.timing import seconds_in_turns
from benchmarks.zoo import ZOO, decoder, flops, gpt, vit
from benchmarks.zoo.baselines import Point, baselines, best_baseline, losses, without
from benchmarks.zoo.model import Model, step
from remat.units import format_bytes

PERCENTS, QUICK_PERCENTS = (75, 50, 35, 25), (50, 25)
ROUNDS = 5


# --------------------------------------------------------------------------------------------------
# The planner


class Planned(NamedTuple):
    """A plan, compiled."""

    peak_bytes: int  # of the compiled step
    temporary_bytes: int
    predicted_bytes: int
    planning_s: float
    step: Callable


def planned(step: Callable, args: Sequence[Any], budget: int | str) -> Planned:
    """Plan and compile a step. No other function here uses the planner's interface."""
    begin = time.perf_counter()
    plan = remat.plan(step, *args, budget=budget, cache=False)
    seconds = time.perf_counter() - begin
    fitted = remat.fit(step, plan=plan)
    compiled = fitted.lower(*args).compile()
    return Planned(
        remat.testing.peak_bytes(compiled),
        compiled.memory_analysis().temp_size_in_bytes,
        plan.predicted_bytes,
        seconds,
        fitted,
    )


# --------------------------------------------------------------------------------------------------
# The zoo at shares of its peak


@dataclass(frozen=True)
class Row:
    """One model at one budget. Fields that describe the plan are None if there is none."""

    model: str
    percent: int
    budget_bytes: int
    peak_bytes: int | None = None
    predicted_bytes: int | None = None
    extra_flops: float | None = None
    extra_matmul_flops: float | None = None
    unknown_loops: int = 0
    baseline: str | None = None
    baseline_extra_flops: float | None = None
    planning_s: float | None = None
    refusal: str | None = None

    @property
    def ratio(self) -> float | None:
        """Return our extra FLOPs over those of the best baseline; None without one that recomputes."""
        return self.extra_flops / self.baseline_extra_flops if self.baseline_extra_flops else None

    @property
    def prediction_error(self) -> float | None:
        return self.predicted_bytes / self.peak_bytes - 1 if self.peak_bytes else None


def row(model: Model, percent: int, points: Sequence[Point]) -> Row:
    """Return the plan for a share of the peak of the first point, which has no rematerialization."""
    base, args = points[0], model.arguments()
    found = Row(model.name, percent, base.peak_bytes * percent // 100)
    try:
        plan = planned(step(model.loss()), args, found.budget_bytes)
    except remat.BudgetError as error:
        return dataclasses.replace(found, refusal=str(error))
    counted = flops.count(plan.step, *args)
    ours = Point("plan", plan.peak_bytes, plan.temporary_bytes, counted.matmul, counted.total)
    best = best_baseline(points, ours.peak_bytes)
    return dataclasses.replace(
        found,
        peak_bytes=plan.peak_bytes,
        predicted_bytes=plan.predicted_bytes,
        extra_flops=ours.extra_flops(base),
        extra_matmul_flops=ours.extra_matmul_flops(base),
        unknown_loops=counted.n_unknown_loops,
        baseline=best.label if best else None,
        baseline_extra_flops=best.extra_flops(base) if best else None,
        planning_s=plan.planning_s,
    )


def cells(row: Row) -> list[str]:
    budget = f"{row.percent} %", format_bytes(row.budget_bytes)
    if row.refusal is not None:
        return [*budget, f"refused: {row.refusal}", *[""] * 7]
    over = " OVER" if row.peak_bytes > row.budget_bytes else ""
    return [
        *budget,
        format_bytes(row.peak_bytes) + over,
        f"{format_bytes(row.predicted_bytes)} ({row.prediction_error:+.1%})",
        f"{row.extra_flops:.2%}" + (" at least" if row.unknown_loops else ""),
        f"{row.extra_matmul_flops:.2%}",
        "none fits" if row.baseline is None else f"{row.baseline_extra_flops:.2%}",
        row.baseline or "",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        f"{row.planning_s:.1f} s",
    ]


HEADER = (
    "budget",
    "",
    "compiled peak",
    "predicted",
    "extra FLOPs",
    "of matmuls",
    "best baseline's",
    "which",
    "ratio",
    "planning",
)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with its columns aligned.

    >>> print(markdown(["a", "bb"], [["1", "2"]]))
    | a | bb |
    |---|----|
    | 1 | 2  |
    """
    widths = [max(map(len, column)) for column in zip(header, *rows)]

    def line(texts: Sequence[str]) -> str:
        return "| " + " | ".join(text.ljust(n) for text, n in zip(texts, widths)) + " |"

    rule = "|" + "|".join("-" * (n + 2) for n in widths) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def prediction(rows: Sequence[Row]) -> dict[str, float]:
    """Return the median and the 95th percentile of the predictions' absolute error."""
    errors = sorted(abs(row.prediction_error) for row in rows if row.peak_bytes)
    if not errors:
        return {"pairs": 0}
    late = errors[min(len(errors) - 1, int(0.95 * len(errors)))]
    return {"pairs": len(errors), "median": statistics.median(errors), "p95": late}


def sweep(names: Sequence[str], percents: Sequence[int]) -> dict:
    """Measure and print baselines and plans, model by model."""
    rows, measured = [], {}
    for name in names:
        model = ZOO[name]("cpu")
        points = baselines(model)
        print(f"\n{model.name}: {format_bytes(points[0].peak_bytes)} without", flush=True)
        of_model = [row(model, percent, points) for percent in percents]
        print(markdown(HEADER, [cells(r) for r in of_model]), flush=True)
        rows += of_model
        measured[model.name] = {
            "baselines": [dataclasses.asdict(point) for point in points],
            "plans": [dataclasses.asdict(r) | {"ratio": r.ratio} for r in of_model],
        }
        jax.clear_caches()
    summary = prediction(rows)
    if summary["pairs"]:
        print(
            f"\npredicted against compiled peak over {summary['pairs']} pairs: "
            f"median {summary['median']:.1%}, 95th percentile {summary['p95']:.1%}"
        )
    return {"models": measured, "prediction": summary}


def opponents(names: Sequence[str]) -> dict:
    """Measure and print JAX's standard policies, model by model."""
    header = ("", "compiled peak", "of it", "extra FLOPs", "of matmuls", "compile")
    measured = {}
    for name in names:
        model = ZOO[name]("cpu")
        points = baselines(model)
        base, table = points[0], []
        for point in points:
            table.append(
                [
                    point.label,
                    format_bytes(point.peak_bytes),
                    f"{point.peak_bytes / base.peak_bytes:.1%}",
                    f"{point.extra_flops(base):.2%}",
                    f"{point.extra_matmul_flops(base):.2%}",
                    f"{point.compile_s:.1f} s",
                ]
            )
        print(f"\n{model.name}\n{markdown(header, table)}", flush=True)
        measured[model.name] = [dataclasses.asdict(point) for point in points]
        jax.clear_caches()
    return {"baselines": measured}


# --------------------------------------------------------------------------------------------------
# Numbers of layers

LAYERED = {"decoder": decoder.model, "gpt": gpt.model, "vit": vit.model}
BY_HAND = "blocks nothing_saveable"


def compile_cpu_s(step: Any, args: Sequence[Any]) -> float:
    """Return the CPU time to trace, lower and compile a jitted or fitted step."""
    jax.clear_caches()
    begin = time.process_time()
    step.lower(*args).compile()
    return time.process_time() - begin


def by_layers(names: Sequence[str], counts: Sequence[int], percents: Sequence[int]) -> dict:
    """Measure and print CPU times of planning and of compiling, as multiples of compiling without.

    "By hand" is the step with a checkpoint around each block, of which nothing is kept.
    """
    header = ("layers", "without", "by hand", "budget", "planning", "", "planned step")
    measured: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        found, table = measured.setdefault(name, []), []
        for n in counts:
            model = LAYERED[name]("cpu", n)
            fun, args = step(model.loss()), model.arguments()
            plain_s = compile_cpu_s(jax.jit(fun), args)
            by_hand_s = compile_cpu_s(jax.jit(step(losses(model)[BY_HAND])), args)
            for percent in percents:
                of_plan: dict[str, Any] = {
                    "layers": n,
                    "percent": percent,
                    "without_cpu_s": plain_s,
                    "by_hand_cpu_s": by_hand_s,
                }
                found.append(of_plan)
                by_hand = f"{by_hand_s / plain_s:.2f} x"
                begins = [str(n), f"{plain_s:.1f} s", by_hand, f"{percent} %"]
                jax.clear_caches()
                begin = time.process_time()
                try:
                    plan = remat.plan(fun, *args, budget=f"{percent}%", cache=False)
                except remat.BudgetError as error:
                    of_plan["refusal"] = str(error)
                    table.append([*begins, "refused", "", ""])
                    continue
                planning_s = time.process_time() - begin
                planned_s = compile_cpu_s(remat.fit(fun, plan=plan), args)
                of_plan |= {"planning_cpu_s": planning_s, "planned_cpu_s": planned_s}
                ratios = f"{planning_s / plain_s:.1f} x", f"{planned_s / plain_s:.2f} x"
                table.append([*begins, f"{planning_s:.1f} s", *ratios])
        print(f"\n{name}\n{markdown(header, table)}", flush=True)
    return {"by_layers": measured}


# --------------------------------------------------------------------------------------------------
# The 16-layer decoder

# Upper limits of temporaries, as a share of those without rematerialization, and of extra matmul FLOPs, and
# what policies placed by hand reach. The last row is the smallest peak for which a plan is required.
TARGETS: tuple[tuple[float, float | None, str], ...] = (
    (0.38, 0.0, "dots on blocks: 41 % at 0"),
    (0.27, 0.033, "dots, no batch dims: 27 % at 4.8 %"),
    (0.15, 0.12, ""),
    (0.08, 0.17, "nothing: 8 % at 24 %"),
    (0.06, None, "floor"),
)


def targets() -> dict:
    """Plan the decoder at the shares of `TARGETS`, and time the steps in turns."""
    model = ZOO["decoder"]("cpu")
    args, base = model.arguments(), without(model)
    fixed = base.peak_bytes - base.temporary_bytes
    steps = {"without": jax.jit(step(model.loss()))}
    reached = {}
    for share, limit, _ in TARGETS:
        label = f"{share:.1%}"
        try:
            plan = planned(step(model.loss()), args, fixed + int(share * base.temporary_bytes))
        except remat.BudgetError as error:
            reached[label] = {"refusal": str(error), "met": False}
            continue
        extra = flops.count(plan.step, *args).matmul / base.matmul_flops - 1
        steps[label] = plan.step
        reached[label] = {
            "temporary_bytes": plan.temporary_bytes,
            "share": plan.temporary_bytes / base.temporary_bytes,
            "extra_matmul_flops": extra,
            "met": plan.temporary_bytes <= share * base.temporary_bytes
            and (limit is None or extra <= limit + 1e-9),
        }
    for label, ratio in time_ratios(steps, model.example()):
        reached.setdefault(label, {})["step_ratio"] = ratio
    print(markdown(("asked", "reached", "step", "met", "by hand"), list(target_cells(reached))))
    found = [reached[f"{s:.1%}"].get("temporary_bytes") for s, _, _ in TARGETS]
    peaks = [peak for peak in found if peak is not None]
    falls = all(before >= after for before, after in itertools.pairwise(peaks))
    print(f"the peak {'never rises' if falls else 'RISES'} as the budget falls")
    return {"without": dataclasses.asdict(base), "plans": reached, "never_rises": falls}


def target_cells(reached: dict[str, dict]) -> Iterator[list[str]]:
    for share, limit, by_hand in TARGETS:
        of = reached[f"{share:.1%}"]
        asked = f"{share:.1%}" + ("" if limit is None else f" at {limit:.1%}")
        if "refusal" in of:
            yield [asked, f"refused: {of['refusal']}", "", "no", by_hand]
        else:
            got = f"{of['share']:.1%} at {of['extra_matmul_flops']:.2%}"
            yield [asked, got, f"{of['step_ratio']:.2f}x", "yes" if of["met"] else "NO", by_hand]


def time_ratios(steps: dict[str, Callable], args: Sequence[Any]) -> list[tuple[str, float]]:
    """Return step times as ratios to the first. Steps take turns, so the load affects all of them."""
    compiled = {label: fun.lower(*args).compile() for label, fun in steps.items()}
    seconds = seconds_in_turns(compiled, args, ROUNDS)
    medians = {label: statistics.median(times) for label, times in seconds.items()}
    first = next(iter(medians.values()))
    return [(label, median / first) for label, median in medians.items()]


def main(options: Sequence[str] = ()) -> dict:
    parser = argparse.ArgumentParser(prog="python -m benchmarks planner")
    parser.add_argument("--model", nargs="+", choices=list(ZOO), metavar="NAME", default=list(ZOO))
    parser.add_argument("--quick", action="store_true", help="two budgets in place of four")
    parser.add_argument("--targets", action="store_true", help="only the 16-layer decoder")
    parser.add_argument("--baselines", action="store_true", help="JAX's policies alone")
    parser.add_argument("--layers", nargs="+", type=int, metavar="N", help="models of N layers")
    asked = parser.parse_args(list(options))
    if asked.baselines:
        return opponents(asked.model)
    if asked.layers:
        names = [name for name in asked.model if name in LAYERED]
        return by_layers(names, asked.layers, QUICK_PERCENTS)
    if not hasattr(remat, "plan"):
        raise ImportError("remat.plan does not exist in this version")
    if asked.targets:
        return {"targets": targets()}
    measured = sweep(asked.model, QUICK_PERCENTS if asked.quick else PERCENTS)
    return measured if options else measured | {"targets": targets()}
