"""A spiking network: leaky integrate-and-fire neurons, one scan over time.

A spike is a step function, whose derivative `custom_jvp` replaces by a smooth surrogate (SuperSpike: Zenke &
Ganguli, 2018). The block is one time step of all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from benchmarks.zoo.layers import cross_entropy, dense, normal
from benchmarks.zoo.model import Model


@dataclass(frozen=True)
class Config:
    layers: int
    width: int
    inputs: int
    classes: int
    batch: int
    steps: int
    decay: float = 0.9
    dtype: str = "float32"


SIZES = {
    "tiny": Config(2, 8, 8, 4, 2, 8),
    "cpu": Config(3, 256, 64, 20, 96, 320),
    "real": Config(4, 4096, 700, 35, 256, 1000, dtype="bfloat16"),
}


@jax.custom_jvp
def spike(potential: jax.Array) -> jax.Array:
    """Return 1 where the threshold is exceeded, 0 elsewhere."""
    return (potential > 0).astype(potential.dtype)


@spike.defjvp
def _(primals, tangents):
    (potential,), (tangent,) = primals, tangents
    return spike(potential), tangent / (1 + 10 * jnp.abs(potential)) ** 2


def advance(config: Config):
    def apply(params, state, spikes):
        """Take one step: leak, integrate the spikes of the layer below, fire, reset."""
        potentials, readout = state
        new = []
        for weights, potential in zip(params["layers"], potentials):
            potential = config.decay * potential + dense(spikes, weights)
            spikes = spike(potential - 1)
            new.append(potential - spikes)
        readout = config.decay * readout + dense(spikes, params["readout"])
        return (new, readout), readout

    return apply


def model(size: str) -> Model:
    config = SIZES[size]

    def build(wrap):
        step = wrap(advance(config))

        def loss(params, batch):
            rest = [jnp.zeros((config.batch, config.width), config.dtype)] * config.layers
            state = rest, jnp.zeros((config.batch, config.classes), config.dtype)
            _, readouts = jax.lax.scan(
                lambda state, spikes: step(params, state, spikes.astype(config.dtype)),
                state,
                batch["spikes"],
            )
            return cross_entropy(jnp.mean(readouts.astype(jnp.float32), 0), batch["labels"])

        return loss

    def init(key):
        *layers, readout = jax.random.split(key, config.layers + 1)
        widths = [config.inputs] + [config.width] * config.layers
        return {
            # The factor 3 makes the weights large enough that neurons fire.
            "layers": [3 * normal(k, *shape) for k, *shape in zip(layers, widths, widths[1:])],
            "readout": normal(readout, config.width, config.classes),
        }

    def batch(key):
        spikes, labels = jax.random.split(key)
        shape = (config.steps, config.batch, config.inputs)
        return {
            "spikes": jax.random.bernoulli(spikes, 0.1, shape),
            "labels": jax.random.randint(labels, (config.batch,), 0, config.classes),
        }

    return Model(f"spiking-{size}", build, init, batch)
