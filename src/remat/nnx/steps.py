"""Training steps on NNX modules as functions of arrays, for `remat.fit` and for analyses.

`fit` replaces `nnx.jit`: the step's changes of its modules are results of the function of arrays, and are
written back to the caller's objects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx import graphlib

from remat.aliases import PyTree
from remat.errors import OptionError, StaticArgumentError, TargetError
from remat.module_steps import Call, ModuleStep, Words, with_fixed_leaves
from remat.nnx.graphs import (
    ModuleGraph,
    as_graphs,
    as_objects,
    check_may_change,
    contents,
    is_graph,
    is_same,
    run_on_copies,
    write_back,
)
from remat.nnx.targets import check_target
from remat.planner.fit_modules import FittedModules
from remat.planner.plan_file import Plan
from remat.transform.statics import Statics
from remat.units import Number


def fit(
    step: Callable, /, *, budget: Number | None = None, plan: Plan | None = None, **options: Any
) -> FittedModules:
    """Compile a training step on NNX modules so that it fits a memory budget.

    It replaces `nnx.jit`: the step's changes of its modules, optimizers, metrics and random streams are
    made in the caller's. Otherwise it behaves like `remat.fit`.

    >>> import jax.numpy as jnp, optax
    >>> from flax import nnx
    >>> import remat.nnx
    >>> model = nnx.Sequential(*[nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(6)])
    >>> optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    >>> def step(model, optimizer, x):
    ...     loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
    ...     optimizer.update(model, grads)
    ...     return loss
    >>> train = remat.nnx.fit(step, budget="90%", donate_argnums=(0, 1))
    >>> loss = train(model, optimizer, jnp.ones((512, 16)))
    >>> int(optimizer.step[...]), train.plans[0].is_verified
    (1, True)

    Args:
      step: the training step. Modules are among its arguments. If it raises, nothing is changed.
      budget, plan: see `remat.fit`.
      options: those of `remat.fit` and `jax.jit`. All Variables of a donated module are returned, changed
        or not, so that it stays usable.

    Returns:
      A callable with the arguments, results and updates of the step, and the methods of a
      `remat.Fitted`.

    Raises:
      TargetError: for a bound method, a module or a class.
      OptionError: an option of `nnx.jit` that `jax.jit` does not have.
      StaticArgumentError: when called: a static argument holds a module.
      PlanError, BudgetError, UnitsError: as for `remat.fit`.
    """
    check_target(step, "remat.nnx.fit")
    if isinstance(step, nnx.Module):
        cls = type(step).__name__
        raise TargetError(
            f"remat.nnx.fit takes a training step, not a {cls}: pass the module as an argument, "
            f"remat.nnx.fit({cls}.__call__)(module, ...)."
        )
    for name in ("graph", "graph_updates"):
        if name in options:
            raise OptionError(
                f"remat.nnx.fit has no {name}=: modules are always graphs that may change. Leave it out."
            )
    return FittedModules(
        _Step(step, **_argument_options(options)), options | {"budget": budget, "plan": plan}
    )


def module_step(
    step: Callable,
    args: tuple[PyTree, ...],
    kwargs: Mapping[str, PyTree],
    options: Mapping[str, Any],
) -> ModuleStep | None:
    """Return a step as a function of arrays if modules are among its arguments, else None.

    The Variables in an `nnx.State` are data, as in `jax.jit`: a step on the State of a module merges it
    with the module's structure and returns the new State.

    Args:
      options: which arguments are donated or static, as in `jax.jit`.
    """
    # Graphs made by `arrays` are leaves here, although they hold Variables.
    is_leaf = lambda x: is_graph(x) or isinstance(x, (ModuleGraph, nnx.State))  # noqa: E731
    leaves = jax.tree.leaves((args, dict(kwargs)), is_leaf=is_leaf)
    return _Step(step, **options) if any(map(is_graph, leaves)) else None


def check_loses_no_updates(
    step: Callable, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> None:
    """Raise for a step whose updates of modules would be lost, since it does not return the modules.

    `jax.jit` treats modules as pytrees, so that a function changes copies of them.
    """
    on_arrays = module_step(step, args, kwargs, {})
    if not isinstance(on_arrays, _Step):
        return
    lost: list[str] = []

    def watched(*args: PyTree, **kwargs: PyTree) -> PyTree:
        copies = graphlib.IndexMap()
        of_args, of_kwargs = as_objects((args, kwargs), copies)
        before = {index: contents(x) for index, x in copies.items()}
        out = step(*of_args, **of_kwargs)
        found = graphlib.RefMap()
        as_graphs(out, found)
        lost.extend(
            type(x).__name__
            for index, x in copies.items()
            if x not in found and not is_same(before[index], contents(x))
        )
        return None

    call = on_arrays.arrays(args, kwargs)
    watch, of_args, of_kwargs = with_fixed_leaves(watched, call.args, call.kwargs)
    jax.eval_shape(watch, *of_args, **of_kwargs)
    if lost:
        kinds = ", ".join(dict.fromkeys(lost))
        raise TargetError(
            f"remat.fit compiles like jax.jit, which would lose the step's updates of NNX modules "
            f"({kinds}). Write remat.nnx.fit in place of remat.fit, or return the modules from the step."
        )


def _argument_options(options: dict[str, Any]) -> dict[str, Any]:
    names = ("donate_argnums", "donate_argnames", "static_argnums", "static_argnames")
    return {name: options[name] for name in names if options.get(name) is not None}


class _Step(ModuleStep):
    """A step on modules as a function of their arrays, which also returns its changes of them."""

    words = Words("remat.nnx.fit", "nnx.value_and_grad")

    def __init__(
        self,
        step: Callable,
        donate_argnums: int | Sequence[int] = (),
        donate_argnames: str | Iterable[str] = (),
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Iterable[str] = (),
    ) -> None:
        super().__init__(step)
        self._donated = Statics.of(step, donate_argnums, donate_argnames)
        self._static = Statics.of(step, static_argnums, static_argnames)

    def arrays(self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> Call:
        kwargs = dict(kwargs)
        for where in _chosen(self._static, args, kwargs):
            value = args[where] if isinstance(where, int) else kwargs[where]
            if any(map(is_graph, jax.tree.leaves(value, is_leaf=is_graph))):
                raise StaticArgumentError(
                    f"remat.nnx.fit: the static argument {where} of {self.__name__} holds a module, "
                    "whose values would be fixed in the compiled step. Modules are always traced: "
                    "take it out of static_argnums or static_argnames."
                )
        index_of = graphlib.RefMap()
        of_args, of_kwargs = as_graphs((args, kwargs), index_of)
        objects = {index: x for x, index in index_of.items()}
        for n in self._returned(of_args, of_kwargs):
            check_may_change(objects[n])
        return Call(of_args, of_kwargs, functools.partial(_finish, objects))

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        returned = self._returned(args, kwargs)
        copies = graphlib.IndexMap()
        of_args, of_kwargs = as_objects((args, kwargs), copies)
        objects = [copies[index] for index in range(len(copies))]
        return run_on_copies(self.step, of_args, of_kwargs, objects, returned)

    def _returned(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> frozenset[int]:
        """Return the numbers of the objects whose arrays are donated."""
        found: set[int | None] = set()
        for where in _chosen(self._donated, args, kwargs):
            value = args[where] if isinstance(where, int) else kwargs[where]
            for x in jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, ModuleGraph)):
                if isinstance(x, ModuleGraph):
                    defined = (n for n in x.graphdef.nodes if not isinstance(n, graphlib.NodeRef))
                    found |= {getattr(node, "index", None) for node in defined}
        return frozenset(n for n in found if n is not None)


def _chosen(
    which: Statics, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[int | str, ...]:
    positions, names = which.in_call(args, kwargs)
    return (*positions, *names)


def _finish(objects: dict[int, object], results: PyTree) -> PyTree:
    return write_back(objects, *results)
