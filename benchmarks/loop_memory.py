"""Compiled temporaries of gradients of `remat.scan` relative to the budget, at several sizes of residuals.

The residuals of a body of k nonlinear functions are k times as large as its state. Nothing is executed.

    python -m benchmarks loop_memory
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from remat.loops.scan import explain, scan

NUMBERS = 100_000
STATE_BYTES = 4 * NUMBERS
BUDGETS = (60, 120)  # in states
CHECKPOINTS = 10
RESIDUALS = (1, 2, 4, 8, 20)
LENGTHS = (300, 3000, 30_000)


def body_of(k: int) -> Callable:
    """Return a body whose residuals are as large as k states, one for each of its sines."""

    def body(x: Any, _: None) -> tuple[Any, None]:
        for i in range(k):
            x = jnp.sin(x * (1 + 0.01 * i))
        return x, None

    return body


def states_of(body: Callable, n: int, **options: Any) -> float:
    """Return the temporaries of the compiled gradient, in states."""
    loss = lambda x: jnp.sum(scan(body, x, length=n, **options)[0])  # noqa: E731
    types = jax.ShapeDtypeStruct((NUMBERS,), jnp.float32)
    analysis = jax.jit(jax.grad(loss)).lower(types).compile().memory_analysis()
    return analysis.temp_size_in_bytes / STATE_BYTES


def main() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for k in RESIDUALS:
        body = body_of(k)
        residual = explain(body, jnp.ones(NUMBERS), length=100, checkpoints=2).residual_bytes
        rows: dict[str, Any] = {"residuals": residual / STATE_BYTES}
        for budget in BUDGETS:
            used = [states_of(body, n, budget=budget * STATE_BYTES) for n in LENGTHS]
            rows[f"budget of {budget} states"] = [round(u / budget, 3) for u in used]
        used = [states_of(body, n, checkpoints=CHECKPOINTS) for n in LENGTHS]
        rows[f"checkpoints={CHECKPOINTS}, states"] = [round(u, 2) for u in used]
        found[f"1:{k}"] = rows
        print(f"1:{k}", rows, flush=True)
    return {"lengths": LENGTHS, "temporaries": found}
