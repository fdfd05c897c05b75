"""Plans for several devices: bytes are those of one device, and all processes follow one plan."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import remat
from planner.region_cases import assert_same, normal
from remat.planner import processes
from remat.planner.step import TargetStep
from remat.program import compiled as compiler
from remat.program.from_jaxpr import program_of_jaxpr
from remat.program.targets import target

N = 8


@functools.cache
def mesh():
    return Mesh(np.array(jax.devices()[:N]), ("data",))


@remat.auto
def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def sharded(how):
    """Return parameters and a batch: data-parallel, or with sharded parameters, too (FSDP)."""
    params = [normal(32, 32, seed=i) for i in range(12)]
    x = normal(N * 64, 32)
    of_params = P() if how == "data" else P("data")
    put = jax.device_put
    rows = NamedSharding(mesh(), P("data"))
    return [put(w, NamedSharding(mesh(), of_params)) for w in params], put(x, rows)


@pytest.mark.parametrize("how", [pytest.param("data", marks=pytest.mark.slow), "fsdp"])
def test_shardings_are_planned_for_by_device(how):
    params, x = sharded(how)
    step = jax.value_and_grad(loss)
    fitted = remat.fit(step, budget="75%", cache=False, progress=False)
    assert_same(fitted(params, x), jax.jit(step)(params, x), within=1e-5)
    (made,) = fitted.plans
    compiled = fitted.lower(params, x).compile()
    peak = compiler.memory_of(compiled, target(None)).peak_bytes
    assert peak == made.peak_bytes <= made.budget_bytes
    # All activations of one device, and fewer bytes than those of all devices.
    assert made.peak_bytes_without_remat < 2**17 * 6
    assert made.whole_step is not None


def test_model_counts_the_bytes_of_one_device():
    params, x = sharded("data")
    step = TargetStep(jax.value_and_grad(loss), (params, x), {}, target(None), {})
    traced = step.trace()
    assert traced.shards() == [1] * len(params) + [N]
    program = program_of_jaxpr(traced.jaxpr, traced.shards())
    dots = [op for op in program.ops if op.name == "dot_general"]
    largest = max(program.bytes[v] for op in dots for v in op.results)
    assert largest == x.size * 4 // N


def test_python_numbers_among_the_arguments_leave_the_shardings():
    params, x = sharded("fsdp")
    step = TargetStep(
        lambda p, x, lr: jax.grad(loss)(p, x * lr), (params, x, 0.1), {}, target(None), {}
    )
    assert step.trace().shards() == [N] * (len(params) + 1) + [1]


def shards_of(fun, *args, **options):
    return TargetStep(fun, args, {}, target(None), options).trace().shards()


def test_shardings_that_jit_is_told_count_for_arrays_of_the_host():
    rows, columns, whole = (NamedSharding(mesh(), p) for p in (P("data"), P(None, "data"), P()))
    given = [np.ones((32, 32), np.float32)] * 2, np.ones((64, 32), np.float32)

    def step(params, x):
        return jax.value_and_grad(loss)(params, x)

    for x in (given[1], jnp.asarray(given[1]), jax.ShapeDtypeStruct((64, 32), jnp.float32)):
        args = given[0], x
        assert shards_of(step, *args) == [1, 1, 1]
        assert shards_of(step, *args, in_shardings=(whole, rows)) == [1, 1, N]
        assert shards_of(step, *args, in_shardings=([columns, rows], None)) == [N, N, 1]
        assert shards_of(step, *args, in_shardings=rows) == [N, N, N]
    # An array with a sharding keeps it if jit is given none.
    args = given[0], jax.device_put(given[1], rows)
    assert shards_of(step, *args, in_shardings=([whole, rows], None)) == [1, N, N]


def test_static_arguments_and_explicit_meshes_leave_the_shardings():
    params, x = sharded("fsdp")

    def step(n, params, *, x, how):
        return jax.grad(loss)(params[:n], x)

    options = {"static_argnums": 0, "static_argnames": "how"}
    of = TargetStep(step, (2, params), {"x": x, "how": "s"}, target(None), options)
    assert of.trace().shards() == [N] * (len(params) + 1)
    explicit = jax.make_mesh((N,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(explicit):
        x = jax.device_put(normal(64, 32), P("data"))
        assert shards_of(lambda w, x: (x @ w).sum(), normal(32, 32), x) == [1, N]


def test_plan_under_in_shardings_is_that_of_arrays_that_have_them():
    rows, whole = NamedSharding(mesh(), P("data")), NamedSharding(mesh(), P())
    step = jax.value_and_grad(loss)
    params, x = [np.ones((32, 32), np.float32) / 32] * 4, np.ones((N * 64, 32), np.float32)
    plan = functools.partial(remat.plan, budget="100%", cache=False, progress=False)
    told = plan(step, params, x, in_shardings=(whole, rows))
    placed = plan(step, jax.device_put(params, whole), jax.device_put(x, rows))
    assert told.program.partition("-")[2] == placed.program.partition("-")[2]
    assert told.peak_bytes == placed.peak_bytes
    fitted = remat.fit(step, plan=told, in_shardings=(whole, rows))
    assert_same(fitted(params, x), jax.jit(step)(params, x), within=1e-5)
    with pytest.raises(remat.PlanError, match="is for 8 x cpu, and this step runs on 1 x cpu"):
        remat.fit(step, plan=told)(params, x)
    with pytest.raises(remat.PlanError, match="sharded in another way"):
        remat.fit(step, plan=told, in_shardings=(whole, whole))(params, x)


def test_a_differentiated_shard_map_recomputes_no_more_than_the_budget_asks_for():
    # Both halves of the shard_map are one body; in the program as written, the residuals between them are
    # live around it.
    def inner(params, x):
        for w, v in params:
            x = x + jnp.tanh(jax.nn.gelu(x @ w) @ v)
        return jax.lax.pmean(jnp.mean(x**2), "data")

    loss = jax.shard_map(inner, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P())
    abstract = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    everywhere = NamedSharding(mesh(), P())
    weights = [abstract(s, sharding=everywhere) for s in ((64, 256), (256, 64))]
    x = abstract((N * 1024, 64), sharding=NamedSharding(mesh(), P("data")))
    step = jax.value_and_grad(loss)
    args = [tuple(weights)] * 6, x
    made = remat.plan(step, *args, budget="60%", cache=False, progress=False)
    assert made.peak_bytes <= made.budget_bytes
    assert (
        made.extra_flops < 0.1 * made.flops
    )  # recomputing the whole forward pass would take a third


@pytest.mark.slow
def test_shard_map_is_planned_for_by_device():
    params = [normal(32, 32, seed=i) for i in range(12)]
    x = normal(N * 64, 32)

    def local(params, x):
        return jax.lax.psum(jax.value_and_grad(loss)(params, x), "data")

    step = jax.shard_map(
        local, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    fitted = remat.fit(step, budget="90%", cache=False, progress=False)
    assert_same(fitted(params, x), jax.jit(step)(params, x), within=1e-5)
    (made,) = fitted.plans
    assert made.peak_bytes <= made.budget_bytes < 2**17 * 6


WORKER = """
import os, signal, sys, time
import jax, numpy as np, jax.numpy as jnp
jax.config.update("jax_cpu_collectives_implementation", "gloo")
n_processes, slow_s, mode = int(sys.argv[4]), float(sys.argv[5]), sys.argv[6]
jax.distributed.initialize(sys.argv[1], num_processes=n_processes, process_id=int(sys.argv[2]))
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import logging
import remat
from remat.planner import fit as fitting

made_here = fitting.make_plan

def slow_plan(*args, **options):
    options["progress"]("thinking")
    print("PLANNING", flush=True)
    time.sleep(slow_s)
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "failing":
        raise ZeroDivisionError("a bug in a solver")
    return made_here(*args, **options)

fitting.make_plan = slow_plan
logging.basicConfig(stream=sys.stdout, format="LOG %(message)s")
logging.getLogger("remat").setLevel("DEBUG")

@remat.auto
def loss(w, x):
    for _ in range(12):
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)

mesh = Mesh(np.array(jax.devices()), ("data",))
rows = NamedSharding(mesh, P("data"))
x = jax.make_array_from_process_local_data(rows, np.ones((512 // n_processes, 32), np.float32) / 7)
w = jax.device_put(np.eye(32, dtype=np.float32), NamedSharding(mesh, P()))
step = jax.value_and_grad(loss)
from remat.cache import Cache

class OfFirst(Cache):
    def get(self, kind, key):
        assert jax.process_index() == 0, "only process 0 looks for plans in its cache"
        return super().get(kind, key)

cache = OfFirst(sys.argv[3])
try:
    remat.fit(lambda w: (w * w).sum(), budget="50%", cache=cache, progress=False)(w)
except remat.RematError as error:
    if mode != "working":
        raise
    print("REFUSED", type(error).__name__, error)
fitted = remat.fit(step, budget="75%", cache=cache, progress=False)
value, g = fitted(w, x)
(made,) = fitted.plans
plain, expected = jax.jit(step)(w, x)
np.testing.assert_allclose(g.addressable_data(0), expected.addressable_data(0), rtol=1e-4)
import hashlib
print("PLAN", hashlib.sha256(made.to_json().encode()).hexdigest(), made.peak_bytes, made.n_recomputed)
"""
#: Seconds that process 0 takes for a plan. A collective on CPU times out after 30: try SLOW=60.
SLOW_S = float(os.environ.get("SLOW", "2"))


def run_workers(tmp_path, n_processes, mode, slow_s=SLOW_S):
    """Return the exit status, the output and the errors of each process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, address, str(i), str(tmp_path / f"cache{i}"),
             str(n_processes), str(slow_s), mode],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )
        for i in range(n_processes)
    ]  # fmt: skip
    try:
        results = [worker.communicate(timeout=120 + 3 * slow_s) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, *result) for worker, result in zip(workers, results)]


def lines_of(out, start):
    return [line for line in out.splitlines() if line.startswith(start)]


@pytest.mark.parametrize("n_processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_processes_wait_for_the_plan_of_the_first(tmp_path, n_processes):
    results = run_workers(tmp_path, n_processes, "working")
    for status, _, problems in results:
        assert status == 0, problems[-3000:]
    first, *others = [out for _, out, _ in results]
    (plan,) = lines_of(first, "PLAN ")
    assert "no plan fits" in lines_of(first, "REFUSED BudgetError")[0]
    for out in others:
        assert lines_of(out, "PLAN ") == [plan]
        refused = lines_of(
            out, "REFUSED BudgetError process 0 could not make a plan: BudgetError: "
        )
        assert "no plan fits" in refused[0]
        assert lines_of(out, "LOG remat: process 0 is thinking")
        assert not lines_of(out, "PLANNING")
    assert not (tmp_path / "cache1").exists()


def test_the_message_of_the_first_process_ends_all(tmp_path):
    (status, _, problems), other = run_workers(tmp_path, 2, "failing", 0)
    assert status == 1 and "ZeroDivisionError: a bug in a solver" in problems
    assert other[0] == 1
    assert "PlanError: process 0 could not make a plan: ZeroDivisionError: a bug" in other[2]


def test_all_processes_end_if_the_first_is_killed(tmp_path):
    (status, _, _), other = run_workers(tmp_path, 2, "killed", 1)
    assert status == -9
    assert other[0] != 0
    # JAX ends the process by itself, or the key-value store is unreachable before that.
    assert "process 0 was planning" in other[2] or "distributed" in other[2].lower()


def test_a_silent_first_process_is_given_up(monkeypatch):
    entries = {"remat/plans/7/beat": "3 compiling"}
    monkeypatch.setattr(processes, "SILENCE_S", 0.0)
    monkeypatch.setattr("remat._jax.published", lambda key, wait_s=0.0: entries.get(key))
    with pytest.raises(remat.PlanError, match=r"not responded for .*'compiling'"):
        processes.wait_for_first("remat/plans/7", print)


def test_a_store_that_cannot_be_reached_ends_the_wait(monkeypatch):
    def gone(key, wait_s=0.0):
        raise ConnectionError("UNAVAILABLE: connection refused")

    monkeypatch.setattr("remat._jax.published", gone)
    with pytest.raises(remat.PlanError, match=r"process 0 .* has ended \(UNAVAILABLE"):
        processes.wait_for_first("remat/plans/7", print)
