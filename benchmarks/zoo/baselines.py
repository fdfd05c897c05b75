"""What JAX users have today: a standard policy on each block by hand, or around the whole loss.

On CPU up to jaxlib 0.11.0 `jax.checkpoint` has no effect in unrolled code (`transform/barrier.py`), so
there the opponent is `remat.checkpoint` with the same policies, which saves what JAX's would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jaxlib

import remat
from benchmarks.zoo import flops
from benchmarks.zoo.model import Loss, Model, step

POLICIES = ("nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")


@dataclass(frozen=True)
class Point:
    """One way to compute the loss and its gradient, measured."""

    label: str
    peak_bytes: int  # arguments + temporaries + results - aliased
    temporary_bytes: int
    matmul_flops: int
    flops: int
    compile_s: float = 0.0

    def extra_flops(self, base: Point) -> float:
        """All operations beyond those of `base`, as a fraction of its own."""
        return self.flops / base.flops - 1

    def extra_matmul_flops(self, base: Point) -> float:
        """The same of matrix products and convolutions; 0 where there are none."""
        return self.matmul_flops / base.matmul_flops - 1 if base.matmul_flops else 0.0


def checkpoint() -> Callable:
    """`jax.checkpoint`, or ours where the compiler undoes it."""
    version = tuple(int(part) for part in jaxlib.__version__.split(".")[:3])
    undone = jax.default_backend() == "cpu" and version < (0, 11, 1)
    return remat.checkpoint if undone else jax.checkpoint


def measure(label: str, fun: Callable, *args: Any) -> Point:
    """Compile and count, without running; the arguments may be `jax.ShapeDtypeStruct`s."""
    begin = time.perf_counter()
    compiled = jax.jit(fun).lower(*args).compile()
    seconds = time.perf_counter() - begin
    counted = flops.count(fun, *args)
    return Point(
        label,
        remat.testing.peak_bytes(compiled),
        compiled.memory_analysis().temp_size_in_bytes,
        counted.matmul,
        counted.total,
        seconds,
    )


def without(model: Model) -> Point:
    """The step without rematerialization."""
    return measure("without", step(model.loss()), *model.arguments())


def losses(model: Model) -> dict[str, Loss]:
    """The standard opponents by label, policy by policy."""
    found = {}
    for policy in POLICIES:
        wrap = partial(checkpoint(), policy=getattr(jax.checkpoint_policies, policy))
        found[f"blocks {policy}"] = model.blocks(wrap)
        found[f"whole {policy}"] = model.loss(wrap)
    return found


def baselines(model: Model) -> list[Point]:
    """No rematerialization, then every standard opponent, measured."""
    args = model.arguments()
    measured = [measure(label, step(loss), *args) for label, loss in losses(model).items()]
    return [without(model), *measured]


def best_baseline(points: Iterable[Point], peak_bytes: int) -> Point | None:
    """Of those that need no more than a peak, the one with the fewest FLOPs; None if there is none.

    >>> cheap, small = Point("a", 10, 8, 5, 6), Point("b", 5, 3, 7, 8)
    >>> best_baseline([cheap, small], 10).label, best_baseline([cheap, small], 9).label
    ('a', 'b')
    """
    fitting = [point for point in points if point.peak_bytes <= peak_bytes]
    return min(fitting, key=lambda point: point.flops, default=None)
