"""`remat.fit`: `jax.jit` with a memory budget.

A fitted step is one `jax.jit` of a function that asks for a plan when it is traced. So tracing, donation,
static arguments, shardings, the cache of compiled programs and the speed of a compiled call are those of
`jax.jit`. The first call with a signature plans; a call with a new signature plans again and logs it.

A plan depends on the shardings of the arguments, which the types of tracers do not have. So a trace
without a plan raises `_NoPlan`, the call plans from its own arguments, and the step is traced again.

In two contexts a fitted step does not plan. Under `jax.disable_jit` nothing is compiled, so the step
runs without a plan. Inside a step that is itself planned or fitted, a fitted step is part of the outer
step, like any jitted function, and the outer plan covers it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import operator
import os
import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax

from remat import _jax, units
from remat.aliases import Leaf, PyTree
from remat.cache import Cache, find_cache
from remat.errors import BudgetError, PlanError
from remat.module_steps import check_loses_no_updates, check_takes_arrays
from remat.planner.auto import WITH_MARKS, WITHOUT_MARKS, tracing
from remat.planner.decisions import applied
from remat.planner.host_state import (
    OPTIMIZER,
    WEIGHTS,
    HostState,
    find_host_state,
    parse_offload,
    state_kinds,
    type_on_device,
)
from remat.planner.plan import plan as make_plan
from remat.planner.plan_decisions import WholeStep
from remat.planner.plan_file import AS_RUN, FAST, MadeFor, Plan
from remat.planner.planning import versions
from remat.planner.processes import receive_plan
from remat.planner.rewrite import following
from remat.planner.step import TargetStep, TracedStep, check_step, unfitted
from remat.planner.whole_step_file import decisions_of_plan
from remat.printing import printable
from remat.program.compiled import CompiledMemory, compile_for_analysis
from remat.program.costs import Costs, check_costs
from remat.program.targets import Target, target as find_target

_log = logging.getLogger("remat")
_Signature: TypeAlias = tuple[Hashable, ...]  # of a call: see `_signature`
_MAX_PLANS = 4  # plans for a signature, each within fewer bytes, until the program that runs fits
_jax.exclude_from_tracebacks(__file__)


def fit(
    step: Callable,
    /,
    *,
    budget: units.Number | None = None,
    plan: Plan | None = None,
    target: str | Target | None = None,
    offload: bool | str = True,
    host_budget: units.Number | None = None,
    cache: Cache | bool | str | os.PathLike[str] = True,
    costs: str | Costs = "roofline",
    progress: bool = True,
    **jit_options: Any,
) -> Fitted:
    """Compile a training step so that it fits a memory budget. Otherwise it is like `jax.jit`.

    Nothing has to be marked; `remat.auto` restricts recomputation to some functions. The first call plans
    (`remat.plan`), compiles, compares the compiled step's peak with the budget, and runs; later calls run.
    Gradients are those of the step without a plan.

    >>> import jax, jax.numpy as jnp, remat
    >>> def loss(w, x):
    ...     for _ in range(8):
    ...         x = jnp.tanh(x @ w)
    ...     return x.sum()
    >>> step = remat.fit(jax.value_and_grad(loss), budget="60%")
    >>> value, gradient = step(jnp.eye(64), jnp.ones((1000, 64)))
    >>> gradient.shape
    (64, 64)

    Args:
      step: the training step.
      budget: the largest peak on one device that the compiler may report, see `remat.plan`.
      plan: a plan to follow instead (from `remat.plan` or `Plan.load`). It must be for this program.
      target: the device to plan for, see `remat.plan`; by default the device at hand.
      offload: what may be kept in host memory, see `remat.plan`. Ignored with `plan`. With "optimizer"
        or "weights", these arguments are moved to host memory by the first call, and results are there.
      host_budget: the most host memory per device, see `remat.plan`. Ignored with `plan`.
      cache: whether to use the user's cache directory; or a cache or a folder to use instead.
      costs: the cost model of recomputation, see `remat.plan`.
      progress: whether to show the progress of planning on a terminal.
      jit_options: options of `jax.jit`. Arguments that a jitted step donates, or that are static in it,
        are so by default.

    Returns:
      A callable with `lower`, `trace` and the other methods of a jitted function, and `plan(*args)`.

    Raises:
      UnitsError: the budget is neither a number of bytes nor a share.
      PlanError: when called: the plan is for another program.
      BudgetError: when called: no plan fits.
    """
    check_step(step)
    step, jit_options = unfitted(step, jit_options)
    if plan is not None and not isinstance(plan, Plan):
        raise PlanError(
            f"plan= must be a remat.Plan, not {type(plan).__name__}; read one from a file with "
            "remat.Plan.load(path)."
        )
    if plan is not None and budget is not None:
        raise PlanError("give budget= or plan=, not both: a plan has its own budget.")
    if budget is not None:
        units.parse_budget(budget)
    if host_budget is not None:
        units.parse_bytes(host_budget)
    parse_offload(offload)
    check_costs(costs)
    if not isinstance(cache, bool):
        cache = find_cache(cache)
    options = {
        "target": target,
        "offload": offload,
        "host_budget": host_budget,
        "cache": cache,
        "costs": costs,
        "progress": progress,
    }
    return Fitted(step, budget, plan, options, jit_options)


class Fitted:
    """A jitted step that follows a plan. `remat.fit` returns it."""

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
        self._plans: list[Plan] = []
        # Plans passed from calls to the traces that asked for them, by the signatures of the traces.
        self._ready: dict[_Signature | None, _Ready] = {}
        functools.update_wrapper(self, step, updated=())

        @_jax.wraps(step)
        def planned(*args: PyTree, **kwargs: PyTree) -> PyTree:
            signature = _signature(args, kwargs)
            ready = self._ready.pop(signature, None)
            if ready is None:
                raise _NoPlan(signature)
            if self._given is None:
                return _following(ready.hosted(step), ready.plan, args, kwargs)
            return self._follow_given(ready, args, kwargs)

        self._jitted = jax.jit(planned, **jit_options)
        self._without_plan = jax.jit(step, **jit_options)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if jax.config.jax_disable_jit:
            return self._step(*args, **kwargs)
        if tracing.value is not None:
            _log.info("remat.fit: %r is part of another planned step and follows its plan", self)
            return self._without_plan(*args, **kwargs)
        return self._with_plan(self._jitted, args, kwargs)

    def lower(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Lowered:
        """Lower the step for these arguments, like the method of a `jax.jit` function."""
        with jax.disable_jit(False):
            return self._with_plan(self._jitted.lower, args, kwargs)

    def trace(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Traced:
        """Trace the step for these arguments, like the method of a `jax.jit` function."""
        with jax.disable_jit(False):
            return self._with_plan(self._jitted.trace, args, kwargs)

    def eval_shape(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Return the types of the results, like the method of a `jax.jit` function. It does not plan."""
        if self._has_host_state:
            args, kwargs = jax.tree.map(type_on_device, (args, kwargs))
        return self._without_plan.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Drop all compiled programs, like the method of a `jax.jit` function."""
        self._jitted.clear_cache()

    def _cache_size(self) -> int:
        """Return the number of compiled signatures, like the method of a `jax.jit` function."""
        size: int = self._jitted._cache_size()
        return size

    def __copy__(self) -> Fitted:
        return Fitted(self._step, self._budget, self._given, self._options, self._jit_options)

    def __deepcopy__(self, memo: dict[int, object]) -> Fitted:
        # All other fields are immutable, and a target's devices cannot be copied.
        step = copy.deepcopy(self._step, memo)
        return Fitted(step, self._budget, self._given, self._options, self._jit_options)

    def __reduce__(self) -> str | tuple[type[Fitted], tuple]:
        """Pickle by name if a module has the fitted step under its name, else the step and its options.

        Compiled programs are not pickled. The cache on disk has the plan.
        """
        target = self._options["target"]
        options = self._options | {"target": target.name if isinstance(target, Target) else target}
        made = Fitted, (self._step, self._budget, self._given, options, self._jit_options)
        return by_name(self) or made

    def plan(self, *args: PyTree, **kwargs: PyTree) -> Plan:
        """Return the plan for these arguments; it is made now if there is none yet. Nothing is run."""
        if self._given is not None:
            return self._given
        return make_plan(self, *args, kwargs=kwargs, budget=self._budget, **self._options)

    @property
    def unplanned(self) -> tuple[Callable, dict[str, Any]]:
        """Return the step without a plan, and its options of `jax.jit`."""
        return self._step, dict(self._jit_options)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Return the plans made so far, one for each signature, in order."""
        return tuple(self._plans)

    def __repr__(self) -> str:
        name = getattr(self._step, "__qualname__", f"a {type(self._step).__qualname__}")
        return printable(f"<remat.fit of {name}>")

    def __get__(self, instance: object, owner: type | None = None) -> Callable:
        return self if instance is None else functools.partial(self, instance)

    # Planning: JAX traces `planned`, which raises `_NoPlan` because `_ready` has no plan for these arguments.
    # `_with_plan` makes one, puts it in `_ready`, and calls again; the second trace takes it from there.

    def _with_plan(
        self, run: Callable, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
    ) -> PyTree:
        """Call a method of the jitted function; make the plan that it asks for, and call it again."""
        signature: _Signature | None = None
        while True:
            try:
                return run(*args, **kwargs)
            except _NoPlan as asked:
                signature = asked.signature
            except TypeError as error:
                check_takes_arrays(self._step, args, kwargs, error)
                raise
            finally:
                # Removed here, too, in case JAX did not trace after all.
                self._ready.pop(signature, None)
            state = self._host_state(args, kwargs)
            if state is not None and not state.is_moved(args, kwargs):
                args, kwargs = state.moved(args, kwargs, find_target(self._options["target"]))
                continue
            made = self._plan_for(args, kwargs)
            if run is self._jitted:
                made = self._confirmed_as_run(signature, made, args, kwargs, state)
            if self._given is None:
                peak = units.format_bytes(made.peak_bytes or 0)
                _log.info("remat.fit: %r planned, peak %s: %s", self, peak, made)
                self._plans.append(made)
            self._ready[signature] = _Ready(made, args, kwargs, state)

    @property
    def _has_host_state(self) -> bool:
        if self._given is not None:
            return bool(self._given.host_arguments)
        return bool(state_kinds(self._options["offload"]))

    def _host_state(
        self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
    ) -> HostState | None:
        """Return which arguments are state in the host's memory; None if nothing is kept there."""
        if not self._has_host_state:
            return None
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, dict(kwargs)))):
            raise PlanError(
                f"{self!r} keeps arguments in the host's memory, so its arguments must be arrays: call "
                "it outside of other JAX transformations."
            )
        at = find_target(self._options["target"])
        options = self._options["offload"]
        kinds = state_kinds(options) if self._given is None else (OPTIMIZER, WEIGHTS)
        found = find_host_state(self._step, args, kwargs, at, self._jit_options, kinds)
        return found if self._given is None else found.only(self._given.host_arguments)

    def _confirmed_as_run(
        self,
        signature: _Signature,
        made: Plan,
        args: tuple[PyTree, ...],
        kwargs: Mapping[str, PyTree],
        state: HostState | None,
    ) -> Plan:
        """Return a plan with which the step, compiled as it will run, is within the budget.

        JAX caches the program that is compiled here, so that the call does not compile again.
        """
        at = find_target(self._options["target"])
        leaves = jax.tree.leaves((args, dict(kwargs)))
        if at.ahead_of_time or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return made
        budget = limit = made.budget_bytes
        for _ in range(_MAX_PLANS):
            self._ready[signature] = _Ready(made, args, kwargs, state)
            try:
                lowered = self._jitted.lower(*args, **kwargs)
                memory = compile_for_analysis(lowered, at, as_run=True)
            finally:
                self._ready.pop(signature, None)
            if isinstance(memory, CompiledMemory) and memory.peak_bytes <= budget:
                if self._given is not None:
                    return made
                return dataclasses.replace(
                    made,
                    budget_bytes=budget,
                    peak_bytes=memory.peak_bytes,
                    is_verified=True,
                    verified_level=AS_RUN,
                )
            if self._given is not None or jax.process_count() > 1:
                self._warn_above_budget(made, memory.peak_bytes, at)
                return made
            # Other signatures lose their programs as well; they plan again, or find their plans in the cache.
            self._jitted.clear_cache()
            share = min(1.0, budget / memory.peak_bytes)
            limit = int(0.995 * share * min(limit, made.peak_bytes or limit))
            made = self._made(limit, args, kwargs, self._options["progress"])
        raise BudgetError(
            f"no plan fits {units.format_bytes(budget)} ({budget} bytes) with the options with which "
            f"{self!r} is compiled to run: {units.format_bytes(memory.peak_bytes)} "
            f"({memory.peak_bytes} bytes) are needed. Raise budget=, or remove compiler options that "
            "need more memory."
        )

    def _warn_above_budget(self, plan: Plan, peak_bytes: int, at: Target) -> None:
        if not plan.is_verified:
            return  # an unverified plan promises no peak
        settings = plan.made_for.settings if plan.made_for is not None else ()
        how = ", ".join(f"{name}={value}" for name, value in settings) or "the default options"
        other = _other_versions(plan, at)
        _log.warning(
            "remat.fit: %r needs %s as it is compiled here, more than its plan's budget of %s. The "
            "plan was verified at the level %r with %s%s. Plan again here, or with a smaller budget=.",
            self,
            units.format_bytes(peak_bytes),
            units.format_bytes(plan.budget_bytes),
            plan.verified_level,
            how,
            f" and {other}" if other else "",
        )

    def _made(
        self,
        budget: units.Number | None,
        args: tuple[PyTree, ...],
        kwargs: Mapping[str, PyTree],
        progress: bool | Callable[[str], None],
    ) -> Plan:
        # Only a process that plans alone can confirm the program that runs.
        verify = FAST if jax.process_count() == 1 else None
        options = self._options | {"progress": progress}
        return make_plan(self, *args, kwargs=kwargs, budget=budget, verify=verify, **options)

    def _plan_for(self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> Plan:
        """Return the plan of a signature. JAX asks for it when it traces, so once per signature."""
        check_loses_no_updates(self._step, args, kwargs)
        if self._given is not None:
            return self._given
        # Under another transformation the arguments are tracers: plan for their types.
        args, kwargs = jax.tree.map(_as_type, (args, dict(kwargs)))
        if self._plans:
            _log.warning(
                "remat.fit: %r is called with a new signature and planned again (plan %d)",
                self,
                len(self._plans) + 1,
            )
        return receive_plan(
            lambda progress: self._made(self._budget, args, kwargs, progress),
            progress=self._options["progress"],
        )

    def _follow_given(
        self, ready: _Ready, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
    ) -> PyTree:
        """Trace the step following the user's own plan; raise if the plan is for another program."""
        plan = ready.plan
        at = find_target(self._options["target"])
        if plan.made_for is not None and plan.made_for.device != at.kind:
            raise PlanError(
                f"the plan is for {plan.made_for} and this step is compiled for {at.kind}, where its "
                "peak differs. Plan again for this device, or pass the target= that the plan is for."
            )
        try:
            traced = self._checked(ready, at)
            whole = plan.whole_step
            if whole is None:
                return _following(ready.hosted(self._step), plan, args, kwargs)
            with tracing(WITH_MARKS):
                return traced.following(_change(whole), _donated(plan))(*args, **kwargs)
        except PlanError as error:
            other = _other_versions(plan, at)
            if not other:
                raise
            raise PlanError(
                f"the plan was made with {other}, and it does not fit the program that these versions "
                f"make of the step. Plan again here. ({error})"
            ) from error

    def _checked(self, ready: _Ready, at: Target) -> TracedStep:
        """Trace the step without a plan, as in planning; raise if the plan was made for another program."""
        plan, given = ready.plan, (ready.args, dict(ready.kwargs))
        is_known = not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(given))
        args, kwargs = jax.tree.map(
            lambda x: x.aval if isinstance(x, jax.core.Tracer) else x, given
        )
        step = ready.hosted(self._step)
        traced = TargetStep(step, args, kwargs, at, self._jit_options).trace()
        if is_known and plan.made_for is not None:
            _check_devices(plan.made_for, traced.made_for())
        here, planned_for = traced.program.partition("-"), plan.program.partition("-")
        if here[0] != planned_for[0]:
            raise PlanError(
                f"the plan is of another program ({planned_for[0]}; this one is {here[0]}). Its code, "
                "a shape, a sharding, or what is marked by remat.auto has changed since then; plan again."
            )
        if is_known and here != planned_for:
            raise PlanError(
                "the plan is of this program, but its arguments were sharded in another way, so its "
                "peak differs; plan again, with arguments or shapes that have the shardings of this "
                "call."
            )
        return traced


def by_name(fitted: object) -> str:
    """Return the name of a fitted step in its module, for pickling; "" if it has none."""
    name: str = getattr(fitted, "__qualname__", "")
    with contextlib.suppress(AttributeError, KeyError):
        if operator.attrgetter(name)(sys.modules[fitted.__module__]) is fitted:
            return name
    return ""


def _following(
    step: Callable, plan: Plan, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> PyTree:
    """Call the step as one that follows a plan."""
    whole = plan.whole_step
    if whole is None:
        with tracing(WITHOUT_MARKS):
            return step(*args, **kwargs)
    with tracing(WITH_MARKS):
        return following(step, _change(whole), _donated(plan))(*args, **kwargs)


def _donated(plan: Plan) -> tuple[int, ...]:
    """Return the arguments that count as donated in the flat program of a plan."""
    return () if plan.made_for is None else plan.made_for.donated


def _change(whole: WholeStep) -> Callable[[_jax.Jaxpr], _jax.Jaxpr]:
    """Return what applies a plan's decisions to the flat program."""
    return lambda flat: applied(flat, decisions_of_plan(whole, flat))


class _Ready(NamedTuple):
    """The plan for a call, the call's arguments, and which of them are state in the host's memory."""

    plan: Plan
    args: tuple[PyTree, ...]
    kwargs: Mapping[str, PyTree]
    state: HostState | None

    def hosted(self, step: Callable) -> Callable:
        """Return the step as one whose state is in the host's memory, if any is."""
        return step if self.state is None else self.state.hosted(step)


class _NoPlan(Exception):
    """A signature is traced and no plan is ready for it."""

    def __init__(self, signature: _Signature) -> None:
        super().__init__("no plan is ready")
        self.signature = signature


def _signature(args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> _Signature:
    """Return what identifies the arguments of a traced function: types of tracers, static values."""

    def of(arg: PyTree) -> Hashable:
        leaves, tree = jax.tree.flatten(arg)
        if all(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return tree, tuple(leaf.aval for leaf in leaves)
        # Static, and so hashable. Like JAX, distinguish 1, 1.0 and True.
        return type(arg), arg

    return tuple(map(of, args)), tuple((name, of(kwargs[name])) for name in sorted(kwargs))


def _other_versions(plan: Plan, at: Target) -> str:
    """Return the part of an error message about libraries whose versions differ from the plan's."""
    now = dict(versions(at.platform))
    other = [f"{k} {v} (here {now[k]})" for k, v in plan.versions if now.get(k, v) != v]
    return ", ".join(other)


def _check_devices(planned: MadeFor, here: MadeFor) -> None:
    """Raise for a plan for other devices, or one that counts on donated arguments that are not donated."""
    if planned.n_devices != here.n_devices:
        raise PlanError(
            f"the plan is for {planned}, and this step runs on {here}. Plan again, with arguments or "
            "shapes that have the shardings of this call."
        )
    kept = sorted(set(planned.donated) - set(here.donated))
    if kept:
        raise PlanError(
            f"the plan's peak counts on {len(kept)} donated arguments (leaves {kept[:8]}) that this "
            "step keeps. Pass the donate_argnums= of the plan, or plan again without it."
        )


def _as_type(leaf: Leaf) -> Leaf:
    """Return a tracer's type; any other leaf unchanged."""
    if not isinstance(leaf, jax.core.Tracer):
        return leaf
    if _jax.is_ref(leaf):
        return leaf.aval
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.aval.weak_type)
