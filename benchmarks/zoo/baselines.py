"""The baselines: JAX's standard policies, placed by hand on each block or around the whole loss.

On CPU up to jaxlib 0.11.0 `jax.checkpoint` has no effect in unrolled code (`transform/barrier.py`). There the
baseline is `remat.checkpoint` with the same policies, which saves the same values as JAX's.
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
    """The figures of one way to compute the loss and its gradient."""

    label: str
    peak_bytes: int  # arguments + temporaries + results - aliased
    temporary_bytes: int
    matmul_flops: int
    flops: int
    compile_s: float = 0.0

    def extra_flops(self, base: Point) -> float:
        """Return the FLOPs in excess of those of `base`, as a share of the latter."""
        return self.flops / base.flops - 1

    def extra_matmul_flops(self, base: Point) -> float:
        """Return the same of matrix products and convolutions; 0 if there are none."""
        return self.matmul_flops / base.matmul_flops - 1 if base.matmul_flops else 0.0


def checkpoint() -> Callable:
    """Apply `jax.checkpoint`, or `remat.checkpoint` where the compiler undoes JAX's."""
    version = tuple(int(part) for part in jaxlib.__version__.split(".")[:3])
    undone = jax.default_backend() == "cpu" and version < (0, 11, 1)
    return remat.checkpoint if undone else jax.checkpoint


def measure(label: str, fun: Callable, *args: Any) -> Point:
    """Compile a step and count its FLOPs without running it; arguments may be `jax.ShapeDtypeStruct`s."""
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
    """Measure the step without rematerialization."""
    return measure("without", step(model.loss()), *model.arguments())


def losses(model: Model) -> dict[str, Loss]:
    """Yield the losses with the standard policies, by label."""
    found = {}
    for policy in POLICIES:
        wrap = partial(checkpoint(), policy=getattr(jax.checkpoint_policies, policy))
        found[f"blocks {policy}"] = model.blocks(wrap)
        found[f"whole {policy}"] = model.loss(wrap)
    return found


def baselines(model: Model) -> list[Point]:
    """Measure the step without rematerialization, then with each standard policy."""
    args = model.arguments()
    measured = [measure(label, step(loss), *args) for label, loss in losses(model).items()]
    return [without(model), *measured]


def best_baseline(points: Iterable[Point], peak_bytes: int) -> Point | None:
    """Return the point with the fewest FLOPs of those with at most this peak; None if there is none.

    >>> cheap, small = Point("a", 10, 8, 5, 6), Point("b", 5, 3, 7, 8)
    >>> best_baseline([cheap, small], 10).label, best_baseline([cheap, small], 9).label
    ('a', 'b')
    """
    fitting = [point for point in points if point.peak_bytes <= peak_bytes]
    return min(fitting, key=lambda point: point.flops, default=None)
