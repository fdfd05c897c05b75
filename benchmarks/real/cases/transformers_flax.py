"""Flax models of transformers: training losses of language and vision models with random weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import optax
import transformers

from benchmarks.real.case import Case, Wrap, layers, unchanged, whole


def lifted(policy: Any) -> Wrap:
    """Return a checkpoint for the method of a Linen module; all arguments but the first are closed over."""

    def replace(call: Callable) -> Callable:
        @functools.wraps(call)
        def checkpointed(self: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
            inner = lambda module, x: call(module, x, *args, **kwargs)  # noqa: E731
            return nn.remat(inner, policy=policy)(self, x)

        return checkpointed

    return replace


def _case(loss: Callable, args: tuple, block: type[nn.Module], own: Callable | None = None) -> Case:
    """Return the gradient of a loss as a case; `own` is the loss with the package's checkpoint option."""

    def make(wrap: Wrap) -> Callable:
        return jax.value_and_grad(wrap(loss))

    step = make(unchanged)
    alternatives = layers(step, block, wrap=lifted) | whole(make)
    if own is not None:
        alternatives["gradient_checkpointing=True"] = jax.value_and_grad(own)
    return Case(step, args, alternatives)


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

    return _case(loss, (model.params, ids, jax.random.key(2, impl="rbg")), FlaxGPT2Block)


def bert() -> Case:
    """BERT without dropout: the loss of a masked language model; the package has a checkpoint option."""
    from transformers.models.bert.modeling_flax_bert import FlaxBertLayer

    config = transformers.BertConfig(
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=128,
    )
    ids = jax.random.randint(jax.random.key(1), (8, 128), 0, 512)

    def loss_of(**options: bool) -> tuple[Callable, Any]:
        model = transformers.FlaxBertForMaskedLM(config, input_shape=(1, 8), seed=0, **options)

        def loss(params: Any, ids: jax.Array) -> jax.Array:
            logits = model(ids, params=params).logits
            return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()

        return loss, model.params

    (loss, params), (own, _) = loss_of(), loss_of(gradient_checkpointing=True)
    return _case(loss, (params, ids), FlaxBertLayer, own)
