"""Checkpointed loops: memory and time of remat, Equinox and `jax.lax.scan`, measured in one run.

The programs are gradients of loops of n steps, with bodies from a few elementwise operations to matrix
products. The alternatives run in turn, so that the machine's load affects all of them. Times are ratios to
Equinox's internal checkpointed while loop with the same number of checkpoints or, if Equinox is not
installed, to `jax.lax.scan` with `jax.checkpoint` on each step. A callback in the body counts the steps, in
separate programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.timing import seconds_in_turns
from remat.loops.scan import scan
from remat.loops.schedules import Mixed, OnlineMixed
from remat.loops.while_loop import while_loop

try:
    import equinox.internal as eqxi
except ImportError:
    eqxi = None

ROUNDS = 7
MIB = 2**20
COUNTED = ((10, 3), (100, 5), (100, 10), (1000, 10))

_matrix = jax.random.normal(jax.random.key(0), (256, 256)) / 16


def _sin_cos(x: Any) -> Any:
    return jnp.sin(x) * jnp.cos(x)


# Each is a body, its argument, and pairs of n and the number of checkpoints.
BODIES: dict[str, tuple[Callable, Any, tuple[tuple[int, int], ...]]] = {
    "8 numbers, sin·cos": (_sin_cos, jnp.ones(8), ((20_000, 10),)),
    "10⁴ numbers, sin·cos": (_sin_cos, jnp.ones(10_000), ((500, 10),)),
    "10⁶ numbers, sin·cos": (_sin_cos, jnp.ones(1_000_000), ((40, 6),)),
    "256×256 times 256×64, tanh": (
        lambda x: jnp.tanh(_matrix @ x),
        jnp.ones((256, 64)),
        ((500, 10), (500, 45)),
    ),
}

# Each is a function (body, x, n, checkpoints) -> the final x.


def by_remat_scan(body: Callable, x: Any, n: int, s: int) -> Any:
    return scan(lambda c, _: (body(c), None), x, None, n, checkpoints=s)[0]


def by_remat_states(body: Callable, x: Any, n: int, s: int) -> Any:
    return scan(lambda c, _: (body(c), None), x, None, n, checkpoints=n)[0]


def by_remat_while(body: Callable, x: Any, n: int, s: int) -> Any:
    step = lambda c: (c[0] + 1, body(c[1]))  # noqa: E731
    return while_loop(lambda c: c[0] < n, step, (jnp.int32(0), x), checkpoints=s)[1]


def by_remat_nesting(body: Callable, x: Any, n: int, s: int) -> Any:
    return scan(lambda c, _: (body(c), None), x, None, n)[0]


def by_equinox(body: Callable, x: Any, n: int, s: int) -> Any:
    step = lambda c: (c[0] + 1, body(c[1]))  # noqa: E731
    options = {"max_steps": n, "kind": "checkpointed", "checkpoints": s}
    return eqxi.while_loop(lambda c: c[0] < n, step, (0, x), **options)[1]


def by_lax(body: Callable, x: Any, n: int, s: int) -> Any:
    return jax.lax.scan(lambda c, _: (body(c), None), x, None, n)[0]


def by_lax_each_step(body: Callable, x: Any, n: int, s: int) -> Any:
    step = jax.checkpoint(lambda c, _: (body(c), None), prevent_cse=False)
    return jax.lax.scan(step, x, None, n)[0]


def by_lax_nested(body: Callable, x: Any, n: int, s: int) -> Any:
    inner = max(k for k in range(1, int(n**0.5) + 1) if n % k == 0)

    def block(c: Any, _: None) -> tuple[Any, None]:
        return jax.lax.scan(lambda c, _: (body(c), None), c, None, inner)[0], None

    block = jax.checkpoint(block, prevent_cse=False)
    return jax.lax.scan(block, x, None, n // inner)[0]


WAYS: dict[str, Callable] = {
    "remat.scan, checkpoints": by_remat_scan,
    "remat.scan, checkpoints=n": by_remat_states,
    "remat.while_loop, checkpoints": by_remat_while,
    "remat.scan, default": by_remat_nesting,
    "equinox, checkpoints": by_equinox,
    "lax.scan": by_lax,
    "lax.scan, each step": by_lax_each_step,
    "lax.scan, nested": by_lax_nested,
}
if eqxi is None:
    del WAYS["equinox, checkpoints"]
REFERENCE = "equinox, checkpoints" if eqxi else "lax.scan, each step"
# Pairs with equal numbers of checkpoints, and therefore about equal memory.
EQUAL_MEMORY = (
    ("remat.scan, checkpoints", "equinox, checkpoints"),
    ("remat.while_loop, checkpoints", "equinox, checkpoints"),
    ("remat.scan, checkpoints=n", "lax.scan, each step"),
)


def compile_gradient(way: str, body: Callable, x: Any, n: int, s: int) -> Any:
    return jax.jit(jax.grad(lambda x: jnp.sum(WAYS[way](body, x, n, s)))).lower(x).compile()


def measure(body: Callable, x: Any, n: int, s: int) -> dict[str, dict[str, float]]:
    programs = {way: compile_gradient(way, body, x, n, s) for way in WAYS}
    seconds = seconds_in_turns(programs, (x,), ROUNDS)
    reference = seconds[REFERENCE]
    return {
        way: {
            "temporaries": program.memory_analysis().temp_size_in_bytes,
            "seconds": round(min(seconds[way]), 6),
            # Ratios of the least times over all rounds, since other work on the machine can only add time.
            "time_ratio": round(min(seconds[way]) / min(reference), 3),
        }
        for way, program in programs.items()
    }


def at_equal_memory(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return time and temporaries as ratios to those of an alternative with as many checkpoints."""
    return {
        f"{ours} to {theirs}": {
            "time": round(rows[ours]["seconds"] / rows[theirs]["seconds"], 3),
            "temporaries": round(rows[ours]["temporaries"] / rows[theirs]["temporaries"], 3),
        }
        for ours, theirs in EQUAL_MEMORY
        if theirs in rows
    }


def count_steps(way: str, n: int, s: int) -> int:
    """Return the number of evaluations of the body in one gradient."""
    ran = []

    def body(x: Any) -> Any:
        jax.debug.callback(lambda _: ran.append(1), x)
        return jnp.sin(x)

    # Much larger than the step counter that some loops carry besides it.
    x = jnp.ones(256)
    jax.block_until_ready(compile_gradient(way, body, x, n, s)(x))
    jax.effects_barrier()
    return len(ran)


def main() -> dict[str, Any]:
    counts: dict[str, Any] = {}
    for n, s in COUNTED:
        found = {way: count_steps(way, n, s) for way in WAYS}
        optimum = Mixed.of(n, s, 1, 1).grad_forward_steps
        counts[f"n={n}, checkpoints={s}"] = {"optimum under grad": optimum, **found}
        assert found["remat.scan, checkpoints"] == optimum
        online = OnlineMixed(n, tuple(range(1, s + 2))).forward_steps
        assert found["remat.while_loop, checkpoints"] == online
        listing = ", ".join(f"{way} {steps}" for way, steps in found.items())
        print(f"n={n}, {s} checkpoints: optimum {optimum} steps; {listing}", flush=True)
    times: dict[str, Any] = {}
    equal: dict[str, Any] = {}
    for name, (body, x, sizes) in BODIES.items():
        for n, s in sizes:
            key = f"{name}; n={n}, checkpoints={s}"
            times[key] = measure(body, x, n, s)
            print(key, flush=True)
            for way, row in times[key].items():
                print(
                    f"  {way:32} {row['temporaries'] / MIB:9.2f} MiB {row['seconds']:9.5f} s "
                    f"{row['time_ratio']:6.2f}",
                    flush=True,
                )
            equal[key] = at_equal_memory(times[key])
            for pair, ratios in equal[key].items():
                text = f"time {ratios['time']:.2f}, temporaries {ratios['temporaries']:.2f}"
                print(f"  {pair}: {text}", flush=True)
    found = {"steps": counts, "reference": REFERENCE, "gradients": times}
    return {**found, "equal_memory": equal}
