"""How a sharded step is divided among devices, without compiling it."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from remat import _jax
from remat.ir import jaxprs
from remat.planner import scan_pairs
from remat.planner.step import TargetStep
from remat.program.costs import Roofline, slowdowns
from remat.program.devices import device
from remat.program.from_jaxpr import Execution, program_of_jaxpr
from remat.program.partition import UNKNOWN
from remat.program.targets import target

ROWS, WIDTH, INNER = 512, 64, 256


def mesh(*sizes: int) -> Mesh:
    names = ("data", "tensor")[-len(sizes) :]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))


def typed(on: Mesh, shape: tuple[int, ...], *axes) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(on, P(*axes)))


def partitioned(step, *args):
    """Return the program that the planner prices, and its partition."""
    of = TargetStep(step, args, {}, target("cpu"), {})
    unplanned = of.trace()
    return scan_pairs.opened(unplanned.flat), of.partition(unplanned), unplanned


def found(jaxpr, partition, primitive):
    """Return what is sent, and the parts of the results, for the equations of a primitive."""
    eqns = jaxprs.equations(jaxpr, jaxprs.bodies_of)
    return [
        (partition.sent(eqn), partition.parts(eqn))
        for eqn in eqns
        if eqn.primitive.name == primitive
    ]


def tensor_parallel(on):
    """Return a loss with layers of two products, the second of which sums over devices, and its arguments."""

    def layer(x, weights):
        first, second = weights
        return x + jnp.tanh(x @ first) @ second, None

    def loss(weights, x):
        return (jax.lax.scan(layer, x, weights)[0] ** 2).mean()

    weights = (
        typed(on, (4, WIDTH, INNER), None, None, "tensor"),
        typed(on, (4, INNER, WIDTH), None, "tensor", None),
    )
    return loss, (weights, typed(on, (ROWS, WIDTH), "data"))


def test_a_product_along_a_sharded_dimension_sends_its_result_twice():
    loss, args = tensor_parallel(mesh(2, 4))
    jaxpr, partition, _ = partitioned(loss, *args)
    first, second = found(jaxpr, partition, "dot_general")
    assert first == (None, (8,))
    sent, parts = second
    assert parts == (2,)
    assert sent.n_devices == 8 and sent.n_bytes == 2 * 4 * ROWS * WIDTH // 2


def test_values_of_replicated_rows_are_whole_on_each_device():
    """By the operands' shard counts, the result of the second product would be divided by four."""
    loss, args = tensor_parallel(mesh(1, 4))
    jaxpr, partition, unplanned = partitioned(jax.grad(loss), *args)
    known = program_of_jaxpr(jaxpr, unplanned.shards(), Execution(partition=partition))
    counted = program_of_jaxpr(jaxpr, unplanned.shards())

    def stacked_bytes(program, type_):
        (scan, *_) = (op for op in program.ops if op.name == "scan")
        return [program.bytes[v] for v in scan.results if program.types[v] == type_]

    whole, part = 4 * 4 * ROWS * WIDTH, 4 * 4 * ROWS * INNER // 4
    assert set(stacked_bytes(known, f"f32[4,{ROWS},{WIDTH}]")) == {whole}
    assert set(stacked_bytes(counted, f"f32[4,{ROWS},{WIDTH}]")) == {whole // 4}
    assert set(stacked_bytes(known, f"f32[4,{ROWS},{INNER}]")) == {part}


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (1, 8), (8, 1)])
def test_results_are_divided_as_in_the_compiled_program(sizes):
    """Functions that slice and update stacks are called several times, with different shardings."""
    loss, args = tensor_parallel(mesh(*sizes))
    step = jax.grad(loss, argnums=(0, 1))
    jaxpr, partition, unplanned = partitioned(step, *args)
    program = program_of_jaxpr(jaxpr, unplanned.shards(), Execution(partition=partition))
    compiled = jax.jit(step).lower(*args).compile()
    shardings = jax.tree.leaves(compiled.output_shardings)
    shapes = [x.shape for x in jax.tree.leaves(jax.eval_shape(step, *args))]
    expected = [4 * math.prod(s.shard_shape(n)) for s, n in zip(shardings, shapes, strict=True)]
    assert [program.bytes[v] for v in program.outputs] == expected


def test_loops_that_plans_make_are_divided_as_their_bodies_are():
    loss, args = tensor_parallel(mesh(1, 4))
    _, partition, unplanned = partitioned(loss, *args)

    def half(weights, x):
        return loss(jax.tree.map(lambda w: w[:2], weights), x)

    shorter, _, _ = partitioned(half, *args)
    (scan,) = (eqn for eqn in shorter.eqns if eqn.primitive.name == "scan")
    assert partition.parts(scan) is None
    program = program_of_jaxpr(shorter, unplanned.shards(), Execution(partition=partition))
    (op,) = (op for op in program.ops if op.name == "scan")
    assert program.bytes[op.results[0]] == 4 * ROWS * WIDTH


def test_a_sum_over_devices_takes_the_time_of_the_links():
    loss, args = tensor_parallel(mesh(1, 4))
    jaxpr, partition, _ = partitioned(loss, *args)
    v5e = device("v5e")
    slowdown = slowdowns(Roofline(v5e), v5e, partition)
    eqns = [
        e for e in jaxprs.equations(jaxpr, jaxprs.bodies_of) if e.primitive.name == "dot_general"
    ]
    first, second = eqns
    assert slowdown(first) == 1
    n_flops, n_bytes = (
        2 * ROWS * WIDTH * INNER / 4,
        4 * (ROWS * INNER + INNER * WIDTH + ROWS * WIDTH) / 4,
    )
    local_s = Roofline(v5e).seconds(n_flops, n_bytes)
    link_s = Roofline(v5e).link_seconds(2 * 4 * ROWS * WIDTH)
    assert slowdown(second) == pytest.approx(1 + link_s / local_s)
    (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    assert slowdown(scan) > 1


@pytest.mark.parametrize("before", [jnp.cos, lambda x: x], ids=["computed", "an_argument"])
@pytest.mark.parametrize("to", [(None, "tensor"), ("tensor", None), (None, None)])
def test_a_constraint_that_redistributes_a_value_is_a_kernel(to, before):
    on = mesh(4)

    def step(x):
        return jnp.sin(jax.lax.with_sharding_constraint(before(x), NamedSharding(on, P(*to))))

    jaxpr, partition, unplanned = partitioned(step, typed(on, (ROWS, WIDTH), "tensor"))
    ((sent, _),) = found(jaxpr, partition, "sharding_constraint")
    execution = Execution(slowdowns(Roofline(device("v5e")), device("v5e"), partition), partition)
    program = program_of_jaxpr(jaxpr, unplanned.shards(), execution)
    (op,) = (op for op in program.ops if op.name == "sharding_constraint")
    if to == ("tensor", None):
        assert sent is None and op.slowdown == 1
    else:
        n_parts = 4 if "tensor" in to else 1
        assert sent.n_bytes == 4 * ROWS * WIDTH // n_parts
        assert op.slowdown > 1 and op.fusion.name == "KERNEL"
        assert program.bytes[op.results[0]] == 4 * ROWS * WIDTH // n_parts


def test_the_readers_of_a_constrained_value_may_gather_it():
    """The partitioner writes what a reader needs at the value that it reads."""
    on = mesh(4)

    def step(x):
        divided = jax.lax.with_sharding_constraint(x, NamedSharding(on, P("tensor")))
        whole = jax.lax.with_sharding_constraint(divided, NamedSharding(on, P()))
        return jnp.sin(divided), whole

    jaxpr, partition, _ = partitioned(step, typed(on, (ROWS, WIDTH), "tensor"))
    first, second = found(jaxpr, partition, "sharding_constraint")
    assert first == (None, (4,))
    assert second[0].n_bytes == 4 * ROWS * WIDTH and second[1] == (1,)


def test_a_carry_that_is_redistributed_is_sent_in_each_step():
    on = mesh(4)

    def step(x):
        def body(x, _):
            whole = jax.lax.with_sharding_constraint(x, NamedSharding(on, P()))
            return jax.lax.with_sharding_constraint(
                jnp.sin(whole), NamedSharding(on, P("tensor"))
            ), None

        return jax.lax.scan(body, x, length=3)[0]

    jaxpr, partition, _ = partitioned(step, typed(on, (ROWS, WIDTH), "tensor"))
    (gathered, _), (divided, _) = found(jaxpr, partition, "sharding_constraint")
    assert gathered.n_bytes == 4 * ROWS * WIDTH and divided is None


def test_equations_in_functions_that_are_called_several_times_are_recognized():
    on = mesh(4)

    @jax.jit
    def product(x, w):
        return x @ w

    def step(x, w):
        return product(product(x, w[0]), w[1])

    args = typed(on, (ROWS, WIDTH), None, "tensor"), typed(on, (2, WIDTH, WIDTH), None, "tensor")
    jaxpr, partition, _ = partitioned(step, *args)
    sent = [sent for sent, _ in found(jaxpr, partition, "dot_general")]
    # A sum over devices sends the bytes of its result twice: the parts of the sum, and the sums.
    assert [s.n_bytes for s in sent] == 2 * [2 * 4 * ROWS * WIDTH]


def test_the_results_of_a_shard_map_are_divided_as_it_says():
    on = mesh(4)

    def step(x, w):
        product = jax.shard_map(
            lambda x, w: jnp.tanh(x @ w),
            mesh=on,
            in_specs=(P("tensor"), P()),
            out_specs=P("tensor"),
        )
        return jnp.sin(product(x, w))

    args = typed(on, (ROWS, WIDTH), "tensor"), typed(on, (WIDTH, WIDTH))
    jaxpr, partition, unplanned = partitioned(step, *args)
    (eqn,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map")
    assert partition.parts(eqn) is None
    program = program_of_jaxpr(jaxpr, unplanned.shards(), Execution(partition=partition))
    made = {op.name: program.bytes[op.results[0]] for op in program.ops}
    assert {made[name] for name in ("dot_general", "tanh", "sin")} == {ROWS * WIDTH}


def test_nothing_is_known_of_a_step_on_one_device():
    _, partition, _ = partitioned(lambda x: x @ x, jnp.ones((8, 8)))
    assert partition is UNKNOWN and not partition.is_known


def test_a_partition_does_not_change_the_step(caplog):
    """The passes run on a copy of the lowered program."""
    loss, args = tensor_parallel(mesh(2, 4))
    step = TargetStep(loss, args, {}, target("cpu"), {})
    unplanned = step.trace()
    before = unplanned.lowered().as_text()
    step.partition(unplanned)
    assert unplanned.lowered().as_text() == before and not caplog.records


def test_with_another_partitioner_nothing_is_known():
    loss, args = tensor_parallel(mesh(2, 4))
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        _, partition, _ = partitioned(loss, *args)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    assert not partition.is_known


def test_a_program_that_the_passes_cannot_read_is_planned_without_its_partition(monkeypatch):
    loss, args = tensor_parallel(mesh(2, 4))

    def refused(lowered):
        raise _jax.NotPartitionedError("a pass failed")

    monkeypatch.setattr(_jax, "partitioned", refused)
    _, partition, _ = partitioned(loss, *args)
    assert partition is UNKNOWN
