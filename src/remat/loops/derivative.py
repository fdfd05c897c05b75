"""Derivatives of a loop, of any order and in any mode, from three ways of running it.

Let L be the loop as a function of its inputs x. `run(loop, x)` is L(x) with these rules, each
of which again calls only L of some loop, so that they close under differentiation:

    J(x)·v      = the tangent half of L₁(x, v), where L₁ is the loop whose body is the derivative
                  of the body, on the carry (c, ċ). This is forward mode.
    J(x)ᵀ·w     = the backward loop, from the checkpoints that L's sweep kept. It is the transpose
                  that the linear map J(x) carries with it (`linear.py`). This is reverse mode.
    d/dx of J(x)·v    is the derivative of L₁.
    d/dx of J(x)ᵀ·w   in direction v is the gradient with respect to x of ⟨w, J(x)·v⟩, which is
                  reverse mode of L₁. It is linear in v, and its transpose is the same expression
                  with the roles of v and of the gradient swapped (second derivatives commute).
                  The transpose is right for any rules of the body. The map itself assumes that
                  they compute derivatives. Rules of `jax.custom_jvp` need not: where the body has
                  one, the backward loop is differentiated in forward mode instead. (A further
                  derivative of that assumes it again.)

The last rule is what makes reverse-over-reverse work although the backward loop itself, with its
data-dependent trip counts, cannot be differentiated in reverse. All loops use the memory of as many
of their states, so second derivatives are checkpointed like first ones.

Checkpoints are values of the program as well, functions of x. Nothing but the backward loop reads
them, and its rule differentiates through x; so their own derivative is declared zero. Where
they include residuals of steps, they belong to the inputs that are differentiated: a further
derivative, with respect to others, sweeps again.

If the body calls a function with a `jax.custom_vjp`, forward mode is not defined; `forward_mode.py`
explains how the rules are handled.

Only forward mode pays for this generality: it runs the primal loop twice, once alone and once together with
the tangents. The first of these is the sweep; XLA removes its buffers, which nothing reads then, unless they
pass through a loop in a loop together with the carry, as those of `online.sweep` do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from remat import _jax
from remat.aliases import Array, Arrays, Aval, PyTree, TreeDef
from remat.errors import EffectError
from remat.loops import mixed
from remat.loops.forward_mode import (
    has_forward_mode,
    push,
    refused,
    surely_has_forward_mode,
    uses_custom_jvp,
    uses_custom_vjp,
)
from remat.loops.keep_rules import keep_rules
from remat.loops.linear import LinearMap, align, linear_call
from remat.loops.loop import (
    Inputs,
    Loop,
    Mask,
    Results,
    merge,
    plain,
    select,
    split_inputs,
)
from remat.loops.states import backward, sweep
from remat.loops.tracing import REFS_NOT_SUPPORTED, as_arrays


def run(loop: Loop, inputs: Inputs) -> Results:
    """Return the results of a loop, differentiable in every mode."""
    if any(_jax.has_ref_effects(jaxpr) for jaxpr in (loop.body, loop.test) if jaxpr is not None):
        raise EffectError(REFS_NOT_SUPPORTED)
    return _split_results(loop, _function(loop)(_flat(inputs)))


# The function and its rule


def _function(loop: Loop) -> Callable:
    """Return L as a JAX function on flat lists."""

    @jax.custom_jvp
    def function(flat: Arrays) -> Arrays:
        flat = as_arrays(flat)
        return align(_flat(plain(loop, split_inputs(loop, flat))), flat)

    def rule(primals: tuple, tangents: tuple) -> tuple[Arrays, Arrays]:
        (flat,), (flat_tangents,) = primals, tangents
        flat = as_arrays(flat)
        results, held = _sweeping(loop, _mask(flat, flat_tangents))(flat)
        return results, _tangents(loop, flat, results, held, flat_tangents)

    function.defjvp(rule, symbolic_zeros=True)
    return keep_rules(function)


def _sweeping(loop: Loop, mask: Mask) -> Callable:
    """Return L with its checkpoints, for derivatives with respect to the inputs in `mask`, as results.

    The derivative of the checkpoints is defined as zero.
    """

    @jax.custom_jvp
    def function(flat: Arrays) -> tuple[Arrays, PyTree]:
        flat = as_arrays(flat)
        results, held = mixed.sweep(loop, split_inputs(loop, flat), split_inputs(loop, mask))
        return align(_flat(results), flat), held

    def rule(primals: tuple, tangents: tuple) -> tuple[PyTree, PyTree]:
        (flat,), (flat_tangents,) = primals, tangents
        flat = as_arrays(flat)
        results, held = keep_rules(function)(flat)
        no_tangents = jax.tree.map(_zero_tangent, held)
        differentiated, constants = _with_forward_rules(loop)
        values, given = [*constants, *flat], [*map(_no_tangent, constants), *flat_tangents]
        kept, new_mask = held, _mask(values, given)
        keeps_residuals = loop.memory is not None and loop.inverse is None
        if keeps_residuals and (new_mask != mask or differentiated is not loop):
            # The residuals of a step depend on what is differentiated.
            _, kept = _sweeping(differentiated, new_mask)(values)
        out_tangents = _tangents(differentiated, values, results, kept, given)
        return (results, held), (out_tangents, no_tangents)

    function.defjvp(rule, symbolic_zeros=True)
    return keep_rules(function)


def _tangents(loop: Loop, flat: Arrays, results: Arrays, held: PyTree, tangents: Arrays) -> Arrays:
    """Return J(x)·v as a linear map that has its transpose."""
    mask = _mask(flat, tangents)
    out_mask = _out_mask(loop, mask)
    linear_map = _derivative_map(loop, mask, jax.tree.structure(held))
    residuals = [*flat, *jax.tree.leaves(held)]
    found = linear_call(linear_map, residuals, select(tangents, mask)) if any(out_mask) else []
    return merge([_zero_tangent(r) for r in results], out_mask, found)


def _with_forward_rules(loop: Loop) -> tuple[Loop, Arrays]:
    """Return L in which functions compute their values by their custom rules, and its new constants.

    As in JAX, the value of a function with a `jax.custom_vjp` is that of its forward rule, and the value of
    one with a `jax.custom_jvp` is the one that its rule returns. A further derivative differentiates the
    rules and not the functions. The new constants come first.
    """
    if not (uses_custom_vjp(loop.body) or uses_custom_jvp(loop.body)):
        return loop, []
    types = _jax.in_avals(loop.body)
    mask = tuple(_jax.has_tangent(t) for t in types)
    out_mask = [_jax.has_tangent(t) for t in _jax.out_avals(loop.body)]

    def body(*values: Array) -> Arrays:
        def step(*marked: Array) -> tuple[Arrays, Arrays]:
            results = _jax.call_jaxpr(loop.body, merge(values, mask, marked))
            return select(results, out_mask), results

        marked = select(values, mask)
        if uses_custom_vjp(loop.body):
            inexact, _, results = jax.vjp(step, *marked, has_aux=True)
        else:
            # JAX 0.10 inlines the rules of `jax.custom_jvp` in the forward pass of a scan's reverse
            # mode, after which it has no derivative where they call the host.
            inexact, _, results = jax.jvp(step, marked, marked, has_aux=True)
        return merge(results, out_mask, inexact)

    jaxpr, constants, _ = _jax.trace_call(body, *types)
    n_results = len(_jax.out_avals(jaxpr))
    jaxpr, _ = _jax.dce(jaxpr, [True] * n_results, keep=[True] * len(_jax.in_avals(jaxpr)))
    first, last, n_carry = loop.test_reads
    n = len(constants)
    opened = dataclasses.replace(
        loop,
        body=jaxpr,
        n_consts=n + loop.n_consts,
        test_reads=(first + n, last + n, n_carry),
        inverse_reads=(loop.inverse_reads[0] + n, loop.inverse_reads[1] + n),
    )
    return opened, list(constants)


# The linear maps


def _derivative_map(loop: Loop, mask: Mask, held_tree: TreeDef) -> LinearMap:
    """Return the map v ↦ J(x)·v for the inputs in `mask`; residuals: x and the checkpoints."""
    n_inputs = len(mask)
    out_mask = _out_mask(loop, mask)

    def apply(residuals: Arrays, v: Arrays) -> Arrays:
        augmented, inputs = _augmented(loop, mask, residuals[:n_inputs], v)

        def tangents(inputs: Inputs) -> Arrays:
            return _tangent_half(loop, mask, _flat(plain(augmented, inputs)))

        if has_forward_mode(augmented.body):
            return tangents(inputs)
        types = _jax.out_avals(_jax.trace_call(tangents, inputs)[0])
        return refused([*residuals, *v], types)

    def transposed(residuals: Arrays, w: Arrays) -> Arrays:
        inputs = split_inputs(loop, residuals[:n_inputs])
        held = jax.tree.unflatten(held_tree, residuals[n_inputs:])
        cotangents = merge([None] * len(out_mask), out_mask, w)
        found = mixed.backward(
            loop,
            inputs,
            held,
            _split_results(loop, cotangents),
            split_inputs(loop, mask),
        )
        return select(_flat(found), mask)

    def jvp(residuals: Arrays, v: Arrays, d_residuals: Arrays, d_v: Arrays) -> Arrays:
        if not _derivative_has_forward_mode(loop, mask, residuals[:n_inputs], v):
            return apply(residuals, v)  # undefined as well, and of the same types
        return _jvp(
            lambda x, v: _pushed(loop, mask, x, v),
            (residuals[:n_inputs], v),
            (d_residuals[:n_inputs], d_v),
        )

    def transposed_jvp(residuals: Arrays, w: Arrays, d_residuals: Arrays, d_w: Arrays) -> Arrays:
        x, d_x = residuals[:n_inputs], d_residuals[:n_inputs]
        moved = tuple(d is not None and _jax.has_tangent(a) for a, d in zip(x, d_x))
        w_moved = any(d is not None for d in d_w)
        d_w = [jnp.zeros_like(a) if d is None else d for a, d in zip(w, d_w)]
        cotangents = merge([None] * len(out_mask), out_mask, w)

        def moved_transpose(residuals: Arrays, v: Arrays) -> Arrays:
            w = merge([None] * len(out_mask), out_mask, residuals[n_inputs:])
            return _moved_transpose(loop, moved, mask, residuals[:n_inputs], v, w, [None] * len(w))

        either = tuple(a or b for a, b in zip(moved, mask))
        if not _derivative_has_forward_mode(loop, either, x, select(x, either)):
            moving = _moving_map(loop, moved, mask, out_mask)
            return linear_call(moving, [*x, *w], [*select(d_x, moved), *d_w])
        total: Arrays = [jnp.zeros_like(x) for x in select(x, mask)]
        if w_moved:
            total = linear_call(linear_map.T, residuals, d_w)
        if any(moved):
            second = _hessian_map(loop, moved, mask, cotangents)
            if uses_custom_jvp(loop.body):
                second = dataclasses.replace(second, apply=moved_transpose)
            found = linear_call(second, [*x, *w], select(d_x, moved))
            total = [a + b for a, b in zip(total, found)]
        return total

    store = loop.one_pass_store
    errors = None if store is None else store.errors_of_callbacks
    linear_map = LinearMap(apply, transposed, jvp, transposed_jvp, errors)
    return linear_map


def _hessian_map(loop: Loop, moved: Mask, mask: Mask, like: Arrays) -> LinearMap:
    """Return the map from v to the gradient of ⟨w, J(x)·v⟩ with respect to the inputs in `mask`.

    v lies in the inputs `moved`. Residuals: x and those w that are not None in `like`.
    """
    n_inputs = len(mask)
    present = tuple(ct is not None for ct in like)

    def gradient(v_mask: Mask, x_mask: Mask, residuals: Arrays, v: Arrays) -> Arrays:
        x = residuals[:n_inputs]
        w = merge(like, present, residuals[n_inputs:])
        w = [ct for ct, reached in zip(w, _out_mask(loop, v_mask)) if reached]

        def pairing(values: Arrays) -> Arrays:
            return _pushed(loop, v_mask, merge(x, x_mask, values), v)

        out, pull = jax.vjp(pairing, select(x, x_mask))
        return pull([jnp.zeros_like(o) if ct is None else ct for o, ct in zip(out, w)])[0]

    def forth(residuals: Arrays, v: Arrays) -> Arrays:
        return gradient(moved, mask, residuals, v)

    def back(residuals: Arrays, v: Arrays) -> Arrays:
        return gradient(mask, moved, residuals, v)

    return LinearMap(
        forth,
        back,
        lambda *values: _jvp(forth, values[:2], values[2:]),
        lambda *values: _jvp(back, values[:2], values[2:]),
    )


def _moving_map(loop: Loop, moved: Mask, mask: Mask, out_mask: Mask) -> LinearMap:
    """Return the map (v, ẇ) ↦ the derivative of J(x)ᵀ·w in direction v of x and ẇ of w; residuals: x and w.

    It is for bodies whose rules for Jᵀ need not be derivatives, nor linear in w. Then second
    derivatives do not commute, and only those in reverse mode go on from here.
    """
    n_inputs, n_moved = len(mask), sum(moved)

    def forth(residuals: Arrays, moves: Arrays) -> Arrays:
        w = [
            merge([None] * len(out_mask), out_mask, of)
            for of in (residuals[n_inputs:], moves[n_moved:])
        ]
        return _moved_transpose(loop, moved, mask, residuals[:n_inputs], moves[:n_moved], *w)

    def back(residuals: Arrays, u: Arrays) -> Arrays:
        x = residuals[:n_inputs]
        w = merge([None] * len(out_mask), out_mask, residuals[n_inputs:])
        of_v: Arrays = []
        if n_moved:
            of_v = linear_call(_hessian_map(loop, moved, mask, w).T, residuals, u)
        return [*of_v, *_pushed(loop, mask, x, u)]

    def refuse(residuals: Arrays, moves: Arrays, *_: Arrays) -> Arrays:
        return refused(
            [*residuals, *moves], [jax.typeof(a) for a in select(residuals[:n_inputs], mask)]
        )

    return LinearMap(forth, back, refuse, lambda *values: _jvp(back, values[:2], values[2:]))


def _moved_transpose(
    loop: Loop, moved: Mask, mask: Mask, x: Arrays, v: Arrays, w: Arrays, d_w: Arrays
) -> Arrays:
    """Return the derivative of J(x)ᵀ·w in direction v of x and d_w of w, whatever rules for Jᵀ there are.

    It is the backward loop of L₁ with the pullback of each step replaced: where the cotangents of
    (c, ċ) are (λ̇, λ), the pullback of L's step at c takes λ to the next one, and its derivative in
    direction (ċ, λ̇) gives the next λ̇.
    """
    either = tuple(a or b for a, b in zip(moved, mask))
    given = merge([None] * len(x), moved, v)
    directions = [jnp.zeros_like(a) if d is None else d for a, d in zip(x, given)]
    opened, added = _with_forward_rules(loop)
    marks = (*[False] * len(added), *either)
    augmented, inputs = _augmented(opened, marks, [*added, *x], select(directions, either))
    # The replacement for the pullback of a step reads its state.
    augmented = dataclasses.replace(augmented, memory=None)
    _, held = sweep(augmented, inputs)

    consts, carry, xs, steps = split_inputs(opened, marks)
    carry_mask, y_mask = opened.spread(tuple(consts), tuple(carry), tuple(xs))
    first = augmented.n_consts - len(consts) - sum(consts)  # constants of the augmented body
    marked = Inputs(
        [*[False] * first, *consts, *[True] * sum(consts)],
        [*carry, *[True] * sum(carry_mask)],
        [*xs, *[True] * sum(xs)],
        steps,
    )
    both_carry, both_y = augmented.spread(*map(tuple, marked[:3]))

    def pullback(
        consts_: Arrays, carry_: Arrays, x_: Arrays, ct_carry: Arrays, ct_y: Arrays
    ) -> tuple[Arrays, Arrays, Arrays]:
        values = (consts_[first : first + len(consts)], carry_[: len(carry)], x_[: len(xs)])
        tangents = (consts_[first + len(consts) :], carry_[len(carry) :], x_[len(xs) :])
        masks = (consts, carry_mask, xs)

        def transposed(at: tuple[Arrays, ...], cts: tuple[Arrays, Arrays]) -> PyTree:
            def step(*at: Arrays) -> tuple[Arrays, Arrays]:
                c, k, x = map(merge, values, masks, at)
                carry_out, y = loop.call(c[len(added) :], k, x)
                return select(carry_out, carry_mask), select(y, y_mask)

            return jax.vjp(step, *at)[1](cts)

        at = tuple(map(select, values, masks))
        cts, d_cts = zip(
            _halves(ct_carry, both_carry, carry_mask, list(map(jax.typeof, at[1]))),
            _halves(ct_y, both_y, y_mask, select(loop.y_avals, y_mask)),
        )
        found, d_found = jax.jvp(transposed, (at, cts), (tangents, d_cts))
        ct_consts, ct_next, ct_x = ([*d, *ct] for d, ct in zip(d_found, found))
        next_values = merge([None] * len(carry), carry_mask, d_found[1])
        ct_next = select([*next_values, *found[1]], both_carry)
        return ct_consts, ct_next, ct_x

    of, of_moved = _split_results(loop, w), _split_results(loop, d_w)
    cotangents = Results(
        [*of_moved.carry, *select(of.carry, carry_mask)],
        [*of_moved.ys, *select(of.ys, y_mask)],
        [None] * len(_no_count(loop)),
    )
    found = backward(augmented, inputs, held, cotangents, marked, pullback)
    of_x = [
        *found.consts[first + len(added) : first + len(consts)],
        *found.carry[: len(carry)],
        *found.xs[: len(xs)],
        *found.steps,
    ]
    return [
        jnp.zeros_like(a) if d is None else d for a, d in zip(select(x, mask), select(of_x, mask))
    ]


# The differentiated loop


def _augmented(
    loop: Loop, mask: Mask, flat: Arrays, v: Arrays, jvp: Callable = jax.jvp
) -> tuple[Loop, Inputs]:
    """Return the loop L₁ over values and tangents, and its inputs."""
    inputs = split_inputs(loop, flat)
    consts_mask, carry_in_mask, xs_mask, _ = map(tuple, split_inputs(loop, mask))
    carry_mask, y_mask = loop.spread(consts_mask, carry_in_mask, xs_mask)
    tangents = split_inputs(loop, merge([None] * len(mask), mask, v))
    d_carry = [
        jnp.zeros_like(x) if d is None else d
        for x, d in zip(select(inputs.carry, carry_mask), select(tangents.carry, carry_mask))
    ]

    def body(
        consts: Arrays, d_consts: Arrays, carry: Arrays, d_carry: Arrays, x: Arrays, d_x: Arrays
    ) -> Arrays:
        def step(c: Arrays, k: Arrays, x_: Arrays) -> tuple[Arrays, Arrays]:
            return loop.call(
                merge(consts, consts_mask, c), merge(carry, carry_mask, k), merge(x, xs_mask, x_)
            )

        (carry_out, y), (d_carry_out, d_y) = jvp(
            step,
            (select(consts, consts_mask), select(carry, carry_mask), select(x, xs_mask)),
            (d_consts, d_carry, d_x),
        )
        return [*carry_out, *select(d_carry_out, carry_mask), *y, *select(d_y, y_mask)]

    d_consts, d_xs = select(tangents.consts, consts_mask), select(tangents.xs, xs_mask)
    slices = [_jax.slice_types(xs) for xs in (inputs.xs, d_xs)]
    parts = [inputs.consts, d_consts, inputs.carry, d_carry]
    types = [[jax.typeof(x) for x in part] for part in parts]
    jaxpr, constants, _ = _jax.trace_call(body, *types, *slices)
    first, last, n_carry = loop.test_reads
    augmented = dataclasses.replace(
        loop,
        body=jaxpr,
        n_consts=len(constants) + len(inputs.consts) + len(d_consts),
        n_carry=loop.n_carry + len(d_carry),
        test_reads=(first + len(constants), last + len(constants), n_carry),
        # An inverse of L₁ would have to invert the tangents, too.
        inverse=None,
    )
    return augmented, Inputs(
        [*constants, *inputs.consts, *d_consts],
        [*inputs.carry, *d_carry],
        [*inputs.xs, *d_xs],
        inputs.steps,
    )


def _derivative_has_forward_mode(loop: Loop, mask: Mask, flat: Arrays, v: Arrays) -> bool:
    """Return whether L₁ can be differentiated in forward mode; its body is traced only if in doubt."""
    if surely_has_forward_mode(loop.body):
        return True
    return has_forward_mode(_augmented(loop, mask, flat, v)[0].body)


def _pushed(loop: Loop, mask: Mask, flat: Arrays, v: Arrays) -> Arrays:
    """Return J(x)·v as a function that JAX can differentiate again."""
    augmented, inputs = _augmented(loop, mask, flat, v)
    if not has_forward_mode(augmented.body):
        augmented, inputs = _augmented(loop, mask, flat, v, push)
    return _tangent_half(loop, mask, _flat(run(augmented, inputs)))


def _tangent_half(loop: Loop, mask: Mask, flat_results: Arrays) -> Arrays:
    """Return the tangents among the results of L₁, which follow the values in the carry and in the ys."""
    out_mask = _out_mask(loop, mask)
    n_ys = len(loop.y_avals)
    in_carry = sum(out_mask[: loop.n_carry])
    carry = flat_results[loop.n_carry : loop.n_carry + in_carry]
    ys = flat_results[loop.n_carry + in_carry + n_ys :]
    return [*carry, *ys[: sum(out_mask) - in_carry]]


# Helpers


def _halves(
    cotangents: Arrays, both: Mask, mask: Mask, types: Sequence[Aval]
) -> tuple[Arrays, Arrays]:
    """Return the cotangents of the tangents among L₁'s values, and of the marked values; zeros as arrays."""
    every = merge([None] * len(both), both, cotangents)

    def written(cts: Arrays) -> Arrays:
        return [_jax.zeros(t) if ct is None else ct for ct, t in zip(cts, types, strict=True)]

    return written(every[len(mask) :]), written(select(every[: len(mask)], mask))


def _flat(parts: Inputs | Results) -> Arrays:
    return [value for part in parts for value in part]


def _split_results(loop: Loop, flat: Sequence[Array]) -> Results:
    n_ys = len(loop.y_avals)
    flat = list(flat)
    end = loop.n_carry + n_ys
    return Results(flat[: loop.n_carry], flat[loop.n_carry : end], flat[end:])


def _out_mask(loop: Loop, mask: Mask) -> Mask:
    """Return which results depend on the inputs in `mask`; the number of steps never does."""
    consts, carry, xs, _ = map(tuple, split_inputs(loop, mask))
    return (*(m for part in loop.spread(consts, carry, xs) for m in part), *_no_count(loop))


def _mask(flat: Arrays, tangents: Arrays) -> Mask:
    """Return which values have tangents that are not zero."""
    return tuple(
        not isinstance(t, jax.custom_derivatives.SymbolicZero) and _jax.has_tangent(x)
        for x, t in zip(flat, tangents, strict=True)
    )


def _no_count(loop: Loop) -> Mask:
    return () if loop.test is None else (False,)


def _jvp(fun: Callable, primals: Sequence[Arrays], tangents: Sequence[Arrays]) -> Arrays:
    """Return `jax.jvp` of a function of lists; zero tangents are None."""
    flat, tree = jax.tree.flatten(tuple(primals))
    flat_tangents = [t for part in tangents for t in part]
    mask = [t is not None and _jax.has_tangent(x) for x, t in zip(flat, flat_tangents, strict=True)]

    def of_marked(marked: Arrays) -> Arrays:
        return fun(*jax.tree.unflatten(tree, merge(flat, mask, marked)))

    if not any(mask):
        return [jnp.zeros_like(x) for x in of_marked([])]
    return jax.jvp(of_marked, (select(flat, mask),), (select(flat_tangents, mask),))[1]


def _no_tangent(x: Array) -> Array:
    return jax.custom_derivatives.SymbolicZero(jax.typeof(x).to_tangent_aval())


def _zero_tangent(x: Array) -> Array:
    """Return zeros as an array, as the rules of `jax.custom_jvp` must."""
    if _jax.has_tangent(x):
        zeros = jnp.zeros_like(x)
        # A tangent is in the same memory as its value.
        on_host = _jax.is_on_host(jax.typeof(x))
        return jax.device_put(zeros, jax.memory.Space.Host) if on_host else zeros
    # Symbolic: an array of float0 has no type that varies over the axes of a mesh.
    return _no_tangent(x)
