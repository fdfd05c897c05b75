"""Random programs with loops, branches, refs, callbacks and shards, plain and with regions placed in them.

A program is a tuple of instructions on vectors. Some instructions contain programs, which also read values of
the outer program. A program is run in one of three modes:

    "plain"   no regions; every loop is a `lax.scan`, also those of unknown length; no refs
    "remat"   regions of `remat.checkpoint` with their policies, `remat.scan`, `remat.while_loop`,
              `remat.fori_loop`, `remat.remat_scan`, and refs, where the program has them
    "jax"     the same, with `jax.checkpoint` and `lax`'s loops instead of ours

A difference between the first two modes that the third mode has, too, is a difference of JAX. Most programs
are evaluated operation by operation and compile almost nothing (`transform.evaluator`). Programs with shards,
and one in sixteen others, are compiled as a whole. That takes seconds instead of tenths of a second, so they
are less deep.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import remat
from remat import checkpoint_name, policies
from sweeps.outcomes import described
from transform.evaluator import interpreted
from transform.programs import (
    AROUND,
    BINARY,
    UNARY,
    WITH_WEIGHTS,
    N,
    W,
    X,
    around,
    chance,
)

Mode = Literal["plain", "remat", "jax"]
Instruction = tuple[Any, ...]
Program = tuple[Instruction, ...]

DTYPES = ("float64", "float64", "float32", "bfloat16", "float16")

# --------------------------------------------------------------------------------------------------
# Functions that call the host


@jax.custom_jvp
def hosted_sin(x):
    return jax.pure_callback(np.sin, x, x, vmap_method="expand_dims")


@jax.custom_jvp
def hosted_cos(x):
    return jax.pure_callback(np.cos, x, x, vmap_method="expand_dims")


hosted_sin.defjvp(
    lambda primals, tangents: (hosted_sin(*primals), hosted_cos(*primals) * tangents[0])
)
hosted_cos.defjvp(
    lambda primals, tangents: (hosted_cos(*primals), -hosted_sin(*primals) * tangents[0])
)

# --------------------------------------------------------------------------------------------------
# Policies, by number

_SIMPLE = (
    None,
    policies.dots_saveable,
    policies.everything_saveable,
    policies.nothing_saveable,
    policies.save("a", "c", strict=False),
    policies.save(primitive=["sin", "mul", "dot_general", "while", "scan"], strict=False),
    policies.recompute("b", strict=False),
    policies.save(max_bytes=16, strict=False),
    policies.save(dtype=("float32", "bfloat16"), strict=False),
    policies.save_any_names_but_these("a", strict=False),
    policies.save(min_flops_per_byte=0.1, strict=False),
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names("b"),
    jax.checkpoint_policies.everything_saveable,
    chance(1),
    chance(2),
    chance(5),
)
N_POLICIES = 60


@functools.lru_cache
def policy(number: int) -> Any:
    """Return one of the simple policies, or a random combination of two."""
    if number < len(_SIMPLE):
        return _SIMPLE[number]
    draw = random.Random(number)
    a, b = draw.choice(_SIMPLE[1:11]), draw.choice(_SIMPLE[1:])
    joined = draw.choice([lambda: a | b, lambda: b & a, lambda: ~a, lambda: a & ~(a & b)])()
    return joined


# --------------------------------------------------------------------------------------------------
# Running


@dataclasses.dataclass(frozen=True)
class Runner:
    """The way to run a program, and the context of an instruction.

    Args:
      mode: see the docstring of the module.
      in_scan: whether the instruction is in a `lax.scan`, whose own derivatives are wrong with refs.
    """

    mode: Mode
    in_scan: bool = False

    def run(self, program: Program, x: Any, w: Any, outer: tuple = ()) -> tuple[Any, Any]:
        values = [x, *outer]
        for instruction in program:
            values.append(self.step(instruction, values, w))
        return values[-1], values[len(values) // 2]

    def step(self, instruction: Instruction, values: list[Any], w: Any) -> Any:
        kind, i, *rest = instruction
        x = values[i % len(values)]
        if kind in SIMPLE:
            other = values[rest[0] % len(values)].astype(x.dtype) if rest else None
            return SIMPLE[kind](x, other, w.astype(x.dtype))
        if kind == "name":
            return checkpoint_name(jnp.sin(x) if rest[1] else x, rest[0])
        if kind == "cast":
            return jnp.sin(x).astype(rest[0])
        outer = (values[-1], values[0])
        return getattr(self, f"_{kind}")(x, w, outer, *rest)

    # Calls

    def _jit(self, x: Any, w: Any, outer: tuple, body: Program) -> Any:
        return jax.jit(lambda x, w: self.run(body, x, w, outer)[0])(x, w)

    def _vmap(self, x: Any, w: Any, outer: tuple, body: Program) -> Any:
        both = jnp.stack([x, jnp.cos(x)])
        return jnp.sum(jax.vmap(lambda x: self.run(body, x, w, outer)[0])(both), 0)

    def _region(
        self, x: Any, w: Any, outer: tuple, body: Program, number: int, prevent_cse: bool, own: bool
    ) -> Any:
        def inner(x: Any, w: Any) -> Any:
            return sum_of(self.run(body, x, w, outer), x)

        if self.mode == "plain":
            return inner(x, w)
        if self.mode == "jax" or not own:
            chosen = policy(number)
            if isinstance(chosen, policies.Policy):
                chosen = jax.checkpoint_policies.dots_saveable
            return jax.checkpoint(inner, policy=chosen)(x, w)
        return remat.checkpoint(inner, policy=policy(number), prevent_cse=prevent_cse)(x, w)

    def _custom_jvp(self, x: Any, w: Any, outer: tuple, body: Program) -> Any:
        def inner(x: Any, w: Any) -> Any:
            return self.run(body, x, w)[0]

        function = jax.custom_jvp(inner)

        @function.defjvp
        def _(primals: tuple, tangents: tuple) -> tuple:
            y, t = jax.jvp(inner, primals, tangents)
            return y, 0.5 * t

        return function(x, w)

    def _custom_vjp(self, x: Any, w: Any, outer: tuple, body: Program) -> Any:
        def inner(x: Any, w: Any) -> Any:
            return self.run(body, x, w)[0]

        function = jax.custom_vjp(inner)
        function.defvjp(
            lambda x, w: jax.vjp(inner, x, w),
            lambda pull, ct: jax.tree.map(lambda t: 0.5 * t, pull(ct)),
        )
        return function(x, w)

    # Branches

    def _cond(self, x: Any, w: Any, outer: tuple, yes: Program, no: Program) -> Any:
        branches = [lambda x, b=b: like(self.run(b, x, w, outer)[0], x) for b in (yes, no)]
        return lax.cond(jnp.sum(x) > 0, *branches, x)

    def _switch(self, x: Any, w: Any, outer: tuple, body: Program, other: Program) -> Any:
        def branch(program: Program) -> Callable:
            return lambda x, w: like(self.run(program, x, w, outer)[0], x)

        index = jnp.floor(2 * jnp.sum(x)).astype(jnp.int32)
        middle = lambda x, w: jnp.sin(x) + x  # noqa: E731
        return lax.switch(index, [branch(body), middle, branch(other)], x, w)

    # Loops

    def _scan(
        self,
        x: Any,
        w: Any,
        outer: tuple,
        body: Program,
        length: int,
        reverse: bool,
        unroll: int,
        extra: str,
        how: tuple,
    ) -> Any:
        ours = self.mode == "remat" and how[0] != "lax"
        runner = dataclasses.replace(self, in_scan=self.in_scan or not ours)

        def advance(carry: Any, z: Any) -> Any:
            c, more = carry
            y, u = runner.run(body, c, w, outer)
            c = 0.5 * like(y, c) + z["row"]
            if extra == "integer":
                more = more + z["index"]
                c = c * (more % 3).astype(c.dtype)
            elif extra == "key":
                more, now = jax.random.split(more)
                c = jnp.where(jax.random.bernoulli(now, 0.7, c.shape), c, jnp.zeros_like(c))
            elif extra == "pair":
                more = jnp.sin(more) + like(u, more)
                c = c + 0.5 * more
            return (c, more), (u, c)

        more = {"integer": jnp.int32(1), "key": jax.random.key(3), "pair": jnp.cos(x)}.get(extra)
        scales = jnp.arange(1.0, 1.0 + length, dtype=x.dtype)[:, None]
        xs = {"row": scales * x[None] / 3, "index": jnp.arange(length, dtype=jnp.int32)}
        init = x, more
        if ours and how[0] == "remat_scan":
            (last, _), (us, cs) = remat.remat_scan(
                advance, length=length, policy=policy(how[1]), lengths="auto"
            )(init, xs)
        elif ours:
            (last, _), (us, cs) = remat.scan(
                advance,
                init,
                xs,
                length,
                checkpoints=how[1],
                policy=policy(how[2]),
                reverse=reverse,
                unroll=unroll,
            )
        else:
            (last, _), (us, cs) = lax.scan(
                advance, init, xs, length, reverse=reverse, unroll=unroll
            )
        return last + jnp.sum(like(us, last), 0) + jnp.sum(jnp.sin(cs), 0)

    def _fori(
        self,
        x: Any,
        w: Any,
        outer: tuple,
        body: Program,
        lower: int,
        upper: int,
        is_traced: bool,
        checkpoints: int | None,
        number: int,
    ) -> Any:
        runner = dataclasses.replace(self, in_scan=self.in_scan or self.mode != "remat")

        def advance(i: Any, c: Any) -> Any:
            return 0.5 * like(runner.run(body, c, w, outer)[0], c) + i.astype(c.dtype) / 4

        # As many steps as the sum of the vector, but at least one fewer than `upper`.
        end = jnp.int32(upper) - (jnp.sum(x) > 0).astype(jnp.int32) if is_traced else upper
        if self.mode == "remat":
            return remat.fori_loop(
                lower, end, advance, x, checkpoints=checkpoints, policy=policy(number)
            )

        def masked(c: Any, i: Any) -> tuple[Any, None]:
            return jnp.where(i < end, advance(i, c), c), None

        return lax.scan(masked, x, jnp.arange(lower, upper, dtype=jnp.int32))[0]

    def _while(
        self, x: Any, w: Any, outer: tuple, body: Program, most: int, checkpoints: Any, number: int
    ) -> Any:
        runner = dataclasses.replace(self, in_scan=self.in_scan or self.mode != "remat")

        def unfinished(state: Any) -> Any:
            k, c = state
            return (k < most) & (jnp.sum(jnp.abs(c)) < 6)

        def advance(state: Any) -> Any:
            k, c = state
            return k + 1, c + 0.5 * like(runner.run(body, c, w, outer)[0], c) + 0.5

        # The count is computed from the vector, so that it varies over devices as the vector does.
        init = jnp.sum(0 * x).astype(jnp.int32), x
        if self.mode == "remat":
            bound = None if checkpoints is None else most
            return remat.while_loop(
                unfinished,
                advance,
                init,
                max_steps=bound,
                checkpoints=checkpoints,
                policy=policy(number),
            )[1]

        def masked(state: Any, _: None) -> Any:
            goes_on = unfinished(state)
            return jax.tree.map(lambda a, b: jnp.where(goes_on, a, b), advance(state), state), None

        return lax.scan(masked, init, length=most)[0][1]

    def _count(self, x: Any, w: Any, outer: tuple) -> Any:
        """Return the vector times a number that a loop without derivatives computes."""
        bound = jnp.abs(jnp.floor(4 * lax.stop_gradient(jnp.sum(x)))) + 1
        n = lax.while_loop(
            lambda k: (k * k < bound) & (k < 5), lambda k: k + 1, jnp.zeros_like(bound)
        )
        return x * n.astype(x.dtype) / 3

    # Refs and the host

    def _ref(self, x: Any, w: Any, outer: tuple, body: Program, is_outside: bool) -> Any:
        if self.mode == "plain" or self.in_scan:
            y = like(self.run(body, x, w, outer)[0], x)
            return y * x + jnp.cos(x) * 0.5

        def inner(x: Any) -> Any:
            return like(self.run(body, x, w, outer)[0], x) * ref[...]

        ref = jax.new_ref(x)
        if is_outside:  # a region that reads a ref of its caller
            inner = (remat.checkpoint if self.mode == "remat" else jax.checkpoint)(inner)
        y = inner(x)
        ref[...] = jnp.cos(x)
        ref[1:] *= 0.5
        ref[0] = 0.5 * ref[0]
        return y + ref[...]

    def _print(self, x: Any, w: Any, outer: tuple) -> Any:
        jax.debug.callback(lambda v: None, x)
        return jnp.sin(x)

    def _hosted(self, x: Any, w: Any, outer: tuple) -> Any:
        return hosted_sin(x)

    # Shards

    def _shard_map(self, x: Any, w: Any, outer: tuple, body: Program, collective: str) -> Any:
        mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

        def local(x: Any, w: Any) -> Any:
            x, w = x[0], w[0]
            y, u = self.run(body, x, w)
            if collective == "psum":
                y = y + jnp.sin(lax.psum(u, "d")).astype(y.dtype)
            elif collective == "ppermute":
                y = y * lax.ppermute(y, "d", [(0, 1), (1, 0)])
            elif collective == "all_gather":
                y = y + jnp.sum(lax.all_gather(jnp.sin(y), "d"), 0)
            return y[None]

        shards = jnp.stack([x, jnp.cos(x)]), jnp.stack([w, jnp.sin(w)])
        out = jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(*shards)
        return jnp.sum(out, 0)


def _unchanged(f: Callable, policy: Any = None) -> Callable:
    return f


def _of_jax(f: Callable, policy: Any = None) -> Callable:
    return jax.checkpoint(f, policy=policy and jax.checkpoint_policies.dots_saveable)


_AROUND = {
    "plain": around(_unchanged, _unchanged),
    "remat": AROUND,
    "jax": around(_of_jax),
}


def like(y: Any, x: Any) -> Any:
    return y.astype(x.dtype)


def sum_of(results: tuple[Any, Any], x: Any) -> Any:
    y, u = results
    return y + 0.5 * like(u, y)


def _complex(x: Any) -> Any:
    wide = x.astype(jnp.float32 if x.dtype.itemsize <= 2 else x.dtype)
    z = jnp.exp(1j * wide) * wide
    z = z * jnp.conj(z) + jnp.fft.fft(z)
    return like(z.real * z.imag, x)


SIMPLE: dict[str, Callable[[Any, Any, Any], Any]] = {
    **{name: lambda a, b, w, f=f: like(f(a), a) for name, f in UNARY.items()},
    **{name: lambda a, b, w, f=f: like(f(a, b), a) for name, f in BINARY.items()},
    **{name: lambda a, b, w, f=f: like(f(a, w), a) for name, f in WITH_WEIGHTS.items()},
    "complex": lambda a, b, w: _complex(a),
    "narrow": lambda a, b, w: like(jnp.tanh(a).astype(jnp.float8_e5m2), a),
    "bits": lambda a, b, w: a * (jnp.arange(N) << 1 ^ 3).astype(a.dtype),
    "dropout": lambda a, b, w: jnp.where(
        jax.random.bernoulli(jax.random.key(5), 0.6, a.shape), a / 0.6, jnp.zeros_like(a)
    ),
}

# --------------------------------------------------------------------------------------------------
# Drawing


@dataclasses.dataclass(frozen=True)
class Case:
    """A program and the transformations applied to it.

    Args:
      program: the instructions.
      dtype: the dtype of its vector argument.
      around: the transformation around it, a name in `AROUND`; or "explicit" or "auto" shards of a batch.
      derivative: a name in `DERIVATIVES`.
      compiled: whether it is compiled as a whole.
    """

    program: Program
    dtype: str = "float64"
    around: str = "nothing"
    derivative: str = "first"
    compiled: bool = False


WITH_BODY = ("jit", "vmap", "custom_jvp", "custom_vjp", "ref")
LOOPS = ("scan", "scan", "fori", "while")


def draw_case(seed: int) -> Case:
    """Return the case of a seed."""
    draw = random.Random(seed)
    shards = draw.choice(["", "", "", "", "", "", "", "", "", "", "shard_map", "batch"])
    compiled = bool(shards) or not draw.randrange(16)
    depth = draw.choice([1, 2] if compiled else [1, 2, 3, 3])
    program = tuple(_programs(draw, depth, shards == "shard_map"))
    if not has("region", program) and not any(has(kind, program) for kind in (*LOOPS, "ref")):
        program += (_instruction(draw, "region", depth - 1),)
    if shards == "shard_map":
        body = program[: 1 + len(program) // 2]
        collective = draw.choice(["psum", "ppermute", "all_gather", "none"])
        program = (*program[:1], ("shard_map", draw.randrange(4), body, collective))
    around = draw.choice(["nothing"] * 4 + [*AROUND])
    if shards == "batch":
        around = draw.choice(["explicit", "auto"])
    derivative = draw.choice(["first"] * 5 + [*DERIVATIVES])
    has_reverse_only = any(has(kind, program) for kind in ("scaled", "custom_vjp"))
    if has_reverse_only and derivative in NEEDS_JVP:
        derivative = "gradient"
    return Case(program, draw.choice(DTYPES), around, derivative, compiled)


def _programs(draw: random.Random, depth: int, in_shard: bool = False) -> Iterator[Instruction]:
    """Draw one to three instructions, which contain programs down to this depth."""
    for place in range(draw.randint(1, 3)):
        kind = None
        if depth and draw.random() < (0.8 if place == 0 else 0.3):
            kind = draw.choice(["region"] * 4 + [*WITH_BODY, *LOOPS, *LOOPS, "cond", "switch"])
            if in_shard and kind in ("custom_jvp", "custom_vjp"):
                kind = "region"
        yield _instruction(draw, kind, depth - 1)


def _instruction(draw: random.Random, kind: str | None, depth: int) -> Instruction:
    i = draw.randrange(6)
    body = lambda: tuple(_programs(draw, depth))  # noqa: E731
    number = lambda: draw.randrange(N_POLICIES) if draw.random() < 0.7 else 0  # noqa: E731
    few = lambda: draw.choice([None, 1, 2, 3])  # noqa: E731
    if kind is None:
        kind = draw.choice([*SIMPLE, *BINARY, "cast", "name", "name", "count", "print", "hosted"])
        if kind == "cast":
            return kind, i, draw.choice(DTYPES)
        if kind == "name":
            return kind, i, draw.choice("abc"), draw.random() < 0.5
        return (kind, i, draw.randrange(6)) if kind in BINARY else (kind, i)
    if kind == "region":
        return kind, i, body(), number(), draw.random() < 0.7, draw.random() < 0.8
    if kind in ("cond", "switch"):
        return kind, i, body(), body()
    if kind == "ref":
        return kind, i, body(), draw.random() < 0.3
    if kind == "scan":
        length, extra = draw.randrange(5), draw.choice(["", "integer", "key", "pair"])
        reverse, unroll = draw.random() < 0.3, draw.choice([1, 1, 2])
        how: tuple = draw.choice([("lax",), ("remat", few(), number()), ("remat", few(), number())])
        if draw.random() < 0.15:
            length, reverse, how = max(1, length), False, ("remat_scan", number())
        return kind, i, body(), length, reverse, unroll, extra, how
    if kind == "fori":
        lower = draw.randrange(-1, 2)
        return (
            kind,
            i,
            body(),
            lower,
            lower + draw.randrange(4),
            draw.random() < 0.5,
            few(),
            number(),
        )
    if kind == "while":
        return kind, i, body(), draw.randrange(5), few(), number()
    return kind, i, body()


def bodies(instruction: Instruction) -> list[int]:
    """Return the positions of the programs that an instruction contains."""
    return [
        place
        for place, part in enumerate(instruction)
        if isinstance(part, tuple) and part and isinstance(part[0], tuple)
    ]


def has(kind: str, program: Program) -> bool:
    return any(i[0] == kind or any(has(kind, i[place]) for place in bodies(i)) for i in program)


def smaller(case: Case) -> Iterator[Case]:
    """Return simpler cases, the simplest first."""
    for name, simplest in (("around", "nothing"), ("compiled", False), ("dtype", "float64")):
        if getattr(case, name) != simplest:
            yield dataclasses.replace(case, **{name: simplest})
    for program in _smaller(case.program):
        yield dataclasses.replace(case, program=program)
    if case.derivative != "gradient":
        yield dataclasses.replace(case, derivative="gradient")


def _smaller(program: Program) -> Iterator[Program]:
    for place, instruction in enumerate(program):
        before, after = program[:place], program[place + 1 :]
        if before or after:
            yield (*before, *after)
        for at in bodies(instruction):
            yield (*before, *instruction[at], *after)
            for body in _smaller(instruction[at]):
                yield (*before, (*instruction[:at], body, *instruction[at + 1 :]), *after)


def minimized(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Return the smallest case that still fails, found greedily."""
    while True:
        for candidate in smaller(case):
            if fails(candidate):
                case = candidate
                break
        else:
            return case


def minimized_difference(case: Case) -> Case:
    """Return the smallest case that differs in the same way as this one."""
    kind = _kind(check(case).different)
    return minimized(case, lambda c: _kind(check(c).different) == kind) if kind else case


def _kind(different: str) -> str:
    """Return the beginning of an error's text, or that values differ."""
    return "result" if different.startswith("result ") else different[:25]


# --------------------------------------------------------------------------------------------------
# Derivatives


def _scalar(f: Callable) -> Callable:
    return lambda x, w: _sum_of_squares(f(x, w))


def _sum_of_squares(values: Sequence[Any]) -> Any:
    wide = [y.astype(jnp.float64) for y in values]
    return sum(jnp.sum(y * (1 + y)) for y in wide)


def _gradient(f: Callable) -> Callable:
    return jax.grad(_scalar(f), (0, 1))


def _tangents(x: Any, w: Any) -> tuple[Any, Any]:
    return jnp.cos(x), jnp.sin(w)


def _first(f: Callable) -> Callable:
    def g(x: Any, w: Any) -> Any:
        return jax.jvp(f, (x, w), _tangents(x, w)), _gradient(f)(x, w)

    return g


def _reverse_over_reverse(f: Callable) -> Callable:
    # The sine of a large gradient would have no correct digits.
    return jax.value_and_grad(lambda x, w: _sum_of_squares(_gradient(f)(x, w)), (0, 1))


def _reverse_over_forward(f: Callable) -> Callable:
    return jax.value_and_grad(lambda x, w: jax.jvp(_scalar(f), (x, w), _tangents(x, w))[1], (0, 1))


def _linearized(f: Callable) -> Callable:
    def g(x: Any, w: Any) -> Any:
        y, push = jax.linearize(f, x, w)
        pushed = push(*_tangents(x, w))
        return y, pushed, jax.linear_transpose(push, x, w)(pushed)

    return g


DERIVATIVES: dict[str, Callable[[Callable], Callable]] = {
    "gradient": lambda f: lambda x, w: (f(x, w), _gradient(f)(x, w)),
    "reverse over reverse": _reverse_over_reverse,
    # A function with custom_vjp has no forward derivative; those below are not for it.
    "first": _first,
    "forward over reverse": lambda f: lambda x, w: jax.jvp(_gradient(f), (x, w), _tangents(x, w)),
    "reverse over forward": _reverse_over_forward,
    "linearize, transpose": _linearized,
}
NEEDS_JVP = ("first", "forward over reverse", "reverse over forward", "linearize, transpose")

# --------------------------------------------------------------------------------------------------
# Evaluation


def function(case: Case, mode: Mode) -> Callable:
    """Return a case as a function of the vector and the matrix."""

    def program(x: Any, w: Any) -> tuple[Any, Any]:
        y, u = Runner(mode).run(case.program, x, w)
        return like(y, x), like(u, x)

    if case.around in ("explicit", "auto"):
        batched = jax.vmap(program, (0, None))
        return DERIVATIVES[case.derivative](batched)
    return DERIVATIVES[case.derivative](_AROUND[mode][case.around](program))


def results(case: Case, mode: Mode) -> list[Any]:
    """Return the results of a case."""
    with jax.enable_x64(True):
        x, w = jnp.asarray(X, case.dtype), jnp.asarray(W)
        if case.around in ("explicit", "auto"):
            kind = AxisType.Explicit if case.around == "explicit" else AxisType.Auto
            mesh = jax.make_mesh((8,), ("b",), axis_types=(kind,))
            rows = jnp.stack([x * k for k in range(-3, 5)])
            with jax.set_mesh(mesh):
                rows = jax.device_put(rows, NamedSharding(mesh, P("b")))
                w = jax.device_put(w, NamedSharding(mesh, P()))
                return jax.tree.leaves(_compiled(function(case, mode), rows, w))
        f = function(case, mode)
        if case.compiled:
            return jax.tree.leaves(_compiled(f, x, w))
        return interpreted(f)(x, w)


def _compiled(f: Callable, *args: Any) -> Any:
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(f).lower(*args).compile(compiler_options=options)(*args)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a case.

    Args:
      name: its seed.
      lacking: the error of the plain program, after which nothing was compared.
      refused: this library's typed error for an unsupported operation.
      different: the difference between the program with regions and the plain one.
      explained: the difference, if `jax.checkpoint` and `lax`'s loops have it, too.
      rounded: the difference, if the plain program differs as much from its results in 64 bits, in which both
        programs agree.
      is_telling: whether any result is finite and nonzero.
    """

    name: str
    lacking: str = ""
    refused: str = ""
    different: str = ""
    explained: str = ""
    rounded: str = ""
    is_telling: bool = True


def check_seeds(seeds: Sequence[int]) -> list[Outcome]:
    return [check(draw_case(seed), str(seed)) for seed in seeds]


def check(case: Case, name: str = "") -> Outcome:
    """Compare a program with regions with the plain one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = results(case, "plain")
        except Exception as e:
            return Outcome(name, lacking=described(e))
        try:
            text = _difference(case, results(case, "remat"), expected)
        except remat.RematError as e:
            return Outcome(name, refused=described(e))
        except Exception as e:
            text = described(e)
        if not text:
            return Outcome(name, is_telling=any(map(_is_telling, expected)))
        try:
            with_jax = _difference(case, results(case, "jax"), expected)
        except Exception as e:
            with_jax = described(e)
        if with_jax:
            return Outcome(name, explained=f"{text}; with jax.checkpoint {with_jax}")
        if text.startswith("result ") and _is_rounding(case, expected):
            return Outcome(name, rounded=text)
        return Outcome(name, different=text)


def _is_rounding(case: Case, expected: list[Any]) -> bool:
    """Return whether a difference comes from rounding to fewer than 64 bits."""
    wide = dataclasses.replace(case, dtype="float64", program=_in_64_bits(case.program))
    if wide == case:
        return False
    exact, found = results(wide, "plain"), results(case, "remat")
    if _difference(wide, results(wide, "remat"), exact):
        return False
    for a, e, t in zip(found, expected, exact, strict=True):
        a, e, t = (np.asarray(x, np.float64) for x in (a, e, t))
        with np.errstate(invalid="ignore"):
            rounding = np.max(np.abs(e - t), where=np.isfinite(e - t), initial=0.0)
            error = np.max(np.abs(a - e), where=np.isfinite(a - e), initial=0.0)
        if error > 4 * rounding:
            return False
    return True


def _in_64_bits(program: Program) -> Program:
    """Return the program with its casts to narrower types replaced by casts to float64."""
    changed = []
    for instruction in program:
        parts = list(instruction)
        for place in bodies(instruction):
            parts[place] = _in_64_bits(parts[place])
        if parts[0] == "cast":
            parts[2] = "float64"
        changed.append(tuple(parts))
    return tuple(changed)


def _difference(case: Case, found: list[Any], expected: list[Any]) -> str:
    within = 1e-9
    if case.dtype == "float32" or has("half", case.program) or has("complex", case.program):
        within = 1e-4
    names = {case.dtype, *_dtypes(case.program)}
    if names & {"float32"}:
        within = 1e-4
    if names & {"bfloat16", "float16"} or has("narrow", case.program):
        within = 0.1
    if len(found) != len(expected):
        return f"{len(found)} results for {len(expected)}"
    for i, (a, e) in enumerate(zip(found, expected)):
        if a.dtype != e.dtype or a.shape != e.shape:
            return f"result {i}: {a.dtype}{a.shape} for {e.dtype}{e.shape}"
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        scale = 1 + np.max(np.abs(e), where=np.isfinite(e), initial=0.0)
        with np.errstate(invalid="ignore"):
            alike = (a == e) | (np.isnan(a) & np.isnan(e)) | (np.abs(a - e) <= within * scale)
        if not alike.all():
            return f"result {i}: {a.tolist()} for {e.tolist()}"
    return ""


def _is_telling(x: Any) -> bool:
    x = np.asarray(x, np.float64)
    return bool(np.any(np.isfinite(x) & (x != 0)))


def _dtypes(program: Program) -> Iterator[str]:
    for instruction in program:
        if instruction[0] == "cast":
            yield instruction[2]
        for place in bodies(instruction):
            yield from _dtypes(instruction[place])
