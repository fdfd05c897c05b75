"""`remat.scan`: `jax.lax.scan` with reverse-mode memory that the user chooses.

There are two ways to trade memory for recomputation. `choose` takes one (`Choice`, printed by
`remat.scan.explain`):

- *nested*: nested scans whose inner blocks are recomputed. With two levels, and the residuals of one
  block kept, it costs one extra forward sweep and memory that grows as √n. It consists of `lax.scan`
  and `remat.checkpoint` only. This is the default.
- *binomial*: a fixed number of kept states and the fewest recomputed steps that are possible with it
  (`schedules.Binomial`), interpreted at run time (`loop.py`). `checkpoints=` selects it.

With `budget=`, the one with the least recomputation that fits is taken.

Both keep carries; a step's residuals exist only while it is reversed (in a nested scan: while its block
is). With `policy=`, the body is a region with that policy, which chooses the residuals
(`tracing.trace_body`). A plain `lax.scan` inside a region is split by `ir/split/loops.py`.

The body is traced to a jaxpr, on which both work. A weakly typed initial carry takes up to three traces.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from remat import _jax
from remat.aliases import Arrays, PolicyLike, PyTree, Size
from remat.errors import BudgetError, ScheduleError
from remat.loops.arguments import unroll_factor, whole_number
from remat.loops.derivative import run
from remat.loops.loop import Inputs, Loop, split_inputs
from remat.loops.mixed import Plan, plan_of
from remat.loops.schedules import Binomial, Mixed, Multilevel
from remat.loops.sizes import n_bytes, worst_case
from remat.loops.store import DEVICE, Store, make_store
from remat.loops.tracing import (
    Traced,
    as_arrays,
    checkpointed,
    residual_bytes,
    trace_body,
)
from remat.units import format_bytes, parse_bytes

# States that a loop keeps if its number of steps is unknown and the user gives no number. With 64, up
# to 45,760 steps are recomputed at most three times each, and 4 million at most five times. A larger
# number keeps more and recomputes less.
DEFAULT_CHECKPOINTS = 64

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
    store: Literal["device", "host", "disk"] = "device",
    directory: str | os.PathLike | None = None,
) -> tuple[PyTree, PyTree]:
    """Scan like `jax.lax.scan`, with reverse-mode memory that you choose.

    >>> import jax, jax.numpy as jnp
    >>> from remat.loops.scan import scan
    >>> def loss(x):
    ...     step = lambda x, _: (jnp.sin(x), None)
    ...     return scan(step, x, length=1000, checkpoints=10)[0].sum()
    >>> jax.grad(loss)(jnp.ones(3)).shape
    (3,)

    Args:
      f: the body, (carry, x) -> (carry, y), as for `jax.lax.scan`.
      init: the initial carry, a pytree of arrays of any type.
      xs: a pytree of arrays with the same leading axis, of `length`; or None.
      length: the number of steps, required if `xs` has no leaves.
      checkpoints: how many carries are kept for the backward pass, including the initial one. One
        more is held when the backward pass begins. The number of recomputed steps is the least
        possible.
      budget: the bytes that may be kept for the backward pass, as a number or as "2GiB". The schedule
        that recomputes least within it is chosen. Without `budget` and `checkpoints`, the schedule is
        the one of least memory that costs at most one extra forward sweep; if the length is a symbolic
        dimension (`jax.export`), it is that of `checkpoints=64`.
      policy: what a step saves while it is reversed, as for `remat.checkpoint`.
      reverse: whether to run from the last x to the first.
      unroll: as for `jax.lax.scan`; the binomial backward pass is not unrolled.
      store: where the carries are kept: in device memory, in host memory, or in a file. The last two
        require `checkpoints`. A file costs one extra forward sweep. It has no name, so nothing remains
        in the directory.
      directory: the directory of the file, with store="disk".

    Returns:
      The final carry and the stacked ys.

    Raises:
      ScheduleError: `checkpoints`, `length` or `unroll` is not an integer or is too small;
        `checkpoints` is given together with `budget`; `store` is given without `checkpoints`.
      StoreError: the directory cannot be written to, or has too little space.
      BudgetError: every schedule needs more than `budget`.
      UnitsError: `budget` is not a number of bytes.
      TypeError, ValueError: what `jax.lax.scan` raises for the same call.

    Reference: Griewank & Walther, Algorithm 799: revolve, ACM TOMS 26 (2000).
    """
    where = make_store(store, directory)
    if store != "device" and checkpoints is None:
        raise ScheduleError(
            f"store={store!r} requires the number of carries to keep: pass checkpoints=."
        )
    scanned = _trace(f, init, xs, length, policy, reverse, unroll)
    traced, n = scanned.traced, scanned.length
    if _jax.is_symbolic(n):
        slots = slots_of_unknown_length(traced, checkpoints, budget, DEFAULT_CHECKPOINTS)
        carry, ys = _checkpointed(scanned, slots, where)
    elif store != "device":
        # A loop of n steps cannot use more than n slots.
        slots = max(1, min(whole_number(checkpoints, "checkpoints", 1), n))
        carry, ys = _checkpointed(scanned, slots, where)
    else:
        choice = choose(scanned, checkpoints, budget)
        if isinstance(choice.schedule, Mixed | Binomial):
            slots = choice.memory_bytes // max(choice.state_bytes, 1)
            slots = max(1, min(slots, n))
            memory = choice.memory_bytes - slots * choice.state_bytes
            carry, ys = _checkpointed(scanned, slots, where, memory)
        else:
            lengths = (n,) if choice.schedule is None else choice.schedule.lengths
            recomputed = choice.schedule is not None and choice.schedule.step_recomputed
            carry, ys = _nested(scanned, traced.carry, scanned.xs, n, lengths, recomputed)
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
) -> Choice:
    """Return what `remat.scan` with the same arguments keeps and recomputes, and why.

    >>> print(explain(lambda x, _: (x * x, x), jnp.ones(4), length=100, checkpoints=5))
    binomial: 100 steps, 5 slots: 416 forward steps (4.16 per step), repeated at most 4 times
    kept for the backward pass: 96 B = 6 states of 16 B
    why: the fewest steps for checkpoints=5
    """
    return choose(_trace(f, init, xs, length, policy, reverse, unroll), checkpoints, budget)


scan.explain = explain  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Choice:
    """The schedule by which a scan is reversed.

    Attributes:
      kind: "plain" keeps the residuals of all steps; for "nested" and "binomial" see the module.
      schedule: the schedule with its exact costs; None for "plain".
      n: the number of steps.
      state_bytes: bytes of one carry. All bytes are expressions where shapes are symbolic.
      residual_bytes: bytes of one step's residuals, without inputs of the scan.
      kept_bytes: bytes that are kept at the peak of the backward pass.
      why: the reason for the choice, in words.
      memory_bytes: of "mixed" and "binomial": the bytes that are shared by states and residuals.
    """

    kind: Literal["plain", "nested", "mixed", "binomial"]
    schedule: Multilevel | Mixed | Binomial | None
    n: int
    state_bytes: Size
    residual_bytes: Size
    kept_bytes: Size
    why: str
    memory_bytes: Size = 0

    @property
    def forward_steps(self) -> int:
        """Return how often a gradient evaluates the body, including once in each reversed step."""
        return self.n if self.schedule is None else self.schedule.grad_forward_steps

    def __repr__(self) -> str:
        return f"Choice({str(self).splitlines()[0]}, keeps {format_bytes(self.kept_bytes)})"

    def __str__(self) -> str:
        head = f"plain: {self.n} steps, nothing recomputed"
        kept = f"{self.n} steps' residuals of {format_bytes(self.residual_bytes)}"
        if isinstance(self.schedule, Multilevel):
            head = str(self.schedule)
            kept = (
                f"{self.schedule.peak_slots} states of {format_bytes(self.state_bytes)}, "
                f"{self.schedule.peak_residuals} steps' residuals of "
                f"{format_bytes(self.residual_bytes)}"
            )
        elif isinstance(self.schedule, Mixed):
            head = str(self.schedule)
            kept = (
                f"states of {format_bytes(self.state_bytes)} and steps' residuals of "
                f"{format_bytes(self.residual_bytes)}"
            )
        elif isinstance(self.schedule, Binomial):
            head = str(self.schedule)
            kept = f"{self.schedule.slots + 1} states of {format_bytes(self.state_bytes)}"
        return (
            f"{head}\nkept for the backward pass: {format_bytes(self.kept_bytes)} = {kept}\n"
            f"why: {self.why}"
        )


# Tracing


class Scanned(NamedTuple):
    """A traced scan: its body, the arrays that it scans over, and its options."""

    traced: Traced
    xs: Arrays
    length: Size
    reverse: bool
    unroll: int | bool


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
    return Scanned(traced, leaves, lengths.pop(), reverse, unroll_factor(unroll))


# Choosing


def choose(scanned: Scanned, checkpoints: int | None, budget: str | int | None) -> Choice:
    """Return the schedule with the least recomputation for a number of checkpoints or a budget."""
    if checkpoints is not None and budget is not None:
        raise ScheduleError(
            f"checkpoints={checkpoints} and budget={budget!r} exclude each other. Pass one of them."
        )
    n = scanned.length
    if _jax.is_symbolic(n):
        raise ScheduleError(
            f"the number of steps, {n}, is a symbolic dimension, and the schedule depends on its value. "
            "Pass a length that is a number."
        )
    state, residual = _state_and_residual(scanned.traced, budget)

    def choice(kind: Any, schedule: Any, kept_bytes: int, why: str, memory: int = 0) -> Choice:
        return Choice(kind, schedule, n, state, residual, kept_bytes, why, memory)

    plain = choice("plain", None, n * residual, "the loop is too short to save anything")
    if checkpoints is not None:
        checkpoints = whole_number(checkpoints, "checkpoints", 1)
        memory = checkpoints * state
        why = f"the fewest steps in the memory of checkpoints={checkpoints}"
        if not _jax.is_symbolic(memory) and plain.kept_bytes <= memory and n > 1:
            return choice("plain", None, plain.kept_bytes, f"all fits the memory of {checkpoints=}")
        if checkpoints >= n and not _keeps_residuals(scanned, memory):
            every = Multilevel(n, (max(n, 1),))
            why = f"checkpoints={checkpoints} hold the states of all {n} steps"
            return choice("nested", every, n * state + residual, why)
        return _checkpointed_choice(choice, scanned, checkpoints, memory, state, why)
    two_levels = Multilevel.balanced(
        n,
        2,
        step_recomputed=False,
        state_bytes=_jax.typical(state),
        residual_bytes=_jax.typical(residual),
    )
    nested_bytes = two_levels.peak_slots * state + two_levels.peak_residuals * residual
    nested = choice("nested", two_levels, nested_bytes, "the least memory for one more sweep")
    if budget is None:
        saves = _jax.typical(nested_bytes) < _jax.typical(plain.kept_bytes)
        return nested if saves else plain
    limit = parse_bytes(budget, "budget=")
    if plain.kept_bytes <= limit:
        return choice("plain", None, plain.kept_bytes, f"all fits the {format_bytes(limit)}")
    # The state at hand, its cotangent and the residuals in use are not part of the schedule's memory.
    memory = limit - 2 * state - residual
    if memory + state >= state > memory:
        memory = state
    slots = min(memory // max(state, 1), n)
    if slots >= 1 or (memory >= 0 and _keeps_residuals(scanned, memory)):
        why = f"the fewest steps that fit {format_bytes(limit)}"
        mixed = _checkpointed_choice(choice, scanned, slots, memory, state, why)
        if nested_bytes > limit or mixed.forward_steps < nested.forward_steps:
            return mixed
    if nested_bytes <= limit:
        # Larger blocks within the budget would not help: two levels cost one sweep for any block size.
        return choice("nested", two_levels, nested_bytes, f"fits the {format_bytes(limit)}")
    least = 2 * state + residual
    raise BudgetError(
        f"no schedule of {n} steps fits {format_bytes(limit)}; the smallest keeps "
        f"{format_bytes(least)}: two states of {format_bytes(state)} and one step's residuals "
        f"of {format_bytes(residual)}. Raise budget=, or save less in a step with policy=."
    )


def _keeps_residuals(scanned: Scanned, memory: int) -> bool:
    return _plan(scanned, memory) is not None


def _plan(scanned: Scanned, memory: Size) -> Plan | None:
    """Return the plan for a gradient with respect to all inputs; None if it keeps states alone."""
    if _jax.is_symbolic(memory):
        return None
    loop = _loop(scanned, 0, memory=memory)
    marks = [_jax.has_tangent(t) for t in _jax.in_avals(loop.body)]
    return plan_of(loop, split_inputs(loop, marks))


def _checkpointed_choice(
    choice: Callable, scanned: Scanned, slots: int, memory: int, state: int, why: str
) -> Choice:
    plan = _plan(scanned, memory)
    if plan is None:
        schedule = Binomial(scanned.length, slots)
        return choice("binomial", schedule, (slots + 1) * state, why, memory)
    return choice("mixed", plan.schedule, plan.layout.n_bytes(plan.schedule), why, memory)


def slots_of_unknown_length(
    traced: Traced, checkpoints: int | None, budget: str | int | None, default: int
) -> int:
    """Return how many states a loop keeps if its number of steps is unknown when it is traced."""
    if checkpoints is not None and budget is not None:
        raise ScheduleError(
            f"checkpoints={checkpoints} and budget={budget!r} exclude each other. Pass one of them."
        )
    if budget is not None:
        state, residual = _state_and_residual(traced, budget)
        limit = parse_bytes(budget, "budget=")
        slots = (limit - residual) // max(state, 1) - 1
        if slots < 1:
            raise BudgetError(
                f"no schedule fits {format_bytes(limit)}; the smallest keeps "
                f"{format_bytes(2 * state + residual)}: two states of {format_bytes(state)} and "
                f"one step's residuals of {format_bytes(residual)}. Raise budget=, or save less "
                f"in a step with policy=."
            )
        # With more slots, no loop that ends in practice would recompute less.
        return min(slots, 100_000)
    return default if checkpoints is None else whole_number(checkpoints, "checkpoints", 1)


def _state_and_residual(traced: Traced, budget: str | int | None) -> tuple[Size, Size]:
    """Return the bytes of a state and of a step's residuals; with a budget, their upper bounds."""
    state, residual = sum(map(n_bytes, traced.carry)), residual_bytes(traced)
    if budget is None:
        return state, residual
    return (
        worst_case("a state", state, budget, "checkpoints="),
        worst_case("one step's residuals", residual, budget, "checkpoints="),
    )


# Schedules that are interpreted


def _checkpointed(
    scanned: Scanned, slots: int, store: Store, memory: int | None = None
) -> tuple[Arrays, Arrays]:
    """Scan with a backward pass that interprets a schedule at run time."""
    loop = _loop(scanned, slots, store, memory)
    carry, ys, _ = run(loop, Inputs(scanned.traced.consts, scanned.traced.carry, scanned.xs, []))
    return carry, ys


def _loop(scanned: Scanned, slots: int, store: Store = DEVICE, memory: int | None = None) -> Loop:
    traced, n = scanned.traced, scanned.length
    is_long = jax.config.jax_enable_x64 if _jax.is_symbolic(n) else n >= 2**31
    if is_long and not jax.config.jax_enable_x64:
        raise ScheduleError(f"{n} steps cannot be counted in 32 bits. Set jax_enable_x64.")
    return Loop(
        traced.body,
        len(traced.consts),
        len(traced.carry),
        slots,
        n,
        reverse=scanned.reverse,
        unroll=scanned.unroll,
        store=store,
        memory=memory,
        # Signed: XLA's CPU compiler before jaxlib 0.11.1 miscompiles slices of the scanned values
        # at an unsigned index in the backward pass.
        counter=np.int64 if is_long else np.int32,
    )


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
        body = checkpointed(step, None) if recomputed else step
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
        body = checkpointed(lambda carry, xs: inner(carry, xs, block), None)
        carry, ys = lax.scan(body, carry, cut, blocks, **options)
        parts.append([y.reshape(blocks * block, *y.shape[2:]) for y in ys])
    if rest:
        carry, ys = inner(carry, [x[last] for x in xs], rest)
        parts.append(ys)
    if len(parts) == 1:
        return carry, parts[0]
    first, second = reversed(parts) if scanned.reverse else parts
    return carry, [jnp.concatenate(pair) for pair in zip(first, second)]
