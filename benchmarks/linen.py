"""Flax Linen: the memory of an unrolled transformer with remat, and the cost of remat_scan by depth.

    python benchmarks/linen.py

Bytes are the compiler's `temp_size_in_bytes` of a jitted gradient; seconds are the CPU time of tracing and
compiling it.
"""

from __future__ import annotations

import math
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import remat.linen
from remat.units import format_bytes

KEY = jax.random.key(0)
N_LAYERS, WIDTH, HEADS, SEQUENCE, BATCH = 24, 64, 4, 64, 4
DEPTHS = (64, 256, 1024)
LENGTHS: dict[int, dict[int, tuple[int, ...]]] = {
    1: {64: (64,), 256: (256,), 1024: (1024,)},
    2: {64: (8, 8), 256: (16, 16), 1024: (32, 32)},
    3: {64: (4, 4, 4), 256: (8, 8, 4), 1024: (16, 8, 8)},
}


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class Transformer(nn.Module):
    block: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(N_LAYERS):
            x = self.block()(x)
        return x


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(x.shape[-1])(jnp.sin(nn.Dense(x.shape[-1])(x)))


class Deep(nn.Module):
    remat_scan: Any
    lengths: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.remat_scan(Layer, self.lengths)(name="stack")(x)


def compiled(model: nn.Module, x: Any) -> tuple[int, float]:
    """Return the temporaries in bytes, and the time to trace and compile in seconds."""
    variables = jax.eval_shape(model.init, KEY, x)
    step = jax.jit(jax.grad(lambda v, x: model.apply(v, x).sum()))
    start = time.process_time()
    executable = step.lower(variables, x).compile()
    seconds = time.process_time() - start
    return executable.memory_analysis().temp_size_in_bytes, seconds


def unrolled() -> None:
    x = jax.ShapeDtypeStruct((BATCH, SEQUENCE, WIDTH), jnp.float32)
    print(f"{N_LAYERS} unrolled transformer blocks, jaxlib {jax.lib.__version__}")
    plain = None
    for name, block in (
        ("nothing", Block),
        ("nn.remat", nn.remat(Block)),
        ("remat.linen.remat", remat.linen.remat(Block)),
    ):
        size, seconds = compiled(Transformer(block), x)
        plain = plain or size
        print(f"  {name:18} {format_bytes(size):>10}  {size / plain:5.2f}  {seconds:6.1f} s")


def scanned() -> None:
    x = jax.ShapeDtypeStruct((2048, 16), jnp.float32)
    for source, remat_scan in (("nn", nn.remat_scan), ("remat.linen", remat.linen.remat_scan)):
        for levels, by_depth in LENGTHS.items():
            if source == "nn" and levels == 1:
                continue
            sizes, times = [], []
            for depth in DEPTHS:
                # The least of five, since compile times vary by more than they grow from depth to depth.
                runs = [compiled(Deep(remat_scan, by_depth[depth]), x) for _ in range(5)]
                sizes.append(runs[0][0])
                times.append(min(seconds for _, seconds in runs))
            fit = exponent(DEPTHS, sizes)
            print(
                f"{source}.remat_scan, {levels} levels: "
                + ", ".join(
                    f"n={n} {format_bytes(s)} {t:.2f} s" for n, s, t in zip(DEPTHS, sizes, times)
                )
                + f"; temporaries ~ n^{fit:.2f}; "
                + f"compile time within {max(times) / min(times) - 1:.0%}"
            )


def exponent(depths: tuple[int, ...], sizes: list[int]) -> float:
    """Return the least-squares slope of log bytes over log n."""
    xs, ys = [math.log(n) for n in depths], [math.log(s) for s in sizes]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys)) / sum(
        (x - x_mean) ** 2 for x in xs
    )


if __name__ == "__main__":
    unrolled()
    scanned()
