"""The compiler does not undo rematerialization, according to its own figures for temporaries."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import remat
from benchmarks import loop_bodies
from remat import _jax
from remat.transform import barrier

DEPTH, ROWS, WIDTH = 8, 1024, 64


def block(x, w):
    h = jnp.tanh(x @ w)
    h = jax.nn.gelu(h @ w)
    return x + jnp.sin(h) * jnp.cos(h) @ w


def stack(wrap):
    def loss(x, ws):
        f = wrap(block)
        for i in range(DEPTH):
            x = f(x, ws[i])
        return jnp.sum(x * x)

    return loss


def arguments(rows=ROWS):
    x = jnp.asarray(np.sin(np.arange(rows * WIDTH)).reshape(rows, WIDTH), jnp.float32)
    ws = jnp.asarray(np.cos(np.arange(DEPTH * WIDTH * WIDTH)), jnp.float32)
    return x, ws.reshape(DEPTH, WIDTH, WIDTH) * 0.1


def temporaries(step, *args):
    step = step if hasattr(step, "lower") else jax.jit(step)
    return step.lower(*args).compile().memory_analysis().temp_size_in_bytes


def barriers(step, *args):
    step = step if hasattr(step, "lower") else jax.jit(step)
    return step.lower(*args).as_text().count("optimization_barrier")


def _plain(loss):
    return jax.grad(loss, (0, 1)), arguments()


def _second_argument_only(loss):
    return jax.grad(loss, 1), arguments()


def _forward_and_gradient(loss):
    return jax.value_and_grad(loss, (0, 1)), arguments()


def _vmapped(loss):
    x, ws = arguments(ROWS // 4)
    return jax.vmap(jax.grad(loss, (0, 1)), (0, None)), (jnp.stack([x] * 4), ws)


def _vmapped_inside(loss):
    x, ws = arguments(ROWS // 4)
    mapped = jax.vmap(loss, (0, None))
    return jax.grad(lambda x, ws: jnp.sum(mapped(x, ws)), (0, 1)), (jnp.stack([x] * 4), ws)


def _in_loop_body(loss):
    """Return training steps in a scan: forward and backward pass are in one loop body."""
    x, ws = arguments()

    def steps(x, ws):
        def step(ws, _):
            value, g = jax.value_and_grad(loss, 1)(x, ws)
            return ws - 1e-3 * g, value

        return lax.scan(step, ws, None, length=3)

    return steps, (x, ws)


def _in_loop_body_on_slices(loss):
    x, ws = arguments()

    def steps(xs, ws):
        def step(ws, x):
            return ws - 1e-3 * jax.grad(loss, 1)(x, ws), None

        return lax.scan(step, ws, xs)[0]

    return steps, (jnp.stack([x] * 3), ws)


def _in_fori_loop(loss):
    x, ws = arguments()
    step = lambda i, ws: ws - 1e-3 * jax.grad(loss, 1)(x, ws)  # noqa: E731
    return lambda ws: lax.fori_loop(0, 3, step, ws), (ws,)


def _in_while_loop(loss):
    def steps(x, ws):
        step = lambda c: (c[0] + 1, c[1] - 1e-3 * jax.grad(loss, 1)(x, c[1]))  # noqa: E731
        return lax.while_loop(lambda c: c[0] < 3, step, (0, ws))

    return steps, arguments()


def _in_branch(loss):
    def step(x, ws):
        return lax.cond(x[0, 0] > 0, jax.grad(loss, 1), lambda x, ws: ws, x, ws)

    return step, arguments()


def _in_jit(loss):
    return lambda x, ws: jax.jit(jax.grad(loss, (0, 1)))(x, ws), arguments()


def _sharded(loss):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x, ws = arguments(8 * ROWS)
    x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    return jax.grad(loss, (0, 1)), (x, jax.device_put(ws, NamedSharding(mesh, PartitionSpec())))


def _shard_mapped(loss):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def step(x, ws):
        return lax.pmean(jax.grad(loss, 1)(x, lax.pcast(ws, "data", to="varying")), "data")

    specs = PartitionSpec("data"), PartitionSpec()
    step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    return step, arguments(8 * ROWS)


def _exported(loss):
    x, ws = arguments()
    exported = jax.export.export(jax.jit(jax.grad(loss, (0, 1))))(x, ws)
    return jax.export.deserialize(exported.serialize()).call, (x, ws)


SITUATIONS = {
    "under plain jit": _plain,
    "with respect to weights": _second_argument_only,
    "with the value": _forward_and_gradient,
    "under vmap": _vmapped,
    "around vmap": _vmapped_inside,
    "in a loop body": _in_loop_body,
    "in a loop body on slices": _in_loop_body_on_slices,
    "in fori_loop": _in_fori_loop,
    "in while_loop": _in_while_loop,
    "in a branch": _in_branch,
    "in an inner jit": _in_jit,
    "sharded over 8 devices": _sharded,
    "in shard_map": _shard_mapped,
    "after export": _exported,
}
WRAPS = {
    "checkpoint": remat.checkpoint,
    "prevent_cse for each argument": lambda f: remat.checkpoint(f, prevent_cse=(True, False)),
    "nested": lambda f: remat.checkpoint(lambda x, w: remat.checkpoint(f)(jnp.sin(x), w)),
    "jit inside": lambda f: remat.checkpoint(jax.jit(f)),
    "jit outside": lambda f: jax.jit(remat.checkpoint(f)),
    "policy": lambda f: remat.checkpoint(f, policy=remat.policies.save(max_bytes=1024)),
}


def _ratio(situation, wrap):
    inside = (lambda f: lambda x, w: f(jnp.sin(x), w)) if wrap == "nested" else (lambda f: f)
    return temporaries_of(situation, WRAPS[wrap]) / temporaries_of(situation, inside)


def temporaries_of(situation, wrap):
    step, args = SITUATIONS[situation](stack(wrap))
    return temporaries(step, *args)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_temporaries_fall_by_more_than_half(situation):
    assert _ratio(situation, "checkpoint") <= 0.4


@pytest.mark.parametrize("wrap", [w for w in WRAPS if w != "checkpoint"])
@pytest.mark.parametrize("situation", ["under plain jit", "in a loop body"])
def test_temporaries_fall_by_more_than_half_with_other_wrappers(situation, wrap):
    assert _ratio(situation, wrap) <= 0.4


@pytest.mark.parametrize("situation", SITUATIONS)
def test_prevent_cse_false_leaves_out_every_barrier(situation):
    step, args = SITUATIONS[situation](stack(lambda f: remat.checkpoint(f, prevent_cse=False)))
    text = jax.jit(step).lower(*args).as_text()
    assert "optimization_barrier" not in text
    assert "inlineable" not in text


def test_the_forward_pass_has_no_barrier():
    assert barriers(stack(remat.checkpoint), *arguments()) == 0


def test_each_region_of_the_backward_pass_has_one_barrier():
    assert barriers(jax.grad(stack(remat.checkpoint), (0, 1)), *arguments()) == DEPTH


def test_a_derivative_in_forward_mode_saves_nothing_and_needs_no_barrier():
    x, ws = arguments()
    assert barriers(lambda x, ws: jax.jvp(stack(remat.checkpoint), (x, ws), (x, ws)), x, ws) == 0


def scanned(wrap, reverse=False, unroll=1):
    def loss(x, ws):
        f = wrap(block)
        advance = lambda c, w: (f(c, w), None)  # noqa: E731
        return jnp.sum(lax.scan(advance, x, ws, reverse=reverse, unroll=unroll)[0] ** 2)

    return loss


def with_closed_over_weights(wrap):
    def loss(x, ws):
        f = wrap(block)
        advance = lambda c, z: (f(c, ws[0] + z), None)  # noqa: E731
        return jnp.sum(lax.scan(advance, x, jnp.arange(8.0))[0] ** 2)

    return loss


def with_an_output_at_each_step(wrap):
    def loss(x, ws):
        f = wrap(block)

        def advance(c, w):
            y = f(c, w)
            return y, jnp.sum(y)

        last, sums = lax.scan(advance, x, ws)
        return jnp.sum(last * last) + jnp.sum(sums)

    return loss


def in_fori_loop(wrap):
    f = wrap(block)
    return lambda x, ws: jnp.sum(lax.fori_loop(0, DEPTH, lambda i, c: f(c, ws[i]), x) ** 2)


def nested_regions(wrap):
    return scanned(lambda f: wrap(lambda x, w: wrap(f)(wrap(f)(x, w), w)))


def named(wrap):
    def inner(x, w):
        return block(remat.checkpoint_name(jnp.sin(block(x, w)), "middle"), w)

    return scanned(lambda _: wrap(inner))


LOOPS = [
    scanned, with_closed_over_weights, with_an_output_at_each_step, in_fori_loop,
    lambda wrap: scanned(wrap, reverse=True), named,
]  # fmt: skip
LOOP_IDS = ["scan", "closed-over weights", "outputs", "fori_loop", "reverse", "saved name"]


# How compilers treat a recomputation in a loop that runs once, is unrolled, or computes the same in every
# step.

_KEEPS_BARRIERS = barrier.protection("cpu", _jax.JAXLIB_VERSION) is barrier.Protection.BARRIER


@pytest.mark.parametrize("program", loop_bodies.PROGRAMS)
def test_recomputation_in_loops_saves_memory(program):
    x, ws = loop_bodies.stack(4, 512, 32)
    used = {
        way: loop_bodies.temporaries(program, way, x, ws)
        for way in loop_bodies.WAYS
        if way != "jax.checkpoint" or _KEEPS_BARRIERS
    }
    assert used["remat.checkpoint"] <= 0.8 * used["without"]
    if _KEEPS_BARRIERS:
        assert used["remat.checkpoint"] <= 1.01 * used["jax.checkpoint"]


def _one_step(x, ws):
    return lax.scan(lambda c, w: (remat.checkpoint(block)(c, w), None), x, ws[:1])[0]


def _unrolled(x, ws):
    step = lambda c, w: (remat.checkpoint(block)(c, w), None)  # noqa: E731
    return lax.scan(step, x, ws, unroll=2)[0]


def _on_a_constant(x, ws):
    """Return a scan whose layer reads only loop constants; another operation reads the carry."""
    step = lambda c, w: (c * remat.checkpoint(block)(x, ws[0]) * w[0, 0], None)  # noqa: E731
    return lax.scan(step, x, ws)[0]


def _on_a_constant_in_part(x, ws):
    f = remat.checkpoint(lambda c, w: block(c, jnp.tanh(ws[0])) * w[0, 0])
    return lax.scan(lambda c, w: (f(c, w), None), x, ws)[0]


def _on_an_unchanged_carry(x, ws):
    f = remat.checkpoint(lambda c, k, w: c * jnp.sin(k) * w[0, 0])
    step = lambda c, w: ((f(*c, w), c[1]), None)  # noqa: E731
    (x, _), _ = lax.scan(step, (x, x), ws)
    return x


def _twice_a_step(x, ws):
    f = remat.checkpoint(block)
    return lax.scan(lambda c, w: (f(f(c, w), w), None), x, ws)[0]


def _beside_others(x, ws):
    f = remat.checkpoint(block)
    return lax.scan(lambda c, w: (jnp.sin(f(jnp.tanh(c), w)), None), x, ws)[0]


def _with_a_loop_inside(x, ws):
    inner = lambda c, w: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c @ w), c)  # noqa: E731
    return lax.scan(lambda c, w: (remat.checkpoint(inner)(c, w), None), x, ws)[0]


@pytest.mark.parametrize(
    "loop",
    [_one_step, _unrolled, _on_a_constant, _on_a_constant_in_part, _on_an_unchanged_carry,
     _twice_a_step, _beside_others, _with_a_loop_inside],
)  # fmt: skip
def test_protection_stays_in_a_loop(loop):
    x, ws = arguments(8)
    assert barriers(jax.grad(lambda x, ws: jnp.sum(loop(x, ws)), (0, 1)), x, ws) >= 1


def test_names_of_functions_do_not_matter():
    def closed_call(x, ws):
        return jax.grad(lambda x: jnp.sum(remat.checkpoint(block)(x, ws[0])))(x)

    def eval_jaxpr(x, ws):
        return lax.scan(lambda c, w: (jax.jit(closed_call)(c, ws), None), x, ws[:1])[0]

    assert barriers(eval_jaxpr, *arguments(8)) == 1


@pytest.mark.parametrize("loop", LOOPS, ids=LOOP_IDS)
def test_in_loop_bodies_protection_costs_no_memory(loop):
    policy = remat.policies.save("middle", strict=False)

    def gradient(prevent_cse):
        wrap = lambda f: remat.checkpoint(f, prevent_cse=prevent_cse, policy=policy)  # noqa: E731
        return jax.jit(jax.grad(loop(wrap), (0, 1)))

    args = arguments()
    assert barriers(gradient(True), *args) >= 1
    assert barriers(gradient(False), *args) == 0
    assert temporaries(gradient(True), *args) <= 1.05 * temporaries(gradient(False), *args)


@pytest.mark.parametrize("transform", [jax.vmap, jax.jit], ids=["vmap", "jit"])
def test_in_loop_bodies_protection_costs_no_memory_under(transform):
    args = arguments(128)

    def gradient(prevent_cse):
        g = jax.grad(scanned(lambda f: remat.checkpoint(f, prevent_cse=prevent_cse)), (0, 1))
        return jax.jit(jax.vmap(g, (0, None)) if transform is jax.vmap else jax.jit(g))

    if transform is jax.vmap:
        args = (jnp.stack([args[0]] * 2), args[1])
    assert barriers(gradient(True), *args) >= 1
    assert temporaries(gradient(True), *args) <= 1.05 * temporaries(gradient(False), *args)


def test_a_region_between_two_loops_is_protected():
    def inner(x, ws):
        for i in range(DEPTH):
            x = block(x, ws[i])
        return x

    def loss(wrap, x, ws):
        def advance(c, _):
            return wrap(inner)(c, ws), None

        return jnp.sum(wrap(inner)(lax.scan(advance, x, None, length=2)[0], ws))

    args = arguments()
    assert barriers(jax.grad(lambda *args: loss(remat.checkpoint, *args)), *args) >= 1


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_empty_and_scalar_residuals_are_no_obstacle(shape):
    f = remat.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
    x = jnp.ones(shape)
    g = jax.jit(jax.grad(lambda x: jnp.sum(f(x))))
    np.testing.assert_allclose(g(x), np.cos(np.sin(x)) * np.cos(x), rtol=1e-6)


def _split(x):
    a, b = jnp.split(jnp.sin(x), 2)
    return jnp.sum(a * b) + jnp.sum(jnp.cos(x) * lax.stop_gradient(x))


def _chosen(x):
    a, b = jnp.split(jnp.sin(x), 2)
    return jnp.sum(a * b) + jnp.sum(jnp.cos(jnp.cos(x)[np.array([0, 1, 0, 2])]))


def _best(x):
    a, b = jnp.split(jnp.sin(x), 2)
    return jnp.sum(a * b * jnp.sin(lax.top_k(jnp.cos(x), 2)[0]))


@pytest.mark.parametrize("program", [_split, _chosen, _best])
@pytest.mark.parametrize("policy", ["save", "offload"])
def test_saved_values_that_the_compiler_merges_are_not_overwritten(program, policy):
    # sin(x) is saved twice: as a value of the program and as the derivative of cos.
    f = remat.checkpoint(program, policy=getattr(remat.policies, policy)(primitive="sin"))
    x = jnp.arange(1, 5.0) / 3
    np.testing.assert_allclose(jax.jit(jax.grad(f))(x), jax.grad(program)(x), rtol=1e-5, atol=1e-6)


def _barriers_on_a_gpu(step, *args):
    """Return the operands of each barrier of a step that is lowered for a GPU."""
    lowered = jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",))
    lines = [line for line in lowered.as_text().splitlines() if "optimization_barrier" in line]
    return [re.findall(r"%\w+", line.split("optimization_barrier")[1]) for line in lines]


@pytest.mark.parametrize("program, n_values", [(_split, 3), (_chosen, 6), (_best, 4)])
def test_on_gpus_saved_values_that_the_compiler_merges_pass_the_barrier_once(program, n_values):
    f = remat.checkpoint(program, policy=remat.policies.save(primitive="sin"))
    # The cotangent, 1, is among them.
    before, after = _barriers_on_a_gpu(jax.grad(f), jnp.ones(4))
    assert len(before) == len(set(before)) == n_values
    assert len(after) == 1


def test_on_gpus_results_of_a_recomputation_pass_a_barrier_together():
    x, ws = arguments(8)
    found = _barriers_on_a_gpu(jax.grad(stack(remat.checkpoint), (0, 1)), x, ws)
    # Of each block the input, the weights and the cotangent, then the gradients of the first two.
    assert [len(operands) for operands in found] == [3, 2] * DEPTH


def test_on_gpus_inputs_that_are_results_pass_one_barrier():
    # The cotangent of y is that of the result.
    f = remat.checkpoint(lambda x, y: jnp.sin(x) * 2 + y)
    step = lambda x, y, g: jax.vjp(f, x, y)[1](g)  # noqa: E731
    found = _barriers_on_a_gpu(step, *[jnp.ones(4)] * 3)
    assert [len(operands) for operands in found] == [2, 1]


def test_on_gpus_values_beside_the_barrier_that_are_inside_too_come_from_it():
    f = remat.checkpoint(lambda x, y: jnp.sin(x) * y[::-1], prevent_cse=(True, False))
    step = lambda x, g: jax.vjp(lambda x: f(x, x), x)[1](g)  # noqa: E731
    text = jax.jit(step).trace(*[jnp.ones(4)] * 2).lower(lowering_platforms=("cuda",)).as_text()
    behind = text.split("optimization_barrier", 1)[1].split("optimization_barrier")[0]
    assert not re.search(r"= stablehlo.*%arg", behind)
