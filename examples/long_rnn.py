"""Train a recurrent network through 10,000 steps without truncating the gradient.

The task depends on the whole sequence: the network must name the first symbol after 10,000 steps of noise. A
gated cell with a forget gate near 1 can remember it, if the gradient reaches the first step. `jax.lax.scan`
keeps the residuals of every step; `remat.scan` keeps about the square root of that, with one argument changed
or none.

    python examples/long_rnn.py                  the memory of four variants, and some training
    python examples/long_rnn.py --steps 1000     a shorter sequence
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import remat
from remat.units import format_bytes

SYMBOLS = 4


def init_params(key: Any, width: int) -> dict[str, Any]:
    keys = jax.random.split(key, 4)
    return {
        "input": jax.random.normal(keys[0], (SYMBOLS, 3 * width)) * 0.5,
        "hidden": jax.random.normal(keys[1], (width, 3 * width)) * width**-0.5 * 0.1,
        # The update gate is nearly closed at first, so that the state is kept for many steps.
        "bias": jnp.concatenate([jnp.full(width, -14.0), jnp.zeros(2 * width)]),
        "output": jax.random.normal(keys[2], (width, SYMBOLS)) * width**-0.5,
    }


def cell(params: dict[str, Any], h: Any, x: Any) -> tuple[Any, None]:
    """Apply a gated recurrent unit; the first symbol is marked and opens the gate."""
    symbol, mark = x
    update_i, reset_i, new_i = jnp.split(params["input"][symbol] + params["bias"], 3, axis=-1)
    update_i = update_i + 18.0 * mark
    update_h, reset_h, new_h = jnp.split(h @ params["hidden"], 3, axis=-1)
    update, reset = jax.nn.sigmoid(update_i + update_h), jax.nn.sigmoid(reset_i + reset_h)
    return h + update * (jnp.tanh(new_i + reset * new_h) - h), None


def loss(params: dict[str, Any], symbols: Any, run: Callable) -> Any:
    """Return the cross-entropy of the first symbol, predicted from the last state.

    Symbols are (steps, batch).
    """
    h = jnp.zeros((symbols.shape[1], params["hidden"].shape[0]))
    marks = jnp.zeros(symbols.shape[0]).at[0].set(1.0)
    h, _ = run(lambda h, x: cell(params, h, x), h, (symbols, marks))
    logits = jax.nn.log_softmax(h @ params["output"])
    return -jnp.mean(jnp.take_along_axis(logits, symbols[0][:, None], axis=1))


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=15)
    options = parser.parse_args(arguments)
    params = init_params(jax.random.key(0), options.width)

    def symbols(key: Any) -> Any:
        return jax.random.randint(key, (options.steps, options.batch), 0, SYMBOLS)

    ways: dict[str, Callable] = {
        "jax.lax.scan": jax.lax.scan,
        "jax.lax.scan, jax.checkpoint on the cell": lambda f, h, xs: jax.lax.scan(
            jax.checkpoint(f, prevent_cse=False), h, xs
        ),
        "remat.scan": remat.scan,
        "remat.scan, checkpoints=50": lambda f, h, xs: remat.scan(f, h, xs, checkpoints=50),
    }
    data = symbols(jax.random.key(1))
    temporaries = {}
    for name, run in ways.items():
        step = jax.jit(lambda p, s, run=run: jax.grad(loss)(p, s, run))
        analysis = step.lower(params, data).compile().memory_analysis()
        temporaries[name] = analysis.temp_size_in_bytes
        print(f"{name:42} temporaries {format_bytes(temporaries[name])}")
    h = jnp.zeros((options.batch, options.width))
    marks = jnp.zeros(options.steps)
    print(remat.scan.explain(lambda h, x: cell(params, h, x), h, (data, marks)))

    @jax.jit
    def train(params: Any, data: Any) -> tuple[Any, Any]:
        value, slope = jax.value_and_grad(loss)(params, data, remat.scan)
        # The norm of a gradient through so many steps varies by orders of magnitude, so use its sign.
        return jax.tree.map(lambda p, g: p - 0.01 * jnp.sign(g), params, slope), value

    history = []
    for i in range(options.iterations):
        params, value = train(params, symbols(jax.random.key(2 + i)))
        history.append(float(value))
    if history:
        print("loss", " ".join(f"{value:.3f}" for value in history))
    return {"temporaries": temporaries, "history": history}


if __name__ == "__main__":
    main()
