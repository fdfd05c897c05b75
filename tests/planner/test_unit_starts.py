"""Where units begin.

Those of ordered programs end where another order could exceed the schedule's peak, those of separated
programs where a compiler would store a value that the schedule does not.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat import _jax
from remat.ir.equations import is_fusible
from remat.planner.rewrite import flattened
from remat.planner.unit_starts import separated_starts, unit_starts, workspace_bytes

NHWC = ("NHWC", "HWIO", "NHWC")
X = np.linspace(0, 1, 64 * 64, dtype=np.float32).reshape(64, 64)


def flat_of(step, *args):
    jaxpr, _, _ = _jax.trace_call(step, *args)
    return flattened(jaxpr)


def numbers(flat, primitive):
    return [i for i, eqn in enumerate(flat.eqns) if eqn.primitive.name == primitive]


def frees_then_allocates(x):
    a = jnp.sin(x)
    freed = a[:1] @ a  # the last use of `a`
    b = x @ x
    for _ in range(6):
        freed = jnp.tanh(freed)
    return freed, jnp.sum(b @ x[:, :1])


def test_a_unit_ends_before_it_could_hold_what_the_schedule_has_freed():
    flat = flat_of(frees_then_allocates, X)
    stored = frozenset(range(len(flat.eqns)))
    first, second, _ = numbers(flat, "dot_general")
    tanhs = numbers(flat, "tanh")
    fences = unit_starts(flat, stored, {tanhs[-1]: (tanhs[-2],)})
    assert any(first < number <= second for number in fences)


def test_units_have_up_to_four_equations_where_memory_is_not_scarce():
    def step(x):
        y = x[:1] @ jnp.sin(x)
        for _ in range(6):
            y = jnp.tanh(y)
        return y

    flat = flat_of(step, X)
    stored = frozenset(range(len(flat.eqns)))
    tanhs = numbers(flat, "tanh")
    fences = unit_starts(flat, stored, {tanhs[1]: (tanhs[0],)})
    assert [n for n in tanhs if n in fences] == [tanhs[1], tanhs[5]]


def test_a_burst_at_the_peak_becomes_several_units():
    def step(x):
        small = jnp.sin(x)[:1] @ x
        large = x @ x
        return jnp.sum(small @ large)

    flat = flat_of(step, X)
    stored = frozenset(range(len(flat.eqns)))
    _, large, last = numbers(flat, "dot_general")
    again = (*range(large + 1),)
    units = unit_starts(flat, stored, {last: again})[last]
    assert sum(units, ()) == again
    assert len(units) > 1


@pytest.mark.parametrize("seed", range(5))
def test_every_unit_fits_in_the_worst_order(seed):
    random = np.random.default_rng(seed)

    def step(x):
        values = [x]
        for _ in range(12):
            i, j = random.integers(len(values), size=2)
            rows = int(random.integers(1, 64))
            values.append(values[i][:, :rows] @ values[j][:rows])
        return jnp.sum(values[-1])

    flat = flat_of(jax.value_and_grad(step), X)
    stored = frozenset(numbers(flat, "dot_general"))
    last = max(stored)
    fences = unit_starts(flat, stored, {last: ()})
    live, peak = live_bytes(flat, stored)
    units = [min(stored), *sorted(fences), last + 1]
    for start, end in itertools.pairwise(units):
        inside = [n for n in stored if start <= n < end]
        needed = live[start] + sum(size(flat.eqns[n]) for n in inside)
        assert len(inside) <= 1 or needed <= 1.02 * peak
    assert len(fences) > 1 or len(stored) < 5


def size(eqn):
    return sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.outvars)


def live_bytes(flat, stored):
    """Return the stored bytes that are live before each stored equation, and the peak."""
    sources, last_use = {}, {}
    for n, eqn in enumerate(flat.eqns):
        read = set().union(*(sources.get(v, set()) for v in eqn.invars if _jax.is_var(v)))
        if n in stored:
            last_use.update(dict.fromkeys([n, *read], n))
            read = {n}
        sources.update(dict.fromkeys(eqn.outvars, read))
    live = {
        n: sum(size(flat.eqns[m]) for m in stored if m < n <= last_use[m]) for n in sorted(stored)
    }
    return live, max(live[n] + size(flat.eqns[n]) for n in stored)


def test_a_unit_ends_before_a_kernel_could_copy_its_operands_beside_other_results():
    """The gradient of a kernel copies both operands into another order."""

    def step(x, w):
        def loss(x, w):
            y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)
            return jnp.sum(jnp.sin(y))

        return jax.grad(loss, (0, 1))(x, w)

    flat = flat_of(step, np.ones((4, 16, 16, 8), np.float32), np.ones((3, 3, 8, 8), np.float32))
    stored = frozenset(range(len(flat.eqns)))
    _, of_kernel, of_operand = numbers(flat, "conv_general_dilated")
    producer = {v: number for number, eqn in enumerate(flat.eqns) for v in eqn.outvars}
    copied = workspace_bytes(flat.eqns[of_kernel], producer, stored)
    assert copied == 2 * 4 * 16 * 16 * 8 * 4
    cos = numbers(flat, "cos")[0]
    fences = unit_starts(flat, stored, {of_kernel: (cos,)})
    assert any(of_kernel < number <= of_operand for number in fences)


def squared_distances(x):
    return jnp.sum((x[:, None] - x[None]) ** 2, -1)


def kernel_sums(flat):
    """Return the numbers of the sums over differences, and of all equations whose results are stored."""
    stored = [
        i for i, eqn in enumerate(flat.eqns) if not is_fusible(eqn) or eqn.primitive.name == "exp"
    ]
    is_large = {i: eqn.invars[0].aval.ndim == 3 for i, eqn in enumerate(flat.eqns)}
    sums = [i for i in numbers(flat, "reduce_sum") if is_large[i] and i in stored]
    return sums, frozenset(stored)


def test_an_equation_that_computes_a_value_again_after_one_it_depends_on_is_separated():
    def loss(x):
        return jnp.sum((jnp.exp(-squared_distances(x)) @ x) ** 2)

    flat = flat_of(jax.grad(loss), X[:, :8])
    (forward, backward, *others), stored = kernel_sums(flat)
    # The others read the same terms as the first one of the backward pass, and belong to its unit.
    assert others
    assert separated_starts(flat, stored, {}) == {backward: [()]}
    # If everything is stored, compilers have nothing to share.
    assert not separated_starts(flat, frozenset(range(len(flat.eqns))), {})
    # A burst begins a unit. What depends on the equations that it recomputes is separated from them.
    (exp,) = numbers(flat, "exp")
    burst = {backward: (forward,)}
    assert separated_starts(flat, stored, burst) == {backward: [(forward,)]}
    burst = {backward: (forward, exp)}
    assert separated_starts(flat, stored, burst) == {backward: [(forward, exp), ()]}


def test_sums_that_do_not_depend_on_each_other_are_not_separated():
    def step(x):
        apart = x[:, None] - x[None]
        return jnp.sum(apart**2, 0), jnp.sum(apart**2, 1), jnp.sum(jnp.abs(apart), 2)

    flat = flat_of(step, X[:, :8])
    assert not separated_starts(flat, kernel_sums(flat)[1], {})


def test_small_values_are_not_separated():
    def starts(size):
        def step(x):
            value = jnp.sqrt(x[0, :size])
            return jnp.sum(value * value) * value, x @ x

        flat = flat_of(step, X)
        stored = [i for i, eqn in enumerate(flat.eqns) if eqn.primitive.name != "sqrt"]
        return separated_starts(flat, frozenset(stored), {})

    assert not starts(1)
    assert starts(64)


def test_what_is_recomputed_before_an_equation_that_is_not_stored_is_recomputed_before_the_next_one():
    def step(x):
        return jnp.sum(jnp.cos(jnp.sin(x) @ x))

    flat = flat_of(step, X)
    sin, dot = numbers(flat, "sin")[0], numbers(flat, "dot_general")[0]
    (cos,), (total,) = numbers(flat, "cos"), numbers(flat, "reduce_sum")
    assert separated_starts(flat, frozenset((sin, dot, total)), {cos: ()}) == {total: [()]}
    assert separated_starts(flat, frozenset((sin, dot, total)), {cos: (sin, dot)}) == {
        total: [(sin, dot)]
    }
