"""Updates of donated arguments move to where their operands are ready; other equations keep their order."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from remat import _jax
from remat.ir import jaxprs
from remat.ir.equations import has_effects
from remat.ir.updates import with_early_updates
from remat.planner.rewrite import flattened

WIDTH, LAYERS = 32, 6
WEIGHTS = [np.full((WIDTH, WIDTH), 0.1, np.float32)] * LAYERS
BATCH = np.ones((8, WIDTH), np.float32)


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def descend(weights, x):
    value, gradient = jax.value_and_grad(loss)(weights, x)
    return [w - 0.1 * g for w, g in zip(weights, gradient)], value


def flat(step, *args):
    """Return the step's program without moves, and its inputs."""
    jaxpr, consts, _ = _jax.trace_call(step, *args)
    assert not consts
    return flattened(jaxpr), jax.tree.leaves(args)


def bits(value):
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else value


def moved(step, args, n_donated):
    """Return the program before and after the moves; the first arguments are donated."""
    before, leaves = flat(step, *args)
    n = len(jax.tree.leaves(args[:n_donated]))
    after = with_early_updates(before, [at < n for at in range(len(before.invars))])
    ours, theirs = (_jax.eval_jaxpr(j, (), *leaves) for j in (after, before))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(*map(bits, (one, other)))
    assert collections.Counter(map(id, after.eqns)) == collections.Counter(map(id, before.eqns))
    return before, after


def places(jaxpr, primitive):
    return [at for at, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == primitive]


def most_live(jaxpr, n_donated):
    """Return the most matrices that are live at once, without arguments and the values in their buffers."""
    last = jaxprs.last_uses(jaxpr)
    in_place = set(jaxpr.outvars[:n_donated])
    live, most = set(), 0
    for at, eqn in enumerate(jaxpr.eqns):
        live.update(v for v in eqn.outvars if v.aval.shape == (WIDTH, WIDTH))
        most = max(most, len(live - in_place))
        live = {v for v in live if last.get(v, -1) > at}
    return most


def test_each_weight_is_updated_before_the_next_gradient():
    before, after = moved(descend, (WEIGHTS, BATCH), 1)
    assert min(places(before, "sub")[-LAYERS:]) > places(before, "dot_general")[-1]
    # The backward pass has two products for each layer but the first.
    assert most_live(before, LAYERS) >= LAYERS and most_live(after, LAYERS) <= 3


def test_a_weight_is_updated_after_its_last_other_reader():
    _, after = moved(descend, (WEIGHTS, BATCH), 1)
    updated = {v: at for at, eqn in enumerate(after.eqns) for v in eqn.outvars}
    for weight, result in zip(after.invars, after.outvars[:LAYERS], strict=False):
        readers = [at for at, eqn in enumerate(after.eqns) if weight in eqn.invars]
        assert max(readers) == updated[result]


def test_nothing_moves_if_nothing_is_donated():
    before, after = moved(descend, (WEIGHTS, BATCH), 0)
    assert after is before


def test_a_result_that_is_not_in_a_donated_argument_stays():
    def step(weights, x):
        value, gradient = jax.value_and_grad(loss)(weights, x)
        return gradient, [w - 0.1 * g for w, g in zip(weights, gradient)], value

    _, after = moved(step, (WEIGHTS, BATCH), 1)
    # The gradients come first, so they are the values written into the donated weights.
    assert min(places(after, "sub")[-LAYERS:]) > places(after, "dot_general")[-1]


OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-3),
    "schedule": optax.adamw(optax.cosine_decay_schedule(1e-3, 100)),
    "lion": optax.lion(1e-3),
    "norms of each layer": optax.lamb(1e-3),
    "factored": optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
}


def optimized(optimizer):
    def step(weights, state, x):
        value, gradient = jax.value_and_grad(loss)(weights, x)
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, value

    return step, (WEIGHTS, optimizer.init(WEIGHTS), BATCH)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_of_optimizers_move_between_gradients(name):
    step, args = optimized(OPTIMIZERS[name])
    before, after = moved(step, args, 2)
    first = {v: at for at, eqn in enumerate(after.eqns) for v in eqn.outvars}
    written = [first[v] for v in after.outvars[:LAYERS]]
    products = places(after, "dot_general")
    # The last layer is updated first, before the gradients of most other layers are computed.
    assert written == sorted(written, reverse=True)
    assert sum(at > written[-1] for at in products) >= 2 * (LAYERS - 2)
    assert min(first[v] for v in before.outvars[:LAYERS]) > 0


def test_updates_wait_for_a_norm_of_all_gradients():
    step, args = optimized(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))
    _, after = moved(step, args, 2)
    first = {v: at for at, eqn in enumerate(after.eqns) for v in eqn.outvars}
    assert min(first[v] for v in after.outvars[:LAYERS]) > places(after, "dot_general")[-1]


def test_norms_of_gradients_do_not_keep_them():
    def step(weights, x):
        value, gradient = jax.value_and_grad(loss)(weights, x)
        new = [w - 0.1 * g for w, g in zip(weights, gradient)]
        return new, value, [jnp.sqrt((g**2).sum()) for g in gradient]

    before, after = moved(step, (WEIGHTS, BATCH), 1)
    assert most_live(before, LAYERS) >= LAYERS and most_live(after, LAYERS) <= 4


def test_a_shared_rate_does_not_tie_updates_together():
    def step(weights, count, x):
        value, gradient = jax.value_and_grad(loss)(weights, x)
        rate = jnp.broadcast_to(0.1 / (1.0 + count), (WIDTH, WIDTH))
        return [w - rate * g for w, g in zip(weights, gradient)], count + 1, value

    _, after = moved(step, (WEIGHTS, np.float32(0), BATCH), 2)
    assert most_live(after, LAYERS) <= 4


def test_effects_and_barriers_keep_their_order():
    def step(weights, x):
        value, gradient = jax.value_and_grad(loss)(weights, x)
        gradient = jax.lax.optimization_barrier(gradient)
        jax.debug.print("{}", value)
        new = [w - 0.1 * g for w, g in zip(weights, gradient)]
        jax.debug.print("{}", new[0][0, 0])
        return new, value

    before, after = moved(step, (WEIGHTS, BATCH), 1)
    assert min(places(after, "sub")[-LAYERS:]) > places(after, "optimization_barrier")[0]
    fixed = [[eqn for eqn in j.eqns if has_effects(eqn)] for j in (before, after)]
    assert len(fixed[0]) == 2 and fixed[0] == fixed[1]


def test_what_reads_an_updated_value_stays_behind_it():
    """A second network is trained on the new weights of the first, which are updated before that."""

    def step(one, two, x):
        gradient = jax.grad(loss)(one, x)
        one = [w - 0.1 * g for w, g in zip(one, gradient)]
        gradient = jax.grad(lambda two: loss([*one, *two], x))(two)
        return one, [w - 0.1 * g for w, g in zip(two, gradient)]

    before, after = moved(step, (WEIGHTS, WEIGHTS, BATCH), 2)
    assert most_live(after, 2 * LAYERS) < most_live(before, 2 * LAYERS)


def random_step(rng):
    """Return a program of products and elementwise operations whose results replace some of its arguments."""
    kinds = ["product", "add", "mul", "tanh", "norm", "scale"]
    recipe = [(rng.choice(kinds), *rng.integers(0, 1000, 2)) for _ in range(24)]
    picked = rng.integers(0, 1000, 5)

    def step(arguments, x):
        values = [*arguments, x]
        small = [jnp.float32(0.5)]
        for kind, i, k in recipe:
            a, b = values[i % len(values)], values[k % len(values)]
            if kind == "norm":
                small.append(jnp.tanh((a**2).mean()))
            elif kind == "scale":
                values.append(a * small[k % len(small)])
            else:
                values.append(
                    {
                        "product": lambda a, b: a @ b / WIDTH,
                        "add": jnp.add,
                        "mul": jnp.multiply,
                        "tanh": lambda a, b: jnp.tanh(a),
                    }[kind](a, b)
                )
        return [values[p % len(values)] for p in picked[:3]], values[-1], small[-1]

    return step


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_compute_the_same(seed):
    rng = np.random.default_rng(seed)
    step = random_step(rng)
    arguments = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(3)]
    x = rng.normal(size=(WIDTH, WIDTH)).astype(np.float32)
    _, after = moved(step, (arguments, x), 1)
    computed = set(after.invars)
    for eqn in after.eqns:
        assert computed.issuperset(v for v in eqn.invars if _jax.is_var(v))
        computed.update(eqn.outvars)


def test_random_programs_have_updates_that_move():
    n_moved = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        arguments = [np.ones((WIDTH, WIDTH), np.float32) for _ in range(3)]
        before, after = moved(random_step(rng), (arguments, arguments[0]), 1)
        n_moved += any(a is not b for a, b in itertools.zip_longest(before.eqns, after.eqns))
    assert n_moved >= 5
