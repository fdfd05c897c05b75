"""Trace a function or training step as `jax.jit` would trace it for a target.

A function that computes no gradient is explained with one: its forward pass, and its backward pass from a
cotangent of ones to its first argument. If the result is one number, that is `jax.value_and_grad`; it is also
defined for other results.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from remat import _jax
from remat.aliases import Leaf, PyTree
from remat.explain.phases import holds_gradient
from remat.marked import names_of_marked
from remat.module_steps import Words, of_arrays, words_for
from remat.program.partition import UNKNOWN, Partition, partition_of_program
from remat.program.targets import Target, n_shards, place
from remat.transform.residuals import Residuals, residuals

_jax.exclude_from_tracebacks(__file__)

#: The name of inputs that the function closes over.
CLOSED_OVER = "closed-over constant"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ExplainedStep:
    """A step as JAX compiles it, with the names and shard counts of its inputs.

    Args:
      title: the function's name.
      jaxpr: of the whole step; closed-over values are its leading inputs.
      undifferentiated: the jaxpr of the given function, if the gradient was added to it.
      names: the names of the inputs.
      results: the names of the results that are arrays, as far as they are known; "" for others.
      shards: the shard count of each input.
      donated: for each input, whether it is donated.
      residuals: those of the given function, if the gradient was added to it.
      marked: the functions marked by `remat.auto` that it calls.
      inputs: for each input, an array or its shape, type and sharding.
      lower: returns the lowered step.
      words: the names of functions for such a step.
      not_differentiable: why JAX cannot differentiate the function; "" if it can or that was not tried.
    """

    title: str
    jaxpr: _jax.Jaxpr
    undifferentiated: _jax.Jaxpr | None
    names: tuple[str, ...]
    results: tuple[str, ...]
    shards: tuple[int, ...]
    donated: tuple[bool, ...]
    residuals: Residuals | None
    marked: tuple[str, ...]
    inputs: tuple[Leaf, ...]
    lower: Callable[[], jax.stages.Lowered]
    words: Words
    not_differentiable: str = ""

    @functools.cached_property
    def partition(self) -> Partition:
        """Return how the step is divided among devices."""
        is_sharded = any(n > 1 for n in self.shards)
        return partition_of_program(self.jaxpr, self.inputs) if is_sharded else UNKNOWN


def traced_step(
    f: Callable, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], target: Target
) -> ExplainedStep:
    """Return a function or step, traced with its arguments for a target."""
    if isinstance(f, (jax.stages.Lowered, jax.stages.Compiled)):
        raise TypeError(
            "remat.explain takes the function itself, jitted or not: a program that is lowered or "
            "compiled does not show what was differentiated. The same program is compiled for it."
        )
    if not callable(f):
        raise TypeError(f"remat.explain takes a function or a training step, not {f!r}.")
    title = getattr(f, "__name__", type(f).__name__)
    f, args, kwargs = of_arrays(f, args, kwargs)
    f = _hashable(f)
    args, kwargs = place((args, kwargs), target)
    with names_of_marked() as marked:
        plain = _trace(f, args, kwargs)
    jaxpr, consts = _jax.detach_consts(plain.jaxpr)
    known = _Arguments(f, args, kwargs)
    args, kwargs = known.dynamic
    results = _results(plain, jaxpr) if words_for(f).fit == Words().fit else ()
    as_it_is = _made(title, known, plain, jaxpr, consts, None, None, tuple(marked), results)
    if holds_gradient(jaxpr) or not args or not _differentiable(args[0]):
        return as_it_is
    try:
        traced = jax.jit(value_and_gradient(known.of_dynamic)).trace(*args, **kwargs)
    except (ValueError, NotImplementedError) as error:
        if not _is_of_differentiation(error):
            raise
        return dataclasses.replace(as_it_is, not_differentiable=str(error))

    of_step, consts = _jax.detach_consts(traced.jaxpr)
    kept = residuals(known.of_dynamic, *args, **kwargs)
    results = _results_and_gradients(of_step, known)
    return _made(title, known, traced, of_step, consts, jaxpr, kept, tuple(marked), results)


def unplanned_step(
    f: Callable, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], target: Target
) -> ExplainedStep:
    """Return the step that was given to `remat.fit` or an adapter's `fit`, from the fitted step."""
    f, args, kwargs = of_arrays(f, args, kwargs)
    fun, options = getattr(f, "unplanned", (f, {}))
    return traced_step(jax.jit(fun, **options), args, kwargs, target)


class _Arguments:
    """A function's arguments, separated into static ones and inputs of the program."""

    def __init__(self, f: Callable, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> None:
        numbers, names = _jax.static_arguments(f)
        self.f, self.args, self.kwargs = f, args, kwargs
        self._fixed = {n % len(args) for n in numbers if -len(args) <= n < len(args)}
        self._fixed_names = set(names) & set(kwargs)
        self._passed = [i for i in range(len(args)) if i not in self._fixed]

    @property
    def dynamic(self) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """Return the arguments that are inputs of the program."""
        named = {k: v for k, v in self.kwargs.items() if k not in self._fixed_names}
        return tuple(self.args[i] for i in self._passed), named

    @property
    def of_dynamic(self) -> Callable:
        """Return the function of the inputs alone."""
        if not self._fixed and not self._fixed_names:
            return self.f

        @_jax.wraps(self.f)
        def function(*dynamic: PyTree, **named: PyTree) -> PyTree:
            args = list(self.args)
            for i, x in zip(self._passed, dynamic):
                args[i] = x
            return self.f(*args, **{**self.kwargs, **named})

        return function

    def names(self, n_inputs: int) -> tuple[str, ...]:
        """Return the names of the inputs."""
        args, kwargs = self.args, self.kwargs
        return _jax.argument_names(
            self.f, args, kwargs, n_inputs, tuple(self._fixed), tuple(self._fixed_names)
        )


def has_gradient(f: Callable, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> bool:
    """Return whether a function computes a gradient itself."""
    f, args, kwargs = of_arrays(f, args, kwargs)
    if hasattr(f, "unplanned"):  # a step that `remat.fit` returned
        f = jax.jit(f.unplanned[0], **f.unplanned[1])
    return holds_gradient(_jax.open_jaxpr(_trace(f, args, kwargs).jaxpr))


def value_and_gradient(f: Callable) -> Callable:
    """Return a function's result and its gradient with respect to the first argument."""

    # The name is the same in the compiled program and in its analysis.
    @_jax.wraps(f)
    def step(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return _value_and_gradient(f, args, kwargs)

    return step


def _trace(f: Callable, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> jax.stages.Traced:
    if inspect.ismethod(f):  # whose `trace` is that of the function, which takes `self`
        f = jax.jit(f, **_jax.options_of_jit(f))
    if hasattr(f, "trace"):
        traced = f.trace(*args, **kwargs)
        if hasattr(traced, "jaxpr"):  # `nnx.jit` does not expose it
            return traced
    return jax.jit(f).trace(*args, **kwargs)


def _is_of_differentiation(error: Exception) -> bool:
    """Return whether JAX raised an error because it does not differentiate an operation."""
    said = re.search(r"differentiat|\bjvp\b|transpose rule", str(error), re.IGNORECASE)
    return isinstance(error, NotImplementedError) or said is not None


def _hashable(f: Callable) -> Callable:
    """Return a function, or one that calls it if it cannot be hashed: an Equinox module, for example."""
    try:
        hash(f)
    except TypeError:
        pass
    else:
        return f

    @_jax.wraps(f)
    def function(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return f(*args, **kwargs)

    return function


def _made(
    title: str,
    arguments: _Arguments,
    traced: jax.stages.Traced,
    jaxpr: _jax.Jaxpr,
    consts: Sequence[jax.Array],
    undifferentiated: _jax.Jaxpr | None,
    kept: Residuals | None,
    marked: tuple[str, ...],
    results: tuple[str, ...],
) -> ExplainedStep:
    n_consts = len(consts)
    n_inputs = len(jaxpr.invars) - n_consts
    leaves = jax.tree.leaves(arguments.dynamic)
    infos = jax.tree.leaves(traced.args_info, is_leaf=lambda x: hasattr(x, "donated"))
    # Static arguments of `remat.fit` are among the arguments but not among the inputs.
    if len(leaves) != n_inputs:
        leaves = [x for x in leaves if hasattr(x, "shape")]
    known = len(leaves) == n_inputs == len(infos)
    names = (
        arguments.names(n_inputs)
        if len(jax.tree.leaves(arguments.dynamic)) == n_inputs
        else tuple(f"argument {i}" for i in range(n_inputs))
    )
    return ExplainedStep(
        title,
        jaxpr,
        undifferentiated,
        (CLOSED_OVER,) * n_consts + names,
        results,
        (1,) * n_consts + (tuple(map(_shard_count, leaves)) if known else (1,) * n_inputs),
        (False,) * n_consts
        + (
            tuple(info.donated for info in infos) if len(infos) == n_inputs else (False,) * n_inputs
        ),
        kept,
        marked,
        (*consts, *(leaves if known else map(_struct, jaxpr.invars[n_consts:]))),
        traced.lower,
        words_for(arguments.f),
    )


def _results(traced: jax.stages.Traced, jaxpr: _jax.Jaxpr) -> tuple[str, ...]:
    """Return the paths of the results in a function's return value: ``result[0]['w']``."""
    leaves = jax.tree_util.tree_leaves_with_path(traced.out_info)
    if len(leaves) != len(jaxpr.outvars):
        return ()
    called = [f"result{jax.tree_util.keystr(path)}" for path, _ in leaves]
    return tuple(name for v, name in zip(jaxpr.outvars, called) if _jax.is_var(v))


def _results_and_gradients(jaxpr: _jax.Jaxpr, arguments: _Arguments) -> tuple[str, ...]:
    """Return the names of the results of `value_and_gradient`; the last are gradients."""
    leaves = jax.tree.leaves(arguments.dynamic[0][0])
    names = arguments.names(len(jax.tree.leaves(arguments.dynamic)))
    gradients = [f"gradient of {name}" for x, name in zip(leaves, names) if _is_inexact(x)]
    called = ["result"] * (len(jaxpr.outvars) - len(gradients)) + gradients
    return tuple(name for v, name in zip(jaxpr.outvars, called) if _jax.is_var(v))


def _struct(v: _jax.Var) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)


def _shard_count(leaf: Leaf) -> int:
    sharding, shape = getattr(leaf, "sharding", None), tuple(np.shape(leaf))
    if sharding is None or not all(shape):
        return 1
    return n_shards(shape, sharding)


def _differentiable(tree: PyTree) -> bool:
    return any(map(_is_inexact, jax.tree.leaves(tree)))


def _is_inexact(x: Leaf) -> bool:
    dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x) if _is_number(x) else None
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _is_number(x: Leaf) -> bool:
    return isinstance(x, (bool, int, float, complex))


def _value_and_gradient(f: Callable, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
    leaves, tree = jax.tree.flatten(args[0])
    chosen = [i for i, leaf in enumerate(leaves) if _is_inexact(leaf)]

    def of_chosen(xs: list[jax.Array]) -> PyTree:
        full = list(leaves)
        for i, x in zip(chosen, xs):
            full[i] = x
        return f(jax.tree.unflatten(tree, full), *args[1:], **kwargs)

    out, backward = jax.vjp(of_chosen, [leaves[i] for i in chosen])
    return out, backward(jax.tree.map(_ones, out))[0]


def _ones(x: Leaf) -> Leaf:
    if _is_inexact(x):
        return jnp.ones_like(x)
    return np.zeros(jnp.shape(x), jax.dtypes.float0)
