"""`remat.haiku.remat`: the signature of `haiku.remat`.

Inside `hk.transform` a function has hidden inputs and outputs: parameters, state and the stream of
random keys. Haiku's own wrapper for JAX transformations passes them to the transformed function as an
additional argument and writes back changes. Here it wraps `remat.checkpoint`.

Like Haiku's own, this traces the function in each call, since it may create modules, whose names and
parameters Haiku records while the function runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from haiku._src.stateful import thread_hk_state_in_kwargs

from remat import _jax
from remat.aliases import PolicyLike, PyTree
from remat.errors import TargetError
from remat.transform.checkpoint import checkpoint

__all__ = ["remat"]

_jax.exclude_from_tracebacks(__file__)


def __dir__() -> list[str]:
    return sorted(__all__)


def _checkpoint_untraced(fun: Callable, **options: Any) -> Callable:
    """Return a checkpointed function that is traced in each call, without a cache."""

    @_jax.api_boundary
    @functools.wraps(fun)
    def checkpointed(*args: PyTree, **kwargs: PyTree) -> PyTree:
        @functools.wraps(fun)
        def fresh(*args: PyTree, **kwargs: PyTree) -> PyTree:
            return fun(*args, **kwargs)

        return checkpoint(fresh, **options)(*args, **kwargs)

    return checkpointed


def _named(fun: Callable) -> Callable:
    """Return a function with a `__name__`, which Haiku's wrapper copies and a module lacks."""
    if hasattr(fun, "__name__"):
        return fun

    @functools.wraps(fun, updated=())
    def named(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return fun(*args, **kwargs)

    named.__name__ = named.__qualname__ = type(fun).__name__
    return named


# Haiku's error message names the wrapped function.
_checkpoint_untraced.__name__ = "remat"
_with_haiku_state = thread_hk_state_in_kwargs(_checkpoint_untraced)


def remat(
    fun: Callable,
    *,
    concrete: bool = False,
    prevent_cse: bool = True,
    policy: PolicyLike = None,
    static_argnums: int | tuple[int, ...] = (),
    static_argnames: str | tuple[str, ...] = (),
) -> Callable:
    """Make a function or module recompute its linearization points, inside `hk.transform`.

    >>> import haiku as hk, jax, jax.numpy as jnp
    >>> import remat.haiku
    >>> @hk.transform
    ... def f(x):
    ...     return remat.haiku.remat(hk.nets.MLP([8, 1]))(x).sum()
    >>> x = jnp.ones((4, 2))
    >>> params = f.init(jax.random.key(0), x)
    >>> jax.grad(f.apply)(params, None, x)["mlp/~/linear_0"]["w"].shape
    (2, 8)

    Args:
      fun: a function or a module. The Haiku parameters, state and random keys that it reads or changes
        pass through the region.
      concrete, prevent_cse, policy, static_argnums, static_argnames: as in `remat.checkpoint`.

    Returns:
      A function with the arguments, results and updates of `fun`.

    Raises:
      TargetError: `fun` is not callable.
      ValueError: outside `hk.transform`.
      StaticArgumentError, PolicyError, EffectError: as for `remat.checkpoint`.
    """
    if not callable(fun):
        raise TargetError(f"remat.haiku.remat takes a function or a module, not {fun!r}.")
    return _with_haiku_state(
        _named(fun),
        concrete=concrete,
        prevent_cse=prevent_cse,
        policy=policy,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
    )
