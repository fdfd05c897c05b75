"""States on the host and on disk: equal gradients, no leftovers, typed errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import remat.loops.store as stores
from remat.errors import ScheduleError, StoreError
from remat.loops.scan import scan
from remat.loops.while_loop import fori_loop, while_loop


def loss(scan: Callable, **way: Any) -> Callable:
    def run(w: Any, x: Any, xs: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            h, k, key = carry
            key, _ = jax.random.split(key)
            h = jnp.sin(w * h) + x + 0.1 * jax.random.normal(key, h.shape)
            return (h.astype(h.dtype), k + 1, key), h.sum()

        first = (x, jnp.int32(0), jax.random.key(3))
        (h, _, _), ys = scan(step, first, xs, **way)
        return h.sum() + (ys**2).sum()

    return run


ARGS = (jnp.float32(0.9), jnp.ones(3), jnp.linspace(0.0, 1.0, 14)[:, None] * jnp.ones((1, 3)))


def assert_close(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jnp.allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("store", ["host", "disk"])
def test_gradients_do_not_depend_on_the_store(store: str, tmp_path: Path) -> None:
    way = {"checkpoints": 3, "store": store, "directory": tmp_path if store == "disk" else None}
    ours = jax.grad(loss(scan, **way), (0, 1, 2))
    theirs = jax.grad(loss(lax.scan), (0, 1, 2))
    for _ in range(2):
        assert_close(jax.jit(ours)(*ARGS), theirs(*ARGS))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("order", ["vmap of grad", "grad of vmap"])
def test_lanes_of_a_batch_read_their_own_states_on_the_host(order: str) -> None:
    def lanes(loop: Callable) -> Any:
        one = jax.grad(loop) if order == "vmap of grad" else loop
        batched = jax.vmap(
            jax.vmap(one, (0, None))
        )  # examples with one number of steps, and with different ones
        if order == "vmap of grad":
            return jax.jit(batched)(xs, counts)
        return jax.jit(jax.grad(lambda xs: batched(xs, counts).sum()))(xs)

    def masked(x: Any, n: Any) -> Any:
        step = lambda c, i: (jnp.where(i < n, jnp.sin(c), c), None)  # noqa: E731
        return lax.scan(step, x, jnp.arange(4))[0].sum()

    def ours(x: Any, n: Any) -> Any:
        same = scan(lambda c, _: (jnp.sin(c), None), x, None, 3, checkpoints=2, store="host")[0]
        own = fori_loop(0, n, lambda _, c: jnp.sin(c), x, checkpoints=2, store="host")
        return same.sum() + own.sum()

    xs, counts = jnp.linspace(0.1, 1.2, 12).reshape(2, 3, 2), jnp.array([1, 4], jnp.int32)
    assert_close(lanes(ours), lanes(lambda x, n: masked(x, 3) + masked(x, n)))


@pytest.mark.slow
def test_every_lane_of_a_batch_has_its_own_file(tmp_path: Path) -> None:
    ours = jax.grad(loss(scan, checkpoints=3, store="disk", directory=tmp_path), (0, 2))
    theirs = jax.grad(loss(lax.scan), (0, 2))
    ws = jnp.array([0.9, 0.5], jnp.float32)
    assert_close(
        jax.jit(jax.vmap(ours, (0, None, None)))(ws, *ARGS[1:]),
        jax.vmap(theirs, (0, None, None))(ws, *ARGS[1:]),
    )


def test_while_and_fori_loops_keep_states_on_disk(tmp_path: Path) -> None:
    way = {"checkpoints": 3, "store": "disk", "directory": tmp_path}

    def by_while(x: Any, n: Any) -> Any:
        step = lambda c: (c[0] + 1, jnp.sin(c[1]))  # noqa: E731
        return while_loop(lambda c: c[0] < n, step, (jnp.int32(0), x), **way)[1]

    by_fori = lambda x, n: fori_loop(0, n, lambda _, c: jnp.sin(c), x, **way)  # noqa: E731
    by_scan = lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, 13)[0]  # noqa: E731
    for f in (by_while, by_fori):
        assert_close(jax.jit(jax.grad(f))(0.7, 13), jax.grad(by_scan)(0.7))
    # With concrete bounds the loop is a scan.
    assert_close(jax.grad(lambda x: by_fori(x, 13))(0.7), jax.grad(by_scan)(0.7))


def test_second_derivatives_work_from_disk(tmp_path: Path) -> None:
    f = lambda x: scan(  # noqa: E731
        lambda c, _: (jnp.sin(c), None), x, None, 7, checkpoints=2, store="disk", directory=tmp_path
    )[0]
    g = lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, 7)[0]  # noqa: E731
    assert_close(jax.jit(jax.grad(jax.grad(f)))(0.4), jax.grad(jax.grad(g))(0.4))


def test_nothing_is_left_when_the_program_fails(tmp_path: Path) -> None:
    calls: list[int] = []

    def fail(_: Any) -> None:
        calls.append(len(os.listdir(tmp_path)))
        if len(calls) == 25:
            raise RuntimeError("step failed")

    def run(x: Any) -> Any:
        def step(c: Any, _: None) -> Any:
            jax.debug.callback(fail, c)
            return jnp.sin(c), None

        return scan(step, x, None, 12, checkpoints=2, store="disk", directory=tmp_path)[0]

    with pytest.raises(jax.errors.JaxRuntimeError, match="step failed"):
        jax.jit(jax.grad(run))(0.5).block_until_ready()
        jax.effects_barrier()
    assert len(calls) >= 25
    assert set(calls) == {0}
    assert not list(tmp_path.iterdir())


def test_files_are_closed_when_a_backward_pass_ends(tmp_path: Path) -> None:
    disk = stores.DiskStore(str(tmp_path))

    @jax.jit
    def use(x: Any) -> Any:
        rows = disk.create(3, [x], [x])
        rows = disk.write(rows, jnp.int32(2), [x + 1])
        rows, (y,) = disk.read(rows, jnp.int32(2), [x])
        disk.close(rows)
        return y

    assert_close(use(jnp.ones(4)), jnp.full(4, 2.0))
    jax.effects_barrier()
    assert disk.n_open_files == 0


def test_states_on_disk_are_not_in_the_compiled_program() -> None:
    x = jnp.ones(100_000)

    def temp_bytes(**way: Any) -> int:
        f = lambda x: scan(  # noqa: E731
            lambda c, _: (jnp.sin(c), None), x, None, 300, checkpoints=50, **way
        )[0].sum()
        return jax.jit(jax.grad(f)).lower(x).compile().memory_analysis().temp_size_in_bytes

    assert temp_bytes(store="disk", directory="/tmp") <= 8 * 4 * x.size <= temp_bytes() / 6


def test_impossible_stores_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = lambda c, _: (jnp.sin(c), None)  # noqa: E731
    with pytest.raises(ScheduleError, match="'device', 'host' or 'disk'"):
        scan(step, 0.5, None, 9, checkpoints=2, store="tape")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="needs a directory="):
        scan(step, 0.5, None, 9, checkpoints=2, store="disk")
    with pytest.raises(ScheduleError, match="has no use"):
        scan(step, 0.5, None, 9, checkpoints=2, directory=tmp_path)
    with pytest.raises(ScheduleError, match="pass checkpoints="):
        scan(step, 0.5, None, 9, store="host")
    with pytest.raises(StoreError, match="not a directory"):
        scan(step, 0.5, None, 9, checkpoints=2, store="disk", directory=tmp_path / "missing")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    gradient = jax.grad(
        lambda x: scan(step, x, None, 9, checkpoints=2, store="disk", directory=tmp_path)[0]
    )
    with pytest.raises(Exception, match="3 states need"):
        jax.block_until_ready(gradient(0.5))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.vmap])
def test_a_directory_that_vanishes_is_a_store_error_of_eager_calls(
    tmp_path: Path, wrap: Any
) -> None:
    directory = tmp_path / "states"
    directory.mkdir()

    def run(x: Any) -> Any:
        options: Any = {"checkpoints": 2, "store": "disk", "directory": directory}
        return scan(lambda c, _: (jnp.sin(c), None), x, length=4, **options)[0]

    out, pull = jax.vjp(wrap(run), jnp.ones(3))
    compiled = jax.jit(pull).lower(out).compile()
    directory.rmdir()
    with pytest.raises(StoreError, match=r"no file can be made in .*states.*directory="):
        pull(out)
    # A compiled program cannot raise it as such: JAX converts it to text.
    with pytest.raises(jax.errors.JaxRuntimeError, match="StoreError: no file can be made"):
        jax.block_until_ready(compiled(out))


def test_a_failed_eager_backward_pass_closes_its_file(tmp_path: Path) -> None:
    def refuse(x: Any) -> Any:
        raise ValueError("a callback of the user")

    @jax.custom_vjp
    def f(x: Any) -> Any:
        return jnp.sin(x)

    f.defvjp(lambda x: (f(x), x), lambda x, ct: (jax.pure_callback(refuse, x, x),))
    options: Any = {"checkpoints": 2, "store": "disk", "directory": tmp_path}
    out, pull = jax.vjp(lambda x: scan(lambda c, _: (f(c), None), x, length=4, **options)[0], 0.5)
    before = len(os.listdir("/proc/self/fd"))
    maps = Path("/proc/self/maps")
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="a callback of the user"):
            pull(out)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert str(tmp_path) not in maps.read_text()
