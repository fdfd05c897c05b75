"""Conversions of weights that move into the loops that read them slice by slice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from remat import _jax
from remat.ir import jaxprs
from remat.planner.rewrite import flattened
from remat.planner.scan_pairs import opened, sunk

LAYERS, WIDTH = 4, 8


def weights():
    return jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5


def layer(x, w):
    return jnp.tanh(x @ w), None


def half(w):
    return w.astype(jnp.bfloat16)


def inputs():
    return jax.random.normal(jax.random.key(1), (3, WIDTH)).astype(jnp.bfloat16)


def converted_before(w, x):
    return jnp.sum(jax.lax.scan(layer, x, half(w))[0].astype(jnp.float32))


def converted_in_a_step_of_ticks(w, x):
    def tick(x, _):
        def converting(x, w):
            return layer(x, half(w))

        return jax.lax.scan(converting, x, w)[0], None

    return jnp.sum(jax.lax.scan(tick, x, length=5)[0].astype(jnp.float32))


def transposed_before(w, x):
    turned = jnp.swapaxes(half(-w), 1, 2)
    return jnp.sum(jax.lax.scan(layer, x, turned)[0].astype(jnp.float32))


def mapped_before(w, x):
    scaled = jax.lax.map(lambda w: half(2 * w), w)
    return jnp.sum(jax.lax.scan(layer, x, scaled, reverse=True)[0].astype(jnp.float32))


def in_a_body(w, x):
    """Each microbatch converts the weights."""

    def micro(total, x):
        return total + jax.grad(converted_before)(w, x), None

    return jnp.sum(jax.lax.scan(micro, jnp.zeros_like(w), jnp.stack([x, 2 * x]))[0])


def sharded(loss):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    specs = {"in_specs": (P(), P()), "out_specs": P()}

    def mapped(w, x):
        return jax.lax.psum(loss(w, x), "data")

    return jax.shard_map(mapped, mesh=mesh, **specs)


def flat_of(step, *args):
    jaxpr, consts = _jax.detach_consts(jax.jit(step).trace(*args).jaxpr)
    assert not consts
    return flattened(jaxpr, [])


def outside_of_loops(jaxpr):
    """Return the equations that are not in the body of a scan."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name != "scan":
            for body in jaxprs.bodies_of(eqn):
                yield from outside_of_loops(_jax.open_jaxpr(body))


def converts(eqn):
    """Return whether an equation computes a second copy of the weights in half precision."""
    return eqn.primitive.name != "pjit" and any(
        v.aval.dtype == jnp.bfloat16 and v.aval.shape == (LAYERS, WIDTH, WIDTH)
        for v in eqn.outvars
        if eqn.primitive.name in ("convert_element_type", "transpose", "mul")
        or (eqn.primitive.name == "scan" and _jax.scan_arity(eqn)[1] == 0)
    )


STEPS = (
    jax.grad(converted_before),
    jax.grad(converted_in_a_step_of_ticks),
    transposed_before,
    jax.grad(mapped_before),
    jax.grad(sharded(converted_before)),
    jax.grad(sharded(converted_in_a_step_of_ticks)),
)


@pytest.mark.parametrize("step", STEPS)
def test_weights_are_converted_in_the_loops_that_read_them(step):
    w, x = weights(), inputs()
    program = opened(flat_of(step, w, x))
    assert any(map(converts, outside_of_loops(program)))
    moved = sunk(program)
    assert not any(map(converts, outside_of_loops(moved)))
    assert sunk(moved) is moved
    expected = jax.core.eval_jaxpr(program, [], w, x)
    got = jax.core.eval_jaxpr(moved, [], w, x)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_conversions_in_a_step_move_into_its_loops():
    w, x = weights(), inputs()
    program = opened(flat_of(in_a_body, w, x))
    moved = sunk(program)
    assert moved is not program

    def in_steps(jaxpr):
        scans = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
        return [e for eqn in scans for e in outside_of_loops(_jax.open_jaxpr(eqn.params["jaxpr"]))]

    assert any(map(converts, in_steps(program)))
    assert not any(map(converts, in_steps(moved)))
    got, expected = (jax.core.eval_jaxpr(p, [], w, x) for p in (moved, program))
    np.testing.assert_array_equal(got[0], expected[0])


def read_whole(w, x):
    """The converted weights are read by a product, too."""
    w = half(w)
    return converted_before(w, x) + jnp.sum(w @ w).astype(jnp.float32)


def returned(w, x):
    w = half(w)
    return jax.lax.scan(layer, x, w)[0], w


def of_computed_weights(w, x):
    """The weights exist only until they are converted."""
    return converted_before(jnp.sort(w, 1), x)


def carried(w, x):
    def tick(carry, _):
        x, w = carry
        return (jax.lax.scan(layer, x, w)[0], 2 * w), None

    return jax.lax.scan(tick, (x, half(w)), length=3)[0][0]


def used_in_the_step(w, x):
    w = half(w)

    def tick(x, _):
        return jax.lax.scan(layer, x, w)[0] + w[0, :3], None

    return jax.lax.scan(tick, x, length=3)[0]


@pytest.mark.parametrize(
    "step", [read_whole, returned, of_computed_weights, carried, used_in_the_step]
)
def test_conversions_that_others_read_or_that_free_memory_stay(step):
    program = opened(flat_of(step, weights(), inputs()))
    assert sunk(program) is program


def test_conversions_of_a_small_part_of_the_arguments_stay():
    def step(w, x, large):
        return converted_before(w, x) + jnp.sum(large)

    program = opened(flat_of(step, weights(), inputs(), jnp.ones(100 * LAYERS * WIDTH**2)))
    assert sunk(program) is program
