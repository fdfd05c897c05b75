"""One measurement on the device at hand: `python -m benchmarks.device.measure PART ...` prints JSON."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import remat
from benchmarks.zoo.model import Model, step
from remat.program.devices import device as figures_of

ROUNDS = 10
BYTES = {"tiny": 2**20, "cpu": 2**28, "gpu": 2**30}  # of one transfer


def device() -> dict[str, Any]:
    at = jax.devices()[0]
    known = figures_of(at.device_kind, platform=at.platform)
    return {
        "platform": at.platform,
        "kind": at.device_kind,
        "figures": known.name,
        "n_devices": jax.device_count(),
        "jax": jax.__version__,
    }


def seconds(run: Callable[[], Any]) -> float:
    """Return the median time of a call, after a first one that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def allocated_peak_bytes() -> int | None:
    """Return the allocator's peak in this process; None if it reports none, as on CPUs."""
    stats = jax.devices()[0].memory_stats()
    return None if stats is None else stats.get("peak_bytes_in_use")


def _model(name: str, size: str) -> tuple[Model, dict[str, Any]]:
    model = importlib.import_module(f"benchmarks.zoo.{name}").model(size)
    return model, {"model": name, "size": size}


def _measured(compiled: Any, args: tuple[Any, Any]) -> dict[str, Any]:
    """Return the time of a step and its peaks by the compiler and the allocator, of a fresh process."""
    return {
        "step_s": seconds(lambda: compiled(*args)),
        "peak_bytes": remat.testing.peak_bytes(compiled),
        "allocated_peak_bytes": allocated_peak_bytes(),
    }


def by_hand(name: str, size: str, alternative: str) -> dict[str, Any]:
    """Measure the step as written, or with every block checkpointed."""
    model, row = _model(name, size)
    args = model.example()
    policies = jax.checkpoint_policies
    wrap = {
        "written": lambda block: block,
        "nothing saved": jax.checkpoint,
        "dots saved": lambda block: jax.checkpoint(
            block, policy=policies.dots_with_no_batch_dims_saveable
        ),
    }[alternative]
    compiled = jax.jit(step(model.blocks(wrap))).lower(*args).compile()
    return row | {"alternative": alternative} | _measured(compiled, args)


def plan(name: str, size: str, percent: str, path: str) -> dict[str, Any]:
    """Plan the step for a share of its peak, and write the plan to a file."""
    model, row = _model(name, size)
    args = model.arguments()
    row["percent"] = int(percent)
    begin = time.perf_counter()
    try:
        found = remat.plan(
            step(model.loss()), *args, budget=f"{percent}%", cache=False, progress=False
        )
    except remat.BudgetError as error:
        return row | {"refused": str(error), "planning_s": time.perf_counter() - begin}
    found.save(path)
    return row | {
        "planning_s": time.perf_counter() - begin,
        "budget_bytes": found.budget_bytes,
        "planned_peak_bytes": found.peak_bytes,
        "predicted_s": found.seconds,
        "predicted_ratio": 1 + found.extra_seconds / found.seconds,
        "extra_flops": found.extra_flops / found.flops,
    }


def planned(name: str, size: str, path: str) -> dict[str, Any]:
    """Measure the step with a plan, and compare its results with those of the step as written."""
    model, _ = _model(name, size)
    args = model.example()
    written = step(model.loss())
    compiled = remat.fit(written, plan=remat.Plan.load(path)).lower(*args).compile()
    # Measured before the step without a plan runs, since that raises the peak of the process.
    row = _measured(compiled, args)
    plain = jax.jit(written)
    row["ratio"] = row["step_s"] / seconds(lambda: plain(*args))
    return row | {"largest_difference": difference(compiled(*args), plain(*args))}


def difference(got: Any, expected: Any) -> float:
    """Return the largest difference of two pytrees, as a share of the leaf's largest magnitude."""
    return max(
        float(np.max(np.abs(a - b), initial=0.0) / max(np.max(np.abs(b), initial=0.0), 1e-30))
        for a, b in zip(
            map(_as_float, jax.tree.leaves(got)), map(_as_float, jax.tree.leaves(expected))
        )
    )


def _as_float(x: Any) -> np.ndarray:
    return np.asarray(x, dtype=np.float64)


def transfers(size: str) -> dict[str, Any]:
    at = jax.devices()[0]
    kinds = {memory.kind for memory in at.addressable_memories()}
    if "pinned_host" not in kinds:
        return {"skipped": f"no pinned_host memory, only {sorted(kinds)}"}
    here, there = (
        jax.sharding.SingleDeviceSharding(at, memory_kind=kind)
        for kind in (at.default_memory().kind, "pinned_host")
    )
    x = jax.device_put(jnp.ones(BYTES[size] // 4, jnp.float32), here)
    y = jax.device_put(x, there)
    known = figures_of(at.device_kind, platform=at.platform)
    return {
        "to_host_bytes_per_s": x.nbytes / seconds(lambda: jax.device_put(x, there)),
        "from_host_bytes_per_s": x.nbytes / seconds(lambda: jax.device_put(y, here)),
        "figure_bytes_per_s": known.host_link_bytes_per_s,
    }


def offload(size: str) -> dict[str, Any]:
    layers, width = {"tiny": (3, 16), "cpu": (24, 2048), "gpu": (24, 2048)}[size]
    keys = jax.random.split(jax.random.key(0))
    weights = jax.random.normal(keys[0], (layers, width, width)) / width**0.5
    x = jax.random.normal(keys[1], (4 * width, width))

    def gradient(policy: Any) -> Callable:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            h = jax.ad_checkpoint.checkpoint_name(x @ w, "h")
            return jnp.tanh(h) + jnp.sin(h), None

        def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
            body = jax.checkpoint(layer, policy=policy)
            return jnp.sum(jax.lax.scan(body, x, weights)[0] ** 2)

        return jax.jit(jax.grad(loss))

    policies = jax.checkpoint_policies
    kept = gradient(policies.save_only_these_names("h"))
    moved = gradient(
        policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["h"],
            offload_src="device",
            offload_dst="pinned_host",
        )
    )
    return {
        "largest_difference": difference(moved(weights, x), kept(weights, x)),
        "ratio": seconds(lambda: moved(weights, x)) / seconds(lambda: kept(weights, x)),
    }


PARTS = {
    "device": device,
    "by_hand": by_hand,
    "plan": plan,
    "planned": planned,
    "transfers": transfers,
    "offload": offload,
}

if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]](*sys.argv[2:])))
