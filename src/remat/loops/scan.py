"""`remat.scan`: `jax.lax.scan` with reverse-mode memory that the user chooses.

There are two ways to trade memory for recomputation. `choice.py` chooses one:

- *nested*: nested scans whose inner blocks are recomputed. With two levels, and the residuals of one
  block kept, it costs one extra forward sweep and memory that grows as √n. It consists of `lax.scan`
  and `remat.checkpoint` only. This is the default.
- *mixed*: carries and residuals of steps in a fixed memory, and the fewest recomputed steps that are
  possible with it (`schedules.Mixed`), interpreted at run time (`mixed.py`). `checkpoints=` selects it.
  Where the memory never holds residuals of more than one step, it is *binomial* (`states.py`).

With `budget=`, the one with the least recomputation that fits is chosen.

With `policy=`, the body is a region with that policy, which chooses the residuals
(`tracing.trace_body`). A plain `lax.scan` inside a region is split by `ir/split/loops.py`.

The body is traced to a jaxpr, on which both work. A weakly typed initial carry takes up to three traces.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from remat import _jax
from remat.aliases import Arrays, PolicyLike, PyTree
from remat.errors import ScheduleError
from remat.loops.arguments import unroll_factor, whole_number
from remat.loops.choice import (
    DEFAULT_CHECKPOINTS,
    choose,
    refuse_both,
    slots_of_unknown_length,
)
from remat.loops.derivative import run
from remat.loops.fitting import may_be_differentiated, temporary_bytes, types_of
from remat.loops.loop import Inputs, StoredLevel
from remat.loops.schedules import Binomial, Hierarchical, Mixed
from remat.loops.store import DEVICE, Storage, Store, make_store, storages_of
from remat.loops.tracing import (
    after_unused,
    as_arrays,
    checkpointed as checkpointed_body,
    trace_body,
)
from remat.loops.ways import Choice, Scanned, loop_of

# API


def scan(
    f: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    *,
    checkpoints: int | None = None,
    budget: str | int | None = None,
    policy: PolicyLike = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    inverse: Callable[[PyTree, PyTree], PyTree] | None = None,
    store: Literal["device", "host", "disk"] | Sequence[Storage] = "device",
    directory: str | os.PathLike | None = None,
) -> tuple[PyTree, PyTree]:
    """Scan like `jax.lax.scan`, with reverse-mode memory that you choose.

    >>> import jax, jax.numpy as jnp, remat
    >>> def loss(x):
    ...     step = lambda x, _: (jnp.sin(x), None)
    ...     return remat.scan(step, x, length=1000, checkpoints=10)[0].sum()
    >>> jax.grad(loss)(jnp.ones(3)).shape
    (3,)

    Args:
      f: the body, (carry, x) -> (carry, y), as for `jax.lax.scan`.
      init: the initial carry, a pytree of arrays of any type.
      xs: a pytree of arrays with the same leading axis, of `length`; or None.
      length: the number of steps, required if `xs` has no leaves.
      checkpoints: the memory for the backward pass, as a number of carries. It holds carries, and
        residuals of steps where that saves more; the residuals of one further step are held in addition.
        The number of recomputed steps is the least possible. With another `store`, it is the number of
        carries kept, including the initial one.
      budget: the bytes that the gradient of the loop may take beside its arguments and results, as a number
        or as "2GiB". The schedule that recomputes least within it is chosen. For that, the gradient of the
        loop is compiled while the loop is traced; `docs/loops.md` lists the exceptions. Without `budget`
        and `checkpoints`, the schedule is the one of least memory that costs at most one extra forward
        sweep; if the length is a symbolic dimension (`jax.export`), it is that of `checkpoints=64`.
      policy: what a step saves while it is reversed, as for `remat.checkpoint`. With `budget`, a step
        saves at least that: all residuals of a step are kept if they fit and that is expected to take
        less time, unless the policy offloads values. `explain` says so.
      reverse: whether to run from the last x to the first.
      unroll: as for `jax.lax.scan`; it has no effect on a gradient with `checkpoints`.
      inverse: for a step that can be inverted, (carry after the step, x) -> the carry before it. The
        backward pass then computes the carries with it, and keeps none. Rounding errors of the inverse
        accumulate; with `checkpoints=s` the scan keeps s carries at equal distances, at each of which the
        inversion starts again. Derivatives of the gradient keep carries.
      store: where the carries are kept: in device memory, in host memory, or in a file. The last two
        require `checkpoints`. A file costs one extra forward sweep. It has no name, so nothing remains
        in the directory. Or a list of `remat.Storage`, from the fastest to the slowest: the
        schedule with the least time for steps and transfers. `checkpoints` and `budget` are the
        capacity of the device there, which the list can have instead.
      directory: the directory of the file, with store="disk".

    Returns:
      The final carry and the stacked ys. A compiled `jax.jvp` keeps none of the carries.

    Raises:
      ScheduleError: `checkpoints`, `length` or `unroll` is not an integer or is too small;
        `checkpoints` is given together with `budget`; `store` is given without `checkpoints`.
      StoreError: the directory cannot be written to, or has too little space.
      BudgetError: every schedule needs more than `budget`.
      UnitsError: `budget` is not a number of bytes.
      TypeError, ValueError: what `jax.lax.scan` raises for the same call.

    Reference: Maddison, Step-based checkpointing with high-level algorithmic differentiation, J. Comput.
    Sci. 82, 102405 (2024); Griewank & Walther, Algorithm 799: revolve, ACM TOMS 26 (2000).
    """
    several = storages_of(store)
    if several and directory is not None:
        raise ScheduleError(
            f"directory={str(directory)!r} has no use with a list of levels. Pass it to remat.Storage."
        )
    where = DEVICE if several else make_store(store, directory)
    if store != "device" and not several and checkpoints is None:
        raise ScheduleError(
            f"store={store!r} requires the number of carries to keep: pass checkpoints=."
        )
    scanned = _trace(f, init, xs, length, policy, reverse, unroll)
    traced, n = scanned.traced, scanned.length
    if inverse is not None:
        if budget is not None or store != "device" or _jax.is_symbolic(n):
            raise ScheduleError(
                "inverse= keeps no carries but those of checkpoints=, in device memory, and needs a length "
                "that is a number. Leave out budget= and store=."
            )
        carry, ys = _inverted(scanned, inverse, xs, checkpoints)
    elif _jax.is_symbolic(n) and not several:
        slots = slots_of_unknown_length(traced, checkpoints, budget, DEFAULT_CHECKPOINTS)
        carry, ys = _checkpointed(scanned, slots, where)
    elif store != "device" and not several:
        refuse_both(checkpoints, budget)
        # A loop of n steps cannot use more than n slots.
        slots = max(1, min(whole_number(checkpoints, "checkpoints", 1), n))
        carry, ys = _checkpointed(scanned, slots, where)
    else:
        choice = choose(scanned, checkpoints, budget, several, _temporary_bytes)
        if choice.all_residuals:
            scanned = scanned.with_all_residuals()
        carry, ys = _by_choice(scanned, choice)
    return traced.finish(carry), jax.tree.unflatten(traced.y_tree, ys)


def explain(
    f: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    *,
    checkpoints: int | None = None,
    budget: str | int | None = None,
    policy: PolicyLike = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    store: Literal["device"] | Sequence[Storage] = "device",
) -> Choice:
    """Return what `remat.scan` with the same arguments keeps and recomputes, and why.

    With `budget`, call it in the function that is differentiated: here closed-over arrays have no gradient,
    and the gradient of weights needs memory, too.

    >>> print(explain(lambda x, _: (x * x, x), jnp.ones(4), length=100, checkpoints=5))
    mixed: 100 steps, 5 checkpoints, or up to 6 steps' residuals: 352 forward steps (3.52 per step)
    kept for the backward pass: 96 B = states of 16 B and steps' residuals of 16 B
    why: the fewest steps for checkpoints=5
    """
    scanned = _trace(f, init, xs, length, policy, reverse, unroll)
    return choose(scanned, checkpoints, budget, storages_of(store), _temporary_bytes)


scan.explain = explain  # type: ignore[attr-defined]


# Tracing


def _trace(
    f: Callable,
    init: PyTree,
    xs: PyTree,
    length: int | None,
    policy: PolicyLike,
    reverse: bool,
    unroll: int | bool,
) -> Scanned:
    leaves, xs_tree = jax.tree.flatten(xs)
    leaves = as_arrays(leaves)
    lengths = {x.shape[0] if x.ndim else -1 for x in leaves}
    if length is not None:
        lengths |= {length if _jax.is_symbolic(length) else whole_number(length, "length", 0)}
    traced = None
    if len(lengths) == 1 and min(lengths) >= 0:
        slices = _jax.slice_types(leaves)
        traced = trace_body(f, init, jax.tree.unflatten(xs_tree, slices), policy)
    if traced is None:
        # JAX refuses the same call with an error that its users know.
        lax.scan(f, init, xs, length, reverse=reverse, unroll=unroll)
        raise AssertionError("jax.lax.scan accepts what remat.scan does not")
    has_policy = policy is not None
    return Scanned(traced, leaves, lengths.pop(), reverse, unroll_factor(unroll), has_policy)


# Running a choice


def _by_choice(scanned: Scanned, choice: Choice) -> tuple[Arrays, Arrays]:
    """Return the last carry and the ys of a scan that is reversed by a choice."""
    if isinstance(choice.schedule, Mixed | Binomial | Hierarchical):
        return _checkpointed(scanned, choice.slots, DEVICE, choice.spare_bytes, choice.levels)
    n = scanned.length
    lengths = (n,) if choice.schedule is None else choice.schedule.lengths
    recomputed = choice.schedule is not None and choice.schedule.step_recomputed
    return _nested(scanned, scanned.traced.carry, scanned.xs, n, lengths, recomputed)


def _temporary_bytes(scanned: Scanned, choice: Choice, of_consts: bool) -> int | None:
    """Return the temporaries of the gradient of a scan that is reversed by a choice."""

    def run(inputs: Inputs) -> tuple[Arrays, Arrays]:
        traced = scanned.traced._replace(consts=inputs.consts, carry=inputs.carry)
        return _by_choice(scanned._replace(traced=traced, xs=inputs.xs), choice)

    inputs = Inputs(scanned.traced.consts, scanned.traced.carry, scanned.xs, [])
    differentiated = may_be_differentiated(inputs) if of_consts else [False] * len(inputs.consts)
    return temporary_bytes(run, types_of(inputs), differentiated)


# Schedules that are interpreted


def _checkpointed(
    scanned: Scanned,
    slots: int,
    store: Store,
    memory: int | None = None,
    levels: tuple[StoredLevel, ...] = (),
) -> tuple[Arrays, Arrays]:
    """Scan with a backward pass that interprets a schedule at run time."""
    loop = dataclasses.replace(loop_of(scanned, slots, store, memory), levels=levels)
    carry, ys, _ = run(loop, Inputs(scanned.traced.consts, scanned.traced.carry, scanned.xs, []))
    return carry, ys


def _inverted(
    scanned: Scanned, inverse: Callable, xs: PyTree, checkpoints: int | None
) -> tuple[Arrays, Arrays]:
    """Scan with a backward pass that inverts the steps."""
    traced, n = scanned.traced, scanned.length
    if traced.refs:
        raise ScheduleError("inverse= does not support a body that writes a ref. Carry its value.")
    blocks = 1 if checkpoints is None else whole_number(checkpoints, "checkpoints", 1)
    if n == 0:
        return _nested(scanned, traced.carry, scanned.xs, n, (1,), False)
    types = jax.tree.unflatten(traced.carry_tree, traced.carry)
    x = jax.tree.unflatten(jax.tree.structure(xs), _jax.slice_types(scanned.xs))
    jaxpr, consts, before = _jax.trace_call(inverse, types, x)
    found = [(t.shape, t.dtype) for t in jax.tree.leaves(before)]
    expected = [(c.shape, c.dtype) for c in traced.carry]
    if jax.tree.structure(before) != traced.carry_tree or found != expected:
        raise ScheduleError(
            f"inverse= must return a carry with the structure and types of the scan's, {expected}, but "
            f"returns {found} in {jax.tree.structure(before)}."
        )
    loop = loop_of(scanned, min(blocks, n), memory=0)
    loop = dataclasses.replace(
        loop,
        body=after_unused(traced, consts),
        n_consts=len(consts) + len(traced.consts),
        inverse=jaxpr,
        inverse_reads=(0, len(consts)),
    )
    inputs = Inputs([*consts, *traced.consts], traced.carry, scanned.xs, [])
    carry, ys, _ = run(loop, inputs)
    return carry, ys


# Nesting


def _nested(
    scanned: Scanned, carry: Arrays, xs: Arrays, n: int, lengths: tuple[int, ...], recomputed: bool
) -> tuple[Arrays, Arrays]:
    """Scan in nested loops of these lengths, in which each block is recomputed as a whole."""
    options = {"reverse": scanned.reverse}

    def step(carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
        out = _jax.call_jaxpr(scanned.traced.body, [*scanned.traced.consts, *carry, *x])
        return out[: len(carry)], out[len(carry) :]

    if len(lengths) == 1 or n == 0:
        body = checkpointed_body(step, None) if recomputed else step
        return lax.scan(body, carry, xs, n, unroll=scanned.unroll, **options)
    block = 1
    for length in lengths[1:]:
        block *= length
    blocks, rest = divmod(n, block)

    def inner(carry: Arrays, xs: Arrays, n: int) -> tuple[Arrays, Arrays]:
        return _nested(scanned, carry, xs, n, lengths[1:], recomputed)

    # The blocks are executed first, the rest last.
    main, last = slice(0, blocks * block), slice(blocks * block, n)
    if scanned.reverse:
        main, last = slice(rest, n), slice(0, rest)
    parts = []
    if blocks:
        cut = [x[main].reshape(blocks, block, *x.shape[1:]) for x in xs]
        body = checkpointed_body(lambda carry, xs: inner(carry, xs, block), None)
        carry, ys = lax.scan(body, carry, cut, blocks, **options)
        parts.append([y.reshape(blocks * block, *y.shape[2:]) for y in ys])
    if rest:
        carry, ys = inner(carry, [x[last] for x in xs], rest)
        parts.append(ys)
    if len(parts) == 1:
        return carry, parts[0]
    first, second = reversed(parts) if scanned.reverse else parts
    return carry, [jnp.concatenate(pair) for pair in zip(first, second)]
