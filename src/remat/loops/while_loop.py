"""`remat.fori_loop` and `remat.while_loop`: reverse-mode derivatives of loops that JAX cannot reverse.

JAX reverses a `fori_loop` only with concrete bounds, keeping the residuals of every step, and it cannot
reverse a `while_loop`. Here a `fori_loop` with concrete bounds is a `remat.scan`; the others keep a fixed
number of states. One with traced bounds knows its number of steps when it starts, so its schedule is
binomial. A `while_loop` knows it only at its
end, so its schedule is `schedules.OnlineMixed`, or `schedules.Online` where states alone are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify

from remat import _jax
from remat.aliases import Array, Arrays, AxisData, Dim, PolicyLike, PyTree
from remat.errors import EffectError, ScheduleError, StepLimitError
from remat.loops.arguments import unroll_factor, whole_number
from remat.loops.choice import DEFAULT_CHECKPOINTS, slots_of_unknown_length
from remat.loops.derivative import run
from remat.loops.fitting import may_be_differentiated, temporary_bytes, types_of
from remat.loops.loop import Inputs, Loop, select
from remat.loops.scan import scan
from remat.loops.schedules import beta
from remat.loops.store import DEVICE, Storage, make_store
from remat.loops.tracing import TracedBody, after_unused, trace_body, values_of_refs

# The most values that a while loop keeps if the user gives only `max_steps`, which is often far larger than
# the number of steps that run. More recompute less in loops of more than 500,000 steps.
_MOST_BY_DEFAULT = 1000

# API


def fori_loop(
    lower: Array,
    upper: Array,
    body: Callable[[Array, PyTree], PyTree],
    init: PyTree,
    *,
    checkpoints: int | None = None,
    budget: str | int | None = None,
    policy: PolicyLike = None,
    unroll: int | bool | None = None,
    store: Literal["device", "host", "disk"] | Sequence[Storage] = "device",
    directory: str | os.PathLike | None = None,
) -> PyTree:
    """Run a loop like `jax.lax.fori_loop`, also reversible with traced bounds, in memory you choose.

    >>> import jax, jax.numpy as jnp, remat
    >>> def power(x, n):
    ...     return remat.fori_loop(0, n, lambda i, y: y * x, jnp.ones_like(x), checkpoints=4)
    >>> float(jax.jit(jax.grad(power))(2.0, 10))
    5120.0

    With traced bounds, the gradient of n steps evaluates the body
    `remat.loops.schedules.Binomial(n, checkpoints).grad_forward_steps` times. With concrete bounds the
    loop is a `remat.scan`, and `remat.scan.explain` has the number.

    Args:
      lower: the first index, an integer or an integer array without axes.
      upper: one past the last index; below `lower` there is no step.
      body: (index, value) -> value.
      init: the initial value, a pytree of arrays of any type.
      checkpoints: how many values are kept for the backward pass. More recompute fewer steps. The
        default is that of `remat.scan` for concrete bounds. For traced ones it is 64
        (`DEFAULT_CHECKPOINTS` in `remat/loops/choice.py`), with which up to 45,760 steps are recomputed
        at most three times each.
      budget: instead of `checkpoints`, the bytes that the gradient of the loop may take, such as "2GiB"; see
        `remat.scan`.
      policy: what a step saves while it is reversed, as for `remat.scan`.
      unroll: as for `jax.lax.fori_loop`, only for concrete bounds.
      store, directory: where the values are kept, as for `remat.scan`.

    Returns:
      The final value.

    Raises:
      ScheduleError: a bound or `checkpoints` is not an integer; `checkpoints` is below 1 or given
        together with `budget`; `unroll` is given for traced bounds.
      BudgetError: every schedule needs more than `budget`.
      TypeError, ValueError: what `jax.lax.fori_loop` raises for the same call.
    """
    first, last = _bound(lower, "lower"), _bound(upper, "upper")
    if getattr(lower, "dtype", None) != getattr(upper, "dtype", None):
        _index_type(lower, upper)
    unroll = unroll_factor(False if unroll is None else unroll)

    def step(state: tuple, _: None) -> tuple[tuple, None]:
        index, value = state
        return (index + jnp.ones_like(index), body(index, value)), None

    if first is not None and last is not None:
        # As in JAX, the index is weakly typed if the default integer type can hold it.
        limits = jnp.iinfo(jnp.asarray(0).dtype)
        start = first if limits.min <= first and last <= limits.max else jnp.asarray(lower)
        options: dict[str, Any] = {"checkpoints": checkpoints, "budget": budget, "policy": policy}
        options |= {"store": store, "directory": directory, "unroll": unroll}
        return scan(step, (start, init), length=max(last - first, 0), **options)[0][1]
    if unroll > 1:
        raise ScheduleError(
            f"unroll={unroll} needs bounds that are known when the loop is traced; here one is "
            "traced. Leave out unroll=."
        )
    index, end = jnp.asarray(lower), jnp.asarray(upper)
    if index.dtype != end.dtype:
        dtype = _index_type(lower, upper)
        index, end = (x if x.dtype == dtype else x.astype(dtype) for x in (index, end))
    index, end = _jax.in_mesh(index), _jax.in_mesh(end)
    axes = _jax.varying_axes(end)
    if axes and all(axes <= _jax.varying_axes(x) for x in jax.tree.leaves(init)):
        # The states of the loop then vary over the same axes as the number of steps.
        index = _jax.varying_as(index, end)
    traced = trace_body(step, (index, init), None, policy)
    if traced is None:
        lax.fori_loop(lower, upper, body, init)
        raise AssertionError("jax.lax.fori_loop accepts what remat.fori_loop does not")
    loop = Loop(
        traced.body,
        len(traced.consts),
        len(traced.carry),
        slots=1,
        store=make_store(store, directory),
        counter=np.uint64 if jnp.iinfo(index.dtype).bits > 32 else np.uint32,
    )
    # Unsigned subtraction wraps around, so it is right for negative bounds, too.
    steps = end.astype(loop.counter) - index.astype(loop.counter)
    count = jnp.where(index < end, steps, jnp.zeros_like(steps))
    inputs = Inputs(traced.consts, traced.carry, [], [count])
    slots = slots_of_unknown_length(
        traced, checkpoints, budget, DEFAULT_CHECKPOINTS, _measure(loop, inputs)
    )
    carry, _, _ = run(dataclasses.replace(loop, slots=slots), inputs)
    return traced.finish(carry)[1]


def while_loop(
    cond: Callable[[PyTree], Array],
    body: Callable[[PyTree], PyTree],
    init: PyTree,
    *,
    max_steps: int | None = None,
    on_max_steps: Literal["error", "checkify", "truncate"] = "error",
    checkpoints: int | None = None,
    budget: str | int | None = None,
    policy: PolicyLike = None,
    store: Literal["device", "host", "disk"] = "device",
    directory: str | os.PathLike | None = None,
) -> PyTree:
    """Run a loop like `jax.lax.while_loop`, with reverse-mode derivatives.

    >>> import jax, jax.numpy as jnp, remat
    >>> def root(a):  # Newton's iteration for the square root
    ...     unfinished = lambda x: jnp.abs(x * x - a) > 1e-5 * a
    ...     return remat.while_loop(unfinished, lambda x: (x + a / x) / 2, a, max_steps=50)
    >>> print(f"{jax.grad(root)(9.0):.5f}")
    0.16667

    Args:
      cond: value -> bool, whether to run another step. It is not differentiated.
      body: value -> value.
      init: the initial value, a pytree of arrays of any type.
      max_steps: the largest number of steps, or None for no limit.
      on_max_steps: what happens if `cond` still holds after `max_steps` steps. "error" raises
        `StepLimitError` immediately if the loop runs outside of `jax.jit`; inside, a host callback
        raises an error with the same text when the program runs. "checkify" makes a
        `checkify.check`, which the caller must functionalize with
        `jax.experimental.checkify.checkify`. "truncate" returns the value after `max_steps` steps.
      checkpoints: the memory for the backward pass, as a number of values. It holds values and, where
        that saves more, residuals of steps. One value more, and the residuals of one step, are held in
        addition. The default with `max_steps` is the number with which each step is recomputed at most
        twice, about √(2·max_steps), but at most 1,000; without it, 64.
      budget: instead of `checkpoints`, the bytes that the gradient of the loop may take, such as "2GiB"; see
        `remat.scan`.
      policy: what a step saves while it is reversed, as for `remat.checkpoint`.
      store, directory: where the values are kept, as for `remat.scan`.

    Returns:
      The final value. The gradient of a loop with 2³² - 1 steps or more is NaN unless
      `jax_enable_x64` is set, since the step counter has 32 bits. A `jax.jvp` takes up to the memory of
      a gradient; `jax.lax.while_loop` has forward mode without it.

    Raises:
      StepLimitError: see `on_max_steps`.
      ScheduleError: `checkpoints` or `max_steps` is not an integer or is too small; `checkpoints` is
        given together with `budget`; `on_max_steps` is invalid.
      BudgetError: every schedule needs more than `budget`.
      TypeError, ValueError: what `jax.lax.while_loop` raises for the same call.

    Reference: Wang, Moin & Iaccarino, Minimal repetition dynamic checkpointing, SIAM J. Sci. Comput. 31
    (2009); Stumm & Walther, New algorithms for optimal online checkpointing, SIAM J. Sci. Comput. 32
    (2010).
    """
    if on_max_steps not in ("error", "checkify", "truncate"):
        raise ScheduleError(
            f"on_max_steps must be 'error', 'checkify' or 'truncate', not {on_max_steps!r}."
        )
    counter = np.uint64 if jax.config.jax_enable_x64 else np.uint32
    if max_steps is not None:
        max_steps = whole_number(max_steps, "max_steps", 0)
        if max_steps >= np.iinfo(counter).max:
            raise ScheduleError(
                f"max_steps={max_steps} is above {np.iinfo(counter).max - 1}, the limit of a "
                f"{np.iinfo(counter).bits}-bit counter. Lower max_steps=, or set jax_enable_x64."
            )
    traced = trace_body(lambda value, _: (body(value), None), init, None, policy)
    if traced is None:
        lax.while_loop(cond, body, init)
        raise AssertionError("jax.lax.while_loop accepts what remat.while_loop does not")
    n_user = len(traced.carry) - len(traced.refs)
    value = jax.tree.unflatten(traced.carry_tree, traced.carry[:n_user])
    test, test_consts, verdict = _jax.trace_call(cond, value)
    if not _is_scalar_bool(verdict):
        lax.while_loop(cond, body, init)
        raise AssertionError("jax.lax.while_loop accepts a cond that returns no bool")
    test, test_consts = _test_of_values(test, test_consts, traced)
    default = DEFAULT_CHECKPOINTS
    if max_steps is not None:
        enough = (slots for slots in range(1, _MOST_BY_DEFAULT) if beta(slots, 2) >= max_steps)
        default = next(enough, _MOST_BY_DEFAULT)
    where = make_store(store, directory)
    consts = [*test_consts, *traced.consts]
    n_test, n_carry = len(test_consts), len(traced.carry)
    loop = Loop(
        after_unused(traced, test_consts),
        len(consts),
        n_carry,
        slots=1,
        test=test,
        test_reads=(0, n_test, n_carry),
        max_steps=max_steps,
        store=where,
        memory=0 if where is DEVICE else None,
        counter=counter,
    )
    inputs = Inputs(consts, traced.carry, [], [])
    slots = slots_of_unknown_length(traced, checkpoints, budget, default, _measure(loop, inputs))
    loop = dataclasses.replace(loop, slots=slots)
    carry, _, (count,) = run(loop, inputs)
    if max_steps is not None and on_max_steps != "truncate":
        (unfinished,) = _jax.call_jaxpr(test, [*test_consts, *map(lax.stop_gradient, carry)])
        _refuse((count >= loop.count(max_steps)) & unfinished, max_steps, on_max_steps)
    return traced.finish(carry)


# Step limit


def _refuse(exceeded: Array, max_steps: int, how: str) -> None:
    message = (
        f"remat.while_loop: the condition still holds after max_steps={max_steps} steps. "
        f"Raise max_steps=, or accept the value reached with on_max_steps='truncate'."
    )
    if how == "checkify":
        checkify.check(~exceeded, message)
        return
    (exceeded,) = any_example_p.bind(exceeded)
    if not isinstance(exceeded, jax.core.Tracer):
        if exceeded:
            raise StepLimitError(message)
        return

    def fail(exceeded: Array) -> None:
        # Checked again, since both branches run if a cond is turned into a select.
        if exceeded:
            raise StepLimitError(message)

    lax.cond(exceeded, lambda e: jax.debug.callback(fail, e), lambda e: None, exceeded)


def _any_example(
    axis: AxisData, args: Sequence[Array], dims: Sequence[Dim]
) -> tuple[Arrays, list[None]]:
    return any_example_p.bind(jnp.any(args[0], dims[0])), [None]


#: Returns its operand, a bool; under `vmap`, whether it is true for any example. JAX would call a callback
#: for each example with a slice of the batch, which is an error if the batch is sharded explicitly.
any_example_p = _jax.Primitive("remat_any_example")
_jax.register(
    any_example_p,
    evaluate=lambda x: [x],
    abstract=lambda x: ([x], set()),
    jvp=lambda primals, _: (any_example_p.bind(*primals), [_jax.zero_tangent(primals[0])]),
    transpose=lambda cts, _: [None],
    batch=_any_example,
)


# Helpers


def _measure(loop: Loop, inputs: Inputs) -> Callable[[int, bool], int | None]:
    """Return the function (slots, of_consts) -> the temporaries of a loop's compiled gradient, in bytes."""
    types, differentiated = types_of(inputs), may_be_differentiated(inputs)

    def measure(slots: int, of_consts: bool) -> int | None:
        if loop.store is not DEVICE:
            return None

        def run_it(inputs: Inputs) -> tuple[Arrays, Arrays]:
            results = run(dataclasses.replace(loop, slots=slots), inputs)
            return results.carry, []

        marks = differentiated if of_consts else [False] * len(differentiated)
        return temporary_bytes(run_it, types, marks)

    return measure


def _test_of_values(
    test: _jax.Jaxpr, consts: Arrays, traced: TracedBody
) -> tuple[_jax.Jaxpr, Arrays]:
    """Rewrite a test as one on the whole carry, in which the values of refs follow the user's carry."""
    pure, values = values_of_refs(test, consts)
    if pure is not None and any(pure.is_written):
        raise EffectError(
            "the cond of remat.while_loop writes a ref, which is unsupported. Write it in the body."
        )
    jaxpr = test if pure is None else pure.jaxpr
    inputs = list(jaxpr.invars)
    n_added = len(values) - len(consts)
    reads = {id(c): v for c, v in zip(consts, inputs[n_added:])}
    new = [_jax.new_var(t) for t in _jax.in_avals(traced.body)[len(traced.consts) :]]
    first = len(traced.carry) - len(traced.refs)
    carried = [reads.get(id(ref), v) for ref, v in zip(traced.refs, new[first:])]
    fixed = [v not in carried for v in inputs[: len(values)]]
    invars = [*select(inputs[: len(values)], fixed), *inputs[len(values) :], *carried]
    return _jax.rebuild(jaxpr, invars=invars), select(values, fixed)


def _bound(value: Array, name: str) -> int | None:
    """Return a bound as a Python int, or None if it is traced."""
    with contextlib.suppress(TypeError):
        return operator.index(value)
    with contextlib.suppress(TypeError, ValueError):
        array = jnp.asarray(value)
        if array.shape == () and jnp.issubdtype(array.dtype, jnp.integer):
            # 4-bit integers have no `__index__`.
            return None if isinstance(array, jax.core.Tracer) else int(array)
    raise ScheduleError(f"{name} must be an integer without axes, not {value!r}.")


def _index_type(lower: Array, upper: Array) -> np.dtype:
    """Return the type of the index of `jax.lax.fori_loop`.

    JAX refuses incompatible types with an error that its users know.
    """
    seen: Arrays = []
    jax.eval_shape(lambda: lax.fori_loop(lower, upper, lambda i, _: seen.append(i.dtype), None))
    return seen[0]


def _is_scalar_bool(x: Array) -> bool:
    return getattr(x, "shape", None) == () and x.dtype == bool
