"""Measure the figures of the CPU in `program/devices.py`: python -m benchmarks.device_cpu"""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp


def seconds(run, repeats=9):
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main():
    jax.config.update("jax_enable_x64", True)
    n = 1024
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        x = jnp.ones((n, n), dtype)
        product = jax.jit(jnp.matmul)
        rate = 2 * n**3 / seconds(lambda x=x, f=product: f(x, x).block_until_ready())
        print(f"{dtype:9} product of {n} x {n}: {rate / 1e9:6.0f} GFLOP/s")
    # In place, as in the buffer that a program reuses: newly mapped pages cost several times more.
    state = {"x": jnp.ones(2**26, jnp.float32)}
    y = jnp.ones(2**26, jnp.float32)
    add = jax.jit(jnp.add, donate_argnums=0)

    def step():
        state["x"] = add(state["x"], y).block_until_ready()

    print(f"x += y of 256 MiB: {3 * y.nbytes / seconds(step) / 1e9:.0f} GB/s")
    small, f = jnp.ones(8), jax.jit(jnp.sin)
    print(f"a call: {1e6 * seconds(lambda: f(small).block_until_ready(), 999):.1f} µs")


if __name__ == "__main__":
    main()
