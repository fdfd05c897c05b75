"""A training step under planning: traced in a session, measured by the compiler.

This is the one place where a plan meets JAX's staging: everything that is traced here is traced as
`jax.jit` would with the user's options, on the target's devices, and nothing is run.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from remat import _jax
from remat.errors import PlanError
from remat.ir.fingerprint import fingerprint
from remat.ir.flops import flops_of
from remat.planner.emit import inlined
from remat.planner.regions import Session, session_context
from remat.program.compiled import Memory, OutOfMemory, compile_for_analysis
from remat.program.targets import Target, n_shards, place


class Traced:
    """A step traced in one session."""

    def __init__(self, traced: Any, target: Target) -> None:
        self._traced = traced
        self._target = target
        self.jaxpr, self.consts = _jax.detach_consts(traced.jaxpr)

    def shards(self) -> list[int]:
        """For each input of the jaxpr over how many devices it is divided."""
        of_consts, of_arguments = _jax.split_list(self.jaxpr.invars, [len(self.consts)])
        shardings = _jax.argument_shardings(self._traced)
        divided = [
            n_shards(getattr(v.aval, "shape", ()), s) if hasattr(s, "shard_shape") else 1
            for v, s in zip(of_arguments, shardings, strict=True)
        ]
        return [1] * len(of_consts) + divided

    @functools.cached_property
    def program(self) -> str:
        """What a plan is of: the program, and after a dash how its arguments are divided.

        Numbers that are written in the program, such as a learning rate, make no difference.
        """
        divided = hashlib.sha256(repr(self.shards()).encode()).hexdigest()[:8]
        return f"{fingerprint(inlined(self.jaxpr), literals=False)}-{divided}"

    def memory(self) -> Memory | OutOfMemory:
        """What the compiler says that it needs."""
        return compile_for_analysis(self._traced.lower(), self._target)

    def flops(self) -> float:
        """Of one execution on one device, dead code left out, recomputation included."""
        live, _ = _jax.dce(self.jaxpr, [True] * len(self.jaxpr.outvars))
        return float(sum(flops_of(eqn) for eqn in live.eqns))


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
        return Traced(traced, self.target)


def check_step(fun: Any) -> None:
    """Refuse what is no function."""
    if not callable(fun):
        raise PlanError(f"the first argument is the training step, a function, not {fun!r}.")
