"""`remat.fori_loop` and `remat.while_loop`: gradients, counts, memory and limits."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify

from remat import _jax as internals, policies
from remat.errors import BudgetError, EffectError, ScheduleError, StepLimitError
from remat.ir.jaxprs import equations
from remat.loops import loop, online, states
from remat.loops.derivative import run
from remat.loops.halves import Masks, split_step
from remat.loops.schedules import Binomial, Mixed, Online, OnlineMixed
from remat.loops.while_loop import fori_loop, while_loop

X = jnp.array([0.4, 1.1])


def steps_of_sin(x: Any, n: Any, **options: Any) -> Any:
    """Iterate x ← sin(x) for `n` steps; a condition determines the number."""
    unfinished = lambda state: state[0] < n  # noqa: E731
    step = lambda state: (state[0] + 1, jnp.sin(state[1]))  # noqa: E731
    return while_loop(unfinished, step, (jnp.int32(0), x), **options)[1].sum()


def sin_by_scan(x: Any, n: int) -> Any:
    return lax.scan(lambda c, _: (jnp.sin(c), None), x, None, n)[0].sum()


def assert_close(a: Any, b: Any, rtol: float = 1e-4) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert jnp.allclose(x, y, rtol=rtol, atol=1e-5), (x, y)


@pytest.mark.parametrize("slots, store", [(1, "device"), (3, "device"), (5, "device"), (3, "host")])
def test_an_unknown_number_of_steps_is_reversed_by_the_online_schedule(
    slots: int, store: str
) -> None:
    ran: list[int] = []
    traced: list[int] = []
    x = jnp.linspace(0.4, 1.1, 64)

    def loss(x: Any, n: Any) -> Any:
        def step(state: Any) -> Any:
            traced.append(1)
            jax.debug.callback(lambda _: ran.append(1), state[0])
            return state[0] + 1, jnp.sin(state[1])

        first = (jnp.int32(0), x)
        options = {"checkpoints": slots, "store": store}
        return while_loop(lambda state: state[0] < n, step, first, **options)[1].sum()

    gradient = jax.jit(jax.grad(loss))
    for n in (0, 1, 2, 3, 4, 6, 7, 10, 11, 21, 22, 40, 57):
        ran.clear()
        found = gradient(x, jnp.int32(n)).block_until_ready()
        jax.effects_barrier()
        assert_close(found, jax.grad(sin_by_scan)(x, n))
        if store == "host":
            assert len(ran) == Online(n, slots).grad_forward_steps, n
            continue
        # The residuals of a step are as large as the float part of its state.
        assert len(ran) == OnlineMixed(n, tuple(range(1, slots + 2))).forward_steps, n
        if n <= (slots + 1) * (slots + 2) // 2:
            assert len(ran) == (Mixed.of(n, slots, 1, 1).forward_steps if n else 0), n
    assert len(traced) == 1


@pytest.mark.parametrize("sines, extra", [(3, 0), (1, 3), (2, 0)])
def test_the_compiled_online_schedule_runs_as_many_steps_as_its_residuals_say(
    sines: int, extra: int
) -> None:
    ran: list[int] = []
    x = jnp.linspace(0.4, 1.1, 64)

    def step(state: Any) -> Any:
        jax.debug.callback(lambda _: ran.append(1), state[0])
        x = state[1]
        for _ in range(sines):
            x = jnp.sin(x)
        # The values that are carried make a state larger than its residuals.
        return state[0] + 1, x, state[2]

    def loss(x: Any, n: Any) -> Any:
        first = (jnp.int32(0), x, jnp.zeros((extra, *x.shape), jnp.int32))
        return while_loop(lambda state: state[0] < n, step, first, checkpoints=7)[1].sum()

    gradient = jax.jit(jax.grad(loss))
    first = (jnp.int32(0), x, jnp.zeros((extra, *x.shape), jnp.int32))
    body, _, _ = internals.trace_call(step, first)
    halves = split_step(body, Masks((), (False, True, False), (), ()))
    spec = loop.Loop(body, 0, 3, 7, test=body, memory=0)
    reversal = online.reversal_with(spec, halves)
    assert reversal is not None
    state_steps = reversal.layout.rows[1].state / reversal.layout.rows[1].residuals
    for n in (1, 5, 9, 10, 30, 37, 60):
        ran.clear()
        found = gradient(x, jnp.int32(n)).block_until_ready()
        jax.effects_barrier()
        assert_close(found, jax.grad(sin_by_scan)(x, n * sines))
        assert len(ran) == OnlineMixed(n, reversal.blocks, state_steps).forward_steps, n


def test_a_loop_of_unknown_length_that_is_linear_runs_each_step_once() -> None:
    ran: list[int] = []

    def loss(x: Any, n: Any) -> Any:
        def step(state: Any) -> Any:
            jax.debug.callback(lambda _: ran.append(1), state[0])
            return state[0] + 1, state[1] * 0.5

        first = (jnp.int32(0), x)
        return while_loop(lambda state: state[0] < n, step, first, checkpoints=2)[1].sum()

    found = jax.jit(jax.grad(loss))(X, jnp.int32(20)).block_until_ready()
    jax.effects_barrier()
    assert_close(found, jnp.full(2, 0.5**20))
    assert len(ran) == 20


@pytest.mark.parametrize("slots", [2, 7, 70])
def test_the_compiled_online_choice_is_that_of_the_schedule(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half of the steps read the choice from the table, half compute it.
    monkeypatch.setattr(states, "ONLINE_STEPS_KNOWN", 40)
    state = jnp.float32(1.0)
    test, _, _ = internals.trace_call(lambda c: c[0] < 1.0, [state])
    body, _, _ = internals.trace_call(lambda c: [c[0] * 0.99], [state])
    for n in (39, 80):
        spec = loop.Loop(body, 0, 1, slots, test=test, test_reads=(0, 0, 1), max_steps=n)
        held = jax.jit(lambda x, s=spec: states.sweep(s, loop.Inputs([], [x], [], []))[1])(0.5)
        found = tuple(int(start) for start in held.starts[: int(held.top)])
        assert found == Online(n, slots).positions, n
        assert int(held.starts[int(held.top)]) == n - 1


def test_no_choice_is_computed_while_slots_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    weighed: list[int] = []
    choice = states.online_choice

    def counted(np_: Any, starts: Any, step: Any, slots: int) -> Any:
        if np_ is jnp:
            jax.debug.callback(lambda _: weighed.append(1), step)
        return choice(np_, starts, step, slots)

    monkeypatch.setattr(states, "online_choice", counted)
    monkeypatch.setattr(states, "ONLINE_STEPS_KNOWN", 2)
    options = {"checkpoints": 9, "policy": policies.nothing_saveable}
    gradient = jax.jit(jax.grad(lambda x, n: steps_of_sin(x, n, **options)))
    for n, times in ((10, 0), (13, 3)):
        assert_close(gradient(X, n), jax.grad(sin_by_scan)(X, n))
        jax.effects_barrier()
        assert len(weighed) == times


def test_gradients_of_a_while_loop_agree_with_finite_differences() -> None:
    def loss(a: Any, b: Any) -> Any:
        # The number of iterations depends on the values; the matrix is closed over.
        matrix = jnp.array([[0.8, 0.3], [-0.2, 0.9]]) * b
        run = lambda v: jnp.tanh(matrix @ v) * 0.95  # noqa: E731
        out = while_loop(lambda v: jnp.sum(v**2) > 0.05, run, a, max_steps=200, checkpoints=4)
        return jnp.sum(out * jnp.array([1.0, -2.0]))

    with jax.enable_x64(True):
        a, b = jnp.array([1.3, -0.7]), jnp.float64(0.98)
        found = jax.jit(jax.grad(loss, (0, 1)))(a, b)
        eps = 1e-6
        for k in range(2):
            d = jnp.zeros(2).at[k].set(eps)
            assert_close(found[0][k], (loss(a + d, b) - loss(a - d, b)) / (2 * eps), 1e-6)
        assert_close(found[1], (loss(a, b + eps) - loss(a, b - eps)) / (2 * eps), 1e-6)


TRANSFORMS: dict[str, Callable] = {
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),)),
    "hessian": lambda f: jax.hessian(f),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x])),
    "grad of vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])).sum()),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_agrees_with_a_scan(name: str) -> None:
    transform = TRANSFORMS[name]
    ours = jax.jit(transform(lambda x: steps_of_sin(x, 11, checkpoints=3)))
    assert_close(ours(X), transform(lambda x: sin_by_scan(x, 11))(X))


@pytest.mark.parametrize("inner", [0, 1])
def test_second_derivatives_of_a_loop_in_the_body_of_a_scan_agree_with_a_scan(inner: int) -> None:
    def mixed(steps: Callable) -> Any:
        def outer(a: Any, b: Any) -> Any:
            step = lambda c, _: ((c[0] * jnp.sin(c[1]), steps(c[1])), None)  # noqa: E731
            return lax.scan(step, (a, b), None, 2)[0][0].sum()

        # With inner=0 the first derivative does not involve the loop, and the second one does.
        first = lambda b: jax.grad(outer, inner)(X, b).sum()  # noqa: E731
        return jax.vmap(jax.grad(first))(jnp.stack([X, 2 * X]))

    ours = lambda c: steps_of_sin(c, 3, checkpoints=2) * c  # noqa: E731
    assert_close(mixed(ours), mixed(lambda c: sin_by_scan(c, 3) * c))


def on_two_devices(f: Callable, *specs: Any) -> Callable:
    """Return the sum of `f` over the shards of its last argument, differentiated by the first."""
    spec = jax.sharding.PartitionSpec("d")
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(f, mesh=mesh, in_specs=(*specs, spec), out_specs=spec)
    return jax.jit(jax.grad(lambda *args: mapped(*args).sum()))


def steps_of_this_device(x: Any) -> Any:
    return jnp.int32(3) - (jnp.sum(x) > 1).astype(jnp.int32)


def test_devices_of_a_shard_map_may_run_different_numbers_of_steps() -> None:
    def ours(x: Any) -> Any:
        end = steps_of_this_device(x)
        return fori_loop(0, end, lambda i, c: jnp.sin(c) + i, x, checkpoints=2)

    def masked(x: Any) -> Any:
        run = lambda c, i: (jnp.where(i < steps_of_this_device(x), jnp.sin(c) + i, c), None)  # noqa: E731
        return lax.scan(run, x, jnp.arange(3.0))[0]

    with jax.numpy_dtype_promotion("standard"):
        assert_close(on_two_devices(ours)(X), on_two_devices(masked)(X))


@pytest.mark.parametrize("loop", [fori_loop, while_loop])
def test_gradients_are_not_summed_over_devices_that_run_different_numbers_of_steps(
    loop: Callable,
) -> None:
    spec = jax.sharding.PartitionSpec()

    def local(w: Any, x: Any, cast: Callable) -> Any:
        end, w = steps_of_this_device(x), cast(w)
        if loop is fori_loop:
            return fori_loop(0, end, lambda _, c: jnp.sin(w * c), x, checkpoints=2)
        unfinished = lambda c: c[0] < end  # noqa: E731
        step = lambda c: (c[0] + 1, jnp.sin(w * c[1]))  # noqa: E731
        return while_loop(unfinished, step, (jnp.int32(0), x), checkpoints=2)[1]

    with pytest.raises(EffectError, match=r"varies over the axes \('d',\)"):
        on_two_devices(lambda w, x: local(w, x, lambda w: w), spec)(jnp.float32(1.1), X)
    varying = lambda w: lax.pcast(w, "d", to="varying")  # noqa: E731
    found = on_two_devices(lambda w, x: local(w, x, varying), spec)(jnp.float32(1.1), X)
    each = [
        jax.grad(lambda w, x=x, n=n: lax.fori_loop(0, n, lambda _, c: jnp.sin(w * c), x))(1.1)
        for x, n in zip(X, (3, 2))
    ]
    assert_close(found, sum(each))


def test_each_lane_of_a_batch_stops_by_itself() -> None:
    ns = jnp.array([0, 3, 12], jnp.int32)
    lanes = jax.jit(jax.vmap(jax.grad(lambda x, n: steps_of_sin(x, n, checkpoints=2)), (None, 0)))
    assert_close(lanes(X, ns), jnp.stack([jax.grad(sin_by_scan)(X, int(n)) for n in ns]))


@pytest.mark.parametrize("checkpoints", [1, 2])
def test_lanes_that_are_done_do_not_keep_the_backward_pass_from_ending(checkpoints: int) -> None:
    def steps_of_sin(x: Any, n: Any) -> Any:
        return fori_loop(0, n, lambda _, c: jnp.sin(c), x, checkpoints=checkpoints)

    counts = np.array([2, 0, 3], np.int32)
    found = jax.jit(jax.vmap(jax.grad(steps_of_sin), (None, 0)))(1.0, counts)
    expected = [math.prod(math.cos(c) for c in (1.0, math.sin(1.0))), 1.0]
    np.testing.assert_allclose(found[:2], expected, rtol=1e-5)


@pytest.mark.parametrize("way", [{"checkpoints": 3}, {"budget": "1KiB"}, {}], ids=str)
def test_fori_loops_have_gradients_with_concrete_and_with_traced_bounds(way: dict) -> None:
    def loss(fori: Callable, **way: Any) -> Callable:
        def run(x: Any, first: Any, last: Any) -> Any:
            body = lambda i, c: jnp.sin(c) * (1 + 0.1 * jnp.asarray(i, c.dtype))  # noqa: E731
            return fori(first, last, body, x, **way).sum()

        return run

    ours, theirs = jax.grad(loss(fori_loop, **way)), jax.grad(loss(lax.fori_loop))
    compiled = jax.jit(ours)
    for first, last in ((0, 0), (2, 1), (0, 9), (-3, 20)):
        assert_close(ours(X, first, last), theirs(X, first, last))
        assert_close(compiled(X, first, last), theirs(X, first, last))


SMALL = ["int4", "uint4", "int8", "uint8", "int16", "uint16"]
WIDE = ["int32", "uint32", "int64", "uint64"]


def counted(fori: Callable) -> Callable:
    """Return the number of steps, the last index, and the types of the index that the body saw."""

    def run(first: Any, last: Any) -> Any:
        types: list[Any] = []

        def body(i: Any, state: Any) -> Any:
            types.append((i.dtype, i.weak_type))
            return state[0] + 1, lax.convert_element_type(i, jnp.int32)

        return fori(first, last, body, (jnp.int32(0), jnp.int32(-1))), types[-1:]

    return run


@pytest.mark.parametrize("dtype", SMALL + WIDE)
def test_fori_loops_run_the_steps_of_lax_for_every_integer_type(dtype: str) -> None:
    least, most = (int(b) for b in (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max))
    spans = [(5, 3), (3, 5), (most, least), (most - 3, most), (least, least + 3)]
    spans += [(least, most), (least + 1, most)] if dtype in SMALL else []
    with jax.enable_x64(dtype.endswith("64")):
        for fori in (fori_loop, lax.fori_loop):
            # Compiled once for all ranges.
            found: Any = jax.jit(lambda a, b, f=fori: counted(f)(a, b)[0])
            counts = [found(jnp.asarray(a, dtype), jnp.asarray(b, dtype)) for a, b in spans]
            if fori is fori_loop:
                ours = counts
        assert [tuple(map(int, c)) for c in ours] == [tuple(map(int, c)) for c in counts]


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("bounds", ["int8", "uint8", "int32", "uint32", "int", "mixed"])
def test_the_index_of_a_fori_loop_has_the_type_that_lax_gives_it(bounds: str, traced: bool) -> None:
    first, last = (1, jnp.int8(4)) if bounds == "mixed" else (1, 4)
    if bounds not in ("mixed", "int"):
        first, last = jnp.asarray(first, bounds), jnp.asarray(last, bounds)
    types = []
    for fori in (fori_loop, lax.fori_loop):
        if traced:
            found: list[Any] = []
            run = lambda a, b, f=fori, found=found: found.extend(counted(f)(a, b)[1])  # noqa: E731
            jax.eval_shape(run, first, last)
        else:
            found = counted(fori)(first, last)[1]
        types.append(found)
    assert types[0] == types[1]


def test_gradients_are_right_where_the_span_exceeds_the_type_of_the_index() -> None:
    gradient = jax.jit(jax.grad(lambda x, a, b: fori_loop(a, b, lambda _, c: jnp.sin(c), x)))
    for dtype, first, last, n in (("int8", -100, 100, 200), ("uint8", 5, 3, 0)):
        found = gradient(0.7, jnp.asarray(first, dtype), jnp.asarray(last, dtype))
        assert_close(found, jax.grad(lambda x, n=n: sin_by_scan(x, n))(0.7))


@pytest.mark.parametrize("slots", [1, 3])
def test_gradients_are_right_where_the_compiler_finds_the_number_of_steps(slots: int) -> None:
    def loss(x: Any) -> Any:
        body = lambda _, c: jnp.sin(c)  # noqa: E731
        return fori_loop(0, x.shape[0], body, x[0], checkpoints=slots)

    # The length is an input of the program until an exported function is called.
    (n,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(jax.grad(loss)))(jax.ShapeDtypeStruct((n,), X.dtype))
    for steps in (2, 3):
        found = exported.call(jnp.full(steps, 0.7, X.dtype))[0]
        assert_close(found, jax.grad(lambda x, n=steps: sin_by_scan(x, n))(jnp.asarray(0.7)))


def test_a_span_of_all_integers_is_counted_without_overflow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = []
    module = sys.modules[fori_loop.__module__]

    def note(spec: Any, inputs: Any) -> Any:
        jax.debug.callback(lambda n: counts.append(int(n)), inputs.steps[0])
        return loop.Results(inputs.carry, [], [])

    monkeypatch.setattr(module, "run", note)
    for dtype in ("int32", "uint32", "int64", "uint64"):
        with jax.enable_x64(dtype.endswith("64")):
            info = jnp.iinfo(dtype)
            first, last = jnp.asarray(info.min, dtype), jnp.asarray(info.max, dtype)
            jax.jit(lambda a, b: fori_loop(a, b, lambda _, c: c, 0.5))(first, last)
            jax.effects_barrier()
        assert counts.pop() == int(info.max) - int(info.min)


def test_the_gradient_of_more_steps_than_can_be_counted_is_not_a_number() -> None:
    state = [jnp.int32(0), jnp.float32(1.0)]
    body, _, _ = internals.trace_call(lambda c: [c[0] + 1, c[1] * 1.0001], state)
    for n in (65534, 66000):
        test, _, _ = internals.trace_call(lambda c, n=n: c[0] < n, state)
        reads = {"test": test, "test_reads": (0, 0, 2), "counter": jnp.uint16}
        spec = loop.Loop(body, 0, 2, 20, **reads)
        f = lambda x, s=spec: run(s, loop.Inputs([], [state[0], x], [], [])).carry[1]  # noqa: E731
        value, found = jax.jit(jax.value_and_grad(f))(1.0)
        assert value > 700
        assert jnp.isnan(found) if n > 65534 else jnp.allclose(found, value)


def test_a_fori_loop_with_traced_bounds_runs_the_optimal_number_of_steps() -> None:
    ran: list[int] = []

    def loss(x: Any, n: Any) -> Any:
        def body(i: Any, c: Any) -> Any:
            jax.debug.callback(lambda _: ran.append(1), i)
            return jnp.sin(c)

        return fori_loop(0, n, body, x, checkpoints=5)

    gradient = jax.jit(jax.grad(loss))
    for n in (1, 10, 100, 300):
        ran.clear()
        gradient(0.5, n).block_until_ready()
        jax.effects_barrier()
        assert len(ran) == Binomial(n, 5).grad_forward_steps


def test_peak_memory_of_a_while_loop_depends_on_checkpoints_only() -> None:
    x = jnp.ones(50_000)

    def temp_bytes(slots: int) -> int:
        f = jax.jit(jax.grad(lambda x, n: steps_of_sin(x, n, checkpoints=slots)))
        return f.lower(x, 10**6).compile().memory_analysis().temp_size_in_bytes

    few, many = temp_bytes(10), temp_bytes(50)
    assert few <= (10 + 4) * 4 * x.size + 4096
    assert 39 * 4 * x.size <= many - few <= 41 * 4 * x.size


@pytest.mark.parametrize("sines, states", [(1, 30), (4, 30), (1, 5.2)])
def test_temporaries_of_a_while_loop_are_within_its_budget(sines: int, states: float) -> None:
    x, budget = jnp.ones(20_000), int(states * 80_000)

    def step(state: Any) -> Any:
        y = state[1]
        for _ in range(sines):
            y = jnp.sin(y)
        return state[0] + 1, y

    def loss(x: Any, n: Any) -> Any:
        unfinished = lambda state: state[0] < n  # noqa: E731
        return while_loop(unfinished, step, (jnp.int32(0), x), budget=budget)[1].sum()

    found = jax.jit(jax.grad(loss)).lower(x, 10**6).compile().memory_analysis()
    assert 0.9 * budget <= found.temp_size_in_bytes <= 1.05 * budget
    # One state less than the smallest loop needs, so it is refused.
    with pytest.raises(BudgetError, match="four times a state"):
        while_loop(lambda y: y.sum() < 0, jnp.sin, x, budget=4 * 80_000)


@pytest.mark.parametrize("way", [{}, {"policy": policies.nothing_saveable}, {"store": "host"}])
def test_a_distant_limit_takes_neither_memory_nor_work(way: dict) -> None:
    """`max_steps` is often a number that no loop reaches."""

    def values_kept(max_steps: int) -> int:
        gradient = jax.grad(lambda x: steps_of_sin(x, 5, max_steps=max_steps, **way))
        program = jax.make_jaxpr(gradient)(X).jaxpr
        return max(max(v.aval.shape, default=0) for eqn in equations(program) for v in eqn.outvars)

    few, many = values_kept(10**4), values_kept(10**6)
    assert few < many
    assert values_kept(2**32 - 2) == many
    with jax.enable_x64(True):
        assert values_kept(2**62) == many
    found = jax.jit(jax.grad(lambda x: steps_of_sin(x, 5, max_steps=2**32 - 2, **way)))(X)
    assert_close(found, jax.grad(sin_by_scan)(X, 5))


def test_a_loop_over_nothing_has_a_gradient() -> None:
    def loss(x: Any) -> Any:
        return while_loop(lambda y: y.sum() < 0, jnp.sin, x).sum()

    assert jax.grad(loss)(jnp.zeros((0,))).shape == (0,)
    with jax.enable_x64(True):
        assert jax.grad(loss)(jnp.zeros((0,), "float64")).shape == (0,)


def test_exceeding_max_steps_is_an_error_outside_and_inside_of_jit() -> None:
    limit = {"max_steps": 5, "checkpoints": 2}
    with pytest.raises(StepLimitError, match=r"max_steps=5 steps\. Raise max_steps="):
        steps_of_sin(X, 6, **limit)
    with pytest.raises(StepLimitError):
        jax.grad(lambda x: steps_of_sin(x, 6, **limit))(X)
    for f in (steps_of_sin, jax.grad(steps_of_sin)):
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"max_steps=5 steps\. Raise max_steps="
        ):
            jax.block_until_ready(jax.jit(lambda x, n, f=f: f(x, n, **limit))(X, 6))
            jax.effects_barrier()
    # Reaching exactly the limit is not an error.
    assert_close(jax.jit(lambda x, n: steps_of_sin(x, n, **limit))(X, 5), sin_by_scan(X, 5))


def test_exceeding_max_steps_can_be_checked_by_checkify() -> None:
    f = jax.grad(lambda x, n: steps_of_sin(x, n, max_steps=5, on_max_steps="checkify"))
    checked = checkify.checkify(jax.jit(f))
    assert checked(X, 5)[0].get() is None
    assert "max_steps=5" in str(checked(X, 6)[0].get())


def test_truncate_returns_the_value_after_max_steps() -> None:
    f = lambda x: steps_of_sin(x, 9, max_steps=5, on_max_steps="truncate")  # noqa: E731
    assert_close(jax.value_and_grad(f)(X), jax.value_and_grad(lambda x: sin_by_scan(x, 5))(X))


def test_misuse_is_refused() -> None:
    with pytest.raises(ScheduleError, match="'error', 'checkify' or 'truncate'"):
        steps_of_sin(X, 3, on_max_steps="ignore")
    for limit in (-1, 2.5, "3", True, 2**32):
        with pytest.raises(ScheduleError, match="max_steps"):
            steps_of_sin(X, 3, max_steps=limit)
    with pytest.raises(ScheduleError, match="checkpoints must be at least 1, not 0"):
        steps_of_sin(X, 3, checkpoints=0)
    with pytest.raises(ScheduleError, match="exclude each other"):
        steps_of_sin(X, 3, checkpoints=2, budget="1MiB")
    with pytest.raises(BudgetError, match="smallest keeps"):
        steps_of_sin(X, 3, budget=10)


@pytest.mark.parametrize(
    "cond, body",
    [
        (lambda c: c, lambda c: c),
        (lambda c: c < 3, lambda c: (c, c)),
        (lambda c: c < 3, lambda c: c.astype(jnp.float32)),
    ],
)
def test_ill_typed_loops_raise_what_lax_raises(cond: Callable, body: Callable) -> None:
    with pytest.raises(TypeError) as theirs:
        lax.while_loop(cond, body, jnp.int32(0))
    with pytest.raises(TypeError) as ours:
        while_loop(cond, body, jnp.int32(0))
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("three", [np.int64(3), np.int8(3), jnp.int32(3)], ids=repr)
def test_integers_of_every_library_are_accepted(three: Any) -> None:
    assert_close(steps_of_sin(X, 3, max_steps=three, checkpoints=three), sin_by_scan(X, 3))
    body = lambda _, c: jnp.sin(c)  # noqa: E731
    found = fori_loop(three - three, three, body, X, checkpoints=three, unroll=three)
    assert_close(found.sum(), sin_by_scan(X, 3))


@pytest.mark.parametrize("bound", [2.5, "3", None, jnp.float32(3), jnp.array([3]), np.True_])
def test_bounds_that_are_not_integers_are_refused(bound: Any) -> None:
    body = lambda _, c: c  # noqa: E731
    with pytest.raises(ScheduleError, match="upper must be an integer without axes, not"):
        fori_loop(0, bound, body, X)
    with pytest.raises(ScheduleError, match="lower must be an integer without axes, not"):
        fori_loop(bound, 3, body, X)
    if isinstance(bound, jax.Array):
        with pytest.raises(ScheduleError, match="upper must be an integer without axes, not"):
            jax.jit(lambda n: fori_loop(0, n, body, X))(bound)


def test_only_a_known_number_of_steps_is_unrolled() -> None:
    body = lambda _, c: jnp.sin(c)  # noqa: E731
    for unroll in (None, False, True, 1):
        n = jax.jit(lambda n, u=unroll: fori_loop(0, n, body, X, unroll=u).sum())(3)
        assert_close(n, sin_by_scan(X, 3))
    with pytest.raises(ScheduleError, match="unroll=2 needs bounds"):
        jax.jit(lambda n: fori_loop(0, n, body, X, unroll=2))(3)
    for unroll in (0, 1.5, "2"):
        with pytest.raises(ScheduleError, match="unroll must be"):
            fori_loop(0, 3, body, X, unroll=unroll)  # type: ignore[arg-type]


def test_integers_alone_can_be_looped_over() -> None:
    assert int(while_loop(lambda k: k < 7, lambda k: k + 2, 0)) == 8
    assert int(fori_loop(0, 4, lambda i, k: k + i, 0)) == 6


def test_a_limit_that_any_example_reaches_is_an_error() -> None:
    def halved(x: Any) -> Any:
        return while_loop(lambda c: c > 1, lambda c: c / 2, x, max_steps=3)

    np.testing.assert_array_equal(jax.vmap(halved)(jnp.array([2.0, 8.0])), [1.0, 1.0])
    with pytest.raises(StepLimitError, match="max_steps=3"):
        jax.vmap(halved)(jnp.array([2.0, 100.0]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="max_steps=3"):
        jax.block_until_ready(jax.jit(jax.vmap(halved))(jnp.array([2.0, 100.0])))
        jax.effects_barrier()
