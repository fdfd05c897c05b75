"""Transformer layers whose MLP is a mixture of experts, two of them for each token.

A product with a one-hot tensor dispatches tokens to experts, each up to its capacity, as in GShard (Lepikhin
et al., 2021). A layer has two results: the activations, and the loss that balances the experts' load.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from benchmarks.zoo.layers import attention, cross_entropy, dense, normal, normals, rms_norm, tokens
from benchmarks.zoo.model import Model


@dataclass(frozen=True)
class Config:
    layers: int
    width: int
    heads: int
    hidden: int
    experts: int
    vocabulary: int
    batch: int
    length: int
    dtype: str = "float32"

    @property
    def capacity(self) -> int:
        """Return the most tokens of one sequence that an expert takes: 1.25 times its even share."""
        return max(1, 2 * self.length * 5 // (4 * self.experts))


SIZES = {
    "tiny": Config(2, 8, 2, 16, 4, 16, 2, 8),
    "cpu": Config(6, 64, 4, 192, 8, 256, 16, 128),
    "gpu": Config(8, 1024, 16, 2816, 8, 32000, 16, 512, "bfloat16"),
    "real": Config(32, 4096, 32, 14336, 8, 32000, 8, 4096, "bfloat16"),  # Mixtral 8 × 7 B
}


def route(config: Config, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return weights (batch, length, expert, slot) and balancing loss for scores (batch, length, expert)."""
    probabilities = jax.nn.softmax(scores.astype(jnp.float32))
    weights, experts = jax.lax.top_k(probabilities, 2)
    chosen = jax.nn.one_hot(experts, config.experts, dtype=int)  # batch, length, choice, expert
    # First choices of all tokens take slots before second choices.
    queue = chosen.swapaxes(1, 2).reshape(config.batch, -1, config.experts)
    slot = jnp.sum((jnp.cumsum(queue, 1) - queue) * queue, -1)
    slot = slot.reshape(config.batch, 2, config.length).swapaxes(1, 2)
    places = jax.nn.one_hot(slot, config.capacity)  # zero beyond the capacity
    load = jnp.mean(chosen[:, :, 0], (0, 1), probabilities.dtype) * jnp.mean(probabilities, (0, 1))
    weights = weights / jnp.sum(weights, -1, keepdims=True)
    combined = jnp.einsum("blke,blkc,blk->blec", chosen.astype(places.dtype), places, weights)
    return combined, config.experts * jnp.sum(load)


def experts(config: Config, params, x):
    combined, balance = route(config, dense(x, params["router"]))
    combined = combined.astype(x.dtype)
    given = jnp.einsum("blec,bld->becd", (combined > 0).astype(x.dtype), x)
    h = jax.nn.silu(jnp.einsum("becd,edf->becf", given, params["gate"].astype(x.dtype)))
    h = h * jnp.einsum("becd,edf->becf", given, params["up"].astype(x.dtype))
    h = jnp.einsum("becf,efd->becd", h, params["down"].astype(x.dtype))
    return jnp.einsum("blec,becd->bld", combined, h), balance


def block(config: Config):
    def apply(params, x):
        batch, length, _ = x.shape
        qkv = dense(rms_norm(x, params["scale_1"]), params["qkv"])
        q, k, v = jnp.unstack(qkv.reshape(batch, length, 3, config.heads, -1), axis=2)
        x = x + dense(attention(q, k, v, causal=True), params["out"])
        y, balance = experts(config, params, rms_norm(x, params["scale_2"]))
        return x + y, balance

    return apply


def model(size: str) -> Model:
    config = SIZES[size]
    width = config.width

    def build(wrap):
        layer = wrap(block(config))

        def loss(params, batch):
            inputs, labels = batch[:, :-1], batch[:, 1:]
            x = params["tokens"][inputs].astype(config.dtype)
            balances = []
            for weights in params["layers"]:
                x, balance = layer(weights, x)
                balances.append(balance)
            logits = dense(rms_norm(x, params["scale"]), params["logits"])
            return cross_entropy(logits, labels) + 0.01 * sum(balances)

        return loss

    def init_layer(key):
        shapes = {
            "qkv": (width, 3 * width),
            "out": (width, width),
            "router": (width, config.experts),
            "gate": (config.experts, width, config.hidden),
            "up": (config.experts, width, config.hidden),
            "down": (config.experts, config.hidden, width),
        }
        return normals(key, shapes) | {"scale_1": jnp.ones(width), "scale_2": jnp.ones(width)}

    def init(key):
        embedding, layers, logits = jax.random.split(key, 3)
        return {
            "tokens": normal(embedding, config.vocabulary, width, fan_in=width),
            "layers": [init_layer(k) for k in jax.random.split(layers, config.layers)],
            "scale": jnp.ones(width),
            "logits": normal(logits, width, config.vocabulary),
        }

    def batch(key):
        return tokens(key, (config.batch, config.length + 1), config.vocabulary)

    return Model(f"moe-{size}", build, init, batch)
