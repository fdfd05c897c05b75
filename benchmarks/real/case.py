"""The cases of the corpus, and the ways in which users place checkpoints in the code of a package.

A case is a step of an unmodified package, its arguments, and the steps that a user of the package would write
to save memory: with the package's own options, with `jax.checkpoint` on each layer or scan body, or around
the whole loss. To place a checkpoint inside a package, one of its functions is replaced while the step is
traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from unittest import mock

import jax

Step: TypeAlias = Callable[..., Any]
Wrap: TypeAlias = Callable[[Callable], Callable]

POLICIES: Mapping[str, Any] = {
    "nothing": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots, no batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@dataclass(frozen=True)
class Case:
    """A step of a package.

    Attributes:
      step: the step as the package's users write it, with nothing marked.
      args: arrays to call it with.
      alternatives: steps with the same results that need less memory, by label.
    """

    step: Step
    args: tuple[Any, ...]
    alternatives: Mapping[str, Step] = field(default_factory=dict)


def unchanged(fun: Callable) -> Callable:
    """Return the function unchanged."""
    return fun


def checkpoints() -> Iterator[tuple[str, Wrap]]:
    """Yield `jax.checkpoint` with each of the policies of `POLICIES`, by label."""
    for label, policy in POLICIES.items():
        yield label, functools.partial(jax.checkpoint, policy=policy)


def whole(make: Callable[[Wrap], Step]) -> dict[str, Step]:
    """Return the steps that wrap the whole loss; `make` takes the function that wraps it."""
    labels = ("nothing", "dots")
    return {f"whole loss, {label}": make(w) for label, w in checkpoints() if label in labels}


def replaced(step: Step, owner: Any, name: str, replace: Wrap) -> Step:
    """Return a step during whose tracing `owner.name` is replaced."""

    @functools.wraps(step)
    def traced(*args: Any) -> Any:
        with mock.patch.object(owner, name, replace(getattr(owner, name))):
            return step(*args)

    return traced


def layers(step: Step, owner: Any, name: str = "__call__", *, wrap: Any = None) -> dict[str, Step]:
    """Return the steps in which every call of a layer is checkpointed.

    Args:
      step: the step without checkpoints.
      owner: the class of the layers, or a module.
      name: the method, or the function in the module.
      wrap: returns for a policy the function that wraps the method; by default `jax.checkpoint` of the array
        arguments.
    """
    wrap = wrap or (lambda policy: functools.partial(on_arrays, policy=policy))
    return {
        f"each {getattr(owner, '__name__', name).rsplit('.')[-1]}, {label}": replaced(
            step, owner, name, wrap(policy)
        )
        for label, policy in POLICIES.items()
    }


def on_arrays(fun: Callable, *, policy: Any = None) -> Callable:
    """Return the function with `jax.checkpoint` applied to the arrays among its arguments.

    All other arguments (modules that have only methods, flags, None, strings) are closed over.
    """

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        is_array = [isinstance(leaf, jax.Array) for leaf in leaves]
        arrays = [leaf for leaf, array in zip(leaves, is_array) if array]
        results: list[Any] = []

        def inner(arrays: list[Any]) -> list[Any]:
            given = iter(arrays)
            full = [next(given) if array else leaf for leaf, array in zip(leaves, is_array)]
            args, kwargs = jax.tree.unflatten(structure, full)
            outs, tree = jax.tree.flatten(fun(*args, **kwargs))
            array_outs = [isinstance(out, jax.Array) for out in outs]
            results[:] = [tree, array_outs, [o for o, a in zip(outs, array_outs) if not a]]
            return [out for out, array in zip(outs, array_outs) if array]

        computed = iter(jax.checkpoint(inner, policy=policy)(arrays))
        tree, array_outs, others = results
        static = iter(others)
        return jax.tree.unflatten(
            tree, [next(computed) if array else next(static) for array in array_outs]
        )

    return call


def scan_bodies(step: Step, *, group: int | None = None, owner: Any = jax.lax) -> dict[str, Step]:
    """Return the steps in which the body of every `owner.scan` is checkpointed.

    With `group`, one more step checkpoints groups of that many iterations, as a nested scan does.
    """
    made = {
        f"scan bodies, {label}": replaced(step, owner, "scan", _body_wrapper(wrap))
        for label, wrap in checkpoints()
    }
    if group:
        made[f"scans in groups of {group}"] = replaced(step, owner, "scan", _grouped(group))
    return made


def _body_wrapper(wrap: Wrap) -> Wrap:
    def replace(scan: Callable) -> Callable:
        @functools.wraps(scan)
        def checkpointed(f: Callable, *args: Any, **kwargs: Any) -> Any:
            return scan(wrap(f), *args, **kwargs)

        return checkpointed

    return replace


def _grouped(group: int) -> Wrap:
    """Replace a scan whose length is a multiple of `group` by a scan of checkpointed scans."""

    def replace(scan: Callable) -> Callable:
        @functools.wraps(scan)
        def nested(f, init, xs=None, length=None, reverse=False, **options):
            leaves = jax.tree.leaves(xs)
            n = leaves[0].shape[0] if leaves else length
            if n % group or n == group:
                return scan(f, init, xs, length, reverse, **options)
            split = jax.tree.map(lambda x: x.reshape(n // group, group, *x.shape[1:]), xs)
            inner = jax.checkpoint(
                lambda carry, xs: scan(jax.checkpoint(f), carry, xs, group, reverse, **options)
            )
            carry, ys = scan(inner, init, split, n // group, reverse)
            return carry, jax.tree.map(lambda y: y.reshape(n, *y.shape[2:]), ys)

        return nested

    return replace
