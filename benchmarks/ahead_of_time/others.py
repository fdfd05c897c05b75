"""Steps of other structures: experts, state spaces, pipelines, blockwise attention, two-axis products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

from benchmarks.ahead_of_time.case import (
    Case,
    Wrap,
    adam_state,
    constrained,
    float_types,
    fully_sharded,
    mesh_of,
    typed,
)
from benchmarks.zoo.layers import attention, cross_entropy, dense, rms_norm
from benchmarks.zoo.model import train_step
from remat.program.targets import Target


def mixtral(target: Target, size: str) -> Case:
    """Mixtral 8x7B: 8 experts, two per token, dispatched by capacity; expert-parallel."""
    layers, width, heads, hidden, vocabulary, length, batch = {
        "small": (6, 512, 4, 1792, 2048, 512, 16),
        "full": (32, 4096, 32, 14336, 32000, 4096, 256),
    }[size]
    experts = 8 if size == "full" else 4
    mesh = mesh_of(target, data=target.n_devices // experts, expert=experts)
    rows = constrained(mesh, ("data", "expert"))
    to_experts = constrained(mesh, "data", "expert")

    def build(wrap: Wrap) -> Callable:
        @wrap
        def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
            n, length, _ = x.shape
            h = rms_norm(x, params["scale_1"])
            qkv = dense(h, params["qkv"]).reshape(n, length, 3, heads, -1)
            q, k, v = (qkv[:, :, i] for i in range(3))
            attended = attention(q, k, v, causal=True).reshape(n, length, width)
            x = rows(x + dense(attended, params["out"]))
            h = rms_norm(x, params["scale_2"])
            logits = dense(h, params["router"]).astype(jnp.float32)
            gates, chosen = jax.lax.top_k(jax.nn.softmax(logits), 2)
            capacity = length * 2 * 5 // (4 * experts)
            mask = jax.nn.one_hot(chosen, experts, dtype=jnp.float32).sum(2)
            place = jnp.cumsum(mask, 1) * mask - 1
            where = jax.nn.one_hot(place, capacity, dtype=x.dtype)
            weight = (jax.nn.one_hot(chosen, experts) * gates[..., None]).sum(2)
            taken = to_experts(jnp.einsum("nlec,nlw->necw", where, h))
            gate = to_experts(jnp.einsum("necw,ewh->nech", taken, params["gate"].astype(x.dtype)))
            up = to_experts(jnp.einsum("necw,ewh->nech", taken, params["up"].astype(x.dtype)))
            made = jnp.einsum(
                "nech,ehw->necw", jax.nn.silu(gate) * up, params["down"].astype(x.dtype)
            )
            combine = where * weight[..., None].astype(x.dtype)
            return rows(x + jnp.einsum("nlec,necw->nlw", combine, to_experts(made))), None

        def loss(params: Any, batch: jax.Array) -> jax.Array:
            x = rows(params["tokens"].astype(jnp.bfloat16)[batch[:, :-1]])
            x, _ = jax.lax.scan(layer, x, params["layers"])
            return cross_entropy(
                dense(rms_norm(x, params["scale"]), params["logits"]), batch[:, 1:]
            )

        return train_step(loss)

    of_layers = {
        "qkv": (layers, width, 3 * width),
        "out": (layers, width, width),
        "router": (layers, width, experts),
        "gate": (layers, experts, width, hidden),
        "up": (layers, experts, width, hidden),
        "down": (layers, experts, hidden, width),
        "scale_1": (layers, width),
        "scale_2": (layers, width),
    }
    ends = {"tokens": (vocabulary, width), "scale": (width,), "logits": (width, vocabulary)}
    params = fully_sharded(float_types({**ends, "layers": {}}), mesh)

    def placed(name: str, leaf: Any) -> Any:
        axes = {"gate": (None, "expert", "data"), "up": (None, "expert", "data")}
        axes |= {
            "down": (None, "expert", None, "data"),
            "qkv": (None, "data"),
            "out": (None, "data"),
        }
        return typed(mesh, leaf.shape, P(*axes.get(name, ())), leaf.dtype)

    params["layers"] = {name: placed(name, leaf) for name, leaf in float_types(of_layers).items()}
    tokens = typed(mesh, (batch, length + 1), P(("data", "expert")), jnp.int32)
    return Case(
        build,
        (*adam_state(params), tokens),
        ("60%", "40%") if size == "small" else ("95.7GiB", "47.8GiB"),
        {"donate_argnums": (0, 1)},
    )


def mamba(target: Target, size: str) -> Case:
    """Mamba 2.8 B: a selective state-space model; each layer scans chunks of an associative scan."""
    layers, width, state, vocabulary, length, batch, chunk = {
        "small": (8, 256, 8, 1024, 1024, 16, 128),
        "full": (64, 2560, 16, 50280, 2048, 128, 256),
    }[size]
    inner = 2 * width
    mesh = mesh_of(target, data=target.n_devices)
    rows = constrained(mesh, "data")

    def chunk_scan(h: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
        decay, x, read = inputs  # (chunk, n, inner, state) twice, (chunk, n, state)

        def combine(a: Any, b: Any) -> Any:
            return a[0] * b[0], a[1] * b[0] + b[1]

        decays, states = jax.lax.associative_scan(combine, (decay, x))
        states = states + decays * h
        return states[-1], jnp.einsum("lnis,lns->lni", states, read)

    def build(wrap: Wrap) -> Callable:
        @wrap
        def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
            n, length, _ = x.shape
            h = rms_norm(rows(x), params["scale"])
            u, z = jnp.split(dense(h, params["in"]), 2, -1)
            u = jax.nn.silu(u)
            step = jax.nn.softplus(dense(u, params["step"]).astype(jnp.float32))
            write, read = jnp.split(dense(u, params["bc"]).astype(jnp.float32), 2, -1)

            def in_chunks(v: jax.Array) -> jax.Array:
                return v.swapaxes(0, 1).reshape(length // chunk, chunk, n, *v.shape[2:])

            def one(h: jax.Array, parts: Any) -> tuple[jax.Array, jax.Array]:
                step, u, write, read = parts
                decay = jnp.exp(-step[..., None] * jnp.exp(params["a"]))
                x = (step * u.astype(jnp.float32))[..., None] * write[..., None, :]
                return chunk_scan(h, (decay, x, read))

            start = jnp.zeros((n, inner, state))
            _, y = jax.lax.scan(one, start, tuple(map(in_chunks, (step, u, write, read))))
            y = y.reshape(length, n, inner).swapaxes(0, 1).astype(x.dtype)
            return rows(x + dense(y * jax.nn.silu(z), params["out"])), None

        def loss(params: Any, batch: jax.Array) -> jax.Array:
            x = rows(params["tokens"].astype(jnp.bfloat16)[batch[:, :-1]])
            x, _ = jax.lax.scan(layer, x, params["layers"])
            return cross_entropy(
                dense(rms_norm(x, params["scale"]), params["tokens"].T), batch[:, 1:]
            )

        return train_step(loss)

    of_layers = {
        "in": (layers, width, 2 * inner),
        "step": (layers, inner, inner),
        "bc": (layers, inner, 2 * state),
        "a": (layers, inner, state),
        "out": (layers, inner, width),
        "scale": (layers, width),
    }
    shapes = float_types({"tokens": (vocabulary, width), "scale": (width,), "layers": of_layers})
    tokens = typed(mesh, (batch, length + 1), P("data"), jnp.int32)
    return Case(
        build,
        (*adam_state(fully_sharded(shapes, mesh)), tokens),
        ("60%", "35%") if size == "small" else ("31GiB", "19GiB"),
        {"donate_argnums": (0, 1)},
    )


def blockwise(target: Target, size: str) -> Case:
    """A decoder on very long sequences: scans over layers, blocks of queries and blocks of keys."""
    layers, width, heads, hidden, length, block = {
        "small": (4, 256, 4, 1024, 4096, 512),
        "full": (32, 4096, 32, 16384, 131072, 2048),
    }[size]
    mesh = mesh_of(target, data=target.n_devices)
    features = width // heads

    def blocks_of(x: jax.Array) -> jax.Array:
        return x.reshape(length // block, block, *x.shape[1:])

    def build(wrap: Wrap) -> Callable:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            keys, values = blocks_of(k), blocks_of(v)

            @wrap
            def of_queries(_: None, q: jax.Array) -> tuple[None, jax.Array]:
                @wrap
                def of_keys(carry: Any, kv: Any) -> tuple[Any, None]:
                    top, total, out = carry
                    k, v = kv
                    scores = jnp.einsum("qhf,khf->hqk", q, k, preferred_element_type=jnp.float32)
                    scores = scores * features**-0.5
                    new = jnp.maximum(top, scores.max(-1))
                    scale, weights = jnp.exp(top - new), jnp.exp(scores - new[..., None])
                    out = out * scale[..., None] + jnp.einsum(
                        "hqk,khf->hqf", weights.astype(v.dtype), v
                    )
                    return (new, total * scale + weights.sum(-1), out), None

                start = (
                    jnp.full((heads, block), -1e30),
                    jnp.zeros((heads, block)),
                    jnp.zeros((heads, block, features)),
                )
                (_, total, out), _ = jax.lax.scan(of_keys, start, (keys, values))
                return None, (out / total[..., None]).swapaxes(0, 1).astype(q.dtype)

            return jax.lax.scan(of_queries, None, blocks_of(q))[1].reshape(length, width)

        @wrap
        def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
            h = rms_norm(x, params["scale_1"])
            q, k, v = (
                dense(h, params[name]).reshape(length, heads, features) for name in ("q", "k", "v")
            )
            x = x + dense(attend(q, k, v), params["out"])

            @wrap
            def mlp(_: None, rows: jax.Array) -> tuple[None, jax.Array]:
                h = rms_norm(rows, params["scale_2"])
                h = jax.nn.silu(dense(h, params["gate"])) * dense(h, params["up"])
                return None, rows + dense(h, params["down"])

            return jax.lax.scan(mlp, None, blocks_of(x))[1].reshape(length, width), None

        def one(params: Any, x: jax.Array) -> jax.Array:
            x, _ = jax.lax.scan(layer, x, params["layers"])
            return jnp.mean(rms_norm(x, params["scale"]).astype(jnp.float32) ** 2)

        def loss(params: Any, batch: jax.Array) -> jax.Array:
            spread = jax.vmap(one, in_axes=(None, 0), spmd_axis_name="data")
            return jnp.mean(spread(params, constrained(mesh, "data")(batch)))

        return train_step(loss)

    of_layers = dict.fromkeys(("q", "k", "v", "out"), (layers, width, width))
    of_layers |= {
        "gate": (layers, width, hidden),
        "up": (layers, width, hidden),
        "down": (layers, hidden, width),
        "scale_1": (layers, width),
        "scale_2": (layers, width),
    }
    shapes = float_types({"scale": (width,), "layers": of_layers})
    x = typed(mesh, (target.n_devices, length, width), P("data"), jnp.bfloat16)
    return Case(
        build,
        (*adam_state(fully_sharded(shapes, mesh)), x),
        ("40%", "20%") if size == "small" else ("90GiB", "60GiB"),
        {"donate_argnums": (0, 1)},
    )


_PIPELINES = {  # layers per stage, width, microbatches, rows of each, per data shard
    "small": (3, 512, 8, 1024),
    "full": (12, 8192, 32, 2048),
}


_TICKS = {  # of 1F1B: layers per stage, width, microbatches, rows of each, per data shard
    "small": (3, 512, 8, 8192),
    "full": (12, 8192, 32, 16384),
}
_STAGES = 4


def _gelu_layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
    h = jax.nn.gelu(x @ params["up"].astype(x.dtype))
    return x + h @ params["down"].astype(x.dtype), None


def _descending(loss: Callable) -> Callable:
    """Return a step of gradient descent."""

    def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradient), value

    return step


def _pipeline(
    build: Callable[[Wrap], Callable],
    mesh: Mesh,
    size: str,
    sizes: tuple[int, int, int, int] | None = None,
    small_budgets: tuple[str, str] = ("60%", "35%"),
) -> Case:
    """Return the case of a pipeline whose layers have two weights each."""
    per_stage, width, n_micro, n_rows = sizes or _PIPELINES[size]
    params = {
        "up": typed(mesh, (_STAGES, per_stage, width, 4 * width), P("stage")),
        "down": typed(mesh, (_STAGES, per_stage, 4 * width, width), P("stage")),
    }
    rows = n_rows * mesh.shape["data"]
    x = typed(mesh, (n_micro, rows, width), P(None, "data"), jnp.bfloat16)
    return Case(
        build,
        (params, x),
        small_budgets if size == "small" else ("90GiB", "45GiB"),
        {"donate_argnums": (0,)},
    )


def gpipe(target: Target, size: str, *, is_unrolled: bool = False) -> Case:
    """GPipe in a `shard_map` over stages: a scan over ticks, and layers inside of each stage."""
    per_stage, _, n_micro, _ = _PIPELINES[size]
    stages = _STAGES
    mesh = mesh_of(target, data=target.n_devices // stages, stage=stages)

    def build(wrap: Wrap) -> Callable:
        layer = wrap(_gelu_layer)

        def local(params: Any, x: jax.Array) -> jax.Array:
            params = jax.tree.map(lambda p: p[0], params)
            stage = jax.lax.axis_index("stage")

            def through(x: jax.Array) -> jax.Array:
                if is_unrolled:
                    for i in range(per_stage):
                        x, _ = layer(x, jax.tree.map(lambda p: p[i], params))  # noqa: B023
                    return x
                return jax.lax.scan(layer, x, params)[0]

            def tick(carry: Any, t: jax.Array) -> tuple[Any, None]:
                here, out = carry
                first = jax.lax.dynamic_index_in_dim(x, jnp.minimum(t, n_micro - 1), keepdims=False)
                y = through(jnp.where(stage == 0, first, here))
                at = jnp.maximum(t - (stages - 1), 0)
                old = jax.lax.dynamic_index_in_dim(out, at, keepdims=False)
                new = jnp.where((t >= stages - 1) & (stage == stages - 1), y, old)
                out = jax.lax.dynamic_update_index_in_dim(out, new, at, 0)
                there = [(i, (i + 1) % stages) for i in range(stages)]
                return (jax.lax.ppermute(y, "stage", there), out), None

            start = jnp.zeros_like(x[0]), jnp.zeros_like(x)
            (_, out), _ = jax.lax.scan(tick, start, jnp.arange(n_micro + stages - 1))
            squares = jnp.sum(out.astype(jnp.float32) ** 2) * (stage == stages - 1)
            return jax.lax.psum(squares, ("stage", "data"))

        def loss(params: Any, x: jax.Array) -> jax.Array:
            specs = P("stage"), P(None, "data")
            return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(
                params, x
            ) / float(x.size)

        return _descending(loss)

    return _pipeline(build, mesh, size)


def one_forward_one_backward(target: Target, size: str, *, is_unrolled: bool = False) -> Case:
    """1F1B in a `shard_map` over stages: in each tick, every stage runs one microbatch in each direction.

    The gradient is computed inside, with `jax.vjp`. A stage keeps the inputs of the microbatches that
    have not come back yet, at most two for each stage behind it.
    """
    _, _, n_micro, _ = _TICKS[size]
    stages = _STAGES
    n_ticks, n_kept = n_micro + 2 * (stages - 1), 2 * stages - 1
    mesh = mesh_of(target, data=target.n_devices // stages, stage=stages)

    def build(wrap: Wrap) -> Callable:
        layer = wrap(_gelu_layer)

        def through(params: Any, x: jax.Array) -> jax.Array:
            return jax.lax.scan(layer, x, params)[0]

        def local(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            params = jax.tree.map(lambda p: p[0], params)
            stage = jax.lax.axis_index("stage")
            is_last = stage == stages - 1

            def at(values: jax.Array, k: Any) -> jax.Array:
                return jax.lax.dynamic_index_in_dim(values, k, keepdims=False)

            def tick(carry: Any, t: Any) -> tuple[Any, None]:
                arrived, cotangent, inputs, total, value = carry
                forward, backward = t - stage, t - 2 * (stages - 1) + stage
                first = at(x, jnp.clip(forward, 0, n_micro - 1))
                here = jnp.where(stage == 0, first, arrived)
                inputs = jax.lax.dynamic_update_index_in_dim(inputs, here, forward % n_kept, 0)
                there = through(params, here)
                y, pull = jax.vjp(through, params, at(inputs, backward % n_kept))
                of_params, of_input = pull(jnp.where(is_last, y / float(x.size), cotangent))
                is_real = (backward >= 0) & (backward < n_micro)
                total = jax.tree.map(lambda a, b: a + jnp.where(is_real, b, 0), total, of_params)
                squares = jnp.sum(y.astype(jnp.float32) ** 2)
                value = value + jnp.where(is_real & is_last, squares, 0)
                arrived = jax.lax.ppermute(there, "stage", [(i, i + 1) for i in range(stages - 1)])
                back = [(i + 1, i) for i in range(stages - 1)]
                cotangent = jax.lax.ppermute(of_input, "stage", back)
                return (arrived, cotangent, inputs, total, value), None

            zeros = jnp.zeros_like(x[0])
            start = (
                zeros,
                zeros,
                jnp.zeros((n_kept, *zeros.shape), zeros.dtype),
                jax.tree.map(jnp.zeros_like, params),
                jnp.zeros(()),
            )
            if is_unrolled:
                carry = start
                for t in range(n_ticks):
                    carry, _ = tick(carry, t)
            else:
                carry, _ = jax.lax.scan(tick, start, jnp.arange(n_ticks))
            *_, total, value = carry
            total = jax.lax.psum(total, "data")
            params = jax.tree.map(lambda p, g: (p - 1e-3 * g)[None], params, total)
            return params, jax.lax.psum(value, ("stage", "data"))

        specs = P("stage"), P(None, "data")
        return jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=(P("stage"), P()), check_vma=False
        )

    return _pipeline(
        build, mesh, size, _TICKS[size], ("65%", "58%") if is_unrolled else ("60%", "40%")
    )


def pipeline_by_vmap(target: Target, size: str) -> Case:
    """A pipeline as a `vmap` over stages whose axis is sharded, as Praxis and MaxText write it."""
    _, _, n_micro, _ = _PIPELINES[size]
    stages = _STAGES
    mesh = mesh_of(target, data=target.n_devices // stages, stage=stages)
    by_stage = constrained(mesh, "stage", "data")

    def build(wrap: Wrap) -> Callable:
        layer = wrap(_gelu_layer)

        def through(params: Any, x: jax.Array) -> jax.Array:
            return jax.lax.scan(layer, x, params)[0]

        def loss(params: Any, x: jax.Array) -> jax.Array:
            def tick(carry: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
                first = jax.lax.dynamic_index_in_dim(x, jnp.minimum(t, n_micro - 1), keepdims=False)
                here = by_stage(carry.at[0].set(first))
                made = by_stage(jax.vmap(through, spmd_axis_name="stage")(params, here))
                return by_stage(jnp.roll(made, 1, 0)), made[-1]

            start = by_stage(jnp.zeros((stages, *x.shape[1:]), x.dtype))
            _, out = jax.lax.scan(tick, start, jnp.arange(n_micro + stages - 1))
            return jnp.mean(out[stages - 1 :].astype(jnp.float32) ** 2)

        return _descending(loss)

    return _pipeline(build, mesh, size)


def mlp_2d(target: Target, size: str) -> Case:
    """An unrolled MLP whose activations and weights are sharded over two axes; nothing is donated."""
    layers, width, n_rows = {"small": (8, 1024, 8192), "full": (16, 16384, 131072)}[size]
    mesh = mesh_of(target, x=target.n_devices // 2, y=2)
    narrow, wide = constrained(mesh, "x", None), constrained(mesh, "x", "y")

    def build(wrap: Wrap) -> Callable:
        @wrap
        def block(x: jax.Array, params: Any) -> jax.Array:
            h = wide(jax.nn.gelu(x @ params["up"]))
            return narrow(x + h @ params["down"])

        def loss(params: Any, x: jax.Array) -> jax.Array:
            for i in range(layers):
                x = block(x, params[i])
            return jnp.mean(x.astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss)

    params = [
        {
            "up": typed(mesh, (width, 4 * width), P("x", "y"), jnp.bfloat16),
            "down": typed(mesh, (4 * width, width), P("y", "x"), jnp.bfloat16),
        }
        for _ in range(layers)
    ]
    x = typed(mesh, (n_rows, width), P("x"), jnp.bfloat16)
    return Case(build, (params, x), ("85%", "75%") if size == "small" else ("85%", "65%"))


def fsdp_by_hand(target: Target, size: str) -> Case:
    """Fully sharded data parallelism written with collectives in a `shard_map`, around the gradient."""
    layers, width, n_rows = {"small": (8, 512, 8192), "full": (48, 8192, 16384)}[size]
    mesh = mesh_of(target, data=target.n_devices)

    def build(wrap: Wrap) -> Callable:
        @wrap
        def block(x: jax.Array, params: Any) -> jax.Array:
            up, down = (
                jax.lax.all_gather(params[name], "data", tiled=True) for name in ("up", "down")
            )
            return x + jax.nn.gelu(x @ up) @ down

        def loss(params: Any, x: jax.Array) -> jax.Array:
            for i in range(layers):
                x = block(x, params[i])
            return jnp.mean(x.astype(jnp.float32) ** 2)

        def local(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            params, value = _descending(loss)(params, x)
            return params, value[None]

        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P("data"), P("data")),
            out_specs=(P("data"), P("data")),
            check_vma=False,
        )

    params = [
        {
            "up": typed(mesh, (width, 4 * width), P("data"), jnp.bfloat16),
            "down": typed(mesh, (4 * width, width), P("data"), jnp.bfloat16),
        }
        for _ in range(layers)
    ]
    x = typed(mesh, (n_rows * target.n_devices, width), P("data"), jnp.bfloat16)
    return Case(
        build,
        (params, x),
        ("60%", "40%") if size == "small" else ("60GiB", "40GiB"),
        {"donate_argnums": (0,)},
    )


def chain(target: Target, size: str) -> Case:
    """Many scanned elementwise layers on one chip; nothing is donated."""
    layers, width, n_rows = {"small": (24, 1024, 2048), "full": (96, 4096, 8192)}[size]
    mesh = mesh_of(target, data=1)

    def build(wrap: Wrap) -> Callable:
        @wrap
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            h = x @ w
            return jnp.sin(jnp.tanh(h)) * jnp.cos(x), None

        def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32))

        return jax.value_and_grad(loss)

    args = (
        typed(mesh, (layers, width, width), P(), jnp.bfloat16),
        typed(mesh, (n_rows, width), P(), jnp.bfloat16),
    )
    return Case(build, args, ("60%", "40%") if size == "small" else ("13GiB", "10GiB"))


unrolled_gpipe = functools.partial(gpipe, is_unrolled=True)
unrolled_1f1b = functools.partial(one_forward_one_backward, is_unrolled=True)
