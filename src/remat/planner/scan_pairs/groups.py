"""The two scans of a pair that runs in groups of steps.

The forward scan runs over the groups and stacks the carry at each group's start. An iteration of the
backward scan first runs the forward scan over its group from that carry, which stacks the kept values of the
group's steps, and then the backward scan over the group. Some values may be kept for the steps of all groups:
then running a group again reads them. If these are what matrix products computed, hardly more than the carry
is computed again.

If F's first steps keep other values than the rest, each of the two scans becomes two loops. Both loops read
slices of the same arrays by index, and write to the same arrays, which are part of the carry: splitting these
arrays, or concatenating two parts of them, would copy them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from remat import _jax
from remat.aliases import Array, PyTree
from remat.planner.scan_pairs.emission import Emitted, init_of, outside, slices_of, stack_of
from remat.planner.traced_loops import bind_scan, equations_of, new_stack, with_rows

_jax.exclude_from_tracebacks(__file__)


def in_groups(
    emitted: Emitted, group: int, lasting: Sequence[_jax.Var] = ()
) -> tuple[list[_jax.JaxprEqn], list[_jax.JaxprEqn]]:
    """Return both scans in groups of steps.

    Args:
      emitted: the values that the steps of a group keep while it is reversed.
      group: the number of steps in a group, which divides the length.
      lasting: the values that the steps of all groups keep.
    """
    joint = emitted.joint
    forward, backward = joint.forward, joint.backward
    n_consts, n_carry = len(joint.consts), len(joint.carry)
    length, n_groups = joint.length, joint.length // group
    keeping, given = emitted.step_again(lasting)
    lasts = set(lasting)
    read = [*given, *(v for v in emitted.kept if v in lasts)]
    stacks = {v: joint.stacked.get(v) or stack_of(joint, v) for v in read}
    own = [v for v in stacks if v not in joint.stacked]
    places = {v: at for at, v in enumerate(v for v in emitted.kept if v not in stacks)}
    bare = emitted.forward_step([*(v for _, v in joint.kept), *own])
    step = emitted.backward_step(group)

    def fold(x: PyTree) -> PyTree:
        return x.reshape(n_groups, group, *x.shape[1:])

    def unfold(y: PyTree) -> PyTree:
        return y.reshape(length, *y.shape[2:])

    def run_forward(args: Sequence[Array]) -> list[Array]:
        consts, init, xs = _jax.split_list(list(args), [n_consts, n_carry])

        def of_group(carry: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
            outs = bind_scan(forward, bare, (*consts, *carry, *xs), n_consts, n_carry, group)
            after, ys = _jax.split_list(outs, [n_carry])
            return after, (list(carry), ys)

        carry, (starts, ys) = jax.lax.scan(
            of_group, init, list(map(fold, xs)), n_groups, reverse=forward.params["reverse"]
        )
        return [*carry, *map(unfold, ys), *starts]

    starts = [_jax.new_var(_jax.stacked(n_groups, v.aval)) for v in joint.carry]
    n_own = len(joint.backward_carry)
    n_own_consts = _jax.scan_arity(backward)[0]
    # A loop slices each of its operands, even if two are the same array.
    f_sliced, b_sliced = slices_of(joint), outside(emitted, emitted.xs)
    sliced = list(dict.fromkeys((*f_sliced, *b_sliced)))

    def run_backward(args: Sequence[Array]) -> list[Array]:
        f_consts, consts, init, starts, stacked, arrays = _jax.split_list(
            list(args), [n_consts, len(emitted.consts), n_own, n_carry, len(stacks)]
        )

        def of_group(carry: PyTree, slices: PyTree) -> tuple[PyTree, PyTree]:
            start, stacked, arrays = slices
            of, slice_of = dict(zip(stacks, stacked)), dict(zip(sliced, arrays))
            f_xs, xs = ([slice_of[a] for a in of_scan] for of_scan in (f_sliced, b_sliced))
            taken = (*f_consts, *start, *f_xs, *(of[v] for v in given))
            outs = bind_scan(forward, keeping, taken, n_consts, n_carry, group)[n_carry:]
            kept = [of[v] if v in of else outs[places[v]] for v in emitted.kept]
            outs = bind_scan(
                backward, step, (*consts, *carry, *kept, *xs), len(consts), n_own, group
            )
            after, ys = _jax.split_list(outs, [n_own])
            return after, ys

        slices = starts, list(map(fold, stacked)), list(map(fold, arrays))
        carry, ys = jax.lax.scan(
            of_group, init, slices, n_groups, reverse=backward.params["reverse"]
        )
        return [*carry, *map(unfold, ys)]

    remaining = [forward.outvars[k] for k, _ in joint.kept]
    constants = [joint.outside[v] for v in joint.consts]
    new_forward = equations_of(
        run_forward,
        [*constants, *init_of(joint), *slices_of(joint)],
        [*forward.outvars[:n_carry], *remaining, *(stacks[v] for v in own), *starts],
        forward,
    )
    new_backward = equations_of(
        run_backward,
        [
            *constants,
            *outside(emitted, emitted.consts),
            *backward.invars[n_own_consts : n_own_consts + n_own],
            *starts,
            *stacks.values(),
            *sliced,
        ],
        backward.outvars,
        backward,
    )
    return new_forward, new_backward


def in_two_loops(
    first: Emitted, group: int, n_first: int, rest: Emitted
) -> tuple[list[_jax.JaxprEqn], list[_jax.JaxprEqn]]:
    """Return both scans as two loops each: over F's first steps, and over those after them.

    Args:
      first: the values that F's first steps keep; within their groups, if these have several steps.
      group: the number of steps in a group, which divides `n_first`.
      n_first: the number of first steps.
      rest: the values that the steps after them keep.
    """
    loops = _TwoLoops(first, group, n_first, rest)
    joint = first.joint
    forward, backward = joint.forward, joint.backward
    kept_first = [
        _jax.new_var(_jax.stacked(n_first // group, v.aval))
        for v in (joint.carry if loops.is_grouped else first.passed)
    ]
    kept = [_jax.new_var(_jax.stacked(joint.length - n_first, v.aval)) for v in rest.passed]
    constants = [joint.outside[v] for v in joint.consts]
    new_forward = equations_of(
        loops.run_forward,
        [*constants, *init_of(joint), *slices_of(joint)],
        [
            *forward.outvars[: len(joint.carry)],
            *(forward.outvars[k] for k, _ in joint.kept),
            *kept_first,
            *kept,
        ],
        forward,
    )
    own = _jax.scan_arity(backward)[0]
    new_backward = equations_of(
        loops.run_backward,
        [
            *constants,
            *slices_of(joint),
            *(
                v
                for part in (first, rest)
                for names in (part.consts, part.xs)
                for v in outside(part, names)
            ),
            *backward.invars[own : own + len(joint.backward_carry)],
            *kept_first,
            *kept,
        ],
        backward.outvars,
        backward,
    )
    return new_forward, new_backward


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _TwoLoops:
    """The functions that compute both scans of a pair as two loops; the arguments of `in_two_loops`.

    `time` is the number of a step in the order in which F runs them.
    """

    first: Emitted
    group: int
    n_first: int
    rest: Emitted

    @property
    def is_grouped(self) -> bool:
        return self.group > 1

    @property
    def begins(self) -> Array:
        """Return the first time of each group."""
        return self.group * jnp.arange(self.n_first // self.group)

    def index(self, time: Array) -> Array:
        """Return where the slices of a step are in stacks."""
        joint = self.first.joint
        return joint.length - 1 - time if joint.forward.params["reverse"] else time

    def run_forward(self, args: Sequence[Array]) -> list[Array]:
        """Return the results of F, and the stacks of its first steps and of the others."""
        joint, group, n_first = self.first.joint, self.group, self.n_first
        n_carry, stacked = len(joint.carry), [v for _, v in joint.kept]
        consts, init, xs = _jax.split_list(list(args), [len(joint.consts), n_carry])
        bare = self.first.forward_step(stacked)
        saving = self.first.forward_step([*stacked, *self.first.passed])
        saving_rest = self.rest.forward_step(
            [*(v for _, v in self.rest.joint.kept), *self.rest.passed]
        )

        def one(state: PyTree, time: Array, body: _jax.Jaxpr) -> tuple[PyTree, PyTree]:
            carry, stacks = state
            at = self.index(time)
            outs = _jax.eval_jaxpr(body, (), *consts, *carry, *_at(xs, at))
            after, ys, kept = _jax.split_list(outs, [n_carry, len(stacks)])
            return (after, with_rows(stacks, at, ys)), kept

        def run(state: PyTree, times: Array, body: _jax.Jaxpr) -> tuple[PyTree, PyTree]:
            return jax.lax.scan(lambda state, time: one(state, time, body), state, times)

        def of_group(state: PyTree, begin: Array) -> tuple[PyTree, PyTree]:
            after, _ = run(state, begin + jnp.arange(group), bare)
            return after, state[0]

        state: PyTree = (list(init), [new_stack(v.aval, joint.length) for v in stacked])
        if self.is_grouped:
            state, kept_first = jax.lax.scan(of_group, state, self.begins)
        else:
            state, kept_first = run(state, jnp.arange(n_first), saving)
        (carry, stacks), kept = run(state, jnp.arange(n_first, joint.length), saving_rest)
        return [*carry, *stacks, *kept_first, *kept]

    def run_backward(self, args: Sequence[Array]) -> list[Array]:
        """Return the results of B."""
        joint, first, rest = self.first.joint, self.first, self.rest
        n_own, length = len(joint.backward_carry), joint.length
        n_kept_first = len(joint.carry if self.is_grouped else first.passed)
        # Times are numbered in F's order. B usually runs through them backwards.
        goes_back = joint.backward.params["reverse"] != joint.forward.params["reverse"]
        keeping, _ = first.step_again()
        n_at_once = self.group if self.is_grouped else self.n_first
        steps = first.backward_step(n_at_once), rest.backward_step(length - self.n_first)
        f_consts, f_xs, *own, init, of_first_steps, of_others = _jax.split_list(
            list(args),
            [
                *(len(joint.consts), len(joint.xs)),
                *(len(first.consts), len(first.xs)),
                *(len(rest.consts), len(rest.xs)),
                *(n_own, n_kept_first),
            ],
        )
        own_of = own[:2], own[2:]

        def run(state: PyTree, times: Array, kept: PyTree, part: int) -> PyTree:
            consts, xs = own_of[part]

            def one(state: PyTree, now: Array) -> tuple[PyTree, None]:
                (carry, stacks), (time, kept) = state, now
                at = self.index(time)
                outs = _jax.eval_jaxpr(steps[part], (), *consts, *carry, *kept, *_at(xs, at))
                after, ys = _jax.split_list(outs, [n_own])
                return (after, with_rows(stacks, at, ys)), None

            return jax.lax.scan(one, state, (times, kept), reverse=goes_back)[0]

        def again(carry: PyTree, time: Array) -> tuple[PyTree, PyTree]:
            at = self.index(time)
            outs = _jax.eval_jaxpr(keeping, (), *f_consts, *carry, *_at(f_xs, at))
            after, kept = _jax.split_list(outs, [len(joint.carry)])
            return after, kept

        def of_group(state: PyTree, begin_and_start: PyTree) -> tuple[PyTree, None]:
            begin, start = begin_and_start
            times = begin + jnp.arange(self.group)
            _, kept = jax.lax.scan(again, start, times)
            return run(state, times, kept, 0), None

        def of_first(state: PyTree) -> PyTree:
            kept = list(of_first_steps)
            if not self.is_grouped:
                return run(state, jnp.arange(self.n_first), kept, 0)
            return jax.lax.scan(of_group, state, (self.begins, kept), reverse=goes_back)[0]

        def of_rest(state: PyTree) -> PyTree:
            return run(state, jnp.arange(self.n_first, length), list(of_others), 1)

        state = list(init), [new_stack(v.aval, length) for v in joint.backward_results[n_own:]]
        carry, stacks = of_first(of_rest(state)) if goes_back else of_rest(of_first(state))
        return [*carry, *stacks]


def _at(arrays: Sequence[Array], index: Array) -> list[Array]:
    return [
        jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False, allow_negative_indices=False)
        for x in arrays
    ]
