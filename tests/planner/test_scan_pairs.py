"""Pairs of scans in differentiated steps: their options, and the programs that follow a choice."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, PartitionSpec

import remat
from remat import _jax
from remat.errors import BudgetError, PlanError
from remat.ir import jaxprs
from remat.ir.equations import plain_call, programs_of
from remat.ir.flops import flops_of, flops_of_program
from remat.planner.loop_choices import AS_LONG, loop_choices
from remat.planner.priced_step import PricedStep
from remat.planner.rewrite import flattened
from remat.planner.scan_pairs import ScanOption, at_price, opened, pairs, prices, rewrite
from remat.planner.step_model import StepModel
from remat.program.from_jaxpr import program_of_jaxpr
from remat.program.fusion import fuse
from remat.solvers import no_remat

KEY = jax.random.key(0)


def price(flops, moved, dtype):
    return 1e-9 + flops / 1e9 + moved / 1e10


def flat(fun, *args):
    """Return a function's program with plain calls inlined, and its arguments as a list."""
    jaxpr, consts, _ = _jax.trace_call(fun, *args)
    return jaxprs.inline_calls(jaxpr, plain_call), [*consts, *jax.tree.leaves(args)]


def compiled(jaxpr, args):
    return jax.jit(functools.partial(_jax.eval_jaxpr, jaxpr, ())).lower(*args).compile()


def results(jaxpr, args):
    return compiled(jaxpr, args)(*args)


def temporaries(jaxpr, args):
    return compiled(jaxpr, args).memory_analysis().temp_size_in_bytes


def assert_equal(some, others):
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def scans(jaxpr):
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]


# --------------------------------------------------------------------------------------------------
# Programs

W = jax.random.normal(KEY, (4, 8, 8)) / 3
X = jax.random.normal(jax.random.key(1), (6, 8))


def layer(c, w):
    return jnp.tanh(jnp.sin(c @ w) @ w), None


def stack(w, x, body=layer, **options):
    return jax.lax.scan(body, x, w, **options)[0].sum()


def with_constants(w, v, x):
    return stack(w, x, lambda c, w: (jnp.tanh(c @ w) * jax.nn.gelu(c @ v), None))


def with_distances(points, w, x):
    def body(c, w):
        distances = ((points[:, None] - points) ** 2).sum(-1)
        return jnp.tanh(jnp.exp(-distances) @ jnp.sin(c @ w)), None

    return stack(w, x, body)


def with_integer_carry(w, x):
    def body(carry, w):
        i, c = carry
        return (i + 1, jnp.where(i % 2 == 0, jnp.tanh(c @ w), jnp.sin(c @ w))), None

    return jax.lax.scan(body, (0, x), w)[0][1].sum()


def nested(w, x):
    def outer(c, w):
        c, _ = jax.lax.scan(lambda c, _: layer(c, w), c, None, 3)
        return jnp.cos(c @ w), None

    return stack(w, x, outer)


def accumulated(w, x):
    def one(total, x):
        value, gradient = jax.value_and_grad(stack)(w, x)
        return jax.tree.map(operator.add, total, (value, gradient)), None

    zeros = jnp.zeros(()), jnp.zeros_like(w)
    return jax.lax.scan(one, zeros, jnp.stack([x, x + 1, 2 * x]))[0]


def with_dropout(w, x, key):
    def body(carry, w):
        key, c = carry
        key, own = jax.random.split(key)
        return (key, jnp.tanh(c @ w) * jax.random.bernoulli(own, 0.5, c.shape)), None

    return jax.lax.scan(body, (key, x), w)[0][1].sum()


def with_returned_stack(w, x):
    x, ys = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), jnp.tanh(c @ w)), x, w)
    return x.sum(), ys


def sharded(w, x):
    """Return gradients that are computed inside of a shard_map."""
    none, rows = PartitionSpec(), PartitionSpec("data")

    def step(w, x):
        w = jax.lax.pcast(w, "data", to="varying")
        value, gradient = jax.value_and_grad(stack)(w, x)
        return jax.lax.psum((value, gradient), "data")

    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    return jax.shard_map(step, mesh=mesh, in_specs=(none, rows), out_specs=(none, none))(w, x)


def around_shards(body, w, x):
    """Return gradients of a loss that contains a shard_map."""
    none, rows = PartitionSpec(), PartitionSpec("data")

    def loss(w, x, scale):
        y, _ = jax.lax.scan(lambda c, w: (scale * body(c, w)[0], None), x * jnp.sin(scale), w)
        return jax.lax.psum(y.sum(), "data")

    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    specs = {"in_specs": (none, rows, none), "out_specs": none}
    return jax.shard_map(loss, mesh=mesh, **specs)(w, x, x[0, 0])


def branched(w, x, flag):
    return jax.lax.cond(flag, jax.value_and_grad(stack), lambda w, x: (x.sum(), w), w, x)


def nested_pair(w, x):
    """Return gradients of nested loops, where the inner loop's weights are slices of the outer one's."""
    return stack(w.reshape(2, 2, 8, 8), x, lambda c, w: (jax.lax.scan(layer, c, w)[0], None))


def checkpointed_pair(w, x):
    @jax.checkpoint
    def outer(c, w):
        return jax.lax.scan(remat.checkpoint(layer), c, w)[0], None

    return stack(w.reshape(2, 2, 8, 8), x, outer)


def printing(w, x):
    def body(c, w):
        c = jnp.tanh(c @ w)
        jax.debug.callback(lambda _: CALLS.append(1), c[0, 0])
        return jnp.sin(c @ w), None

    return stack(w, x, body)


def with_branches(w, x):
    def body(c, w):
        long, short = lambda c: jnp.tanh(jnp.sin(c @ w) @ w), lambda c: jnp.cos(c @ w)
        return jax.lax.cond(c[0, 0] > 0, long, short, c), None

    return stack(w, x, body)


def chosen(w, x, k):
    """Return gradients of a conditional with loops in some branches, and residuals of several types."""

    def few(x):
        return x.sum(), x.astype(jnp.bfloat16)

    def many(x):
        y = jnp.sin(x.astype(jnp.bfloat16) ** 2)
        return stack(w, x), jnp.cos(jnp.exp(y) * y)

    value, more = jax.lax.switch(k, [lambda x: (stack(w, jnp.sin(x)), few(x)[1]), few, many], x)
    return value + more.astype(x.dtype).sum()


def bounded(w, x):
    """Return a bounded while loop as Equinox writes it: nested loops of conditionals, checkpointed."""

    def body(c):
        return c[0] + 1, layer(c[1], w[0])[0]

    def steps(c, run, length):
        def step(c, _):
            return jax.lax.cond(c[0] < 5, run, lambda c: c, c), None

        return jax.lax.scan(step, c, None, length)[0]

    @jax.checkpoint
    def run(c):
        return steps(c, body, 3)

    return steps((0, x), run, 4)[1].sum()


CALLS: list[int] = []

GRADIENTS = {
    "a stack of layers": (stack, (W, X)),
    "reversed": (functools.partial(stack, reverse=True), (W, X)),
    "unrolled": (functools.partial(stack, unroll=2), (W, X)),
    "one step": (stack, (W[:1], X)),
    "a checkpoint": (functools.partial(stack, body=remat.checkpoint(layer)), (W, X)),
    "a checkpoint of JAX": (functools.partial(stack, body=jax.checkpoint(layer)), (W, X)),
    "constants": (with_constants, (W, W[0], X)),
    "constants that steps can compute": (with_distances, (X, W, X)),
    "an integer carry": (with_integer_carry, (W, X)),
    "around a shard_map": (functools.partial(around_shards, layer), (W, X)),
    "around a shard_map with a checkpoint": (
        functools.partial(around_shards, jax.checkpoint(layer)),
        (W, X),
    ),
    "a loop without pair inside": (nested, (W, X)),
    "nested": (nested_pair, (W, X)),
    "nested checkpoints": (checkpointed_pair, (W, X)),
    "dropout": (with_dropout, (W, X, KEY)),
    "branches in the steps": (with_branches, (W, X)),
    "the first of three branches": (chosen, (W, X, 0)),
    "the last of three branches": (chosen, (W, X, 2)),
    "loops in branches in loops": (bounded, (W, X)),
}
STEPS = {name: (jax.value_and_grad(fun), args) for name, (fun, args) in GRADIENTS.items()} | {
    "gradient accumulation": (accumulated, (W, X)),
    "in a shard_map": (sharded, (W, X)),
    "in a branch": (branched, (W, X, True)),
    "a stack that is returned": (
        jax.value_and_grad(with_returned_stack, has_aux=True),
        (W, X),
    ),
}


def some(options):
    """Return the option with the fewest bytes, one in the middle, and one in groups."""
    groups = [o for o in options if o.group > 1]
    return dict.fromkeys([options[0], options[len(options) // 2], *groups[-1:]])


# --------------------------------------------------------------------------------------------------
# Values and gradients


@pytest.mark.parametrize("name", STEPS)
def test_options_change_no_bit_of_values_and_gradients(name):
    fun, args = STEPS[name]
    jaxpr, args = flat(fun, *args)
    expected = results(jaxpr, args)
    found = 0
    for program in dict.fromkeys((jaxpr, opened(jaxpr))):
        for pair in pairs(program, price):
            for option in (*some(pair.options), pair.by_group[0]):
                assert_equal(results(rewrite(program, {pair.id: option}), args), expected)
                found += 1
    assert found > 1


def test_groups_in_a_shard_map_change_no_bit():
    w = jnp.concatenate([W, -W])
    jaxpr, args = flat(jax.value_and_grad(functools.partial(around_shards, layer)), w, X)
    (pair,) = pairs(jaxpr, price)
    option = next(o for o in pair.options if o.group > 1)
    assert_equal(results(rewrite(jaxpr, {pair.id: option}), args), results(jaxpr, args))


def test_loops_in_a_loop_of_a_shard_map_are_mixed():
    # Mixtures of the inner loop are traced while the outer one's options are found.
    def ticks(c, w):
        return jax.lax.scan(lambda c, _: (jax.lax.scan(layer, c, w)[0], None), c, None, length=3)[0]

    def loss(w, x):
        return jax.lax.psum(ticks(x, w).sum(), "data")

    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("data")), "out_specs": PartitionSpec()}
    step = jax.value_and_grad(jax.shard_map(loss, mesh=mesh, **specs))
    jaxpr, args = flat(step, jnp.concatenate([W, W]), X)
    (pair,) = pairs(jaxpr, price)
    option = next(
        o for o in pair.options if any(i.groups or i.rest is not None for _, i in o.inner)
    )
    assert_equal(results(rewrite(jaxpr, {pair.id: option}), args), results(jaxpr, args))


@pytest.mark.parametrize("length", [17, 20])
@pytest.mark.parametrize("reverse", [False, True])
def test_splitting_a_loop_in_two_changes_no_bit(length, reverse):
    def loss(w, v, x):
        def body(carry, w):
            i, c = carry
            c = jnp.tanh(jnp.sin(c @ w) @ v) + i
            return (i + 1, c), jnp.cos(c[0])

        (_, x), ys = jax.lax.scan(body, (0, x), w, reverse=reverse)
        return x.sum() + ys.sum(), ys

    w = jax.random.normal(KEY, (length, 8, 8)) / 3
    jaxpr, args = flat(jax.value_and_grad(loss, (0, 1), has_aux=True), w, W[0], X)
    expected = results(jaxpr, args)
    (pair,) = pairs(jaxpr, price)
    in_groups = [o for o in pair.options if o.group > 1 and o.groups]
    mixed = [o for o in pair.options if o.rest is not None]
    for option in (in_groups[0], in_groups[-1], mixed[0], mixed[-1]):
        changed = rewrite(jaxpr, {pair.id: option})
        assert_equal(results(changed, args), expected)
        assert option.flops == pytest.approx(
            sum(map(flops_of, changed.eqns)) - sum(map(flops_of, jaxpr.eqns)), rel=0.2
        )


def test_loops_whose_backward_scan_passes_a_carry_on_are_rewritten():
    """The cotangent of a sum over all steps is the same in each step."""

    def loss(w, x):
        def body(carry, w):
            total, x = carry
            x = jnp.tanh(jnp.sin(x @ w))
            return (total + jnp.cos(x).sum(), x), None

        (total, x), _ = jax.lax.scan(body, (0.0, x), w)
        return total * x.sum()

    w = jax.random.normal(KEY, (18, 8, 8)) / 3
    jaxpr, args = flat(jax.value_and_grad(loss), w, X)
    expected = results(jaxpr, args)
    (pair,) = pairs(jaxpr, price)
    assert any(o.group > 1 for o in pair.options) and any(o.groups for o in pair.options)
    for option in pair.options:
        assert_equal(results(rewrite(jaxpr, {pair.id: option}), args), expected)


def test_steps_that_mix_choices_inside_change_no_bit():
    def loss(w, x):
        def body(c, w):
            return jax.lax.cond(c[0, 0] > -9, lambda c: layer(c, w)[0] @ w, lambda c: c, c), None

        return stack(jnp.concatenate([w, w]), x, body)

    jaxpr, args = flat(jax.value_and_grad(loss), W, X)
    (pair,) = pairs(jaxpr, price)
    mixed = [o for o in pair.options if o.rest_inner is not None]
    assert mixed
    assert_equal(results(rewrite(jaxpr, {pair.id: mixed[0]}), args), results(jaxpr, args))


def with_copies():
    """Return a program with one pair of loops, its arguments, and the options that offload values."""

    def loss(w, x):
        return stack(jnp.concatenate([w, w]), x, layer)

    jaxpr, args = flat(jax.value_and_grad(loss), W, jnp.tile(X, (1400, 1)))
    (pair,) = pairs(jaxpr, price, transfer=lambda n: 1e-10 * n)
    return jaxpr, args, pair, [o for o in pair.options if o.offloaded]


def test_loops_that_keep_values_on_the_host_change_no_bit():
    jaxpr, args, pair, found = with_copies()
    expected = results(jaxpr, args)
    everywhere = [o for o in found if not o.groups]
    of_first_steps = [o for o in found if o.groups]
    assert everywhere and of_first_steps
    for option in (everywhere[0], of_first_steps[0]):
        changed = rewrite(jaxpr, {pair.id: option})
        assert_equal(results(changed, args), expected)
        on_host = [
            v.aval
            for eqn in changed.eqns
            for v in eqn.outvars
            if _jax.is_on_host(v.aval)
        ]  # fmt: skip
        assert sum(aval.size * 4 for aval in on_host) == option.host_bytes > 0
        assert option.bytes < pair.as_written.bytes
        assert 0 < option.transfer_seconds <= option.seconds


def test_options_that_keep_nothing_on_the_host_stay_beside_those_that_do():
    jaxpr, _, pair, _ = with_copies()
    (plain,) = pairs(jaxpr, price)
    assert set(plain.options) <= set(pair.options)


def test_copies_are_cheap_as_long_as_computation_hides_them():
    jaxpr, _, _, found = with_copies()
    (slow,) = pairs(jaxpr, price, transfer=lambda n: 1e-3 * n)
    assert all(o.seconds > 100 for o in slow.options if o.offloaded)
    assert not any(o.offloaded for o in pairs(jaxpr, price)[0].options)
    # If everything that is kept is copied, nothing is left on the device, and hardly anything is recomputed.
    (plain,) = pairs(jaxpr, price)
    smallest = min(found, key=lambda o: o.bytes)
    assert smallest.bytes < plain.options[0].bytes
    assert smallest.seconds < plain.options[0].seconds


def test_options_count_the_stacks_of_loops_in_loops_in_loops():
    """In the backward pass, an iteration of the middle loop needs the stacks of the inner one."""

    def scanned(body, x, xs):
        return jax.lax.scan(body, x, xs)[0]

    def inner(x, w):
        return jnp.tanh(jnp.sin(x) * w), None

    def middle(x, w):
        return scanned(inner, jnp.cos(x), jnp.broadcast_to(w, (32, *w.shape))), None

    def outer(x, w):
        return scanned(middle, jnp.exp(-x), jnp.broadcast_to(w, (4, *w.shape))), None

    def loss(w, x):
        return jnp.sum(scanned(outer, x, w))

    jaxpr, _ = flat(jax.grad(loss), jnp.ones((4, 256)), jnp.ones(256))
    (pair,) = pairs(jaxpr, price)
    for option in pair.options:
        peak = modelled_peak(rewrite(jaxpr, {pair.id: option}))
        # Steps that keep more than the first ones miss as many bytes as where all steps keep that.
        most = 1.3 if option.rest is None else 1.4
        assert peak <= most * option.bytes + 2**15


def modelled_peak(jaxpr):
    return no_remat(fuse(program_of_jaxpr(jaxpr), price).graph).peak_bytes


def test_groups_of_steps_count_the_inputs_that_they_read_again():
    """Without groups the backward pass reads no `h`; a run over a group of steps reads it once more."""

    def loss(x):
        h = jnp.cos(x)
        last, _ = jax.lax.scan(lambda c, h: (jnp.tanh(jnp.sin(c) + h), None), h[0], h)
        return jnp.sum(last)

    jaxpr, _ = flat(jax.grad(loss), jnp.ones((64, 256)))
    (pair,) = pairs(jaxpr, price)
    for option in pair.options:
        assert modelled_peak(rewrite(jaxpr, {pair.id: option})) <= 1.3 * option.bytes + 2**16


def layers_in_chunks(dots, chunk, params, x, width=32, n_chunks=8):
    """Return the loss of layers with a recurrence over time in chunks: three loops in each other."""
    batch, steps = x.shape[0], x.shape[1] // n_chunks

    def tick(c, kv):
        a, b, m = c
        k, v = kv
        top = jnp.maximum(m, k)
        old, new = jnp.exp(m - top), jnp.exp(k - top)
        return (old * a + new * v, old * b + new, top - 0.1), (old * a + new * v) / (old * b + new)

    def layer(x, w):
        k, v, r = (x @ w[i] for i in range(3))
        split = lambda y: jnp.swapaxes(y, 0, 1).reshape(n_chunks, steps, batch, width)  # noqa: E731
        start = jnp.zeros((3, batch, width))
        run = chunk(lambda c, kv: jax.lax.scan(tick, c, kv))
        _, y = jax.lax.scan(run, tuple(start), (split(k), split(v)))
        y = jnp.swapaxes(y.reshape(-1, batch, width), 0, 1)
        return x + (jax.nn.sigmoid(r) * y) @ w[3], None

    return jnp.mean(jax.lax.scan(dots(layer), x, params)[0] ** 2)


def test_loops_nested_three_deep_take_no_more_than_checkpoints_by_hand():
    params, x = jnp.ones((3, 4, 32, 32)), jnp.ones((4, 128, 32))
    with_dots = functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    )
    plain = lambda fun: fun  # noqa: E731

    def gradient(dots, chunk):
        return jax.grad(functools.partial(layers_in_chunks, dots, chunk))

    by_hand, _ = flat(gradient(with_dots, jax.checkpoint), params, x)
    jaxpr, _ = flat(gradient(plain, plain), params, x)
    n_bytes = modelled_peak(by_hand)
    (pair,) = pairs(jaxpr, price)
    assert any(
        option.flops <= flops_of_program(by_hand) - flops_of_program(jaxpr)
        and modelled_peak(rewrite(jaxpr, {pair.id: option})) <= 1.02 * n_bytes
        for option in pair.options
    )


def test_weights_of_inner_loops_live_longer_once_for_all_steps_of_the_outer_loop():
    """To compute `h` again, the backward pass needs weights that are computed before both loops."""
    n_ticks, n_layers, n_rows, width = 16, 4, 8, 64

    def loss(scale, w, back, x):
        w = jnp.cos(w)

        def layer(x, slices):
            w, scale = slices
            h = jax.lax.stop_gradient(x @ w)
            return x + jnp.sin(h * scale) @ back, None

        def tick(carry, _):
            x, large = carry
            return (jax.lax.scan(layer, jnp.sin(x), (w, scale))[0], 0.9 * large), None

        # Groups of ticks would keep the whole carry.
        carry = x, jnp.zeros((200 * n_rows, width))
        return jnp.sum(jax.lax.scan(tick, carry, None, n_ticks)[0][0])

    scale, back = jnp.ones((n_layers, 4 * width)), jnp.ones((4 * width, width))
    w, x = jnp.ones((n_layers, width, 4 * width)), jnp.ones((n_rows, width))
    jaxpr, _ = flat(jax.grad(loss), scale, w, back, x)
    (pair,) = pairs(jaxpr, price)
    n_runs = n_ticks * n_layers
    of_h = n_runs * 4 * x.nbytes
    flops = n_runs * 2 * n_rows * width * 4 * width
    assert any(o.bytes < of_h and o.flops <= 1.1 * flops for o in pair.options)


def test_options_that_offload_what_they_do_not_keep_are_refused():
    jaxpr, _, pair, found = with_copies()
    kept = found[0].saved
    wrong = dataclasses.replace(found[0], saved=kept[1:], offloaded=kept[:1])
    with pytest.raises(PlanError, match=f"add {kept[0]} to its saved ones"):
        rewrite(jaxpr, {pair.id: wrong})
    in_groups = dataclasses.replace(found[0], group=2, groups=0, rest=None, rest_offloaded=())
    with pytest.raises(PlanError, match="Make its group 1"):
        rewrite(jaxpr, {pair.id: in_groups})


def with_cache(p, x, xs):
    """Return the loss of a loop that carries a cache, to which each step writes a row, and the loss."""
    length = xs.shape[0]

    def step(carry, u):
        x, cache, t, loss = carry
        row = (x @ p["k"])[:, None]
        cache = jax.lax.dynamic_update_slice(cache, row, (0, t, 0))
        weights = jax.nn.softmax(jnp.einsum("bd,btd->bt", x @ p["q"], cache))
        x = jnp.tanh((x + jnp.einsum("bt,btd->bd", weights, cache)) @ p["w"] + u)
        return (x, cache, t + 1, loss + jnp.square(x @ p["q"]).mean()), None

    cache = jnp.zeros((x.shape[0], length, x.shape[1]))
    return jax.lax.scan(step, (x, cache, 0, 0.0), xs)[0][3]


def of_cache():
    def drawn(seed, *shape):
        return jax.random.normal(jax.random.key(seed), shape) / 4

    weights = {name: drawn(i, 16, 16) for i, name in enumerate("kqw")}
    args = weights, drawn(4, 3, 16), drawn(5, 16, 3, 16)
    jaxpr, leaves = flat(jax.value_and_grad(with_cache), *args)
    (pair,) = pairs(jaxpr, price)
    return jaxpr, leaves, pair


def test_groups_of_steps_keep_what_is_costly_of_all_steps():
    """Only the cache is computed again, which takes no FLOPs."""
    jaxpr, leaves, pair = of_cache()
    of_all = [option for option in pair.options if option.lasting]
    cheap = min(of_all, key=lambda o: o.flops)
    assert cheap.group > 1 and cheap.bytes < 0.75 * pair.as_written.bytes
    assert cheap.flops < 0.001 * flops_of_program(jaxpr)
    expected = results(jaxpr, leaves)
    for option in of_all:
        changed = rewrite(jaxpr, {pair.id: option})
        assert_equal(results(changed, leaves), expected)
    gained = flops_of_program(rewrite(jaxpr, {pair.id: cheap})) - flops_of_program(jaxpr)
    assert gained < 0.01 * flops_of_program(jaxpr)


def test_groups_that_run_again_add_up_no_loss():
    jaxpr, leaves, pair = of_cache()
    option = next(option for option in pair.options if option.group > 1)
    option = dataclasses.replace(option, lasting=())
    changed = rewrite(jaxpr, {pair.id: option})
    assert_equal(results(changed, leaves), results(jaxpr, leaves))
    *_, backward = (eqn for eqn in changed.eqns if eqn.primitive.name == "scan")
    again, _ = (
        eqn
        for eqn in _jax.open_jaxpr(backward.params["jaxpr"]).eqns
        if eqn.primitive.name == "scan"
    )
    names = [eqn.primitive.name for eqn in jaxprs.equations(_jax.scan_body(again), programs_of)]
    assert "square" not in names and "integer_pow" not in names


def test_values_that_last_are_those_of_the_forward_steps():
    jaxpr, _, pair = of_cache()
    option = next(option for option in pair.options if option.lasting)
    with pytest.raises(PlanError, match=r"keeps 10000 for all steps.*lasting values"):
        rewrite(jaxpr, {pair.id: dataclasses.replace(option, lasting=(10000,))})
    with pytest.raises(PlanError, match="lasting must be empty unless"):
        dataclasses.replace(option, group=1)


def test_branches_in_loops_in_loops_are_planned_branch_by_branch():
    def one(w, v):
        return jnp.tanh(jnp.sin(v @ w) @ w)

    def other(w, v):
        return jnp.sin(jnp.tanh(v @ w) * jnp.sin(v @ w)) @ w

    def body(v, xs):
        w, i = xs
        return v + jax.lax.switch(i % 2, [one, other], w, jnp.sin(v)), None

    def loss(w, xs):
        def of_one(x):
            return jax.lax.scan(body, x, (w, jnp.arange(len(w))))[0].sum()

        return jax.lax.map(of_one, xs).sum()

    jaxpr, leaves = flat(jax.grad(loss), W, jnp.stack([X, X + 1]))
    jaxpr = flattened(jaxpr)
    (pair,) = pairs(jaxpr, price)
    inner = {id for option in pair.options for id, _ in option.inner}
    of_branches = {id for o in pair.options for _, loop in o.inner for id, _ in loop.inner}
    assert len(inner) == 1 and len(of_branches) == 1
    for option in pair.options:
        assert_equal(results(rewrite(jaxpr, {pair.id: option}), leaves), results(jaxpr, leaves))


def test_residuals_of_branches_are_recomputed_in_the_backward_branch():
    jaxpr, _ = flat(jax.value_and_grad(chosen), W, X, 2)
    (pair,) = pairs(jaxpr, price)
    changed = rewrite(jaxpr, {pair.id: pair.options[0]})
    forward, _ = (eqn for eqn in changed.eqns if eqn.primitive.name == "cond")
    _, _, carries = forward.outvars
    assert carries.aval.shape[1:] == X.shape
    assert pair.options[0].bytes < pair.as_written.bytes / 2
    with pytest.raises(PlanError, match=r"branches 2-6\.0, 2-6\.1, 2-6\.2"):
        rewrite(jaxpr, {pair.id: ScanOption((), 0, 0.0, 0.0)})


def test_all_pairs_of_a_program_are_rewritten_together():
    def loss(w, x):
        return stack(w, x) + stack(w, 2 * x, reverse=True)

    jaxpr, args = flat(jax.value_and_grad(loss), W, X)
    found = pairs(jaxpr, price)
    assert len(found) == 2
    changed = rewrite(jaxpr, {pair.id: pair.options[0] for pair in found})
    assert_equal(results(changed, args), results(jaxpr, args))
    assert pairs(changed, price)[0].as_written.bytes < found[0].as_written.bytes


def test_equations_with_effects_are_not_repeated():
    jaxpr, args = flat(jax.value_and_grad(printing), W, X)
    (pair,) = pairs(jaxpr, price)
    in_groups = [o for o in (*pair.options, *pair.by_group) if o.group > 1]
    assert in_groups
    for option in (*pair.options, *pair.by_group):
        CALLS.clear()
        results(rewrite(jaxpr, {pair.id: option}), args)
        jax.effects_barrier()
        assert len(CALLS) == len(W)


def test_choices_for_other_programs_are_refused():
    jaxpr, _ = flat(jax.value_and_grad(stack), W, X)
    (pair,) = pairs(jaxpr, price)
    with pytest.raises(PlanError, match="no loop 7-9"):
        rewrite(jaxpr, {"7-9": pair.options[0]})
    with pytest.raises(PlanError, match="the plan saves 999"):
        rewrite(jaxpr, {pair.id: ScanOption((999,), 0, 0.0, 0.0)})
    with pytest.raises(PlanError, match="cannot be recomputed"):
        rewrite(jaxpr, {pair.id: ScanOption((), 0, 0.0, 0.0)})
    with pytest.raises(PlanError, match="1 groups of 5"):
        rewrite(jaxpr, {pair.id: ScanOption(pair.options[0].saved, 0, 0.0, 0.0, 5, 1)})


def test_without_choices_a_program_stays_as_it_is():
    jaxpr, _ = flat(jax.value_and_grad(stack), W, X)
    assert rewrite(jaxpr, {}) is jaxpr
    assert opened(jaxpr) is jaxpr


def test_recomputed_equations_keep_their_source_lines_and_names():
    def named(c, w):
        with jax.named_scope("mixer"):
            return jnp.tanh(jnp.sin(c @ w) @ w), None

    def places(program):
        eqns = jaxprs.equations(program)
        return {
            (_jax.source_line_of(e), _jax.name_stack_of(e))
            for e in eqns
            if e.primitive.name == "sin"
        }

    jaxpr, _ = flat(jax.value_and_grad(functools.partial(stack, body=named)), W, X)
    (pair,) = pairs(jaxpr, price)
    changed = rewrite(jaxpr, {pair.id: pair.options[0]})
    backward = scans(changed)[-1]
    assert len(places(jaxpr)) == 1
    assert places(changed) == places(jaxpr)
    assert places(_jax.open_jaxpr(backward.params["jaxpr"])) == places(jaxpr)


# --------------------------------------------------------------------------------------------------
# Options


def test_options_are_pareto_optimal_and_include_the_program_as_written():
    jaxpr, _ = flat(jax.value_and_grad(stack), W, X)
    (pair,) = pairs(jaxpr, price)
    assert [o.bytes for o in pair.options] == sorted({o.bytes for o in pair.options})
    seconds = [o.seconds for o in pair.options]
    assert seconds == sorted(set(seconds), reverse=True)
    assert pair.as_written.seconds == pair.options[-1].seconds == 0
    assert pair.options[-1].bytes <= pair.as_written.bytes
    least = at_price(pair.options, max(prices(pair.options)))
    assert least == pair.options[0] and at_price(pair.options, 0.0) == pair.options[-1]


def test_options_between_others_fill_the_budgets_of_long_loops():
    w = jax.ShapeDtypeStruct((48, 64, 64), jnp.float32)
    jaxpr, _ = flat(jax.value_and_grad(stack), w, jnp.zeros((512, 64)))
    (pair,) = pairs(jaxpr, price)
    assert pair.between and not set(pair.between) & set(pair.options)
    every = sorted((*pair.options, *pair.between), key=lambda o: o.bytes)
    seconds = [o.seconds for o in every]
    assert seconds == sorted(set(seconds), reverse=True)
    model = StepModel(PricedStep(jaxpr, price))
    least, most = model.smallest("written").model_bytes, model.as_written("written").model_bytes
    budgets = [int(n) for n in np.linspace(1.1 * least, most, 40)]
    found = [model.within("written", n) for n in budgets]
    costs = [proposal.extra_seconds for proposal in found]
    assert costs == sorted(costs, reverse=True)
    chosen = {option for proposal in found for _, option in proposal.decisions.loops.choices}
    assert chosen & set(pair.between) and chosen & set(pair.options)


def test_the_smallest_proposal_is_that_of_the_level_that_needs_least():
    w = jax.ShapeDtypeStruct((80, 32, 32), jnp.float32)
    jaxpr, _ = flat(jax.value_and_grad(stack), w, jnp.zeros((64, 32)))
    model = StepModel(PricedStep(jaxpr, price))
    smallest = model.smallest("written").model_bytes
    for share in (0.5, 0.7, 0.9, 0.99):
        with pytest.raises(BudgetError):
            model.within("written", int(share * smallest))


@pytest.mark.parametrize(
    ("batched", "policy"),
    [
        (False, jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
        (True, jax.checkpoint_policies.dots_saveable),
    ],
)
def test_options_that_keep_matrix_products_recompute_what_the_policies_do(batched, policy):
    def attend(c, w):
        scores = jnp.einsum("bqd,bkd->bqk", c @ w, c)
        return c + jnp.tanh(jax.nn.softmax(scores) @ jnp.sin(c)), None

    w, x = jnp.ones((6, 16, 16)), jnp.ones((2, 8, 16))
    jaxpr, _ = flat(jax.grad(functools.partial(stack, body=attend)), w, x)
    by_hand, _ = flat(
        jax.grad(functools.partial(stack, body=jax.checkpoint(attend, policy=policy))), w, x
    )
    (pair,) = pairs(jaxpr, price)
    option = pair.by_product[batched]
    products = flops_of_products(rewrite(jaxpr, {pair.id: option}))
    assert products == flops_of_products(by_hand) >= flops_of_products(jaxpr)
    assert (products == flops_of_products(jaxpr)) == batched


def flops_of_products(jaxpr):
    return sum(
        flops_of(eqn)
        for eqn in jaxprs.equations(jaxpr, programs_of)
        if eqn.primitive.name == "dot_general"
    )


def test_bytes_are_those_of_the_stacks():
    jaxpr, _ = flat(jax.value_and_grad(stack), W, X)
    (pair,) = pairs(jaxpr, price)
    for option in pair.options:
        if option.group == 1 and not option.groups:
            forward = scans(rewrite(jaxpr, {pair.id: option}))[0]
            assert option.bytes == sum(v.aval.size * 4 for v in forward.outvars[1:])


def test_flops_of_recomputation_are_those_that_the_program_gains():
    def total(program):
        return sum(map(flops_of, program.eqns))

    jaxpr, _ = flat(jax.value_and_grad(stack), jnp.zeros((6, 8, 8)), X)
    (pair,) = pairs(jaxpr, price)
    assert any(o.group > 1 for o in pair.options)
    for option in pair.options:
        gained = total(rewrite(jaxpr, {pair.id: option})) - total(jaxpr)
        # Two loops instead of one compute the indices of their slices.
        assert gained == pytest.approx(option.flops, abs=100 if option.groups else 1)


def layer_with_table(c, w):
    """Values that do not depend on the step are computed before the loop, unless they are in a checkpoint."""
    table = jnp.cos(jnp.arange(8.0) / 8)[None]
    return (c @ w * table + jnp.sin(c @ w) * table) @ w, None


@pytest.mark.parametrize("body", [layer, layer_with_table])
@pytest.mark.parametrize("wrap", [remat.checkpoint, jax.checkpoint])
def test_opened_checkpoint_has_the_options_of_the_loop_without(wrap, body):
    def options(body):
        jaxpr, _ = flat(jax.value_and_grad(functools.partial(stack, body=body)), W, X)
        (pair,) = pairs(opened(jaxpr), price)
        return pair

    plain, checkpointed = options(body), options(wrap(body))
    # The backward scan reads the table, too, if it recomputes the values for which the forward scan uses it.
    table_bytes = 8 * 4
    assert [o.seconds for o in plain.options] == [o.seconds for o in checkpointed.options]
    for one, other in zip(plain.options, checkpointed.options):
        assert 0 <= other.bytes - one.bytes <= table_bytes
    # As written, the carry is kept and everything else is recomputed.
    assert 0 <= checkpointed.as_written.bytes - W.shape[0] * X.size * 4 <= table_bytes
    assert checkpointed.as_written.seconds > 0


def test_stacks_that_are_returned_stay_and_cost_nothing():
    jaxpr, _ = flat(*STEPS["a stack that is returned"][:1], W, X)
    (pair,) = pairs(jaxpr, price)
    changed = rewrite(jaxpr, {pair.id: pair.options[0]})
    assert [v.aval for v in changed.outvars] == [v.aval for v in jaxpr.outvars]


# --------------------------------------------------------------------------------------------------
# Memory


def test_broadcasts_that_were_moved_out_of_a_loop_are_not_kept_for_its_backward_scan():
    def masked(c, w):
        mask = jnp.arange(8)[:, None] >= jnp.arange(8)
        return jnp.tanh(jnp.where(mask, jnp.sin(c[:, None] * w), -1.0).sum(1)), None

    jaxpr, _ = flat(jax.value_and_grad(functools.partial(stack, body=masked)), W, X)
    (pair,) = pairs(jaxpr, price)
    assert any(v.aval.shape == (6, 8, 8) for eqn in jaxpr.eqns for v in eqn.outvars)
    for eqn in scans(rewrite(jaxpr, {pair.id: pair.options[0]})):
        assert all(v.aval.shape != (6, 8, 8) for v in eqn.invars)
    forward = scans(rewrite(jaxpr, {pair.id: pair.by_step}))[0]
    # The mask before it is broadcast, and a scalar, are held for the backward scan.
    held = pair.by_step.bytes - sum(v.aval.size * 4 for v in forward.outvars[1:])
    assert held <= 8 * 8 + 4


def test_constants_are_computed_in_steps_if_there_is_no_memory_for_them():
    points, c = jnp.ones((200, 8)), jnp.ones((200, 4))
    step = jax.value_and_grad(with_distances)
    jaxpr, args = flat(step, points, jnp.ones((6, 4, 4)), c)

    def reads_differences(program):
        return any(v.aval.shape == (200, 200, 8) for eqn in scans(program) for v in eqn.invars)

    (pair,) = pairs(jaxpr, price)
    assert reads_differences(jaxpr)
    assert not pair.options[-1].computes_constants
    few, many = (
        pair.options[0],
        min((o for o in pair.options if not o.computes_constants), key=lambda o: o.bytes),
    )
    smaller, larger = (rewrite(jaxpr, {pair.id: option}) for option in (few, many))
    assert reads_differences(larger) and not reads_differences(smaller)
    assert few.seconds > many.seconds
    assert are_alone(smaller) == [False]  # compilers would move the constants out of the loop
    assert temporaries(smaller, args) < 0.6 * temporaries(larger, args)
    gained = sum(map(flops_of, smaller.eqns)) - sum(map(flops_of, jaxpr.eqns))
    assert few.flops == pytest.approx(gained, rel=0.2)


def stack_of(body, steps=8, width=64, rows=1024):
    w = jax.random.normal(KEY, (steps, width, width)) / 8
    return flat(jax.value_and_grad(functools.partial(stack, body=body)), w, jnp.ones((rows, width)))


def test_fewest_bytes_need_no_more_memory_than_checkpointed_steps():
    jaxpr, args = stack_of(layer)
    (pair,) = pairs(jaxpr, price)
    in_steps = [o for o in pair.options if o.group == 1]
    by_hand = temporaries(*stack_of(jax.checkpoint(layer)))
    chosen = [in_steps[0], in_steps[len(in_steps) // 2], in_steps[-1]]
    found = [temporaries(rewrite(jaxpr, {pair.id: o}), args) for o in chosen]
    assert found == sorted(found)
    assert found[0] <= 1.03 * by_hand
    assert found[-1] <= temporaries(jaxpr, args)


@pytest.mark.parametrize(("length", "sizes"), [(3, [1, 1, 1]), (7, [2, 1, 3]), (8, [2, 4, 4])])
def test_options_in_groups_keep_what_steps_keep_that_are_recomputed_one_by_one(length, sizes):
    jaxpr, args = flat(jax.value_and_grad(stack), jnp.ones((length, 8, 8)), X)
    (pair,) = pairs(jaxpr, price)
    assert [o.group for o in pair.by_group] == sizes
    for option in set(pair.by_group):
        assert option.saved == pair.by_step.saved
        assert_equal(results(rewrite(jaxpr, {pair.id: option}), args), results(jaxpr, args))


def test_groups_need_no_more_memory_than_those_by_hand():
    """Not even where both scans read slices of the same array."""

    def by_hand(w, x):
        def of_group(c, w):
            return stack_in(jax.checkpoint(layer), c, w), None

        w = w.reshape(4, 2, *w.shape[1:])
        return jax.lax.scan(jax.checkpoint(of_group), x, w)[0].sum()

    def stack_in(body, c, w):
        return jax.lax.scan(body, c, w)[0]

    jaxpr, args = stack_of(layer, rows=256)
    (pair,) = pairs(jaxpr, price)
    needed = temporaries(rewrite(jaxpr, {pair.id: pair.by_group[0]}), args)
    assert needed <= 1.001 * temporaries(*flat(jax.value_and_grad(by_hand), *args))


def loops_of_one_step(body, w, x):
    for i in range(len(w)):
        x, _ = jax.lax.scan(body, x, w[i : i + 1])
    return x.sum()


def unrolled_loop(body, w, x):
    return stack(w, x, body, unroll=4)


@pytest.mark.parametrize("loss", [loops_of_one_step, unrolled_loop])
def test_recomputation_in_loops_that_are_inlined_is_not_undone(loss):
    def program(body):
        w = jax.random.normal(KEY, (4, 64, 64)) / 8
        return flat(jax.value_and_grad(functools.partial(loss, body)), w, jnp.ones((1024, 64)))

    jaxpr, args = program(deep_layer)
    choices = {pair.id: pair.options[0] for pair in pairs(jaxpr, price)}
    least = temporaries(rewrite(jaxpr, choices), args)
    assert least <= 1.05 * temporaries(*program(remat.checkpoint(deep_layer)))
    assert least <= 0.7 * temporaries(jaxpr, args)


def deep_layer(c, w):
    for _ in range(6):
        c = jnp.tanh(jnp.sin(c @ w) @ w)
    return c, None


# --------------------------------------------------------------------------------------------------
# Random programs


@st.composite
def bodies(draw):
    """Draw bodies of a few random operations, on a carry, a slice and a constant."""
    ops = draw(
        st.lists(
            st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9)),
            min_size=2,
            max_size=7,
        )
    )

    def body(constant, carry, slice_):
        values = [carry, slice_, constant, carry * slice_]
        for kind, a, b in ops:
            x, y = values[a % len(values)], values[b % len(values)]
            made = (jnp.sin(x), jnp.tanh(x), x @ constant, x * y, x + y, jnp.exp(-x * x))
            values.append(made[kind] / 2)
        return values[-1] + carry / 2, values[-2]

    return body


@pytest.mark.parametrize(
    ("loss", "is_alone"),
    [
        (stack, True),
        (functools.partial(loops_of_one_step, layer), False),
        (functools.partial(unrolled_loop, layer), False),
    ],
)
def test_only_loops_from_which_nothing_can_be_moved_need_no_function(loss, is_alone):
    """Compilers that expand barriers early merge recomputation with what a loop is inlined beside."""
    jaxpr, _ = flat(jax.value_and_grad(loss), W, X)
    pair, *_ = pairs(jaxpr, price)
    assert are_alone(rewrite(jaxpr, {pair.id: pair.by_step})) == [is_alone]


def test_a_step_that_is_left_over_by_groups_is_no_loop_and_needs_a_function():
    jaxpr, _ = flat(jax.value_and_grad(stack), jnp.ones((7, 8, 8)), X)
    (pair,) = pairs(jaxpr, price)
    groups_of_two = rewrite(jaxpr, {pair.id: pair.by_group[0]})
    assert sorted(are_alone(groups_of_two)) == [False, True]


def are_alone(jaxpr):
    """Return for each region whether it is alone in a loop's body."""
    eqns = jaxprs.equations(jaxpr, programs_of)
    return [eqn.params["is_alone"] for eqn in eqns if eqn.primitive.name == "remat"]


@given(
    bodies(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([lambda f: f, jax.checkpoint, remat.checkpoint]),
)
@settings(max_examples=5)
def test_random_bodies_give_the_same_gradients(body, reverse, uses_ys, wrap):
    def loss(constant, init, xs):
        step = wrap(functools.partial(body, constant))
        carry, ys = jax.lax.scan(step, init, xs, reverse=reverse)
        return carry.sum() + (jnp.cos(ys).sum() if uses_ys else 0.0)

    x = X[:6, :6] / 2
    jaxpr, args = flat(
        jax.value_and_grad(loss, (0, 1, 2)), x, x, jnp.stack([x, x + 1, x - 1, 2 * x])
    )
    expected = results(jaxpr, args)
    program = opened(jaxpr)
    for pair in pairs(program, price):
        for option in (pair.options[0], pair.options[len(pair.options) // 2]):
            changed = rewrite(program, {pair.id: option})
            for one, other in zip(results(changed, args), expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_options_inside_are_tried_in_the_gaps_between_those_at_one_price():
    def layers(c, w):
        for _ in range(3):
            c = jnp.tanh(c @ w) * jnp.sin(c)
        return c

    def step(w, x):
        def outer(c, _):
            return jnp.sin(jax.lax.scan(lambda c, _: (layers(c, w), None), c, None, 64)[0]), None

        return jax.lax.scan(outer, x, None, 2)[0].sum()

    jaxpr, _ = flat(jax.grad(step), jnp.ones((8, 8)), jnp.ones((256, 8)))
    (pair,) = pairs(jaxpr, price)
    of_inner = sorted({option.bytes for pair in pair.options for _, option in pair.inner})
    assert len(of_inner) > 8
    ratios = [few / many for few, many in itertools.pairwise(of_inner) if few]
    assert min(ratios) > 0.4


@pytest.mark.parametrize("length", [7, 20])
def test_no_option_has_a_single_group_which_compilers_would_inline(length):
    weights = jnp.ones((length, 8, 8))
    jaxpr, _ = flat(jax.value_and_grad(stack), weights, jnp.ones((64, 8)))
    (pair,) = pairs(jaxpr, price)
    in_groups = [o for o in pair.options if o.group > 1]
    assert in_groups
    assert all((o.groups or length // o.group) > 1 for o in in_groups)


def beside_products(n_products):
    """Return a step of a loop and of matrix products that take most of the time."""
    w = jax.ShapeDtypeStruct((80, 32, 32), jnp.float32)

    def loss(w, x, big):
        for _ in range(n_products):
            big = jnp.tanh(big @ big)
        return stack(w, x) + big.sum()

    jaxpr, _ = flat(jax.value_and_grad(loss), w, jnp.zeros((512, 32)), jnp.zeros((1024, 1024)))
    return PricedStep(jaxpr, price)


def test_levels_of_a_loop_that_hardly_matters_are_few():
    alone, beside = (loop_choices(beside_products(n)) for n in (0, 40))
    assert len(alone.levels) > 20 and len(beside.levels) < len(alone.levels) / 2
    least_bytes = [option.bytes for c in (alone, beside) for _, option in c.levels[-1][0].choices]
    assert len(least_bytes) == 2 and least_bytes[0] == least_bytes[1]
    seconds = [seconds for _, seconds in beside.levels[1:]]  # without the program as it is written
    least = AS_LONG * beside_products(40).computing_seconds
    assert all(b - a >= least for a, b in itertools.pairwise(seconds[1:]))


def test_programs_share_the_loops_in_which_they_do_not_differ():
    def two(w, x):
        return stack(w, x) + stack(w + 1, x)

    jaxpr, _ = flat(jax.value_and_grad(two), W, X)
    one, other = pairs(jaxpr, price)
    fixed, changing = one.options[0], other.options
    bodies = [
        {_jax.scan_body(eqn) for eqn in scans(rewrite(jaxpr, {one.id: fixed, other.id: option}))}
        for option in (changing[0], changing[-1])
    ]
    assert len(bodies[0] & bodies[1]) >= 2


@jax.custom_vjp
def in_chunks(h):
    """Return the sum of softplus over chunks of rows. Its backward rule scans the same chunks."""
    return jax.lax.map(lambda rows: jax.nn.softplus(rows).sum(), h).sum()


in_chunks.defvjp(
    lambda h: (in_chunks(h), h),
    lambda h, g: (jax.lax.map(lambda rows: g * jax.nn.sigmoid(rows), h),),
)


@pytest.mark.parametrize("percent", [75, 50, 35])
def test_loops_that_read_cotangents_stay_in_backward_steps(percent):
    """Segments carry a memory of each layer, as in Transformer-XL, and end in a loss computed in chunks."""

    def step(w, x):
        def loss(w):
            def segment(memories, x):
                def layer(h, of_layer):
                    w, memory = of_layer
                    both = jnp.concatenate([memory, h], 1)
                    scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", h @ w, both))
                    return h + jnp.tanh(jnp.einsum("bqk,bkd->bqd", scores, both) @ w.T), h

                h, memories = jax.lax.scan(layer, x, (w, memories))
                return memories, in_chunks(h.reshape(4, -1, h.shape[-1]))

            memories = jnp.zeros((w.shape[0], *x.shape[1:]))
            return jax.lax.scan(segment, memories, x)[1].mean()

        return jax.value_and_grad(loss)(w)

    w = jax.random.normal(jax.random.key(0), (3, 32, 32)) / 12
    x = jax.random.normal(jax.random.key(1), (8, 2, 16, 32))
    expected = jax.jit(step)(w, x)
    plan = remat.plan(step, w, x, budget=f"{percent}%", cache=False)
    found = remat.fit(step, plan=plan)(w, x)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * float(abs(other).max()))


def _chained(h, w):
    return jnp.tanh(jnp.sin(h @ w) + h), None


@pytest.mark.parametrize("how", ["before", "after", "unrolled", "stacked"])
def test_scans_of_no_steps_are_their_first_carries(how):
    def loss(w, x):
        def empty(h):
            return jax.lax.scan(lambda h, w: (_chained(h, w)[0], h.sum(1)), h, w[:0])

        if how == "after":
            return empty(jax.lax.scan(_chained, x, w)[0])[0].mean()
        h, stacks = empty(x)
        if how == "unrolled":
            for layer in w:
                h, _ = _chained(h, layer)
            return h.mean()
        h = jax.lax.scan(_chained, h, w)[0]
        return h.mean() + (stacks.sum() + stacks.shape[0] if how == "stacked" else 0.0)

    step = jax.value_and_grad(loss)
    w, x = jax.random.normal(KEY, (8, 32, 32)) / 8, jax.random.normal(KEY, (256, 32))
    plan = remat.plan(step, w, x, budget="70%", cache=False)
    assert plan.peak_bytes <= plan.budget_bytes
    for found, expected in zip(remat.fit(step, plan=plan)(w, x), jax.jit(step)(w, x)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@jax.jit
def _add_to(total, rows, i, value):
    total[...] += value.mean() + rows[...].sum()
    rows[i] += value[0]
    return total[...]


def _counted(c, w, total, rows):
    """Run a layer that updates refs and whose result depends on one of them."""
    i, c = c
    c = layer(c, w)[0]
    c += _add_to(total, rows, i, jax.lax.stop_gradient(c)) / 64
    return (i + 1, c), None


def _with_own_ref(c, w):
    first = jax.new_ref(layer(c, w)[0])
    first[0] = jnp.cos(c[1])
    return layer(first[...], w)[0], None


def _loss_with_refs(where, w, x):
    total, rows = jax.new_ref(jnp.zeros(())), jax.new_ref(jnp.zeros((len(w), x.shape[1])))
    step = functools.partial(_counted, total=total, rows=rows)
    if where == "inside":
        x = jax.lax.scan(_with_own_ref, x, w)[0]
    elif where == "around":
        (_, x), _ = jax.lax.scan(step, (0, x), w)
    else:

        def outer(c, w):
            return jax.lax.scan(step, c, w)

        (_, x), _ = jax.lax.scan(outer, (0, x), w.reshape(-1, 2, *w.shape[1:]))
    return x.mean(), (total[...], rows[...])


@pytest.mark.parametrize("where", ["around", "inside", "around loops in loops"])
def test_all_options_of_loops_that_use_refs_change_no_bit(where):
    step = jax.value_and_grad(functools.partial(_loss_with_refs, where), has_aux=True)
    w = jax.random.normal(KEY, (16, 8, 8)) / 3
    jaxpr, args = flat(step, w, X)
    expected = results(jaxpr, args)
    (pair,) = pairs(jaxpr, price)
    options = list(dict.fromkeys((*pair.options, *pair.by_group)))
    assert any(option.rest is not None for option in options)
    assert where == "around loops in loops" or any(option.group > 1 for option in options)
    for option in options:
        assert_equal(results(rewrite(jaxpr, {pair.id: option}), args), expected)


@pytest.mark.parametrize("where", ["around", "inside", "around loops in loops"])
def test_steps_with_loops_that_use_refs_are_planned(where):
    step = jax.value_and_grad(functools.partial(_loss_with_refs, where), has_aux=True)
    w, x = jax.random.normal(KEY, (12, 32, 32)) / 8, jax.random.normal(KEY, (256, 32))
    plan = remat.plan(step, w, x, budget="60%", cache=False)
    assert plan.peak_bytes <= plan.budget_bytes
    assert_equal(
        jax.tree.leaves(remat.fit(step, plan=plan)(w, x)), jax.tree.leaves(jax.jit(step)(w, x))
    )
