"""Optimizer state in the host's memory: which leaves, the results of the step, and the plan."""

from __future__ import annotations

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat
from remat.errors import PlanError
from remat.planner.host_state import find_host_state
from remat.planner.host_updates import chunk_shape
from remat.program.targets import target

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="no libtpu")
ALONE = {"cache": False, "progress": False}
DONATED = {"donate_argnums": (0, 1)}
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def loss(weights, x):
    for w in weights:
        x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)


def adam(p, g, m, v, n):
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
    return m, v, (m / (1 - 0.9**n)) / (jnp.sqrt(v / (1 - 0.99**n)) + 1e-8) + 0.01 * p


def step(weights, state, x, *, ratio=False):
    """Take a step of AdamW or, with `ratio`, of LAMB, whose rate depends on a norm of the update."""
    moments, n = state
    value, gradient = jax.value_and_grad(loss)(weights, x)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradient))
    new_weights, new_moments = [], []
    for p, g, (m, v) in zip(weights, gradient, moments):
        m, v, u = adam(p, g / jnp.maximum(norm, 1.0), m, v, n)
        rate = jnp.linalg.norm(p) / jnp.linalg.norm(u) if ratio else 1.0
        new_weights.append(p - 1e-3 * rate * u)
        new_moments.append((m, v))
    return new_weights, (new_moments, n + 1), value


def scanned_loss(weights, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"] + w["bias"], None

    return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)


def scanned_step(weights, moments, x, *, clip=False):
    """Take a step of SGD with momentum for layers in a scan; with `clip` the gradient's norm is limited."""
    value, gradient = jax.value_and_grad(scanned_loss)(weights, x)
    if clip:
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))
        gradient = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), gradient)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradient)
    weights = jax.tree.map(lambda w, m: 0.999 * w - 0.01 * m, weights, moments)
    return weights, moments, value


def scanned_arguments(layers=3, width=256, rows=32):
    keys = iter(jax.random.split(jax.random.key(0), 3))
    shapes = {"up": (width, 2 * width), "down": (2 * width, width), "bias": (width,)}
    weights = {
        name: 0.05 * jax.random.normal(next(keys), (layers, *shape))
        for name, shape in shapes.items()
    }
    x = jnp.linspace(-1, 1, rows * width).reshape(rows, width)
    return weights, jax.tree.map(jnp.zeros_like, weights), x


def arguments(width=512, rows=64):
    weights = [jnp.full((width, width), 0.01 * k) for k in (1, 2)]
    zero = [(jnp.zeros_like(w), jnp.zeros_like(w)) for w in weights]
    x = jnp.linspace(-1, 1, rows * width).reshape(rows, width)
    return weights, (zero, jnp.float32(1)), x


def with_host_memory():
    """Treat the CPU as a device with host memory: programs compile copies that they do not need."""
    cpu = target("cpu")
    return dataclasses.replace(cpu, device=dataclasses.replace(cpu.device, has_host_memory=True))


def returned_to_the_device(found, fun, spaces):
    """Run a hosted step with arguments and results on the device."""
    hosted = found.hosted(fun)

    def run(*args):
        leaves, tree = jax.tree.flatten((args, {}))
        for at in found.positions:
            leaves[at] = jax.device_put(leaves[at], HOST)
        args, _ = jax.tree.unflatten(tree, leaves)
        out = hosted(*args)
        spaces.append([jax.typeof(leaf).memory_space for leaf in jax.tree.leaves(out)])
        return jax.device_put(out, DEVICE)

    return jax.jit(run)


def assert_same_results(found, fun, args, n_steps, atol):
    """Compare a hosted step with the step itself; return the memory of each of its results."""
    spaces = []
    hosted, plain = returned_to_the_device(found, fun, spaces), jax.jit(fun)
    one, other = args[:2], args[:2]
    for _ in range(n_steps):
        *one, value = hosted(*one, args[2])
        *other, expected = plain(*other, args[2])
    for a, b in zip(jax.tree.leaves((one, value)), jax.tree.leaves((other, expected))):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol)
    return spaces[0]


@pytest.mark.parametrize("ratio", [False, True])
def test_a_step_with_its_moments_on_the_host_computes_the_same(ratio):
    def fun(*args):
        return step(*args, ratio=ratio)

    args = arguments()
    found = find_host_state(fun, args, {}, with_host_memory(), DONATED)
    assert found.leaves == (2, 3, 4, 5)  # neither the weights nor the step number
    spaces = assert_same_results(found, fun, args, 3, 1e-7)
    assert spaces == [DEVICE] * 2 + [HOST] * 4 + [DEVICE] * 2


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    ("kinds", "leaves"),
    [({"weights"}, (1, 2)), ({"optimizer"}, (4, 5)), ({"optimizer", "weights"}, (1, 2, 4, 5))],
)
def test_a_step_with_its_weights_on_the_host_computes_the_same(kinds, leaves, clip):
    """Weights that a scan reads layer by layer are fetched in its iterations. The biases are too small."""

    def fun(*args):
        return scanned_step(*args, clip=clip)

    args = scanned_arguments()
    found = find_host_state(fun, args, {}, with_host_memory(), DONATED, kinds)
    assert found.leaves == leaves
    spaces = assert_same_results(found, fun, args, 2, 1e-6)
    assert [at for at, space in enumerate(spaces) if space == HOST] == list(leaves)


def test_weights_that_more_than_loops_and_updates_read_stay_on_the_device():
    def decayed(weights, moments, x):
        *new, value = scanned_step(weights, moments, x)
        return *new, value + jnp.sum(weights["up"][0] @ weights["down"][0])

    def cast(weights, moments, x):
        half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
        value, gradient = jax.value_and_grad(scanned_loss)(half, x.astype(jnp.bfloat16))
        return jax.tree.map(lambda w, g: w - g.astype(w.dtype), weights, gradient), moments, value

    args = scanned_arguments()
    for fun, given in ((decayed, args), (cast, args), (step, arguments())):
        with pytest.raises(
            PlanError, match=r"offload='weights' found no weights: .*slice by slice"
        ):
            find_host_state(fun, given, {}, with_host_memory(), DONATED, {"weights"})


def test_state_on_one_device_has_types_in_the_hosts_memory():
    # JAX's types do not say that an array with a `SingleDeviceSharding` is in the host's memory.
    args, spaces = jax.eval_shape(arguments), []
    found = find_host_state(step, args, {}, with_host_memory(), DONATED)
    moved, _ = found.moved(args, {}, with_host_memory())
    jax.jit(lambda *a: spaces.extend(jax.typeof(x).memory_space for x in jax.tree.leaves(a))).trace(
        *moved
    )
    assert [at for at, space in enumerate(spaces) if space == HOST] == list(found.leaves)


def test_state_that_is_not_donated_or_read_by_more_than_updates_stays_on_the_device():
    def reads_more(weights, state, x):
        m = state[0][0][0]
        *new, value = step(weights, state, x)
        return *new, value + jax.lax.dot(m, m)[0, 0]

    args = arguments()
    with pytest.raises(PlanError, match="found no optimizer state"):
        find_host_state(step, args, {}, with_host_memory(), {})
    found = find_host_state(reads_more, args, {}, with_host_memory(), DONATED)
    assert found.leaves == (3, 4, 5)


def test_a_target_without_host_memory_is_refused():
    with pytest.raises(PlanError, match=r"offload='optimizer' needs memory of the host"):
        remat.plan(step, *arguments(), budget="90%", offload="optimizer", **DONATED, **ALONE)


def test_an_unknown_kind_of_value_to_offload_is_refused_with_the_possible_ones():
    for fun in (remat.fit, lambda f, **options: remat.plan(f, **options)):
        with pytest.raises(PlanError, match=r"unknown 'optimiser'.*'activations\|optimizer'"):
            fun(step, budget="1GiB", offload="optimiser")


@pytest.mark.parametrize("shape", [(4096, 4096), (32, 1024, 96), (8, 33, 16384), (64, 4096)])
def test_chunks_of_an_array_are_whole_rows_and_at_most_a_half(shape):
    stacked = chunk_shape(shape, 4)
    assert np.prod(stacked) == np.prod(shape) and stacked[-1] == shape[-1] and stacked[0] >= 2
    assert stacked[-2] % 32 == 0 or stacked[-2] == shape[-2]


@needs_libtpu
@pytest.mark.parametrize("n_devices", [1, 4])
def test_a_plan_for_tpu_with_the_moments_on_the_host_needs_less_as_it_will_run(n_devices):
    at = target("tpu:v5e:1x1" if n_devices == 1 else "tpu:v5e:2x2")
    mesh = at.mesh((n_devices,), ("data",))

    def typed(leaf):
        spec = ("data",) if leaf.ndim else ()
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    args = jax.tree.map(typed, jax.eval_shape(lambda: arguments(2048, 1024)))
    options = {"budget": "100%", "target": at, "verify": "as run", **DONATED, **ALONE}
    device = remat.plan(step, *args, offload=False, **options)
    plan = remat.plan(step, *args, offload="optimizer", **options)
    of_state = 4 * 2048 * 2048 * 4 // n_devices
    assert plan.host_arguments == (2, 3, 4, 5) and plan.host_bytes == of_state
    assert plan.peak_bytes < device.peak_bytes - of_state // 2
    assert plan.transfer_seconds > 0
    fitted = remat.fit(step, plan=remat.Plan.from_json(plan.to_json()), target=at, **DONATED)
    compiled = fitted.lower(*args).compile()
    kinds = [s.memory_kind for s in jax.tree.leaves(compiled.output_shardings)]
    assert [k == "pinned_host" for k in kinds] == [False] * 2 + [True] * 4 + [False] * 2
    assert "dynamic-update-slice-start" in compiled.as_text()


@needs_libtpu
@pytest.mark.parametrize("n_devices", [1, 4])
def test_a_plan_for_tpu_with_the_weights_on_the_host_needs_less_as_it_will_run(n_devices):
    at = target("tpu:v5e:1x1" if n_devices == 1 else "tpu:v5e:2x2")
    mesh = at.mesh((n_devices,), ("data",))

    def typed(leaf):
        spec = (None, "data")[: leaf.ndim] if leaf.ndim > 2 else ()
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    args = jax.tree.map(typed, jax.eval_shape(lambda: scanned_arguments(4, 2048, 1024)))
    options = {"budget": "1GiB", "target": at, "verify": "as run", **DONATED, **ALONE}
    device = remat.plan(scanned_step, *args, offload=False, **options)
    plan = remat.plan(scanned_step, *args, offload="optimizer|weights", **options)
    of_arrays = 2 * 4 * 2 * 2 * 2048 * 2048 * 4 // n_devices
    assert plan.host_arguments == (1, 2, 4, 5) and plan.host_bytes >= of_arrays
    assert plan.peak_bytes < device.peak_bytes - of_arrays // 2
    fitted = remat.fit(
        scanned_step, plan=remat.Plan.from_json(plan.to_json()), target=at, **DONATED
    )
    kinds = [s.memory_kind for s in jax.tree.leaves(fitted.lower(*args).compile().output_shardings)]
    assert [at for at, kind in enumerate(kinds) if kind == "pinned_host"] == [1, 2, 4, 5]


@needs_libtpu
def test_a_plan_for_one_tpu_without_a_mesh_is_followed():
    args = jax.eval_shape(lambda: arguments(1024, 512))
    options = {"target": "tpu:v5e:1x1", **DONATED}
    plan = remat.plan(
        step, *args, budget="100%", offload="optimizer", verify="fast", **options, **ALONE
    )
    assert plan.host_arguments == (2, 3, 4, 5)
    remat.fit(step, plan=plan, **options).lower(*args)
