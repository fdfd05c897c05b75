"""Gradient of a wave simulation with respect to its medium: checkpoints with and without residuals.

The simulation is that of `examples/wave_equation.py`. All loops have the same memory. The mixed schedule
keeps states and residuals; the binomial schedule keeps only states (`store="host"` selects it; on a CPU the
host's memory is the device's). A leapfrog step can be inverted, and then no states are kept. `lax.scan` with
`jax.checkpoint` of the body keeps every state. The alternatives take turns; times are ratios to the binomial
schedule.

    python -m benchmarks waves
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.timing import seconds_in_turns
from remat.loops.scan import explain, scan
from remat.units import format_bytes

GRID = 128
STEPS = 500
CHECKPOINTS = (10, 30, 100)
ROUNDS = 15
REFERENCE = "states alone"


def other_side(medium: Any, side: Any, now: Any, amplitude: Any) -> Any:
    """Return the field after `now` from the one before it, or the reverse: the equation is symmetric."""
    padded = jnp.pad(now, 1)
    laplacian = (
        padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:] - 4 * now
    )
    other = 2 * now - side + medium * laplacian
    return other.at[GRID // 4, GRID // 2].add(amplitude)


def step(medium: Any, fields: tuple[Any, Any], amplitude: Any) -> tuple[Any, Any]:
    """Take a leapfrog step of u_tt = c² Δu + source; return the fields and a row of samples."""
    before, now = fields
    after = other_side(medium, before, now, amplitude)
    return (now, after), after[GRID // 8]


def step_back(medium: Any, fields: tuple[Any, Any], amplitude: Any) -> tuple[Any, Any]:
    now, after = fields
    return other_side(medium, after, now, amplitude), now


def loss(run: Callable) -> Callable:
    quiet = jnp.zeros((GRID, GRID))
    t = (jnp.arange(STEPS) - 60.0) / 15.0
    signature = (1 - 2 * t**2) * jnp.exp(-(t**2))

    def misfit(medium: Any) -> Any:
        body = lambda fields, amplitude: step(medium, fields, amplitude)  # noqa: E731
        back = lambda fields, amplitude: step_back(medium, fields, amplitude)  # noqa: E731
        return 0.5 * jnp.sum(run(body, back, (quiet, quiet), signature)[1] ** 2)

    return misfit


def by_remat(**options: Any) -> Callable:
    return lambda body, back, *args: scan(body, *args, **options)


def by_inverse(body: Callable, back: Callable, fields: Any, signature: Any) -> Any:
    return scan(body, fields, signature, inverse=back)


def by_lax(body: Callable, back: Callable, fields: Any, signature: Any) -> Any:
    return jax.lax.scan(body, fields, signature)


def by_lax_each_step(body: Callable, back: Callable, fields: Any, signature: Any) -> Any:
    return jax.lax.scan(jax.checkpoint(body, prevent_cse=False), fields, signature)


def measure(checkpoints: int) -> dict[str, dict[str, float]]:
    ways: dict[str, Callable] = {
        "states and residuals": by_remat(checkpoints=checkpoints),
        REFERENCE: by_remat(checkpoints=checkpoints, store="host"),
        "inverse": by_inverse,
        "lax.scan, each step": by_lax_each_step,
        "lax.scan": by_lax,
    }
    medium = jnp.where(jnp.arange(GRID)[:, None] < GRID // 2, 0.2, 0.4) * jnp.ones((1, GRID))
    programs = {
        way: jax.jit(jax.grad(loss(run))).lower(medium).compile() for way, run in ways.items()
    }
    seconds = seconds_in_turns(programs, (medium,), ROUNDS)
    return {
        way: {
            "temporaries_mib": program.memory_analysis().temp_size_in_bytes / 2**20,
            "seconds": min(seconds[way]),
            "time_ratio": statistics.median(
                a / b for a, b in zip(seconds[way], seconds[REFERENCE])
            ),
        }
        for way, program in programs.items()
    }


def main() -> dict[str, Any]:
    found: dict[str, Any] = {}
    quiet = jnp.zeros((GRID, GRID))
    for checkpoints in CHECKPOINTS:
        body = lambda fields, amplitude: step(quiet, fields, amplitude)  # noqa: E731
        choice = explain(body, (quiet, quiet), jnp.zeros(STEPS), checkpoints=checkpoints)
        print(f"{choice.schedule}; keeps {format_bytes(choice.kept_bytes)}", flush=True)
        found[f"checkpoints={checkpoints}"] = rows = measure(checkpoints)
        for way, row in rows.items():
            print(
                f"  {way:22} {row['temporaries_mib']:8.2f} MiB {row['seconds']:8.4f} s "
                f"{row['time_ratio']:6.2f}",
                flush=True,
            )
    return {"reference": REFERENCE, "grid": GRID, "steps": STEPS, "gradients": found}
