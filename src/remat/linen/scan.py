"""`remat.linen.remat_scan`: a module repeated in nested, rematerialized loops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import FrozenDict, axes_scan, lift
from flax.linen.transforms import lift_transform

from remat.aliases import PolicyLike, PyTree
from remat.errors import ScheduleError, TargetError
from remat.linen.axes import (
    Axes,
    as_axes,
    as_pair,
    axis_of,
    check_call,
    check_mappings,
    choose,
    map_axes,
    n_layers as number_of_layers,
    stack,
    unstack,
)
from remat.linen.rng import Counters, split_keys
from remat.linen.targets import Filter, is_bound_method, is_module_class, lift_instance
from remat.loops.nesting import Nest
from remat.loops.remat_scan import Division, nested_scan, one_layer
from remat.transform import policies

Target = TypeVar("Target")


def remat_scan(
    target: Target,
    lengths: Sequence[int] | str | None = (),
    policy: PolicyLike = None,
    variable_broadcast: Filter = False,
    variable_carry: Filter = False,
    variable_axes: Mapping[Filter, Axes] = FrozenDict({True: 0}),
    split_rngs: Mapping[Filter, bool] = FrozenDict({True: True}),
    *,
    length: int | None = None,
    levels: int | None = None,
    budget: int | str | None = None,
    in_axes: Axes = None,
    out_axes: Axes = None,
    params_layout: str | None = None,
    metadata_params: Mapping[Any, object] = FrozenDict(),
) -> Target:
    """Repeat a module in nested, rematerialized loops: one compiled layer, and little memory.

    >>> import jax, jax.numpy as jnp, flax.linen as nn
    >>> import remat.linen
    >>> class BigModel(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         DenseStack = remat.linen.remat_scan(nn.Dense, lengths=(10, 10))
    ...         # 100 dense layers; 10 carries and the residuals of 10 layers are stored.
    ...         return DenseStack(8, name="dense_stack")(x)
    >>> variables = BigModel().init(jax.random.key(0), jnp.ones((1, 8)))
    >>> variables["params"]["dense_stack"]["kernel"].shape
    (10, 10, 8, 8)

    Any number of layers, nested so that the fewest bytes are stored; parameters are stacked as by `nn.scan`:

    >>> class Deep(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         DenseStack = remat.linen.remat_scan(nn.Dense, "auto", length=97)
    ...         return DenseStack(8, name="stack")(x)
    >>> variables = Deep().init(jax.random.key(0), jnp.ones((1, 8)))
    >>> variables["params"]["stack"]["kernel"].shape
    (97, 8, 8)

    Args:
      target: a module class, a module, a method (as a decorator), or a function that takes a module
        first, with one further argument, which it returns changed: the carry.
      lengths: the lengths of the nested loops, the outermost first, or `"auto"`; see
        `remat.remat_scan`.
      policy: what may be saved in addition; see `remat.checkpoint`.
      variable_broadcast: the collections that all layers share.
      variable_carry: the collections that one layer passes to the next.
      variable_axes: the collections that each layer has separately, and the axis at which they are
        stacked: an int, `nn.In(axis)` or `nn.Out(axis)`.
      split_rngs: the sequences of random keys that are lifted, and whether each layer has its own.
      length: with `"auto"`, the number of layers.
      levels: with `"auto"`, the number of nested loops.
      budget: with `"auto"`, the bytes that the loops may hold.
      in_axes: for inputs beside the carry, a prefix of the tuple of them: the axis at which the
        layers' inputs are stacked, or `nn.broadcast` for inputs of all layers. With `in_axes` or
        `out_axes` the target has the form of `nn.scan`: `(module, carry, *inputs) -> (carry, output)`.
      out_axes: the axis at which outputs are stacked (0 if None), or `nn.broadcast`.
      params_layout: `"nested"` gives variables one axis for each loop, as Flax does; `"flat"` gives
        one axis of length n, which is the layout of `nn.scan` and has its initial values, whatever
        the loops. None is `"nested"` for given lengths and `"flat"` for `"auto"`.
      metadata_params: parameters of the axes for `nn.Partitioned` and other metadata, as in
        `nn.scan`: `{nn.PARTITION_NAME: "layers"}`.

    Returns:
      The lifted target, of the same kind: a class, module, method or function.

    Raises:
      TargetError: for a target of another kind.
      ScheduleError: for invalid lengths, or lengths that do not fit the variables or inputs.
      OptionError: for axes, or arguments of a call, that do not fit.
      BudgetError: for a budget that no nesting fits; the message has the smallest one.
      PolicyError: as in `remat.checkpoint`.

    Reference: `flax.linen.remat_scan`, which has no `"auto"`, no further inputs and no flat layout.
    """
    policies.check_policy(policy)
    in_axes = as_axes("in_axes", in_axes)
    out_axes = as_axes("out_axes", out_axes)
    check_mappings(variable_axes, split_rngs, metadata_params)
    division = Division.of(
        () if lengths is None else lengths, length=length, levels=levels, budget=budget
    )
    options: dict[str, Any] = {
        "division": division,
        "nested_layout": _is_nested_layout(params_layout, division),
        "policy": policy,
        "variable_broadcast": variable_broadcast,
        "variable_carry": variable_carry,
        "variable_axes": variable_axes,
        "split_rngs": split_rngs,
        "with_inputs": in_axes is not None or out_axes is not None,
        "in_axes": 0 if in_axes is None else in_axes,
        "out_axes": 0 if out_axes is None else out_axes,
        "metadata_params": metadata_params,
    }

    def lifted(target: Any) -> Any:
        return lift_transform(_core_remat_scan, target, **options)

    if isinstance(target, nn.Module):
        return lift_instance(target, lifted)
    if is_bound_method(target):
        module = target.__self__  # type: ignore[attr-defined]
        return functools.partial(lifted(target.__func__), module)  # type: ignore
    if is_module_class(target) or callable(target):
        return lifted(target)
    raise TargetError(
        "remat.linen.remat_scan takes a Module class, a Module, a method, or a function that takes "
        f"a Module first, not {target!r}."
    )


def _is_nested_layout(params_layout: str | None, division: Division) -> bool:
    if params_layout not in (None, "nested", "flat"):
        raise ScheduleError(f'params_layout is "nested" or "flat", not {params_layout!r}.')
    if params_layout == "nested" and division.lengths is None:
        raise ScheduleError(
            'params_layout="nested" needs the lengths of the loops, and lengths="auto" may leave a '
            'rest. Use params_layout="flat" or give lengths.'
        )
    return division.lengths is not None and params_layout != "flat"


def _core_remat_scan(
    fn: Callable[..., PyTree],
    *,
    division: Division,
    nested_layout: bool,
    policy: PolicyLike,
    variable_broadcast: Filter,
    variable_carry: Filter,
    variable_axes: Mapping[Filter, Axes],
    split_rngs: Mapping[Filter, bool],
    with_inputs: bool,
    in_axes: Axes,
    out_axes: Axes,
    metadata_params: Mapping[Any, object],
) -> Callable[..., PyTree]:
    """Repeat a function of scopes in nested loops, as `flax.core.lift.scan` does in one."""
    read = {k: axis_of(a) for k, a in variable_axes.items() if not isinstance(a, lift.Out)}
    written = {k: axis_of(a) for k, a in variable_axes.items() if not isinstance(a, lift.In)}
    # The layers' axes of variables and keys: one a loop, or None for one axis.
    given = division.lengths if nested_layout else None

    def inner(
        scope_fn: Callable,
        repack_fn: Callable,
        groups: PyTree,
        rngs: PyTree,
        /,
        *args: PyTree,
        **kwargs: PyTree,
    ) -> PyTree:
        check_call(args, kwargs, in_axes if with_inputs else None)
        carry, inputs = args[0], args[1:]
        shared, carried, *stacked = groups
        stacked = [
            unstack(group, axis, given, metadata_params)
            for group, axis in zip(stacked, read.values())
        ]
        n_layers = number_of_layers(division, stacked, in_axes, inputs)
        moving = map_axes(lambda axis, x: jnp.moveaxis(x, axis, 0), in_axes, inputs)
        shape = given or (n_layers,)
        splits = tuple(split_rngs.values())
        keys = [
            jax.tree.map(lambda key: split_keys(key, shape), group) if split else ()
            for group, split in zip(rngs, splits)
        ]
        counters = Counters(n_traces=2 ** len(shape))

        def layer(shared: PyTree, state: PyTree, x: PyTree) -> PyTree:
            carried, carry = state
            variables, keys, moving = x
            own = tuple(k if split else r for k, r, split in zip(keys, rngs, splits))
            scopes = scope_fn((shared, carried, *variables), own)
            with counters.of(scopes):
                if with_inputs:
                    result = fn(scopes, carry, *choose(in_axes, inputs, moving))
                    carry, y = as_pair(result, out_axes)
                else:
                    carry, y = fn(scopes, carry), ()
            shared_out, carried, *variables = repack_fn(scopes)
            # Flax returns only mutable collections, but the layers need all collections.
            for group, group_out in zip(shared, shared_out):
                group_out.update({k: v for k, v in group.items() if k not in group_out})
            return shared_out, (carried, carry), (y, variables)

        state, xs = (carried, carry), (stacked, keys, moving)

        def learn() -> PyTree:
            def fresh(*args: PyTree) -> PyTree:  # a new function, so that JAX traces it again
                return layer(*args)

            with counters.learning():
                return jax.eval_shape(fresh, shared, state, one_layer(xs))[2][1]

        made = learn()
        shared, constants = _hoist(layer, shared, state, xs, out_axes, variable_broadcast)
        learn()

        def body(state: PyTree, x: PyTree) -> PyTree:
            _, state, (y, variables) = layer(shared, state, x)
            return state, (map_axes(lambda _, leaf: leaf, out_axes, y), variables)

        # Initialization is not differentiated, and there are no variables yet to distribute over loops.
        is_init = jax.tree.leaves(made) and not jax.tree.leaves((stacked, shared, carried))
        with counters.looping():
            nest = (
                Nest((n_layers,)) if is_init else division.nest(n_layers, body, state, xs, policy)
            )
            (carried, carry), (ys, made) = nested_scan(body, nest, state, xs, policy=policy)
        out = (
            shared,
            carried,
            *(
                stack(group, axis, given, metadata_params)
                for group, axis in zip(made, written.values())
            ),
        )
        if not with_inputs:
            return carry, out
        ys = map_axes(lambda axis, y: jnp.moveaxis(y, 0, axis), out_axes, ys)
        return (carry, choose(out_axes, constants, ys)), out

    return lift.pack(
        inner,
        (variable_broadcast, variable_carry, *read),
        (variable_broadcast, variable_carry, *written),
        tuple(split_rngs),
        name="remat_scan",
        enable_kwargs=True,  # only to raise an error for them; Flax would drop them
    )


_core_remat_scan.__name__ = "remat_scan"  # Flax names a lifted class after the transform


def _hoist(
    layer: Callable,
    shared: PyTree,
    state: PyTree,
    xs: PyTree,
    out_axes: Axes,
    variable_broadcast: Filter,
) -> tuple[PyTree, PyTree]:
    """Return the shared variables, created if they are new, and the outputs that do not vary.

    Flax finds loop-invariant values by tracing. With a scan of length 0 it does only that.
    """
    varies = [axis is not nn.broadcast for axis in jax.tree.leaves(out_axes)]
    if variable_broadcast is False and all(varies):
        return shared, jax.tree.map(lambda _: (), out_axes)
    loop = axes_scan.scan(layer, in_axes=(0,), out_axes=(out_axes, 0), length=0)
    nothing = jax.tree.map(lambda x: x[:0], xs)
    shared, _, (constants, _) = loop(shared, state, nothing)
    return shared, constants
