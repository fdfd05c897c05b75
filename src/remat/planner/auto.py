"""`remat.auto`: marking a function inside of which a plan may recompute.

A marked function is called as it is. Only while the planner, or a step that follows a plan, traces
(`tracing`), its equations get a name scope (`_jax.marked_scope`), from which `ir.restriction` reads what may
be computed again. The context is part of the keys of JAX's caches (`jax.make_user_context`), so nothing
that is traced with marks is used without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import jax

from remat import _jax
from remat.marked import note

_jax.exclude_from_tracebacks(__file__)

P = ParamSpec("P")
R = TypeVar("R")

#: `WITH_MARKS` or `WITHOUT_MARKS` in a step that is planned or follows a plan, else None.
tracing = jax.make_user_context(None)
WITH_MARKS, WITHOUT_MARKS = "with marks", "without marks"


@overload
def auto(fun: Callable[P, R], /, *, name: str | None = ...) -> Callable[P, R]: ...


@overload
def auto(
    fun: None = None, /, *, name: str | None = ...
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def auto(fun: Callable | None = None, /, *, name: str | None = None) -> Callable:
    """Mark a function, so that a plan recomputes only inside of marked functions.

    By itself it changes nothing, and a step needs no marks: where none of its functions is marked,
    `remat.fit` and `remat.plan` may recompute any operation. Where some are, they recompute operations of
    these and of their derivatives, however the functions are differentiated, vectorized or looped over.
    All else stays as it is written: what loops keep, and checkpoints. Checkpoints inside are left to the
    planner.

    >>> import jax, jax.numpy as jnp, remat
    >>> @remat.auto
    ... def layer(w, x):
    ...     return jnp.tanh(x @ w)
    >>> def loss(w, x):
    ...     for _ in range(8):
    ...         x = layer(w, x)
    ...     return jnp.sin(x).sum()
    >>> w, x = jnp.eye(64), jnp.ones((1000, 64))
    >>> step = remat.fit(jax.value_and_grad(loss), budget="70%")
    >>> value, gradient = step(w, x)
    >>> step.plan(w, x).peak_bytes <= 0.7 * step.plan(w, x).peak_bytes_without_remat
    True

    Args:
      fun: the function.
      name: what messages call it; the function's name by default.
    """
    if fun is None:
        return lambda f: auto(f, name=name)
    if not callable(fun):
        raise TypeError(f"remat.auto takes a function, not {fun!r}.")
    called = name or str(getattr(fun, "__qualname__", type(fun).__qualname__))

    @_jax.wraps(fun)
    def marked(*args: Any, **kwargs: Any) -> Any:
        note(called)
        if tracing.value != WITH_MARKS:
            return fun(*args, **kwargs)
        with _jax.marked_scope(called):
            return fun(*args, **kwargs)

    return marked
