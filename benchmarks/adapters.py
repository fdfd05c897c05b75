"""Temporaries of the gradient of an unrolled 24-layer transformer in NNX and Equinox.

Each model is written once, and the function that wraps its layers is a parameter: none, the framework's
checkpoint, this library's, and this library's selection by path (`rematted`) of the model without wrappers.
The figures are the compiler's (`temp_size_in_bytes`), so one run is enough. Nothing is executed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx

import remat.equinox
import remat.nnx

LAYERS, D, HEADS, HIDDEN, BATCH, LENGTH = 24, 128, 4, 512, 8, 128
MIB = 2**20


def plain(layer: Callable) -> Callable:
    return layer


# --------------------------------------------------------------------------------------------------
# NNX


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm_1, self.norm_2 = nnx.LayerNorm(D, rngs=rngs), nnx.LayerNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, D, decode=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.up, self.down = nnx.Linear(D, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, D, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.dropout(self.down(jax.nn.gelu(self.up(self.norm_2(x)))))


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])

    def __call__(self, x, wrap):
        for layer in self.layers:
            x = wrap(layer)(x)
        return x


def nnx_temporaries(wrap: Callable, globs: str | None = None) -> int:
    model = NnxModel(nnx.Rngs(0))
    context = remat.rematted(globs, model) if globs else contextlib.nullcontext()
    with context:
        graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, x):
        return jnp.mean(nnx.merge(graph, params, rest, copy=True)(x, wrap) ** 2)

    x = jax.ShapeDtypeStruct((BATCH, LENGTH, D), jnp.float32)
    return _temporaries(jax.grad(loss), params, rest, x)


def on_method(lift: Callable) -> Callable:
    def wrap(layer: NnxBlock) -> Callable:
        return lambda x: lift(NnxBlock.__call__)(layer, x)

    return wrap


NNX: dict[str, Any] = {
    "without": (plain, None),
    "flax.nnx.remat": (on_method(nnx.remat), None),
    "remat.nnx.remat": (on_method(remat.nnx.remat), None),
    "remat.rematted": (plain, "layers/*"),
}

# --------------------------------------------------------------------------------------------------
# Equinox


class EqxBlock(eqx.Module):
    norm_1: eqx.nn.LayerNorm
    norm_2: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        k = jax.random.split(key, 3)
        self.norm_1, self.norm_2 = eqx.nn.LayerNorm(D), eqx.nn.LayerNorm(D)
        self.attention = eqx.nn.MultiheadAttention(HEADS, D, key=k[0])
        self.up, self.down = (
            eqx.nn.Linear(D, HIDDEN, key=k[1]),
            eqx.nn.Linear(HIDDEN, D, key=k[2]),
        )

    def __call__(self, x):
        h = jax.vmap(self.norm_1)(x)
        x = x + self.attention(h, h, h)
        h = jax.vmap(self.up)(jax.vmap(self.norm_2)(x))
        return x + jax.vmap(self.down)(jax.nn.gelu(h))


class EqxModel(eqx.Module):
    layers: list[EqxBlock]

    def __init__(self, key: jax.Array):
        self.layers = [EqxBlock(k) for k in jax.random.split(key, LAYERS)]

    def __call__(self, x, wrap):
        for layer in self.layers:
            x = wrap(layer)(x)
        return x


def equinox_temporaries(wrap: Callable, globs: str | None = None) -> int:
    model = EqxModel(jax.random.key(0))
    if globs:
        model = remat.equinox.with_remat(globs, model)
    params, rest = eqx.partition(model, eqx.is_array)

    def loss(params, x):
        model = eqx.combine(params, rest)
        return jnp.mean(jax.vmap(lambda x: model(x, wrap))(x) ** 2)

    x = jax.ShapeDtypeStruct((BATCH, LENGTH, D), jnp.float32)
    return _temporaries(jax.grad(loss), params, x)


EQUINOX: dict[str, Any] = {
    "without": (plain, None),
    "equinox.filter_checkpoint": (eqx.filter_checkpoint, None),
    "remat.equinox.filter_checkpoint": (remat.equinox.filter_checkpoint, None),
    "remat.rematted": (plain, "layers/*"),
}

# --------------------------------------------------------------------------------------------------


def _temporaries(step: Callable, *args: Any) -> int:
    analysis = jax.jit(step).lower(*args).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def measure() -> dict[str, dict[str, dict[str, float]]]:
    measured: dict[str, dict[str, dict[str, float]]] = {}
    for name, ways, temporaries in (
        ("nnx", NNX, nnx_temporaries),
        ("equinox", EQUINOX, equinox_temporaries),
    ):
        n_bytes = {way: temporaries(*how) for way, how in ways.items()}
        measured[name] = {
            way: {"temporaries_mib": n / MIB, "ratio": n / n_bytes["without"]}
            for way, n in n_bytes.items()
        }
    return measured


def main() -> dict:
    measured = measure()
    for name, rows in measured.items():
        for way, row in rows.items():
            print(f"{name:10}{way:34}{row['temporaries_mib']:>8.1f} MiB{row['ratio']:>7.3f}")
    return {"layers": LAYERS, "models": measured}


if __name__ == "__main__":
    main()
