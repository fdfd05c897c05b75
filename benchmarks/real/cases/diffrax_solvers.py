"""diffrax: neural differential equations with each adjoint."""

from __future__ import annotations

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.real.case import Case, Wrap, checkpoints, unchanged

MAX_STEPS = 32


def _neural_ode(adjoint: Any, wrap: Wrap = unchanged, *, adaptive: bool = False) -> Any:
    """Return the gradient of a loss of a neural ODE with respect to the weights of its vector field."""
    _, static = eqx.partition(_mlp(), eqx.is_array)

    def loss(weights: Any, y0: jax.Array) -> jax.Array:
        def field(t: Any, y: jax.Array, weights: Any) -> jax.Array:
            return jax.vmap(eqx.combine(weights, static))(y)

        controller = (
            diffrax.PIDController(rtol=1e-2, atol=1e-3) if adaptive else diffrax.ConstantStepSize()
        )
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(wrap(field)),
            diffrax.Tsit5(),
            t0=0.0,
            t1=1.0,
            dt0=1 / 24,
            y0=y0,
            args=weights,
            stepsize_controller=controller,
            adjoint=adjoint,
            max_steps=MAX_STEPS,
        )
        return jnp.mean(solution.ys[-1] ** 2)

    return jax.value_and_grad(loss)


def _mlp() -> eqx.nn.MLP:
    return eqx.nn.MLP(16, 16, 64, 2, activation=jnp.tanh, key=jax.random.key(0))


def _args() -> tuple:
    weights, _ = eqx.partition(_mlp(), eqx.is_array)
    return weights, jax.random.normal(jax.random.key(1), (128, 16))


def _alternatives(**options: Any) -> dict[str, Any]:
    made = {
        f"RecursiveCheckpointAdjoint({n})": _neural_ode(
            diffrax.RecursiveCheckpointAdjoint(checkpoints=n), **options
        )
        for n in (2, 4, 8, 16)
    }
    made["BacksolveAdjoint"] = _neural_ode(diffrax.BacksolveAdjoint(), **options)
    return made


def direct() -> Case:
    """A neural ODE with `DirectAdjoint`, which differentiates through the steps."""
    adjoint = diffrax.DirectAdjoint()
    fields = {f"vector field, {label}": _neural_ode(adjoint, w) for label, w in checkpoints()}
    return Case(_neural_ode(adjoint), _args(), fields | _alternatives())


def recursive() -> Case:
    """The same with the default adjoint, checkpointed recursively, and adaptive steps."""
    step = _neural_ode(diffrax.RecursiveCheckpointAdjoint(), adaptive=True)
    return Case(step, _args(), _alternatives(adaptive=True))


def backsolve() -> Case:
    """The same with the adjoint equation solved backwards in time."""
    step = _neural_ode(diffrax.BacksolveAdjoint())
    wrapped = {
        f"vector field, {label}": _neural_ode(diffrax.BacksolveAdjoint(), w)
        for label, w in checkpoints()
    }
    return Case(step, _args(), wrapped)
