"""Train a small language model in Flax NNX within a memory budget, with checkpoints that resume.

The text is the source of Python's standard library. `remat.nnx.fit` replaces `nnx.jit` around the training
step; the model itself has no annotations.

    python examples/flax_lm.py                     200 steps
    python examples/flax_lm.py --save state.npz    resume where the last run stopped
    remat explain examples/flax_lm.py:problem      what the step keeps in memory, and why
"""

from __future__ import annotations

import argparse
import pathlib
import sysconfig
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import remat.nnx
from remat.units import format_bytes

CONTEXT, BATCH = 128, 8


class Block(nnx.Module):
    """Attention and a multilayer perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.before_attention = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.before_mlp = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.before_attention(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.before_mlp(x))))


class LanguageModel(nnx.Module):
    """A decoder on bytes."""

    def __init__(self, layers: int, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.bytes = nnx.Embed(256, width, rngs=rngs)
        self.positions = nnx.Embed(CONTEXT, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.last = nnx.LayerNorm(width, rngs=rngs)
        self.out = nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.bytes(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.out(self.last(x))


def make(layers: int = 6, width: int = 128, heads: int = 4) -> tuple[LanguageModel, nnx.Optimizer]:
    """Return the model and its optimizer."""
    model = LanguageModel(layers, width, heads, nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)


def loss(model: LanguageModel, text: jax.Array) -> jax.Array:
    logits = model(text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def step(model: LanguageModel, optimizer: nnx.Optimizer, text: jax.Array) -> jax.Array:
    value, gradient = nnx.value_and_grad(loss)(model, text)
    optimizer.update(model, gradient)
    return value


def problem() -> tuple[Callable, tuple[Any, ...]]:
    """Return the step and the types of its arguments, for `remat explain` and `remat plan`."""
    text = jax.ShapeDtypeStruct((BATCH, CONTEXT + 1), jnp.int32)
    return nnx.jit(step, donate_argnums=(0, 1)), (*make(), text)


def batches(seed: int) -> Any:
    """Yield batches of windows of `CONTEXT + 1` bytes of the text."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py"))[:100])
    data = np.frombuffer(text, np.uint8).astype(np.int32)
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(data) - CONTEXT - 1, BATCH)
        yield np.stack([data[start : start + CONTEXT + 1] for start in starts])


def save(path: pathlib.Path, model: LanguageModel, optimizer: nnx.Optimizer, done: int) -> None:
    """Write the parameters and the optimizer's state."""
    leaves = jax.tree.leaves(nnx.state((model, optimizer)))
    arrays = {str(i): np.asarray(leaf) for i, leaf in enumerate(leaves)}
    np.savez(path, done=done, **arrays)


def load(path: pathlib.Path, model: LanguageModel, optimizer: nnx.Optimizer) -> int:
    """Load the state that `save` wrote into the model and its optimizer; return the number of steps done."""
    leaves, tree = jax.tree.flatten(nnx.state((model, optimizer)))
    with np.load(path) as file:
        read = [jnp.asarray(file[str(i)]) for i in range(len(leaves))]
        nnx.update((model, optimizer), jax.tree.unflatten(tree, read))
        return int(file["done"])


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--save", type=pathlib.Path)
    options = parser.parse_args(arguments)
    model, optimizer = make(options.layers)
    done = 0
    if options.save is not None and options.save.exists():
        done = load(options.save, model, optimizer)
        print(f"going on after {done} steps")
    train = remat.nnx.fit(step, budget=options.budget, donate_argnums=(0, 1))
    texts = batches(seed=done)
    losses = []
    for number in range(done, done + options.steps):
        losses.append(float(train(model, optimizer, next(texts))))
        if number == done:
            (plan,) = train.plans
            print(f"peak {format_bytes(plan.peak_bytes)}, "
                  f"{format_bytes(plan.peak_bytes_without_remat)} without rematerialization, "
                  f"{100 * plan.extra_flops_share:.1f} % more FLOPs")  # fmt: skip
        if number % 20 == 0:
            print(f"step {number:>4}  loss {losses[-1]:.3f}")
    if options.save is not None:
        save(options.save, model, optimizer, done + options.steps)
    return {"losses": losses, "plan": plan}


if __name__ == "__main__":
    main()
