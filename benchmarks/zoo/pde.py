"""The viscous Burgers equation on a periodic square, integrated by Runge-Kutta 4.

The problem is inverse: which initial velocity and viscosity lead to the observed final velocity? There are no
matrix products, and the state is as large as the values that a step computes. The block is one time step.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from benchmarks.zoo.model import Model


@dataclass(frozen=True)
class Config:
    grid: int
    steps: int
    batch: int


SIZES = {
    "tiny": Config(8, 4, 1),
    "cpu": Config(64, 96, 4),
    "real": Config(2048, 1000, 8),
}


def rate(velocity: jax.Array, viscosity: jax.Array, spacing: float) -> jax.Array:
    """Return the time derivative of a velocity (2, batch, grid, grid): advection and diffusion."""
    ahead = [jnp.roll(velocity, -1, axis) for axis in (2, 3)]
    behind = [jnp.roll(velocity, 1, axis) for axis in (2, 3)]
    along_x, along_y = ((a - b) / (2 * spacing) for a, b in zip(ahead, behind))
    diffused = (sum(ahead) + sum(behind) - 4 * velocity) / spacing**2
    return viscosity * diffused - velocity[0] * along_x - velocity[1] * along_y


def advance(config: Config):
    spacing = 1 / config.grid
    interval = 0.2 * spacing

    def apply(velocity, viscosity):
        def at(v):
            return rate(v, viscosity, spacing)

        a = at(velocity)
        b = at(velocity + interval / 2 * a)
        c = at(velocity + interval / 2 * b)
        d = at(velocity + interval * c)
        return velocity + interval / 6 * (a + 2 * b + 2 * c + d)

    return apply


def model(size: str) -> Model:
    config = SIZES[size]

    def build(wrap):
        step = wrap(advance(config))

        def loss(params, observed):
            # The initial velocities of the batch evolve independently, with one viscosity.
            viscosity = jax.nn.softplus(params["viscosity"])
            final, _ = jax.lax.scan(
                lambda v, _: (step(v, viscosity), None),
                params["velocity"],
                length=config.steps,
            )
            return jnp.mean((final - observed) ** 2)

        return loss

    def smooth(key):
        """Return a random sum of a few long waves."""
        x = 2 * jnp.pi * jnp.arange(config.grid) / config.grid
        waves = jnp.stack([jnp.sin(x), jnp.cos(x), jnp.sin(2 * x), jnp.cos(2 * x)])
        weights = jax.random.normal(key, (2, config.batch, 4, 4)) / 4
        return jnp.einsum("dbij,ix,jy->dbxy", weights, waves, waves)

    def init(key):
        return {"velocity": smooth(key), "viscosity": jnp.full((), -6.0)}

    return Model(f"pde-{size}", build, init, smooth)
