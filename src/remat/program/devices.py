"""Figures of devices: FLOP/s, bandwidths and memory.

`DEVICES` has an entry for each. The recipe "A device" in CONTRIBUTING.md lists what else a new device needs,
such as a new TPU generation. `device` looks one up by its name or by the `device_kind` that JAX reports.

* FLOP/s are those of a matrix product whose operands have the dtype, dense, at JAX's default
  precision: TPUs multiply float32 in one pass of bfloat16, GPUs of NVIDIA in TF32. Elementwise operations
  are memory-bound on all of these devices, so they have no rate here.
* `memory_bytes` is the memory that a program may use. For TPUs it is the compiler's limit, which its error
  names when a program does not fit (`compiled.OutOfMemory.limit_bytes`); for GPUs the device's memory, of
  which JAX takes 75 % in advance by default; for CPUs it is unknown, written as 0. On a CPU the host's
  memory is the device's, so offloading saves nothing.
* Programs do not reach the vendors' peak rates. But the ratios of predicted times are right, and the choice
  between saving and recomputing depends only on those.

* `host_memory_bytes` is a device's share of its host's memory: that of Google's smallest machine with
  this TPU, divided by its chips. Compilers allow 128 GiB per device (measured). Machines with GPUs have
  no common figure; theirs is 0, unknown.

* `link_bytes_per_s` is the rate at which a device sends in a collective over one axis of a mesh: on TPUs both
  directions of one axis of the torus, on GPUs NVLink in one direction. On a CPU all devices are
  threads of one process, and a collective copies memory.

Known limits: host links are the links' nominal rates in one direction, and several devices of a host
may share one. A mesh's axis over several axes of the torus is faster, one between hosts with GPUs slower.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType

from remat.errors import PlanError, closest

_A100 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-nvidia-us-2188504-web.pdf"
_H100 = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
_TPU = "https://cloud.google.com/tpu/docs/{} and https://jax-ml.github.io/scaling-book/tpus/"


@dataclasses.dataclass(frozen=True, repr=False)
class Device:
    """The figures of one kind of device.

    Args:
      name: short, as in a target: `"h100"`, `"v5e"`. Of a TPU: the compiler's own name for it.
      kinds: regular expressions, one of which matches the whole of JAX's `device_kind` (case-insensitive).
      platform: `"cpu"`, `"gpu"` or `"tpu"`.
      flops: FLOP/s of a matrix product by the dtype of its operands.
      bandwidth_bytes_per_s: of the device's memory.
      host_link_bytes_per_s: between the device's and the host's memory, in one direction.
      link_bytes_per_s: the rate at which it sends to other devices in a collective.
      memory_bytes: the memory that a program may use; 0 if unknown.
      has_host_memory: whether values can be offloaded to the host's memory.
      launch_s: time to start a kernel, however small; a larger value favours fewer kernels.
      host_memory_bytes: the host memory that a program may use per device; 0 if unknown.
      source: the source of the figures.
      topology_options: further arguments for describing its topology ahead of time. They are needed if the
        description without them has other devices than JAX shows on the hardware (v4: two for each chip).
    """

    name: str
    kinds: tuple[str, ...]
    platform: str
    flops: Mapping[str, float] = dataclasses.field(hash=False)
    bandwidth_bytes_per_s: float
    host_link_bytes_per_s: float
    link_bytes_per_s: float
    memory_bytes: int
    has_host_memory: bool
    launch_s: float
    source: str
    host_memory_bytes: int = 0
    topology_options: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return f"Device({self.name!r}, {self.platform})"

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))

    def flops_per_s(self, dtype: str) -> float:
        """Return the FLOP/s of a matrix product of a dtype.

        A dtype that is not listed runs as a listed one of its width, or as float32.

        >>> device("h100").flops_per_s("bfloat16") / 1e12
        989.4
        """
        alias = _RUNS_AS.get(dtype, "float32")
        return self.flops.get(dtype, self.flops.get(alias, self.flops["float32"]))


_RUNS_AS = {
    "float16": "bfloat16",
    "int8": "bfloat16",
    "uint8": "int8",
    "int4": "int8",
    "uint4": "int8",
    "float8_e4m3fn": "int8",
    "float8_e5m2": "int8",
    "complex128": "float64",
    "int64": "float64",
    "uint64": "float64",
}


def _rates(**tera: float) -> dict[str, float]:
    return {dtype: value * 1e12 for dtype, value in tera.items()}


def _tpu(
    name: str,
    kinds: tuple[str, ...],
    tera_flops: tuple[float, float],  # bfloat16, int8
    tera_bytes_per_s: float,
    host_link_giga_bytes_per_s: float,
    link_giga_bytes_per_s: float,
    memory_gib: float,
    host_memory_gib: float,
    **more: tuple[tuple[str, str], ...],
) -> Device:
    bfloat16, int8 = tera_flops
    return Device(
        name,
        kinds,
        "tpu",
        _rates(bfloat16=bfloat16, float32=bfloat16, int8=int8),
        tera_bytes_per_s * 1e12,
        host_link_giga_bytes_per_s * 1e9,
        link_giga_bytes_per_s * 1e9,
        int(memory_gib * 2**30),
        has_host_memory=True,
        launch_s=1e-6,
        source=_TPU.format(name),
        host_memory_bytes=int(host_memory_gib * 2**30),
        **more,
    )


def _gpu(
    name: str,
    tera_flops: dict[str, float],
    tera_bytes_per_s: float,
    host_link_giga_bytes_per_s: float,
    link_giga_bytes_per_s: float,
    memory_bytes: int,
    source: str,
) -> Device:
    return Device(
        name,
        (f"NVIDIA {name}.*",),
        "gpu",
        tera_flops,
        tera_bytes_per_s * 1e12,
        host_link_giga_bytes_per_s * 1e9,
        link_giga_bytes_per_s * 1e9,
        memory_bytes,
        has_host_memory=True,
        launch_s=3e-6,
        source=source,
    )


_HOPPER = _rates(bfloat16=989.4, float32=494.7, float64=66.9, int8=1978.9)
_AMPERE = _rates(bfloat16=312, float32=156, float64=19.5, int8=624)
_MEASURED = _rates(float32=0.175, bfloat16=0.386, float16=0.195, float64=0.092)
_HERE = "measured on 2 cores of an AMD EPYC (AVX-512, bf16) with jaxlib 0.12.0.1: benchmarks/device_cpu.py"

# A chip of v4 is one device in JAX, but two in a topology without "megacore". A chip of tpu7x is two devices
# in both; its figures are halves of the chip's. Its host link is not published: that of v6e is assumed.
_MEGACORE = (("chip_config_name", "megacore"),)

# The host link of Hopper is measured on an H100 (benchmarks/results/device-*.json); PCIe 5 has 64 GB/s.

# fmt: off
DEVICES: Mapping[str, Device] = MappingProxyType({d.name: d for d in (
    Device("cpu", ("cpu",), "cpu", _MEASURED, 38e9, 38e9, 38e9, 0, False, 5e-6, _HERE),
    _gpu("a100", _AMPERE, 2.039, 32, 300, 85100068864, _A100),
    _gpu("h100", _HOPPER, 3.35, 52, 450, 84929347584, _H100),
    _gpu("h200", _HOPPER, 4.8, 52, 450, 151397597184, _H200),
    _tpu("v4", ("TPU v4",), (275, 275), 1.228, 16, 90, 30.75, 101, topology_options=_MEGACORE),
    _tpu("v5e", ("TPU v5 ?lite", "TPU v5e"), (197, 394), 0.819, 16, 90, 15.75, 48),
    _tpu("v5p", ("TPU v5", "TPU v5p"), (459, 918), 2.765, 32, 180, 95.73, 112),
    _tpu("v6e", ("TPU v6 ?lite", "TPU v6e"), (918, 1836), 1.64, 32, 180, 31.24, 128),
    _tpu("tpu7x", ("TPU7x",), (1153.5, 2307), 3.69, 16, 90, 94.75, 111),
)})
# fmt: on
# The device that is assumed for an unlisted one: the smallest of its platform, so that neither its
# memory nor its speed is overestimated.
_DEFAULTS = {"cpu": "cpu", "gpu": "a100", "tpu": "v5e"}


def device(name_or_kind: str, platform: str | None = None) -> Device:
    """Return the figures of a device, by name or by the `device_kind` that JAX reports.

    >>> device("TPU v5 lite").name, device("NVIDIA H100 80GB HBM3").name
    ('v5e', 'h100')
    >>> device("NVIDIA L4", platform="gpu").name
    'a100'

    Args:
      name_or_kind: such as `"v5e"` or `"TPU v5 lite"`.
      platform: if given, a kind that is not known gets this platform's default: the figures of an
        A100 on `"gpu"`, of a v5e on `"tpu"`, of the machine that measured them on `"cpu"`.

    Raises:
      PlanError: neither the kind nor the platform is known; the message has the closest known one.
    """
    name = kind_of(name_or_kind)
    if name in DEVICES:
        return DEVICES[name]
    if platform is None:
        raise PlanError(
            f"unknown device {name_or_kind!r}; {closest(name_or_kind, DEVICES)} "
            "Give the platform as well to take its default."
        )
    if platform not in _DEFAULTS:
        raise PlanError(f"unknown platform {platform!r}; {closest(platform, _DEFAULTS)}")
    return DEVICES[_DEFAULTS[platform]]


def kind_of(device_kind: str) -> str:
    """Return the name of the device with a `device_kind`; the kind itself if it is not listed.

    >>> kind_of("TPU v5 lite"), kind_of("NVIDIA L4")
    ('v5e', 'NVIDIA L4')
    """
    for known in DEVICES.values():
        if any(re.fullmatch(kind, device_kind, re.IGNORECASE) for kind in known.kinds):
            return known.name
    return device_kind
