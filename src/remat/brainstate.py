"""`remat.brainstate.remat`, `checkpoint` and `fit`: the signatures of brainstate.transform's own.

brainstate's `StatefulFunction` traces a function, records which States it reads and writes, and makes a
pure function from State values and arguments to State values and results. This pure function is the
region. Around it the values are read from the States and written back, once.

A function is traced in each call, since its result may depend on more than its arguments: on the
settings of `brainstate.environ` (`fit`, `precision`, `dt`, also with traced values), on attributes of
modules, and on values that it closes over. A step given to `fit` is traced once for each signature, like one
given to `brainstate.transform.jit`: the values of its States are one more argument of the compiled program.

Known limits: negative `static_argnums` are refused, as in `brainstate.transform`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from brainstate import State
from brainstate.transform import StatefulFunction
from brainstate.typing import Missing

from remat import _jax, array_leaves
from remat.aliases import Leaf, PolicyLike, PyTree
from remat.errors import StaticArgumentError, StaticArgumentTypeError, TargetError
from remat.module_steps import Call, ModuleStep, Words
from remat.planner.fit_modules import FittedModules
from remat.planner.plan_file import Plan
from remat.transform.checkpoint import checkpoint as _checkpoint
from remat.transform.statics import Statics, without_statics
from remat.units import Number

__all__ = ["checkpoint", "fit", "remat"]

_STATES = "values of States"  # contains spaces, so it cannot be a keyword of the step

_jax.exclude_from_tracebacks(__file__)


def __dir__() -> list[str]:
    return sorted(__all__)


def checkpoint(
    fun: Any = Missing(),  # noqa: B008  # brainstate's own sentinel for an omitted argument
    *,
    prevent_cse: bool = True,
    policy: PolicyLike = None,
    static_argnums: int | tuple[int, ...] = (),
) -> Callable:
    """Make a function of States recompute its linearization points when it is differentiated.

    >>> import brainstate, jax.numpy as jnp
    >>> import remat.brainstate
    >>> weight, calls = brainstate.ParamState(jnp.ones(3)), brainstate.State(0)
    >>> @remat.brainstate.checkpoint(static_argnums=(1,))
    ... def loss(x, squared):
    ...     calls.value += 1
    ...     y = jnp.sin(weight.value * x)
    ...     return (y**2 if squared else y).sum()
    >>> gradient = brainstate.transform.grad(lambda: loss(jnp.arange(3.0), True), weight)()
    >>> gradient.shape, int(calls.value)
    ((3,), 1)

    Args:
      fun: a function or module. Left out, the result is a decorator, also of methods.
      prevent_cse: whether to keep the compiler from merging recomputation with the forward pass.
      policy: what may be saved, as in `remat.checkpoint`.
      static_argnums: positions of arguments that are not traced; not negative. In a method, `self`
        is 0. They hold for arguments given by keyword or left at their defaults, too. Values other
        than arrays and numbers (a module, a string) are never traced.

    Returns:
      A function with the arguments and results of `fun` that reads and writes the same States.

    Raises:
      TargetError: `fun` is not callable.
      StaticArgumentError: `static_argnums` has an argument that `fun` or a call lacks, or is negative.
      PolicyError, EffectError: as for `remat.checkpoint`.
    """
    if isinstance(fun, Missing):
        return functools.partial(
            checkpoint, prevent_cse=prevent_cse, policy=policy, static_argnums=static_argnums
        )
    if not callable(fun):
        raise TargetError(f"remat.brainstate.remat takes a function or a module, not {fun!r}.")
    statics = Statics.of(fun, _as_argnums(static_argnums), ())
    lift = functools.partial(_checkpoint, prevent_cse=prevent_cse, policy=policy)
    lift(fun)  # raises now if an option is invalid

    @_jax.api_boundary
    @functools.wraps(fun)
    def checkpointed(*args: PyTree, **kwargs: PyTree) -> PyTree:
        argnums, argnames = statics.in_call(args, kwargs)
        called, args, kwargs = without_statics(fun, args, kwargs, argnums, argnames)
        traced, parts = array_leaves.split((args, kwargs), _is_traced, _is_state)

        @functools.wraps(fun, updated=())
        def on_arrays(*traced: Leaf) -> PyTree:
            args, kwargs = parts.join(traced)
            return called(*args, **kwargs)

        pure = StatefulFunction(on_arrays, name="checkpoint")
        states = pure.get_state_trace(*traced, compile_if_miss=True)
        before = states.get_read_state_values(True)
        after, out = lift(pure.jaxpr_call)(states.get_state_values(), *traced)
        states.assign_state_vals_v2(before, after)
        return out

    return checkpointed


remat = checkpoint


def fit(
    step: Callable, /, *, budget: Number | None = None, plan: Plan | None = None, **options: Any
) -> FittedModules:
    """Compile a training step that reads and writes States so that it fits a memory budget.

    It replaces `brainstate.transform.jit`, and otherwise behaves like `remat.fit`.

    >>> import brainstate, jax, jax.numpy as jnp
    >>> import remat.brainstate
    >>> model = brainstate.nn.Sequential(*[brainstate.nn.Linear(16, 16) for _ in range(6)])
    >>> weights = model.states(brainstate.ParamState)
    >>> def step(x):
    ...     loss = lambda: jnp.mean(jnp.tanh(model(x)) ** 2)
    ...     grads, value = brainstate.transform.grad(loss, weights, return_value=True)()
    ...     for path, weight in weights.items():
    ...         weight.value = jax.tree.map(lambda a, g: a - 0.1 * g, weight.value, grads[path])
    ...     return value
    >>> train = remat.brainstate.fit(step, budget="90%")
    >>> value = train(jnp.ones((512, 16)))
    >>> train.plans[0].is_verified
    True

    Args:
      step: the training step, a function. If it raises, no State is changed.
      budget, plan: see `remat.fit`.
      options: those of `remat.fit` and `jax.jit`. Positions of arguments count from 0, and are not
        negative. The values of States are not donated.

    Returns:
      A callable with the arguments and results of the step that changes the same States, and has the
      methods of a `remat.Fitted`.

    Raises:
      TargetError: `step` is not a function.
      StaticArgumentError: a position of an argument is negative.
      PlanError, BudgetError, UnitsError: as for `remat.fit`.
    """
    if not callable(step):
        raise TargetError(f"remat.brainstate.fit takes a training step, a function, not {step!r}.")
    for name in ("static_argnums", "donate_argnums"):
        if options.get(name) is not None:
            options[name] = _as_argnums(options[name], "remat.brainstate.fit", name)
    static = {
        name: options[name] for name in ("static_argnums", "static_argnames") if name in options
    }
    return FittedModules(_Step(step, **static), options | {"budget": budget, "plan": plan})


class _Step(ModuleStep):
    """A step as a function of its arguments and, by keyword, of the values of its States."""

    words = Words("remat.brainstate.fit", "brainstate.transform.grad")

    def __init__(
        self,
        step: Callable,
        static_argnums: int | Sequence[int] | None = (),
        static_argnames: str | Iterable[str] | None = (),
    ) -> None:
        super().__init__(step)
        names = (
            (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames or ())
        )
        self._pure = StatefulFunction(
            step,
            static_argnums=static_argnums or (),
            static_argnames=names,
            name="fit",
            return_only_write=True,
        )

    def arrays(self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> Call:
        states = self._pure.get_state_trace(*args, **kwargs, compile_if_miss=True)
        before = states.get_read_state_values(True)

        def finish(results: PyTree) -> PyTree:
            after, out = results
            states.assign_state_vals_v2(before, after)
            return out

        return Call(args, {**kwargs, _STATES: states.get_state_values()}, finish)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        values = kwargs.pop(_STATES)
        return self._pure.jaxpr_call(values, *args, **kwargs)


def _is_state(x: Leaf) -> bool:
    return isinstance(x, State)


def _is_traced(x: Leaf) -> bool:
    """Return whether an argument is traced: an array, a number, or a State, which is refused later."""
    return array_leaves.is_array(x) or isinstance(x, (bool, int, float, complex, State))


def _as_argnums(
    given: object, fun: str = "remat.brainstate.checkpoint", name: str = "static_argnums"
) -> tuple[int, ...]:
    items = () if given is None else given if isinstance(given, (tuple, list)) else (given,)
    try:
        numbers = tuple(operator.index(item) for item in items)
    except TypeError as e:
        raise StaticArgumentTypeError(f"{name} is an int or a tuple of ints, not {given!r}.") from e
    if any(n < 0 for n in numbers):
        raise StaticArgumentError(
            f"{fun} does not take negative {name}, as in {numbers}: "
            "brainstate counts arguments from the front. Give positions from 0 on."
        )
    return numbers
