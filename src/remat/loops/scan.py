"""`remat.scan`: `jax.lax.scan` whose reverse-mode memory the user chooses.

Two ways of spending memory, and a choice between them (`Choice`, printed by `remat.scan.explain`):

- *nested*: scans in scans, with the blocks between them recomputed. With two levels and the
  residuals of one block kept it costs one more forward sweep and about √n in memory. It is made of
  `lax.scan` and `remat.checkpoint` alone. This is the default.
- *binomial*: a fixed number of states and the fewest recomputed steps possible for it
  (`schedules.Binomial`), interpreted at run time (`loop.py`). This is what `checkpoints=` means.

With `budget=`, the cheapest of the two that fits is taken.

The body is traced to a jaxpr once, twice or three times where the carry starts weakly typed; both
ways work on the jaxpr.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from remat.errors import BudgetError, ScheduleError
from remat.loops import _internals_todo as _jax
from remat.loops.derivative import run
from remat.loops.loop import Inputs, Loop
from remat.loops.schedules import Binomial, Multilevel
from remat.units import format_bytes, parse_bytes

# API


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    checkpoints: int | None = None,
    budget: str | int | None = None,
    policy: Callable | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """Like `jax.lax.scan`, with the reverse-mode memory that you choose.

    >>> import jax, jax.numpy as jnp, remat
    >>> def loss(x):
    ...     step = lambda x, _: (jnp.sin(x), None)
    ...     return remat.loops.scan.scan(step, x, length=1000, checkpoints=10)[0].sum()
    >>> jax.grad(loss)(jnp.ones(3)).shape
    (3,)

    Args:
      f: the body, (carry, x) -> (carry, y), as for `jax.lax.scan`.
      init: the initial carry, a pytree of arrays of any type.
      xs: a pytree of arrays with the same leading axis, of `length`; or None.
      length: the number of steps, needed where `xs` has no leaves.
      checkpoints: how many carries are kept for the backward pass, the initial one included; one
        more is at hand when it begins. The fewest steps possible for that number are recomputed.
      budget: the bytes that may be kept for the backward pass, as a number or as "2GiB"; the
        cheapest way that fits is chosen. Where neither this nor `checkpoints` is given, the
        choice is the one of least memory that costs at most one more forward sweep.
      policy: what is saved inside a step while it is reversed, as for `remat.checkpoint`.
      reverse: run from the last x to the first.
      unroll: as for `jax.lax.scan`; the binomial backward pass does not unroll.

    Returns:
      The final carry and the stacked ys.

    Raises:
      ScheduleError: `checkpoints` below 1, or together with `budget`.
      BudgetError: `budget` is below the smallest memory that any way needs.
      UnitsError: a `budget` that is no number of bytes.
      TypeError, ValueError: what `jax.lax.scan` raises for the same call.

    Reference: Griewank & Walther, Algorithm 799: revolve, ACM TOMS 26 (2000).
    """
    traced = _trace(f, init, xs, length, policy, reverse, unroll)
    choice = _choose(traced, checkpoints, budget)
    if isinstance(choice.schedule, Binomial):
        loop = Loop(
            traced.body,
            len(traced.consts),
            len(traced.carry),
            choice.schedule.slots,
            traced.length,
            reverse=reverse,
            unroll=unroll,
        )
        carry, ys, _ = run(loop, Inputs(traced.consts, traced.carry, traced.xs, []))
    else:
        lengths = (traced.length,) if choice.schedule is None else choice.schedule.lengths
        recomputed = choice.schedule is not None and choice.schedule.step_recomputed
        carry, ys = _nested(traced, traced.carry, traced.xs, traced.length, lengths, recomputed)
    return jax.tree.unflatten(traced.carry_tree, carry), jax.tree.unflatten(traced.y_tree, ys)


def explain(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    checkpoints: int | None = None,
    budget: str | int | None = None,
    policy: Callable | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> Choice:
    """What `remat.scan` with the same arguments keeps and recomputes, and why.

    >>> print(explain(lambda x, _: (x * x, x), jnp.ones(4), length=100, checkpoints=5))
    binomial: 100 steps, 5 slots: 416 forward steps (4.16 per step), repeated at most 5 times
    kept for the backward pass: 96 B = 6 states of 16 B
    why: the fewest steps for checkpoints=5
    """
    return _choose(_trace(f, init, xs, length, policy, reverse, unroll), checkpoints, budget)


scan.explain = explain  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Choice:
    """How a scan will be reversed.

    Attributes:
      kind: "plain" keeps the residuals of all steps; "nested" and "binomial" see the module.
      schedule: with the exact costs; None for "plain".
      n: steps.
      state_bytes: of one carry.
      residual_bytes: of what one step keeps to be reversed, inputs of the scan excluded.
      kept_bytes: of all that is kept at the worst moment of the backward pass.
      why: the reason, in words.
    """

    kind: Literal["plain", "nested", "binomial"]
    schedule: Multilevel | Binomial | None
    n: int
    state_bytes: int
    residual_bytes: int
    kept_bytes: int
    why: str

    @property
    def forward_steps(self) -> int:
        """Evaluations of the body for a gradient, with one inside each reversed step."""
        return self.n if self.schedule is None else self.schedule.grad_forward_steps

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
        elif isinstance(self.schedule, Binomial):
            head = str(self.schedule)
            kept = f"{self.schedule.slots + 1} states of {format_bytes(self.state_bytes)}"
        return (
            f"{head}\nkept for the backward pass: {format_bytes(self.kept_bytes)} = {kept}\n"
            f"why: {self.why}"
        )


# Tracing


class Traced(NamedTuple):
    """The body as a jaxpr (see `Loop.body`), and what the loop is run on."""

    body: Any
    consts: list[Any]
    carry: list[Any]
    xs: list[Any]
    length: int
    carry_tree: Any
    y_tree: Any
    reverse: bool
    unroll: int | bool


def _trace(
    f: Callable,
    init: Any,
    xs: Any,
    length: int | None,
    policy: Callable | None,
    reverse: bool,
    unroll: int | bool,
) -> Traced:
    xs_leaves, xs_tree = jax.tree.flatten(xs)
    xs_leaves = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in xs_leaves]
    lengths = {x.shape[0] if x.ndim else None for x in xs_leaves}
    lengths |= set() if length is None else {int(length)}
    if len(lengths) != 1 or None in lengths or min(lengths) < 0:
        lax.scan(f, init, xs, length, reverse=reverse, unroll=unroll)
        raise AssertionError("jax.lax.scan accepts lengths that differ")
    (n,) = lengths
    body = f if policy is None else _checkpointed(f, policy)
    slices = jax.tree.unflatten(
        xs_tree, [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in xs_leaves]
    )
    carry, carry_tree = jax.tree.flatten(init)
    carry = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in carry]
    for _ in range(3):
        jaxpr, consts, out = _jax.trace(body, jax.tree.unflatten(carry_tree, carry), slices)
        if not isinstance(out, tuple) or len(out) != 2 or jax.tree.structure(out[0]) != carry_tree:
            break
        types = jax.tree.leaves(out[0])
        if all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(carry, types)):
            y_tree = jax.tree.structure(out[1])
            return Traced(
                jaxpr, consts, carry, xs_leaves, n, carry_tree, y_tree, reverse, unroll
            )
        # A carry that starts as a Python number takes the type of what follows it.
        carry = [
            x.astype(t.dtype) if jax.typeof(x).weak_type and x.shape == t.shape else x
            for x, t in zip(carry, types)
        ]
    lax.scan(f, init, xs, length, reverse=reverse, unroll=unroll)
    raise AssertionError("jax.lax.scan accepts a carry that changes its type")


def _checkpointed(f: Callable, policy: Callable | None) -> Callable:
    return jax.checkpoint(f, policy=policy, prevent_cse=False)


# Choosing


def _choose(traced: Traced, checkpoints: int | None, budget: str | int | None) -> Choice:
    if checkpoints is not None and budget is not None:
        raise ScheduleError(
            f"checkpoints={checkpoints} and budget={budget!r} both say what to keep. Give one."
        )
    n = traced.length
    state = sum(_bytes(x) for x in traced.carry)
    residual = _residual_bytes(traced)

    def choice(kind: Any, schedule: Any, kept_bytes: int, why: str) -> Choice:
        return Choice(kind, schedule, n, state, residual, kept_bytes, why)

    plain = choice("plain", None, n * residual, "the loop is too short to save anything")
    if checkpoints is not None:
        schedule = Binomial(n, checkpoints)
        if checkpoints < n:
            return choice(
                "binomial",
                schedule,
                (checkpoints + 1) * state,
                f"the fewest steps for checkpoints={checkpoints}",
            )
        every = Multilevel(n, (max(n, 1),))
        why = f"checkpoints={checkpoints} hold the states of all {n} steps"
        return choice("nested", every, n * state + residual, why)
    two_levels = Multilevel.balanced(
        n, 2, step_recomputed=False, state_bytes=state, residual_bytes=residual
    )
    nested_bytes = two_levels.peak_slots * state + two_levels.peak_residuals * residual
    nested = choice("nested", two_levels, nested_bytes, "the least memory for one more sweep")
    if budget is None:
        return nested if nested_bytes < plain.kept_bytes else plain
    limit = parse_bytes(budget)
    if plain.kept_bytes <= limit:
        return choice("plain", None, plain.kept_bytes, f"all fits the {format_bytes(limit)}")
    if nested_bytes <= limit:
        # The largest blocks that fit do not matter for the number of sweeps: it is one.
        return choice("nested", two_levels, nested_bytes, f"fits the {format_bytes(limit)}")
    slots = min((limit - residual) // max(state, 1) - 1, n)
    if slots < 1:
        least = 2 * state + residual
        raise BudgetError(
            f"no schedule of {n} steps fits {format_bytes(limit)}; the smallest keeps "
            f"{format_bytes(least)}: two states of {format_bytes(state)} and one step's residuals "
            f"of {format_bytes(residual)}. Raise budget=, or save less in a step with policy=."
        )
    return choice(
        "binomial",
        Binomial(n, slots),
        (slots + 1) * state + residual,
        f"the fewest steps for the {slots + 1} states that fit {format_bytes(limit)}",
    )


def _residual_bytes(traced: Traced) -> int:
    """Of what differentiating one step keeps, without the consts and the slice of the xs."""
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in _jax.in_avals(traced.body)]
    inexact = [_jax.has_tangent(t) for t in types]

    def residuals(*values: Any) -> Any:
        def step(*marked: Any) -> list[Any]:
            replacement = iter(marked)
            out = _jax.eval_jaxpr(
                traced.body, [next(replacement) if m else v for v, m in zip(values, inexact)]
            )
            return [y for y in out if _jax.has_tangent(y)]

        _, pull = jax.vjp(step, *(v for v, m in zip(values, inexact) if m))
        return jax.tree.leaves(pull)

    jaxpr, consts, _ = _jax.trace(residuals, *types)
    n_fixed, n_carry = len(traced.consts), len(traced.carry)
    inputs = jaxpr.invars[len(consts) :]
    fixed = {*jaxpr.invars[: len(consts)], *inputs[:n_fixed], *inputs[n_fixed + n_carry :]}
    return sum(_bytes(v.aval) for v in {*filter(_jax.is_var, jaxpr.outvars)} - fixed)


def _bytes(x: Any) -> int:
    return int(x.size) * x.dtype.itemsize


# Nesting


def _nested(
    traced: Traced, carry: Any, xs: Any, n: int, lengths: tuple[int, ...], recomputed: bool
) -> tuple[Any, Any]:
    """Scan the blocks that `Multilevel` describes; blocks are recomputed as a whole."""
    options = {"reverse": traced.reverse}

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        out = _jax.eval_jaxpr(traced.body, [*traced.consts, *carry, *x])
        return out[: len(carry)], out[len(carry) :]

    if len(lengths) == 1 or n == 0:
        body = _checkpointed(step, None) if recomputed else step
        return lax.scan(body, carry, xs, n, unroll=traced.unroll, **options)
    block = 1
    for length in lengths[1:]:
        block *= length
    blocks, rest = divmod(n, block)

    def inner(carry: Any, xs: Any, n: int) -> tuple[Any, Any]:
        return _nested(traced, carry, xs, n, lengths[1:], recomputed)

    # The blocks come first in the order of execution, the rest last.
    main, last = slice(0, blocks * block), slice(blocks * block, n)
    if traced.reverse:
        main, last = slice(rest, n), slice(0, rest)
    parts = []
    if blocks:
        cut = [x[main].reshape(blocks, block, *x.shape[1:]) for x in xs]
        body = _checkpointed(lambda carry, xs: inner(carry, xs, block), None)
        carry, ys = lax.scan(body, carry, cut, blocks, **options)
        parts.append([y.reshape(blocks * block, *y.shape[2:]) for y in ys])
    if rest:
        carry, ys = inner(carry, [x[last] for x in xs], rest)
        parts.append(ys)
    if len(parts) == 1:
        return carry, parts[0]
    first, second = reversed(parts) if traced.reverse else parts
    return carry, [jnp.concatenate(pair) for pair in zip(first, second)]
