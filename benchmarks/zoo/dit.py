"""A diffusion transformer in Equinox, whose blocks are modulated by the diffusion time and the class.

All blocks use the conditioning, so it stays live across all of them. Peebles & Xie, 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.zoo.layers import normal, standardize
from benchmarks.zoo.model import Model


@dataclass(frozen=True)
class Config:
    layers: int
    width: int
    heads: int
    patch: int
    channels: int
    classes: int
    batch: int
    image: int
    dtype: str = "float32"

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2


SIZES = {
    "tiny": Config(2, 8, 2, 2, 4, 4, 2, 4),
    "cpu": Config(8, 128, 4, 2, 4, 16, 16, 16),
    "real": Config(28, 1152, 16, 2, 4, 1000, 256, 32, "bfloat16"),  # DiT-XL/2
}


def modulated(x, shift, scale):
    """Normalize (tokens, width), then shift and scale by the conditioning."""
    return standardize(x).astype(x.dtype) * (1 + scale) + shift


class Block(eqx.Module):
    condition: eqx.nn.Linear
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, config: Config, key: jax.Array):
        width = config.width
        condition, attention, up, down = jax.random.split(key, 4)
        self.condition = eqx.nn.Linear(width, 6 * width, key=condition)
        self.attention = eqx.nn.MultiheadAttention(config.heads, width, key=attention)
        self.up = eqx.nn.Linear(width, 4 * width, key=up)
        self.down = eqx.nn.Linear(4 * width, width, key=down)

    def __call__(self, x, c):
        """Apply the block to one image, (tokens, width), conditioned on (width,)."""
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = jnp.split(
            self.condition(jax.nn.silu(c)), 6
        )
        h = modulated(x, shift_1, scale_1)
        x = x + gate_1 * self.attention(h, h, h)
        h = jax.nn.gelu(jax.vmap(self.up)(modulated(x, shift_2, scale_2)))
        return x + gate_2 * jax.vmap(self.down)(h)


class Ends(eqx.Module):
    """The layers before and after the blocks."""

    patches: eqx.nn.Linear
    positions: jax.Array
    classes: jax.Array
    times: eqx.nn.MLP
    output: eqx.nn.Linear

    def __init__(self, config: Config, key: jax.Array):
        width, pixels = config.width, config.patch**2 * config.channels
        patches, positions, classes, times, output = jax.random.split(key, 5)
        self.patches = eqx.nn.Linear(pixels, width, key=patches)
        self.positions = normal(positions, config.tokens, width, fan_in=width)
        self.classes = normal(classes, config.classes, width, fan_in=width)
        self.times = eqx.nn.MLP(width, width, width, 1, jax.nn.silu, key=times)
        self.output = eqx.nn.Linear(width, pixels, key=output)

    def condition(self, time, label):
        """Embed a time in [0, 1], by sines of many periods, and a class."""
        rates = 1000 * 10_000.0 ** -jnp.linspace(0, 1, self.positions.shape[1] // 2)
        waves = jnp.concatenate([jnp.sin(time * rates), jnp.cos(time * rates)])
        return self.times(waves.astype(self.positions.dtype)) + self.classes[label]


def _is_array(leaf) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def model(size: str) -> Model:
    config = SIZES[size]
    patched = (config.batch, config.tokens, config.patch**2 * config.channels)

    def modules(key):
        ends, *blocks = jax.random.split(key, config.layers + 1)
        return Ends(config, ends), [Block(config, k) for k in blocks]

    # Only arrays are parameters; other leaves of the modules, such as activation functions, are static.
    shapes = eqx.filter_eval_shape(modules, jax.random.key(0))
    _, (static_ends, static_blocks) = eqx.partition(shapes, _is_array)

    def build(wrap):
        @wrap
        def layer(params, x, c):
            return jax.vmap(eqx.combine(params, static_blocks[0]))(x, c)

        def loss(params, batch):
            params = jax.tree.map(lambda p: p.astype(config.dtype), params)
            ends = eqx.combine(params[0], static_ends)
            signal, noise, time = batch["patches"], batch["noise"], batch["time"]
            t = time[:, None, None]
            noisy = jnp.sqrt(1 - t * t) * signal + t * noise
            c = jax.vmap(ends.condition)(time, batch["labels"])
            x = jax.vmap(jax.vmap(ends.patches))(noisy.astype(config.dtype)) + ends.positions
            for weights in params[1]:
                x = layer(weights, x, c)
            guess = jax.vmap(jax.vmap(ends.output))(standardize(x).astype(x.dtype))
            return jnp.mean((guess.astype(jnp.float32) - noise) ** 2)

        return loss

    def init(key):
        return eqx.filter(modules(key), _is_array)

    def batch(key):
        signal, noise, time, labels = jax.random.split(key, 4)
        return {
            "patches": jax.random.normal(signal, patched),
            "noise": jax.random.normal(noise, patched),
            "time": jax.random.uniform(time, (config.batch,)),
            "labels": jax.random.randint(labels, (config.batch,), 0, config.classes),
        }

    return Model(f"dit-{size}", build, init, batch)
