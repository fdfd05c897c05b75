"""Trace, lower and compile time of the gradient of a 48-layer unrolled transformer.

`remat.checkpoint` and `jax.checkpoint` on every layer take turns in one process. JAX's caches are cleared
before each trace. Within one trace, the layers share cache entries, as they do in use.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

import remat

LAYERS, ROUNDS = 48, 7
B, T, D, HEADS = 2, 32, 64, 4


def block(params, x):
    b, t, d = x.shape

    def normalize(x, scale):
        return x * scale * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    qkv = normalize(x, params["scale_1"]) @ params["qkv"]
    heads = [
        p.reshape(b, t, HEADS, d // HEADS).transpose(0, 2, 1, 3) for p in jnp.split(qkv, 3, -1)
    ]
    q, k, v = heads
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), q @ k.swapaxes(-1, -2), -1e30)
    x = x + (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(b, t, d) @ params["out"]
    return x + jax.nn.gelu(normalize(x, params["scale_2"]) @ params["up"]) @ params["down"]


def arguments():
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    layer = {
        "qkv": shape((D, 3 * D)),
        "out": shape((D, D)),
        "up": shape((D, 4 * D)),
        "down": shape((4 * D, D)),
        "scale_1": shape((D,)),
        "scale_2": shape((D,)),
    }
    return [layer] * LAYERS, shape((B, T, D))


def step(layer: Callable) -> Callable:
    def loss(layers, x):
        for params in layers:
            x = layer(params, x)
        return jnp.mean(x * x)

    return jax.jit(jax.grad(loss))


def measure(make_layer: Callable) -> dict[str, float]:
    jax.clear_caches()
    args = arguments()
    jitted = step(make_layer(block))
    times = {}
    stages = (("trace", lambda _: jitted.trace(*args)), ("lower", lambda s: s.lower()))
    stage = None
    for name, act in (*stages, ("compile", lambda s: s.compile())):
        start = time.perf_counter()
        stage = act(stage)
        times[name] = time.perf_counter() - start
    return times


def main() -> dict:
    ways = {
        "jax.checkpoint": jax.checkpoint,
        "remat.checkpoint": remat.checkpoint,
        "jax.checkpoint, dots": functools.partial(
            jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable
        ),
        "remat.checkpoint, dots": functools.partial(
            remat.checkpoint, policy=remat.policies.dots_saveable
        ),
    }
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, make in ways.items():
            runs[way].append(measure(make))
    result = {way: {name: min(r[name] for r in rs) for name in rs[0]} for way, rs in runs.items()}
    print(f"{'':26}{'trace':>10}{'lower':>10}{'compile':>10}")
    for way, times in result.items():
        print(f"{way:26}" + "".join(f"{t:>9.2f}s" for t in times.values()))
    ratios = {
        f"{name}{kind}": result["remat.checkpoint" + kind][name]
        / result["jax.checkpoint" + kind][name]
        for kind in ("", ", dots")
        for name in ("trace", "lower", "compile")
    }
    print(
        "remat.checkpoint / jax.checkpoint: " + ", ".join(f"{k} {v:.2f}" for k, v in ratios.items())
    )
    return {"layers": LAYERS, "seconds": result, "ratios": ratios}
