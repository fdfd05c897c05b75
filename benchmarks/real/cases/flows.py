"""Normalizing flows: distrax with Haiku conditioners, and flowjax with scanned layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.real.case import Case, Wrap, checkpoints, scan_bodies, unchanged, whole


def distrax_coupling() -> Case:
    """Masked affine couplings (RealNVP): negative log likelihood of a batch."""
    import distrax
    import haiku as hk

    width, n_layers = 32, 6

    def log_prob(x: jax.Array, wrap: Wrap) -> jax.Array:
        couplings = []
        for i in range(n_layers):
            net = hk.Sequential(
                [hk.nets.MLP([128, 128], activate_final=True), hk.Linear(2 * width)]
            )

            def conditioner(x: jax.Array, net: Any = net) -> jax.Array:
                return jnp.tanh(net(x))

            def affine(parameters: jax.Array) -> Any:
                shift, log_scale = jnp.split(parameters, 2, axis=-1)
                return distrax.ScalarAffine(shift=shift, log_scale=log_scale)

            mask = jnp.arange(width) % 2 == i % 2
            couplings.append(distrax.MaskedCoupling(mask, wrap(conditioner), affine))
        base = distrax.MultivariateNormalDiag(jnp.zeros(width), jnp.ones(width))
        return distrax.Transformed(base, distrax.Inverse(distrax.Chain(couplings))).log_prob(x)

    def make(loss_wrap: Wrap = unchanged, wrap: Wrap = unchanged) -> Callable:
        model = hk.without_apply_rng(hk.transform(lambda x: log_prob(x, wrap)))
        return jax.value_and_grad(loss_wrap(lambda params, x: -model.apply(params, x).mean()))

    x = jax.random.normal(jax.random.key(0), (512, width))
    model = hk.transform(lambda x: log_prob(x, unchanged))
    params = model.init(jax.random.key(1), x)
    alternatives = {}
    for label, wrap in checkpoints():
        policy = wrap.keywords["policy"]
        inner = lambda f, policy=policy: hk.remat(f, policy=policy)  # noqa: E731
        alternatives[f"each conditioner, {label}"] = make(wrap=inner)
    return Case(make(), (params, x), alternatives | whole(make))


def flowjax_autoregressive() -> Case:
    """Masked autoregressive layers in a scan: the maximum likelihood loss."""
    import equinox as eqx
    import paramax
    from flowjax.bijections import jax_transforms
    from flowjax.distributions import Normal
    from flowjax.flows import masked_autoregressive_flow
    from flowjax.train.losses import MaximumLikelihoodLoss

    flow = masked_autoregressive_flow(
        jax.random.key(0), base_dist=Normal(jnp.zeros(16)), flow_layers=6, nn_width=64
    )

    weights, static = eqx.partition(
        flow, eqx.is_inexact_array, is_leaf=lambda x: isinstance(x, paramax.NonTrainable)
    )
    loss = MaximumLikelihoodLoss()
    x = jax.random.normal(jax.random.key(1), (512, 16))

    def make(wrap: Wrap) -> Callable:
        return jax.value_and_grad(wrap(lambda weights, x: loss(weights, static, x)))

    step = make(unchanged)
    # flowjax imports `jax.lax.scan` by name, so the name in its module is replaced.
    scans = scan_bodies(step, owner=jax_transforms)
    return Case(step, (weights, x), scans | whole(make))
