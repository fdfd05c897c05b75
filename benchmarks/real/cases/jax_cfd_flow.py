"""jax-cfd: the gradient through a simulated flow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax_cfd.base as cfd
import numpy as np

from benchmarks.real.case import Case, Wrap, checkpoints, unchanged, whole

STEPS, SIZE = 40, 64


def decaying_turbulence() -> Case:
    """Sensitivity of the final energy of a two-dimensional flow to the initial velocity."""
    grid = cfd.grids.Grid((SIZE, SIZE), domain=((0, 2 * np.pi), (0, 2 * np.pi)))
    v0 = cfd.initial_conditions.filtered_velocity_field(
        jax.random.PRNGKey(0), grid, maximum_velocity=3.0, peak_wavenumber=4
    )
    advance = cfd.equations.semi_implicit_navier_stokes(
        density=1.0, viscosity=1e-3, dt=5e-3, grid=grid
    )

    def gradient(step: Any, loss_wrap: Wrap = unchanged) -> Any:
        def loss(v0: Any) -> jax.Array:
            final = cfd.funcutils.repeated(step, STEPS)(v0)
            return sum(jnp.mean(u.data**2) for u in final)

        return jax.value_and_grad(loss_wrap(loss))

    inner = cfd.funcutils.repeated(jax.checkpoint(advance), 8)
    alternatives = {f"each step, {label}": gradient(wrap(advance)) for label, wrap in checkpoints()}
    alternatives |= whole(lambda wrap: gradient(advance, wrap))

    def grouped(v0: Any) -> jax.Array:
        final = cfd.funcutils.repeated(jax.checkpoint(inner), STEPS // 8)(v0)
        return sum(jnp.mean(u.data**2) for u in final)

    alternatives["groups of 8 steps"] = jax.value_and_grad(grouped)
    return Case(gradient(advance), (v0,), alternatives)
