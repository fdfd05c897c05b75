"""Layers in loops: temporaries with each layer recomputed, and the cost of protecting the recomputation.

A compiler inlines a loop of one step, copies the body of an unrolled loop, and moves loop-invariant code out
of loops. In each case it may merge a recomputation with the forward pass. The first table has the compiler's
temporaries of such programs. The second compares the time of a `scan` whose body protects its recomputation,
as is the default, with one that does not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import remat
from benchmarks.timing import seconds_in_turns

MIB = 2**20
ROUNDS = 200
Wrap = Callable[[Callable], Callable]
Loss = Callable[[Any, Any], Any]
Step = Callable[[Any, Any], Any]


def layer(x, w):
    h = jnp.tanh(x @ w)
    h = jnp.sin(h) * jnp.cos(h @ w)
    return x + jnp.exp(-h * h) @ w


def stack(layers: int, rows: int, width: int) -> tuple[Any, Any]:
    keys = jax.random.split(jax.random.key(0), 2)
    ws = jax.random.normal(keys[0], (layers, width, width)) * width**-0.5
    return jax.random.normal(keys[1], (rows, width)), ws


# Losses of a stack of layers: each takes the function that wraps a layer, and returns a function of x and the
# weights.


def _total(x: Any) -> Any:
    return jnp.sum(x * x)


def scanned(wrap: Wrap, **options: Any) -> Loss:
    f = wrap(layer)
    return lambda x, ws: _total(lax.scan(lambda c, w: (f(c, w), None), x, ws, **options)[0])


def one_step_scans(wrap: Wrap) -> Loss:
    f = wrap(layer)

    def loss(x, ws):
        for i in range(len(ws)):
            x, _ = lax.scan(lambda c, w: (f(c, w), None), x, ws[i : i + 1])
        return _total(x)

    return loss


def one_step_fori_loops(wrap: Wrap) -> Loss:
    f = wrap(layer)

    def loss(x, ws):
        for i in range(len(ws)):
            x = lax.fori_loop(i, i + 1, lambda j, c: f(c, ws[j]), x)
        return _total(x)

    return loss


def regions_in_regions(wrap: Wrap) -> Loss:
    f = wrap(layer)
    group = wrap(lambda x, ws: lax.scan(lambda c, w: (f(c, w), None), x, ws)[0])

    def loss(x, ws):
        for i in range(len(ws)):
            x = group(x, ws[i : i + 1])
        return _total(x)

    return loss


def from_a_constant(wrap: Wrap) -> Loss:
    """Return a loss in which all iterations recompute the same values."""
    f = wrap(layer)

    def loss(x, ws):
        return _total(lax.scan(lambda c, w: (c + f(x, ws[0]) * w[0, 0], None), x, ws)[0])

    return loss


def two_regions_a_step(wrap: Wrap) -> Loss:
    f = wrap(layer)

    def loss(x, ws):
        pairs = ws.reshape(-1, 2, *ws.shape[1:])
        return _total(lax.scan(lambda c, w: (f(f(c, w[0]), w[1]), None), x, pairs)[0])

    return loss


# Steps: the gradient of a loss by itself, in `lax.map`, and inside other outer loops.


def gradient(loss: Loss) -> Step:
    return jax.grad(loss, (0, 1))


def accumulated(loss: Loss) -> Step:
    """Return a step that accumulates the gradients of three microbatches in a scan."""

    def step(x, ws):
        def microbatch(total, scale):
            return total + jax.grad(loss, 1)(x * scale, ws), None

        return lax.scan(microbatch, jnp.zeros_like(ws), jnp.arange(1.0, 4.0))[0]

    return step


def in_map(loss: Loss) -> Step:
    return lambda x, ws: lax.map(
        lambda scale: jax.grad(loss, 0)(x * scale, ws), jnp.arange(1.0, 3.0)
    )


def in_while_loop(loss: Loss) -> Step:
    def step(x, ws):
        advance = lambda c: (c[0] + 1, c[1] - 1e-3 * jax.grad(loss, 1)(x, c[1]))  # noqa: E731
        return lax.while_loop(lambda c: c[0] < 3, advance, (0, ws))[1]

    return step


def mapped(loss: Loss) -> Step:
    def step(x, ws):
        parts = x.reshape(2, -1, x.shape[1])
        return jax.vmap(jax.grad(loss, (0, 1)), (0, None))(parts, ws)

    return step


def in_shard_map(loss: Loss) -> Step:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("data")

    def step(x, ws):
        return lax.psum(jax.grad(loss, 1)(x, lax.pcast(ws, "data", to="varying")), "data")

    return jax.shard_map(
        step, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=PartitionSpec()
    )


PROGRAMS: dict[str, Callable[[Wrap], Step]] = {
    "scan": lambda wrap: gradient(scanned(wrap)),
    "scan in a scan": lambda wrap: accumulated(scanned(wrap)),
    "scans of one step": lambda wrap: gradient(one_step_scans(wrap)),
    "scans of one step in a scan": lambda wrap: accumulated(one_step_scans(wrap)),
    "scans of one step in lax.map": lambda wrap: in_map(one_step_scans(wrap)),
    "scans of one step in a while_loop": lambda wrap: in_while_loop(one_step_scans(wrap)),
    "scans of one step, vmapped": lambda wrap: mapped(one_step_scans(wrap)),
    "scans of one step in shard_map": lambda wrap: in_shard_map(one_step_scans(wrap)),
    "scans of one step in regions": lambda wrap: gradient(regions_in_regions(wrap)),
    "fori_loops of one step": lambda wrap: gradient(one_step_fori_loops(wrap)),
    "unroll=True": lambda wrap: gradient(scanned(wrap, unroll=True)),
    "unroll=True in a scan": lambda wrap: accumulated(scanned(wrap, unroll=True)),
    "unroll=4": lambda wrap: gradient(scanned(wrap, unroll=4)),
    "unroll=4 in a scan": lambda wrap: accumulated(scanned(wrap, unroll=4)),
    "recomputed from a constant": lambda wrap: gradient(from_a_constant(wrap)),
    "two regions a step": lambda wrap: gradient(two_regions_a_step(wrap)),
}
WAYS: dict[str, Wrap] = {
    "without": lambda f: f,
    "jax.checkpoint": jax.checkpoint,
    "remat.checkpoint": remat.checkpoint,
}


def temporaries(program: str, way: str, x: Any, ws: Any) -> int:
    """Return the bytes of temporaries of the compiled program."""
    step = jax.jit(PROGRAMS[program](WAYS[way]))
    return int(step.lower(x, ws).compile().memory_analysis().temp_size_in_bytes)


# The cost of protection in the body of a scan.


def _body(name: str) -> tuple[Callable, Any, Any]:
    """Return a body `(carry, x) -> carry`, its first carry, and the arrays that it scans over."""
    if name.endswith("numbers, sin·cos"):
        n = int(name.split()[0].replace(",", ""))
        advance = lambda c, w: jnp.sin(c) * jnp.cos(c) * w  # noqa: E731
        return advance, jnp.ones(n), jnp.ones((100, n))
    if name == "10,000 numbers, stencil":
        advance = lambda c, k: c + k * (jnp.roll(c, 1) + jnp.roll(c, -1) - 2 * c) * jnp.cos(c)  # noqa: E731
        return advance, jnp.linspace(0.0, 1.0, 10_000), jnp.full(20, 0.1)
    x, ws = stack(8, 64, 64)
    return layer, x, ws


BODIES = (
    "8 numbers, sin·cos",
    "1,000 numbers, sin·cos",
    "10,000 numbers, sin·cos",
    "10,000 numbers, stencil",
    "layer, 64×64",
)


def _summed(f: Callable) -> Loss:
    return lambda init, xs: _total(lax.scan(lambda c, x: (f(c, x), None), init, xs)[0])


def protection_cost(name: str) -> dict[str, float]:
    """Return step times with recomputation protected, as ratios to the step without protection."""
    body, init, xs = _body(name)
    programs = {}
    for way, wrap in (("jax.checkpoint", jax.checkpoint), ("remat.checkpoint", remat.checkpoint)):
        for prevent_cse in (False, True):
            f = wrap(body, prevent_cse=prevent_cse)
            step = jax.jit(jax.grad(_summed(f), (0, 1)))
            programs[way, prevent_cse] = step.lower(init, xs).compile()
    seconds = seconds_in_turns(programs, (init, xs), ROUNDS)
    # The least of each, since other processes can only add to a time.
    best = {key: min(times) for key, times in seconds.items()}
    typical = {key: statistics.median(times) for key, times in seconds.items()}
    row = {"seconds": best["remat.checkpoint", False]}
    for way in ("jax.checkpoint", "remat.checkpoint"):
        row[way] = best[way, True] / best[way, False]
        row[f"{way}, medians"] = typical[way, True] / typical[way, False]
    return row


def main() -> dict[str, Any]:
    x, ws = stack(16, 1024, 256)
    table: dict[str, dict[str, float]] = {}
    print(f"{'MiB of temporaries, 16 layers':38}" + "".join(f"{way:>18}" for way in WAYS))
    for program in PROGRAMS:
        table[program] = {way: temporaries(program, way, x, ws) / MIB for way in WAYS}
        print(
            f"{program:38}" + "".join(f"{mib:18.1f}" for mib in table[program].values()), flush=True
        )
    costs: dict[str, dict[str, float]] = {}
    print("\nstep time with prevent_cse=True as a ratio to prevent_cse=False")
    for name in BODIES:
        costs[name] = protection_cost(name)
        ours, theirs = costs[name]["remat.checkpoint"], costs[name]["jax.checkpoint"]
        print(f"{name:38}jax.checkpoint {theirs:.3f}  remat.checkpoint {ours:.3f}", flush=True)
    return {"temporaries_mib": table, "protection": costs}
