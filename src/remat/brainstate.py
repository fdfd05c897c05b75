"""`remat.brainstate.remat` and `checkpoint`: the signature of those in `brainstate.transform`.

brainstate's `StatefulFunction` traces a function, records which States it reads and writes, and makes a
pure function from State values and arguments to State values and results. This pure function is the
region. Around it the values are read from the States and written back, once.

A function is traced in each call, since its result may depend on more than its arguments: on the
settings of `brainstate.environ` (`fit`, `precision`, `dt`, also with traced values), on attributes of
modules, and on values that it closes over.

Known limits: negative `static_argnums` are refused, as in `brainstate.transform`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from brainstate import State
from brainstate.transform import StatefulFunction
from brainstate.typing import Missing

from remat import _jax, partition
from remat.aliases import Leaf, PolicyLike, PyTree
from remat.errors import StaticArgumentError, StaticArgumentTypeError, TargetError
from remat.transform.checkpoint import checkpoint as _checkpoint
from remat.transform.statics import Statics, without_statics

__all__ = ["checkpoint", "remat"]

_jax.exclude_from_tracebacks(__file__)


def __dir__() -> list[str]:
    return sorted(__all__)


def checkpoint(
    fun: Any = Missing(),  # noqa: B008  # brainstate's own mark of an argument left out
    *,
    prevent_cse: bool = True,
    policy: PolicyLike = None,
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
      fun: a function or module. Left out, the result is a decorator, also of methods.
      prevent_cse: whether to keep the compiler from merging recomputation with the forward pass.
      policy: what may be saved, as in `remat.checkpoint`.
      static_argnums: positions of arguments that are not traced; not negative. In a method, `self`
        is 0. They hold for arguments given by keyword or left at their defaults, too. Values other
        than arrays and numbers (a module, a string) are never traced.

    Returns:
      A function with the arguments and results of `fun` that reads and writes the same States.

    Raises:
      TargetError: `fun` is not callable.
      StaticArgumentError: `static_argnums` has an argument that `fun` or a call lacks, or is negative.
      PolicyError, EffectError: as for `remat.checkpoint`.
    """
    if isinstance(fun, Missing):
        return functools.partial(
            checkpoint, prevent_cse=prevent_cse, policy=policy, static_argnums=static_argnums
        )
    if not callable(fun):
        raise TargetError(f"remat.brainstate.remat takes a function or a module, not {fun!r}.")
    statics = Statics.of(fun, _as_argnums(static_argnums), ())
    lift = functools.partial(_checkpoint, prevent_cse=prevent_cse, policy=policy)
    lift(fun)  # refuses wrong options now

    @_jax.api_boundary
    @functools.wraps(fun)
    def checkpointed(*args: PyTree, **kwargs: PyTree) -> PyTree:
        argnums, argnames = statics.in_call(args, kwargs)
        called, args, kwargs = without_statics(fun, args, kwargs, argnums, argnames)
        traced, parts = partition.split((args, kwargs), _is_traced, _is_state)

        @functools.wraps(fun, updated=())
        def on_arrays(*traced: Leaf) -> PyTree:
            args, kwargs = parts.join(traced)
            return called(*args, **kwargs)

        pure = StatefulFunction(on_arrays, name="checkpoint")
        states = pure.get_state_trace(*traced, compile_if_miss=True)
        before = states.get_read_state_values(True)
        after, out = lift(pure.jaxpr_call)(states.get_state_values(), *traced)
        states.assign_state_vals_v2(before, after)
        return out

    return checkpointed


remat = checkpoint


def _is_state(x: Leaf) -> bool:
    return isinstance(x, State)


def _is_traced(x: Leaf) -> bool:
    """Return whether an argument is traced: an array, a number, or a State, which is refused later."""
    return partition.is_array(x) or isinstance(x, (bool, int, float, complex, State))


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
