"""Keras 3 on JAX: its own `train_step`, with batch normalization, dropout, metrics and Adam."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from benchmarks.real.case import Case, checkpoints, layers, replaced


def _state(model: keras.Model) -> tuple:
    return tuple(
        [jax.numpy.array(v.value) for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )


def _compiled(build: Callable[[], keras.Model], x: Any, y: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = build()
    model.compile(
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.optimizer.build(model.trainable_variables)
    model._symbolic_build(data_batch=(x, y))  # the variables of the metrics
    return model


def _case(build: Callable[[], keras.Model], x: Any, y: Any, kinds: tuple[type, ...]) -> Case:
    """Return the train step as `fit` runs it, with the checkpoints that Keras and JAX offer for it.

    `RematScope` fails on layers that take `training`, so some alternatives checkpoint the layers of `kinds`,
    which do not take it, or the loss.
    """
    model = _compiled(build, x, y)
    step = model.train_step
    alternatives = {}
    for kind in kinds:
        alternatives |= layers(step, kind, "call")
    with keras.RematScope(mode="activations"):
        alternatives["RematScope activations"] = _compiled(build, x, y).train_step
    for label, wrap in checkpoints():
        if label != "dots, no batch":
            loss = _loss(model, wrap)
            alternatives[f"whole loss, {label}"] = replaced(
                step, model, "compute_loss_and_updates", lambda _, loss=loss: loss
            )
    return Case(step, (_state(model), (x, y)), alternatives)


def _loss(model: keras.Model, wrap: Callable) -> Callable:
    plain = model.compute_loss_and_updates

    def loss(*args: Any, **kwargs: Any) -> Any:
        training = kwargs.pop("training")
        return wrap(lambda args, kwargs: plain(*args, **kwargs, training=training))(args, kwargs)

    return loss


def cnn() -> Case:
    """Residual convolutions with batch normalization on small images."""

    def build() -> keras.Model:
        layer = keras.layers
        inputs = keras.Input((32, 32, 3))
        h = layer.Conv2D(16, 3, padding="same")(inputs)
        for _ in range(3):
            skip = h
            for _ in range(2):
                h = layer.Conv2D(16, 3, padding="same", use_bias=False)(h)
                h = layer.BatchNormalization()(h)
                h = layer.Activation("relu")(h)
            h = layer.Add()([h, skip])
        h = layer.GlobalAveragePooling2D()(h)
        return keras.Model(inputs, layer.Dense(10)(layer.Dropout(0.1)(h)))

    kinds = keras.layers.Conv2D, keras.layers.Activation
    rng = np.random.default_rng(0)
    return _case(
        build, rng.normal(size=(32, 32, 32, 3)).astype("float32"), np.arange(32) % 10, kinds
    )
