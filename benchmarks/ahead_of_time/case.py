"""The cases of the ahead-of-time benchmark, and the alternatives that people write by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks.zoo.model import unchanged
from remat.errors import PlanError
from remat.program.targets import Target

Wrap: TypeAlias = Callable[[Callable], Callable]

#: The policies of checkpoints around each natural block, by label.
POLICIES: Mapping[str, Any] = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots, no batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@dataclass(frozen=True)
class Case:
    """A training step for devices that are not attached.

    Attributes:
      build: returns the step for a transformation of its natural blocks.
      args: types with shardings on the target.
      options: of `jax.jit`.
      blocks: further transformations of the blocks, by label.
      budgets: for each plan, bytes as text or a share of the peak without rematerialization.
    """

    build: Callable[[Wrap], Callable]
    args: tuple[Any, ...]
    budgets: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    blocks: Mapping[str, Wrap] = field(default_factory=dict)

    @property
    def step(self) -> Callable:
        """Return the step with nothing marked."""
        return self.build(unchanged)

    @property
    def alternatives(self) -> dict[str, Callable]:
        """Return the steps with a checkpoint around each block, by label."""
        wraps: dict[str, Wrap] = {
            label: functools.partial(jax.checkpoint, policy=policy)
            for label, policy in POLICIES.items()
        }
        return {label: self.build(wrap) for label, wrap in {**wraps, **self.blocks}.items()}


def keeping(*names: str) -> Wrap:
    """Return a checkpoint that keeps the values of these names."""
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return functools.partial(jax.checkpoint, policy=policy)


def typed(mesh: Mesh, shape: tuple[int, ...], spec: P, dtype: Any = jnp.float32) -> Any:
    """Return an array's type, sharded over a mesh."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def float_types(shapes: Any) -> Any:
    """Return the types of float32 arrays of these shapes, a pytree of tuples."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def fully_sharded(tree: Any, mesh: Mesh, axis: str = "data") -> Any:
    """Return types each sharded along the first of its dimensions that the axis divides (FSDP)."""
    n = mesh.shape[axis]

    def of(leaf: Any) -> Any:
        spec: list[str | None] = [None] * len(leaf.shape)
        divisible = [i for i, size in enumerate(leaf.shape) if size % n == 0]
        if divisible:
            spec[divisible[0]] = axis
        return typed(mesh, leaf.shape, P(*spec), leaf.dtype)

    return jax.tree.map(of, tree)


def constrained(mesh: Mesh, *axes: Any) -> Callable[[jax.Array], jax.Array]:
    """Return a function that constrains how a value is sharded."""
    sharding = NamedSharding(mesh, P(*axes))
    return lambda x: jax.lax.with_sharding_constraint(x, sharding)


def mesh_of(target: Target, **axes: int) -> Mesh:
    """Return a mesh of the target's devices with axes of these names and sizes.

    If the axes do not follow the links, devices that follow one another are neighbours on the last axis.
    """
    shape, names = tuple(axes.values()), tuple(axes)
    try:
        return target.mesh(shape, names)
    except PlanError:
        return Mesh(np.array(target.devices).reshape(shape), names)


def adam_state(params: Any) -> tuple[Any, Any, Any]:
    """Return the types of parameters, moments and step number, sharded as the parameters are."""
    return params, (params, params), jax.ShapeDtypeStruct((), jnp.int32)
