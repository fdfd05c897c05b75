"""Fitted steps on modules, returned by the `fit` of each adapter to a module system."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from remat import _jax
from remat.aliases import PyTree
from remat.module_steps import Call, ModuleStep
from remat.planner.fit import Fitted, by_name, fit
from remat.planner.plan_file import Plan

_jax.exclude_from_tracebacks(__file__)


class FittedModules:
    """A step on modules, compiled so that it follows a plan.

    It converts arguments to arrays, calls a `remat.Fitted` of the step as a function of arrays, and converts
    the results back.
    """

    def __init__(self, step: ModuleStep, options: Mapping[str, Any]) -> None:
        self._step = step
        self._options = dict(options)
        self._fitted: Fitted = fit(step, **options)
        functools.update_wrapper(self, step.step, updated=())

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        if jax.config.jax_disable_jit:
            return self._step.step(*args, **kwargs)
        call = self.call(args, kwargs)
        return call.finish(self._fitted(*call.args, **call.kwargs))

    def lower(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Lowered:
        """Lower the step as a function of arrays for these arguments. No module is changed."""
        call = self.call(args, kwargs)
        return self._fitted.lower(*call.args, **call.kwargs)

    def trace(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Traced:
        """Trace the step as a function of arrays for these arguments. No module is changed."""
        call = self.call(args, kwargs)
        return self._fitted.trace(*call.args, **call.kwargs)

    def plan(self, *args: PyTree, **kwargs: PyTree) -> Plan:
        """Return the plan for these arguments; it is made now if there is none yet. Nothing is run."""
        call = self.call(args, kwargs)
        return self._fitted.plan(*call.args, **call.kwargs)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Return the plans made so far, one for each signature, in order."""
        return self._fitted.plans

    @property
    def on_arrays(self) -> Fitted:
        """Return the fitted step as a function of arrays."""
        return self._fitted

    def call(self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> Call:
        """Return a call of the step as one of the function of arrays."""
        return self._step.arrays(args, kwargs)

    def clear_cache(self) -> None:
        """Drop all compiled programs, like the method of a `jax.jit` function."""
        self._fitted.clear_cache()

    def __copy__(self) -> FittedModules:
        return FittedModules(self._step, self._options)

    def __reduce__(self) -> str | tuple:
        """Pickle by name if a module has the fitted step under its name, else the step and its options."""
        return by_name(self) or (FittedModules, (self._step, self._options))

    def __repr__(self) -> str:
        return repr(self._fitted)

    def __get__(self, instance: object, owner: type | None) -> Callable:
        return self if instance is None else functools.partial(self, instance)
