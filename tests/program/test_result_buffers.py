"""Temporaries that use the buffers of results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import remat
from remat.program.costs import Roofline
from remat.program.from_jaxpr import program_of_jaxpr
from remat.program.fusion import fuse
from remat.program.result_buffers import peak_bytes
from remat.program.targets import target
from remat.solvers import Graph, Node, no_remat

CHAIN = Graph(
    (
        Node(0, time=1, bytes=8),
        Node(1, time=1, bytes=6, deps=(0,)),
        Node(2, time=1, bytes=4, deps=(1,)),
        Node(3, time=1, bytes=0, deps=(0, 2)),
        Node(4, time=1, bytes=0, deps=(3,)),
    )
)


@pytest.mark.parametrize(
    ("buffers", "peak"),
    [
        ({}, 18),
        ({4: (8,)}, 10),  # holds the first value, which node 3 is the last to read
        ({3: (8,)}, 12),  # is written when that value is read, so it holds the second value
        ({4: (7,)}, 12),  # too small for the first value
        ({4: (8, 6)}, 4),
        ({4: (8,), 3: (6,)}, 4),
    ],
)
def test_each_buffer_holds_the_largest_value_that_is_dead_when_it_is_written(
    buffers: dict[int, tuple[int, ...]], peak: int
) -> None:
    assert peak_bytes(CHAIN, range(5), buffers) == peak


def test_of_two_values_at_a_time_a_buffer_holds_one() -> None:
    nodes = [
        Node(0, time=1, bytes=8),
        Node(1, time=1, bytes=8),
        Node(2, time=1, bytes=0, deps=(0, 1)),
    ]
    graph = Graph((*nodes, Node(3, time=1, bytes=0, deps=(2,))))
    assert peak_bytes(graph, range(4), {3: (8,)}) == 8


def test_a_value_that_is_computed_again_is_two_values() -> None:
    order = [0, 1, 2, 0, 3, 4]
    assert peak_bytes(CHAIN, order, {}) == 14
    assert peak_bytes(CHAIN, order, {4: (8,)}) == 10


def test_gradients_of_checkpointed_layers_hold_what_is_kept() -> None:
    # Inputs of layers, which are kept, are as large as the gradients of the layers' weights.
    @remat.checkpoint
    def layer(x, w):
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return x

    def loss(ws, x):
        for w in ws:
            x = layer(x, w)
        return jnp.sum(x)

    ws, x = [jnp.eye(128) for _ in range(12)], jnp.ones((128, 128))
    step = jax.grad(loss)
    needed = jax.jit(step).lower(ws, x).compile().memory_analysis().temp_size_in_bytes
    program = program_of_jaxpr(jax.make_jaxpr(step)(ws, x).jaxpr)
    fused = fuse(program, Roofline(target(None).device).seconds, duplicates=False)
    order = range(len(fused.graph))
    modelled = peak_bytes(fused.graph, order, fused.output_buffers)
    assert modelled == pytest.approx(needed, rel=0.25)
    assert no_remat(fused.graph).peak_bytes > 1.5 * needed
