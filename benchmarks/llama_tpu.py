"""Plans of a Llama-style model of 8 B parameters for 256 TPUs, made on a machine without TPUs.

    python -m benchmarks llama_tpu          # needs libtpu: pip install 'remat[tpu]'

The step is a training step with Adam, on one sequence of 4096 tokens per device, fully sharded (FSDP) over
`tpu:v5e:16x16`. Peaks are those of one device, according to the TPU compiler. FLOPs are those of all devices,
counted on the jaxpr. The baselines wrap the body of the scan over layers in `jax.checkpoint` with JAX's
policies.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import remat
from benchmarks.zoo import flops
from benchmarks.zoo.llama import model
from benchmarks.zoo.model import train_step
from remat.program.compiled import compile_for_analysis
from remat.program.targets import Target, target as find_target

TARGET, BATCH = "tpu:v5e:16x16", 256
BUDGETS: tuple[str | None, ...] = (None, "12GiB", "8GiB")
OFFLOAD = (True, False)
POLICIES = {
    "full per-layer remat": jax.checkpoint_policies.nothing_saveable,
    "dots with no batch dims": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def sharded(tree: Any, target: Target) -> Any:
    """Return types sharded over all devices along the first dimension that the device count divides."""
    mesh = target.mesh((target.n_devices,), ("data",))

    def of(leaf: Any) -> jax.ShapeDtypeStruct:
        axes = [i for i, n in enumerate(leaf.shape) if n % target.n_devices == 0]
        spec: list[str | None] = [None] * len(leaf.shape)
        if axes:
            spec[axes[0]] = "data"
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(of, tree)


def arguments(target: Target) -> tuple[Any, ...]:
    """Return the types of the parameters, both moments, the step number and the batch, on the target."""
    params, batch = model("real").arguments()
    batch = jax.ShapeDtypeStruct((BATCH, *batch.shape[1:]), batch.dtype)
    state = jax.eval_shape(train_step_state, params)
    return tuple(sharded(x, target) for x in (*state, batch))


def train_step_state(params: Any) -> tuple[Any, ...]:
    zeros = jax.tree.map(jax.numpy.zeros_like, params)
    return params, (zeros, zeros), jax.numpy.zeros((), "int32")


def by_batch(mesh: Mesh) -> Callable:
    """Constrain each layer's input to be sharded by sequence, as is common with FSDP."""
    sharding = NamedSharding(mesh, PartitionSpec("data"))

    def divided(layer: Callable) -> Callable:
        return lambda x, params: layer(jax.lax.with_sharding_constraint(x, sharding), params)

    return divided


def main() -> dict[str, Any]:
    try:
        target = find_target(TARGET)
    except remat.PlanError as error:
        print(f"skipped: {error}")
        return {"skipped": str(error)}
    args = arguments(target)
    rows: list[dict[str, Any]] = []

    def report(
        name: str, step: Callable, peak: int, fits: bool, seconds: float, host_bytes: int = 0
    ) -> None:
        counted = flops.count(step, *args).total
        base = rows[0]["flops"] if rows else counted
        row = {
            "name": name,
            "peak_bytes": peak,
            "fits": fits,
            "flops": counted,
            "extra": counted / base - 1,
            "host_bytes": host_bytes,
            "seconds": seconds,
        }
        rows.append(row)
        mark = "" if fits else " (does not fit)"
        host = f"{host_bytes / 2**30:6.2f} GiB on the host"
        numbers = f"{peak / 2**30:8.2f} GiB  {row['extra']:7.2%}  {host}  {seconds:6.1f} s"
        print(f"{name:48} {numbers}{mark}", flush=True)

    loss, divided = model("real"), by_batch(args[-1].sharding.mesh)
    opponents: dict[str, Callable] = {"no rematerialization": divided}
    for name, policy in POLICIES.items():
        opponents[name] = lambda f, p=policy: jax.checkpoint(divided(f), policy=p)
    for name, wrap in opponents.items():
        step = train_step(loss.blocks(wrap))
        begin = time.perf_counter()
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*args)
        memory = compile_for_analysis(lowered, target)
        report(name, step, memory.peak_bytes, memory.fits, time.perf_counter() - begin)

    step = train_step(loss.blocks(divided))
    for offload, budget in itertools.product(OFFLOAD, BUDGETS):
        begin = time.perf_counter()
        plan = remat.plan(
            step, *args, budget=budget, target=target, offload=offload, donate_argnums=(0, 1)
        )
        seconds = time.perf_counter() - begin
        assert plan.peak_bytes is not None
        fitted = remat.fit(step, plan=plan, target=target, donate_argnums=(0, 1))
        name = f"remat.plan, {budget or 'all of its 15.75 GiB'}"
        name += "" if offload else ", without offload"
        report(name, fitted, plan.peak_bytes, True, seconds, plan.host_bytes)
    return {"rows": rows}
