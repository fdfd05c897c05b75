"""Buffers that states and residuals share: their rows, and loops whose values have several types."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat.loops.buffers import layout
from remat.loops.scan import explain, scan
from remat.loops.schedules import Mixed

F32, BF16 = jnp.float32, jnp.bfloat16


@pytest.fixture(params=[1, 8])
def devices(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(jax, "device_count", lambda: request.param)
    return request.param


def test_written_states_are_read_back(devices: int) -> None:
    state = [jnp.arange(6, dtype=F32).reshape(2, 3), jnp.int32(7), jax.random.key(3)]
    residuals = [jnp.ones(5, BF16), jnp.array([True, False]), jnp.arange(4, dtype=jnp.int16) - 2]
    residuals += [jnp.full((2, 2), 1 + 2j, jnp.complex64), jnp.zeros((0, 3), F32), jnp.float32(2)]
    where = layout(list(map(jax.typeof, state)), list(map(jax.typeof, residuals)))
    schedule = Mixed.of(9, 3 * where.state_bytes, where.state_bytes, where.residual_bytes)
    buffers = where.write_state(where.create(schedule), 0, state)
    buffers = where.write_state(buffers, 1, state[:1] + [jnp.int32(8), state[2]])
    buffers = where.write_residuals(buffers, 1, 0, residuals)
    for found, expected in (
        (where.read_state(buffers, 0, state), state),
        (where.read_residuals(buffers, 1, 0, residuals), residuals),
    ):
        for a, b in zip(found, expected, strict=True):
            assert jax.typeof(a) == jax.typeof(b).update(weak_type=False)
            assert bool(jnp.all(a == b))


def test_empty_arrays_have_one_row_however_many_steps_are_kept(devices: int) -> None:
    types = [jax.typeof(jnp.zeros((0, 3), F32)), jax.typeof(jnp.zeros(2, jnp.int16))]
    where = layout(types[1:], types[:1])
    schedule = where.schedule(10**6, 40)
    assert schedule is not None
    empty = [b for b in where.create(schedule) if 0 in b.shape[1:]]
    assert [len(b) for b in empty] == ([1] if devices > 1 else [])


def test_a_count_in_the_residuals_is_not_batched_by_other_kept_values(devices: int) -> None:
    types = [jax.typeof(jnp.zeros((), jnp.int32)), jax.typeof(jnp.zeros(2, F32))]
    where = layout(types[1:], [*types, types[0]])
    schedule = where.schedule(4, 100)
    assert schedule is not None

    def run(x: Any, index: Any) -> Any:
        residuals = [jnp.int32(7), x, index]
        buffers = where.write_residuals(where.create(schedule), 0, 0, residuals)
        return buffers[where.residuals[0][0]]

    rows = jax.vmap(run, out_axes=None)(jnp.ones((3, 2)), jnp.arange(3, dtype=jnp.int32))
    assert int(rows[0]) == 7  # `out_axes=None` accepts only values that are not batched


def test_values_of_different_shapes_share_bytes_on_a_single_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = [jax.ShapeDtypeStruct((100,), F32)]
    residuals = [jax.ShapeDtypeStruct((20, 10), F32)]
    types = [jax.typeof(jnp.zeros(t.shape, t.dtype)) for t in (*state, *residuals)]
    steps = []
    for devices in (1, 8):
        monkeypatch.setattr(jax, "device_count", lambda devices=devices: devices)
        where = layout(types[:1], types[1:])
        schedule = where.schedule(300, 8000)
        assert schedule is not None
        assert where.n_bytes(schedule) <= 8000 + 800
        steps.append(schedule.forward_steps)
    assert steps[0] == Mixed.of(300, 20, 1, 2).forward_steps < steps[1]


def test_loops_over_several_types_have_the_gradients_of_lax_scan(devices: int) -> None:
    def loss(scan: Any, **way: Any) -> Any:
        def run(w: Any, x: Any) -> Any:
            def step(carry: Any, a: Any) -> Any:
                x, k, y = carry
                h = jax.nn.relu(w @ x) + a
                y = y * jnp.tanh(h[:2].astype(BF16)).sum()
                return (jnp.sin(h), k + 1, y), h.sum() * k.astype(F32)

            carry = (x, jnp.int32(0), jnp.ones(3, BF16))
            (x, _, y), ys = scan(step, carry, jnp.linspace(0.0, 1.0, 40), **way)
            return x.sum() + y.astype(F32).sum() + (ys**2).sum()

        return run

    w, x = jax.random.normal(jax.random.key(0), (4, 4)) * 0.5, jnp.ones(4)
    ours = jax.jit(jax.value_and_grad(loss(scan, checkpoints=8), (0, 1)))(w, x)
    theirs = jax.jit(jax.value_and_grad(loss(lax.scan), (0, 1)))(w, x)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        assert jnp.allclose(a, b, rtol=1e-4, atol=1e-5)
    step = lambda c, _: (jnp.tanh(w @ c), None)  # noqa: E731
    assert explain(step, x, None, 40, checkpoints=8).kind == "mixed"
