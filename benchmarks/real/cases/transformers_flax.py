"""Flax models of transformers: training losses of language and vision models with random weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import transformers

from benchmarks.real.case import POLICIES, Case, Wrap, layers, unchanged, whole


def lifted(policy: Any) -> Wrap:
    """Return what checkpoints the method of a Linen module, with everything but the first argument fixed."""

    def replace(call: Callable) -> Callable:
        @functools.wraps(call)
        def checkpointed(self: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
            inner = lambda module, x: call(module, x, *args, **kwargs)  # noqa: E731
            return nn.remat(inner, policy=policy)(self, x)

        return checkpointed

    return replace


def _case(loss: Callable, args: tuple, block: type[nn.Module]) -> Case:
    def make(wrap: Wrap) -> Callable:
        return jax.value_and_grad(wrap(loss))

    step = make(unchanged)
    return Case(step, args, layers(step, block, wrap=lifted) | whole(make))


def gpt2() -> Case:
    """GPT-2 with dropout: next-token loss."""
    from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2Block

    config = transformers.GPT2Config(
        vocab_size=512, n_positions=128, n_embd=128, n_layer=4, n_head=4
    )
    model = transformers.FlaxGPT2LMHeadModel(config, seed=0, input_shape=(1, 8))
    ids = jax.random.randint(jax.random.key(1), (8, 128), 0, 512)

    def loss(params: Any, ids: jax.Array, key: jax.Array) -> jax.Array:
        logits = model(ids, params=params, dropout_rng=key, train=True).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()

    return _case(loss, (model.params, ids, jax.random.PRNGKey(2)), FlaxGPT2Block)
