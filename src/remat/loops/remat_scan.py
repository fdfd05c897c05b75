"""`remat.remat_scan`: n equal layers in nested, rematerialized loops.

A `lax.scan` over the layers of a model compiles one layer for any depth, and saves the residuals of
every layer. Nested loops whose groups are regions save the carries at the groups' starts instead, and
memory grows as n^{1/d} with d loops. `nesting.py` has the arithmetic, also for totals that are not
products. All loops read the parameters in place from one array (`stacked.py`).

Reference: Chen, Xu, Zhang & Guestrin, Training Deep Nets with Sublinear Memory Cost, 2016. The schedule
is that of `flax.linen.remat_scan`: the layers of the innermost loop save their residuals, and every
loop around it is rematerialized.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from remat import _jax, units
from remat.aliases import Array, Arrays, PolicyLike, PyTree, Size
from remat.errors import ScheduleError
from remat.loops.arguments import whole_number
from remat.loops.fitting import may_be_differentiated, temporary_bytes, types_of
from remat.loops.loop import Inputs
from remat.loops.nesting import LayerBytes, Nest, best_nest
from remat.loops.sizes import worst_case
from remat.loops.stacked import adopt
from remat.transform import policies
from remat.transform.checkpoint import checkpoint
from remat.transform.refs import with_values
from remat.transform.residuals import residuals

_jax.exclude_from_tracebacks(__file__)

Body = Callable[[PyTree, PyTree], PyTree]


def remat_scan(
    body: Body,
    lengths: Sequence[int] | str = (),
    *,
    length: int | None = None,
    levels: int | None = None,
    budget: int | str | None = None,
    policy: PolicyLike = None,
) -> Callable[[PyTree, PyTree], PyTree]:
    """Apply n equal layers, each with its own parameters, in nested loops that save little memory.

    A hundred dense layers, in ten groups of ten. Ten carries and one group's residuals are saved:

    >>> import jax, jax.numpy as jnp, remat
    >>> def layer(x, params):
    ...     return jnp.tanh(x @ params["w"] + params["b"])
    >>> params = {"w": jnp.ones((100, 8, 8)) / 8, "b": jnp.zeros((100, 8))}
    >>> x = jnp.ones((256, 8))
    >>> def temporaries(lengths):
    ...     loss = lambda params: remat.remat_scan(layer, lengths)(x, params).sum()
    ...     step = jax.jit(jax.grad(loss)).lower(params).compile()
    ...     return step.memory_analysis().temp_size_in_bytes
    >>> temporaries((10, 10)) < 0.3 * temporaries((100,))
    True

    Any number of layers, divided so that the fewest bytes are saved:

    >>> remat.remat_scan(layer, "auto")(x, jax.tree.map(lambda p: p[:97], params)).shape
    (256, 8)

    Args:
      body: `body(carry, params) -> carry` or, as in `lax.scan`, `-> (carry, y)`, with the parameters
        of one layer. The carry keeps its shapes and dtypes.
      lengths: the lengths of the loops, the outermost first; their product is the number of layers.
        The layers of the innermost loop save their residuals, so `(n,)` is a plain scan and `(n, 1)`
        recomputes every layer separately. `"auto"` determines the bytes of the carry and of one layer's
        residuals, and chooses the lengths with the least memory, for any number of layers.
      length: with `"auto"`, the number of layers. It is optional if there are parameters.
      levels: with `"auto"`, the number of nested loops. Each level after the first costs an extra forward
        pass. By default there are as many as reduce memory.
      budget: with `"auto"`, the bytes that the gradient of the loops may take beside its arguments and
        results, a number or a text such as "8MiB". The lengths that recompute least within it are chosen by
        the compiler's figures: the gradient is compiled for one number of nested loops after another.
      policy: what may be saved in addition, see `remat.checkpoint`.

    Returns:
      `scanned(carry, stacked_params)`. It returns the carry after all layers, or `(carry, ys)` if
      `body` returns a pair. The arrays of `stacked_params` have the layers in one leading axis of
      length n, or in as many leading axes as there are lengths. The arrays of `ys` have the same.

    Raises:
      ScheduleError: the lengths are invalid or do not fit the parameters.
      BudgetError: no division fits the budget; the message has the smallest one.
      PolicyError: the policy is invalid.
    """
    if not callable(body):
        raise TypeError(f"remat.remat_scan takes a function, not {body!r}.")
    policies.check_policy(policy)
    division = Division.of(lengths, length=length, levels=levels, budget=budget)

    # Jitted, so that further calls reuse the trace and the compiled program.
    @jax.jit
    def scanned(carry: PyTree, stacked_params: PyTree = None) -> PyTree:
        params, nested = _with_one_axis(stacked_params, division)
        n_layers = division.total(jax.tree.leaves(params))
        with_ys, pair = _as_pair(body, carry, params)
        nest = division.nest(n_layers, pair, carry, params, policy)
        carry, ys = nested_scan(pair, nest, carry, params, policy=policy)
        if not with_ys:
            return carry
        return carry, _with_axes(ys, (n_layers,), nest.lengths) if nested else ys

    return _jax.wraps(body)(scanned)


def nested_scan(
    body: Body, nest: Nest, carry: PyTree, xs: PyTree, *, policy: PolicyLike = None
) -> tuple[PyTree, PyTree]:
    """Return `lax.scan(body, carry, xs)`, run in the loops of a nest; arrays of `xs` are `[n, ...]`."""
    # `lax.scan` itself does not differentiate refs that its body creates.
    jaxpr, consts, out = _traced(body, nest, carry, xs, policy)
    leaves = jax.tree.leaves((carry, xs))
    outs = with_values(
        jaxpr, [*consts, *leaves], lambda jaxpr, args, _: _jax.call_jaxpr(jaxpr, args)
    )
    return jax.tree.unflatten(jax.tree.structure(out), outs)


def _traced(
    body: Body, nest: Nest, carry: PyTree, xs: PyTree, policy: PolicyLike
) -> tuple[_jax.Jaxpr, Arrays, PyTree]:
    """Return the loops of a nest as a jaxpr, their closed-over values, and the types of their results."""
    leaves, tree = jax.tree.flatten((carry, xs))

    def loops(*leaves: Array) -> tuple[PyTree, PyTree]:
        carry, xs = jax.tree.unflatten(tree, leaves)
        return _nested_scan(body, nest, carry, xs, policy)

    return _jax.trace_call(loops, *leaves)


def _temporary_bytes(
    body: Body, nest: Nest, carry: PyTree, xs: PyTree, policy: PolicyLike
) -> int | None:
    """Return the temporaries of the compiled gradient of the loops of a nest."""
    jaxpr, consts, out = _traced(body, nest, carry, xs, policy)
    n_carry = len(jax.tree.leaves(out[0]))

    def run(inputs: Inputs) -> tuple[Arrays, Arrays]:
        outs = _jax.call_jaxpr(jaxpr, [*inputs.consts, *inputs.carry, *inputs.xs])
        return outs[:n_carry], outs[n_carry:]

    groups: tuple[Arrays, ...] = (consts, jax.tree.leaves(carry), jax.tree.leaves(xs), [])
    inputs = Inputs(*groups)
    return temporary_bytes(run, types_of(inputs), may_be_differentiated(inputs))


def _nested_scan(
    body: Body, nest: Nest, carry: PyTree, xs: PyTree, policy: PolicyLike
) -> tuple[PyTree, PyTree]:
    stacks, tree = jax.tree.flatten(xs)
    differentiable = [jnp.issubdtype(stack.dtype, jnp.inexact) for stack in stacks]

    def layer(
        carry: PyTree, handles: PyTree, index: PyTree, slices: PyTree
    ) -> tuple[PyTree, PyTree]:
        remaining = iter(handles)
        adopted, x = [], []
        for a_slice, has_handle in zip(slices, differentiable):
            if has_handle:
                handle, a_slice = adopt(a_slice, next(remaining), index)
                adopted.append(handle)
            x.append(a_slice)
        carry, y = body(carry, jax.tree.unflatten(tree, x))
        return (carry, adopted), y

    def run(lengths: tuple[int, ...], state: PyTree, start: Array) -> tuple[PyTree, PyTree]:
        if not lengths:
            slices = [lax.dynamic_index_in_dim(s, start, 0, keepdims=False) for s in stacks]
            carry, handles = state
            return layer(carry, handles, start, slices)
        n, inner = lengths[0], lengths[1:]
        if inner == () and n > 1:
            return innermost(n, state, start)

        def group(state: PyTree, start: Array) -> tuple[PyTree, PyTree]:
            return run(inner, state, start)

        if inner:
            group = checkpoint(group, policy=policy)
        if n == 1:
            state, ys = group(state, start)
            return state, _add_axis(ys)
        starts = start + math.prod(inner) * jnp.arange(n, dtype=jnp.int32)
        return lax.scan(group, state, starts)

    def innermost(n: int, state: PyTree, start: Array) -> tuple[PyTree, PyTree]:
        # `scan` passes the slices, so that they are not saved again as residuals of each step.
        whole = isinstance(start, int)
        slices = [
            s[start : start + n] if whole else lax.dynamic_slice_in_dim(s, start, n) for s in stacks
        ]
        indices = start + jnp.arange(n, dtype=jnp.int32)

        def step(state: PyTree, at: Array) -> tuple[PyTree, PyTree]:
            (carry, handles), (index, slices) = state, at
            return layer(carry, handles, index, slices)

        return lax.scan(step, state, (indices, slices))

    state: PyTree = (carry, [s for s, has_handle in zip(stacks, differentiable) if has_handle])
    parts: list[PyTree] = []
    part, start = nest, 0
    while True:
        state, ys = run(part.lengths, state, start)
        parts.append(_with_axes(ys, part.lengths, (math.prod(part.lengths),)))
        start += math.prod(part.lengths)
        if part.rest is None:
            break
        part = part.rest
    ys = parts[0] if len(parts) == 1 else jax.tree.map(lambda *y: jnp.concatenate(y), *parts)
    return state[0], ys


# --------------------------------------------------------------------------------------------------
# The division of n layers


class Division:
    """The user's choice of lengths, or the constraints for choosing them automatically."""

    def __init__(
        self,
        lengths: tuple[int, ...] | None,
        length: int | None,
        levels: int | None,
        budget_bytes: int | None,
    ):
        self.lengths = lengths
        self.length = length
        self.levels = levels
        self.budget_bytes = budget_bytes

    @staticmethod
    def of(
        lengths: Sequence[int] | str,
        *,
        length: int | None,
        levels: int | None,
        budget: units.Number | None,
    ) -> Division:
        if length is not None:
            length = whole_number(length, "length", 1)
        if isinstance(lengths, str):
            if lengths != "auto":
                raise ScheduleError(
                    f'lengths must be a sequence of ints or "auto", not {lengths!r}.'
                )
            if levels is not None:
                levels = whole_number(levels, "levels", 1)
            budget_bytes = None if budget is None else units.parse_bytes(budget, "budget=")
            return Division(None, length, levels, budget_bytes)
        for name, option in (("levels", levels), ("budget", budget)):
            if option is not None:
                raise ScheduleError(
                    f'{name}={option!r} requires lengths="auto", but lengths={lengths!r} are given.'
                )
        try:
            lengths = tuple(lengths)
        except TypeError as e:
            raise ScheduleError(
                f'lengths must be a sequence of ints or "auto", not {lengths!r}.'
            ) from e
        given = tuple(whole_number(n, f"each of lengths={lengths}", 1) for n in lengths)
        if not given:
            raise ScheduleError(
                "lengths is empty. Pass the lengths of the nested loops, such as (10, 10) for 100 "
                'layers, or lengths="auto".'
            )
        if length is not None and math.prod(given) != length:
            raise ScheduleError(
                f"lengths={given} make {math.prod(given)} layers, but length={length}. Pass "
                'lengths="auto" for any number of layers.'
            )
        return Division(given, math.prod(given), None, None)

    def total(self, stacks: Sequence[Array]) -> int:
        """Return the number of layers, the length of the leading axis of all stacks."""
        n_layers: Size = self.length
        for stack in stacks:
            here = jnp.shape(stack)[:1]
            n_layers = n_layers if n_layers is not None or not here else here[0]
            if here != (n_layers,):
                raise ScheduleError(
                    f"{n_layers} layers need arrays with a leading axis of that length, but one has "
                    f"shape {jnp.shape(stack)}."
                )
        if _jax.is_symbolic(n_layers):
            raise ScheduleError(
                f"the number of layers, {n_layers}, is a symbolic dimension, but the nesting depends on "
                "its value. Export with a number of layers, or scan over them with remat.scan."
            )
        if n_layers is None:
            raise ScheduleError("without parameters the number of layers is unknown; pass length=.")
        if n_layers < 1:
            raise ScheduleError("the parameters have 0 layers; there must be at least 1.")
        return n_layers

    def nest(
        self, n_layers: int, body: Body, carry: PyTree, xs: PyTree, policy: PolicyLike
    ) -> Nest:
        if self.lengths is not None:
            return Nest(self.lengths)
        layer = self._known_bytes(measure_layer(body, carry, one_layer(xs)))

        def compiled_bytes(nest: Nest) -> int | None:
            return _temporary_bytes(body, nest, carry, xs, policy)

        return best_nest(
            n_layers,
            layer,
            levels=self.levels,
            budget_bytes=self.budget_bytes,
            compiled_bytes=compiled_bytes,
        )

    def _known_bytes(self, layer: LayerBytes) -> LayerBytes:
        """Return the bytes of a layer as numbers where shapes are symbolic."""
        found = dataclasses.asdict(layer)
        if self.budget_bytes is None:
            return LayerBytes(**{field: _jax.typical(size) for field, size in found.items()})
        budget = units.format_bytes(self.budget_bytes)
        for field, size in found.items():
            what = f"a layer ({field.removesuffix('_bytes')})"
            found[field] = worst_case(what, size, budget, "lengths=")
        return LayerBytes(**found)


def measure_layer(body: Body, carry: PyTree, x: PyTree) -> LayerBytes:
    """Return the bytes of one layer, from its shapes and its linearization; nothing is computed.

    Args:
      body: `body(carry, x) -> (carry, y)`.
      carry, x: arrays or `jax.ShapeDtypeStruct`s.
    """

    def layer(carry: PyTree, x: PyTree) -> PyTree:
        return body(carry, x)

    carry, x = jax.tree.map(_jax.abstractify, (carry, x))
    kept = residuals(layer, carry, x)
    # Parameters that are residuals cost nothing: the loops read them from the stacked arrays.
    carries = [r for r in kept if r.kind == "argument" and str(r.argument).startswith("carry")]
    params = [leaf for leaf in jax.tree.leaves(x) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return LayerBytes(
        carry_bytes=sum(_n_bytes(leaf) for leaf in jax.tree.leaves(carry)),
        residual_bytes=kept.saved_bytes + sum(r.n_bytes for r in carries),
        params_bytes=sum(_n_bytes(leaf) for leaf in params),
    )


# --------------------------------------------------------------------------------------------------
# Shapes


def one_layer(xs: PyTree) -> PyTree:
    """Return the types of the parameters of one layer."""
    leaves, tree = jax.tree.flatten(xs)
    return jax.tree.unflatten(tree, _jax.slice_types(leaves))


def _n_bytes(leaf: Array) -> int:
    return math.prod(jnp.shape(leaf)) * _jax.itemsize_bytes(leaf)


def _as_pair(body: Body, carry: PyTree, params: PyTree) -> tuple[bool, Body]:
    """Return whether `body` returns a pair `(carry, y)`, and a function that does."""
    out = jax.tree.structure(jax.eval_shape(body, carry, one_layer(params)))
    expected = jax.tree.structure(carry)
    if out == expected:
        return False, lambda carry, x: (body(carry, x), None)
    children = out.children()
    if len(children) == 2 and children[0] == expected:
        return True, body
    raise ScheduleError(
        f"body must return a carry with the structure of its argument, {expected}, or a pair "
        f"(carry, y); it returns {out}."
    )


def _with_one_axis(params: PyTree, division: Division) -> tuple[PyTree, bool]:
    """Return the parameters with one leading axis, and whether they had one for each loop."""
    params = jax.tree.map(jnp.asarray, params)
    lengths = division.lengths
    leaves = jax.tree.leaves(params)
    if lengths is None or len(lengths) == 1 or not leaves:
        return params, False
    if all(leaf.shape[:1] == (division.length,) for leaf in leaves):
        return params, False
    for leaf in leaves:
        if leaf.shape[: len(lengths)] != lengths:
            raise ScheduleError(
                f"lengths={lengths} need arrays with a leading axis of length {division.length}, or "
                f"with leading axes {lengths}, but one has shape {leaf.shape}."
            )
    return _with_axes(params, lengths, (math.prod(lengths),)), True


def _with_axes(xs: PyTree, axes: tuple[int, ...], new_axes: tuple[int, ...]) -> PyTree:
    return jax.tree.map(lambda x: x.reshape(*new_axes, *x.shape[len(axes) :]), xs)


def _add_axis(xs: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[None], xs)
