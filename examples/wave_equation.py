"""Source inversion with the adjoint of a 2-D acoustic wave simulation, in little memory.

A point source with an unknown signature w(t) excites waves in a medium with two velocities; receivers on a
line record them. The gradient of the misfit runs the simulation in reverse. The states of 20,000 steps on a
512×512 grid take 39 GiB. For a gradient with respect to the medium, `remat.scan(checkpoints=200)` would keep
states and residuals of steps in the memory of 200 states, and recompute the rest. The waves are linear in
w(t), so for a gradient with respect to w(t) it keeps nothing and runs no step twice.

    python examples/wave_equation.py                                   a few minutes, under 2 GiB
    python examples/wave_equation.py --grid 64 --steps 400 --iterations 20    the inversion itself
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import remat
from remat.units import format_bytes


class Experiment(NamedTuple):
    """The positions of the source and the receivers, and the velocities of the medium."""

    courant: Any  # (grid, grid): (velocity · dt / dx)², at most 1/2 for stability
    damping: Any  # (grid, grid): 1 inside, less in a sponge at the border
    source: tuple[int, int]
    receivers: Any  # (n,) columns of the row on which the receivers lie
    row: int


def make_experiment(grid: int) -> Experiment:
    y = jnp.arange(grid)[:, None]
    depth = jnp.minimum(jnp.minimum(y, y.T), jnp.minimum(grid - 1 - y, grid - 1 - y.T))
    sponge = max(grid // 16, 2)
    courant = jnp.where(y < grid // 2, 0.2, 0.4) * jnp.ones((1, grid))
    damping = 1.0 - 0.1 * jnp.clip(1.0 - depth / sponge, 0.0, 1.0) ** 2
    receivers = jnp.arange(sponge, grid - sponge, max(grid // 16, 1))
    return Experiment(courant, damping, (grid // 4, grid // 2), receivers, sponge + 1)


def step(experiment: Experiment, fields: tuple[Any, Any], amplitude: Any) -> tuple[Any, Any]:
    """Take a leapfrog step of u_tt = c² Δu + source; return the fields and the receivers' samples."""
    before, now = fields
    padded = jnp.pad(now, 1)
    laplacian = (
        padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:] - 4 * now
    )
    after = 2 * now - before + experiment.courant * laplacian
    after = (experiment.damping * after).at[experiment.source].add(amplitude)
    return (experiment.damping * now, after), after[experiment.row, experiment.receivers]


def wavelet(steps: int) -> Any:
    """Return a Ricker wavelet, the signature to be found."""
    t = (jnp.arange(steps) - 60.0) / 15.0
    return (1 - 2 * t**2) * jnp.exp(-(t**2))


def record(experiment: Experiment, signature: Any, checkpoints: int | None) -> Any:
    """Run the simulation; return the recording (steps, receivers)."""
    quiet = jnp.zeros_like(experiment.courant)
    run = lambda fields, amplitude: step(experiment, fields, amplitude)  # noqa: E731
    return remat.scan(run, (quiet, quiet), signature, checkpoints=checkpoints)[1]


def misfit(signature: Any, experiment: Experiment, observed: Any, checkpoints: int | None) -> Any:
    return 0.5 * jnp.sum((record(experiment, signature, checkpoints) - observed) ** 2)


def invert(
    experiment: Experiment, observed: Any, steps: int, checkpoints: int | None, iterations: int
) -> tuple[Any, list[float]]:
    """Solve the linear least-squares problem for the signature by conjugate gradients."""
    gradient = jax.jit(lambda w, data: jax.grad(misfit)(w, experiment, data, checkpoints))
    silence = jnp.zeros_like(observed)
    signature = jnp.zeros(steps)
    residual = -gradient(signature, observed)
    direction, history = residual, [float(jnp.sum(observed**2) / 2)]
    for _ in range(iterations):
        curvature = gradient(direction, silence)  # AᵀA d, since the misfit is quadratic
        length = jnp.vdot(residual, residual) / jnp.vdot(direction, curvature)
        signature = signature + length * direction
        new = residual - length * curvature
        direction = new + jnp.vdot(new, new) / jnp.vdot(residual, residual) * direction
        residual = new
        history.append(float(misfit(signature, experiment, observed, checkpoints)))
    return signature, history


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--checkpoints", type=int, default=200)
    parser.add_argument("--iterations", type=int, default=0, help="of the inversion")
    options = parser.parse_args(arguments)
    experiment = make_experiment(options.grid)
    truth = wavelet(options.steps)
    quiet = jnp.zeros_like(experiment.courant)
    run = lambda fields, amplitude: step(experiment, fields, amplitude)  # noqa: E731
    print(remat.scan.explain(run, (quiet, quiet), truth, checkpoints=options.checkpoints))
    print(f"all states: {format_bytes(options.steps * 2 * quiet.nbytes)}")
    observed = jax.jit(lambda w: record(experiment, w, None))(truth)
    if options.iterations:
        found, history = invert(
            experiment, observed, options.steps, options.checkpoints, options.iterations
        )
        error = float(jnp.linalg.norm(found - truth) / jnp.linalg.norm(truth))
        print(f"misfit {history[0]:.3g} -> {history[-1]:.3g}; error of the signature {error:.1%}")
        return {"first": history[0], "last": history[-1], "error": error}
    guess = 0.5 * truth
    gradient = jax.jit(
        lambda w: jax.value_and_grad(misfit)(w, experiment, observed, options.checkpoints)
    )
    compiled = gradient.lower(guess).compile()
    analysis = compiled.memory_analysis()
    start = time.perf_counter()
    value, slope = jax.block_until_ready(compiled(guess))
    seconds = time.perf_counter() - start
    # The misfit is quadratic and zero at the true signature, so its slope along the line to it is known.
    expected, along = -4 * float(value), float(jnp.vdot(slope, truth))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"gradient in {seconds:.0f} s; slope along the truth {along:.6g}, exact {expected:.6g}")
    print(
        f"temporaries {format_bytes(analysis.temp_size_in_bytes)}, "
        f"peak of the process {format_bytes(peak)}"
    )
    return {
        "seconds": seconds,
        "slope": along,
        "expected": expected,
        "temporaries": analysis.temp_size_in_bytes,
        "peak": peak,
    }


if __name__ == "__main__":
    main()
