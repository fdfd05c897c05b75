"""`remat.auto`: marking functions to which recomputation is restricted.

A marked function is called unchanged. Only in traces of the planner, and of steps that follow a plan
(`tracing`), do its equations get a name scope (`_jax.marked_scope`), from which `ir.restriction` derives
what may be recomputed. The context is part of the keys of JAX's caches (`jax.make_user_context`), so a
trace with marks is never reused without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, overload

import jax

from remat import _jax
from remat.aliases import PyTree
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

    By itself it changes nothing, and a step needs no marks: if none of its functions is marked,
    `remat.fit` and `remat.plan` may recompute any operation. If some are, only operations of these and of
    their derivatives are recomputed, however the functions are differentiated, vectorized or looped over.
    Everything outside of them stays as it is written, the residuals of loops and checkpoints included.
    Checkpoints inside of them are left to the planner.

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
      name: its name in messages; by default the function's.
    """
    if fun is None:
        return lambda f: auto(f, name=name)
    if not callable(fun):
        raise TypeError(f"remat.auto takes a function, not {fun!r}.")
    called = name or str(getattr(fun, "__qualname__", type(fun).__qualname__))

    @_jax.wraps(fun)
    def marked(*args: PyTree, **kwargs: PyTree) -> PyTree:
        note(called)
        if tracing.value != WITH_MARKS:
            return fun(*args, **kwargs)
        with _jax.marked_scope(called):
            return fun(*args, **kwargs)

    return marked
