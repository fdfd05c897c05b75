"""Targets: the devices a program is planned for, present or described ahead of time.

A `Target` is a name, figures (`devices.Device`) and JAX devices to lower for. Ahead of time those
devices come from `jax.experimental.topologies`, which needs the platform's compiler (libtpu, or the
CUDA plugin) but no accelerator::

    target       = "" | platform | "tpu:" version [":" shape] | "gpu:" model [":" shape]
    platform     = "cpu" | "gpu" | "tpu"                      (the devices of this process)
    version      = "v4" | "v5e" | "v5p" | "v6e" | "tpu7x"
    model        = "a100" | "h100" | "h200"
    shape of TPU = AxB or AxBxC, chips: "16x16"               (default: one chip)
    shape of GPU = AxBxC, partitions x hosts x GPUs each: "1x1x4", or a number of GPUs of one host

Requirements of the compilers of JAX 0.10.2 and 0.12 (measured):

* libtpu reads its environment when it is loaded. Outside of a TPU machine it would ask a metadata server
  and write to stderr and `/tmp`; the variables below stop that. A second process that loads it
  aborts over a lock file unless `ALLOW_MULTIPLE_LIBTPU_LOAD` is set; the lock protects a TPU, and
  describing a topology opens none. Each variable is set only if unset, and only around the call.
* A host of v5e has 2x2 chips; a smaller topology needs `chips_per_host_bounds`.
* v4 shows two devices a chip unless it is described as "megacore", which is how JAX runs it.
* The CUDA plugin refuses to load without NVIDIA's libraries unless `JAX_PLATFORMS` leaves out CUDA
  or `JAX_SKIP_CUDA_CONSTRAINTS_CHECK` is set. JAX tries to load it once per process,
  when it first looks for devices.

Known limits: slices of several pods, and more than one kind of device in a target.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from remat import _jax
from remat.aliases import Leaf, PyTree
from remat.errors import PlanError, closest
from remat.program.devices import DEVICES, Device, device, kind_of

_GRAMMAR = (
    "A target is None (the devices of this process), 'cpu', 'gpu', 'tpu', 'tpu:VERSION:AxB[xC]' such as "
    "'tpu:v5e:16x16', or 'gpu:MODEL[:1x1xN]' such as 'gpu:h100:1x1x4'."
)
_PLATFORMS = ("cpu", "gpu", "tpu")


@dataclasses.dataclass(frozen=True)
class Target:
    """The devices that a program is planned and compiled for.

    Args:
      name: as given, such as `"tpu:v5e:16x16"`; the platform for the devices of this process.
      device: figures of one device.
      devices: JAX's devices, in JAX's order; those of a topology if described ahead of time.
      ahead_of_time: whether the devices are only described: programs can be compiled, not run.
    """

    name: str
    device: Device
    devices: tuple[jax.Device, ...]
    ahead_of_time: bool

    @property
    def platform(self) -> str:
        """Return the platform: "cpu", "gpu" or "tpu"."""
        return self.device.platform

    @property
    def kind(self) -> str:
        """Return the kind of the devices: the name of their figures, or JAX's if there are none."""
        return self.device.name if self.ahead_of_time else kind_of(self.devices[0].device_kind)

    @property
    def can_offload(self) -> bool:
        """Return whether plans may keep values of loops in the host's memory.

        They may not on GPUs, where XLA has compiled scans with offloaded residuals to silently wrong
        gradients (openxla/xla#46231); no released jaxlib is known to have this fixed.
        """
        return self.device.has_host_memory and self.platform != "gpu"

    @property
    def n_devices(self) -> int:
        return len(self.devices)

    def mesh(self, shape: Sequence[int], axis_names: Sequence[str]) -> Mesh:
        """Return a mesh of the target's devices, to make shardings with.

        >>> dict(target("cpu").mesh((1, 1), ("data", "model")).shape)
        {'data': 1, 'model': 1}

        Args:
          shape: the sizes of the axes; their product is at most the number of devices. A mesh of all
            devices is laid out along the target's links, as `jax.make_mesh` does.
          axis_names: as many names.

        Raises:
          PlanError: the shape does not fit the devices, their links or the names.
        """
        shape, names = tuple(shape), tuple(axis_names)
        if not all(isinstance(size, int | np.integer) and size > 0 for size in shape):
            raise PlanError(f"a mesh's axes have whole sizes of at least 1, not {shape}.")
        if len(shape) != len(names):
            raise PlanError(f"a mesh of shape {shape} needs {len(shape)} axis names, not {names}.")
        if len(set(names)) != len(names):
            raise PlanError(f"a mesh needs axis names that differ, not {names}.")
        size = _fitting_size(shape, self)
        if size == self.n_devices and self.ahead_of_time:
            description = topologies.TopologyDescription(list(self.devices))
            try:
                return topologies.make_mesh(description, shape, names)
            except NotImplementedError as error:
                raise PlanError(self._mesh_problem(shape)) from error
        return Mesh(np.array(self.devices[:size], dtype=object).reshape(shape), names)

    def _mesh_problem(self, shape: tuple[int, ...]) -> str:
        """Return why JAX makes no mesh of this shape: an axis must consist of whole physical axes."""
        largest = np.max(
            [getattr(d, "coords", (self.n_devices - 1,)) for d in self.devices], axis=0
        )
        sizes = [int(last) + 1 for last in largest if last] or [1]
        first, *rest = sizes + [1] * (len(shape) - len(sizes))
        n_first = len(rest) + 2 - len(shape)  # physical axes that the first axis of the mesh takes
        possible = (first * math.prod(rest[: n_first - 1]), *rest[n_first - 1 :])
        return (
            f"JAX does not lay out a mesh of shape {shape} along the links of {self.name!r}: the size of "
            f"each axis must be a product of some of {'x'.join(map(str, sizes))}, such as {possible}. "
            "For another order of devices, make a jax.sharding.Mesh of target.devices."
        )

    def __repr__(self) -> str:
        where = "ahead of time" if self.ahead_of_time else "present"
        return f"Target({self.name!r}, {self.n_devices} x {self.device.name}, {where})"


def target(name: str | Target | None = None) -> Target:
    """Return the target of a name; the module's docstring has the grammar.

    >>> target("cpu").platform
    'cpu'

    Raises:
      PlanError: the name is malformed or its device unknown; the compiler for it is not installed; or
        the compiler does not know the shape.
    """
    if isinstance(name, Target):
        return name
    if name is None or name == "":
        return _at_hand(None)
    check_name(name)
    platform, *rest = name.split(":")
    if not rest:
        return _at_hand(platform)
    return _described(name, platform, rest[0], rest[1] if len(rest) == 2 else None)


def check_name(name: str) -> None:
    """Check that a target's name is well-formed and names a known device, without asking JAX.

    Raises:
      PlanError: it is not; the message says why and has the grammar of targets.
    """
    if not isinstance(name, str):
        raise PlanError(f"{name!r} is not a target. {_GRAMMAR}")
    platform, *rest = name.split(":")
    if platform not in _PLATFORMS:
        # A name that is only a model, "v5e:2x2", gets its platform.
        known = [f"{d.platform}:{d.name}" for d in DEVICES.values() if d.platform != "cpu"]
        near = next((k for k in known if k.split(":")[1] == platform), None)
        hint = f"did you mean {':'.join([near, *rest])!r}?" if near else closest(platform, known)
        raise PlanError(f"target {name!r}: unknown platform {platform!r}; {hint} {_GRAMMAR}")
    if not rest:
        return
    models = [d.name for d in DEVICES.values() if d.platform == platform]
    if platform == "cpu" or len(rest) > 2:
        raise PlanError(f"target {name!r} has too many parts. {_GRAMMAR}")
    if rest[0] not in models:
        raise PlanError(
            f"target {name!r}: unknown {platform.upper()} {rest[0]!r}; "
            f"{closest(rest[0], models)} {_GRAMMAR}"
        )
    _sizes(name, platform, rest[1] if len(rest) == 2 else None)


def _at_hand(platform: str | None) -> Target:
    try:
        devices = tuple(jax.devices(platform))
    except RuntimeError as error:
        raise PlanError(
            f"this process has no {str(platform).upper()} (JAX: {str(error).splitlines()[0]}). "
            "Name a model to compile ahead of time: " + _GRAMMAR
        ) from error
    first = devices[0]
    figures = device(first.device_kind, platform=first.platform)
    limit = _limit_bytes(first)
    if limit is not None:
        figures = dataclasses.replace(figures, memory_bytes=limit)
    return Target(first.platform, figures, devices, ahead_of_time=False)


def _limit_bytes(at_hand: jax.Device) -> int | None:
    """Return the bytes that a present device's allocator may use, if it reports them."""
    stats = at_hand.memory_stats() if at_hand.platform != "cpu" else None
    return int(stats["bytes_limit"]) if stats and stats.get("bytes_limit") else None


# Devices described ahead of time

# The environment in which libtpu describes devices without looking for any. TPU_ACCELERATOR_TYPE is the
# machine that libtpu assumes to run on, not the one that it compiles for.
QUIET_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_QUIET_CUDA = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_N_CHIPS = re.compile(r"[1-9][0-9]{0,4}(x[1-9][0-9]{0,4}){1,2}")
_N_GPUS = re.compile(r"[1-9][0-9]{0,4}(x[1-9][0-9]{0,4}x[1-9][0-9]{0,4})?")
_MOST_DEVICES = 65536  # devices that JAX and libtpu can describe


@functools.lru_cache(maxsize=64)
def _described(name: str, platform: str, model: str, shape: str | None) -> Target:
    # Cached, so that two targets of one name have the same devices and equal shardings.
    figures = DEVICES[model]
    describe = _tpu_devices if platform == "tpu" else _gpu_devices
    devices = describe(name, figures, _sizes(name, platform, shape))
    return Target(name, figures, devices, ahead_of_time=True)


def _sizes(name: str, platform: str, shape: str | None) -> list[int]:
    pattern = _N_CHIPS if platform == "tpu" else _N_GPUS
    if shape is not None and not pattern.fullmatch(shape):
        raise PlanError(
            f"target {name!r}: {shape!r} is not a shape of a {platform.upper()}. {_GRAMMAR}"
        )
    sizes = [int(size) for size in shape.split("x")] if shape else [1, 1]
    if math.prod(sizes) > _MOST_DEVICES:
        raise PlanError(
            f"target {name!r} has {math.prod(sizes)} devices, more than {_MOST_DEVICES}."
        )
    return sizes


def _tpu_devices(name: str, figures: Device, sizes: list[int]) -> tuple[jax.Device, ...]:
    options: dict[str, Any] = dict(figures.topology_options)
    if any(size % 2 for size in sizes[:2]):
        options["chips_per_host_bounds"] = (math.gcd(sizes[0], 2), math.gcd(sizes[1], 2), 1)
    topology = f"{figures.name}:{'x'.join(map(str, sizes))}"
    with _environment(QUIET_LIBTPU):
        try:
            description = topologies.get_topology_desc(topology, platform="tpu", **options)
        except jax.errors.JaxRuntimeError as error:
            raise PlanError(_tpu_problem(name, str(error))) from error
        except RuntimeError as error:  # no libtpu
            raise PlanError(
                f"target {name!r} needs libtpu to compile, which is not installed. "
                f'pip install "jax[tpu]=={jax.__version__}" (no TPU is needed).'
            ) from error
    return tuple(description.devices)


def _tpu_problem(name: str, text: str) -> str:
    if "lockfile" in text:
        return (
            f"target {name!r}: another process has loaded libtpu, and ALLOW_MULTIPLE_LIBTPU_LOAD is "
            f"set to {os.environ.get('ALLOW_MULTIPLE_LIBTPU_LOAD')!r}. Unset it, or set it to 1, to "
            "compile ahead of time beside that process."
        )
    return f"target {name!r}: libtpu does not know this topology: {text.splitlines()[0]} {_GRAMMAR}"


def _gpu_devices(name: str, figures: Device, sizes: list[int]) -> tuple[jax.Device, ...]:
    sizes = [1] * (3 - len(sizes)) + sizes
    config = resources.files("remat.program") / f"targets_{figures.name}.textproto"
    if not config.is_file():
        described = [d.name for d in DEVICES.values() if d.platform == "gpu" and d is not figures]
        raise PlanError(
            f"target {name!r}: there is no remat/program/{config.name}, from which XLA knows "
            f"this GPU without having one. Plan on the GPU itself (target=None), for one of "
            f"{', '.join(described)}, or add that file."
        )
    with _environment(_QUIET_CUDA):
        try:
            description = topologies.get_topology_desc(
                figures.name,
                platform="cuda",
                target_config=config.read_text(encoding="utf-8"),
                topology="x".join(map(str, sizes)),
            )
        except NotImplementedError as error:
            raise PlanError(
                f"target {name!r} needs JAX's CUDA plugin to compile, which was not found. "
                f"pip install --no-deps jax-cuda12-plugin=={jax.__version__} "
                f"jax-cuda12-pjrt=={jax.__version__} (no GPU or driver is needed). If they are "
                "installed, JAX looked for devices before this call and discarded the plugin: "
                "set JAX_PLATFORMS=cpu."
            ) from error
        except jax.errors.JaxRuntimeError as error:
            problem = str(error).splitlines()[0]
            raise PlanError(f"target {name!r}: XLA refuses it: {problem} {_GRAMMAR}") from error
    return tuple(description.devices)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables that are unset, until the context ends."""
    ours = {key: value for key, value in variables.items() if key not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for key in ours:
            os.environ.pop(key, None)


# Arguments


def place(args: PyTree, target: Target) -> PyTree:
    """Return the arguments to lower with: arrays as structs on the target's devices.

    For present devices the arguments are returned as they are. Ahead of time, for each leaf:

    * a `NamedSharding` on a mesh of the target's devices is kept;
    * a `NamedSharding` on other devices, or on an abstract mesh, moves to a mesh of the same shape
      and axis names of the target's devices;
    * any other array is replicated over that mesh, or placed on the target's first device if no leaf
      has one;
    * other leaves (a Python number, a string) stay unchanged: they may be static arguments.

    >>> import jax.numpy as jnp
    >>> place({"x": jnp.ones(3), "n": 2}, target("cpu"))
    {'x': Array([1., 1., 1.], dtype=float32), 'n': 2}

    Raises:
      PlanError: a mesh is larger than the target, or two meshes have different devices.
    """
    if not target.ahead_of_time:
        return args
    leaves, tree = jax.tree.flatten(args)
    moved = [_on_target(getattr(leaf, "sharding", None), target) for leaf in leaves]
    meshes = [sharding.mesh for sharding in moved if sharding is not None]
    for mesh in meshes:
        if set(mesh.devices.flat) != set(meshes[0].devices.flat):
            raise PlanError(
                f"arguments are sharded over different devices of {target.name!r}: meshes of shape "
                f"{dict(meshes[0].shape)} and {dict(mesh.shape)}. Use meshes of the same devices."
            )
    placed = [
        _struct(leaf, sharding or _unsharded(leaf, meshes, target)) if _is_array(leaf) else leaf
        for leaf, sharding in zip(leaves, moved)
    ]
    return jax.tree.unflatten(tree, placed)


def _is_array(leaf: Leaf) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _on_target(sharding: jax.sharding.Sharding | None, target: Target) -> NamedSharding | None:
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    mesh = sharding.mesh
    if isinstance(mesh, Mesh) and set(mesh.devices.flat) <= set(target.devices):
        return sharding
    size = _fitting_size(tuple(mesh.shape.values()), target)
    shape = tuple(mesh.shape.values())
    devices = np.array(target.devices[:size], dtype=object).reshape(shape)
    ours = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
    return NamedSharding(ours, sharding.spec, memory_kind=_memory_kind(sharding))


def _unsharded(leaf: Leaf, meshes: Sequence[Mesh], target: Target) -> PyTree:
    kind = _memory_kind(getattr(leaf, "sharding", None))
    if meshes:
        return NamedSharding(meshes[0], PartitionSpec(), memory_kind=kind)
    return SingleDeviceSharding(target.devices[0], memory_kind=kind)


def _memory_kind(sharding: jax.sharding.Sharding | None) -> str | None:
    """Return `pinned_host` if the sharding asks for it; other kinds are a device's default."""
    kind = getattr(sharding, "memory_kind", None)
    return kind if kind == "pinned_host" else None


def _struct(leaf: Leaf, sharding: jax.sharding.Sharding | None) -> jax.ShapeDtypeStruct:
    aval = _jax.abstractify(leaf)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=bool(getattr(aval, "weak_type", False))
    )


def _fitting_size(shape: tuple[int, ...], target: Target) -> int:
    size = math.prod(shape)
    if not 0 < size <= target.n_devices:
        raise PlanError(
            f"a mesh of shape {shape} has {size} devices and the target {target.name!r} has "
            f"{target.n_devices}. Name a larger target or make the mesh smaller."
        )
    return size


def n_shards(shape: Sequence[int], sharding: jax.sharding.Sharding) -> int:
    """Return the shard count of an array; replicas do not count.

    Raises:
      ValueError: the sharding does not fit the shape.
    """
    whole, part = math.prod(shape), math.prod(sharding.shard_shape(tuple(shape)))
    return max(1, whole // max(part, 1))
