"""Schedules written into a step's program: results do not depend on recomputation."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir

from planner.random_decisions import random_decisions
from planner.region_cases import CASES
from planner.variants import prices_of_skipped
from remat import _jax
from remat.errors import BudgetError
from remat.ir.equations import is_fusible
from remat.ir.flops import flops_of_program
from remat.ir.jaxprs import equations
from remat.ir.restriction import without_marks
from remat.planner.auto import WITH_MARKS, tracing
from remat.planner.bodies import program_of_flat
from remat.planner.decisions import applied
from remat.planner.priced_step import PricedStep
from remat.planner.rewrite import (
    Burst,
    Decisions,
    decisions_of,
    flattened,
    following,
    rewritten,
    rewritten_in_two,
)
from remat.planner.step_model import StepModel
from remat.program.fusion import fuse
from remat.solvers.grid import GridSearch
from transform.support import assert_same

W = [np.linspace(-1, 1, 36).reshape(6, 6).astype(np.float32) * (i + 1) / 3 for i in range(4)]
X = np.linspace(0, 1, 30).reshape(5, 6).astype(np.float32)


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def flat_of(step, *args):
    jaxpr, consts, _ = _jax.trace_call(step, *args)
    return flattened(jaxpr), [*consts, *jax.tree.leaves(args)]


def run(jaxpr, args):
    return jax.jit(lambda *xs: _jax.eval_jaxpr(jaxpr, (), *xs))(*args)


def assert_equal(actual, expected, rounding=1e-6):
    """Check that results are equal up to rounding, relative to the largest value of each."""
    for a, e in zip(actual, expected, strict=True):
        is_inexact = jnp.issubdtype(e.dtype, jnp.inexact)
        largest = float(jnp.abs(e).max(initial=1)) if is_inexact else 1.0
        assert_same(a, e, rtol=10 * rounding, atol=rounding * largest)


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_recomputation(name):
    """Two random schedules of the whole step, and one of the part that `remat.auto` marks."""
    step, args = CASES[name]()
    flat, leaves = flat_of(step, *args)
    with tracing(WITH_MARKS):
        marked, _ = flat_of(step, *args)
    decisions = random_decisions(marked, 1)
    again = {n for burst in decisions.bursts for n in burst.again}
    assert not any(_jax.is_fixed(marked.eqns[n]) for n in again)
    inside = without_marks(rewritten(marked, decisions))
    assert not any(_jax.is_fixed(eqn) or _jax.is_marked(eqn) for eqn in equations(inside))

    expected = run(flat, leaves)
    for new in (*(rewritten(flat, random_decisions(flat, seed)) for seed in range(3)), inside):
        _jax.check_jaxpr(new)
        # Inside of fused kernels XLA keeps more digits than bfloat16 has.
        assert_equal(run(new, leaves), expected, 1e-2 if name == "bfloat16" else 1e-6)


def test_without_recomputation_the_program_stays():
    flat, _ = flat_of(jax.value_and_grad(loss), W, X)
    assert rewritten(flat, Decisions(frozenset(range(len(flat.eqns))), ())) is flat


def test_a_unit_begins_after_each_partial_sum():
    flat, leaves = flat_of(jax.value_and_grad(lambda w, x: loss([w] * 8, x)), W[0], X)
    sums = [i for i, eqn in enumerate(flat.eqns) if eqn.primitive.name == "add_any"]
    stored = frozenset(i for i, eqn in enumerate(flat.eqns) if not is_fusible(eqn))
    new = rewritten(flat, Decisions(stored | set(sums), (), partial_sums=tuple(sums[:-1])))
    units = [eqn for eqn in new.eqns if eqn.primitive.name == "remat"]
    assert len(units) == len(sums) - 2
    for unit in units:
        inner = [eqn.primitive.name for eqn in equations(unit.params["jaxpr"])]
        assert inner.count("add_any") == 1
    assert_equal(run(new, leaves), run(flat, leaves))


def test_each_burst_becomes_one_protected_unit():
    flat, leaves = flat_of(jax.value_and_grad(loss), W, X)
    dots = [i for i, eqn in enumerate(flat.eqns) if eqn.primitive.name == "dot_general"]
    tanhs = [i for i, eqn in enumerate(flat.eqns) if eqn.primitive.name == "tanh"]
    stored = frozenset((*dots, *tanhs, len(flat.eqns) - 1))
    bursts = (Burst(dots[-4], (tanhs[2],)), Burst(dots[-2], (tanhs[1],)))
    new = rewritten(flat, Decisions(stored, bursts))
    units = [eqn for eqn in new.eqns if eqn.primitive.name == "remat"]
    assert len(units) == 2 and all(fenced_inputs(eqn) for eqn in units)
    counted = [
        sum(e.primitive.name == "tanh" for e in equations(eqn.params["jaxpr"])) for eqn in units
    ]
    assert counted == [1, 1]
    assert_equal(run(new, leaves), run(flat, leaves))


def test_effects_happen_once_and_in_order():
    seen = []

    def step(weights, x):
        def shown(w, x):
            jax.debug.callback(lambda v: seen.append(float(v)), x[0, 0], ordered=True)
            return jnp.tanh(x @ w)

        def chatty(weights, x):
            for w in weights:
                x = shown(w, x)
            return jnp.mean(x)

        return jax.value_and_grad(chatty)(weights, x)

    flat, leaves = flat_of(step, W, X)
    jax.block_until_ready(run(flat, leaves))
    jax.effects_barrier()
    expected = list(seen)
    assert len(expected) == len(W)
    for seed in range(3):
        seen.clear()
        jax.block_until_ready(run(rewritten(flat, random_decisions(flat, seed)), leaves))
        jax.effects_barrier()
        assert seen == expected


def fenced_inputs(unit):
    """Return the inputs of a unit that its barrier includes."""
    flags = unit.params["prevent_cse"]
    return [
        v
        for v, flag in zip(
            unit.invars, flags if isinstance(flags, tuple) else (flags,) * len(unit.invars)
        )
        if flag
    ]


def test_arguments_that_are_read_together_with_fenced_values_are_not_fenced():
    """A barrier over an argument that is updated in place costs a copy."""

    def step(x, w, m):
        y = jnp.tanh(x @ w)
        z = jnp.sin(y) @ w
        return 0.9 * m + z * y

    flat, leaves = flat_of(step, X[:, :5], W[0][:5, :5], X[:, :5])
    x, w, m = flat.invars
    (tanh,) = (i for i, e in enumerate(flat.eqns) if e.primitive.name == "tanh")
    last = max(i for i, e in enumerate(flat.eqns) if e.primitive.name == "mul")
    scaled = next(i for i, e in enumerate(flat.eqns) if m in e.invars)
    stored = frozenset(range(len(flat.eqns))) - {scaled}

    def fenced(again, stored):
        new = rewritten(flat, Decisions(stored, (Burst(last, again),), ordered=True))
        assert_equal(run(new, leaves), run(flat, leaves))
        units = [eqn for eqn in new.eqns if eqn.primitive.name == "remat"]
        assert any(m in unit.invars for unit in units)
        return {v for unit in units for v in fenced_inputs(unit)} & {x, w, m}

    assert fenced((tanh,), stored) == set()
    # A product that is computed again could be merged, and one that is stored could be computed early.
    assert fenced((0, tanh), stored) == {x, w}
    assert fenced((tanh,), stored | {scaled}) == {m}


def test_arguments_that_may_be_gathered_are_fenced():
    """A gather that the partitioner inserts depends on the argument alone, so only a barrier delays it."""

    def step(x, w):
        y = jnp.tanh(x @ w)
        return (jnp.sin(y) @ w) * y

    flat, leaves = flat_of(step, X[:, :5], W[0][:5, :5])
    (tanh,) = (i for i, e in enumerate(flat.eqns) if e.primitive.name == "tanh")
    last = max(i for i, e in enumerate(flat.eqns) if e.primitive.name == "mul")
    stored = frozenset(range(len(flat.eqns)))
    for fences_arguments in (False, True):
        decisions = Decisions(
            stored, (Burst(last, (tanh,)),), ordered=True, fences_arguments=fences_arguments
        )
        new = rewritten(flat, decisions)
        units = [e for e in new.eqns if e.primitive.name == "remat" and flat.invars[1] in e.invars]
        assert units
        for unit in units:
            assert (flat.invars[1] in fenced_inputs(unit)) == fences_arguments
        assert_equal(run(new, leaves), run(flat, leaves))


def test_arguments_of_which_kernels_make_copies_are_fenced():
    """The gradient of a kernel copies its operands, and the copy of an argument could be made at any time."""
    x = np.ones((2, 8, 8, 3), np.float32)
    kernel = np.ones((3, 3, 3, 3), np.float32)

    def step(kernel, x):
        y = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(jnp.tanh(y) ** 2)

    flat, leaves = flat_of(jax.grad(step), kernel, x)
    last = max(i for i, e in enumerate(flat.eqns) if e.primitive.name == "conv_general_dilated")
    (tanh,) = (i for i, e in enumerate(flat.eqns) if e.primitive.name == "tanh")
    decisions = Decisions(frozenset(range(len(flat.eqns))), (Burst(last, (tanh,)),), ordered=True)
    units = [e for e in rewritten(flat, decisions).eqns if e.primitive.name == "remat"]
    readers = [unit for unit in units if flat.invars[1] in unit.invars]
    assert readers and all(flat.invars[1] in fenced_inputs(unit) for unit in readers)
    assert_equal(run(rewritten(flat, decisions), leaves), run(flat, leaves), rounding=1e-4)


def test_a_unit_that_could_start_early_waits_for_a_value_that_passes_through_it():
    """Recomputation from arguments alone depends on no earlier operation."""

    def step(x, y):
        a = jnp.sin(x)
        b = jnp.cos(y)
        for _ in range(3):
            b = jnp.tanh(b @ b.T) @ b
        return (a @ b.T).sum() + b.sum()

    flat, leaves = flat_of(step, X, X)
    sin = next(i for i, eqn in enumerate(flat.eqns) if eqn.primitive.name == "sin")
    last = max(i for i, eqn in enumerate(flat.eqns) if eqn.primitive.name == "dot_general")
    decisions = Decisions(frozenset(range(len(flat.eqns))), (Burst(last, (sin,)),))
    (unit,) = (e for e in rewritten(flat, decisions).eqns if e.primitive.name == "remat")
    computed = [v for v in unit.invars if _jax.is_var(v) and v not in flat.invars]
    assert computed, "the unit takes nothing but arguments"
    assert_equal(run(rewritten(flat, decisions), leaves), run(flat, leaves))


def test_constant_arrays_of_units_wait_for_their_units():
    """They are filled with a number that the unit takes, so nothing can make them before it."""

    def step(x):
        y = jnp.sin(x)
        for _ in range(3):
            y = jnp.tanh(y @ x.T) @ x
        return jnp.zeros((8, *y.shape)).at[3].add(y) + jnp.sin(x)

    flat, leaves = flat_of(step, X)
    sin = next(i for i, eqn in enumerate(flat.eqns) if eqn.primitive.name == "sin")
    last = max(i for i, eqn in enumerate(flat.eqns) if eqn.primitive.name == "dot_general")
    stored = frozenset(range(len(flat.eqns)))
    new = rewritten(flat, Decisions(stored, (Burst(last, (sin,)),), ordered=True))
    zeros = [
        (inner.invars[0], body)
        for body in (eqn.params["jaxpr"] for eqn in new.eqns if eqn.primitive.name == "remat")
        for inner in body.eqns
        if inner.primitive.name == "broadcast_in_dim"
        and inner.outvars[0].aval.shape == (8, *X.shape)
    ]
    assert zeros and all(v in body.invars for v, body in zeros)
    assert_equal(run(new, leaves), run(flat, leaves))


def test_units_share_no_array_of_a_number_that_they_multiply_by():
    """XLA for CPU would write the array once, from jaxlib 0.12 on, for sums of two units."""

    def step(x):
        y = jnp.sin(x)
        differences = y[:, None] - y[None]
        first = jnp.sum(2.0 * differences * y[:, None], 0)
        return first, jnp.sum(2.0 * differences * y, 1)

    flat, leaves = flat_of(step, np.linspace(0, 1, 256 * 16, dtype=np.float32).reshape(256, 16))
    sin, *sums = (i for i, e in enumerate(flat.eqns) if e.primitive.name in ("sin", "reduce_sum"))
    bursts = tuple(Burst(at, (sin,)) for at in sums)
    new = rewritten(flat, Decisions(frozenset((sin, *sums)), bursts))
    passed = jax.jit(lambda *xs: _jax.eval_jaxpr(new, (), *xs)).lower(*leaves).compile()
    assert passed.memory_analysis().temp_size_in_bytes < 256 * 256 * 16 * 4
    assert_equal(passed(*leaves), run(flat, leaves), rounding=1e-5)


def test_units_multiply_by_the_reciprocals_of_numbers_that_they_divide_by():
    """A compiler that does not know the number would divide, and store what several kernels read."""

    def step(x):
        y = jnp.sin(x)
        return (y / 128.0) @ x.T, (y / 3.0).T @ x

    flat, leaves = flat_of(step, X)
    sin, *dots = (i for i, e in enumerate(flat.eqns) if e.primitive.name in ("sin", "dot_general"))
    bursts = tuple(Burst(at, (sin,)) for at in dots)
    new = rewritten(flat, Decisions(frozenset((sin, *dots)), bursts))
    of_units = [
        (eqn.primitive.name, [_jax.is_var(v) for v in eqn.invars])
        for unit in new.eqns
        if unit.primitive.name == "remat"
        for eqn in unit.params["jaxpr"].eqns
        if eqn.primitive.name in ("mul", "div")
    ]
    assert of_units == [("mul", [True, True]), ("div", [True, False])]
    assert_equal(run(new, leaves), run(flat, leaves))


def test_a_unit_derives_a_value_once_from_the_same_computation():
    def step(x):
        tripled = 3 * jnp.sin(x)
        return tripled @ x.T, tripled.T @ x

    flat, leaves = flat_of(step, X)
    sin, *dots = (i for i, e in enumerate(flat.eqns) if e.primitive.name in ("sin", "dot_general"))
    for bursts, n_products in (
        ((Burst(dots[0], (sin,)),), 1),
        ((Burst(dots[0], (sin,)), Burst(dots[1], (sin,))), 2),
    ):
        new = rewritten(flat, Decisions(frozenset((sin, *dots)), bursts))
        assert sum(e.primitive.name == "mul" for e in equations(new)) == n_products
        assert_equal(run(new, leaves), run(flat, leaves))


def test_recomputation_for_a_second_gradient_waits_for_the_first():
    """Only results remain of the first gradient, so the unit depends on one of these."""

    def step(weights, x):
        y = jnp.cos(x)
        one = jax.grad(loss)(weights, x)
        two = jax.grad(loss)(weights, y)
        return jax.tree.map(lambda w, a, b: w - a - b, weights, one, two)

    flat, leaves = flat_of(step, W, X)
    (cos,) = (i for i, eqn in enumerate(flat.eqns) if eqn.primitive.name == "cos")
    (y,) = flat.eqns[cos].outvars
    reader = next(i for i, eqn in enumerate(flat.eqns) if y in eqn.invars)
    stored = frozenset(i for i, e in enumerate(flat.eqns) if i >= reader or not is_fusible(e))
    decisions = Decisions(stored | {cos}, (Burst(reader, (cos,)),))
    (unit,) = (e for e in rewritten(flat, decisions).eqns if e.primitive.name == "remat")
    computed = {v for v in unit.invars if _jax.is_var(v)} - set(flat.invars)
    assert any(v.aval.shape == W[0].shape for v in computed), "the unit takes no gradient"
    assert_equal(run(rewritten(flat, decisions), leaves), run(flat, leaves))


def test_a_unit_waits_for_equations_that_free_a_large_value():
    """The product before it stores next to nothing, and frees a matrix."""
    x = np.ones((64, 64), np.float32)

    def step(x, y, v):
        large = jnp.sin(x)
        w = jnp.tanh(y)
        z = jnp.cos(x)
        small = large @ v
        return small, jnp.sum(w @ z)

    flat, leaves = flat_of(step, x, x, x[0])
    second = max(i for i, e in enumerate(flat.eqns) if e.primitive.name == "dot_general")
    (tanh,) = (i for i, e in enumerate(flat.eqns) if e.primitive.name == "tanh")
    stored = frozenset(range(len(flat.eqns)))
    new = rewritten(flat, Decisions(stored, (Burst(second, (tanh,)),)))
    (product,) = (eqn for eqn in new.eqns if eqn.primitive.name == "dot_general")
    (unit,) = (eqn for eqn in new.eqns if eqn.primitive.name == "remat")
    assert set(product.outvars) <= set(unit.invars), "the unit may start before the product"
    assert_equal(run(new, leaves), run(flat, leaves), rounding=1e-4)


def test_ordered_programs_have_small_units():
    flat, leaves = flat_of(jax.value_and_grad(loss), W, X)
    stored = frozenset(range(len(flat.eqns)))
    decisions = Decisions(stored, (Burst(len(W) * 3, (1,)),), ordered=True)
    new = rewritten(flat, decisions)
    units = [eqn for eqn in new.eqns if eqn.primitive.name == "remat"]
    assert len(units) >= (len(flat.eqns) - len(W) * 3) // 4 - 1
    assert all(len(eqn.params["jaxpr"].eqns) <= 5 for eqn in units)
    assert_equal(run(new, leaves), run(flat, leaves))


def test_costly_values_that_are_not_stored_are_computed_again_in_units():
    """The backward pass computes exponentials from the products, without any burst."""

    def residual(weights, x):
        for w in weights:
            x = x + jnp.exp(x @ w - 1)
        return jnp.mean(jnp.tanh(x))

    flat, leaves = flat_of(jax.value_and_grad(residual), W, X)
    program = program_of_flat(flat)
    fused = fuse(program, lambda *_: 1.0, costly_inside=True, apart=True)
    steps = [("compute", node.id) for node in fused.graph.nodes]
    decisions = decisions_of(program, fused, steps, recomputes_costly=True)
    costly = {i for i, eqn in enumerate(flat.eqns) if eqn.primitive.name == "exp"}
    assert costly - decisions.stored
    assert not decisions.changes_nothing
    new = rewritten(flat, decisions)
    assert any(eqn.primitive.name == "remat" for eqn in new.eqns)
    assert_equal(run(new, leaves), run(flat, leaves))


def test_following_decisions_gives_the_results_of_the_step():
    step = jax.value_and_grad(loss)
    follow = following(step, lambda flat: rewritten(flat, random_decisions(flat, 1)))
    value, gradients = jax.jit(follow)(W, X)
    expected, expected_gradients = jax.jit(step)(W, X)
    assert_equal([value, *gradients], [expected, *expected_gradients])


def test_static_arguments_stay_static():
    def step(n, x, kind="sin"):
        return getattr(jnp, kind)(x * n).sum()

    follow = jax.jit(
        following(step, lambda flat: flat),
        static_argnums=0,
        static_argnames="kind",
    )
    assert follow(3, X, kind="cos") == pytest.approx(float(jnp.cos(X * 3).sum()), rel=1e-6)


def test_the_program_as_written_writes_no_partial_sums():
    flat, _ = flat_of(jax.value_and_grad(lambda w, x: loss([w] * 16, x)), W[0], X[:2])
    model = StepModel(PricedStep(flat, lambda flops, moved, dtype: flops + moved))
    for variant in model.variants:
        assert model.as_written(variant).model_bytes > 2 * model.within(variant, 10**6).model_bytes


def test_fewer_bytes_take_more_recomputation():
    deep, wide = [np.eye(64, dtype=np.float32)] * 8, np.ones((500, 64), np.float32)
    flat, _ = flat_of(jax.value_and_grad(loss), deep, wide)
    model = StepModel(PricedStep(flat, lambda flops, moved, dtype: flops + moved))
    for variant in model.variants:
        smallest = model.smallest(variant)
        found = []
        for n_bytes in range(smallest.model_bytes, 2 * 2**20, 2**17):
            proposal = model.within(variant, n_bytes)
            assert proposal.model_bytes <= n_bytes
            assert proposal.lower_bound_seconds <= proposal.extra_seconds
            assert (proposal.extra_seconds > 0) == bool(proposal.decisions.outside.bursts)
            found.append(proposal.extra_seconds)
        assert found == sorted(found, reverse=True) and found[0] > found[-1] == 0
        with pytest.raises(BudgetError):
            model.within(variant, 1000)


def test_variants_that_are_not_computed_would_gain_little():
    deep, wide = [np.eye(64, dtype=np.float32)] * 10, np.ones((500, 64), np.float32)
    flat, _ = flat_of(jax.value_and_grad(loss), deep, wide)
    model = StepModel(
        PricedStep(flat, lambda flops, moved, dtype: flops * 0.02 + moved, by_flops=True)
    )
    skipped = prices_of_skipped(model, 2**17)
    assert all(price >= 0.8 * than for price, than in skipped) and len(skipped) >= 4


def test_writing_a_program_does_not_look_at_all_live_values_for_each_unit(monkeypatch):
    n_looked_at = 0
    is_dropped = _jax.is_dropped

    def counting(v):
        nonlocal n_looked_at
        n_looked_at += 1
        return is_dropped(v)

    def looked_at(n_layers):
        """Return how many values are looked at when a program is written that takes half of the memory."""
        nonlocal n_looked_at
        deep = [np.eye(64, dtype=np.float32)] * n_layers
        flat, _ = flat_of(jax.value_and_grad(loss), deep, np.ones((500, 64), np.float32))
        model = StepModel(PricedStep(flat, lambda flops, moved, dtype: flops + moved))
        half = model.within("written", model.as_written("written").model_bytes // 2)
        n_looked_at = 0
        rewritten(flat, half.decisions.outside)
        assert len(half.decisions.outside.bursts) >= 5
        return n_looked_at

    monkeypatch.setattr(_jax, "is_dropped", counting)
    few, many = looked_at(20), looked_at(80)
    assert 20 <= few <= many <= 6 * few


def test_proposals_take_no_smaller_share_of_the_time_than_of_the_flops():
    def shared(weights, x):
        """Return a loss with cheap values that many products read, each of which may recompute them."""
        total = 0.0
        for w in weights:
            y = ((((x * 2 + 1) * x - 1) * x + 2) * x - 3) * x
            total += jnp.mean(jnp.tanh(y @ w) ** 2)
            x = x + y @ w
        return total

    deep, wide = [np.eye(32, dtype=np.float32) * 1e-2] * 6, np.ones((500, 32), np.float32)
    flat, _ = flat_of(jax.value_and_grad(shared), deep, wide)
    model = StepModel(PricedStep(flat, lambda flops, moved, dtype: flops * 1e-3 + moved))
    least = model.smallest("fused").model_bytes
    seen = []
    for n_bytes in range(int(1.1 * least), 3 * least, least // 4):
        proposal = model.within("fused", n_bytes)
        if not proposal.decisions.outside.changes_nothing:
            extra = flops_of_program(applied(flat, proposal.decisions)) / flops_of_program(flat) - 1
            assert proposal.extra_seconds >= 0.999 * extra * model.step.seconds
            seen.append(extra)
    assert max(seen) > 0


def inputs_of_all_steps(n):
    """Return a loss whose products with the inputs could all be computed first."""

    def loss(w, v, xs):
        h = jnp.zeros_like(xs[0])
        for t in range(n):
            h = jnp.tanh(xs[t] @ w + h @ v)
        return jnp.mean(h**2)

    return jax.value_and_grad(loss)


def test_products_of_inputs_wait_for_their_turn_in_ordered_programs():
    args = W[0], W[1], np.stack([X] * 12)
    flat, leaves = flat_of(inputs_of_all_steps(12), *args)
    stored = frozenset(i for i, eqn in enumerate(flat.eqns) if not is_fusible(eqn))
    tanhs = {i for i, eqn in enumerate(flat.eqns) if eqn.primitive.name == "tanh"}
    stored |= tanhs
    last = max(tanhs)
    decisions = Decisions(stored, (Burst(last + 6, (min(tanhs),)),), ordered=True)
    new = rewritten(flat, decisions)
    first = next(i for i, eqn in enumerate(new.eqns) if eqn.primitive.name == "remat")
    assert sum(eqn.primitive.name == "dot_general" for eqn in new.eqns[:first]) < 12
    assert_equal(run(new, leaves), run(flat, leaves))


def test_common_subexpressions_are_computed_once():
    def step(w, x):
        return jnp.tanh(x @ w) + jnp.sin(x @ w), jnp.tanh(x @ w) * 2

    flat, leaves = flat_of(step, W[0], X)
    names = [eqn.primitive.name for eqn in flat.eqns]
    assert names.count("dot_general") == names.count("tanh") == 1
    assert_equal(run(flat, leaves), jax.jit(step)(W[0], X))


def test_equations_whose_parameters_differ_in_a_name_are_not_shared():
    named = jax.extend.core.Primitive("named")
    functions = {"sin": jnp.sin, "cos": jnp.cos}
    named.def_abstract_eval(lambda x, *, name: x)
    mlir.register_lowering(
        named, mlir.lower_fun(lambda x, *, name: functions[name](x), multiple_results=False)
    )
    flat, leaves = flat_of(lambda x: (named.bind(x, name="sin"), named.bind(x, name="cos")), X)
    assert len(flat.eqns) == 2
    assert_equal(run(flat, leaves), [np.sin(X), np.cos(X)])


def test_barriers_are_not_shared():
    def step(x):
        return jnp.sin(jax.lax.optimization_barrier(x)), jnp.sin(jax.lax.optimization_barrier(x))

    assert len(flat_of(step, X)[0].eqns) == 4


def test_random_numbers_and_effects_are_not_shared():
    def step(key, x):
        jax.debug.callback(lambda: None)
        jax.debug.callback(lambda: None)
        a, b = jax.random.split(key)
        return jax.random.normal(a, x.shape), jax.random.normal(b, x.shape)

    flat, leaves = flat_of(step, jax.random.key(0), X)
    assert sum(eqn.primitive.name == "debug_callback" for eqn in flat.eqns) == 2
    first, second = run(flat, leaves)
    assert not np.array_equal(first, second)


def test_a_loop_that_is_run_again_for_two_results_stands_in_the_burst_once():
    def step(x):
        _, (a, b) = jax.lax.scan(lambda c, y: (c + 1.0, (jnp.sin(y) * c, jnp.cos(y) * c)), 0.0, x)
        m = jnp.tanh(a @ a.T)
        n = jnp.tanh(b @ b.T)
        return m @ n

    flat, _ = flat_of(step, np.ones((5, 5), np.float32))
    program = program_of_flat(flat)
    fused = fuse(program, lambda *_: 1.0, apart=True)
    loop = next(i for i, eqn in enumerate(flat.eqns) if eqn.primitive.name == "scan")
    nodes = [node.id for node in fused.graph.nodes]
    of_loop = sorted({fused.holds[v] for v in program.ops[loop].results if v in fused.holds})
    assert len(of_loop) > 1
    last = [i for i in nodes if i < len(flat.eqns)][-1]
    order = [*nodes[: nodes.index(last)], *of_loop, *nodes[nodes.index(last) :]]
    steps = [("compute", i) for i in order]
    assert decisions_of(program, fused, steps).bursts == (Burst(last, (loop,)),)


@pytest.mark.parametrize("n_second", [0, 1, 3])
def test_recomputation_for_the_second_part_is_in_the_second_part(n_second):
    def step(x):
        y = jnp.sin(x)
        z = jnp.exp(y)
        jax.debug.callback(lambda _: None, z)
        return jnp.cos(y) + z

    flat, _ = flat_of(step, X)
    names = [eqn.primitive.name for eqn in flat.eqns]
    assert names == ["sin", "exp", "debug_callback", "cos", "add"]
    n_first = {0: 5, 1: 4, 3: 2}[n_second]
    bursts = (Burst(2, (0, 1)),) if n_second == 3 else ()
    decisions = Decisions(frozenset(range(5)), bursts, partial_sums=(0,))
    first, second, _ = rewritten_in_two(flat, decisions, n_first)
    inner = [e.primitive.name for e in equations(_jax.rebuild(flat, eqns=second))]
    assert [inner.count(name) for name in ("sin", "exp")] == ([1, 1] if bursts else [0, 0])
    assert bool(second) == bool(n_second)
    assert not any(eqn.effects for eqn in first) or n_second < 3


def test_each_part_has_the_numbers_that_fill_its_constant_arrays():
    """Nothing but stored values passes from the first part to the second."""

    def step(x):
        y = jnp.sin(x)
        z = jnp.zeros((3, *x.shape)).at[1].add(y)
        return jnp.zeros((4, *x.shape)).at[:3].add(jnp.cos(z)) + y

    flat, _ = flat_of(step, X)
    (sin,) = (i for i, e in enumerate(flat.eqns) if e.primitive.name == "sin")
    filled = [
        i
        for i, e in enumerate(flat.eqns)
        if e.primitive.name == "broadcast_in_dim" and e.outvars[0].aval.ndim == 3
    ]
    stored = frozenset(range(len(flat.eqns)))
    decisions = Decisions(stored, tuple(Burst(i, (sin,)) for i in filled), ordered=True)
    first, second, _ = rewritten_in_two(flat, decisions, filled[1])
    made = {v for eqn in first for v in eqn.outvars if v.aval.ndim == 0}
    assert made and made.isdisjoint(v for eqn in second for v in eqn.invars if _jax.is_var(v))


def test_variants_that_agree_about_the_kernels_are_solved_once():
    class Counting(GridSearch):
        def answers(self, graph, once=()):
            solved.append(graph)
            return super().answers(graph, once)

    def chain(weights, x):
        for a, b in weights:
            x = x + jnp.tanh(x @ a) @ b
        return (x * x).sum()

    solved = []
    weights = [(np.ones((6, 24), np.float32), np.ones((24, 6), np.float32))] * 8
    flat, _ = flat_of(jax.value_and_grad(chain), weights, np.ones((100, 6), np.float32))
    model = StepModel(
        PricedStep(flat, lambda flops, moved, dtype: flops + moved, solver=Counting())
    )
    assert [model.smallest(v).variant for v in model.variants] == ["written", "fused"]
    assert len(solved) == 1


def test_values_that_are_not_stored_are_visited_once():
    """Each of them reads the one before twice, so there are 2**60 paths."""

    def step(x):
        first = jnp.sin(x)
        y = first
        for _ in range(60):
            y = y * y
        return jnp.cos(y) * first

    jaxpr, args = flat_of(step, X)
    last = len(jaxpr.eqns) - 1
    new = rewritten(jaxpr, Decisions(frozenset({0, last - 1, last}), (Burst(last, (0,)),)))
    assert_equal(run(new, args), [step(X)])
    assert len(new.eqns) <= len(jaxpr.eqns)
