"""The model of how compilers fuse, on hand-made programs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from remat.ir.operations import Fusion
from remat.program.from_jaxpr import automatic_shards, program_of_jaxpr
from remat.program.fusion import fuse
from remat.program.program import Op, Program
from remat.solvers.simulate import no_remat

MB = 1_000_000


def op(kind, operands, *results, **more):
    return Op(kind.value, kind, tuple(operands), tuple(results), **more)


def program(ops, outputs, sizes=None, inputs=(0,)):
    n = 1 + max(v for o in ops for v in (*o.operands, *o.results))
    of = [MB] * n
    for v, size in (sizes or {}).items():
        of[v] = size
    return Program(tuple(ops), tuple(of), ("f32[]",) * n, frozenset(inputs), tuple(outputs))


def fused(p, **options):
    return fuse(p, lambda flops, moved, dtype: flops + moved, **options)


def nodes(f, p):
    """Return the values that are written, by number."""
    return sorted(f.holds)


def test_elementwise_chain_between_matmuls_is_one_written_value():
    p = program(
        [
            op(Fusion.KERNEL, [0], 1),
            op(Fusion.CHEAP, [1], 2),
            op(Fusion.COSTLY, [2], 3),
            op(Fusion.CHEAP, [3], 4),
            op(Fusion.KERNEL, [4], 5),
        ],
        [5],
    )
    f = fused(p)
    assert nodes(f, p) == [1, 4, 5]
    # The result of the chain may reuse the matmul's buffer.
    assert [node.id for node in f.graph.nodes if node.bytes] == [3]
    assert f.holds[1] == 3
    assert f.ops[3] == (0, 1, 2, 3)


def test_views_are_their_operands():
    p = program(
        [op(Fusion.KERNEL, [0], 1), op(Fusion.VIEW, [1], 2), op(Fusion.KERNEL, [2], 3)], [3]
    )
    f = fused(p)
    assert nodes(f, p) == [1, 3]
    assert f.graph.nodes[1].deps == (0,)


def test_view_of_a_value_that_is_returned_is_an_output():
    p = program([op(Fusion.KERNEL, [0], 1), op(Fusion.VIEW, [1], 2)], [2])
    assert no_remat(fused(p).graph).peak_bytes == 0
    assert fused(p).output_buffers == {0: (MB,)}


def test_costly_value_is_computed_by_kernels_far_from_each_other():
    def chain(length):
        between = [op(Fusion.KERNEL, [3 + n], 4 + n) for n in range(length)]
        end = op(Fusion.CHEAP, [2, 3 + length], 4 + length)
        ops = [op(Fusion.KERNEL, [0], 1), op(Fusion.COSTLY, [1], 2), op(Fusion.KERNEL, [1], 3)]
        return program(
            [*ops, op(Fusion.REDUCE, [2], 5 + length), *between, end], [4 + length, 5 + length]
        )

    far, near = chain(20), chain(2)
    assert 2 in nodes(fused(far), far)
    assert 2 not in nodes(fused(far, costly_inside=True), far)
    assert 2 in nodes(fused(near, costly_inside=True), near)


def test_sums_that_may_be_joined_share_a_costly_value_that_is_not_written():
    costly = op(Fusion.COSTLY, [0], 2)
    sums = [op(Fusion.REDUCE, [2], 3), op(Fusion.REDUCE, [2], 4)]
    p = program([costly, *sums], [3, 4], {3: 8, 4: 8})
    assert 2 in nodes(fused(p), p)
    assert 2 not in nodes(fused(p, joins_sums=True), p)
    # The second sum depends on the first. A barrier may separate them, and then both compute the value.
    scaled = op(Fusion.CHEAP, [2, 3], 5)
    in_turn = program([costly, sums[0], scaled, op(Fusion.REDUCE, [5], 4)], [4], {3: 8, 4: 8})
    assert 2 in nodes(fused(in_turn, joins_sums=True), in_turn)
    assert 2 in nodes(fused(in_turn, costly_inside=True), in_turn)
    assert 2 not in nodes(fused(in_turn, joins_sums=True, costly_inside=True), in_turn)
    # A kernel that is not a sum does not join one.
    other = program([costly, sums[0], op(Fusion.CHEAP, [2], 6)], [3, 6], {3: 8})
    assert 2 in nodes(fused(other, joins_sums=True, costly_inside=True), other)


def test_costly_value_that_two_kernels_use_is_written():
    for kind, expected in ((Fusion.COSTLY, [2, 3, 4]), (Fusion.CHEAP, [3, 4])):
        p = program(
            [op(kind, [0], 2), op(Fusion.REDUCE, [2], 3), op(Fusion.REDUCE, [2], 4)],
            [3, 4],
            {3: 8, 4: 8},
        )
        assert nodes(fused(p), p) == expected


def test_values_that_one_kernel_uses_twice_are_not_written():
    """XLA computes such a value once inside of the kernel, whatever it costs."""
    kernels = [op(Fusion.KERNEL, [0], 1), op(Fusion.KERNEL, [0], 2)]
    uses = [op(Fusion.CHEAP, [3], 4), op(Fusion.CHEAP, [3], 5), op(Fusion.REDUCE, [4, 5], 6)]
    for first in (op(Fusion.CHEAP, [1, 2], 3), op(Fusion.COSTLY, [1], 3)):
        once = program([*kernels, first, *uses], [6], {6: 8})
        twice = program([*once.ops, op(Fusion.REDUCE, [3], 7)], [6, 7], {6: 8, 7: 8})
        for duplicates in (True, False):
            assert 3 not in nodes(fused(once, duplicates=duplicates), once)
            assert 3 in nodes(fused(twice, duplicates=duplicates), twice)


def test_cheap_value_that_two_kernels_use_is_written_where_they_do_not_duplicate():
    ops = [op(Fusion.CHEAP, [0], 2), op(Fusion.REDUCE, [2], 3), op(Fusion.REDUCE, [2], 4)]

    def written(p):
        return nodes(fused(p, duplicates=False), p)

    assert written(program(ops, [3, 4], {3: 8, 4: 8})) == [2, 3, 4]
    # One kernel computes it inline, and so does each kernel that reads a value computed from something small.
    assert written(program(ops[:2], [3], {3: 8})) == [3]
    assert written(program(ops, [3, 4], {0: 8, 3: 8, 4: 8})) == [3, 4]
    # The differences of all pairs are made from two small values, and are written.
    pairs = [op(Fusion.CHEAP, [0, 1], 2), *ops[1:]]
    assert written(program(pairs, [3, 4], {0: 32, 1: 32, 3: 8, 4: 8})) == [2, 3, 4]
    assert written(program(pairs, [3, 4], {0: 32, 1: 8, 3: 8, 4: 8})) == [3, 4]


@pytest.mark.parametrize("duplicates", [True, False])
def test_kernels_compute_small_values_such_as_means_themselves(duplicates):
    """A kernel that reads or writes a much larger value computes them; small kernels read them."""

    def written(large):
        p = program(
            [
                op(Fusion.REDUCE, [0], 1),
                op(Fusion.REDUCE, [0], 2),
                op(Fusion.CHEAP, [1, 2], 3),  # from two sums
                op(Fusion.CHEAP, [3, 0] if large else [3], 4),
                op(Fusion.KERNEL, [4], 5),
                op(Fusion.CHEAP, [3, 0] if large else [3], 6),
                op(Fusion.KERNEL, [6], 7),
            ],
            [5, 7],
            sizes=dict.fromkeys((1, 2, 3), MB // 1000) | ({} if large else {4: 1000, 6: 1000}),
        )
        return 3 in nodes(fused(p, duplicates=duplicates), p)

    assert not written(large=True)
    assert written(large=False)


def test_residual_stream_is_written_where_reading_its_terms_costs_more():
    # Two kernels use x + f(x); each would have to read both terms.
    p = program(
        [
            op(Fusion.KERNEL, [0], 1),
            op(Fusion.KERNEL, [1], 2),
            op(Fusion.CHEAP, [1, 2], 3),
            op(Fusion.REDUCE, [3], 4),
            op(Fusion.REDUCE, [3], 5),
        ],
        [4, 5],
        {4: 8, 5: 8},
    )
    assert 3 in fused(p).holds
    # With only one large term, each kernel computes it from that term.
    p = dataclasses.replace(p, bytes=(MB, MB, 8, MB, 8, 8))
    assert 3 not in fused(p).holds


def test_softmax_is_one_kernel():
    # max, exp(x - max), sum, division: the division overwrites the matmul's result.
    p = program(
        [
            op(Fusion.KERNEL, [0], 1),
            op(Fusion.REDUCE, [1], 2),
            op(Fusion.CHEAP, [1, 2], 3),
            op(Fusion.COSTLY, [3], 4),
            op(Fusion.REDUCE, [4], 5),
            op(Fusion.COSTLY, [4, 5], 6),
            op(Fusion.KERNEL, [6], 7),
        ],
        [7],
        {2: 1000, 5: 1000},
    )
    f = fused(p)
    large = [node for node in f.graph.nodes if node.bytes >= MB]
    assert len(large) == 1
    assert no_remat(f.graph).peak_bytes == MB


def test_a_matmul_does_not_write_in_place_of_its_operands():
    matmul_and_tanh = [op(Fusion.KERNEL, [1], 2), op(Fusion.COSTLY, [2], 3)]
    p = program([op(Fusion.COSTLY, [0], 1), *matmul_and_tanh, op(Fusion.KERNEL, [3], 4)], [4])
    f = fused(p)
    assert {f.holds[1], f.holds[3]} == {0, 2} and f.holds[2] == f.holds[3]
    assert no_remat(f.graph).peak_bytes == 2 * MB


def sum_of_matmuls(n):
    """Return a program of matmuls whose results are added up, each as soon as it is computed."""
    ops = [op(Fusion.KERNEL, [0], 1)]
    total = 1
    for i in range(1, n):
        addition = dataclasses.replace(op(Fusion.CHEAP, [total, 2 * i], 2 * i + 1), name="add_any")
        ops += [op(Fusion.KERNEL, [0], 2 * i), addition]
        total = 2 * i + 1
    return program([*ops, op(Fusion.KERNEL, [total], 2 * n)], [2 * n])


def test_a_sum_of_many_values_keeps_all_of_them_unless_partial_sums_are_written():
    p = sum_of_matmuls(10)
    # The sum may reuse the buffer of one of the values.
    plain = fused(p)
    assert not plain.partial_sums and no_remat(plain.graph).peak_bytes == 10 * MB
    split = fused(p, partial_sums=0)
    assert split.partial_sums == set(range(2, 18, 2))
    assert no_remat(split.graph).peak_bytes == 2 * MB
    assert not fused(p, partial_sums=11 * MB).partial_sums


def test_sums_of_few_values_and_sums_that_are_read_elsewhere_stay_whole():
    assert not fused(sum_of_matmuls(5), partial_sums=0).partial_sums
    p = sum_of_matmuls(10)
    read = program([*p.ops, op(Fusion.CHEAP, [9], 21)], [20, 21])
    assert 8 not in fused(read, partial_sums=0).partial_sums


def test_outputs_are_in_buffers_of_their_own():
    p = program(
        [op(Fusion.KERNEL, [0], 1), op(Fusion.KERNEL, [1], 2), op(Fusion.KERNEL, [2], 3)], [2, 3]
    )
    assert no_remat(fused(p).graph).peak_bytes == MB
    assert fused(p).output_buffers == {1: (MB,), 2: (MB,)}


def test_workspace_lives_as_long_as_its_operation():
    p = program(
        [op(Fusion.KERNEL, [0], 1), op(Fusion.KERNEL, [1], 2, workspace_bytes=5 * MB),
         op(Fusion.KERNEL, [2], 3)],
        [3],
    )  # fmt: skip
    f = fused(p)
    assert no_remat(f.graph).peak_bytes == 7 * MB
    work = [node for node in f.graph.nodes if node.name.startswith("workspace")]
    assert [node.bytes for node in work] == [5 * MB]


def test_loops_in_a_row_update_one_buffer_that_starts_as_zeros():
    def peak(of, **sizes):
        return no_remat(fused(of, **sizes).graph).peak_bytes

    # 1 is initialized, two loops add to it, and the last kernel reads it.
    ops = [op(Fusion.CHEAP, [], 1), op(Fusion.KERNEL, [0, 1], 2, in_place=((1, 2),)),
           op(Fusion.KERNEL, [0, 2], 3, in_place=((2, 3),)), op(Fusion.KERNEL, [3], 4)]  # fmt: skip
    assert peak(program(ops, [4])) == MB
    assert 0 in fused(program(ops, [4])).once
    # The buffer is that of the result.
    assert peak(program(ops[:3], [3])) == 0
    # A value that another kernel reads must not be overwritten, nor a value that was computed from others.
    assert peak(program([*ops, op(Fusion.KERNEL, [2], 5)], [4, 5])) == 2 * MB
    ops[0] = op(Fusion.KERNEL, [0], 1)
    assert peak(program(ops, [4])) == 2 * MB


def test_products_compute_their_elementwise_operands_where_compilers_do_so():
    product = dataclasses.replace(op(Fusion.KERNEL, [2], 3), name="dot_general")
    last = dataclasses.replace(product, operands=(2, 4), results=(5,))
    between = op(Fusion.KERNEL, [3], 4)
    ops = [op(Fusion.KERNEL, [0], 1), op(Fusion.COSTLY, [1], 2), product, between, last]
    p = program(ops, [5])
    assert 2 in nodes(fused(p), p)
    assert 2 not in nodes(fused(p, into_products=True), p)


def test_the_body_of_a_loop_occupies_bytes_per_device_whether_or_not_it_is_constrained():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    def workspace(keep, shards=4):
        def one(c, x):
            x = keep(jnp.sort(keep(x)))
            return c + jnp.sort(x @ x.T).sum(), None

        def step(xs):
            return jax.lax.scan(one, jnp.zeros(()), xs)[0]

        jaxpr = jax.make_jaxpr(step)(jnp.zeros((2, 64, 64))).jaxpr
        return program_of_jaxpr(jaxpr, [shards]).ops[-1].workspace_bytes

    assert 4 * workspace(lambda x: x) == workspace(lambda x: x, shards=1) > 64 * 64 * 4
    assert workspace(lambda x: jax.lax.with_sharding_constraint(x, rows)) == workspace(lambda x: x)


def test_what_must_not_be_repeated_is_known_with_the_results():
    p = program(
        [op(Fusion.KERNEL, [0], 1), op(Fusion.KERNEL, [1], 2, repeatable=False),
         op(Fusion.KERNEL, [2], 3)],
        [3],
    )  # fmt: skip
    f = fused(p)
    assert [node.id in f.once for node in f.graph.nodes] == [False, True, False, True]


def test_kernel_reads_what_is_written_and_inputs():
    p = program(
        [op(Fusion.KERNEL, [0], 1), op(Fusion.CHEAP, [1, 0], 2), op(Fusion.KERNEL, [2, 0], 3)], [3]
    )
    f = fused(p)
    assert f.seconds[2] == 3 * MB  # reads value 2 and the input, writes value 3


def test_loop_costs_the_kernels_of_all_its_steps():
    def run(x):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ c) @ c, None), x, length=50)[0]

    p = program_of_jaxpr(jax.make_jaxpr(run)(jnp.ones((2, 2))).jaxpr)
    (loop,) = p.ops
    assert loop.kernels == 50 * 3
    launches = fuse(p, lambda flops, moved, dtype: float(flops + moved > 0))
    assert launches.graph.time == loop.kernels


def test_branches_cost_the_kernels_of_the_longer_one():
    def run(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    p = program_of_jaxpr(jax.make_jaxpr(run)(jnp.ones((2, 2))).jaxpr)
    assert [op.kernels for op in p.ops if op.name == "cond"] == [2]


def test_loops_update_what_starts_as_a_constant_in_its_memory():
    def run(x, ys):
        def add(n):
            return lambda c, y: (c + n * jnp.outer(y, y), None)

        sums, _ = jax.lax.scan(add(1), jnp.zeros((64, 64)), ys)
        sums, _ = jax.lax.scan(add(2), sums, ys)
        return (sums @ x).sum()

    x, ys = jnp.ones((64, 4)), jnp.ones((3, 64))
    p = program_of_jaxpr(jax.make_jaxpr(run)(x, ys).jaxpr)
    f = fused(p)
    buffers = [node for node in f.graph.nodes if node.bytes == 64 * 64 * 4]
    assert sum(node.bytes for node in f.graph.nodes) < 4 * 64 * 64 * 4
    assert {node.id for node in buffers} & f.once
    (product,) = [i for i, op in enumerate(p.ops) if op.name == "dot_general"]
    deps = next(node.deps for node in f.graph.nodes if node.id == product)
    assert {node.id for node in buffers} & f.once <= set(deps)


def with_loop_of_two_results(**more):
    """Return a program whose loop has a small result, read last, and a large one, read earlier."""
    return program(
        [
            op(Fusion.KERNEL, [0], 1, 2, **more),
            op(Fusion.KERNEL, [2], 3),
            op(Fusion.KERNEL, [3], 4),
            op(Fusion.KERNEL, [1, 4], 5),
        ],
        [5],
        sizes={2: 8 * MB},
    )


def test_results_of_one_loop_are_freed_one_by_one():
    p = with_loop_of_two_results()
    together, apart = (no_remat(fused(p, apart=a).graph) for a in (False, True))
    assert together.peak_bytes == 11 * MB
    assert apart.peak_bytes == 10 * MB


def test_results_of_one_loop_are_there_at_once_beside_its_workspace_and_operands():
    p = with_loop_of_two_results(workspace_bytes=4 * MB)
    assert no_remat(fused(p, apart=True).graph).peak_bytes == 13 * MB


def test_results_that_nothing_reads_are_freed_with_the_workspace():
    p = program(
        [op(Fusion.KERNEL, [0], 1, 2), op(Fusion.KERNEL, [1], 3), op(Fusion.KERNEL, [1, 3], 4)],
        [4],
        sizes={2: 2 * MB},
    )
    assert no_remat(fused(p, apart=True).graph).peak_bytes == 3 * MB


def test_other_results_of_a_loop_count_beside_one_that_is_an_output():
    p = program([op(Fusion.KERNEL, [0], 1, 2), op(Fusion.KERNEL, [1], 3)], [2, 3])
    assert no_remat(fused(p).graph).peak_bytes == MB
    assert no_remat(fused(p, apart=True).graph).peak_bytes == MB


def test_kernels_read_only_the_results_of_a_loop_that_they_use():
    f = fused(with_loop_of_two_results())
    assert f.seconds[3] == 3 * MB  # reads two values of one MB, writes one


def test_operations_whose_results_nothing_reads_stay_in_the_graph():
    p = program(
        [
            op(Fusion.KERNEL, [0], 1),
            op(Fusion.KERNEL, [1], repeatable=False),  # a callback
            op(Fusion.KERNEL, [1], 2, 3, repeatable=False),  # a loop that is run for its effects
            op(Fusion.KERNEL, [1], 4),
        ],
        [4],
    )
    assert {0, 1, 2, 3} <= {node.id for node in fused(p, apart=True).graph.nodes}


def test_values_in_a_partly_manual_shard_map_are_divided_by_the_other_axes():
    mesh = jax.make_mesh((2, 4), ("pipe", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def step(x):
        inner = jax.shard_map(
            lambda y: jnp.sin(y @ y.T),
            mesh=mesh,
            axis_names={"pipe"},
            in_specs=P("pipe"),
            out_specs=P("pipe"),
        )
        return inner(x)

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    jaxpr = jax.make_jaxpr(step)(x).jaxpr
    (eqn,) = jaxpr.eqns
    assert automatic_shards(eqn, 8) == 4
    assert automatic_shards(eqn, 1) == 1
    whole, divided = (program_of_jaxpr(jaxpr, [shards]) for shards in (2, 8))
    assert [4 * n for n in divided.bytes[1:]] == list(whole.bytes[1:])


def test_stacks_of_inner_loops_take_memory_of_their_own():
    def stacks(x):
        def outer(x, _):
            return jax.lax.scan(lambda c, _: (jnp.sin(c), jnp.cos(c)), x, None, length=4)

        return jax.lax.scan(outer, x, None, length=8)

    x = jnp.ones(1024)
    op = program_of_jaxpr(jax.make_jaxpr(stacks)(x).jaxpr).ops[-1]
    compiled = jax.jit(stacks).lower(x).compile().memory_analysis()
    assert op.workspace_bytes >= 4 * x.nbytes
    assert abs(op.workspace_bytes - compiled.temp_size_in_bytes) < 2 * x.nbytes
