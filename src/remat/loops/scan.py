"""`remat.scan`: `jax.lax.scan` with reverse-mode memory that the user chooses.

There are two ways to trade memory for recomputation. `choose` takes one (`Choice`, printed by
`remat.scan.explain`):

- *nested*: nested scans whose inner blocks are recomputed. With two levels, and the residuals of one
  block kept, it costs one extra forward sweep and memory that grows as √n. It consists of `lax.scan`
  and `remat.checkpoint` only. This is the default.
- *mixed*: carries and residuals of steps in a fixed memory, and the fewest recomputed steps that are
  possible with it (`schedules.Mixed`), interpreted at run time (`mixed.py`). `checkpoints=` selects it.
  Where the memory never holds residuals of more than one step, it is *binomial* (`loop.py`).

With `budget=`, the one with the least recomputation that fits is taken.

With `policy=`, the body is a region with that policy, which chooses the residuals
(`tracing.trace_body`). A plain `lax.scan` inside a region is split by `ir/split/loops.py`.

The body is traced to a jaxpr, on which both work. A weakly typed initial carry takes up to three traces.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from remat import _jax
from remat.aliases import Arrays, PolicyLike, PyTree, Size
from remat.errors import BudgetError, ScheduleError
from remat.ir.flops import flops_of_program
from remat.loops.arguments import unroll_factor, whole_number
from remat.loops.derivative import run
from remat.loops.halves import Halves
from remat.loops.loop import Inputs, Loop, StoredLevel
from remat.loops.mixed import plan_with
from remat.loops.schedules import Binomial, Hierarchical, Level, Mixed, Multilevel
from remat.loops.sizes import n_bytes, worst_case
from remat.loops.store import DEVICE, Storage, Store, make_store, storages_of
from remat.loops.tracing import (
    Traced,
    after_unused,
    as_arrays,
    checkpointed as checkpointed_body,
    differentiated,
    residual_bytes,
    stacked_bytes,
    trace_body,
)
from remat.units import format_bytes, parse_bytes

# States that a loop keeps if its number of steps is unknown and the user gives no number. With 64, up
# to 45,760 steps are recomputed at most three times each, and 4 million at most five times. A larger
# number keeps more and recomputes less.
DEFAULT_CHECKPOINTS = 64

# What a processor computes while it moves a byte, and what it moves while it starts a kernel. They decide
# whether residuals are kept where all states would fit. A larger first number makes steps cheaper, and a
# larger second one small residuals dearer.
_FLOPS_PER_BYTE = 5
_BYTES_PER_KERNEL = 3000

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
      checkpoints: the memory for the backward pass, as a number of carries. It holds carries, and
        residuals of steps where that saves more; the residuals of one step more are held in addition.
        The number of recomputed steps is the least possible. With another `store`, it is the number of
        carries kept, including the initial one.
      budget: the bytes that may be kept for the backward pass, as a number or as "2GiB". The schedule
        that recomputes least within it is chosen. Without `budget` and `checkpoints`, the schedule is
        the one of least memory that costs at most one extra forward sweep; if the length is a symbolic
        dimension (`jax.export`), it is that of `checkpoints=64`.
      policy: what a step saves while it is reversed, as for `remat.checkpoint`.
      reverse: whether to run from the last x to the first.
      unroll: as for `jax.lax.scan`; it has no effect on a gradient with `checkpoints`.
      inverse: for a step that can be inverted, (carry after the step, x) -> the carry before it. The
        backward pass then finds the carries with it, and keeps none. Rounding errors of the inverse add
        up; with `checkpoints=s` the scan keeps s carries at equal distances, and each is where the
        inversion of the steps before it starts afresh. Derivatives of the gradient keep carries.
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
        _refuse_both(checkpoints, budget)
        # A loop of n steps cannot use more than n slots.
        slots = max(1, min(whole_number(checkpoints, "checkpoints", 1), n))
        carry, ys = _checkpointed(scanned, slots, where)
    else:
        choice = choose(scanned, checkpoints, budget, several)
        if isinstance(choice.schedule, Mixed | Binomial | Hierarchical):
            memory = choice.spare_bytes
            carry, ys = _checkpointed(scanned, choice.slots, where, memory, choice.levels)
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
    store: Literal["device"] | Sequence[Storage] = "device",
) -> Choice:
    """Return what `remat.scan` with the same arguments keeps and recomputes, and why.

    >>> print(explain(lambda x, _: (x * x, x), jnp.ones(4), length=100, checkpoints=5))
    mixed: 100 steps, 5 checkpoints, or up to 6 steps' residuals: 352 forward steps (3.52 per step)
    kept for the backward pass: 96 B = states of 16 B and steps' residuals of 16 B
    why: the fewest steps for checkpoints=5
    """
    scanned = _trace(f, init, xs, length, policy, reverse, unroll)
    return choose(scanned, checkpoints, budget, storages_of(store))


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
      slots: of "mixed" and "binomial": how many states there is memory for.
      spare_bytes: the bytes that there are beside these; a mixed schedule uses them, too.
      levels: the slower levels of storage, of "hierarchical".
    """

    kind: Literal["plain", "nested", "mixed", "binomial", "hierarchical"]
    schedule: Multilevel | Mixed | Binomial | Hierarchical | None
    n: int
    state_bytes: Size
    residual_bytes: Size
    kept_bytes: Size
    why: str
    slots: int = 0
    spare_bytes: int = 0
    levels: tuple[StoredLevel, ...] = ()

    @property
    def forward_steps(self) -> int:
        """Return how often a gradient evaluates the body, including once in each reversed step."""
        if self.schedule is None:
            return self.n
        # A file is filled in the backward pass, which runs the loop once more.
        again = self.n if any(stored.store.one_pass for stored in self.levels) else 0
        return self.schedule.grad_forward_steps + again

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
        elif isinstance(self.schedule, Mixed | Hierarchical):
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


def choose(
    scanned: Scanned,
    checkpoints: int | None,
    budget: str | int | None,
    storages: tuple[Storage, ...] = (),
) -> Choice:
    """Return the schedule with the least recomputation for a number of checkpoints or a budget.

    With several levels of storage, these are the capacity of the device, and the least time counts.
    """
    checkpoints, budget, storages = _of_device(checkpoints, budget, storages)
    _refuse_both(checkpoints, budget)
    n = scanned.length
    if _jax.is_symbolic(n):
        raise ScheduleError(
            f"the number of steps, {n}, is a symbolic dimension, and the schedule depends on its value. "
            "Pass a length that is a number."
        )
    halves = differentiated(scanned.traced)
    state, residual, stacked = _sizes(scanned.traced, halves, budget)

    def choice(
        kind: Any, schedule: Any, kept_bytes: Size, why: str, slots: int = 0, spare: int = 0
    ) -> Choice:
        of_step = stacked if kind in ("plain", "nested") else residual
        return Choice(kind, schedule, n, state, of_step, kept_bytes, why, slots, spare)

    def checkpointed(slots: int, spare: int, why: str) -> Choice:
        """Return the choice in which states and residuals share `spare` bytes and those of `slots` states."""
        if slots > max(n, 1) and not _jax.is_symbolic(state):
            # A loop of n steps has no more states.
            slots, spare = max(n, 1), spare + (slots - max(n, 1)) * state
        loop = _loop(scanned, slots, memory=spare)
        plan = None if halves is None else plan_with(loop, halves)
        if plan is not None:
            kept_bytes = plan.layout.n_bytes(plan.schedule)
            return choice("mixed", plan.schedule, kept_bytes, why, slots, spare)
        return choice("binomial", Binomial(n, slots), (slots + 1) * state, why, slots, spare)

    if storages:
        if any(_jax.is_symbolic(size) for size in (state, stacked)):
            raise ScheduleError(
                "several levels of store= require arrays of known shapes, but the scan has symbolic "
                "dimensions. Pass store='host', or export with numbers."
            )
        sizes = (state, residual, stacked)
        return _hierarchical(scanned, halves, sizes, checkpoints, budget, storages)

    def faster(found: Choice, where: str) -> Choice:
        """Return the choice, or the one that keeps all states and runs each step twice if that is faster."""
        traffic = 0.0 if halves is None else _time_of_residuals(scanned, halves, residual)
        steps = found.forward_steps
        if found.kind == "mixed" and (steps == n or steps + n * traffic <= 2 * n):
            return found
        why = f"{where} holds the states of all {n} steps"
        if found.kind == "mixed":
            why += f", and keeping a step's residuals takes the time of {traffic:.1f} steps"
        return choice("nested", Multilevel(n, (max(n, 1),)), n * state + residual, why)

    plain = choice("plain", None, n * stacked, "the loop is too short to save anything")
    if checkpoints is not None:
        checkpoints = whole_number(checkpoints, "checkpoints", 1)
        fits = not _jax.is_symbolic(state) and n * stacked <= checkpoints * state
        if n > 1 and fits:
            why = f"all fits the memory of checkpoints={checkpoints}"
            return choice("plain", None, plain.kept_bytes, why)
        fewest = checkpointed(checkpoints, 0, f"the fewest steps for checkpoints={checkpoints}")
        return fewest if checkpoints < n else faster(fewest, f"checkpoints={checkpoints}")
    two_levels = Multilevel.balanced(
        n,
        2,
        step_recomputed=False,
        state_bytes=_jax.typical(state),
        residual_bytes=_jax.typical(stacked),
    )
    nested_bytes = two_levels.peak_slots * state + two_levels.peak_residuals * stacked
    nested = choice("nested", two_levels, nested_bytes, "the least memory for one more sweep")
    if budget is None:
        saves = _jax.typical(nested_bytes) < _jax.typical(plain.kept_bytes)
        return nested if saves else plain
    limit = parse_bytes(budget, "budget=")
    # Several steps take the state at hand and its cotangent beside what is kept.
    aside = 2 * state if n > 1 else 0
    room = limit - aside
    if plain.kept_bytes <= room:
        return choice("plain", None, plain.kept_bytes, f"all fits the {format_bytes(limit)}")
    # The residuals in use are not part of the schedule's memory.
    memory = room - residual
    found: Choice | None = None
    if memory >= state:
        slots = min(memory // max(state, 1), max(n, 1))
        why = f"the fewest steps that fit {format_bytes(limit)}"
        found = checkpointed(slots, memory - slots * state, why)
        if (n + 2) * state + residual <= limit:
            found = faster(found, format_bytes(limit))
    if nested_bytes <= room and (found is None or nested.forward_steps <= found.forward_steps):
        # Larger blocks within the budget would not help: two levels cost one sweep for any block size.
        return choice("nested", two_levels, nested_bytes, f"fits the {format_bytes(limit)}")
    if found is None:
        ways = [
            (plain.kept_bytes, "all residuals"),
            (state + residual, f"one state and one step's residuals of {format_bytes(residual)}"),
            (nested_bytes, "two levels of loops"),
        ]
        least, what = min(ways)
        at_hand = (
            f"; the state at hand and its cotangent take {format_bytes(aside)} of it"
            if aside
            else ""
        )
        raise BudgetError(
            f"no schedule of {n} steps fits {format_bytes(limit)}; the smallest keeps {what}, "
            f"{format_bytes(aside + least)} ({aside + least} bytes){at_hand}. Raise budget=, or save less "
            f"in a step with policy=."
        )
    return found


def _of_device(
    checkpoints: int | None, budget: str | int | None, storages: tuple[Storage, ...]
) -> tuple[int | None, str | int | None, tuple[Storage, ...]]:
    """Return the capacity of the device, and the slower levels of storage."""
    if any(storage.where == "device" for storage in storages[1:]):
        raise ScheduleError("the device is the fastest level of store=: list it first, and once.")
    if storages and storages[0].where == "device":
        if checkpoints is not None or budget is not None:
            raise ScheduleError(
                "store= has the capacity of the device: leave out checkpoints= and budget=."
            )
        return storages[0].checkpoints, storages[0].budget, storages[1:]
    return checkpoints, budget, storages


def _hierarchical(
    scanned: Scanned,
    halves: Halves | None,
    sizes: tuple[int, int, int],
    checkpoints: int | None,
    budget: str | int | None,
    storages: tuple[Storage, ...],
) -> Choice:
    """Return the choice for several levels of storage, with so much of the device."""
    n = scanned.length
    state, residual, stacked = sizes
    levels = tuple(
        StoredLevel(
            Level(min(storage.slots(state), n), storage.write, storage.read),
            make_store(storage.where, storage.directory),
        )
        for storage in storages
    )
    if budget is None:
        memory = whole_number(0 if checkpoints is None else checkpoints, "checkpoints", 0) * state
    else:
        # The state at hand, its cotangent and the residuals in use are not part of the memory.
        memory = max(0, parse_bytes(budget, "budget=") - 2 * state - residual)
    if n * stacked <= memory or n <= 1:
        return Choice("plain", None, n, state, stacked, n * stacked, "all fits the device")
    slots = min(memory // max(state, 1), n)
    spare = memory - slots * state
    loop = dataclasses.replace(_loop(scanned, slots, memory=spare), levels=levels)
    plan = None if halves is None else plan_with(loop, halves)
    if plan is None:
        raise ScheduleError(
            f"no schedule of {n} steps fits {format_bytes(memory)} of device memory and "
            f"{[stored.level.slots for stored in levels]} states in the other levels of store=, or the "
            "body has no derivative in reverse mode. Raise the capacities."
        )
    kept_bytes = plan.layout.n_bytes(plan.schedule)
    why = "the least time for steps and transfers"
    return Choice(
        "hierarchical", plan.schedule, n, state, residual, kept_bytes, why, slots, spare, levels
    )


def _time_of_residuals(scanned: Scanned, halves: Halves, residual: int) -> float:
    """Return the time to write and read a step's residuals, in units of the time of a step.

    A step is taken for one fused kernel, which reads its inputs and writes its results. One with side effects
    or of symbolic shapes is taken to last much longer.
    """
    body = scanned.traced.body
    avals = [*_jax.in_avals(body), *_jax.out_avals(body)]
    is_symbolic = any(_jax.is_symbolic(d) for aval in avals for d in getattr(aval, "shape", ()))
    if body.effects or is_symbolic:
        return 0.0
    moved = sum(map(n_bytes, avals))
    step = flops_of_program(body) / _FLOPS_PER_BYTE + moved + _BYTES_PER_KERNEL
    return 2 * (residual + _BYTES_PER_KERNEL * len(halves.kept)) / step


def _refuse_both(checkpoints: int | None, budget: str | int | None) -> None:
    if checkpoints is not None and budget is not None:
        raise ScheduleError(
            f"checkpoints={checkpoints} and budget={budget!r} exclude each other. Pass one of them."
        )


def slots_of_unknown_length(
    traced: Traced, checkpoints: int | None, budget: str | int | None, default: int
) -> int:
    """Return how many states a loop keeps if its number of steps is unknown when it is traced."""
    _refuse_both(checkpoints, budget)
    if budget is not None:
        state, residual, _ = _sizes(traced, differentiated(traced), budget)
        limit = parse_bytes(budget, "budget=")
        # Beside the states: the one at hand, its cotangent, and that of the last step or run.
        slots = (limit - residual) // max(state, 1) - 3
        if limit < 4 * state + residual:
            raise BudgetError(
                f"no schedule fits {format_bytes(limit)}; the smallest keeps "
                f"{format_bytes(4 * state + residual)}: four times a state of {format_bytes(state)} (the "
                f"kept one, that of the last run, the one at hand and its cotangent) and one step's "
                f"residuals of {format_bytes(residual)}. Raise budget=, or save less in a step with "
                f"policy=."
            )
        # With more slots, no loop that ends in practice would recompute less.
        return min(slots, 100_000)
    return default if checkpoints is None else whole_number(checkpoints, "checkpoints", 1)


def _sizes(
    traced: Traced, halves: Halves | None, budget: str | int | None
) -> tuple[Size, Size, Size]:
    """Return the bytes of a state, of a step's residuals, and of those that `lax.scan` keeps.

    With a budget, they are upper bounds.
    """
    state = sum(map(n_bytes, traced.carry))
    residual, stacked = residual_bytes(halves), stacked_bytes(halves)
    if budget is None:
        return state, residual, stacked
    return (
        worst_case("a state", state, budget, "checkpoints="),
        worst_case("one step's residuals", residual, budget, "checkpoints="),
        worst_case("one step's residuals", stacked, budget, "checkpoints="),
    )


# Schedules that are interpreted


def _checkpointed(
    scanned: Scanned,
    slots: int,
    store: Store,
    memory: int | None = None,
    levels: tuple[StoredLevel, ...] = (),
) -> tuple[Arrays, Arrays]:
    """Scan with a backward pass that interprets a schedule at run time."""
    loop = dataclasses.replace(_loop(scanned, slots, store, memory), levels=levels)
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
    loop = _loop(scanned, min(blocks, n), memory=0)
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
