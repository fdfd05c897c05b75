"""Loops over several levels of storage: gradients, counted steps, transfers and capacities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import remat.loops.store as stores
from remat.errors import ScheduleError
from remat.loops.scan import explain, scan
from remat.loops.store import Storage
from remat.loops.while_loop import fori_loop, while_loop


def step(w: Any, carry: Any, x: Any) -> tuple[Any, Any]:
    h, k = carry
    h = jnp.sin(w * h) + x
    return (h, k + 1), h.sum() * k.astype(h.dtype)


def loss(scan: Callable, **way: Any) -> Callable:
    def run(w: Any, x: Any, xs: Any) -> Any:
        (h, _), ys = scan(lambda c, x: step(w, c, x), (x, jnp.int32(0)), xs, **way)
        return h.sum() + (ys**2).sum()

    return run


ARGS = (jnp.float32(0.9), jnp.ones(3), jnp.linspace(0.0, 1.0, 29)[:, None] * jnp.ones((1, 3)))


def assert_close(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("where", ["host", "disk", "host and disk", "no states on the device"])
def test_gradients_do_not_depend_on_the_levels(where: str, tmp_path: Path) -> None:
    disk = Storage("disk", checkpoints=5, write=3, read=3, directory=tmp_path)
    levels = {
        "host": [Storage("device", checkpoints=2), Storage("host", budget="70B", write=0.5)],
        "disk": [Storage("device", budget="100B"), disk],
        "host and disk": [Storage("device", checkpoints=1), Storage("host", checkpoints=2), disk],
        "no states on the device": [Storage("host", checkpoints=4)],
    }[where]
    ours = jax.jit(jax.grad(loss(scan, store=levels), (0, 1, 2)))
    theirs = jax.grad(loss(lax.scan), (0, 1, 2))
    for _ in range(2):
        assert_close(ours(*ARGS), theirs(*ARGS))
    assert not list(tmp_path.iterdir())


def test_steps_and_transfers_are_those_of_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def logged(name: str, method: Callable) -> Callable:
        def call(*args: Any) -> Any:
            jax.debug.callback(lambda _: ran.append(name), args[2])
            return method(*args)

        return call

    monkeypatch.setattr(stores.HostStore, "write", logged("write", stores.HostStore.write))
    monkeypatch.setattr(stores.HostStore, "read", logged("read", stores.HostStore.read))

    def body(c: Any, _: None) -> tuple[Any, None]:
        jax.debug.callback(lambda _: ran.append("step"), c)
        return jnp.sin(c), None

    levels = [Storage("device", checkpoints=2), Storage("host", checkpoints=3, write=1, read=1)]
    schedule = explain(body, jnp.float32(1), length=40, store=levels).schedule
    jax.jit(jax.grad(lambda x: scan(body, x, length=40, store=levels)[0]))(
        jnp.float32(1)
    ).block_until_ready()
    jax.effects_barrier()
    assert ran.count("step") == schedule.grad_forward_steps
    assert (ran.count("write"),) == schedule.writes
    assert (ran.count("read"),) == schedule.reads


def test_a_file_has_as_many_rows_as_states_are_kept_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows: list[int] = []
    opened = stores.DiskStore.open_file

    def open_file(self: Any, n_rows: int, types: Any) -> Any:
        rows.append(n_rows)
        return opened(self, n_rows, types)

    monkeypatch.setattr(stores.DiskStore, "open_file", open_file)
    levels = [Storage("device", checkpoints=1), Storage("disk", checkpoints=6, directory=tmp_path)]
    jax.jit(jax.grad(loss(scan, store=levels)))(*ARGS).block_until_ready()
    choice = explain(lambda c, x: step(0.9, c, x), (ARGS[1], jnp.int32(0)), ARGS[2], store=levels)
    assert rows == list(choice.schedule.peak_slots_of_levels)
    assert rows[0] <= 6
    assert choice.forward_steps == 29 + choice.schedule.forward_steps


def test_levels_work_under_vmap_and_twice_differentiated() -> None:
    levels = [Storage("device", checkpoints=1), Storage("host", checkpoints=3)]
    ours, theirs = loss(scan, store=levels), loss(lax.scan)
    ws = jnp.array([0.9, 0.5], jnp.float32)
    mapped = lambda f: jax.vmap(jax.grad(f, (0, 2)), (0, None, None))(ws, *ARGS[1:])  # noqa: E731
    assert_close(jax.jit(lambda: mapped(ours))(), mapped(theirs))
    twice = lambda f: jax.grad(lambda w: jax.grad(f)(w, *ARGS[1:]))(ARGS[0])  # noqa: E731
    assert_close(jax.jit(lambda: twice(ours))(), twice(theirs))


def test_a_loop_that_fits_the_device_keeps_everything_there() -> None:
    levels = [Storage("device", budget="1GiB"), Storage("host", checkpoints=3)]
    choice = explain(lambda c, _: (jnp.sin(c), None), jnp.ones(3), length=20, store=levels)
    assert choice.kind == "plain" and choice.forward_steps == 20
    fori = lambda x: fori_loop(0, 20, lambda _, c: jnp.sin(c), x, store=levels)  # noqa: E731
    assert_close(jax.grad(fori)(0.4), jax.grad(lambda x: scan(body_of_sin, x, length=20)[0])(0.4))


def body_of_sin(c: Any, _: None) -> tuple[Any, None]:
    return jnp.sin(c), None


def test_a_device_level_alone_equals_checkpoints() -> None:
    for way in ({"checkpoints": 4}, {"budget": "400B"}):
        alone = explain(body_of_sin, jnp.ones(3), length=50, store=[Storage("device", **way)])
        assert alone == explain(body_of_sin, jnp.ones(3), length=50, **way)


def test_impossible_levels_are_refused(tmp_path: Path) -> None:
    host = Storage("host", checkpoints=3)
    device = Storage("device", checkpoints=3)
    for store, way in (
        ([host, device], {}),
        ([device, host], {"checkpoints": 3}),
        (["host"], {}),
        ([], {}),
        ([Storage("device", checkpoints=0), Storage("host", checkpoints=0)], {}),
        ([Storage("disk", checkpoints=3)], {}),
    ):
        with pytest.raises(ScheduleError):
            scan(body_of_sin, jnp.ones(3), length=9, store=store, **way)
    for make in (
        lambda: Storage("host"),
        lambda: Storage("host", 3, "1GiB"),
        lambda: Storage("host", -1),
        lambda: Storage("host", 3, write=-1),
    ):
        with pytest.raises(ScheduleError):
            make()
    with pytest.raises(ScheduleError, match="length that is a number"):
        while_loop(lambda c: c < 1, lambda c: c + 1, 0.0, store=[device, host])
