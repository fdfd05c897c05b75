"""One decoder under PyTorch's `activation_memory_budget` and under plans of `remat`.

The decoder has 16 layers of width 256 with explicit attention, and a batch of 4 sequences of length 256 in
float32. PyTorch's half needs an environment with `torch==2.13.0` and without JAX, so this script is not part
of `python -m benchmarks`:

    python benchmarks/pytorch_budget.py pytorch
    PYTHONPATH=src python benchmarks/pytorch_budget.py remat

PyTorch's figures are those of the two graphs that its partitioner emits. The forward graph also passes
transposed views of parameters to the backward graph. They are not activations and are not counted; with them
the saved bytes would be 50 MB (15 to 30 %) higher. Peaks exclude parameters in both halves.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

LAYERS, WIDTH, LENGTH, BATCH, HEADS = 16, 256, 256, 4, 4
FEATURES = WIDTH // HEADS


def of_pytorch(budget: float) -> tuple[float, float, float]:
    """Return saved bytes, FLOPs of matrix products, and the peak in bytes."""
    import torch
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch.nn.functional import gelu, layer_norm

    def block(x: Any, qkv: Any, out: Any, up: Any, down: Any) -> Any:
        parts = (layer_norm(x, (WIDTH,)) @ qkv).chunk(3, -1)
        q, k, v = (t.view(BATCH, LENGTH, HEADS, FEATURES).transpose(1, 2) for t in parts)
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(FEATURES), -1)
        x = x + (weights @ v).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH) @ out
        return x + gelu(layer_norm(x, (WIDTH,)) @ up) @ down

    def loss(x: Any, layers: list) -> Any:
        for layer in layers:
            x = block(x, *layer)
        return x.sum()

    graphs: dict[str, Any] = {}

    def keep(name: str) -> Any:
        return lambda module, _: graphs.setdefault(name, module)

    shapes = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
    layers = [[torch.randn(s, requires_grad=True) for s in shapes] for _ in range(LAYERS)]
    config.activation_memory_budget = budget
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch.compile(loss, backend=backend)(torch.randn(BATCH, LENGTH, WIDTH), layers).backward()

    def storages(node: Any) -> Iterator[tuple[Any, int]]:
        made = node.meta.get("val")
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                yield storage._cdata, storage.nbytes()

    both = {name: list(module.graph.nodes) for name, module in graphs.items()}
    given = [n for n in both["forward"] if n.op == "placeholder" and n.name.startswith("primals")]
    parameters = {key for node in given for key, _ in storages(node)}
    returned = both["forward"][-1].args[0][
        1:
    ]  # after the loss: the values passed to the backward graph
    handed = {node.name: list(storages(node)) for node in returned if hasattr(node, "op")}
    views = {name for name, of in handed.items() if any(key in parameters for key, _ in of)}
    saved = {key: n for name, of in handed.items() if name not in views for key, n in of}

    def peak(nodes: list) -> int:
        left_out = {node for node in nodes if node.op == "placeholder" and node.name in views}
        left_out |= {n for n in nodes if n.op == "placeholder" and n.name.startswith("primals")}
        sizes: dict[Any, int] = {}
        born: dict[Any, int] = {}
        dies: dict[Any, int] = {}
        for i, node in enumerate(nodes):
            for key, n_bytes in (
                pair for of in (node, *node.all_input_nodes) for pair in storages(of)
            ):
                sizes[key] = n_bytes
                born.setdefault(key, i)
                dies[key] = i
        for key in {key for node in left_out for key, _ in storages(node)}:
            del born[key]
        return max(
            sum(sizes[key] for key in born if born[key] <= i <= dies[key])
            for i in range(len(nodes))
        )

    flops = 0
    for node in (*both["forward"], *both["backward"]):
        if str(node.target) in ("aten.mm.default", "aten.bmm.default"):
            left, right = (operand.meta["val"] for operand in node.args)
            flops += 2 * left.numel() * right.shape[-1]
    return sum(saved.values()), flops, max(map(peak, both.values()))


def of_remat(budgets: list[str]) -> Iterator[tuple[str, float, float, float]]:
    """Yield for each budget the peaks under a plan and without one, and the share of extra FLOPs."""
    import jax
    import jax.numpy as jnp

    import remat

    def norm(x: Any) -> Any:
        centered = x - x.mean(-1, keepdims=True)
        return centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5)

    def block(x: Any, qkv: Any, out: Any, up: Any, down: Any) -> Any:
        parts = jnp.split(norm(x) @ qkv, 3, -1)
        q, k, v = (t.reshape(BATCH, LENGTH, HEADS, FEATURES).transpose(0, 2, 1, 3) for t in parts)
        weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / math.sqrt(FEATURES))
        x = x + (weights @ v).transpose(0, 2, 1, 3).reshape(BATCH, LENGTH, WIDTH) @ out
        return x + jax.nn.gelu(norm(x) @ up, approximate=False) @ down

    def loss(layers: list, x: Any) -> Any:
        for layer in layers:
            x = block(x, *layer)
        return x.sum()

    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    shapes = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
    layers = [[array(*shape) for shape in shapes] for _ in range(LAYERS)]
    parameters = LAYERS * sum(4 * a * b for a, b in shapes)
    for budget in budgets:
        x = array(BATCH, LENGTH, WIDTH)
        plan = remat.plan(jax.grad(loss), layers, x, budget=budget, cache=False)
        assert plan.peak_bytes is not None
        without = plan.peak_bytes_without_remat - parameters
        yield budget, plan.peak_bytes - parameters, without, plan.extra_flops / plan.flops


def main(which: str) -> None:
    if which == "pytorch":
        base = 0.0
        for budget in (1.0, 0.75, 0.5, 0.25, 0.1, 0.0):
            saved, flops, peak = of_pytorch(budget)
            base = base or flops
            extra = 100 * (flops / base - 1)
            print(
                f"{budget:4}: saved {saved / 1e6:.0f} MB, +{extra:.1f} %, peak {peak / 1e6:.0f} MB"
            )
        return
    for budget, peak, without, share in of_remat(["75%", "50%", "35%"]):
        print(f"{budget}: peak {peak / 1e6:.0f} of {without / 1e6:.0f} MB, +{100 * share:.1f} %")


if __name__ == "__main__":
    main(sys.argv[1])
