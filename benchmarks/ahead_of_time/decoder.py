"""Decoders: scanned layers of attention and a gated MLP, sharded in the ways in which they are trained."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec as P

from benchmarks.ahead_of_time.case import (
    Case,
    Wrap,
    adam_state,
    constrained,
    float_types,
    fully_sharded,
    keeping,
    mesh_of,
    typed,
)
from benchmarks.zoo.layers import attention, cross_entropy, dense, rms_norm
from benchmarks.zoo.llama import rotary
from benchmarks.zoo.model import train_step, unchanged
from remat.program.targets import Target


@dataclass(frozen=True)
class Config:
    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int
    length: int
    batch: int

    @property
    def key_width(self) -> int:
        return self.width // self.heads * self.key_heads


def shapes(config: Config) -> dict[str, Any]:
    """Return the parameters' types."""
    n, width, hidden = config.layers, config.width, config.hidden
    layers = {
        "q": (n, width, width),
        "k": (n, width, config.key_width),
        "v": (n, width, config.key_width),
        "out": (n, width, width),
        "gate": (n, width, hidden),
        "up": (n, width, hidden),
        "down": (n, hidden, width),
        "scale_1": (n, width),
        "scale_2": (n, width),
    }
    ends = {
        "tokens": (config.vocabulary, width),
        "scale": (width,),
        "logits": (width, config.vocabulary),
    }
    return float_types({**ends, "layers": layers})


_causal = partial(attention, causal=True)


def loss(
    config: Config,
    wrap: Wrap,
    *,
    rows: Callable[[jax.Array], jax.Array] = unchanged,
    inner: Callable[[jax.Array], jax.Array] = unchanged,
    attend: Callable[..., jax.Array] = _causal,
    names: Collection[str] = ("gate",),
) -> Callable:
    """Return the loss of (parameters, batch of tokens).

    Args:
      config: the sizes.
      wrap: transforms the body of the scan over layers.
      rows: constrains how activations are sharded.
      inner: constrains how the MLP's hidden activations are sharded.
      attend: computes attention of (batch, length, heads, features).
      names: the values of a layer that have names, of query, key, value, context, out, gate, up and down.
    """

    def named(x: jax.Array, name: str) -> jax.Array:
        return checkpoint_name(x, name) if name in names else x

    @wrap
    def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
        batch, length, _ = x.shape
        x = rows(x)
        h = rms_norm(x, params["scale_1"])
        q = named(dense(h, params["q"]), "query").reshape(batch, length, config.heads, -1)
        k, v = (
            named(dense(h, params[name[0]]), name).reshape(batch, length, config.key_heads, -1)
            for name in ("key", "value")
        )
        attended = attend(rotary(q), rotary(k), v).reshape(batch, length, config.width)
        x = rows(x + named(dense(named(attended, "context"), params["out"]), "out"))
        h = rms_norm(x, params["scale_2"])
        gate = named(inner(dense(h, params["gate"])), "gate")
        h = jax.nn.silu(gate) * named(inner(dense(h, params["up"])), "up")
        return rows(x + named(dense(h, params["down"]), "down")), None

    def of(params: Any, batch: jax.Array) -> jax.Array:
        inputs, labels = batch[:, :-1], batch[:, 1:]
        x = rows(params["tokens"].astype(jnp.bfloat16)[inputs])
        x, _ = jax.lax.scan(layer, x, params["layers"])
        return cross_entropy(dense(rms_norm(x, params["scale"]), params["logits"]), labels)

    return of


def tokens(config: Config, mesh: Mesh, axis: str, *, batch: int | None = None) -> Any:
    return typed(mesh, (batch or config.batch, config.length + 1), P(axis), jnp.int32)


# --------------------------------------------------------------------------------------------------
# Cases

LLAMA_8B = {
    "small": Config(8, 512, 8, 2, 1792, 2048, 1024, 16),
    "full": Config(32, 4096, 32, 8, 14336, 128256, 4096, 256),
}
LLAMA_13B = {
    "small": Config(6, 512, 4, 4, 1536, 2048, 512, 64),
    "full": Config(40, 5120, 40, 40, 13824, 32000, 4096, 512),
}
LLAMA_70B = {
    "small": Config(8, 1024, 8, 4, 3584, 2048, 1024, 8),
    "full": Config(80, 8192, 64, 8, 28672, 32000, 4096, 256),
}
LLAMA_7B = {
    "small": Config(8, 512, 4, 4, 1408, 2048, 1024, 8),
    "full": Config(32, 4096, 32, 32, 11008, 32000, 4096, 8),
}


def llama_8b(target: Target, size: str, **options: Any) -> Case:
    """Llama 3 8 B, parameters and batch sharded over all chips."""
    budgets = ("60%", "35%") if size == "small" else ("15.75GiB", "8GiB")
    return _fully_sharded(LLAMA_8B[size], target, budgets, **options)


def llama_7b_gpu(target: Target, size: str) -> Case:
    """Llama 7 B, parameters and batch sharded over the GPUs of a host."""
    return _fully_sharded(
        LLAMA_7B[size], target, ("60%", "35%") if size == "small" else ("79GiB", "40GiB")
    )


def _fully_sharded(
    config: Config,
    target: Target,
    budgets: tuple[str, ...],
    *,
    batch: int | None = None,
    names: Collection[str] = ("gate",),
) -> Case:
    mesh = mesh_of(target, data=target.n_devices)
    config = replace(config, batch=batch or config.batch)

    def build(wrap: Wrap) -> Callable:
        return train_step(loss(config, wrap, rows=constrained(mesh, "data"), names=names))

    state = adam_state(fully_sharded(shapes(config), mesh))
    return Case(
        build,
        (*state, tokens(config, mesh, "data")),
        budgets,
        {"donate_argnums": (0, 1)},
        {"gate": keeping("gate")},
    )


def llama_13b(target: Target, size: str) -> Case:
    """Llama 2 13 B, the gradient accumulated over 8 microbatches in a scan."""
    config = LLAMA_13B[size]
    mesh = mesh_of(target, data=target.n_devices)
    rows = constrained(mesh, "data")

    def build(wrap: Wrap) -> Callable:
        of = loss(config, wrap, rows=rows)

        def accumulated(params: Any, batch: jax.Array) -> tuple[jax.Array, Any]:
            parts = batch.reshape(8, -1, batch.shape[-1])
            parts = constrained(mesh, None, "data")(parts)

            def one(total: Any, part: jax.Array) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, jax.value_and_grad(of)(params, part)), None

            zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
            return jax.lax.scan(one, zero, parts)[0]

        def step(params: Any, moments: Any, batch: jax.Array) -> tuple[Any, Any, jax.Array]:
            value, gradient = accumulated(params, batch)
            moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradient)
            return jax.tree.map(lambda p, m: p - 1e-3 * m, params, moments), moments, value

        return step

    params = fully_sharded(shapes(config), mesh)
    return Case(
        build,
        (params, params, tokens(config, mesh, "data")),
        ("60%", "40%") if size == "small" else ("95.7GiB", "50GiB"),
        {"donate_argnums": (0, 1)},
        {"gate": keeping("gate")},
    )


def llama_70b(
    target: Target,
    size: str,
    *,
    batch: int | None = None,
    names: Collection[str] = ("gate",),
) -> Case:
    """Llama 3 70 B with a Pallas kernel for attention, fully sharded and tensor-parallel."""
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    config = LLAMA_70B[size]
    config = replace(config, batch=batch or config.batch)
    n_tensor = 4 if size == "full" else 2
    mesh = mesh_of(target, fsdp=target.n_devices // n_tensor, tensor=n_tensor)
    by_head = P("fsdp", None, "tensor")

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        group = q.shape[2] // k.shape[2]

        def local(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            k, v = (jnp.repeat(x, group, 2) for x in (k, v))
            q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
            out = flash_attention(q, k, v, causal=True, sm_scale=q.shape[-1] ** -0.5)
            return out.swapaxes(1, 2)

        return jax.shard_map(
            local, mesh=mesh, in_specs=(by_head,) * 3, out_specs=by_head, check_vma=False
        )(q, k, v)

    def build(wrap: Wrap) -> Callable:
        of = loss(
            config,
            wrap,
            rows=constrained(mesh, "fsdp"),
            inner=constrained(mesh, "fsdp", None, "tensor"),
            attend=attend,
            names=names,
        )
        return train_step(of)

    # The last two dimensions of each matrix: over which axis each is sharded.
    ways = dict.fromkeys(("q", "k", "v", "gate", "up", "logits"), ("fsdp", "tensor"))
    ways |= {"out": ("tensor", "fsdp"), "down": ("tensor", "fsdp"), "tokens": ("tensor", "fsdp")}

    def placed(path: Any, leaf: Any) -> Any:
        way = ways.get(path[-1].key, (None,))
        spec = P(*[None] * (len(leaf.shape) - len(way)), *way)
        return typed(mesh, leaf.shape, spec, leaf.dtype)

    params = jax.tree_util.tree_map_with_path(placed, shapes(config))
    return Case(
        build,
        (*adam_state(params), tokens(config, mesh, "fsdp")),
        ("60%", "40%") if size == "small" else ("40GiB", "20GiB"),
        {"donate_argnums": (0, 1)},
        {"gate": keeping("gate")},
    )
