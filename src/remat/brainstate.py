"""`remat.brainstate.remat` and `checkpoint`: the signature of those in `brainstate.transform`.

brainstate's `StatefulFunction` traces a function, notes which States it reads and writes, and
offers it as a function from State values and arguments to State values and results. That pure
function is the region; around it the values are read from the States and written back, once.

Known limits: negative `static_argnums` are refused, as in `brainstate.transform`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from brainstate.transform import StatefulFunction
from brainstate.typing import Missing

from remat import _jax
from remat.errors import StaticArgumentError, StaticArgumentTypeError
from remat.transform.checkpoint import checkpoint as _checkpoint

_jax.exclude_from_tracebacks(__file__)


def checkpoint(
    fun: Any = Missing(),  # noqa: B008  # brainstate's own mark of an argument left out
    *,
    prevent_cse: bool = True,
    policy: Any = None,
    static_argnums: int | tuple[int, ...] = (),
) -> Callable:
    """Make a function of States recompute its linearization points when it is differentiated.

    >>> import brainstate, jax.numpy as jnp
    >>> import remat.brainstate
    >>> weight, calls = brainstate.ParamState(jnp.ones(3)), brainstate.State(0)
    >>> @remat.brainstate.checkpoint(static_argnums=(1,))
    ... def loss(x, squared):
    ...     calls.value += 1
    ...     y = jnp.sin(weight.value * x)
    ...     return (y**2 if squared else y).sum()
    >>> gradient = brainstate.transform.grad(lambda: loss(jnp.arange(3.0), True), weight)()
    >>> gradient.shape, int(calls.value)
    ((3,), 1)

    Args:
      fun: a function or module. Left out, the result is a decorator.
      prevent_cse: whether to keep the compiler from merging recomputation with the forward pass.
      policy: what may be saved, as in `remat.checkpoint`.
      static_argnums: positions of arguments that are not traced; not negative.

    Returns:
      A function with the arguments and results of `fun` that reads and writes the same States.

    Raises:
      StaticArgumentError: for negative `static_argnums`.
      PolicyError, EffectError: as `remat.checkpoint` does.
    """
    if isinstance(fun, Missing):
        return functools.partial(
            checkpoint, prevent_cse=prevent_cse, policy=policy, static_argnums=static_argnums
        )
    argnums = _as_argnums(static_argnums)
    pure = StatefulFunction(fun, static_argnums=argnums, name="checkpoint")
    region = _checkpoint(
        pure.jaxpr_call,
        prevent_cse=prevent_cse,
        policy=policy,
        # The State values come first.
        static_argnums=tuple(n + 1 for n in argnums),
    )

    @_jax.api_boundary
    @functools.wraps(fun)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        states = pure.get_state_trace(*args, **kwargs, compile_if_miss=True)
        before = states.get_read_state_values(True)
        after, out = region(states.get_state_values(), *args, **kwargs)
        states.assign_state_vals_v2(before, after)
        return out

    return checkpointed


remat = checkpoint


def _as_argnums(given: Any) -> tuple[int, ...]:
    items = () if given is None else given if isinstance(given, (tuple, list)) else (given,)
    try:
        numbers = tuple(operator.index(item) for item in items)
    except TypeError as e:
        raise StaticArgumentTypeError(
            f"static_argnums is an int or a tuple of ints, not {given!r}."
        ) from e
    if any(n < 0 for n in numbers):
        raise StaticArgumentError(
            f"remat.brainstate.checkpoint does not take negative static_argnums, as in {numbers}: "
            "brainstate counts arguments from the front. Give positions from 0 on."
        )
    return numbers
