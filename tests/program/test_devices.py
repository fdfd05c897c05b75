"""The registry of devices."""

from __future__ import annotations

import pytest

from remat.errors import PlanError
from remat.program.devices import DEVICES, device


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("cpu", "cpu"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("tpu V6 LITE", "v6e"),
    ],
)
def test_a_device_kind_of_jax_finds_its_device(kind, name):
    assert device(kind) is device(name) is DEVICES[name]


@pytest.mark.parametrize("known", DEVICES.values(), ids=DEVICES)
def test_figures_are_complete_and_of_the_right_magnitude(known):
    assert known.name == known.name.lower() and known.source
    assert {"float32", "bfloat16"} <= set(known.flops)
    assert all(1e10 < rate < 1e16 for rate in known.flops.values())
    assert known.host_link_bytes_per_s <= known.bandwidth_bytes_per_s < 1e14
    assert known.memory_bytes == 0 or 2**33 < known.memory_bytes < 2**38
    assert 0 < known.launch_s < 1e-4
    # The ratio of compute to bandwidth: FLOPs per byte of bfloat16.
    assert 5 < known.flops["bfloat16"] / known.bandwidth_bytes_per_s < 1000


def test_an_unknown_name_gets_the_closest_one():
    with pytest.raises(PlanError, match="'h10'; did you mean 'h100'"):
        device("h10")


def test_an_unknown_kind_falls_back_to_its_platform_only_if_that_is_given():
    assert device("NVIDIA GeForce RTX 9090", platform="gpu").name == "a100"
    assert device("TPU v99", platform="tpu").name == "v5e"
    with pytest.raises(PlanError, match=r"unknown device 'TPU v99'"):
        device("TPU v99")
    with pytest.raises(PlanError, match=r"platform 'npu'"):
        device("Ascend", platform="npu")


def test_a_dtype_without_a_rate_runs_at_that_of_its_width():
    h100 = device("h100")
    assert h100.flops_per_s("float16") == h100.flops_per_s("bfloat16") == 989.4e12
    assert h100.flops_per_s("float8_e4m3fn") == h100.flops_per_s("int8")
    assert h100.flops_per_s("int32") == h100.flops_per_s("float32")
    assert device("v5e").flops_per_s("float64") == device("v5e").flops_per_s("float32")


def test_devices_are_values():
    assert hash(device("v5e")) == hash(device("TPU v5 lite"))
    with pytest.raises(TypeError):
        device("v5e").flops["bfloat16"] = 1
