"""Steps whose optimizer state, or weights, stay in the host's memory between and during calls.

The user writes the step for arrays on the device. A *hosted* step takes and returns this state in the host's
memory and updates it chunk by chunk (`host_updates`). It is planned like any other step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from remat import _jax
from remat.aliases import Leaf, PyTree, Sharding
from remat.errors import PlanError, closest
from remat.planner.host_updates import (
    OPTIMIZER as OPTIMIZER,
    WEIGHTS as WEIGHTS,
    check_updates,
    copied_bytes,
    find_updates,
    with_state_on_host,
)
from remat.planner.rewrite import traced_flat
from remat.planner.step import TargetStep
from remat.printing import shown
from remat.program.targets import Target, place

_jax.exclude_from_tracebacks(__file__)

ACTIVATIONS = "activations"
_KINDS = (ACTIVATIONS, OPTIMIZER, WEIGHTS)
_HOST = "pinned_host"


def parse_offload(offload: object) -> frozenset[str]:
    """Return the kinds of values that an option `offload=` allows in the host's memory.

    >>> sorted(parse_offload("activations|optimizer")), sorted(parse_offload(True))
    (['activations', 'optimizer'], ['activations'])

    Raises:
      PlanError: the option is invalid; the message lists the possible values.
    """
    if isinstance(offload, bool):
        return frozenset({ACTIVATIONS} if offload else ())
    if not isinstance(offload, str):
        raise PlanError(f"offload={shown(offload)} must be True, False or a text. {_POSSIBLE}")
    names = frozenset(name.strip() for name in offload.split("|"))
    unknown = sorted(names.difference(_KINDS))
    if unknown:
        near = closest(unknown[0], _KINDS)
        raise PlanError(f"offload={shown(offload)}: unknown {unknown[0]!r}; {near} {_POSSIBLE}")
    return names


_POSSIBLE = (
    "Possible are 'activations' (as True), 'optimizer' and 'weights', and several of them joined as in "
    "'activations|optimizer'."
)


def state_kinds(offload: object) -> frozenset[str]:
    """Return those of the kinds that an option `offload=` allows which are arguments of the step."""
    return parse_offload(offload) - {ACTIVATIONS}


@dataclasses.dataclass(frozen=True)
class HostState:
    """Which arguments of a step are state in the host's memory, and how they are sharded.

    Args:
      leaves: counted as leaves of all arguments that are not static.
      shardings: of these leaves, in the device's memory.
      donated: all donated leaves.
      positions: the places of the leaves among those of all arguments.
      copied_bytes: what one device copies to its host and back in one step.
    """

    leaves: tuple[int, ...]
    shardings: tuple[Sharding, ...]
    donated: tuple[int, ...]
    positions: tuple[int, ...]
    copied_bytes: int

    def only(self, leaves: Iterable[int]) -> HostState:
        """Return the state of these leaves alone.

        Raises:
          PlanError: some of them are not state.
        """
        wanted = tuple(leaves)
        check_updates(self.leaves, wanted)
        kept = [self.leaves.index(leaf) for leaf in wanted]
        shardings, positions = (
            tuple(of[k] for k in kept) for of in (self.shardings, self.positions)
        )
        return dataclasses.replace(self, leaves=wanted, shardings=shardings, positions=positions)

    def is_moved(self, args: tuple, kwargs: Mapping[str, PyTree]) -> bool:
        """Return whether the state is in the host's memory."""
        leaves = jax.tree.leaves((args, dict(kwargs)))
        kinds = (getattr(leaves[at], "sharding", None) for at in self.positions)
        return all(getattr(sharding, "memory_kind", None) == _HOST for sharding in kinds)

    def moved(
        self, args: tuple, kwargs: Mapping[str, PyTree], target: Target
    ) -> tuple[tuple, dict[str, PyTree]]:
        """Return arguments with the state in the host's memory: arrays are copied, types get its kind."""
        leaves, tree = jax.tree.flatten(place((args, dict(kwargs)), target))
        for at in self.positions:
            leaves[at] = _in_memory(leaves[at], _HOST, target)
        # The mesh of the state may be the only one: planning places all arguments on it.
        moved: tuple[tuple, dict[str, PyTree]] = place(jax.tree.unflatten(tree, leaves), target)
        return moved

    def hosted(self, step: Callable) -> Callable:
        """Return the step as one that takes and returns its state in the host's memory.

        Call it under `jax.jit` only.
        """
        shardings = dict(zip(self.leaves, self.shardings))

        @_jax.wraps(step)
        def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
            found = traced_flat(step, args, kwargs, self.donated, on_device=self.leaves)
            n_consts = len(found.consts)
            here = {n_consts + leaf: sharding for leaf, sharding in shardings.items()}
            donated = [n_consts + leaf for leaf in self.donated]
            updates = find_updates(found.jaxpr, donated, here, _n_devices(self.shardings))
            check_updates([at for u in updates for at in u.leaves], here)
            new = with_state_on_host(found.jaxpr, updates, donated, here)
            return found.called(new)

        return run


def find_host_state(
    step: Callable,
    args: tuple,
    kwargs: Mapping[str, PyTree],
    target: Target,
    jit_options: Mapping[str, Any],
    kinds: Collection[str] = (OPTIMIZER,),
) -> HostState:
    """Return the optimizer state and the weights of a step that can stay in the host's memory.

    Args:
      step, args, kwargs, jit_options: the step, its arguments, and its options of `jax.jit`.
      target: the device to plan for.
      kinds: which of the two, `OPTIMIZER` and `WEIGHTS`.

    Raises:
      PlanError: the target has no host memory for it, or there is no such state.
    """
    if not target.can_offload:
        raise PlanError(
            f"offload={_text(kinds)} needs memory of the host that {target.name!r} can copy from and to: a "
            "TPU's. Leave it out."
        )
    args, kwargs = jax.tree.map(type_on_device, (args, dict(kwargs)))
    traced = TargetStep(step, args, kwargs, target, jit_options).trace()
    jaxpr, n_consts = traced.flat, len(traced.consts)
    shardings = {
        n_consts + leaf: sharding
        for leaf, sharding in enumerate(traced.argument_shardings())
        if leaf in set(traced.donated)
    }
    n_devices = traced.made_for().n_devices
    updates = find_updates(jaxpr, shardings, shardings, n_devices, kinds)
    leaves = sorted(at - n_consts for update in updates for at in update.leaves)
    if not leaves:
        found = " and ".join(_FOUND[kind] for kind in sorted(kinds))
        raise PlanError(
            f"offload={_text(kinds)} found {found}. Donate the arguments that the step replaces "
            f"(donate_argnums=), or leave {_text(kinds)} out."
        )
    return HostState(
        tuple(leaves),
        tuple(shardings[n_consts + leaf] for leaf in leaves),
        traced.donated,
        tuple(traced.positions[leaf] for leaf in leaves),
        copied_bytes(jaxpr, updates, shardings),
    )


_FOUND = {
    OPTIMIZER: "no optimizer state: no donated array of at least 1 MiB per device and two dimensions that "
    "the step only updates elementwise",
    WEIGHTS: "no weights: no such array that loops read slice by slice besides",
}


def _text(kinds: Iterable[str]) -> str:
    return repr("|".join(sorted(kinds)))


def _n_devices(shardings: Iterable[Sharding]) -> int:
    return max(len(sharding.device_set) for sharding in shardings)


def _in_memory(leaf: Leaf, kind: str | None, target: Target) -> Leaf:
    """Return an array or type in memory of a kind; None for the device's own."""
    sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(target.devices[0])
    if getattr(leaf, "sharding", None) is not None and sharding.memory_kind == kind:
        return leaf
    if isinstance(sharding, SingleDeviceSharding):
        # JAX sees the kind of memory in the types of arrays that are sharded over a mesh alone.
        mesh = Mesh(np.array(list(sharding.device_set)), ("device",))
        sharding = NamedSharding(mesh, PartitionSpec())
    moved = sharding.with_memory_kind(kind)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=moved, weak_type=bool(leaf.weak_type)
        )
    # The step would donate the array, and the device's memory may not hold both.
    return jax.device_put(leaf, moved, donate=isinstance(leaf, jax.Array))


def type_on_device(leaf: Leaf) -> Leaf:
    """Return the type on the device of an array or type in the host's memory; any other leaf unchanged."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or sharding.memory_kind != _HOST:
        return leaf
    moved = sharding.with_memory_kind(None)
    weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=moved, weak_type=weak)
