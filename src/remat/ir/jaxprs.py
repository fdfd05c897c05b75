"""Jaxprs inside equations: their bodies, inlining, substitution and dependence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from remat import _jax
from remat.aliases import Atom, JaxprLike, NameStack

_jax.exclude_from_tracebacks(__file__)


# The parameters in which primitives that run programs hold their bodies. Jaxprs in the parameters of
# other primitives are not bodies but part of what the primitive computes: the update function of a
# scatter, the kernel of a Pallas call, the primal of a function with a custom derivative.
_BODIES = {
    "call": ("call_jaxpr",),
    "closed_call": ("call_jaxpr",),
    "compute_on": ("jaxpr",),
    "cond": ("branches",),
    "eval_jaxpr": ("call_jaxpr",),
    "jit": ("jaxpr",),
    "program_order": ("call_jaxpr",),
    "remat": ("jaxpr",),
    "remat2": ("jaxpr",),  # jax.checkpoint
    "scan": ("jaxpr",),
    "shard_map": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "xla_metadata_call": ("jaxpr",),
}


def body_keys(eqn: _jax.JaxprEqn) -> tuple[str, ...]:
    """Return the names of the parameters that hold what an equation runs."""
    keys = _BODIES.get(eqn.primitive.name, ())
    if not keys and _jax.is_call(eqn):
        return ("call_jaxpr",)
    # A primitive of another library may have one of these names.
    return keys if all(key in eqn.params for key in keys) else ()


def bodies_of(eqn: _jax.JaxprEqn) -> Iterator[JaxprLike]:
    """Yield the jaxprs that an equation runs."""
    for key in body_keys(eqn):
        value = eqn.params[key]
        yield from value if isinstance(value, (tuple, list)) else (value,)


def has_body(eqn: _jax.JaxprEqn) -> bool:
    """Return whether the equation runs jaxprs (a loop, branches, a call), which are split with it."""
    return bool(body_keys(eqn))


def equations(
    jaxpr: _jax.Jaxpr, inside: Callable[[_jax.JaxprEqn], Iterable[JaxprLike]] = _jax.jaxprs_of
) -> Iterator[_jax.JaxprEqn]:
    """Yield the equations of a jaxpr at any depth, each before those inside it.

    `inside(eqn)` gives the jaxprs of an equation to walk: by default all, even those that are not run;
    `bodies_of` gives those that are run.
    """
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inside(eqn):
            yield from equations(_jax.open_jaxpr(inner), inside)


def is_linear_solve(eqn: _jax.JaxprEqn) -> bool:
    """Return whether an equation is a `jax.lax.custom_linear_solve`."""
    return eqn.primitive.name == "custom_linear_solve"


def run_by(eqn: _jax.JaxprEqn) -> Iterator[JaxprLike]:
    """Yield the jaxprs of an equation, without those that only its derivative runs.

    A linear solve holds the transposed solve beside its own.
    """
    if is_linear_solve(eqn):
        yield eqn.params["jaxprs"].solve
    else:
        yield from _jax.jaxprs_of(eqn)


def applies(jaxpr: _jax.Jaxpr, primitive: str) -> bool:
    """Return whether a jaxpr applies a primitive, at any depth."""
    return any(eqn.primitive.name == primitive for eqn in equations(jaxpr))


def replace_body(eqn: _jax.JaxprEqn, old: JaxprLike, new_equations: _jax.Jaxpr) -> _jax.JaxprEqn:
    """Return the equation with one of its jaxprs replaced by another of the same type."""
    replacement = new_equations if isinstance(old, _jax.Jaxpr) else old.replace(jaxpr=new_equations)

    def swap(value: Any) -> Any:
        if value is old:
            return replacement
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(swap, value))
        if type(value) in (tuple, list):
            return type(value)(swap(item) for item in value)
        return value

    return eqn.replace(params={name: swap(value) for name, value in eqn.params.items()})


def scan_of_step(
    eqn: _jax.JaxprEqn,
    step: _jax.Jaxpr,
    invars: Sequence[Atom],
    outvars: Sequence[_jax.Var],
    n_consts: int,
    n_carry: int,
) -> _jax.JaxprEqn:
    """Return a `scan` equation like another, with another step, operands and results."""
    body = _jax.with_equations(eqn.params["jaxpr"], step)
    params = _jax.with_scan_arity(dict(eqn.params, jaxpr=body), n_consts, n_carry)
    return _jax.new_body_eqn(eqn, invars, outvars, params, [(body, invars)])


def inline_calls(
    jaxpr: _jax.Jaxpr, is_call: Callable[[_jax.JaxprEqn], JaxprLike | None]
) -> _jax.Jaxpr:
    """Inline calls, at the top level and inside each other.

    `is_call(eqn)` is the jaxpr to inline in place of an equation, or None. Operations keep the names
    of the scopes around their calls, and have the source lines of the calls if they have none.
    """
    eqns: list[_jax.JaxprEqn] = []

    def write(
        body: _jax.Jaxpr,
        names: dict[_jax.Var, Atom],
        wanted: dict[_jax.Var, _jax.Var],
        stack: NameStack,
        calls: tuple[_jax.JaxprEqn, ...],
    ) -> None:
        for eqn in body.eqns:
            eqn = _jax.with_lines_of(eqn, calls) if calls else eqn
            outvars = [
                wanted.get(v, v) if v in wanted or body is jaxpr else fresh(v) for v in eqn.outvars
            ]
            inner = is_call(eqn)
            if inner is None:
                names.update(zip(eqn.outvars, outvars))
                eqns.append(renamed(eqn, names, stack))
                continue
            inner_names = {v: look(names, x) for v, x in zip(inner.invars, eqn.invars)}
            made = {v for e in inner.eqns for v in e.outvars}
            inner_wanted: dict[_jax.Var, _jax.Var] = {}
            for v, final in zip(inner.outvars, outvars):
                if _jax.is_var(v) and v in made and not _jax.is_dropped(final):
                    inner_wanted.setdefault(v, final)
            write(inner, inner_names, inner_wanted, _joined(stack, eqn), (*calls, eqn))
            for outer, v in zip(eqn.outvars, inner.outvars):
                names[outer] = look(inner_names, v)

    names: dict[_jax.Var, Atom] = {}
    write(jaxpr, names, {}, None, ())
    outvars = [look(names, v) for v in jaxpr.outvars]
    return _jax.jaxpr_of(jaxpr.invars, outvars, eqns, jaxpr)


def inlined(
    jaxpr: _jax.Jaxpr,
    operands: Sequence[Atom],
    call: _jax.JaxprEqn,
    called: Mapping[_jax.Var, _jax.Var] | None = None,
) -> tuple[list[_jax.JaxprEqn], list[Atom]]:
    """Return a jaxpr's equations on some operands, in place of a call, and their results.

    Its values get new variables, because it may be inlined more than once; those in `called` get the
    variables given there.
    """
    names: dict[_jax.Var, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
    stack, eqns = _joined(None, call), []
    for eqn in jaxpr.eqns:
        names.update((v, (called or {}).get(v) or fresh(v)) for v in eqn.outvars)
        eqns.append(renamed(eqn, names, stack))
    return eqns, [look(names, v) for v in jaxpr.outvars]


def equations_on(
    jaxpr: _jax.Jaxpr, invars: Sequence[Atom], outvars: Sequence[_jax.Var]
) -> list[_jax.JaxprEqn]:
    """Return the equations of a jaxpr on other operands and with other result variables."""
    assert makes_its_results(jaxpr), "a result passed through"
    names = dict(zip((*jaxpr.invars, *jaxpr.outvars), (*invars, *outvars)))
    return [renamed(eqn, names) for eqn in jaxpr.eqns]


def makes_its_results(jaxpr: _jax.Jaxpr) -> bool:
    """Return whether each result of a jaxpr is the result of an equation, and of no other one."""
    made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    results = [v for v in jaxpr.outvars if _jax.is_var(v) and v in made]
    return len(set(results)) == len(jaxpr.outvars)


def look(names: Mapping[_jax.Var, Atom], v: Atom) -> Atom:
    """Return the variable or literal that stands for an operand; the operand itself if none does."""
    return names.get(v, v) if _jax.is_var(v) else v


def renamed(
    eqn: _jax.JaxprEqn, names: Mapping[_jax.Var, Atom], stack: NameStack | None = None
) -> _jax.JaxprEqn:
    """Return an equation on other operands and results, in the scopes of a call (None: no call)."""
    changed: dict[str, Any] = {}
    if stack is not None:
        changed["source_info"] = eqn.source_info.replace(name_stack=_joined(stack, eqn))
    invars = [look(names, v) for v in eqn.invars]
    return _jax.with_variables(eqn, invars, [names.get(v, v) for v in eqn.outvars], **changed)


def last_uses(jaxpr: _jax.Jaxpr) -> dict[_jax.Var, int]:
    """Return the place of the last equation that uses each value; results are used after all equations."""
    found = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if _jax.is_var(v)}
    found.update((v, len(jaxpr.eqns)) for v in jaxpr.outvars if _jax.is_var(v))
    return found


def fresh(v: _jax.Var) -> _jax.Var:
    """Return a new variable of the same type; a dropped one stays."""
    return v if _jax.is_dropped(v) else _jax.new_var(v.aval)


def _joined(stack: NameStack, eqn: _jax.JaxprEqn) -> NameStack:
    own = eqn.source_info.name_stack
    return own if stack is None else stack + own


def dependents(jaxpr: _jax.Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Return which results of a jaxpr can have a derivative with respect to these inputs."""
    reached = {v for v, active in zip(jaxpr.invars, inputs) if active}
    for eqn in jaxpr.eqns:
        if any(_jax.is_var(v) and v in reached for v in eqn.invars):
            refs = (v for v in eqn.invars if isinstance(v.aval, _jax.AbstractRef))
            reached.update(v for v in (*refs, *eqn.outvars) if _jax.has_tangent(v.aval))
    return [_jax.is_var(v) and v in reached for v in jaxpr.outvars]
