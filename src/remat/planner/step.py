"""A training step under planning: traced in a session, measured by the compiler.

This is the one place where a plan meets JAX's staging: everything that is traced here is traced as
`jax.jit` would with the user's options, on the target's devices, and nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from remat import _jax
from remat.errors import PlanError
from remat.flops import flops_of
from remat.planner.compiled import Memory, OutOfMemory, compile_for_analysis
from remat.planner.regions import Session, session_context
from remat.planner.targets import Target, place


class Traced:
    """A step traced in one session."""

    def __init__(self, traced: Any, target: Target, given: Any) -> None:
        self._traced = traced
        self._given = given
        self._target = target
        self.jaxpr, self.consts = _jax.detach_consts(traced.jaxpr)

    def shards(self) -> list[int]:
        """For each input of the jaxpr over how many devices it is divided."""
        leaves = jax.tree.leaves(self._given)
        if len(leaves) + len(self.consts) != len(self.jaxpr.invars):
            leaves = [x for x in leaves if hasattr(x, "shape")]
        if len(leaves) + len(self.consts) != len(self.jaxpr.invars):
            return [1] * len(self.jaxpr.invars)  # static arguments among them
        return [1] * len(self.consts) + [_divided(leaf) for leaf in leaves]

    def memory(self) -> Memory | OutOfMemory:
        """What the compiler says that it needs."""
        return compile_for_analysis(self._traced.lower(), self._target)

    def flops(self) -> float:
        """Of one execution on one device, dead code left out, recomputation included."""
        live, _ = _jax.dce(self.jaxpr, [True] * len(self.jaxpr.outvars))
        return float(sum(flops_of(eqn) for eqn in live.eqns))


def _divided(leaf: Any) -> int:
    sharding = getattr(leaf, "sharding", None)
    shape = getattr(leaf, "shape", None)
    if sharding is None or shape is None or not shape:
        return 1
    whole = part = 1
    for a, b in zip(shape, sharding.shard_shape(tuple(shape))):
        whole, part = whole * a, part * b
    return max(1, whole // max(part, 1))


class Step:
    """A function, what it is called with, and for which target."""

    def __init__(
        self,
        fun: Callable,
        args: tuple,
        kwargs: Mapping[str, Any],
        target: Target,
        jit_options: Mapping[str, Any],
    ) -> None:
        self.fun = fun
        self.target = target
        self.jit_options = dict(jit_options)
        self.args, self.kwargs = place((args, dict(kwargs)), target)

        # A new one for each step, so that nothing outlives it. The key has the context of the trace.
        def nothing_yet(fun: Callable, arguments: Any) -> dict[str, Any]:
            return {}

        self._shared = _jax.weakref_lru_cache(nothing_yet)

    def trace(self, session: Session) -> Traced:
        """The step as it is in a session."""

        # A new function each time: JAX remembers what it traced of a function.
        @_jax.wraps(self.fun)
        def step(*args: Any, **kwargs: Any) -> Any:
            return self.fun(*args, **kwargs)

        session.shared = self._shared
        with session_context(session):
            traced = jax.jit(step, **self.jit_options).trace(*self.args, **self.kwargs)
        return Traced(traced, self.target, (self.args, self.kwargs))


def check_step(fun: Any) -> None:
    """Refuse what is no function."""
    if not callable(fun):
        raise PlanError(f"the first argument is the training step, a function, not {fun!r}.")
