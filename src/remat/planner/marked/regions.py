"""`remat.auto`: marking a region, and what happens to it while a plan is made or applied.

A `TracingContext` is a `Recording`, which saves everything and records each region's program, or an
`Application`, which follows a plan. Outside of both a marked function is called as it is. The context is
part of the keys of JAX's caches (`jax.make_user_context`), so a function traced in one context is traced
again in another.

A region's key, its name in a plan, is `NAME#FINGERPRINT`: the `name=` of `remat.auto` or the function's
qualified name, and the first 8 digits of the fingerprint of its program. So one function called in two
places of a step is one region if its program is the same there. The body of each `scan` in a region is
another region, whose values exist once for each step. Its key, which is also the loop's, adds `/scanI`,
where I is the position of the `scan` among the operations around it. `.J` is step J of an unrolled
iteration, and `/group` the region around a group of steps (`LoopForm`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import jax

from remat import _jax, array_leaves
from remat.errors import PlanError
from remat.ir import jaxprs
from remat.ir.fingerprint import fingerprint
from remat.marked import note
from remat.planner.marked.after_edit import adapted
from remat.planner.marked.decisions import RegionDecision
from remat.planner.marked.emit import (
    Linearized,
    backward_program,
    halves,
    host_copies,
    inlined,
    linearized,
    without_copies,
)
from remat.planner.plan_file import PlanSegment, RegionPlan
from remat.transform import primitive
from remat.transform.splitter import Composed, Half, Halves, Splitter

_log = logging.getLogger("remat")
_jax.exclude_from_tracebacks(__file__)

P = ParamSpec("P")
R = TypeVar("R")

# The tracing context; None outside of planned steps. It is part of the keys of JAX's caches, so that
# nothing traced for one plan is used for another.
active_context = jax.make_user_context(None)


# --------------------------------------------------------------------------------------------------
# The mark


@overload
def auto(fun: Callable[P, R], /, *, name: str | None = ...) -> Callable[P, R]: ...


@overload
def auto(
    fun: None = None, /, *, name: str | None = ...
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def auto(fun: Callable | None = None, /, *, name: str | None = None) -> Callable:
    """Mark a function as a region that the planner may rematerialize.

    By itself it changes nothing. `remat.fit` and `remat.plan` choose what is saved and what is
    recomputed inside, however the region is differentiated, vectorized or looped over around it.
    Mark the whole loss; there is no need to mark layers, and checkpoints inside a region are left to
    the planner too.

    >>> import jax, jax.numpy as jnp, remat
    >>> @remat.auto
    ... def loss(w, x):
    ...     for _ in range(8):
    ...         x = jnp.tanh(x @ w)
    ...     return x.sum()
    >>> w, x = jnp.eye(64), jnp.ones((1000, 64))
    >>> step = remat.fit(jax.value_and_grad(loss), budget="60%")
    >>> value, gradient = step(w, x)
    >>> step.plan(w, x).peak_bytes <= 0.6 * step.plan(w, x).peak_bytes_without_remat
    True

    Args:
      fun: the function. Array arguments may be in any pytree; other arguments are taken as they are.
      name: what the region is called in plans and reports; the function's name by default. A plan adds
        a fingerprint of the program.
    """
    if fun is None:
        return lambda f: auto(f, name=name)
    if not callable(fun):
        raise TypeError(f"remat.auto takes a function, not {fun!r}.")
    called = name or str(getattr(fun, "__qualname__", type(fun).__qualname__))

    @_jax.wraps(fun)
    def region(*args: Any, **kwargs: Any) -> Any:
        context = active_context.value
        note(called)
        if context is None or not context.recomputes:
            return fun(*args, **kwargs)
        return _call(fun, called, context, args, kwargs)

    return region


def _call(fun: Callable, name: str, context: TracingContext, args: tuple, kwargs: dict) -> Any:
    arrays, parts = array_leaves.split((args, kwargs))
    types = tuple(map(_jax.typeof, arrays))
    given = parts.tree, parts.is_traced, parts.untraced, tuple(map(type, parts.untraced)), types
    known = context.known(fun, (context.n_regions, *given))
    traced = known.get("traced")
    if traced is None:
        n_before = context.n_regions
        traced = _traced(fun, parts, arrays)
        if not traced.consts and context.n_regions == n_before:
            known["traced"] = traced
    context.n_regions += 1
    if _has_references(traced.jaxpr):
        return fun(*args, **kwargs)
    key = f"{name}#{traced.fingerprint[:8]}"
    jaxpr = _with_loops(traced.jaxpr, context, key)
    is_shared = jaxpr is traced.jaxpr and known.get("traced") is traced
    outs = primitive.bind(
        (*traced.consts, *arrays),
        jaxpr,
        split=_Region(context, key, is_shared),
        prevent_cse=True,
    )
    return traced.result.join(outs)


class _Traced(NamedTuple):
    """A region's function as a program; `consts` are the values that it closes over."""

    jaxpr: _jax.Jaxpr
    consts: list[Any]
    result: array_leaves.Parts
    fingerprint: str


def _traced(fun: Callable, parts: array_leaves.Parts, arrays: Sequence[Any]) -> _Traced:
    result: list[array_leaves.Parts] = []

    def of_arrays(arrays: Sequence[Any]) -> list[Any]:
        args, kwargs = parts.join(arrays)
        outs, shape = array_leaves.split(fun(*args, **kwargs))
        result.append(shape)
        return outs

    jaxpr, consts, _ = _jax.trace_call(of_arrays, arrays)
    jaxpr = inlined(jaxpr)
    return _Traced(jaxpr, consts, result[-1], fingerprint(jaxpr))


def _with_loops(jaxpr: _jax.Jaxpr, context: TracingContext, key: str) -> _jax.Jaxpr:
    """Return a region's program with the body of each `scan` marked as a region of its own."""
    eqns: list[_jax.JaxprEqn] = []
    for i, eqn in enumerate(jaxpr.eqns):
        body = _jax.scan_body(eqn)
        if body is None or not eqn.params["length"] or _has_references(body):
            eqns.append(eqn)
            continue
        inner = f"{key}{_LOOP}{i}"
        region = _with_loops(inlined(body), context, inner)
        wrapped = primitive.jaxpr_around(region, split=_Region(context, inner))
        context.found_loop(inner, eqn)
        form = context.loops.get(inner, _AS_IT_IS)
        if 1 < form.steps < eqn.params["length"] and not eqn.params["length"] % form.steps:
            regions = [_Region(context, f"{inner}.{j}") for j in range(form.steps)]
            eqns += _unrolled(eqn, region, regions)
            continue
        loop = jaxprs.replace_body(eqn, eqn.params["jaxpr"], wrapped)
        if 1 < form.group < eqn.params["length"]:
            eqns += _grouped(loop, form, _Region(context, inner + _GROUP))
        else:
            eqns.append(loop)
    unchanged = len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns))
    return jaxpr if unchanged else _jax.rebuild(jaxpr, eqns=eqns)


@dataclasses.dataclass(frozen=True)
class LoopForm:
    """How a loop runs: in groups of steps, each recomputed from its start, or unrolled.

    Args:
      group: the number of steps in a group; 1 if the steps are not grouped.
      steps: the unroll factor. Each step of an unrolled iteration is a region of its own, so that they
        can save different values.
      groups: the number of groups. The steps after them are in no group. 0: as many groups as fit.

    With `groups`, and with `steps`, a loop can follow one option in some of its steps and another option
    in the rest, so that its bytes and its time lie between those of the two.
    """

    group: int = 1
    steps: int = 1
    groups: int = 0


_AS_IT_IS = LoopForm()


def _unrolled(
    eqn: _jax.JaxprEqn, body: _jax.Jaxpr, regions: Sequence[_Region]
) -> list[_jax.JaxprEqn]:
    """Return an unrolled loop, each iteration of which runs one step for each of the regions."""
    (n_consts, n_carry), steps = _jax.scan_arity(eqn), len(regions)
    length, reverse = eqn.params["length"], eqn.params["reverse"]

    def run(args: Sequence[Any]) -> list[Any]:
        consts, carry, xs = _jax.split_list(list(args), [n_consts, n_carry])

        def iteration(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            made: list[list[Any]] = [[] for _ in range(steps)]
            for j in reversed(range(steps)) if reverse else range(steps):
                given = (*consts, *carry, *(x[j] for x in xs))
                outs = primitive.bind(given, body, split=regions[j])
                carry, made[j] = _jax.split_list(outs, [n_carry])
            return list(carry), [jax.numpy.stack(ys) for ys in zip(*made)]

        folded = [x.reshape(length // steps, steps, *x.shape[1:]) for x in xs]
        carry, ys = jax.lax.scan(iteration, carry, folded, length // steps, reverse=reverse)
        return [*carry, *(y.reshape(length, *y.shape[2:]) for y in ys)]

    jaxpr, made, _ = _jax.trace_call(run, [v.aval for v in eqn.invars])
    assert not made, made
    return jaxprs.written_out(jaxpr, eqn.invars, eqn.outvars)


# Comes before the position of a loop in its key.
_LOOP = "/scan"
# Ends the key of the region around a group of steps.
_GROUP = "/group"
# Ends the key of one step of an unrolled iteration.
_STEP = re.compile(r"(?<=\d)\.\d+$")


def _grouped(loop: _jax.JaxprEqn, form: LoopForm, region: _Region) -> list[_jax.JaxprEqn]:
    """Return a loop in groups of steps, each recomputed from its start, and the loop over the rest."""
    params, group = loop.params, form.group
    (n_consts, n_carry), length = _jax.scan_arity(loop), params["length"]
    n_groups = min(form.groups or length, length // group)
    rest = length - n_groups * group

    def run(args: Sequence[Any]) -> list[Any]:
        consts, carry, xs = _jax.split_list(list(args), [n_consts, n_carry])

        def some(carry: Sequence[Any], xs: Sequence[Any], n: int) -> tuple[list[Any], list[Any]]:
            outs = loop.primitive.bind(*consts, *carry, *xs, **{**params, "length": n})
            new, ys = _jax.split_list(outs, [n_carry])
            return new, ys

        def of_group(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            types = [*map(_jax.typeof, consts), *map(_jax.typeof, carry), *map(_jax.typeof, xs)]
            inner, more, _ = _jax.trace_call(
                lambda args: loop.primitive.bind(*args, **{**params, "length": group}), types
            )
            outs = primitive.bind((*more, *consts, *carry, *xs), inner, split=region)
            new, ys = _jax.split_list(outs, [n_carry])
            return new, ys

        reverse = params["reverse"]
        split = rest if reverse else n_groups * group
        first = [x[split:] if reverse else x[:split] for x in xs] if rest else xs
        last = [x[:split] if reverse else x[split:] for x in xs]
        folded = [x.reshape(n_groups, group, *x.shape[1:]) for x in first]
        carry, ys = jax.lax.scan(of_group, carry, folded, n_groups, reverse=reverse)
        ys = [y.reshape(n_groups * group, *y.shape[2:]) for y in ys]
        if rest:
            carry, more = some(carry, last, rest)
            pairs = zip(more, ys) if reverse else zip(ys, more)
            ys = [jax.numpy.concatenate(pair) for pair in pairs]
        return [*carry, *ys]

    types = [v.aval for v in loop.invars]
    jaxpr, consts, _ = _jax.trace_call(run, types)
    assert not consts, consts
    return jaxprs.written_out(jaxpr, loop.invars, loop.outvars)


def loop_depth(key: str) -> int:
    """Return how many loops of its region a body is in; 0 for the region itself."""
    return key.rpartition("#")[2].count("/scan")


def _has_references(jaxpr: _jax.Jaxpr) -> bool:
    # What is written to cannot be kept, and a program that writes cannot be run in parts.
    values = [*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    return any(isinstance(v.aval, _jax.AbstractRef) for v in values)


# --------------------------------------------------------------------------------------------------
# Tracing contexts


class TracingContext:
    """What happens to the regions of a program that is traced in this context.

    `loops` has the forms of loops by key. If `recomputes` is False, regions are called as they are.
    """

    loops: Mapping[str, LoopForm] = {}
    recomputes = True
    #: The number of regions that were traced so far.
    n_regions = 0
    #: What the tracing contexts of one step know about a function and its arguments; None if nothing.
    shared: Callable[[Callable, Any], dict[str, Any]] | None = None

    def known(self, fun: Callable, arguments: Any) -> dict[str, Any]:
        """Return what the tracing contexts of a step know about a call; the caller adds to it."""
        if self.shared is None:
            return {}
        try:
            with active_context(None):
                return self.shared(fun, arguments)
        except TypeError:  # not hashable, or nothing that a weak reference can point to
            return {}

    def decision(self, key: str, region: Linearized) -> RegionDecision | None:
        """Return the decision about a region; None if everything is saved."""
        raise NotImplementedError

    def transposed(self, key: str, region: Linearized, backward: _jax.Jaxpr, mark: str) -> None:
        """Receive the backward program of a region, when it is transposed."""

    def found_loop(self, key: str, eqn: _jax.JaxprEqn) -> None:
        """Receive a loop in a region, when the region is traced."""


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """A region as it was found in a step.

    Args:
      key: its name in a plan.
      region: its forward program and its linear part.
      backward: the backward program, on the forward program's variables.
      mark: the fingerprint of that.
    """

    key: str
    region: Linearized
    backward: _jax.Jaxpr
    mark: str

    @property
    def region_id(self) -> tuple[str, str]:
        return self.key, self.region.fingerprint

    @functools.cached_property
    def backward_numbers(self) -> dict[_jax.Var, int]:
        """Return which operation of the backward program computes each value."""
        return {v: i for i, eqn in enumerate(self.backward.eqns) for v in eqn.outvars}


Decided = Mapping[str, Mapping[str, RegionDecision]]  # by key, then by fingerprint


class Recording(TracingContext):
    """Records the regions' programs. A region about which nothing is decided saves everything.

    A region's program contains its loops as they are after *their* cuts, so loops are decided first,
    innermost first, and the program is recorded again with what was decided.
    """

    def __init__(
        self, decided: Decided | None = None, loops: Mapping[str, LoopForm] | None = None
    ) -> None:
        self.decided: Decided = decided or {}
        self.loops = loops or {}
        self.records: dict[tuple[str, str], Record] = {}
        self._cut: dict[tuple[str, str], Linearized] = {}
        self.scans: dict[str, _jax.JaxprEqn] = {}

    def decision(self, key: str, region: Linearized) -> RegionDecision | None:
        if key.endswith(_GROUP):
            return _NOTHING
        self._cut.setdefault((key, region.fingerprint), region)
        return self.decided.get(key, {}).get(region.fingerprint)

    @property
    def not_transposed(self) -> dict[tuple[str, str], Record]:
        """Return records of regions that were differentiated, but not transposed (`jax.linearize`)."""
        return {
            (key, mark): Record(key, region, _jax.jaxpr_of((), (), (), region.forward), "")
            for (key, mark), region in self._cut.items()
            if (key, mark) not in self.records and not loop_depth(key)
        }

    def check_has(self, keys: Iterable[str]) -> None:
        """Refuse regions of a plan that were not traced."""
        traced = {key for key, _ in self._cut}
        _refuse_missing({key for key in keys if not loop_depth(key)} - traced)

    def transposed(self, key: str, region: Linearized, backward: _jax.Jaxpr, mark: str) -> None:
        at = key, region.fingerprint
        self.records.setdefault(at, Record(key, region, backward, mark))

    def found_loop(self, key: str, eqn: _jax.JaxprEqn) -> None:
        self.scans[key] = eqn


#: A group of steps saves nothing; each is recomputed from its start.
_NOTHING = RegionDecision((), (), "")


class Application(TracingContext):
    """Follows a plan's decisions.

    Args:
      decisions: of the plan.
      loops: how loops run.
      recomputes: whether the decisions apply. If not, marked functions are called as they are.
      edited: the plan's regions by key, if the plan was edited. An edited loop changes the program of the
        region around it; the region's decision is then adapted as far as its values are found (`after_edit`).
    """

    def __init__(
        self,
        decisions: Decided,
        loops: Mapping[str, LoopForm] | None = None,
        *,
        recomputes: bool = True,
        edited: Mapping[str, Sequence[RegionPlan]] | None = None,
    ) -> None:
        self.decisions = decisions
        self.loops = loops or {}
        self.recomputes = recomputes
        self.edited = edited or {}
        self._loops_found: set[str] = set()
        self._adapted: dict[tuple[str, str], RegionDecision | None] = {}

    def decision(self, key: str, region: Linearized) -> RegionDecision | None:
        if key.endswith(_GROUP):
            return _NOTHING
        of_key = self.decisions.get(key) or self._of_other_step(key)
        if of_key is None and loop_depth(key):
            return None  # a loop that is not differentiated backwards
        if of_key is None:
            known = ", ".join(sorted(self.decisions)) or "none"
            raise PlanError(
                f"the plan has no region {key!r}; it has: {known}. The program changed since it was "
                "planned: plan again."
            )
        found = of_key.get(region.fingerprint) or self._after_edit(key, region)
        if found is None and loop_depth(key):
            return None  # a body on the way to the loop's fixpoint
        if found is None:
            raise PlanError(
                f"region {key!r} is differentiated in a way that the plan does not know "
                f"({region.fingerprint}; it knows {', '.join(sorted(of_key))}): plan again."
            )
        return found

    def _of_other_step(self, key: str) -> Mapping[str, RegionDecision] | None:
        """Return the decisions for a step of a loop whose unroll factor was edited; None without any."""
        if not self.edited or not loop_depth(key):
            return None
        base = _STEP.sub("", key)
        of_key = self.decisions.get(base) or self.decisions.get(f"{base}.0")
        if of_key is None or key == base:
            return of_key
        # Steps of one iteration must not all recompute at once.
        return {
            mark: dataclasses.replace(d, segments=d.segments or (PlanSegment(0, ()),))
            for mark, d in of_key.items()
        }

    def _after_edit(self, key: str, region: Linearized) -> RegionDecision | None:
        at = key, region.fingerprint
        if at not in self._adapted:
            plans = self.edited.get(key) or self.edited.get(_STEP.sub("", key), ())
            found = adapted(plans, region)
            self._adapted[at] = None if found is None else found.decision
            if found is not None and not loop_depth(key):
                _log.warning(
                    "remat: the plan was edited, and around its loops region %r is another program "
                    "now: in %d of the %d parts between loops the plan is followed, in %d everything "
                    "is saved. %sNobody compiled that: compare the peak, or plan again.",
                    key,
                    found.n_stretches - found.n_lost,
                    found.n_stretches,
                    found.n_lost,
                    _left_on_device(found.n_not_offloaded),
                )
        return self._adapted[at]

    def found_loop(self, key: str, eqn: _jax.JaxprEqn) -> None:
        self._loops_found.add(key)
        form, length = self.loops.get(key, _AS_IT_IS), eqn.params["length"]
        if form.group > 1 and form.group >= length:
            raise PlanError(
                f"loop {key!r} has {length} steps; the plan runs it in groups of {form.group}. A "
                f"group has fewer steps than the loop: correct it, or plan again."
            )
        if form.groups * form.group > length:
            raise PlanError(
                f"loop {key!r} has {length} steps; the plan has {form.groups} groups of "
                f"{form.group}: correct it, or plan again."
            )
        if form.steps > 1 and (form.steps >= length or length % form.steps):
            raise PlanError(
                f"loop {key!r} has {length} steps; the plan does {form.steps} in each iteration. "
                f"That must divide {length} and be less: correct it, or plan again."
            )

    def check_loops(self) -> None:
        """Refuse a plan that decides about loops which a traced program does not have."""
        bodies = {_STEP.sub("", key) for key in self.decisions if loop_depth(key)}
        _refuse_missing({*bodies, *self.loops} - self._loops_found)


def _left_on_device(n_values: int) -> str:
    return (
        f"{n_values} values that it keeps in the host's memory are not found again, and not copied "
        "there. "
        if n_values
        else ""
    )


def _refuse_missing(keys: Iterable[str]) -> None:
    if keys := sorted(keys):
        raise PlanError(
            f"the plan decides about {', '.join(keys)}, which the program does not differentiate. The "
            "program changed since it was planned: plan again."
        )


# --------------------------------------------------------------------------------------------------
# What the primitive asks


@dataclasses.dataclass(frozen=True)
class RegionHalf(Half):
    """The mark of an equation that is the forward or the backward program of a recorded region."""

    key: tuple[str, str]  # of the region's record
    is_backward: bool


@dataclasses.dataclass(frozen=True)
class _Region(Splitter):
    context: TracingContext
    key: str
    is_shared: bool = False

    def tracing_context(self) -> contextlib.AbstractContextManager:
        return active_context(None) if self.is_shared else contextlib.nullcontext()

    def cut(self, jaxpr: _jax.Jaxpr, ins_unknown: tuple[bool, ...]) -> Halves:
        with self.tracing_context():
            region = linearized(jaxpr, ins_unknown)
        decision = self.context.decision(self.key, region)
        if decision is None:
            forward = RegionHalf((self.key, region.fingerprint), False)
            c = halves(region, region.residuals, round_saved=False)
            backward = _Backward(self.context, self.key, region, None, self.is_shared)
            return Halves(c, backward, forward)
        self._check_numbers(region, decision)
        of = region.numbering.vars
        again = [of[n] for segment in decision.segments for n in segment.recomputed]
        host = host_copies(region, decision)
        c = halves(region, [of[n] for n in decision.saved], again, host=host)
        backward = _Backward(self.context, self.key, region, decision, self.is_shared, host)
        return Halves(c, backward)

    def _check_numbers(self, region: Linearized, decision: RegionDecision) -> None:
        of, inputs = region.numbering.vars, region.forward.invars
        numbers = [n for segment in decision.segments for n in segment.recomputed]
        beyond = [n for n in (*decision.saved, *numbers) if not 0 <= n < len(of)]
        if beyond:
            raise PlanError(
                f"region {self.key!r} has values 0 to {len(of) - 1}; the plan saves or recomputes "
                f"{beyond[0]}: correct it, or plan again."
            )
        if any(not 0 <= i < len(inputs) for i in decision.offloaded_inputs):
            raise PlanError(
                f"region {self.key!r} has {len(inputs)} inputs; the plan offloads input "
                f"{max(decision.offloaded_inputs)}, and they count from 0."
            )
        moved = [
            *(of[n] for n in decision.offloaded),
            *(inputs[i] for i in decision.offloaded_inputs),
        ]
        for v in moved:
            if not _jax.can_be_on_host(v.aval):
                raise PlanError(
                    f"region {self.key!r}: a value of type {v.aval.str_short()} cannot be kept in the "
                    'host\'s memory. Make it "offloaded": false.'
                )


@dataclasses.dataclass(frozen=True, eq=False)
class _Backward(Half):
    context: TracingContext
    key: str
    region: Linearized
    decision: RegionDecision | None
    is_shared: bool
    host: Mapping[_jax.Var, _jax.HostCopy] = dataclasses.field(default_factory=dict)

    def tracing_context(self) -> contextlib.AbstractContextManager:
        return active_context(None) if self.is_shared else contextlib.nullcontext()

    def compose(
        self,
        known: Sequence[_jax.Var],
        consts: Sequence[_jax.Var],
        transposed: _jax.Jaxpr,
        nonlinear: Sequence[Any],
    ) -> Composed | None:
        transposed = without_copies(inlined(transposed))
        numbering, given = self.region.numbering.fetching(self.host), set(known)
        there = {*numbering.number, *self.host, *given, *consts}
        ours = all(v in there for v in nonlinear if _jax.is_var(v))
        copies = {c.var for c in self.host.values()}
        if not ours or not given <= {*numbering.number, *copies, *self.region.linear.invars}:
            return None
        mark, n = fingerprint(transposed), len(transposed.eqns)
        segments = () if self.decision is None else self.decision.segments_of(mark, n)
        program = backward_program(numbering, [*known, *consts], transposed, nonlinear, segments)
        if self.decision is not None:
            return Composed(program)
        self.context.transposed(self.key, self.region, program, mark)
        return Composed(program, RegionHalf((self.key, self.region.fingerprint), True))
