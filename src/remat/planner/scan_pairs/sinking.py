"""Moving computations of stacked weights into the loops that read them slice by slice.

Weights that are converted or transposed before a loop are a second copy of them, which lives as long as the
loop and its gradient. Users write such conversions, and JAX's partial evaluation moves them out of loops: out
of the loop over the ticks of a pipeline, say, whose step is a loop over layers. A loop that reads them in
slices can convert each slice in its step instead.

A stack is *computed* here if each of its slices is a cheap function of slices of stacks that are in memory in
any case: arguments, and views of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from remat import _jax
from remat.aliases import Atom
from remat.ir import jaxprs
from remat.ir.equations import fusion_of, is_elementwise, is_fusible, is_repeatable, plain_call
from remat.ir.operations import Fusion
from remat.planner.scan_pairs.inside import Replacements, inside_of, replaced, walk_inside
from remat.planner.scan_pairs.matching import is_loop, size_of, slices
from remat.planner.scan_pairs.shards import emit_shards, shard_matches, shards_of

_jax.exclude_from_tracebacks(__file__)

# Bytes of the computed stacks, over those of a program's inputs, from which they are computed in loops. A
# larger value leaves more conversions outside of loops, where they run once.
_LEAST_SHARE = 1 / 16


def sunk(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return the program whose loops compute the slices of stacks that are conversions of its inputs."""
    new = _sunk_in(jaxpr)
    for match in shard_matches(jaxpr):
        pair = shards_of(jaxpr, match)
        with inside_of(pair.forward):
            inner = _sunk_in(pair.jaxpr)
        if inner:
            new[match.forward], new[match.backward] = emit_shards(pair, inner)
    new |= walk_inside(jaxpr, new, lambda body, _: sunk(body), "")
    if not new:
        return jaxpr
    changed = replaced(jaxpr, new)
    alive, _ = _jax.dce(changed, [True] * len(changed.outvars), keep=[True] * len(changed.invars))
    return alive


def _sunk_in(jaxpr: _jax.Jaxpr) -> Replacements:
    """Return new equations for the loops that read computed stacks, and none for what only these read."""
    stacks = _Stacks(jaxpr)
    sinking = stacks.sinking()
    if sum(size_of(v.aval) for v in sinking) < _LEAST_SHARE * sum(map(_size, jaxpr.invars)):
        return {}
    new: Replacements = {}
    for i, eqn in enumerate(jaxpr.eqns):
        if eqn.outvars and all(v in sinking or _jax.is_dropped(v) for v in eqn.outvars):
            new[i] = []
        elif is_loop(eqn) and not sinking.isdisjoint(filter(_jax.is_var, eqn.invars)):
            new[i] = [_with_slices_inside(eqn, stacks, sinking)]
    return new


def _size(v: _jax.Var) -> int:
    return size_of(v.aval)


class _Stacks:
    """The stacks of a program of which slices can be computed."""

    def __init__(self, jaxpr: _jax.Jaxpr) -> None:
        self._jaxpr = jaxpr
        self._made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        #: Values that are in memory in any case.
        self._present = set(jaxpr.invars)
        self._computed: set[_jax.Var] = set()
        for eqn in jaxpr.eqns:
            if fusion_of(eqn) is Fusion.VIEW and self._present.issuperset(
                filter(_jax.is_var, eqn.invars)
            ):
                self._present.update(eqn.outvars)
            if self._is_row_by_row(eqn):
                self._computed.update(v for v in eqn.outvars if not _jax.is_dropped(v))

    def _is_row_by_row(self, eqn: _jax.JaxprEqn) -> bool:
        """Return whether each row of the results is a cheap function of rows that can be computed."""
        readable = all(
            not _jax.is_var(v) or v in self._present or v in self._computed for v in eqn.invars
        )
        if not readable or not is_repeatable(eqn):
            return False
        if is_loop(eqn):
            n_consts, n_carry = _jax.scan_arity(eqn)
            body = _jax.open_jaxpr(eqn.params["jaxpr"])
            made = {v for inner in body.eqns for v in inner.outvars}
            return (
                n_carry == 0
                and all(not _jax.is_var(v) or v in self._present for v in eqn.invars[:n_consts])
                and all(map(is_fusible, body.eqns))
                and all(_jax.is_var(v) and v in made for v in body.outvars)
            )
        if eqn.primitive.name == "transpose":
            return len(eqn.params["permutation"]) > 1 and eqn.params["permutation"][0] == 0
        converts = eqn.primitive.name == "convert_element_type" and not eqn.params.get("sharding")
        shape = eqn.outvars[0].aval.shape
        return len(shape) > 1 and (converts or (is_elementwise(eqn) and not eqn.params))

    def sinking(self) -> set[_jax.Var]:
        """Return the computed stacks that loops read in slices, and that nothing else reads."""
        if not self._computed:
            return set()
        results = {v for v in self._jaxpr.outvars if _jax.is_var(v)}
        found = self._computed - results
        readers: dict[_jax.Var, list[_jax.JaxprEqn]] = {}
        for eqn in self._jaxpr.eqns:
            for v in {v for v in eqn.invars if _jax.is_var(v) and v in found}:
                readers.setdefault(v, []).append(eqn)
        for eqn in reversed(self._jaxpr.eqns):
            own = [v for v in eqn.outvars if v in found]
            if not all(_may_read(e, v, found) for v in own for e in readers.get(v, ())):
                found.difference_update(own)
        return {v for v in found if readers.get(v)}

    def rows(
        self,
        stack: _jax.Var,
        row: _jax.Var,
        rows: dict[_jax.Var, _jax.Var],
        consts: dict[_jax.Var, _jax.Var],
    ) -> list[_jax.JaxprEqn]:
        """Return the equations that compute the row of a computed stack.

        Args:
          stack: the stack.
          row: the variable of its row.
          rows: the variables for rows of stacks that are in memory; those that are missing are added.
          consts: the same for whole values.
        """
        eqn = self._made_by[stack]
        n_consts = _jax.scan_arity(eqn)[0] if is_loop(eqn) else 0
        eqns: list[_jax.JaxprEqn] = []
        operands: list[Atom] = []
        for k, v in enumerate(eqn.invars):
            if not _jax.is_var(v):
                operands.append(v)
            elif k < n_consts:
                operands.append(consts.setdefault(v, _jax.new_var(v.aval)))
            elif v in self._present:
                operands.append(rows.setdefault(v, _jax.new_var(_jax.row_type(v.aval))))
            else:
                operands.append(_jax.new_var(_jax.row_type(v.aval)))
                eqns += self.rows(v, operands[-1], rows, consts)
        if not is_loop(eqn):
            return [*eqns, _jax.with_variables(eqn, operands, [row], params=_of_row(eqn))]
        body = _jax.open_jaxpr(eqn.params["jaxpr"])
        wanted = [v is stack for v in eqn.outvars]
        alive, _ = _jax.dce(body, wanted, keep=[True] * len(body.invars))
        return [*eqns, *jaxprs.inlined(alive, operands, eqn, {alive.outvars[0]: row})[0]]


def _of_row(eqn: _jax.JaxprEqn) -> dict:
    if eqn.primitive.name != "transpose":
        return dict(eqn.params)
    return dict(eqn.params, permutation=tuple(axis - 1 for axis in eqn.params["permutation"][1:]))


def _may_read(eqn: _jax.JaxprEqn, stack: _jax.Var, sinking: set[_jax.Var]) -> bool:
    """Return whether an equation reads a stack in slices only, or computes stacks that are read so."""
    if all(v in sinking or _jax.is_dropped(v) for v in eqn.outvars):
        return True
    if not is_loop(eqn):
        return False
    n_consts, n_carry = _jax.scan_arity(eqn)
    if any(v is stack for v in eqn.invars[n_consts : n_consts + n_carry]):
        return False
    step = jaxprs.inline_calls(_jax.open_jaxpr(eqn.params["jaxpr"]), plain_call)
    inside = {v for v, operand in zip(step.invars, eqn.invars[:n_consts]) if operand is stack}
    if any(_jax.is_var(v) and v in inside for v in step.outvars):
        return False
    return all(
        is_loop(inner)
        and not any(
            _jax.is_var(v) and v in inside for v in inner.invars[: sum(_jax.scan_arity(inner))]
        )
        for inner in step.eqns
        if any(_jax.is_var(v) and v in inside for v in inner.invars)
    )


def _with_slices_inside(
    eqn: _jax.JaxprEqn, stacks: _Stacks, sinking: set[_jax.Var]
) -> _jax.JaxprEqn:
    """Return a loop that computes the slices of the stacks that it, or a loop in its step, reads."""
    step = jaxprs.inline_calls(_jax.open_jaxpr(eqn.params["jaxpr"]), plain_call)
    n_consts, _ = _jax.scan_arity(eqn)
    inside = {
        v: operand
        for v, operand in zip(step.invars, eqn.invars[:n_consts])
        if _jax.is_var(operand) and operand in sinking
    }
    consts = {
        operand: v
        for v, operand in zip(step.invars, eqn.invars[:n_consts])
        if _jax.is_var(operand) and v not in inside
    }

    def const(outside: _jax.Var) -> _jax.Var:
        return consts.setdefault(outside, _jax.new_var(outside.aval))

    eqns = [
        _reading_rows(inner, inside, stacks, const)
        if any(_jax.is_var(v) and v in inside for v in inner.invars)
        else inner
        for inner in step.eqns
    ]
    step = _jax.rebuild(step, eqns=eqns)
    own = {v: x for v, x in zip(step.invars, eqn.invars[:n_consts]) if v not in inside}
    added = {v: outside for outside, v in consts.items() if v not in own}
    operands = [*own.values(), *added.values(), *eqn.invars[n_consts:]]
    step = _jax.rebuild(step, invars=[*own, *added, *step.invars[n_consts:]])
    eqn = jaxprs.scan_of_step(
        eqn, step, operands, eqn.outvars, len(own) + len(added), _jax.scan_arity(eqn)[1]
    )
    return _reading_rows(eqn, {v: v for v in sinking}, stacks, lambda outside: outside)


def _reading_rows(
    eqn: _jax.JaxprEqn,
    stack_of: Mapping[_jax.Var, _jax.Var],
    stacks: _Stacks,
    operand_of: Callable[[_jax.Var], _jax.Var],
) -> _jax.JaxprEqn:
    """Return a loop that computes rows of computed stacks in its step.

    Args:
      eqn: the loop.
      stack_of: the computed stack that each of some of its operands is.
      stacks: those of the program.
      operand_of: returns the operand for a value of the program.
    """
    n_consts, n_carry = _jax.scan_arity(eqn)
    step = _jax.open_jaxpr(eqn.params["jaxpr"])
    xs = zip(step.invars[n_consts + n_carry :], slices(eqn))
    rows: dict[_jax.Var, _jax.Var] = {}
    consts: dict[_jax.Var, _jax.Var] = {}
    computed: list[_jax.JaxprEqn] = []
    read: list[tuple[_jax.Var, Atom]] = []
    for v, operand in xs:
        if _jax.is_var(operand) and operand in stack_of:
            computed += stacks.rows(stack_of[operand], v, rows, consts)
        else:
            read.append((v, operand))
    if not computed:
        return eqn
    read += [(v, operand_of(outside)) for outside, v in rows.items()]
    own = list(zip(step.invars, eqn.invars))[:n_consts]
    own += [(v, operand_of(outside)) for outside, v in consts.items()]
    carry = list(zip(step.invars, eqn.invars))[n_consts : n_consts + n_carry]
    inputs: Sequence[tuple[_jax.Var, Atom]] = [*own, *carry, *read]
    step = _jax.rebuild(step, invars=[v for v, _ in inputs], eqns=[*computed, *step.eqns])
    operands = [operand for _, operand in inputs]
    return jaxprs.scan_of_step(eqn, step, operands, eqn.outvars, len(own), n_carry)
