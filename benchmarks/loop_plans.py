"""Plans of steps that contain one loop, compared with checkpoints placed by hand in that loop.

    python -m benchmarks loop_plans

The alternatives by hand are `jax.checkpoint` of the loop's body with JAX's policies, and of groups of 2, 4
and √n iterations. A plan should be below the lower hull of these alternatives and the step as written: a
point on the line between two of them is what a mixture of both would reach. Nothing is executed; FLOPs are
counted on the jaxprs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

import remat
from benchmarks.zoo import flops

Body: TypeAlias = Callable[[Any, Any], tuple[Any, None]]
#: `run(body, carry, xs)` returns the last carry.
Run: TypeAlias = Callable[[Body, Any, Any], Any]

PERCENTS = (75, 50, 35, 25)


class Loop(NamedTuple):
    """A training step around one loop.

    Attributes:
      step: `step(run, *args)`.
      args: its arguments, arrays or their shapes.
      n: the number of iterations of the loop.
    """

    step: Callable
    args: tuple[Any, ...]
    n: int


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def gru(n: int = 200, batch: int = 32, width: int = 128) -> Loop:
    """A gated recurrent unit."""

    def step(run: Run, w: Any, u: Any, xs: Any) -> Any:
        def loss(w: Any, u: Any) -> Any:
            def cell(h: Any, x: Any) -> tuple[Any, None]:
                reset, update = jnp.split(jax.nn.sigmoid(x @ w[0] + h @ u[0]), 2, axis=-1)
                new = jnp.tanh(x @ w[1][:, :width] + (reset * h) @ u[1][:, :width])
                return update * h + (1 - update) * new, None

            return jnp.mean(run(cell, jnp.zeros((batch, width)), xs) ** 2)

        return jax.value_and_grad(loss, (0, 1))(w, u)

    weights = _array(2, width, 2 * width)
    return Loop(step, (weights, weights, _array(n, batch, width)), n)


def lstm(n: int = 200, batch: int = 32, width: int = 128) -> Loop:
    """Long short-term memory."""

    def step(run: Run, w: Any, u: Any, xs: Any) -> Any:
        def loss(w: Any, u: Any) -> Any:
            def cell(state: Any, x: Any) -> tuple[Any, None]:
                h, c = state
                i, f, g, o = jnp.split(x @ w + h @ u, 4, axis=-1)
                c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
                return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

            zeros = jnp.zeros((batch, width))
            return jnp.mean(run(cell, (zeros, zeros), xs)[0] ** 2)

        return jax.value_and_grad(loss, (0, 1))(w, u)

    weights = _array(width, 4 * width)
    return Loop(step, (weights, weights, _array(n, batch, width)), n)


def pde(n: int = 200, size: int = 96) -> Loop:
    """A reaction-diffusion equation, with three explicit stages per step."""

    def step(run: Run, rate: Any, start: Any) -> Any:
        def loss(rate: Any) -> Any:
            def advance(u: Any, _: Any) -> tuple[Any, None]:
                for _ in range(3):
                    around = sum(jnp.roll(u, shift, axis) for shift in (1, -1) for axis in (0, 1))
                    u = u + 0.1 * (around - 4 * u) + 0.01 * rate * jnp.sin(u) * jnp.exp(-u * u)
                return u, None

            return jnp.mean(run(advance, start, jnp.zeros(n)) ** 2)

        return jax.value_and_grad(loss)(rate)

    return Loop(step, (_array(size, size), _array(size, size)), n)


LOOPS: dict[str, Callable[..., Loop]] = {"GRU": gru, "LSTM": lstm, "PDE": pde}


def as_written(body: Body, carry: Any, xs: Any) -> Any:
    return jax.lax.scan(body, carry, xs)[0]


def _checkpointed(policy: Any) -> Run:
    return lambda body, carry, xs: as_written(remat.checkpoint(body, policy=policy), carry, xs)


def _in_groups(size: int) -> Run:
    def run(body: Body, carry: Any, xs: Any) -> Any:
        def group(carry: Any, xs: Any) -> tuple[Any, None]:
            return as_written(body, carry, xs), None

        grouped = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), xs)
        return as_written(remat.checkpoint(group), carry, grouped)

    return run


def by_hand(n: int) -> Iterator[tuple[str, Run]]:
    """Yield the alternatives by hand in a loop of n iterations."""
    policies = jax.checkpoint_policies
    yield "nothing", _checkpointed(None)
    yield "dots", _checkpointed(policies.dots_saveable)
    yield "dots, no batch", _checkpointed(policies.dots_with_no_batch_dims_saveable)
    yield "everything", _checkpointed(policies.everything_saveable)
    root = next(k for k in range(math.isqrt(n), 0, -1) if n % k == 0)
    for size in sorted({2, 4, root}):
        if n % size == 0 and size > 1:
            yield f"groups of {size}", _in_groups(size)


class Point(NamedTuple):
    """A program: its compiled peak and its extra FLOPs, relative to the step as written."""

    label: str
    peak: float
    extra: float


def hull(points: Sequence[Point], peak: float) -> float | None:
    """Return the least extra FLOPs of a mixture of two points with at most this peak; None without one."""
    mixtures = [p.extra for p in points if p.peak <= peak]
    for low in points:
        for high in points:
            if low.peak <= peak < high.peak:
                share = (peak - low.peak) / (high.peak - low.peak)
                mixtures.append(low.extra + share * (high.extra - low.extra))
    return min(mixtures, default=None)


class Planned(NamedTuple):
    """A plan within a share of the peak as written; None if the planner found none."""

    percent: int
    plan: Point | None
    hull: float | None


def measure(loop: Loop, percents: Sequence[int] = PERCENTS) -> tuple[list[Point], list[Planned]]:
    """Return the alternatives by hand, the step as written first, and the plans."""

    def of(run: Run) -> Callable:
        return lambda *args: loop.step(run, *args)

    def point(label: str, step: Callable) -> tuple[int, int]:
        peak = remat.testing.peak_bytes(jax.jit(step).lower(*loop.args).compile())
        return peak, flops.count(step, *loop.args).total

    peak, total = point("", of(as_written))
    points = [Point("as written", 1.0, 0.0)]
    for label, run in by_hand(loop.n):
        found = point(label, of(run))
        points.append(Point(label, found[0] / peak, found[1] / total - 1))
    rows = []
    for percent in percents:
        budget = peak * percent // 100
        plan = None
        try:
            made = remat.plan(of(as_written), *loop.args, budget=budget, cache=False)
            found = point("plan", remat.fit(of(as_written), plan=made))
            plan = Point("plan", found[0] / peak, found[1] / total - 1)
        except remat.BudgetError:
            pass
        rows.append(Planned(percent, plan, hull(points, percent / 100)))
    return points, rows


def main() -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, make in LOOPS.items():
        points, rows = measure(make())
        print(f"{name}: " + ", ".join(f"{p.label} {p.peak:.1%}: {p.extra:.1%}" for p in points[1:]))
        for row in rows:
            ours = "refused" if row.plan is None else f"{row.plan.peak:.1%}: {row.plan.extra:.1%}"
            line = "none" if row.hull is None else f"{row.hull:.1%}"
            print(f"  {row.percent} %  plan {ours:16} hull by hand {line}", flush=True)
        result[name] = {
            "by_hand": [p._asdict() for p in points],
            "plans": [
                {
                    "percent": row.percent,
                    "peak": row.plan and row.plan.peak,
                    "extra": row.plan and row.plan.extra,
                    "hull": row.hull,
                }
                for row in rows
            ],
        }
    return {"loops": result}
