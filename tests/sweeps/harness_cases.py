"""JAX's harnesses of its primitives in every form of rematerialization, compared with the plain function.

Each harness is a small function with arguments (`jax._src.internal_test_util.test_harnesses`). All forms of
one case, with their values, forward and reverse derivatives, are compiled as one program, so that XLA shares
their common parts. Compiled with little optimization, a case takes about 0.3 seconds of CPU time. A form must
return the results of the plain function. If it does not, its counterpart with `jax.checkpoint` is run as
well: a difference that JAX has, too, counts as explained; any other one is an error of this library.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import lax

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from jax._src.internal_test_util import test_harnesses

import remat
from planner.random_decisions import random_decisions
from remat import policies
from remat.planner.auto import WITH_MARKS, tracing
from remat.planner.rewrite import following, rewritten
from sweeps.outcomes import described

HARNESSES = tuple(test_harnesses.all_harnesses)
GROUPS = tuple(dict.fromkeys(h.group_name for h in HARNESSES))

_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

# --------------------------------------------------------------------------------------------------
# Forms

Form = Callable[[Callable], Callable]

#: Iterations of the loop whose body is the case; a power of two, so that cotangents divide exactly.
STEPS = 4

#: Policies, which cases use in turn.
POLICIES = (
    policies.dots_saveable,
    jax.checkpoint_policies.dots_saveable,
    policies.everything_saveable,
    policies.dots_with_no_batch_dims_saveable,
    policies.save(max_bytes=64),
    policies.save(dtype=("float32", "int32")),
    policies.recompute(primitive=["mul", "exp", "scatter", "gather", "while", "jit"]),
    policies.save(min_flops_per_byte=0.1) | policies.dots_saveable,
    ~policies.save(max_bytes=256),
    jax.checkpoint_policies.everything_saveable,
)


def _in_loop(scan: Callable, f: Callable, turn: int) -> Callable:
    """Return the function as the body of a loop: arguments are carried, closed over, and scanned over."""

    def looped(*args: Any) -> Any:
        places = [(i + turn) % 3 for i in range(len(args))]
        carried = [a for a, place in zip(args, places) if place == 0]
        rows = [jnp.stack([a] * STEPS) for a, place in zip(args, places) if place == 2]

        def body(carry: Any, row: Any) -> Any:
            by_place = iter(carry), None, iter(row)
            full = [a if p == 1 else next(by_place[p]) for a, p in zip(args, places)]
            return carry, f(*full)

        return scan(body, carried, rows, length=STEPS)[1]

    return looped


def forms(turn: int) -> dict[str, tuple[Form, Form]]:
    """Return the forms of the case with this number, each with its counterpart in plain JAX."""
    policy = POLICIES[turn % len(POLICIES)]
    of_jax = jax.checkpoint_policies.dots_saveable
    with_checkpoints = functools.partial(remat.scan, checkpoints=2)
    return {
        "checkpoint": (remat.checkpoint, jax.checkpoint),
        "policy": (
            functools.partial(remat.checkpoint, policy=policy),
            functools.partial(jax.checkpoint, policy=of_jax),
        ),
        "nested": (
            lambda f: remat.checkpoint(remat.checkpoint(f), policy=policies.dots_saveable),
            lambda f: jax.checkpoint(jax.checkpoint(f), policy=of_jax),
        ),
        "jit": (
            lambda f: jax.jit(remat.checkpoint(jax.jit(f))),
            lambda f: jax.jit(jax.checkpoint(jax.jit(f))),
        ),
        "scan": (
            lambda f: _in_loop(with_checkpoints, f, turn),
            lambda f: _in_loop(lax.scan, jax.checkpoint(f), turn),
        ),
    }


# --------------------------------------------------------------------------------------------------
# One case


def is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


@dataclasses.dataclass(frozen=True)
class Case:
    """A harness as a function of arrays to a list of arrays, with its tangents and cotangents.

    Args:
      fun: the function of all arguments.
      args: the arguments, arrays.
      tangents: tangents of the inexact arguments.
      cotangents: one for each result; ignored if a result has no derivative.
    """

    fun: Callable[..., list[Any]]
    args: list[Any]
    tangents: list[Any]
    cotangents: list[Any]
    has_inexact_results: bool

    @property
    def is_differentiated(self) -> bool:
        return bool(self.tangents) and self.has_inexact_results


def of_harness(harness: test_harnesses.Harness) -> Case:
    """Return the case of a harness; raise what the plain function raises."""
    args = [jnp.asarray(a) for a in harness.dyn_args_maker(np.random.RandomState(0))]
    draw = np.random.RandomState(1)

    def fun(*args: Any) -> list[Any]:
        return jax.tree.leaves(harness.dyn_fun(*args))

    def like(x: Any) -> Any:
        if not is_inexact(x):
            return jnp.zeros(())
        drawn = draw.uniform(0.5, 1, x.shape)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            drawn = drawn + 1j * draw.uniform(0.5, 1, x.shape)
        return jnp.asarray(drawn).astype(x.dtype)

    outs = jax.eval_shape(fun, *args)
    tangents = [like(a) for a in args if is_inexact(a)]
    return Case(fun, args, tangents, [like(o) for o in outs], any(map(is_inexact, outs)))


Result = dict[str, list[Any]]


def measured(g: Callable, args: Any, tangents: Any, cotangents: Any, *, what: Any) -> Result:
    """Return a function's values, and its derivatives if requested."""
    places = [i for i, a in enumerate(args) if is_inexact(a)]

    def by_inexact(*xs: Any) -> list[Any]:
        full = list(args)
        for i, x in zip(places, xs):
            full[i] = x
        return jax.tree.leaves(g(*full))

    def inexact_only(*xs: Any) -> list[Any]:
        return [o for o in by_inexact(*xs) if is_inexact(o)]

    xs = [args[i] for i in places]
    found = {}
    if "values" in what:
        found["values"] = by_inexact(*xs)
    if "jvp" in what:
        found["jvp"] = jax.jvp(inexact_only, xs, tangents)[1]
    if "vjp" in what:
        found["forward"], pull = jax.vjp(by_inexact, *xs)
        cts = []
        for out, ct in zip(found["forward"], cotangents, strict=True):
            if not is_inexact(out):
                ct = np.zeros(out.shape, jax.dtypes.float0)
            elif ct.shape != out.shape:  # rows of a loop's stacked results share the cotangent
                ct = jnp.stack([ct / STEPS] * STEPS)
            cts.append(ct)
        found["vjp"] = list(pull(cts))
    return found


#: Largest difference of results, as a share of the largest value: a few roundings.
_WITHIN = {"float64": 1e-12, "float32": 4e-6, "bfloat16": 3e-2, "float16": 4e-3}


def difference(actual: Any, expected: Any) -> str | None:
    """Return the difference of two arrays as text; None if they are equal."""
    if actual.dtype != expected.dtype:
        return f"{actual.dtype} for {expected.dtype}"
    if jax.dtypes.issubdtype(expected.dtype, jax.dtypes.prng_key):
        actual, expected = jax.random.key_data(actual), jax.random.key_data(expected)
    a, e = np.asarray(actual), np.asarray(expected)
    if a.shape == (STEPS, *e.shape):
        e = np.broadcast_to(e, a.shape)
    if a.shape != e.shape:
        return f"shape {a.shape} for {e.shape}"
    if not is_inexact(e):
        n = int(np.sum(a != e))
        return f"{n} of {e.size} integers differ" if n else None
    name = np.zeros((), e.dtype).real.dtype.name
    wide = np.complex128 if e.dtype.kind == "c" else np.float64
    a, e = a.astype(wide), e.astype(wide)
    with np.errstate(all="ignore"):
        alike = (a == e) | (np.isnan(a) & np.isnan(e))
        finite = np.isfinite(a) & np.isfinite(e)
        scale = np.max(np.abs(e), where=np.isfinite(e), initial=0.0)
        far = np.where(finite, np.abs(a - e), np.inf)
        wrong = ~alike & ~(far <= _WITHIN.get(name, 0.2) * scale)
    if not wrong.any():
        return None
    worst = np.unravel_index(np.argmax(np.where(wrong, far, -1)), far.shape)
    return f"{int(wrong.sum())} of {e.size} differ, at {tuple(map(int, worst))} {a[worst]} for {e[worst]}"


def differences(found: Result, expected: Result) -> str | None:
    for what, values in found.items():
        wanted = expected["values" if what == "forward" else what]
        if len(values) != len(wanted):
            return f"{what}: {len(values)} arrays for {len(wanted)}"
        for i, (a, e) in enumerate(zip(values, wanted)):
            if text := difference(a, e):
                return f"{what}[{i}]: {text}"
    return None


# --------------------------------------------------------------------------------------------------
# All forms of a case


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a case.

    Args:
      name: the harness's name.
      checked: those of "values", "jvp" and "vjp" that the plain function has.
      lacking: the errors that plain JAX raises for the others.
      forms: the forms that were compared.
      recomputed: whether the plan's program recomputes anything.
      different: by form, the difference from the plain function.
      explained: by form, differences that `jax.checkpoint` has, too, or the plain function if nothing is
        fused, with those.
    """

    name: str
    checked: tuple[str, ...] = ()
    lacking: dict[str, str] = dataclasses.field(default_factory=dict)
    forms: tuple[str, ...] = ()
    recomputed: bool = False
    different: dict[str, str] = dataclasses.field(default_factory=dict)
    explained: dict[str, str] = dataclasses.field(default_factory=dict)


def check(numbers: Sequence[int], *, plan: bool = True) -> list[Outcome]:
    """Compare every form of these harnesses with the plain function.

    Harnesses that have the same derivatives are one case, unless it differs.
    """
    with warnings.catch_warnings(), jax.enable_x64(True):
        warnings.simplefilter("ignore")
        outcomes: dict[int, Outcome] = {}
        alike: dict[tuple[str, ...], dict[int, tuple[Case, Outcome]]] = {}
        for number in numbers:
            name = HARNESSES[number].fullname
            try:
                case = of_harness(HARNESSES[number])
            except Exception as e:
                outcomes[number] = Outcome(name, lacking={"values": described(e)})
                continue
            what, lacking = capabilities(case)
            alike.setdefault(what, {})[number] = case, Outcome(name, what, lacking)
        for what, members in alike.items():
            first = next(iter(members))
            try:
                merged = together([case for case, _ in members.values()])
                found = compare(merged, Outcome("", what), first, plan)
            except Exception:
                found = Outcome("", different={"all": "not compiled"})
            for number, (case, outcome) in members.items():
                if found.different or found.explained:
                    outcomes[number] = compare(case, outcome, number, plan)
                else:
                    same = {"forms": found.forms, "recomputed": found.recomputed}
                    outcomes[number] = dataclasses.replace(outcome, **same)
    return [outcomes[number] for number in numbers]


def capabilities(case: Case) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the derivatives that the plain function has, and the errors of the others."""
    what, lacking = [], {}
    inputs = case.args, case.tangents, case.cotangents
    for one in ("values", "jvp", "vjp") if case.is_differentiated else ("values",):
        try:
            jax.eval_shape(functools.partial(measured, case.fun, what=(one,)), *inputs)
            what.append(one)
        except Exception as e:
            lacking[one] = described(e)
    return tuple(what), lacking


def together(cases: Sequence[Case]) -> Case:
    """Return several cases as one."""

    def fun(*args: Any) -> list[Any]:
        rest = iter(args)
        return [out for c in cases for out in c.fun(*itertools.islice(rest, len(c.args)))]

    return Case(
        fun,
        [a for c in cases for a in c.args],
        [t for c in cases for t in c.tangents],
        [t for c in cases for t in c.cotangents],
        any(c.has_inexact_results for c in cases),
    )


def compare(case: Case, outcome: Outcome, turn: int, plan: bool) -> Outcome:
    """Compare every form of a case with the plain function, in one program if that compiles."""
    what = outcome.checked
    inputs = case.args, case.tangents, case.cotangents
    of_case = forms(turn)
    if len(what) > 1 and plan:
        of_case["plan"] = remat.auto, jax.checkpoint
    errors: dict[str, str] = {}
    recomputed: list[bool] = []

    def rematted(form: Form, *inputs: Any) -> Result:
        wanted = what if len(what) == 1 else tuple(w for w in what if w != "values")
        return measured(form(case.fun), *inputs, what=wanted)

    def planned(*inputs: Any) -> Result:
        def change(flat: Any) -> Any:
            decisions = random_decisions(flat, turn)
            recomputed.append(bool(decisions.bursts))
            return rewritten(flat, decisions)

        with tracing(WITH_MARKS):
            return following(functools.partial(rematted, remat.auto), change)(*inputs)

    def unfused(*inputs: Any) -> Result:
        """Run the operations one by one, which rounds every result."""
        return measured(case.fun, *inputs, what=what)

    def everything(*inputs: Any) -> dict[str, Result]:
        found = {"plain": measured(case.fun, *inputs, what=what)}
        for name, (form, _) in of_case.items():
            try:
                found[name] = planned(*inputs) if name == "plan" else rematted(form, *inputs)
            except Exception as e:
                errors[name] = described(e)
        return found

    def run(f: Callable) -> Any:
        return jax.jit(f).lower(*inputs).compile(compiler_options=_QUICKLY)(*inputs)

    try:
        found = run(everything)
    except Exception:
        if not outcome.name:
            raise
        found, lacking = {"plain": {}}, dict(outcome.lacking)
        for one in what:
            try:
                found["plain"] |= run(functools.partial(measured, case.fun, what=(one,)))
            except Exception as e:
                lacking[one] = described(e)
        what = tuple(one for one in what if one not in lacking)
        outcome = dataclasses.replace(outcome, checked=what, lacking=lacking)
        if not what:
            return outcome
        for name, (form, _) in of_case.items():
            try:
                found[name] = run(planned if name == "plan" else functools.partial(rematted, form))
            except Exception as e:
                errors[name] = described(e)
    expected = found.pop("plain")
    different = dict(errors)
    for name, result in found.items():
        if text := differences(result, expected):
            different[name] = text
    explained: dict[str, str] = {}
    for name in tuple(different) if outcome.name else ():
        ways = {"with jax.checkpoint": functools.partial(rematted, of_case[name][1])}
        if name == "plan":  # its units are fused in other ways than the plain function
            ways["with nothing fused"] = unfused
        for way, f in ways.items():
            try:
                text = differences(run(f) if f is not unfused else f(*inputs), expected)
            except Exception as e:
                text = None if f is unfused else described(e)
            if text:
                explained[name] = f"{different.pop(name)}; {way} {text}"
                break
    return dataclasses.replace(
        outcome,
        forms=tuple(of_case),
        recomputed=any(recomputed),
        different=different,
        explained=explained,
    )


def batches(groups: Iterable[str] = GROUPS, size: int = 16) -> Iterable[Sequence[int]]:
    """Return the numbers of the harnesses of some groups, in batches of one group each."""
    for group in groups:
        numbers = [i for i, h in enumerate(HARNESSES) if h.group_name == group]
        yield from (numbers[i : i + size] for i in range(0, len(numbers), size))


def representatives() -> list[int]:
    """Return a small case of every group, with 32-bit floating-point arguments if any has them.

    JAX lists some groups' cases by iterating over sets of types, whose order may differ between processes, so
    names decide between equal cases.
    """
    best: dict[str, tuple[bool, int, str, int]] = {}
    for number, harness in enumerate(HARNESSES):
        arrays = [a for a in harness.arg_descriptors if hasattr(a, "dtype")]
        is_float = any(a.dtype == np.float32 for a in arrays)
        size = sum(int(np.prod(a.shape)) for a in arrays)
        rank = not is_float, size, harness.fullname, number
        group = harness.group_name
        best[group] = min(best.get(group, rank), rank)
    return [number for *_, number in best.values()]
