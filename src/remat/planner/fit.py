"""`remat.fit`: `jax.jit` with a memory budget.

A fitted step is one `jax.jit` of a function that plans when it is traced. So everything `jax.jit` does
stays as it is: what it traces for, donation, static arguments, shardings, its cache and its speed once
compiled. The first call for a signature plans; a further signature plans again and says so.

Two contexts take precedence. Under `jax.disable_jit` nothing is compiled, so a call runs the step as it
is, without a plan. Inside a step that is itself planned or fitted, a fitted step is part of the outer
one, as a jitted function is, and the outer plan decides about all of it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import operator
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax

from remat import _jax, units
from remat.cache import Cache, find_cache
from remat.errors import PlanError
from remat.planner.decisions import RegionDecision
from remat.planner.plan import plan as make_plan, receive_plan, versions
from remat.planner.plan_file import Plan, RegionPlan
from remat.planner.regions import Application, LoopForm, Recording, session_context
from remat.planner.step import Step, check_step
from remat.printing import printable
from remat.program.costs import Costs, check_costs
from remat.program.targets import Target, target as find_target

_log = logging.getLogger("remat")
_jax.exclude_from_tracebacks(__file__)


def fit(
    step: Callable,
    /,
    *,
    budget: units.Number | None = None,
    plan: Plan | None = None,
    target: str | Target | None = None,
    offload: bool = True,
    cache: Cache | bool | str | os.PathLike[str] = True,
    costs: str | Costs = "roofline",
    progress: bool = True,
    **jit_options: Any,
) -> Fitted:
    """Compile a training step so that it fits a memory budget. Otherwise like `jax.jit`.

    What may be recomputed is marked in the step with `remat.auto`. The first call plans (`remat.plan`),
    compiles and runs; later ones run. Gradients are those of the step without a plan.

    >>> import jax, jax.numpy as jnp, remat
    >>> @remat.auto
    ... def loss(w, x):
    ...     for _ in range(8):
    ...         x = jnp.tanh(x @ w)
    ...     return x.sum()
    >>> step = remat.fit(jax.value_and_grad(loss), budget="60%")
    >>> value, gradient = step(jnp.eye(64), jnp.ones((1000, 64)))
    >>> gradient.shape
    (64, 64)

    Args:
      step: the training step.
      budget: the peak on one device that the compiler may report, see `remat.plan`.
      plan: a plan to follow instead (from `remat.plan` or `Plan.load`). It must be of this program.
      target: what to plan for, see `remat.plan`; by default the device at hand, where it will run.
      offload: whether loops may keep values in the host's memory, see `remat.plan`. A given plan says
        that itself.
      cache: whether plans are kept in the user's cache directory, or in which cache or folder.
      costs: what recomputing takes, see `remat.plan`.
      progress: whether to show on a terminal what is going on while it plans.
      jit_options: as `jax.jit` takes them.

    Returns:
      A callable with `lower`, `trace` and the other methods of a jitted function, and `plan(*args)`.

    Raises:
      UnitsError: the budget is neither a number of bytes nor a share.
      PlanError: at a call: the plan is of another program.
      BudgetError: at a call: no plan fits.
    """
    check_step(step)
    if plan is not None and not isinstance(plan, Plan):
        raise PlanError(
            f"plan= is a remat.Plan, not {type(plan).__name__}; read one from a file with "
            "remat.Plan.load(path)."
        )
    if plan is not None and budget is not None:
        raise PlanError("give budget= or plan=, not both: a plan has its own budget.")
    if budget is not None:
        units.parse_budget(budget)
    check_costs(costs)
    if not isinstance(cache, bool):
        cache = find_cache(cache)
    options = {
        "target": target,
        "offload": offload,
        "cache": cache,
        "costs": costs,
        "progress": progress,
    }
    return Fitted(step, budget, plan, options, jit_options)


class Fitted:
    """A step under a plan. Made by `remat.fit`."""

    def __init__(
        self,
        step: Callable,
        budget: units.Number | None,
        plan: Plan | None,
        options: Mapping[str, Any],
        jit_options: Mapping[str, Any],
    ) -> None:
        self._step = step
        self._budget = budget
        self._given = plan
        self._options = dict(options)
        self._jit_options = dict(jit_options)
        self._call = threading.local()
        self._plans: list[Plan] = []
        functools.update_wrapper(self, step, updated=())

        @_jax.wraps(step)
        def planned(*args: Any, **kwargs: Any) -> Any:
            found = self._plan_for(args, kwargs)
            session = application(found)
            with session_context(session):
                outs = step(*args, **kwargs)
            if self._given is not None:
                session.check_loops()
                self._check_program(self._given, args, kwargs)
            return outs

        self._jitted = jax.jit(planned, **jit_options)
        self._without_plan = jax.jit(step, **jit_options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:
            return self._step(*args, **kwargs)
        if session_context.value is not None:
            _log.info("remat.fit: %r is part of another step, whose plan decides about it", self)
            return self._without_plan(*args, **kwargs)
        with self._calling(args, kwargs):
            return self._jitted(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lower for these arguments, as `jax.jit`'s method of this name."""
        with self._calling(args, kwargs), jax.disable_jit(False):
            return self._jitted.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Trace for these arguments, as `jax.jit`'s method of this name."""
        with self._calling(args, kwargs), jax.disable_jit(False):
            return self._jitted.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Types of the results, as `jax.jit`'s method of this name. It does not plan."""
        return self._without_plan.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forget what was compiled, as `jax.jit`'s method of this name."""
        self._jitted.clear_cache()

    def _cache_size(self) -> int:
        """Return for how many signatures there is a program, as `jax.jit`'s method of this name."""
        size: int = self._jitted._cache_size()
        return size

    def __copy__(self) -> Fitted:
        return Fitted(self._step, self._budget, self._given, self._options, self._jit_options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fitted:
        # The rest is not changed by anybody, and a target's devices cannot be copied.
        step = copy.deepcopy(self._step, memo)
        return Fitted(step, self._budget, self._given, self._options, self._jit_options)

    def __reduce__(self) -> Any:
        """Pickle the step and the options; by name where the fitted step is what a module calls so.

        What is compiled is not pickled, and a plan that was made is found in the cache.
        """
        name = getattr(self, "__qualname__", "")
        with contextlib.suppress(AttributeError, KeyError):
            if operator.attrgetter(name)(sys.modules[self.__module__]) is self:
                return name
        target = self._options["target"]
        options = self._options | {"target": target.name if isinstance(target, Target) else target}
        return Fitted, (self._step, self._budget, self._given, options, self._jit_options)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments, made now if need be. Nothing is run."""
        if self._given is not None:
            return self._given
        return make_plan(
            self._step,
            *args,
            kwargs=kwargs,
            budget=self._budget,
            **self._options,
            **self._jit_options,
        )

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans made so far, one for each signature, in order."""
        return tuple(self._plans)

    def __repr__(self) -> str:
        name = getattr(self._step, "__qualname__", repr(self._step))
        return printable(f"<remat.fit of {name}>")

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else functools.partial(self, instance)

    # What happens when JAX traces

    def _calling(self, args: tuple, kwargs: Mapping[str, Any]) -> _Calling:
        return _Calling(self._call, (args, dict(kwargs)))

    def _plan_for(self, args: tuple, kwargs: Mapping[str, Any]) -> Plan:
        """Called while the step is traced: for a signature that has no plan yet."""
        if self._given is not None:
            return self._given
        # Under another transformation they are tracers, and their types have to do.
        args, kwargs = jax.tree.map(_as_type, self._as_given(args, kwargs))
        if self._plans:
            _log.warning(
                "remat.fit: %r is called with a new signature and planned again (plan %d)",
                self,
                len(self._plans) + 1,
            )
        made = receive_plan(lambda: self.plan(*args, **kwargs))
        peak = units.format_bytes(made.peak_bytes or 0)
        _log.info("remat.fit: %r planned, peak %s: %s", self, peak, made)
        self._plans.append(made)
        return made

    def _as_given(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, dict]:
        """The arguments as they were given, which know their shardings; perhaps tracers."""
        return getattr(self._call, "given", None) or (args, dict(kwargs))

    def _check_program(self, plan: Plan, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Refuse a plan that was made for another program than the one that is traced.

        The program is traced once more for that, as it is while one plans: in a session of its own,
        so that nothing that JAX remembers of the plan's session counts.
        """
        given = self._as_given(args, kwargs)
        is_known = not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given))
        args, kwargs = jax.tree.map(
            lambda x: x.aval if isinstance(x, jax.core.Tracer) else x, given
        )
        at = find_target(self._options["target"])
        recording = Recording()
        traced = Step(self._step, args, kwargs, at, self._jit_options).trace(recording)
        recording.check_has(region.key for region in plan.regions)
        here, planned_for = traced.program.partition("-"), plan.program.partition("-")
        if here[0] != planned_for[0]:
            raise PlanError(
                f"the plan is of another program ({planned_for[0]}; this one is {here[0]})"
                f"{_other_versions(plan)}. What is outside of its regions, a shape or a sharding "
                "changed since it was planned: plan again."
            )
        if is_known and here != planned_for:
            raise PlanError(
                "the plan is of this program, but for arguments that are divided over devices in "
                "another way, so its peak is not the one here: plan again, with arguments or shapes "
                "that have the shardings of this call."
            )


class _Calling:
    """Remembers a call's arguments while it is under way, also where calls are nested."""

    def __init__(self, here: threading.local, given: tuple[tuple, dict]) -> None:
        self._here = here
        self._given = given

    def __enter__(self) -> None:
        self._before = getattr(self._here, "given", None)
        self._here.given = self._given

    def __exit__(self, *_: object) -> None:
        self._here.given = self._before


def _other_versions(plan: Plan) -> str:
    """For an error: which libraries are not those that the plan was made with."""
    now = dict(versions())
    other = [f"{k} {v}, here {now[k]}" for k, v in plan.versions if now.get(k, v) != v]
    return f", and was planned with {'; '.join(other)}" if other else ""


def _as_type(leaf: Any) -> Any:
    """A tracer's type; anything else as it is."""
    if not isinstance(leaf, jax.core.Tracer):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.aval.weak_type)


@functools.lru_cache(maxsize=64)
def application(plan: Plan) -> Application:
    """What a plan decides, as the session in which its step is traced.

    One object for each plan, so that JAX finds what it traced under the same plan before.
    """
    decisions: dict[str, dict[str, RegionDecision]] = {}
    for region in plan.regions:
        decisions.setdefault(region.key, {})[region.fingerprint] = RegionDecision.of(region)
    loops = {loop.key: LoopForm(loop.group, loop.steps, loop.groups) for loop in plan.loops}
    edited: dict[str, list[RegionPlan]] = {}
    if not plan.is_verified:
        for region in plan.regions:
            edited.setdefault(region.key, []).append(region)
    return Application(decisions, loops, recomputes=bool(plan.regions), edited=edited)
