"""Tracing with known argument values: Python control flow may depend on them while it is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core as _core, dtypes as _dtypes
from jax._src.interpreters import partial_eval as _pe_src
from jax.extend import core as _excore, source_info_util as _source_info
from jax.interpreters import partial_eval as _pe

from remat._jax.compat import Jaxpr, Tracer, Var
from remat._jax.tracing import flatten_arguments
from remat.aliases import Array, Aval, DebugInfo, SourceInfo, TreeDef


def concrete_value(x: Array) -> Array:
    """Return the value of an argument, also of a differentiated tracer; None if it is unknown."""
    return _core.to_concrete_value(x)


class _ConcreteTracer(_pe.DynamicJaxprTracer):
    """A tracer whose value Python may read (`if x > 0`, `int(n)`, `np.asarray(x)`)."""

    __slots__ = ()

    def to_concrete_value(self) -> Array:
        return self._trace.value_of(self)

    def _number(self) -> np.ndarray | None:
        """Return the value as a NumPy array of the traced type, or None if it is unknown."""
        value = self.to_concrete_value()
        if value is None or jnp.issubdtype(self.aval.dtype, jax.dtypes.extended):
            return None
        return np.asarray(value, dtype=self.aval.dtype)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        number = self._number()
        if number is None:
            return super().__array__(*args, **kwargs)
        return number.__array__(*args, **kwargs)

    def __float__(self) -> float:
        number = self._number()
        return super().__float__() if number is None else float(number)

    def __complex__(self) -> complex:
        number = self._number()
        return super().__complex__() if number is None else complex(number)

    def __format__(self, spec: str) -> str:
        number = self._number() if spec and self.aval.shape == () else None
        return super().__format__(spec) if number is None else format(number[()], spec)

    def item(self, *args: Any) -> Any:
        number = self._number()
        return self.aval._item(self) if number is None else number.item(*args)

    def tolist(self) -> Any:
        number = self._number()
        return self.aval.tolist(self) if number is None else number.tolist()


_core.pytype_aval_mappings[_ConcreteTracer] = lambda tracer: tracer.aval


class _Unavailable(Exception):
    """A value depends on an argument whose value is unknown."""


class _ConcreteTrace(_pe_src.DynamicJaxprTrace):
    """Traces a function to a jaxpr and evaluates only the values that Python reads.

    A tracer knows the equation that computes it, so its value is found by evaluating that equation
    and those before it that it depends on, each at most once.
    """

    __slots__ = ("_values",)

    def __init__(self, debug: DebugInfo, parent_trace: Any):
        super().__init__(debug, parent_trace=parent_trace)
        self._values: dict[Var, Array] = {}

    def var_to_tracer(self, var: Var, source_info: SourceInfo, parent: Any = None) -> Tracer:
        plain = super().var_to_tracer(var, source_info, parent)
        return self._concrete(plain)

    def new_arg(self, aval: Aval, source_info: SourceInfo) -> Tracer:
        return self._concrete(super().new_arg(aval, source_info))

    def _concrete(self, plain: Tracer) -> Tracer:
        if getattr(plain, "mutable_qdd", None) is not None:
            return plain
        return _ConcreteTracer(self, plain.aval, plain.val, plain._line_info, plain.parent)

    def argument(self, aval: Aval, value: Array, source_info: SourceInfo) -> Tracer:
        tracer = self.new_arg(aval, source_info)
        if value is not None:
            self._values[tracer.val] = value
        return tracer

    def value_of(self, tracer: Tracer) -> Array:
        try:
            with jax.core.eval_context():
                return self._evaluate(tracer)
        except _Unavailable:
            return None

    def _evaluate(self, tracer: Tracer) -> Array:
        # An explicit stack: a chain of equations may be longer than Python's recursion limit.
        todo = [tracer]
        while todo:
            t = todo[-1]
            if self._known(t) is not None:
                todo.pop()
                continue
            eqn = t.parent
            if eqn is None or eqn.effects:
                raise _Unavailable
            missing = [u for u in eqn.in_tracers if self._known(u) is None]
            if missing:
                todo.extend(missing)
                continue
            params = eqn.primitive.get_bind_params(eqn.params)
            with eqn.ctx.manager:
                out = eqn.primitive.bind(*map(self._known, eqn.in_tracers), **params)
            outs = out if eqn.primitive.multiple_results else [out]
            self._values.update(zip(eqn.outvars, outs))
        return self._known(tracer)

    def _known(self, tracer: Tracer) -> Array:
        atom = tracer.val
        if isinstance(atom, _excore.Literal):
            return atom.val
        if atom in self._values:
            return self._values[atom]
        const = self.frame.constvar_to_val.get(atom)
        return None if const is None else concrete_value(const)


def trace_concretely(
    fun: Callable,
    in_tree: TreeDef,
    avals: Sequence[Aval],
    values: Sequence[Array],
    debug: DebugInfo,
) -> tuple[Jaxpr, tuple[Array, ...], TreeDef]:
    """Trace like `trace`, but let Python control flow depend on the arguments' `values`.

    A value of None is unknown. The jaxpr contains the branches that these values take.
    """
    parent = _core.trace_ctx.trace
    trace_ = _ConcreteTrace(debug, parent)
    with _core.ensure_no_leaks(trace_), _source_info.reset_name_stack():
        source = _source_info.current()
        tracers = [trace_.argument(aval, value, source) for aval, value in zip(avals, values)]
        with _excore.set_current_trace(trace_):
            args, kwargs = jax.tree.unflatten(in_tree, tracers)
            answer = fun(*args, **kwargs)
            debug = debug.set_result_paths(answer)
            leaves, out_tree = flatten_arguments(answer)
            del answer, args, kwargs
        _pe_src._check_returned_jaxtypes(debug, leaves)
        leaves = [_dtypes.canonicalize_value(leaf) for leaf in leaves]
        outs = [trace_.to_jaxpr_tracer(leaf, source) for leaf in leaves]
        _pe_src._check_no_returned_refs(debug, outs)
        opened, consts = trace_.frame.to_jaxpr(trace_, outs, debug, source)
        trace_._values.clear()
        trace_.invalidate()
        del trace_, tracers, outs, leaves
    return _pe_src.convert_constvars_jaxpr(opened), tuple(consts), out_tree
