"""Planning time without compilation: steps of 1,000 and 10,000 equations, scans of 2 and 32 layers.

    python -m benchmarks planning_time
    python -m benchmarks planning_time --small
    python -m benchmarks planning_time --large    # 100,000 equations, too, which compile for minutes

The table has seconds of CPU time, which other work on the machine changes little, and of wall-clock time, at
four budgets (shares of the compiled peak without rematerialization). Compiling and lowering are subtracted.
A budget that the planner refuses counts like any other. Nothing is marked, and nothing is executed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

import remat
from remat.planner.step import TracedStep

PERCENTS = (75, 50, 35, 25)
WIDTH, ROWS = 64, 1000


class Seconds(NamedTuple):
    """CPU time and wall-clock time."""

    cpu: float
    wall: float

    def __sub__(self, other: Seconds) -> Seconds:  # type: ignore[override]
        return Seconds(self.cpu - other.cpu, self.wall - other.wall)

    @classmethod
    def now(cls) -> Seconds:
        return cls(time.process_time(), time.perf_counter())


def chain(n_blocks: int) -> tuple[Callable, tuple]:
    """Return the loss of unrolled blocks `x = x + tanh(x a) b`."""

    def loss(weights, x):
        for a, b in weights:
            x = x + jnp.tanh(x @ a) @ b
        return (x * x).sum()

    shape = jax.ShapeDtypeStruct
    block = shape((WIDTH, 4 * WIDTH), jnp.float32), shape((4 * WIDTH, WIDTH), jnp.float32)
    return jax.value_and_grad(loss), ([block] * n_blocks, shape((ROWS, WIDTH), jnp.float32))


def scanned(n_layers: int) -> tuple[Callable, tuple]:
    """Return the loss of the same blocks in a loop."""

    def loss(weights, x):
        def layer(x, ab):
            a, b = ab
            return x + jnp.tanh(x @ a) @ b, None

        return (jax.lax.scan(layer, x, weights)[0] ** 2).sum()

    shape = jax.ShapeDtypeStruct
    weights = (
        shape((n_layers, WIDTH, 4 * WIDTH), jnp.float32),
        shape((n_layers, 4 * WIDTH, WIDTH), jnp.float32),
    )
    return jax.value_and_grad(loss), (weights, shape((ROWS, WIDTH), jnp.float32))


def measure(step: Callable, args: tuple, percent: int) -> dict[str, Any]:
    """Plan once; return the time, from which that of all compilations is subtracted."""
    compiling = Seconds(0.0, 0.0)
    inner = TracedStep.memory

    def memory(self: TracedStep) -> Any:
        nonlocal compiling
        begin = Seconds.now()
        found = inner(self)
        took = Seconds.now() - begin
        compiling = Seconds(compiling.cpu + took.cpu, compiling.wall + took.wall)
        return found

    with mock.patch.object(TracedStep, "memory", memory):
        begin = Seconds.now()
        try:
            remat.plan(step, *args, budget=f"{percent}%", cache=False, progress=False)
            refused = False
        except remat.BudgetError:
            refused = True
        planning = Seconds.now() - begin - compiling
    return {
        "percent": percent,
        "refused": refused,
        "cpu_s": planning.cpu,
        "wall_s": planning.wall,
        "compiling_wall_s": compiling.wall,
    }


def main(options: Sequence[str] = ()) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="planning_time", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="without the 10,000 equations")
    parser.add_argument(
        "--large", action="store_true", help="with 100,000 equations, at half of the peak"
    )
    chosen = parser.parse_args(list(options))
    # A block has 15 equations, those of the backward pass included.
    cases = {"1,000 equations": chain(66)}
    if not chosen.small:
        cases["10,000 equations"] = chain(666)
    percents: dict[str, tuple[int, ...]] = {}
    if chosen.large:
        cases["100,000 equations"], percents["100,000 equations"] = chain(6666), (50,)
    cases |= {"scan of 2 layers": scanned(2), "scan of 32 layers": scanned(32)}
    print(f"{'':20}{'budget':>8}{'CPU':>9}{'clock':>9}{'compiling':>11}")
    result: dict[str, list[dict[str, Any]]] = {}
    for name, (step, args) in cases.items():
        result[name] = []
        for percent in percents.get(name, PERCENTS):
            row = measure(step, args, percent)
            result[name].append(row)
            print(
                f"{name:20}{percent:>7}%{row['cpu_s']:>8.2f}s{row['wall_s']:>8.2f}s"
                f"{row['compiling_wall_s']:>10.1f}s{'  refused' if row['refused'] else ''}",
                flush=True,
            )
    return {"plans": result}
