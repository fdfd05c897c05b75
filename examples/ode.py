"""Fit an ordinary differential equation through a fixed-step Runge-Kutta solver.

The solver is a `fori_loop` whose number of steps is an argument of the compiled program, so one program is
enough for all of them. `jax.lax.fori_loop` cannot be reverse-differentiated with such a bound. Predators and
prey (Lotka-Volterra) are observed at one time; the fit starts at a guess of their four rates.

    python examples/ode.py                    20,000 steps
    python examples/ode.py --steps 500        fewer
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp

import remat
from remat.units import format_bytes


def lotka_volterra(rates: Any, state: Any) -> Any:
    prey, predators = state
    return jnp.stack(
        [
            rates[0] * prey - rates[1] * prey * predators,
            rates[2] * prey * predators - rates[3] * predators,
        ]
    )


def solve(rates: Any, first: Any, duration: Any, steps: Any, checkpoints: int = 32) -> Any:
    """Return the state after `duration`, by `steps` steps of the classical method of order 4."""
    h = duration / steps

    def step(_: Any, y: Any) -> Any:
        k1 = lotka_volterra(rates, y)
        k2 = lotka_volterra(rates, y + h / 2 * k1)
        k3 = lotka_volterra(rates, y + h / 2 * k2)
        k4 = lotka_volterra(rates, y + h * k3)
        return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    return remat.fori_loop(0, steps, step, first, checkpoints=checkpoints)


def misfit(rates: Any, firsts: Any, observed: Any, steps: Any) -> Any:
    """Return the mean squared error over several initial states; `jax.vmap` batches the solver."""
    ends = jax.vmap(lambda first: solve(rates, first, 3.0, steps))(firsts)
    return jnp.mean((ends - observed) ** 2)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--iterations", type=int, default=6)
    options = parser.parse_args(arguments)
    truth = jnp.array([1.1, 0.4, 0.1, 0.4])
    firsts = jnp.array([[10.0, 5.0], [6.0, 2.0], [3.0, 8.0], [12.0, 1.0]])
    rates = jnp.array([1.0, 0.45, 0.12, 0.45])
    observed = jax.vmap(lambda first: solve(truth, first, 3.0, options.steps))(firsts)

    @jax.jit
    def gauss_newton(rates: Any, steps: Any) -> tuple[Any, Any]:
        """Take one Gauss-Newton step, with the Jacobian by reverse mode."""

        def residuals(rates: Any) -> Any:
            ends = jax.vmap(lambda first: solve(rates, first, 3.0, steps))(firsts)
            return (ends - observed).ravel()

        jacobian, r = jax.jacrev(residuals)(rates), residuals(rates)
        return rates - jnp.linalg.lstsq(jacobian, r)[0], jnp.mean(r**2)

    compiled = gauss_newton.lower(rates, options.steps).compile()
    print(f"temporaries {format_bytes(compiled.memory_analysis().temp_size_in_bytes)}")
    # One program is compiled for any number of steps; a coarse integration gives a first estimate.
    history = []
    for steps in [options.steps // 10, *[options.steps] * options.iterations]:
        rates, value = compiled(rates, steps)
        history.append(float(value))
        print(f"{steps:6} steps: misfit {value:.3e}, rates {rates}")
    return {"history": history, "rates": rates, "truth": truth}


if __name__ == "__main__":
    main()
