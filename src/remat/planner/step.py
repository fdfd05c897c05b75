"""The training step that is planned: traced, and compiled for its memory.

Steps are traced as `jax.jit` traces them with the user's options, for the target's devices. Nothing is
run.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from remat import _jax, garbage
from remat.aliases import PyTree, Sharding
from remat.errors import PlanError
from remat.ir import jaxprs
from remat.ir.equations import undifferentiated_call
from remat.ir.fingerprint import fingerprint
from remat.ir.flops import flops_of_program
from remat.ir.restriction import marks_of
from remat.marked import names_of_marked
from remat.planner import scan_pairs
from remat.planner.auto import WITH_MARKS, tracing
from remat.planner.decisions import StepDecisions, applied
from remat.planner.plan_file import MadeFor
from remat.planner.rewrite import TracedCall, flattened
from remat.program.compiled import (
    CompiledMemory,
    CompilerFailure,
    OutOfMemory,
    compile_for_analysis,
)
from remat.program.from_jaxpr import n_bytes
from remat.program.partition import UNKNOWN, Partition, numbered, partition_of
from remat.program.settings import compiler_settings
from remat.program.targets import Target, n_shards, place


class TracedStep:
    """A step that was traced.

    Attributes:
      marked: the names of the functions marked by `remat.auto` that it calls.
      positions: the place of each argument that is not static among the leaves of all arguments.
    """

    def __init__(
        self,
        traced: jax.stages.Traced,
        target: Target,
        compiler_options: Mapping[str, Any] | None = None,
        marked: Iterable[str] = (),
        positions: Iterable[int] = (),
    ) -> None:
        self.marked = tuple(marked)
        self.positions = tuple(positions)
        self._traced = traced
        self._compiler_options = compiler_options
        self._target = target
        jaxpr, consts = _jax.detach_consts(traced.jaxpr)
        self.jaxpr, more = _jax.hoist_constants(jaxpr)
        self.consts = (*more, *consts)

    def shards(self) -> list[int]:
        """Return the shard count of each input of the jaxpr."""
        of_consts, of_arguments = _jax.split_list(self.jaxpr.invars, [len(self.consts)])
        counts = [
            n_shards(getattr(v.aval, "shape", ()), s) if hasattr(s, "shard_shape") else 1
            for v, s in zip(of_arguments, self.argument_shardings(), strict=True)
        ]
        return [1] * len(of_consts) + counts

    def argument_bytes(self) -> int:
        """Return the bytes of the arguments and constants on one device."""
        return sum(n_bytes(v.aval) // n for v, n in zip(self.jaxpr.invars, self.shards()))

    def argument_shardings(self) -> list[Sharding]:
        """Return the sharding of each argument that is not static; None if it is unspecified."""
        return _jax.argument_shardings(self._traced)

    @property
    def donated(self) -> tuple[int, ...]:
        """Return which arguments are donated, counted as leaves of all arguments that are not static."""
        return tuple(i for i, is_so in enumerate(_jax.donated_arguments(self._traced)) if is_so)

    @functools.cached_property
    def flat(self) -> _jax.Jaxpr:
        """Return the flat program, to whose equations the numbers in plans refer."""
        return self._flat(self.donated)

    def _flat(self, donated: Iterable[int]) -> _jax.Jaxpr:
        return flattened(self.jaxpr, [len(self.consts) + leaf for leaf in donated])

    def following(
        self, change: Callable[[_jax.Jaxpr], _jax.Jaxpr], donated: Sequence[int] | None = None
    ) -> Callable:
        """Return a function that runs the flat program after `change` was applied to it.

        Call it under `jax.jit` with arguments of the types for which the step was traced.

        Args:
          change: maps the flat program to one that computes the same.
          donated: the arguments that count as donated; those that are donated by default.
        """
        flat = self.flat if donated is None else self._flat(donated)
        out_tree = jax.tree.structure(self._traced.out_info)

        def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
            leaves = jax.tree.leaves((args, kwargs))
            arrays = [leaves[i] for i in self.positions]
            return TracedCall(flat, self.consts, arrays, out_tree).changed(change)

        return run

    def donated_bytes(self) -> list[int]:
        """Return the bytes of each donated argument on one device."""
        n_consts = len(self.consts)
        of_arguments = list(zip(self.jaxpr.invars, self.shards(), strict=True))[n_consts:]
        return [n_bytes(v.aval) // n for v, n in map(of_arguments.__getitem__, self.donated)]

    @functools.cached_property
    @garbage.paused()
    def program(self) -> str:
        """Return the fingerprint of the program and, after a dash, that of its layout.

        The layout is the shardings of arguments and results; names of a mesh's axes do not count. The
        first does not depend on literals in the program, such as a learning rate.
        """
        layout = hashlib.sha256(repr(self.layout()).encode()).hexdigest()[:8]
        jaxpr = jaxprs.inline_calls(self.jaxpr, undifferentiated_call)
        # If functions are marked, the marks determine which equations a plan may recompute.
        marks = [found] if (found := marks_of(jaxpr)) else []
        return f"{fingerprint(jaxpr, *marks, literals=False)}-{layout}"

    def layout(self) -> tuple[list[str], list[str]]:
        """Return the shardings of arguments and results as texts."""
        _, of_arguments = _jax.split_list(_jax.in_avals(self.jaxpr), [len(self.consts)])
        shardings = (self.argument_shardings(), _jax.result_shardings(self._traced))
        avals = (of_arguments, _jax.out_avals(self.jaxpr))
        arguments, results = (
            [_jax.sharding_text(s, len(getattr(aval, "shape", ()))) for s, aval in zip(*both)]
            for both in zip(shardings, avals, strict=True)
        )
        return arguments, results

    def made_for(self) -> MadeFor:
        """Return the conditions under which the compiler's memory analysis of the step holds."""
        return MadeFor(
            self._target.kind,
            _jax.device_count(self._traced),
            self.donated,
            compiler_settings(self._target.platform, self._compiler_options),
        )

    @garbage.resumed()
    def memory(self, *, as_run: bool = False) -> CompiledMemory | OutOfMemory | CompilerFailure:
        """Return the memory that the compiler reports for the step, or its failure.

        Args:
          as_run: compile with the options with which the step will run.
        """
        try:
            return compile_for_analysis(self.lowered(), self._target, as_run=as_run)
        except jax.errors.JaxRuntimeError as error:
            return CompilerFailure.of(error)

    @garbage.resumed()
    def lowered(self) -> jax.stages.Lowered:
        """Return the step as a program for the target's compiler."""
        return self._traced.lower()

    def flops(self) -> float:
        """Return the FLOPs of one execution, without dead code and with recomputation."""
        return flops_of_program(self.jaxpr)


class TargetStep:
    """A step function with its arguments, its `jax.jit` options and a target."""

    def __init__(
        self,
        fun: Callable,
        args: tuple,
        kwargs: Mapping[str, PyTree],
        target: Target,
        jit_options: Mapping[str, Any],
    ) -> None:
        self.fun = fun
        self.target = target
        self.jit_options = dict(jit_options)
        self.args, self.kwargs = place((args, dict(kwargs)), target)

    def trace(self) -> TracedStep:
        """Trace the step as it is written, with the marks of `remat.auto`."""
        return self._trace(self.fun)

    def trace_following(self, decisions: StepDecisions, unplanned: TracedStep) -> TracedStep:
        """Trace the step so that it follows decisions about its flat program.

        Args:
          decisions: about `TracedStep.flat`.
          unplanned: the trace of the step as it is written.
        """
        return self._trace(unplanned.following(lambda flat: applied(flat, decisions)))

    def partition(self, unplanned: TracedStep) -> Partition:
        """Return how the step's equations are divided among the target's devices.

        Args:
          unplanned: the trace of the step as it is written.
        """
        if unplanned.made_for().n_devices == 1:
            return UNKNOWN
        # The model's programs are made from the one without checkpoints.
        program, eqns = numbered(scan_pairs.opened(unplanned.flat))
        traced = self._trace(unplanned.following(lambda _: program))
        return partition_of(traced.lowered(), eqns)

    @garbage.resumed()
    def _trace(self, fun: Callable) -> TracedStep:
        # A new function each time, since JAX caches traces by function.
        @_jax.wraps(self.fun)
        def step(*args: PyTree, **kwargs: PyTree) -> PyTree:
            leaves = jax.tree.leaves((args, kwargs))
            positions[:] = [i for i, x in enumerate(leaves) if isinstance(x, _jax.Tracer)]
            return fun(*args, **kwargs)

        positions: list[int] = []

        with tracing(WITH_MARKS), names_of_marked() as marked:
            traced = jax.jit(step, **self.jit_options).trace(*self.args, **self.kwargs)
        options = self.jit_options.get("compiler_options")
        return TracedStep(traced, self.target, options, marked, positions)


def unfitted(step: Callable, jit_options: Mapping[str, Any]) -> tuple[Callable, dict[str, Any]]:
    """Return the step of a fitted or jitted function, and the options with which to jit it.

    The function's own options (donation, static arguments, shardings, compiler options) hold unless one of
    the same kind is given. So a plan is the same for a jitted step, and for the step with the same options
    of `jax.jit`.
    """
    fun, own = getattr(step, "unplanned", None) or _jax.unjitted(step)
    for kind in ("donate", "static"):
        names = (f"{kind}_argnums", f"{kind}_argnames")
        if any(name in jit_options for name in names):
            own = {name: value for name, value in own.items() if name not in names}
    return fun, own | dict(jit_options)


def check_step(fun: object) -> None:
    """Raise for a step that is not callable."""
    if not callable(fun):
        raise PlanError(f"the first argument must be the training step, a function, not {fun!r}.")
