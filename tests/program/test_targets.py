"""Targets: their names, devices ahead of time, and the arguments that are placed on them."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

from remat.errors import PlanError
from remat.program import targets
from remat.program.devices import DEVICES
from remat.program.targets import Target, place, target

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="no libtpu")
needs_cuda_plugin = pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda12_plugin"), reason="no CUDA plugin"
)


def struct(*shape, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


# Attached devices


def test_the_target_without_a_name_is_the_devices_at_hand():
    here = target(None)
    assert here == target("") == target(target(None))
    assert here.platform == jax.default_backend()
    assert here.devices == tuple(jax.devices()) and not here.ahead_of_time
    assert target("cpu").device.name == "cpu"


def test_arguments_at_hand_are_left_as_they_are():
    args = {"x": jnp.ones(3), "n": 2}
    assert place(args, target("cpu")) is args


def test_a_mesh_needs_the_number_of_devices_at_hand():
    mesh = target("cpu").mesh((2, 4), ("data", "model"))
    assert dict(mesh.shape) == {"data": 2, "model": 4}
    with pytest.raises(PlanError, match=r"has 16 devices and the target 'cpu' has 8"):
        target("cpu").mesh((4, 4), ("a", "b"))
    with pytest.raises(PlanError, match="needs 2 axis names"):
        target("cpu").mesh((2, 4), ("a",))
    with pytest.raises(PlanError, match="names that differ"):
        target("cpu").mesh((2, 4), ("a", "a"))
    for shape in ((-2, -4), (2.0, 4), "24"):
        with pytest.raises(PlanError, match="whole sizes of at least 1"):
            target("cpu").mesh(shape, ("a", "b"))


@pytest.mark.parametrize(
    ("sizes", "shape", "possible"),
    [
        ((4, 4, 4), (8, 8), "(16, 4)"),
        ((4, 4, 4), (2, 2, 16), "(4, 4, 4)"),
        ((4, 8, 1), (16, 2), "(4, 8)"),
        ((4, 8, 1), (2, 2, 2, 4), "(4, 8, 1, 1)"),
        ((4, 4, 4), (64,), "(64,)"),
    ],
)
def test_a_mesh_that_no_links_have_is_refused_with_one_that_they_have(
    sizes, shape, possible, monkeypatch
):
    def refuse(*args):
        raise NotImplementedError("Failed to find assignment")

    monkeypatch.setattr(topologies, "make_mesh", refuse)
    devices = tuple(types.SimpleNamespace(coords=at) for at in np.ndindex(sizes))
    there = Target("tpu:of:chips", DEVICES["v5p"], devices, ahead_of_time=True)
    with pytest.raises(PlanError) as caught:
        there.mesh(shape, tuple("abcd"[: len(shape)]))
    assert f"such as {possible}. " in str(caught.value)


def test_a_mesh_without_axes_says_nothing_about_devices():
    there = Target("cpu:of:two", DEVICES["cpu"], tuple(jax.devices()[:2]), ahead_of_time=True)
    rows = NamedSharding(there.mesh((2,), ("x",)), P("x"))
    none = NamedSharding(jax.sharding.AbstractMesh((), ()), P())
    x = jax.ShapeDtypeStruct((4,), "float32", sharding=rows)
    n = jax.ShapeDtypeStruct((), "int32", sharding=none)
    x, n = place((x, n), there)
    assert x.sharding == rows
    assert n.sharding == NamedSharding(rows.mesh, P())


@needs_libtpu
def test_meshes_of_tpus_follow_their_links():
    there = target("tpu:v5p:4x4x4")
    assert there.mesh((16, 4), ("a", "b")).devices.shape == (16, 4)
    with pytest.raises(PlanError, match=r"product of some of 4x4x4, such as \(16, 4\)"):
        there.mesh((8, 8), ("a", "b"))


# Names that are not targets


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tpu:v5:2x2", "unknown TPU 'v5'; did you mean 'v5"),
        ("gpu:h10", "unknown GPU 'h10'; did you mean 'h100'"),
        ("v5e:2x2", "did you mean 'tpu:v5e:2x2'"),
        ("h100", "did you mean 'gpu:h100'"),
        ("tup:v5e:2x2", "unknown platform 'tup'"),
        ("cpu:2", "too many parts"),
        ("tpu:v5e:2x2:4", "too many parts"),
        ("tpu:v5e:2", "'2' is not a shape of a TPU"),
        ("tpu:v5e:0x2", "'0x2' is not a shape"),
        ("tpu:v5e:", "'' is not a shape"),
        ("tpu:v5e:-1x2", "'-1x2' is not a shape"),
        ("tpu:v5e:99999x99999", "more than 65536"),
        ("gpu:h100:2x2", "'2x2' is not a shape of a GPU"),
        ("tpu:../../etc/passwd", "unknown TPU"),
        (7, "7 is not a target"),
    ],
)
def test_a_malformed_target_is_refused_with_the_grammar_or_the_closest_name(name, message):
    with pytest.raises(PlanError) as caught:
        target(name)
    assert message in str(caught.value)


def test_a_platform_that_is_not_at_hand_is_refused():
    with pytest.raises(PlanError, match=r"this process has no (TPU|GPU)"):
        target("tpu" if jax.default_backend() != "tpu" else "gpu")


# Shapes that no other test names, since a process describes each target once.
@pytest.mark.parametrize(
    ("name", "raised", "message"),
    [
        ("tpu:v5e:2x6", RuntimeError("JAX TPU support not installed"), 'pip install "jax[tpu]=='),
        ("gpu:h100:3", NotImplementedError("no cuda"), "pip install --no-deps jax-cuda12-plugin=="),
        ("tpu:v5e:2x6", jax.errors.JaxRuntimeError("ABORTED: lockfile"), "another process"),
        (
            "tpu:v5e:2x6",
            jax.errors.JaxRuntimeError("INVALID: layout"),
            "does not know this topology",
        ),
        ("gpu:h100:3", jax.errors.JaxRuntimeError("INTERNAL: bad proto"), "XLA refuses it"),
    ],
)
def test_what_is_missing_is_named_with_the_next_step(monkeypatch, name, raised, message):
    def describe(*args, **kwargs):
        raise raised

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    with pytest.raises(PlanError) as caught:
        target(name)
    assert message in str(caught.value)


def test_the_environment_is_changed_around_the_call_only(monkeypatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "mine")
    monkeypatch.delenv("TPU_LOG_DIR", raising=False)
    seen = {}

    def describe(*args, **kwargs):
        seen.update(os.environ)
        raise RuntimeError("not installed")

    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    with pytest.raises(PlanError):
        target("tpu:v5e:2x6")
    assert seen["TPU_ACCELERATOR_TYPE"] == "mine" and seen["TPU_LOG_DIR"] == "disabled"
    assert os.environ["TPU_ACCELERATOR_TYPE"] == "mine" and "TPU_LOG_DIR" not in os.environ


# TPU, ahead of time


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "n_devices"),
    [
        ("tpu:v5e", 1),
        ("tpu:v5e:2x2", 4),
        ("tpu:v5e:16x16", 256),
        ("tpu:v6e:1x1", 1),
        ("tpu:v5p", 1),
        ("tpu:tpu7x", 2),
        ("tpu:tpu7x:2x2x1", 8),
        ("tpu:v4:2x2x1", 4),
        ("tpu:v5p:2x2x2", 8),
    ],
)
def test_a_topology_of_tpus_is_described_without_one(name, n_devices):
    there = target(name)
    assert there.n_devices == n_devices and there.ahead_of_time
    assert there.device.name == name.split(":")[1]
    assert targets.device(there.devices[0].device_kind) is there.device
    assert target(name) == there and hash(target(name)) == hash(there)


@needs_libtpu
def test_arguments_without_shardings_go_to_one_device_of_the_target():
    there = target("tpu:v5e:2x2")
    args = ({"w": struct(4, 4), "key": jax.random.key(0)}, np.ones(3), jnp.ones(2), 5, "static")
    placed = place(args, there)
    assert placed[3:] == (5, "static")
    for leaf in jax.tree.leaves(placed[:3]):
        assert isinstance(leaf, jax.ShapeDtypeStruct)
        assert leaf.sharding == SingleDeviceSharding(there.devices[0])
    assert placed[0]["key"].dtype == args[0]["key"].dtype
    assert placed[1].dtype == jnp.asarray(args[1]).dtype  # float64 only where JAX has it


@needs_libtpu
def test_shardings_on_the_target_stay_and_others_are_replicated_beside_them():
    there = target("tpu:v5e:16x16")
    mesh = there.mesh((16, 16), ("data", "model"))
    sharded = NamedSharding(mesh, P("data", "model"))
    x, y = place((struct(32, 32, sharding=sharded), struct(8)), there)
    assert x.sharding is sharded
    assert y.sharding == NamedSharding(mesh, P())


@needs_libtpu
def test_shardings_on_devices_at_hand_move_to_the_target():
    there = target("tpu:v5e:2x2")
    here = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    x = jax.device_put(jnp.ones((4, 4)), NamedSharding(here, P("data")))
    offloaded = NamedSharding(here, P("model")).with_memory_kind("pinned_host")
    x, y = place((x, struct(4, sharding=offloaded)), there)
    assert x.sharding.spec == P("data") and dict(x.sharding.mesh.shape) == dict(here.shape)
    assert set(x.sharding.mesh.devices.flat) == set(there.devices)
    assert y.sharding.memory_kind == "pinned_host"


@needs_libtpu
def test_a_mesh_larger_than_the_target_is_refused():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    with pytest.raises(PlanError, match=r"has 8 devices and the target 'tpu:v5e:2x2' has 4"):
        place(struct(8, sharding=NamedSharding(mesh, P("data"))), target("tpu:v5e:2x2"))


@needs_libtpu
def test_two_meshes_of_different_devices_are_refused():
    there = target("tpu:v5e:2x2")
    two, four = there.mesh((2,), ("x",)), there.mesh((4,), ("x",))
    args = [struct(4, sharding=NamedSharding(mesh, P("x"))) for mesh in (two, four)]
    with pytest.raises(PlanError, match="different devices"):
        place(args, there)


_TWO_AT_ONCE = """
import subprocess, sys, jax, jax.numpy as jnp
from remat.program.targets import place, target
from remat.program.compiled import compile_for_analysis
there = target("tpu:v5e:2x2")
lowered = jax.jit(jnp.sin).lower(place(jnp.ones(1024), there))
print(compile_for_analysis(lowered, there).argument_bytes, flush=True)
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "second"], check=True)
"""


@needs_libtpu
def test_two_processes_compile_at_once_and_write_nothing_to_stderr(tmp_path):
    script = tmp_path / "compile.py"
    script.write_text(_TWO_AT_ONCE)
    kept = {k: v for k, v in os.environ.items() if k not in targets.QUIET_LIBTPU}
    environment = kept | {"JAX_PLATFORMS": "cpu"}
    out = subprocess.run(
        [sys.executable, str(script)], check=False, capture_output=True, text=True, env=environment
    )
    assert out.stdout.split() == ["4096", "4096"], out.stderr
    # JAX 0.10's CUDA plugin, if installed, warns at import that there is no driver.
    said = [x for x in out.stderr.splitlines() if "cudart" not in x and "InitializeLog" not in x]
    assert said == []


# GPU, ahead of time


@pytest.mark.parametrize("name", [d.name for d in DEVICES.values() if d.platform == "gpu"])
def test_every_gpu_has_a_description_with_the_figures_of_the_registry(name):
    text = (targets.resources.files("remat.program") / f"targets_{name}.textproto").read_text()
    assert f"device_memory_size: {DEVICES[name].memory_bytes}\n" in text
    described = float(text.split("memory_bandwidth: ")[1].split()[0])
    assert described == pytest.approx(DEVICES[name].bandwidth_bytes_per_s, rel=0.01)
    kind = text.split('device_description_str: "')[1].split('"')[0]
    assert targets.device(kind).name == name


def test_a_gpu_without_a_description_is_refused_with_the_next_step(monkeypatch):
    new = dataclasses.replace(DEVICES["h100"], name="b300", kinds=("NVIDIA B300",))
    monkeypatch.setattr(targets, "DEVICES", {**DEVICES, "b300": new})
    with pytest.raises(PlanError) as caught:
        target("gpu:b300:8")
    message = str(caught.value)
    assert "target 'gpu:b300:8': there is no remat/program/targets_b300.textproto" in message
    assert "target=None" in message and "a100, h100, h200" in message


@needs_cuda_plugin
@pytest.mark.parametrize(
    ("name", "n_devices"),
    [("gpu:h100", 1), ("gpu:h100:1x1x4", 4), ("gpu:h200:8", 8), ("gpu:a100:1x2x4", 8)],
)
def test_gpus_are_described_without_one(name, n_devices):
    there = target(name)
    assert there.n_devices == n_devices
    assert targets.device(there.devices[0].device_kind) is there.device


@pytest.mark.parametrize(("name", "expected"), [("h100", False), ("v5e", True), ("cpu", False)])
def test_plans_offload_where_gradients_are_known_to_stay_right(name, expected):
    figures = DEVICES[name]
    assert Target("a target", figures, (), ahead_of_time=True).can_offload is expected
