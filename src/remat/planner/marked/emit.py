"""Writing a decision back into the program: what the forward pass saves, what each segment recomputes.

A region's *forward program* K computes its results and every value that the backward pass could use;
the *backward program* T takes those values and cotangents. Both are jaxprs, and their values are
numbered in the order in which they are computed (`Numbering`). A decision (`RegionDecision`) says

* which values of K are saved, and
* where T is cut into segments, and which values of K each of them recomputes. A value that a segment
  computes stays available for later segments until one of them computes it again.

From that both halves follow. A segment that recomputes something becomes one equation of the
primitive (on saved values, values of earlier segments, and cotangents), whose body is the
recomputation and its piece of T; the pieces between are inlined as they are. Values that the decision
does not list are computed where they are needed, from what is available there. Decisions never list cheap
values, since compilers compute them inside the kernel that uses them.

A value that is saved can be *offloaded*: the forward pass copies it to the host's memory, and for the
backward pass it is a value that is recomputed, by one operation, the copy back. So segments fetch what
they need, when their cotangents are there, and the device holds it no longer than that. An input of the
region can be offloaded too (the carry of a loop's body, say): then the backward pass reads the copy in
the host's memory and not the input itself.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from remat import _jax
from remat.ir import jaxprs
from remat.ir.equations import is_fusible, undifferentiated_call
from remat.ir.fingerprint import fingerprint
from remat.ir.split import results_and_residuals, split, without_unused
from remat.planner.marked.decisions import RegionDecision
from remat.planner.plan_file import PlanSegment
from remat.transform.cut import Cut, round_residuals, save_all
from remat.transform.primitive import linear_equation, region_equation


def save_everything(region: Linearized) -> RegionDecision:
    """Return the decision that saves every residual, as plain JAX does."""
    number = region.numbering.number
    return RegionDecision(tuple(sorted(number[v] for v in region.residuals if v in number)), (), "")


class Numbering:
    """The values of a jaxpr, numbered in the order in which its equations compute them."""

    def __init__(self, jaxpr: _jax.Jaxpr) -> None:
        self.vars: list[_jax.Var] = [v for eqn in jaxpr.eqns for v in eqn.outvars]
        self.number = {v: i for i, v in enumerate(self.vars)}
        self.equation = [eqn for eqn in jaxpr.eqns for _ in eqn.outvars]
        self._fetched: dict[_jax.Var, tuple[tuple[int, int], _jax.JaxprEqn]] = {}

    def source(self, v: _jax.Var) -> tuple[tuple[int, int], _jax.JaxprEqn] | None:
        """Return the equation that computes a value, after its place in their order; None for an input."""
        if v in self._fetched:
            return self._fetched[v]
        number = self.number.get(v)
        if number is None:
            return None
        eqn = self.equation[number]
        first = self.number[eqn.outvars[0]]
        if any(u in self._fetched for u in eqn.outvars):
            # Of several results one is fetched, and the others computed under other names.
            eqn = eqn.replace(
                outvars=[_jax.new_var(u.aval) if u in self._fetched else u for u in eqn.outvars]
            )
        return (first, 1), eqn

    def fetching(self, host: Mapping[_jax.Var, _jax.HostCopy]) -> Numbering:
        """Return the same numbering, in which these values are not computed but fetched from the host."""
        new = copy.copy(self)
        new._fetched = {
            # Inputs come before everything, in any order.
            v: ((self.number.get(v, -1 - i), 0), c.fetch)
            for i, (v, c) in enumerate(host.items())
        }
        return new


@dataclasses.dataclass(frozen=True, eq=False)
class Linearized:
    """A region after differentiation: its known program, and the linear part that needs its residuals.

    Args:
      forward: inputs to known results and then `residuals`.
      linear: residuals and all inputs to the unknown results.
      residuals: the values of `forward` that `linear` takes.
      ins_unknown, outs_unknown: which inputs and results of the region are on the linear side.
      fingerprint: of all that.
    """

    forward: _jax.Jaxpr
    linear: _jax.Jaxpr
    residuals: tuple[_jax.Var, ...]
    ins_unknown: tuple[bool, ...]
    outs_unknown: tuple[bool, ...]
    fingerprint: str

    @functools.cached_property
    def numbering(self) -> Numbering:
        return Numbering(self.forward)

    @property
    def like(self) -> _jax.JaxprEqn | None:
        """Return an equation whose source line and context new ones take; None if there is none."""
        return next(iter((*self.linear.eqns, *self.forward.eqns)), None)


def inlined(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a region's program with calls inlined, checkpoints too: the planner decides about these."""
    return jaxprs.inline_calls(jaxpr, undifferentiated_call)


def without_copies(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a program that reads the operands of loops in place of results that only forward them.

    When JAX transposes a loop, it may add one that only copies its inputs, at each step, to results of
    the same size.
    """
    instead: dict[_jax.Var, Any] = {}

    def look(v: Any) -> Any:
        return instead.get(v, v) if _jax.is_var(v) else v

    eqns = []
    for eqn in jaxpr.eqns:
        if any(_jax.is_var(v) and v in instead for v in eqn.invars):
            eqn = eqn.replace(invars=[look(v) for v in eqn.invars])
        eqns.append(eqn)
        body = _jax.scan_body(eqn)
        if body is not None and eqn.params["length"]:
            instead.update(_forwarded(eqn, body))
    if not instead:
        return jaxpr
    changed = _jax.rebuild(jaxpr, eqns=eqns, outvars=[look(v) for v in jaxpr.outvars])
    live, _ = _jax.dce(changed, [True] * len(changed.outvars))
    return _jax.rebuild(live, invars=jaxpr.invars)


def _forwarded(eqn: _jax.JaxprEqn, body: _jax.Jaxpr) -> Iterable[tuple[_jax.Var, Any]]:
    """Yield the results of a `scan` that are operands of it, with these."""
    n_consts, n_carry = _jax.scan_arity(eqn)
    operands, inner = eqn.invars[n_consts:], body.invars[n_consts:]
    of_step = dict(zip(inner[n_carry:], operands[n_carry:]))
    for k, (result, out) in enumerate(zip(eqn.outvars, body.outvars)):
        if k < n_carry and out is inner[k]:
            yield result, operands[k]
        elif k >= n_carry and _jax.is_var(out) and out in of_step:
            yield result, of_step[out]


# The same jaxprs each time, since JAX lowers each jaxpr object once.
@_jax.weakref_lru_cache
def linearized(jaxpr: _jax.Jaxpr, ins_unknown: tuple[bool, ...]) -> Linearized:
    """Split a differentiated region without deciding anything: every needed value is a residual."""
    jaxpr = inlined(jaxpr)
    halves = without_unused(split(jaxpr, ins_unknown, save_all))
    _, residuals = results_and_residuals(halves)
    forward, linear = halves.known, halves.staged
    return Linearized(
        forward,
        linear,
        tuple(residuals),
        tuple(ins_unknown),
        halves.outs_unknown,
        fingerprint(forward, ins_unknown, fingerprint(linear)),
    )


def host_copies(region: Linearized, decision: RegionDecision) -> dict[_jax.Var, _jax.HostCopy]:
    """Return a copy in the host's memory for each value and input that is offloaded."""
    of = region.numbering
    copies = {
        v: _jax.host_copy(v, region.like)
        for v in (region.forward.invars[i] for i in decision.offloaded_inputs)
    }
    for n in decision.offloaded:
        copies[of.vars[n]] = _jax.host_copy(of.vars[n], of.equation[n])
    return copies


def halves(
    region: Linearized,
    saved: Iterable[_jax.Var],
    again: Iterable[_jax.Var] = (),
    *,
    host: Mapping[_jax.Var, _jax.HostCopy] = MappingProxyType({}),
    round_saved: bool = True,
) -> Cut:
    """Return the two halves of a region that saves these values, or those of them that are needed.

    `again` are values that segments recompute, some of them perhaps also saved for earlier segments.
    `host` has the copies of saved values and of inputs that are offloaded.
    """
    numbering = region.numbering.fetching(host)
    value_of = {c.var: v for v, c in host.items()}
    wanted = dict.fromkeys([*(host[v].var if v in host else v for v in saved), *value_of])
    all_inputs = region.linear.invars[len(region.residuals) :]
    inputs = [v for v in all_inputs if v not in host]
    available = {*wanted, *inputs}
    linear_needs = [*region.residuals, *(v for v in all_inputs if v in host)]
    # What operations take as a whole: segments run them so, also where parts of a loop's inputs
    # turn out to be of no use.
    needed: set[_jax.Var] = set()
    eqns = closure(numbering, linear_needs, available, needed.add)
    last = linear_equation(region.linear, region.like)
    backward = _jax.jaxpr_of([*wanted, *inputs], last.outvars, [*eqns, last], region.linear)
    again = set(again)
    closure(numbering, again, available - again, needed.add)
    shrunk, used = _jax.dce(backward, [True] * len(backward.outvars))
    used = [u or v in needed for v, u in zip(backward.invars, used)]
    invars = [v for v, u in zip(backward.invars, used) if u]
    backward = _jax.jaxpr_of(invars, shrunk.outvars, shrunk.eqns, region.linear)
    kept = [v for v, u in zip(wanted, used) if u]
    used_input = dict(zip(inputs, used[len(wanted) :]))
    forward, forward_inputs = _forward_half(region, kept, value_of, host, round_saved=round_saved)
    return Cut(
        forward,
        forward_inputs,
        backward,
        [used_input.get(v, False) for v in all_inputs],
        list(region.outs_unknown),
        len(kept),
    )


def _forward_half(
    region: Linearized,
    kept: Sequence[_jax.Var],
    value_of: Mapping[_jax.Var, _jax.Var],
    host: Mapping[_jax.Var, _jax.HostCopy],
    *,
    round_saved: bool,
) -> tuple[_jax.Jaxpr, list[bool]]:
    """Return the forward half, and which inputs it reads.

    It returns the known results, then the kept values, some of them as copies in the host's memory.
    """
    known = region.forward.outvars[: len(region.forward.outvars) - len(region.residuals)]
    values = [value_of.get(v, v) for v in kept]
    is_input = set(region.forward.invars)
    copied = [host[v] for v in values if v in host]
    of_inputs = [c.store for c in copied if c.store.invars[0] in is_input]
    # Inputs are copied first and computed values last, so that these are rounded before.
    computed = [k if v in is_input else v for k, v in zip(kept, values)]
    forward = _jax.rebuild(
        region.forward, outvars=[*known, *computed], eqns=[*of_inputs, *region.forward.eqns]
    )
    forward, used = _jax.dce(forward, [True] * len(forward.outvars))
    if round_saved:
        # Compilers keep intermediate results of 16 bits and less in 32. Rounding 32-bit residuals
        # would change nothing, and keeps XLA from reusing memory (12 of 140 MiB) and from fusing.
        forward = round_residuals(forward, len(computed), most_bytes=2)
    stores = [c.store for c in copied if c.store.invars[0] not in is_input]
    if stores:
        forward = _jax.rebuild(
            forward, outvars=[*forward.outvars[: len(known)], *kept], eqns=[*forward.eqns, *stores]
        )
    return forward, used


def closure(
    numbering: Numbering,
    needed: Iterable[Any],
    available: set[_jax.Var],
    visit: Callable[[_jax.Var], None] = lambda _: None,
) -> list[_jax.JaxprEqn]:
    """Return the equations that compute these values from available ones, in the program's order.

    `visit` is called with each available value and input that they read, and with each needed value that
    is one itself.
    """
    found: dict[tuple[int, int], _jax.JaxprEqn] = {}
    stack = [v for v in needed if _jax.is_var(v)]
    seen: set[_jax.Var] = set()
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        source = None if v in available else numbering.source(v)
        if source is None:
            visit(v)
            continue
        place, eqn = source
        if place not in found:
            found[place] = eqn
            stack.extend(u for u in eqn.invars if _jax.is_var(u))
    return [found[place] for place in sorted(found)]


# The backward program


def backward_program(
    numbering: Numbering,
    known: Sequence[_jax.Var],
    transposed: _jax.Jaxpr,
    nonlinear: Sequence[Any],
    segments: Sequence[PlanSegment],
) -> _jax.Jaxpr:
    """Return the backward pass: from saved values, inputs and cotangents to the linear inputs' cotangents.

    Args:
      numbering: of the region's forward program.
      known: the saved values and inputs that the backward pass is given.
      transposed: the linear part, transposed: (nonlinear operands, cotangents) -> cotangents.
      nonlinear: which values those operands are.
      segments: where it is cut.
    """
    program = _Program(numbering, transposed, nonlinear)
    starts = [0, *(s.start for s in segments), len(transposed.eqns)]
    pieces = [_Piece(program.eqns[: starts[1]], set(), 0)]
    for segment, end in zip(segments, starts[2:]):
        again = {numbering.vars[n] for n in segment.recomputed}
        pieces.append(_Piece(program.eqns[segment.start : end], again, segment.start))
    pieces = [p for p in pieces if p.eqns]
    _resolve(pieces, numbering, set(known), program)
    eqns = _write(pieces, program)
    ins = [*known, *program.cotangents]
    return _jax.jaxpr_of(ins, program.outvars, eqns, transposed)


class _Program:
    """The transposed linear part, on the forward program's own variables."""

    def __init__(
        self, numbering: Numbering, transposed: _jax.Jaxpr, nonlinear: Sequence[Any]
    ) -> None:
        self.numbering = numbering
        self.like = transposed
        replaced = dict(zip(transposed.invars, nonlinear))
        self.cotangents = transposed.invars[len(nonlinear) :]

        def look(v: Any) -> Any:
            return replaced.get(v, v) if _jax.is_var(v) else v

        self.eqns = [
            eqn.replace(invars=[look(v) for v in eqn.invars])
            if any(_jax.is_var(v) and v in replaced for v in eqn.invars)
            else eqn
            for eqn in transposed.eqns
        ]
        self.outvars = [look(v) for v in transposed.outvars]
        self.is_late = set(self.cotangents) | {v for eqn in self.eqns for v in eqn.outvars}


@dataclasses.dataclass(eq=False)
class _Piece:
    """A piece of the backward program with what it recomputes, and where values come from.

    `given` maps values of the forward program that it takes to the piece that computed them (None:
    they are saved or inputs).
    """

    eqns: list[_jax.JaxprEqn]
    again: set[_jax.Var]
    start: int
    recomputed: list[_jax.JaxprEqn] = dataclasses.field(default_factory=list)
    given: dict[_jax.Var, _Piece | None] = dataclasses.field(default_factory=dict)
    wanted: dict[_jax.Var, None] = dataclasses.field(default_factory=dict)  # by later pieces


def _resolve(
    pieces: Sequence[_Piece], numbering: Numbering, saved: set[_jax.Var], program: _Program
) -> None:
    """Set what each piece recomputes, and from which pieces it takes values.

    The last piece comes first, so that when a piece is handled, what later pieces take from it is known.
    """
    holder: list[dict[_jax.Var, _Piece | None]] = []
    latest: dict[_jax.Var, _Piece | None] = dict.fromkeys(saved)
    for piece in pieces:
        holder.append(dict(latest))
        latest.update((v, piece) for v in piece.again)
    for piece, before in zip(reversed(pieces), reversed(holder)):
        needed = [
            v
            for eqn in piece.eqns
            for v in eqn.invars
            if _jax.is_var(v) and v not in program.is_late
        ]
        available = {v for v in before if v not in piece.again}
        piece.recomputed = closure(
            numbering,
            [*needed, *piece.wanted],
            available,
            functools.partial(_take, piece, before),
        )
        for v, source in piece.given.items():
            if source is not None:
                source.wanted.setdefault(v)


def _take(piece: _Piece, before: dict[_jax.Var, _Piece | None], v: _jax.Var) -> None:
    piece.given.setdefault(v, before.get(v))


def _write(pieces: Sequence[_Piece], program: _Program) -> list[_jax.JaxprEqn]:
    used_after: list[set[_jax.Var]] = []
    later = {v for v in program.outvars if _jax.is_var(v)}
    for piece in reversed(pieces):
        used_after.append(set(later))
        later.update(v for eqn in piece.eqns for v in eqn.invars if _jax.is_var(v))
    used_after.reverse()

    eqns: list[_jax.JaxprEqn] = []
    names: dict[tuple[int, _jax.Var], _jax.Var] = {}  # of values handed from piece to piece
    inline: set[_jax.Var] = set()  # computed in no segment
    for piece, used in zip(pieces, used_after):
        outside = {
            v: v if source is None else names[id(source), v] for v, source in piece.given.items()
        }
        if not piece.again and not piece.wanted and all(map(is_fusible, piece.recomputed)):
            # Nothing was decided here, so it stays as JAX has it: what compilers compute inside the
            # kernels that use it needs no protection, and a fence would keep them from doing it.
            written = [eqn for eqn in piece.recomputed if eqn.outvars[0] not in inline]
            inline.update(v for eqn in written for v in eqn.outvars)
            eqns += [
                eqn.replace(invars=[outside.get(v, v) if _jax.is_var(v) else v for v in eqn.invars])
                for eqn in (*written, *piece.eqns)
            ]
            continue
        eqns.append(_segment(piece, used, outside, names, program))
    return eqns


def _segment(
    piece: _Piece,
    used_later: set[_jax.Var],
    outside: dict[_jax.Var, _jax.Var],
    names: dict[tuple[int, _jax.Var], _jax.Var],
    program: _Program,
) -> _jax.JaxprEqn:
    """Return an equation of the primitive for a piece that recomputes something."""
    made = {v for eqn in piece.eqns for v in eqn.outvars}
    taken = dict.fromkeys(
        v
        for eqn in piece.eqns
        for v in eqn.invars
        if _jax.is_var(v) and v in program.is_late and v not in made
    )
    results = [v for eqn in piece.eqns for v in eqn.outvars if v in used_later]
    handed = list(piece.wanted)
    for v in handed:
        names[id(piece), v] = _jax.new_var(v.aval)
    body = _jax.jaxpr_of(
        [*piece.given, *taken], [*results, *handed], piece.recomputed + piece.eqns, program.like
    )
    return region_equation(
        [*(outside[v] for v in piece.given), *taken],
        [*results, *(names[id(piece), v] for v in handed)],
        body,
        prevent_cse=True,
        differentiated=True,
        cotangents=(False,) * len(piece.given) + (True,) * len(taken),
        like=piece.eqns[0],
    )
