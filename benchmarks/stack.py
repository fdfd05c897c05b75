"""Gradient of 24 unrolled blocks: temporaries, measured peak of the process, and step time.

A block has three matrix products, tanh, gelu, sin·cos and a residual connection, with D=512. Memory at
B=4096 is the compiler's and, in one process for each alternative, that of the resident set. Times at B=1024
are measured in one process in which the alternatives take turns, so that the machine's load affects all of
them.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp

import remat
from benchmarks.timing import seconds_in_turns

BLOCKS, D, B_MEMORY, B_TIME, ROUNDS = 24, 512, 4096, 1024, 7
MIB = 2**20


def block(weights, x):
    a, b, c = weights
    h = jnp.tanh(x @ a)
    h = jax.nn.gelu(h @ b)
    return x + (jnp.sin(h) * jnp.cos(h)) @ c


WAYS: dict[str, Callable] = {
    "without": block,
    "jax.checkpoint": jax.checkpoint(block),
    "remat.checkpoint": remat.checkpoint(block),
    "remat.checkpoint, dots saved": remat.checkpoint(block, policy=remat.policies.dots_saveable),
}


def gradient(way: str) -> Callable:
    layer = WAYS[way]

    def loss(stack, x):
        for weights in stack:
            x = layer(weights, x)
        return jnp.mean(x * x)

    return jax.grad(loss)


def arguments(batch: int):
    keys = jax.random.split(jax.random.key(0), BLOCKS)
    stack = [tuple(jax.random.normal(k, (3, D, D)) * D**-0.5) for k in keys]
    return stack, jnp.ones((batch, D))


def memory(way: str) -> dict[str, float]:
    step = jax.jit(gradient(way))
    args = arguments(B_MEMORY)
    compiled = step.lower(*args).compile()
    analysis = compiled.memory_analysis()
    real = remat.testing.peak_bytes(compiled, *args, real=True) - analysis.argument_size_in_bytes
    return {
        "temporaries_mib": analysis.temp_size_in_bytes / MIB,
        "real_growth_mib": real / MIB,
        "output_mib": analysis.output_size_in_bytes / MIB,
    }


def step_times() -> dict[str, float]:
    args = arguments(B_TIME)
    steps = {way: jax.jit(gradient(way)).lower(*args).compile() for way in WAYS}
    seconds = seconds_in_turns(steps, args, ROUNDS)
    return {way: statistics.median(s) for way, s in seconds.items()}


def main() -> dict:
    rows = {}
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.stack", way]
        rows[way] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    for way, seconds in step_times().items():
        rows[way]["step_s"] = seconds
    base = rows["without"]
    print(f"{'':30}{'temporaries':>18}{'process growth':>18}{'step':>10}")
    for way, row in rows.items():
        for key in ("temporaries_mib", "step_s"):
            row[key.split("_")[0] + "_ratio"] = row[key] / base[key]
        print(
            f"{way:30}{row['temporaries_mib']:>10.0f} MiB{row['temporaries_ratio']:>4.2f}"
            f"{row['real_growth_mib']:>14.0f} MiB{row['step_ratio']:>9.2f}x"
        )
    return {"blocks": BLOCKS, "ways": rows}


if __name__ == "__main__":
    print(json.dumps(memory(sys.argv[1])))
