"""Probabilistic models: dynamax, numpyro and GPJax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.real.case import Case, Wrap, scan_bodies, unchanged, whole


def dynamax_kalman() -> Case:
    """Gradient of the marginal likelihood of a linear Gaussian model: a batch of Kalman filters."""
    from dynamax.linear_gaussian_ssm import LinearGaussianSSM, lgssm_filter

    ssm = LinearGaussianSSM(state_dim=16, emission_dim=4)
    params, _ = ssm.initialize(jax.random.key(0))
    emissions = jax.random.normal(jax.random.key(1), (64, 60, 4))

    def loss(params: Any, emissions: jax.Array) -> jax.Array:
        return -jax.vmap(lambda y: lgssm_filter(params, y).marginal_loglik)(emissions).mean()

    def make(wrap: Wrap) -> Callable:
        return jax.value_and_grad(wrap(loss))

    step = make(unchanged)
    return Case(step, (params, emissions), scan_bodies(step, group=10) | whole(make))


def numpyro_svi() -> Case:
    """A step of stochastic variational inference of a model with a scanned time series."""
    import numpyro
    import numpyro.distributions as dist
    from numpyro.contrib.control_flow import scan
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def model(y: jax.Array) -> None:
        mixing = numpyro.sample("mixing", dist.Normal(0, 0.1).expand([32, 32]).to_event(2))
        drift = numpyro.sample("drift", dist.Normal(0, 1).expand([32]).to_event(1))
        scale = numpyro.sample("scale", dist.LogNormal(0, 0.1))

        def advance(state: jax.Array, y: jax.Array) -> Any:
            state = jnp.tanh(state @ mixing + drift) + 0.5 * state
            numpyro.sample("y", dist.Normal(state, scale).to_event(2), obs=y)
            return state, None

        scan(advance, jnp.zeros(y.shape[1:]), y)

    y = jax.random.normal(jax.random.key(0), (50, 128, 32))
    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(1e-3), Trace_ELBO())
    state = svi.init(jax.random.key(1), y)
    step = lambda state, y: svi.update(state, y)  # noqa: E731
    return Case(step, (state, y), scan_bodies(step, group=10))


def gpjax_likelihood() -> Case:
    """Gradient of the exact marginal likelihood of a Gaussian process: a Cholesky factorization."""
    import gpjax as gpx
    from flax import nnx

    x = jnp.linspace(-3, 3, 300)[:, None]
    data = gpx.Dataset(X=x, y=jnp.sin(3 * x))
    prior = gpx.gps.Prior(
        mean_function=gpx.mean_functions.Zero(),
        kernel=gpx.kernels.Matern52() + gpx.kernels.Periodic() * gpx.kernels.RBF(),
    )
    posterior = prior * gpx.likelihoods.Gaussian(num_datapoints=300)
    graph, weights, rest = nnx.split(posterior, gpx.parameters.Parameter, ...)

    def make(wrap: Wrap) -> Callable:
        def loss(weights: Any, x: jax.Array, y: jax.Array) -> jax.Array:
            posterior = nnx.merge(graph, weights, rest)
            return -gpx.objectives.conjugate_mll(posterior, gpx.Dataset(X=x, y=y))

        return jax.value_and_grad(wrap(loss))

    return Case(make(unchanged), (weights, data.X, data.y), whole(make))
