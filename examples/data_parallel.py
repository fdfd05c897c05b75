"""Train data-parallel on 8 devices of this CPU, within a budget for each device.

The batch is sharded over the devices, and the parameters are replicated. `remat.fit` reads the shardings from
the arguments. Its budget and the compiler's peak are those of one device.

    python examples/data_parallel.py
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import remat
from remat.units import format_bytes

LAYERS, WIDTH, BATCH = 12, 128, 8192


def step(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    """Take a step of gradient descent on a residual network."""

    def loss(params: Any) -> jax.Array:
        h = x
        for up, down in params:
            h = h + jax.nn.gelu(h @ up) @ down
        return jnp.mean((h - y) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--batch", type=int, default=BATCH)
    options = parser.parse_args(arguments)
    devices = jax.devices()
    mesh = Mesh(devices, ("data",))
    sharded, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = [
        tuple(
            jax.random.normal(k, shape) * 0.02 for shape in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
        )
        for k in keys
    ]
    params = jax.device_put(params, everywhere)
    x = jax.device_put(jax.random.normal(jax.random.key(1), (options.batch, WIDTH)), sharded)
    y = jnp.sin(x)
    train = remat.fit(step, budget=options.budget, donate_argnums=0)
    losses = []
    for _ in range(options.steps):
        params, value = train(params, x, y)
        losses.append(float(value))
    (plan,) = train.plans
    print(
        f"{len(devices)} devices, peak of each {format_bytes(plan.peak_bytes)}, "
        f"{format_bytes(plan.peak_bytes_without_remat)} without rematerialization; "
        f"loss {losses[0]:.3f} → {losses[-1]:.3f}"
    )
    return {"losses": losses, "plan": plan, "devices": len(devices)}


if __name__ == "__main__":
    # Must be set before JAX initializes its backend: splits this CPU into 8 devices.
    jax.config.update("jax_num_cpu_devices", 8)
    main()
