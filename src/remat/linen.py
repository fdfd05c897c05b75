"""Flax Linen: `remat`, `checkpoint` and `remat_scan` with the signatures of `flax.linen`.

A Linen module is a function of its variables and random keys in disguise. Flax's own core lifting
(`flax.core.lift.pack`) takes the disguise off: it hands out a module's variables and keys as plain
pytrees, and takes the changed variables back. Between the two stands `remat.checkpoint`, which sees
an ordinary function. So collections, `sow`, batch statistics and dropout need no rule here:

    scopes --pack--> (variables, rngs, args) --remat.checkpoint--> (result, variables) --> scopes

What is done here is what the framework's signature asks for: which method, which argument is static
and what the lifted class is called.

The names of `flax` that are no documented API are all imported at the top of this file.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, traceback_util
from flax.core import FrozenDict, axes_scan, lift, meta
from flax.ids import uuid as new_module_id
from flax.linen.transforms import lift_transform

from remat.errors import (
    MethodError,
    OptionError,
    PreventCseError,
    ScheduleError,
    StaticArgumentError,
    TargetError,
    closest,
)
from remat.globs import has_method
from remat.loops.nesting import Nest
from remat.loops.remat_scan import Division, nested_scan, one_layer
from remat.transform import policies
from remat.transform.checkpoint import checkpoint as _checkpoint
from remat.transform.statics import Statics, as_argnames

traceback_util.register_exclusion(__file__)

Target = TypeVar("Target")

_METHOD_OPTIONS = (
    "variables",
    "rngs",
    "concrete",
    "prevent_cse",
    "static_argnums",
    "static_argnames",
    "policy",
)


# --------------------------------------------------------------------------------------------------
# remat


def checkpoint(
    target: Target,
    variables: Any = True,
    rngs: Any = True,
    concrete: bool = False,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    policy: Any = None,
    methods: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
    *,
    static_argnames: str | Iterable[str] = (),
    keep_names: bool = False,
) -> Target:
    """Make a module recompute its linearization points when it is differentiated.

    Without it every block of a deep model stores what its backward pass needs; with it a block
    stores its inputs. Values, gradients and mutated variables are the same:

    >>> import jax, jax.numpy as jnp, flax.linen as nn
    >>> import remat.linen
    >>> class Block(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return x + nn.Dense(x.shape[-1])(jnp.sin(nn.Dense(512)(x)))
    >>> class Model(nn.Module):
    ...     block: type[nn.Module]
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         for _ in range(8):
    ...             x = self.block()(x)
    ...         return x.sum()
    >>> x = jnp.ones((256, 8))
    >>> def temporaries(block):
    ...     model = Model(block)
    ...     params = jax.eval_shape(model.init, jax.random.key(0), x)
    ...     step = jax.jit(jax.grad(lambda params: model.apply(params, x)))
    ...     return step.lower(params).compile().memory_analysis().temp_size_in_bytes
    >>> temporaries(remat.linen.remat(Block)) < 0.5 * temporaries(Block)
    True

    Args:
      target: a module class (the result is a class), a module (a module with the same fields,
        parent and name), a method (as a decorator in a class, over or under `nn.compact`), or a
        function that takes a module first.
      variables: the collections that are lifted: True, a name, names, or a `DenyList`. Others do
        not exist inside.
      rngs: the sequences of random keys that are lifted, in the same way.
      concrete: whether Python may branch on the values of arguments; see `remat.checkpoint`.
      prevent_cse: whether to keep the compiler from merging the recomputation with the forward
        pass. It costs nothing where it is not needed.
      static_argnums: positions of arguments that are not traced. `self` is 0, the first argument
        after it 1; negative numbers count from the end. They hold for arguments given by keyword or
        left at their defaults, too.
      policy: what may be saved; see `remat.checkpoint`.
      methods: the methods to lift, `("__call__",)` if None: their names, or a mapping from names to
        options of this function that differ for that method. Ignored for functions and methods.
      static_argnames: the same as `static_argnums` by name. A name applies to the lifted methods
        that have an argument of that name.
      keep_names: whether submodules of the lifted class are named after the original class
        (`Block_0`) and not, as Flax does, after the lifted one (`CheckpointBlock_0`). Names decide
        where parameters are and which random keys initialize them, so with `keep_names=True` both
        are those of the model without `remat`.

    Returns:
      What `target` is, lifted.

    Raises:
      TargetError: for a target of another kind.
      MethodError: for a method that the class does not have.
      StaticArgumentError: for static arguments that a lifted method or a call does not have.
      PolicyError, PreventCseError, EffectError: as in `remat.checkpoint`.

    Reference: `flax.linen.remat`.
    """
    options = {
        "variables": variables,
        "rngs": rngs,
        "concrete": concrete,
        "prevent_cse": prevent_cse,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "policy": policy,
    }
    if isinstance(target, nn.Module):
        return _lift_instance(
            target, functools.partial(checkpoint, methods=methods, keep_names=keep_names, **options)
        )
    if _is_module_class(target):
        lifted = _lift_class(target, methods, options)
        return _named_after(target, lifted) if keep_names else lifted
    if _is_bound_method(target):
        module = target.__self__  # type: ignore[attr-defined]
        return functools.partial(_lift_function(target.__func__, options), module)  # type: ignore
    if callable(target):
        return _lift_function(target, options)
    raise TargetError(
        f"remat.linen.remat takes a Module class, a Module, a method, or a function that takes a "
        f"Module first, not {target!r}."
    )


remat = checkpoint


def _lift_class(target: Any, methods: Any, options: dict[str, Any]) -> Any:
    cls = _class_of(target)
    by_method = {name: {**options, **own} for name, own in _as_mapping(methods).items()}
    if len(by_method) > 1:
        _share_out_argnames(cls, by_method)
    for name, own in by_method.items():
        by_method[name] = _transform_options(_method_of(cls, name), own)
    return lift_transform(_core_checkpoint, target, methods=by_method)


def _share_out_argnames(cls: Any, by_method: dict[str, dict[str, Any]]) -> None:
    """Of several methods' static names, leave each method those that it has; each name has one."""
    known = {name: _names_of_arguments(_method_of(cls, name)) for name in by_method}
    everywhere = frozenset().union(*(names or () for names in known.values()))
    for method, own in by_method.items():
        names, has = as_argnames(own["static_argnames"]), known[method]
        for name in names:
            if name not in everywhere and None not in known.values():
                raise StaticArgumentError(
                    f"static_argnames={names}: none of {cls.__name__}'s lifted methods "
                    f"{tuple(by_method)} has an argument {name!r}; {closest(name, everywhere)}"
                )
        own["static_argnames"] = tuple(name for name in names if has is None or name in has)


def _lift_function(target: Any, options: dict[str, Any]) -> Any:
    transform_options = _transform_options(target, options)
    lifted = lift_transform(_core_checkpoint, target, **transform_options)
    if hasattr(target, "compact"):
        return lifted

    @functools.wraps(lifted)
    def method(*args: Any, **kwargs: Any) -> Any:
        # `nn.compact` over `remat` marks this function, but Flax looks at the one inside.
        if hasattr(method, "compact"):
            return lift_transform(_core_checkpoint, compact, **transform_options)(*args, **kwargs)
        return lifted(*args, **kwargs)

    @nn.compact
    @functools.wraps(target)
    def compact(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    return method


def _lift_instance(module: Any, lift_class: Callable[[Any], Any]) -> Any:
    """The same module (fields, parent, name, scope) of the lifted class.

    A copy that is constructed anew would ask its parent for a second name. So the state is taken
    over as it is, and only the class changes.
    """
    lifted = object.__new__(lift_class(type(module)))
    vars(lifted).update(vars(module))
    object.__setattr__(lifted, "_id", new_module_id())
    return lifted


def _transform_options(fun: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options of `_core_checkpoint` for one method or function."""
    options = dict(options)
    argnums, argnames = options.pop("static_argnums"), options.pop("static_argnames")
    statics = Statics.of(fun, argnums, argnames)
    if 0 in statics.argnums or -len(statics.positional()) in statics.argnums:
        raise StaticArgumentError(
            f"static_argnums={argnums!r} of {getattr(fun, '__qualname__', fun)}: 0 is the module "
            "itself, which is never traced. The first argument after it is 1."
        )
    if not isinstance(options["prevent_cse"], bool):
        raise PreventCseError(
            f"prevent_cse of remat.linen.remat is a bool, not {options['prevent_cse']!r}. For one "
            "bool per argument use remat.checkpoint inside the module."
        )
    return {**options, "statics": statics}


def _core_checkpoint(
    fn: Callable[..., Any],
    *,
    variables: Any,
    rngs: Any,
    concrete: bool,
    prevent_cse: bool,
    policy: Any,
    statics: Statics,
) -> Callable[..., Any]:
    """Checkpoint a function of scopes: what `flax.core.lift.checkpoint` is to `flax.linen`."""

    def inner(
        scope_fn: Any, repack_fn: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # The method counts its module, which is no argument here. The function below has the
        # variables and the keys in front instead.
        argnums, argnames = statics.in_call((None, *args), kwargs)

        def rematted(variables: Any, rngs: Any, /, *args: Any, **kwargs: Any) -> Any:
            scopes = scope_fn(variables, rngs)
            result = fn(scopes, *args, **kwargs)
            return result, repack_fn(scopes)

        return _checkpoint(
            rematted,
            concrete=concrete,
            prevent_cse=prevent_cse,
            policy=policy,
            static_argnums=tuple(n + 1 for n in argnums),
            static_argnames=argnames,
        )(variables, rngs, *args, **kwargs)

    return lift.pack(inner, (variables,), (variables,), (rngs,), name="remat", enable_kwargs=True)


# Flax names a lifted class after the transform, and its submodules after the class.
_core_checkpoint.__name__ = "checkpoint"


# --------------------------------------------------------------------------------------------------
# remat_scan


def remat_scan(
    target: Target,
    lengths: Sequence[int] | str | None = (),
    policy: Any = None,
    variable_broadcast: Any = False,
    variable_carry: Any = False,
    variable_axes: Mapping[Any, Any] = FrozenDict({True: 0}),
    split_rngs: Mapping[Any, bool] = FrozenDict({True: True}),
    *,
    length: int | None = None,
    levels: int | None = None,
    budget: int | str | None = None,
    in_axes: Any = None,
    out_axes: Any = None,
    params_layout: str | None = None,
    metadata_params: Mapping[Any, Any] = FrozenDict(),
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

    Any number of layers, divided so that least is stored, parameters stacked as `nn.scan` does:

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
      policy: what may be saved besides; see `remat.checkpoint`.
      variable_broadcast: the collections that all layers share.
      variable_carry: the collections that one layer hands to the next.
      variable_axes: the collections of which each layer has its own, and at which axis they are
        stacked: an int, `nn.In(axis)` or `nn.Out(axis)`.
      split_rngs: the sequences of random keys that are lifted, and whether each layer has its own.
      length: with `"auto"`, the number of layers.
      levels: with `"auto"`, the number of nested loops.
      budget: with `"auto"`, the bytes that the loops may hold.
      in_axes: for inputs beside the carry, a prefix of the tuple of them: the axis at which the
        layers' inputs are stacked, or `nn.broadcast` for what all layers get. With `in_axes` or
        `out_axes` the target is that of `nn.scan`: `(module, carry, *inputs) -> (carry, output)`.
      out_axes: the axis at which outputs are stacked (0 if None), or `nn.broadcast`.
      params_layout: `"nested"` gives variables one axis for each loop, as Flax does; `"flat"` gives
        one axis of length n, which is the layout of `nn.scan` and has its initial values, whatever
        the loops. None is `"nested"` for given lengths and `"flat"` for `"auto"`.
      metadata_params: what `nn.Partitioned` and other metadata are told about the axes, as in
        `nn.scan`: `{nn.PARTITION_NAME: "layers"}`.

    Returns:
      What `target` is, lifted.

    Raises:
      TargetError: for a target of another kind.
      ScheduleError: for lengths that cannot be, or that do not fit the variables or inputs.
      OptionError: for axes, or arguments of a call, that do not fit.
      BudgetError: for a budget that no division reaches, with the smallest one.
      PolicyError: as in `remat.checkpoint`.

    Reference: `flax.linen.remat_scan`, which has no `"auto"`, no further inputs and no flat layout.
    """
    policies.check_policy(policy)
    in_axes = _as_axes("in_axes", in_axes)
    out_axes = _as_axes("out_axes", out_axes)
    _check_mappings(variable_axes, split_rngs, metadata_params)
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
        return _lift_instance(target, lifted)
    if _is_bound_method(target):
        module = target.__self__  # type: ignore[attr-defined]
        return functools.partial(lifted(target.__func__), module)  # type: ignore
    if _is_module_class(target) or callable(target):
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
    fn: Callable[..., Any],
    *,
    division: Division,
    nested_layout: bool,
    policy: Any,
    variable_broadcast: Any,
    variable_carry: Any,
    variable_axes: Mapping[Any, Any],
    split_rngs: Mapping[Any, bool],
    with_inputs: bool,
    in_axes: Any,
    out_axes: Any,
    metadata_params: Mapping[Any, Any],
) -> Callable[..., Any]:
    """Repeat a function of scopes in nested loops."""
    read = {k: _axis_of(a) for k, a in variable_axes.items() if not isinstance(a, lift.Out)}
    written = {k: _axis_of(a) for k, a in variable_axes.items() if not isinstance(a, lift.In)}
    # The axes that variables and keys have for the layers: one each loop, or one for all.
    given = division.lengths if nested_layout else None

    def inner(
        scope_fn: Any, repack_fn: Any, groups: Any, rngs: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        _check_call(args, kwargs, in_axes if with_inputs else None)
        carry, inputs = args[0], args[1:]
        shared, carried, *stacked = groups
        stacked = [
            _unstack(group, axis, given, metadata_params)
            for group, axis in zip(stacked, read.values())
        ]
        n_layers = _n_layers(division, stacked, in_axes, inputs)
        moving = _map_axes(lambda axis, x: jnp.moveaxis(x, axis, 0), in_axes, inputs)
        shape = given or (n_layers,)
        splits = tuple(split_rngs.values())
        keys = [
            jax.tree.map(lambda key: _split(key, shape), group) if split else ()
            for group, split in zip(rngs, splits)
        ]
        counters = _Counters(n_traces=2 ** len(shape))

        def layer(shared: Any, state: Any, x: Any) -> Any:
            carried, carry = state
            variables, keys, moving = x
            own = tuple(k if split else r for k, r, split in zip(keys, rngs, splits))
            scopes = scope_fn((shared, carried, *variables), own)
            with counters.of(scopes):
                if with_inputs:
                    result = fn(scopes, carry, *_choose(in_axes, inputs, moving))
                    carry, y = _as_pair(result, out_axes)
                else:
                    carry, y = fn(scopes, carry), ()
            shared_out, carried, *variables = repack_fn(scopes)
            # Collections that are not mutable are not handed out, but the layers need them.
            for group, group_out in zip(shared, shared_out):
                group_out.update({k: v for k, v in group.items() if k not in group_out})
            return shared_out, (carried, carry), (y, variables)

        state, xs = (carried, carry), (stacked, keys, moving)

        def learn() -> Any:
            def fresh(*args: Any) -> Any:  # not found in JAX's cache of traces
                return layer(*args)

            with counters.learning():
                return jax.eval_shape(fresh, shared, state, one_layer(xs))[2][1]

        made = learn()
        shared, constants = _hoist(layer, shared, state, xs, out_axes, variable_broadcast)
        learn()

        def body(state: Any, x: Any) -> Any:
            _, state, (y, variables) = layer(shared, state, x)
            return state, (_map_axes(lambda _, leaf: leaf, out_axes, y), variables)

        # Where variables are made there is nothing to differentiate yet, or to divide by.
        is_init = jax.tree.leaves(made) and not jax.tree.leaves((stacked, shared, carried))
        with counters.looping():
            nest = Nest((n_layers,)) if is_init else division.nest(n_layers, body, state, xs)
            (carried, carry), (ys, made) = nested_scan(body, nest, state, xs, policy=policy)
        out = (
            shared,
            carried,
            *(
                _stack(group, axis, given, metadata_params)
                for group, axis in zip(made, written.values())
            ),
        )
        if not with_inputs:
            return carry, out
        ys = _map_axes(lambda axis, y: jnp.moveaxis(y, 0, axis), out_axes, ys)
        return (carry, _choose(out_axes, constants, ys)), out

    return lift.pack(
        inner,
        (variable_broadcast, variable_carry, *read),
        (variable_broadcast, variable_carry, *written),
        tuple(split_rngs),
        name="remat_scan",
        enable_kwargs=True,  # only to refuse them; Flax would drop them
    )


_core_remat_scan.__name__ = "remat_scan"


def _hoist(
    layer: Any, shared: Any, state: Any, xs: Any, out_axes: Any, variable_broadcast: Any
) -> tuple[Any, Any]:
    """The shared variables, made here if they are new, and the outputs that do not vary.

    Flax finds what is the same in every iteration by tracing; it is asked to, for no iterations.
    """
    varies = [axis is not nn.broadcast for axis in jax.tree.leaves(out_axes)]
    if variable_broadcast is False and all(varies):
        return shared, jax.tree.map(lambda _: (), out_axes)
    loop = axes_scan.scan(layer, in_axes=(0,), out_axes=(out_axes, 0), length=0)
    nothing = jax.tree.map(lambda x: x[:0], xs)
    shared, _, (constants, _) = loop(shared, state, nothing)
    return shared, constants


class _Counters:
    """The counters of random keys, as Flax's nested scans would leave them.

    A scope counts the keys that it has handed out while its body is traced, and a key depends on
    the count. Flax traces the body of a scan twice, once to find what does not vary, so within d
    scans 2^d times, and the last trace is the one that runs. Here the body is traced as often as it
    takes, and each time the counters are set to what they would be there: with δ₁ keys in the first
    trace and δ in the others, the last of t starts at δ₁ + (t - 2)·δ.
    """

    def __init__(self, n_traces: int):
        self.n_traces = n_traces
        self.n_earlier = 0  # traces before the one that is going on, in Flax's count
        self.is_learning = False
        self.at_start: list[Counter[Any]] | None = None
        self.drawn: list[list[Counter[Any]]] = []

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """The trace inside tells how many keys one takes: wanted for the first and the second."""
        self.n_earlier, self.is_learning = len(self.drawn), True
        yield
        self.n_earlier, self.is_learning = 0, False

    @contextlib.contextmanager
    def looping(self) -> Iterator[None]:
        """Any trace inside is the last."""
        self.n_earlier = self.n_traces - 1
        yield

    @contextlib.contextmanager
    def of(self, scopes: Any) -> Iterator[None]:
        """The body is traced inside, with these scopes."""
        dicts = [scope.rng_counters for scope in jax.tree.leaves(scopes)]
        if self.at_start is None:
            self.at_start = [_counts_in(counters) for counters in dicts]
        start = [Counter(at_start) for at_start in self.at_start]
        for k in range(self.n_earlier):
            for counts, drawn in zip(start, self.drawn[min(k, 1)]):
                counts.update(drawn)
        for counters, counts in zip(dicts, start):
            _set_counts(counters, counts)
        yield
        if self.is_learning:
            self.drawn.append([_counts_in(c) - counts for c, counts in zip(dicts, start)])


def _counts_in(counters: Mapping[Any, Any], path: tuple[Any, ...] = ()) -> Counter[Any]:
    """A scope's counters, and those of the scopes below it, by path."""
    counts: Counter[Any] = Counter()
    for name, value in counters.items():
        if isinstance(value, dict):
            counts.update(_counts_in(value, (*path, name)))
        else:
            counts[(*path, name)] = value
    return counts


def _set_counts(counters: dict[Any, Any], counts: Counter[Any], path: tuple[Any, ...] = ()) -> None:
    for name, value in counters.items():
        if isinstance(value, dict):
            _set_counts(value, counts, (*path, name))
        else:
            counters[name] = counts[(*path, name)]


def _split(key: Any, shape: tuple[int, ...]) -> Any:
    """One key for each layer, split off loop by loop as nested scans do, on one axis."""
    keys = jax.random.split(jax.random.clone(key), shape[0])
    for n in shape[1:]:
        # Not `vmap`, under which some generators split differently.
        split = jax.lax.map(lambda k, n=n: jax.random.split(k, n), keys)
        keys = split.reshape(-1, *keys.shape[1:])
    return keys


# --------------------------------------------------------------------------------------------------
# Axes and arguments that do not fit


def _is_none(x: Any) -> bool:
    return x is None


def _is_axis(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _as_axes(name: str, axes: Any) -> Any:
    """`in_axes` or `out_axes`, of which the outermost list is a tuple, as arguments are."""
    if axes is None:
        return None
    for axis in jax.tree.leaves(axes, is_leaf=_is_none):
        if axis is not nn.broadcast and not _is_axis(axis):
            raise OptionError(
                f"{name} has an axis or nn.broadcast for each array, or for a part of the arrays, "
                f"but {axis!r} is in {axes!r}."
            )
    return tuple(axes) if isinstance(axes, list) else axes


def _check_mappings(variable_axes: Any, split_rngs: Any, metadata_params: Any) -> None:
    given = {
        "variable_axes": variable_axes,
        "split_rngs": split_rngs,
        "metadata_params": metadata_params,
    }
    for name, mapping in given.items():
        if not isinstance(mapping, Mapping):
            raise OptionError(f"{name} is a mapping, not {mapping!r}.")
    for collection, axis in variable_axes.items():
        if not _is_axis(_axis_of(axis)):
            raise OptionError(
                f"variable_axes[{collection!r}] is an int, nn.In(axis) or nn.Out(axis), not {axis!r}."
            )
    for sequence, split in split_rngs.items():
        if not isinstance(split, (bool, np.bool_)):
            raise OptionError(f"split_rngs[{sequence!r}] is a bool, not {split!r}.")


def _check_call(args: tuple[Any, ...], kwargs: Mapping[str, Any], in_axes: Any) -> None:
    """Refuse a call of repeated layers that does not say how its arguments reach the layers.

    Args:
      in_axes: None if the layers take only the carry.
    """
    help = (
        "in_axes= says how further arguments enter: nn.broadcast for what all layers get, an axis "
        "for what is stacked. The target then returns (carry, output)."
    )
    if kwargs:
        names = ", ".join(map(repr, kwargs))
        raise OptionError(
            f"remat_scan takes arguments by position, but {names} came by keyword. {help}"
        )
    if not args:
        raise OptionError("remat_scan: the first argument, the carry, is missing.")
    inputs = args[1:]
    if in_axes is None:
        if inputs:
            raise OptionError(
                "remat_scan: without in_axes= the layers take one argument, the carry, but the "
                f"call has {len(args)}. {help}"
            )
    elif isinstance(in_axes, tuple) and len(in_axes) != len(inputs):
        raise OptionError(
            f"in_axes={in_axes} has {len(in_axes)} entries, but the call has {len(inputs)} inputs "
            "beside the carry."
        )
    elif not _is_prefix(in_axes, inputs):
        raise OptionError(
            f"in_axes={in_axes} is no prefix of the inputs beside the carry, which are "
            f"{jax.tree.structure(inputs)}."
        )


def _n_layers(division: Division, stacked: Any, in_axes: Any, inputs: tuple[Any, ...]) -> int:
    """The number of layers, which the variables and the inputs must have."""
    sizes = {}
    for axis, keys, x in _stacked(in_axes, inputs):
        where, shape = f"inputs{keys}", jnp.shape(x)
        if not -len(shape) <= axis < len(shape):
            raise OptionError(
                f"in_axes: {where} has no axis {axis} for the layers, its shape is {shape}. "
                "nn.broadcast in its place gives all layers the same."
            )
        sizes[where] = axis, shape
    known = jax.tree.leaves(stacked)
    if not known and division.length is None:
        known = [jax.ShapeDtypeStruct(shape[axis:][:1], bool) for axis, shape in sizes.values()][:1]
    n_layers = division.total(known)
    for where, (axis, shape) in sizes.items():
        if shape[axis] != n_layers:
            raise ScheduleError(
                f"in_axes: {n_layers} layers need as many entries at axis {axis} of {where}, but "
                f"its shape is {shape}. nn.broadcast in its place gives all layers the same."
            )
    return n_layers


def _as_pair(result: Any, out_axes: Any) -> tuple[Any, Any]:
    """What a layer with inputs or outputs returns."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise TargetError(
            "with in_axes= or out_axes= the target of remat_scan returns (carry, output), but "
            f"returned {jax.tree.structure(result)}. Where there is no output, return (carry, None)."
        )
    carry, output = result
    if not _is_prefix(out_axes, output):
        raise OptionError(
            f"out_axes={out_axes} is no prefix of the output, which is "
            f"{jax.tree.structure(output)}."
        )
    for axis, _, x in _stacked(out_axes, output):
        _check_axis("out_axes", axis, jnp.shape(x))
    return carry, output


def _stacked(axes: Any, tree: Any) -> Iterator[tuple[int, str, Any]]:
    """The arrays of a pytree that have an axis for the layers, with it and where they are."""
    each = jax.tree.map(lambda axis, part: jax.tree.map(lambda _: axis, part), axes, tree)
    for axis, (keys, x) in zip(jax.tree.leaves(each), jax.tree_util.tree_leaves_with_path(tree)):
        if axis is not nn.broadcast:
            yield axis, jax.tree_util.keystr(keys), x


def _is_prefix(axes: Any, tree: Any) -> bool:
    try:
        jax.tree.map(lambda _, part: None, axes, tree)
    except ValueError:
        return False
    return True


def _check_axis(option: str, axis: int, shape: tuple[int, ...]) -> None:
    """Refuse an axis at which arrays of a shape, one of each layer, cannot be stacked."""
    n = len(shape)
    if not -n - 1 <= axis <= n:
        raise OptionError(
            f"{option}: arrays of shape {shape}, one of each layer, are stacked at an axis from "
            f"{-n - 1} to {n}, not at {axis}."
        )


def _axis_of(axis: Any) -> int:
    return axis.axis if isinstance(axis, (lift.In, lift.Out)) else axis


def _map_axes(f: Callable[[int, Any], Any], axes: Any, tree: Any) -> Any:
    """`f(axis, array)` for the arrays that have an axis; `()` stands for what is broadcast."""

    def one(axis: Any, part: Any) -> Any:
        return () if axis is nn.broadcast else jax.tree.map(lambda x: f(axis, x), part)

    return jax.tree.map(one, axes, tree)


def _choose(axes: Any, fixed: Any, moving: Any) -> Any:
    return jax.tree.map(
        lambda axis, if_fixed, if_moving: if_fixed if axis is nn.broadcast else if_moving,
        axes,
        fixed,
        moving,
    )


def _unstack(group: Any, axis: int, given: Any, metadata_params: Any) -> Any:
    """Variables with their axes for the layers made one, in front."""
    n_axes = len(given) if given else 1

    def one(x: Any) -> Any:
        _check_axis("variable_axes", axis, jnp.shape(x)[n_axes:])
        for level in range(n_axes):
            x = jnp.moveaxis(x, level + axis if axis >= 0 else axis, level)
        if given and x.shape[:n_axes] != given:
            raise ScheduleError(
                f"lengths={given} need variables with axes of these lengths at axis {axis}, but "
                f"one has {x.shape[:n_axes]} there."
            )
        return x.reshape(math.prod(x.shape[:n_axes]), *x.shape[n_axes:])

    for _ in range(n_axes):
        group = meta.remove_axis(group, axis, dict(metadata_params))
    return jax.tree.map(one, group)


def _stack(group: Any, axis: int, given: Any, metadata_params: Any) -> Any:
    """The inverse of `_unstack`."""
    n_axes = len(given) if given else 1

    def one(x: Any) -> Any:
        _check_axis("variable_axes", axis, x.shape[1:])
        x = x.reshape(*given, *x.shape[1:]) if given else x
        for level in reversed(range(n_axes)):
            x = jnp.moveaxis(x, level, level + axis if axis >= 0 else axis)
        return x

    group = jax.tree.map(one, group)
    for _ in range(n_axes):
        group = meta.add_axis(group, axis, dict(metadata_params))
    return group


# --------------------------------------------------------------------------------------------------
# Targets and methods


def _is_module_class(target: Any) -> bool:
    cls = _class_of(target)
    return inspect.isclass(cls) and issubclass(cls, nn.Module)


def _class_of(target: Any) -> Any:
    return target.func if isinstance(target, functools.partial) else target


def _is_bound_method(target: Any) -> bool:
    return inspect.ismethod(target) and isinstance(target.__self__, nn.Module)


def _named_after(original: Any, lifted: Any) -> Any:
    """Give a lifted class the name of the original, which is what submodules are named after."""
    cls, name = _class_of(lifted), _class_of(original)
    cls.__name__, cls.__qualname__, cls.__module__ = (
        name.__name__,
        name.__qualname__,
        name.__module__,
    )
    return lifted


def _as_mapping(methods: Any) -> dict[str, Mapping[str, Any]]:
    if methods is None:
        return {"__call__": {}}
    if isinstance(methods, (list, tuple, Mapping)) and not methods:
        raise MethodError("methods is empty, so nothing would be rematerialized.")
    if isinstance(methods, Mapping):
        for name, different in methods.items():
            for option in different:
                if option not in _METHOD_OPTIONS:
                    raise MethodError(
                        f"methods[{name!r}] has no option {option!r}; "
                        f"{closest(option, _METHOD_OPTIONS)}"
                    )
        return dict(methods)
    if isinstance(methods, (list, tuple)) and all(isinstance(name, str) for name in methods):
        return {name: {} for name in methods}
    raise MethodError(
        "methods is a list or tuple of method names, a mapping from names to options, or None, "
        f"not {methods!r}."
    )


def _method_of(cls: Any, name: str) -> Any:
    def is_method(name: str) -> bool:
        return has_method(cls, name) and name not in cls.__dataclass_fields__

    if not is_method(name):
        names = [n for n in dir(cls) if n not in dir(nn.Module) and not n.startswith("__")]
        own = [n for n in ("__call__", *names) if is_method(n)]
        raise MethodError(f"{cls.__name__} has no method {name!r} to lift; {closest(name, own)}")
    return getattr(cls, name)


def _names_of_arguments(fun: Any) -> frozenset[str] | None:
    """The names that `fun` takes, or None if it takes any or does not tell."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (ValueError, TypeError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)
